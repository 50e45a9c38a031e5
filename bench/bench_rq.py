"""What RQ's sessions cost a message, with no socket and no broker: bytes to words, and messages to bytes.

Chunks arrive as they do in the server: views of one buffer that is used again and again, cut without
regard to frames. Each figure is processor time, the best of several rounds: what is measured is this
code, and not what else the machine is doing.
"""

from array import array
from collections.abc import Callable, Iterator
from time import thread_time

from penstock.model.batch import Batch, Slice
from penstock.model.words import Accepted, Command, Publish, Reply, Settle
from penstock.protocols import rq
from penstock.protocols.rq_controller import ControllerSession
from penstock.protocols.rq_node import NodeSession

Row = tuple[str, float, str, float]

ROUNDS = 7
MESSAGES = 20_000
PAYLOAD_BYTES = 100
GOAL_US = 1.0
ORIGIN = b"0" * 18


def batch_of(sizes: list[int]) -> Batch:
    return Batch.of([bytes([i % 251]) * size for i, size in enumerate(sizes)])


EVEN = batch_of([PAYLOAD_BYTES] * MESSAGES)
UNEVEN = batch_of([(i * 37) % (2 * PAYLOAD_BYTES) for i in range(MESSAGES)])


def chunks(stream: bytes, chunk_bytes: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(chunk_bytes))
    for at in range(0, len(stream), chunk_bytes):
        part = stream[at : at + chunk_bytes]
        buffer[: len(part)] = part
        yield buffer[: len(part)]


def best_us(round_of: Callable[[], tuple[float, int]]) -> float:
    """The lowest cost of a message over the rounds; a round says its seconds and its messages."""
    return min(seconds / count for seconds, count in (round_of() for _ in range(ROUNDS))) * 1e6


def consumer() -> ControllerSession:
    session = ControllerSession(0)
    session.receive(rq.encode_consume("orders", 0, 20, False), 0)
    session.consuming("orders")
    return session


def stored(batch: Batch, *, reply: bool) -> Slice:
    addresses = [b"r"] * len(batch) if reply else None
    return Slice(batch.payload, batch.bounds, 0, len(batch), 0, ORIGIN, 0, reply=addresses)


def receive(session: ControllerSession, stream: bytes, chunk_bytes: int) -> tuple[float, list[Command]]:
    """The time in `receive` alone."""
    seconds = 0.0
    commands: list[Command] = []
    for chunk in chunks(stream, chunk_bytes):
        began = thread_time()
        told = session.receive(chunk, 1)
        seconds += thread_time() - began
        commands += told
    return seconds, commands


def parse_requests(batch: Batch, chunk_bytes: int, queues: int = 1) -> float:
    ids = array("I", range(len(batch)))
    if queues == 1:
        stream = rq.encode_requests("orders", ids, batch, noreply=True)
    else:
        stream = b"".join(
            rq.encode_requests(f"orders-{i % queues}", [i], Batch.of([message]), noreply=True)
            for i, message in enumerate(batch.messages())
        )

    def once() -> tuple[float, int]:
        seconds, commands = receive(ControllerSession(0), stream, chunk_bytes)
        count = sum(len(command.batch) for command in commands if isinstance(command, Publish))
        assert count == len(batch)
        return seconds, count

    return best_us(once)


def parse_delivered() -> float:
    session, part = consumer(), stored(EVEN, reply=False)
    stream = rq.encode_delivered(range(MESSAGES))

    def once() -> tuple[float, int]:
        session.deliver("orders", [part])
        seconds, commands = receive(session, stream, 64 << 10)
        assert (
            sum(end - first for c in commands if isinstance(c, Settle) for first, end in c.ranges) == MESSAGES
        )
        return seconds, MESSAGES

    return best_us(once)


def parse_replies(*, with_delivered: bool) -> float:
    session, part = consumer(), stored(EVEN, reply=True)
    stream = rq.encode_replies(range(MESSAGES), EVEN)
    if with_delivered:
        stream = b"".join(
            rq.encode_delivered([i]) + rq.encode_replies([i], Batch.of([message]))
            for i, message in enumerate(EVEN.messages())
        )

    def once() -> tuple[float, int]:
        session.deliver("orders", [part])
        seconds, commands = receive(session, stream, 64 << 10)
        assert sum(len(c.offsets) for c in commands if isinstance(c, Reply)) == MESSAGES
        assert with_delivered == any(isinstance(c, Accepted) for c in commands)
        return seconds, MESSAGES

    return best_us(once)


