"""RQ, rule by rule, in bytes, against a broker process.

Every test has queues of its own. A PONG says that the broker has read what came before the PING, and
`leave` that it has taken back what a node held.

Silence is tested with a broker whose sessions take half a second for the fifteen of the protocol: the
same server with one number changed, because two times fifteen seconds are long for a test.
"""

import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from penstock.protocols.rq_session import SILENCE_US
from tests.server.harness import SEND, BrokerProcess, Wire, expect_dispatch, lose, phpmq, rq, sspq, until

NOP, CLEAR, PING, PONG, REQUEST, REPLY, DELIVERED, BROADCAST, UNDELIVERED = 0, 1, 5, 6, 10, 11, 13, 14, 16
CONSUME, CANCEL_QUEUE, CLOSING, SERVER_FULL, CONSUMING, EXCLUSIVE, NOREPLY = 20, 21, 22, 23, 24, 32, 33
PRIORITY, RETRIES, QUEUEID, TIMEOUT, MAX, ID, QUEUE, PAYLOAD = 64, 65, 96, 97, 98, 128, 160, 224
Attribute = int | tuple[int, int | bytes]

PAYLOAD_BYTES_MAX = 64 << 20
DELIVERY_IDS_END = 32_768


def consume(queue: bytes, most: int = 0, priority: int = 20, *flags: int) -> bytes:
    return rq(CLEAR, (QUEUE, queue), (MAX, most), (PRIORITY, priority), *flags, CONSUME)


def consuming(queue: bytes, queue_id: int = 1) -> bytes:
    return rq(CLEAR, (QUEUEID, queue_id), (QUEUE, queue), CONSUMING)


def request(ident: int, queue: bytes, payload: bytes, *attributes: Attribute) -> bytes:
    return rq(CLEAR, (ID, ident), (QUEUE, queue), *attributes, (PAYLOAD, payload), REQUEST)


def notice(ident: int, queue: bytes, payload: bytes, *attributes: Attribute) -> bytes:
    return rq(CLEAR, (ID, ident), (QUEUE, queue), *attributes, (PAYLOAD, payload), NOREPLY, REQUEST)


def to_consumer(queue: bytes, payload: bytes, delivery_id: int = 0) -> bytes:
    return rq(CLEAR, (QUEUE, queue), (PAYLOAD, payload), (ID, delivery_id), REQUEST)


def to_consumer_noreply(queue: bytes, payload: bytes, delivery_id: int = 0) -> bytes:
    return rq(CLEAR, (QUEUE, queue), (PAYLOAD, payload), NOREPLY, (ID, delivery_id), REQUEST)


def delivered(ident: int) -> bytes:
    return rq(CLEAR, (ID, ident), DELIVERED)


def reply(ident: int, payload: bytes) -> bytes:
    return rq(CLEAR, (ID, ident), (PAYLOAD, payload), REPLY)


def undelivered(ident: int) -> bytes:
    return rq(CLEAR, (ID, ident), UNDELIVERED)


def broadcast(queue: bytes, payload: bytes) -> bytes:
    return rq(CLEAR, (QUEUE, queue), (PAYLOAD, payload), BROADCAST)


class Room:
    """One test's queues and nodes."""

    numbers = count()

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self._wires: list[Wire] = []

    def queue(self) -> bytes:
        """A name that no other test uses."""
        return b"queue.%d" % next(self.numbers)

    def node(self) -> Wire:
        return self.wire("rq")

    def wire(self, protocol: str) -> Wire:
        wire = self.broker.wire(protocol)
        self._wires.append(wire)
        return wire

    def consumer(self, queue: bytes, most: int = 0, priority: int = 20, *flags: int) -> Wire:
        """A node that consumes and has been told so."""
        node = self.node()
        node.say(consume(queue, most, priority, *flags))
        node.expect(consuming(queue))
        return node

    def send(self, queue: bytes, *payloads: bytes) -> None:
        """NOREPLY requests that the broker has, when this returns."""
        node = self.node()
        node.say(*[notice(number, queue, payload) for number, payload in enumerate(payloads)])
        for number in range(len(payloads)):
            node.expect(delivered(number))
        node.leave()

    def expect_empty(self, queue: bytes) -> None:
        """What is sent now is what comes next: nothing was left before it."""
        self.send(queue, b"sentinel")
        node = self.consumer(queue)
        node.expect(to_consumer_noreply(queue, b"sentinel"))
        node.say(delivered(0))
        node.leave()

    def close(self) -> None:
        for wire in self._wires:
            wire.close()


def read_so_far(*nodes: Wire) -> None:
    """The broker has read everything that these nodes have said, and has said nothing else to them."""
    for node in nodes:
        node.say(rq(PING))
        node.expect(rq(PONG))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path_factory.mktemp("rq"), "--sspq", "off").start()
    yield process
    assert process.stop() == 0
    assert "Traceback" not in process.log(), process.log()


@pytest.fixture
def room(broker: BrokerProcess) -> Iterator[Room]:
    room = Room(broker)
    yield room
    room.close()


# --- bytes -------------------------------------------------------------------------------------------


def test_the_table_of_exchanges_byte_for_byte(room: Room) -> None:
    consumer, requester = room.node(), room.node()
    consumer.say(bytes.fromhex("01 a0 02 5131 62 0005 40 14 14"))
    consumer.expect(bytes.fromhex("01 60 0001 a0 02 5131 18"))
    requester.say(bytes.fromhex("01 80 00000007 a0 02 5131 e0 00000005 68656c6c6f 0a"))
    consumer.expect(bytes.fromhex("01 a0 02 5131 e0 00000005 68656c6c6f 80 00000000 0a"))
    consumer.say(bytes.fromhex("01 80 00000000 0d"))
    requester.expect(bytes.fromhex("01 80 00000007 0d"))
    consumer.say(bytes.fromhex("01 80 00000000 e0 00000003 796573 0b"))
    requester.expect(bytes.fromhex("01 80 00000007 e0 00000003 796573 0b"))
    requester.say(bytes.fromhex("01 80 00000008 a0 02 5131 e0 00000005 68656c6c6f 21 0a"))
    requester.expect(bytes.fromhex("01 80 00000008 0d"))
    consumer.expect(bytes.fromhex("01 a0 02 5131 e0 00000005 68656c6c6f 21 80 00000000 0a"))
    consumer.say(bytes.fromhex("01 80 00000000 0d"))
    requester.say(bytes.fromhex("01 a0 02 5131 e0 00000002 6869 0e"))
    consumer.expect(bytes.fromhex("01 a0 02 5131 e0 00000002 6869 0e"))
    requester.say(bytes.fromhex("01 80 00000009 a0 02 5131 41 00 e0 00000001 78 0a"))  # RETRIES 0
    consumer.expect(bytes.fromhex("01 a0 02 5131 e0 00000001 78 80 00000000 0a"))
    consumer.close()
    requester.expect(bytes.fromhex("01 80 00000009 10"))
    requester.say(bytes.fromhex("05"))
    requester.expect(bytes.fromhex("06"))
    requester.say(bytes.fromhex("01 16"))
    assert requester.is_closed()
    room.expect_empty(b"Q1")


