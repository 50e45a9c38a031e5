"""A disk without room, and a disk that fails.

Without room: new messages are refused, everything else goes on, nothing that was accepted is lost, and
room that comes back is used. A write or sync that fails for any other reason is final: no receipt is
given any more, no second sync is tried, and everything that was confirmed is there after a restart.
"""

import errno
import logging
import os
import random
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.log import sealer, staging, transactions
from penstock.log.columns import join_batches
from penstock.log.disk import Watermark
from penstock.log.errors import DiskFull, LogError, LogFailed, LogRefused
from penstock.log.log import Log, open_log
from penstock.log.results import StageInfo, Stored, TransactionDone
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.policy import Policies
from penstock.model.words import Outcome
from tests.build import interpreted_only
from tests.log.folders import no_receipt
from tests.log.inline import InlineWorker
from tests.log.simdisk import SimDisk, SimFile

SETTINGS = LogSettings(
    segment_bytes=2048, cache_bytes=0, block_bytes=500, snapshot_blocks=6, syncs_apart_us=0
)
POLICIES = Policies({"*": {"retention-seconds": 0}})
START_US = 1_700_000_000_000_000
TURNS = 14
PAYLOAD_BYTES = 120
SEED = int(os.environ.get("PENSTOCK_TEST_SEED", 0))
"""Of what is left of unsynced bytes after a crash at any call."""

ROOM_CALLS = ("write", "create", "allocate", "rename")
"""What may fail for lack of room, and can be tried again."""
FINAL = [(call, errno.EIO) for call in (*ROOM_CALLS, "sync", "sync_names")] + [
    ("sync", errno.ENOSPC),
    ("sync_names", errno.ENOSPC),
]
"""What is final: any other reason, and every sync. (Except that of a file which can be thrown away.)"""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Rig:
    """A log, its clock, and a tally of what was sent, confirmed and settled."""

    def __init__(self, opener: Callable[[int], Log]) -> None:
        self._opener = opener
        self.now_us = START_US
        self.sent: set[bytes] = set()
        self.confirmed: set[bytes] = set()
        self.settled: set[bytes] = set()
        self.waiting: dict[bytes, int] = {}  # receipts that have not come, with how often they did
        self.errors: list[LogError] = []
        self.engine = opener(self.now_us)

    def reopen(self) -> None:
        self.waiting.clear()
        self.engine = self._opener(self.now_us)

    def turn(self) -> None:
        """The end of a turn, and everything that it sets off."""
        self.now_us += 1000
        self.engine.flush(self.now_us)
        self.engine.wait()
        self.engine.poll()

    def tick(self) -> None:
        self.now_us += 1_000_000
        self.engine.tick(self.now_us)
        self.engine.wait()
        self.engine.poll()

    def payloads(self, count: int) -> list[bytes]:
        first = len(self.sent)
        return [b"%06d" % (first + i) + b"." * PAYLOAD_BYTES for i in range(count)]

    def _expect(self, payloads: list[bytes]) -> Callable[[object], None]:
        self.sent |= set(payloads)
        for payload in payloads:
            assert payload not in self.waiting
            self.waiting[payload] = 0

        def receipt(result: object) -> None:
            for payload in payloads:
                assert self.waiting.pop(payload) == 0, "a receipt came twice"
            if isinstance(result, LogError):
                self.errors.append(result)
            else:
                assert isinstance(result, Stored | TransactionDone)
                self.confirmed.update(payloads)

        return receipt

    def append(self, count: int = 3, queue: str = "orders") -> None:
        payloads = self.payloads(count)
        before = (set(self.sent), dict(self.waiting))
        receipt = self._expect(payloads)
        try:
            self.engine.append(queue, Batch.of(payloads), self.now_us, receipt)
        except LogError:
            self.sent, self.waiting = before
            raise

    def transact(self, key: str) -> None:
        payloads = self.payloads(4)
        before = (set(self.sent), dict(self.waiting))
        receipt = self._expect(payloads)
        parts = [("orders", Batch.of(payloads[:3])), ("mails", Batch.of(payloads[3:]))]
        try:
            self.engine.transact(key, parts, self.now_us, receipt)
        except LogError:
            self.sent, self.waiting = before
            raise

    def consume(self, count: int, queue: str = "orders") -> list[bytes]:
        """Take and acknowledge; what came."""
        taken: list[bytes] = []
        for piece in self.engine.take(queue, "ann", count, self.now_us):
            ranges = [(piece.offset_start, piece.offset_end)]
            fates = self.engine.settle(queue, "ann", Outcome.ACK, ranges, self.now_us)
            assert sum(fate.end - fate.first for fate in fates) == len(piece)
            taken += piece.messages()
        self.settled |= set(taken)
        return taken

    def drain(self) -> set[bytes]:
        """Everything that the log gives out now, each once."""
        found: list[bytes] = []
        for queue in self.engine.queues():
            for dead in (False, True):
                while slices := self.engine.take(queue, "drain", 1000, self.now_us, dead=dead):
                    found += [payload for piece in slices for payload in piece.messages()]
        assert len(found) == len(set(found))
        return set(found)

    def assert_nothing_lost(self) -> None:
        """For a log that was opened anew."""
        found = self.drain()
        assert not self.engine.damage
        assert self.confirmed - self.settled <= found, "LOST"
        assert found <= self.sent, "INVENTED"


