"""SSPQ, rule by rule, in bytes, against a broker process.

SSPQ has no queue names, so the broker of this file has a listener for each test, with a queue of its
own. That the broker has noticed the end of a connection seldom needs waiting for, because a RECEIVE
waits until the message is there again.
"""

import signal
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from penstock.log.log import open_log
from penstock.model.batch import Batch
from tests.server.harness import (
    CONFIRM,
    DEAD_RECEIVE,
    NO_RECEIVE,
    RECEIVE,
    SEND,
    BrokerProcess,
    Wire,
    expect_dispatch,
    lose,
    phpmq,
    sspq,
    until,
)

QUEUES = 64
ENDINGS: dict[str, Callable[[Wire], None]] = {"fin": Wire.close, "rst": Wire.reset}


class Place:
    """A queue and its listener; the wires to it are closed with the test."""

    def __init__(self, broker: BrokerProcess, queue: str, port: int) -> None:
        self.broker = broker
        self.queue = queue.encode()
        self.port = port
        self._wires: list[Wire] = []

    def client(self) -> Wire:
        return self._keep(Wire(("127.0.0.1", self.port)))

    def phpmq(self) -> Wire:
        """The same queue through another door."""
        return self._keep(self.broker.wire("phpmq"))

    def _keep(self, wire: Wire) -> Wire:
        self._wires.append(wire)
        return wire

    def close(self) -> None:
        for wire in self._wires:
            wire.close()

    def expect_empty(self) -> None:
        """What is sent now is what comes next: nothing was left before it."""
        wire = self.client()
        wire.say(sspq(SEND, b"sentinel"), sspq(RECEIVE))
        wire.expect(sspq(SEND, b"sentinel"))
        wire.say(sspq(CONFIRM))
        wire.leave()

    def reject(self, payload: bytes) -> None:
        """Make a dead letter of the next message, whatever its counter."""
        judge = self.phpmq()
        judge.say(phpmq(2, (1, self.queue), (4, b"1")))
        message_id = expect_dispatch(judge, self.queue, payload)
        judge.say(phpmq(2, (1, self.queue), (4, b"0")), phpmq(6, (1, self.queue), (3, message_id)))
        judge.leave()


class Places:
    """The broker's listeners by queue; `next` has not been used by another test."""

    def __init__(self, broker: BrokerProcess, queues: list[str]) -> None:
        ports = broker.ports_of("sspq")
        self.by_queue = {
            queue: Place(broker, queue, port) for queue, port in zip(["default", *queues], ports, strict=True)
        }
        self._numbers = count()

    def next(self) -> Place:
        return self.by_queue[f"queue-{next(self._numbers)}"]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    folder = tmp_path_factory.mktemp("sspq")
    queues = [f"queue-{number}" for number in range(QUEUES)] + ["no-dead", "send-only"]
    listener = '[[listener]]\nprotocol = "sspq"\naddress = "127.0.0.1:0"\nqueue = "{}"\n'
    config = folder / "penstock.toml"
    config.write_text(
        '[queue.no-dead]\ndead-letters = "off"\n'
        + "".join(listener.format(queue) for queue in queues)
        + 'mode = "send-only"\n'  # of the last one
    )
    broker = BrokerProcess(folder, "--config", str(config), "--rq", "off").start()
    yield Places(broker, queues)
    assert broker.stop() == 0
    assert "Traceback" not in broker.log(), broker.log()


@pytest.fixture
def place(places: Places) -> Iterator[Place]:
    place = places.next()
    yield place
    place.close()


# --- frames ------------------------------------------------------------------------------------------


