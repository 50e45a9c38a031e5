"""Retention of the embedded log: when segments go, what pins them, and what compacting keeps.

The segments have 4 KiB, and a snapshot follows each of them, so a few dozen messages show everything.
"""

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.log import retention
from penstock.log.block import HEADER_BYTES
from penstock.log.disk import Disk, RealDisk, RealFile
from penstock.log.errors import DiskFull
from penstock.log.info import QueueInfo, ReaderInfo
from penstock.log.inspect import inspect_log
from penstock.log.keys import TRANSACTIONS_MAX
from penstock.log.log import Log
from penstock.log.reader import LogReader
from penstock.log.results import TransactionDone
from penstock.log.segment import Segment, parse_segment_name, segment_name
from penstock.log.state import SWEEP_ROWS, LogSettings
from penstock.model.batch import Batch
from penstock.model.life import Event
from penstock.model.policy import Policies
from penstock.model.timers import SWEEP_FROM
from penstock.model.words import Outcome
from tests.log.canaries import compact_as_before
from tests.log.contract_rig import (
    SECOND,
    START_US,
    Got,
    named,
    open_runs,
    open_slices,
    payloads,
    ranges_of,
)
from tests.log.inline import InlineWorker
from tests.log.old_steps import store_step

SMALL = LogSettings(segment_bytes=4096, block_bytes=1024, cache_bytes=2048, snapshot_blocks=1000)
KEEP_NOTHING = {"*": {"retention-seconds": 0}}


class FillableDisk(RealDisk):
    """A folder on a disk that may be full."""

    is_full = False

    def create(self, name: str, size: int) -> RealFile:
        if self.is_full:
            raise OSError(errno.ENOSPC, "no room")
        return super().create(name, size)


class Rig:
    """A log in a folder, with a clock, and workers that run when they are told to."""

    def __init__(self, folder: Path, policies: dict[str, object], settings: LogSettings = SMALL) -> None:
        self.folder = folder
        self.settings = settings
        self.policies = Policies(policies)
        self.now_us = START_US
        self.open()

    def open(self) -> Log:
        self.writer, self.keeper = InlineWorker(), InlineWorker()
        self.disk = FillableDisk(str(self.folder))
        self.engine = Log.open(
            self.disk,
            self.now_us,
            settings=self.settings,
            policies=self.policies,
            writer=self.writer,
            keeper=self.keeper,
        )
        return self.engine

    def crash(self) -> Log:
        self.engine.abandon()
        return self.open()

    def reopen(self) -> Log:
        self.engine.close(self.now_us)
        return self.open()

    def turn(self) -> None:
        self.engine.flush(self.now_us)
        self.engine.wait()

    def trim(self) -> None:
        self.turn()
        self.engine.trim(self.now_us)
        self.engine.wait()

    def hold(self, position: int, view: str = "messages", queue: str = "orders", seconds: int = 1000) -> None:
        """A reader holds what it has not read, from that position on."""
        reader = ReaderInfo("spark", queue, view, position, self.now_us + seconds * SECOND)
        self.engine.hold_retention(reader, self.now_us)

    def send(self, queue: str, messages: list[bytes]) -> None:
        self.append(queue, Batch.of(messages))

    def append(self, queue: str, batch: Batch) -> None:
        self.engine.append(queue, batch, self.now_us)
        self.turn()

    def send_on(self, queue: str) -> None:
        """Until it is refused."""
        while True:
            self.send(queue, [b"x" * 100])
            self.engine.tick(self.now_us)
            self.engine.wait()

    def take(self, queue: str, count: int = 1 << 20, *, dead: bool = False) -> list[Got]:
        return open_slices(self.engine.take(queue, "ann", count, self.now_us, bytes_max=1 << 30, dead=dead))

    def settle(self, queue: str, outcome: Outcome, messages: list[Got]) -> None:
        self.engine.settle(queue, "ann", outcome, ranges_of(messages), self.now_us)

    def ack(self, queue: str, messages: list[Got]) -> None:
        self.settle(queue, Outcome.ACK, messages)

    def work(self, queue: str, count: int, keep: Callable[[int], bool] = lambda _: False) -> list[bytes]:
        """Messages of 100 bytes, one block each, acknowledged unless they are to be kept; those."""
        kept = []
        for i in range(count):
            payload = b"%-100d" % i
            self.send(queue, [payload])
            (message,) = self.take(queue, 1)
            if keep(i):
                kept.append(payload)
            else:
                self.ack(queue, [message])
        self.turn()
        return kept

    def roll(self) -> None:
        """Go on until everything so far lies behind two snapshots."""
        for i in range(3):
            self.send("filler", [b"%d" % i * 3000])
            self.ack("filler", self.take("filler"))
            self.turn()

    def segments(self) -> dict[str, int]:
        """Names and sizes."""
        return {
            path.name: path.stat().st_size
            for path in sorted(self.folder.iterdir())
            if parse_segment_name(path.name) is not None
        }

    def info(self, queue: str) -> QueueInfo:
        return self.engine.describe(queue)

    def read(self, queue: str) -> list[bytes]:
        return payloads(open_slices(self.engine.read(queue, 0, 1 << 40)))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    logs: list[Rig] = []

    def make(policies: dict[str, object], settings: LogSettings = SMALL) -> Rig:
        logs.append(Rig(tmp_path, policies, settings))
        return logs[-1]

    yield make
    for log in logs:
        log.engine.abandon()


