"""Readers that walk while the log lives: see walks.py."""

import logging
from collections.abc import Iterator

import pytest

from tests.log.walks import run

FIXED_SEED = 22
"""Everything happens in this life. `make test-long` has sixty others at a time."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_a_walk_gives_every_record_or_an_error() -> None:
    total = run(FIXED_SEED)
    for what in ("to the end", "on its way", "missing", "refused", "closed", "killed", "full"):
        assert total[what] >= 3, f"{what}: {total}"
