"""Log: where messages live, and the state of each; all that the broker, the relay and HTTP ask of it.

A log keeps messages and where each is in its life (`model/life.py`); the broker keeps credit, protocol
state and timers. What varies is the `Disk` under it: a folder, a stream of JetStream, a simulated one.
Everything is shaped for batches, and nothing here waits: what takes time is answered by a callback.

    declare     a queue without messages, where there is none of that name
    delete      queues with all that is in them; their names are free for others
    append      many messages for one queue; the receipt comes when they are durable
    transact    many messages for many queues, all or nothing, once per key
    stage       a part of a transaction that is too large for one call; nobody sees it before its commit
    commit      stages become messages, all or nothing, once per key
    abort       what is staged for a key goes
    ready       how many could be taken now
    take        the next messages for a consumer, as slices of stored blocks
    settle      a consumer's verdict on what it holds
    give_back   what a consumer leaves behind: lost, cancelled
    resume      what a consumer had when the broker before this one ended, and still has
    withdraw    taken out by the sender or an operator
    mark        where a queue stands: a purge or redrive in portions takes what was there then
    purge       everything that nobody holds taken out, living or dead
    redrive     dead letters back behind the tail
    expire      what its TTL has ended by now
    due         what was delayed until now
    read        a range of offsets, whatever state the messages are in; synced ones only
    events      a range of events, likewise
    states      where the living messages of a range are, in runs
    describe    counts and positions of a queue
    counts      what has happened in a queue since the log was opened
    changed     which queues `describe` shows otherwise than before
    info        how the log itself stands
    confirm     a call back when all that has happened until now is durable
    durable_end up to which offset the messages of a queue are durable
    trim        let go of what retention no longer asks for

A dead letter stays where it is, so a door is a flag (`dead=True`), never another queue. What may meet any
number of runs (`purge`, `redrive`, `give_back`, `states`) takes a bound on them, and is asked again.
Time is an argument, in microseconds since the epoch. Ranges are `(first, end)`, end exclusive.

One thread, the loop's, owns all state and calls everything here. Writing, syncing, snapshots and
compacting run on two workers; their ends come back through `poll`. A turn of the loop looks like
this: any number of appends and settlements, then takes, which need not wait for the sync, then `flush`,
which makes one block of what came for each queue and hands the group to the writer.

The file is long because it is all that others call, in one place: most of it are signatures, and what a call
does stands in the module that it goes to.

How it fails: `DiskFull` refuses new messages and nothing else. `LogFailed` is for good: every
call says so, receipts that are open get it instead of a receipt. A block that cannot be read is
reported in `damage`, its messages are out of reach and are said to be, the rest goes on.
"""

import logging
import sys
from array import array
from collections import deque
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from penstock.log import views
from penstock.log.columns import check_batch, check_delay, check_ttl, stored_bytes
from penstock.log.committer import Committer
from penstock.log.disk import RESTORING, Disk, RealDisk, is_final, is_full
from penstock.log.errors import LogFailed, LogRefused, QueueDeleted, ReaderUnknown
from penstock.log.findings import NOBODY_S_ROWS, rot
from penstock.log.fingerprint import KIND
from penstock.log.info import LogInfo, QueueInfo, ReaderInfo, StagesInfo, StateRuns
from penstock.log.queue import LogQueue
from penstock.log.readers import Readers
from penstock.log.recovery import recover
from penstock.log.repairs import left_over, shown
from penstock.log.results import (
    Begun,
    Decision,
    EventRun,
    Fate,
    Receipt,
    Rows,
    Shares,
    StageInfo,
    StageReceipt,
    Stored,
    TransactionReceipt,
)
from penstock.log.retention import Trimmer
from penstock.log.rooms import living_runs, noted
from penstock.log.scan import Hole
from penstock.log.sealer import Sealer
from penstock.log.segment import Span
from penstock.log.snapshot import Snapshotter
from penstock.log.staging import Staging
from penstock.log.state import (
    FORMAT,
    Damage,
    LogSettings,
    LogState,
    damage_fields,
    reader_fields,
)
from penstock.log.transactions import NOT_BEGUN, Transactions
from penstock.log.weight import NOTES_MAX
from penstock.log.workers import ThreadWorker, Worker
from penstock.model.batch import Batch, Slice
from penstock.model.life import Event, Reason, State
from penstock.model.pending import AS_STORED, Mark
from penstock.model.policy import Policies
from penstock.model.spans import Times
from penstock.model.timers import SECOND_US
from penstock.model.words import KEEP_TTL, RETRY_DELAYS, Outcome, Ranges, Where

TAKE_BYTES = 1024 * 1024
LARGE_BYTES = 4096
ALONE_BYTES = 128 * 1024
"""Batches of messages that are large on average are not joined to blocks of more than this: to copy 64 KiB
once more costs 5 to 20 µs, and a block of its own, for several of them, as much."""
DELETED_MAX = 100_000
EXPIRED_MAX = 20_000  # messages whose TTL ends in one go: some milliseconds
EXPIRED_AT_ONCE = 1000  # offsets, between two looks whether it is enough
EXPIRED_LOOK, EXPIRED_RUN = 50, 20  # what takes as long: looking at these; a run of messages that ends
LOOKS_MAX = 500  # at delayed messages in one go: some milliseconds
LOOKS_A_BLOCK = 50  # that one into a block counts for
Found = TypeVar("Found")

log = logging.getLogger("penstock.log")


def _check_whole(disk: Disk) -> None:
    if RESTORING in disk.names():
        raise LogRefused(
            f"{disk.where('')}: a restore into it was not finished, so that parts of the log are missing; "
            f"call `penstock restore` again, and it goes on"
        )


