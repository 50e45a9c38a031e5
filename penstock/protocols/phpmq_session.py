"""PHPMQ sessions: windows, the dead-letter door, and what a chunk means to the broker.

Sends and verdicts are possible at any time and never answered. What a connection must have asked for are
dispatches: a *window* on a queue, at most so many unsettled messages at the client.

                      asked             asked again, dispatched
        closed ──────────────────► open ◄─────────┐
           ▲                       │ └────────────┘
           └───────────────────────┘
             asked for none, replaced

A client also tells apart the queues that it never asked for: a dispatch from there is the server's fault,
while one from a closed window was on its way already.

The broker keeps the credit: how many messages fit into a window now, and which ones this connection holds,
is its knowledge alone, and `words.Settle` is checked there. The session keeps which windows are open and in
which dialect they were asked for, because that is how their dispatches are written.

Rules that always hold:
  * Dispatches of a queue are written in the dialect of the last consume request for it.
  * `NAME.dead` is the door to the dead letters of NAME. It can be consumed from, under that name; what is
    sent there is stored nowhere and counted as `words.Ignored`, because PHPMQ has no way to answer.
  * An id that cannot be one of ours is `words.Ignored`, never a violation.

How it fails: `PeerViolation` from the reader passes through, and so does one for too many windows; the
commands that came before it in the same chunk wait in `salvage()`, and every later `receive` raises the same
again. A call that the tables do not have raises `MisuseError` and changes nothing.
"""

import sys
from array import array
from binascii import unhexlify
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import ClassVar, Final

from penstock.build import COMPILED
from penstock.model.batch import Batch, Slice
from penstock.model.ids import ID_DIGITS, ORIGIN_DIGITS, split_id
from penstock.model.policy import DEAD_SUFFIX, door_of
from penstock.model.words import (
    Cancel,
    Command,
    Consume,
    Ignored,
    Outcome,
    Publish,
    Ranges,
    Settle,
    Sync,
    Where,
)
from penstock.protocols import phpmq
from penstock.protocols.errors import MisuseError, PeerViolation
from penstock.protocols.phpmq import (
    LIMITS,
    ConsumeRequested,
    Dialect,
    Dispatched,
    Event,
    Limits,
    MessageType,
    PacketType,
    Sent,
    Settled,
)
from penstock.protocols.phpmq_read import Reader
from penstock.protocols.phpmq_write import TtlPacket, Writer
from penstock.protocols.share import SCATTERED_BYTES, SCATTERED_RANGES, SHARE, WINDOW_BYTES

if COMPILED:
    from penstock.protocols import loops


class ConsumeMode(Enum):
    """What a consume request for another queue does to the windows that are there."""

    ADD = "add"  # they stay
    REPLACE = "replace"  # they are closed, as the original server does it


class Window(Enum):
    NEVER = "never opened"  # a client's: it has not asked for this queue yet
    CLOSED = "closed"
    OPEN = "open"


class Cause(Enum):
    ASKED = "asked for"
    ASKED_NONE = "asked for none"
    REPLACED = "replaced"
    DISPATCHED = "dispatched to"


SERVER_WINDOWS: dict[tuple[Window, Cause], Window] = {
    (Window.CLOSED, Cause.ASKED): Window.OPEN,
    (Window.OPEN, Cause.ASKED): Window.OPEN,
    (Window.OPEN, Cause.ASKED_NONE): Window.CLOSED,
    (Window.OPEN, Cause.REPLACED): Window.CLOSED,
    (Window.OPEN, Cause.DISPATCHED): Window.OPEN,
}
"""A missing cell: the request is ignored, and a dispatch is misuse."""

CLIENT_WINDOWS: dict[tuple[Window, Cause], Window] = {
    (Window.NEVER, Cause.ASKED): Window.OPEN,
    (Window.OPEN, Cause.ASKED): Window.OPEN,
    (Window.OPEN, Cause.ASKED_NONE): Window.CLOSED,
    (Window.OPEN, Cause.DISPATCHED): Window.OPEN,
    (Window.CLOSED, Cause.ASKED): Window.OPEN,
    (Window.CLOSED, Cause.DISPATCHED): Window.CLOSED,  # it was on its way already
}
"""A missing cell: a request is misuse, and a dispatch is a violation by the server."""

OUTCOMES = {
    MessageType.ACKNOWLEDGE: Outcome.ACK,
    MessageType.REQUEUE: Outcome.REQUEUE,
    MessageType.DEAD_LETTER: Outcome.REJECT,
}

ACKNOWLEDGE: Final = MessageType.ACKNOWLEDGE  # what comes with every chunk is looked up once
ACK: Final = Outcome.ACK

