"""Flows: the queries of a pipeline. One of Spark's queries has one result; a graph has many.

A flow is one query, with a checkpoint of its own. It reads up to a root of the graph (`graph.py`), and takes
every batch from there to all sinks behind it: the batch is kept, and each sink gets what the steps make of
it. So a log is read once for all sinks that need no state, and the records that do not fit, and the rows that
are against expectations, are found in that same pass. A step that keeps state is read up to by a flow of its
own, because the state belongs to a query.

    first sink's flow       CHECKPOINT
    any other with sinks    CHECKPOINT/flows/ROOT.MODE
    without a sink          CHECKPOINT/bad-records/SOURCE: where all sinks of a source keep state, or where an
                            earlier version has begun it, this one reads the source only to tell

**Exactly once.** Spark runs a batch again whose end is not written down, with the same rows. So a batch may
fail, or its driver die, between any two sinks, and each sink knows what it has: a Delta table by the version
of its transaction, a queue by the transaction's key, files by Spark's own list in `_spark_metadata`. Dead
letters go first, under keys of their own. Nothing is written down as done before all have it.

The console, and formats that are not ours, are left to Spark's own writers of streams, each with a query of
its own: what these promise is their own matter.

Rules that always hold:
  * Views live in a session of the pipeline's own; those of batches in that of their query.
  * A flow that begins later than another of the same source begins where that one goes on.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from penstock.errors import PenstockError
from penstock.pipeline.batchwise import Batchwise, SinkWriter, broker_of, send, writer_of
from penstock.pipeline.beginnings import has_begun, has_files, has_read
from penstock.pipeline.formats import CONSOLE, FORMATS
from penstock.pipeline.graph import Graph, StepFailed, is_against, read_tables
from penstock.pipeline.model import BAD_RECORDS, DEAD, FAIL, Expectation, Pipeline, Sink, Source
from penstock.pipeline.parsing import COPY_BYTES_MAX, as_report, bad_records, good_records, is_bad, parsed
from penstock.pipeline.progress import Judged, Teller
from penstock.spark.offsets import Positions
from penstock.spark.options import BAD_RECORD

_FOR_REPORTS: Final = (
    "queue string, offset bigint, id string, value binary, timestamp timestamp, protocol string"
)


class ExpectationFailed(PenstockError):
    """Rows that end a pipeline. Says which expectation they are against."""


@dataclass(frozen=True)
class Flow:
    """One query."""

    name: str
    root: str
    reads: frozenset[str]  # names of sources
    mode: str
    sinks: tuple[Sink, ...]
    checkpoint: str | None
    tells: bool  # of bad records, and of rows that are against expectations
    is_spark_s: bool = False  # its only sink is one of Spark's own

    def reader_of(self, pipeline: Pipeline, source: Source) -> str:
        """The name under which the broker keeps what is not read yet, and shows how far it is."""
        if not self.sinks:
            return f"{reader_of(pipeline, source)}.{BAD_RECORDS}"
        return reader_of(pipeline, source) + self.name.removeprefix(pipeline.name)


def reader_of(pipeline: Pipeline, source: Source) -> str:
    """The name of the first flow's reader."""
    alone = len(pipeline.sources) == 1
    return source.options.get("reader", pipeline.name if alone else f"{pipeline.name}.{source.name}")


def own_session(spark: SparkSession, pipeline: Pipeline) -> SparkSession:
    """A session with views and settings of the pipeline's own, in the same Spark."""
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "UTC")
    for name, value in pipeline.spark.items():
        if session.conf.isModifiable(name):
            session.conf.set(name, value)
    return session


# --- which there are ---------------------------------------------------------------------------------------


def streaming_graph(session: SparkSession, pipeline: Pipeline, flow: Flow | None = None) -> Graph:
    """The graph of streams, read as a flow does."""
    given = read_tables(session, pipeline)
    for source in pipeline.sources:
        frame = _read(session, source, flow.reader_of(pipeline, source) if flow is not None else None)
        if source.parse is not None:
            frame = good_records(parsed(frame, source.parse), source.parse)
        if source.watermark is not None:
            frame = frame.withWatermark(source.watermark.column, source.watermark.delay)
        given[source.name] = frame
    return Graph(session, pipeline).make(given)


