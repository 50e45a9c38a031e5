"""Stager: the rows of one task to stages, as they come from Spark.

Batches are put together, or cut, into pieces of about `PIECE_BYTES`, and each piece is one Arrow stream and
one stage. What is done per row is done by Arrow.

Rules that always hold:
  * Stages are in the order of the rows.
  * A piece that is too large for this broker is cut in halves, and so are those behind it from the beginning:
    only a row that is too large by itself cannot be written.

Where repairs say by ids which letters they are for, the queues are looked at when everything is staged:
a stage is for the queue that was there then, so that one which is still there is the one that was meant.

How it fails: `WrongRow`, and whatever `Transaction.stage` raises.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import PenstockError
from penstock.model.ids import ID_DIGITS, IDENTITY_DIGITS
from penstock.spark.api import Refused
from penstock.spark.writing_transaction import Transaction

PIECE_BYTES: Final = 8 << 20
"""Half of what a broker takes by default in one body (`body-bytes-max`)."""

Piece = list[pa.RecordBatch]


class WrongRow(PenstockError):
    """A row that cannot be a message."""


class Stager:
    def __init__(self, transaction: Transaction, queue: str | None, piece_bytes: int = PIECE_BYTES) -> None:
        self._transaction = transaction
        self._queue = queue
        self._piece_bytes = piece_bytes
        self._stages: list[str] = []
        self._named: set[tuple[str, str]] = set()  # queues, and who they are by the ids of their letters

    def stage(self, batches: Iterable[pa.RecordBatch]) -> tuple[str, ...]:
        """Stage all of these; the ids of the stages."""
        self._stages = []
        piece: Piece = []
        gathered = 0
        for batch in batches:
            for part in _cut(self._columns(batch), self._piece_bytes):
                part_bytes = _bytes_of(part)
                if piece and gathered + part_bytes > self._piece_bytes:
                    self._stage(piece)
                    piece, gathered = [], 0
                piece.append(part)
                gathered += part_bytes
        if piece:
            self._stage(piece)
        for queue, identity in sorted(self._named):
            self._transaction.check_queue(queue, identity)
        return tuple(self._stages)

    def _columns(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """What is sent of a batch."""
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        if self._queue is not None:
            columns.pop("queue", None)  # the option goes before, as that of Spark's Kafka connector does
        for name, why in _NEVER_NULL.items():
            if name in columns and columns[name].null_count:
                raise WrongRow(f"column {name!r} is null in a row: {why}")
        ids = columns.pop("id", None)
        if ids is not None:
            queues = columns["queue"] if self._queue is None else pa.repeat(self._queue, batch.num_rows)
            named = pa.table({"queue": queues, "identity": identities_of(ids)})
            rows = named.group_by(["queue", "identity"]).aggregate([]).to_pylist()
            self._named.update((row["queue"], row["identity"]) for row in rows)
        # A text is bytes to a queue; nothing is copied by this.
        if pa.types.is_string(columns["value"].type):
            columns["value"] = columns["value"].cast(pa.binary())
        elif pa.types.is_large_string(columns["value"].type):
            columns["value"] = columns["value"].cast(pa.large_binary())
        return pa.record_batch(columns)

    def _stage(self, piece: Piece) -> None:
        try:
            self._stages.append(self._transaction.stage(_encoded(piece), self._queue))
        except Refused as error:
            if error.name != "body-too-large":
                raise
            if sum(part.num_rows for part in piece) == 1:
                raise WrongRow(f"a row of {piece[0].nbytes} bytes is too large: {error}") from None
            self._piece_bytes = sum(map(_bytes_of, piece)) // 2
            for part in piece:
                for half in _cut(part, self._piece_bytes):
                    self._stage([half])


_NEVER_NULL: Final = {
    "value": "every row is a message; leave such rows out, or write an empty value",
    "queue": "every message has one; name it, or give one for all with the option queue",
    "offset": "every row names a dead letter",
}


def identities_of(ids: pa.Array) -> pa.Array:
    """Of which queues the messages with these ids are."""
    if ids.null_count or pc.any(pc.not_equal(pc.utf8_length(ids), ID_DIGITS)).as_py():
        raise WrongRow(
            f"column 'id' is no id in a row: it has {ID_DIGITS} digits, as the view state shows it"
        )
    return pc.utf8_slice_codeunits(ids, 0, IDENTITY_DIGITS).cast(pa.string())


def _bytes_of(batch: pa.RecordBatch) -> int:
    return int(pa.ipc.get_record_batch_size(batch))


def _cut(batch: pa.RecordBatch, bytes_max: int) -> Iterator[pa.RecordBatch]:
    """The rows of a batch in parts that are not larger than that, or have one row."""
    if not batch.num_rows:
        return
    if batch.num_rows == 1 or _bytes_of(batch) <= bytes_max:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _cut(batch.slice(0, half), bytes_max)
    yield from _cut(batch.slice(half), bytes_max)


def _encoded(piece: Piece) -> memoryview:
    """A piece as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, piece[0].schema) as stream:
        for part in piece:
            stream.write_batch(part)
    return memoryview(sink.getvalue())
