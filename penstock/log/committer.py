"""Committer: blocks go in, durable blocks come out, many at a time.

What arrives while one group is being written and synced gathers for the next: group commit.
Positions are given when a block is added, so everything that is known about it is known at
once; only its bytes are still on their way.

A small group is written by the loop, and the writer's thread has only the sync to do: to share the
interpreter with a thread that writes costs several times what the write does. What is larger, or begins a
segment, the thread does as a whole.

Rules that always hold:
  * Groups are written one after the other. The thread begins one only when the sync before has returned; the
    loop may write behind a sync that is under way. A block says how far syncs that had returned when it was
    written reach, so what a crash leaves behind is a prefix of the log and a broken rest.
  * Where nobody waits for it, a sync begins no sooner than `apart_seconds` after the one before, which costs
    as much as the messages that it makes safe. Who begins to wait ends that at once.
  * A receipt is given after the sync that covers it, never before. (`interval` asks for the write
    only, `none` for nothing: a queue's owner chose that.)
  * A transaction's blocks stand together in one segment and in one group.
  * The loop is told of a group's end when somebody waits for it, or for what has gathered since. Of any
    other it hears in its next turn: to wake it costs more than the group did.
  * No room: the group stays, nothing that was accepted is dropped, and it is written again, to
    the same place, when there is room. Any other error is final.
  * Settlements come behind the messages that were accepted before them, and retention needs them synced,
    so messages without room would keep the log from ever making some. Therefore room is found before
    messages are accepted: for all the segments that they can take, and for `SEGMENTS_KEPT` more, which
    only settlements and snapshots use, for each log that has the same disk. What blocks of L bytes take is at
    most 2 L and a segment, because any two neighbours of their segments hold more than one together. Only
    somebody else who fills the disk in that moment makes accepted messages wait.

The file is long because groups, syncs and room are one state: every end of a write changes all three.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from penstock.log.block import HEADER_BYTES, Buffer, Header, body_checksum
from penstock.log.disk import Disk, File, SyncFailed, discard, is_full, sync_folder
from penstock.log.errors import DiskFull, LogFailed
from penstock.log.info import SyncInfo
from penstock.log.segment import Index, Segment
from penstock.log.segments import Segments
from penstock.log.workers import Worker

SEGMENT_BYTES_MIN = 4 * HEADER_BYTES
SEGMENTS_KEPT = 2
"""Room that new messages leave, in segments."""
SEGMENTS_MIN = 16
"""A segment is at most this part of a disk: of a few large ones, too little can be removed."""
SEGMENTS_ROOM = 8
"""And this part of what the log can have of it, where others have the rest. The active one and the one that
lies ready cannot be removed, and two are kept: with room for less than five, new messages never had any."""
AHEAD_BYTES = 4 * 1024 * 1024
"""The loop writes no further than this behind what is synced while a sync is under way: whoever sends faster
than the disk syncs is not read any more, as bytes in flight say."""
SPARE = "spare-"
"""Files that lie ready to become segments. Each has a name of its own: one may be on its way to be
renamed while the next is made."""


class Block:
    """A block on its way to the disk."""

    __slots__ = ("header", "parts", "segment")

    def __init__(self, header: Header, parts: list[Buffer], segment: Segment) -> None:
        self.header = header
        self.parts = parts
        self.segment = segment


class Group:
    """What goes out in one write and one sync."""

    __slots__ = ("after_sync", "after_write", "blocks", "end", "shown", "sync", "synced", "was_stalled")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.end = 0  # what was written when it was; known from then on
        self.sync = False
        self.synced = 0  # everything before this was safe when it went out
        self.was_stalled = False  # there was no room for it at first
        self.shown: list[Callable[[], None]] = []  # what the sync changes, and nobody waits for
        self.after_write: list[Callable[[LogFailed | None], None]] = []
        self.after_sync: list[Callable[[LogFailed | None], None]] = []

    def __bool__(self) -> bool:
        return bool(self.blocks or self.sync or self.is_awaited)

    @property
    def is_awaited(self) -> bool:
        return bool(self.after_write or self.after_sync)


class Committer:
    """Owns the end of the log."""

    def __init__(
        self,
        disk: Disk,
        segments: Segments,
        writer: Worker,
        keeper: Worker,
        segment_bytes: int,
        at_once_bytes: int,
        apart_seconds: float,
        publish: Callable[[int], None],
        on_failure: Callable[[LogFailed], None],
        sharers: int = 1,
    ) -> None:
        self._disk = disk
        self._sharers = sharers
        self._segments = segments
        self._writer = writer
        self._keeper = keeper
        total = disk.total_bytes() // sharers  # 0: it does not say
        if total:
            room = disk.free_bytes() // sharers + sum(segment.size for segment in segments.all)
            # Not tiny ones: the room may come back, and the log grow to thousands of them.
            part = max(room, segment_bytes) // SEGMENTS_ROOM
            segment_bytes = max(min(segment_bytes, total // SEGMENTS_MIN, part), SEGMENT_BYTES_MIN)
        self._tells_room = total > 0
        self._segment_bytes = segment_bytes
        self._reserve_bytes = max(segment_bytes // 16, 4 * HEADER_BYTES)
        self._granted = 0  # up to this position there is room for messages
        self._refused = False  # the last messages that asked found none
        # Where a file has no room of its own, a write may take as long as a sync.
        self._at_once_bytes = at_once_bytes if disk.sets_room_aside else 0
        self._publish = publish
        self._on_failure = on_failure
        self._gathering = Group()
        self._in_flight: Group | None = None  # with the writer's thread, as a whole
        self._stalled: Group | None = None  # waiting for room
        self._unsynced: deque[Group] = deque()  # written, with those who wait for their sync
        self._is_awaited = False  # there are such
        self._syncs = 0  # given to the writer's thread, and not ended
        self._sync_is_next = False  # the last of them has not begun: it covers what is written until then
        self._sync_ended = 0.0  # the writer thread's own: when, by the clock that nobody sets
        self._apart_seconds = apart_seconds
        self._patience = threading.Lock()  # the writer's thread waits for it until the next sync is due
        # By base, written since the last sync. The writer's thread changes it; the loop looks, too.
        self._files: dict[int, File] = {}
        self._spare = ""  # the file that lies ready to be the next segment
        self._spares_made = 0
        self._spare_wanted = False
        self._no_room = False  # the last attempt to get room failed
        self._squeezing = False  # the next block goes out though there is no room for a whole segment
        self.settlements_wait = False  # for room: no new message may overtake them
        self.position = 0  # where the next block goes
        self.synced = 0  # everything before this is safe
        self.failed: LogFailed | None = None
        self.blocks_since_snapshot = 0
        self.bytes_in_flight = 0
        self.promised_bytes = 0  # of stages that were accepted, and are not added yet
        self.syncs = SyncInfo()

    # --- taking in -------------------------------------------------------------------------------

    @property
    def active(self) -> Segment:
        return self._segments.all[-1]

    def start(self, position: int) -> None:
        """Begin a new segment at `position`, everything before which is synced."""
        self.position = self.synced = position
        self._segments.written = position
        self._begin_segment(self._segment_bytes)

    def check_room(self, length: int) -> None:
        """Raise DiskFull where new messages that take that many bytes, with those of their turn, had better
        not be accepted.

        The disk is asked about twice for a segment, and for what is larger than one. Who was refused is not
        overtaken by what is smaller: from then on, and until there is room for a segment, the disk is full
        for everybody.
        """
        waiting = self.waits_for_room
        wanted = length + self.promised_bytes
        if not waiting and self.position + wanted <= self._granted:
            return
        refused = waiting or not self._grant(max(wanted, self._segment_bytes) if self._refused else wanted)
        self._refused = refused
        if refused:
            self._granted = 0
            raise DiskFull(
                f"no room for {length} more bytes in {self._disk.room_in()}: new messages wait until "
                f"there is room; deliveries and settlements go on"
            )

    def _grant(self, length: int) -> bool:
        """Whether there is room for that many bytes and for what is kept."""
        if self._no_room and not self._spare:
            return False
        active, each = self.active, self._segment_bytes
        end = active.base + active.limit - self._reserve_bytes
        fits = self.position + length <= end
        wanted = SEGMENTS_KEPT * each
        if not fits:
            wanted += each if length <= each else 2 * length + each
        # Before the disk is asked: a file that is made meanwhile counts twice, not never.
        if self._disk.sets_room_aside:
            for segment in reversed(self._segments.all):
                if segment.created:
                    break
                wanted += 0 if segment.spare else segment.limit
            wanted -= each if self._spare else 0
        else:
            wanted += active.limit - active.size + self.position - self._segments.written
        if self._tells_room and self._disk.free_bytes() < wanted * self._sharers:
            return False
        self._granted = end if fits else self.position + each - self._reserve_bytes
        return True

    @property
    def waits_for_room(self) -> bool:
        """Whether blocks, or settlements, wait for room on the disk."""
        if self._stalled is not None or self.settlements_wait:
            return True
        return self._in_flight is not None and self._in_flight.was_stalled

    def squeeze(self) -> None:
        """Let the next block go out though there is no room for a whole segment."""
        self._squeezing = self._no_room and not self._spare

    @property
    def full(self) -> bool:
        try:
            self.check_room(0)
        except DiskFull:
            return True
        return False

    def fits(self, length: int) -> bool:
        """Whether a block can be added without asking the disk for room that it does not have."""
        if not self._no_room or self._spare or self._squeezing:
            return True
        return self.active.size + length <= self.active.limit

    def reserve(self, length: int) -> None:
        """Make sure that the next `length` bytes land in one segment."""
        active = self.active
        if active.size and active.size + length > active.limit:
            # Where there is no room, what settles messages is worth a small file.
            squeezed = self._squeezing and self._no_room and not self._spare
            least = self._reserve_bytes if squeezed else self._segment_bytes
            self._squeezing = False
            self._begin_segment(max(least, length))

    def _begin_segment(self, limit: int) -> None:
        segment = Segment(self.position, 0, 0, limit, sealed=False)
        segment.index = Index()
        if self._spare and limit == self._segment_bytes:
            segment.spare, self._spare = self._spare, ""
        if self._segments.all:
            self._segments.sealed(self.active)
        self._segments.add(segment)

    def add(self, header: Header, parts: list[Buffer], *, sync: bool) -> None:
        """A block at the end of the log; `header` gets its position."""
        if self.failed is not None:
            raise self.failed
        length = HEADER_BYTES + header.body_bytes
        self.reserve(length)
        segment = self.active
        header.position = self.position
        self.position += length
        self.bytes_in_flight += length
        self.blocks_since_snapshot += 1
        self._segments.put(segment, header)
        self._gathering.blocks.append(Block(header, parts, segment))
        self._gathering.sync |= sync

    def when_written(self, call: Callable[[LogFailed | None], None]) -> None:
        """Call when everything added so far is in the file (a crash of the process keeps it)."""
        self._gathering.after_write.append(call)

    def when_synced(self, call: Callable[[LogFailed | None], None]) -> None:
        """Call when everything added so far is synced; at once where the log has failed, perhaps just now."""
        if self.failed is not None:
            call(self.failed)
        else:
            self._gathering.after_sync.append(call)

    def show_when_synced(self, show: Callable[[], None]) -> None:
        """The same for somebody who is in no hurry, and needs not hear of a failure. It comes first."""
        self._gathering.shown.append(show)

    def want_sync(self) -> None:
        """Sync what has been written, also where no queue asks for it at once."""
        self._gathering.sync = True

    # --- putting out -----------------------------------------------------------------------------

    def push(self) -> None:
        """Write the gathered group, or hand it to the writer, unless one is on its way there."""
        if self._stalled is not None or self.failed is not None:
            return
        group = self._gathering
        if not group:
            return
        at_once = self._in_flight is None and self._is_small(group)
        if not at_once and self.writing:
            self.hurry()
            return
        self._gathering = Group()
        if at_once:
            group.synced = self.synced
            error: Exception | None = None
            try:
                self._put(group)
            except Exception as caught:  # noqa: BLE001 - whatever it is, what comes behind must not be written
                error = caught
            self._ended(group, None, error)
        else:
            self._submit(group)

    def _is_small(self, group: Group) -> bool:
        """Whether the loop can write it, into a file that is open."""
        if not group.blocks:
            return True
        first, last = group.blocks[0], group.blocks[-1]
        if first.segment is not last.segment or first.segment.base not in self._files:
            return False
        if self._syncs and last.header.end - self.synced > AHEAD_BYTES:
            return False
        return last.header.end - first.header.position <= self._at_once_bytes

    def _submit(self, group: Group) -> None:
        self._in_flight = group
        group.synced = self.synced
        self._writer.submit(
            lambda: self._write(group),
            lambda took, error: self._ended(group, took, error),
            quiet=not (group.is_awaited or (group.sync and self._is_awaited)),
        )

    def _start_sync(self) -> None:
        """Have all that is written synced."""
        if not self._sync_is_next:
            self._sync_is_next = True
            self._syncs += 1
            self._patience.acquire(blocking=False)
            self._writer.submit(self._sync_written, self._has_synced, quiet=not self._is_awaited)
        elif self._is_awaited:
            self.hurry()

    def _sync_written(self) -> tuple[int, list[float]]:
        """On the writer's thread: up to where all is synced now."""
        left_seconds = self._sync_ended + self._apart_seconds - time.perf_counter()
        if left_seconds > 0 and not self._is_awaited:
            self._patience.acquire(timeout=left_seconds)
        self._sync_is_next = False
        written = self._segments.written
        if self.failed is not None:
            raise self.failed
        return written, self._sync(keep=max(self._files, default=-1))

    def _write(self, group: Group) -> list[float] | None:
        """On the writer's thread: everything to the files, then the sync; how many seconds each took."""
        if self.failed is not None:
            raise self.failed
        self._put(group)
        return self._sync(keep=max(self._files)) if group.sync else None

    def _put(self, group: Group) -> None:
        blocks = group.blocks
        at = 0
        while at < len(blocks):
            segment = blocks[at].segment
            start = blocks[at].header.position - segment.base
            buffers: list[Buffer] = []
            while at < len(blocks) and blocks[at].segment is segment:
                block = blocks[at]
                block.header.body_checksum = body_checksum(block.parts)
                block.header.synced = group.synced
                buffers.append(block.header.pack())
                buffers += block.parts
                at += 1
            file = self._files.get(segment.base)
            if file is None:
                file = self._files[segment.base] = self._open(segment)
            file.write(start, buffers)

    def _open(self, segment: Segment) -> File:
        """On the writer's thread: a segment's file; a new one has its name safe before its content."""
        if segment.created:
            return self._disk.open(segment.name)
        if segment.spare:
            self._disk.rename(segment.spare, segment.name)
            try:
                file = self._disk.open(segment.name)
            except OSError:  # too many open files: it is all done again
                self._disk.rename(segment.name, segment.spare)
                raise
        else:
            file = self._disk.create(segment.name, segment.limit)
        sync_folder(self._disk)
        segment.created = True
        return file

    def _sync(self, keep: int) -> list[float]:
        """On the writer's thread. Whatever goes wrong here is final, lack of room included."""
        took: list[float] = []
        try:
            for file in self._files.values():
                started = time.perf_counter()
                file.sync()
                took.append(time.perf_counter() - started)
        except OSError as error:
            raise SyncFailed(f"sync: {error}") from error
        self._sync_ended = time.perf_counter()
        for base in [base for base in self._files if base != keep]:
            self._files.pop(base).close()
        return took

    def _ended(self, group: Group, took: list[float] | None, error: BaseException | None) -> None:
        """It is written, and synced where it `took` time for that."""
        self._in_flight = None
        if self.failed is not None:
            return
        if isinstance(error, OSError) and is_full(error):
            self._stalled = group
            group.was_stalled = True
            self._no_room = True
            self._granted = 0
            if self.synced < self._segments.written:
                # What was written before need not wait for room to be safe, and what rests on that.
                self._start_sync()
            return
        if error is not None:
            self.fail(error, group)
            return
        if group.was_stalled:
            # There was some; where the segment had to be smaller for it, there is none for the next.
            self._no_room = self.active.limit < self._segment_bytes
        if group.blocks:
            self._segments.written = group.blocks[-1].header.end
            for block in group.blocks:
                self.bytes_in_flight -= HEADER_BYTES + block.header.body_bytes
            group.blocks = []
        group.end = self._segments.written
        self._unsynced.append(group)
        self._is_awaited |= bool(group.after_sync)
        if took is not None:
            self._count_sync(group.end, took)
        elif group.sync:
            self._start_sync()
        for call in group.after_write:  # The next group may be written at once, and its receipts come behind.
            call(None)
        self.push()
        if took is not None:
            self._tell_synced()
        self._want_spare()

    def _has_synced(self, result: tuple[int, list[float]] | None, error: BaseException | None) -> None:
        self._syncs -= 1
        if self.failed is not None:
            return
        if result is None:
            assert error is not None
            self.fail(error)
            return
        self._count_sync(*result)
        self.push()
        self._tell_synced()

    def _count_sync(self, end: int, took: list[float]) -> None:
        for seconds in took:
            self.syncs.add(seconds)
        self.synced = max(self.synced, end)
        self._publish(self.synced)

    def _tell_synced(self) -> None:
        """Those who wait for what is synced by now."""
        groups = []
        while self._unsynced and self._unsynced[0].end <= self.synced:
            groups.append(self._unsynced.popleft())
        self._is_awaited = any(group.after_sync for group in self._unsynced)
        for group in groups:
            for show in group.shown:
                show()
        for group in groups:
            for call in group.after_sync:
                call(None)

    def fail(self, error: BaseException, group: Group | None = None) -> None:
        """For good: by the writer's last group, or by an error of the keeper's that is final."""
        if self.failed is not None:
            return
        advice = "Check the disk, then start the broker again: everything that was confirmed is in the log"
        if isinstance(error, FileNotFoundError):
            advice = "Files of it were removed: put them back before the broker is started again"
        self.failed = LogFailed(
            f"the log in {self._disk.where('')} has failed: {str(error) or repr(error)}; it accepts nothing "
            f"more. {advice}"
        )
        self.failed.__cause__ = error
        self._on_failure(self.failed)
        for lost in (group, self._in_flight, self._stalled, self._gathering):
            for call in lost.after_write + lost.after_sync if lost is not None else ():
                call(self.failed)
        for written in self._unsynced:
            for call in written.after_sync:
                call(self.failed)
        self._unsynced.clear()
        self._gathering = Group()

    # --- room ------------------------------------------------------------------------------------

    def _want_spare(self) -> None:
        """Have the next segment's file ready before it is needed."""
        active = self.active
        if self._spare or self._spare_wanted or active.size < active.limit // 2:
            return
        self._make_spare()

    def _make_spare(self) -> None:
        self._spare_wanted = True
        self._spares_made += 1
        name = f"{SPARE}{self._spares_made}"

        def make() -> str:
            if self.failed is not None:
                raise self.failed
            file = self._disk.create(name, self._segment_bytes)
            try:
                file.sync()
            except OSError:
                discard(self._disk, name)
                raise
            finally:
                file.close()
            return name

        self._keeper.submit(make, self._spare_made)

    def _spare_made(self, name: str | None, error: BaseException | None) -> None:
        self._spare_wanted = False
        if name is not None:
            self._spare = name
            self._no_room = self._stalled is not None and self._no_room
        elif isinstance(error, OSError) and is_full(error):
            self._no_room = True
            self._granted = 0
        elif error is not None:
            self.fail(error)

    def tick(self) -> None:
        """Now and then: see whether room has come back."""
        if self.failed is not None:
            return
        if self._stalled is not None:
            if not self.shrink():
                self._try_again()
        elif self._no_room and not self._spare and not self._spare_wanted:
            if self.settlements_wait:
                self.squeeze()
            self._make_spare()
        else:
            self._want_spare()

    def _try_again(self) -> None:
        if self._stalled is not None and self._in_flight is None:
            group, self._stalled = self._stalled, None
            for segment in {block.segment: None for block in group.blocks}:
                is_open = not segment.created and not segment.spare
                if self._spare and is_open and segment.size <= self._segment_bytes:
                    # It was made when the segment had begun without it.
                    segment.spare, self._spare = self._spare, ""
                    segment.limit = self._segment_bytes
            self._submit(group)

    def shrink(self) -> bool:
        """There is no room for a segment: try with half of it, for better than none is a log that serves and
        settles. False where nothing waits for that, or it is as small as it can be."""
        if self._stalled is None or self._in_flight is not None:
            return False
        shrunk = False
        for segment in {block.segment: None for block in self._stalled.blocks}:
            limit = max(segment.limit // 2, segment.size, SEGMENT_BYTES_MIN)
            if not segment.created and not segment.spare and limit < segment.limit:
                segment.limit = limit
                shrunk = True
        if shrunk:
            self._try_again()
        return shrunk

    def hurry(self) -> None:
        """Somebody waits: have what is with the writer done, and its end told, at once."""
        if self._patience.locked():
            self._patience.release()  # Where it does not wait yet, it will not.
        self._writer.hurry()

    @property
    def writing(self) -> bool:
        """Whether the writer has something to do."""
        return self._in_flight is not None or self._syncs > 0

    @property
    def idle(self) -> bool:
        return not self.writing and self._stalled is None and not self._gathering

    def close(self) -> None:
        """Let go of the files. Nothing is on its way any more, or nobody cares."""
        for file in self._files.values():
            file.close()
        self._files.clear()