def test_the_bytes_of_every_frame(place: Place) -> None:
    wire = place.client()
    wire.say(bytes.fromhex("5599 5e 07 00000005 68656c6c6f"))  # SEND "hello", 7 retries
    wire.say(bytes.fromhex("5599 ec 00 00000000"))  # RECEIVE
    wire.expect(bytes.fromhex("5599 5e 07 00000005 68656c6c6f"))
    wire.say(bytes.fromhex("5599 c0 00 00000000"))  # CONFIRM
    wire.say(bytes.fromhex("5599 5e 00 00000000"))  # SEND of nothing, no retry
    wire.say(bytes.fromhex("5599 ec 00 00000000"))
    wire.expect(bytes.fromhex("5599 5e 00 00000000"))
    wire.close()  # its last delivery has failed
    again = place.client()
    again.say(bytes.fromhex("5599 de 00 00000000"))  # DEAD_RECEIVE
    again.expect(bytes.fromhex("5599 5e 00 00000000"))


def test_the_size_is_big_endian(place: Place) -> None:
    payload = bytes(range(256)) + b"\x55\x99\x5e"
    wire = place.client()
    wire.say(bytes.fromhex("5599 5e ff 00000103"), payload, sspq(RECEIVE))
    wire.expect(bytes.fromhex("5599 5e ff 00000103") + payload)


def test_the_default_queue_is_called_default(places: Places) -> None:
    place = places.by_queue["default"]
    wire, other = place.client(), place.phpmq()
    wire.say(sspq(SEND, b"for all"))
    other.say(phpmq(2, (1, b"default"), (4, b"1")))
    message_id = expect_dispatch(other, b"default", b"for all")
    other.say(phpmq(4, (1, b"default"), (3, message_id)))
    place.close()


def test_the_listener_names_the_queue(places: Places) -> None:
    one, two = places.next(), places.next()
    first, second = one.client(), two.client()
    first.say(sspq(SEND, b"one"), sspq(RECEIVE))
    second.say(sspq(SEND, b"two"), sspq(RECEIVE))
    first.expect(sspq(SEND, b"one"))
    second.expect(sspq(SEND, b"two"))
    one.close()
    two.close()


def test_frames_may_be_split_at_every_byte(place: Place) -> None:
    wire = place.client()
    wire.say(sspq(SEND, b"before", 3), sspq(RECEIVE))
    wire.expect(sspq(SEND, b"before", 3))
    frames = sspq(CONFIRM) + sspq(SEND, b"abc", 3) + sspq(RECEIVE)
    for cut in range(1, len(frames)):
        wire.say(frames[:cut])
        assert wire.is_silent(0.002), f"the first {cut} bytes were answered"
        wire.say(frames[cut:])
        wire.expect(sspq(SEND, b"abc", 3))


def test_a_stream_may_come_byte_by_byte(place: Place) -> None:
    wire = place.client()
    for byte in sspq(SEND, b"drop by drop", 9) + sspq(RECEIVE):
        wire.say(bytes([byte]))
    wire.expect(sspq(SEND, b"drop by drop", 9))
    for byte in sspq(CONFIRM) + sspq(SEND, b"next", 1) + sspq(RECEIVE):
        wire.say(bytes([byte]))
    wire.expect(sspq(SEND, b"next", 1))


def test_many_frames_may_come_in_one_segment(place: Place) -> None:
    wire = place.client()
    payloads = [b"%d" % number * (number % 7) for number in range(500)]
    wire.say(*[sspq(SEND, payload, 255) for payload in payloads], sspq(RECEIVE))
    for payload in payloads:
        wire.expect(sspq(SEND, payload, 255))
        wire.say(sspq(CONFIRM), sspq(RECEIVE))


@pytest.mark.parametrize("size", [0, 1, 1000, 16_000])
def test_every_delivery_comes_with_one_write(place: Place, size: int) -> None:
    wire = place.client()
    frame = sspq(SEND, b"x" * size, 1)
    wire.say(frame * 20, sspq(RECEIVE))
    for _ in range(20):
        assert wire.some() == frame, "the first read has the whole frame"
        wire.say(sspq(CONFIRM), sspq(RECEIVE))


