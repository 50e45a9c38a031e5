"""Bytes to RQ events, a whole received chunk at a time.

A `Decoder` owns the registers of one connection and direction. It walks the commands with a
`risp.Reader` and puts frames that are alike together into one event (`rq_runs.py`). Fast paths take
over where a frame begins, because the frames of one peer differ in id and payload only:

  * ID frames and replies, whose bytes are the same from every peer (`_take_id_frames`, `_take_settled`);
  * requests, in a shape that one of the last had: what stood before, between and behind its id and
    its payload must stand there again, byte for byte (`_Shape`, `_take_requests`).

Whatever they do not recognise, the walker reads. Measured for requests of 100 bytes: 0.4 µs each in
the fast path, 4 µs in the walker; a chunk costs 6 µs besides. The compiled build reads both kinds byte
by byte (`loops`), four times as quickly.

An empty payload comes in two forms that the original programs can read (`rq.py` says why): a REPLY
without PAYLOAD, and a PAYLOAD of one NOP byte in a frame that begins with two CLEARs.

Rules that always hold:
  * The fast paths and the walker give the same events and leave the same registers. `FAST_PATHS` is
    how a test takes the fast paths away.
  * Chunks may be cut anywhere. A run ends with its chunk; but for that, the events are the same.
  * What the walker does for one chunk is bounded by its share (`share.py`); the `rest` is for the next call.
  * An event holds at most about `_CHUNK_BYTES_MAX` of payload, or one larger payload alone: such a
    payload is gathered once and handed on without a copy.

It fails with `PeerViolation` for a length over its limit, and raises the same from then on. What
came before it in the same chunk waits in `salvage`. A command that lacks an attribute is an event
(`Malformed`), because the stream can still be trusted.
"""

import re
from array import array
from collections.abc import Callable
from struct import Struct

from penstock.build import COMPILED
from penstock.model.batch import RETRIES_NONE
from penstock.protocols import rq
from penstock.protocols.errors import PeerViolation
from penstock.protocols.risp import NEED_MORE, NUMBER_FIRST, SKIPPED, SKIPS_MAX, STRING_FIRST, Reader
from penstock.protocols.rq import FLAG_FIRST, ID_FRAME_BYTES, NEEDS, NOTHING, Command, Event, Limits, Name
from penstock.protocols.rq_runs import ALONE_FROM_BYTES, FAILED, SETTLED, Key, Runs
from penstock.protocols.share import BROADCAST_COST, PAYLOAD_SHIFT, UNBOUNDED

if COMPILED:
    from librt.strings import BytesWriter

    from penstock.protocols import loops

_CHUNK_BYTES_MAX = 1 << 20
"""Larger chunks have no share, and are read in windows of this size, so that no event grows without end."""

_SHAPES_MAX = 4
"""How many shapes of requests are remembered."""

FAST_PATHS = frozenset({"id frames", "settled", "requests"})
"""The fast paths that a new `Decoder` takes. All of them; tests of the walker have less."""

_COMMANDS = {int(command): command for command in Command}
_NOP = int(Command.NOP)
_CLEAR = int(Command.CLEAR)
_CLEAR_START = bytes((_CLEAR,))
_ID = int(Command.ID)
_PAYLOAD = int(Command.PAYLOAD)
_REPLY = int(Command.REPLY)
_DELIVERED = int(Command.DELIVERED)

_ID_FRAME = Struct(">HIB")  # CLEAR and ID as one number, the id, the command that follows
_CLEAR_ID = Command.CLEAR << 8 | Command.ID
_LENGTH = Struct(">I")

_ID_RUNS = {
    int(action): re.compile(rb"(?:\x01\x80.{4}" + re.escape(bytes((action,))) + rb")++", re.DOTALL)
    for action in (Command.DELIVERED, Command.UNDELIVERED, Command.REPLY)
}
"""By action: as many of its ID frames as follow each other."""

_REPEATS = {int(command): re.compile(re.escape(bytes((command,))) + rb"*+") for command in Command}
"""By command: as many of it as follow each other."""