Make = Callable[..., Rig]


# --- by time and by bytes -------------------------------------------------------------------------


def test_settled_messages_stay_as_long_as_they_are_to_stay(make: Make) -> None:
    log = make({"orders": {"retention-seconds": 60}, "filler": {"retention-seconds": 0}})
    log.work("orders", 50)
    log.roll()
    log.now_us += 60 * SECOND - 1
    log.trim()
    assert len(log.read("orders")) == 50
    assert (log.info("orders").offset_start, log.info("orders").event_start) == (0, 0)
    log.now_us += 1
    log.trim()
    assert log.read("orders") == []
    assert (log.info("orders").offset_start, log.info("orders").offset_end) == (50, 50)
    assert (log.info("orders").event_start, log.info("orders").event_end) == (100, 100)
    assert list(log.engine.events("orders", 0, 1000)) == []
    assert log.engine.damage == []


@pytest.mark.parametrize("how", ["", "crash", "reopen", "snapshot"])
def test_a_clock_that_is_put_forward_takes_nothing_that_is_to_stay(make: Make, how: str) -> None:
    log = make({"orders": {"retention-seconds": 60}, "filler": {"retention-seconds": 0}})
    log.work("orders", 50)
    log.roll()
    log.now_us += 3600 * SECOND
    log.engine.step(3600 * SECOND, log.now_us)
    log.turn()
    if how == "snapshot":
        log.roll()
    if how:
        log.reopen() if how == "reopen" else log.crash()
    log.now_us += 60 * SECOND - 1
    log.trim()
    assert len(log.read("orders")) == 50
    log.now_us += 1
    log.trim()
    assert log.read("orders") == []


def test_the_newest_segments_stay_until_snapshots_lie_behind_them(make: Make) -> None:
    log = make(KEEP_NOTHING, LogSettings(segment_bytes=64 * 1024))
    log.work("orders", 30)
    log.now_us += 1000 * SECOND
    before = log.segments()
    log.trim()
    assert log.segments() == before
    for _ in range(2):
        assert len(log.read("orders")) == 30
        log.crash()  # an opening begins with a snapshot
        log.trim()
    assert log.read("orders") == []


def test_a_snapshot_that_cannot_be_read_does_not_count(make: Make) -> None:
    log = make(KEEP_NOTHING, LogSettings(segment_bytes=64 * 1024))
    kept = log.work("orders", 30, keep=lambda i: i == 7)
    for _ in range(3):
        log.reopen()
    log.engine.close(log.now_us)
    newest = max(log.folder.glob("snapshot-*"))
    newest.write_bytes(newest.read_bytes()[:-1])
    log.open()
    (damage,) = log.engine.damage
    assert "checksum" in damage.text
    assert "quarantine-snapshot" in damage.text
    assert len(list(log.folder.glob("quarantine-snapshot-*"))) == 1
    assert payloads(log.take("orders")) == kept
    log.engine.give_back("orders", "ann", log.now_us)
    log.engine.flush(log.now_us)
    log.writer.wait()
    log.engine.trim(log.now_us)
    assert len(log.keeper) == 1  # a new snapshot; nothing may go before it is there
    log.trim()
    log.crash()
    assert payloads(log.take("orders")) == kept


def test_retention_bytes_lets_go_of_what_is_beyond(make: Make) -> None:
    log = make({"orders": {"retention-bytes": 3000}, "filler": {"retention-seconds": 0}})
    log.work("orders", 100)
    log.roll()
    log.trim()
    left = log.info("orders").offset_end - log.info("orders").offset_start
    # Whole segments go, each has about a dozen messages: what is left is the cap, and a segment at most.
    assert 30 <= left <= 50
    assert len(log.read("orders")) == left


def test_the_queue_that_keeps_longest_decides_for_a_shared_segment(make: Make) -> None:
    log = make({"short": {"retention-seconds": 0}, "long": {"retention-seconds": 60}})
    for i in range(20):
        for queue in ("short", "long"):
            log.send(queue, [b"%-100d" % i])
            log.ack(queue, log.take(queue))
    log.roll()
    log.now_us += 59 * SECOND
    log.trim()
    assert len(log.read("short")) == len(log.read("long")) == 20
    log.now_us += SECOND
    log.trim()
    assert log.read("short") == log.read("long") == []


def test_new_segments_get_snapshots_after_old_ones_have_gone(make: Make) -> None:
    log = make(KEEP_NOTHING)
    for _ in range(6):
        log.work("orders", 60)
        log.roll()
        log.trim()
        assert len(log.segments()) <= 4
    assert log.info("orders").offset_start == 360


def test_transaction_keys_are_remembered_when_their_messages_are_gone(make: Make) -> None:
    log = make(KEEP_NOTHING)
    answers: list[object] = []
    parts = [("orders", Batch.of([b"x"])), ("mails", Batch.of([b"y"]))]
    log.engine.transact("key", parts, log.now_us, answers.append)
    log.turn()
    for queue in ("orders", "mails"):
        log.ack(queue, log.take(queue))
    log.roll()
    log.trim()
    assert log.read("orders") == []
    for restart in (log.crash, log.reopen):
        restart()
        log.engine.transact("key", parts, log.now_us, answers.append)
        log.turn()
    done = [answer for answer in answers if isinstance(answer, TransactionDone)]
    assert [answer.repeated for answer in done] == [False, True, True]
    assert done[1].stored == done[2].stored == done[0].stored