@pytest.mark.parametrize(
    "asks", ["01 a0 02 {} 62 0005 40 14 20 14", "01 20 a0 02 {} 62 0005 40 14 14"], ids=["last", "first"]
)
def test_exclusive_may_stand_before_the_last_byte_or_behind_the_clear(room: Room, asks: str) -> None:
    name = f"x{next(room.numbers) % 10}".encode()
    first, second = room.node(), room.node()
    first.say(bytes.fromhex(asks.format(name.hex())))
    first.expect(consuming(name))
    second.say(consume(name))
    read_so_far(second)  # and CONSUMING was not said
    first.leave()
    second.expect(consuming(name))


def test_frames_may_be_split_at_every_byte(room: Room) -> None:
    queue, sender = room.queue(), room.node()
    consumer = room.consumer(queue)
    frame = notice(5, queue, b"abc", (RETRIES, 3), (TIMEOUT, 9))
    for cut in range(1, len(frame)):
        sender.say(frame[:cut])
        assert sender.is_silent(0.002), f"the first {cut} bytes were answered"
        sender.say(frame[cut:])
        sender.expect(delivered(5))
        consumer.expect(to_consumer_noreply(queue, b"abc"))
        answer = delivered(0)
        consumer.say(answer[: cut % len(answer)])
        consumer.say(answer[cut % len(answer) :])


def test_many_frames_may_come_in_one_segment(room: Room) -> None:
    queue, node = room.queue(), room.node()
    payloads = [b"%d" % number * (1 + number % 5) for number in range(300)]
    node.say(consume(queue), *[notice(number, queue, payload) for number, payload in enumerate(payloads)])
    node.expect(consuming(queue))
    receipts = [delivered(number) for number in range(300)]
    deliveries = [to_consumer_noreply(queue, payload, number) for number, payload in enumerate(payloads)]
    heard = node.hear(len(b"".join(receipts + deliveries)))
    assert all(heard.count(frame) == 1 for frame in receipts + deliveries), "in whichever order"


def test_attributes_may_come_in_any_order(room: Room) -> None:
    queue, requester = room.queue(), room.node()
    consumer = room.node()
    consumer.say(rq(CLEAR, (PRIORITY, 30), (MAX, 9), (QUEUE, queue), CONSUME))
    consumer.expect(consuming(queue))
    attributes: list[Attribute] = [(PAYLOAD, b"x"), (ID, 3), (QUEUE, queue), (TIMEOUT, 60), (RETRIES, 2)]
    for turn in range(len(attributes)):
        requester.say(rq(CLEAR, *attributes[turn:], *attributes[:turn], REQUEST))
        consumer.expect(to_consumer(queue, b"x"))
        consumer.say(rq(CLEAR, (PAYLOAD, b"y"), (ID, 0), REPLY))
        requester.expect(delivered(3) + reply(3, b"y"))


def test_attributes_stay_until_the_next_clear(room: Room) -> None:
    queue, node = room.queue(), room.node()
    node.say(notice(1, queue, b"x"), rq((ID, 2), REQUEST), rq((PAYLOAD, b"y"), (ID, 3), REQUEST))
    for ident in (1, 2, 3):
        node.expect(delivered(ident))
    node.say(rq(CLEAR, (ID, 4), REQUEST))
    node.expect(undelivered(4))  # queue and payload are forgotten
    consumer = room.consumer(queue)
    for number, payload in enumerate((b"x", b"x", b"y")):
        consumer.expect(to_consumer_noreply(queue, payload, number))


def test_nop_means_nothing(room: Room) -> None:
    queue, node = room.queue(), room.node()
    node.say(rq(NOP, CLEAR, NOP, (ID, 1), NOP, (QUEUE, queue), (PAYLOAD, b""), NOP, NOREPLY, NOP, REQUEST))
    node.expect(delivered(1))


