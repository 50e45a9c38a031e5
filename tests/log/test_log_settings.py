"""What each setting of the embedded log does, and each durability: files, blocks, memory, syncs."""

import os
import threading
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.log import segments
from penstock.log.block import KIND_SETTLEMENTS, Header
from penstock.log.committer import AHEAD_BYTES
from penstock.log.disk import RealDisk, RealFile
from penstock.log.errors import LogError, LogInUse
from penstock.log.ledger import EVENTS_MAX, Ledger, read_rows
from penstock.log.log import Log, open_log
from penstock.log.results import Stored
from penstock.log.state import LogSettings
from penstock.log.workers import ThreadWorker
from penstock.model.batch import Batch
from penstock.model.life import Event, Reason
from penstock.model.pending import Note
from penstock.model.policy import Policies
from penstock.model.words import Outcome
from tests.log.inline import InlineWorker

NOW = 1_700_000_000_000_000
EVERYTHING = 1 << 30


class CountingFile(RealFile):
    """A file that tells its disk about every sync."""

    __slots__ = ("_disk",)

    def __init__(self, fd: int, disk: "CountingDisk") -> None:
        super().__init__(fd)
        self._disk = disk

    def sync(self) -> None:
        super().sync()
        self._disk.syncs += 1
        self._disk.meanwhile()