def test_a_transaction_that_has_begun_is_remembered_however_many_others_come(make: Make) -> None:
    log = make(KEEP_NOTHING)
    store_step(log.engine, "key", [("orders", Batch.of([b"x"]))], 0, log.now_us)
    log.ack("orders", log.take("orders"))
    for number in range(TRANSACTIONS_MAX + 1):
        log.engine.transact(f"other-{number}", [], log.now_us)
    log.roll()
    log.trim()
    for restart in (log.turn, log.crash, log.reopen):
        restart()
        assert log.engine.transaction_steps("key") == 1
        assert log.engine.transaction("other-0") is None


def test_keys_of_one_kind_do_not_push_out_those_of_another(make: Make) -> None:
    log = make(KEEP_NOTHING)
    for key in ("rare/1", "plain", "often/first"):
        log.engine.transact(key, [], log.now_us)
    for number in range(TRANSACTIONS_MAX):
        log.engine.transact(f"often/{number}", [], log.now_us)
    known = {"rare/1": True, "plain": True, "often/first": False, "often/0": True}
    for restart in (log.turn, log.crash, log.reopen):
        restart()
        assert {key: log.engine.transaction(key) is not None for key in known} == known


def test_a_segment_goes_only_when_the_settlements_that_free_it_are_synced(make: Make) -> None:
    log = make(KEEP_NOTHING)
    kept = log.work("orders", 20, keep=lambda i: i == 3)
    log.roll()
    log.trim()
    before = log.segments()
    (message,) = [m for m in open_slices(log.engine.read("orders", 0, 20)) if m.payload == kept[0]]
    log.ack("orders", [message])
    log.engine.trim(log.now_us)
    assert len(log.keeper) == 0
    assert log.segments() == before
    log.engine.wait()
    assert log.segments().keys() < before.keys()


def test_settled_after_the_last_snapshot_and_trimmed_is_no_damage(make: Make) -> None:
    log = make(KEEP_NOTHING)
    log.work("orders", 40, keep=lambda i: i % 2 == 0)
    log.roll()
    log.engine.settle("orders", "ann", Outcome.ACK, [(0, 1000)], log.now_us)
    log.trim()
    assert log.read("orders") == []
    log.crash()
    assert log.engine.damage == []
    assert (log.info("orders").ready, log.info("orders").offset_start) == (0, 40)
    assert log.info("orders").event_start == 60


def test_what_has_no_room_to_be_written_down_frees_nothing(make: Make) -> None:
    log = make(KEEP_NOTHING)
    log.work("orders", 10, keep=lambda i: i == 3)
    log.roll()
    log.trim()
    first = min(log.segments())
    log.send("filler", named("f", 200))
    log.disk.is_full = True
    with pytest.raises(DiskFull):
        log.send_on("filler")
    for filler in log.take("filler"):
        log.ack("filler", [filler])
        log.turn()
        if log.engine._dirty:  # there is no room for another settlement
            break
    assert log.engine._dirty
    log.engine.settle("orders", "ann", Outcome.ACK, [(3, 4)], log.now_us)
    log.trim()
    assert first in log.segments()
    log.disk.is_full = False
    log.engine.tick(log.now_us)
    log.engine.wait()
    log.trim()
    assert first not in log.segments()


# --- readers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("view", "factor"), [("messages", 1), ("events", 2)])
def test_a_reader_pins_what_it_has_not_read(make: Make, view: str, factor: int) -> None:
    log = make(KEEP_NOTHING)
    log.work("orders", 60)
    log.roll()
    log.hold(0, view)
    log.trim()
    assert len(log.read("orders")) == 60
    log.hold(30 * factor, view)
    log.trim()
    start = log.info("orders").offset_start
    assert 20 < start <= 30
    assert len(log.read("orders")) == 60 - start
    assert log.info("orders").event_start <= 60
    log.crash()
    log.trim()
    assert log.info("orders").offset_start == start
    log.hold(60 * factor, view)
    log.trim()
    assert log.read("orders") == []


@pytest.mark.parametrize(("view", "end"), [("messages", 60), ("events", 120)])
def test_a_reader_pins_the_very_last_one_that_it_has_not_read(make: Make, view: str, end: int) -> None:
    log = make(KEEP_NOTHING)
    log.work("orders", 60)
    log.roll()
    for position in (end - 1, end):
        log.hold(position, view)
        log.trim()
        assert (len(log.read("orders")) > 0) == (position < end)


@pytest.mark.parametrize("end", ["lease", "release"])
def test_a_reader_that_is_gone_pins_nothing(make: Make, end: str) -> None:
    log = make(KEEP_NOTHING)
    log.work("orders", 60)
    log.roll()
    log.hold(0, seconds=1)
    log.now_us += SECOND - 1
    log.trim()
    assert len(log.read("orders")) == 60
    if end == "lease":
        log.now_us += 1
    else:
        log.engine.release_retention("spark", log.now_us)
    log.trim()
    assert log.read("orders") == []