UNKNOWN = {
    "no parameter": rq(2) + rq(3) + rq(63),
    "flag": rq(40),
    "1-byte integer": rq((70, 10)),
    "2-byte integer": rq((100, 0x0A0A)),
    "4-byte integer": rq((130, 0x0A0A0A0A)),
    "short string": rq((161, b"\x0a" * 10)),
    "string with a 2-byte length": rq((192, b"\x01\x0a" * 300)),
    "string with a 4-byte length": rq((225, b"\x01\x0a" * 200_000)),
    "empty string": rq((191, b""), (223, b""), (255, b"")),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_unknown_commands_are_skipped_by_their_width(room: Room, kind: str) -> None:
    queue, node, unknown = room.queue(), room.node(), UNKNOWN[kind]
    node.say(unknown, rq(CLEAR), unknown, rq((ID, 1), (QUEUE, queue)), unknown, rq((PAYLOAD, b"x")))
    node.say(unknown, rq(NOREPLY), unknown, rq(REQUEST), unknown)
    node.expect(delivered(1))
    read_so_far(node)
    consumer = room.consumer(queue)
    consumer.expect(to_consumer_noreply(queue, b"x"))


def test_unknown_commands_are_counted(room: Room) -> None:
    node = room.node()
    node.say(rq((77, 1)) * 6)
    node.leave()
    lines = [line for line in room.broker.log().splitlines() if "unknown command" in line]
    assert any("77" in line and "count=6" in line for line in lines), lines


# --- requests, replies, receipts ---------------------------------------------------------------------


def test_the_requester_hears_delivered_when_the_consumer_has_taken_it_and_then_the_reply(room: Room) -> None:
    queue, requester = room.queue(), room.node()
    requester.say(request(7, queue, b"question"))
    read_so_far(requester)
    consumer = room.consumer(queue)
    consumer.expect(to_consumer(queue, b"question"))
    assert requester.is_silent(0.1), "it is with the consumer, who has not said that it took it"
    consumer.say(delivered(0))
    requester.expect(delivered(7))
    assert requester.is_silent(0.05)
    consumer.say(reply(0, b"answer"))
    requester.expect(reply(7, b"answer"))


def test_a_reply_may_be_large(room: Room) -> None:
    queue, requester = room.queue(), room.node()
    consumer = room.consumer(queue)
    answer = b"x" * 3_000_000
    requester.say(request(0xFFFFFFFF, queue, b"question"))
    consumer.expect(to_consumer(queue, b"question"))
    consumer.say(delivered(0), reply(0, answer))
    requester.expect(delivered(0xFFFFFFFF) + reply(0xFFFFFFFF, answer))


NOTHING = b"\0"
"""What the original programs say where they have nothing to say; the frame begins with two CLEARs then."""


@pytest.mark.parametrize(
    "empty",
    [rq((PAYLOAD, b"")), b"", rq(CLEAR, CLEAR, (ID, 0), (PAYLOAD, NOTHING))],
    ids=["empty-payload", "no-payload", "nop"],
)
def test_no_requester_gets_an_empty_payload(room: Room, empty: bytes) -> None:
    """The original library stops on a PAYLOAD of no bytes, and sends an empty reply without one."""
    queue, requester = room.queue(), room.node()
    consumer = room.consumer(queue)
    requester.say(request(7, queue, b"question"))
    consumer.expect(to_consumer(queue, b"question"))
    consumer.say(delivered(0), rq(CLEAR, (ID, 0)), empty, rq(REPLY))
    requester.expect(delivered(7) + rq(CLEAR) + reply(7, NOTHING))
    # A NOP byte that is meant as one stays one.
    requester.say(request(8, queue, NOTHING))
    consumer.expect(to_consumer(queue, NOTHING))
    consumer.say(delivered(0), reply(0, NOTHING))
    requester.expect(delivered(8) + reply(8, NOTHING))


def test_no_consumer_gets_an_empty_payload(room: Room) -> None:
    queue, sender = room.queue(), room.node()
    consumer = room.consumer(queue)
    sender.say(notice(1, queue, b""))
    consumer.expect(rq(CLEAR) + to_consumer_noreply(queue, NOTHING))
    consumer.say(delivered(0))
    sender.say(broadcast(queue, b""))
    consumer.expect(rq(CLEAR) + broadcast(queue, NOTHING))
    php = room.wire("phpmq")
    php.say(b"H0100102P01%029d%bP02%029d" % (len(queue), queue, 0))
    consumer.expect(rq(CLEAR) + to_consumer_noreply(queue, NOTHING))


def test_a_repeated_consume_is_answered(room: Room) -> None:
    queue = room.queue()
    consumer = room.consumer(queue, 1)
    for _ in range(3):
        consumer.say(consume(queue, 2), consume(queue, 2))
        consumer.expect(consuming(queue) + consuming(queue))
    room.send(queue, b"a", b"b", b"c")
    consumer.expect(to_consumer_noreply(queue, b"a", 0) + to_consumer_noreply(queue, b"b", 1))
    assert consumer.is_silent(0.05), "the last MAX counts"


def test_noreply_is_confirmed_by_delivered_without_any_consumer(room: Room) -> None:
    queue, sender = room.queue(), room.node()
    sender.say(notice(1, queue, b"a"), notice(2, queue, b"b"))
    sender.expect(delivered(1) + delivered(2))
    consumer = room.consumer(queue)
    consumer.expect(to_consumer_noreply(queue, b"a", 0) + to_consumer_noreply(queue, b"b", 1))
    consumer.say(delivered(0), delivered(1))
    assert sender.is_silent(0.05), "the receipt comes once"


def test_for_noreply_the_consumers_delivered_is_the_settlement(room: Room) -> None:
    queue = room.queue()
    room.send(queue, b"a", b"b")
    consumer = room.consumer(queue)
    consumer.expect(to_consumer_noreply(queue, b"a", 0) + to_consumer_noreply(queue, b"b", 1))
    consumer.say(delivered(0))
    consumer.leave()
    again = room.consumer(queue)
    again.expect(to_consumer_noreply(queue, b"b"))
    again.say(delivered(0))
    again.leave()
    room.expect_empty(queue)


def test_for_a_request_delivered_does_not_settle(room: Room) -> None:
    queue, requester = room.queue(), room.node()
    requester.say(request(7, queue, b"question"))
    first = room.consumer(queue)
    first.expect(to_consumer(queue, b"question"))
    first.say(delivered(0))
    requester.expect(delivered(7))
    first.close()
    second = room.consumer(queue)
    second.expect(to_consumer(queue, b"question"))
    second.say(reply(0, b"answer"))
    requester.expect(reply(7, b"answer"))


def test_two_requesters_may_use_the_same_id(room: Room) -> None:
    queue, one, two = room.queue(), room.node(), room.node()
    consumer = room.consumer(queue)
    one.say(request(7, queue, b"one"))
    consumer.expect(to_consumer(queue, b"one", 0))
    two.say(request(7, queue, b"two"))
    consumer.expect(to_consumer(queue, b"two", 1))
    consumer.say(reply(1, b"TWO"), reply(0, b"ONE"))
    one.expect(delivered(7) + reply(7, b"ONE"))
    two.expect(delivered(7) + reply(7, b"TWO"))


def test_an_answer_to_what_is_not_out_is_ignored(room: Room) -> None:
    queue, requester = room.queue(), room.node()
    holder, other = room.consumer(queue, 1), room.consumer(queue, 1)
    requester.say(request(7, queue, b"question"))
    holder.expect(to_consumer(queue, b"question"))
    other.say(delivered(0), reply(0, b"not mine"), reply(99, b""), delivered(40_000), reply(0xFFFFFFFF, b""))
    read_so_far(other)
    holder.say(reply(0, b"answer"), reply(0, b"twice"))
    requester.expect(delivered(7) + reply(7, b"answer"))
    read_so_far(holder, requester)


@pytest.mark.parametrize("ending", ["fin", "rst"])
@pytest.mark.parametrize("retries", [0, 1, 2])
def test_undelivered_when_the_retries_are_used_up(room: Room, retries: int, ending: str) -> None:
    queue, requester = room.queue(), room.node()
    requester.say(request(7, queue, b"question", (RETRIES, retries)))
    for _ in range(retries + 1):
        read_so_far(requester)
        consumer = room.consumer(queue)
        consumer.expect(to_consumer(queue, b"question"))
        lose(room.broker, consumer, ending)
    requester.expect(undelivered(7))
    room.expect_empty(queue)


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_a_noreply_request_becomes_a_dead_letter_when_the_retries_are_used_up(
    room: Room, retries: int
) -> None:
    queue, sender = room.queue(), room.node()
    sender.say(notice(7, queue, b"job", (RETRIES, retries)))
    sender.expect(delivered(7))
    for _ in range(retries + 1):
        consumer = room.consumer(queue)
        consumer.expect(to_consumer_noreply(queue, b"job"))
        consumer.leave()
    room.expect_empty(queue)
    read_so_far(sender)  # it had its receipt and hears nothing more
    undertaker = room.consumer(queue + b".dead")
    undertaker.expect(to_consumer_noreply(queue + b".dead", b"job"))
    undertaker.say(delivered(0))
    undertaker.leave()
    last = room.consumer(queue + b".dead")
    assert last.is_silent(0.05)


def test_a_request_whose_retries_are_used_up_is_no_dead_letter(room: Room) -> None:
    queue, requester = room.queue(), room.node()
    requester.say(request(7, queue, b"question", (RETRIES, 0)))
    consumer = room.consumer(queue)
    consumer.expect(to_consumer(queue, b"question"))
    consumer.close()
    requester.expect(undelivered(7))
    undertaker = room.consumer(queue + b".dead")
    assert undertaker.is_silent(0.1)


@pytest.mark.parametrize("ending", ["fin", "rst"])
def test_without_retries_it_is_given_to_one_consumer_after_the_other(room: Room, ending: str) -> None:
    queue, requester = room.queue(), room.node()
    requester.say(request(7, queue, b"question"), notice(8, queue, b"job"))
    requester.expect(delivered(8))
    for _ in range(12):
        consumer = room.consumer(queue)
        consumer.expect(to_consumer(queue, b"question", 0) + to_consumer_noreply(queue, b"job", 1))
        lose(room.broker, consumer, ending)
    read_so_far(requester)
    consumer = room.consumer(queue)
    consumer.expect(to_consumer(queue, b"question", 0) + to_consumer_noreply(queue, b"job", 1))
    consumer.say(delivered(1), reply(0, b"at last"))
    requester.expect(delivered(7) + reply(7, b"at last"))


def test_a_lost_consumers_requests_go_to_one_who_is_there(room: Room) -> None:
    queue, requester = room.queue(), room.node()
    first = room.consumer(queue, 2, 30)
    second = room.consumer(queue, 9, 10)
    requester.say(request(1, queue, b"a"), request(2, queue, b"b"))
    first.expect(to_consumer(queue, b"a", 0) + to_consumer(queue, b"b", 1))
    first.say(reply(0, b"A"))
    requester.expect(delivered(1) + reply(1, b"A"))
    first.close()
    second.expect(to_consumer(queue, b"b", 0))
    second.say(reply(0, b"B"))
    requester.expect(delivered(2) + reply(2, b"B"))


def test_undelivered_on_timeout_and_the_request_is_withdrawn(room: Room) -> None:
    queue, requester = room.queue(), room.node()
    requester.say(request(7, queue, b"too late", (TIMEOUT, 1)))
    requester.expect(undelivered(7))
    room.expect_empty(queue)
    read_so_far(requester)


def test_a_timeout_while_a_consumer_works_and_the_late_answer_is_dropped(room: Room) -> None:
    queue, requester = room.queue(), room.node()
    requester.say(request(7, queue, b"question", (TIMEOUT, 1)), request(8, queue, b"next"))
    consumer = room.consumer(queue, 1)
    consumer.expect(to_consumer(queue, b"question", 0))
    consumer.say(delivered(0))
    requester.expect(delivered(7) + undelivered(7))
    consumer.say(reply(0, b"late"))
    consumer.expect(to_consumer(queue, b"next", 0))
    consumer.say(reply(0, b"in time"))
    requester.expect(delivered(8) + reply(8, b"in time"))
    consumer.leave()
    room.expect_empty(queue)


def test_a_request_that_timed_out_is_given_to_nobody_else(room: Room) -> None:
    queue, requester = room.queue(), room.node()
    requester.say(request(7, queue, b"question", (TIMEOUT, 1)))
    consumer = room.consumer(queue)
    consumer.expect(to_consumer(queue, b"question"))
    requester.expect(undelivered(7))
    consumer.leave()
    room.expect_empty(queue)
    read_so_far(requester)


def test_no_timeout_for_what_is_answered_in_time(room: Room) -> None:
    queue, requester = room.queue(), room.node()
    consumer = room.consumer(queue)
    requester.say(request(7, queue, b"quick", (TIMEOUT, 1)), request(8, queue, b"slow", (TIMEOUT, 1)))
    consumer.expect(to_consumer(queue, b"quick", 0) + to_consumer(queue, b"slow", 1))
    consumer.say(reply(0, b"here"))
    requester.expect(delivered(7) + reply(7, b"here"))
    requester.expect(undelivered(8))
    read_so_far(requester)  # and not another one for the first


@pytest.mark.parametrize("ending", ["fin", "rst"])
def test_when_the_requester_is_gone_its_waiting_requests_are_withdrawn_and_noreply_stays(
    room: Room, ending: str
) -> None:
    queue, requester = room.queue(), room.node()
    requester.say(request(1, queue, b"a"), notice(2, queue, b"kept"), request(3, queue, b"b"))
    requester.expect(delivered(2))
    lose(room.broker, requester, ending)
    consumer = room.consumer(queue)
    consumer.expect(to_consumer_noreply(queue, b"kept"))
    consumer.say(delivered(0))
    consumer.leave()
    room.expect_empty(queue)


@pytest.mark.parametrize("ending", ["fin", "rst"])
def test_an_answer_for_a_requester_that_is_gone_is_dropped(room: Room, ending: str) -> None:
    queue, requester = room.queue(), room.node()
    consumer = room.consumer(queue, 1)
    requester.say(request(7, queue, b"question"))
    consumer.expect(to_consumer(queue, b"question"))
    lose(room.broker, requester, ending)
    room.send(queue, b"next")
    assert consumer.is_silent(0.05), "it still works on the first one"
    consumer.say(delivered(0), reply(0, b"to nobody"))
    consumer.expect(to_consumer_noreply(queue, b"next", 0))
    consumer.say(delivered(0))
    consumer.leave()
    room.expect_empty(queue)


# --- what is missing or too much ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame",
    [
        rq(CLEAR, (ID, 7), (PAYLOAD, b"x"), REQUEST),
        rq(CLEAR, (ID, 7), (QUEUE, b"q"), REQUEST),
        rq(CLEAR, (ID, 7), REQUEST),
        rq(CLEAR, (ID, 7), (QUEUE, b""), (PAYLOAD, b"x"), REQUEST),
        rq(CLEAR, (ID, 7), (QUEUE, b"\xff"), (PAYLOAD, b"x"), REQUEST),
        rq(CLEAR, (ID, 7), (QUEUEID, 1), (PAYLOAD, b"x"), REQUEST),
        rq(CLEAR, (ID, 7), (QUEUEID, 0), (PAYLOAD, b"x"), NOREPLY, REQUEST),
        rq(CLEAR, (ID, 7), (QUEUEID, 65_535), (PAYLOAD, b"x"), REQUEST),
        rq(CLEAR, (ID, 7), (QUEUE, b"q.dead"), (PAYLOAD, b"x"), NOREPLY, REQUEST),
    ],
    ids=[
        "no queue",
        "no payload",
        "no queue and payload",
        "empty queue",
        "queue is no text",
        "QUEUEID never told",
        "QUEUEID 0",
        "QUEUEID 65535",
        "dead-letter door",
    ],
)
def test_a_request_that_cannot_be_is_answered_undelivered_and_the_connection_stays(
    room: Room, frame: bytes
) -> None:
    queue, node = room.queue(), room.node()
    node.say(frame)
    node.expect(undelivered(7))
    node.say(notice(8, queue, b"fine"))
    node.expect(delivered(8))