def simulated(disk: SimDisk, settings: LogSettings = SETTINGS) -> Callable[[int], Log]:
    def opener(now_us: int) -> Log:
        return Log.open(
            disk,
            now_us,
            settings=settings,
            policies=POLICIES,
            writer=InlineWorker(),
            keeper=InlineWorker(),
        )

    return opener


def reopened(rig: Rig, disk: SimDisk) -> Rig:
    """The same tally, beside the log on another disk."""
    rig._opener = simulated(disk)
    rig.reopen()
    return rig


def work(rig: Rig) -> None:
    """Everything that makes the log write: appends, settlements, transactions, segments, snapshots,
    compaction. The same calls every time."""
    for turn in range(TURNS):
        rig.append(3)
        rig.append(1, queue="mails")
        if turn % 4 == 2:
            rig.transact(f"key-{turn}")
        rig.turn()
        rig.consume(2)
        if turn % 3 == 1:
            rig.consume(4, queue="mails")
        rig.turn()
        rig.engine.trim(rig.now_us)
        rig.tick()


def calls_of_work(call: str) -> int:
    """How often the undisturbed work makes a call, opening included."""
    disk = SimDisk()
    work(Rig(simulated(disk)))
    return sum(made == call for made, _ in disk.calls)


def test_the_work_makes_every_kind_of_call() -> None:
    disk = SimDisk()
    rig = Rig(simulated(disk))
    work(rig)
    assert rig.confirmed == rig.sent
    files = {(call, "".join(c for c in name if not c.isdigit())) for call, name in disk.calls}
    for kind in (".seg", "snapshot-.tmp", "..seg.tmp"):
        assert {("create", kind), ("write", kind), ("sync", kind)} <= files, kind
    assert {("rename", "spare-"), ("rename", "snapshot-.tmp"), ("rename", "..seg.tmp")} <= files


# --- no room ------------------------------------------------------------------------------------------


def accepts(rig: Rig, count: int) -> bool:
    try:
        rig.append(count)
    except DiskFull:
        return False
    rig.turn()
    return True


def fill(rig: Rig) -> None:
    """Append until there is no room even for a single message."""
    for count in (3, 1):
        while accepts(rig, count):
            assert len(rig.sent) < 100_000, "the disk is never full"
    with pytest.raises(DiskFull, match="no room for"):
        rig.append(1)


def refuses_and_goes_on(rig: Rig, make_room: Callable[[], None]) -> None:
    """What must hold for a full disk, simulated or not."""
    rig.append(1, queue="mails")
    rig.turn()
    fill(rig)
    accepted = len(rig.sent)
    for _ in range(3):
        with pytest.raises(DiskFull):
            rig.append(3)
        with pytest.raises(DiskFull):
            rig.transact("refused")
        rig.tick()
    assert len(rig.sent) == accepted
    # Deliveries and settlements go on, and the settlements are written: the reserve is for them.
    assert len(rig.consume(5)) == 5
    rig.turn()
    assert rig.engine.describe("orders").held == 0
    assert not rig.errors
    # Nothing that was accepted is lost, and what was refused is not there.
    make_room()
    rig.tick()
    rig.tick()
    assert not rig.engine.full
    assert not rig.waiting, "everything that was accepted has its receipt by now"
    rig.append(3)
    rig.transact("accepted")
    rig.turn()
    assert not rig.waiting
    assert rig.confirmed == rig.sent


def test_a_full_disk_refuses_new_messages_and_nothing_else() -> None:
    disk = SimDisk(capacity_bytes=20_000)

    def make_room() -> None:
        disk.capacity_bytes = 40_000

    rig = Rig(simulated(disk))
    refuses_and_goes_on(rig, make_room)
    after = reopened(rig, disk.crash(random.Random(1)))
    found = after.drain()
    assert found == rig.sent - rig.settled, "nothing lost, nothing invented, nothing settled is back"


def test_who_was_refused_is_not_overtaken_by_what_is_smaller() -> None:
    """Room for a few bytes more says nothing: the disk is full until there is room for a segment."""
    settings = LogSettings(segment_bytes=16 * 1024, cache_bytes=0, snapshot_blocks=1000)
    disk = SimDisk(capacity_bytes=16 * 16 * 1024)
    rig = Rig(simulated(disk, settings))
    while accepts(rig, 40):
        assert len(rig.sent) < 100_000, "the disk is never full"
    for _ in range(3):
        assert rig.engine.full
        with pytest.raises(DiskFull):
            rig.append(1)
        rig.tick()
    disk.capacity_bytes = 18 * 16 * 1024
    rig.tick()
    assert not rig.engine.full
    rig.append(1)


