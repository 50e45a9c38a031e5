"""Staging: stages on their way into the log, one after the other, a piece at a time.

A stage may have a gigabyte. Everybody else's messages go on meanwhile: in one group there is about
`LogSettings.stage_group_bytes` of stages, and the next piece follows when that is synced: whatever is written
and not synced, the next one who needs a sync would wait for. The rows of a stage follow upon each other, so
that there is one at a time; those behind it wait with their messages in memory.
"""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

from penstock.log.columns import check_batch, join_batches, split_columns, stored_bytes
from penstock.log.committer import Committer
from penstock.log.errors import LogFailed, LogRefused, StagesFull
from penstock.log.repairs import STAGE_QUEUE
from penstock.log.results import StageInfo, StageReceipt
from penstock.log.sealer import Sealer
from penstock.log.stages import STAGES_MAX, Stage, StagePart
from penstock.log.state import LogState
from penstock.log.views import check_new_queue
from penstock.model.batch import Batch
from penstock.model.ids import id_of
from penstock.model.timers import SECOND_US

PIECE_MESSAGES: Final = 20_000


class _Job:
    """A stage, as far as it is written."""

    __slots__ = ("left_bytes", "pieces", "receipt", "stage")

    def __init__(self, stage: Stage, pieces: Iterator[tuple[int, Batch]], receipt: StageReceipt) -> None:
        self.stage = stage  # without an id, and rows that are not known yet are -1
        self.pieces = pieces  # messages for one of the parts
        self.receipt = receipt
        self.left_bytes = stage.info.stored_bytes  # of what is not written yet


