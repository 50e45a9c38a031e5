"""RQ, rule by rule, at a follower: what a broker keeps, its clients find kept through the relay.

A PONG comes from the follower here. It says as much as a broker's: a link keeps the order of all its words.
"""

from collections.abc import Iterator

import pytest

from tests.cluster.fronts import Follower, follower_at_work
from tests.server.test_rq_rules import *  # noqa: F403 - all its tests, with another broker


@pytest.fixture(scope="module")  # type: ignore[no-redef]
def broker(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Follower]:
    with follower_at_work(tmp_path_factory.mktemp("rq")) as follower:
        yield follower