IGNORED_SENT_DEAD = "phpmq: sent to NAME.dead, where nobody can send; not stored"
IGNORED_FOREIGN_ID = "phpmq: an id that this broker never gave"
IGNORED_TWICE = "phpmq: acknowledged twice"
IGNORED_NOT_OPEN = "phpmq: asked for no messages of a queue that it does not consume"

_HEX_DIGITS = b"0123456789abcdef"
_ID_BYTES = ID_DIGITS // 2
_ORIGIN_BYTES = ORIGIN_DIGITS // 2


class ServerSession:
    """The broker's end of one PHPMQ connection."""

    LOST_TO: ClassVar[Where] = Where.PLACE
    """Where a message goes whose consumer is lost."""

    def __init__(
        self,
        *,
        ttl_packet: TtlPacket | str = TtlPacket.AUTO,
        consume: ConsumeMode | str = ConsumeMode.ADD,
        limits: Limits = LIMITS,
        share: int = SHARE,
    ) -> None:
        try:
            self._ttl_packet = TtlPacket(ttl_packet)
            self._consume = ConsumeMode(consume)
        except ValueError as error:
            raise MisuseError(f"phpmq: {error}") from None
        self._limits = limits
        self.reader = Reader(phpmq.FROM_CLIENT, limits, share)
        # What writes the dispatches of each open window, by queue and whether its dead letters are meant.
        self._open: dict[tuple[str, bool], Writer] = {}
        self._settles_scattered = False  # in its last chunk: the next may have as many, and is read in parts
        self._violation: PeerViolation | None = None
        self._salvaged: list[Command] = []
        self._sync_dialect = Dialect()  # in which the peer has asked what is stored
        self._name = ""  # that was spoken of last, and its door
        self._door = ("", False)

    @property
    def held_bytes(self) -> int:
        """What it keeps of what its peer has said, with what windows take elsewhere."""
        return self.reader.held_bytes + WINDOW_BYTES * len(self._open)

    @property
    def position(self) -> int:
        """How many bytes of the stream have been read."""
        return self.reader.position

    def window(self, queue: str, *, dead: bool = False) -> Window:
        """Whether this connection consumes from a queue, or from its dead letters."""
        return Window.OPEN if (queue, dead) in self._open else Window.CLOSED

    def receive(self, data: bytes | bytearray | memoryview) -> list[Command]:
        """What the peer wants with a chunk. The caller may reuse `data` afterwards."""
        if self._violation is not None:
            raise self._violation
        later = b""
        if self._settles_scattered:
            self._settles_scattered = False
            bytes_max = SCATTERED_BYTES * self.reader.share
            if len(data) > bytes_max:
                later, data = bytes(data[bytes_max:]), data[:bytes_max]
        try:
            events = self.reader.feed(data)
            self.reader.rest += later
        except PeerViolation as violation:
            self._violation, events = violation, self.reader.salvage()
        commands: list[Command] = []
        ignored: dict[str, Ignored] = {}
        try:
            for event in events:
                self._event(event, commands, ignored)
        except PeerViolation as violation:
            self._violation = violation  # it stands before what the reader may have found
        if ignored:
            commands += ignored.values()
        if self._violation is not None:
            self._salvaged = commands
            raise self._violation
        return commands

    def salvage(self) -> list[Command]:
        """After a violation: the commands before it in the same chunk. Gives them once."""
        commands, self._salvaged = self._salvaged, []
        return commands

    def deliver(self, queue: str, slices: Iterable[Slice], now_us: int, dead: bool = False) -> bytes:
        """Dispatches of a queue, or of its dead letters."""
        return b"".join(self.delivery(queue, list(slices), now_us, dead))

    def delivery(
        self, queue: str, slices: list[Slice], now_us: int, dead: bool = False
    ) -> list[bytes | memoryview]:
        """The same as buffers for one write."""
        writer = self._open.get((queue, dead))
        if writer is None:  # the missing cell of SERVER_WINDOWS
            state = self.window(queue, dead=dead).value
            raise MisuseError(f"phpmq: queue {queue!r}: cannot dispatch, the window is {state}")
        name = queue + DEAD_SUFFIX if dead else queue
        return writer.dispatch_parts(name, slices, now_us, self._ttl_packet, dead)

    def synced(self, refused: int) -> bytes:
        """Everything that the peer had said when it asked for this is stored, but for so many messages."""
        return _sync_answer(self._sync_dialect, refused)

    def _event(self, event: Event, commands: list[Command], ignored: dict[str, Ignored]) -> None:
        if event.queue != self._name:
            self._name, self._door = event.queue, door_of(event.queue)
        if isinstance(event, Settled):
            self._settle(event, self._door, commands, ignored)
        elif isinstance(event, ConsumeRequested):
            self._ask(event, self._door, commands, ignored)
        elif isinstance(event, Sent):
            queue, dead = self._door
            if dead:
                _note(ignored, IGNORED_SENT_DEAD, event.queue, len(event.batch))
            else:
                commands.append(Publish(queue, event.batch))

    def _ask(
        self,
        event: ConsumeRequested,
        door: tuple[str, bool],
        commands: list[Command],
        ignored: dict[str, Ignored],
    ) -> None:
        if event.queue == phpmq.SYNC_QUEUE and not event.count:
            self._sync_dialect = event.dialect
            commands.append(Sync())
            return
        cause = Cause.ASKED if event.count else Cause.ASKED_NONE
        after = SERVER_WINDOWS.get((self.window(door[0], dead=door[1]), cause))
        if after is None:
            _note(ignored, IGNORED_NOT_OPEN, event.queue, 1)
            return
        if after is Window.CLOSED:
            self._close(door, commands)
            return
        if self._consume is ConsumeMode.REPLACE:
            for other in [key for key in self._open if key != door]:
                self._close(other, commands)
        if door not in self._open and len(self._open) >= self._limits.windows_max:
            raise PeerViolation(
                phpmq.PROTOCOL,
                f"more than {self._limits.windows_max} queues to consume from",
                position=event.position,
                offending=event.queue.encode(),
            )
        self._open[door] = Writer(event.dialect, self._limits)
        commands.append(Consume(door[0], event.count, dead=door[1]))

    def _close(self, door: tuple[str, bool], commands: list[Command]) -> None:
        queue, dead = door
        del self._open[door]
        commands.append(Cancel(queue, dead=dead))

    def _settle(
        self,
        event: Settled,
        door: tuple[str, bool],
        commands: list[Command],
        ignored: dict[str, Ignored],
    ) -> None:
        queue, dead = door
        outcome = ACK if event.type_ is ACKNOWLEDGE else OUTCOMES[event.type_]
        if event.id_bytes != ID_DIGITS:
            _note(ignored, IGNORED_FOREIGN_ID, event.queue, event.count)
            return
        if COMPILED:
            named = loops.offset_ranges(event.joined, ID_DIGITS, ORIGIN_DIGITS)
            # More than one range of acknowledgements may be fewer in another order.
            if named is not None and (len(named) == 1 or outcome is not ACK):
                origin = event.joined[:ORIGIN_DIGITS]
                self._note_scattered(len(named), event.count)
                commands.append(Settle(queue, outcome, origin, named, event.ttl_seconds, dead))
                return
        by_origin, foreign = split_ids(event.joined)
        for origin, offsets in by_origin.items():
            ranges = ranges_of(offsets)
            if outcome is ACK and len(ranges) > 1:
                # In which order messages are done does not matter, so that parallel workers still give
                # few ranges. Where a message goes to a tail, the order is the peer's.
                unique = sorted(set(offsets))
                ranges = ranges_of(unique)
                if len(unique) < len(offsets):
                    _note(ignored, IGNORED_TWICE, event.queue, len(offsets) - len(unique))
            self._note_scattered(len(ranges), len(offsets))
            commands.append(Settle(queue, outcome, origin, ranges, event.ttl_seconds, dead))
        if foreign:
            _note(ignored, IGNORED_FOREIGN_ID, event.queue, foreign)

    def _note_scattered(self, ranges: int, messages: int) -> None:
        if ranges > SCATTERED_RANGES and 2 * ranges > messages:
            self._settles_scattered = True


