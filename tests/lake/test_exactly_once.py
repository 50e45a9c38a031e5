"""Each row is in the table once: killed at any point, two at a time, whatever becomes of the log."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

from penstock.lake.archiver import Archiver, Told
from penstock.lake.table import Overtaken, Span, Table, doubles_of, gaps_of
from penstock.log.backup.listing import Listed, Listing, list_files
from penstock.log.backup.restoring import fill, finish, plan
from penstock.log.backup.store import Store
from penstock.log.backup.taking import take
from penstock.log.disk import RealDisk
from penstock.log.log import open_log
from penstock.log.reader import LogReader
from tests.lake.rig import DAY_US, archived, assert_complete, filled, now_us, put, rows_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("when", "method", "number"),
    [
        ("after", "open", 1),  # one table is made, and the other is not
        ("before", "commit", 2),  # files that are in no table
        ("after", "write", 3),
        ("after", "_sync_log", 4),  # in the table, and nobody was told
        ("after", "commit", 5),
    ],
)
def test_killed_archiver_goes_on(tmp_path: Path, when: str, method: str, number: int) -> None:
    data, path = str(tmp_path / "data"), str(tmp_path / "lake")
    filled(data, {"orders": 300, "a/b ä%": 40})
    killed = subprocess.run(
        [sys.executable, "-m", "tests.lake.rig", data, path, when, method, str(number)], cwd=ROOT, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    archived(data, path, turns=12, rows=70).close()
    assert_complete(data, path)


def test_what_a_killed_archiver_has_committed_is_synced_before_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention goes by what is told, and a commit that is not on the disk is lost with the power."""
    data, path = str(tmp_path / "data"), str(tmp_path / "lake")
    filled(data, {"orders": 30})
    synced: set[str] = set()
    fsync = os.fsync

    def seen(handle: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", seen)
    killed = archived(data, path, turns=0)
    assert {str(tmp_path), path, f"{path}/messages", f"{path}/events"} <= synced  # names that are new
    with monkeypatch.context() as context:
        context.setattr(Table, "_sync_log", _dies)
        with pytest.raises(KeyboardInterrupt):
            killed.turn(1000.0)
    killed.close()
    synced.clear()
    told: list[set[str]] = []

    def tell(what: Told) -> None:
        if any(what.held.get("messages", {}).values()):
            told.append(set(synced))

    archived(data, path, tell=tell).close()
    table = Table(path, "messages").open()
    log = f"{table.folder}/_delta_log"
    (file,) = {table.place(it) for it in table.spans()}
    assert {log, f"{log}/{1:020d}.json", file, str(Path(file).parent), table.folder} <= told[0]


def _dies(*_: object) -> None:
    raise KeyboardInterrupt


def test_one_of_two_archivers_is_overtaken(tmp_path: Path) -> None:
    data, path = str(tmp_path / "data"), str(tmp_path / "lake")
    filled(data, {"orders": 100})
    first, second = archived(data, path, turns=0), archived(data, path, turns=0)
    # Both have looked at the same table; the second one's look is then kept from being repeated.
    first.turn(1000.0)
    lane = second._lanes["messages"]
    queues = second.queues()
    lane.look(queues, second._hold_new(queues))
    with pytest.raises(Overtaken):
        lane.archive(["orders"], queues, 1000.0)
    second.turn(2000.0)
    second.turn(3000.0)
    assert_complete(data, path)
    for archiver in (first, second):
        archiver.close()


def test_two_archivers_in_turns(tmp_path: Path) -> None:
    """A leader that was deposed and does not know it yet."""
    data, path = str(tmp_path / "data"), str(tmp_path / "lake")
    log = open_log(data, now_us())
    put(log, "orders", [b"0", b"1"])
    first, second = archived(data, path), archived(data, path)
    for turn in range(2, 6):
        put(log, "orders", [b"%d" % turn])
        for archiver in (first, second):
            archiver.turn(1000.0 * turn)
    assert_complete(data, path)
    assert [row["value"] for row in sorted(rows_of(path), key=lambda it: it["offset"])] == [
        b"0", b"1", b"2", b"3", b"4", b"5",
    ]  # fmt: skip
    for archiver in (first, second):
        archiver.close()
    log.close(now_us())


def test_of_two_archivers_none_compacts_while_the_other_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would take the same files out of the table, and each would bring their rows."""
    monkeypatch.setattr("penstock.lake.archiver.COMPACT_FILES", 3)
    data, path = str(tmp_path / "data"), str(tmp_path / "lake")
    log = open_log(data, now_us())

    def files(archiver: Archiver, now: float) -> int:
        put(log, "orders", [b"x"])
        archiver.turn(now)
        return len(Table(path, "messages").open().spans())

    put(log, "orders", [b"x"])
    first = archived(data, path)
    assert [files(first, now) for now in (2000.0, 2010.0)] == [2, 1]
    second = archived(data, path, turns=0)  # It begins, and the first one may be there.
    assert [files(second, now) for now in (2100.0, 2110.0, 2120.0)] == [2, 3, 4]
    assert [files(first, now) for now in (2200.0, 2210.0, 2799.0)] == [5, 6, 7]
    assert files(first, 2801.0) == 1  # It has heard of nobody for ten minutes.
    assert [files(first, now) for now in (2802.0, 2803.0)] == [2, 1]
    assert [files(second, now) for now in (2804.0, 2805.0, 3403.0, 3405.0)] == [2, 3, 4, 1]
    assert_complete(data, path)
    for archiver in (first, second):
        archiver.close()
    log.close(now_us())


def test_archivers_of_several_logs_are_not_in_each_others_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a cluster: each commits to a table that others have changed since it has looked."""
    monkeypatch.setattr("penstock.lake.archiver.COMPACT_FILES", 3)
    path, count = str(tmp_path / "lake"), 8
    logs = {name: open_log(str(tmp_path / name), now_us()) for name in ("a", "b", "c")}
    for name, log in logs.items():
        put(log, name, [b"0"])
    archivers = {name: archived(str(tmp_path / name), path) for name in logs}
    for turn in range(1, count):
        looked = {}
        for name, archiver in archivers.items():
            put(logs[name], name, [b"%d" % turn])
            looked[name] = queues = archiver.queues()
            archiver._lanes["messages"].follow()
            archiver._lanes["messages"].look(queues, archiver._hold_new(queues))
        for name, archiver in archivers.items():
            archiver._lanes["messages"].archive([name], looked[name], 1000.0 * turn)
        for archiver in archivers.values():
            archiver._lanes["messages"].tidy(1000.0 * turn)
    rows = sorted((row["queue"], row["offset"], row["value"]) for row in rows_of(path))
    assert rows == [(name, turn, b"%d" % turn) for name in logs for turn in range(count)]
    assert len(Table(path, "messages").open().spans()) < 3 * count
    for name, archiver in archivers.items():
        archiver.close()
        logs[name].close(now_us())


def test_files_of_another_log_are_compacted_by_its_own_archiver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.lake.archiver.COMPACT_FILES", 2)
    monkeypatch.setattr("penstock.lake.archiver.ALONE_SECONDS", 0.0)
    path, others = str(tmp_path / "lake"), list[list[Span]]()
    for number in range(2):
        data = str(tmp_path / f"{number}")
        filled(data, {"orders": 30})
        with monkeypatch.context() as patch:
            patch.setattr("penstock.lake.archiver.COMPACT_FILES", 100)
            archived(data, path, turns=3, rows=10).close()
        others.append(Table(path, "messages").open().spans())
    filled(data, {"orders": 1})
    archived(data, path).close()
    spans = Table(path, "messages").open().spans()
    assert len(spans) == 4  # of the one as it was, of the other one
    assert all(it in spans for it in others[0])
    assert sum(it.rows for it in spans) == 61


def test_rows_that_somebody_takes_off_the_table_come_again(tmp_path: Path) -> None:
    """While it archives: the turns of the log are what they were."""
    data, path = str(tmp_path / "data"), str(tmp_path / "lake")
    log = open_log(data, now_us())
    put(log, "orders", [b"0", b"1"])
    archiver = archived(data, path)
    table = Table(path, "messages").open()
    version = table.delta.version()
    put(log, "orders", [b"2", b"3"])
    archiver.turn(2000.0)
    table.refresh()
    table.delta.restore(version)
    put(log, "orders", [b"4"])
    archiver.turn(3000.0)
    archiver.close()
    log.close(now_us())
    assert_complete(data, path)


def test_queue_that_is_made_again_is_told_apart(tmp_path: Path) -> None:
    data, path = str(tmp_path / "data"), str(tmp_path / "lake")
    log = open_log(data, now_us())
    put(log, "orders", [b"old 0", b"old 1"])
    archiver = archived(data, path)
    log.delete(["orders"], now_us())
    put(log, "orders", [b"new 0"])
    archiver.turn(2000.0)
    archiver.close()
    log.close(now_us())
    rows = sorted((row["identity"], row["offset"], row["value"]) for row in rows_of(path))
    assert [(offset, value) for _, offset, value in rows] == [(0, b"old 0"), (1, b"old 1"), (0, b"new 0")]
    assert all(row["id"].startswith(row["identity"]) for row in rows_of(path))
    archived(data, path).close()
    assert len(rows_of(path)) == 3


def test_broker_that_lost_its_disk_begins_anew(tmp_path: Path) -> None:
    path = str(tmp_path / "lake")
    for life in ("first", "second"):
        data = str(tmp_path / life)
        filled(data, {"orders": 3})
        archived(data, path, turns=2).close()
    rows = rows_of(path)
    assert sorted(row["offset"] for row in rows) == [0, 0, 1, 1, 2, 2]
    assert len({row["identity"] for row in rows}) == 2
    assert len({row["id"] for row in rows}) == 6


def test_log_that_was_put_back_from_a_copy_is_refused(tmp_path: Path) -> None:
    data, path, copy = tmp_path / "data", str(tmp_path / "lake"), tmp_path / "copy"
    filled(str(data), {"orders": 20, "others": 5})
    subprocess.run(["cp", "-r", str(data), str(copy)], check=True)
    filled(str(data), {"orders": 20})
    archived(str(data), path, turns=2).close()
    told: list[dict[str, str]] = []
    ahead = archived(str(copy), path, turns=2, tell=lambda it: told.append(dict(it.state["refused"])))
    assert "ahead: it has offset 39, and the log ends before 20" in ahead._lanes["messages"].refused["orders"]
    assert "others" not in told[-1]
    ahead.close()
    filled(str(copy), {"orders": 30, "others": 5})  # Now the log has more; but offset 39 is another message.
    held: list[int] = []  # Nothing that the log has is given up for rows that are others.
    other = archived(
        str(copy),
        path,
        turns=2,
        tell=lambda it: held.extend(its.get("orders", 0) for its in it.held.values()),
    )
    assert "offset 39 is of" in other._lanes["messages"].refused["orders"]
    assert set(held) == {0}
    other.close()
    rows = rows_of(path)
    assert len([row for row in rows if row["queue"] == "orders"]) == 40
    assert len([row for row in rows if row["queue"] == "others"]) == 10


def test_log_that_was_restored_is_refused(tmp_path: Path) -> None:
    """It has another number, and what was there before the cut is in the table already, under the old one."""
    data, path = tmp_path / "data", str(tmp_path / "lake")
    filled(str(data), {"orders": 20, "others": 5})
    store = Store(RealDisk(str(tmp_path / "b")))
    store.disk.lock()
    take(store, Folder(data))
    store.disk.unlock()
    filled(str(data), {"orders": 20})
    archived(str(data), path, turns=2).close()  # All of it is one file, and the cut is in the middle.
    disk = RealDisk(str(tmp_path / "r"))
    disk.lock()
    fill(store, plan(store), disk, now_us())
    finish(disk)
    disk.unlock()
    filled(disk.path, {"orders": 30, "new": 3})
    restored = archived(disk.path, path, turns=2)
    for lane in restored._lanes.values():
        assert lane.refused.keys() == {"orders", "others"}
        assert "0 is in the table already" in lane.refused["orders"]
    restored.close()
    assert Counter(row["queue"] for row in rows_of(path)) == {"orders": 40, "others": 5, "new": 3}


class Folder:
    """A log that nobody has open, as the source of a backup."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def listings(self) -> list[Listing]:
        with LogReader(str(self._path)) as reader:
            return [Listing(reader.log, now_us(), *list_files(str(self._path)))]

    def read(self, listing: Listing, file: Listed) -> Generator[bytes, None, None]:
        yield (self._path / file.name).read_bytes()[: file.bytes]


def test_clock_that_was_set_back_is_no_copy(tmp_path: Path) -> None:
    """As where the next leader's clock is behind; over midnight, days take turns in the table."""
    data, path = str(tmp_path / "data"), str(tmp_path / "lake")
    midnight = now_us() // DAY_US * DAY_US - DAY_US
    log = open_log(data, midnight - 10)
    for at_us in (midnight - 5000, midnight + 5000, midnight - 3000):
        put(log, "orders", [b"a", b"b"], at_us)
    archived(data, path).close()
    table = Table(path, "messages").open()
    assert [(it.first, it.end, it.rows) for it in table.spans()] == [(0, 6, 4), (2, 4, 2)]  # compacted
    assert gaps_of(table.spans()) == doubles_of(table.spans()) == []
    put(log, "orders", [b"c"], midnight - 2000)
    archiver = archived(data, path, turns=2)
    assert not any(lane.refused for lane in archiver._lanes.values())
    archiver.close()
    log.close(midnight + 5001)
    assert_complete(data, path)


def test_days_are_those_of_utc(tmp_path: Path) -> None:
    data, path = str(tmp_path / "data"), str(tmp_path / "lake")
    midnight = now_us() // DAY_US * DAY_US - DAY_US
    log = open_log(data, midnight - 2)
    put(log, "orders", [b"before"], midnight - 1)
    put(log, "orders", [b"after"], midnight)
    archived(data, path).close()
    log.close(midnight + 1)
    days = {row["value"]: row["day"] for row in rows_of(path)}
    assert (days[b"after"] - days[b"before"]).days == 1
    assert all(row["day"] == row["timestamp"].date() for row in rows_of(path))
    assert len(Table(path, "messages").open().spans()) == 2
