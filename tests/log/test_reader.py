"""Reading a log from another process: the same as the engine sees, whole, synced, and while it changes."""

import gc
import multiprocessing
import os
import random
import re
import signal
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import pytest

from penstock.log import adoption, ledger, mapped
from penstock.log import block as layout
from penstock.log.block import Buffer
from penstock.log.disk import (
    WATERMARK,
    RealDisk,
    RealFile,
    Watermark,
    read_whole,
    write_whole,
)
from penstock.log.errors import LogDamaged, LogError, LogRefused
from penstock.log.log import Log, open_log
from penstock.log.overlay import LogChanging, OverlayDisk, replayed
from penstock.log.read_block import Block
from penstock.log.reader import LogReader, OffsetsMissing, ReaderQueue
from penstock.log.results import StageInfo, Stored, TransactionDone
from penstock.log.segment import parse_segment_name
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.life import Event
from penstock.model.policy import Policies
from penstock.model.words import Outcome
from tests.build import interpreted_only
from tests.log.folders import NOW_US, QUEUES, SECOND_US, Worker, harmed
from tests.log.inline import InlineWorker

SMALL = LogSettings(segment_bytes=4096, block_bytes=1024, snapshot_blocks=10)


def content(queue: str, offset: int) -> bytes:
    """What the message at an offset must be: anything else was never written there."""
    return b"%s/%d/" % (queue.encode(), offset) + b"#" * (offset * 7 % 61)


def batch_of(queue: str, first: int, count: int) -> Batch:
    return Batch.of([content(queue, offset) for offset in range(first, first + count)])


def write(folder: Path, messages: int, *, per_block: int = 10, settings: LogSettings = SMALL) -> Log:
    """A log with that many messages in the queue `q`, still open."""
    engine = open_log(str(folder), NOW_US, settings=settings)
    for first in range(0, messages, per_block):
        engine.append("q", batch_of("q", first, min(per_block, messages - first)), NOW_US + first)
        engine.flush(NOW_US + first)
        engine.wait()
    return engine


def check(blocks: Iterator[Block], queue: str, start: int) -> int:
    """Offsets without a gap, contents as written; the end of what was seen."""
    at = start
    for block in blocks:
        assert block.header.first_offset + block.lo == at
        for payload in block.messages():
            assert payload == content(queue, at)
            at += 1
    return at


def segments(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if parse_segment_name(path.name))


# --- the same as the engine ------------------------------------------------------------------------


def engine_messages(engine: Log, queue: str, start: int, end: int) -> list[tuple[object, ...]]:
    return [
        (
            piece.first_offset + i,
            bytes(piece.payload[piece.bounds[i] : piece.bounds[i + 1]]),
            piece.origin,
            piece.time_us,
            piece.protocol,
            piece.expires_us[i] if piece.expires_us is not None else 0,
            piece.retries[i] if piece.retries is not None else -1,
            piece.headers[i] if piece.headers is not None else b"",
        )
        for piece in engine.read(queue, start, end)
        for i in range(piece.lo, piece.hi)
    ]


def reader_messages(
    reader: LogReader, queue: str, start: int, end: int, *, fail_on_loss: bool = True
) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for block in reader.messages(queue, start, end, fail_on_loss=fail_on_loss):
        bounds, payload, expires, retries, _, headers = block.columns()
        rows += [
            (
                block.header.first_offset + i,
                bytes(payload[bounds[i] : bounds[i + 1]]),
                block.origin,
                block.header.time_us,
                block.protocol,
                expires[i] if expires is not None else 0,
                retries[i] if retries is not None else -1,
                headers.at(i) if headers is not None else b"",
            )
            for i in range(block.lo, block.hi)
        ]
    return rows


def assert_same(reader: LogReader, engine: Log) -> None:
    seen = reader.queues()
    assert sorted(seen) == sorted(engine.queues())
    for name, queue in seen.items():
        info = engine.describe(name)
        starts_and_ends = (info.offset_start, info.offset_end, info.event_start, info.event_end)
        assert queue[1:] == starts_and_ends
        expected = engine_messages(engine, name, info.offset_start, info.offset_end)
        assert len(expected) == info.offset_end - info.offset_start
        assert reader_messages(reader, name, info.offset_start, info.offset_end) == expected
        events = list(engine.events(name, info.event_start, info.event_end))
        assert list(reader.events(name, info.event_start)) == events
        assert sum(run.end - run.first for run in events) == info.event_end - info.event_start


@pytest.mark.parametrize(("seed", "queues"), [(1, QUEUES), (2, QUEUES[:3]), (3, QUEUES[:3])])
def test_a_reader_sees_what_the_engine_sees_whatever_has_happened(
    tmp_path: Path, seed: int, queues: Sequence[str]
) -> None:
    worker = Worker(tmp_path, seed, queues=queues)
    follower = LogReader(str(tmp_path))
    removed = compacted = False
    bases: set[str] = set()
    for part in range(12):
        for _ in range(25):
            worker.turn()
        if part % 4 == 3:
            worker.reopen(crash=part % 8 == 3)
        worker.settle_down()
        worker.engine.trim(worker.now_us)
        worker.engine.wait()
        follower.refresh()
        assert_same(follower, worker.engine)
        with LogReader(str(tmp_path)) as fresh:
            assert_same(fresh, worker.engine)
        names = [path.name for path in segments(tmp_path)]
        removed = removed or not bases <= {name[:20] for name in names}
        bases.update(name[:20] for name in names)
        compacted = compacted or any(name.count(".") == 2 for name in names)
    if "kept" not in queues:
        assert removed
        assert compacted
    worker.engine.close(worker.now_us)
    follower.refresh()
    with LogReader(str(tmp_path)) as fresh:
        assert fresh.queues() == follower.queues()


