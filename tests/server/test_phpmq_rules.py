"""PHPMQ, rule by rule, in bytes, against a broker process.

Every test has queues of its own; the first part of a queue's name chooses its policy. `leave` is how a
test knows that the broker has read what is never answered: the broker closes a connection after that.
"""

import math
import re
import select
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.server.harness import WAIT_SECONDS, BrokerProcess, Wire, expect_dispatch, lose, phpmq

NARROW_DIGITS, WIDE_DIGITS = 29, 33
DIALECTS = {
    "32": (32, b""),
    "35": (35, b""),
    "36": (36, b""),
    "32 with line breaks": (32, b"\n"),
    "35 with line breaks": (35, b"\n"),
    "36 with line breaks": (36, b"\n"),
}
LISTENERS = {
    "always": 'ttl-packet = "always"',
    "never": 'ttl-packet = "never"',
    "replace": 'consume = "replace"',
}
POLICIES = """
[queue."drop.*"]
on-expiry = "drop"
[queue."two.*"]
max-deliveries = 2
[queue."no-dead.*"]
dead-letters = "off"
"""


class Room:
    """One test's queues and connections."""

    numbers = count()

    def __init__(self, broker: BrokerProcess, ports: dict[str, int]) -> None:
        self.broker = broker
        self._ports = ports
        self._wires: list[Wire] = []

    def queue(self, policy: str = "plain") -> bytes:
        """A name that no other test uses."""
        return b"%s.%d" % (policy.encode(), next(self.numbers))

    def client(self, listener: str = "phpmq") -> Wire:
        wire = Wire(("127.0.0.1", self._ports[listener]))
        self._wires.append(wire)
        return wire

    def send(self, queue: bytes, *contents: bytes, ttl: bytes | None = None) -> None:
        """Messages that the broker has, when this returns."""
        sender = self.client()
        last = [(5, ttl)] if ttl is not None else []
        sender.say(*[phpmq(1, (1, queue), (2, content), *last) for content in contents])
        sender.leave()

    def kill(self, queue: bytes, *contents: bytes) -> list[bytes]:
        """Messages that are dead letters when this returns; their ids."""
        self.send(queue, *contents)
        judge = self.client()
        judge.say(consume(queue, len(contents)))
        ids = [expect_dispatch(judge, queue, content) for content in contents]
        judge.say(*[phpmq(6, (1, queue), (3, message_id)) for message_id in ids])
        judge.leave()
        return ids

    def expect_empty(self, queue: bytes) -> None:
        """What is sent now is what comes next: nothing was left before it."""
        wire = self.client()
        wire.say(phpmq(1, (1, queue), (2, b"sentinel")), consume(queue, 9))
        message_id = expect_dispatch(wire, queue, b"sentinel")
        wire.say(phpmq(4, (1, queue), (3, message_id)))
        wire.leave()

    def expect_no_dead(self, queue: bytes) -> None:
        """What dies now is the first dead letter."""
        self.kill(queue, b"sentinel")
        wire = self.client()
        wire.say(consume(queue + b".dead", 9))
        message_id = expect_dispatch(wire, queue + b".dead", b"sentinel")
        wire.say(phpmq(4, (1, queue + b".dead"), (3, message_id)))
        wire.leave()

    def close(self) -> None:
        for wire in self._wires:
            wire.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BrokerProcess, dict[str, int]]]:
    folder = tmp_path_factory.mktemp("phpmq")
    listener = '[[listener]]\nprotocol = "phpmq"\naddress = "127.0.0.1:0"\n{}\n'
    config = folder / "penstock.toml"
    config.write_text(POLICIES + "".join(map(listener.format, LISTENERS.values())))
    broker = BrokerProcess(folder, "--config", str(config), "--sspq", "off", "--rq", "off").start()
    yield broker, dict(zip(["phpmq", *LISTENERS], broker.ports_of("phpmq"), strict=True))
    assert broker.stop() == 0
    assert "Traceback" not in broker.log(), broker.log()


@pytest.fixture
def room(server: tuple[BrokerProcess, dict[str, int]]) -> Iterator[Room]:
    room = Room(*server)
    yield room
    room.close()


def consume(queue: bytes, window: int, *, width: int = 32, newline: bytes = b"") -> bytes:
    return phpmq(2, (1, queue), (4, b"%d" % window), width=width, newline=newline)


def ack(queue: bytes, message_id: bytes) -> bytes:
    return phpmq(4, (1, queue), (3, message_id))


# --- bytes and dialects ------------------------------------------------------------------------------


def test_the_bytes_of_every_message_with_32_byte_headers(room: Room) -> None:
    wire = room.client()
    wire.say(b"H0100102P0100000000000000000000000000007plain.qP0200000000000000000000000000012Hello World!")
    wire.say(b"H0100202", b"P0100000000000000000000000000007plain.q", b"P04000000000000000000000000000011")
    head = (
        b"H0100303"
        b"P0100000000000000000000000000007plain.q"
        b"P0200000000000000000000000000012Hello World!"
        b"P0300000000000000000000000000032"
    )
    wire.expect(head)
    message_id = wire.hear(32)
    requeue = b"P0100000000000000000000000000007plain.qP0300000000000000000000000000032"
    wire.say(b"H0100503", requeue, message_id, b"P050000000000000000000000000000260")
    wire.expect(head.replace(b"H0100303", b"H0100304") + message_id)
    wire.expect(b"P050000000000000000000000000000260")
    wire.say(b"H0100602P0100000000000000000000000000007plain.qP0300000000000000000000000000032", message_id)
    wire.say(b"H0100202P0100000000000000000000000000012plain.q.deadP04000000000000000000000000000011")
    wire.expect(
        b"H0100304"
        b"P0100000000000000000000000000012plain.q.dead"
        b"P0200000000000000000000000000012Hello World!"
        b"P0300000000000000000000000000032" + message_id + b"P05000000000000000000000000000010"
    )
    wire.say(
        b"H0100402P0100000000000000000000000000012plain.q.deadP0300000000000000000000000000032",
        message_id,
    )
    wire.leave()
    room.expect_empty(b"plain.q")
    room.expect_no_dead(b"plain.q")