def encode_deliveries(batch: Batch) -> float:
    session, part = consumer(), stored(batch, reply=False)

    def once() -> tuple[float, int]:
        began = thread_time()
        wire = session.deliver("orders", [part])
        seconds = thread_time() - began
        assert len(wire) > len(batch.payload)
        session.receive(rq.encode_delivered(range(MESSAGES)), 1)
        return seconds, len(batch)

    return best_us(once)


def encode(what: Callable[[], bytes]) -> float:
    def once() -> tuple[float, int]:
        began = thread_time()
        wire = what()
        seconds = thread_time() - began
        assert len(wire) >= MESSAGES * rq.ID_FRAME_BYTES
        return seconds, MESSAGES

    return best_us(once)


def node_parse_deliveries() -> float:
    wire = rq.encode_deliveries("orders", range(MESSAGES), EVEN.payload, EVEN.bounds, noreply=True)

    def once() -> tuple[float, int]:
        session = NodeSession(0)
        session.consume("orders")
        seconds = 0.0
        for chunk in chunks(wire, 64 << 10):
            began = thread_time()
            session.receive(chunk, 1)
            seconds += thread_time() - began
        assert session.held == MESSAGES
        return seconds, MESSAGES

    return best_us(once)


def node_encode_requests() -> float:
    def once() -> tuple[float, int]:
        session = NodeSession(0)
        began = thread_time()
        ids, _ = session.send("orders", EVEN)
        return thread_time() - began, len(ids)

    return best_us(once)


def large_payload_mb_per_s() -> float:
    size = 64 << 20
    head = bytes.fromhex("01 80 00000001 a0 01 71 e0") + size.to_bytes(4, "big")
    chunk = memoryview(bytearray(256 << 10))

    def once() -> tuple[float, int]:
        session = ControllerSession(0)
        began = thread_time()
        session.receive(head, 1)
        for _ in range(size // len(chunk)):
            session.receive(chunk, 1)
        [publish] = session.receive(b"\x0a", 1)
        seconds = thread_time() - began
        assert isinstance(publish, Publish)
        return seconds, size

    return 1 / best_us(once)  # bytes per microsecond are megabytes per second


def run() -> list[Row]:
    tickets = array("I", range(MESSAGES))
    session = ControllerSession(0)
    us = "µs/msg"
    return [
        ("rq: parse requests, 100 B, chunks of 64 KiB", parse_requests(EVEN, 64 << 10), us, GOAL_US),
        ("rq: parse requests, 100 B, chunks of 256 KiB", parse_requests(EVEN, 256 << 10), us, GOAL_US),
        ("rq: parse requests, 0-199 B, chunks of 64 KiB", parse_requests(UNEVEN, 64 << 10), us, GOAL_US),
        ("rq: parse requests, 100 B, 3 queues in turn", parse_requests(EVEN, 64 << 10, queues=3), us, 0),
        ("rq: parse requests, 100 B, one frame a chunk", parse_requests(EVEN, 121), us, 0),
        ("rq: parse DELIVERED runs to settlements", parse_delivered(), us, GOAL_US),
        ("rq: parse REPLY runs, 100 B", parse_replies(with_delivered=False), us, GOAL_US),
        ("rq: parse DELIVERED, REPLY in pairs, 100 B", parse_replies(with_delivered=True), us, 0),
        ("rq: encode deliveries, 100 B", encode_deliveries(EVEN), us, GOAL_US),
        ("rq: encode deliveries, 0-199 B", encode_deliveries(UNEVEN), us, GOAL_US),
        ("rq: encode DELIVERED", encode(lambda: session.delivered(tickets)), us, GOAL_US),
        ("rq: encode REPLY, 100 B", encode(lambda: session.replies(tickets, EVEN)), us, GOAL_US),
        ("rq: node, parse deliveries, 100 B", node_parse_deliveries(), us, GOAL_US),
        ("rq: node, encode requests, 100 B", node_encode_requests(), us, GOAL_US),
        ("rq: one payload of 64 MiB in chunks of 256 KiB", large_payload_mb_per_s(), "MB/s", 0),
    ]


if __name__ == "__main__":
    for name, value, unit, goal in run():
        print(f"{name:<52} {value:>10.3f} {unit:<7}" + (f" goal {goal:g}" if goal else ""))
