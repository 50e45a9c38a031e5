"""The plan: which address to try next, how long to pause before, and when to give up.

Pure: it is told the time and what failed, and never sleeps itself. Both kinds of clients follow it.

    round      every address once, in order; one that fails moves to the back of the list
    pause      after a round that failed: doubling from `backoff_seconds_min` to `backoff_seconds_max`, of
               which a random half is left out, so that many clients do not come back at the same moment
    the end    when the next pause would reach beyond `reconnect_seconds`: `ConnectionLost`, with what each
               address said

The first connection of a client is tried for as long as later ones: a worker may start before its broker.
But somebody who is there and does not speak the protocol (`WrongPeer`), or has the wrong certificate, is told
at once. When a round has failed, that is logged, once for each search. A search that follows a connection
which did not last begins with a pause: a broker that accepts everybody and throws everybody out is no reason
to come back a thousand times a second.
"""

import logging
import random
import ssl
from collections.abc import Callable

from penstock.client.errors import ConnectionLost, reason_of
from penstock.client.options import Options
from penstock.client.url import Target
from penstock.common.address import Address
from penstock.protocols.rq_node import Controllers

log = logging.getLogger("penstock.client")


class WrongPeer(OSError):
    """Somebody is there, and does not speak the protocol."""


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
        self._backoff = Backoff(options.backoff_seconds_min, options.backoff_seconds_max, draw)
        self._by_name = {str(address): address for address in target.addresses}
        self._order = Controllers(self._by_name)
        self.patience_seconds = options.reconnect_seconds
        self._steady_seconds = options.backoff_seconds_max  # a connection that lives so long has lasted
        self._connected_at: float | None = None

    @property
    def first(self) -> Address:
        """The address to try next."""
        return self._by_name[self._order.first]

    def move_back(self, address: Address) -> None:
        """It was full, silent, closing or could not be reached: the others first from now on."""
        self._order.move_back(str(address))

    def search(self, now: float, *, first: bool = False) -> "Search":
        """Begin to look for a broker; `first`: the client has never had one."""
        pause = 0.0
        if self._connected_at is not None:
            if now - self._connected_at < self._steady_seconds:
                pause = self._backoff.next()
            else:
                self._backoff.reset()
        return Search(self, now + self.patience_seconds, pause, first)

    def connected(self, now: float) -> None:
        """The search is over."""
        self._connected_at = now

    def ended(self) -> None:
        """The connection was ended in order, as agreed: no reason to pause before the next one."""
        self._connected_at = None


class Search:
    """One search for a broker that can be reached. Pause before the first attempt, too."""

    def __init__(self, plan: Plan, deadline: float, pause: float, first: bool) -> None:
        self.pause = pause
        self._first = first
        self._plan = plan
        self._deadline = deadline
        self._attempts = 0
        self._problems: dict[str, str] = {}

    @property
    def address(self) -> Address:
        return self._plan.first

    def failed(self, address: Address, why: object, now: float) -> None:
        """An attempt has failed: `pause` is how long to pause before the next. ConnectionLost at the end."""
        self._plan.move_back(address)
        self._problems[str(address)] = reason_of(why)
        self._attempts += 1
        self.pause = 0.0
        if self._attempts % len(self._plan.target.addresses):
            return
        self.pause = self._plan._backoff.next()
        protocol = self._plan.target.protocol
        said = "; ".join(f"{name}: {problem}" for name, problem in self._problems.items())
        hopeless = self._first and isinstance(why, WrongPeer | ssl.SSLError | PermissionError)
        if now + self.pause <= self._deadline and not hopeless:
            if self._attempts == len(self._plan.target.addresses):
                seconds = self._plan.patience_seconds
                log.warning("no %s broker yet (%s); trying for %g s", protocol, said, seconds)
        else:
            attempts = f"{self._attempts} attempt{'s' * (self._attempts != 1)}"
            raise ConnectionLost(
                f"no {protocol} broker could be reached ({attempts}): {said}; "
                "is it running, and is the address right?"
            )
