"""What a stream can still take: the least that account, stream and nodes leave, less what was sent since."""

import asyncio
import errno
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cluster import front as module
from penstock.cluster.checks import Look
from penstock.cluster.front import LOOK_SECONDS, SILENT_SECONDS, Front
from penstock.log.jetstream.disk import StreamDisk
from penstock.log.jetstream.errors import Failure, JetStreamError
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.replica import RecordIndex
from penstock.log.jetstream.room import NODE_SECONDS, Bound, Room, bounds_of

NO_LIMIT = {"limits": {"max_storage": -1}, "storage": 5}


def stream(replicas: int = 1, **more: Any) -> dict[str, Any]:
    config = {"name": "S", "num_replicas": replicas, "max_bytes": more.pop("max_bytes", -1)}
    return {"config": config, "state": {"bytes": 700}, **more}


def node(name: str, limit: int, used: int) -> dict[str, Any]:
    return {"server_name": name, "jetstream": {"config": {"max_storage": limit}, "stats": {"storage": used}}}


def test_without_limits_there_is_no_bound() -> None:
    assert list(bounds_of(NO_LIMIT, stream(), [])) == []
    assert Room().bound is None


def test_an_account_counts_every_copy() -> None:
    account = {"limits": {"max_storage": 9000}, "storage": 3000}
    assert list(bounds_of(account, stream(3), [])) == [Bound("the account's max_file", 3000, 2000)]
    assert list(bounds_of(account, stream(1), [])) == [Bound("the account's max_file", 9000, 6000)]


def test_a_tier_is_meant_for_one_copy() -> None:
    account = {
        "limits": {"max_storage": -1},
        "tiers": {"R3": {"limits": {"max_storage": 1000}, "storage": 600}},
    }
    assert list(bounds_of(account, stream(3), [])) == [Bound("the account's max_file", 1000, 800)]
    assert list(bounds_of(account, stream(1), [])) == []


def test_a_stream_may_have_a_limit_of_its_own() -> None:
    assert list(bounds_of(NO_LIMIT, stream(max_bytes=1000), [])) == [
        Bound("max_bytes of stream S", 1000, 300)
    ]
    assert next(bounds_of(NO_LIMIT, stream(max_bytes=600), [])).free == 0


def test_nodes_count_that_have_a_copy() -> None:
    nodes = [node("a", 1000, 400), node("b", 1000, 900), node("c", 1000, 999), {"server_name": "d"}]
    placed = stream(2, cluster={"leader": "a", "replicas": [{"name": "b"}, {"name": "d"}]})
    found = list(bounds_of(NO_LIMIT, placed, [(it, 0) for it in nodes]))
    assert found == [
        Bound("max_file_store of node a", 1000, 600),
        Bound("max_file_store of node b", 1000, 100),
    ]
    # One that stands alone says nothing of a cluster.
    assert [it.free for it in bounds_of(NO_LIMIT, stream(), [(it, 50) for it in nodes])] == [550, 50, 0]


def test_a_node_that_says_nothing_for_a_moment_is_as_full_as_it_was() -> None:
    room = Room()
    a, b = node("a", 1000, 400), node("b", 1000, 900)
    assert room.heard([a, b], 0, 0.0) == [(a, 0), (b, 0)]
    assert room.heard([a], 30, 5.0) == [(a, 0), (b, 30)]
    assert room.heard([], 50, 10.0) == [(a, 20), (b, 50)]
    assert room.heard([], 50, NODE_SECONDS) == [(a, 20)]
    assert room.heard([b], 60, NODE_SECONDS + 1) == [(a, 30), (b, 0)]
    assert room.heard([], 60, 3 * NODE_SECONDS) == []
    assert NODE_SECONDS > SILENT_SECONDS + 2 * LOOK_SECONDS


class Account:
    """What JetStream is asked; it has no limits."""

    async def stream(self, name: str) -> dict[str, Any]:
        return stream()

    async def account(self) -> dict[str, Any]:
        return NO_LIMIT


