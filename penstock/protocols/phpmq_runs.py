"""Runs of PHPMQ messages: many of one kind in a row, collected into one event, recognised quickly.

`Runs` collects: messages of one type and one queue that follow each other become one event.
`Shapes` is the quick way through a stream. It takes whole messages that look like earlier ones: same
type, queue and dialect, packets in the usual order. All that differs between such messages are a few
digits and the contents, so a message is recognised by looking up what stands before the digits of its
content's size, and then those. A group of messages that are equal but for their contents is taken apart by
one compiled `Struct`; that was right exactly if putting it together again gives the bytes that came. The
compiled build compares and copies byte by byte instead (`loops`).

Rules that always hold:
  * `Shapes` knows only what `learn` was shown after `phpmq_read.Reader` had checked it, and lengths within
    the limits. Whatever it does not recognise, also every fault and every message that is not whole, it
    leaves where it is: it cannot raise, and it never disagrees with the reader, it only is quicker.
  * Every dict whose keys a peer chooses is bounded. What digits say is remembered for all connections
    together: there may be ten thousand, and a thousand sizes of each were 200 KB.
"""

import struct
from array import array
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import Final

from penstock.build import COMPILED
from penstock.model.batch import Batch
from penstock.model.ids import ID_DIGITS
from penstock.protocols.phpmq import (
    MESSAGE_HEADER_BYTES,
    OPTIONAL,
    PROTOCOL,
    REQUIRED,
    SETTLEMENTS,
    Dialect,
    Dispatched,
    Event,
    MessageType,
    PacketType,
    Sent,
    Settled,
)

if COMPILED:
    from penstock.protocols import loops

MESSAGE: Final = MessageType.MESSAGE  # what comes with every chunk is looked up once
DISPATCH: Final = MessageType.DISPATCH

_GROUP = 32  # equal messages that are taken apart together
_GROUP_LEAST = 3  # of the last ones of a chunk
_WALK = 256  # messages that are walked over before equal ones are looked for again
_NUMBERS_MAX = 4096  # that are remembered
_DIGITS_BELIEVED = 12  # as many as a TTL may have; a size that has more is over every limit
_SHAPES_MAX = 64
_LEAD_BYTES = MESSAGE_HEADER_BYTES + 1 + 36 + 1  # nearly always enough to know how long a prefix is

_NUMBERS: Final[dict[bytes, dict[bytes, int]]] = {b"": {}, b"\n": {}}
"""What digits say, with what must stand behind them, by that."""

TTL_OF_EACH: Final = -1
"""Of a run of messages: each came with a TTL, if only 0."""


class Run:
    """Messages of one type and queue in a row."""

    __slots__ = ("id_bytes", "ids", "payloads", "queue", "sizes", "ttl_seconds", "ttls", "type_")

    def __init__(self, type_: MessageType, queue: str, ttl_seconds: int, id_bytes: int) -> None:
        self.type_ = type_
        self.queue = queue
        self.ttl_seconds = ttl_seconds  # of settlements: one for all; of messages: TTL_OF_EACH, or 0 for none
        self.id_bytes = id_bytes  # the same
        # One by one, or many of them in one piece; large ones as views of the chunk, which `event` copies.
        self.payloads: list[bytes | memoryview] = []
        self.sizes: list[int] = []  # of each payload
        self.ttls: list[int] = []  # of payloads: as far as the last one that has a TTL
        self.ids: list[bytes] = []  # of dispatches: one by one; of settlements as the payloads

    def note_ttl(self, ttl_seconds: int, count: int) -> None:
        """The last `count` payloads have this TTL, and those before them none where none is noted."""
        self.ttls += [0] * (len(self.sizes) - count - len(self.ttls)) + [ttl_seconds] * count

    def event(self) -> Event:
        type_ = self.type_
        if type_ is not MESSAGE and type_ in SETTLEMENTS:
            joined = self.ids[0] if len(self.ids) == 1 else b"".join(self.ids)
            # An empty id can be told only by its place in the list, and never comes in one piece with others.
            count = len(joined) // self.id_bytes if self.id_bytes else len(self.ids)
            return Settled(type_, self.queue, joined, self.id_bytes, count, self.ttl_seconds)
        # A single one that is bytes is handed on as it is.
        batch = Batch(b"".join(self.payloads), _bounds_of(self.sizes), protocol=PROTOCOL)
        if self.ttl_seconds == TTL_OF_EACH or (self.ttls and any(self.ttls)):
            self.note_ttl(0, 0)
            batch.ttl_seconds = array("q", self.ttls)
        if type_ is DISPATCH:
            return Dispatched(self.queue, batch, self.ids)
        return Sent(self.queue, batch)


