"""The view `state`: every message that is not gone, with how it stands, as Arrow batches.

The first process tells how messages stand in runs, a part at a time; the log has the messages. Where a part
of the runs lies is read block by block, and a few numpy calls per group of blocks pick the living rows and
give each what its run says. Nothing here runs once per message, but for those with repaired payloads.

Rules that always hold:
  * A message is shown once, as it stood when its part was asked for; parts are asked for in the order of
    offsets. One that was settled, and removed by retention, since then is left out.
  * Blocks without a living message are not read.
  * What a run does not change (`AS_STORED`) is what the message's block says.

Needs the extra that brings pyarrow and numpy.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from penstock.http.reading.looking import STATE_WORDS, Runs, payloads_at
from penstock.log.arrow import (
    ROWS_MAX,
    TIMESTAMP,
    Constants,
    MessageGroup,
    batch_of,
    expiries,
    groups_of,
    ids_of,
    nullable,
    plain,
    schema_of,
)
from penstock.log.read_block import Block
from penstock.log.reader import LogReader, OffsetsMissing
from penstock.model.life import Reason, State
from penstock.model.pending import AS_STORED

JOIN_ROWS: Final = 4096
JOIN_BYTES: Final = 256 * 1024
"""Batches that have less of both are joined with their neighbours."""

_OF_BODIES: Final = frozenset({"expires", "retries", "value"})
_STATE_LABELS: Final = [STATE_WORDS.get(state) for state in State]
_REASON_LABELS: Final = [reason.label or None for reason in Reason]
_DTYPES: Final = {"q": np.int64, "i": np.int32, "B": np.uint8}

Ask = Callable[[int], Runs]
"""The runs from an offset on, and how far they go."""

Numbers = Any  # a numpy array


def state_batches(
    reader: LogReader,
    queue: str,
    start: int,
    end: int,
    ask: Ask,
    *,
    columns: Sequence[str] | None = None,
    fail_on_loss: bool = True,
) -> Iterator[pa.RecordBatch]:
    """The messages from offset `start` to `end` that are ready, held or dead."""
    schema = schema_of("state", columns)
    return _joined(_batches(reader, queue, start, end, ask, schema, fail_on_loss))


def _batches(
    reader: LogReader, queue: str, start: int, end: int, ask: Ask, schema: pa.Schema, fail_on_loss: bool
) -> Iterator[pa.RecordBatch]:
    constants = Constants(queue)
    headers_only = not _OF_BODIES.intersection(schema.names)
    while start < end:
        runs = ask(start)
        start = runs.offset_end
        if not runs.count:
            continue
        living = _Living(runs)
        repaired = _Repaired(reader, queue, runs)
        blocks = living_blocks(reader, queue, living, headers_only=headers_only, fail_on_loss=fail_on_loss)
        for group in groups_of(blocks, constants, ROWS_MAX):
            rows = _Rows(group, living, repaired)
            if rows.count:
                yield batch_of(rows, schema)


def _joined(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Where few messages of each block are alive, batches are small, and cost more than what is in them."""
    small: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        is_small = batch.num_rows < JOIN_ROWS and batch.nbytes < JOIN_BYTES
        if small and (not is_small or rows >= JOIN_ROWS or size >= JOIN_BYTES):
            yield from _one_batch(small)
            small, rows, size = [], 0, 0
        if is_small:
            small.append(batch)
            rows += batch.num_rows
            size += batch.nbytes
        else:
            yield batch
    if small:
        yield from _one_batch(small)


