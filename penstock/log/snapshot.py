"""Snapshots: the state at one position of the log, so that a start reads little.

A file `snapshot-POSITION`: magic "PSKS", crc32 of the rest, length of the JSON part (each 4
bytes), JSON with names and counts, then all ranges as int64. It is written whole under another
name and renamed, and only after everything before its position is synced. The last two are
kept, so that one that cannot be read costs time, not messages.

Held messages are written as what they will be after a crash: ready, or dead, in their old place.

There may be a hundred thousand queues of which few have changed since the last snapshot, so that it costs
what has changed: the text of a queue with at most one run of messages is kept (`Images`) until the queue
changes, that of a sealed segment for good. A snapshot that is due first looks at all other queues, a slice in
each turn of the loop, and again at those that change meanwhile.
"""

import json
import logging
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from penstock.log.block import Buffer
from penstock.log.committer import Committer
from penstock.log.disk import Disk, discard, is_final, read_whole, write_whole
from penstock.log.errors import LogDamaged, LogFailed, LogNewer
from penstock.log.info import ReaderInfo
from penstock.log.queue import LogQueue
from penstock.log.results import Decision
from penstock.log.segment import Segment, Span
from penstock.log.stages import stage_of
from penstock.log.state import (
    AT_ONCE_US,
    FORMAT,
    Damage,
    LogState,
    damage_fields,
    reader_fields,
)
from penstock.log.workers import Worker
from penstock.model.life import Event, Reason, State
from penstock.model.pending import Note, Pending, Place
from penstock.model.ranges import RangeMap

log = logging.getLogger("penstock.log")

PREFIX = "snapshot-"
MAGIC = b"PSKS"
_HEAD = struct.Struct("<4sII")
SNAPSHOTS_KEPT = 2

SLICE_QUEUES = 200  # a millisecond or two
SLICES_MAX = 2000
"""After so many, what is left is looked at in one go: it changes faster than it is looked at."""


def snapshot_name(position: int) -> str:
    return f"{PREFIX}{position:020d}"


def snapshot_positions(disk: Disk) -> list[int]:
    """The positions of the snapshots that are there, newest first."""
    return positions_in(disk.names())


def positions_in(names: list[str]) -> list[int]:
    """The positions of the snapshots among some file names, newest first."""
    found = []
    for name in names:
        digits = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and digits.isdigit():
            found.append(int(digits))
    return sorted(found, reverse=True)


class _Rooms:
    """Where the messages of a queue will be after a crash: a copy, for queues with more than one run."""

    __slots__ = (
        "asking",
        "dead",
        "delayed",
        "facts",
        "held",
        "moved",
        "notes",
        "number",
        "ready",
        "repairs",
        "whys",
    )

    def __init__(self, queue: LogQueue, facts: dict[str, Any]) -> None:
        pending = queue.pending
        self.number = queue.number
        self.facts = facts
        self.ready = pending.ready.copy()
        self.moved = pending.waiting.places.copy()
        self.dead = pending.dead.places.copy()
        self.held = [holds.copy() for holds in pending.held.values()]
        self.notes = pending.notes.copy()
        self.asking = queue.asking.copy()
        self.repairs = queue.repairs.copy()
        self.delayed = pending.delayed.copy()
        self.whys = queue.whys.copy()

    def put(self, numbers: "array[int]") -> bytes:
        """Its ranges behind the others; what stands of it in the JSON part. Can be done once."""
        for holds in self.held:
            for a, b, hold in holds:
                if hold.place is None:
                    self.ready.add(a, b, None)
                else:
                    (self.dead if hold.dead else self.moved).add(a, b, hold.place)
        counts = [_put_ranges(numbers, self.ready)]
        counts += [_put_ranges(numbers, line, 4) for line in (self.moved, self.dead)]
        counts.append(_put_ranges(numbers, self.notes, 3))
        counts.append(_put_ranges(numbers, self.asking))
        repairs, delayed = _put(numbers, self.repairs), _put(numbers, self.delayed)
        texts = {text: index for index, text in enumerate(dict.fromkeys(why for _, _, why in self.whys))}
        whys = _put(numbers, ((first, end, texts[why]) for first, end, why in self.whys))
        facts = {**self.facts, "counts": counts, "repairs": repairs, "delayed": delayed, "whys": whys}
        return b'%b,"texts":[%b]}' % (_json(facts)[:-1], b",".join(map(_json, texts)))