def test_a_payload_of_megabytes_comes_back_whole(place: Place) -> None:
    wire = place.client()
    payload = bytes(range(256)) * 20_000
    wire.say(sspq(SEND, payload, 4), sspq(SEND, b"behind it"), sspq(RECEIVE))
    wire.expect(sspq(SEND, payload, 4))
    wire.say(sspq(CONFIRM), sspq(RECEIVE))
    wire.expect(sspq(SEND, b"behind it"))


# --- SEND, RECEIVE, CONFIRM --------------------------------------------------------------------------


def test_send_is_never_answered(place: Place) -> None:
    wire = place.client()
    wire.say(*[sspq(SEND, b"%d" % number) for number in range(3)])
    assert wire.is_silent()
    wire.say(sspq(RECEIVE))
    wire.expect(sspq(SEND, b"0"))  # the first thing that is said here


def test_send_may_come_while_a_message_is_unconfirmed(place: Place) -> None:
    wire = place.client()
    wire.say(sspq(SEND, b"first"), sspq(RECEIVE))
    wire.expect(sspq(SEND, b"first"))
    wire.say(sspq(SEND, b"second"))
    other = place.client()
    other.say(sspq(RECEIVE))
    other.expect(sspq(SEND, b"second"))
    wire.say(sspq(CONFIRM))
    wire.leave()
    other.say(sspq(CONFIRM))
    other.leave()
    place.expect_empty()


def test_send_may_come_while_a_receive_waits(place: Place) -> None:
    wire = place.client()
    wire.say(sspq(RECEIVE))
    assert wire.is_silent(0.05)
    wire.say(sspq(SEND, b"to myself", 2))
    wire.expect(sspq(SEND, b"to myself", 2))


def test_receive_waits_until_there_is_a_message(place: Place) -> None:
    waiting, sender = place.client(), place.client()
    waiting.say(sspq(RECEIVE))
    assert waiting.is_silent()
    sender.say(sspq(SEND, b"here it is"))
    waiting.expect(sspq(SEND, b"here it is"))


def test_receive_asks_for_one_message(place: Place) -> None:
    wire = place.client()
    wire.say(sspq(SEND, b"a"), sspq(SEND, b"b"), sspq(RECEIVE))
    wire.expect(sspq(SEND, b"a"))
    assert wire.is_silent(0.1)
    wire.say(sspq(CONFIRM))
    assert wire.is_silent(0.1)


def test_a_client_that_leaves_while_it_waits_gets_nothing(place: Place) -> None:
    gone = place.client()
    gone.say(sspq(RECEIVE))
    gone.leave()
    wire = place.client()
    wire.say(sspq(SEND, b"kept", 0), sspq(RECEIVE))
    wire.expect(sspq(SEND, b"kept", 0))


def test_confirm_settles_and_is_not_answered(place: Place) -> None:
    wire = place.client()
    wire.say(sspq(SEND, b"done", 5), sspq(RECEIVE))
    wire.expect(sspq(SEND, b"done", 5))
    wire.say(sspq(CONFIRM))
    assert wire.is_silent(0.1)
    wire.leave()
    place.expect_empty()


def test_confirm_and_the_next_receive_may_come_in_one_segment(place: Place) -> None:
    wire = place.client()
    wire.say(sspq(SEND, b"a", 3), sspq(SEND, b"b", 2), sspq(SEND, b"c", 1), sspq(RECEIVE))
    wire.expect(sspq(SEND, b"a", 3))
    wire.say(sspq(CONFIRM) + sspq(RECEIVE))
    wire.expect(sspq(SEND, b"b", 2))
    wire.say(sspq(CONFIRM) + sspq(RECEIVE))
    wire.expect(sspq(SEND, b"c", 1))
    wire.say(sspq(CONFIRM))
    wire.leave()
    place.expect_empty()


