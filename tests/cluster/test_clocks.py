"""Front-ends whose clocks differ: they are named, and no message runs out for it."""

import sys
import threading
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.client import HttpClient
from penstock.cluster.clocks import CLOCK, TIME, Clocks
from penstock.cluster.shard import Shard
from penstock.common.clock import Clock
from penstock.log.disk import RealDisk
from penstock.log.log import Log
from penstock.model.batch import Batch
from penstock.server.backend import Served
from penstock.server.server import Server
from penstock.server.settings import Limits
from tests.cluster.processes import FrontEnd
from tests.cluster.processes import site as site_of
from tests.log.inline import InlineWorker
from tests.server.harness import until

SECOND_US = 1_000_000
SHARDS = 4

AHEAD = """
import runpy, time
really = time.time_ns
time.time_ns = lambda: really() + {seconds} * 10**9
runpy.run_module("penstock", run_name="__main__")
"""


def stamp(time_us: int) -> str:
    """As NATS writes it, with nine digits."""
    at = datetime.fromtimestamp(time_us / SECOND_US, UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{time_us % SECOND_US:06d}789Z"


AT_US = 1_800_000_000 * SECOND_US


class Ours(Clocks):
    """What front-end `a` hears; its own clock is right."""

    def __init__(self) -> None:
        self.stepped = 0
        super().__init__("a", lambda: self.stepped)

    def round(self, member: str, ahead_us: int, late_us: int = 0, node_us: int = 0, **facts: object) -> None:
        """Both say something, `member` a moment later. By `node_us` is the clock of the node ahead."""
        own = AT_US + self.stepped
        self.heard("a", {CLOCK: own, TIME: own}, stamp(AT_US + node_us))
        theirs = AT_US + ahead_us
        self.heard(member, {CLOCK: theirs, TIME: theirs, **facts}, stamp(AT_US + late_us + node_us))


def test_what_is_long_on_its_way_is_no_difference() -> None:
    clocks = Ours()
    for late_us in (900_000, 10_000, 5_000_000, 20_000, 10_000):
        clocks.round("b", 0, late_us, leads=True)
    assert clocks.ahead_us("b") == -20_000
    assert clocks.step_us() == 0


@pytest.mark.parametrize(
    ("ahead_us", "step_us"), [(-999_999, 0), (-SECOND_US, SECOND_US), (5 * SECOND_US, 0)]
)
def test_only_forward_is_a_step(ahead_us: int, step_us: int) -> None:
    clocks = Ours()
    clocks.round("b", ahead_us, leads=True)
    assert clocks.ahead_us("b") == ahead_us
    assert clocks.step_us() == step_us


def test_a_clock_that_is_set_right_is_right_after_some_records() -> None:
    clocks = Ours()
    clocks.round("b", 7200 * SECOND_US)
    for _ in range(8):
        clocks.round("b", 0)
    assert clocks.ahead_us("b") == 0


@pytest.mark.parametrize("hours", [-2, 2])
def test_another_node_that_stamps_with_a_wrong_clock_is_no_difference(hours: int) -> None:
    """The leader dies with the node that has stamped until then: only we have stamps of the next one."""
    clocks = Ours()
    for _ in range(8):
        clocks.round("b", 0, leads=True)
    clocks.round("c", 0)
    for _ in range(8):
        clocks.round("c", 0, node_us=hours * 3600 * SECOND_US)
    assert clocks.ahead_us("c") == 0
    assert clocks.step_us() == 0
    # Nor where it comes between their records.
    clocks.heard("b", {CLOCK: AT_US, TIME: AT_US}, stamp(AT_US))
    assert clocks.ahead_us("b") == 0


def test_who_had_the_lease_and_has_not_led_is_not_compared_with() -> None:
    clocks = Ours()
    for _ in range(3):
        clocks.round("b", 0, leads=True)
        clocks.round("c", -7200 * SECOND_US, leads=False)
    assert clocks.step_us() == 0
    clocks.heard("a", {"leads": True}, "")
    clocks.round("c", -7200 * SECOND_US, leads=False)
    assert clocks.step_us() == 0
    clocks.round("c", -7200 * SECOND_US, leads=True)
    assert clocks.step_us() == 7200 * SECOND_US


def test_our_own_clock_may_be_put_forward_when_the_leader_is_gone() -> None:
    clocks = Ours()
    clocks.round("b", 0, leads=True)
    clocks.stepped = 7200 * SECOND_US
    assert clocks.step_us() == 7200 * SECOND_US
    clocks.round("b", 0, leads=True)
    assert clocks.step_us() == 7200 * SECOND_US


@pytest.mark.parametrize("facts", [{}, {CLOCK: 1}, {CLOCK: "1", TIME: 1}, {CLOCK: None, TIME: None}])
def test_who_says_nothing_of_its_clock_has_none(facts: dict[str, object]) -> None:
    clocks = Ours()
    clocks.round("c", -7200 * SECOND_US, leads=True)
    clocks.heard("b", {**facts, "leads": True}, stamp(AT_US))
    clocks.heard("a", {CLOCK: 1, TIME: 1}, "yesterday")
    assert clocks.ahead_us("b") is None
    assert clocks.ahead_us("nobody") is None
    assert clocks.step_us() == 0


def test_it_is_heard_and_asked_by_two_threads() -> None:
    clocks = Ours()
    clocks.round("b", 0, leads=True)
    before, ended = sys.getswitchinterval(), threading.Event()

    def hear() -> None:
        while not ended.is_set():
            clocks.heard("b", {CLOCK: AT_US, TIME: AT_US}, stamp(AT_US))

    thread = threading.Thread(target=hear)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(20_000):
            assert clocks.ahead_us("b") == clocks.step_us() == 0
    finally:
        sys.setswitchinterval(before)
        ended.set()
        thread.join()


class Hasty(FrontEnd):
    """Its clock is two hours ahead of everybody's."""

    def command(self) -> list[str]:
        executable, _, _, *rest = super().command()
        assert executable == sys.executable
        return [executable, "-c", AHEAD.format(seconds=7200), *rest]


def test_a_leader_whose_clock_is_ahead_ends_nothing_by_it(tmp_path: Path) -> None:
    with site_of(tmp_path, nodes=1, fronts=1) as site:
        (first,) = site.fronts
        with HttpClient(first.url("http")) as mq:
            mq.send("orders", b"keep", ttl=3600)
        hasty = Hasty("z", tmp_path / "z", site.nodes, site.nodes.urls).start()
        site.fronts.append(hasty)

        def found() -> list[dict[str, str]]:
            return [it for it in first.ask("/v1/engine")["cluster"]["checks"] if it["name"] == "clocks"]

        until(lambda: found() != [], "the clock to be named")
        (check,) = found()
        assert check["level"] == "warn"
        assert "z-" in check["text"]
        assert " ahead" in check["text"]
        assert "clocks" in first.ask("/readyz")["warnings"]
        first.kill()
        assert site.leader(hasty) is hasty
        hasty.says("ahead of that of")
        with HttpClient(hasty.url("http")) as mq:
            # It ticks ten times a second: what would have expired has, behind one more message.
            mq.send("orders", b"more")
            mq.send("ticks", b"", ttl=1)
            until(lambda: not [*mq.peek("ticks", state="ready")], "what runs out by itself to run out")
            assert [it.body for it in mq.consume("orders", count=2, timeout=5)] == [b"keep", b"more"]


@pytest.mark.long
def test_a_log_of_a_clock_that_was_ahead_ends_nothing_of_others(tmp_path: Path) -> None:
    """Whoever takes it over goes on with its time, in all that it leads."""
    with site_of(tmp_path, nodes=1, fronts=1, shards=SHARDS) as site:
        (first,) = site.fronts
        queues = [site.queue(shard) for shard in range(SHARDS)]
        with HttpClient(first.url("http")) as mq:
            for queue in queues:
                mq.send(queue, b"keep", ttl=3600)
        hasty = Hasty("z", tmp_path / "z", site.nodes, site.nodes.urls).start()
        site.fronts.append(hasty)
        site.balanced()
        led = [queue for queue, name in zip(queues, site.leaders(first), strict=True) if name == "z"]
        with HttpClient(first.url("http")) as mq:
            for queue in led:  # which it stores with its own time
                mq.send(queue, b"more", ttl=3600)
        hasty.kill()
        until(lambda: site.leaders(first) == [first.name] * SHARDS, "it to lead alone")
        first.says("the clock of this machine is behind the log")
        with HttpClient(first.url("http")) as mq:
            mq.send("ticks", b"", ttl=1)
            until(lambda: not [*mq.peek("ticks", state="ready")], "what runs out by itself to run out")
            for queue in queues:
                kept = [b"keep", b"more"] if queue in led else [b"keep"]
                assert [it.body for it in mq.consume(queue, count=len(kept), timeout=5)] == kept, queue


def test_the_time_of_a_log_that_is_ahead_is_a_step_for_the_others(tmp_path: Path) -> None:
    """A server leads one, and comes to lead another one that somebody else has written."""
    now_us = AT_US + 7200 * SECOND_US
    logs = [
        Log.open(RealDisk(str(tmp_path / name)), us, writer=InlineWorker(), keeper=InlineWorker())
        for name, us in (("ours", AT_US), ("theirs", now_us))
    ]
    server: Any = Server.__new__(Server)
    server.clock = Clock(lambda: AT_US * 1000, lambda: 0)
    server.now_us, server._port_numbers, server.limits = server.clock.now_us, count(), Limits()
    server.settings, server.want_turn = SimpleNamespace(policies=logs[0].policies), lambda: None
    broker = server.make_broker(logs[0])
    logs[0].append("q", Batch.of([b"keep"], ttl_seconds=[3600]), AT_US)
    broker.turn(AT_US)
    logs[0].wait()
    server.served = (Served(0, broker, logs[0]),)
    server.make_broker(logs[1])
    assert server.now_us() == now_us
    assert server.clock.stepped_us == now_us - AT_US
    for passed_us, ready in ((0, 1), (3601 * SECOND_US, 0)):
        broker.tick(now_us + passed_us)
        assert logs[0].describe("q").ready == ready
    for it in logs:
        it.abandon()


class Opened:
    """What is asked of a log that was opened."""

    def __init__(self, found_us: int) -> None:
        self.found_us = found_us
        self.steps: list[int] = []

    def step(self, by_us: int, now_us: int) -> None:
        self.steps.append(by_us)


@pytest.mark.parametrize(
    ("idle_us", "steps"),
    [(3 * 7200 * SECOND_US, [7200 * SECOND_US]), (4 * SECOND_US, [4 * SECOND_US]), (900_000, []), (-1, [])],
)
def test_a_step_that_somebody_has_made_a_moment_ago_is_not_made_again(idle_us: int, steps: list[int]) -> None:
    """Who took over, and died before it could say so: the time of its log is further than it has told."""
    shard: Any = Shard.__new__(Shard)
    clocks, shard.number = Ours(), 0
    shard._server, shard._front = SimpleNamespace(now_us=lambda: AT_US), SimpleNamespace(clocks=clocks)
    clocks.round("b", -7200 * SECOND_US, leads=True)
    shard._keep_what_is_left(opened := Opened(AT_US - idle_us))
    assert opened.steps == steps


def test_a_log_knows_what_time_it_was_in_it_when_it_was_opened(tmp_path: Path) -> None:
    def opened(now_us: int) -> Log:
        return Log.open(RealDisk(str(tmp_path)), now_us, writer=InlineWorker(), keeper=InlineWorker())

    first = opened(AT_US)
    assert first.found_us == 0
    first.close(AT_US + SECOND_US)
    second = opened(AT_US + 7200 * SECOND_US)
    assert AT_US <= second.found_us <= AT_US + SECOND_US
    assert second.time_us == AT_US + 7200 * SECOND_US
    second.abandon()
