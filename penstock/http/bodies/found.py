"""Messages that a search has found, as its caller gets them: lines of JSON, CSV, or Parquet.

All three have the same members, in this order; what is unknown or not there is null, empty in CSV:

    queue, offset, id, state, timestamp, expires, due, retries, attempts, reason, why, died, consumer,
    protocol, repaired, headers, value_bytes
    value           the payload where it is UTF-8, else `value_base64`; in Parquet always the bytes

Lines of JSON have others between them: `missing`, `progress`, and at last `end`. CSV and Parquet have no room
for these. So there an answer that is not all that was asked for, but for its limit, has no end: `Incomplete`.

CSV is written by the book (RFC 4180: quotes where they are needed, doubled inside, lines end in CR LF), and
what is in it is what was sent, to the letter. A spreadsheet takes cells that begin with = + - @ for formulas;
`spreadsheet` puts a ' before those, which changes them, and therefore has to be asked for.

Memory: Parquet keeps one group of rows, `GROUP_BYTES` of payload, and what it will write behind the last.
"""

import csv
import io
import json
from base64 import b64encode, urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.errors import PenstockError
from penstock.http.app import json_text
from penstock.http.bodies.media import NDJSON
from penstock.http.problems import Problem
from penstock.http.reading.looking import LAST_US, iso_time
from penstock.http.reading.search import Cursor, Found, Item, Missing, Search
from penstock.model.headers import decode_headers

if TYPE_CHECKING:
    import pyarrow as pa

CSV: Final = "text/csv"
PARQUET: Final = "application/vnd.apache.parquet"
FORMATS: Final = {"ndjson": NDJSON, "csv": CSV, "parquet": PARQUET}

VALUE_BYTES_MAX: Final = 4096
"""Of a payload that is cut."""

GROUP_ROWS: Final = 100_000
GROUP_BYTES: Final = 16 << 20

FIELDS: Final = (
    "queue", "offset", "id", "state", "timestamp", "expires", "due", "retries", "attempts", "reason", "why",
    "died", "consumer", "protocol", "repaired", "headers", "value_bytes",
)  # fmt: skip
_TIMES: Final = ("timestamp", "expires", "due", "died")
_FORMULAS: Final = ("=", "+", "-", "@", "\t", "\r")


class Incomplete(PenstockError):
    """An export that ends before its end."""


class Encoder(Protocol):
    """What a search has found, in bytes. For a thread."""

    def head(self) -> bytes: ...

    def items(self, items: list[Item]) -> bytes: ...

    def progress(self, search: Search) -> bytes: ...

    def end(self, search: Search, error: PenstockError | None = None) -> bytes: ...


def fields_of(found: Found, values: str) -> dict[str, Any]:
    """A message as JSON has it. `values`: cut, full or none."""
    row = found.row
    fields: dict[str, Any] = {name: getattr(row, name, None) for name in FIELDS}
    fields["why"], fields["repaired"] = found.why, found.repaired
    fields["headers"] = decode_headers(row.headers)
    for name in _TIMES:
        if fields[name] is not None:
            fields[name] = iso_time(fields[name])
    if values == "none":
        return fields
    payload = row.value
    if values == "cut" and len(payload) > VALUE_BYTES_MAX:
        payload = payload[:VALUE_BYTES_MAX]
        fields["cut"] = True
    return {**fields, **_value(bytes(payload), "cut" in fields)}


def _value(payload: bytes, cut: bool) -> dict[str, str]:
    # A character that is cut in two is left out.
    for end in range(len(payload), max(len(payload) - (4 if cut else 1), 0), -1):
        try:
            return {"value": payload[:end].decode()}
        except UnicodeDecodeError:
            pass
    return {"value_base64": b64encode(payload).decode()} if payload else {"value": ""}


class Lines:
    """NDJSON."""

    def __init__(self, values: str) -> None:
        self._values = values

    def head(self) -> bytes:
        return b""

    def items(self, items: list[Item]) -> bytes:
        return "".join(f"{json_text(self._line(item))}\n" for item in items).encode()

    def _line(self, item: Item) -> Mapping[str, Any]:
        return {"missing": item._asdict()} if isinstance(item, Missing) else fields_of(item, self._values)

    def progress(self, search: Search) -> bytes:
        told = {
            "queue": search.queue,
            "offset": search.offset,
            "searched": search.searched,
            "total": max(search.total, search.searched),
            "found": search.found,
        }
        return f"{json_text({'progress': told})}\n".encode()

    def end(self, search: Search, error: PenstockError | None = None) -> bytes:
        ended = search.ended
        told: dict[str, Any] = {
            "complete": ended is not None and ended.complete,
            "why": ended.why if ended is not None else "error",
            "searched": search.searched,
            "found": search.found,
            "missing": search.missing,
            "next": cursor_text(ended.next) if ended is not None and ended.next is not None else None,
        }
        if error is not None:
            told["detail"] = str(error)
        return f"{json_text({'end': told})}\n".encode()


