"""PHPMQ read: bytes to events, in every dialect, with no configuration.

There are two ways through a stream, and they give the same answer. The *careful* way, here, takes a
message apart item by item (a table of steps), checks everything, and can stop after any byte and go on with
the next chunk. The *quick* way, `phpmq_runs.Shapes`, takes whole messages that look like earlier ones;
`QUICK` is how a test does without it.

The dialect of a message: after the message header comes `P` or a line break, and that decides line
breaks. If the first packet is the queue name, its length decides the width. A name has 1 to 999 bytes: its
length is in the last three digits.

    digits   1 to 29     30 to 32   33 or what follows
    32       not zero    –
    36       zero        zero       a digit                            a name of 1 to 9 bytes
    35       zero        not zero   a line break, where there are such
    36       zero        not zero   a digit, where there are line breaks
    35       zero        not zero   the name, and a packet header of 35 bytes behind it
    36       zero        not zero   none of these                      a name of 10 bytes or more

The fifth row looks at what stands behind the name: every message has a second packet. It would take the sixth
for itself only where a queue has a packet header of 35 bytes in its name. If another packet comes first,
the width last seen on the connection holds, and 32 on a fresh one.

Rules that always hold:
  * A message is complete with its last content. The line break after that is taken when it comes, and
    nobody waits for it.
  * No announced length or count is believed before it is checked against its limit, and no number is
    converted before its digits are counted. An unfinished content gathers in one buffer that grows with
    what came, and is handed on without another copy.
  * A `Reader` copies what it keeps: the caller may reuse its receive buffer as soon as `feed` returns.
  * How a stream is cut into chunks changes how events are grouped, never what they say.
  * What is done for one chunk is bounded by its share (`share.py`); the `rest` is for the next call.

How it fails: anything malformed raises `PeerViolation`; the events before it in the same chunk wait in
`salvage()`, and every later `feed` raises the same again.
"""

from collections.abc import Callable
from enum import IntEnum, auto
from functools import cache
from typing import NoReturn

from penstock.model.policy import QueueNameError, check_queue_name, door_of
from penstock.protocols.errors import PeerViolation
from penstock.protocols.gathering import Gathering
from penstock.protocols.phpmq import (
    ALLOWED,
    LENGTH_DIGITS_BELIEVED,
    LIMITS,
    MESSAGE_HEADER_BYTES,
    MESSAGE_TYPES,
    PACKET_TYPES,
    PROTOCOL,
    REQUIRED,
    SETTLEMENTS,
    VERSION,
    WIDTHS,
    ConsumeRequested,
    Dialect,
    Event,
    Limits,
    MessageType,
    PacketType,
)
from penstock.protocols.phpmq_runs import TTL_OF_EACH, Runs, Shapes
from penstock.protocols.share import UNBOUNDED

_NARROW, _MIDDLE, _WIDE = WIDTHS
_DIALECTS = {
    (width, line_breaks): Dialect(width, line_breaks) for width in WIDTHS for line_breaks in (False, True)
}
_LINE_BREAK = ord("\n")
_NUMBERS = frozenset({PacketType.COUNT, PacketType.TTL})
_NEVER_EMPTY = frozenset({PacketType.QUEUE, *_NUMBERS})
_CHUNK_BYTES_MAX = 1 << 30  # larger chunks are read in pieces, so that a batch's bounds fit in int32
_QUICK_COST, _CAREFUL_COST = 1, 4  # of messages that look like earlier ones, together; of one that does not

# From this size on a content that came in pieces becomes a batch of its own: joining it with its
# neighbours would copy it once more.
_ALONE_BYTES = 1 << 20

LARGE_BYTES = 16 * 1024
"""From this size on the quick way does not copy a content with its chunk. Tests have less."""

QUICK = True
"""Whether a new `Reader` has the quick way. It has; tests of the careful way do without."""


