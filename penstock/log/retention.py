"""Retention: which segments may go, which are worth compacting, and the compacting itself.

A segment may go when, for every queue in it, its messages are settled, older than the queue's
retention (or beyond its `retention-bytes`), and behind every reader that holds it. A segment
that only a few living messages keep is rewritten with these alone. Both wait until two snapshots
lie behind the segment, because the settlements in it are needed until then.

Rules that always hold:
  * Compacting makes a segment shorter. A run of living messages costs a header, so that a few small
    messages, each of them alone, can take more room than all of them did together. What would not be
    shorter stays as it was: behind its end, positions belong to the next segment.
  * Rows of stages are kept while a stage is open that has them, or a segment names them for its messages:
    so the segment with the messages goes, or is compacted, before the one with their rows.
  * What a queue shows as the start of its log moves when something has really gone, or is about to.
"""

import logging
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from penstock.log.adoption import Adoption, Run, adoption_parts, read_adoption
from penstock.log.block import (
    FLAG_ELSEWHERE,
    FLAG_END,
    FLAG_PART,
    HEADER_BYTES,
    KIND_MESSAGES,
    Buffer,
    Header,
    Messages,
    body_checksum,
    message_parts,
    read_messages,
)
from penstock.log.columns import cut_columns
from penstock.log.disk import Disk, File, discard, is_final, sync_folder
from penstock.log.errors import LogDamaged, LogFailed
from penstock.log.readers import Readers
from penstock.log.scan import walk_blocks
from penstock.log.segment import Segment, Span, merged
from penstock.log.snapshot import SNAPSHOTS_KEPT
from penstock.log.state import LogState
from penstock.log.views import weigh_early
from penstock.log.workers import Worker

log = logging.getLogger("penstock.log")

COMPACT_BELOW = 0.5
"""A segment is compacted when less than this part of it is left by that, as a rule."""

RUNS_MAX = 5000
"""More than so many living runs of a segment are not listed before a count says that it is worth it."""

TEMPORARY = ".tmp"

Ranges = list[tuple[int, int]]
Living = dict[int, Ranges]


class Plan:
    """What `trim` has found to do with one segment."""

    __slots__ = ("living", "segment", "staged", "survivors")

    def __init__(self, segment: Segment, living: Living, staged: "Staged") -> None:
        self.segment = segment
        self.staged = staged
        self.living = living  # empty: the segment may go
        self.survivors = sum(end - first for runs in living.values() for first, end in runs)


class Staged(NamedTuple):
    """Where the rows of stages are: the number of their queue, and which segments have some, in order."""

    queue: int
    segments: list[Segment]


def plans(
    state: LogState,
    readers: Readers,
    oldest_snapshot: int,
    now_us: int,
    rows_of_staging: Callable[[], Ranges] = list,
) -> Iterator[Plan]:
    """The segments that can be removed or compacted now, oldest first."""
    # By far most logs have no queue that asks for it, and some have a hundred thousand queues.
    by_bytes = any(queue.policy.retention_bytes for queue in state.by_number.values())
    settled_after = _bytes_after(state) if by_bytes else None
    held = readers.held(now_us)
    staged = Staged(state.segments.stage_queue, state.segments.holding(state.segments.stage_queue))
    rows_kept: _RowsKept | None = None
    for at, segment in enumerate(state.segments.all):
        # A compacted one lay behind two snapshots when that was done, wherever it ends now.
        if not segment.sealed or (segment.end > oldest_snapshot and not segment.generation):
            return
        if segment.base in held or not all(
            _is_over(state, segment, number, settled_after[at][number] if settled_after else 0, now_us)
            for number in segment.spans
        ):
            continue
        # Counted first, which is a hundred times quicker: very many may be in the way for days.
        rooms = [
            (number, state.by_number[number].pending, span)
            for number, span in segment.spans.items()
            if number != staged.queue
        ]
        rows: Living = {}
        if staged.queue in segment.spans:
            rows_kept = rows_kept or _RowsKept(state, rows_of_staging())
            rows[staged.queue] = rows_kept.of(segment, segment.spans[staged.queue])
        row_counts = {number: (len(its), _total(its)) for number, its in rows.items()}
        counts = row_counts | {
            n: pending.count_unsettled(span.first_offset, span.end_offset) for n, pending, span in rooms
        }
        if sum(runs for runs, _ in counts.values()) > RUNS_MAX and not _worth_compacting(
            segment, counts, staged.queue
        ):
            continue
        runs = rows | {n: pending.unsettled(span.first_offset, span.end_offset) for n, pending, span in rooms}
        living = {number: its for number, its in runs.items() if its}
        counts = {number: (len(its), _total(its)) for number, its in runs.items()}
        if not living or _worth_compacting(segment, counts, staged.queue):
            yield Plan(segment, living, staged)


