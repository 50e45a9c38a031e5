"""Rows of stages over time: what is consumed of a large commit goes, and what is kept is found again."""

from pathlib import Path

import pytest

from penstock.log.errors import LogError
from penstock.log.repairs import STAGE_QUEUE
from penstock.log.results import StageInfo
from penstock.log.scan import Hole
from penstock.log.snapshot import PREFIX
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.words import Outcome
from tests.log.contract_rig import SECOND, payloads
from tests.log.test_retention import KEEP_NOTHING, SMALL, Rig

MESSAGES = [b"%-200d" % i for i in range(400)]


def stage(log: Rig, key: str, *parts: tuple[str, Batch]) -> str:
    came: list[StageInfo | LogError] = []
    log.engine.stage(key, parts, log.now_us, came.append)
    log.turn()
    (info,) = came
    assert isinstance(info, StageInfo)
    return info.stage


def committed(log: Rig, messages: list[bytes]) -> None:
    """One commit of one stage, which is larger than any segment."""
    log.engine.commit("key", [stage(log, "key", ("orders", Batch.of(messages)))], log.now_us)
    log.turn()


def settle_but(log: Rig, kept: set[int]) -> None:
    """Consume everything else, and let retention do what it can."""
    taken = log.take("orders")
    log.ack("orders", [it for it in taken if it.offset not in kept])
    log.engine.give_back("orders", "ann", log.now_us, lost=False)
    log.roll()
    for _ in range(3):
        log.now_us += SECOND
        log.trim()


def test_what_is_consumed_of_a_stage_goes_though_much_of_its_last_segment_lives(tmp_path: Path) -> None:
    """The commit stands behind the last rows: that these are alive does not keep all others."""
    log = Rig(tmp_path, {**KEEP_NOTHING})
    committed(log, MESSAGES)
    before = sum(log.segments().values())
    settle_but(log, set(range(360, 400)))
    assert sum(log.segments().values()) < before / 3
    assert log.info("orders").bytes == 40 * 200
    log.crash()
    assert not log.engine.damage
    assert payloads(log.take("orders")) == MESSAGES[360:]
    log.engine.give_back("orders", "ann", log.now_us, lost=False)
    settle_but(log, set())
    assert not any(segment.names for segment in log.engine._state.segments.all)


@pytest.mark.parametrize("kept", [{1, 30}, {5}])
def test_without_any_snapshot_rows_in_compacted_segments_are_found(tmp_path: Path, kept: set[int]) -> None:
    """Of blocks that say which queue has the rows, only those behind snapshots are left."""
    log = Rig(tmp_path, {**KEEP_NOTHING})
    committed(log, MESSAGES[:60])
    settle_but(log, kept)
    segments = log.engine._state.segments.all
    before = {it.base: (it.names, it.adopted) for it in segments if it.names}
    assert all(
        it.generation for it in segments if it.names or log.engine._state.segments.stage_queue in it.spans
    )
    log.engine.abandon()
    for path in tmp_path.glob(f"{PREFIX}*"):
        path.unlink()
    log.open()
    assert {it.base: (it.names, it.adopted) for it in log.engine._state.segments.all if it.names} == before
    assert STAGE_QUEUE in log.engine._state.queues
    found = [message for queue in log.engine.queues() for message in log.take(queue)]
    assert {it.offset: it.payload for it in found if it.payload in MESSAGES} == {i: MESSAGES[i] for i in kept}


def test_damaged_rows_are_somebodys_who_has_committed_them_a_moment_ago(tmp_path: Path) -> None:
    log = Rig(tmp_path, {}, SMALL)
    staged = stage(log, "key", ("orders", Batch.of(MESSAGES[:30])))
    log.engine.commit("key", [staged], log.now_us)  # and nothing of that is in a file yet
    segments = log.engine._state.segments
    rows = next(it for it in segments.headers(segments.all[0]) if it.queue == segments.stage_queue)
    log.engine.report_rot(segments.all[0].name, Hole(rows.position, rows.end, rows))
    (damage,) = log.engine.damage
    assert f"queue 'orders', offsets 0 to {rows.count - 1}" in damage.text


def test_a_stage_on_its_way_waits_as_long_as_any_though_the_clock_steps(tmp_path: Path) -> None:
    log = Rig(tmp_path, {}, LogSettings(stage_group_bytes=1000, block_bytes=500))
    came: list[StageInfo | LogError] = []
    batch = Batch.of(MESSAGES[:20], ttl_seconds=[5] * 20)
    log.engine.stage("key", [("orders", batch)], log.now_us, came.append)
    log.writer.step()
    log.writer.poll()
    assert not came
    log.now_us += 7200 * SECOND
    log.engine.step(7200 * SECOND, log.now_us)
    for _ in range(2):
        log.engine.tick(log.now_us)
        log.turn()
    (info,) = came
    assert isinstance(info, StageInfo)
    assert log.engine.stages("key") == [info]
    log.engine.commit("key", [info.stage], log.now_us)
    log.turn()
    log.crash()
    log.now_us += 4 * SECOND
    assert payloads(log.take("orders")) == MESSAGES[:20]
    log.engine.settle("orders", "ann", Outcome.REQUEUE, [(0, 20)], log.now_us, ttl_seconds=1)
    log.now_us += SECOND
    assert not log.take("orders")


@pytest.mark.parametrize("how", ["open", "crash", "reopen"])
def test_rows_of_a_queue_that_is_deleted_go_though_others_live_in_the_segment_of_the_commit(
    tmp_path: Path, how: str
) -> None:
    log = Rig(tmp_path, {**KEEP_NOTHING})
    staged = stage(log, "key", ("orders", Batch.of(MESSAGES)))
    log.send("filler", [b"." * 3000])
    log.send("mails", [b"." * 2500])
    log.engine.commit("key", [staged], log.now_us)
    log.turn()
    log.engine.delete(["orders"], log.now_us)
    log.turn()
    if how != "open":
        getattr(log, how)()
    before = sum(log.segments().values())
    log.roll()
    for _ in range(3):
        log.now_us += SECOND
        log.trim()
    assert sum(log.segments().values()) < before / 3
    assert [it.payload for it in log.take("mails")] == [b"." * 2500]
    log.crash()
    assert not log.engine.damage
    assert not any(segment.names for segment in log.engine._state.segments.all)
