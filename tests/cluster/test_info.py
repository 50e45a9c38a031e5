"""The picture of a cluster: what it is made of, and that the HTTP API promises just that."""

import jsonschema_rs

from penstock.cluster.checks import Finding, Level
from penstock.cluster.info import cluster_info, nodes_of
from penstock.cluster.records import Claim
from penstock.http.api.broker import SCHEMAS, copies_of

STREAM = {
    "cluster": {
        "name": "penstock",
        "leader": "b",
        "replicas": [
            {"name": "c", "current": False, "offline": True, "active": 5, "lag": 7},
            {"name": "a", "current": True, "active": 5},
            {"name": "d", "current": False, "active": 5, "lag": 2},
            {"name": "e", "current": False, "active": 6_000_000_000},
        ],
    }
}


def test_nodes_have_a_state_each() -> None:
    assert nodes_of(STREAM) == [
        {"name": "a", "state": "current", "behind": 0},
        {"name": "b", "state": "leader", "behind": 0},
        {"name": "c", "state": "offline", "behind": 7},
        {"name": "d", "state": "behind", "behind": 2},
        {"name": "e", "state": "offline", "behind": 0},
    ]


def test_a_stream_of_one_server_says_nothing_of_nodes() -> None:
    assert nodes_of({"config": {}}) == []
    assert nodes_of({"cluster": {"leader": "only"}}) == [{"name": "only", "state": "leader", "behind": 0}]


def test_of_each_shard_it_says_who_stands_by_and_how_far() -> None:
    members: dict[str, dict[str, object]] = {
        "a": {"warm": [0, 1], "logs": {"0": [5000, 3, 4096, 0xABC], "1": [700]}},
        "b": {"warm": [1], "logs": {"0": [4000], "1": [900, 1, 900]}},  # as earlier versions said it
    }
    claims = [Claim("a", 1), Claim("b", 7)]
    picture = cluster_info(name="eu", own="b", members=members, claims=claims, streams={}, findings=[])
    jsonschema_rs.validate(dict(SCHEMAS["Cluster"]), picture)
    assert picture["this"] == "b"
    names = ("leader", "standby", "term", "queues", "bytes", "behind_bytes", "log", "copies")
    assert [[it[name] for name in names] for it in picture["shards"]] == [
        ["a", "b", 1, 3, 4096, 1000, "000abc", ["a"]],
        ["b", "a", 7, 1, 900, 200, "", ["a", "b"]],
    ]
    assert copies_of(picture) == [
        {"shard": 0, "role": "standby", "behind_bytes": 1000},
        {"shard": 1, "role": "leader", "behind_bytes": 200},
    ]


def test_the_picture_is_what_the_api_promises() -> None:
    findings = [Finding("version", Level.OK, "2.15.1"), Finding("sync", Level.WARN, "who knows", "ask")]
    members: dict[str, dict[str, object]] = {"f1": {"warm": True}, "f3": {"version": "0.1.0"}}
    picture = cluster_info(
        name="eu",
        own="f2",
        members=members,
        linked=["f2"],
        claims=[Claim("f1", 3)],
        streams={0: STREAM},
        findings=findings,
    )
    jsonschema_rs.validate(dict(SCHEMAS["Cluster"]), picture)
    assert (picture["role"], picture["leader"], picture["id"]) == ("follower", "f1", "f2")
    assert picture["members"] == [
        {"id": "f1", "role": "leader", "version": "", "linked": True, "copy": "current"},
        {"id": "f2", "role": "follower", "version": "", "linked": True, "copy": "behind"},
        {"id": "f3", "role": "follower", "version": "0.1.0", "linked": False, "copy": "behind"},
    ]
    (shard,) = picture["shards"]
    assert shard.pop("standby") in ("f2", "f3")
    assert shard == {
        "shard": 0,
        "leader": "f1",
        "term": 3,
        "queues": 0,
        "bytes": 0,
        "behind_bytes": None,
        "log": "",
        "copies": ["f1"],
    }
    assert picture["checks"][1] == {"name": "sync", "level": "warn", "text": "who knows", "advice": "ask"}
    alone = cluster_info(name="eu", own="f1", members={}, claims=[Claim("f1")], streams={}, findings=[])
    jsonschema_rs.validate(dict(SCHEMAS["Cluster"]), alone)
    assert (alone["role"], alone["nodes"]) == ("leader", [])
