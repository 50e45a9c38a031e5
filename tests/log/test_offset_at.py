"""Where in a log a moment is: found by headers of blocks, across segments, behind what retention took."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.log.disk import RealDisk
from penstock.log.errors import LogRefused
from penstock.log.log import Log
from penstock.log.reader import LogReader
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.policy import Policies
from penstock.model.words import Outcome
from tests.log.folders import NOW_US, SECOND_US
from tests.log.inline import InlineWorker

SMALL = LogSettings(segment_bytes=4096, block_bytes=1024, snapshot_blocks=10)
COUNT, PER_BLOCK = 400, 10


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Log]:
    """A log with blocks of ten messages, a second apart; the first of a second queue comes half-way."""
    engine = Log.open(
        RealDisk(str(tmp_path)),
        NOW_US,
        settings=SMALL,
        policies=Policies({"q": {"retention-seconds": 0}}),
        writer=InlineWorker(),
        keeper=InlineWorker(),
    )
    for number, first in enumerate(range(0, COUNT, PER_BLOCK)):
        now_us = NOW_US + number * SECOND_US
        engine.append("q", Batch.of([b"%04d" % (first + n) + b"x" * 40 for n in range(PER_BLOCK)]), now_us)
        if number == 20:
            engine.append("late", Batch.of([b"once"]), now_us)
        engine.flush(now_us)
        engine.wait()
    yield engine
    engine.close(NOW_US + COUNT * SECOND_US)


def time_of(block: int) -> int:
    return NOW_US + block * SECOND_US


def test_the_first_message_from_a_time_on(engine: Log, tmp_path: Path) -> None:
    with LogReader(str(tmp_path)) as reader:
        assert len([name for name in tmp_path.iterdir() if name.suffix == ".seg"]) > 5
        for block in range(COUNT // PER_BLOCK):
            assert reader.offset_at("q", time_of(block)) == block * PER_BLOCK
            assert reader.offset_at("q", time_of(block) + 1) == (block + 1) * PER_BLOCK
            assert reader.offset_at("q", time_of(block), events=True) == block * PER_BLOCK
        assert reader.offset_at("q", 0) == 0
        assert reader.offset_at("late", 0) == 0
        assert reader.offset_at("late", time_of(20) + 1) == 1
        with pytest.raises(LogRefused, match="there is no queue 'nowhere'"):
            reader.offset_at("nowhere", 0)


def test_settlements_are_events_and_no_messages(engine: Log, tmp_path: Path) -> None:
    later = time_of(COUNT)
    taken = engine.take("q", "me", 5, later)
    engine.settle(
        "q", "me", Outcome.ACK, [(s.first_offset + s.lo, s.first_offset + s.hi) for s in taken], later
    )
    engine.flush(later)
    engine.wait()
    with LogReader(str(tmp_path)) as reader:
        assert reader.offset_at("q", later) == COUNT
        assert COUNT <= reader.offset_at("q", later, events=True) < COUNT + 10
        assert reader.offset_at("q", later + 1, events=True) == reader.queues()["q"].event_end


def test_what_retention_has_taken_is_not_named(engine: Log, tmp_path: Path) -> None:
    later = time_of(COUNT)
    engine.purge("q", later, limit=200)
    engine.flush(later)
    engine.wait()
    for step in range(4):
        engine.trim(later + (step + 1) * SECOND_US)
        engine.wait()
    with LogReader(str(tmp_path)) as reader:
        start = reader.queues()["q"].offset_start
        assert 0 < start <= 200
        assert reader.offset_at("q", 0) == start
        assert reader.offset_at("q", time_of(25)) == 250


def test_what_lives_on_before_the_log_is_complete_is_found_by_those_who_want_it(
    engine: Log, tmp_path: Path
) -> None:
    later = time_of(COUNT)
    taken = [(s.first_offset + s.lo, s.first_offset + s.hi) for s in engine.take("q", "me", 200, later)]
    settled = [(max(first, 0), end) for first, end in taken if not first <= 15 < end]
    (kept,) = [(first, end) for first, end in taken if first <= 15 < end]
    settled += [(first, end) for first, end in ((kept[0], 15), (16, kept[1])) if first < end]
    engine.settle("q", "me", Outcome.ACK, sorted(settled), later)
    engine.flush(later)
    engine.wait()
    for step in range(6):
        engine.trim(later + (step + 1) * SECOND_US)
        engine.wait()
    with LogReader(str(tmp_path)) as reader:
        start = reader.queues()["q"].offset_start
        assert 15 < start <= 200
        assert reader.kept_from("q", 0) == 15
        assert reader.offset_at("q", 0) == start
        assert reader.offset_at("q", 0, living=True) == 15
        assert reader.offset_at("q", time_of(1), living=True) == 15
        assert 15 < reader.offset_at("q", time_of(1) + 1, living=True) <= 200
        assert reader.offset_at("q", time_of(25), living=True) == 250
