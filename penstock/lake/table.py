"""Table: one view of a log as a Delta table, what is in it, and how rows get into it exactly once.

A table has the columns of its view, `headers` with those of `messages`, and two more: `day`, the UTC day of
`timestamp`, and `identity`, the first 12 digits of the ids of a queue's messages (`model/ids.py`). It is
partitioned by `queue`, `day` and `identity`: so a file has rows of one queue, one day and one life of that
queue, whoever compacts it, and a queue that was deleted and made again, or that another broker has under the
same name, is told apart for ever.

Rules that always hold:
  * What is archived of a queue is what the files of the table say: where the last one ends (`spans`). There
    is no other place that could say something else.
  * Files have names of their own and are in the table only with a commit. A commit has the *turn* of its log
    as a transaction of the table, which counts up by one: of two that were made from the same state of the
    table one fails (`Overtaken`), and what it has written is nobody's; a vacuum removes it after a week.
  * Nobody compacts files while somebody else may: deltalake gives such a commit no turn, and looks for no
    conflict, so that the rows of files that two compact at once would be there twice (`archiver.py`).
  * In a folder, files and commit are synced before `commit` returns, and what others have committed when
    `sync` does: what the log may forget then is safe.

How it fails: `Overtaken`, and `LakeError` for all that deltalake, Arrow or the store say.
"""

import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import AddAction

from penstock.errors import PenstockError
from penstock.log.arrow import schema_of
from penstock.log.tables import columns_of

VIEWS: Final = ("messages", "events")
PARTITIONS: Final = ("queue", "day", "identity")
COUNTERS: Final[Mapping[str, str]] = {"messages": "offset", "events": "event_offset"}
GROUP_BYTES: Final = 32 << 20
"""About so much is a row group of a file: that is what the archiver has in memory."""

FILE_BYTES: Final = 128 << 20
"""Files are compacted up to this size."""

NAME_BYTES_MAX: Final = 249
"""Of a queue as a folder's name, with `queue=` before it: most disks allow no more."""

_ENCODINGS: Final = {
    "offset": "DELTA_BINARY_PACKED",
    "event_offset": "DELTA_BINARY_PACKED",
    "id": "DELTA_BYTE_ARRAY",
}
_DICTIONARY: Final = ("timestamp", "protocol", "event", "reason", "consumer", "attempt")


class LakeError(PenstockError):
    """The table cannot be read or written. Says which, and why."""


class Overtaken(LakeError):
    """Somebody else has archived the same log meanwhile: look again at what is there."""


class NoTable(LakeError):
    """There is none yet."""


class Span(NamedTuple):
    """Rows of one queue's life that follow each other, in one file."""

    queue: str
    identity: str
    day: str
    first: int
    end: int
    rows: int
    last_us: int  # when the latest one came: not the last one, where a clock was set back
    size: int
    path: str


class Written(NamedTuple):
    """A file that waits for its commit."""

    action: AddAction
    span: Span


def folder_name(queue: str) -> str:
    """A queue's name as a part of a path, as Hive has it: some (Polars) go by names of folders."""
    return "".join(it if it.isalnum() else _quoted(it) for it in queue)


def _quoted(text: str) -> str:
    """As deltalake has it: it looks for no file that has a tilde in its path as it is."""
    return quote(text, safe="").replace("~", "%7E")


def fits(queue: str) -> bool:
    """Whether there can be files of it."""
    return len(folder_name(queue).encode()) <= NAME_BYTES_MAX


def _stretches(spans: Iterable[Span]) -> Iterator[Span]:
    """Files of one life of a queue, in order; those that overlap as one. A clock that is set back over
    midnight makes days take turns, and what is compacted has all turns of one day."""
    whole: Span | None = None
    for span in spans:
        if whole is not None and span.first < whole.end:
            whole = whole._replace(end=max(whole.end, span.end), rows=whole.rows + span.rows)
            continue
        if whole is not None:
            yield whole
        whole = span
    if whole is not None:
        yield whole