class Runs:
    """The events of the chunk at hand, and the run that is not yet one of them."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._run: Run | None = None

    def of(self, type_: MessageType, queue: str, ttl_seconds: int = 0, id_bytes: int = ID_DIGITS) -> Run:
        """The run at hand if it is of that kind, or else a new one. The caller adds to it."""
        run = self._run
        if (
            run is None
            or run.type_ != type_
            or run.queue != queue
            or run.ttl_seconds != ttl_seconds
            or run.id_bytes != id_bytes
        ):
            self.close()
            run = self._run = Run(type_, queue, ttl_seconds, id_bytes)
        return run

    def close(self) -> None:
        """Ends the run at hand."""
        if self._run is not None:
            self._events.append(self._run.event())
            self._run = None

    def add(self, event: Event) -> None:
        """An event that is no run."""
        self.close()
        self._events.append(event)

    def take(self) -> list[Event]:
        """Everything so far."""
        self.close()
        events, self._events = self._events, []
        return events


def _number(text: bytes, behind: bytes) -> int | None:
    """What digits say that have this behind them; None where there is anything else, or too many."""
    numbers = _NUMBERS[behind]
    number = numbers.get(text)
    if number is not None:
        return number
    digits = text[: len(text) - len(behind)]
    if not digits.isdigit() or not text.endswith(behind) or len(digits.lstrip(b"0")) > _DIGITS_BELIEVED:
        return None
    if len(numbers) >= _NUMBERS_MAX:
        numbers.clear()
    number = numbers[text] = int(digits)
    return number


@lru_cache(maxsize=256)
def _group_of(head: int, size: int, tail: int, count: int) -> Callable[[bytes, int], tuple[bytes, ...]]:
    """Takes the contents out of so many messages that are equal but for them."""
    return struct.Struct(f"{head}x{size}s{tail}x" * count).unpack_from


def _bounds_of(sizes: list[int]) -> "array[int]":
    if COMPILED:
        return array("i", loops.bounds_of(sizes))
    bounds = list(accumulate(sizes, initial=0))
    # An array that is made from numbers takes twice as long.
    return array("i", struct.pack(f"{len(bounds)}i", *bounds))


def _take_groups(
    data: bytes,
    at: int,
    head: bytes,
    size: int,
    tail: bytes,
    contents: "list[bytes] | list[bytes | memoryview]",
) -> int:
    """Takes messages `head + content + tail` with contents of one size, as far as whole groups go; or all
    that are left, where they are fewer."""
    stride = len(head) + size + len(tail)
    count = min((len(data) - at) // stride, _GROUP)
    # The last head of a group is compared first: it settles nearly every "no" cheaply.
    while count >= _GROUP_LEAST and data.startswith(head, at + (count - 1) * stride):
        group = _group_of(len(head), size, len(tail), count)(data, at)
        end = at + count * stride
        if data[at:end] != head + (tail + head).join(group) + tail:
            break
        contents.extend(group)
        at = end
        count = min((len(data) - at) // stride, _GROUP)
    return at


class _Shape:
    """What messages that are recognised together have in common."""

    __slots__ = (
        "dialect",
        "head_bytes",
        "line_break",
        "middle",
        "prefix",
        "queue",
        "sizes",
        "ttl",
        "ttl_head_bytes",
        "type_",
    )

    def __init__(self, type_: MessageType, queue: str, dialect: Dialect, ttl: bool) -> None:
        self.type_ = type_
        self.queue = queue
        self.dialect = dialect
        self.line_break = dialect.line_break
        self.ttl = ttl
        packets = len(REQUIRED[type_]) + (ttl and PacketType.TTL not in REQUIRED[type_])
        lead = dialect.message_header(type_, packets) + dialect.packet(PacketType.QUEUE, queue.encode())
        id_header = dialect.packet_header(PacketType.ID, ID_DIGITS)
        if type_ in SETTLEMENTS:
            self.prefix = lead + id_header
            self.head_bytes = len(self.prefix)
        else:
            # The digits of the content's length, and a line break, follow the prefix.
            self.prefix = lead + b"P%02d" % PacketType.CONTENT
            self.head_bytes = len(lead) + len(dialect.packet_header(PacketType.CONTENT, 0))
        self.middle = dialect.line_break + id_header if type_ is MessageType.DISPATCH else b""
        self.ttl_head_bytes = dialect.packet_header_bytes + 2 * len(dialect.line_break)
        self.sizes = _NUMBERS[dialect.line_break]  # of the content, by its digits


class Shapes:
    """What the messages of one connection have looked like so far."""

    def __init__(self, payload_bytes_max: int, large_bytes: int) -> None:
        self.last: _Shape | None = None
        """What the last message that was learned or taken looked like."""

        self._payload_bytes_max = payload_bytes_max
        self._large_bytes = large_bytes
        self._shapes: dict[tuple[MessageType, str, Dialect, bool], _Shape] = {}
        self._prefix_bytes: dict[bytes, int] = {}  # by the first _LEAD_BYTES
        self._owners: dict[bytes, _Shape] = {}  # by prefix
        self._ttl_digits: dict[bytes, int] = {}  # by a TTL's packet header

    def learn(
        self, type_: MessageType, queue: str, dialect: Dialect, packets: dict[PacketType, bytes]
    ) -> None:
        """Shows a message that was read and is right, with its packets in the order in which they came."""
        usual = (*REQUIRED[type_], *OPTIONAL.get(type_, ()))[: len(packets)]
        if tuple(packets) != usual:
            return
        text = packets.get(PacketType.TTL)
        key = (type_, queue, dialect, text is not None)
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= _SHAPES_MAX:
                self._forget()
            shape = self._shapes[key] = _Shape(type_, queue, dialect, text is not None)
            self._owners[shape.prefix] = shape
            # A prefix may be shorter; the digits behind it begin with zeros.
            self._prefix_bytes[shape.prefix[:_LEAD_BYTES].ljust(_LEAD_BYTES, b"0")] = len(shape.prefix)
        if text is not None:
            self._ttl_digits[shape.line_break + dialect.packet_header(PacketType.TTL, len(text))] = len(text)
        self.last = shape

    def take(self, data: bytes, at: int, runs: Runs) -> tuple[int, Dialect | None]:
        """Whole messages from `at` on, as far as they are recognised: where they end, and their dialect."""
        shape, end = self.last, at
        if shape is not None and (
            loops.stands(data, at, shape.prefix) if COMPILED else data.startswith(shape.prefix, at)
        ):
            end = self._take(shape, data, at, runs)
        if end == at:
            prefix_bytes = self._prefix_bytes.get(data[at : at + _LEAD_BYTES], 0)
            shape = self._owners.get(data[at : at + prefix_bytes])
            if shape is None:
                return at, None
            end = self._take(shape, data, at, runs)
        if shape is None or end == at:
            return at, None
        self.last = shape
        return end, shape.dialect

    def take_large(self, data: memoryview, at: int, runs: Runs) -> tuple[int, int]:
        """Whole messages of the last shape whose contents are large: where they end, and where the content
        begins of the next, if that is large too and not whole (or else 0).

        They are views of the chunk, and copied once, when their run becomes an event: 64 KiB that go the way
        of small ones are copied five times.
        """
        shape = self.last
        if shape is None or shape.type_ is not MESSAGE or shape.ttl:
            return at, 0
        line_break, end = shape.line_break, len(data)
        while True:
            start = at + shape.head_bytes
            size = self._size(shape, bytes(data[at:start]))
            if size is None or size < self._large_bytes:
                return at, 0
            stop = start + size
            after = stop + len(line_break)
            if stop > end:
                return at, start
            if after > end or data[stop:after] != line_break:
                return at, 0
            run = runs.of(MESSAGE, shape.queue)
            run.payloads.append(data[start:stop])
            run.sizes.append(size)
            at = after

    def _take(self, shape: _Shape, data: bytes, at: int, runs: Runs) -> int:
        if shape.type_ is MESSAGE:
            return self._take_sent(shape, data, at, runs)
        if shape.type_ is DISPATCH:
            return self._take_dispatched(shape, data, at, runs)
        return self._take_settled(shape, data, at, runs)

    def _forget(self) -> None:
        """Starts again: what a peer makes us remember must not grow without end."""
        self._shapes.clear()
        self._owners.clear()
        self._prefix_bytes.clear()
        self.last = None

    def _size(self, shape: _Shape, head: bytes) -> int | None:
        """The size of the content that follows a head, or None if the head is not of this shape."""
        if not head.startswith(shape.prefix) or len(head) != shape.head_bytes:
            return None
        size = _number(head[len(shape.prefix) :], shape.line_break)
        return size if size is not None and size <= self._payload_bytes_max else None

    def _take_sent(self, shape: _Shape, data: bytes, at: int, runs: Runs) -> int:
        if COMPILED and not shape.ttl:
            return self._take_sent_compiled(shape, data, at, runs)
        prefix, head_bytes, line_break = shape.prefix, shape.head_bytes, shape.line_break
        prefix_bytes, known, size_max = len(prefix), shape.sizes.get, self._payload_bytes_max
        startswith = data.startswith
        run: Run | None = None
        while True:
            head = data[at : at + head_bytes]
            size = self._size(shape, head)
            stop = at + head_bytes + (size or 0)
            tail = self._tail(shape, data, stop)
            if size is None or tail is None:
                return at
            if run is None:
                run = runs.of(shape.type_, shape.queue, TTL_OF_EACH if shape.ttl else 0)
            payloads = run.payloads
            before = len(payloads)
            at = _take_groups(data, at, head, size, data[stop : tail[1]], payloads)
            taken = len(payloads) - before
            run.sizes += [size] * taken
            if tail[0]:
                run.note_ttl(tail[0], taken)
            if shape.ttl:
                at = self._walk_with_ttl(shape, data, at, run)
                continue
            add, add_size, break_bytes, end = payloads.append, run.sizes.append, len(line_break), len(data)
            for _ in range(_WALK):
                start = at + head_bytes
                size = known(data[at + prefix_bytes : start])
                if size is None or size > size_max or not startswith(prefix, at):
                    size = self._size(shape, data[at:start])
                    if size is None:
                        break
                stop = start + size
                after = stop + break_bytes
                if after > end or (break_bytes and data[stop:after] != line_break):
                    break
                add(data[start:stop])
                add_size(size)
                at = after

    def _take_sent_compiled(self, shape: _Shape, data: bytes, at: int, runs: Runs) -> int:
        line_break = shape.line_break
        digits = shape.head_bytes - len(shape.prefix) - len(line_break)
        payloads: list[bytes] = []
        sizes: list[int] = []
        size_max = self._payload_bytes_max
        at = loops.take_sized(data, at, shape.prefix, digits, line_break, size_max, payloads, sizes)
        if sizes:
            run = runs.of(shape.type_, shape.queue)
            run.payloads += payloads
            run.sizes += sizes
        return at

    def _walk_with_ttl(self, shape: _Shape, data: bytes, at: int, run: Run) -> int:
        prefix, head_bytes, line_break = shape.prefix, shape.head_bytes, shape.line_break
        prefix_bytes, known, size_max = len(prefix), shape.sizes.get, self._payload_bytes_max
        ttl_head_bytes, line_break_bytes, end = shape.ttl_head_bytes, len(line_break), len(data)
        digits_of, value_of, startswith = self._ttl_digits.get, _NUMBERS[b""].get, data.startswith
        run.note_ttl(0, 0)
        add_payload, add_size, add_ttl = run.payloads.append, run.sizes.append, run.ttls.append
        for _ in range(_WALK):
            start = at + head_bytes
            size = known(data[at + prefix_bytes : start])
            if size is None or size > size_max or not startswith(prefix, at):
                size = self._size(shape, data[at:start])
                if size is None:
                    break
            stop = start + size
            text = stop + ttl_head_bytes
            digits = digits_of(data[stop:text])
            if digits is None:
                break
            text_end = text + digits
            after = text_end + line_break_bytes
            if after > end or data[text_end:after] != line_break:
                break
            ttl_seconds = value_of(data[text:text_end])
            if ttl_seconds is None:
                ttl_seconds = _number(data[text:text_end], b"")
                if ttl_seconds is None:
                    break
            add_payload(data[start:stop])
            add_size(size)
            add_ttl(ttl_seconds)
            at = after
        return at

    def _take_settled(self, shape: _Shape, data: bytes, at: int, runs: Runs) -> int:
        prefix, head_bytes, startswith = shape.prefix, shape.head_bytes, data.startswith
        while startswith(prefix, at):
            stop = at + head_bytes + ID_DIGITS
            tail = self._tail(shape, data, stop)
            if tail is None:
                break
            ttl_seconds = tail[0]
            ids = runs.of(shape.type_, shape.queue, ttl_seconds).ids
            if COMPILED:
                at = loops.take_fixed(data, at, prefix, ID_DIGITS, data[stop : tail[1]], ids)
                continue
            at = _take_groups(data, at, prefix, ID_DIGITS, data[stop : tail[1]], ids)
            for _ in range(_WALK):
                start = at + head_bytes
                tail = self._tail(shape, data, start + ID_DIGITS) if startswith(prefix, at) else None
                if tail is None or tail[0] != ttl_seconds:
                    break
                ids.append(data[start : start + ID_DIGITS])
                at = tail[1]
        return at

    def _take_dispatched(self, shape: _Shape, data: bytes, at: int, runs: Runs) -> int:
        prefix, head_bytes, middle, ttl = shape.prefix, shape.head_bytes, shape.middle, shape.ttl
        prefix_bytes, known, size_max = len(prefix), shape.sizes.get, self._payload_bytes_max
        line_break, startswith, end = shape.line_break, data.startswith, len(data)
        id_after = len(middle) + ID_DIGITS
        run: Run | None = None
        while True:
            start = at + head_bytes
            size = known(data[at + prefix_bytes : start])
            if size is None or size > size_max or not startswith(prefix, at):
                size = self._size(shape, data[at:start])
                if size is None:
                    return at
            stop = start + size
            id_end = stop + id_after
            ttl_seconds, after = 0, id_end + len(line_break)
            if not startswith(middle, stop):
                return at
            if ttl:
                tail = self._tail(shape, data, id_end)
                if tail is None:
                    return at
                ttl_seconds, after = tail
            elif after > end or (line_break and data[id_end:after] != line_break):
                return at
            if run is None:
                run = runs.of(shape.type_, shape.queue)
                run.note_ttl(0, 0)
                add_payload, add_id, add_ttl = run.payloads.append, run.ids.append, run.ttls.append
                add_size = run.sizes.append
            add_payload(data[start:stop])
            add_size(size)
            add_id(data[id_end - ID_DIGITS : id_end])
            if ttl:
                add_ttl(ttl_seconds)
            at = after

    def _tail(self, shape: _Shape, data: bytes, at: int) -> tuple[int, int] | None:
        """The TTL that stands at `at` (0 for none) and where its message ends; None if that is not clear."""
        line_break = shape.line_break
        if not shape.ttl:
            end = at + len(line_break)
            return (0, end) if end <= len(data) and data[at:end] == line_break else None
        text = at + shape.ttl_head_bytes
        digits = self._ttl_digits.get(data[at:text])
        if digits is None:
            return None
        text_end = text + digits
        end = text_end + len(line_break)
        # At the chunk's end the beginning of a text may look like another, shorter text.
        if end > len(data) or data[text_end:end] != line_break:
            return None
        ttl_seconds = _number(data[text:text_end], b"")
        return (ttl_seconds, end) if ttl_seconds is not None else None
