"""No room: who sends into a full queue waits, in order, and nobody else does. Slow readers likewise."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from penstock.cluster import sending
from penstock.cluster.follower_link import FollowerLink
from penstock.cluster.frames import Frame, Kind
from penstock.cluster.lanes import BATCH_BYTES, MESSAGE_BYTES
from penstock.cluster.leader_link import LeaderLink
from penstock.cluster.rooms import STUCK_SECONDS, Rooms
from penstock.cluster.seats import Seat
from penstock.cluster.sending import SHIPMENTS_MAX, WINDOW_BYTES, Sending
from penstock.cluster.storing import Storing
from penstock.log.disk import RealDisk
from penstock.log.errors import LogError
from penstock.log.results import TransactionDone
from penstock.model.batch import Batch
from penstock.model.policy import Policies
from penstock.model.words import Publish
from penstock.server.settings import Limits
from tests.cluster.fronts import Follower, Leader, LoopThread
from tests.server.harness import SEND, Wire, expect_dispatch, phpmq, sspq
from tests.server.test_phpmq_rules import ack, consume
from tests.server.test_rq_rules import delivered, notice, request, undelivered

SMALL = 10_000
POLICIES = {"small*": {"max-bytes": SMALL}}


@pytest.fixture
def leader(thread: LoopThread, tmp_path: Path) -> Iterator[Leader]:
    leader = Leader(thread, tmp_path, policies=Policies(POLICIES))
    yield leader
    leader.stop()


@pytest.fixture
def follower(leader: Leader) -> Iterator[Follower]:
    follower = Follower(leader.thread, limits=Limits(connection_buffer_bytes=64 << 10)).follow(leader)
    yield follower
    follower.stop()


def send(wire: Wire, queue: bytes, *payloads: bytes) -> None:
    wire.say(*[phpmq(1, (1, queue), (2, payload)) for payload in payloads])


def numbered(count: int, size: int, first: int = 0) -> list[bytes]:
    return [b"%06d" % number + bytes(size - 6) for number in range(first, first + count)]


def held_count(follower: Follower) -> int:
    return follower.thread.call(lambda: follower.remote.holds_back)


def test_senders_into_a_full_queue_wait_and_others_do_not(leader: Leader, follower: Follower) -> None:
    thread = leader.thread
    stuck = [follower.wire("phpmq") for _ in range(3)]
    free = follower.wire("phpmq")
    for number, wire in enumerate(stuck):
        send(wire, b"small", *numbered(9, 3000, 100 * number))
    thread.until(lambda: follower.remote.holds_back == len(stuck), "the senders to be held")
    # What goes elsewhere goes, also under way together with what does not.
    for number in range(20):
        send(free, b"large", *numbered(5, 3000, 5 * number))
    thread.until(lambda: leader.counts_now("large")[0] == 100, "the other queue")
    assert leader.stored("large") == numbered(100, 3000)
    # Consumers make room, at the leader: everything comes, each sender's in its order.
    consumer = leader.wire("phpmq")
    consumer.say(consume(b"small", 2))
    got: list[int] = []
    while len(got) < 27:
        head = phpmq(3, (1, b"small"), (2, bytes(3000)), (3, b"?" * 32))
        heard = consumer.hear(len(head))
        got.append(int(heard[head.index(bytes(3000)) :][:6]))
        consumer.say(ack(b"small", heard[-32:]))
    for number in range(len(stuck)):
        assert [n for n in got if n // 100 == number] == list(range(100 * number, 100 * number + 9))
    thread.until(lambda: follower.remote.holds_back == 0, "the senders to be read again")
    thread.until(lambda: leader.counts_now("small") == (0, 0, 0), "the queue to be empty")
    for wire in (*stuck, free, consumer):
        wire.close()


def test_who_makes_many_queues_waits_and_others_do_not(leader: Leader, follower: Follower) -> None:
    """As at the leader itself: names cost memory, and everybody's time."""
    thread = leader.thread
    leader.broker.doors.new_per_second = 100
    busy, other = follower.wire("phpmq"), follower.wire("phpmq")
    send(other, b"there", b"0")
    thread.until(lambda: leader.counts_now("there")[0] == 1, "the first queue")
    names = [b"new.%d" % number for number in range(260)]
    busy.say(*[phpmq(1, (1, name), (2, b"x")) for name in names[:200]])
    thread.until(lambda: leader.counts_now("new.199")[0] == 1, "so many at once")
    busy.say(*[phpmq(1, (1, name), (2, b"x")) for name in names[200:]])
    thread.until(lambda: follower.remote.holds_back == 1, "it to be held")
    assert thread.call(lambda: leader.engine.queue_count) < len(names)
    send(other, b"there", b"1")
    thread.until(lambda: leader.counts_now("there")[0] == 2, "who makes none to go on")
    thread.until(lambda: all(leader.counts_now(name.decode())[0] == 1 for name in names), "all of them")
    thread.until(lambda: follower.remote.holds_back == 0, "it to be read again")
    busy.close()
    other.close()


