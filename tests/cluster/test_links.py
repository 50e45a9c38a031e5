"""Links: who is let in, what strangers get, and how a follower finds its leader again."""

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.cluster import leader_link
from penstock.cluster.frames import Hello, Kind, encode_frame, encode_json
from penstock.cluster.host import RelayHost
from penstock.cluster.trust import Leader as Place
from penstock.common.address import TcpAddress
from penstock.model.words import Closing
from penstock.server.wires import PhpmqConnection
from tests.cluster.fronts import TRUST, Follower, Leader, LoopThread
from tests.cluster.relay_wire import RelayWire
from tests.server.doors import PhpmqDoor

GOOD = Hello("words", "somebody", 1, "life")


@pytest.fixture
def leader(thread: LoopThread, tmp_path: Path) -> Iterator[Leader]:
    leader = Leader(thread, tmp_path, grace_seconds=0.2)
    yield leader
    leader.stop()


def dial(leader: Leader, hello: Hello | None = GOOD) -> RelayWire:
    """A link of which everything but the welcome is there; without a hello, TLS is."""
    wire = RelayWire(leader.place)
    if hello is not None:
        wire.prove(hello)
    return wire


def attach(number: int, name: str = "phpmq:x#1") -> bytes:
    fields = {"name": name, "protocol": "phpmq", "lost_to": "tail", "peer": "x", "user": ""}
    return encode_frame(
        Kind.ATTACH,
        encode_json(fields | {"connected_us": 1, "count_room": 100, "buffer_bytes": 1000}),
        port=number,
    )


def names(leader: Leader) -> list[str]:
    return leader.thread.call(lambda: [info.port.name for info in leader.broker.ports.infos(0, 100)])


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        (GOOD._replace(term=0), "term 1"),
        (GOOD._replace(kind="other"), "kind 'other'"),
        (GOOD._replace(front_end=""), "kind"),
    ],
)
def test_who_is_not_let_in_is_told_why(leader: Leader, hello: Hello, why: str) -> None:
    wire = dial(leader, hello)
    assert why in wire.welcome()
    assert wire.is_closed()
    wire.close()
    assert leader.thread.call(lambda: leader.host.front_ends) == []


@pytest.mark.parametrize(
    ("greets", "said"),
    [
        (False, b"GET / HTTP/1.1\r\n\r\n"),
        (False, encode_frame(Kind.RESUMED)),
        (False, encode_frame(Kind.HELLO, bytes(100_000))),
        (True, encode_frame(Kind.WELCOME)),
        (True, encode_frame(Kind.DETACH, port=7)),
        (True, encode_frame(Kind.ATTACH, b"{}", port=7)),
        (True, attach(7) + attach(7)),
        (True, attach(7) + encode_frame(Kind.WORDS, b"\0", port=7)),
        (True, encode_frame(Kind.PUBLISH, bytes(20))),
        (True, attach(7) + encode_frame(Kind.CLAIM, b"\xff\xff\xff\xff", port=7)),
        (True, attach(7) + encode_frame(Kind.ROOM, b"", port=7)),
    ],
)
def test_whoever_breaks_the_rules_is_closed_and_leaves_nothing_behind(
    leader: Leader, greets: bool, said: bytes
) -> None:
    wire = dial(leader, GOOD if greets else None)
    wire.say(said)
    while wire.some():
        pass
    wire.close()
    leader.thread.until(lambda: not leader.host.front_ends, "the link to end")
    leader.thread.until(lambda: not leader.broker.ports.infos(0, 100), "its connections to be lost")


def test_a_stranger_that_says_nothing_is_closed(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_link, "HELLO_SECONDS", 0.1)
    wire = dial(leader, None)
    assert wire.is_closed()
    wire.close()


