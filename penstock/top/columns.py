"""Columns: the table of queues as cells, and how wide each of them is.

`layout` divides the width of a terminal: numbers are as wide as the largest of them needs, the name gets what
it needs, the trend what is left. Where the terminal is too narrow, the size goes first, then the trend, and
then names are cut off; the numbers stay.

Widths only grow while a table is shown (`grown`), so that columns do not jump each time a number gets
shorter. What is delayed has a column from the first such message on: most brokers have none, and no room.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.style import Style

from penstock.client.http_core import Answer
from penstock.common import tables, units

GAP_NARROW, GAP_WIDE = 1, 2
WIDE: Final = 100
"""A terminal from here on has room for wider gaps."""

NAME_MIN: Final = 16
NAME_ENOUGH: Final = 24
"""Names that are longer than this are rather cut off than shown at the cost of the trend."""

TREND_MIN: Final = 5
TREND_MAX: Final = 60
PAUSED: Final = " paused"
COUNT_EXACT_MAX: Final = 999_999
"""From here on a count is shortened in the table; the queue's own screen has all of its digits."""

NAME_HALVED: Final = 8
"""Less room than this is not enough for both ends of a name."""

CUT: Final = "…"

NAME, TREND, SIZE, DELAYED = "name", "trend", "bytes", "delayed"

PLAIN: Final = Style()
QUIET: Final = Style(dim=True)
BAD: Final = Style(color="red", bold=True)
WARN: Final = Style(color="yellow", bold=True)
LEVELS: Final = {"bad": BAD, "warn": WARN}
GOOD: Final = Style(color="green", bold=True)
TRACE: Final = Style(color="cyan")
STRONG: Final = Style(bold=True)


class Column(NamedTuple):
    """A column: the field that it shows and sorts by, its heading, and what its width is at least."""

    field: str
    title: str
    width_min: int = 0


COLUMNS: Final = (
    Column(NAME, "QUEUE"),
    Column("ready", "READY", 6),
    Column("held", "HELD", 5),
    Column(DELAYED, "DELAYED", 7),
    Column("dead", "DEAD", 5),
    Column("rate_in", "IN/S", 5),
    Column("rate_out", "OUT/S", 5),
    Column("oldest_seconds", "OLDEST", 10),
    Column("consumers", "CONS", 4),
    Column(SIZE, "SIZE", 8),
    Column(TREND, "TREND"),
)
SORTABLE: Final = tuple(column.field for column in COLUMNS if column.field != TREND)
BY_FIELD: Final = {column.field: column for column in COLUMNS}

Widths = Mapping[str, int]


def text_of(field: str, value: Any) -> str:  # whatever the API says in that field
    """A number of the table, as text."""
    match field:
        case "rate_in" | "rate_out":
            return units.rate(value)
        case "oldest_seconds":
            return tables.age(value)
        case "bytes":
            return units.size(value)
        case _:
            return short_count(value)


def short_count(number: int) -> str:
    """`999,999`, then `1.23 M`."""
    return units.count(number) if number <= COUNT_EXACT_MAX else units.short(number)


def style_of(field: str, value: Any) -> Style:  # as for text_of
    if not value:
        return QUIET
    return BAD if field == "dead" else PLAIN


def title_of(column: Column, sort: str, reverse: bool) -> str:
    """The heading; that of the column by which the table is sorted has an arrow."""
    if column.field != sort:
        return column.title
    # Names go up by themselves, numbers down: the arrow says what is there, not what was asked for.
    return column.title + ("▲" if (sort == NAME) != reverse else "▼")


# --- widths ------------------------------------------------------------------------------------------------


def grown(before: Widths, queues: Sequence[Answer]) -> Widths:
    """How wide the texts of these queues are at most, and never less than before."""
    widths = {}
    for column in COLUMNS[1:-1]:
        field = column.field
        largest = max((queue[field] or 0 for queue in queues), default=0)
        if field == DELAYED and not largest and field not in before:
            continue
        # An arrow may stand behind any heading.
        least = max(column.width_min, len(column.title) + 1, before.get(field, 0))
        # The longest time is not the widest: times have their width by `width_min`.
        widths[field] = least if field == "oldest_seconds" else max(least, len(text_of(field, largest)))
    names = max((name_width(queue) for queue in queues), default=0)
    widths[NAME] = max(NAME_MIN, names, before.get(NAME, 0))
    return widths


def name_width(queue: Answer) -> int:
    return cell_len(tables.shown(queue[NAME])) + (len(PAUSED) if queue["paused"] else 0)


def gap_of(width: int) -> int:
    """How many blanks are between two columns of so wide a terminal."""
    return GAP_WIDE if width >= WIDE else GAP_NARROW


def layout(widths: Widths, width: int) -> dict[str, int]:
    """The columns that are shown in so wide a terminal, in order, and the width of each."""
    gap = gap_of(width)
    numbers = {field: widths[field] for field in widths if field != NAME}
    if _room(numbers, width) < min(widths[NAME], NAME_ENOUGH) + gap + TREND_MIN:
        del numbers[SIZE]
    room = _room(numbers, width)
    trend = 0
    if room >= min(widths[NAME], NAME_ENOUGH) + gap + TREND_MIN:
        trend = min(max(room - gap - widths[NAME], TREND_MIN), TREND_MAX)
    name = max(min(widths[NAME], room - (trend + gap if trend else 0)), 1)
    chosen = {NAME: name, **numbers}
    if trend:
        chosen[TREND] = trend
    return chosen


def _room(numbers: Widths, width: int) -> int:
    """What the numbers leave for names and trend."""
    return width - sum(numbers.values()) - gap_of(width) * len(numbers)


def fit(text: str, width: int, right: bool = False) -> str:
    """The text in exactly so many columns of the terminal."""
    missing = width - cell_len(text)
    if missing < 0:
        return set_cell_size(text, width - 1) + CUT if width > 0 else ""
    return " " * missing + text if right else text + " " * missing


def fit_name(name: str, width: int) -> str:
    """As `fit`, but the middle is left out: names often differ only at their ends."""
    if cell_len(name) <= width or width < NAME_HALVED:
        return fit(name, width)
    tail = ""
    for character in reversed(name):
        if cell_len(character + tail) > width // 2:
            break
        tail = character + tail
    return set_cell_size(name, width - 1 - cell_len(tail)) + CUT + tail