def _sync_answer(dialect: Dialect, refused: int) -> bytes:
    packets = (
        (PacketType.QUEUE, phpmq.SYNC_QUEUE.encode()),
        (PacketType.CONTENT, b"%d" % refused),
        (PacketType.ID, phpmq.SYNC_ID),
    )
    return dialect.message_header(MessageType.DISPATCH, len(packets)) + b"".join(
        dialect.packet(type_, content) for type_, content in packets
    )


def _note(ignored: dict[str, Ignored], reason: str, queue: str, count: int) -> None:
    """Adds to what a chunk did in vain. The queue is that of the first of its kind."""
    ignored.setdefault(reason, Ignored(reason, 0, f"queue {queue!r}")).count += count


def split_ids(joined: bytes) -> tuple[dict[bytes, list[int]], int]:
    """Ids, one after the other, as offsets by origin, in their order, and how many cannot be ours.

    The common case, well-formed ids of one origin, is done for all ids together.
    """
    count = len(joined) // ID_DIGITS
    if count and not joined.translate(None, _HEX_DIGITS):
        raw = bytearray(unhexlify(joined))
        if all(raw[at::_ID_BYTES].count(raw[at]) == count for at in range(_ORIGIN_BYTES)):
            # The last byte of the origin stands where the offset's number needs a zero.
            raw[_ORIGIN_BYTES - 1 :: _ID_BYTES] = bytes(count)
            numbers = array("Q", bytes(raw))
            if sys.byteorder == "little":
                numbers.byteswap()
            return {joined[:ORIGIN_DIGITS]: numbers[1::2].tolist()}, 0
    by_origin: dict[bytes, list[int]] = {}
    foreign = 0
    for at in range(0, len(joined), ID_DIGITS):
        parts = split_id(joined[at : at + ID_DIGITS])
        if parts is None:
            foreign += 1
        else:
            by_origin.setdefault(parts[0], []).append(parts[1])
    return by_origin, foreign


