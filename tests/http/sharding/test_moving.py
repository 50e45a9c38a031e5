"""Messages that move from a queue in one log to a queue in another, whoever dies on the way."""

import asyncio
import logging
from array import array
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.http.link import CallRefused
from penstock.http.problems import Problem
from penstock.http.sharding.moving import Moved, move
from penstock.log.log import Log
from penstock.log.state import FORMAT_MOVES
from penstock.log.transactions import Transactions
from penstock.model.batch import Batch
from tests.build import interpreted_only
from tests.http.sharding.test_transactions import QUEUES, Cluster, quick, run
from tests.http.stage_rig import Died, every_moment

__all__ = ["quick"]

SOURCE, TARGET = QUEUES[0], QUEUES[1]
BODIES = [b"%d" % number * 40 for number in range(10)]
ASKED = [1, 2, 3, 4, 6, 7, 8, 9]
HELD = [0, 1, 2]
"""Somebody takes these first, also some of those that are to be moved."""

MOVED = [BODIES[number] for number in ASKED if number not in HELD]


async def fill(cluster: Cluster) -> Batch:
    """Messages, some of which somebody holds, and the batch of those that are to go."""
    rig = cluster.rigs[0]
    rig.log.append(SOURCE, Batch.of(BODIES, protocol="http"), rig.now)
    rig.turn()
    taken = rig.log.take(SOURCE, "somebody", len(HELD), rig.now)
    assert sum(it.hi - it.lo for it in taken) == len(HELD)
    rig.turn()
    batch = Batch.of([BODIES[number] for number in ASKED], ttl_seconds=[100] * len(ASKED), protocol="http")
    batch.moves, batch.source = array("q", ASKED), SOURCE
    batch.identity = rig.log.describe(SOURCE).identity
    return batch


def living(log: Log, queue: str) -> list[bytes]:
    if not log.has_queue(queue):
        return []
    end = log.describe(queue).offset_end
    found: dict[int, bytes] = {}
    for piece in log.read(queue, 0, end):
        found |= dict(enumerate(piece.messages(), piece.first_offset + piece.lo))
    runs = log.states(queue, 0, end, 1000)
    return [found[it] for run in zip(runs.first, runs.end, strict=True) for it in range(*run)]


def standing(cluster: Cluster) -> tuple[list[bytes], list[bytes]]:
    """What is living in the two queues."""
    for rig in cluster.rigs:
        rig.turn()
    return living(cluster.rigs[0].log, SOURCE), living(cluster.rigs[1].log, TARGET)


LEFT = [body for body in BODIES if body not in MOVED]


def is_whole(cluster: Cluster) -> bool:
    """Each message is in one of the two; whether they have moved."""
    here, there = standing(cluster)
    assert (here, there) in ((BODIES, []), (LEFT, MOVED))
    return bool(there)


@pytest.mark.parametrize("logs", [(), (0,), (1,), (0, 1, 2)], ids=str)
def test_whenever_processes_die_each_message_is_in_one_queue(tmp_path: Path, logs: tuple[int, ...]) -> None:
    async def one_life(last: int) -> bool:
        cluster = Cluster(tmp_path / str(last))
        await cluster.start()
        batch = await fill(cluster)
        cluster.moments.passed, cluster.moments.last = 0, last
        first: Moved | None = None
        with suppress(Died):
            first = await move(cluster, TARGET, batch)
        await cluster.die(logs)
        await cluster.start()
        await cluster.settle()
        moved = is_whole(cluster)
        if first is not None:
            assert moved
            assert first.messages == len(MOVED)
            assert first.stored is not None
            assert [it[:3] for it in first.stored] == [[TARGET, 0, len(MOVED)]]
        if not moved and 0 not in logs:  # Made again, it goes on; nobody has taken anything since.
            assert (await move(cluster, TARGET, batch)).messages == len(MOVED)
            assert is_whole(cluster)
        await cluster.end()
        return first is None

    assert asyncio.run(every_moment(one_life)) > 10


