"""What a stream can still take: the least that account, stream and nodes leave, less what was sent since."""

from typing import Any

import pytest

from penstock.log.jetstream.errors import Failure, JetStreamError
from penstock.log.jetstream.room import Bound, Room, bounds_of

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
    found = list(bounds_of(NO_LIMIT, placed, nodes))
    assert found == [
        Bound("max_file_store of node a", 1000, 600),
        Bound("max_file_store of node b", 1000, 100),
    ]
    # One that stands alone says nothing of a cluster.
    assert [it.free for it in bounds_of(NO_LIMIT, stream(), nodes)] == [600, 100, 1]


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
