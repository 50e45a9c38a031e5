"""Readers that walk while the log is written, trimmed, compacted, closed, killed and opened again, on a disk
that is full at times and by a clock that steps: a walk gives every record, or an error, never a gap.

    python -m tests.log.walks SEED           one life
    python -m tests.log.walks SEED COUNT     COUNT lives, and what happened in them

A walk is some steps of an iterator at a time. In between a log lives its life, and everything that a walk
has seen may be gone from its files when it goes on. With one map at a time, what was mapped a moment ago is
let go of as soon as another file is looked at.
"""

import contextlib
import errno
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from penstock.log.arrow import ROWS_MAX, events_batches, messages_batches
from penstock.log.disk import RealDisk, RealFile
from penstock.log.errors import DiskFull, LogError
from penstock.log.log import Log
from penstock.log.overlay import LogChanging
from penstock.log.read_block import Block
from penstock.log.reader import LogReader, OffsetsMissing
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.policy import Policies
from penstock.model.words import Outcome
from tests.log.inline import InlineWorker
from tests.seeds import run_seeds

SECOND_US = 1_000_000
TURNS = 200
QUEUES = ("brief", "short", "kept")
POLICIES = Policies(
    {
        "brief": {"retention-seconds": 0},
        "short": {"retention-seconds": 20, "durability": "interval"},
        "kept": {"retention-seconds": 10**6},
    }
)


KINDS = ("messages", "events", "rows", "rows of events", "living")
HOW = ("to the end", "on its way", "no queue", "changing", "missing")


class MeanDisk(RealDisk):
    """A folder on a disk that may be full."""

    is_full = False

    def create(self, name: str, size: int) -> RealFile:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(name, size)


