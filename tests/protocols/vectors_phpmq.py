"""PHPMQ byte vectors: what is on the wire, what it says, and where that is written.

A row reads as one of
    ("sent", queue, content, ttl_seconds)
    ("consume", queue, count, dialect)
    ("dispatched", queue, content, id, ttl_seconds)
    ("settled", message type, queue, id, ttl_seconds)
Rows that we would write ourselves, byte for byte, name the dialect they are `written` in.

Sources: "seed 001", "seed 003" and "seed 004" are the three documents; their examples have a line break
after each header and content. "released code" is what the released programs were seen to put on the wire:
32-byte headers and no line breaks. "page" is the byte facts of Penstock's page on the protocol.
"""

from dataclasses import dataclass

from penstock.protocols.phpmq import Dialect, MessageType

Read = tuple[object, ...]

NARROW = Dialect(32, line_breaks=False)
NARROW_LINES = Dialect(32, line_breaks=True)
WIDE = Dialect(36, line_breaks=False)
WIDE_LINES = Dialect(36, line_breaks=True)
TTL_0 = -1  # in what is read: a message that came with a TTL, of 0

ID = b"d7e7f68761d34838494b233148b5486c"
ACK, REQUEUE, DEAD = MessageType.ACKNOWLEDGE, MessageType.REQUEUE, MessageType.DEAD_LETTER


@dataclass(frozen=True)
class Row:
    name: str
    source: str
    data: bytes
    reads: tuple[Read, ...]
    written: Dialect | None = None

    @property
    def from_server(self) -> bool:
        return self.reads[0][0] == "dispatched"


@dataclass(frozen=True)
class Fault:
    name: str
    data: bytes
    position: int
    message: str


def _lines(text: str) -> bytes:
    """An example as it is printed: a line for each header and content, each with its line break."""
    return "".join(line.strip() + "\n" for line in text.strip().splitlines()).encode()


