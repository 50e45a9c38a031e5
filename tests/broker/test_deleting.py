"""Deleting queues beside a broker: who consumes, holds, asks and waits there; and those that nobody uses."""

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from penstock.broker import expiring
from penstock.broker.operate import Operator
from penstock.log.errors import LogRefused, QueueDeleted, QueueUnknown
from penstock.log.info import ARCHIVE_READERS, ReaderInfo
from penstock.model.batch import Batch
from penstock.model.policy import Policies
from penstock.model.words import Cancel, Consume, Outcome, Reply, Settle
from tests.broker.test_broker import SECOND, FakePort, House, send, settle
from tests.broker.test_operate import Office


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    office = Office(tmp_path)
    yield office
    office.log.close(office.now)


# --- who is there --------------------------------------------------------------------------------------


def test_a_queue_with_consumers_stays_unless_it_is_forced(office: Office) -> None:
    office.append("q", b"a", b"b")
    worker = office.port("w")
    worker.say(Consume("q", 1))
    office.turn()
    with pytest.raises(LogRefused, match=r"'q' has 1 consumers, who hold 1 messages.*with force"):
        office.operator.delete("q", office.now)
    worker.say(Cancel("q"))
    with pytest.raises(LogRefused, match="0 consumers, who hold 1 messages"):
        office.operator.delete("q", office.now)
    worker.say(settle(worker, "q", 0, Outcome.ACK))
    info = office.operator.delete("q", office.now)
    assert (info.ready, info.held, info.dead) == (1, 0, 0)
    assert office.log.queues() == []
    with pytest.raises(QueueUnknown):
        office.operator.delete("q", office.now)


def test_of_queues_that_are_gone_nothing_is_kept_for_whoever_lists_them(office: Office) -> None:
    """Perhaps nobody ever does: a reply queue for each job, each with another name, would stay for ever."""
    worker = office.port("w")
    for number in range(20):
        office.append(f"reply-{number}", b"a")
        worker.say(Consume(f"reply-{number}", 1), Cancel(f"reply-{number}"))
        office.operator.delete(f"reply-{number}", office.now)
    assert office.broker.hand_out.consumers_changed() == []


def test_consumers_of_a_forced_one_get_what_the_next_one_has(office: Office) -> None:
    office.append("q", b"old 0", b"old 1")
    worker, other = office.port("w"), office.port("o")
    worker.say(Consume("q", 1))
    other.say(Consume("q", 1, dead=True))
    office.turn()
    assert worker.payloads() == [b"old 0"]
    old = worker.origins[0]
    office.operator.delete("q", office.now, force=True)
    office.turn()
    assert office.broker.ports.attached[worker].holds == {}
    assert office.broker.doors.strangers == {"q"}
    office.append("q", b"new 0", b"new 1")
    office.turn()
    assert worker.payloads() == [b"old 0", b"new 0"]
    assert worker.origins[0] != old
    # It is done with the old one, which is nothing to the new one.
    worker.say(Settle("q", Outcome.ACK, old, [(0, 1)]))
    office.turn()
    assert any("does not hold" in str(text) for text in worker.heard("log"))
    assert worker.payloads() == [b"old 0", b"new 0"]
    assert office.log.describe("q").held == 1
    worker.say(Settle("q", Outcome.ACK, worker.origins[0], [(0, 1)]))
    office.turn()
    assert worker.payloads() == [b"old 0", b"new 0", b"new 1"]
    assert office.broker.doors.strangers == set()


def test_who_leaves_with_messages_of_a_deleted_queue_gives_nothing_back(office: Office) -> None:
    office.append("q", b"old")
    worker = office.port("w")
    worker.say(Consume("q", 1))
    office.turn()
    office.operator.delete("q", office.now, force=True)
    office.append("q", b"new")
    office.broker.detach(worker, office.now)
    office.turn()
    assert (office.log.describe("q").ready, office.log.describe("q").held) == (1, 0)
    assert office.log.describe("q").offset_end == 1


def undelivered(asker: FakePort) -> list[int]:
    return sorted(ticket for told in asker.heard("undelivered") for ticket in cast(list[int], told))