def flows_of(session: SparkSession, pipeline: Pipeline, graph: Graph) -> list[Flow]:
    """The queries of a pipeline, in the order in which they begin."""
    found: list[Flow] = []
    for number, sink in enumerate(pipeline.sinks):
        origin = pipeline.origin(sink)
        root = graph.roots.get(origin)
        if root is None:
            why = f"{origin!r} reads no queue; a sink needs rows that come"
            raise StepFailed(pipeline.file, "sink", number, sink.name, why)
        is_spark_s = _is_spark_s(sink)
        same = [it for it in found if (it.root, it.mode) == (root, sink.mode) and not it.is_spark_s]
        if same and not is_spark_s:
            found[found.index(same[0])] = replace(same[0], sinks=(*same[0].sinks, sink))
            continue
        word = _word(root, sink)
        checkpoint = pipeline.checkpoint
        if checkpoint is not None and found:
            checkpoint = f"{checkpoint.rstrip('/')}/flows/{word}"
        name = f"{pipeline.name}.{word}" if found else pipeline.name
        reads = graph.reads[root]
        found.append(Flow(name, root, reads, sink.mode, (sink,), checkpoint, False, is_spark_s))
    _refuse_others_files(session, pipeline, found)
    tells: list[Flow] = []
    for root in dict.fromkeys(graph.roots.values()):
        if not _has_to_tell(pipeline, graph, root):
            continue
        apart = _apart(pipeline, root) if any(it.name == root for it in pipeline.sources) else None
        own = next((it for it in found if it.root == root and not it.is_spark_s), None)
        if own is not None and (
            apart is None or apart.checkpoint is None or not has_begun(session, apart.checkpoint)
        ):
            found[found.index(own)] = replace(own, tells=True)
        elif apart is not None:
            tells.append(apart)
        else:
            _refuse_untold(pipeline, graph, root)
    return [*tells, *found]


def _is_spark_s(sink: Sink) -> bool:
    return sink.format == CONSOLE or sink.format not in FORMATS


def _word(root: str, sink: Sink) -> str:
    """What a flow is called behind the first one, and its folder in the checkpoint."""
    return f"{root}.{sink.mode}".replace(" ", "-") + (f".{sink.name}" if _is_spark_s(sink) else "")


def others_read(session: SparkSession, pipeline: Pipeline) -> list[tuple[str | None, str, Positions]]:
    """Of the flows beside the first that have done something: which source it is, or None for all that it
    reads; how the names of its readers end; and where it goes on."""
    if pipeline.checkpoint is None:
        return []
    folder = pipeline.checkpoint.rstrip("/")
    views = [*(it.name for it in pipeline.sources), *pipeline.step_names]
    words = sorted({_word(view, sink) for view in views for sink in pipeline.sinks})
    found: list[tuple[str | None, str, Positions]] = [
        (None, f".{word}", has_read(session, f"{folder}/flows/{word}")) for word in words
    ]
    for source in pipeline.sources:
        read = has_read(session, f"{folder}/{BAD_RECORDS}/{source.name}")
        found.append((source.name, f".{BAD_RECORDS}", read))
    return [it for it in found if it[2]]


def _apart(pipeline: Pipeline, source: str) -> Flow:
    """The flow that reads a source only to tell."""
    checkpoint = pipeline.checkpoint
    if checkpoint is not None:
        checkpoint = f"{checkpoint.rstrip('/')}/{BAD_RECORDS}/{source}"
    return Flow(
        f"{pipeline.name}.{source}.{BAD_RECORDS}", source, frozenset({source}), "append", (), checkpoint, True
    )


def _has_to_tell(pipeline: Pipeline, graph: Graph, root: str) -> bool:
    reports = any(
        it.name == root and it.parse is not None and it.parse.on_bad_record == DEAD for it in pipeline.sources
    )
    return reports or any(graph.roots.get(it.of) == root for it in pipeline.expectations)


def _refuse_others_files(session: SparkSession, pipeline: Pipeline, flows: Iterable[Flow]) -> None:
    """Spark knows the batches of files by their numbers alone, and passes over those that it has."""
    for flow in flows:
        new = flow.checkpoint is not None and not has_begun(session, flow.checkpoint)
        for sink in flow.sinks if new else ():
            if sink.format in FORMATS and has_files(session, sink.options.get("path", "")):
                why = (
                    f"{sink.options['path']} has the batches of another checkpoint than {flow.checkpoint}; "
                    "Spark would take them for ours, which would be left out; take another path"
                )
                raise StepFailed(pipeline.file, "sink", pipeline.sinks.index(sink), sink.name, why)


def _refuse_untold(pipeline: Pipeline, graph: Graph, root: str) -> None:
    for number, expectation in enumerate(pipeline.expectations):
        if graph.roots.get(expectation.of) == root:
            why = (
                f"no sink is behind {root!r} but those of steps that keep state: nobody would count its rows"
            )
            raise StepFailed(pipeline.file, "expect", number, expectation.name, why)


def frame_of(session: SparkSession, pipeline: Pipeline, flow: Flow) -> DataFrame:
    """The rows of a flow: up to its root, or, where Spark writes them, up to the sink."""
    source = next((it for it in pipeline.sources if it.name == flow.root), None)
    if source is None or flow.is_spark_s:
        graph = streaming_graph(session, pipeline, flow)
        return graph.frames[pipeline.origin(flow.sinks[0])] if flow.is_spark_s else graph.raw[flow.root]
    only_reports = not flow.sinks and not pipeline.expectations
    frame = _read(session, source, flow.reader_of(pipeline, source), _FOR_REPORTS if only_reports else None)
    return parsed(frame, source.parse) if source.parse is not None else frame


