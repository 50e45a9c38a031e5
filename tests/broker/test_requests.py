"""Requests: each ends once, with its own answer, and its sender hears of both in order."""

import gc
import random
import weakref
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.broker import requests, settling
from penstock.broker.asked import Asked, addresses, parse_address
from penstock.broker.operate import Operator
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.policy import Policies
from penstock.model.words import Accepted, Consume, Outcome, Reply, Where, ranges_of
from tests.broker.test_broker import FakePort, House, send, settle
from tests.build import interpreted_only


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.log.close(house.now)


def answer(port: FakePort, queue: str, offset: int, text: bytes) -> Reply:
    return Reply(queue, port.origins[offset], array("q", [offset]), Batch.of([text]))


def exchange(port: FakePort) -> list[tuple[str, object]]:
    """What a requester was told about its requests, in order."""
    return [told for told in port.told if told[0] in ("delivered", "replies", "undelivered")]


# --- whose answer it is --------------------------------------------------------------------------


def ask_and_die(house: House) -> None:
    """A request becomes a dead letter; its sender was the first port, and it was its first batch."""
    asker, worker = house.port("a", "rq"), house.port("w", "phpmq")
    worker.say(Consume("q", 1))
    asker.say(send("q", b"old", tickets=[5], wants_reply=True))
    house.turn()
    worker.say(settle(worker, "q", 0, Outcome.REJECT))
    house.turn()
    assert asker.heard("undelivered") == [[5]]


def test_an_answer_to_a_request_of_another_opening_goes_to_nobody(tmp_path: Path) -> None:
    before = House(tmp_path)
    ask_and_die(before)
    before.log.close(before.now)
    house = House(tmp_path)
    newcomer = house.port("b", "rq")  # with the numbers that the asker had
    newcomer.say(send("other", b"mine", tickets=[5], wants_reply=True))
    house.turn()
    sum(Operator(house.broker, house.log).redrive("q", house.now))
    worker = house.port("w", "rq")
    worker.say(Consume("q", 5))
    house.turn()
    assert worker.payloads() == [b"old"]
    worker.say(Accepted("q", worker.origins[0], [(0, 1)]), answer(worker, "q", 0, b"to the old one"))
    house.turn()
    assert exchange(newcomer) == []
    assert house.log.describe("q").held == 0
    worker.say(Consume("other", 5))
    house.turn()
    assert worker.payloads() == [b"old", b"mine"]
    worker.say(answer(worker, "other", 0, b"to the new one"))
    assert exchange(newcomer) == [("delivered", [5]), ("replies", [(5, b"to the new one")])]
    house.log.close(house.now)


def test_an_address_that_names_no_opening_leads_nowhere(house: House) -> None:
    asker = house.port("a", "rq")
    asker.say(send("other", b"mine", tickets=[5], wants_reply=True))
    # As a log of an earlier version has it: port, batch, index.
    house.log.append("q", Batch.of([b"old"], reply=[b"1 0 0"], protocol="rq"), house.now)
    worker = house.port("w", "rq")
    worker.say(Consume("q", 5))
    house.turn()
    worker.say(Accepted("q", worker.origins[0], [(0, 1)]), answer(worker, "q", 0, b"no"))
    assert exchange(asker) == []


