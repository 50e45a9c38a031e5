"""Queues that are deleted: what a crash may leave of them, and what must never be taken for theirs.

The seeded runs end the power at any call of a simulated disk, in the middle of deletions too, and compare
what is left with what was promised. The others say one thing each.
"""

import logging
import random
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.log.errors import LogFailed, LogRefused, QueueDeleted, QueueUnknown
from penstock.log.info import ReaderInfo
from penstock.log.inspect import inspect_log
from penstock.log.log import Log
from penstock.log.reader import LogReader
from penstock.log.repairs import LAST_NAME
from penstock.log.results import Stored, TransactionDone
from penstock.log.segment import parse_segment_name
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.ids import id_of
from penstock.model.life import Reason
from penstock.model.policy import Policies
from penstock.model.words import Outcome
from tests.log.inline import InlineWorker
from tests.log.old_steps import store_step
from tests.log.simdisk import PowerCut, SimDisk
from tests.log.test_retention import KEEP_NOTHING, Rig

NAMES = ("orders", "mails", "tasks")
FIXED_SEEDS = 150
NOW_US = 1_700_000_000_000_000


@pytest.fixture
def quiet() -> Iterator[None]:
    """Runs break the log on purpose: what it has to say about that is not for people."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# --- seeded runs -------------------------------------------------------------------------------------


class _Life:
    """One queue from its first message to its end: what was sent, what was promised."""

    def __init__(self) -> None:
        self.identity = ""
        self.sent: list[bytes] = []
        self.safe = 0  # so many messages have a receipt
        self.ended = False  # somebody has asked for its end
        self.end_is_safe = False  # and was told that it has come


class _Run:
    """A seed: deletions, messages, trims and snapshots on a disk whose power fails, again and again."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.disk = SimDisk()
        self.now_us = NOW_US
        self.settings = LogSettings(
            segment_bytes=self.rng.choice((1024, 2048, 4096)),
            cache_bytes=0,
            block_bytes=200,
            snapshot_blocks=self.rng.randint(3, 12),
        )
        self.lives: dict[str, list[_Life]] = {name: [] for name in NAMES}
        self.payload_of: dict[bytes, bytes] = {}  # every id that was ever shown
        self.counts = {"deleted": 0, "deleted and safe": 0, "came back": 0, "cut": 0, "segments gone": 0}
        self.engine = self.open()

    def open(self) -> Log:
        self.writer, self.keeper = InlineWorker(), InlineWorker()
        return Log.open(
            self.disk,
            self.now_us,
            settings=self.settings,
            policies=Policies({"*": {"retention-seconds": 0}}),
            writer=self.writer,
            keeper=self.keeper,
        )

    def run(self) -> dict[str, int]:
        for _ in range(4):
            self.disk.cut_after(self.rng.randint(1, 60))
            try:
                for _ in range(self.rng.randint(5, 60)):
                    self.rng.choice((self.send, self.send, self.settle, self.delete, self.work, self.trim))()
            except (PowerCut, LogFailed):
                self.counts["cut"] += 1
            self.begin_again()
        return self.counts

    # --- steps

    def life(self, name: str) -> _Life:
        """The one that takes what is sent now."""
        lives = self.lives[name]
        if not lives or lives[-1].ended:
            lives.append(_Life())
        return lives[-1]

    def send(self) -> None:
        name = self.rng.choice(NAMES)
        life = self.life(name)
        payload = b"%s of life %d, %d" % (name.encode(), len(self.lives[name]), len(life.sent))
        payload += b"." * self.rng.choice((0, 100))

        def receipt(stored: object) -> None:
            if isinstance(stored, Stored):
                life.safe = max(life.safe, stored.end)

        self.engine.append(name, Batch.of([payload]), self.now_us, receipt)
        life.sent.append(payload)
        life.identity = self.engine.describe(name).identity

    def delete(self) -> None:
        names = [name for name in self.engine.queues() if self.rng.random() < 0.5]
        if not names:
            return
        ending = [self.lives[name][-1] for name in names]
        for life in ending:
            life.ended = True

        def confirmed(error: LogFailed | None) -> None:
            for life in ending if error is None else ():
                life.end_is_safe = True
                self.counts["deleted and safe"] += 1

        self.engine.delete(names, self.now_us)
        self.counts["deleted"] += len(names)
        self.engine.confirm(self.now_us, confirmed)

    def settle(self) -> None:
        for name in self.engine.queues():
            for piece in self.engine.take(name, "ann", 3, self.now_us):
                self.show(name, piece.origin, piece.offset_start, piece.messages())
                self.engine.settle(
                    name, "ann", Outcome.ACK, [(piece.offset_start, piece.offset_end)], self.now_us
                )

    def show(self, name: str, origin: bytes, first: int, payloads: list[bytes]) -> None:
        for offset, payload in enumerate(payloads, first):
            known = self.payload_of.setdefault(id_of(origin, offset), payload)
            assert known == payload, f"{name}: an id has named {known!r} and now names {payload!r}"

    def work(self) -> None:
        self.now_us += 1000
        self.engine.flush(self.now_us)
        for worker in (self.writer, self.keeper):
            if self.rng.random() < 0.7:
                worker.step()
        self.engine.poll()

    def trim(self) -> None:
        before = sum(parse_segment_name(name) is not None for name in self.disk.names())
        self.engine.flush(self.now_us)
        self.engine.wait()
        self.engine.trim(self.now_us)
        self.engine.wait()
        after = sum(parse_segment_name(name) is not None for name in self.disk.names())
        self.counts["segments gone"] += after < before

    # --- after a crash

    def begin_again(self) -> None:
        self.disk = self.disk.crash(self.rng)
        self.disk.cut_after(-1)
        self.engine = self.open()
        assert not self.engine.damage, f"a crash is no damage: {self.engine.damage}"
        for name in NAMES:
            self.compare(name)
        numbers = [queue.number for queue in self.engine._state.queues.values()]
        assert len(set(numbers)) == len(numbers)
        for segment in self.engine._state.segments.all:
            assert segment.spans.keys() <= set(numbers), "a segment names a queue that is not there"

    def compare(self, name: str) -> None:
        lives = self.lives[name]
        if not self.engine.has_queue(name):
            for life in lives:
                assert life.ended or not life.safe, (
                    f"{name}: {life.safe} messages of {life.identity} are lost"
                )
                life.ended = life.end_is_safe = True
            # What nobody was promised may never have been: the next one may have its number.
            self.lives[name] = [life for life in lives if life.safe]
            return
        identity = self.engine.describe(name).identity
        at = next(at for at, life in enumerate(lives) if life.identity == identity)
        there = lives[at]
        assert not there.end_is_safe, f"{name}: {identity} is here again, whose end was told"
        for life in lives[:at]:
            assert life.ended, f"{name}: {life.identity} is gone, and nobody has deleted it"
            life.end_is_safe = True
        for life in lives[at + 1 :]:
            assert not life.safe, f"{name}: {life.safe} messages of {life.identity} are lost"
        self.counts["came back"] += there.ended
        there.ended = False
        del lives[at + 1 :]
        end = self.engine.describe(name).offset_end
        assert there.safe <= end <= len(there.sent), f"{name}: {end}, {there.safe} were promised"
        del there.sent[end:]
        there.safe = end
        for piece in self.engine.read(name, 0, end):
            payloads = piece.messages()
            first = piece.offset_start
            assert payloads == there.sent[first : first + len(payloads)], f"{name}: others' messages"
            self.show(name, piece.origin, first, payloads)


