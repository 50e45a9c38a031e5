"""How long messages wait and are worked on, as the log notes it while somebody wants to know."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.model.batch import Batch
from penstock.model.spans import bucket_of
from penstock.model.words import Outcome
from tests.log.contract_rig import SECOND
from tests.log.test_retention import Rig

Q = "orders"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, {})
    rig.engine.times.want(True)
    yield rig
    rig.engine.abandon()


def take(rig: Rig, count: int, after: int = 0, dead: bool = False) -> list[tuple[int, int]]:
    rig.now_us += after * SECOND
    slices = rig.engine.take(Q, "me", count, rig.now_us, dead=dead)
    return [(it.first_offset + it.lo, it.first_offset + it.hi) for it in slices]


def settle(rig: Rig, outcome: Outcome, ranges: list[tuple[int, int]], after: int = 0) -> None:
    rig.now_us += after * SECOND
    assert rig.engine.settle(Q, "me", outcome, ranges, rig.now_us)


def told(rig: Rig) -> tuple[dict[int, int], dict[int, int]]:
    return rig.engine.take_times(Q)


def test_waiting_is_up_to_the_first_delivery_and_working_up_to_the_verdict(rig: Rig) -> None:
    rig.append(Q, Batch.of([b"x"] * 10))
    first = take(rig, 6, after=3)
    take(rig, 4, after=5)
    assert told(rig) == ({bucket_of(3 * SECOND): 6, bucket_of(8 * SECOND): 4}, {})
    settle(rig, Outcome.ACK, first, after=2)
    assert told(rig) == ({}, {bucket_of(7 * SECOND): 6})
    settle(rig, Outcome.REJECT, [(6, 7)], after=1)
    settle(rig, Outcome.REQUEUE, [(7, 10)])
    assert told(rig) == ({}, {bucket_of(3 * SECOND): 4})
    # What comes again has waited before, and a dead letter has waited for nobody.
    assert take(rig, 9, after=100) == [(7, 10)]
    again = take(rig, 9, dead=True)
    settle(rig, Outcome.ACK, [(7, 10)], after=4)
    rig.engine.settle(Q, "me", Outcome.ACK, again, rig.now_us, dead=True)
    assert told(rig) == ({}, {bucket_of(4 * SECOND): 3})


def test_who_is_lost_has_said_nothing_and_what_returns_is_no_first_delivery(rig: Rig) -> None:
    rig.append(Q, Batch.of([b"x"] * 4))
    take(rig, 2, after=1)
    rig.engine.give_back(Q, "me", rig.now_us)
    told(rig)
    take(rig, 4, after=10)
    assert told(rig) == ({bucket_of(11 * SECOND): 2}, {})


def test_what_was_delayed_waits_from_when_it_was_due(rig: Rig) -> None:
    rig.append(Q, Batch.of([b"x"] * 3, delay_us=[0, 60 * SECOND, 60 * SECOND]))
    take(rig, 3, after=5)
    assert told(rig) == ({bucket_of(5 * SECOND): 1}, {})
    rig.now_us += 65 * SECOND
    rig.engine.due(rig.now_us)
    take(rig, 3)
    assert told(rig) == ({bucket_of(10 * SECOND): 2}, {})


def test_nothing_is_noted_where_nobody_wants_it_nor_kept_of_a_queue_that_is_gone(rig: Rig) -> None:
    rig.append(Q, Batch.of([b"x"] * 3))
    take(rig, 1)
    assert rig.engine.times.waits
    rig.engine.delete([Q], rig.now_us)
    assert not rig.engine.times.waits
    rig.engine.times.want(False)
    rig.append(Q, Batch.of([b"x"] * 3))
    settle(rig, Outcome.ACK, take(rig, 1))
    assert told(rig) == ({}, {})
