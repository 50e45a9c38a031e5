"""QueueState: what is known of one queue, and what each arrow of a message's life does to it.

State and record change together, in one call, so that replaying the record gives the same state: an arrow
moves messages in `model/pending.py` and is a row of the ledger that goes out with the next group. Which arrow
it is, and for which messages, is decided by `queue.py`.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Final

from penstock.log.errors import LogFailed
from penstock.log.ledger import NO_ROWS, Ledger
from penstock.log.results import Fate
from penstock.log.weight import Weight
from penstock.model.batch import Batch
from penstock.model.ids import IDENTITY_DIGITS, origin_of
from penstock.model.life import Event, Reason, State
from penstock.model.pending import AS_STORED, Hold, Note, Pending
from penstock.model.policy import QueuePolicy
from penstock.model.ranges import RangeMap

ACKED: Final = Event.ACKED  # for what is done with every chunk: a member is looked up by its name each time
NO_REASON: Final = Reason.NONE
READY: Final = State.READY
HELD: Final = State.HELD
DEAD_HELD: Final = State.DEAD_HELD

DELAYED: Final = State.DELAYED

Schedule = Callable[[int, int, int, int], None]  # at_us, queue, first, end


_NOT_ASKING: Final[RangeMap[None]] = RangeMap()
_NO_REPAIRS: Final[RangeMap[int]] = RangeMap()
_NO_WHYS: Final[RangeMap[str]] = RangeMap()
"""Of all queues that have had none of these: nobody adds to them."""


class QueueState:
    """There may be a hundred thousand of these: what most of them never need is None until it is needed."""

    __slots__ = (
        "_log",
        "_look_at",
        "_origin",
        "_origin_opening",
        "_schedule",
        "asking",
        "event_opened",
        "event_start",
        "fates",
        "image",
        "ledger",
        "let_go",
        "name",
        "next_event",
        "next_stored",
        "number",
        "offset_start",
        "oldest_changes",
        "oldest_offset",
        "oldest_us",
        "parts",
        "parts_bytes",
        "parts_receipts",
        "parts_stored_bytes",
        "parts_time_us",
        "paused",
        "pending",
        "policy",
        "recorded",
        "repairs",
        "settling",
        "steps",
        "synced_event",
        "synced_offset",
        "tail_opened",
        "weight",
        "whys",
    )

    def __init__(
        self,
        number: int,
        name: str,
        policy: QueuePolicy,
        log: int,
        schedule: Schedule,
        look_at: Schedule,
    ) -> None:
        self.number = number
        self.name = name
        self.policy = policy
        self._log = log
        self._schedule = schedule
        self._look_at = look_at  # the same for those that are delayed
        self._origin_opening, self._origin = -1, b""
        self.pending = Pending()
        self.tail_opened = 0  # the first offset of this opening
        self.event_opened = 0  # and its first event
        self.recorded: dict[int, int] | None = None  # this opening's settlements that were no acks
        self.asking = _NOT_ASKING  # unsettled requests that want a reply
        self.repairs = _NO_REPAIRS  # how far off payloads are in the repair queue
        self.whys = _NO_WHYS  # what was said when letters were rejected
        self.steps: tuple[tuple[int, int], ...] = ()  # tails when the time was put forward, and how far
        self.let_go: list[tuple[int, int]] | None = None  # of those, when what ended them here is in a block
        self.ledger = NO_ROWS
        self.parts: list[Batch] | None = None  # accepted, not yet in a block
        self.parts_receipts: list[Callable[[LogFailed | None], None]] | None = None  # who waits for these
        self.parts_bytes = 0  # their payload
        self.parts_stored_bytes = 0  # what they will take in a file
        self.parts_time_us = 0
        # Settlement blocks that are not synced: behind their last event, and the lowest offset in them.
        self.settling: list[tuple[int, int]] | None = None
        self.next_event = 0
        self.next_stored = 0  # the first offset that is not in a block yet
        self.synced_offset = 0
        self.synced_event = 0
        self.offset_start = 0  # the log is complete from here on
        self.event_start = 0
        self.paused = False
        self.image = b""  # what a snapshot says of it (`snapshot.Images`)
        self.weight = Weight()
        # When the oldest living message came, for that offset and state of the segments; see views.py.
        self.oldest_us, self.oldest_offset, self.oldest_changes = 0, -1, 0
        self.fates: list[Fate] | None = None  # what a take found expired, for the next `expire`

    def origin(self, opening: int) -> bytes:
        if self._origin_opening != opening:
            self._origin_opening, self._origin = opening, origin_of(self._log, self.number, opening)
        return self._origin

    def renumber(self, log: int) -> None:
        """The log has another number, and so all ids begin differently."""
        self._log, self._origin_opening = log, -1

    def rows(self) -> Ledger:
        """The ledger, to be added to."""
        if self.ledger is NO_ROWS:
            self.ledger = Ledger()
        return self.ledger

    def tell(self, fates: Iterable[Fate]) -> None:
        """Keep these for the next `expire`."""
        if self.fates is None:
            self.fates = []
        self.fates += fates

    @property
    def identity(self) -> str:
        """What the ids of all its messages begin with."""
        return self.origin(0)[:IDENTITY_DIGITS].decode()

    def is_settled_for_good(self, offset: int) -> bool:
        """Whether everything that is known about messages before that offset is synced."""
        if len(self.ledger) and self.ledger.lowest < offset:
            return False
        return all(lowest >= offset for _, lowest in self.settling or ())

    def late_us(self, offset: int) -> int:
        """How far the time was put forward since a message came. The others of its block came with it."""
        return sum(by_us for tail, by_us in self.steps if offset < tail) if self.steps else 0

    def counts(self) -> dict[tuple[Event, Reason], int]:
        """How often each event has happened in this opening. `held` is a delivery, the only one that is
        in no block."""
        others = dict(self.recorded or ())
        self.ledger.count(others)
        accepted = self.pending.tail - self.tail_opened
        stored = self.next_stored - self.tail_opened
        settled = self.next_event - self.event_opened - stored + self.ledger.event_count
        happened = {
            (Event.ACCEPTED, Reason.NONE): accepted,
            (Event.HELD, Reason.NONE): self.pending.taken,
            (Event.ACKED, Reason.NONE): settled - sum(others.values()),
        }
        happened |= {(Event(key >> 8), Reason(key & 255)): count for key, count in others.items()}
        return {what: count for what, count in happened.items() if count}

    # --- arrows ----------------------------------------------------------------------------------

    def _record_end(
        self, event: Event, first: int, end: int, reason: Reason, hold: Hold | None, why: str = ""
    ) -> None:
        """Rows for messages that do not live on."""
        for a, b, note in self.pending.noted(first, end):
            attempt = note.attempts + (hold is not None)
            self.rows().add(
                event,
                a,
                b,
                reason,
                hold.consumer if hold else "",
                attempt,
                hold.dispatched_us if hold else 0,
                why=why,
            )

    def _gone(self, was: State, event: Event, first: int, end: int) -> None:
        self.pending.move(was, event, first, end)
        if was is READY or was is HELD or was is DELAYED:
            self.weight.leave(first, end)
        if self.asking:
            self.asking.cut(first, end)
        if self.repairs:
            self.let_go_of_repairs(first, end)
        if self.whys:
            self.whys.cut(first, end)

    def let_go_of_repairs(self, first: int, end: int) -> None:
        """What their payloads in the repair queue were kept for is over."""
        if self.let_go is None:
            self.let_go = []
        self.let_go += [(a + distance, b + distance) for a, b, distance in self.repairs.cut(first, end)]

    def _end(
        self,
        first: int,
        end: int,
        hold: Hold | None,
        event: Event,
        reason: Reason,
        now_us: int,
        *,
        was: State | None = None,
        why: str = "",
    ) -> Iterator[Fate]:
        """The end of a life, or its continuation as a dead letter. `was` says how it stood, where nobody held
        it and it was not ready."""
        was = was or state_with(hold)
        if event is not Event.DEAD:
            self._record_end(event, first, end, reason, hold, why)
            self._gone(was, event, first, end)
        else:
            if hold is None or not hold.dead:
                self.weight.leave(first, end)
            for a, b, note in self.pending.noted(first, end):
                after = Note(note.attempts + (hold is not None), note.retries, note.expires_us)
                self._row(Event.DEAD, a, b, reason, hold, after, why=why)
                self.pending.move(was, event, a, b, None, reason, now_us)
                self.pending.note(a, b, after)
            if why:
                self.put_why(first, end, why)
            if self.asking:
                self.asking.cut(first, end)
        yield Fate(first, end, event, reason)

    def _end_or_withdraw(
        self, first: int, end: int, hold: Hold, event: Event, reason: Reason, now_us: int
    ) -> Iterator[Fate]:
        """Nobody looks for a request among the dead letters: its sender is told instead."""
        if self.asking.find(first, end):
            event = Event.WITHDRAWN
        yield from self._end(first, end, hold, event, reason, now_us)

    def _move_to_tail(
        self, first: int, end: int, event: Event, reason: Reason, hold: Hold | None, after: Note
    ) -> None:
        tail = self.pending.tail
        self._row(event, first, end, reason, hold, after, tail)
        was = State.DEAD if hold is None else HELD
        self.pending.move(was, event, first, end, None, NO_REASON, 0, tail)
        self.pending.note(first, end, after)
        if self.whys:
            self.whys.cut(first, end)
        if after.expires_us > 0:
            self._schedule(after.expires_us, self.number, first, end)

    def _delay(self, first: int, end: int, reason: Reason, hold: Hold, after: Note, due_us: int) -> None:
        """Nobody gets them before a time."""
        # Steps of the clock before now put off all that is stored of the message: not this.
        stored_us = due_us - self.late_us(first)
        self._row(Event.DELAYED, first, end, reason, hold, after, stored_us)
        self.pending.move(HELD, Event.DELAYED, first, end, due_us=stored_us)
        self.pending.note(first, end, after)
        self._look_at(due_us, self.number, first, end)
        if after.expires_us > 0:
            self._schedule(after.expires_us, self.number, first, end)

    def delay_new(self, first: int, moments: Iterable[int]) -> None:
        """Of new messages, those are delayed that have a delay, or a moment, which is not 0."""
        for is_delayed, run in groupby(moments, bool):
            end = first + sum(1 for _ in run)
            if is_delayed:
                self.pending.delay(first, end, AS_STORED)
            first = end

    def _back_to_place(self, first: int, end: int, reason: Reason, hold: Hold, after: Note) -> None:
        self._row(Event.RETURNED, first, end, reason, hold, after)
        self.pending.move(HELD, Event.RETURNED, first, end, hold.place)
        self.pending.note(first, end, after)

    def _dead_back(self, first: int, end: int, hold: Hold, event: Event, reason: Reason) -> Iterator[Fate]:
        """A dead letter that was looked at goes back: behind the others, or to its place."""
        place = hold.place
        assert place is not None
        for a, b, note in self.pending.noted(first, end):
            self._row(event, a, b, reason, hold, note)
            self.pending.move(DEAD_HELD, event, a, b, place)
        yield Fate(first, end, event, reason)

    def _row(
        self,
        event: Event,
        first: int,
        end: int,
        reason: Reason,
        hold: Hold | None,
        after: Note,
        tail: int = 0,
        why: str = "",
    ) -> None:
        """A row for messages that live on; `after` is what is to be remembered of them."""
        self.rows().add(
            event,
            first,
            end,
            reason,
            hold.consumer if hold else "",
            after.attempts,
            hold.dispatched_us if hold else 0,
            after,
            tail,
            why,
        )

    def put_why(self, first: int, end: int, why: str) -> None:
        """What was said when these letters were rejected."""
        if self.whys is _NO_WHYS:
            self.whys = RangeMap()
        self.whys.cut(first, end)
        self.whys.add(first, end, sys.intern(why))  # A million letters may say the same.

    def put_repair(self, first: int, end: int, distance: int) -> None:
        """The payloads of these messages are in the repair queue from now on."""
        if self.repairs:
            self.let_go_of_repairs(first, end)
        elif self.repairs is _NO_REPAIRS:
            self.repairs = RangeMap()
        self.repairs.add(first, end, distance)

    def ask(self, first: int, end: int) -> None:
        """These messages are requests."""
        if self.asking is _NOT_ASKING:
            self.asking = RangeMap()
        self.asking.add(first, end, None)


def state_with(hold: Hold | None) -> State:
    """The state of messages that somebody holds, or of living ones that nobody holds."""
    return READY if hold is None else DEAD_HELD if hold.dead else HELD
