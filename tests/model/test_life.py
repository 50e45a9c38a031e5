"""The life of a message, cell by cell, and the page that explains it.

The grid below is written out by hand, and nothing in it comes from the code: a change of the
table must be made in both, and in docs/message-life.md, whose tables are compared too.
"""

import re
import textwrap
from pathlib import Path

import pytest

from penstock.model import life
from penstock.model.life import DEAD_REASONS, TRANSITIONS, Event, Reason, Refused, State, after
from penstock.model.policy import QueuePolicy, after_expiry, after_loss

GRID = """
    event       new     ready    delayed  held     dead        dead-held   gone
    accepted    ready   -        -        -        -           -           -
    held        -       held     -        -        dead-held   -           -
    acked       -       -        -        gone     -           gone        -
    returned    -       -        -        ready    -           dead        -
    requeued    -       -        -        ready    -           dead        -
    rejected    -       -        -        gone     -           gone        -
    expired     -       gone     gone     gone     -           -           -
    dead        -       dead     dead     dead     -           dead        -
    redriven    -       -        -        -        ready       -           -
    withdrawn   -       gone     gone     gone     gone        -           -
    delayed     -       delayed  -        delayed  -           -           -
    due         -       -        ready    -        -           -           -
"""

EVENT_NUMBERS = {
    "accepted": 1,
    "held": 2,
    "acked": 3,
    "returned": 4,
    "requeued": 5,
    "rejected": 6,
    "expired": 7,
    "dead": 8,
    "redriven": 9,
    "withdrawn": 10,
    "delayed": 11,
    "due": 12,
}

REASON_NUMBERS = {
    "": 0,
    "retries-exhausted": 1,
    "expired": 2,
    "rejected": 3,
    "undeliverable": 4,
    "too-many-deliveries": 5,
    "bad-record": 6,
    "consumer-lost": 7,
    "consumer-cancelled": 8,
    "requester-gone": 9,
    "timeout": 10,
    "purged": 11,
    "operator": 12,
    "lease-ended": 13,
}

PAGE = Path(__file__).parents[2] / "docs" / "message-life.md"


def label(member: State | Event) -> str:
    return member.name.lower().replace("_", "-")


STATES = {label(state): state for state in State}
EVENTS = {label(event): event for event in Event}


def cells(rows: list[list[str]], refused: str) -> dict[tuple[State, Event], State | None]:
    """Every cell of a grid of words; None where the arrow is refused."""
    (_, *columns), *body = rows
    grid: dict[tuple[State, Event], State | None] = {}
    for event, *targets in body:
        for state, target in zip(columns, targets, strict=True):
            grid[STATES[state], EVENTS[event]] = None if target == refused else STATES[target]
    return grid


CELLS = cells([line.split() for line in GRID.strip().splitlines()], refused="-")


# --- The table ---


def test_the_grid_has_every_cell() -> None:
    assert set(CELLS) == {(state, event) for state in State for event in Event}


@pytest.mark.parametrize(
    ("state", "event", "expected"),
    [(state, event, expected) for (state, event), expected in CELLS.items()],
    ids=[f"{label(state)}-{label(event)}" for state, event in CELLS],
)
def test_every_cell(state: State, event: Event, expected: State | None) -> None:
    assert TRANSITIONS.get((state, event)) is expected
    if expected is not None:
        assert after(state, event) is expected
    else:
        with pytest.raises(Refused) as raised:
            after(state, event)
        assert str(raised.value) == f"a message that is {state.name.lower()} cannot be {event.name.lower()}"


def test_gone_is_final() -> None:
    assert [event for state, event in TRANSITIONS if state is State.GONE] == []


def test_nothing_becomes_new() -> None:
    assert State.NEW not in TRANSITIONS.values()


def reachable(start: State) -> set[State]:
    found, fresh = {start}, {start}
    while fresh:
        fresh = {target for (state, _), target in TRANSITIONS.items() if state in fresh} - found
        found |= fresh
    return found


def test_every_state_can_be_reached_and_left_for_good() -> None:
    assert reachable(State.NEW) == set(State)
    assert all(State.GONE in reachable(state) for state in State)


def test_what_a_crash_forgets_can_be_forgotten() -> None:
    """Without the `held` arrows that are not recorded, every recorded ending still has a place to start.

    A crash turns held into ready and dead-held into dead, so those two must be where `held` came from.
    """
    came_from = {target: state for (state, event), target in TRANSITIONS.items() if event is Event.HELD}
    assert came_from == {State.HELD: State.READY, State.DEAD_HELD: State.DEAD}


