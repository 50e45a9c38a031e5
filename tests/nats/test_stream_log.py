"""Nothing confirmed is lost, and nothing is stored twice: crashes, takeovers, and nodes that die.

The crash runs are those of the embedded log (`tests/log/crash.py` says what must hold), on a stream: a
life ends between any two records, also of one write, or when a record is stored and nobody has been told.
What is left is copied to another stream, opened there from an empty folder, and compared with the model.
"""

import logging
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.log.errors import LogError, LogFailed
from penstock.log.jetstream import stream_log as module
from penstock.log.jetstream.appender import Appender, Overtaken
from penstock.log.jetstream.cluster import Cluster
from penstock.log.jetstream.errors import JetStreamTrouble
from penstock.log.jetstream.link_thread import LinkThread
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.records import Kind, read_record
from penstock.log.jetstream.replica import Replica
from penstock.log.jetstream.servers import parse_server
from penstock.log.jetstream.stream_log import StreamLog, open_stream_log
from penstock.log.results import Stored
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from tests.log.crash import kind_of_file
from tests.log.crash_model import SECOND_US, QueueModel
from tests.log.crash_steps import POLICIES, Steps
from tests.log.inline import InlineWorker
from tests.log.simdisk import PowerCut, SimDisk
from tests.nats.cluster import stream_leader
from tests.nats.conftest import Start
from tests.nats.streams import (
    Later,
    TestLog,
    delete_stream,
    last_seq,
    link_at,
    new_log,
    silence,
    stored_in,
    wait_for,
)

SEED = int(os.environ.get("PENSTOCK_TEST_SEED", 20_261_115))
RUNS = 20
CANARY_RUNS = 30
LIVES_MAX = 5
STEPS_MAX = (15, 60, 120)
CLOSE_SECONDS = 1.0
BOUND_SECONDS = 15.0


@pytest.fixture(scope="module")
def nats(node: Cluster) -> Iterator[LinkThread]:
    with link_at(node.nodes[0].url) as nats:
        yield nats


# --- crashes -----------------------------------------------------------------------------------------


