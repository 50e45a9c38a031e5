"""The broker against a real log, with ports that only write down what they are told."""

import errno
import random
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from penstock.broker import settling
from penstock.broker.broker import Broker
from penstock.log.disk import RealDisk
from penstock.log.log import Log
from penstock.log.state import LogSettings
from penstock.model.batch import Batch, Slice
from penstock.model.life import Reason
from penstock.model.policy import Policies
from penstock.model.words import (
    Accepted,
    Broadcast,
    Cancel,
    Closing,
    Command,
    Consume,
    Outcome,
    Publish,
    Reply,
    Settle,
    Sync,
    Where,
)
from tests.log.inline import InlineWorker
from tests.log.simdisk import PowerCut, SimDisk

SECOND = 1_000_000
START = 1_700_000_000 * SECOND


class FakePort:
    """A connection that remembers everything it is told."""

    def __init__(
        self, house: "House", name: str, protocol: str = "phpmq", lost_to: Where = Where.PLACE
    ) -> None:
        self._house = house
        self.name = name
        self.protocol = protocol
        self.lost_to = lost_to
        self.got: list[tuple[str, int, bytes]] = []  # queue, offset, payload
        self.origins: dict[int, bytes] = {}
        self.wants_reply: dict[int, bool] = {}
        self.told: list[tuple[str, object]] = []
        self.held = False
        self.room = 1 << 20

    def bytes_room(self) -> int:
        return self.room

    def count_room(self) -> int:
        return 1 << 30

    def deliver(self, queue: str, slices: list[Slice], now_us: int, dead: bool) -> None:
        for piece in slices:
            for i, payload in enumerate(piece.messages(), piece.lo):
                offset = piece.first_offset + i
                self.got.append((queue + (".dead" if dead else ""), offset, payload))
                self.origins[offset] = piece.origin
                self.wants_reply[offset] = piece.reply is not None

    def consuming(self, queue: str, dead: bool) -> None:
        self.told.append(("consuming", queue))

    def decline(self, queue: str, dead: bool) -> None:
        self.told.append(("declined", queue))

    def delivered(self, tickets: Sequence[int]) -> None:
        self.told.append(("delivered", list(tickets)))

    def replies(self, tickets: Sequence[int], answers: Batch) -> None:
        self.told.append(("replies", list(zip(tickets, answers.messages(), strict=True))))

    def undelivered(self, tickets: Sequence[int]) -> None:
        self.told.append(("undelivered", list(tickets)))

    def refused(self, count: int) -> None:
        self.told.append(("refused", count))

    def synced(self) -> None:
        self.told.append(("synced", None))

    def broadcast(self, queue: str, batch: Batch) -> None:
        self.told.append(("broadcast", batch.messages()))

    def hold(self, held: bool) -> None:
        self.held = held
        if not held:
            self.told.append(("released", None))

    def finish(self) -> None:
        self.told.append(("finished", None))

    def log(self, text: str, count: int) -> None:
        self.told.append(("log", text))

    def say(self, *commands: Command) -> None:
        self._house.broker.handle(self, commands, self._house.now)

    def offsets(self) -> list[int]:
        return [offset for _, offset, _ in self.got]

    def payloads(self) -> list[bytes]:
        return [payload for _, _, payload in self.got]

    def heard(self, word: str) -> list[object]:
        return [what for said, what in self.told if said == word]


class House:
    """A broker, its log, a clock that the test moves."""

    def __init__(
        self, folder: Path | SimDisk, policies: Policies | None = None, settings: LogSettings | None = None
    ) -> None:
        self.now = START
        self.writer, self.keeper = InlineWorker(), InlineWorker()
        self.log = Log.open(
            RealDisk(str(folder)) if isinstance(folder, Path) else folder,
            self.now,
            settings=settings,
            policies=policies,
            writer=self.writer,
            keeper=self.keeper,
        )
        self.broker = Broker(self.log, lambda: None)

    def port(self, name: str, protocol: str = "phpmq", lost_to: Where = Where.PLACE) -> FakePort:
        port = FakePort(self, name, protocol, lost_to)
        self.broker.attach(port)
        return port

    def turn(self, seconds: float = 0) -> None:
        self.now += int(seconds * SECOND)
        self.broker.turn(self.now)
        self.log.wait()
        self.broker.turn(self.now)
        self.log.wait()

    def tick(self, seconds: float = 0) -> None:
        self.now += int(seconds * SECOND)
        self.broker.tick(self.now)
        self.turn()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.log.close(house.now)


