"""Findings: what stands out in a report, in sentences. A rule is a function, and `RULES` is all of them.

A rule looks at the figures and says what somebody should look at, with the numbers, and no more than that:
it does not know what is normal here. Bounds keep it quiet about a handful of messages. What a broker would
tell while it happens has the same state here as there, and the same advice (`common/health.py`).
"""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from penstock.common import units
from penstock.common.health import BY_STATE
from penstock.report.figures import Figures, failed_of

OF_A_KIND_MAX: Final = 3
"""Of each rule, the worst are told."""

FEW: Final = 20
"""Fewer deliveries than this say nothing about a consumer."""

FAILED_SHARE: Final = 0.1
SLOWER_TIMES: Final = 4
GROWN_SHARE: Final = 0.1
GROWN_MIN: Final = 50
WAITED_SECONDS: Final = 60


class Finding(NamedTuple):
    """`weight` orders those of one rule; `queue` is where to look; `state` as `GET /v1/health` has it."""

    weight: float
    queue: str
    text: str
    state: str = ""

    @property
    def do(self) -> str:
        """What helps; empty: that depends."""
        return BY_STATE[self.state].do if self.state else ""


Rule = Callable[[Figures], Iterator[Finding]]


def died(figures: Figures) -> Iterator[Finding]:
    for queue in figures.queues:
        dead = queue.totals["dead"]
        if dead:
            yield Finding(
                dead,
                queue.name,
                f"{units.counted(dead, 'message')} died: {units.listed(queue.died())}.",
                "dying",
            )


def grew(figures: Figures) -> Iterator[Finding]:
    for queue in figures.queues:
        accepted = queue.totals["accepted"]
        if queue.grown >= max(GROWN_MIN, GROWN_SHARE * accepted):
            yield Finding(
                queue.grown,
                queue.name,
                f"grew by {units.counted(queue.grown, 'message')}, to {queue.totals['outstanding_end']:,}; "
                f"{accepted:,} came.",
                "growing",
            )


def nobody_came(figures: Figures) -> Iterator[Finding]:
    for queue in figures.queues:
        accepted = queue.totals["accepted"]
        if accepted and not queue.deliveries:
            yield Finding(
                accepted,
                queue.name,
                f"no delivery ended, though {units.counted(accepted, 'message')} came.",
                "no-consumers",
            )


def waited(figures: Figures) -> Iterator[Finding]:
    for queue in figures.queues:
        if queue.waiting is not None and queue.waiting["p99_seconds"] >= WAITED_SECONDS:
            yield Finding(
                queue.waiting["p99_seconds"],
                queue.name,
                f"1 of 100 messages waited {units.duration(queue.waiting['p99_seconds'])} or longer "
                f"before anybody took it, half of them {units.duration(queue.waiting['p50_seconds'])}.",
            )


def failing(figures: Figures) -> Iterator[Finding]:
    for row in figures.hosts:
        failed = failed_of(row)
        if row["deliveries"] >= FEW and failed >= FAILED_SHARE * row["deliveries"]:
            yield Finding(
                failed,
                row["queue"],
                f"consumers on {row['host']} ({row['protocol']}) failed with {failed:,} of "
                f"{units.counted(row['deliveries'], 'delivery', 'deliveries')} "
                f"({units.percent(failed, row['deliveries'])}).",
            )


def slow(figures: Figures) -> Iterator[Finding]:
    for queue in figures.queues:
        known = [row for row in queue.hosts if row["deliveries"] >= FEW]
        fastest = min((row["p50_seconds"] for row in known), default=0.0)
        for row in known:
            times = row["p50_seconds"] / fastest if fastest else 0.0
            if times >= SLOWER_TIMES:
                yield Finding(
                    times,
                    queue.name,
                    f"consumers on {row['host']} ({row['protocol']}) take {units.short(times)} times as "
                    f"long as the fastest: half of their deliveries {units.duration(row['p50_seconds'])} "
                    "or longer.",
                )


def incomplete(figures: Figures) -> Iterator[Finding]:
    for queue in figures.queues:
        missing = queue.coverage["missing_events"]
        if missing:
            yield Finding(missing, queue.name, f"{units.counted(missing, 'event')} could not be read.")


RULES: Final[tuple[Rule, ...]] = (incomplete, died, failing, slow, waited, grew, nobody_came)


def findings_of(figures: Figures) -> list[Finding]:
    """What stands out, in the order of the rules."""
    found: list[Finding] = []
    for rule in RULES:
        found += sorted(rule(figures), key=lambda finding: -finding.weight)[:OF_A_KIND_MAX]
    return found
