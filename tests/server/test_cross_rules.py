"""One broker, three front doors: what holds whichever door a message came and goes through, in bytes.

Every test has a queue of its own, with an SSPQ listener for it. `put` returns when the broker has the
message, and `Held.lose` when it has noticed, so that nothing here depends on time.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path

import pytest

from penstock.log.log import open_log
from penstock.model.life import Event
from tests.server.harness import (
    CONFIRM,
    DEAD_RECEIVE,
    RECEIVE,
    SEND,
    BrokerProcess,
    Wire,
    expect_dispatch,
    phpmq,
    rq,
    sspq,
)

DOORS = ("sspq", "phpmq", "rq")
QUEUES = 120
TWO_DELIVERIES = 4  # this many of the queues have max-deliveries = 2
ENDLESS = 255


@dataclass
class Held:
    """A message at a consumer that has not settled it."""

    wire: Wire
    settlement: bytes
    no_more: bytes = b""  # where a settlement would bring the next message

    def settle(self) -> None:
        self.wire.say(self.no_more, self.settlement)
        self.wire.leave()

    def reject(self) -> None:
        """PHPMQ only."""
        self.wire.say(self.no_more, self.settlement.replace(b"H0100402", b"H0100602"))
        self.wire.leave()

    def lose(self) -> None:
        self.wire.leave()


class Queue:
    """A queue, seen through every door."""

    def __init__(self, broker: BrokerProcess, name: bytes, sspq_port: int) -> None:
        self.broker = broker
        self.name = name
        self._sspq_port = sspq_port
        self._wires: list[Wire] = []

    def wire(self, door: str) -> Wire:
        port = self._sspq_port if door == "sspq" else self.broker.ports[door]
        wire = Wire(("127.0.0.1", port))
        self._wires.append(wire)
        return wire

    def close(self) -> None:
        for wire in self._wires:
            wire.close()

    def put(self, door: str, payload: bytes, *, retries: int | None = None, ttl: bytes | None = None) -> None:
        """A message that the broker has, when this returns."""
        wire = self.wire(door)
        if door == "sspq":
            wire.say(sspq(SEND, payload, ENDLESS if retries is None else retries))
        elif door == "phpmq":
            assert retries is None, "PHPMQ has no retry counter"
            wire.say(phpmq(1, (1, self.name), (2, payload), *([(5, ttl)] if ttl is not None else [])))
        else:
            counter = [] if retries is None else [(65, retries)]
            wire.say(rq(1, (128, 7), (160, self.name), *counter, (224, payload), 33, 10))
            wire.expect(rq(1, (128, 7), 13))
        wire.leave()

    def ask(self, wire: Wire, door: str, *, dead: bool = False) -> None:
        """Ask for one message."""
        name = self.name + (b".dead" if dead else b"")
        if door == "sspq":
            wire.say(sspq(DEAD_RECEIVE if dead else RECEIVE))
        elif door == "phpmq":
            wire.say(phpmq(2, (1, name), (4, b"1")))
        else:
            wire.say(rq(1, (160, name), (98, 1), (64, 20), 20))
            wire.expect(rq(1, (96, 1), (160, name), 24))

    def hear(
        self,
        wire: Wire,
        door: str,
        payload: bytes,
        *,
        dead: bool = False,
        left: int = ENDLESS,
        ttl: bytes | None = None,
    ) -> Held:
        """The one message that was asked for; `left` are the retries that SSPQ shows, `ttl` is PHPMQ's."""
        name = self.name + (b".dead" if dead else b"")
        if door == "sspq":
            wire.expect(sspq(SEND, payload, left))
            return Held(wire, sspq(CONFIRM))
        if door == "phpmq":
            message_id = expect_dispatch(wire, name, payload, ttl)
            return Held(wire, phpmq(4, (1, name), (3, message_id)), phpmq(2, (1, name), (4, b"0")))
        if not payload:
            wire.expect(rq(1))  # Two CLEARs, and a NOP byte: no RQ peer gets an empty PAYLOAD.
        wire.expect(rq(1, (160, name), (224, payload or b"\0"), 33, (128, 0), 10))
        return Held(wire, rq(1, (128, 0), 13), rq(1, (160, name), 21))

    def take(
        self,
        door: str,
        payload: bytes,
        *,
        dead: bool = False,
        left: int = ENDLESS,
        ttl: bytes | None = None,
    ) -> Held:
        wire = self.wire(door)
        self.ask(wire, door, dead=dead)
        return self.hear(wire, door, payload, dead=dead, left=left, ttl=ttl)

    def kill(self, *payloads: bytes) -> None:
        """Messages that are dead letters, when this returns."""
        for payload in payloads:
            self.put("phpmq", payload)
            self.take("phpmq", payload).reject()

    def expect_empty(self) -> None:
        """What is sent now is what comes next, and what dies now is the first dead letter."""
        self.kill(b"sentinel")
        self.take("phpmq", b"sentinel", dead=True).settle()