def send(queue: str, *messages: bytes, tickets: Sequence[int] | None = None, **options: object) -> Publish:
    wants_reply = bool(options.pop("wants_reply", False))
    timeout = int(str(options.pop("timeout", 0)))
    retries = options.pop("retries", None)
    assert not options
    batch = Batch.of(messages, retries=[int(str(retries))] * len(messages) if retries is not None else None)
    return Publish(queue, batch, array("I", tickets) if tickets is not None else None, wants_reply, timeout)


def settle(
    port: FakePort, queue: str, offset: int, outcome: Outcome = Outcome.ACK, dead: bool = False
) -> Settle:
    return Settle(queue, outcome, port.origins[offset], [(offset, offset + 1)], dead=dead)


def test_a_window_is_filled_and_refilled(house: House) -> None:
    sender, worker = house.port("s"), house.port("w")
    worker.say(Consume("q", 2))
    sender.say(send("q", b"a", b"b", b"c", b"d"))
    house.turn()
    assert worker.payloads() == [b"a", b"b"]
    worker.say(settle(worker, "q", 1))
    house.turn()
    assert worker.payloads() == [b"a", b"b", b"c"]
    worker.say(Consume("q", 3))
    house.turn()
    assert worker.payloads() == [b"a", b"b", b"c", b"d"]


def test_a_tick_wants_a_turn_where_somebody_is_there(house: House) -> None:
    wanted: list[None] = []
    house.broker = Broker(house.log, lambda: wanted.append(None))
    house.tick(0.05)
    assert not wanted
    port = house.port("w")
    wanted.clear()
    house.tick(0.05)
    assert wanted
    house.broker.detach(port, house.now)
    house.turn()
    wanted.clear()
    house.tick(0.05)
    assert not wanted


def test_what_expires_where_nobody_is_there_is_stored_by_the_tick(tmp_path: Path) -> None:
    house = House(tmp_path)
    sender = house.port("s")
    sender.say(Publish("q", Batch.of([b"a"], ttl_seconds=[1])))
    house.turn()
    house.broker.detach(sender, house.now)
    house.turn()
    house.now += 2 * SECOND
    house.broker.tick(house.now)
    house.log.wait()
    assert house.log.describe("q").ready == 0
    house.log.close(house.now)
    again = House(tmp_path)
    assert again.log.describe("q").ready == 0
    again.log.close(again.now)


def test_what_it_does_not_hold_settles_nothing(house: House) -> None:
    sender, worker, other = house.port("s"), house.port("w"), house.port("o")
    worker.say(Consume("q", 1))
    sender.say(send("q", b"a", b"b"))
    house.turn()
    other.say(Settle("q", Outcome.ACK, worker.origins[0], [(0, 1)]))
    worker.say(Settle("q", Outcome.ACK, b"0" * 18, [(0, 1)]))
    house.turn()
    assert worker.payloads() == [b"a"]
    assert other.heard("log")
    assert worker.heard("log")
    assert house.log.describe("q").held == 1


def test_no_settlement_outlives_a_power_cut_without_the_result_that_was_sent_before_it() -> None:
    settings = LogSettings(segment_bytes=1 << 14, syncs_apart_us=0)
    for seed in range(120, 170):
        disk = SimDisk()
        house = House(disk, settings=settings)
        sender, worker = house.port("s"), house.port("w")
        worker.say(Consume("in", 1))
        sender.say(send("in", b"input"))
        house.turn()
        sender.say(send("in", b"other"))  # Its queue is the first that has something for the disk.
        worker.say(send("out", bytes(700)), settle(worker, "in", 0))
        disk.cut_after(1)  # what is written is on its way
        with pytest.raises(PowerCut):
            house.turn()
        after = House(disk.crash(random.Random(seed)), settings=settings)
        if after.log.describe("in").offset_end == 2 and after.log.describe("in").ready < 2:
            assert after.log.has_queue("out"), f"seed {seed}"
            assert after.log.describe("out").ready == 1, f"seed {seed}"


def test_a_new_ttl_that_cannot_be_is_refused_and_what_follows_is_heard(house: House) -> None:
    sender, worker = house.port("s"), house.port("w")
    worker.say(Consume("q", 2))
    sender.say(send("q", b"a", b"b"))
    house.turn()
    too_long = Settle("q", Outcome.REQUEUE, worker.origins[0], [(0, 1)], ttl_seconds=10**13)
    worker.say(too_long, settle(worker, "q", 1))
    house.turn()
    assert "TTL" in str(worker.heard("log"))
    info = house.log.describe("q")
    assert (info.ready, info.held) == (0, 1)
    house.broker.detach(worker, house.now)
    assert house.log.describe("q").ready == 1


