"""NATS byte vectors: what a server says, what it means, and where that is written.

A row says what a stream reads as, message by message: `("message", sid, subject, reply, headers, payload)`,
`("status", sid, subject, code, text)`, or `("word", what)` for everything else.

Sources: "doc" is the client protocol as NATS publishes it, "2.15.1" is what a server of that version was
seen to put on the wire.
"""

from dataclasses import dataclass

Read = tuple[object, ...]


@dataclass(frozen=True)
class Row:
    name: str
    source: str
    data: bytes
    reads: tuple[Read, ...]


@dataclass(frozen=True)
class Fault:
    name: str
    data: bytes
    position: int
    message: str


ROWS = (
    Row("ping", "doc", b"PING\r\n", (("word", "Ping()"),)),
    Row("pong", "doc", b"PONG\r\n", (("word", "Pong()"),)),
    Row("ok", "doc: verbose mode", b"+OK\r\n", (("word", "Okay()"),)),
    Row(
        "error",
        "doc",
        b"-ERR 'Authorization Violation'\r\n",
        (("word", "Refused(text='Authorization Violation')"),),
    ),
    Row("error of one word", "doc", b"-ERR\r\n", (("word", "Refused(text='')"),)),
    Row(
        "info",
        "2.15.1: a blank stands before the line's end",
        b'INFO {"server_id":"N","port":4222,"headers":true,"max_payload":1048576} \r\n',
        (("word", "Info({'server_id': 'N', 'port': 4222, 'headers': True, 'max_payload': 1048576})"),),
    ),
    Row(
        "message",
        "doc",
        b"MSG FOO.BAR 9 11\r\nHello World\r\n",
        (("message", 9, b"FOO.BAR", b"", b"", b"Hello World"),),
    ),
    Row(
        "message with a reply",
        "doc",
        b"MSG FOO.BAR 9 GREETING.34 11\r\nHello World\r\n",
        (("message", 9, b"FOO.BAR", b"GREETING.34", b"", b"Hello World"),),
    ),
    Row("message of nothing", "doc", b"MSG a 1 0\r\n\r\n", (("message", 1, b"a", b"", b"", b""),)),
    Row(
        "message with headers",
        "doc",
        b"HMSG FOO.BAR 9 34 45\r\nNATS/1.0\r\nFoodGroup: vegetable\r\n\r\nHello World\r\n",
        (("message", 9, b"FOO.BAR", b"", b"NATS/1.0\r\nFoodGroup: vegetable\r\n\r\n", b"Hello World"),),
    ),
    Row(
        "message with headers and a reply",
        "doc",
        b"HMSG FOO.BAR 9 BAZ.69 34 45\r\nNATS/1.0\r\nFoodGroup: vegetable\r\n\r\nHello World\r\n",
        (("message", 9, b"FOO.BAR", b"BAZ.69", b"NATS/1.0\r\nFoodGroup: vegetable\r\n\r\n", b"Hello World"),),
    ),
    Row(
        "headers and nothing else",
        "2.15.1: the end of a commit",
        b"HMSG a 1 12 12\r\nNATS/1.0\r\n\r\n\r\n",
        (("message", 1, b"a", b"", b"NATS/1.0\r\n\r\n", b""),),
    ),
    Row(
        "delivery",
        "2.15.1",
        b"MSG q.s 7 $JS.ACK.S.C.1.1.1.1794750662919939512.331 5\r\nhello\r\n",
        (("message", 7, b"q.s", b"$JS.ACK.S.C.1.1.1.1794750662919939512.331", b"", b"hello"),),
    ),
    Row(
        "no responders",
        "2.15.1",
        b"HMSG i.4 1 40 40\r\nNATS/1.0 503\r\nNats-Subject: q.nobody\r\n\r\n\r\n",
        (("status", 1, b"i.4", 503, ""),),
    ),
    Row(
        "end of a batch",
        "2.15.1",
        b"HMSG i.dg 1 66 66\r\nNATS/1.0 204 EOB\r\n"
        b"Nats-Num-Pending: 329\r\nNats-Last-Sequence: 3\r\n\r\n\r\n",
        (("status", 1, b"i.dg", 204, "EOB"),),
    ),
    Row(
        "a status between messages",
        "2.15.1: it parts the messages of its subscription",
        b"MSG a 1 1\r\nx\r\nHMSG a 1 28 28\r\nNATS/1.0 404 No Messages\r\n\r\n\r\nMSG a 1 1\r\ny\r\n",
        (
            ("message", 1, b"a", b"", b"", b"x"),
            ("status", 1, b"a", 404, "No Messages"),
            ("message", 1, b"a", b"", b"", b"y"),
        ),
    ),
    Row(
        "frames inside a message",
        "doc: only the size says where a message ends",
        b"MSG a 1 14\r\nPING\r\nMSG b\r\n2\r\n",
        (("message", 1, b"a", b"", b"", b"PING\r\nMSG b\r\n2"),),
    ),
    Row(
        "blanks between fields",
        "doc: one or more blanks or tabs",
        b"MSG\ta  1\t1\r\nx\r\n",
        (("message", 1, b"a", b"", b"", b"x"),),
    ),
)

LIMIT_BYTES = 64
"""What a reader of the faults takes at most, in a frame and in a line."""

FAULTS = (
    Fault("text", b"HTTP/1.1 400 Bad Request\r\n", 0, "nothing that a server says"),
    Fault("nothing in a line", b"\r\n", 0, "nothing that a server says"),
    Fault("a word with something behind it", b"PING 1\r\n", 0, "nothing that a server says"),
    Fault("a client's word", b"PUB a 0\r\n\r\n", 0, "nothing that a server says"),
    Fault("too few fields", b"MSG a 1\r\n", 0, "nothing that a server says"),
    Fault("too many fields", b"HMSG a 1 b 2 3 4\r\n", 0, "nothing that a server says"),
    Fault("after a good frame", b"PING\r\nMSG a 1 -1\r\n", 6, "size is no number"),
    Fault("a size with a sign", b"MSG a 1 +1\r\nx\r\n", 0, "size is no number"),
    Fault("a size with an underscore", b"MSG a 1 1_0\r\n", 0, "size is no number"),
    Fault("a size over the limit", b"MSG a 1 65\r\n", 0, "a message of 65 bytes is over the limit of 64"),
    Fault("a size without end", b"MSG a 1 9999999999999999999\r\n", 0, "is over the limit of 64"),
    Fault("no end after a body", b"MSG a 1 1\r\nxyz\r\n", 0, "a body of 1 bytes is not followed by CR LF"),
    Fault("headers larger than the message", b"HMSG a 1 9 8\r\n", 0, "headers of 9 bytes do not fit"),
    Fault("headers of no version", b"HMSG a 1 9 9\r\nNATS/2.0 \r\n", 0, "no version that we know"),
    Fault("a status of letters", b"HMSG a 1 14 14\r\nNATS/1.0 abc\r\n\r\n", 0, "no version that we know"),
    Fault("a subscription of letters", b"MSG a b 1\r\nx\r\n", 0, "number is no number"),
    Fault("an info without JSON", b"INFO {\r\n", 0, "INFO is not followed by a JSON object"),
    Fault("an info of something else", b"INFO [1]\r\n", 0, "INFO is not followed by a JSON object"),
    Fault("a line over the limit", b"PING\r\n" + b"x" * 65, 6, "a line is over the limit of 64 bytes"),
)
