"""Pending: where every unsettled message of one queue is. What is not here is gone.

A message is in exactly one of four rooms:

    ready     in its own place; a range, usually one for the whole backlog
    waiting   ready, but moved: requeued or redriven, with a place behind the tail of that moment
    held      with a consumer; remembers which, since when, and where it goes back to
    dead      a dead letter, in the order of death

and may have a *note* beside it: deliveries so far, retries left, a new expiry. A message without
a note has never been delivered before, and has the attributes that its block says.

Everything is a range of offsets, so the cost follows the number of runs, not of messages.
The order in which messages are picked: `ready` by offset; a waiting message with place *T* comes
after offset T - 1 and before offset T, first moved first.

Two kinds of caller: the living queue takes messages out of their rooms by `pick`, `release` or `lift` and
says by `move` what has happened to them; recovery knows nobody who holds, and replays recorded events by
`replay`. Both go by the table of `life.py`, and must end in the same state: after a crash, held messages are
in their old rooms again.
"""

from heapq import heappop, heappush, heapreplace
from typing import Final, NamedTuple

from penstock.model.life import TRANSITIONS, Event, Reason, State, after
from penstock.model.ranges import Piece, RangeMap

AS_STORED = -2
"""In a note: this attribute is what the message's block says."""


class Note(NamedTuple):
    """What has changed about a message since it was stored."""

    attempts: int = 0  # deliveries that have ended
    retries: int = AS_STORED
    expires_us: int = AS_STORED


class Place(NamedTuple):
    """A place in a line. Compares in the order of the line."""

    tail: int  # for waiting messages: behind this tail; for dead ones always 0
    number: int  # counts up; makes every place different
    reason: Reason = Reason.NONE
    time_us: int = 0


class Hold:
    """One delivery of a run of messages: who has them, since when, and where they came from."""

    __slots__ = ("consumer", "dead", "dispatched_us", "origin", "place")

    def __init__(
        self, consumer: str, dispatched_us: int, origin: bytes, place: Place | None, dead: bool
    ) -> None:
        self.consumer = consumer
        self.dispatched_us = dispatched_us
        self.origin = origin
        self.place = place  # None: its own place in `ready`
        self.dead = dead  # taken through the dead-letter door


class Line:
    """Messages in an order of their own: by place, then by offset.

    The map is the truth; the heap may name ranges that have left, and is corrected when its
    top is looked at.
    """

    __slots__ = ("_heap", "places")

    def __init__(self) -> None:
        self.places: RangeMap[Place] = RangeMap()
        self._heap: list[tuple[Place, int, int]] = []

    def add(self, first: int, end: int, place: Place) -> None:
        self.places.add(first, end, place)
        heappush(self._heap, (place, first, end))

    def front(self) -> tuple[int, int, Place] | None:
        """The first run of the line."""
        heap = self._heap
        while heap:
            place, first, end = heap[0]
            for run_first, run_end, run_place in self.places.walk(first, end):
                if run_place == place:
                    if run_first != first:
                        heapreplace(heap, (place, run_first, end))
                    return run_first, run_end, place
            heappop(heap)
        return None

    def pick(self, count: int) -> tuple[int, int, Place] | None:
        """Take up to `count` messages of the first run out of the line."""
        run = self.front()
        if run is None:
            return None
        first, end, place = run
        end = min(end, first + count)
        self.places.cut(first, end)
        # Its entry goes too, or a message that is picked and put back for ever leaves a trail of them.
        _, _, entry_end = self._heap[0]
        if end < entry_end:
            heapreplace(self._heap, (place, end, entry_end))
        else:
            heappop(self._heap)
        return first, end, place

    def pop_front(self, count: int) -> Piece[Place] | None:
        """The same by offset, for those who do not care about the order."""
        run = self.places.pop_front(count)
        if not self.places:
            self._heap.clear()
        return run


class _Death:
    """What died in one go and is still in the line: `count` messages between two offsets."""

    __slots__ = ("count", "end", "first")

    def __init__(self, first: int, end: int) -> None:
        self.first = first
        self.end = end
        self.count = end - first