def test_the_bytes_with_36_byte_headers_and_line_breaks(room: Room) -> None:
    wire = room.client()
    wire.say(
        b"H0100102\n"
        b"P01000000000000000000000000000000004\nwide\n"
        b"P02000000000000000000000000000000012\nHello World!\n"
    )
    wire.say(
        b"H0100202\nP01000000000000000000000000000000004\nwide\nP04000000000000000000000000000000001\n5\n"
    )
    wire.expect(
        b"H0100303\n"
        b"P01000000000000000000000000000000004\nwide\n"
        b"P02000000000000000000000000000000012\nHello World!\n"
        b"P03000000000000000000000000000000032\n"
    )
    message_id = wire.hear(32)
    wire.expect(b"\n")
    wire.say(
        b"H0100402\n"
        b"P01000000000000000000000000000000004\nwide\n"
        b"P03000000000000000000000000000000032\n" + message_id + b"\n"
    )
    wire.leave()
    room.expect_empty(b"wide")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_is_read_and_answered_in_kind(room: Room, dialect: str) -> None:
    width, newline = DIALECTS[dialect]
    queue, wire = room.queue(), room.client()

    def say(type_: int, *packets: tuple[int, bytes]) -> None:
        wire.say(phpmq(type_, *packets, width=width, newline=newline))

    def hear(name: bytes, content: bytes, ttl: bytes | None = None) -> bytes:
        return expect_dispatch(wire, name, content, ttl, width=width, newline=newline)

    say(1, (1, queue), (2, b"one"))
    say(1, (1, queue), (2, b"two\nP"), (5, b"60"))
    say(1, (1, queue), (2, b""))
    say(2, (1, queue), (4, b"9"))
    one, two, three = hear(queue, b"one"), hear(queue, b"two\nP", b"60"), hear(queue, b"")
    say(4, (1, queue), (3, one))
    say(5, (1, queue), (3, two), (5, b"9"))
    assert hear(queue, b"two\nP", b"9") == two
    say(6, (1, queue), (3, three))
    say(2, (1, queue + b".dead"), (4, b"1"))
    assert hear(queue + b".dead", b"") == three
    say(4, (1, queue + b".dead"), (3, three))
    say(4, (1, queue), (3, two))
    wire.leave()
    room.expect_empty(queue)
    room.expect_no_dead(queue)


