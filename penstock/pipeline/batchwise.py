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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from penstock.errors import PenstockError
from penstock.pipeline.formats import COMPLETE, PENSTOCK
from penstock.pipeline.model import Sink

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

KNOWN_SECONDS: Final = 60.0
"""The id of a query is known when its start has returned, which may be after its first batch has begun."""


class NoIdentity(PenstockError):
    """A batch that nobody could know again."""


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
        table = DeltaTable(self._path) if there else None
        if table is not None:
            written = table.transaction_version(writer)
            if written is not None and written >= batch_id:
                return
        rows = frame.toArrow()
        if there and not rows.num_rows and not self._anew:
            return
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


class QueueSink(Batchwise):
    """A queue, for results that change: Spark's own way to a sink of ours only knows rows that are added."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__()
        self._options = options

    def write(self, frame: DataFrame, query_id: str, batch_id: int) -> None:
        key = f"spark/{query_id}/{batch_id}"
        frame.write.format(PENSTOCK).mode("append").options(**self._options, transactionId=key).save()