def _image(queue: LogQueue, active: Segment) -> bytes | _Rooms:
    """What stands in a snapshot of a queue as it is now: its text, or what that is made from. It has what the
    segment that is written to has of it, and leaves out what is usual."""
    pending = queue.pending
    facts: dict[str, Any] = {
        "number": queue.number,
        "name": queue.name,
        "tail": pending.tail,
        "next_event": queue.next_event,
    }
    if queue.offset_start or queue.event_start:
        facts |= {"offset_start": queue.offset_start, "event_start": queue.event_start}
    if queue.paused:
        facts["paused"] = True
    if queue.steps:
        facts["steps"] = queue.steps
    span = active.spans.get(queue.number)
    if span is not None:
        facts["span"] = [active.base, *span.facts()]
    if (
        pending.held
        or pending.waiting.places
        or pending.dead.places
        or pending.notes
        or pending.delayed
        or queue.asking
        or queue.repairs
        or len(pending.ready) > 1
    ):
        return _Rooms(queue, facts)
    for first, end, _ in pending.ready:
        facts["ready"] = [first, end]
    return _json(facts)


class Images:
    """What is to be written of each queue, and which queues have changed since that was made."""

    def __init__(self, state: LogState) -> None:
        self._state = state
        self._rooms: dict[int, _Rooms] = {}  # by number; copies, which are not kept beyond one snapshot
        self._left: list[LogQueue] = []  # of a pass over those that have changed, the first at the end

    def catch_up(self, most: int) -> bool:
        """Look at so many of those that have changed; whether that was all of them."""
        unsaved = self._state.take_unsaved()
        active = self._state.segments.all[-1]
        while self._left or unsaved:
            if not self._left:
                self._left = list(unsaved.values())[::-1]
                unsaved.clear()
            if not most:
                return False
            most -= 1
            queue = self._left[-1]
            if queue.number not in unsaved:
                image = _image(queue, active)
                if isinstance(image, _Rooms):
                    self._rooms[queue.number], image = image, b""
                queue.image = image
            self._left.pop()  # Not sooner: memory may be short, and what it says of it is old.
        return True

    def take(self) -> list[bytes | _Rooms]:
        """All of them, when all are up to date."""
        known, (rooms, self._rooms) = self._state.by_number, (self._rooms, {})
        self._state.take_unsaved().update((number, known[number]) for number in rooms if number in known)
        active = self._state.segments.all[-1]
        return [queue.image or rooms.get(number) or _image(queue, active) for number, queue in known.items()]


