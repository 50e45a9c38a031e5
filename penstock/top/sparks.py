"""Sparks: numbers as small columns, drawn with the block characters of Unicode.

A column is one number, the newest at the right end. Zero is the thinnest line, so that "nothing happened" can
be told from "nobody knows yet", which is blank; anything above zero is higher than that.
"""

from collections.abc import Sequence
from typing import Final

BLOCKS: Final = " ▁▂▃▄▅▆▇█"
STEPS: Final = len(BLOCKS) - 1
"""How many heights a line has."""


def spark(values: Sequence[float], width: int, height: int = 1) -> list[str]:
    """The last `width` values as `height` lines, the upper one first. The highest fills the whole height."""
    shown = list(values[-width:]) if width > 0 else []
    highest = max(shown, default=0.0)
    levels = [_level(value, highest, height * STEPS) for value in shown]
    blank = " " * (width - len(shown))
    return [
        blank + "".join(BLOCKS[min(max(level - line * STEPS, 0), STEPS)] for level in levels)
        for line in reversed(range(height))
    ]


def _level(value: float, highest: float, level_max: int) -> int:
    if value <= 0 or highest <= 0:
        return 1
    return min(2 + int(value / highest * (level_max - 2) + 0.5), level_max)