@pytest.mark.parametrize("asks", [RECEIVE, DEAD_RECEIVE])
def test_asking_while_a_message_is_unconfirmed_is_ignored(place: Place, asks: int) -> None:
    wire = place.client()
    wire.say(sspq(SEND, b"dead"), sspq(SEND, b"a"), sspq(SEND, b"b"))
    wire.leave()
    place.reject(b"dead")
    wire = place.client()
    wire.say(sspq(RECEIVE))
    wire.expect(sspq(SEND, b"a"))
    wire.say(sspq(asks))
    assert wire.is_silent(0.1)
    wire.say(sspq(CONFIRM))
    assert wire.is_silent(0.1), "it was dropped, not kept for later"
    wire.say(sspq(RECEIVE))
    wire.expect(sspq(SEND, b"b"))


def test_a_stray_confirm_is_ignored(place: Place) -> None:
    wire = place.client()
    wire.say(sspq(CONFIRM), sspq(CONFIRM), sspq(RECEIVE), sspq(CONFIRM))
    wire.say(sspq(SEND, b"a", 1))
    wire.expect(sspq(SEND, b"a", 1))
    wire.say(sspq(CONFIRM), sspq(CONFIRM), sspq(SEND, b"b", 1), sspq(RECEIVE))
    wire.expect(sspq(SEND, b"b", 1))
    wire.close()  # had the stray ones settled it, it would not come again
    other = place.client()
    other.say(sspq(RECEIVE))
    other.expect(sspq(SEND, b"b", 0))


def test_a_payload_on_other_frames_is_read_and_ignored(place: Place) -> None:
    wire = place.client()
    frame = sspq(SEND, b"never stored", 9)  # as a payload it must not be taken for a frame
    wire.say(sspq(SEND, b"a", 2), sspq(SEND, b"b", 2), sspq(RECEIVE, frame, 77))
    wire.expect(sspq(SEND, b"a", 2))
    wire.say(sspq(CONFIRM, b"x" * 300_000), sspq(RECEIVE, b"y"))
    wire.expect(sspq(SEND, b"b", 2))
    wire.say(sspq(CONFIRM, frame), sspq(DEAD_RECEIVE, frame))
    assert wire.is_silent(0.1), "there is no dead letter"
    wire.leave()
    place.expect_empty()


# --- retries -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ENDINGS)
def test_two_retries_are_three_deliveries_and_then_it_is_dead(place: Place, ending: str) -> None:
    sender = place.client()
    sender.say(sspq(SEND, b"job", 2))
    for left in (2, 1, 0):
        worker = place.client()
        worker.say(sspq(RECEIVE))
        worker.expect(sspq(SEND, b"job", left))
        ENDINGS[ending](worker)
    undertaker = place.client()
    undertaker.say(sspq(DEAD_RECEIVE))
    undertaker.expect(sspq(SEND, b"job", 0))
    undertaker.say(sspq(CONFIRM))
    undertaker.leave()
    place.expect_empty()


@pytest.mark.parametrize("ending", ENDINGS)
def test_no_retry_is_dead_at_once(place: Place, ending: str) -> None:
    worker = place.client()
    worker.say(sspq(SEND, b"once", 0), sspq(RECEIVE))
    worker.expect(sspq(SEND, b"once", 0))
    ENDINGS[ending](worker)
    undertaker = place.client()
    undertaker.say(sspq(DEAD_RECEIVE))
    undertaker.expect(sspq(SEND, b"once", 0))
    undertaker.say(sspq(CONFIRM))
    undertaker.leave()
    place.expect_empty()


@pytest.mark.parametrize("ending", ENDINGS)
def test_255_retries_stay_255(place: Place, ending: str) -> None:
    place.client().say(sspq(SEND, b"for ever", 255))
    for _ in range(6):
        worker = place.client()
        worker.say(sspq(RECEIVE))
        worker.expect(sspq(SEND, b"for ever", 255))
        ENDINGS[ending](worker)