class Log:
    """Open one with `open_log` or `Log.open`."""

    def __init__(self, state: LogState, writer: Worker, keeper: Worker) -> None:
        self._state = state
        self._disk = state.disk
        self._settings = state.settings
        self._writer = writer
        self._keeper = keeper
        self._dirty: dict[int, LogQueue] = {}
        self._changed = state.changed
        self._ended = state.ended
        self._committer = Committer(
            state.disk,
            state.segments,
            writer,
            keeper,
            state.settings.segment_bytes,
            state.settings.at_once_bytes,
            state.settings.syncs_apart_us / SECOND_US,
            state.disk.publish,
            self._has_failed,
            state.settings.sharers,
        )
        self._sealer = Sealer(state, self._committer)
        self._transactions = Transactions(state, self._committer, self._sealer, self._seal_all, self._mark)
        self._staging = Staging(state, self._committer, self._sealer)
        self._readers = Readers(state)
        self._trimmer = Trimmer(
            state, self._readers, keeper, self._when_safe, self._committer.fail, self._staging.rows
        )
        self._snapshotter = Snapshotter(state, self._committer, keeper, self._sealer.format)
        self._ticked_us = 0
        self._unsynced_us = 0  # how long, by ticks
        self._closed = False
        self.found_us = 0  # the log's time when it was opened; 0: nothing was in it
        self.deleted: deque[str] = deque(maxlen=DELETED_MAX)
        """Names of queues that were deleted, for whoever shows queues, and clears it."""
        # Of those who want to hear when all is synced, while settlements wait for room.
        self._unconfirmed: list[Callable[[LogFailed | None], None]] = []
        # What people see of the cluster that keeps this log; None: this machine alone does. JSON: `Any`.
        self.cluster: Callable[[], dict[str, Any]] | None = None

    def keep_to(self, owns: Callable[[str], bool]) -> None:
        """It is one of several: queues for which this is False are in another one."""
        self._state.owns = owns

    # --- life ------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        disk: Disk,
        now_us: int,
        *,
        settings: LogSettings | None = None,
        policies: Policies | None = None,
        writer: Worker,
        keeper: Worker,
    ) -> "Log":
        """Lock the folder, recover what is in it, and begin a new opening of the log.

        The workers are the log's from now on: where it cannot be opened, they are stopped.
        """
        opened: Log | None = None
        locked = False
        try:
            disk.lock()
            locked = True
            _check_whole(disk)
            state = LogState(disk, settings or LogSettings(), policies or Policies())
            position = recover(state)
            opened = cls(state, writer, keeper)
            opened.found_us = opened.time_us
            opened._begin(position, max(now_us, opened.found_us))
        except BaseException as error:
            if opened is not None:
                opened.abandon()
            else:
                writer.stop()
                keeper.stop()
                if locked:
                    disk.unlock()
            if isinstance(error, OSError) and is_full(error):
                raise LogRefused(f"{disk.where('')}: no room to open the log: {error}") from error
            if is_final(error):
                failed = LogFailed(f"the log in {disk.where('')} cannot be opened: {error}")
                failed.__cause__ = error  # mypyc leaves it out
                raise failed from error
            raise
        return opened

    def _begin(self, position: int, now_us: int) -> None:
        state = self._state
        state.opening += 1
        self._committer.start(position)
        # No id of this opening may be given out before the disk knows that it has begun: after a
        # crash, the next one must have a higher number.
        self._sealer.control(
            {"op": "opening", "opening": state.opening, "log": state.log, "format": FORMAT}, now_us
        )
        for damage in state.damage:
            log.error("%s", damage.text)
        for damage in state.take_news():
            self._sealer.control({"op": "damage", "damage": damage_fields(damage)}, now_us)
        self._committer.push()
        self._writer.wait()
        while self._committer.shrink():
            self._writer.wait()
        if self._committer.failed is not None:
            raise self._committer.failed
        if not self._committer.idle:
            raise LogRefused(
                f"{self._disk.where('')}: no room for a new segment of {self._settings.segment_bytes} bytes; "
                f"make room, or use a smaller segment size"
            )
        for queue in state.queues.values():
            queue.synced_offset = queue.tail_opened = queue.pending.tail
            queue.synced_event = queue.event_opened = queue.next_event
            if queue.asking:
                # Whoever asked was connected to the broker that is gone.
                queue.withdraw([(first, end) for first, end, _ in queue.asking], Reason.REQUESTER_GONE)
                self._dirty[queue.number] = queue
            queue.let_go = None
            if queue.repair_queue is not None:
                repaired = queue.repair_queue.pending
                queue.let_go = left_over(queue.repairs, repaired.unsettled(0, repaired.tail))
                if queue.let_go:
                    self._dirty[queue.number] = queue
            rooms = queue.pending
            if len(rooms.ready) + len(rooms.waiting.places) + len(rooms.delayed) > NOTES_MAX:
                views.weigh_early(state.segments, queue)  # Later, clients would wait for it.
        self.flush(now_us)

    def close(self, now_us: int) -> None:
        """Write everything, sync, leave a snapshot, and let go of the folder."""
        if self._closed:
            return
        self._closed = True
        if self._committer.failed is None:
            self._seal_all(now_us)
            self._committer.want_sync()
            self._committer.push()
            self._writer.wait()
            if self._committer.waits_for_room:
                self._find_room(now_us)
        self._trimmer.stop()
        if self._committer.failed is None and self._committer.idle:
            self._keeper.wait()
            # Settlements may have waited for room that the keeper has found. A snapshot with some that
            # are in no block would keep their effect and lose the events.
            self._seal_all(now_us)
            if not self._dirty and not self._state.redriving:
                self._snapshotter.consider(force=True)
            self._committer.want_sync()
            self._committer.push()
            self._writer.wait()
            self._keeper.wait()
        self._stop()

    def _find_room(self, now_us: int) -> None:
        """For what was done while the disk was full: by retention, or with the smallest segment that does."""
        committer = self._committer
        self._trimmer.trim(self._snapshotter.positions, now_us, anew=True)
        self._keeper.wait()
        committer.squeeze()
        self._seal_all(now_us)
        committer.want_sync()
        committer.push()
        committer.tick()
        self._writer.wait()
        while committer.shrink():
            self._writer.wait()
        if committer.failed is None and committer.waits_for_room:
            log.error(
                "%s: no room for what was settled last: these messages will be delivered again",
                self._disk.where(""),
            )

    def abandon(self) -> None:
        """Let go of everything without writing another byte, as a crash would."""
        self._closed = True
        self._stop()

    def _stop(self) -> None:
        self._writer.stop()
        self._keeper.stop()
        self._committer.close()
        self._state.segments.close()
        self._disk.unlock()

    def _has_failed(self, error: LogFailed) -> None:
        log.critical("%s", error)
        self._trimmer.stop()
        for queue in self._dirty.values():
            receipts, queue.parts_receipts = queue.parts_receipts, None
            for receipt in receipts or ():
                receipt(error)
        waiting, self._unconfirmed = self._unconfirmed, []
        for call in waiting:
            call(error)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """The disk does not give back what it holds, and says so: nothing can be promised any more."""
        try:
            yield
        except OSError as error:
            raise self._unreadable(error) from error

    @contextmanager
    def _numbering(self) -> Iterator[None]:
        """The same, where offsets may have been given to messages, and no memory was left to make blocks."""
        try:
            yield
        except (OSError, MemoryError) as error:
            raise self._unreadable(error) from error

    def _read(self, found: Iterator[Found]) -> Iterator[Found]:
        with self._reading():
            yield from found

    def _unreadable(self, error: OSError | MemoryError) -> LogFailed:
        self._committer.fail(error)
        assert self._committer.failed is not None
        return self._committer.failed

    def _check(self) -> None:
        if self._committer.failed is not None:
            raise self._committer.failed
        if self._closed:
            raise LogRefused(f"{self._disk.where('')}: this log is closed")

    @property
    def failed(self) -> LogFailed | None:
        return self._committer.failed

    @property
    def full(self) -> bool:
        """Whether new messages are refused for lack of room."""
        return self._committer.full

    @property
    def time_us(self) -> int:
        """The latest that a block has: time never goes back in a log."""
        return max((segment.time_max_us for segment in self._state.segments.all), default=0)

    def step(self, by_us: int, now_us: int) -> None:
        """The time has been put forward to `now_us`: what runs out has as much left as it had before."""
        self._check()
        self._seal_all(now_us)
        self._state.step(by_us, self._committer.position)
        self._staging.step(by_us)
        self._sealer.control({"op": "step", "by_us": by_us}, now_us)

    @property
    def damage(self) -> Sequence[Damage]:
        return self._state.damage

    def report_damage(self, damage: Damage) -> None:
        """What somebody else has found out about the stored bytes: it goes into the report and the log."""
        self._state.tell(damage)

    def report_rot(self, name: str, hole: Hole, why: str = "") -> None:
        """The same of somebody who has read a sealed segment. It may be gone by now: then nothing is wrong.

        No message is given up for it: that is for whoever needs one and cannot read it. A stage is, as long
        as whoever has staged it can do so again.
        """
        for segment in self._state.segments.all:
            if segment.name != name:
                continue
            state, header = self._state, hole.header
            queue = state.by_number.get(header.queue) if header is not None else None
            what = ""
            if header is not None and header.queue == state.segments.stage_queue:
                what = "; ".join(state.needed_by(header.first_offset, header.offset_end)) or NOBODY_S_ROWS
                # It can be staged again, as long as it is not committed.
                state.stages.lose(
                    header.first_offset, header.offset_end, "its rows do not have their checksum"
                )
            found = rot(hole, segment.base, queue.name if queue is not None else "", what)
            where = self._disk.where(name)
            if not any(it.file == where and it.position == found.position for it in self._state.damage):
                text = f"{where}: {f'cannot be read: {why}' if why else found.text}"
                self._state.tell(Damage(where, found.position, "", 0, 0, text))
                rows = self._state.segments.rows_between(segment, hole.start, hole.end)
                self._state.stages.lose(*rows, text)

    @property
    def is_safe(self) -> bool:
        """Whether everything that was ever accepted or settled is synced."""
        committer = self._committer
        if committer.failed is not None or self._dirty:
            return False
        return committer.idle and committer.synced == committer.position

    @property
    def opening(self) -> int:
        return self._state.opening

    @property
    def number(self) -> int:
        """What the ids of all its messages begin with, as six hex digits."""
        return self._state.log

    @property
    def position(self) -> int:
        """Where the next block goes."""
        return self._committer.position

    @property
    def synced(self) -> int:
        """Everything before this is safe."""
        return self._committer.synced

    @property
    def is_flushed(self) -> bool:
        """Whether all that was said is in blocks, which may be on their way."""
        return not self._dirty and self._committer.failed is None

    @property
    def is_writing(self) -> bool:
        """Whether something is on its way to the disk."""
        return self._committer.writing

    @property
    def bytes_in_flight(self) -> int:
        """Bytes that were accepted and are not yet in the files."""
        return self._committer.bytes_in_flight + self._state.gathered_bytes

    def poll(self) -> None:
        """Run what the workers' ends have to say. Call it when they `wake` the loop."""
        self._writer.poll()
        self._keeper.poll()

    def hurry(self) -> None:
        """`wake` the loop when the bytes that are on their way are in the files: somebody waits for room."""
        self._committer.hurry()

    def wait(self) -> None:
        """Block until all that was flushed is safe, settlements included. For tools and tests."""
        if self._sealer.settlements_wait and self._committer.failed is None:
            self._sealer.settlements_wait = False
            self._committer.want_sync()
            self._committer.push()
        self._committer.hurry()
        while True:
            self._writer.wait()
            self._keeper.wait()
            # Between two segments, trimming waits for a sync.
            if not self._committer.writing:
                return

    # --- in --------------------------------------------------------------------------------------

    def declare(self, queue: str, now_us: int) -> None:
        """A queue that is there from now on, if it was not."""
        self._check()
        if queue not in self._state.queues:
            self._mark(self._sealer.declare(queue, now_us))

    def delete(self, queues: Sequence[str], now_us: int) -> None:
        """These queues are no more, nor is what is in them, whoever holds it. `confirm` tells when it is so.

        What is sent to one of the names from now on makes another queue: its offsets begin at 0, and what was
        said to the old one, by offset and origin, does not reach it.
        """
        self._check()
        numbers = [self._known(queue).number for queue in queues]
        self._seal_all(now_us)  # What was accepted before has its place before, and its receipts.
        self._sealer.control({"op": "delete", "numbers": numbers}, now_us)
        for number in self._state.delete(numbers):
            self._dirty.pop(number, None)
        self.deleted += queues
        self._state.gone_end = self._committer.position

    def append(self, queue: str, batch: Batch, now_us: int, receipt: Receipt | None = None) -> None:
        """Messages for a queue, which is made where there is none."""
        self._check()
        if batch.dead or batch.repairs is not None or batch.moves is not None:
            raise LogRefused(
                f"queue {queue!r}: dead letters, their repairs and what is moved are sent in a transaction"
            )
        if batch.reply is not None and batch.delay_us is not None:
            raise LogRefused(f"queue {queue!r}: who waits for an answer cannot ask for a delay")
        check_batch(queue, batch)
        try:
            views.check_queue(self._state, queue, len(batch.payload))
        except OSError as error:
            raise self._unreadable(error) from error
        size = stored_bytes(batch)
        self._committer.check_room(size + self._state.gathered_bytes)
        found = self._state.queues.get(queue) or self._sealer.declare(queue, now_us)
        first = self._gather(found, batch, size, now_us)
        if receipt is not None:
            stored = Stored(queue, first, first + len(batch), found.origin(self._state.opening))
            if found.policy.durability == "none":
                receipt(stored)
            else:
                # It waits with the messages: a group that goes out before their block is not theirs.
                if found.parts_receipts is None:
                    found.parts_receipts = []
                found.parts_receipts.append(lambda error: receipt(error or stored))

    def _gather(self, queue: LogQueue, batch: Batch, size: int, now_us: int) -> int:
        parts = queue.parts
        if parts and (
            parts[0].protocol != batch.protocol
            or (parts[0].reply is None) != (batch.reply is None)
            or (parts[0].ttl_seconds is None) != (batch.ttl_seconds is None)
            or queue.parts_time_us != now_us
            or queue.parts_stored_bytes + size > self._settings.block_bytes
            or (max(queue.parts_stored_bytes, size) >= ALONE_BYTES and size >= LARGE_BYTES * len(batch))
        ):
            self._sealer.messages(queue)
            parts = None
        if parts is None:
            queue.parts = [batch]
        else:
            parts.append(batch)
        queue.parts_bytes += len(batch.payload)
        queue.parts_stored_bytes += size
        self._state.gathered_bytes += size
        queue.parts_time_us = now_us
        self._dirty[queue.number] = self._changed[queue.number] = queue
        first = queue.pending.accept(len(batch))
        if batch.delay_us is not None:
            queue.delay_new(first, batch.delay_us)
        return first

    def transact(
        self,
        key: str,
        parts: Sequence[tuple[str, Batch]],
        now_us: int,
        receipt: TransactionReceipt | None = None,
    ) -> list[tuple[str, Fate]]:
        """See `Transactions.transact`."""
        self._check()
        with self._numbering():
            return self._transactions.transact(key, parts, now_us, receipt)

    def stage(
        self,
        key: str,
        parts: Sequence[tuple[str, Batch]],
        now_us: int,
        receipt: StageReceipt,
        *,
        totals: Sequence[Any] = (),
        was: str = "",
    ) -> None:
        """A part of a transaction, for `commit`; nobody sees it before. `totals`: see `fingerprint.py`."""
        self._check()
        self._staging.stage(key, parts, now_us, receipt, totals, was)

    def commit(
        self,
        key: str,
        stage_ids: Sequence[str],
        now_us: int,
        receipt: TransactionReceipt | None = None,
        begun: Begun = NOT_BEGUN,
    ) -> None:
        """`committing` in one go, for callers without a loop."""
        for _ in self.committing(key, stage_ids, now_us, receipt, begun):
            pass

    def committing(
        self,
        key: str,
        stage_ids: Sequence[str],
        now_us: int,
        receipt: TransactionReceipt | None = None,
        begun: Begun = NOT_BEGUN,
        shares: Shares | None = None,
        *,
        decided: bool = False,
        rows: Rows = None,
    ) -> Generator[None, None, None]:
        """See `Transactions.commit`. To be closed by whoever does not go through it to its end."""
        self._check()
        steps = self._transactions.commit(
            key, stage_ids, now_us, receipt, begun, shares, decided=decided, rows=rows
        )
        try:
            with self._numbering():
                for _ in steps:
                    yield
                    self._check()  # It may have failed, or been closed, in between.
        finally:
            steps.close()

    def begin(self, key: str) -> str:
        """See `Transactions.begin`."""
        self._check()
        return self._transactions.begin(key)

    def prepare(self, key: str, attempt: str, stage_ids: Sequence[str], now_us: int) -> list[list[Any]]:
        """See `Transactions.prepare`; `confirm` tells when it holds."""
        self._check()
        return self._transactions.prepare(key, attempt, stage_ids, now_us)

    def move(
        self,
        key: str,
        attempt: str,
        source: str,
        offsets: "array[int]",
        stages: dict[str, list[str]],
        now_us: int,
        receipt: TransactionReceipt,
    ) -> list[Fate]:
        """See `Transactions.move`."""
        self._check()
        with self._numbering():
            return self._transactions.move(key, attempt, source, offsets, stages, now_us, receipt)

    def unprepare(self, key: str, attempt: str, now_us: int) -> None:
        self._check()
        self._transactions.unprepare(key, attempt, now_us)

    def decision(self, key: str) -> Decision | None:
        """What was decided here about stages in other logs."""
        return self._state.decisions.get(key)

    def is_decided(self, key: str, attempt: str) -> bool:
        """See `Transactions.is_decided`; a yes may be told when `confirm` says so."""
        self._check()
        return self._transactions.is_decided(key, attempt)

    def finish(self, key: str, stored: list[list[Any]], now_us: int) -> None:
        """See `Transactions.finish`."""
        self._check()
        self._transactions.finish(key, stored, now_us)

    def prepared_of(self, key: str) -> list[str]:
        """Attempts that the stages of this key wait for."""
        return list(self._state.stages.prepared.get(key, ()))

    def prepared(self) -> list[tuple[str, str]]:
        """Keys and attempts that this log waits for another one to decide."""
        return [(key, it) for key, its in self._state.stages.prepared.items() for it in its]

    def unfinished(self) -> list[str]:
        """Keys that are decided here, and not yet known to be stored in all other logs."""
        return [key for key, it in self._state.decisions.items() if it.stored is None]

    def stage_totals(self, key: str, stage_ids: Sequence[str]) -> list[tuple[str, list[list[Any]], bool]]:
        """Which of these are there, what each brings, and whether it is meant by its alias."""
        found = [(it, self._state.stages.find(it)) for it in stage_ids]
        return [
            (it, stage.totals, it == stage.was)
            for it, stage in found
            if stage is not None and stage.info.key == key and stage.synced
        ]

    def abort(self, key: str, now_us: int) -> None:
        """Whatever is staged for a key goes; `confirm` tells when it has."""
        self._check()
        self._transactions.abort(key, now_us)

    def stages(self, key: str) -> list[StageInfo]:
        """What is staged for a key, and synced."""
        return [stage.info for stage in self._state.stages.of(key) if stage.synced]

    def stage_alias(self, stage_id: str) -> str:
        """The other id of a stage that has two, which whoever has staged it knows; nothing of others."""
        stage = self._state.stages.find(stage_id)
        return "" if stage is None else stage.was

    def staged_queues(self, stage_ids: Sequence[str]) -> set[str]:
        """The queues that these stages have messages for, as far as they are there."""
        found = [self._state.stages.find(stage_id) for stage_id in stage_ids]
        return {part.queue for stage in found if stage is not None for part in stage.parts}

    @property
    def stages_count(self) -> int:
        """Stages that wait for their commit, or are on their way into the log."""
        return self._staging.count

    @property
    def stages_bytes(self) -> int:
        """What these take, about."""
        return self._staging.stored_bytes

    @property
    def stages_waiting_bytes(self) -> int:
        """Of those that are on their way, and so in memory."""
        return self._staging.waiting_bytes

    def _end_stages(self, now_us: int) -> None:
        """Let go of what nobody has committed or aborted for too long."""
        state = self._state
        while (oldest := state.stages.oldest()) is not None:
            key, time_us = oldest
            if now_us - time_us < state.settings.stage_seconds * SECOND_US:
                return
            name, count = key.removeprefix(KIND), len(state.stages.of(key))
            if key in state.transactions:
                log.info(
                    "transaction %r is committed: %d stages that came after that are removed", name, count
                )
            else:
                seconds = (now_us - time_us) // SECOND_US
                text = "transaction %r was not committed for %d s: its %d stages are removed"
                log.warning(text, name, seconds, count)
            self.abort(key, now_us)

    def transaction(self, key: str) -> list[Stored] | None:
        """Where a committed transaction's messages are; None where the key is not known (any more).

        It may have been committed a moment ago: only a receipt says that it is safe.
        """
        return self._transactions.stored(key)

    def fingerprint(self, key: str) -> str:
        """What is remembered of the contents of a committed transaction."""
        return self._state.fingerprints.get(key, "")

    def transaction_newest(self, series: str) -> str | None:
        """The key that was committed last of those that are `series`, which ends with a slash, and one more
        part; None where none is known (any more)."""
        return self._state.newest_key(series)

    def transaction_steps(self, key: str) -> int:
        """How many steps of a transaction are stored that has not had its last one; 0 of any other."""
        return self._state.steps_of(key)

    # --- blocks ----------------------------------------------------------------------------------

    def flush(self, now_us: int) -> None:
        """The end of a turn: everything that came in it goes out as one group."""
        self._writer.poll()  # a group may have ended without a word
        self._seal_all(now_us)
        if not self._dirty and not self._state.redriving:
            self._snapshotter.consider()
        self._committer.push()

    def _mark(self, queue: LogQueue) -> None:
        self._dirty[queue.number] = self._changed[queue.number] = queue

    def _seal_all(self, now_us: int) -> None:
        if self._committer.failed is not None:
            return
        for damage in self._state.take_news():
            log.error("%s", damage.text)
            self._sealer.control({"op": "damage", "damage": damage_fields(damage)}, now_us)
        kept: dict[int, LogQueue] = {}
        for queue in self._dirty.values():
            if queue.weight.is_due:
                views.weigh_early(self._state.segments, queue)
            if queue.parts:
                self._sealer.messages(queue)
        # Behind all messages: who has sent a result and then settled its input must not have settled alone,
        # wherever a power cut ends the log.
        for queue in self._dirty.values():
            if len(queue.ledger) and not self._sealer.ledger(queue, now_us):
                kept[queue.number] = queue
            elif queue.let_go and queue.repair_queue is not None:
                repair_queue = queue.repair_queue
                repair_queue.withdraw(queue.let_go, Reason.PURGED)
                self._changed[repair_queue.number] = repair_queue
                queue.let_go = None
                if len(repair_queue.ledger) and not self._sealer.ledger(repair_queue, now_us):
                    kept[repair_queue.number] = repair_queue
        self._dirty = kept
        self._committer.settlements_wait = bool(kept)
        if self._unconfirmed and not kept:
            waiting, self._unconfirmed = self._unconfirmed, []
            for call in waiting:
                self._committer.when_synced(call)
            self._committer.want_sync()

    # --- out -------------------------------------------------------------------------------------

    def ready(self, queue: str, *, dead: bool = False) -> int:
        """How many messages could be taken now, as far as is known without looking at each."""
        found = self._state.queues.get(queue)
        if found is None or found.paused:
            return 0
        pending = found.pending
        if dead:
            return pending.dead.places.total
        if found.synced_offset < pending.tail and found.policy.waits_for_sync:
            return pending.ready_count - pending.ready.count(found.synced_offset, pending.tail)[1]
        return pending.ready_count

    def on_stored(self, call: Callable[[str], None]) -> None:
        """Call with the name of a queue when there may be more to take of it: messages that nobody gets
        before they are durable (`deliver-after`) are so now."""
        self._sealer.on_stored = call

    def take(
        self,
        queue: str,
        consumer: str,
        count: int,
        now_us: int,
        *,
        bytes_max: int = TAKE_BYTES,
        bytes_each: int = 0,
        dead: bool = False,
    ) -> list[Slice]:
        """Up to `count` messages and `bytes_max` bytes; a first message that is larger comes alone.

        `bytes_each` is what every message counts for besides its payload.
        """
        self._check()
        found = self._state.queues.get(queue)
        if found is None or found.paused:
            return []
        if found.parts and not found.policy.waits_for_sync:
            self._sealer.messages(found)
        try:
            slices = found.take(consumer, count, bytes_max, bytes_each, now_us, dead)
        except OSError as error:  # as `_reading` does, which would cost as much as the take
            raise self._unreadable(error) from error
        if len(found.ledger):
            self._dirty[found.number] = self._changed[found.number] = found
        if found.fates:
            self._ended[found.number] = found
        if slices:
            self._changed[found.number] = found
        return slices

    def settle(
        self,
        queue: str,
        consumer: str,
        outcome: Outcome,
        ranges: Ranges,
        now_us: int,
        *,
        origin: bytes | None = None,
        ttl_seconds: int = 0,
        dead: bool = False,
        delay_us: int = RETRY_DELAYS,
        why: str = "",
    ) -> list[Fate]:
        """A verdict on held messages. What this consumer does not hold is not in the answer.

        Of a requeue: `ttl_seconds` from now on, 0 for none, KEEP_TTL for what it has; a delay of its own, or
        what the queue has for messages that come again. Of a rejection: what to remember with the letter.
        """
        self._check()
        if ttl_seconds != KEEP_TTL:
            check_ttl(queue, ttl_seconds)
        if delay_us != RETRY_DELAYS:
            check_delay(queue, delay_us)
        found = self._state.queues.get(queue)
        if found is None:
            return []
        fates: list[Fate] = []
        try:
            for first, end in ranges:
                if outcome is Outcome.ACK:
                    fates += found.acknowledge(first, end, consumer, origin, dead, now_us)
                elif outcome is Outcome.REJECT:
                    fates += found.reject(first, end, consumer, origin, dead, now_us, why)
                else:
                    expires_us = now_us + ttl_seconds * 1_000_000 if ttl_seconds else 0
                    if ttl_seconds == KEEP_TTL:
                        expires_us = AS_STORED
                    fates += found.requeue(first, end, consumer, origin, dead, expires_us, now_us, delay_us)
        except OSError as error:  # as in `take`
            raise self._unreadable(error) from error
        if fates:
            self._dirty[found.number] = self._changed[found.number] = found
        return fates

    def give_back(
        self,
        queue: str,
        consumer: str,
        now_us: int,
        *,
        ranges: Ranges | None = None,
        where: Where = Where.PLACE,
        lost: bool = True,
        runs_max: int | None = None,
        why: Reason = Reason.CONSUMER_LOST,
    ) -> list[Fate]:
        """What a consumer leaves behind. `lost`: a delivery that failed, which counts, and `why` it did.

        Without ranges all that it holds, or about `runs_max` runs of it, the lowest offsets first.
        """
        self._check()
        found = self._state.queues.get(queue)
        if found is None:
            return []
        with self._reading():
            fates = found.give_back(consumer, ranges, where, lost, now_us, runs_max, why)
        if fates:
            self._dirty[found.number] = self._changed[found.number] = found
        return fates

    def resume(
        self,
        queue: str,
        consumer: str,
        ranges: Ranges,
        now_us: int,
        *,
        origin: bytes,
        dead: bool = False,
        attempts_max: int | None = None,
    ) -> Ranges:
        """What a consumer had before and has not let go of: it holds it again, as far as nobody else does.

        No delivery: nothing is counted or recorded. What it gets is told; the rest is gone, dead, in
        other hands, has other ids, or more than `attempts_max` of its deliveries have ended.
        """
        self._check()
        found = self._state.queues.get(queue)
        if found is None:
            return []
        if found.parts:
            self._sealer.messages(found)
        with self._reading():
            resumed = found.resume(consumer, ranges, origin, dead, now_us, attempts_max)
        if resumed:
            self._changed[found.number] = found
        return resumed

    def withdraw(self, queue: str, ranges: Ranges, reason: Reason, now_us: int) -> list[Fate]:
        """Living messages that nobody shall get any more, held ones included."""
        found = self._sealed(queue)
        fates = found.withdraw(ranges, reason)
        self._dirty[found.number] = self._changed[found.number] = found
        return fates

    def withdraw_free(self, queue: str, ranges: Ranges, reason: Reason, now_us: int) -> list[Fate]:
        """Messages in these ranges that nobody holds: ready and delayed ones, and dead letters. Every run in
        them is looked at, so that whoever names much of a queue should name it in portions."""
        found = self._sealed(queue)
        fates = found.withdraw_free(ranges, reason)
        if fates:
            self._dirty[found.number] = self._changed[found.number] = found
        return fates

    def _sealed(self, queue: str) -> LogQueue:
        """A queue, all of whose messages are in blocks."""
        self._check()
        found = self._known(queue)
        if found.parts:
            self._sealer.messages(found)
        return found

    def mark(self, queue: str) -> Mark:
        """Where a queue stands now, for a purge or redrive that takes what is there and nothing else."""
        return self._known(queue).pending.mark()

    def purge(
        self,
        queue: str,
        now_us: int,
        *,
        dead: bool = False,
        limit: int | None = None,
        runs_max: int | None = None,
        mark: Mark | None = None,
    ) -> list[Fate]:
        """Every ready message, or every dead letter, that nobody holds.

        At most `limit` of them in at most `runs_max` runs; so many runs say that there may be more. With a
        `mark`, only what was there when that was made.
        """
        found = self._sealed(queue)
        fates = found.purge(dead, limit, runs_max, mark or found.pending.mark())
        self._dirty[found.number] = self._changed[found.number] = found
        return fates

    def redrive(
        self,
        queue: str,
        now_us: int,
        *,
        reason: Reason | None = None,
        ranges: Ranges | None = None,
        limit: int | None = None,
        runs_max: int | None = None,
        mark: Mark | None = None,
    ) -> list[Fate]:
        """Dead letters back behind the tail, first died first. The bounds are those of `purge`.

        With `ranges` every run in them is looked at, so that whoever names much of a queue should name
        it in portions.
        """
        self._check()
        found = self._known(queue)
        fates = found.redrive(reason, ranges, limit, runs_max, mark or found.pending.mark())
        if fates:
            self._dirty[found.number] = self._changed[found.number] = found
        return fates

    def expire(self, now_us: int) -> list[tuple[str, Fate]]:
        """What its TTL has ended since the last call, or a part of that: the next calls go on from there."""
        self._check()
        fates: list[tuple[str, Fate]] = []
        left = EXPIRED_MAX
        for number, first, end in self._state.timers.due(now_us):
            if number not in self._state.by_number:  # It was deleted.
                continue
            queue = self._state.by_number[number]
            if queue.parts:
                self._sealer.messages(queue)
            while first < end and left > 0:
                stop = min(first + EXPIRED_AT_ONCE, end)
                with self._reading():
                    ended = queue.expire(first, stop, now_us)
                left -= EXPIRED_LOOK + sum([EXPIRED_RUN + fate.end - fate.first for fate in ended])
                first = stop
                if ended:
                    queue.tell(ended)
            if first < end:
                self._state.timers.add(now_us // SECOND_US * SECOND_US, number, first, end)
            if queue.fates:
                self._dirty[number] = self._ended[number] = self._changed[number] = queue
        for queue in self._ended.values():
            fates += [(queue.name, fate) for fate in queue.fates or ()]
            queue.fates = None
        self._ended.clear()
        return fates

    @property
    def due_us(self) -> int:
        """When to call `due` again, where that is soon; 0: whenever there is a tick."""
        return self._state.delays.next_us

    def due(self, now_us: int) -> list[str]:
        """What was delayed until now is ready: the queues where there is some."""
        self._check()
        found: dict[str, None] = {}
        left = LOOKS_MAX
        for number, first, end in self._state.delays.due(now_us):
            queue = self._state.by_number.get(abs(number))
            if queue is not None:  # Otherwise it was deleted.
                delayed = queue.pending.delayed.total
                if number > 0:
                    queue.look(first, end, now_us)
                else:
                    with self._reading():
                        left -= LOOKS_A_BLOCK * queue.look_into(first, end, now_us)
                    # Some have a time of their own by now, and a snapshot has to know: nothing else is filed.
                    self._changed[queue.number] = queue
                if queue.pending.delayed.total < delayed:
                    found[queue.name] = None
                    self._changed[queue.number] = queue
            left -= 1
            if left <= 0:  # The others in the next call.
                break
        return list(found)

    # --- looking ---------------------------------------------------------------------------------

    def deliveries(self, queue: str, first: int, end: int) -> list[tuple[int, int, int]]:
        """How many deliveries of the messages of a range have ended, in runs."""
        found = self._state.queues.get(queue)
        noted = found.pending.noted(first, end) if found is not None else ()
        return [(a, b, note.attempts) for a, b, note in noted]

    def whys(self, queue: str, first: int, end: int) -> list[tuple[int, int, str]]:
        """What was said when letters of a range were rejected."""
        found = self._state.queues.get(queue)
        return found.whys.find(first, end) if found is not None else []

    def _known(self, queue: str) -> LogQueue:
        return views.known_queue(self._state, queue)

    @property
    def bytes_stored(self) -> int:
        """What all segments have."""
        return sum(segment.size for segment in self._state.segments.all)

    @property
    def queue_count(self) -> int:
        return len(self._state.queues) - self._state.repair_queues

    def has_queue(self, queue: str) -> bool:
        return queue in self._state.queues

    def queues(self) -> list[str]:
        return shown(list(self._state.queues))

    def check_same(self, queue: str, identity: str | None) -> None:
        """QueueDeleted where another queue has that name by now, QueueUnknown where none has; None is any."""
        if identity not in (None, self._known(queue).identity):
            raise QueueDeleted(queue)

    def read(self, queue: str, start: int, end: int) -> Iterator[Slice]:
        """The log from `start` to `end`, as far as it is synced."""
        return self._read(views.read_messages(self._state, self._known(queue), start, end))

    def events(self, queue: str, start: int, end: int) -> Iterator[EventRun]:
        """The events from number `start` to `end`, as far as they are synced."""
        return self._read(views.read_events(self._state, self._known(queue), start, end))

    def states(self, queue: str, start: int, end: int, runs_max: int, only: State | None = None) -> StateRuns:
        """Where the living messages of a range are; `only` is READY, DELAYED, HELD or DEAD."""
        found = self._known(queue)
        runs = living_runs(found.pending, start, end, runs_max, only)
        runs.steps = found.steps
        for first, stop, distance in found.repairs.walk(start, runs.next):
            if len(runs.repair_first) == runs_max:
                runs.end_at(first)
                break
            runs.repair_first.append(first)
            runs.repair_end.append(stop)
            runs.repair_distance.append(distance)
        for why in found.whys.walk(start, runs.next) if only in (None, State.DEAD) else ():
            if len(runs.whys) == runs_max:
                runs.end_at(why[0])
                break
            runs.whys.append(why)
        return runs

    def held_by(self, queue: str, consumer: str, runs_max: int) -> list[tuple[int, int, bool, int]]:
        """What a consumer holds of a queue: first, end, whether they are dead letters, since when."""
        found = self._state.queues.get(queue)
        runs = found.pending.held_by(consumer, runs_max) if found is not None else []
        return [(first, end, hold.dead, hold.dispatched_us) for first, end, hold in runs]

    def holds_of(self, queue: str, consumer: str) -> list[tuple[int, int, bool, bytes, int]]:
        """All that a consumer holds of a queue, as another log's broker must be told of it: first, end,
        whether they are dead letters, what their ids begin with, and how many of their deliveries have
        ended."""
        found = self._state.queues.get(queue)
        if found is None:
            return []
        pending = found.pending
        return [
            (a, b, hold.dead, hold.origin, note.attempts)
            for first, end, hold in pending.held_by(consumer, sys.maxsize)
            for a, b, note in noted(pending, first, end)
        ]

    def attempts_before(self, queue: str, ranges: Ranges, dead: bool) -> list[tuple[Ranges, int | None]]:
        """How many deliveries of messages had ended before they were requeued."""
        pending = self._known(queue).pending
        found: dict[int, Ranges] = {}
        for first, end in ranges:
            for a, b, note in noted(pending, first, end):
                attempts = note.attempts if dead else max(note.attempts - 1, 0)
                found.setdefault(attempts, []).append((a, b))
        return [(pieces, attempts) for attempts, pieces in found.items()]

    def describe(self, queue: str) -> QueueInfo:
        with self._reading():
            return views.describe(self._state, self._known(queue))

    def counts(self, queue: str) -> dict[tuple[Event, Reason], int]:
        """The events of this opening, and the deliveries (`held`), by event and reason."""
        return self._known(queue).counts()

    @property
    def times(self) -> Times:
        """How long messages wait and are worked on, by the numbers of queues; noted while it is wanted."""
        return self._state.times

    def take_times(self, queue: str) -> tuple[dict[int, int], dict[int, int]]:
        """The waiting and working times of a queue since this was last asked, by bucket
        (`model/spans.py`)."""
        return self._state.times.take(self._known(queue).number)

    def deaths(self, queue: str) -> dict[Reason, int]:
        """Dead letters by reason, those that somebody holds included."""
        return self._known(queue).pending.deaths()

    def changed(self) -> list[str]:
        """The queues that `describe` may show otherwise than when this was last asked."""
        return self._state.take_changed()

    def info(self, *, with_cluster: bool = True) -> LogInfo:
        segments = self._state.segments.all
        total_bytes = self._disk.total_bytes()
        oldest = self._state.stages.oldest()
        return LogInfo(
            engine="log" if self.cluster is None else "jetstream",
            data=self._disk.where(""),
            opening=self._state.opening,
            position=self._committer.position,
            segments=len(segments),
            log_bytes=self.bytes_stored,
            disk_bytes_free=self._disk.free_bytes(),
            disk_bytes_total=total_bytes,
            disk_bytes_reserve=min(self._settings.disk_bytes_reserve, total_bytes // 4),
            disk_room_in=self._disk.room_in(),
            bytes_in_flight=self.bytes_in_flight,
            full=self.full,
            failed=str(self.failed) if self.failed is not None else "",
            damage=[damage.text for damage in self._state.damage],
            sync=self._committer.syncs,
            readers=len({name for name, _ in self._state.readers}),
            stages=StagesInfo(self.stages_count, self.stages_bytes, oldest[1] if oldest is not None else 0),
            cluster=self.cluster() if with_cluster and self.cluster is not None else None,
        )

    def is_paused(self, queue: str) -> bool:
        found = self._state.queues.get(queue)
        return found is not None and found.paused

    def pause(self, queue: str, paused: bool, now_us: int) -> None:
        """While paused, nothing is taken; messages are accepted and settled."""
        self._check()
        found = self._known(queue)
        if found.paused != paused:
            found.paused = paused
            self._changed[found.number] = found
            self._sealer.control({"op": "pause", "queue": queue, "paused": paused}, now_us)

    @property
    def policies(self) -> Policies:
        return self._state.policies

    def set_policies(self, policies: Policies) -> None:
        """New settings for every queue, from now on."""
        self._state.policies = policies
        for queue in self._state.queues.values():
            queue.policy = self._state.policy_of(queue.name)
            if queue.policy.waits_for_sync and queue.synced_offset < queue.pending.tail:
                self._sealer.tell_stored(queue)
                self._committer.want_sync()

    # --- readers and retention -------------------------------------------------------------------

    def hold_retention(self, reader: ReaderInfo, now_us: int) -> None:
        """From now on nothing at or behind the reader's position is removed, while its lease lasts.

        Each queue that a reader reads is held by a call of its own. See `readers.py` for how much.
        """
        self._check()
        self._known(reader.queue)
        if reader.view not in ("messages", "events"):
            raise LogRefused(f"reader {reader.name!r}: no view {reader.view!r}: messages or events")
        self._state.hold(reader)
        self._sealer.control({"op": "reader", "reader": reader_fields(reader)}, now_us)

    def release_retention(self, name: str, now_us: int, *, queue: str | None = None) -> None:
        """A reader holds nothing any more, in all its queues or in one."""
        self._check()
        if not self._state.release(name, queue):
            where = f" of queue {queue!r}" if queue is not None else ""
            raise ReaderUnknown(f"there is no reader {name!r}{where}")
        fields: dict[str, object] = {"op": "reader-gone", "name": name}
        if queue is not None:
            fields["queue"] = queue
        self._sealer.control(fields, now_us)

    def readers(self, queues: Container[str] | None = None) -> list[ReaderInfo]:
        """Every reader, once for each queue that it reads, or for some of these. Who is capped was found out
        by the last `trim`."""
        return self._readers.listed(queues)

    def empty_cache(self) -> None:
        """Let go of what can be read from the files again."""
        self._state.segments.empty_cache()

    def trim(self, now_us: int) -> None:
        """Remove or compact what retention no longer asks for, off the loop."""
        self._check()
        for name, queue in self._readers.ended(now_us):
            self.release_retention(name, now_us, queue=queue)
        self._snapshotter.try_again()
        self._trimmer.trim(self._snapshotter.positions, now_us, anew=self._committer.waits_for_room)

    def _when_safe(
        self, spans: dict[int, Span], now_us: int, call: Callable[[LogFailed | None], None]
    ) -> bool:
        """Call when all that has happened to these messages is synced; False where there is no room for it.

        While the disk is full no sync comes, and room is what trimming makes: what is synced already has to
        be enough.
        """
        self._seal_all(now_us)
        if self._committer.waits_for_room:
            state = self._state
            has_rows = state.segments.stage_queue in spans
            gone_end = max(state.gone_end, state.rows_gone_end if has_rows else 0)
            if self._committer.synced < gone_end or not all(
                state.by_number[it].is_settled_for_good(span.end_offset) for it, span in spans.items()
            ):
                return False
            call(None)
            return True
        self._committer.when_synced(call)
        self._committer.want_sync()
        self._committer.push()
        return True

    def confirm(self, now_us: int, call: Callable[[LogFailed | None], None]) -> None:
        """Call when all that has happened until now is synced; settlements may have to wait for room."""
        self._check()
        self._seal_all(now_us)
        if self._dirty:
            self._unconfirmed.append(call)
        else:
            self._committer.when_synced(call)
        self._committer.want_sync()
        self._committer.push()

    def confirm_with_turn(self, call: Callable[[LogFailed | None], None]) -> None:
        """The same, by the group that the next `flush` puts out: for what comes in the middle of a turn. The
        writer's thread would wake up beside it, and wait for the interpreter until the turn is over."""
        self._check()
        self._unconfirmed.append(call)

    def durable_end(self, queue: str) -> int:
        """Messages below this offset survive whatever happens; 0 where there is no such queue."""
        found = self._state.queues.get(queue)
        return found.synced_offset if found is not None else 0

    # --- now and then ----------------------------------------------------------------------------

    def tick(self, now_us: int) -> None:
        """Housekeeping, some times a second: late syncs, room on the disk, snapshots, timers."""
        if self._committer.failed is not None or self._closed:
            return
        # Added up from tick to tick: a clock that is set back must not put off a sync until it has caught up.
        self._unsynced_us += max(now_us - self._ticked_us, 0)
        self._ticked_us = now_us
        if self._sealer.lazy_us and self._unsynced_us >= self._sealer.lazy_us:
            self._unsynced_us = 0
            self._sealer.lazy_us = 0
            self._committer.want_sync()
        if not self._committer.waits_for_room:  # It could not be synced, and retention would wait for it.
            self._end_stages(now_us)
        self._state.sweep()
        self._committer.tick()
        self.flush(now_us)


def open_log(
    path: str,
    now_us: int,
    *,
    settings: LogSettings | None = None,
    policies: Policies | None = None,
    wake: Callable[[], None] | None = None,
) -> Log:
    """The log in a folder, with threads of its own. `wake` must get `poll` called on your loop."""
    call = wake if wake is not None else _nobody
    return Log.open(
        RealDisk(path),
        now_us,
        settings=settings,
        policies=policies,
        writer=ThreadWorker("penstock-writer", call),
        keeper=ThreadWorker("penstock-keeper", call),
    )


def _nobody() -> None:
    """For callers without a loop: they call `wait` or `poll` themselves."""
