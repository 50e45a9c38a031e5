"""The operator beside a broker and a real log: what it does is seen by everybody at once."""

from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker import operate
from penstock.broker.broker import Broker
from penstock.broker.operate import Draining, Operator, TooFast
from penstock.log import weight
from penstock.log.errors import LogError, LogRefused, QueueDeleted, QueueFull, QueueUnknown
from penstock.log.results import Stored, TransactionDone
from penstock.model.batch import Batch
from penstock.model.life import Event, Reason, State
from penstock.model.policy import Policies, QueueNameError
from penstock.model.words import Cancel, Consume, Outcome, Settle
from tests.broker.test_broker import FakePort, House, send, settle


class Office(House):
    """A house with an operator in it."""

    def __init__(self, folder: Path, policies: Policies | None = None, queues_max: int = 100_000) -> None:
        super().__init__(folder, policies)
        self.turns = 0
        self.broker = Broker(self.log, self.want_turn, queues_max=queues_max)
        self.operator = Operator(self.broker, self.log)

    def want_turn(self) -> None:
        self.turns += 1

    def append(self, queue: str, *messages: bytes) -> list[Stored | LogError]:
        came: list[Stored | LogError] = []
        self.operator.append(queue, Batch.of(messages, protocol="http"), self.now, came.append)
        return came

    def purge(self, queue: str, *, dead: bool = False) -> int:
        return sum(self.operator.purge(queue, self.now, dead=dead))

    def kill(self, queue: str, count: int) -> None:
        """Dead letters, each a run of its own: every second message is acknowledged."""
        worker = self.port("undertaker")
        worker.say(Consume(queue, 0))
        self.append(queue, *[b"%d" % i for i in range(2 * count)])
        self.turn()
        first = worker.offsets()[0]
        origin = worker.origins[first]
        for offset in range(first, first + 2 * count):
            outcome = Outcome.ACK if (offset - first) % 2 else Outcome.REJECT
            worker.say(Settle(queue, outcome, origin, [(offset, offset + 1)]))
        self.broker.detach(worker, self.now)
        self.turn()


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    office = Office(tmp_path)
    yield office
    office.log.close(office.now)


# --- messages --------------------------------------------------------------------------------


def test_what_is_appended_is_handed_out_and_the_receipt_comes_when_it_is_safe(office: Office) -> None:
    worker = office.port("w")
    worker.say(Consume("q", 10))
    office.turn()
    before = office.turns
    came = office.append("q", b"a", b"b")
    assert came == []
    assert office.turns > before
    office.turn()
    assert worker.payloads() == [b"a", b"b"]
    (stored,) = came
    assert isinstance(stored, Stored)
    assert (stored.queue, stored.first, stored.end) == ("q", 0, 2)


def test_a_name_that_no_queue_can_have_is_refused(office: Office) -> None:
    for name in ("", "q.dead", "a\nb", "x" * 300):
        with pytest.raises(QueueNameError):
            office.append(name, b"a")
        with pytest.raises(QueueNameError):
            office.operator.transact(
                "k", [("q", Batch.of([b"a"])), (name, Batch.of([b"a"]))], office.now, print
            )
    assert office.log.queues() == []


def test_queues_max_counts_here_too(tmp_path: Path) -> None:
    office = Office(tmp_path, queues_max=2)
    office.append("a", b"x")
    office.append("b", b"x")
    with pytest.raises(LogRefused, match="queues-max"):
        office.append("c", b"x")
    office.append("a", b"x")
    office.log.close(office.now)


def test_no_room_in_a_queue_is_said_and_nothing_waits(tmp_path: Path) -> None:
    office = Office(tmp_path, Policies({"*": {"max-bytes": 3}}))
    office.append("q", b"abc")
    with pytest.raises(QueueFull):
        office.append("q", b"d")
    assert office.broker.holds_back == 0
    office.log.close(office.now)


