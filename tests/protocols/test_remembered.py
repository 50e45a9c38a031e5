"""What a connection's parser remembers, so that it is quick, is little: there may be ten thousand of them."""

import random
import tracemalloc
from collections.abc import Callable

import pytest

from penstock.model.batch import Batch
from penstock.protocols import rq
from penstock.protocols.phpmq import Dialect
from penstock.protocols.phpmq_session import ServerSession
from penstock.protocols.phpmq_write import Writer
from penstock.protocols.rq_controller import ControllerSession

REMEMBERED_BYTES = 64 * 1024
COUNT = 800


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


@pytest.mark.parametrize(
    "hear",
    [phpmq(1, Dialect(36, line_breaks=True)), phpmq(COUNT, Dialect()), requests()],
    ids=["PHPMQ sizes", "PHPMQ names", "RQ names"],
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