def test_a_crash_leaves_a_queue_or_its_end_and_never_something_of_both(quiet: None) -> None:
    total: dict[str, int] = {}
    for seed in range(FIXED_SEEDS):
        try:
            counts = _Run(seed).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        total = {what: total.get(what, 0) + count for what, count in counts.items()}
    # The seeds must have been everywhere, or the runs prove little.
    for what, least in {
        "deleted": 500,
        "deleted and safe": 200,
        "came back": 10,
        "cut": 200,
        "segments gone": 20,
    }.items():
        assert total[what] >= least, total


# --- one thing each ------------------------------------------------------------------------------------


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, {**KEEP_NOTHING})
    yield made
    made.engine.abandon()


def ids(rig: Rig, queue: str) -> list[bytes]:
    slices = rig.engine.read(queue, 0, 1000)
    return [
        id_of(piece.origin, piece.offset_start + i) for piece in slices for i in range(piece.hi - piece.lo)
    ]


def payloads(rig: Rig, queue: str) -> list[bytes]:
    return [payload for piece in rig.engine.read(queue, 0, 1000) for payload in piece.messages()]


def delete(rig: Rig, *queues: str) -> None:
    rig.engine.delete(queues, rig.now_us)
    rig.turn()


def test_a_name_begins_again_at_0_under_another_identity(rig: Rig) -> None:
    rig.send("orders", [b"one", b"two"])
    before, old = rig.engine.describe("orders"), ids(rig, "orders")
    delete(rig, "orders")
    assert not rig.engine.has_queue("orders")
    assert rig.engine.queue_count == 0
    with pytest.raises(QueueUnknown):
        rig.engine.describe("orders")
    rig.send("orders", [b"three"])
    after = rig.engine.describe("orders")
    assert (after.offset_end, after.event_end, after.ready) == (1, 1, 1)
    assert after.identity != before.identity
    assert all(it.startswith(before.identity.encode()) for it in old)
    assert all(it.startswith(after.identity.encode()) for it in ids(rig, "orders"))
    with pytest.raises(QueueDeleted, match="'orders' was deleted, and another of that name stands now"):
        rig.engine.check_same("orders", before.identity)


