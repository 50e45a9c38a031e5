"""Blocks: the unit of checksum, of commit, of caching, of indexing and of reading.

A block is a header of 80 bytes and a body, padded to a multiple of 8. All little endian.

    at  size  field
    0   4     magic "PSK1"
    4   1     kind            1 messages, 2 settlements, 3 control
    5   1     flags           see FLAG_…
    6   1     protocol        the door, index into PROTOCOLS
    7   1     zero
    8   4     queue           its number; 0 for control blocks
    12  4     count           messages, or rows of a settlement block
    16  4     opening         how often the log had been opened when this was written
    20  4     body checksum   crc32 of the padded body
    24  8     first offset    of the first message; the lowest offset touched by settlements
    32  8     first event     number of the first event of this block in its queue
    40  4     event count
    44  4     body length     padded
    48  8     time            µs since the epoch
    56  8     synced          every byte of the log before this position was synced when the block
                              was written: a hole below it is damage, a hole above a torn tail
    64  8     earliest expiry µs since the epoch; 0: none. Of settlements with FLAG_REPAIRED: where the
                              first of the new payloads is
    72  4     extra           messages: bytes of payload; settlements: number of consumer names
    76  4     header checksum crc32 of bytes 0 to 75, seeded by the block's log position, so that
                              a block in the wrong place is no block

Message bodies are columns in Arrow's buffer layout, each padded to 8:

    bounds    int32[count + 1]  starts at 0; message i is payload[bounds[i]:bounds[i + 1]]
    payload   bytes
    expires   int64[count]      FLAG_EXPIRES; µs since the epoch, 0: never
    retries   int16[count]      FLAG_RETRIES; -1: came without a counter
    due       int64[count]      FLAG_DELAYED; µs since the epoch, 0: not delayed
    headers   int32[count + 1], bytes     FLAG_HEADERS; laid out as the payload, JSON of an object or nothing
    reply     int32[count + 1], bytes     FLAG_REPLY; reply addresses, laid out as the payload

Of messages that were staged, the body says where their columns are (FLAG_ELSEWHERE, `adoption.py`).
Settlement bodies are in `ledger.py`. Control bodies are JSON: rare things that need a name more
than they need speed.
"""

import json
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from penstock.log.checksum import crc32

if sys.byteorder != "little":  # pragma: no cover - no such machine to test on
    raise ImportError("penstock's log maps its columns into memory and needs a little-endian machine")

MAGIC = b"PSK1"
KIND_MESSAGES = 1
KIND_SETTLEMENTS = 2
KIND_CONTROL = 3
KINDS = frozenset({KIND_MESSAGES, KIND_SETTLEMENTS, KIND_CONTROL})

FLAG_EXPIRES = 1
FLAG_RETRIES = 2
FLAG_REPLY = 4
FLAG_MOVED = 8  # settlements: the columns tail, expires and retries are there
FLAG_HEADERS = 8  # messages: the same bit
FLAG_WHY = 1  # settlements: there is a text with some rows
FLAG_PART = 16  # part of a transaction: void without the block that has FLAG_END
FLAG_END = 32  # the last block of a transaction
FLAG_REPAIRED = 64  # settlements: the messages have other payloads from now on, see repairs.py
FLAG_DELAYED = 64  # messages: the same bit
FLAG_ELSEWHERE = 128  # messages: the columns are in blocks of the stage queue, see adoption.py

PROTOCOLS = ("", "sspq", "phpmq", "rq", "http", "spark", "pipeline")
_PROTOCOL_NUMBER = {name: number for number, name in enumerate(PROTOCOLS)}

HEADER_BYTES = 80
_HEADER = struct.Struct("<4sBBBxIIIIQQIIqQqI")
_CHECKSUM = struct.Struct("<I")
assert _HEADER.size == HEADER_BYTES - _CHECKSUM.size

PAD = (b"", b"\0" * 7, b"\0" * 6, b"\0" * 5, b"\0" * 4, b"\0" * 3, b"\0" * 2, b"\0")
"""PAD[length % 8] fills up to a multiple of 8."""

Buffer = bytes | bytearray | memoryview


