"""Lost links and new leaders: clients keep their connections, and nothing is lost, doubled or given twice."""

import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.broker import Broker
from penstock.broker.operate import Operator
from penstock.broker.port import Port
from penstock.cluster.follower_link import FollowerLink
from penstock.cluster.frames import Body, Frame, Kind
from penstock.cluster.leader_link import LeaderLink
from penstock.cluster.seats import Claim, Seat
from penstock.cluster.word_codec import NO_NUMBER, unpack_words
from penstock.model.batch import Batch, Slice
from penstock.model.life import Event
from penstock.model.words import Cancel, Command, Consume, Publish, Settle
from penstock.server.connection import Connection
from tests.cluster.fronts import Follower, Leader, LoopThread
from tests.server.doors import DOORS, Door, PhpmqDoor, RqDoor, SspqDoor
from tests.server.harness import SEND, expect_dispatch, number_of, numbered, phpmq, sspq
from tests.server.test_phpmq_rules import ack
from tests.server.test_phpmq_rules import consume as phpmq_consume
from tests.server.test_rq_rules import (
    EXCLUSIVE,
    TIMEOUT,
    consume,
    consuming,
    notice,
    reply,
    request,
    to_consumer,
    to_consumer_noreply,
    undelivered,
)
from tests.server.test_rq_rules import delivered as rq_delivered

QUEUE = "default"


class Cluster:
    """Leaders on one folder, one after the other, and followers."""

    def __init__(self, thread: LoopThread, folder: Path) -> None:
        self.thread = thread
        self._folder = folder
        self._followers: list[Follower] = []
        self._doors = ExitStack()
        self.leader = Leader(thread, folder)

    def follower(self, name: str = "follower") -> Follower:
        follower = Follower(self.thread, name).follow(self.leader)
        self._followers.append(follower)
        return follower

    def door(self, front: Follower | Leader, protocol: str) -> Door:
        # The doors of the server's tests want something with wires, and a front has them.
        door = DOORS[protocol](front, QUEUE)  # type: ignore[arg-type]
        self._doors.callback(door.close)
        return door

    def next_leader(
        self, *, crash: bool = True, claims_seconds: float = 10.0, ghosts: tuple[str, ...] = ()
    ) -> Leader:
        """The leader is gone, and another one has taken over. The followers are not linked to it yet."""
        if crash:
            self.leader.crash()
        else:
            self.leader.stop()
        expected = [follower.name for follower in self._followers]
        self.leader = Leader(
            self.thread,
            self._folder,
            term=self.leader.term + 1,
            expected=expected,
            claims_seconds=claims_seconds,
        )
        return self.leader

    def follow(self, *followers: Follower) -> None:
        for follower in followers or self._followers:
            follower.follow(self.leader)

    def relink(self) -> None:
        """All links are lost and come again, by themselves."""
        before = {follower: len(follower.links) for follower in self._followers}
        self.leader.cut_links()
        for follower, count in before.items():
            self.thread.until(partial(_is_linked_again, follower, count), "a new link")

    def settled(self) -> None:
        self.thread.until(lambda: self.leader.counts_now(QUEUE) == (0, 0, 0), "everything to be settled")

    def events(self, event: Event) -> int:
        def count() -> int:
            self.leader.sync()
            info = self.leader.engine.describe(QUEUE)
            runs = self.leader.engine.events(QUEUE, 0, info.event_end)
            return sum(run.end - run.first for run in runs if run.event is event)

        return self.thread.call(count)

    def close(self) -> None:
        self._doors.close()
        for follower in self._followers:
            follower.stop()
        self.leader.stop()


def _is_linked_again(follower: Follower, since: int) -> bool:
    return any(up for up, _ in follower.links[since:])


def _move(follower: Follower, leader: Leader) -> None:
    """The follower leads."""
    follower.remote.move_to(leader.broker, leader.engine, leader.now_us())
    _went_on(follower, leader)


def _went_on(follower: Follower, leader: Leader) -> None:
    for connection in follower.connections:
        connection.move(leader.broker)
    follower.home = leader.broker
    leader.host.resumed(follower.name)