@pytest.mark.parametrize("snapshots", [0, 1, 3])
@pytest.mark.parametrize("crash", [True, False])
def test_the_highest_number_is_not_given_again(rig: Rig, snapshots: int, crash: bool) -> None:
    rig.send("first", [b"1"])
    seen = set()
    for _ in range(3):
        rig.send("orders", [b"x"])
        seen.add(rig.engine.describe("orders").identity)
        delete(rig, "orders")
        for _ in range(snapshots):
            rig.engine._snapshotter.consider(force=True)
            rig.turn()
        rig.crash() if crash else rig.reopen()
        assert rig.engine.queues() == ["first"]
        assert not rig.engine.damage
    rig.send("orders", [b"x"])
    assert rig.engine.describe("orders").identity not in seen
    assert len(seen) == 3


def test_a_deletion_looks_at_no_transaction_of_other_queues(rig: Rig) -> None:
    """Ten thousand are remembered: to look at each took 15 ms of the loop for every queue that went, and of
    the next start once more."""
    for number in range(300):  # of which 256 are remembered
        parts = [("orders", Batch.of([b"x"])), (f"jobs-{number % 2}", Batch.of([b"y"]))]
        rig.engine.transact(f"relay/a/{number}", parts, rig.now_us)
    rig.turn()
    state = rig.engine._state
    assert len(state.transactions) == 256
    odd, even = ({f"relay/a/{it}" for it in range(44 + at, 300, 2)} for at in (1, 0))
    assert state._keys_in == {"orders": odd | even, "jobs-1": odd, "jobs-0": even}
    delete(rig, "jobs-1")
    assert state._keys_in == {"orders": odd | even, "jobs-0": even}
    before = dict(state.transactions)
    assert [(part[0], part[1] < part[2]) for part in before["relay/a/299"]] == [
        ("orders", True),
        ("jobs-1", False),
    ]
    rig.crash()
    assert rig.engine._state.transactions == before
    assert rig.engine._state._keys_in == {"orders": odd | even, "jobs-0": even}


def test_an_ack_of_the_old_queue_does_not_reach_the_new_one(rig: Rig) -> None:
    rig.send("orders", [b"old"])
    (old,) = rig.engine.take("orders", "ann", 1, rig.now_us)
    delete(rig, "orders")
    rig.send("orders", [b"new"])
    (new,) = rig.engine.take("orders", "ann", 1, rig.now_us)
    assert (old.offset_start, new.offset_start) == (0, 0)
    settled = rig.engine.settle("orders", "ann", Outcome.ACK, [(0, 1)], rig.now_us, origin=old.origin)
    assert settled == []
    assert rig.engine.resume("orders", "bob", [(0, 1)], rig.now_us, origin=old.origin) == []
    assert rig.engine.describe("orders").held == 1


def test_timers_of_a_deleted_queue_end_nothing(rig: Rig) -> None:
    rig.append("orders", Batch.of([b"old"], ttl_seconds=[1]))
    delete(rig, "orders")
    rig.send("orders", [b"new"])
    rig.now_us += 3_600_000_000
    rig.engine.step(3_600_000_000, rig.now_us)
    for _ in range(2):
        rig.now_us += 10_000_000
        assert rig.engine.expire(rig.now_us) == []
        assert rig.engine.describe("orders").ready == 1
        rig.turn()
        rig.crash()


def test_keys_are_remembered_and_their_offsets_are_not(rig: Rig) -> None:
    answers: list[TransactionDone] = []
    parts = [("orders", Batch.of([b"o"])), ("mails", Batch.of([b"m"]))]

    def commit(key: str) -> TransactionDone:
        rig.engine.transact(key, parts, rig.now_us, answers.append)  # type: ignore[arg-type]
        rig.turn()
        return answers[-1]

    commit("spark/query/7")
    store_step(rig.engine, "spark/query/8", parts, 0, rig.now_us)
    rig.turn()
    delete(rig, "orders")
    for _ in range(2):
        repeated = commit("spark/query/7")
        assert repeated.repeated
        assert [part[:3] for part in repeated.stored] == [("orders", 0, 0), ("mails", 0, 1)]
        rig.reopen()
    assert not rig.engine.has_queue("orders")
    store_step(rig.engine, "spark/query/8", parts, 1, rig.now_us, last=True)
    rig.turn()
    ranges = {part[:3]: part.origin for part in rig.engine.transaction("spark/query/8") or ()}
    assert ranges.keys() == {("orders", 0, 0), ("mails", 1, 2), ("orders", 0, 1), ("mails", 2, 3)}
    assert ranges["orders", 0, 1].startswith(rig.engine.describe("orders").identity.encode())


