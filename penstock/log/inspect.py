"""Inspection: is everything in a data folder what was written, and does it fit together?

`inspect_log` reads every segment, every body and every snapshot of a folder, replays the log as
recovery would, and tells what it found. It takes no lock and changes nothing, so it may run
beside a broker: then it goes as far as the watermark says, and takes files that retention
removes meanwhile for what they are.

What is wrong is a defect, what a person may want to know is a note (`findings.py`). Where
bytes cannot be read, the rest is read all the same.

How torn and damaged differ: a byte below the watermark, or below the `synced` mark of a later
block, or before a compacted segment, was synced. If it is not valid any more it is damaged. Else it is the
rest of a last group that nobody was promised, or that a broker is just writing.

The file is long because it is one walk: each check needs what those before it have found.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from itertools import accumulate, chain

from penstock.log.adoption import Adoption, Run, read_adoption
from penstock.log.block import (
    FLAG_ELSEWHERE,
    FLAG_END,
    FLAG_PART,
    HEADER_BYTES,
    KIND_CONTROL,
    KIND_MESSAGES,
    Header,
    read_control,
)
from penstock.log.committer import SPARE
from penstock.log.compare import differences, missing_names, problem_of
from penstock.log.disk import WATERMARK, File, RealDisk, read_watermark
from penstock.log.errors import LogDamaged, LogNewer, LogRefused
from penstock.log.findings import NOBODY_S_ROWS, Report, rot
from penstock.log.overlaps import Overlap, find_overlaps
from penstock.log.overlay import TRIES_MAX, LogChanging, OverlayDisk, replayed
from penstock.log.read_view import newest_generations
from penstock.log.recovery import QUARANTINE
from penstock.log.repairs import LAST_NAME, STAGE_QUEUE, shown
from penstock.log.scan import Hole, find_block, is_blank, walk
from penstock.log.segment import Segment, parse_segment_name, segment_name
from penstock.log.snapshot import (
    PREFIX,
    SNAPSHOTS_KEPT,
    load_snapshot,
    positions_in,
    snapshot_name,
)
from penstock.log.state import LogSettings, LogState
from penstock.model.policy import Policies


def check_is_log(path: str) -> None:
    """LogRefused where there is no folder, or no log in it."""
    try:
        names = RealDisk(path, read_only=True).names()
    except NotADirectoryError:
        raise LogRefused(f"{path!r} is not a folder; name the data folder of a broker") from None
    except FileNotFoundError:
        raise LogRefused(f"there is no folder {path!r}; name the data folder of a broker") from None
    except PermissionError:
        raise LogRefused(f"{path!r} may not be read by this user") from None
    if not newest_generations(names) and not positions_in(names):
        raise LogRefused(f"there is no log in {path!r}: it has neither a segment nor a snapshot")


Progress = Callable[[int, int], None]  # bytes done, bytes in all


def inspect_log(path: str, progress: Progress | None = None) -> Report:
    """Look at everything; see the module's docstring. LogRefused where there is no log."""
    check_is_log(path)
    for _ in range(TRIES_MAX):
        try:
            return _Inspection(path, progress).run()
        except _Overtaken:
            continue
    raise LogChanging(
        f"data folder {path!r}: retention removed what was being replayed, {TRIES_MAX} times; try again"
    )


class _Overtaken(Exception):
    """Blocks that were to be replayed are gone: a broker has written snapshots behind them since."""


class _Coverage:
    """Which offsets (or events) of one queue were seen, as the gaps between them."""

    __slots__ = ("end", "gaps")

    def __init__(self) -> None:
        self.end = 0
        self.gaps: list[tuple[int, int, str, int]] = []  # first, end, and where it showed

    def add(self, first: int, end: int, file: str, position: int) -> None:
        if first > self.end:
            self.gaps.append((self.end, first, file, position))
        self.end = max(self.end, end)


