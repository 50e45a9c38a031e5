"""RQ's vocabulary: the commands, what they need, the events they become, and their bytes.

RQ is a set of RISP commands (see `risp.py`). Attributes fill registers, CLEAR empties them, an
action acts on what is there. A frame is a CLEAR, some attributes and an action. The number of a
command says what kind it is:

    0-31    actions, and NOP and CLEAR      64-159   integer attributes
    32-63   flag attributes                 160-255  string attributes

The frames, as the original programs put them on the wire and as the `encode_…` functions write
them (attributes may come in any order when we read):

    node: consume               01 a0 <n> QUEUE 62 MAX(2) 40 PRIORITY(1) [20] 14
    controller: consuming       01 60 QUEUEID(2) a0 <n> QUEUE 18
    node: cancel                01 a0 <n> QUEUE 15
    node: request               01 80 ID(4) a0 <n> QUEUE [41 RETRIES(1)] [61 TIMEOUT(2)]
                                e0 <n> PAYLOAD [21] 0a
    controller: request         01 a0 <n> QUEUE e0 <n> PAYLOAD [21] 80 ID(4) 0a
    both: delivered             01 80 ID(4) 0d
    both: reply                 01 80 ID(4) e0 <n> PAYLOAD 0b
    controller: undelivered     01 80 ID(4) 10
    both: broadcast             01 a0 <n> QUEUE e0 <n> PAYLOAD 0e
    ping, pong, closing, full   05, 06, 01 16, 17

An empty PAYLOAD is never sent, because the original library stops on one, and it stops on a REQUEST or REPLY
without PAYLOAD as well. An empty message travels as the originals say "nothing" to each other, as one NOP
byte, in a frame that begins with two CLEARs: to an original program that is a payload of one byte and nothing
else new, and our own reader takes it for what it is. A node's own REPLY, if empty, has no PAYLOAD: that is
what the original library sends.

Frames of one kind travel in batches, in both directions: an event holds a whole run of them and
an encoder writes one buffer for many. Encoders trust their callers in the sessions for sizes and
ids (the queue name and what a `struct` cannot hold aside): a session checks once per batch.
Fails with `MisuseError` for a name or a limit that RQ cannot say; nothing else.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import groupby
from struct import Struct
from sys import byteorder

from penstock.build import COMPILED
from penstock.model.batch import RETRIES_NONE, Batch
from penstock.protocols.errors import MisuseError
from penstock.protocols.risp import encode

if COMPILED:
    from penstock.protocols import loops

PROTOCOL = "rq"
"""The door's name in batches."""


class Command(IntEnum):
    NOP = 0
    CLEAR = 1
    PING = 5
    PONG = 6
    REQUEST = 10
    REPLY = 11
    DELIVERED = 13
    BROADCAST = 14
    UNDELIVERED = 16
    CONSUME = 20
    CANCEL_QUEUE = 21
    CLOSING = 22
    SERVER_FULL = 23
    CONSUMING = 24
    EXCLUSIVE = 32
    NOREPLY = 33
    PRIORITY = 64
    RETRIES = 65
    QUEUEID = 96
    TIMEOUT = 97
    MAX = 98
    ID = 128
    QUEUE = 160
    PAYLOAD = 224


FLAG_FIRST = 32

NEEDS: dict[Command, tuple[tuple[Command, ...], ...]] = {
    Command.PING: (),
    Command.PONG: (),
    Command.REQUEST: ((Command.ID,), (Command.QUEUE, Command.QUEUEID), (Command.PAYLOAD,)),
    Command.REPLY: ((Command.ID,),),  # without PAYLOAD it is empty
    Command.DELIVERED: ((Command.ID,),),
    Command.BROADCAST: ((Command.QUEUE, Command.QUEUEID), (Command.PAYLOAD,)),
    Command.UNDELIVERED: ((Command.ID,),),
    Command.CONSUME: ((Command.QUEUE, Command.QUEUEID),),
    Command.CANCEL_QUEUE: ((Command.QUEUE, Command.QUEUEID),),
    Command.CLOSING: (),
    Command.SERVER_FULL: (),
    Command.CONSUMING: ((Command.QUEUE,), (Command.QUEUEID,)),
}
"""Every action, and for each attribute it needs the commands of which one must be there."""

NOTHING = bytes((Command.NOP,))
"""A payload that stands for an empty one, in a frame that begins with two CLEARs."""

PRIORITY_DEFAULT = 20
QUEUE_ID_MAX = (1 << 16) - 1