def one_by_one(house: House, runs: list[tuple[int, list[bytes]]]) -> dict[Asked, list[tuple[int, int]]]:
    """What the broker finds run by run, found by reading every address: index and offset."""
    found: dict[Asked, list[tuple[int, int]]] = {}
    for first, ways in runs:
        for offset, address in enumerate(ways, first):
            numbers = parse_address(address, house.log.opening)
            attached = house.broker.ports.by_number.get(numbers[0]) if numbers is not None else None
            asked = attached.asked.get(numbers[1]) if numbers is not None and attached is not None else None
            if numbers is not None and asked is not None and asked.is_open(numbers[2]):
                found.setdefault(asked, []).append((numbers[2], offset))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_addresses_are_found_by_runs_as_they_are_one_by_one(house: House, seed: int) -> None:
    """Whatever stands beside each other, and however much of a batch has ended: only the order inside of a
    batch is given."""
    rng = random.Random(seed)
    askers = [house.port(f"a{i}", "rq") for i in range(3)]
    for i in range(6):
        tickets = list(range(100 * i, 100 * i + rng.choice((1, 2, 9, 60))))
        askers[i % 3].say(send("q", *[b"x"] * len(tickets), tickets=tickets, wants_reply=True))
    attached = [house.broker.ports.attached[port] for port in askers]
    batches = {(one.number, number): asked for one in attached for number, asked in one.asked.items()}
    opening = house.log.opening
    for _ in range(60):
        runs: list[tuple[int, list[bytes]]] = []
        offset = 0
        for _ in range(rng.randint(1, 6)):
            pieces: list[bytes] = []
            for _ in range(rng.randint(1, 4)):
                (port, number), asked = rng.choice(list(batches.items()))
                whole = addresses(
                    rng.choice((opening, opening, opening + 1)), port, number, len(asked.tickets)
                )
                lo = rng.randrange(len(whole))
                pieces += whole[lo : rng.choice((lo + 1, len(whole), rng.randint(lo, len(whole))))]
                stray = b"%d %d %d 60" % (opening, port, number)
                pieces += rng.choice(([], [], [b""], [b"1 0 0"], [b"?"], [stray]))
            if pieces:
                runs.append((offset, pieces))
            offset += len(pieces) + rng.randint(0, 2)
        found = house.broker.requests.find_open(runs)
        expected = one_by_one(house, runs)
        assert {asked: list(zip(*rows, strict=True)) for asked, rows in found.items()} == expected
        asked = rng.choice(list(batches.values()))
        count = len(asked.tickets)
        lo = rng.randrange(count)
        some: Sequence[int] = range(lo, rng.randint(lo, count))
        if rng.random() < 0.5:
            some = rng.sample(range(count), rng.randint(0, count))
        before = [index for index in range(count) if asked.is_open(index)]
        news = {asked.tickets[i] for i in some if asked.is_open(i) and asked._open[i] == 1}
        assert set(asked.tell(some)) == news
        assert not asked.tell(some)
        if rng.random() < 0.3:
            asked.end(some)
            assert [i for i in range(count) if asked.is_open(i)] == [i for i in before if i not in some]
        assert asked.open_count == sum(map(asked.is_open, range(count)))


@pytest.mark.parametrize("seed", range(8))
def test_answers_in_any_order_reach_whoever_asked(house: House, seed: int) -> None:
    rng = random.Random(seed)
    askers = [house.port(f"a{i}", "rq") for i in range(3)]
    worker = house.port("w", "rq")
    worker.say(Consume("q", 0))
    question: dict[int, FakePort] = {}
    for _ in range(8):
        asker, count = rng.choice(askers), rng.choice((1, 2, 30))
        tickets = list(range(len(question), len(question) + count))
        question.update((ticket, asker) for ticket in tickets)
        asker.say(send("q", *[b"%d" % ticket for ticket in tickets], tickets=tickets, wants_reply=True))
        if rng.random() < 0.5:
            house.turn()
    house.turn()
    left = list(worker.got)
    if rng.random() < 0.7:
        rng.shuffle(left)
    while left:
        count = rng.choice((1, 5, 40, len(left)))
        some, left = left[:count], left[count:]
        offsets = array("q", [offset for _, offset, _ in some])
        if rng.random() < 0.5:
            worker.say(Accepted("q", worker.origins[offsets[0]], ranges_of(offsets)))
        answers = Batch.of([b"re: " + payload for _, _, payload in some])
        worker.say(Reply("q", worker.origins[offsets[0]], offsets, answers))
    for asker in askers:
        own = [ticket for ticket, port in question.items() if port is asker]
        replies = [pair for told in asker.heard("replies") for pair in cast("list[tuple[int, bytes]]", told)]
        assert sorted(replies) == [(ticket, b"re: %d" % ticket) for ticket in own]
        delivered = [ticket for told in asker.heard("delivered") for ticket in cast("list[int]", told)]
        assert sorted(delivered) == own
    assert not any(house.broker.ports.attached[asker].asked for asker in askers)


