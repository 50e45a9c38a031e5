"""Commits that redrive dead letters take many turns: whatever happens between two of these, a restart finds
everything as it was, and so does `penstock verify`."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.log import transactions
from penstock.log.errors import LogError
from penstock.log.inspect import inspect_log
from penstock.model.batch import Batch
from penstock.model.words import Outcome
from tests.log.contract_deleting import delete
from tests.log.contract_repairs import repairs
from tests.log.contract_restart import HOW, picture
from tests.log.contract_rig import Rig, named, payloads
from tests.log.test_contract import SMALL, LogHarness, in_folder, inline

QUEUES = ("orders", "mails")


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(transactions, "REDRIVE_RUNS", 2)
    rig = Rig(LogHarness(in_folder(tmp_path), SMALL, inline))
    rig.open()
    letters = [(queue, named(queue, 60)) for queue in QUEUES]
    rig.transact("dead", *letters, dead=list(QUEUES))
    return rig


def commit(rig: Rig, key: str, *parts: tuple[str, Batch]) -> Iterator[None]:
    """One that is not gone through yet."""
    return rig.engine.committing(key, [rig.stage(key, *parts)], rig.now_us)


def test_letters_that_are_redriven_come_in_the_order_of_the_commits(rig: Rig, tmp_path: Path) -> None:
    """Though the second one is as far as the first, and others are sent and requeued meanwhile."""
    steps = [
        commit(rig, f"key-{n}", ("orders", repairs({i: b"%d" % i for i in range(30 * n, 30 * n + 30, 3)})))
        for n in range(2)
    ]
    while sum(next(it, steps) is None for it in steps):  # Both go on.
        rig.send("orders", [b"x"])
        if rig.engine.ready("orders"):
            rig.settle("orders", Outcome.REQUEUE, rig.take("orders", 1))
    rig.turn()
    before = picture(rig)
    rig.restart("crash")
    assert picture(rig) == before
    numbers = [int(it) for it in payloads(rig.take("orders")) if it != b"x"]
    assert numbers == [*range(0, 60, 3)]
    rig.engine.close(rig.now_us)
    assert inspect_log(str(tmp_path)).defects == []


@pytest.mark.parametrize("seed", range(25))
def test_whatever_happens_between_two_turns(rig: Rig, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    engine = rig.engine
    under_way = []
    for number in range(4):
        parts = [(rng.choice((*QUEUES, "other")), Batch.of(named(f"new-{number}", 3)))]
        for queue in QUEUES:
            batch = repairs({i: b"repaired-%d" % i for i in rng.sample(range(60), rng.randint(1, 15))})
            batch.identity = rig.described(queue).identity if rng.random() < 0.7 else ""
            parts.append((queue, batch))
        under_way.append(commit(rig, f"key-{rng.randint(0, 2)}", *parts))
    while under_way:
        steps = rng.choice(under_way)
        try:
            if next(steps, steps) is steps:
                under_way.remove(steps)
        except LogError:  # It was aborted, or its queue deleted.
            under_way.remove(steps)
        queue, event = rng.choice(QUEUES), rng.random()
        if not engine.has_queue(queue):
            rig.send(queue, named("again", 5))
        elif event < 0.05:
            engine.abort(f"key-{rng.randint(0, 2)}", rig.now_us)
        elif event < 0.08:
            delete(rig, queue)
        elif event < 0.12:
            engine.purge(queue, rig.now_us, dead=True, limit=3)
        elif event < 0.16:
            engine.redrive(queue, rig.now_us, limit=2)
        elif event < 0.3:
            engine.flush(rig.now_us)
        elif event < 0.4:
            rig.turn()
        elif event < 0.5:
            got = rig.take(queue, 3, dead=rng.random() < 0.5)
            rig.settle(queue, rng.choice((Outcome.ACK, Outcome.REQUEUE)), got[:1])
        elif event < 0.53:
            rig.later(seconds=2)
            engine.tick(rig.now_us)
            engine.trim(rig.now_us)
    for queue in engine.queues():
        rig.lose(queue)
    before = picture(rig)
    rig.restart(rng.choice(HOW))
    assert picture(rig) == before
    rig.engine.close(rig.now_us)
    assert inspect_log(str(tmp_path)).defects == []