def front_end(said: Iterator[list[Any]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of one as looks at the nodes, which have said that. Any: most of it is missing."""
    front: Any = Front.__new__(Front)
    front.room, front._quick, front._streams = Room(), Account(), {}
    front.shards = [SimpleNamespace(number=0, names=LogNames(), led=None, keeps=True)]
    front._loop, front._ask_nodes_at = asyncio.get_running_loop(), float("-inf")
    front.asked = lambda work: work
    front.nats = front.server = SimpleNamespace(link=SimpleNamespace(info={}), settings=None)

    async def look(info: object, settings: object) -> Look:
        return Look(next(said))

    monkeypatch.setattr(module, "look", look)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    return front


def test_a_full_node_whose_monitoring_misses_once_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    async def life() -> None:
        front = front_end(iter([[node("a", 1000, 999)], []]), monkeypatch)
        for _ in range(3):  # the last time, it is left alone
            await front._look_at_room()
            assert front.room.bound == Bound("max_file_store of node a", 1000, 1)

    asyncio.run(life())


def test_looking_at_nodes_goes_on_after_a_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def life() -> None:
        front = front_end(itertools.repeat([node("a", 1000, 999)]), monkeypatch)
        keeps = []

        def keep() -> None:
            keeps.append(1)
            raise OSError(errno.EMFILE, "Too many open files")

        front.shards[0].replica = SimpleNamespace(keep=keep)
        looking = asyncio.create_task(front._look_at_nodes())
        while len(keeps) < 3 and not looking.done():
            await asyncio.sleep(0)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        assert len(keeps) == 3

    asyncio.run(asyncio.wait_for(life(), 20))
    assert [it.exc_info is not None for it in caplog.records] == [True], "once"


def test_what_nats_has_no_room_for_has_none_here(tmp_path: Path) -> None:
    appender: Any = SimpleNamespace(room=Room())
    disk = StreamDisk(str(tmp_path), appender, RecordIndex(str(tmp_path / "records")))
    assert disk.free_bytes() > 0
    appender.room.refused = "no space left"
    assert (disk.free_bytes(), disk.room_in()) == (0, "NATS, which says 'no space left'")
    assert disk.total_bytes() > 0
    appender.room.see([Bound("a", 1000, 300)], 0)
    assert disk.total_bytes() == 1000
    appender.room.refused = ""
    assert disk.free_bytes() == 300


def test_what_was_sent_since_is_taken_off() -> None:
    room = Room()
    room.sent_bytes = 50  # before anybody looked
    room.see([Bound("a", 1000, 300), Bound("b", 500, 200)], 50)
    assert room.bound == Bound("b", 500, 200)
    room.sent_bytes += 150
    assert room.bound == Bound("b", 500, 50)
    room.sent_bytes += 150
    assert room.bound == Bound("b", 500, 0)
    room.see([Bound("b", 500, 400)], room.sent_bytes - 20)  # which were sent while it was asked
    assert room.bound == Bound("b", 500, 380)
    room.see([], room.sent_bytes)
    assert room.bound is None


def test_others_who_write_may_have_sent_as_much() -> None:
    room = Room()
    room.writers = 3
    room.see([Bound("a", 1000, 300)], 0)
    room.heard([{"server_name": "n"}], 0, 1.0)
    room.sent_bytes += 50
    assert room.bound == Bound("a", 1000, 150)
    assert room.heard([], room.sent_bytes, 2.0) == [({"server_name": "n"}, 150)]


@pytest.mark.parametrize(
    ("code", "text", "word"),
    [
        (10002, "resource limits exceeded for account", "its storage is full"),
        (10047, "insufficient storage resources available", "its storage is full"),
        (10077, "maximum bytes exceeded", "its storage is full"),
        (10023, "insufficient resources", "a node's storage is full"),
        (10077, "stream is shutting down", "it may work in a moment"),
        (10118, "stream is offline", "it may work in a moment"),
    ],
)
def test_a_no_for_want_of_room_says_so(code: int, text: str, word: str) -> None:
    assert word in str(JetStreamError("publish", Failure(503, code, text)))
