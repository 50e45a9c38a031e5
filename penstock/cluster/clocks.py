"""Clocks: how far those of the front-ends are apart, by the stamps of the one that stores their records.

Every front-end says in its record what its clock shows (`CLOCK`), and what time it is in the log (`TIME`);
JetStream writes its own time on the record. That is the clock of the node that leads the stream, which may
be wrong, and is another one when another node leads. So a record is compared with our own of the same
moment, whose stamp has the same fault. What was long on its way, and the pair that another node has come
between, are outliers: the middle one of the last differences counts.

    checks      whose clock is `APART_US` and more from this front-end's is named
    take-over   by so much the time in the log goes forward because another front-end leads, and not because
                time has passed: what runs out has as much left as it had (`Log.step`)

Who leads has said so itself (`LEADS`): that a lease was had does not mean that the log was led. Where our
own clock is put forward while somebody else leads, or nobody, that is a part of the step: it is known here
(`stepped_us`), and needs no record.

Nothing is known of a front-end that nobody has heard of in this life of the process: then nothing is said.
"""

from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

CLOCK: Final = "clock_us"
TIME: Final = "time_us"
LEADS: Final = "leads"
APART_US: Final = 1_000_000
RECORDS: Final = 8
NAMES_MAX: Final = 1000


def led_by(facts: Mapping[str, Any]) -> list[int]:
    """The shards that a member says it leads. Earlier versions say whether, of the one. Any: it is JSON."""
    leads = facts.get(LEADS)
    if isinstance(leads, list):
        return [it for it in leads if isinstance(it, int)]
    return [0] if leads else []


class Clocks:
    """What is heard comes on the link's loop, and is asked for on another one."""

    def __init__(self, own: str, stepped_us: Callable[[], int]) -> None:
        """`stepped_us`: by how much our clock was put forward in this life, all steps together."""
        self._own = own
        self._stepped_us = stepped_us
        self._ours: tuple[int, int] | None = None  # our clock, and time without steps, less the last stamp
        self._ahead: dict[str, deque[tuple[int, int]]] = {}  # of ours: the clock, and the time in the log
        self.leaders: dict[int, str] = {}
        """By shard: who was the last to say that it leads it."""

    def heard(self, member: str, facts: Mapping[str, Any], stored: str) -> None:
        """A new record of that front-end, with the stamp of JetStream. Any: it is JSON."""
        self.leaders |= dict.fromkeys(led_by(facts), member)
        clock_us, time_us = facts.get(CLOCK), facts.get(TIME)
        if not isinstance(clock_us, int) or not isinstance(time_us, int):
            return  # of an earlier version
        try:
            stored_us = int(datetime.fromisoformat(stored).timestamp() * 1_000_000)
        except ValueError:
            return
        theirs = clock_us - stored_us, time_us - stored_us
        if member == self._own:
            self._ours = theirs[0], theirs[1] - self._stepped_us()
        elif self._ours is not None:
            if member not in self._ahead and len(self._ahead) >= NAMES_MAX:
                del self._ahead[next(iter(self._ahead))]  # the one that came first
            told = self._ahead.setdefault(member, deque(maxlen=RECORDS))
            told.append((theirs[0] - self._ours[0], theirs[1] - self._ours[1]))

    def ahead_us(self, member: str) -> int | None:
        """By how much its clock is ahead of ours; None: nobody knows."""
        return self._middle(member, 0)

    def step_us(self, shard: int = 0) -> int:
        """By how much the time in a log goes forward where we lead after who led last; 0: by no step."""
        ahead_us = self._middle(self.leaders.get(shard, ""), 1)
        by_us = self._stepped_us() - ahead_us if ahead_us is not None else 0
        return by_us if by_us >= APART_US else 0

    def _middle(self, member: str, which: int) -> int | None:
        # In one go: the other thread may add to it.
        told = list(self._ahead.get(member, ()))
        return sorted(it[which] for it in told)[len(told) // 2] if told else None
