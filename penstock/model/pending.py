"""Pending: where every unsettled message of one queue is. What is not here is gone.

A message is in exactly one of five rooms:

    ready     in its own place; a range, usually one for the whole backlog
    waiting   ready, but moved: requeued or redriven, with a place behind the tail of that moment
    delayed   not before a time, which the room knows or the message's block says; then ready in its own place
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

from array import array
from itertools import islice
from typing import Any, Final, NamedTuple

from penstock.model.ids import OFFSET_MAX
from penstock.model.life import TRANSITIONS, Event, Reason, State, after
from penstock.model.ranges import Packed, Piece, RangeMap

AS_STORED = -2
"""In a note: this attribute is what the message's block says."""

NEAR: Final = 1000
"""Offsets between two messages that share a place: what is passed over to find the second one."""

_REASONS: Final = tuple(Reason)

Mark = tuple[int, int]
"""A tail, and the number of the place that was given last."""


class Note(NamedTuple):
    """What has changed about a message since it was stored."""

    attempts: int = 0  # deliveries that have ended
    retries: int = AS_STORED
    expires_us: int = AS_STORED


class Place(NamedTuple):
    """A place in a line. Compares in the order of the line."""

    tail: int  # for waiting messages: behind this tail; for dead ones always 0
    number: int  # counts up: the order of the line, in which `tail` never goes back
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


class _PackedPlaces(Packed[Place]):
    """A place has a tail, or a time: one column has both, and a tail as a negative number."""

    __slots__ = ()

    def __setitem__(self, at: int, value: Place) -> None:
        numbers, reasons, moments = self._columns
        numbers[at], reasons[at], moments[at] = value.number, value.reason, -value.tail or value.time_us

    def insert(self, at: int, value: Place) -> None:
        numbers, reasons, moments = self._columns
        numbers.insert(at, value.number)
        reasons.insert(at, value.reason)
        moments.insert(at, -value.tail or value.time_us)

    def _value(self, at: int) -> Place:
        numbers, reasons, moments = self._columns
        moment = moments[at]
        if moment < 0:
            return Place(-moment, numbers[at], _REASONS[reasons[at]])
        return Place(0, numbers[at], _REASONS[reasons[at]], moment)


class _Places(RangeMap[Place]):
    """By offset. Letters that die one by one have a place each."""

    __slots__ = ()

    def _values(self, value: Place) -> list[Place] | Packed[Place]:
        values = _PackedPlaces([array("q"), array("b"), array("q")])
        values.insert(0, value)
        return values


_Stand = tuple[int, int]
"""What stands in one place of a line: none of it before this offset, and so many messages."""


class _PackedStands(Packed[_Stand]):
    __slots__ = ()

    def __setitem__(self, at: int, value: _Stand) -> None:
        firsts, counts = self._columns
        firsts[at], counts[at] = value

    def insert(self, at: int, value: _Stand) -> None:
        firsts, counts = self._columns
        firsts.insert(at, value[0])
        counts.insert(at, value[1])

    def _value(self, at: int) -> _Stand:
        firsts, counts = self._columns
        return firsts[at], counts[at]


class _Order(RangeMap[_Stand]):
    """By twice the number of the place, so that no two touch and become one."""

    __slots__ = ()

    def _values(self, value: _Stand) -> list[_Stand] | Packed[_Stand]:
        values = _PackedStands([array("q"), array("q")])
        values.insert(0, value)
        return values


class Line:
    """Messages in an order of their own, for each reason and for all: by the number of their place, then by
    offset.

    Operators take messages out by reason and from the middle, by the million: so nothing that has left has
    to be passed over. A letter that died alone takes 65 bytes: there may be a million of these, too.
    """

    __slots__ = ("_orders", "places")

    def __init__(self) -> None:
        self.places: RangeMap[Place] = _Places()
        self._orders: dict[int, _Order] = {}  # by reason

    def add(self, first: int, end: int, place: Place) -> None:
        self.places.add(first, end, place)
        order = self._orders.get(place.reason)
        if order is None:
            order = self._orders[int(place.reason)] = _Order()
        key = 2 * place.number
        stand = order.get(key)
        if stand is None:
            order.add(key, key + 1, (first, end - first))
        else:
            order.put(key, (min(stand[0], first), stand[1] + end - first))

    def front(self, reason: Reason | None = None) -> tuple[int, int, Place] | None:
        """The first run of the line, or the first of those with that `reason`."""
        found: _Order | None = None
        key = -1
        for of, order in self._orders.items():
            first = order.first
            if first is not None and (reason is None or reason == of) and (key < 0 or first < key):
                found, key = order, first
        stand = found.get(key) if found is not None else None
        if found is None or stand is None:
            return None
        lowest, count = stand
        # What stands elsewhere in the line may be between its parts.
        for passed, run in enumerate(self.places.walk(lowest, OFFSET_MAX)):
            if 2 * run[2].number == key:
                if passed:
                    found.put(key, (run[0], count))
                return run
        raise AssertionError(f"nothing stands in place {key // 2} from {lowest} on")

    def pick(
        self, count: int, reason: Reason | None = None, number_max: int | None = None
    ) -> tuple[int, int, Place] | None:
        """Take up to `count` messages of the first run out of the line, unless its place is behind
        `number_max`."""
        run = self.front(reason)
        if run is None or (number_max is not None and run[2].number > number_max):
            return None
        first, end, place = run
        end = min(end, first + count)
        self.cut(first, end)
        return first, end, place

    def cut(self, first: int, end: int) -> list[Piece[Place]]:
        """Take everything between two offsets out of the line."""
        pieces = self.places.cut(first, end)
        for a, b, place in pieces:
            order, key = self._orders[place.reason], 2 * place.number
            stand = order.get(key)
            assert stand is not None
            lowest, count = stand
            if count > b - a:
                order.put(key, (b if a <= lowest else lowest, count - (b - a)))
            else:
                order.cut(key, key + 1)
        return pieces


