"""Charts: numbers over time, as columns as high as there is room, with what each is now and was at most."""

from collections.abc import Callable, Sequence

from rich.text import Text
from textual.containers import Container
from textual.widget import Widget

from penstock.client.http_core import Answer
from penstock.common import units
from penstock.top.columns import QUIET, STRONG, TRACE
from penstock.top.history import FIELDS, Track, backlog_of
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


class Charts(Container):
    """How fast messages come and go, and how many are not settled: in a queue, or in all of them."""

    def __init__(self, write_count: Callable[[int], str]) -> None:
        self._charts = (
            Chart("in", _per_second),
            Chart("out", _per_second),
            Chart("backlog", lambda value: write_count(int(value))),
        )
        super().__init__(*self._charts, id="charts")

    def show(self, now: Answer, track: Track) -> None:
        values = (now["rate_in"], now["rate_out"], backlog_of(now))
        for chart, field, value in zip(self._charts, FIELDS, values, strict=True):
            chart.show(track.of(field), value)


def _per_second(value: float) -> str:
    return f"{units.rate(value)}/s"
