"""The router of a front-end, over brokers whose disks do nothing until a test says so.

A seeded run (`python -m tests.cluster.test_routing SEED [COUNT]`) has workers who take from one shard, send
what they made of it to another, settle, and leave at any time, while each disk syncs when it likes; then the
power fails. No input is gone without its result.
"""

import asyncio
import errno
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from penstock.broker.broker import Broker
from penstock.cluster import routing
from penstock.cluster.lanes import MAIN
from penstock.cluster.remote_broker import RemoteBroker
from penstock.cluster.routing import Router, ShardPort
from penstock.log.errors import LogFailed
from penstock.log.log import Log
from penstock.log.state import LogSettings
from penstock.model.batch import Batch, Slice
from penstock.model.life import State
from penstock.model.policy import Policies
from penstock.model.shards import shard_of
from penstock.model.words import Cancel, Closing, Command, Consume, Outcome, Reply, Settle, Sync
from tests.broker.test_broker import SECOND, FakePort, House, send, settle
from tests.log.simdisk import SimDisk
from tests.seeds import SEED, SEEDED, Say, run_seeds

SHARDS = 3
SMALL = LogSettings(segment_bytes=1 << 14, syncs_apart_us=0)


def queue_in(shard: int, name: str = "q") -> str:
    return next(it for it in (f"{name}.{n}" for n in range(1000)) if shard_of(it, SHARDS) == shard)


A, B, C = (queue_in(shard) for shard in range(SHARDS))


class Port(FakePort):
    """One that takes from several queues."""

    def deliver(self, queue: str, slices: list[Slice], now_us: int, dead: bool) -> None:
        super().deliver(queue, slices, now_us, dead)
        for piece in slices:
            for offset in range(piece.offset_start, piece.offset_end):
                self.origin_of[queue, offset] = piece.origin

    def __init__(self, house: Any, name: str, protocol: str = "phpmq") -> None:
        super().__init__(house, name, protocol)
        self.origin_of: dict[tuple[str, int], bytes] = {}


class Houses:
    """A router over several of them."""

    def __init__(self, policies: Policies | None = None) -> None:
        self.disks = [SimDisk() for _ in range(SHARDS)]
        self.houses = [House(disk, policies, SMALL) for disk in self.disks]
        self.failed: list[LogFailed] = []
        homes = []
        for shard, house in enumerate(self.houses):
            house.broker = Broker(house.log, self.wants(shard))
            homes.append(house.broker)
        self.broker = Router(homes, lambda: self.now, lambda: None, self.failed.append)

    def wants(self, shard: int) -> Callable[[], None]:
        return lambda: self.broker.want(shard)

    @property
    def now(self) -> int:
        return self.houses[0].now

    def pass_time(self, seconds: float) -> None:
        for house in self.houses:
            house.now += int(seconds * SECOND)

    def port(self, name: str, protocol: str = "phpmq") -> Port:
        port = Port(self, name, protocol)
        self.broker.attach(port)
        return port

    def turn(self, *synced: int) -> None:
        """A few turns, in which these disks do what they are told; told none, all do."""
        for _ in range(4):
            self.broker.turn(self.now)
            for shard in synced or range(SHARDS):
                self.houses[shard].log.wait()

    def ready(self, queue: str) -> int:
        return self._log(queue).describe(queue).ready

    def is_drained(self) -> bool:
        return self.broker.is_drained

    def held(self, queue: str) -> int:
        return self._log(queue).describe(queue).held

    def _log(self, queue: str) -> Log:
        return self.houses[shard_of(queue, SHARDS)].log


@pytest.fixture
def houses() -> Houses:
    return Houses()


def at_work(houses: Houses, *more: Command) -> Port:
    """Who holds a message of A, and has sent to B what is not on the disk."""
    houses.port("s").say(send(A, b"input"))
    worker = houses.port("w")
    worker.say(Consume(A, 5))
    houses.turn()
    assert worker.payloads() == [b"input"]
    worker.say(send(B, b"result"), settle(worker, A, 0), *more)
    houses.turn(0, 2)
    return worker