def gaps_of(spans: Iterable[Span]) -> list[tuple[int, int]]:
    """Offsets that files of one life of a queue, in order, have not: first and end of each gap. Where only
    their number is known, because they are within a file, the file's own."""
    found: list[tuple[int, int]] = []
    at: int | None = None
    for span in _stretches(spans):
        if at is not None and at < span.first:
            found.append((at, span.first))
        if span.rows < span.end - span.first:
            found.append((span.first, span.end))
        at = span.end
    return found


def doubles_of(spans: Iterable[Span]) -> list[tuple[int, int]]:
    """Where there are offsets twice, likewise."""
    return [(it.first, it.end) for it in _stretches(spans) if it.rows > it.end - it.first]


@contextmanager
def told(where: str) -> Iterator[None]:
    """Every failure of what is beneath, as ours."""
    try:
        yield
    except CommitFailedError as error:
        raise Overtaken(f"{where}: {error}") from error
    except TableNotFoundError as error:
        raise NoTable(f"{where}: there is no table yet") from error
    except (DeltaError, OSError, pa.ArrowException) as error:
        # Some of these are drawn as trees, in colours.
        text = " ".join(re.sub(r"\x1b\[[0-9;]*m|[↳├└│▶─]", " ", str(error)).split())
        raise LakeError(f"{where}: {text}") from error


def table_schema(view: str) -> pa.Schema:
    """What readers of the table see."""
    columns = schema_of(view, [column.name for column in columns_of(view)])
    return columns.append(pa.field("day", pa.date32())).append(pa.field("identity", pa.string()))


