"""Sinks: how the query of a flow is started, and what it needs to be there.

Exactly once, because of: files, Spark's own list of those that count; queues, the broker's transactions;
Delta tables, their transaction ids (`batchwise.py`). Of other formats Spark's documentation tells.
"""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from penstock.errors import PenstockError
from penstock.pipeline.batchwise import Batchwise
from penstock.pipeline.flows import Flow
from penstock.pipeline.formats import DELTA
from penstock.pipeline.model import Pipeline


class NotInstalled(PenstockError):
    """A package is missing. Says how to get it."""


def check_installed(pipeline: Pipeline) -> None:
    """Whether there is what sinks and tables need beside Spark."""
    formats: Iterable[str] = [*(it.format for it in pipeline.sinks), *(it.format for it in pipeline.tables)]
    if DELTA in formats and find_spec("deltalake") is None:
        raise NotInstalled("deltalake, which writes Delta tables, is not installed; pip install deltalake")


def start_flow(
    frame: DataFrame, flow: Flow, writer: Batchwise, interval: str | None, *, once: bool
) -> StreamingQuery:
    """The query of a flow, which runs from now on."""
    writing = frame.writeStream.outputMode(flow.mode).queryName(flow.name)
    if flow.checkpoint is not None:
        writing = writing.option("checkpointLocation", flow.checkpoint)
    trigger: dict[str, Any] = {}
    if once:
        trigger["availableNow"] = True
    elif interval is not None:
        trigger["processingTime"] = interval
    if trigger:
        writing = writing.trigger(**trigger)
    if flow.is_spark_s:
        (sink,) = flow.sinks
        if sink.partition_by:
            writing = writing.partitionBy(*sink.partition_by)
        return writing.format(sink.format).options(**sink.options).start()
    query = writing.foreachBatch(writer).start()
    writer.is_of(query)
    return query
