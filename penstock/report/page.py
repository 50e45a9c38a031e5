"""Page: a report as one HTML file, which needs nothing else: no network, no script, no other file.

Rules that always hold:
  * Every text that comes from elsewhere (names of queues and consumers, reasons, URLs) is escaped where it is
    put in; the address of a queue within the page is a number (`#q3`).
  * Every chart has its numbers in a table. Every table has a caption, and headings with a scope.
  * It says what its data covers, and what it does not.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from penstock.common import units
from penstock.common.audited import Line
from penstock.report import charts, page_parts
from penstock.report.audit import audit_part
from penstock.report.figures import Figures, QueueFigures, Row
from penstock.report.findings import findings_of
from penstock.report.markup import Head, Safe, bad, escape, link, section, table, tag
from penstock.report.page_parts import QUEUES_MAX, ROWS_MAX
from penstock.report.page_queue import queue_part
from penstock.report.period import Span, datetime_of
from penstock.report.style import CSS
from penstock.report.tables import BACK, EVENTS


class About(NamedTuple):
    """What the report says about itself."""

    url: str
    made_at: datetime
    version: str
    patterns: Sequence[str] = ()


def render(figures: Figures, about: About, audit: Sequence[Line] = ()) -> str:
    """The page. `audit`: lines of it, oldest first, each call once."""
    anchors = {queue.name: f"q{number}" for number, queue in enumerate(figures.queues[:QUEUES_MAX], 1)}
    span = figures.span
    if span is None:
        body = [_nothing(figures), page_parts.coverage(figures)]
        sections = [("coverage", "What the data covers")]
    else:
        body = [
            _tiles(figures, span),
            _findings(figures, anchors),
            _queues(figures, anchors),
            page_parts.times(figures),
            page_parts.retries(figures),
            page_parts.ends(figures),
            page_parts.consumers(figures),
            _each(figures, span, anchors),
            page_parts.coverage(figures),
        ]
        sections = [
            ("found", "What stands out"),
            ("queues", "Queues"),
            ("times", "Waiting and working"),
            ("retries", "Retries"),
            ("ends", "Dead letters"),
            ("consumers", "Consumers"),
            ("each", "Queue by queue"),
            ("coverage", "What the data covers"),
        ]
    if audit:
        body.insert(-1, audit_part(audit))
        sections.insert(-1, ("audit", "Audit"))
    items = "".join(f"<li>{link(anchor, title)}</li>" for anchor, title in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>Penstock report, {escape(_when(figures))}</title><style>{CSS}</style></head><body>"
        '<a class="skip" href="#main">Skip to the report</a>'
        f"<header><h1>Penstock report</h1>{_subtitle(figures, about)}"
        f'<nav aria-label="Sections"><ul>{items}</ul></nav></header>'
        f'<main id="main">{"".join(body)}</main>'
        f"<footer>Made by penstock {escape(about.version)} on {escape(units.moment(about.made_at))} UTC from "
        f"the events of <code>{escape(about.url)}</code>.</footer></body></html>\n"
    )


def _when(figures: Figures) -> str:
    if figures.span is None:
        return "nothing happened"
    start, end = datetime_of(figures.span.start_us), datetime_of(figures.span.end_us)
    last = f"{end:%H:%M:%S}" if start.date() == end.date() else units.moment(end)
    return f"{units.moment(start)} to {last} UTC"


def _subtitle(figures: Figures, about: About) -> str:
    parts = [_when(figures)]
    if figures.span is not None:
        parts[0] += f" ({units.duration(figures.span.seconds)})"
    parts.append(units.counted(len(figures.queues), "queue"))
    parts.append(units.counted(figures.events, "event"))
    if about.patterns:
        parts.append("only " + ", ".join(about.patterns))
    return tag("p", " · ".join(parts), "quiet")


# --- parts -------------------------------------------------------------------------------------------------


def _nothing(figures: Figures) -> str:
    if not figures.queues:
        said = "There are no queues: nothing was ever sent to this broker."
    elif any(queue.coverage["event_kept"] for queue in figures.queues):
        said = "Nothing happened in this time, as far as the log is kept."
    else:
        said = "Nothing happened in this time: no message came, and none was settled."
    return tag("p", said, "note")


def _tiles(figures: Figures, span: Span) -> str:
    deliveries = sum(queue.deliveries for queue in figures.queues)
    failed = sum(queue.failed for queue in figures.queues)
    start, end = figures.total("outstanding_start"), figures.total("outstanding_end")
    waits = [queue for queue in figures.queues if queue.waiting is not None]
    tiles = [
        (units.count(figures.total("accepted")), f"accepted, {_average(figures.total('accepted'), span)}"),
        (units.count(figures.total("acked")), f"acked, {_average(figures.total('acked'), span)}"),
        (units.count(figures.total("dead")), "dead letters"),
        (
            units.percent(failed, deliveries),
            f"of {units.counted(deliveries, 'delivery', 'deliveries')} failed",
        ),
        (units.count(end), f"outstanding, {units.signed(end - start)}"),
    ]
    if waits:
        longest = max(waits, key=lambda queue: queue.waiting["p99_seconds"] if queue.waiting else 0)
        assert longest.waiting is not None
        tiles.append((units.duration(longest.waiting["p99_seconds"]), f"99 % waited less, in {longest.name}"))
    items = "".join(f"<li>{tag('b', number)}{tag('span', said)}</li>" for number, said in tiles)
    return f'<ul class="tiles">{items}</ul>'


def _average(count: int, span: Span) -> str:
    rate = count / max(span.seconds, 1e-6)
    if rate >= 1:
        return f"{units.short(rate)} per second"
    return (
        f"{units.short(rate * 60)} per minute" if rate * 60 >= 1 else f"{units.short(rate * 3600)} per hour"
    )


def _findings(figures: Figures, anchors: Mapping[str, str]) -> str:
    found = findings_of(figures)
    if not found:
        said = "Nothing: no message died, no consumer failed often, no queue grew much."
        return section("found", "What stands out", tag("p", said, "note"))
    items = "".join(
        f"<li>{_named(one.queue, anchors)}: {escape(one.text)} {escape(one.do)}</li>" for one in found
    )
    return section("found", "What stands out", Safe(f'<ul class="found">{items}</ul>'))


def _named(queue: str, anchors: Mapping[str, str]) -> Safe:
    label = tag("b", queue)
    return link(anchors[queue], label) if queue in anchors else label


def _queues(figures: Figures, anchors: Mapping[str, str]) -> str:
    heads = [
        Head("Queue", number=False),
        Head("Accepted over time", number=False),
        *map(Head, ("Accepted", "Acked", "Back", "Dead", "Dropped", "Outstanding", "Change")),
        *map(Head, ("Wait, half", "99 %", "Work, half", "99 %")),
    ]
    rows = [
        [
            _named(queue.name, anchors),
            Safe(charts.sparkline([*queue.counts["accepted"]], f"{queue.name}: accepted over time")),
            *_queue_numbers(queue.totals, queue.grown),
            *_four_times(queue),
        ]
        for queue in figures.queues[:ROWS_MAX]
    ]
    sums = {name: figures.total(name) for name in (*EVENTS, "outstanding_end")}
    grown = sum(queue.grown for queue in figures.queues)
    foot = ["All queues", "", *_queue_numbers(sums, grown), *[""] * 4]
    caption = (
        "What happened in each queue. Back: deliveries that ended with the message in the queue again. "
        "Dropped: expired, rejected or withdrawn, without becoming a dead letter."
    )
    return section(
        "queues", "Queues", table(caption, heads, rows, foot), _now(figures), _left_out(figures.queues)
    )


def _now(figures: Figures) -> str:
    """How the queues stood when the report was made, as the broker said."""
    heads = [
        Head("Queue", number=False),
        *map(Head, ("Ready", "Held", "Delayed", "Dead letters", "Consumers")),
    ]
    heads.append(Head("", number=False))
    names = ("ready_now", "held_now", "delayed_now", "dead_now", "consumers_now")
    rows = [
        [
            queue.name,
            *(units.count(queue.totals[name]) for name in names),
            "paused" if queue.totals["paused"] else "",
        ]
        for queue in figures.queues[:ROWS_MAX]
    ]
    foot = ["All queues", *(units.count(figures.total(name)) for name in names), ""]
    return table("How the queues stood when this report was made", heads, rows, foot)


def _left_out(queues: Sequence[QueueFigures]) -> str:
    left_out = len(queues) - ROWS_MAX
    said = (
        f"{units.counted(left_out, 'queue')} with fewer events are not shown; the Parquet tables have them."
    )
    return tag("p", said, "quiet") if left_out > 0 else Safe("")


def _queue_numbers(totals: Row, grown: int) -> list[str]:
    return [
        units.count(totals["accepted"]),
        units.count(totals["acked"]),
        units.count(sum(totals[event] for event in BACK)),
        bad(units.count(totals["dead"]), totals["dead"] > 0),
        units.count(totals["expired"] + totals["rejected"] + totals["withdrawn"]),
        units.count(totals["outstanding_end"]),
        units.signed(grown),
    ]


def _four_times(queue: QueueFigures) -> list[str]:
    return [
        units.duration(None if row is None else row[name])
        for row in (queue.waiting, queue.working)
        for name in ("p50_seconds", "p99_seconds")
    ]


def _each(figures: Figures, span: Span, anchors: Mapping[str, str]) -> str:
    shown = figures.queues[: len(anchors)]
    rest = len(figures.queues) - len(shown)
    said = (
        f"The {len(shown)} queues with the most events; {rest:,} more are in the tables." if rest > 0 else ""
    )
    intro = tag("p", said, "quiet") if said else Safe("")
    parts = [queue_part(queue, span, anchors[queue.name]) for queue in shown if queue.events]
    return section("each", "Queue by queue", intro, *parts)
