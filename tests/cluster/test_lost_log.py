"""A front-end that has lost its log to another one: what its clients have, and what they had said last, goes
to the next broker. The disks do nothing until a test says so."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest

from penstock.cluster.remote_broker import RemoteBroker
from penstock.cluster.seating import TOO_LATE
from penstock.log.errors import LogFailed
from penstock.model.policy import Policies
from penstock.model.words import Command, Consume, Outcome, Settle, Sync
from tests.broker.test_broker import House, send, settle
from tests.cluster.test_routing import SMALL, Houses, Port, Said, queue_in

SHARD = 1
QUEUE, OTHER = queue_in(SHARD), queue_in(0)


class Client(Port):
    has_left = is_gone = False

    def drop(self) -> None:
        self.told.append(("dropped", None))


class Front(Houses):
    """Leads a log, and loses it."""

    def __init__(self, policies: Policies | None = None) -> None:
        super().__init__(policies)
        self.policies = policies
        self.house = self.houses[SHARD]
        self.house.broker.keep_undurable()
        self.remote = RemoteBroker("a", self.wants(SHARD), connection_buffer_bytes=1 << 20, shard=SHARD)

    def client(self, name: str, *said: Command) -> Client:
        client = Client(self, name)
        self.broker.attach(client)
        client.say(*said)
        return client

    def lose(self) -> None:
        self.house.broker.suspend(True)
        self.broker.homes[SHARD] = self.remote
        ports = self.broker.ports_of(SHARD)
        self.remote.take_over(self.house.broker, self.house.log, ports, self.now)

    def lead_next(self, decided: str = "not stored", meanwhile: Callable[[House], object] = bool) -> House:
        """It is decided what of the log is stored; another broker leads what is on the disk."""
        log = self.house.log
        stored, unstored = {
            "stored": (log.position, log.position),
            "not stored": (log.synced, log.synced),
            "unknown": (log.synced, log.position),
        }[decided]
        log.abandon()
        for port in self.remote.decided(stored, unstored):
            port.log("unknown", 1)
        after = House(self.disks[SHARD].crash(random.Random(0)), self.policies, SMALL)
        meanwhile(after)
        self.remote.move_to(after.broker, after.log, self.now)
        self.broker.homes[SHARD] = after.broker
        after.turn()
        return after


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **named: Any) -> None:  # Any: what pytest gives it
        asyncio.run(test(*args, **named))

    return run


def stored(house: House) -> list[bytes]:
    if QUEUE not in house.log.queues():
        return []
    end = house.log.describe(QUEUE).offset_end
    return [bytes(it) for piece in house.log.read(QUEUE, 0, end) for it in piece.messages()]


def counts(house: House) -> tuple[int, int]:
    info = house.log.describe(QUEUE)
    return info.ready, info.held


@pytest.mark.parametrize(
    ("decided", "there", "told"),
    [
        ("stored", [b"first"], [[1], [7]]),
        ("not stored", [b"first", b"a"], [[1], [7]]),
        ("unknown", [b"first"], [[1]]),
    ],
)
@on_a_loop
async def test_what_was_on_its_way_is_sent_on_where_it_is_not_stored(
    decided: str, there: list[bytes], told: list[list[int]]
) -> None:
    front = Front()
    client = front.client("c", send(QUEUE, b"first", tickets=[1]))
    other = front.client("o")
    front.turn()
    client.say(send(QUEUE, b"a", tickets=[7]))
    front.house.broker.turn(front.now)
    front.lose()
    other.say(send(QUEUE, b"behind", tickets=[3]))
    house = front.lead_next(decided)
    assert stored(house) == [*there, b"behind"]
    assert client.heard("delivered") == told
    assert ("unknown" in client.heard("log")) == (decided == "unknown")
    assert other.heard("delivered") == [[3]]
    assert not other.heard("log")


@on_a_loop
async def test_what_one_has_said_keeps_its_order() -> None:
    front = Front()
    client = front.client("c", send(QUEUE, b"0"))
    front.house.broker.turn(front.now)
    client.say(send(QUEUE, b"1"), Sync())
    front.lose()
    client.say(send(QUEUE, b"2"), Sync())
    assert not client.heard("synced")
    house = front.lead_next()
    assert stored(house) == [b"0", b"1", b"2"]
    house.turn()
    assert client.heard("synced") == [None, None]


@pytest.mark.parametrize("decided", ["stored", "not stored", "unknown"])
@pytest.mark.parametrize("outcome", [Outcome.ACK, Outcome.REQUEUE])
@on_a_loop
async def test_what_was_settled_is_settled_once(outcome: Outcome, decided: str) -> None:
    front = Front(Policies({"*": {"max-deliveries": 3}}))
    worker = front.client("w", send(QUEUE, b"a"), send(QUEUE, b"b"), Consume(QUEUE, 2))
    front.turn()
    assert worker.payloads() == [b"a", b"b"]
    worker.say(settle(worker, QUEUE, 0, outcome))
    front.house.broker.turn(front.now)
    front.lose()
    if decided == "stored":  # whoever leads then has read it there
        front.house.log.wait()
    house = front.lead_next(decided)
    assert not worker.heard("dropped")
    if outcome is Outcome.ACK:
        assert counts(house) == (0, 1)
    else:
        assert worker.payloads() == [b"a", b"b", b"a"]
        ((_, _, _, _, attempts),) = [it for it in house.log.holds_of(QUEUE, "w") if it[0] == 0]
        assert attempts == 1
    worker.say(settle(worker, QUEUE, 1))
    house.turn()
    assert counts(house) == (0, int(outcome is Outcome.REQUEUE))


@on_a_loop
async def test_who_holds_what_somebody_else_has_got_is_disconnected_alone() -> None:
    front = Front()
    workers = [front.client(name, Consume(QUEUE, 1)) for name in "ab"]
    workers[0].say(send(QUEUE, b"0"), send(QUEUE, b"1"))
    front.turn()
    assert [it.payloads() for it in workers] == [[b"0"], [b"1"]]
    front.lose()

    def take_the_first(house: House) -> None:
        other = house.port("other")
        other.say(Consume(QUEUE, 1))
        house.turn()
        assert other.payloads() == [b"0"]

    front.lead_next(meanwhile=take_the_first)
    assert [it.heard("dropped") for it in workers] == [[None], []]
    assert [TOO_LATE in it.heard("log") for it in workers] == [True, False]


@on_a_loop
async def test_who_was_told_to_have_settled_before_the_link_ended_goes_on() -> None:
    """Whoever leads now has read it in the log: there is nothing to claim any more."""
    front = Front()
    worker = front.client("w", send(QUEUE, b"0"), Consume(QUEUE, 1))
    front.turn()
    front.lose()
    assert not front.remote.decided(front.house.log.synced, front.house.log.synced)
    link: Any = Said()
    front.remote._link_up(link)
    worker.say(settle(worker, QUEUE, 0))
    front.remote.turn(front.now)

    def purge(house: House) -> None:
        house.log.purge(QUEUE, house.now)

    front.lead_next(meanwhile=purge)
    assert not worker.heard("dropped")


@pytest.mark.parametrize("turned", [False, True])
@on_a_loop
async def test_what_was_sent_by_who_has_left_is_sent_on(turned: bool) -> None:
    front = Front()
    client = front.client("c", send(QUEUE, b"last"))
    if turned:
        front.house.broker.turn(front.now)
    front.broker.detach(client, front.now)
    front.lose()
    assert stored(front.lead_next()) == [b"last"]
    assert front.remote.is_drained


@on_a_loop
async def test_what_there_was_no_room_for_goes_behind_what_was_on_its_way() -> None:
    front = Front(Policies({QUEUE: {"max-bytes": 2}}))
    worker = front.client("w")
    client = front.client("c", send(QUEUE, b"aa", tickets=[1]), send(QUEUE, b"bb", tickets=[2]))
    front.lose()
    assert ("released", None) in client.told
    house = front.lead_next()
    assert stored(house) == [b"aa"]
    worker.say(Consume(QUEUE, 1))
    house.turn()
    worker.say(settle(worker, QUEUE, 0))
    house.tick(1)
    assert stored(house) == [b"aa", b"bb"]
    assert client.heard("delivered") == [[1], [2]]


@on_a_loop
async def test_what_waits_for_other_logs_is_said_when_all_that_was_sent_is_known_to_be_durable() -> None:
    front = Front()
    front.client("s", send(OTHER, b"a"), send(QUEUE, b"b"))
    worker = front.client("w", Consume(OTHER, 1), Consume(QUEUE, 1))
    front.turn()
    front.turn()
    assert sorted(worker.payloads()) == [b"a", b"b"]
    worker.say(send(QUEUE, b"result"))
    front.turn()
    front.house.broker.turn(front.now)  # It is durable, and forgotten.
    for queue in (OTHER, QUEUE):
        worker.say(Settle(queue, Outcome.ACK, worker.origin_of[queue, 0], [(0, 1)]))
    assert front.held(OTHER) == 1
    front.lose()
    house = front.lead_next()
    front.turn(0)
    assert front.held(OTHER) == 0
    assert sum(counts(house)) == 1, "the result"
    assert stored(house) == [b"b", b"result"]


@on_a_loop
async def test_requests_end() -> None:
    front = Front()
    client = front.client("c", send(QUEUE, b"a", tickets=[1], wants_reply=True))
    front.turn()
    client.say(send(QUEUE, b"b", tickets=[2], wants_reply=True))
    front.lose()
    assert client.heard("undelivered") in ([[1], [2]], [[2], [1]])
    front.lead_next()
    assert len(client.heard("undelivered")) == 2


@on_a_loop
async def test_what_comes_when_the_log_has_failed_is_not_lost() -> None:
    """It is noticed with the next words."""
    front = Front()

    def failed(error: LogFailed) -> None:
        if front.broker.homes[SHARD] is front.house.broker:
            front.lose()

    front.broker._on_failed = failed
    client = front.client("c", send(QUEUE, b"first", tickets=[1]))
    front.house.broker.turn(front.now)
    front.house.log._committer.fail(OSError("overtaken"))
    client.say(send(QUEUE, b"second", tickets=[2]))
    assert front.broker.homes[SHARD] is front.remote
    house = front.lead_next()
    assert stored(house) == [b"first", b"second"]
    assert client.heard("delivered") == [[1], [2]]
    assert not client.heard("dropped")


@on_a_loop
async def test_what_is_durable_is_forgotten() -> None:
    front = Front()
    worker = front.client("w", Consume(QUEUE, 5))
    for number in range(3):
        worker.say(send(QUEUE, b"m", tickets=[number]))
        front.turn()
        worker.say(settle(worker, QUEUE, number))
        front.turn()
    front.house.tick(1)
    assert front.house.broker.undurable is not None
    assert list(front.house.broker.undurable) == []
