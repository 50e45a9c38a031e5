"""What SSPQ costs a message, with no socket and no broker: received chunks to words, messages to frames.

Each figure is processor time, the best of several rounds: what is measured is this code, and not what else
the machine is doing.
"""

import random
from array import array
from collections.abc import Callable
from time import thread_time

from penstock.model.batch import Batch, Slice
from penstock.model.words import Publish
from penstock.protocols import sspq
from penstock.protocols.sspq_session import ServerSession

Row = tuple[str, float, str, float]

ROUNDS = 7
MESSAGES = 50_000
MESSAGE_BYTES = 100
DISPATCHED = 500
ORIGIN = b"0" * 18


def best_us(act: Callable[[], object], messages: int) -> float:
    """Microseconds a message in the best round."""
    seconds = []
    for _ in range(ROUNDS):
        start = thread_time()
        act()
        seconds.append(thread_time() - start)
    return min(seconds) / messages * 1e6


def receive(stream: bytes, chunk_bytes: int, *, views: bool = False) -> Callable[[], None]:
    """A server session that reads the stream, and checks that nothing was lost."""
    chunks = [stream[at : at + chunk_bytes] for at in range(0, len(stream), chunk_bytes)]
    parts = [memoryview(chunk) for chunk in chunks] if views else chunks

    def act() -> None:
        session = ServerSession()
        taken = 0
        for part in parts:
            for command in session.receive(part):
                assert isinstance(command, Publish)
                taken += len(command.batch)
        assert taken == MESSAGES

    return act


def batch_of(sizes: list[int]) -> Batch:
    source = random.Random(1)
    return Batch.of([source.randbytes(size) for size in sizes], retries=[3] * len(sizes))


def run() -> list[Row]:
    """Rows (name, value, unit, goal); goal 0 means that there is none."""
    equal = sspq.encode_batch(batch_of([MESSAGE_BYTES] * MESSAGES))
    varied = sspq.encode_batch(batch_of([80 + n * 7 % 41 for n in range(MESSAGES)]))
    pairs = (sspq.CONFIRM + sspq.RECEIVE) * MESSAGES
    block = batch_of([MESSAGE_BYTES] * DISPATCHED)
    left = array("h", [3]) * DISPATCHED
    slices = [Slice(block.payload, block.bounds, 0, DISPATCHED, 0, ORIGIN, 0, retries=left)]
    acts: list[tuple[str, Callable[[], object], int, float]] = [
        ("parse 100 B, 64 KiB chunks", receive(equal, 64 << 10), MESSAGES, 0.3),
        ("parse 100 B, 256 KiB chunks", receive(equal, 256 << 10), MESSAGES, 0.3),
        ("parse 100 B, 256 KiB views", receive(equal, 256 << 10, views=True), MESSAGES, 0.3),
        ("parse 80 to 120 B, 256 KiB chunks", receive(varied, 256 << 10), MESSAGES, 0.0),
        ("encode dispatches of 100 B", lambda: sspq.encode_slices(slices), DISPATCHED, 0.4),
        ("a pair of CONFIRM and RECEIVE", lambda: ServerSession().receive(pairs), MESSAGES, 0.0),
    ]
    return [(f"SSPQ: {name}", best_us(act, count), "µs/msg", goal) for name, act, count, goal in acts]


if __name__ == "__main__":
    for name, value, unit, goal in run():
        print(f"{name:<58} {value:8.3f} {unit:<8} {f'≤ {goal}' if goal else '':>8}")
