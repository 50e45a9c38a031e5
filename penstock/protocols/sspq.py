"""SSPQ on the wire: bytes to events and messages to bytes, for both sides.

A frame, all integers big endian:

    offset  size  field
    0       2     magic 0x55 0x99
    2       1     type
    3       1     retry counter
    4       4     payload size
    8       n     payload

This module owns the framing and nothing else: who may send what when is `sspq_session.py`.

Rules that always hold:
  * A `FrameReader` keeps at most one unfinished frame. It copies what it keeps, so the caller may
    reuse its receive buffer as soon as `feed` returns.
  * An unfinished payload gathers in one buffer that grows with what really came, never with what was
    announced, and is handed on without another copy. A payload that nobody wants is not kept at all.
  * How a stream is cut into chunks changes how events are grouped, never what they say.
  * What is done for one chunk is bounded by its share (`share.py`); the `rest` is for the next call.

How it fails: bad magic or a size over the limit raises `PeerViolation`; what came before it in the
same chunk is not lost but waits in `salvage()`, and every later `feed` raises the same again. An
unknown type is no failure: the frame is skipped with its payload and counted (`Unknown`). A message
that a frame cannot carry raises `MisuseError`.

Measured with `bench/bench_sspq.py`. What the reader's speed rests on: frames are walked in groups, so that
no Python object other than the payload's own bytes is made for one; a group of equal headers (a producer
with one message size) is taken apart by one compiled `Struct`, and is right exactly if putting it
together again gives the bytes that came.
"""

import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate
from typing import ClassVar

from penstock.model.batch import RETRIES_ENDLESS, RETRIES_NONE, Batch, Slice
from penstock.protocols.errors import MisuseError, PeerViolation
from penstock.protocols.gathering import Gathering
from penstock.protocols.share import UNBOUNDED

PROTOCOL = "sspq"
PAYLOAD_BYTES_MAX = 64 << 20
HEADER_BYTES = 8
MAGIC = b"\x55\x99"

# Of no document: types that every other peer skips, as it skips all that it does not know. A client asks with
# the first whether everything that it has said is stored; the broker answers yes with the same, no with the
# other: some of it was refused.
SYNC = 0x5C
SYNC_REFUSED = 0x5D


class Type(IntEnum):
    """What a frame is. OTHER never travels on purpose: it is the in-memory name of all unknown types."""

    SEND = 0x5E  # both ways: a message
    RECEIVE = 0xEC  # client: one message, please
    CONFIRM = 0xC0  # client: the message is done
    DEAD_RECEIVE = 0xDE  # client: one dead letter, please
    NO_RECEIVE = 0x0E  # server: none will come
    OTHER = 0xFF


@dataclass(slots=True)
class Messages:
    """A run of SEND frames; the retry bytes are the batch's `retries`."""

    batch: Batch


@dataclass(slots=True)
class Control:
    """Frames that carry no message: those of `types`, in that order, `count` times over."""

    types: tuple[Type, ...]
    count: int = 1


@dataclass(slots=True)
class Unknown:
    """Skipped frames of a type that SSPQ does not have."""

    type_byte: int
    count: int = 1


Event = Messages | Control | Unknown

_HEADER = struct.Struct(">II")  # magic, type and retry byte as one word; then the size
_MAGIC_WORD = 0x5599
_SEND_WORD = _MAGIC_WORD << 8 | Type.SEND  # what `word >> 8` is for a SEND frame
_SIZE_MAX = (1 << 31) - 1  # a batch's bounds are int32
_CHUNK_BYTES_MAX = 1 << 30  # larger chunks are read in pieces, so that a batch's bounds fit as well
FAST_PATHS = True
"""Whether a new `FrameReader` takes pairs and groups of frames at once. It does; tests of the walk do not."""

_GROUP = 32  # frames with equal headers that are taken apart together
_WALK = 256  # frames that are walked over before equal ones are looked for again
_KNOWN = frozenset(Type) - {Type.OTHER}
_CONFIRM_RECEIVE = (Type.CONFIRM, Type.RECEIVE)

# From this size on a payload that came in pieces becomes a batch of its own: joining it with its
# neighbours would copy it once more.
_LARGE_BYTES = 1 << 20


