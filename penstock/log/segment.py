"""Segment: one file of the log, what is in it, and where its blocks are.

A segment is named by the log position of its first byte. The last one is written to, the others are sealed. A
sealed segment may be replaced by a compacted one, with a higher generation in its name, which holds only
messages that are still alive.

Memory: per queue one `Span`; per block an index entry of 32 bytes. An index is never stored: walking the
headers of a segment makes it again.
"""

import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise

from penstock.log.adoption import Adoption
from penstock.log.block import KIND_CONTROL, KIND_MESSAGES, KIND_SETTLEMENTS, Header
from penstock.log.disk import File

_NAME = re.compile(r"(\d{20})(?:\.(\d+))?\.seg")
NAMES_MAX = 1000
"""Ranges of stage rows that are known of a segment. Where it has more, the smallest gaps count as named."""


def segment_name(base: int, generation: int) -> str:
    return f"{base:020d}.{generation}.seg" if generation else f"{base:020d}.seg"


def parse_segment_name(name: str) -> tuple[int, int] | None:
    """Base and generation, or None where the file is no segment."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


class Span:
    """What one segment holds of one queue. Ends are exclusive; bytes are payload."""

    __slots__ = (
        "bytes",
        "count",
        "end_event",
        "end_offset",
        "first_event",
        "first_offset",
        "position",
        "settled_at",
    )

    def __init__(
        self,
        first_offset: int,
        end_offset: int,
        count: int,
        first_event: int,
        end_event: int,
        payload_bytes: int,
        position: int = -1,
    ) -> None:
        self.first_offset = first_offset
        self.end_offset = end_offset
        self.count = count  # messages; fewer than the offsets in a compacted segment, 0: settlements only
        self.first_event = first_event
        self.end_event = end_event
        self.bytes = payload_bytes
        self.position = position  # of its only block of messages, or its only block, where no index has it
        self.settled_at = -1  # where the settlements behind that are, if they are one block

    def facts(self) -> tuple[int, int, int, int, int, int]:
        """What it is made from."""
        return (
            self.first_offset,
            self.end_offset,
            self.count,
            self.first_event,
            self.end_event,
            self.bytes,
        )


def merged(ranges: Iterable[tuple[int, int]], most: int = sys.maxsize) -> list[tuple[int, int]]:
    """Ranges in order, one for those that touch; with no more than so many, by closing the smallest gaps."""
    joined: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((first, end))
    if len(joined) <= most:
        return joined
    gaps = [(after[0] - before[1], at) for at, (before, after) in enumerate(pairwise(joined), 1)]
    kept = sorted(at for _, at in sorted(gaps, reverse=True)[: most - 1])
    return [(joined[a][0], joined[b - 1][1]) for a, b in pairwise([0, *kept, len(joined)])]


class Entries:
    """The blocks of one queue in one segment: a row each."""

    __slots__ = ("_bytes_end", "_offset_end", "bytes_before", "events", "floors", "positions")

    def __init__(self) -> None:
        self.floors = array("q")  # see Index
        self.events = array("q")  # number of the first event
        self.positions = array("q")
        self.bytes_before = array("q")  # payload of the queue in the blocks before, in this segment
        self._offset_end, self._bytes_end = -1, 0  # behind the last messages

    def __len__(self) -> int:
        return len(self.floors)

    def note(self, kind: int, first: int, end: int, event: int, position: int, payload_bytes: int) -> None:
        self.bytes_before.append(self._bytes_end)
        if kind == KIND_MESSAGES:
            self.floors.append(first)
            self._offset_end = end
            self._bytes_end += payload_bytes
        else:
            self.floors.append(self._offset_end)
        self.events.append(event)
        self.positions.append(position)

    def at(self, offset: int) -> int:
        """The row of the message block that may hold `offset`; -1 where none can."""
        return bisect_right(self.floors, offset) - 1


NO_ENTRIES = Entries()


class Index:
    """Where the blocks of each queue are in one segment.

    A floor is an offset: of a message block its first one, of a settlement block the end of the
    messages before it. So the last floor at or below an offset belongs to the message block that
    holds that offset. Of a segment that is written to, the only block of a queue is not here, nor is its only
    block of messages with one of settlements behind it: its span says where they are. There may be a hundred
    thousand of such queues, and their entries would take 0.5 KB each.
    """

    __slots__ = ("_queues", "holes", "rows")

    def __init__(self) -> None:
        self._queues: dict[int, Entries] = {}
        self.holes: list[int] = []  # log positions of damaged bytes, where a block should begin
        self.rows = 0

    def note(self, header: Header, span: Span | None = None) -> None:
        """One more block, behind those of a `span`."""
        self.rows += 1
        entries = self._queues.get(header.queue)
        if entries is None:
            entries = self.of(header.queue, span)
            entries = self._queues[header.queue] = entries if len(entries) else Entries()
        first, end = header.first_offset, header.offset_end
        entries.note(header.kind, first, end, header.first_event, header.position, header.extra)

    def is_told_by(self, span: Span, header: Header) -> bool:
        """Whether a span can say where this block is: the settlements behind its only messages."""
        if span.position < 0 or span.settled_at >= 0 or not span.count or header.kind == KIND_MESSAGES:
            return False
        return header.queue not in self._queues and header.first_event == span.first_event + span.count

    def of(self, queue: int, span: Span | None = None) -> Entries:
        """The blocks of a queue; none where all of them are damaged."""
        found = self._queues.get(queue)
        if found is None and span is not None and span.position >= 0:
            found = Entries()
            kind = KIND_MESSAGES if span.count else KIND_SETTLEMENTS
            found.note(kind, span.first_offset, span.end_offset, span.first_event, span.position, span.bytes)
            if span.settled_at >= 0:
                found.note(KIND_SETTLEMENTS, 0, 0, span.first_event + span.count, span.settled_at, 0)
        return found if found is not None else NO_ENTRIES


class Segment:
    """One file of the log."""

    __slots__ = (
        "adopted",
        "base",
        "created",
        "dropped",
        "file",
        "generation",
        "image",
        "index",
        "limit",
        "names",
        "sealed",
        "size",
        "spans",
        "spare",
        "time_max_us",
    )

    def __init__(self, base: int, generation: int, size: int, limit: int, sealed: bool) -> None:
        self.base = base
        self.generation = generation
        self.size = size  # bytes in use
        self.limit = limit  # bytes that may be used before the next segment begins
        self.sealed = sealed
        self.spans: dict[int, Span] = {}
        # Messages whose columns are elsewhere: where, in rows of the stage queue; and by queue how many, and
        # of how many bytes. The names are never changed in place, a snapshot may be about to write them.
        self.names: list[tuple[int, int]] = []
        self.adopted: dict[int, tuple[int, int]] = {}
        self.dropped = 0  # events of queues that were deleted, which are in no span any more
        self.time_max_us = 0
        # What a snapshot says of it, once it is sealed and that was needed; and of which spans that is.
        self.image: tuple[dict[int, Span] | None, bytes] = None, b""
        self.index: Index | None = None
        self.file: File | None = None  # for reading
        self.spare = ""  # the file that lies ready to become this one
        self.created = sealed  # the file is there under its name

    @property
    def name(self) -> str:
        return segment_name(self.base, self.generation)

    @property
    def end(self) -> int:
        """The log position behind its last block."""
        return self.base + self.size

    def note(self, header: Header) -> None:
        """A block has been put at the end."""
        self.size = header.end - self.base
        self.time_max_us = max(self.time_max_us, header.time_us)
        if header.kind == KIND_CONTROL:
            return
        span = self.spans.get(header.queue)
        is_messages = header.kind == KIND_MESSAGES
        event_end = header.first_event + header.event_count
        if span is None:
            position = header.position if self.index is not None else -1
            if is_messages:
                span = Span(
                    header.first_offset,
                    header.offset_end,
                    header.count,
                    header.first_event,
                    event_end,
                    header.extra,
                    position,
                )
            else:
                span = Span(0, 0, 0, header.first_event, event_end, 0, position)
            self.spans[header.queue] = span
        else:
            index = self.index
            if index is not None and index.is_told_by(span, header):
                span.settled_at = header.position
            else:
                if index is not None:
                    index.note(header, span)
                span.position = -1
            span.end_event = event_end
            if is_messages:
                if not span.count:
                    span.first_offset = header.first_offset
                span.end_offset = header.offset_end
                span.count += header.count
                span.bytes += header.extra

    def adopt(self, adoption: Adoption) -> None:
        """The block that has been put at the end has messages whose columns are elsewhere."""
        header = adoption.header
        named = [(run.row, run.row + run.length) for run in adoption.runs]
        if len(named) > 10 * NAMES_MAX:  # To look for the smallest gaps among them would take too long.
            named = [(min(named)[0], max(end for _, end in named))]
        self.names = merged([*self.names, *named], NAMES_MAX)
        count, size = self.adopted.get(header.queue, (0, 0))
        self.adopted[header.queue] = count + header.count, size + header.extra

    def names_itself(self, stage_queue: int) -> bool:
        """Whether rows of stages that its messages are made of are in this very segment."""
        span = self.spans.get(stage_queue)
        return span is not None and any(a < span.end_offset and span.first_offset < b for a, b in self.names)

    def drop(self, numbers: set[int], *, in_place: bool = False) -> None:
        """What is here of these queues is of no use to anybody any more."""
        if not numbers:
            return
        if not in_place:  # A snapshot may be about to write them.
            self.spans = self.spans.copy()
        for number in numbers:
            span = self.spans.pop(number)
            self.dropped += span.end_event - span.first_event
        # Rows that they name are kept until this is compacted, and so they count: as of no queue.
        counts: dict[int, tuple[int, int]] = {}
        for number, (count, size) in self.adopted.items():
            of = 0 if number in numbers else number
            before = counts.get(of, (0, 0))
            counts[of] = before[0] + count, before[1] + size
        self.adopted = counts