class Staging:
    def __init__(self, state: LogState, committer: Committer, sealer: Sealer) -> None:
        self._state = state
        self._committer = committer
        self._sealer = sealer
        self._jobs: deque[_Job] = deque()
        self.waiting_bytes = 0  # of these, in memory

    @property
    def count(self) -> int:
        """Of all stages that are open, or on their way."""
        return self._state.stages.count + len(self._jobs)

    @property
    def stored_bytes(self) -> int:
        return self._state.stages.stored_bytes + self.waiting_bytes

    def rows(self) -> list[tuple[int, int]]:
        """The rows that are written of a stage which is not whole yet."""
        if not self._jobs or self._jobs[0].stage.first < 0:
            return []
        return [(self._jobs[0].stage.first, self._state.queues[STAGE_QUEUE].next_stored)]

    def step(self, by_us: int) -> None:
        """The time was put forward: those on their way have as long to wait as they had."""
        for job in self._jobs:
            info = job.stage.info
            job.stage.info = info._replace(time_us=info.time_us + by_us)

    def stage(
        self,
        key: str,
        parts: Sequence[tuple[str, Batch]],
        now_us: int,
        receipt: StageReceipt,
        totals: Sequence[Any],
        was: str,
    ) -> None:
        """A part of a transaction, which is in the log when the receipt comes."""
        if not key:
            raise LogRefused("a stage needs the key of its transaction")
        if not parts:
            raise LogRefused(f"transaction {key!r}: a stage without messages")
        size = self._check(parts)
        self._declare(now_us)
        info = StageInfo(
            "",
            key,
            now_us,
            sum(len(batch) for _, batch in parts),
            sum(len(batch.payload) for _, batch in parts),
            size,
        )
        todo = [
            StagePart(
                name,
                -1,
                -1,
                len(batch.payload),
                min(filter(None, batch.ttl_seconds), default=0) * SECOND_US if batch.ttl_seconds else 0,
                batch.protocol,
                batch.dead,
                -1 if batch.repairs is None else 0,
                batch.identity,
                batch.delay_us is not None,
            )
            for name, batch in parts
        ]
        pieces = _pieces([batch for _, batch in parts], self._state.settings.stage_group_bytes)
        self._jobs.append(_Job(Stage(info, -1, -1, todo, list(totals), was), pieces, receipt))
        self.waiting_bytes += size
        self._committer.promised_bytes += size
        if len(self._jobs) == 1:
            self._go_on(None)

    def _check(self, parts: Sequence[tuple[str, Batch]]) -> int:
        """Refuse what a commit could not store; how many bytes it takes."""
        size = 0
        for name, batch in parts:
            check_batch(name, batch)
            if batch.reply is not None:
                raise LogRefused(f"queue {name!r}: requests that wait for an answer cannot be staged")
            check_new_queue(self._state, name)
            size += stored_bytes(batch) + 8 * len(batch.repairs or ())
        settings = self._state.settings
        if self.stored_bytes + size > settings.stages_bytes_max:
            raise StagesFull(
                f"stages have {self.stored_bytes} bytes, and {size} more would be over [http] "
                f"stages-bytes-max ({settings.stages_bytes_max}); commit or abort some transactions"
            )
        if self.count >= STAGES_MAX:
            raise StagesFull(
                f"there are {STAGES_MAX} stages; commit or abort some transactions, or stage more at a time"
            )
        self._committer.check_room(self._state.gathered_bytes + size)
        return size

    def _go_on(self, error: LogFailed | None) -> None:
        """Some more of what waits, when what went before is synced."""
        if error is None and self._committer.failed is None:
            try:
                self._write_some()
            except Exception as fault:  # noqa: BLE001 - rows have their numbers, and nobody comes again for the rest
                self._committer.fail(fault)
        error = error or self._committer.failed  # Somebody else may have just found out.
        if error is not None:
            jobs, self._jobs = self._jobs, deque()
            for job in jobs:
                job.receipt(error)

    def _write_some(self) -> None:
        """So much as goes with one group."""
        left = self._state.settings.stage_group_bytes
        while self._jobs and left > 0:
            job = self._jobs[0]
            piece = next(job.pieces, None)
            if piece is None:
                self._end(job)
            else:
                size = self._write(job, *piece)
                left -= size
                self._fulfil(job, size)
        if self._jobs:
            self._committer.want_sync()
            self._committer.when_synced(self._go_on)
        self._committer.push()

    def _fulfil(self, job: _Job, size: int) -> None:
        """So much of the room that was promised to it is used."""
        size = min(size, job.left_bytes)
        job.left_bytes -= size
        self._committer.promised_bytes -= size

    def _declare(self, now_us: int) -> None:
        if STAGE_QUEUE not in self._state.queues:
            self._sealer.declare(STAGE_QUEUE, now_us)
            self._sealer.format()

    def _write(self, job: _Job, index: int, batch: Batch) -> int:
        """A piece of a part; how many bytes it has."""
        stage, now_us = job.stage, job.stage.info.time_us
        queue = self._state.queues[STAGE_QUEUE]
        first = queue.next_stored
        if stage.first < 0:
            stage.first = first
        size = 0
        for columns in split_columns(join_batches([batch], now_us), self._state.settings.block_bytes):
            block = self._sealer.message_block(queue, columns, batch.protocol, now_us)
            self._sealer.add(block, sync=False)
            size += block.header.body_bytes
        queue.pending.tail = queue.next_stored
        self._state.changed[queue.number] = queue
        part = stage.parts[index]
        if batch.repairs is not None:  # The offsets of the letters, see `_pieces`.
            part = part._replace(letters=first)
        else:
            part = part._replace(first=first if part.first < 0 else part.first, end=queue.next_stored)
        stage.parts[index] = part
        return size

    def _end(self, job: _Job) -> None:
        """All rows are written: with the block that says so the stage is there."""
        self._fulfil(job, job.left_bytes)
        stage, queue = job.stage, self._state.queues[STAGE_QUEUE]
        stage.end = queue.next_stored
        origin = queue.origin(self._state.opening)
        info = stage.info = stage.info._replace(stage=id_of(origin, stage.first).decode())
        fields: dict[str, object] = {"op": "stage", "queue": queue.number, "stage": stage.fields()}
        self._sealer.control(fields, info.time_us)
        self._state.stages.put(stage)
        self._jobs.popleft()
        self.waiting_bytes -= info.stored_bytes

        def synced(error: LogFailed | None) -> None:
            stage.synced = error is None
            job.receipt(error or info)

        self._committer.when_synced(synced)


def _pieces(batches: Sequence[Batch], bytes_max: int) -> Iterator[tuple[int, Batch]]:
    """Batches in pieces that are small enough for a group, each with the index of its batch.

    Behind those of repairs comes a message with the offsets of the letters, known by its `repairs`.
    """
    for index, batch in enumerate(batches):
        lo, count, bounds = 0, len(batch), batch.bounds
        while lo < count:
            hi = min(lo + PIECE_MESSAGES, count)
            while hi - lo > 1 and bounds[hi] - bounds[lo] > bytes_max:
                hi = (lo + hi + 1) // 2
            piece = batch if (lo, hi) == (0, count) else batch.cut(lo, hi)
            yield (
                index,
                Batch(
                    piece.payload,
                    piece.bounds,
                    piece.ttl_seconds,
                    piece.retries,
                    protocol=batch.protocol,
                    delay_us=piece.delay_us,
                    headers=piece.headers,
                ),
            )
            lo = hi
        if batch.repairs is not None:
            letters = batch.repairs.tobytes()
            bounds = array("i", [0, len(letters)])
            yield index, Batch(letters, bounds, protocol=batch.protocol, repairs=batch.repairs)