# --- delivered once, before the answer -----------------------------------------------------------


def test_whoever_died_in_between_delivered_is_told_once(house: House) -> None:
    asker = house.port("a", "rq")
    asker.say(send("q", b"x", b"y", tickets=[5, 6], wants_reply=True))
    for protocol in ("rq", "phpmq", "sspq", "rq"):
        lost = house.port(f"lost-{protocol}", protocol)
        lost.say(Consume("q", 5))
        house.turn()
        assert lost.payloads() == [b"x", b"y"]
        if protocol == "rq":
            lost.say(Accepted("q", lost.origins[0], [(0, 1)]))
        house.broker.detach(lost, house.now)
    worker = house.port("w", "rq")
    worker.say(Consume("q", 5))
    house.turn()
    worker.say(Accepted("q", worker.origins[0], [(0, 2)]))
    worker.say(Reply("q", worker.origins[0], array("q", [0, 1]), Batch.of([b"1", b"2"])))
    assert exchange(asker) == [
        ("delivered", [5]),
        ("delivered", [6]),
        ("replies", [(5, b"1"), (6, b"2")]),
    ]


def test_a_reply_without_delivered_comes_behind_one(house: House) -> None:
    asker, worker = house.port("a", "rq"), house.port("w", "rq")
    worker.say(Consume("q", 5))
    asker.say(send("q", b"x", b"y", tickets=[5, 6], wants_reply=True))
    house.turn()
    worker.say(answer(worker, "q", 1, b"2"))
    worker.say(Accepted("q", worker.origins[0], [(0, 2)]), answer(worker, "q", 0, b"1"))
    assert exchange(asker) == [
        ("delivered", [6]),
        ("replies", [(6, b"2")]),
        ("delivered", [5]),
        ("replies", [(5, b"1")]),
    ]


@pytest.mark.parametrize("protocol", ["phpmq", "sspq"])
def test_what_another_protocol_settles_was_delivered_once(house: House, protocol: str) -> None:
    asker, first = house.port("a", "rq"), house.port("w", "rq")
    first.say(Consume("q", 5))
    asker.say(send("q", b"x", tickets=[5], wants_reply=True))
    house.turn()
    first.say(Accepted("q", first.origins[0], [(0, 1)]))
    house.broker.detach(first, house.now)
    second = house.port("o", protocol, Where.TAIL)
    second.say(Consume("q", 1, once=protocol == "sspq"))
    house.turn()
    second.say(settle(second, "q", 0))
    assert exchange(asker) == [("delivered", [5]), ("replies", [(5, b"")])]


# --- every request ends --------------------------------------------------------------------------


def test_a_request_that_is_requeued_too_often_is_undelivered(tmp_path: Path) -> None:
    house = House(tmp_path, Policies({"q": {"max-deliveries": 2}}))
    asker, worker = house.port("a", "rq"), house.port("w", "phpmq")
    worker.say(Consume("q", 1))
    asker.say(send("q", b"x", tickets=[5], wants_reply=True))
    for _ in range(2):
        assert asker.heard("undelivered") == []
        house.turn()
        worker.say(settle(worker, "q", 0, Outcome.REQUEUE))
    assert asker.heard("undelivered") == [[5]]
    info = house.log.describe("q")
    assert (info.ready, info.dead) == (0, 0)
    house.log.close(house.now)


@pytest.mark.parametrize("reader", [False, True])
def test_a_request_whose_block_is_damaged_is_undelivered(tmp_path: Path, reader: bool) -> None:
    house = House(tmp_path, settings=LogSettings(cache_bytes=0))
    asker = house.port("a", "rq")
    asker.say(send("q", b"a rotten request", tickets=[5], wants_reply=True))
    asker.say(send("p", b"sound", tickets=[6], wants_reply=True))
    house.turn()
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes().replace(b"rotten", b"ROTTEN"))
    if reader:
        assert list(house.log.read("q", 0, 10)) == []
    worker = house.port("w", "rq")
    worker.say(Consume("p" if reader else "q", 5))
    house.turn()
    house.tick()
    assert asker.heard("undelivered") == [[5]]
    assert not house.broker.requests.is_asked("q")
    assert house.broker.requests.is_asked("p")
    house.log.close(house.now)


