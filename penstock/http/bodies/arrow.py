"""Arrow: a body that is an Arrow IPC stream, to columns.

    value             binary, string, or the large ones of these; also as a dictionary
    ttl, retries      any integers; null is none
    delay             any numbers, likewise
    headers           a map of strings; null is none
    queue             a string, where the caller allows it
    offset            integers, where messages are payloads for dead letters; nothing else then

The buffers are taken as they are: what is done per message is done by numpy, and a batch of the stream
costs a few calls whatever its size. Headers are an exception: they become a text for each message.

Rules that always hold:
  * Nothing in the stream is believed. Every batch is checked in full before anything in it is looked at:
    offsets ascend and stay within their buffers, indices within their dictionaries, text is UTF-8.
  * What comes out is not larger than `bytes_max`. Two things in a stream can be larger than the stream:
    compressed buffers, which are refused unseen, and dictionaries, which are measured before they are used.

How it fails: a `Problem` that names the column and the row, counted from 0 over the whole stream.

Needs the extra that brings pyarrow and numpy: whoever imports this module answers for their absence.
"""

import struct
from array import array
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import types

from penstock.http.bodies.parts import (
    DELAY_RULE,
    NO_DELAY,
    NO_TTL,
    OFFSET_RULE,
    RETRIES_RULE,
    TTL_RULE,
    Others,
    Parts,
    PartsBuilder,
    too_large,
)
from penstock.http.kinds import OFFSET_MAX
from penstock.http.problems import Problem
from penstock.log.columns import TTL_SECONDS_MAX
from penstock.model.batch import DELAY_SECONDS_MAX, RETRIES_ENDLESS, RETRIES_NONE
from penstock.model.headers import encode_headers
from penstock.model.policy import QueueNameError, check_queue_name
from penstock.model.timers import SECOND_US

Numbers = Any  # a numpy array; numpy's own types say less here than the names do

COLUMNS: Final = ("value", "ttl", "retries", "delay", "headers")
REPAIR_COLUMNS: Final = ("value", "offset")
VALUE_RULE: Final = "binary, string, large_binary or large_string"


def read_arrow(
    body: bytes,
    *,
    payload_bytes_max: int,
    bytes_max: int,
    queues: bool = False,
    repairs: bool = False,
    protocol: str = "http",
) -> Parts:
    """The messages of a body. `queues`: a column names the queue of each; `repairs`: another its dead letter;
    `bytes_max`: of all messages."""
    reader = _Reader(payload_bytes_max, bytes_max, queues, repairs)
    try:
        _refuse_compressed(pa.BufferReader(body))
        source = pa.BufferReader(body)
        with pa.ipc.open_stream(source) as stream:
            reader.check_schema(stream.schema)
            for batch in stream:
                reader.parts.count(batch.num_rows)
                batch.validate(full=True)
                if batch.num_rows:
                    reader.add(batch)
        rest = len(body) - source.tell()
    except (pa.ArrowException, OSError, ValueError, MemoryError, struct.error) as error:
        # The first line: what follows is where in the library it was found.
        text = str(error).partition("\n")[0] or type(error).__name__
        raise Problem("bad-request", f"the body is no Arrow IPC stream that can be read: {text}") from None
    if rest:
        raise Problem(
            "bad-request", f"{rest} bytes follow the end of the Arrow IPC stream; send one stream at a time"
        )
    return reader.parts.finish(protocol)


class _Values(NamedTuple):
    """Byte strings, one behind the other: where each begins, and where the last one ends."""

    offsets: Numbers
    data: memoryview


class _Others(NamedTuple):
    """What messages have beside their values; None where no row has it."""

    ttl: Numbers | None
    retries: Numbers | None
    repairs: Numbers | None
    delay_us: Numbers | None
    headers: Numbers | None  # of objects: a text for each

    def at(self, order: Numbers) -> "_Others":
        return _Others(*(column[order] if column is not None else None for column in self))

    def columns(self, lo: int, hi: int) -> Others:
        """Those of some rows."""
        ttl, retries, repairs, delay_us, headers = (
            column[lo:hi] if column is not None else None for column in self
        )
        return Others(
            _array("q", ttl) if ttl is not None else None,
            _array("h", retries) if retries is not None else None,
            _array("q", repairs) if repairs is not None else None,
            _array("q", delay_us) if delay_us is not None else None,
            headers.tolist() if headers is not None else None,
        )