def test_254_retries_go_down(place: Place) -> None:
    place.client().say(sspq(SEND, b"job", 254))
    for left in (254, 253, 252):
        worker = place.client()
        worker.say(sspq(RECEIVE))
        worker.expect(sspq(SEND, b"job", left))
        worker.close()


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_lost_message_goes_behind_the_tail(place: Place, ending: str) -> None:
    sender, worker = place.client(), place.client()
    sender.say(sspq(SEND, b"a", 9), sspq(SEND, b"b", 9), sspq(SEND, b"c", 9))
    worker.say(sspq(RECEIVE))
    worker.expect(sspq(SEND, b"a", 9))
    ENDINGS[ending](worker)
    other = place.client()
    for expected in (sspq(SEND, b"b", 9), sspq(SEND, b"c", 9), sspq(SEND, b"a", 8)):
        other.say(sspq(RECEIVE))
        other.expect(expected)
        other.say(sspq(CONFIRM))


def test_the_tail_is_that_of_the_moment_of_the_loss(place: Place) -> None:
    worker, sender = place.client(), place.client()
    worker.say(sspq(SEND, b"a", 9), sspq(RECEIVE))
    worker.expect(sspq(SEND, b"a", 9))
    sender.say(sspq(SEND, b"sent before"))
    sender.leave()
    worker.leave()
    sender = place.client()
    sender.say(sspq(SEND, b"sent after"), sspq(RECEIVE))
    for expected in (sspq(SEND, b"sent before"), sspq(SEND, b"a", 8), sspq(SEND, b"sent after")):
        sender.expect(expected)
        sender.say(sspq(CONFIRM), sspq(RECEIVE))


def test_what_was_sent_on_a_lost_connection_stays(place: Place) -> None:
    wire = place.client()
    wire.say(sspq(SEND, b"a", 0), sspq(RECEIVE))
    wire.expect(sspq(SEND, b"a", 0))
    wire.say(sspq(SEND, b"b", 0))
    wire.leave()
    other = place.client()
    other.say(sspq(RECEIVE))
    other.expect(sspq(SEND, b"b", 0))


# --- dead letters ------------------------------------------------------------------------------------


def test_dead_receive_waits_until_there_is_a_dead_letter(place: Place) -> None:
    undertaker, worker = place.client(), place.client()
    undertaker.say(sspq(DEAD_RECEIVE))
    worker.say(sspq(SEND, b"alive", 255), sspq(SEND, b"job", 0), sspq(RECEIVE))
    worker.expect(sspq(SEND, b"alive", 255))
    assert undertaker.is_silent(0.1), "what is alive is not a dead letter"
    worker.say(sspq(CONFIRM), sspq(RECEIVE))
    worker.expect(sspq(SEND, b"job", 0))
    worker.close()
    undertaker.expect(sspq(SEND, b"job", 0))


def test_receive_does_not_see_dead_letters(place: Place) -> None:
    sender = place.client()
    sender.say(sspq(SEND, b"dead", 0))
    sender.leave()
    place.reject(b"dead")
    place.expect_empty()
    undertaker = place.client()
    undertaker.say(sspq(DEAD_RECEIVE))
    undertaker.expect(sspq(SEND, b"dead", 0))


def test_a_confirmed_dead_letter_is_settled(place: Place) -> None:
    sender = place.client()
    sender.say(sspq(SEND, b"one"), sspq(SEND, b"two"))
    sender.leave()
    place.reject(b"one")
    place.reject(b"two")
    undertaker = place.client()
    undertaker.say(sspq(DEAD_RECEIVE))
    undertaker.expect(sspq(SEND, b"one"))
    undertaker.say(sspq(CONFIRM), sspq(DEAD_RECEIVE))
    undertaker.expect(sspq(SEND, b"two"))
    undertaker.say(sspq(CONFIRM))
    undertaker.leave()
    place.expect_empty()
    last = place.client()
    last.say(sspq(DEAD_RECEIVE))
    assert last.is_silent(0.1)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("retries", [0, 1, 255])
