"""LogState: everything that the log knows, in memory; and what each kind of block does to it.

A snapshot is this, written down; recovery is a snapshot and the blocks after it, applied one by
one. Whatever changes the state in a way that must outlive the process is a block.

The file is long because a block does the same to the state when it is written and when it is replayed, by the
same methods.
"""

import os
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from typing import Any

from penstock.log.adoption import Adoption, read_adoption
from penstock.log.block import (
    FLAG_DELAYED,
    FLAG_ELSEWHERE,
    FLAG_REPAIRED,
    FLAG_REPLY,
    KIND_CONTROL,
    KIND_MESSAGES,
    KIND_SETTLEMENTS,
    Header,
    read_control,
    read_messages,
)
from penstock.log.disk import Disk
from penstock.log.errors import LogDamaged, LogNewer
from penstock.log.info import ReaderInfo
from penstock.log.keys import Keys, kind_of
from penstock.log.ledger import read_rows
from penstock.log.queue import LogQueue
from penstock.log.repairs import (
    LAST_NAME,
    MARK,
    REPAIR_QUEUE_POLICY,
    STAGE_QUEUE,
    is_repair_queue,
    repair_queue_of,
    shown,
)
from penstock.log.results import Decision, Fate, Step
from penstock.log.segment import Segment
from penstock.log.segments import Segments
from penstock.log.stages import OpenStages, stage_of
from penstock.model.delays import Delays
from penstock.model.life import LIVES_ON, Event, Reason
from penstock.model.policy import Policies, QueuePolicy
from penstock.model.spans import Times
from penstock.model.timers import Timers

FORMAT = 1
FORMAT_STAGES = 2
"""From the first stage on. Behind every snapshot a control block says so: whoever does not know it stops."""

FORMAT_DELAYS = 3
"""From the first message on that is delayed, has headers, or was rejected with a reason in words."""

FORMAT_SHARES = 4
"""From the first transaction on that has stages in other logs, too."""

FORMAT_MOVES = 5
"""From the first messages on that were moved to another log."""

FORMAT_LAST = FORMAT_MOVES

STEPS_MAX = 100  # of the clock, that a queue remembers
SWEEP_ROWS = 200  # timers that are looked at in one go: a millisecond
AT_ONCE_US = 1  # a moment that is over in any case


@dataclass(slots=True)
class LogSettings:
    """How the log keeps its files."""

    segment_bytes: int = 64 * 1024 * 1024
    cache_bytes: int = 8 * 1024 * 1024
    block_bytes: int = 1024 * 1024  # a larger batch becomes several blocks
    at_once_bytes: int = 16 * 1024  # the loop itself writes what is not larger
    syncs_apart_us: int = 2000  # at least, where nobody waits for the next one
    interval_us: int = 50_000  # durability = interval: sync this often
    snapshot_blocks: int = 20_000  # a snapshot after this many blocks, so that a restart is fast
    reader_bytes_max: int = 10 * 1024**3  # what one reader may keep of the log for a queue; 0: no cap
    disk_bytes_reserve: int = 1024**3  # with less of it free, the disk is said to be almost full
    sharers: int = 1  # so many logs have the disk together: each keeps to its part of what is free
    stage_group_bytes: int = 1024 * 1024  # of stages that are written with one group
    stage_seconds: int = 3600  # how long a stage waits for its commit
    stages_bytes_max: int = 10 * 1024**3  # of all stages that wait


@dataclass(slots=True)
class Damage:
    """Stored bytes that are not what was written. Reported, set aside, never skipped in silence."""

    file: str
    position: int  # in the file
    queue: str  # empty where it is not known
    first: int
    end: int  # offsets; equal to `first` where no message is known to be lost
    text: str


_ENDS = frozenset({Event.ACKED, Event.REJECTED, Event.EXPIRED, Event.WITHDRAWN})
_NO_LETTER_MORE = _ENDS | {Event.REDRIVEN}

StoredPart = tuple[str, int, int, int]  # queue, first, end, opening
ReaderKey = tuple[str, str]  # its name, a queue


def lost_name(number: int, taken: Container[str]) -> str:
    """How a queue is called whose name is among damaged bytes: somebody may have called another one so."""
    name = f"unknown-{number}"
    while name in taken:
        name += "-lost"
    return name


