"""Operator: what people and programs do to queues from outside, not as senders or consumers.

The broker serves ports; this serves whoever looks at queues and turns their knobs. Both have the
same log below, so what is done here is seen there at once: what is resumed or redriven is handed
out, whoever waits for an answer to a request that is purged is told.

Rules that always hold:
  * Nothing here takes long. What may meet a million runs of messages (purge, redrive) is a generator:
    every step of it is short and goes to the disk by itself, and other work may go on between two of them.
    It takes what was there at its mark (`Log.mark`) and is still there when its turn comes, so it ends,
    however much happens meanwhile; and the same again, after a crash too, goes on where it was.
  * A round of `changed_rows` ends too: what changes while its rows are handed out is for the next one.

How it fails: `QueueNameError` and `LogError` as the log raises them; `Draining` where the broker
is about to stop and takes nothing new in; `TooFast` where it is asked for too many queues at once, or for
stages while the log does not take those that came before.
"""

from array import array
from collections.abc import Collection, Iterator, Sequence
from heapq import nlargest
from itertools import chain, islice
from operator import itemgetter
from typing import Any, Final, NamedTuple

from penstock.broker.broker import Broker
from penstock.broker.doors import Pace
from penstock.broker.ports import Attached
from penstock.errors import PenstockError
from penstock.log.errors import LogRefused
from penstock.log.info import QueueInfo, ReaderInfo
from penstock.log.log import Log
from penstock.log.results import Begun, Receipt, Rows, Shares, StageReceipt, TransactionReceipt
from penstock.model.batch import Batch
from penstock.model.life import Event, Reason, State
from penstock.model.pending import Mark
from penstock.model.timers import SECOND_US
from penstock.model.words import Ranges

RUNS_A_STEP: Final = 100
"""How many runs of messages one step of a purge or redrive moves: one or two milliseconds."""

MESSAGES_A_STEP: Final = 10_000
"""How many messages one step of a purge takes where somebody waits for answers: each may be a request."""

READER_QUEUES_MAX: Final = 1000

HOLDERS_LOOKED_AT: Final = 1000
HOLDERS_MAX: Final = 5
"""So many of those who hold messages of a queue are named."""

BLOCKED_MAX: Final = 100

STAGES_BYTES_WAITING: Final = 64 << 20
"""With so much of stages in memory, no more come in. Callers ask for less, unless some have given up waiting
for a disk that is slow, or were ended: what they have sent is still there."""

DRAINING: Final = "the broker is stopping and accepts nothing new; try again when it is back"


class Draining(PenstockError):
    """The broker is about to stop: send to it when it is up again."""


class TooFast(PenstockError):
    """More is asked for than can be done now: try again in a second."""


class QueueRow(NamedTuple):
    """A queue as a list of queues shows it."""

    info: QueueInfo
    consumers: int  # of its messages and of its dead letters
    counts: dict[tuple[Event, Reason], int]
    bytes_max: int  # max-bytes of its policy; 0: no bound

    @property
    def delivered(self) -> int:
        return self.counts.get((Event.HELD, Reason.NONE), 0)


