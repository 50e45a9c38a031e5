"""Room: how much a cluster's stream can still take, by the limits of NATS itself.

Three kinds of bounds stand between a log and what its nodes can store, and the one that leaves least counts:

    account   what this account may store in files, all copies of all its streams together (`max_file`)
    stream    what the stream may hold (`max_bytes`, where somebody has set it)
    node      what each node with a copy may store, whoever stores it (`max_file_store`); only its monitoring
              tells

They are asked for every few seconds. What was sent since then is taken off, so that nobody writes further
than he has seen; what was removed since, and what strangers store, is seen the next time. Where several
front-ends write logs of one cluster (`writers`), each goes by what all will have sent if they send as much as
it does itself: so none takes more than its part before it looks again. What a node has said
counts for `NODE_SECONDS`: the one that is full is the one that may not answer in time.

Not every limit is told: a disk may be full, or nobody answers for the nodes. Where NATS says no for want of
room for a while, there is none, until something was stored again (`Room.refused`).

A log leaves some of a disk to its settlements (`committer.py`). So new messages wait while there is room
left, and what makes room, settling, handing out, purging, goes on; and so does the lease, which is in the
same account.

How it fails: it does not. Where nobody tells of a limit, and NATS does not say no, there is none here: the
local copy's disk counts.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

RECORD_BYTES: Final = 256
"""What a record takes beside its payload: its subject, its headers, and what NATS writes of it."""

NODE_SECONDS: Final = 90.0
"""Longer than its monitoring is left alone (`cluster/front.py`), so that it is asked again before."""

Said = Mapping[str, Any]
"""JSON in a server's terms: `Any`."""


class Bound(NamedTuple):
    """One limit, counted as the log counts: in bytes of one copy."""

    what: str
    total: int
    free: int


def bounds_of(account: Said, stream: Said, nodes: Iterable[tuple[Said, int]]) -> Iterator[Bound]:
    """The limits that are known, by what JetStream says of the account and the stream, and nodes of
    themselves (`/varz`), each with what was sent since."""
    copies = max(int(stream["config"].get("num_replicas", 1)), 1)
    # Who pays by tiers has a limit for each number of copies, which is meant for one copy.
    tier = (account.get("tiers") or {}).get(f"R{copies}")
    said, scale = (account, 1) if tier is None else (tier, copies)
    limit = int((said.get("limits") or {}).get("max_storage", -1)) * scale
    if limit > 0:
        used = int(said.get("storage", 0))
        yield Bound("the account's max_file", limit // copies, max(limit - used, 0) // copies)
    limit = int(stream["config"].get("max_bytes", -1))
    if limit > 0:
        free = max(limit - int(stream["state"]["bytes"]), 0)
        yield Bound(f"max_bytes of stream {stream['config']['name']}", limit, free)
    cluster = stream.get("cluster") or {}
    places = {str(it["name"]) for it in cluster.get("replicas") or ()} | {str(cluster.get("leader", ""))}
    for node, sent_bytes in nodes:
        jetstream = node.get("jetstream") or {}
        limit = int((jetstream.get("config") or {}).get("max_storage", 0))
        if limit > 0 and (node.get("server_name") in places or places == {""}):
            used = int((jetstream.get("stats") or {}).get("storage", 0)) + sent_bytes
            yield Bound(f"max_file_store of node {node.get('server_name')}", limit, max(limit - used, 0))


class Room:
    """What was seen last. It is read by all threads of the log, and each field is one word to Python."""

    def __init__(self) -> None:
        self.sent_bytes = 0  # in this life; the appender counts
        self.writers = 1
        self.refused = ""  # what NATS said no with, for want of room; the appender tells
        self._seen: tuple[Bound | None, int] = (None, 0)  # with what was sent by then
        self._nodes: dict[str, tuple[float, int, Said]] = {}  # when they said it, and what was sent by then

    def heard(self, nodes: Iterable[Said], sent_bytes: int, now: float) -> list[tuple[Said, int]]:
        """What every node has said last, for `bounds_of`: `nodes` just now, and others not long ago."""
        self._nodes |= {str(node.get("server_name")): (now, sent_bytes, node) for node in nodes}
        self._nodes = {name: it for name, it in self._nodes.items() if now - it[0] < NODE_SECONDS}
        return [(node, (sent_bytes - then) * self.writers) for _, then, node in self._nodes.values()]

    def see(self, bounds: Iterable[Bound], sent_bytes: int) -> None:
        """`sent_bytes`: as it was before anybody was asked."""
        self._seen = min(bounds, key=lambda it: it.free, default=None), sent_bytes

    @property
    def bound(self) -> Bound | None:
        """What leaves least room, now."""
        bound, then = self._seen
        if bound is None:
            return None
        return bound._replace(free=max(bound.free - (self.sent_bytes - then) * self.writers, 0))
