"""The plan: which address to try next, how long to pause before, and when to give up.

Pure: it is told the time and what failed, and never sleeps itself. Both kinds of clients follow it.

    round      every address once, in order; one that fails moves to the back of the list
    pause      after a round that failed: doubling from `backoff_seconds_min` to `backoff_seconds_max`, of
               which a random half is left out, so that many clients do not come back at the same moment
    the end    when the next pause would reach beyond `reconnect_seconds`: `ConnectionLost`, with what each
               address said

The first connection of a client has one round and no pause: a wrong address should be told at once.
"""

import random
from collections.abc import Callable

from penstock.client.errors import ConnectionLost
from penstock.client.options import Options
from penstock.client.url import Target
from penstock.protocols.rq_node import Controllers
from penstock.server.address import Address


class Backoff:
    """Pauses that grow."""

    def __init__(
        self, seconds_min: float, seconds_max: float, draw: Callable[[], float] = random.random
    ) -> None:
        self._seconds_min = seconds_min
        self._seconds_max = seconds_max
        self._draw = draw
        self._ceiling = seconds_min

    def next(self) -> float:
        """How many seconds to pause now."""
        ceiling = self._ceiling
        self._ceiling = min(2 * ceiling, self._seconds_max)
        return ceiling * (1 + self._draw()) / 2

    def reset(self) -> None:
        """It works again: the next pause is a short one."""
        self._ceiling = self._seconds_min


class Plan:
    """What a client knows of the addresses of its target."""

    def __init__(self, target: Target, options: Options, draw: Callable[[], float] = random.random) -> None:
        self.target = target
        self.backoff = Backoff(options.backoff_seconds_min, options.backoff_seconds_max, draw)
        self._by_name = {str(address): address for address in target.addresses}
        self._order = Controllers(self._by_name)
        self._reconnect_seconds = options.reconnect_seconds

    @property
    def first(self) -> Address:
        """The address to try next."""
        return self._by_name[self._order.first]

    def move_back(self, address: Address) -> None:
        """It was full, silent, closing or could not be reached: the others first from now on."""
        self._order.move_back(str(address))

    def search(self, now: float, *, patient: bool = True) -> "Search":
        """Begin to look for a broker. Without patience there is one round."""
        return Search(self, now + self._reconnect_seconds if patient else now, len(self._by_name))


class Search:
    """One search for a broker that can be reached."""

    def __init__(self, plan: Plan, deadline: float, addresses: int) -> None:
        self._plan = plan
        self._deadline = deadline
        self._addresses = addresses
        self._attempts = 0
        self._problems: dict[str, str] = {}

    @property
    def address(self) -> Address:
        return self._plan.first

    def failed(self, address: Address, why: object, now: float) -> float:
        """An attempt has failed: how many seconds to pause before the next. ConnectionLost at the end."""
        self._plan.move_back(address)
        self._problems[str(address)] = str(why) or type(why).__name__
        self._attempts += 1
        if self._attempts % self._addresses:
            return 0.0
        pause = self._plan.backoff.next()
        if now + pause > self._deadline:
            protocol = self._plan.target.protocol
            said = "; ".join(f"{name}: {problem}" for name, problem in self._problems.items())
            raise ConnectionLost(
                f"no {protocol} broker could be reached ({self._attempts} attempts): {said}; "
                "is it running, and is the address right?"
            )
        return pause
