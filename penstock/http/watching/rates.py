"""Rates: what counters grow by in a second, from two looks at them.

Rule that always holds: what is kept follows those who look, and is bounded: of too many counters, those that
nobody has looked at for longest have no rate.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Final

STEP_SECONDS: Final = 1.0
"""Two looks are so far apart, or further."""

OLD_SECONDS: Final = 60.0
"""What was seen longer ago says nothing about now."""

LOOKS_MAX: Final = 20_000

Look = tuple[float, Mapping[str, int]]


class Rates:
    """Counters by what they are of."""

    def __init__(self) -> None:
        self._looks: OrderedDict[Hashable, tuple[Look | None, Look]] = OrderedDict()

    def of(self, key: Hashable, now: float, counts: Mapping[str, int]) -> dict[str, float] | None:
        """Of each counter; None where there was no look before, or too long ago."""
        before, last = self._looks.pop(key, (None, None))
        if last is None or now - last[0] >= STEP_SECONDS:
            before, last = last, (now, counts)
        self._looks[key] = (before, last)
        if len(self._looks) > LOOKS_MAX:
            self._looks.popitem(last=False)
        if before is None or not 0 < now - before[0] <= OLD_SECONDS:
            return None
        at, then = before
        return {name: max(count - then.get(name, 0), 0) / (now - at) for name, count in counts.items()}
