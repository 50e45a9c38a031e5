"""Arrow batches: the views `messages` and `events` of a queue, built from blocks, not from messages.

The layout of a block is Arrow's own, so the `value` column of a batch is a window on the mapped
file. Everything else is made by a few numpy calls per batch: offsets count up, constants repeat,
and an id is 18 digits that a whole block shares and 14 digits of the offset, looked up four at a
time. Nothing here runs once per message, but for those that have headers, where somebody asks for these.

Rules that always hold:
  * A column that was not asked for costs nothing; where no column needs the body of a block, the
    body is not read.
  * A large block is a batch of its own, without a copy. Small ones, as a slow queue writes them,
    are joined, because a batch costs more than a few messages do.
  * Types are plain (not large) strings and binaries, timestamps are µs in UTC. What a message
    does not have is null: `expires`, `retries`, `headers`, `reason`, `consumer`, `dispatched`; and the `id`
    of an event whose message has left the log. What expires later than a date can be, expires in the
    last moment there is: whoever makes dates of the column could not read it otherwise.

Needs the extra that brings pyarrow and numpy; nothing else in the package may.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.log.block import (
    FLAG_EXPIRES,
    FLAG_HEADERS,
    FLAG_RETRIES,
    KIND_MESSAGES,
    PROTOCOLS,
    BodyReader,
)
from penstock.log.errors import LogRefused
from penstock.log.read_block import Block, Columns
from penstock.log.reader import LogReader
from penstock.log.tables import VIEWS, columns_of
from penstock.model.ids import ID_DIGITS, ORIGIN_DIGITS, id_of
from penstock.model.life import Event, Reason

ROWS_MAX = 65_536
JOIN_BYTES_MAX = 64 * 1024
"""Blocks with less in them than this are joined with their neighbours ..."""

JOINED_BYTES_MAX = 1024 * 1024
"""... up to about this size. For Spark a batch costs as much as a hundred messages, whatever is in it."""

TIMESTAMP = pa.timestamp("us", tz="UTC")
_LAST_US = 253_402_300_799_999_999  # the end of the year 9999
_INT32, _INT64, _STRING, _BINARY = pa.int32(), pa.int64(), pa.string(), pa.binary()
_MAP = pa.map_(_STRING, _STRING)

_TYPES = {
    "string": pa.string(),
    "binary": pa.binary(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "timestamp": TIMESTAMP,
    "map<string,string>": _MAP,
}


def schema_of(view: str, columns: Sequence[str] | None = None, rows_max: int = ROWS_MAX) -> pa.Schema:
    """The schema of batches with these columns of a view; None: all that come without being named.

    Every field may be null as far as the type goes: so does a schema that is written as "queue string, offset
    bigint, …", and schemas are compared.
    """
    if rows_max < 1:
        raise LogRefused(f"rows_max {rows_max}: a batch has at least one row")
    known = {column.name: _TYPES[column.type] for column in columns_of(view)}
    names = [column.name for column in VIEWS[view]] if columns is None else columns
    for name in names:
        if name not in known:
            raise LogRefused(f"there is no column {name!r}: one of {', '.join(known)}")
    return pa.schema([(name, known[name]) for name in names])


MESSAGES_SCHEMA = schema_of("messages")
EVENTS_SCHEMA = schema_of("events")

Numbers = Any  # a numpy array; numpy's own types say less here than the names do


def messages_batches(
    reader: LogReader,
    queue: str,
    start: int,
    end: int | None = None,
    *,
    rows_max: int = ROWS_MAX,
    columns: Sequence[str] | None = None,
    fail_on_loss: bool = True,
) -> Iterator[pa.RecordBatch]:
    """The messages from offset `start` to `end` (None: all that is synced), at most `rows_max` a batch.

    `columns` names those to build, in that order; all by default but `headers`.
    """
    schema = schema_of("messages", columns, rows_max)
    blocks = reader.messages(
        queue,
        start,
        end,
        fail_on_loss=fail_on_loss,
        headers_only=not {"value", "expires", "retries", "headers"}.intersection(schema.names),
    )
    return (batch_of(group, schema) for group in groups_of(blocks, Constants(queue), rows_max))


def events_batches(
    reader: LogReader,
    queue: str,
    start: int,
    end: int | None = None,
    *,
    rows_max: int = ROWS_MAX,
    columns: Sequence[str] | None = None,
    fail_on_loss: bool = True,
) -> Iterator[pa.RecordBatch]:
    """The events from number `start` to `end`, likewise."""
    schema = schema_of("events", columns, rows_max)
    blocks = reader.event_blocks(queue, start, end, fail_on_loss=fail_on_loss)
    return _event_batches(reader, queue, blocks, schema, rows_max)


# --- parts of columns ------------------------------------------------------------------------------


def _hex_table() -> Numbers:
    """The four hex digits of every number below 65536, as the bytes of a uint32."""
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    numbers = np.arange(65_536)
    return np.stack([digits[numbers >> shift & 15] for shift in (12, 8, 4, 0)], axis=1).view(np.uint32)[:, 0]


_HEX4 = _hex_table()
_ID_WORDS = ID_DIGITS // 4


class Constants:
    """Columns that say the same in every row, made once and cut to length."""

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self._arrays: dict[object, pa.Array] = {}
        self._cuts: dict[object, pa.Array] = {}  # the last of each: most blocks are equally long
        self._id_bounds: dict[int, pa.Buffer] = {}

    def text(self, value: str, rows: int) -> pa.Array:
        cut = self._cuts.get(value)
        if cut is not None and len(cut) == rows:
            return cut
        return self._cut(value, rows, lambda length: pa.repeat(pa.scalar(value), length))

    def nulls(self, type_: pa.DataType, rows: int) -> pa.Array:
        cut = self._cuts.get(type_)
        if cut is not None and len(cut) == rows:
            return cut
        return self._cut(type_, rows, lambda length: pa.nulls(length, type_))

    def _cut(self, key: object, rows: int, make: Callable[[int], pa.Array]) -> pa.Array:
        array = self._arrays.get(key)
        if array is None or len(array) < rows:
            array = self._arrays[key] = make(1 << (rows - 1).bit_length())
        cut = self._cuts[key] = array[:rows]
        return cut

    def id_bounds(self, rows: int) -> pa.Buffer:
        """Where ids begin and end: every 32 bytes. Of the last length only, likewise."""
        bounds = self._id_bounds.get(rows)
        if bounds is None:
            numbers = np.arange(0, (rows + 1) * ID_DIGITS, ID_DIGITS, dtype=np.int32)
            bounds = pa.py_buffer(numbers)
            self._id_bounds = {rows: bounds}
        return bounds


def plain(type_: pa.DataType, values: Numbers) -> pa.Array:
    return pa.Array.from_buffers(type_, len(values), [None, pa.py_buffer(values)])


def nullable(type_: pa.DataType, values: Numbers, valid: Numbers) -> pa.Array:
    if valid.all():
        return plain(type_, values)
    bitmap = pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(type_, len(values), [bitmap, pa.py_buffer(values)])


def expiries(values: Numbers) -> pa.Array:
    """The column `expires`; 0: never."""
    return nullable(TIMESTAMP, np.minimum(values, _LAST_US), values > 0)


def _ids_of_run(origin: bytes, first: int, end: int) -> bytearray:
    """The ids of consecutive offsets, one after the other."""
    ids = bytearray()
    while first < end:
        # Within these, only the last four digits differ.
        stop = min(end, (first | 0xFFFF) + 1)
        run = bytearray(id_of(origin, first)) * (stop - first)
        low = first & 0xFFFF
        np.frombuffer(run, np.uint32)[_ID_WORDS - 1 :: _ID_WORDS] = _HEX4[low : low + stop - first]
        ids = ids + run if ids else run
        first = stop
    return ids


def ids_of(origins: Sequence[bytes], which: Numbers, offsets: Numbers) -> Numbers:
    """The ids of any offsets, one after the other; `which` says whose origin each has."""
    heads = b"".join(id_of(origin, 0) for origin in origins)
    ids = np.frombuffer(heads, np.uint32).reshape(len(origins), _ID_WORDS)[which]
    for word, shift in ((7, 0), (6, 16), (5, 32)):
        ids[:, word] = _HEX4[offsets >> shift & 0xFFFF]
    if (offsets >> 48).any():
        top = _HEX4[offsets >> 48].view(np.uint8).reshape(-1, 4)[:, 2:]
        ids.view(np.uint8)[:, ORIGIN_DIGITS : ORIGIN_DIGITS + 2] = top
    return ids


# --- messages --------------------------------------------------------------------------------------


class MessageGroup:
    """Blocks that become one batch: `lo` to `hi` of each."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants
        self.parts: list[tuple[Block, int, int]] = []
        self.rows = 0
        self.size = 0
        self._counts: Numbers = None
        self._columns: list[Columns] = []

    def add(self, block: Block, lo: int, hi: int) -> None:
        self.parts.append((block, lo, hi))
        self.rows += hi - lo
        self.size += block.header.body_bytes

    def repeated(self, values: list[int], dtype: type) -> Numbers:
        """A number per block, repeated for each of its messages."""
        if len(values) == 1:
            return np.full(self.rows, values[0], dtype)
        if self._counts is None:
            self._counts = np.array([hi - lo for _, lo, hi in self.parts])
        return np.repeat(np.array(values, dtype), self._counts)

    def columns(self) -> list[Columns]:
        if not self._columns:
            self._columns = [block.columns() for block, _, _ in self.parts]
        return self._columns

    # Each of these builds the column that it is named after.

    def queue(self) -> pa.Array:
        return self.constants.text(self.constants.queue, self.rows)

    def offset(self) -> pa.Array:
        return plain(_INT64, self.offsets())

    def offsets(self) -> Numbers:
        firsts = [block.header.first_offset + lo for block, lo, _ in self.parts]
        if self._has_no_gap():
            return np.arange(firsts[0], firsts[0] + self.rows)
        row = 0
        for at, (_, lo, hi) in enumerate(self.parts):
            firsts[at] -= row
            row += hi - lo
        return self.repeated(firsts, np.int64) + np.arange(self.rows)

    def id(self) -> pa.Array:
        block, lo, _ = self.parts[0]
        if self._has_no_gap() and all(other.origin == block.origin for other, _, _ in self.parts):
            first = block.header.first_offset + lo
            ids = _ids_of_run(block.origin, first, first + self.rows)
        else:
            ids = ids_of(*self.origins(), self.offsets())
        bounds = self.constants.id_bounds(self.rows)
        return pa.Array.from_buffers(_STRING, self.rows, [None, bounds, pa.py_buffer(ids)])

    def _has_no_gap(self) -> bool:
        """Whether all its offsets follow each other, as they do unless something was compacted."""
        (first, lo, _), (last, _, hi) = self.parts[0], self.parts[-1]
        return last.header.first_offset + hi - first.header.first_offset - lo == self.rows

    def origins(self) -> tuple[list[bytes], Numbers]:
        """The origins of ids, and which of them each row has."""
        origins: dict[bytes, int] = {}
        numbers = [origins.setdefault(block.origin, len(origins)) for block, _, _ in self.parts]
        return list(origins), self.repeated(numbers, np.int64)

    def value(self) -> pa.Array:
        columns = self.columns()
        if len(columns) == 1:
            _, lo, _ = self.parts[0]
            bounds, payload = columns[0].bounds, columns[0].payload
            return pa.Array.from_buffers(
                _BINARY, self.rows, [None, pa.py_buffer(bounds), pa.py_buffer(payload)], offset=lo
            )
        pieces: list[memoryview] = []
        ends, total = [np.zeros(1, np.int32)], 0
        for (_, lo, hi), (bounds, payload, *_) in zip(self.parts, columns, strict=True):
            first = bounds[lo]
            pieces.append(payload[first : bounds[hi]])
            ends.append(np.frombuffer(bounds, np.int32)[lo + 1 : hi + 1] + np.int32(total - first))
            total += len(pieces[-1])
        return pa.Array.from_buffers(
            _BINARY,
            self.rows,
            [None, pa.py_buffer(np.concatenate(ends)), pa.py_buffer(b"".join(pieces))],
        )

    def timestamp(self) -> pa.Array:
        return plain(TIMESTAMP, self.times_us())

    def times_us(self) -> Numbers:
        return self.repeated([block.header.time_us for block, _, _ in self.parts], np.int64)

    def protocol(self) -> pa.Array:
        numbers = [block.header.protocol for block, _, _ in self.parts]
        if min(numbers) == max(numbers):
            return self.constants.text(PROTOCOLS[numbers[0]], self.rows)
        return pa.array(PROTOCOLS).take(plain(pa.uint8(), self.repeated(numbers, np.uint8)))

    def expires(self) -> pa.Array:
        if not self._have(FLAG_EXPIRES):
            return self.constants.nulls(TIMESTAMP, self.rows)
        return expiries(self.expires_us())

    def expires_us(self) -> Numbers:
        """0: never."""
        return self._optional([c.expires for c in self.columns()], np.int64, 0)

    def retries(self) -> pa.Array:
        if not self._have(FLAG_RETRIES):
            return self.constants.nulls(_INT32, self.rows)
        values = self.retry_counts()
        return nullable(_INT32, values.astype(np.int32), values >= 0)

    def retry_counts(self) -> Numbers:
        """-1: none."""
        return self._optional([c.retries for c in self.columns()], np.int16, -1)

    def headers(self) -> pa.Array:
        if not self._have(FLAG_HEADERS):
            return self.constants.nulls(_MAP, self.rows)
        texts: list[bytes] = []
        for (_, lo, hi), columns in zip(self.parts, self.columns(), strict=True):
            stored = columns.headers
            texts += map(stored.at, range(lo, hi)) if stored is not None else [b""] * (hi - lo)
        # All in one go: 3 µs for a message with three headers, a third of what each by itself takes.
        found: list[dict[str, str] | None] = json.loads(
            b"[%s]" % b",".join(text or b"null" for text in texts)
        )
        names: list[str] = []
        values: list[str] = []
        starts: list[int | None] = []
        for headers in found:
            starts.append(len(names) if headers is not None else None)
            names += headers or ()
            values += headers.values() if headers is not None else ()
        bounds = pa.array([*starts, len(names)], _INT32)
        return pa.MapArray.from_arrays(bounds, pa.array(names, _STRING), pa.array(values, _STRING))

    def _have(self, flag: int) -> bool:
        return any(block.header.flags & flag for block, _, _ in self.parts)

    def _optional(self, columns: Sequence[memoryview | None], dtype: type, absent: int) -> Numbers:
        """A column that some blocks have, with `absent` for the others."""
        pieces: list[Numbers] = [
            np.frombuffer(column, dtype)[lo:hi] if column is not None else np.full(hi - lo, absent, dtype)
            for column, (_, lo, hi) in zip(columns, self.parts, strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def groups_of(blocks: Iterator[Block], constants: Constants, rows_max: int) -> Iterator[MessageGroup]:
    """Blocks in groups of a good size for a batch."""
    group, joins = MessageGroup(constants), True
    for block in blocks:
        small = block.header.body_bytes < JOIN_BYTES_MAX
        joins = joins and small and group.size < JOINED_BYTES_MAX
        lo = block.lo
        while lo < block.hi:
            if group.rows and (not joins or group.rows == rows_max):
                yield group
                group = MessageGroup(constants)
            hi = min(block.hi, lo + rows_max - group.rows)
            group.add(block, lo, hi)
            lo = hi
        joins = small
    if group.rows:
        yield group


def batch_of(source: object, schema: pa.Schema) -> pa.RecordBatch:
    """A batch of the columns of a schema, each built by the method of `source` with its name."""
    arrays = [getattr(source, name)() for name in schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


# --- events ----------------------------------------------------------------------------------------

_EVENT_LABELS = [Event(n).name.lower() if n in {*Event} else None for n in range(max(Event) + 1)]
_REASON_LABELS = [reason.label or None for reason in Reason]

_ROW = np.dtype(
    [
        ("number", "i8"),  # of the first event of the run
        ("first", "i8"),  # the first offset
        ("length", "i8"),
        ("dispatched", "i8"),
        ("time", "i8"),
        ("opening", "i8"),  # of the messages; 0: to be looked up
        ("attempt", "i4"),
        ("consumer", "i4"),
        ("event", "u1"),
        ("reason", "u1"),
    ]
)
"""A run of events, as a row of a settlement block has it."""


def _rows_of(block: Block, consumers: dict[str, int]) -> Numbers:
    """The events that were asked for of one block, in runs. New names are added to `consumers`."""
    header = block.header
    if header.kind == KIND_MESSAGES:
        rows = np.zeros(1, _ROW)
        rows["number"] = header.first_event + block.lo
        rows["first"] = header.first_offset + block.lo
        rows["length"] = block.hi - block.lo
        rows["time"] = header.time_us
        rows["opening"] = header.opening
        rows["event"] = Event.ACCEPTED
        return rows
    reader = BodyReader(block.body)
    count = header.count
    rows = np.zeros(count, _ROW)
    rows["first"] = np.frombuffer(reader.raw(8 * count), np.int64)
    rows["length"] = np.frombuffer(reader.raw(8 * count), np.int64)
    rows["dispatched"] = np.frombuffer(reader.raw(8 * count), np.int64)
    rows["attempt"] = np.frombuffer(reader.raw(4 * count), np.int32)
    consumer = np.frombuffer(reader.raw(4 * count), np.int32)
    rows["event"] = np.frombuffer(reader.raw(count), np.uint8)
    rows["reason"] = np.frombuffer(reader.raw(count), np.uint8)
    names = [consumers.setdefault(name.decode(), len(consumers)) for name in reader.binary(header.extra)]
    rows["consumer"] = np.array(names, np.int32)[consumer]
    rows["time"] = header.time_us
    rows["number"] = header.first_event + np.cumsum(rows["length"]) - rows["length"]
    if block.lo or block.hi < header.event_count:
        return _cut_rows(rows, header.first_event + block.lo, header.first_event + block.hi)
    return rows


def _cut_rows(rows: Numbers, start: int, end: int) -> Numbers:
    """The part of some runs whose event numbers lie between `start` and `end`."""
    skip = np.clip(start - rows["number"], 0, rows["length"])
    drop = np.clip(rows["number"] + rows["length"] - end, 0, rows["length"] - skip)
    rows["number"] += skip
    rows["first"] += skip
    rows["length"] -= skip + drop
    return rows[rows["length"] > 0]


class _Window:
    """Runs of events that become one batch."""

    def __init__(
        self, rows: Numbers, reader: LogReader, constants: Constants, consumers: dict[str, int]
    ) -> None:
        self._rows = rows
        self._reader = reader
        self._constants = constants
        self._consumers = consumers
        lengths = rows["length"]
        self._total = int(lengths.sum())
        self._row = np.repeat(np.arange(len(rows)), lengths)  # of each event
        self._within = np.arange(self._total) - np.repeat(np.cumsum(lengths) - lengths, lengths)

    def _counted(self, field: str) -> Numbers:
        return self._rows[field][self._row] + self._within

    def _label(self, field: str, labels: Sequence[str | None]) -> pa.Array:
        numbers = self._rows[field]
        first = numbers[0]
        if (numbers == first).all():
            label = labels[first]
            if label is None:
                return self._constants.nulls(pa.string(), self._total)
            return self._constants.text(label, self._total)
        return pa.array(labels, pa.string()).take(pa.array(numbers[self._row]))

    def queue(self) -> pa.Array:
        return self._constants.text(self._constants.queue, self._total)

    def event_offset(self) -> pa.Array:
        return plain(_INT64, self._counted("number"))

    def event(self) -> pa.Array:
        return self._label("event", _EVENT_LABELS)

    def offset(self) -> pa.Array:
        return plain(_INT64, self._counted("first"))

    def reason(self) -> pa.Array:
        return self._label("reason", _REASON_LABELS)

    def consumer(self) -> pa.Array:
        return self._label("consumer", [name or None for name in self._consumers])

    def attempt(self) -> pa.Array:
        return plain(_INT32, self._rows["attempt"][self._row])

    def dispatched(self) -> pa.Array:
        values = self._rows["dispatched"][self._row]
        return nullable(TIMESTAMP, values, values > 0)

    def timestamp(self) -> pa.Array:
        return plain(TIMESTAMP, self._rows["time"][self._row])

    def id(self) -> pa.Array:
        """The ids of the messages: of each, the opening in which it came."""
        queue = self._constants.queue
        offsets = self._counted("first")
        openings = self._rows["opening"][self._row]
        runs = self._reader.openings(queue)
        if not openings.all() and runs:
            starts, ends, values = (np.array(column) for column in zip(*runs, strict=True))
            run: Numbers = np.searchsorted(starts, offsets, "right") - 1
            found = (run >= 0) & (offsets < ends[run])
            openings = np.where(openings > 0, openings, np.where(found, values[run], 0))
        known = sorted({opening for _, _, opening in runs}.union(self._rows["opening"].tolist()))
        origins = [self._reader.origin(queue, opening) for opening in known]
        ids = ids_of(origins, np.searchsorted(known, openings), offsets)
        bitmap = None if openings.all() else pa.py_buffer(np.packbits(openings > 0, bitorder="little"))
        bounds = self._constants.id_bounds(self._total)
        return pa.Array.from_buffers(_STRING, self._total, [bitmap, bounds, pa.py_buffer(ids)])


def _event_batches(
    reader: LogReader, queue: str, blocks: Iterator[Block], schema: pa.Schema, rows_max: int
) -> Iterator[pa.RecordBatch]:
    constants = Constants(queue)
    consumers = {"": 0}
    gathered: list[Numbers] = []
    total = 0
    for block in blocks:
        gathered.append(_rows_of(block, consumers))
        total += block.hi - block.lo
        if total >= rows_max:
            rows = np.concatenate(gathered)
            while total >= rows_max:
                window, rows = _split_rows(rows, rows_max)
                yield batch_of(_Window(window, reader, constants, consumers), schema)
                total -= rows_max
            gathered = [rows]
    if total:
        yield batch_of(_Window(np.concatenate(gathered), reader, constants, consumers), schema)


def _split_rows(rows: Numbers, count: int) -> tuple[Numbers, Numbers]:
    """The first `count` events of some runs, and the others."""
    ends = np.cumsum(rows["length"])
    at = int(np.searchsorted(ends, count))
    over = int(ends[at]) - count
    before, after = rows[: at + 1].copy(), rows[at if over else at + 1 :].copy()
    if over:
        before["length"][-1] -= over
        done = int(before["length"][-1])
        after["length"][0] = over
        after["first"][0] += done
        after["number"][0] += done
    return before, after
