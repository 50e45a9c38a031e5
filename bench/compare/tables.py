"""The figures as tables: the same rows for the terminal and for the page.

A cell is "msg/s · CPU µs · ratio", where the ratio is to the best peer that syncs before it confirms, in
the same column. "–" stands where nothing was measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.__main__ import number
from bench.compare.goals import ANY_WIRE, DURABLE, Goal, best, peers_of, rate, verdicts
from bench.compare.results import Results
from bench.compare.subjects import Setting, Subject
from bench.compare.works import RATE_PER_SECOND, SIZES

NOTHING = "–"

MANY = "32 producers and 32 consumers, 16 messages in flight each"
SINGLE = "One producer, 32 consumers that have one message at a time"


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def all_tables(results: Results, settings: tuple[Setting, ...]) -> list[Table]:
    subjects = [subject for setting in settings for subject in setting.subjects]
    return [
        *(_rates(kind, results, settings, subjects) for kind in ("end to end", "publish", "drain")),
        _work(MANY, "32+32 connections", results, settings, subjects),
        _work(SINGLE, "one at a time, 32 consumers", results, settings, subjects),
        _paced(results, subjects),
        _scenes(results, subjects),
        _costs(results),
        _goals(results, settings),
    ]


def _rates(kind: str, results: Results, settings: tuple[Setting, ...], subjects: list[Subject]) -> Table:
    works = [f"{kind} {size}" for size in SIZES.values()]
    title = f"{kind.capitalize()}: msg/s · CPU µs a message · ratio to the best durable peer"
    rows = [
        (subject.name, *(_rate_cell(results, settings, subject, work) for work in works))
        for subject in subjects
    ]
    return Table(title, ("", *SIZES.values()), _with_figures(rows))


def _work(
    title: str, work: str, results: Results, settings: tuple[Setting, ...], subjects: list[Subject]
) -> Table:
    rows = [(subject.name, _rate_cell(results, settings, subject, work)) for subject in subjects]
    return Table(title, ("", "msg/s · CPU µs · ratio"), _with_figures(rows))


def _rate_cell(results: Results, settings: tuple[Setting, ...], subject: Subject, work: str) -> str:
    figure = results.figure(subject.name, work)
    if figure is None:
        return NOTHING
    cell = f"{figure.per_second:,.0f} · {number(figure.cpu_us)}"
    most, _ = best(rate(work), results, peers_of(settings, DURABLE))
    return f"{cell} · {number(figure.per_second / most)}×" if most else cell


def _paced(results: Results, subjects: list[Subject]) -> Table:
    rows = []
    for subject in subjects:
        figure = results.figure(subject.name, "paced")
        if figure is None or figure.p50_us is None:
            continue
        marks = (figure.p50_us, figure.p99_us, figure.p999_us, figure.delay_p99_us, figure.cpu_us)
        rows.append((subject.name, *(NOTHING if mark is None else number(mark) for mark in marks)))
    title = f"{RATE_PER_SECOND:,} messages a second: µs from when a message was due until it arrived"
    return Table(title, ("", "p50", "p99", "p99.9", "generator's own delay, p99", "CPU µs a message"), rows)


def _scenes(results: Results, subjects: list[Subject]) -> Table:
    columns = {
        "idle MB": "idle MB",
        "backlog MB": "backlog, MB above idle",
        "recovery s": "recovery s",
        "connections MB": "connections MB",
        "connections s": "connections s",
        "queues MB": "queues MB",
        "queue ms": "ms a new queue",
    }
    rows = [
        (
            subject.name,
            *(
                NOTHING if (value := results.scenes.get((subject.name, name))) is None else number(value)
                for name in columns
            ),
        )
        for subject in subjects
    ]
    title = "A backlog, a crash, idle connections, many queues"
    return Table(title, ("", *columns.values()), _with_figures(rows))


def _costs(results: Results) -> Table:
    rows = [
        (
            f"{cost.subject}, {cost.work}",
            NOTHING if cost.system_calls is None else number(cost.system_calls),
            cost.most_frequent,
            NOTHING if cost.allocations is None else number(cost.allocations),
        )
        for cost in results.costs
    ]
    header = ("", "system calls a message", "the most frequent", "allocations a message")
    return Table("What a message costs Penstock", header, rows)


def _goals(results: Results, settings: tuple[Setting, ...]) -> Table:
    rows = []
    for verdict in verdicts(results, settings):
        goal = verdict.goal
        sign = "≥" if goal.measure.is_more_better else "≤"
        rows.append(
            (
                goal_name(goal),
                _or_nothing(verdict.ours),
                f"{_or_nothing(verdict.best)} {verdict.best_name}".strip(),
                f"{sign} {goal.bound:g}× the {goal.against}",
                NOTHING if verdict.ratio is None else f"{number(verdict.ratio)}×",
                verdict.word,
            )
        )
    return Table("Goals", ("", "Penstock", "the peer", "goal", "ratio", ""), rows)


def goal_name(goal: Goal) -> str:
    variant = f", {goal.variant}" if goal.variant else ""
    wire = goal.wire if goal.wire == ANY_WIRE else goal.wire.upper()
    return f"{wire}{variant}, {goal.measure.name}"


def _or_nothing(value: float | None) -> str:
    return NOTHING if value is None else number(value)


def _with_figures(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [row for row in rows if any(cell != NOTHING for cell in row[1:])]


def as_text(table: Table) -> str:
    """For a terminal: columns side by side."""
    lines = [table.header, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.header))]
    shown = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join((f"-- {table.title}", *shown))


def as_markdown(table: Table) -> str:
    """For the page."""
    lines = [table.header, tuple("---" for _ in table.header), *table.rows]
    return "\n".join((f"### {table.title}", "", *("| " + " | ".join(line) + " |" for line in lines)))
