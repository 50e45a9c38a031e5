"""Clock: the time of a broker's log. It follows the machine's clock, and never goes back.

Between two looks it goes by the clock that nobody can set, so that a step of the machine's clock comes to
pass at a look and nowhere else:

    forward   the time is what the machine's clock says, at once; whoever looks is told by how much
    back      it goes on from where it is, at nine tenths of its speed, until the machine's clock is there too

A log may have come further than the machine's clock, where somebody else has written it: then the time is
put forward to where that is (`not_before`), which is a step for all other logs.

Steps leave a line. What waits or runs out goes on as if there were none: see `Broker.tick`.
"""

import logging
import time
from collections.abc import Callable
from functools import partial

STEP_US = 1_000_000
"""What is less is no step: clocks are kept right that way."""

steady_ns = partial(time.clock_gettime_ns, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
"""It goes on while the machine sleeps, where there is a clock that does."""

log = logging.getLogger("penstock.clock")


class Clock:
    def __init__(
        self, wall_ns: Callable[[], int] = time.time_ns, steady_ns: Callable[[], int] = steady_ns
    ) -> None:
        self._wall_ns = wall_ns
        self._steady_ns = steady_ns
        self._base_us = wall_ns() // 1000
        self._from_ns = steady_ns()
        self._ahead_us = 0  # of the machine's clock, when that was last looked at
        self.stepped_us = 0  # by so much it was put forward, all steps together

    def now_us(self) -> int:
        passed_us = (self._steady_ns() - self._from_ns) // 1000
        return self._base_us + passed_us - min(passed_us // 10, self._ahead_us)

    def look(self) -> int:
        """Follow the machine's clock; by how much it has put the time forward in one step."""
        steady_ns, wall_us = self._steady_ns(), self._wall_ns() // 1000
        passed_us = (steady_ns - self._from_ns) // 1000
        caught_up_us = min(passed_us // 10, self._ahead_us)
        now_us = self._base_us + passed_us - caught_up_us
        ahead_us = now_us - wall_us
        step_us = self._ahead_us - caught_up_us - ahead_us
        self._base_us, self._from_ns, self._ahead_us = max(now_us, wall_us), steady_ns, max(ahead_us, 0)
        if abs(step_us) >= STEP_US:
            way = "forward" if step_us > 0 else "back"
            log.warning(
                "the clock of this machine was set %s by %.1f s%s", way, abs(step_us) / STEP_US, self._rest()
            )
        if ahead_us > -STEP_US:
            return 0
        self.stepped_us -= ahead_us
        return -ahead_us

    def not_before(self, time_us: int) -> int:
        """That is how far a log has come; by how much the time is put forward for it, where that is much."""
        by_us = time_us - self.now_us()
        if by_us > 0:
            self._base_us, self._from_ns = time_us, self._steady_ns()
            self._ahead_us += by_us
        if by_us < STEP_US:
            return 0
        log.warning("the clock of this machine is behind the log%s", self._rest())
        self.stepped_us += by_us
        return by_us

    def _rest(self) -> str:
        if not self._ahead_us:
            return ""
        return f": the log's time never goes back, is {self._ahead_us / STEP_US:.1f} s ahead and waits for it"
