"""What should be reached, as ratios to the peers of the same run, and whether it is.

A goal compares one figure of Penstock's with the best one that a group of peers has: those that sync before
they confirm, those that do not, or all. A line is "not measured" where one side is missing, which is never
"reached".
"""

from collections.abc import Callable
from dataclasses import dataclass

from bench.compare.results import Results
from bench.compare.subjects import PENSTOCK, Setting, Subject

Value = Callable[[Results, str], float | None]


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure, and which way is better."""

    name: str
    is_more_better: bool
    of: Value


def rate(work: str) -> Measure:
    return Measure(
        f"{work}: msg/s", True, lambda results, subject: _figure(results, subject, work, "per_second")
    )


def cpu(work: str) -> Measure:
    return Measure(
        f"{work}: CPU a message", False, lambda results, subject: _figure(results, subject, work, "cpu_us")
    )


def p99(work: str) -> Measure:
    return Measure(f"{work}: p99", False, lambda results, subject: _figure(results, subject, work, "p99_us"))


def scene(name: str, title: str) -> Measure:
    return Measure(title, False, lambda results, subject: results.scenes.get((subject, name)))


def _figure(results: Results, subject: str, work: str, field: str) -> float | None:
    figure = results.figure(subject, work)
    return None if figure is None else getattr(figure, field)


DURABLE = "best that syncs first"
RELAXED = "best that does not"
ANYBODY = "best of all"

GROUPS: dict[str, Callable[[Subject], bool]] = {
    DURABLE: lambda subject: subject.is_durable,
    RELAXED: lambda subject: not subject.is_durable,
    ANYBODY: lambda subject: True,
}


@dataclass(frozen=True, slots=True)
class Goal:
    """`bound` is the ratio to be reached: at least, or at most where less is better."""

    wire: str
    variant: str
    measure: Measure
    against: str
    bound: float


@dataclass(frozen=True, slots=True)
class Verdict:
    goal: Goal
    ours: float | None
    best: float | None
    best_name: str
    ratio: float | None

    @property
    def word(self) -> str:
        if self.ratio is None:
            return "not measured"
        is_met = (
            self.ratio >= self.goal.bound
            if self.goal.measure.is_more_better
            else self.ratio <= self.goal.bound
        )
        return "reached" if is_met else "not reached"


ANY_WIRE = "any wire"
END_TO_END = "end to end 100 B"
BACKLOG = scene("backlog MB", "backlog: resident memory above idle")
RECOVERY = scene("recovery s", "kill -9 with the backlog: to the first message")

GOALS = (
    Goal("phpmq", "compiled", rate(END_TO_END), DURABLE, 5.0),
    Goal("phpmq", "compiled", cpu(END_TO_END), DURABLE, 0.25),
    Goal("phpmq", "interpreted", rate(END_TO_END), DURABLE, 2.5),
    Goal("phpmq", "interpreted", cpu(END_TO_END), DURABLE, 0.5),
    Goal("sspq", "", rate("publish 100 B"), DURABLE, 3.0),
    Goal("phpmq", "", rate("end to end 1 KiB"), DURABLE, 5.0),
    Goal(ANY_WIRE, "compiled", rate("end to end 64 KiB"), DURABLE, 1.5),
    Goal(ANY_WIRE, "compiled", rate("publish 64 KiB"), DURABLE, 1.5),
    Goal(ANY_WIRE, "compiled", rate("drain 64 KiB"), DURABLE, 1.5),
    Goal(ANY_WIRE, "compiled", rate("end to end 1 MiB"), DURABLE, 1.5),
    Goal("phpmq", "", rate("32+32 connections"), DURABLE, 2.0),
    Goal("phpmq", "interpreted", rate("32+32 connections"), DURABLE, 1.3),
    Goal("rq", "compiled", rate(END_TO_END), DURABLE, 7.0),
    Goal("rq", "compiled", rate("32+32 connections"), DURABLE, 2.5),
    Goal("rq", "interpreted", rate("32+32 connections"), DURABLE, 1.0),
    Goal("sspq", "", rate("one at a time, 32 consumers"), DURABLE, 2.0),
    Goal("phpmq", "", p99("paced"), DURABLE, 0.5),
    Goal("phpmq", "", p99("paced"), RELAXED, 1.2),
    Goal("phpmq", "compiled", cpu("paced"), DURABLE, 1.0),
    Goal("phpmq", "interpreted", cpu("paced"), DURABLE, 1.5),
    Goal("phpmq", "", BACKLOG, ANYBODY, 0.5),
    Goal("phpmq", "", RECOVERY, ANYBODY, 1.0),
)
"""A goal without a variant, or for any wire, is for the best one that there is."""


def best(measure: Measure, results: Results, subjects: list[Subject]) -> tuple[float | None, str]:
    """The best figure that these subjects have, and whose it is."""
    found = [
        (value, subject.name)
        for subject in subjects
        if (value := measure.of(results, subject.name)) is not None
    ]
    if not found:
        return None, ""
    return max(found) if measure.is_more_better else min(found)


def peers_of(settings: tuple[Setting, ...], group: str) -> list[Subject]:
    return [
        subject
        for setting in settings
        if setting.program != PENSTOCK
        for subject in setting.subjects
        if GROUPS[group](subject)
    ]


def verdicts(results: Results, settings: tuple[Setting, ...]) -> list[Verdict]:
    ours = [subject for setting in settings if setting.program == PENSTOCK for subject in setting.subjects]
    found = []
    for goal in GOALS:
        candidates = [
            subject
            for subject in ours
            if goal.wire in (subject.wire, ANY_WIRE) and subject.name.endswith(goal.variant)
        ]
        own, _ = best(goal.measure, results, candidates)
        other, name = best(goal.measure, results, peers_of(settings, goal.against))
        ratio = own / other if own is not None and other else None
        found.append(Verdict(goal, own, other, name, ratio))
    return found
