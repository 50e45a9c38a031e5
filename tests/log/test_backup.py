"""A backup is whole or none, and a restore gives back what was there: at any cut, and at any time.

The log that is backed up is a real one at random work (`folders.py`), with retention, compaction, stages and
repairs. Where the power is cut, in the middle of a backup or of a restore, the folder is a simulated disk
(`simdisk.py`).
"""

import os
import random
import shutil
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.log.backup import restoring
from penstock.log.backup import store as store_module
from penstock.log.backup.listing import Listed, Listing, list_files
from penstock.log.backup.restoring import begin, fill, finish, plan
from penstock.log.backup.store import BackupError, Store, digest, put_file
from penstock.log.backup.taking import Taken, take
from penstock.log.compare import differences
from penstock.log.disk import RESTORING, Disk, RealDisk
from penstock.log.errors import LogError, LogRefused
from penstock.log.inspect import inspect_log
from penstock.log.log import Log, open_log
from penstock.log.overlay import replayed
from penstock.log.reader import LogReader
from penstock.log.state import LogState
from tests.log.folders import POLICIES, SETTINGS, Worker
from tests.log.inline import InlineWorker
from tests.log.simdisk import PowerCut, SimDisk
from tests.seeds import SEED, SEEDED

FIRST = int(SEED or 1)
BRIEF = ("brief", "lazy", "short")
"""Queues of which nothing is kept for long, so that segments are compacted and removed."""


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody cuts the power of this machine: where a power cut counts, the disk is a simulated one."""
    for call in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, call, lambda fd: None)


@dataclass
class Source:
    """A broker's log, by its folder."""

    worker: Worker
    between: list[str] = field(default_factory=list)  # files that were asked for and had gone

    def listing(self) -> Listing:
        path = str(self.worker.folder)
        end, files = list_files(path)
        with LogReader(path) as reader:
            return Listing(reader.log, self.worker.now_us, end, files)

    def listings(self) -> list[Listing]:
        return [self.listing()]

    def read(self, listing: Listing, file: Listed) -> Generator[bytes, None, None]:
        try:
            content = (self.worker.folder / file.name).read_bytes()
        except FileNotFoundError:
            self.between.append(file.name)
            raise
        yield content[: file.bytes]


class Busy(Source):
    """One that goes on with its work while it is copied."""

    def read(self, listing: Listing, file: Listed) -> Generator[bytes, None, None]:
        for _ in range(3):
            self.worker.turn()
        self.worker.settle_down()
        self.worker.engine.trim(self.worker.now_us)
        self.worker.engine.wait()
        yield from super().read(listing, file)


def content_of(folder: Path) -> dict[tuple[str, int], bytes]:
    """Every message that can be read, by queue and offset."""
    found: dict[tuple[str, int], bytes] = {}
    with LogReader(str(folder)) as reader:
        for name in reader.queues():
            for block in reader.messages(name, 0, fail_on_loss=False):
                first = block.header.first_offset + block.lo
                found |= {(name, first + at): body for at, body in enumerate(block.messages())}
    return found


def check_same(restored: Path, then: LogState, sent: dict[tuple[str, int], bytes]) -> None:
    """A restored log is what was there, with another number; and every message in it can be had."""
    assert inspect_log(str(restored)).defects == []
    found, _ = replayed(str(restored))
    assert found.log != then.log
    assert found.opening > then.opening
    found.log, found.opening = then.log, then.opening
    assert list(differences(found, then)) == []
    for key, body in content_of(restored).items():
        assert sent[key] == body, key
    now_us = max(found.segments.all[-1].time_max_us, 0)
    log = open_log(str(restored), now_us, settings=SETTINGS, policies=POLICIES)
    try:
        assert list(log.damage) == []
        for name in log.queues():
            for dead in (False, True):
                while pieces := log.take(name, "ann", 1000, now_us, dead=dead):
                    assert all(piece.offset_end > piece.offset_start for piece in pieces)
    finally:
        log.abandon()


def restored(store: Store, folder: Path, at_us: int | None = None) -> Path:
    disk = RealDisk(str(folder))
    disk.lock()
    try:
        fill(store, plan(store, at_us), disk, 1)
        finish(disk)
    finally:
        disk.unlock()
    return folder


