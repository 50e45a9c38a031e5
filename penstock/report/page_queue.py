"""The part of the page about one queue: its charts, and the numbers behind them."""

from collections.abc import Callable, Iterable
from typing import Final

from penstock.common import units
from penstock.report import charts
from penstock.report.charts import Series, Values
from penstock.report.figures import QueueFigures, Row
from penstock.report.markup import Head, Safe, folded, table, tag, text
from penstock.report.period import SECOND_US, Span, datetime_of
from penstock.report.tables import ATTEMPTS_MAX, BACK

REASON_COLOURS: Final = {
    "rejected": "c5",
    "expired": "c3",
    "retries-exhausted": "c4",
    "too-many-deliveries": "c6",
    "undeliverable": "c7",
    "bad-record": "c1",
}
OTHER_COLOUR: Final = "c8"
THROWN_AWAY: Final = {"rejected": "thrown away", "expired": "thrown away", "withdrawn": "withdrawn"}

RATES: Final = ((1, "second"), (60, "minute"), (3600, "hour"))
EDGE_SHARE: Final = 0.25
"""A bucket that lies within the period with less than this counts as this much: no rate of one message in a
millisecond."""


def queue_part(queue: QueueFigures, span: Span, anchor: str) -> Safe:
    """Everything about one queue."""
    figures = [_throughput(queue, span), _outstanding(queue, span)]
    figures += _times(queue, span)
    figures += _deaths(queue, span)
    figures += _attempts(queue)
    return Safe(
        f'<article class="queue" aria-labelledby="{anchor}"><h3 id="{anchor}">{text(queue.name)}</h3>'
        f"{tag('p', _sentence(queue))}"
        f'<div class="pair">{"".join(figures)}</div>'
        f"{folded('The numbers behind these charts', _numbers(queue, span))}</article>"
    )


def _sentence(queue: QueueFigures) -> str:
    totals = queue.totals
    parts = [
        f"{units.counted(totals['accepted'], 'message')} came, {totals['acked']:,} were acknowledged",
        f"outstanding at the end: {totals['outstanding_end']:,} ({units.signed(queue.grown)})",
    ]
    if totals["redriven"]:
        parts.append(f"{units.counted(totals['redriven'], 'dead letter')} went back")
    for event, said in (("dead", "died"), ("expired", "expired"), ("withdrawn", "were withdrawn")):
        if totals[event]:
            parts.append(f"{totals[event]:,} {said}")
    if totals["paused"]:
        parts.append("the queue is paused")
    return f"{'; '.join(parts)}."


# --- charts ------------------------------------------------------------------------------------------------


def rate_unit(most_per_second: float) -> tuple[int, str]:
    """The unit in which a rate is no small fraction: its seconds, and its name."""
    return next((unit for unit in RATES if most_per_second * unit[0] >= 1), RATES[-1])


def per_second(counts: Iterable[int], span: Span) -> list[float]:
    least = EDGE_SHARE * span.bucket_us / SECOND_US
    return [
        count / max(span.seconds_of(bucket), least)
        for count, bucket in zip(counts, span.buckets(), strict=True)
    ]


def _throughput(queue: QueueFigures, span: Span) -> str:
    rates = {event: per_second(queue.counts[event], span) for event in ("accepted", "acked")}
    seconds, name = rate_unit(max(max(values) for values in rates.values()))
    series = [
        Series(
            event,
            colour,
            [rate * seconds for rate in rates[event]],
            units.count(queue.totals[event]),
            area,
        )
        for event, colour, area in (("accepted", "c1", True), ("acked", "c2", False))
    ]
    return charts.lines("Throughput", f"messages per {name}", span, series, charts.NUMBERS)


def _outstanding(queue: QueueFigures, span: Span) -> str:
    values: list[float | None] = list(queue.outstanding)
    at_the_end = f"{units.count(queue.totals['outstanding_end'])} at the end"
    series = [Series("not settled", "c6", values, at_the_end, filled=True)]
    return charts.lines("Outstanding", "messages, dead letters included", span, series, charts.NUMBERS)


