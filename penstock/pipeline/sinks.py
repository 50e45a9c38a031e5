"""Sinks: where the rows of a pipeline go, and how often.

Files, the console and every format that is not ours are Spark's own sinks. A queue is the sink of the data
source `penstock`. A Delta table is written a batch at a time (`batchwise.py`), and so is a queue that is told
what has changed.

Exactly once, because of: files, Spark's own list of those that count; queues, the broker's transactions;
Delta tables, their transaction ids. Of other formats Spark's documentation tells.
"""

from importlib.util import find_spec
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from penstock.errors import PenstockError
from penstock.pipeline.batchwise import Batchwise, DeltaSink, QueueSink
from penstock.pipeline.formats import APPEND, DELTA, PENSTOCK
from penstock.pipeline.model import Pipeline, Sink, Source


class NotInstalled(PenstockError):
    """A package is missing. Says how to get it."""


def check_installed(sink: Sink) -> None:
    """Whether there is what a sink needs beside Spark."""
    if sink.format == DELTA and find_spec("deltalake") is None:
        raise NotInstalled("deltalake, which writes Delta tables, is not installed; pip install deltalake")


def start_sink(frame: DataFrame, pipeline: Pipeline, *, once: bool) -> StreamingQuery:
    """The query of a pipeline, which runs from now on."""
    sink = pipeline.sink
    writing = frame.writeStream.outputMode(sink.mode)
    if pipeline.checkpoint is not None:
        writing = writing.option("checkpointLocation", pipeline.checkpoint)
    options = dict(sink.options)
    if sink.format == PENSTOCK:
        options = {**broker_of(pipeline.sources[0]), **options}
    batchwise: Batchwise | None = None
    if sink.format == DELTA:
        batchwise = DeltaSink(sink)
    elif sink.format == PENSTOCK and sink.mode != APPEND:
        batchwise = QueueSink(options)
    if batchwise is not None:
        query = start(writing.foreachBatch(batchwise), pipeline.name, pipeline.interval, once=once)
        batchwise.is_of(query)
        return query
    if sink.partition_by:
        writing = writing.partitionBy(*sink.partition_by)
    writing = writing.format(sink.format).options(**options)
    return start(writing, pipeline.name, pipeline.interval, once=once)


def broker_of(source: Source) -> dict[str, str]:
    """Where a source is: its dead letters go there, and so do messages, unless their sink says otherwise."""
    names = ("url", "token", "retrySeconds")
    return {name: source.options[name] for name in names if name in source.options}


def start(writing: DataStreamWriter, name: str, interval: str | None, *, once: bool) -> StreamingQuery:
    trigger: dict[str, Any] = {}
    if once:
        trigger["availableNow"] = True
    elif interval is not None:
        trigger["processingTime"] = interval
    return (writing.trigger(**trigger) if trigger else writing).queryName(name).start()