PING = encode(Command.PING)
PONG = encode(Command.PONG)
CLOSING = encode(Command.CLEAR) + encode(Command.CLOSING)
SERVER_FULL = encode(Command.SERVER_FULL)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a peer may make us hold."""

    payload_bytes_max: int = 64 << 20
    queue_name_bytes_max: int = 255
    consumed_queues_max: int = 1024  # per connection, at once

    def __post_init__(self) -> None:
        for name, highest in (
            ("payload_bytes_max", (1 << 31) - 1),  # positions in a batch are int32
            ("queue_name_bytes_max", 255),  # QUEUE has a length of one byte
            ("consumed_queues_max", QUEUE_ID_MAX),
        ):
            if not 1 <= getattr(self, name) <= highest:
                raise MisuseError(f"RQ limit {name} = {getattr(self, name)}: must be 1 to {highest}")


# -- events: what a run of frames becomes ---------------------------------------------------------

Name = str | int
"""A queue as the peer named it: by QUEUE (str) or by QUEUEID (int)."""


@dataclass(slots=True, init=False)
class Requests:
    """REQUEST: a run for one queue, alike in NOREPLY, TIMEOUT and in having RETRIES or not."""

    queue: Name
    ids: "array[int]"  # typecode "I"
    batch: Batch
    noreply: bool
    timeout_seconds: int

    # Written out, see `model/batch.py`; so are those of the next two.
    def __init__(
        self, queue: Name, ids: "array[int]", batch: Batch, noreply: bool, timeout_seconds: int
    ) -> None:
        self.queue = queue
        self.ids = ids
        self.batch = batch
        self.noreply = noreply
        self.timeout_seconds = timeout_seconds


@dataclass(slots=True, init=False)
class Replies:
    ids: "array[int]"
    batch: Batch

    def __init__(self, ids: "array[int]", batch: Batch) -> None:
        self.ids = ids
        self.batch = batch


@dataclass(slots=True, init=False)
class Delivered:
    ids: "array[int]"

    def __init__(self, ids: "array[int]") -> None:
        self.ids = ids


@dataclass(slots=True)
class Undelivered:
    ids: "array[int]"


@dataclass(slots=True)
class Broadcasts:
    queue: Name
    batch: Batch


@dataclass(slots=True)
class ConsumeAsked:
    queue: Name
    credit: int  # MAX; 0: no bound
    priority: int
    exclusive: bool


@dataclass(slots=True)
class Consuming:
    queue: str
    queue_id: int


@dataclass(slots=True)
class CancelAsked:
    queue: Name


@dataclass(slots=True)
class Signal:
    """PING, PONG, CLOSING or SERVER_FULL, `count` times in a row."""

    command: Command
    count: int = 1


@dataclass(slots=True)
class Malformed:
    """An action whose registers do not hold what it needs, `count` times. The stream itself is sound."""

    command: Command
    ident: int | None  # the ID register, where there is an ID to answer
    reason: str
    count: int = 1


@dataclass(slots=True)
class Skipped:
    """Commands that RQ does not have: how often each."""

    commands: dict[int, int]


Event = (
    Requests
    | Replies
    | Delivered
    | Undelivered
    | Broadcasts
    | ConsumeAsked
    | Consuming
    | CancelAsked
    | Signal
    | Malformed
    | Skipped
)


# -- encoders: many frames, one buffer ------------------------------------------------------------

_CLEAR = encode(Command.CLEAR)
_ID = bytes((Command.ID,))
_PAYLOAD = bytes((Command.PAYLOAD,))
_CLEAR_ID = _CLEAR + _ID
_NOTHING_SIZED = len(NOTHING).to_bytes(4, "big") + NOTHING

ID_FRAME_BYTES = 7
"""CLEAR, ID with its four bytes, and an action."""

_VIEW_FROM_BYTES = 4096
"""From this mean size on, slicing a view and copying once beats slicing bytes and copying twice."""


@lru_cache(maxsize=1024)
def encode_queue(name: str) -> bytes:
    """The QUEUE command for a name."""
    try:
        raw = name.encode()
    except UnicodeEncodeError:
        raise MisuseError(f"queue {name!r}: RQ needs a name that can be written as UTF-8") from None
    if not 1 <= len(raw) <= 255:
        raise MisuseError(f"queue {name!r}: RQ needs a name of 1 to 255 bytes, this one has {len(raw)}")
    return encode(Command.QUEUE, raw)


def encode_consume(queue: str, credit: int, priority: int, exclusive: bool) -> bytes:
    return b"".join(
        (
            _CLEAR,
            encode_queue(queue),
            encode(Command.MAX, credit),
            encode(Command.PRIORITY, priority),
            encode(Command.EXCLUSIVE) if exclusive else b"",
            encode(Command.CONSUME),
        )
    )


def encode_consuming(queue: str, queue_id: int) -> bytes:
    return _CLEAR + encode(Command.QUEUEID, queue_id) + encode_queue(queue) + encode(Command.CONSUMING)


def encode_cancel(queue: str) -> bytes:
    return _CLEAR + encode_queue(queue) + encode(Command.CANCEL_QUEUE)


def encode_requests(
    queue: str, ids: Sequence[int], batch: Batch, *, noreply: bool, timeout_seconds: int = 0
) -> bytes:
    """A node's requests. RETRIES comes from the batch's column, TIMEOUT is left out where it is 0."""
    name = encode_queue(queue)
    timeout = encode(Command.TIMEOUT, timeout_seconds) if timeout_seconds else b""
    tail = _flagged(noreply, Command.REQUEST)
    frames = []
    lo = 0
    for retries, count in _runs(batch.retries, len(batch)):
        hi = lo + count
        counter = encode(Command.RETRIES, retries) if retries != RETRIES_NONE else b""
        middle = name + counter + timeout + _PAYLOAD
        frames.append(_id_first(middle, tail, ids[lo:hi], batch.payload, batch.bounds[lo : hi + 1]))
        lo = hi
    return b"".join(frames)


def encode_deliveries(
    queue: str,
    ids: Sequence[int],
    payload: bytes | memoryview,
    bounds: Sequence[int],
    *,
    noreply: bool,
) -> bytes:
    """A controller's requests to a consumer; message *i* is `payload[bounds[i]:bounds[i + 1]]`."""
    head, middle, action = _around(queue, noreply)
    if COMPILED and not _is_large(bounds):
        return _small_deliveries(head, middle, action, ids, payload, bounds)
    source = _source(payload, bounds)
    # One pack writes the end of a frame and the beginning of the next.
    join = action + head
    pack = _joint(len(middle), len(join)).pack
    start = bounds[0]
    ident = 0
    frames: list[bytes | memoryview] = []
    add = frames.append
    for next_ident, end in zip(ids, bounds[1:], strict=True):
        if end == start:
            add(_joint(len(middle), len(join) + 1).pack(middle, ident, action + _CLEAR + head, len(NOTHING)))
            add(NOTHING)
        else:
            add(pack(middle, ident, join, end - start))
            add(source[start:end])
            start = end
        ident = next_ident
    if frames:
        # The first pack has written the end of a frame that was never there.
        frames[0] = frames[0][len(middle) + 4 + len(action) :]
        add(middle + ident.to_bytes(4, "big") + action)
    return b"".join(frames)


