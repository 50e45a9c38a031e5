"""Clocks: how far those of the front-ends are apart, by the stamps of the one that stores their records.

Every front-end says in its record what its clock shows (`CLOCK`), and what time it is in the log (`TIME`);
JetStream writes its own time on the record. What is between the two is on its way for a moment, so that a
clock seems that much behind and never ahead: of the last records the largest difference counts.

    checks      whose clock is `APART_US` and more from this front-end's is named
    take-over   by so much the time in the log goes forward because another front-end leads, and not because
                time has passed: what runs out has as much left as it had (`Log.step`)

Nothing is known of a front-end that nobody has heard of in this life of the process: then nothing is said.
"""

from collections import deque
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

CLOCK: Final = "clock_us"
TIME: Final = "time_us"
APART_US: Final = 1_000_000
RECORDS: Final = 8
NAMES_MAX: Final = 1000


class Clocks:
    def __init__(self) -> None:
        self._ahead: dict[
            str, deque[tuple[int, int]]
        ] = {}  # of the stamps: the clock, and the time in the log

    def heard(self, member: str, facts: Mapping[str, Any], stored: str) -> None:
        """A new record of that front-end, with the stamp of JetStream. Any: it is JSON."""
        clock_us, time_us = facts.get(CLOCK), facts.get(TIME)
        if not isinstance(clock_us, int) or not isinstance(time_us, int):
            return  # of an earlier version
        try:
            stored_us = int(datetime.fromisoformat(stored).timestamp() * 1_000_000)
        except ValueError:
            return
        if member not in self._ahead and len(self._ahead) >= NAMES_MAX:
            del self._ahead[next(iter(self._ahead))]  # the one that came first
        told = self._ahead.setdefault(member, deque(maxlen=RECORDS))
        told.append((clock_us - stored_us, time_us - stored_us))

    def ahead_us(self, member: str, own: str) -> int | None:
        """By how much the clock of one is ahead of the other's; None: nobody knows."""
        theirs, ours = self._ahead.get(member), self._ahead.get(own)
        if not theirs or not ours:
            return None
        return max(clock_us for clock_us, _ in theirs) - max(clock_us for clock_us, _ in ours)

    def step_us(self, own: str, before: str) -> int:
        """By how much the time in the log goes forward where one leads after the other; 0: by no step."""
        ours, theirs = self._ahead.get(own), self._ahead.get(before)
        if not ours or not theirs:
            return 0
        by_us = max(time_us for _, time_us in ours) - max(time_us for _, time_us in theirs)
        return by_us if by_us >= APART_US else 0
