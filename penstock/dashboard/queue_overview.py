"""A queue's first part: what came and went over the last hour, who consumes it, its settings."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from nicegui import ui

from penstock.common import units
from penstock.control.frames import Fields
from penstock.dashboard.caller import queue_path
from penstock.dashboard.chart import Chart, Series
from penstock.dashboard.connections import CONNECTIONS
from penstock.dashboard.feed import Tick
from penstock.dashboard.layout import fact, facts, panel, tag
from penstock.dashboard.pages import queue_href
from penstock.dashboard.queue_blocks import Choice, columns, terminal
from penstock.dashboard.table import Column, LiveTable, Row
from penstock.dashboard.view import View

SPANS: Final[Mapping[str, tuple[str, int]]] = {
    "5m": ("5 minutes", 300),
    "15m": ("15 minutes", 900),
    "1h": ("1 hour", 3600),
}
SPAN: Final = "15m"
PUSH_TICKS: Final = 3
"""A point for so many seconds: samples have one for ten."""

CONSUMERS_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Graph:
    """One chart: fields of a sample, and of the feed's row alike."""

    title: str
    fields: tuple[str, ...]
    series: tuple[Series, ...]
    kind: str
    unit: str = ""
    help: str = ""


GRAPHS: Final = (
    Graph(
        "In and out",
        ("rate_in", "rate_out"),
        (Series("In", "in"), Series("Out", "out")),
        "rate",
        "/s",
        "Messages accepted and acknowledged per second",
    ),
    Graph(
        "Backlog",
        ("ready", "held", "delayed", "dead"),
        (Series("Ready", "ready"), Series("Held", "out"), Series("Delayed", "warn"), Series("Dead", "dead")),
        "count",
        help="Messages that wait, are held, delayed, dead",
    ),
    Graph(
        "Waiting time",
        ("oldest_seconds",),
        (Series("Oldest", "warn"),),
        "age",
        help="Age of the oldest message that is not settled",
    ),
)

CONSUMER_COLUMNS: Final = (
    Column("name", "Connection", head=True, sortable=False),
    Column("protocol", "Protocol", sortable=False),
    Column("peer", "From", sortable=False),
    Column("takes", "Takes", sortable=False),
    Column(
        "held",
        "Held",
        "count",
        help="Messages that it has and has not settled, of all its queues",
        sortable=False,
    ),
    Column("since", "Connected", "since", sortable=False),
    Column("state", "State", "badges", sortable=False),
)

SETTINGS: Final[Sequence[tuple[str, str, Callable[[Any], str]]]] = (
    ("durability", "Durability", str),
    ("deliver_after", "Delivered", lambda it: {"accept": "when accepted", "sync": "when durable"}[it]),
    ("retention_seconds", "Retention", lambda it: units.duration(it) if it else "none"),
    ("retention_bytes", "Retention, at most", lambda it: units.size(it) if it else "no bound"),
    ("max_deliveries", "Max deliveries", lambda it: units.count(it) if it else "no bound"),
    ("retry_delays", "Retry delays", lambda it: ", ".join(map(units.duration, it)) or "none"),
    ("max_bytes", "Max bytes", lambda it: units.size(it) if it else "no bound"),
    ("on_expiry", "What expires", lambda it: {"dead": "becomes dead", "drop": "is dropped"}[it]),
    ("dead_letters", "Dead letters", lambda it: "on" if it else "off"),
    ("expire_seconds", "Deleted, when not used for", lambda it: units.duration(it) if it else "never"),
)
"""Field of the policy, label, how it is written."""


async def build(view: View, row: Fields) -> None:
    _Charts(view, row["name"])
    _Consumers(view, row)
    _settings(row)
    terminal(view, ["show", row["name"]], ["top", row["name"]])


