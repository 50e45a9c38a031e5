"""Syncs: how long the disk takes to make writes safe, since the start and lately; of the engine's page."""

from typing import Any

from nicegui.elements.mixins.text_element import TextElement

from penstock.common import units
from penstock.control.frames import Fields
from penstock.dashboard.chart import Chart, Series
from penstock.dashboard.layout import fact, facts, panel, tag
from penstock.dashboard.poll import TRAIL_SECONDS, Trail
from penstock.log.info import SyncInfo


class SyncTrail:
    """How long syncs took lately: one point for each time in which there were any."""

    def __init__(self) -> None:
        self.trail = Trail()
        self._before: Fields | None = None

    def told(self, at: float, answer: Any) -> None:
        """Take note of an answer of `/v1/engine`."""
        sync, before = answer["sync"], self._before
        self._before = sync
        if before is None or sync["count"] <= before["count"]:
            return
        count = sync["count"] - before["count"]
        pairs = zip(sync["buckets"], before["buckets"], strict=True)
        lately = SyncInfo(count, buckets=[now["count"] - then["count"] for now, then in pairs])
        mean = (sync["seconds_sum"] - before["seconds_sum"]) / count
        self.trail.add(at, mean * 1000, lately.quantile(0.99) * 1000)


class SyncPanel:
    """Figures since the start, a chart of the time that the page has been open, and how syncs spread."""

    def __init__(self) -> None:
        self._last_at = 0.0
        with panel("Sync latency"):
            tag(
                "p", "How long the disk takes to make what was written safe. Receipts wait for it.", "ps-hint"
            )
            with facts():
                self._p50 = fact("Half within")
                self._p99 = fact("99 % within")
                self._last = fact("Last")
                self._mean = fact("Mean")
                self._count = fact("Syncs since the start")
            self._chart = Chart(
                "Sync latency while this page is open",
                [Series("Mean", "in"), Series("99 % within", "warn")],
                kind="rate",
                unit=" ms",
                height=150,
                span_seconds=TRAIL_SECONDS,
            )
            self._bars = _Histogram()

    def show(self, sync: Fields, trail: Trail, is_first: bool) -> None:
        count = sync["count"]
        self._p50.set_text(units.duration(sync["p50_seconds"] if count else None))
        self._p99.set_text(units.duration(sync["p99_seconds"] if count else None))
        self._last.set_text(units.duration(sync["last_seconds"] if count else None))
        self._mean.set_text(units.duration(sync["seconds_sum"] / count if count else None))
        self._count.set_text(units.count(count))
        points = list(trail.points)
        if is_first:
            self._chart.load(points)
        elif points and points[-1][0] > self._last_at:
            self._chart.push(points[-1])
        self._last_at = points[-1][0] if points else 0.0
        self._bars.show(sync["buckets"])


class _Histogram:
    """How many syncs took how long, as a table with bars. The bounds are those of the first answer."""

    def __init__(self) -> None:
        self._rows: list[tuple[TextElement, TextElement]] = []
        with tag("table", classes="ps-table ps-histogram", aria_label="Syncs by their time"):
            with tag("thead"), tag("tr"):
                tag("th", "Time", "ps-number", scope="col")
                with tag("th", classes="ps-wide", scope="col"):
                    tag("span", "Share", "ps-hidden")
                tag("th", "Syncs", "ps-number", scope="col")
            self._body = tag("tbody")

    def show(self, buckets: list[Fields]) -> None:
        if not self._rows:
            with self._body:
                self._rows = [self._row(label) for label in labels(buckets)]
        most = max([it["count"] for it in buckets], default=0)
        for (bar, text), it in zip(self._rows, buckets, strict=True):
            bar.style(replace=f"width: {100 * it['count'] / most if most else 0:.1f}%")
            text.set_text(units.count(it["count"]))

    def _row(self, label: str) -> tuple[TextElement, TextElement]:
        with tag("tr"):
            tag("th", label, "ps-number", scope="row")
            with tag("td", classes="ps-wide"):
                bar = tag("span", classes="ps-bar")
            return bar, tag("td", "0", "ps-number")


def labels(buckets: list[Fields]) -> list[str]:
    """What each bucket is called: up to its bound, and the last one longer than all bounds."""
    bounds = [it["seconds_max"] for it in buckets]
    return [f"> {units.duration(bounds[-2])}" if it is None else f"≤ {units.duration(it)}" for it in bounds]
