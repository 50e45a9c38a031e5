"""The table of what can be wrong, cell by cell: a state is entered at its bound and not before, stays while
figures hover between the two bounds, is left after its time, and does not flicker. Time is a number."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.common.health import (
    BAD,
    BY_STATE,
    LEVELS,
    PATIENCE_SECONDS,
    RULES,
    STATES,
    WARN,
    Rule,
    rules,
)
from penstock.common.health_figures import BrokerFigures, QueueFigures, ReaderFigures
from penstock.common.health_phases import Phase, look, step, visible

GIB = 1 << 30


class Case(NamedTuple):
    """Figures of one rule: it is so; nearly so; so no more, but it stays; it is well."""

    so: Any
    nearly: Any
    hovers: Any  # None: what is not so any more is well
    well: Any
    worse: Any = None  # a warning that is bad


Q, R, B = QueueFigures, ReaderFigures, BrokerFigures
WORKS = Q(ready=5, held=10, consumers=2, unsettled_seconds=1)
DIES = Q(died=10, ended=1000, reasons={"rejected": 10})
GROWS = Q(ready=2000, consumers=1, grown=200, grown_late=40, rate_in=2, rate_out=1)
SLOW = B(syncs=20, sync_seconds=0.1)

CASES = {
    "failed": Case(B(failed="disk"), B(), None, B()),
    "disk-full": Case(B(full=True), B(disk_bytes_free=0, disk_bytes_reserve=1), None, B()),
    "not-ready": Case(B(ready=False, reason="it stops"), B(), None, B()),
    "damaged": Case(B(damage=1), B(), None, B()),
    "full": Case(
        Q(bytes=950, bytes_max=1000), Q(bytes=949, bytes_max=1000), Q(bytes=900, bytes_max=1000), WORKS
    ),
    "blocked": Case(
        Q(blocked=1, blocked_seconds=30, held=3),
        Q(blocked=1, blocked_seconds=29.9, held=3),
        Q(blocked=1, blocked_seconds=1, held=3),
        WORKS,
    ),
    "stalled": Case(
        Q(held=1, unsettled_seconds=120),
        Q(held=1, unsettled_seconds=119.9),
        Q(held=1, unsettled_seconds=60),
        WORKS,
    ),
    "reader-capped": Case(R(lag=5, capped=True), R(lag=10**9), None, R()),
    "archive-failing": Case(B(archive_error="no bucket"), B(), None, B()),
    "node-offline": Case(
        B(nodes=3, nodes_offline=1), B(nodes=3), None, B(nodes=3), B(nodes=3, nodes_offline=2)
    ),
    "disk-low": Case(
        B(disk_bytes_free=GIB - 1, disk_bytes_reserve=GIB),
        B(disk_bytes_free=GIB, disk_bytes_reserve=GIB),
        B(disk_bytes_free=GIB + 1, disk_bytes_reserve=GIB),
        B(disk_bytes_free=2 * GIB, disk_bytes_reserve=GIB),
    ),
    "memory": Case(
        B(memory_bytes=80, memory_bytes_max=100),
        B(memory_bytes=79, memory_bytes_max=100),
        B(memory_bytes=70, memory_bytes_max=100),
        B(memory_bytes=69, memory_bytes_max=100),
        B(memory_bytes=95, memory_bytes_max=100),
    ),
    "slow-syncs": Case(
        SLOW,
        replace(SLOW, sync_seconds=0.099),
        replace(SLOW, sync_seconds=0.06),
        B(syncs=20, sync_seconds=0.01),
    ),
    "cluster-check": Case(B(checks=("sync: off.",)), B(), None, B()),
    "dying": Case(DIES, replace(DIES, died=9), replace(DIES, died=5), Q(ended=1000), replace(DIES, died=500)),
    "no-consumers": Case(
        Q(ready=1, undelivered_seconds=120),
        Q(ready=1, undelivered_seconds=119.9),
        Q(ready=1, undelivered_seconds=60),
        Q(ready=1, consumers=1, undelivered_seconds=500),
    ),
    "paused": Case(Q(paused=True, ready=1), Q(paused=True), None, Q(ready=1)),
    "growing": Case(
        GROWS,
        replace(GROWS, grown=199),
        replace(GROWS, ready=50, grown=1, grown_late=-5),
        replace(GROWS, grown=0, grown_late=0),
        replace(GROWS, full_seconds=3599.0),
    ),
    "reader-behind": Case(
        R(lag=1, unmoved_seconds=900),
        R(lag=1, unmoved_seconds=899),
        R(lag=1, unmoved_seconds=450),
        R(lag=1, unmoved_seconds=2),
    ),
    "reader-ended": Case(R(lag=1, holds=False), R(lag=0, holds=False), None, R(lag=1)),
}

MORE_THAT_IS_SO: dict[str, list[Any]] = {
    "full": [Q(bytes_max=1000, bytes=1, senders_wait=True)],
    "slow-syncs": [B(syncs=20, sync_seconds=0.025, syncs_before=200, sync_usual_seconds=0.005)],
    "stalled": [Q(held=1, ready=10, unsettled_seconds=1200, usual_seconds=400)],
    "reader-behind": [R(lag=10_000, grown=2000, grown_late=1)],
    "dying": [Q(died=30, died_usually=10, ended=3000)],
}
MORE_THAT_IS_WELL: dict[str, list[Any]] = {
    "full": [Q(bytes=10**12), Q(bytes=10**12, senders_wait=True)],  # no bound of its own
    "stalled": [Q(unsettled_seconds=9999), Q(held=1, unsettled_seconds=1100, usual_seconds=400)],
    "slow-syncs": [
        B(syncs=19, sync_seconds=1.0),
        B(syncs=20, sync_seconds=0.05, syncs_before=199, sync_usual_seconds=0.001),  # not known what is usual
        B(syncs=20, sync_seconds=0.024, syncs_before=200, sync_usual_seconds=0.001),
        B(syncs=20, sync_seconds=0.09, syncs_before=200, sync_usual_seconds=0.02),
    ],
    "dying": [
        Q(died=29, died_usually=10, ended=100),  # as usual
        Q(died=10, ended=1001),  # one in a hundred
    ],
    "no-consumers": [
        Q(ready=1, undelivered_seconds=9999, is_log=True),
        Q(ready=1, undelivered_seconds=9999, paused=True),
        Q(ready=1, undelivered_seconds=9999, held=1),
        Q(undelivered_seconds=9999),
    ],
    "growing": [
        replace(GROWS, consumers=0),
        replace(GROWS, paused=True),
        replace(GROWS, ready=99, grown=99),
        replace(GROWS, grown_late=39),  # a burst that is over
    ],
    "reader-behind": [
        R(lag=0, unmoved_seconds=10**6),
        R(lag=1, unmoved_seconds=3000, usual_seconds=1001),  # a job for every quarter of an hour
        R(lag=9999, grown=9999, grown_late=5000),
        R(lag=10_000, grown=1999, grown_late=1),
    ],
    "memory": [B(memory_bytes=10**9)],
}


def run(rule: Rule, phase: Phase | None, figures: Any, begin: float, seconds: float) -> Phase | None:
    """Look every second, and at the end."""
    at = begin
    while at < begin + seconds:
        phase = step(rule, phase, figures, at)
        at += 1
    return step(rule, phase, figures, begin + seconds)


def entered(rule: Rule, figures: Any) -> Phase:
    phase = run(rule, None, figures, 0, rule.enter_seconds)
    assert phase is not None
    assert phase.active
    return phase


def test_every_state_has_its_case() -> None:
    assert set(CASES) == set(STATES)
    assert len(STATES) == len(RULES) == len(set(STATES))


@pytest.mark.parametrize("state", STATES)
def test_it_is_entered_at_its_bound_after_its_time(state: str) -> None:
    rule = BY_STATE[state]
    for figures in (CASES[state].so, *MORE_THAT_IS_SO.get(state, ())):
        if rule.enter_seconds:
            early = run(rule, None, figures, 0, rule.enter_seconds - 0.1)
            assert early is not None
            assert not early.active
        phase = entered(rule, figures)
        assert phase.is_bad == (rule.level == BAD)


@pytest.mark.parametrize("state", STATES)
def test_it_is_not_entered_just_below(state: str) -> None:
    rule = BY_STATE[state]
    for figures in (CASES[state].nearly, CASES[state].well, *MORE_THAT_IS_WELL.get(state, ())):
        assert run(rule, None, figures, 0, 1000) is None


@pytest.mark.parametrize("state", STATES)
def test_a_break_begins_the_time_anew(state: str) -> None:
    rule, case = BY_STATE[state], CASES[state]
    if not rule.enter_seconds:
        return
    phase = run(rule, None, case.so, 0, rule.enter_seconds - 1)
    phase = step(rule, phase, case.nearly, rule.enter_seconds - 0.5)
    phase = step(rule, phase, case.so, rule.enter_seconds)
    assert phase is not None
    assert not phase.active


@pytest.mark.parametrize("state", STATES)
def test_it_stays_while_it_hovers(state: str) -> None:
    rule, case = BY_STATE[state], CASES[state]
    figures = case.so if case.hovers is None else case.hovers
    if case.hovers is not None:
        assert run(rule, None, figures, 0, 1000) is None, "what hovers would be entered"
    began = entered(rule, case.so).began
    phase = run(rule, entered(rule, case.so), figures, rule.enter_seconds, 3600)
    assert phase is not None
    assert phase.active
    assert phase.began == began, "since when it is so has moved"


@pytest.mark.parametrize("state", STATES)
def test_it_is_left_after_its_time(state: str) -> None:
    rule, case = BY_STATE[state], CASES[state]
    phase: Phase | None = entered(rule, case.so)
    if rule.leave_seconds:
        phase = run(rule, phase, case.well, 1000, rule.leave_seconds - 0.1)
        assert phase is not None
        assert phase.active
        assert phase.figures == case.so, "it is told with the figures of when it is well"
    assert step(rule, phase, case.well, 1000 + rule.leave_seconds) is None


@pytest.mark.parametrize("state", [rule.state for rule in RULES if rule.leave_seconds])
def test_it_does_not_flicker(state: str) -> None:
    rule, case = BY_STATE[state], CASES[state]
    phase: Phase | None = entered(rule, case.so)
    seen = []
    for turn in range(100):
        figures = case.so if turn % 2 else case.well
        phase = step(rule, phase, figures, 1000 + turn * rule.leave_seconds * 0.4)
        seen.append(phase is not None and phase.active)
    assert all(seen)


@pytest.mark.parametrize("state", [state for state, case in CASES.items() if case.worse is not None])
def test_it_gets_worse_and_not_better(state: str) -> None:
    rule, case = BY_STATE[state], CASES[state]
    assert rule.level == WARN
    assert entered(rule, case.worse).is_bad
    phase = step(rule, entered(rule, case.so), case.worse, 1000)
    assert phase is not None
    assert phase.is_bad
    phase = step(rule, phase, case.so, 1001)
    assert phase is not None
    assert phase.is_bad


@pytest.mark.parametrize("state", STATES)
def test_it_says_why_and_what_to_do(state: str) -> None:
    rule = BY_STATE[state]
    for figures in (CASES[state].so, CASES[state].worse or CASES[state].so):
        why = rule.why(figures)
        assert why[0].isupper() or why[0].isdigit() or why.startswith("disk")
        assert why.endswith(".")
    assert rule.do.endswith(".")
    assert rule.scope in ("queue", "reader", "broker")
    assert rule.level in LEVELS
    assert set(rule.shown) <= set(type(CASES[state].so).__dataclass_fields__)


def test_it_says_since_when_it_is_so_where_that_is_known() -> None:
    rule = BY_STATE["stalled"]
    phase = step(rule, None, Q(held=1, unsettled_seconds=130), 1000.0)
    assert phase is not None
    assert phase.began == 870.0


def test_a_consequence_is_not_told_beside_its_cause() -> None:
    table = [rule for rule in RULES if rule.scope == "queue"]
    stuck = Q(held=200, ready=5000, consumers=1, unsettled_seconds=840, grown=2000, grown_late=1000)
    phases: dict[str, Phase] = {}
    for at in range(0, 200, 2):
        phases = look(table, phases, stuck, at)
    assert set(phases) == {"stalled", "growing"}
    assert visible(phases) == ["stalled"]
    blocked = replace(stuck, blocked=1, blocked_seconds=840)
    assert visible(look(table, phases, blocked, 200)) == ["blocked"]
    for rule in RULES:
        assert set(rule.hides) <= {it.state for it in RULES if it.scope == rule.scope} - {rule.state}


@pytest.mark.parametrize(
    "figures",
    [
        Q(),
        WORKS,
        Q(ready=10**6, held=1000, consumers=50, rate_in=10**5, rate_out=10**5, unsettled_seconds=2),
        Q(held=1, consumers=1, unsettled_seconds=100),
        R(lag=10**6, unmoved_seconds=10),
        B(syncs=6000, sync_seconds=0.004, syncs_before=10**6, sync_usual_seconds=0.003),
    ],
    ids=["idle", "busy", "very busy", "a long job", "a reader that reads", "a broker at work"],
)
def test_nothing_is_said_of_what_is_well(figures: Any) -> None:
    scope = {Q: "queue", R: "reader", B: "broker"}[type(figures)]
    phases: dict[str, Phase] = {}
    for at in range(0, 7200, 2):
        phases = look([it for it in RULES if it.scope == scope], phases, figures, at)
        assert not phases


def test_every_time_goes_by_the_patience() -> None:
    for quick, usual in zip(rules(PATIENCE_SECONDS / 100), RULES, strict=True):
        assert quick.enter_seconds * 100 == pytest.approx(usual.enter_seconds)
        assert quick.leave_seconds * 100 == pytest.approx(usual.leave_seconds)
    quick_stall = next(it for it in rules(2.0) if it.state == "stalled")
    assert quick_stall.enter(Q(held=1, unsettled_seconds=2))
    assert not quick_stall.enter(Q(held=1, unsettled_seconds=1.9))


def test_the_most_urgent_come_first() -> None:
    levels = [LEVELS.index(rule.level) for rule in RULES]
    assert all(one <= two for one, two in pairwise(levels))


@pytest.mark.parametrize("scope", ["queue", "reader", "broker"])
def test_the_documentation_says_the_same(scope: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "health.md").read_text(encoding="utf-8")
    (table,) = re.findall(rf"<!-- {scope} -->\n(.*?)<!-- end -->", text, re.DOTALL)
    told = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    assert told == [
        [
            f"`{rule.state}`",
            rule.level + (" or bad" if rule.is_bad else ""),
            rule.enters,
            rule.leaves,
            rule.do,
        ]
        for rule in RULES
        if rule.scope == scope
    ]