# --- what ended leaves nothing behind ------------------------------------------------------------


def test_answered_requests_are_forgotten_long_before_their_time_out(house: House) -> None:
    worker = house.port("w", "rq")
    worker.say(Consume("q", 0))
    stays = house.port("s", "rq")
    stays.say(send("q", b"open", tickets=[1], wants_reply=True, timeout=9))
    gone = []
    for number in range(50):
        asker = house.port(f"a{number}", "rq")
        asker.say(send("q", b"%d" % number, tickets=[5], wants_reply=True, timeout=65535))
        house.turn()
        offset = worker.offsets()[-1]
        if number % 2:
            worker.say(answer(worker, "q", offset, b"done"))
            assert exchange(asker)[-1] == ("replies", [(5, b"done")])
        house.broker.detach(asker, house.now)
        gone.append(weakref.ref(asker))
    del asker
    house.turn()
    gc.collect()
    assert [port for port in gone if port() is not None] == []
    house.tick(10)
    assert stays.heard("undelivered") == [[1]]


def test_a_requester_that_left_before_the_sync_is_forgotten_after_it(house: House) -> None:
    asker = house.port("a", "rq")
    asker.say(send("q", b"x", tickets=[5], wants_reply=True, timeout=65535))
    house.broker.detach(asker, house.now)
    gone = weakref.ref(asker)
    del asker
    house.turn()
    gc.collect()
    assert gone() is None
    assert house.log.describe("q").ready == 0