def _total(ranges: Ranges) -> int:
    return sum(end - first for first, end in ranges)


class _RowsKept:
    """The rows of stages that somebody needs: messages of some segment, or a stage that is open."""

    def __init__(self, state: LogState, rows_of_staging: Ranges) -> None:
        self._rows: list[tuple[int, int, Segment | None]] = [
            (*rows, segment) for segment in state.segments.all for rows in segment.names
        ]
        self._rows += [(stage.first, stage.end, None) for stage in state.stages]
        self._rows += [(first, end, None) for first, end in rows_of_staging]
        self._rows.sort(key=itemgetter(0))
        self._ends = list(accumulate((end for _, end, _ in self._rows), max))  # highest so far

    def of(self, segment: Segment, span: Span) -> Ranges:
        """Those that a segment has, besides what its own messages need."""
        first, end = span.first_offset, span.end_offset
        some = self._rows[bisect_right(self._ends, first) : bisect_left(self._rows, end, key=itemgetter(0))]
        return merged([(max(a, first), min(b, end)) for a, b, of in some if b > first and of is not segment])


def _worth_compacting(segment: Segment, living: dict[int, tuple[int, int]], stage_queue: int) -> bool:
    """Whether less than half of it would be left, by what is known without reading it.

    It may be more: how many blocks the runs go through, and how large attributes are, only the file says.
    """
    left = 0.0
    events, survivors = segment.dropped, 0
    for number, span in segment.spans.items():
        events += span.end_event - span.first_event
        runs, count = living[number]
        here = span.bytes - (_elsewhere(segment, number, stage_queue) if number in segment.adopted else 0)
        if count:
            survivors += count
            # Counted in each room, neighbours are two; but there are no more gaps than messages are gone.
            runs = min(runs, span.end_offset - span.first_offset - count + 1)
            # A header for each run, a bound for each message and one more, and the payload.
            left += runs * (HEADER_BYTES + 4) + count * (4 + here / span.count)
    counts = {number: count for number, (_, count) in living.items()}
    return survivors < events and left < _limit(segment, counts, stage_queue)


def _elsewhere(segment: Segment, number: int, stage_queue: int) -> int:
    """Bytes of a queue's messages that were staged and are not here, at least."""
    rows = segment.spans[stage_queue].bytes if segment.names_itself(stage_queue) else 0
    return max(segment.adopted[number][1] - rows, 0)


def _limit(segment: Segment, living: dict[int, int], stage_queue: int) -> int:
    """How much may be left of it: half; or nearly all, where rows of more bytes go in other segments."""
    freed = 0.0
    for number, (count, _) in segment.adopted.items():
        gone = max(1 - living.get(number, 0) / count, 0)
        freed += gone * _elsewhere(segment, number, stage_queue)
    return int(segment.size * (max(COMPACT_BELOW, 1) if freed > segment.size else COMPACT_BELOW))


def _bytes_after(state: LogState) -> list[dict[int, int]]:
    """For each segment, by the queues in it: their payload bytes in the segments behind it."""
    after: list[dict[int, int]] = []
    running: dict[int, int] = {}
    for segment in reversed(state.segments.all):
        after.append({number: running.get(number, 0) for number in segment.spans})
        for number, span in segment.spans.items():
            running[number] = running.get(number, 0) + span.bytes
    after.reverse()
    return after


def _is_over(state: LogState, segment: Segment, number: int, bytes_after: int, now_us: int) -> bool:
    """Whether the policy of that queue lets go of this segment."""
    policy = state.by_number[number].policy
    if 0 < policy.retention_bytes <= bytes_after:
        return True
    late_us = sum(by_us for at, by_us in state.steps if segment.end <= at) if state.steps else 0
    return segment.time_max_us + late_us + policy.retention_seconds * 1_000_000 <= now_us


