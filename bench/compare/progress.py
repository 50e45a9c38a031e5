"""Progress on standard error: what is being done, and how long the rest will take.

Every step has a number of seconds that it should take. What is left is the sum of those to come, corrected
by how long the ones before have really taken.
"""

import sys
import time


class Progress:
    def __init__(self, seconds_expected: float) -> None:
        self._expected = seconds_expected
        self._done = 0.0
        self._start = time.monotonic()

    def step(self, what: str, seconds: float) -> None:
        """Something that should take so many seconds begins now."""
        spent = time.monotonic() - self._start
        slowness = spent / self._done if self._done > 20 else 1.0
        left = max(self._expected - self._done, 0.0) * slowness
        shown = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
        print(f"[{spent:5.0f} s, {shown} left] {what}", file=sys.stderr, flush=True)
        self._done += seconds
