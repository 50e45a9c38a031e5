"""What delayed messages cost, and what the embedded log does with them: looks, snapshots, files, damage.

What they do is in `contract_delays.py`. Costs are counted, not timed: blocks that are read, ranges that are
kept, moments that are filed.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.log.inspect import inspect_log
from penstock.log.queue import LOOKS_A_BLOCK, RUNS_A_LOOK
from penstock.log.segments import Segments
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.life import Reason
from penstock.model.words import Outcome
from tests.log.contract_rig import SECOND, START_US, open_slices, ranges_of
from tests.log.test_retention import SMALL, Rig

MANY = LogSettings(cache_bytes=0, snapshot_blocks=1_000_000)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, {}, MANY)
    yield rig
    rig.engine.abandon()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """First offsets of blocks that were looked up, as somebody does."""
    found: list[int] = []
    block_at = Segments.block_at

    def noted(self: Segments, queue: int, offset: int) -> object:
        found.append(offset)
        return block_at(self, queue, offset)

    monkeypatch.setattr(Segments, "block_at", noted)
    return found


def delay(rig: Rig, queue: str, delays_us: list[int]) -> None:
    rig.append(queue, Batch.of([b""] * len(delays_us), delay_us=delays_us))


def due(rig: Rig) -> None:
    rig.engine.due(rig.now_us)
    while 0 < rig.engine.due_us <= rig.now_us:
        rig.engine.due(rig.now_us)


def filed(rig: Rig) -> int:
    return len(list(rig.engine._state.delays))


def runs(rig: Rig, queue: str) -> int:
    return len(rig.engine._state.queues[queue].pending.delayed)


def work(rig: Rig, queue: str) -> int:
    """Take and acknowledge what there is; how many."""
    got = open_slices(rig.engine.take(queue, "ann", 1 << 20, rig.now_us, bytes_max=1 << 30))
    rig.engine.settle(queue, "ann", Outcome.ACK, ranges_of(got), rig.now_us)
    return len(got)


# --- what they cost --------------------------------------------------------------------------------


def test_what_was_delayed_for_long_and_is_gone_takes_nothing(rig: Rig) -> None:
    """As with TTLs: who delays by a month, and takes most of it back, would have all of a month filed."""
    rig.engine._state.delays._far._sweep_from = 100
    for number in range(300):
        delay(rig, "orders" if number % 100 else "mails", [(3600 + 2 * number) * SECOND])
        rig.engine.flush(rig.now_us)
    assert filed(rig) == 300
    assert sum(fate.end - fate.first for fate in rig.engine.purge("orders", rig.now_us)) == 297
    for _ in range(10):
        rig.engine.tick(rig.now_us)
    assert filed(rig) == 3
    rig.now_us += 3600 * SECOND
    for number in range(3):
        assert rig.engine.ready("mails") == number
        due(rig)
        assert rig.engine.ready("mails") == number + 1
        rig.now_us += 200 * SECOND


def test_one_delay_takes_a_range_and_a_look_for_each_block(read: list[int], rig: Rig) -> None:
    for _ in range(20):
        delay(rig, "orders", [3600 * SECOND] * 1000)
    assert (runs(rig, "orders"), filed(rig)) == (1, 1)
    for second in range(0, 3590, 10):
        rig.now_us = START_US + second * SECOND
        due(rig)
    assert (runs(rig, "orders"), filed(rig), len(read)) == (1, 1, 0)
    rig.now_us = START_US + 3600 * SECOND
    due(rig)
    assert rig.engine.describe("orders").ready == 20_000
    assert len(read) <= 40
    assert (runs(rig, "orders"), filed(rig)) == (0, 0)


def test_a_block_with_many_moments_is_not_looked_at_for_each(read: list[int], rig: Rig) -> None:
    rng = random.Random(1)
    count = 20_000
    delay(rig, "orders", [rng.randrange(3600 * SECOND) for _ in range(count)])
    at_once = max(RUNS_A_LOOK, count // LOOKS_A_BLOCK)
    taken = 0
    for second in range(0, 3601, 10):
        rig.now_us = START_US + second * SECOND
        due(rig)
        # Of two that are filed, one is between them; and the last one is for the block.
        assert filed(rig) <= at_once + 1
        assert (
            sum(1 for *_, due_us in rig.engine._state.queues["orders"].pending.delayed if due_us > 0)
            <= at_once
        )
        read.clear()
        taken += work(rig, "orders")
    assert taken == count


def test_looks_into_a_block_are_few(read: list[int], rig: Rig) -> None:
    rng = random.Random(1)
    count = 20_000
    delay(rig, "orders", [rng.randrange(3600 * SECOND) for _ in range(count)])
    for second in range(0, 3601, 10):
        rig.now_us = START_US + second * SECOND
        due(rig)
    # By a sixteenth of what is left, until that is less than can be filed at once.
    most = LOOKS_A_BLOCK * (math.log(count / (RUNS_A_LOOK * LOOKS_A_BLOCK)) + 1) + 3
    assert len(read) <= most
    assert rig.engine.describe("orders").ready == count


def test_what_has_a_time_of_its_own_is_not_filed_again_with_its_block(rig: Rig) -> None:
    """It would be once for every look at the block."""
    rng = random.Random(1)
    delay(rig, "orders", [rng.randrange(100 * SECOND) * (i % 2) for i in range(10_000)])
    got = open_slices(rig.engine.take("orders", "ann", 5000, rig.now_us, bytes_max=1 << 30))
    rig.engine.settle("orders", "ann", Outcome.REQUEUE, ranges_of(got), rig.now_us, delay_us=3600 * SECOND)
    before = filed(rig)
    for second in range(101):
        rig.now_us = START_US + second * SECOND
        due(rig)
        assert filed(rig) <= before + 2 * max(RUNS_A_LOOK, 5000 // LOOKS_A_BLOCK)
        work(rig, "orders")
    assert (rig.engine.describe("orders").delayed, filed(rig)) == (len(got), before - 1)
    rig.now_us = START_US + 3700 * SECOND
    due(rig)
    assert rig.engine.describe("orders").ready == len(got)


def test_times_of_one_s_own_beside_blocks_that_say_theirs(rig: Rig) -> None:
    """Both are filed for the same second, and adjoin: they must not be taken for one range."""
    rig.append("orders", Batch.of([b""] * 10))
    got = open_slices(rig.engine.take("orders", "ann", 10, rig.now_us))
    rig.engine.settle("orders", "ann", Outcome.REQUEUE, ranges_of(got), rig.now_us, delay_us=50 * SECOND)
    delay(rig, "orders", [50 * SECOND] * 10)
    for _ in range(3):
        rig.now_us += 40 * SECOND
        rig.engine.step(40 * SECOND, rig.now_us)
    for second in range(40, 51):
        rig.now_us = START_US + (120 + second) * SECOND
        due(rig)
        assert rig.engine.describe("orders").delayed == (0 if second == 50 else 20)


def test_one_call_does_not_look_at_everything(read: list[int], rig: Rig) -> None:
    for _ in range(100):
        delay(rig, "orders", [SECOND, 2 * SECOND])
        rig.now_us += 2
    rig.now_us = START_US + 10 * SECOND
    assert rig.engine.due(rig.now_us) == ["orders"]
    assert 0 < len(read) < 50
    assert rig.engine.due_us <= rig.now_us
    due(rig)
    assert rig.engine.describe("orders").ready == 200


def test_a_deleted_queue_leaves_nothing_that_is_looked_at(read: list[int], rig: Rig) -> None:
    delay(rig, "orders", [5 * SECOND] * 10)
    rig.engine.delete(["orders"], rig.now_us)
    rig.now_us += 10 * SECOND
    due(rig)
    assert (filed(rig), read) == (0, [])


# --- snapshots and files ---------------------------------------------------------------------------


def test_a_start_reads_none_of_them(read: list[int], rig: Rig) -> None:
    rng = random.Random(1)
    for _ in range(10):
        delay(rig, "orders", [rng.randrange(SECOND, 3600 * SECOND) for _ in range(1000)])
    rig.now_us += 100 * SECOND
    due(rig)
    before = runs(rig, "orders"), rig.engine.describe("orders").ready
    read.clear()
    rig.reopen()
    due(rig)
    assert (runs(rig, "orders"), rig.engine.describe("orders").ready) == before
    assert len(read) <= 10
    rig.now_us += 3600 * SECOND
    due(rig)
    assert rig.engine.describe("orders").ready == 10_000


@pytest.mark.parametrize("seed", range(10))
def test_a_snapshot_says_what_the_blocks_say(tmp_path: Path, seed: int) -> None:
    """Whatever was delayed, due, given back and said; and `verify` compares them."""
    rng = random.Random(seed)
    rig = Rig(
        tmp_path, {"*": {"retry-delays": [1, 5], "max-deliveries": 3}}, replace(SMALL, snapshot_blocks=5)
    )
    for turn in range(60):
        rig.now_us += rng.choice((0, 1, SECOND // 2, 3 * SECOND))
        queue = rng.choice(("a", "b"))
        delays = [rng.choice((0, 1, SECOND, 7 * SECOND)) for _ in range(rng.randint(1, 9))]
        if rng.random() < 0.5:
            delay(rig, queue, delays)
        if rng.random() < 0.1:
            rig.now_us += 100 * SECOND
            rig.engine.step(100 * SECOND, rig.now_us)
        due(rig)
        if rig.engine.has_queue(queue):
            got = open_slices(rig.engine.take(queue, "ann", rng.randint(0, 9), rig.now_us))
            outcome = rng.choice((*Outcome, None))
            if outcome is None:
                rig.engine.give_back(queue, "ann", rig.now_us, why=Reason.LEASE_ENDED)
            elif got:
                rig.engine.settle(
                    queue, "ann", outcome, ranges_of(got), rig.now_us, why=rng.choice(("", "w"))
                )
        rig.turn()
        if turn % 20 == 19:
            counts = [rig.engine.describe(name) for name in rig.engine.queues()]
            whys = [rig.engine.whys(name, 0, 1000) for name in rig.engine.queues()]
            assert inspect_log(str(tmp_path)).defects == []
            (rig.crash if rng.random() < 0.5 else rig.reopen)()
            due(rig)
            after = [rig.engine.describe(name) for name in rig.engine.queues()]
            for one, other in zip(counts, after, strict=True):
                held = replace(one, ready=one.ready + one.held, held=0)
                assert other == held
            assert whys == [rig.engine.whys(name, 0, 1000) for name in rig.engine.queues()]
    rig.engine.abandon()


def test_a_segment_stays_while_something_in_it_is_delayed(tmp_path: Path) -> None:
    """Retention keeps nothing else; what is compacted keeps its delay and its headers."""
    rig = Rig(tmp_path, {"*": {"retention-seconds": 0}})
    for i in range(100):
        payload = b"%-100d" % i
        rig.append(
            "orders",
            Batch.of([payload], delay_us=[0 if i % 25 else 1000 * SECOND], headers=[b'{"n":"%d"}' % i]),
        )
        rig.ack("orders", rig.take("orders"))
    rig.now_us += 500 * SECOND
    for _ in range(3):
        rig.trim()
    assert any(segment.generation for segment in rig.engine._state.segments.all)
    info = rig.engine.describe("orders")
    assert (info.delayed, info.bytes) == (4, 400)
    for how in (rig.crash, rig.reopen):
        how()
        due(rig)
        assert rig.engine.describe("orders").delayed == 4
    rig.now_us += 500 * SECOND
    due(rig)
    got = rig.take("orders")
    assert [(m.offset, m.headers) for m in got] == [(i, b'{"n":"%d"}' % i) for i in (0, 25, 50, 75)]
    assert [m.payload for m in got] == [b"%-100d" % i for i in (0, 25, 50, 75)]
    rig.engine.abandon()


# --- damage ----------------------------------------------------------------------------------------


def test_a_block_that_cannot_be_read_is_told_and_the_others_come(tmp_path: Path) -> None:
    rig = Rig(tmp_path, {}, replace(SMALL, cache_bytes=0))
    payloads = [b"message-%d" % i for i in range(3)]
    for payload in payloads:
        rig.append("orders", Batch.of([payload], delay_us=[60 * SECOND]))
    rig.engine.close(rig.now_us)
    (path,) = [path for path in tmp_path.glob("*.seg") if payloads[1] in path.read_bytes()]
    path.write_bytes(path.read_bytes().replace(payloads[1], b"MESSAGE-1"))
    rig.open()
    assert rig.engine.describe("orders").delayed == 3
    rig.now_us += 60 * SECOND
    due(rig)
    assert [(it.first, it.end) for it in rig.engine.damage] == [(1, 2)]
    assert [m.payload for m in rig.take("orders")] == [payloads[0], payloads[2]]
    info = rig.engine.describe("orders")
    assert (info.delayed, info.ready, info.held) == (0, 0, 2)
    rig.engine.abandon()
