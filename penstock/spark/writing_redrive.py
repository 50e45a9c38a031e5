"""RedriveWriter: rows that name dead letters, which go back behind the tails of their queues as they are.

Where they go back with repaired payloads, `writing.py` does that. Tasks gather offsets and say them as
ranges; the driver hands the ranges to the broker when all tasks are done. A letter is not copied: it keeps
its offset, id and history.

Rules that always hold:
  * Nothing is redriven before every task has succeeded.
  * To redrive again changes nothing: a letter that is not dead any more stays as it is. Where the driver dies
    half-way, the same query run again finds those letters dead that are left, and redrives them.
  * Letters that somebody holds, and offsets at which there is no dead letter (any more), are passed over,
    with a line in the log that says how many.

How it fails: `WrongRow`, `Unreachable`, and the broker's own no. What was redriven stays redriven.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from penstock.model.ids import IDENTITY_DIGITS
from penstock.spark.api import Broker
from penstock.spark.options import OFFSET_MAX, WriteOptions, WrongOption
from penstock.spark.writing_columns import LETTERS, check_columns, refuse_overwrite
from penstock.spark.writing_stages import WrongRow, identities_of

RANGES_AT_ONCE: Final = 10_000
"""As many as the broker takes in one call."""

GATHERED_MAX: Final = 1_000_000
"""Offsets that a task keeps before it makes ranges of them."""

Numbers = Any  # a numpy array of int64; numpy's own types say less here than the names do

log = logging.getLogger("penstock.spark")


@dataclass(frozen=True)
class Named(WriterCommitMessage):
    """Letters that a task has named: of each queue ranges, first and end by turns, as bytes of int64.

    Before the name of a queue stands its identity, or as many blanks where nobody has said it.
    """

    ranges: Mapping[str, bytes]


class RedriveWriter(DataSourceArrowWriter):
    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise refuse_overwrite()
        if options.transaction_id is not None:
            raise WrongOption(
                "option 'transactionId' is for redriving with repaired payloads, the column value; without "
                "them, what is not dead any more is not redriven again"
            )
        check_columns(schema, LETTERS, options.queue)
        self._queue = options.queue
        self._broker = Broker(options.url, options.token, options.retry_seconds)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Named:
        gathered: dict[str, _Gathered] = {}
        for batch in iterator:
            for queue, offsets in self._by_queue(batch):
                gathered.setdefault(queue, _Gathered()).add(offsets)
        return Named({queue: it.ranges().tobytes() for queue, it in gathered.items()})

    def _by_queue(self, batch: pa.RecordBatch) -> Iterator[tuple[str, Numbers]]:
        offsets = _offsets(batch.column("offset"))
        count = batch.num_rows
        queue = batch.column("queue") if self._queue is None else pa.repeat(self._queue, count)
        has_ids = "id" in batch.schema.names
        identities = identities_of(batch.column("id")) if has_ids else pa.repeat(" " * IDENTITY_DIGITS, count)
        if queue.null_count:
            raise WrongRow("column 'queue' is null in a row: name the queue of every dead letter")
        named = pc.binary_join_element_wise(identities, queue.cast(pa.string()), "").dictionary_encode()
        which = named.indices.to_numpy()
        for number, name in enumerate(named.dictionary.to_pylist()):
            yield name, offsets[which == number]

    def commit(self, messages: "Sequence[WriterCommitMessage | None]") -> None:
        by_queue: dict[str, list[Numbers]] = {}
        for message in messages:
            if isinstance(message, Named):
                for queue, ranges in message.ranges.items():
                    by_queue.setdefault(queue, []).append(np.frombuffer(ranges, np.int64).reshape(-1, 2))
        with closing(self._broker):
            for queue, parts in by_queue.items():
                self._redrive(queue, merged(np.concatenate(parts)))

    def _redrive(self, queue: str, ranges: Numbers) -> None:
        redriven = 0
        identity, queue = queue[:IDENTITY_DIGITS].strip(), queue[IDENTITY_DIGITS:]
        for at in range(0, len(ranges), RANGES_AT_ONCE):
            wish: dict[str, Any] = {"ranges": ranges[at : at + RANGES_AT_ONCE].tolist()}
            if identity:
                wish["identity"] = identity
            redriven += self._broker.post("queues", queue, "redrive", fields=wish)["redriven"]
        named = int((ranges[:, 1] - ranges[:, 0]).sum())
        if redriven < named:
            log.warning(
                "queue %r: %d letters were named; %d are redriven, which were dead and in nobody's hands",
                queue,
                named,
                redriven,
            )

    def abort(self, messages: "Sequence[WriterCommitMessage | None]") -> None:
        """There is nothing to undo: nothing is done before the commit."""


class _Gathered:
    """Offsets of one queue."""

    def __init__(self) -> None:
        self._ranges = np.empty((0, 2), np.int64)
        self._new: list[Numbers] = []
        self._new_count = 0

    def add(self, offsets: Numbers) -> None:
        self._new.append(np.stack((offsets, offsets + 1), axis=1))
        self._new_count += len(offsets)
        if self._new_count >= GATHERED_MAX:
            self.ranges()

    def ranges(self) -> Numbers:
        """All of them as ranges, in order."""
        self._ranges = merged(np.concatenate((self._ranges, *self._new)))
        self._new, self._new_count = [], 0
        return self._ranges


def merged(ranges: Numbers) -> Numbers:
    """The same offsets as ranges in order that do not touch."""
    if not len(ranges):
        return ranges
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    ends = np.maximum.accumulate(ranges[:, 1])
    begins = np.ones(len(ranges), bool)
    begins[1:] = ranges[1:, 0] > ends[:-1]
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(ranges)) - 1
    return np.stack((ranges[first, 0], ends[last]), axis=1)


def _offsets(column: pa.Array) -> Numbers:
    if column.null_count:
        raise WrongRow("column 'offset' is null in a row: every row names a dead letter")
    offsets = column.to_numpy().astype(np.int64)
    wrong = offsets[(offsets < 0) | (offsets >= OFFSET_MAX)]
    if len(wrong):
        raise WrongRow(f"column 'offset' is {wrong[0]} in a row: there is no such offset")
    return offsets
