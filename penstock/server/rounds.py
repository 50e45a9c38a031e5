"""Rounds: how long a turn of the loop reads, and who waits for the next one.

A turn of the loop reads from everybody who has sent something, then hands out, then gives the log its work.
What has come may be far more than a turn has time for: one peer's megabyte of words that have to be taken
apart one by one, or a thousand peers' kilobyte. So a session stops where its share of a turn is used up
(`protocols/share.py`), and a turn that has read for `TURN_NS` reads no more. What was received and not read
waits with its connection, and the connection waits here.

Rules that always hold:
  * Whoever waits is served in the order in which it came, and from the next turn on; who was not reached is
    first in the turn after that. In between, the loop looks at all sockets.
  * What is received in a turn that is over is kept, up to `LATE_BYTES`: beyond that, nobody is read from.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

RECEIVE_BYTES: Final = 256 * 1024
LATE_BYTES: Final = 4096
TURN_NS: Final = 5_000_000
TICK_SECONDS: Final = 0.05
"""Beside turns, the server looks after what is due, as often as this."""

receive_buffer: Final = memoryview(bytearray(RECEIVE_BYTES))
"""One for all connections: what is in it is read or copied before the next byte is received."""

_late_buffer: Final = receive_buffer[:LATE_BYTES]


class Guest(Protocol):
    """Whoever is read from."""

    def go_on(self) -> None:
        """Its turn has come: read what waits, or some of it, and wait again."""


class Rounds:
    def __init__(self, loop: asyncio.AbstractEventLoop, begin_turn: Callable[[], object]) -> None:
        """`begin_turn` is called where a turn begins with what waits, and calls `begin`."""
        self.buffer = self._whole = receive_buffer
        """What to receive into: less where the turn is over, or memory is scarce."""

        self._loop = loop
        self._begin_turn = begin_turn
        self._ends_ns = 0  # when the turn is over; 0: nothing was received yet
        self._waiting: OrderedDict[Guest, None] = OrderedDict()

    def begin(self) -> None:
        """The first piece of a turn is about to be read."""
        self._ends_ns = time.monotonic_ns() + TURN_NS

    def is_over(self) -> bool:
        """Whether this turn reads no more."""
        if not self._ends_ns or time.monotonic_ns() < self._ends_ns:
            return False
        self.buffer = _late_buffer
        return True

    def end(self) -> None:
        """The turn is done."""
        self._ends_ns = 0
        self.buffer = self._whole
        if self._waiting:
            self._loop.call_soon(self._next)

    def wait(self, guest: Guest) -> None:
        """It goes on in a later turn; behind those that wait already."""
        if not self._waiting:
            self._begin_turn()  # or nobody would end it
        self._waiting[guest] = None

    def be_sparing(self, sparing: bool) -> None:
        """Whether to receive little from each at a time, because memory is scarce."""
        self._whole = _late_buffer if sparing else receive_buffer

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _next(self) -> None:
        if not self._waiting:
            return
        self._begin_turn()
        for _ in range(len(self._waiting)):
            guest, _ = self._waiting.popitem(last=False)
            guest.go_on()
            if self.is_over():
                return
