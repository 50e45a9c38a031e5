"""Segments: the files of the log (`segment.py`), which there are, and how to find a block in them.

Memory: what `segment.py` says of each, with an index for the segment that is written to and the few that
were read last; and `cache_bytes` of blocks, the newest first of all, and more only while they are not in the
files.

What is remembered of a segment is filed under the segment itself, never under a position alone: earlier
versions could compact a segment into a longer one, whose positions are those of the next one too.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from penstock.log.adoption import Adoption, adopted, read_adoption
from penstock.log.block import (
    FLAG_ELSEWHERE,
    HEADER_BYTES,
    KIND_CONTROL,
    KIND_MESSAGES,
    Header,
    Messages,
    read_header,
    read_messages,
)
from penstock.log.disk import Disk, File, is_full
from penstock.log.errors import LogDamaged
from penstock.log.scan import find_headers, read_body
from penstock.log.segment import Entries, Index, Segment
from penstock.model.ids import OFFSET_MAX

INDEXES_MAX = 8
FILES_MAX = 64
ADOPTIONS_MAX = 16
BLOCK_BYTES = 1024
"""What a block takes in memory beside its body: objects, an entry, a key."""


class Segments:
    """All segments of a log, in order of position, and the blocks read from them."""

    def __init__(self, disk: Disk, cache_bytes: int) -> None:
        self._disk = disk
        self._cache_bytes_max = cache_bytes
        self._cache: OrderedDict[tuple[Segment, int], Messages] = OrderedDict()  # with its log position
        self._cached_bytes = 0
        # The same of adoption blocks, which are small; those that are not in a file yet, and some that were
        # asked for.
        self._adoptions: OrderedDict[tuple[Segment, int], Adoption] = OrderedDict()
        self.stage_queue = 0  # the number of the queue that has the rows of stages
        self._indexed: OrderedDict[Segment, None] = OrderedDict()
        self._opened: OrderedDict[Segment, None] = OrderedDict()
        self.all: list[Segment] = []
        self._holding: dict[int, list[Segment]] = {}  # lists never change: many queues have the same
        self._alone: list[Segment] = []  # the last of them with one segment
        self._written = 0
        self.replaced = 0  # how often a segment has gone or been replaced

    # --- which segments there are --------------------------------------------------------------

    def add(self, segment: Segment) -> None:
        """A segment behind all others."""
        self.all.append(segment)
        for queue, span in segment.spans.items():
            if span.count:
                self._hold(queue, segment)

    def _hold(self, queue: int, segment: Segment) -> None:
        if not self._alone or self._alone[0] is not segment:
            self._alone = [segment]
        held = self._holding.get(queue)
        self._holding[queue] = self._alone if held is None else [*held, segment]

    @staticmethod
    def _place(held: list[Segment], queue: int, offset: int) -> int:
        """Which of the segments that hold a queue may have an offset; -1: none."""
        return bisect_right(held, offset, key=lambda segment: segment.spans[queue].first_offset) - 1

    def replace(self, old: Segment, new: Segment | None) -> None:
        """A sealed segment is gone, or a compacted one has taken its place."""
        self.replaced += 1
        self.forget(old)
        at = self.all.index(old)
        self.all[at : at + 1] = [new] if new is not None else []
        # A new one may know more than the old one: recovery describes segments that it has not read yet.
        for queue in {*old.spans, *(new.spans if new is not None else ())}:
            kept = [s for s in self.holding(queue) if s is not old]
            if new is not None and queue in new.spans and new.spans[queue].count:
                kept.append(new)
                kept.sort(key=lambda s: s.base)
            if kept:
                self._holding[queue] = kept
            else:
                self._holding.pop(queue, None)

    def drop(self, numbers: Collection[int]) -> None:
        """These queues are no more."""
        for number in numbers:
            self._holding.pop(number, None)
        for segment in self.all:
            # Of the last one, snapshots have no spans: they are told with their queues.
            in_place = segment is self.all[-1]
            segment.drop({number for number in numbers if number in segment.spans}, in_place=in_place)

    def forget(self, segment: Segment) -> None:
        """Let go of everything that was read from a segment."""
        for key in [key for key in self._cache if key[0] is segment]:
            self._uncache(key)
        for key in [key for key in self._adoptions if key[0] is segment]:
            del self._adoptions[key]
        segment.index = None
        self._indexed.pop(segment, None)
        self._opened.pop(segment, None)
        if segment.file is not None:
            segment.file.close()
            segment.file = None

    def put(self, segment: Segment, header: Header) -> None:
        """A block has been added to the segment that is written to."""
        segment.note(header)
        if header.kind == KIND_MESSAGES:
            held = self._holding.get(header.queue)
            if held is None or held[-1] is not segment:
                self._hold(header.queue, segment)

    # --- reading ---------------------------------------------------------------------------------

    def file_of(self, segment: Segment) -> File:
        if segment.file is None:
            try:
                try:
                    segment.file = self._disk.open(segment.name)
                except OSError as error:
                    if not is_full(error):
                        raise
                    self._close_files(0)  # Too many are open: these can be opened again.
                    segment.file = self._disk.open(segment.name)
            except FileNotFoundError as error:
                raise LogDamaged(f"{self._disk.where(segment.name)} is missing") from error
            self._opened[segment] = None
            self._close_files(FILES_MAX)
        return segment.file

    def _close_files(self, most: int) -> None:
        """Have no more than so many open; those that were opened first are closed."""
        while len(self._opened) > most:
            oldest, _ = self._opened.popitem(last=False)
            if oldest.file is not None:
                oldest.file.close()
                oldest.file = None

    def index_of(self, segment: Segment) -> Index:
        if segment.index is None:
            index = Index()
            at = segment.base
            for header in self.headers(segment):
                if header.position != at:
                    index.holes.append(at)
                at = header.end
                if header.kind != KIND_CONTROL:
                    index.note(header)
            if at != segment.end:
                index.holes.append(at)
            segment.index = index
            if segment.sealed:
                self._forget_indexes()
                self._indexed[segment] = None
        elif segment.sealed and segment in self._indexed:
            self._indexed.move_to_end(segment)
        return segment.index

    def entries_of(self, segment: Segment, queue: int) -> Entries:
        """The blocks of a queue in a segment; none where all of them are damaged."""
        return self.index_of(segment).of(queue, segment.spans.get(queue))

    def _forget_indexes(self) -> None:
        """Make room for one more. An index is kept while some of its blocks are not in the file."""
        for oldest in list(self._indexed):
            if len(self._indexed) < INDEXES_MAX:
                return
            if oldest.end <= self.written:
                del self._indexed[oldest]
                oldest.index = None

    def headers(self, segment: Segment) -> Iterator[Header]:
        """Every header of a segment. A damaged one is stepped over; its messages are not found."""
        return find_headers(self.file_of(segment), segment.base, segment.base, segment.end)

    def sealed(self, segment: Segment) -> None:
        """Nothing more is written to it: its index may be forgotten like any other."""
        segment.sealed = True
        if segment.index is not None:
            self._forget_indexes()
            self._indexed[segment] = None

    def holding(self, queue: int) -> list[Segment]:
        """The segments with messages of that queue, in order."""
        return self._holding.get(queue) or []

    def holding_from(self, queue: int, offset: int) -> list[Segment]:
        """The same from the one on that may hold `offset`."""
        held = self.holding(queue)
        return held[max(self._place(held, queue, offset), 0) :]

    def block_at(self, queue: int, offset: int) -> Messages | None:
        """The block with that message, or None where the log does not have it (any more)."""
        held = self._holding.get(queue)
        if held is None:
            return None
        at = self._place(held, queue, offset)
        if at < 0:
            return None
        segment = held[at]
        entries = self.entries_of(segment, queue)
        row = entries.at(offset)
        if row < 0:
            return None
        block = self.load(segment, entries.positions[row], offset)
        return block if block is not None and offset < block.header.offset_end else None

    def missing(self, queue: int, offset: int) -> tuple[Segment | None, int, int]:
        """Where a message that cannot be read should be: segment, log position, and the end of the
        offsets that are missing with it."""
        held = self.holding(queue)
        at = self._place(held, queue, offset)
        others = held[at + 1].spans[queue].first_offset if at + 1 < len(held) else OFFSET_MAX + 1
        if at < 0:
            return None, 0, others
        segment = held[at]
        end = segment.spans[queue].end_offset
        if end <= offset:
            end = others
        try:
            entries = self.entries_of(segment, queue)
            row = entries.at(offset)
            if row + 1 < len(entries):
                end = entries.floors[row + 1]
            position = self._where(segment, entries, row, offset)
        except LogDamaged:  # not even a header can be read any more
            return segment, segment.base, end
        return self._missing_elsewhere(segment, position, offset, end) or (segment, position, end)

    def _missing_elsewhere(
        self, segment: Segment, position: int, offset: int, end: int
    ) -> tuple[Segment | None, int, int] | None:
        """The same for a message whose columns are elsewhere; None where they are not, or nobody can tell."""
        try:
            adoption = self._find(segment, position)
        except LogDamaged:
            return None
        if not isinstance(adoption, Adoption) or offset >= adoption.header.offset_end:
            return None
        row, rows_end = adoption.row_at(offset)
        found, position, missing_end = self.missing(self.stage_queue, row)
        return found, position, min(end, offset + min(missing_end, rows_end) - row)

    def _where(self, segment: Segment, entries: Entries, row: int, offset: int) -> int:
        """The position of the block that should hold `offset`: in `row`, or in a hole behind it."""
        while row >= 0:
            header = self.header_at(segment, entries.positions[row])
            if header.kind == KIND_MESSAGES:
                break
            row -= 1
        else:
            return next(iter(self.index_of(segment).holes), segment.base)
        if offset < header.offset_end:
            return header.position
        return next((hole for hole in self.index_of(segment).holes if hole >= header.end), header.end)

    def load(self, segment: Segment, position: int, offset: int) -> Messages | None:
        """The message block at a log position; None where another kind of block stands there.

        Where the columns of its messages are elsewhere, those around `offset` that are together there.
        """
        block = self._cache.get((segment, position))
        if block is not None:
            return block
        found = self._find(segment, position)
        return self._adopted(found, offset) if isinstance(found, Adoption) else found

    def _find(self, segment: Segment, position: int) -> Messages | Adoption | None:
        """A block with messages, or that says where they are; None where another kind of block stands."""
        found = self._cache.get((segment, position)) or self._adoptions.get((segment, position))
        if found is not None:
            return found
        header = self.header_at(segment, position)
        if header.kind != KIND_MESSAGES:
            return None
        where = self._disk.where(segment.name)
        body = read_body(self.file_of(segment), segment.base, header, where)
        if not header.flags & FLAG_ELSEWHERE:
            block = read_messages(header, body)
            self.cache(segment, block)
            while self._cached_bytes > self._cache_bytes_max:
                # The oldest are not in the files: while a disk is full, for as long as that takes.
                oldest = self._oldest_in_files(self._cache)
                if oldest is None or oldest == (segment, position):
                    break
                self._uncache(oldest)
            return block
        adoption = read_adoption(header, body)
        self.keep(segment, adoption)
        if len(self._adoptions) > ADOPTIONS_MAX and (oldest := self._oldest_in_files(self._adoptions)):
            del self._adoptions[oldest]
        return adoption

    def _adopted(self, adoption: Adoption, offset: int) -> Messages | None:
        header = adoption.header
        if not header.first_offset <= offset < header.offset_end:
            return None
        last = adoption.last
        if last is None or not last.header.first_offset <= offset < last.header.offset_end:
            row, _ = adoption.row_at(offset)
            stage = self.block_at(self.stage_queue, row)
            if stage is None:
                raise LogDamaged(f"it was staged, and row {row} of the stages is not in the log")
            last = adoption.last = adopted(adoption, stage, offset)
        return last

    def adopters(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Whose messages some rows of the stage queue are: (queue, first offset, end). Walks segments."""
        for segment in self.all:
            if not any(a < end and first < b for a, b in segment.names):
                continue
            for adoption in self._adoptions_in(segment):
                for start, run in zip(adoption.ends, adoption.runs, strict=False):
                    lo, hi = max(first, run.row), min(end, run.row + run.length)
                    if lo < hi:
                        yield adoption.header.queue, start + lo - run.row, start + hi - run.row

    def _adoptions_in(self, segment: Segment) -> Iterator[Adoption]:
        """Those that can be read. Of others nothing is known but the offsets, and that is told elsewhere."""
        # What was committed a moment ago is not in the file yet, which need not even be there.
        positions = {at for of, at in self._adoptions if of is segment}
        with suppress(LogDamaged):
            for header in self.headers(segment):
                if header.kind == KIND_MESSAGES and header.flags & FLAG_ELSEWHERE:
                    positions.add(header.position)
        for position in sorted(positions):
            with suppress(LogDamaged):
                found = self._find(segment, position)
                assert isinstance(found, Adoption)
                yield found

    def rows_between(self, segment: Segment, start: int, end: int) -> tuple[int, int]:
        """The rows of stages that stand between two log positions, perhaps in blocks that are damaged."""
        span = segment.spans.get(self.stage_queue)
        if span is None or start == end:
            return 0, 0
        its = [
            it for it in self.headers(segment) if it.queue == self.stage_queue and it.kind == KIND_MESSAGES
        ]
        first = max((it.offset_end for it in its if it.position < start), default=span.first_offset)
        return first, min((it.first_offset for it in its if it.position >= end), default=span.end_offset)

    def header_at(self, segment: Segment, position: int) -> Header:
        block = self._cache.get((segment, position)) or self._adoptions.get((segment, position))
        if block is not None:
            return block.header
        data = self.file_of(segment).read(position - segment.base, HEADER_BYTES)
        header = read_header(data, 0, position)
        if header is None:
            raise LogDamaged(
                f"{self._disk.where(segment.name)}: no valid block header at {position - segment.base}"
            )
        return header

    def bytes_of(self, queue: int, runs: Iterable[tuple[int, int]]) -> int:
        """Payload bytes of messages that are in the log, all of them; roughly, where it is damaged.

        The runs are in order: where many are in one block, it is looked for once.
        """
        total = 0
        block: Messages | None = None
        for first, end in runs:
            if block is None or block.header.offset_end <= first:
                try:
                    block = self.block_at(queue, first)
                except LogDamaged:
                    block = None
            if block is not None and block.header.first_offset <= first and end <= block.header.offset_end:
                base = block.header.first_offset
                total += block.bounds[end - base] - block.bounds[first - base]
            else:
                total += self._bytes_between(queue, first, end)
        return total

    def _bytes_between(self, queue: int, first: int, end: int) -> int:
        total = 0
        for segment in self.holding_from(queue, first):
            span = segment.spans[queue]
            if span.first_offset >= end:
                break
            if first <= span.first_offset and span.end_offset <= end:
                total += span.bytes
                continue
            try:
                total += self._bytes_before(segment, queue, end) - self._bytes_before(segment, queue, first)
            except LogDamaged:
                count = min(end, span.end_offset) - max(first, span.first_offset)
                total += span.bytes * max(count, 0) // span.count
        return total

    def _bytes_before(self, segment: Segment, queue: int, offset: int) -> int:
        """Payload bytes of a queue in one segment, before `offset`."""
        span = segment.spans[queue]
        if offset >= span.end_offset:
            return span.bytes
        if offset <= span.first_offset:  # The settlements that stand there are perhaps not written yet.
            return 0
        entries = self.entries_of(segment, queue)
        row = entries.at(offset)
        if row < 0:
            return 0
        before = entries.bytes_before[row]
        block = self._find(segment, entries.positions[row])
        if block is None:  # settlements, behind the messages in question
            return before
        header = block.header
        if offset >= header.offset_end:
            return before + header.extra
        if isinstance(block, Messages):
            return before + block.bounds[offset - header.first_offset]
        index = block.index_at(offset)
        run, into = block.runs[index], offset - block.ends[index]
        before += sum(it.payload_bytes for it in block.runs[:index])
        return before + self._bytes_between(self.stage_queue, run.row, run.row + into)

    def messages_from(self, queue: int, offset: int) -> tuple[Segment, Header] | None:
        """The first block with messages at or behind `offset`, and its segment."""
        for segment in self.holding_from(queue, offset):
            if segment.spans[queue].end_offset > offset:
                for header in self._headers_from(segment, queue, offset, events=False):
                    if header.kind == KIND_MESSAGES and header.offset_end > offset:
                        return segment, header
        return None

    def events_from(self, queue: int, number: int) -> tuple[Segment, Header] | None:
        """The first block with events of that queue at or behind `number`, and its segment."""
        for segment in self.all:
            span = segment.spans.get(queue)
            if span is not None and span.end_event > number:
                for header in self._headers_from(segment, queue, number, events=True):
                    if header.first_event + header.event_count > number:
                        return segment, header
        return None

    def _headers_from(self, segment: Segment, queue: int, number: int, *, events: bool) -> Iterator[Header]:
        """The headers of a queue in a segment from the block on that may hold an offset, or an event.

        What cannot be read is left out: whoever asks sees the gap.
        """
        try:
            entries = self.entries_of(segment, queue)
        except LogDamaged:
            return
        keys = entries.events if events else entries.floors
        for row in range(max(bisect_right(keys, number) - 1, 0), len(entries)):
            try:
                yield self.header_at(segment, entries.positions[row])
            except LogDamaged:
                continue

    # --- the cache -------------------------------------------------------------------------------

    @property
    def written(self) -> int:
        """The log position up to which blocks can be read from the files."""
        return self._written

    @written.setter
    def written(self, position: int) -> None:
        self._written = position
        self._shrink()

    def cache(self, segment: Segment, block: Messages) -> None:
        """Keep a block, and let go of the oldest that can be read again from the files."""
        key = segment, block.header.position
        if key in self._cache:
            return
        self._cache[key] = block
        self._cached_bytes += BLOCK_BYTES + block.header.body_bytes
        self._shrink()

    def keep(self, segment: Segment, adoption: Adoption) -> None:
        """The same of an adoption block."""
        self._adoptions[segment, adoption.header.position] = adoption
        while len(self._adoptions) > ADOPTIONS_MAX:
            oldest = next(iter(self._adoptions))
            if oldest[1] >= self._written and not oldest[0].generation:
                break
            del self._adoptions[oldest]

    def empty_cache(self) -> None:
        """Let go of all blocks that can be read again from the files."""
        self._shrink(0)

    def _shrink(self, bytes_max: int = -1) -> None:
        """Down to that, or to what the cache may hold, as far as the rest is in the files."""
        bytes_max = self._cache_bytes_max if bytes_max < 0 else bytes_max
        while self._cached_bytes > bytes_max and len(self._cache) > 1:
            oldest = next(iter(self._cache))
            # Nothing is written to a compacted one: its blocks are in its file, whatever their positions.
            if oldest[1] >= self._written and not oldest[0].generation:
                break
            self._uncache(oldest)

    def _oldest_in_files(self, kept: Iterable[tuple[Segment, int]]) -> tuple[Segment, int] | None:
        return next((it for it in kept if it[1] < self._written or it[0].generation), None)

    def _uncache(self, key: tuple[Segment, int]) -> None:
        self._cached_bytes -= BLOCK_BYTES + self._cache.pop(key).header.body_bytes

    def close(self) -> None:
        for segment in self.all:
            if segment.file is not None:
                segment.file.close()
                segment.file = None
