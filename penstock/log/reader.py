"""LogReader: the blocks of a log, read from its files by another process while a broker writes.

No lock is taken and nothing is changed. What may be seen is decided by one number, the file
`watermark`: up to that log position everything is synced, whole, and in the files. It outlives
the broker and stays the truth when none is running. A snapshot at a later position says as much,
because it is written after everything before it was synced. Where the watermark says nothing (it
is not synced itself: a power cut can take it), the reader shows what recovery would keep.

Rules that always hold:
  * Never half a block, never a byte that a power cut could take back.
  * A block is handed out after its checksum was found right. Its columns are windows on the
    mapped file, not copies.
  * What was asked for and is not there is an error that names queue and offsets. With
    `fail_on_loss=False` it is a warning in the log, and the next block that is there follows.
  * Of messages that were staged (`adoption.py`), the blocks of the stage queue are handed out, each with the
    header that it has for these messages. So one of them may have others before `lo` and behind `hi`.

The files change while they are read: see `read_view.py`. `refresh` looks at what has changed; a file
that went away since then makes the reader look again, a bounded number of times for each block.

The file is long because every way to look, by offset, by time, by bytes, shares one view of changing files.

Memory: a `Span` per segment and queue, an index of the segments that were used last, and
`maps_max` maps. For one thread.
"""

import logging
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple, NoReturn, TypeVar

from penstock.log import views
from penstock.log.adoption import adopted_header, read_adoption
from penstock.log.block import FLAG_ELSEWHERE, KIND_MESSAGES, Header, read_header
from penstock.log.disk import WATERMARK, RealDisk, Watermark
from penstock.log.errors import LogDamaged, LogError, LogRefused, QueueDeleted
from penstock.log.mapped import MappedSegments
from penstock.log.overlay import TRIES_MAX, LogChanging, replayed
from penstock.log.read_block import Block, is_about
from penstock.log.read_view import QueueView, ReadView, bounds, newest_generations
from penstock.log.repairs import STAGE_QUEUE, is_repair_queue
from penstock.log.results import EventRun
from penstock.log.segment import Segment
from penstock.log.snapshot import positions_in
from penstock.model.ids import IDENTITY_DIGITS, origin_of

MAPS_MAX = 16
T = TypeVar("T")

log = logging.getLogger("penstock.log")


class OffsetsMissing(LogError):
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


def _facts(queue: QueueView) -> ReaderQueue:
    return ReaderQueue(queue.number, queue.offset_start, queue.offset_end, queue.event_start, queue.event_end)


def _look_again() -> NoReturn:
    """Rows of the stage queue go when nobody names them any more, and the view may still have who did."""
    raise FileNotFoundError