def test_readers_of_a_deleted_queue_hold_nothing_of_the_next(rig: Rig) -> None:
    rig.send("orders", [b"1"] * 5)
    rig.send("mails", [b"1"])
    rig.hold(4)
    rig.hold(0, queue="mails")
    delete(rig, "orders")
    rig.send("orders", [b"1"])
    for _ in range(2):
        assert [(it.name, it.queue) for it in rig.engine.readers()] == [("spark", "mails")]
        rig.crash()
    with pytest.raises(QueueUnknown):
        rig.engine.delete(["nothing"], rig.now_us)
    missing = ReaderInfo("spark", "nothing", "messages", 0, rig.now_us)
    with pytest.raises(QueueUnknown):
        rig.engine.hold_retention(missing, rig.now_us)


def test_repaired_payloads_go_with_their_queue(rig: Rig) -> None:
    rig.send("orders", [b"bad"])
    rig.engine.take("orders", "ann", 1, rig.now_us)
    rig.engine.settle("orders", "ann", Outcome.REJECT, [(0, 1)], rig.now_us)
    batch = Batch.of([b"good"])
    batch.repairs = array("q", [0])
    rig.engine.transact("", [("orders", batch)], rig.now_us)
    rig.turn()
    assert len(rig.engine._state.queues) == 2
    delete(rig, "orders")
    for _ in range(2):
        assert list(rig.engine._state.queues) == [LAST_NAME]
        assert (rig.engine._state.repair_queues, rig.engine.queue_count) == (1, 0)
        assert not rig.engine.damage
        rig.crash()
    rig.send("orders", [b"new"])
    (piece,) = rig.engine.take("orders", "ann", 1, rig.now_us)
    assert piece.messages() == [b"new"]


def segments(rig: Rig) -> int:
    return sum(parse_segment_name(path.name) is not None for path in rig.folder.iterdir())


def test_its_segments_go_though_nobody_has_settled_a_message(rig: Rig) -> None:
    for _ in range(40):
        rig.send("orders", [b"x" * 900])
    full = segments(rig)
    assert full > 8
    delete(rig, "orders")
    for _ in range(3):
        rig.send("mails", [b"y" * 900] * 4)
        rig.trim()
    assert segments(rig) < full / 2
    assert payloads(rig, "mails") == [b"y" * 900] * 12
    assert inspect_log(str(rig.folder)).defects == []


def test_what_others_have_in_its_segments_is_compacted(rig: Rig) -> None:
    for number in range(40):
        rig.send("orders", [b"x" * 900])
        if number % 4 == 0:
            rig.send("mails", [b"%d" % number])
    rig.reopen()
    before = rig.engine.info().log_bytes
    delete(rig, "orders")
    rig.reopen()  # What was dropped is known from the snapshot, too.
    for _ in range(3):
        rig.send("tasks", [b"y" * 900] * 4)
        rig.trim()
    assert rig.engine.info().log_bytes < before / 2
    assert payloads(rig, "mails") == [b"%d" % number for number in range(0, 40, 4)]
    rig.crash()
    assert not rig.engine.damage
    assert rig.engine.describe("mails").ready == 10
    assert inspect_log(str(rig.folder)).defects == []


def test_a_segment_that_was_being_compacted_names_no_deleted_queue(rig: Rig) -> None:
    for number in range(30):
        rig.send("orders", [b"x" * 900])
        rig.engine.take("orders", "ann", 1, rig.now_us)
        rig.engine.settle("orders", "ann", Outcome.ACK, [(number, number + 1)], rig.now_us)
        if number % 4 == 0:
            rig.send("mails", [b"m"])
    rig.send("tasks", [b"y" * 900] * 8)
    rig.turn()
    rig.engine.trim(rig.now_us)
    rig.writer.wait()
    while len(rig.keeper):  # a copy that was planned when mails was there
        rig.keeper.step()
        if any(path.name.endswith(".tmp") for path in rig.folder.iterdir()):
            break
    else:
        pytest.fail("nothing was compacted")
    rig.engine.delete(["mails"], rig.now_us)
    rig.engine.flush(rig.now_us)
    rig.engine.wait()
    rig.trim()
    known = set(rig.engine._state.by_number)
    assert all(segment.spans.keys() <= known for segment in rig.engine._state.segments.all)
    rig.crash()
    assert rig.engine.queues() == ["orders", "tasks"]
    assert not rig.engine.damage