class Queues:
    """Queues that no test has used yet."""

    def __init__(self, broker: BrokerProcess, names: list[str]) -> None:
        self._ports = dict(zip(["default", *names], broker.ports_of("sspq"), strict=True))
        self._broker = broker
        self._numbers = {"plain": count(), "two": count()}

    def next(self, kind: str) -> Queue:
        name = f"{kind}.{next(self._numbers[kind])}"
        return Queue(self._broker, name.encode(), self._ports[name])


@pytest.fixture(scope="module")
def queues(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Queues]:
    folder = tmp_path_factory.mktemp("cross")
    names = [f"plain.{n}" for n in range(QUEUES)] + [f"two.{n}" for n in range(TWO_DELIVERIES)]
    listener = '[[listener]]\nprotocol = "sspq"\naddress = "127.0.0.1:0"\nqueue = "{}"\n'
    config = folder / "penstock.toml"
    config.write_text('[queue."two.*"]\nmax-deliveries = 2\n' + "".join(map(listener.format, names)))
    broker = BrokerProcess(folder, "--config", str(config)).start()
    yield Queues(broker, names)
    assert broker.stop() == 0
    assert "Traceback" not in broker.log(), broker.log()


@pytest.fixture
def queue(queues: Queues) -> Iterator[Queue]:
    queue = queues.next("plain")
    yield queue
    queue.close()


@pytest.fixture
def queue_of_two_deliveries(queues: Queues) -> Iterator[Queue]:
    queue = queues.next("two")
    yield queue
    queue.close()


# --- a queue is a queue ------------------------------------------------------------------------------


@pytest.mark.parametrize(("sender", "consumer"), list(product(DOORS, DOORS)))
def test_sent_by_one_door_and_consumed_by_any(queue: Queue, sender: str, consumer: str) -> None:
    payload = bytes(range(256)) + b"\x55\x99H0100102P01\n"
    queue.put(sender, payload)
    queue.put(sender, b"")
    queue.take(consumer, payload).settle()
    queue.take(consumer, b"").settle()
    queue.expect_empty()


@pytest.mark.parametrize("consumer", DOORS)
def test_order_holds_across_doors(queue: Queue, consumer: str) -> None:
    doors = [*DOORS, *reversed(DOORS), "phpmq", "rq", "sspq"]
    for number, door in enumerate(doors):
        queue.put(door, b"%d" % number)
    for number in range(len(doors)):
        queue.take(consumer, b"%d" % number).settle()
    queue.expect_empty()


def test_consumers_of_all_doors_share_a_queue(queue: Queue) -> None:
    wires = {door: queue.wire(door) for door in DOORS}
    for number, door in enumerate(DOORS):
        queue.ask(wires[door], door)
        queue.put("phpmq", b"%d" % number)
        queue.hear(wires[door], door, b"%d" % number)  # the others have no room


def test_an_exclusive_consumer_keeps_the_others_waiting_whatever_their_door(queue: Queue) -> None:
    holder, sspq_wire, phpmq_wire = queue.wire("rq"), queue.wire("sspq"), queue.wire("phpmq")
    holder.say(rq(1, (160, queue.name), (98, 1), (64, 20), 32, 20))
    holder.expect(rq(1, (96, 1), (160, queue.name), 24))
    for payload in (b"1", b"2", b"3"):
        queue.put("phpmq", payload)
    holder.expect(rq(1, (160, queue.name), (224, b"1"), 33, (128, 0), 10))
    queue.ask(sspq_wire, "sspq")
    assert sspq_wire.is_silent(0.05)
    queue.ask(phpmq_wire, "phpmq")
    assert phpmq_wire.is_silent(0.05)
    holder.say(rq(1, (128, 0), 13))
    holder.expect(rq(1, (160, queue.name), (224, b"2"), 33, (128, 0), 10))
    holder.say(rq(1, (128, 0), 13), rq(1, (160, queue.name), 21))
    sspq_wire.expect(sspq(SEND, b"3", ENDLESS))  # it has waited longest
    queue.put("phpmq", b"4")
    queue.hear(phpmq_wire, "phpmq", b"4")