def test_a_reader_of_one_queue_pins_no_other(make: Make) -> None:
    log = make(KEEP_NOTHING)
    log.work("orders", 60)
    log.work("mails", 60)
    log.roll()
    log.hold(0, queue="mails")
    log.trim()
    assert len(log.read("mails")) == 60
    assert log.info("orders").offset_start > 40  # the last ones share a segment with the first mails


def capped(log: Rig) -> dict[str, bool]:
    return {reader.queue: reader.capped for reader in log.engine.readers()}


@pytest.mark.parametrize(("view", "factor"), [("messages", 1), ("events", 2)])
def test_a_reader_that_is_too_far_behind_does_not_fill_the_disk(
    make: Make, caplog: pytest.LogCaptureFixture, view: str, factor: int
) -> None:
    log = make(KEEP_NOTHING, replace(SMALL, reader_bytes_max=3 * 4096))
    log.work("orders", 20)
    log.roll()
    log.hold(3 * factor, view)
    log.trim()
    assert (len(log.read("orders")), capped(log)) == (20, {"orders": False})
    log.work("orders", 200)
    log.roll()
    log.trim()
    left = len(log.read("orders"))
    assert 20 < left < 100
    assert sum(log.segments().values()) < 8 * 4096
    assert capped(log) == {"orders": True}
    told = [record.getMessage() for record in caplog.records if "too far behind" in record.getMessage()]
    assert len(told) == 1
    assert "reader 'spark' of queue 'orders'" in told[0]
    assert f"from {3 * factor} up to" in told[0]
    log.hold(
        (log.info("orders").offset_start + 1) * factor, view
    )  # it has noticed, and goes on with what there is
    log.trim()
    assert capped(log) == {"orders": False}
    log.work("orders", 200)
    log.roll()
    log.trim()
    assert capped(log) == {"orders": True}
    assert len([r for r in caplog.records if "too far behind" in r.getMessage()]) == 2


def test_the_cap_counts_for_each_queue_of_a_reader_by_itself(make: Make) -> None:
    log = make(KEEP_NOTHING, replace(SMALL, reader_bytes_max=5 * 4096))
    log.work("mails", 10)
    log.roll()
    for queue in ("orders", "mails"):
        log.send(queue, [b"x"])
        log.ack(queue, log.take(queue))
        log.hold(0, queue=queue)
    log.work("orders", 300)
    log.roll()
    log.trim()
    assert capped(log) == {"orders": True, "mails": False}
    assert len(log.read("mails")) == 11
    assert len(log.read("orders")) < 200


def test_without_a_cap_a_reader_holds_everything(make: Make) -> None:
    log = make(KEEP_NOTHING, replace(SMALL, reader_bytes_max=0))
    log.send("orders", [b"x"])
    log.hold(0)
    log.work("orders", 300)
    log.roll()
    log.trim()
    assert (len(log.read("orders")), capped(log)) == (301, {"orders": False})


def test_the_cap_lets_go_of_nothing_that_is_alive_or_within_its_retention(make: Make) -> None:
    log = make({"*": {"retention-seconds": 100}}, replace(SMALL, reader_bytes_max=1))
    log.work("orders", 100, keep=lambda i: i == 50)
    log.hold(0)
    log.roll()
    log.trim()
    assert len(log.read("orders")) == 100
    assert capped(log) == {"orders": True}
    log.now_us += 101 * SECOND
    log.trim()
    assert log.info("orders").offset_start > 50
    log.engine.give_back("orders", "ann", log.now_us)
    assert payloads(log.take("orders")) == [b"%-100d" % 50]


def test_readers_of_older_logs_are_found(make: Make) -> None:
    """They had one queue each, and were released by name."""
    log = make(KEEP_NOTHING)
    log.send("orders", [b"x"])
    log.send("mails", [b"x"])
    old = {"name": "spark", "view": "messages", "position": 1, "lease_until_us": log.now_us + SECOND}
    for queue in ("orders", "mails"):
        log.engine._sealer.control({"op": "reader", "reader": {**old, "queue": queue}}, log.now_us)
    log.turn()
    log.crash()
    assert [(reader.name, reader.queue, reader.position) for reader in log.engine.readers()] == [
        ("spark", "orders", 1),
        ("spark", "mails", 1),
    ]
    log.engine._sealer.control({"op": "reader-gone", "name": "spark"}, log.now_us)
    log.turn()
    log.crash()
    assert log.engine.readers() == []


def test_whoever_is_reading_when_segments_go_reads_on(make: Make) -> None:
    log = make(KEEP_NOTHING)
    kept = log.work("orders", 60, keep=lambda i: i % 10 == 9)
    log.roll()
    reading = log.engine.read("orders", 0, 60)
    telling = log.engine.events("orders", 0, 1000)
    seen = payloads(open_slices([next(reading)]))
    told = open_runs([next(telling)])
    log.trim()
    assert seen + payloads(open_slices(reading)) == [b"%-100d" % 0, *kept]
    assert {t.event for t in told + open_runs(telling)} == {Event.ACCEPTED}


# --- compacting -----------------------------------------------------------------------------------