def test_a_settlement_waits_for_what_was_sent_to_other_shards(houses: Houses) -> None:
    worker = at_work(houses)
    assert houses.held(A) == 1
    worker.say(send(A, b"other"))  # which waits for nothing
    houses.turn(0, 2)
    assert worker.payloads() == [b"input", b"other"]
    houses.turn()
    assert (houses.held(A), houses.ready(A)) == (1, 0)
    worker.say(settle(worker, A, 1))
    assert houses.held(A) == 0  # at once


def test_a_question_is_answered_when_all_shards_have_what_was_said(houses: Houses) -> None:
    worker = at_work(houses, Sync())
    assert not worker.heard("synced")
    houses.turn()
    assert worker.heard("synced") == [None]
    houses.port("nothing").say(Sync())


def test_who_asks_again_and_again_is_answered(houses: Houses) -> None:
    worker = at_work(houses, Sync())
    for _ in range(3):
        worker.say(send(B, b"more"), Sync())
    houses.houses[1].log.wait()  # what was said before the first
    houses.broker.turn(houses.now)
    houses.houses[1].log.wait()
    assert len(worker.heard("synced")) == 1
    houses.turn()
    assert len(worker.heard("synced")) == 2


def test_a_question_that_is_asked_again_lets_nothing_overtake(houses: Houses) -> None:
    """Settlements between two questions wait for what was sent before them, and not for the questions."""
    houses.port("s").say(send(A, b"input"))
    worker = houses.port("w")
    worker.say(Consume(A, 5))
    houses.turn()
    worker.say(Sync(), send(B, b"result"), Sync(), settle(worker, A, 0), Sync(), Sync())
    assert houses.held(A) == 1
    houses.turn(0, 2)
    assert houses.held(A) == 1
    houses.turn()
    assert houses.held(A) == 0


def test_who_leaves_with_settlements_under_way_consumes_no_more_and_has_settled(houses: Houses) -> None:
    worker = at_work(houses)
    houses.broker.detach(worker, houses.now)
    assert not houses.is_drained()
    houses.port("s2").say(send(A, b"for nobody"))
    houses.turn(0, 2)
    assert worker.payloads() == [b"input"]
    assert houses.ready(A) == 1
    houses.turn()
    assert houses.is_drained()
    assert houses.held(A) == 0
    assert houses.ready(A) == 1


@pytest.mark.parametrize("why", ["idle", "blocked"])
def test_who_is_not_heard_of_or_does_not_read_gets_nothing_from_any_shard(houses: Houses, why: str) -> None:
    houses.port("s").say(send(A, b"first"), send(B, b"second"))
    worker = houses.port("w", "rq")
    worker.say(Consume(A, 5))
    getattr(houses.broker, why)(worker, True)
    worker.say(Consume(B, 5))  # a shard that it had no port in
    houses.turn()
    assert not worker.got
    getattr(houses.broker, why)(worker, False)
    houses.turn()
    assert sorted(worker.payloads()) == [b"first", b"second"]


def test_a_shard_that_says_nothing_is_not_waited_for_for_ever(houses: Houses) -> None:
    worker = at_work(houses)
    houses.broker.detach(worker, houses.now)
    houses.pass_time(routing.LEAVING_SECONDS / 2)
    houses.broker.tick(houses.now)
    assert houses.held(A) == 1
    houses.pass_time(routing.LEAVING_SECONDS)
    houses.broker.tick(houses.now)
    assert houses.ready(A) == 1  # again
    assert "comes again" in str(worker.heard("log"))
    houses.turn()
    assert houses.is_drained()


def test_who_leaves_keeps_no_more_than_so_much(houses: Houses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "LEAVING_BYTES", routing.RUN_BYTES)
    workers = [at_work(houses)]
    houses.port("s").say(send(A, b"more"))
    second = houses.port("w2")
    workers[0].say(Cancel(A, False))
    second.say(Consume(A, 5))
    houses.turn(0)
    second.say(send(B, b"result"), settle(second, A, 1))
    for worker in (*workers, second):
        houses.broker.detach(worker, houses.now)
    assert (houses.held(A), houses.ready(A)) == (1, 1)