class Capture:
    """The state at one position. Taken on the loop, which goes on; put into bytes on the keeper's thread.

    Copies of the ranges take a few milliseconds for a million of them, their bytes a second. Everything
    else that is referred to here is never changed in place.
    """

    def __init__(self, state: LogState, position: int, images: Images) -> None:
        """Everything before `position`, and nothing else, must be in the state."""
        self._queues = images.take()
        self._timers = state.timers.copy()
        self._delays = state.delays.copy()
        *sealed, active = state.segments.all
        self._sealed = [(segment, segment.spans) for segment in sealed]  # which a deletion replaces
        self._active = _json([*_segment_facts(active), []])  # its spans are told with the queues
        self._meta: dict[str, Any] = {
            "format": FORMAT,
            "log": state.log,
            "opening": state.opening,
            "position": position,
            "transactions": list(state.transactions.items()),
            "fingerprints": list(state.fingerprints.items()),
            "unfinished": list(state.unfinished.items()),
            "stages": [stage.fields() for stage in state.stages],
            "prepared": [(key, list(its)) for key, its in state.stages.prepared.items()],
            "decisions": list(state.decisions.items()),
            "names": [(it.base, it.names, list(it.adopted.items())) for it in state.segments.all if it.names],
            "readers": [reader_fields(reader) for reader in state.readers.values()],
            "damage": [damage_fields(damage) for damage in state.damage],
            "steps": state.steps,
            "dropped": [(segment.base, segment.dropped) for segment in state.segments.all if segment.dropped],
        }

    def encode(self) -> list[Buffer]:
        """The file, in pieces. Can be done once."""
        numbers = array("q")
        # One by one: a single call for all would keep the interpreter from the loop for its whole length.
        queues = b",".join([it if isinstance(it, bytes) else it.put(numbers) for it in self._queues])
        self._meta["timers"] = _put(numbers, self._all_timers())
        self._meta["delays"] = _put(numbers, self._delays)
        segments = b",".join([*(_segment_image(*it) for it in self._sealed), self._active])
        text = [_json(self._meta)[:-1], b',"queues":[', queues, b'],"segments":[', segments, b"]}"]
        length = struct.pack("<I", sum(map(len, text)))
        body: list[Buffer] = [length, *text, memoryview(numbers).cast("B")]
        checksum = 0
        for piece in body:
            checksum = zlib.crc32(piece, checksum)
        return [MAGIC, struct.pack("<I", checksum), *body]

    def _all_timers(self) -> Iterator[tuple[int, int, int, int]]:
        """What is filed; and for what somebody holds, a look as soon as the log is open again.

        A message may have expired while it was held, when its timer had nothing to do. After a crash
        it is ready again, and nobody would come for it.
        """
        yield from self._timers
        for rooms in [it for it in self._queues if isinstance(it, _Rooms)]:
            for holds in rooms.held:
                for first, end, hold in holds:
                    if not hold.dead:
                        yield AT_ONCE_US, rooms.number, first, end


def _segment_facts(segment: Segment) -> tuple[int, int, int, int]:
    return segment.base, segment.generation, segment.size, segment.time_max_us


def _segment_image(segment: Segment, spans: dict[int, Span]) -> bytes:
    """What stands in a snapshot of a sealed segment that has these, made once."""
    of, text = segment.image
    if of is not spans:
        told = [_json([queue, *span.facts()]) for queue, span in spans.items()]
        text = b"%b,[%b]]" % (_json(_segment_facts(segment))[:-1], b",".join(told))
        segment.image = spans, text
    return text


def _put(numbers: "array[int]", rows: Iterable[tuple[int, ...]]) -> int:
    """Numbers of one kind, row by row; how many rows."""
    before, width = len(numbers), 1
    for row in rows:
        width = len(row)
        numbers.extend(row)
    return (len(numbers) - before) // width


def _put_ranges(numbers: "array[int]", ranges: RangeMap[Any], width: int = 0) -> int:
    """Ranges, and behind their bounds as many numbers as a value has; how many ranges. By columns: there may
    be a million."""
    for starts, ends, values in ranges.columns():
        rows = array("q", bytes(8 * (2 + width) * len(starts)))
        rows[0 :: 2 + width], rows[1 :: 2 + width] = starts, ends
        facts = array("q", chain.from_iterable(values) if width else ())
        for column in range(width):
            rows[2 + column :: 2 + width] = facts[column::width]
        numbers.extend(rows)
    return len(ranges)


_compact = json.JSONEncoder(separators=(",", ":")).encode


def _json(value: object) -> bytes:
    return _compact(value).encode()


def write_snapshot(disk: Disk, position: int, capture: Capture) -> None:
    """On the keeper's thread."""
    write_whole(disk, snapshot_name(position), *capture.encode())
    for old in snapshot_positions(disk)[SNAPSHOTS_KEPT:]:
        discard(disk, snapshot_name(old))


