"""Charts: values over time (`assets/chart.js`), and how often which times were (`assets/heat.js`), drawn in
the browser in the colours of the style sheet."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from nicegui.element import Element

from penstock.dashboard.door import ASSETS

Point = Sequence[float | None]
"""Seconds since 1970, then a value for each series; None where there is none."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line. Its colour is a name of the style sheet: in, out, ready, dead, warn, muted."""

    label: str
    color: str


class Chart(Element, component=ASSETS / "chart.js"):
    """Without axes it is a spark line."""

    def __init__(
        self,
        label: str,
        series: Sequence[Series],
        *,
        kind: str = "count",
        unit: str = "",
        height: int = 180,
        axes: bool = True,
        area: bool = False,
        span_seconds: float = 300.0,
        stacked: bool = False,
        handles: bool = False,
    ) -> None:
        """`kind`: how values are written: count, rate, age (seconds), brief (fractions of them) or size
        (bytes). `stacked`: each series on the one before. `handles`: marks can be reached by keyboard,
        too."""
        super().__init__()
        self.props["label"] = label
        self.props["series"] = [asdict(it) for it in series]
        self.props["kind"] = kind
        self.props["unit"] = unit
        self.props["height"] = height
        self.props["axes"] = axes
        self.props["area"] = area
        self.props["span-seconds"] = span_seconds
        self.props["stacked"] = stacked
        self.props["handles"] = handles

    def span(self, seconds: float, until: float | None = None, gap_seconds: float | None = None) -> None:
        """How much time it shows, up to when (None: to the last point), and what is a gap between points."""
        self.props["span-seconds"] = seconds
        self.props["until"] = until
        self.props["gap-seconds"] = gap_seconds
        self.update()

    def put_marks(self, marks: Sequence[tuple[float, str]]) -> None:
        """Moments and what happened there, oldest first, and no others."""
        self.run_method("putMarks", [list(mark) for mark in marks])

    def load(self, points: Sequence[Point]) -> None:
        """These points and no others, oldest first. Call it when the browser is connected, or later."""
        self.run_method("load", [list(point) for point in points])

    def push(self, *points: Point) -> None:
        """Points behind those that are there."""
        self.run_method("push", [list(point) for point in points])


class HeatMap(Element, component=ASSETS / "heat.js"):
    """How many took how long, over time: a column for a time, a row for a range of seconds."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self.props["label"] = label
        self.props["height"] = 220
        self.props["span-seconds"] = 300.0

    def load(
        self,
        rows: Sequence[str],
        columns: Sequence[tuple[float, Sequence[int]]],
        step_seconds: float,
        span_seconds: float,
        end: float,
    ) -> None:
        """`rows`: names of the ranges, the shortest first; `columns`: ends of steps, and a count for each
        row."""
        self.run_method("load", list(rows), [list(it) for it in columns], step_seconds, span_seconds, end)
