"""Delays: when to look at ranges of delayed messages. To the microsecond for what is near.

What is far off is filed to the second (`timers.py`: 24 bytes a range), and named up to two seconds early.
Whoever looks at it then finds that its time has not come and adds it again, now among what is near.

Rules that always hold:
  * A range that was added is named once, not much later than its time; and perhaps earlier.
  * There is no cancelling: messages are settled or withdrawn meanwhile, and whoever looks finds nothing.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Final

from penstock.model.timers import SECOND_US, Timers

NEAR_US: Final = 3 * SECOND_US


class Delays:
    __slots__ = ("_far", "_near", "_now_us")

    def __init__(self) -> None:
        self._now_us = 0  # of the latest `due`
        self._near: list[tuple[int, int, int, int]] = []  # a heap: when, a queue's number, first, end
        self._far: Timers[int] = Timers()

    @property
    def next_us(self) -> int:
        """When to ask again, where that is soon; 0: within two seconds is soon enough."""
        return self._near[0][0] if self._near else 0

    def add(self, at_us: int, queue: int, first: int, end: int) -> None:
        if at_us < self._now_us + NEAR_US:
            heappush(self._near, (at_us, queue, first, end))
        else:
            self._far.add(at_us - 2 * SECOND_US, queue, first, end)

    def due(self, now_us: int, most: int) -> Iterator[tuple[int, int, int]]:
        """At most so many of the ranges that are to be looked at: queue, first, end.

        What is added meanwhile for a time that has come is for the next call.
        """
        self._now_us = now_us
        for queue, first, end in self._far.due(now_us):
            heappush(self._near, (now_us, queue, first, end))
        near = self._near
        found: list[tuple[int, int, int]] = []
        while near and near[0][0] <= now_us and len(found) < most:
            found.append(heappop(near)[1:])
        return iter(found)

    def owners(self) -> set[int]:
        """The queues of which something is filed."""
        return {queue for _, queue, _, _ in self._near}.union(self._far.owners())
