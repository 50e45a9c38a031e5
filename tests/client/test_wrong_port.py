"""A client that reaches the port of another protocol says so, whatever it is asked to do there."""

import pytest

from penstock.client import ClientError, ConnectionLost, Refused
from tests.client.both import Connect, both
from tests.server.harness import BrokerProcess

PROTOCOLS = ("phpmq", "sspq", "rq", "http")
PAIRS = [(ours, theirs) for ours in PROTOCOLS for theirs in PROTOCOLS if ours != theirs]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@both
async def test_every_pair(kind: Connect, broker: BrokerProcess, ours: str, theirs: str) -> None:
    url = f"{ours}://127.0.0.1:{broker.ports[theirs]}"
    with pytest.raises(ClientError, match="is this the right port") as raised:
        async with kind(url, connect_seconds=0.5, operation_seconds=1) as client:
            await client.queues()  # the one who has said nothing so far is that of HTTP
    assert isinstance(raised.value, ConnectionLost | Refused)
