"""Networks that lose what goes from one part of a cluster to another, under load.

`verdict.py` says what must be true whatever they do. Each process is in a network of its own (`networks.py`),
which takes root.
"""

import sys
import time
from collections.abc import Iterator
from itertools import combinations, product

import pytest

from tests.cluster.loads import Loads
from tests.cluster.networks import MISSING, FarSite, Network
from tests.cluster.processes import at_work
from tests.cluster.test_faults import FLAGS, SHARDS, Say, say

__all__ = ["say"]  # a fixture

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"networks of their own take {MISSING}")

CUT_SECONDS = 6.0
"""Longer than a lease, and than it takes to find out that a peer is gone."""

BAD_SECONDS = 10.0


@pytest.fixture(scope="module", params=[1, SHARDS])
def running(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[FarSite]:
    site = FarSite(tmp_path_factory.mktemp("apart"), fronts=3, shards=request.param, flags=FLAGS)
    with at_work(site) as running:
        yield running


@pytest.fixture
def far(running: FarSite) -> Iterator[FarSite]:
    running.balanced()
    yield running
    running.switch.heal()
    sys.stdout.write(running.logs())  # which pytest shows where the test has failed


def pairs(far: FarSite, between: str) -> list[tuple[Network, Network]]:
    fronts, nodes = far.parts["fronts"], far.parts["nodes"]
    if between == "fronts and nodes":
        return list(product(fronts, nodes))
    return list(combinations(far.parts[between], 2))


@pytest.mark.long
@pytest.mark.parametrize("both", [True, False], ids=["both ways", "one way"])
@pytest.mark.parametrize("between", ["fronts", "fronts and nodes", "nodes"])
def test_two_that_do_not_hear_each_other(far: FarSite, between: str, both: bool, say: Say) -> None:
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
def test_one_that_nobody_hears(far: FarSite, both: bool, say: Say) -> None:
    """Every front-end and every node in turn."""
    everybody = far.switch.networks
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
def test_a_bad_network(far: FarSite, bad: str, say: Say) -> None:
    with Loads(far) as load:
        load.flows()
        began = time.monotonic()
        if bad == "loses":
            far.switch.lose(0.05)
        else:
            far.switch.slow("4mbit")
        load.wait(BAD_SECONDS)
        far.switch.heal()
        load.flows()
        load.lead_changed(began)
        say(f"{BAD_SECONDS:g} s of a network that is bad ({bad}): no receipt for {load.pauses(began)}")
        say(load.check())
