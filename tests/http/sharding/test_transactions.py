"""Transactions over three logs, whose processes may end, and whose answers may be lost, at any moment."""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.control.frames import Buffer, Fields
from penstock.http.link import CallRefused
from penstock.http.problems import Problem
from penstock.http.sharding.transactions import Answers, Doubts, ShardedStages
from penstock.http.stages import stages
from penstock.http.stages.stages import Committed, Parts
from penstock.log.fingerprint import KIND
from penstock.log.stages import OpenStages
from penstock.log.state import LogSettings
from penstock.log.transactions import Transactions
from penstock.model.batch import Batch
from penstock.model.shards import shard_of
from penstock.model.timers import SECOND_US
from penstock.server.calls import Context
from tests.build import interpreted_only
from tests.http.stage_rig import Died, Moments, Rig, every_moment
from tests.seeds import SEED, SEEDED

LOGS = 3
FIXED_SEEDS, NEW_SEEDS = 40, 20
SMALL = LogSettings(segment_bytes=64 * 1024, block_bytes=2048, cache_bytes=4096, snapshot_blocks=16)


def named(prefix: str) -> list[str]:
    """A name for each log."""
    names: dict[int, str] = {}
    number = 0
    while len(names) < LOGS:
        names.setdefault(shard_of(f"{prefix}{number}", LOGS), f"{prefix}{number}")
        number += 1
    return [names[shard] for shard in range(LOGS)]


QUEUES = named("queue")
KEYS = [key.removeprefix(KIND) for key in named(KIND + "key/")]
"""One that each log decides."""

FIRST = [(queue, [b"%s %d" % (queue.encode(), i) for i in range(5)]) for queue in QUEUES]
SECOND = [(QUEUES[1], [b"more %d" % i for i in range(7)])]
WANTED = [
    {queue: messages + (SECOND[0][1] if shard == 1 else [])} for shard, (queue, messages) in enumerate(FIRST)
]
NOTHING: list[dict[str, list[bytes]]] = [{} for _ in range(LOGS)]


class Cluster:
    """Three logs, and the front-end that asks them."""

    def __init__(self, folder: Path) -> None:
        self.moments = Moments()
        self.rigs = [Rig(folder / str(shard), SMALL) for shard in range(LOGS)]
        self.on_call: Callable[[int, str], str] = lambda shard, name: ""
        self.before: Callable[[int, str], Coroutine[Any, Any, None]] | None = None

    @property
    def count(self) -> int:
        return LOGS

    async def start(self, last: int = -1) -> None:
        self.moments.passed, self.moments.last, self.moments.dead = 0, last, False
        for rig in self.rigs:
            await rig.start()
            rig.moments = self.moments
        self.stages = ShardedStages(self)
        self.doubts = Doubts(self, lambda shard: True)

    async def call(self, name: str, fields: Mapping[int, Fields]) -> Answers:
        answers = await asyncio.gather(*(self._one(shard, name, its) for shard, its in fields.items()))
        return dict(zip(fields, answers, strict=True))

    async def _one(self, shard: int, name: str, fields: Fields, *buffers: Buffer) -> Any:
        if self.before is not None:
            await self.before(shard, name)
        lost = self.on_call(shard, name)
        if lost == "request":
            return CallRefused("unavailable", "it was not heard")
        answer: Fields | CallRefused
        try:
            answer = (await self.rigs[shard].call(name, fields, *buffers)).fields
        except CallRefused as refusal:
            answer = refusal
        return CallRefused("unavailable", "the answer was lost") if lost == "answer" else answer

    async def stage(self, shard: int, key: str, parts: Parts, alias: str, kind: str = KIND) -> Fields:
        return await self.rigs[shard].stages.stage(key, parts, alias, kind)

    async def send(self, shard: int, name: str, fields: Fields, *buffers: Buffer) -> Fields:
        answer = await self._one(shard, name, fields, *buffers)
        if isinstance(answer, CallRefused):
            raise answer
        return cast(Fields, answer)

    async def die(self, logs: Sequence[int]) -> None:
        for shard, rig in enumerate(self.rigs):
            await rig.die(log_too=shard in logs)

    async def end(self) -> None:
        await self.doubts.stop()
        for rig in self.rigs:
            await rig.end()

    async def put(self, key: str, *parts: tuple[str, list[bytes]]) -> str:
        told = await self.stages.stage(key, [(it, Batch.of(its, protocol="http")) for it, its in parts])
        return str(told["stage"])

    async def settle(self) -> None:
        """Time goes by, until nothing is in doubt any more."""
        for _ in range(2):  # A decision is finished behind what it decides.
            for shard in range(LOGS):
                await self.doubts.settle(shard, 0)
        for rig in self.rigs:
            assert not rig.log.prepared()
            assert not rig.log.unfinished()

    def stored(self) -> list[dict[str, list[bytes]]]:
        return [rig.stored() for rig in self.rigs]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "PIECE_BYTES", 100)
    monkeypatch.setattr("penstock.http.sharding.transactions.AGAIN_SECONDS", 0)
    monkeypatch.setattr("penstock.http.sharding.transactions.FINISH_SECONDS", 0.01)


