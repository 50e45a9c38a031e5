"""Chart: values over time, drawn in the browser (`assets/chart.js`) in the colours of the style sheet."""

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
    ) -> None:
        """`kind`: how values are written: count, rate, age (seconds) or size (bytes)."""
        super().__init__()
        self.props["label"] = label
        self.props["series"] = [asdict(it) for it in series]
        self.props["kind"] = kind
        self.props["unit"] = unit
        self.props["height"] = height
        self.props["axes"] = axes
        self.props["area"] = area
        self.props["span-seconds"] = span_seconds

    def load(self, points: Sequence[Point]) -> None:
        """These points and no others, oldest first. Call it when the browser is connected, or later."""
        self.run_method("load", [list(point) for point in points])

    def push(self, *points: Point) -> None:
        """Points behind those that are there."""
        self.run_method("push", [list(point) for point in points])