def test_a_request_without_an_id_cannot_be_answered(room: Room) -> None:
    queue, node = room.queue(), room.node()
    node.say(rq(CLEAR, (QUEUE, queue), (PAYLOAD, b"x"), REQUEST))
    node.say(rq(CLEAR, (QUEUE, queue), (PAYLOAD, b"x"), NOREPLY, REQUEST))
    read_so_far(node)
    room.expect_empty(queue)
    assert "REQUEST without ID" in room.broker.log()


@pytest.mark.parametrize(
    "frame",
    [
        rq(CLEAR, CONSUME),
        rq(CLEAR, CANCEL_QUEUE),
        rq(CLEAR, (QUEUE, b"q"), BROADCAST),
        rq(CLEAR, (PAYLOAD, b"x"), BROADCAST),
        rq(CLEAR, DELIVERED),
        rq(CLEAR, (PAYLOAD, b"x"), REPLY),
        rq(CLEAR, (ID, 1), REPLY),
        rq(CLEAR, UNDELIVERED),
        rq(CLEAR, (QUEUEID, 9), CONSUME),
        rq(CLEAR, (QUEUEID, 9), CANCEL_QUEUE),
        rq(CLEAR, (QUEUEID, 9), (PAYLOAD, b"x"), BROADCAST),
    ],
)
def test_other_commands_that_lack_something_are_ignored(room: Room, frame: bytes) -> None:
    node = room.node()
    node.say(frame)
    read_so_far(node)


