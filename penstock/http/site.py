"""Site: what the handlers of the API work with, made once when the process starts."""

import asyncio
from collections import Counter
from typing import Final, Protocol

from penstock.common.malloc import give_memory_back
from penstock.control.frames import Fields
from penstock.control.gauge import Gauge
from penstock.http.archiving import Archiving
from penstock.http.auditing import Auditing
from penstock.http.auth import Guard
from penstock.http.history.keeper import Keeper
from penstock.http.link import Link
from penstock.http.problems import Problem
from penstock.http.reading.pool import ReaderPool
from penstock.http.scrubbing import Scrubber
from penstock.http.stages.stages import Stages
from penstock.http.watching.health import Health
from penstock.http.watching.mirror import Mirror
from penstock.http.watching.rates import Rates
from penstock.http.watching.sayings import Sayings

TIDY_SECONDS: Final = 10.0
LARGE_BYTES: Final = 1 << 20
"""With so much of bodies at a time, the memory that they had goes back to the system, as often as this."""

LITTLE_BYTES: Final = 16 * 1024
"""Whose body has no more goes on where memory is full, as who says little over the wires."""


class Holder(Protocol):
    """Somebody whose body is being read."""

    held_bytes: int


class Site:
    """Owns everything that outlives a request."""

    def __init__(self, link: Link, hello: Fields, gauge: Gauge) -> None:
        self.link = link
        self.hello = hello
        self.auditing = Auditing(link)
        self.guard = Guard(hello["tokens"], hello["users"])
        self.data: str = hello["data"]
        self.cluster: str | None = hello["cluster"]  # the name of the log that front-ends share; None: nobody
        self.body_bytes_max: int = hello["body_bytes_max"]
        self.bodies_bytes_max: int = max(hello["bodies_bytes_max"], self.body_bytes_max)
        self._gauge = gauge
        self._bodies_bytes = 0  # of requests that are not answered yet
        self._bodies_bytes_most = 0  # since memory was last given back
        self._memory_is_full = False  # of both processes together
        self.reading: dict[Holder, asyncio.Timeout] = {}
        """Who waits for more of a body, and until when; who is ended because memory is full is not there."""
        self._is_tidying = False  # it will be
        self.frame_seconds: int = hello["frame_seconds"]
        self.payload_bytes_max: int = hello["payload_bytes_max"]
        self.readers = ReaderPool(self.data)
        self.mirror = Mirror(link)
        self.rates = Rates()
        self.sayings = Sayings()
        self.archiving = Archiving(self.data, hello, link, self.mirror, self.sayings)
        self.health = Health(link, self.mirror, hello["health_seconds"], archiving=self.archiving)
        self.history = Keeper(self.data, hello["history_days"], link, self.mirror)
        self.auditing.done = self.history.acted
        self.scrubber = Scrubber(self.data, link)
        self.stages = Stages(self.data, link)
        self.requests: Counter[tuple[str, str, str]] = Counter()  # answered: method, route, class of status
        self.searches: Counter[str] = Counter()  # that are running, by user
        self.stopping = asyncio.Event()  # set when answers that never end should end
        self.has_pages = False  # a dashboard answers beside the API

    def hold_body(self, count: int, so_far: int = 0) -> bool:
        """Beside `so_far`, so much more of a request's body is in memory, until it is answered; whether there
        is room."""
        if self._memory_is_full and so_far + count > LITTLE_BYTES:
            return False
        if self._bodies_bytes + count > self.bodies_bytes_max:
            return False
        self._hold(count)
        return True

    def hold_answer(self, count: int, *, must: bool) -> bool:
        """So much of an answer is in memory until it is taken; whether there is room, as there always is for
        one alone. `must`: it says what was done, and so has to be given."""
        is_full = self._memory_is_full or self._bodies_bytes + count > self.bodies_bytes_max
        if is_full and self._bodies_bytes and not must:
            return False
        self._hold(count)
        return True

    def _hold(self, count: int) -> None:
        self._bodies_bytes += count
        self._gauge.held_bytes = self._bodies_bytes
        self._bodies_bytes_most = max(self._bodies_bytes_most, self._bodies_bytes)

    def no_room(self) -> Problem:
        """What whoever has no room is told."""
        why = (
            f"the bodies of all requests together are over [http] bodies-bytes-max = {self.bodies_bytes_max}"
        )
        if self._memory_is_full:
            why = "what clients make the broker hold is at the limit of [limits] memory-bytes-max"
        return Problem(
            "unavailable",
            f"{why}; try again in a moment",
            headers={"Connection": "close", "Retry-After": "1"},
        )

    def set_memory_full(self, is_full: bool) -> None:
        """Whether clients make both processes hold as much as they may: then nobody is read from who holds
        anything to speak of."""
        self._memory_is_full = is_full
        if is_full:
            now = asyncio.get_running_loop().time()
            for holder in [it for it in self.reading if it.held_bytes > LITTLE_BYTES]:
                patience = self.reading.pop(holder)
                if not patience.expired():
                    patience.reschedule(now)

    def let_body_go(self, count: int) -> None:
        self._bodies_bytes -= count
        self._gauge.held_bytes = self._bodies_bytes
        if self._bodies_bytes_most > LARGE_BYTES and not self._is_tidying:
            self._is_tidying = True
            asyncio.get_running_loop().call_later(TIDY_SECONDS, self._tidy)

    def _tidy(self) -> None:
        self._is_tidying, self._bodies_bytes_most = False, self._bodies_bytes
        give_memory_back()

    async def start(self) -> None:
        """Begin what runs beside the requests."""
        self.mirror.start()
        self.health.start()
        self.history.start()
        await self.stages.start()
        self.scrubber.start()
        self.archiving.start()
        asyncio.get_running_loop().call_later(1, give_memory_back)  # What only the start took.

    async def close(self) -> None:
        await self.auditing.close()
        await self.archiving.stop()
        await self.health.stop()
        await self.history.stop()
        await self.mirror.stop()
        self.scrubber.stop()
        await self.stages.stop()
        self.readers.close()