class _Reader:
    """One body on its way in."""

    def __init__(self, payload_bytes_max: int, bytes_max: int, queues: bool, repairs: bool) -> None:
        self.parts = PartsBuilder()
        self._payload_bytes_max = payload_bytes_max
        self._bytes_max = bytes_max
        self._queues = queues
        self._repairs = repairs
        self._rows = 0  # before the present batch
        self._bytes = 0
        self._checked: set[str] = set()  # names of queues

    def check_schema(self, schema: pa.Schema) -> None:
        """Whether the columns are those that are taken here, each once and of a type that it can have."""
        names = REPAIR_COLUMNS if self._repairs else COLUMNS
        required = names if self._repairs else ("value",)
        if self._queues:
            names, required = (*names, "queue"), (*required, "queue")
        for name in schema.names:
            if name not in names:
                hint = "; the queue is the one of the address" if name == "queue" else ""
                raise _wrong(f"there is no column {name!r:.100} here; there are {', '.join(names)}{hint}")
            if schema.names.count(name) > 1:
                raise _wrong(f"there are {schema.names.count(name)} columns {name!r}; send one")
        for name in required:
            if name not in schema.names:
                raise _wrong(f"the column {name!r} is missing")
        for field in schema:
            plain = field.type.value_type if types.is_dictionary(field.type) else field.type
            if field.name == "value":
                fits, rule = _is_binary(plain), VALUE_RULE
            elif field.name == "queue":
                fits, rule = types.is_string(plain) or types.is_large_string(plain), "string or large_string"
            elif field.name == "headers":
                fits, rule = types.is_null(field.type) or _is_map(field.type), "map<string, string>"
            else:
                fits, rule = types.is_integer(field.type) or types.is_null(field.type), "any type of integers"
                if field.name == "delay":
                    more = types.is_floating(field.type) or types.is_decimal(field.type)
                    fits, rule = fits or more, "any type of numbers"
            if not fits:
                raise _wrong(f"column {field.name!r} is of type {field.type!s:.100}; use {rule}")

    def add(self, batch: pa.RecordBatch) -> None:
        """The messages of a batch that has been checked in full and is not empty."""
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        ttl = self._numbers(columns.get("ttl"), "ttl", 1, TTL_SECONDS_MAX, NO_TTL, "q", TTL_RULE)
        retries = self._numbers(
            columns.get("retries"), "retries", 0, RETRIES_ENDLESS, RETRIES_NONE, "h", RETRIES_RULE
        )
        repairs = None
        if self._repairs:
            self._refuse_nulls(columns["offset"], "offset", "every row is for a dead letter")
            repairs = self._numbers(columns["offset"], "offset", 0, OFFSET_MAX, 0, "q", OFFSET_RULE)
        others = _Others(
            ttl, retries, repairs, self._delay_us(columns.get("delay")), self._headers(columns.get("headers"))
        )
        value = columns["value"]
        self._refuse_nulls(value, "value", "every row is a message")
        self._measure(value)
        if not self._queues:
            self._add_part(None, self._values(value), 0, len(value), others)
        else:
            self._add_by_queue(columns["queue"], value, others)
        self._rows += batch.num_rows

    def _add_by_queue(self, queue: pa.Array, value: pa.Array, others: _Others) -> None:
        """The messages of each queue together, without a look at each of them."""
        self._refuse_nulls(queue, "queue", "name the queue in every row")
        if not types.is_dictionary(queue.type):
            queue = queue.dictionary_encode()
        names = queue.dictionary.to_pylist()
        places: dict[str, int] = {}  # A dictionary may have the same name more than once.
        first_of_name = np.array([places.setdefault(name, at) for at, name in enumerate(names)])
        which = first_of_name[queue.indices.to_numpy()]
        used, firsts = np.unique(which, return_index=True)
        if len(used) > 1:
            order = np.argsort(which, kind="stable")
            value = value.take(pa.array(order))
            others = others.at(order)
            which = which[order]
        values = self._values(value)
        starts = np.searchsorted(which, used, side="left")
        ends = np.searchsorted(which, used, side="right")
        for at in np.argsort(firsts):  # in the order in which the queues appeared
            name = names[used[at]]
            self._check_queue(name, int(firsts[at]))
            self._add_part(name, values, int(starts[at]), int(ends[at]), others)

    def _add_part(self, queue: str | None, values: _Values, lo: int, hi: int, others: _Others) -> None:
        part = self.parts.of(queue)
        offsets = values.offsets[lo : hi + 1]
        first, end = int(offsets[0]), int(offsets[-1])
        part.add(
            values.data[first:end],  # copied once, when all of the part is there
            _array("i", (offsets[1:] + (part.end - first)).astype(np.int32)),
            others.columns(lo, hi),
        )

    # --- columns -----------------------------------------------------------------------------------

    def _values(self, column: pa.Array) -> _Values:
        """The buffers of a column that has no nulls and was measured."""
        if types.is_dictionary(column.type):
            column = column.dictionary.take(column.indices)
        _, offsets, data = column.buffers()
        return _Values(
            self._offsets(column, offsets), memoryview(data) if data is not None else memoryview(b"")
        )

    def _offsets(self, column: pa.Array, buffer: pa.Buffer) -> Numbers:
        wide = types.is_large_binary(column.type) or types.is_large_string(column.type)
        numbers = np.frombuffer(buffer, np.int64 if wide else np.int32)
        # int64 for all, because a sum with where the part ends may not fit in less.
        return numbers[column.offset : column.offset + len(column) + 1].astype(np.int64)

    def _measure(self, value: pa.Array) -> None:
        """Whether the messages are small enough, each and together, before any is unfolded."""
        if types.is_dictionary(value.type):
            sizes = np.diff(self._offsets(value.dictionary, value.dictionary.buffers()[1]))
            lengths = sizes[value.indices.to_numpy()]
        else:
            lengths = np.diff(self._offsets(value, value.buffers()[1]))
        longest = int(lengths.argmax())
        if lengths[longest] > self._payload_bytes_max:
            raise too_large(f"row {self._rows + longest}", int(lengths[longest]), self._payload_bytes_max)
        self._count(int(lengths.sum()), len(value) - 1)

    def _count(self, more: int, row: int) -> None:
        """So many bytes more; a Problem where they are too many."""
        self._bytes += more
        if self._bytes > self._bytes_max:
            raise Problem(
                "body-too-large",
                f"the messages up to row {self._rows + row} have {self._bytes} bytes, and the "
                f"limit of [http] body-bytes-max is {self._bytes_max}; send less at a time",
            )

    def _numbers(
        self,
        column: pa.Array | None,
        name: str,
        lowest: int,
        highest: int,
        absent: int,
        typecode: str,
        rule: str,
    ) -> Numbers | None:
        """A column of numbers; None where no row has one."""
        if column is None or column.null_count == len(column):
            return None
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        # What only fits in 64 bits without a sign becomes a number below 0, and so is found, too.
        plain = column.cast(pa.int64(), safe=False)
        numbers = plain.fill_null(absent).to_numpy(zero_copy_only=False)
        wrong = valid & ((numbers < lowest) | (numbers > highest))
        if wrong.any():
            row = int(wrong.argmax())
            raise _wrong(
                f"row {self._rows + row}, column {name!r}: it is {column[row].as_py()}; use {rule}, or null"
            )
        return numbers.astype(typecode)

    def _delay_us(self, column: pa.Array | None) -> Numbers | None:
        if column is None or column.null_count == len(column):
            return None
        seconds = column.cast(pa.float64(), safe=False).fill_null(NO_DELAY).to_numpy(zero_copy_only=False)
        wrong = ~((seconds >= 0) & (seconds <= DELAY_SECONDS_MAX))  # what is no number is neither
        if wrong.any():
            row = int(wrong.argmax())
            found = column[row].as_py()
            raise _wrong(f"row {self._rows + row}, column 'delay': it is {found}; use {DELAY_RULE}, or null")
        return np.rint(seconds * SECOND_US).astype("q") if seconds.any() else None

    def _headers(self, column: pa.Array | None) -> Numbers | None:
        if column is None or column.null_count == len(column):
            return None
        texts: Numbers = np.empty(len(column), object)
        for row, pairs in enumerate(column.to_pylist()):
            headers = dict(pairs or ())
            try:
                if pairs and len(headers) < len(pairs):
                    raise ValueError("a name is there twice")  # noqa: TRY301 - as the others
                texts[row] = encode_headers(headers)
            except ValueError as error:
                raise _wrong(f"row {self._rows + row}, column 'headers': {error}") from None
            self._count(len(texts[row]), row)
        return texts if texts.any() else None

    def _refuse_nulls(self, column: pa.Array, name: str, why: str) -> None:
        valid = column.is_valid()
        if types.is_dictionary(column.type) and column.dictionary.null_count:
            valid = column.dictionary.is_valid().take(column.indices).fill_null(False)
        flags = valid.to_numpy(zero_copy_only=False)
        if not flags.all():
            raise _wrong(f"row {self._rows + int(flags.argmin())}, column {name!r}: it is null; {why}")

    def _check_queue(self, name: str, row: int) -> None:
        if name in self._checked:
            return
        try:
            check_queue_name(name)
        except QueueNameError as error:
            raise _wrong(f"row {self._rows + row}, column 'queue': {error}") from None
        self._checked.add(name)