class Table:
    """One of the two tables below a path: a folder, or what deltalake takes for an object store."""

    def __init__(self, path: str, view: str, options: Mapping[str, str] | None = None) -> None:
        path = path.removeprefix("file://")
        self.path, self.view = path, view
        self.uri = f"{path.rstrip('/')}/{view}"
        self.counter = COUNTERS[view]
        self.folder = None if "://" in path else os.path.abspath(self.uri)
        self.columns = [
            name for name in schema_of(view, [it.name for it in columns_of(view)]).names if name != "queue"
        ]
        self._options = dict(options or {}) or None
        self._delta: DeltaTable | None = None
        self._unsynced: set[str] = set()  # folders with new names in them

    def __reduce__(self) -> tuple[type["Table"], tuple[Any, ...]]:
        return Table, (self.path, self.view, self._options)

    # --- what is there -----------------------------------------------------------------------------

    def open(self, *, make: bool = False) -> "Table":
        """As it is now; NoTable where there is none, unless one is to be made."""
        with told(self.uri):
            if make and not DeltaTable.is_deltatable(self.uri, self._options):
                if self.folder is not None:
                    place = self.folder
                    self._unsynced.add(place)
                    while not os.path.isdir(place):  # Others are somebody else's, and perhaps not to be read.
                        place = os.path.dirname(place)
                        self._unsynced.add(place)
                    os.makedirs(self.folder, exist_ok=True)
                with suppress(CommitFailedError):  # Two who make it at once have made the same.
                    DeltaTable.create(
                        self.uri,
                        table_schema(self.view),
                        "ignore",
                        list(PARTITIONS),
                        name=self.view,
                        description=f"the view {self.view} of queues of a Penstock broker",
                        storage_options=self._options,
                    )
                self._sync_names()
                self._sync_log(0)
            self._delta = DeltaTable(self.uri, storage_options=self._options)
        return self

    @property
    def delta(self) -> DeltaTable:
        assert self._delta is not None
        return self._delta

    def refresh(self) -> None:
        with told(self.uri):
            self.delta.update_incremental()

    def turn(self, log: str) -> int:
        """How often a log was archived here; 0: never."""
        with told(self.uri):
            return self.delta.transaction_version(f"penstock:{log}") or 0

    def spans(self, queue: str | None = None) -> list[Span]:
        """What the files have, in the order of queue, life and offset."""
        with told(self.uri):
            adds = pa.table(self.delta.get_add_actions(flatten=True))
        if queue is not None:
            adds = adds.filter(pa.compute.equal(adds["partition.queue"], queue))
        found = []
        for row in adds.to_pylist():
            first, last = row.get(f"min.{self.counter}"), row.get(f"max.{self.counter}")
            came = row.get("max.timestamp")
            if row["num_records"] is None or first is None or last is None or came is None:
                raise LakeError(
                    f"{self.uri}: the file {row['path']} has no statistics, so nobody can tell which offsets "
                    f"are in it; write it again with statistics of {self.counter} and timestamp"
                )
            found.append(
                Span(
                    row["partition.queue"],
                    row["partition.identity"],
                    str(row["partition.day"]),
                    first,
                    last + 1,
                    row["num_records"],
                    round(came.timestamp() * 1_000_000),
                    row["size_bytes"],
                    row["path"],
                )
            )
        return sorted(found, key=lambda it: (it.queue, it.identity, it.first))

    def place(self, span: Span) -> str:
        """Where the file of a span is: in the table's folder, or below its URL."""
        return f"{self.folder or self.uri}/{unquote(span.path)}"

    def row_from(self, span: Span, start: int) -> tuple[int, int] | None:
        """The first row of a file from `start` on: its number, and when it came."""
        with told(self.uri), self.input(span.path) as file:
            rows = pq.read_table(file, columns=[self.counter, "timestamp"])
            rows = rows.filter(pa.compute.greater_equal(rows[self.counter], start)).sort_by(self.counter)
            if not rows.num_rows:
                return None
            return rows[self.counter][0].as_py(), rows["timestamp"].cast(pa.int64())[0].as_py()

    def input(self, path: str) -> Any:
        """A file of the table, as a span names it, to be read."""
        with told(self.uri):
            return self._store().open_input_file(unquote(path))

    def _store(self) -> pa_fs.PyFileSystem:
        return pa_fs.PyFileSystem(DeltaStorageHandler(self.uri, self._options))

    # --- writing -----------------------------------------------------------------------------------

    def write(self, queue: str, identity: str, day: str, batches: Iterable[pa.RecordBatch]) -> Written:
        """A file of rows that follow each other, of one day; it is in the table with the next commit."""
        name = f"queue={folder_name(queue)}/day={day}/identity={identity}/{uuid.uuid4()}.parquet"
        first = last = rows = 0
        first_id = last_id = ""
        times: list[int] = []
        with told(self.uri), self._output(name) as (sink, size_of):
            with pq.ParquetWriter(
                sink,
                schema_of(self.view, self.columns),
                compression="zstd",
                compression_level=1,
                use_dictionary=[it for it in _DICTIONARY if it in self.columns],
                column_encoding={it: how for it, how in _ENCODINGS.items() if it in self.columns},
                write_statistics=[it for it in (*_ENCODINGS, "timestamp") if it in self.columns],
            ) as writer:
                for group in _groups(batches):
                    writer.write_table(group)
                    counted = group[self.counter]
                    if self.view == "messages":  # Ids grow with offsets.
                        first_id, last_id = first_id or group["id"][0].as_py(), group["id"][-1].as_py()
                    first, last = (first if rows else counted[0].as_py()), counted[-1].as_py()
                    rows += group.num_rows
                    # Of all rows: a clock that was set back within the day leaves the latest in the middle.
                    times += pa.compute.min_max(group["timestamp"].cast(pa.int64())).as_py().values()
            size = size_of()
        known: dict[str, tuple[object, object]] = {
            self.counter: (first, last),
            "timestamp": (moment(min(times)), moment(max(times))),
        }
        if first_id:
            known["id"] = (first_id, last_id)
        stats = {
            "numRecords": rows,
            "minValues": {column: low for column, (low, _) in known.items()},
            "maxValues": {column: high for column, (_, high) in known.items()},
            "nullCount": dict.fromkeys(known, 0),
        }
        partition = {"queue": queue, "day": day, "identity": identity}
        action = AddAction(name, size, partition, time.time_ns() // 1_000_000, True, json.dumps(stats))
        return Written(
            action,
            Span(queue, identity, day, first, last + 1, rows, max(times), size, quote(name, safe="/=")),
        )

    @contextmanager
    def _output(self, name: str) -> Iterator[tuple[Any, Callable[[], int]]]:
        """Where a file is written to, and how large it is when that is done."""
        if self.folder is None:
            with self._store().open_output_stream(name) as sink:
                yield sink, sink.tell
            return
        path = os.path.join(self.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb") as file:
            yield file, file.tell
            file.flush()
            os.fsync(file.fileno())
        self._has_name(path)

    def _has_name(self, path: str) -> None:
        """A file has got its name; the folders that know it are synced by `_sync_names`."""
        while path not in (self.folder, os.sep):
            path = os.path.dirname(path)
            self._unsynced.add(path)

    def _sync_names(self) -> None:
        while self._unsynced:
            _sync(self._unsynced.pop())

    def commit(self, files: Iterable[Written], log: str, turn: int) -> None:
        """Files become part of the table, as this turn of a log; Overtaken where that was another's."""
        self._sync_names()
        with told(self.uri):
            self.delta.create_write_transaction(
                [it.action for it in files],
                "append",
                table_schema(self.view),
                list(PARTITIONS),
                commit_properties=CommitProperties(
                    app_transactions=[Transaction(f"penstock:{log}", turn, time.time_ns() // 1_000_000)]
                ),
            )
        before = self.delta.version()
        self.refresh()
        self._sync_log(before)

    def compact(self, queue: str, day: str, identity: str) -> bool:
        """Small files of a day of a queue's life become fewer, with a commit where there are several; whether
        there was one. None of a queue whose name makes no name of a folder."""
        if len(_quoted(queue)) > NAME_BYTES_MAX:
            return False
        before = self.delta.version()
        with told(self.uri):
            done = self.delta.optimize.compact(
                [("queue", "=", queue), ("day", "=", day), ("identity", "=", identity)],
                target_size=FILE_BYTES,
                max_concurrent_tasks=1,
            )
        self.refresh()
        self.sync(before)
        return bool(done["numFilesRemoved"])

    def vacuum(self) -> int:
        """Remove files that no version of the last week has; how many."""
        with told(self.uri):
            return len(self.delta.vacuum(dry_run=False, full=True))

    def sync(self, after: int) -> None:
        """All commits behind a version are on the disk, also of who was killed before he had seen to that."""
        if self.folder is None:
            return
        for version in range(after + 1, self.delta.version() + 1):
            path = f"{self.folder}/_delta_log/{version:020d}.json"
            with told(self.uri), suppress(FileNotFoundError), open(path, encoding="utf-8") as commit:
                added = [action["add"]["path"] for action in map(json.loads, commit) if "add" in action]
                for place in (os.path.join(self.folder, unquote(name)) for name in added):
                    _sync(place)
                    self._has_name(place)
        self._sync_names()
        self._sync_log(after)

    def _sync_log(self, after: int) -> None:
        """The commits behind a version are on the disk, and what deltalake has made of them."""
        if self.folder is not None:
            log = os.path.join(self.folder, "_delta_log")
            for name in os.listdir(log):
                if name == "_last_checkpoint" or (name[:20].isdigit() and int(name[:20]) >= after):
                    _sync(os.path.join(log, name))
            _sync(log)


def _sync(path: str) -> None:
    with suppress(FileNotFoundError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def moment(us: int) -> str:
    """As statistics of a Delta table have it."""
    seconds, rest = divmod(us, 1_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest:06d}Z"


def _groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches in tables of a good size for a row group."""
    gathered: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        gathered.append(batch)
        size += batch.nbytes
        if size >= GROUP_BYTES:
            yield pa.Table.from_batches(gathered)
            gathered, size = [], 0
    if gathered:
        yield pa.Table.from_batches(gathered)
