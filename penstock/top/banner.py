"""Banner: the two lines on top of every screen: which broker, whether it answers, what all queues come to.

While the broker does not answer, the totals stay as they were, and the second line says why and how old they
are.
"""

import time
from typing import Final

from rich.text import Text
from textual.widget import Widget

from penstock.common import tables, units
from penstock.top.columns import BAD, GOOD, PLAIN, QUIET, STRONG, WARN, fit, short_count
from penstock.top.feed import Snapshot
from penstock.top.history import backlog_of
from penstock.top.state import State

SILENT_SECONDS: Final = 3.0
"""A broker that has not answered for so long is said to be silent."""


class Banner(Widget):
    DEFAULT_CSS = """
    Banner { height: 2; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self, url: str, state: State) -> None:
        super().__init__()
        self._url = tables.shown(url)
        self._state = state

    def on_mount(self) -> None:
        self.set_interval(1.0, self.refresh)  # how old it is all gets older

    def render(self) -> Text:
        width, state = self.size.width, self._state
        text = Text()
        text.append_text(self._first(state.snapshot, width)).append("\n")
        if state.trouble is not None:
            text.append(fit(tables.shown(state.trouble.why), width), BAD)
        else:
            text.append_text(_totals(state.snapshot))
        return text

    def _first(self, snapshot: Snapshot, width: int) -> Text:
        state = self._liveness()
        left = Text.assemble(
            ("penstock ", STRONG),
            (tables.shown(snapshot.engine["version"]), QUIET),
            f"  {self._url}  ",
            (units.counted(len(snapshot.queues), "queue"), QUIET),
        )
        left.truncate(max(width - state.cell_len - 2, 0), overflow="ellipsis", pad=True)
        return left.append("  ").append_text(state)

    def _liveness(self) -> Text:
        age = time.monotonic() - self._state.answered
        if self._state.trouble is not None:
            return Text(f"○ trying again, {units.age(int(age))} old", BAD)
        if age > SILENT_SECONDS:
            return Text(f"○ no answer for {units.age(int(age))}", WARN)
        return Text("● live", GOOD)


def _totals(snapshot: Snapshot) -> Text:
    total, engine = snapshot.total, snapshot.engine
    text = Text()
    for title, value, style in (
        ("in", f"{units.rate(total['rate_in'])}/s", PLAIN),
        ("out", f"{units.rate(total['rate_out'])}/s", PLAIN),
        ("backlog", short_count(backlog_of(total)), PLAIN),
        ("dead", short_count(total["dead"]), BAD if total["dead"] else PLAIN),
        ("consumers", short_count(total["consumers"]), PLAIN),
        ("connections", short_count(snapshot.connections), PLAIN),
    ):
        text.append(f"{title} ", QUIET).append(value, style + STRONG).append("  ")
    # What is worst is said first, and alone: there is no room for more.
    if engine["failed"]:
        text.append("the log has failed", BAD)
    elif engine["full"]:
        text.append("the disk is full", BAD)
    elif engine["damage"]:
        text.append("the log is damaged", WARN)
    return text