def test_settlements_of_a_full_disk_are_safe() -> None:
    """They fit into the reserve, so a power cut does not bring back what was acknowledged; and the log
    can be opened again without any room but what is left of that."""
    settings = LogSettings(segment_bytes=16 * 1024, cache_bytes=0, snapshot_blocks=1000)
    disk = SimDisk(capacity_bytes=5 * 16 * 1024)
    rig = Rig(simulated(disk, settings))
    fill(rig)
    assert len(rig.consume(5)) == 5
    rig.turn()
    disk = disk.crash(random.Random(2))
    rig = reopened(rig, disk)
    assert len(rig.consume(5)) == 5
    rig.turn()
    disk = disk.crash(random.Random(3))
    assert reopened(rig, disk).drain() == rig.sent - rig.settled


def test_settlements_wait_when_even_the_reserve_is_used_up() -> None:
    disk = SimDisk(capacity_bytes=20_000)
    rig = Rig(simulated(disk))
    fill(rig)
    # Singly and out of order, so that they cannot be joined to runs.
    slices = rig.engine.take("orders", "ann", 1000, rig.now_us, bytes_max=1 << 20)
    offsets = [offset for piece in slices for offset in range(piece.offset_start, piece.offset_end)]
    for offset in offsets[::2] + offsets[1::2]:
        rig.engine.settle("orders", "ann", Outcome.ACK, [(offset, offset + 1)], rig.now_us)
        rig.turn()
    rig.settled = {payload for piece in slices for payload in piece.messages()}
    with pytest.raises(DiskFull):
        rig.append(1)
    assert rig.engine.describe("orders").ready == 0
    disk.capacity_bytes = 60_000
    for _ in range(3):
        rig.tick()
    assert not rig.engine.full
    rig.append(1)
    rig.turn()
    after = reopened(rig, disk.crash(random.Random(3)))
    assert after.drain() == rig.sent - rig.settled


def test_what_waits_for_room_is_not_confirmed() -> None:
    """Whoever asks whether all is durable is told so when the settlements are written, not before."""
    disk = SimDisk(capacity_bytes=20_000)
    rig = Rig(simulated(disk))
    fill(rig)
    slices = rig.engine.take("orders", "ann", 1000, rig.now_us, bytes_max=1 << 20)
    offsets = [offset for piece in slices for offset in range(piece.offset_start, piece.offset_end)]
    told: list[LogFailed | None] = []
    for offset in offsets[::2] + offsets[1::2]:
        rig.engine.settle("orders", "ann", Outcome.ACK, [(offset, offset + 1)], rig.now_us)
        rig.engine.confirm(rig.now_us, told.append)
        rig.turn()
    assert len(told) < len(offsets)
    disk.capacity_bytes = 60_000
    for _ in range(3):
        rig.tick()
    assert told == [None] * len(offsets)
    assert not reopened(rig, disk.crash(random.Random(3))).drain()


def test_trimming_makes_room() -> None:
    settings = LogSettings(segment_bytes=16 * 1024, cache_bytes=0, snapshot_blocks=1000)
    disk = SimDisk(capacity_bytes=5 * 16 * 1024 + 4000)
    rig = Rig(simulated(disk, settings))
    fill(rig)
    while rig.consume(1000):
        rig.turn()
    for _ in range(3):
        rig.engine.trim(rig.now_us)
        rig.tick()
    rig.append(3)
    rig.turn()
    assert rig.confirmed == rig.sent


def test_a_log_is_not_opened_without_room_for_its_next_segment() -> None:
    disk = SimDisk()
    rig = Rig(simulated(disk))
    rig.append(3)
    rig.turn()
    after = disk.kill()
    after.capacity_bytes = 0
    with pytest.raises(LogRefused, match="no room"):
        simulated(after)(START_US)
    after.capacity_bytes = None
    reopened(rig, after).assert_nothing_lost()


@pytest.mark.parametrize(
    ("call", "error"),
    [*((call, errno.ENOSPC) for call in ROOM_CALLS), ("create", errno.EMFILE), ("open", errno.EMFILE)],
)
def test_no_room_at_any_call_loses_nothing(call: str, error: int) -> None:
    """The nth call finds no room, and the ones after it do: a moment later everything is as it should be."""
    for nth in range(1, calls_of_work("create" if call == "open" else call) + 1):
        disk = SimDisk()
        rig = Rig(simulated(disk))
        disk.fail(call, nth, error)
        refused = 0
        for turn in range(TURNS):
            try:
                rig.append(3)
                rig.append(1, queue="mails")
                rig.transact(f"key-{turn}")
            except DiskFull:
                refused += 1
            rig.turn()
            rig.consume(2)
            rig.turn()
            rig.engine.trim(rig.now_us)
            rig.tick()
        rig.tick()
        context = f"{call} {nth}"
        assert rig.engine.failed is None, context
        assert not rig.engine.full, context
        assert not rig.waiting, context
        assert rig.confirmed == rig.sent, context
        assert refused < TURNS // 2, context
        after = reopened(rig, disk.crash(random.Random(SEED + nth)))
        assert after.drain() == rig.sent - rig.settled, context


# --- a disk that fails --------------------------------------------------------------------------------------