def test_whoever_waits_for_an_answer_is_told_that_none_comes(office: Office) -> None:
    asker, worker = office.port("a", "rq"), office.port("w", "rq")
    worker.say(Consume("q", 1))
    asker.say(send("q", b"with the worker", b"in the queue", tickets=[5, 6], wants_reply=True))
    office.turn()
    asker.say(send("q", b"not synced", tickets=[7], wants_reply=True))
    old = worker.origins[0]
    office.operator.delete("q", office.now, force=True)
    assert undelivered(asker) == [5, 6, 7]
    asker.say(send("q", b"anew", tickets=[8], wants_reply=True))
    office.turn()
    assert worker.payloads() == [b"with the worker", b"anew"]
    worker.say(Reply("q", old, array("q", [0]), Batch.of([b"too late"])))
    office.turn()
    assert asker.heard("replies") == []
    worker.say(Reply("q", worker.origins[0], array("q", [0]), Batch.of([b"in time"])))
    office.turn()
    assert asker.heard("replies") == [[(8, b"in time")]]
    assert undelivered(asker) == [5, 6, 7]


def test_a_sender_that_goes_on_makes_the_queue_anew(office: Office) -> None:
    sender = office.port("s", "rq")
    for _ in range(3):
        sender.say(send("q", b"x", tickets=[1]))
        office.operator.delete("q", office.now)
        sender.say(send("q", b"y", tickets=[2]))
        office.turn()
        assert office.log.describe("q").offset_end == 1
        office.operator.delete("q", office.now)
    office.turn()
    assert sender.heard("delivered") == [[1], [2]] * 3


def test_who_waits_for_room_in_a_deleted_queue_has_it(tmp_path: Path) -> None:
    house = House(tmp_path, Policies({"*": {"max-bytes": 3}}))
    sender = house.port("s")
    sender.say(send("q", b"abc"), send("q", b"def"))
    house.turn()
    assert house.broker.holds_back == 1
    Operator(house.broker, house.log).delete("q", house.now)
    house.tick()
    assert house.broker.holds_back == 0
    assert house.log.describe("q").offset_end == 1
    house.log.close(house.now)


def test_queues_max_counts_those_that_are_there(tmp_path: Path) -> None:
    office = Office(tmp_path, queues_max=2)
    for name in ("a", "b"):
        office.append(name, b"x")
    for number in range(5):
        with pytest.raises(LogRefused, match="queues-max"):
            office.append(f"more {number}", b"x")
        office.operator.delete("b" if not number else f"more {number - 1}", office.now)
        office.append(f"more {number}", b"x")
    assert office.log.queues() == ["a", "more 4"]
    office.log.close(office.now)


