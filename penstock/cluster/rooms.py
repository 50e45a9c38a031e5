"""Rooms: what a follower tells the leader of how much its clients can take.

The leader counts what it has delivered to a connection; the follower tells how much of that has left the
buffers here, and how many deliveries the client has places for. That is told where it makes a difference: a
quarter of the buffer, or half of the places.

Rule that always holds: while the leader believes that more than a quarter of a connection's buffer is taken,
the connection is looked at again and again, so that it is never left without work for want of a word; seldom
where nothing has moved for a while.
"""

import asyncio
from typing import Final

from penstock.cluster.follower_link import FollowerLink
from penstock.cluster.frames import ROOM, Kind, encode_frame
from penstock.cluster.seats import Seat

LOOK_SECONDS: Final = 0.002
LOOKS_MAX: Final = 8
"""So often a connection is looked at in vain before it counts as stuck."""

STUCK_SECONDS: Final = 0.1


class Rooms:
    def __init__(self, buffer_bytes: int) -> None:
        self.buffer_bytes = buffer_bytes
        self._tell_bytes = buffer_bytes // 4
        self._loop = asyncio.get_running_loop()
        self._link: FollowerLink | None = None
        # To be looked at: how often that was in vain, and how much had left their buffers then.
        self._seats: dict[Seat, tuple[int, int]] = {}
        self._stuck: dict[Seat, int] = {}  # in whose buffers nothing moves
        self._is_soon = False
        self._later: asyncio.TimerHandle | None = None
        self._much_later: asyncio.TimerHandle | None = None

    def check(self, seat: Seat, link: FollowerLink | None) -> None:
        """Look at a connection once the socket had a chance to take what was written."""
        self._link = link
        if link is not None:
            self._stuck.pop(seat, None)
            self._seats[seat] = (0, 0)
            if not self._is_soon:
                self._is_soon = True
                self._loop.call_soon(self._look)

    def leave(self, seat: Seat) -> None:
        self._seats.pop(seat, None)
        self._stuck.pop(seat, None)

    def link_down(self) -> None:
        self._link = None
        self._seats.clear()
        self._stuck.clear()
        for timer in (self._later, self._much_later):
            if timer is not None:
                timer.cancel()
        self._later = self._much_later = None

    def _look_later(self) -> None:
        self._later = None
        self._look()

    def _look_at_stuck(self) -> None:
        self._much_later = None
        stuck, self._stuck = self._stuck, {}
        for seat, drained in stuck.items():
            self._seats[seat] = (LOOKS_MAX, drained)
        self._look()

    def _look(self) -> None:
        self._is_soon = False
        link = self._link
        if link is None:
            return
        seats, self._seats = self._seats, {}
        for seat, (looks, before) in seats.items():
            drained = self._tell(seat, link)
            if seat.received_bytes - seat.told_bytes < self._tell_bytes or seat.gone:
                continue
            if drained != before:
                self._seats[seat] = (0, drained)
            elif looks < LOOKS_MAX:
                self._seats[seat] = (looks + 1, drained)
            else:
                self._stuck[seat] = drained
        if self._seats and self._later is None:
            self._later = self._loop.call_later(LOOK_SECONDS, self._look_later)
        if self._stuck and self._much_later is None:
            self._much_later = self._loop.call_later(STUCK_SECONDS, self._look_at_stuck)

    def _tell(self, seat: Seat, link: FollowerLink) -> int:
        """How much has left the connection's buffers, whether that was worth a word or not."""
        if seat.gone:
            return 0
        port = seat.port
        waiting_bytes = max(self.buffer_bytes - port.bytes_room(), 0)
        drained = max(seat.received_bytes - waiting_bytes, seat.told_bytes)
        room = port.count_room()
        believed = seat.told_room - (seat.received_count - seat.told_count)
        if drained - seat.told_bytes >= self._tell_bytes or 2 * believed < room:
            seat.told_bytes, seat.told_count, seat.told_room = drained, seat.received_count, room
            link.write(
                encode_frame(Kind.ROOM, ROOM.pack(drained, seat.received_count, room), port=seat.number)
            )
        return drained
