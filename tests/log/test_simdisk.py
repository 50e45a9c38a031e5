"""The simulated disk does what it says: no more is lost than the fault model allows, and no less."""

import errno
import random
from collections.abc import Callable

import pytest

from penstock.log.disk import WATERMARK, Disk, File
from penstock.log.errors import LogInUse
from tests.log.simdisk import SECTOR_BYTES, PowerCut, SimDisk

SEEDS = range(200)


def synced_file(content: bytes = b"") -> tuple[SimDisk, File]:
    """A disk with a file "f" that is safe, name and content."""
    disk = SimDisk()
    file = disk.create("f", 0)
    file.write(0, [content])
    file.sync()
    disk.sync_names()
    return disk, file


def outcomes(make: Callable[[], SimDisk]) -> set[frozenset[tuple[str, bytes]]]:
    """Every folder that a crash was seen to leave."""
    return {frozenset(make().crash(random.Random(seed)).files().items()) for seed in SEEDS}


def contents(make: Callable[[], SimDisk]) -> set[bytes]:
    """Every content of the file "f" that a crash was seen to leave."""
    return {dict(outcome)["f"] for outcome in outcomes(make)}


def test_it_is_a_disk() -> None:
    disk: Disk = SimDisk()
    file: File = disk.create("f", 0)
    file.write(2, [b"ab", memoryview(b"cd"), bytearray(b"e")])
    assert file.size() == 7
    assert file.read(0, 100) == b"\0\0abcde"
    assert file.read(3, 2) == b"bc"
    assert file.read(9, 2) == b""
    file.truncate(3)
    assert disk.open("f").read(0, 9) == b"\0\0a"
    disk.rename("f", "g")
    assert disk.names() == ["g"]
    disk.remove("g")
    assert disk.names() == []
    assert disk.where("g").endswith("/g")
    file.close()
    with pytest.raises(OSError, match="closed"):
        file.read(0, 1)
    for missing in (disk.open, disk.remove, lambda name: disk.rename(name, "h")):
        with pytest.raises(FileNotFoundError):
            missing("g")


def test_synced_bytes_stay_and_unsynced_ones_may_go() -> None:
    def make() -> SimDisk:
        disk, file = synced_file(b"safe")
        file.write(4, [b"loose"])
        assert file.read(0, 9) == b"safeloose"
        return disk

    seen = contents(make)
    assert all(content.startswith(b"safe") for content in seen)
    assert {b"safe", b"safeloose"} <= seen
    assert any(b"safe" < content < b"safeloose" for content in seen), "no write was ever torn"


def test_unsynced_writes_stay_in_any_combination() -> None:
    def make() -> SimDisk:
        disk, file = synced_file(b"...")
        for at, data in enumerate((b"a", b"b", b"c")):
            file.write(at, [data])
        return disk

    assert {b"...", b"a..", b".b.", b"..c", b"ab.", b"a.c", b".bc", b"abc"} <= contents(make)


def test_overlapping_writes_may_come_in_another_order() -> None:
    def make() -> SimDisk:
        disk, file = synced_file(b".")
        file.write(0, [b"1"])
        file.write(0, [b"2"])
        return disk

    assert contents(make) == {b".", b"1", b"2"}


def test_a_torn_write_may_miss_sectors_in_its_middle() -> None:
    def make() -> SimDisk:
        disk, file = synced_file(bytes(3 * SECTOR_BYTES))
        file.write(0, [b"x" * 3 * SECTOR_BYTES])
        return disk

    holes = [b"x" * SECTOR_BYTES, bytes(SECTOR_BYTES), b"x" * SECTOR_BYTES]
    assert b"".join(holes) in contents(make)


def test_a_size_is_safe_only_after_a_sync() -> None:
    def make() -> SimDisk:
        disk, file = synced_file(b"long content")
        file.truncate(4)
        return disk

    assert contents(make) == {b"long content", b"long"}
    allocated = {len(dict(o).get("n", b"-")) for o in outcomes(lambda: with_file("n", 100))}
    assert allocated == {1, 0, 100}  # forgotten, without its room, whole