class Walk:
    """One of a reader's ways through one queue."""

    def __init__(self, life: "Life", reader: LogReader, queue: str, kind: str) -> None:
        self.life = life
        self.reader = reader
        self.queue = queue
        self.kind = kind
        self.at = 0
        self.steps: Iterator[int] | None = None

    def begin(self) -> None:
        self.reader.refresh()
        known = self.reader.queue(self.queue)
        if known is None:
            return
        start, end = known.offset_start, known.offset_end
        if self.kind in ("events", "rows of events"):
            start, end = known.event_start, known.event_end
        self.at = self.life.rng.choice((start, start, self.life.rng.randint(start, end)))
        self.steps = {
            "messages": self._messages,
            "events": self._events,
            "rows": self._rows,
            "rows of events": self._rows_of_events,
            "living": self._living,
        }[self.kind]()

    def _messages(self) -> Iterator[int]:
        for block in self.reader.messages(self.queue, self.at):
            self._check(block)
            yield self.at

    def _check(self, block: Block, *, gaps: bool = False) -> None:
        first = block.header.first_offset + block.lo
        assert first == self.at or (gaps and first > self.at), f"{self.queue}: {first} after {self.at - 1}"
        self.at = block.header.first_offset + block.hi
        sent = self.life.sent[self.queue][first : self.at]
        assert block.messages() == sent, f"{self.queue}, offsets {first} to {self.at}"

    def _living(self) -> Iterator[int]:
        """From the beginning, whatever retention has taken: no message that lives may be left out."""
        self.at, end = 0, self.reader.queues()[self.queue].offset_end
        seen: set[int] = set()
        for block in self.reader.messages(self.queue, 0, end, fail_on_loss=False):
            self._check(block, gaps=True)
            seen.update(range(block.header.first_offset + block.lo, self.at))
            yield self.at
        if self.life.is_open:
            runs = self.life.engine.states(self.queue, 0, end, 1 << 20)
            for first, stop in zip(runs.first, runs.end, strict=True):
                left_out = set(range(first, stop)) - seen
                assert not left_out, f"{self.queue}: {sorted(left_out)} live, and were left out"

    def _events(self) -> Iterator[int]:
        for run in self.reader.events(self.queue, self.at):
            assert run.event_offset == self.at, f"{self.queue}: event {run.event_offset} after {self.at - 1}"
            facts = (
                run.event.name.lower(),
                run.reason.label or None,
                run.consumer or None,
                run.attempt,
                run.dispatched_us or None,
                run.time_us,
            )
            for offset in range(run.first, run.end):
                self._remember("event", self.at, (offset, *facts))
                self.at += 1
            yield self.at

    def _rows(self) -> Iterator[int]:
        rows_max = self.life.rng.choice((1, 7, ROWS_MAX))
        for batch in messages_batches(self.reader, self.queue, self.at, rows_max=rows_max):
            end = self.at + batch.num_rows
            assert batch["offset"].to_pylist() == list(range(self.at, end))
            assert batch["value"].to_pylist() == self.life.sent[self.queue][self.at : end]
            for offset, id_ in zip(range(self.at, end), batch["id"].to_pylist(), strict=True):
                self._remember("id", offset, id_)
            self.at = end
            yield self.at

    def _rows_of_events(self) -> Iterator[int]:
        rows_max = self.life.rng.choice((1, 7, ROWS_MAX))
        for batch in events_batches(self.reader, self.queue, self.at, rows_max=rows_max):
            times = [batch[name].cast("int64").to_pylist() for name in ("dispatched", "timestamp")]
            names = ("event_offset", "id", "offset", "event", "reason", "consumer", "attempt")
            columns = [batch[name].to_pylist() for name in names]
            for number, id_, *facts in zip(*columns, *times, strict=True):
                assert number == self.at, f"{self.queue}: event {number} after {self.at - 1}"
                self._remember("event", number, tuple(facts))
                if id_ is not None:
                    self._remember("id", facts[0], id_)
                self.at += 1
            yield self.at

    def _remember(self, what: str, number: int, facts: object) -> None:
        """What somebody was shown once is what everybody is shown."""
        known = self.life.shown.setdefault((self.queue, what, number), facts)
        assert known == facts, f"{self.queue}, {what} {number}: {facts}, and it was {known}"

    def go(self) -> str:
        """A few steps; how it went."""
        if self.steps is None:
            self.begin()
        elif self.life.rng.random() < 0.2:
            self.reader.refresh()
        if self.steps is None:
            return "no queue"
        try:
            for _ in range(self.life.rng.choice((1, 1, 2, 5, 100))):
                if next(self.steps, None) is None:
                    self.steps = None
                    return "to the end"
        except LogChanging:
            self.steps = None
            return "changing"
        except OffsetsMissing as error:
            self.steps = None
            # Rows are gathered before they are shown.
            exact = error.first == self.at or (self.kind.startswith("rows") and error.first > self.at)
            return "missing" if exact else f"{error}, and it was at {self.at}"
        return "on its way"


