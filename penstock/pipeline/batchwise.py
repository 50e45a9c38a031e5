"""Batchwise: writing a batch to a sink, which knows each batch again when it is run again.

Spark runs a batch again where its driver died before it had written down that the batch was done. What stays
the same is the id of the query, which its checkpoint keeps, and the number of the batch.

    DeltaSink    a Delta table remembers with every commit which batch of which query it was; one that is
                 there already is passed over. Rows and id are one commit
    QueueSink    the broker stores the messages of a key once
    FileSink     Spark's own sink for files keeps a list of those that count, by batch, in `_spark_metadata`.
                 It wants every batch in it: those before a sink was there are put in, without files. And
                 it says nothing of whose batches they are: a file beside it, named for the query, does

Of several sinks of one query, those with a name put it behind the id. The rows of a batch for a Delta table
are gathered on the driver: `maxOffsetsPerTrigger` keeps that small.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.streaming.query import StreamingQuery

from penstock.errors import PenstockError
from penstock.pipeline.ends import PLACE
from penstock.pipeline.formats import COMPLETE, DELTA, PENSTOCK
from penstock.pipeline.model import Sink, Source
from penstock.spark.api import Broker, Refused
from penstock.spark.options import STREAM, write_options

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

KNOWN_SECONDS: Final = 60.0
"""The id of a query is known when its start has returned, which may be after its first batch has begun."""


class NoIdentity(PenstockError):
    """A batch that nobody could know again."""


class OthersFiles(PenstockError):
    """Files that another query writes. Says where, and what to do."""


class WrongColumns(PenstockError):
    """Rows with other columns than their table has. Says which, and what to do."""


class Batchwise(ABC):
    """What `foreachBatch` calls."""

    def __init__(self) -> None:
        self._query_id = ""
        self._known = threading.Event()

    def is_of(self, query: StreamingQuery) -> None:
        """The query whose batches come."""
        self._query_id = str(query.id)
        self._known.set()

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        if not self._known.wait(KNOWN_SECONDS):
            raise NoIdentity("the query of this batch has no id")
        self.write(frame, self._query_id, batch_id)

    @abstractmethod
    def write(self, frame: DataFrame, query_id: str, batch_id: int) -> None:
        """Write a batch, unless it is written already."""


class SinkWriter(ABC):
    """One sink."""

    @abstractmethod
    def write(self, frame: DataFrame, query_id: str, batch_id: int) -> int:
        """Write a batch, unless it is written already; how many rows were written now."""


def writer_of(sink: Sink, source: Source) -> SinkWriter:
    """What writes to a sink; messages go to the broker of the source, unless the sink names one."""
    if sink.format == DELTA:
        return DeltaSink(sink)
    return QueueSink(sink, source) if sink.format == PENSTOCK else FileSink(sink)


def broker_of(source: Source) -> dict[str, str]:
    """Where a source is: its dead letters go there, and so do messages, unless their sink says otherwise."""
    names = ("url", "token", "retrySeconds")
    return {name: source.options[name] for name in names if name in source.options}


class DeltaSink(SinkWriter):
    """A Delta table, by the package `deltalake`."""

    def __init__(self, sink: Sink) -> None:
        self._suffix = f"/{sink.name}" if sink.name else ""
        self._path = sink.options["path"]
        self._anew = sink.mode == COMPLETE
        self._partition_by = list(sink.partition_by)
        self._merges = sink.options.get("mergeSchema", "false").lower() == "true"

    def write(self, frame: DataFrame, query_id: str, batch_id: int) -> int:
        from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

        writer = f"penstock/{query_id}{self._suffix}"
        there = DeltaTable.is_deltatable(self._path)
        table = DeltaTable(self._path) if there else None
        if table is not None:
            written = table.transaction_version(writer)
            if written is not None and written >= batch_id:
                return 0
        rows = frame.toArrow()
        if there and not rows.num_rows and not self._anew:
            return 0
        if table is not None and not self._merges:
            check_columns(self._path, [field.name for field in table.schema().fields], rows.column_names)
        if table is not None:
            check_values(self._path, table, rows, merges=self._merges)
        write_deltalake(
            self._path,
            rows,
            mode="overwrite" if self._anew else "append",
            partition_by=self._partition_by or None,
            schema_mode="merge" if self._merges and there else None,
            commit_properties=CommitProperties(app_transactions=[Transaction(writer, batch_id)]),
        )
        return int(rows.num_rows)


def check_columns(path: str, there: Sequence[str], ours: Sequence[str]) -> None:
    """Whether a table has the columns of the rows that are to be added to it, and no others."""
    new = [name for name in ours if name not in there]
    left_out = [name for name in there if name not in ours]
    if new or left_out:
        said = [f"the table has no column {', '.join(map(repr, new))}"] if new else []
        said += [f"the rows have no column {', '.join(map(repr, left_out))}"] if left_out else []
        raise WrongColumns(
            f"{path}: {' and '.join(said)}; set mergeSchema = true in the sink to take both together, or "
            "write to another path"
        )


def check_values(path: str, table: "DeltaTable", rows: "pa.Table", *, merges: bool) -> None:
    """Whether a table can hold the values of the rows as they are: it would make 1 of 1.7 without a word."""
    import pyarrow as pa

    for field in pa.schema(table.schema().to_arrow()):
        if field.name in rows.column_names and _would_change(rows.column(field.name), field.type, merges):
            ours = rows.column(field.name).type
            raise WrongColumns(
                f"{path}: column {field.name!r} is {field.type} in the table, which cannot hold all values "
                f"of the rows, {ours}; cast it in a step, or write to another path"
            )


def _would_change(column: "pa.ChunkedArray", type_: "pa.DataType", merges: bool) -> bool:
    import pyarrow as pa
    from pyarrow import compute, types

    if types.is_struct(column.type) and types.is_struct(type_):
        theirs = {field.name: field.type for field in type_}
        # What is new in a struct is added to the table where schemas are merged, and else left out; where it
        # is never null, the rows that are there could not be read any more.
        return any(
            _would_change(compute.struct_field(column, at), theirs[field.name], merges)
            if field.name in theirs
            else not (merges and field.nullable)
            for at, field in enumerate(column.type)
        )
    if types.is_list(column.type) and types.is_list(type_):
        return _would_change(compute.list_flatten(column), type_.value_type, merges)
    try:
        return column.type != type_ and not column.cast(type_).cast(column.type).equals(column)
    except pa.ArrowNotImplementedError:
        return False  # whoever writes the table judges it
    except pa.ArrowInvalid:
        return True


class QueueSink(SinkWriter):
    """Queues: one, one for each value of a column, or those that a column `queue` names."""

    def __init__(self, sink: Sink, source: Source) -> None:
        self._sink = sink
        self._options = {**broker_of(source), **sink.options}
        if "token" not in sink.options and self._options.get("url") != source.options.get("url"):
            self._options.pop("token", None)  # It is another broker's, which must not see it.
        self._suffix = f"/{sink.name}" if sink.name else ""

    def write(self, frame: DataFrame, query_id: str, batch_id: int) -> int:
        rows, own = fanned_out(frame, self._sink)
        options = {**self._options, **own}
        return send(
            rows,
            {name: text for name, text in options.items() if text},
            f"spark/{query_id}/{batch_id}{self._suffix}",
        )


def fanned_out(frame: DataFrame, sink: Sink) -> tuple[DataFrame, dict[str, str]]:
    """The rows, each with its queue, where the sink names it by columns; and then no queue for all."""
    queue = sink.options.get("queue", "")
    names = PLACE.findall(queue)
    if sink.format != PENSTOCK or not names:
        return frame, {}
    texts = PLACE.split(queue)  # every second one is a column
    parts = [sql.col(f"`{it}`").cast("string") if at % 2 else sql.lit(it) for at, it in enumerate(texts)]
    return frame.withColumn("queue", sql.concat(*parts)).drop(*(it for it in names if it != "queue")), {
        "queue": ""
    }


def send(frame: DataFrame, options: Mapping[str, str], key: str) -> int:
    """Messages, or dead letters, once for a key; how many the broker has under it."""
    frame.write.format(PENSTOCK).mode("append").options(**options, transactionId=key).save()
    said = write_options(options, STREAM)
    with closing(Broker(said.url, said.token, said.retry_seconds)) as broker:
        try:
            stored = broker.get("transactions", key).get("stored", [])
        except Refused:  # Where there are no rows there is no transaction.
            return 0
    return sum(int(it["offset_end"]) - int(it["offset_start"]) for it in stored)


_FILE_FORMATS: Final = {
    "parquet": "parquet.ParquetFileFormat",
    "json": "json.JsonFileFormat",
    "csv": "csv.CSVFileFormat",
    "orc": "orc.OrcFileFormat",
    "text": "text.TextFileFormat",
}
_ROWS: Final = "rows"
_LOG_VERSION: Final = 1
_OF_QUERY: Final = "query-"


class FileSink(SinkWriter):
    """Files. Spark's own sink of a stream, which is asked to add a batch: for a batch there is none that
    would know it again."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._is_ours = False  # as far as is known

    def write(self, frame: DataFrame, query_id: str, batch_id: int) -> int:
        self._catch_up(frame.sparkSession, query_id, batch_id)
        frame = frame.observe(_ROWS, sql.count(sql.lit(1)).alias(_ROWS))
        self._java(frame.sparkSession).addBatch(batch_id, frame._jdf)
        counted = frame._jdf.queryExecution().observedMetrics().get(_ROWS)
        return int(counted.get().getLong(0)) if counted.isDefined() else 0  # not: it was written before

    def _catch_up(self, session: SparkSession, query_id: str, batch_id: int) -> None:
        """Put in the list what it lacks before this batch: Spark cannot read one with a gap."""
        jvm: Any = session._jvm
        path = self._sink.options["path"]
        sinks: Any = jvm.org.apache.spark.sql.execution.streaming.sinks
        done = sinks.FileStreamSinkLog(
            _LOG_VERSION,
            session._jsparkSession,
            f"{self._place(jvm, session)}/_spark_metadata",
            jvm.scala.Option.empty(),
        )
        latest = done.getLatestBatchId()
        there = int(latest.get()) if latest.isDefined() else -1
        if not self._is_ours:
            folder, files = done.metadataPath(), done.fileManager()
            marks = {str(it.getPath().getName()) for it in files.list(folder)}
            marks = {name for name in marks if name.startswith(_OF_QUERY)}
            if not marks:
                mark = jvm.org.apache.hadoop.fs.Path(folder, _OF_QUERY + query_id)
                files.createAtomic(mark, False).close()
            self._is_ours = marks <= {_OF_QUERY + query_id}
        if not self._is_ours or there > batch_id:
            raise OthersFiles(
                f"{path} has batches of another query, which Spark would take for ours: those would be left "
                "out; take another path"
            )
        assert session._sc._gateway is not None
        nothing = session._sc._gateway.new_array(sinks.SinkFileStatus, 0)
        compacted = batch_id - batch_id % done.compactInterval() - 1
        if there < 0 <= compacted:  # A list that begins may begin with what Spark makes of many.
            out = done.fileManager().createAtomic(done.batchIdToPath(compacted), False)
            done.serialize(nothing, out)
            out.close()
            there = compacted
        for number in range(there + 1, batch_id):
            done.add(number, nothing)

    def _java(self, session: SparkSession) -> Any:  # Java has no types here
        jvm: Any = session._jvm
        sources: Any = jvm.org.apache.spark.sql.execution.datasources
        package, name = _FILE_FORMATS[self._sink.format].split(".")
        to_scala = jvm.org.apache.spark.api.python.PythonUtils
        return jvm.org.apache.spark.sql.execution.streaming.sinks.FileStreamSink(
            session._jsparkSession,
            self._place(jvm, session),
            getattr(getattr(sources, package), name)(),
            to_scala.toSeq(list(self._sink.partition_by)),
            to_scala.toScalaMap(dict(self._sink.options)),
        )

    def _place(self, jvm: Any, session: SparkSession) -> str:
        """As Spark resolves it for a stream: its sink takes no path that depends on where we are."""
        path = jvm.org.apache.hadoop.fs.Path(self._sink.options["path"])
        files = path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
        return str(files.makeQualified(path).toString())
