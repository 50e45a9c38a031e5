"""History: charts over any time of the last fourteen days, of a queue (on its page) or of the whole
(`/history`).

What is shown is in the address: `?span=6h`, which goes on by itself, or `?from=…&to=…`, which stands still.
Points are the API's samples; of the last hour or less, what the feed tells comes behind them. Where the
broker was not there, lines have a gap. Marks are lines in every chart, and a list below them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from nicegui import ui

from penstock.common import units
from penstock.control.frames import Fields
from penstock.dashboard.chart import Chart, HeatMap, Point, Series
from penstock.dashboard.feed import Tick
from penstock.dashboard.layout import button, panel, style, tag
from penstock.dashboard.pages import queue_href
from penstock.dashboard.queue_blocks import Choice, columns
from penstock.dashboard.view import View
from penstock.http.history.marks import SAID
from penstock.http.history.steps import REASONS

SPANS: Final[Mapping[str, tuple[str, int]]] = {
    "5m": ("5 minutes", 300),
    "15m": ("15 minutes", 900),
    "1h": ("1 hour", 3600),
    "6h": ("6 hours", 6 * 3600),
    "24h": ("24 hours", 86_400),
    "7d": ("7 days", 7 * 86_400),
    "14d": ("14 days", 14 * 86_400),
}
SPAN: Final = "15m"
SECONDS_MAX: Final = 14 * 86_400
LIVE_SECONDS_MAX: Final = 3600
"""Where more is shown, a point every few seconds would say nothing."""

PUSH_TICKS: Final = 3
"""A point for so many seconds: samples have one for ten."""

RELOAD_SECONDS: Final = 20.0
POINTS_MAX: Final = 360
COLUMNS_MAX: Final = 90
MARKS_MAX: Final = 200
GAP_STEPS: Final = 2.5


@dataclass(frozen=True, slots=True)
class Graph:
    """One chart: fields of a sample; `waiting.p50_seconds` is a field of a field."""

    title: str
    fields: tuple[str, ...]
    series: tuple[Series, ...]
    kind: str
    unit: str = ""
    help: str = ""
    live: bool = False  # the feed's row has the same fields
    stacked: bool = False
    per_minute: bool = False  # they are counts of a step


_QUANTILES: Final = (Series("Median", "in"), Series("99 %", "warn"))

GRAPHS: Final = (
    Graph(
        "In and out",
        ("rate_in", "rate_out"),
        (Series("In", "in"), Series("Out", "out")),
        "rate",
        "/s",
        "Messages accepted and acknowledged per second",
        live=True,
    ),
    Graph(
        "Backlog",
        ("ready", "held", "delayed", "dead"),
        (Series("Ready", "ready"), Series("Held", "out"), Series("Delayed", "warn"), Series("Dead", "dead")),
        "count",
        help="Messages that wait, are held, delayed, dead",
        live=True,
    ),
    Graph(
        "Oldest",
        ("oldest_seconds",),
        (Series("Oldest", "warn"),),
        "age",
        help="Age of the oldest message that is not settled",
        live=True,
    ),
    Graph(
        "Waiting",
        ("waiting.p50_seconds", "waiting.p99_seconds"),
        _QUANTILES,
        "duration",
        help="How long messages had waited when they were handed out for the first time",
    ),
    Graph(
        "Working",
        ("working.p50_seconds", "working.p99_seconds"),
        _QUANTILES,
        "duration",
        help="How long consumers had them before they settled them",
    ),
    Graph(
        "Died",
        tuple(f"died.{reason}" for reason in REASONS),
        tuple(
            Series(reason.replace("-", " "), color)
            for reason, color in zip(REASONS, ("muted", "warn", "dead", "out", "in", "ready"), strict=True)
        ),
        "rate",
        "/min",
        "New dead letters per minute, by reason, one on the other",
        stacked=True,
        per_minute=True,
    ),
)

WHOLE_GRAPHS: Final = (
    *GRAPHS,
    Graph(
        "Syncs",
        ("syncs.p50_seconds", "syncs.p99_seconds"),
        _QUANTILES,
        "duration",
        help="How long syncs to the disk took",
    ),
    Graph(
        "Clients",
        ("connections", "consumers"),
        (Series("Connections", "in"), Series("Consumers", "out")),
        "count",
        help="Connections over SSPQ, PHPMQ, RQ and of workers over HTTP; consumers of queues",
    ),
    Graph(
        "Disk",
        ("disk_bytes_free",),
        (Series("Free", "ready"),),
        "size",
        help="What is free on the disk of the log",
    ),
)

_MS: Final = 0.001
RANGES: Final = (
    (_MS, "< 1 ms"),
    (3 * _MS, "1 – 3 ms"),
    (10 * _MS, "3 – 10 ms"),
    (30 * _MS, "10 – 30 ms"),
    (100 * _MS, "30 – 100 ms"),
    (300 * _MS, "0.1 – 0.3 s"),
    (1, "0.3 – 1 s"),
    (3, "1 – 3 s"),
    (10, "3 – 10 s"),
    (30, "10 – 30 s"),
    (100, "30 – 100 s"),
    (300, "100 – 300 s"),
    (1000, "5 – 17 min"),
    (3600, "17 – 60 min"),
    (float("inf"), "> 1 h"),
)
"""Rows of the heat map: times below this, and what they are called."""


async def build(view: View) -> None:
    """The page of the whole."""
    style("queue.css")
    await view.api.get("/v1/samples", seconds=10)  # Whoever may not see it is told so here.
    tag("h1", "History", "ps-hidden")

    def live(tick: Tick) -> Fields:
        return tick.totals._asdict()

    Charts(view, "/v1/samples", WHOLE_GRAPHS, lambda **query: _href("/history", **query), live)


def _href(path: str, **query: object) -> str:
    words = "&".join(f"{name}={value}" for name, value in query.items() if value is not None)
    return f"{path}?{words}" if words else path


class Charts:
    """`live` tells what the feed says at a tick; None: nothing. `queue`: whose marks, too."""

    def __init__(
        self,
        view: View,
        path: str,
        graphs: Sequence[Graph],
        href: Callable[..., str],
        live: Callable[[Tick], Fields | None],
        queue: str | None = None,
    ) -> None:
        self._view = view
        self._path = path
        self._graphs = graphs
        self._href = href
        self._live = live
        self._queue = queue
        query = view.request.query_params
        asked = query.get("span", "")
        self._span = asked if asked in SPANS else SPAN
        self._fixed = between(query.get("from", ""), query.get("to", ""), time.time())
        self._loaded = False
        self._ticks = 0
        self._turns = 0
        with tag("div", classes="ps-bar"):
            tag("h2", "Over time", "ps-bar-title")
            spans = {key: text for key, (text, _) in SPANS.items()}
            self._choice = Choice("How far back", spans, "" if self._fixed else self._span, self._choose)
        self._form()
        self._note = tag("p", "", "ps-help ps-span")
        with columns():
            self._charts = [self._chart(graph, at == 0) for at, graph in enumerate(graphs)]
            with panel(classes="ps-graph ps-wide") as section:
                section.props["aria-label"] = "How waiting is spread"
                tag("h3", "How waiting is spread")
                tag("p", "How many messages had waited how long when they were handed out first", "ps-help")
                self._heat = HeatMap("How long messages had waited")
        with panel("Marks"):
            self._marks = tag("ol", classes="ps-marks")
        view.on_open(lambda: view.later(self._load))
        view.on_tick(self._tick)
        view.every(RELOAD_SECONDS, self._turn)

    def _form(self) -> None:
        """A time of one's own, which leads to the address that says it."""
        start, end = self._fixed or (None, None)
        with tag("details", classes="ps-terminal ps-between") as details:
            if self._fixed:
                details.props["open"] = True
            tag("summary", "Another time")
            with tag("div", classes="ps-form"):
                fields = [_time_field("From (UTC)", start), _time_field("To (UTC)", end)]
                button("Show", lambda: self._go(*(str(field.value or "") for field in fields)))

    def _go(self, start: str, end: str) -> None:
        if between(start, end, time.time()) is None:
            self._view.notify("Give two times of the last 14 days, the earlier one first", wrong=True)
        else:
            ui.navigate.to(self._href(**{"from": start, "to": end}))

    def _chart(self, graph: Graph, first: bool) -> Chart:
        with panel(classes="ps-graph") as section:
            section.props["aria-label"] = graph.title
            tag("h3", graph.title)
            tag("p", graph.help, "ps-help")
            return Chart(
                graph.help,
                graph.series,
                kind=graph.kind,
                unit=graph.unit,
                height=190,
                area=len(graph.series) == 1,
                span_seconds=SPANS[self._span][1],
                stacked=graph.stacked,
                handles=first,
            )

    # --- which time ------------------------------------------------------------------------------

    async def _choose(self, span: str) -> None:
        self._span, self._fixed = span, None
        ui.navigate.history.replace(self._href(span=span if span != SPAN else None))
        await self._view.run(self._load)

    def _range(self) -> tuple[float, float]:
        """From when to when, in seconds since 1970."""
        if self._fixed is not None:
            return self._fixed
        now = time.time()
        return now - SPANS[self._span][1], now

    @property
    def _is_live(self) -> bool:
        return self._fixed is None and SPANS[self._span][1] <= LIVE_SECONDS_MAX

    # --- what is shown ---------------------------------------------------------------------------

    async def _turn(self) -> None:
        """Now and then; where much is shown, less often."""
        self._turns += 1
        if self._loaded and self._fixed is None and (self._is_live or self._turns % 3 == 0):
            await self._load()

    async def _load(self) -> None:
        start, end = self._range()
        seconds = max(end - start, 10.0)
        between = {"from": _iso(start), "to": _iso(end)}
        api = self._view.api
        fine = await api.get(self._path, **between, step=_step(seconds / POINTS_MAX))
        coarse = await api.get(self._path, **between, step=_step(seconds / COLUMNS_MAX), buckets=True)
        marks = await api.get("/v1/marks", **between, queue=self._queue)
        step: int = fine["step_seconds"]
        until = None if self._is_live else end
        for graph, chart in zip(self._graphs, self._charts, strict=True):
            chart.span(seconds, until, GAP_STEPS * step)
            chart.load(points(fine["samples"], graph, step))
        rows, cells = spread(coarse["samples"])
        self._heat.load(rows, cells, coarse["step_seconds"], seconds, end)
        self._show_marks(marks["marks"][-MARKS_MAX:])
        steps = f"in steps of {units.duration(step)}"
        where = f"{_said(start)} to {_said(end)} UTC, {steps}" if self._fixed else f"Times are UTC, {steps}"
        self._note.set_text(f"{where}. Lines have a gap where the broker was not there.")
        self._loaded = True

    def _show_marks(self, marks: Sequence[Fields]) -> None:
        told = [(_at(mark["time"]), mark_text(mark, self._queue)) for mark in marks]
        for chart in self._charts:
            chart.put_marks(told)
        self._marks.clear()
        with self._marks:
            for at, text in reversed(told):
                with tag("li"):
                    tag("span", f"{_said(at)} UTC", "ps-hint")
                    tag("span", text, dir="auto")
            if not told:
                tag("li", "Nothing was marked in this time. Mark a deployment: penstock mark TEXT", "ps-help")

    def _tick(self, tick: Tick) -> None:
        self._ticks += 1
        if not self._loaded or not self._is_live or self._ticks % PUSH_TICKS:
            return
        seen = self._live(tick)
        if seen is not None:
            now = time.time()
            for graph, chart in zip(self._graphs, self._charts, strict=True):
                if graph.live:
                    chart.push([now, *(seen[field] for field in graph.fields)])