def test_parts_of_blocks_and_empty_ranges(tmp_path: Path) -> None:
    write(tmp_path, 100).close(NOW_US)
    reader = LogReader(str(tmp_path))
    assert reader.queues() == {"q": ReaderQueue(1, 0, 100, 0, 100)}
    for start, end in [(0, 100), (0, 1), (99, 100), (9, 11), (10, 20), (37, 63), (50, 50), (100, 100)]:
        assert check(reader.messages("q", start, end), "q", start) == end
        runs = list(reader.events("q", start, end))
        assert [
            n for run in runs for n in range(run.event_offset, run.event_offset + run.end - run.first)
        ] == [*range(start, end)]
    for start, end in [(70, 20), (150, 150), (170, 150)]:
        assert list(reader.messages("q", start, end)) == []
    (block,) = reader.messages("q", 13, 15)
    assert (block.header.first_offset, block.header.count, block.lo, block.hi) == (10, 10, 3, 5)


def test_headers_only_leaves_bodies_alone(tmp_path: Path) -> None:
    write(tmp_path, 20).close(NOW_US)
    reader = LogReader(str(tmp_path))
    blocks = list(reader.messages("q", 5, 15, headers_only=True))
    assert [(b.header.first_offset, b.lo, b.hi, len(b.body)) for b in blocks] == [
        (0, 5, 10, 0),
        (10, 0, 5, 0),
    ]