class Header:
    """The fixed part of a block, decoded; and the block's position in the log."""

    __slots__ = (
        "body_bytes",
        "body_checksum",
        "count",
        "event_count",
        "expires_min_us",
        "extra",
        "first_event",
        "first_offset",
        "flags",
        "kind",
        "opening",
        "position",
        "protocol",
        "queue",
        "synced",
        "time_us",
    )

    def __init__(
        self,
        kind: int,
        flags: int,
        protocol: int,
        queue: int,
        count: int,
        opening: int,
        body_checksum: int,
        first_offset: int,
        first_event: int,
        event_count: int,
        body_bytes: int,
        time_us: int,
        synced: int,
        expires_min_us: int,
        extra: int,
        position: int,
    ) -> None:
        self.kind = kind
        self.flags = flags
        self.protocol = protocol
        self.queue = queue
        self.count = count
        self.opening = opening
        self.body_checksum = body_checksum
        self.first_offset = first_offset
        self.first_event = first_event
        self.event_count = event_count
        self.body_bytes = body_bytes
        self.time_us = time_us
        self.synced = synced
        self.expires_min_us = expires_min_us
        self.extra = extra
        self.position = position  # in the whole log, not in its segment

    @property
    def end(self) -> int:
        """The log position behind the block."""
        return self.position + HEADER_BYTES + self.body_bytes

    @property
    def offset_end(self) -> int:
        return self.first_offset + self.count

    def _values(self) -> tuple[int, ...]:
        """What it is made from, in the order of the layout; the position, which is not stored, last."""
        return (
            self.kind,
            self.flags,
            self.protocol,
            self.queue,
            self.count,
            self.opening,
            self.body_checksum,
            self.first_offset,
            self.first_event,
            self.event_count,
            self.body_bytes,
            self.time_us,
            self.synced,
            self.expires_min_us,
            self.extra,
            self.position,
        )

    def copy(self) -> "Header":
        return Header(*self._values())

    def pack(self) -> bytes:
        packed = _HEADER.pack(MAGIC, *self._values()[:-1])
        return packed + _CHECKSUM.pack(crc32(packed, _seed(self.position)))


def _seed(position: int) -> int:
    return (position ^ (position >> 32)) & 0xFFFFFFFF


def read_header(data: Buffer, at: int, position: int) -> Header | None:
    """The header at `data[at:]`, which stands at `position` of the log; None where there is none."""
    if len(data) - at < HEADER_BYTES or data[at : at + 4] != MAGIC:
        return None
    end = at + HEADER_BYTES - _CHECKSUM.size
    (checksum,) = _CHECKSUM.unpack_from(data, end)
    with memoryview(data) as view, view[at:end] as packed:
        if crc32(packed, _seed(position)) != checksum:
            return None
    fields = _HEADER.unpack_from(data, at)
    header = Header(*(*fields[1:], position))
    if header.kind not in KINDS or header.body_bytes % 8:
        return None
    return header


def body_checksum(parts: Sequence[Buffer]) -> int:
    checksum = 0
    for part in parts:
        checksum = crc32(part, checksum)
    return checksum


class Columns:
    """The columns of messages, as in the layout."""

    __slots__ = ("bounds", "due", "expires", "headers", "payload", "reply", "retries")

    def __init__(
        self,
        bounds: Sequence[int],
        payload: bytes | memoryview,
        expires: Sequence[int] | None = None,
        retries: Sequence[int] | None = None,
        reply: Sequence[bytes] | None = None,
        due: Sequence[int] | None = None,
        headers: Sequence[bytes] | None = None,
    ) -> None:
        self.bounds = bounds
        self.payload = payload
        self.expires = expires
        self.retries = retries
        self.reply = reply
        self.due = due
        self.headers = headers

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def flags(self) -> int:
        """What a header says of them."""
        flags = FLAG_EXPIRES if self.expires is not None else 0
        if self.retries is not None:
            flags |= FLAG_RETRIES
        if self.reply is not None:
            flags |= FLAG_REPLY
        if self.due is not None:
            flags |= FLAG_DELAYED
        if self.headers is not None:
            flags |= FLAG_HEADERS
        return flags