@interpreted_only  # The log's methods are counted.
def test_requests_that_end_together_are_taken_out_together(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each withdrawal, the log looks at everybody who holds something in that queue."""
    calls: list[str] = []
    withdraw = house.log.withdraw

    def counting(queue: str, *rest: Any) -> Any:  # as the log has it
        calls.append(queue)
        return withdraw(queue, *rest)

    monkeypatch.setattr(house.log, "withdraw", counting)
    askers = [house.port(f"a{number}", "rq") for number in range(12)]
    for number, asker in enumerate(askers):
        queue, timeout = ("q", "r")[number % 2], 10 * (number < 6)
        asker.say(send(queue, b"x", tickets=[number], wants_reply=True, timeout=timeout))
    house.turn()
    house.tick(11)
    house.turn()
    assert sorted(calls) == ["q", "r"]
    for asker in askers:
        house.broker.detach(asker, house.now)
    house.turn()
    assert sorted(calls) == ["q", "q", "r", "r"]
    assert [house.log.describe(queue).ready for queue in "qr"] == [0, 0]


@pytest.mark.parametrize("crash", [False, True])
def test_the_requests_of_one_who_leaves_are_withdrawn_some_in_each_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: bool
) -> None:
    monkeypatch.setattr(requests, "WITHDRAWN_A_TURN", 4)
    house = House(tmp_path)
    asker, worker = house.port("a", "rq"), house.port("w", "rq")
    worker.say(Consume("q", 5))
    asker.say(send("q", *[b"x"] * 7, tickets=range(7), wants_reply=True))
    asker.say(send("q", *[b"y"] * 13, tickets=range(10, 23), wants_reply=True))
    house.turn()
    worker.say(answer(worker, "q", 1, b"done"))
    house.turn()
    assert worker.offsets() == [0, 1, 2, 3, 4, 5]

    def left() -> int:
        info = house.log.describe("q")
        return info.ready + info.held

    house.broker.detach(asker, house.now)
    house.broker.turn(house.now)
    assert left() == 16  # of the first four offsets one was answered, the others are gone
    worker.say(answer(worker, "q", 4, b"too late for anybody"))
    house.broker.turn(house.now)
    if crash:
        house.log.wait()
        house.log.abandon()
        house = House(tmp_path)
    else:
        for _ in range(4):
            house.broker.turn(house.now)
        # It has room again for those that it worked on in vain, when it is done with them.
        worker.say(*[answer(worker, "q", offset, b"") for offset in worker.offsets() if offset not in (1, 4)])
        asker = house.port("b", "rq")
        asker.say(send("q", *[b"z"] * 6, tickets=range(6), wants_reply=True))
        house.turn()
        assert worker.payloads()[-5:] == [b"z"] * 5
        house.broker.detach(asker, house.now)
        house.turn()
        house.turn()
    assert left() == 0
    house.log.close(house.now)


def test_nothing_is_kept_of_a_consumer_that_is_lost_with_whom_it_worked_for(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it held goes back in slices, and some of that is withdrawn before it is its turn."""
    monkeypatch.setattr(requests, "WITHDRAWN_A_TURN", 4)
    monkeypatch.setattr(settling, "RUNS_A_TURN", 1)
    asker, worker = house.port("a", "rq"), house.port("w", "rq")
    worker.say(Consume("q", 0))
    asker.say(send("q", *[b"x"] * 20, tickets=range(20), wants_reply=True))
    house.turn()
    worker.say(*[answer(worker, "q", offset, b"done") for offset in range(0, 20, 2)])
    house.broker.detach(worker, house.now)
    house.broker.detach(asker, house.now)
    for _ in range(10):
        house.turn()
    info = house.log.describe("q")
    assert (info.ready, info.held) == (0, 0)
    assert list(house.broker.requests.by_queue["q"].orphans) == []


def test_time_outs_come_in_their_order_though_others_are_forgotten(house: House) -> None:
    asker, worker = house.port("a", "rq"), house.port("w", "rq")
    worker.say(Consume("q", 0))
    for ticket in range(100):
        asker.say(send("q", b"", tickets=[ticket], wants_reply=True, timeout=1 + (37 * ticket) % 100))
    house.turn()
    for ticket in range(0, 100, 3):
        worker.say(answer(worker, "q", ticket, b""))
    for _ in range(101):
        house.tick(1)
    timed_out = [ticket for ticket in range(100) if ticket % 3]
    assert asker.heard("undelivered") == [[t] for t in sorted(timed_out, key=lambda t: (37 * t) % 100)]


def test_a_clock_that_is_set_back_keeps_nobody_waiting(house: House) -> None:
    asker = house.port("a", "rq")
    asker.say(send("q", b"", tickets=[1], wants_reply=True, timeout=5))
    house.tick(2)
    house.tick(-3600)
    asker.say(send("q", b"", tickets=[2], wants_reply=True, timeout=4))
    house.tick(2)
    assert asker.heard("undelivered") == []
    house.tick(1)
    assert asker.heard("undelivered") == [[1]]
    house.tick(1)
    assert asker.heard("undelivered") == [[1], [2]]


def test_a_log_closes_though_a_requester_left_before_the_sync(tmp_path: Path) -> None:
    house = House(tmp_path)
    asker = house.port("a", "rq")
    asker.say(send("q", b"x", tickets=[5], wants_reply=True))
    house.broker.detach(asker, house.now)
    house.log.close(house.now)
    again = House(tmp_path)
    assert again.log.describe("q").ready == 0
    again.log.close(again.now)


def test_a_request_that_expires_before_its_sync_is_undelivered(tmp_path: Path) -> None:
    house = House(tmp_path)
    asker, worker = house.port("a", "rq"), house.port("w", "rq")
    worker.say(Consume("q", 5))
    request = send("q", b"x", tickets=[5], wants_reply=True)
    request.batch.ttl_seconds = array("q", [1])
    asker.say(request)
    house.now += 2_000_000
    house.broker.turn(house.now)  # finds it expired
    house.broker.tick(house.now)
    assert (worker.payloads(), asker.heard("undelivered")) == ([], [])
    house.log.wait()
    assert asker.heard("undelivered") == [[5]]
    house.log.close(house.now)
