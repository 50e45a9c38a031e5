"""Rooms: what a follower tells the leader of how much its clients can take.

Public names: `Rooms`.

The leader counts what it has delivered to a connection; the follower tells how much of that has left the
buffers here, and how many deliveries the client has places for. That is told where it makes a difference: a
quarter of the buffer, or half of the places.

Rule that always holds: while the leader believes that more than a quarter of a connection's buffer is taken,
the connection is looked at again and again, so that it is never left without work for want of a word.
"""

import asyncio
import struct
from typing import Final

from penstock.cluster.away_link import AwayLink
from penstock.cluster.frames import Kind, encode_frame
from penstock.cluster.seats import Seat

LOOK_SECONDS: Final = 0.002
_ROOM: Final = struct.Struct("<qqq")


class Rooms:
    """See the module's docstring."""

    def __init__(self, buffer_bytes: int) -> None:
        self.buffer_bytes = buffer_bytes
        self._tell_bytes = buffer_bytes // 4
        self._loop = asyncio.get_running_loop()
        self._link: AwayLink | None = None
        self._seats: dict[Seat, None] = {}  # to be looked at
        self._is_soon = False
        self._later: asyncio.TimerHandle | None = None

    def check(self, seat: Seat, link: AwayLink | None) -> None:
        """Look at a connection once the socket had a chance to take what was written."""
        self._link = link
        if link is not None:
            self._seats[seat] = None
            if not self._is_soon:
                self._is_soon = True
                self._loop.call_soon(self._look)

    def leave(self, seat: Seat) -> None:
        self._seats.pop(seat, None)

    def link_down(self) -> None:
        self._link = None
        self._seats.clear()
        if self._later is not None:
            self._later.cancel()
            self._later = None

    def _look_later(self) -> None:
        self._later = None
        self._look()

    def _look(self) -> None:
        self._is_soon = False
        link = self._link
        if link is None:
            return
        seats, self._seats = self._seats, {}
        for seat in seats:
            self._tell(seat, link)
            if seat.received_bytes - seat.told_bytes >= self._tell_bytes and not seat.gone:
                self._seats[seat] = None
        if self._seats and self._later is None:
            self._later = self._loop.call_later(LOOK_SECONDS, self._look_later)

    def _tell(self, seat: Seat, link: AwayLink) -> None:
        if seat.gone:
            return
        port = seat.port
        waiting_bytes = max(self.buffer_bytes - port.bytes_room(), 0)
        drained = max(seat.received_bytes - waiting_bytes, seat.told_bytes)
        room = port.count_room()
        believed = seat.told_room - (seat.received_count - seat.told_count)
        if drained - seat.told_bytes >= self._tell_bytes or 2 * believed < room:
            seat.told_bytes, seat.told_count, seat.told_room = drained, seat.received_count, room
            link.write(
                encode_frame(Kind.ROOM, _ROOM.pack(drained, seat.received_count, room), port=seat.number)
            )
