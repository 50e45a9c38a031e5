"""Dead letters on order: messages that are sent over HTTP and killed by consumers, or by time."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from urllib.parse import quote

from penstock.client import PhpmqClient, PhpmqMessage
from tests.http.api import NDJSON, Api
from tests.server.harness import WAIT_SECONDS, BrokerProcess, until


def path_of(queue: str, what: str = "") -> str:
    return f"/v1/queues/{quote(queue, safe='')}" + (f"/{what}" if what else "")


def phpmq(broker: BrokerProcess) -> PhpmqClient:
    return PhpmqClient(f"phpmq://127.0.0.1:{broker.ports['phpmq']}")


def take(
    broker: BrokerProcess, queue: str, count: int, verdict: Callable[[PhpmqMessage], object] | None = None
) -> list[bytes]:
    """Take so many messages, say a verdict on each, or none and leave; the bodies."""
    with phpmq(broker) as mq:
        taken = list(mq.consume(queue, prefetch=count, count=count, timeout=WAIT_SECONDS))
        assert len(taken) == count
        for message in taken:
            if verdict is not None:
                verdict(message)
    return [message.body for message in taken]


def send(api: Api, queue: str, bodies: Sequence[bytes], **query: object) -> None:
    """All in one batch; they must be text."""
    lines = b"".join(b'{"value": "%s"}\n' % body.replace(b'"', b'\\"') for body in bodies)
    reply = api.ask("POST", path_of(queue, "batch"), lines, {"Content-Type": NDJSON}, **query)
    assert reply.status == 200, reply


def reject(broker: BrokerProcess, api: Api, queue: str, bodies: Sequence[bytes]) -> None:
    """Dead letters of the reason `rejected`."""
    send(api, queue, bodies)
    take(broker, queue, len(bodies), lambda message: message.reject())


def exhaust(broker: BrokerProcess, api: Api, queue: str, bodies: Sequence[bytes]) -> None:
    """Dead letters of the reason `retries-exhausted`."""
    api.send(queue, *bodies, retries=0)
    take(broker, queue, len(bodies))
    until(lambda: reasons(api, queue).get("retries-exhausted", 0) >= len(bodies), "messages to be given up")


def expire(api: Api, queue: str, bodies: Sequence[bytes]) -> None:
    """Dead letters of the reason `expired`."""
    api.send(queue, *bodies, ttl=1)
    until(lambda: reasons(api, queue).get("expired", 0) >= len(bodies), "messages to expire")


def reasons(api: Api, queue: str) -> dict[str, int]:
    found: dict[str, int] = api.get(path_of(queue))["dead_reasons"]
    return {reason: count for reason, count in found.items() if count}


def ids(api: Api, queue: str, state: str | None = None) -> Counter[str]:
    """The ids of the messages in a state, as often as they are there."""
    found: Counter[str] = Counter()
    start: int | None = 0
    while start is not None:
        page = api.get(path_of(queue, "messages"), from_=start, limit=1000, state=state)
        found.update(message["id"] for message in page["messages"])
        start = page["next"]
    return found


def bodies_left(broker: BrokerProcess, queue: str, count: int) -> list[bytes]:
    """The ready messages of a queue, in the order in which consumers get them; they are gone then."""
    return list(islice(take(broker, queue, count, lambda message: message.ack()), count))
