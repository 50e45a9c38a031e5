"""Recovery: from the files of a log to its state.

    1. Take the newest snapshot that can be read.
    2. Walk over the blocks after it and apply each. Older segments are not read.
    3. Where no valid block stands, look further: a valid block that was written when this place had
       already been synced proves damage, and so does the watermark. Report it, set the bytes aside,
       go on behind it. Without proof it is the torn tail of the last group, which nobody was promised.
    4. Cut the torn tail, and a transaction that has no end.
    5. Write again what may be known to the kernel only, and sync it: from now on it is shown as synced.
    6. Say which messages an overlap of segments puts in doubt, where an earlier version has left one.

Rules that always hold:
  * What was synced is in the state, or in the damage report. Nothing is skipped in silence.
  * The cut is on the disk before anything new is written behind it: a second crash cannot bring
    back what the first one took.
"""

import gc
import logging

from penstock.log.adoption import read_adoption
from penstock.log.block import (
    FLAG_ELSEWHERE,
    FLAG_END,
    FLAG_PART,
    HEADER_BYTES,
    KIND_MESSAGES,
    Header,
    read_header,
)
from penstock.log.committer import SPARE
from penstock.log.disk import File, discard, read_watermark, write_whole
from penstock.log.errors import LogDamaged
from penstock.log.overlaps import Overlap, find_overlaps
from penstock.log.retention import move_starts
from penstock.log.scan import CHUNK_BYTES, find_block, find_headers, read_body, walk_blocks
from penstock.log.segment import Segment, parse_segment_name, segment_name
from penstock.log.snapshot import load_snapshot, snapshot_name, snapshot_positions
from penstock.log.state import Damage, LogState

log = logging.getLogger("penstock.log")

QUARANTINE = "quarantine-"
DOUBTS_TOLD = 20  # runs of offsets that a line names


def recover(state: LogState) -> int:
    """Fill a fresh `state` from its disk; the log position at which to go on."""
    was_enabled = gc.isenabled()
    gc.disable()  # What is made here stays: to look through it again and again takes longer than to make it.
    try:
        return _Recovery(state).run()
    finally:
        if was_enabled:
            gc.enable()