def _time_field(label: str, at: float | None) -> ui.input:
    value = "" if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%S}"
    with tag("div", classes="ps-field"):
        tag("span", label, aria_hidden="true")
        field = ui.input(value=value).props("outlined dense type=datetime-local step=1").classes("ps-input")
        field.props["aria-label"] = label
    return field


# --- samples as points ---------------------------------------------------------------------------


def points(samples: Sequence[Fields], graph: Graph, step_seconds: int) -> list[Point]:
    share = 60 / step_seconds if graph.per_minute else 1
    return [[_at(it["time"]), *(_value(it, field, share) for field in graph.fields)] for it in samples]


def _value(sample: Fields, field: str, share: float) -> float | None:
    name, _, inner = field.partition(".")
    value = sample[name]
    if inner:
        value = None if value is None else value.get(inner, 0)
    return None if value is None else value if share == 1 else round(value * share, 3)


def spread(samples: Sequence[Fields]) -> tuple[list[str], list[tuple[float, list[int]]]]:
    """The rows and columns of a heat map of waiting; only the rows between the shortest and the longest."""
    found: list[tuple[float, list[int]]] = []
    for sample in samples:
        counts = [0] * len(RANGES)
        for bucket in (sample["waiting"] or {"buckets": ()})["buckets"]:
            middle = (bucket["seconds_min"] + bucket["seconds_max"]) / 2
            counts[next(at for at, (below, _) in enumerate(RANGES) if middle < below)] += bucket["count"]
        if any(counts):
            found.append((_at(sample["time"]), counts))
    used = [at for at in range(len(RANGES)) if any(counts[at] for _, counts in found)]
    first, end = (used[0], used[-1] + 1) if used else (0, 0)
    rows = [label for _, label in RANGES[first:end]]
    return rows, [(at, counts[first:end]) for at, counts in found]


