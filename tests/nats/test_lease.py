"""Who leads: elections on a real node, with brokers that come, go and fall silent."""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.cluster import lease
from penstock.cluster.election import ASK_SECONDS, Election, ShardsError, shards_of
from penstock.cluster.lease import LEASE_SECONDS
from penstock.cluster.records import WARM, WEARY, Claim, Role
from penstock.log.jetstream.api import JetStream
from penstock.log.jetstream.cluster import Cluster, wait_until
from penstock.log.jetstream.errors import NO_RESPONDERS, Failure, JetStreamError, NoAnswer
from penstock.log.jetstream.link_thread import LinkThread
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.servers import parse_server
from penstock.log.jetstream.stream_log import make_missing

Join = Callable[..., "Broker"]


class Broker:
    """Somebody who takes part, with a link of its own."""

    def __init__(self, cluster: Cluster, names: LogNames, name: str, shards: int = 1) -> None:
        self.name = name
        self.nats = LinkThread.open([parse_server(node.url) for node in cluster.nodes])
        self.seen: list[tuple[Role, int]] = []
        self.election = Election(
            JetStream(self.nats.link, answer_seconds=ASK_SECONDS, patience_seconds=0.0),
            names,
            name,
            self.nats.ask(shards_of(self.nats.api, names, shards)),
            offer=lambda shard, term: Claim(name, term, f"{name}:1", "1"),
            facts=lambda: {"name": name},
            changed=lambda view: self.seen.append((view.roles[0], view.claims[0].term)),
        )
        self.nats.ask(self.election.start())

    @property
    def role(self) -> Role:
        return self.election.view.roles[0]

    @property
    def leader(self) -> str:
        return self.election.view.claims[0].leader

    def leave(self) -> None:
        self.nats.ask(self.election.stop())
        self.nats.close()

    def die(self) -> None:
        """Without another word."""
        self.nats.close()


@pytest.fixture
def join(node: Cluster) -> Iterator[Join]:
    names = LogNames(f"lease-{secrets.token_hex(4)}")
    brokers: list[Broker] = []

    def begin(name: str, shards: int = 1) -> Broker:
        if not brokers:
            nats = LinkThread.open([parse_server(it.url) for it in node.nodes])
            (state,) = [it for it in names.all_settings(1) if it["name"] == names.state_stream]
            nats.ask(nats.api.create_stream(state))
            nats.close()
        brokers.append(Broker(node, names, name, shards))
        return brokers[-1]

    yield begin
    for broker in brokers:
        broker.nats.close()


def settled(*brokers: Broker) -> Broker:
    """The one that leads, when everybody agrees."""

    def agreed() -> Broker | None:
        leading = [it for it in brokers if it.role is Role.LEADING]
        same = len({it.leader for it in brokers}) == 1
        return leading[0] if len(leading) == 1 and same and leading[0].leader == leading[0].name else None

    return wait_until("one leads and all know it", agreed)


def test_one_of_many_leads_and_everybody_knows_which(join: Join) -> None:
    brokers = [join(name) for name in ("ann", "bob", "cid")]
    leader = settled(*brokers)
    claim = leader.election.view.claims[0]
    assert claim == Claim(leader.name, 1, f"{leader.name}:1", "1", claim.session)
    everybody: dict[str, Any] = {
        name: {"name": name, WARM: [0], WEARY: False} for name in ("ann", "bob", "cid")
    }
    wait_until(
        "all are seen by all", lambda: all(it.election.view.members == everybody for it in brokers) or None
    )


def test_who_leaves_lets_go_of_it_at_once(join: Join) -> None:
    ann = join("ann")
    settled(ann)
    bob = join("bob")
    settled(ann, bob)
    ann.leave()
    began = time.monotonic()
    settled(bob)
    assert time.monotonic() - began < LEASE_SECONDS
    assert bob.election.view.claims[0].term == 2
    wait_until("ann is not a member any more", lambda: "ann" not in bob.election.view.members or None)


def test_who_dies_loses_it(join: Join) -> None:
    ann = join("ann")
    settled(ann)
    bob = join("bob")
    settled(ann, bob)
    ann.die()
    settled(bob)
    assert bob.seen[-1] == (Role.LEADING, 2)


