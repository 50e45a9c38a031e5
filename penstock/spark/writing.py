"""Writing: the sink. Tasks stage their rows at the broker, the driver commits what counts, once.

Spark runs a task again when it fails, runs two at a time when one is slow, and runs a whole batch again when
its driver dies before it has written down that the batch is done. What makes each row one message all the
same is who names what:

    write     every try of a task stages its rows under the transaction's key, and says which stages are its
    commit    Spark hands over what one try of each task has said: these stages are stored, in one step
    abort     what was staged goes away; what was committed stays

The key of a stream's batch is the query's id and the batch's number, which its checkpoint keeps: a batch that
is run again, by whichever process, has the same key, and the broker stores a key once. A batch write has the
option `transactionId`, or a key that the driver makes up for this one write.

With the option `redrive`, rows are no new messages but repaired payloads of dead letters, which go back into
their queues under their ids: all else is the same.

Rules that always hold:
  * Nothing of a row is looked at here: columns go to the broker as Arrow, as they came.
  * What cannot be written is refused on the driver, before a task runs.
  * Where there are no rows there is no transaction.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from penstock.errors import PenstockError
from penstock.spark.api import Broker
from penstock.spark.options import WriteOptions
from penstock.spark.writing_columns import check_columns, columns_for, refuse_overwrite
from penstock.spark.writing_stages import Stager
from penstock.spark.writing_transaction import Transaction

if TYPE_CHECKING:
    import pyarrow as pa

QUERY_ID: Final = "sql.streaming.queryId"
BATCH_ID: Final = "streaming.sql.batchId"
"""Local properties by which Spark tells a task of which batch it is."""


class NoIdentity(PenstockError):
    """A task of a stream that does not know of which batch it is."""


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """What one try of a task has staged."""

    key: str
    stages: tuple[str, ...]


class _Sink:
    """What batches and streams have in common."""

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise refuse_overwrite()
        check_columns(schema, columns_for(options), options.queue)
        self._queue = options.queue
        self._dead = options.dead
        self._redrive = options.redrive
        self._broker = Broker(options.url, options.token, options.retry_seconds)

    def _stage(self, key: str, batches: "Iterator[pa.RecordBatch]") -> Staged:
        with closing(self._broker):
            stager = Stager(Transaction(self._broker, key, self._dead, self._redrive), self._queue)
            return Staged(key, stager.stage(batches))

    def _commit(self, messages: "Sequence[WriterCommitMessage | None]", again: str) -> None:
        staged = _staged(messages)
        stages = [stage for message in staged for stage in message.stages]
        if stages:
            with closing(self._broker):
                Transaction(self._broker, staged[0].key).commit(stages, again)

    def _abort(self, key: str) -> None:
        with closing(self._broker.in_haste()) as broker:
            Transaction(broker, key).abort()


class BatchWriter(_Sink, DataSourceArrowWriter):
    """A batch. Made once, on the driver, and pickled for everybody else: all have the same key."""

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite)
        self._key = options.transaction_id or f"spark/{uuid4()}"

    def write(self, iterator: "Iterator[pa.RecordBatch]") -> Staged:
        return self._stage(self._key, iterator)

    def commit(self, messages: "Sequence[WriterCommitMessage | None]") -> None:
        self._commit(
            messages, f"write the same rows again with the option transactionId {self._key!r}, and they are"
        )

    def abort(self, messages: "Sequence[WriterCommitMessage | None]") -> None:
        self._abort(self._key)


class StreamWriter(_Sink, DataSourceStreamArrowWriter):
    """A stream. Spark makes one anew wherever it needs one, so that it remembers nothing.

    The names of arguments are Spark's.
    """

    def write(self, iterator: "Iterator[pa.RecordBatch]") -> Staged:
        return self._stage(_key_of_batch(), iterator)

    def commit(self, messages: "Sequence[WriterCommitMessage | None]", batchId: int) -> None:
        self._commit(messages, "start the query again: it repeats the batch, whose rows are then")

    def abort(self, messages: "Sequence[WriterCommitMessage | None]", batchId: int) -> None:
        # Where no task has said anything, nobody here knows the query. The broker tidies up by itself.
        for message in _staged(messages)[:1]:
            self._abort(message.key)


def _staged(messages: "Sequence[WriterCommitMessage | None]") -> list[Staged]:
    """What the tasks have said, in their order, without those that have failed."""
    return [message for message in messages if isinstance(message, Staged)]


def _key_of_batch() -> str:
    task = TaskContext.get()
    query = task.getLocalProperty(QUERY_ID) if task is not None else None
    batch = task.getLocalProperty(BATCH_ID) if task is not None else None
    if query is None or batch is None:
        raise NoIdentity(
            "a stream's task does not know its query and its batch, by which the broker would recognise what "
            "is written again; write with foreachBatch, a batch at a time, with the option transactionId"
        )
    return f"spark/{query}/{batch}"