def run(folder: Path, story: Callable[[Cluster], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        cluster = Cluster(folder)
        await cluster.start()
        try:
            await story(cluster)
        finally:
            await cluster.end()

    asyncio.run(whole())


async def stage_all(cluster: Cluster, key: str) -> list[str]:
    await cluster.put(key, (QUEUES[0], [b"of a try that failed"]), (QUEUES[2], [b"another"]))
    return [await cluster.put(key, *FIRST), await cluster.put(key, *SECOND)]


# --- every moment ------------------------------------------------------------------------------------


@pytest.mark.parametrize("logs", [(), (0,), (1,), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("asks_first", [False, True], ids=["settled first", "asked first"])
def test_whenever_processes_die_all_or_nothing_is_stored(
    tmp_path: Path, logs: tuple[int, ...], asks_first: bool
) -> None:
    key = KEYS[0]

    async def one_life(last: int) -> bool:
        cluster = Cluster(tmp_path / str(last))
        await cluster.start(last)
        first: Committed | None = None
        ids: list[str] = []
        with suppress(Died):
            ids = await stage_all(cluster, key)
            first = await cluster.stages.commit(key, ids)
        await cluster.die(logs)
        await cluster.start()
        if not asks_first or not ids:
            await cluster.settle()
            found = cluster.stored()
            assert found in (NOTHING, WANTED), f"at moment {last}"
            assert first is None or found == WANTED, f"at moment {last}"
        if ids:  # Somebody knows them.
            again = await cluster.stages.commit(key, ids)
            assert cluster.stored() == WANTED, f"at moment {last}"
            assert first is None or (again.repeated and again.stored == first.stored)
        # Who does not know how it went stages all of it again.
        again = await cluster.stages.commit(key, await stage_all(cluster, key))
        assert again.repeated == bool(ids), f"at moment {last}"
        await cluster.settle()
        assert cluster.stored() == WANTED, f"at moment {last}"
        assert (await cluster.stages.standing(key))[0] == again.stored
        with pytest.raises(Problem, match="committed with other stages"):
            await cluster.stages.commit(key, ["f" * 32])
        assert await cluster.stages.abort(key)
        await cluster.end()
        return first is None

    assert asyncio.run(every_moment(one_life)) > 30


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("what", ["request", "answer"])
def test_whatever_is_lost_on_the_way_all_or_nothing_is_stored(tmp_path: Path, key: str, what: str) -> None:
    """One call after the other is lost; it is told as a 503, or is made up for."""

    async def one_life(last: int) -> bool:
        cluster = Cluster(tmp_path / str(last))
        await cluster.start()
        ids = await stage_all(cluster, key)
        calls = 0

        def lose(shard: int, name: str) -> str:
            nonlocal calls
            calls += 1
            return what if calls - 1 == last else ""

        cluster.on_call = lose
        try:
            told: Committed | None = await cluster.stages.commit(key, ids)
        except (CallRefused, Problem):
            told = None
        cluster.on_call = lambda shard, name: ""
        await cluster.settle()
        assert cluster.stored() == WANTED if told is not None else cluster.stored() in (NOTHING, WANTED)
        again = await cluster.stages.commit(key, ids)
        assert cluster.stored() == WANTED, f"call {last}"
        assert told is None or again.stored == told.stored
        await cluster.settle()
        await cluster.end()
        return calls > last

    assert asyncio.run(every_moment(one_life)) >= 10


# --- lives -------------------------------------------------------------------------------------------


class Life:
    """Two front-ends that commit one key, each its own stages, while logs are opened again, doubts are asked
    about, somebody aborts, and calls are lost."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.seed = seed
        self.draw = random.Random(seed)
        self.folder = folder / str(seed)
        self.key = self.draw.choice(KEYS)
        self.mine = [(queue, [b"mine %d" % i for i in range(3)]) for queue in QUEUES]
        self.theirs = [(queue, [b"theirs"]) for queue in self.draw.sample(QUEUES, 2)]
        self.chance = self.draw.choice([0, 0, 0.1])

    def lose(self, shard: int, name: str) -> str:
        return self.draw.choice(["request", "answer"]) if self.draw.random() < self.chance else ""

    async def later(self, steps: int, does: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        for _ in range(self.draw.randrange(steps)):
            await asyncio.sleep(0)
        try:
            return await does()
        except (CallRefused, Problem) as refusal:
            return refusal

    async def open_again(self, cluster: Cluster) -> None:
        """Of a log, nothing is left but what is on the disk."""
        rig = cluster.rigs[self.draw.randrange(LOGS)]
        rig.log.abandon()
        rig.open_log()
        rig.context = Context(rig)

    async def live(self) -> None:
        cluster = Cluster(self.folder)
        await cluster.start()
        other, draw = ShardedStages(cluster), self.draw
        ids = [await cluster.put(self.key, *self.mine), await cluster.put(self.key, *self.theirs)]
        cluster.on_call = self.lose
        tasks = [
            self.later(60, lambda: cluster.stages.commit(self.key, ids[:1])),
            self.later(60, lambda: other.commit(self.key, ids[1:])),
        ]
        if draw.random() < 0.3:
            tasks.append(self.later(120, lambda: other.abort(self.key)))
        else:
            tasks.append(self.later(1, lambda: cluster.stages.standing(self.key)))
        for shard in draw.choices(range(LOGS), k=draw.randrange(6)):
            tasks.append(self.later(120, partial(cluster.doubts.settle, shard, 0)))
        for _ in range(draw.choice([0, 0, 1, 3])):
            tasks.append(self.later(120, lambda: self.open_again(cluster)))
        told = await asyncio.gather(*tasks)
        cluster.on_call = lambda shard, name: ""
        if draw.random() < 0.3:
            await cluster.die((0, 1, 2))
            await cluster.start()
        await cluster.settle()
        found = {queue: messages for it in cluster.stored() for queue, messages in it.items()}
        assert found in ({}, dict(self.mine), dict(self.theirs)), f"seed {self.seed}: {found}"
        assert told[2] is not True or found, f"seed {self.seed}: {told}"
        assert told[2] is not False or not found, f"seed {self.seed}: {told}"
        for committed, its in zip(told[:2], (self.mine, self.theirs), strict=True):
            if isinstance(committed, Committed):
                assert found == dict(its), f"seed {self.seed}: {told}"
        await cluster.end()


def test_of_two_who_commit_a_key_one_does(tmp_path: Path) -> None:
    base = int(SEED or random.randrange(10**6, 10**9))
    for seed in (*range(FIXED_SEEDS), *range(base, base + (2000 if SEEDED else NEW_SEEDS))):
        asyncio.run(Life(tmp_path, seed).live())


def _forgets_nothing(self: Transactions, key: str, attempt: str) -> bool:
    return key in self._state.transactions


def _goes_by_any(self: OpenStages, key: str, attempt: str) -> bool:
    return self.prepared.pop(key, None) is not None


def _keeps_nothing(self: OpenStages, key: str, attempt: str) -> None:
    pass


def _decides_any(real: Callable[..., Any]) -> Callable[..., Any]:
    def commit(self: Transactions, key: str, *words: Any, **more: Any) -> Any:
        if len(words) > 4 and words[4] is not None:
            self._attempts[key] = words[4].attempt
        return real(self, key, *words, **more)

    return commit


async def doubts_before_the_decision(cluster: Cluster) -> None:
    """Who is prepared asks, and hears that nothing was decided; then it is decided, were it not over."""
    stage = await cluster.put(KEYS[0], *FIRST)
    asked = False

    async def settle_once(shard: int, name: str) -> None:
        nonlocal asked
        if name == "commit" and not asked:
            asked = True
            await cluster.settle()

    cluster.before = settle_once
    assert not (await cluster.stages.commit(KEYS[0], [stage])).repeated
    assert cluster.stored() == [{queue: messages} for queue, messages in FIRST]


async def another_attempt_ends(cluster: Cluster) -> None:
    """An attempt is said to be over late, when the next one is prepared and decided."""
    stage = await cluster.put(KEYS[0], *FIRST)
    key = KIND + KEYS[0]
    cluster.on_call = lambda shard, name: "request" if name in ("commit", "unprepare") else ""
    with suppress(CallRefused):
        await cluster.stages.commit(KEYS[0], [stage])
    ((_, first),) = cluster.rigs[1].log.prepared()
    cluster.on_call = lambda shard, name: "request" if shard and name in ("commit", "unprepare") else ""
    with suppress(Problem):
        await cluster.stages.commit(KEYS[0], [stage])
    for rig in cluster.rigs[1:]:
        await rig.call("unprepare", {"key": key, "attempt": first})
        assert rig.log.prepared()
    cluster.on_call = lambda shard, name: ""
    await cluster.settle()
    assert cluster.stored() == [{queue: messages} for queue, messages in FIRST]


async def a_stage_waits_long(cluster: Cluster) -> None:
    """What is prepared does not lapse."""
    stage = await cluster.put(KEYS[0], *FIRST)
    cluster.on_call = lambda shard, name: "request" if shard and name == "commit" else ""
    with suppress(Problem):
        await cluster.stages.commit(KEYS[0], [stage])
    for rig in cluster.rigs:
        rig.now += 10 * SMALL.stage_seconds * SECOND_US
        rig.log.tick(rig.now)
        rig.turn()
    cluster.on_call = lambda shard, name: ""
    await cluster.settle()
    assert cluster.stored() == [{queue: messages} for queue, messages in FIRST]


STORIES = [doubts_before_the_decision, another_attempt_ends, a_stage_waits_long]


@pytest.mark.parametrize("story", STORIES, ids=lambda it: it.__name__)
def test_what_comes_late_changes_nothing(
    tmp_path: Path, story: Callable[[Cluster], Coroutine[Any, Any, None]]
) -> None:
    run(tmp_path, story)


@interpreted_only
@pytest.mark.parametrize(
    ("of", "name", "wrong"),
    [
        (Transactions, "is_decided", _forgets_nothing),
        (Transactions, "commit", _decides_any(Transactions.commit)),
        (OpenStages, "unprepare", _goes_by_any),
        (OpenStages, "prepare", _keeps_nothing),
    ],
    ids=["who was told no is told yes", "decided when over", "another attempt ends", "nothing is kept"],
)
def test_what_would_break_a_promise_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: type, name: str, wrong: Callable[..., Any]
) -> None:
    monkeypatch.setattr(of, name, wrong)
    logging.disable(logging.CRITICAL)
    caught = 0
    try:
        for number, story in enumerate(STORIES):
            try:
                run(tmp_path / str(number), story)
            except (AssertionError, CallRefused, Problem, ValueError):
                caught += 1
    finally:
        logging.disable(logging.NOTSET)
    assert caught, "no story has found it"


# --- rules -------------------------------------------------------------------------------------------


@contextmanager
def refused(kind: str) -> Iterator[None]:
    with pytest.raises((CallRefused, Problem)) as caught:
        yield
    error = caught.value
    assert kind == (error.kind if isinstance(error, CallRefused) else cast(Problem, error).name), error


def test_a_stage_for_several_logs_is_one(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        key = KEYS[0]
        stage = await cluster.put(key, *FIRST)
        assert await cluster.stages.queues(key, [stage]) == sorted(QUEUES)
        stored, staged = await cluster.stages.standing(key)
        size = sum(len(message) for _, messages in FIRST for message in messages)
        assert (stored, staged) == (None, [{"stage": stage, "count": 15, "bytes": size}])
        told = await cluster.stages.commit(key, [stage])
        assert sorted((it["queue"], it["offset_start"], it["offset_end"]) for it in told.stored) == [
            (queue, 0, 5) for queue in sorted(QUEUES)
        ]
        assert await cluster.stages.standing(key) == (told.stored, [])

    run(tmp_path, story)


def test_a_stage_that_has_lost_a_part_is_not_committed(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        key = KEYS[0]
        stage = await cluster.put(key, *FIRST)
        cluster.rigs[2].log.abort(KIND + key, cluster.rigs[2].now)
        with refused("no-stage"):
            await cluster.stages.commit(key, [stage])
        assert cluster.stored() == NOTHING

    run(tmp_path, story)


def test_where_one_log_cannot_store_its_part_nobody_does(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        for shard, key in enumerate(KEYS):
            stage = await cluster.put(key, *FIRST)
            number = (shard + 1) % LOGS
            rig = cluster.rigs[number]
            (damaged,) = rig.log.stages(KIND + key)
            its = rig.log._state.stages.find(damaged.stage)
            assert its is not None
            its.damage = "a bit has flipped"
            with refused("stage-damaged"):
                await cluster.stages.commit(key, [stage])
            assert cluster.stored() == NOTHING
            assert not any(rig.log.prepared() for rig in cluster.rigs)
            assert not await cluster.stages.abort(key)

    run(tmp_path, story)


def test_what_is_prepared_neither_lapses_nor_is_aborted(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        key = KEYS[0]
        stage = await cluster.put(key, *FIRST)
        cluster.on_call = lambda shard, name: "request" if name in ("commit", "unprepare") else ""
        with refused("unavailable"):
            await cluster.stages.commit(key, [stage])
        for rig in cluster.rigs[1:]:
            assert rig.log.prepared()
            rig.now += 10 * SMALL.stage_seconds * SECOND_US
            rig.log.tick(rig.now)
            rig.turn()
            assert rig.log.stages(KIND + key)
            with refused("refused"):
                await rig.call("abort", {"key": KIND + key})
        cluster.on_call = lambda shard, name: ""
        assert not await cluster.stages.abort(key)
        with refused("transaction-not-found"):
            await cluster.stages.standing(key)
        await cluster.settle()
        assert cluster.stored() == NOTHING

    run(tmp_path, story)


def test_a_decision_outlives_snapshots_and_many_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.log.keys.TRANSACTIONS_MAX", 5)
    monkeypatch.setattr("penstock.log.keys.SERIES_MAX", 5)

    async def story(cluster: Cluster) -> None:
        key = KEYS[0]
        stage = await cluster.put(key, *FIRST)
        cluster.on_call = lambda shard, name: "request" if shard and name == "commit" else ""
        with pytest.raises(Problem, match="is committed, and its messages in 2 of 3 logs follow"):
            await cluster.stages.commit(key, [stage])
        cluster.on_call = lambda shard, name: ""
        for number in range(40):
            await cluster.rigs[0].call("commit", {"key": f"{KIND}other{number}/1", "stages": [], "parts": []})
        await cluster.die((0, 1, 2))
        await cluster.start()
        assert cluster.rigs[0].log.transaction(KIND + key) is None
        await cluster.settle()
        assert cluster.stored() == [{queue: messages} for queue, messages in FIRST]
        assert cluster.rigs[0].log.decision(KIND + key) is None

    run(tmp_path, story)


def test_the_same_key_with_other_messages_is_refused(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        key = KEYS[1]
        first = await cluster.stages.commit(key, [await cluster.put(key, *FIRST)])
        same = [await cluster.put(key, part) for part in reversed(FIRST)]
        assert await cluster.stages.commit(key, same) == Committed(first.stored, True)
        with refused("key-reused"):
            await cluster.stages.commit(key, [await cluster.put(key, *FIRST, *SECOND)])
        assert cluster.stored() == [{queue: messages} for queue, messages in FIRST]

    run(tmp_path, story)
