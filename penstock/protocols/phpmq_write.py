"""PHPMQ written: messages, windows, verdicts and dispatches to bytes, many into one buffer.

A `Writer` writes one dialect. What is the same for all messages to one queue is put together once (`_lead`),
and the header of a content once per length, for all connections; what is left for each message are a few
references that are joined in the end.

Rules that always hold:
  * One call gives one buffer, or buffers for one write: whoever writes them so never splits a header over
    segments, which the original client cannot read.
  * Every packet is where the documents put it: queue, content, id, TTL.
  * A dispatch shows what is left of the TTL in whole seconds, rounded up, at least 1. Dead letters do not
    expire any more, and show 0 where they came with a TTL.

How it fails: what PHPMQ cannot say, or what the limits forbid, raises `MisuseError` before anything is
written.
"""

import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from typing import Final

from penstock.build import COMPILED
from penstock.model.batch import Batch, Slice
from penstock.model.ids import ID_DIGITS, ORIGIN_DIGITS
from penstock.model.policy import QueueNameError, check_queue_name, door_of
from penstock.protocols.errors import MisuseError
from penstock.protocols.phpmq import (
    LIMITS,
    REQUIRED,
    SETTLEMENTS,
    Dialect,
    Limits,
    MessageType,
    PacketType,
)

if COMPILED:
    from librt.strings import BytesWriter

    from penstock.protocols import loops

_US_PER_SECOND = 1_000_000
_CACHE_MAX = 1024  # entries of a dict whose keys somebody else chooses

# From this average size on, payloads are joined from views instead of slices: the slice's copy then costs
# more than the view's object.
_VIEW_BYTES = 4096

# From this average size on, payloads are not copied to be written with what stands around them: 64 KiB cost
# 20 to 40 µs in four copies, and three buffers more in one write next to nothing.
LARGE_BYTES = 16 * 1024
# A smaller part of a block is copied: all of the block would stay in memory until it is written, and what is
# counted for a peer that does not read is what it takes.
_PINNED_PART = 2

_HEX_GROUP = 64  # offsets that are written as hex digits together


class TtlPacket(Enum):
    """Whether a dispatch carries packet 05. The original clients expect it always, or never."""

    AUTO = "auto"  # a message that came with one, if only 0, does; one without does not
    ALWAYS = "always"  # 0 where there is none
    NEVER = "never"


ALWAYS: Final = TtlPacket.ALWAYS  # what is asked with every delivery is looked up once
NEVER: Final = TtlPacket.NEVER


class _Headers(dict[int, bytes]):
    """The packet headers of contents, by size."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect

    def __missing__(self, size: int) -> bytes:
        if len(self) >= _CACHE_MAX:
            self.clear()
        header = self[size] = self._dialect.packet_header(PacketType.CONTENT, size)
        return header


class _Tails(dict[int, bytes]):
    """Everything that stands behind a content or an id, by the TTL that is shown there."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect

    def __missing__(self, ttl_seconds: int) -> bytes:
        if len(self) >= _CACHE_MAX:
            self.clear()
        packet = self._dialect.packet(PacketType.TTL, b"%d" % ttl_seconds)
        tail = self[ttl_seconds] = self._dialect.line_break + packet
        return tail


@lru_cache
def _headers_of(dialect: Dialect) -> _Headers:
    """One for all connections: there may be ten thousand, and a thousand sizes of each were 90 KB."""
    return _Headers(dialect)


@lru_cache(maxsize=256)
def _lead(dialect: Dialect, type_: MessageType, name: bytes, packets: int) -> bytes:
    """What stands before the packet behind the queue's name."""
    return dialect.message_header(type_, packets) + dialect.packet(PacketType.QUEUE, name)


@lru_cache(maxsize=256)
def _name_of(queue: str, bytes_max: int) -> bytes:
    """A queue name, or that of the door to its dead letters, as it travels."""
    try:
        check_queue_name(door_of(queue)[0], bytes_max)
    except QueueNameError as error:
        raise MisuseError(f"phpmq: {error}") from None
    name = queue.encode()
    if len(name) > bytes_max:
        raise MisuseError(f"phpmq: queue {queue!r}: the name has {len(name)} bytes; use at most {bytes_max}")
    return name


@lru_cache
def _tails_of(dialect: Dialect) -> _Tails:
    return _Tails(dialect)


@lru_cache(maxsize=_HEX_GROUP)
def _cut_hex(count: int) -> Callable[[bytes], tuple[bytes, ...]]:
    """Cuts `count` numbers of 16 hex digits into their last 14."""
    return struct.Struct(f"{16 - ID_DIGITS + ORIGIN_DIGITS}x{ID_DIGITS - ORIGIN_DIGITS}s" * count).unpack