@pytest.mark.parametrize("what", ["request", "answer"])
def test_whatever_is_lost_on_the_way_each_message_is_in_one_queue(tmp_path: Path, what: str) -> None:
    async def one_life(last: int) -> bool:
        cluster = Cluster(tmp_path / str(last))
        await cluster.start()
        batch = await fill(cluster)
        calls = 0

        def lose(shard: int, name: str) -> str:
            nonlocal calls
            calls += 1
            return what if calls - 1 == last else ""

        cluster.on_call = lose
        told: Moved | None = None
        with suppress(CallRefused, Problem):
            told = await move(cluster, TARGET, batch)
        cluster.on_call = lambda shard, name: ""
        await cluster.settle()
        moved = is_whole(cluster)
        assert moved or told is None
        assert told is None or told.messages == len(MOVED)
        await cluster.end()
        return calls > last

    assert asyncio.run(every_moment(one_life)) >= 5


async def somebody_holds_some(cluster: Cluster) -> None:
    """What he has stays; and nothing of the rest is there twice."""
    batch = await fill(cluster)
    moved = await move(cluster, TARGET, batch)
    assert moved.messages == len(MOVED)
    assert standing(cluster) == (LEFT, MOVED)
    row = cluster.rigs[1].log.describe(TARGET)
    assert (row.offset_end, row.ready) == (len(MOVED), len(MOVED))
    assert not cluster.rigs[1].log.stages_count


async def it_comes_late(cluster: Cluster) -> None:
    """The other log stores them when it can; until then it keeps them."""
    batch = await fill(cluster)
    cluster.on_call = lambda shard, name: "request" if shard == 1 and name == "commit" else ""
    assert await move(cluster, TARGET, batch) == (len(MOVED), None)
    assert standing(cluster) == (LEFT, [])
    await cluster.die((0, 1))
    await cluster.start()
    cluster.on_call = lambda shard, name: ""
    await cluster.settle()
    assert standing(cluster) == (LEFT, MOVED)


async def it_was_over_before(cluster: Cluster) -> None:
    """The other log has asked, and was told that nothing comes of it."""
    batch = await fill(cluster)
    asked = False

    async def settle_once(shard: int, name: str) -> None:
        nonlocal asked
        if name == "move" and not asked:
            asked = True
            await cluster.settle()

    cluster.before = settle_once
    with suppress(CallRefused):
        await move(cluster, TARGET, batch)
    await cluster.settle()
    assert is_whole(cluster) is False


STORIES = [somebody_holds_some, it_comes_late, it_was_over_before]


@pytest.mark.parametrize("story", STORIES, ids=lambda it: it.__name__)
def test_a_move(tmp_path: Path, story: Callable[[Cluster], Coroutine[Any, Any, None]]) -> None:
    run(tmp_path, story)


def _takes_all(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, parts, rows: parts


def _decides_any(real: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: Transactions, key: str, attempt: str, *more: Any) -> Any:
        self._attempts[key] = attempt
        return real(self, key, attempt, *more)

    return wrong


def _takes_nothing_out(real: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: Transactions, name: str, offsets: "array[int]", fates: list[Any], *more: Any) -> Any:
        return [(0, len(offsets))]

    return wrong


@interpreted_only
@pytest.mark.parametrize(
    ("name", "wrong"),
    [("_picked", _takes_all), ("move", _decides_any), ("_take_out", _takes_nothing_out)],
    ids=["what is held goes too", "decided when over", "nothing leaves"],
)
def test_what_would_double_or_lose_messages_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[..., Any]
) -> None:
    monkeypatch.setattr(Transactions, name, wrong(getattr(Transactions, name)))
    logging.disable(logging.CRITICAL)
    caught = 0
    try:
        for number, story in enumerate(STORIES):
            try:
                run(tmp_path / str(number), story)
            except (AssertionError, CallRefused, Problem):
                caught += 1
    finally:
        logging.disable(logging.NOTSET)
    assert caught, "no story has found it"


def test_a_move_that_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        batch = await fill(cluster)
        batch.identity = "0" * len(batch.identity)
        with pytest.raises(CallRefused):
            await move(cluster, TARGET, batch)
        assert standing(cluster) == (BODIES, [])
        assert not cluster.rigs[1].log.stages_count
        assert not cluster.rigs[1].log.prepared()

    run(tmp_path, story)


def test_what_a_log_with_moves_is_called(tmp_path: Path) -> None:
    """Whoever does not know that some rows of a stage may count is told so, and stops."""

    async def story(cluster: Cluster) -> None:
        await move(cluster, TARGET, await fill(cluster))
        assert [rig.log._state.format == FORMAT_MOVES for rig in cluster.rigs] == [True, False, False]

    run(tmp_path, story)