# --- what comes back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 2))
def test_any_time_that_is_covered_comes_back(tmp_path: Path, seed: int) -> None:
    """Backups now and then, of a log that is trimmed and compacted: each moment of its life is there again,
    or it is said that it is not; the moments of the backups always are."""
    rng = random.Random(seed)
    worker = Worker(tmp_path / "data", seed)
    store = Store(SimDisk())
    source = Source(worker)
    moments: list[tuple[int, LogState]] = []
    sent: dict[tuple[str, int], bytes] = {}
    ends: list[int] = []
    for turn in range(100):
        worker.turn()
        worker.engine.wait()
        if turn % 10 == 0:
            worker.settle_down()
        worker.engine.confirm(worker.now_us, lambda error: None)
        worker.engine.wait()
        sent |= content_of(worker.folder)
        moments.append((worker.now_us, replayed(str(worker.folder))[0]))
        if rng.random() < 0.1 or turn == 99:
            take(store, source)
            ends.append(worker.now_us)
        worker.now_us += 1
    worker.engine.abandon()
    assert not store.unreadable
    back = 0
    chosen = moments if SEEDED else [it for it in moments if it[0] in ends or rng.random() < 0.15]
    for at_us, then in chosen:
        target = tmp_path / f"at-{at_us}"
        try:
            restored(store, target, at_us)
        except BackupError:
            assert at_us not in ends
            continue
        check_same(target, then, sent)
        shutil.rmtree(target)
        back += 1
    assert back == len(chosen) or SEEDED  # Of other seeds, a segment may have nothing that is kept.
    check_same(restored(store, tmp_path / "last"), moments[-1][1], sent)


@pytest.mark.parametrize(("seed", "last", "trims_until", "by_snapshot"), [(1, 75, 75, 0), (2, 90, 50, 1)])
def test_times_between_two_backups_where_segments_went_in_between(
    tmp_path: Path, seed: int, last: int, trims_until: int, by_snapshot: int
) -> None:
    """The first backup has the beginning of a segment, which is gone when the second one comes. Snapshots
    name it as it was, and it is not taken for all of it; one that names only what is there takes back to its
    time."""
    worker = Worker(tmp_path / "data", seed, queues=BRIEF)
    store = Store(SimDisk())
    moments: list[tuple[int, LogState]] = []
    sent: dict[tuple[str, int], bytes] = {}
    for turn in range(last + 1):
        worker.turn()
        worker.engine.wait()
        if turn % 5 == 0:
            worker.settle_down()
            if turn <= trims_until:
                worker.engine.trim(worker.now_us)
        worker.engine.confirm(worker.now_us, lambda error: None)
        worker.engine.wait()
        sent |= content_of(worker.folder)
        moments.append((worker.now_us, replayed(str(worker.folder))[0]))
        if turn in (15, last):
            take(store, Source(worker))
        worker.now_us += 1
    worker.engine.abandon()
    first, second = ({it.name: it.bytes for it in backup.files} for backup in store.backups)
    begun = list(first)[-1]
    assert begun not in second
    back = 0
    for at_us, then in moments[-12:]:
        with suppress(BackupError):
            check_same(restored(store, tmp_path / f"at-{at_us}", at_us), then, sent)
            back += 1
    assert back == 1 + by_snapshot  # and the time of the second backup


