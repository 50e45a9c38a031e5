"""Plan: the queries of a pipeline, made of its sources, steps and sink.

There is the query that the pipeline is, and beside it one for every source whose bad records go to dead
letters. They are queries of their own because the rest of the pipeline may join and count, and then nothing
is left to tell of a single record. Each has a checkpoint of its own, and is exactly once by itself: to run a
batch of one again says nothing twice at the other.

    main           CHECKPOINT
    bad records    CHECKPOINT/bad-records/SOURCE

Rules that always hold:
  * Views live in a session of the pipeline's own.
  * A query of bad records reads all that the main one reads, or more: it begins first, or where that goes on.
"""

from dataclasses import replace
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from penstock.pipeline.beginnings import beginning
from penstock.pipeline.model import DEAD, INPUT, Pipeline, Source
from penstock.pipeline.parsing import bad_records, dead_letter_options, good_records, without_copies
from penstock.pipeline.sinks import broker_of
from penstock.pipeline.steps import Views, run_steps

BAD_RECORDS: Final = "bad-records"
BAD_COUNT: Final = "count"
_FOR_REPORTS: Final = (
    "queue string, offset bigint, id string, value binary, timestamp timestamp, protocol string"
)


def own_session(spark: SparkSession, pipeline: Pipeline) -> SparkSession:
    """A session with views and settings of the pipeline's own, in the same Spark."""
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "UTC")
    for name, value in pipeline.spark.items():
        if session.conf.isModifiable(name):
            session.conf.set(name, value)
    return session


def main_frame(session: SparkSession, pipeline: Pipeline) -> DataFrame:
    """The rows that go to the sink."""
    views = Views(session)
    alone = len(pipeline.sources) == 1
    for source in pipeline.sources:
        frame = _read(session, source, reader_of(pipeline, source))
        if source.parse is not None:
            frame = good_records(frame, source.parse)
        if source.watermark is not None:
            frame = frame.withWatermark(source.watermark.column, source.watermark.delay)
        views.put(frame, source.name, INPUT if alone else None)
    return run_steps(views, pipeline)


def reported(pipeline: Pipeline) -> list[Source]:
    """The sources whose bad records go to dead letters."""
    return [
        source
        for source in pipeline.sources
        if source.parse is not None and source.parse.on_bad_record == DEAD
    ]


def bad_frame(session: SparkSession, pipeline: Pipeline, source: Source) -> DataFrame:
    """The dead letters of a source; how many there are is told as the metric of its query."""
    assert source.parse is not None
    assert pipeline.checkpoint is not None, "a file without one was refused"
    reader = f"{reader_of(pipeline, source)}.{BAD_RECORDS}"
    begins = beginning(session, source, bad_checkpoint(pipeline, source), pipeline.checkpoint)
    read = _read(session, replace(source, options={**source.options, **begins}), reader, _FOR_REPORTS)
    frame = bad_records(read, source.parse, pipeline.name)
    return frame.observe(BAD_RECORDS, sql.count(sql.lit(1)).alias(BAD_COUNT))


def bad_options(source: Source) -> dict[str, str]:
    """Where dead letters of a source go: to the broker that it reads."""
    return {**dead_letter_options(), **broker_of(source)}


def bad_checkpoint(pipeline: Pipeline, source: Source) -> str:
    assert pipeline.checkpoint is not None, "a file without one was refused"
    return f"{pipeline.checkpoint.rstrip('/')}/{BAD_RECORDS}/{source.name}"


def _read(session: SparkSession, source: Source, reader: str, schema: str | None = None) -> DataFrame:
    reading = session.readStream.format("penstock").options(**{**source.options, "reader": reader})
    frame = (reading if schema is None else reading.schema(schema)).load()
    return without_copies(frame) if source.view == "messages" else frame


def reader_of(pipeline: Pipeline, source: Source) -> str:
    """The name under which the broker keeps what is not read yet, and shows how far it is."""
    alone = len(pipeline.sources) == 1
    return source.options.get("reader", pipeline.name if alone else f"{pipeline.name}.{source.name}")
