"""Chart: one number over time, as columns as high as there is room, with what it is now and was at most."""

from collections.abc import Callable, Sequence

from rich.text import Text
from textual.widget import Widget

from penstock.top.columns import QUIET, STRONG, TRACE
from penstock.top.sparks import spark


class Chart(Widget):
    """`title`, the newest value and the highest, as `write` writes them; the columns below."""

    DEFAULT_CSS = """
    Chart { width: 1fr; height: 3; padding: 0 1; text-wrap: nowrap; text-overflow: clip; }
    """

    def __init__(self, title: str, write: Callable[[float], str]) -> None:
        super().__init__()
        self._title = title
        self._write = write
        self._values: Sequence[float] = ()
        self._now = 0.0

    def show(self, values: Sequence[float], now: float) -> None:
        self._values, self._now = values, now
        self.refresh()

    def render(self) -> Text:
        width, height = self.size
        seen = self._values[-width:] if width else ()
        text = Text()
        text.append(f"{self._title} ", QUIET).append(self._write(self._now), STRONG)
        peak = max(seen, default=0)
        if peak:
            text.append(f"  peak {self._write(peak)}", QUIET)
        for line in spark(seen, width, max(height - 1, 1)):
            text.append("\n").append(line, TRACE)
        return text