def _is_binary(type_: pa.DataType) -> bool:
    return bool(
        types.is_binary(type_)
        or types.is_string(type_)
        or types.is_large_binary(type_)
        or types.is_large_string(type_)
    )


def _is_map(type_: pa.DataType) -> bool:
    return bool(
        types.is_map(type_)
        and all(types.is_string(it) or types.is_large_string(it) for it in (type_.key_type, type_.item_type))
    )


def _array(typecode: str, numbers: Numbers) -> "array[int]":
    column = array(typecode)
    column.frombytes(numbers.tobytes())
    return column


def _wrong(what: str) -> Problem:
    return Problem("bad-request", what)


# --- compression -----------------------------------------------------------------------------------

# The head of every message is a FlatBuffers table, of which this is needed (format/Message.fbs):
#   Message: version 0, header_type 1, header 2, bodyLength 3
#   RecordBatch: length 0, nodes 1, buffers 2, compression 3
#   DictionaryBatch: id 0, data (a RecordBatch) 1, isDelta 2
_HEADER, _COMPRESSION, _DICTIONARY_DATA = 2, 3, 1


def _refuse_compressed(source: pa.BufferReader) -> None:
    """A Problem where buffers are compressed: a few bytes could become more than there is memory."""
    messages = pa.ipc.MessageReader.open_stream(source)
    while True:
        try:
            message = messages.read_next_message()
        except StopIteration:
            return
        if message.type in ("record batch", "dictionary"):
            head = memoryview(message.metadata)
            table = _member(head, _table(head, 0), _HEADER)
            if message.type == "dictionary" and table is not None:
                table = _member(head, table, _DICTIONARY_DATA)
            if table is not None and _member(head, table, _COMPRESSION) is not None:
                raise _wrong("the buffers of the Arrow stream are compressed; write it without compression")


def _table(head: memoryview, at: int) -> int:
    """Where the table begins that is pointed to from there."""
    (distance,) = struct.unpack_from("<I", head, at)
    return at + int(distance)


def _member(head: memoryview, table: int, number: int) -> int | None:
    """Where the table begins that is a member of a table; None where it is absent."""
    (back,) = struct.unpack_from("<i", head, table)
    entries = table - back
    if entries < 0:
        raise struct.error("a table of its head lies outside of it")
    (size,) = struct.unpack_from("<H", head, entries)
    at = 4 + 2 * number
    if at + 2 > size:
        return None
    (distance,) = struct.unpack_from("<H", head, entries + at)
    return _table(head, table + distance) if distance else None
