"""The way of one message through its life, as steps to be drawn: from its events, and how it stands now.

The API tells of every event but `held`: a delivery is written down with its ending, which carries the
moment of dispatch. So a step `held` stands before each such ending. How it stands now is the last step,
where it is not gone.

Rules that always hold:
  * Steps are in the order of the events. What is between two of them is told with the first: in which state
    the message was, and for how long.
  * Of a very long life the beginning and the end are drawn, and between them how many steps are not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from penstock.common import units
from penstock.common.text import printable

STEPS_FIRST: Final = 12
STEPS_LAST: Final = 60

Message = Mapping[str, Any]  # as the API shows it, with its history


@dataclass(frozen=True, slots=True)
class Word:
    """How an event is told, and what it leads to."""

    title: str
    color: str  # of its mark: in, out, ok, warn, bad
    state: str = ""  # what the message is then; empty: it is gone


WORDS: Final[Mapping[str, Word]] = {
    "accepted": Word("Accepted", "in", "waited"),
    "held": Word("Handed out", "out", "held"),
    "acked": Word("Acknowledged", "ok"),
    "returned": Word("Returned to its place", "warn", "waited"),
    "requeued": Word("Requeued behind the tail", "warn", "waited"),
    "delayed": Word("Delayed", "warn", "waited"),
    "rejected": Word("Rejected and thrown away", "bad"),
    "expired": Word("Expired", "bad"),
    "dead": Word("Died", "bad", "dead"),
    "redriven": Word("Redriven behind the tail", "in", "waited"),
    "withdrawn": Word("Withdrawn", "bad"),
}
NOW: Final[Mapping[str, Word]] = {
    "ready": Word("Waits for a consumer", "now"),
    "held": Word("Is with its consumer", "now"),
    "delayed": Word("Waits for its time", "now"),
    "dead": Word("Is a dead letter", "now"),
}
BACK: Final = frozenset({"returned", "requeued"})


@dataclass(frozen=True, slots=True)
class Step:
    """One mark of the line."""

    event: str  # "now" for how it stands, "left-out" for what is not drawn
    title: str
    color: str
    at: float | None  # seconds since 1970; None: not known
    when: str = ""  # the same in words; the day where it is another than that of the step before
    facts: tuple[tuple[str, str], ...] = ()  # name, value
    between: str = ""  # what it was until the next step, and how long


def steps_of(message: Message, now: float) -> list[Step]:
    """All steps of a message, as far as its history is kept."""
    steps: list[Step] = []
    dead = False  # among the dead letters: what is returned lies there again
    for event in message["history"]:
        attempt = event["attempt"]
        if event["dispatched"] is not None:
            held = _facts(("to", event["consumer"]), ("attempt", str(attempt)))
            steps.append(_step("held", event["dispatched"], held))
        # Whose verdict it was, the step before has told.
        consumer = None if event["dispatched"] is not None else event["consumer"]
        reason = "had died of" if event["event"] == "redriven" else "reason"
        step = _step(event["event"], event["time"], _facts((reason, event["reason"]), ("by", consumer)))
        if event["event"] == "accepted":
            step = replace(step, facts=_facts(("through", message["protocol"])))
        if event["event"] in BACK and dead:
            step = replace(step, title="Back among the dead letters", between="dead")
        dead = event["event"] == "dead" or (dead and event["event"] in BACK)
        steps.append(step)
    state, consumer = message["state"], message["consumer"]
    if state in NOW:
        word = NOW[state]
        title = "Is held as a dead letter" if state == "dead" and consumer else word.title
        steps.append(
            Step("now", title, word.color, now, facts=_facts(("until", due_of(message)), ("by", consumer)))
        )
    return _shortened(_with_times(steps))


def due_of(message: Message) -> str:
    """When the time of a delayed message comes: to the second today, else to the minute; empty for others."""
    if message["due"] is None:
        return ""
    due, now = datetime.fromisoformat(message["due"]), datetime.now(UTC)
    return f"{due:%H:%M:%S} UTC" if due.date() == now.date() else f"{due:%Y-%m-%d %H:%M} UTC"


def because(message: Message) -> str:
    """Why a letter is dead, with what was said when it was rejected; empty for others."""
    return ": ".join(filter(None, (message["reason"], printable(message["why"] or ""))))


Facts = tuple[tuple[str, str], ...]


def _facts(*given: tuple[str, str | None]) -> Facts:
    return tuple((name, value) for name, value in given if value)


def _step(event: str, time: str, facts: Facts) -> Step:
    word = WORDS[event]
    at = datetime.fromisoformat(time).timestamp()
    return Step(event, word.title, word.color, at, facts=facts, between=word.state)


def _with_times(steps: Sequence[Step]) -> list[Step]:
    told: list[Step] = []
    day = ""
    for step, behind in zip(steps, [*steps[1:], None], strict=True):
        if step.at is None or step.event == "now":
            told.append(step)
            continue
        moment = datetime.fromtimestamp(step.at, UTC)
        when = f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03d}"
        if day != f"{moment:%Y-%m-%d}":
            day = f"{moment:%Y-%m-%d}"
            when = f"{day} {when} UTC"
        between = ""
        if behind is not None and behind.at is not None:
            write = units.age if behind.event == "now" else _span
            between = f"{_between(step, behind)} {write(behind.at - step.at)}"
        told.append(replace(step, when=when, between=between))
    return told


def _between(step: Step, behind: Step) -> str:
    if behind.event != "now":
        return {"waited": "waited", "held": "held for", "dead": "dead for"}.get(step.between, "after")
    if "by" in dict(behind.facts):
        return "since then"  # who holds it is known, and not since when
    return {"waited": "has waited", "dead": "dead for"}.get(step.between, "for")


def _shortened(steps: list[Step]) -> list[Step]:
    left_out = len(steps) - STEPS_FIRST - STEPS_LAST
    if left_out <= 1:
        return steps
    gap = Step("left-out", f"{left_out:,} more steps", "none", None)
    return [*steps[:STEPS_FIRST], gap, *steps[-STEPS_LAST:]]


def _span(seconds: float) -> str:
    """Times are known to the millisecond."""
    return "<1 ms" if seconds < 0.001 else units.duration(seconds)
