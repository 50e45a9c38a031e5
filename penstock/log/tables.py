"""Tables: what is read of a log in bulk, view by view, column by column. Whoever makes rows goes by this.

Types are those of Spark's SQL. The order of a view's columns is that of its rows.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple


class Column(NamedTuple):
    """One column of a view; `nullable`: not every row has it."""

    name: str
    type: str
    nullable: bool


def _columns(text: str) -> tuple[Column, ...]:
    """A name and a type each; a question mark stands behind what may be null."""
    pairs = (column.split() for column in text.split(","))
    return tuple(Column(name, type_.rstrip("?"), type_.endswith("?")) for name, type_ in pairs)


VIEWS: Final[Mapping[str, tuple[Column, ...]]] = {
    "messages": _columns(
        "queue string, offset bigint, id string, value binary, timestamp timestamp, protocol string, "
        "expires timestamp?, retries int?"
    ),
    "events": _columns(
        "queue string, event_offset bigint, event string, offset bigint, id string?, reason string?, "
        "consumer string?, attempt int, dispatched timestamp?, timestamp timestamp"
    ),
    "state": _columns(
        "queue string, offset bigint, id string, state string, attempts int, reason string?, "
        "consumer string?, timestamp timestamp, expires timestamp?, retries int?, value binary"
    ),
}

HEADERS: Final = Column("headers", "map<string,string>", nullable=True)
"""What messages have beside their payloads: a column of the view `messages` for those who name it."""


def columns_of(view: str) -> tuple[Column, ...]:
    """All columns of a view, with those that only come when they are named."""
    return (*VIEWS[view], HEADERS) if view == "messages" else VIEWS[view]