class _Recovery:
    def __init__(self, state: LogState) -> None:
        self._state = state
        self._disk = state.disk
        self._part: list[tuple[Header, memoryview, Segment]] = []  # a transaction without its end yet
        self._missing: list[Segment] = []  # segments that the snapshot knows and the folder does not
        self._synced = 0  # everything before this is known to be on the disk
        self._published = 0  # everything before this had been synced, says a watermark or a snapshot

    def run(self) -> int:
        # A name may be known to the kernel only. Nothing may be removed because of one before the
        # disk knows it too.
        self._disk.sync_names()
        on_disk = self._clean_names()
        self._published = max([read_watermark(self._disk), *snapshot_positions(self._disk)])
        start = self._synced = self._load_snapshot()
        self._match_segments(on_disk, start)
        position = self._replay(start)
        if self._published <= position:
            self._synced = max(self._synced, self._published)
        else:
            self._tell_end(position)
        self._write_again()
        self._report_missing()
        self._state.report_rows()
        self._report_payloads()
        for overlap in find_overlaps(self._disk, self._state.segments.all):
            self._tell_overlap(overlap)
        for segment in self._state.segments.all:
            self._state.segments.drop(self._state.unknown_in(segment))
        return position

    # --- names -----------------------------------------------------------------------------------

    def _clean_names(self) -> dict[int, int]:
        """Remove what is left of unfinished work; base → generation of the segments."""
        newest: dict[int, int] = {}
        twice: set[int] = set()
        for name in self._disk.names():
            parsed = parse_segment_name(name)
            if parsed is not None:
                base, generation = parsed
                if base in newest:
                    twice.add(base)
                newest[base] = max(generation, newest.get(base, 0))
        for base in twice:
            # Where the process before this one failed to sync a name, no later sync can be trusted with
            # it; with a new name it can. Only then the older generation may go.
            self._disk.rename(segment_name(base, newest[base]), segment_name(base, newest[base] + 1))
            newest[base] += 1
        if twice:
            self._disk.sync_names()
        for name in self._disk.names():
            parsed = parse_segment_name(name)
            outdated = parsed is not None and parsed[1] < newest[parsed[0]]
            if outdated or name.startswith(SPARE) or name.endswith(".tmp"):
                # Not synced: where the disk forgets this, the next opening does it again.
                self._disk.remove(name)
        return newest

    def _load_snapshot(self) -> int:
        failures = []
        for position in snapshot_positions(self._disk):
            try:
                load_snapshot(self._state, position)
            except LogDamaged as error:
                # Set aside, or it would count as one of those that retention may rely on.
                aside = QUARANTINE + snapshot_name(position)
                self._disk.rename(snapshot_name(position), aside)
                where = self._disk.where(snapshot_name(position))
                text = f"{error}; it is kept as {self._disk.where(aside)}; an older one was used"
                failures.append(Damage(where, 0, "", 0, 0, text))
                self._state.reset()
                continue
            break
        else:
            position = 0
        for damage in failures:
            self._state.tell(damage)
        return position

    def _match_segments(self, on_disk: dict[int, int], start: int) -> None:
        """Make the list of segments what the folder says; the snapshot may be older."""
        state = self._state
        for segment in list(state.segments.all):
            generation = on_disk.get(segment.base)
            if generation is None:
                move_starts(state, segment)
                state.segments.replace(segment, None)
                self._missing.append(segment)
            elif generation != segment.generation:
                move_starts(state, segment)
                state.segments.replace(segment, self._describe(segment.base, generation))
        known = {segment.base for segment in state.segments.all}
        if not start and on_disk and (min(on_disk) or any(on_disk.values())):
            # Retention has taken something, and the snapshots that knew what are gone.
            state.begins_late = True
            first = Segment(min(on_disk), on_disk[min(on_disk)], 0, 0, sealed=True)
            where = self._disk.where(first.name)
            text = f"{where}: the log begins here and there is no snapshot: what was before is lost"
            state.damage.append(Damage(where, 0, "", 0, 0, text))
        for base in sorted(on_disk):
            if base not in known:
                segment = Segment(base, on_disk[base], 0, 0, sealed=True)
                if base < start:
                    self._remove_again(segment)
                    continue
                state.segments.add(segment)

    def _remove_again(self, segment: Segment) -> None:
        """Retention had removed it when the snapshot was written, and the disk forgot that; or a person has
        put it back. That may be where something was lost before, whatever the report could say of it then."""
        where = self._disk.where(segment.name)
        if not self._state.damage:
            log.info("%s: removed once more", where)
            discard(self._disk, segment.name)
            return
        aside = QUARANTINE + segment.name
        self._disk.rename(segment.name, aside)
        text = (
            f"{where} is here again, and the log has gone on without it: it was missing at an earlier start "
            f"and given up, or retention had removed it; it is kept as {self._disk.where(aside)}"
        )
        self._state.tell(Damage(where, 0, "", 0, 0, text))

    def _report_payloads(self) -> None:
        """Repaired messages whose repair queue has lost its name: the next one has other payloads there."""
        state = self._state
        for queue in state.queues.values():
            for first, end, _ in list(queue.repairs) if queue.repair_queue is None else ():
                text = (
                    f"queue {queue.name!r}: offsets {first} to {end - 1} were repaired, and the name of the "
                    f"queue with their payloads is lost"
                )
                state.tell(Damage("", 0, queue.name, first, end, text))
                state.lose(queue, first, end)

    def _report_missing(self) -> None:
        """Retention removes a segment whose messages are settled, some perhaps after the snapshot.

        So what is alive when everything has been replayed, and only that, is lost.
        """
        state = self._state
        spans = [(segment, *item) for segment in self._missing for item in segment.spans.items()]
        for segment, number, span in spans:
            queue = state.by_number.get(number)
            if queue is None:  # It was deleted after the snapshot.
                continue
            if number == state.segments.stage_queue:
                why = f"{self._disk.where(segment.name)}, which has them, is missing"
                state.lose_rows(span.first_offset, span.end_offset, why)
            for first, end in queue.pending.unsettled(span.first_offset, span.end_offset):
                state.damage.append(
                    Damage(
                        self._disk.where(segment.name),
                        0,
                        queue.name,
                        first,
                        end,
                        f"{self._disk.where(segment.name)} is missing: queue {queue.name!r} has lost "
                        f"offsets {first} to {end - 1}",
                    )
                )
                state.lose(queue, first, end)

    def _describe(self, base: int, generation: int) -> Segment:
        """A compacted segment that is newer than the snapshot: its headers say what is in it."""
        segment = Segment(base, generation, 0, 0, sealed=True)
        file = self._disk.open(segment.name)
        try:
            size = file.size()
            for header in find_headers(file, base, base, base + size):
                if header.position != segment.end:
                    self._tell_bytes(segment, segment.end, header.position)
                segment.note(header)
                body = self._runs_of(segment, file, header)
                if body:
                    segment.adopt(read_adoption(header, body))
            if segment.size != size:
                self._tell_bytes(segment, segment.end, base + size)
            segment.size = size
        finally:
            file.close()
        segment.limit = segment.size
        return segment

    def _runs_of(self, segment: Segment, file: File, header: Header) -> memoryview:
        """The body of an adoption block of a compacted segment; empty for any other. Where it is damaged,
        whoever wants its messages finds out."""
        if header.kind != KIND_MESSAGES or not header.flags & FLAG_ELSEWHERE:
            return memoryview(b"")
        try:
            return read_body(file, segment.base, header, self._disk.where(segment.name))
        except LogDamaged:
            return memoryview(b"")

    # --- blocks ----------------------------------------------------------------------------------

    def _replay(self, start: int) -> int:
        segments = self._state.segments
        position = start
        for at, segment in enumerate(list(segments.all)):
            next_base = segments.all[at + 1].base if at + 1 < len(segments.all) else None
            if segment.generation:
                if segment.base >= start:
                    self._apply_compacted(segment)
                    # It may be the last one that there is: what is new stands behind it, and has another
                    # base even where all bytes of this one are gone.
                    position = max(position, segments.all[at].end, segment.base + HEADER_BYTES)
                continue
            if segment.end < start or (next_base is not None and next_base <= start):
                continue
            if 0 < position == start < segment.base:
                # The segment in which the snapshot ends is not there.
                self._tell_missing(start, segment.base)
            file = self._disk.open(segment.name)
            try:
                file_end = segment.base + file.size()
                whole_end = file_end if next_base is None else next_base
                position = self._replay_segment(segment, file, max(start, segment.base), file_end, whole_end)
                if position < whole_end or next_base is None:
                    position = self._drop_part(position)
                    # A file without a byte goes too: the next segment gets its place and name.
                    if position < whole_end or position == segment.base:
                        self._cut(segment, file, position, at)
                    return position
            finally:
                file.close()
        return position

    def _apply_compacted(self, segment: Segment) -> None:
        """Without a snapshot: the messages that were alive when the segment was compacted."""
        state = self._state
        segments = state.segments
        described = self._describe(segment.base, segment.generation)
        segments.replace(segment, described)
        file = self._disk.open(described.name)
        try:
            known = len(state.damage)
            for header in find_headers(file, described.base, described.base, described.end):
                # Of messages only the header counts, and where they are if that is elsewhere.
                state.apply(header, self._runs_of(described, file, header))
            self._name_file(known, described)
        finally:
            file.close()
        move_starts(state, described)

    def _replay_segment(self, segment: Segment, file: File, begin: int, file_end: int, whole_end: int) -> int:
        """Apply the blocks of a segment up to `whole_end`; where the first torn one should be."""
        at = begin
        while True:
            for header, body in walk_blocks(file, segment.base, at, min(file_end, whole_end)):
                self._take(header, body, segment)
                at = header.end
            if at >= whole_end:
                return at
            further = self._behind_damage(segment, file, at, min(file_end, whole_end))
            if further is None:
                return at
            further = further or whole_end
            # The file may have been cut before the place where the snapshot ends.
            rest = file.read(at - segment.base, max(min(file_end, further) - at, 0))
            if further > file_end and not rest.strip(b"\0"):
                self._tell_missing(at, further)
            else:
                self._report(segment, file, at, further)
            at = further

    def _take(self, header: Header, body: memoryview, segment: Segment) -> None:
        self._synced = max(self._synced, header.synced)
        if header.flags & FLAG_PART:
            self._part.append((header, body, segment))
            if not header.flags & FLAG_END:
                return
            self._apply_part()
            return
        # A part whose end is missing, but not at the end of the log: the end was damaged, and it
        # had been synced like everything before this block. So the transaction was committed.
        self._apply_part()
        self._apply(header, body, segment)

    def _apply_part(self) -> None:
        for header, body, segment in self._part:
            self._apply(header, body, segment)
        self._part.clear()

    def _apply(self, header: Header, body: memoryview, segment: Segment) -> None:
        known = len(self._state.damage)
        self._state.apply(header, body)
        self._name_file(known, segment)
        self._state.segments.put(segment, header)
        if header.kind == KIND_MESSAGES and header.flags & FLAG_ELSEWHERE:
            segment.adopt(read_adoption(header, body))

    def _name_file(self, known: int, segment: Segment) -> None:
        """The state knows positions of the log; a person looks into files."""
        for damage in self._state.damage[known:]:
            if not damage.file:
                damage.file = self._disk.where(segment.name)
                damage.position -= segment.base

    def _drop_part(self, position: int) -> int:
        if self._part:
            position = self._part[0][0].position
            self._part.clear()
        return position

    # --- torn or damaged? ------------------------------------------------------------------------

    def _behind_damage(self, segment: Segment, file: File, at: int, end: int) -> int | None:
        """Where to go on behind damaged bytes at `at` (0: in the next segment); None: a torn tail.

        The proof of damage is a valid block further on that was written when `at` had been synced
        already (the first valid block may stand before that one), or a watermark behind `at`: readers
        have seen what stood there, and may have it mapped, so it is not cut.
        """
        first = 0
        search = at + 8
        while (found := find_block(file, segment.base, search, end)) is not None:
            first = first or found.position
            if found.synced > at:
                return first
            search = found.end
        if self._synced_by_later_segment(segment, at):
            return first
        if self._published <= at:
            return None
        # Behind the watermark it is asked again whether the tail is torn.
        further = min(first or end, self._published)
        return further if further < end else 0

    def _synced_by_later_segment(self, segment: Segment, at: int) -> bool:
        for later in self._state.segments.all:
            if later.base <= segment.base:
                continue
            if later.generation:
                return True  # It lay behind two snapshots when it was compacted.
            file = self._disk.open(later.name)
            try:
                headers = find_headers(file, later.base, later.base, later.base + file.size())
                if any(header.synced > at for header in headers):
                    return True
            finally:
                file.close()
        return False

    def _report(self, segment: Segment, file: File, at: int, end: int) -> None:
        """Damaged bytes from `at` to `end`: into the report, and a copy into quarantine."""
        self._apply_part()
        name = f"{QUARANTINE}{segment.base:020d}-{at - segment.base}"
        write_whole(self._disk, name, file.read(at - segment.base, end - at))
        segment.size = end - segment.base
        kept = f"; they are kept in {self._disk.where(name)}. What they held is told by the gaps that follow"
        self._tell_bytes(segment, at, end, kept)
        known = len(self._state.damage)
        while True:
            header = read_header(file.read(at - segment.base, HEADER_BYTES), 0, at)
            if header is None or header.end > end:
                break
            self._state.pass_over(header)
            at = header.end
        self._name_file(known, segment)

    def _tell_bytes(self, segment: Segment, at: int, end: int, more: str = "") -> None:
        where = self._disk.where(segment.name)
        text = f"{where}: {end - at} bytes at position {at - segment.base} are damaged{more}"
        self._state.damage.append(Damage(where, at - segment.base, "", 0, 0, text))

    def _tell_end(self, position: int) -> None:
        """Bytes at the end of the log that had been synced are not there; or the watermark is damaged."""
        last = self._state.segments.all[-1] if self._state.segments.all else Segment(0, 0, 0, 0, sealed=True)
        where = self._disk.where(last.name)
        text = (
            f"{where}: the log ends at position {last.size}; {self._published - position} bytes behind it "
            f"that had been synced are not there"
        )
        self._state.tell(Damage(where, last.size, "", 0, 0, text))

    def _tell_overlap(self, overlap: Overlap) -> None:
        """Nothing is missing, so that nobody is kept from these messages: they are named, no more."""
        segment = overlap.segment
        where = self._disk.where(segment.name)
        start = overlap.next_base - segment.base
        text = f"{where}: is longer than what it was made from: behind position {start} it overlaps the next"
        if not overlap.doubts:
            self._state.tell(Damage(where, start, "", 0, 0, f"{text}; no message is in doubt by that"))
        for number, runs in overlap.doubts.items():
            if number not in self._state.by_number:  # It was deleted.
                continue
            name = self._state.by_number[number].name
            offsets = ", ".join(f"{first} to {end - 1}" for first, end in runs[:DOUBTS_TOLD])
            more = f" and {len(runs) - DOUBTS_TOLD} runs more" if len(runs) > DOUBTS_TOLD else ""
            told = (
                f"{text}, so that an earlier version may have delivered other messages' payloads for offsets "
                f"{offsets}{more} of queue {name!r}; `penstock verify` names them all"
            )
            self._state.tell(Damage(where, start, name, 0, 0, told))

    def _tell_missing(self, at: int, end: int) -> None:
        """Nothing stands behind the end of a segment, and the next one begins further on."""
        self._apply_part()
        gone = [segment.name for segment in self._missing if segment.base <= at <= segment.end]
        where = self._disk.where(gone[0] if gone else segment_name(at, 0))
        text = f"{where} is missing, or the segment before it is cut short: {end - at} bytes are not there"
        self._state.damage.append(Damage(where, 0, "", 0, 0, text))

    # --- the cut ---------------------------------------------------------------------------------

    def _cut(self, segment: Segment, file: File, position: int, at: int) -> None:
        """Take the torn tail off the disk, for good."""
        segments = self._state.segments
        gone = segments.all[at + 1 :]
        if position == segment.base:
            gone.append(segment)
        for it in gone:
            segments.replace(it, None)
            self._disk.remove(it.name)
        if position > segment.base:
            file.truncate(position - segment.base)
            file.sync()
            segment.size = segment.limit = position - segment.base
        if gone:
            self._disk.sync_names()

    def _write_again(self) -> None:
        """Make sure of the last blocks, which the process before this one may not have synced.

        A sync alone would not do: when one has failed, the kernel may believe that the bytes are on
        the disk, and the next sync has nothing to do. Bytes that are written again it must write.
        """
        for segment in self._state.segments.all:
            start = max(self._synced - segment.base, 0)
            if segment.generation or start >= segment.size:
                continue
            file = self._disk.open(segment.name)
            try:
                for at in range(start, segment.size, CHUNK_BYTES):
                    file.write(at, [file.read(at, min(CHUNK_BYTES, segment.size - at))])
                file.sync()
            finally:
                file.close()
