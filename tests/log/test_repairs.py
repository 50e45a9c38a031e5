"""Repaired payloads in the embedded log: the repair queue beside its queue, over time and through damage."""

import errno
import os
import random
from array import array
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.log.block import HEADER_BYTES, KIND_MESSAGES, MAGIC
from penstock.log.errors import LogError, LogFailed, LogRefused, StageUnknown
from penstock.log.inspect import inspect_log
from penstock.log.reader import LogReader
from penstock.log.repairs import cut_batch, left_over, repair_queue_of, runs_of
from penstock.log.results import StageInfo, TransactionDone
from penstock.log.state import LogSettings
from penstock.log.transactions import REDRIVE_RUNS
from penstock.model.batch import Batch
from penstock.model.ids import PART_MAX
from penstock.model.ranges import RangeMap
from penstock.model.words import Outcome
from tests.log.contract_rig import named, open_slices
from tests.log.folders import no_receipt
from tests.log.test_retention import KEEP_NOTHING, Rig


def kill(log: Rig, queue: str, payloads: list[bytes]) -> None:
    log.send(queue, payloads)
    slices = log.engine.take(queue, "u", len(payloads), log.now_us)
    ranges = [(piece.offset_start, piece.offset_end) for piece in slices]
    log.engine.settle(queue, "u", Outcome.REJECT, ranges, log.now_us)
    log.turn()


def repair(log: Rig, queue: str, of: Mapping[int, bytes]) -> None:
    batch = Batch.of(of.values())
    batch.repairs = array("q", of.keys())
    log.engine.transact("", [(queue, batch)], log.now_us)
    log.turn()


def ready(log: Rig, queue: str) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    while slices := log.engine.take(queue, "c", 1000, log.now_us):
        found |= {got.offset: got.payload for got in open_slices(slices)}
    return found


def fill(log: Rig, rounds: int) -> None:
    """So much that comes and goes that segments are left behind."""
    for _ in range(rounds):
        log.send("other", [b"x" * 400])
        for piece in log.engine.take("other", "o", 10, log.now_us):
            ranges = [(piece.offset_start, piece.offset_end)]
            log.engine.settle("other", "o", Outcome.ACK, ranges, log.now_us)
    log.trim()
    log.trim()


def test_a_payload_outlives_compacting_while_its_message_lives(tmp_path: Path) -> None:
    log = Rig(tmp_path, dict(KEEP_NOTHING))
    kill(log, "orders", [b"%d" % i for i in range(40)])
    repair(log, "orders", {i: b"repaired %d" % i for i in range(0, 40, 3)})
    fill(log, 60)
    assert any(".1.seg" in name for name in os.listdir(tmp_path)), "nothing was compacted"
    log.crash()
    wanted = {i: b"repaired %d" % i for i in range(0, 40, 3)}
    assert ready(log, "orders") == wanted
    log.engine.close(log.now_us)
    assert not inspect_log(str(tmp_path)).defects


def test_what_is_settled_leaves_nothing_behind(tmp_path: Path) -> None:
    log = Rig(tmp_path, dict(KEEP_NOTHING))
    kill(log, "orders", [b"%d" % i for i in range(40)])
    for round_ in range(5):
        repair(log, "orders", {i: b"%d-%d" % (round_, i) * 20 for i in range(40)})
        ranges = [(i, i + 1) for i in ready(log, "orders")]
        log.engine.settle("orders", "c", Outcome.REJECT if round_ < 4 else Outcome.ACK, ranges, log.now_us)
        log.turn()
    fill(log, 60)
    log.reopen()
    fill(log, 60)
    with LogReader(str(tmp_path)) as reader:
        assert reader.queues().keys() == {"orders", "other"}
        assert reader.kept_from(repair_queue_of("orders"), 0) is None
    log.engine.close(log.now_us)


def test_a_snapshot_knows_them(tmp_path: Path) -> None:
    log = Rig(tmp_path, {})
    kill(log, "orders", [b"a", b"b", b"c"])
    repair(log, "orders", {0: b"A", 2: b"C"})
    log.reopen()
    log.reopen()
    assert ready(log, "orders") == {0: b"A", 2: b"C"}
    log.engine.close(log.now_us)
    assert not inspect_log(str(tmp_path)).defects