def _offsets_as_hex(start: int, end: int) -> list[bytes]:
    """The offset parts of ids, a group at a time: a third of what formatting each would cost."""
    digits: list[bytes] = []
    for first in range(start, end, _HEX_GROUP):
        group = array("Q", range(first, min(first + _HEX_GROUP, end)))
        if sys.byteorder == "little":
            group.byteswap()
        digits += _cut_hex(len(group))(group.tobytes().hex().encode())
    return digits


class Writer:
    """Writes one dialect, for either side."""

    def __init__(self, dialect: Dialect, limits: Limits = LIMITS) -> None:
        self.dialect = dialect
        self._limits = limits
        self._headers = _headers_of(dialect)
        self._tails = _tails_of(dialect)
        self._line_break = dialect.line_break
        self._before_id = dialect.line_break + dialect.packet_header(PacketType.ID, ID_DIGITS)
        self._queue: str | None = None  # that was dispatched last, and what stands before its contents
        self._plain = self._with_ttl = b""

    def sends(self, queue: str, batch: Batch) -> bytes:
        """A batch as messages (001). Those without a TTL have no packet for it."""
        largest = max((end - start for start, end in pairwise(batch.bounds)), default=0)
        if largest > self._limits.payload_bytes_max:
            limit = self._limits.payload_bytes_max
            raise MisuseError(f"phpmq: queue {queue!r}: a message of {largest} bytes is over {limit}")
        name = _name_of(queue, self._limits.queue_name_bytes_max)
        plain = _lead(self.dialect, MessageType.MESSAGE, name, 2)
        headers, line_break = self._headers, self.dialect.line_break
        payload = _payload(batch.payload, len(batch.payload), len(batch))
        out: list[bytes | memoryview] = []
        start = 0
        if batch.ttl_seconds is None:
            for end in batch.bounds[1:]:
                out += plain, headers[end - start], payload[start:end], line_break
                start = end
            return b"".join(out)
        with_ttl = _lead(self.dialect, MessageType.MESSAGE, name, 3)
        self._check_number("a TTL", max(batch.ttl_seconds, default=0), min(batch.ttl_seconds, default=0))
        for end, ttl_seconds in zip(batch.bounds[1:], batch.ttl_seconds, strict=True):
            if ttl_seconds:
                out += with_ttl, headers[end - start], payload[start:end], self._tails[ttl_seconds]
            else:
                out += plain, headers[end - start], payload[start:end], line_break
            start = end
        return b"".join(out)

    def consume(self, queue: str, count: int) -> bytes:
        """A window on a queue (002)."""
        self._check_number("a window", count, count)
        lead = _lead(self.dialect, MessageType.CONSUME, _name_of(queue, self._limits.queue_name_bytes_max), 2)
        return lead + self.dialect.packet(PacketType.COUNT, b"%d" % count)

    def settlements(
        self, type_: MessageType, queue: str, ids: Iterable[bytes], ttl_seconds: int = 0
    ) -> bytes:
        """One verdict (004, 005 or 006) on many messages; `ttl_seconds` is for 005."""
        if type_ not in SETTLEMENTS:
            raise MisuseError(f"phpmq: message {type_:03d} is no verdict on a message")
        lead = _lead(
            self.dialect, type_, _name_of(queue, self._limits.queue_name_bytes_max), len(REQUIRED[type_])
        )
        tail = self.dialect.line_break
        if type_ is MessageType.REQUEUE:
            self._check_number("a TTL", ttl_seconds, ttl_seconds)
            tail = self._tails[ttl_seconds]
        ids = list(ids)
        heads: dict[int, bytes] = {}
        for size in set(map(len, ids)):
            if not 0 < size <= self._limits.message_id_bytes_max:
                limit = self._limits.message_id_bytes_max
                raise MisuseError(f"phpmq: queue {queue!r}: an id has 1 to {limit} bytes, not {size}")
            heads[size] = lead + self.dialect.packet_header(PacketType.ID, size)
        out: list[bytes] = []
        for id_ in ids:
            out += heads[len(id_)], id_, tail
        return b"".join(out)

    def dispatches(
        self,
        queue: str,
        slices: Iterable[Slice],
        now_us: int,
        ttl_packet: TtlPacket = TtlPacket.AUTO,
        dead: bool = False,
    ) -> bytes:
        """Stored messages as dispatches (003) that name the queue as `queue`."""
        return b"".join(self.dispatch_parts(queue, list(slices), now_us, ttl_packet, dead))

    def dispatch_parts(
        self, queue: str, slices: list[Slice], now_us: int, ttl_packet: TtlPacket, dead: bool
    ) -> list[bytes | memoryview]:
        """The same as buffers for one write: one, or views of the payloads where these are large."""
        if queue != self._queue:
            name = _name_of(queue, self._limits.queue_name_bytes_max)
            self._plain = _lead(self.dialect, MessageType.DISPATCH, name, 3)
            self._with_ttl = _lead(self.dialect, MessageType.DISPATCH, name, 4)
            self._queue = queue
        plain, with_ttl, headers = self._plain, self._with_ttl, self._headers
        before_id, line_break = self._before_id, self._line_break
        large = _are_large(slices)
        shows_none = ttl_packet is NEVER or (ttl_packet is not ALWAYS and not _any_expires(slices))
        if COMPILED and shows_none and not large:
            return [_without_ttl(slices, plain, headers, before_id, line_break)]
        out: list[bytes | memoryview] = []
        for piece in slices:
            lo, hi = piece.lo, piece.hi
            bounds = list(piece.bounds[lo : hi + 1])
            payload_bytes = bounds[-1] - bounds[0]
            payload = _payload(piece.payload, payload_bytes, hi - lo)
            if large and payload_bytes * _PINNED_PART < len(payload):
                payload = memoryview(bytes(payload[bounds[0] : bounds[-1]]))
                bounds = [bound - bounds[0] for bound in bounds]
            middle = before_id + piece.origin
            numbers = _offsets_as_hex(piece.offset_start, piece.offset_end)
            expires = None if piece.expires_us is None else piece.expires_us[lo:hi]
            start = bounds[0]
            if ttl_packet is TtlPacket.NEVER or (expires is None and ttl_packet is TtlPacket.AUTO):
                tail = line_break
                for end, number in zip(bounds[1:], numbers, strict=True):
                    out += plain, headers[end - start], payload[start:end], middle, number, tail
                    start = end
                continue
            always = ttl_packet is TtlPacket.ALWAYS
            ttls = _seconds_left(expires, now_us, dead) if expires is not None else [0] * (hi - lo)
            for end, number, left in zip(bounds[1:], numbers, ttls, strict=True):
                if left >= 0 or always:
                    tail = self._tails[max(left, 0)]
                    out += with_ttl, headers[end - start], payload[start:end], middle, number, tail
                else:
                    out += plain, headers[end - start], payload[start:end], middle, number, line_break
                start = end
        return out if large else [b"".join(out)]

    def _check_number(self, what: str, highest: int, lowest: int) -> None:
        digits = self._limits.number_digits_max
        if lowest < 0 or highest >= 10**digits:
            raise MisuseError(
                f"phpmq: {what} is a number of at most {digits} digits, not {lowest} to {highest}"
            )