def move_starts(state: LogState, segment: Segment) -> None:
    """The log of each queue is complete only behind this segment from now on."""
    for number, span in segment.spans.items():
        queue = state.by_number[number]
        queue.offset_start = max(queue.offset_start, span.end_offset)
        queue.event_start = max(queue.event_start, span.end_event)
        state.changed[number] = queue


WhenSafe = Callable[[dict[int, Span], int, Callable[[LogFailed | None], None]], bool]


class Trimmer:
    """Carries out one plan after the other: state on the loop, files on the keeper's thread.

    A message that a plan leaves out is settled, but the record of that may still be on its way to
    the disk. So a plan waits, by `when_safe`, until everything that it is based on is synced.
    """

    def __init__(
        self,
        state: LogState,
        readers: Readers,
        keeper: Worker,
        when_safe: WhenSafe,
        on_failure: Callable[[BaseException], None],
        rows_of_staging: Callable[[], Ranges] = list,
    ) -> None:
        self._state = state
        self._readers = readers
        self._rows_of_staging = rows_of_staging
        self._disk = state.disk
        self._keeper = keeper
        self._when_safe = when_safe
        self._on_failure = on_failure
        self._busy = False
        self._attempt = 0  # counts plans
        self._awaits_sync = False  # the last one has not begun
        self._stopped = False
        self._passed_over: set[int] = set()  # bases of segments that failed, in this round
        self._damaged: set[int] = set()  # bases of segments that cannot be compacted
        self._too_large: dict[int, int] = {}  # by base: so many living ones leave too much of a segment

    def stop(self) -> None:
        """Begin with nothing more."""
        self._stopped = True

    def trim(self, snapshots: list[int], now_us: int, *, anew: bool = False) -> None:
        """A round over all segments that can go or be compacted; `snapshots` are on the disk.

        `anew`: what waits for a sync may wait for long, so leave it and look for what does not.
        """
        if anew and self._awaits_sync:
            self._busy = self._awaits_sync = False
        if not self._busy and len(snapshots) >= SNAPSHOTS_KEPT:
            self._passed_over.clear()
            self._next(snapshots[-1], now_us)

    def _next(self, oldest_snapshot: int, now_us: int) -> None:
        """Begin with the next plan that can be carried out. Its end comes back here."""
        self._busy = True
        for plan in plans(self._state, self._readers, oldest_snapshot, now_us, self._rows_of_staging):
            if self._stopped:
                break
            if self._is_passed_over(plan):
                continue
            if self._begin(plan, oldest_snapshot, now_us):
                return
            self._passed_over.add(plan.segment.base)
        self._busy = False

    def _is_passed_over(self, plan: Plan) -> bool:
        base = plan.segment.base
        if base in self._passed_over or base in self._damaged:
            return True
        # Asked again when half of those have gone that were too many.
        return 2 * plan.survivors > self._too_large.get(base, 2 * plan.survivors)

    def _begin(self, plan: Plan, oldest_snapshot: int, now_us: int) -> bool:
        """False where there is no room to write down what the plan is based on."""
        segment = plan.segment
        self._attempt = attempt = self._attempt + 1

        def ended(_: None, error: BaseException | None) -> None:
            if is_final(error) and error is not None:
                self._busy = False
                self._on_failure(error)
                return
            if error is not None:
                log.error("%s: could not be trimmed: %s", self._disk.where(segment.name), error)
                (self._damaged if isinstance(error, LogDamaged) else self._passed_over).add(segment.base)
            self._next(oldest_snapshot, now_us)

        def is_wanted() -> bool:
            """Whether somebody reads it: asked again before anything goes."""
            if segment.base not in self._readers.held(now_us):
                return False
            self._passed_over.add(segment.base)
            return True

        def leave() -> None:
            """A reader that comes from now on comes too late for this segment, and can see that."""
            self._readers.lose(segment, now_us)
            for number in segment.spans:
                queue = self._state.by_number[number]
                if queue.weight.known:
                    weigh_early(self._state.segments, queue)
            move_starts(self._state, segment)

        def replace(by: Segment | None) -> None:
            if by is not None:
                by.drop(self._state.unknown_in(by))
            self._state.segments.replace(segment, by)
            self._too_large.pop(segment.base, None)
            self._keeper.submit(remove_file, ended)

        def remove_file() -> None:
            if not self._stopped:  # otherwise the next opening removes it
                discard(self._disk, segment.name)
                sync_folder(self._disk)

        def rewrite() -> Segment | None:
            return None if self._stopped else compact(self._disk, segment, plan.living, plan.staged)

        def rewritten(result: Segment | None, error: BaseException | None) -> None:
            if isinstance(error, _TooLarge):
                self._too_large[segment.base] = plan.survivors
                self._next(oldest_snapshot, now_us)
            elif result is None:
                ended(None, error)
            elif is_wanted():
                self._keeper.submit(lambda: discard(self._disk, result.name + TEMPORARY), ended)
            else:
                leave()
                self._keeper.submit(lambda: self._give_name(result), lambda done, error: named(result, error))

        def named(result: Segment, error: BaseException | None) -> None:
            if error is not None:
                ended(None, error)
            else:
                replace(result)

        def safe(error: LogFailed | None) -> None:
            if attempt != self._attempt or not self._awaits_sync:
                return
            self._awaits_sync = False
            if error is not None:
                self._busy = False
            elif is_wanted():
                self._next(oldest_snapshot, now_us)
            elif plan.living:
                self._keeper.submit(rewrite, rewritten)
            else:
                leave()
                replace(None)

        self._awaits_sync = True
        if self._when_safe(segment.spans, now_us, safe):
            return True
        self._awaits_sync = False
        return False

    def _give_name(self, result: Segment) -> None:
        """On the keeper's thread: from now on the compacted file is the segment."""
        temporary = result.name + TEMPORARY
        try:
            self._disk.rename(temporary, result.name)
        except OSError:
            discard(self._disk, temporary)
            raise
        sync_folder(self._disk)


