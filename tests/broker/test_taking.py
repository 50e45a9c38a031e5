"""Callers that take messages and hold them by a lease, against a real log and a clock that the test moves."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

from penstock.broker import hand_out, taking
from penstock.broker.leases import SPARE, STEP_US, Lease, Leases
from penstock.broker.taking import Ruling, Taker
from penstock.log.errors import LogRefused
from penstock.model.batch import Batch, Slice
from penstock.model.life import Event, Reason
from penstock.model.policy import Policies, QueueNameError
from penstock.model.words import Cancel, Consume, Outcome, Where
from tests.broker.test_broker import SECOND, House, send, settle
from tests.log.contract_rig import Got, open_slices, payloads


class Call:
    """What a call for messages is answered with."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.answers: list[tuple[int, list[Got]]] = []

    def done(self, ends_us: int, slices: list[Slice]) -> None:
        self.answers.append((ends_us, open_slices(slices)))

    @property
    def messages(self) -> list[Got]:
        ((_, messages),) = self.answers
        return messages

    @property
    def ends_us(self) -> int:
        ((ends_us, _),) = self.answers
        return ends_us

    def offsets(self) -> list[int]:
        return [message.offset for message in self.messages]


class Desk(House):
    """A house where callers come."""

    def __init__(self, folder: Path, policies: Policies | None = None) -> None:
        super().__init__(folder, policies)
        self.folder = folder
        self.numbers = count(1)

    @property
    def taking(self) -> taking.Taking:
        return self.broker.taking

    def ask(
        self,
        queue: str = "q",
        most: int = 10,
        *,
        caller: str = "ann",
        wait: float = 0,
        lease: float = 60,
        dead: bool = False,
        number: int = 0,
    ) -> Call:
        call = Call(number or next(self.numbers))
        self.taking.take(
            call.number,
            caller,
            "",
            0.0,
            Consume(queue, most, dead),
            round(wait * SECOND),
            round(lease * SECOND),
            self.now,
            call.done,
        )
        return call

    def take(self, queue: str = "q", most: int = 10, **options: object) -> Call:
        call = self.ask(queue, most, **options)  # type: ignore[arg-type]
        self.turn()
        return call

    def send(self, *messages: bytes, queue: str = "q", **columns: Sequence[int]) -> None:
        self.log.append(queue, Batch.of(messages, protocol="http", **columns), self.now)  # type: ignore[arg-type]
        self.broker.stir(queue)

    def settle(
        self,
        outcome: Outcome | None,
        messages: Sequence[Got],
        *,
        queue: str = "q",
        attempts: Sequence[int] | None = None,
        delay: float | None = None,
        lease: float = 60,
        why: str = "",
    ) -> tuple[int, list[int]]:
        ruling = Ruling(
            outcome,
            messages[0].origin,
            array("q", [message.offset for message in messages]),
            array("i", attempts or [0] * len(messages)),
            None if delay is None else round(delay * SECOND),
            round(lease * SECOND),
            why,
        )
        return self.taking.settle(queue, ruling, self.now)

    def wait(self, seconds: float) -> None:
        """In ticks, as the server has them."""
        end = self.now + round(seconds * SECOND)
        while self.now < end:
            self.now = min(self.now + SECOND // 20, end)
            self.broker.tick(self.now)
            self.turn()

    def counts(self, queue: str = "q") -> tuple[int, int, int, int]:
        """Ready, delayed, held, dead."""
        info = self.log.describe(queue)
        return info.ready, info.delayed, info.held, info.dead

    def ends(self, queue: str = "q") -> list[tuple[Event, int, Reason, int]]:
        """What has happened to messages, but that they came."""
        self.turn()
        return [
            (run.event, offset, run.reason, run.attempt)
            for run in self.log.events(queue, 0, 1 << 20)
            for offset in range(run.first, run.end)
            if run.event is not Event.ACCEPTED
        ]

    def deliveries(self, queue: str = "q") -> int:
        return self.log.counts(queue).get((Event.HELD, Reason.NONE), 0)

    def is_idle(self) -> bool:
        """Nobody waits, nothing is held, and nothing is left of those who were here but their names."""
        desk, leases = self.taking, self.taking._leases
        kept = [desk._waiting, desk._looked_at, leases._by_queue, leases._by_step, leases._by_take]
        holds = [attached.holds or attached.doors for attached in self.broker.ports.attached.values()]
        return not (any(kept) or any(holds) or self.broker.doors.by_queue or desk.is_holding)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.log.close(desk.now)


@pytest.fixture
def backoff(tmp_path: Path) -> Iterator[Desk]:
    """With `retry-delays`."""
    desk = Desk(tmp_path, Policies({"*": {"retry-delays": [2, 5], "max-deliveries": 3}}))
    yield desk
    desk.log.close(desk.now)


# --- taking --------------------------------------------------------------------------------------


def test_who_does_not_wait_is_answered_in_the_same_turn(desk: Desk) -> None:
    assert desk.take().messages == []
    desk.send(b"a", b"b")
    call = desk.take()
    assert payloads(call.messages) == [b"a", b"b"]
    assert call.ends_us == desk.now + 60 * SECOND
    assert [message.attempts for message in call.messages] == [0, 0]
    assert desk.counts() == (0, 0, 2, 0)
    assert desk.take().messages == []


def test_who_waits_is_answered_when_there_is_something(desk: Desk) -> None:
    call = desk.take(wait=20)
    desk.wait(15)
    assert call.answers == []
    assert desk.broker.doors.consumer_count("q") == 1
    desk.send(b"a")
    desk.turn()
    assert payloads(call.messages) == [b"a"]
    assert call.ends_us == desk.now + 60 * SECOND
    desk.wait(10)
    assert len(call.answers) == 1
    assert desk.broker.doors.consumer_count("q") == 0


def test_or_with_nothing_when_its_time_is_over(desk: Desk) -> None:
    call = desk.take(wait=20)
    desk.wait(19.9)
    assert call.answers == []
    desk.wait(0.1)
    assert call.messages == []
    desk.send(b"a")
    desk.turn()
    assert desk.counts() == (1, 0, 0, 0)
    assert desk.is_idle()


def test_what_is_delayed_ends_the_wait_when_it_is_due(desk: Desk) -> None:
    desk.send(b"a", delay_us=[SECOND])
    call = desk.take(wait=20)
    desk.wait(0.95)
    assert call.answers == []
    desk.wait(0.05)
    assert payloads(call.messages) == [b"a"]


def test_at_most_so_many(desk: Desk) -> None:
    desk.send(*[b"%d" % i for i in range(10)])
    assert desk.take(most=1).offsets() == [0]
    assert desk.take(most=3).offsets() == [1, 2, 3]
    assert desk.take(most=1000).offsets() == list(range(4, 10))


def test_what_somebody_holds_already_is_its_own_business(desk: Desk) -> None:
    desk.send(*[b"%d" % i for i in range(10)])
    assert [desk.take(most=4).offsets() for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    desk.settle(Outcome.REQUEUE, open_slices(desk.log.read("q", 0, 3)), delay=0)
    desk.turn()
    assert desk.take(most=4).offsets() == [0, 1, 2]


def test_settled_while_it_waits_it_gets_no_more_for_that(desk: Desk) -> None:
    desk.send(b"a", b"b")
    first = desk.take(most=2)
    second = desk.take(most=1, wait=5)
    desk.settle(Outcome.ACK, first.messages)
    desk.send(b"c", b"d")
    desk.turn()
    assert second.offsets() == [2]


def test_much_comes_in_several_turns_and_in_one_answer(desk: Desk) -> None:
    size = hand_out.DISPATCH_BYTES // 2
    desk.send(*[b"x" * size] * 20)
    call = desk.ask(most=20)
    desk.broker.turn(desk.now)
    assert call.answers == []
    for _ in range(taking.TAKE_BYTES // size):
        desk.turn()
    assert len(call.messages) == taking.TAKE_BYTES // size
    assert desk.take(most=1).offsets() == [len(call.messages)]


def test_headers_count_as_payload_does(desk: Desk) -> None:
    size, count = 16 * 1024, 300
    headers = [b'{"h":"%b"}' % bytes(size - 8)] * 100
    for first in range(0, count, 100):
        messages = [b"%d" % (first + i) for i in range(100)]
        desk.log.append("q", Batch.of(messages, protocol="http", headers=headers), desk.now)
    desk.broker.stir("q")
    sizes: list[int] = []
    got: list[bytes] = []
    while len(got) < count:
        call = desk.ask(most=1000)
        while not call.answers:
            desk.turn()
        sizes.append(sum(len(it.headers) for it in call.messages))
        got += [it.payload for it in call.messages]
    assert got == [b"%d" % i for i in range(count)]
    assert taking.TAKE_BYTES - 2 * size < sizes[0]
    assert max(sizes) <= taking.TAKE_BYTES


def test_a_first_message_that_is_larger_comes_alone(desk: Desk) -> None:
    desk.send(b"x" * (2 * taking.TAKE_BYTES), b"y")
    assert desk.take().offsets() == [0]
    assert desk.take().offsets() == [1]


def test_what_comes_while_it_gathers_does_not_keep_it(desk: Desk) -> None:
    """As long as it gets something in each turn it is not full, but it must not wait for ever."""
    call = desk.ask(most=1000, wait=5)
    for _ in range(20):
        desk.send(b"x")
        desk.broker.turn(desk.now)
    assert len(call.answers) == 1


def test_beside_consumers_of_other_doors_it_has_its_share(desk: Desk) -> None:
    worker = desk.port("w")
    worker.say(Consume("q", 100))
    calls = [desk.ask(most=100, wait=5, caller=name) for name in ("ann", "bob")]
    desk.send(*[b"%d" % i for i in range(30)])
    desk.turn()
    assert [len(worker.got), *(len(call.messages) for call in calls)] == [10, 10, 10]


def test_beside_a_busy_one_it_gets_what_is_left(desk: Desk) -> None:
    worker = desk.port("w")
    worker.say(Consume("q", 2))
    call = desk.ask(most=5, wait=5)
    desk.send(*[b"%d" % i for i in range(10)])
    desk.turn()
    assert (len(worker.got), len(call.messages)) == (2, 5)
    assert desk.counts() == (3, 0, 7, 0)


def test_behind_an_exclusive_consumer_it_waits(desk: Desk) -> None:
    worker = desk.port("w")
    worker.say(Consume("q", 1, exclusive=True))
    call, later = desk.ask(wait=5), desk.ask(wait=20, caller="bob")
    desk.send(b"a", b"b")
    desk.turn()
    assert (worker.payloads(), call.answers) == ([b"a"], [])
    desk.wait(5)
    assert (call.messages, later.answers) == ([], [])
    worker.say(Cancel("q"))
    desk.turn()
    assert payloads(later.messages) == [b"b"]


def test_a_paused_queue_gives_nothing(desk: Desk) -> None:
    desk.send(b"a")
    desk.turn()
    desk.log.pause("q", True, desk.now)
    assert desk.take().messages == []
    call = desk.take(wait=20)
    desk.wait(5)
    assert call.answers == []
    desk.log.pause("q", False, desk.now)
    desk.broker.stir("q")
    desk.turn()
    assert payloads(call.messages) == [b"a"]


def test_dead_letters_come_through_their_door_with_why(desk: Desk) -> None:
    desk.send(b"a", b"b", b"c", ttl_seconds=[0, 0, 1])
    got = desk.take(most=2).messages
    desk.settle(Outcome.REJECT, got[:1], why="no such customer")
    desk.settle(Outcome.REJECT, got[1:])
    desk.wait(2)
    assert desk.counts() == (0, 0, 0, 3)
    call = desk.take(dead=True)
    assert [(m.payload, m.reason, m.attempts) for m in call.messages] == [
        (b"a", Reason.REJECTED, 1),
        (b"b", Reason.REJECTED, 1),
        (b"c", Reason.EXPIRED, 0),
    ]
    assert desk.log.whys("q", 0, 3) == [(0, 1, "no such customer")]
    assert desk.take(dead=True).messages == []
    assert desk.settle(Outcome.ACK, call.messages[1:2]) == (1, [])
    desk.wait(60.2)
    assert [row[:3] for row in desk.ends()[-2:]] == [
        (Event.REQUEUED, 0, Reason.LEASE_ENDED),
        (Event.REQUEUED, 2, Reason.LEASE_ENDED),
    ]
    assert desk.take(dead=True).offsets() == [0, 2]


def test_a_name_that_no_queue_can_have_is_refused_and_nobody_waits(desk: Desk) -> None:
    with pytest.raises(QueueNameError):
        desk.ask("a\nb")
    desk.ask(wait=5)
    with pytest.raises(LogRefused, match="waits for messages already"):
        desk.ask(wait=5)
    desk.wait(5)
    assert desk.is_idle()


def test_a_queue_that_is_not_there_yet(desk: Desk) -> None:
    call = desk.take("new", wait=5)
    assert desk.log.queues() == []
    desk.send(b"a", queue="new")
    desk.turn()
    assert payloads(call.messages) == [b"a"]


def test_a_caller_is_seen_as_a_connection(desk: Desk) -> None:
    desk.send(b"a")
    desk.take(caller="10.0.0.1:99")
    desk.ask("other", caller="10.0.0.1:99", wait=5)
    (info,) = desk.broker.ports.infos(0, 10)
    assert (info.port.name, info.port.protocol, info.held) == ("http:10.0.0.1:99", "http", 1)
    assert info.consumes == [("other", False)]


# --- callers that go away ------------------------------------------------------------------------


def test_gone_while_it_waits_it_takes_nothing(desk: Desk) -> None:
    call = desk.take(wait=20)
    desk.taking.untake(call.number, desk.now)
    desk.send(b"a")
    desk.wait(21)
    assert call.answers == []
    assert (desk.counts(), desk.deliveries()) == ((1, 0, 0, 0), 0)
    assert desk.is_idle()


def test_gone_while_it_gathers_it_gives_back(desk: Desk) -> None:
    desk.send(*[b"x" * (hand_out.DISPATCH_BYTES // 2)] * 5)
    call = desk.ask(most=5)
    desk.broker.turn(desk.now)
    assert (call.answers, desk.log.describe("q").held > 0) == ([], True)
    desk.taking.untake(call.number, desk.now)
    desk.turn()
    assert desk.counts() == (5, 0, 0, 0)
    assert desk.is_idle()
    assert [m.attempts for m in desk.take(most=1).messages] == [0]


def test_gone_before_it_has_the_answer_no_delivery_is_counted(desk: Desk) -> None:
    desk.send(b"a", b"b", b"c")
    call = desk.take()
    desk.settle(Outcome.ACK, call.messages[1:2])
    desk.taking.untake(call.number, desk.now)
    assert desk.counts() == (2, 0, 0, 0)
    assert desk.is_idle()
    assert desk.ends() == [
        (Event.ACKED, 1, Reason.NONE, 1),
        (Event.RETURNED, 0, Reason.CONSUMER_CANCELLED, 0),
        (Event.RETURNED, 2, Reason.CONSUMER_CANCELLED, 0),
    ]
    assert [(m.payload, m.attempts) for m in desk.take(caller="bob").messages] == [(b"a", 0), (b"c", 0)]


def test_gone_twice_or_unknown_is_nothing(desk: Desk) -> None:
    desk.send(b"a")
    call = desk.take()
    for number in (call.number, call.number, 12345):
        desk.taking.untake(number, desk.now)
    assert desk.counts() == (1, 0, 0, 0)


def test_what_it_extended_it_has_seen(desk: Desk) -> None:
    desk.send(b"a", b"b")
    call = desk.take()
    desk.settle(None, call.messages[:1])
    desk.taking.untake(call.number, desk.now)
    assert desk.counts() == (1, 0, 1, 0)


def test_when_the_link_is_lost_all_who_wait_are_gone_and_their_numbers_mean_others(desk: Desk) -> None:
    desk.send(b"a")
    held = desk.take(number=1)
    waiting = [desk.take(wait=20, caller=name, number=number) for number, name in ((2, "bob"), (3, "cid"))]
    desk.taking.link_lost(desk.now)
    desk.send(b"b")
    desk.turn()
    assert [call.answers for call in waiting] == [[], []]
    assert desk.counts() == (1, 0, 1, 0)
    again = desk.take(caller="dan", number=1)
    desk.taking.untake(again.number, desk.now)
    assert desk.settle(Outcome.ACK, held.messages) == (1, [])
    assert desk.counts() == (1, 0, 0, 0)


# --- leases --------------------------------------------------------------------------------------


def test_a_lease_that_ends_is_a_delivery(desk: Desk) -> None:
    desk.send(b"a", b"b")
    call = desk.take(lease=30)
    desk.wait(29.9)
    assert desk.counts() == (0, 0, 2, 0)
    desk.wait(0.3)
    assert desk.counts() == (2, 0, 0, 0)
    assert desk.ends() == [
        (Event.RETURNED, 0, Reason.LEASE_ENDED, 1),
        (Event.RETURNED, 1, Reason.LEASE_ENDED, 1),
    ]
    assert desk.settle(Outcome.ACK, call.messages) == (0, [0, 1])
    assert [m.attempts for m in desk.take(caller="bob").messages] == [1, 1]


def test_what_is_left_of_it(desk: Desk) -> None:
    desk.send(*[b"%d" % i for i in range(6)])
    call = desk.take(lease=30)
    desk.settle(Outcome.ACK, [call.messages[i] for i in (1, 2, 5)])
    desk.wait(30.2)
    assert desk.take().offsets() == [0, 3, 4]


def test_with_retry_delays_it_comes_later_and_dies_in_the_end(backoff: Desk) -> None:
    backoff.send(b"a")
    for attempt, delay in enumerate((2, 5)):
        assert [m.attempts for m in backoff.take(lease=1).messages] == [attempt]
        backoff.wait(1.2)
        assert backoff.counts() == (0, 1, 0, 0)
        call = backoff.ask(caller="bob", wait=30, lease=1)
        backoff.wait(delay - 0.3)
        assert call.answers == []
        backoff.taking.untake(call.number, backoff.now)
        backoff.wait(0.3)
        assert backoff.counts() == (1, 0, 0, 0)
    backoff.take(lease=1)
    backoff.wait(1.2)
    assert backoff.counts() == (0, 0, 0, 1)
    assert [(event, reason) for event, _, reason, _ in backoff.ends()] == [
        (Event.DELAYED, Reason.LEASE_ENDED),
        (Event.DELAYED, Reason.LEASE_ENDED),
        (Event.DEAD, Reason.TOO_MANY_DELIVERIES),
    ]


def test_extended_it_goes_on_from_now(desk: Desk) -> None:
    desk.send(b"a", b"b", b"c")
    call = desk.take(lease=10)
    desk.wait(8)
    assert desk.settle(None, call.messages[1:2], lease=10) == (1, [])
    desk.wait(2.2)
    assert desk.counts() == (2, 0, 1, 0)
    for _ in range(20):
        desk.wait(5)
        assert desk.settle(None, call.messages[1:2], lease=10) == (1, [])
    desk.wait(9.9)
    assert desk.settle(Outcome.ACK, call.messages) == (1, [0, 2])
    assert desk.counts() == (2, 0, 0, 0)
    assert desk.is_idle()


def test_an_extension_can_make_it_shorter(desk: Desk) -> None:
    desk.send(b"a")
    call = desk.take(lease=1000)
    desk.settle(None, call.messages, lease=1)
    desk.wait(1.2)
    assert desk.counts() == (1, 0, 0, 0)


def test_very_many_that_end_at_once_do_so_in_the_next_turns(desk: Desk) -> None:
    most, count = taking.LEASES_A_TURN, 4 * taking.LEASES_A_TURN
    desk.send(*[b""] * count)
    for _ in range(count):
        desk.take(most=1, lease=1)
    desk.now += 2 * SECOND
    desk.broker.tick(desk.now)
    assert desk.counts() == (most, 0, count - most, 0)
    for turn in range(1, 4):
        desk.broker.turn(desk.now)
        assert desk.counts()[0] == most * (turn + 1)
    assert desk.is_idle()


def test_a_step_of_the_clock_ends_neither_waits_nor_leases(desk: Desk) -> None:
    desk.send(b"a")
    held = desk.take(lease=30)
    waiting = desk.take(wait=20, caller="bob")
    at_once = desk.ask(caller="cid")
    desk.wait(10)
    assert at_once.messages == []
    desk.now += 3600 * SECOND
    desk.broker.tick(desk.now, 3600 * SECOND)
    desk.turn()
    assert waiting.answers == []
    desk.wait(9.9)
    assert waiting.answers == []
    desk.wait(0.1)
    assert waiting.messages == []
    desk.wait(9.9)
    assert desk.counts() == (0, 0, 1, 0)
    assert desk.settle(None, held.messages, lease=5) == (1, [])
    desk.wait(5.2)
    assert desk.counts() == (1, 0, 0, 0)


def test_a_step_between_a_call_and_its_turn(desk: Desk) -> None:
    call = desk.ask()
    desk.now += 3600 * SECOND
    desk.broker.tick(desk.now, 3600 * SECOND)
    desk.turn()
    assert call.messages == []


# --- verdicts ------------------------------------------------------------------------------------


def test_verdicts_of_all_kinds(desk: Desk) -> None:
    desk.send(*[b"%d" % i for i in range(8)], ttl_seconds=[100] * 8)
    messages = desk.take().messages
    assert desk.settle(Outcome.ACK, messages[:2]) == (2, [])
    assert desk.settle(Outcome.REQUEUE, messages[2:3]) == (1, [])
    assert desk.settle(Outcome.REQUEUE, messages[3:4], delay=1.5) == (1, [])
    assert desk.settle(Outcome.REJECT, messages[4:6], why="no") == (2, [])
    assert desk.counts() == (1, 1, 2, 2)
    (again,) = desk.take(caller="bob").messages
    assert (again.offset, again.attempts, again.expires_us) == (2, 1, messages[2].expires_us)
    desk.wait(1.45)
    assert desk.counts()[1] == 1
    desk.wait(0.05)
    assert desk.take(caller="bob").offsets() == [3]
    assert desk.log.whys("q", 0, 8) == [(4, 6, "no")]


def test_of_whoever_says_it(desk: Desk) -> None:
    desk.send(*[b"%d" % i for i in range(6)])
    ann, bob = desk.take(most=3), desk.take(most=3, caller="bob")
    assert desk.settle(Outcome.ACK, [*ann.messages[1:], *bob.messages[:2]]) == (4, [])
    assert desk.counts() == (0, 0, 2, 0)
    desk.settle(Outcome.ACK, [ann.messages[0], bob.messages[2]])
    assert desk.is_idle()
    consumers = {run.consumer for run in desk.log.events("q", 0, 100) if run.event is Event.ACKED}
    desk.turn()
    consumers = {run.consumer for run in desk.log.events("q", 0, 100) if run.event is Event.ACKED}
    assert consumers == {"http:ann", "http:bob"}


def test_what_others_hold_by_their_connections_is_not_theirs_to_settle(desk: Desk) -> None:
    worker = desk.port("w")
    worker.say(Consume("q", 1))
    desk.send(b"a", b"b")
    desk.turn()
    call = desk.take()
    (a,) = open_slices(desk.log.read("q", 0, 1))
    assert desk.settle(Outcome.ACK, [a, *call.messages]) == (1, [0])
    worker.say(settle(worker, "q", 0))
    desk.turn()
    assert desk.counts() == (0, 0, 0, 0)


def test_nothing_twice(desk: Desk) -> None:
    desk.send(b"a", b"b")
    messages = desk.take().messages
    assert desk.settle(Outcome.ACK, messages[:1]) == (1, [])
    for outcome in (*Outcome, None):
        assert desk.settle(outcome, messages[:1]) == (0, [0])
    assert desk.settle(Outcome.REQUEUE, messages, delay=0) == (1, [0])


def test_only_the_delivery_that_is_meant(desk: Desk) -> None:
    desk.send(*[b"%d" % i for i in range(4)])
    first = desk.take(lease=1).messages
    desk.wait(1.2)
    second = desk.take(caller="bob").messages
    assert [m.attempts for m in second] == [1] * 4
    for outcome in (*Outcome, None):
        assert desk.settle(outcome, first, attempts=[1] * 4) == (0, [0, 1, 2, 3])
    assert desk.counts() == (0, 0, 4, 0)
    assert desk.settle(Outcome.ACK, second, attempts=[2, 1, 0, 7]) == (2, [1, 3])
    assert desk.settle(Outcome.ACK, second[1:2], attempts=[2]) == (1, [])
    assert desk.counts() == (0, 0, 1, 0)


def test_only_ids_that_these_messages_have(desk: Desk) -> None:
    desk.send(b"a")
    (a,) = desk.take().messages
    other = a._replace(origin=a.origin[:-1] + (b"0" if a.origin[-1:] != b"0" else b"1"))
    assert desk.settle(Outcome.ACK, [other]) == (0, [0])
    assert desk.settle(Outcome.ACK, [a], queue="other") == (0, [0])
    assert desk.settle(Outcome.ACK, [a._replace(offset=77)]) == (0, [77])
    assert desk.settle(Outcome.ACK, [a]) == (1, [])


def test_a_restart_forgets_who_holds_what_and_counts_nothing(desk: Desk) -> None:
    desk.send(b"a", b"b")
    old = desk.take().messages
    desk.log.close(desk.now)
    Desk.__init__(desk, desk.folder)
    assert desk.settle(Outcome.ACK, old) == (0, [0, 1])
    assert desk.counts() == (2, 0, 0, 0)
    desk.send(b"c")
    got = desk.take(caller="bob").messages
    assert [(m.payload, m.attempts) for m in got] == [(b"a", 0), (b"b", 0), (b"c", 0)]
    assert got[0].origin == old[0].origin != got[2].origin
    assert desk.settle(Outcome.ACK, got[2:]) == (1, [])
    assert desk.settle(Outcome.ACK, got[:2]) == (2, [])


def test_room_of_a_full_queue_is_free_when_they_are_settled(tmp_path: Path) -> None:
    desk = Desk(tmp_path, Policies({"*": {"max-bytes": 4, "retry-delays": [1]}}))
    desk.send(b"ab", b"cd")
    messages = desk.take().messages
    desk.settle(Outcome.REQUEUE, messages[:1])
    with pytest.raises(LogRefused, match="max-bytes"):
        desk.send(b"x")
    desk.settle(Outcome.ACK, messages[1:])
    desk.send(b"x")
    assert desk.log.describe("q").bytes == 3
    desk.log.close(desk.now)


def test_requests_are_answered_empty_or_told_that_nobody_answers(desk: Desk) -> None:
    sender = desk.port("s", "rq", Where.TAIL)
    sender.say(send("q", b"a", b"b", tickets=[1, 2], wants_reply=True))
    desk.turn()
    messages = desk.take().messages
    desk.settle(Outcome.ACK, messages[:1])
    desk.settle(Outcome.REJECT, messages[1:])
    desk.turn()
    assert sender.heard("replies") == [[(1, b"")]]
    assert sender.heard("undelivered") == [[2]]
    assert desk.is_idle() or sender in desk.broker.ports.attached


def test_a_request_that_is_withdrawn_while_it_is_held(desk: Desk) -> None:
    sender = desk.port("s", "rq", Where.TAIL)
    sender.say(send("q", b"a", b"b", tickets=[1, 2], wants_reply=True, timeout=5))
    desk.turn()
    messages = desk.take(lease=30).messages
    desk.wait(6)
    assert desk.counts() == (0, 0, 0, 0)
    assert desk.settle(Outcome.ACK, messages[:1]) == (0, [0])
    desk.wait(30)
    desk.broker.detach(sender, desk.now)
    assert desk.is_idle()


# --- queues that go ------------------------------------------------------------------------------


def test_a_deleted_queue_ends_its_leases(desk: Desk) -> None:
    desk.send(*[b"%d" % i for i in range(9)])
    calls = [desk.take(most=3, caller=name) for name in ("ann", "bob", "cid")]
    desk.settle(Outcome.ACK, calls[0].messages[1:2])
    desk.settle(None, calls[1].messages[1:2])
    desk.send(b"other", queue="other")
    (other,) = desk.take("other").messages
    desk.broker.delete(("q",), desk.now)
    desk.turn()
    for call in calls:
        assert desk.settle(Outcome.ACK, call.messages) == (0, call.offsets())
        desk.taking.untake(call.number, desk.now)
    assert desk.settle(Outcome.ACK, [other], queue="other") == (1, [])
    assert desk.is_idle()
    desk.send(*[b"new-%d" % i for i in range(9)])
    again = desk.take(most=9)
    assert again.offsets() == list(range(9))
    assert desk.settle(Outcome.ACK, calls[2].messages) == (0, [6, 7, 8])
    desk.wait(60.2)
    assert desk.counts() == (9, 0, 0, 0)
    assert desk.is_idle()


def test_a_take_of_several_runs_whose_queue_is_deleted(desk: Desk) -> None:
    """Leases of one call, one of them in two parts."""
    for _ in range(3):
        desk.send(*[b"x"] * 5)
        desk.turn()
    call = desk.take(most=15)
    desk.settle(Outcome.ACK, call.messages[2:3])
    desk.broker.delete(("q",), desk.now)
    desk.wait(61)
    assert desk.is_idle()


def test_deleted_while_it_gathers_it_gets_what_the_next_has(desk: Desk) -> None:
    desk.send(*[b"x" * (hand_out.DISPATCH_BYTES // 2)] * 5)
    call = desk.ask(most=5, wait=20)
    desk.broker.turn(desk.now)
    assert call.answers == []
    desk.broker.delete(("q",), desk.now)
    desk.turn()
    assert call.answers == []
    desk.send(b"next")
    desk.turn()
    assert payloads(call.messages) == [b"next"]
    desk.settle(Outcome.ACK, call.messages)
    assert desk.is_idle()


# --- the end of a broker -------------------------------------------------------------------------


def test_a_broker_that_stops_answers_who_waits_and_lets_others_settle(desk: Desk) -> None:
    desk.send(b"a", b"b")
    held = desk.take(most=1)
    waiting = desk.take("other", wait=20, caller="bob")
    desk.broker.drain()
    desk.turn()
    assert waiting.messages == []
    assert desk.take(wait=20, caller="cid").messages == []
    before = desk.broker.is_drained
    assert desk.settle(None, held.messages) == (1, [])
    assert desk.settle(Outcome.ACK, held.messages) == (1, [])
    assert (before, desk.broker.is_drained) == (False, True)
    desk.broker.dismiss()
    assert desk.take(caller="dan").messages == []


def test_after_another_broker_it_waits_until_that_is_known_what_is_held(desk: Desk) -> None:
    desk.send(b"a")
    desk.broker.wait_for_claims(waiting=True)
    call, gone = desk.take(wait=20), desk.take(wait=20, caller="bob")
    assert desk.take(caller="cid").messages == []
    desk.taking.untake(gone.number, desk.now)
    assert call.answers == []
    desk.broker.wait_for_claims(waiting=False)
    desk.turn()
    assert payloads(call.messages) == [b"a"]


# --- what is left behind -------------------------------------------------------------------------


def test_callers_that_do_not_come_again_are_forgotten(desk: Desk) -> None:
    desk.send(b"a")
    desk.take(caller="holds", lease=300)
    desk.take("other", caller="waits", wait=1000)
    for number in range(10):
        desk.take(caller=f"c-{number}")
    assert len(desk.broker.ports.attached) == 12
    desk.wait(75)
    assert set(desk.taking._takers) == {"holds", "waits"}
    assert {attached.name for attached in desk.broker.ports.attached} == {"http:holds", "http:waits"}
    desk.wait(300)
    assert set(desk.taking._takers) == {"waits"}


def test_many_calls_leave_nothing_behind(tmp_path: Path) -> None:
    """By what is kept, not by time: with the longest waits and leases, and settled or given back at once."""
    desk = Desk(tmp_path, Policies({"*": {"max-deliveries": 0}}))
    desk.send(*[b"x"] * 3)
    for number in range(2500):
        call = desk.ask(most=3, wait=30, lease=43_200, caller=f"c-{number % 50}")
        desk.broker.turn(desk.now)
        messages = call.messages
        if number % 3:
            desk.settle(None, messages[:1], lease=40_000)
            desk.settle(Outcome.REQUEUE, messages, delay=0)
        else:
            desk.taking.untake(call.number, desk.now)
        desk.now += SECOND // 100
        if number % 5 == 0:
            desk.broker.tick(desk.now)
    desk.turn()
    assert desk.is_idle()
    leases = desk.taking._leases
    assert len(leases._steps) <= SPARE + 1
    assert len(desk.taking._ends) <= SPARE + 1
    assert len(desk.taking._takers) == 50
    assert not desk.broker.hand_out._starved
    desk.log.close(desk.now)


def test_steps_of_leases_that_were_settled_are_forgotten() -> None:
    """With the longest lease, one of each step would be kept for half a day."""
    leases, port = Leases(), Taker("http:a", "a", 0.0, {})
    ends_us = 43_200 * SECOND
    for number in range(20_000):
        lease = Lease(port, "q", False, b"", number, number + 1, number + 1, ends_us + number * STEP_US)
        leases.grant(lease)
        leases.let_go(lease, number, number + 1)
    assert len(leases._steps) <= SPARE + 2
    assert (leases._by_step, leases._by_take, leases._by_queue) == ({}, {}, {})


def test_leases_end_in_time_whatever_was_settled() -> None:
    leases, port = Leases(), Taker("http:a", "a", 0.0, {})
    kept = {}
    for number in range(5000):
        lease = Lease(port, "q", False, b"", 3 * number, 3 * number + 3, 1, (number * 7919) % 100_003 * 1000)
        leases.grant(lease)
        leases.let_go(lease, 3 * number + number % 3, 3 * number + number % 3 + 1)
        if number % 4:
            for first, end in leases.end(lease):
                assert first < end
        else:
            kept[lease] = lease.ends_us
    for now_us in range(0, 101_000_000, STEP_US // 2):
        while (over := leases.ended(now_us)) is not None:
            assert now_us - 2 * STEP_US < kept.pop(over) <= now_us
            assert sum(end - first for first, end in leases.end(over)) == 2
    assert not kept
    assert len(leases) == 0