class DeadLine:
    """Dead letters in the order of death, for each reason and for all.

    A `Line` would do, were it not for operators: they take dead letters out by reason and from the
    middle, by the million. So the order is exact here, and nothing that has left has to be passed over.
    """

    __slots__ = ("_orders", "places")

    def __init__(self) -> None:
        self.places: RangeMap[Place] = RangeMap()
        self._orders: dict[int, RangeMap[_Death]] = {}  # by reason; in each by the number of the place

    def add(self, first: int, end: int, place: Place) -> None:
        self.places.add(first, end, place)
        order = self._orders.get(place.reason)
        if order is None:
            order = self._orders[int(place.reason)] = RangeMap()
        death = order.get(place.number)
        if death is None:
            order.add(place.number, place.number + 1, _Death(first, end))
        else:
            # A part of it had left and is back.
            death.first = min(death.first, first)
            death.end = max(death.end, end)
            death.count += end - first

    def front(self, reason: Reason | None = None) -> tuple[int, int, Place] | None:
        """The first run of the line, or the first that died of `reason`."""
        found: RangeMap[_Death] | None = None
        number = -1
        for key, order in self._orders.items():
            first = order.first
            if first is not None and (reason is None or reason == key) and (number < 0 or first < number):
                found, number = order, first
        death = found.get(number) if found is not None else None
        if death is None:
            return None
        # What has died again since, or for another reason, may stand between its parts.
        run = next(run for run in self.places.walk(death.first, death.end) if run[2].number == number)
        death.first = run[0]
        return run

    def pick(self, count: int, reason: Reason | None = None) -> tuple[int, int, Place] | None:
        """Take up to `count` messages of the first run out of the line."""
        run = self.front(reason)
        if run is None:
            return None
        first, end, place = run
        end = min(end, first + count)
        self.cut(first, end)
        return first, end, place

    def pop_front(self, count: int) -> tuple[int, int, Place] | None:
        """The same by offset, for those who do not care about the order."""
        run = self.places.pop_front(count)
        if run is not None:
            self._left(run)
        return run

    def cut(self, first: int, end: int) -> list[Piece[Place]]:
        """Take everything between two offsets out of the line."""
        pieces = self.places.cut(first, end)
        for piece in pieces:
            self._left(piece)
        return pieces

    def _left(self, piece: Piece[Place]) -> None:
        first, end, place = piece
        order = self._orders[place.reason]
        death = order.get(place.number)
        assert death is not None
        death.count -= end - first
        if not death.count:
            order.cut(place.number, place.number + 1)


_NO_LINE: Final = Line()
_NO_DEAD: Final = DeadLine()
_NOT_HELD: Final[dict[str, RangeMap[Hold]]] = {}
_NO_DEATHS: Final[dict[int, int]] = {}
_NO_NOTES: Final[RangeMap[Note]] = RangeMap()
"""The rooms of all queues that have nothing in them, in which nothing is ever put: a queue has its own from
the first message on that goes there."""