class CountingDisk(RealDisk):
    """A folder that counts syncs of files, not of names."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.syncs = 0
        self.meanwhile: Callable[[], None] = lambda: None  # what is done before a sync has returned

    def create(self, name: str, size: int) -> RealFile:
        return CountingFile(super().create(name, size)._fd, self)

    def open(self, name: str) -> RealFile:
        return CountingFile(super().open(name)._fd, self)


class Rig:
    """An engine whose workers run when they are told to."""

    def __init__(
        self, folder: Path, settings: LogSettings, policies: dict[str, object] | None = None
    ) -> None:
        self.folder = folder
        self.disk = CountingDisk(folder)
        self.writer, self.keeper = InlineWorker(), InlineWorker()
        self.engine = Log.open(
            self.disk,
            NOW,
            settings=settings,
            policies=Policies(policies),
            writer=self.writer,
            keeper=self.keeper,
        )
        self.engine.wait()

    def send(self, queue: str, messages: list[bytes]) -> None:
        self.engine.append(queue, Batch.of(messages), NOW)
        self.turn()

    def turn(self, now_us: int = NOW) -> None:
        self.engine.flush(now_us)
        self.engine.wait()

    def blocks(self, queue: str) -> list[int]:
        """How many messages each stored block has."""
        return [len(piece) for piece in self.engine.read(queue, 0, EVERYTHING)]

    def files(self, pattern: str) -> list[int]:
        """The sizes of some files."""
        return [path.stat().st_size for path in sorted(self.folder.glob(pattern))]


Make = Callable[..., Rig]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    logs: list[Rig] = []

    def make(settings: LogSettings, policies: dict[str, object] | None = None) -> Rig:
        logs.append(Rig(tmp_path, settings, policies))
        return logs[-1]

    yield make
    for log in logs:
        log.engine.abandon()


# --- files and blocks -----------------------------------------------------------------------------


def test_a_segment_has_its_size_from_the_start_and_then_comes_the_next(make: Make) -> None:
    log = make(LogSettings(segment_bytes=8192))
    assert log.files("*.seg") == [8192]
    for _ in range(20):
        log.send("orders", [b"x" * 1000])
    assert log.files("*.seg") == [8192] * 3


def test_a_block_larger_than_a_segment_gets_one_of_its_own(make: Make) -> None:
    log = make(LogSettings(segment_bytes=8192))
    for payload in (b"before", b"x" * 100_000, b"after"):
        log.send("orders", [payload])
    first, large, last = log.files("*.seg")
    assert (first, last) == (8192, 8192)
    assert 100_000 < large < 101_000
    (piece, *rest) = log.engine.take("orders", "ann", 9, NOW, bytes_max=EVERYTHING)
    assert [len(message) for each in (piece, *rest) for message in each.messages()] == [6, 100_000, 5]


def test_what_comes_in_one_turn_is_one_block(make: Make) -> None:
    log = make(LogSettings())
    for _ in range(3):
        for size in (1, 2, 3):
            log.engine.append("orders", Batch.of([b"x"] * size), NOW)
        log.turn()
    assert log.blocks("orders") == [6, 6, 6]


def test_a_turn_with_more_than_a_block_s_bytes_is_several(make: Make) -> None:
    log = make(LogSettings(block_bytes=1100))
    for _ in range(5):
        log.engine.append("orders", Batch.of([b"x" * 100] * 4), NOW)
    log.turn()
    assert log.blocks("orders") == [8, 8, 4]


def test_a_batch_with_more_than_two_blocks_bytes_is_cut(make: Make) -> None:
    log = make(LogSettings(block_bytes=1040))  # ten of them, with a bound of 4 bytes each
    log.send("orders", [b"x" * 100] * 20)
    log.send("orders", [b"x" * 100] * 21)
    log.send("orders", [b"x" * 5000, b"", b"x" * 5000])
    assert log.blocks("orders") == [20, 10, 10, 1, 1, 1, 1]


def test_doors_and_requests_do_not_share_a_block(make: Make) -> None:
    log = make(LogSettings())
    log.engine.append("orders", Batch.of([b"a"], protocol="http"), NOW)
    log.engine.append("orders", Batch.of([b"b"], protocol="rq"), NOW)
    log.engine.append("orders", Batch.of([b"c"], protocol="rq", reply=[b"x"]), NOW)
    log.turn()
    pieces = list(log.engine.read("orders", 0, 9))
    assert [(len(piece), piece.protocol, piece.reply) for piece in pieces] == [
        (1, "http", None),
        (1, "rq", None),
        (1, "rq", [b"x"]),
    ]


# --- memory ---------------------------------------------------------------------------------------


def test_the_cache_keeps_its_size_and_everything_can_be_read_all_the_same(make: Make) -> None:
    log = make(LogSettings(cache_bytes=10_000, segment_bytes=32 * 1024))
    for i in range(100):
        log.send("orders", [b"%-1000d" % i])
    cached = log.engine._state.segments
    assert cached._cached_bytes <= 10_000
    got = [
        int(m)
        for piece in log.engine.take("orders", "ann", 100, NOW, bytes_max=EVERYTHING)
        for m in piece.messages()
    ]
    assert got == list(range(100))
    assert cached._cached_bytes <= 10_000
    bodies = sum(block.header.body_bytes for block in cached._cache.values())
    assert cached._cached_bytes == bodies + segments.BLOCK_BYTES * len(cached._cache)


def test_empty_messages_have_their_place_in_the_cache(make: Make) -> None:
    """A block of one that is empty takes about a kilobyte, and hardly anything of it is its body."""
    log = make(LogSettings(cache_bytes=200_000), {"*": {"durability": "none"}})
    tracemalloc.start()
    try:
        for i in range(2000):
            log.engine.append("orders", Batch.of([b""]), NOW + i)
            log.engine.flush(NOW + i)
        log.turn()
        log.engine.tick(NOW + 10_000_000)
        log.engine.wait()
        cached = log.engine._state.segments
        assert 50 < len(cached._cache) <= 200
        before, _ = tracemalloc.get_traced_memory()
        cached._cache.clear()
        taken = before - tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken <= 400_000  # tables that have grown included


def test_a_million_empty_messages_are_counted_and_cut_by_what_they_take(make: Make) -> None:
    log = make(LogSettings(), {"*": {"durability": "none"}})
    batch = Batch(b"", array("i", bytes(4 * 100_001)))
    for _ in range(10):
        log.engine.append("orders", batch, NOW)
    assert log.engine.bytes_in_flight >= 4_000_000
    log.turn()
    assert log.engine.bytes_in_flight == 0
    sizes = [block.header.body_bytes for block in log.engine._state.segments._cache.values()]
    assert max(sizes) <= 2 * 1024 * 1024
    assert log.engine.describe("orders").ready == 1_000_000
    giant = Batch(b"", array("i", bytes(4 * 1_000_001)))
    log.engine.append("giant", giant, NOW)
    log.turn()
    assert max(log.blocks("giant")) <= 2 * 1024 * 1024 // 4


def test_a_clock_that_is_set_back_does_not_put_off_a_sync(make: Make) -> None:
    log = make(LogSettings(interval_us=50_000), {"orders": {"durability": "interval"}})
    log.engine.tick(NOW)
    log.engine.wait()
    for now_us in (NOW, NOW - 3600 * 1_000_000, NOW + 3600 * 1_000_000, NOW - 1):
        log.engine.append("orders", Batch.of([b"x"]), now_us)
        log.turn(now_us)
        syncs = log.disk.syncs
        for _ in range(8):
            now_us += 10_000
            log.engine.tick(now_us)
            log.engine.wait()
        assert log.disk.syncs > syncs
        assert log.engine.durable_end("orders") == log.engine.describe("orders").offset_end


def test_more_events_than_a_header_can_count_become_several_blocks(make: Make) -> None:
    log = make(LogSettings())
    log.send("orders", [b"x"])
    queue = log.engine._state.queues["orders"]
    many = 3 * EVENTS_MAX // 2
    # As if so many had come: only where they are is kept in memory, and nobody could send them here.
    queue.pending.accept(many)
    queue.next_stored += many
    queue.next_event += many
    (fate,) = log.engine.purge("orders", NOW)
    assert fate.end - fate.first == many + 1
    log.turn()
    assert log.engine.failed is None
    log.engine.tick(NOW + 10_000_000)
    log.engine.wait()
    runs = [
        run
        for run in log.engine.events("orders", many + 1, 1 << 62)
        if run.event is Event.WITHDRAWN and run.reason is Reason.PURGED
    ]
    assert [run.end - run.first for run in runs] == [EVENTS_MAX, many + 1 - EVENTS_MAX]
    assert (runs[0].first, runs[-1].end) == (0, many + 1)


def test_pieces_of_a_ledger_say_what_the_whole_says() -> None:
    whole = Ledger()
    whole.add(Event.ACKED, 0, 7, Reason.NONE, "ann", 1, 5)
    whole.add(Event.REQUEUED, 9, 12, Reason.CONSUMER_LOST, "bob", 2, 6, Note(2, 3, 99), 40)
    whole.add(Event.ACKED, 20, 21, Reason.NONE, "bob", 1, 7)

    def told(ledger: Ledger) -> list[tuple[object, ...]]:
        (body,) = ledger.parts()
        count = len(ledger)
        header = Header(
            KIND_SETTLEMENTS,
            ledger.flags,
            *(0, 1, count, 0, 0, 0, 0, ledger.event_count, len(body), 0, 0, 0, ledger.names_count, 0),
        )
        rows = read_rows(header, memoryview(bytes(body)))
        return [(offset, *row[:1], *row[3:]) for row in rows for offset in range(row.first, row.end)]

    pieces = list(whole.pieces(4))
    assert [piece.event_count for piece in pieces] == [4, 4, 3]

    def of_each(rows: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
        """Without the note of a row that has none, which its block may have for it or not."""
        return [row[:6] if row[1] is Event.ACKED else row for row in rows]

    assert of_each([row for piece in pieces for row in told(piece)]) == of_each(told(whole))


def test_what_is_not_written_yet_is_kept_whatever_the_cache_says(make: Make) -> None:
    log = make(LogSettings(cache_bytes=100, block_bytes=500, at_once_bytes=0))
    for i in range(20):
        log.engine.append("orders", Batch.of([b"%-400d" % i]), NOW)
    log.engine.flush(NOW)
    assert log.engine.bytes_in_flight > 8000
    taken = log.engine.take("orders", "ann", 20, NOW, bytes_max=EVERYTHING)
    assert [int(m) for piece in taken for m in piece.messages()] == list(range(20))
    log.turn()
    assert log.engine.bytes_in_flight == 0
    # Nothing has to come after a burst for its memory to be let go: one block is always kept.
    assert len(log.engine._state.segments._cache) == 1


def test_bytes_are_exact_where_settlements_before_the_messages_are_not_written_yet(make: Make) -> None:
    """A segment that begins with them has no block to be read there, and no message that is asked for."""
    log = make(LogSettings(segment_bytes=4096))

    def settle(first: int, end: int) -> None:
        log.engine.settle("orders", "ann", Outcome.ACK, [(first, end)], NOW)

    log.send("orders", [b"x" * 100] * 30)
    log.engine.take("orders", "ann", 30, NOW, bytes_max=EVERYTHING)
    assert log.engine.describe("orders").bytes == 3000
    for offset in range(0, 28, 2):
        settle(offset, offset + 1)
    log.engine.append("filler", Batch.of([b"x" * 2000]), NOW)
    log.engine.flush(NOW)  # the filler begins a segment, settlements follow
    log.engine.append("orders", Batch.of([b"y", b"z" * 1000]), NOW)
    log.engine.flush(NOW)
    log.engine.take("orders", "ann", 2, NOW, bytes_max=EVERYTHING)
    settle(29, 31)
    assert log.engine.describe("orders").bytes == 15 * 100 + 1000
    log.turn()
    assert len(log.files("*.seg")) == 2
    assert log.engine.describe("orders").bytes == 15 * 100 + 1000


def test_however_many_segments_are_read_few_files_stay_open(make: Make) -> None:
    log = make(LogSettings(segment_bytes=4096, cache_bytes=1000, block_bytes=512))
    for _ in range(200):
        log.send("orders", [b"x" * 1500])
    assert len(log.files("*.seg")) > segments.FILES_MAX
    before = len(os.listdir("/proc/self/fd"))
    assert sum(log.blocks("orders")) == 200
    assert len(os.listdir("/proc/self/fd")) - before <= segments.FILES_MAX
    indexed = [segment for segment in log.engine._state.segments.all if segment.index is not None]
    assert len(indexed) <= segments.INDEXES_MAX + 1


# --- snapshots ------------------------------------------------------------------------------------


def test_a_snapshot_comes_after_so_many_blocks_and_two_are_kept(make: Make) -> None:
    log = make(LogSettings(snapshot_blocks=10))
    names = {path.name for path in log.folder.glob("snapshot-*")}
    for _ in range(8):  # and one block with the name of the queue
        log.send("orders", [b"x"])
    assert {path.name for path in log.folder.glob("snapshot-*")} == names
    for _ in range(40):
        log.send("orders", [b"x"])
    later = {path.name for path in log.folder.glob("snapshot-*")}
    assert len(later) == 2
    assert later.isdisjoint(names)


def test_a_clean_stop_leaves_a_snapshot_of_everything(make: Make) -> None:
    log = make(LogSettings())
    log.send("orders", [b"a", b"b"])
    log.engine.take("orders", "ann", 1, NOW)
    log.engine.settle("orders", "ann", Outcome.ACK, [(0, 1)], NOW)
    log.engine.close(NOW)
    newest = max(log.folder.glob("snapshot-*"))
    # The log ends where the snapshot does: nothing needs to be replayed.
    again = make(LogSettings())
    assert min(int(path.name[:20]) for path in log.folder.glob("*.seg") if int(path.name[:20])) == int(
        newest.name.removeprefix("snapshot-")
    )
    assert again.engine.describe("orders").ready == 1


# --- syncs ----------------------------------------------------------------------------------------


def test_commit_takes_one_sync_for_all_queues_of_a_turn(make: Make) -> None:
    log = make(LogSettings())
    came: list[object] = []
    for name in ("orders", "mails", "audit"):
        log.send(name, [b"first"])
    before = log.disk.syncs
    for name in ("orders", "mails", "audit"):
        for _ in range(5):
            log.engine.append(name, Batch.of([b"x"] * 10), NOW, came.append)
    log.engine.flush(NOW)
    assert came == []
    log.engine.wait()
    assert len(came) == 15
    assert log.disk.syncs - before == 1


def test_what_comes_while_a_group_is_on_its_way_shares_the_next_sync(make: Make) -> None:
    log = make(LogSettings(at_once_bytes=0))
    log.send("orders", [b"first"])
    before = log.disk.syncs
    came: list[object] = []
    for _ in range(10):
        log.engine.append("orders", Batch.of([b"x"]), NOW, came.append)
        log.engine.flush(NOW)
    assert len(log.writer) == 1
    log.engine.wait()
    assert (len(came), log.disk.syncs - before) == (10, 2)


def test_readers_see_the_events_of_the_groups_that_are_synced(make: Make) -> None:
    log = make(LogSettings(at_once_bytes=0))
    log.engine.append("orders", Batch.of([b"a", b"b"]), NOW)
    log.engine.flush(NOW)
    log.engine.take("orders", "ann", 1, NOW)
    log.engine.settle("orders", "ann", Outcome.ACK, [(0, 1)], NOW)
    log.engine.append("orders", Batch.of([b"c"]), NOW)
    log.engine.flush(NOW)
    shown = []
    for _ in range(3):
        shown.append((len(list(log.engine.events("orders", 0, 9))), sum(log.blocks("orders"))))
        log.writer.step()
        log.engine.poll()
    assert shown == [(0, 0), (1, 2), (3, 3)]


def test_interval_confirms_the_write_and_syncs_later(make: Make) -> None:
    log = make(LogSettings(interval_us=50_000), {"orders": {"durability": "interval"}})
    log.send("orders", [b"first"])
    log.engine.tick(NOW)
    log.engine.wait()
    came: list[object] = []
    before = log.disk.syncs
    for i in range(10):
        log.engine.append("orders", Batch.of([b"x"]), NOW, came.append)
        log.turn()
        assert len(came) == i + 1
    assert log.disk.syncs == before
    assert sum(log.blocks("orders")) == 1  # readers see what is synced, and only that
    log.engine.tick(NOW + 49_999)
    log.engine.wait()
    assert log.disk.syncs == before
    log.engine.tick(NOW + 50_000)
    log.engine.wait()
    assert log.disk.syncs == before + 1
    assert sum(log.blocks("orders")) == 11
    log.engine.tick(NOW + 500_000)
    log.engine.wait()
    assert log.disk.syncs == before + 1


def test_none_confirms_at_once_and_syncs_within_a_second_or_so(make: Make) -> None:
    log = make(LogSettings(), {"orders": {"durability": "none"}})
    log.send("orders", [b"first"])
    log.engine.tick(NOW)
    log.engine.wait()
    before = log.disk.syncs
    came: list[object] = []
    log.engine.append("orders", Batch.of([b"x"]), NOW, came.append)
    assert [type(answer) for answer in came] == [Stored]
    log.turn()
    log.engine.tick(NOW + 999_999)
    log.engine.wait()
    assert log.disk.syncs == before
    log.engine.tick(NOW + 1_000_000)
    log.engine.wait()
    assert log.disk.syncs == before + 1
    assert sum(log.blocks("orders")) == 2


@pytest.mark.parametrize("durability", ["interval", "none"])
def test_a_commit_of_another_queue_makes_the_lazy_ones_safe_too(make: Make, durability: str) -> None:
    log = make(LogSettings(), {"lazy": {"durability": durability}})
    log.send("lazy", [b"x"])
    log.send("orders", [b"y"])
    assert log.blocks("lazy") == [1]


def test_settlements_are_as_durable_as_their_queue(make: Make) -> None:
    log = make(LogSettings(), {"lazy": {"durability": "interval"}})
    for name in ("lazy", "orders"):
        log.send(name, [b"x"])
        log.engine.take(name, "ann", 1, NOW)
    before = log.disk.syncs
    log.engine.settle("lazy", "ann", Outcome.ACK, [(0, 1)], NOW)
    log.turn()
    assert log.disk.syncs == before
    log.engine.settle("orders", "ann", Outcome.ACK, [(0, 1)], NOW)
    log.turn()
    assert log.disk.syncs == before + 1


# --- opening --------------------------------------------------------------------------------------


def test_one_process_and_one_engine_per_folder(tmp_path: Path) -> None:
    first = open_log(str(tmp_path), NOW)
    with pytest.raises(LogInUse, match=f"process {os.getpid()}"):
        open_log(str(tmp_path), NOW)
    first.close(NOW)
    second = open_log(str(tmp_path), NOW)
    assert second.opening == first.opening + 1
    second.close(NOW)


def test_wake_is_called_when_there_is_something_to_poll(tmp_path: Path) -> None:
    woken: list[None] = []
    engine = open_log(str(tmp_path), NOW, wake=lambda: woken.append(None))
    engine.wait()
    before = len(woken)
    came: list[object] = []
    engine.append("orders", Batch.of([b"x"]), NOW, came.append)
    engine.flush(NOW)
    engine.wait()
    assert len(woken) > before
    assert len(came) == 1
    engine.close(NOW)


def test_a_segment_size_may_change_between_openings(make: Make) -> None:
    log = make(LogSettings(segment_bytes=8192))
    log.send("orders", [b"x" * 3000])
    log.engine.close(NOW)
    log = make(LogSettings(segment_bytes=64 * 1024))
    for _ in range(5):
        log.send("orders", [b"y" * 3000])
    assert len(log.blocks("orders")) == 6
    assert 64 * 1024 in log.files("*.seg")


def test_what_is_in_no_block_yet_is_not_safe(tmp_path: Path) -> None:
    log = open_log(str(tmp_path), NOW)
    safe = []

    def flush() -> None:
        safe.append(log.is_safe)
        log.flush(NOW)
        log.confirm(NOW, lambda error: None)
        log.wait()
        safe.append(log.is_safe)

    flush()
    log.append("q", Batch.of([b"x"]), NOW)
    flush()
    log.take("q", "ann", 1, NOW)
    log.settle("q", "ann", Outcome.ACK, [(0, 1)], NOW)
    flush()
    assert safe[1:] == [True, False, True, False, True]
    log.close(NOW)


# --- who writes, and when it is synced ------------------------------------------------------------


def test_the_loop_writes_a_small_group_and_the_writer_a_large_one(make: Make) -> None:
    log = make(LogSettings())
    for size, is_written in ((10, True), (10, True), (20_000, False), (10, False)):
        log.engine.append("orders", Batch.of([b"x" * size]), NOW)
        log.engine.flush(NOW)
        assert (log.engine.bytes_in_flight == 0) is is_written
    assert log.engine.durable_end("orders") == 0
    log.engine.wait()
    assert log.engine.bytes_in_flight == 0
    assert log.engine.durable_end("orders") == 4


def test_a_sync_does_not_cover_what_is_written_while_it_is_under_way(make: Make) -> None:
    log = make(LogSettings())

    def append() -> None:
        log.engine.append("orders", Batch.of([b"x"]), NOW)
        log.engine.flush(NOW)
        log.disk.meanwhile = lambda: None

    append()
    log.disk.meanwhile = append
    log.writer.step()
    log.engine.poll()
    assert log.engine.durable_end("orders") == 1
    log.writer.step()
    log.engine.poll()
    assert log.engine.durable_end("orders") == 2


def test_the_loop_does_not_write_on_and_on_while_a_sync_stands(make: Make) -> None:
    """Otherwise nothing would be in flight however long the disk takes, and no sender be held back."""
    log = make(LogSettings())

    def append() -> None:
        log.engine.append("orders", Batch.of([b"x" * 15_000]), NOW)
        log.engine.flush(NOW)

    written = 0
    for _ in range(2 * AHEAD_BYTES // 15_000):
        append()
        written += log.engine.bytes_in_flight == 0
    assert 0.9 < written * 15_000 / AHEAD_BYTES <= 1
    log.engine.wait()
    assert log.engine.bytes_in_flight == 0
    assert log.engine.durable_end("orders") == 2 * AHEAD_BYTES // 15_000
    append()
    assert log.engine.bytes_in_flight == 0


def test_receipts_for_the_write_alone_come_in_order(make: Make) -> None:
    """The loop writes what has gathered behind a large group as soon as that is written."""
    log = make(LogSettings(), {"orders": {"durability": "interval"}})
    first_offsets: list[int] = []

    def told(result: Stored | LogError) -> None:
        assert isinstance(result, Stored)
        first_offsets.append(result.first)

    log.send("orders", [b"x"])
    for size in (20_000, 10):
        log.engine.append("orders", Batch.of([b"x" * size]), NOW, told)
        log.engine.flush(NOW)
    log.engine.wait()
    assert first_offsets == [1, 2]


def test_syncs_keep_apart_until_somebody_waits_for_one(tmp_path: Path) -> None:
    disk, woken = CountingDisk(tmp_path), threading.Event()
    writer, keeper = (ThreadWorker("test", woken.set) for _ in range(2))
    log = Log.open(disk, NOW, writer=writer, keeper=keeper)
    log.wait()
    log._committer._apart_seconds = 600.0
    before = disk.syncs
    for _ in range(5):
        log.append("orders", Batch.of([b"x"]), NOW)
        log.flush(NOW)
    assert disk.syncs == before
    stored: list[object] = []
    log.append("orders", Batch.of([b"x"]), NOW, stored.append)
    woken.clear()
    log.flush(NOW)
    assert woken.wait(10)
    log.poll()
    assert stored
    assert log.durable_end("orders") == 6
    assert disk.syncs == before + 1
    log.abandon()
