"""Stages and commits as the second process asks for them, with a process that may end at any moment."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from penstock.control.frames import Fields
from penstock.http.link import CallRefused
from penstock.http.problems import Problem
from penstock.http.stages import stages
from penstock.http.stages.stages import Committed
from penstock.log.errors import LogRefused
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.life import Reason
from tests.http.stage_rig import Died, Rig, every_moment

SMALL = LogSettings(segment_bytes=64 * 1024, block_bytes=2048, cache_bytes=4096, snapshot_blocks=16)
MANY = [b"%02d" % number + b"." * 18 for number in range(30)]
WANTED = {"orders": MANY[:25], "mails": MANY[25:]}

Run = Callable[..., None]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that a few messages are a large stage."""
    monkeypatch.setattr(stages, "PIECE_BYTES", 100)
    monkeypatch.setattr(stages, "ON_THEIR_WAY_BYTES", 300)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a story with a fresh rig, and ends that."""

    def run(story: Callable[[Rig], Coroutine[Any, Any, None]], **policies: object) -> None:
        async def whole() -> None:
            rig = Rig(tmp_path, SMALL, policies)
            await rig.start()
            try:
                await story(rig)
            finally:
                await rig.end()

        asyncio.run(whole())

    return run


async def stage_many(rig: Rig) -> list[str]:
    """Four stages; one of them has two queues, and one is of a try that failed."""
    parts = [
        [("orders", MANY[:10])],
        [("orders", MANY[10:20]), ("mails", MANY[25:28])],
        [("orders", MANY[20:25])],
        [("mails", MANY[28:])],
    ]
    await rig.stage("key", ("orders", [b"of a try that failed"] * 9))
    return [(await rig.stage("key", *part))["stage"] for part in parts]


# --- every moment ---


@pytest.mark.parametrize("log_too", [False, True], ids=["second dies", "both die"])
def test_whenever_a_process_dies_everything_is_stored_once(tmp_path: Path, log_too: bool) -> None:
    """Stage and commit, die at that moment, live again, and do the same again."""

    async def one_life(last: int) -> bool:
        (tmp_path / str(last)).mkdir()
        rig = Rig(tmp_path / str(last), SMALL)
        await rig.start(last)
        first: Committed | None = None
        ids: list[str] = []
        with suppress(Died):
            ids = await stage_many(rig)
            first = await rig.stages.commit("key", ids)
        await rig.die(log_too=log_too)
        await rig.start()
        found = rig.stored()
        assert found in ({}, WANTED), f"at moment {last}"
        assert found or first is None, f"at moment {last}"
        if ids:  # Somebody knows them.
            again = await rig.stages.commit("key", ids)
            assert again.repeated == bool(found), f"at moment {last}"
            assert first is None or again.stored == first.stored
        # Who does not know how it went stages all of it again.
        again = await rig.stages.commit("key", await stage_many(rig))
        assert again.repeated == bool(ids), f"at moment {last}"
        assert rig.stored() == WANTED, f"at moment {last}"
        assert (await rig.stages.standing("key"))[0] == again.stored
        with pytest.raises(Problem, match="committed with other stages"):
            await rig.stages.commit("key", ["f" * 32])
        assert await rig.stages.abort("key")
        assert (await rig.stages.standing("key"))[1] == []
        await rig.end()
        return first is None

    assert asyncio.run(every_moment(one_life)) > 20


# --- what the first process gets ---


def test_a_large_stage_goes_in_pieces_and_is_what_it_was(run: Run) -> None:
    async def story(rig: Rig) -> None:
        living = Batch.of(MANY, ttl_seconds=range(1, 31), retries=range(30), protocol="http")
        dead = Batch.of([b"", *MANY[:12], b"x" * 500, b"", b""], protocol="pipeline")
        dead.dead = Reason.BAD_RECORD
        stage = await rig.stages.stage("key", [("a", living), ("b", dead), ("a", living)])
        assert rig.calls["stage"] > 10
        assert rig.context.staged == {}
        assert (stage["count"], stage["bytes"]) == (76, 60 * 20 + 12 * 20 + 500)
        await rig.stages.commit("key", [stage["stage"]])
        assert rig.stored() == {"a": MANY * 2, "b": dead.messages()}
        slices = rig.log.read("a", 0, 99)
        assert [it for piece in slices for it in piece.retries or ()] == [*range(30)] * 2
        assert rig.log.describe("b").dead == len(dead)

    run(story)


def test_of_a_stage_that_does_not_arrive_whole_nothing_is_left(run: Run) -> None:
    async def story(rig: Rig) -> None:
        calls = count()

        def fail(name: str, fields: Fields) -> None:
            if name == "stage" and not fields.get("gone") and next(calls) == 3:
                raise LogRefused("not now")

        rig.on_call = fail
        with pytest.raises(CallRefused, match="not now"):
            await rig.stage("key", ("orders", MANY))
        for _ in range(5):
            await asyncio.sleep(0)
        assert rig.context.staged == {}
        rig.on_call = lambda name, fields: None
        stage = await rig.stage("key", ("orders", MANY))
        await rig.stages.commit("key", [stage["stage"]])
        assert rig.stored() == {"orders": MANY}

    run(story)


def test_who_stages_much_waits_for_those_before(run: Run) -> None:
    """No more bytes at a time than are allowed, and everybody comes to it, the largest too."""

    async def story(rig: Rig) -> None:
        most = 0

        def look(name: str, fields: Fields) -> None:
            nonlocal most
            most = max(most, rig.stages._on_their_way)

        rig.on_call = look
        keys = [f"key-{number}" for number in range(20)]
        large = rig.stage("large", ("large", MANY))
        staged = await asyncio.gather(large, *(rig.stage(key, (key, MANY[:7])) for key in keys))
        assert most == 30 * (20 + stages.MESSAGE_BYTES), "the large one alone"
        assert rig.stages._on_their_way == 0
        for key, stage in zip(["large", *keys], staged, strict=True):
            await rig.stages.commit(key, [stage["stage"]])
        assert rig.stored() == {"large": MANY, **dict.fromkeys(keys, MANY[:7])}

    run(story)


# --- refusals ---


def test_a_full_queue_takes_all_of_it_or_nothing(run: Run) -> None:
    async def story(rig: Rig) -> None:
        ids = await stage_many(rig)
        with pytest.raises(CallRefused, match="max-bytes") as refused:
            await rig.stages.commit("key", ids)
        assert refused.value.kind == "too-large"
        assert rig.stored() == {}
        stored, staged = await rig.stages.standing("key")
        assert (stored, len(staged)) == (None, 5)
        assert await rig.stages.abort("key") is False
        with pytest.raises(CallRefused, match="transaction 'key': it has no stage"):
            await rig.stages.commit("key", ids)

    run(story, orders={"max-bytes": 250})


def test_concurrent_commits_are_one(run: Run) -> None:
    async def story(rig: Rig) -> None:
        ids = await stage_many(rig)
        outcomes = await asyncio.gather(*(rig.stages.commit("key", ids) for _ in range(10)))
        assert sorted(it.repeated for it in outcomes) == [False] + [True] * 9
        assert all(it.stored == outcomes[0].stored for it in outcomes)
        assert rig.stored() == WANTED

    run(story)


def test_concurrent_commits_of_different_stages_have_one_answer_each(run: Run) -> None:
    async def story(rig: Rig) -> None:
        mine, other = [(await rig.stage("key", ("orders", it)))["stage"] for it in (MANY[:5], MANY[5:9])]
        asked = [rig.stages.commit("key", [it]) for it in (mine, other)]
        first, second = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(first, Committed)
        assert isinstance(second, Problem)
        assert second.name == "stage-not-found"
        assert rig.stored() == {"orders": MANY[:5]}

    run(story)


def test_many_transactions_at_a_time_all_end(run: Run) -> None:
    async def story(rig: Rig) -> None:
        keys = [f"key-{number}" for number in range(8)]

        async def write(key: str) -> int:
            ids = [
                (await rig.stage(key, ("orders", [key.encode() + m for m in MANY])))["stage"]
                for _ in range(3)
            ]
            (stored,) = (await rig.stages.commit(key, ids[1:])).stored
            return int(stored["offset_end"] - stored["offset_start"])

        assert await asyncio.gather(*map(write, keys)) == [2 * len(MANY)] * len(keys)
        wanted = Counter(key.encode() + m for key in keys for m in MANY * 2)
        assert Counter(rig.stored()["orders"]) == wanted

    run(story)
