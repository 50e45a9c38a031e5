"""Snapshots: the state at one position of the log, so that a start reads little.

A file `snapshot-POSITION`: magic "PSKS", crc32 of the rest, length of the JSON part (each 4
bytes), JSON with names and counts, then all ranges as int64. It is written whole under another
name and renamed, and only after everything before its position is synced. The last two are
kept, so that one that cannot be read costs time, not messages.

Held messages are written as what they will be after a crash: ready, or dead, in their old place.
"""

import json
import logging
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

from penstock.log.block import Buffer
from penstock.log.committer import Committer
from penstock.log.disk import Disk, discard, is_final, read_whole, write_whole
from penstock.log.errors import LogDamaged, LogFailed
from penstock.log.info import ReaderInfo
from penstock.log.queue import LogQueue
from penstock.log.segments import Segment, Span
from penstock.log.state import (
    FORMAT,
    Damage,
    LogState,
    damage_fields,
    reader_fields,
)
from penstock.log.workers import Worker
from penstock.model.life import Reason
from penstock.model.pending import Note, Pending, Place

log = logging.getLogger("penstock.log")

PREFIX = "snapshot-"
MAGIC = b"PSKS"
_HEAD = struct.Struct("<4sII")
SNAPSHOTS_KEPT = 2
AT_ONCE_US = 1  # a moment that is over in any case


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
    """Where the messages of a queue will be after a crash: a copy."""

    __slots__ = ("asking", "dead", "facts", "held", "moved", "notes", "number", "ready", "repairs")

    def __init__(self, queue: LogQueue) -> None:
        pending = queue.pending
        self.number = queue.number
        self.facts = {
            "number": queue.number,
            "name": queue.name,
            "tail": pending.tail,
            "next_event": queue.next_event,
            "offset_start": queue.offset_start,
            "event_start": queue.event_start,
            "paused": queue.paused,
        }
        self.ready = pending.ready.copy()
        self.moved = pending.waiting.places.copy()
        self.dead = pending.dead.places.copy()
        self.held = [holds.copy() for holds in pending.held.values()]
        self.notes = pending.notes.copy()
        self.asking = queue.asking.copy()
        self.repairs = queue.repairs.copy()

    def put(self, numbers: "array[int]") -> dict[str, object]:
        """Its ranges behind the others; what stands of it in the JSON part."""
        for holds in self.held:
            for a, b, hold in holds:
                if hold.place is None:
                    self.ready.add(a, b, None)
                else:
                    (self.dead if hold.dead else self.moved).add(a, b, hold.place)
        counts = [_put(numbers, ((a, b) for a, b, _ in self.ready))]
        counts += [
            _put(numbers, ((a, b, *place) for a, b, place in line)) for line in (self.moved, self.dead)
        ]
        counts.append(_put(numbers, ((a, b, *note) for a, b, note in self.notes)))
        counts.append(_put(numbers, ((a, b) for a, b, _ in self.asking)))
        return {**self.facts, "counts": counts, "repairs": _put(numbers, self.repairs)}


class Capture:
    """The state at one position. Taken on the loop, which goes on; put into bytes on the keeper's thread.

    Copies of the ranges take a few milliseconds for a million of them, their bytes a second. Everything
    else that is referred to here is never changed in place.
    """

    def __init__(self, state: LogState, position: int) -> None:
        """Everything before `position`, and nothing else, must be in the state."""
        self._rooms = [_Rooms(queue) for queue in state.queues.values()]
        self._timers = state.timers.copy()
        self._segments = [
            (s.base, s.generation, s.size, s.time_max_us, s.spans if s.sealed else _copies(s.spans))
            for s in state.segments.all
        ]
        self._meta: dict[str, Any] = {
            "format": FORMAT,
            "log": state.log,
            "opening": state.opening,
            "position": position,
            "transactions": list(state.transactions.items()),
            "fingerprints": list(state.fingerprints.items()),
            "unfinished": list(state.unfinished.items()),
            "readers": [reader_fields(reader) for reader in state.readers.values()],
            "damage": [damage_fields(damage) for damage in state.damage],
        }

    def encode(self) -> list[Buffer]:
        """The file, in pieces. Can be done once."""
        numbers = array("q")
        # One by one: a single call for all would keep the interpreter from the loop for its whole length.
        queues = ",".join([_json(rooms.put(numbers)) for rooms in self._rooms])
        self._meta["timers"] = _put(numbers, self._all_timers())
        segments = ",".join(
            [
                _json([*facts, [[q, *span.facts()] for q, span in spans.items()]])
                for *facts, spans in self._segments
            ]
        )
        text = f'{_json(self._meta)[:-1]},"queues":[{queues}],"segments":[{segments}]}}'.encode()
        length = struct.pack("<I", len(text))
        body: list[Buffer] = [length, text, memoryview(numbers).cast("B")]
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
        for rooms in self._rooms:
            for holds in rooms.held:
                for first, end, hold in holds:
                    if not hold.dead:
                        yield AT_ONCE_US, rooms.number, first, end