def frame(type_: Type, payload: bytes = b"", retries: int = 0) -> bytes:
    """One frame. Control frames are constants; messages by the thousand go through `encode_*`."""
    if type_ not in _KNOWN:
        raise MisuseError(f"sspq: {type_!r} is not a type that travels")
    if not 0 <= retries <= RETRIES_ENDLESS:
        raise MisuseError(f"sspq: {retries} retries do not fit in a byte (0 to {RETRIES_ENDLESS})")
    if len(payload) > _SIZE_MAX:
        raise MisuseError(f"sspq: a payload of {len(payload)} bytes is over {_SIZE_MAX}")
    return _HEADER.pack(_MAGIC_WORD << 16 | type_ << 8 | retries, len(payload)) + payload


RECEIVE = frame(Type.RECEIVE)
CONFIRM = frame(Type.CONFIRM)
DEAD_RECEIVE = frame(Type.DEAD_RECEIVE)
NO_RECEIVE = frame(Type.NO_RECEIVE)
SYNC_FRAMES = {type_: _HEADER.pack(_MAGIC_WORD << 16 | type_ << 8, 0) for type_ in (SYNC, SYNC_REFUSED)}
_PAIR = CONFIRM + RECEIVE
_PAIRS_64 = _PAIR * 64


@lru_cache(maxsize=256)
def _group_of(size: int) -> Callable[[bytes, int], tuple[bytes, ...]]:
    """Takes the payloads out of `_GROUP` frames that all have this size."""
    return struct.Struct(f"{HEADER_BYTES}x{size}s" * _GROUP).unpack_from