_NO_LINE: Final = Line()
_NOT_DELAYED: Final[RangeMap[int]] = RangeMap()
_NOT_HELD: Final[dict[str, RangeMap[Hold]]] = {}
_NO_DEATHS: Final[dict[int, int]] = {}
_NO_NOTES: Final[RangeMap[Note]] = RangeMap()
"""The rooms of all queues that have nothing in them, in which nothing is ever put: a queue has its own from
the first message on that goes there."""


class Pending:
    """The state of one queue. Knows no blocks, no clock and no policy."""

    __slots__ = (
        "_deaths",
        "_place",
        "_place_end",
        "_places_given",
        "_released",
        "dead",
        "delayed",
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
        self.delayed = _NOT_DELAYED  # until when, µs since the epoch; or AS_STORED
        self.held = _NOT_HELD  # by consumer; none is empty
        self.taken = 0  # messages that were ever handed to a consumer, living ones and dead letters
        self._released = 0  # of these, how many were taken from it again
        self.dead = _NO_LINE
        self._deaths = _NO_DEATHS  # dead letters by reason, those that somebody holds included
        self.notes = _NO_NOTES
        self._places_given = 0
        self._place: Place | None = None  # the one that was given last, while others may stand in it, too
        self._place_end = 0  # behind the last message that does

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
        runs += [(a, b) for a, b, _ in self.delayed.find(first, end)]
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

    def count_unsettled(self, first: int, end: int) -> tuple[int, int]:
        """How many runs these are, at most, and how many messages; quickly."""
        counts = [self.ready.count(first, end), self.delayed.count(first, end)]
        counts += [line.places.count(first, end) for line in (self.waiting, self.dead)]
        counts += [holds.count(first, end) for holds in self.held.values()]
        return sum(runs for runs, _ in counts), sum(messages for _, messages in counts)

    def lowest(self) -> int:
        """The lowest offset that is not gone; the tail where there is none."""
        rooms: list[RangeMap[Any]] = [self.ready, self.delayed, self.waiting.places, self.dead.places]
        rooms += self.held.values()
        return min([room.first for room in rooms if room.first is not None], default=self.tail)

    def oldest_living(self) -> int:
        """The lowest offset that is neither gone nor dead; the tail where there is none."""
        lowest = self.tail
        for lowest_there in (self.ready.first, self.waiting.places.first, self.delayed.first):
            if lowest_there is not None:
                lowest = min(lowest, lowest_there)
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
        if self.delayed.get(offset) is not None:
            return State.DELAYED, None, None
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

    def delay(self, first: int, end: int, due_us: int) -> None:
        """Ready messages that nobody gets before a time; AS_STORED: the one that their block says."""
        for a, b, _ in self.ready.cut(first, end):
            self.move(State.READY, Event.DELAYED, a, b, due_us=due_us)

    def due(self, first: int, end: int) -> bool:
        """The time of what is delayed in that range has come; whether there was any."""
        pieces = self.delayed.cut(first, end)
        for a, b, _ in pieces:
            self.move(State.DELAYED, Event.DUE, a, b)
        return bool(pieces)

    def pick(self, count: int, before: int | None = None) -> tuple[int, int, Place | None] | None:
        """Take the next run of at most `count` ready messages out of its room; none that has come at `before`
        or later, and nothing that stands behind such a one.

        The caller must `hold` it, put it `back`, or settle it.
        """
        if not self.waiting.places:
            run = self.ready.pop_front(count, before)
            return (run[0], run[1], None) if run else None
        moved = self.waiting.front()
        tail = moved[2].tail if moved else self.tail
        run = self.ready.pop_front(count, before=tail if before is None else min(tail, before))
        if run:
            return run[0], run[1], None
        if before is not None and (first := self.ready.first) is not None and first < tail:
            return None
        return self.waiting.pick(count)

    def pick_dead(
        self, count: int, reason: Reason | None = None, number_max: int | None = None
    ) -> tuple[int, int, Place] | None:
        """The same through the dead-letter door; with a `reason`, the next that died of that."""
        run = self.dead.pick(count, reason, number_max)
        if run is not None:
            self._died(run[2].reason, run[0] - run[1])
        return run

    def resume(self, first: int, end: int, hold: Hold) -> None:
        """Out of its room into the hands that it was in before: nobody has taken anything."""
        if hold.dead:
            self.lift_dead(first, end)
        elif hold.place is not None:
            self.waiting.cut(first, end)
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

    def held_end(self, consumer: str, runs_max: int, count_max: int) -> int:
        """Behind the first so many messages that a consumer holds, in so many runs; 0: it holds none."""
        end = 0
        holds = self.held.get(consumer)
        for first, stop, _ in holds.walk(0, self.tail) if holds is not None else ():
            end = min(stop, first + count_max)
            count_max -= end - first
            runs_max -= 1
            if not (runs_max and count_max):
                break
        return end

    def held_by(self, consumer: str, runs_max: int) -> list[tuple[int, int, Hold]]:
        """What a consumer holds, in the order of offsets; of more runs than `runs_max`, the first ones."""
        holds = self.held.get(consumer)
        return list(islice(holds.walk(0, self.tail), runs_max)) if holds is not None else []

    def back(self, first: int, end: int, place: Place | None, dead: bool = False) -> None:
        """To where it was picked from."""
        if dead:
            assert place is not None
            if self.dead is _NO_LINE:
                self.dead = Line()
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
        due_us: int = 0,
    ) -> State:
        """To where the table of a message's life says; the state that they are in then.

        `place` is where they were before somebody took them, `reason` and `time_us` are of a death, `tail` is
        what requeued and redriven ones go behind, `due_us` until when those are delayed that are.
        """
        to = after(was, event)
        if to is State.GONE:
            if self.notes:
                self.notes.cut(first, end)
        elif event is Event.RETURNED:
            self.back(first, end, place, to is State.DEAD)
        elif to is State.DELAYED:
            if self.delayed is _NOT_DELAYED:
                self.delayed = RangeMap()
            self.delayed.add(first, end, due_us)
        elif event is Event.DUE:
            self.back(first, end, None)
        elif to is State.READY:
            self.back(first, end, self._place_for(first, end, tail, Reason.NONE, 0))
        else:
            assert to is State.DEAD, to
            if event is Event.REQUEUED:
                # Behind the other dead ones; why and when it died stays as it was.
                assert place is not None
                reason, time_us = place.reason, place.time_us
            self.back(first, end, self._place_for(first, end, 0, reason, time_us), dead=True)
        return to

    def _place_for(self, first: int, end: int, tail: int, reason: Reason, time_us: int) -> Place:
        """A place behind all others; or the last one, where that is the same.

        Messages that are moved one behind the other and are near each other share a place, where their order
        is that of their offsets anyway: a million of them take a place for each burst.
        """
        place = self._place
        if (
            place is None
            or not 0 <= first - self._place_end < NEAR
            or (place.tail, place.reason, place.time_us) != (tail, reason, time_us)
        ):
            self._places_given += 1
            place = self._place = Place(tail, self._places_given, reason, time_us)
        self._place_end = end
        return place

    def reserve_places(self, count: int) -> int:
        """So many places behind all others, for what comes there later: the number of the first."""
        self._place = None
        self._places_given += count
        return self._places_given - count + 1

    def mark(self) -> Mark:
        """Where the queue stands: what comes, dies or is moved from now on is behind that."""
        self._place = None
        return self.tail, self._places_given

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
            lifted += [(a, b, None) for a, b, _ in self.waiting.cut(first, end)]
        if self.delayed:
            lifted += [(a, b, None) for a, b, _ in self.delayed.cut(first, end)]
        if self.dead.places:
            lifted += self.lift_dead(first, end)
        return lifted

    def lift_dead(self, first: int, end: int) -> list[Piece[Place]]:
        """The same of dead letters alone."""
        pieces = self.dead.cut(first, end)
        for a, b, place in pieces:
            self._died(place.reason, a - b)
        return pieces

    def replay(
        self, event: Event, first: int, end: int, reason: Reason, time_us: int, note: Note, tail: int
    ) -> None:
        """A recorded event, at a time when nobody holds anything.

        What is gone already stays gone: a record about it changes nothing. Of delayed ones `tail` is when
        they are due. That others were due has no record: it has come to pass before anything else did.
        """
        if self.delayed:
            self.due(first, end)
        if event is Event.RETURNED:
            for a, b in self.unsettled(first, end):
                self.note(a, b, note)
            return
        for a, b, death in self.lift(first, end):
            was = _before(event, State.READY if death is None else State.DEAD)
            if self.move(was, event, a, b, death, reason, time_us, tail, tail) is not State.GONE:
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
REDRIVEN = Note(0, AS_STORED, 0)
"""A new life: its TTL is over, and nothing else is remembered."""

_USUAL_NOTES = {note: note for note in (REDRIVEN, *map(Note, range(1, 17)))}
"""A million dead letters that were delivered once share one note."""
