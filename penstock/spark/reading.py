"""Reading: ranges of queues as Arrow batches, on an executor; and the plan of a batch, on the driver.

An executor asks the broker for a range and hands on what comes, batch by batch, without looking at a single
row. Where the connection breaks in the middle it asks again, from behind the last batch that was whole. Where
it has the broker's files before it, it reads these (`files.py`), and asks for what it does not find there.
With servers in the option `engine` it asks nobody but NATS (`records.py`): the driver has planned where
everything is.

Rules that always hold:
  * Every row once: the column that counts is always read along, also where the user does not want it, so
    that it is known at any time how far a range was read.
  * A range that was planned is read to its end. What is missing of it is `DataLost`, or a warning where the
    user has said that the query shall go on.
  * What NATS does not have where it was planned is planned anew once: retention may have moved on.
  * Conditions that were taken over from Spark (`filters.py`) decide which rows are handed on when it is known
    that all of them came.

How it fails: `Unreachable` after `retrySeconds` without an answer, `DataLost`, and the broker's own no.
"""

import http.client
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceReader, EqualTo, Filter, InputPartition, Not
from pyspark.sql.types import StructType

from penstock.errors import PenstockError
from penstock.spark import archive
from penstock.spark.api import Body, Broker, Interrupted, Patience, Refused, Unreachable, ask_all
from penstock.spark.cuts import cut
from penstock.spark.files import Folder, NoFiles, folder_of
from penstock.spark.files import batches as file_batches
from penstock.spark.filters import Where, is_taken
from penstock.spark.leaders import NOBODY, Leaders, leaders_of
from penstock.spark.offsets import (
    Extent,
    counted,
    ending_positions,
    extents_of,
    kept_position,
    lost,
    position_at,
    starting_positions,
)
from penstock.spark.options import COPIES, ReadOptions, WrongOption
from penstock.spark.records import Plan, batches, plan_of
from penstock.spark.splits import Range, split
from penstock.spark.workers import settle_in

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.lake.table import Table

log = logging.getLogger("penstock.spark")
log.setLevel(logging.INFO)  # Which no handler shows unless it is asked to.

NATS_ADVICE: Final = "Are the NATS servers running, and does the option engine name them?"


class NothingThere(PenstockError):
    """A batch of something that does not exist."""


@dataclass(frozen=True)
class Piece(InputPartition):
    """What one task reads."""

    ranges: tuple[Range, ...] = ()
    plans: tuple[Plan, ...] = ()  # of each range, where NATS is read
    leaders: Leaders = NOBODY  # where the broker is asked
    folder: Folder | None = None  # where the files are, if the task has them; the broker is asked otherwise
    archived: archive.Part | None = None  # instead of all that: from the table
    table: "Table | None" = None  # which also has what goes from the log after the plan


