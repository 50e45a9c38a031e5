"""Charts: lines, stacked bars and percentile bars as HTML with SVG in it, drawn for any width.

Only what is drawn is SVG, stretched to the room that there is; every text is HTML, and keeps its size on a
phone. Colours are CSS classes (`c1` to `c8`), so that the page decides them, for light and for dark.

Rules that always hold:
  * Texts go in as they are, and come out escaped: whatever a queue is called, it is text.
  * A chart says in words what it shows (`aria-label`); the numbers are in a table of the page.
  * Lines are steps, a step per bucket: nothing is drawn between two values that was not there.
  * What is not known (None) is a gap, never a 0.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final, NamedTuple

from penstock.common import units
from penstock.report.markup import escape
from penstock.report.period import SECOND_US, Span, datetime_of

TICKS_X_MAX: Final = 6
TICK_SECONDS: Final = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200),
    *(86_400, 2 * 86_400, 7 * 86_400, 14 * 86_400, 28 * 86_400, 91 * 86_400, 364 * 86_400),
)
LOG_TICKS: Final = (
    *(10.0**power for power in range(-6, 2)),
    *(60.0, 600.0, 3600.0, 36_000.0, 86_400.0, 864_000.0, 8_640_000.0),
)
"""Seconds, about a power of ten apart, at which people have names for them."""

ROUND_SECONDS: Final[tuple[float, ...]] = tuple(
    number * unit
    for unit, numbers in ((60, (1, 2, 4, 6, 10, 20, 30, 40)), (3600, (1, 2, 4, 6, 8, 12)))
    for number in numbers
) + tuple(86_400 * number * 10**power for power in range(4) for number in (1, 2, 4, 6))

HEIGHT: Final = 100
"""Of a chart, in its own units; a bucket is one unit wide."""

WIDTH: Final = 1000
"""Of a bar on a scale of logarithms."""

Format = Callable[[float], str]
Values = Sequence[float | None]


class Series(NamedTuple):
    """What one line, or one colour of the bars, shows: a value for each bucket."""

    label: str
    colour: str
    values: Values
    total: str = ""  # in the legend
    filled: bool = False  # down to 0


class Ranks(NamedTuple):
    """A row of percentile bars; seconds."""

    label: str
    note: str
    p50: float
    p90: float
    p99: float
    longest: float


# --- scales ------------------------------------------------------------------------------------------------


def top_of_numbers(largest: float) -> float:
    """Where a scale ends: the next number of 1, 2, 3, 4, 5, 6 and 8 times a power of ten."""
    if largest <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(largest))
    return next(
        factor * power for factor in (1, 2, 3, 4, 5, 6, 8, 10) if largest <= factor * power * (1 + 1e-9)
    )


def top_of_seconds(largest: float) -> float:
    """The same for times: minutes, hours and days have other round numbers."""
    if largest <= 60 or largest > ROUND_SECONDS[-1]:
        return top_of_numbers(largest)
    return next(top for top in ROUND_SECONDS if largest <= top)


class Scale(NamedTuple):
    """An axis: where it ends, for a largest value, and how its numbers are written."""

    top: Callable[[float], float]
    form: Format


NUMBERS: Final = Scale(top_of_numbers, units.short)
SECONDS: Final = Scale(top_of_seconds, units.duration)

# --- over time ---------------------------------------------------------------------------------------------


def lines(title: str, unit: str, span: Span, series: Sequence[Series], scale: Scale) -> str:
    """A line for each series. Later ones are drawn over those before."""
    top = scale.top(max((value for one in series for value in one.values if value is not None), default=0))
    drawn = "".join(
        (f'<path class="area {one.colour}" d="{_area(one.values, top)}"/>' if one.filled else "")
        + f'<path class="line {one.colour}" d="{_steps(one.values, top)}"/>'
        for one in series
    )
    return _over_time(title, unit, span, series, scale.form, top, drawn)


def stacked(title: str, unit: str, span: Span, series: Sequence[Series], scale: Scale) -> str:
    """A bar for each bucket, of a piece for each series."""
    heights = [
        sum(value or 0 for value in bucket) for bucket in zip(*(s.values for s in series), strict=True)
    ]
    top = scale.top(max(heights, default=0))
    below = [0.0] * len(heights)
    parts: list[str] = []
    for one in series:
        bars = []
        for at, value in enumerate(one.values):
            if value:
                below[at] += value
                bars.append(f"M{at + 0.08:g} {_y(below[at], top)}h.84v{_height(value, top)}h-.84z")
        parts.append(f'<path class="bar {one.colour}" d="{"".join(bars)}"/>')
    return _over_time(title, unit, span, series, scale.form, top, "".join(parts))


def _over_time(
    title: str, unit: str, span: Span, series: Sequence[Series], form: Format, top: float, drawn: str
) -> str:
    count = len(span.buckets())
    grid = "".join(f'<path class="grid" d="M0 {_y(tick, top)}H{count}"/>' for tick in _ticks(top))
    y_labels = "".join(
        f'<span style="top:{100 - 100 * tick / top:.1f}%">{escape(form(tick))}</span>' for tick in _ticks(top)
    )
    legend = "".join(
        f'<li><i class="{one.colour}"></i>{escape(one.label)}'
        + (f" <b>{escape(one.total)}</b>" if one.total else "")
        + "</li>"
        for one in series
    )
    return (
        f'<figure class="chart"><figcaption>{escape(title)} <small>{escape(unit)}</small></figcaption>'
        f'<div class="plot"><div class="y" aria-hidden="true">{y_labels}</div>'
        f'<svg role="img" aria-label="{escape(_said(title, unit, span, series, form))}" '
        f'viewBox="0 0 {count} {HEIGHT}" preserveAspectRatio="none">'
        f"{grid}{drawn}{_hints(span, series, form)}</svg>"
        f'<div class="x" aria-hidden="true">{_x_labels(span)}</div></div>'
        f'<ul class="legend">{legend}</ul></figure>'
    )


def _hints(span: Span, series: Sequence[Series], form: Format) -> str:
    """What a pointer that rests on a bucket is told."""
    hints = []
    for at, bucket in enumerate(span.buckets()):
        told = [f"{one.label} {form(value)}" for one in series if (value := one.values[at]) is not None]
        if told:
            text = f"{_clock(bucket, span)}: {', '.join(told)}"
            hints.append(
                f'<path class="hint" d="M{at} 0h1v{HEIGHT}h-1z"><title>{escape(text)}</title></path>'
            )
    return "".join(hints)


def _said(title: str, unit: str, span: Span, series: Sequence[Series], form: Format) -> str:
    """The chart in words."""
    told = []
    for one in series:
        known = [(value, at) for at, value in enumerate(one.values) if value is not None]
        if not known:
            told.append(f"{one.label}: none")
            continue
        most, at = max(known, key=lambda it: it[0])
        where = f" at {_clock(span.buckets()[at], span)}" if most else ""
        told.append(f"{one.label}: at most {form(most)}{where}, at the end {form(known[-1][0])}")
    return f"{title}, {unit}. {'; '.join(told)}."


def _steps(values: Values, top: float) -> str:
    parts = []
    before: float | None = None
    for at, value in enumerate(values):
        if value is None:
            before = None
            continue
        parts.append(f"M{at} {_y(value, top)}h1" if before is None else f"V{_y(value, top)}h1")
        before = value
    return "".join(parts)


def _area(values: Values, top: float) -> str:
    return "".join(f"M{at} {HEIGHT}V{_y(value, top)}h1V{HEIGHT}z" for at, value in enumerate(values) if value)


def sparkline(values: Values, label: str) -> str:
    """A line without axes, for a cell of a table."""
    top = max((value for value in values if value is not None), default=0) or 1
    return (
        f'<svg class="spark" role="img" aria-label="{escape(label)}" viewBox="0 0 {len(values)} {HEIGHT}" '
        f'preserveAspectRatio="none"><path class="area c1" d="{_area(values, top)}"/>'
        f'<path class="line c1" d="{_steps(values, top)}"/></svg>'
    )


# --- bars --------------------------------------------------------------------------------------------------


def percentile_bars(title: str, rows: Sequence[Ranks]) -> str:
    """A bar for each row, on one scale of logarithms: how long half, 90 %, 99 % and all of them took."""
    ticks = log_ticks([value for row in rows for value in (row.p50, row.longest)])
    grid = "".join(f'<path class="grid" d="M{_log_x(tick, ticks)} 0v10"/>' for tick in ticks[1:-1])
    body = "".join(_percentile_row(row, grid, ticks) for row in rows)
    every = -(-len(ticks) // TICKS_X_MAX)
    labels = "".join(
        f'<span style="left:{_log_x(tick, ticks) / WIDTH:.1%}">{escape(units.duration(tick))}</span>'
        for tick in ticks[::every]
    )
    legend = "".join(
        f'<li><i class="{name}"></i>{text}</li>'
        for name, text in (("p50", "half"), ("p90", "90 %"), ("p99", "99 %"), ("pmax", "all"))
    )
    return (
        f'<figure class="chart ranks"><figcaption>{escape(title)} <small>logarithmic scale</small>'
        "</figcaption>"
        f'<ul class="rows">{body}</ul><div class="x" aria-hidden="true">{labels}</div>'
        f'<ul class="legend">{legend}</ul></figure>'
    )


def _percentile_row(row: Ranks, grid: str, ticks: Sequence[float]) -> str:
    bars = "".join(
        f'<rect class="{name}" y="{y}" height="{height}" width="{_log_x(value, ticks)}"/>'
        for name, value, y, height in (
            ("pmax", row.longest, 4.4, 1.2),
            ("p99", row.p99, 2.5, 5),
            ("p90", row.p90, 1.5, 7),
            ("p50", row.p50, 0.5, 9),
        )
    )
    text = (
        f"half {units.duration(row.p50)}, 90 % {units.duration(row.p90)}, 99 % {units.duration(row.p99)}, "
        f"longest {units.duration(row.longest)}"
    )
    note = f" <small>{escape(row.note)}</small>" if row.note else ""
    return (
        f'<li><span class="name">{escape(row.label)}{note}</span>'
        f'<svg aria-hidden="true" viewBox="0 0 {WIDTH} 10" preserveAspectRatio="none">{grid}{bars}</svg>'
        f'<span class="said">{escape(text)}</span></li>'
    )


def share_bars(title: str, unit: str, rows: Sequence[tuple[str, Sequence[Series]]]) -> str:
    """A bar for each row, in pieces; all on the same scale. Each series has one value here."""
    top = max((sum(one.values[0] or 0 for one in pieces) for _, pieces in rows), default=0) or 1
    body = []
    for label, pieces in rows:
        at, bars = 0.0, []
        for one in pieces:
            width = WIDTH * (one.values[0] or 0) / top
            bars.append(f'<rect class="bar {one.colour}" x="{at:.1f}" width="{width:.1f}" height="10"/>')
            at += width
        said = ", ".join(f"{units.count(one.values[0])} {one.label}" for one in pieces if one.values[0])
        body.append(
            f'<li><span class="name">{escape(label)}</span>'
            f'<svg aria-hidden="true" viewBox="0 0 {WIDTH} 10" preserveAspectRatio="none">'
            f"{''.join(bars)}</svg>"
            f'<span class="said">{escape(said)}</span></li>'
        )
    return (
        f'<figure class="chart shares"><figcaption>{escape(title)} <small>{escape(unit)}</small></figcaption>'
        f'<ul class="rows">{"".join(body)}</ul></figure>'
    )


# --- places ------------------------------------------------------------------------------------------------


def log_ticks(values: Sequence[float]) -> list[float]:
    """The ticks around some values, two at least; what is 0 lies below the first."""
    known = [value for value in values if value > 0] or [1.0]
    low = max(bisect_right(LOG_TICKS, min(known)) - 1, 0)
    high = min(max(bisect_left(LOG_TICKS, max(known)), 1), len(LOG_TICKS) - 1)
    return list(LOG_TICKS[min(low, high - 1) : high + 1])


def _log_x(value: float, ticks: Sequence[float]) -> float:
    if value <= ticks[0]:
        return 0
    return round(WIDTH * min(math.log(value / ticks[0]) / math.log(ticks[-1] / ticks[0]), 1), 1)


def _ticks(top: float) -> list[float]:
    # Half of an odd number of messages is no place for a label.
    return [0, top] if top in (1, 3, 5) else [0, top / 2, top]


def _y(value: float, top: float) -> str:
    return f"{HEIGHT * (1 - value / top):.2f}".rstrip("0").rstrip(".")


def _height(value: float, top: float) -> str:
    return f"{HEIGHT * value / top:.2f}".rstrip("0").rstrip(".")


def _x_labels(span: Span) -> str:
    buckets = span.buckets()
    start, end = buckets[0], buckets[-1] + span.bucket_us
    seconds = next(
        (tick for tick in TICK_SECONDS if (end - start) / (tick * SECOND_US) <= TICKS_X_MAX), TICK_SECONDS[-1]
    )
    step = seconds * SECOND_US
    first = -(-start // step) * step
    return "".join(
        f'<span style="left:{(at - start) / (end - start):.1%}">'
        f"{escape(_time_of(datetime_of(at), seconds))}</span>"
        for at in range(first, end, step)
    )


def _time_of(time: datetime, step_seconds: float) -> str:
    """As exact as steps of that length make sense."""
    if step_seconds < 60:
        return f"{time:%H:%M:%S}"
    return f"{time:%H:%M}" if step_seconds < 86_400 else f"{time.day} {time:%b}"


def _clock(bucket: int, span: Span) -> str:
    time = datetime_of(bucket)
    text = _time_of(time, span.bucket_us / SECOND_US)
    return text if span.seconds < 86_400 or span.bucket_us >= 86_400 * SECOND_US else f"{time:%d %b} {text}"
