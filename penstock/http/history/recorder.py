"""Recorder: what the mirror sees, cut into steps. No clock, no file.

The mirror tells of every row that has changed and of every queue that is gone; `close` makes a step of what
has happened since the last one. A row is kept by reference, so that a queue at rest costs nothing here.

Rules that always hold:
  * What happened before the first look is not known, and counted in no step. A queue that came later has
    done all that its counters say since it came.
  * A step has at most `QUEUES_MAX` queues: those in which most has happened, then those in which most
    stands. Where there are more, the step says that it was cut. The whole is counted over all of them,
    always.
  * In a step that is `full`, every queue that is not empty is told of, whether it has changed or not.
"""

from collections.abc import Iterable, Mapping
from heapq import nlargest
from typing import Final, NamedTuple

from penstock.control.frames import Fields
from penstock.http.history.steps import (
    COUNTED,
    NOTHING,
    STANDING,
    STEP_SECONDS,
    WHOLE,
    Key,
    Spread,
    Step,
    column_of,
)
from penstock.model.spans import add_up

QUEUES_MAX: Final = 1000
RECENT_STEPS: Final = 6

_LOOKS, _ACCEPTED, _ACKED, _DELIVERED = (
    COUNTED.index(name) for name in ("looks", "accepted", "acked", "delivered")
)
_OLDEST = STANDING.index("oldest")
_SUMMED: Final = ("ready", "held", "delayed", "dead", "bytes", "consumers")
_NEW: Final[Fields] = {"offset_end": 0, "delivered": 0, "counts": {}}

Times = tuple[Spread, Spread]


class Closed(NamedTuple):
    """A step of the queues that it tells of, and of the whole; whether there were more."""

    steps: dict[Key, Step]
    is_cut: bool


class Recorder:
    def __init__(self, queues_max: int = QUEUES_MAX) -> None:
        self._queues_max = queues_max
        self._rows: dict[str, Fields] = {}
        self._before: dict[str, Fields] = {}  # as they were at the end of the last step
        self._changed: dict[str, None] = {}
        self._born: dict[str, None] = {}
        self._times: dict[str, Times] = {}
        self._totals = dict.fromkeys(_SUMMED, 0)
        self._lost = [0] * len(COUNTED)  # what happened in queues that are gone, since the last step
        self._engine: Fields | None = None  # as the first process told it last
        self.recent: list[Step] = []
        """The last steps of the whole, oldest first: a minute."""

    def put(self, row: Fields, *, is_new: bool = False) -> None:
        """A queue's row of the mirror. New: there was no such queue when others were looked at."""
        name: str = row["name"]
        before = self._rows.get(name)
        if before is None:
            if is_new:
                self._before[name] = _NEW
                self._born[name] = None
            else:
                self._before[name] = row
        for field in _SUMMED:
            self._totals[field] += row[field] - (before[field] if before is not None else 0)
        self._rows[name] = row
        self._changed[name] = None
        times = row.get("times")
        if times is not None:
            known = self._times.setdefault(name, ({}, {}))
            for into, numbers in zip(known, times, strict=True):
                add_up(into, dict(zip(numbers[::2], numbers[1::2], strict=True)))

    def forget(self, name: str) -> None:
        """There is no such queue any more."""
        row = self._rows.pop(name)
        for at, count in enumerate(_happened(row, self._before.pop(name))):
            self._lost[at] += count
        for field in _SUMMED:
            self._totals[field] -= row[field]
        self._changed.pop(name, None)
        self._born.pop(name, None)
        self._times.pop(name, None)

    def begin(self, engine: Fields) -> None:
        """How the first process stands when the first step begins."""
        self._engine = engine

    def close(self, at: int, engine: Fields | None, *, full: bool = False) -> Closed:
        """The step that began at `at` is over. `engine` is what the first process tells of itself."""
        end = (at + STEP_SECONDS) * 10
        counted, waits, works = self._lost, Spread(), Spread()
        counted[_LOOKS] = 1
        steps: dict[Key, Step] = {}
        for name in self._changed:
            row = self._rows[name]
            happened = _happened(row, self._before[name])
            for column, count in enumerate(happened):
                counted[column] += count
            self._before[name] = row
            times = self._times.get(name, ({}, {}))
            add_up(waits, times[0])
            add_up(works, times[1])
            if name in self._born:
                happened[_LOOKS] = 1
            steps[name, row["identity"]] = Step(at, tuple(happened), _stands(row, end), (*times, {}))
        rest: Iterable[Fields] = self._rows.values() if full else ()
        others = [row for row in rest if row["name"] not in self._changed and _is_something(row)]
        self._changed, self._born, self._times, self._lost = {}, {}, {}, [0] * len(COUNTED)
        is_cut = len(steps) + len(others) > self._queues_max
        if is_cut:
            steps = dict(nlargest(self._queues_max, steps.items(), key=lambda it: _weight(it[1])))
            others = nlargest(self._queues_max - len(steps), others, key=lambda it: it["ready"] + it["dead"])
        for row in others:
            steps[row["name"], row["identity"]] = Step(at, NOTHING, _stands(row, end))
        steps[WHOLE] = Step(
            at, tuple(counted), self._whole_stands(engine, end), (waits, works, self._synced(engine))
        )
        self.recent = [*self.recent, steps[WHOLE]][-RECENT_STEPS:]
        return Closed(steps, is_cut)

    def _whole_stands(self, engine: Fields | None, end: int) -> tuple[int, ...]:
        oldest = min((it["oldest_us"] for it in self._rows.values() if it["oldest_us"]), default=0)
        known = engine or self._engine or {}
        values = {
            **self._totals,
            "oldest": min(oldest // 100_000, end),
            "connections": known.get("connections", 0),
            "disk_bytes_free": known.get("disk_bytes_free", 0),
        }
        return tuple([max(values[name], 0) for name in STANDING])

    def _synced(self, engine: Fields | None) -> Spread:
        """Syncs since the last step, by their bounds."""
        if engine is None:
            return {}
        before, self._engine = self._engine, engine
        if before is None:
            return {}
        pairs = enumerate(zip(engine["sync"]["buckets"], before["sync"]["buckets"], strict=True))
        return {bucket: now - then for bucket, (now, then) in pairs if now > then}


def _stands(row: Fields, end: int) -> tuple[int, ...]:
    values = {**{name: row[name] for name in _SUMMED}, "oldest": min(row["oldest_us"] // 100_000, end)}
    return tuple([max(values.get(name, 0), 0) for name in STANDING])


def _is_something(row: Fields) -> bool:
    return any(row[name] for name in _SUMMED)


def _weight(step: Step) -> int:
    return sum(step.counted)


def _happened(row: Fields, before: Fields) -> list[int]:
    """What the counters of two rows differ by. They begin anew when the log is opened anew."""
    counted = [0] * len(COUNTED)
    counted[_ACCEPTED] = max(row["offset_end"] - before["offset_end"], 0)
    counted[_DELIVERED] = _since(row["delivered"], before["delivered"])
    counts: Mapping[str, int] = row["counts"]
    past: Mapping[str, int] = before["counts"]
    counted[_ACKED] = _since(counts.get("acked", 0), past.get("acked", 0))
    for label, count in counts.items():
        column = column_of(label)
        if column >= 0:
            counted[column] += _since(count, past.get(label, 0))
    return counted


def _since(now: int, before: int) -> int:
    return now - before if now >= before else now
