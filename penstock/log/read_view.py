"""ReadView: what another process has found in the files of a log, up to one position.

The first view comes from the newest snapshot, so that only the blocks behind it are walked;
after that `follow` takes in what is new. Segments come, go, and are replaced by compacted ones;
where more has happened than a view can follow it says so, and the reader takes a new one.

Rules that always hold:
  * A view has seen every block before its `position` that is still there, each once.
  * A queue is complete from its starts on. What retention removes or compacts moves them.
  * A FileNotFoundError may leave half a view: throw it away.
"""

import logging
from bisect import bisect_right
from typing import Any

from penstock.log.block import KIND_CONTROL, KIND_MESSAGES, Header, read_control
from penstock.log.disk import Disk
from penstock.log.errors import LogDamaged, LogNewer
from penstock.log.mapped import MappedSegments
from penstock.log.repairs import STAGE_QUEUE, repair_queue_of
from penstock.log.segment import Index, Segment, Span, parse_segment_name
from penstock.log.snapshot import positions_in, read_snapshot
from penstock.log.state import FORMAT_LAST, lost_name

log = logging.getLogger("penstock.log")


def newest_generations(names: list[str]) -> dict[int, int]:
    """Base and newest generation of the segments among some file names, in order."""
    newest: dict[int, int] = {}
    for name in names:
        parsed = parse_segment_name(name)
        if parsed is not None:
            newest[parsed[0]] = max(parsed[1], newest.get(parsed[0], 0))
    return dict(sorted(newest.items()))


def bounds(span: Span, events: bool) -> tuple[int, int]:
    """The first event and the end of the events of a span; or its offsets."""
    return (span.first_event, span.end_event) if events else (span.first_offset, span.end_offset)


class QueueView:
    """What a view knows of one queue. Ends are exclusive, and synced."""

    __slots__ = (
        "_with_events",
        "_with_messages",
        "event_end",
        "event_start",
        "name",
        "number",
        "offset_end",
        "offset_start",
    )

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.offset_start = self.offset_end = 0
        self.event_start = self.event_end = 0
        self.forget_segments()

    def extent(self, events: bool) -> tuple[int, int]:
        """From where on it is complete, in events or offsets, and where it ends."""
        return (self.event_start, self.event_end) if events else (self.offset_start, self.offset_end)

    def forget_segments(self) -> None:
        """Which segments hold something of this queue has changed."""
        self._with_events: list[Segment] | None = None
        self._with_messages: list[Segment] | None = None

    def segments(self, every: list[Segment], events: bool) -> list[Segment]:
        """Those of `every` segment that hold messages (or events) of this queue, in order."""
        number = self.number
        if self._with_events is None or self._with_messages is None:
            self._with_events = [s for s in every if number in s.spans]
            self._with_messages = [s for s in self._with_events if s.spans[number].count]
        return self._with_events if events else self._with_messages

    def move_starts(self, span: Span) -> None:
        self.offset_start = max(self.offset_start, span.end_offset)
        self.event_start = max(self.event_start, span.end_event)
        self.forget_segments()


