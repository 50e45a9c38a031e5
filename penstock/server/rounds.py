"""Rounds: how long a turn of the loop reads, and who waits for the next one.

A turn of the loop reads from everybody who has sent something, then hands out, then gives the log its work.
What has come may be far more than a turn has time for: one peer's megabyte of words that have to be taken
apart one by one, or a thousand peers' kilobyte. So a session stops where its share of a turn is used up
(`protocols/share.py`), and a turn that has read for `TURN_NS` reads no more. What was received and not read
waits with its connection, and the connection waits here.

There are two lines. Who comes waits in the quick one, and is read from for a small part of a share; who has
more to say than that waits in the other, for a whole share, and the next time again. So one who says little
is heard in the next turn or soon after it, however many there are who say more than there is time for.

Rules that always hold:
  * A line is served in the order in which it was joined, from the next turn on; who was not reached is first
    in the turn after that. In between, the loop looks at all sockets.
  * Where both lines have somebody they take turns, so that what was said in the quick one is handed out
    before the other goes on, which has half a turn then. Nobody overtakes the quick line; beside the other
    one, a little is read of who comes, at once.
  * What is received in a turn that is over is kept, up to `late_bytes`: beyond that, nobody is read from. It
    is less the more of them wait: what is kept has to be carried out, also of those who have left by then.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

RECEIVE_BYTES: Final = 256 * 1024
LATE_BYTES: Final = 64 * 1024
LATE_BYTES_ALL: Final = 8 << 20
SPARING_BYTES: Final = 4096
TURN_NS: Final = 2_000_000
LITTLE_NS: Final = TURN_NS // 20
TICK_SECONDS: Final = 0.05
"""Beside turns, the server looks after what is due, as often as this."""

receive_buffer: Final = memoryview(bytearray(RECEIVE_BYTES))
"""One for all connections: what is in it is read or copied before the next byte is received."""


class Peer(Protocol):
    """Whoever is read from."""

    takes_long: bool
    """Whether it had much to say when it was read from last. `Rounds` sets it."""

    def go_on(self, quick: bool) -> None:
        """Its turn has come: read what waits, or some of it, and wait again; little of it where it is to be
        quick."""


class Rounds:
    def __init__(self, loop: asyncio.AbstractEventLoop, begin_turn: Callable[[], object]) -> None:
        """`begin_turn` is called where a turn begins with what waits, and calls `begin`."""
        self.buffer = receive_buffer
        """What to receive into: less where the turn is over, or memory is scarce."""

        self.late_bytes = LATE_BYTES
        """Who has said so much that was not read is not received from."""

        self.is_sparing = False
        self._loop = loop
        self._begin_turn = begin_turn
        self._ends_ns = 0  # when the turn is over; 0: nothing was received yet
        self._quick: OrderedDict[Peer, None] = OrderedDict()
        self._long: OrderedDict[Peer, None] = OrderedDict()
        self._was_quick = False  # which of them had the last turn

    def begin(self) -> None:
        """The first piece of a turn is about to be read."""
        self._ends_ns = time.monotonic_ns() + TURN_NS

    def is_over(self) -> bool:
        """Whether this turn reads no more."""
        if not self._ends_ns or time.monotonic_ns() < self._ends_ns:
            return False
        if self.buffer is receive_buffer:
            self._receive_less()
        return True

    def must_wait(self) -> bool:
        """Whether who has said something now is behind others."""
        return bool(self._quick) or self.is_over()

    @property
    def is_crowded(self) -> bool:
        """Whether others wait who have much to say."""
        return bool(self._long)

    def end(self) -> None:
        """The turn is done."""
        self._ends_ns = 0
        if self.waiting or self.is_sparing:
            self._receive_less()
        elif self.buffer is not receive_buffer:
            self.buffer, self.late_bytes = receive_buffer, LATE_BYTES
        if self.waiting:
            self._loop.call_soon(self._next)

    def _receive_less(self) -> None:
        """Because what is received now has to wait."""
        each = SPARING_BYTES if self.is_sparing else LATE_BYTES_ALL // max(self.waiting, 1)
        self.late_bytes = min(max(each, SPARING_BYTES), LATE_BYTES)
        self.buffer = receive_buffer[: self.late_bytes]

    def wait(self, peer: Peer, *, for_more: bool = False) -> None:
        """It goes on in a later turn, behind those that wait already; `for_more`: a little was not enough."""
        if not self.waiting:
            self._begin_turn()  # or nobody would end it
        if for_more or peer.takes_long:
            peer.takes_long = True
            self._long[peer] = None
        elif peer not in self._long:
            self._quick[peer] = None

    def be_sparing(self, sparing: bool) -> None:
        """Whether to receive little from each at a time, because memory is scarce."""
        self.is_sparing = sparing
        if sparing:  # Also what still comes in this turn.
            self._receive_less()

    @property
    def waiting(self) -> int:
        return len(self._quick) + len(self._long)

    def _next(self) -> None:
        if not self.waiting:
            return
        self._begin_turn()
        quick = bool(self._quick) and not (self._long and self._was_quick)
        self._was_quick = quick
        now_ns = time.monotonic_ns()
        # Those who came meanwhile have had some of it.
        half_ns = now_ns + TURN_NS // 2
        ends_ns = half_ns if self._quick and not quick else max(self._ends_ns, half_ns)
        line = self._quick if quick else self._long
        for _ in range(len(line)):
            began_ns = now_ns
            peer, _ = line.popitem(last=False)
            peer.go_on(quick)
            now_ns = time.monotonic_ns()
            if not quick and peer not in line:
                peer.takes_long = now_ns - began_ns > LITTLE_NS
            if now_ns >= ends_ns:
                break
        self.is_over()
