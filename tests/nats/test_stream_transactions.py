"""Transactions in a cluster: whole or absent, whoever leads, and wherever the one before has stopped.

A leader stages, aborts and commits, and its appender is stopped at a record: at each one that it would have
written, in turn, before it is sent or when it is stored and nobody has been told. Whoever leads next has all
that was confirmed, goes on with the same calls, and gives the answers that were due.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from penstock.log.errors import LogError, LogFailed
from penstock.log.jetstream import stream_log as module
from penstock.log.jetstream.appender import Appender
from penstock.log.jetstream.cluster import Cluster
from penstock.log.jetstream.link_thread import LinkClosed, LinkThread
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.records import Kind
from penstock.log.jetstream.replica import Replica
from penstock.log.log import Log
from penstock.log.reader import LogReader
from penstock.log.results import StageInfo, TransactionDone
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.life import Reason
from penstock.model.words import Outcome
from tests.nats.streams import TestLog, delete_stream, link_at, new_log

NOW_US = 1_700_000_000_000_000
KEY = "spark-7"
COUNT = 20
RECORD_BYTES = 700
"""So that a stage, and a commit with it, is of several records."""


@pytest.fixture(scope="module")
def nats(node: Cluster) -> Iterator[LinkThread]:
    with link_at(node.nodes[0].url) as nats:
        yield nats


class StoppingAppender(Appender):
    """Stops at one of its records, and has room for little in each."""

    left = -1  # records until then; -1: it does not
    told = True  # of the last one: otherwise it is stored, and nobody hears of it
    written = 0

    @property
    def bytes_max(self) -> int:
        return RECORD_BYTES

    async def _append(self, kind: Kind, name: str, position: int, data: memoryview, *, more: bool) -> None:
        if self.left == 0:
            self.stop()
        self.left -= 1
        await super()._append(kind, name, position, data, more=more)
        self.written += 1
        if self.left == 0 and not self.told:
            self.stop()
            raise LinkClosed("its answer is lost")


def batch(name: str, count: int = COUNT) -> Batch:
    return Batch.of([b"<%s-%06d>" % (name.encode(), number) + b"." * 100 for number in range(count)])


def repairs(letters: Sequence[int]) -> Batch:
    made = batch("repaired", len(letters))
    made.repairs = array("q", letters)
    return made


def dead() -> Batch:
    made = batch("dead")
    made.dead = Reason.REJECTED
    return made


STAGES: dict[str, list[tuple[str, Batch]]] = {
    "first": [("orders", batch("one")), ("mails", batch("two"))],
    "second": [("orders", batch("three")), ("orders", dead()), ("new", batch("four"))],
    "third": [("tasks", repairs([1, 2, 5])), ("mails", batch("five"))],
}
WANTED = {"orders": 3 * COUNT + 3, "mails": 2 * COUNT + 3, "new": COUNT, "tasks": 6}
"""How many messages the queues have had when it is committed."""

STORED = [
    ("orders", 3, 3 + 2 * COUNT),
    ("orders", 3 + 2 * COUNT, 3 + 3 * COUNT),  # the dead ones
    ("mails", 3, 3 + 2 * COUNT),
    ("new", 0, COUNT),
]


class Life:
    """What somebody who leads is asked to do, and what was confirmed of it."""

    def __init__(self, log: TestLog, before: "Life | None" = None) -> None:
        self.log = log
        self.stages: dict[str, str] = dict(before.stages) if before is not None else {}
        self.done: TransactionDone | None = before.done if before is not None else None
        self.aborted: bool = before is not None and before.aborted

    @property
    def engine(self) -> Log:
        return self.log.engine

    def prepare(self) -> None:
        """Some messages of others, and letters for the repairs."""
        engine, now_us = self.engine, self.log.now_us
        for queue in ("orders", "mails", "tasks"):
            engine.append(queue, batch("before", 6 if queue == "tasks" else 3), now_us)
        engine.flush(now_us)
        engine.take("tasks", "ann", 6, now_us)
        engine.settle("tasks", "ann", Outcome.REJECT, [(0, 6)], now_us)
        self._turn()

    def _turn(self) -> None:
        self.engine.flush(self.log.now_us)
        self.engine.wait()

    def work(self) -> None:
        """All of it, as far as it is not confirmed; LogFailed where that is the end."""
        engine, now_us = self.engine, self.log.now_us
        if not self.aborted:
            engine.stage("never", [("orders", batch("never"))], now_us, lambda _: None)
            self._turn()
        if self.done is None:
            for name in STAGES:
                self.stage(name)
        if not self.aborted:
            engine.abort("never", now_us)
            self._turn()
            self._fail()
            self.aborted = True
        if self.done is None:
            self.commit()

    def _fail(self) -> None:
        if self.engine.failed is not None:
            raise self.engine.failed

    def stage(self, name: str) -> None:
        if name in self.stages:
            return

        def receipt(result: StageInfo | LogError) -> None:
            if isinstance(result, StageInfo):
                self.stages[name] = result.stage

        self.engine.stage(KEY, STAGES[name], self.log.now_us, receipt)
        self._turn()
        self._fail()
        assert name in self.stages

    def commit(self) -> TransactionDone:
        """The answer; the first that comes is what every other one must say, too."""
        found: list[TransactionDone] = []

        def receipt(result: TransactionDone | LogError) -> None:
            if isinstance(result, TransactionDone):
                found.append(result)
                self.done = self.done or result

        ids = [self.stages[name] for name in STAGES]
        self.engine.commit(KEY, ids, self.log.now_us, receipt)
        self._turn()
        self._fail()
        return found[0]

    def check(self) -> bool:
        """Whole or absent, and whatever was confirmed is there; whether it is committed."""
        engine = self.engine
        assert not engine.damage
        there = {name: engine.describe(name).offset_end for name in engine.queues()}
        stored = engine.transaction(KEY)
        assert there == (WANTED if stored is not None else {"orders": 3, "mails": 3, "tasks": 6})
        if stored is None:
            assert self.done is None, "it was confirmed"
            open_ids = {info.stage for info in engine.stages(KEY)}
            assert set(self.stages.values()) <= open_ids, "a stage that was confirmed is gone"
        elif self.done is not None:
            assert stored == self.done.stored
        assert not (self.aborted and engine.stages("never"))
        return stored is not None


def served(log: TestLog) -> "Counter[bytes]":
    return Counter(payload.rstrip(b".") for payload in log.served())


def all_served() -> "Counter[bytes]":
    """Once everything is committed."""
    names = ["one", "two", "three", "four", "five"]
    found = Counter(b"<%s-%06d>" % (name.encode(), number) for name in names for number in range(COUNT))
    found.update(b"<before-%06d>" % number for number in [*range(3)] * 2)
    found.update(b"<repaired-%06d>" % number for number in range(3))
    return found


def check_reader(path: str) -> bool:
    """What a reader of a copy sees, whole or absent; whether it is there."""
    with LogReader(path) as reader:
        there = {name: facts.offset_end for name, facts in reader.queues().items()}
        assert there in (WANTED, {"orders": 3, "mails": 3, "tasks": 6})
        for name, end in there.items():
            payloads = [it for block in reader.messages(name, 0) for it in block.messages()]
            assert len(payloads) == end
        return "new" in there


def follower(nats: LinkThread, names: LogNames, folder: Path) -> Replica:
    replica = Replica(nats.api, names, str(folder))
    nats.ask(replica.begin())
    nats.ask(replica.catch_up())
    return replica


@pytest.mark.parametrize("told", [True, False], ids=["before a record", "behind a record"])
def test_whoever_leads_next_goes_on_wherever_the_one_before_was_stopped(
    nats: LinkThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    monkeypatch.setattr(module, "Appender", StoppingAppender)
    ends: Counter[str] = Counter()
    for number in range(1, 1000):
        names = new_log(nats)
        first = Life(TestLog(nats, names, tmp_path / f"{number}-first"))
        first.log.open()
        first.prepare()
        appender = first.log.led.appender
        assert isinstance(appender, StoppingAppender)
        appender.left, appender.told = number if not told else number - 1, told
        try:
            first.work()
        except LogFailed:
            pass
        else:
            first.log.kill()
            delete_stream(nats, names.stream)
            break
        first.log.kill()
        # A follower's copy of that, and who leads next with it, or without one.
        copy = follower(nats, names, tmp_path / f"{number}-copy")
        seen = check_reader(copy.path)
        folder = tmp_path / (f"{number}-copy" if number % 2 else f"{number}-next")
        second = Life(first.log.again(folder), first)
        second.log.open()
        is_committed = second.check()
        assert seen == is_committed
        ends[f"{len(first.stages)} stages, {'committed' if is_committed else 'not committed'}"] += 1
        # The same call again. What was not confirmed is staged again: nobody knows that it is there.
        second.work()
        assert second.done is not None
        assert second.done.repeated == (is_committed and first.done is None)
        again = second.commit()
        assert (again.stored, again.repeated) == (second.done.stored, True)
        assert [it[:3] for it in again.stored] == STORED
        assert second.check()
        assert served(second.log) == all_served()
        second.log.kill()
        delete_stream(nats, names.stream)
    else:
        pytest.fail("it does not come to an end")
    # It was stopped in each of these places.
    assert set(ends) >= {f"{count} stages, not committed" for count in range(4)}, ends
    assert ends["3 stages, committed"] >= (0 if told else 1), ends
    assert number > 30, ends


def test_stages_outlive_every_change_of_leaders(nats: LinkThread, tmp_path: Path) -> None:
    """Planned ones and others, with files, snapshots and retention in between."""
    names = new_log(nats)
    life = Life(TestLog(nats, names, tmp_path / "0", seed=3))
    life.log.open()
    life.prepare()
    for number, name in enumerate(STAGES, 1):
        life.stage(name)
        life.log.work(15)
        how = ("handed over", "killed", "abandoned")[number % 3]
        if how == "handed over":
            life.log.led.close(life.log.now_us)
        elif how == "killed":
            life.log.kill()
        else:
            life.log.led.abandon()
        there = dict(life.stages)
        # Somebody else, or the same one with its folder.
        folder = life.log.folder if how == "handed over" else tmp_path / str(number)
        life = Life(life.log.again(folder), life)
        life.log.open()
        assert {info.stage for info in life.engine.stages(KEY)} == set(there.values())
        assert not life.engine.damage
    with LogReader(life.log.replica.path) as reader:
        before = {name: facts.offset_end for name, facts in reader.queues().items()}
        done = life.commit()
        reader.refresh()
        after = {name: facts.offset_end for name, facts in reader.queues().items()}
        assert {name: end - before.get(name, 0) for name, end in after.items()} == {
            "orders": 3 * COUNT,
            "mails": 2 * COUNT,
            "new": COUNT,
            "tasks": 0,
        }
    life.log.led.close(life.log.now_us)
    last = Life(life.log.again(tmp_path / "last"), life)
    last.log.open()
    again = last.commit()
    assert (again.stored, again.repeated) == (done.stored, True)
    assert not last.engine.stages(KEY)
    found = served(last.log)
    of_it = [name for name in all_served() if not name.startswith(b"<before")]
    assert [found[name] for name in of_it] == [1] * len(of_it)
    last.log.led.abandon()


def test_a_large_stage_goes_in_small_pieces(
    nats: LinkThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever wants a receipt meanwhile waits for one of them, and not for all that is not stored yet."""
    sizes: list[int] = []
    write = Appender.write

    def measured(self: Appender, name: str, writes: list[tuple[int, bytes]]) -> None:
        sizes.append(sum(len(data) for _, data in writes))
        write(self, name, writes)

    monkeypatch.setattr(Appender, "write", measured)
    names = new_log(nats)
    replica = Replica(nats.api, names, str(tmp_path))
    nats.ask(replica.begin())
    led = module.open_stream_log(nats, names, replica, NOW_US, wake=lambda: None)
    stages: list[StageInfo | LogError] = []
    led.log.stage(KEY, [("orders", Batch.of([b"." * 1000] * 9000))], NOW_US, stages.append)
    led.log.flush(NOW_US)
    led.log.wait()
    assert isinstance(stages[0], StageInfo)
    assert sum(sizes) > 9_000_000
    assert max(sizes) < 2.1 * LogSettings().stage_group_bytes
    led.abandon()
