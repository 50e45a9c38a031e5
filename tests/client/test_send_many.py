"""An error in the middle of `send_many` says how many messages were sent before it, and those are there."""

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.client import NotSupported, PhpmqClient
from tests.client.both import Connect, both
from tests.seeds import some
from tests.server.harness import BrokerProcess

BEFORE = 25_000  # more than any protocol puts into one write, or one batch
PROTOCOLS = pytest.mark.parametrize("protocol", some(["phpmq", "sspq", "rq", "http"], "phpmq", "http"))


async def send_many(
    kind: Connect, broker: BrokerProcess, protocol: str, queue: str, bodies: Iterator[Any]
) -> None:
    async with kind(f"{protocol}://127.0.0.1:{broker.ports[protocol]}", payload_bytes_max=100) as mq:
        await mq.send_many(*(() if protocol == "sspq" else (queue,)), bodies)


def stored(broker: BrokerProcess, queue: str) -> int:
    """How many messages are in a queue, which is empty afterwards."""
    with PhpmqClient(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
        return mq.ack_many(list(mq.consume(queue, prefetch=100_000, timeout=0.5)))


def up_to(wrong: object) -> Iterator[object]:
    for number in range(BEFORE):
        yield b"%d" % number
    if wrong is None:
        raise RuntimeError("the file ends here")
    yield wrong


@PROTOCOLS
@both
async def test_a_message_that_cannot_be_sent(
    kind: Connect, broker: BrokerProcess, protocol: str, queue: str
) -> None:
    queue = "default" if protocol == "sspq" else queue
    with pytest.raises(NotSupported, match=r"101 bytes.*; the first [0-9]+ messages of this call") as raised:
        await send_many(kind, broker, protocol, queue, up_to(b"x" * 101))
    assert 0 < raised.value.sent <= BEFORE
    assert stored(broker, queue) == raised.value.sent


@PROTOCOLS
@pytest.mark.parametrize("wrong", ["text", None])
@both
async def test_an_iterable_that_fails(
    kind: Connect, broker: BrokerProcess, protocol: str, queue: str, wrong: object
) -> None:
    queue = "default" if protocol == "sspq" else queue
    with pytest.raises((TypeError, RuntimeError)) as raised:
        await send_many(kind, broker, protocol, queue, up_to(wrong))
    sent = stored(broker, queue)
    # The RQ client for threads runs it out before it sends anything.
    assert getattr(raised.value, "__notes__", []) == (
        [f"the first {sent} messages of this call were sent before"] if sent else []
    )
    assert sent or (protocol == "rq" and isinstance(raised.value, RuntimeError))