def test_equal_consumers_take_turns_and_priority_goes_first(house: House) -> None:
    sender = house.port("s")
    low, high, none = house.port("low"), house.port("high"), house.port("none")
    low.say(Consume("q", 10, priority=10))
    high.say(Consume("q", 2, priority=30))
    none.say(Consume("q", 10, priority=0))
    for number in range(4):
        sender.say(send("q", b"%d" % number))
        house.turn()
    assert (high.payloads(), low.payloads(), none.payloads()) == ([b"0", b"1"], [b"2", b"3"], [])


def test_a_lost_consumer_gives_back_by_the_rule_of_its_protocol(house: House) -> None:
    sender = house.port("s")
    keeps_place, to_tail = house.port("p"), house.port("t", "sspq", Where.TAIL)
    keeps_place.say(Consume("q", 1))
    sender.say(send("q", b"a"))
    house.turn()
    to_tail.say(Consume("q", 1, once=True))
    sender.say(send("q", b"b", b"c"))
    house.turn()
    assert (keeps_place.payloads(), to_tail.payloads()) == ([b"a"], [b"b"])
    house.broker.detach(keeps_place, house.now)
    house.broker.detach(to_tail, house.now)
    after = house.port("after")
    after.say(Consume("q", 10))
    house.turn()
    assert after.payloads() == [b"a", b"c", b"b"]


def test_exclusive_waits_and_moves_up(house: House) -> None:
    first, second, third = (house.port(name, "rq") for name in ("1", "2", "3"))
    first.say(Consume("q", 1, exclusive=True))
    second.say(Consume("q", 1, exclusive=True))
    third.say(Consume("q", 1))
    assert (first.heard("consuming"), second.heard("consuming")) == (["q"], [])
    house.broker.detach(first, house.now)
    assert (second.heard("consuming"), third.heard("consuming")) == (["q"], [])
    second.say(Cancel("q"))
    assert third.heard("consuming") == ["q"]


def test_receipts_come_after_the_sync(house: House) -> None:
    sender = house.port("s", "rq")
    sender.say(send("q", b"a", b"b", tickets=[7, 9]))
    house.broker.turn(house.now)
    assert sender.heard("delivered") == []
    house.log.wait()
    assert sender.heard("delivered") == [[7, 9]]


def test_request_delivered_reply(house: House) -> None:
    asker, worker = house.port("a", "rq"), house.port("w", "rq")
    worker.say(Consume("q", 5))
    asker.say(send("q", b"1+1", b"2+2", tickets=[5, 6], wants_reply=True))
    house.turn()
    assert worker.payloads() == [b"1+1", b"2+2"]
    assert worker.wants_reply == {0: True, 1: True}
    worker.say(Accepted("q", worker.origins[0], [(0, 2)]))
    assert asker.heard("delivered") == [[5, 6]]
    worker.say(Reply("q", worker.origins[0], array("q", [1]), Batch.of([b"4"])))
    assert asker.heard("replies") == [[(6, b"4")]]
    worker.say(Reply("q", worker.origins[0], array("q", [0]), Batch.of([b"2"])))
    assert asker.heard("replies") == [[(6, b"4")], [(5, b"2")]]
    worker.say(Reply("q", worker.origins[0], array("q", [0]), Batch.of([b"again"])))
    assert len(asker.heard("replies")) == 2
    house.turn()
    assert house.log.describe("q").held == 0


def test_a_reply_may_overtake_the_sync(house: House) -> None:
    asker, worker = house.port("a", "rq"), house.port("w", "rq")
    worker.say(Consume("q", 5))
    asker.say(send("q", b"x", tickets=[5], wants_reply=True))
    house.broker.turn(house.now)  # dispatched; the sync has not returned
    worker.say(Reply("q", worker.origins[0], array("q", [0]), Batch.of([b"y"])))
    assert asker.heard("replies") == [[(5, b"y")]]
    house.turn()
    house.broker.detach(asker, house.now)
    assert house.log.describe("q").held == 0


def test_a_request_that_another_protocol_settles_is_answered_empty(house: House) -> None:
    asker, worker = house.port("a", "rq"), house.port("w", "phpmq")
    worker.say(Consume("q", 5))
    asker.say(send("q", b"x", tickets=[5], wants_reply=True))
    house.turn()
    assert asker.heard("delivered") == [[5]]
    worker.say(settle(worker, "q", 0))
    assert asker.heard("replies") == [[(5, b"")]]