def test_a_new_link_of_a_front_end_ends_the_one_before(leader: Leader) -> None:
    first = dial(leader)
    first.say(attach(1, "first"))
    assert first.welcome() == ""
    leader.thread.until(lambda: leader.broker.ports.infos(0, 9), "the connection")
    second = dial(leader)
    second.say(attach(1, "second"), encode_frame(Kind.RESUMED))
    assert second.welcome() == ""
    assert first.is_closed()
    leader.thread.until(lambda: len(leader.broker.ports.infos(0, 9)) == 1, "one connection")
    assert names(leader) == ["second@somebody"]
    first.close()
    second.close()


def test_a_link_that_does_not_come_again_loses_its_connections(leader: Leader) -> None:
    wire = dial(leader)
    wire.say(attach(1))
    assert wire.welcome() == ""
    leader.thread.until(lambda: leader.broker.ports.infos(0, 9), "the connection")
    wire.close()
    leader.thread.until(lambda: not leader.broker.ports.infos(0, 9), "the connection to be lost")


def test_a_follower_waits_for_a_leader_that_is_not_there_yet(thread: LoopThread, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port: int = door.getsockname()[1]
    follower = Follower(thread)
    thread.call(follower.remote.connect, Place(TcpAddress("127.0.0.1", port), "gone", 1, TRUST))
    thread.until(lambda: len(follower.links) >= 2, "two attempts")
    assert all(not up and "cannot be reached" in why for up, why in follower.links)
    leader = Leader(thread, tmp_path)
    # And it takes the word of whoever tells it of another one.
    follower.follow(leader)
    follower.stop()
    leader.stop()


def test_a_follower_of_another_term_is_not_linked(thread: LoopThread, tmp_path: Path) -> None:
    leader = Leader(thread, tmp_path, term=3)
    follower = Follower(thread)
    thread.call(follower.remote.connect, leader.place._replace(term=2))
    thread.until(lambda: any("term 3" in why for _, why in follower.links), "the refusal")
    assert not thread.call(lambda: follower.remote.is_linked)
    follower.stop()
    leader.stop()


def test_a_follower_drains(thread: LoopThread, tmp_path: Path) -> None:
    """As a server does when it stops: nothing comes any more, what is out is settled, then all may leave."""
    leader = Leader(thread, tmp_path)
    follower = Follower(thread).follow(leader)
    # A door wants something with wires, and a follower has them.
    door = PhpmqDoor(follower, "default")  # type: ignore[arg-type]
    door.send(range(5))
    door.demand(3)
    assert door.collect(3) == [0, 1, 2]
    thread.call(follower.remote.drain)
    thread.call(follower.remote.dismiss)
    assert not thread.call(lambda: follower.remote.is_drained)
    door.ack()
    assert door.wire.is_closed()
    thread.until(lambda: follower.remote.is_drained, "it to be drained")
    thread.until(lambda: leader.counts_now("default") == (2, 0, 0), "the rest to stay")
    door.close()
    follower.stop()
    leader.stop()


def test_a_fault_in_what_had_to_wait_for_its_turn_ends_the_link(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would be open, not read from, and its front-end wait for ever."""

    def hear(*_: object) -> None:
        raise KeyError("a fault of ours")

    with dial(leader) as wire:
        assert wire.welcome() == ""
        monkeypatch.setattr(RelayHost, "hear", hear)
        monkeypatch.setattr(leader.rounds, "is_over", lambda: True)
        wire.say(attach(1))
        assert wire.is_closed()
    assert len(leader.thread.faults) == 1
    leader.thread.faults.clear()


def test_a_fault_in_what_a_client_says_costs_its_connection_also_where_that_had_to_wait(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handle(*_: object) -> None:
        raise KeyError("a fault of ours")

    with leader.wire("phpmq") as wire:
        leader.thread.until(lambda: leader.connections, "the connection")
        monkeypatch.setattr(PhpmqConnection, "_receive", lambda *_: ([Closing()], b""))
        (connection,) = leader.connections
        monkeypatch.setattr(
            connection, "_broker", SimpleNamespace(handle=handle, detach=leader.broker.detach)
        )
        monkeypatch.setattr(leader.rounds, "is_over", lambda: True)
        wire.say(b"anything")
        assert wire.is_closed()