@pytest.fixture
def cluster(thread: LoopThread, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(thread, tmp_path)
    yield cluster
    cluster.close()


def new_leader(cluster: Cluster) -> None:
    cluster.next_leader()
    cluster.follow()


def stopped_leader(cluster: Cluster) -> None:
    cluster.next_leader(crash=False)
    cluster.follow()


CHANGES: dict[str, Callable[[Cluster], None]] = {
    "link": Cluster.relink,
    "crash": new_leader,
    "stop": stopped_leader,
}


# --- what clients hold -----------------------------------------------------------------------------


@pytest.mark.parametrize("change", list(CHANGES))
def test_what_a_client_holds_longer_than_its_ttl_stays_with_it(cluster: Cluster, change: str) -> None:
    """What is held does not expire, whatever becomes of the link meanwhile."""
    queue, other = QUEUE.encode(), b"other"
    with cluster.follower().wire("phpmq") as wire:
        wire.say(*[phpmq(1, (1, name), (2, b"x"), (5, b"1")) for name in (queue, other)])
        wire.say(phpmq_consume(queue, 1))
        held = expect_dispatch(wire, queue, b"x", b"1")
        cluster.thread.until(lambda: cluster.leader.counts_now("other") == (0, 0, 1), "the other to expire")
        CHANGES[change](cluster)
        cluster.thread.until(lambda: not cluster.leader.broker.claims.awaited, "all to be claimed")
        assert cluster.leader.counts(QUEUE) == (0, 1, 0)
        wire.say(ack(queue, held))
        cluster.settled()


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("protocol", ["phpmq", "rq"])
def test_what_a_client_holds_stays_with_it(cluster: Cluster, protocol: str, change: str) -> None:
    follower = cluster.follower()
    consumer, sender = cluster.door(follower, protocol), cluster.door(follower, "rq")
    sender.send(range(10))
    consumer.demand(6)
    assert consumer.collect(6) == list(range(6))
    CHANGES[change](cluster)
    # It has six and a window of six: nothing may come, neither these nor others.
    assert consumer.wire.is_silent()
    assert cluster.leader.counts(QUEUE) == (4, 6, 0)
    consumer.ack()
    assert consumer.collect(4) == [6, 7, 8, 9]
    consumer.ack()
    cluster.settled()


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("protocol", ["phpmq", "rq"])
def test_what_a_client_holds_of_a_deleted_queue_is_nothing_to_the_next_one(
    cluster: Cluster, protocol: str, change: str
) -> None:
    follower = cluster.follower()
    consumer, sender = cluster.door(follower, protocol), cluster.door(follower, "rq")
    sender.send(range(4))
    consumer.demand(2)
    assert consumer.collect(2) == [0, 1]

    def delete() -> None:
        leader = cluster.leader
        Operator(leader.broker, leader.engine).delete(QUEUE, leader.now_us(), force=True)
        leader.sync()

    cluster.thread.call(delete)
    CHANGES[change](cluster)
    assert not cluster.leader.engine.has_queue(QUEUE)
    consumer.ack()
    sender.send(range(10, 14))
    assert sorted(consumer.drain(4, window=2)) == [10, 11, 12, 13]
    cluster.settled()
    assert cluster.leader.engine.describe(QUEUE).offset_end == 4


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_message_held_by_sspq_stays_held_and_its_retries_are_not_used_up(
    cluster: Cluster, change: str
) -> None:
    follower = cluster.follower()
    door = cluster.door(follower, "sspq")
    assert isinstance(door, SspqDoor)
    door.send([1])
    door.demand(1)
    assert door.collect(1) == [1]
    CHANGES[change](cluster)
    assert cluster.leader.counts(QUEUE) == (0, 1, 0)
    door.ack()
    cluster.settled()


@pytest.mark.parametrize("change", ["crash", "stop"])
def test_dead_letters_that_are_held_stay_held(cluster: Cluster, change: str) -> None:
    follower = cluster.follower()
    judge, reader = cluster.door(follower, "phpmq"), cluster.door(follower, "phpmq")
    assert isinstance(judge, PhpmqDoor)
    judge.send(range(3))
    judge.demand(3)
    judge.collect(3)
    judge.reject()
    reader.demand(2, dead=True)
    assert reader.collect(2) == [0, 1]
    CHANGES[change](cluster)
    assert reader.wire.is_silent()
    reader.ack()
    assert reader.collect(1) == [2]
    reader.ack()
    cluster.settled()


def test_nothing_is_handed_out_before_all_have_claimed(cluster: Cluster) -> None:
    first, second = cluster.follower("first"), cluster.follower("second")
    holder, other = cluster.door(first, "phpmq"), cluster.door(second, "phpmq")
    holder.send(range(5))
    holder.demand(5)
    assert holder.collect(5) == list(range(5))
    other.demand(5)
    cluster.next_leader()
    cluster.follow(second)
    assert other.wire.is_silent()
    cluster.follow(first)
    holder.ack()
    cluster.settled()
    assert other.wire.is_silent()
    assert cluster.events(Event.ACKED) == 5


def test_who_does_not_come_back_is_waited_for_only_so_long(cluster: Cluster) -> None:
    first, second = cluster.follower("first"), cluster.follower("second")
    holder, other = cluster.door(first, "phpmq"), cluster.door(second, "phpmq")
    holder.send(range(5))
    holder.demand(5)
    holder.collect(5)
    other.demand(5)
    cluster.next_leader(claims_seconds=0.3)
    cluster.follow(second)
    assert other.collect(5) == list(range(5))
    cluster.follow(first)
    # What the first one still has belongs to the other: its ack settles nothing, but gives it room.
    holder.ack()
    assert cluster.leader.counts(QUEUE) == (0, 5, 0)
    other.ack()
    cluster.settled()
    holder.send([77])
    assert (holder.wire.is_silent(0.3), other.wire.is_silent(0.1)).count(False) == 1


@pytest.mark.parametrize("claims", [True, False])
def test_who_is_linked_has_time_to_claim_when_others_do_not_come(cluster: Cluster, claims: bool) -> None:
    first, second, lost = (cluster.follower(name) for name in ("first", "second", "lost"))
    holder, other = cluster.door(first, "phpmq"), cluster.door(second, "phpmq")
    holder.send(range(5))
    holder.demand(5)
    assert holder.collect(5) == list(range(5))
    other.demand(5)
    links: list[FollowerLink] = []
    up, first.remote._dialer._on_up = first.remote._dialer._on_up, links.append
    leader = cluster.next_leader(claims_seconds=0.5)
    cluster.follow(second)
    cluster.thread.call(first.remote.connect, leader.place)
    cluster.thread.until(lambda: links, "a link on which nothing is said so far")
    cluster.thread.until(lambda: f"not come back: {lost.name};" in leader.log(), "the time to be over")
    if claims:
        cluster.thread.call(up, links[0])
        holder.ack()
        cluster.settled()
        assert other.wire.is_silent()
    else:
        assert other.collect(5) == list(range(5))


def test_an_exclusive_consumer_stays_the_only_one(cluster: Cluster) -> None:
    first, second = cluster.follower("first"), cluster.follower("second")
    active, standby = first.wire("rq"), second.wire("rq")
    name = QUEUE.encode()
    active.say(consume(name, 0, 20, EXCLUSIVE))
    active.expect(consuming(name))
    standby.say(consume(name, 0, 20, EXCLUSIVE))
    assert standby.is_silent()
    cluster.next_leader()
    cluster.follow(second)  # The one that waits comes first, and must not profit from that.
    cluster.follow(first)
    sender = cluster.door(second, "rq")
    sender.send([1])
    heard = active.some()
    assert heard.startswith(to_consumer_noreply(name, b"")[:6])
    assert standby.is_silent()
    active.close()
    standby.expect(consuming(name))
    standby.close()


def test_standby_moves_up_when_the_link_of_the_active_one_dies(cluster: Cluster) -> None:
    first, second = cluster.follower("first"), cluster.follower("second")
    active, standby = first.wire("rq"), second.wire("rq")
    name = QUEUE.encode()
    active.say(consume(name, 0, 20, EXCLUSIVE))
    active.expect(consuming(name))
    standby.say(consume(name, 0, 20, EXCLUSIVE))
    assert standby.is_silent()
    first.lose()
    standby.expect(consuming(name))
    active.close()
    standby.close()


class Recorder:
    """A broker, and what its ports have said."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.said: list[Command] = []

    def handle(self, port: Port, commands: Sequence[Command], now_us: int) -> None:
        self.said += commands
        self._broker.handle(port, commands, now_us)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)


def test_a_follower_that_leads_stores_results_before_it_settles_their_inputs(cluster: Cluster) -> None:
    """As its connection has said them: whatever a crash leaves of both, no input is settled alone."""
    follower = cluster.follower()
    worker = cluster.door(follower, "phpmq")
    worker.send([0])
    worker.demand(1)
    assert worker.collect(1) == [0]
    follower.lose()
    worker.send([1])
    worker.ack()
    seating = follower.remote._seating
    cluster.thread.until(lambda: seating._unsettled or seating._unsaid, "both")
    leader = cluster.next_leader()
    recorder = Recorder(leader.broker)
    cluster.thread.call(follower.remote.move_to, recorder, leader.engine, leader.now_us())
    cluster.thread.call(_went_on, follower, leader)
    assert [type(command) for command in recorder.said] == [Publish, Settle]


def test_what_is_delivered_anew_has_no_count_from_before() -> None:
    """It was redriven meanwhile: by the old count, a requeue of it would be repeated."""
    seat = Seat(None, 1)  # type: ignore[arg-type]
    door = "queue", False
    bounds, columns = array("i", range(4)), (None, None)
    for attempts in (array("i", [1, 2, 3]), None):
        seat.took(door, [Slice(b"abc", bounds, 0, 3, 10, b"", 0, *columns, attempts)])
    assert seat.let_go(door, b"", [(10, 13)]) == [(10, 13)]
    assert seat.claims_once(door, b"", [(10, 13)]) == [Claim(door, b"", [(10, 13)], 0)]


# --- what clients have settled ---------------------------------------------------------------------


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("change", ["link", "crash"])
def test_what_was_settled_without_a_leader_is_settled(cluster: Cluster, change: str, leaves: bool) -> None:
    follower = cluster.follower()
    consumer = cluster.door(follower, "phpmq")
    consumer.send(range(5))
    consumer.demand(5)
    consumer.collect(5)
    if change == "crash":
        cluster.next_leader()
    else:
        follower.lose()
    consumer.ack()
    if leaves:
        consumer.wire.leave()
    else:
        cluster.thread.until(lambda: len(follower.remote._seating._unsettled) == 1, "the settlement")
    follower.follow(cluster.leader)
    cluster.settled()
    assert cluster.events(Event.ACKED) == 5


def test_settlements_of_one_turn_are_confirmed_whoever_sends_messages_with_them(cluster: Cluster) -> None:
    follower = cluster.follower()
    first, second = cluster.door(follower, "phpmq"), cluster.door(follower, "phpmq")
    for number, door in enumerate((first, second)):
        door.send([number])
        door.demand(1)
        assert door.collect(1) == [number]
    said: list[int] = []
    heard = cluster.leader.host.hear

    def hear(link: LeaderLink, frame: Frame) -> None:
        if frame.kind is Kind.WORDS and (number := unpack_words(Body(frame))[0]) != NO_NUMBER:
            said.append(number)
        heard(link, frame)

    def both() -> None:  # while nobody reads
        first.ack()
        second.send([2])
        second.ack()

    cluster.leader.host.hear = hear  # type: ignore[method-assign]
    cluster.thread.call(both)
    seating = follower.remote._seating
    cluster.thread.until(lambda: not (seating._unsettled or seating._unsaid), "both to be confirmed")
    assert said == sorted(said)


def test_words_of_one_connection_keep_their_order_beside_its_messages(cluster: Cluster) -> None:
    follower = cluster.follower()
    consumer, other = cluster.door(follower, "phpmq"), cluster.door(follower, "phpmq")
    consumer.send([0])
    cluster.thread.until(lambda: cluster.leader.counts_now(QUEUE) == (1, 0, 0), "the message")
    own = consumer.wire.socket.getsockname()[1]
    (port,) = (port for port in follower.connections if port.peer.endswith(f":{own}"))

    def three_chunks() -> None:
        for said in ([Consume("else", 1)], [Publish(QUEUE, Batch.of(numbered([1])))], [Cancel("else")]):
            follower.remote.handle(port, said, follower.now_us())

    cluster.thread.call(three_chunks)
    other.demand(2)
    assert len(other.collect(2)) == 2
    assert cluster.thread.call(cluster.leader.broker.doors.consumer_count, "else") == 0


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("change", ["link", "crash", "lead"])
def test_what_was_requeued_is_requeued_once(cluster: Cluster, change: str, again: bool) -> None:
    """It was stored, and the follower was not told: it says so again, and the message has moved on."""
    follower = cluster.follower()
    consumer, other = cluster.door(follower, "phpmq"), cluster.door(follower, "phpmq")
    assert isinstance(consumer, PhpmqDoor)
    consumer.send(range(4))
    consumer.demand(3)
    assert consumer.collect(3) == [0, 1, 2]
    consumer.requeue()
    assert consumer.collect(3) == [3, 0, 1]  # 0 and 1 for the second time
    cluster.thread.until(lambda: not follower.remote._seating._unsettled, "the first to be confirmed")
    lost: list[int] = []
    follower.remote._seating.settled = lost.append  # type: ignore[assignment, method-assign]
    if not again:
        consumer.demand(0)
    consumer.requeue()
    if again:
        assert consumer.collect(3) == [2, 3, 0]
    cluster.thread.until(lambda: cluster.leader.counts_now(QUEUE)[1] == (3 if again else 0), "the second")
    assert cluster.events(Event.REQUEUED) == 6
    cluster.thread.until(lambda: lost, "it to be confirmed")
    del follower.remote._seating.settled
    if change == "lead":
        leader = cluster.next_leader()
        cluster.thread.call(_move, follower, leader)
    else:
        CHANGES[change](cluster)
    if not again:
        cluster.thread.until(lambda: cluster.leader.counts_now(QUEUE) == (4, 0, 0), "all to be ready")
        other.demand(4)
        assert other.collect(4) == [2, 3, 0, 1]
    else:
        cluster.thread.until(lambda: cluster.leader.counts_now(QUEUE) == (1, 3, 0), "the claims")
    assert cluster.events(Event.REQUEUED) == 6


def test_demands_change_while_there_is_no_leader(cluster: Cluster) -> None:
    follower = cluster.follower()
    ceasing, beginning = cluster.door(follower, "phpmq"), cluster.door(follower, "phpmq")
    ceasing.demand(5)
    cluster.next_leader()
    ceasing.demand(0)
    beginning.demand(5)
    beginning.send(range(5))
    assert cluster.thread.call(lambda: not follower.remote.is_linked)
    follower.follow(cluster.leader)
    assert beginning.collect(5) == list(range(5))
    beginning.ack()
    cluster.settled()
    assert ceasing.wire.is_silent(0.05)


# --- what clients publish --------------------------------------------------------------------------


class Sender(threading.Thread):
    """Sends numbers until it has sent all of them; every one is confirmed."""

    def __init__(self, door: Door, first: int, count: int, step: int) -> None:
        super().__init__(daemon=True)
        self.door = door
        self.numbers = range(first, first + count)
        self._step = step
        self.failed: Exception | None = None

    def run(self) -> None:
        try:
            for at in range(0, len(self.numbers), self._step):
                self.door.send(self.numbers[at : at + self._step])
        except (AssertionError, OSError) as error:  # told by `join`'s caller
            self.failed = error


@pytest.mark.parametrize("change", list(CHANGES))
def test_every_message_is_stored_once_and_in_order(cluster: Cluster, change: str) -> None:
    followers = [cluster.follower("first"), cluster.follower("second")]
    count = 3000
    senders = [
        Sender(cluster.door(follower, "rq"), 100_000 * number, count, 25 + number)
        for number, follower in enumerate([*followers, followers[0]])
    ]
    for sender in senders:
        sender.start()
    for _ in range(4):
        time.sleep(0.05)  # not to wait for anything: the changes come at some time in between
        CHANGES[change](cluster)
    for sender in senders:
        sender.join(60)
        assert not sender.is_alive()
        assert sender.failed is None, sender.failed
    stored = [number_of(payload) for payload in cluster.leader.stored(QUEUE)]
    assert len(stored) == len(senders) * count
    for sender in senders:
        assert [number for number in stored if number in sender.numbers] == list(sender.numbers)


def test_messages_wait_for_a_leader_and_their_senders_are_held(cluster: Cluster) -> None:
    follower = cluster.follower()
    cluster.next_leader()
    sender = follower.wire("sspq")
    payload = b"%012d" + bytes((1 << 20) - 12)
    sent = 64
    thread = threading.Thread(
        target=lambda: sender.say(*[sspq(SEND, payload % number, 255) for number in range(sent)]), daemon=True
    )
    thread.start()
    cluster.thread.until(lambda: follower.remote.holds_back == 1, "the sender to be held")
    assert thread.is_alive()
    cluster.follow()
    thread.join(20)
    sender.leave()
    cluster.thread.until(lambda: cluster.leader.counts_now(QUEUE)[0] == sent, "all to be stored")
    assert [number_of(stored) for stored in cluster.leader.stored(QUEUE)] == list(range(sent))
    assert cluster.thread.call(lambda: follower.remote.holds_back) == 0


def test_what_a_client_sent_before_it_left_is_stored_though_there_is_no_leader(cluster: Cluster) -> None:
    follower = cluster.follower()
    follower.lose()
    sender = cluster.door(follower, "phpmq")
    sender.send(range(10))
    sender.wire.leave()
    follower.follow(cluster.leader)
    cluster.thread.until(lambda: cluster.leader.counts_now(QUEUE)[0] == 10, "all to be stored")


# --- requests --------------------------------------------------------------------------------------


def test_requests_end_with_the_link(cluster: Cluster) -> None:
    follower = cluster.follower()
    requester, worker = follower.wire("rq"), cluster.door(follower, "rq")
    name = b"work"
    requester.say(request(7, name, b"?"), request(8, name, b"?"))
    cluster.thread.until(lambda: cluster.leader.broker.requests.is_asked("work"), "the requests")
    cluster.relink()
    requester.expect(undelivered(7) + undelivered(8))
    cluster.thread.until(lambda: cluster.leader.counts_now("work") == (0, 0, 0), "their withdrawal")
    # The ids are free again, and the connection is as good as before.
    requester.say(notice(7, name, b"!"))
    requester.expect(rq_delivered(7))
    requester.close()
    assert isinstance(worker, RqDoor)


def test_requests_wait_for_a_leader_as_long_as_their_senders_do(cluster: Cluster) -> None:
    follower = cluster.follower()
    follower.lose()
    requester = follower.wire("rq")
    requester.say(request(1, b"work", b"?", (TIMEOUT, 1)), request(2, b"work", b"?"))
    requester.expect(undelivered(1))
    worker = cluster.leader.wire("rq")
    worker.say(consume(b"work", 5))
    worker.expect(consuming(b"work"))
    follower.follow(cluster.leader)
    worker.expect(to_consumer(b"work", b"?"))
    worker.say(reply(0, b"!"))
    requester.expect(rq_delivered(2) + reply(2, b"!"))
    requester.close()
    worker.close()


# --- this front-end leads --------------------------------------------------------------------------


def test_what_somebody_asked_who_has_left_is_no_message_where_this_front_end_leads(
    thread: LoopThread, tmp_path: Path
) -> None:
    """It would be worked on for nobody; what he has sent beside it stays sent."""
    old = Leader(thread, tmp_path)
    follower = Follower(thread).follow(old)
    follower.lose()
    requester = follower.wire("rq")
    requester.say(request(1, b"work", b"?"), notice(2, b"work", b"!"))
    thread.until(lambda: len(follower.remote._sending._gathered) == 2, "both to wait")
    requester.close()
    thread.until(lambda: not list(follower.remote._seating), "its leaving")
    old.crash()
    new = Leader(thread, tmp_path, term=2)
    thread.call(_move, follower, new)
    thread.until(lambda: new.counts_now("work")[0] == 1, "what was sent")
    assert new.stored("work") == [b"!"]
    follower.stop()
    new.stop()


@pytest.mark.parametrize("linked", [True, False])
def test_a_follower_that_leads_goes_on_with_its_clients(
    thread: LoopThread, tmp_path: Path, linked: bool
) -> None:
    old = Leader(thread, tmp_path)
    follower = Follower(thread).follow(old)
    # The doors of the server's tests want something with wires, and a front has them.
    consumer, sender = (DOORS[protocol](follower, QUEUE) for protocol in ("phpmq", "rq"))  # type: ignore[arg-type]
    sender.send(range(10))
    consumer.demand(4)
    assert consumer.collect(4) == [0, 1, 2, 3]
    if not linked:
        follower.lose()
        consumer.ack()
        later = Sender(sender, 10, 10, 10)
        later.start()
        thread.until(
            lambda: not follower.remote._sending.is_empty and follower.remote._seating._unsettled,
            "what waits",
        )
    old.crash()
    new = Leader(thread, tmp_path, term=2, claims_seconds=5.0, expected=["nobody"])

    thread.call(_move, follower, new)
    thread.call(new.host.resumed, "nobody")
    if linked:
        assert consumer.wire.is_silent()
        assert new.counts(QUEUE) == (6, 4, 0)
        consumer.ack()
        sender.send(range(10, 20))
    else:
        later.join(20)
        assert later.failed is None, later.failed
    for first in (4, 8, 12, 16):
        assert consumer.collect(4) == list(range(first, first + 4))
        consumer.ack()
    thread.until(lambda: new.counts_now(QUEUE) == (0, 0, 0), "everything to be settled")
    assert [number_of(payload) for payload in new.stored(QUEUE)] == list(range(20))
    assert thread.call(lambda: follower.remote.is_drained)
    consumer.close()
    sender.close()
    follower.stop()
    new.stop()


def leave_with(connection: Connection, said: bytes) -> None:
    """Its peer has said that, for which there is no time in this turn, and is gone."""
    transport = connection._transport
    assert transport is not None
    connection._keep(said)
    connection.connection_lost(None)
    transport.abort()


def test_who_has_left_before_all_was_heard_goes_with_the_others(thread: LoopThread, tmp_path: Path) -> None:
    """It is no connection of the front-end any more, and what it has said last waits for its round."""
    old = Leader(thread, tmp_path)
    follower = Follower(thread).follow(old)
    with follower.wire("phpmq") as wire:
        wire.say(*(phpmq(1, (1, b"default"), (2, b"%d" % number)) for number in range(3)))
        wire.say(phpmq_consume(b"default", 2))
        held = [expect_dispatch(wire, b"default", b"%d" % number) for number in range(2)]
        old.crash()
        new = Leader(thread, tmp_path, term=2, expected=[follower.name])

        def change() -> None:
            (connection,) = follower.connections
            leave_with(connection, ack(b"default", held[0]) + phpmq(1, (1, b"default"), (2, b"last")))
            _move(follower, new)

        thread.call(change)
    thread.until(lambda: not follower.rounds.waiting, "the rest to be heard")
    thread.until(lambda: not new.broker.ports.attached, "nobody to be left")
    assert [*map(bytes, new.stored(QUEUE))] == [b"0", b"1", b"2", b"last"]
    assert new.counts(QUEUE) == (3, 0, 0), "the first is settled, and nobody has the second"
    follower.stop()
    new.stop()