def test_a_rejected_request_is_undelivered(house: House) -> None:
    asker, worker = house.port("a", "rq"), house.port("w", "phpmq")
    worker.say(Consume("q", 5))
    asker.say(send("q", b"x", tickets=[5], wants_reply=True))
    house.turn()
    worker.say(settle(worker, "q", 0, Outcome.REJECT))
    assert asker.heard("undelivered") == [[5]]


def test_a_request_whose_retries_are_used_up_is_undelivered(house: House) -> None:
    asker = house.port("a", "rq")
    asker.say(send("q", b"x", tickets=[5], wants_reply=True, retries=1))
    for attempt in range(2):
        assert asker.heard("undelivered") == []
        worker = house.port(f"w{attempt}", "rq")
        worker.say(Consume("q", 5))
        house.turn()
        assert worker.payloads() == [b"x"]
        house.broker.detach(worker, house.now)
    assert asker.heard("undelivered") == [[5]]
    house.turn()
    info = house.log.describe("q")
    assert (info.ready, info.dead) == (0, 0)


def test_a_time_out_withdraws_and_the_consumer_keeps_its_room_until_it_is_done(house: House) -> None:
    asker, worker = house.port("a", "rq"), house.port("w", "rq")
    worker.say(Consume("q", 1))
    asker.say(send("q", b"x", b"y", tickets=[5, 6], wants_reply=True, timeout=2))
    house.turn()
    house.tick(1.9)
    assert asker.heard("undelivered") == []
    house.tick(0.2)
    assert asker.heard("undelivered") == [[5, 6]]
    asker.say(send("q", b"z", tickets=[7], wants_reply=True))
    house.turn()
    assert worker.payloads() == [b"x"]
    worker.say(Reply("q", worker.origins[0], array("q", [0]), Batch.of([b"late"])))
    house.turn()
    assert worker.payloads() == [b"x", b"z"]
    assert asker.heard("replies") == []


def test_a_requester_that_leaves_withdraws(house: House) -> None:
    asker = house.port("a", "rq")
    asker.say(send("q", b"synced", tickets=[5], wants_reply=True), send("q", b"stays", tickets=[6]))
    house.turn()
    asker.say(send("q", b"not yet synced", tickets=[7], wants_reply=True))
    house.broker.detach(asker, house.now)
    house.turn()
    worker = house.port("w", "rq")
    worker.say(Consume("q", 5))
    house.turn()
    assert worker.payloads() == [b"stays"]
    reasons = [run.reason for run in house.log.events("q", 0, 100) if run.reason]
    assert reasons == [Reason.REQUESTER_GONE] * 2


def test_broadcast_reaches_all_present_and_is_not_stored(house: House) -> None:
    one, two, other = (house.port(name, "rq") for name in ("1", "2", "3"))
    one.say(Consume("q", 1))
    two.say(Consume("q", 1, priority=0))
    other.say(Consume("elsewhere", 1))
    other.say(Broadcast("q", Batch.of([b"hear"])))
    assert [port.heard("broadcast") for port in (one, two, other)] == [[[b"hear"]], [[b"hear"]], []]
    assert "q" not in house.log.queues()


def test_closing_finishes_what_is_pending(house: House) -> None:
    sender, worker = house.port("s"), house.port("w", "rq")
    worker.say(Consume("q", 1))
    sender.say(send("q", b"a", b"b"))
    house.turn()
    worker.say(Closing())
    house.turn()
    assert worker.payloads() == [b"a"]
    assert worker.heard("finished") == []
    worker.say(settle(worker, "q", 0))
    assert worker.heard("finished") == [None]


def test_dead_letters_through_the_door(house: House) -> None:
    sender, worker, undertaker = house.port("s"), house.port("w"), house.port("u", "sspq", Where.TAIL)
    worker.say(Consume("q", 1))
    undertaker.say(Consume("q", 1, dead=True, once=True))
    sender.say(send("q", b"bad"))
    house.turn()
    worker.say(settle(worker, "q", 0, Outcome.REJECT))
    house.turn()
    assert undertaker.got == [("q.dead", 0, b"bad")]
    house.broker.detach(undertaker, house.now)
    again = house.port("again")
    again.say(Consume("q", 1, dead=True))
    house.turn()
    again.say(settle(again, "q", 0, dead=True))
    house.turn()
    assert house.log.describe("q").dead == 0


