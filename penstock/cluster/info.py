"""A front-end and its cluster as people see it: what `LogInfo.cluster` holds, and `GET /v1/engine` shows.

    name      of the log
    id        of this front-end
    role      "leader" or "follower"
    leader    the id of the front-end that leads; empty: nobody does at the moment
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
from penstock.log.jetstream.lease import WARM

LEADER: Final = "leader"
FOLLOWER: Final = "follower"
SILENT_NS: Final = 5_000_000_000
"""A replica that the leader has not heard of for so long is not there: it says something every second."""


def cluster_info(
    *,
    name: str,
    own: str,
    leader: str,
    members: Mapping[str, Mapping[str, Any]],
    linked: Collection[str] = (),
    stream: Mapping[str, Any] | None,
    findings: Sequence[Finding],
) -> dict[str, Any]:
    """The picture. `own`, `leader` and `linked` (to the leader) are ids; `members` is what each says of
    itself, `stream` what JetStream says of the log's."""
    return {
        "name": name,
        "id": own,
        "role": _role(own, leader),
        "leader": leader,
        "members": [
            {
                "id": member,
                "role": _role(member, leader),
                "version": str(members.get(member, {}).get("version", "")),
                "linked": member == leader or member in linked,
                "copy": _copy(members.get(member, {})),
            }
            for member in sorted({own, *members})
        ],
        "nodes": nodes_of(stream) if stream is not None else [],
        "checks": [finding.row() for finding in findings],
    }


def _role(member: str, leader: str) -> str:
    return LEADER if member == leader else FOLLOWER


def _copy(facts: Mapping[str, Any]) -> str:
    return "current" if facts.get(WARM) else "behind"


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