def test_the_living_keep_everything_but_their_neighbours(make: Make) -> None:
    log = make(KEEP_NOTHING)
    for i in range(40):
        log.now_us += 1
        two = [b"%-99d" % i, b"+%d" % i]
        log.append("orders", Batch.of(two, ttl_seconds=[900 + i, 0], retries=[i % 4, -1]))
    everything = log.take("orders")
    alive = everything[1::5]  # the first of its block, or the second
    log.ack("orders", [m for m in everything if m not in alive])
    log.engine.give_back("orders", "ann", log.now_us, lost=False)
    log.turn()
    log.roll()
    before = log.segments()
    numbers = {t.number: (t.event, t.offset) for t in open_runs(log.engine.events("orders", 0, 1000))}
    log.trim()
    after = log.segments()
    assert sum(after.values()) < sum(before.values()) / 2
    assert any(name.endswith(".1.seg") for name in after)
    assert log.take("orders") == alive
    assert log.read("orders") == payloads(alive)  # below offset_start, what is there
    left = open_runs(log.engine.events("orders", 0, 1000))
    assert [t.offset for t in left if t.event is Event.ACCEPTED] == [m.offset for m in alive]
    assert all(numbers[t.number] == (t.event, t.offset) for t in left)
    info = log.info("orders")
    assert (info.held, info.offset_start, info.offset_end) == (16, 80, 80)
    assert info.bytes == sum(len(m.payload) for m in alive)
    assert info.oldest_us == alive[0].time_us
    for restart in (log.crash, log.reopen, log.crash):
        restart()
        assert log.take("orders") == alive
        assert log.engine.damage == []
        assert log.info("orders").offset_start == 80


def test_moved_and_dead_ones_are_alive_too(make: Make) -> None:
    log = make(KEEP_NOTHING)
    log.send("orders", named("m", 200))
    got = log.take("orders")
    log.settle("orders", Outcome.REQUEUE, [got[40], got[10]])
    log.settle("orders", Outcome.REJECT, [got[50], got[5]])
    log.ack("orders", [m for m in got if m.offset not in (5, 10, 20, 40, 50)])
    log.roll()
    log.trim()
    assert log.info("orders").offset_start == 200
    assert [m.payload for m in log.take("orders", dead=True)] == [b"m-50", b"m-5"]
    log.crash()
    assert payloads(log.take("orders")) == [b"m-20", b"m-40", b"m-10"]
    assert payloads(log.take("orders", dead=True)) == [b"m-50", b"m-5"]


@pytest.mark.parametrize("runs_max", [retention.RUNS_MAX, 0])
def test_what_is_compacted_can_be_compacted_again_and_then_goes(
    make: Make, monkeypatch: pytest.MonkeyPatch, runs_max: int
) -> None:
    """Also where so much lives that it is only counted first."""
    monkeypatch.setattr(retention, "RUNS_MAX", runs_max)
    log = make(KEEP_NOTHING)
    log.work("orders", 36, keep=lambda i: i % 3 == 0)
    log.roll()
    sizes: list[int] = []
    generations: set[str] = set()
    for left in ([*range(0, 36, 3)], [0, 18], [0], []):
        gone = [(offset, offset + 1) for offset in range(36) if offset not in left]
        log.engine.settle("orders", "ann", Outcome.ACK, gone, log.now_us)
        log.trim()
        assert log.read("orders") == [b"%-100d" % offset for offset in left]
        sizes.append(sum(log.segments().values()))
        generations.update(name.split(".")[1] for name in log.segments())
    assert sizes == sorted(set(sizes), reverse=True)
    assert {"1", "2"} <= generations


def test_trimming_ends_also_with_messages_smaller_than_their_headers(make: Make) -> None:
    log = make(KEEP_NOTHING)
    for i in range(60):
        log.send("orders", [b"", b"x"])
        if i % 2:
            log.ack("orders", log.take("orders", 2))
    log.roll()
    log.trim()
    compacted = log.segments()
    assert any(".1.seg" in name for name in compacted)
    for _ in range(3):
        log.trim()
    assert log.segments() == compacted


def test_what_is_half_alive_is_left_alone(make: Make) -> None:
    log = make(KEEP_NOTHING)
    log.work("orders", 10, keep=lambda i: i < 4)
    log.roll()
    log.trim()
    compacted = log.segments()
    log.ack("orders", open_slices(log.engine.read("orders", 0, 2)))
    log.trim()
    assert log.segments() == compacted
    log.ack("orders", open_slices(log.engine.read("orders", 2, 3)))
    log.trim()
    assert sum(log.segments().values()) < sum(compacted.values())


def test_a_segment_that_is_alive_as_a_whole_is_left_alone(make: Make) -> None:
    log = make(KEEP_NOTHING)
    for _ in range(60):
        log.send("orders", [b"x"])
    log.roll()
    first = min(log.segments())
    log.trim()
    assert first in log.segments()
    assert log.info("orders").offset_start == 0


OTHERS = 60


def other(i: int) -> bytes:
    return b"OTHER-%d" % i + b"." * (i % 13 * 8)


def scatter(log: Rig, rounds: int = 1) -> list[int]:
    """Small messages in large blocks, of which every third lives on, between those of another queue: the
    offsets of the living."""
    for i in range(rounds):
        log.send("small", [b"%d" % (j % 10) for j in range(1102)])
        for j in range(OTHERS):
            log.send("other", [other(i * OTHERS + j)])
    got = log.take("small")
    log.ack("small", [message for message in got if message.offset % 3])
    log.engine.give_back("small", "ann", log.now_us, lost=False)
    log.turn()
    log.roll()
    return [message.offset for message in got if message.offset % 3 == 0]