def test_a_broadcast_is_for_rq_consumers_only(queue: Queue) -> None:
    wires = {door: queue.wire(door) for door in DOORS}
    for door in DOORS:
        queue.ask(wires[door], door)
    speaker = queue.wire("rq")
    speaker.say(rq(1, (160, queue.name), (224, b"news"), 14))
    wires["rq"].expect(rq(1, (160, queue.name), (224, b"news"), 14))
    assert wires["sspq"].is_silent(0.05)
    assert wires["phpmq"].is_silent(0.05)


# --- requests ----------------------------------------------------------------------------------------


def ask_question(queue: Queue, ident: int = 7, *attributes: tuple[int, int]) -> Wire:
    requester = queue.wire("rq")
    requester.say(rq(1, (128, ident), (160, queue.name), *attributes, (224, b"question"), 10))
    return requester


@pytest.mark.parametrize("consumer", ["sspq", "phpmq"])
def test_a_request_consumed_by_a_door_without_answers_gets_an_empty_reply(
    queue: Queue, consumer: str
) -> None:
    requester = ask_question(queue)
    held = queue.take(consumer, b"question")
    requester.expect(rq(1, (128, 7), 13))  # it has been taken
    assert requester.is_silent(0.05), "the reply comes when it is settled"
    held.settle()
    requester.expect(bytes.fromhex("01 01 80 00000007 e0 00000001 00 0b"))
    queue.expect_empty()


def test_several_requests_settled_at_once_are_each_answered(queue: Queue) -> None:
    requester = queue.wire("rq")
    requester.say(*[rq(1, (128, i), (160, queue.name), (224, b"%d" % i), 10) for i in range(3)])
    worker = queue.wire("phpmq")
    worker.say(phpmq(2, (1, queue.name), (4, b"9")))
    ids = [expect_dispatch(worker, queue.name, b"%d" % i) for i in range(3)]
    worker.say(*[phpmq(4, (1, queue.name), (3, message_id)) for message_id in ids])
    heard = requester.hear(3 * 7 + 3 * 14)
    for i in range(3):
        taken, answered = rq(1, (128, i), 13), rq(1, 1, (128, i), (224, b"\0"), 11)
        assert 0 <= heard.find(taken) < heard.find(answered), heard.hex(" ")


@pytest.mark.parametrize("consumer", ["sspq", "phpmq"])
def test_a_request_lost_by_a_door_without_answers_can_be_answered_by_another(
    queue: Queue, consumer: str
) -> None:
    requester = ask_question(queue)
    held = queue.take(consumer, b"question")
    requester.expect(rq(1, (128, 7), 13))
    held.lose()
    worker = queue.wire("rq")
    queue.ask(worker, "rq")
    worker.expect(rq(1, (160, queue.name), (224, b"question"), (128, 0), 10))
    worker.say(rq(1, (128, 0), (224, b"answer"), 11))
    requester.expect(rq(1, (128, 7), (224, b"answer"), 11))


@pytest.mark.parametrize(("first", "second"), list(product(("sspq", "phpmq"), repeat=2)))
def test_a_request_whose_retries_are_used_up_at_other_doors_is_undelivered(
    queue: Queue, first: str, second: str
) -> None:
    requester = ask_question(queue, 7, (65, 1))
    queue.take(first, b"question", left=1).lose()
    queue.take(second, b"question", left=0).lose()
    requester.expect(rq(1, (128, 7), 13) + rq(1, (128, 7), 16))
    queue.expect_empty()


def test_a_rejected_request_is_undelivered(queue: Queue) -> None:
    requester = ask_question(queue)
    queue.take("phpmq", b"question").reject()
    requester.expect(rq(1, (128, 7), 13) + rq(1, (128, 7), 16))


def test_a_requeued_request_is_still_waited_for(queue: Queue) -> None:
    requester = ask_question(queue)
    worker = queue.wire("phpmq")
    queue.ask(worker, "phpmq")
    message_id = expect_dispatch(worker, queue.name, b"question")
    worker.say(phpmq(5, (1, queue.name), (3, message_id), (5, b"60")))
    assert expect_dispatch(worker, queue.name, b"question", b"60") == message_id
    worker.say(phpmq(4, (1, queue.name), (3, message_id)))
    requester.expect(rq(1, (128, 7), 13) + rq(1, 1, (128, 7), (224, b"\0"), 11))


