"""What a connection's parser remembers, so that it is quick, is little: there may be ten thousand of them."""

import random
import tracemalloc
from collections.abc import Callable
from itertools import count

import pytest

from penstock.model.batch import Batch, Slice
from penstock.protocols import rq
from penstock.protocols.phpmq import Dialect
from penstock.protocols.phpmq_session import ServerSession
from penstock.protocols.phpmq_write import Writer
from penstock.protocols.rq_controller import ControllerSession

REMEMBERED_BYTES = 64 * 1024
COUNT = 800

numbers = count()


def phpmq(queues: int, dialect: Dialect) -> Callable[[], object]:
    """A sender of messages that differ in size and TTL."""
    source, writer = random.Random(1), Writer(dialect)
    chunks = []
    for number in range(COUNT):
        queue = f"{number % queues:0200d}"
        payload = bytes(source.randrange(3000))
        chunks.append(writer.sends(queue, Batch.of([payload])))
        chunks.append(writer.sends(queue, Batch.of([payload], ttl_seconds=[1 + source.randrange(3000)])))

    def hear() -> object:
        session = ServerSession()
        for chunk in chunks:
            session.receive(chunk)
        return session

    return hear


def requests() -> Callable[[], object]:
    """A sender of requests, each for another queue."""
    one = Batch.of([b"x"])
    chunks = [rq.encode_requests(f"{number:0200d}", [number], one, noreply=True) for number in range(COUNT)]

    def hear() -> object:
        session = ControllerSession(0)
        for chunk in chunks:
            session.receive(chunk, 0)
        return session

    return hear


def consumer() -> object:
    """One who gets messages that differ in size, from a queue of its own."""
    source, session, queue = random.Random(1), ServerSession(), f"q{next(numbers)}"
    session.receive(Writer(Dialect()).consume(queue, COUNT))
    for _ in range(COUNT):
        payload = bytes(source.randrange(3000))
        session.deliver(queue, [Slice(payload, [0, len(payload)], 0, 1, 0, b"0" * 18, 0)], 0)
    return session


@pytest.mark.parametrize(
    "hear",
    [phpmq(1, Dialect(36, line_breaks=True)), phpmq(COUNT, Dialect()), requests(), consumer],
    ids=["PHPMQ sizes", "PHPMQ names", "RQ names", "PHPMQ consumer"],
)
def test_names_sizes_and_times_take_little_of_a_connection(hear: Callable[[], object]) -> None:
    hear()  # What all have in common is there.
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        sessions = [hear() for _ in range(2)]
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < len(sessions) * REMEMBERED_BYTES