def _are_large(pieces: list[Slice]) -> bool:
    """Whether all of them are better written from where they are."""
    for piece in pieces:  # noqa: SIM110 - as below
        if piece.payload_bytes < LARGE_BYTES * len(piece):
            return False
    return True


def _any_expires(pieces: list[Slice]) -> bool:
    for piece in pieces:  # noqa: SIM110 - a generator costs more than the loop, compiled
        if piece.expires_us is not None:
            return True
    return False


def _without_ttl(pieces: list[Slice], lead: bytes, headers: _Headers, before_id: bytes, tail: bytes) -> bytes:
    """What `Writer.dispatches` gives for messages that show no TTL, by a compiled loop."""
    out = BytesWriter()
    for piece in pieces:
        bounds = piece.bounds[piece.lo : piece.hi + 1]
        payload, start = piece.payload, 0
        if not isinstance(payload, bytes):
            payload, start = bytes(payload[bounds[0] : bounds[-1]]), bounds[0]
        if not isinstance(bounds, (array, memoryview)):  # Compiled, a union would be made each time.
            bounds = array("i", bounds)
        middle = before_id + piece.origin
        loops.write_dispatches(
            out, lead, headers, payload, start, bounds.tobytes(), middle, piece.offset_start, tail
        )
    return out.getvalue()


def _payload(payload: bytes | memoryview, payload_bytes: int, count: int) -> bytes | memoryview:
    return memoryview(payload) if payload_bytes >= _VIEW_BYTES * count else payload


def _seconds_left(expires_us: Sequence[int], now_us: int, dead: bool) -> list[int]:
    """Whole seconds, rounded up, at least 1 for a living message; 0 for never, -1 where no TTL was given."""
    if dead:
        return [min(expires, 0) for expires in expires_us]
    return [
        max(1, -((now_us - expires) // _US_PER_SECOND)) if expires > 0 else expires for expires in expires_us
    ]