def test_a_gap_that_retention_has_left_is_no_defect(tmp_path: Path) -> None:
    """A restore to a time between two backups brings one snapshot, of the two that retention waits for."""
    worker = Worker(tmp_path / "data", 1)
    gaps: list[str] = []
    for turn in range(100):
        worker.turn()
        if turn % 10 == 9:
            worker.reopen(crash=False)
            worker.reopen(crash=False)  # The opening between them has a segment without a message.
            worker.settle_down()
        files = [it for it in list_files(str(worker.folder))[1] if it.name.count(".") == 1]
        ends = {int(it.name[:20]) + it.bytes for it in files} | {int(files[0].name[:20])}
        gaps = [it.name for it in files if int(it.name[:20]) not in ends]
        if gaps:
            break
    worker.reopen(crash=False)  # with a snapshot that knows of the gap
    *_, older, newer = sorted(it.name for it in worker.folder.glob("snapshot-*"))
    worker.engine.abandon()
    assert gaps[0][:20] < newer.removeprefix("snapshot-")
    (worker.folder / older).unlink()
    assert inspect_log(str(worker.folder)).defects == []
    (worker.folder / gaps[0]).unlink()
    assert "missing-segment" in {it.kind for it in inspect_log(str(worker.folder)).defects}


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 1))
def test_what_was_restored_is_backed_up_and_restored_like_any_other(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    store = Store(SimDisk())
    worker = Worker(tmp_path / "0", seed)
    for life in range(2):
        moments: list[tuple[int, LogState]] = []
        sent: dict[tuple[str, int], bytes] = {}
        for turn in range(40):
            worker.turn()
            worker.settle_down()
            sent |= content_of(worker.folder)
            moments.append((worker.now_us, replayed(str(worker.folder))[0]))
            if rng.random() < 0.15 or turn == 39:
                take(store, Source(worker))
            worker.now_us += 1
        worker.engine.abandon()
        for at_us, then in rng.sample(moments[10:], 8):
            target = tmp_path / f"{life}-{at_us}"
            with suppress(BackupError):
                check_same(restored(store, target, at_us), then, sent)
        later = Worker(restored(store, tmp_path / f"{life + 1}"), seed + 1000)
        later.now_us = worker.now_us + 1000
        worker = later
    worker.engine.abandon()


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 4))
def test_of_a_log_at_work_it_is_what_a_power_cut_would_have_left(tmp_path: Path, seed: int) -> None:
    """Files are compacted and removed while they are copied; what was synced before is in the backup."""
    worker = Worker(tmp_path / "data", seed, queues=BRIEF)
    for _ in range(120):
        worker.turn()
    worker.settle_down()
    before, position = replayed(str(worker.folder))
    store = Store(SimDisk())
    source = Busy(worker)
    first = take(store, source)
    sent = content_of(worker.folder)
    worker.engine.abandon()
    assert source.between
    assert first.backup.logs[0].end >= position
    folder = restored(store, tmp_path / "r")
    assert inspect_log(str(folder)).defects == []
    found, _ = replayed(str(folder))
    for number, queue in before.by_number.items():
        if number in found.by_number:
            assert found.by_number[number].pending.tail >= queue.pending.tail
    for key, body in content_of(folder).items():
        if key in sent:
            assert sent[key] == body


def test_only_what_is_new_is_copied(tmp_path: Path) -> None:
    worker = Worker(tmp_path / "data", 3)
    for _ in range(100):
        worker.turn()
    worker.settle_down()
    store = Store(SimDisk())
    first = take(store, Source(worker))
    assert first.copied_files == len(first.backup.files)
    worker.now_us += 1
    again = take(Store(store.disk), Source(worker))
    assert (again.copied_files, again.copied_bytes) == (0, 0)
    for _ in range(20):
        worker.turn()
    worker.engine.wait()
    more = take(Store(store.disk), Source(worker))
    known = {file.stored for file in first.backup.files}
    assert more.copied_files == len([it for it in more.backup.files if it.stored not in known])
    assert 0 < more.copied_files < len(more.backup.files)
    left = Store(store.disk)
    assert left.prune(1) == 2
    assert [it.name for it in Store(store.disk).backups] == [more.backup.name]
    assert {name for name in store.disk.names() if ".seg" in name or "snapshot" in name} == {
        file.stored for file in more.backup.files
    }
    worker.engine.abandon()


def test_what_the_broker_has_damaged_is_told_and_kept(tmp_path: Path) -> None:
    worker = Worker(tmp_path / "data", 5)
    for _ in range(60):
        worker.turn()
    worker.settle_down()
    name = next(file.name for file in list_files(str(worker.folder))[1] if file.name.endswith(".seg"))
    content = bytearray((worker.folder / name).read_bytes())
    content[200] ^= 1
    (worker.folder / name).write_bytes(content)
    disk = SimDisk()
    first = take(Store(disk), Source(worker)).backup
    assert [it.split(":")[0] for it in first.defects] == [name]
    worker.now_us += 1
    assert take(Store(disk), Source(worker)).backup.defects == first.defects
    worker.engine.abandon()
    assert any(name in it.text for it in inspect_log(str(restored(Store(disk), tmp_path / "r"))).defects)


def test_what_is_somebody_elses_stays(tmp_path: Path) -> None:
    worker = Worker(tmp_path / "data", 3)
    worker.turn()
    worker.settle_down()
    name = "bbe9e9-00000000000000000000.seg-8-9"
    others = ("202401-report-2024-01", f"{name}.txt", "notes.tmp")
    ours = (name, f"{name}.tmp", "backup-20300131T120000.000000Z.tmp")
    disk = SimDisk(dict.fromkeys((*others, *ours), b"precious"))
    store = Store(disk)
    take(store, Source(worker))
    store.prune(1)
    worker.engine.abandon()
    assert {it for it, content in disk.files().items() if content == b"precious"} == {*others}


