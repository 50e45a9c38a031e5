"""The figures as a picture: bars, in an SVG made here, so that nothing needs to be installed for it.

One panel for each measure, one bar for each subject that has it, in the order of the figures. Colours say
who it is: Penstock, a peer that syncs before it confirms, a peer that does not. Text has the figure, so
colour is never alone. The picture has a ground of its own, and two sets of colours: it is dark where the
page is.
"""

from dataclasses import dataclass
from xml.sax.saxutils import escape

from bench.__main__ import number
from bench.compare.goals import Measure, cpu, p99, rate
from bench.compare.results import Results
from bench.compare.subjects import PENSTOCK, Setting

WIDTH = 860
LABEL_WIDTH = 290
VALUE_WIDTH = 110
BAR_HEIGHT = 18
ROW_HEIGHT = 24
PANEL_HEAD = 44
LEGEND_HEIGHT = 40

KINDS = {"Penstock": "ours", "syncs, then confirms": "durable", "confirms before it syncs": "other"}
"""Who it is, and the class of its bars."""

STYLE = """<style>
.ground { fill: #ffffff } text { fill: #15202b }
.ours { fill: #0f766e } .durable { fill: #4a6fa5 } .other { fill: #b0b7c3 }
@media (prefers-color-scheme: dark) {
.ground { fill: #0e1418 } text { fill: #e6ecf0 }
.ours { fill: #2dd4bf } .durable { fill: #7f9fd6 } .other { fill: #56636f }
}
</style>"""
"""The colours of the dashboard."""

PANELS: tuple[tuple[str, Measure], ...] = (
    ("End to end, 100 B: messages a second (more is better)", rate("end to end 100 B")),
    ("End to end, 100 B: server CPU, µs a message (less is better)", cpu("end to end 100 B")),
    ("2,000 messages a second: p99 latency, µs (less is better)", p99("paced")),
)


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    value: float
    kind: str


def bars(measure: Measure, results: Results, settings: tuple[Setting, ...]) -> list[Bar]:
    """The best one first."""
    kinds = list(KINDS)
    found = []
    for setting in settings:
        for subject in setting.subjects:
            value = measure.of(results, subject.name)
            if value is not None:
                kind = kinds[0] if setting.program == PENSTOCK else kinds[1 if subject.is_durable else 2]
                found.append(Bar(subject.name, value, kind))
    return sorted(found, key=lambda bar: bar.value, reverse=measure.is_more_better)


def svg(results: Results, settings: tuple[Setting, ...]) -> str:
    """The whole picture."""
    parts = [_legend()]
    top = LEGEND_HEIGHT
    for title, measure in PANELS:
        panel = bars(measure, results, settings)
        parts.append(_text(12, top + 26, title, weight="bold"))
        top += PANEL_HEAD
        for bar in panel:
            parts.append(_bar(bar, top, max(bar.value for bar in panel)))
            top += ROW_HEIGHT
    height = top + 12
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" font-family="sans-serif" font-size="13" role="img" '
            'aria-label="Penstock and its peers, side by side">',
            STYLE,
            f'<rect width="{WIDTH}" height="{height}" class="ground"/>',
            *parts,
            "</svg>\n",
        )
    )


def _legend() -> str:
    parts, left = [], 12
    for kind, name in KINDS.items():
        parts.append(f'<rect x="{left}" y="14" width="14" height="14" class="{name}"/>')
        parts.append(_text(left + 20, 26, kind))
        left += 200
    return "\n".join(parts)


def _bar(bar: Bar, top: int, most: float) -> str:
    length = (WIDTH - LABEL_WIDTH - VALUE_WIDTH) * bar.value / most
    right = LABEL_WIDTH + length
    return "\n".join(
        (
            _text(LABEL_WIDTH - 8, top + 14, bar.name, anchor="end"),
            f'<rect x="{LABEL_WIDTH}" y="{top}" width="{max(length, 1):.1f}" height="{BAR_HEIGHT}" '
            f'class="{KINDS[bar.kind]}"/>',
            _text(right + 6, top + 14, number(bar.value)),
        )
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
    )