def test_an_unconfirmed_dead_letter_goes_back_behind_the_others(
    place: Place, ending: str, retries: int
) -> None:
    sender = place.client()
    payloads = (b"a", b"b", b"c")
    sender.say(*[sspq(SEND, payload, retries) for payload in payloads])
    sender.leave()
    for payload in payloads:
        place.reject(payload)
    # More often than any counter but 255 would allow.
    for payload in (b"a", b"b", b"c", b"a", b"b", b"c"):
        worker = place.client()
        worker.say(sspq(DEAD_RECEIVE))
        worker.expect(sspq(SEND, payload, retries))
        lose(place.broker, worker, ending)
    place.expect_empty()


def test_a_connection_can_ask_for_messages_and_dead_letters_in_turn(place: Place) -> None:
    wire = place.client()
    wire.say(sspq(SEND, b"dead", 1), sspq(SEND, b"alive", 1), sspq(SEND, b"too", 1))
    wire.leave()
    place.reject(b"dead")
    wire = place.client()
    wire.say(sspq(RECEIVE))
    wire.expect(sspq(SEND, b"alive", 1))
    wire.say(sspq(CONFIRM), sspq(DEAD_RECEIVE))
    wire.expect(sspq(SEND, b"dead", 1))
    wire.say(sspq(CONFIRM), sspq(RECEIVE))
    wire.expect(sspq(SEND, b"too", 1))


# --- what cannot be read -----------------------------------------------------------------------------


@pytest.mark.parametrize("magic", ["5598", "9955", "0000"])
def test_bad_magic_closes_and_the_log_says_who_and_the_first_bytes(place: Place, magic: str) -> None:
    wire, bystander = place.client(), place.client()
    bystander.say(sspq(RECEIVE))
    wire.say(sspq(SEND, b"before it", 1), bytes.fromhex(magic + "5e00 00000003 616263"))
    assert wire.is_closed()
    bystander.expect(sspq(SEND, b"before it", 1))
    port = wire.socket.getsockname()[1]
    lines = [line for line in place.broker.log().splitlines() if f"127.0.0.1:{port}#" in line]
    complaint = next(line for line in lines if "closed sspq connection" in line)
    assert bytes.fromhex(magic).hex() in complaint.replace(" ", "").replace("\\x", "")


def test_bad_magic_gives_back_what_was_held(place: Place) -> None:
    wire = place.client()
    wire.say(sspq(SEND, b"held", 1), sspq(RECEIVE))
    wire.expect(sspq(SEND, b"held", 1))
    wire.say(b"GET / HTTP/1.1\r\n\r\n")
    assert wire.is_closed()
    other = place.client()
    other.say(sspq(RECEIVE))
    other.expect(sspq(SEND, b"held", 0))


@pytest.mark.parametrize("type_", [0xFF, 0x00, 0x5D, NO_RECEIVE])
def test_an_unknown_type_is_skipped_with_its_payload(place: Place, type_: int) -> None:
    wire = place.client()
    wire.say(sspq(type_), sspq(type_, sspq(SEND, b"never stored")), sspq(type_, b"x" * 300_000))
    wire.say(sspq(SEND, b"after it", 1), sspq(type_, b"y"), sspq(RECEIVE))
    wire.expect(sspq(SEND, b"after it", 1))
    wire.say(sspq(type_, b"while unconfirmed"), sspq(CONFIRM))
    wire.leave()
    place.expect_empty()


def test_unknown_types_are_counted(place: Place) -> None:
    wire = place.client()
    wire.say(sspq(0x42, b"what") * 5, sspq(SEND, b"x"), sspq(RECEIVE))
    wire.expect(sspq(SEND, b"x"))
    lines = [line for line in place.broker.log().splitlines() if "unknown frame type" in line]
    assert any("0x42" in line and "count=5" in line for line in lines), lines


# --- NO_RECEIVE --------------------------------------------------------------------------------------


def test_no_receive_where_the_listener_is_send_only(places: Places) -> None:
    place = places.by_queue["send-only"]
    wire = place.client()
    for asks in (RECEIVE, DEAD_RECEIVE, RECEIVE):
        wire.say(sspq(SEND, b"in", 1), sspq(asks))
        wire.expect(bytes.fromhex("5599 0e 00 00000000"))
    other = place.phpmq()
    other.say(phpmq(2, (1, place.queue), (4, b"3")))
    for _ in range(3):
        expect_dispatch(other, place.queue, b"in")
    place.close()