# --- compacting, on the keeper's thread ----------------------------------------------------------


class _TooLarge(Exception):
    """Too much of a segment would be left for compacting it to be worth it."""


def compact(disk: Disk, segment: Segment, living: Living, staged: Staged) -> Segment:
    """Write the living messages of a segment as its next generation, which has no name yet."""
    result = Segment(segment.base, segment.generation + 1, 0, 0, sealed=True)
    result.limit = _limit(segment, {it: _total(runs) for it, runs in living.items()}, staged.queue)
    temporary = result.name + TEMPORARY
    target = disk.create(temporary, 0)
    try:
        with _open(disk, segment) as source:
            if segment.names:
                living = _with_own_rows(source, segment, living, staged.queue)
            _copy_living(source, segment, target, _Copy(disk, result, staged), living)
        target.sync()
    except (OSError, LogDamaged, _TooLarge):
        discard(disk, temporary)
        raise
    finally:
        target.close()
    result.limit = result.size
    return result


@contextmanager
def _open(disk: Disk, segment: Segment) -> Iterator[File]:
    try:
        source = disk.open(segment.name)
    except FileNotFoundError as error:
        raise LogDamaged(f"{disk.where(segment.name)} is missing") from error
    try:
        yield source
    finally:
        source.close()


def _living_in(header: Header, living: Living) -> Iterator[tuple[int, int]]:
    """The living messages of a block, in runs."""
    runs = living.get(header.queue, [])
    for at in range(bisect_right(runs, header.first_offset, key=itemgetter(1)), len(runs)):
        first, stop = max(runs[at][0], header.first_offset), min(runs[at][1], header.offset_end)
        if first >= stop:
            return
        yield first, stop


def _with_own_rows(source: File, segment: Segment, living: Living, stage_queue: int) -> Living:
    """The same with the rows that living messages of this very segment are made of."""
    rows = list(living.get(stage_queue, ()))
    for header, body in walk_blocks(source, segment.base, segment.base, segment.end):
        if header.kind == KIND_MESSAGES and header.flags & FLAG_ELSEWHERE:
            adoption = read_adoption(header, body)
            for first, stop in _living_in(header, living):
                rows += [(row, rows_end) for _, row, rows_end in adoption.within(first, stop)]
    return {**living, stage_queue: merged(rows)} if rows else living


