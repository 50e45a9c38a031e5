"""The broker after another broker: claims, demands that were in force, and what is handed out meanwhile."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker import settling
from penstock.model.batch import Batch
from penstock.model.life import Event
from penstock.model.words import Cancel, Closing, Consume, Outcome, Publish, Settle, Where
from tests.broker.test_broker import SECOND, FakePort, House


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def house(folder: Path) -> Iterator[House]:
    house = House(folder)
    yield house
    house.log.close(house.now)


def turn(house: House) -> None:
    house.broker.turn(house.now)
    house.log.wait()


def fill(house: House, count: int, *, ttl_seconds: int = 0) -> bytes:
    """Messages in the queue; the origin of their ids."""
    sender = house.port("sender")
    ttl = [ttl_seconds] * count if ttl_seconds else None
    sender.say(Publish("q", Batch.of([b"%d" % n for n in range(count)], ttl_seconds=ttl)))
    turn(house)
    (piece, *_) = house.log.read("q", 0, count)
    return piece.origin


def counts(house: House) -> tuple[int, int, int]:
    info = house.log.describe("q")
    return info.ready, info.held, info.dead


def test_what_was_claimed_is_not_given_out_and_can_be_settled(house: House) -> None:
    origin = fill(house, 5)
    house.broker.wait_for_claims(True)
    ann, bob = house.port("ann"), house.port("bob")
    bob.say(Consume("q", 0))
    turn(house)
    assert bob.got == []
    assert house.broker.claim(ann, "q", False, origin, [(0, 3)], house.now) == [(0, 3)]
    house.broker.wait_for_claims(False)
    turn(house)
    assert bob.offsets() == [3, 4]
    ann.say(Settle("q", Outcome.ACK, origin, [(0, 3)]))
    assert counts(house) == (0, 2, 0)
    assert ann.heard("log") == []


def test_who_comes_again_while_what_it_lost_goes_back_keeps_what_it_claims(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of another front-end has the same name again. What goes back, goes in slices, by that name."""
    monkeypatch.setattr(settling, "RUNS_A_TURN", 1)
    origin = fill(house, 10)
    ann = house.port("ann")
    ann.say(Consume("q", 0))
    turn(house)
    held = [(offset, offset + 1) for offset in range(0, 10, 2)]
    ann.say(Settle("q", Outcome.ACK, origin, [(end, end + 1) for _, end in held]))
    house.broker.detach(ann, house.now)
    assert counts(house) == (1, 4, 0)
    ann = house.port("ann")
    assert house.broker.claim(ann, "q", False, origin, held, house.now) == held
    for _ in range(5):
        turn(house)
    assert counts(house) == (0, 5, 0)
    ann.say(Settle("q", Outcome.ACK, origin, held))
    assert counts(house) == (0, 0, 0)
    assert ann.heard("log") == []


def test_what_is_claimed_in_vain_takes_room_until_it_is_settled(house: House) -> None:
    origin = fill(house, 6)
    ann, bob = house.port("ann"), house.port("bob")
    bob.say(Consume("q", 2))
    turn(house)
    assert bob.offsets() == [0, 1]
    # The client of ann has these too, from an earlier life, and a window of four.
    assert house.broker.claim(ann, "q", False, origin, [(0, 4)], house.now) == [(2, 4)]
    house.broker.rejoin(ann, Consume("q", 4), house.now)
    turn(house)
    assert ann.got == []
    ann.say(Settle("q", Outcome.ACK, origin, [(0, 2)]))
    turn(house)
    assert ann.offsets() == [4, 5]
    assert ann.heard("log") == []
    assert counts(house) == (0, 6, 0)
    # Whoever really had them can still settle them.
    bob.say(Settle("q", Outcome.ACK, origin, [(0, 2)]))
    assert counts(house) == (0, 4, 0)


def test_a_port_with_claims_that_leaves_gives_back_what_is_its_own(house: House) -> None:
    origin = fill(house, 4)
    ann, bob = house.port("ann"), house.port("bob")
    bob.say(Consume("q", 1))
    turn(house)
    house.broker.claim(ann, "q", False, origin, [(0, 2)], house.now)
    house.broker.detach(ann, house.now)
    assert counts(house) == (3, 1, 0)