def ranges_of(offsets: Sequence[int]) -> Ranges:
    """Neighbours in a sequence of offsets as ranges, in the order in which they stand there."""
    if not offsets:
        return []
    first, count = offsets[0], len(offsets)
    if offsets[-1] == first + count - 1 and offsets == list(range(first, first + count)):
        return [(first, first + count)]
    ranges: Ranges = []
    end = first
    for offset in offsets:
        if offset != end:
            ranges.append((first, end))
            first = offset
        end = offset + 1
    ranges.append((first, end))
    return ranges


class ClientSession:
    """A client's end of one PHPMQ connection. Every method but `receive` returns bytes to write."""

    def __init__(self, dialect: Dialect | None = None, *, limits: Limits = LIMITS) -> None:
        self._writer = Writer(dialect or Dialect(), limits)
        self._reader = Reader(phpmq.FROM_SERVER, limits)
        self._windows: dict[str, Window] = {}
        self._violation: PeerViolation | None = None
        self._salvaged: list[Dispatched] = []

    def window(self, queue: str) -> Window:
        """Whether this client has asked for messages of a queue."""
        return self._windows.get(queue, Window.NEVER)

    def send(self, queue: str, batch: Batch) -> bytes:
        """Messages for a queue, as one buffer."""
        if door_of(queue)[1]:
            raise MisuseError(f"phpmq: nobody can send to {queue!r}: it is the door to dead letters")
        return self._writer.sends(queue, batch)

    def consume(self, queue: str, count: int) -> bytes:
        """Opens a window on a queue, changes it, or closes it with a count of 0."""
        after = CLIENT_WINDOWS.get((self.window(queue), Cause.ASKED if count else Cause.ASKED_NONE))
        if after is None:
            raise MisuseError(f"phpmq: queue {queue!r}: the window is {self.window(queue).value}")
        encoded = self._writer.consume(queue, count)
        self._windows[queue] = after
        return encoded

    def sync(self) -> bytes:
        """Asks whether everything so far is stored; the answer comes as a dispatch of `phpmq.SYNC_QUEUE`."""
        self._windows[phpmq.SYNC_QUEUE] = Window.CLOSED
        return self._writer.consume(phpmq.SYNC_QUEUE, 0)

    def ack(self, queue: str, ids: Iterable[bytes]) -> bytes:
        """These messages are done."""
        return self._verdict(MessageType.ACKNOWLEDGE, queue, ids)

    def requeue(self, queue: str, ids: Iterable[bytes], ttl_seconds: int = 0) -> bytes:
        """These messages again later, at the tail, with a new TTL or none."""
        return self._verdict(MessageType.REQUEUE, queue, ids, ttl_seconds)

    def reject(self, queue: str, ids: Iterable[bytes]) -> bytes:
        """These messages never again."""
        return self._verdict(MessageType.DEAD_LETTER, queue, ids)

    def receive(self, data: bytes | bytearray | memoryview) -> list[Dispatched]:
        """What the server dispatches with a chunk. The caller may reuse `data` afterwards.

        Messages of a queue that was never asked for are a violation; its position is then that of
        the chunk's end.
        """
        if self._violation is not None:
            raise self._violation
        try:
            events = self._reader.feed(data)
        except PeerViolation as violation:
            self._violation, events = violation, self._reader.salvage()
        dispatched: list[Dispatched] = []
        for event in events:
            if not isinstance(event, Dispatched):
                continue  # the reader of this side gives no other
            if (self.window(event.queue), Cause.DISPATCHED) not in CLIENT_WINDOWS:
                self._violation = PeerViolation(
                    phpmq.PROTOCOL,
                    f"messages of queue {event.queue!r}, which was never asked for",
                    position=self._reader.position,
                    offending=event.queue.encode(),
                )
                break
            dispatched.append(event)
        if self._violation is not None:
            self._salvaged = dispatched
            raise self._violation
        return dispatched

    def salvage(self) -> list[Dispatched]:
        """After a violation: what came before it in the same chunk. Gives it once."""
        dispatched, self._salvaged = self._salvaged, []
        return dispatched

    def _verdict(self, type_: MessageType, queue: str, ids: Iterable[bytes], ttl_seconds: int = 0) -> bytes:
        if self.window(queue) is Window.NEVER:
            raise MisuseError(f"phpmq: queue {queue!r}: no verdict on messages that were never asked for")
        return self._writer.settlements(type_, queue, ids, ttl_seconds)