def _small_deliveries(
    head: bytes,
    middle: bytes,
    tail: bytes,
    ids: Sequence[int],
    payload: bytes | memoryview,
    bounds: Sequence[int],
) -> bytes:
    """What `encode_deliveries` gives, by a compiled loop."""
    if len(ids) != len(bounds) - 1:
        raise ValueError(f"{len(ids)} ids for {len(bounds) - 1} messages: each needs one")
    start = 0
    if not isinstance(payload, bytes):
        payload, start = bytes(payload[bounds[0] : bounds[-1]]), bounds[0]
    if not isinstance(bounds, (array, memoryview)):  # Compiled, a union would be made each time.
        bounds = array("i", bounds)
    empty = _CLEAR + head + _NOTHING_SIZED
    return loops.write_deliveries(
        head, empty, middle, tail, _column(ids).tobytes(), payload, start, bounds.tobytes()
    )


def encode_replies(ids: Sequence[int], batch: Batch) -> bytes:
    """A controller's replies."""
    return _id_first(_PAYLOAD, encode(Command.REPLY), ids, batch.payload, batch.bounds)


def encode_node_replies(ids: Sequence[int], batch: Batch) -> bytes:
    """A node's replies. Empty ones have no PAYLOAD."""
    bounds = batch.bounds
    frames = []
    for empty, group in groupby(range(len(batch)), lambda i: bounds[i] == bounds[i + 1]):
        run = list(group)
        lo, hi = run[0], run[-1] + 1
        if empty:
            frames.append(_id_frames(Command.REPLY, ids[lo:hi]))
        else:
            part = bounds[lo : hi + 1]
            frames.append(_id_first(_PAYLOAD, encode(Command.REPLY), ids[lo:hi], batch.payload, part))
    return b"".join(frames)