def test_a_transaction_is_handed_out_in_all_its_queues(office: Office) -> None:
    worker = office.port("w")
    worker.say(Consume("a", 10), Consume("b", 10))
    office.turn()
    came: list[TransactionDone | LogError] = []
    parts = [("a", Batch.of([b"1"])), ("b", Batch.of([b"2"]))]
    for _ in range(2):
        office.operator.transact("key", parts, office.now, came.append)
    office.turn()
    assert sorted(worker.payloads()) == [b"1", b"2"]
    assert [isinstance(done, TransactionDone) and done.repeated for done in came] == [False, True]


def test_a_broker_that_stops_takes_nothing_in(office: Office) -> None:
    office.append("q", b"a")
    office.broker.drain()
    with pytest.raises(Draining):
        office.append("q", b"b")
    with pytest.raises(Draining):
        office.operator.transact("k", [("q", Batch.of([b"a"]))], office.now, print)
    assert office.operator.unready == "the broker is stopping"


# --- knobs -----------------------------------------------------------------------------------


def test_a_paused_queue_hands_out_nothing_until_it_is_resumed(office: Office) -> None:
    worker = office.port("w")
    worker.say(Consume("q", 10))
    office.append("q", b"a")
    office.turn()
    office.operator.pause("q", True, office.now)
    office.append("q", b"b")
    office.turn()
    assert worker.payloads() == [b"a"]
    office.operator.pause("q", False, office.now)
    office.turn()
    assert worker.payloads() == [b"a", b"b"]


def test_who_waits_for_one_message_goes_on_waiting_while_the_queue_is_paused(office: Office) -> None:
    office.append("q", b"a")
    first, early, late = office.port("f", "sspq"), office.port("e", "sspq"), office.port("l", "sspq")
    first.say(Consume("q", 1, once=True))
    office.turn()
    early.say(Consume("q", 1, once=True))
    office.operator.pause("q", True, office.now)
    late.say(Consume("q", 1, once=True))
    office.turn()
    assert (early.heard("declined"), late.heard("declined")) == ([], ["q"])
    office.append("q", b"b")
    office.operator.pause("q", False, office.now)
    office.turn()
    assert early.payloads() == [b"b"]


def test_dead_letters_can_be_consumed_again_when_the_queue_is_resumed(office: Office) -> None:
    office.kill("q", 2)
    office.operator.pause("q", True, office.now)
    worker = office.port("w")
    worker.say(Consume("q", 10, dead=True))
    office.turn()
    assert worker.payloads() == []
    office.operator.pause("q", False, office.now)
    office.turn()
    assert len(worker.payloads()) == 2


def test_a_purge_leaves_what_somebody_holds(office: Office) -> None:
    worker = office.port("w")
    worker.say(Consume("q", 2))
    office.append("q", *[b"%d" % i for i in range(10)])
    office.turn()
    assert office.purge("q") == 8
    info = office.log.describe("q")
    assert (info.ready, info.held) == (0, 2)
    worker.say(settle(worker, "q", 0))
    office.turn()
    assert worker.payloads() == [b"0", b"1"]


def test_whoever_asked_is_told_when_the_requests_are_purged(office: Office) -> None:
    asker = office.port("a", "rq")
    asker.say(send("q", b"x", b"y", tickets=[7, 8], wants_reply=True))
    office.append("q", b"plain")
    office.turn()
    assert office.purge("q") == 3
    assert asker.heard("undelivered") == [[7, 8]]
    assert office.broker.is_drained
    office.turn()


def test_requests_that_are_purged_before_their_receipt_are_told_of_with_it(office: Office) -> None:
    asker = office.port("a", "rq")
    asker.say(send("q", b"x", b"y", tickets=[7, 8], wants_reply=True))
    asker.say(send("q", b"z", tickets=[9], wants_reply=True))
    office.append("q", b"plain")
    assert office.purge("q") == 4
    asker.say(send("q", b"later", tickets=[10], wants_reply=True))
    assert asker.heard("undelivered") == []
    office.turn()
    assert asker.heard("undelivered") == [[7, 8], [9]]
    worker = office.port("w", "rq")
    worker.say(Consume("q", 10))
    office.turn()
    assert worker.payloads() == [b"later"]


