"""A loop for front-ends, which ends with its test."""

from collections.abc import Iterator

import pytest

from tests.cluster.fronts import LoopThread


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.stop()
