"""Lanes: how published messages travel from a follower to the leader, in order, and are stored once.

What the connections of a follower publish in one turn of its loop becomes a *shipment*: a number, and a batch
for each queue; several, in order, where some came with a TTL, if only 0, and some without. A lane counts
its shipments from 0; the leader stores them in that order, each as one transaction whose key ends with the
number. So the newest key of a lane tells of every number whether it is stored, and a shipment that is sent
again after a lost link or under a new leader is stored once.

    lane 0    the main one; many shipments may be on their way
    lane 1    for what was refused for lack of room: one at a time, tried again and again

Rules that always hold:
  * A refused shipment was not stored, and none behind it in its lane: the leader ignores what was sent before
    the follower heard of it (`epoch`, which begins with 0 on every link). The follower takes all of them
    back, and their batches travel again under new numbers.
  * A number that was stored is never used for anything else. Whoever begins to count anew does so in a new
    life, under keys that were never used.
"""

import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from penstock.cluster.columns import pack_batches, unpack_batch
from penstock.cluster.frames import Body, Buffer, Frame, Kind, encode_frame, text_bytes
from penstock.cluster.seats import Seat, Settlement
from penstock.model.batch import Batch
from penstock.model.words import Publish

MAIN, AGAIN = LANES = 0, 1
SHIPMENT_BYTES: Final = 1 << 20
"""About how much goes into one; a larger batch goes alone."""

BATCH_BYTES: Final = 512
MESSAGE_BYTES: Final = 8
ADDRESS_BYTES: Final = 64
"""What a batch, a message and a reply address cost besides the payload, in memory: an empty one, too."""

_SHIPMENT: Final = struct.Struct("<qqI")


class Item(NamedTuple):
    """What one connection has published in one chunk, for one queue."""

    seat: Seat
    publish: Publish
    late: float = 0.0  # a request: when (`time.monotonic`) nobody waits for its answer any more; 0: no limit
    alone: bool = False  # in a shipment of its own: one with others was refused, nobody knows for whose sake
    weight: int = 0  # see `weight_of`
    questions: int = 0  # that the connection had asked before, see `Seat.ask`


class Words(NamedTuple):
    """What one connection has said behind its messages, which it must not overtake: a frame."""

    seat: Seat
    frame: bytes
    settlement: Settlement | None  # the settlements in it

    @property
    def weight(self) -> int:
        return BATCH_BYTES + len(self.frame)


def weight_of(publish: Publish) -> int:
    """About how much memory a batch takes."""
    batch = publish.batch
    weight = BATCH_BYTES + len(batch.payload) + MESSAGE_BYTES * len(batch)
    if batch.ttl_seconds is not None:
        weight += MESSAGE_BYTES * len(batch)
    if batch.reply is not None:
        weight += ADDRESS_BYTES * len(batch)
    return weight


@dataclass(slots=True, eq=False)
class Part:
    """What a shipment has for one queue. All of it came with a TTL, if only 0, or none did."""

    queue: str
    protocol: str
    has_ttl: bool
    items: list[Item] = field(default_factory=list)


class Shipment:
    """Numbered, and on its way."""

    __slots__ = ("number", "parts", "weight")

    def __init__(self, number: int, items: Iterable[Item]) -> None:
        self.number = number
        self.weight = 0
        self.parts: list[Part] = []
        newest: dict[tuple[str, str], Part] = {}
        for item in items:
            batch = item.publish.batch
            key = item.publish.queue, batch.protocol
            has_ttl = batch.ttl_seconds is not None
            part = newest.get(key)
            if part is None or part.has_ttl != has_ttl:
                part = newest[key] = Part(*key, has_ttl)
                self.parts.append(part)
            part.items.append(item)
            self.weight += item.weight

    def items(self) -> list[Item]:
        return [item for part in self.parts for item in part.items]


@dataclass(slots=True, eq=False)
class Lane:
    """What is on its way, in order."""

    flag: int
    epoch: int = 0  # of this link: how many refusals have been heard of
    next_number: int = 0
    sent: deque[Shipment] = field(default_factory=deque)
    weight: int = 0

    def ship(self, items: Iterable[Item]) -> bytes:
        """The frame of a new shipment."""
        shipment = Shipment(self.next_number, items)
        frame = self.frame(shipment)  # first: what cannot be sent must not count as stored with the next
        self.next_number += 1
        self.sent.append(shipment)
        self.weight += shipment.weight
        return frame

    def frame(self, shipment: Shipment) -> bytes:
        return pack_shipment(self.flag, self.epoch, shipment)

    def stored(self, number: int) -> list[Shipment]:
        """Those up to that number, which are on their way no more."""
        done: list[Shipment] = []
        while self.sent and self.sent[0].number <= number:
            done.append(self._left(self.sent.popleft()))
        return done

    def refused(self, number: int) -> list[Shipment]:
        """The one of that number and all behind it, which are on their way no more."""
        self.epoch += 1
        back: list[Shipment] = []
        while self.sent and self.sent[-1].number >= number:
            back.append(self._left(self.sent.pop()))
        back.reverse()
        return back

    def clear(self) -> None:
        self.sent.clear()
        self.weight = 0

    def _left(self, shipment: Shipment) -> Shipment:
        self.weight -= shipment.weight
        return shipment


def pack_shipment(lane: int, epoch: int, shipment: Shipment) -> bytes:
    buffers: list[Buffer] = [_SHIPMENT.pack(epoch, shipment.number, len(shipment.parts))]
    for part in shipment.parts:
        batches = [item.publish.batch for item in part.items]
        buffers.append(text_bytes(part.queue))
        buffers += pack_batches(batches, part.protocol)
    return encode_frame(Kind.PUBLISH, *buffers, flag=lane)


def unpack_shipment(frame: Frame) -> tuple[int, int, list[tuple[str, Batch]]]:
    """Epoch, number, and batches with their queues."""
    body = Body(frame)
    epoch, number, count = body.numbers(_SHIPMENT)
    parts = [(body.text(), unpack_batch(body)) for _ in range(count)]
    body.end()
    if frame.flag not in LANES or not parts:
        raise body.bad(f"{count} parts in lane {frame.flag}")
    return epoch, number, parts


def series_of(front_end: str, life: str, lane: int) -> str:
    """What the keys of a lane's transactions begin with."""
    return f"relay/{front_end}/{life}.{lane}/"


def number_of(key: str | None) -> int:
    """The number of the shipment that was stored under a key; -1: none was."""
    return int(key.rpartition("/")[2]) if key is not None else -1