@pytest.mark.parametrize(
    "too_long",
    [
        rq(CLEAR, (ID, 9), (QUEUE, b"q")) + bytes([PAYLOAD]) + (PAYLOAD_BYTES_MAX + 1).to_bytes(4, "big"),
        bytes([PAYLOAD]) + b"\xff\xff\xff\xff",
        bytes([230]) + b"\xff\xff\xff\xff",
    ],
    ids=["payload", "longest payload", "unknown command"],
)
def test_a_length_over_the_limit_closes_that_connection(room: Room, too_long: bytes) -> None:
    queue, bad, other = room.queue(), room.node(), room.node()
    bad.say(consume(queue, 1))
    bad.expect(consuming(queue))
    other.say(request(7, queue, b"question"))
    bad.expect(to_consumer(queue, b"question"))
    bad.say(notice(8, queue, b"said before it"), too_long)
    assert bad.hear(7) in (b"", delivered(8))  # the receipt may have been on its way
    assert bad.is_closed()
    consumer = room.consumer(queue)
    consumer.expect(to_consumer(queue, b"question", 0) + to_consumer_noreply(queue, b"said before it", 1))
    consumer.say(reply(0, b"answer"))
    other.expect(delivered(7) + reply(7, b"answer"))


def test_what_was_answered_before_a_length_over_the_limit_is_said(room: Room) -> None:
    node = room.node()
    node.say(rq(PING), rq(CLEAR, (ID, 3), REQUEST), bytes([PAYLOAD]) + b"\xff\xff\xff\xff")
    node.expect(rq(PONG) + undelivered(3))
    assert node.is_closed()


def test_a_payload_of_megabytes_comes_through_whole(room: Room) -> None:
    queue, node = room.queue(), room.node()
    payload = bytes(range(256)) * 20_000
    node.say(notice(1, queue, payload))
    node.expect(delivered(1))
    consumer = room.consumer(queue)
    consumer.expect(to_consumer_noreply(queue, payload))


# --- consumers ---------------------------------------------------------------------------------------


def test_max_bounds_what_a_consumer_holds(room: Room) -> None:
    queue = room.queue()
    room.send(queue, b"1", b"2", b"3", b"4")
    consumer = room.consumer(queue, 2)
    consumer.expect(to_consumer_noreply(queue, b"1", 0) + to_consumer_noreply(queue, b"2", 1))
    assert consumer.is_silent(0.1)
    consumer.say(delivered(1))
    consumer.expect(to_consumer_noreply(queue, b"3", 1))
    assert consumer.is_silent(0.05)


def test_max_counts_a_request_until_its_reply(room: Room) -> None:
    queue, requester = room.queue(), room.node()
    consumer = room.consumer(queue, 1)
    requester.say(request(1, queue, b"a"), request(2, queue, b"b"))
    consumer.expect(to_consumer(queue, b"a"))
    consumer.say(delivered(0))
    requester.expect(delivered(1))
    assert consumer.is_silent(0.1)
    consumer.say(reply(0, b"A"))
    consumer.expect(to_consumer(queue, b"b"))


def test_max_0_means_no_bound(room: Room) -> None:
    queue = room.queue()
    room.send(queue, *[b"x"] * 2000)
    consumer = room.consumer(queue, 0)
    for number in range(2000):
        consumer.expect(to_consumer_noreply(queue, b"x", number))


def test_delivery_ids_start_at_0_count_up_and_are_used_again(room: Room) -> None:
    queue, other_queue = room.queue(), room.queue()
    consumer = room.consumer(queue, 0)
    consumer.say(consume(other_queue, 0))
    consumer.expect(consuming(other_queue, 2))
    room.send(queue, b"a", b"b")
    consumer.expect(to_consumer_noreply(queue, b"a", 0) + to_consumer_noreply(queue, b"b", 1))
    room.send(other_queue, b"c")
    consumer.expect(to_consumer_noreply(other_queue, b"c", 2))
    consumer.say(delivered(1))
    room.send(queue, b"d", b"e")
    consumer.expect(to_consumer_noreply(queue, b"d", 1) + to_consumer_noreply(queue, b"e", 3))
    another = room.consumer(room.queue())
    read_so_far(another)
    last = room.queue()
    another.say(consume(last))
    another.expect(consuming(last, 2))
    room.send(last, b"f")
    another.expect(to_consumer_noreply(last, b"f", 0))  # ids are per connection