# --- who reads the files ---------------------------------------------------------------------------------


def test_readers_of_the_files_see_the_end_and_the_next_one(rig: Rig) -> None:
    rig.send("orders", [b"one", b"two"])
    with LogReader(str(rig.folder)) as reader:
        old = reader.identity("orders")
        delete(rig, "orders")
        reader.refresh()
        assert reader.queues() == {}
        rig.send("orders", [b"three"])
        reader.refresh()
        assert reader.identity("orders") not in ("", old)
        assert [it for block in reader.messages("orders", 0) for it in block.messages()] == [b"three"]
    rig.reopen()
    delete(rig, "orders")
    rig.reopen()
    with LogReader(str(rig.folder)) as reader:
        assert reader.queues() == {}
        with pytest.raises(LogRefused, match="no queue 'orders'"):
            reader.identity("orders")


def test_a_walk_that_is_under_way_does_not_go_on_in_the_next_one(rig: Rig) -> None:
    for number in range(20):
        rig.send("orders", [b"old %d" % number + b"." * 900])
    with LogReader(str(rig.folder), maps_max=1) as reader:
        walk = reader.messages("orders", 0)
        first = next(walk).messages()
        assert first[0].startswith(b"old 0")
        delete(rig, "orders")
        for number in range(20):
            rig.send("orders", [b"new %d" % number + b"." * 900])
            rig.trim()
        reader.refresh()
        seen: list[bytes] = []
        with pytest.raises(QueueDeleted, match="'orders' was deleted"):
            seen.extend(payload for block in walk for payload in block.messages())
        assert all(payload.startswith(b"old") for payload in seen)


def test_verify_finds_nothing_wrong(rig: Rig) -> None:
    for _ in range(10):
        rig.send("orders", [b"x" * 900])
        rig.send("mails", [b"x" * 100])
    delete(rig, "orders", "mails")
    rig.send("orders", [b"x" * 900])
    assert inspect_log(str(rig.folder)).defects == []
    rig.reopen()
    for _ in range(3):
        rig.send("tasks", [b"y" * 900] * 4)
        rig.trim()
    report = inspect_log(str(rig.folder))
    assert report.defects == []
    assert report.queues == 2


def test_damage_of_a_deleted_queue_is_not_said_of_the_next(rig: Rig) -> None:
    rig.send("orders", [b"one"])
    queue = rig.engine._state.queues["orders"]
    rig.engine._state.messages_missing(queue, 0, 1)
    delete(rig, "orders")
    rig.send("orders", [b"two"])
    for _ in range(2):
        assert len(rig.engine.damage) == 1
        assert rig.engine.damage[0].queue == ""
        assert rig.engine.describe("orders").ready == 1
        rig.crash()


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_deletion_whose_record_is_damaged_takes_nothing_of_the_next_one(rig: Rig, snapshot: bool) -> None:
    """The first queue is there again, by another name, and so is what its letters were repaired with."""
    letters = Batch.of([b"one", b"two"])
    letters.dead = Reason.REJECTED
    rig.engine.transact("", [("orders", letters)], rig.now_us)
    repaired = Batch.of([b"right one", b"right two"])
    repaired.repairs = array("q", [0, 1])
    rig.engine.transact("", [("orders", repaired)], rig.now_us)
    delete(rig, "orders")
    rig.send("orders", [b"three"])
    delete(rig, "orders")
    rig.send("others", [b"x"])
    rig.turn()
    rig.engine.abandon()
    for path in rig.folder.glob("snapshot-*"):
        path.unlink()
    path = min(rig.folder.glob("*.seg"))
    data = bytearray(path.read_bytes())
    data[data.index(b'"delete"')] = 0
    path.write_bytes(data)
    rig.engine = rig.open()
    assert len(rig.engine.damage) == 1
    if snapshot:
        rig.reopen()
    assert rig.engine.queues() == ["unknown-1", "others"]
    with LogReader(str(rig.folder)) as reader:
        assert list(reader.queues()) == ["unknown-1", "others"]
    got = rig.take("unknown-1")
    assert [it.payload for it in got] == [b"right one", b"right two"]
    rig.ack("unknown-1", got)
    delete(rig, "unknown-1")
    rig.crash()
    assert rig.engine.queues() == ["others"]
    assert rig.engine.queue_count == 1
