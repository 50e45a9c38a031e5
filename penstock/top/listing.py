"""Listing: a screen with one of the lists of `views.py`, a cursor, and what can be done to its line.

The cursor stays with its row while the list changes. Names are given to Textual as finished text, and are
never read as markup.
"""

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Footer, OptionList, Static
from textual.widgets.option_list import Option

from penstock.client.http_core import Answer
from penstock.common import tables
from penstock.top.banner import Banner
from penstock.top.columns import LEVELS, PLAIN, QUIET, STRONG
from penstock.top.feed import Feed
from penstock.top.state import State
from penstock.top.views import VIEWS, lines_of
from penstock.top.wishes import End, Open, PurgeLetters, RedriveReason

MARGIN = 4


class Rows(OptionList):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "cursor_down", show=False),
        Binding("k", "cursor_up", show=False),
        Binding("g", "first", show=False),
        Binding("G", "last", show=False),
    ]


class Listing(Screen[None]):
    DEFAULT_CSS = """
    Listing #head { height: 1; padding: 0 1; margin-top: 1; }
    Listing #titles { height: 1; padding: 0 1; }
    Listing Rows { height: 1fr; border: none; padding: 0; background: ansi_default; }
    Listing Rows:focus { border: none; background-tint: ansi_default; }
    Listing Rows > .option-list--option-highlighted { background: ansi_default; text-style: reverse; }
    Listing Rows > .option-list--option { padding: 0 1; }
    Listing #below { height: auto; max-height: 5; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace,left", "back", "back", key_display="Esc"),
        Binding("enter", "open", "open the queue", key_display="Enter", priority=True),
        Binding("x", "end", "end or purge"),
        Binding("r", "redrive", "redrive"),
    ]

    def __init__(self, feed: Feed, state: State, name: str) -> None:
        super().__init__()
        self.view = VIEWS[name]
        self._feed = feed
        self._state = state
        self._banner = Banner(feed.url, state)
        self._rows: dict[str, Answer] = {}

    def compose(self) -> ComposeResult:
        yield self._banner
        yield Static(Text(self.view.name.capitalize(), STRONG), id="head")
        yield Static(Text("asking …", QUIET), id="titles")
        yield Rows(id="rows")
        yield Static(id="below")
        yield Footer(compact=True)

    def on_mount(self) -> None:
        self._feed.watch(self.view.name)
        self.set_focus(self.query_one(Rows))

    def on_resize(self) -> None:
        self.show()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """What a list has nothing for is not offered."""
        wanted = {"end": ("connections", "dead letters"), "redrive": ("dead letters",)}
        if action == "open":
            return self.view.name in ("attention", "dead letters")
        return action not in wanted or self.view.name in wanted[action]

    def show(self) -> None:
        """What the feed has brought."""
        self._banner.refresh()
        listed = self._state.snapshot.listed
        if self._state.trouble is not None or listed is None or listed.view != self.view.name:
            return
        rows = self.query_one(Rows)
        current, top = self._key, rows.scroll_y
        lines = lines_of(self.view, listed.rows, self.size.width - MARGIN)
        self._rows = {self.view.key_of(row): row for row in listed.rows}
        self.query_one("#titles", Static).update(
            Text(lines[0] if listed.rows else self.view.nothing, STRONG if listed.rows else QUIET)
        )
        rows.clear_options()
        rows.add_options(
            [
                Option(Text(line, LEVELS.get(self.view.level(row), PLAIN), no_wrap=True), id=None)
                for line, row in zip(lines[1:], self._rows.values(), strict=False)
            ]
        )
        keys = list(self._rows)
        if keys:
            rows.highlighted = keys.index(current) if current in self._rows else 0
            rows.scroll_to(y=top, animate=False)
            rows.scroll_to_highlight()
        self._show_below()

    @property
    def _key(self) -> str:
        at = self.query_one(Rows).highlighted
        keys = list(self._rows)
        return keys[at] if at is not None and at < len(keys) else ""

    @property
    def current(self) -> Answer | None:
        return self._rows.get(self._key)

    def on_option_list_option_highlighted(self) -> None:
        self._show_below()

    def _show_below(self) -> None:
        row = self.current
        self.query_one("#below", Static).update(
            Text(tables.shown(self.view.below(row)) if row is not None else "", QUIET)
        )

    # --- keys ----------------------------------------------------------------------------------------

    def action_back(self) -> None:
        self._feed.watch(None)
        self.app.pop_screen()

    def action_open(self) -> None:
        queue = self.view.queue_of(self.current) if self.current is not None else ""
        if queue:
            self.post_message(Open(queue))

    def action_end(self) -> None:
        row = self.current
        if row is None:
            return
        if self.view.name == "connections":
            self.post_message(End(row["number"]))
        else:
            self.post_message(PurgeLetters(row["queue"]))

    def action_redrive(self) -> None:
        if self.current is not None:
            self.post_message(RedriveReason(self.current["queue"], self.current["reason"]))