def _times(queue: QueueFigures, span: Span) -> list[str]:
    drawn = []
    for title, unit, whole, over_time in (
        ("Waiting", "from acceptance to the first delivery", queue.waiting, queue.waiting_over_time),
        ("Working", "from delivery to its end", queue.working, queue.working_over_time),
    ):
        if whole is None:
            continue
        series = [
            Series(said, colour, _column(over_time, name), units.duration(whole[name]))
            for said, colour, name in (
                ("half within", "c1", "p50_seconds"),
                ("99 % within", "c3", "p99_seconds"),
            )
        ]
        drawn.append(charts.lines(title, unit, span, series, charts.SECONDS))
    return drawn


def _column(rows: Iterable[Row | None], name: str) -> Values:
    return [None if row is None else row[name] for row in rows]


def _deaths(queue: QueueFigures, span: Span) -> list[str]:
    if not queue.deaths:
        return []
    series = []
    for (event, reason), values in sorted(queue.deaths.items(), key=lambda it: -sum(it[1])):
        label = reason or "no reason"
        colour = REASON_COLOURS.get(reason, OTHER_COLOUR)
        if event in THROWN_AWAY:
            label, colour = f"{label} ({THROWN_AWAY[event]})", OTHER_COLOUR
        numbers: list[float | None] = list(values)
        series.append(Series(label, colour, numbers, units.count(sum(values))))
    bucket = units.duration(span.bucket_us / SECOND_US)
    return [
        charts.stacked("Dead letters and what was thrown away", f"in {bucket}", span, series, charts.NUMBERS)
    ]


def _attempts(queue: QueueFigures) -> list[str]:
    if not any(row["attempt"] > 1 or row["died"] for row in queue.attempts):
        return []
    rows = []
    for row in queue.attempts:
        more = " or later" if row["attempt"] == ATTEMPTS_MAX else ""
        pieces = [Series("acked", "c2", [row["acked"]]), Series("died", "c5", [row["died"]])]
        rows.append((f"delivery {row['attempt']}{more}", pieces))
    return [charts.share_bars("Attempts", "with which delivery messages ended", rows)]


# --- numbers -----------------------------------------------------------------------------------------------

_NUMBERS: Final[tuple[tuple[str, Callable[[QueueFigures, int], str]], ...]] = (
    ("Accepted", lambda queue, at: units.count(queue.counts["accepted"][at])),
    ("Acked", lambda queue, at: units.count(queue.counts["acked"][at])),
    ("Back", lambda queue, at: units.count(sum(queue.counts[event][at] for event in BACK))),
    ("Dead", lambda queue, at: units.count(queue.counts["dead"][at])),
    ("Expired", lambda queue, at: units.count(queue.counts["expired"][at])),
    ("Withdrawn", lambda queue, at: units.count(queue.counts["withdrawn"][at])),
    ("Outstanding", lambda queue, at: units.count(queue.outstanding[at])),
    ("Wait, half", lambda queue, at: _seconds(queue.waiting_over_time[at], "p50_seconds")),
    ("Wait, 99 %", lambda queue, at: _seconds(queue.waiting_over_time[at], "p99_seconds")),
    ("Work, half", lambda queue, at: _seconds(queue.working_over_time[at], "p50_seconds")),
    ("Work, 99 %", lambda queue, at: _seconds(queue.working_over_time[at], "p99_seconds")),
)


def _seconds(row: Row | None, name: str) -> str:
    return units.duration(None if row is None else row[name])


def _numbers(queue: QueueFigures, span: Span) -> str:
    heads = [Head("Time, UTC", number=False), *(Head(title) for title, _ in _NUMBERS)]
    rows = [
        [units.moment(datetime_of(bucket)), *(number(queue, at) for _, number in _NUMBERS)]
        for at, bucket in enumerate(span.buckets())
    ]
    return table(f"{queue.name}, in pieces of {units.duration(span.bucket_us / SECOND_US)}", heads, rows)