def test_nothing_is_settled_behind_what_may_be_lost(houses: Houses) -> None:
    leaver, worker = at_work(houses), houses.port("w2")
    houses.broker.detach(leaver, houses.now)
    houses.port("s2").say(send(A, b"other"))
    worker.say(Consume(A, 5))
    houses.turn(0)
    worker.say(send(B, b"result"), settle(worker, A, 1))
    assert houses.held(A) == 2
    for port in houses.broker.ports_of(1):
        houses.broker.lose(port)
    houses.turn()
    assert worker.payloads() == [b"other", b"input"]
    assert houses.held(A) == 2


def test_what_fails_in_one_shard_keeps_no_word_from_the_others(houses: Houses) -> None:
    sender = houses.port("s")
    houses.disks[1].fail("sync", 1, errno.EIO)
    sender.say(send(B, b"b"))
    houses.turn()
    sender.say(send(A, b"a"), send(B, b"b"), send(C, b"c"))
    assert houses.failed
    assert [houses.ready(queue) for queue in (A, C)] == [1, 1]


def test_who_is_let_go_by_one_shard_and_says_more_is_waited_for(houses: Houses) -> None:
    sender = houses.port("s", "rq")
    sender.say(send(A, b"a", tickets=[1]))
    houses.turn()
    sender.say(send(B, b"b", tickets=[2]), Closing())
    houses.turn(0, 2)
    assert not sender.heard("finished")
    sender.say(send(A, b"c", tickets=[3]))
    houses.broker.turn(houses.now)
    houses.houses[1].log.wait()
    assert sender.heard("delivered") == [[1], [2]]
    assert not sender.heard("finished")
    houses.turn()
    assert sender.heard("delivered") == [[1], [2], [3]]
    assert sender.heard("finished")


def test_who_leaves_last_of_all_is_let_go_whatever_waited(houses: Houses) -> None:
    worker = at_work(houses)
    houses.broker.dismiss()
    houses.turn(0, 2)
    assert not worker.heard("finished")
    houses.turn()
    assert worker.heard("finished")
    assert houses.held(A) == 0


def test_answers_that_wait_are_bounded_by_their_bytes(houses: Houses) -> None:
    asker, worker = houses.port("a", "rq"), houses.port("w", "rq")
    worker.say(Consume(A, 5))
    asker.say(send(A, b"?", tickets=[1], wants_reply=True))
    houses.turn()
    worker.say(send(B, b"result"))
    answer = Batch.of([bytes(routing.WAITING_BYTES)], protocol="rq")
    offsets = send(A, b"", tickets=[0]).tickets
    assert offsets is not None
    worker.say(Reply(A, worker.origins[0], type(offsets)("q", [0]), answer))
    assert worker.held
    houses.turn()
    assert worker.heard("released")
    assert asker.heard("replies")


# --- a shard is elsewhere --------------------------------------------------------------------------------


class Said:
    """A link to the leader that takes all, and says nothing."""

    is_full = False

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def write(self, frame: bytes) -> None:
        self.frames.append(frame)

    def flush(self) -> None:
        """Nobody reads it."""


def test_a_settlement_waits_for_what_was_sent_before_it_and_not_for_what_is_sent_later() -> None:
    """Or who goes on sending to one shard would settle nothing of another."""

    async def run() -> None:
        houses = Houses()
        houses.port("s").say(send(A, b"input"))
        remote = RemoteBroker("a", houses.wants(1), connection_buffer_bytes=1 << 20, shard=1)
        houses.broker.homes[1] = remote
        link: Any = Said()
        remote._link_up(link)
        worker = houses.port("w")
        worker.say(Consume(A, 5))
        houses.turn(0)
        worker.say(send(B, b"result"), settle(worker, A, 0))
        houses.turn(0)
        for number in range(3):  # The disk of that leader is always one message behind.
            worker.say(send(B, b"other"))
            houses.turn(0)
            assert houses.held(A) == (number == 0)
            remote._sending.stored(MAIN, number)

    asyncio.run(run())


