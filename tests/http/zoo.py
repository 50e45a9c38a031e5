"""A queue with a message in every state, and every way into it; for tests of those who look."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tests.http.api import Api
from tests.http.morgue import path_of, phpmq
from tests.server.harness import WAIT_SECONDS, BrokerProcess, until

ACKED, REJECTED, REQUEUED, REDRIVEN, LOOKED_INTO, HELD, EXPIRED, TTL, READY = range(9)
"""Their offsets: what became of each, or how it stands."""

SECONDS: Final = 600
"""The TTL of those that have one."""

STATES: Final = {
    ACKED: "gone",
    REJECTED: "dead",
    REQUEUED: "ready",
    REDRIVEN: "ready",
    LOOKED_INTO: "dead",  # and with somebody who took it through the door to the dead letters
    HELD: "held",
    EXPIRED: "dead",
    TTL: "ready",
    READY: "ready",
}


def value(offset: int) -> bytes:
    return b"message %d \x00\xff" % offset


@contextmanager
def zoo(broker: BrokerProcess, api: Api, queue: str) -> Iterator[None]:
    """Within it, somebody holds what is held."""
    assert api.send(queue, *map(value, range(ACKED, EXPIRED))) == [*range(ACKED, EXPIRED)]
    with phpmq(broker) as mq, phpmq(broker) as undertaker:
        taken = list(mq.consume(queue, count=6, timeout=WAIT_SECONDS))
        taken[ACKED].ack()
        # The first that dies is the first that comes through the door.
        taken[LOOKED_INTO].reject()
        taken[REJECTED].reject()
        taken[REDRIVEN].reject()
        taken[REQUEUED].requeue(SECONDS)
        until(lambda: counts(api, queue) == (1, 1, 3), "verdicts to arrive")
        fields = {"from": REDRIVEN, "limit": 1, "where": "attempts = 1"}
        redriven = api.post(path_of(queue, "redrive"), fields)
        assert redriven["redriven"] == 1
        (letter,) = undertaker.consume(f"{queue}.dead", count=1, timeout=WAIT_SECONDS)
        assert letter.body == value(LOOKED_INTO)
        assert api.send(queue, value(EXPIRED), ttl=1) == [EXPIRED]
        assert api.send(queue, value(TTL), ttl=SECONDS, retries=7) == [TTL]
        assert api.send(queue, value(READY)) == [READY]
        until(lambda: counts(api, queue) == (4, 1, 3), "a message to expire")
        yield


def counts(api: Api, queue: str) -> tuple[int, int, int]:
    facts = api.get(path_of(queue))
    return facts["ready"], facts["held"], facts["dead"]
