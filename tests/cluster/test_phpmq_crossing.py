"""PHPMQ, rule by rule, where queues are in several logs, as at a follower."""

import tomllib
from collections.abc import Iterator

import pytest

from penstock.server.settings import Listener
from tests.cluster.fronts import ANY_PORT, Crossing, crossing_at_work
from tests.server.test_phpmq_rules import *  # noqa: F403 - all its tests, with another broker
from tests.server.test_phpmq_rules import LISTENERS, POLICIES


@pytest.fixture(scope="module")  # type: ignore[no-redef]
def server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Crossing, dict[str, int]]]:
    settings = [tomllib.loads(text) for text in LISTENERS.values()]
    listeners = [
        Listener("phpmq", ANY_PORT, **{name.replace("-", "_"): value for name, value in given.items()})
        for given in settings
    ]
    policies = tomllib.loads(POLICIES)["queue"]
    with crossing_at_work(tmp_path_factory.mktemp("phpmq"), listeners, policies) as follower:
        yield follower, dict(zip(["phpmq", *LISTENERS], follower.ports_of("phpmq"), strict=True))