def encode_delivered(ids: Iterable[int]) -> bytes:
    return _id_frames(Command.DELIVERED, ids)


def encode_undelivered(ids: Iterable[int]) -> bytes:
    return _id_frames(Command.UNDELIVERED, ids)


def encode_broadcasts(queue: str, batch: Batch) -> bytes:
    head = _CLEAR + encode_queue(queue) + _PAYLOAD
    tail = encode(Command.BROADCAST)
    bounds, source = batch.bounds, _source(batch.payload, batch.bounds)
    frames: list[bytes | memoryview] = []
    for i in range(len(batch)):
        start, end = bounds[i], bounds[i + 1]
        if end == start:
            frames += (_CLEAR, head, len(NOTHING).to_bytes(4, "big"), NOTHING, tail)
        else:
            frames += (head, (end - start).to_bytes(4, "big"), source[start:end], tail)
    return b"".join(frames)


def ids_of_frames(data: bytes, start: int, end: int) -> "array[int]":
    """The ids of a run of ID frames, column by column: four slices instead of a loop."""
    raw = bytearray((end - start) // ID_FRAME_BYTES * 4)
    for byte in range(4):
        raw[byte::4] = data[start + 2 + byte : end : ID_FRAME_BYTES]
    ids = array("I", bytes(raw))
    if byteorder == "little":
        ids.byteswap()
    return ids


def _id_frames(action: Command, ids: Iterable[int]) -> bytes:
    column = _column(ids)
    if COMPILED:
        return loops.write_id_frames(column.tobytes(), action)
    column = column[:]  # or its owner would find it turned round
    if byteorder == "little":
        column.byteswap()
    raw = column.tobytes()
    frames = bytearray((_CLEAR_ID + b"\0\0\0\0" + encode(action)) * len(column))
    for byte in range(4):
        frames[2 + byte :: ID_FRAME_BYTES] = raw[byte::4]
    return bytes(frames)


def _column(ids: Iterable[int]) -> "array[int]":
    return ids if isinstance(ids, array) and ids.typecode == "I" else array("I", ids)


def _id_first(
    middle: bytes, tail: bytes, ids: Sequence[int], payload: bytes | memoryview, bounds: Sequence[int]
) -> bytes:
    """Frames of the form CLEAR, ID, `middle`, payload with its length, `tail`; with two CLEARs if empty."""
    join = tail + _CLEAR_ID
    pack = _joint(len(join), len(middle)).pack
    source = _source(payload, bounds)
    start = bounds[0]
    frames: list[bytes | memoryview] = []
    add = frames.append
    for ident, end in zip(ids, bounds[1:], strict=True):
        if end == start:
            twice = tail + _CLEAR + _CLEAR_ID
            add(_joint(len(twice), len(middle)).pack(twice, ident, middle, len(NOTHING)))
            add(NOTHING)
        else:
            add(pack(join, ident, middle, end - start))
            add(source[start:end])
            start = end
    if frames:
        # The first pack has written the end of a frame that was never there.
        frames[0] = frames[0][len(tail) :]
        add(tail)
    return b"".join(frames)


def _runs(retries: "array[int] | None", count: int) -> Iterator[tuple[int, int]]:
    """Equal neighbours in a retries column: the value, and how many."""
    if retries is None:
        yield RETRIES_NONE, count
        return
    for value, group in groupby(retries):
        yield value, sum(1 for _ in group)


def _flagged(noreply: bool, action: Command) -> bytes:
    return (encode(Command.NOREPLY) if noreply else b"") + encode(action)


def _is_large(bounds: Sequence[int]) -> bool:
    count = len(bounds) - 1
    return count > 0 and bounds[count] - bounds[0] >= count * _VIEW_FROM_BYTES


def _source(payload: bytes | memoryview, bounds: Sequence[int]) -> bytes | memoryview:
    return memoryview(payload) if _is_large(bounds) else payload


@lru_cache(maxsize=1024)
def _around(queue: str, noreply: bool) -> tuple[bytes, bytes, bytes]:
    """What stands before a delivery's payload and its length, between it and its id, and behind that."""
    middle = (encode(Command.NOREPLY) if noreply else b"") + _ID
    return _CLEAR + encode_queue(queue) + _PAYLOAD, middle, encode(Command.REQUEST)


@lru_cache(maxsize=256)
def _joint(before_bytes: int, between_bytes: int) -> Struct:
    """Constant bytes, an id, constant bytes, a length: the seam between two payloads."""
    return Struct(f">{before_bytes}sI{between_bytes}sI")
