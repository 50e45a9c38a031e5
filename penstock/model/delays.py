"""Delays: when to look at ranges of delayed messages. To the microsecond for what is near.

What is far off is filed to the second (`timers.py`: 24 bytes a range), and named up to two seconds early.
Whoever looks at it then finds that its time has not come and adds it again, now among what is near.

A range is of one queue, by its number, and has messages of one kind: those that have a time of their own; or,
under the negative number, those whose blocks say until when.

Rules that always hold:
  * A range that was added is named once, at its time or up to two seconds before; and not later, where `due`
    is asked once a second at least, and at `next_us`.
  * There is no cancelling: messages are settled or withdrawn meanwhile, and whoever looks finds nothing. What
    is far off and has no message any more is let go of by `sweep`.
"""

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Final

from penstock.model.timers import SECOND_US, Timers

NEAR_US: Final = 3 * SECOND_US


class Delays:
    __slots__ = ("_far", "_near", "_now_us")

    def __init__(self) -> None:
        self._now_us = 0  # of the latest `due`
        self._near: list[tuple[int, int, int, int]] = []  # a heap: when, a queue, first, end
        self._far: Timers[int] = Timers()

    @property
    def next_us(self) -> int:
        """When to ask again, where that is soon; 0: within two seconds is soon enough."""
        return self._near[0][0] if self._near else 0

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        """Everything that is filed, in no order, as `add` takes it: no moment is later than it was."""
        yield from self._near
        yield from self._far

    def copy(self) -> "Delays":
        """The same, for somebody who looks at it later."""
        other = Delays()
        other._now_us, other._near, other._far = self._now_us, self._near[:], self._far.copy()
        return other

    def add(self, at_us: int, queue: int, first: int, end: int) -> None:
        if at_us < self._now_us + NEAR_US:
            heappush(self._near, (max(at_us, 1), queue, first, end))
        else:
            self._far.add(at_us - 2 * SECOND_US, queue, first, end)

    def sweep(self, is_wanted: Callable[[int, int, int], bool], rows_max: int) -> None:
        """See `Timers.sweep`."""
        self._far.sweep(is_wanted, rows_max)

    def due(self, now_us: int) -> Iterator[tuple[int, int, int]]:
        """The ranges that are to be looked at: queue, first, end. What is not asked for stays."""
        self._now_us = now_us
        near = self._near
        for queue, first, end in self._far.due(now_us):
            heappush(near, (now_us, queue, first, end))
        while near and near[0][0] <= now_us:
            yield heappop(near)[1:]