ROWS = (
    # ---- seed 001: 36-byte headers, no TTL
    Row(
        "send, wide lines",
        "seed 001, 'Send a message'",
        _lines("""
            H0100102
            P01000000000000000000000000000000003
            Foo
            P02000000000000000000000000000000011
            Hello World
        """),
        (("sent", "Foo", b"Hello World", 0),),
        WIDE_LINES,
    ),
    Row(
        "consume, wide lines",
        "seed 001, 'Consume messages'",
        _lines("""
            H0100202
            P01000000000000000000000000000000003
            Foo
            P04000000000000000000000000000000001
            5
        """),
        (("consume", "Foo", 5, WIDE_LINES),),
        WIDE_LINES,
    ),
    Row(
        "dispatch, wide lines",
        "seed 001, 'Dispatch a message'",
        _lines("""
            H0100303
            P01000000000000000000000000000000003
            Foo
            P02000000000000000000000000000000011
            Hello World
            P03000000000000000000000000000000032
            d7e7f68761d34838494b233148b5486c
        """),
        (("dispatched", "Foo", b"Hello World", ID, 0),),
        WIDE_LINES,
    ),
    Row(
        "acknowledge, wide lines",
        "seed 001, 'Acknowledge a message'",
        _lines("""
            H0100402
            P01000000000000000000000000000000003
            Foo
            P03000000000000000000000000000000032
            d7e7f68761d34838494b233148b5486c
        """),
        (("settled", ACK, "Foo", ID, 0),),
        WIDE_LINES,
    ),
    # ---- seeds 003 and 004: 32-byte headers, TTL, re-queue and dead letter
    Row(
        "send with a TTL, narrow lines",
        "seeds 003 and 004, 'Send a message'",
        _lines("""
            H0100103
            P0100000000000000000000000000003
            Foo
            P0200000000000000000000000000011
            Hello World
            P0500000000000000000000000000004
            3600
        """),
        (("sent", "Foo", b"Hello World", 3600),),
        NARROW_LINES,
    ),
    Row(
        "consume, narrow lines",
        "seeds 003 and 004, 'Consume messages'",
        _lines("""
            H0100202
            P0100000000000000000000000000003
            Foo
            P0400000000000000000000000000001
            5
        """),
        (("consume", "Foo", 5, NARROW_LINES),),
        NARROW_LINES,
    ),
    Row(
        "dispatch with a TTL, narrow lines",
        "seeds 003 and 004, 'Dispatch a message'",
        _lines("""
            H0100304
            P0100000000000000000000000000003
            Foo
            P0200000000000000000000000000011
            Hello World
            P0300000000000000000000000000032
            d7e7f68761d34838494b233148b5486c
            P0500000000000000000000000000004
            3300
        """),
        (("dispatched", "Foo", b"Hello World", ID, 3300),),
        NARROW_LINES,
    ),
    Row(
        "acknowledge, narrow lines",
        "seeds 003 and 004, 'Acknowledge a message'",
        _lines("""
            H0100402
            P0100000000000000000000000000003
            Foo
            P0300000000000000000000000000032
            d7e7f68761d34838494b233148b5486c
        """),
        (("settled", ACK, "Foo", ID, 0),),
        NARROW_LINES,
    ),
    Row(
        "re-queue, narrow lines",
        "seeds 003 and 004, 'Re-queue a message'",
        _lines("""
            H0100503
            P0100000000000000000000000000003
            Foo
            P0300000000000000000000000000032
            d7e7f68761d34838494b233148b5486c
            P0500000000000000000000000000004
            3600
        """),
        (("settled", REQUEUE, "Foo", ID, 3600),),
        NARROW_LINES,
    ),
    Row(
        "dead letter, narrow lines",
        "seeds 003 and 004, 'Send a dead letter'",
        _lines("""
            H0100602
            P0100000000000000000000000000003
            Foo
            P0300000000000000000000000000032
            d7e7f68761d34838494b233148b5486c
        """),
        (("settled", DEAD, "Foo", ID, 0),),
        NARROW_LINES,
    ),
    # ---- the released programs: 32-byte headers, no line breaks
    Row(
        "send, narrow",
        "released code",
        b"H0100102P0100000000000000000000000000003FooP0200000000000000000000000000011Hello World",
        (("sent", "Foo", b"Hello World", 0),),
        NARROW,
    ),
    Row(
        "send with a TTL, narrow",
        "released code",
        b"H0100103P0100000000000000000000000000003FooP0200000000000000000000000000011Hello World"
        b"P05000000000000000000000000000043600",
        (("sent", "Foo", b"Hello World", 3600),),
        NARROW,
    ),
    Row(
        "consume, narrow",
        "released code",
        b"H0100202P0100000000000000000000000000003FooP04000000000000000000000000000015",
        (("consume", "Foo", 5, NARROW),),
        NARROW,
    ),
    Row(
        "dispatch, narrow",
        "released code, the generation with three packets",
        b"H0100303P0100000000000000000000000000003FooP0200000000000000000000000000011Hello World"
        b"P0300000000000000000000000000032" + ID,
        (("dispatched", "Foo", b"Hello World", ID, 0),),
        NARROW,
    ),
    Row(
        "acknowledge, narrow",
        "released code",
        b"H0100402P0100000000000000000000000000003FooP0300000000000000000000000000032" + ID,
        (("settled", ACK, "Foo", ID, 0),),
        NARROW,
    ),
    Row(
        "send, wide",
        "page: 36-byte headers without line breaks",
        b"H0100102P01000000000000000000000000000000003FooP02000000000000000000000000000000002Hi",
        (("sent", "Foo", b"Hi", 0),),
        WIDE,
    ),
    Row(
        "two sends, narrow",
        "page: nothing stands between messages",
        b"H0100102P0100000000000000000000000000001aP0200000000000000000000000000001x"
        b"H0100102P0100000000000000000000000000001aP0200000000000000000000000000000",
        (("sent", "a", b"x", 0), ("sent", "a", b"", 0)),
        NARROW,
    ),
    # ---- what is read and never written
    Row(
        "TTL of 0 means none",
        "page: the released client on newer classes sends 0",
        b"H0100103P0100000000000000000000000000003FooP0200000000000000000000000000002Hi"
        b"P05000000000000000000000000000010",
        (("sent", "Foo", b"Hi", TTL_0),),
    ),
    Row(
        "message, 35-byte headers",
        "the prose of all three seeds: 'The content length has a length of 32 bytes'",
        b"H0100102P0100000000000000000000000000000003FooP0200000000000000000000000000000002Hi",
        (("sent", "Foo", b"Hi", 0),),
        Dialect(35),
    ),
    Row(
        "message, 35-byte headers and a name that begins with a digit",
        "the prose of all three seeds: 'The content length has a length of 32 bytes'",
        b"H0100102P01000000000000000000000000000000042ndsP0200000000000000000000000000000002Hi",
        (("sent", "2nds", b"Hi", 0),),
        Dialect(35),
    ),
    Row(
        "consume, 35-byte headers with line breaks",
        "the prose of all three seeds, in the layout of their examples",
        b"H0100202\nP0100000000000000000000000000000003\nFoo\nP0400000000000000000000000000000001\n5\n",
        (("consume", "Foo", 5, Dialect(35, True)),),
        Dialect(35, True),
    ),
    Row(
        "packets in another order",
        "page: packets may come in any order",
        b"H0100103P0100000000000000000000000000003FooP050000000000000000000000000000260"
        b"P0200000000000000000000000000002Hi",
        (("sent", "Foo", b"Hi", 60),),
    ),
    Row(
        "the content first on a fresh connection",
        "page: where another packet comes first, 32 on a fresh connection",
        b"H0100102P0200000000000000000000000000002HiP0100000000000000000000000000003Foo",
        (("sent", "Foo", b"Hi", 0),),
    ),
    Row(
        "the content first, after a wide message",
        "page: where another packet comes first, the width last seen holds",
        b"H0100102P01000000000000000000000000000000003FooP02000000000000000000000000000000002Hi"
        b"H0100102P02000000000000000000000000000000002HoP01000000000000000000000000000000003Foo",
        (("sent", "Foo", b"Hi", 0), ("sent", "Foo", b"Ho", 0)),
    ),
    Row(
        "four dialects on one connection",
        "page: the dialect is recognised per message",
        b"H0100202P0100000000000000000000000000001aP04000000000000000000000000000011"
        b"H0100202\nP0100000000000000000000000000001\nb\nP0400000000000000000000000000001\n2\n"
        b"H0100202P01000000000000000000000000000000001cP040000000000000000000000000000000013"
        b"H0100202\nP01000000000000000000000000000000001\nd\nP04000000000000000000000000000000001\n4\n",
        (
            ("consume", "a", 1, NARROW),
            ("consume", "b", 2, NARROW_LINES),
            ("consume", "c", 3, WIDE),
            ("consume", "d", 4, WIDE_LINES),
        ),
    ),
    Row(
        "no line break behind the last content",
        "seeds: the examples cannot show whether there is one",
        b"H0100202\nP0100000000000000000000000000001\na\nP0400000000000000000000000000001\n7"
        b"H0100202\nP0100000000000000000000000000001\na\nP0400000000000000000000000000001\n8",
        (("consume", "a", 7, NARROW_LINES), ("consume", "a", 8, NARROW_LINES)),
    ),
    Row(
        "an id that is not ours",
        "page: ids are opaque to clients",
        b"H0100402P0100000000000000000000000000003FooP0300000000000000000000000000003???",
        (("settled", ACK, "Foo", b"???", 0),),
    ),
    Row(
        "a message inside a message",
        "page: only the length says where a content ends",
        b"H0100102P0100000000000000000000000000003FooP0200000000000000000000000000008H0100102",
        (("sent", "Foo", b"H0100102", 0),),
    ),
)