class Messages(Columns):
    """A message block, in memory."""

    __slots__ = ("header",)

    def __init__(
        self,
        header: Header,
        bounds: Sequence[int],
        payload: bytes | memoryview,
        expires: Sequence[int] | None = None,
        retries: Sequence[int] | None = None,
        reply: Sequence[bytes] | None = None,
        due: Sequence[int] | None = None,
        headers: Sequence[bytes] | None = None,
    ) -> None:
        super().__init__(bounds, payload, expires, retries, reply, due, headers)
        self.header = header


def with_header(header: Header, it: Columns) -> Messages:
    """The same columns as a block of their own."""
    return Messages(header, it.bounds, it.payload, it.expires, it.retries, it.reply, it.due, it.headers)


def message_parts(columns: Columns) -> list[Buffer]:
    """The body of a message block, as buffers to be written one after the other."""
    parts = [*_padded(columns.bounds), columns.payload, PAD[len(columns.payload) % 8]]
    for numbers in (columns.expires, columns.retries, columns.due):
        if numbers is not None:
            parts += _padded(numbers)
    for texts in (columns.headers, columns.reply):
        if texts is not None:
            parts += _binary_parts(texts)
    return [part for part in parts if len(part)]


def _padded(column: Sequence[int]) -> list[Buffer]:
    # Whoever makes a block has arrays. The stub of `memoryview` knows no sequence that is a buffer.
    raw = memoryview(column).cast("B")  # type: ignore[arg-type]
    return [raw, PAD[len(raw) % 8]]


def _binary_parts(values: Sequence[bytes]) -> list[Buffer]:
    bounds = array("i", [0])
    end = 0
    for value in values:
        end += len(value)
        bounds.append(end)
    column, data = bounds.tobytes(), b"".join(values)
    return [column, PAD[len(column) % 8], data, PAD[len(data) % 8]]


class BodyReader:
    """Walks the columns of a body. A column that does not fit raises ValueError."""

    __slots__ = ("_at", "_body")

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._at = 0

    def column(self, count: int, typecode: str, width: int) -> Sequence[int]:
        # The stub wants to see the letter, and here it is a variable.
        column: Sequence[int] = self.raw(count * width).cast(typecode)  # type: ignore[call-overload]
        return column

    def raw(self, length: int) -> memoryview:
        start = self._at
        end = start + length
        if end > len(self._body):
            raise ValueError(f"a column of {length} bytes at {start} does not fit in {len(self._body)} bytes")
        self._at = end + -end % 8
        return self._body[start:end]

    def binary(self, count: int) -> list[bytes]:
        bounds = self.column(count + 1, "i", 4)
        data = self.raw(bounds[count])
        return [bytes(data[bounds[i] : bounds[i + 1]]) for i in range(count)]


def read_messages(header: Header, body: memoryview) -> Messages:
    """The columns of a message block whose checksum has been checked."""
    reader = BodyReader(body)
    count = header.count
    bounds = reader.column(count + 1, "i", 4)
    payload = reader.raw(bounds[count])
    expires = reader.column(count, "q", 8) if header.flags & FLAG_EXPIRES else None
    retries = reader.column(count, "h", 2) if header.flags & FLAG_RETRIES else None
    due = reader.column(count, "q", 8) if header.flags & FLAG_DELAYED else None
    headers = reader.binary(count) if header.flags & FLAG_HEADERS else None
    reply = reader.binary(count) if header.flags & FLAG_REPLY else None
    return Messages(header, bounds, payload, expires, retries, reply, due, headers)


def protocol_number(name: str) -> int:
    try:
        return _PROTOCOL_NUMBER[name]
    except KeyError:
        known = ", ".join(repr(p) for p in PROTOCOLS)
        raise ValueError(f"no protocol {name!r}: one of {known}") from None


def control_parts(fields: dict[str, Any]) -> list[Buffer]:
    body = json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()
    return [body, PAD[len(body) % 8]]


def read_control(body: memoryview) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(bytes(body).rstrip(b"\0"))
    return fields
