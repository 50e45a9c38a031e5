"""Rooms: the living messages of a queue, whichever room they are in, in one order: by offset.

`Pending` keeps a room for each state, and the rooms of a queue with a million dead letters have a
million runs. Here they are walked side by side from any offset on, as far as somebody wants to
look: what it costs follows the runs that are looked at, and the number of consumers.
"""

from collections.abc import Iterator
from heapq import merge

from penstock.log.info import StateRuns
from penstock.model.life import Reason, State
from penstock.model.pending import NO_NOTE, Hold, Note, Pending, Place

Run = tuple[int, int, State, Place | None, Hold | None]

ROOMS = {
    None: ("ready", "delayed", "held", "dead"),
    State.READY: ("ready",),
    State.DELAYED: ("delayed",),
    State.HELD: ("held",),
    State.DEAD: ("dead", "held"),
}
"""Where to look for what was asked for: a dead letter that somebody holds is among the held ones."""

STATES = {
    None: frozenset({State.READY, State.DELAYED, State.HELD, State.DEAD, State.DEAD_HELD}),
    State.READY: frozenset({State.READY}),
    State.DELAYED: frozenset({State.DELAYED}),
    State.HELD: frozenset({State.HELD}),
    State.DEAD: frozenset({State.DEAD, State.DEAD_HELD}),
}


def living_runs(pending: Pending, start: int, end: int, runs_max: int, only: State | None) -> StateRuns:
    """Up to `runs_max` runs between two offsets: all, or READY, DELAYED, HELD or DEAD ones `only`.

    No more than that are looked at either, so the answer may have none and end early all the same.
    """
    runs = StateRuns()
    numbers: dict[str, int] = {}  # of the consumers
    wanted = STATES[only]
    looked_at = 0
    for first, stop, state, place, hold in _by_offset(pending, start, end, ROOMS[only]):
        for a, b, note in noted(pending, first, stop) if state in wanted else ((first, stop, NO_NOTE),):
            if looked_at == runs_max:
                runs.next = a
                runs.consumers = list(numbers)
                return runs
            looked_at += 1
            if state not in wanted:
                continue
            runs.first.append(a)
            runs.end.append(b)
            runs.expires_us.append(note.expires_us)
            runs.attempts.append(note.attempts)
            runs.retries.append(note.retries)
            runs.state.append(state)
            if hold is None:
                runs.consumer.append(-1)
                runs.time_us.append(place.time_us if place is not None else 0)
            else:
                runs.consumer.append(numbers.setdefault(hold.consumer, len(numbers)))
                runs.time_us.append(hold.dispatched_us)
            runs.reason.append(place.reason if place is not None else 0)
    runs.next = end
    runs.consumers = list(numbers)
    return runs


def _by_offset(pending: Pending, start: int, end: int, rooms: tuple[str, ...]) -> Iterator[Run]:
    """The runs of some rooms side by side. No two begin at the same offset, so nothing else is compared."""
    sources: list[Iterator[Run]] = []
    if "ready" in rooms:
        sources += [_ready(pending, start, end), _moved(pending, start, end)]
    if "delayed" in rooms and pending.delayed:
        sources.append(_delayed(pending, start, end))
    if "dead" in rooms:
        sources.append(_dead(pending, start, end))
    if "held" in rooms:
        sources += [_held(pending, consumer, start, end) for consumer in pending.held]
    return merge(*sources)


def _ready(pending: Pending, start: int, end: int) -> Iterator[Run]:
    for a, b, _ in pending.ready.walk(start, end):
        yield a, b, State.READY, None, None


def _moved(pending: Pending, start: int, end: int) -> Iterator[Run]:
    for a, b, _ in pending.waiting.places.walk(start, end):
        yield a, b, State.READY, None, None


def _delayed(pending: Pending, start: int, end: int) -> Iterator[Run]:
    """Until when is told as the time of a place."""
    for a, b, due_us in pending.delayed.walk(start, end):
        yield a, b, State.DELAYED, Place(0, 0, Reason.NONE, due_us), None


def _dead(pending: Pending, start: int, end: int) -> Iterator[Run]:
    for a, b, place in pending.dead.places.walk(start, end):
        yield a, b, State.DEAD, place, None


def _held(pending: Pending, consumer: str, start: int, end: int) -> Iterator[Run]:
    for a, b, hold in pending.held[consumer].walk(start, end):
        yield a, b, State.DEAD_HELD if hold.dead else State.HELD, hold.place, hold


def noted(pending: Pending, first: int, end: int) -> Iterator[tuple[int, int, Note]]:
    """`Pending.noted`, one by one."""
    at = first
    for a, b, note in pending.notes.walk(first, end):
        if a > at:
            yield at, a, NO_NOTE
        yield a, b, note
        at = b
    if at < end:
        yield at, end, NO_NOTE