class Snapshotter:
    """Decides when the state is written down, and remembers which snapshots are on the disk."""

    def __init__(
        self, state: LogState, committer: Committer, keeper: Worker, after: Callable[[], None]
    ) -> None:
        self._state = state
        self._after = after  # what every snapshot is followed by
        self._committer = committer
        self._keeper = keeper
        self._images = Images(state)
        self._running = False
        self._slices = 0  # since one is due
        self._missed = False  # the last one could not be written
        self._base_last = state.segments.all[-1].base if state.segments.all else -1
        self.positions = snapshot_positions(state.disk)[:SNAPSHOTS_KEPT]  # newest first

    def try_again(self) -> None:
        """Retention waits for the snapshot that could not be written: let the next turn write one."""
        if self._missed:
            self._missed, self._base_last = False, -1

    def consider(self, force: bool = False) -> None:
        """Write a snapshot where enough has happened since the last one.

        Everything that is in the state must be in blocks that the committer has.
        """
        committer, segments = self._committer, self._state.segments.all
        due = (
            force
            or self._slices
            or committer.blocks_since_snapshot >= self._state.settings.snapshot_blocks
            or segments[-1].base != self._base_last
        )
        if not due or self._running or not committer.fits(0):
            return
        self._slices += 1
        at_once = force or self._slices > SLICES_MAX
        if not self._images.catch_up(sys.maxsize if at_once else SLICE_QUEUES):
            return  # In the next turn it goes on.
        position = committer.position
        capture = Capture(self._state, position, self._images)
        self._slices = 0
        self._running = True
        committer.blocks_since_snapshot = 0
        self._base_last = segments[-1].base
        self._missed = False
        self._after()

        def write() -> None:
            if committer.failed is not None:
                raise committer.failed
            write_snapshot(self._state.disk, position, capture)

        def synced(error: LogFailed | None) -> None:
            if error is None:
                self._keeper.submit(write, written)

        def written(_: None, error: BaseException | None) -> None:
            self._running = False
            if is_final(error) and error is not None:
                committer.fail(error)
            elif error is not None:
                # The log is whole without it: the next start reads more, and retention waits.
                log.warning("no snapshot at %d: %s", position, error)
                self._missed = True
            if error is not None:
                return
            self.positions = [position, *self.positions][:SNAPSHOTS_KEPT]

        committer.when_synced(synced)
        committer.want_sync()


def read_snapshot(disk: Disk, position: int) -> "tuple[dict[str, Any], array[int]]":
    """The JSON part and the ranges of a snapshot. LogDamaged where it cannot be trusted."""
    name = snapshot_name(position)
    return parse_snapshot(read_whole(disk, name), disk.where(name))


def parse_snapshot(data: bytes, where: str) -> "tuple[dict[str, Any], array[int]]":
    """The same of a file's bytes."""
    if len(data) < _HEAD.size:
        raise LogDamaged(f"{where}: is cut short")
    magic, checksum, text_bytes = _HEAD.unpack_from(data)
    if magic != MAGIC or zlib.crc32(memoryview(data)[8:]) != checksum:
        raise LogDamaged(f"{where}: does not have its checksum")
    meta: dict[str, Any] = json.loads(data[_HEAD.size : _HEAD.size + text_bytes])
    if meta["format"] > FORMAT:
        raise LogNewer(f"{where}: has format {meta['format']}, and this version reads format {FORMAT}")
    for *facts, spans in meta["segments"][-1:]:  # What the last one has is told with the queues.
        told = ((queue["number"], queue.get("span", (-1,))) for queue in meta["queues"])
        spans += [[number, *span] for number, (base, *span) in told if base == facts[0]]
    numbers = array("q")
    numbers.frombytes(data[_HEAD.size + text_bytes :])
    return meta, numbers