def test_long_work_does_not_go_on_in_another_queue(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.broker.operate.RUNS_A_STEP", 1)
    office.kill("q", 5)
    for work in (
        office.operator.purge("q", office.now, dead=True),
        office.operator.redrive("q", office.now),
    ):
        assert next(work) == 1
        office.operator.delete("q", office.now)
        office.kill("q", 5)
        with pytest.raises(QueueDeleted):
            next(work)
        assert office.log.describe("q").dead == 5


def test_a_round_of_rows_passes_over_those_that_are_gone(office: Office) -> None:
    for name in ("a", "b", "c"):
        office.append(name, b"x")
    rows, more = office.operator.changed_rows(1, every=True)
    assert [row.info.name for row in rows] == ["a"]
    assert more
    office.operator.delete("b", office.now)
    rows, more = office.operator.changed_rows(5)
    assert [row.info.name for row in rows] == ["c"]
    assert list(office.log.deleted) == ["b"]


# --- those that nobody uses ------------------------------------------------------------------------------


@pytest.fixture
def brief(tmp_path: Path) -> Iterator[Office]:
    office = Office(tmp_path, Policies({"brief.*": {"expire-seconds": 60, "retention-seconds": 0}}))
    yield office
    office.log.close(office.now)


def wait(office: Office, seconds: int) -> None:
    for _ in range(seconds):
        office.tick(1)


def drain(office: Office, queue: str) -> None:
    worker = office.port("drain")
    worker.say(Consume(queue, 0))
    office.turn()
    for offset in worker.offsets():
        worker.say(settle(worker, queue, offset, Outcome.ACK))
    office.broker.detach(worker, office.now)
    office.turn()


def test_an_empty_queue_that_nobody_uses_is_deleted(brief: Office) -> None:
    for name in ("brief.a", "brief.full", "kept"):
        brief.append(name, b"x")
    for name in ("brief.a", "kept"):
        drain(brief, name)
    wait(brief, 55)
    assert brief.log.queues() == ["brief.a", "brief.full", "kept"]
    wait(brief, 20)
    assert brief.log.queues() == ["brief.full", "kept"]
    drain(brief, "brief.full")
    wait(brief, 80)
    assert brief.log.queues() == ["kept"]


def test_whoever_uses_it_keeps_it(brief: Office) -> None:
    names = ("brief.consumed", "brief.paused", "brief.read", "brief.letters", "brief.busy")
    for name in names:
        brief.append(name, b"x")
        if name != "brief.letters":
            drain(brief, name)
    brief.kill("brief.letters", 1)
    brief.port("w").say(Consume("brief.consumed", 1))
    brief.operator.pause("brief.paused", True, brief.now)
    reader = ReaderInfo("spark", "brief.read", "messages", 1, brief.now + 1000 * SECOND)
    brief.log.hold_retention(reader, brief.now)
    for _ in range(10):
        brief.append("brief.busy", b"x")
        drain(brief, "brief.busy")
        wait(brief, 20)
    assert sorted(brief.log.queues()) == sorted(names)
    brief.operator.pause("brief.paused", False, brief.now)
    brief.log.release_retention("spark", brief.now)
    wait(brief, 130)
    assert sorted(brief.log.queues()) == ["brief.consumed", "brief.letters"]


def test_what_is_archived_may_go(brief: Office) -> None:
    """The archiver is there for every queue, for ever: what it has not got yet keeps a queue, and no more."""
    names = ("brief.whole", "brief.messages", "brief.events")
    for name in names:
        brief.append(name, b"x")
        drain(brief, name)
        info = brief.log.describe(name)
        for view, end in (("messages", info.offset_end), ("events", info.event_end)):
            at = end - 1 if name.endswith(view) else end
            reader = ReaderInfo(ARCHIVE_READERS[view], name, view, at, brief.now + 10**6 * SECOND)
            brief.log.hold_retention(reader, brief.now)
    wait(brief, 130)
    assert sorted(brief.log.queues()) == ["brief.events", "brief.messages"]


def test_so_does_what_comes_later(brief: Office) -> None:
    batch = Batch.of([b"x"], delay_us=[1000 * SECOND])
    brief.log.append("brief.later", batch, brief.now)
    wait(brief, 130)
    assert brief.log.describe("brief.later").delayed == 1


def test_a_leap_of_the_clock_is_no_rest(brief: Office) -> None:
    brief.append("brief.a", b"x")
    drain(brief, "brief.a")
    wait(brief, 3)
    brief.now -= 3600 * SECOND
    wait(brief, 10)
    assert brief.log.queues() == ["brief.a"]
    brief.log.set_policies(Policies({"*": {"expire-seconds": 1000}}))
    brief.now += 30 * 24 * 3600 * SECOND
    wait(brief, 3)
    assert brief.log.queues() == ["brief.a"]


def test_many_are_looked_at_by_and_by(brief: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiring, "QUEUES_A_TICK", 3)
    for number in range(10):
        brief.log.declare(f"brief.{number}", brief.now)
    wait(brief, 20)
    before = len(brief.log.queues())
    assert before == 10
    wait(brief, 70)
    assert brief.log.queues() == []


def test_a_name_that_somebody_waits_for_counts_once_when_it_is_a_queue(tmp_path: Path) -> None:
    office = Office(tmp_path, queues_max=2)
    worker, sender = office.port("w"), office.port("s")
    worker.say(Consume("a", 1))
    sender.say(send("a", b"x"))
    office.turn()
    sender.say(send("b", b"y"), send("c", b"z"))
    office.turn()
    assert office.log.queues() == ["a", "b"]
    office.log.close(office.now)
