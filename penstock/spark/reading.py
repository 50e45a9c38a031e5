"""Reading: ranges of queues as Arrow batches, on an executor; and the plan of a batch, on the driver.

An executor asks the broker for a range and hands on what comes, batch by batch, without looking at a single
row. Where the connection breaks in the middle it asks again, from behind the last batch that was whole.

Rules that always hold:
  * Every row once: the column that counts is always read along, also where the user does not want it, so
    that it is known at any time how far a range was read.
  * A range that was planned is read to its end. What is missing of it is `DataLost`, or a warning where the
    user has said that the query shall go on.

How it fails: `Unreachable` after `retrySeconds` without an answer, `DataLost`, and the broker's own no.
"""

import http.client
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from penstock.errors import PenstockError
from penstock.spark.api import Body, Broker, Interrupted, Patience, Refused
from penstock.spark.offsets import (
    Extent,
    counted,
    ending_positions,
    extents_of,
    kept_position,
    lost,
    starting_positions,
)
from penstock.spark.options import ReadOptions, WrongOption
from penstock.spark.splits import Range, split

if TYPE_CHECKING:
    import pyarrow as pa


class NothingThere(PenstockError):
    """A batch of something that does not exist."""


@dataclass(frozen=True)
class Piece(InputPartition):
    """What one task reads."""

    ranges: tuple[Range, ...]


class Scan:
    """Reads pieces. Made on the driver, pickled, used on executors."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._broker = Broker(options.url, options.token, options.retry_seconds)
        self._counter = "event_offset" if options.view == "events" else "offset"
        names = schema.fieldNames()
        self._columns = names if self._counter in names else [*names, self._counter]

    def read(self, ranges: Sequence[Range]) -> Iterator["pa.RecordBatch"]:
        """The rows of some ranges, in order."""
        # Spark compares the schema of what it gets with its own idea of it, so that is the one to use.
        from pyspark.sql.pandas.types import to_arrow_schema

        schema = to_arrow_schema(self._schema, timezone="UTC")
        try:
            for part in ranges:
                yield from self._range(part, schema)
        finally:
            self._broker.close()

    def _range(self, part: Range, schema: "pa.Schema") -> Iterator["pa.RecordBatch"]:
        import pyarrow as pa

        at = part.start
        patience = Patience(self._broker.retry_seconds)
        while at < part.end:
            try:
                with self._broker.stream("queues", part.queue, "log", **self._query(at, part.end)) as body:
                    begins = int(body.headers.get("Penstock-Start", at))
                    if begins > at:
                        self._lost(part.queue, at, begins, "are not in the log any more")
                        at = begins
                    for batch in _batches(body):
                        patience.succeeded()
                        at = self._follow(part.queue, at, batch)
                        columns = batch.columns[: len(schema)]
                        yield pa.RecordBatch.from_arrays(columns, schema=schema)
            except Interrupted as error:
                patience.failed(error)
                continue
            except Refused as error:
                self._refused(part.queue, at, part.end, error)
            break
        if at < part.end and self._options.view != "state":
            self._lost(part.queue, at, part.end, "were there when the query was planned, and are not now")

    def _query(self, start: int, end: int) -> dict[str, object]:
        options = self._options
        return {
            "view": options.view,
            "start": start,
            "end": end,
            "columns": ",".join(self._columns),
            "fail_on_loss": options.fail_on_data_loss,
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
        if error.name not in ("offsets-missing", "queue-not-found"):
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
        self._check_there(broker, extents)
        starts = starting_positions(broker, options, extents)
        ends = ending_positions(options, extents)
        ranges: list[Range] = []
        for queue, extent in extents.items():
            start, end = starts[queue], ends[queue]
            if start > end and options.starting_timestamp is None:
                raise WrongOption(
                    f"queue {queue!r}: startingOffsets is {start}, which is behind endingOffsets, {end}"
                )
            if start < end:
                start = kept_position(options, queue, start, extent)
                ranges.append(Range(queue, start, max(start, end)))
        return [Piece(task) for task in split(ranges, options.min_partitions)]

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
        # A plan without any piece is one of Spark's own, of which there is nothing to read.
        return self._scan.read(partition.ranges if isinstance(partition, Piece) else ())