def join_parts(before: list[StoredPart], parts: list[StoredPart]) -> list[StoredPart]:
    """All of them; where one begins at the end of its queue's last, they are one."""
    joined = list(before)
    last = {part[0]: index for index, part in enumerate(joined)}
    for queue, first, end, opening in parts:
        index = last.get(queue)
        if index is not None and joined[index][2:] == (first, opening):
            joined[index] = (queue, joined[index][1], end, opening)
        else:
            last[queue] = len(joined)
            joined.append((queue, first, end, opening))
    return joined


def without(parts: list[StoredPart], names: Container[str]) -> list[StoredPart]:
    """The same parts, where queues of these names are no more: nothing is left of what was stored there."""
    if not any(part[0] in names for part in parts):
        return parts
    return [(part[0], 0, 0, part[3]) if part[0] in names else part for part in parts]


class LogState:
    def __init__(self, disk: Disk, settings: LogSettings, policies: Policies) -> None:
        self.disk = disk
        self.settings = settings
        self.policies = policies
        self.times = Times()
        self.owns: Callable[[str], bool] | None = None  # whether a queue is of this log; None: all are
        self.reset()

    def reset(self) -> None:
        """Nothing is known."""
        self.segments = Segments(self.disk, self.settings.cache_bytes)
        self.timers: Timers[int] = Timers()
        self.delays = Delays()
        # By all queues: made once.
        self._asked = (
            self.segments.block_at,
            self.timers.add,
            self.delays.add,
            self.unreadable,
            self.times,
        )
        self.format = 0  # that is said in the log; 0: none
        self.queues: dict[str, LogQueue] = {}
        self.by_number: dict[int, LogQueue] = {}
        self.begins_late = False  # what is missing cannot be told from what retention took
        self.number_last = 0  # the highest that a queue has had: numbers are never given twice
        self.deleted: set[int] = set()  # queues that a block which was replayed says are no more
        self.transactions: dict[str, list[StoredPart]] = {}  # in the order of their commits
        self.fingerprints: dict[str, str] = {}  # of those of which one was told
        self.decisions: dict[str, Decision] = {}  # of those that have parts in other logs
        self._keys_in: dict[str, set[str]] = {}  # by queue: of transactions with messages there
        self._keys: dict[str, Keys] = {}  # by their kinds
        self.unfinished: dict[str, tuple[int, list[StoredPart]]] = {}  # steps that are stored, and where
        self.stages = OpenStages()
        self.gone_end = 0  # behind the last block that says that a queue is no more
        self.rows_gone_end = 0  # the same of a stage, and its rows
        self.redriving = 0  # commits that the log has and the rooms have not: no snapshot is taken
        self._rows_lost: list[tuple[int, int, str]] = []  # of the stage queue, and why
        self.readers: dict[ReaderKey, ReaderInfo] = {}
        self.steps: tuple[tuple[int, int], ...] = ()  # positions where the time was put forward, and how far
        self.changed: dict[int, LogQueue] = {}  # since somebody looked, who finds them in one of the next two
        self._untold: dict[int, LogQueue] = {}  # since the last `take_changed`
        self._unsaved: dict[int, LogQueue] = {}  # that no snapshot has looked at since
        self.ended: dict[int, LogQueue] = {}  # queues with fates that `expire` has to tell
        self.repair_queues = 0  # how many of the queues are repair queues
        self.damage: list[Damage] = []
        self._news: list[Damage] = []  # damage that is not in the log yet
        self.log = int.from_bytes(os.urandom(3), "little")
        self.opening = 0
        self.gathered_bytes = 0  # of batches that are accepted and in no block yet, as they will be stored

    def declare(self, number: int, name: str) -> LogQueue:
        """A queue that is there from now on."""
        other = self.queues.pop(name, None)
        if other is not None:  # It was given this name because its own is lost: it gives way.
            other.name = lost_name(other.number, (*self.queues, name))
            self.queues[other.name] = other
            payloads = other.repair_queue
            if payloads is not None:  # They go with it: nobody else's end is theirs.
                del self.queues[payloads.name]
                payloads.name = repair_queue_of(other.name)
                self.queues[payloads.name] = payloads
        queue = LogQueue(number, name, self.policy_of(name), self.log, *self._asked)
        if name == STAGE_QUEUE:
            self.segments.stage_queue = number
        if is_repair_queue(name):
            self.repair_queues += name not in self.queues
            owner = self.queues.get(name.removeprefix(MARK))
            if owner is not None:
                owner.repair_queue = queue
        else:
            # Where damage has taken a declaration, it may be told again behind that of the repair queue.
            queue.repair_queue = self.queues.get(repair_queue_of(name))
        self.queues[name] = queue
        self.by_number[number] = self.changed[number] = queue
        self.number_last = max(self.number_last, number)
        return queue

    def delete(self, numbers: Sequence[int]) -> list[int]:
        """These queues are no more, nor are their repair queues; the numbers of all of them.

        Their names are free: what is called so next has another number. What other parts of the state say
        of them by name goes, so that nobody takes it for something about the next one.
        """
        self.number_last = max((self.number_last, *numbers))  # The declaration of one may be damaged.
        found = [self.queues.get(LAST_NAME), *map(self.by_number.get, numbers)]
        found += [queue.repair_queue for queue in found if queue is not None]
        gone = {it.number: it for it in found if it is not None and it.number in self.by_number}
        for number, queue in gone.items():
            del self.by_number[number], self.queues[queue.name]
            self.repair_queues -= is_repair_queue(queue.name)
            for waiting in (self.changed, self._untold, self._unsaved, self.ended):
                waiting.pop(number, None)
            self.times.take(number)
        self.segments.drop(gone)
        if self.number_last not in self.by_number:
            self.declare(self.number_last, LAST_NAME)
        names = {queue.name for queue in gone.values()}
        self.readers = {key: reader for key, reader in self.readers.items() if reader.queue not in names}
        for name in names:
            for key in self._keys_in.pop(name, ()):
                if key in self.transactions:
                    self.transactions[key] = without(self.transactions[key], names)
        for key, (steps, parts) in self.unfinished.items():
            self.unfinished[key] = steps, without(parts, names)
        for damage in self.damage:
            if damage.queue in names:
                damage.queue, damage.first, damage.end = "", 0, 0
        return list(gone)

    def unknown_in(self, segment: Segment) -> set[int]:
        """Queues that were deleted, of which a segment has something that was copied just before."""
        return {number for number in segment.spans if number not in self.by_number}

    def policy_of(self, name: str) -> QueuePolicy:
        return REPAIR_QUEUE_POLICY if is_repair_queue(name) else self.policies.for_queue(name)

    def remember(self, key: str, parts: list[StoredPart], fingerprint: str = "") -> None:
        """A transaction that is whole."""
        if key not in self.transactions:
            for forgotten in self._keys_of(key).add(key):
                for part in self.transactions.pop(forgotten):
                    self._forget_in(part[0], forgotten)
                self.fingerprints.pop(forgotten, None)
                if forgotten in self.decisions and self.decisions[forgotten].stored is not None:
                    del self.decisions[forgotten]
        self.transactions[key] = parts
        for queue, first, end, _ in parts:
            if first < end:
                self._keys_in.setdefault(queue, set()).add(key)
        if fingerprint:
            self.fingerprints[key] = fingerprint

    def finish(self, key: str, stored: list[list[Any]]) -> None:
        """All other logs have stored what was decided about them."""
        decision = self.decisions.pop(key, None)
        if decision is not None and key in self.transactions:
            self.decisions[key] = decision._replace(stored=stored)

    def _forget_in(self, queue: str, key: str) -> None:
        keys = self._keys_in.get(queue)
        if keys is not None:
            keys.discard(key)
            if not keys:
                del self._keys_in[queue]

    def _keys_of(self, key: str) -> Keys:
        kind = kind_of(key)
        found = self._keys.get(kind)
        if found is None:
            found = self._keys[kind] = Keys(kind)
        return found

    def newest_key(self, series: str) -> str | None:
        """Of the transactions whose keys begin so, up to the last slash, the one that was committed last."""
        return self._keys_of(series).newest(series)

    def steps_of(self, key: str) -> int:
        """How many steps of a transaction are stored that has not had its last one."""
        return self.unfinished[key][0] if key in self.unfinished else 0

    def remember_step(
        self, key: str, step: Step, parts: list[StoredPart], fingerprint: str = ""
    ) -> list[StoredPart]:
        """One more step of a transaction; what is stored of it, and with the last one of them all."""
        _, before = self.unfinished.pop(key, (0, []))
        together = join_parts(before, parts)
        if step.last:
            self.remember(key, together, fingerprint)
            return together
        self.unfinished[key] = (step.number + 1, together)
        return parts

    def hold(self, reader: ReaderInfo) -> None:
        self.readers[reader.name, reader.queue] = reader

    def release(self, name: str, queue: str | None) -> bool:
        """Forget a reader, in one queue or in all. False where there was none."""
        if queue is not None:
            return self.readers.pop((name, queue), None) is not None
        kept = {key: reader for key, reader in self.readers.items() if key[0] != name}
        found = len(kept) < len(self.readers)
        self.readers = kept
        return found

    def step(self, by_us: int, position: int) -> None:
        """The time was put forward: TTLs, leases and what retention keeps last as long as they would have."""
        self.steps = (*self.steps[-STEPS_MAX:], (position, by_us))
        for number, queue in self.by_number.items():
            # By what is in no doubt when this is replayed: what is filed for a time was looked at meanwhile.
            lowest, tail = queue.pending.lowest(), queue.pending.tail
            if lowest < tail:
                self.changed[number] = queue
                steps = [it for it in queue.steps[-STEPS_MAX:] if lowest < it[0]]
                queue.steps = (*steps, (tail, by_us))
        self.stages.step(by_us)
        for reader in list(self.readers.values()):
            self.hold(replace(reader, lease_until_us=reader.lease_until_us + by_us))

    def sweep(self) -> None:
        """Some timers of messages that are gone go, and of messages that are not delayed any more."""
        self.timers.sweep(self._has_unsettled, SWEEP_ROWS)
        self.delays.sweep(self._has_delayed, SWEEP_ROWS)

    def _has_unsettled(self, number: int, first: int, end: int) -> bool:
        queue = self.by_number.get(number)
        return queue is not None and queue.pending.count_unsettled(first, end) != (0, 0)

    def _has_delayed(self, number: int, first: int, end: int) -> bool:
        queue = self.by_number.get(abs(number))
        return queue is not None and queue.pending.delayed.count(first, end) != (0, 0)

    def take_changed(self) -> list[str]:
        """The queues that something has happened to since the last call, in the order of their numbers."""
        self._spread()
        changed = [self._untold[number].name for number in sorted(self._untold)]
        self._untold.clear()
        return shown(changed)

    def take_unsaved(self) -> dict[int, LogQueue]:
        """The same for a snapshot, which takes those out that it has looked at."""
        self._spread()
        return self._unsaved

    def _spread(self) -> None:
        self._untold |= self.changed
        self._unsaved |= self.changed
        self.changed.clear()

    # --- damage that is found while the log is open ------------------------------------------------

    def unreadable(self, queue: LogQueue, first: int, end: int, error: LogDamaged) -> int:
        """Living messages, taken out of their room, that cannot be read; where the readable ones begin."""
        _, _, missing_end = self.segments.missing(queue.number, first)
        end = min(end, missing_end)
        distance = queue.repairs.get(first)
        if distance is not None and queue.repair_queue is not None:
            # Those whose payloads are in another block may be readable.
            _, _, missing_end = self.segments.missing(queue.repair_queue.number, first + distance)
            end = min(end, missing_end - distance)
        self.report(queue, first, end, error)
        return end

    def report(self, queue: LogQueue, first: int, end: int, error: LogDamaged) -> None:
        """Messages that cannot be read: nobody gets them any more, and that is written down."""
        segment, position, _ = self.segments.missing(queue.number, first)
        self.lose(queue, first, end)
        self.changed[queue.number] = queue
        for a, b, _ in queue.asking.cut(first, end) if queue.asking else ():
            # Whoever asked is told that no answer will come.
            queue.tell((Fate(a, b, Event.WITHDRAWN, Reason.UNDELIVERABLE),))
            self.ended[queue.number] = queue
        self.tell(
            Damage(
                self.disk.where(segment.name) if segment is not None else "",
                position - segment.base if segment is not None else 0,
                queue.name,
                first,
                end,
                f"queue {queue.name!r}: offsets {first} to {end - 1} cannot be read, so they are not "
                f"delivered: {error}",
            )
        )

    def lose(self, queue: LogQueue, first: int, end: int) -> None:
        """Messages are out of reach, and what was kept for them goes."""
        queue.pending.lift(first, end)
        queue.weight.forget()
        if queue.repairs:
            queue.let_go_of_repairs(first, end)
        if queue.whys:
            queue.whys.cut(first, end)

    def messages_missing(self, queue: LogQueue, first: int, end: int) -> None:
        """A reader found no messages between two offsets: right, where they were settled and trimmed."""
        lost = queue.pending.unsettled(first, min(end, queue.offset_start))
        lost.append((max(first, queue.offset_start), end))
        for a, b in lost:
            while a < b:
                _, _, stop = self.segments.missing(queue.number, a)
                self.report(queue, a, min(b, stop), LogDamaged("no valid block stands where they should be"))
                a = min(b, stop)

    def events_missing(self, queue: LogQueue, first: int, end: int) -> None:
        """A reader found that the record of these events is damaged."""
        text = f"queue {queue.name!r}: events {first} to {end - 1} cannot be read"
        self.tell(Damage("", 0, queue.name, 0, 0, text))

    def report_rows(self) -> None:
        """Rows of the stage queue that recovery has not found: whose stages and messages they are."""
        for first, end, why in self._rows_lost:
            self.lose_rows(first, end, f"row {first} of the stages {why}")
        self._rows_lost.clear()

    def lose_rows(self, first: int, end: int, why: str) -> None:
        """Stages with one of these rows cannot be committed; messages that they have become are out of
        reach."""
        self.stages.lose(first, end, why)
        for number, a, b in list(self.segments.adopters(first, end)):
            queue = self.by_number.get(number)
            if queue is None:  # It was deleted.
                continue
            runs = queue.pending.unsettled(a, b)
            if is_repair_queue(queue.name):
                owner = self.queues.get(queue.name.removeprefix(MARK))
                repairs = list(owner.repairs) if owner is not None else []
                runs = [(max(c, a - by), min(d, b - by)) for c, d, by in repairs if c < b - by and a - by < d]
                queue = owner or queue
            for lo, hi in runs:
                text = f"queue {queue.name!r}: offsets {lo} to {hi - 1} were staged, and {why}"
                self.tell(Damage("", 0, queue.name, lo, hi, text))
                self.lose(queue, lo, hi)

    def needed_by(self, first: int, end: int) -> list[str]:
        """Who needs some rows of the stage queue, in words."""
        adopters = [(self.by_number.get(number), a, b) for number, a, b in self.segments.adopters(first, end)]
        stages = [stage.info for stage in self.stages if stage.first < end and first < stage.end]
        return [
            *(f"queue {it.name!r}, offsets {a} to {b - 1}" for it, a, b in adopters if it is not None),
            *(f"transaction {info.key!r}, stage {info.stage!r}" for info in stages),
        ]

    def tell(self, damage: Damage) -> None:
        """Add to the report, and to the log, what is not in it yet."""
        for known in self.damage:
            covers = known.queue == damage.queue and known.first <= damage.first and damage.end <= known.end
            if covers and (damage.first < damage.end or known.text == damage.text):
                return
        self.damage.append(damage)
        self._news.append(damage)

    def take_news(self) -> list[Damage]:
        """Damage found since the last call, which is to be written down."""
        news, self._news = self._news, []
        return news

    # --- replaying -------------------------------------------------------------------------------

    def apply(self, header: Header, body: memoryview) -> None:
        """What a block of the log says has happened."""
        # The block that says so may be damaged, and no number of an opening may be used twice.
        self.opening = max(self.opening, header.opening)
        if header.kind == KIND_MESSAGES:
            self._apply_messages(header, body)
        elif header.kind == KIND_SETTLEMENTS:
            self._apply_settlements(header, body)
        else:
            self._apply_control(read_control(body), header)

    def _queue_of(self, header: Header) -> LogQueue:
        queue = self.by_number.get(header.queue)
        if queue is None:
            # Its declaration is among bytes that are damaged. The messages are worth more than the name.
            queue = self.declare(header.queue, lost_name(header.queue, self.queues))
            self.damage.append(
                Damage("", header.position, queue.name, 0, 0, f"the name of queue {header.queue} is lost")
            )
        return queue

    def _check_events(self, queue: LogQueue, header: Header, lost: int = 0) -> None:
        """Count on behind this block. What should have come before it, and `lost` of its own, is told."""
        before = header.first_event + lost
        if header.first_event > queue.next_event and not self.begins_late:
            lost += header.first_event - queue.next_event
        if lost and queue.number != self.segments.stage_queue:  # Of rows, it is told whose they are.
            self.damage.append(
                Damage(
                    "",
                    header.position,
                    queue.name,
                    0,
                    0,
                    f"queue {queue.name!r}: {lost} events before event {before} are lost; "
                    f"messages that they settled will be delivered again",
                )
            )
        queue.next_event = header.first_event + header.event_count

    def pass_over(self, header: Header) -> None:
        """A block of which only the header can be read: what it held is lost.

        Its offsets and event numbers have been given and may have been read: they are not given again.
        """
        if header.kind == KIND_CONTROL:
            return
        queue = self._queue_of(header)
        if header.kind == KIND_MESSAGES:
            self._check_events(queue, header)
            self._lost_before(queue, header.position, header.first_offset)
            self._lost_before(queue, header.position, header.offset_end)
        else:
            self._check_events(queue, header, lost=header.event_count)

    def _lost_before(self, queue: LogQueue, position: int, offset: int) -> None:
        """Messages between the tail and `offset` are not there."""
        tail = queue.pending.tail
        if tail >= offset:
            return
        queue.pending.tail = queue.next_stored = offset
        if queue.number == self.segments.stage_queue:
            self._rows_lost.append((tail, offset, "is lost"))
            return
        text = f"queue {queue.name!r}: offsets {tail} to {offset - 1} are lost"
        self.damage.append(Damage("", position, queue.name, tail, offset, text))

    def _go_on_at(self, queue: LogQueue, position: int, offset: int) -> None:
        """A block speaks of messages up to `offset`, so they have been given, and are not given again."""
        if self.begins_late and queue.pending.tail < offset:
            queue.offset_start = queue.pending.tail = queue.next_stored = offset
        self._lost_before(queue, position, offset)

    def _apply_messages(self, header: Header, body: memoryview) -> None:
        queue = self._queue_of(header)
        self._check_events(queue, header)
        pending = queue.pending
        self._go_on_at(queue, header.position, header.first_offset)
        if queue.number == self.segments.stage_queue:
            pending.tail = queue.next_stored = header.offset_end
            return
        pending.accept(header.count)
        queue.next_stored = pending.tail
        if header.flags & FLAG_DELAYED:
            self._apply_delays(queue, header, body)
        if header.flags & FLAG_ELSEWHERE:
            adoption = read_adoption(header, body) if body else Adoption(header, [])
            for first, run in zip(adoption.ends, adoption.runs, strict=False):
                if run.expires_us:
                    self.timers.add(run.expires_us, queue.number, first, first + run.length)
            return
        if header.flags & FLAG_REPLY:
            queue.ask(header.first_offset, header.offset_end)
        if header.expires_min_us:
            self.timers.add(header.expires_min_us, queue.number, header.first_offset, header.offset_end)

    def _apply_delays(self, queue: LogQueue, header: Header, body: memoryview) -> None:
        """Where the block does not say which of its messages are delayed, a look at them will."""
        due: Sequence[int] | None = None
        if body and not header.flags & FLAG_ELSEWHERE:
            due = read_messages(header, body).due
        queue.delay_new(header.first_offset, due if due is not None else repeat(1, header.count))
        at_us = min(filter(None, due), default=0) if due is not None else AT_ONCE_US
        if at_us:
            self.delays.add(at_us, -queue.number, header.first_offset, header.offset_end)

    def _apply_settlements(self, header: Header, body: memoryview) -> None:
        queue = self._queue_of(header)
        self._check_events(queue, header)
        for row in read_rows(header, body):
            if row.end > queue.pending.tail:
                self._go_on_at(queue, header.position, row.end)
            queue.pending.replay(
                row.event, row.first, row.end, row.reason, header.time_us, row.note, row.tail
            )
            if row.note.expires_us > 0:
                self.timers.add(row.note.expires_us, queue.number, row.first, row.end)
            if row.event is Event.DELAYED:
                self.delays.add(row.tail, queue.number, row.first, row.end)
            if queue.asking and row.event not in LIVES_ON:
                queue.asking.cut(row.first, row.end)
            if queue.repairs and row.event in _ENDS:
                queue.repairs.cut(row.first, row.end)
            if queue.whys and row.event in _NO_LETTER_MORE:
                queue.whys.cut(row.first, row.end)
            if row.why and row.event is Event.DEAD:
                for first, end, _ in queue.pending.dead.places.find(row.first, row.end):
                    queue.put_why(first, end, row.why)
        if header.flags & FLAG_REPAIRED:
            at = header.expires_min_us
            for row in read_rows(header, body):
                for first, end in queue.pending.unsettled(row.first, row.end):
                    queue.put_repair(first, end, at - row.first)
                at += row.end - row.first
            if queue.repair_queue is not None:
                self._go_on_at(queue.repair_queue, header.position, at)

    def _stage_queue(self, number: int) -> LogQueue:
        """The queue with the rows of stages. Its declaration may be damaged: then it has another name."""
        queue = self.by_number.get(number)
        if queue is None:
            return self.declare(number, STAGE_QUEUE)
        if queue.name != STAGE_QUEUE:
            del self.queues[queue.name]
            queue.name, queue.policy = STAGE_QUEUE, REPAIR_QUEUE_POLICY
            self.queues[STAGE_QUEUE] = queue
            self.segments.stage_queue = number
            self.repair_queues += 1
            queue.pending.lift(0, queue.pending.tail)
        return queue

    def _apply_control(self, fields: dict[str, Any], header: Header) -> None:
        operation = fields["op"]
        if operation == "opening":
            if fields["log"] != self.log:
                self.log = fields["log"]  # It is another log from here on: a restored one.
                for known in self.by_number.values():
                    known.renumber(self.log)
        elif operation == "queue":
            if fields["number"] not in self.by_number:
                self.declare(fields["number"], fields["name"])
        elif operation == "delete":
            self.deleted.update(self.delete(fields["numbers"]))
        elif operation == "pause":
            queue = self.queues.get(fields["queue"])
            if queue is not None:  # its declaration may be damaged
                queue.paused = fields["paused"]
        elif operation == "reader":
            self.hold(ReaderInfo(**fields["reader"]))
        elif operation == "reader-gone":
            self.release(fields["name"], fields.get("queue"))
        elif operation == "transaction":
            parts = [(q, first, end, header.opening) for q, first, end in fields["parts"]]
            for name, _, end, _ in parts:  # Nothing of the block with them may be left, and none behind it.
                if name in self.queues:
                    self._go_on_at(self.queues[name], header.position, end)
            fingerprint = fields.get("fingerprint", "")
            if fields["key"]:
                self.stages.drop(fields["key"])
            if "step" in fields:
                self.remember_step(fields["key"], Step(fields["step"], fields["last"]), parts, fingerprint)
            elif fields["key"]:
                self.remember(fields["key"], parts, fingerprint)
            if "shards" in fields:
                self.decisions[fields["key"]] = Decision(fields["shards"], None, fields.get("rows"))
        elif operation == "finished":
            self.finish(fields["key"], fields["stored"])
        elif operation == "prepared":
            self.stages.prepare(fields["key"], fields["attempt"])
        elif operation == "unprepared":
            self.stages.unprepare(fields["key"], fields["attempt"])
        elif operation == "stage":
            stage = stage_of(fields["stage"])
            self._go_on_at(self._stage_queue(fields["queue"]), header.position, stage.end)
            self.stages.put(stage)
        elif operation == "stage-gone":
            self.stages.drop(fields["key"])
        elif operation == "format" and fields["format"] <= FORMAT_LAST:
            self.format = max(self.format, fields["format"])
            if fields["queue"]:
                self._stage_queue(fields["queue"])
        elif operation == "step":
            self.step(fields["by_us"], header.position)
        elif operation == "damage":
            self.damage.append(Damage(**fields["damage"]))
            queue = self.queues.get(fields["damage"]["queue"])
            if queue is not None:
                self.lose(queue, fields["damage"]["first"], fields["damage"]["end"])
        else:
            said = f"{operation} {fields['format']}" if operation == "format" else repr(operation)
            raise LogNewer(
                f"the block at log position {header.position} says {said}, which this version does not know"
            )


def reader_fields(reader: ReaderInfo) -> dict[str, Any]:
    """What is written down of a reader. Whether it is capped, and where its queue ends, is found out anew."""
    fields = asdict(reader)
    del fields["capped"], fields["end"]
    return fields


def damage_fields(damage: Damage) -> dict[str, Any]:
    return asdict(damage)