def test_the_dialect_is_recognised_for_each_message(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    for number, (width, newline) in enumerate([*DIALECTS.values(), *reversed(DIALECTS.values())]):
        wire.say(phpmq(1, (1, queue), (2, b"%d" % number), width=width, newline=newline))
    wire.say(consume(queue, 2 * len(DIALECTS)))
    for number in range(2 * len(DIALECTS)):
        expect_dispatch(wire, queue, b"%d" % number)


def test_dispatches_have_the_dialect_of_the_consume_request_not_of_sends(room: Room) -> None:
    queue, sender, wire = room.queue(), room.client(), room.client()
    wire.say(consume(queue, 2 * len(DIALECTS), width=36, newline=b"\n"))
    for width, newline in DIALECTS.values():
        wire.say(phpmq(1, (1, queue), (2, b"mine"), width=width, newline=newline))
        expect_dispatch(wire, queue, b"mine", width=36, newline=b"\n")
        sender.say(phpmq(1, (1, queue), (2, b"another's"), width=width, newline=newline))
        expect_dispatch(wire, queue, b"another's", width=36, newline=b"\n")


def test_packets_may_come_in_any_order(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    wire.say(phpmq(1, (2, b"content first"), (1, queue)))
    wire.say(phpmq(1, (5, b"60"), (2, b"ttl first"), (1, queue)))
    wire.say(phpmq(1, (1, queue), (5, b"60"), (2, b"ttl second")))
    wire.say(phpmq(2, (4, b"9"), (1, queue)))
    ids = [
        expect_dispatch(wire, queue, b"content first"),
        expect_dispatch(wire, queue, b"ttl first", b"60"),
        expect_dispatch(wire, queue, b"ttl second", b"60"),
    ]
    wire.say(phpmq(4, (3, ids[0]), (1, queue)), phpmq(6, (3, ids[1]), (1, queue)))
    wire.say(phpmq(5, (5, b"0"), (3, ids[2]), (1, queue)))
    assert expect_dispatch(wire, queue, b"ttl second", b"0") == ids[2]


@pytest.mark.parametrize("newline", [b"", b"\n"])
def test_where_another_packet_comes_first_the_last_width_of_the_connection_holds(
    room: Room, newline: bytes
) -> None:
    queue, wire = room.queue(), room.client()
    wire.say(consume(queue, 9))
    for width in (36, 32, 36):
        wire.say(phpmq(1, (1, queue), (2, b"queue first"), width=width))
        wire.say(phpmq(1, (2, b"content first"), (1, queue), width=width, newline=newline))
        expect_dispatch(wire, queue, b"queue first")
        expect_dispatch(wire, queue, b"content first")


def test_messages_may_be_split_at_every_byte(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    wire.say(consume(queue, 1))
    stream = phpmq(1, (1, queue), (2, b"abc"), (5, b"60"))
    for cut in range(1, len(stream)):
        wire.say(stream[:cut])
        assert wire.is_silent(0.002), f"the first {cut} bytes were answered"
        wire.say(stream[cut:])
        wire.say(ack(queue, expect_dispatch(wire, queue, b"abc", b"60")))


def test_many_messages_may_come_in_one_segment(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    contents = [b"%d" % number * (number % 5) for number in range(500)]
    wire.say(*[phpmq(1, (1, queue), (2, content)) for content in contents], consume(queue, 500))
    for content in contents:
        expect_dispatch(wire, queue, content)


@pytest.mark.parametrize("size", [0, 1, 1000, 16_000])
def test_every_dispatch_comes_with_one_write(room: Room, size: int) -> None:
    queue, wire = room.queue(), room.client()
    wire.say(consume(queue, 1))
    for _ in range(20):
        wire.say(phpmq(1, (1, queue), (2, b"x" * size)))
        heard = wire.some()
        assert len(heard) == 8 + 3 * 32 + len(queue) + size + 32, "the first read has the whole message"
        wire.say(ack(queue, heard[-32:]))


def test_a_content_of_megabytes_comes_back_whole(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    content = bytes(range(256)) * 20_000
    wire.say(consume(queue, 2), phpmq(1, (1, queue), (2, content)), phpmq(1, (1, queue), (2, b"behind it")))
    expect_dispatch(wire, queue, content)
    expect_dispatch(wire, queue, b"behind it")


# --- the TTL packet ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listener", "without", "with_0", "with_ttl"),
    [("phpmq", None, b"0", b"60"), ("always", b"0", b"0", b"60"), ("never", None, None, None)],
)
def test_which_dispatches_carry_a_ttl_is_a_setting(
    room: Room, listener: str, without: bytes | None, with_0: bytes | None, with_ttl: bytes | None
) -> None:
    queue, wire = room.queue(), room.client(listener)
    wire.say(consume(queue, 9))
    wire.say(phpmq(1, (1, queue), (2, b"no ttl")), phpmq(1, (1, queue), (2, b"a ttl"), (5, b"60")))
    wire.say(phpmq(1, (1, queue), (2, b"ttl 0"), (5, b"0")), phpmq(1, (1, queue), (2, b"last"), (5, b"60")))
    expect_dispatch(wire, queue, b"no ttl", without)
    expect_dispatch(wire, queue, b"a ttl", with_ttl)
    expect_dispatch(wire, queue, b"ttl 0", with_0)
    expect_dispatch(wire, queue, b"last", with_ttl)


def test_packet_05_goes_out_where_it_came_in_also_after_a_restart(tmp_path: Path) -> None:
    """Messages of both kinds, sent in one segment, given back by a lost consumer, and as dead letters."""
    queue = b"orders"
    came = [(b"none", None), (b"zero", b"0"), (b"none again", None), (b"zero again", b"0"), (b"zero", b"0")]
    broker = BrokerProcess(tmp_path, "--sspq", "off", "--rq", "off").start()
    with broker.wire("phpmq") as sender:
        sender.say(*[phpmq(1, (1, queue), (2, c), *([(5, t)] if t else [])) for c, t in came], STORED)
        sender.expect(stored(b"0"))
    broker.kill()
    broker.start()
    for _ in range(2):
        with broker.wire("phpmq") as wire:
            wire.say(consume(queue, 9))
            for content, ttl in came:
                expect_dispatch(wire, queue, content, ttl)
            lose(broker, wire, "rst")
    with broker.wire("phpmq") as wire:
        wire.say(consume(queue, 9))
        ids = [expect_dispatch(wire, queue, content, ttl) for content, ttl in came]
        wire.say(*[phpmq(6, (1, queue), (3, message_id)) for message_id in ids])
        wire.say(consume(queue + b".dead", 9))
        for content, ttl in came:
            expect_dispatch(wire, queue + b".dead", content, ttl)
    assert broker.stop() == 0


def test_ttl_0_means_no_ttl(room: Room) -> None:
    queue = room.queue()
    room.send(queue, b"old", ttl=b"1")
    room.send(queue, b"for ever", ttl=b"0")
    undertaker = room.client()
    undertaker.say(consume(queue + b".dead", 9))
    expect_dispatch(undertaker, queue + b".dead", b"old", b"0")  # a second is over
    wire = room.client()
    wire.say(consume(queue, 9))
    expect_dispatch(wire, queue, b"for ever", b"0")


def test_a_dispatch_shows_what_is_left_rounded_up_and_never_0(room: Room) -> None:
    queue, undertaker, sender = room.queue(), room.client(), room.client()
    undertaker.say(consume(queue + b".dead", 1))
    sent_after = time.monotonic()
    sender.say(phpmq(1, (1, queue), (2, b"x"), (5, b"2")))
    sender.leave()
    sent_before = time.monotonic()
    shown = set()
    head_bytes = 8 + 3 * 32 + len(queue) + len(b"x") + 32
    while undertaker.is_silent(0.15):  # twenty deliveries in two seconds would be too many
        wire, asked = room.client(), time.monotonic()
        wire.say(consume(queue, 1))
        select.select([wire.socket, undertaker.socket], [], [], WAIT_SECONDS)  # alive or dead
        if wire.is_silent(0):
            break
        assert wire.hear(head_bytes)[:8] == b"H0100304"
        left = wire.hear(33)
        assert left[:32] == b"P05" + b"1".zfill(NARROW_DIGITS)
        shown.add(int(left[32:]))
        least, most = 2 - (time.monotonic() - sent_after), 2 - (asked - sent_before)
        assert math.ceil(least) <= int(left[32:]) <= math.ceil(most)
        wire.leave()
    assert time.monotonic() > sent_after + 2
    expect_dispatch(undertaker, queue + b".dead", b"x", b"0")
    assert shown == {2, 1}


def test_a_large_ttl(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    wire.say(consume(queue, 1), phpmq(1, (1, queue), (2, b"x"), (5, b"9999999999")))
    expect_dispatch(wire, queue, b"x", b"9999999999")


def test_an_expired_message_is_never_dispatched_and_becomes_a_dead_letter(room: Room) -> None:
    queue = room.queue()
    room.send(queue, b"short", b"short too", ttl=b"1")
    room.send(queue, b"long", ttl=b"60")
    undertaker = room.client()
    undertaker.say(consume(queue + b".dead", 9))
    assert undertaker.is_silent(0.1), "not before its time"
    dead = queue + b".dead"
    ids = [expect_dispatch(undertaker, dead, content, b"0") for content in (b"short", b"short too")]
    wire = room.client("never")
    wire.say(consume(queue, 9))
    wire.say(ack(queue, expect_dispatch(wire, queue, b"long")))
    wire.leave()
    undertaker.say(*[ack(queue + b".dead", message_id) for message_id in ids])
    undertaker.leave()
    room.expect_no_dead(queue)


def test_on_expiry_drop_throws_it_away(room: Room) -> None:
    queue, clock = room.queue("drop"), room.queue()
    room.send(queue, b"dropped", ttl=b"1")
    room.send(clock, b"tick", ttl=b"1")
    witness = room.client()
    witness.say(consume(clock + b".dead", 1))
    expect_dispatch(witness, clock + b".dead", b"tick", b"0")
    room.expect_empty(queue)
    room.expect_no_dead(queue)


def test_what_expires_at_a_consumer_can_be_acknowledged_and_does_not_come_again(room: Room) -> None:
    done, lost, clock = room.queue(), room.queue(), room.queue()
    worker, loser = room.client(), room.client()
    worker.say(consume(done, 1), phpmq(1, (1, done), (2, b"done"), (5, b"1")))
    message_id = expect_dispatch(worker, done, b"done", b"1")
    loser.say(consume(lost, 1), phpmq(1, (1, lost), (2, b"lost"), (5, b"1")))
    expect_dispatch(loser, lost, b"lost", b"1")
    room.send(clock, b"tick", ttl=b"1")
    witness = room.client()
    witness.say(consume(clock + b".dead", 1))
    expect_dispatch(witness, clock + b".dead", b"tick", b"0")
    worker.say(ack(done, message_id))
    worker.leave()
    loser.leave()
    room.expect_empty(done)
    room.expect_no_dead(done)
    room.expect_empty(lost)
    undertaker = room.client()
    undertaker.say(consume(lost + b".dead", 1))
    expect_dispatch(undertaker, lost + b".dead", b"lost", b"0")


# --- windows -----------------------------------------------------------------------------------------


def test_a_window_is_filled_and_each_settlement_frees_a_slot(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    room.send(queue, b"1", b"2", b"3", b"4", b"5")
    wire.say(consume(queue, 2))
    one, two = expect_dispatch(wire, queue, b"1"), expect_dispatch(wire, queue, b"2")
    assert wire.is_silent(0.1)
    wire.say(ack(queue, two))
    three = expect_dispatch(wire, queue, b"3")
    assert wire.is_silent(0.05)
    wire.say(phpmq(6, (1, queue), (3, one)))
    four = expect_dispatch(wire, queue, b"4")
    wire.say(phpmq(5, (1, queue), (3, three), (5, b"0")))
    five = expect_dispatch(wire, queue, b"5")
    assert wire.is_silent(0.05)
    wire.say(ack(queue, four), ack(queue, five))
    assert expect_dispatch(wire, queue, b"3", b"0") == three


def test_a_window_stays_in_force_for_messages_that_arrive_later(room: Room) -> None:
    queue, wire, sender = room.queue(), room.client(), room.client()
    wire.say(consume(queue, 2))
    assert wire.is_silent(0.05)
    for content in (b"1", b"2", b"3"):
        sender.say(phpmq(1, (1, queue), (2, content)))
        wire.say(ack(queue, expect_dispatch(wire, queue, content)))


def test_the_largest_window(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    wire.say(consume(queue, 9_999_999_999), phpmq(1, (1, queue), (2, b"x")))
    expect_dispatch(wire, queue, b"x")


def test_a_second_consume_replaces_the_window_with_a_larger_one(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    room.send(queue, b"1", b"2", b"3", b"4", b"5")
    wire.say(consume(queue, 1))
    expect_dispatch(wire, queue, b"1")
    wire.say(consume(queue, 3))
    expect_dispatch(wire, queue, b"2")
    expect_dispatch(wire, queue, b"3")
    assert wire.is_silent(0.1), "three in all, not four"


def test_a_second_consume_replaces_the_window_with_a_smaller_one(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    room.send(queue, b"1", b"2", b"3", b"4", b"5")
    wire.say(consume(queue, 3))
    ids = [expect_dispatch(wire, queue, content) for content in (b"1", b"2", b"3")]
    wire.say(consume(queue, 1), ack(queue, ids[0]), ack(queue, ids[1]))
    assert wire.is_silent(0.1), "one is still there, and the window is one"
    wire.say(ack(queue, ids[2]))
    expect_dispatch(wire, queue, b"4")
    assert wire.is_silent(0.05)


def test_a_second_consume_may_change_the_dialect(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    room.send(queue, b"1", b"2")
    wire.say(consume(queue, 1))
    first = expect_dispatch(wire, queue, b"1")
    wire.say(consume(queue, 1, width=36, newline=b"\n"), ack(queue, first))
    expect_dispatch(wire, queue, b"2", width=36, newline=b"\n")


def test_windows_on_several_queues_are_added(room: Room) -> None:
    one, two, wire = room.queue(), room.queue(), room.client()
    wire.say(consume(one, 1))
    wire.say(consume(two, 2, width=36))
    wire.say(*[phpmq(1, (1, one), (2, b"one")), phpmq(1, (1, one), (2, b"one"))])
    first = expect_dispatch(wire, one, b"one")
    wire.say(*[phpmq(1, (1, two), (2, b"two")) for _ in range(3)])
    second = expect_dispatch(wire, two, b"two", width=36)
    expect_dispatch(wire, two, b"two", width=36)
    assert wire.is_silent(0.1), "each has its own window"
    wire.say(ack(one, first))
    expect_dispatch(wire, one, b"one")
    wire.say(ack(two, second))
    expect_dispatch(wire, two, b"two", width=36)


def test_windows_on_several_queues_are_replaced_where_the_listener_says_so(room: Room) -> None:
    one, two, wire = room.queue(), room.queue(), room.client("replace")
    room.send(one, b"1", b"2", b"3")
    wire.say(consume(one, 1))
    first = expect_dispatch(wire, one, b"1")
    wire.say(consume(two, 1), ack(one, first))
    assert wire.is_silent(0.1), "the first queue is not consumed any more"
    room.send(two, b"two")
    second = expect_dispatch(wire, two, b"two")
    wire.say(consume(two + b".dead", 1), ack(two, second))
    room.send(two, b"two again")
    assert wire.is_silent(0.1), "nor is the second one"
    wire.say(consume(one, 1))
    expect_dispatch(wire, one, b"2")


def test_messages_of_a_replaced_window_can_still_be_settled(room: Room) -> None:
    one, two, wire = room.queue(), room.queue(), room.client("replace")
    wire.say(consume(one, 9), *[phpmq(1, (1, one), (2, content)) for content in (b"1", b"2", b"3")])
    ids = [expect_dispatch(wire, one, content) for content in (b"1", b"2", b"3")]
    wire.say(consume(two, 1), ack(one, ids[0]), phpmq(6, (1, one), (3, ids[1])))
    wire.leave()
    other = room.client()
    other.say(consume(one, 9), consume(one + b".dead", 9))
    assert expect_dispatch(other, one, b"3") == ids[2]
    assert expect_dispatch(other, one + b".dead", b"2") == ids[1]
    assert other.is_silent(0.05)


def test_a_window_on_dead_letters_can_be_replaced(room: Room) -> None:
    one, two, wire = room.queue(), room.queue(), room.client("replace")
    wire.say(consume(one + b".dead", 9))
    wire.say(consume(two, 9))
    room.kill(one, b"dead")
    assert wire.is_silent(0.1), "dead letters of the first queue are not consumed any more"
    room.send(two, b"two")
    expect_dispatch(wire, two, b"two")


def test_a_queue_and_its_dead_letters_are_two_windows(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    room.kill(queue, b"dead 1", b"dead 2")
    room.send(queue, b"alive 1", b"alive 2")
    wire.say(consume(queue, 1))
    expect_dispatch(wire, queue, b"alive 1")
    wire.say(consume(queue + b".dead", 1))
    expect_dispatch(wire, queue + b".dead", b"dead 1")
    assert wire.is_silent(0.05)
    wire.say(consume(queue + b".dead", 2))
    expect_dispatch(wire, queue + b".dead", b"dead 2")
    assert wire.is_silent(0.05)


# --- ids and settlements -----------------------------------------------------------------------------


def test_ids_are_32_lower_case_hex_digits_and_never_the_same(room: Room) -> None:
    one, two, wire = room.queue(), room.queue(), room.client()
    wire.say(consume(one, 100), consume(two, 100))
    ids = set()
    for queue in (one, two):
        for _ in range(50):
            wire.say(phpmq(1, (1, queue), (2, b"x")))
            ids.add(expect_dispatch(wire, queue, b"x"))
    assert len(ids) == 100
    assert all(re.fullmatch(rb"[0-9a-f]{32}", message_id) for message_id in ids)


def test_a_message_keeps_its_id(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    wire.say(consume(queue, 1), phpmq(1, (1, queue), (2, b"x")))
    message_id = expect_dispatch(wire, queue, b"x")
    wire.leave()
    again = room.client()
    again.say(consume(queue, 1))
    assert expect_dispatch(again, queue, b"x") == message_id
    again.say(phpmq(6, (1, queue), (3, message_id)), consume(queue + b".dead", 1))
    assert expect_dispatch(again, queue + b".dead", b"x") == message_id


def test_sends_and_settlements_are_not_answered(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    wire.say(consume(queue, 3), *[phpmq(1, (1, queue), (2, content)) for content in (b"1", b"2", b"3")])
    ids = [expect_dispatch(wire, queue, content) for content in (b"1", b"2", b"3")]
    wire.say(ack(queue, ids[0]), phpmq(6, (1, queue), (3, ids[1])))
    wire.say(phpmq(1, (1, room.queue()), (2, b"elsewhere")))
    assert wire.is_silent()


@pytest.mark.parametrize("type_", [4, 5, 6])
def test_a_verdict_on_what_is_not_this_connections_is_ignored(room: Room, type_: int) -> None:
    queue, other_queue = room.queue(), room.queue()
    holder, stranger = room.client(), room.client()
    holder.say(consume(queue, 1), phpmq(1, (1, queue), (2, b"held")), phpmq(1, (1, queue), (2, b"next")))
    message_id = expect_dispatch(holder, queue, b"held")
    ttl = [(5, b"0")] if type_ == 5 else []
    for unknown in (
        message_id,  # another connection's
        message_id.upper() if message_id.upper() != message_id else b"F" * 32,
        message_id[:-1],
        message_id[:-2] + b"%02x" % (int(message_id[-2:], 16) + 1),  # nobody holds the next one
        b"0" * 32,
        b"f" * 32,
        b"not one of yours",
        b"\xff" * 7,
    ):
        stranger.say(phpmq(type_, (1, queue), (3, unknown), *ttl))
    stranger.say(phpmq(type_, (1, other_queue), (3, message_id), *ttl))
    # A message of its own shows that all of that was read, and that the connection goes on.
    stranger.say(consume(other_queue, 1), phpmq(1, (1, other_queue), (2, b"mine")))
    expect_dispatch(stranger, other_queue, b"mine")
    assert holder.is_silent(0.05)
    holder.leave()
    again = room.client()
    again.say(consume(queue, 9))
    assert expect_dispatch(again, queue, b"held") == message_id
    expect_dispatch(again, queue, b"next")


def test_an_ack_that_comes_twice_is_ignored(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    wire.say(consume(queue, 1), *[phpmq(1, (1, queue), (2, content)) for content in (b"1", b"2", b"3")])
    first = expect_dispatch(wire, queue, b"1")
    wire.say(ack(queue, first), ack(queue, first), ack(queue, first))
    expect_dispatch(wire, queue, b"2")
    assert wire.is_silent(0.1), "one slot was freed, not three"


def test_ignored_ids_are_counted_in_the_log(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    wire.say(*[ack(queue, b"unknown") for _ in range(7)])
    wire.leave()
    lines = [line for line in room.broker.log().splitlines() if repr(queue.decode()) in line]
    assert any("count=7" in line for line in lines), lines


@pytest.mark.parametrize("ending", ["fin", "rst"])
def test_unacknowledged_messages_return_to_their_original_position(room: Room, ending: str) -> None:
    queue, wire = room.queue(), room.client()
    room.send(queue, b"1", b"2", b"3", b"4")
    wire.say(consume(queue, 3))
    ids = [expect_dispatch(wire, queue, content) for content in (b"1", b"2", b"3")]
    wire.say(ack(queue, ids[1]))
    expect_dispatch(wire, queue, b"4")
    room.send(queue, b"5")
    lose(room.broker, wire, ending)
    again = room.client()
    again.say(consume(queue, 9))
    assert expect_dispatch(again, queue, b"1") == ids[0]
    assert expect_dispatch(again, queue, b"3") == ids[2]
    expect_dispatch(again, queue, b"4")
    expect_dispatch(again, queue, b"5")


@pytest.mark.parametrize("ending", ["fin", "rst"])
def test_the_original_position_holds_after_others_took_later_ones(room: Room, ending: str) -> None:
    queue, first, second = room.queue(), room.client(), room.client()
    room.send(queue, b"1", b"2", b"3", b"4", b"5")
    first.say(consume(queue, 2))
    expect_dispatch(first, queue, b"1")
    expect_dispatch(first, queue, b"2")
    second.say(consume(queue, 1))
    third = expect_dispatch(second, queue, b"3")
    lose(room.broker, first, ending)
    second.say(ack(queue, third))
    for content in (b"1", b"2", b"4", b"5"):
        second.say(ack(queue, expect_dispatch(second, queue, content)))
    second.leave()
    room.expect_empty(queue)


def test_a_message_can_be_lost_any_number_of_times(room: Room) -> None:
    queue = room.queue()
    room.send(queue, b"x")
    for _ in range(12):
        wire = room.client()
        wire.say(consume(queue, 1))
        expect_dispatch(wire, queue, b"x")
        wire.leave()


def test_requeue_puts_it_at_the_tail_with_the_new_ttl_and_the_same_id(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    room.send(queue, b"1", ttl=b"500")
    room.send(queue, b"2", b"3")
    wire.say(consume(queue, 1))
    message_id = expect_dispatch(wire, queue, b"1", b"500")
    wire.say(phpmq(5, (1, queue), (3, message_id), (5, b"60")))
    wire.say(ack(queue, expect_dispatch(wire, queue, b"2")))
    wire.say(ack(queue, expect_dispatch(wire, queue, b"3")))
    assert expect_dispatch(wire, queue, b"1", b"60") == message_id
    wire.say(ack(queue, message_id))
    wire.leave()
    room.expect_empty(queue)


def test_requeue_with_ttl_0_takes_the_ttl_away(room: Room) -> None:
    queue, clock, wire = room.queue(), room.queue(), room.client()
    wire.say(consume(queue, 1), phpmq(1, (1, queue), (2, b"x"), (5, b"1")))
    message_id = expect_dispatch(wire, queue, b"x", b"1")
    wire.say(phpmq(5, (1, queue), (3, message_id), (5, b"0")))
    assert expect_dispatch(wire, queue, b"x", b"0") == message_id
    wire.leave()
    room.send(clock, b"tick", ttl=b"1")
    witness = room.client()
    witness.say(consume(clock + b".dead", 1))
    expect_dispatch(witness, clock + b".dead", b"tick", b"0")
    again = room.client()
    again.say(consume(queue, 1))
    assert expect_dispatch(again, queue, b"x", b"0") == message_id


def test_the_ttl_of_a_requeue_begins_with_the_requeue(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    wire.say(consume(queue, 1), phpmq(1, (1, queue), (2, b"x")))
    message_id = expect_dispatch(wire, queue, b"x")
    wire.say(
        consume(queue, 0), phpmq(5, (1, queue), (3, message_id), (5, b"1")), consume(queue + b".dead", 1)
    )
    assert expect_dispatch(wire, queue + b".dead", b"x", b"0") == message_id


def test_the_requeued_ttl_outlives_a_lost_connection(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    wire.say(consume(queue, 1), phpmq(1, (1, queue), (2, b"x"), (5, b"1")))
    message_id = expect_dispatch(wire, queue, b"x", b"1")
    wire.say(phpmq(5, (1, queue), (3, message_id), (5, b"60")))
    expect_dispatch(wire, queue, b"x", b"60")
    wire.leave()
    again = room.client()
    again.say(consume(queue, 1))
    assert expect_dispatch(again, queue, b"x", b"60") == message_id


# --- dead letters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ttl", [None, b"60"])
def test_a_rejected_message_is_kept_as_a_dead_letter_whatever_ttl_it_has_left(
    room: Room, ttl: bytes | None
) -> None:
    queue, wire = room.queue(), room.client()
    room.send(queue, b"bad", ttl=ttl)
    wire.say(consume(queue, 1))
    message_id = expect_dispatch(wire, queue, b"bad", ttl)
    wire.say(phpmq(6, (1, queue), (3, message_id)))
    wire.leave()
    room.expect_empty(queue)
    undertaker = room.client()
    undertaker.say(consume(queue + b".dead", 1))
    assert expect_dispatch(undertaker, queue + b".dead", b"bad", ttl and b"0") == message_id


def test_a_dead_letter_does_not_expire(room: Room) -> None:
    queue, clock, wire = room.queue(), room.queue(), room.client()
    wire.say(consume(queue, 1), phpmq(1, (1, queue), (2, b"bad"), (5, b"1")))
    message_id = expect_dispatch(wire, queue, b"bad", b"1")
    wire.say(phpmq(6, (1, queue), (3, message_id)))
    wire.leave()
    room.send(clock, b"tick", ttl=b"1")
    witness = room.client()
    witness.say(consume(clock + b".dead", 1))
    expect_dispatch(witness, clock + b".dead", b"tick", b"0")
    undertaker = room.client()
    undertaker.say(consume(queue + b".dead", 1))
    assert expect_dispatch(undertaker, queue + b".dead", b"bad", b"0") == message_id


def test_an_acknowledged_dead_letter_is_settled_for_good(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    ids = room.kill(queue, b"1", b"2")
    wire.say(consume(queue + b".dead", 1))
    assert expect_dispatch(wire, queue + b".dead", b"1") == ids[0]
    wire.say(ack(queue + b".dead", ids[0]))
    assert expect_dispatch(wire, queue + b".dead", b"2") == ids[1]
    wire.say(ack(queue + b".dead", ids[1]))
    wire.leave()
    room.expect_no_dead(queue)
    room.expect_empty(queue)


@pytest.mark.parametrize("ending", ["fin", "rst"])
def test_a_dead_letter_whose_consumer_is_lost_goes_behind_the_other_dead_ones(
    room: Room, ending: str
) -> None:
    queue = room.queue()
    room.kill(queue, b"1", b"2", b"3")
    for content in (b"1", b"2", b"3", b"1"):
        wire = room.client()
        wire.say(consume(queue + b".dead", 1))
        expect_dispatch(wire, queue + b".dead", content)
        lose(room.broker, wire, ending)


@pytest.mark.parametrize("type_", [5, 6])
def test_a_dead_letter_that_is_requeued_or_rejected_goes_behind_the_other_dead_ones(
    room: Room, type_: int
) -> None:
    queue, wire = room.queue(), room.client()
    ids = room.kill(queue, b"1", b"2")
    dead = queue + b".dead"
    wire.say(consume(dead, 1))
    assert expect_dispatch(wire, dead, b"1") == ids[0]
    wire.say(phpmq(type_, (1, dead), (3, ids[0]), *([(5, b"1")] if type_ == 5 else [])))
    assert expect_dispatch(wire, dead, b"2") == ids[1]
    wire.say(ack(dead, ids[1]))
    assert expect_dispatch(wire, dead, b"1") == ids[0]
    wire.leave()
    room.expect_empty(queue)


def test_a_dead_letter_can_only_be_settled_through_its_own_door(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    (message_id,) = room.kill(queue, b"1")
    wire.say(consume(queue + b".dead", 1))
    expect_dispatch(wire, queue + b".dead", b"1")
    wire.say(ack(queue, message_id))
    wire.leave()
    again = room.client()
    again.say(consume(queue + b".dead", 1))
    assert expect_dispatch(again, queue + b".dead", b"1") == message_id


def test_what_is_sent_to_the_dead_letter_door_is_not_stored(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    wire.say(phpmq(1, (1, queue + b".dead"), (2, b"smuggled")) * 3)
    wire.say(consume(queue, 9), phpmq(1, (1, queue), (2, b"the connection goes on")))
    expect_dispatch(wire, queue, b"the connection goes on")
    assert wire.is_silent(0.05)
    wire.leave()
    room.expect_no_dead(queue + b"-unrelated")
    undertaker = room.client()
    undertaker.say(consume(queue + b".dead", 9))
    assert undertaker.is_silent(0.1)
    assert repr((queue + b".dead").decode()) in room.broker.log(), "and the log says so"


def test_with_dead_letters_off_what_is_rejected_is_gone(room: Room) -> None:
    queue = room.queue("no-dead")
    room.kill(queue, b"gone")
    room.expect_empty(queue)
    undertaker = room.client()
    undertaker.say(consume(queue + b".dead", 9))
    assert undertaker.is_silent(0.1)


def test_max_deliveries_makes_a_dead_letter_of_what_is_lost_too_often(room: Room) -> None:
    queue = room.queue("two")
    room.send(queue, b"poison", b"fine")
    for _ in range(2):
        wire = room.client()
        wire.say(consume(queue, 1))
        message_id = expect_dispatch(wire, queue, b"poison")
        wire.leave()
    wire = room.client()
    wire.say(consume(queue, 1))
    wire.say(ack(queue, expect_dispatch(wire, queue, b"fine")))
    wire.say(consume(queue + b".dead", 1))
    assert expect_dispatch(wire, queue + b".dead", b"poison") == message_id


# --- what is malformed -------------------------------------------------------------------------------

QUEUE = b"P01" + b"1".zfill(NARROW_DIGITS) + b"q"
CONTENT = b"P02" + b"1".zfill(NARROW_DIGITS) + b"x"
ID = b"P03" + b"1".zfill(NARROW_DIGITS) + b"i"


def packet(type_: bytes, content: bytes, digits: int = NARROW_DIGITS) -> bytes:
    return b"P" + type_ + str(len(content)).encode().zfill(digits) + content


MALFORMED = {
    "flag letter of the message": b"X0100102" + QUEUE + CONTENT,
    "flag letter in lower case": b"h0100102" + QUEUE + CONTENT,
    "flag letter of a packet": b"H0100102" + QUEUE + b"Q" + CONTENT[1:],
    "flag letter of the first packet": b"H0100102" + b"Q" + QUEUE[1:] + CONTENT,
    "version": b"H0200102" + QUEUE + CONTENT,
    "version not digits": b"H0a00102" + QUEUE + CONTENT,
    "unknown message type": b"H0100702" + QUEUE + CONTENT,
    "message type 000": b"H0100002" + QUEUE + CONTENT,
    "message type that only the server sends": b"H0100303" + QUEUE + CONTENT + ID,
    "packet count not digits": b"H01001 2" + QUEUE + CONTENT,
    "packet count 0": b"H0100100" + QUEUE + CONTENT,
    "packet count over the limit": b"H0100199" + QUEUE + CONTENT,
    "length not digits": b"H0100102" + QUEUE + b"P02" + b"-1".zfill(NARROW_DIGITS) + b"x",
    "length with a blank": b"H0100102" + b"P01" + b"1".rjust(NARROW_DIGITS) + b"q" + CONTENT,
    "unknown packet": b"H0100103" + QUEUE + CONTENT + packet(b"06", b"y"),
    "packet that does not belong there": b"H0100103" + QUEUE + CONTENT + packet(b"04", b"1"),
    "duplicate packet": b"H0100103" + QUEUE + CONTENT + CONTENT,
    "duplicate queue": b"H0100103" + QUEUE + QUEUE + CONTENT,
    "fewer packets than announced": b"H0100103" + QUEUE + CONTENT + b"H0100102" + QUEUE + CONTENT,
    "more packets than announced": b"H0100102" + QUEUE + CONTENT + packet(b"05", b"1"),
    "a packet is missing": b"H0100101" + QUEUE + CONTENT,
    "consume without a count": b"H0100201" + QUEUE,
    "acknowledge without an id": b"H0100401" + QUEUE,
    "re-queue without a TTL": b"H0100502" + QUEUE + ID,
    "content over the limit": b"H0100102" + QUEUE + b"P02" + b"67108865".zfill(NARROW_DIGITS) + b"x",
    "29 digits of a length": b"H0100102" + QUEUE + b"P02" + b"9" * NARROW_DIGITS + b"x",
    "33 digits of a length": b"H0100102"
    + packet(b"01", b"q", WIDE_DIGITS)
    + b"P02"
    + b"9" * WIDE_DIGITS
    + b"x",
    "queue name of no bytes": b"H0100102" + packet(b"01", b"", WIDE_DIGITS) + CONTENT,
    "queue name over the limit": b"H0100102" + packet(b"01", b"q" * 256) + CONTENT,
    "queue name of 10,000 bytes": b"H0100102" + packet(b"01", b"q" * 10_000) + CONTENT,
    "queue name that is not text": b"H0100102" + packet(b"01", b"\xff\xfe") + CONTENT,
    "queue name with a line break": b"H0100102" + packet(b"01", b"a\nb") + CONTENT,
    "count not digits": b"H0100202" + QUEUE + packet(b"04", b"ten"),
    "count below 0": b"H0100202" + QUEUE + packet(b"04", b"-1"),
    "count of no bytes": b"H0100202" + QUEUE + packet(b"04", b""),
    "count over the limit": b"H0100202" + QUEUE + packet(b"04", b"9" * 40),
    "TTL not digits": b"H0100103" + QUEUE + CONTENT + packet(b"05", b"1.5"),
    "TTL over the limit": b"H0100103" + QUEUE + CONTENT + packet(b"05", b"9" * 40),
    "no line break after a packet header": b"H0100102\n" + QUEUE + b"\n" + CONTENT,
    "no line break after a content": b"H0100102\n" + QUEUE.replace(b"q", b"\nq") + CONTENT,
    "another protocol": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_anything_malformed_closes_that_connection_only(room: Room, kind: str) -> None:
    queue = room.queue()
    bad, worker, sender = room.client(), room.client(), room.client()
    room.send(queue, b"1", b"2", b"3")
    bad.say(consume(queue, 1))
    held = expect_dispatch(bad, queue, b"1")
    worker.say(consume(queue, 1))
    expect_dispatch(worker, queue, b"2")
    bad.say(phpmq(1, (1, queue), (2, b"said before it")), MALFORMED[kind])
    assert bad.is_closed()
    worker.say(consume(queue, 9))  # and the others go on
    assert expect_dispatch(worker, queue, b"1") == held, "what it held is where it was"
    expect_dispatch(worker, queue, b"3")
    expect_dispatch(worker, queue, b"said before it")
    sender.say(phpmq(1, (1, queue), (2, b"said after it")))
    expect_dispatch(worker, queue, b"said after it")


def test_the_log_says_who_was_closed_and_why(room: Room) -> None:
    wire = room.client()
    wire.say(b"H0100102Z")
    assert wire.is_closed()
    port = wire.socket.getsockname()[1]
    lines = [line for line in room.broker.log().splitlines() if f"127.0.0.1:{port}#" in line]
    assert any("closed phpmq connection" in line and "5a" in line for line in lines), lines


def test_a_message_that_is_never_finished_is_not_stored(room: Room) -> None:
    queue, wire = room.queue(), room.client()
    wire.say(phpmq(1, (1, queue), (2, b"whole")), phpmq(1, (1, queue), (2, b"cut off"))[:-1])
    wire.leave()
    worker = room.client()
    worker.say(consume(queue, 9))
    worker.say(ack(queue, expect_dispatch(worker, queue, b"whole")))
    worker.leave()
    room.expect_empty(queue)


STORED = phpmq(2, (1, b"penstock:stored"), (4, b"0"))
"""The question whether everything is stored."""


def stored(refused: bytes) -> bytes:
    return phpmq(3, (1, b"penstock:stored"), (2, refused), (3, b"0" * 32))


def test_the_question_what_is_stored_is_answered(room: Room) -> None:
    queue = room.queue()
    client = room.client()
    client.say(STORED)
    client.expect(stored(b"0"))
    client.say(phpmq(1, (1, queue), (2, b"a")), consume(queue, 2), phpmq(1, (1, queue), (2, b"b")))
    ids = [expect_dispatch(client, queue, content) for content in (b"a", b"b")]
    client.say(*[phpmq(4, (1, queue), (3, message_id)) for message_id in ids], STORED)
    client.expect(stored(b"0"))
    client.leave()
    room.expect_empty(queue)


def test_the_question_is_answered_in_its_own_dialect(room: Room) -> None:
    client = room.client()
    client.say(phpmq(2, (1, b"penstock:stored"), (4, b"0"), width=36, newline=b"\n"))
    client.expect(phpmq(3, (1, b"penstock:stored"), (2, b"0"), (3, b"0" * 32), width=36, newline=b"\n"))
