"""Who leads: elections on a real node, with brokers that come, go and fall silent."""

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.log.jetstream.api import JetStream
from penstock.log.jetstream.cluster import Cluster, wait_until
from penstock.log.jetstream.lease import ASK_SECONDS, LEASE_SECONDS, Claim, Election, Role
from penstock.log.jetstream.link_thread import LinkThread
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.servers import parse_server
from penstock.log.jetstream.stream_log import make_streams

Join = Callable[[str], "Broker"]


class Broker:
    """Somebody who takes part, with a link of its own."""

    def __init__(self, cluster: Cluster, names: LogNames, name: str) -> None:
        self.name = name
        self.nats = LinkThread.open([parse_server(node.url) for node in cluster.nodes])
        self.seen: list[tuple[Role, int]] = []
        self.election = Election(
            JetStream(self.nats.link, answer_seconds=ASK_SECONDS, patience_seconds=0.0),
            names,
            name,
            offer=lambda term: Claim(name, term, f"{name}:1", "1"),
            facts=lambda: {"name": name},
            changed=lambda view: self.seen.append((view.role, view.claim.term)),
        )
        self.nats.ask(self.election.start())

    @property
    def role(self) -> Role:
        return self.election.view.role

    @property
    def leader(self) -> str:
        return self.election.view.claim.leader

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

    def begin(name: str) -> Broker:
        if not brokers:
            nats = LinkThread.open([parse_server(it.url) for it in node.nodes])
            nats.ask(make_streams(nats, names, 1))
            nats.close()
        brokers.append(Broker(node, names, name))
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
    assert leader.election.view.claim == Claim(leader.name, 1, f"{leader.name}:1", "1")
    everybody: dict[str, Any] = {name: {"name": name} for name in ("ann", "bob", "cid")}
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
    assert bob.election.view.claim.term == 2
    wait_until("ann is not a member any more", lambda: "ann" not in bob.election.view.members or None)


def test_who_dies_loses_it(join: Join) -> None:
    ann = join("ann")
    settled(ann)
    bob = join("bob")
    settled(ann, bob)
    ann.die()
    settled(bob)
    assert bob.seen[-1] == (Role.LEADING, 2)


def test_a_leader_whose_cluster_falls_silent_is_unsure_and_leads_on_afterwards(
    start: Callable[[int], Cluster],
) -> None:
    cluster = start(1)
    names = LogNames("silent")
    nats = LinkThread.open([parse_server(cluster.nodes[0].url)])
    nats.ask(make_streams(nats, names, 1))
    nats.close()
    ann, bob = Broker(cluster, names, "ann"), Broker(cluster, names, "bob")
    try:
        leader = settled(ann, bob)
        cluster.nodes[0].pause()
        wait_until("it is unsure", lambda: leader.role is Role.UNSURE or None)
        cluster.nodes[0].resume()
        assert settled(ann, bob) is leader, "nobody takes a lease because the cluster was away"
        assert leader.seen[-2:] == [(Role.UNSURE, 1), (Role.LEADING, 1)]
    finally:
        ann.die()
        bob.die()
