"""Front-ends whose clocks differ: they are named, and no message runs out for it."""

import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock.client import HttpClient
from penstock.cluster.clocks import CLOCK, TIME, Clocks
from tests.cluster.processes import FrontEnd
from tests.cluster.processes import site as site_of
from tests.server.harness import until

SECOND_US = 1_000_000

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


def said(
    clocks: Clocks, member: str, ahead_us: int, late_us: int = 0, at_us: int = 1_800_000_000_000_000
) -> None:
    facts = {CLOCK: at_us + ahead_us, TIME: at_us + ahead_us}
    clocks.heard(member, facts, stamp(at_us + late_us))


def test_what_is_on_its_way_is_no_difference() -> None:
    clocks = Clocks()
    said(clocks, "a", 0)
    for late_us in (900_000, 10_000, 700_000):
        said(clocks, "b", 0, late_us)
    assert clocks.ahead_us("b", "a") == -10_000
    assert clocks.ahead_us("a", "b") == 10_000
    assert clocks.step_us("b", "a") == clocks.step_us("a", "b") == 0


@pytest.mark.parametrize(("ahead_us", "step_us"), [(999_999, 0), (SECOND_US, SECOND_US), (-5 * SECOND_US, 0)])
def test_only_forward_is_a_step(ahead_us: int, step_us: int) -> None:
    clocks = Clocks()
    said(clocks, "a", 0)
    said(clocks, "b", ahead_us)
    assert clocks.ahead_us("b", "a") == ahead_us
    assert clocks.step_us("b", "a") == step_us


def test_a_clock_that_is_set_right_is_right_after_some_records() -> None:
    clocks = Clocks()
    said(clocks, "a", 0)
    said(clocks, "b", 7200 * SECOND_US)
    for _ in range(8):
        said(clocks, "b", 0)
    assert clocks.ahead_us("b", "a") == 0


@pytest.mark.parametrize("facts", [{}, {CLOCK: 1}, {CLOCK: "1", TIME: 1}, {CLOCK: None, TIME: None}])
def test_who_says_nothing_of_its_clock_has_none(facts: dict[str, object]) -> None:
    clocks = Clocks()
    said(clocks, "a", 0)
    clocks.heard("b", facts, stamp(1_800_000_000_000_000))
    clocks.heard("a", {CLOCK: 1, TIME: 1}, "yesterday")
    assert clocks.ahead_us("b", "a") is None
    assert clocks.ahead_us("nobody", "a") is None
    assert clocks.step_us("a", "b") == clocks.step_us("b", "a") == 0


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
