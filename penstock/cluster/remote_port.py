"""RemotePort: a connection of another front-end, as a port of this broker.

What the broker tells it becomes a frame of its link. How much it can take is reckoned here, from what was
delivered and what the follower has told: bytes that have left its buffers, and deliveries that it has
places for (`told_room`).

Rules that always hold:
  * A message travels when it is durable, not before. Otherwise a crash of the leader would leave it with a
    client and with its sender, who sends it again: the client would get it twice.
  * Never more is under way to a client than its buffer may hold, whatever the link holds besides.
  * A port whose link has ended takes nothing and says nothing; the broker is about to be told.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.cluster.columns import pack_batches, pack_slices
from penstock.cluster.frames import COUNT, FINISH_LATE, NUMBER, Kind, encode_frame, encode_json, text_bytes
from penstock.model.batch import Batch, Slice
from penstock.model.words import Where

if TYPE_CHECKING:
    from penstock.cluster.leader_link import LeaderLink

ROOM_PART: Final = 8
"""A client gets no more while less than this part of its buffer is free: it would come in crumbs."""


@dataclass(slots=True, eq=False)
class RemotePort:
    _link: "LeaderLink"
    number: int
    name: str
    protocol: str
    lost_to: Where
    peer: str
    connected: float  # by this machine's clock that nobody sets
    _buffer_bytes: int
    _room_told: int
    user: str = ""  # its name, as its own front-end has found out who it is, and what it may do
    sent: dict[str, int] | None = None  # known to its own front-end
    is_held: bool = False  # not read from
    blocked: bool = False  # its client does not read
    late: bool = False  # it has come back after its front-end led, and others may have got what it has
    undurable: int = 0  # deliveries that wait for the disk
    _bytes: int = 0  # delivered
    _count: int = 0
    _drained: int = 0  # of these bytes, how many have left the follower
    _count_told: int = 0  # deliveries that the follower had seen when it told its room

    # --- room ------------------------------------------------------------------------------------

    def bytes_room(self) -> int:
        room = self._buffer_bytes - (self._bytes - self._drained)
        return 0 if self._link.is_full or room * ROOM_PART < self._buffer_bytes else room

    def count_room(self) -> int:
        return self._room_told - (self._count - self._count_told)

    def drained(self, drained: int, count: int, room: int) -> None:
        """What the follower has told."""
        self._drained, self._count_told, self._room_told = drained, count, room

    # --- words -----------------------------------------------------------------------------------

    def deliver(self, queue: str, slices: list[Slice], now_us: int, dead: bool) -> None:
        offset_end = 0
        for piece in slices:
            self._bytes += piece.payload_bytes
            self._count += len(piece)
            offset_end = max(offset_end, piece.offset_end)
        body = [text_bytes(queue), NUMBER.pack(now_us), *pack_slices(slices)]
        frame = encode_frame(Kind.DELIVER, *body, port=self.number, flag=dead)
        if self.undurable or not self._link.is_durable(queue, offset_end):
            self._link.write_when_durable(self, frame)
        else:
            self._link.write(frame)

    def consuming(self, queue: str, dead: bool) -> None:
        self._say(Kind.CONSUMING, queue.encode(), flag=dead)

    def decline(self, queue: str, dead: bool) -> None:
        self._say(Kind.DECLINE, queue.encode(), flag=dead)

    def delivered(self, tickets: Sequence[int]) -> None:
        self._say(Kind.DELIVERED, array("I", tickets).tobytes())

    def replies(self, tickets: Sequence[int], answers: Batch) -> None:
        self._say(
            Kind.REPLIES,
            COUNT.pack(len(tickets)),
            array("I", tickets).tobytes(),
            *pack_batches([answers], answers.protocol),
        )

    def undelivered(self, tickets: Sequence[int]) -> None:
        self._say(Kind.UNDELIVERED, array("I", tickets).tobytes())

    def refused(self, count: int) -> None:
        """The follower's own business: see `sending.py`, as for the next."""

    def synced(self) -> None:
        """See `refused`."""

    def broadcast(self, queue: str, batch: Batch) -> None:
        self._link.broadcast(self.number, queue, batch)

    def hold(self, held: bool) -> None:
        self.is_held = held
        self._say(Kind.HOLD, flag=held)

    def finish(self) -> None:
        self._say(Kind.FINISH)

    def end(self) -> None:
        """An operator sends it away: its front-end does."""
        self._say(Kind.FINISH, flag=True)

    def end_late(self) -> None:
        """Others have got what it has: its front-end disconnects it."""
        self._link.write(encode_frame(Kind.FINISH, port=self.number, flag=FINISH_LATE))

    def about(self, now_us: int) -> dict[str, object]:
        """What is known of it here, for people; the rest its own front-end knows."""
        return {"front_end": self._link.front_end}

    def log(self, text: str, count: int) -> None:
        self._say(Kind.LOG, encode_json({"text": text, "count": count}))

    def _say(self, kind: Kind, *buffers: bytes | bytearray | memoryview, flag: bool = False) -> None:
        self._link.write(encode_frame(kind, *buffers, port=self.number, flag=flag))
