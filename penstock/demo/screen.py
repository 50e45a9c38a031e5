"""Screen: what a person sees of the demonstration: sections, steps with their times, tables.

The time before a step is what has passed since the line before it: nothing is measured apart, so the times
of a run add up to the run.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TextIO

from penstock.common import tables

INDENT: Final = " " * 11
"""Up to where the text of a step begins."""


class Screen:
    """One run, line by line. `clock` counts seconds."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._began = self._last = clock()
        self._sections = 0

    def section(self, title: str) -> None:
        self._sections += 1
        self.heading(f"{self._sections}. {title}")

    def heading(self, title: str) -> None:
        self._line(f"\n{title}")
        self._last = self._clock()

    def step(self, text: str) -> None:
        """Something is done; its time is that since the line before."""
        now = self._clock()
        self._line(f"{now - self._last:7.2f} s  {text}")
        self._last = now

    def note(self, text: str) -> None:
        """Something to know, that took no time."""
        self._line(INDENT + text)

    def table(self, columns: Sequence[tables.Column], rows: Iterable[Sequence[str]]) -> None:
        self._line("")
        for line in tables.table(columns, rows):
            self._line(INDENT + line)
        self._line("")

    def seconds(self) -> float:
        """Since the beginning."""
        return self._clock() - self._began

    def _line(self, text: str) -> None:
        self._out.write(tables.encodable(text.rstrip(" ")) + "\n")
        self._out.flush()
