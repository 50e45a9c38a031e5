"""NATS on the wire, as its clients see it: bytes from a server to events.

What a server sends are lines; two of them are followed by a body of announced size:

    INFO {json}
    MSG  subject sid [reply] bytes                 payload CR LF
    HMSG subject sid [reply] header-bytes bytes    headers payload CR LF
    PING   PONG   +OK   -ERR 'text'

A line ends with CR LF. The CR is blank space as a server's parser sees it, and as we do: LF alone will do.

This module owns the reading of that and nothing else. What a client sends is in `nats_write.py`, the
headers in `nats_headers.py`, and what JetStream says inside messages in `nats_jetstream.py`.

Rules that always hold:
  * Messages of one subscription that come in one chunk are one `Messages`: parallel lists, no object for
    a message. A status (headers with a code and nothing else) is an event of its own and parts them.
  * Within a subscription, order is what the server sent. Between subscriptions, and between messages and
    the other words, how a stream is cut into chunks may change the order, never what is said.
  * A `Reader` keeps at most one unfinished frame, in a buffer that grows with what came and not with what
    was announced. It copies what it keeps: the receive buffer may be used again.

How it fails: what no server may say raises `PeerViolation`; what came before it in the same chunk waits
in `salvage()`, and every later `feed` raises the same again.

Measured with `bench/bench_nats.py`. What the speed rests on: one search and one split for a message's
line, sizes looked up instead of read, and bound methods for the lists of a subscription.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

from penstock.protocols.errors import MisuseError, PeerViolation

PROTOCOL = "nats"
FRAME_BYTES_MAX = 64 << 20
"""A server's `max_payload` is at most 64 MiB."""

LINE_BYTES_MAX = 1 << 20
"""The longest line is INFO with the addresses of all servers and gateways of a large cluster."""

END = b"\r\n"
HEADERS_START = b"NATS/1.0"


@dataclass(slots=True)
class Info:
    """What a server says of itself: at the beginning, and again whenever it changes. Its JSON: `Any`."""

    said: dict[str, Any]


@dataclass(slots=True)
class Messages:
    """Messages of one subscription. All lists are equally long; `headers` holds whole blocks, or b""."""

    sid: int
    subjects: list[bytes] = field(default_factory=list)
    replies: list[bytes] = field(default_factory=list)
    headers: list[bytes] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.payloads)


@dataclass(slots=True)
class Status:
    """A message that says how things are, instead of carrying something: 100, 404, 408, 409, 503, …"""

    sid: int
    subject: bytes
    reply: bytes
    code: int
    text: str
    headers: bytes


@dataclass(slots=True)
class Ping:
    """The server wants to hear PONG."""


@dataclass(slots=True)
class Pong:
    """The server has read everything up to our PING."""


@dataclass(slots=True)
class Okay:
    """Said in verbose mode only, which we do not ask for."""


@dataclass(slots=True)
class Refused:
    """-ERR: the server says no, and in most cases closes the connection."""

    text: str


Event = Info | Messages | Status | Ping | Pong | Okay | Refused
Add = Callable[[bytes], None]

_NUMBER_DIGITS_MAX = 19
_CACHE_MAX = 4096


class _Numbers(dict[bytes, int]):
    """What digits mean, -1 for anything else. Bounded, because sizes are the peers' choice."""

    def __missing__(self, text: bytes) -> int:
        if len(self) >= _CACHE_MAX:
            self.clear()
        good = text.isdigit() and len(text) <= _NUMBER_DIGITS_MAX
        number = self[text] = int(text) if good else -1
        return number


_WORDS: dict[bytes, Callable[[], Event]] = {b"PING": Ping, b"PONG": Pong, b"+OK": Okay}


