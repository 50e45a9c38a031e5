"""SSPQ byte vectors: what is on the wire, what it says, and where that is written.

A row says what a stream reads as: `("send", retries, payload)`, `("control", type)`, or
`("unknown", type byte)`. Rows that we would also write have `written=True`.

Sources: "seed 000" is the protocol's own document (package structure and package types),
"originals" is what the original client and server were seen to put on the wire, "page" is the byte
facts of Penstock's page on the protocol.
"""

from dataclasses import dataclass

from penstock.protocols.sspq import Type

Read = tuple[str, int, bytes] | tuple[str, int]


@dataclass(frozen=True)
class Row:
    name: str
    source: str
    data: bytes
    reads: tuple[Read, ...]
    written: bool = True


@dataclass(frozen=True)
class Fault:
    name: str
    source: str
    data: bytes
    position: int
    message: str


def _hex(text: str) -> bytes:
    return bytes.fromhex(text)


ROWS = (
    Row("receive", "seed 000", _hex("5599 ec 00 00000000"), (("control", Type.RECEIVE),)),
    Row("confirm", "seed 000", _hex("5599 c0 00 00000000"), (("control", Type.CONFIRM),)),
    Row("dead receive", "seed 000", _hex("5599 de 00 00000000"), (("control", Type.DEAD_RECEIVE),)),
    Row("no receive", "seed 000", _hex("5599 0e 00 00000000"), (("control", Type.NO_RECEIVE),)),
    Row(
        "send, three retries",
        "originals: what the client's send() writes by default",
        _hex("5599 5e 03 00000005") + b"hello",
        (("send", 3, b"hello"),),
    ),
    Row("send, nothing in it", "seed 000", _hex("5599 5e 00 00000000"), (("send", 0, b""),)),
    Row(
        "send, endless retries",
        "originals: 255 is never lowered",
        _hex("5599 5e ff 00000002 0a00"),
        (("send", 255, b"\n\x00"),),
    ),
    Row(
        "sends with different retries",
        "page: a message of 2 is delivered as 02, 01, 00",
        _hex("5599 5e 02 00000001 61 5599 5e 01 00000001 61 5599 5e 00 00000001 61"),
        (("send", 2, b"a"), ("send", 1, b"a"), ("send", 0, b"a")),
    ),
    Row(
        "a frame inside a message",
        "seed 000: only the size says where a message ends",
        _hex("5599 5e 07 00000008 5599 ec 00 00000000"),
        (("send", 7, _hex("5599 ec 00 00000000")),),
    ),
    Row(
        "confirm and receive",
        "originals: clients put both into one segment",
        _hex("5599 c0 00 00000000 5599 ec 00 00000000"),
        (("control", Type.CONFIRM), ("control", Type.RECEIVE)),
    ),
    Row(
        "send between control frames",
        "seed 000: SEND can be sent at any time",
        _hex("5599 ec 00 00000000 5599 5e 01 00000001 62 5599 c0 00 00000000"),
        (("control", Type.RECEIVE), ("send", 1, b"b"), ("control", Type.CONFIRM)),
    ),
    Row(
        "receive with a payload",
        "page: read and ignored",
        _hex("5599 ec 00 00000003 616263"),
        (("control", Type.RECEIVE),),
        written=False,
    ),
    Row(
        "confirm with a retry counter",
        "page: only a message has one",
        _hex("5599 c0 09 00000000"),
        (("control", Type.CONFIRM),),
        written=False,
    ),
    Row(
        "unknown type",
        "page: skipped with its payload and counted",
        _hex("5599 42 00 00000004 64617461 5599 42 01 00000000"),
        (("unknown", 0x42), ("unknown", 0x42)),
        written=False,
    ),
    Row(
        "the in-memory name of unknown types",
        "seed 000: OTHER is internal",
        _hex("5599 ff 00 00000000"),
        (("unknown", 0xFF),),
        written=False,
    ),
)

LIMIT_BYTES = 64
"""What a reader of the faults takes at most."""

FAULTS = (
    Fault("bad magic", "page", _hex("5598 5e 00 00000000"), 0, "the magic is 0x5598, not 0x5599"),
    Fault("text", "page", b"GET / HTTP/1.1\r\n", 0, "the magic is 0x4745, not 0x5599"),
    Fault(
        "bad magic after a good frame",
        "page",
        _hex("5599 5e 00 00000001 61 0000 5e 00 00000000"),
        9,
        "the magic is 0x0000, not 0x5599",
    ),
    Fault(
        "a payload over the limit",
        "page",
        _hex("5599 5e 00 00000041"),
        0,
        "a payload of 65 bytes is over the limit of 64",
    ),
    Fault(
        "a payload of 4 GiB",
        "page",
        _hex("5599 5e 00 00000000 5599 5e 00 ffffffff"),
        8,
        "a payload of 4294967295 bytes is over the limit of 64",
    ),
    Fault(
        "an unknown frame over the limit",
        "page",
        _hex("5599 42 00 7fffffff"),
        0,
        "a payload of 2147483647 bytes is over the limit of 64",
    ),
)
