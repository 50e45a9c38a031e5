"""Inspection: is everything in a data folder what was written, and does it fit together?

`inspect_log` reads every segment, every body and every snapshot of a folder, replays the log as
recovery would, and tells what it found. It takes no lock and changes nothing, so it may run
beside a broker: then it goes as far as the watermark says, and takes files that retention
removes meanwhile for what they are.

What is wrong is a defect, what a person may want to know is a note (`DEFECTS`, `NOTES`). Where
bytes cannot be read, the rest is read all the same.

How torn and damaged differ: a byte below the watermark, or below the `synced` mark of a later
block, was synced. If it is not valid any more it is damaged. Above both it is the rest of a last
group that nobody was promised, or that a broker is just writing.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from penstock.broker.pending import Line
from penstock.broker.policy import Policies
from penstock.engines.interface import EngineRefused, LogDamaged
from penstock.engines.log.block import (
    FLAG_END,
    FLAG_PART,
    HEADER_BYTES,
    KIND_CONTROL,
    KIND_MESSAGES,
    PROTOCOLS,
    Header,
    read_control,
    read_header,
    read_messages,
)
from penstock.engines.log.committer import SPARE
from penstock.engines.log.disk import WATERMARK, File, RealDisk, read_whole
from penstock.engines.log.ledger import read_rows
from penstock.engines.log.overlay import OverlayDisk
from penstock.engines.log.queue import LogQueue
from penstock.engines.log.recovery import QUARANTINE
from penstock.engines.log.scan import find_block, walk_blocks
from penstock.engines.log.segments import parse_segment_name, segment_name
from penstock.engines.log.snapshot import (
    PREFIX,
    SNAPSHOTS_KEPT,
    load_snapshot,
    snapshot_name,
    snapshot_positions,
)
from penstock.engines.log.state import LogSettings, LogState

DEFECTS = {
    "bad-header": "no valid block stands where one was synced",
    "bad-body": "a block does not have its checksum",
    "bad-content": "a block has its checksum, but its columns do not fit together",
    "missing-segment": "a part of the log is in no file",
    "missing-offsets": "messages that should be in the log are not",
    "missing-events": "events that should be in the log are not",
    "repeated-offsets": "offsets were given twice",
    "open-transaction": "a transaction has no end",
    "lost-name": "messages of a queue whose name is not in the log",
    "bad-snapshot": "a snapshot cannot be read",
    "snapshot-disagrees": "a snapshot does not say what the blocks before it say",
    "watermark-ahead": "the watermark promises more than there is",
}
NOTES = {
    "torn-tail": "the end of the log was being written, or was left unfinished; a start cuts it",
    "behind-watermark": "valid blocks that are not known to be synced",
    "no-watermark": "no watermark says how far the log is synced",
    "leftover": "a file of unfinished work; a start removes it",
    "quarantine": "damaged bytes that were set aside earlier",
    "known-damage": "damage that the log itself has on record",
    "removed-since": "retention removed a segment after the last snapshot",
    "not-compared": "the snapshots could not be compared with the blocks",
    "unknown-file": "a file that is not of this log",
}

_CHUNK_BYTES = 1024 * 1024


@dataclass(slots=True)
class Finding:
    """One thing that was found. Positions are in the file; ends are exclusive."""

    kind: str
    text: str
    file: str = ""
    position: int = 0
    queue: str = ""
    first: int = 0
    end: int = 0


@dataclass(slots=True)
class Report:
    """What `inspect_log` says about a folder."""

    segments: int = 0
    blocks: int = 0
    messages: int = 0
    events: int = 0
    bytes: int = 0
    queues: int = 0
    snapshots: int = 0
    position: int = 0  # where the log ends, as far as it was looked at
    defects: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)

    def fields(self) -> dict[str, Any]:
        return asdict(self)


class Hole(NamedTuple):
    """Bytes that are no valid block; with a header where that much is valid."""

    start: int  # log positions
    end: int
    header: Header | None


def walk(file: File, base: int, start: int, end: int) -> Iterator[tuple[Header, memoryview] | Hole]:
    """Everything from log position `start` to `end` of a segment that begins at `base`."""
    at = start
    while at < end:
        for header, body in walk_blocks(file, base, at, end):
            yield header, body
            at = header.end
        if at >= end:
            return
        bad = read_header(file.read(at - base, HEADER_BYTES), 0, at)
        if bad is not None and bad.end <= end:
            hole = Hole(at, bad.end, bad)
        else:
            found = find_block(file, base, at + 8, end)
            hole = Hole(at, found.position if found is not None else end, None)
        yield hole
        at = hole.end


def segments_of(names: list[str]) -> dict[int, int]:
    """Base and newest generation of the segments among some file names, in order."""
    newest: dict[int, int] = {}
    for name in names:
        parsed = parse_segment_name(name)
        if parsed is not None:
            newest[parsed[0]] = max(parsed[1], newest.get(parsed[0], 0))
    return dict(sorted(newest.items()))


def watermark_of(disk: RealDisk) -> int:
    """What the watermark says; 0 where it says nothing."""
    try:
        data = read_whole(disk, WATERMARK)
    except FileNotFoundError:
        return 0
    return int.from_bytes(data[:8], "little") if len(data) >= 8 else 0


def check_is_log(path: str) -> None:
    """EngineRefused where there is no folder, or no log in it."""
    try:
        names = RealDisk(path, read_only=True).names()
    except NotADirectoryError:
        raise EngineRefused(f"{path!r} is not a folder; name the data folder of a broker") from None
    except FileNotFoundError:
        raise EngineRefused(f"there is no folder {path!r}; name the data folder of a broker") from None
    except PermissionError:
        raise EngineRefused(f"{path!r} may not be read by this user") from None
    if not segments_of(names) and not any(name.startswith(PREFIX) for name in names):
        raise EngineRefused(f"there is no log in {path!r}: no segment (*.seg) and no snapshot")


Progress = Callable[[int, int], None]  # bytes done, bytes in all


def inspect_log(path: str, progress: Progress | None = None) -> Report:
    """Look at everything; see the module's docstring. EngineRefused where there is no log."""
    check_is_log(path)
    return _Inspection(path, progress).run()