class Fuse(SimDisk):
    """What the steps of a run take for their disk: of it they only ask that the power fails."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.piece_bytes = 1 << 20
        self.burnt = False
        self.stop_after = -1  # the appender is stopped then, as somebody who loses the lease does

    def burn(self) -> bool:
        """Whether the process dies at this record; it then does so before it is sent, or behind it."""
        if self.burnt:
            raise PowerCut
        self._cut_after -= 1
        self.burnt = self._cut_after == 0
        if self.burnt and self.rng.random() < 0.5:
            raise PowerCut
        return self.burnt


class MortalAppender(Appender):
    """Dies when its fuse has burnt down; and has room for little in a record."""

    fuse: Fuse

    @property
    def bytes_max(self) -> int:
        return self.fuse.piece_bytes

    async def _append(self, kind: Kind, name: str, position: int, data: memoryview, *, more: bool) -> None:
        self.fuse.calls.append((kind.name.lower(), name))
        self.fuse.stop_after -= 1
        if self.fuse.stop_after == 0:
            self.stop()
        dies = self.fuse.burn()
        await super()._append(kind, name, position, data, more=more)
        if dies:
            raise PowerCut

    async def _try_purge(self, name: str, before_seq: int) -> tuple[int, str]:
        self.fuse.calls.append(("remove", name))
        dies = self.fuse.burn()
        done = await super()._try_purge(name, before_seq)
        if dies:
            raise PowerCut
        return done


class HastyAppender(MortalAppender):
    """The canary: says that a record is stored when it is only about to be sent."""

    late: tuple[Kind, str, int, memoryview, bool] | None = None

    async def _append(self, kind: Kind, name: str, position: int, data: memoryview, *, more: bool) -> None:
        late, self.late = self.late, (kind, name, position, data, more)
        if late is not None:
            kind, name, position, data, more = late
            await super()._append(kind, name, position, data, more=more)


class Run(Steps):
    """One seed: a stream, a log on it, and the model of both."""

    disk: Fuse
    led: StreamLog

    def __init__(self, seed: int, nats: LinkThread, folder: Path, appender: type[MortalAppender]) -> None:
        rng = random.Random(seed)
        super().__init__(rng)
        self._nats = nats
        self._folder = folder
        self._folders = 0
        self._appender = appender
        self._streams: list[LogNames] = []
        self._names = self._new_stream()
        self._overtaken: list[tuple[StreamLog, InlineWorker, InlineWorker]] = []  # and not told so
        self._replica: Replica | None = None  # of a life that was closed: its folder is gone on from
        self.settings = LogSettings(
            segment_bytes=rng.choice((1024, 2048, 2048, 4096, 8192)),
            cache_bytes=rng.choice((0, 1000, 8000)),
            block_bytes=rng.choice((64, 200, 1000)),
            interval_us=SECOND_US // 2,
            snapshot_blocks=rng.randint(5, 20),
        )

    def run(self) -> None:
        try:
            self.disk = Fuse(self.rng)
            self.led = self.open(self._names, self.disk)
            self.engine = self.led.log
            for _ in range(self.rng.randint(2, LIVES_MAX)):
                self.live()
                self.end()
                self.begin_again()
            self.led.abandon()
            assert not self._overtaken
        finally:
            for names in self._streams:
                delete_stream(self._nats, names.stream)

    def _new_stream(self) -> LogNames:
        names = new_log(self._nats)
        self._streams.append(names)
        return names

    def open(self, names: LogNames, fuse: Fuse) -> StreamLog:
        self.disk = fuse
        workers = self.writer, self.keeper = InlineWorker(), InlineWorker()
        turns = iter(workers)

        class Fused(self._appender):  # type: ignore[name-defined,misc] # a class that is chosen by the test
            pass

        Fused.fuse = fuse
        if self._replica is None:
            self._folders += 1
            folder = str(self._folder / str(self._folders))
            self._replica = Replica(self._nats.api, names, folder)
        replica, self._replica = self._replica, None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "Appender", Fused)
            patch.setattr(module, "ThreadWorker", lambda name, wake: next(turns))
            self._nats.ask(replica.begin())
            return open_stream_log(
                self._nats,
                names,
                replica,
                self.now_us,
                settings=self.settings,
                policies=POLICIES,
                wake=lambda: None,
            )

    def live(self) -> None:
        """Work until something ends it."""
        rng, counts = self.rng, self.model.counts
        self.full_allowed = False
        self.disk.piece_bytes = rng.choice((150, 400, 1 << 20))
        if rng.random() < 0.6:
            self.disk.cut_after(rng.randint(1, 20))
        elif rng.random() < 0.2:
            self.disk.stop_after = rng.randint(1, 30)
        weights, steps = zip(*self.weighted, strict=True)
        try:
            for step in rng.choices(steps, weights, k=rng.randint(3, rng.choice(STEPS_MAX))):
                step()
            if rng.random() < 0.25:
                self.led.close(self.now_us)
                counts["closed"] += 1
                if self.engine.failed is None:
                    self.model.all_safe()
                    self._replica = self.led.replica
        except PowerCut:
            counts["cut within a call"] += 1
        except LogFailed:
            counts["failed"] += 1

    def end(self) -> None:
        """Whatever has not reached the stream is gone; everything is compared, on a copy."""
        self.model.counts["ends"] += 1
        for call, name in self.disk.calls:
            self.model.counts[f"{call} {kind_of_file(name)}"] += 1
        closed, self._replica = self._replica, None
        if closed is None:
            if self.disk.burnt or self.engine.failed is not None or self.rng.random() < 0.5:
                self.led.abandon()
            else:
                self.disk.cut_after(-1)
                self._overtaken.append((self.led, self.writer, self.keeper))
        stored = stored_in(self._nats, self._names)
        records = [read_record(it.payload) for it in stored]
        self.model.counts["ends within a write"] += bool(records) and records[-1].more
        copy = self._new_stream()
        for it, record in zip(stored, records, strict=True):
            self._nats.ask(self._nats.api.put(copy.file(record.name), it.payload))
        led = self.open(copy, Fuse(self.rng))
        self.checker.after_end(led.log, killed=False)
        led.abandon()
        self.model.all_safe()
        self._replica = closed

    def begin_again(self) -> None:
        """The next opening of the log, during which the process may die too."""
        while True:
            fuse = Fuse(self.rng)
            if self.rng.random() < 0.3:
                fuse.cut_after(self.rng.randint(1, 6))
            try:
                self.led = self.open(self._names, fuse)
                self.engine = self.led.log
                break
            except PowerCut:
                self.model.counts["cut while opening"] += 1
        fuse.cut_after(-1)
        self.model.opened()
        self.checker.due(self.engine)
        self.go_on_overtaken()

    def go_on_overtaken(self) -> None:
        """Who led before was only slow, and goes on with what it was about to do."""
        before = last_seq(self._nats, self._names)

        def show(queue: QueueModel, origin: bytes, first: int, end: int) -> None:
            there = end <= len(queue.messages)
            assert there or queue.durability != "commit", (
                f"{queue.name}: {first} to {end} LOST by an overtaken"
            )

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.model, "show", show)
            patch.setattr(self.model, "confirm", lambda *about, safe: None)
            for led, writer, keeper in self._overtaken:
                self.model.counts["overtaken"] += 1
                led.log.flush(self.now_us)
                for _ in range(self.rng.randint(1, 6)):
                    keeper.step()
                    writer.step()
                    led.log.poll()
                led.abandon()
        self._overtaken = []
        assert last_seq(self._nats, self._names) == before, "it has written behind somebody else"


def run(seed: int, nats: LinkThread, folder: Path, appender: type[MortalAppender]) -> "Counter[str]":
    attempt = Run(seed, nats, folder / str(seed), appender)
    try:
        attempt.run()
    except Exception as error:
        raise AssertionError(f"PENSTOCK_TEST_SEED={seed}: {type(error).__name__}: {error}") from error
    return attempt.model.counts


@pytest.fixture
def quiet() -> Iterator[None]:
    """Runs break the log on purpose: what it has to say about that is not for people."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("quiet")
