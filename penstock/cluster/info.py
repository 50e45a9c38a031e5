"""A front-end and its cluster as people see it: what `LogInfo.cluster` holds, and `GET /v1/engine` shows.

    name      of the log
    id        of this front-end
    role      "leader" or "follower"
    this      the same
    leader    the id of the front-end that leads; empty: nobody does at the moment
    shards    each with the front-end that leads it, in which term, the one that stands by and how many bytes
              of the log that has yet to read; how many queues and bytes it has; who has a current copy
    members   every front-end, each with its id, its role, its version, whether the leader has a link to it,
              and how its copy of the log is: "current" (it can lead at once) or "behind" (it would have to
              read first)
    nodes     every NATS node that has a copy of the log: its name, its state ("leader", "current", "behind"
              or "offline"), and by how many records it is behind
    checks    what the checks came to: at the start (`checks.py`), and since (`records`, `clocks`)

Everything in it is plain JSON.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from penstock.cluster.checks import Finding
from penstock.cluster.placement import place
from penstock.cluster.records import HOME, LOGS, WARM, WEARY, Claim

LEADER: Final = "leader"
FOLLOWER: Final = "follower"
SILENT_NS: Final = 5_000_000_000
"""A replica that the leader has not heard of for so long is not there: it says something every second."""


def cluster_info(
    *,
    name: str,
    own: str,
    members: Mapping[str, Mapping[str, Any]],
    linked: Collection[str] = (),
    claims: Sequence[Claim],
    streams: Mapping[int, Mapping[str, Any]],
    findings: Sequence[Finding],
) -> dict[str, Any]:
    """The picture. `own` and `linked` (to what is led here) are ids; `members` is what each says of itself,
    `claims` and `streams` are by shard: what its lease says, and what JetStream says of its stream."""
    leader = claims[0].leader if claims else ""
    leaders = {claim.leader for claim in claims}
    stream = next(iter(streams.values()), None)
    return {
        "name": name,
        "id": own,
        "this": own,
        "role": LEADER if own in leaders else FOLLOWER,
        "leader": leader,
        "shards": _shards(members, claims),
        "members": [
            {
                "id": member,
                "role": LEADER if member in leaders else FOLLOWER,
                "version": str(members.get(member, {}).get("version", "")),
                "linked": member in leaders or member == own or member in linked,
                "copy": _copy(members.get(member, {})),
            }
            for member in sorted({own, *members})
        ],
        "nodes": nodes_of(stream) if stream is not None else [],
        "checks": [finding.row() for finding in findings],
    }


def _shards(members: Mapping[str, Mapping[str, Any]], claims: Sequence[Claim]) -> list[dict[str, Any]]:
    homes = {name: str(facts.get(HOME, name)) for name, facts in members.items()}
    weary = [name for name, facts in members.items() if facts.get(WEARY)]
    places = place(homes, [claim.leader for claim in claims], weary)
    rows = []
    for shard, (claim, its_place) in enumerate(zip(claims, places, strict=True)):
        led = _extent(members.get(claim.leader, {}), shard)
        copied = _extent(members.get(its_place.standby, {}), shard)
        rows.append(
            {
                "shard": shard,
                "leader": claim.leader,
                "standby": its_place.standby,
                "term": claim.term,
                "queues": led[1] if len(led) > 1 else 0,
                "bytes": led[2] if len(led) > 2 else 0,
                "log": f"{led[3]:06x}" if len(led) > 3 else "",
                "behind_bytes": max(led[0] - copied[0], 0) if led and copied else None,
                "copies": sorted(it for it, facts in members.items() if shard in _warm(facts)),
            }
        )
    return rows


def _extent(facts: Mapping[str, Any], shard: int) -> list[int]:
    """What a member has of a log; nothing where it does not say so."""
    logs = facts.get(LOGS)
    said = logs.get(str(shard)) if isinstance(logs, dict) else None
    return said if isinstance(said, list) and all(isinstance(it, int) for it in said) else []


def _copy(facts: Mapping[str, Any]) -> str:
    return "current" if facts.get(WARM) else "behind"


def _warm(facts: Mapping[str, Any]) -> Sequence[int]:
    warm = facts.get(WARM)
    if isinstance(warm, bool):  # The log is the only one.
        return (0,) if warm else ()
    return warm if isinstance(warm, list) else ()


def nodes_of(stream: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The nodes that have a copy of a stream, by the answer of JetStream about it, in the order of names."""
    cluster = stream.get("cluster") or {}
    found = [
        {"name": str(replica["name"]), "state": _state(replica), "behind": int(replica.get("lag", 0))}
        for replica in cluster.get("replicas") or ()
    ]
    if cluster.get("leader"):
        found.append({"name": str(cluster["leader"]), "state": LEADER, "behind": 0})
    return sorted(found, key=lambda node: str(node["name"]))


def _state(replica: Mapping[str, Any]) -> str:
    if replica.get("current"):
        return "current"
    # JetStream calls offline only who has said goodbye; one that was killed has just not been heard of.
    gone = replica.get("offline") or int(replica.get("active", 0)) > SILENT_NS
    return "offline" if gone else "behind"
