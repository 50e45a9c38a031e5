"""Batchwise: sinks that write a batch at a time, and know each batch again when it is run again.

Spark runs a batch again where its driver died before it had written down that the batch was done. What stays
the same is the id of the query, which its checkpoint keeps, and the number of the batch.

    DeltaSink    a Delta table remembers with every commit which batch of which query it was; one that is
                 there already is passed over. Rows and id are one commit
    QueueSink    the broker stores the messages of a key once

The rows of a batch for a Delta table are gathered on the driver: `maxOffsetsPerTrigger` keeps that small.
"""

import threading
from abc import ABC, abstractmethod
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from penstock.errors import PenstockError
from penstock.pipeline.formats import COMPLETE, PENSTOCK
from penstock.pipeline.model import Sink

KNOWN_SECONDS: Final = 60.0
"""The id of a query is known when its start has returned, which may be after its first batch has begun."""


class NoIdentity(PenstockError):
    """A batch that nobody could know again."""


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


class DeltaSink(Batchwise):
    """A Delta table, by the package `deltalake`."""

    def __init__(self, sink: Sink) -> None:
        super().__init__()
        self._path = sink.options["path"]
        self._anew = sink.mode == COMPLETE
        self._partition_by = list(sink.partition_by)
        self._merges = sink.options.get("mergeSchema", "false").lower() == "true"

    def write(self, frame: DataFrame, query_id: str, batch_id: int) -> None:
        from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

        writer = f"penstock/{query_id}"
        there = DeltaTable.is_deltatable(self._path)
        if there:
            written = DeltaTable(self._path).transaction_version(writer)
            if written is not None and written >= batch_id:
                return
        rows = frame.toArrow()
        if there and not rows.num_rows and not self._anew:
            return
        write_deltalake(
            self._path,
            rows,
            mode="overwrite" if self._anew else "append",
            partition_by=self._partition_by or None,
            schema_mode="merge" if self._merges and there else None,
            commit_properties=CommitProperties(app_transactions=[Transaction(writer, batch_id)]),
        )


class QueueSink(Batchwise):
    """A queue, for results that change: Spark's own way to a sink of ours only knows rows that are added."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__()
        self._options = options

    def write(self, frame: DataFrame, query_id: str, batch_id: int) -> None:
        key = f"spark/{query_id}/{batch_id}"
        frame.write.format(PENSTOCK).mode("append").options(**self._options, transactionId=key).save()