@pytest.mark.parametrize("before_bytes", [0, 2000], ids=["all together are too much", "one alone is"])
def test_messages_with_a_ttl_and_without_wait_in_their_order(
    leader: Leader, follower: Follower, before_bytes: int
) -> None:
    """They are batches of their own, and what would fit does not overtake what does not."""
    came = [(b"a" * 3000, None), (b"b" * 9000, b"0"), (b"c" * 3000, None), (b"d" * 500, b"0")]
    with follower.wire("phpmq") as sender, leader.wire("phpmq") as consumer:
        if before_bytes:
            came.insert(0, (bytes(before_bytes), None))
            send(sender, b"small", bytes(before_bytes))
            leader.thread.until(lambda: leader.counts_now("small")[0] == 1, "the first")
        behind = came[-4:]
        sender.say(*[phpmq(1, (1, b"small"), (2, c), *([(5, t)] if t else [])) for c, t in behind])
        leader.thread.until(lambda: follower.remote.holds_back == 1, "the sender to be held")
        consumer.say(consume(b"small", 1))
        for content, ttl in came:
            consumer.say(ack(b"small", expect_dispatch(consumer, b"small", content, ttl)))
        leader.thread.until(lambda: follower.remote.holds_back == 0, "the sender to be read again")


def test_receipts_come_when_there_is_room(leader: Leader, follower: Follower) -> None:
    sender = follower.wire("rq")
    sender.say(*[notice(number, b"small", payload) for number, payload in enumerate(numbered(3, 3000))])
    for number in range(3):
        sender.expect(delivered(number))
    sender.say(notice(3, b"small", bytes(3000)), notice(4, b"large", b"behind it"))
    leader.thread.until(lambda: follower.remote.holds_back == 1, "the sender to be held")
    assert sender.is_silent()
    consumer = leader.wire("phpmq")
    consumer.say(consume(b"small", 9))
    head = phpmq(3, (1, b"small"), (2, bytes(3000)), (3, b"?" * 32))
    for _ in range(3):
        consumer.say(ack(b"small", consumer.hear(len(head))[-32:]))
    assert {sender.hear(len(delivered(3))), sender.hear(len(delivered(4)))} == {delivered(3), delivered(4)}
    consumer.hear(len(head))
    sender.close()
    consumer.close()


@pytest.mark.parametrize("door", ["follower", "leader"])
def test_who_has_left_while_it_is_held_back_holds_nothing_any_more(
    leader: Leader, follower: Follower, door: str
) -> None:
    """It is not read, so nobody sees it leave; and what it holds is what there is no room beside."""
    front = follower if door == "follower" else leader
    worker, consumer = front.wire("phpmq"), leader.wire("phpmq")
    messages = [b"%d" % number * 9000 for number in range(3)]
    send(worker, b"small", messages[0])
    worker.say(consume(b"small", 9))
    expect_dispatch(worker, b"small", messages[0])
    send(worker, b"small", messages[1])
    leader.thread.until(lambda: front.home.holds_back == 1, "the worker to be held")
    if door == "leader":
        worker.say(consume(b"small", 9))  # nobody reads that yet, nor what follows
        send(worker, b"small", messages[2])
    port = worker.socket.getsockname()[1]
    worker.close()

    def has_left() -> bool:
        for connection in list(front.connections):
            connection.tick(front.now_us())  # what the server does once a second
        return any(connection.has_left for connection in front.connections)

    leader.thread.until(has_left, "the broker to see that it has left")
    consumer.say(consume(b"small", 1))
    first = expect_dispatch(consumer, b"small", messages[0])
    consumer.say(consume(b"small", 0), ack(b"small", first))
    if door == "leader":
        # There is room for the next, and so the worker is read: it asks for that, and is held back again.
        leader.thread.until(lambda: leader.counts_now("small") == (0, 1, 0), "the worker to have the next")
        leader.thread.until(lambda: front.home.holds_back == 1, "the worker to be held again")
        leader.thread.until(has_left, "the broker to see again that it has left")
    consumer.say(consume(b"small", 1))
    for content in messages[1:] if door == "leader" else messages[1:2]:
        consumer.say(ack(b"small", expect_dispatch(consumer, b"small", content)))
    leader.thread.until(lambda: leader.counts_now("small") == (0, 0, 0), "the queue to be empty")
    leader.thread.until(lambda: front.endings(port) == 1, "the connection to have ended")
    consumer.close()