def test_a_shard_that_is_led_elsewhere_wants_turns_while_something_waits() -> None:
    async def run() -> None:
        houses = Houses()
        wanted: list[None] = []
        remote = RemoteBroker("a", lambda: wanted.append(None), connection_buffer_bytes=1 << 20, shard=1)
        houses.broker.homes[1] = remote
        remote.tick(houses.now)
        assert not wanted
        link: Any = Said()
        remote._link_up(link)
        houses.port("w").say(send(B, b"result"))
        remote.turn(houses.now)
        wanted.clear()
        remote.tick(houses.now)
        assert wanted
        remote._sending.stored(MAIN, 0)
        wanted.clear()
        remote.tick(houses.now)
        assert not wanted

    asyncio.run(run())


# --- beside one broker -------------------------------------------------------------------------------


class Twins:
    """The same words to a router, and to one broker."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        policies = Policies({"*": {"max-deliveries": 3}})
        self.many, self.one = Houses(policies), House(SimDisk(), policies, SMALL)
        self.ports: list[tuple[Port, Port]] = []
        self.names = 0
        self.tickets = 0
        self.counts: Counter[str] = Counter()

    def run(self) -> "Counter[str]":
        for _ in range(self.rng.randint(20, 80)):
            if len(self.ports) < 2 or (len(self.ports) < 5 and self.rng.random() < 0.1):
                self.names += 1
                protocol = self.rng.choice(("phpmq", "rq"))
                name = f"{protocol}#{self.names}"
                other = Port(self.one, name, protocol)
                self.one.broker.attach(other)
                self.ports.append((self.many.port(name, protocol), other))
            elif self.rng.random() < 0.05:
                ports = self.ports.pop(self.rng.randrange(len(self.ports)))
                lost = self.rng.random() < 0.5
                self.many.broker.detach(ports[0], self.many.now, lost=lost)
                self.one.broker.detach(ports[1], self.one.now, lost=lost)
            else:
                self.say()
            self.rest()
            self.compare()
        return self.counts

    def rest(self) -> None:
        self.many.turn()
        for _ in range(4):
            self.one.turn()

    def say(self) -> None:
        ports = self.rng.choice(self.ports)
        chunks: tuple[list[Command], list[Command]] = [], []
        settled: set[tuple[str, int]] = set()
        for _ in range(self.rng.randint(1, 4)):
            queue = self.rng.choice((A, B, C))
            what = self.rng.choice(
                ("publish", "publish", "ask", "consume", "cancel", "settle", "settle", "sync")
            )
            count = self.rng.randint(1, 3)
            if what == "ask" and ports[0].protocol != "rq":
                what = "publish"
            self.counts[what] += 1
            tickets = None
            if what == "ask" or (what == "publish" and ports[0].protocol == "rq"):
                tickets = [*range(self.tickets, self.tickets + count)]
                self.tickets += count
            credit = self.rng.randint(1, 4)
            outcome = self.rng.choice((Outcome.ACK, Outcome.REQUEUE, Outcome.REJECT))
            held = [it for it in ports[1].got if (it[0], it[1]) not in settled and it[0] == queue]
            for chunk, port in zip(chunks, ports, strict=True):
                if what in ("publish", "ask"):
                    bodies = [b"%d.%d" % (self.counts.total(), n) for n in range(count)]
                    chunk.append(send(queue, *bodies, tickets=tickets, wants_reply=what == "ask"))
                elif what == "consume":
                    chunk.append(Consume(queue, credit, exclusive=credit == 4, priority=credit % 2))
                elif what == "cancel":
                    chunk.append(Cancel(queue, False))
                elif what == "sync":
                    chunk.append(Sync())
                elif held:
                    offset = held[-1][1]
                    origin = port.origin_of[queue, offset]
                    chunk.append(Settle(queue, outcome, origin, [(offset, offset + 1)], delay_us=0))
                    settled.add((queue, offset))
        for settles in (False, True):  # What settles may come later than what is said beside it.
            for chunk, port in zip(chunks, ports, strict=True):
                if said := [command for command in chunk if isinstance(command, Settle) is settles]:
                    port.say(*said)
            self.rest()

    def compare(self) -> None:
        for mine, other in self.ports:
            for queue in (A, B, C):
                got = [[it for it in port.got if it[0] == queue] for port in (mine, other)]
                assert got[0] == got[1], f"{mine.name} got of {queue}"
                said = [
                    [what for word, what in port.told if word in ("consuming", "declined") and what == queue]
                    for port in (mine, other)
                ]
                assert said[0] == said[1], f"{mine.name} was told of {queue}"
            for word in ("delivered", "undelivered", "replies"):
                heard = [sorted(map(str, port.heard(word))) for port in (mine, other)]
                assert heard[0] == heard[1], f"{mine.name}: {word}"
            assert len(mine.heard("synced")) == len(other.heard("synced"))
        for queue in (A, B, C):
            if self.one.log.has_queue(queue):
                infos = [log.describe(queue) for log in (self.many._log(queue), self.one.log)]
                counts = [(info.ready, info.held, info.dead, info.offset_end) for info in infos]
                assert counts[0] == counts[1], queue


@pytest.mark.parametrize("number", range(1, 7 if not SEEDED else 200))
def test_many_logs_do_what_one_does(number: int) -> None:
    seed = number + 1000 * int(SEED or 0)
    Twins(seed).run()


# --- the power fails ---------------------------------------------------------------------------------


def walk(seed: int, say: Say | None = None) -> "Counter[str]":
    """Every result is sent before its input is settled, however far each disk was when the power failed."""
    rng = random.Random(seed)
    houses = Houses()
    counts: Counter[str] = Counter()
    queues = [queue_in(shard, name) for shard in range(SHARDS) for name in ("in", "out")]
    inputs, outputs = queues[::2], queues[1::2]
    sender = houses.port("s")
    workers: list[Port] = []
    seen: dict[Port, int] = {}
    made = 0

    def work(worker: Port) -> None:
        for queue, offset, payload in worker.got[seen.get(worker, 0) :][: rng.randint(1, 3)]:
            seen[worker] = seen.get(worker, 0) + 1
            origin = worker.origin_of[queue, offset]
            words: list[Command] = [
                send(rng.choice(outputs), b"of " + payload),
                Settle(queue, Outcome.ACK, origin, [(offset, offset + 1)]),
            ]
            counts["worked"] += 1
            if rng.random() < 0.5:
                worker.say(*words)
            else:
                worker.say(words[0])
                worker.say(words[1])

    for _ in range(rng.randint(30, 150)):
        step = rng.random()
        if step < 0.2:
            made += 1
            sender.say(send(rng.choice(inputs), b"%d" % made))
        elif step < 0.3 and len(workers) < 3:
            workers.append(houses.port(f"w{counts['workers']}"))
            counts["workers"] += 1
            workers[-1].say(*(Consume(queue, 3) for queue in inputs))
        elif step < 0.6 and workers:
            work(rng.choice(workers))
        elif step < 0.65 and workers:
            counts["left"] += 1
            houses.broker.detach(workers.pop(rng.randrange(len(workers))), houses.now)
        elif step < 0.8:
            houses.broker.turn(houses.now)
        elif step < 0.82:
            houses.pass_time(rng.choice((0.1, 3)))
            houses.broker.tick(houses.now)
        else:
            log = rng.choice(houses.houses)
            for _ in range(rng.randint(1, 4)):
                log.writer.step()
            log.log.poll()
    after = [House(disk.crash(rng), settings=SMALL) for disk in houses.disks]
    results: set[bytes] = set()
    gone: set[bytes] = set()
    for house in after:
        for queue in house.log.queues():
            info = house.log.describe(queue)
            messages = {
                offset: payload
                for piece in house.log.read(queue, 0, info.offset_end)
                for offset, payload in enumerate(piece.messages(), piece.offset_start)
            }
            if queue in outputs:
                results |= set(messages.values())
                continue
            runs = house.log.states(queue, 0, 1 << 40, 1 << 30)
            alive = {
                offset
                for i in range(len(runs))
                if State(runs.state[i]) in (State.READY, State.DELAYED)
                for offset in range(runs.first[i], runs.end[i])
            }
            gone |= {payload for offset, payload in messages.items() if offset not in alive}
    counts["settled"] += len(gone)
    counts["results"] += len(results)
    lost = {payload for payload in gone if b"of " + payload not in results}
    assert not lost, f"seed {seed}: settled, and no result is there: {sorted(lost)}"
    return counts


def test_no_input_is_gone_without_its_result_when_the_power_fails() -> None:
    first = 1 + 10_000 * int(SEED or 0)
    counts: Counter[str] = Counter()
    for seed in range(first, first + (60 if not SEEDED else 2000)):
        counts += walk(seed)
    assert counts["settled"] > 20
    assert counts["left"] > 20


def test_a_settlement_that_waits_for_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing.Routed, "behind", lambda self, shard: {})

    def walks() -> None:
        for seed in range(1, 200):
            walk(seed)

    with pytest.raises(AssertionError, match="no result is there"):
        walks()


# --- a shard is handed over ----------------------------------------------------------------------------


def adopted(houses: Houses, shard: int) -> RemoteBroker:
    """As `Shard` does it."""
    remote = RemoteBroker("a", houses.wants(shard), connection_buffer_bytes=1 << 20, shard=shard)
    house = houses.houses[shard]
    house.broker.suspend(True)
    house.broker.turn(houses.now)
    remote.adopt(house.broker, house.log, houses.broker.ports_of(shard), houses.now)
    houses.broker.homes[shard] = remote
    return remote


@pytest.mark.parametrize("asked_before", [False, True])
def test_a_settlement_waits_for_what_was_sent_to_a_shard_that_is_handed_over(asked_before: bool) -> None:
    async def run() -> None:
        houses = Houses()
        houses.port("s").say(send(A, b"input"))
        worker = houses.port("w")
        worker.say(Consume(A, 5))
        houses.turn()
        worker.say(send(B, b"result"))
        if asked_before:
            worker.say(settle(worker, A, 0))
        remote = adopted(houses, 1)
        if not asked_before:
            worker.say(settle(worker, A, 0))
        assert houses.held(A) == 1
        assert not remote.is_drained
        houses.houses[1].log.wait()
        remote.all_stored()
        houses.turn(0)
        assert houses.held(A) == 0

    asyncio.run(run())


def test_who_holds_messages_of_a_shard_that_is_handed_over_has_them_with_their_attempts() -> None:
    async def run() -> None:
        houses = Houses()
        houses.port("s").say(send(A, b"one", b"two"))
        worker = houses.port("w")
        worker.say(Consume(A, 5))
        houses.turn()
        worker.say(settle(worker, A, 0, Outcome.REQUEUE))
        houses.pass_time(3600)
        houses.broker.tick(houses.now)
        houses.turn()
        assert worker.payloads() == [b"one", b"two", b"one"]
        remote = adopted(houses, 0)
        (port,) = houses.broker.ports_of(0)[1:]
        assert isinstance(port, ShardPort)
        seat = remote._seating.of(port)
        assert seat is not None
        assert [(*it,) for it in seat.holds[A, False]] == [(0, 2, worker.origins[0])]
        assert [(*it,) for it in seat.attempts[A, False]] == [(0, 1, 1)]
        assert remote.demands(port) == [(A, False)]

    asyncio.run(run())


if __name__ == "__main__":
    run_seeds(sys.argv[1:], walk)
