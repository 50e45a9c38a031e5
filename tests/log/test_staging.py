"""How stages go into the log: piece by piece, beside everybody else, through nobody's cache. And that a
commit of them is what the same messages in one transaction are."""

import errno
import gc
import os
import random
import sys
from itertools import groupby

from penstock.log.errors import LogError, LogFailed
from penstock.log.log import Log
from penstock.log.results import StageInfo, Stored, TransactionDone
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.life import Reason
from penstock.model.policy import Policies
from penstock.model.words import Outcome, Where
from tests.log.contract_rig import SECOND, START_US, Got, Told, open_runs, open_slices
from tests.log.inline import InlineWorker
from tests.log.simdisk import SimDisk

MIB = 1024 * 1024


class Rig:
    """A log whose workers run when they are told to."""

    def __init__(self, settings: LogSettings | None = None, policies: Policies | None = None) -> None:
        self.disk = SimDisk()
        self.settings = settings or LogSettings()
        self.policies = policies or Policies()
        self.now_us = START_US
        self.open()

    def open(self) -> None:
        self.writer, self.keeper = InlineWorker(), InlineWorker()
        self.engine = Log.open(
            self.disk,
            self.now_us,
            settings=self.settings,
            policies=self.policies,
            writer=self.writer,
            keeper=self.keeper,
        )

    def turn(self) -> None:
        self.engine.flush(self.now_us)
        self.engine.wait()

    def stage(self, key: str, parts: list[tuple[str, Batch]]) -> str:
        came: list[StageInfo | LogError] = []
        self.engine.stage(key, parts, self.now_us, came.append)
        self.turn()
        (info,) = came
        assert isinstance(info, StageInfo), info
        return info.stage


def test_others_have_their_receipts_between_the_pieces() -> None:
    rig = Rig()
    engine, disk = rig.engine, rig.disk
    rig.engine.append("other", Batch.of([b"before"]), rig.now_us)
    rig.turn()
    cached = engine._state.segments._cached_bytes
    came: list[StageInfo | LogError] = []
    engine.stage("key", [("orders", Batch.of([bytes(1000)] * 32_000))], rig.now_us, came.append)
    groups, receipts = 0, 0
    while not came:
        got: list[Stored | LogError] = []
        engine.append("other", Batch.of([b"beside"]), rig.now_us, got.append)
        engine.flush(rig.now_us)
        written = sum(map(len, disk.files().values()))
        for _ in range(2):  # The group that is on its way, and that with the message.
            before = engine._state.segments.written
            assert rig.writer.step() or came
            rig.engine.poll()
            assert engine._state.segments.written - before < 2.5 * rig.settings.stage_group_bytes
            groups += 1
        receipts += len(got)
        assert len(got) == 1, f"{written} bytes were written, and a message beside them has no receipt"
        assert engine._state.segments._cached_bytes - cached < 1_000_000, "what is staged is in the cache"
    assert groups > 20
    assert receipts > 10
    (info,) = came
    assert isinstance(info, StageInfo)
    assert info.messages == 32_000
    done: list[TransactionDone | LogError] = []
    engine.commit("key", [info.stage], rig.now_us, done.append)
    rig.turn()
    assert isinstance(done[0], TransactionDone)
    assert engine.describe("orders").ready == 32_000


def test_what_waits_is_let_go_of_when_it_is_stored() -> None:
    rig = Rig()
    payload = random.Random(1).randbytes(3 * MIB)
    bounds = Batch.of([payload[:MIB]] * 3).bounds
    came: list[StageInfo | LogError] = []
    before = sys.getrefcount(payload)
    rig.engine.stage("key", [("orders", Batch(payload, bounds))], rig.now_us, came.append)
    assert sys.getrefcount(payload) > before
    rig.turn()
    assert isinstance(came[0], StageInfo)
    gc.collect()
    assert sys.getrefcount(payload) == before, "a stage that is in the log is in memory, too"
    assert rig.engine.bytes_in_flight == 0


