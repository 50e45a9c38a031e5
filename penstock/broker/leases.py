"""Leases: what callers hold that have no connection, and until when.

Whoever takes messages over HTTP may settle them over any connection, from any process. So what it holds ends
not with a connection but with a time, which it can put off.

Rules that always hold:
  * A message is in one lease at most. What is settled or let go leaves it; one with nothing in it is gone.
  * A lease never ends early, and is named by `ended` within `STEP_US` of its end.
  * What is kept follows the leases that there are, however many there were.
"""

from collections.abc import Hashable
from heapq import heappop, heappush
from itertools import islice
from typing import Final, TypeVar

from penstock.broker.port import Port
from penstock.model.ranges import RangeMap

STEP_US: Final = 100_000
"""Leases that end within one are found together."""

SPARE: Final = 1000

_Key = TypeVar("_Key", bound=Hashable)


class Lease:
    """Messages of one origin that one caller took at once; or, when some were extended, a part of them."""

    __slots__ = ("count", "dead", "end", "ends_us", "first", "origin", "port", "queue", "take")

    def __init__(
        self,
        port: Port,
        queue: str,
        dead: bool,
        origin: bytes,
        first: int,
        end: int,
        take: int,
        ends_us: int,
    ) -> None:
        self.port = port
        self.queue = queue
        self.dead = dead
        self.origin = origin
        self.first = first
        self.end = end  # what is left of it is between these
        self.count = end - first
        self.take = take  # the call that it came with
        self.ends_us = ends_us

    @property
    def step(self) -> int:
        return -(-self.ends_us // STEP_US)


def _take_out(leases: dict[_Key, dict[Lease, None]], key: _Key, lease: Lease) -> None:
    if key in leases:
        leases[key].pop(lease, None)
        if not leases[key]:
            del leases[key]


class Leases:
    def __init__(self) -> None:
        self._by_queue: dict[str, RangeMap[Lease]] = {}  # a message is taken through one door at a time
        self._by_step: dict[int, dict[Lease, None]] = {}
        self._steps: list[int] = []  # a heap; some may have nothing left
        self._by_take: dict[int, dict[Lease, None]] = {}
        self._by_port: dict[Port, dict[Lease, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_step.values()))

    def grant(self, lease: Lease) -> None:
        held = self._by_queue.get(lease.queue)
        if held is None:
            held = self._by_queue[lease.queue] = RangeMap()
        held.add(lease.first, lease.end, lease)
        self._file(lease)
        self._by_port.setdefault(lease.port, {})[lease] = None
        if lease.take:
            self._by_take.setdefault(lease.take, {})[lease] = None

    def _file(self, lease: Lease) -> None:
        leases = self._by_step.get(lease.step)
        if leases is None:
            leases = self._by_step[lease.step] = {}
            heappush(self._steps, lease.step)
            if len(self._steps) > 2 * len(self._by_step) + SPARE:  # Most were settled long before their end.
                self._steps = sorted(self._by_step)
        leases[lease] = None

    def find(self, queue: str, first: int, end: int) -> list[tuple[int, int, Lease]]:
        """What of a range is in leases."""
        held = self._by_queue.get(queue)
        return held.find(first, end) if held is not None else []

    def of_port(self, port: Port, count: int) -> list[Lease]:
        """Up to so many of a caller's."""
        return list(islice(self._by_port.get(port, ()), count))

    def of_take(self, take: int) -> list[Lease]:
        """What is left of those that came with a call."""
        return list(self._by_take.get(take, ()))

    def forget_takes(self) -> None:
        """Nobody asks for them by their calls any more: other calls get the same numbers."""
        for leases in self._by_take.values():
            for lease in leases:
                lease.take = 0
        self._by_take.clear()

    def end(self, lease: Lease) -> list[tuple[int, int]]:
        """It is no more; the messages that were left of it."""
        found = self.find(lease.queue, lease.first, lease.end)
        runs = [(first, end) for first, end, its in found if its is lease]
        for first, end in runs:
            self.let_go(lease, first, end)
        return runs

    def let_go(self, lease: Lease, first: int, end: int) -> None:
        """These messages are in it no more."""
        held = self._by_queue[lease.queue]
        held.cut(first, end)
        if not held:
            del self._by_queue[lease.queue]
        lease.count -= end - first
        if not lease.count:
            self._forget(lease)

    def _forget(self, lease: Lease) -> None:
        _take_out(self._by_step, lease.step, lease)
        _take_out(self._by_take, lease.take, lease)
        _take_out(self._by_port, lease.port, lease)

    def extend(self, lease: Lease, first: int, end: int, ends_us: int) -> None:
        """These messages of it have another end."""
        self.let_go(lease, first, end)
        self.grant(Lease(lease.port, lease.queue, lease.dead, lease.origin, first, end, 0, ends_us))

    def ended(self, now_us: int) -> Lease | None:
        """One that is over. Whoever asks ends it."""
        steps, now = self._steps, now_us // STEP_US
        while steps and steps[0] <= now:
            for lease in self._by_step.get(steps[0], ()):
                return lease
            heappop(steps)
        return None

    def stepped(self, by_us: int) -> None:
        """The time was put forward: each has as long as it had."""
        leases = [lease for leases in self._by_step.values() for lease in leases]
        self._by_step, self._steps = {}, []
        for lease in leases:
            lease.ends_us += by_us
            self._file(lease)

    def queue_gone(self, queue: str) -> None:
        for lease in {lease for _, _, lease in self._by_queue.pop(queue, ())}:
            self._forget(lease)
