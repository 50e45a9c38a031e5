"""RQ, rule by rule, where queues are in several logs, as at a follower."""

from collections.abc import Iterator

import pytest

from tests.cluster.fronts import Crossing, crossing_at_work
from tests.server.test_rq_rules import *  # noqa: F403 - all its tests, with another broker


@pytest.fixture(scope="module")  # type: ignore[no-redef]
def broker(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Crossing]:
    with crossing_at_work(tmp_path_factory.mktemp("rq")) as follower:
        yield follower
