"""The local copy of a cluster's log: the same bytes as its leader has, or a report of what is not there."""

import asyncio
import errno
import json
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.log.errors import LogInUse
from penstock.log.jetstream import replica as replica_module
from penstock.log.jetstream.api import READS_AT_ONCE, Stored
from penstock.log.jetstream.appender import Appender
from penstock.log.jetstream.cluster import Cluster, Node
from penstock.log.jetstream.errors import JetStreamError
from penstock.log.jetstream.link_thread import LinkThread
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.records import Kind, read_record
from penstock.log.jetstream.replica import READ_BYTES, Replica
from tests.nats.cluster import stream_leader
from tests.nats.conftest import Start
from tests.nats.streams import (
    TestLog,
    delete_message,
    delete_stream,
    files_in,
    last_seq,
    link_at,
    name_of,
    new_log,
    stored_in,
    wait_for,
)

FILE = "00000000000000000000.seg"
SNAPSHOT = "snapshot-00000000000000000000"
EVERYTHING = 1 << 50
SEED = int(os.environ.get("PENSTOCK_TEST_SEED", 815711))


@pytest.fixture(scope="module")
def nats(node: Cluster) -> Iterator[LinkThread]:
    with link_at(node.nodes[0].url) as nats:
        yield nats


def replica_of(nats: LinkThread, names: LogNames, folder: Path) -> Replica:
    replica = Replica(nats.api, names, str(folder))
    nats.ask(replica.begin())
    return replica


def completed(nats: LinkThread, names: LogNames, folder: Path) -> Replica:
    replica = replica_of(nats, names, folder)
    nats.ask(replica.complete())
    return replica


def without_late(copied: dict[str, bytes], there: dict[str, bytes]) -> dict[str, bytes]:
    """What is removed from a snapshot on waits for the next one before the stream is told."""
    late = {name for name in copied.keys() - there.keys() if name.startswith("snapshot-")}
    return {name: copied[name] for name in copied.keys() - late}


# --- the same bytes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [SEED, SEED + 1, SEED + 2])
def test_a_copy_has_the_bytes_of_the_leader(nats: LinkThread, tmp_path: Path, seed: int) -> None:
    """One that is made at once, and one that follows all the while."""
    log = TestLog(nats, new_log(nats), tmp_path / "leader", seed=seed)
    follower = replica_of(nats, log.names, tmp_path / "follower")
    log.open()
    seen: set[str] = set()
    for _ in range(12):
        log.work(15)
        seen |= set(log.files())
        nats.ask(follower.catch_up())
        if log.rng.random() < 0.5:
            nats.ask(follower.drop_removed())
    log.work(5)
    nats.ask(follower.complete())
    fresh = completed(nats, log.names, tmp_path / "fresh")
    there = log.files()
    for replica in (follower, fresh):
        assert without_late(files_in(replica.path), there) == there, f"seed {seed}"
        assert replica.reports == []
        assert replica.unfinished() == []
    removed = seen - there.keys()
    kinds = {name[20:] for name in there} | {name[20:] for name in removed}
    assert {".seg", ".1.seg"} <= kinds, f"seed {seed} has no compacted segment"
    assert [name for name in removed if name.endswith(".seg")], f"seed {seed} has removed no segment"
    assert len([name for name in there if name.startswith("snapshot-")]) >= 2
    log.kill()
    after = log.again(tmp_path / "after")
    after.open()
    assert sorted(after.served()) == sorted(log.living), f"seed {seed}"
    assert not after.engine.damage
    after.led.abandon()


