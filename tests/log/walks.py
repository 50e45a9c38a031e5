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
import logging
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.log.disk import RealDisk, RealFile
from penstock.log.errors import DiskFull, LogError
from penstock.log.log import Log
from penstock.log.overlay import LogChanging
from penstock.log.reader import LogReader, OffsetsMissing
from penstock.log.state import LogSettings
from penstock.log.workers import InlineWorker
from penstock.model.batch import Batch
from penstock.model.policy import Policies
from penstock.model.words import Outcome

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


HOW = ("to the end", "on its way", "no queue", "changing", "missing")


class MeanDisk(RealDisk):
    """A folder on a disk that may be full."""

    is_full = False

    def create(self, name: str, size: int) -> RealFile:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(name, size)


class Walk:
    """One of a reader's ways through one queue, by messages or by events."""

    def __init__(self, life: "Life", reader: LogReader, queue: str, events: bool) -> None:
        self.life = life
        self.reader = reader
        self.queue = queue
        self.events = events
        self.at = 0
        self.steps: Iterator[int] | None = None

    def begin(self) -> None:
        self.reader.refresh()
        known = self.reader.queue(self.queue)
        if known is None:
            return
        start, end = (
            (known.event_start, known.event_end) if self.events else (known.offset_start, known.offset_end)
        )
        self.at = self.life.rng.choice((start, start, self.life.rng.randint(start, end)))
        self.steps = self._events() if self.events else self._messages()

    def _messages(self) -> Iterator[int]:
        sent = self.life.sent[self.queue]
        for block in self.reader.messages(self.queue, self.at):
            first = block.header.first_offset + block.lo
            assert first == self.at, f"{self.queue}: offset {first} after {self.at - 1}"
            self.at = block.header.first_offset + block.hi
            assert block.messages() == sent[first : self.at], f"{self.queue}, offsets {first} to {self.at}"
            yield self.at

    def _events(self) -> Iterator[int]:
        for run in self.reader.events(self.queue, self.at):
            assert run.event_offset == self.at, f"{self.queue}: event {run.event_offset} after {self.at - 1}"
            self.at += run.end - run.first
            yield self.at

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
            return "missing" if error.first == self.at else f"{error}, and it was at {self.at}"
        return "on its way"


class Life:
    """A log on a mean disk, with a clock that steps, and readers beside it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.now_us = 1_800_000_000 * SECOND_US
        self.sent: dict[str, list[bytes]] = {queue: [] for queue in QUEUES}
        self.counts: dict[str, int] = {}
        self.settings = LogSettings(
            segment_bytes=self.rng.choice((2048, 4096, 16 * 1024)),
            block_bytes=self.rng.choice((200, 1000)),
            cache_bytes=self.rng.choice((0, 2000)),
            snapshot_blocks=self.rng.choice((8, 30)),
        )
        self.open()
        self.walks = [
            Walk(self, reader, queue, events)
            for reader in (LogReader(str(folder), maps_max=maps_max) for maps_max in (1, 4))
            for queue in ("brief", self.rng.choice(QUEUES))
            for events in (False, True)
        ]

    def open(self) -> None:
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


def main(arguments: Sequence[str]) -> None:
    logging.disable(logging.CRITICAL)
    first = int(arguments[0])
    total: Counter[str] = Counter()
    for seed in range(first, first + int(arguments[1]) if len(arguments) > 1 else first + 1):
        total += run(seed)
    for what, number in sorted(total.items()):
        sys.stdout.write(f"{number:9} {what}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
