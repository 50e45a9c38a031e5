"""Frames of the relay: what a follower and the leader say to each other over one TCP link.

What stands in the bodies of frames is in `columns.py` (messages) and `word_codec.py` (words).

    uint32  length of the body    little endian, as everything in the log is
    uint8   kind                  see `Kind`
    uint8   flag                  its meaning is the kind's: a door, a lane, yes or no
    uint16  0
    uint32  port                  the follower's number of a connection; 0 where the frame speaks of none
    bytes   body

A link is TLS, and begins with a greeting in which both sides prove who they are (`trust.py`): `HELLO` from
the follower, `CHALLENGE`, `PROOF`, and `WELCOME` from the leader, whose body is empty, or says in JSON why
the link is refused and closed. A link of the kind `http` carries `DATA` and `END` from then on (`pipe.py`).

Rules that always hold:
  * Frames come out whole and in order (`common/framing.py`); a body holds until the next chunk.
  * No frame is larger than the reader's bound. Until the hello has been judged, that is a small one.

How it fails: `PeerViolation`, which ends the link. Both ends are ours: it is a fault of ours, or a stranger.
"""

import json
import struct
from array import array
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Final, NamedTuple

from penstock.common.framing import Buffer as Buffer
from penstock.common.framing import Framing
from penstock.protocols.errors import PeerViolation

Fields = dict[str, Any]  # what JSON can say; each reader of one checks its own

MAGIC: Final = "penstock-relay"
VERSION: Final = 3
HELLO_BYTES_MAX: Final = 4096
FRAME_BYTES_MAX: Final = (1 << 30) + (1 << 28)
"""The largest batch that the log takes, and its columns."""

_HEADER: Final = struct.Struct("<IBBHI")
HEADER_BYTES: Final = _HEADER.size
NUMBER: Final = struct.Struct("<q")
COUNT: Final = struct.Struct("<I")
ROOM: Final = struct.Struct("<qqq")
"""Of a ROOM frame: bytes that have left the buffers, deliveries that were seen, places for more."""


class Kind(IntEnum):
    """What a frame says. Both ends have the same version: the numbers may change with it."""

    HELLO = 1
    WELCOME = 2
    CHALLENGE = 3
    PROOF = 4
    # Of a link that carries HTTP, both ways.
    DATA = 5
    END = 6
    # From the follower.
    ATTACH = 10
    DETACH = 11
    WORDS = 12
    PUBLISH = 13
    CLAIM = 14
    RESUMED = 15
    ROOM = 16
    IDLE = 17
    BLOCKED = 18
    RETURN = 19
    USER = 20
    # From the leader.
    DELIVER = 40
    CONSUMING = 41
    DECLINE = 42
    DELIVERED = 43
    REPLIES = 44
    UNDELIVERED = 45
    BROADCAST = 46
    HOLD = 47
    FINISH = 48
    LOG = 49
    STORED = 50
    REFUSED = 51
    SETTLED = 52


ANY_SHARD: Final = -1
CLAIM_DEAD: Final = 1  # of a CLAIM: held through the dead-letter door
CLAIM_SETTLED: Final = 2  # of a CLAIM: held no more, the settlement follows
CLAIM_ATTEMPTS: Final = 2  # of a CLAIM: above so many bits, `Claim.attempts_max` plus 1; 0: it is not told
CLAIM_ATTEMPTS_MAX: Final = (255 >> CLAIM_ATTEMPTS) - 1
WORDS_ACTIVE: Final = 1  # of WORDS: demands that were in force at the leader before
WORDS_AGAIN: Final = 2  # of WORDS: settlements that may have been said before
WORDS_BEHIND: Final = 4  # of WORDS: settlements behind shipments that may be refused yet
WORDS_EPOCH: Final = 3  # of such WORDS: above so many bits, the epoch of the main lane
WORDS_EPOCHS: Final = 256 >> WORDS_EPOCH
FINISH_ENDED: Final = 1  # of FINISH: by an operator
FINISH_LATE: Final = 2  # of FINISH: what it claims is not there for it any more

_KINDS: Final = {int(kind): kind for kind in Kind}


class Frame(NamedTuple):
    """One frame, whole. The body holds until the reader gets its next chunk."""

    kind: Kind
    flag: int
    port: int
    body: memoryview
    position: int  # of its first byte in the stream, for errors


class Hello(NamedTuple):
    """Who opens a link, and what for."""

    kind: str  # "words" or "http"
    front_end: str  # the id of the follower
    term: int  # of the leader that it means to speak to
    life: str = ""  # whoever has another one counts its shipments anew
    nonce: str = ""  # of this link alone
    caller: str = ""  # whose HTTP it carries: the address, or nothing where there is none
    shard: int = 0  # whose leader is meant; `ANY_SHARD`: this front-end, whatever it leads

    def said(self) -> dict[str, object]:
        """What it says. The shard is left out where it is the first, as earlier versions know no other."""
        return {name: value for name, value in self._asdict().items() if name != "shard" or value}


def violation(message: str, position: int, offending: Buffer = b"") -> PeerViolation:
    return PeerViolation("relay", message, position=position, offending=bytes(offending[:32]))


