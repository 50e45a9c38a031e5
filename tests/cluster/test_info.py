"""The picture of a cluster: what it is made of, and that the HTTP API promises just that."""

import jsonschema_rs

from penstock.cluster.checks import Finding, Level
from penstock.cluster.info import cluster_info, nodes_of
from penstock.cluster.records import Claim
from penstock.http.api.broker import SCHEMAS

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
    assert picture["shards"] == [{"shard": 0, "leader": "f1", "term": 3, "copies": []}]
    assert picture["checks"][1] == {"name": "sync", "level": "warn", "text": "who knows", "advice": "ask"}
    alone = cluster_info(name="eu", own="f1", members={}, claims=[Claim("f1")], streams={}, findings=[])
    jsonschema_rs.validate(dict(SCHEMAS["Cluster"]), alone)
    assert (alone["role"], alone["nodes"]) == ("leader", [])