def _read(session: SparkSession, source: Source, reader: str | None, schema: str | None = None) -> DataFrame:
    options = {**source.options, **({"reader": reader} if reader is not None else {})}
    if source.view == "messages":
        options["copies"] = "false"  # They are no rows, and are not counted.
    reading = session.readStream.format("penstock").options(**options)
    return (reading if schema is None else reading.schema(schema)).load()


# --- a batch -----------------------------------------------------------------------------------------------


class FlowWriter(Batchwise):
    """What a flow does with a batch."""

    def __init__(self, pipeline: Pipeline, flow: Flow, graph: Graph, teller: Teller) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._flow = flow
        self._only = {name for name in graph.frames if graph.roots.get(name, flow.root) == flow.root}
        self._source = next((it for it in pipeline.sources if it.name == flow.root), None)
        self._writers: list[tuple[Sink, SinkWriter]] = [
            (sink, writer_of(sink, pipeline.sources[0])) for sink in flow.sinks
        ]
        self._teller = teller
        self._keeps_state = self._source is None
        self._keeps_batch = self._keeps_state or flow.tells or len(flow.sinks) > 1  # read more than once
        self._is_first = True  # the only batch that may have been run before
        self._tables: dict[str, DataFrame] | None = None  # of the query's own session

    def write(self, frame: DataFrame, query_id: str, batch_id: int) -> None:
        key = f"spark/{query_id}/{batch_id}"
        if self._keeps_batch:
            frame = frame.persist()
        try:
            if self._keeps_state:
                # Once, whichever sinks have the batch already: the state moves on where its rows are made.
                frame.count()
            self._write(frame, query_id, batch_id, key)
        finally:
            if self._keeps_batch:
                frame.unpersist()

    def _write(self, frame: DataFrame, query_id: str, batch_id: int, key: str) -> None:
        flow, session = self._flow, frame.sparkSession
        if self._tables is None:
            self._tables = read_tables(session, self._pipeline)
        bad = 0
        if self._source is not None and self._source.parse is not None:
            bad = self._tell_bad(frame, self._source, key) if flow.tells else 0
            if flow.sinks or self._pipeline.expectations:
                frame = good_records(frame, self._source.parse)
        if not flow.sinks and not self._pipeline.expectations:
            self._teller.counted(bad_records=bad, query=flow.name, number=batch_id)
            return
        looked_at: list[tuple[Expectation, DataFrame]] = []
        graph = Graph(session, self._pipeline).make(
            {**self._tables, flow.root: frame}, self._only, lambda it, rows: looked_at.append((it, rows))
        )
        judged = {it.name: self._tell(it, rows, key) for it, rows in looked_at} if flow.tells else {}
        written: dict[str, int] = {}
        for sink, writer in self._writers:
            rows = graph.frames[self._pipeline.origin(sink)]
            count = writer.write(rows, query_id, batch_id)
            if not count and self._keeps_batch and self._is_first:
                count = rows.count()  # A run before this one has written it, and ended at another sink.
            written[sink.name or "sink"] = count
        self._is_first = False
        self._teller.counted(written, judged, bad, query=flow.name, number=batch_id)

    def _tell_bad(self, frame: DataFrame, source: Source, key: str) -> int:
        assert source.parse is not None
        if source.parse.on_bad_record != DEAD:
            return 0
        count = frame.where(is_bad(source.parse)).count()
        if count:
            letters = bad_records(frame, source.parse, self._pipeline.name)
            # As an earlier version did, which had no flow but this one for them.
            own = f"{key}/{BAD_RECORDS}" if self._flow.sinks else key
            send(letters, {"dead": BAD_RECORD, **broker_of(source)}, own)
        return count

    def _tell(self, expectation: Expectation, rows: DataFrame, key: str) -> Judged:
        """How many rows there are, and are against it. Whoever wants them told, or all to end, has it so."""
        against = is_against(expectation)
        ((checked, count),) = rows.agg(sql.count("*"), sql.count_if(against)).collect()
        rows = rows.where(against)
        if count and expectation.on_violation == FAIL:
            (first,) = rows.select(sql.to_json(sql.struct("*"))).head(1)
            raise ExpectationFailed(f"expectation {expectation.name}: {count} against it, as {first[0]}")
        if count and expectation.on_violation == DEAD:
            ours = [it for it in ("offset", "id", "timestamp") if it in rows.columns]
            row = sql.to_json(sql.struct(*(sql.col(f"`{it}`") for it in rows.columns)))
            whole = sql.octet_length(row) <= COPY_BYTES_MAX
            report = sql.struct(
                sql.lit(f"against expectation {expectation.name}: {expectation.sql}").alias("error"),
                sql.lit(self._pipeline.name).alias("pipeline"),
                *ours,
                sql.when(whole, row).otherwise(sql.left(row, sql.lit(COPY_BYTES_MAX // 4))).alias("value"),
                sql.when(~whole, sql.octet_length(row)).alias("value_bytes"),
            )
            letters = rows.select("queue", as_report(report).alias("value"))
            source = self._source or self._pipeline.sources[0]
            send(letters, {"dead": BAD_RECORD, **broker_of(source)}, f"{key}/expect/{expectation.name}")
        return Judged(checked, count)