def test_demands_that_were_in_force_come_before_those_that_were_not(house: House) -> None:
    fill(house, 3)
    house.broker.wait_for_claims(True)
    waiting, active = house.port("waiting"), house.port("active")
    waiting.say(Consume("q", 0, exclusive=True))
    house.broker.rejoin(active, Consume("q", 0, exclusive=True), house.now)
    assert active.heard("consuming") == ["q"]
    assert waiting.heard("consuming") == []
    house.broker.wait_for_claims(False)
    turn(house)
    assert active.offsets() == [0, 1, 2]
    assert waiting.heard("consuming") == []
    house.broker.detach(active, house.now)
    turn(house)
    assert waiting.offsets() == [0, 1, 2]


def test_demands_that_end_before_they_count(house: House) -> None:
    fill(house, 3)
    house.broker.wait_for_claims(True)
    ceased, gone = house.port("ceased"), house.port("gone")
    ceased.say(Consume("q", 0))
    ceased.say(Cancel("q"))
    gone.say(Consume("q", 0))
    house.broker.detach(gone, house.now)
    house.broker.wait_for_claims(False)
    turn(house)
    assert ceased.got == gone.got == []
    assert house.broker.doors.consumer_count("q") == 0


def test_what_may_be_held_does_not_expire(house: House) -> None:
    origin = fill(house, 2, ttl_seconds=1)
    house.broker.wait_for_claims(True)
    house.now += 5 * SECOND
    house.broker.tick(house.now)
    assert counts(house) == (2, 0, 0)
    ann = house.port("ann")
    assert house.broker.claim(ann, "q", False, origin, [(0, 1)], house.now) == [(0, 1)]
    house.broker.wait_for_claims(False)
    house.broker.tick(house.now)
    assert counts(house) == (0, 1, 1)


@pytest.mark.parametrize("dead", [False, True])
def test_what_did_not_reach_its_client_goes_back_uncounted(house: House, dead: bool) -> None:
    origin = fill(house, 3)
    if dead:
        judge = house.port("judge")
        judge.say(Consume("q", 0))
        turn(house)
        judge.say(Settle("q", Outcome.REJECT, origin, [(0, 3)]))
        house.broker.detach(judge, house.now)
    ann = house.port("ann", lost_to=Where.TAIL)
    ann.say(Consume("q", 2, dead=dead))
    turn(house)
    assert ann.offsets() == [0, 1]
    ann.say(Cancel("q", dead=dead))
    house.broker.take_back(ann, "q", dead, [(0, 2)], house.now)
    turn(house)
    assert counts(house) == ((0, 0, 3) if dead else (3, 0, 0))
    bob = house.port("bob")
    bob.say(Consume("q", 0, dead=dead))
    turn(house)
    assert bob.offsets() == [0, 1, 2]
    assert house.broker.is_drained is False
    house.broker.detach(bob, house.now)
    assert house.broker.is_drained


def test_a_port_that_is_not_lost_leaves_without_a_count(house: House) -> None:
    sender = house.port("sender")
    sender.say(Publish("q", Batch.of([b"x"], retries=[0])))
    ann = house.port("ann", lost_to=Where.TAIL)
    ann.say(Consume("q", 0))
    turn(house)
    house.broker.detach(ann, house.now, lost=False)
    turn(house)
    assert counts(house) == (1, 0, 0)  # Lost, it would be a dead letter.
    events = [run.event for run in house.log.events("q", 0, 9)]
    assert events == [Event.ACCEPTED, Event.RETURNED]


def test_claims_for_a_name_that_cannot_be_are_refused(house: House) -> None:
    ann: FakePort = house.port("ann")
    assert house.broker.claim(ann, "", False, b"0" * 18, [(0, 1)], house.now) == []
    assert len(ann.heard("log")) == 1


def test_what_is_claimed_of_a_queue_that_is_not_there_can_be_let_go(house: House) -> None:
    ann, bob = house.port("ann"), house.port("bob")
    assert house.broker.claim(ann, "lost", False, b"", [(0, 2)], house.now) == []
    # The name is forgotten with its last consumer, not what ann has of it.
    bob.say(Consume("lost", 1), Cancel("lost"))
    ann.say(Settle("lost", Outcome.ACK, b"", [(0, 2)]))
    ann.say(Closing())
    assert ann.told == [("finished", None)]
