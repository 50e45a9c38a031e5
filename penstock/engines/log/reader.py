"""LogReader: the blocks of a log, read from its files by another process while a broker writes.

No lock is taken and nothing is changed. What may be seen is decided by one number, the file
`watermark`: up to that log position everything is synced, whole, and in the files. It outlives
the broker and stays the truth when none is running. Where it is missing or says nothing (a power
cut can take it), the reader asks what recovery would keep, and shows that.

Rules that always hold:
  * Never half a block, never a byte that a power cut could take back.
  * A block is handed out after its checksum was found right. Its columns are windows on the
    mapped file, not copies; a map lives as long as somebody has a window on it.
  * What was asked for and is not there is an error that names queue and offsets. With
    `fail_on_loss=False` it is a warning in the log, and the next block that is there follows.

The files change while they are read: segments come, go, and are replaced by compacted ones.
`refresh` takes a new picture. A file that has gone since the last one makes the reader look again,
a bounded number of times. The first picture comes from the newest snapshot, so that only the
segments behind it are walked; after that only what is new.

Memory: a `Span` per segment and queue, 32 bytes per block for the segments that were read last
(`INDEX_ROWS_MAX` in all), and `maps_max` maps. For one thread.
"""

import logging
import mmap
import os
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock.broker.ids import origin_of
from penstock.engines.interface import EngineError, EngineRefused, EventRun, LogDamaged
from penstock.engines.log import views
from penstock.engines.log.block import (
    FLAG_EXPIRES,
    FLAG_RETRIES,
    HEADER_BYTES,
    KIND_CONTROL,
    KIND_MESSAGES,
    PROTOCOLS,
    BodyReader,
    Header,
    read_control,
    read_header,
)
from penstock.engines.log.disk import WATERMARK, RealDisk, Watermark
from penstock.engines.log.overlay import TRIES_MAX, LogChanging, replayed
from penstock.engines.log.scan import find_block
from penstock.engines.log.segments import Index, Segment, Span, parse_segment_name
from penstock.engines.log.snapshot import read_snapshot, snapshot_positions

MAPS_MAX = 16
INDEX_ROWS_MAX = 1_000_000

log = logging.getLogger("penstock.log")


class OffsetsMissing(EngineError):
    """Messages or events that were asked for are not in the log. Says which."""

    def __init__(self, text: str, queue: str, first: int, end: int) -> None:
        super().__init__(text)
        self.queue = queue
        self.first = first
        self.end = end


class ReaderQueue(NamedTuple):
    """How far a queue can be read. The log is complete from the starts on; ends are exclusive."""

    number: int
    offset_start: int
    offset_end: int
    event_start: int
    event_end: int


class Columns(NamedTuple):
    """The columns of a message block, as windows on the mapped file; see `block.py`."""

    bounds: memoryview
    payload: memoryview
    expires: memoryview | None
    retries: memoryview | None


class Block:
    """A block of one queue, of which the messages (or events) from `lo` to `hi` were asked for."""

    __slots__ = ("body", "header", "hi", "lo", "origin")

    def __init__(self, header: Header, body: memoryview, origin: bytes, lo: int, hi: int) -> None:
        self.header = header
        self.body = body
        self.origin = origin  # the first digits of the ids of a message block, see ids.py
        self.lo = lo
        self.hi = hi

    @property
    def protocol(self) -> str:
        return PROTOCOLS[self.header.protocol]

    def columns(self) -> Columns:
        """The columns of a message block, from its first message to its last."""
        reader = BodyReader(self.body)
        count, flags = self.header.count, self.header.flags
        bounds = reader.raw(4 * count + 4).cast("i")
        payload = reader.raw(bounds[count])
        expires = reader.raw(8 * count).cast("q") if flags & FLAG_EXPIRES else None
        retries = reader.raw(2 * count).cast("h") if flags & FLAG_RETRIES else None
        return Columns(bounds, payload, expires, retries)

    def messages(self) -> list[bytes]:
        """The payloads that were asked for, one by one. For tests and tools."""
        bounds, payload, _, _ = self.columns()
        return [bytes(payload[bounds[i] : bounds[i + 1]]) for i in range(self.lo, self.hi)]