def test_a_damaged_payload_costs_its_message_and_no_other(tmp_path: Path) -> None:
    log = Rig(tmp_path, {})
    kill(log, "orders", [b"%d" % i for i in range(9)])
    repair(log, "orders", {3: b"REPAIRED-3", 4: b"REPAIRED-4"})
    repair(log, "orders", {7: b"REPAIRED-7"})
    log.engine.redrive("orders", log.now_us)
    log.turn()
    log.engine.close(log.now_us)
    path = tmp_path / "00000000000000000000.seg"
    data = bytearray(path.read_bytes())
    data[data.index(b"REPAIRED-3")] ^= 1
    path.write_bytes(data)
    log.open()
    assert ready(log, "orders") == {i: b"%d" % i for i in range(9) if i not in (3, 4, 7)} | {7: b"REPAIRED-7"}
    assert {(d.queue, d.first, d.end) for d in log.engine.damage} >= {("orders", 3, 5)}
    log.engine.close(log.now_us)


def test_payloads_in_other_blocks_than_a_damaged_one_are_delivered(tmp_path: Path) -> None:
    log = Rig(tmp_path, {}, LogSettings(block_bytes=100))
    kill(log, "orders", [b"%d" % i for i in range(20)])
    payloads = {i: b"REPAIRED-%02d" % i + b"x" * 30 for i in range(20)}
    repair(log, "orders", payloads)
    log.engine.close(log.now_us)
    path = tmp_path / "00000000000000000000.seg"
    data = bytearray(path.read_bytes())
    data[data.index(b"REPAIRED-03")] ^= 1
    path.write_bytes(data)
    log.open()
    assert ready(log, "orders") == {i: payload for i, payload in payloads.items() if i not in (2, 3)}
    assert {(d.queue, d.first, d.end) for d in log.engine.damage} == {("orders", 2, 4)}
    log.engine.close(log.now_us)


@pytest.mark.parametrize("lost", ["name", "payload"])
def test_nobody_gets_the_payload_of_another_repair(tmp_path: Path, lost: str) -> None:
    """Where damage has taken the repair queue, or the last of it, the next repair comes behind that."""
    log = Rig(tmp_path, {})
    kill(log, "orders", [b"a", b"b", b"c"])
    repair(log, "orders", {0: b"REPAIRED-A"})
    log.send("other", [b"synced later"])
    log.engine.abandon()
    for name in os.listdir(tmp_path):
        if name.startswith("snapshot"):
            os.unlink(tmp_path / name)
    path = tmp_path / "00000000000000000000.seg"
    data = bytearray(path.read_bytes())
    if lost == "name":
        data[data.index(b"u0000orders")] ^= 1
    else:  # the whole block: two bounds and ten bytes
        start = data.index(b"REPAIRED-A") - 8 - HEADER_BYTES
        assert data[start : start + 4] == MAGIC
        data[start : start + HEADER_BYTES + 24] = bytes(HEADER_BYTES + 24)
    path.write_bytes(data)
    log.open()
    repair(log, "orders", {1: b"REPAIRED-B"})
    for restart in (log.crash, log.reopen, log.crash):
        repair(log, "orders", {2: b"REPAIRED-C"})
        assert ready(log, "orders") == {1: b"REPAIRED-B", 2: b"REPAIRED-C"}
        assert any((d.queue, d.first, d.end) == ("orders", 0, 1) for d in log.engine.damage)
        log.turn()
        restart()
    log.engine.close(log.now_us)


def test_a_letter_that_is_damaged_leaves_nothing_in_the_repair_queue(tmp_path: Path) -> None:
    log = Rig(tmp_path, {})
    kill(log, "orders", [b"LETTER-0"])
    kill(log, "orders", [b"LETTER-1"])
    repair(log, "orders", {0: b"REPAIRED-0", 1: b"REPAIRED-1"})
    log.engine.close(log.now_us)
    path = tmp_path / "00000000000000000000.seg"
    data = bytearray(path.read_bytes())
    data[data.index(b"LETTER-0")] ^= 1
    path.write_bytes(data)
    log.open()
    assert ready(log, "orders") == {1: b"REPAIRED-1"}
    assert {(d.queue, d.first, d.end) for d in log.engine.damage} == {("orders", 0, 1)}

    def kept() -> list[tuple[int, int]]:
        pending = log.engine._state.queues[repair_queue_of("orders")].pending
        return pending.unsettled(0, pending.tail)

    for restart in (log.crash, log.reopen, log.crash):
        log.turn()
        restart()
        assert kept() == [(1, 2)]
        assert ready(log, "orders") == {1: b"REPAIRED-1"}
    log.engine.close(log.now_us)