@pytest.mark.parametrize("bytes_max", [1, 30, 200, 700, 5000, 1 << 40])
def test_cuts_cover_a_range_in_pieces_of_so_many_bytes(tmp_path: Path, bytes_max: int) -> None:
    sizes = [n * 7 % 61 for n in range(400)]
    engine = open_log(str(tmp_path), NOW_US, settings=SMALL)
    for first in range(0, 400, 10):
        engine.append("q", Batch.of([b"#" * size for size in sizes[first : first + 10]]), NOW_US + first)
        engine.append("p", Batch.of([b"other"]), NOW_US + first)
        engine.flush(NOW_US + first)
        engine.wait()
    assert len(segments(tmp_path)) > 3
    with LogReader(str(tmp_path)) as reader:
        for start, end in ((0, 400), (5, 395), (13, 17), (110, 390)):
            cuts = reader.cuts("q", start, end, bytes_max, 1000)
            ends = [start, *(stop for stop, _ in cuts)]
            assert ends == sorted(set(ends))
            assert ends[-1] == end
            # Blocks at the edges are taken to have messages of one size, and pieces of them too.
            assert abs(sum(size for _, size in cuts) - sum(sizes[start:end])) <= 2 * 10 * 61
            for (first, stop), (_, size) in zip(pairwise(ends), cuts, strict=True):
                assert size <= bytes_max or stop == first + 1
            assert reader.cuts("q", start, end, bytes_max, 2) == cuts[:2]
            assert len(cuts) <= 3 * (sum(sizes[start:end]) // bytes_max + 1)
        assert reader.cuts("q", 400, 500, bytes_max, 9) == []
        with pytest.raises(LogRefused, match="no queue 'none'"):
            reader.cuts("none", 0, 1, 1, 1)
    engine.close(NOW_US + 400)


def test_snapshots_that_come_while_the_first_look_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that were listed are gone when they are read, and the others are of later positions."""
    policies = Policies({"*": {"retention-seconds": 0}})
    engine = open_log(str(tmp_path), NOW_US, settings=SMALL, policies=policies)
    sent, now_us = 0, NOW_US

    def work() -> None:
        nonlocal sent, now_us
        for _ in range(60):
            now_us += SECOND_US
            engine.append("q", batch_of("q", sent, 10), now_us)
            sent += 10
            for piece in engine.take("q", "c", 10, now_us):
                ranges = [(piece.offset_start, piece.offset_end)]
                engine.settle("q", "c", Outcome.ACK, ranges, now_us)
            engine.flush(now_us)
            engine.wait()

    work()
    engine.trim(now_us)
    engine.wait()
    assert segments(tmp_path)[0].name != "00000000000000000000.seg"
    before = sorted(path.name for path in tmp_path.glob("snapshot-*"))
    real, looks = RealDisk.names, 0

    def names(disk: RealDisk) -> list[str]:
        nonlocal looks
        found = real(disk)
        looks += 1
        if looks == 1:
            work()
        return found

    monkeypatch.setattr(RealDisk, "names", names)
    with LogReader(str(tmp_path)) as reader:
        assert not {path.name for path in tmp_path.glob("snapshot-*")}.intersection(before)
        assert list(reader.queues()) == ["q"]
        assert reader.queues()["q"].offset_end == sent
    engine.close(now_us)


def test_a_queue_that_only_the_snapshot_knows_by_name(tmp_path: Path) -> None:
    """Its declaration went with a segment that retention took; its messages live on in a compacted one."""
    policies = Policies({"*": {"retention-seconds": 0}})
    engine = open_log(str(tmp_path), NOW_US, settings=SMALL, policies=policies)
    now_us = NOW_US
    for first in range(0, 600, 10):
        now_us += SECOND_US
        engine.append("q", batch_of("q", first, 10), now_us)
        for piece in engine.take("q", "c", 10, now_us):
            ranges = (
                [(piece.offset_start, piece.offset_end - 1)] if first % 100 == 0 else [(first, first + 10)]
            )
            engine.settle("q", "c", Outcome.ACK, ranges, now_us)
        engine.flush(now_us)
        engine.wait()
        engine.trim(now_us)
        engine.wait()
    engine.close(now_us)
    names = [path.name for path in segments(tmp_path)]
    assert any(name.count(".") == 2 for name in names)
    assert "00000000000000000000.seg" not in names
    reader = LogReader(str(tmp_path))
    queue = reader.queues()["q"]
    assert 0 < queue.offset_start < queue.offset_end == 600
    # What is alive before the start can be read by those who do not mind the gaps between.
    living = [
        (block.header.first_offset + i, payload)
        for block in reader.messages("q", 0, queue.offset_start, fail_on_loss=False)
        for i, payload in enumerate(block.messages(), block.lo)
    ]
    assert (9, content("q", 9)) in living
    assert all(payload == content("q", offset) for offset, payload in living)
    assert all(opening == 1 for _, _, opening in reader.openings("q"))


# --- synced and whole ------------------------------------------------------------------------------


class HookedFile:
    """A real file that tells when it has written half, and when it is about to sync."""

    def __init__(self, file: RealFile, hook: Callable[[], None]) -> None:
        self._file = file
        self._hook = hook
        self.read = file.read
        self.size = file.size
        self.truncate = file.truncate
        self.close = file.close

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        data = b"".join(buffers)
        half = len(data) // 2
        self._file.write(position, [data[:half]])
        self._hook()
        self._file.write(position + half, [data[half:]])
        self._hook()

    def sync(self) -> None:
        self._hook()
        self._file.sync()
        self._hook()


class HookedDisk(RealDisk):
    """A real folder with such files."""

    hook: Callable[[], None] = staticmethod(lambda: None)

    def create(self, name: str, size: int) -> RealFile:
        return HookedFile(super().create(name, size), lambda: self.hook())  # type: ignore[return-value]

    def open(self, name: str) -> RealFile:
        return HookedFile(super().open(name), lambda: self.hook())  # type: ignore[return-value]


def test_nothing_is_seen_before_it_is_synced(tmp_path: Path) -> None:
    """The reader looks at every moment of a commit: half written, written, synced, told."""
    disk = HookedDisk(str(tmp_path))
    writer, keeper = InlineWorker(), InlineWorker()
    engine = Log.open(disk, NOW_US, settings=SMALL, writer=writer, keeper=keeper)
    reader = LogReader(str(tmp_path))
    looks = 0
    confirmed = sent = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        with LogReader(str(tmp_path)) as fresh:
            for seen in (reader, fresh):
                seen.refresh()
                queue = seen.queues().get("q", ReaderQueue(1, 0, 0, 0, 0))
                # Not one message more than was confirmed: the group in flight may be torn or lost.
                assert queue.offset_end == confirmed
                if confirmed:
                    assert check(seen.messages("q", 0), "q", 0) == confirmed

    def confirm(result: object) -> None:
        nonlocal confirmed
        assert isinstance(result, Stored)
        confirmed = result.end

    disk.hook = look
    for turn in range(30):
        engine.append("q", batch_of("q", sent, turn % 4 + 1), NOW_US + turn, confirm)
        sent += turn % 4 + 1
        engine.flush(NOW_US + turn)
        while writer.step():
            engine.poll()
            look()
        assert confirmed == sent
        keeper.wait()
    assert looks > 150
    assert len(segments(tmp_path)) > 1
    disk.hook = lambda: None
    engine.close(NOW_US)


def test_a_queue_without_durability_shows_up_with_the_sync(tmp_path: Path) -> None:
    policies = Policies({"*": {"durability": "none"}})
    engine = open_log(str(tmp_path), NOW_US, settings=SMALL, policies=policies)
    # By itself: a declaration is synced always, with whatever goes out in the same group.
    engine.declare("q", NOW_US)
    engine.flush(NOW_US)
    engine.wait()
    for first in (0, 3):
        engine.append("q", batch_of("q", first, 3), NOW_US)
        engine.flush(NOW_US)
        engine.wait()
    reader = LogReader(str(tmp_path))
    assert check(reader.messages("q", 0), "q", 0) == 0
    engine.tick(NOW_US + 2 * SECOND_US)
    engine.wait()
    reader.refresh()
    assert check(reader.messages("q", 0), "q", 0) == 6
    engine.close(NOW_US)


def test_a_transaction_is_seen_whole_or_not_at_all_without_a_watermark(tmp_path: Path) -> None:
    """The scan that replaces a watermark drops a transaction without its end, as recovery does."""
    settings = LogSettings(segment_bytes=1 << 20)
    engine = write(tmp_path, 10, settings=settings)
    engine.transact("key", [("a", batch_of("a", 0, 2)), ("b", batch_of("b", 0, 2))], NOW_US)
    engine.flush(NOW_US)
    engine.wait()
    whole = LogReader(str(tmp_path)).position
    engine.abandon()
    (tmp_path / WATERMARK).unlink()
    with LogReader(str(tmp_path)) as reader:
        assert reader.position == whole
        assert check(reader.messages("a", 0), "a", 0) == 2
    (segment,) = segments(tmp_path)
    with segment.open("r+b") as file:
        file.seek(whole - 8)
        file.write(b"\xff" * 8)
    with LogReader(str(tmp_path)) as reader:
        assert reader.queues() == {"q": ReaderQueue(1, 0, 10, 0, 10), **_empty(reader, "a", "b")}
        assert check(reader.messages("q", 0), "q", 0) == 10


def _empty(reader: LogReader, *names: str) -> dict[str, ReaderQueue]:
    """Queues that were declared and hold nothing."""
    return {name: ReaderQueue(reader.queues()[name].number, 0, 0, 0, 0) for name in names}


# --- the watermark ---------------------------------------------------------------------------------


def test_the_watermark_outlives_the_broker_and_stays_the_truth(tmp_path: Path) -> None:
    engine = write(tmp_path, 50)
    engine.abandon()
    reader = LogReader(str(tmp_path))
    assert check(reader.messages("q", 0), "q", 0) == 50
    # Put it back to where the third block ended: the rest is in the files, and is not shown.
    ends = [block.header.end for block in reader.messages("q", 0)]
    mark = Watermark(str(tmp_path / WATERMARK), writable=True)
    for path in tmp_path.glob("snapshot-*"):
        path.unlink()
    mark.set(ends[2])
    mark.close()
    with LogReader(str(tmp_path)) as early:
        assert early.position == ends[2]
        assert check(early.messages("q", 0), "q", 0) == 30
    # A reader that had seen more begins again.
    reader.refresh()
    assert reader.queues()["q"].offset_end == 30


@pytest.mark.parametrize("left", [None, b"", bytes(8)], ids=["missing", "empty", "zero"])
def test_without_a_watermark_it_is_what_recovery_keeps(tmp_path: Path, left: bytes | None) -> None:
    engine = write(tmp_path, 50)
    engine.abandon()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != WATERMARK}
    (tmp_path / WATERMARK).unlink()
    if left is not None:
        (tmp_path / WATERMARK).write_bytes(left)
    reader = LogReader(str(tmp_path))
    assert check(reader.messages("q", 0), "q", 0) == 50
    position = reader.position
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != WATERMARK}
    assert after == before
    # The next broker goes on at the same place, and the reader follows it.
    engine = open_log(str(tmp_path), NOW_US, settings=SMALL)
    assert segments(tmp_path)[-1].name == f"{position:020d}.seg"
    engine.append("q", batch_of("q", 50, 5), NOW_US)
    engine.flush(NOW_US)
    engine.wait()
    reader.refresh()
    assert check(reader.messages("q", 0), "q", 0) == 55
    assert [opening for _, _, opening in reader.openings("q")] == [1, 2]
    engine.close(NOW_US)


def test_what_recovery_keeps_is_asked_again_when_files_have_changed(tmp_path: Path) -> None:
    write(tmp_path, 50).abandon()
    (tmp_path / WATERMARK).unlink()
    reader = LogReader(str(tmp_path))
    engine = open_log(str(tmp_path), NOW_US, settings=SMALL)
    engine.append("q", batch_of("q", 50, 5), NOW_US)
    engine.flush(NOW_US)
    engine.wait()
    engine.abandon()
    (tmp_path / WATERMARK).unlink()
    reader.refresh()
    assert check(reader.messages("q", 0), "q", 0) == 55


def test_a_snapshot_says_as_much_as_a_watermark(tmp_path: Path) -> None:
    """A power cut can leave an old watermark beside a newer snapshot."""
    write(tmp_path, 50).close(NOW_US)
    mark = Watermark(str(tmp_path / WATERMARK), writable=True)
    mark.set(136)
    mark.close()
    with LogReader(str(tmp_path)) as reader:
        assert check(reader.messages("q", 0), "q", 0) == 50


def test_no_folder_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(LogRefused, match="there is no such folder"):
        LogReader(str(tmp_path / "nowhere"))
    reader = LogReader(str(tmp_path))
    assert reader.queues() == {}
    with pytest.raises(LogRefused, match="there is no queue 'q'"):
        reader.messages("q", 0)
    engine = write(tmp_path, 10)
    assert check(reader.messages("q", 0), "q", 0) == 10
    engine.close(NOW_US)


def test_a_folder_that_goes_away(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write(folder, 10).close(NOW_US)
    reader = LogReader(str(folder))
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(LogRefused, match="no such folder any more"):
        reader.refresh()


def test_what_readers_were_shown_is_never_cut(tmp_path: Path) -> None:
    """The last block rots after it was synced and shown. A start reports it, and takes no offset back."""
    settings = LogSettings(segment_bytes=1 << 20)
    engine = write(tmp_path, 30, settings=settings)
    engine.abandon()
    reader = LogReader(str(tmp_path))
    blocks = list(reader.messages("q", 0))
    path, at = damage_block(tmp_path, reader, 25)
    engine = open_log(str(tmp_path), NOW_US, settings=settings)
    (kept,) = tmp_path.glob("quarantine-*")
    assert kept.name.endswith(f"-{at}")
    assert [(d.queue, d.first, d.end) for d in engine.damage] == [("", 0, 0), ("q", 20, 30)]
    assert path.stat().st_size == at + 80 + blocks[-1].header.body_bytes
    assert len(blocks[-1].messages()) == 10  # Mapped, and still there: a cut file would have ended this test.
    engine.append("q", batch_of("q", 30, 5), NOW_US)
    engine.flush(NOW_US)
    engine.wait()
    reader.refresh()
    assert check(reader.messages("q", 30), "q", 30) == 35
    with pytest.raises(LogDamaged, match="offsets 20 to 29"):
        list(reader.messages("q", 0))
    engine.close(NOW_US)
    engine = open_log(str(tmp_path), NOW_US, settings=settings)
    assert engine.describe("q").offset_end == 35
    engine.close(NOW_US)


def test_offsets_that_are_given_once_more_begin_a_new_view(tmp_path: Path) -> None:
    """The same, but the header is gone too: nobody can know what was there, except those who saw it."""
    settings = LogSettings(segment_bytes=1 << 20)
    write(tmp_path, 30, settings=settings).abandon()
    reader = LogReader(str(tmp_path))
    assert check(reader.messages("q", 0), "q", 0) == 30
    path, at = damage_block(tmp_path, reader, 25)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"JUNK")
    engine = open_log(str(tmp_path), NOW_US, settings=settings)
    assert len(engine.damage) == 1
    engine.append("q", batch_of("q", 20, 5), NOW_US)
    engine.flush(NOW_US)
    engine.wait()
    reader.refresh()
    assert check(reader.messages("q", 0), "q", 0) == 25
    engine.close(NOW_US)


# --- what is not there -----------------------------------------------------------------------------


def test_offsets_behind_the_end_are_named(tmp_path: Path) -> None:
    write(tmp_path, 10).close(NOW_US)
    reader = LogReader(str(tmp_path))
    with pytest.raises(OffsetsMissing, match=r"queue 'q': offsets 10 to 11 are not in the log") as caught:
        reader.messages("q", 5, 12)
    assert (caught.value.queue, caught.value.first, caught.value.end) == ("q", 10, 12)
    with pytest.raises(OffsetsMissing, match=r"event 10 is not in the log .* ends before event 10"):
        reader.event_blocks("q", 0, 11)
    assert check(reader.messages("q", 5, 12, fail_on_loss=False), "q", 5) == 10


def damage_block(folder: Path, reader: LogReader, offset: int) -> tuple[Path, int]:
    """Flip a bit in the body of the block with that message; its file and position."""
    (block,) = reader.messages("q", offset, offset + 1)
    position = block.header.position
    path = max(path for path in segments(folder) if int(path.name[:20]) <= position)
    at = position - int(path.name[:20])
    with path.open("r+b") as file:
        file.seek(at + 80 + 3)
        byte = file.read(1)
        file.seek(at + 80 + 3)
        file.write(bytes([byte[0] ^ 1]))
    return path, at


def test_a_damaged_body_is_an_error_with_file_position_and_offsets(tmp_path: Path) -> None:
    write(tmp_path, 100).close(NOW_US)
    reader = LogReader(str(tmp_path))
    path, at = damage_block(tmp_path, reader, 45)
    blocks = reader.messages("q", 0)
    assert check((next(blocks) for _ in range(4)), "q", 0) == 40
    with pytest.raises(LogDamaged) as caught:
        next(blocks)
    for part in (str(path), f"position {at}", "queue 'q'", "offsets 40 to 49"):
        assert part in str(caught.value)
    # Those who do not mind go on behind it; its header was enough for the events.
    assert [b.header.first_offset for b in reader.messages("q", 30, 70, fail_on_loss=False)] == [30, 50, 60]
    assert len(list(reader.events("q", 0))) == 10


def test_a_damaged_header_is_a_gap_with_offsets(tmp_path: Path) -> None:
    write(tmp_path, 100).close(NOW_US)
    path, at = damage_block(tmp_path, LogReader(str(tmp_path)), 45)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"JUNK")
    for snapshot in tmp_path.glob("snapshot-*"):
        snapshot.unlink()
    reader = LogReader(str(tmp_path))
    with pytest.raises(OffsetsMissing, match=r"queue 'q': offsets 40 to 49 .*penstock verify"):
        list(reader.messages("q", 0))
    with pytest.raises(OffsetsMissing, match=r"queue 'q': events 42 to 49 "):
        list(reader.events("q", 42))
    assert [b.header.first_offset for b in reader.messages("q", 39, 51, fail_on_loss=False)] == [30, 50]


def test_what_is_damaged_at_the_start_of_a_queue_is_not_said_to_be_retention_s_doing(tmp_path: Path) -> None:
    write(tmp_path, 100).close(NOW_US)
    path, at = damage_block(tmp_path, LogReader(str(tmp_path)), 5)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"JUNK")
    with pytest.raises(OffsetsMissing, match=r"queue 'q': offsets 0 to 9 .*penstock verify"):
        list(LogReader(str(tmp_path)).messages("q", 0))


@pytest.mark.parametrize("missed", [1, 100], ids=["one", "all"])
def test_a_listing_that_misses_names_is_taken_again_before_anything_is_said_to_be_missing(
    missed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 300).close(NOW_US)
    reader = LogReader(str(tmp_path))
    hidden = [path.name for path in segments(tmp_path)][:missed]
    names = RealDisk.names
    with monkeypatch.context() as patch:
        patch.setattr(RealDisk, "names", lambda disk: [name for name in names(disk) if name not in hidden])
        reader.refresh()
    assert check(reader.messages("q", 0), "q", 0) == 300


def test_a_segment_in_which_no_header_is_left(tmp_path: Path) -> None:
    write(tmp_path, 300).close(NOW_US)
    path = segments(tmp_path)[1]
    path.write_bytes(path.read_bytes().replace(b"PSK1", b"JUNK"))
    reader = LogReader(str(tmp_path))
    with pytest.raises(OffsetsMissing, match="they should be there"):
        list(reader.messages("q", 0))
    lost = 300 - sum(block.hi - block.lo for block in reader.messages("q", 0, fail_on_loss=False))
    assert 0 < lost < 150


def test_a_header_that_goes_bad_after_it_was_indexed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 100).close(NOW_US)
    reader = LogReader(str(tmp_path))
    path, at = damage_block(tmp_path, reader, 45)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"JUNK")
    with pytest.raises(LogDamaged, match=rf"position {at} was valid before"):
        list(reader.messages("q", 0))
    there = [block.header for block in reader.messages("q", 0, fail_on_loss=False)]
    (gap,) = [(a.offset_end, b.first_offset) for a, b in pairwise(there) if a.offset_end < b.first_offset]
    assert gap[0] <= 45 < gap[1]
    assert f"position {at} was valid before" in caplog.text
    assert reader.kept_from("q", gap[0]) == gap[1]
    assert reader.offset_at("q", 0) == 0


def test_what_retention_took_is_named_so(tmp_path: Path) -> None:
    worker = Worker(tmp_path, 5, queues=("brief", "lazy"))
    reader = LogReader(str(tmp_path))
    for _ in range(400):
        worker.turn()
    worker.settle_down()
    worker.engine.trim(worker.now_us)
    worker.engine.wait()
    reader.refresh()
    start = reader.queues()["brief"].offset_start
    assert start > 0
    with pytest.raises(OffsetsMissing, match=rf"retention has removed what was before offset {start}"):
        list(reader.messages("brief", 0))
    worker.engine.close(worker.now_us)


def test_files_that_have_gone_since_the_last_look(tmp_path: Path) -> None:
    """The view still has them; opening one fails, and the reader looks again."""
    worker = Worker(tmp_path, 6, queues=("brief", "lazy"))
    for _ in range(100):
        worker.turn()
    worker.settle_down()
    reader = LogReader(str(tmp_path), maps_max=1)
    before = reader.queues()["brief"]
    for _ in range(3):
        worker.reopen(crash=False)
        worker.engine.trim(worker.now_us + 10 * SECOND_US)
        worker.engine.wait()
    with pytest.raises(OffsetsMissing, match="retention has removed"):
        list(reader.messages("brief", before.offset_start))
    after, info = reader.queues()["brief"], worker.engine.describe("brief")
    assert after.offset_start > before.offset_start
    living = info.ready + info.delayed + info.dead
    assert living > 0
    there = sum(block.hi - block.lo for block in reader.messages("brief", 0, fail_on_loss=False))
    assert there >= living
    worker.engine.close(worker.now_us)


def test_files_that_go_on_going(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 50).close(NOW_US)
    reader = LogReader(str(tmp_path))

    def gone(_self: object, segment: object) -> memoryview:
        raise FileNotFoundError(segment)

    monkeypatch.setattr(mapped.MappedSegments, "view", gone)
    with pytest.raises(LogChanging, match="were replaced 10 times while they were opened; try again"):
        list(reader.messages("q", 0))


def test_whatever_is_done_to_the_files_an_error_is_ours(tmp_path: Path) -> None:
    """Cut, emptied, filled with junk, removed: what is handed out is as it was written, or an LogError."""
    folder = tmp_path / "data"
    write(folder, 300).close(NOW_US)
    good = {path.name: path.read_bytes() for path in folder.iterdir()}
    rng = random.Random(3)
    errors = 0
    for _ in range(60):
        path = folder / rng.choice(sorted(name for name in good if name != RealDisk.LOCK))
        path.write_bytes(harmed(good[path.name], rng))
        with LogReader(str(folder)) as reader:
            for queue in reader.queues():
                for found in reader.messages(queue, 0, fail_on_loss=False):
                    first = found.header.first_offset + found.lo
                    assert found.messages() == [content("q", first + i) for i in range(found.hi - found.lo)]
                try:
                    check(reader.messages(queue, 0), "q", 0)
                    list(reader.events(queue, 0))
                except LogError:
                    errors += 1
        for name, whole in good.items():
            (folder / name).write_bytes(whole)
    assert errors > 10


# --- memory ----------------------------------------------------------------------------------------


def test_windows_stay_good_when_maps_and_files_are_gone(tmp_path: Path) -> None:
    write(tmp_path, 300).close(NOW_US)
    assert len(segments(tmp_path)) > 3
    reader = LogReader(str(tmp_path), maps_max=1)
    blocks = list(reader.messages("q", 0))
    reader.close()
    for path in segments(tmp_path):
        path.unlink()
    gc.collect()
    assert check(iter(blocks), "q", 0) == 300


def test_maps_are_bounded_and_indexes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "INDEX_ROWS_MAX", 8)
    write(tmp_path, 300).close(NOW_US)
    reader = LogReader(str(tmp_path), maps_max=2)
    for _ in range(2):
        assert check(reader.messages("q", 0), "q", 0) == 300
        assert check(reader.messages("q", 111, 222), "q", 111) == 222
    held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
    assert 0 < sum(path.startswith(str(tmp_path)) and path.endswith(".seg") for path in held) <= 2
    assert sum(segment.index is not None for segment in reader._view.segments) <= 4


def _is_link(fd: str) -> bool:
    """False for the descriptor that listed the folder, which is closed by now."""
    return os.path.islink(f"/proc/self/fd/{fd}")


# --- the overlay -----------------------------------------------------------------------------------


def test_an_overlay_keeps_every_change_to_itself(tmp_path: Path) -> None:
    (tmp_path / "stored").write_bytes(b"0123456789")
    (tmp_path / "other").write_bytes(b"other")
    disk = OverlayDisk(str(tmp_path))
    file = disk.open("stored")
    file.truncate(6)
    file.truncate(8)  # Nothing grows.
    file.write(2, [b"23", b"45"])  # As it is: allowed, and no change.
    with pytest.raises(OSError, match="cannot be changed through an overlay"):
        file.write(0, [b"X"])
    assert (file.size(), file.read(4, 100), file.read(9, 1)) == (6, b"45", b"")
    file.sync()
    file.close()
    made = disk.create("made", 4)
    made.write(2, [b"ab", b"cd"])
    made.sync()
    made.truncate(5)
    made.close()
    disk.rename("made", "new")
    disk.rename("stored", "moved")
    disk.remove("other")
    disk.sync_names()
    assert disk.names() == ["moved", "new"]
    assert read_whole(disk, "new") == b"\0\0abc"
    assert read_whole(disk, "moved") == b"012345"
    for act in (disk.open, disk.remove, lambda name: disk.rename(name, "x")):
        with pytest.raises(FileNotFoundError):
            act("other")
    write_whole(disk, "moved", b"written")
    assert read_whole(disk, "moved") == b"written"
    disk.remove("new")
    assert disk.names() == ["moved"]
    assert disk.where("new") == str(tmp_path / "new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "stored": b"0123456789",
        "other": b"other",
    }


def test_an_overlay_with_an_end_shows_nothing_behind_it(tmp_path: Path) -> None:
    write(tmp_path, 300).close(NOW_US)
    older, newer = sorted(path.name for path in tmp_path.glob("snapshot-*"))
    bases = [int(path.name[:20]) for path in segments(tmp_path)]
    end = int(newer.removeprefix("snapshot-")) - 8
    assert bases[-1] < end
    disk = OverlayDisk(str(tmp_path), end)
    assert older in disk.names()
    assert newer not in disk.names()
    assert disk.open(f"{bases[-1]:020d}.seg").size() == end - bases[-1]
    # Where no snapshot is that old, the newest one is the end: nobody can tell how things stood before.
    state, position = replayed(str(tmp_path), 100)
    assert position == end + 8
    assert state.queues["q"].pending.tail == 300
    for name in (older, newer):
        (tmp_path / name).unlink()
    names = OverlayDisk(str(tmp_path), bases[2]).names()
    assert [name for name in names if parse_segment_name(name)] == [f"{base:020d}.seg" for base in bases[:2]]


# --- the page about the format ---------------------------------------------------------------------

FORMAT_PAGE = Path(__file__).parent.parent.parent / "docs" / "log-format.md"


@interpreted_only
@pytest.mark.parametrize("module", [layout, ledger, adoption], ids=["block", "ledger", "adoption"])
def test_the_page_has_the_layouts_of_the_sources(module: ModuleType) -> None:
    page = {" ".join(line.split()) for line in FORMAT_PAGE.read_text().splitlines()}
    opening, _, _ = (module.__doc__ or "").partition("Rules that always hold")
    table = [line for line in opening.splitlines() if line.startswith("    ")]
    assert len(table) > 5
    assert [line for line in table if " ".join(line.split()) not in page] == []


def test_the_page_has_the_flags_and_doors_of_the_sources() -> None:
    page = FORMAT_PAGE.read_text()
    flags = {name: value for name, value in vars(layout).items() if name.startswith("FLAG_")}
    assert dict(re.findall(r"\| `(FLAG_\w+)` \| (\d+) \|", page)) == {n: str(v) for n, v in flags.items()}
    doors = ", ".join(f"{n} `{name}`" if name else f"{n} none" for n, name in enumerate(layout.PROTOCOLS))
    assert f"`PROTOCOLS` is: {doors}." in page


def test_the_page_s_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "penstock-data", 30).close(NOW_US)
    (example,) = re.findall(r"```python\n(.*?)```", FORMAT_PAGE.read_text(), re.DOTALL)
    exec(example.replace('"penstock-data"', repr(str(tmp_path / "penstock-data"))), {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {name for name, _ in printed} == {"q"}
    assert sum(int(rows) for _, rows in printed) == 30


# --- a writer in another process -------------------------------------------------------------------

LIVING = 97
"""Every so many messages one is never settled, so that segments are compacted and not only removed."""


def live_writer(folder: str, turns: int, ends: Connection) -> None:
    """Sends, settles, rolls segments, trims and compacts; says after each turn what is confirmed."""
    policies = Policies({"*": {"retention-seconds": 0}})
    engine = open_log(folder, NOW_US, settings=SMALL, policies=policies)
    sent = {"q": 0, "p": 0}
    confirmed = {"q": 0, "p": 0}

    def receipt(stored: object) -> None:
        assert isinstance(stored, Stored)
        confirmed[stored.queue] = stored.end

    now_us = NOW_US
    for turn in range(turns):
        now_us += SECOND_US
        for queue in ("q", "p"):
            count = (turn * 5 + len(queue)) % 23 + 1
            engine.append(queue, batch_of(queue, sent[queue], count), now_us, receipt)
            sent[queue] += count
            for piece in engine.take(queue, "c", 40, now_us):
                start, end = piece.offset_start, piece.offset_end
                ranges = [(o, o + 1) for o in range(start, end) if o % LIVING]
                engine.settle(queue, "c", Outcome.ACK, ranges, now_us)
        engine.flush(now_us)
        if turn % 3 == 0:
            engine.wait()
            engine.trim(now_us)
        engine.poll()
        ends.send((confirmed["q"], confirmed["p"]))
    engine.wait()
    engine.close(now_us)
    ends.send((confirmed["q"], confirmed["p"]))
    ends.close()


def staging_writer(folder: str, turns: int, ends: Connection) -> None:
    """The same with transactions: each brings both queues as many messages, in one stage or in two."""
    engine = open_log(folder, NOW_US, settings=SMALL, policies=Policies({"*": {"retention-seconds": 0}}))
    sent = confirmed = 0
    stages: list[str] = []

    def committed(done: TransactionDone | LogError) -> None:
        nonlocal confirmed
        assert isinstance(done, TransactionDone)
        assert [part.end for part in done.stored] == [done.stored[0].end] * 2
        confirmed = done.stored[0].end

    def staged(info: StageInfo | LogError) -> None:
        assert isinstance(info, StageInfo)
        stages.append(info.stage)

    now_us = NOW_US
    for turn in range(turns):
        now_us += SECOND_US
        key, count, wanted = f"key-{turn}", turn * 5 % 23 + 1, turn % 2 + 1
        parts = [(queue, batch_of(queue, sent, count)) for queue in ("q", "p")]
        stages.clear()
        for some in (parts,) if wanted == 1 else (parts[1:], parts[:1]):
            engine.stage(key, some, now_us, staged)
        engine.stage(f"abandoned-{turn}", parts, now_us, lambda _: None)
        while len(stages) < wanted:
            engine.wait()
        now_us += SECOND_US
        engine.commit(key, stages, now_us, committed)
        sent += count
        for queue in ("q", "p"):
            for piece in engine.take(queue, "c", 40, now_us):
                start, end = piece.offset_start, piece.offset_end
                ranges = [(o, o + 1) for o in range(start, end) if o % LIVING]
                engine.settle(queue, "c", Outcome.ACK, ranges, now_us)
        engine.flush(now_us)
        if turn % 3 == 0:
            engine.wait()
            engine.abort(f"abandoned-{turn - 3}", now_us)
            engine.trim(now_us)
        engine.poll()
        ends.send((confirmed, confirmed))
    engine.wait()
    engine.close(now_us)
    ends.send((confirmed, confirmed))
    ends.close()


def start_writer(
    folder: Path, turns: int, writer: Callable[[str, int, Connection], None] = live_writer
) -> tuple[multiprocessing.Process, Connection]:
    context = multiprocessing.get_context("spawn")
    ends, child_ends = context.Pipe(duplex=False)
    process = context.Process(target=writer, args=(str(folder), turns, child_ends))
    process.start()
    child_ends.close()
    return process, ends  # type: ignore[return-value]


def latest(ends: Connection, known: tuple[int, int]) -> tuple[tuple[int, int], bool]:
    """What the writer has said last, and whether it has ended; waits for its next word."""
    try:
        assert ends.poll(30), "the writer has said nothing for half a minute"
        known = ends.recv()
        while ends.poll(0):
            known = ends.recv()
    except EOFError:
        return known, True
    return known, False


def follow(reader: LogReader, queue: str, at: int) -> int:
    """Read on from `at`; where retention was faster, from where the log begins by now."""
    while True:
        try:
            for block in reader.messages(queue, at):
                at = check(iter((block,)), queue, at)
        except OffsetsMissing as error:
            lost = error.first
        else:
            return at
        reader.refresh()
        start = reader.queues()[queue].offset_start
        assert lost == at < start
        at = start


def follow_events(reader: LogReader, queue: str, at: int) -> int:
    """The same for events: numbers without a gap, each message accepted before anything else."""
    while True:
        try:
            for run in reader.events(queue, at):
                assert run.event_offset == at
                assert (run.event is Event.ACKED) == (run.consumer == "c") == bool(run.dispatched_us)
                at += run.end - run.first
        except OffsetsMissing as error:
            lost = error.first
        else:
            return at
        reader.refresh()
        start = reader.queues()[queue].event_start
        assert lost == at < start
        at = start


@pytest.mark.parametrize("writer", [live_writer, staging_writer])
def test_following_a_writer_that_rolls_trims_and_compacts(
    tmp_path: Path, writer: Callable[[str, int, Connection], None]
) -> None:
    process, ends = start_writer(tmp_path, 250, writer)
    try:
        reader = LogReader(str(tmp_path))
        at, events_at = {"q": 0, "p": 0}, {"q": 0, "p": 0}
        confirmed, ended = (0, 0), False
        while not ended:
            confirmed, ended = latest(ends, confirmed)
            reader.refresh()
            if writer is staging_writer:  # Of each transaction, all is there or nothing.
                assert len({it.offset_end for it in reader.queues().values()}) <= 1
            for queue, end in zip(at, confirmed, strict=True):
                if queue in reader.queues():
                    at[queue] = follow(reader, queue, at[queue])
                    events_at[queue] = follow_events(reader, queue, events_at[queue])
                # What the writer's peers were told to be safe is there to be read.
                assert at[queue] >= end
        process.join(30)
        assert process.exitcode == 0
        assert (at["q"], at["p"]) == confirmed
        assert events_at == {name: queue.event_end for name, queue in reader.queues().items()}
        names = [path.name for path in segments(tmp_path)]
        assert names[0] != "00000000000000000000.seg"
        assert any(name.count(".") == 2 for name in names)
        assert reader.queues()["q"].offset_start > 0
    finally:
        process.kill()
        process.join(30)


@pytest.mark.parametrize("watermark_lost", [False, True])
def test_a_writer_that_is_killed(tmp_path: Path, watermark_lost: bool) -> None:
    process, ends = start_writer(tmp_path, 10_000)
    try:
        confirmed, _ = latest(ends, (0, 0))
        while confirmed[0] < 500:
            confirmed, _ = latest(ends, confirmed)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
        ended = False
        while not ended:
            confirmed, ended = latest(ends, confirmed)
    except (EOFError, struct.error):
        pass  # Killed in the middle of a word.
    finally:
        process.kill()
        process.join(30)
    if watermark_lost:
        (tmp_path / WATERMARK).unlink()
    reader = LogReader(str(tmp_path))
    for queue, end in zip(("q", "p"), confirmed, strict=True):
        start = reader.queues()[queue].offset_start
        assert check(reader.messages(queue, start), queue, start) >= end
    engine = open_log(str(tmp_path), NOW_US, settings=SMALL)
    assert list(engine.damage) == []
    reader.refresh()
    assert_same(reader, engine)
    engine.close(NOW_US)