def assert_final(rig: Rig, disk: SimDisk, context: str) -> None:
    """What must hold once the log has failed."""
    engine = rig.engine
    assert isinstance(engine.failed, LogFailed), context
    assert "start the broker again" in str(engine.failed), context
    assert not rig.waiting, f"{context}: nobody shall wait for ever"
    assert all(error is engine.failed for error in rig.errors), context
    confirmed, calls = set(rig.confirmed), len(disk.calls)
    for use in (
        lambda: rig.append(1),
        lambda: rig.transact("more"),
        lambda: engine.take("orders", "ann", 1, rig.now_us),
        lambda: engine.settle("orders", "ann", Outcome.ACK, [(0, 1)], rig.now_us),
        lambda: engine.give_back("orders", "ann", rig.now_us),
        lambda: engine.expire(rig.now_us),
        lambda: engine.trim(rig.now_us),
    ):
        with pytest.raises(LogFailed):
            use()
    rig.turn()
    rig.tick()
    engine.close(rig.now_us)
    assert rig.confirmed == confirmed, context
    assert len(disk.calls) == calls, f"{context}: {disk.calls[calls:]} after the failure"


def syncs_after_failure(disk: SimDisk, failed_at: int) -> list[tuple[str, str]]:
    return [call for call in disk.calls[failed_at + 1 :] if call[0] in ("sync", "sync_names")]


@pytest.mark.parametrize(("call", "error"), FINAL)
def test_a_failure_at_any_call_is_final(call: str, error: int) -> None:
    failures = 0
    for nth in range(1, calls_of_work(call) + 1):
        disk = SimDisk()
        disk.fail(call, nth, error)
        context = f"{call} {nth}"
        try:
            rig = Rig(simulated(disk))
        except (LogFailed, LogRefused):
            # It was not even opened: there is nothing to lose, and the next start works.
            Rig(simulated(disk.kill())).append(1)
            continue
        try:
            work(rig)
        except LogFailed:
            failures += 1
        failed_at = [i for i, made in enumerate(disk.calls) if made[0] == call][nth - 1]
        if rig.engine.failed is None:
            file = disk.calls[failed_at][1]
            assert (call, error) == ("sync", errno.ENOSPC), f"{context}: the failure went by unseen"
            assert file.endswith(".tmp") or file.startswith("spare-"), context
            continue
        assert not syncs_after_failure(disk, failed_at), f"{context}: a sync after the failure"
        assert_final(rig, disk, context)
        for left in (disk.copy(), disk.crash(random.Random(SEED + nth))):
            reopened(rig, left).assert_nothing_lost()
    assert failures, f"{call} never failed while the log was open"


def test_open_receipts_get_the_error() -> None:
    disk = SimDisk()
    rig = Rig(simulated(disk))
    rig.append(3)
    rig.turn()
    disk.fail("sync", 1, errno.EIO)
    rig.append(2)
    rig.engine.flush(rig.now_us)  # on its way
    rig.append(2)  # gathers for the next group
    rig.transact("later")
    rig.append(1, queue="mails")  # not even in a block
    rig.engine.wait()
    assert len(rig.errors) == 4
    assert len(rig.confirmed) == 3
    assert_final(rig, disk, "sync")


def test_who_commits_hears_that_the_loop_could_not_write_it() -> None:
    """The log has failed in the middle of the call, and nothing comes behind it that could tell."""
    disk = SimDisk()
    rig = Rig(simulated(disk, LogSettings()))
    rig.append(1)
    rig.engine.take("orders", "ann", 1, rig.now_us)
    rig.engine.settle("orders", "ann", Outcome.REJECT, [(0, 1)], rig.now_us)
    repairs, staged, told = Batch.of([b"repaired"]), list[StageInfo | LogError](), list[object]()
    repairs.repairs = array("q", [0])
    rig.engine.stage("key", [("orders", repairs)], rig.now_us, staged.append)
    rig.turn()
    assert isinstance(staged[0], StageInfo)
    disk.fail("write", 1, errno.EIO)
    rig.engine.commit("key", [staged[0].stage], rig.now_us, told.append)
    assert isinstance(rig.engine.failed, LogFailed)
    assert told == [rig.engine.failed]


class Short(SimDisk):
    """A disk whose next write finds no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.is_short = False

    def enter(self, call: str, name: str) -> int:
        if call == "write" and self.is_short:
            self.is_short = False
            raise MemoryError
        return super().enter(call, name)


def test_no_block_is_missing_among_others_for_lack_of_memory() -> None:
    """Whatever keeps the loop from writing one: what came behind it would be lost with it by a crash."""
    disk = Short()
    rig = Rig(simulated(disk, LogSettings()))
    rig.append(1)
    rig.turn()
    disk.is_short = True
    rig.append(1)
    rig.turn()
    assert_final(rig, disk, "write")
    assert "MemoryError" in str(rig.engine.failed)


@interpreted_only  # Compiled callers do not look the function up.
def test_no_batch_is_missing_among_others_for_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its offsets when it is accepted: what comes behind it would be stored under these."""
    disk = SimDisk()
    rig = Rig(simulated(disk))
    rig.append(1)
    rig.turn()
    rig.append(2)
    with monkeypatch.context() as patched:
        patched.setattr(sealer, "join_batches", no_memory)
        with pytest.raises(LogFailed):
            rig.engine.flush(rig.now_us)
    rig.turn()
    assert_final(rig, disk, "join")