def test_nobody_reaches_the_repair_queue(tmp_path: Path) -> None:
    log = Rig(tmp_path, {})
    kill(log, "orders", [b"a"])
    repair(log, "orders", {0: b"A"})
    log.send("mails", [b"m"])
    assert log.engine.queues() == ["orders", "mails"]
    assert set(log.engine.changed()) == {"orders", "mails"}
    log.engine.close(log.now_us)
    with LogReader(str(tmp_path)) as reader:
        assert reader.queues().keys() == {"orders", "mails"}
        blocks = list(reader.messages(repair_queue_of("orders"), 0))
        assert [block.messages() for block in blocks] == [[b"A"]]
        assert all(block.header.kind == KIND_MESSAGES for block in blocks)


def test_what_is_left_over_is_what_nobody_uses() -> None:
    rng = random.Random(7)
    for _ in range(200):
        living = sorted(rng.sample(range(60), rng.randint(0, 40)))
        used = [offset for offset in living if rng.random() < 0.5]
        repairs: RangeMap[int] = RangeMap()
        for offset in used:
            repairs.add(100 - offset, 101 - offset, 2 * offset - 100)
        runs = [(first, end) for _, first, end in runs_of(array("q", living))]
        found = {i for first, end in left_over(repairs, runs) for i in range(first, end)}
        assert found == set(living) - set(used)


def test_rows_are_cut_out_of_a_batch() -> None:
    batch = Batch.of([b"a", b"", b"ccc", b"dd", b"e"])
    assert cut_batch(batch, [(0, 5)]).messages() == batch.messages()
    assert cut_batch(batch, [(1, 3), (4, 5)]).messages() == [b"", b"ccc", b"e"]
    assert cut_batch(batch, [(2, 3)]).messages() == [b"ccc"]


# --- very many in one commit ---

MANY = 5 * REDRIVE_RUNS


def staged_repairs(log: Rig, key: str, queue: str, of: Mapping[int, bytes]) -> str:
    """The id of a stage with these payloads."""
    batch = Batch.of(of.values(), protocol="http")
    batch.repairs = array("q", of.keys())
    came: list[StageInfo | LogError] = []
    log.engine.stage(key, [(queue, batch)], log.now_us, came.append)
    log.turn()
    (info,) = came
    assert isinstance(info, StageInfo)
    return info.stage


def scattered(log: Rig) -> tuple[str, dict[int, bytes]]:
    """Twice as many dead letters, and a stage with payloads for every other one."""
    kill(log, "orders", [b"%d" % i for i in range(2 * MANY)])
    repaired = {i: b"repaired %d" % i for i in range(0, 2 * MANY, 2)}
    return staged_repairs(log, "k", "orders", repaired), repaired


def test_letters_of_a_commit_are_dead_until_it_is_made_and_in_nobodys_hands(tmp_path: Path) -> None:
    log = Rig(tmp_path, {}, LogSettings())
    stage, repaired = scattered(log)
    came: list[TransactionDone | LogError] = []
    steps = log.engine.committing("k", [stage], log.now_us, came.append)
    for _ in range(3):
        next(steps)
        log.turn()
        found = log.engine.describe("orders")
        assert (found.ready, found.dead) == (0, 2 * MANY)
    others = log.engine.take("orders", "a", 2 * MANY, log.now_us, dead=True)
    taken = {got.offset for got in open_slices(others)}
    assert taken
    log.engine.give_back("orders", "a", log.now_us)
    assert not taken & set(range(0, 3 * 2 * REDRIVE_RUNS, 2)), "somebody has got what the commit has"
    for _ in steps:
        assert not came, "it is answered when everything is there"
        log.turn()
    log.turn()
    (done,) = came
    assert isinstance(done, TransactionDone)
    assert done.redriven == MANY
    assert ready(log, "orders") == repaired
    assert log.engine.describe("orders").dead == MANY


