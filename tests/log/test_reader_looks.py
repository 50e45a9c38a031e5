"""What those need who look here and there: which messages are kept, and which blocks are about them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.log import mapped
from penstock.log.block import KIND_MESSAGES
from penstock.log.errors import LogDamaged, LogRefused
from penstock.log.log import open_log
from penstock.log.overlay import LogChanging
from penstock.log.reader import LogReader
from penstock.log.segment import parse_segment_name
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.words import Outcome
from tests.log.folders import NOW_US, Worker

QUEUES = ("brief", "lazy", "short")


@pytest.fixture(scope="module")
def thinned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A log of which retention has taken and compacted a lot; still open."""
    worker = Worker(tmp_path_factory.mktemp("thinned"), 19, queues=QUEUES)
    for part in range(6):
        for _ in range(80):
            worker.turn()
        worker.settle_down()
        worker.reopen(crash=part % 2 == 0)
    worker.settle_down()
    yield worker
    worker.engine.close(worker.now_us)


def kept_offsets(reader: LogReader, queue: str) -> list[int]:
    return [
        block.header.first_offset + i
        for block in reader.messages(queue, 0, fail_on_loss=False)
        for i in range(block.lo, block.hi)
    ]


@pytest.mark.parametrize("queue", QUEUES)
def test_what_is_kept_from_every_offset_on(thinned: Worker, queue: str) -> None:
    reader = LogReader(str(thinned.folder))
    known = reader.queue(queue)
    assert known is not None
    kept = kept_offsets(reader, queue)
    for offset in range(known.offset_end + 2):
        assert reader.kept_from(queue, offset) == next((it for it in kept if it >= offset), None)


def test_the_log_has_gaps_and_what_is_alive_before_its_start(thinned: Worker) -> None:
    reader = LogReader(str(thinned.folder))
    known = reader.queue("brief")
    assert known is not None
    kept = kept_offsets(reader, "brief")
    before = [offset for offset in kept if offset < known.offset_start]
    assert before
    assert before[-1] - before[0] >= len(before)
    assert kept[len(before) :] == [*range(known.offset_start, known.offset_end)]


def test_one_queue_is_what_all_queues_say(thinned: Worker) -> None:
    reader = LogReader(str(thinned.folder))
    for name, facts in reader.queues().items():
        assert reader.queue(name) == facts
    assert reader.queue("nix") is None
    with pytest.raises(LogRefused, match="no queue 'nix'"):
        reader.kept_from("nix", 0)


def test_what_is_kept_behind_a_damaged_header(tmp_path: Path) -> None:
    engine = open_log(str(tmp_path), NOW_US, settings=LogSettings(segment_bytes=4096, block_bytes=1024))
    for at in range(0, 60, 10):
        engine.append("q", Batch.of([b"x" * 50] * 10), NOW_US + at)
        engine.flush(NOW_US + at)
        engine.wait()
    engine.close(NOW_US)
    reader = LogReader(str(tmp_path))
    blocks = list(reader.messages("q", 0))
    for path in sorted(path for path in tmp_path.iterdir() if parse_segment_name(path.name)):
        base, _ = parse_segment_name(path.name) or (0, 0)
        data = bytearray(path.read_bytes())
        position = blocks[2].header.position - base
        if 0 <= position < len(data):
            data[position + 20] ^= 1
            path.write_bytes(data)
    del blocks
    reader = LogReader(str(tmp_path))
    assert [reader.kept_from("q", offset) for offset in (19, 20, 29, 30, 59, 60)] == [
        19,
        30,
        30,
        30,
        59,
        None,
    ]


def test_files_that_have_gone_since_the_last_look(tmp_path: Path) -> None:
    worker = Worker(tmp_path, 7, queues=QUEUES)
    for _ in range(100):
        worker.turn()
    worker.engine.flush(worker.now_us)
    worker.engine.wait()
    reader = LogReader(str(tmp_path), maps_max=1)
    before = set(tmp_path.iterdir())
    for _ in range(6):
        worker.settle_down()
        worker.reopen(crash=False)
    assert before - set(tmp_path.iterdir())
    fresh = LogReader(str(tmp_path))
    for queue in QUEUES:
        for offset in range(0, worker.engine.describe(queue).offset_end, 7):
            assert reader.kept_from(queue, offset) == fresh.kept_from(queue, offset)
    worker.engine.close(worker.now_us)


def test_files_that_go_on_going(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_log(str(tmp_path), NOW_US)
    engine.append("q", Batch.of([b"x"] * 10), NOW_US)
    engine.close(NOW_US)
    reader = LogReader(str(tmp_path))

    def gone(_self: object, segment: object) -> memoryview:
        raise FileNotFoundError(segment)

    monkeypatch.setattr(mapped.MappedSegments, "view", gone)
    with pytest.raises(LogChanging, match="were replaced 10 times while they were opened; try again"):
        reader.kept_from("q", 0)


# --- blocks about some messages --------------------------------------------------------------------


@pytest.mark.parametrize("queue", QUEUES)
def test_blocks_about_a_range_have_all_its_events(thinned: Worker, queue: str) -> None:
    reader = LogReader(str(thinned.folder))
    known = reader.queue(queue)
    assert known is not None
    runs = list(reader.events(queue, known.event_start))
    every = list(reader.event_blocks(queue, known.event_start))
    for first in range(known.offset_start, known.offset_end, 9):
        about = (first, first + 9)
        blocks = list(reader.event_blocks(queue, known.event_start, about=about))
        numbers = {block.header.first_event + i for block in blocks for i in range(block.lo, block.hi)}
        wanted = {
            run.event_offset + i
            for run in runs
            for i in range(run.end - run.first)
            if about[0] <= run.first + i < about[1]
        }
        assert wanted <= numbers
        assert len(blocks) < len(every)


def test_blocks_about_other_messages_are_not_read(tmp_path: Path) -> None:
    """A damaged body of theirs does not matter; one of ours does."""
    engine = open_log(str(tmp_path), NOW_US)
    engine.append("q", Batch.of([b"x"] * 10), NOW_US)
    for who, offset in (("early", 2), ("later", 5)):
        engine.take("q", who, 10, NOW_US)
        engine.settle("q", who, Outcome.ACK, [(offset, offset + 1)], NOW_US)
        engine.give_back("q", who, NOW_US, ranges=[(offset + 1, 10)])
        engine.flush(NOW_US)
        engine.wait()
    engine.close(NOW_US)
    (path,) = (path for path in tmp_path.iterdir() if parse_segment_name(path.name))
    data = bytearray(path.read_bytes())
    data[data.index(b"later")] ^= 1
    path.write_bytes(data)
    reader = LogReader(str(tmp_path))
    blocks = list(reader.event_blocks("q", 0, about=(2, 3)))
    assert [block.header.kind == KIND_MESSAGES for block in blocks] == [True, False]
    with pytest.raises(LogDamaged, match="events"):
        list(reader.event_blocks("q", 0, about=(5, 6)))
    assert [block.header.kind for block in reader.event_blocks("q", 0, about=(0, 1))] == [KIND_MESSAGES]
