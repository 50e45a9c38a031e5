"""LiveTable: a table whose rows change while somebody looks at it.

All rows go to the browser once, then only what has changed: sorting, searching and paging happen there
(`assets/table.js`), so that a thousand rows cost the broker no more than the few that move.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Final

from nicegui.element import Element

from penstock.dashboard.door import ASSETS

CHUNK_ROWS: Final = 1000
"""So many go in one message: about 200 KB."""

Row = Mapping[str, Any]  # values of JSON


@dataclass(frozen=True, slots=True)
class Column:
    """One column. Its kind says how values look and sort.

    text, link (to the row's `href`), links (a list of [text, href or "", badge or ""]), badges (a list of
    [text, kind]), count, rate, size (bytes), age (seconds), since (seconds since 1970, shown as an age that
    grows).
    """

    key: str
    label: str
    kind: str = "text"
    unit: str = ""
    help: str = ""
    head: bool = False  # names its row
    badges: str = ""  # a field with a list of [text, kind], shown beside a link
    minor: bool = False  # left out where the window is narrow
    alarm: str = ""  # "warn" or "bad": the colour of what is not 0
    sortable: bool = True
    sort: str = ""  # another field that rows are sorted by


@dataclass(frozen=True, slots=True)
class Filter:
    """A choice above the table: only rows whose field has the value that was chosen."""

    key: str
    label: str
    options: Sequence[tuple[str, str]]  # a value and what people read


class LiveTable(Element, component=ASSETS / "table.js"):
    """What is made within it (`with`) shows where there are no rows."""

    def __init__(
        self,
        caption: str,
        columns: Sequence[Column],
        *,
        key: str,
        noun: str,
        sort: str,
        search: str = "",
        searched: Sequence[str] = (),
        filters: Sequence[Filter] = (),
        page_rows: int = 100,
        url_state: bool = False,
        selectable: bool = False,
    ) -> None:
        """`sort`: a column's key, with "-" before it downwards. `searched`: the fields that are searched.

        `selectable`: rows have boxes to tick; `pick` tells the keys of those that are ticked.
        """
        super().__init__()
        self.props["caption"] = caption
        self.show_columns(columns)
        self.props["row-key"] = key
        self.props["noun"] = noun
        self.props["search"] = search
        self.props["searched"] = list(searched or (key,))
        self.props["filters"] = [asdict(it) for it in filters]
        self.props["initial-sort"] = sort
        self.props["page-rows"] = page_rows
        self.props["url-state"] = url_state
        self.props["selectable"] = selectable

    def show_columns(self, columns: Sequence[Column]) -> None:
        """These columns and no others."""
        self.props["columns"] = [asdict(column) for column in columns]
        self.update()

    def load(self, rows: Iterable[Row]) -> None:
        """These rows and no others. Call it when the browser is connected (`View.on_open`), or later."""
        method = "load"
        for chunk in _chunks(rows):
            self.run_method(method, chunk)
            method = "patch"
        if method == "load":
            self.run_method("load", [])

    def patch(self, rows: Sequence[Row]) -> None:
        """Rows that are new, or fields that have changed: what is left out stays as it was."""
        for chunk in _chunks(rows):
            self.run_method("patch", chunk)

    def drop(self, keys: Sequence[str]) -> None:
        """These rows are gone."""
        if keys:
            self.run_method("drop", list(keys))

    def pick_all(self) -> None:
        """Tick all that are shown."""
        self.run_method("pickAll", True)

    def unpick(self) -> None:
        """Tick none."""
        self.run_method("pickAll", False)

    def follow(self, rows: Mapping[str, Row], before: Mapping[str, Row], *, whole: bool) -> None:
        """These rows, by their keys, where `before` were shown; `whole`: the browser knows nothing yet."""
        if whole:
            self.load(rows.values())
            return
        self.drop([key for key in before if key not in rows])
        self.patch([row for key, row in rows.items() if row != before.get(key)])


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    remaining = iter(rows)
    while chunk := list(islice(remaining, CHUNK_ROWS)):
        yield chunk
