"""PHPMQ's vocabulary: message types, packet types, dialects, limits, and what a stream can say.

    message header   H + version(2) + type(3) + packet count(2)          8 bytes
    packet header    P + packet type(2) + content length, zero padded    32, 35 or 36 bytes
    content          that many bytes

`phpmq_read.py` turns bytes into the events below, `phpmq_write.py` turns messages into bytes,
`phpmq_session.py` says who may do what when. This module owns what they share and does nothing.

The documents of PHPMQ contradict each other, so a message comes in a *dialect*: 32-, 35- or 36-byte
packet headers, with or without a line break after every header and content. The reader recognises it
in every message by itself; the writer is told which one to use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from penstock.model.batch import Batch
from penstock.protocols.errors import MisuseError

PROTOCOL = "phpmq"
VERSION = b"01"
MESSAGE_HEADER_BYTES = 8
SYNC_QUEUE = "penstock:stored"
"""Of no document: a consume request for no messages (count 0) of this queue asks whether everything that the
client has said is stored; to any other server it is a window that never opens. The answer is a dispatch from
there whose content says how many messages were refused, in digits."""
SYNC_ID = b"0" * 32

WIDTHS = (32, 35, 36)  # of a packet header: 29, 32 or 33 digits
LENGTH_DIGITS_BELIEVED = 10  # a content length with more significant digits is over every limit


class MessageType(IntEnum):
    """What a message is; stands in its header as three digits."""

    MESSAGE = 1  # client: for a queue
    CONSUME = 2  # client: a window on a queue
    DISPATCH = 3  # server: a message of the queue
    ACKNOWLEDGE = 4  # client: done
    REQUEUE = 5  # client: again, at the tail, with a new TTL
    DEAD_LETTER = 6  # client: never again


class PacketType(IntEnum):
    """What a packet's content is; stands in its header as two digits."""

    QUEUE = 1
    CONTENT = 2
    ID = 3
    COUNT = 4
    TTL = 5


MESSAGE_TYPES = {b"%03d" % type_: type_ for type_ in MessageType}
PACKET_TYPES = {b"%02d" % type_: type_ for type_ in PacketType}

REQUIRED: dict[MessageType, tuple[PacketType, ...]] = {
    MessageType.MESSAGE: (PacketType.QUEUE, PacketType.CONTENT),
    MessageType.CONSUME: (PacketType.QUEUE, PacketType.COUNT),
    MessageType.DISPATCH: (PacketType.QUEUE, PacketType.CONTENT, PacketType.ID),
    MessageType.ACKNOWLEDGE: (PacketType.QUEUE, PacketType.ID),
    MessageType.REQUEUE: (PacketType.QUEUE, PacketType.ID, PacketType.TTL),
    MessageType.DEAD_LETTER: (PacketType.QUEUE, PacketType.ID),
}
"""The packets that a message of each type must have, in the order in which they are written."""

OPTIONAL: dict[MessageType, tuple[PacketType, ...]] = {
    MessageType.MESSAGE: (PacketType.TTL,),
    MessageType.DISPATCH: (PacketType.TTL,),
}
"""The packets that a message may have besides, written after the others."""

ALLOWED = {type_: frozenset(REQUIRED[type_] + OPTIONAL.get(type_, ())) for type_ in MessageType}

FROM_CLIENT = frozenset(MessageType) - {MessageType.DISPATCH}
FROM_SERVER = frozenset({MessageType.DISPATCH})
SETTLEMENTS = frozenset({MessageType.ACKNOWLEDGE, MessageType.REQUEUE, MessageType.DEAD_LETTER})


