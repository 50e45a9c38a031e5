"""QueueScreen: everything about one queue, from its numbers over time to its last messages.

The texts are those of `penstock show` and `penstock peek`, with every control character as an escape. They
are given to Textual as finished text: nothing in a name or in a payload is read as markup.
"""

import base64
from collections.abc import Iterable, Sequence
from typing import ClassVar, Final

from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, Vertical, VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Static

from penstock.cli import peek, show
from penstock.client.http_core import Answer
from penstock.common import tables, units
from penstock.top.banner import Banner
from penstock.top.chart import Charts
from penstock.top.columns import BAD, PLAIN, QUIET, STRONG, WARN, WIDE
from penstock.top.feed import Feed, Opened
from penstock.top.state import State
from penstock.top.wishes import Pause, Redrive

STATE_STYLES: Final = {"ready": PLAIN, "held": WARN, "delayed": QUIET, "dead": BAD, "gone": QUIET}
LEFT_WIDTH: Final = 40
MARGIN: Final = 3
BODY_BYTES_SHOWN: Final = 999
"""Of a body: no line of a terminal is longer. A multiple of three, for base64."""

CONTINUATIONS: Final = bytes(range(0x80, 0xC0))
LEADING_MIN: Final = 0xC0
"""UTF-8: the bytes that go on with a character, and the first that can begin one of several bytes."""