def test_delivery_ids_stay_below_32768(room: Room) -> None:
    queue = room.queue()
    room.send(queue, *[b"x"] * (DELIVERY_IDS_END + 2))
    consumer = room.consumer(queue, 0)
    frame_bytes = len(to_consumer_noreply(queue, b"x"))
    heard = consumer.hear(frame_bytes * DELIVERY_IDS_END)
    assert heard[:frame_bytes] == to_consumer_noreply(queue, b"x", 0)
    assert heard[-frame_bytes:] == to_consumer_noreply(queue, b"x", DELIVERY_IDS_END - 1)
    assert consumer.is_silent(0.1), "there is no id left"
    consumer.say(delivered(17))
    consumer.expect(to_consumer_noreply(queue, b"x", 17))
    consumer.say(delivered(DELIVERY_IDS_END - 1))
    consumer.expect(to_consumer_noreply(queue, b"x", DELIVERY_IDS_END - 1))


def test_the_highest_priority_that_has_room_is_served_first(room: Room) -> None:
    queue, sender = room.queue(), room.node()
    low, high, normal = (room.consumer(queue, 1, priority) for priority in (10, 30, 20))
    for number, consumer in enumerate((high, normal, low)):
        sender.say(notice(number, queue, b"%d" % number))
        sender.expect(delivered(number))
        consumer.expect(to_consumer_noreply(queue, b"%d" % number))
    sender.say(notice(9, queue, b"waits"))
    sender.expect(delivered(9))
    read_so_far(low, normal, high)
    high.say(delivered(0))
    high.expect(to_consumer_noreply(queue, b"waits"))