def _copies(spans: dict[int, Span]) -> dict[int, Span]:
    return {queue: Span(*span.facts()) for queue, span in spans.items()}


def _put(numbers: "array[int]", rows: Iterable[tuple[int, ...]]) -> int:
    """Numbers of one kind, row by row; how many rows."""
    before, width = len(numbers), 1
    for row in rows:
        width = len(row)
        numbers.extend(row)
    return (len(numbers) - before) // width


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def write_snapshot(disk: Disk, position: int, capture: Capture) -> None:
    """On the keeper's thread."""
    write_whole(disk, snapshot_name(position), *capture.encode())
    for old in snapshot_positions(disk)[SNAPSHOTS_KEPT:]:
        discard(disk, snapshot_name(old))


class Snapshotter:
    """Decides when the state is written down, and remembers which snapshots are on the disk."""

    def __init__(self, state: LogState, committer: Committer, keeper: Worker) -> None:
        self._state = state
        self._committer = committer
        self._keeper = keeper
        self._running = False
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
            or committer.blocks_since_snapshot >= self._state.settings.snapshot_blocks
            or segments[-1].base != self._base_last
        )
        if not due or self._running or not committer.fits(0):
            return
        self._running = True
        committer.blocks_since_snapshot = 0
        self._base_last = segments[-1].base
        position = committer.position
        capture = Capture(self._state, position)
        self._missed = False

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
    data = read_whole(disk, name)
    where = disk.where(name)
    if len(data) < _HEAD.size:
        raise LogDamaged(f"{where}: is cut short")
    magic, checksum, text_bytes = _HEAD.unpack_from(data)
    if magic != MAGIC or zlib.crc32(memoryview(data)[8:]) != checksum:
        raise LogDamaged(f"{where}: does not have its checksum")
    meta: dict[str, Any] = json.loads(data[_HEAD.size : _HEAD.size + text_bytes])
    if meta["format"] != FORMAT:
        raise LogDamaged(f"{where}: has format {meta['format']}; this version reads format {FORMAT}")
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
        queue.offset_start = entry["offset_start"]
        queue.event_start = entry["event_start"]
        queue.paused = entry["paused"]
        *counts, asking = entry["counts"]
        queue.pending.tail = queue.next_stored = entry["tail"]
        _get_pending(source, queue.pending, counts)
        for _ in range(asking):
            queue.asking.add(next(source), next(source), None)
        for _ in range(entry.get("repairs", 0)):  # older versions wrote none
            queue.repairs.add(next(source), next(source), next(source))
    for _ in range(meta["timers"]):
        state.timers.add(next(source), next(source), next(source), next(source))
    for base, generation, size, time_max_us, spans in meta["segments"]:
        segment = Segment(base, generation, size, size, sealed=True)
        segment.time_max_us = time_max_us
        segment.spans = {q: Span(*span) for q, *span in spans}
        state.segments.add(segment)
    for key, parts in meta["transactions"]:
        state.remember(key, [(q, first, end, opening) for q, first, end, opening in parts])
    state.fingerprints = dict(meta.get("fingerprints", ()))  # older versions wrote none
    for key, (steps, parts) in meta.get("unfinished", ()):  # older versions wrote none
        state.unfinished[key] = (steps, [(q, first, end, opening) for q, first, end, opening in parts])
    for fields in meta["readers"]:
        state.hold(ReaderInfo(**fields))
    state.damage = [Damage(**fields) for fields in meta["damage"]]


# --- ranges ------------------------------------------------------------------------------------


def _get_pending(source: Iterator[int], pending: Pending, counts: list[int]) -> None:
    ready, moved, dead, notes = counts
    for _ in range(ready):
        pending.ready.add(next(source), next(source), None)
    highest = max(_get_line(source, pending, moved, dead=False), _get_line(source, pending, dead, dead=True))
    pending.continue_places(highest)
    for _ in range(notes):
        pending.notes.add(next(source), next(source), Note(next(source), next(source), next(source)))


def _get_line(source: Iterator[int], pending: Pending, count: int, *, dead: bool) -> int:
    highest = 0
    for _ in range(count):
        first, end = next(source), next(source)
        place = Place(next(source), next(source), Reason(next(source)), next(source))
        pending.back(first, end, place, dead)
        highest = max(highest, place.number)
    return highest