class _Whole:
    """What has no place for anything but messages."""

    def progress(self, search: Search) -> bytes:
        return b""

    def check(self, search: Search, error: PenstockError | None) -> None:
        if error is not None:
            raise error
        ended = search.ended
        if ended is None or not (ended.complete or ended.why == "limit"):
            raise Incomplete(f"it ended early, at offset {search.offset} of queue {search.queue!r}")

    def check_none(self, items: list[Item]) -> list[Found]:
        for item in items:
            if isinstance(item, Missing):
                where = f"queue {item.queue!r}: offsets {item.first} to {item.end - 1}"
                raise Incomplete(f"{where} cannot be read ({item.why})")
        return [item for item in items if isinstance(item, Found)]


class Csv(_Whole):
    def __init__(self, values: str, spreadsheet: bool) -> None:
        self._values = values
        self._spreadsheet = spreadsheet
        self._columns = [*FIELDS, *(() if values == "none" else ("value", "value_base64"))]

    def head(self) -> bytes:
        return self._written([self._columns])

    def items(self, items: list[Item]) -> bytes:
        return self._written([self._cells(found) for found in self.check_none(items)])

    def end(self, search: Search, error: PenstockError | None = None) -> bytes:
        self.check(search, error)
        return b""

    def _cells(self, found: Found) -> list[object]:
        fields = fields_of(found, self._values)
        fields["headers"] = json_text(fields["headers"]) if fields["headers"] else None
        fields["repaired"] = str(fields["repaired"]).lower()
        cells = [fields.get(name) for name in self._columns]
        if self._spreadsheet:
            cells = [f"'{it}" if isinstance(it, str) and it.startswith(_FORMULAS) else it for it in cells]
        return cells

    @staticmethod
    def _written(rows: list[Any]) -> bytes:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\r\n").writerows(rows)
        return text.getvalue().encode()


class _Sink(io.RawIOBase):
    """Takes what a writer of files writes, until somebody fetches it."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:  # whatever is like bytes
        self._parts.append(bytes(data))
        return len(self._parts[-1])

    def fetched(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


class Parquet(_Whole):
    def __init__(self, values: str) -> None:
        try:
            import pyarrow as pa  # here, because not every broker has it
            import pyarrow.parquet as pq
        except ImportError:
            raise Problem(
                "not-installed",
                "the broker has no pyarrow to write Parquet with: pip install 'penstock[arrow]' there, or "
                f"accept {CSV} or {NDJSON}",
            ) from None
        self._pa = pa
        self._values = values
        self._schema = _schema(values)
        self._sink = _Sink()
        self._writer = pq.ParquetWriter(pa.PythonFile(self._sink, mode="w"), self._schema)
        self._group: list[Found] = []
        self._bytes = 0

    def head(self) -> bytes:
        return self._sink.fetched()

    def items(self, items: list[Item]) -> bytes:
        for found in self.check_none(items):
            value = found.row.value
            kept = len(value) if self._values == "full" else min(len(value), VALUE_BYTES_MAX)
            # A copy: the group outlives the files that these are windows on.
            self._group.append(found._replace(row=found.row._replace(value=bytes(value[:kept]))))
            self._bytes += kept
            if self._bytes >= GROUP_BYTES or len(self._group) >= GROUP_ROWS:
                self._write()
        return self._sink.fetched()

    def end(self, search: Search, error: PenstockError | None = None) -> bytes:
        self.check(search, error)
        self._write()
        self._writer.close()
        return self._sink.fetched()

    def _write(self) -> None:
        group, self._group, self._bytes = self._group, [], 0
        if not group:
            return
        columns: dict[str, list[Any]] = {
            name: [getattr(found.row, name, None) for found in group] for name in self._schema.names
        }
        columns["why"] = [found.why for found in group]
        columns["repaired"] = [found.repaired for found in group]
        columns["headers"] = [list(decode_headers(found.row.headers).items()) for found in group]
        for name in _TIMES:
            columns[name] = [None if it is None else min(it, LAST_US) for it in columns[name]]
        arrays = [self._pa.array(columns[field.name], field.type) for field in self._schema]
        self._writer.write_batch(self._pa.record_batch(arrays, schema=self._schema))


def _schema(values: str) -> "pa.Schema":
    import pyarrow as pa

    moment = pa.timestamp("us", tz="UTC")
    others = {
        "offset": pa.int64(),
        "retries": pa.int32(),
        "attempts": pa.int32(),
        "repaired": pa.bool_(),
        "headers": pa.map_(pa.string(), pa.string()),
        "value_bytes": pa.int64(),
        **dict.fromkeys(_TIMES, moment),
    }
    columns = {name: others.get(name, pa.string()) for name in FIELDS}
    return pa.schema({**columns, **({} if values == "none" else {"value": pa.binary()})})


def encoder_of(media: str, values: str, spreadsheet: bool) -> Encoder:
    if media == PARQUET:
        return Parquet(values)
    return Csv(values, spreadsheet) if media == CSV else Lines(values)


def cursor_text(cursor: Cursor) -> str:
    """A cursor as callers have it."""
    return urlsafe_b64encode(json.dumps(cursor).encode()).decode().rstrip("=")


def read_cursor(text: str) -> Cursor | None:
    """What `cursor_text` has written; None where it has not."""
    try:
        queue, identity, offset, newest = json.loads(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, TypeError, RecursionError):
        return None
    right = isinstance(queue, str) and isinstance(identity, str) and type(offset) is int and offset >= 0
    return Cursor(queue, identity, offset, newest) if right and isinstance(newest, bool) else None