def test_equal_priorities_take_turns(room: Room) -> None:
    queue, sender = room.queue(), room.node()
    consumers = [room.consumer(queue, 0) for _ in range(3)]
    lower = room.consumer(queue, 0, 10)
    for number in range(9):
        sender.say(notice(number, queue, b"%d" % number))
        sender.expect(delivered(number))
        consumers[number % 3].expect(to_consumer_noreply(queue, b"%d" % number, number // 3))
    read_so_far(*consumers, lower)


def test_priority_0_gets_broadcasts_only(room: Room) -> None:
    queue, sender = room.queue(), room.node()
    listener = room.consumer(queue, 0, 0)
    sender.say(notice(1, queue, b"work"))
    sender.expect(delivered(1))
    read_so_far(listener)
    sender.say(broadcast(queue, b"news"))
    listener.expect(broadcast(queue, b"news"))
    worker = room.consumer(queue, 0, 1)
    worker.expect(to_consumer_noreply(queue, b"work"))
    read_so_far(listener)


@pytest.mark.parametrize("flags", [(), (EXCLUSIVE,)], ids=["shared", "exclusive"])
def test_whoever_comes_after_an_exclusive_consumer_waits_unanswered(
    room: Room, flags: tuple[int, ...]
) -> None:
    queue = room.queue()
    holder = room.consumer(queue, 1, 20, EXCLUSIVE)
    waiting = room.node()
    waiting.say(consume(queue, 9, 30, *flags))
    read_so_far(waiting)
    room.send(queue, b"1", b"2")
    holder.expect(to_consumer_noreply(queue, b"1"))
    read_so_far(waiting)  # it has room and a higher priority, but it is not its turn
    holder.leave()
    waiting.expect(consuming(queue))
    waiting.expect(to_consumer_noreply(queue, b"1", 0) + to_consumer_noreply(queue, b"2", 1))


def test_the_line_behind_an_exclusive_consumer_moves_up_in_its_order(room: Room) -> None:
    queue = room.queue()
    holder = room.consumer(queue, 0, 20, EXCLUSIVE)
    shared, another, exclusive, last = (room.node() for _ in range(4))
    for node, flags in ((shared, ()), (another, ()), (exclusive, (EXCLUSIVE,)), (last, ())):
        node.say(consume(queue, 0, 20, *flags))
        read_so_far(node)
    holder.leave()
    shared.expect(consuming(queue))
    another.expect(consuming(queue))
    read_so_far(exclusive, last)
    shared.leave()
    read_so_far(exclusive, last)
    another.say(rq(CLEAR, (QUEUEID, 1), CANCEL_QUEUE))
    exclusive.expect(consuming(queue))
    read_so_far(last)
    exclusive.leave()
    last.expect(consuming(queue))


def test_an_exclusive_consumer_that_asks_while_shared_ones_are_there_waits(room: Room) -> None:
    queue = room.queue()
    one, two = room.consumer(queue), room.consumer(queue)
    exclusive = room.node()
    exclusive.say(consume(queue, 0, 20, EXCLUSIVE))
    read_so_far(exclusive)
    one.leave()
    read_so_far(exclusive)
    room.send(queue, b"1")
    two.expect(to_consumer_noreply(queue, b"1"))
    two.leave()
    exclusive.expect(consuming(queue))
    exclusive.expect(to_consumer_noreply(queue, b"1"))


def test_one_that_leaves_while_it_waits_for_its_turn_is_passed_over(room: Room) -> None:
    queue = room.queue()
    holder = room.consumer(queue, 0, 20, EXCLUSIVE)
    impatient, patient = room.node(), room.node()
    impatient.say(consume(queue, 0, 20, EXCLUSIVE))
    read_so_far(impatient)
    patient.say(consume(queue))
    read_so_far(patient)
    impatient.leave()
    holder.leave()
    patient.expect(consuming(queue))


@pytest.mark.parametrize("by", ["name", "id"])
def test_cancel_ends_consumption_and_what_is_held_may_still_be_answered(room: Room, by: str) -> None:
    queue, requester = room.queue(), room.node()
    consumer = room.consumer(queue, 0, 30)
    other = room.consumer(queue, 0, 10)
    requester.say(request(1, queue, b"a"))
    consumer.expect(to_consumer(queue, b"a"))
    consumer.say(rq(CLEAR, (QUEUE, queue) if by == "name" else (QUEUEID, 1), CANCEL_QUEUE))
    read_so_far(consumer)
    requester.say(request(2, queue, b"b"))
    other.expect(to_consumer(queue, b"b"))
    consumer.say(delivered(0), reply(0, b"A"))
    requester.expect(delivered(1) + reply(1, b"A"))
    read_so_far(consumer, other)


def test_a_cancelled_consumer_that_is_lost_gives_back_what_it_held(room: Room) -> None:
    queue = room.queue()
    room.send(queue, b"a")
    consumer = room.consumer(queue)
    consumer.expect(to_consumer_noreply(queue, b"a"))
    consumer.say(rq(CLEAR, (QUEUE, queue), CANCEL_QUEUE))
    consumer.close()
    other = room.consumer(queue)
    other.expect(to_consumer_noreply(queue, b"a"))


def test_a_cancelled_queue_can_be_consumed_again(room: Room) -> None:
    queue = room.queue()
    consumer = room.consumer(queue)
    consumer.say(rq(CLEAR, (QUEUE, queue), CANCEL_QUEUE), consume(queue, 1))
    consumer.expect(consuming(queue))  # under the same id
    room.send(queue, b"a")
    consumer.expect(to_consumer_noreply(queue, b"a"))


def test_a_queue_id_is_valid_on_the_connection_that_was_told_it(room: Room) -> None:
    one, two, stranger = room.queue(), room.queue(), room.node()
    consumer = room.consumer(one)
    consumer.say(consume(two))
    consumer.expect(consuming(two, 2))
    consumer.say(rq(CLEAR, (ID, 1), (QUEUEID, 2), (PAYLOAD, b"by id"), NOREPLY, REQUEST))
    heard = consumer.hear(len(delivered(1)) + len(to_consumer_noreply(two, b"by id")))
    assert heard in (
        delivered(1) + to_consumer_noreply(two, b"by id"),
        to_consumer_noreply(two, b"by id") + delivered(1),
    ), "named by QUEUE to the consumer, not by QUEUEID"
    consumer.say(rq(CLEAR, (QUEUEID, 1), (PAYLOAD, b"news"), BROADCAST))
    consumer.expect(broadcast(one, b"news"))
    stranger.say(rq(CLEAR, (ID, 1), (QUEUEID, 1), (PAYLOAD, b"x"), NOREPLY, REQUEST))
    stranger.expect(undelivered(1))
    other = room.consumer(two)  # where id 1 is another queue
    other.say(rq(CLEAR, (QUEUEID, 1), (PAYLOAD, b"from the other"), BROADCAST))
    other.expect(broadcast(two, b"from the other"))
    consumer.expect(broadcast(two, b"from the other"))


# --- broadcasts --------------------------------------------------------------------------------------


def test_a_broadcast_goes_to_every_consumer_present_idle_or_busy(room: Room) -> None:
    queue, sender = room.queue(), room.node()
    room.send(queue, b"work", b"more")
    busy = room.consumer(queue, 1)
    busy.expect(to_consumer_noreply(queue, b"work"))
    also_busy = room.consumer(queue, 1)
    also_busy.expect(to_consumer_noreply(queue, b"more"))
    idle, low, elsewhere = room.consumer(queue), room.consumer(queue, 9, 1), room.consumer(room.queue())
    sender.say(broadcast(queue, b"news"))
    for consumer in (busy, also_busy, idle, low):
        consumer.expect(broadcast(queue, b"news"))
    read_so_far(busy, also_busy, idle, low, elsewhere, sender)


def test_a_broadcast_is_not_stored_and_its_id_is_ignored(room: Room) -> None:
    queue, sender = room.queue(), room.node()
    sender.say(broadcast(queue, b"nobody is there"))
    read_so_far(sender)
    consumer = room.consumer(queue)
    sender.say(rq(CLEAR, (ID, 5), (QUEUE, queue), (PAYLOAD, b"news"), BROADCAST))
    consumer.expect(rq(CLEAR, (QUEUE, queue), (PAYLOAD, b"news"), BROADCAST))
    consumer.say(delivered(0), delivered(5))
    read_so_far(sender, consumer)  # it is not confirmed
    consumer.leave()
    late = room.consumer(queue)
    assert late.is_silent(0.05)
    late.leave()
    room.expect_empty(queue)


def test_a_broadcast_does_not_reach_those_who_wait_for_their_turn_or_have_cancelled(room: Room) -> None:
    queue, sender = room.queue(), room.node()
    gone = room.consumer(queue)
    gone.say(rq(CLEAR, (QUEUE, queue), CANCEL_QUEUE))
    read_so_far(gone)
    holder = room.consumer(queue, 0, 20, EXCLUSIVE)
    waiting = room.node()
    waiting.say(consume(queue))
    read_so_far(waiting)
    sender.say(broadcast(queue, b"news"))
    holder.expect(broadcast(queue, b"news"))
    read_so_far(waiting, gone)


# --- ping, closing, full -----------------------------------------------------------------------------


def test_every_ping_is_answered(room: Room) -> None:
    node = room.node()
    node.say(rq(PING))
    node.expect(b"\x06")
    node.say(rq(PING) * 100)
    node.expect(b"\x06" * 100)
    node.say(rq(PONG), rq(PING))
    node.expect(b"\x06")


class QuickBroker(BrokerProcess):
    """The broker with another idea of silence; see the module's docstring."""

    SCRIPT = """
import functools, sys
from penstock.protocols import rq_controller
rq_controller.ControllerSession = functools.partial(rq_controller.ControllerSession, silence_us=500_000)
from penstock.cli.main import main
sys.exit(main())
"""

    def command(self) -> list[str]:
        interpreter, _, _, *rest = super().command()
        return [interpreter, "-c", self.SCRIPT, *rest]


def test_the_silence_of_the_protocol_is_15_seconds() -> None:
    assert SILENCE_US == 15_000_000


def expect_besides_pings(node: Wire, expected: bytes) -> None:
    """No frame begins with the byte of a PING; each PING is answered."""
    first = node.hear(1)
    for _ in range(5):  # about as many seconds
        if first != rq(PING):
            break
        node.say(rq(PONG))
        first = node.hear(1)
    heard = first + node.hear(len(expected) - 1)
    assert heard == expected, f"heard {heard.hex(' ')}, expected {expected.hex(' ')}"


def test_a_silent_node_is_pinged_then_idle_and_gets_no_work_until_it_is_heard_again(tmp_path: Path) -> None:
    broker = QuickBroker(tmp_path).start()
    room, queue = Room(broker), b"q"
    silent, answering, lively = (room.consumer(queue, 0, priority) for priority in (30, 20, 10))

    def is_pinged() -> bool:
        lively.say(rq(NOP))  # any byte is a sign of life: this one is never pinged
        return not silent.is_silent(0.001)

    until(is_pinged, "the PING")
    silent.expect(b"\x05")  # and it does not answer
    answering.expect(b"\x05")
    answering.say(b"\x06")

    def is_idle() -> bool:
        lively.say(rq(NOP))
        if not answering.is_silent(0.001):
            answering.expect(rq(PING))
            answering.say(rq(PONG))
        return "does not answer pings" in broker.log()

    until(is_idle, "the idle mark")
    answering.say(rq(PING))
    expect_besides_pings(answering, rq(PONG))
    read_so_far(lively)
    room.send(queue, b"1")
    expect_besides_pings(answering, to_consumer_noreply(queue, b"1"))
    lively.say(broadcast(queue, b"news"))
    lively.expect(broadcast(queue, b"news"))
    silent.expect(broadcast(queue, b"news"))  # a broadcast asks nobody; and there was no work before it
    read_so_far(silent)  # the connection stays, and it is heard
    room.send(queue, b"2")
    expect_besides_pings(silent, to_consumer_noreply(queue, b"2"))
    room.close()
    assert broker.stop() == 0
    assert "Traceback" not in broker.log()


def test_an_idle_node_keeps_what_it_holds(tmp_path: Path) -> None:
    broker = QuickBroker(tmp_path).start()
    room, queue = Room(broker), b"q"
    silent = room.consumer(queue, 1, 30)
    requester = room.node()
    requester.say(request(7, queue, b"long work"))
    silent.expect(to_consumer(queue, b"long work"))

    def idle() -> bool:
        requester.say(rq(NOP))
        return "does not answer pings" in broker.log()

    until(idle, "the idle mark")
    silent.say(reply(0, b"done"))
    requester.expect(delivered(7) + reply(7, b"done"))
    room.close()
    assert broker.stop() == 0


def test_a_node_that_says_closing_gets_no_new_work_and_is_closed_when_it_has_finished(room: Room) -> None:
    queue, requester = room.queue(), room.node()
    leaving = room.consumer(queue, 0, 30)
    staying = room.consumer(queue, 0, 10)
    requester.say(request(1, queue, b"a"), notice(2, queue, b"b"))
    leaving.expect(to_consumer(queue, b"a", 0) + to_consumer_noreply(queue, b"b", 1))
    requester.expect(delivered(2))
    leaving.say(rq(CLEAR, CLOSING))
    read_so_far(leaving)
    requester.say(request(3, queue, b"c"))
    staying.expect(to_consumer(queue, b"c"))
    leaving.say(delivered(1), delivered(0))
    requester.expect(delivered(1))
    leaving.say(reply(0, b"A"))
    requester.expect(reply(1, b"A"))
    assert leaving.is_closed()


def test_a_requester_that_says_closing_gets_its_answers_first(room: Room) -> None:
    queue, requester = room.queue(), room.node()
    consumer = room.consumer(queue)
    requester.say(request(1, queue, b"a"), rq(CLEAR, CLOSING), request(2, queue, b"too late"))
    requester.expect(undelivered(2))
    consumer.expect(to_consumer(queue, b"a"))
    consumer.say(delivered(0), reply(0, b"A"))
    requester.expect(delivered(1) + reply(1, b"A"))
    assert requester.is_closed()
    read_so_far(consumer)


def test_a_notice_before_closing_gets_its_receipt(room: Room) -> None:
    queue, sender = room.queue(), room.node()
    sender.say(notice(1, queue, b"last words"), rq(CLEAR, CLOSING))
    sender.expect(delivered(1))
    assert sender.is_closed()


def test_a_node_with_nothing_pending_is_closed_at_once(room: Room) -> None:
    node = room.consumer(room.queue())
    node.say(rq(CLEAR, CLOSING))
    assert node.is_closed()


def test_on_shutdown_closing_is_said_and_what_is_in_flight_is_finished(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, "--drain-seconds", "60").start()
    room, queue = Room(broker), b"q"
    consumer, requester, idle = room.consumer(queue, 2), room.node(), room.node()
    requester.say(request(1, queue, b"a"), request(2, queue, b"b"), request(3, queue, b"never given out"))
    consumer.expect(to_consumer(queue, b"a", 0) + to_consumer(queue, b"b", 1))
    broker.signal(signal.SIGTERM)
    for node in (consumer, requester, idle):
        node.expect(bytes.fromhex("01 16"))
    assert idle.is_closed()
    requester.say(request(4, queue, b"too late"))
    requester.expect(undelivered(4))
    consumer.say(delivered(0), reply(0, b"A"))
    requester.expect(delivered(1) + reply(1, b"A"))
    consumer.say(reply(1, b"B"))
    requester.expect(delivered(2) + reply(2, b"B") + undelivered(3))
    assert consumer.is_closed()
    assert requester.is_closed()
    assert broker.wait() == 0
    room.close()


def test_server_full_is_said_and_the_connection_closed(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, "--limits-connections-max", "1").start()
    room = Room(broker)
    first = room.node()
    read_so_far(first)
    second = room.node()
    second.expect(bytes.fromhex("17"))
    assert second.is_closed()
    read_so_far(first)
    room.close()
    assert broker.stop() == 0


# --- dead letters ------------------------------------------------------------------------------------


def test_dead_letters_are_consumed_under_the_name_with_dead(room: Room) -> None:
    queue, judge = room.queue(), room.wire("phpmq")
    room.send(queue, b"1", b"2")
    judge.say(phpmq(2, (1, queue), (4, b"2")))
    for payload in (b"1", b"2"):
        judge.say(phpmq(6, (1, queue), (3, expect_dispatch(judge, queue, payload))))
    judge.leave()
    dead = queue + b".dead"
    first = room.consumer(dead, 1)
    first.expect(to_consumer_noreply(dead, b"1"))
    first.leave()  # goes behind the other one
    second = room.consumer(dead, 2)
    second.expect(to_consumer_noreply(dead, b"2", 0) + to_consumer_noreply(dead, b"1", 1))
    second.say(delivered(0), delivered(1))
    second.leave()
    last = room.consumer(dead)
    assert last.is_silent(0.05)
    room.expect_empty(queue)


@pytest.mark.parametrize(
    "stream", [b"GET / HTTP/1.1\r\n\r\n", sspq(SEND, b"x"), phpmq(2, (1, b"q"), (4, b"1"))]
)
def test_who_speaks_another_protocol_is_sent_away_however_its_first_bytes_come(
    room: Room, stream: bytes
) -> None:
    """As RQ these are commands that nobody knows, which are skipped: everybody would wait for ever."""
    for cut in range(4):
        stranger = room.node()
        stranger.say(stream[:cut])
        read_so_far(room.node())  # what was said before that has been read too
        stranger.say(stream[cut:])
        assert stranger.is_closed()