class _Shape:
    """A request as the peer writes it: the constant bytes around its id and its payload.

    Either the id comes first (`head` id `middle` length payload `tail`) or the payload does
    (`head` length payload `middle` id `tail`). `numbers` and `strings` are the other registers.
    """

    __slots__ = ("back", "front", "head", "id_first", "key", "middle", "numbers", "strings", "tail")

    def __init__(
        self,
        key: Key,
        id_first: bool,
        constants: tuple[bytes, bytes, bytes],
        numbers: dict[int, int],
        strings: dict[int, bytes],
    ) -> None:
        self.key = key
        self.id_first = id_first
        self.head, self.middle, self.tail = head, middle, tail = constants
        self.numbers = numbers
        self.strings = strings
        if id_first:
            self.front = Struct(f">{len(head)}sI{len(middle)}sI")
            self.back = Struct(f">{len(tail)}s")
        else:
            self.front = Struct(f">{len(head)}sI")
            self.back = Struct(f">{len(middle)}sI{len(tail)}s")


class Decoder:
    """One direction of one connection: `feed` it chunks, it returns events."""

    def __init__(self, limits: Limits, share: int = UNBOUNDED) -> None:
        self.rest = b""
        """What the share did not reach of the last chunk. It is the caller's, who feeds it next."""

        self.held_bytes = 0
        """What it keeps between two chunks: a payload that is not whole, and the last, to be named again."""

        self.share = share
        self._violation: PeerViolation | None = None
        # The fast paths leave large payloads to the walker, which gives each an event of its own.
        self._fast_bytes_max = min(limits.payload_bytes_max, ALONE_FROM_BYTES - 1)
        self._reader = Reader(
            "RQ",
            [int(command) for command in Command],
            string_bytes_max=limits.payload_bytes_max,
            string_bytes_max_of={Command.QUEUE: limits.queue_name_bytes_max},
        )
        self._numbers: dict[int, int] = {}  # the registers: integers, and 1 for a flag that is set
        self._strings: dict[int, bytes] = {}
        self._runs = Runs()
        self._owed = 0  # units of the share, beside those of the walk
        self._shapes: list[_Shape] = []
        self._fast_id_frames = "id frames" in FAST_PATHS
        self._fast_settled = "settled" in FAST_PATHS
        self._fast_requests = "requests" in FAST_PATHS
        # Whether the command before was a CLEAR, and whether that of the registers was the second of two.
        self._after_clear = False
        self._cleared_twice = False
        # Where the frame under the walker has its parts in the chunk, to learn its shape from. The
        # start is -1 where there is none to learn from: it began in another chunk, a fast path has read
        # it, it began with two CLEARs, or another action stands between.
        self._frame_start = -1
        self._id_end = -1
        self._payload_end = -1

    @property
    def position(self) -> int:
        """How many bytes of the stream have been read."""
        return self._reader.position

    @property
    def unfinished(self) -> bool:
        """Whether a command has begun, and its rest is not there."""
        return self._reader.unfinished

    def feed(self, data: bytes | bytearray | memoryview) -> list[Event]:
        """The events of the next chunk, which may be reused by its owner afterwards."""
        if self._violation is not None:
            raise self._violation
        try:
            if len(data) <= _CHUNK_BYTES_MAX:
                self._walk(data, self.share)
            else:
                view = memoryview(data)
                for at in range(0, len(view), _CHUNK_BYTES_MAX):
                    self._walk(view[at : at + _CHUNK_BYTES_MAX], UNBOUNDED)
        except PeerViolation as violation:
            self._violation = violation
            raise
        return self.salvage()

    def salvage(self) -> list[Event]:
        """After a violation: the events before it in the same chunk. Gives them once."""
        events = self._runs.take()
        if self._reader.skipped:
            events.append(rq.Skipped(dict(self._reader.skipped)))
            self._reader.skipped.clear()
        return events

    # -- the walker: any commands, in any order ---------------------------------------------------

    def _walk(self, data: bytes | bytearray | memoryview, left: int) -> None:
        reader = self._reader
        numbers, strings = self._numbers, self._strings
        reader.feed(data)
        self._frame_start = -1
        after_clear = self._after_clear
        while left > 0:
            left -= 1
            # What follows two CLEARs is the walker's, which looks at its payload.
            if not after_clear and reader.data.startswith(_CLEAR_START, reader.at) and not reader.pending:
                self._take_frames()
            command = reader.next()
            if command == NEED_MORE:
                break
            if command == SKIPPED:
                left -= SKIPS_MAX >> 3
                continue
            if command == _CLEAR:
                numbers.clear()
                strings.clear()
                self._cleared_twice = after_clear
                self._frame_start = -1 if after_clear else reader.at - 1
                self._id_end = self._payload_end = -1
                after_clear = True
                continue
            after_clear = False
            if command >= STRING_FIRST:
                strings[command] = reader.string
                reader.string = b""  # or the reader would keep a large payload alive
                if command == _PAYLOAD:
                    self._payload_end = reader.at
                    if self._cleared_twice and strings[command] == NOTHING:
                        strings[command] = b""
            elif command >= NUMBER_FIRST:
                numbers[command] = reader.number
                if command == _ID:
                    self._id_end = reader.at
            elif command >= FLAG_FIRST:
                numbers[command] = 1
            elif command != _NOP:
                self._act(_COMMANDS[command])
                self._frame_start = -1
                if _PAYLOAD in strings:
                    left -= len(strings[_PAYLOAD]) >> PAYLOAD_SHIFT
                left -= self._owed
                self._owed = 0
        self.rest = reader.cut()
        self.held_bytes = reader.gathered_bytes + len(strings.get(_PAYLOAD, b""))
        self._after_clear = after_clear
        self._runs.close()

    def _act(self, action: Command) -> None:
        """Do an action. It reads the registers before it changes anything, and finds out what is missing."""
        try:
            _ACTIONS[action](self, action)
        except KeyError:
            registers = self._numbers.keys() | self._strings.keys()
            missing = [choice for choice in NEEDS[action] if registers.isdisjoint(choice)]
            if not missing:
                raise
            wanted = " and ".join(" or ".join(command.name for command in choice) for choice in missing)
            self._refuse(action, f"{action.name} without {wanted}")

    def _refuse(self, action: Command, reason: str) -> None:
        self._runs.tell(rq.Malformed(action, self._numbers.get(_ID), reason, self._repeated(action)))

    def _repeated(self, action: Command) -> int:
        """How often an action stands here in a row, which is read with that: a flood of it is one event."""
        reader = self._reader
        start = reader.at
        repeats = _REPEATS[action].match(reader.data, start)
        reader.at = repeats.end() if repeats is not None else start
        return 1 + reader.at - start

    def _name(self, action: Command) -> Name | None:
        """The queue that the registers name; QUEUE counts where there is a QUEUEID too."""
        raw = self._strings.get(Command.QUEUE)
        return self._numbers[Command.QUEUEID] if raw is None else self._text(action, raw)

    def _text(self, action: Command, raw: bytes) -> str | None:
        """A queue's name as text; None where it is none, which is told."""
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            self._refuse(action, f"{action.name} with a QUEUE that is not UTF-8")
            return None
        if not name:
            self._refuse(action, f"{action.name} with an empty QUEUE")
            return None
        return name

    def _on_request(self, action: Command) -> None:
        numbers = self._numbers
        ident = numbers[_ID]
        payload = self._strings[_PAYLOAD]
        name = self._name(action)
        if name is None:
            return
        retries = numbers.get(Command.RETRIES, RETRIES_NONE)
        has_retries = retries != RETRIES_NONE
        key = Key(action, name, Command.NOREPLY in numbers, has_retries, numbers.get(Command.TIMEOUT, 0))
        run = self._runs.add(key, payload)
        run.ids.append(ident)
        if has_retries:
            run.retries.append(retries)
        self._runs.added(run)
        self._learn(key, len(payload))

    def _on_reply(self, action: Command) -> None:
        ident = self._numbers[_ID]
        payload = self._strings.get(_PAYLOAD, b"")
        run = self._runs.add(SETTLED, payload)
        run.ids.append(ident)
        run.replied.add(ident)
        self._runs.added(run)

    def _on_delivered(self, action: Command) -> None:
        self._runs.delivered((self._numbers[_ID],))

    def _on_undelivered(self, action: Command) -> None:
        ident = self._numbers[_ID]
        self._runs.run(FAILED).ids.append(ident)

    def _on_broadcast(self, action: Command) -> None:
        payload = self._strings[_PAYLOAD]
        name = self._name(action)
        if name is not None:
            run = self._runs.add(Key(action, name), payload)
            if len(run.sizes) == 1:
                self._owed = BROADCAST_COST
            self._runs.added(run)

    def _on_consume(self, action: Command) -> None:
        name = self._name(action)
        if name is not None:
            numbers = self._numbers
            credit = numbers.get(Command.MAX, 0)
            priority = numbers.get(Command.PRIORITY, rq.PRIORITY_DEFAULT)
            self._runs.tell(rq.ConsumeAsked(name, credit, priority, Command.EXCLUSIVE in numbers))

    def _on_consuming(self, action: Command) -> None:
        queue_id = self._numbers[Command.QUEUEID]
        name = self._text(action, self._strings[Command.QUEUE])
        if name is not None:
            self._runs.tell(rq.Consuming(name, queue_id))

    def _on_cancel(self, action: Command) -> None:
        name = self._name(action)
        if name is not None:
            self._runs.tell(rq.CancelAsked(name))

    def _on_signal(self, action: Command) -> None:
        self._runs.tell(rq.Signal(action, self._repeated(action)))

    # -- the fast paths ---------------------------------------------------------------------------

    def _take_frames(self) -> None:
        """Read the known frames that begin here."""
        reader = self._reader
        at, end, size = -1, reader.at, len(reader.data)
        while at < end < size:
            at = end
            if self._shapes and self._fast_requests:
                self._take_requests()
            if reader.at < size and self._fast_id_frames:
                self._take_id_frames()
            if reader.at < size and self._fast_settled:
                self._take_settled()
            end = reader.at
            if end > at:
                self._cleared_twice = False
                self._frame_start = -1

    def _take_id_frames(self) -> None:
        """Read a run of `01 80 <id> 0d`, of `… 10` or of `… 0b`, without looking at each frame."""
        reader = self._reader
        data, at = reader.data, reader.at
        action = data[at + ID_FRAME_BYTES - 1] if at + ID_FRAME_BYTES <= len(data) else _CLEAR
        if action not in _ID_RUNS:
            return
        if COMPILED:
            raw = BytesWriter()
            end = loops.take_id_frames(data, at, action, raw)
            ids = array("I", raw.getvalue())
        else:
            frames = _ID_RUNS[action].match(data, at)
            end = frames.end() if frames is not None else at
            ids = rq.ids_of_frames(data, at, end)
        if not ids:
            return
        if action == _DELIVERED:
            self._runs.delivered(ids)
        elif action == _REPLY:
            run = self._runs.run(SETTLED)
            run.ids += ids
            run.sizes += [0] * len(ids)
            run.replied.update(ids)
        else:
            self._runs.run(FAILED).ids.extend(ids)
        reader.at = end
        self._load({}, ids[-1], {}, None)

    def _take_settled(self) -> None:
        """Read `01 80 <id> e0 <len> … 0b`, and `01 80 <id> 0d` among them, while they follow."""
        reader = self._reader
        data = reader.data
        at = frame = reader.at
        size = len(data)
        payload_bytes_max = self._fast_bytes_max
        unpack, unpack_length = _ID_FRAME.unpack_from, _LENGTH.unpack_from
        replied = self._runs.replied()
        delivered: list[int] = []
        ids: list[int] = []
        parts: list[bytes] = []
        while at + ID_FRAME_BYTES <= size:
            start, ident, command = unpack(data, at)
            if start != _CLEAR_ID:
                break
            if command == _PAYLOAD:
                begin = at + ID_FRAME_BYTES + 4
                if begin > size:
                    break
                (length,) = unpack_length(data, begin - 4)
                end = begin + length
                if length > payload_bytes_max or end >= size or data[end] != _REPLY:
                    break
                ids.append(ident)
                parts.append(data[begin:end])
                replied.add(ident)
                frame = at
                at = end + 1
            elif command == _DELIVERED and ident not in replied:
                delivered.append(ident)
                frame = at
                at += ID_FRAME_BYTES
            elif command == _REPLY:
                ids.append(ident)
                parts.append(b"")
                replied.add(ident)
                frame = at
                at += ID_FRAME_BYTES
            else:
                break
        if at == frame:
            return
        run = self._runs.run(SETTLED)
        run.replied = replied
        run.delivered.extend(delivered)
        run.ids.extend(ids)
        run.parts += parts
        run.sizes += map(len, parts)
        reader.at = at
        _, ident, command = unpack(data, frame)
        self._load({}, ident, {}, parts[-1] if command == _PAYLOAD else None)

    def _take_requests(self) -> None:
        """Read requests of a known shape while they follow."""
        # Once round the shapes after each that fits: a peer that serves its queues in turn never misses.
        reader = self._reader
        fits = True
        while fits and reader.at < len(reader.data):
            fits = False
            for shape in self._shapes:
                fits |= self._take_shape(shape)

    def _take_shape(self, shape: _Shape) -> bool:
        """Read requests that differ from the shape in id and payload only, while they follow."""
        if COMPILED:
            return self._take_shape_compiled(shape)
        reader = self._reader
        data, at = reader.data, reader.at
        head, middle, tail = shape.head, shape.middle, shape.tail
        front, unpack = shape.front.size, shape.front.unpack_from
        back, unpack_back = shape.back.size, shape.back.unpack_from
        last = len(data) - front - back  # where the last frame can begin, if its payload is empty
        payload_bytes_max = self._fast_bytes_max
        ids: list[int] = []
        parts: list[bytes] = []
        if shape.id_first:
            while at <= last:
                this_head, ident, this_middle, length = unpack(data, at)
                begin = at + front
                end = begin + length
                if (
                    this_head != head
                    or this_middle != middle
                    or length > payload_bytes_max
                    or data[end : end + back] != tail
                ):
                    break
                ids.append(ident)
                parts.append(data[begin:end])
                at = end + back
        else:
            while at <= last:
                this_head, length = unpack(data, at)
                if this_head != head or length > payload_bytes_max or at + length > last:
                    break
                begin = at + front
                end = begin + length
                this_middle, ident, this_tail = unpack_back(data, end)
                if this_middle != middle or this_tail != tail:
                    break
                ids.append(ident)
                parts.append(data[begin:end])
                at = end + back
        if not ids:
            return False
        run = self._runs.run(shape.key)
        run.ids.extend(ids)
        run.parts += parts
        run.sizes += map(len, parts)
        if shape.key.has_retries:
            run.retries += [shape.numbers[Command.RETRIES]] * len(ids)
        reader.at = at
        self._load(shape.numbers, ids[-1], shape.strings, parts[-1])
        return True

    def _take_shape_compiled(self, shape: _Shape) -> bool:
        reader = self._reader
        data, at = reader.data, reader.at
        ids = BytesWriter()
        parts: list[bytes] = []
        sizes: list[int] = []
        head, middle, tail, size_max = shape.head, shape.middle, shape.tail, self._fast_bytes_max
        end = loops.take_requests(data, at, head, middle, tail, shape.id_first, size_max, ids, parts, sizes)
        if end == at:
            return False
        run = self._runs.run(shape.key)
        run.ids.frombytes(ids.getvalue())
        run.parts += parts
        run.sizes += sizes
        if shape.key.has_retries:
            run.retries += [shape.numbers[Command.RETRIES]] * len(sizes)
        reader.at = end
        payload_end = end - shape.back.size
        self._load(shape.numbers, run.ids[-1], shape.strings, data[payload_end - sizes[-1] : payload_end])
        return True

    def _learn(self, key: Key, payload_bytes: int) -> None:
        """Remember the request just walked, where it stands in this chunk as one plain frame."""
        reader = self._reader
        data, start, end = reader.data, self._frame_start, reader.at
        if start < 0 or reader.skipped:
            return
        id_end, payload_end = self._id_end, self._payload_end
        payload_start = payload_end - payload_bytes
        id_first = id_end <= payload_start
        if id_first:
            constants = data[start : id_end - 4], data[id_end : payload_start - 4], data[payload_end:end]
        else:
            constants = data[start : payload_start - 4], data[payload_end : id_end - 4], data[id_end:end]
        for shape in self._shapes:
            if (shape.head, shape.middle, shape.tail) == constants:
                return  # It was walked because the chunk cut it, or because it is large.
        numbers = {register: value for register, value in self._numbers.items() if register != _ID}
        strings = {register: value for register, value in self._strings.items() if register != _PAYLOAD}
        self._shapes.append(_Shape(key, id_first, constants, numbers, strings))
        del self._shapes[:-_SHAPES_MAX]

    def _load(
        self, numbers: dict[int, int], ident: int, strings: dict[int, bytes], payload: bytes | None
    ) -> None:
        """Set the registers to what a fast path has read last."""
        self._numbers.clear()
        self._numbers.update(numbers)
        self._numbers[_ID] = ident
        self._strings.clear()
        self._strings.update(strings)
        if payload is not None:
            self._strings[_PAYLOAD] = payload


_ACTIONS: dict[Command, Callable[[Decoder, Command], None]] = {
    Command.PING: Decoder._on_signal,
    Command.PONG: Decoder._on_signal,
    Command.REQUEST: Decoder._on_request,
    Command.REPLY: Decoder._on_reply,
    Command.DELIVERED: Decoder._on_delivered,
    Command.BROADCAST: Decoder._on_broadcast,
    Command.UNDELIVERED: Decoder._on_undelivered,
    Command.CONSUME: Decoder._on_consume,
    Command.CANCEL_QUEUE: Decoder._on_cancel,
    Command.CLOSING: Decoder._on_signal,
    Command.SERVER_FULL: Decoder._on_signal,
    Command.CONSUMING: Decoder._on_consuming,
}