class Operator:
    def __init__(self, broker: Broker, log: Log) -> None:
        self._broker = broker
        self._log = log
        self._pace = Pace()  # of the queues that all who send here make
        self._round: list[str] = []  # names of queues whose rows are still to be handed out

    # --- messages --------------------------------------------------------------------------------

    def append(self, queue: str, batch: Batch, now_us: int, receipt: Receipt) -> None:
        """Messages for a queue. No room is an error here: whoever sends waits by itself, and tries again."""
        self._check_open((queue,), now_us)
        self._log.append(queue, batch, now_us, receipt)
        self._broker.stir(queue)

    def transact(
        self, key: str, parts: Sequence[tuple[str, Batch]], now_us: int, receipt: TransactionReceipt
    ) -> None:
        """Messages for several queues, all or nothing. See the log for keys."""
        queues = {queue for queue, _ in parts}
        self._check_open(queues, now_us)
        for _, batch in parts:
            if batch.moves is not None:
                self._log.check_same(batch.source, batch.identity)
        for queue, fate in self._log.transact(key, parts, now_us, receipt):
            self._broker.purged(queue, (fate,))
        self._stir_all(queues)

    def stage(
        self,
        key: str,
        parts: Sequence[tuple[str, Batch]],
        now_us: int,
        receipt: StageReceipt,
        *,
        totals: Sequence[Any],
        was: str = "",
    ) -> None:
        """A part of a transaction. Queues are made when it is committed, but for those that never can be."""
        if self._broker.is_draining:
            raise Draining(DRAINING)
        self._broker.doors.check_names({queue for queue, _ in parts})
        if self._log.stages_waiting_bytes > STAGES_BYTES_WAITING:
            raise TooFast(
                f"transaction {key!r}: {self._log.stages_waiting_bytes} bytes of stages that came before are "
                f"not in the log yet; try again in a second"
            )
        self._log.stage(key, parts, now_us, receipt, totals=totals, was=was)
        self._broker.wake()

    def commit(
        self,
        key: str,
        stage_ids: Sequence[str],
        now_us: int,
        receipt: TransactionReceipt,
        begun: Begun,
        shares: Shares | None = None,
        *,
        decided: bool = False,
        rows: Rows = None,
    ) -> Iterator[None]:
        """The messages of these stages, all or nothing, in steps. See the log for keys."""
        queues = self._log.staged_queues(stage_ids)
        if not decided:  # No no would be heard any more.
            self._check_open(queues, now_us)
        yield from self._log.committing(
            key, stage_ids, now_us, receipt, begun, shares, decided=decided, rows=rows
        )
        self._stir_all(queues)

    def prepare(self, key: str, attempt: str, stage_ids: Sequence[str], now_us: int) -> list[list[Any]]:
        """The messages of these stages can be stored, whenever the log of their key says so."""
        self._check_open(self._log.staged_queues(stage_ids), now_us)
        return self._log.prepare(key, attempt, stage_ids, now_us)

    def move(
        self,
        key: str,
        attempt: str,
        source: str,
        identity: str,
        offsets: "array[int]",
        stages: dict[str, list[str]],
        now_us: int,
        receipt: TransactionReceipt,
    ) -> None:
        """Messages leave their queue for another log. See the log."""
        self._check_open((), now_us)
        self._log.check_same(source, identity)
        fates = self._log.move(key, attempt, source, offsets, stages, now_us, receipt)
        self._broker.purged(source, fates)

    def _stir_all(self, queues: Collection[str]) -> None:
        for queue in queues:
            self._broker.stir(queue)
        self._broker.wake()

    def _check_open(self, queues: Collection[str], now_us: int) -> None:
        """Raise unless messages may be sent to all of these."""
        if self._broker.is_draining:
            raise Draining(DRAINING)
        doors = self._broker.doors
        doors.check_names(queues)
        new = [queue for queue in queues if not self._log.has_queue(queue)]
        if new and not self._pace.allows(len(new), doors.new_per_second, now_us):
            raise TooFast(
                f"queue {new[0]!r}: {doors.new_per_second} queues were made over HTTP within a second, the "
                f"limit of queues-new-per-second; try again in a second"
            )

    # --- knobs -----------------------------------------------------------------------------------

    def pause(self, queue: str, paused: bool, now_us: int) -> None:
        """Hand out nothing of a queue, or go on. Who waits for a message goes on waiting.

        A queue that has had no message yet can be paused where somebody waits for one.
        """
        if self._broker.doors.consumer_count(queue):
            self._log.declare(queue, now_us)
        self._log.pause(queue, paused, now_us)
        self._broker.stir(queue)

    def purge(
        self, queue: str, now_us: int, *, dead: bool = False, mark: Mark | None = None
    ) -> Iterator[int]:
        """Take out everything that is ready, or dead, and in nobody's hands; step by step, how many."""
        identity, mark = self._log.describe(queue).identity, mark or self._log.mark(queue)
        while True:
            self._log.check_same(queue, identity)  # Much may happen between two steps.
            limit = MESSAGES_A_STEP if not dead and self._broker.requests.is_asked(queue) else None
            fates = self._log.purge(queue, now_us, dead=dead, limit=limit, runs_max=RUNS_A_STEP, mark=mark)
            if not fates:
                return
            self._broker.purged(queue, fates)
            yield sum(fate.end - fate.first for fate in fates)

    def withdraw(self, queue: str, now_us: int, ranges: Ranges) -> Iterator[int]:
        """Take out what of these ranges is in nobody's hands, dead or not; step by step, how many."""
        identity, tail = self._log.describe(queue).identity, self._log.mark(queue)[0]
        for portion in self._portions(queue, ranges, tail, None):
            self._log.check_same(queue, identity)
            fates = self._log.withdraw_free(queue, portion, Reason.OPERATOR, now_us)
            self._broker.purged(queue, fates)
            yield sum(fate.end - fate.first for fate in fates)

    def delete(self, queue: str, now_us: int, *, force: bool = False) -> QueueInfo:
        """A queue is no more, with all that is in it; how it stood. Refused while somebody consumes it."""
        info, consumers = self._log.describe(queue), self._broker.doors.consumer_count(queue)
        if (consumers or info.held) and not force:
            raise LogRefused(
                f"queue {queue!r} has {consumers} consumers, who hold {info.held} messages: stop them, or "
                f"delete it with force"
            )
        self._broker.delete((queue,), now_us)
        return info

    def redrive(
        self,
        queue: str,
        now_us: int,
        *,
        reason: Reason | None = None,
        ranges: Ranges | None = None,
        limit: int | None = None,
        mark: Mark | None = None,
    ) -> Iterator[int]:
        """Dead letters back into the queue, first died first; step by step, how many.

        With `ranges`, the order is that of death within one step only.
        """
        identity, mark = self._log.describe(queue).identity, mark or self._log.mark(queue)
        left = mark[0] if limit is None else limit
        portions = self._portions(queue, ranges, mark[0], State.DEAD) if ranges is not None else None
        while left > 0:
            self._log.check_same(queue, identity)
            portion = next(portions, None) if portions is not None else None
            if portions is not None and portion is None:
                return
            fates = self._log.redrive(
                queue, now_us, reason=reason, ranges=portion, limit=left, runs_max=RUNS_A_STEP, mark=mark
            )
            count = sum(fate.end - fate.first for fate in fates)
            if portion is None and not count:
                return
            left -= count
            self._broker.stir(queue)
            yield count

    def _portions(self, queue: str, ranges: Ranges, tail: int, only: State | None) -> Iterator[Ranges]:
        """The ranges in parts, in each of which there are no more than RUNS_A_STEP runs of messages, and no
        more than MESSAGES_A_STEP where somebody waits for answers."""
        portion: Ranges = []
        room = RUNS_A_STEP
        for first, end in ranges:
            end = min(end, tail)
            while first < end:
                if end - first <= room:
                    portion.append((first, end))
                    room -= end - first
                    break
                if portion:
                    yield portion
                    portion, room = [], RUNS_A_STEP
                else:
                    stop = self._log.states(queue, first, end, RUNS_A_STEP, only).next
                    if only is None and self._broker.requests.is_asked(queue):
                        stop = min(stop, first + MESSAGES_A_STEP)
                    yield [(first, stop)]
                    first = stop
        if portion:
            yield portion

    # --- readers ---------------------------------------------------------------------------------

    def hold_reader(
        self,
        name: str,
        view: str,
        positions: dict[str, int],
        lease_seconds: float,
        now_us: int,
        *,
        readers_max: int,
        keep_others: bool = False,
    ) -> None:
        """A reader is at these positions, and reads no other queue any more, unless it keeps others."""
        if not positions or len(positions) > READER_QUEUES_MAX:
            raise LogRefused(f"reader {name!r} has {len(positions)} positions; use 1 to {READER_QUEUES_MAX}")
        log = self._log
        # Of the archiver, which holds every queue and moves often, only these are looked at.
        reading = log.readers(positions if keep_others else None)
        names = {reader.name for reader in reading if reader.lease_until_us > now_us}
        if keep_others and name not in names:
            names = {reader.name for reader in log.readers() if reader.lease_until_us > now_us}
        if name not in names and len(names) >= readers_max:
            raise LogRefused(
                f"reader {name!r}: there are {len(names)} readers already, the limit of [http] readers-max; "
                f"release one, or let its lease end"
            )
        for queue in positions:
            log.describe(queue)  # which says no before anything is changed
        lease_until_us = now_us + round(lease_seconds * SECOND_US)
        for queue, position in positions.items():
            log.hold_retention(ReaderInfo(name, queue, view, position, lease_until_us), now_us)
        for reader in reading:
            if not keep_others and reader.name == name and reader.queue not in positions:
                log.release_retention(name, now_us, queue=reader.queue)
        self._broker.wake()

    def release_reader(self, name: str, now_us: int) -> None:
        self._log.release_retention(name, now_us)
        self._broker.wake()

    # --- looking ---------------------------------------------------------------------------------

    def row(self, queue: str) -> QueueRow:
        return QueueRow(
            self._log.describe(queue),
            self._broker.doors.consumer_count(queue),
            self._log.counts(queue),
            self._log.policies.for_queue(queue).max_bytes,
        )

    def holders(self, queue: str) -> list[tuple[str, int]]:
        """Who holds messages of a queue, by name, and how many: those with the most."""
        doors = self._broker.doors.by_queue.get(queue)
        consumers = doors.living.consumers.everybody() if doors is not None else ()
        attached = self._broker.ports.attached
        # Callers over HTTP consume while they wait for messages, and hold them after that.
        ports = chain(consumers, self._broker.taking.takers)
        found = dict.fromkeys(islice(ports, HOLDERS_LOOKED_AT))
        holding = [(port.name, attached[port].holds.get((queue, False), 0)) for port in found]
        return nlargest(HOLDERS_MAX, [it for it in holding if it[1]], key=itemgetter(1))

    def blocked(self) -> list[Attached]:
        """Consumers that do not read what they get: the first of them."""
        return list(islice((it for it in self._broker.hand_out.blocked if it.doors), BLOCKED_MAX))

    def waited_for(self) -> list[str]:
        """Queues that senders wait for room in."""
        return list(islice((it for it in self._broker.publishing.full if it), BLOCKED_MAX))

    def changed_rows(self, count: int, *, every: bool = False) -> tuple[list[QueueRow], bool]:
        """Rows of queues that have changed since the last round, in parts; whether this one has more.

        `every` begins a new round with all queues, whether they have changed or not.
        """
        if every or not self._round:
            changed = dict.fromkeys([*self._log.changed(), *self._broker.hand_out.consumers_changed()])
            names = self._log.queues() if every else filter(self._log.has_queue, changed)
            self._round = list(names)[::-1]  # because the parts are taken off the end
        part = [self._round.pop() for _ in range(min(count, len(self._round)))]
        return [self.row(name) for name in part if self._log.has_queue(name)], bool(self._round)

    @property
    def unready(self) -> str:
        """Why the broker may not be given traffic; empty where it may."""
        info = self._log.info()
        if info.failed:
            return info.failed
        if self._broker.is_draining:
            return "the broker is stopping"
        if self._broker.is_suspended:
            return "the cluster does not answer: nothing is stored or handed out until it does"
        full = info.full or self._broker.publishing.waits_for_disk
        return "no room on the disk: new messages wait" if full else ""