@pytest.mark.parametrize("door", ["follower", "leader"])
def test_a_message_larger_than_its_queue_is_refused_and_its_sender_goes_on(
    leader: Leader, follower: Follower, door: str
) -> None:
    front = follower if door == "follower" else leader
    with front.wire("rq") as sender, front.wire("phpmq") as other:
        sender.say(notice(1, b"small", bytes(SMALL + 1)))
        sender.expect(undelivered(1))
        sender.say(notice(2, b"small", b"2"))
        sender.expect(delivered(2))
        send(other, b"small", b"3", bytes(SMALL + 1), b"4")
        leader.thread.until(lambda: leader.counts_now("small")[0] == 3, "what fits")
        leader.thread.until(lambda: not front.home.holds_back, "the sender to be read again")
        assert leader.stored("small") == [b"2", b"3", b"4"]


def test_a_delivery_that_nobody_wants_goes_back_though_its_connection_waits(
    leader: Leader, follower: Follower
) -> None:
    """It was on its way when the client cancelled, together with a message for which there is no room."""
    thread, dialer = leader.thread, follower.remote._dialer
    late: list[Frame] = []
    hear = dialer.on_frame

    def slowly(frame: Frame) -> None:
        if frame.kind is Kind.DELIVER:
            late.append(frame._replace(body=memoryview(bytes(frame.body))))
        else:
            hear(frame)

    with follower.wire("phpmq") as first, leader.wire("phpmq") as second:
        send(second, b"small", bytes(SMALL))
        first.say(consume(b"work", 1))
        thread.until(lambda: leader.broker.doors.consumer_count("work") == 1, "the demand")
        dialer.on_frame = slowly
        send(second, b"work", b"1")
        thread.until(lambda: late, "the delivery")
        first.say(phpmq(1, (1, b"small"), (2, b"2")), consume(b"work", 0))
        thread.until(lambda: follower.remote.holds_back == 1, "the sender to be held")
        dialer.on_frame = hear
        thread.call(hear, late[0])
        second.say(consume(b"work", 1))
        expect_dispatch(second, b"work", b"1")


def test_what_waits_survives_a_lost_link(leader: Leader, follower: Follower) -> None:
    sender = follower.wire("phpmq")
    send(sender, b"small", *numbered(6, 3000))
    leader.thread.until(lambda: follower.remote.holds_back == 1, "the sender to be held")
    leader.cut_links()
    follower.follow(leader)
    consumer = leader.wire("phpmq")
    consumer.say(consume(b"small", 9))
    head = phpmq(3, (1, b"small"), (2, bytes(3000)), (3, b"?" * 32))
    for number in range(6):
        heard = consumer.hear(len(head))
        assert int(heard[head.index(bytes(3000)) :][:6]) == number
        consumer.say(ack(b"small", heard[-32:]))
    sender.close()
    consumer.close()


