"""A leader that loses its lease without handing it over: it stood still, or NATS did not hear it.

Its clients keep their connections, over all three protocols: what they hold is claimed at the next leader,
and what they have sent is stored once, in order, whoever led when it was. Only who holds what somebody else
has got meanwhile is disconnected.
"""

import contextlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from penstock.model.shards import shard_of
from tests.cluster.load import read_log
from tests.cluster.networks import MISSING, FarFront, FarSite
from tests.cluster.processes import FrontEnd, Site, at_work
from tests.server.doors import DOORS, Door
from tests.server.harness import WAIT_SECONDS, number_of, until

QUEUE = "default"  # that of the SSPQ listener
GOES_ON = "leads no more: its clients go on at the next leader"
DROPPED = "is disconnected"
FIRST = [0, 1, 2]
LATER = list(range(10, 30))
LAST = [90]


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.long), 4])
def fronts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    kind = Site if MISSING else FarSite
    with at_work(kind(tmp_path, nodes=1, fronts=2, shards=request.param)) as running:
        running.balanced()
        yield running


@contextlib.contextmanager
def stopped(fronts: Site, front: FrontEnd) -> Iterator[None]:
    front.pause()
    try:
        yield
    finally:
        front.resume()


@contextlib.contextmanager
def cut_off(fronts: Site, front: FrontEnd) -> Iterator[None]:
    """From NATS; the other front-ends hear it."""
    assert isinstance(fronts, FarSite)
    assert isinstance(front, FarFront)
    for node in fronts.nodes.far:
        fronts.switch.cut(front.network, node.network, both=True)
    try:
        yield
    finally:
        fronts.switch.heal()


AWAY = {"stopped": stopped, "cut off": cut_off}
NETWORKS = pytest.mark.skipif(bool(MISSING), reason=f"networks of their own take {MISSING}")


class Sending(threading.Thread):
    """Sends, and waits until all of it is stored."""

    def __init__(self, door: Door, numbers: list[int]) -> None:
        super().__init__(daemon=True)
        self._door = door
        self._numbers = numbers
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._door.send(self._numbers)
            self._door.stored()
        except BaseException as error:  # noqa: BLE001 - told by `ends`
            self.error = error

    def ends(self) -> None:
        self.join(WAIT_SECONDS)
        assert not self.is_alive(), f"no receipts for {self._numbers}"
        if self.error is not None:
            raise self.error


def take(door: Door, count: int) -> None:
    """So many more, which are settled."""
    end = len(door.got) + count
    while len(door.got) < end:
        if door.protocol == "sspq":
            door.demand(1)
        door.collect(1)
        door.ack()


def queues_of(fronts: Site) -> dict[str, str]:
    """By protocol, all in one log."""
    shard = shard_of(QUEUE, fronts.shards)
    return {"sspq": QUEUE, "phpmq": fronts.queue(shard), "rq": fronts.queue(shard)}


def next_leads(fronts: Site, other: FrontEnd, shard: int) -> None:
    until(lambda: fronts.leaders(other)[shard] == other.name, f"{other.name} to lead", WAIT_SECONDS)


def numbers_in(front: FrontEnd, queue: str) -> list[int]:
    return [number_of(value) for value in read_log(front, queue)]


def is_empty(front: FrontEnd, queue: str) -> bool:
    info = front.ask(f"/v1/queues/{queue}")
    return bool(info["ready"] == info["held"] == 0)


@pytest.mark.parametrize(
    ("how", "settles"),
    [
        ("stopped", True),
        pytest.param("stopped", False, marks=pytest.mark.long),
        pytest.param("cut off", True, marks=[NETWORKS, pytest.mark.long]),
        pytest.param("cut off", False, marks=NETWORKS),
    ],
)
def test_clients_of_a_leader_that_was_away_go_on(fronts: Site, how: str, settles: bool) -> None:
    shard, queues = shard_of(QUEUE, fronts.shards), queues_of(fronts)
    leader = fronts.leader(shard=shard)
    other = next(front for front in fronts.fronts if front is not leader)
    mark = leader.mark()
    with ExitStack() as stack:
        with leader.inside():
            senders, consumers = (
                [stack.enter_context(contextlib.closing(DOORS[it](leader, queues[it]))) for it in DOORS]
                for _ in range(2)
            )
        for sender, consumer in zip(senders, consumers, strict=True):
            Sending(sender, FIRST).ends()
            consumer.demand(1 if consumer.protocol == "sspq" else 2)
            consumer.collect(1 if consumer.protocol == "sspq" else 2)
        with AWAY[how](fronts, leader):
            if settles:
                for consumer in consumers:
                    consumer.ack()
            sending = [Sending(sender, LATER) for sender in senders]
            next_leads(fronts, other, shard)
        for it in sending:
            it.ends()
        for sender, consumer in zip(senders, consumers, strict=True):
            if not settles:
                consumer.ack()
            take(consumer, len(FIRST + LATER) - len(consumer.got))
            Sending(sender, LAST).ends()
            take(consumer, 1)
            assert consumer.got == FIRST + LATER + LAST, consumer.protocol
            assert numbers_in(other, consumer.queue) == FIRST + LATER + LAST, consumer.protocol
        for queue in queues.values():
            until(partial(is_empty, other, queue), f"everything in {queue} to be settled")
    leader.says(GOES_ON, mark)
    assert DROPPED not in leader.log()[mark:]


@pytest.mark.parametrize("how", ["stopped", pytest.param("cut off", marks=[NETWORKS, pytest.mark.long])])
def test_who_holds_what_others_have_got_since_is_disconnected_alone(fronts: Site, how: str) -> None:
    shard, queues = shard_of(QUEUE, fronts.shards), queues_of(fronts)
    leader = fronts.leader(shard=shard)
    other = next(front for front in fronts.fronts if front is not leader)
    queue, quiet = queues["phpmq"], queues["rq"]
    with ExitStack() as stack:

        def door(front: FrontEnd, protocol: str, queue: str) -> Door:
            with front.inside():
                return stack.enter_context(contextlib.closing(DOORS[protocol](front, queue)))

        sender, unlucky, lucky = (door(leader, "phpmq", queue) for _ in range(3))
        sender.send(FIRST)
        unlucky.demand(len(FIRST))
        unlucky.collect(len(FIRST))
        lucky.queue = quiet
        lucky.demand(10)
        with AWAY[how](fronts, leader):
            next_leads(fronts, other, shard)
            second = door(other, "rq", queue)
            second.demand(len(FIRST))
            second.collect(len(FIRST))
            second.ack()
            until(lambda: is_empty(other, queue), "all to be settled by the second")
        with pytest.raises(ConnectionError):
            unlucky.heard()
        leader.says(DROPPED)
        Sending(sender, LATER).ends()
        take(second, len(LATER))
        assert second.got == FIRST + LATER
        sender.queue = quiet
        Sending(sender, LAST).ends()
        take(lucky, 1)
        assert lucky.got == LAST
