"""Tables: what the commands show to people, in lines that a terminal can only show.

Here are the lines themselves (`line`, `table`, `pairs`) and how numbers are written in them: thousands with
separators, bytes in units, times in words. Nothing here prints.

Rules that always hold:
  * Texts that come from elsewhere (names of queues and consumers, values) go through `shown`: no control
    character reaches a terminal, and nothing that its encoding does not have.
  * Columns are as wide as what is in them, in columns of the terminal: a Chinese character takes two.
  * The last column is never filled up with blanks, so that no line ends with some.
"""

import sys
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

from penstock.common.text import printable

GAP: Final = "  "
NOTHING: Final = "-"
CUT: Final = "..."

_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TIME_UNITS: Final = ((86_400, "d"), (3600, "h"), (60, "m"), (1, "s"))


class Column(NamedTuple):
    """One column of a table: its heading, and to which side its cells go."""

    title: str
    right: bool = False


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


# --- numbers -----------------------------------------------------------------------------------------------


def count(number: int) -> str:
    return f"{number:,}"


def counted(number: int, what: str) -> str:
    """`1 message`, `2,000 messages`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def size(count_bytes: float) -> str:
    """Bytes in the unit that suits them."""
    for unit in _BYTE_UNITS:
        if count_bytes < 1024 or unit == _BYTE_UNITS[-1]:
            break
        count_bytes /= 1024
    return f"{count_bytes:.0f} {unit}" if unit == "B" or count_bytes >= 100 else f"{count_bytes:.1f} {unit}"


def duration(seconds: float | None) -> str:
    """A time in its two largest units."""
    if seconds is None:
        return NOTHING
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    whole = int(seconds)
    parts: list[str] = []
    for length, unit in _TIME_UNITS:
        number, whole = divmod(whole, length)
        if number or parts:
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2])


def rate(per_second: float) -> str:
    return f"{per_second:,.1f}" if 0 < per_second < 10 else f"{per_second:,.0f}"


def since(time: str, now: datetime | None = None) -> str:
    """How long ago a time of the API's was."""
    moment = datetime.fromisoformat(time)
    return duration(((now or datetime.now(UTC)) - moment).total_seconds())


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