def test_no_receive_where_dead_letters_are_switched_off(places: Places) -> None:
    place = places.by_queue["no-dead"]
    wire = place.client()
    wire.say(sspq(DEAD_RECEIVE))
    wire.expect(sspq(NO_RECEIVE))
    wire.say(sspq(SEND, b"gone", 0), sspq(RECEIVE))
    wire.expect(sspq(SEND, b"gone", 0))
    wire.leave()
    place.expect_empty()
    again = place.client()
    again.say(sspq(DEAD_RECEIVE))
    again.expect(sspq(NO_RECEIVE))
    again.say(sspq(SEND, b"alive"), sspq(RECEIVE))
    again.expect(sspq(SEND, b"alive"))
    place.close()


def test_no_receive_where_the_queue_is_paused(tmp_path: Path) -> None:
    now_us = time.time_ns() // 1000
    opened = open_log(str(tmp_path / "data"), now_us)
    opened.append("default", Batch.of([b"kept"], retries=[1]), now_us)
    opened.pause("default", True, now_us)
    opened.close(now_us)
    broker = BrokerProcess(tmp_path).start()
    with broker.wire("sspq") as wire:
        for asks in (RECEIVE, DEAD_RECEIVE, RECEIVE):
            wire.say(sspq(SEND, b"more", 1), sspq(asks))
            wire.expect(sspq(NO_RECEIVE))
    assert broker.stop() == 0


@pytest.mark.parametrize("asks", [RECEIVE, DEAD_RECEIVE])
def test_no_receive_for_whoever_waits_when_the_broker_drains(tmp_path: Path, asks: int) -> None:
    broker = BrokerProcess(tmp_path).start()
    waiting = broker.wire("sspq")
    waiting.say(sspq(asks), sspq(asks, b"a mark in the log"))
    until(lambda: "already waiting" in broker.log(), "the demand to be read")
    broker.signal(signal.SIGTERM)
    waiting.expect(sspq(NO_RECEIVE))
    assert waiting.is_closed()
    assert broker.wait() == 0
    waiting.close()


def test_the_question_what_is_stored_is_answered(place: Place) -> None:
    client = place.client()
    client.say(sspq(0x5C))
    client.expect(sspq(0x5C))
    client.say(sspq(SEND, b"a", 1), sspq(0x5C))
    client.expect(sspq(0x5C))
    client.say(sspq(RECEIVE))
    client.expect(sspq(SEND, b"a", 1))
    client.say(sspq(CONFIRM), sspq(0x5C))
    client.expect(sspq(0x5C))
    place.expect_empty()


def test_no_receive_for_whoever_asks_while_the_broker_drains(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, "--drain-seconds", "60").start()
    busy, other = broker.wire("sspq"), broker.wire("sspq")
    busy.say(sspq(SEND, b"a", 1), sspq(SEND, b"b", 1), sspq(SEND, b"c", 1), sspq(RECEIVE))
    busy.expect(sspq(SEND, b"a", 1))
    other.say(sspq(RECEIVE))
    other.expect(sspq(SEND, b"b", 1))
    broker.signal(signal.SIGTERM)
    until(lambda: "draining" in broker.log(), "the broker to drain")
    busy.say(sspq(CONFIRM), sspq(RECEIVE))
    busy.expect(sspq(NO_RECEIVE))
    assert busy.is_closed()
    assert broker.running, "the other one still works"
    other.say(sspq(CONFIRM) + sspq(DEAD_RECEIVE))
    other.expect(sspq(NO_RECEIVE))
    assert broker.wait() == 0
    busy.close()
    other.close()
    broker.start()
    with broker.wire("sspq") as wire:
        wire.say(sspq(RECEIVE))
        wire.expect(sspq(SEND, b"c", 1))
        wire.say(sspq(CONFIRM))
    assert broker.stop() == 0
