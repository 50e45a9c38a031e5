"""LogQueue: one queue of the embedded log, and the life of its messages.

Here the verdicts of `model/policy.py` are asked for and carried out: what a consumer gets, how its deliveries
end, what ends without a consumer. The arrows themselves, and the record of them, are in `queue_state.py`.

The file is long because every verdict needs the same attributes of a message, out of its block and its note,
which are read in one place.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import nsmallest
from itertools import accumulate, groupby, pairwise, repeat
from typing import Any, Final

from penstock.log.block import Messages
from penstock.log.columns import slice_of
from penstock.log.errors import LogDamaged
from penstock.log.ledger import Ledger
from penstock.log.queue_state import (
    ACKED,
    DEAD_HELD,
    DELAYED,
    HELD,
    NO_REASON,
    READY,
    QueueState,
    Schedule,
)
from penstock.log.repairs import up_to, with_payload
from penstock.log.results import Fate
from penstock.model.batch import NO_TTL, RETRIES_NONE, Slice
from penstock.model.life import Event, Reason, State
from penstock.model.pending import AS_STORED, REDRIVEN, Hold, Mark, Note, Place
from penstock.model.policy import (
    QueuePolicy,
    after_expiry,
    after_loss,
    after_reject,
    after_requeue,
    at_birth,
    retry_delay_us,
)
from penstock.model.ranges import RangeMap
from penstock.model.spans import Times
from penstock.model.words import RETRY_DELAYS, Where

BLOCKS_A_LOOK: Final = 16
RUNS_A_LOOK: Final = 256
LOOKS_A_BLOCK: Final = 16
"""Blocks that are read to see which of their messages are due. So many runs of one are filed at once, or that
part of those that are left, so that what it costs does not grow with the size of blocks."""

COUNT_A_RUN: Final = 50
"""Messages that take as long as a run, where each is looked at."""

Lookup = Callable[[int, int], Messages | None]
Unreadable = Callable[["LogQueue", int, int, LogDamaged], int]


class LogQueue(QueueState):
    __slots__ = ("_last_hold", "_lookup", "_times", "_unreadable", "repair_queue")

    def __init__(
        self,
        number: int,
        name: str,
        policy: QueuePolicy,
        log: int,
        lookup: Lookup,
        schedule: Schedule,
        look_at: Schedule,
        unreadable: Unreadable,
        times: Times,
    ) -> None:
        super().__init__(number, name, policy, log, schedule, look_at)
        self._lookup = lookup
        self._unreadable = unreadable
        self._times = times
        self._last_hold: Hold | None = None
        self.repair_queue: LogQueue | None = None

    # --- out ---------------------------------------------------------------------------------

    def take(
        self, consumer: str, count: int, bytes_max: int, bytes_each: int, now_us: int, dead: bool
    ) -> list[Slice]:
        """The next messages for a consumer, who holds them from now on."""
        pending = self.pending
        slices: list[Slice] = []
        before = self.synced_offset if self.policy.waits_for_sync else None
        while count > 0 and bytes_max > 0:
            run = pending.pick_dead(count) if dead else pending.pick(count, before)
            if run is None:
                break
            first, end, place = run
            while first < end:
                try:
                    block = self._block(first)
                except LogDamaged as error:
                    first = self._unreadable(self, first, self._repaired_end(first, end), error)
                    continue
                stop = min(end, block.header.offset_end)
                if not dead:
                    expired_end = self._end_expired(block, first, stop, place, now_us)
                    if expired_end > first:
                        first = expired_end
                        continue
                    stop = self._stop_before_expired(block, first, stop, now_us)
                base = block.header.first_offset
                lo, hi = first - base, stop - base
                bounds, zero = block.bounds, 0  # and which message the first of them is of
                if block.headers is not None:
                    hi = min(hi, lo + bytes_max // max(bytes_each, 1) + 1)  # More of them do not fit.
                    stop = base + hi
                    bounds, zero = _with_headers(block, lo, hi), lo
                size = bounds[hi - zero] - bounds[lo - zero] + (hi - lo) * bytes_each
                if size > bytes_max:
                    hi = zero + self._fitting(
                        bounds, lo - zero, hi - zero, bytes_max, bytes_each, at_least=not slices
                    )
                    if hi == lo:
                        pending.back(first, end, place, dead)
                        return slices
                    stop = base + hi
                    size = bounds[hi - zero] - bounds[lo - zero] + (hi - lo) * bytes_each
                bytes_max -= size
                count -= stop - first
                slices.append(self._slice(block, lo, hi))
                if self._times.wanted and place is None and not dead:
                    self._waited(block, first, stop, now_us)
                if dead and place is not None:
                    slices[-1].reason = place.reason
                self._hold(first, stop, consumer, now_us, block, place, dead)
                first = stop
                if bytes_max <= 0 and first < end:
                    pending.back(first, end, place, dead)
                    break
        return slices

    def _waited(self, block: Messages, first: int, end: int, now_us: int) -> None:
        """How long messages have waited that stand in their own places, of those that nobody has had
        before."""
        header, times = block.header, self._times
        if block.due is None and not self.pending.notes:  # The usual case.
            times.wait(self.number, now_us - header.time_us, end - first)
            return
        for a, b, note in self.pending.noted(first, end):
            if note.attempts:
                continue
            if block.due is None:
                times.wait(self.number, now_us - header.time_us, b - a)
                continue
            base = header.first_offset
            for due_us, run in groupby(block.due[a - base : b - base]):
                times.wait(self.number, now_us - (due_us or header.time_us), len(list(run)))

    def _block(self, offset: int) -> Messages:
        block = self._lookup(self.number, offset)
        if block is None:
            raise LogDamaged(f"queue {self.name!r}: offset {offset} is alive but not in the log")
        return self._repaired(block, offset) if self.repairs else block

    def _repaired(self, block: Messages, offset: int) -> Messages:
        """A block as it is delivered from `offset` on, or a part of it, where payloads were repaired."""
        run = next(self.repairs.walk(offset, block.header.offset_end), None)
        if run is None:
            return block
        first, end, distance = run
        if offset < first:
            return up_to(block, first)
        others = self.repair_queue
        payloads = self._lookup(others.number, offset + distance) if others is not None else None
        if payloads is None:
            raise LogDamaged(f"queue {self.name!r}: offset {offset} was repaired, its payload is not there")
        return with_payload(
            block, payloads, offset, min(end, payloads.header.offset_end - distance), distance
        )

    def _repaired_end(self, first: int, end: int) -> int:
        """Where the messages end that cannot be read with the one at `first`, if its repaired payload is
        why."""
        run = next(self.repairs.walk(first, end), None)
        return run[1] if run is not None and run[0] == first else end

    def _lookup_again(self, offset: int) -> Messages | None:
        """The block of a message that was read before; None where it has been damaged since.

        The message is with a consumer, or was: its next reader meets the damage and reports it.
        """
        try:
            return self._lookup(self.number, offset)
        except LogDamaged:
            return None

    @staticmethod
    def _fitting(
        bounds: Sequence[int], lo: int, hi: int, bytes_max: int, bytes_each: int, at_least: bool
    ) -> int:
        """Where to stop so that the messages from `lo` have at most `bytes_max`."""
        limit = bounds[lo] + lo * bytes_each + bytes_max
        fits, high = lo, hi
        while fits < high:
            middle = (fits + high + 1) // 2
            if bounds[middle] + middle * bytes_each > limit:
                high = middle - 1
            else:
                fits = middle
        return lo + 1 if fits == lo and at_least else fits

    def _hold(
        self,
        first: int,
        end: int,
        consumer: str,
        now_us: int,
        block: Messages,
        place: Place | None,
        dead: bool,
    ) -> None:
        origin = self.origin(block.header.opening)
        hold = self._last_hold
        if (
            hold is None
            or hold.consumer != consumer
            or hold.dispatched_us != now_us
            or hold.origin != origin
            or hold.place != place
            or hold.dead != dead
        ):
            hold = self._last_hold = Hold(consumer, now_us, origin, place, dead)
        self.pending.hold(first, end, hold)

    def resume(
        self,
        consumer: str,
        ranges: Sequence[tuple[int, int]],
        origin: bytes,
        dead: bool,
        now_us: int,
        attempts_max: int | None,
    ) -> list[tuple[int, int]]:
        """Messages with that origin that nobody holds are this consumer's again; which of them it were."""
        pending = self.pending
        resumed: list[tuple[int, int]] = []
        for first, end in ranges:
            if pending.delayed:  # That a time has come is in no block: nobody may have looked yet.
                self.look(first, end, now_us)
                self.look_into(first, end, now_us)
            runs: list[tuple[int, int, Place | None]] = []
            if dead:
                runs += pending.dead.places.find(first, end)
            else:
                runs += pending.ready.find(first, end)
                runs += pending.waiting.places.find(first, end)
            for run_first, run_end, place in sorted(runs, key=lambda run: run[0]):
                at = run_first
                while at < run_end:
                    block = self._lookup_again(at)
                    if block is None:
                        break  # Its next reader meets the damage.
                    stop = min(run_end, block.header.offset_end)
                    if self.origin(block.header.opening) == origin:
                        for a, b, note in pending.noted(at, stop):
                            if attempts_max is not None and note.attempts > attempts_max:
                                continue
                            pending.resume(a, b, Hold(consumer, now_us, origin, place, dead))
                            if resumed and resumed[-1][1] == a:
                                resumed[-1] = (resumed[-1][0], b)
                            else:
                                resumed.append((a, b))
                    at = stop
        return resumed

    def _slice(self, block: Messages, lo: int, hi: int) -> Slice:
        result = slice_of(block, lo, hi, self.origin(block.header.opening))
        if self.pending.notes:
            self._overlay(result)
        if self.steps and result.expires_us is not None:
            late_us = self.late_us(block.header.first_offset)
            result.expires_us = array("q", [_put_off(it, late_us) for it in result.expires_us])
        return result

    def _overlay(self, target: Slice) -> None:
        """Replace stored attributes by what the notes say, for the messages of one slice."""
        base = target.first_offset
        noted = self.pending.notes.find(base + target.lo, base + target.hi)
        if not noted:
            return
        attempts = array("i", bytes(4 * target.hi))
        retries = array("h", [RETRIES_NONE]) * target.hi
        expires = array("q", [NO_TTL]) * target.hi
        if target.retries is not None:
            retries[target.lo :] = array("h", target.retries[target.lo : target.hi])
        if target.expires_us is not None:
            expires[target.lo :] = array("q", target.expires_us[target.lo : target.hi])
        for first, end, note in noted:
            for i in range(first - base, end - base):
                attempts[i] = note.attempts
                if note.retries != AS_STORED:
                    retries[i] = note.retries
                if note.expires_us != AS_STORED:
                    expires[i] = note.expires_us
        target.attempts, target.retries, target.expires_us = attempts, retries, expires

    # --- the ends of a delivery ----------------------------------------------------------------

    def acknowledge(
        self, first: int, end: int, consumer: str, origin: bytes | None, dead: bool, now_us: int
    ) -> list[Fate]:
        pending, times = self.pending, self._times
        fates = []
        for a, b, hold in pending.release(first, end, consumer, origin, dead):
            if times.wanted and not hold.dead:
                times.work(self.number, now_us - hold.dispatched_us, b - a)
            if pending.notes:
                self._record_end(ACKED, a, b, NO_REASON, hold)
            else:
                self.rows().add(ACKED, a, b, NO_REASON, consumer, 1, hold.dispatched_us)
            self._gone(DEAD_HELD if hold.dead else HELD, ACKED, a, b)
            fates.append(Fate(a, b, ACKED, NO_REASON))
        return fates

    def _worked(self, first: int, end: int, hold: Hold, now_us: int) -> None:
        """A consumer has said what becomes of these."""
        if self._times.wanted and not hold.dead:
            self._times.work(self.number, now_us - hold.dispatched_us, end - first)

    def reject(
        self, first: int, end: int, consumer: str, origin: bytes | None, dead: bool, now_us: int, why: str
    ) -> list[Fate]:
        fates: list[Fate] = []
        for a, b, hold in self.pending.release(first, end, consumer, origin, dead):
            self._worked(a, b, hold, now_us)
            event, reason = after_reject(self.policy)
            fates += self._end(a, b, hold, event, reason, now_us, why=why)
        return fates

    def requeue(
        self,
        first: int,
        end: int,
        consumer: str,
        origin: bytes | None,
        dead: bool,
        expires_us: int,
        now_us: int,
        delay_us: int,
    ) -> list[Fate]:
        """Behind the tail, with a new expiry (AS_STORED: the one that it has), or delayed; a dead letter goes
        behind the other dead ones."""
        fates: list[Fate] = []
        for tail, _ in self.steps:
            if first < tail < end:  # What came before a step of the clock is put off by it, the rest is not.
                fates += self.requeue(first, tail, consumer, origin, dead, expires_us, now_us, delay_us)
                first = tail
        for a, b, hold in self.pending.release(first, end, consumer, origin, dead):
            self._worked(a, b, hold, now_us)
            if hold.dead:
                fates += self._dead_back(a, b, hold, Event.REQUEUED, Reason.NONE)
                continue
            for c, d, note in self.pending.noted(a, b):
                if expires_us == AS_STORED or note.attempts + 1 >= self.policy.max_deliveries > 0:
                    fates += self._requeued_or_ended(c, d, hold, expires_us, now_us, delay_us)
                else:
                    fates.append(self._requeued(c, d, hold, note, expires_us, now_us, delay_us))
        return fates

    def _requeued(
        self, first: int, end: int, hold: Hold, note: Note, expires_us: int, now_us: int, delay_us: int
    ) -> Fate:
        attempts = note.attempts + 1
        if expires_us == AS_STORED:
            expires_us = note.expires_us
        else:  # Steps of the clock before now put off all that is stored of the message: not this TTL.
            expires_us = _put_off(expires_us, -self.late_us(first))
        after = Note(attempts, note.retries, expires_us)
        if delay_us == RETRY_DELAYS:
            delay_us = retry_delay_us(self.policy, attempts)
        if delay_us:
            self._delay(first, end, NO_REASON, hold, after, now_us + delay_us)
            return Fate(first, end, Event.DELAYED, NO_REASON)
        self._move_to_tail(first, end, Event.REQUEUED, NO_REASON, hold, after)
        return Fate(first, end, Event.REQUEUED, NO_REASON)

    def _requeued_or_ended(
        self, first: int, end: int, hold: Hold, expires_us: int, now_us: int, delay_us: int
    ) -> Iterator[Fate]:
        """Some may have come to their end: by their TTL, if they keep it, or they were requeued too often and
        have no retry counter."""
        for a, b, note, retries, its_end_us in self._attributes(first, end):
            event, reason = after_requeue(retries, note.attempts + 1, self.policy)
            if event is not Event.REQUEUED:
                yield from self._end_or_withdraw(a, b, hold, event, reason, now_us)
            elif expires_us == AS_STORED and 0 < its_end_us <= now_us:
                yield from self._end(a, b, hold, *after_expiry(self.policy), now_us)
            else:
                yield self._requeued(a, b, hold, note, expires_us, now_us, delay_us)

    def give_back(
        self,
        consumer: str,
        ranges: Sequence[tuple[int, int]] | None,
        where: Where,
        lost: bool,
        now_us: int,
        runs_max: int | None,
        why: Reason,
    ) -> list[Fate]:
        """What a consumer leaves behind: everything that it holds, some of it, or some ranges."""
        fates: list[Fate] = []
        end = self.pending.tail
        if runs_max is not None:
            end = self.pending.held_end(consumer, runs_max, COUNT_A_RUN * runs_max)
        spans = ranges if ranges is not None else [(0, end)]
        for first, end in spans:
            for a, b, hold in self.pending.release(first, end, consumer):
                if hold.dead:
                    event = Event.REQUEUED if lost else Event.RETURNED
                    reason = why if lost else Reason.CONSUMER_CANCELLED
                    fates += self._dead_back(a, b, hold, event, reason)
                elif lost:
                    fates += self._lost(a, b, hold, where, now_us, why)
                else:
                    fates += self._unsent(a, b, hold, where, now_us)
        return fates

    def _unsent(self, first: int, end: int, hold: Hold, where: Where, now_us: int) -> Iterator[Fate]:
        """Given back without having been delivered: no attempt is counted."""
        reason = Reason.CONSUMER_CANCELLED
        for a, b, note, _, expires_us in self._attributes(first, end):
            if 0 < expires_us <= now_us:
                yield from self._end(a, b, hold, *after_expiry(self.policy), now_us)
            elif where is Where.TAIL:
                self._move_to_tail(a, b, Event.REQUEUED, reason, hold, note)
                yield Fate(a, b, Event.REQUEUED, reason)
            else:
                self._back_to_place(a, b, reason, hold, note)
                yield Fate(a, b, Event.RETURNED, reason)

    def _lost(
        self, first: int, end: int, hold: Hold, where: Where, now_us: int, why: Reason
    ) -> Iterator[Fate]:
        for a, b, note, retries, expires_us in self._attributes(first, end):
            attempts = note.attempts + 1
            event, reason, retries_left = after_loss(retries, attempts, self.policy, where)
            if event in (Event.DEAD, Event.REJECTED):
                yield from self._end_or_withdraw(a, b, hold, event, reason, now_us)
            elif 0 < expires_us <= now_us:
                yield from self._end(a, b, hold, *after_expiry(self.policy), now_us)
            else:
                after = Note(
                    attempts, AS_STORED if retries_left == RETRIES_NONE else retries_left, note.expires_us
                )
                if event is Event.DELAYED:
                    self._delay(a, b, why, hold, after, now_us + retry_delay_us(self.policy, attempts))
                elif event is Event.REQUEUED:
                    self._move_to_tail(a, b, event, why, hold, after)
                else:
                    self._back_to_place(a, b, why, hold, after)
                yield Fate(a, b, event, why)

    def _attributes(self, first: int, end: int) -> Iterator[tuple[int, int, Note, int, int]]:
        """The range in runs of equal note, retries left and expiry."""
        at = first
        while at < end:
            block = self._lookup_again(at)
            if block is None:
                yield from ((a, b, note, RETRIES_NONE, 0) for a, b, note in self.pending.noted(at, end))
                return
            stop = min(end, block.header.offset_end)
            base = block.header.first_offset
            late_us = self.late_us(base)
            for a, b, note in self.pending.noted(at, stop):
                retries_left, expires_us = _noted(note.retries, RETRIES_NONE), _noted(note.expires_us, 0)
                retries = block.retries if note.retries == AS_STORED else None
                expires = block.expires if note.expires_us == AS_STORED else None
                if retries is None and expires is None:
                    yield a, b, note, retries_left, _put_off(expires_us, late_us)
                    continue
                # A pair of numbers per message, in a path that only lost consumers take.
                lo, hi = a - base, b - base
                pairs = zip(
                    retries[lo:hi] if retries is not None else repeat(retries_left, hi - lo),
                    expires[lo:hi] if expires is not None else repeat(expires_us, hi - lo),
                    strict=True,
                )
                first_of_run = a
                for pair, run in groupby(pairs):
                    end_of_run = first_of_run + len(list(run))
                    yield first_of_run, end_of_run, note, pair[0], _put_off(pair[1], late_us)
                    first_of_run = end_of_run
            at = stop

    # --- without a consumer ----------------------------------------------------------------------

    def bury(self, first: int, end: int, reason: Reason, now_us: int) -> Ledger:
        """New messages are dead letters at once. The rows that say so belong into the log with them."""
        others, self.ledger = self.ledger, Ledger()
        self.pending.lift(first, end)
        for _ in self._end(first, end, None, *at_birth(self.policy, reason), now_us):
            pass  # Nobody is told: whoever has sent them knows.
        rows, self.ledger = self.ledger, others
        return rows

    def withdraw_free(
        self, ranges: Sequence[tuple[int, int]], reason: Reason, *, dead: bool = True
    ) -> list[Fate]:
        """Messages that nobody holds: ready ones, delayed ones and, if wanted, dead letters."""
        fates = []
        pending = self.pending
        for first, end in ranges:
            for a, b, _ in (*pending.ready.cut(first, end), *pending.waiting.cut(first, end)):
                fates.append(self._withdrawn(a, b, reason, None, READY))
            for a, b, _ in pending.delayed.cut(first, end):
                fates.append(self._withdrawn(a, b, reason, None, DELAYED))
            for a, b, _ in pending.lift_dead(first, end) if dead else ():
                fates.append(self._withdrawn(a, b, reason, None, State.DEAD))
        return fates

    def take_out(self, ranges: Sequence[tuple[int, int]], reason: Reason) -> tuple[list[Fate], Ledger]:
        """The same, and the rows that say so: they belong into the log with something else."""
        others, self.ledger = self.ledger, Ledger()
        fates = self.withdraw_free(ranges, reason)
        rows, self.ledger = self.ledger, others
        return fates, rows

    def withdraw(self, ranges: Sequence[tuple[int, int]], reason: Reason) -> list[Fate]:
        """Living messages, ready ones and those that somebody holds."""
        fates = self.withdraw_free(ranges, reason, dead=False)
        pending = self.pending
        if not pending.held or not ranges:
            return fates
        wanted: RangeMap[None] = RangeMap()
        for first, end in sorted(ranges):
            wanted.cut(first, end)  # the ranges may overlap
            if first < end:
                wanted.add(first, end, None)
        low, high = min(first for first, _ in ranges), max(end for _, end in ranges)
        for consumer, holds in list(pending.held.items()):
            # By what it holds, not by range: there may be many consumers and many ranges.
            for first, end, _ in holds.find(low, high):
                for a, b, _ in wanted.find(first, end):
                    for c, d, hold in pending.release(a, b, consumer, dead=False):
                        fates.append(self._withdrawn(c, d, reason, hold, HELD))
        return fates

    def _withdrawn(self, first: int, end: int, reason: Reason, hold: Hold | None, was: State) -> Fate:
        self._record_end(Event.WITHDRAWN, first, end, reason, hold)
        self._gone(was, Event.WITHDRAWN, first, end)
        return Fate(first, end, Event.WITHDRAWN, reason, hold.consumer if hold is not None else "")

    def purge(self, dead: bool, limit: int | None, runs_max: int | None, mark: Mark) -> list[Fate]:
        """Ready messages, or dead letters, that nobody holds; those before a mark."""
        pending = self.pending
        tail, number = mark
        left = limit if limit is not None else pending.tail
        runs_left = runs_max if runs_max is not None else pending.tail
        fates: list[Fate] = []
        while left > 0 and len(fates) < runs_left:
            run: tuple[int, int, Any] | None
            was = State.DEAD
            if dead:
                run = pending.pick_dead(left, None, number)
            else:
                was = READY
                run = pending.ready.pop_front(left, tail) or pending.waiting.pick(left, None, number)
                if run is None:
                    was, run = DELAYED, pending.delayed.pop_front(left, tail)
            if run is None:
                break
            fates.append(self._withdrawn(run[0], run[1], Reason.PURGED, None, was))
            left -= run[1] - run[0]
        return fates

    def redrive(
        self,
        reason: Reason | None,
        ranges: Sequence[tuple[int, int]] | None,
        limit: int | None,
        runs_max: int | None,
        mark: Mark,
    ) -> list[Fate]:
        """Dead letters before a mark back behind the tail, first died first: a new life with the old id.

        Deliveries count from 0 again, the retry counter is the one that the message came with,
        and its TTL is over: it does not expire any more.
        """
        pending = self.pending
        _, number = mark
        left = limit if limit is not None else pending.tail
        runs_left = runs_max if runs_max is not None else pending.tail
        fates: list[Fate] = []
        if ranges is None:
            while left > 0 and len(fates) < runs_left:
                run = pending.pick_dead(left, reason, number)
                if run is None:
                    break
                fates.append(self._redriven(*run))
                left -= run[1] - run[0]
            return fates
        runs = [
            run
            for first, end in ranges
            for run in pending.dead.places.walk(first, end)
            if run[2].number <= number and (reason is None or run[2].reason is reason)
        ]
        runs.sort(key=lambda run: (run[2], run[0]))
        for first, end, _ in runs:
            if left <= 0 or len(fates) >= runs_left:
                break
            # The ranges may overlap, so that what a run names has gone with another one.
            for piece in pending.lift_dead(first, min(end, first + left)):
                fates.append(self._redriven(*piece))
                left -= piece[1] - piece[0]
        return fates

    def _redriven(self, first: int, end: int, place: Place) -> Fate:
        self._move_to_tail(first, end, Event.REDRIVEN, place.reason, None, REDRIVEN)
        self.weight.come_back(first, end)
        return Fate(first, end, Event.REDRIVEN, place.reason)

    # --- expiry ----------------------------------------------------------------------------------

    def _expiries(self, block: Messages, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(first, end, expires_us) in runs; 0 where a run never expires."""
        base = block.header.first_offset
        late_us = self.late_us(base)
        column = block.expires
        for a, b, note in self.pending.noted(first, end):
            if note.expires_us != AS_STORED:
                yield a, b, _put_off(note.expires_us, late_us)
            elif column is None:
                yield a, b, 0
            else:
                at = a
                while at < b:
                    expires_us = column[at - base]
                    stop = at + 1
                    while stop < b and column[stop - base] == expires_us:
                        stop += 1
                    yield at, stop, _put_off(expires_us, late_us)
                    at = stop

    def _may_expire(self, block: Messages, now_us: int) -> bool:
        return 0 < block.header.expires_min_us <= now_us or bool(self.pending.notes)

    def _end_expired(self, block: Messages, first: int, end: int, place: Place | None, now_us: int) -> int:
        """Settle the picked messages from `first` on that have expired; where the others begin."""
        if not self._may_expire(block, now_us):
            return first
        for a, b, expires_us in self._expiries(block, first, end):
            if not 0 < expires_us <= now_us:
                return a
            self.tell(self._end(a, b, None, *after_expiry(self.policy), now_us))
        return end

    def _stop_before_expired(self, block: Messages, first: int, end: int, now_us: int) -> int:
        if self._may_expire(block, now_us):
            for a, _, expires_us in self._expiries(block, first, end):
                if 0 < expires_us <= now_us:
                    return a
        return end

    def expire(self, first: int, end: int, now_us: int) -> list[Fate]:
        """A timer has run out for that range: settle what has expired, and set the others again.

        What a consumer holds is left to it; whether it has expired is asked when it comes back.
        """
        pending = self.pending
        fates: list[Fate] = []
        runs = [(a, b, READY) for a, b, _ in pending.ready.find(first, end)]
        runs += [(a, b, READY) for a, b, _ in pending.waiting.places.find(first, end)]
        runs += [(a, b, DELAYED) for a, b, _ in pending.delayed.find(first, end)]
        for run_first, run_end, was in runs:
            at = run_first
            while at < run_end:
                try:
                    block = self._block(at)
                except LogDamaged as error:
                    at = self._unreadable(self, at, self._repaired_end(at, run_end), error)
                    continue
                stop = min(run_end, block.header.offset_end)
                for a, b, expires_us in list(self._expiries(block, at, stop)):
                    if 0 < expires_us <= now_us:
                        pending.lift(a, b)
                        fates += self._end(a, b, None, *after_expiry(self.policy), now_us, was=was)
                    elif expires_us:
                        self._schedule(expires_us, self.number, a, b)
                at = stop
        held = [run for holds in pending.held.values() for run in holds.find(first, end) if not run[2].dead]
        for run_first, run_end, _ in held:
            at = run_first
            while at < run_end:
                held_block = self._lookup_again(at)
                if held_block is None:
                    break
                stop = min(run_end, held_block.header.offset_end)
                for a, b, expires_us in self._expiries(held_block, at, stop):
                    if expires_us > now_us:
                        self._schedule(expires_us, self.number, a, b)
                at = stop
        return fates

    # --- delays ----------------------------------------------------------------------------------

    def look(self, first: int, end: int, now_us: int) -> None:
        """Delayed messages of that range whose time has come are ready. Of the others it is said when to look
        again. All of them are messages that have a time of their own."""
        for a, b, due_us in self.pending.delayed.find(first, end):
            at_us = due_us + self.late_us(a)
            if at_us > now_us:
                self._look_at(at_us, self.number, a, b)
            elif due_us != AS_STORED:
                self.pending.due(a, b)

    def look_into(self, first: int, end: int, now_us: int) -> int:
        """The same of those whose blocks say until when; how many blocks were read for it."""
        stored = deque(
            (a, b) for a, b, due_us in self.pending.delayed.find(first, end) if due_us == AS_STORED
        )
        for blocks in range(BLOCKS_A_LOOK):
            if not stored:
                return blocks
            at, b = stored[0]
            block: Messages | None = None
            try:
                block = self._block(at)
                stop = block.header.offset_end
            except LogDamaged as error:
                stop = self._unreadable(self, at, b, error)
            runs: list[tuple[int, int]] = []
            while stored and stored[0][0] < stop:
                a, b = stored.popleft()
                if b > stop:
                    stored.appendleft((stop, b))
                runs.append((a, min(b, stop)))
            if block is not None:
                self._look_into(block, runs, now_us)
        if stored:
            self._look_at(now_us, -self.number, stored[0][0], end)
        return BLOCKS_A_LOOK

    def _look_into(self, block: Messages, runs: list[tuple[int, int]], now_us: int) -> None:
        """Those whose turn is next get a time of their own: the block is looked at again when that is over,
        not for each."""
        base, pending = block.header.first_offset, self.pending
        late_us = self.late_us(base)
        later: list[tuple[int, int, int]] = []
        for first, end in runs:
            # Where nobody can say until when: now.
            column = block.due[first - base : end - base] if block.due is not None else ()
            moments = [it if it + late_us > now_us else 0 for it in column] or [0] * (end - first)
            changes = [first + i for i, (one, other) in enumerate(pairwise(moments), 1) if one != other]
            for a, b in pairwise((first, *changes, end)):
                if moments[a - first]:
                    later.append((moments[a - first], a, b))
                else:
                    pending.due(a, b)
        count = max(RUNS_A_LOOK, len(later) // LOOKS_A_BLOCK)
        if len(later) > count:
            *later, (next_us, _, _) = nsmallest(count + 1, later)
            self._look_at(next_us + late_us, -self.number, runs[0][0], runs[-1][1])
        for due_us, a, b in later:
            pending.delayed.cut(a, b)
            pending.delayed.add(a, b, due_us)
            self._look_at(due_us + late_us, self.number, a, b)


def _with_headers(block: Messages, lo: int, hi: int) -> list[int]:
    """The bounds of some messages with all that they have, from 0 on."""
    bounds, headers = block.bounds, block.headers or ()
    return list(accumulate([bounds[i + 1] - bounds[i] + len(headers[i]) for i in range(lo, hi)], initial=0))


def _put_off(expires_us: int, late_us: int) -> int:
    return expires_us + late_us if expires_us > 0 else expires_us


def _noted(value: int, absent: int) -> int:
    return absent if value == AS_STORED else value