def test_a_slow_consumer_gets_nothing_until_it_has_room(house: House) -> None:
    sender, slow, quick = house.port("s"), house.port("slow"), house.port("quick")
    slow.say(Consume("q", 10))
    quick.say(Consume("q", 10))
    house.broker.blocked(slow, True)
    sender.say(send("q", b"a", b"b", b"c"))
    house.turn()
    assert (slow.payloads(), quick.payloads()) == ([], [b"a", b"b", b"c"])
    house.broker.blocked(slow, False)
    house.broker.idle(quick, True)
    sender.say(send("q", b"d"))
    house.turn()
    assert (slow.payloads(), quick.payloads()) == ([b"d"], [b"a", b"b", b"c"])


def test_a_full_queue_holds_its_senders_and_goes_on_in_order(tmp_path: Path) -> None:
    house = House(tmp_path, Policies({"small": {"max-bytes": 4}}))
    sender, worker = house.port("s", "rq"), house.port("w")
    sender.say(send("small", b"aaaa", tickets=[1]), send("small", b"bbbb", tickets=[2]))
    sender.say(send("other", b"c", tickets=[3]))
    house.turn()
    assert sender.held is True
    assert sender.heard("delivered") == [[1]]
    worker.say(Consume("small", 1))
    house.turn()
    worker.say(settle(worker, "small", 0))
    house.tick()
    assert sender.heard("released") == [None]
    assert sender.heard("delivered") == [[1], [2], [3]]
    house.log.close(house.now)


def test_who_can_be_told_no_does_not_wait_for_room_for_ever(tmp_path: Path) -> None:
    """For room in a queue not longer than a request's own time, for room on the disk some seconds."""
    disk = SimDisk(capacity_bytes=1 << 20)
    house = House(disk, Policies({"small": {"max-bytes": 4}}), LogSettings(segment_bytes=1 << 16))
    asking, sending, deaf = house.port("a", "rq"), house.port("s", "rq"), house.port("d")
    sending.say(send("small", b"full", tickets=[1]), send("small", b"more", tickets=[2]))
    asking.say(send("small", b"now?", tickets=[3], wants_reply=True, timeout=3))
    house.tick(2.9)
    assert asking.heard("undelivered") == []
    house.tick(0.1)
    assert asking.heard("undelivered") == [[3]]
    assert asking.heard("released") == [None]
    house.tick(1000)
    assert sending.held is True
    assert sending.heard("undelivered") == []
    disk.capacity_bytes = disk.used_bytes
    other = house.port("o", "rq")
    other.say(send("other", bytes(1 << 16), tickets=[4]), send("other", b"5", b"6", tickets=[5, 6]))
    deaf.say(send("other", b"without a word"))
    house.tick(9)
    assert other.heard("undelivered") == []
    house.tick(1)
    assert other.heard("undelivered") == [[4], [5, 6]]
    assert (other.held, deaf.held) == (False, True)
    assert "undelivered: there was no room on the disk for 10 s" in other.heard("log")
    disk.capacity_bytes = 1 << 20
    house.tick(1)
    house.tick(1)
    assert deaf.held is False
    house.log.close(house.now)


def test_what_came_together_goes_in_one_by_one_where_a_queue_takes_no_more(tmp_path: Path) -> None:
    house = House(tmp_path, Policies({"small": {"max-bytes": 4}}))
    sender, worker = house.port("s", "rq"), house.port("w")
    sender.say(send("small", b"aa", b"bb", b"cc", b"too large", b"dd", tickets=[1, 2, 3, 4, 5]))
    house.turn()
    assert sender.held is True
    worker.say(Consume("small", 9))
    for offset in range(4):
        house.tick()
        house.turn()
        assert len(worker.payloads()) > offset
        worker.say(settle(worker, "small", offset))
    house.tick()
    assert worker.payloads() == [b"aa", b"bb", b"cc", b"dd"]
    assert sender.heard("delivered") == [[1, 2], [3], [5]]
    assert sender.heard("undelivered") == [[4]]
    assert sender.heard("released") == [None]
    house.log.close(house.now)


