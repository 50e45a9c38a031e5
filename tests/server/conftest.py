"""No broker outlives its test, also when the test fails."""

from collections.abc import Iterator

import pytest

from tests.server.harness import BrokerProcess


@pytest.fixture(autouse=True)
def _no_broker_outlives_its_test() -> Iterator[None]:
    before = set(BrokerProcess.alive)
    yield
    for broker in BrokerProcess.alive - before:
        broker.kill()
