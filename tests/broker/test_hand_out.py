"""Who gets what is ready: whoever has room, and no more at once than it can take."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.hand_out import DISPATCH_BYTES
from penstock.model.batch import Batch, Slice
from penstock.model.policy import Policies
from penstock.model.words import Cancel, Closing, Consume, Outcome
from tests.broker.test_broker import FakePort, House, send, settle


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.log.close(house.now)


class NarrowPort(FakePort):
    """One that has places for so many deliveries, whatever its windows say."""

    places = 0

    def count_room(self) -> int:
        return self.places - len(self.got)


def narrow(house: House, name: str, places: int) -> NarrowPort:
    port = NarrowPort(house, name)
    port.places = places
    house.broker.attach(port)
    return port


def test_the_share_of_who_has_no_room_goes_to_others(house: House) -> None:
    sender, full, idle = house.port("s"), house.port("full"), house.port("idle")
    full.say(Consume("q", 0))
    idle.say(Consume("q", 0))
    full.room = 0
    sender.say(send("q", *[b"%d" % i for i in range(10)]))
    house.turn()
    assert (len(full.got), len(idle.got)) == (0, 10)


def test_a_higher_priority_without_room_keeps_nobody_waiting(house: House) -> None:
    sender, full, idle = house.port("s"), house.port("full"), house.port("idle")
    full.say(Consume("q", 0, priority=30))
    idle.say(Consume("q", 0, priority=10))
    full.room = 0
    sender.say(send("q", b"a"))
    house.turn()
    assert (full.payloads(), idle.payloads()) == ([], [b"a"])


def test_room_that_comes_back_is_used_at_every_door(house: House) -> None:
    sender, worker = house.port("s"), narrow(house, "w", 2)
    worker.say(Consume("p", 0), Consume("q", 0))
    sender.say(send("p", b"1", b"2"))
    house.turn()
    sender.say(send("q", b"3"))
    house.turn()
    assert worker.payloads() == [b"1", b"2"]
    worker.places = 3
    worker.say(settle(worker, "p", 0))
    house.turn()
    assert worker.payloads() == [b"1", b"2", b"3"]


def test_room_that_comes_back_without_a_word_is_found(house: House) -> None:
    sender, worker = house.port("s"), house.port("w")
    worker.say(Consume("q", 0))
    worker.room = 0
    sender.say(send("q", b"a"))
    house.turn()
    worker.room = 1
    house.tick()
    assert worker.payloads() == [b"a"]


def test_what_stood_behind_a_port_without_room_is_not_lost_with_it(house: House) -> None:
    sender, full, idle = house.port("s"), house.port("full"), house.port("idle")
    full.say(Consume("q", 0))
    full.room = 0
    sender.say(send("q", b"a"))
    house.turn()
    full.say(Cancel("q"))
    house.broker.detach(full, house.now)
    idle.say(Consume("q", 0))
    house.turn()
    assert idle.payloads() == [b"a"]


def test_who_is_blocked_or_silent_gets_nothing_from_a_new_demand(house: House) -> None:
    sender, blocked, silent = house.port("s"), house.port("b"), house.port("i")
    house.broker.blocked(blocked, True)
    house.broker.idle(silent, True)
    for port in (blocked, silent):
        port.say(Consume("q", 10))
    sender.say(send("q", b"a", b"b"))
    house.turn()
    assert (blocked.payloads(), silent.payloads()) == ([], [])
    house.broker.idle(silent, False)
    house.turn()
    assert silent.payloads() == [b"a", b"b"]
    sender.say(send("q", b"c"))
    house.broker.idle(silent, True)
    house.broker.blocked(blocked, False)
    house.turn()
    assert blocked.payloads() == [b"c"]


# --- exclusive or not, by a second demand --------------------------------------------------------


def test_a_second_demand_may_want_the_queue_for_itself(house: House) -> None:
    first, second = house.port("1", "rq"), house.port("2", "rq")
    first.say(Consume("q", 1), Consume("q", 1, exclusive=True))
    second.say(Consume("q", 1))
    assert second.heard("consuming") == []
    first.say(Consume("q", 1))
    assert second.heard("consuming") == ["q"]
    sender = house.port("s")
    sender.say(send("q", b"a", b"b"))
    house.turn()
    assert (first.payloads(), second.payloads()) == ([b"a"], [b"b"])


def test_who_wants_it_alone_waits_for_those_who_are_there(house: House) -> None:
    first, second, third = (house.port(name, "rq") for name in ("1", "2", "3"))
    first.say(Consume("q", 5))
    second.say(Consume("q", 5))
    sender = house.port("s")
    sender.say(send("q", b"a", b"b"))
    house.turn()
    first.say(Consume("q", 2, exclusive=True))
    third.say(Consume("q", 5))
    sender.say(send("q", b"c", b"d"))
    house.turn()
    assert (first.payloads(), second.payloads()) == ([b"a"], [b"b", b"c", b"d"])
    second.say(Cancel("q"))
    assert (len(first.heard("consuming")), third.heard("consuming")) == (2, [])
    sender.say(send("q", b"e", b"f"))
    house.turn()
    assert first.payloads() == [b"a", b"e"]  # it still holds one, and its window is 2
    first.say(Closing())
    house.turn()
    assert third.payloads() == [b"f"]


# --- how much at once ----------------------------------------------------------------------------


class CountingPort(FakePort):
    """Remembers how many messages came at once, and nothing else of them."""

    def __init__(self, house: House, name: str) -> None:
        super().__init__(house, name)
        self.counts: list[int] = []

    def deliver(self, queue: str, slices: list[Slice], now_us: int, dead: bool) -> None:
        self.counts.append(sum(map(len, slices)))


@pytest.mark.parametrize("payload", [b"", b"x" * 100])
def test_small_messages_count_for_what_is_written_around_them(house: House, payload: bytes) -> None:
    count = 20_000
    sender, worker = house.port("s"), CountingPort(house, "w")
    house.broker.attach(worker)
    worker.say(Consume("queue", 0))
    worker.room = 1 << 30
    sender.say(send("queue", *[payload] * count))
    for _ in range(count):
        house.turn()
        if sum(worker.counts) == count:
            break
    # Of the wires, PHPMQ writes most around a message: headers, and its id.
    assert max(worker.counts) * (len(payload) + 8 + 3 * 36 + 32 + len("queue")) <= 1.1 * DISPATCH_BYTES
    assert min(worker.counts[:-1]) > 500  # and yet it comes by the hundred
    assert sum(worker.counts) == count


def test_a_message_larger_than_the_room_comes_alone(house: House) -> None:
    sender, worker = house.port("s"), CountingPort(house, "w")
    house.broker.attach(worker)
    worker.say(Consume("q", 0))
    worker.room = 10
    sender.say(send("q", b"x" * 100, b"", b"y" * 100))
    house.turn()
    house.turn()
    assert worker.counts == [1, 1, 1]


# --- when something goes wrong at one door -------------------------------------------------------


class BrokenPort(FakePort):
    """Whose session cannot say what it should."""

    def deliver(self, queue: str, slices: list[Slice], now_us: int, dead: bool) -> None:
        raise RuntimeError("not today")


def test_an_error_at_one_door_keeps_neither_the_disk_nor_others_waiting(house: House) -> None:
    broken, worker, sender = BrokenPort(house, "b"), house.port("w"), house.port("s", "rq")
    house.broker.attach(broken)
    broken.say(Consume("a", 1))
    worker.say(Consume("b", 1))
    house.turn()
    sender.say(send("a", b"x", tickets=[1]), send("b", b"y", tickets=[2]))
    with pytest.raises(RuntimeError, match="not today"):
        house.broker.turn(house.now)
    house.log.wait()
    assert sender.heard("delivered") == [[1], [2]]
    house.turn()
    assert worker.payloads() == [b"y"]
    house.broker.detach(broken, house.now)
    worker.say(Consume("a", 1))
    house.turn()
    assert worker.payloads() == [b"y", b"x"]


def test_an_error_in_one_command_does_not_silence_the_port(house: House) -> None:
    broken = BrokenPort(house, "b")
    house.broker.attach(broken)

    def no_consuming(queue: str, dead: bool) -> None:
        raise RuntimeError("not today")

    broken.consuming = no_consuming  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        broken.say(Consume("q", 1))
    broken.say(Closing())
    assert broken.heard("finished") == [None]


# --- deliver-after -----------------------------------------------------------------------------------

CAREFUL = Policies({"q": {"deliver-after": "sync"}, "loose": {"deliver-after": "sync", "durability": "none"}})


@pytest.fixture
def careful(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, CAREFUL)
    yield house
    house.log.close(house.now)


def test_nobody_gets_what_a_crash_could_still_take(careful: House) -> None:
    sender, worker = careful.port("s"), careful.port("w")
    worker.say(Consume("q", 0), Consume("loose", 0), Consume("other", 0))
    sender.say(send("q", b"1", b"2"), send("other", b"o"), send("loose", b"l"))
    careful.broker.turn(careful.now)  # It is on its way to the disk.
    assert sorted(worker.payloads()) == [b"l", b"o"]
    assert careful.log.ready("q") == 0
    assert careful.log.describe("q").ready == 2
    careful.log.wait()
    careful.broker.turn(careful.now)  # Nobody has said anything since.
    assert sorted(worker.payloads()) == [b"1", b"2", b"l", b"o"]
    sender.say(send("q", b"3"))
    careful.turn()
    assert worker.payloads()[-1] == b"3"


def test_what_is_given_back_does_not_overtake_what_waits_for_the_disk(careful: House) -> None:
    sender, worker = careful.port("s"), careful.port("w")
    worker.say(Consume("q", 1))
    sender.say(send("q", b"1"))
    careful.turn()
    sender.say(send("q", b"2"))
    worker.say(settle(worker, "q", 0, Outcome.REQUEUE))
    careful.broker.turn(careful.now)
    assert worker.payloads() == [b"1"]
    careful.turn()
    worker.say(settle(worker, "q", 1))
    careful.turn()
    assert worker.payloads() == [b"1", b"2", b"1"]


def test_what_is_on_its_way_when_the_policy_changes_is_not_forgotten(house: House) -> None:
    sender, worker = house.port("s"), house.port("w")
    sender.say(send("q", b"1"))
    house.broker.turn(house.now)
    house.broker.set_policies(CAREFUL)
    worker.say(Consume("q", 0))
    house.broker.turn(house.now)
    assert worker.payloads() == []
    house.log.wait()
    house.broker.turn(house.now)
    assert worker.payloads() == [b"1"]


def test_a_commit_is_handed_out_when_it_is_stored(careful: House) -> None:
    worker = careful.port("w")
    worker.say(Consume("q", 0))
    careful.log.transact("key", [("q", Batch.of([b"1", b"2"]))], careful.now)
    careful.broker.stir("q")
    careful.broker.turn(careful.now)
    assert worker.payloads() == []
    careful.log.wait()
    careful.broker.turn(careful.now)
    assert worker.payloads() == [b"1", b"2"]