def test_what_a_cut_run_has_copied_is_checked_before_it_is_used(tmp_path: Path) -> None:
    """It may have been cut before it was read once more."""
    worker = Worker(tmp_path / "data", 5)
    for _ in range(60):
        worker.turn()
    worker.settle_down()
    source, store = Source(worker), Store(SimDisk())
    listing = source.listing()
    file = next(it for it in listing.files if it.name.endswith(".seg"))
    content = bytearray(b"".join(source.read(listing, file)))
    content[200] ^= 1
    store.put(listing.log, file, [bytes(content)])
    taken = take(store, source)
    assert taken.backup.defects == ()
    assert taken.copied_files == len(taken.backup.files)
    assert inspect_log(str(restored(store, tmp_path / "r"))).defects == []
    # The same where the broker has it damaged, and goes on so that a new list is needed.
    (worker.folder / file.name).write_bytes(content)
    gone = [source.listing().files[-1].name]

    class Going(Source):
        def read(self, listing: Listing, file: Listed) -> Generator[bytes, None, None]:
            if file.name in gone:
                gone.remove(file.name)
                raise FileNotFoundError(file.name)
            yield from super().read(listing, file)

    worker.now_us += 1
    again = take(Store(SimDisk()), Going(worker))
    worker.engine.abandon()
    assert not gone
    assert [it.split(":")[0] for it in again.backup.defects] == [file.name]


def test_a_backup_of_several_logs(tmp_path: Path) -> None:
    """It has all of them, and is known by all of them; each comes back as it was at that time."""
    workers = [Worker(tmp_path / f"{seed}", seed) for seed in (3, 4, 5)]

    class Several(Source):
        def listings(self) -> list[Listing]:
            return [Source(worker).listing()._replace(shard=shard) for shard, worker in enumerate(workers)]

        def read(self, listing: Listing, file: Listed) -> Generator[bytes, None, None]:
            yield from Source(workers[listing.shard]).read(listing, file)

    disk = SimDisk()
    for turn in range(2):
        for shard, worker in enumerate(workers):
            worker.now_us = 2_000_000_000_000_000 + 1_000_000 * turn + shard
            for _ in range(20):
                worker.turn()
            worker.settle_down()
            worker.now_us = 2_000_000_000_500_000 + 1_000_000 * turn + shard
        take(Store(disk), Several(workers[0]))
    store = Store(disk)
    first, last = store.backups
    assert first.numbers == last.numbers
    assert len(set(first.numbers)) == 3
    assert first.time_us == 2_000_000_000_500_002
    for backup, at_us in ((first, first.time_us), (last, None), (last, last.time_us)):
        for shard, log in enumerate(backup.logs):
            wanted = plan(store, at_us, None, shard)
            assert wanted.cut == log.end
            assert {it for it, _ in wanted.files} <= set(log.files)
    between = [plan(store, last.time_us - 500_001, log, 1).cut for log in first.numbers]
    assert first.logs[1].end <= between[0] <= last.logs[1].end
    assert len(set(between)) == 1
    # One of them alone, as a broker has it, is another log.
    workers[0].now_us += 1_000_000
    take(Store(disk), Source(workers[0]))
    assert len(plan(Store(disk)).files) == len(Store(disk).backups[-1].files)
    assert plan(Store(disk), None, first.numbers[1], 1) == plan(store, None, None, 1)
    for worker in workers:
        worker.engine.abandon()


def test_backups_of_two_logs_in_one_folder(tmp_path: Path) -> None:
    """As of a broker that was restored while the old one goes on: each can be had, and nobody guesses."""
    disk, logs = SimDisk(), []
    for seed in (3, 4):
        logs.append(Worker(tmp_path / f"{seed}", seed))
        logs[-1].turn()
        logs[-1].settle_down()
    for at, worker in enumerate([*logs, *logs]):
        worker.now_us = 2_000_000_000_000_000 + 1_000_000_000 * at
        worker.turn()
        take(Store(disk), Source(worker))
    for worker in logs:
        worker.engine.abandon()
    store = Store(disk)
    for backup in store.backups:
        named = {it for it, _ in plan(store, backup.time_us).files}
        assert named <= {
            it for other in store.backups if other.numbers == backup.numbers for it in other.files
        }
    one, other = store.backups[1:3]
    with pytest.raises(BackupError, match=f"--log {other.numbers[0]} or {one.numbers[0]}"):
        plan(store, other.time_us - 1)
    for log in (*one.numbers, *other.numbers):
        assert {it.log for it, _ in plan(store, other.time_us - 1, log).files} == {log}
        assert {it.log for it, _ in plan(store, None, log).files} == {log}
    with pytest.raises(BackupError, match="no backup of log 'nobody'"):
        plan(store, None, "nobody")