def test_shards_are_led_by_all_and_handed_over_to_who_comes(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "QUIET_SECONDS", 0.5)
    ann, bob = join("ann", 6), join("bob", 6)

    def led(*brokers: Broker) -> list[int] | None:
        """How many each leads, when each is led."""
        for broker in brokers:
            for shard, to in broker.election.view.give.items():
                broker.nats.ask(broker.election.release(shard, to))
        count = [sum(it.election.is_sure(shard) for shard in range(6)) for it in brokers]
        return count if sum(count) == 6 else None

    wait_until("both lead three", lambda: led(ann, bob) == [3, 3] or None)
    cid = join("cid", 6)
    wait_until("all lead two", lambda: led(ann, bob, cid) == [2, 2, 2] or None)
    terms = [claim.term for claim in ann.election.view.claims]
    cid.leave()
    wait_until("the others lead its shards", lambda: led(ann, bob))
    assert all(a <= b.term for a, b in zip(terms, ann.election.view.claims, strict=True))


def test_all_agree_how_many_shards_a_cluster_has(node: Cluster) -> None:
    """Several come to a new cluster at once, and want different numbers: the first to come makes it."""
    names = LogNames(f"lease-{secrets.token_hex(4)}")
    links = [LinkThread.open([parse_server(node.nodes[0].url)]) for _ in range(3)]
    try:
        (state,) = [it for it in names.all_settings(1) if it["name"] == names.state_stream]
        links[0].ask(links[0].api.create_stream(state))
        asked = [it.start(shards_of(it.api, names, 4 + number)) for number, it in enumerate(links)]
        (shards,) = {it.result(20) for it in asked}
        assert shards in (4, 5, 6)
        leases = links[0].ask(links[0].api.last_of(names.state_stream, [names.state("lease.*")]))
        assert len(leases) == shards
    finally:
        for it in links:
            it.close()


class Hesitant(JetStream):
    """As where the leader of a stream has just been chosen: nobody listens yet, or an answer is lost."""

    refusals = 0

    async def put(self, subject: str, *args: Any, **options: Any) -> int:
        self.refusals += 1
        if self.refusals % 3 == 1:
            raise JetStreamError(subject, Failure(NO_RESPONDERS, 0, "nobody listens"))
        seq = await super().put(subject, *args, **options)
        if self.refusals % 3 == 2:
            raise NoAnswer(subject)
        return seq


def test_a_cluster_is_made_also_where_nobody_listens_for_a_moment(node: Cluster) -> None:
    names = LogNames(f"lease-{secrets.token_hex(4)}")
    with contextlib.closing(LinkThread.open([parse_server(node.nodes[0].url)])) as nats:
        (state,) = [it for it in names.all_settings(1) if it["name"] == names.state_stream]
        nats.ask(nats.api.create_stream(state))
        assert nats.ask(shards_of(Hesitant(nats.link), names, 4)) == 4
        assert nats.ask(shards_of(nats.api, names, 16)) == 4


def test_a_cluster_of_an_earlier_version_has_one_shard(node: Cluster) -> None:
    names = LogNames(f"lease-{secrets.token_hex(4)}")
    with contextlib.closing(LinkThread.open([parse_server(node.nodes[0].url)])) as nats:
        nats.ask(make_missing(nats, names.all_settings(1)))
        before = b'{"leader": "old", "term": 7, "relay": "h:1", "version": "0.1.0"}'
        nats.ask(nats.api.put(names.state("lease"), before))
        assert nats.ask(shards_of(nats.api, names, 16)) == 1
        nats.ask(nats.api.put(names.state("shards"), b"{}"))
        with pytest.raises(ShardsError, match=r"says b'\{\}': see who else may write to NATS"):
            nats.ask(shards_of(nats.api, names, 16))


def test_a_leader_whose_cluster_falls_silent_is_unsure_and_leads_on_afterwards(
    start: Callable[[int], Cluster],
) -> None:
    cluster = start(1)
    names = LogNames("silent")
    nats = LinkThread.open([parse_server(cluster.nodes[0].url)])
    nats.ask(make_missing(nats, names.all_settings(1)))
    nats.close()
    ann, bob = Broker(cluster, names, "ann"), Broker(cluster, names, "bob")
    try:
        leader = settled(ann, bob)
        cluster.nodes[0].pause()
        wait_until("it is unsure", lambda: leader.role is Role.UNSURE or None)
        cluster.nodes[0].resume()
        assert settled(ann, bob) is leader, "nobody takes a lease because the cluster was away"
        assert (Role.UNSURE, 1) in leader.seen
        assert leader.seen[-1] == (Role.LEADING, 1)
    finally:
        ann.die()
        bob.die()
