"""A terminal with a screen: what a person sees of a program that draws, as lines of text.

It says that it knows synchronised output, as modern terminals do: the program marks where a picture begins
and ends, and what is waited for is looked for in whole pictures only.
"""

import os
import re
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyte

from tests.cli.terminal import Terminal
from tests.server.harness import WAIT_SECONDS

Lines = list[str]

SYNC_QUESTION, SYNC_ANSWER = "\x1b[?2026$p", "\x1b[?2026;2$y"
SYNC_BEGIN, SYNC_END = "\x1b[?2026h", "\x1b[?2026l"

LOOK_SECONDS = 0.1
"""How often a screen on which nothing happens is looked at."""

MODE = re.compile(r"\x1b\[\?(\d+)([hl])")
ON_BY_DEFAULT = ("7", "25")
"""Lines are wrapped, and the cursor is shown."""


class Screen(Terminal):
    """`penstock ARGUMENTS` in a terminal whose screen can be read."""

    def __init__(
        self, *arguments: str, lines: int = 24, columns: int = 80, around: Mapping[str, str] | None = None
    ) -> None:
        self._answered = 0
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        given = {"TERM": "xterm-256color", **(around or {})}
        super().__init__(*arguments, lines=lines, columns=columns, around=given)
        self.settings_before = self.settings()

    @property
    def lines(self) -> Lines:
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def line_of(self, start: str) -> str:
        """The line that begins so; nothing where there is none."""
        return next((line for line in self.lines if line.strip().startswith(start)), "")

    def cells_of(self, queue: str) -> list[str]:
        """What stands behind the name of a queue."""
        return self.line_of(queue).strip().removeprefix(queue).split()

    def colours(self) -> set[str]:
        """Every colour on the screen, but for the terminal's own."""
        cells = [cell for line in self._screen.buffer.values() for cell in line.values()]
        return {colour for cell in cells for colour in (cell.fg, cell.bg)} - {"default"}

    def wait(self, found: Callable[["Screen"], bool], what: str) -> None:
        """Until the screen is so."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (self._whole and found(self)):
            # What is waited for may come without anything being written.
            if not self._read(time.monotonic() + LOOK_SECONDS) and (
                time.monotonic() > deadline or self._process.poll() is not None
            ):
                raise AssertionError(f"{what} was not seen on the screen:\n{self.text}")

    def wait_text(self, text: str) -> None:
        self.wait(lambda screen: text in screen.text, repr(text))

    @property
    def stopped(self) -> bool:
        """Whether the program is asleep, as Ctrl-Z would have it."""
        state = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "T"

    def settings(self) -> list[Any]:
        """How the terminal treats what is typed; kept by the system, not by the program."""
        return termios.tcgetattr(self._outer)

    def modes_left(self) -> set[str]:
        """The modes of the terminal that are not as they are by default."""
        last = dict(MODE.findall(self.seen))
        return {mode for mode, way in last.items() if (way == "h") != (mode in ON_BY_DEFAULT)}

    def _took(self, data: bytes) -> None:
        super()._took(data)
        self._stream.feed(data)
        while self.seen.count(SYNC_QUESTION) > self._answered:
            self._answered += 1
            self.type(SYNC_ANSWER)

    @property
    def _whole(self) -> bool:
        return self.seen.rfind(SYNC_END) > self.seen.rfind(SYNC_BEGIN)


def without(module: str, folder: os.PathLike[str]) -> dict[str, str]:
    """What to set around a program so that it cannot import a module."""
    blocker = os.path.join(folder, "sitecustomize.py")
    with open(blocker, "w", encoding="utf-8") as file:
        file.write(f"import sys\nsys.modules[{module!r}] = None\n")
    return {"PYTHONPATH": os.fspath(folder)}