class _Charts:
    """The hour that the API keeps, then the feed."""

    def __init__(self, view: View, queue: str) -> None:
        self._view = view
        self._queue = queue
        asked = view.request.query_params.get("span", "")
        self._span = asked if asked in SPANS else SPAN
        self._loaded = False
        self._ticks = 0
        with tag("div", classes="ps-bar"):
            tag("h2", "Over time", "ps-bar-title")
            Choice("How far back", {key: text for key, (text, _) in SPANS.items()}, self._span, self._choose)
        with columns():
            self._charts = [self._chart(graph) for graph in GRAPHS]
        view.on_open(lambda: view.later(self._load))
        view.on_tick(self._tick)

    def _chart(self, graph: Graph) -> Chart:
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
            )

    async def _choose(self, span: str) -> None:
        self._span = span
        ui.navigate.history.replace(queue_href(self._queue, span=span if span != SPAN else None))
        for chart in self._charts:
            chart.props["span-seconds"] = SPANS[span][1]
            chart.update()
        await self._view.run(self._load)

    async def _load(self) -> None:
        answer = await self._view.api.get(queue_path(self._queue, "samples"), seconds=SPANS[self._span][1])
        samples = [(datetime.fromisoformat(it["time"]).timestamp(), it) for it in answer["samples"]]
        for graph, chart in zip(GRAPHS, self._charts, strict=True):
            chart.load([[at, *(it[field] for field in graph.fields)] for at, it in samples])
        self._loaded = True

    def _tick(self, tick: Tick) -> None:
        row = self._view.feed.rows.get(self._queue)
        self._ticks += 1
        if not self._loaded or row is None or self._ticks % PUSH_TICKS:
            return
        now = time.time()
        oldest_at = row["oldest_at"]
        age = None if oldest_at is None else round(max(now - oldest_at, 0), 1)
        seen = {**row, "oldest_seconds": age}
        for graph, chart in zip(GRAPHS, self._charts, strict=True):
            chart.push([now, *(seen[field] for field in graph.fields)])


class _Consumers:
    """Who takes messages of this queue, or its dead letters."""

    def __init__(self, view: View, row: Fields) -> None:
        self._view = view
        self._queue: str = row["name"]
        self._shown: dict[str, Row] | None = None  # by name; None: the browser knows nothing
        with panel("Consumers"):
            self._table = LiveTable(
                "Consumers", CONSUMER_COLUMNS, key="name", noun="consumer", sort="name", page_rows=20
            ).classes("ps-consumers")
            with self._table:
                tag("p", "Nobody consumes this queue at the moment.", "ps-help")
        view.on_open(self._opened)
        view.every(CONSUMERS_SECONDS, self._refresh)

    def _opened(self) -> None:
        self._shown = None

    async def _refresh(self) -> None:
        row = self._view.feed.rows.get(self._queue)
        rows: dict[str, Row] = {}
        # Where the feed knows of none, nobody has to be asked who they are.
        if row is None or row["consumers"]:
            rows = self._rows(await CONNECTIONS.read(self._view.api))
        self._table.follow(rows, self._shown or {}, whole=self._shown is None)
        self._shown = rows

    def _rows(self, answer: Fields) -> dict[str, Row]:
        now = time.time()
        rows: dict[str, Row] = {}
        for it in answer["connections"]:
            doors = sorted(door["dead"] for door in it["consumes"] if door["queue"] == self._queue)
            if doors:
                rows[it["name"]] = {
                    "name": it["name"],
                    "protocol": it["protocol"].upper(),
                    "peer": it["peer"],
                    "takes": " and ".join("dead letters" if dead else "messages" for dead in doors),
                    "held": it["held"],
                    "since": round(now - it["connected_seconds"]),
                    "state": [["blocked", "bad"]] if it["blocked"] else [],
                }
        return rows


def _settings(row: Fields) -> None:
    with panel("Settings and log"), facts():
        for field, label, say in SETTINGS:
            fact(label, say(row["policy"][field]))
        fact("Offsets in the log", _range(row["offset_start"], row["offset_end"]))
        fact("Events in the log", _range(row["event_start"], row["event_end"]))


def _range(start: int, end: int) -> str:
    return f"{units.count(start)} to {units.count(end - 1)}" if start < end else "none"