def test_nothing_confirmed_is_lost(nats: LinkThread, tmp_path: Path) -> None:
    total: Counter[str] = Counter()
    for seed in range(SEED, SEED + RUNS):
        total += run(seed, nats, tmp_path, MortalAppender)
    # The seeds must have been everywhere, or the runs prove little.
    for what, least in {
        "ends": 40,
        "cut within a call": 8,
        "receipts": 30,
        "ends within a write": 2,
        "overtaken": 4,
        "write .seg": 100,
        "piece snapshot": 20,
        "remove snapshot": 5,
    }.items():
        assert total[what] >= least, f"{what}: {total[what]} times in {RUNS} runs from seed {SEED}: {total}"


@pytest.mark.usefixtures("quiet")
def test_a_record_that_is_confirmed_before_it_is_stored_is_caught(nats: LinkThread, tmp_path: Path) -> None:
    for seed in range(CANARY_RUNS):
        try:
            run(seed, nats, tmp_path, HastyAppender)
        except AssertionError as broken:
            if "LOST" in str(broken) or "were promised" in str(broken) or "were synced" in str(broken):
                return
    pytest.fail(f"the canary sings: {CANARY_RUNS} runs have not noticed")


# --- takeover ----------------------------------------------------------------------------------------


class Receipts:
    """What a log has said of the messages that it was given."""

    def __init__(self) -> None:
        self.stored: list[bytes] = []
        self.failed: list[bytes] = []

    def append(self, log: TestLog, payload: bytes) -> None:
        log.sent[payload] = "orders"

        def receipt(result: Stored | LogError) -> None:
            if isinstance(result, LogError):
                assert isinstance(result, LogFailed), result
                self.failed.append(payload)
            else:
                self.stored.append(payload)

        log.engine.append("orders", Batch.of([payload]), log.now_us, receipt)


def test_whoever_opens_the_log_ends_the_one_who_had_it(nats: LinkThread, tmp_path: Path) -> None:
    names = new_log(nats)
    first = TestLog(nats, names, tmp_path / "first")
    receipts = Receipts()
    first.open()
    for number in range(50):
        receipts.append(first, b"<%d>" % number)
        first.engine.flush(first.now_us)
    first.engine.wait()
    assert len(receipts.stored) == 50
    second = first.again(tmp_path / "second")
    second.open()
    before = stored_in(nats, names)
    for number in range(50, 60):
        receipts.append(first, b"<%d>" % number)
    first.engine.flush(first.now_us)
    first.engine.wait()
    assert receipts.failed == [b"<%d>" % number for number in range(50, 60)]
    assert isinstance(first.engine.failed, LogFailed)
    assert isinstance(_root_of(first.engine.failed), Overtaken)
    for _ in range(2):
        with pytest.raises(LogFailed):
            receipts.append(first, b"<late>")
    first.led.close(first.now_us)
    assert stored_in(nats, names) == before, "it has written after somebody else"
    assert not (first.folder / "replica").exists(), "its folder must not be gone on from"
    assert sorted(second.served()) == sorted(receipts.stored)
    assert not second.engine.damage
    # And the other way round: the first one comes again.
    third = second.again(first.folder)
    third.open()
    receipts.append(third, b"<third>")
    third.engine.flush(third.now_us)
    third.engine.wait()
    second.send("orders", 1)
    second.engine.flush(second.now_us)
    second.engine.wait()
    assert second.engine.failed is not None
    second.led.abandon()
    assert sorted(third.served()) == sorted(receipts.stored)
    third.led.abandon()


