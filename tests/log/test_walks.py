"""Readers that walk while the log lives: see walks.py."""

import logging
import os
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.log.walks import run

FIXED_SEED = 3
"""Everything happens in this life. `make test-long` has sixty at a time."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_a_walk_gives_every_record_or_an_error() -> None:
    base = int(os.environ.get("PENSTOCK_TEST_SEED", random.randrange(10**6, 10**9)))
    total: Counter[str] = Counter()
    for seed in (FIXED_SEED, base):
        total += run(seed)
    for what in ("to the end", "on its way", "missing", "refused", "closed", "killed", "full"):
        assert total[what] >= 3, f"{what}: {total}"