@pytest.mark.parametrize("ends", ["there is room", "it leaves", "its peer is gone"])
def test_nothing_is_settled_before_there_is_room_for_what_was_sent_before_it(
    tmp_path: Path, ends: str
) -> None:
    """Or a worker that sends a result and then settles its input may have settled alone."""
    house = House(tmp_path, Policies({"small": {"max-bytes": 4}}))
    sender, worker, other = house.port("s"), house.port("w"), house.port("o")
    sender.say(send("small", b"full"), send("in", b"input", b"request"))
    sender.say(send("in", b"?", tickets=[1], wants_reply=True))
    worker.say(Consume("in", 3))
    house.turn()
    answer = Reply("in", worker.origins[2], array("q", [2]), Batch.of([b"!"]))
    worker.say(send("small", b"more"), settle(worker, "in", 0), answer, send("other", b"x"))
    house.turn()
    assert house.log.describe("in").held == 3
    assert sender.heard("replies") == []
    if ends == "there is room":
        other.say(Consume("small", 1))
        house.turn()
        other.say(settle(other, "small", 0))
        house.tick()
        assert house.log.describe("in").held == 1
        assert sender.heard("replies") == [[(1, b"!")]]
        assert worker.heard("released") == [None]
        assert house.log.describe("other").ready == 1
    else:
        if ends == "it leaves":
            house.broker.detach(worker, house.now)
        else:
            house.broker.left(worker, house.now)
        other.say(Consume("in", 3))
        house.turn()
        assert other.payloads() == [b"input", b"request", b"?"]
        assert not any("does not hold" in str(text) for text in worker.heard("log"))
    house.log.close(house.now)


def test_what_is_settled_behind_a_request_does_not_wait(tmp_path: Path) -> None:
    """Those who ask each other would wait for each other."""
    house = House(tmp_path, Policies({"small": {"max-bytes": 4}}))
    sender, worker = house.port("s"), house.port("w", "rq")
    sender.say(send("small", b"full"), send("in", b"input"))
    worker.say(Consume("in", 1))
    house.turn()
    worker.say(send("small", b"more", tickets=[1], wants_reply=True), settle(worker, "in", 0))
    assert worker.held is True
    assert house.log.describe("in").held == 0
    house.log.close(house.now)


def test_what_waits_for_room_when_its_sender_leaves_is_told(tmp_path: Path) -> None:
    house = House(tmp_path, Policies({"small": {"max-bytes": 4}}))
    sender, content = house.port("s"), house.port("c")
    sender.say(send("small", b"full"), send("small", b"1", b"2"), send("other", b"3"))
    content.say(send("other", b"x"))
    for port in (sender, content):
        house.broker.detach(port, house.now)
    assert sender.heard("log") == ["left while 3 messages that it had sent waited for room: not stored"]
    assert content.heard("log") == []
    house.log.close(house.now)


def test_nobody_overtakes_senders_that_wait_for_room(tmp_path: Path) -> None:
    house = House(tmp_path, Policies({"small": {"max-bytes": 4}}))
    first, large, worker = house.port("f"), house.port("l"), house.port("w")
    worker.say(Consume("small", 9))
    first.say(send("small", b"aa"), send("small", b"bb"))
    house.turn()
    large.say(send("small", b"LLLL"))
    assert large.held is True
    for offset in range(2):
        worker.say(settle(worker, "small", offset))
        late = house.port(f"late-{offset}")
        late.say(send("small", b"%d" % offset))  # there is room for it, and somebody came before
        late.say(send("other", b"x"))
        assert late.held is True
        house.tick()
    assert large.heard("released") == [None]
    elsewhere = house.port("e")
    elsewhere.say(send("other", b"y"))
    assert elsewhere.held is False
    house.turn()
    worker.say(settle(worker, "small", 2))
    house.tick()
    house.turn()
    assert worker.payloads() == [b"aa", b"bb", b"LLLL", b"0", b"1"]
    assert house.broker.holds_back == 0
    house.port("n").say(send("small", b"n"))
    house.turn()
    assert worker.payloads()[5:] == [b"n"]
    house.log.close(house.now)


class Broken(FakePort):
    """Messages for it find a bug."""

    def deliver(self, queue: str, slices: list[Slice], now_us: int, dead: bool) -> None:
        raise RuntimeError("a bug")


def test_a_bug_with_one_consumer_costs_neither_the_others_nor_what_came(house: House) -> None:
    broken, worker, sender = Broken(house, "b"), house.port("w"), house.port("s", "rq")
    house.broker.attach(broken)
    broken.say(Consume("q", 9))
    worker.say(Consume("r", 9))
    sender.say(send("q", b"1", tickets=[1]), send("r", b"2", tickets=[2]))
    with pytest.raises(RuntimeError, match="a bug"):
        house.broker.turn(house.now)
    house.log.wait()
    assert sender.heard("delivered") == [[1], [2]]
    house.turn()
    assert worker.payloads() == [b"2"]


