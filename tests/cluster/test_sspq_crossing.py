"""SSPQ, rule by rule, where queues are in several logs, as at a follower."""

from collections.abc import Iterator
from typing import Any, cast

import pytest

from penstock.server.settings import Listener
from tests.cluster.fronts import ANY_PORT, crossing_at_work
from tests.server.test_sspq_rules import *  # noqa: F403 - all its tests, with another broker
from tests.server.test_sspq_rules import QUEUES, Places


@pytest.fixture(scope="module")  # type: ignore[no-redef]
def places(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Places]:
    names = [f"queue-{number}" for number in range(QUEUES)] + ["no-dead", "send-only"]
    modes = {"send-only": "send-only"}
    listeners = [Listener("sspq", ANY_PORT, queue=name, mode=modes.get(name, "both")) for name in names]
    policies = {"no-dead": {"dead-letters": "off"}}
    with crossing_at_work(tmp_path_factory.mktemp("sspq"), listeners, policies) as follower:
        yield Places(cast(Any, follower), names)  # Any: it has all of a broker that they need
