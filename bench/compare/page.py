"""docs/benchmarks.md: the part between two marks is made from a run, all around it is written by people."""

from pathlib import Path

from bench.compare import chart
from bench.compare.results import Results
from bench.compare.subjects import Setting
from bench.compare.tables import all_tables, as_markdown
from bench.compare.works import Scale

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = "benchmarks.md"
CHART = "images/bench-peers.svg"

FROM = "<!-- What follows is written by `make bench-peers ARGS=--write-docs`: do not edit it here. -->"
TO = "<!-- What `make bench-peers ARGS=--write-docs` writes ends here. -->"


class MarksMissing(ValueError):
    """The page does not say where the figures go."""


def made(
    results: Results,
    settings: tuple[Setting, ...],
    scale: Scale,
    facts: dict[str, str | int],
    versions: dict[str, str],
) -> str:
    """The part of the page that a run gives."""
    programs = " · ".join(f"{program} {version}" for program, version in versions.items())
    lines = [
        f"{facts['cores']} cores ({facts['cpu']}), {int(facts['memory_mib']) / 1024:.0f} GiB, "
        f"{facts['filesystem']}, {facts['kernel']}, {facts['python']}; {facts['date']}; load when it began: "
        f"{facts['load']}. {programs}. Rounds: {scale.rounds}.",
        "",
        f"![Penstock and its peers]({CHART})",
        "",
        "| subject | started as | a confirmation means | durable |",
        "|---|---|---|---|",
    ]
    for setting in settings:
        for subject in setting.subjects:
            durable = "yes" if subject.is_durable else "no"
            lines.append(f"| {subject.name} | `{setting.command}` | {subject.confirmed} | {durable} |")
    lines += [
        "",
        f"Backlog: {scale.backlog:,} messages of 100 B. Idle connections: {scale.connections:,}. "
        f"Queues: {scale.queues:,}, one message each.",
        "",
    ]
    lines.append("\n\n".join(as_markdown(table) for table in all_tables(results, settings) if table.rows))
    if results.left_out:
        lines += ["", "### Left out", "", *(f"* {line}" for line in results.left_out)]
    return "\n".join(lines)


def replaced(page: str, part: str) -> str:
    """The page with this part between the marks."""
    before, found_from, rest = page.partition(FROM)
    _, found_to, after = rest.partition(TO)
    if not (found_from and found_to):
        raise MarksMissing(f"{PAGE} needs the lines {FROM!r} and {TO!r}, in this order")
    return f"{before}{FROM}\n\n{part}\n\n{TO}{after}"


def check(docs: Path) -> None:
    """Fails where `write` would: before the run, and not after it."""
    replaced((docs / PAGE).read_text(encoding="utf-8"), "")


def write(docs: Path, part: str, results: Results, settings: tuple[Setting, ...]) -> None:
    """Page and chart, into the folder of the docs."""
    page = replaced((docs / PAGE).read_text(encoding="utf-8"), part)
    picture = docs / CHART
    picture.parent.mkdir(exist_ok=True)
    picture.write_text(chart.svg(results, settings), encoding="utf-8")
    (docs / PAGE).write_text(page, encoding="utf-8")
