"""Three front doors, where queues are in several logs: what holds whichever door a message goes through."""

from collections.abc import Iterator
from typing import Any, cast

import pytest

from penstock.server.settings import Listener
from tests.cluster.fronts import ANY_PORT, crossing_at_work
from tests.server.test_cross_rules import *  # noqa: F403 - all its tests, with another broker
from tests.server.test_cross_rules import QUEUES, TWO_DELIVERIES, Queues


@pytest.fixture(scope="module")  # type: ignore[no-redef]
def queues(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Queues]:
    names = [f"plain.{n}" for n in range(QUEUES)] + [f"two.{n}" for n in range(TWO_DELIVERIES)]
    listeners = [Listener("sspq", ANY_PORT, queue=name) for name in names]
    policies = {"two.*": {"max-deliveries": 2}}
    with crossing_at_work(tmp_path_factory.mktemp("cross"), listeners, policies) as follower:
        yield Queues(cast(Any, follower), names)  # Any: it has all of a broker that they need
