"""Overview: the first screen: what needs attention, then all queues, with the totals over time where the
terminal is high enough."""

from typing import ClassVar, Final

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Footer, Input, Static

from penstock.common import tables, units
from penstock.top.banner import Banner
from penstock.top.chart import Charts
from penstock.top.columns import LEVELS, QUIET, STRONG, short_count
from penstock.top.state import State
from penstock.top.table import QueueTable
from penstock.top.views import attention_line
from penstock.top.wishes import Pause, Redrive, ShowList

ATTENTION_LINES: Final = 3


class Entry(Input):
    """Where a part of a name is typed; its keys are in the footer while it has them."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "submit", "keep the filter", key_display="Enter"),
        Binding("escape", "screen.no_filter", "show all", key_display="Esc"),
    ]


class Overview(Screen[None]):
    DEFAULT_CSS = """
    Overview #charts { layout: horizontal; height: 4; margin-top: 1; }
    Overview Chart { height: 4; }
    Overview.-low #charts { display: none; }
    Overview #attention { height: auto; padding: 0 1; margin-top: 1; display: none; }
    Overview QueueTable { margin-top: 1; }
    Overview.-low QueueTable { margin-top: 0; }
    Overview #chosen { height: 1; padding: 0 1; display: none; }
    Overview #filter { height: 1; padding: 0 1; border: none; display: none; background: ansi_default; }
    Overview #filter:focus { border: none; }
    """
    VERTICAL_BREAKPOINTS = [(0, "-low"), (32, "-high")]  # noqa: RUF012 - typed by Textual

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("p", "pause", "pause"),
        Binding("r", "redrive", "redrive"),
        Binding("escape", "no_filter", show=False),
        Binding("a", "list('attention')", show=False),
        Binding("c", "list('connections')", show=False),
        Binding("l", "list('dead letters')", show=False),
        Binding("n", "list('readers')", show=False),
    ]

    def __init__(self, url: str, state: State, sort: str, pattern: str | None) -> None:
        super().__init__()
        self._pattern = pattern
        self._state = state
        self._banner = Banner(url, state)
        self._charts = Charts(short_count)
        self.table = QueueTable(sort, lambda name: state.history.of(name).of("rate_in"))

    def compose(self) -> ComposeResult:
        yield self._banner
        yield self._charts
        yield Static(id="attention")
        yield self.table
        yield Static(id="chosen")
        yield Entry(id="filter", placeholder="part of a name", compact=True, select_on_focus=False)
        yield Footer(compact=True)

    def on_mount(self) -> None:
        self.set_focus(self.table)
        self.show()

    def show(self) -> None:
        """What the feed has brought."""
        self._banner.refresh()
        if self._state.trouble is not None:
            return
        self._show_attention()
        self.table.show(self._state.snapshot.queues)
        self._charts.show(self._state.snapshot.total, self._state.history.total)
        self._show_choice()

    def on_resize(self) -> None:
        self._show_attention()

    def _show_attention(self) -> None:
        """What is wrong stands first, the worst in a line each; nothing is seen of it where nothing is."""
        found, count = self._state.snapshot.attention, self._state.snapshot.attention_count
        place = self.query_one("#attention", Static)
        place.display = bool(found)
        text = Text(no_wrap=True, overflow="ellipsis")
        for finding in found[:ATTENTION_LINES]:
            line = tables.cut(tables.shown(attention_line(finding)), self.size.width - 4)
            text.append("" if not text else "\n").append(f"! {line}", LEVELS[finding["level"]])
        if count > ATTENTION_LINES:
            text.append(f"\n  and {units.count(count - ATTENTION_LINES)} more: a shows all", QUIET)
        place.update(text)

    def action_list(self, view: str) -> None:
        self.post_message(ShowList(view))

    # --- filter --------------------------------------------------------------------------------------

    def action_filter(self) -> None:
        entry = self.query_one(Entry)
        entry.display = True
        self.set_focus(entry)
        self._show_choice()

    @property
    def _typing(self) -> bool:
        return self.query_one(Entry).display

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action == "no_filter" or not self._typing

    def took_stray(self, key: events.Key) -> bool:
        """Whether a key that nobody has used yet is text for the entry.

        It was under way to the table when the entry was opened by the key before it.
        """
        if not self._typing or not key.is_printable:
            return False
        self.query_one(Entry).insert_text_at_cursor(key.character or "")
        return True

    def action_no_filter(self) -> None:
        entry = self.query_one(Entry)
        entry.value = ""
        self._end_entry()

    @on(Input.Changed, "#filter")
    def _choose(self, event: Input.Changed) -> None:
        self.table.choose(event.value)
        self._show_choice()

    @on(Input.Submitted, "#filter")
    def _end_entry(self) -> None:
        self.query_one(Entry).display = False
        self.set_focus(self.table)
        self._show_choice()

    def _show_choice(self) -> None:
        """The line about the filter: there while there is one, or where there is nothing to show."""
        wanted = self.table.filter
        typing = self._typing
        line = self.query_one("#chosen", Static)
        every = len(self._state.snapshot.queues)
        line.display = bool(wanted) or typing or not every
        if wanted or typing:
            line.update(
                Text.assemble(
                    ("filter ", QUIET),
                    ("" if typing else f"{tables.shown(wanted)}  ", STRONG),
                    f"{self.table.count:,} of {units.counted(every, 'queue')}",
                    ("" if typing else "  Esc shows all", QUIET),
                )
            )
        elif self._pattern is not None:
            line.update(Text(f"there is no queue named like {tables.shown(self._pattern)}", QUIET))
        else:
            line.update(Text("there is no queue yet; the first message to one makes it", QUIET))

    # --- what is done to the queue under the cursor --------------------------------------------------

    def action_pause(self) -> None:
        if self.table.current is not None:
            self.post_message(Pause(self.table.current["name"], self.table.current["paused"]))

    def action_redrive(self) -> None:
        if self.table.current is not None:
            self.post_message(Redrive(self.table.current["name"]))
