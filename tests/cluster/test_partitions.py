"""Networks that lose what goes from one part of a cluster to another, under load.

`verdict.py` says what must be true whatever they do. Where root may make them, each process is in a network
of its own (`networks.py`); elsewhere, and in what `make test` runs, there are proxies between all of them
(`proxies.py`).
"""

import os
import random
import sys
import time
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.loads import Loads
from tests.cluster.networks import MISSING, FarSite
from tests.cluster.processes import at_work
from tests.cluster.proxies import NearSite
from tests.cluster.test_faults import FLAGS, SHARDS, Say, chance, say

__all__ = ["chance", "say"]  # fixtures

CUT_SECONDS = 6.0
"""Longer than a lease, and than it takes to find out that a peer is gone."""

CUT_SECONDS_SHORT = 4.0
BAD_SECONDS = 10.0
BAD_SECONDS_SHORT = 3.0
LATE_SECONDS = 0.05

Apart = FarSite | NearSite


@pytest.fixture(scope="module", params=[1, SHARDS])
def running(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Apart]:
    folder = tmp_path_factory.mktemp("apart")
    # Any: what a site takes.
    options: dict[str, Any] = {"fronts": 3, "shards": request.param, "flags": FLAGS}
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", random.randrange(2**32)))
    with at_work(NearSite(folder, seed, **options) if MISSING else FarSite(folder, **options)) as running:
        yield running


@pytest.fixture
def far(running: Apart) -> Iterator[Apart]:
    running.balanced()
    yield running
    running.switch.heal()
    sys.stdout.write(running.logs())  # which pytest shows where the test has failed


def pairs(far: Apart, between: str) -> list[tuple[Any, Any]]:
    """Any: networks, or parts."""
    fronts, nodes = far.parts["fronts"], far.parts["nodes"]
    if between == "fronts and nodes":
        return list(product(fronts, nodes))
    return list(combinations(far.parts[between], 2))


def test_proxies_that_cut_and_lose_and_are_late(tmp_path: Path, chance: random.Random, say: Say) -> None:
    """A little of all that follows, for everybody."""
    site = NearSite(tmp_path, chance.randrange(2**32), fronts=3, shards=SHARDS, flags=FLAGS)
    with at_work(site), Loads(site, 1) as load:
        load.flows()
        for between, both in (("fronts", False), ("fronts and nodes", True)):
            one, other = chance.sample(chance.choice(pairs(site, between)), 2)
            began = time.monotonic()
            site.switch.cut(one, other, both=both)
            load.wait(CUT_SECONDS_SHORT)
            site.switch.heal()
            load.flows()
            load.lead_changed(began)
            what = f"{CUT_SECONDS_SHORT:g} s without what {one} says to {other}"
            say(f"{what}{' and back' if both else ''}: no receipt for {load.pauses(began)}")
        began = time.monotonic()
        site.switch.lose(0.05)
        site.switch.delay(LATE_SECONDS)
        load.wait(BAD_SECONDS_SHORT)
        site.switch.heal()
        load.flows()
        load.lead_changed(began)
        say(f"{BAD_SECONDS_SHORT:g} s of a bad network: no receipt for {load.pauses(began)}")
        say(load.check())


@pytest.mark.long
@pytest.mark.parametrize("both", [True, False], ids=["both ways", "one way"])
@pytest.mark.parametrize("between", ["fronts", "fronts and nodes", "nodes"])
def test_two_that_do_not_hear_each_other(far: Apart, between: str, both: bool, say: Say) -> None:
    found = pairs(far, between)
    if not both:
        found += [(other, one) for one, other in found]
    with Loads(far) as load:
        load.flows()
        for one, other in found:
            began = time.monotonic()
            far.switch.cut(one, other, both=both)
            load.wait(CUT_SECONDS)
            far.switch.heal()
            load.flows()
            load.lead_changed(began)
            say(f"{CUT_SECONDS:g} s without what {one} says to {other}: no receipt for {load.pauses(began)}")
        say(load.check())


@pytest.mark.long
@pytest.mark.parametrize("both", [True, False], ids=["both ways", "one way"])
def test_one_that_nobody_hears(far: Apart, both: bool, say: Say) -> None:
    """Every front-end and every node in turn."""
    everybody: list[Any] = [part for parts in far.parts.values() for part in parts]
    with Loads(far) as load:
        load.flows()
        for one in everybody:
            began = time.monotonic()
            for other in everybody:
                if other is not one:
                    far.switch.cut(one, other, both=both)
            load.wait(CUT_SECONDS)
            far.switch.heal()
            load.flows()
            load.lead_changed(began)
            say(f"{CUT_SECONDS:g} s without {one}: no receipt for {load.pauses(began)}")
        say(load.check())


@pytest.mark.long
@pytest.mark.parametrize("bad", ["loses", "slow"])
def test_a_bad_network(far: Apart, bad: str, say: Say) -> None:
    with Loads(far) as load:
        load.flows()
        began = time.monotonic()
        if bad == "loses":
            far.switch.lose(0.05)
        else:
            far.switch.slow(4_000_000)
        load.wait(BAD_SECONDS)
        far.switch.heal()
        load.flows()
        load.lead_changed(began)
        say(f"{BAD_SECONDS:g} s of a network that is bad ({bad}): no receipt for {load.pauses(began)}")
        say(load.check())