def with_file(name: str, size: int) -> SimDisk:
    disk = SimDisk()
    disk.create(name, size)
    return disk


def test_names_may_be_forgotten_until_they_are_synced() -> None:
    def make() -> SimDisk:
        disk = SimDisk({"old": b"1", "gone": b"2"})
        disk.rename("old", "new")
        disk.remove("gone")
        disk.create("made", 0)
        return disk

    names = {frozenset(dict(outcome)) for outcome in outcomes(make)}
    first = [frozenset({"old"}), frozenset({"new"})]
    combinations = {a | b | c for a in first for b in ({"gone"}, set()) for c in ({"made"}, set())}
    assert names == combinations

    def safe() -> SimDisk:
        disk = make()
        disk.sync_names()
        return disk

    assert {frozenset(dict(outcome)) for outcome in outcomes(safe)} == {frozenset({"new", "made"})}


def test_a_name_without_its_content_and_content_without_a_name() -> None:
    def make() -> SimDisk:
        disk = SimDisk()
        disk.create("f", 0).write(0, [b"data"])
        disk.sync_names()
        return disk

    assert {b"", b"data"} <= contents(make)

    def nameless() -> SimDisk:
        disk = SimDisk()
        file = disk.create("f", 0)
        file.write(0, [b"data"])
        file.sync()
        return disk

    assert outcomes(nameless) == {frozenset(), frozenset({("f", b"data")})}


def test_a_renamed_file_that_replaces_another_is_one_of_the_two() -> None:
    def make() -> SimDisk:
        disk = SimDisk({"f": b"old", "f.tmp": b"new"})
        disk.rename("f.tmp", "f")
        return disk

    assert outcomes(make) == {
        frozenset({("f", b"old"), ("f.tmp", b"new")}),
        frozenset({("f", b"new")}),
    }


def test_a_kill_loses_nothing_and_makes_nothing_safe() -> None:
    disk, file = synced_file(b"safe")
    file.write(4, [b"loose"])
    disk.rename("f", "g")
    after = disk.kill()
    assert after.files() == {"g": b"safeloose"}
    seen = {frozenset(after.crash(random.Random(seed)).files().items()) for seed in SEEDS}
    assert frozenset({("f", b"safe")}) in seen
    assert frozenset({("g", b"safeloose")}) in seen


def test_nothing_works_without_power() -> None:
    disk, file = synced_file()
    found = disk.crash(random.Random(0))
    for call in (disk.names, file.size, file.sync, disk.sync_names, disk.lock, lambda: disk.create("x", 0)):
        with pytest.raises(PowerCut):
            call()
    assert found.names() == ["f"]


@pytest.mark.parametrize(("calls", "left"), [(1, b""), (2, b""), (3, b"data")])
def test_the_power_can_fail_within_a_call(calls: int, left: bytes) -> None:
    """A write has done its work and may be lost all the same; a sync has not done anything."""
    disk, file = synced_file()
    disk.cut_after(calls)

    def work() -> None:
        file.write(0, [b"data"])
        file.sync()
        file.write(4, [b"more"])

    with pytest.raises(PowerCut):
        work()
    seen = {disk.crash(random.Random(seed)).files()["f"] for seed in SEEDS}
    assert all(content.startswith(left) for content in seen)
    assert left in seen
    assert b"data" in seen


@pytest.mark.parametrize(
    "call", ["write", "sync", "truncate", "create", "allocate", "rename", "remove", "sync_names"]
)
def test_the_nth_call_fails_once(call: str) -> None:
    disk, file = synced_file(b"12345678")

    def create_and_remove() -> None:
        disk.create("x", 0)
        disk.remove("x")

    calls: dict[str, Callable[[], object]] = {
        "write": lambda: file.write(0, [b"abcdefgh"]),
        "sync": file.sync,
        "truncate": lambda: file.truncate(8),
        "create": lambda: disk.create("x", 0),
        "allocate": lambda: disk.create("x", 10),
        "rename": lambda: disk.rename("f", "f"),
        "remove": create_and_remove,
        "sync_names": disk.sync_names,
    }
    disk.fail(call, 2, errno.EIO)
    calls[call]()
    with pytest.raises(OSError, match="output error") as caught:
        calls[call]()
    assert caught.value.errno == errno.EIO
    calls[call]()
    assert [c for c, _ in disk.calls].count(call) >= 3