def test_a_requeued_request_that_expires_is_undelivered(queue: Queue) -> None:
    requester = ask_question(queue)
    worker = queue.wire("phpmq")
    queue.ask(worker, "phpmq")
    message_id = expect_dispatch(worker, queue.name, b"question")
    worker.say(phpmq(2, (1, queue.name), (4, b"0")), phpmq(5, (1, queue.name), (3, message_id), (5, b"1")))
    requester.expect(rq(1, (128, 7), 13) + rq(1, (128, 7), 16))


@pytest.mark.parametrize("consumer", ["sspq", "phpmq"])
def test_a_request_that_times_out_at_another_door_is_undelivered_once(queue: Queue, consumer: str) -> None:
    requester = ask_question(queue, 7, (97, 1))
    held = queue.take(consumer, b"question")
    requester.expect(rq(1, (128, 7), 13) + rq(1, (128, 7), 16))
    held.settle()
    requester.say(rq(5))
    requester.expect(rq(6))  # and nothing more
    queue.expect_empty()


@pytest.mark.parametrize("consumer", ["sspq", "phpmq"])
def test_a_requester_that_is_gone_disturbs_no_other_door(queue: Queue, consumer: str) -> None:
    requester = ask_question(queue)
    wire = queue.wire(consumer)
    queue.ask(wire, consumer)
    held = queue.hear(wire, consumer, b"question")
    requester.leave()
    queue.put("phpmq", b"next")
    wire.say(held.settlement)
    if consumer == "sspq":
        queue.ask(wire, consumer)
    queue.hear(wire, consumer, b"next").settle()
    queue.expect_empty()


# --- retry counters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("sender", "first", "second"), list(product(("sspq", "rq"), DOORS, DOORS)))
def test_a_retry_counter_goes_down_whoever_loses_the_message(
    queue: Queue, sender: str, first: str, second: str
) -> None:
    queue.put(sender, b"job", retries=1)
    queue.take(first, b"job", left=1).lose()
    queue.take(second, b"job", left=0).lose()
    queue.take("sspq", b"job", dead=True, left=0).settle()
    queue.expect_empty()


@pytest.mark.parametrize("sender", ["sspq", "rq"])
def test_255_stays_255_at_every_door(queue: Queue, sender: str) -> None:
    queue.put(sender, b"for ever", retries=255)
    for door in (*DOORS, *DOORS):
        queue.take(door, b"for ever", left=255).lose()


@pytest.mark.parametrize("sender", ["phpmq", "rq"])
def test_without_a_counter_there_is_no_limit(queue: Queue, sender: str) -> None:
    queue.put(sender, b"for ever")
    for door in (*DOORS, *DOORS):
        queue.take(door, b"for ever").lose()


@pytest.mark.parametrize("sender", ["phpmq", "rq"])
def test_without_a_counter_the_queues_max_deliveries_count(
    queue_of_two_deliveries: Queue, sender: str
) -> None:
    queue = queue_of_two_deliveries
    queue.put(sender, b"poison")
    for door in ("rq", "phpmq"):
        queue.take(door, b"poison").lose()
    queue.take("phpmq", b"poison", dead=True).settle()
    queue.expect_empty()


def test_with_a_counter_the_queues_max_deliveries_do_not_count(queue_of_two_deliveries: Queue) -> None:
    queue = queue_of_two_deliveries
    queue.put("sspq", b"job", retries=3)
    for left, door in ((3, "phpmq"), (2, "rq"), (1, "sspq"), (0, "phpmq")):
        queue.take(door, b"job", left=left).lose()
    queue.take("sspq", b"job", dead=True, left=0).settle()


@pytest.mark.parametrize("sender", DOORS)
def test_where_a_lost_message_goes_is_the_consumers_rule_not_the_senders(queue: Queue, sender: str) -> None:
    for payload in (b"1", b"2", b"3"):
        queue.put(sender, payload)
    queue.take("phpmq", b"1").lose()  # the same place
    queue.take("sspq", b"1").lose()  # the tail
    for payload in (b"2", b"3", b"1"):
        queue.take("phpmq", payload).settle()
    queue.expect_empty()