class Scan:
    """Reads pieces. Made on the driver, pickled, used on executors."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._broker = Broker(options.url, options.token, options.retry_seconds)
        self._counter = "event_offset" if options.view == "events" else "offset"
        names = schema.fieldNames()
        self.where = Where()
        needed = [self._counter]
        if not options.copies:
            # Here, and not by Spark: what it has never seen does not count as a row.
            self.where = Where((Not(EqualTo(("protocol",), COPIES)),))
            needed.append("protocol")
        self._columns = [*names, *(name for name in needed if name not in names)]

    def narrowed(self, broker: Broker, ranges: Sequence[Range]) -> list[Range]:
        """What has to be read of some ranges, as far as the conditions on the rows tell."""
        wanted = set(self.where.queues([whole.queue for whole in ranges]))
        first_us, end_us = self.where.times() if not self._options.history else (None, None)
        narrow: list[Range] = []
        for whole in ranges:
            queue, start, end, *_ = whole
            if queue not in wanted or not self.where.spans(self._counter, start, end):
                continue
            # Time does not go back in a log; in the table nobody has looked.
            if first_us is not None:
                start = max(start, position_at(broker, self._options, queue, first_us))
            if end_us is not None and start < end:
                end = min(end, position_at(broker, self._options, queue, end_us))
            spans = self.where.spans(self._counter, start, end)
            narrow += (whole._replace(start=first, end=stop) for first, stop in spans)
        return narrow

    def pieces(self, broker: Broker, ranges: Sequence[Range]) -> list[Piece]:
        """What each task is told, on the driver."""
        options = self._options
        leaders = leaders_of(broker) if ranges and not options.is_direct else NOBODY
        # What one of them leads is side by side, so that tasks have few to ask.
        ranges = sorted(ranges, key=lambda whole: leaders.of(whole.queue))
        if options.view != "events":
            ranges = cut(broker, ranges, options.max_bytes_per_partition)
        tasks = split(ranges, options.min_partitions, options.max_bytes_per_partition)
        if not options.is_direct:
            folder = folder_of(broker, options) if tasks else None
            return [Piece(task, folder=folder, leaders=leaders) for task in tasks]
        plans = iter(ask_all(broker, self._plan, [part for task in tasks for part in task]))
        return [Piece(task, tuple(islice(plans, len(task)))) for task in tasks]

    def pieces_of_both(
        self, broker: Broker, lake: archive.Archive, ranges: Sequence[Range], starts: Mapping[str, int]
    ) -> list[Piece]:
        """The same from table and log, which begins at `starts`."""
        parts, rest = lake.cut(broker, ranges, starts, self._options.min_partitions)
        table = lake.table(broker)
        archived = [Piece(archived=part, table=table) for part in parts]
        return [*archived, *(replace(piece, table=table) for piece in self.pieces(broker, rest))]

    def _plan(self, broker: Broker, part: Range) -> Plan:
        try:
            return plan_of(broker, self._options, part)
        except Refused as error:
            self._refused(part.queue, part.start, part.end, error)
        return Plan(part.start)

    def read(self, piece: InputPartition) -> Iterator["pa.RecordBatch"]:
        """The rows of a piece, in order."""
        import pyarrow as pa

        # Spark compares the schema of what it gets with its own idea of it, so that is the one to use.
        from pyspark.sql.pandas.types import to_arrow_schema

        # A plan without any piece is one of Spark's own, of which there is nothing to read.
        if not isinstance(piece, Piece):
            return
        schema = to_arrow_schema(self._schema, timezone="UTC")
        try:
            for rows in self._rows(piece):
                for whole in rows:
                    batch = self.where.rows(whole, self._columns)
                    if batch.num_rows:
                        yield pa.RecordBatch.from_arrays(batch.columns[: len(schema)], schema=schema)
        finally:
            self._broker.close()
            settle_in()

    def _rows(self, piece: Piece) -> Iterator[Iterator["pa.RecordBatch"]]:
        if piece.archived is not None and piece.table is not None:
            yield self._archived(piece.archived, piece.table)
        for number, part in enumerate(piece.ranges):
            self._broker.prefer(piece.leaders.of(part.queue))
            if piece.plans:
                yield self._direct(part, piece.plans[number])
            elif piece.folder is not None:
                yield self._files(part, piece.folder, piece.table)
            else:
                yield self._range(part, piece.table)

    def _archived(self, part: archive.Part, table: "Table") -> Iterator["pa.RecordBatch"]:
        """A range from the table."""
        at = part.whole.start
        for batch in archive.batches(table, part, self._columns):
            at = self._follow(part.whole.queue, at, batch)
            yield batch
        self._check_end(part.whole, at)

    def _direct(self, part: Range, plan: Plan) -> Iterator["pa.RecordBatch"]:
        """A range from NATS."""
        from penstock.log.errors import LogDamaged
        from penstock.log.jetstream.ranges import BytesMissing

        at, planned_again_at = part.start, -1
        patience = Patience(self._broker.retry_seconds, advice=NATS_ADVICE)
        while at < part.end:
            if plan.start > at:
                self._lost(part.queue, at, plan.start, "are not in the log any more")
                at = plan.start
            step_over = planned_again_at >= 0 and not self._options.fail_on_data_loss
            try:
                for batch in batches(
                    self._options, plan, part._replace(start=at), self._columns, step_over=step_over
                ):
                    patience.succeeded()
                    at = self._follow(part.queue, at, batch)
                    yield batch
            except Interrupted as error:
                patience.failed(error)
                continue
            except (BytesMissing, LogDamaged) as error:
                if planned_again_at == at:
                    self._lost(part.queue, at, part.end, f"cannot be read: {error}")
                planned_again_at = at
                plan = self._plan(self._broker, part._replace(start=at))
                continue
            break
        self._check_end(part, at)

    def _files(self, part: Range, folder: Folder, table: "Table | None") -> Iterator["pa.RecordBatch"]:
        """A range from the broker's files, as far as they are here, and the rest from the broker."""
        at, missing = part.start, ""
        try:
            for batch in file_batches(folder, part, self._options.view, self._columns):
                at = self._follow(part.queue, at, batch)
                yield batch
        except NoFiles as error:
            missing = f"; {at} to {part.end - 1} over HTTP: {error}"
        tell = log.warning if missing and self._options.folder is not None else log.info
        what = f"queue {part.queue!r}, {counted(self._options)} {part.start} to {part.end - 1}"
        tell("%s: %d from the files in %r%s", what, at - part.start, folder.path, missing)
        if at < part.end:
            yield from self._range(part._replace(start=at), table)

    def _range(self, part: Range, table: "Table | None") -> Iterator["pa.RecordBatch"]:
        """A range from the broker, and what that has no more from the table."""
        at = part.start
        patience = Patience(self._broker.retry_seconds)
        while at < part.end:
            ends = part.end
            try:
                with self._broker.stream("queues", part.queue, "log", **self._query(at, part)) as body:
                    begins = int(body.headers.get("Penstock-Start", at))
                    ends = int(body.headers.get("Penstock-End", part.end))
                    if begins > at:
                        yield from self._removed(part._replace(start=at), begins, table)
                        at = begins
                    for batch in _batches(body):
                        patience.succeeded()
                        at = self._follow(part.queue, at, batch)
                        yield batch
                    if ends < part.end and self._broker.is_several and self._options.view != "state":
                        behind = f"queue {part.queue!r} ends at {ends} there, and at {part.end} elsewhere"
                        raise self._broker.passed_over(behind)
            except Interrupted as error:
                try:
                    patience.failed(error)
                except Unreachable:
                    if ends == part.end:
                        raise
                    break  # So it is at all of them.
                continue
            except Refused as error:
                begins = error.fields.get("offset_start", 0)
                if table is not None and error.name == "offsets-missing" and begins > at:
                    yield from self._removed(part._replace(start=at), begins, table)
                    at = begins
                    continue
                self._refused(part.queue, at, part.end, error)
            break
        self._check_end(part, at)

    def _removed(self, part: Range, begins: int, table: "Table | None") -> Iterator["pa.RecordBatch"]:
        """What of a range retention took from the log, which `begins` behind it."""
        if table is None:
            self._lost(part.queue, part.start, begins, "are not in the log any more")
        else:
            gone = part._replace(end=min(begins, part.end))
            yield from self._archived(archive.part_of(table, gone), table)

    def _check_end(self, part: Range, at: int) -> None:
        if at < part.end and self._options.view != "state":
            self._lost(part.queue, at, part.end, "were there when the query was planned, and are not now")

    def _query(self, start: int, part: Range) -> dict[str, object]:
        options = self._options
        return {
            "view": options.view,
            "start": start,
            "end": part.end,
            "identity": part.identity or None,
            "columns": ",".join(self._columns),
            "fail_on_loss": options.fail_on_data_loss,
            "state": self.where.state() if options.view == "state" else None,
        }

    def _follow(self, queue: str, at: int, batch: "pa.RecordBatch") -> int:
        """Where to go on behind a batch."""
        counter = batch.column(self._columns.index(self._counter))
        first, last = counter[0].as_py(), counter[-1].as_py()
        if self._options.view != "state" and (first != at or last - first + 1 != batch.num_rows):
            missing = last + 1 - at - batch.num_rows
            self._lost(queue, at, last + 1, f"are not all in the log: {missing} are missing")
        return int(last) + 1

    def _refused(self, queue: str, at: int, end: int, error: Refused) -> None:
        """A no in the middle of a range: what was planned is gone, or it is a matter of its own."""
        if error.name not in ("offsets-missing", "queue-not-found", "queue-deleted"):
            raise error
        if error.name == "offsets-missing" and at < error.fields.get("offset_start", 0):
            extent = Extent(error.fields["offset_start"], max(end, error.fields["offset_start"]))
            kept_position(self._options, queue, at, extent)
        self._lost(queue, at, end, f"cannot be read: {error}")

    def _lost(self, queue: str, first: int, end: int, why: str) -> None:
        lost(self._options, f"queue {queue!r}: {counted(self._options)} {first} to {end - 1} {why}")


