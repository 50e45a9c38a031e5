"""Lake: what a broker has archived of a queue, and that with the log behind it, as DataFrames.

    archived_end   the offset behind the last row that the Delta table has of a queue
    archived       the rows of the table, up to an offset
    history        those, and from there on the log: the whole queue, each row once

The table is opened on the driver with deltalake, which says which files it is made of. In a folder, Spark
reads these as the Parquet files that they are, with all that it can do there; it must see the folder under
the same path. From an object store Python workers read them with deltalake's own store, which needs no jar:
credentials come from the environment of each worker, or from `storage_options`.

Rules that always hold:
  * Rows of the table do not change: whatever is archived, compacted or vacuumed later, what is below an
    offset is the same.
  * Only rows of the queue that has the name now: one that was deleted and made again is another (`identity`).
  * Nothing is passed over in silence: a gap in the table, or between table and log, is `DataLost`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from penstock.lake.table import NoTable, Span, Table, gaps_of
from penstock.spark.api import Broker
from penstock.spark.offsets import DataLost, Extent, extents_of
from penstock.spark.options import BATCH, RETRY_SECONDS_DEFAULT, WrongOption, of_queue, read_options
from penstock.spark.source import schema_of

if TYPE_CHECKING:
    import pyarrow as pa

FILES_PER_TASK_ROWS: Final = 1_000_000


class _Archive(NamedTuple):
    """A queue, and what the table has of it."""

    extent: Extent  # of the log
    table: Table
    spans: list[Span]
    headers: bool

    @property
    def end(self) -> int:
        return max((span.end for span in self.spans), default=self.extent.start)


def _archive(
    url: str, queue: str, token: str | None, options: Mapping[str, str] | None, headers: bool = False
) -> _Archive:
    broker = Broker(url, token, RETRY_SECONDS_DEFAULT).in_haste()
    try:
        path = broker.get("archive")["path"]
        if path is None:
            raise WrongOption(
                f"{url}: this broker archives nothing; set path under [archive] of its settings"
            )
        table = Table(path, "messages", options)
        try:
            spans = table.open().spans(queue)
        except NoTable:
            spans = []
        # Behind the table, which goes on growing.
        extent = extents_of(broker, read_options(of_queue(queue), BATCH)).get(queue)
    finally:
        broker.close()
    if extent is None:
        raise WrongOption(f"{url}: there is no queue {queue!r}")
    return _Archive(extent, table, [it for it in spans if it.identity == extent.identity], headers)


def archived_end(
    *, url: str, queue: str, token: str | None = None, storage_options: Mapping[str, str] | None = None
) -> int:
    """The offset behind the last row that the table has of a queue; where it has none, the log's first."""
    return _archive(url, queue, token, storage_options).end


def archived(
    spark: SparkSession,
    *,
    url: str,
    queue: str,
    end: int | None = None,
    headers: bool = False,
    token: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    fail_on_data_loss: bool = True,
) -> DataFrame:
    """The rows that the table has of a queue up to the offset `end` (None: all), with the columns of the view
    `messages`. Where it has not all of them, that is `DataLost`, unless you say that it may be so."""
    found = _archive(url, queue, token, storage_options, headers)
    return _rows(spark, found, queue, found.end if end is None else end, fail_on_data_loss)


def history(
    spark: SparkSession,
    *,
    url: str,
    queue: str,
    headers: bool = False,
    token: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    fail_on_data_loss: bool = True,
) -> DataFrame:
    """All messages of a queue, those of the table and behind them those of the log, as of now."""
    found = _archive(url, queue, token, storage_options, headers)
    if found.end > found.extent.end:
        raise DataLost(
            f"queue {queue!r}: the table has offsets up to {found.end - 1}, and the log ends before "
            f"{found.extent.end}: it was put back from a copy; `penstock archive check` says more"
        )
    reader = spark.read.format("penstock").option("url", url).options(**of_queue(queue))
    reader = reader.option("startingOffsets", json.dumps({queue: found.end}))
    reader = reader.option("endingOffsets", json.dumps({queue: found.extent.end}))
    # Whatever goes from there to the table until it is read.
    reader = (
        reader.option("history", True)
        .option("failOnDataLoss", fail_on_data_loss)
        .option("includeHeaders", headers)
    )
    if token is not None:
        reader = reader.option("token", token)
    return _rows(spark, found, queue, found.end, fail_on_data_loss).unionByName(reader.load())


def _rows(spark: SparkSession, found: _Archive, queue: str, end: int, fail_on_data_loss: bool) -> DataFrame:
    schema = schema_of("messages", found.headers)
    spans = [span for span in found.spans if span.first < end]
    first, last = spans[0].first if spans else end, max((span.end for span in spans), default=end)
    # What is before all that the table has may be gone from the log, too: then it was never archived.
    edges = [(min(found.extent.start, first), first), *gaps_of(spans), (last, max(last, end))]
    lost = [(start, stop) for start, stop in edges if start < stop]
    if lost and fail_on_data_loss:
        first, stop = lost[0]
        raise DataLost(
            f"queue {queue!r}: the table {found.table.uri} has not the offsets {first} to {stop - 1}; with "
            "fail_on_data_loss=False the rest is read"
        )
    if not spans:
        return spark.createDataFrame([], schema)
    columns = [name for name in schema.names if name != "queue"]
    stored = StructType([schema[name] for name in columns])
    table = found.table
    if table.folder is not None:
        # Names of folders are no patterns.
        reading = spark.read.schema(stored).option("__globPaths__", "false")
        rows = reading.parquet(*(f"file:{table.place(span)}" for span in spans))
    else:
        # A task for every million rows: a worker is quicker than it is started.
        tasks = max(sum(span.rows for span in spans) // FILES_PER_TASK_ROWS, 1)
        files = spark.createDataFrame([(span.path,) for span in spans], "path string").repartition(tasks)
        rows = files.mapInArrow(_Files(table, columns), stored)
    if last > end:
        rows = rows.where(sf.col("offset") < end)
    return rows.withColumn("queue", sf.lit(queue)).select(schema.names)


class _Files:
    """Reads files of a table, on a worker."""

    def __init__(self, table: Table, columns: list[str]) -> None:
        self._table = table
        self._columns = columns

    def __call__(self, batches: Iterable["pa.RecordBatch"]) -> Iterator[Any]:
        import pyarrow.parquet as pq

        for batch in batches:
            for path in batch.column("path").to_pylist():
                with self._table.input(path) as source:
                    yield from pq.ParquetFile(source).iter_batches(columns=self._columns)