@interpreted_only  # Compiled callers do not look the function up.
def test_no_part_of_a_transaction_is_missing_for_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimDisk()
    rig = Rig(simulated(disk))
    rig.append(1)
    rig.turn()
    calls = iter((join_batches, no_memory))
    with monkeypatch.context() as patched:
        patched.setattr(transactions, "join_batches", lambda *batches: next(calls)(*batches))
        with pytest.raises(LogFailed):
            rig.transact("key")
    assert_final(rig, disk, "join")


@interpreted_only  # Compiled callers do not look the function up.
def test_no_stage_waits_for_ever_behind_one_that_found_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows have their numbers, and whoever comes behind it is told, too."""
    disk = SimDisk()
    rig = Rig(simulated(disk, replace(SETTINGS, stage_group_bytes=1)))
    came: list[StageInfo | LogError] = []
    calls = iter((join_batches, no_memory))
    with monkeypatch.context() as patched:
        patched.setattr(staging, "join_batches", lambda *batches: next(calls)(*batches))
        for key in ("first", "second"):
            rig.engine.stage(key, [("orders", Batch.of([b"1"]))] * 2, rig.now_us, came.append)
        rig.turn()
    assert [type(it) for it in came] == [LogFailed] * 2
    assert_final(rig, disk, "join")


@interpreted_only  # Compiled callers do not look the method up.
def test_no_settlement_is_missing_among_others_for_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its events have their numbers: what comes behind it would leave a hole in them."""
    disk = SimDisk()
    rig = Rig(simulated(disk))
    rig.append(2)
    rig.turn()
    rig.consume(1)
    with monkeypatch.context() as patched:
        patched.setattr(sealer.SealedBlock, "__init__", no_memory)
        with pytest.raises(LogFailed):
            rig.engine.flush(rig.now_us)
    assert_final(rig, disk, "settlement")


def no_memory(*_: object, **__: object) -> None:
    raise MemoryError


def test_queues_that_do_not_wait_for_syncs_hear_of_a_failure() -> None:
    """Their receipts were given before; what comes after the failure is refused."""
    disk = SimDisk()
    policies = Policies({"fast": {"durability": "interval"}})
    engine = Log.open(
        disk, START_US, settings=SETTINGS, policies=policies, writer=InlineWorker(), keeper=InlineWorker()
    )
    results: list[Stored | LogError] = []
    engine.append("fast", Batch.of([b"1"]), START_US, results.append)
    engine.flush(START_US)
    engine.wait()
    assert isinstance(results[0], Stored)
    disk.fail("sync", 1, errno.EIO)
    engine.append("fast", Batch.of([b"2"]), START_US, results.append)
    engine.tick(START_US + 10_000_000)
    engine.append("fast", Batch.of([b"3"]), START_US, results.append)
    engine.wait()
    assert isinstance(results[-1], LogFailed)
    with pytest.raises(LogFailed):
        engine.append("fast", Batch.of([b"4"]), START_US)


# --- a real disk --------------------------------------------------------------------------------------