def test_many_copies_that_are_made_at_once_take_turns(
    nats: LinkThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a node has more waiting for one connection than it allows, and ends it."""
    log = TestLog(nats, new_log(nats), tmp_path / "leader")
    log.open()
    log.work(5)
    replicas = [replica_of(nats, log.names, tmp_path / str(number)) for number in range(16)]
    gather = nats.link.gather
    under_way, most = 0, 0

    async def counted(subject: str, payload: bytes) -> list[tuple[Mapping[str, str], bytes]]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            return await gather(subject, payload)
        finally:
            under_way -= 1

    async def catch_up() -> None:
        await asyncio.gather(*(replica.catch_up() for replica in replicas))

    monkeypatch.setattr(nats.link, "gather", counted)
    nats.ask(catch_up())
    assert most == READS_AT_ONCE
    assert most * READ_BYTES <= 8 << 20
    for replica in replicas:
        assert files_in(replica.path).keys() == files_in(replicas[0].path).keys() != set()


def test_a_copy_that_asks_a_node_which_lags_behind_misses_nothing(nats: LinkThread, tmp_path: Path) -> None:
    """Who keeps up and gets nothing asks who leads the stream, for one record after the other."""
    log = TestLog(nats, new_log(nats), tmp_path / "leader", seed=SEED)
    log.open()
    log.work(20)
    follower = replica_of(nats, log.names, tmp_path / "follower")

    async def nothing(seq: int, only: str = "") -> list[Stored]:
        return []

    follower._read = nothing  # type: ignore[method-assign]
    assert nats.ask(follower.catch_up()) == last_seq(nats, log.names)
    counts = nats.ask(follower._counts())
    assert {name: follower.records[name] for name in counts} == counts
    assert {name: files_in(follower.path)[name] for name in log.files()} == log.files()
    log.led.abandon()


def test_every_byte_is_found_by_its_record(nats: LinkThread, tmp_path: Path) -> None:
    """The index of a copy, and that of the leader: from which record on the bytes of a segment are found."""
    log = TestLog(nats, new_log(nats), tmp_path / "leader")
    log.open()
    log.work(40)
    fresh = completed(nats, log.names, tmp_path / "fresh")
    stored = {it.seq: read_record(it.payload) for it in stored_in(nats, log.names)}
    for index in (log.replica.index, fresh.index):
        segments = [name for name in log.files() if name.endswith(".seg") and name.count(".") == 1]
        assert segments
        for name in segments:
            pairs = index.read(name)
            positions, seqs = pairs[::2], pairs[1::2]
            starts = {record.position: seq for seq, record in stored.items() if record.name == name}
            assert positions[0] == 0
            for position, seq in zip(positions, seqs, strict=True):
                assert seq <= starts[position]
    log.kill()


# --- what a folder is worth --------------------------------------------------------------------------


@pytest.fixture
def stopped(nats: LinkThread, tmp_path: Path) -> TestLog:
    """A log that was closed as it should be."""
    log = TestLog(nats, new_log(nats), tmp_path / "leader")
    log.open()
    log.work(40)
    log.led.close(log.now_us)
    return log


def test_a_folder_is_used_again_after_a_clean_stop(stopped: TestLog, nats: LinkThread) -> None:
    before = stopped.files()
    inodes = {name: os.stat(os.path.join(stopped.replica.path, name)).st_ino for name in before}
    again = stopped.again(stopped.folder)
    nats.ask(again.replica.begin())
    assert again.replica.applied == last_seq(nats, stopped.names)
    nats.ask(again.replica.complete())
    assert again.files() == before
    assert {n: os.stat(os.path.join(again.replica.path, n)).st_ino for n in before} == inodes
    assert again.replica.reports == []
    # The note counts once.
    nats.ask(again.replica.begin())
    assert again.replica.applied == 0
    again.open()
    assert sorted(again.served()) == sorted(stopped.living)
    assert not again.engine.damage
    again.led.abandon()


def test_a_folder_that_was_left_behind_goes_on(stopped: TestLog, nats: LinkThread, tmp_path: Path) -> None:
    """Somebody else has led meanwhile."""
    other = stopped.again(tmp_path / "other")
    other.open()
    other.work(40)
    other.led.close(other.now_us)
    again = other.again(stopped.folder)
    nats.ask(again.replica.begin())
    assert 0 < again.replica.applied < last_seq(nats, stopped.names)
    again.open()
    assert sorted(again.served()) == sorted(other.living)
    assert not again.engine.damage
    again.led.abandon()


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("what", ["*", "*.seg", "snapshot-*"])
def test_files_that_somebody_deletes_under_a_broker_that_follows_are_read_again(
    nats: LinkThread, tmp_path: Path, what: str, restarts: bool
) -> None:
    """When it leads: what is not here is no reason to take it out of the stream."""
    log = TestLog(nats, new_log(nats), tmp_path / "leader")
    log.open()
    log.work(40)
    follower = log.again(tmp_path / "follower")
    nats.ask(follower.replica.begin())
    nats.ask(follower.replica.catch_up())
    for path in Path(follower.replica.path).glob(what):
        path.unlink()
    log.kill()
    if restarts:
        follower.replica.leave(nats.ask(follower.replica.catch_up()))
        follower = log.again(tmp_path / "follower")
        nats.ask(follower.replica.begin())
    follower.lead()
    assert sorted(follower.served()) == sorted(log.living)
    assert not follower.engine.damage
    follower.kill()
    fresh = log.again(tmp_path / "fresh")
    fresh.open()
    assert sorted(fresh.served()) == sorted(log.living)
    assert not fresh.engine.damage
    fresh.led.abandon()


def test_a_folder_is_wiped_after_a_kill(nats: LinkThread, tmp_path: Path) -> None:
    log = TestLog(nats, new_log(nats), tmp_path / "leader")
    log.open()
    log.work(20)
    log.send("orders", 5)
    log.kill()
    with open(os.path.join(log.replica.path, log.engine._committer.active.name), "ab") as file:
        file.write(b"never stored")
    again = log.again(log.folder)
    nats.ask(again.replica.begin())
    assert again.replica.applied == 0
    assert again.files() == {}
    again.open()
    found = set(again.served())
    assert found <= log.living
    assert len(log.living - found) <= 5
    assert not again.engine.damage
    again.led.abandon()


@pytest.mark.parametrize("seed", range(SEED, SEED + 4))
@pytest.mark.parametrize("leads", [False, True])
@pytest.mark.parametrize("how", ["killed", "overtaken"])
def test_segments_that_were_finished_are_kept(
    nats: LinkThread, tmp_path: Path, seed: int, leads: bool, how: str
) -> None:
    """By who was killed, and by who led and was overtaken. What it has then is what the stream has."""
    log = TestLog(nats, new_log(nats), tmp_path / "leader", seed=seed)
    log.open()
    one = log if leads else log.again(tmp_path / "follower")
    if not leads:
        nats.ask(one.replica.begin())
    for _ in range(8):
        log.work(10)
        if not leads:
            nats.ask(one.replica.catch_up())
        if log.rng.random() < 0.6:
            one.replica.keep()
            noted = _noted(one)
    assert noted
    log.kill()
    # Whatever else is in the folder is not the stream's, or half written.
    for name in ("00000000000000999999.seg", f"snapshot-{9:020}", name_of_newest(one)):
        with open(os.path.join(one.replica.path, name), "ab") as file:
            file.write(b"never stored")
    other = log.again(tmp_path / "other")
    other.open()
    other.work(12)
    if how == "overtaken":
        one.replica.fall_back()
    else:
        one = other.again(one.folder)
        nats.ask(one.replica.begin())
    assert 0 < one.replica.applied < last_seq(nats, log.names)
    assert set(one.files()) <= set(noted)
    nats.ask(one.replica.catch_up())
    nats.ask(one.replica.drop_removed())
    assert one.replica.reports == []
    assert without_late(one.files(), other.files()) == other.files()
    other.kill()
    heir = other.again(one.folder)
    heir.replica = one.replica
    heir.lead()
    assert sorted(heir.served()) == sorted(other.living)
    assert not heir.engine.damage
    heir.led.abandon()


def _noted(log: TestLog) -> list[str]:
    note = log.folder / "kept"
    return list(json.loads(note.read_text())[2]) if note.exists() else []


def name_of_newest(log: TestLog) -> str:
    return max(name for name in log.files() if name.endswith(".seg") and name.count(".") == 1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder, name: (folder / "kept").write_text("{"),
        lambda folder, name: (folder / "kept").write_text('["", 1, {}, {}]'),
        lambda folder, name: (folder / "log" / name).write_bytes(b"short"),
        lambda folder, name: (folder / "log" / name).unlink(),
        lambda folder, name: (folder / "records" / name).write_bytes(b""),
        lambda folder, name: (folder / "records" / name).unlink(),
    ],
)
def test_what_is_not_as_it_was_noted_is_read_again(
    nats: LinkThread, tmp_path: Path, spoil: Callable[[Path, str], object]
) -> None:
    log = TestLog(nats, new_log(nats), tmp_path / "leader", seed=SEED)
    log.open()
    log.work(60)
    log.replica.keep()
    noted = _noted(log)
    log.kill()
    spoil(log.folder, noted[0])
    again = log.again(log.folder)
    again.open()
    assert sorted(again.served()) == sorted(log.living)
    assert not again.engine.damage
    again.led.abandon()


def test_another_stream_of_the_same_name_is_another_log(stopped: TestLog, nats: LinkThread) -> None:
    delete_stream(nats, stopped.names.stream)
    nats.ask(nats.api.create_stream(stopped.names.stream_settings(1)))
    again = stopped.again(stopped.folder)
    again.open()
    assert again.engine.queues() == []
    assert again.replica.reports == []
    again.led.abandon()


def test_a_stream_that_has_less_than_the_folder_is_reported(stopped: TestLog, nats: LinkThread) -> None:
    note = stopped.folder / "replica"
    stream, applied, *rest = json.loads(note.read_text())
    note.write_text(json.dumps([stream, applied + 7, *rest]))
    again = stopped.again(stopped.folder)
    again.open()
    (damage,) = again.engine.damage
    assert f"ends with record {applied}, and had record {applied + 7}" in damage.text
    again.led.abandon()


@pytest.mark.parametrize(
    "note", ["", "{}", "[]", "7", "null", '{"stream": 1, "applied": 2}', "[1, 2, 3", "\0"]
)
def test_a_note_that_is_none_is_not_believed(stopped: TestLog, nats: LinkThread, note: str) -> None:
    (stopped.folder / "replica").write_text(note)
    again = replica_of(nats, stopped.names, stopped.folder)
    assert again.applied == 0
    assert files_in(again.path) == {}


@pytest.mark.parametrize("harm", ["gone", "cut short", "longer", "added", "index gone"])
def test_a_folder_in_which_somebody_was_is_not_believed(
    stopped: TestLog, nats: LinkThread, harm: str
) -> None:
    """Nothing is lost with it: the stream has it all."""
    log = Path(stopped.replica.path)
    victim = max(log.glob("*.seg"), key=lambda path: path.stat().st_size)
    if harm == "gone":
        victim.unlink()
    elif harm == "cut short":
        os.truncate(victim, victim.stat().st_size - 1)
    elif harm == "longer":
        os.truncate(victim, victim.stat().st_size + 1)
    elif harm == "added":
        (log / "snapshot-00000000000099999999").write_bytes(b"x")
    else:
        next((stopped.folder / "records").iterdir()).unlink()
    again = stopped.again(stopped.folder)
    again.open()
    assert sorted(again.served()) == sorted(stopped.living)
    assert not again.engine.damage
    again.led.abandon()


def test_a_folder_from_which_somebody_leads_is_not_touched(nats: LinkThread, tmp_path: Path) -> None:
    log = TestLog(nats, new_log(nats), tmp_path / "leader")
    log.open()
    log.work(5)
    before = log.files()
    with pytest.raises(LogInUse):
        replica_of(nats, log.names, log.folder)
    assert log.files() == before
    log.work(5)
    assert not log.engine.damage
    log.kill()


# --- half of something -------------------------------------------------------------------------------


class Hand:
    """Writes records one by one."""

    def __init__(self, nats: LinkThread, names: LogNames, writer: int) -> None:
        self._nats = nats
        self._appender = Appender(nats, names, writer, last_seq(nats, names))

    def record(self, kind: Kind, name: str, position: int, data: bytes, *, more: bool = False) -> None:
        self._nats.ask(self._appender._append(kind, name, position, memoryview(data), more=more))


@pytest.mark.parametrize("what", ["file", "folder", "stages"])
def test_a_strangers_message_touches_nothing_that_is_not_of_the_log(
    nats: LinkThread, tmp_path: Path, what: str
) -> None:
    names = new_log(nats)
    Hand(nats, names, 1).record(Kind.WRITE, FILE, 0, b"ours")
    replica = replica_of(nats, names, tmp_path / "copy")
    theirs = Path(replica.path) / what if what == "stages" else tmp_path / "theirs"
    if what == "file":
        theirs.write_bytes(b"theirs")
    else:
        theirs.mkdir()
    nats.ask(nats.api.put(names.file(what if what == "stages" else str(theirs)), b"no record"))
    nats.ask(replica.complete())
    nats.ask(replica.drop_removed())
    assert theirs.exists()
    assert files_in(replica.path) == {FILE: b"ours"}
    assert (replica.reports, replica.unfinished()) == ([], [])


def test_half_a_write_is_passed_over(nats: LinkThread, tmp_path: Path) -> None:
    names = new_log(nats)
    first = Hand(nats, names, 1)
    first.record(Kind.WRITE, FILE, 0, b"whole")
    first.record(Kind.WRITE, FILE, 5, b"half", more=True)
    follower = completed(nats, names, tmp_path / "follower")
    assert files_in(follower.path) == {FILE: b"whole"}
    second = Hand(nats, names, 2)
    second.record(Kind.WRITE, FILE, 5, b"an", more=True)
    second.record(Kind.WRITE, FILE, 7, b"other")
    nats.ask(follower.complete())
    fresh = completed(nats, names, tmp_path / "fresh")
    for replica in (follower, fresh):
        assert files_in(replica.path) == {FILE: b"wholeanother"}
        assert replica.reports == []


def test_a_disk_that_is_full_while_a_file_is_read_anew(
    nats: LinkThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is only half here then is not taken for whole by the next attempt."""
    names = new_log(nats)
    hand = Hand(nats, names, 1)
    hand.record(Kind.WRITE, FILE, 0, b"one ")
    hand.record(Kind.WRITE, FILE, 4, b"two")
    follower = replica_of(nats, names, tmp_path)
    nats.ask(follower.catch_up())
    os.unlink(os.path.join(follower.path, FILE))
    written: list[int] = []

    def write_all(fd: int, data: bytes | memoryview, position: int) -> None:
        written.append(position)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        os.pwrite(fd, data, position)

    monkeypatch.setattr(replica_module, "_write_all", write_all)
    with pytest.raises(OSError, match="No space left"):
        nats.ask(follower.complete())
    nats.ask(follower.complete())
    assert files_in(follower.path) == {FILE: b"one two"}
    assert follower.reports == []


def test_a_write_that_is_half_here_is_not_forgotten_by_a_stop(nats: LinkThread, tmp_path: Path) -> None:
    names = new_log(nats)
    hand = Hand(nats, names, 1)
    hand.record(Kind.WRITE, FILE, 0, b"first ", more=True)
    follower = replica_of(nats, names, tmp_path)
    nats.ask(follower.catch_up())
    follower.leave(follower.applied)
    hand.record(Kind.WRITE, FILE, 6, b"second")
    again = completed(nats, names, tmp_path)
    assert files_in(again.path) == {FILE: b"first second"}
    assert again.reports == []


def test_a_file_of_which_only_some_pieces_came_is_none(nats: LinkThread, tmp_path: Path) -> None:
    """And whoever leads next takes them out."""
    log = TestLog(nats, new_log(nats), tmp_path / "leader")
    log.open()
    log.work(10)
    log.kill()
    hand = Hand(nats, log.names, 1)
    hand.record(Kind.PIECE, "snapshot-00000000000000999999", 0, b"piece", more=True)
    again = log.again(tmp_path / "again")
    again.open()
    assert sorted(again.served()) == sorted(log.living)
    assert not again.engine.damage
    names = {log.names.name_of(it.subject) for it in stored_in(nats, log.names)}
    assert "snapshot-00000000000000999999" not in names
    again.led.close(again.now_us)
    assert set(again.replica.records) == {log.names.name_of(it.subject) for it in stored_in(nats, log.names)}


def test_a_file_that_is_sent_again_is_the_last_one_sent(nats: LinkThread, tmp_path: Path) -> None:
    names = new_log(nats)
    hand = Hand(nats, names, 1)
    hand.record(Kind.PIECE, SNAPSHOT, 0, b"a longer one", more=True)
    hand.record(Kind.PIECE, SNAPSHOT, 12, b" that is whole")
    hand.record(Kind.PIECE, SNAPSHOT, 0, b"short")
    assert files_in(completed(nats, names, tmp_path).path) == {SNAPSHOT: b"short"}


def test_truncating(nats: LinkThread, tmp_path: Path) -> None:
    names = new_log(nats)
    hand = Hand(nats, names, 1)
    hand.record(Kind.WRITE, FILE, 0, b"0123456789")
    hand.record(Kind.TRUNCATE, FILE, 4, b"")
    replica = completed(nats, names, tmp_path)
    assert files_in(replica.path) == {FILE: b"0123"}
    hand.record(Kind.WRITE, FILE, 4, b"abc")
    hand.record(Kind.TRUNCATE, "00000000000000000099.seg", 3, b"")
    nats.ask(replica.complete())
    assert files_in(replica.path) == {FILE: b"0123abc", "00000000000000000099.seg": b"\0\0\0"}
    assert len(replica.reports) == 1


def test_what_was_written_at_a_place_ends_what_stood_behind_it(nats: LinkThread, tmp_path: Path) -> None:
    """A record that nobody could read when the next broker took over may be readable again later."""
    names = new_log(nats)
    Hand(nats, names, 1).record(Kind.WRITE, FILE, 0, b"a long record that could not be read")
    Hand(nats, names, 2).record(Kind.WRITE, FILE, 0, b"short")
    assert files_in(completed(nats, names, tmp_path).path) == {FILE: b"short"}


# --- records that are damaged, or missing ------------------------------------------------------------


class Told(NamedTuple):
    """What a log looks like that was opened on a damaged stream."""

    served: set[bytes]
    reports: list[str]
    damage: list[str]


class Copies:
    """A log with something in it, and copies of its stream that differ in one record."""

    def __init__(self, nats: LinkThread, folder: Path) -> None:
        self._nats = nats
        self._folder = folder
        self._copies = 0
        self.log = TestLog(nats, new_log(nats), folder / "origin", seed=SEED)
        self.log.open()
        self.log.work(30)
        self.log.work(20, trim=False)
        self.log.kill()
        self.stored = stored_in(nats, self.log.names)
        self.records = [read_record(it.payload) for it in self.stored]

    def copy(self, place: int, payload: bytes | None) -> LogNames:
        """With other bytes at this place; None: with nothing there."""
        names = new_log(self._nats)
        for at, it in enumerate(self.stored):
            if at == place and payload is None:
                seq = self._nats.ask(self._nats.api.put(names.file("hole"), b""))
                delete_message(self._nats, names.stream, seq)
                continue
            subject = names.file(self.records[at].name)
            content = payload if at == place and payload is not None else it.payload
            self._nats.ask(self._nats.api.put(subject, content))
        return names

    def opened(self, names: LogNames) -> Told:
        self._copies += 1
        log = self.log.again(self._folder / f"copy-{self._copies}", names)
        log.open()
        served = log.served()
        assert len(served) == len(set(served)), "stored once, and served twice"
        # What nobody is served any more is missed by whoever reads it.
        for queue in log.engine.queues():
            for piece in log.engine.read(queue, 0, EVERYTHING):
                assert {name_of(payload) for payload in piece.messages()} <= set(log.sent)
            list(log.engine.events(queue, 0, EVERYTHING))
        told = Told(set(served), list(log.replica.reports), [damage.text for damage in log.engine.damage])
        for damage in log.engine.damage:
            if damage.queue:
                assert damage.first <= damage.end
        log.led.abandon()
        delete_stream(self._nats, names.stream)
        return told

    def lost_with(self, place: int) -> set[bytes]:
        """The messages that stand in a record, and nowhere else."""
        inside = {payload for payload in self.log.sent if payload in bytes(self.records[place].data)}
        for at, record in enumerate(self.records):
            if at != place:
                inside -= {payload for payload in inside if payload in bytes(record.data)}
        return inside

    def places(self, true: Callable[[int], bool]) -> list[int]:
        return [at for at in range(len(self.records)) if true(at)]

    def check(self, place: int, payload: bytes | None) -> Told:
        told = self.opened(self.copy(place, payload))
        record = self.records[place]
        what = f"seed {SEED}, record {place} of {record.name} at {record.position}"
        lost = self.log.living - told.served
        # A file of which nothing is left is one that retention took, unless something in it was alive.
        alone = [it.name for it in self.records].count(record.name) == 1 and payload is None
        silent = alone and not lost and place < len(self.records) - 1
        assert told.reports or told.damage or silent, f"{what}: nothing is reported"
        assert lost <= self.lost_with(place), f"{what}: more is lost than was in it"
        assert told.served <= set(self.log.sent), f"{what}: something is invented"
        if not record.name.startswith("snapshot-") and lost:
            assert any("offsets" in text for text in told.damage) or place == len(self.records) - 1, what
        return told


@pytest.fixture(scope="module")
def copies(nats: LinkThread, tmp_path_factory: pytest.TempPathFactory) -> Copies:
    return Copies(nats, tmp_path_factory.mktemp("copies"))


def flipped(payload: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(payload)
    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def chosen(copies: Copies) -> list[int]:
    """The first, the last, the first and last of a segment, of a snapshot, and some others."""
    records = copies.records
    rng = random.Random(SEED)
    starts = copies.places(lambda at: records[at].position == 0 and records[at].kind is Kind.WRITE)
    ends = [start - 1 for start in starts[1:]]
    snapshots = copies.places(lambda at: records[at].name.startswith("snapshot-"))
    compacted = copies.places(lambda at: ".1.seg" in records[at].name)
    others = rng.sample(range(len(records)), min(16, len(records)))
    places = {
        0,
        len(records) - 1,
        starts[-1],
        ends[-1],
        snapshots[-1],
        snapshots[0],
        *compacted[-1:],
        *others,
    }
    return sorted(places)


def test_a_copy_of_the_stream_is_the_same_log(copies: Copies) -> None:
    """What the tests that follow stand on."""
    names = copies.copy(-1, None)
    told = copies.opened(names)
    assert told == (copies.log.living, [], [])


def test_a_record_with_a_flipped_bit_is_reported_and_never_served(copies: Copies) -> None:
    rng = random.Random(SEED)
    for place in chosen(copies):
        told = copies.check(place, flipped(copies.stored[place].payload, rng))
        assert any("it is not used" in text for text in told.reports), f"seed {SEED}, record {place}"
        assert set(told.reports) <= set(told.damage)


def test_a_missing_record_is_reported(copies: Copies) -> None:
    for place in chosen(copies):
        copies.check(place, None)


def test_a_record_in_the_wrong_place_is_not_used(copies: Copies) -> None:
    """Whole, and of another file."""
    files = {record.name for record in copies.records}
    assert len(files) > 2
    place = next(at for at, record in enumerate(copies.records) if record.kind is Kind.PIECE)
    other = next(
        it.payload for it, r in zip(copies.stored, copies.records, strict=True) if r.kind is Kind.WRITE
    )
    told = copies.check(place, other)
    assert any("stands in" in text for text in told.reports)


def test_an_older_snapshot_is_used(copies: Copies) -> None:
    """And no message is lost."""
    snapshots = copies.places(lambda at: copies.records[at].name.startswith("snapshot-"))
    assert len({copies.records[at].name for at in snapshots}) >= 2
    told = copies.check(snapshots[-1], flipped(copies.stored[snapshots[-1]].payload, random.Random(SEED)))
    assert told.served == copies.log.living


def test_a_lost_end_of_a_write_leaves_its_beginning(nats: LinkThread, tmp_path: Path) -> None:
    """Its writer went on, so it had been whole."""
    names = new_log(nats)
    hand = Hand(nats, names, 1)
    hand.record(Kind.WRITE, FILE, 0, b"one ", more=True)
    hand.record(Kind.WRITE, FILE, 4, b"two ")
    hand.record(Kind.WRITE, FILE, 8, b"three")
    delete_message(nats, names.stream, 2)
    replica = completed(nats, names, tmp_path)
    assert files_in(replica.path) == {FILE: b"one \0\0\0\0three"}
    assert "bytes 4 to 7" in replica.reports[0]


def test_a_damaged_end_of_the_last_write_leaves_its_beginning(nats: LinkThread, tmp_path: Path) -> None:
    """It is there, and cannot be read: whether its writer was told that it is safe is not known."""
    names = new_log(nats)
    Hand(nats, names, 1).record(Kind.WRITE, FILE, 0, b"one ", more=True)
    nats.ask(nats.api.put(names.file(FILE), b"no record"))
    replica = completed(nats, names, tmp_path)
    assert files_in(replica.path) == {FILE: b"one "}
    assert "it is not used" in replica.reports[0]


def test_a_long_file_is_read_anew_without_a_gap(
    nats: LinkThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "READ_MESSAGES", 2)
    names = new_log(nats)
    hand = Hand(nats, names, 1)
    for at in range(7):
        hand.record(Kind.WRITE, FILE, at, b"%d" % at)
    nats.ask(nats.api.put(names.file(FILE), b"no record"))
    replica = completed(nats, names, tmp_path)
    assert files_in(replica.path) == {FILE: b"0123456"}
    assert len(replica.reports) == 1
    assert "record 8" in replica.reports[0]


# --- the store of a node -----------------------------------------------------------------------------


def damage_store(node: Node, names: LogNames, content: bytes) -> None:
    """One flipped bit in the one place of a stopped node's store that has these bytes."""
    found = 0
    for path in node.folder.glob(f"store/jetstream/**/{names.stream}/msgs/*.blk"):
        data = bytearray(path.read_bytes())
        at = data.find(content)
        if at >= 0:
            found += 1
            data[at + len(content) // 2] ^= 4
            path.write_bytes(data)
    assert found == 1, f"node {node.name} has it {found} times"


CONTENTS = {b"%04d" % n: (b"%04d" % n) * 100 for n in range(20)}


def write_contents(nats: LinkThread, names: LogNames) -> None:
    """Four files of five records each."""
    appender = Appender(nats, names, secrets.randbits(60), 0)
    for at, content in enumerate(CONTENTS.values()):
        appender.write(f"{at // 5:020d}.seg", [(at % 5 * 400, content)])


@pytest.mark.parametrize("place", [0, 7, 9, 19], ids=["first", "middle", "last of a file", "very last"])
def test_a_node_that_has_lost_a_record_is_found_out(start: Start, tmp_path: Path, place: int) -> None:
    """It skips what it cannot read and says nothing; it only counts it."""
    cluster = start(1)
    (node,) = cluster.nodes
    with link_at(node.url) as nats:
        names = new_log(nats)
        write_contents(nats, names)
    node.stop()
    damage_store(node, names, CONTENTS[b"%04d" % place])
    node.start()
    cluster.wait_ready()
    with link_at(node.url) as nats:
        replica = completed(nats, names, tmp_path / "copy")
        assert len(stored_in(nats, names)) == 19
        assert any(f"{place // 5:020d}.seg: 1 of 5 records are missing" in text for text in replica.reports)
        files = files_in(replica.path)
        whole = b"".join(CONTENTS.values())
        assert b"".join(files.values()).replace(b"\0", b"") == whole.replace(CONTENTS[b"%04d" % place], b"")
        assert set(replica.records.values()) == {5}  # what is missing counts, and is not looked for again
        # It is told once, and found again by whoever comes next.
        nats.ask(replica.complete())
        assert len(replica.reports) == len(set(replica.reports)) <= 2
        assert completed(nats, names, tmp_path / "other").reports == replica.reports


@pytest.mark.long
def test_one_bad_node_of_three_costs_nothing(start: Start, tmp_path: Path) -> None:
    """Not even when it leads the stream, and others believe what it says."""
    cluster = start(3)
    with link_at(*cluster.urls) as nats:
        names = new_log(nats, 3)
        write_contents(nats, names)
        leader = stream_leader(cluster, names.stream)
    bad = next(node for node in cluster.nodes if node is not leader)
    bad.stop()
    for place in (0, 7, 9, 19):
        damage_store(bad, names, CONTENTS[b"%04d" % place])
    bad.start()
    cluster.wait_ready()
    with link_at(*cluster.urls) as nats:

        def leads() -> bool:
            if stream_leader(cluster, names.stream) is bad:
                return True
            question = {"placement": {"preferred": bad.name}}
            with suppress(JetStreamError):  # it does so already
                nats.ask(nats.api.call(f"STREAM.LEADER.STEPDOWN.{names.stream}", question))
            return False

        wait_for("the bad node leads", leads)
        assert nats.ask(nats.api.message(names.stream, 8)) is None
        began = time.monotonic()
        for attempt in range(5):
            replica = completed(nats, names, tmp_path / f"copy-{attempt}")
            assert replica.reports == []
            assert b"".join(files_in(replica.path).values()) == b"".join(CONTENTS.values())
        assert time.monotonic() - began < 10
        # It can be written to, and what is written is read.
        appender = Appender(nats, names, 5, last_seq(nats, names))
        appender.write("00000000000000000009.seg", [(0, b"new")])
        nats.ask(replica.complete())
        assert files_in(replica.path)["00000000000000000009.seg"] == b"new"
