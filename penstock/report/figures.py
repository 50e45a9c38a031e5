"""Figures: the tables of a report, put together for each queue, as the page shows them.

Tables have rows only where something happened; here every queue has a value for every bucket. Nothing is
counted or measured here that was not in a table: sums are of a handful of numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.report.period import Span, datetime_of
from penstock.report.tables import EVENTS, FAILED

if TYPE_CHECKING:
    import pyarrow as pa

Row = Mapping[str, Any]  # a row of a table, by the names of its columns: `tables.TABLES` has their types


@dataclass
class QueueFigures:
    """One queue. Lists have a value for each bucket; None: nothing is known of it."""

    name: str
    totals: Row
    coverage: Row
    counts: dict[str, list[int]] = field(default_factory=dict)  # by event
    outstanding: list[int] = field(default_factory=list)
    waiting: Row | None = None
    waiting_over_time: list[Row | None] = field(default_factory=list)
    working: Row | None = None
    working_by_outcome: dict[str, Row] = field(default_factory=dict)
    working_over_time: list[Row | None] = field(default_factory=list)
    deaths: dict[tuple[str, str], list[int]] = field(default_factory=dict)  # by event and reason
    endings: list[Row] = field(default_factory=list)
    attempts: list[Row] = field(default_factory=list)
    hosts: list[Row] = field(default_factory=list)

    @property
    def events(self) -> int:
        return int(self.coverage["events"])

    @property
    def grown(self) -> int:
        return int(self.totals["outstanding_end"] - self.totals["outstanding_start"])

    @property
    def deliveries(self) -> int:
        return int(self.working["deliveries"]) if self.working is not None else 0

    @property
    def failed(self) -> int:
        """Deliveries with which the work was not done."""
        by_outcome = self.working_by_outcome
        return sum(by_outcome[name]["deliveries"] for name in FAILED if name in by_outcome)

    def died(self, event: str = "dead") -> dict[str, int]:
        """How many messages ended so, by reason."""
        return {reason: sum(values) for (what, reason), values in self.deaths.items() if what == event}


@dataclass
class Figures:
    """All queues, those with the most events first, and the connections that are named."""

    span: Span | None
    queues: list[QueueFigures]
    connections: list[Row]

    def total(self, column: str) -> int:
        return sum(queue.totals[column] for queue in self.queues)

    @property
    def events(self) -> int:
        return sum(queue.events for queue in self.queues)

    @property
    def hosts(self) -> list[Row]:
        return [row for queue in self.queues for row in queue.hosts]


def failed_of(consumer: Row) -> int:
    """The deliveries of a consumer with which the work was not done."""
    return sum(consumer[outcome] for outcome in FAILED)


def figures_of(span: Span | None, tables: "Mapping[str, pa.Table]") -> Figures:
    """The figures of a report."""
    rows: dict[str, list[Row]] = {name: table.to_pylist() for name, table in tables.items()}
    coverage = {row["queue"]: row for row in rows["coverage"]}
    queues = {row["queue"]: QueueFigures(row["queue"], row, coverage[row["queue"]]) for row in rows["totals"]}
    if span is not None:
        _over_time(span, queues, rows)
    for row in rows["endings"]:
        queues[row["queue"]].endings.append(row)
    for row in rows["attempts"]:
        queues[row["queue"]].attempts.append(row)
    for row in rows["consumers"]:
        if row["consumer"] is None:
            queues[row["queue"]].hosts.append(row)
    return Figures(
        span,
        sorted(queues.values(), key=lambda queue: (-queue.events, queue.name)),
        [row for row in rows["consumers"] if row["consumer"] is not None],
    )


def _over_time(span: Span, queues: Mapping[str, QueueFigures], rows: Mapping[str, list[Row]]) -> None:
    place = {datetime_of(bucket): at for at, bucket in enumerate(span.buckets())}
    for queue in queues.values():
        queue.counts = {event: [0] * len(place) for event in EVENTS}
        queue.waiting_over_time = [None] * len(place)
        queue.working_over_time = [None] * len(place)
        queue.outstanding = [-1] * len(place)
    for row in rows["throughput"]:
        queue, at = queues[row["queue"]], place[row["bucket"]]
        queue.outstanding[at] = row["outstanding"]
        for event in EVENTS:
            queue.counts[event][at] = row[event]
    for queue in queues.values():
        lived = queue.totals["outstanding_start"]
        for at, outstanding in enumerate(queue.outstanding):
            # Where nothing happened, nothing has changed.
            lived = queue.outstanding[at] = max(lived if outstanding < 0 else outstanding, 0)
    for row in rows["waiting"]:
        queue = queues[row["queue"]]
        if row["bucket"] is None:
            queue.waiting = row
        else:
            queue.waiting_over_time[place[row["bucket"]]] = row
    for row in rows["working"]:
        queue = queues[row["queue"]]
        if row["bucket"] is not None:
            queue.working_over_time[place[row["bucket"]]] = row
        elif row["outcome"] is None:
            queue.working = row
        else:
            queue.working_by_outcome[row["outcome"]] = row
    for row in rows["deaths"]:
        key = row["event"], row["reason"] or ""
        values = queues[row["queue"]].deaths.setdefault(key, [0] * len(place))
        values[place[row["bucket"]]] += row["messages"]
