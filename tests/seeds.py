"""Runs by seed from the command line: `python -m tests.broker.restarts SEED [COUNT]` and its kind.

One seed alone tells its steps; of several, what happened in them is counted. A run that shows a broken
promise raises, and names its seed.
"""

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

Say = Callable[[str], None]

SEED = os.environ.get("PENSTOCK_TEST_SEED", "")
SEEDED = bool(SEED)
"""By `make test-long`, which has the time to look further; tests that are marked `long` run then, too."""


def some(values: Sequence[Any], *often: Any) -> list[Any]:
    """For `parametrize`: all of them. `make test` runs those that are named, `make test-long` the others."""
    assert set(often) <= set(values)
    return [value if value in often else pytest.param(value, marks=pytest.mark.long) for value in values]


def run_seeds(arguments: Sequence[str], run: Callable[[int, Say | None], "Counter[str]"]) -> None:
    """COUNT runs from SEED on (one where there is none), and what happened in them."""
    logging.disable(logging.CRITICAL)
    first = int(arguments[0])
    count = int(arguments[1]) if len(arguments) > 1 else 1

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")

    total: Counter[str] = Counter()
    for seed in range(first, first + count):
        total += run(seed, say if count == 1 else None)
    for what, number in sorted(total.items()):
        say(f"{number:9} {what}")