# --- What is stored on disk ---


def test_the_numbers_of_events_never_change() -> None:
    assert {label(event): int(event) for event in Event} == EVENT_NUMBERS


def test_the_numbers_of_reasons_never_change() -> None:
    assert {reason.label: int(reason) for reason in Reason} == REASON_NUMBERS


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_is_found_by_its_label(reason: Reason) -> None:
    assert Reason.of(reason.label) is reason


def test_an_unknown_reason_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"no reason 'bored': one of retries-exhausted, expired, .*lease-ended$"
    ):
        Reason.of("bored")


def test_the_reasons_of_dead_letters() -> None:
    assert {reason.label for reason in DEAD_REASONS} == {
        "retries-exhausted",
        "expired",
        "rejected",
        "undeliverable",
        "too-many-deliveries",
        "bad-record",
    }


# --- The drawing and the page ---


def drawing() -> str:
    """The picture in the module's docstring: its lines with arrows or boxes, and what is between them."""
    lines = (life.__doc__ or "").splitlines()
    drawn = [number for number, line in enumerate(lines) if re.search("[─│▼▲►]", line)]
    return textwrap.dedent("\n".join(lines[drawn[0] : drawn[-1] + 1]))


def page_tables() -> dict[str, list[list[str]]]:
    """The tables of the page by their heading row, without the heading's rule."""
    tables: dict[str, list[list[str]]] = {}
    for block in re.findall(r"(?:^\|.*\n)+", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        head, _, *rows = [
            [cell.strip(" `") for cell in line.strip("|").split("|")] for line in block.splitlines()
        ]
        tables[" ".join(head)] = [head, *rows]
    return tables


def test_the_drawing_names_every_state_and_event() -> None:
    words = set(re.findall(r"[a-z]+(?:-[a-z]+)*", drawing()))
    # A new message has no box of its own: it is where the arrow `accepted` comes from.
    assert words == (set(STATES) - {"new"}) | set(EVENTS)


def test_the_page_shows_the_same_drawing() -> None:
    shown = re.findall(r"```text\n(.*?)\n```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown == [drawing()]


def test_the_page_has_the_same_table() -> None:
    assert cells(page_tables()["event new ready delayed held dead dead-held gone"], refused="–") == CELLS


def test_the_page_explains_every_state_and_event() -> None:
    tables = page_tables()
    assert [row[0] for row in tables["state meaning"][1:]] == list(STATES)
    assert [row[0] for row in tables["event what happened"][1:]] == list(EVENTS)


def test_the_page_has_the_same_reasons() -> None:
    _, *rows = page_tables()["reason number of a dead letter meaning"]
    shown = [(name, number, of_dead) for name, number, of_dead, _ in rows]
    assert shown == [(r.label, str(int(r)), "yes" if r in DEAD_REASONS else "no") for r in Reason if r]


def test_the_page_counts_retries_as_the_broker_does() -> None:
    _, *rows = page_tables()[
        "counter when the consumer is lost what becomes of the message counter afterwards"
    ]
    shown: dict[int, tuple[str, str]] = {}
    for counters, fate, counter_after in rows:
        first, *last = [int(number) for number in counters.split(" to ")]
        shown |= dict.fromkeys(range(first, (last or [first])[0] + 1), (fate, counter_after))
    assert list(shown) == list(range(256))
    for counter, (fate, counter_after) in shown.items():
        event, reason, left = after_loss(counter, 1, QueuePolicy(max_deliveries=1))
        assert fate.startswith("dead" if event is Event.DEAD else "goes back")
        assert (reason.label in fate) == (event is Event.DEAD)
        assert left == (counter - 1 if counter_after == "one less" else int(counter_after))


def test_the_page_ends_a_ttl_as_the_broker_does() -> None:
    _, *rows = page_tables()["on-expiry dead-letters event reason"]
    shown = {
        (on_expiry.split("`")[0], switch): (event, reason)
        for on_expiry, switches, event, reason in rows
        for switch in re.findall(r"\bon\b|\boff\b", switches)
    }
    assert len(shown) == 4
    for (on_expiry, switch), (event_shown, reason_shown) in shown.items():
        settings = {"on-expiry": on_expiry, "dead-letters": switch}
        event, reason = after_expiry(QueuePolicy.from_settings(settings))
        assert (label(event), reason.label) == (event_shown, reason_shown)