class _Inspection:
    def __init__(self, path: str, progress: Progress | None) -> None:
        self._disk = RealDisk(path, read_only=True)
        # In this order: what the watermark covers has its name when the names are taken.
        self._watermark = read_watermark(self._disk)
        self._overlay = OverlayDisk(path)
        self._names = self._overlay.names()
        self._on_disk = newest_generations(self._names)
        self._snapshot_positions = positions_in(self._names)[::-1]  # oldest first
        # A snapshot is written when everything before it is synced: it is as good as a watermark.
        self._synced = max([self._watermark, *self._snapshot_positions])
        self._progress = progress
        self._snapshots: dict[int, LogState] = {}  # those that could be read, oldest first
        self._sealed: dict[int, int] = {}  # by base: where a segment ends, as far as snapshots say
        self._state = self._fresh_state()
        self._replay_from = 0
        self._to_compare: list[int] = []
        self._unreliable = False  # something that replaying needs could not be read
        self._part: list[tuple[Header, memoryview, str]] = []  # a transaction without its end yet
        self._offsets: dict[int, _Coverage] = {}
        self._events: dict[int, _Coverage] = {}
        self._adoptions: dict[int, list[Adoption]] = {}  # by segment
        self._bad_rows: list[tuple[Hole, int, str]] = []  # damaged stage blocks, and in which files
        self._known_damage: list[str] = []
        self._end = 0  # of the last block that counts
        self._behind_blocks = 0
        self.report = Report()

    def _fresh_state(self) -> LogState:
        return LogState(self._overlay, LogSettings(), Policies())

    def run(self) -> Report:
        self._look_at_names()
        self._load_snapshots()
        self._choose_start()
        bases = list(self._on_disk)
        reached: int | None = 0
        for base, next_base in zip(bases, [*bases[1:], None], strict=False):  # there may be none
            self._check_no_gap(reached, base)
            reached = self._segment(base, next_base)
            if reached is None:
                break
        self._check_overlaps()
        self._check_end()
        now = self._state_now()
        self._check_absent(now)
        self._check_coverage(now)
        self._tell_known_damage()
        report = self.report
        report.segments = len(self._on_disk)
        report.snapshots = len(self._snapshots)
        report.queues = len(shown(list(self._state.queues)))
        report.position = self._end
        return report

    # --- names and snapshots -------------------------------------------------------------------------

    def _look_at_names(self) -> None:
        for name in self._names:
            where = self._disk.where(name)
            parsed = parse_segment_name(name)
            if parsed is not None:
                if parsed[1] < self._on_disk[parsed[0]]:
                    self.report.note("leftover", where, "a compacted segment has taken its place")
            elif name.startswith(QUARANTINE):
                self.report.note("quarantine", where, "damaged bytes that were set aside earlier")
            elif name.endswith(".tmp"):
                self.report.note("leftover", where, "was not finished; the next start removes it")
            elif name not in (RealDisk.LOCK, WATERMARK) and not name.startswith((PREFIX, SPARE)):
                self.report.note("unknown-file", where, "is not of this log")
        if not self._watermark:
            self.report.note("no-watermark", self._disk.where(WATERMARK), "says nothing; the blocks have to")

    def _load_snapshots(self) -> None:
        for position in self._snapshot_positions:
            state = self._fresh_state()
            where = self._disk.where(snapshot_name(position))
            try:
                load_snapshot(state, position)
            except FileNotFoundError:
                continue  # Newer ones have taken its place since the names were taken.
            except (LogDamaged, LogNewer) as error:
                self.report.defect("bad-snapshot", where, str(error).removeprefix(f"{where}: "))
                continue
            except (ValueError, KeyError, TypeError, RuntimeError) as error:
                self.report.defect("bad-snapshot", where, f"has its checksum, but makes no sense: {error!r}")
                continue
            self._snapshots[position] = state
            for segment in state.segments.all:
                if segment.end < position:
                    self._sealed[segment.base] = segment.end

    def _choose_start(self) -> None:
        """Replaying begins with the first block ever, or where the oldest snapshot stands."""
        self._to_compare = list(self._snapshots)
        if not self._to_compare:
            # What retention took before nobody can tell any more.
            self._state.begins_late = any(self._on_disk.values()) or min(self._on_disk, default=0) > 0
            return
        before = 0
        for segment in self._snapshots[self._to_compare[-1]].segments.all:
            if segment.base != before or segment.generation or self._on_disk.get(before) != 0:
                self._replay_from = self._to_compare.pop(0)
                self._state = self._snapshots[self._replay_from]
                break
            before = segment.end

    # --- segments ------------------------------------------------------------------------------------

    def _check_no_gap(self, reached: int | None, base: int) -> None:
        """Retention leaves gaps, but only before the oldest snapshot of two. A restore may have brought one
        alone: a gap that it knows of is one, too."""
        # One that was damaged, and set aside since, counted when retention asked.
        aside = sum(name.startswith(QUARANTINE + PREFIX) for name in self._names)
        kept = self._snapshot_positions and len(self._snapshot_positions) + aside >= SNAPSHOTS_KEPT
        if reached is None or reached >= base or (kept and base <= self._snapshot_positions[0]):
            return
        for position, state in self._snapshots.items():
            if base <= position and not any(reached <= it.base < base for it in state.segments.all):
                return
        self._missing_positions(reached, base)

    def _missing_positions(self, start: int, end: int) -> None:
        self._unreliable = True
        where = self._disk.where(segment_name(start, 0))
        self.report.defect(
            "missing-segment", where, f"is missing: log positions {start} to {end} are in no file"
        )

    def _segment(self, base: int, next_base: int | None) -> int | None:
        """Look at one segment; the position behind it, or None where the log ends in it."""
        opened = self._open(base, next_base)
        if opened is None:
            return next_base
        generation, file = opened
        where = self._disk.where(segment_name(base, generation))
        try:
            file_end = base + file.size()
            if generation:
                self._compacted(file, base, file_end, where)
                return self._sealed.get(base, next_base)
            limit = self._sealed.get(base, next_base)
            if not self._blocks(file, base, min(file_end, limit or file_end), where, next_base):
                return None
        finally:
            file.close()
        if limit is not None and file_end < limit:
            self._missing_positions(file_end, limit)
        return limit

    def _open(self, base: int, next_base: int | None) -> tuple[int, File] | None:
        """Generation and file of a segment, which a broker may compact or remove meanwhile."""
        while True:
            generation = self._on_disk[base]
            try:
                return generation, self._disk.open(segment_name(base, generation))
            except FileNotFoundError:
                if next_base is None or next_base > self._replay_from:
                    raise _Overtaken from None
                newer = newest_generations(self._disk.names()).get(base)
                if newer is None or newer == generation:
                    del self._on_disk[base]
                    return None
                self._on_disk[base] = newer

    def _blocks(self, file: File, base: int, end: int, where: str, next_base: int | None) -> bool:
        """The blocks of a segment. False where the log ends among them."""
        for found in walk(file, base, base, end):
            if isinstance(found, Hole):
                if not self._hole(found, file, base, where, next_base):
                    return False
                continue
            header, body = found
            if self._watermark and header.position >= self._synced:
                self._behind_blocks += 1
                continue
            self._block(header, body, base, where)
            self._end = header.end
        return True

    def _compacted(self, file: File, base: int, end: int, where: str) -> None:
        """Messages that were alive when the segment was compacted. All of it was synced."""
        for found in walk(file, base, base, end):
            if isinstance(found, Hole):
                self._damaged(found, base, where)
                continue
            self._block(*found, base, where)

    def _check_overlaps(self) -> None:
        segments = [
            Segment(base, generation, 0, 0, sealed=True) for base, generation in self._on_disk.items()
        ]
        overlaps: list[Overlap] = []
        with suppress(FileNotFoundError):  # A broker has removed one meanwhile, and an overlap with it.
            for segment in segments:
                file = self._disk.open(segment.name)
                segment.size = file.size()
                file.close()
            overlaps += find_overlaps(self._disk, segments)
        for segment, next_base, doubts in overlaps:
            where, at = self._disk.where(segment.name), next_base - segment.base
            text = f"behind position {at} it has positions that belong to the next segment"
            if not doubts:
                self.report.defect("overlap", where, f"{text}; no message is in doubt by that", at)
            for number, runs in doubts.items():
                queue = self._state.by_number.get(number)
                name = queue.name if queue is not None else f"unknown-{number}"
                for first, end in runs:
                    told = (
                        f"{text}: an earlier version may have delivered other messages' payloads for offsets "
                        f"{first} to {end - 1} of queue {name!r}"
                    )
                    self.report.defect("overlap", where, told, at, name, first, end)

    # --- holes ---------------------------------------------------------------------------------------

    def _hole(self, hole: Hole, file: File, base: int, where: str, next_base: int | None) -> bool:
        """Damage, a missing segment, or (False) the end of the log."""
        was_synced = hole.start < self._synced or self._proof(file, base, hole.start)
        blank = hole.header is None and is_blank(file, base, hole)
        if was_synced and blank and next_base is not None:
            # The segment was not filled to the end of its file, and what came after it is not here.
            self._missing_positions(hole.start, hole.end)
        elif was_synced and not blank:
            self._damaged(hole, base, where)
        elif not blank:
            at = hole.start - base
            text = (
                f"from position {at} on, nothing whole is known to be synced: it is being written, or was "
                f"left unfinished and the next start cuts it"
            )
            self.report.note("torn-tail", where, text, at)
        return was_synced and (next_base is not None or not blank)

    def _proof(self, file: File, base: int, at: int) -> bool:
        """Whether a valid block further on was built when `at` had been synced, or a segment compacted."""
        synced, search, end = 0, at + 8, base + file.size()
        while synced <= at and (found := find_block(file, base, search, end)) is not None:
            synced, search = found.synced, found.end
        for later, generation in self._on_disk.items():
            if synced <= at and later > base:
                synced = later if generation else self._first_synced(later)
        # A broker that is at work may have filled the hole since it was seen; then it has said so.
        return synced > at and read_watermark(self._disk) == self._watermark

    def _first_synced(self, base: int) -> int:
        try:
            file = self._disk.open(segment_name(base, 0))
        except FileNotFoundError:
            return 0
        try:
            first = find_block(file, base, base, base + file.size())
        finally:
            file.close()
        return first.synced if first is not None else 0

    def _damaged(self, hole: Hole, base: int, where: str) -> None:
        self._unreliable = True
        name = ""
        if hole.header is not None:
            # What it held is told here, and not once more as a gap.
            self._cover(hole.header, where, hole.start - base)
            name = self._name_of(hole.header)
        if name == STAGE_QUEUE:
            self._bad_rows.append((hole, base, where))  # Whose they are is known when all has been read.
            return
        found = rot(hole, base, name)
        self.report.defect(found.kind, where, found.text, found.position, found.queue, found.first, found.end)

    # --- blocks --------------------------------------------------------------------------------------

    def _name_of(self, header: Header) -> str:
        queue = self._state.by_number.get(header.queue)
        return queue.name if queue is not None else f"unknown-{header.queue}" if header.queue else ""

    def _cover(self, header: Header, where: str, at: int) -> None:
        if header.kind == KIND_CONTROL:
            return
        events = self._events.setdefault(header.queue, _Coverage())
        events.add(header.first_event, header.first_event + header.event_count, where, at)
        if header.kind != KIND_MESSAGES:
            return
        offsets = self._offsets.setdefault(header.queue, _Coverage())
        first, end = header.first_offset, min(offsets.end, header.offset_end)
        if first < end:
            name = self._name_of(header)
            text = f"the block at position {at} has offsets {first} to {end - 1} of queue {name!r} again"
            self.report.defect("repeated-offsets", where, text, at, name, first, end)
        offsets.add(header.first_offset, header.offset_end, where, at)

    def _block(self, header: Header, body: memoryview, base: int, where: str) -> None:
        """A block that has its checksum."""
        at = header.position - base
        self._count(header)
        self._cover(header, where, at)
        problem = problem_of(header, body)
        if problem:
            self._unreliable = True
            text = f"the block at position {at} has its checksum, but {problem}"
            self.report.defect("bad-content", where, text, at, self._name_of(header))
            return
        if header.flags & FLAG_ELSEWHERE:
            self._adoptions.setdefault(base, []).append(read_adoption(header, body))
        if header.position < self._replay_from:
            return
        self._compare_until(header.position)
        is_part = bool(header.flags & FLAG_PART)
        if self._part and not is_part:
            self._open_transaction()
        self._part.append((header, body, where))
        if not is_part or header.flags & FLAG_END:
            self._apply_part()

    def _count(self, header: Header) -> None:
        report = self.report
        report.blocks += 1
        report.bytes += HEADER_BYTES + header.body_bytes
        if self._name_of(header) != STAGE_QUEUE:  # Rows are no messages.
            report.events += header.event_count
            report.messages += header.count if header.kind == KIND_MESSAGES else 0
        if self._progress is not None:
            self._progress(report.bytes, max(self._synced - min(self._on_disk), report.bytes))

    def _open_transaction(self) -> None:
        """Something else stands where the end of a transaction should be."""
        header, _, where = self._part[0]
        name, first, end = self._name_of(header), header.first_offset, header.offset_end
        text = (
            f"the transaction that begins at log position {header.position} has no end: queue {name!r}, "
            f"offsets {first} to {end - 1}, and what came with them"
        )
        self._unreliable = True
        self.report.defect("open-transaction", where, text, 0, name, first, end)
        self._apply_part()

    def _apply_part(self) -> None:
        for header, body, where in self._part:
            if header.kind == KIND_CONTROL:
                fields = read_control(body)
                if fields["op"] == "damage":
                    self._known_damage.append(fields["damage"]["text"])
            elif header.queue not in self._state.by_number:
                self._unreliable = True
                name = self._name_of(header)
                text = f"no block says how the queue with number {header.queue} is called; here {name!r}"
                self.report.defect("lost-name", where, text, 0, name)
            try:
                self._state.apply(header, body)
            except (LogDamaged, LogNewer, ValueError, KeyError, TypeError) as error:
                self._unreliable = True
                text = f"the block at log position {header.position} cannot be applied: {error}"
                self.report.defect("bad-content", where, text, 0, self._name_of(header))
        self._part.clear()

    def _compare_until(self, position: int) -> None:
        """Compare what was replayed with the snapshots that stand at or before `position`."""
        while self._to_compare and self._to_compare[0] <= position:
            at = self._to_compare.pop(0)
            where = self._disk.where(snapshot_name(at))
            if self._unreliable:
                self.report.note(
                    "not-compared", where, "was not compared with the blocks: not all can be read"
                )
                continue
            written = self._snapshots[at]
            found = [differences(self._state, written)]
            for segment in written.segments.all:
                if self._on_disk.get(segment.base) == segment.generation:
                    adoptions = self._adoptions.get(segment.base, ())
                    found.append(missing_names(segment, [it for it in adoptions if it.header.position < at]))
            for difference in chain.from_iterable(found):
                self.report.defect("snapshot-disagrees", where, difference)

    # --- what should be there ------------------------------------------------------------------------

    def _check_end(self) -> None:
        if self._behind_blocks:
            text = (
                f"{self._behind_blocks} valid blocks behind log position {self._synced} are not known to be "
                f"synced; the next start takes them in"
            )
            self.report.note("behind-watermark", "", text)
        if self._part:
            header, _, where = self._part[0]
            self._end = header.position
            if self._synced > header.position:
                self._open_transaction()
            else:
                text = f"the transaction at log position {header.position} has no end; the next start cuts it"
                self.report.note("torn-tail", where, text)
                self._part.clear()
        if self._end < self._synced and not self._unreliable:
            self._unreliable = True
            by = WATERMARK if self._watermark == self._synced else snapshot_name(self._synced)
            text = f"the log was synced up to position {self._synced}, but its blocks end at {self._end}"
            self.report.defect("synced-and-gone", self._disk.where(by), text)
        self._compare_until(max(self._end, self._synced))

    def _state_now(self) -> LogState:
        """The state that retention may have acted on by now.

        A running broker settles messages and then removes them. So where the watermark has moved,
        what is not there any more is judged by a state that is newer than its removal.
        """
        synced = read_watermark(self._disk)
        return self._state if synced == self._watermark else replayed(self._disk.path, synced)[0]

    def _check_absent(self, now: LogState) -> None:
        """Segments that the newest snapshot has and the folder has not, or has compacted since."""
        if not self._snapshots:
            return
        newest = self._snapshots[max(self._snapshots)]
        for segment in newest.segments.all:
            generation = self._on_disk.get(segment.base)
            if generation == segment.generation:
                continue
            where = self._disk.where(segment.name)
            lost = False
            for number, span in segment.spans.items():
                if number in self._state.deleted or number in now.deleted:
                    continue
                # Of one whose blocks are all missing, the snapshot alone knows.
                queue = self._state.by_number.get(number) or newest.by_number[number]
                pending = now.by_number.get(number, queue).pending
                alive = pending.unsettled(span.first_offset, span.end_offset)
                for first, end in alive if generation is None else ():
                    lost = True
                    text = (
                        f"is missing, and with it offsets {first} to {end - 1} of queue {queue.name!r}, "
                        f"which are not settled"
                    )
                    self.report.defect("missing-segment", where, text, 0, queue.name, first, end)
                if queue.name == STAGE_QUEUE:
                    lost = lost or any(self._users(span.first_offset, span.end_offset, now))
                queue.offset_start = max(queue.offset_start, span.end_offset)
                queue.event_start = max(queue.event_start, span.end_event)
            if generation is None and not lost:
                self.report.note("removed-since", where, "was removed after the last snapshot")

    def _check_coverage(self, now: LogState) -> None:
        for number, queue in self._state.by_number.items():
            if queue.name == LAST_NAME:  # Blocks with its number are of one that was deleted.
                continue
            for state in (now, *self._snapshots.values()):
                known = state.by_number.get(number, queue)
                queue.offset_start = max(queue.offset_start, known.offset_start)
                queue.event_start = max(queue.event_start, known.event_start)
            complete_from, tail, next_event = queue.offset_start, queue.pending.tail, queue.next_event
            # The last blocks of a queue may be those that cannot be read.
            for state in self._snapshots.values() if self._unreliable else ():
                known = state.by_number.get(number, queue)
                tail, next_event = max(tail, known.pending.tail), max(next_event, known.next_event)
            pending = now.by_number.get(number, queue).pending
            offsets = self._offsets.get(number, _Coverage())
            if queue.name == STAGE_QUEUE:
                self._check_rows(offsets, tail, now)
                continue
            offsets.add(tail, tail, "", 0)
            for first, end, file, position in offsets.gaps:
                # Before the start only what is not settled must be there.
                runs = pending.unsettled(first, min(end, complete_from)) if first < complete_from else []
                if end > complete_from:
                    runs.append((max(first, complete_from), end))
                for a, b in runs:
                    self._gap("missing-offsets", "offset", queue.name, a, b, file, position)
            events = self._events.get(number, _Coverage())
            events.add(next_event, next_event, "", 0)
            for first, end, file, position in events.gaps:
                if end > queue.event_start:
                    first = max(first, queue.event_start)
                    self._gap("missing-events", "event", queue.name, first, end, file, position)

    def _check_rows(self, rows: _Coverage, tail: int, now: LogState) -> None:
        """Whatever somebody needs of the stage queue must be there."""
        end = max([tail, *self._named[1][-1:]])
        rows.add(end, end, "", 0)
        for first, behind, file, position in rows.gaps:
            for what, name, a, b in self._users(first, behind, now):
                before = f"before the block at position {position}: " if file else ""
                text = f"{before}what was staged is not in the log: {what}"
                self.report.defect("missing-rows", file, text, position, name, a, b)
        for hole, base, where in self._bad_rows:
            assert hole.header is not None
            its = hole.header.first_offset, hole.header.offset_end
            for what, name, a, b in list(self._users(*its, now)) or [(NOBODY_S_ROWS, "", 0, 0)]:
                bad = rot(hole, base, name, what)
                self.report.defect(bad.kind, where, bad.text, bad.position, name, a, b)

    def _users(self, first: int, end: int, now: LogState) -> Iterator[tuple[str, str, int, int]]:
        """Who needs these rows of the stage queue: in words, and of a queue its name and the offsets."""
        named, ends = self._named
        for at in range(bisect_right(ends, first), len(named)):
            run, offset, header = named[at]
            if run.row >= end:
                break
            a, b = offset + max(first - run.row, 0), offset + min(end - run.row, run.length)
            if a < b and header.queue not in now.deleted:
                name = self._name_of(header)
                yield f"queue {name!r}, offsets {a} to {b - 1}", name, a, b
        for stage in now.stages:
            if stage.first < end and first < stage.end:
                yield f"transaction {stage.info.key!r}, stage {stage.info.stage!r}", "", 0, 0

    @cached_property
    def _named(self) -> tuple[list[tuple[Run, int, Header]], list[int]]:
        """All rows that are messages, with the offset of each run, in order; and the highest end so far.
        Not to be asked for before everything has been read."""
        runs = [
            (run, offset, it.header)
            for it in chain.from_iterable(self._adoptions.values())
            for offset, run in zip(it.ends, it.runs, strict=False)
        ]
        runs.sort(key=lambda it: it[0].row)
        return runs, list(accumulate((run.row + run.length for run, _, _ in runs), max))

    def _tell_known_damage(self) -> None:
        if self._snapshots:
            newest = self._snapshots[max(self._snapshots)]
            self._known_damage[:0] = [damage.text for damage in newest.damage]
        for text in dict.fromkeys(self._known_damage):
            self.report.note("known-damage", "", text)

    def _gap(self, kind: str, what: str, name: str, first: int, end: int, file: str, position: int) -> None:
        before = f"before the block at position {position}: " if file else ""
        text = f"{before}queue {name!r}: {what}s {first} to {end - 1} are not in the log"
        self.report.defect(kind, file, text, position, name, first, end)