class Pending:
    """The state of one queue. Knows no blocks, no clock and no policy."""

    __slots__ = (
        "_deaths",
        "_places_given",
        "_released",
        "dead",
        "held",
        "notes",
        "ready",
        "tail",
        "taken",
        "waiting",
    )

    def __init__(self, tail: int = 0) -> None:
        self.tail = tail  # the next offset to be given
        self.ready: RangeMap[None] = RangeMap()
        self.waiting = _NO_LINE
        self.held = _NOT_HELD  # by consumer; none is empty
        self.taken = 0  # messages that were ever handed to a consumer, living ones and dead letters
        self._released = 0  # of these, how many were taken from it again
        self.dead = _NO_DEAD
        self._deaths = _NO_DEATHS  # dead letters by reason, those that somebody holds included
        self.notes = _NO_NOTES
        self._places_given = 0

    # --- looking -----------------------------------------------------------------------------

    @property
    def ready_count(self) -> int:
        return self.ready.total + self.waiting.places.total

    def held_counts(self) -> tuple[int, int]:
        """How many messages someone holds: living ones, dead letters."""
        dead = sum(self._deaths.values()) - self.dead.places.total
        return self.taken - self._released - dead, dead

    def deaths(self) -> dict[Reason, int]:
        """Dead letters by reason, those that somebody holds included."""
        return {Reason(reason): count for reason, count in self._deaths.items() if count}

    def _died(self, reason: Reason, count: int) -> None:
        deaths = self._deaths
        if deaths is _NO_DEATHS:
            deaths = self._deaths = {}
        deaths[int(reason)] = deaths.get(reason, 0) + count

    def unsettled(self, first: int, end: int) -> list[tuple[int, int]]:
        """The runs between `first` and `end` that are not gone, in order."""
        runs = [(a, b) for a, b, _ in self.ready.find(first, end)]
        for line in (self.waiting, self.dead):
            runs += [(a, b) for a, b, _ in line.places.find(first, end)]
        for holds in self.held.values():
            runs += [(a, b) for a, b, _ in holds.find(first, end)]
        runs.sort()
        merged: list[tuple[int, int]] = []
        for a, b in runs:
            if merged and merged[-1][1] == a:
                merged[-1] = (merged[-1][0], b)
            else:
                merged.append((a, b))
        return merged

    def oldest_living(self) -> int:
        """The lowest offset that is neither gone nor dead; the tail where there is none."""
        lowest = self.tail
        for room in (self.ready, self.waiting.places):
            if room.first is not None:
                lowest = min(lowest, room.first)
        for holds in self.held.values():
            if holds.first is None or holds.first >= lowest:
                continue
            for first, _, hold in holds:
                if not hold.dead:
                    lowest = min(lowest, first)
                    break
        return lowest

    def state_at(self, offset: int) -> tuple[State, Place | None, Hold | None]:
        """Where one message is. GONE for anything that is not here."""
        if self.ready.find(offset, offset + 1):
            return State.READY, None, None
        place = self.waiting.places.get(offset)
        if place is not None:
            return State.READY, place, None
        place = self.dead.places.get(offset)
        if place is not None:
            return State.DEAD, place, None
        for holds in self.held.values():
            hold = holds.get(offset)
            if hold is not None:
                return (State.DEAD_HELD if hold.dead else State.HELD), hold.place, hold
        return State.GONE, None, None

    def noted(self, first: int, end: int) -> list[tuple[int, int, Note]]:
        """The whole range in pieces of equal notes; a note of its own default where there is none."""
        if not self.notes:
            return [(first, end, NO_NOTE)]
        pieces: list[tuple[int, int, Note]] = []
        at = first
        for a, b, note in self.notes.find(first, end):
            if a > at:
                pieces.append((at, a, NO_NOTE))
            pieces.append((a, b, note))
            at = b
        if at < end:
            pieces.append((at, end, NO_NOTE))
        return pieces

    # --- the living queue --------------------------------------------------------------------

    def accept(self, count: int) -> int:
        """New messages at the tail; the offset of the first."""
        first = self.tail
        self.tail = first + count
        self.ready.add(first, self.tail, None)
        return first

    def pick(self, count: int) -> tuple[int, int, Place | None] | None:
        """Take the next run of at most `count` ready messages out of its room.

        The caller must `hold` it, put it `back`, or settle it.
        """
        if not self.waiting.places:
            run = self.ready.pop_front(count)
            return (run[0], run[1], None) if run else None
        moved = self.waiting.front()
        run = self.ready.pop_front(count, before=moved[2].tail if moved else None)
        if run:
            return run[0], run[1], None
        return self.waiting.pick(count)

    def pick_dead(self, count: int, reason: Reason | None = None) -> tuple[int, int, Place] | None:
        """The same through the dead-letter door; with a `reason`, the next that died of that."""
        run = self.dead.pick(count, reason)
        if run is not None:
            self._died(run[2].reason, run[0] - run[1])
        return run

    def resume(self, first: int, end: int, hold: Hold) -> None:
        """Out of its room into the hands that it was in before: nobody has taken anything."""
        if hold.dead:
            self.lift_dead(first, end)
        elif hold.place is not None:
            self.waiting.places.cut(first, end)
        else:
            self.ready.cut(first, end)
        self.hold(first, end, hold)
        self.taken -= end - first
        self._released -= end - first

    def hold(self, first: int, end: int, hold: Hold) -> None:
        self.taken += end - first
        if hold.dead and hold.place is not None:
            self._died(hold.place.reason, end - first)
        holds = self.held.get(hold.consumer)
        if holds is None:
            if self.held is _NOT_HELD:
                self.held = {}
            holds = self.held[hold.consumer] = RangeMap()
        holds.add(first, end, hold)

    def release(
        self, first: int, end: int, consumer: str, origin: bytes | None = None, dead: bool | None = None
    ) -> list[Piece[Hold]]:
        """Take from `consumer` what it holds in that range, and leave the rest alone.

        With an `origin`, only messages whose ids begin with it; with `dead`, only those that it
        took through that door.
        """
        holds = self.held.get(consumer)
        if holds is None:
            return []
        mine: list[Piece[Hold]] = []
        for piece in holds.cut(first, end):
            a, b, hold = piece
            if (origin is not None and hold.origin != origin) or (dead is not None and hold.dead != dead):
                holds.add(a, b, hold)  # rare: it was another message, or another door
                continue
            mine.append(piece)
            self._released += b - a
            if hold.dead and hold.place is not None:
                self._died(hold.place.reason, a - b)
        if not holds:
            del self.held[consumer]
            if not self.held:
                self.held = _NOT_HELD
        return mine

    def back(self, first: int, end: int, place: Place | None, dead: bool = False) -> None:
        """To where it was picked from."""
        if dead:
            assert place is not None
            if self.dead is _NO_DEAD:
                self.dead = DeadLine()
            self.dead.add(first, end, place)
            self._died(place.reason, end - first)
        elif place is None:
            self.ready.add(first, end, None)
        else:
            if self.waiting is _NO_LINE:
                self.waiting = Line()
            self.waiting.add(first, end, place)

    # --- both: what an event does to messages that are in no room -------------------------------

    def move(
        self,
        was: State,
        event: Event,
        first: int,
        end: int,
        place: Place | None = None,
        reason: Reason = Reason.NONE,
        time_us: int = 0,
        tail: int = 0,
    ) -> State:
        """To where the table of a message's life says; the state that they are in then.

        `place` is where they were before somebody took them, `reason` and `time_us` are of a death, `tail` is
        what requeued and redriven ones go behind.
        """
        to = after(was, event)
        if to is State.GONE:
            if self.notes:
                self.notes.cut(first, end)
        elif event is Event.RETURNED:
            self.back(first, end, place, to is State.DEAD)
        elif to is State.READY:
            self._places_given += 1
            self.back(first, end, Place(tail, self._places_given))
        else:
            assert to is State.DEAD, to
            if event is Event.REQUEUED:
                # Behind the other dead ones; why and when it died stays as it was.
                assert place is not None
                reason, time_us = place.reason, place.time_us
            self._places_given += 1
            self.back(first, end, Place(0, self._places_given, reason, time_us), dead=True)
        return to

    def note(self, first: int, end: int, note: Note) -> None:
        if self.notes:
            self.notes.cut(first, end)
        if note != NO_NOTE:
            if self.notes is _NO_NOTES:
                self.notes = RangeMap()
            self.notes.add(first, end, _USUAL_NOTES.get(note, note))

    def continue_places(self, highest: int) -> None:
        """Places up to this number have been given before."""
        self._places_given = max(self._places_given, highest)

    # --- recovery and expiry -------------------------------------------------------------------

    def lift(self, first: int, end: int) -> list[tuple[int, int, Place | None]]:
        """Take what nobody holds in that range out of its room; with a place where it was dead."""
        lifted: list[tuple[int, int, Place | None]] = [(a, b, None) for a, b, _ in self.ready.cut(first, end)]
        if self.waiting.places:
            lifted += [(a, b, None) for a, b, _ in self.waiting.places.cut(first, end)]
        if self.dead.places:
            lifted += self.lift_dead(first, end)
        return lifted

    def lift_dead(self, first: int, end: int) -> list[Piece[Place]]:
        """The same of dead letters alone."""
        pieces = self.dead.cut(first, end)
        for a, b, place in pieces:
            self._died(place.reason, a - b)
        return pieces

    def pop_dead(self, count: int) -> Piece[Place] | None:
        """Up to `count` dead letters that nobody holds, of one run, in no particular order."""
        run = self.dead.pop_front(count)
        if run is not None:
            self._died(run[2].reason, run[0] - run[1])
        return run

    def replay(
        self, event: Event, first: int, end: int, reason: Reason, time_us: int, note: Note, tail: int
    ) -> None:
        """A recorded event, at a time when nobody holds anything.

        What is gone already stays gone: a record about it changes nothing.
        """
        if event is Event.RETURNED:
            for a, b in self.unsettled(first, end):
                self.note(a, b, note)
            return
        for a, b, death in self.lift(first, end):
            was = _before(event, State.READY if death is None else State.DEAD)
            if self.move(was, event, a, b, death, reason, time_us, tail) is not State.GONE:
                self.note(a, b, note)


def _before(event: Event, known: State) -> State:
    """The state in which a recorded event found messages that are `known` to be ready or dead by now.

    A delivery has no record of its own but its end. Where that does not explain it, the block with the
    record in between is damaged: they had died before they were redriven, or come back before they expired.
    """
    for state in (known, TRANSITIONS[known, Event.HELD]):
        if (state, event) in TRANSITIONS:
            return state
    return State.DEAD if known is State.READY else State.READY


NO_NOTE = Note()
_USUAL_NOTES = {note: note for note in map(Note, range(1, 17))}
"""A million dead letters that were delivered once share one note."""