class LogReader:
    def __init__(self, path: str, *, maps_max: int = MAPS_MAX) -> None:
        self.path = os.fspath(path)
        if not os.path.isdir(self.path):
            raise LogRefused(f"data folder {self.path!r}: there is no such folder")
        self._disk = RealDisk(self.path, read_only=True)
        self._files = MappedSegments(self.path, maps_max)
        self._watermark: Watermark | None = None
        self._scanned: tuple[object, int] | None = None
        self._origins: dict[tuple[int, int, int], bytes] = {}
        self._view = ReadView(self._files)
        self.refresh()

    def __enter__(self) -> "LogReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files; windows that were handed out stay good."""
        self._files.close()
        self._view = ReadView(self._files)
        if self._watermark is not None:
            self._watermark.close()
            self._watermark = None

    def rest(self) -> None:
        """Let go of the segments and remember what is in them, until something is asked again. A map keeps
        the room of a file that retention has removed."""
        self._files.unmap()

    # --- what there is -----------------------------------------------------------------------------

    def queues(self, *, hidden: bool = False) -> dict[str, ReaderQueue]:
        """Every queue by name, as of the last `refresh`; with those that are in no list too."""
        queues = self._view.queues.items()
        return {name: _facts(queue) for name, queue in queues if hidden or not is_repair_queue(name)}

    def queue(self, name: str) -> ReaderQueue | None:
        """One of them."""
        queue = self._view.queues.get(name)
        return _facts(queue) if queue is not None else None

    @property
    def position(self) -> int:
        """The log position up to which the last `refresh` saw the log."""
        return self._view.position

    @property
    def log(self) -> str:
        """The log's own number: what all ids in it begin with."""
        return f"{self._view.log:06x}"

    @property
    def opening(self) -> int:
        """Which opening of the log it is in; 0 where nobody can tell."""
        return self._view.opening

    def openings(self, queue: str) -> list[tuple[int, int, int]]:
        """Which opening of the log the messages came in, as far as they are in the log.

        Runs of (first offset, end, opening), in order: with it an id is made for any offset.
        """
        return self._steadily(queue, lambda known: self._view.openings(known))

    def origin(self, queue: str, opening: int) -> bytes:
        """The first digits of the ids of messages of `queue` that came in that opening."""
        return self._origin(self._known(queue).number, opening)

    def _origin(self, number: int, opening: int) -> bytes:
        key = self._view.log, number, opening
        origin = self._origins.get(key)
        if origin is None:
            origin = self._origins[key] = origin_of(*key)
        return origin

    def identity(self, queue: str) -> str:
        """What the ids of all its messages begin with."""
        return self.origin(queue, 0)[:IDENTITY_DIGITS].decode()

    def file_of(self, header: Header) -> tuple[str, int]:
        """The name of the file that has a message block, as it is `stored`, and the log position of its
        first byte.

        By its offsets: segments that earlier versions compacted may have the same positions.
        """
        queue = self._view.by_number[header.queue]
        segment = self._view.segment_at(queue, header.first_offset, events=False)
        assert segment is not None
        return segment.name, segment.base

    def _known(self, queue: str) -> QueueView:
        found = self._view.queues.get(queue)
        if found is None:
            self.refresh()
            found = self._view.queues.get(queue)
        if found is None:
            raise LogRefused(f"there is no queue {queue!r} in {self.path!r}")
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
        end = self._end_of(queue, start, end, fail_on_loss, events=False)
        return self._blocks(queue, start, end, fail_on_loss, events=False, headers_only=headers_only)

    def kept_from(self, queue: str, offset: int) -> int | None:
        """The first offset at or behind `offset` whose message is in the log; None where there is none.

        What compacting has left has gaps. They are no loss, and this steps over them.
        """
        tries, looked_again = 0, -1
        while True:
            known = self._known(queue)
            segment = self._view.segment_at(known, offset, events=False)
            if segment is None or bounds(segment.spans[known.number], False)[0] > offset:
                if looked_again != offset:
                    looked_again = offset  # as in `_blocks`
                    self.refresh()
                    continue
                if segment is None:
                    return None
            try:
                for header in self._rows(segment, known.number, offset, events=False):
                    if header.kind == KIND_MESSAGES and header.offset_end > offset:
                        return max(offset, header.first_offset)
            except FileNotFoundError:
                tries += 1
                if tries > TRIES_MAX:
                    raise self._changing() from None
                self.refresh()
                continue
            offset, tries = bounds(segment.spans[known.number], False)[1], 0

    def offset_at(self, queue: str, time_us: int, *, events: bool = False, living: bool = False) -> int:
        """The first offset (or event number) from that time on; the end of the queue where there is none.

        With `living`, also of what compacting has left, from before the log is complete.
        Times are those of blocks, and taken to grow: a clock that was set back makes this less exact.
        """
        return self._steadily(queue, lambda known: self._offset_at(known, time_us, events, living))

    def _steadily(self, queue: str, look: Callable[[QueueView], T]) -> T:
        """What is seen of a queue when no file goes away meanwhile."""
        for _ in range(TRIES_MAX):
            known = self._known(queue)
            try:
                return look(known)
            except FileNotFoundError:
                self.refresh()
        raise self._changing()

    def _offset_at(self, known: QueueView, time_us: int, events: bool, living: bool) -> int:
        segments = known.segments(self._view.segments, events)
        row = bisect_left(segments, time_us, key=lambda segment: self._begins_us(segment, known, events))
        start, end = known.extent(events)
        # The segment before the first one that begins at that time or later may reach into it.
        for segment in segments[max(row - 1, 0) :]:
            for header in self._rows(segment, known.number, -1, events):
                if header.time_us >= time_us and (events or header.kind == KIND_MESSAGES):
                    found = header.first_event if events else header.first_offset
                    return found if living else max(start, found)
        return end

    def time_at(self, queue: str, at: int, *, events: bool = False) -> int | None:
        """When the first message from an offset on (or event from a number on) came; None: there is none."""
        return self._steadily(queue, lambda known: self._time_at(known, at, events))

    def _time_at(self, known: QueueView, at: int, events: bool) -> int | None:
        number = known.number
        segments = known.segments(self._view.segments, events)
        row = bisect_right(segments, at, key=lambda it: bounds(it.spans[number], events)[1])
        for segment in segments[row:]:
            for header in self._rows(segment, number, at, events):
                if events and header.first_event + header.event_count > at:
                    return header.time_us
                if not events and header.kind == KIND_MESSAGES and header.offset_end > at:
                    return header.time_us
        return None

    def _begins_us(self, segment: Segment, known: QueueView, events: bool) -> int:
        """When the first block of a queue in a segment was written, of those that have something to show."""
        for header in self._rows(segment, known.number, -1, events):
            if events or header.kind == KIND_MESSAGES:
                return header.time_us
        return 0  # All of them are damaged by now.

    def cuts(self, queue: str, start: int, end: int, bytes_max: int, most: int) -> list[tuple[int, int]]:
        """Where to cut the messages from `start` to `end` into pieces of so many bytes of payload: the end of
        each piece, and its bytes; no more than `most` pieces, from the first on.

        Bodies are not looked at: messages of one block are taken to be of one size. A piece has a message at
        least, and what is not in the log has no bytes.
        """
        return self._steadily(
            queue, lambda known: list(islice(self._pieces(known, start, end, bytes_max), most))
        )

    def _pieces(self, known: QueueView, start: int, end: int, bytes_max: int) -> Iterator[tuple[int, int]]:
        end = min(end, known.offset_end)
        size = 0  # of what was not handed out yet
        for first, stop, payload_bytes in self._weights(known, start, end, bytes_max):
            if size and size + payload_bytes > bytes_max:
                yield first, size
                size = 0
            count = min(max(-(-payload_bytes // bytes_max), 1), stop - first)
            done = 0
            for number in range(1, count):
                before, done = done, payload_bytes * number // count
                yield first + (stop - first) * number // count, done - before
            size += payload_bytes - done
        if start < end:
            yield end, size

    def _weights(
        self, known: QueueView, start: int, end: int, bytes_max: int
    ) -> Iterator[tuple[int, int, int]]:
        """First offset, end and bytes of what the log has from `start` to `end`, in order: block by block, or
        a segment at a time where that is small enough."""
        number = known.number
        segments = known.segments(self._view.segments, events=False)
        row = bisect_right(segments, start, key=lambda segment: segment.spans[number].end_offset)
        for segment in segments[row:]:
            span = segment.spans[number]
            if span.first_offset >= end:
                return
            if start <= span.first_offset and span.end_offset <= end and span.bytes <= bytes_max:
                yield span.first_offset, span.end_offset, span.bytes
                continue
            for header in self._rows(segment, number, start, events=False):
                first, stop = max(header.first_offset, start), min(header.offset_end, end)
                if header.kind == KIND_MESSAGES and first < stop:
                    yield first, stop, header.extra * (stop - first) // header.count

    def event_blocks(
        self,
        queue: str,
        start: int,
        end: int | None = None,
        *,
        fail_on_loss: bool = True,
        about: tuple[int, int] | None = None,
    ) -> Iterator[Block]:
        """The blocks with the events from number `start` to `end`, message blocks among them.

        `lo` and `hi` count events. The body of a message block is not looked at: its header says
        all that there is to say about its events. With `about`, blocks whose headers show that they
        say nothing about the messages of that range are left out, unread.
        """
        end = self._end_of(queue, start, end, fail_on_loss, events=True)
        return self._blocks(queue, start, end, fail_on_loss, events=True, headers_only=True, about=about)

    def events(
        self, queue: str, start: int, end: int | None = None, *, fail_on_loss: bool = True
    ) -> Iterator[EventRun]:
        """The same events in runs, as `Log.events` gives them."""
        for block in self.event_blocks(queue, start, end, fail_on_loss=fail_on_loss):
            header = block.header
            first, stop = header.first_event + block.lo, header.first_event + block.hi
            if header.kind == KIND_MESSAGES:
                runs: Iterator[EventRun] = iter((views.accepted_run(header),))
            else:
                runs = views.settlement_runs(header, block.body)
            for run in runs:
                yield from views.clip(run, first, stop)

    def _end_of(self, name: str, start: int, end: int | None, fail_on_loss: bool, *, events: bool) -> int:
        """Where to stop: what was asked for, as far as it is synced."""
        queue = self._known(name)
        if end is not None and end > queue.extent(events)[1]:
            self.refresh()
            queue = self._known(name)
        _, known_end = queue.extent(events)
        if end is None:
            return known_end
        if end > known_end and start < end:
            self._missing(queue, max(start, known_end), end, events, fail_on_loss)
        return min(end, known_end)

    def _missing(self, queue: QueueView, first: int, end: int, events: bool, fail_on_loss: bool) -> None:
        """What was asked for and is not there: say so, one way or the other."""
        what = "event" if events else "offset"
        complete_from, known_end = queue.extent(events)
        if first >= known_end:
            why = f"the synced log ends before {what} {known_end}"
        elif first < complete_from:
            why = f"retention has removed what was before {what} {complete_from}; begin there"
        else:
            why = "they should be there: `penstock verify` says what has become of them"
        name = f"{what} {first} is" if end == first + 1 else f"{what}s {first} to {end - 1} are"
        text = f"queue {queue.name!r}: {name} not in the log in {self.path!r}: {why}"
        if fail_on_loss:
            raise OffsetsMissing(text, queue.name, first, end)
        log.warning("%s", text)

    def _blocks(
        self,
        name: str,
        start: int,
        end: int,
        fail_on_loss: bool,
        *,
        events: bool,
        headers_only: bool,
        about: tuple[int, int] | None = None,
    ) -> Iterator[Block]:
        at, tries, looked_again = start, 0, -1
        number = self._known(name).number
        while at < end:
            queue = self._known(name)
            if queue.number != number:
                raise QueueDeleted(name)
            segment = self._view.segment_at(queue, at, events)
            if segment is None or bounds(segment.spans[queue.number], events)[0] > at:
                if looked_again != at:
                    # A listing that is taken while names change can miss one: look before saying so.
                    looked_again = at
                    self.refresh()
                    continue
                if segment is None:
                    self._missing(queue, at, end, events, fail_on_loss)
                    return
            try:
                for header in self._rows(segment, queue.number, at, events, fail_on_loss):
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
                    if header.flags & FLAG_ELSEWHERE and not events:
                        found = self._adopted(segment, header, queue, at, end, fail_on_loss, headers_only)
                        for at, behind, block in found:
                            if block is not None:
                                at, tries = behind, 0
                                yield block
                            elif looked_again == at:
                                self._missing(queue, at, behind, events, fail_on_loss)
                                at = behind
                            else:
                                looked_again = at
                                _look_again()
                        at = stop
                        continue
                    body: memoryview | None = memoryview(b"")
                    if about is not None and not is_about(header, about):
                        body = None
                    elif not headers_only or header.kind != KIND_MESSAGES:
                        body = self._body(segment, header, name, fail_on_loss)
                    # Only now: a file that has gone with its map is asked for again, from this block on.
                    lo, at, tries = at - first, stop, 0
                    if body is not None:
                        origin = self._origin(queue.number, header.opening)
                        yield Block(header, body, origin, lo, min(end, stop) - first)
            except FileNotFoundError:
                tries += 1
                if tries > TRIES_MAX:
                    raise self._changing() from None
                self.refresh()
                continue
            span_end = min(bounds(segment.spans[queue.number], events)[1], end)
            if at < span_end:
                self._missing(queue, at, span_end, events, fail_on_loss)
                at = span_end

    def _adopted(
        self,
        segment: Segment,
        header: Header,
        queue: QueueView,
        at: int,
        end: int,
        fail_on_loss: bool,
        headers_only: bool,
    ) -> Iterator[tuple[int, int, Block | None]]:
        """The messages of an adoption block from `at` to `end`, block by block of the stage queue: the first
        offset, the one behind the last, and the block; None where the stage queue does not have it."""
        runs = self._body(segment, header, queue.name, fail_on_loss)
        if runs is None:
            return
        origin = self._origin(queue.number, header.opening)
        for first, row, row_end in read_adoption(header, runs).within(at, header.offset_end):
            if first >= end:
                return
            offset, distance = first, first - row
            behind = min(row_end + distance, end)  # of what was asked for
            for its_segment, stored in self._stage_blocks(row, behind - distance):
                start = stored.first_offset + distance
                if start > offset:
                    yield offset, start, None
                    offset = start
                stop = min(stored.offset_end, row_end) + distance
                body: memoryview | None = memoryview(b"")
                if not headers_only:
                    what = f"queue {queue.name!r}, offsets {offset} to {stop - 1}"
                    body = self._body(its_segment, stored, queue.name, fail_on_loss, what)
                if body is not None:
                    its = adopted_header(header, stored, offset, offset - distance)
                    hi = min(stop, behind) - start
                    yield offset, stop, Block(its, body, origin, offset - start, hi, stored, stop)
                offset = stop
            if offset < behind:
                yield offset, behind, None

    def _stage_blocks(self, row: int, end: int) -> Iterator[tuple[Segment, Header]]:
        """The blocks of the stage queue with rows from `row` to `end`, as far as there are any."""
        stages = self._view.queues.get(STAGE_QUEUE)
        while stages is not None and row < end:
            segment = self._view.segment_at(stages, row, events=False)
            if segment is None:
                return
            for header in self._rows(segment, stages.number, row, events=False):
                if header.kind == KIND_MESSAGES and header.offset_end > row:
                    if header.first_offset >= end:
                        return
                    row = header.offset_end
                    yield segment, header
            row = max(row, segment.spans[stages.number].end_offset)

    def _body(
        self, segment: Segment, header: Header, name: str, fail_on_loss: bool, what: str = ""
    ) -> memoryview | None:
        """The body of a block; None where it is damaged, and nobody minds."""
        try:
            return self._files.body(segment, header, name, what)
        except LogDamaged as error:
            if fail_on_loss:
                raise
            log.warning("%s", error)
            return None

    def _rows(
        self, segment: Segment, number: int, at: int, events: bool, fail_on_loss: bool = False
    ) -> Iterator[Header]:
        """The blocks of a queue in one segment, from the one that may hold `at` on."""
        entries = self._files.index(segment).of(number, segment.spans.get(number))
        if not entries:
            return  # It had some when the snapshot was written; their headers are damaged by now.
        view = self._files.view(segment)
        base, positions = segment.base, entries.positions
        first_row = bisect_right(entries.events if events else entries.floors, at) - 1
        for row in range(max(first_row, 0), len(positions)):
            position = positions[row]
            header = read_header(view, position - base, position)
            if header is not None:
                yield header
                continue
            error = LogDamaged(
                f"{self._files.where(segment)}: the block header at position {position - base} was valid "
                f"before and is not any more"
            )
            if fail_on_loss:
                raise error
            log.warning("%s", error)

    # --- following the files -----------------------------------------------------------------------

    def refresh(self) -> None:
        """Look at what has come, gone and changed since the last time."""
        for _ in range(TRIES_MAX):
            try:
                self._follow(self._synced())
            except FileNotFoundError:
                # Half of a view is none: the next try begins again.
                self._view = ReadView(self._files)
                if not os.path.isdir(self.path):
                    raise LogRefused(f"data folder {self.path!r}: there is no such folder any more") from None
                continue
            return
        raise self._changing()

    def _changing(self) -> LogChanging:
        return LogChanging(
            f"data folder {self.path!r}: its files were replaced {TRIES_MAX} times while they were opened; "
            f"try again"
        )

    def _synced(self) -> int:
        """The log position before which everything may be shown, as far as the watermark says."""
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
            facts = os.stat(self._disk.where(name))
            seen.append((name, facts.st_size, facts.st_mtime_ns))
        if self._scanned is None or self._scanned[0] != seen:
            self._scanned = seen, replayed(self.path)[1]
        return self._scanned[1]

    def _follow(self, synced: int) -> None:
        # The names are taken after the watermark: every segment before it has its name by then.
        names = self._disk.names()
        end = max([synced, *positions_in(names)])
        if not self._view.follow(newest_generations(names), end):
            self._files.close()
            view = ReadView(self._files)
            view.begin(self._disk, names, end)
            self._view = view