def test_purging_many_requests_takes_more_than_one_step(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operate, "MESSAGES_A_STEP", 4)
    asker = office.port("a", "rq")
    asker.say(send("q", *[b"x"] * 10, tickets=range(10), wants_reply=True))
    office.turn()
    assert list(office.operator.purge("q", office.now)) == [4, 4, 2]
    assert asker.heard("undelivered") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("dead", [False, True])
def test_a_purge_of_many_runs_goes_step_by_step_and_ends(
    office: Office, monkeypatch: pytest.MonkeyPatch, dead: bool
) -> None:
    monkeypatch.setattr(operate, "RUNS_A_STEP", 3)
    office.kill("q", 10)
    if not dead:
        sum(office.operator.redrive("q", office.now))
    counts = []
    for count in office.operator.purge("q", office.now, dead=dead):
        counts.append(count)
        # What comes meanwhile is not for this purge to take, or it might never end.
        office.append("q", b"new")
        if dead:
            office.log.take("q", "killer", 1, office.now)
            office.log.settle("q", "killer", Outcome.REJECT, [(0, 1 << 40)], office.now)
    assert counts[:3] == [3, 3, 3]
    assert sum(counts) == 10
    info = office.log.describe("q")
    assert info.dead + info.ready == len(counts)


def test_a_purge_takes_what_was_there_when_it_began(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many consumers take meanwhile: as many new messages would be as old ones."""
    monkeypatch.setattr(operate, "RUNS_A_STEP", 2)
    office.kill("q", 10)
    sum(office.operator.redrive("q", office.now))
    worker = office.port("w")
    counts = []
    for count in office.operator.purge("q", office.now):
        counts.append(count)
        worker.say(Consume("q", len(counts)))
        office.turn()  # It gets one of those that are still there, and when none is, a new one.
        office.append("q", b"new")
    assert counts == [2, 2, 2, 1]
    assert [payload == b"new" for payload in worker.payloads()] == [False, False, False, True]
    assert office.log.describe("q").ready == 3


@pytest.mark.parametrize("work", ["purge", "redrive"])
def test_two_at_the_same_time_take_everything_once(
    office: Office, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    monkeypatch.setattr(operate, "RUNS_A_STEP", 3)
    office.kill("q", 10)
    steps = [
        office.operator.purge("q", office.now, dead=True)
        if work == "purge"
        else office.operator.redrive("q", office.now)
        for _ in range(2)
    ]
    counts = [next(step, 0) for _ in range(5) for step in steps]
    assert counts[:4] == [3, 3, 3, 1]
    assert sum(counts) == 10
    assert office.log.describe("q").ready == (10 if work == "redrive" else 0)


@pytest.mark.parametrize("work", ["purge", "redrive"])
def test_what_a_crash_cuts_off_goes_on_when_it_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    monkeypatch.setattr(operate, "RUNS_A_STEP", 3)
    office = Office(tmp_path)
    office.kill("q", 10)

    def begin() -> Iterator[int]:
        if work == "purge":
            return office.operator.purge("q", office.now, dead=True)
        return office.operator.redrive("q", office.now)

    steps = begin()
    for _ in range(2):
        assert next(steps) == 3
        office.turn()
    office.log.abandon()
    office = Office(tmp_path)
    info = office.log.describe("q")
    assert (info.dead, info.ready) == (4, 6 if work == "redrive" else 0)
    assert list(begin()) == [3, 1]
    worker = office.port("w")
    worker.say(Consume("q", 0))
    office.turn()
    assert worker.offsets() == (list(range(0, 20, 2)) if work == "redrive" else [])
    office.log.close(office.now)


def test_the_bytes_of_a_queue_are_right_though_nobody_asks_for_long(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are counted now and then, a few runs at a time."""
    monkeypatch.setattr(weight, "NOTES_MAX", 4)
    monkeypatch.setattr(operate, "RUNS_A_STEP", 3)
    office.kill("q", 15)
    assert office.log.describe("q").bytes == 0
    for count in office.operator.redrive("q", office.now):
        assert count
        office.turn()
    assert office.log.describe("q").bytes == sum(len(b"%d" % i) for i in range(0, 30, 2))
    purge = office.operator.purge("q", office.now)
    for _ in range(2):
        next(purge)
        office.turn()
    left = sum(len(b"%d" % i) for i in range(12, 30, 2))
    assert office.log.describe("q").bytes == left
    worker = office.port("w")
    worker.say(Consume("q", 0))
    office.turn()
    for offset in range(28, 12, -2):
        worker.say(settle(worker, "q", offset))
        office.turn()
    assert office.log.describe("q").bytes == 2


def test_redriven_letters_are_handed_out_first_died_first(office: Office) -> None:
    office.kill("q", 5)
    worker = office.port("w")
    worker.say(Consume("q", 0))
    assert sum(office.operator.redrive("q", office.now, limit=2)) == 2
    office.turn()
    assert worker.payloads() == [b"0", b"2"]
    assert sum(office.operator.redrive("q", office.now, reason=Reason.EXPIRED)) == 0
    assert sum(office.operator.redrive("q", office.now, reason=Reason.REJECTED)) == 3
    office.turn()
    assert worker.payloads() == [b"0", b"2", b"4", b"6", b"8"]


def test_a_redrive_ends_though_what_it_moves_dies_again_at_once(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operate, "RUNS_A_STEP", 2)
    office.kill("q", 7)
    counts = []
    for count in office.operator.redrive("q", office.now):
        counts.append(count)
        office.log.take("q", "killer", 100, office.now)
        office.log.settle("q", "killer", Outcome.REJECT, [(0, 1 << 40)], office.now)
    assert counts == [2, 2, 2, 1]


@pytest.mark.parametrize("runs_a_step", [1, 2, 3, 500])
def test_ranges_are_redriven_in_portions_whatever_they_look_like(
    office: Office, monkeypatch: pytest.MonkeyPatch, runs_a_step: int
) -> None:
    monkeypatch.setattr(operate, "RUNS_A_STEP", runs_a_step)
    office.kill("q", 10)  # offsets 0, 2, … 18
    office.kill("q", 4)  # 20, 22, 24, 26
    ranges = [(2, 3), (4, 4), (5, 9), (7, 12), (19, 1 << 50), (3, 1)]
    assert sum(office.operator.redrive("q", office.now, ranges=ranges, limit=6)) == 6
    assert sum(office.operator.redrive("q", office.now, ranges=ranges)) == 2
    assert sum(office.operator.redrive("q", office.now, ranges=ranges)) == 0
    left = office.log.states("q", 0, 100, 100)
    dead = [o for o, state in zip(left.first, left.state, strict=True) if state == State.DEAD]
    assert dead == [0, 4, 12, 14, 16, 18]
    office.turn()
    worker = office.port("w")
    worker.say(Consume("q", 0))
    office.turn()
    assert sorted(worker.offsets()) == [2, 6, 8, 10, 20, 22, 24, 26]


@pytest.mark.parametrize("runs_a_step", [1, 3, 500])
def test_what_nobody_holds_is_withdrawn_in_portions(
    office: Office, monkeypatch: pytest.MonkeyPatch, runs_a_step: int
) -> None:
    monkeypatch.setattr(operate, "RUNS_A_STEP", runs_a_step)
    office.kill("q", 10)  # dead: offsets 0, 2, … 18
    batch = Batch.of([b"a", b"b", b"c", b"late"], protocol="http", delay_us=[0, 0, 0, 1 << 40])
    office.operator.append("q", batch, office.now, lambda _: None)
    office.turn()
    worker = office.port("w")
    worker.say(Consume("q", 1))
    office.turn()
    ranges = [(0, 5), (4, 12), (20, 22), (23, 1 << 50), (3, 1)]
    assert sum(office.operator.withdraw("q", office.now, ranges)) == 6 + 2
    assert sum(office.operator.withdraw("q", office.now, ranges)) == 0
    info = office.log.describe("q")
    assert (info.dead, info.ready, info.delayed, info.held) == (4, 1, 0, 1)


def test_whoever_asked_is_told_when_requests_are_withdrawn_or_moved(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operate, "MESSAGES_A_STEP", 2)
    monkeypatch.setattr(operate, "RUNS_A_STEP", 2)
    asker = office.port("a", "rq")
    asker.say(send("q", *[b"x"] * 6, tickets=range(6), wants_reply=True))
    office.turn()
    assert list(office.operator.withdraw("q", office.now, [(0, 4)])) == [2, 2]
    assert asker.heard("undelivered") == [[0, 1], [2, 3]]
    batch = Batch.of([b"x", b"x"], protocol="http")
    batch.moves, batch.source, batch.identity = array("q", [4, 5]), "q", office.log.describe("q").identity
    done: list[TransactionDone | LogError] = []
    office.operator.transact("", [("to", batch)], office.now, done.append)
    office.turn()
    assert asker.heard("undelivered") == [[0, 1], [2, 3], [4, 5]]
    assert [it.stored[0][:3] for it in done if isinstance(it, TransactionDone)] == [("to", 0, 2)]
    assert office.log.describe("q").ready == 0
    batch.identity = "0" * 12
    with pytest.raises(QueueDeleted):
        office.operator.transact("", [("to", batch)], office.now, done.append)


def test_a_queue_that_is_not_there_is_unknown(office: Office) -> None:
    operator = office.operator
    for act in (
        lambda: operator.pause("nowhere", True, office.now),
        lambda: next(operator.purge("nowhere", office.now)),
        lambda: next(operator.redrive("nowhere", office.now)),
        lambda: next(operator.withdraw("nowhere", office.now, [(0, 1)])),
        lambda: operator.row("nowhere"),
        lambda: operator.hold_reader("r", "messages", {"nowhere": 0}, 60, office.now, readers_max=2),
    ):
        with pytest.raises(QueueUnknown, match="nowhere"):
            act()


# --- readers ---------------------------------------------------------------------------------


def test_a_reader_holds_what_was_said_last_and_nothing_else(office: Office) -> None:
    for queue in ("a", "b", "c"):
        office.append(queue, b"x")

    def held() -> list[tuple[str, str, int, int]]:
        return [
            (r.queue, r.view, r.position, (r.lease_until_us - office.now) // 1_000_000)
            for r in office.log.readers()
        ]

    office.operator.hold_reader("spark", "messages", {"a": 0, "b": 1}, 60, office.now, readers_max=2)
    assert held() == [("a", "messages", 0, 60), ("b", "messages", 1, 60)]
    office.operator.hold_reader("spark", "events", {"b": 2, "c": 0}, 0.5, office.now, readers_max=2)
    assert held() == [("b", "events", 2, 0), ("c", "events", 0, 0)]
    with pytest.raises(LogRefused, match="nowhere"):
        office.operator.hold_reader("spark", "events", {"a": 0, "nowhere": 0}, 60, office.now, readers_max=2)
    with pytest.raises(LogRefused, match="view"):
        office.operator.hold_reader("spark", "pictures", {"a": 0}, 60, office.now, readers_max=2)
    with pytest.raises(LogRefused, match="positions"):
        office.operator.hold_reader("spark", "events", {}, 60, office.now, readers_max=2)
    assert len(held()) == 2
    office.operator.hold_reader("other", "events", {"a": 0}, 60, office.now, readers_max=2)
    with pytest.raises(LogRefused, match="readers-max"):
        office.operator.hold_reader("third", "events", {"a": 0}, 60, office.now, readers_max=2)
    office.operator.release_reader("other", office.now)
    office.operator.release_reader("spark", office.now)
    assert held() == []
    with pytest.raises(LogRefused, match="spark"):
        office.operator.release_reader("spark", office.now)


# --- looking ---------------------------------------------------------------------------------


def test_a_row_says_how_a_queue_stands(office: Office) -> None:
    worker, undertaker = office.port("w"), office.port("u")
    worker.say(Consume("q", 2))
    undertaker.say(Consume("q", 1, dead=True))
    office.append("q", b"a", b"b", b"c")
    office.turn()
    worker.say(settle(worker, "q", 0), settle(worker, "q", 1, Outcome.REJECT))
    office.turn()
    row = office.operator.row("q")
    assert (row.info.ready, row.info.held, row.info.dead, row.consumers, row.delivered) == (0, 1, 1, 2, 4)
    assert row.counts == {
        (Event.ACCEPTED, Reason.NONE): 3,
        (Event.HELD, Reason.NONE): 4,
        (Event.ACKED, Reason.NONE): 1,
        (Event.DEAD, Reason.REJECTED): 1,
    }


def names(office: Office, count: int = 100, *, every: bool = False) -> list[str]:
    rows, more = office.operator.changed_rows(count, every=every)
    assert more is False
    return sorted(row.info.name for row in rows)


def test_rows_come_when_a_queue_or_its_consumers_have_changed(office: Office) -> None:
    office.append("a", b"x")
    office.append("b", b"x")
    office.turn()
    assert names(office) == ["a", "b"]
    assert names(office) == []
    worker = office.port("w")
    worker.say(Consume("a", 0))
    assert names(office) == ["a"]
    office.turn()
    assert names(office) == ["a"]
    worker.say(Cancel("a"))
    assert names(office) == ["a"]
    worker.say(Consume("not yet there", 0))
    assert names(office) == []
    assert names(office, every=True) == ["a", "b"]
    office.broker.detach(worker, office.now)
    assert names(office) == ["a"]


def test_a_round_comes_in_parts_and_ends_whatever_happens_meanwhile(office: Office) -> None:
    for i in range(7):
        office.append(f"q{i}", b"x")
    seen = []
    more, every = True, True
    while more:
        rows, more = office.operator.changed_rows(3, every=every)
        every = False
        seen.append([row.info.name for row in rows])
        office.append("q0", b"y")
    assert seen == [["q0", "q1", "q2"], ["q3", "q4", "q5"], ["q6"]]
    assert names(office) == ["q0"]


def test_connections_come_in_order_and_in_parts(office: Office) -> None:
    ports = [office.port(f"p{i}") for i in range(5)]
    ports[1].say(Consume("q", 2), Consume("q", 1, dead=True))
    office.append("q", b"a", b"b", b"c")
    office.turn()
    office.broker.blocked(ports[3], True)
    office.broker.detach(ports[0], office.now)
    first = office.broker.ports.infos(0, 2)
    assert [(it.port.name, it.consumes, it.held, it.blocked, it.held_back) for it in first] == [
        ("p1", [("q", False), ("q", True)], 2, False, False),
        ("p2", [], 0, False, False),
    ]
    rest = office.broker.ports.infos(first[-1].number, 10)
    assert [(it.port.name, it.blocked) for it in rest] == [("p3", True), ("p4", False)]
    office.broker.blocked(ports[3], False)
    assert not any(it.blocked for it in office.broker.ports.infos(0, 10))


def test_a_sender_without_room_is_held_back(tmp_path: Path) -> None:
    office = Office(tmp_path, Policies({"*": {"max-bytes": 1}}))
    sender: FakePort = office.port("s")
    sender.say(send("q", b"x"), send("q", b"y"))
    (info,) = office.broker.ports.infos(0, 10)
    assert info.held_back
    office.turn()
    assert office.purge("q") == 1
    office.tick()
    (info,) = office.broker.ports.infos(0, 10)
    assert not info.held_back
    office.log.close(office.now)


def test_a_broker_at_work_is_ready(office: Office) -> None:
    assert office.operator.unready == ""
    assert office.log.policies.defaults.durability == "commit"


# --- queues-max ------------------------------------------------------------------------------


def test_a_queue_that_exists_is_never_refused(tmp_path: Path) -> None:
    before = Office(tmp_path)
    for name in ("a", "b", "c"):
        before.append(name, b"x")
    before.turn()
    before.log.close(before.now)
    office = Office(tmp_path, queues_max=2)
    worker, sender = office.port("w"), office.port("s", "rq")
    for number, name in enumerate(("a", "b", "c")):
        office.append(name, b"y")
        sender.say(send(name, b"z", tickets=[number]))
        worker.say(Consume(name, 0))
    office.turn()
    assert len(worker.got) == 9
    assert sender.heard("delivered") == [[0], [1], [2]]
    sender.say(send("d", b"z", tickets=[4]))
    worker.say(Consume("d", 0))
    assert sender.heard("undelivered") == [[4]]
    assert worker.heard("declined") == ["d"]
    office.log.close(office.now)


def test_names_that_nobody_waits_at_any_more_do_not_count(tmp_path: Path) -> None:
    office = Office(tmp_path, Policies({"tiny-*": {"max-bytes": 1}}), queues_max=3)
    for number in range(10):
        worker = office.port(f"w{number}")
        worker.say(Consume(f"left-{number}", 0), Consume(f"cancelled-{number}", 0, dead=True))
        worker.say(Cancel(f"cancelled-{number}", dead=True))
        office.broker.detach(worker, office.now)
        sender = office.port(f"s{number}", "rq")
        sender.say(send(f"tiny-{number}", b"too large for it", tickets=[1]))
        assert sender.heard("undelivered") == [[1]]
    waits = office.port("waits")
    waits.say(Consume("waiting", 0))
    office.append("a", b"x")
    with pytest.raises(LogRefused, match="queues-max"):
        office.operator.transact(
            "k",
            [("a", Batch.of([b"x"])), ("c", Batch.of([b"x"])), ("b", Batch.of([b"x"]))],
            office.now,
            print,
        )
    office.append("b", b"x")
    with pytest.raises(LogRefused, match="queues-max"):
        office.append("c", b"x")
    office.append("waiting", b"for this")  # which was counted
    office.turn()
    assert waits.payloads() == [b"for this"]
    assert office.log.queues() == ["a", "b", "waiting"]
    office.log.close(office.now)


def test_a_queue_that_somebody_waits_at_can_be_paused_before_its_first_message(office: Office) -> None:
    worker = office.port("w")
    worker.say(Consume("q", 1))
    office.operator.pause("q", True, office.now)
    office.append("q", b"x")
    office.turn()
    assert worker.payloads() == []
    office.operator.pause("q", False, office.now)
    office.turn()
    assert worker.payloads() == [b"x"]
    with pytest.raises(QueueUnknown):
        office.operator.pause("nobody-knows-it", True, office.now)


def test_queues_that_are_made_too_fast_are_refused_for_a_second(office: Office) -> None:
    office.broker.doors.new_per_second = 10
    for number in range(10):
        office.append(f"q{number}", b"")
    with pytest.raises(TooFast, match=r"queue 'q10'.*queues-new-per-second"):
        office.append("q10", b"")
    office.append("q0", b"one that is there")
    office.now += 100_001
    office.append("q10", b"")
    # A transaction is not taken apart: it goes in whole, and those who come next wait the longer, a second.
    office.now += 1_000_000
    parts = [(f"t{number}", Batch.of([b""])) for number in range(100)]
    office.operator.transact("key", parts, office.now, lambda _: None)
    office.now += 999_000
    with pytest.raises(TooFast):
        office.append("late", b"")
    office.now += 1_001_000
    office.append("late", b"")
    assert office.log.queue_count == 112


def test_stages_that_the_log_does_not_take_do_not_pile_up(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that is slow, when callers give up and try again."""
    monkeypatch.setattr(operate, "STAGES_BYTES_WAITING", 5000)
    monkeypatch.setattr(office.log._settings, "stage_group_bytes", 1000)
    came: list[object] = []

    def stage() -> None:
        parts = [("orders", Batch.of([b"x" * 500] * 4))]
        office.operator.stage("key", parts, office.now, came.append, totals=[])

    while office.log.stages_waiting_bytes <= 5000:
        stage()
    with pytest.raises(TooFast, match=r"transaction 'key': \d+ bytes of stages.* try again"):
        stage()
    count = office.log.stages_count
    assert (5000 < office.log.stages_waiting_bytes < 9000, came) == (True, [])
    while len(came) < count:
        office.turn()
    assert office.log.stages_waiting_bytes == 0
    stage()