def _root_of(error: BaseException) -> BaseException:
    """What it began with. A compiled `raise … from` leaves only the context."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def test_overtaken_while_it_opens(nats: LinkThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two open the log at once: one of them leads, and the other can say so and try again."""
    names = new_log(nats)
    origin = TestLog(nats, names, tmp_path / "origin")
    origin.open()
    origin.work(10)
    origin.led.close(origin.now_us)
    quick, slow = origin.again(tmp_path / "quick"), origin.again(tmp_path / "slow")
    complete = Replica.complete

    async def delayed(replica: Replica) -> int:
        last = await complete(replica)
        if replica is slow.replica:
            monkeypatch.setattr(Replica, "complete", complete)
            opened.append(Later(quick.open))
            while last == (await nats.api.stream(names.stream))["state"]["last_seq"]:
                pass
        return last

    opened: list[Later] = []
    monkeypatch.setattr(Replica, "complete", delayed)
    before = set(threading.enumerate())
    with pytest.raises(LogFailed):
        slow.open()
    opened[0].result()
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert left <= {"penstock-writer", "penstock-keeper"}
    assert len(set(threading.enumerate()) - before) <= 2, "threads of the one that failed are left"
    assert sorted(quick.served()) == sorted(origin.living)
    quick.led.close(quick.now_us)
    slow.open()
    assert sorted(slow.served()) == sorted(origin.living)
    assert not slow.engine.damage
    slow.led.abandon()
    assert set(threading.enumerate()) <= before


# --- the end while NATS is out of reach --------------------------------------------------------------


@pytest.mark.parametrize("how", ["dead", "silent"])
@pytest.mark.long
def test_closing_without_nats_ends_and_leaves_nothing(start: Start, tmp_path: Path, how: str) -> None:
    cluster = start(1)
    (node,) = cluster.nodes
    before = set(threading.enumerate())
    nats = LinkThread.open([parse_server(node.url)])
    log = TestLog(nats, new_log(nats), tmp_path / "leader")
    receipts = Receipts()
    log.open()
    log.work(10)
    node.kill() if how == "dead" else silence(node)
    receipts.append(log, b"<late>")
    log.engine.flush(log.now_us)
    wait_for("it waits", lambda: log.led.appender.trouble)
    began = time.monotonic()
    log.led.close_within(CLOSE_SECONDS, log.now_us)
    assert time.monotonic() - began < BOUND_SECONDS
    assert receipts.failed == [b"<late>"]
    began = time.monotonic()
    nats.close()
    assert time.monotonic() - began < BOUND_SECONDS
    assert set(threading.enumerate()) <= before
    if how == "dead":
        node.start()
    else:
        node.resume()
    cluster.wait_ready()
    with link_at(node.url) as nats:
        again = TestLog(nats, log.names, log.folder)
        nats.ask(again.replica.begin())
        assert again.replica.applied == 0, "a folder that has more than the stream is not gone on from"
        again.open()
        served = again.served()
        assert set(served) - {b"<late>"} == log.living - {b"<late>"}
        again.led.abandon()


def test_abandoning_without_nats_ends(start: Start, tmp_path: Path) -> None:
    cluster = start(1)
    (node,) = cluster.nodes
    before = set(threading.enumerate())
    with link_at(node.url) as nats:
        log = TestLog(nats, new_log(nats), tmp_path / "leader")
        log.open()
        log.work(10)
        silence(node)
        log.send("orders", 3)
        log.engine.flush(log.now_us)
        began = time.monotonic()
        log.led.abandon()
        assert time.monotonic() - began < BOUND_SECONDS
        assert log.files() == {}
        node.resume()
    assert set(threading.enumerate()) <= before