class FrameReader:
    """One direction of one connection, from bytes to events."""

    def __init__(self, *, payload_bytes_max: int = PAYLOAD_BYTES_MAX, share: int = UNBOUNDED) -> None:
        if not 0 < payload_bytes_max <= _SIZE_MAX:
            raise MisuseError(f"sspq: payload_bytes_max is {payload_bytes_max}, must be 1 to {_SIZE_MAX}")
        self.rest = b""
        """What the share did not reach of the last chunk. It is the caller's, who feeds it next."""

        self.held_bytes = 0
        """What it keeps between two chunks of a payload that is not whole."""

        self.share = share
        self._payload_bytes_max = payload_bytes_max
        self._position = 0  # of the first byte of the chunk at hand in the stream
        self._head = b""  # an unfinished header
        self._word = 0  # of the frame whose payload is unfinished
        self._missing = 0  # payload bytes still to come
        self._body: Gathering | None = None  # None: the missing bytes are of no interest
        self._events: list[Event] = []
        self._payloads: list[bytes] = []  # the run of messages at hand
        self._retries = bytearray()
        self._violation: PeerViolation | None = None
        self._fast = FAST_PATHS

    @property
    def position(self) -> int:
        """How many bytes of the stream have been read."""
        return self._position

    @property
    def unfinished(self) -> bool:
        """Whether a frame has begun, and its rest is not there."""
        return bool(self._head or self._missing)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Event]:
        """What a chunk says, together with what was left of the chunks before it."""
        if self._violation is not None:
            raise self._violation
        self._events = []
        self.rest = b""
        if len(data) <= _CHUNK_BYTES_MAX:
            self._feed(data, self.share)
        else:
            view = memoryview(data)
            for at in range(0, len(data), _CHUNK_BYTES_MAX):
                self._feed(view[at : at + _CHUNK_BYTES_MAX], UNBOUNDED)
        return self.salvage()

    def salvage(self) -> list[Event]:
        """After a violation: the events before it in the same chunk. Gives them once."""
        events, self._events = self._events, []
        return events

    def _feed(self, data: bytes | bytearray | memoryview, share: int) -> None:
        at = self._resume(data) if self._missing or self._head else 0
        end = len(data)
        if at < end:
            # One copy of the chunk costs a tenth of what slicing a memoryview for each payload would.
            chunk = data if isinstance(data, bytes) else bytes(memoryview(data)[at:])
            self._position += end - len(chunk)
            self._walk(chunk, at - (end - len(chunk)), share)
            self._position += len(chunk) - len(self.rest)
        else:
            self._position += end
        self.held_bytes = self._body.tell() if self._body is not None else 0
        self._flush()

    def _resume(self, data: bytes | bytearray | memoryview) -> int:
        """Goes on with the unfinished frame; returns where in the chunk the next one begins."""
        at = 0
        if self._head:
            at = min(HEADER_BYTES - len(self._head), len(data))
            head = self._head + bytes(data[:at])
            if len(head) < HEADER_BYTES:
                self._head = head
                return at
            self._head = b""
            word, size = _HEADER.unpack(head)
            self._check(word, size, at - HEADER_BYTES, head)
            self._missing = size
            self._begin_payload(word, size)
        if self._missing:
            start = at
            at = min(start + self._missing, len(data))
            if self._body is not None:
                self._body.write(memoryview(data)[start:at])
            self._missing -= at - start
            if self._missing:
                return at
        payload = self._body.getvalue() if self._body is not None else b""
        self._body = None
        if len(payload) >= _LARGE_BYTES:
            self._flush()
        self._frame(self._word, payload)
        if len(payload) >= _LARGE_BYTES:
            self._flush()
        return at

    def _walk(self, data: bytes, at: int, left: int) -> None:
        """All whole frames from `at` on; the beginning of the last one is kept if it is not whole."""
        end = len(data)
        unpack = _HEADER.unpack_from
        while at < end:
            if left <= 0:
                self.rest = data[at:]
                return
            left -= 1
            start = at
            if self._fast:
                at = self._pairs(data, at)
                at = self._equals(data, at)
            if at > start:
                continue
            # Every frame has the same outline, so the walk need not know what it walks over. It may
            # step beyond the end: there `unpack` raises, which is cheaper than asking each time.
            words: list[int] = []
            payloads: list[bytes] = []
            add_word, add_payload = words.append, payloads.append
            try:
                for _ in range(_WALK):
                    word, size = unpack(data, at)
                    add_word(word)
                    add_payload(data[at + HEADER_BYTES : (at := at + HEADER_BYTES + size)])
            except struct.error:
                self._file(words, payloads, data, start, at)
                if at < end:
                    self._head = data[at:]
                return
            self._file(words, payloads, data, start, at)
            left -= len(words) >> 1

    def _pairs(self, data: bytes, at: int) -> int:
        """CONFIRM and RECEIVE in one segment, as clients send them, however many there are."""
        startswith = data.startswith
        if not startswith(_PAIR, at):
            return at
        start = at
        while startswith(_PAIRS_64, at):
            at += len(_PAIRS_64)
        while startswith(_PAIR, at):
            at += len(_PAIR)
        self._flush()
        self._events.append(Control(_CONFIRM_RECEIVE, (at - start) // len(_PAIR)))
        return at

    def _equals(self, data: bytes, at: int) -> int:
        """SEND frames with equal headers, a group at a time, as far as they go."""
        head = data[at : at + HEADER_BYTES]
        if len(head) < HEADER_BYTES:
            return at
        word, size = _HEADER.unpack(head)
        if word >> 8 != _SEND_WORD or size > self._payload_bytes_max:
            return at
        stride = HEADER_BYTES + size
        group_bytes = _GROUP * stride
        # The last header of a group is compared first: it settles nearly every "no" cheaply.
        while at + group_bytes <= len(data) and data.startswith(head, at + group_bytes - stride):
            group = _group_of(size)(data, at)
            if data[at : at + group_bytes] != head + head.join(group):
                break
            self._payloads += group
            self._retries += head[3:4] * _GROUP
            at += group_bytes
        return at

    def _file(self, words: list[int], payloads: list[bytes], data: bytes, at: int, stop: int) -> None:
        """Files walked frames, which go from `at` to `stop`. The last one may reach beyond the chunk."""
        if stop > len(data):
            word, payload = words.pop(), payloads.pop()
            start = len(data) - len(payload) - HEADER_BYTES
            self._file(words, payloads, data, at, start)
            size = stop - start - HEADER_BYTES
            self._check(word, size, start, data[start : start + HEADER_BYTES])
            self._missing = stop - len(data)
            self._begin_payload(word, size)
            if self._body is not None:
                self._body.write(payload)
            return
        limit = self._payload_bytes_max
        if (
            len(set(words)) == 1
            and words[0] >> 8 == _SEND_WORD
            and (len(data) <= limit or max(map(len, payloads)) <= limit)
        ):
            self._payloads += payloads
            self._retries += bytes((words[0] & 0xFF,)) * len(payloads)
            return
        for word, payload in zip(words, payloads, strict=True):
            self._check(word, len(payload), at, data[at : at + HEADER_BYTES])
            self._frame(word, payload)
            at += HEADER_BYTES + len(payload)

    def _check(self, word: int, size: int, at: int, head: bytes) -> None:
        if word >> 16 != _MAGIC_WORD:
            self._violate(f"the magic is {word >> 16:#06x}, not {_MAGIC_WORD:#06x}", at, head)
        if size > self._payload_bytes_max:
            limit = self._payload_bytes_max
            self._violate(f"a payload of {size} bytes is over the limit of {limit}", at, head)

    def _violate(self, message: str, at: int, head: bytes) -> None:
        self._flush()
        self._violation = PeerViolation(PROTOCOL, message, position=self._position + at, offending=head)
        raise self._violation

    def _begin_payload(self, word: int, size: int) -> None:
        self._word = word
        self._body = Gathering(size) if word >> 8 == _SEND_WORD else None

    def _frame(self, word: int, payload: bytes) -> None:
        """Files one whole frame with good magic."""
        type_byte = word >> 8 & 0xFF
        if type_byte == Type.SEND:
            self._payloads.append(payload)
            self._retries.append(word & 0xFF)
            return
        self._flush()
        last = self._events[-1] if self._events else None
        if type_byte not in _KNOWN:
            if isinstance(last, Unknown) and last.type_byte == type_byte:
                last.count += 1
            else:
                self._events.append(Unknown(type_byte))
        elif isinstance(last, Control) and last.types == (type_byte,):
            last.count += 1
        else:
            self._events.append(Control((Type(type_byte),)))

    def _flush(self) -> None:
        """Makes one event of the run of messages at hand."""
        payloads = self._payloads
        if not payloads:
            return
        retries, count = self._retries, len(payloads)
        first = retries[0]
        same = retries.count(first) == count
        batch = Batch(
            b"".join(payloads),
            array("i", accumulate(map(len, payloads), initial=0)),
            retries=array("h", (first,)) * count if same else array("h", list(retries)),
            protocol=PROTOCOL,
        )
        self._events.append(Messages(batch))
        self._payloads = []
        self._retries = bytearray()


class _Headers(dict[int, bytes]):
    """SEND headers by `retries << 32 | size`; bounded, because sizes are the peers' choice."""

    COUNT_MAX: ClassVar[int] = 4096

    def __missing__(self, key: int) -> bytes:
        if len(self) >= self.COUNT_MAX:
            self.clear()
        header = self[key] = _HEADER.pack(_SEND_WORD << 8 | key >> 32, key & 0xFFFFFFFF)
        return header


_HEADERS = _Headers()

# RETRIES_NONE is written as 255; `& 255` does that and leaves the others as they are.
_RETRIES = frozenset(range(RETRIES_NONE, RETRIES_ENDLESS + 1))

# From this average size on, payloads are joined from views instead of slices: the slice's copy then costs
# more than the view's object.
_VIEW_BYTES = 4096


def encode_batch(batch: Batch) -> bytes:
    """SEND frames for a whole batch, in one buffer. No counter is written as 255, "without end"."""
    out: list[bytes | memoryview] = []
    _append_frames(out, batch.payload, batch.bounds, batch.retries)
    return b"".join(out)


def encode_slices(slices: Iterable[Slice]) -> bytes:
    """SEND frames for stored messages, in one buffer. No counter is written as 255, "without end"."""
    out: list[bytes | memoryview] = []
    for piece in slices:
        lo, hi = piece.lo, piece.hi
        retries = piece.retries[lo:hi] if piece.retries is not None else None
        _append_frames(out, piece.payload, piece.bounds[lo : hi + 1], retries)
    return b"".join(out)


def _append_frames(
    out: list[bytes | memoryview],
    payload: bytes | memoryview,
    bounds: Sequence[int],
    retries: Sequence[int] | None,
) -> None:
    marks = list(bounds)
    start, ends = marks[0], marks[1:]
    if marks[-1] - start >= _VIEW_BYTES * len(ends):
        payload = memoryview(payload)
    values = {RETRIES_NONE} if retries is None else set(retries)
    if not _RETRIES.issuperset(values):
        raise MisuseError(f"sspq: retries must be 0 to {RETRIES_ENDLESS}, or {RETRIES_NONE} for none")
    if retries is None or len(values) == 1:
        base = (values.pop() & RETRIES_ENDLESS) << 32
        for end in ends:
            out += _HEADERS[base + end - start], payload[start:end]
            start = end
    else:
        for end, left in zip(ends, retries, strict=True):
            out += _HEADERS[((left & RETRIES_ENDLESS) << 32) + end - start], payload[start:end]
            start = end