# --- time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("consumer", ["sspq", "rq"])
def test_a_ttl_holds_for_every_door(queue: Queue, consumer: str) -> None:
    queue.put("phpmq", b"short", ttl=b"1")
    queue.put("phpmq", b"long", ttl=b"600")
    queue.put("sspq", b"last")
    queue.take(consumer, b"short", dead=True).settle()  # waits for its end
    queue.take(consumer, b"long").settle()
    queue.take(consumer, b"last").settle()
    queue.expect_empty()


@pytest.mark.parametrize("consumer", ["sspq", "rq"])
def test_what_expires_at_a_consumer_of_any_door_does_not_come_again(queue: Queue, consumer: str) -> None:
    queue.put("phpmq", b"short", ttl=b"1")
    held = queue.take(consumer, b"short")
    queue.put("phpmq", b"clock", ttl=b"1")
    queue.take("phpmq", b"clock", dead=True, ttl=b"0").settle()  # more than a second later
    held.lose()
    queue.take("rq", b"short", dead=True).settle()
    queue.expect_empty()


# --- dead letters ------------------------------------------------------------------------------------


def die_by_retries(queue: Queue, door: str) -> None:
    queue.put(door, b"dead", retries=0)
    queue.take(door, b"dead", left=0).lose()


KILLERS: dict[str, Callable[[Queue], None]] = {
    "rejected through phpmq": lambda queue: queue.kill(b"dead"),
    "retries of sspq": lambda queue: die_by_retries(queue, "sspq"),
    "retries of rq": lambda queue: die_by_retries(queue, "rq"),
    "ttl of phpmq": lambda queue: queue.put("phpmq", b"dead", ttl=b"1"),
}


@pytest.mark.parametrize(("killer", "door"), list(product(KILLERS, DOORS)))
def test_dead_letters_are_reached_through_every_door(queue: Queue, killer: str, door: str) -> None:
    KILLERS[killer](queue)
    left = 0 if "retries" in killer else ENDLESS
    queue.take(door, b"dead", dead=True, left=left, ttl=b"0" if "ttl" in killer else None).settle()
    queue.expect_empty()


@pytest.mark.parametrize("door", DOORS)
def test_a_dead_letter_lost_by_any_door_goes_behind_the_other_dead_ones(queue: Queue, door: str) -> None:
    queue.kill(b"1", b"2", b"3")
    queue.take(door, b"1", dead=True).lose()
    for payload in (b"2", b"3", b"1"):
        queue.take("phpmq", payload, dead=True).settle()
    queue.expect_empty()


def test_a_dead_letter_is_held_by_one_door_at_a_time(queue: Queue) -> None:
    queue.kill(b"1")
    first = queue.take("rq", b"1", dead=True)
    waiting = queue.wire("sspq")
    queue.ask(waiting, "sspq", dead=True)
    assert waiting.is_silent(0.05)
    first.lose()
    queue.hear(waiting, "sspq", b"1", dead=True).settle()
    queue.expect_empty()


def test_every_reason_of_a_dead_letter_is_in_the_log(tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text('[queue."limited"]\nmax-deliveries = 1\n')
    broker = BrokerProcess(tmp_path, "--config", str(config), "--sspq-queue", "plain").start()
    plain = Queue(broker, b"plain", broker.ports["sspq"])
    limited = Queue(broker, b"limited", 0)
    plain.kill(b"rejected")
    die_by_retries(plain, "sspq")
    plain.put("phpmq", b"expires", ttl=b"1")
    plain.take("rq", b"rejected", dead=True).settle()
    plain.take("rq", b"dead", dead=True).settle()
    plain.take("rq", b"expires", dead=True).settle()
    limited.put("phpmq", b"poison")
    limited.take("phpmq", b"poison").lose()
    limited.take("rq", b"poison", dead=True).settle()
    plain.close()
    limited.close()
    assert broker.stop() == 0
    now_us = time.time_ns() // 1000
    opened = open_log(str(tmp_path / "data"), now_us)
    reasons = {
        name: [run.reason.label for run in opened.events(name, 0, 1000) if run.event is Event.DEAD]
        for name in ("plain", "limited")
    }
    opened.close(now_us)
    assert reasons == {
        "plain": ["rejected", "retries-exhausted", "expired"],
        "limited": ["too-many-deliveries"],
    }