class Reader:
    """What one server says on one connection, from bytes to events."""

    def __init__(
        self, *, frame_bytes_max: int = FRAME_BYTES_MAX, line_bytes_max: int = LINE_BYTES_MAX
    ) -> None:
        if frame_bytes_max < 1 or line_bytes_max < 1:
            raise MisuseError(f"nats: limits of {frame_bytes_max} and {line_bytes_max} bytes let nothing in")
        self._frame_bytes_max = frame_bytes_max
        self._line_bytes_max = line_bytes_max
        self._position = 0  # of the first byte of the chunk at hand in the stream
        self._kept = BytesIO()  # the unfinished frame
        self._missing = 0  # bytes until it is whole; 0 while its line has no end
        self._events: list[Event] = []
        self._open: dict[bytes, tuple[Add, Add, Add, Add]] = {}  # by sid: the lists that still grow
        self._numbers = _Numbers()
        self._violation: PeerViolation | None = None

    @property
    def position(self) -> int:
        """How many bytes of the stream have been read, those of an unfinished frame among them."""
        return self._position + self._kept.tell()

    def feed(self, data: bytes | bytearray | memoryview) -> list[Event]:
        """What a chunk says, together with what was left of the chunks before it."""
        if self._violation is not None:
            raise self._violation
        kept = self._kept
        if self._missing > len(data):
            kept.write(data)
            self._missing -= len(data)
            return []
        if kept.tell():
            # With a line that has no end this copies the chunk, with a body only its missing part.
            first = self._missing or len(data)
            kept.write(data[:first])
            whole, self._kept = kept.getvalue(), BytesIO()
            self._missing = 0
            self._walk(whole)
            data = data[first:]
        if len(data):
            self._walk(bytes(data))
        return self.salvage()

    def salvage(self) -> list[Event]:
        """After a violation: the events before it in the same chunk. Gives them once."""
        events, self._events = self._events, []
        self._open.clear()
        return events

    def _walk(self, data: bytes) -> None:
        """All whole frames; the beginning of the last one is kept if it is not whole."""
        find, numbers, growing, length = data.find, self._numbers, self._open, len(data)
        frame_bytes_max, line_bytes_max = self._frame_bytes_max, self._line_bytes_max
        at = 0
        while at < length:
            start = find(b"\n", at) + 1
            if start - at > line_bytes_max or (not start and length - at >= line_bytes_max):
                raise self._violated(f"a line is over the limit of {line_bytes_max} bytes", data, at)
            if not start:
                break
            parts = data[at:start].split()
            count = len(parts)
            header_bytes, reply = 0, b""
            if count == 6 and parts[0] == b"HMSG":
                _, subject, sid, reply, header_text, size_text = parts
                header_bytes = numbers[header_text]
            elif count == 5 and parts[0] == b"MSG":
                _, subject, sid, reply, size_text = parts
            elif count == 4 and parts[0] == b"MSG":
                _, subject, sid, size_text = parts
            elif count == 5 and parts[0] == b"HMSG":
                _, subject, sid, header_text, size_text = parts
                header_bytes = numbers[header_text]
            else:
                self._line(parts, data, at, start)
                at = start
                continue
            size = numbers[size_text]
            body, stop = start + header_bytes, start + size
            if not start <= body <= stop or size > frame_bytes_max:
                raise self._violated(self._wrong_sizes(header_bytes, size), data, at)
            if data[stop : stop + 2] != END:
                if stop + 2 > length:
                    self._missing = stop + 2 - length
                    break
                raise self._violated(f"a body of {size} bytes is not followed by CR LF", data, at)
            if header_bytes:
                headers = data[start:body]
                if headers[8:9] != b"\r":
                    self._status(subject, sid, reply, headers, data, at)
                    at = stop + 2
                    continue
            else:
                headers = b""
            adds = growing.get(sid)
            if adds is None:
                adds = self._grow(sid, data, at)
            add_subject, add_reply, add_headers, add_payload = adds
            add_subject(subject)
            add_reply(reply)
            add_headers(headers)
            add_payload(data[body:stop])
            at = stop + 2
        self._kept.write(data[at:])
        self._position += at

    def _wrong_sizes(self, header_bytes: int, size: int) -> str:
        if size > self._frame_bytes_max:
            return f"a message of {size} bytes is over the limit of {self._frame_bytes_max}"
        if size < 0 or header_bytes < 0:
            return "a message's size is no number"
        return f"headers of {header_bytes} bytes do not fit in a message of {size}"

    def _grow(self, sid: bytes, data: bytes, at: int) -> tuple[Add, Add, Add, Add]:
        """Begins a run of messages of a subscription."""
        number = self._numbers[sid]
        if number < 0:
            raise self._violated("a subscription's number is no number", data, at)
        run = Messages(number)
        self._events.append(run)
        adds = run.subjects.append, run.replies.append, run.headers.append, run.payloads.append
        self._open[sid] = adds
        return adds

    def _status(self, subject: bytes, sid: bytes, reply: bytes, headers: bytes, data: bytes, at: int) -> None:
        number = self._numbers[sid]
        line, _, _ = headers.partition(END)
        code, text = line[9:12], line[13:]
        if number < 0 or line[:9] != HEADERS_START + b" " or not (code.isdigit() and len(code) == 3):
            raise self._violated("a message's headers have no version that we know", data, at)
        self._open.pop(sid, None)
        words = text.decode("utf-8", "replace").strip()
        self._events.append(Status(number, subject, reply, int(code), words, headers))

    def _line(self, parts: list[bytes], data: bytes, at: int, end: int) -> None:
        """A line that brings no message."""
        word = parts[0] if parts else b""
        rest = data[at:end].strip()[len(word) :].strip()
        make = _WORDS.get(word)
        if make is not None and not rest:
            self._events.append(make())
        elif word == b"INFO":
            self._events.append(Info(self._json(rest, data, at)))
        elif word == b"-ERR":
            self._events.append(Refused(rest.decode("utf-8", "replace").strip("'")))
        else:
            raise self._violated("a line is nothing that a server says", data, at)

    def _json(self, text: bytes, data: bytes, at: int) -> dict[str, Any]:
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            raise self._violated("INFO is not followed by a JSON object", data, at)
        return said

    def _violated(self, message: str, data: bytes, at: int) -> PeerViolation:
        offending = data[at : at + PeerViolation.OFFENDING_BYTES_MAX]
        self._violation = PeerViolation(PROTOCOL, message, position=self._position + at, offending=offending)
        return self._violation