class ReadView:
    def __init__(self, files: MappedSegments) -> None:
        self._files = files
        self._openings: dict[int, int] = {}  # by base: all blocks of a segment have the same
        self.log = 0  # the log's own number, for ids
        self.position = 0  # up to here the log was walked
        self.segments: list[Segment] = []
        self.queues: dict[str, QueueView] = {}
        self.by_number: dict[int, QueueView] = {}

    # --- looking -----------------------------------------------------------------------------------

    def segment_at(self, queue: QueueView, at: int, events: bool) -> Segment | None:
        """The first segment that has something of a queue at or behind `at`."""
        number = queue.number
        segments = queue.segments(self.segments, events)
        row = bisect_right(segments, at, key=lambda segment: bounds(segment.spans[number], events)[1])
        return segments[row] if row < len(segments) else None

    def openings(self, queue: QueueView) -> list[tuple[int, int, int]]:
        """Runs of (first offset, end, opening), in order, as far as messages are in the log."""
        runs: list[tuple[int, int, int]] = []
        for segment in queue.segments(self.segments, events=False):
            span = segment.spans[queue.number]
            opening = self._opening(segment)
            if opening is None:
                continue
            if runs and runs[-1][1:] == (span.first_offset, opening):
                runs[-1] = runs[-1][0], span.end_offset, opening
            else:
                runs.append((span.first_offset, span.end_offset, opening))
        return runs

    @property
    def opening(self) -> int:
        """The latest one; 0 where nobody can tell."""
        return (self._opening(self.segments[-1]) if self.segments else None) or 0

    def _opening(self, segment: Segment) -> int | None:
        """Which opening of the log a segment is from; None where no header in it is readable."""
        opening = self._openings.get(segment.base)
        if opening is None:
            header = next(self._files.headers(segment, segment.base, segment.end), None)
            if header is not None:
                opening = self._openings[segment.base] = header.opening
        return opening

    # --- the first time ----------------------------------------------------------------------------

    def begin(self, disk: Disk, names: list[str], end: int) -> None:
        """What the newest readable snapshot says, and the blocks after it, up to `end`, where none is behind.

        Of what was there when the `names` were taken: later snapshots may have replaced all of these.
        """
        on_disk = newest_generations(names)
        for position in positions_in(names):
            try:
                meta, _ = read_snapshot(disk, position)
            except LogDamaged as error:
                log.warning("%s; an older one is used", error)
                continue
            self._fill(meta, on_disk)
            self.position = position
            break
        known = {segment.base for segment in self.segments}
        for base, generation in on_disk.items():
            if self.position <= base < end and base not in known:
                self._add(base, generation)
        self._walk(end)

    def _fill(self, meta: dict[str, Any], on_disk: dict[int, int]) -> None:
        """What a snapshot says, corrected by what has happened to the segments since."""
        self.log = meta["log"]
        for entry in meta["queues"]:
            queue = self._declare(entry["number"], entry["name"])
            queue.offset_start, queue.offset_end = entry.get("offset_start", 0), entry["tail"]
            queue.event_start, queue.event_end = entry.get("event_start", 0), entry["next_event"]
        for base, generation, size, _, spans in meta["segments"]:
            segment = Segment(base, generation, size, size, sealed=True)
            segment.spans = {number: Span(*span) for number, *span in spans}
            there = on_disk.get(base)
            if there != generation:
                self._leave(segment)
                if there is None:
                    continue
                segment = self._describe(base, there)
            self.segments.append(segment)

    def _declare(self, number: int, name: str) -> QueueView:
        queue = self.by_number.get(number)
        other = self.queues.get(name)
        if other is not None and other is not queue:
            # As in recovery: it has this name because its own is lost.
            del self.queues[name]
            other.name = lost_name(other.number, (*self.queues, name))
            self.queues[other.name] = other
            payloads = self.queues.pop(repair_queue_of(name), None)
            if payloads is not None:
                payloads.name = repair_queue_of(other.name)
                self.queues[payloads.name] = payloads
        if queue is None:
            queue = self.by_number[number] = QueueView(number, name)
        else:
            del self.queues[queue.name]
            queue.name = name
        self.queues[name] = queue
        return queue

    def _queue_of(self, header: Header) -> QueueView:
        # Without its declaration the queue has the name that recovery would give it.
        return self.by_number.get(header.queue) or self._declare(
            header.queue, lost_name(header.queue, self.queues)
        )

    def _leave(self, segment: Segment) -> None:
        """A segment is gone, or compacted: its queues are complete only behind it."""
        for number, span in segment.spans.items():
            queue = self.by_number.get(number)
            if queue is not None:  # it may have been deleted
                queue.move_starts(span)

    def _describe(self, base: int, generation: int, *, anew: bool = False) -> Segment:
        """A compacted segment, as its headers say. Only where it is seen `anew` it has queues to be named."""
        segment = Segment(base, generation, 0, 0, sealed=True)
        segment.index = Index()
        for header in self._files.headers(segment, base, base + len(self._files.view(segment))):
            if anew:
                self._queue_of(header)
            segment.note(header)
            self._openings[base] = header.opening
        self._files.used(segment)
        return segment

    # --- after that --------------------------------------------------------------------------------

    def follow(self, on_disk: dict[int, int], end: int) -> bool:
        """Take in what is new before `end`. False: too much has happened, take a new view."""
        return self._keep_up(on_disk, end) and self._walk(end)

    def _keep_up(self, on_disk: dict[int, int], end: int) -> bool:
        """Segments that came, went or were compacted."""
        if not self.segments or end < self.position:
            return False
        last = self.segments[-1]
        if on_disk.get(last.base) != last.generation:
            # It was not walked to its end, so nobody knows what has gone with it.
            return False
        known = set()
        for at, segment in reversed(list(enumerate(self.segments))):
            known.add(segment.base)
            generation = on_disk.get(segment.base)
            if generation == segment.generation:
                continue
            there = [self._describe(segment.base, generation)] if generation else []
            self.segments[at : at + 1] = there
            self._leave(segment)
            self._files.forget(segment)
        for base, generation in on_disk.items():
            if base < end and base not in known:
                if generation or base < self.position:
                    return False
                self._add(base, generation)
        return True

    def _add(self, base: int, generation: int) -> None:
        segment = Segment(base, generation, 0, 0, sealed=False)
        segment.index = Index()
        self.segments.append(segment)

    def _walk(self, end: int) -> bool:
        """Take in the blocks up to `end`. False where they do not go on where the view ends."""
        whole = True
        segments = self.segments
        first = max(bisect_right(segments, self.position, key=lambda s: s.base) - 1, 0)
        for at in range(first, len(segments)):
            segment = segments[at]
            is_last = at + 1 == len(segments)
            limit = end if is_last else segments[at + 1].base
            start = max(segment.base, self.position)
            if segment.generation:
                if start == segment.base:
                    segments[at] = self._take_compacted(segment)
            elif start < limit:
                for header in self._files.headers(segment, start, limit):
                    whole = self._note(segment, header) and whole
                self._files.used(segment)
                whole = whole and (is_last or segment.end == limit)
            self.position = max(self.position, limit)
        return whole

    def _take_compacted(self, empty: Segment) -> Segment:
        """A compacted segment that no snapshot knows: all that there is of its queues up to there."""
        segment = self._describe(empty.base, empty.generation, anew=True)
        for number, span in segment.spans.items():
            queue = self.by_number[number]
            queue.offset_end = max(queue.offset_end, span.end_offset)
            queue.event_end = max(queue.event_end, span.end_event)
        self._leave(segment)
        return segment

    def _note(self, segment: Segment, header: Header) -> bool:
        """A block that had not been seen before. False where it gives offsets or numbers once more."""
        self._openings[segment.base] = header.opening
        if header.kind == KIND_CONTROL:
            segment.note(header)
            self._note_control(segment, header)
            return True
        queue = self._queue_of(header)
        span = segment.spans.get(header.queue)
        is_messages = header.kind == KIND_MESSAGES
        if span is None or (is_messages and not span.count):
            queue.forget_segments()
        goes_on = header.first_event >= queue.event_end
        if not queue.event_end:
            queue.event_start = header.first_event
        queue.event_end = header.first_event + header.event_count
        if is_messages:
            goes_on = goes_on and header.first_offset >= queue.offset_end
            if not queue.offset_end:
                queue.offset_start = header.first_offset
            queue.offset_end = header.offset_end
        segment.note(header)
        return goes_on

    def _note_control(self, segment: Segment, header: Header) -> None:
        try:
            fields = read_control(self._files.body(segment, header, ""))
        except LogDamaged as error:
            # Only what it says is lost; a queue whose name it was is shown by its number.
            log.warning("%s", error)
            return
        if fields["op"] == "opening":
            self.log = fields["log"]
        elif fields["op"] == "queue":
            self._declare(fields["number"], fields["name"])
        elif fields["op"] == "format" and fields["format"] > FORMAT_LAST:
            where = self._files.where(segment)
            raise LogNewer(f"{where}: the log has format {fields['format']}")
        elif fields["op"] in ("stage", "format") and fields["queue"] and STAGE_QUEUE not in self.queues:
            self._declare(fields["queue"], STAGE_QUEUE)  # The block that did so is damaged, or not there.
        elif fields["op"] == "delete":
            for number in fields["numbers"]:
                self._delete(number)

    def _delete(self, number: int) -> None:
        queue = self.by_number.get(number)
        for it in (queue, self.queues.get(repair_queue_of(queue.name))) if queue is not None else ():
            if it is not None:
                del self.by_number[it.number], self.queues[it.name]