def _batches(body: Body) -> Iterator["pa.RecordBatch"]:
    """The batches of a stream; Interrupted where it broke."""
    import pyarrow as pa

    try:
        for batch in pa.ipc.open_stream(body):
            if batch.num_rows:
                yield batch
        body.read()  # Behind the end of the answer the connection can be used again.
    except (OSError, http.client.HTTPException, pa.ArrowException):
        # Arrow has words of its own for the end of a file that should not be there.
        if body.failure is not None:
            raise body.failure from None
        raise


class BatchReader(DataSourceReader):
    """A batch: planned once, on the driver."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._scan = Scan(options, schema)

    def partitions(self) -> Sequence[Piece]:
        options = self._options
        broker = Broker(options.url, options.token, options.retry_seconds).in_haste()
        try:
            return self._plan(broker)
        finally:
            broker.close()

    def _plan(self, broker: Broker) -> list[Piece]:
        options = self._options
        extents = extents_of(broker, options)
        begins = {queue: extent.start for queue, extent in extents.items()}
        lake = archive.Archive(options.url)
        if options.history and any(begins.values()):
            extents = archive.reached(extents, lake.firsts(broker))
        self._check_there(broker, extents)
        starts = starting_positions(broker, options, extents)
        ends = ending_positions(broker, options, extents)
        ranges: list[Range] = []
        for queue, extent in extents.items():
            start, end = starts[queue], ends[queue]
            if start > end and options.starting_times is None and options.ending_times is None:
                raise WrongOption(
                    f"queue {queue!r}: startingOffsets is {start}, which is behind endingOffsets, {end}"
                )
            if start < end:
                start = kept_position(options, queue, start, extent)
                ranges.append(Range(queue, start, max(start, end), extent.identity))
        ranges = self._scan.narrowed(broker, ranges)
        if options.history:
            return self._scan.pieces_of_both(broker, lake, ranges, begins)
        return self._scan.pieces(broker, ranges)

    def _check_there(self, broker: Broker, extents: dict[str, Extent]) -> None:
        """A queue that does not exist is a mistake in a batch: it cannot wait for it."""
        options = self._options
        if options.subscribe is None:
            if not extents:
                raise NothingThere(
                    f"{options.url}: no queue has a name that fits {options.subscribe_pattern!r} as a whole"
                )
            return
        for queue in options.subscribe:
            if queue not in extents:
                try:
                    broker.get("queues", queue)
                except Refused as error:
                    if error.name != "queue-not-found":
                        raise
                    raise NothingThere(
                        f"{options.url}: there is no queue {queue!r}; its first message makes it, and a "
                        "stream would wait for that"
                    ) from None

    def read(self, partition: InputPartition) -> Iterator["pa.RecordBatch"]:
        return self._scan.read(partition)


class FilteringReader(BatchReader):
    """A batch that takes over conditions from Spark. Spark refuses it where its own setting for that is off,
    and names the setting."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._scan.where = Where(tuple(condition for condition in filters if is_taken(condition)))
        return [condition for condition in filters if not is_taken(condition)]