class _Queue:
    """What is known of one queue."""

    __slots__ = (
        "event_end",
        "event_start",
        "name",
        "number",
        "offset_end",
        "offset_start",
        "openings",
        "with_events",
        "with_messages",
    )

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.offset_start = self.offset_end = 0
        self.event_start = self.event_end = 0
        self.forget_segments()

    def forget_segments(self) -> None:
        """Which segments there are has changed."""
        self.with_messages: list[Segment] | None = None
        self.with_events: list[Segment] | None = None
        self.openings: list[tuple[int, int, int]] | None = None


class _Picture:
    """What was found in the files at one moment; thrown away as a whole when it no longer fits."""

    def __init__(self) -> None:
        self.log = 0
        self.position = 0  # up to here the log was walked
        self.segments: list[Segment] = []
        self.openings: dict[int, int] = {}  # by base: every block of a segment has the same
        self.queues: dict[str, _Queue] = {}
        self.by_number: dict[int, _Queue] = {}

    def declare(self, number: int, name: str) -> _Queue:
        queue = self.by_number.get(number)
        if queue is not None:
            del self.queues[queue.name]
            queue.name = name
        else:
            queue = self.by_number[number] = _Queue(number, name)
        self.queues[name] = queue
        return queue

    def queue_of(self, header: Header) -> _Queue:
        # Without its declaration the queue has the name that recovery would give it.
        return self.by_number.get(header.queue) or self.declare(header.queue, f"unknown-{header.queue}")

    def leave(self, segment: Segment) -> None:
        """A segment is gone, or compacted: its queues are complete only behind it."""
        for number, span in segment.spans.items():
            queue = self.by_number[number]
            queue.offset_start = max(queue.offset_start, span.end_offset)
            queue.event_start = max(queue.event_start, span.end_event)
            queue.forget_segments()


