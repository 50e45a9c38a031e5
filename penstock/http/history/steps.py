"""Steps: what is known of one queue, or of the whole broker, for a step of time.

    counted    what happened in the step: of two that follow each other, the sum
    standing   how it stood at the end: of two, the later
    spreads    how long things took (`model/spans.py`; syncs by the bounds of `log/info.py`): the sum, too

So a coarser step is made of finer ones without a loss, in any order of doing so: that of an hour is the
same, whether it was made of ten seconds or of minutes. The whole has a step for all the time that somebody
looked, a queue only where it has changed, and what it was holds until its next one.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Final, NamedTuple

from penstock.model.life import DEAD_REASONS
from penstock.model.spans import add_up

REASONS: Final = tuple(sorted(reason.label for reason in DEAD_REASONS))

COUNTED: Final = (
    "looks",  # of the whole: so many steps of STEP_SECONDS are in it
    "accepted",
    "acked",
    "delivered",
    "requeued",
    "expired",
    "rejected",
    "withdrawn",
    "redriven",
    *(f"dead:{reason}" for reason in REASONS),
)
STANDING: Final = (
    "ready",
    "held",
    "delayed",
    "dead",
    "bytes",
    "consumers",
    "oldest",  # when the oldest living message came, in tenths of a second since 1970; 0: there is none
    "connections",  # of the whole, as what follows
    "disk_bytes_free",
)
SPREADS: Final = ("waits", "works", "syncs")

STEP_SECONDS: Final = 10
NOTHING: Final = (0,) * len(COUNTED)
EMPTY: Final = (0,) * len(STANDING)

Spread = dict[int, int]  # by bucket
Key = tuple[str, str]
"""Name and identity of a queue."""

WHOLE: Final[Key] = ("", "")


class Step(NamedTuple):
    """`at`: where it begins, in seconds since 1970."""

    at: int
    counted: tuple[int, ...] = NOTHING
    standing: tuple[int, ...] = EMPTY
    spreads: tuple[Spread, Spread, Spread] = ({}, {}, {})


def joined(steps: Iterable[Step], at: int) -> Step:
    """Steps that follow each other as one, which begins at `at`."""
    first, *others = steps
    if not others:
        return first._replace(at=at)
    everything = (first, *others)
    spreads: tuple[Spread, Spread, Spread] = ({}, {}, {})
    for step in everything:
        for into, spread in zip(spreads, step.spreads, strict=True):
            add_up(into, spread)
    counted = tuple(map(sum, zip(*(step.counted for step in everything), strict=True)))
    return Step(at, counted, others[-1].standing, spreads)


def coarser(steps: Iterable[Step], seconds: int) -> Iterator[Step]:
    """The same in steps of so many seconds."""
    gathered: list[Step] = []
    for step in steps:
        if gathered and step.at // seconds != gathered[0].at // seconds:
            yield joined(gathered, gathered[0].at // seconds * seconds)
            gathered = []
        gathered.append(step)
    if gathered:
        yield joined(gathered, gathered[0].at // seconds * seconds)


@cache
def column_of(label: str) -> int:
    """Which of `COUNTED` an event and its reason (`dead:expired`) count for; -1: none."""
    event, _, _ = label.partition(":")
    if event in ("returned", "delayed"):
        event = "requeued"
    for name in (label, event):
        if name in COUNTED and name not in ("accepted", "acked", "looks"):  # Those come from elsewhere.
            return COUNTED.index(name)
    return -1