class Life:
    """A log on a mean disk, with a clock that steps, and readers beside it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.now_us = 1_800_000_000 * SECOND_US
        self.sent: dict[str, list[bytes]] = {queue: [] for queue in QUEUES}
        self.shown: dict[tuple[str, str, int], object] = {}
        self.is_open = True
        self.counts: dict[str, int] = {}
        self.settings = LogSettings(
            segment_bytes=self.rng.choice((2048, 4096, 16 * 1024)),
            block_bytes=self.rng.choice((200, 1000)),
            cache_bytes=self.rng.choice((0, 2000)),
            snapshot_blocks=self.rng.choice((8, 30)),
            at_once_bytes=0,
            syncs_apart_us=0,
        )
        self.open()
        self.walks = [
            Walk(self, reader, queue, kind)
            for reader in (LogReader(str(folder), maps_max=maps_max) for maps_max in (1, 4))
            for queue in ("brief", self.rng.choice(QUEUES))
            for kind in KINDS
        ]

    def open(self) -> None:
        """The loop writes small groups in every other opening."""
        self.settings.at_once_bytes ^= 1 << 14
        self.disk = MeanDisk(str(self.folder))
        self.writer, self.keeper = InlineWorker(), InlineWorker()
        self.engine = Log.open(
            self.disk,
            self.now_us,
            settings=self.settings,
            policies=POLICIES,
            writer=self.writer,
            keeper=self.keeper,
        )
        known = self.engine.queues()
        for queue, sent in self.sent.items():
            # What was not confirmed may be gone; nobody was told of it.
            del sent[self.engine.describe(queue).offset_end if queue in known else 0 :]
        assert not self.engine.damage, self.engine.damage

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def send(self) -> None:
        rng = self.rng
        queue = rng.choice(QUEUES)
        sent = self.sent[queue]
        size = rng.choice((0, 3, 40, 300))
        batch = [
            b"%s-%d" % (queue.encode(), len(sent) + i) + b"." * size for i in range(rng.choice((1, 3, 30)))
        ]
        try:
            if rng.random() < 0.15:
                self.engine.transact(f"key-{rng.random()}", [(queue, Batch.of(batch))], self.now_us)
            else:
                self.engine.append(queue, Batch.of(batch), self.now_us)
        except DiskFull:
            self.count("refused")
            return
        sent += batch

    def work(self) -> None:
        rng = self.rng
        queue = rng.choice(QUEUES)
        every = rng.choice((1, 1, 1, 3, 10))
        for piece in self.engine.take(queue, "ann", rng.choice((5, 50, 500)), self.now_us):
            offsets = [o for o in range(piece.offset_start, piece.offset_end) if every == 1 or o % every]
            ranges = [(offset, offset + 1) for offset in offsets]
            outcome = rng.choice((Outcome.ACK, Outcome.ACK, Outcome.ACK, Outcome.REJECT))
            self.engine.settle(queue, "ann", outcome, ranges, self.now_us)
        self.engine.give_back(queue, "ann", self.now_us, lost=False)

    def turn(self) -> None:
        rng = self.rng
        # By an hour back, now and then, and on again.
        self.now_us += rng.choice((10, 1000, SECOND_US, SECOND_US, 30 * SECOND_US, -3600 * SECOND_US))
        for _ in range(rng.randint(1, 4)):
            rng.choice((self.send, self.send, self.work, self.work))()
        if rng.random() < 0.05:
            self.disk.is_full = not self.disk.is_full
            self.count("full" if self.disk.is_full else "room")
        if rng.random() < 0.2 and "brief" in self.engine.queues():
            self.engine.purge("brief", self.now_us)
        self.engine.expire(self.now_us)
        self.engine.flush(self.now_us)
        for _ in range(rng.randint(0, 4)):
            rng.choice((self.writer, self.keeper)).step()
            self.engine.poll()
        if rng.random() < 0.5:
            self.engine.trim(self.now_us)
        self.engine.tick(self.now_us)
        if rng.random() < 0.3:
            self.engine.wait()
        if rng.random() < 0.03:
            self.end()

    def end(self) -> None:
        """Closed, or killed with whatever was in flight; then opened again, by the same readers' eyes."""
        if self.rng.random() < 0.5:
            self.engine.close(self.now_us)
            self.count("closed")
        else:
            self.engine.abandon()
            self.count("killed")
        self.disk.is_full = False
        self.open()


def live(folder: Path, seed: int) -> dict[str, int]:
    life = Life(folder, seed)
    try:
        for _ in range(TURNS):
            life.turn()
            for walk in life.walks:
                how = walk.go()
                assert how in HOW, how
                life.count(how)
        life.disk.is_full = False
        life.engine.wait()
        life.engine.close(life.now_us)
        life.is_open = False
        # Whoever walks now sees everything that is kept.
        for walk in life.walks:
            walk.steps = None
            how = walk.go()
            while how == "on its way":
                how = walk.go()
            assert how in ("to the end", "no queue"), how
    finally:
        with contextlib.suppress(LogError):
            life.engine.abandon()
    return life.counts


def run(seed: int) -> Counter[str]:
    """One life in a folder of its own; what happened in it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return Counter(live(Path(folder), seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


if __name__ == "__main__":
    run_seeds(sys.argv[1:], lambda seed, _: run(seed))