# --- what is wrong -----------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path) -> SimDisk:
    """Two backups of a small log."""
    worker = Worker(tmp_path / "data", 7)
    disk = SimDisk()
    for _ in range(2):
        for _ in range(30):
            worker.turn()
        worker.settle_down()
        take(Store(disk), Source(worker))
        worker.now_us += 1
    worker.engine.abandon()
    return disk


def test_a_damaged_file_is_not_restored(kept: SimDisk) -> None:
    files = kept.files()
    newest = Store(kept).backups[-1]
    victim = max(newest.files, key=lambda it: it.bytes)
    for content in (files[victim.stored][:-1], b"x" + files[victim.stored][1:]):
        broken = Store(SimDisk({**files, victim.stored: content}))
        with pytest.raises(BackupError, match=victim.stored):
            fill(broken, plan(broken), SimDisk(), 1)
    last = max(newest.files, key=lambda it: (it.name.endswith(".seg"), it.name))
    for file, at_us in ((victim, None), (last, newest.time_us - 1)):
        missing = Store(SimDisk({name: it for name, it in files.items() if name != file.stored}))
        with pytest.raises(BackupError, match="is missing"):
            fill(missing, plan(missing, at_us), SimDisk(), 1)


def test_a_damaged_backup_is_none_and_nothing_is_thrown_away_for_it(kept: SimDisk) -> None:
    files = kept.files()
    older, newer = Store(kept).backups
    first_line = files[newer.name].index(b"\n") + 1
    for bit in [*range(8 * first_line), *range(8 * first_line, 8 * len(files[newer.name]), 57)]:
        text = bytearray(files[newer.name])
        text[bit // 8] ^= 1 << bit % 8
        store = Store(SimDisk({**files, newer.name: bytes(text)}))
        assert [it.name for it in store.backups] == [older.name]
        assert newer.name in store.unreadable[0]
        store.prune(1)
        assert set(store.disk.names()) == set(files)


def test_a_newer_format_is_refused(kept: SimDisk) -> None:
    name = Store(kept).backups[0].name
    files = kept.files()
    text = files[name].partition(b"\n")[2].replace(b'"format": 1', b'"format": 3')
    files[name] = f"penstock backup 3 {digest([text])}\n".encode() + text
    with pytest.raises(BackupError, match="format 3, of a newer version"):
        Store(SimDisk(files))


def test_a_folder_with_anything_in_it_is_left_alone(kept: SimDisk) -> None:
    store = Store(kept)
    target = SimDisk({"00000000000000000000.seg": b"precious"})
    with pytest.raises(BackupError, match="is not empty"):
        fill(store, plan(store), target, 1)
    assert target.files() == {"00000000000000000000.seg": b"precious"}
    with pytest.raises(BackupError, match="is the data folder of a broker"):
        Store(target)
    with pytest.raises(BackupError, match="there is no backup in"):
        plan(Store(SimDisk()))
    with pytest.raises(BackupError, match="is older than that"):
        plan(store, store.backups[-1].time_us + 1)


def test_another_restore_in_the_same_folder(kept: SimDisk) -> None:
    store = Store(kept)
    target = SimDisk()
    fill(store, plan(store, store.backups[0].time_us), target, 1)
    with pytest.raises(BackupError, match="a restore of something else"):
        fill(store, plan(store), target, 1)


# --- power cuts --------------------------------------------------------------------------------------


def cut_backups(tmp_path: Path, rng: random.Random) -> tuple[int, int]:
    """A second backup, cut at every step: how often it was there already, and how often not."""
    worker = Worker(tmp_path / "data", 11)
    for _ in range(40):
        worker.turn()
    worker.settle_down()
    source = Source(worker)
    disk = SimDisk()
    take(Store(disk), source)
    for _ in range(30):
        worker.turn()
    worker.settle_down()
    there = missing = 0
    for step in range(1, 1000):
        trial = disk.copy()
        trial.cut_after(step)
        try:
            taken: Taken | None = take(Store(trial), source)
            Store(trial).prune(1)
        except PowerCut:
            taken = None
        after = trial.crash(rng)
        store = Store(after)
        assert not store.unreadable
        for backup in store.backups:
            for file in backup.files:
                assert digest(store.read(file.stored)) == file.sha256, (step, file)
        assert store.backups
        newest = store.backups[-1].logs[0].end == list_files(str(worker.folder))[0]
        there, missing = there + newest, missing + (not newest)
        if taken is not None:
            assert newest
            worker.engine.abandon()
            return there, missing
        worker.now_us += 1
        again = take(store, source)
        assert digest(b"".join(store.read(it.stored)) for it in again.backup.files)
        target = SimDisk()
        fill(Store(after), plan(Store(after)), target, 1)
        finish(target)
        open_sim(target).abandon()
    raise AssertionError("it never ended")


def open_sim(disk: SimDisk) -> Log:
    return Log.open(
        disk, 1 << 60, settings=SETTINGS, policies=POLICIES, writer=InlineWorker(), keeper=InlineWorker()
    )


def test_a_backup_that_is_cut_is_none_and_the_next_one_goes_on(tmp_path: Path) -> None:
    there, missing = cut_backups(tmp_path, random.Random(1))
    assert there > 1
    assert missing > 10


def test_the_canary_of_backups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup that gets its name before its files have theirs for good."""
    monkeypatch.setattr(store_module, "sync_folder", lambda disk: None)

    def tried() -> None:
        for seed in range(20):
            cut_backups(tmp_path / str(seed), random.Random(seed))

    with pytest.raises((AssertionError, FileNotFoundError)):
        tried()


def cut_restores(kept: SimDisk, rng: random.Random) -> tuple[int, int]:
    """A restore, cut at every step: how often a broker was refused, and how often all was there."""
    store = Store(kept)
    wanted = plan(store)
    refused = whole = 0
    for step in range(1, 1000):
        target = SimDisk()
        target.cut_after(step)
        try:
            fill(store, wanted, target, 1)
            finish(target)
            ended = True
        except PowerCut:
            ended = False
        after = target.crash(rng)
        if ended:
            assert RESTORING not in after.names()
            return refused, whole
        if RESTORING in after.names():
            with pytest.raises(LogRefused, match="a restore into it was not finished"):
                open_sim(after.copy())
            refused += 1
        elif after.names() and not all(it.endswith(".tmp") for it in after.names()):
            check_whole(after, store)
            whole += 1
            continue
        fill(store, wanted, after, 1)
        finish(after)
        check_whole(after, store)
    raise AssertionError("it never ended")


def check_whole(disk: SimDisk, store: Store) -> None:
    names = set(disk.names())
    assert {file.name for file in store.backups[-1].files} <= names
    log = open_sim(disk.copy())
    try:
        assert list(log.damage) == []
    finally:
        log.abandon()


def test_a_restore_that_is_cut_is_refused_and_goes_on(kept: SimDisk) -> None:
    for seed in range(5):
        refused, _ = cut_restores(kept, random.Random(seed))
        assert refused > 10


def test_a_restore_of_several_logs_that_is_cut_goes_on(kept: SimDisk) -> None:
    """None is a log before all are marked, and none is touched again that is one: somebody may lead it."""
    store = Store(kept)
    for done in range(3):
        disks = [SimDisk() for _ in range(3)]
        wanted = [(plan(store), disk) for disk in disks]
        assert begin(wanted) == wanted
        for it, disk in wanted:
            assert RESTORING in disk.names()
            fill(store, it, disk, 1)
        for disk in disks[:done]:
            finish(disk)
            open_sim(disk).abandon()
        led = [disk.files() for disk in disks[:done]]
        assert begin(wanted) == wanted[done:]
        for it, disk in wanted[done:]:
            fill(store, it, disk, 1)
            finish(disk)
        assert [disk.files() for disk in disks[:done]] == led
        for disk in disks:
            check_whole(disk, store)
        with pytest.raises(BackupError, match="is not empty"):
            begin(wanted)
    # Marked are not all: nobody has finished any.
    disks = [SimDisk({"00000000000000000000.seg": b"precious"}), SimDisk(), SimDisk()]
    with pytest.raises(BackupError, match="is not empty"):
        begin([(plan(store), disk) for disk in disks])


def test_the_canary_of_restores(kept: SimDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose mark is gone before everything is there for good."""

    def write(disk: Disk, name: str, *content: bytes) -> None:
        put_file(disk, name, content, sum(map(len, content)))

    monkeypatch.setattr(restoring, "sync_folder", lambda disk: None)
    monkeypatch.setattr(restoring, "write_whole", write)

    def tried() -> None:
        for seed in range(20):
            cut_restores(kept, random.Random(seed))

    with pytest.raises((AssertionError, LogError)):
        tried()