@dataclass(frozen=True, slots=True)
class Dialect:
    """How the messages of a connection are laid out."""

    packet_header_bytes: int = 32
    line_breaks: bool = False

    def __post_init__(self) -> None:
        if self.packet_header_bytes not in WIDTHS:
            known = "32, 35 or 36"
            raise MisuseError(f"phpmq: packet headers have {known} bytes, not {self.packet_header_bytes}")

    @property
    def line_break(self) -> bytes:
        return b"\n" if self.line_breaks else b""

    def message_header(self, type_: MessageType, packets: int) -> bytes:
        return b"H%b%03d%02d%b" % (VERSION, type_, packets, self.line_break)

    def packet_header(self, type_: PacketType, size: int) -> bytes:
        digits = self.packet_header_bytes - 3
        return b"P%02d%0*d%b" % (type_, digits, size, self.line_break)

    def packet(self, type_: PacketType, content: bytes) -> bytes:
        return self.packet_header(type_, len(content)) + content + self.line_break


_LIMIT_TOPS = {
    "payload_bytes_max": (1 << 31) - 1,  # a batch's bounds are int32
    "queue_name_bytes_max": 999,  # with longer names the width of the headers could not be recognised
    "packets_per_message_max": 99,  # two digits
    "number_digits_max": 12,  # a TTL of so many digits, in microseconds, still fits in 64 bits
    "message_id_bytes_max": 9999,
    "windows_max": 1 << 20,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a peer may ask of us. Each is checked before a single byte is set aside for it."""

    payload_bytes_max: int = 64 << 20
    queue_name_bytes_max: int = 255
    packets_per_message_max: int = 5
    number_digits_max: int = 10  # of a count or a TTL
    message_id_bytes_max: int = 255
    windows_max: int = 1024  # queues that one connection may consume from

    def __post_init__(self) -> None:
        for name, top in _LIMIT_TOPS.items():
            if not 1 <= getattr(self, name) <= top:
                raise MisuseError(f"phpmq: {name} is {getattr(self, name)}, must be 1 to {top}")

    def content_bytes_max(self) -> dict[PacketType, int]:
        """How long the content of each packet may be."""
        return {
            PacketType.QUEUE: self.queue_name_bytes_max,
            PacketType.CONTENT: self.payload_bytes_max,
            PacketType.ID: self.message_id_bytes_max,
            PacketType.COUNT: self.number_digits_max,
            PacketType.TTL: self.number_digits_max,
        }


LIMITS = Limits()


@dataclass(slots=True, init=False)
class Sent:
    """A run of messages (001) for one queue. All of them came with a TTL, if only 0, or none did."""

    queue: str
    batch: Batch

    # Written out, see `model/batch.py`.
    def __init__(self, queue: str, batch: Batch) -> None:
        self.queue = queue
        self.batch = batch


@dataclass(slots=True)
class ConsumeRequested:
    """A window (002): at most `count` unsettled messages at the client."""

    queue: str
    count: int
    dialect: Dialect
    position: int  # of the message in the stream


@dataclass(slots=True)
class Dispatched:
    """A run of dispatches (003) from one queue; `ids[i]` names message *i* of the batch."""

    queue: str
    batch: Batch
    ids: Sequence[bytes]


@dataclass(slots=True, init=False)
class Settled:
    """A run of verdicts of one kind (004, 005 or 006) on messages of one queue whose ids are equally long."""

    type_: MessageType
    queue: str
    joined: bytes  # the ids, one after the other
    id_bytes: int  # of each
    count: int
    ttl_seconds: int = 0  # 005 only: the new TTL, 0 for none

    def __init__(
        self, type_: MessageType, queue: str, joined: bytes, id_bytes: int, count: int, ttl_seconds: int = 0
    ) -> None:
        self.type_ = type_
        self.queue = queue
        self.joined = joined
        self.id_bytes = id_bytes
        self.count = count
        self.ttl_seconds = ttl_seconds

    @property
    def ids(self) -> list[bytes]:
        """One by one. For tests and tools; nothing on the hot path calls it."""
        return [self.joined[i * self.id_bytes : (i + 1) * self.id_bytes] for i in range(self.count)]


Event = Sent | ConsumeRequested | Dispatched | Settled