def _copy_living(source: File, segment: Segment, target: File, copy: "_Copy", living: Living) -> None:
    """LogDamaged where not every block can be read: then nobody knows what else was alive."""
    end = segment.base
    for header, body in walk_blocks(source, segment.base, segment.base, segment.end):
        end = header.end
        if header.kind != KIND_MESSAGES or header.queue not in living:
            continue
        if header.flags & FLAG_ELSEWHERE:
            adoption = read_adoption(header, body)
            for first, stop in _living_in(header, living):
                copy.adoption(target, adoption, first, stop)
        else:
            block = read_messages(header, body)
            for first, stop in _living_in(header, living):
                copy.messages(target, block, first, stop)
    if end != segment.end:
        raise LogDamaged(
            f"{copy.where(segment)}: no valid block at position {end - segment.base}; "
            f"the segment stays as it is"
        )


class _Copy:
    """What is left of a segment, as it is written. Blocks have their old offsets, times and openings."""

    def __init__(self, disk: Disk, result: Segment, staged: Staged) -> None:
        self._disk = disk
        self._result = result
        self._staged = staged
        self._sizes: tuple[Segment | None, list[Messages]] = None, []  # of the stage blocks of one segment

    def where(self, segment: Segment) -> str:
        return self._disk.where(segment.name)

    def messages(self, target: File, block: Messages, first: int, end: int) -> None:
        """One run of living messages as a block of its own."""
        old = block.header
        columns = cut_columns(block, first - old.first_offset, end - old.first_offset)
        parts = message_parts(columns)
        header = _cut(old, first, end)
        header.extra = len(columns.payload)
        header.expires_min_us = min(filter(None, columns.expires or ()), default=0)
        self._write(target, header, parts)

    def adoption(self, target: File, block: Adoption, first: int, end: int) -> None:
        """The same of messages whose columns are elsewhere."""
        runs: list[Run] = []
        for offset, row, rows_end in block.within(first, end):
            whole = block.runs[block.index_at(offset)]
            size = whole.payload_bytes
            if rows_end - row < whole.length:
                size = self._payload_bytes(row, rows_end)
            runs.append(Run(row, rows_end - row, size, whole.expires_us))
        header = _cut(block.header, first, end)
        header.extra = sum(run.payload_bytes for run in runs)
        header.expires_min_us = min([run.expires_us for run in runs if run.expires_us], default=0)
        self._write(target, header, adoption_parts(runs))
        self._result.adopt(Adoption(header, runs))

    def _payload_bytes(self, first: int, end: int) -> int:
        """Of rows of the stage queue."""
        total = 0
        for segment in self._staged.segments:
            span = segment.spans.get(self._staged.queue)
            if span is None or span.first_offset >= end or span.end_offset <= first:
                continue
            for block in self._stage_blocks(segment):
                base, count = block.header.first_offset, block.header.count
                lo, hi = max(first - base, 0), min(end - base, count)
                if lo < hi:
                    total += block.bounds[hi] - block.bounds[lo]
        return total

    def _stage_blocks(self, segment: Segment) -> list[Messages]:
        """Those of a segment, without their payloads."""
        if self._sizes[0] is not segment:
            blocks: list[Messages] = []
            with _open(self._disk, segment) as file:
                for header, body in walk_blocks(file, segment.base, segment.base, segment.end):
                    if header.kind == KIND_MESSAGES and header.queue == self._staged.queue:
                        bounds = array("i", read_messages(header, body).bounds)
                        blocks.append(Messages(header, bounds, b""))
            self._sizes = segment, blocks
        return self._sizes[1]

    def _write(self, target: File, header: Header, parts: list[Buffer]) -> None:
        result = self._result
        header.body_bytes = sum(map(len, parts))
        header.body_checksum = body_checksum(parts)
        header.position = result.end
        if header.end >= result.base + result.limit:
            raise _TooLarge
        target.write(header.position - result.base, [header.pack(), *parts])
        result.note(header)


def _cut(old: Header, first: int, end: int) -> Header:
    """The header of some of the messages of a block."""
    header = old.copy()
    header.flags &= ~(FLAG_PART | FLAG_END)
    header.count = header.event_count = end - first
    header.first_offset = first
    header.first_event = old.first_event + first - old.first_offset
    header.synced = 0
    return header