def test_a_request_into_a_full_queue_waits_at_the_leader(leader: Leader, follower: Follower) -> None:
    requester = follower.wire("rq")
    requester.say(*[notice(number, b"small", payload) for number, payload in enumerate(numbered(3, 3000))])
    for number in range(3):
        requester.expect(delivered(number))
    requester.say(request(7, b"small", bytes(3000)))
    leader.thread.until(lambda: leader.broker.holds_back == 1, "the requester to be held")
    thread = leader.thread
    thread.until(lambda: any(seat.held for seat in follower.remote._seating), "the hold to arrive")
    leader.cut_links()
    requester.expect(undelivered(7))
    thread.until(lambda: not any(seat.held for seat in follower.remote._seating), "the hold to end")
    requester.close()


def test_names_that_cannot_be_are_refused_and_the_rest_is_stored(leader: Leader, follower: Follower) -> None:
    """The leader's limits count, which a follower does not know."""
    leader.thread.call(lambda: setattr(leader.broker.doors, "_queues_max", 2))
    senders = [follower.wire("rq") for _ in range(4)]
    for number, sender in enumerate(senders):
        sender.say(notice(number, b"queue-%d" % number, b"x"), notice(number + 50, b"queue-0", b"y"))
    answers = [sender.hear(2 * len(delivered(0))) for sender in senders]
    assert all(delivered(number + 50) in answer for number, answer in enumerate(answers))
    refused = [undelivered(number) in answer for number, answer in enumerate(answers)]
    assert refused.count(True) == 2
    assert not refused[0]
    for sender in senders:
        sender.close()


def test_new_names_count_together(leader: Leader, follower: Follower) -> None:
    leader.thread.call(lambda: setattr(leader.broker.doors, "_queues_max", 2))
    sender = follower.wire("rq")
    sender.say(b"".join(notice(number, b"queue-%d" % number, b"x") for number in range(4)))
    answers = sender.hear(2 * len(delivered(0)) + 2 * len(undelivered(0)))
    assert [undelivered(number) in answers for number in range(4)] == [False, False, True, True]
    assert leader.thread.call(leader.engine.queues) == ["queue-0", "queue-1"]
    sender.close()


def test_a_slow_reader_does_not_slow_others(leader: Leader, follower: Follower) -> None:
    slow, fast, sender = (follower.wire("phpmq") for _ in range(3))
    slow.say(consume(b"slow", 5000))
    for _ in range(30):
        send(sender, b"slow", *numbered(100, 6000))
    # It does not read: what is under way to it is bounded, the rest stays in its queue.
    leader.thread.until(lambda: leader.counts_now("slow")[1] > 0, "deliveries")
    fast.say(consume(b"fast", 1000))
    head = phpmq(3, (1, b"fast"), (2, bytes(6)), (3, b"?" * 32))
    for number in range(300):
        send(sender, b"fast", b"%06d" % number)
        heard = fast.hear(len(head))
        fast.say(ack(b"fast", heard[-32:]))
    assert leader.counts("slow")[0] > 100
    # And as soon as it reads, it gets everything.
    head = phpmq(3, (1, b"slow"), (2, bytes(6000)), (3, b"?" * 32))
    for _ in range(3000):
        heard = slow.hear(len(head))
        slow.say(ack(b"slow", heard[-32:]))
    leader.thread.until(lambda: leader.counts_now("slow") == (0, 0, 0), "all to be settled")
    for wire in (slow, fast, sender):
        wire.close()


def test_large_messages_pass(leader: Leader, follower: Follower) -> None:
    sender, reader = follower.wire("sspq"), follower.wire("phpmq")
    payloads = [bytes([number]) * (3 << 20) for number in range(5)]
    settlement = threading.Thread(
        target=lambda: sender.say(*[sspq(SEND, payload, 255) for payload in payloads]), daemon=True
    )
    settlement.start()
    reader.say(consume(b"default", 2))
    head = phpmq(3, (1, b"default"), (2, payloads[0]), (3, b"?" * 32))
    at = head.index(payloads[0])
    for payload in payloads:
        heard = reader.hear(len(head))
        assert heard[at : at + len(payload)] == payload
        reader.say(ack(b"default", heard[-32:]))
    settlement.join(20)
    sender.close()
    reader.close()


def test_a_request_that_fills_the_window_holds_its_sender_for_a_moment_only(
    leader: Leader, follower: Follower
) -> None:
    """No receipt of a shipment comes for it: it travels with the words."""
    requester = follower.wire("rq")
    large = threading.Thread(
        target=lambda: requester.say(request(1, b"asked", bytes(9 << 20)), request(2, b"asked", b"small"))
    )
    large.start()
    leader.thread.until(lambda: leader.engine.durable_end("asked") == 2, "both requests")
    large.join()
    leader.thread.until(lambda: follower.remote.holds_back == 0, "the requester to be read from")
    requester.close()