class LogReader:
    """See the module's docstring."""

    def __init__(self, path: str, *, maps_max: int = MAPS_MAX) -> None:
        self.path = os.fspath(path)
        if not os.path.isdir(self.path):
            raise EngineRefused(f"data folder {self.path!r}: there is no such folder")
        self._disk = RealDisk(self.path, read_only=True)
        self._maps_max = maps_max
        self._maps: OrderedDict[str, memoryview] = OrderedDict()
        self._indexed: OrderedDict[Segment, int] = OrderedDict()  # how many rows each index has
        self._watermark: Watermark | None = None
        self._scanned: tuple[object, int] | None = None
        self._origins: dict[tuple[int, int], bytes] = {}
        self._now = _Picture()
        self.refresh()

    def __enter__(self) -> "LogReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files; windows that were handed out stay good."""
        self._maps.clear()
        self._indexed.clear()
        self._now = _Picture()
        if self._watermark is not None:
            self._watermark.close()
            self._watermark = None

    # --- what there is -----------------------------------------------------------------------------

    def queues(self) -> dict[str, ReaderQueue]:
        """Every queue by name, as of the last `refresh`."""
        return {
            name: ReaderQueue(q.number, q.offset_start, q.offset_end, q.event_start, q.event_end)
            for name, q in self._now.queues.items()
        }

    @property
    def position(self) -> int:
        """The log position up to which the last `refresh` saw the log."""
        return self._now.position

    def openings(self, queue: str) -> list[tuple[int, int, int]]:
        """Which opening of the log the messages came in, as far as they are in the log.

        Runs of (first offset, end, opening), in order: with it an id is made for any offset.
        """
        found = self._known(queue)
        if found.openings is None:
            runs: list[tuple[int, int, int]] = []
            for segment in self._with_messages(found):
                span = segment.spans[found.number]
                opening = self._opening(segment)
                if opening is None:
                    continue
                if runs and runs[-1][1:] == (span.first_offset, opening):
                    runs[-1] = runs[-1][0], span.end_offset, opening
                else:
                    runs.append((span.first_offset, span.end_offset, opening))
            found.openings = runs
        return found.openings

    def origin(self, queue: str, opening: int) -> bytes:
        """The first digits of the ids of messages of `queue` that came in that opening."""
        return self._origin(self._known(queue).number, opening)

    def _origin(self, number: int, opening: int) -> bytes:
        origin = self._origins.get((number, opening))
        if origin is None:
            origin = self._origins[number, opening] = origin_of(self._now.log, number, opening)
        return origin

    def _known(self, queue: str) -> _Queue:
        found = self._now.queues.get(queue)
        if found is None:
            self.refresh()
            found = self._now.queues.get(queue)
        if found is None:
            raise EngineRefused(f"there is no queue {queue!r} in {self.path!r}")
        return found

    # --- reading -----------------------------------------------------------------------------------

    def messages(
        self,
        queue: str,
        start: int,
        end: int | None = None,
        *,
        fail_on_loss: bool = True,
        headers_only: bool = False,
    ) -> Iterator[Block]:
        """The blocks with the messages from offset `start` to `end` (None: all that is synced).

        `headers_only` is for those who want no more than offsets, times and doors: bodies are empty.
        """
        found, end = self._range(queue, start, end, fail_on_loss, events=False)
        return self._blocks(found, start, end, fail_on_loss, events=False, headers_only=headers_only)

    def event_blocks(
        self, queue: str, start: int, end: int | None = None, *, fail_on_loss: bool = True
    ) -> Iterator[Block]:
        """The blocks with the events from number `start` to `end`, message blocks among them.

        `lo` and `hi` count events. The body of a message block is not looked at: its header says
        all that there is to say about its events.
        """
        found, end = self._range(queue, start, end, fail_on_loss, events=True)
        return self._blocks(found, start, end, fail_on_loss, events=True, headers_only=True)

    def events(
        self, queue: str, start: int, end: int | None = None, *, fail_on_loss: bool = True
    ) -> Iterator[EventRun]:
        """The same events in runs, as `Engine.events` gives them."""
        for block in self.event_blocks(queue, start, end, fail_on_loss=fail_on_loss):
            header = block.header
            first, stop = header.first_event + block.lo, header.first_event + block.hi
            if header.kind == KIND_MESSAGES:
                runs: Iterator[EventRun] = iter((views.accepted_run(header),))
            else:
                runs = views.settlement_runs(header, block.body)
            for run in runs:
                yield from views.clip(run, first, stop)

    def _range(
        self, name: str, start: int, end: int | None, fail_on_loss: bool, *, events: bool
    ) -> tuple[_Queue, int]:
        queue = self._known(name)
        known_end = queue.event_end if events else queue.offset_end
        if end is not None and end > known_end:
            self.refresh()
            queue = self._known(name)
            known_end = queue.event_end if events else queue.offset_end
            if end > known_end and fail_on_loss:
                self._missing(queue, max(start, known_end), end, events, fail_on_loss)
        return queue, known_end if end is None else min(end, known_end)

    def _missing(self, queue: _Queue, first: int, end: int, events: bool, fail_on_loss: bool) -> None:
        """What was asked for and is not there: say so, one way or the other."""
        what, complete_from, known_end = (
            ("event", queue.event_start, queue.event_end)
            if events
            else ("offset", queue.offset_start, queue.offset_end)
        )
        if first >= known_end:
            why = f"the synced log ends at {what} {known_end}"
        elif first < complete_from:
            why = f"retention has removed what was before {what} {complete_from}; begin there"
        else:
            why = "they should be there: run `penstock verify` on the folder"
        name = f"{what} {first} is" if end == first + 1 else f"{what}s {first} to {end - 1} are"
        text = f"queue {queue.name!r}: {name} not in the log in {self.path!r}: {why}"
        if fail_on_loss:
            raise OffsetsMissing(text, queue.name, first, end)
        log.warning("%s", text)

    def _blocks(
        self, queue: _Queue, start: int, end: int, fail_on_loss: bool, *, events: bool, headers_only: bool
    ) -> Iterator[Block]:
        name, at, tries, looked_again = queue.name, start, 0, -1
        while at < end:
            queue = self._known(name)
            segment = self._segment_at(queue, at, events)
            if segment is None or _bounds(segment.spans[queue.number], events)[0] > at:
                if looked_again != at:
                    # A listing that is taken while names change can miss one: look before saying so.
                    looked_again = at
                    self.refresh()
                    continue
                if segment is None:
                    self._missing(queue, at, end, events, fail_on_loss)
                    return
            try:
                for header, view in self._rows(segment, queue.number, at, events):
                    first, stop = header.first_offset, header.offset_end
                    if events:
                        first, stop = header.first_event, header.first_event + header.event_count
                    elif header.kind != KIND_MESSAGES:
                        continue
                    if stop <= at:
                        continue
                    if first >= end:
                        break
                    if first > at:
                        self._missing(queue, at, first, events, fail_on_loss)
                        at = first
                    lo, at = at - first, stop
                    body = view[:0]
                    if not headers_only or header.kind != KIND_MESSAGES:
                        try:
                            body = self._body(segment, view, header)
                        except LogDamaged as error:
                            if fail_on_loss:
                                raise
                            log.warning("%s", error)
                            continue
                    yield Block(
                        header, body, self._origin(queue.number, header.opening), lo, min(end, stop) - first
                    )
            except FileNotFoundError:
                tries += 1
                if tries > TRIES_MAX:
                    raise self._changing() from None
                self.refresh()
                continue
            span_end = min(_bounds(segment.spans[queue.number], events)[1], end)
            if at < span_end:
                self._missing(queue, at, span_end, events, fail_on_loss)
                at = span_end

    def _segment_at(self, queue: _Queue, at: int, events: bool) -> Segment | None:
        """The first segment that has something of a queue behind `at`."""
        number = queue.number
        segments = self._with_events(queue) if events else self._with_messages(queue)
        row = bisect_right(segments, at, key=lambda segment: _bounds(segment.spans[number], events)[1])
        return segments[row] if row < len(segments) else None

    def _with_messages(self, queue: _Queue) -> list[Segment]:
        if queue.with_messages is None:
            number = queue.number
            queue.with_messages = [s for s in self._with_events(queue) if s.spans[number].count]
        return queue.with_messages

    def _with_events(self, queue: _Queue) -> list[Segment]:
        if queue.with_events is None:
            queue.with_events = [s for s in self._now.segments if queue.number in s.spans]
        return queue.with_events

    def _rows(
        self, segment: Segment, number: int, at: int, events: bool
    ) -> Iterator[tuple[Header, memoryview]]:
        """The blocks of a queue in one segment, from the one that may hold `at` on."""
        entries = self._index(segment).queues[number]
        view = self._view(segment)
        base, positions = segment.base, entries.positions
        first_row = bisect_right(entries.events if events else entries.floors, at) - 1
        for row in range(max(first_row, 0), len(positions)):
            position = positions[row]
            header = read_header(view, position - base, position)
            if header is None:
                raise LogDamaged(
                    f"{self._disk.where(segment.name)}: the block header at position {position - base} "
                    f"was valid before and is not any more"
                )
            yield header, view

    def _body(self, segment: Segment, view: memoryview, header: Header) -> memoryview:
        at = header.position - segment.base + HEADER_BYTES
        body = view[at : at + header.body_bytes]
        if len(body) != header.body_bytes or zlib.crc32(body) != header.body_checksum:
            queue = self._now.by_number.get(header.queue)
            raise LogDamaged(
                f"{self._disk.where(segment.name)}: the block at position {header.position - segment.base} "
                f"does not have its checksum: queue {queue.name if queue else header.queue!r}, "
                + (
                    f"offsets {header.first_offset} to {header.offset_end - 1}"
                    if header.kind == KIND_MESSAGES
                    else f"events {header.first_event} to {header.first_event + header.event_count - 1}"
                )
            )
        return body

    # --- following the files -----------------------------------------------------------------------

    def refresh(self) -> None:
        """Look at what has come, gone and changed since the last time."""
        for _ in range(TRIES_MAX):
            try:
                self._follow(self._synced())
            except FileNotFoundError:
                # Half of a picture is none: the next try begins again.
                self._now = _Picture()
                if not os.path.isdir(self.path):
                    raise EngineRefused(
                        f"data folder {self.path!r}: there is no such folder any more"
                    ) from None
                continue
            return
        raise self._changing()

    def _changing(self) -> LogChanging:
        return LogChanging(
            f"data folder {self.path!r}: its files were replaced {TRIES_MAX} times while they were opened; "
            f"try again"
        )

    def _synced(self) -> int:
        """The log position before which everything may be shown."""
        if self._watermark is None:
            try:
                self._watermark = Watermark(self._disk.where(WATERMARK), writable=False)
            except (FileNotFoundError, ValueError):  # ValueError: a file that is still empty
                return self._scan()
        return self._watermark.get() or self._scan()

    def _scan(self) -> int:
        """Without a watermark: where recovery would go on. Asked again only when files have changed."""
        seen = []
        for name in self._disk.names():
            if parse_segment_name(name) is not None:
                facts = os.stat(self._disk.where(name))
                seen.append((name, facts.st_size, facts.st_mtime_ns))
        if self._scanned is None or self._scanned[0] != seen:
            self._scanned = seen, replayed(self.path)[1]
        return self._scanned[1]

    def _follow(self, end: int) -> None:
        # The names are taken after the watermark: every segment before it has its name by then.
        on_disk: dict[int, int] = {}
        for name in self._disk.names():
            parsed = parse_segment_name(name)
            if parsed is not None and parsed[0] < end:
                on_disk[parsed[0]] = max(parsed[1], on_disk.get(parsed[0], 0))
        now = self._now
        if now.segments and self._keep_up(now, on_disk, end) and self._walk(now, end):
            return
        picture = self._first_picture(on_disk, end)
        self._walk(picture, end)
        self._now = picture

    def _keep_up(self, now: _Picture, on_disk: dict[int, int], end: int) -> bool:
        """Segments that came, went or were compacted. False: too much has happened, begin again."""
        last = now.segments[-1]
        if end < now.position or on_disk.get(last.base) != last.generation:
            return False
        known = set()
        for at, segment in reversed(list(enumerate(now.segments))):
            known.add(segment.base)
            generation = on_disk.get(segment.base)
            if generation == segment.generation:
                continue
            now.segments[at : at + 1] = [self._describe(now, segment.base, generation)] if generation else []
            now.leave(segment)
            self._forget(segment)
        for base in sorted(on_disk.keys() - known):
            if base < now.position or on_disk[base]:
                return False
            self._add(now, Segment(base, 0, 0, 0, sealed=False))
        return True

    def _first_picture(self, on_disk: dict[int, int], end: int) -> _Picture:
        """From the newest snapshot that can be read, or from nothing."""
        for segment in self._now.segments:
            self._forget(segment)
        self._origins.clear()
        picture = _Picture()
        for position in snapshot_positions(self._disk):
            if position > end:
                continue
            try:
                meta, _ = read_snapshot(self._disk, position)
            except LogDamaged as error:
                log.warning("%s; an older one is used", error)
                continue
            self._fill(picture, meta, on_disk)
            picture.position = position
            break
        for base in sorted(on_disk):
            if base >= picture.position and not (picture.segments and picture.segments[-1].base == base):
                self._add(picture, Segment(base, on_disk[base], 0, 0, sealed=False))
        return picture

    def _fill(self, picture: _Picture, meta: dict[str, Any], on_disk: dict[int, int]) -> None:
        """What a snapshot says, corrected by what has happened to the segments since."""
        picture.log = meta["log"]
        for entry in meta["queues"]:
            queue = picture.declare(entry["number"], entry["name"])
            queue.offset_start, queue.offset_end = entry["offset_start"], entry["tail"]
            queue.event_start, queue.event_end = entry["event_start"], entry["next_event"]
        for base, generation, size, _, spans in meta["segments"]:
            segment = Segment(base, generation, size, size, sealed=True)
            segment.spans = {number: Span(*span) for number, *span in spans}
            there = on_disk.get(base)
            if there != generation:
                picture.leave(segment)
                if there is None:
                    continue
                segment = self._describe(picture, base, there)
            picture.segments.append(segment)

    def _add(self, picture: _Picture, segment: Segment) -> None:
        segment.index = Index()
        self._indexed[segment] = 0
        picture.segments.append(segment)

    def _walk(self, picture: _Picture, end: int) -> bool:
        """Take in the blocks up to `end`. False where some are missing between two segments."""
        whole = True
        segments = picture.segments
        first = max(bisect_right(segments, picture.position, key=lambda s: s.base) - 1, 0)
        for at in range(first, len(segments)):
            segment = segments[at]
            is_last = at + 1 == len(segments)
            limit = end if is_last else segments[at + 1].base
            begin = max(segment.base, picture.position)
            if segment.generation:
                if begin == segment.base:
                    segments[at] = self._take_compacted(picture, segment)
                begin = limit
            if begin < limit:
                for header in self._headers(segment, begin, limit):
                    self._note(picture, segment, header)
                whole = whole and (is_last or segment.end == limit)
                self._trim_indexes(segment)
            picture.position = max(picture.position, limit)
        return whole

    def _take_compacted(self, picture: _Picture, empty: Segment) -> Segment:
        """A compacted segment that no snapshot knows: all that there is of its queues up to there."""
        self._forget(empty)
        segment = self._describe(picture, empty.base, empty.generation)
        for number, span in segment.spans.items():
            queue = picture.by_number[number]
            queue.offset_end = max(queue.offset_end, span.end_offset)
            queue.event_end = max(queue.event_end, span.end_event)
        picture.leave(segment)
        return segment

    def _describe(self, picture: _Picture, base: int, generation: int) -> Segment:
        """A compacted segment, as its headers say. It holds nothing new."""
        segment = Segment(base, generation, 0, 0, sealed=True)
        segment.index = Index()
        for header in self._headers(segment, base, base + len(self._view(segment))):
            picture.queue_of(header)
            segment.note(header)
            picture.openings[base] = header.opening
        self._keep_index(segment)
        return segment

    def _note(self, picture: _Picture, segment: Segment, header: Header) -> None:
        """A block that had not been seen before."""
        picture.openings[segment.base] = header.opening
        if header.kind == KIND_CONTROL:
            segment.note(header)
            self._note_control(picture, segment, header)
            return
        queue = picture.queue_of(header)
        span = segment.spans.get(header.queue)
        is_messages = header.kind == KIND_MESSAGES
        if span is None or (is_messages and not span.count):
            queue.forget_segments()
        if not queue.event_end:
            queue.event_start = header.first_event
        queue.event_end = header.first_event + header.event_count
        if is_messages:
            if not queue.offset_end:
                queue.offset_start = header.first_offset
            queue.offset_end = header.offset_end
            queue.openings = None
        segment.note(header)
        if segment.index is not None:
            self._indexed[segment] += 1

    def _note_control(self, picture: _Picture, segment: Segment, header: Header) -> None:
        try:
            fields = read_control(self._body(segment, self._view(segment), header))
        except LogDamaged as error:
            # Only what it says is lost; a queue whose name it was is shown by its number.
            log.warning("%s", error)
            return
        if fields["op"] == "opening":
            picture.log = fields["log"]
        elif fields["op"] == "queue":
            picture.declare(fields["number"], fields["name"])

    # --- segments ------------------------------------------------------------------------------------

    def _headers(self, segment: Segment, start: int, end: int) -> Iterator[Header]:
        """The valid headers from log position `start` to `end`; what is not valid is stepped over."""
        view = self._view(segment)
        base, at = segment.base, start
        while at < end:
            header = read_header(view, at - base, at)
            if header is None or header.end > end:
                file = self._disk.open(segment.name)
                try:
                    header = find_block(file, base, at + 8, end)
                finally:
                    file.close()
                if header is None:
                    return
            yield header
            at = header.end

    def _opening(self, segment: Segment) -> int | None:
        """Which opening of the log a segment is from; None where its file has gone."""
        opening = self._now.openings.get(segment.base)
        if opening is None:
            try:
                header = next(self._headers(segment, segment.base, segment.end), None)
            except FileNotFoundError:
                return None
            if header is not None:
                opening = self._now.openings[segment.base] = header.opening
        return opening

    def _index(self, segment: Segment) -> Index:
        if segment.index is None:
            index = Index()
            for header in self._headers(segment, segment.base, segment.end):
                if header.kind != KIND_CONTROL:
                    index.note(header)
            segment.index = index
            self._keep_index(segment)
        else:
            self._indexed.move_to_end(segment)
        return segment.index

    def _keep_index(self, segment: Segment) -> None:
        index = segment.index
        self._indexed[segment] = sum(map(len, index.queues.values())) if index is not None else 0
        self._trim_indexes(segment)

    def _trim_indexes(self, segment: Segment) -> None:
        """Let go of the indexes that nobody has used for longest, but not of this one."""
        total = sum(self._indexed.values())
        for oldest in list(self._indexed):
            if total <= INDEX_ROWS_MAX or oldest is segment:
                break
            total -= self._indexed.pop(oldest)
            oldest.index = None

    def _view(self, segment: Segment) -> memoryview:
        """The mapped file of a segment."""
        name = segment.name
        view = self._maps.get(name)
        if view is not None:
            self._maps.move_to_end(name)
            return view
        fd = os.open(self._disk.where(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            empty = os.fstat(fd).st_size == 0
            view = memoryview(b"" if empty else mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
        finally:
            os.close(fd)
        self._maps[name] = view
        while len(self._maps) > self._maps_max:
            self._maps.popitem(last=False)
        return view

    def _forget(self, segment: Segment) -> None:
        segment.index = None
        self._indexed.pop(segment, None)
        self._maps.pop(segment.name, None)


def _bounds(span: Span, events: bool) -> tuple[int, int]:
    return (span.first_event, span.end_event) if events else (span.first_offset, span.end_offset)