class QueueScreen(Screen[None]):
    DEFAULT_CSS = f"""
    QueueScreen #title {{ height: 1; padding: 0 1; margin-top: 1; }}
    QueueScreen #body {{ height: 1fr; }}
    QueueScreen #facts {{ height: auto; }}
    QueueScreen #rules {{ height: auto; }}
    QueueScreen #charts {{ height: auto; }}
    QueueScreen Static {{ height: auto; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }}
    QueueScreen .part {{ margin-top: 1; }}
    QueueScreen.-wide #halves {{ layout: horizontal; height: auto; }}
    QueueScreen.-wide #left {{ width: {LEFT_WIDTH}; }}
    QueueScreen.-wide #facts {{ layout: vertical; }}
    QueueScreen.-wide #rules {{ margin-top: 1; }}
    QueueScreen.-narrow #facts > * {{ width: 1fr; }}
    QueueScreen.-narrow #charts {{ layout: horizontal; margin-top: 1; }}
    QueueScreen #halves, QueueScreen #left, QueueScreen #right {{ height: auto; }}
    """
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (WIDE, "-wide")]  # noqa: RUF012 - typed by Textual

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,backspace,left", "back", "back", key_display="Esc"),
        Binding("p", "pause", "pause"),
        Binding("r", "redrive", "redrive"),
        Binding("down,j", "scroll('down')", "scroll", key_display="↑↓"),
        Binding("up,k", "scroll('up')", show=False),
        Binding("pagedown,space", "scroll('page_down')", show=False),
        Binding("pageup", "scroll('page_up')", show=False),
        Binding("home,g", "scroll('home')", show=False),
        Binding("end,G", "scroll('end')", show=False),
    ]

    def __init__(self, feed: Feed, state: State, name: str) -> None:
        super().__init__()
        self.queue = name
        self._feed = feed
        self._state = state
        self._banner = Banner(feed.url, state)
        self._charts = Charts(units.count)
        self._title = Static(Text(tables.shown(name), STRONG), id="title")
        self._numbers = Static(Text("asking …", QUIET))
        self._policy = Static()
        self._deaths = Static(classes="part")
        self._consumers = Static(classes="part")
        self._messages = Static(classes="part")
        self._opened: Opened | None = None

    def compose(self) -> ComposeResult:
        yield self._banner
        yield self._title
        with VerticalScroll(id="body", can_focus=False), Container(id="halves"):
            with Vertical(id="left"), Horizontal(id="facts"):
                yield self._numbers
                yield Vertical(self._policy, self._deaths, id="rules")
            with Vertical(id="right"):
                yield self._charts
                yield self._consumers
                yield self._messages
        yield Footer(compact=True)

    def on_mount(self) -> None:
        self._feed.open(self.queue)
        self.show()

    def on_resize(self) -> None:
        if self._opened is not None:
            self._show_tables(self._opened)

    def show(self) -> None:
        """What the feed has brought."""
        self._banner.refresh()
        opened = self._state.snapshot.opened
        if self._state.trouble is not None or opened is None or opened.name != self.queue:
            return
        if opened.queue is None:
            self._numbers.update(Text(tables.shown(opened.gone), BAD))
            return
        self._opened = opened
        queue = opened.queue
        self._title.update(
            Text.assemble((tables.shown(self.queue), STRONG), ("  paused" if queue["paused"] else "", WARN))
        )
        # The first fact is the name, which is the title here.
        self._numbers.update(_pairs(show.facts(queue)[1:]))
        self._policy.update(_pairs(show.policy(queue["policy"])))
        self._charts.show(queue, self._state.history.of(self.queue))
        self._deaths.update(_table(show.deaths(queue["dead_reasons"]), "no dead letters"))
        self._show_tables(opened)

    def _show_tables(self, opened: Opened) -> None:
        cells = [show.consumer(opened.name, it) for it in opened.consumers]
        self._consumers.update(_table(tables.table(show.CONSUMERS, cells) if cells else [], "no consumers"))
        messages = [shortened(message) for message in opened.messages]
        styles = [STATE_STYLES[message["state"]] for message in messages]
        rows = [peek.cells(message) for message in messages]
        lines = tables.table(peek.COLUMNS, tables.fitting(rows, peek.COLUMNS, self._room))
        self._messages.update(_table(lines if rows else [], "no messages in the log", styles))

    @property
    def _room(self) -> int:
        """How long a line of the messages can be: beside the left half, padding and scrollbar."""
        return self.size.width - MARGIN - (LEFT_WIDTH if self.size.width >= WIDE else 0)

    # --- keys ----------------------------------------------------------------------------------------

    def action_back(self) -> None:
        self._feed.open(None)
        self.app.pop_screen()

    def action_pause(self) -> None:
        if self._opened is not None and self._opened.queue is not None:
            self.post_message(Pause(self.queue, self._opened.queue["paused"]))

    def action_redrive(self) -> None:
        self.post_message(Redrive(self.queue))

    def action_scroll(self, where: str) -> None:
        body = self.query_one("#body", VerticalScroll)
        getattr(body, f"scroll_{where}")(animate=False)


def shortened(message: Answer) -> Answer:
    """A message with no more of its body than a line can show."""
    # Four characters are three bytes: the part can be read without the rest.
    part = base64.b64decode(message["value_base64"][: BODY_BYTES_SHOWN // 3 * 4])
    if len(part) == BODY_BYTES_SHOWN:
        # A character of which only some bytes are here would make the whole text look like no text.
        part = part.rstrip(CONTINUATIONS)
        part = part[:-1] if part and part[-1] >= LEADING_MIN else part
    return {**message, "value_base64": base64.b64encode(part).decode()}


def _pairs(lines: Iterable[str]) -> Text:
    """Lines with a name and what it is; the name steps back."""
    text = Text()
    for number, line in enumerate(lines):
        name, gap, rest = line.partition("  ")
        text.append("\n" if number else "").append(name + gap, QUIET).append(rest)
    return text


def _table(lines: Sequence[str], nothing: str, styles: Sequence[Style] = ()) -> Text:
    """A table with its heading, or a word that there is nothing; `styles`: of the rows."""
    if not lines:
        return Text(nothing, QUIET)
    text = Text(lines[0])
    text.stylize(STRONG)
    for number, line in enumerate(lines[1:]):
        text.append("\n").append(line, styles[number] if styles else PLAIN)
    return text