def encode_frame(kind: Kind, *buffers: Buffer, port: int = 0, flag: int = 0) -> bytes:
    """One frame as bytes of its own: what it was made of may change afterwards."""
    length = sum(map(len, buffers))
    if length > FRAME_BYTES_MAX:
        raise ValueError(f"a {kind.name} frame of {length} bytes; at most {FRAME_BYTES_MAX} fit the relay")
    return b"".join((_HEADER.pack(length, kind, flag, 0, port), *buffers))


def flagged(header: bytes, flag: int) -> bytes:
    """The header of a frame, with another flag."""
    length, kind, _, zero, port = _HEADER.unpack(header)
    return _HEADER.pack(length, kind, flag, zero, port)


def encode_json(fields: Fields) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_json(frame: Frame) -> Fields:
    try:
        fields = json.loads(bytes(frame.body))
    except ValueError as error:
        raise violation(f"a {frame.kind.name} frame without JSON ({error})", frame.position) from None
    if not isinstance(fields, dict):
        raise violation(f"a {frame.kind.name} frame with a {type(fields).__name__}", frame.position)
    return fields


def encode_hello(hello: Hello) -> bytes:
    return encode_frame(Kind.HELLO, encode_json({"magic": MAGIC, "version": VERSION, **hello.said()}))


def decode_hello(frame: Frame) -> Hello:
    """The hello of a link; a violation where the peer speaks something else, or another version."""
    if frame.kind is not Kind.HELLO:
        raise violation(f"a link that begins with {frame.kind.name}, not with HELLO", frame.position)
    fields = decode_json(frame)
    if fields.get("magic") != MAGIC or fields.get("version") != VERSION:
        raise violation(
            f"a peer of version {fields.get('version')!r}, this is {VERSION}: run one Penstock everywhere",
            frame.position,
        )
    try:
        return Hello(
            str(fields["kind"]),
            str(fields["front_end"]),
            int(fields["term"]),
            str(fields["life"]),
            str(fields["nonce"]),
            str(fields["caller"]),
            int(fields.get("shard", 0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise violation(f"a hello that lacks or spoils {error}", frame.position) from None


class Reader:
    """Received chunks to frames."""

    __slots__ = ("_framing", "_position", "frame_bytes_max")

    def __init__(self, frame_bytes_max: int = HELLO_BYTES_MAX) -> None:
        self.frame_bytes_max = frame_bytes_max  # may be raised between two frames
        self._framing = Framing(HEADER_BYTES, self._frame_bytes)
        self._position = 0

    def feed(self, data: Buffer) -> Iterator[Frame]:
        """The frames that are whole now. Take all of them before the chunk is reused."""
        return map(self._frame, self._framing.feed(data))

    def _frame_bytes(self, head: Buffer) -> int:
        length: int = _HEADER.unpack(head)[0]
        if length > self.frame_bytes_max:
            raise violation(
                f"a frame of {length} bytes, at most {self.frame_bytes_max} are allowed", self._position, head
            )
        return HEADER_BYTES + length

    def _frame(self, view: memoryview) -> Frame:
        _, number, flag, zero, port = _HEADER.unpack_from(view)
        kind = _KINDS.get(number)
        if kind is None or zero:
            raise violation(f"no frame has the kind {number}", self._position, view)
        frame = Frame(kind, flag, port, view[HEADER_BYTES:], self._position)
        self._position += len(view)
        return frame


class Body:
    """Reads a frame's body from front to end; whatever does not fit is a violation."""

    __slots__ = ("_at", "_frame", "_view")

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._view = frame.body
        self._at = 0

    def bad(self, what: str) -> PeerViolation:
        frame = self._frame
        return violation(f"a {frame.kind.name} frame with {what}", frame.position + self._at, self._view)

    def raw(self, count: int) -> memoryview:
        """The next bytes, as a view."""
        end = self._at + count
        if end > len(self._view):
            raise self.bad(f"{len(self._view)} bytes, of which {end} are needed")
        view = self._view[self._at : end]
        self._at = end
        return view

    def numbers(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.raw(form.size))

    def text(self) -> str:
        (length,) = self.numbers(COUNT)
        try:
            return str(self.raw(length), "utf-8")
        except UnicodeDecodeError as error:
            raise self.bad(f"a text that is not UTF-8 ({error})") from None

    def short(self) -> bytes:
        """A few bytes behind their number."""
        return bytes(self.raw(self.raw(1)[0]))

    def column(self, typecode: str, count: int) -> "array[int]":
        """Numbers of one width, as an array of its own."""
        column = array(typecode)
        column.frombytes(self.raw(column.itemsize * count))
        return column

    def rest(self) -> memoryview:
        return self.raw(len(self._view) - self._at)

    @property
    def left(self) -> int:
        return len(self._view) - self._at

    def end(self) -> None:
        if self.left:
            raise self.bad(f"{self.left} bytes too many")


def text_bytes(text: str) -> bytes:
    """What `Body.text` reads."""
    encoded = text.encode()
    return COUNT.pack(len(encoded)) + encoded


def short_bytes(value: bytes) -> bytes:
    """What `Body.short` reads."""
    return bytes((len(value),)) + value