def _one_batch(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from pa.Table.from_batches(batches).combine_chunks().to_batches()


class _Living:
    """Some runs, as numpy columns."""

    def __init__(self, runs: Runs) -> None:
        columns = {
            name: np.frombuffer(runs.columns[name], _DTYPES[typecode]) for name, typecode in Runs.COLUMNS
        }
        self.first: Numbers = columns["first"]
        self.end: Numbers = columns["end"]
        self.expires_us: Numbers = columns["expires_us"]
        self.attempts: Numbers = columns["attempts"]
        self.retries: Numbers = columns["retries"]
        self.consumer: Numbers = columns["consumer"]
        self.state: Numbers = columns["state"]
        self.reason: Numbers = columns["reason"]
        self.consumers = runs.consumers
        self.steps = runs.steps

    def offset_from(self, offset: int) -> int | None:
        """The first living offset at or behind one."""
        row = int(np.searchsorted(self.end, offset, "right"))
        return max(offset, int(self.first[row])) if row < len(self.first) else None


def living_blocks(
    reader: LogReader, queue: str, living: _Living, *, headers_only: bool, fail_on_loss: bool
) -> Iterator[Block]:
    """The blocks that have living messages; of each, from the first living one to the end of the runs."""
    end = int(living.end[-1])
    at = living.offset_from(0)
    while at is not None:
        try:
            for block in reader.messages(
                queue, at, end, fail_on_loss=fail_on_loss, headers_only=headers_only
            ):
                yield block
                behind = block.header.first_offset + block.hi
                at = living.offset_from(behind)
                if at != behind:
                    break
            else:
                return
        except OffsetsMissing as missing:
            known = reader.queue(queue)
            if known is None or missing.first >= known.offset_start:
                raise
            # It has been settled and removed since the runs were told.
            kept = reader.kept_from(queue, missing.first)
            at = living.offset_from(kept) if kept is not None else None


class _Rows:
    """The living messages of a group of blocks. Each method builds the column that it is named after."""

    def __init__(self, group: MessageGroup, living: _Living, repaired: "_Repaired") -> None:
        offsets = group.offsets()
        run = np.searchsorted(living.first, offsets, "right") - 1
        alive = (run >= 0) & (offsets < living.end[run])
        self._group = group
        self._living = living
        self._repaired = repaired
        self._constants = group.constants
        self._picked: Numbers = None if alive.all() else np.flatnonzero(alive)  # None: all of them
        self._offsets = self._pick(offsets)
        self._run = self._pick(run)
        self.count = len(self._offsets)

    def _pick(self, values: Numbers) -> Numbers:
        return values if self._picked is None else values[self._picked]

    def _labels(self, labels: Sequence[str | None], numbers: Numbers) -> pa.Array:
        first = int(numbers[0])
        if (numbers == first).all():
            label = labels[first]
            if label is None:
                return self._constants.nulls(pa.string(), self.count)
            return self._constants.text(label, self.count)
        return pa.array(labels, pa.string()).take(pa.array(numbers))

    def queue(self) -> pa.Array:
        return self._constants.text(self._constants.queue, self.count)

    def offset(self) -> pa.Array:
        return plain(pa.int64(), self._offsets)

    def id(self) -> pa.Array:
        if self._picked is None:
            return self._group.id()
        origins, which = self._group.origins()
        ids = ids_of(origins, self._pick(which), self._offsets)
        bounds = self._constants.id_bounds(self.count)
        return pa.Array.from_buffers(pa.string(), self.count, [None, bounds, pa.py_buffer(ids)])

    def state(self) -> pa.Array:
        return self._labels(_STATE_LABELS, self._living.state[self._run])

    def attempts(self) -> pa.Array:
        return plain(pa.int32(), self._living.attempts[self._run])

    def reason(self) -> pa.Array:
        return self._labels(_REASON_LABELS, self._living.reason[self._run])

    def consumer(self) -> pa.Array:
        # Nobody is -1, which is made the first of the names.
        return self._labels([None, *self._living.consumers], self._living.consumer[self._run] + 1)

    def timestamp(self) -> pa.Array:
        return plain(TIMESTAMP, self._pick(self._group.times_us()))

    def expires(self) -> pa.Array:
        told = self._living.expires_us[self._run]
        values = np.where(told == AS_STORED, self._pick(self._group.expires_us()), told)
        for tail, by_us in self._living.steps:
            values = np.where((values > 0) & (self._offsets < tail), values + by_us, values)
        return expiries(values)

    def retries(self) -> pa.Array:
        told = self._living.retries[self._run]
        values = np.where(told == AS_STORED, self._pick(self._group.retry_counts()), told)
        return nullable(pa.int32(), values.astype(np.int32), values >= 0)

    def value(self) -> pa.Array:
        values = self._group.value()
        picked = values if self._picked is None else values.take(pa.array(self._picked))
        return self._repaired.instead_of(picked, self._offsets)


class _Repaired:
    """Where the messages of some runs have repaired payloads, and these."""

    def __init__(self, reader: LogReader, queue: str, runs: Runs) -> None:
        self._reader = reader
        self._queue = queue
        self._first, self._end, self._distance = (np.frombuffer(it, np.int64) for it in runs.repairs)

    def instead_of(self, values: pa.Array, offsets: Numbers) -> pa.Array:
        """The values of messages at these offsets, with the repaired ones in their places.

        One that has been let go of since the runs were told is null: so has its message.
        """
        row: Numbers = np.searchsorted(self._first, offsets, "right") - 1
        hit: Numbers = row >= 0
        hit[hit] = offsets[hit] < self._end[row[hit]]
        if not hit.any():
            return values
        places = offsets[hit] + self._distance[row[hit]]
        payloads = payloads_at(self._reader, self._queue, places.tolist())
        repaired = pa.array([payloads.get(place) for place in places.tolist()], pa.binary())
        order = np.arange(len(values))
        order[hit] = len(values) + np.arange(len(places))
        return pa.concat_arrays([values, repaired]).take(pa.array(order))
