"""Walks over a log whose files go while they are read: every record or an error, never a gap."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.http.reading.looking import look_at_one
from penstock.log.errors import LogError
from penstock.log.log import Log, open_log
from penstock.log.overlay import TRIES_MAX
from penstock.log.read_block import Block
from penstock.log.reader import LogReader, OffsetsMissing
from penstock.log.results import EventRun
from penstock.log.segment import parse_segment_name, segment_name
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.policy import Policies
from penstock.model.words import Outcome
from tests.log.folders import NOW_US, Worker

SMALL = LogSettings(segment_bytes=4096, block_bytes=1024, snapshot_blocks=10)
KEPT = 17
"""Every so many messages one is never settled."""


def content(offset: int) -> bytes:
    return b"q/%d/" % offset + b"#" * 40


def write(folder: Path, messages: int) -> Log:
    """A log with that many messages in the queue `q`, ten a block, of which nothing need be kept."""
    policies = Policies({"*": {"retention-seconds": 0}})
    engine = open_log(str(folder), NOW_US, settings=SMALL, policies=policies)
    for first in range(0, messages, 10):
        engine.append("q", Batch.of([content(offset) for offset in range(first, first + 10)]), NOW_US)
        engine.flush(NOW_US)
        engine.wait()
    return engine


def compact(engine: Log) -> None:
    """Settle all but the kept ones, and have retention do what it can."""
    for piece in engine.take("q", "c", 1000, NOW_US):
        ranges = [(o, o + 1) for o in range(piece.offset_start, piece.offset_end) if o % KEPT]
        engine.settle("q", "c", Outcome.ACK, ranges, NOW_US)
    engine.flush(NOW_US)
    engine.wait()
    engine.trim(NOW_US)
    engine.wait()


def evict(reader: LogReader) -> None:
    """Look at the end of the log: with one map, those of earlier files are let go."""
    assert len(list(reader.messages("q", reader.queues()["q"].offset_end - 1))) == 1


def segments(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if parse_segment_name(path.name))


def test_a_living_message_is_shown_though_its_file_went_with_its_map(tmp_path: Path) -> None:
    """The walk stands in the middle of a file when that is compacted; what it reads next is elsewhere now."""
    engine = write(tmp_path, 300)
    reader = LogReader(str(tmp_path), maps_max=1)
    blocks = reader.messages("q", 0, fail_on_loss=False)
    seen = dict(enumerate(next(blocks).messages()))
    compact(engine)
    assert any(path.name.count(".") == 2 for path in segments(tmp_path))
    evict(reader)
    for block in blocks:
        seen |= enumerate(block.messages(), block.header.first_offset + block.lo)
    assert [offset for offset in range(0, 300, KEPT) if offset not in seen] == []
    assert all(payload == content(offset) for offset, payload in seen.items())
    engine.close(NOW_US)


@pytest.mark.parametrize("events", [False, True])
def test_what_went_with_file_and_map_is_an_error(tmp_path: Path, events: bool) -> None:
    engine = write(tmp_path, 300)
    for piece in engine.take("q", "c", 100, NOW_US):
        engine.settle("q", "c", Outcome.ACK, [(piece.offset_start, piece.offset_end)], NOW_US)
    engine.flush(NOW_US)
    engine.wait()
    reader = LogReader(str(tmp_path), maps_max=1)
    walk = numbers(reader.event_blocks("q", 0)) if events else offsets(reader.messages("q", 0))
    assert [next(walk) for _ in range(5)] == [(at, at + 10) for at in range(0, 50, 10)]
    engine.trim(NOW_US)
    engine.wait()
    evict(reader)
    with pytest.raises(OffsetsMissing, match="retention has removed") as missing:
        list(walk)
    assert 50 <= missing.value.first < 100
    engine.close(NOW_US)


def offsets(blocks: Iterator[Block]) -> Iterator[tuple[int, int]]:
    for block in blocks:
        assert block.messages() == [content(block.header.first_offset + i) for i in range(block.lo, block.hi)]
        yield block.header.first_offset + block.lo, block.header.first_offset + block.hi


def numbers(blocks: Iterator[Block]) -> Iterator[tuple[int, int]]:
    for block in blocks:
        yield block.header.first_event + block.lo, block.header.first_event + block.hi


def test_a_walk_that_gets_on_may_look_again_as_often_as_it_takes(tmp_path: Path) -> None:
    """All files have other names after every block; each look finds them."""
    write(tmp_path, 600).close(NOW_US)
    assert len(segments(tmp_path)) > 5
    reader = LogReader(str(tmp_path), maps_max=1)
    at = generation = 0
    for first, end in offsets(reader.messages("q", 0)):
        assert first == at
        at = end
        generation += 1
        for path in segments(tmp_path):
            base, _ = parse_segment_name(path.name) or (0, 0)
            path.rename(tmp_path / segment_name(base, generation))
        evict(reader)
    assert at == 600
    assert generation > TRIES_MAX


def test_openings_of_files_that_were_replaced(tmp_path: Path) -> None:
    write(tmp_path, 300).close(NOW_US)
    reader = LogReader(str(tmp_path), maps_max=1)
    for path in segments(tmp_path):
        base, _ = parse_segment_name(path.name) or (0, 0)
        path.rename(tmp_path / segment_name(base, 1))
    assert reader.openings("q") == [(0, 300, 1)]


def test_a_message_that_retention_takes_while_it_is_looked_up_is_not_there(tmp_path: Path) -> None:
    engine = write(tmp_path, 300)

    class Slow(LogReader):
        def kept_from(self, queue: str, offset: int) -> int | None:
            kept = super().kept_from(queue, offset)
            compact(engine)
            evict(self)
            return kept

    assert look_at_one(Slow(str(tmp_path), maps_max=1), "q", 5) is None
    engine.close(NOW_US)


# --- beside a broker that works ---------------------------------------------------------------------


class _Walk:
    """A walk over a queue that takes a step now and then, and what it must show."""

    def __init__(self, worker: Worker, reader: LogReader, queue: str) -> None:
        self._worker = worker
        self._queue = queue
        self._kind = worker.rng.choice(("messages", "headers", "events", "living"))
        known = reader.queues()[queue]
        events = self._kind == "events"
        self._at = known.event_start if events else known.offset_start
        self._end = known.event_end if events else known.offset_end
        if self._kind == "events":
            self._items: Iterator[Block | EventRun] = reader.events(queue, self._at, self._end)
        elif self._kind == "living":
            self._at = 0
            self._items = reader.messages(queue, 0, self._end, fail_on_loss=False)
        else:
            self._items = reader.messages(queue, self._at, self._end, headers_only=self._kind == "headers")
        self._seen: set[int] = set()

    def step(self) -> str:
        """How it ended, if it has."""
        try:
            item = next(self._items)
        except StopIteration:
            self._check_all()
            return "done"
        except LogError:
            assert self._kind != "living"
            return "refused"
        if isinstance(item, EventRun):
            first, end = item.event_offset, item.event_offset + item.end - item.first
        else:
            first, end = item.header.first_offset + item.lo, item.header.first_offset + item.hi
        assert first >= self._at if self._kind == "living" else first == self._at
        self._seen.update(range(first, end))
        self._at = end
        return ""

    def _check_all(self) -> None:
        if self._kind != "living":
            assert self._at == self._end
            return
        missed = set(range(self._end)) - self._seen
        engine = self._worker.engine
        runs = engine.states(self._queue, 0, self._end, 1 << 20)
        alive = {o for first, end in zip(runs.first, runs.end, strict=True) for o in range(first, end)}
        assert not missed & alive


@pytest.mark.parametrize(("seed", "maps_max"), [(1, 1), (2, 4), (3, 1)])
def test_walks_beside_retention_give_everything_or_an_error(tmp_path: Path, maps_max: int, seed: int) -> None:
    """Several walks of one reader, so that maps are let go, step by step beside sends and trimming."""
    settings = LogSettings(segment_bytes=4096, block_bytes=512, snapshot_blocks=20)
    worker = Worker(tmp_path, seed, queues=("brief", "lazy", "short"), settings=settings)
    for _ in range(60):
        worker.turn()
    worker.settle_down()
    reader = LogReader(str(tmp_path), maps_max=maps_max)
    walks: list[_Walk] = []
    ended = {"done": 0, "refused": 0}
    for turn in range(600):
        while len(walks) < 4:
            reader.refresh()
            walks.append(_Walk(worker, reader, worker.rng.choice(sorted(reader.queues()))))
        for walk in list(walks):
            for _ in range(worker.rng.choice((0, 1, 3))):
                how = walk.step()
                if how:
                    ended[how] += 1
                    walks.remove(walk)
                    break
        worker.turn()
        if turn % 5 == 0:
            worker.engine.wait()
            worker.engine.trim(worker.now_us)
            worker.engine.wait()
        if turn % 150 == 149:
            worker.reopen(crash=turn % 300 == 299)
    assert min(ended.values()) > 10, ended
    worker.engine.close(worker.now_us)
