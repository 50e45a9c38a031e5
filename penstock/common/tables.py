"""Tables: what the commands show to people, in lines that a terminal can only show.

Here are the lines themselves (`line`, `table`, `pairs`); `units` writes the numbers in them. Nothing here
prints.

Rules that always hold:
  * Texts that come from elsewhere (names of queues and consumers, values) go through `shown`: no control
    character reaches a terminal, and nothing that its encoding does not have.
  * Columns are as wide as what is in them, in columns of the terminal: a Chinese character takes two.
  * The last column is never filled up with blanks, so that no line ends with some.
"""

import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from penstock.common import units
from penstock.common.text import printable

GAP: Final = "  "
NOTHING: Final = "-"
"""What is not known, in a sign that every terminal has."""

CUT: Final = "..."


class Column(NamedTuple):
    """One column of a table: its heading, and to which side its cells go."""

    title: str
    right: bool = False


def columns(*titles: str) -> tuple[Column, ...]:
    """Columns by their headings; of one that begins with `>`, the cells go to the right."""
    return tuple(Column(title.removeprefix(">"), title.startswith(">")) for title in titles)


# --- lines -------------------------------------------------------------------------------------------------


def line(cells: Iterable[str], widths: Iterable[int], rights: Iterable[bool]) -> str:
    """One line of a table, of cells that are `shown` already."""
    return GAP.join(map(_filled, cells, widths, rights)).rstrip()


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table with its headings, as wide as what is in it."""
    lines = [[column.title for column in columns], *([shown(cell) for cell in row] for row in rows)]
    widths = [max(map(width_of, cells)) for cells in zip(*lines, strict=True)]
    rights = [column.right for column in columns]
    return [line(cells, widths, rights) for cells in lines]


def pairs(facts: Iterable[tuple[str, str]]) -> list[str]:
    """Names and what they are, below each other."""
    lines = [(name, shown(text)) for name, text in facts]
    width = max((width_of(name) for name, _ in lines), default=0)
    return [line(cells, (width, 0), (False, False)) for cells in lines]


def _filled(text: str, width: int, right: bool) -> str:
    blanks = " " * (width - width_of(text))
    return blanks + text if right else text + blanks


# --- texts -------------------------------------------------------------------------------------------------


def shown(text: str) -> str:
    """The text with an escape for whatever a terminal would not just show."""
    return encodable(printable(text))


def encodable(text: str) -> str:
    """The text with an escape for whatever standard output's encoding does not have."""
    # What stands in for standard output inside `penstock top` takes any text, and so has none.
    encoding = getattr(sys.stdout, "encoding", "utf-8") or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def width_of(text: str) -> int:
    """How many columns of a terminal the text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


def cut(text: str, width: int) -> str:
    """The beginning of the text, no wider than that."""
    if width_of(text) <= width:
        return text
    kept, room = [], max(width - len(CUT), 0)
    for character in text:
        room -= width_of(character)
        if room < 0:
            break
        kept.append(character)
    return "".join(kept) + CUT


def age(seconds: float | None) -> str:
    """As `units.age`, with a terminal's sign for what is not known."""
    return NOTHING if seconds is None else units.age(seconds)


def value(body: bytes) -> str:
    """A message's value: text as it is, JSON too, and anything else in hexadecimal digits."""
    try:
        return body.decode()
    except UnicodeDecodeError:
        return "0x" + body.hex()


def fitting(rows: Sequence[Sequence[str]], columns: Sequence[Column], width: int | None) -> list[list[str]]:
    """The rows with the last cell of each cut off where the line would be wider than that."""
    before = [
        max(map(width_of, [column.title, *(shown(row[at]) for row in rows)])) + len(GAP)
        for at, column in enumerate(columns[:-1])
    ]
    room = None if width is None else max(width - sum(before), len(CUT))
    return [[*row[:-1], row[-1] if room is None else cut(shown(row[-1]), room)] for row in rows]