def test_paused_dead_letters_off_and_draining_decline(tmp_path: Path) -> None:
    house = House(tmp_path, Policies({"q": {"dead-letters": "off"}}))
    sender, asking = house.port("s"), house.port("a", "sspq", Where.TAIL)
    sender.say(send("q", b"a"), send("p", b"b"))
    house.turn()
    asking.say(Consume("q", 1, dead=True, once=True))
    assert asking.heard("declined") == ["q"]
    house.log.pause("p", True, house.now)
    asking.say(Consume("p", 1, once=True))
    assert asking.heard("declined") == ["q", "p"]
    waiting = house.port("w", "sspq", Where.TAIL)
    waiting.say(Consume("empty", 1, once=True))
    house.broker.drain()
    assert waiting.heard("declined") == ["empty"]
    assert house.broker.is_drained
    house.log.close(house.now)


def test_names_that_no_queue_can_have_are_refused_with_a_word(house: House) -> None:
    sender = house.port("s", "rq")
    sender.say(send("q.dead", b"x", tickets=[4]), send("bad\x07name", b"x", tickets=[5]))
    house.turn()
    assert sender.heard("undelivered") == [[4], [5]]
    assert house.log.queues() == []


def test_stopping_tells_those_who_wait(house: House) -> None:
    asker = house.port("a", "rq")
    asker.say(send("q", b"x", tickets=[5], wants_reply=True))
    house.turn()
    house.broker.drain()
    house.broker.end_requests(house.now)
    assert asker.heard("undelivered") == [[5]]


def test_nobody_is_told_that_a_message_is_not_stored_when_the_log_fails() -> None:
    """It may be: what was written is there after a restart. That a request gets no answer is true."""
    disk = SimDisk()
    house = House(disk)
    sender = house.port("s", "rq")
    sender.say(send("q", b"first", tickets=[1]))
    house.turn()
    disk.fail("sync", 1, errno.EIO)
    sender.say(send("q", b"second", tickets=[2]), send("q", b"question", tickets=[3], wants_reply=True))
    house.turn()
    assert house.log.failed is not None
    assert sender.heard("delivered") == [[1]]
    assert sender.heard("undelivered") == [[3]]
    again = House(disk.kill())
    worker = again.port("w")
    worker.say(Consume("q", 10))
    again.turn()
    assert worker.payloads() == [b"first", b"second"]


# --- how fast queues are made ---------------------------------------------------------------------


def test_who_makes_queues_too_fast_waits_and_nothing_is_lost(house: House) -> None:
    house.broker.doors.new_per_second = 10
    sender, other = house.port("s"), house.port("o")
    sender.say(*(send(f"q{number}", b"%d" % number) for number in range(25)), send("q0", b"behind them"))
    house.turn()
    assert house.log.queue_count == 10
    assert sender.held
    assert any("queues-new-per-second" in str(text) for text in sender.heard("log"))
    # Nobody else waits for that, and what makes no queue is not counted.
    other.say(send("another", b""), *(send("q1", b"x") for _ in range(100)))
    house.turn()
    assert not other.held
    assert house.log.describe("q1").ready == 101
    house.tick(0.1)
    assert house.log.queue_count == 12
    for _ in range(14):
        house.tick(0.1)
    assert house.log.queue_count == 26
    assert sender.heard("released")
    assert house.log.describe("q0").ready == 2
    assert all(house.log.describe(f"q{number}").ready for number in range(25))


def test_queues_are_made_on_after_the_clock_was_set_back(house: House) -> None:
    house.broker.doors.new_per_second = 10
    sender = house.port("s")
    sender.say(*(send(f"q{number}", b"") for number in range(12)))
    house.now -= 3600 * SECOND
    house.tick()
    assert house.log.queue_count == 10
    house.tick(1.5)
    assert house.log.queue_count == 12


def test_who_leaves_while_it_waits_to_make_queues_leaves_nothing_behind(house: House) -> None:
    house.broker.doors.new_per_second = 10
    sender = house.port("s")
    sender.say(*(send(f"q{number}", b"") for number in range(12)))
    house.broker.detach(sender, house.now)
    house.tick(5)
    assert house.log.queue_count == 10
    assert house.broker.holds_back == 0