def test_a_failed_write_leaves_a_part() -> None:
    disk, file = synced_file(b"12345678")
    disk.fail("write", 1, errno.EIO)
    with pytest.raises(OSError, match="output error"):
        file.write(0, [b"abcdefgh"])
    assert file.read(0, 8) == b"abcd5678"


def test_a_second_sync_proves_nothing() -> None:
    def make() -> SimDisk:
        disk, file = synced_file(b"safe")
        file.write(4, [b"lost?"])
        disk.fail("sync", 1, errno.EIO)
        with pytest.raises(OSError, match="output error"):
            file.sync()
        file.sync()
        assert file.read(0, 9) == b"safelost?"
        return disk

    assert {b"safe", b"safelost?"} <= contents(make)

    def again() -> SimDisk:
        disk = make()
        file = disk.open("f")
        file.write(4, [b"lost?"])
        file.sync()
        return disk

    assert contents(again) == {b"safelost?"}, "bytes that are written again are synced like any others"


def test_names_after_a_failed_sync() -> None:
    def make() -> SimDisk:
        disk = SimDisk({"a": b""})
        disk.rename("a", "b")
        disk.fail("sync_names", 1, errno.EIO)
        with pytest.raises(OSError, match="output error"):
            disk.sync_names()
        disk.create("c", 0)
        disk.sync_names()
        return disk

    assert {frozenset(dict(o)) for o in outcomes(make)} == {frozenset({"a", "c"}), frozenset({"b", "c"})}


def test_capacity() -> None:
    disk = SimDisk(capacity_bytes=100)
    disk.create("allocated", 60).write(0, [b"x" * 60])
    assert disk.free_bytes() == 40
    file = disk.create("grows", 0)
    with pytest.raises(OSError, match="space") as caught:
        file.write(0, [b"y" * 50])
    assert caught.value.errno == errno.ENOSPC
    assert file.read(0, 50) == b"y" * 40, "what fits is there"
    with pytest.raises(OSError, match="space"):
        disk.create("more", 1)
    assert disk.names() == ["allocated", "grows"]
    disk.remove("allocated")
    file.write(0, [b"y" * 50])
    assert disk.free_bytes() == 50
    file.truncate(10)
    assert disk.free_bytes() == 90
    disk.capacity_bytes = 10
    with pytest.raises(OSError, match="space"):
        file.write(10, [b"z"])
    file.write(0, [b"z" * 10])


def test_only_one_can_have_the_lock() -> None:
    disk = SimDisk()
    disk.lock()
    with pytest.raises(LogInUse):
        disk.lock()
    disk.unlock()
    disk.lock()
    disk.kill().lock()


def test_a_copy_is_a_disk_of_its_own() -> None:
    disk, file = synced_file(b"one")
    copy = disk.copy()
    file.write(0, [b"two"])
    assert copy.files() == {"f": b"one"}
    copy.lock()


def test_the_watermark_may_be_an_older_one_after_a_crash_but_never_a_mixture() -> None:
    def make() -> SimDisk:
        disk = SimDisk()
        for position in (0x0101, 0x020202):
            disk.publish(position)
        assert disk.published == 0x020202
        return disk

    seen = {dict(outcome).get(WATERMARK) for outcome in outcomes(make)}
    words = {position.to_bytes(8, "little") for position in (0, 0x0101, 0x020202)}
    assert seen == words | {None, b""}
    assert make().kill().files() == {WATERMARK: (0x020202).to_bytes(8, "little")}