QUEUE = b"P0100000000000000000000000000003Foo"
CONTENT = b"P0200000000000000000000000000002Hi"

FAULTS = (
    Fault("flag letter", b"X0100102" + QUEUE + CONTENT, 0, "a message header must begin with H"),
    Fault("text", b"GET / HTTP/1.1\r\n", 0, "a message header must begin with H"),
    Fault("version", b"H0200102" + QUEUE + CONTENT, 0, "protocol version 02 is not 01"),
    Fault("message type", b"H0100702" + QUEUE + CONTENT, 0, "no message type 007"),
    Fault("direction", b"H0100303" + QUEUE + CONTENT, 0, "message type 003 is not for this side"),
    Fault("packet count no number", b"H01001+2" + QUEUE + CONTENT, 0, r"packet count \+2 is not a number"),
    Fault("no packets", b"H0100100" + QUEUE + CONTENT, 0, "packet count 0 is not 1 to 5"),
    Fault("too many packets", b"H0100106" + QUEUE + CONTENT, 0, "packet count 6 is not 1 to 5"),
    Fault("neither packet nor line break", b"H0100102 " + QUEUE, 8, "a packet or a line break must follow"),
    Fault("two line breaks", b"H0100102\n\n" + QUEUE + CONTENT, 9, "a packet header must begin with P"),
    Fault("packet flag", b"H0100102" + QUEUE + b"p" + CONTENT[1:], 43, "must begin with P"),
    Fault("packet type", b"H0100102" + QUEUE + b"P06" + CONTENT[3:], 43, "no packet type 06"),
    Fault("packet twice", b"H0100103" + QUEUE + QUEUE + CONTENT, 43, "message 001 has packet 01 twice"),
    Fault(
        "packet of another type",
        b"H0100102" + QUEUE + b"P0300000000000000000000000000032" + ID,
        43,
        "packet 03 does not belong to message 001",
    ),
    Fault("fewer packets", b"H0100103" + QUEUE + CONTENT + b"H0100102" * 4, 77, r"2 of 3 are there"),
    Fault("more packets", b"H0100101" + QUEUE + CONTENT, 0, "message 001 lacks packet 02"),
    Fault(
        "no queue",
        b"H0100102" + CONTENT + b"P05000000000000000000000000000011",
        0,
        "message 001 lacks packet 01",
    ),
    Fault(
        "length no number",
        b"H0100102P01000000000000000000000000000x3Foo",
        8,
        "a content length must be digits",
    ),
    Fault(
        "empty queue name",
        b"H0100102P0100000000000000000000000000000P02" + b"0" * 29,
        8,
        "a content length must be digits",
    ),
    Fault(
        "empty queue name, wide",
        b"H0100102P01" + b"0" * 33 + b"P02" + b"0" * 33,
        8,
        "packet 01 must not be empty",
    ),
    Fault(
        "queue name over the limit",
        b"H0100102P0100000000000000000000000000256" + b"q" * 256,
        8,
        "packet 01 of 256 bytes is over the limit of 255",
    ),
    Fault(
        "queue name over the limit, wide",
        b"H0100102P01000000000000000000000000000000256" + b"q" * 256,
        8,
        "packet 01 of 256 bytes is over the limit of 255",
    ),
    Fault("queue name not UTF-8", b"H0100102P0100000000000000000000000000001\xff", 40, "must be UTF-8"),
    Fault("queue name with a bell", b"H0100102P0100000000000000000000000000001\x07", 40, "control character"),
    Fault(
        "dead letters of no queue",
        b"H0100202P0100000000000000000000000000005.dead",
        40,
        "a queue name cannot be empty",
    ),
    Fault(
        "dead letters of dead letters",
        b"H0100202P0100000000000000000000000000011a.dead.dead",
        40,
        "it is the door to the dead letters",
    ),
    Fault(
        "a length of 29 nines",
        b"H0100102" + QUEUE + b"P02" + b"9" * 29,
        43,
        "packet 02 of 99999999999999999999999999999 bytes is over the limit of 67108864",
    ),
    Fault(
        "a length of 33 nines",
        b"H0100102P01000000000000000000000000000000003FooP02" + b"9" * 33,
        47,
        "packet 02 of 999999999999999999999999999999999 bytes is over the limit of 67108864",
    ),
    Fault(
        "a count of 11 digits",
        b"H0100202" + QUEUE + b"P040000000000000000000000000001112345678901",
        43,
        "packet 04 of 11 bytes is over the limit of 10",
    ),
    Fault(
        "a count that is no number", b"H0100202" + QUEUE + b"P0400000000000000000000000000002-1", 75, "digits"
    ),
    Fault("an empty count", b"H0100202" + QUEUE + b"P04" + b"0" * 29, 43, "packet 04 must not be empty"),
    Fault(
        "an id over the limit",
        b"H0100402" + QUEUE + b"P0300000000000000000000000000256" + b"a" * 256,
        43,
        "packet 03 of 256 bytes is over the limit of 255",
    ),
    Fault(
        "no line break behind a packet header",
        b"H0100202\nP0100000000000000000000000000003Foo",
        41,
        "a line break must follow a packet header here",
    ),
    Fault(
        "no line break behind a content",
        b"H0100202\nP0100000000000000000000000000003\nFooP",
        45,
        "a line break must follow a content here",
    ),
)