def test_empty_messages_fill_the_window_too(follower: Follower) -> None:
    """What a follower keeps while there is no leader is bounded by what it takes, not by payload alone."""
    thread = follower.thread
    follower.lose()
    sender = follower.wire("phpmq")
    thread.until(lambda: len(follower.connections) == 1, "the connection")
    (connection,) = follower.connections

    def publish() -> int:
        for number in range(1, 300_000):
            follower.remote.handle(connection, [Publish("empty", Batch.of([b""]))], follower.now_us())
            if follower.remote.holds_back:
                return number
        return 0

    assert 0 < thread.call(publish) <= WINDOW_BYTES // BATCH_BYTES + 1

    def publish_many() -> int:
        """The same in large batches, of another connection."""
        for number in range(1, 1000):
            batch = Batch.of([b""] * 10_000)
            follower.remote.handle(connection, [Publish("empty", batch)], follower.now_us())
            if follower.remote.holds_back:
                return number
        return 0

    thread.call(follower.remote._sending.take_all)
    assert 0 < thread.call(publish_many) <= WINDOW_BYTES // (10_000 * MESSAGE_BYTES) + 1
    thread.call(follower.remote._sending.take_all)
    sender.close()


class Receipts:
    """Keeps the receipts of shipments back, so that a follower has as many under way as it may."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._released = False
        self._kept: list[tuple[LeaderLink, int, int, TransactionDone | LogError | None]] = []
        leader.thread.call(setattr, leader.host._storing, "_stored", self._keep)

    def _keep(
        self, link: LeaderLink, lane: int, number: int, result: TransactionDone | LogError | None
    ) -> None:
        if self._released:
            Storing._stored(link, lane, number, result)
        else:
            self._kept.append((link, lane, number, result))

    def release(self) -> None:
        def tell() -> None:
            self._released = True
            for receipt in self._kept:
                Storing._stored(*receipt)

        self._leader.thread.call(tell)


def is_under_way(sending: Sending, count: int) -> bool:
    return len(sending._main.sent) >= count


def publish_and_settle(
    leader: Leader, follower: Follower, *, cancel: bool = False
) -> tuple[Receipts, list[Wire]]:
    """A worker has sent its result and settled its input, and both wait behind others at the follower."""
    thread, sending = leader.thread, follower.remote._sending
    worker, other, source = follower.wire("phpmq"), follower.wire("phpmq"), leader.wire("phpmq")
    send(source, b"in", b"input")
    worker.say(consume(b"in", 1))
    head = phpmq(3, (1, b"in"), (2, b"input"), (3, b"?" * 32))
    held = worker.hear(len(head))[-32:]
    receipts = Receipts(leader)
    for number in range(1, SHIPMENTS_MAX + 1):
        send(other, b"other", b"%d" % number)
        thread.until(partial(is_under_way, sending, number), "a shipment of its own")
    behind = ack(b"in", held) + (consume(b"in", 0) if cancel else b"")
    worker.say(phpmq(1, (1, b"out"), (2, b"result")), behind)
    thread.until(lambda: len(sending._gathered) == 2 + cancel, "the result and what was said behind it")
    return receipts, [worker, other, source]


@pytest.mark.parametrize("cut", [False, True])
def test_an_acknowledgement_does_not_overtake_the_result_before_it(
    leader: Leader, follower: Follower, cut: bool
) -> None:
    """With as many shipments under way as may be, a result waits at the follower, and so does what its sender
    has said behind it; a lost link changes nothing."""
    thread, sending = leader.thread, follower.remote._sending
    receipts, wires = publish_and_settle(leader, follower)
    if cut:
        leader.cut_links()
        follower.follow(leader)
    probe = follower.wire("rq")
    probe.say(notice(1, b"other", b"x"))
    thread.until(lambda: len(sending._gathered) == 3, "the probe")
    assert leader.counts("in") == (0, 1, 0)
    assert leader.counts("out") == (0, 0, 0)
    receipts.release()
    thread.until(lambda: leader.counts_now("in") == (0, 0, 0), "the input to be settled")
    assert leader.stored("out") == [b"result"]
    thread.until(lambda: follower.remote.is_drained, "nothing to be open")
    for wire in (*wires, probe):
        wire.close()


@pytest.mark.parametrize("cut", [False, True])
def test_an_acknowledgement_behind_a_result_is_told_when_its_client_has_left(
    leader: Leader, follower: Follower, cut: bool
) -> None:
    thread, sending = leader.thread, follower.remote._sending
    receipts, (worker, *wires) = publish_and_settle(leader, follower)
    worker.close()
    thread.until(lambda: len(sending._gathered) == 3, "its leaving")
    if cut:
        leader.cut_links()
        follower.follow(leader)
    receipts.release()
    thread.until(lambda: leader.counts_now("in") == (0, 0, 0), "the input to be settled")
    thread.until(lambda: follower.remote.is_drained, "nothing to be open")
    assert leader.stored("out") == [b"result"]
    for wire in wires:
        wire.close()


@pytest.mark.parametrize("cut", ["no", "it waits", "it was not told"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_an_acknowledgement_waits_for_the_result_that_has_no_room(
    leader: Leader, follower: Follower, chunks: int, cut: str
) -> None:
    """Or whoever dies then has the input settled, and the result nowhere."""
    thread = leader.thread
    worker, source = follower.wire("phpmq"), leader.wire("phpmq")
    send(source, b"in", b"input")
    send(source, b"small", bytes(SMALL))
    worker.say(consume(b"in", 1))
    held = expect_dispatch(worker, b"in", b"input")
    if cut == "it was not told":
        follower.lose()
    result = phpmq(1, (1, b"small"), (2, b"result"))
    if chunks == 1:
        worker.say(result + ack(b"in", held) + consume(b"in", 2))
    else:
        (connection,) = follower.connections

        def say_both() -> None:
            connection._read(result)
            connection._read(ack(b"in", held) + consume(b"in", 2))

        thread.call(say_both)
    if cut == "it was not told":
        thread.until(lambda: len(follower.remote._sending._gathered) == 2, "both to wait")
        follower.follow(leader)
    thread.until(lambda: follower.remote.holds_back == 1, "the result to wait")
    if cut == "it waits":
        leader.cut_links()
        follower.follow(leader)
    probe = follower.wire("rq")
    probe.say(notice(1, b"other", b"x"))
    probe.expect(delivered(1))
    assert leader.counts("in") == (0, 1, 0)
    source.say(consume(b"small", 1))
    source.say(ack(b"small", expect_dispatch(source, b"small", bytes(SMALL))))
    expect_dispatch(source, b"small", b"result")
    thread.until(lambda: leader.counts_now("in") == (0, 0, 0), "the input to be settled")
    thread.until(lambda: not follower.remote._seating._unsettled, "nothing to be open")
    # What it has said beside it counts.
    send(source, b"in", b"2", b"3")
    for content in (b"2", b"3"):
        expect_dispatch(worker, b"in", content)
    for wire in (worker, source, probe):
        wire.close()


@pytest.mark.parametrize("leaves", ["it is dropped", "its peer is gone"])
def test_who_leaves_while_his_result_has_no_room_has_settled_nothing(
    leader: Leader, follower: Follower, leaves: str
) -> None:
    thread = leader.thread
    worker, source = follower.wire("phpmq"), leader.wire("phpmq")
    send(source, b"in", b"input")
    send(source, b"small", bytes(SMALL))
    worker.say(consume(b"in", 1))
    held = expect_dispatch(worker, b"in", b"input")
    worker.say(phpmq(1, (1, b"small"), (2, b"result")) + ack(b"in", held))
    thread.until(lambda: follower.remote.holds_back == 1, "the result to wait")
    (connection,) = follower.connections
    if leaves == "it is dropped":
        thread.call(connection.drop)
    else:
        worker.close()

        def has_left() -> bool:
            connection.tick(follower.now_us())  # what the server does once a second
            return connection.has_left

        thread.until(has_left, "the broker to see that it has left")
    source.say(consume(b"in", 1))
    source.say(ack(b"in", expect_dispatch(source, b"in", b"input")))
    source.say(consume(b"small", 1))
    source.say(ack(b"small", expect_dispatch(source, b"small", bytes(SMALL))))
    if leaves == "its peer is gone":
        expect_dispatch(source, b"small", b"result")
    thread.until(lambda: follower.remote.is_drained, "nothing to be open")
    worker.close()
    source.close()


def input_of(follower: Follower, leader: Leader) -> tuple[Wire, bytes]:
    """A worker that holds a message, and its id; then there is no leader."""
    worker = follower.wire("phpmq")
    send(worker, b"in", b"input")
    worker.say(consume(b"in", 1))
    held = expect_dispatch(worker, b"in", b"input")
    follower.lose()
    return worker, held


def test_who_left_without_a_leader_is_told_of_once(leader: Leader, follower: Follower) -> None:
    """Its result goes first, then what it has settled; nothing comes behind its leaving, which would end the
    link of everybody."""
    thread = leader.thread
    worker, held = input_of(follower, leader)
    worker.say(phpmq(1, (1, b"out"), (2, b"result")), ack(b"in", held))
    thread.until(lambda: len(follower.remote._sending._gathered) == 2, "both")
    worker.close()
    thread.until(lambda: not list(follower.remote._seating), "its leaving")
    heard: list[Kind] = []
    hear = leader.host.hear

    def listen(link: LeaderLink, frame: Frame) -> None:
        heard.append(frame.kind)
        hear(link, frame)

    leader.host.hear = listen  # type: ignore[method-assign]
    before = len(follower.links)
    follower.follow(leader)
    thread.until(lambda: follower.remote.is_drained, "everything to be durable")
    assert leader.counts("in") == (0, 0, 0)
    assert leader.stored("out") == [b"result"]
    assert follower.links[before:] == [(True, "")]
    assert heard == [Kind.PUBLISH, Kind.ATTACH, Kind.CLAIM, Kind.WORDS, Kind.DETACH, Kind.RESUMED]


@pytest.mark.parametrize("cut", [False, True])
def test_what_waits_behind_a_result_brings_no_old_demand_back(
    leader: Leader, follower: Follower, cut: bool
) -> None:
    """A worker has settled and cancelled in one breath, behind a result, and consumes again."""
    thread = leader.thread
    if cut:
        receipts, (worker, other, source) = publish_and_settle(leader, follower, cancel=True)
        leader.cut_links()
        receipts.release()
    else:
        worker, held = input_of(follower, leader)
        worker.say(phpmq(1, (1, b"out"), (2, b"result")), ack(b"in", held) + consume(b"in", 0))
        thread.until(lambda: len(follower.remote._sending._gathered) == 2, "both")
        other = source = follower.wire("phpmq")
    worker.say(consume(b"in", 1))
    thread.until(lambda: any(seat.demands for seat in follower.remote._seating), "the new demand")
    follower.follow(leader)
    thread.until(lambda: leader.counts_now("in") == (0, 0, 0), "the input to be settled")
    thread.until(lambda: not follower.remote._seating._unsettled, "it to be confirmed")
    send(source, b"in", b"next")
    expect_dispatch(worker, b"in", b"next")
    for wire in {worker, other, source}:
        wire.close()


def test_consumers_that_do_not_read_cost_little(
    leader: Leader, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are looked at again, so that they get more when they read, and not hundreds of times a second."""
    thread = leader.thread
    looks: Counter[Seat] = Counter()
    tell = Rooms._tell

    def counted(rooms: Rooms, seat: Seat, link: FollowerLink) -> int:
        looks[seat] += 1
        return tell(rooms, seat, link)

    monkeypatch.setattr(Rooms, "_tell", counted)
    sender = follower.wire("phpmq")
    readers = [follower.wire("phpmq") for _ in range(3)]
    for reader in readers:
        reader.say(consume(b"slow", 1000))
    size = 60_000
    for _ in range(6):
        send(sender, b"slow", *numbered(100, size))
    rooms = follower.remote._rooms
    thread.until(lambda: len(rooms._stuck) == len(readers), "nothing to move")
    began, before = time.monotonic(), thread.call(looks.total)
    thread.until(lambda: looks.total() >= before + 10 * len(readers), "ten looks at each")
    assert time.monotonic() - began > 10 * STUCK_SECONDS / 2
    # And as soon as one reads, it gets everything.
    for reader in readers[1:]:
        reader.close()
    head = phpmq(3, (1, b"slow"), (2, bytes(size)), (3, b"?" * 32))
    for _ in range(600):
        readers[0].say(ack(b"slow", readers[0].hear(len(head))[-32:]))
    thread.until(lambda: leader.counts_now("slow") == (0, 0, 0), "all to be settled")
    for wire in (sender, readers[0]):
        wire.close()