def mark_text(mark: Fields, queue: str | None) -> str:
    """What a mark says; of a queue, where it is not on that queue's own page."""
    who = f" ({mark['who']})" if mark["who"] else ""
    about = f"{mark['queue']}: " if mark["queue"] and mark["queue"] != queue else ""
    kind = mark["kind"] if mark["kind"] in SAID and mark["kind"] != "note" else ""
    return f"{about}{kind + ': ' if kind else ''}{mark['text']}{who}"


def between(start: str, end: str, now: float) -> tuple[float, float] | None:
    """The time that an address names, UTC; None where it names none, or one that cannot be."""
    try:
        begin, stop = (datetime.fromisoformat(it) for it in (start, end))
        first, last = (it.replace(tzinfo=it.tzinfo or UTC).timestamp() for it in (begin, stop))
    except (ValueError, OverflowError):
        return None
    first, last = max(first, now - SECONDS_MAX), min(last, now)
    return (first, last) if first < last else None


def _step(seconds: float) -> int:
    return max(min(int(-(-seconds // 1)), 3600), 1)


def _at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _iso(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%S}Z"


def _said(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}"


def of_queue(view: View, queue: str, path: str) -> Charts:
    """The charts of a queue's page."""

    def live(tick: Tick) -> Fields | None:
        row = view.feed.rows.get(queue)
        if row is None:
            return None
        oldest_at = row["oldest_at"]
        age = None if oldest_at is None else round(max(time.time() - oldest_at, 0), 1)
        return {**row, "oldest_seconds": age}

    return Charts(view, path, GRAPHS, lambda **query: queue_href(queue, **query), live, queue)