def test_opening_without_nats_ends_when_the_link_does(start: Start, tmp_path: Path) -> None:
    cluster = start(1)
    (node,) = cluster.nodes
    before = set(threading.enumerate())
    with link_at(node.url) as nats:
        log = TestLog(nats, new_log(nats), tmp_path / "leader")
        nats.ask(log.replica.begin())
        complete = log.replica.complete

        async def then_silence() -> int:
            last = await complete()
            silence(node)
            return last

        log.replica.complete = then_silence  # type: ignore[method-assign] # the moment that matters
        opening = Later(lambda: open_stream_log(nats, log.names, log.replica, log.now_us, wake=lambda: None))
        wait_for("the writer has begun", lambda: _thread("penstock-writer") is not None)
        nats.close()
        with pytest.raises((LogFailed, JetStreamTrouble)):
            opening.result(BOUND_SECONDS)
        node.resume()
    assert set(threading.enumerate()) <= before


def _thread(name: str) -> threading.Thread | None:
    return next((thread for thread in threading.enumerate() if thread.name == name), None)


# --- nodes that die ----------------------------------------------------------------------------------


class Sender:
    """Sends numbered messages all the time, from the one thread that its engine belongs to."""

    OPEN_MAX = 40
    BATCH = 10

    def __init__(self, log: TestLog) -> None:
        self._log = log
        self._enough = threading.Event()
        self._sent = 0
        self._open = 0
        self.confirmed: list[bytes] = []
        self._later = Later(self._run)

    def _run(self) -> None:
        engine = self._log.engine
        while not self._enough.is_set():
            while self._open < self.OPEN_MAX:
                self._send()
            engine.flush(self._log.now_us)
            engine.poll()
            self._enough.wait(0.001)
        engine.flush(self._log.now_us)
        engine.wait()

    def _send(self) -> None:
        payloads = [b"<%d>" % number for number in range(self._sent, self._sent + self.BATCH)]
        self._sent += self.BATCH
        self._open += 1

        def receipt(result: Stored | LogError) -> None:
            assert isinstance(result, Stored), result
            self._open -= 1
            self.confirmed += payloads

        self._log.engine.append("orders", Batch.of(payloads), self._log.now_us, receipt)

    def goes_on(self) -> float:
        """Seconds until something that was sent from now on is confirmed."""
        began = time.monotonic()
        enough = len(self.confirmed) + 2 * self.OPEN_MAX * self.BATCH
        wait_for("messages are confirmed again", lambda: len(self.confirmed) > enough or not self.alive)
        assert self.alive
        return time.monotonic() - began

    @property
    def alive(self) -> bool:
        return self._later.is_alive()

    def stop(self) -> int:
        """How many were sent."""
        self._enough.set()
        self._later.result()
        return self._sent


@pytest.mark.long
def test_nodes_that_die_cost_time_and_no_message(start: Start, tmp_path: Path) -> None:
    cluster = start(3)
    took: dict[str, float] = {}
    with link_at(*cluster.urls) as nats:
        log = TestLog(nats, new_log(nats, 3), tmp_path / "leader")
        log.open()
        sender = Sender(log)
        took["no harm"] = sender.goes_on()
        for harm in ("kill -9 of the leader", "kill -9 of the next leader"):
            leader = stream_leader(cluster, log.names.stream)
            assert leader is not None
            leader.kill()
            took[harm] = sender.goes_on()
            leader.start()
            cluster.wait_ready()
        leader = stream_leader(cluster, log.names.stream)
        assert leader is not None
        silence(leader)
        took["SIGSTOP of the leader"] = sender.goes_on()
        leader.resume()
        cluster.wait_ready()
        for node in cluster.nodes:
            node.kill()
        for node in cluster.nodes:
            node.start()
        took["kill -9 of all three"] = sender.goes_on()
        sent = sender.stop()
        assert log.engine.failed is None
        assert len(sender.confirmed) == sent
        for what, seconds in took.items():
            sys.stdout.write(f"{what}: {seconds:.1f} s until messages were confirmed again\n")
        log.kill()
        again = TestLog(nats, log.names, tmp_path / "again")
        again.open()
        served = again.served()
        assert not again.engine.damage
        counts = Counter(served)
        lost = set(sender.confirmed) - counts.keys()
        twice = [payload for payload, count in counts.items() if count > 1]
        assert (len(lost), len(twice), len(served)) == (0, 0, sent)
        assert [int(payload[1:-1]) for payload in served] == list(range(sent))
        # And every record once, in order.
        numbers: dict[int, list[int]] = {}
        for it in stored_in(nats, log.names):
            record = read_record(it.payload)
            numbers.setdefault(record.writer, []).append(record.number)
        for of_one in numbers.values():
            assert of_one == sorted(set(of_one))
        assert again.led.appender.seq_last == last_seq(nats, log.names)
        again.led.abandon()