@contextmanager
def small_file_system(folder: Path) -> Iterator[Path | None]:
    """4 MiB of tmpfs, where that can be had; None where it cannot."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_real_file_system_without_room(tmp_path: Path) -> None:
    """The same on a real file system of 4 MiB, where root may mount one; on the simulated one otherwise."""
    with small_file_system(tmp_path / "small") as folder:
        if folder is None:
            test_a_full_disk_refuses_new_messages_and_nothing_else()
            return
        ballast = folder / "ballast"
        ballast.write_bytes(bytes(3 * 1024 * 1024))
        data = str(folder / "data")
        settings = LogSettings(segment_bytes=64 * 1024, cache_bytes=0, block_bytes=4096)
        rig = Rig(lambda now_us: open_log(data, now_us, settings=settings, policies=POLICIES))
        try:
            refuses_and_goes_on(rig, ballast.unlink)
        finally:
            rig.engine.abandon()
        rig.reopen()
        try:
            assert rig.drain() == rig.sent - rig.settled
            assert not rig.engine.damage
        finally:
            rig.engine.close(rig.now_us)


def test_a_watermark_for_which_there_is_no_room_is_an_error(tmp_path: Path) -> None:
    """A store into a map of a file that has no room of its own ends the process, so that a child tries it."""
    with small_file_system(tmp_path / "small") as folder:
        path = (folder or tmp_path) / "watermark"
        path.touch()
        if folder is not None:
            with suppress(OSError), open(folder / "ballast", "wb", buffering=0) as ballast:
                while True:
                    ballast.write(bytes(4096))
        store = (
            f"from {Watermark.__module__} import Watermark; Watermark({str(path)!r}, writable=True).set(1)"
        )
        done = subprocess.run([sys.executable, "-c", store], capture_output=True, check=False)
        assert done.returncode == (0 if folder is None else 1), done
        assert (b"No space left" in done.stderr) == (folder is not None)


# --- room that the log makes itself ------------------------------------------------------------------


class Stalled(Rig):
    """A log whose last group waits for room, though some of its segments could go."""

    def __init__(
        self, disk: SimDisk, retention_seconds: int, free_bytes: int, *, staged: bool = False
    ) -> None:
        self.disk = disk
        self.writer, self.keeper = InlineWorker(), InlineWorker()
        policies = Policies({"*": {"retention-seconds": retention_seconds}})
        settings = LogSettings(segment_bytes=8192, cache_bytes=0, block_bytes=500, snapshot_blocks=1000)

        def opener(now_us: int) -> Log:
            self.writer, self.keeper = InlineWorker(), InlineWorker()
            return Log.open(
                self.disk,
                now_us,
                settings=settings,
                policies=policies,
                writer=self.writer,
                keeper=self.keeper,
            )

        super().__init__(opener)
        if staged:
            self.engine.stage("key", [("orders", Batch.of([b"staged"]))], self.now_us, no_receipt)
        for _ in range(12):
            self.append(20)
            self.consume(20)
            self.turn()
        self.append(40)
        self.turn()
        self.tick()
        committer = self.engine._committer
        # Somebody else fills the disk between a message that was accepted and its segment.
        while committer._stalled is None:
            self.disk.capacity_bytes = None
            self.append(8)
            self.disk.capacity_bytes = self.disk.used_bytes + free_bytes
            self.engine.flush(self.now_us)
            self.writer.wait()
        assert self.engine.full

    def try_for(self, seconds: int) -> None:
        for _ in range(seconds):
            self.engine.trim(self.now_us)
            self.tick()


def test_a_full_disk_frees_itself() -> None:
    """What retention takes away needs no sync but those that have been: the one that waits for room would
    wait for ever."""
    rig = Stalled(SimDisk(), retention_seconds=3600, free_bytes=100)
    rig.consume(10)
    rig.try_for(60)
    with pytest.raises(DiskFull):
        rig.append(1)
    rig.now_us += 3600 * 1_000_000
    rig.try_for(10)
    assert not rig.engine.full
    rig.append(3)
    rig.turn()
    assert not rig.waiting
    after = rig.disk.crash(random.Random(1))
    after.capacity_bytes = None
    rig.disk = after
    rig.reopen()
    assert rig.drain() == rig.sent - rig.settled


def test_what_is_read_while_the_last_group_waits_for_room_is_not_kept() -> None:
    """Blocks that are not in the files cannot be let go of, and they are the oldest in the cache."""
    disk = SimDisk()
    rig = Rig(simulated(disk, LogSettings(segment_bytes=8192, cache_bytes=2000, block_bytes=500)))
    staged: list[StageInfo | LogError] = []
    for number in range(40):
        rig.append(8)
        rig.engine.stage(f"{number}", [("staged", Batch.of([b"x"]))], rig.now_us, staged.append)
        rig.turn()
    for number, stage in enumerate(staged):
        assert isinstance(stage, StageInfo)
        if number == 39:
            rig.append(200)
        rig.engine.commit(f"{number}", [stage.stage], rig.now_us)
        if number == 39:
            disk.capacity_bytes = disk.used_bytes
        rig.turn()
    committer, segments = rig.engine._committer, rig.engine._state.segments
    assert committer._stalled is not None
    kept_bytes, kept = segments._cached_bytes, len(segments._adoptions)
    for _ in range(40):
        assert len(rig.consume(8)) == 8
        assert len(rig.consume(1, "staged")) == 1
        assert segments._cached_bytes < kept_bytes + 5000
        assert len(segments._adoptions) <= kept


@pytest.mark.parametrize("end", ["nobody commits it", "aborted", "commit refused"])
def test_a_stage_that_ends_while_the_disk_is_full_does_not_keep_it_so(end: str) -> None:
    """That it is over cannot be synced before there is room, and only its own rows have to wait for that."""
    rig = Stalled(SimDisk(), retention_seconds=7200, free_bytes=100, staged=True)
    (stage,) = rig.engine.stages("key")
    if end == "aborted":
        rig.engine.abort("key", rig.now_us)
    elif end == "commit refused":
        with pytest.raises(DiskFull):
            rig.engine.commit("key", [stage.stage], rig.now_us)
    for _ in range(2):
        rig.now_us += 3600 * 1_000_000
        rig.try_for(10)
    assert not rig.engine.full
    assert not rig.engine.stages("key")
    rig.append(3)
    rig.turn()
    assert not rig.waiting
    rig.disk = rig.disk.crash(random.Random(1))
    rig.disk.capacity_bytes = None
    rig.reopen()
    rig.assert_nothing_lost()


def test_a_round_of_trimming_that_had_begun_before_the_disk_was_full_does_not_stop_the_next() -> None:
    rig = Stalled(SimDisk(), retention_seconds=3600, free_bytes=100)
    rig.now_us += 3600 * 1_000_000
    rig.engine._trimmer._awaits_sync = rig.engine._trimmer._busy = True  # as by a sync that has not come
    rig.try_for(10)
    assert not rig.engine.full


def test_room_for_a_part_of_a_segment_is_used() -> None:
    rig = Stalled(SimDisk(), retention_seconds=10**9, free_bytes=4000)
    rig.consume(10)
    for _ in range(6):
        rig.tick()
    assert not rig.waiting
    assert rig.engine._committer.idle
    with pytest.raises(DiskFull):
        rig.append(50)


@pytest.mark.parametrize("free_bytes", [100, 4000])
def test_what_is_settled_while_the_disk_is_full_survives_an_orderly_close(free_bytes: int) -> None:
    """By a smaller segment, or by what retention lets go of in the last moment."""
    retention_seconds = 10**9 if free_bytes == 4000 else 0
    rig = Stalled(SimDisk(), retention_seconds, free_bytes)
    for _ in range(4):
        assert rig.consume(10)
        rig.engine.flush(rig.now_us)
    rig.engine.close(rig.now_us)
    rig.disk = rig.disk.crash(random.Random(4))
    rig.disk.capacity_bytes = None
    rig.reopen()
    assert rig.drain() == rig.sent - rig.settled


def test_settlements_that_wait_get_a_small_file_where_there_is_one() -> None:
    """The reserve is used up, there is no room for a segment, but for what has to be written down."""
    settings = LogSettings(segment_bytes=16 * 1024, cache_bytes=0, snapshot_blocks=1000)
    disk = SimDisk(capacity_bytes=4 * 16 * 1024)
    rig = Rig(simulated(disk, settings))
    fill(rig)
    disk.capacity_bytes = disk.used_bytes + 8000
    slices = rig.engine.take("orders", "ann", 1000, rig.now_us, bytes_max=1 << 20)
    offsets = [offset for piece in slices for offset in range(piece.offset_start, piece.offset_end)]
    settled: set[int] = set()
    while rig.engine._committer.active.limit == settings.segment_bytes:  # what was kept for them is used up
        offset = offsets[len(settled) * 3]
        rig.engine.settle("orders", "ann", Outcome.ACK, [(offset, offset + 1)], rig.now_us)
        settled.add(offset)
        rig.tick()
    rig.tick()
    left = [
        p
        for piece in slices
        for o, p in zip(range(piece.offset_start, 1 << 40), piece.messages(), strict=False)
        if o not in settled
    ]
    after = reopened(rig, disk.crash(random.Random(3)))
    assert after.drain() == set(left)


@pytest.mark.parametrize("attributes", [False, True])
def test_room_is_asked_for_by_what_is_written_and_for_a_whole_turn(attributes: bool) -> None:
    """Empty messages take room too, and so do those that came a moment before: what is accepted fits."""
    settings = LogSettings(segment_bytes=16 * 1024, cache_bytes=0, snapshot_blocks=1000)
    disk = SimDisk(capacity_bytes=3 * 16 * 1024)
    rig = Rig(simulated(disk, settings))
    while accepts(rig, 40):
        assert len(rig.sent) < 100_000, "the disk is never full"
    batch = Batch.of(
        [b""] * 20,
        ttl_seconds=[60] * 20 if attributes else None,
        retries=[3] * 20 if attributes else None,
        reply=[b"%050d" % i for i in range(20)] if attributes else None,
        protocol="rq",
    )
    accepted = 0
    for turn in range(40):
        with suppress(DiskFull):
            for i in range(100):
                rig.engine.append(f"queue-{(turn + i) % 3}", batch, rig.now_us)
                accepted += 1
        rig.turn()
        assert rig.engine._committer._stalled is None, f"{accepted} batches"
    assert accepted
    fill(rig)
    assert rig.engine._committer._stalled is None


def test_there_is_no_room_for_a_stage_either() -> None:
    settings = LogSettings(segment_bytes=16 * 1024, cache_bytes=0, snapshot_blocks=1000)
    rig = Rig(simulated(SimDisk(capacity_bytes=4 * 16 * 1024), settings))
    fill(rig)
    with pytest.raises(DiskFull, match="no room for"):
        rig.engine.stage("key", [("orders", Batch.of([b"x" * 100]))], rig.now_us, lambda result: None)
    assert rig.engine.stages_count == 0


def test_room_for_a_stage_that_is_on_its_way_is_nobody_else_s() -> None:
    """It is written piece by piece, and whoever sends meanwhile does not take what was found for it."""
    segment_bytes = 16 * 1024
    settings = LogSettings(
        segment_bytes, cache_bytes=0, block_bytes=2000, snapshot_blocks=1000, stage_group_bytes=1000
    )
    disk = SimDisk(capacity_bytes=12 * segment_bytes)
    writer, keeper = InlineWorker(), InlineWorker()
    rig = Rig(lambda now_us: Log.open(disk, now_us, settings=settings, writer=writer, keeper=keeper))
    came: list[object] = []
    rig.engine.stage("key", [("orders", Batch.of([b"x" * 100] * 600))], rig.now_us, came.append)
    while not came:
        with suppress(DiskFull):
            for _ in range(9):
                rig.append(9)
        rig.now_us += 1000
        rig.engine.flush(rig.now_us)
        assert writer.step()
        rig.engine.poll()
        keeper.wait()
        assert rig.engine._committer._stalled is None
    assert (isinstance(came[0], StageInfo), rig.engine._committer.promised_bytes) == (True, 0)
    fill(rig)
    assert rig.consume(10)
    rig.turn()
    assert rig.engine._committer._stalled is None


@pytest.mark.parametrize("seed", range(8))
def test_whatever_has_filled_the_disk_it_frees_itself_when_all_is_settled(seed: int) -> None:
    """Batches of all sizes, consumers that are slow at times, a clock that steps; nobody else makes room."""
    rng = random.Random(seed)
    segment_bytes = rng.choice((16, 64)) * 1024
    settings = LogSettings(
        segment_bytes, cache_bytes=0, block_bytes=500, snapshot_blocks=rng.choice((6, 1000))
    )
    disk = SimDisk(
        capacity_bytes=rng.randint(8, 12) * segment_bytes + rng.randint(segment_bytes // 4, segment_bytes)
    )
    rig = Rig(simulated(disk, settings))
    refused = 0
    for _ in range(300):
        rig.now_us += rng.choice((1000, 1_000_000, 3_000_000, -2_000_000))
        for _ in range(rng.randint(1, 4)):
            try:
                rig.append(
                    rng.choice((1, 3, 20, segment_bytes // 100)), queue=rng.choice(("orders", "mails"))
                )
            except DiskFull:
                refused += 1
        if rng.random() < (0.9 if refused % 40 > 30 else 0.2):
            rig.consume(rng.choice((1, 10, 1000)), queue=rng.choice(("orders", "mails")))
        rng.choice((rig.turn, rig.tick))()
        if rng.random() < 0.3:
            rig.engine.trim(rig.now_us)
    assert refused, "the disk was never full"
    rig.now_us = START_US + 10_000 * 1_000_000
    for _ in range(20):
        for queue in ("orders", "mails"):
            while rig.consume(1000, queue=queue):
                rig.turn()
        rig.engine.trim(rig.now_us)
        rig.tick()
    assert not rig.engine.full, f"seed {seed}"
    rig.append(3)
    rig.turn()
    assert not rig.waiting
    found = reopened(rig, disk.crash(rng)).drain()
    assert rig.confirmed - rig.settled <= found <= rig.sent


class Shared(SimDisk):
    """A large disk, of which others have nearly all."""

    def total_bytes(self) -> int:
        return 1 << 40


@pytest.mark.parametrize("snapshot_blocks", [6, 1000])
@pytest.mark.parametrize("tenths", [12, 31, 40, 49])
def test_a_disk_that_others_have_filled_is_not_full_for_ever(tenths: int, snapshot_blocks: int) -> None:
    """Every message is settled at once: what the log needs is the same after a thousand of them."""
    segment_bytes = 64 * 1024
    settings = LogSettings(segment_bytes, cache_bytes=0, snapshot_blocks=snapshot_blocks)
    rig = Rig(simulated(Shared(capacity_bytes=tenths * segment_bytes // 10), settings))
    for _ in range(1000):
        rig.append(3)
        rig.turn()
        assert len(rig.consume(3)) == 3
        rig.turn()
        rig.engine.trim(rig.now_us)
        rig.tick()
    assert rig.engine.position > 5 * segment_bytes


class Silent(SimDisk):
    """A file system that does not say how large it is, as some in memory and in user space."""

    _creates = False

    def free_bytes(self) -> int:
        return super().free_bytes() if self._creates else 0

    def total_bytes(self) -> int:
        return 0

    def create(self, name: str, size: int) -> SimFile:
        self._creates = True
        try:
            return super().create(name, size)
        finally:
            self._creates = False


def test_a_disk_that_does_not_say_how_large_it_is_is_tried() -> None:
    disk = Silent()
    rig = Rig(simulated(disk))
    for _ in range(30):
        rig.append(3)
        rig.turn()
    assert rig.confirmed == rig.sent
    assert not rig.engine.full
    sizes = [len(content) for name, content in disk.files().items() if name.endswith(".seg")]
    assert max(sizes) == SETTINGS.segment_bytes


class WithoutSnapshots(SimDisk):
    """There is no room for a snapshot, at times."""

    refuses = False

    def create(self, name: str, size: int) -> SimFile:
        if self.refuses and name.startswith("snapshot-"):
            raise OSError(errno.ENOSPC, "no room")
        return super().create(name, size)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_snapshot_that_found_no_room_is_written_later_and_once(goes_on: bool) -> None:
    """Two of the same position would let retention go by one that lies before what it removes."""
    disk = WithoutSnapshots()
    rig = Rig(simulated(disk))
    rig.append(3)
    rig.turn()
    (before, *_) = rig.engine._snapshotter.positions
    disk.refuses = True
    for _ in range(2 * SETTINGS.snapshot_blocks):
        rig.append(1)
        rig.turn()
    assert rig.engine._snapshotter.positions[0] == before
    disk.refuses = False
    while goes_on and rig.engine._snapshotter.positions[0] < rig.engine.position:
        assert len(rig.sent) < 100, "no snapshot comes"
        rig.append(1)
        rig.turn()
    for _ in range(3):
        rig.engine.trim(rig.now_us)
        rig.turn()
    newest, older = rig.engine._snapshotter.positions
    assert newest > older >= before
    assert disk.files().keys() >= {f"snapshot-{newest:020d}", f"snapshot-{older:020d}"}