class _Step(IntEnum):
    """What the careful way gathers next."""

    HEADER = auto()
    FIRST_BREAK = auto()  # a line break, or the P of the first packet
    PACKET = auto()
    PACKET_REST = auto()  # what a wider header has behind the first 32 bytes, which were looked at
    WIDTH = auto()  # what tells 35-byte headers from 36-byte ones
    PACKET_BREAK = auto()
    CONTENT = auto()
    CONTENT_BREAK = auto()


@cache
def _content_bytes_max(limits: Limits) -> dict[PacketType, int]:
    """One for all readers that have the same limits."""
    return limits.content_bytes_max()


class Reader:
    """One direction of one connection, from bytes to events."""

    def __init__(
        self, accepts: frozenset[MessageType], limits: Limits = LIMITS, share: int = UNBOUNDED
    ) -> None:
        self.dialect = _DIALECTS[_NARROW, False]
        """Of the last message, or what is assumed before the first."""

        self.rest = b""
        """What the share did not reach of the last chunk. It is the caller's, who feeds it next."""

        self.held_bytes = 0
        """What it keeps between two chunks of a message that is not whole."""

        self.share = share
        self._accepts = accepts
        self._limits = limits
        self._content_bytes_max = _content_bytes_max(limits)
        self._position = 0  # of the first byte of the chunk at hand in the stream
        self._violation: PeerViolation | None = None
        self._runs = Runs()
        self._shapes = Shapes(limits.payload_bytes_max, LARGE_BYTES)
        self._quick = QUICK

        # The careful way: what is gathered now, and the message so far.
        self._step = _Step.HEADER
        self._need = MESSAGE_HEADER_BYTES  # how many bytes the item at hand still lacks
        self._partial: Gathering | None = None  # an item that began in an earlier chunk
        self._break_allowed = False  # after the last content of a message with line breaks
        self._start = 0  # position of the message in the stream
        self._header = b""
        self._type = MessageType.MESSAGE
        self._count = 0
        self._line_breaks = False
        self._width = 0  # of this message's packet headers; 0: not known yet
        self._packet_header = b""
        self._packet_type = PacketType.QUEUE
        self._packet_size = 0
        self._packets: dict[PacketType, bytes] = {}

    @property
    def position(self) -> int:
        """How many bytes of the stream have been read."""
        return self._position

    @property
    def unfinished(self) -> bool:
        """Whether a message has begun, and its rest is not there."""
        return self._partial is not None or self._step is not _Step.HEADER

    def feed(self, data: bytes | bytearray | memoryview) -> list[Event]:
        """What a chunk says, together with what was left of the chunks before it."""
        if self._violation is not None:
            raise self._violation
        self.rest = b""
        if len(data) <= _CHUNK_BYTES_MAX:
            self._feed(data, self.share)
        else:
            view = memoryview(data)
            for at in range(0, len(data), _CHUNK_BYTES_MAX):
                self._feed(view[at : at + _CHUNK_BYTES_MAX], UNBOUNDED)
        return self.salvage()

    def salvage(self) -> list[Event]:
        """After a violation: the events before it in the same chunk. Gives them once."""
        return self._runs.take()

    def _feed(self, data: bytes | bytearray | memoryview, left: int) -> None:
        if self._quick and isinstance(data, memoryview) and len(data) >= LARGE_BYTES:
            at = self._take_large(data)
            if at:
                self._position += at
                data = data[at:]
                left -= _QUICK_COST
        at = 0
        if self._partial is not None:
            at = min(self._need, len(data))
            self._partial.write(memoryview(data)[:at])
            self._need -= at
            if self._need:
                self._position += at
                self._weigh()
                return
        if not isinstance(data, bytes):
            # One copy of the chunk costs a tenth of what slicing a memoryview for each content would. The
            # byte before `at` stays, because a step may give it back.
            start = max(at - 1, 0)
            data = bytes(memoryview(data)[start:]) if start else bytes(data)
            self._position += start
            at -= start
        if self._partial is not None or self._step is not _Step.HEADER:
            at = self._careful(data, at)
        end = len(data)
        while at < end:
            if self._break_allowed:
                self._break_allowed = False
                if data[at] == _LINE_BREAK:
                    at += 1
                    continue
            start = at
            if left <= 0:
                self.rest = data[start:]
                end = start
                break
            at, dialect = self._shapes.take(data, start, self._runs) if self._quick else (start, None)
            left -= _QUICK_COST
            if dialect is None:
                at = self._careful(data, start)
                left -= _CAREFUL_COST
            else:
                self.dialect = dialect
        self._runs.close()
        self._position += end
        self._weigh()

    def _weigh(self) -> None:
        self.held_bytes = 0
        if self._step is not _Step.HEADER:
            begun = self._partial.tell() if self._partial is not None else 0
            self.held_bytes = begun + sum(map(len, self._packets.values()))

    def _take_large(self, data: memoryview) -> int:
        """Large contents, which are not copied with the chunk; returns what is read of it.

        That is as if the chunk had been cut there: behind what was gathered, behind whole messages, and in
        front of a content that is not whole.
        """
        at = 0
        if self._step is _Step.CONTENT and self._partial is not None and self._need <= len(data):
            at = self._need
            self._partial.write(data[:at])
            self._need = 0
            self._position += at
            self._careful(b"", 0)
            self._position -= at
        if self._step is not _Step.HEADER or self._partial is not None:
            return at
        if self._break_allowed and at < len(data):
            self._break_allowed = False
            if data[at] == _LINE_BREAK:
                at += 1
        start, shape = at, self._shapes.last
        at, content = self._shapes.take_large(data, start, self._runs)
        if at > start and shape is not None:
            self.dialect = shape.dialect
        if not content:
            return at
        self._position += at
        self._careful(bytes(data[at:content]), 0)
        self._position -= at
        return content

    def _careful(self, data: bytes, at: int) -> int:
        """Goes on until a message is complete or the chunk is used up; returns where it stands."""
        end = len(data)
        while True:
            stop = at + self._need
            if self._partial is not None:
                stop = min(stop, end)
                self._partial.write(memoryview(data)[at:stop])
                self._need -= stop - at
                if self._need:
                    return end
                item = self._partial.getvalue()
                self._partial = None
            elif stop <= end:
                item = data[at:stop]
            else:
                self._partial = Gathering(self._need, memoryview(data)[at:])
                self._need = stop - end
                return end
            at = stop - _STEPS[self._step](self, item, self._position + stop - len(item))
            if self._step is _Step.HEADER:
                return at

    def _next(self, step: _Step, need: int) -> None:
        self._step = step
        self._need = need

    def _on_header(self, item: bytes, position: int) -> int:
        version, type_bytes, count = item[1:3], item[3:6], item[6:8]
        type_ = MESSAGE_TYPES.get(type_bytes)
        if item[:1] != b"H":
            self._violate("a message header must begin with H", position, item)
        if version != VERSION:
            self._violate(f"protocol version {_text(version)} is not {_text(VERSION)}", position, item)
        if type_ is None:
            self._violate(f"no message type {_text(type_bytes)}", position, item)
        if type_ not in self._accepts:
            self._violate(f"message type {_text(type_bytes)} is not for this side", position, item)
        if not count.isdigit():
            self._violate(f"packet count {_text(count)} is not a number", position, item)
        if not 1 <= int(count) <= self._limits.packets_per_message_max:
            limit = self._limits.packets_per_message_max
            self._violate(f"packet count {int(count)} is not 1 to {limit}", position, item)
        self._start = position
        self._header = item
        self._type = type_
        self._count = int(count)
        self._width = 0
        self._packets = {}
        self._next(_Step.FIRST_BREAK, 1)
        return 0

    def _on_first_break(self, item: bytes, position: int) -> int:
        if item not in b"\nP":
            self._violate("a packet or a line break must follow the message header", position, item)
        self._line_breaks = item == b"\n"
        self._next(_Step.PACKET, _NARROW)
        return 0 if self._line_breaks else 1  # the P belongs to the packet header: it is given back

    def _on_packet(self, item: bytes, position: int) -> int:
        type_ = PACKET_TYPES.get(item[1:3])
        if item[:1] != b"P":
            done = f"{len(self._packets)} of {self._count} are there"
            self._violate(f"a packet header must begin with P ({done})", position, item)
        if type_ is None:
            self._violate(f"no packet type {_text(item[1:3])}", position, item)
        if type_ not in ALLOWED[self._type]:
            what = f"packet {type_:02d} does not belong to message {self._type:03d}"
            self._violate(what, position, item)
        if type_ in self._packets:
            what = f"message {self._type:03d} has packet {type_:02d} twice"
            self._violate(what, position, item)
        if not item[3:].isdigit():
            self._violate("a content length must be digits", position, item)
        self._packet_type = type_
        if self._width == 0:
            self._packet_header = item
            if type_ is not PacketType.QUEUE:
                self._width = self.dialect.packet_header_bytes
            elif item[3:].strip(b"0"):
                self._width = _NARROW
            else:
                self._next(_Step.PACKET_REST, _MIDDLE - _NARROW)
                return 0
            if self._width > _NARROW:
                self._next(_Step.PACKET_REST, self._width - _NARROW)
                return 0
        self._sized(item, position)
        return 0

    def _on_packet_rest(self, item: bytes, position: int) -> int:
        header = self._packet_header + item
        position -= len(self._packet_header)
        if not item.isdigit():
            self._violate("a content length must be digits", position, header)
        if self._width:
            self._sized(header, position)
            return 0
        self._packet_header = header
        name_bytes = int(item)
        if self._line_breaks or not name_bytes:
            self._next(_Step.WIDTH, 1)
        elif name_bytes > self._limits.queue_name_bytes_max:
            self._sized(header, position)  # over the limit in either width
        else:
            self._next(_Step.WIDTH, name_bytes + _MIDDLE)
        return 0

    def _on_width(self, item: bytes, position: int) -> int:
        header = self._packet_header
        name_bytes = int(header[_NARROW:])
        if not name_bytes or (self._line_breaks and item != b"\n"):
            middle = False
        else:
            # Without line breaks: a digit may be the header's last one or the name's first byte.
            behind = item[name_bytes:]
            middle = not item[:1].isdigit() or (
                behind[:1] == b"P" and behind[1:3] in PACKET_TYPES and behind[3:].isdigit()
            )
        rest = item
        if middle:
            self._width = _MIDDLE
        else:
            self._width = _WIDE
            header, rest = header + item[:1], item[1:]
            if not item[:1].isdigit():
                self._violate("a content length must be digits", position - len(self._packet_header), header)
        self._sized(header, position - len(self._packet_header))
        if rest:
            # What was looked at is read now. It never goes beyond the header of the second packet.
            before, self._position = self._position, position + len(item) - len(rest)
            try:
                self._careful(rest, 0)
            finally:
                self._position = before
        return 0

    def _sized(self, header: bytes, position: int) -> None:
        """A packet header is complete: is its length one that we want?"""
        digits = header[3:].lstrip(b"0")
        type_, limit = self._packet_type, self._content_bytes_max[self._packet_type]
        if len(digits) > LENGTH_DIGITS_BELIEVED or int(digits or b"0") > limit:
            what = f"packet {type_:02d} of {_text(digits)} bytes"
            self._violate(f"{what} is over the limit of {limit}", position, header)
        if not digits and type_ in _NEVER_EMPTY:
            self._violate(f"packet {type_:02d} must not be empty", position, header)
        self._packet_size = int(digits or b"0")
        if self._line_breaks:
            self._next(_Step.PACKET_BREAK, 1)
        else:
            self._next(_Step.CONTENT, self._packet_size)

    def _on_packet_break(self, item: bytes, position: int) -> int:
        if item != b"\n":
            self._violate("a line break must follow a packet header here", position, item)
        self._next(_Step.CONTENT, self._packet_size)
        return 0

    def _on_content(self, item: bytes, position: int) -> int:
        type_ = self._packet_type
        if type_ in _NUMBERS and not item.isdigit():
            self._violate(f"packet {type_:02d} must be digits", position, item)
        if type_ is PacketType.QUEUE and (wrong := _wrong_with_name(item, self._limits)):
            self._violate(wrong, position, item)
        self._packets[type_] = item
        if len(self._packets) == self._count:
            self._complete()
            self._break_allowed = self._line_breaks
            self._next(_Step.HEADER, MESSAGE_HEADER_BYTES)
        elif self._line_breaks:
            self._next(_Step.CONTENT_BREAK, 1)
        else:
            self._next(_Step.PACKET, self._width)
        return 0

    def _on_content_break(self, item: bytes, position: int) -> int:
        if item != b"\n":
            self._violate("a line break must follow a content here", position, item)
        self._next(_Step.PACKET, self._width)
        return 0

    def _complete(self) -> None:
        """Files the message whose packets are all there, and remembers what it looks like."""
        type_, packets = self._type, self._packets
        for needed in REQUIRED[type_]:
            if needed not in packets:
                what = f"message {type_:03d} lacks packet {needed:02d}"
                self._violate(what, self._start, self._header)
        self.dialect = _DIALECTS[self._width, self._line_breaks]
        queue = packets[PacketType.QUEUE].decode()
        ttl_seconds = int(packets.get(PacketType.TTL, b"0"))
        if type_ is MessageType.CONSUME:
            count = int(packets[PacketType.COUNT])
            self._runs.add(ConsumeRequested(queue, count, self.dialect, self._start))
            return
        if type_ in SETTLEMENTS:
            id_ = packets[PacketType.ID]
            self._runs.of(type_, queue, ttl_seconds, len(id_)).ids.append(id_)
        else:
            self._file(queue, packets, ttl_seconds)
        self._shapes.learn(type_, queue, self.dialect, packets)

    def _file(self, queue: str, packets: dict[PacketType, bytes], ttl_seconds: int) -> None:
        """A message with a content."""
        content = packets[PacketType.CONTENT]
        if len(content) >= _ALONE_BYTES:
            self._runs.close()
        with_ttl = self._type is MessageType.MESSAGE and PacketType.TTL in packets
        run = self._runs.of(self._type, queue, TTL_OF_EACH if with_ttl else 0)
        run.payloads.append(content)
        run.sizes.append(len(content))
        if ttl_seconds:
            run.note_ttl(ttl_seconds, 1)
        if self._type is MessageType.DISPATCH:
            run.ids.append(packets[PacketType.ID])
        if len(content) >= _ALONE_BYTES:
            self._runs.close()

    def _violate(self, message: str, position: int, offending: bytes) -> NoReturn:
        self._violation = PeerViolation(PROTOCOL, message, position=position, offending=offending)
        self._runs.close()  # It may have views of the chunk, which is not ours any longer.
        raise self._violation


def _text(raw: bytes) -> str:
    """Bytes that should be text, for a message to a person."""
    return raw.decode("ascii", "backslashreplace")


def _wrong_with_name(raw: bytes, limits: Limits) -> str | None:
    """Why no queue, and no door to dead letters, can be called that."""
    try:
        check_queue_name(door_of(raw.decode())[0], limits.queue_name_bytes_max)
    except UnicodeDecodeError:
        return "a queue name must be UTF-8"
    except QueueNameError as error:
        return str(error)
    return None


_STEPS: dict[_Step, Callable[[Reader, bytes, int], int]] = {
    _Step.HEADER: Reader._on_header,
    _Step.FIRST_BREAK: Reader._on_first_break,
    _Step.PACKET: Reader._on_packet,
    _Step.PACKET_REST: Reader._on_packet_rest,
    _Step.WIDTH: Reader._on_width,
    _Step.PACKET_BREAK: Reader._on_packet_break,
    _Step.CONTENT: Reader._on_content,
    _Step.CONTENT_BREAK: Reader._on_content_break,
}
"""What is done with each item, and its position; returns how many of its bytes to give back."""