def test_all_that_wait_hear_that_the_log_has_failed() -> None:
    rig = Rig(LogSettings(stage_group_bytes=1000))
    came: list[StageInfo | LogError] = []
    for number in range(3):
        parts = [("orders", Batch.of([bytes(100)] * 40))]
        rig.engine.stage(f"key-{number}", parts, rig.now_us, came.append)
    rig.disk.fail("write", 2, errno.EIO)
    rig.turn()
    assert [type(it) for it in came] == [LogFailed] * 3


# --- the same as one transaction ---------------------------------------------------------------------

POLICIES = Policies(
    {"*": {"retention-seconds": 0}, "drops": {"dead-letters": "off"}, "tasks": {"max-deliveries": 2}}
)
QUEUES = ("orders", "tasks", "drops")
SMALL = LogSettings(
    segment_bytes=2048, block_bytes=150, cache_bytes=1000, snapshot_blocks=20, stage_group_bytes=500
)


class Twins:
    """Two logs that the same is said to; but where one is told messages, the other has them staged."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rigs = [Rig(SMALL, POLICIES), Rig(SMALL, POLICIES)]
        self.sent = 0

    def batch(self) -> Batch:
        rng = self.rng
        count = rng.choice((1, 3, 12))
        self.sent += count
        payloads = [b"%d" % (self.sent - i) + b"x" * rng.choice((0, 5, 60)) for i in range(count)]
        batch = Batch.of(
            payloads,
            ttl_seconds=[rng.choice((0, 2, 30)) for _ in payloads] if rng.random() < 0.3 else None,
            retries=[rng.choice((-1, 0, 1)) for _ in payloads] if rng.random() < 0.3 else None,
            protocol=rng.choice(("http", "spark")),
        )
        batch.dead = rng.choice((Reason.NONE, Reason.NONE, Reason.BAD_RECORD))
        return batch

    def transaction(self) -> None:
        rng, key = self.rng, f"key-{self.sent}"
        stages = [
            [(rng.choice(QUEUES), self.batch()) for _ in range(rng.randint(1, 3))]
            for _ in range(rng.randint(1, 3))
        ]
        parts = [part for its in stages for part in its]
        ids = [self.rigs[1].stage(key, its) for its in stages]
        for rig in self.rigs:
            rig.now_us += SECOND
        # As a commit has them: by queue, in the order in which the queues are named first, by door and death.
        order = list(dict.fromkeys(queue for queue, _ in parts))
        parts.sort(key=lambda part: order.index(part[0]))
        runs = groupby(parts, key=lambda part: (part[0], part[1].protocol, part[1].dead))
        together = [(it[0], joined([batch for _, batch in its])) for it, its in runs]
        done: list[TransactionDone | LogError] = []
        self.rigs[0].engine.transact(key, together, self.rigs[0].now_us, done.append)
        self.rigs[1].engine.commit(key, ids, self.rigs[1].now_us, done.append)
        for rig in self.rigs:
            rig.turn()
        plain, staged = done
        assert isinstance(plain, TransactionDone)
        assert isinstance(staged, TransactionDone)
        assert _offsets(plain) == _offsets(staged)

    def both(self) -> None:
        """Something else that may happen, the same to both."""
        seed = self.rng.random()
        batch = self.batch()
        batch.dead = Reason.NONE
        for rig in self.rigs:
            work(rig, random.Random(seed), batch)

    def compare(self) -> None:
        first, second = (picture(rig) for rig in self.rigs)
        for queue in first.keys() & second.keys():  # Events go with their segments, which are not the same.
            least = min(len(first[queue][2]), len(second[queue][2]))
            for events in (first[queue][2], second[queue][2]):
                events[:] = _whole_moments(events[len(events) - least :])
        assert first == second


def joined(batches: list[Batch]) -> Batch:
    batch = Batch.of(
        [payload for it in batches for payload in it.messages()],
        ttl_seconds=[ttl for it in batches for ttl in it.ttl_seconds or [0] * len(it)],
        retries=[retries for it in batches for retries in it.retries or [-1] * len(it)],
        protocol=batches[0].protocol,
    )
    batch.dead = batches[0].dead
    return batch


def _offsets(done: TransactionDone) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for part in done.stored:
        found.setdefault(part.queue, []).extend(range(part.first, part.end))
    return found


def work(rig: Rig, rng: random.Random, batch: Batch) -> None:
    engine, queue = rig.engine, rng.choice(QUEUES)
    what = rng.choice(
        ("append", "take", "take", "lose", "redrive", "purge", "expire", "trim", "reopen", "crash")
    )
    if what == "append":
        engine.append(queue, batch, rig.now_us)
    elif what == "take" and engine.has_queue(queue):
        dead = rng.random() < 0.3
        got = open_slices(engine.take(queue, "ann", rng.choice((3, 40)), rig.now_us, dead=dead))
        for message in got:
            outcome = rng.choice((Outcome.ACK, Outcome.ACK, Outcome.REJECT, Outcome.REQUEUE))
            ranges = [(message.offset, message.offset + 1)]
            engine.settle(queue, "ann", outcome, ranges, rig.now_us, dead=dead)
    elif what == "lose" and engine.has_queue(queue):
        engine.take(queue, "bob", 4, rig.now_us)
        engine.give_back(queue, "bob", rig.now_us, where=rng.choice((Where.PLACE, Where.TAIL)))
    elif what == "redrive" and engine.has_queue(queue):
        engine.redrive(queue, rig.now_us, limit=5)
    elif what == "purge" and engine.has_queue(queue):
        engine.purge(queue, rig.now_us, dead=rng.random() < 0.5, limit=20)
    elif what == "expire":
        rig.now_us += 3 * SECOND
        engine.expire(rig.now_us)
    rig.turn()
    if what == "trim":
        for _ in range(3):
            engine.trim(rig.now_us)
            rig.turn()
    elif what == "reopen":
        engine.close(rig.now_us)
        rig.disk = rig.disk.kill()
        rig.open()
    elif what == "crash":
        rig.disk = rig.disk.crash(random.Random(0))
        rig.open()


def _whole_moments(events: list[Told]) -> list[Told]:
    """What its TTL ends in one moment ends in any order, and of the first moment some may be cut off."""
    found: list[Told] = []
    for at, ((_, reason), its) in enumerate(groupby(events, key=lambda told: (told.time_us, told.reason))):
        if reason is not Reason.EXPIRED:
            found += its
        elif at:
            found += sorted(told._replace(number=0) for told in its)
    return found


def _plain(got: Got) -> Got:
    """Without the numbers of the log, which is drawn, and of the queue: one has a queue more."""
    return got._replace(message_id=got.message_id[12:], origin=b"")


def picture(rig: Rig) -> dict[str, tuple[object, list[Got], list[Told], dict[int, int]]]:
    """What can be seen of a log: living messages, the last events, states, counts."""
    found: dict[str, tuple[object, list[Got], list[Told], dict[int, int]]] = {}
    engine = rig.engine
    assert not engine.damage
    for queue in sorted(engine.queues()):
        info = engine.describe(queue)
        runs = engine.states(queue, 0, 1 << 40, 1 << 20)
        states = {
            offset: state
            for first, end, state in zip(runs.first, runs.end, runs.state, strict=True)
            for offset in range(first, end)
        }
        kept = [_plain(it) for it in open_slices(engine.read(queue, 0, 1 << 40)) if it.offset in states]
        assert [it.offset for it in kept] == sorted(states)
        counts = info.ready, info.held, info.dead, info.offset_end, info.event_end, info.bytes, info.oldest_us
        events = open_runs(engine.events(queue, max(info.event_start, info.event_end - 5), info.event_end))
        found[queue] = counts, kept, events, states
    return found


def test_a_commit_is_what_the_same_messages_in_one_transaction_are() -> None:
    base = int(os.environ.get("PENSTOCK_TEST_SEED", random.randrange(10**6, 10**9)))
    for seed in (*range(12), *range(base, base + 4)):
        try:
            same(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def same(seed: int) -> None:
    twins = Twins(seed)
    for _ in range(40):
        if twins.rng.random() < 0.3:
            twins.transaction()
        else:
            twins.both()
        twins.compare()