@pytest.mark.parametrize("where", ["leader", "follower", "follower without a leader"])
def test_what_a_sender_has_sent_that_leaves_at_once_waits_for_room(
    leader: Leader, follower: Follower, where: str
) -> None:
    with leader.wire("phpmq") as consumer:
        send(consumer, b"small", *numbered(3, 3000))
        leader.thread.until(lambda: leader.counts_now("small")[0] == 3, "the queue to be full")
        if where == "follower without a leader":
            follower.lose()
        sender = (leader if where == "leader" else follower).wire("phpmq")
        send(sender, b"small", *numbered(2, 3000, first=3))
        if where == "follower without a leader":
            sender.leave()
            follower.follow(leader)
        sender.close()
        consumer.say(consume(b"small", 1))
        for content in numbered(5, 3000):
            consumer.say(ack(b"small", expect_dispatch(consumer, b"small", content)))
        leader.thread.until(lambda: follower.remote.is_drained, "nothing to be left")


@pytest.mark.parametrize("when", ["it waits", "it is on its way", "there is too much"])
def test_messages_without_room_whose_sender_has_left_are_told_in_the_log(
    leader: Leader, follower: Follower, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    sender = follower.wire("phpmq")
    send(sender, b"small", *numbered(3, 3000))
    leader.thread.until(lambda: leader.counts_now("small")[0] == 3, "the queue to be full")
    if when == "there is too much":
        follower.lose()
        send(sender, b"small", *numbered(2, 3000))
        sender.leave()
        monkeypatch.setattr(sending, "WINDOW_BYTES", -1)
        follower.follow(leader)
    else:
        send(sender, b"small", *numbered(2, 3000))
        leader.thread.until(lambda: follower.remote.holds_back == 1, "the sender to be held")
        (connection,) = follower.connections
        is_tried = when == "it is on its way"

        def drop() -> bool:
            if bool(follower.remote._sending._again.sent) is not is_tried:
                return False
            connection.leave(lost=True)
            return True

        leader.thread.until(drop, "the moment to leave")
        sender.close()
    text = "left before there was room for what it had sent: not stored"
    leader.thread.until(lambda: text in follower.log(), "it to be told")


def test_who_sends_over_rq_is_told_when_the_disk_of_the_leader_stays_full(
    leader: Leader, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "DISK_SECONDS", 0.2)
    sender, deaf = follower.wire("rq"), follower.wire("phpmq")
    # Another who waits, for a queue that is full, which says nothing of the disk; nor does it end that wait.
    other = follower.wire("rq")
    other.say(notice(0, b"small", bytes(SMALL)))
    other.expect(delivered(0))
    other.say(notice(1, b"small", bytes(SMALL)))
    leader.thread.until(lambda: follower.remote.holds_back == 1, "it to wait")
    with monkeypatch.context() as full:
        full.setattr(RealDisk, "free_bytes", lambda disk: 0)
        leader.engine._committer._granted = 0  # what it has found room for before
        send(deaf, b"q", b"waits")
        sender.say(notice(7, b"q", b"x"), notice(8, b"q", b"y"))
        sender.expect(undelivered(7) + undelivered(8))
        leader.thread.until(lambda: follower.remote.holds_back == 2, "who has no word for it to wait")
    assert other.is_silent()
    sender.say(notice(9, b"q", b"z"))
    sender.expect(delivered(9))
    leader.thread.until(lambda: leader.counts_now("q")[0] == 2, "who has waited to go on")
    assert sorted(leader.stored("q")) == [b"waits", b"z"]
    assert other.is_silent()
    for wire in (sender, deaf, other):
        wire.close()
