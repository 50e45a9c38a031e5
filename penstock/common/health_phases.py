"""Health phases: how far one thing is with one rule of `health.py`: not yet for long enough, in it, or about
to leave it; and the next phase, from the figures and the moment.

Rules that always hold:
  * No clock and no IO: moments are numbers that somebody gives.
  * What is entered at one bound is left at another one, and only after a time: nothing flickers. While it
    lasts, a finding may get worse, never better.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from penstock.common.health import BAD, BY_STATE, Figures, Rule


class Phase(NamedTuple):
    """How far one thing is with one rule. Without one, nothing of it is so."""

    began: float  # in it: since when it is so; else since when the condition holds
    active: bool = False
    is_bad: bool = False
    over: float | None = None  # since when it may leave
    figures: Figures = None  # as they were when it last was so


def step(rule: Rule, phase: Phase | None, figures: Figures, at: float) -> Phase | None:
    """The next phase of a thing whose figures are these at a moment; None: it is well."""
    if phase is None or not phase.active:
        if not rule.enter(figures):
            return None
        began = at if phase is None else phase.began
        if at - began < rule.enter_seconds:
            return Phase(began)
        if rule.lasted is not None:
            began = min(at - rule.lasted(figures), began)
        return Phase(began, True, _is_bad(rule, figures), None, figures)
    if rule.stay(figures):
        return phase._replace(over=None, is_bad=phase.is_bad or _is_bad(rule, figures), figures=figures)
    over = at if phase.over is None else phase.over
    return None if at - over >= rule.leave_seconds else phase._replace(over=over)


def _is_bad(rule: Rule, figures: Figures) -> bool:
    return rule.level == BAD or (rule.is_bad is not None and rule.is_bad(figures))


Phases = Mapping[str, Phase]
"""Of one thing, by state."""


def look(table: Iterable[Rule], phases: Phases, figures: Figures, at: float) -> dict[str, Phase]:
    """All rules of a table for one thing."""
    found = {}
    for rule in table:
        phase = step(rule, phases.get(rule.state), figures, at)
        if phase is not None:
            found[rule.state] = phase
    return found


def visible(phases: Phases) -> list[str]:
    """The states that a thing is in, without those that are only a consequence of others."""
    active = [state for state, phase in phases.items() if phase.active]
    hidden = {state for it in active for state in BY_STATE[it].hides}
    return [state for state in active if state not in hidden]