class _Coverage:
    """Which offsets or events of one queue were seen, as the gaps between them."""

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
        self._watermark = watermark_of(self._disk)
        self._overlay = OverlayDisk(path)
        self._names = self._overlay.names()
        self._on_disk = segments_of(self._names)
        self._snapshot_positions = sorted(snapshot_positions(self._overlay))
        # A snapshot is written when everything before it is synced: it is as good as a watermark.
        self._synced = max(self._watermark, *self._snapshot_positions, 0)
        self._progress = progress
        self._bytes_total = self._bytes_done = 0
        self._snapshots: dict[int, LogState] = {}  # those that could be read, oldest first
        self._sealed: dict[int, int] = {}  # where a segment ends, as far as snapshots say, by base
        self._state = LogState(self._overlay, LogSettings(), Policies())
        self._replay_from = 0
        self._to_compare: list[int] = []
        self._unreliable = False  # something that replaying needs could not be read
        self._part: list[tuple[Header, memoryview, str]] = []  # a transaction without its end yet
        self._offsets: dict[int, _Coverage] = {}
        self._events: dict[int, _Coverage] = {}
        self._end = 0  # of the last valid block that counts
        self._behind = [0, 0]  # blocks and bytes behind the watermark
        self.report = Report()

    def run(self) -> Report:
        self._look_at_names()
        self._load_snapshots()
        self._choose_start()
        bases = list(self._on_disk)
        before = 0
        for base, next_base in zip(bases, [*bases[1:], None], strict=True):
            self._check_no_gap(before, base)
            reached = self._segment(base, next_base)
            if reached is None:
                break
            before = reached
        self._check_end()
        self._check_absent()
        self._check_coverage()
        report = self.report
        report.segments = len(self._on_disk)
        report.queues = len(self._state.queues)
        report.position = self._end
        return report

    def _defect(
        self,
        kind: str,
        file: str,
        text: str,
        position: int = 0,
        queue: str = "",
        first: int = 0,
        end: int = 0,
    ) -> None:
        assert kind in DEFECTS, kind
        text = f"{file}: {text}" if file else text
        self.report.defects.append(Finding(kind, text, file, position, queue, first, end))

    def _note(self, kind: str, file: str, text: str, position: int = 0) -> None:
        assert kind in NOTES, kind
        text = f"{file}: {text}" if file else text
        self.report.notes.append(Finding(kind, text, file, position))

    # --- names and snapshots -------------------------------------------------------------------------

    def _look_at_names(self) -> None:
        for name in self._names:
            where = self._disk.where(name)
            parsed = parse_segment_name(name)
            if parsed is not None:
                if parsed[1] < self._on_disk[parsed[0]]:
                    self._note("leftover", f"{where}: a compacted segment has taken its place", file=where)
            elif name.startswith(QUARANTINE):
                self._note("quarantine", f"{where}: damaged bytes that were set aside earlier", file=where)
            elif name.endswith(".tmp"):
                self._note("leftover", f"{where}: was not finished; the next start removes it", file=where)
            elif name not in (SPARE, RealDisk.LOCK, WATERMARK) and not name.startswith(PREFIX):
                self._note("unknown-file", f"{where}: is not of this log", file=where)
        if not self._watermark:
            where = self._disk.where(WATERMARK)
            self._note("no-watermark", f"{where}: says nothing; the blocks say what is synced", file=where)

    def _load_snapshots(self) -> None:
        for position in self._snapshot_positions:
            state = LogState(self._overlay, LogSettings(), Policies())
            where = self._disk.where(snapshot_name(position))
            try:
                load_snapshot(state, position)
            except FileNotFoundError:
                continue  # A newer one has taken its place since the names were taken.
            except (LogDamaged, ValueError, KeyError, TypeError, RuntimeError) as error:
                text = str(error) if isinstance(error, LogDamaged) else f"{where}: makes no sense: {error!r}"
                self._defect("bad-snapshot", text, file=where)
                continue
            self._snapshots[position] = state
            for segment in state.segments.all:
                if segment.end < position:
                    self._sealed[segment.base] = segment.end
        self.report.snapshots = len(self._snapshots)

    def _choose_start(self) -> None:
        """Replaying begins with the first block ever, or where the oldest snapshot stands."""
        self._to_compare = list(self._snapshots)
        if not self._snapshots:
            return
        before = 0
        for segment in self._snapshots[self._to_compare[-1]].segments.all:
            if segment.base != before or segment.generation or self._on_disk.get(before) != 0:
                self._replay_from = self._to_compare.pop(0)
                self._state = self._snapshots[self._replay_from]
                break
            before = segment.end
        for damage in self._state.damage:
            self._note("known-damage", damage.text, file=damage.file, position=damage.position)

    # --- segments ------------------------------------------------------------------------------------

    def _check_no_gap(self, before: int, base: int) -> None:
        """Retention leaves gaps, but only before the oldest snapshot."""
        oldest = self._snapshot_positions[0] if len(self._snapshot_positions) == SNAPSHOTS_KEPT else 0
        if before < base and base > oldest:
            self._missing_positions(before, base)

    def _missing_positions(self, start: int, end: int) -> None:
        self._unreliable = True
        where = self._disk.where(segment_name(start, 0))
        self._defect(
            "missing-segment",
            f"{where}: is missing; the log positions from {start} to {end} are in no file",
            file=where,
        )

    def _segment(self, base: int, next_base: int | None) -> int | None:
        """Look at one segment; where it ends, or None where the log ends in it."""
        opened = self._open(base)
        if opened is None:
            return next_base
        name, generation, file = opened
        where = self._disk.where(name)
        try:
            file_end = base + file.size()
            if generation:
                self._compacted(file, base, file_end, where)
                return self._sealed.get(base, next_base or file_end)
            limit = self._sealed.get(base) or next_base
            for found in walk(file, base, base, min(file_end, limit or file_end)):
                if isinstance(found, Hole):
                    if not self._hole(found, file, base, where, next_base):
                        return None
                    continue
                header, body = found
                self._tick(HEADER_BYTES + header.body_bytes)
                if self._watermark and header.position >= self._synced:
                    self._behind[0] += 1
                    self._behind[1] += HEADER_BYTES + header.body_bytes
                    continue
                self._block(header, body, base, where)
                self._end = header.end
        finally:
            file.close()
        if limit is not None and file_end < limit:
            self._missing_positions(file_end, limit)
        return limit

    def _open(self, base: int) -> tuple[str, int, File] | None:
        """The file of a segment, which a broker may replace or remove meanwhile."""
        while True:
            generation = self._on_disk[base]
            name = segment_name(base, generation)
            try:
                return name, generation, self._disk.open(name)
            except FileNotFoundError:
                newer = segments_of(self._disk.names()).get(base)
                if newer is None or newer == generation:
                    del self._on_disk[base]
                    return None
                self._on_disk[base] = newer

    def _compacted(self, file: File, base: int, end: int, where: str) -> None:
        """Messages that were alive when the segment was compacted. All of it was synced."""
        for found in walk(file, base, base, end):
            if isinstance(found, Hole):
                self._damaged(found, base, where)
                continue
            header, body = found
            self._tick(HEADER_BYTES + header.body_bytes)
            if header.position >= self._replay_from:
                queue = self._state.by_number.get(header.queue)
                if queue is not None and queue.pending.tail < header.first_offset:
                    queue.pending.tail = header.first_offset
                    queue.next_event = header.first_event
            self._block(header, body, base, where)

    def _tick(self, length: int) -> None:
        self._bytes_done += length
        if self._progress is not None:
            self._progress(self._bytes_done, max(self._synced - min(self._on_disk, default=0), 0))

    # --- holes ---------------------------------------------------------------------------------------

    def _hole(self, hole: Hole, file: File, base: int, where: str, next_base: int | None) -> bool:
        """Damage, a missing segment, or the end of the log (False)."""
        is_last = next_base is None
        if hole.header is None and _is_blank(file, base, hole):
            if hole.start >= self._synced and (is_last or not self._proof(file, base, hole.start)):
                return False
            if not is_last:
                # The segment was not filled to the end of its file, and what came after it is not here.
                self._missing_positions(hole.start, hole.end)
                return True
        if hole.start < self._synced or self._proof(file, base, hole.start):
            self._damaged(hole, base, where)
            return True
        at = hole.start - base
        self._note(
            "torn-tail",
            f"{where}: behind position {at} nothing is whole that was synced: a group is being written, "
            f"or was left unfinished, and then the next start cuts it",
            file=where,
            position=at,
        )
        return False

    def _proof(self, file: File, base: int, at: int) -> bool:
        """Whether a valid block further on was built when `at` had been synced."""
        end = base + file.size()
        search = at + 8
        synced = 0
        while synced <= at and (found := find_block(file, base, search, end)) is not None:
            synced, search = found.synced, found.end
        for later, generation in self._on_disk.items():
            if synced > at or later <= base or generation:
                continue
            later_file = self._overlay.open(segment_name(later, 0))
            try:
                first = find_block(later_file, later, later, later + later_file.size())
            finally:
                later_file.close()
            synced = first.synced if first is not None else 0
        # A broker that is at work may have filled the hole since it was seen; then it has said so.
        return synced > at and watermark_of(self._disk) == self._watermark

    def _damaged(self, hole: Hole, base: int, where: str) -> None:
        self._unreliable = True
        at, header = hole.start - base, hole.header
        if header is None:
            self._defect(
                "bad-header",
                f"{where}: {hole.end - hole.start} bytes at position {at} are no valid block",
                file=where,
                position=at,
            )
            return
        name = self._name_of(header)
        what = "a control block"
        first = end = 0
        if header.kind == KIND_MESSAGES:
            first, end = header.first_offset, header.offset_end
            what = f"queue {name!r}, offsets {first} to {end - 1}"
        elif header.kind != KIND_CONTROL:
            first_event, end_event = header.first_event, header.first_event + header.event_count
            what = f"queue {name!r}, events {first_event} to {end_event - 1}"
        # What it held is told here, and not once more as a gap.
        self._cover(header, where, at)
        self._defect(
            "bad-body",
            f"{where}: the block at position {at} does not have its checksum: {what}",
            file=where,
            position=at,
            queue=name,
            first=first,
            end=end,
        )

    # --- blocks --------------------------------------------------------------------------------------

    def _name_of(self, header: Header) -> str:
        queue = self._state.by_number.get(header.queue)
        return queue.name if queue is not None else f"unknown-{header.queue}" if header.queue else ""

    def _cover(self, header: Header, where: str, at: int) -> None:
        if header.kind == KIND_CONTROL:
            return
        events = self._events.setdefault(header.queue, _Coverage())
        events.add(header.first_event, header.first_event + header.event_count, where, at)
        if header.kind == KIND_MESSAGES:
            offsets = self._offsets.setdefault(header.queue, _Coverage())
            if header.first_offset < offsets.end:
                name = self._name_of(header)
                first, end = header.first_offset, min(offsets.end, header.offset_end)
                self._defect(
                    "repeated-offsets",
                    f"{where}: the block at position {at} has offsets {first} to {end - 1} of queue {name!r} "
                    f"once more",
                    file=where,
                    position=at,
                    queue=name,
                    first=first,
                    end=end,
                )
            offsets.add(header.first_offset, header.offset_end, where, at)

    def _block(self, header: Header, body: memoryview, base: int, where: str) -> None:
        """A block that has its checksum."""
        at = header.position - base
        report = self.report
        report.blocks += 1
        report.bytes += HEADER_BYTES + header.body_bytes
        report.events += header.event_count
        if header.kind == KIND_MESSAGES:
            report.messages += header.count
        self._cover(header, where, at)
        problem = _problem(header, body)
        if problem:
            self._unreliable = True
            self._defect(
                "bad-content",
                f"{where}: the block at position {at}: {problem}",
                file=where,
                position=at,
                queue=self._name_of(header),
            )
            return
        if header.position < self._replay_from:
            return
        self._compare_until(header.position)
        is_part = bool(header.flags & FLAG_PART)
        if self._part and not is_part:
            self._open_transaction()
        self._part.append((header, body, where))
        if not is_part or header.flags & FLAG_END:
            self._apply_part()

    def _open_transaction(self) -> None:
        """Something else stands where the end of a transaction should be."""
        header, _, where = self._part[0]
        name = self._name_of(header)
        self._unreliable = True
        self._defect(
            "open-transaction",
            f"{where}: the transaction that begins at log position {header.position} has no end: queue "
            f"{name!r}, offsets {header.first_offset} to {header.offset_end - 1} and what came with them",
            file=where,
            queue=name,
            first=header.first_offset,
            end=header.offset_end,
        )
        self._apply_part()

    def _apply_part(self) -> None:
        for header, body, where in self._part:
            if header.kind == KIND_CONTROL:
                fields = read_control(body)
                if fields["op"] == "damage":
                    self._note("known-damage", fields["damage"]["text"], file=fields["damage"]["file"])
            elif header.queue not in self._state.by_number:
                self._unreliable = True
                self._defect(
                    "lost-name",
                    f"{where}: no block says what the queue with number {header.queue} is called; it is "
                    f"shown as {self._name_of(header)!r}",
                    file=where,
                    queue=self._name_of(header),
                )
            try:
                self._state.apply(header, body)
            except (LogDamaged, ValueError, KeyError, TypeError) as error:
                self._unreliable = True
                self._defect(
                    "bad-content",
                    f"{where}: the block at log position {header.position} cannot be applied: {error}",
                    file=where,
                    queue=self._name_of(header),
                )
        self._part.clear()

    # --- snapshots against blocks --------------------------------------------------------------------

    def _compare_until(self, position: int) -> None:
        """Compare the state with the snapshots that stand at or before `position`."""
        while self._to_compare and self._to_compare[0] <= position:
            at = self._to_compare.pop(0)
            where = self._disk.where(snapshot_name(at))
            if self._unreliable:
                text = f"{where}: was not compared with the blocks, because some of them are damaged"
                self._note("not-compared", text, file=where)
                continue
            for difference in differences(self._state, self._snapshots[at]):
                self._defect("snapshot-disagrees", f"{where}: {difference}", file=where)

    # --- what should be there ------------------------------------------------------------------------

    def _check_end(self) -> None:
        blocks, length = self._behind
        if blocks:
            self._note(
                "behind-watermark",
                f"{blocks} blocks ({length} bytes) behind log position {self._synced} are valid, and not known "
                f"to be synced; the next start takes them in",
            )
        if self._part:
            self._end = self._part[0][0].position
            if self._synced:
                self._open_transaction()
            else:
                where = self._part[0][2]
                text = f"{where}: the last transaction has no end; the next start cuts it"
                self._note("torn-tail", text, file=where)
                self._part.clear()
        if self._end < self._synced and not self._unreliable:
            says = WATERMARK if self._watermark == self._synced else snapshot_name(self._synced)
            self._unreliable = True
            self._defect(
                "watermark-ahead",
                f"{self._disk.where(says)}: the log was synced up to position {self._synced}, but its blocks "
                f"end at {self._end}",
                file=self._disk.where(says),
            )
        self._compare_until(max(self._end, self._synced))

    def _check_absent(self) -> None:
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
                queue = self._state.by_number[number]
                for first, end in queue.pending.unsettled(span.first_offset, span.end_offset):
                    if generation is None:
                        lost = True
                        self._defect(
                            "missing-segment",
                            f"{where}: is missing, and with it offsets {first} to {end - 1} of queue "
                            f"{queue.name!r}, which are not settled",
                            file=where,
                            queue=queue.name,
                            first=first,
                            end=end,
                        )
                queue.offset_start = max(queue.offset_start, span.end_offset)
                queue.event_start = max(queue.event_start, span.end_event)
            if generation is None and not lost:
                self._note("removed-since", f"{where}: was removed after the last snapshot", file=where)

    def _check_coverage(self) -> None:
        for number, queue in self._state.by_number.items():
            for state in self._snapshots.values():
                known = state.by_number.get(number)
                if known is not None:
                    queue.offset_start = max(queue.offset_start, known.offset_start)
                    queue.event_start = max(queue.event_start, known.event_start)
            offsets = self._offsets.get(number, _Coverage())
            offsets.add(queue.pending.tail, queue.pending.tail, "", 0)
            for a, b, file, position in offsets.gaps:
                start = max(a, queue.offset_start)
                lost = (
                    queue.pending.unsettled(a, min(b, queue.offset_start)) if a < queue.offset_start else []
                )
                for first, end in [*lost, *([(start, b)] if start < b else [])]:
                    self._gap("missing-offsets", "offset", queue.name, first, end, file, position)
            events = self._events.get(number, _Coverage())
            events.add(queue.next_event, queue.next_event, "", 0)
            for a, b, file, position in events.gaps:
                first = max(a, queue.event_start)
                if first < b:
                    self._gap("missing-events", "event", queue.name, first, b, file, position)

    def _gap(self, kind: str, what: str, name: str, first: int, end: int, file: str, position: int) -> None:
        showed = f"{file}: before the block at position {position}, " if file else ""
        self._defect(
            kind,
            f"{showed}queue {name!r}: {what}s {first} to {end - 1} are not in the log",
            file=file,
            position=position,
            queue=name,
            first=first,
            end=end,
        )


def _is_blank(file: File, base: int, hole: Hole) -> bool:
    """Whether there is nothing but zeros: a file has room that is not used yet."""
    at = hole.start
    while at < hole.end:
        data = file.read(at - base, min(_CHUNK_BYTES, hole.end - at))
        if not data:
            return True
        if data.count(0) != len(data):
            return False
        at += len(data)
    return True
