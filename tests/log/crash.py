"""Seeded runs that break the embedded log in every place, and see that it keeps its promises.

    python -m tests.log.crash SEED           repeats a run and tells its steps
    python -m tests.log.crash SEED COUNT     runs COUNT seeds and tells what happened in them

A run is random work of several consumers on several queues of a log on a simulated disk, whose
writer and keeper advance at random moments. Again and again its life ends: the power fails (between
two calls or within one, recovery included), the process is killed, a write or sync fails, or it is
closed; meanwhile the disk may be full for a while. After each end a new life begins on what is left.

What must hold after every end, as `crash_model.py` knows it:

  * lost 0: what had a receipt, or was shown by `read` or `events`, is there: offset, id, payload,
    attributes. What was settled, and is known to be synced, does not come back.
  * invented 0: nothing is there that was never sent, and nothing in another place.
  * What is left is a prefix of what happened, over all queues, and everything in it is exactly as it
    was: order of delivery, order and reasons of dead letters, attempts, retries, expiry, counts.
  * A transaction is there with all its parts or with none, and once for each key. Dead letters that it
    brings are dead from the beginning.
  * A stage that had a receipt is there, whole, until its key is committed or it is given up; a commit that
    is gone has left its stages, and can be said again.
  * No id ever names two payloads, not even one whose message was delivered and then lost.
  * A crash is no damage: nothing is reported.
"""

import errno
import random
import sys
from collections import Counter

from penstock.log.errors import LogFailed
from penstock.log.log import Log
from penstock.log.state import LogSettings
from tests.log.crash_model import SECOND_US
from tests.log.crash_steps import POLICIES, Steps
from tests.log.inline import InlineWorker
from tests.log.simdisk import PowerCut, SimDisk
from tests.seeds import Say, run_seeds

LIVES_MAX = 6
STEPS_MAX = (15, 100, 200)  # many short lives: much of what can go wrong goes wrong early
FAULT_CALLS = ("write", "write", "sync", "sync", "create", "allocate", "rename", "truncate", "sync_names")


class Broken(AssertionError):
    """The log has broken a promise. Says which seed shows it."""


class Run(Steps):
    """One seed: a disk, a log on it, and the model of both."""

    def __init__(self, seed: int, say: Say | None = None) -> None:
        rng = random.Random(seed)
        super().__init__(rng)
        self.say = say
        self.disk = SimDisk()
        self.settings = LogSettings(
            segment_bytes=rng.choice((1024, 2048, 2048, 4096, 8192)),
            cache_bytes=rng.choice((0, 1000, 8000)),
            block_bytes=rng.choice((64, 200, 1000)),
            at_once_bytes=1 << 14 if seed % 4 else 0,
            syncs_apart_us=0,
            interval_us=SECOND_US // 2,
            snapshot_blocks=rng.randint(5, 20),
            stage_group_bytes=rng.choice((100, 1000, 1 << 20)),
            stage_seconds=30,
        )

    def run(self) -> None:
        self.engine = self.open(self.disk)
        for _ in range(self.rng.randint(2, LIVES_MAX)):
            self.end(self.live())
            self.begin_again()

    def open(self, disk: SimDisk) -> Log:
        self.writer, self.keeper = InlineWorker(), InlineWorker()
        return Log.open(
            disk,
            self.now_us,
            settings=self.settings,
            policies=POLICIES,
            writer=self.writer,
            keeper=self.keeper,
        )

    def live(self) -> str:
        """Work until something ends it: "cut" or "kill"."""
        rng, counts = self.rng, self.model.counts
        self.arm()
        weights, steps = zip(*self.weighted, strict=True)
        try:
            for step in rng.choices(steps, weights, k=rng.randint(3, rng.choice(STEPS_MAX))):
                if self.say:
                    self.say(step.__name__)
                step()
            if rng.random() < 0.2:
                self.engine.close(self.now_us)
                counts["closed"] += 1
                if self.engine.failed is None and not self.full_allowed:
                    self.model.all_safe()
        except PowerCut:
            counts["cut within a call"] += 1
            return "cut"
        except LogFailed:
            counts["failed"] += 1
        return rng.choice(("cut", "cut", "kill"))

    def arm(self) -> None:
        """Perhaps: something that will go wrong in this life."""
        rng = self.rng
        self.full_allowed = False
        chance = rng.random()
        if chance < 0.4:
            self.disk.cut_after(rng.randint(1, 50))
        elif chance < 0.55:
            self.disk.fail(rng.choice(FAULT_CALLS), rng.randint(1, 8), errno.EIO)
        elif chance < 0.65:
            self.full_allowed = True
            self.disk.fail(rng.choice(("write", "allocate", "create")), rng.randint(1, 8), errno.ENOSPC)
        elif chance < 0.75:
            self.disk.fail("read", rng.randint(1, 60), errno.EIO)

    def end(self, how: str) -> None:
        """The power fails, or the process is killed; then everything is compared, on a copy."""
        if self.say:
            self.say(f"--- {how}")
        self.model.counts[how] += 1
        before = self.disk
        for call, name in before.calls:
            self.model.counts[f"{call} {kind_of_file(name)}"] += 1
        self.disk = before.crash(self.rng) if how == "cut" else before.kill()
        self.disk.capacity_bytes = None
        copy = self.disk.copy()
        self.checker.after_end(self.open(copy), killed=how == "kill")
        assert copy.published >= before.published, (
            f"{before.published} was published, {copy.published} is left"
        )
        if how == "cut":
            # What is left has survived a power cut: it is on the disk.
            self.model.all_safe()

    def begin_again(self) -> None:
        """The next opening of the log, during which the power may fail too."""
        while True:
            if self.rng.random() < 0.15:
                self.disk.cut_after(self.rng.randint(1, 10))
            try:
                self.engine = self.open(self.disk)
                break
            except PowerCut:
                self.model.counts["cut while opening"] += 1
                self.end("cut")
        self.disk.cut_after(-1)
        self.model.opened()
        self.checker.due(self.engine)


def kind_of_file(name: str) -> str:
    """What a file is for: "spare", "snapshot", ".seg", ".1.seg.tmp" …"""
    return name.partition("-")[0] if "-" in name else name[20:]


def run(seed: int, say: Say | None = None) -> "Counter[str]":
    """One run; Broken where it shows a broken promise, or an error that nobody expects."""
    attempt = Run(seed, say)
    try:
        attempt.run()
    except Exception as error:
        raise Broken(
            f"seed {seed}: {type(error).__name__}: {error}\n"
            f"    python -m tests.log.crash {seed}    repeats it"
        ) from error
    attempt.model.counts["messages"] = attempt.sent
    return attempt.model.counts


if __name__ == "__main__":
    run_seeds(sys.argv[1:], run)
