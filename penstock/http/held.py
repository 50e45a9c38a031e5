"""Held: what requests and answers make this process hold, of all that it answers.

It counts in the account of memory that both processes have (`control/gauge.py`), and has a bound of its own,
`bodies-bytes-max`.
"""

import asyncio
from typing import Final, Protocol

from penstock.common.malloc import give_memory_back
from penstock.control.gauge import Gauge
from penstock.http.problems import Problem

TIDY_SECONDS: Final = 10.0
LARGE_BYTES: Final = 1 << 20
"""With so much of bodies at a time, the memory that they had goes back to the system, as often as this."""

LITTLE_BYTES: Final = 16 * 1024
"""Whose body has no more goes on where memory is full, as who says little over the wires."""


class Holder(Protocol):
    """Somebody whose body is being read."""

    held_bytes: int


class Held:
    def __init__(self, gauge: Gauge, bodies_bytes_max: int) -> None:
        self._gauge = gauge
        self.bodies_bytes_max = bodies_bytes_max
        self._bodies_bytes = 0  # of requests that are not answered yet
        self._bodies_bytes_most = 0  # since memory was last given back
        self._memory_is_full = False  # of both processes together
        self.reading: dict[Holder, asyncio.Timeout] = {}
        """Who waits for more of a body, and until when; who is ended because memory is full is not there."""
        self._is_tidying = False  # it will be

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