# --- much at once ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", Where)
def test_what_a_lost_consumer_held_goes_back_some_in_each_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Where
) -> None:
    monkeypatch.setattr(settling, "RUNS_A_TURN", 3)
    house = House(tmp_path, Policies({"*": {"max-deliveries": 0}}))
    worker = house.port("w", lost_to=where)
    worker.say(Consume("q", 0))
    worker.say(send("q", *[b"%d" % i for i in range(20)]))
    house.turn()
    for offset in range(1, 20, 2):
        worker.say(settle(worker, "q", offset))
    house.broker.detach(worker, house.now)
    held = []
    for _ in range(4):
        held.append(house.log.describe("q").held)
        house.broker.turn(house.now)
    assert held == [7, 4, 1, 0]
    other = house.port("o")
    other.say(Consume("q", 0))
    house.turn()
    assert other.offsets() == list(range(0, 20, 2))
    house.log.close(house.now)


def test_what_many_lost_consumers_held_goes_back_some_in_each_turn(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are lost in one turn, as where the network between is."""
    monkeypatch.setattr(settling, "RUNS_A_TURN", 3)
    workers = [house.port(f"w{number}") for number in range(5)]
    for worker in workers:
        worker.say(Consume("q", 2))
    for _ in range(2):
        workers[0].say(send("q", *[b"x"] * 5))
        house.turn()
    assert house.log.describe("q").held == 10
    for worker in workers:
        house.broker.detach(worker, house.now)
    held = []
    for _ in range(5):
        held.append(house.log.describe("q").held)
        house.broker.turn(house.now)
    assert held == [8, 6, 4, 2, 0]


def test_who_only_moves_leaves_everything_at_once(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may claim it in a moment, by the same name."""
    monkeypatch.setattr(settling, "RUNS_A_TURN", 1)
    worker = house.port("w")
    worker.say(Consume("q", 0))
    worker.say(send("q", *[b"%d" % i for i in range(6)]))
    house.turn()
    worker.say(settle(worker, "q", 1), settle(worker, "q", 3))
    house.broker.detach(worker, house.now, lost=False)
    assert house.log.describe("q").held == 0


def test_who_asks_hears_once_what_is_stored_behind_what_was_refused(house: House) -> None:
    sender, gone = house.port("s"), house.port("gone")
    sender.say(send("q", b"a"), send("not\na name", b"b", b"c"), Sync(), Sync())
    gone.say(send("q", b"d"), Sync())
    house.broker.detach(gone, house.now)
    house.broker.turn(house.now)
    assert not sender.heard("synced")
    drained = [house.broker.is_drained]
    house.log.wait()
    assert [said for said, _ in sender.told if said != "log"] == ["refused", "synced"]
    assert sender.heard("refused") == [2]
    drained.append(house.broker.is_drained)
    assert drained == [False, True]
    assert not gone.told


def test_who_leaves_waits_for_receipts(house: House) -> None:
    sender, other = house.port("s", "rq"), house.port("o")
    sender.say(send("q", b"a", tickets=[7]), Closing())
    other.say(send("q", b"b"), Sync(), Closing())
    house.broker.turn(house.now)
    assert not sender.told
    assert not other.told
    assert not house.broker.is_drained
    house.log.wait()
    assert sender.told == [("delivered", [7]), ("finished", None)]
    assert other.told == [("synced", None), ("finished", None)]


def test_a_standing_demand_waits_where_a_queue_is_paused(house: House) -> None:
    sender, worker, single = house.port("s"), house.port("w"), house.port("o", "sspq")
    sender.say(send("q", b"a"))
    house.turn()
    house.log.pause("q", True, house.now)
    worker.say(Consume("q", 5))
    single.say(Consume("q", 1, once=True))
    house.turn()
    assert single.told == [("declined", "q")]
    assert worker.told == [("consuming", "q")]
    house.log.pause("q", False, house.now)
    house.broker.stir("q")
    house.turn()
    assert worker.payloads() == [b"a"]


def test_queues_in_other_logs_of_the_process_count_too(tmp_path: Path) -> None:
    """They share the limit, which is for its memory; and none that is there is refused."""
    house, elsewhere = House(tmp_path), [1]
    house.broker = Broker(house.log, lambda: None, queues_max=3, queues_elsewhere=lambda: elsewhere[0])
    port = house.port("s")
    port.say(send("a", b"1"), send("b", b"1"), send("c", b"1"))
    assert port.heard("refused") == [1]
    assert "the limit of queues-max" in str(port.heard("log"))
    elsewhere[0] = 7  # another log is led here now
    port.say(send("a", b"2"))
    assert house.log.describe("a").offset_end == 2
