"""What PHPMQ costs a message, with no socket and no broker: received chunks to words, messages to dispatches.

Each figure is processor time, the best of several rounds: what is measured is this code, and not what else
the machine is doing.
"""

import random
from collections.abc import Callable
from time import thread_time

from penstock.model.batch import Batch, Slice
from penstock.model.ids import id_of
from penstock.model.words import Publish, Settle
from penstock.protocols.phpmq import Dialect, MessageType
from penstock.protocols.phpmq_session import ClientSession, ServerSession
from penstock.protocols.phpmq_write import Writer

MESSAGES = 50_000
MESSAGE_BYTES = 100
ROUNDS = 7
DISPATCHED = 500
ORIGIN = b"0123456789abcdef01"
QUEUE = "orders"
NOW_US = 1_700_000_000_000_000

Row = tuple[str, float, str, float]


def best_us(act: Callable[[], object], messages: int) -> float:
    """Microseconds a message in the best round."""
    seconds = []
    for _ in range(ROUNDS):
        start = thread_time()
        act()
        seconds.append(thread_time() - start)
    return min(seconds) / messages * 1e6


def receive(stream: bytes, chunk_bytes: int) -> Callable[[], None]:
    """A server session that reads the stream, and checks that nothing was lost."""
    parts = [stream[at : at + chunk_bytes] for at in range(0, len(stream), chunk_bytes)]

    def act() -> None:
        session = ServerSession()
        taken = 0
        for part in parts:
            for command in session.receive(part):
                if isinstance(command, Publish):
                    taken += len(command.batch)
                elif isinstance(command, Settle):
                    taken += sum(end - first for first, end in command.ranges)
        assert taken == MESSAGES

    return act


def parsing(source: random.Random) -> list[Row]:
    contents = [source.randbytes(MESSAGE_BYTES) for _ in range(MESSAGES)]
    varied = [source.randbytes(source.randrange(80, 121)) for _ in range(MESSAGES)]
    named = [id_of(ORIGIN, offset) for offset in range(MESSAGES)]
    narrow, wide = Writer(Dialect()), Writer(Dialect(36, line_breaks=True))
    equal = narrow.sends(QUEUE, Batch.of(contents))
    acks = narrow.settlements(MessageType.ACKNOWLEDGE, QUEUE, named)
    source.shuffle(named)
    shuffled = narrow.settlements(MessageType.ACKNOWLEDGE, QUEUE, named)
    streams = [
        ("parse 100 B, 64 KiB chunks", equal, 64 << 10, 0.8),
        ("parse 100 B, 256 KiB chunks", equal, 256 << 10, 0.8),
        ("parse 100 B, wide with line breaks", wide.sends(QUEUE, Batch.of(contents)), 256 << 10, 0.8),
        ("parse 80 to 120 B", narrow.sends(QUEUE, Batch.of(varied)), 256 << 10, 0.8),
        (
            "parse 100 B with a TTL",
            narrow.sends(QUEUE, Batch.of(contents, ttl_seconds=[60] * MESSAGES)),
            256 << 10,
            0.8,
        ),
        ("parse acks, 64 KiB chunks", acks, 64 << 10, 0.8),
        ("parse acks, out of order", shuffled, 64 << 10, 0.8),
    ]
    return [
        (f"PHPMQ: {name}", best_us(receive(stream, chunk_bytes), MESSAGES), "µs/msg", goal)
        for name, stream, chunk_bytes, goal in streams
    ]


def writing(source: random.Random) -> list[Row]:
    batch = Batch.of([source.randbytes(MESSAGE_BYTES) for _ in range(DISPATCHED)])
    plain = Slice(batch.payload, batch.bounds, 0, DISPATCHED, 0, ORIGIN, 0)
    expiring = Slice(batch.payload, batch.bounds, 0, DISPATCHED, 0, ORIGIN, 0)
    expiring.expires_us = [NOW_US + n * 10_000_000 for n in range(1, DISPATCHED + 1)]
    server, client = ServerSession(), ClientSession()
    server.receive(client.consume(QUEUE, DISPATCHED))
    dispatches = server.deliver(QUEUE, [plain], NOW_US)
    return [
        (f"PHPMQ: {name}", best_us(act, DISPATCHED), "µs/msg", goal)
        for name, act, goal in (
            ("encode dispatches of 100 B", lambda: server.deliver(QUEUE, [plain], NOW_US), 1.0),
            ("encode dispatches with a TTL", lambda: server.deliver(QUEUE, [expiring], NOW_US), 1.0),
            ("client: parse dispatches", lambda: client.receive(dispatches), 0.0),
        )
    ]


def run() -> list[Row]:
    """Rows (name, value, unit, goal); goal 0 means that there is none."""
    source = random.Random(1)
    return parsing(source) + writing(source)


if __name__ == "__main__":
    for name, value, unit, goal in run():
        print(f"{name:<58} {value:8.3f} {unit:<8} {f'≤ {goal}' if goal else '':>8}")