def load_snapshot(state: LogState, position: int) -> None:
    """Fill a fresh state. LogDamaged where the snapshot cannot be trusted."""
    meta, numbers = read_snapshot(state.disk, position)
    source = iter(numbers)
    state.log = meta["log"]
    state.opening = meta["opening"]
    for entry in meta["queues"]:
        queue = state.declare(entry["number"], entry["name"])
        queue.next_event = entry["next_event"]
        queue.offset_start = entry.get("offset_start", 0)
        queue.event_start = entry.get("event_start", 0)
        queue.paused = entry.get("paused", False)
        queue.steps = tuple((tail, by_us) for tail, by_us in entry.get("steps", ()))
        queue.pending.tail = queue.next_stored = entry["tail"]
        if "ready" in entry:
            first, end = entry["ready"]
            queue.pending.ready.add(first, end, None)
        if "counts" not in entry:
            continue
        *counts, asking = entry["counts"]
        _get_pending(source, queue.pending, counts)
        for _ in range(asking):
            queue.ask(next(source), next(source))
        for _ in range(entry.get("repairs", 0)):  # older versions wrote none
            queue.put_repair(next(source), next(source), next(source))
        for _ in range(entry.get("delayed", 0)):  # likewise
            first, end = next(source), next(source)
            queue.pending.move(State.READY, Event.DELAYED, first, end, due_us=next(source))
        for _ in range(entry.get("whys", 0)):  # likewise
            queue.put_why(next(source), next(source), entry["texts"][next(source)])
    for _ in range(meta["timers"]):
        state.timers.add(next(source), next(source), next(source), next(source))
    for _ in range(meta.get("delays", 0)):  # older versions wrote none
        state.delays.add(next(source), next(source), next(source), next(source))
    dropped = dict(meta.get("dropped", ()))  # older versions wrote none
    for base, generation, size, time_max_us, spans in meta["segments"]:
        segment = Segment(base, generation, size, size, sealed=True)
        segment.time_max_us = time_max_us
        segment.spans = {q: Span(*span) for q, *span in spans}
        segment.dropped = dropped.get(base, 0)
        state.segments.add(segment)
    named = {base: it for base, *it in meta.get("names", ())}  # older versions wrote none
    for segment in state.segments.all:
        names, adopted = named.get(segment.base, ((), ()))
        segment.names = [(first, end) for first, end in names]
        segment.adopted = {number: (count, size) for number, (count, size) in adopted}
    for fields in meta.get("stages", ()):
        state.stages.put(stage_of(fields))
    for key, attempts in meta.get("prepared", ()):  # older versions wrote none
        for attempt in attempts:
            state.stages.prepare(key, attempt)
    for key, parts in meta["transactions"]:
        state.remember(key, [(q, first, end, opening) for q, first, end, opening in parts])
    state.fingerprints = dict(meta.get("fingerprints", ()))  # older versions wrote none
    for key, decision in meta.get("decisions", ()):  # older versions wrote none
        state.decisions[key] = Decision(*decision)
    for key, (steps, parts) in meta.get("unfinished", ()):  # older versions wrote none
        state.unfinished[key] = (steps, [(q, first, end, opening) for q, first, end, opening in parts])
    for fields in meta["readers"]:
        state.hold(ReaderInfo(**fields))
    state.damage = [Damage(**fields) for fields in meta["damage"]]
    state.steps = tuple((at, by_us) for at, by_us in meta.get("steps", ()))  # older versions wrote none


# --- ranges ------------------------------------------------------------------------------------


def _get_pending(source: Iterator[int], pending: Pending, counts: list[int]) -> None:
    ready, moved, dead, notes = counts
    for _ in range(ready):
        pending.ready.add(next(source), next(source), None)
    highest = max(_get_line(source, pending, moved, dead=False), _get_line(source, pending, dead, dead=True))
    pending.continue_places(highest)
    for _ in range(notes):
        pending.note(next(source), next(source), Note(next(source), next(source), next(source)))


def _get_line(source: Iterator[int], pending: Pending, count: int, *, dead: bool) -> int:
    shared: dict[int, Place] = {}
    for _ in range(count):
        first, end = next(source), next(source)
        place = Place(next(source), next(source), Reason(next(source)), next(source))
        pending.back(first, end, shared.setdefault(place.number, place), dead)
    return max(shared, default=0)