def check_scattered(log: Rig, living: list[int]) -> None:
    got = log.take("small")
    assert [(m.offset, m.payload) for m in got] == [(o, b"%d" % (o % 1102 % 10)) for o in living]
    others = OTHERS * (max(living) // 1102 + 1)
    assert payloads(log.take("other")) == [other(i) for i in range(others)]


SCATTERED = LogSettings(segment_bytes=6400, block_bytes=4096, cache_bytes=1 << 20, snapshot_blocks=1000)


def reach(log: Rig) -> list[int]:
    """How far each segment reaches into the next one."""
    names = [(parse_segment_name(name) or (0, 0), size) for name, size in log.segments().items()]
    return [
        base + size - after
        for ((base, generation), size), ((after, _), _) in itertools.pairwise(names)
        if generation
    ]


def test_compacting_never_makes_a_segment_longer(make: Make) -> None:
    """The living ones cost a header each, more than they and all their neighbours did together."""
    log = make(KEEP_NOTHING, SCATTERED)
    living = scatter(log, rounds=3)
    before = log.segments()
    log.trim()
    assert all(overlap <= 0 for overlap in reach(log))
    assert log.segments() != before  # There was something to trim.
    for name, size in log.segments().items():
        base, _ = parse_segment_name(name) or (0, 0)
        assert size <= before[segment_name(base, 0)], name
    check_scattered(log, living)
    log.crash()
    check_scattered(log, living)
    assert log.engine.damage == []


def test_what_would_leave_too_much_is_tried_again_when_half_of_it_has_gone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make(KEEP_NOTHING, SCATTERED)
    rewritten: list[int] = []
    compact = retention.compact

    def counted(disk: Disk, segment: Segment, living: retention.Living, staged: retention.Staged) -> Segment:
        rewritten.append(segment.base)
        return compact(disk, segment, living, staged)

    monkeypatch.setattr(retention, "compact", counted)
    # Their reply addresses are what makes them large, and only the file knows that.
    log.append("small", Batch.of([b"x"] * 40, reply=[b"%-90d" % i for i in range(40)], protocol="rq"))
    log.ack("small", log.take("small")[20:])
    log.roll()
    for _ in range(3):
        log.trim()
        assert rewritten == [0]
    log.engine.settle("small", "ann", Outcome.ACK, [(0, 10)], log.now_us)
    log.trim()
    assert rewritten == [0, 0]
    assert any(name.endswith(".1.seg") for name in log.segments())


def overlapping(log: Rig, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A log as earlier versions could leave one behind: compacted whatever comes of it."""
    living = scatter(log)
    with monkeypatch.context() as context:
        compact_as_before(context)
        log.trim()
    assert max(reach(log)) > 0
    return living


def test_segments_that_overlap_are_kept_apart(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    log = make(KEEP_NOTHING, SCATTERED)
    living = overlapping(log, monkeypatch)
    for restart in (lambda: None, log.crash, log.reopen, log.crash):
        restart()
        assert log.read("small") == [b"%d" % (o % 10) for o in living]
        check_scattered(log, living)
        log.engine.give_back("small", "ann", log.now_us, lost=False)
        log.engine.give_back("other", "ann", log.now_us, lost=False)
        log.turn()
    reader = LogReader(str(log.folder))
    for block in reader.messages("other", 0):
        assert block.messages() == [
            other(o) for o in range(block.header.first_offset, block.header.offset_end)
        ]
        name, base = reader.file_of(block.header)
        data = (log.folder / name).read_bytes()
        assert bytes(block.body) == data[block.header.position - base + HEADER_BYTES :][: len(block.body)]
    for queue in ("small", "other"):
        log.ack(queue, log.take(queue))
    log.roll()
    log.trim()
    assert not any(".1.seg" in name for name in log.segments())


def test_messages_that_an_overlap_puts_in_doubt_are_named(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make(KEEP_NOTHING, SCATTERED)
    living = overlapping(log, monkeypatch)
    named: dict[str, set[int]] = {"small": set(), "other": set()}
    for defect in inspect_log(str(log.folder)).defects:
        assert defect.kind == "overlap"
        named[defect.queue].update(range(defect.first, defect.end))
        assert f"offsets {defect.first} to {defect.end - 1} of queue {defect.queue!r}" in defect.text
    assert named["small"]
    assert named["small"] <= set(living)
    log.crash()
    told = [damage.text for damage in log.engine.damage]
    assert told
    assert all("longer than what it was made from" in text for text in told)
    assert any(f"{min(named['small'])} to " in text and "queue 'small'" in text for text in told)
    # Nobody is kept from them, and they are told once.
    check_scattered(log, living)
    log.reopen()
    log.crash()
    assert [damage.text for damage in log.engine.damage] == told


def test_a_compaction_that_fails_leaves_the_start_of_the_log_where_it_was(make: Make) -> None:
    log = make(KEEP_NOTHING)
    log.work("orders", 60, keep=lambda i: i % 12 == 0)
    log.roll()
    first = min(log.segments())
    with open(log.folder / first, "r+b") as file:
        file.seek(2000)
        file.write(b"\xff" * 64)
    log.engine.trim(log.now_us)
    log.writer.wait()
    log.keeper.step()
    log.engine.poll()
    assert first in log.segments()
    assert (log.info("orders").offset_start, log.info("orders").event_start) == (0, 0)


def test_a_reader_that_comes_while_a_segment_is_compacted_keeps_it(make: Make) -> None:
    log = make(KEEP_NOTHING)
    kept = half_way(log)
    first = min(log.segments())
    log.hold(0, seconds=1)
    log.engine.wait()
    assert first in log.segments()
    assert not list(log.folder.glob("*.tmp"))
    assert log.info("orders").offset_start == 0
    assert len(log.read("orders")) == 60
    log.now_us += SECOND
    log.trim()
    assert log.read("orders") == kept


@pytest.mark.long
def test_a_thousand_segments_that_are_passed_over_are_no_trouble(make: Make) -> None:
    log = make({"*": {"retention-seconds": 0}}, LogSettings(segment_bytes=512, snapshot_blocks=100_000))
    for _ in range(1200):
        log.send("orders", [b"x" * 300])
    log.ack("orders", log.take("orders"))
    for _ in range(4):
        log.turn()
        log.engine.tick(log.now_us)
        log.engine.wait()
    calls = 0

    def no_room(*_: object) -> bool:
        nonlocal calls
        calls += 1
        return False

    with pytest.MonkeyPatch.context() as context:
        context.setattr(log.engine._trimmer, "_when_safe", no_room)
        log.engine.trim(log.now_us)
        log.engine.wait()
    assert calls > 1100
    log.trim()
    assert len(log.segments()) < 10


def test_a_damaged_segment_stays_and_the_others_go(make: Make) -> None:
    log = make(KEEP_NOTHING)
    log.work("orders", 60, keep=lambda i: i == 0)
    log.roll()
    names = sorted(log.segments())
    with open(log.folder / names[0], "r+b") as file:
        file.seek(2000)
        file.write(b"\xff" * 64)
    log.trim()
    left = sorted(log.segments())
    assert left[0] == names[0]
    assert set(names[1:4]).isdisjoint(left)
    log.trim()
    assert log.info("orders").held == 1


def test_a_compaction_without_room_leaves_no_file_open(make: Make) -> None:
    log = make(KEEP_NOTHING)
    kept = half_way(log)
    log.disk.is_full = True
    log.engine.wait()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        log.trim()
    assert len(os.listdir("/proc/self/fd")) == before
    log.disk.is_full = False
    log.trim()
    assert log.read("orders") == kept


def test_segments_that_come_and_go_leave_no_file_open(make: Make) -> None:
    log = make(KEEP_NOTHING)
    log.work("orders", 60)
    log.trim()
    before = len(os.listdir("/proc/self/fd"))
    names = set(log.segments())
    log.work("orders", 120)
    log.roll()
    log.trim()
    assert names.isdisjoint(log.segments())
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_a_segment_whose_file_somebody_has_removed_stays_and_the_others_go(make: Make) -> None:
    log = make(KEEP_NOTHING)
    log.work("orders", 60, keep=lambda i: i == 0)
    log.roll()
    names = sorted(log.segments())
    (log.folder / names[0]).unlink()
    log.trim()
    assert log.engine.failed is None
    assert set(names[1:4]).isdisjoint(log.segments())
    assert log.info("orders").held == 1


# --- crashes while compacting ---------------------------------------------------------------------


def half_way(log: Rig) -> list[bytes]:
    """A log with a compaction to do, and the living messages in it."""
    kept = log.work("orders", 60, keep=lambda i: i % 12 == 0)
    log.engine.give_back("orders", "ann", log.now_us, lost=False)
    log.turn()
    log.roll()
    log.engine.trim(log.now_us)
    log.writer.wait()
    return kept


def check(log: Rig, kept: list[bytes]) -> None:
    assert log.engine.damage == []
    assert payloads(log.take("orders")) == kept
    log.engine.give_back("orders", "ann", log.now_us, lost=False)
    log.turn()
    log.trim()
    log.crash()
    assert payloads(log.take("orders")) == kept
    assert log.info("orders").offset_start == 60


def test_a_crash_before_the_compacted_file_has_its_name(make: Make) -> None:
    log = make(KEEP_NOTHING)
    kept = half_way(log)
    first = min(log.segments())
    (log.folder / first.replace(".seg", ".1.seg.tmp")).write_bytes((log.folder / first).read_bytes()[:999])
    log.crash()
    assert not list(log.folder.glob("*.tmp"))
    check(log, kept)


def test_a_crash_after_it_has_its_name_and_before_the_old_file_is_gone(make: Make) -> None:
    log = make(KEEP_NOTHING)
    kept = half_way(log)
    for _ in range(2):  # its content, its name
        assert log.keeper.step()
        log.engine.poll()
    names = log.segments()
    assert any(name.replace(".1.seg", ".seg") in names for name in names if ".1.seg" in name)
    log.crash()
    assert not any(name.replace(".1.seg", ".seg") in log.segments() for name in names if ".1.seg" in name)
    check(log, kept)


@pytest.mark.parametrize("jobs", range(1, 12))
def test_a_crash_after_any_job_of_the_keeper(make: Make, jobs: int) -> None:
    log = make(KEEP_NOTHING)
    kept = half_way(log)
    for _ in range(jobs):
        log.keeper.step()
        log.engine.poll()
        log.writer.wait()
    log.crash()
    check(log, kept)


def test_without_the_newest_snapshot_the_older_one_and_the_log_say_the_same(make: Make) -> None:
    log = make(KEEP_NOTHING)
    kept = half_way(log)
    log.trim()
    log.engine.abandon()
    max(log.folder.glob("snapshot-*")).unlink()
    log.open()
    check(log, kept)


def test_without_any_snapshot_nothing_alive_is_lost(make: Make) -> None:
    """Names and settlements went with the old segments, which is said; the messages are there."""
    log = make(KEEP_NOTHING)
    kept = half_way(log)
    log.trim()
    log.engine.abandon()
    for snapshot in log.folder.glob("snapshot-*"):
        snapshot.unlink()
    log.open()
    assert log.engine.damage
    found = [payload for queue in log.engine.queues() for payload in payloads(log.take(queue))]
    assert set(kept) <= set(found)


@pytest.mark.parametrize("emptied", [False, True])
def test_where_only_compacted_segments_are_left_new_ones_come_behind_them(make: Make, emptied: bool) -> None:
    """They would have the place and name of one that is there, and the next start would take them for old."""
    log = make(KEEP_NOTHING)
    kept = half_way(log)
    log.trim()
    log.engine.abandon()
    for path in log.folder.iterdir():
        if path.name.startswith("snapshot-") or path.name.count(".") == 1:
            path.unlink()
    if emptied:
        os.truncate(log.folder / max(log.segments()), 0)
    log.open()
    log.send("orders", [b"new"])
    for _ in range(2):
        log.crash()
        found = [payload for queue in log.engine.queues() for payload in payloads(log.take(queue))]
        assert b"new" in found
        assert set(found) < {*kept, b"new"} if emptied else set(found) == {*kept, b"new"}
        log.turn()


def test_a_compacted_segment_proves_that_what_stands_before_it_was_synced(make: Make) -> None:
    """No torn tail can be there: the damage is reported, and nothing behind it is removed."""
    log = make(KEEP_NOTHING)
    first = min(log.segments())
    i = 0
    while len(log.segments()) == 1:
        log.send("mails", [b"mail %-100d" % i])
        i += 1
    kept = half_way(log)
    log.trim()
    log.engine.abandon()
    compacted = [name for name in log.segments() if name.endswith(".1.seg")]
    assert compacted
    assert first in log.segments()
    for path in log.folder.iterdir():
        if path.name not in (first, *compacted):
            path.unlink()
    data = bytearray((log.folder / first).read_bytes())
    data[data.rindex(b"mail ")] ^= 1
    (log.folder / first).write_bytes(data)
    assert [d.file for d in inspect_log(str(log.folder)).defects if d.kind == "bad-body"] == [
        str(log.folder / first)
    ]
    log.open()
    found = [payload for queue in log.engine.queues() for payload in payloads(log.take(queue))]
    assert {payload for payload in found if not payload.startswith(b"mail")} == set(kept)
    assert any(d.file.endswith(first) for d in log.engine.damage)
    assert set(compacted) <= log.segments().keys()


def test_messages_of_a_compacted_segment_expire_when_they_should(make: Make) -> None:
    log = make(KEEP_NOTHING)
    for i in range(40):
        log.append("orders", Batch.of([b"%-99d" % i] * 3, ttl_seconds=[20, 10, 0]))
    log.ack("orders", log.take("orders")[9:])
    log.engine.give_back("orders", "ann", log.now_us, lost=False)
    log.roll()
    log.trim()
    assert any(name.endswith(".1.seg") for name in log.segments())
    for after, left in ((9, 9), (10, 6), (20, 3)):
        log.now_us = START_US + after * SECOND
        assert len(log.take("orders")) == left  # asked before any timer is
        log.engine.give_back("orders", "ann", log.now_us, lost=False)


def test_timers_of_what_is_gone_go_long_before_their_time(tmp_path: Path) -> None:
    """With a TTL of a month, all that was sent in a month had one. What may still expire keeps its own."""
    rig = Rig(tmp_path, {}, LogSettings())
    rig.append("orders", Batch.of([b"x"] * 100, ttl_seconds=[7] * 100))
    rig.append("deleted", Batch.of([b"x"], ttl_seconds=[7]))
    got = rig.take("orders", 98)
    rig.settle("orders", Outcome.ACK, got[:97])
    numbers = {name: rig.engine._state.queues[name].number for name in ("orders", "deleted")}
    rig.engine.delete(["deleted"], rig.now_us)
    timers = rig.engine._state.timers
    for at in range(SWEEP_FROM):
        timers.add(
            rig.now_us + at * SECOND, numbers["orders" if at % 10 else "deleted"], at % 97, at % 97 + 1
        )
    for _ in range(SWEEP_FROM // SWEEP_ROWS + 2):
        rig.engine.tick(rig.now_us)
    assert len(timers) == 1
    rig.now_us += 8 * SECOND
    assert [fate.end - fate.first for _, fate in rig.engine.expire(rig.now_us)] == [2]
