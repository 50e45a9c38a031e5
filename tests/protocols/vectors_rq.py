"""RQ's bytes, each with where they came from and what they mean. One table drives reading and writing.

Sources: "seed" is the protocol document that RQ was published with; "wire" are the bytes that the
original programs were seen to send (the exchange table of the protocol page); "wire note" is what
was observed beside it. `encode` is None for bytes that we read but never write.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from penstock.model.batch import Batch
from penstock.protocols import rq
from tests.protocols.rq_reference import Item


@dataclass(frozen=True, slots=True)
class Vector:
    name: str
    source: str
    wire: bytes
    items: list[Item]
    encode: Callable[[], bytes] | None = None


def _hex(text: str) -> bytes:
    return bytes.fromhex(text)


_HELLO = Batch.of([b"hello"])
_RETRIED = Batch.of([b"hello"], retries=[3])
_EMPTY = Batch.of([b""])

VECTORS = [
    Vector(
        "consume",
        "wire: node consumes Q1, max 5, priority 20",
        _hex("01 a0 02 5131 62 0005 40 14 14"),
        [("consume", "Q1", 5, 20, False)],
        lambda: rq.encode_consume("Q1", 5, 20, False),
    ),
    Vector(
        "consume, exclusive",
        "wire: EXCLUSIVE before the last byte",
        _hex("01 a0 02 5131 62 0005 40 14 20 14"),
        [("consume", "Q1", 5, 20, True)],
        lambda: rq.encode_consume("Q1", 5, 20, True),
    ),
    Vector(
        "consume, exclusive first",
        "wire: EXCLUSIVE right after CLEAR, as the original library sends it",
        _hex("01 20 a0 02 5131 62 0005 40 14 14"),
        [("consume", "Q1", 5, 20, True)],
    ),
    Vector(
        "consume, bare",
        "seed: MAX, PRIORITY and EXCLUSIVE are optional",
        _hex("01 a0 02 5131 14"),
        [("consume", "Q1", 0, 20, False)],
    ),
    Vector(
        "consuming",
        "wire: controller gives queue id 1",
        _hex("01 60 0001 a0 02 5131 18"),
        [("consuming", "Q1", 1)],
        lambda: rq.encode_consuming("Q1", 1),
    ),
    Vector(
        "consuming, in the seed's order",
        "seed: QUEUE before QUEUEID",
        _hex("01 a0 02 5131 60 0001 18"),
        [("consuming", "Q1", 1)],
    ),
    Vector(
        "cancel by name",
        "seed: cancelling a queue",
        _hex("01 a0 02 5131 15"),
        [("cancel", "Q1")],
        lambda: rq.encode_cancel("Q1"),
    ),
    Vector("cancel by id", "seed: cancelling a queue", _hex("01 60 0001 15"), [("cancel", 1)]),
    Vector(
        "request",
        "wire: request 7",
        _hex("01 80 00000007 a0 02 5131 e0 00000005 68656c6c6f 0a"),
        [("request", "Q1", 7, b"hello", False, -1, 0)],
        lambda: rq.encode_requests("Q1", [7], _HELLO, noreply=False),
    ),
    Vector(
        "request, no reply wanted",
        "wire: NOREPLY before the last byte",
        _hex("01 80 00000007 a0 02 5131 e0 00000005 68656c6c6f 21 0a"),
        [("request", "Q1", 7, b"hello", True, -1, 0)],
        lambda: rq.encode_requests("Q1", [7], _HELLO, noreply=True),
    ),
    Vector(
        "request, in the seed's order",
        "seed: ID, PAYLOAD, NOREPLY, QUEUE, RETRIES",
        _hex("01 80 00000007 e0 00000005 68656c6c6f 21 a0 02 5131 41 03 0a"),
        [("request", "Q1", 7, b"hello", True, 3, 0)],
    ),
    Vector(
        "request with retries and timeout",
        "command table: RETRIES has one byte and TIMEOUT two",
        _hex("01 80 00000007 a0 02 5131 41 03 61 001e e0 00000005 68656c6c6f 0a"),
        [("request", "Q1", 7, b"hello", False, 3, 30)],
        lambda: rq.encode_requests("Q1", [7], _RETRIED, noreply=False, timeout_seconds=30),
    ),
    Vector(
        "request by queue id",
        "seed: QUEUE or QUEUEID",
        _hex("01 80 00000007 60 0001 e0 00000000 0a"),
        [("request", 1, 7, b"", False, -1, 0)],
    ),
    Vector(
        "request to a consumer",
        "wire: controller to consumer, the id last",
        _hex("01 a0 02 5131 e0 00000005 68656c6c6f 80 00000000 0a"),
        [("request", "Q1", 0, b"hello", False, -1, 0)],
        lambda: rq.encode_deliveries("Q1", [0], _HELLO.payload, _HELLO.bounds, noreply=False),
    ),
    Vector(
        "request to a consumer, no reply wanted",
        "wire: NOREPLY between payload and id",
        _hex("01 a0 02 5131 e0 00000005 68656c6c6f 21 80 00007fff 0a"),
        [("request", "Q1", 32767, b"hello", True, -1, 0)],
        lambda: rq.encode_deliveries("Q1", [32767], _HELLO.payload, _HELLO.bounds, noreply=True),
    ),
    Vector(
        "delivered",
        "wire: both directions",
        _hex("01 80 00000007 0d"),
        [("delivered", 7)],
        lambda: rq.encode_delivered(array("I", [7])),
    ),
    Vector(
        "reply",
        "wire: both directions",
        _hex("01 80 00000007 e0 00000005 68656c6c6f 0b"),
        [("reply", 7, b"hello")],
        lambda: rq.encode_replies([7], _HELLO),
    ),
    Vector(
        "delivered and reply",
        "wire: consumer to controller, in one segment",
        _hex("01 80 00000000 0d 01 80 00000000 e0 00000005 68656c6c6f 0b"),
        [("delivered", 0), ("reply", 0, b"hello")],
        lambda: rq.encode_delivered([0]) + rq.encode_replies([0], _HELLO),
    ),
    Vector(
        "undelivered",
        "wire: not delivered",
        _hex("01 80 00000007 10"),
        [("undelivered", 7)],
        lambda: rq.encode_undelivered([7]),
    ),
    Vector(
        "broadcast",
        "wire: broadcast",
        _hex("01 a0 02 5131 e0 00000005 68656c6c6f 0e"),
        [("broadcast", "Q1", b"hello")],
        lambda: rq.encode_broadcasts("Q1", _HELLO),
    ),
    Vector(
        "broadcast with an id",
        "wire note: the original library adds an ID, which says nothing",
        _hex("01 80 00000009 a0 02 5131 e0 00000005 68656c6c6f 0e"),
        [("broadcast", "Q1", b"hello")],
    ),
    Vector("ping", "wire", _hex("05"), [("signal", "PING")], lambda: rq.PING),
    Vector("pong", "wire", _hex("06"), [("signal", "PONG")], lambda: rq.PONG),
    Vector("closing", "wire: after CLEAR", _hex("01 16"), [("signal", "CLOSING")], lambda: rq.CLOSING),
    Vector("closing, bare", "seed: without CLEAR", _hex("16"), [("signal", "CLOSING")]),
    Vector("server full", "wire", _hex("17"), [("signal", "SERVER_FULL")], lambda: rq.SERVER_FULL),
    Vector("nothing", "command table: NOP", _hex("00 00 00"), []),
    Vector(
        "registers stay",
        "protocol page: attributes stay until the next CLEAR",
        _hex("01 a0 02 5131 e0 00000002 6869 80 00000001 0a 80 00000002 21 0a"),
        [("request", "Q1", 1, b"hi", False, -1, 0), ("request", "Q1", 2, b"hi", True, -1, 0)],
    ),
    Vector(
        "clear empties the registers",
        "protocol page: CLEAR",
        _hex("01 80 00000007 a0 02 5131 21 01 14"),
        [("malformed", "CONSUME", None)],
    ),
    Vector(
        "unknown commands of every width",
        "RISP: the top three bits say what follows",
        _hex("1f 3f 5f 01 7f 0102 9f 01020304 bf 01 aa df 0002 aabb ff 00000003 aabbcc 05"),
        [("skipped", command) for command in (0x1F, 0x3F, 0x5F, 0x7F, 0x9F, 0xBF, 0xDF, 0xFF)]
        + [("signal", "PING")],
    ),
    Vector(
        "request without payload",
        "protocol page: a missing attribute",
        _hex("01 80 00000007 a0 02 5131 0a"),
        [("malformed", "REQUEST", 7)],
    ),
    Vector(
        "request without queue",
        "protocol page: a missing attribute",
        _hex("01 80 00000007 e0 00000000 0a"),
        [("malformed", "REQUEST", 7)],
    ),
    Vector(
        "request without id",
        "protocol page: a missing attribute",
        _hex("01 a0 02 5131 e0 00000000 0a"),
        [("malformed", "REQUEST", None)],
    ),
    Vector(
        "an empty reply of a node",
        "wire note: the original library leaves PAYLOAD out of a REPLY of no bytes",
        _hex("01 80 00000007 0b"),
        [("reply", 7, b"")],
        lambda: rq.encode_node_replies([7], _EMPTY),
    ),
    Vector(
        "an empty reply of a controller",
        "wire note: the original library stops on an empty PAYLOAD and on a REPLY without; programs say NOP",
        _hex("01 01 80 00000007 e0 00000001 00 0b"),
        [("reply", 7, b"")],
        lambda: rq.encode_replies([7], _EMPTY),
    ),
    Vector(
        "an empty request",
        "wire note: the same of a REQUEST",
        _hex("01 01 80 00000007 a0 02 5131 e0 00000001 00 0a"),
        [("request", "Q1", 7, b"", False, -1, 0)],
        lambda: rq.encode_requests("Q1", [7], _EMPTY, noreply=False),
    ),
    Vector(
        "an empty request to a consumer",
        "wire note: the same of a REQUEST",
        _hex("01 01 a0 02 5131 e0 00000001 00 21 80 00000000 0a"),
        [("request", "Q1", 0, b"", True, -1, 0)],
        lambda: rq.encode_deliveries("Q1", [0], b"", _EMPTY.bounds, noreply=True),
    ),
    Vector(
        "an empty broadcast",
        "wire note: the same of a BROADCAST",
        _hex("01 01 a0 02 5131 e0 00000001 00 0e"),
        [("broadcast", "Q1", b"")],
        lambda: rq.encode_broadcasts("Q1", _EMPTY),
    ),
    Vector(
        "a NOP byte",
        "one CLEAR: a payload like any other",
        _hex("01 80 00000007 e0 00000001 00 0b"),
        [("reply", 7, b"\0")],
        lambda: rq.encode_replies([7], Batch.of([b"\0"])),
    ),
    Vector(
        "a name that is not UTF-8",
        "ours: names are text",
        _hex("01 80 00000007 a0 02 ff fe e0 00000000 0a"),
        [("malformed", "REQUEST", 7)],
    ),
]