@pytest.mark.parametrize("at", [1, 4, 6, 8])
def test_a_crash_between_the_turns_of_a_commit_leaves_all_or_nothing(tmp_path: Path, at: int) -> None:
    log = Rig(tmp_path, {}, LogSettings(snapshot_blocks=1))
    stage, repaired = scattered(log)
    steps = log.engine.committing("k", [stage], log.now_us)
    for _ in range(at):
        next(steps)
        log.turn()
    log.crash()
    found = log.engine.describe("orders")
    is_made = log.engine.transaction("k") is not None
    assert (found.ready, found.dead) == ((MANY, MANY) if is_made else (0, 2 * MANY))
    assert is_made == (at > MANY // REDRIVE_RUNS)
    log.engine.commit("k", [stage], log.now_us)
    assert ready(log, "orders") == repaired


def test_a_commit_that_nobody_ends_gives_the_letters_back(tmp_path: Path) -> None:
    log = Rig(tmp_path, {}, LogSettings())
    stage, _ = scattered(log)
    steps = log.engine.committing("k", [stage], log.now_us)
    next(steps)
    log.engine.abort("k", log.now_us)
    with pytest.raises(StageUnknown, match="no stage"):
        list(steps)
    found = log.engine.describe("orders")
    assert (found.ready, found.held, found.dead) == (0, 0, 2 * MANY)
    letters = log.engine.take("orders", "a", 2 * MANY, log.now_us, dead=True)
    assert len(open_slices(letters)) == 2 * MANY


def test_a_queue_for_which_ids_have_no_number_is_refused(tmp_path: Path) -> None:
    """Nothing of what was sent to it is accepted, nothing is held for it, and the other queues go on."""
    log = Rig(tmp_path, {}, LogSettings())
    stage, repaired = scattered(log)
    log.engine._state.number_last = PART_MAX
    came: list[object] = []
    for refused in (
        lambda: log.engine.append("more", Batch.of([b"x"]), log.now_us, came.append),
        lambda: log.engine.transact("t", [("more", Batch.of([b"x"]))], log.now_us, came.append),
        lambda: log.engine.declare("more", log.now_us),
        lambda: list(log.engine.committing("k", [stage], log.now_us, came.append)),  # for its repair queue
    ):
        with pytest.raises(LogRefused, match="16777215 queues were made in this log"):
            refused()
    log.turn()
    assert (came, log.engine.queues()) == ([], ["orders"])
    found = log.engine.describe("orders")
    assert (found.ready, found.held, found.dead) == (0, 0, 2 * MANY)
    log.engine._state.number_last = 100
    log.engine.commit("k", [stage], log.now_us)
    assert ready(log, "orders") == repaired


def test_a_stage_for_which_there_is_no_queue_is_in_nobodys_way(tmp_path: Path) -> None:
    log = Rig(tmp_path, {}, LogSettings())
    log.engine._state.number_last = PART_MAX
    with pytest.raises(LogRefused, match="16777215 queues were made in this log"):
        log.engine.stage("k", [("orders", Batch.of([b"x"]))], log.now_us, no_receipt)
    log.engine._state.number_last = 100
    assert log.engine.stages_count == log.engine.stages_waiting_bytes == 0
    kill(log, "orders", [b"0"])
    assert staged_repairs(log, "k", "orders", {0: b"repaired"})


def test_a_commit_that_is_left_behind_its_blocks_is_carried_out(tmp_path: Path) -> None:
    log = Rig(tmp_path, {}, LogSettings())
    stage, repaired = scattered(log)
    steps = log.engine.committing("k", [stage], log.now_us)
    for _ in range(MANY // REDRIVE_RUNS + 1):
        next(steps)
    steps.close()
    assert ready(log, "orders") == repaired


def test_two_who_commit_the_same_at_once_get_one_answer_each(tmp_path: Path) -> None:
    log = Rig(tmp_path, {}, LogSettings())
    stage, repaired = scattered(log)
    came: list[TransactionDone | LogError] = []
    first, second = (log.engine.committing("k", [stage], log.now_us, came.append) for _ in range(2))
    next(first)
    for _ in range(5):  # The second asks more often, and finds none of the letters.
        next(second)
        log.turn()
    assert not came
    assert log.engine.transaction("k") is None
    for _ in first:
        log.turn()
    for _ in second:
        log.turn()
    log.turn()
    done = [it for it in came if isinstance(it, TransactionDone)]
    assert sorted((it.repeated, it.redriven) for it in done) == [(False, MANY), (True, 0)]
    assert ready(log, "orders") == repaired


def test_a_commit_that_another_has_overtaken_gives_the_letters_back(tmp_path: Path) -> None:
    log = Rig(tmp_path, {}, LogSettings())
    stage, _ = scattered(log)
    came: list[TransactionDone | LogError] = []
    steps = log.engine.committing("k", [stage], log.now_us, came.append)
    next(steps)
    log.engine.transact("k", [("mails", Batch.of([b"m"]))], log.now_us)
    for _ in steps:
        log.turn()
    log.turn()
    (done,) = came
    assert isinstance(done, TransactionDone)
    assert (done.repeated, [part.queue for part in done.stored]) == (True, ["mails"])
    letters = log.engine.take("orders", "a", 2 * MANY, log.now_us, dead=True)
    assert len(open_slices(letters)) == 2 * MANY


def test_a_queue_that_is_deleted_between_the_turns_of_a_commit_and_made_again(tmp_path: Path) -> None:
    log = Rig(tmp_path, {}, LogSettings())
    stage, _ = scattered(log)
    came: list[TransactionDone | LogError] = []
    steps = log.engine.committing("k", [stage], log.now_us, came.append)
    next(steps)
    log.engine.delete(["orders"], log.now_us)
    kill(log, "orders", [b"new"])
    for _ in steps:
        log.turn()
    log.turn()
    (done,) = came
    assert isinstance(done, TransactionDone)
    assert (done.redriven, done.repeated) == (0, False)
    log.crash()
    assert not log.engine.damage
    found = log.engine.describe("orders")
    assert (found.ready, found.dead, found.offset_end) == (0, 1, 1)


def test_letters_that_died_one_by_one_and_are_neighbours_are_redriven_in_turns(tmp_path: Path) -> None:
    log = Rig(tmp_path, {}, LogSettings())
    log.send("orders", named("m", MANY))
    log.take("orders")
    for offset in range(MANY):
        log.now_us += 1
        log.engine.settle("orders", "ann", Outcome.REJECT, [(offset, offset + 1)], log.now_us)
    repaired = {i: b"repaired %d" % i for i in range(MANY)}
    stage = staged_repairs(log, "k", "orders", repaired)
    steps = log.engine.committing("k", [stage], log.now_us)
    next(steps)
    _, held = log.engine._state.queues["orders"].pending.held_counts()
    assert held == REDRIVE_RUNS
    for _ in steps:
        log.turn()
    assert ready(log, "orders") == repaired


def test_what_a_commit_redrives_turn_by_turn_is_told_and_lets_go_of_earlier_payloads(tmp_path: Path) -> None:
    log = Rig(tmp_path, {}, LogSettings())
    stage, repaired = scattered(log)
    log.engine.commit("k", [stage], log.now_us)
    log.settle("orders", Outcome.REJECT, log.take("orders"))
    log.turn()
    stage = staged_repairs(log, "again", "orders", dict.fromkeys(repaired, b"again"))
    steps = log.engine.committing("again", [stage], log.now_us)
    log.engine.changed()
    before = 0
    for _ in steps:
        log.turn()
        found = log.engine.describe("orders").ready
        assert log.engine.changed() == (["orders"] if before < found else [])
        before = found
    log.turn()
    assert log.engine.changed() == ["orders"]
    payloads = log.engine._state.queues[repair_queue_of("orders")].pending
    assert sum(end - first for first, end in payloads.unsettled(0, payloads.tail)) == MANY
    assert set(ready(log, "orders").values()) == {b"again"}


@pytest.mark.parametrize("turns", [1, MANY // REDRIVE_RUNS + 2])
@pytest.mark.parametrize("end", ["fails", "closes"])
def test_a_log_that_ends_between_the_turns_of_a_commit_says_so(tmp_path: Path, turns: int, end: str) -> None:
    log = Rig(tmp_path, {}, LogSettings())
    stage, _ = scattered(log)
    came: list[TransactionDone | LogError] = []
    steps = log.engine.committing("k", [stage], log.now_us, came.append)
    for _ in range(turns):
        next(steps)
    log.writer.wait()
    if end == "fails":
        log.engine._committer.fail(OSError(errno.EIO, "broken"))
    else:
        log.engine.close(log.now_us)
    with pytest.raises(LogFailed if end == "fails" else LogRefused):
        list(steps)
    assert not came
    log.engine.abandon()
    log.open()
    found = log.engine.describe("orders")
    assert (found.ready, found.dead) == ((0, 2 * MANY) if turns == 1 else (MANY, MANY))
