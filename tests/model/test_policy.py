"""Policies: settings as people write them, patterns against a slow matcher, verdicts as a table."""

import re
import tomllib
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.model.batch import RETRIES_ENDLESS, RETRIES_NONE
from penstock.model.life import DEAD_REASONS, TRANSITIONS, Event, Reason, State
from penstock.model.policy import (
    DEAD_SUFFIX,
    Policies,
    PolicyError,
    QueueNameError,
    QueuePolicy,
    Verdict,
    after_expiry,
    after_loss,
    after_reject,
    after_requeue,
    check_queue_name,
    door_of,
    retry_delay_us,
)
from penstock.model.words import Where

# --- Settings ---


def test_the_defaults() -> None:
    assert QueuePolicy() == QueuePolicy(
        retention_seconds=86_400,
        retention_bytes=0,
        max_deliveries=20,
        max_bytes=0,
        on_expiry="dead",
        durability="commit",
        dead_letters=True,
    )
    assert QueuePolicy.from_settings({}) == QueuePolicy()


def test_a_policy_cannot_be_changed_and_has_no_room_for_more() -> None:
    policy: Any = QueuePolicy()  # Any: to mypy, the assignment below is wrong already
    with pytest.raises(FrozenInstanceError):
        policy.max_bytes = 5
    assert not hasattr(policy, "__dict__")


def test_settings_from_a_file() -> None:
    text = """
        retention-seconds = 3_600
        retention-bytes = 1_000_000
        max-deliveries = 5
        max-bytes = 2_000_000
        on-expiry = "drop"
        durability = "interval"
        dead-letters = false
    """
    assert QueuePolicy.from_settings(tomllib.loads(text)) == QueuePolicy(
        3600, 1_000_000, 5, 2_000_000, "drop", "interval", False
    )


def test_settings_from_flags_and_environment_are_words() -> None:
    words = {
        "retention-seconds": "3600",
        "retention-bytes": "1000000",
        "max-deliveries": "5",
        "max-bytes": "2000000",
        "on-expiry": "drop",
        "durability": "none",
        "dead-letters": "off",
    }
    assert QueuePolicy.from_settings(words) == QueuePolicy(
        3600, 1_000_000, 5, 2_000_000, "drop", "none", False
    )
    assert QueuePolicy.from_settings({"dead-letters": "on"}).dead_letters is True


@pytest.mark.parametrize(
    ("value", "delays"),
    [
        ([], ()),
        ([1, 10.5, 0], (1, 10.5, 0)),
        ([315_576_000] * 100, (315_576_000,) * 100),
        ("", ()),
        (" ", ()),
        ("5", (5.0,)),
        ("1, 10.5,0", (1.0, 10.5, 0.0)),
    ],
)
def test_retry_delays_are_a_list_in_a_file_and_have_commas_anywhere(
    value: object, delays: tuple[float, ...]
) -> None:
    assert QueuePolicy.from_settings({"retry-delays": value}).retry_delays == delays


def test_every_field_is_a_setting() -> None:
    for field in fields(QueuePolicy):
        setting = field.name.replace("_", "-")
        with pytest.raises(PolicyError, match=f"^here: {setting} = None: use "):
            QueuePolicy.from_settings({setting: None}, "here")


@pytest.mark.parametrize(
    ("setting", "value", "wanted"),
    [
        ("max-deliveries", -1, "a whole number from 0 (no limit) to 2147483647"),
        ("max-deliveries", 2**31, "a whole number from 0 (no limit) to 2147483647"),
        ("max-deliveries", True, "a whole number from 0 (no limit)"),
        ("max-deliveries", 3.0, "a whole number from 0 (no limit)"),
        ("max-deliveries", "three", "a whole number from 0 (no limit)"),
        ("max-deliveries", "-3", "a whole number from 0 (no limit)"),
        ("max-deliveries", " 3", "a whole number from 0 (no limit)"),
        ("max-deliveries", "", "a whole number from 0 (no limit)"),
        ("max-deliveries", "٣", "a whole number from 0 (no limit)"),
        ("max-deliveries", "9" * 5000, "a whole number from 0 (no limit)"),
        ("max-deliveries", [3], "a whole number from 0 (no limit)"),
        ("max-bytes", 2**63, "a whole number from 0 (no limit) to 9223372036854775807"),
        ("retention-bytes", "1 GB", "a whole number from 0 (no cap)"),
        ("retention-seconds", "1h", "a whole number from 0 (keep nothing that is settled)"),
        ("on-expiry", "keep", "dead or drop"),
        ("on-expiry", True, "dead or drop"),
        ("durability", "COMMIT", "commit or interval or none"),
        ("durability", ["commit"], "commit or interval or none"),
        ("dead-letters", "yes", "on or off"),
        ("dead-letters", 1, "on or off"),
        ("dead-letters", "on\noff", "on or off"),
        ("retry-delays", 5, "a list of at most 100 numbers of seconds, each from 0 to 315576000"),
        ("retry-delays", "soon", "a list of at most 100 numbers of seconds"),
        ("retry-delays", "1,,2", "a list of at most 100 numbers of seconds"),
        ("retry-delays", "1;2", "a list of at most 100 numbers of seconds"),
        ("retry-delays", "1,-1", "a list of at most 100 numbers of seconds"),
        ("retry-delays", "nan", "a list of at most 100 numbers of seconds"),
        ("retry-delays", "inf", "a list of at most 100 numbers of seconds"),
        ("retry-delays", [315_576_001], "a list of at most 100 numbers of seconds"),
        ("retry-delays", [float("nan")], "a list of at most 100 numbers of seconds"),
        ("retry-delays", [True], "a list of at most 100 numbers of seconds"),
        ("retry-delays", ["1"], "a list of at most 100 numbers of seconds"),
        ("retry-delays", [[1]], "a list of at most 100 numbers of seconds"),
        ("retry-delays", [1] * 101, "a list of at most 100 numbers of seconds"),
        ("retry-delays", {"1": 2}, "a list of at most 100 numbers of seconds"),
    ],
)
def test_a_wrong_value_is_named_with_its_place_and_what_is_right(
    setting: str, value: object, wanted: str
) -> None:
    with pytest.raises(PolicyError) as raised:
        QueuePolicy.from_settings({setting: value}, '[queue."orders.*"]')
    text = str(raised.value)
    assert text.startswith(f'[queue."orders.*"]: {setting} = ')
    assert f": use {wanted}" in text
    assert "\n" not in text
    assert len(text) < 200


def test_a_policy_made_in_code_is_checked_too() -> None:
    with pytest.raises(PolicyError, match=r"^max-deliveries = -1: use a whole number"):
        QueuePolicy(max_deliveries=-1)
    with pytest.raises(PolicyError, match=r"^on-expiry = 'lost': use dead or drop"):
        QueuePolicy(on_expiry="lost")


def test_the_largest_values_are_right() -> None:
    assert QueuePolicy.from_settings({"max-bytes": str(2**63 - 1)}).max_bytes == 2**63 - 1


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("max-delivery", "max-deliveries"),
        ("max_deliveries", "max-deliveries"),
        ("Max-Deliveries", "max-deliveries"),
        ("on_expire", "on-expiry"),
        ("deadletters", "dead-letters"),
        ("retention-second", "retention-seconds"),
    ],
)
def test_an_unknown_setting_is_answered_with_the_nearest(setting: str, meant: str) -> None:
    with pytest.raises(PolicyError) as raised:
        QueuePolicy.from_settings({setting: 3}, '[queue."orders"]')
    assert str(raised.value) == f"[queue.\"orders\"]: there is no setting '{setting}': did you mean {meant}?"


def test_a_setting_like_no_other_is_answered_with_all() -> None:
    with pytest.raises(
        PolicyError, match=r"no setting 'colour': use one of retention-seconds, .*, deliver-after$"
    ):
        QueuePolicy.from_settings({"colour": "red"})


def test_settings_are_laid_over_a_base() -> None:
    base = QueuePolicy(max_deliveries=3, durability="none")
    assert QueuePolicy.from_settings({"max-deliveries": 5}, base=base) == QueuePolicy(
        max_deliveries=5, durability="none"
    )


def test_errors_can_be_caught_as_what_they_are() -> None:
    for error in (PolicyError, QueueNameError):
        assert issubclass(error, PenstockError)
        assert issubclass(error, ValueError)


# --- Patterns ---


def deliveries(policies: Policies, name: str) -> int:
    return policies.for_queue(name).max_deliveries


def by_number(*patterns: str) -> Policies:
    """Policies that are told apart by max-deliveries: 1 for the first pattern, and so on; 0 for none."""
    sections = {pattern: {"max-deliveries": number} for number, pattern in enumerate(patterns, 1)}
    return Policies(sections, QueuePolicy(max_deliveries=0))


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("orders", ["orders"], ["order", "orders2", "Orders", "my-orders"]),
        ("orders.*", ["orders.", "orders.eu", "orders.eu.late"], ["orders", "ordersXeu", "my-orders.eu"]),
        ("*", ["a", "orders.eu", "x\u2028y"], []),
        ("job-?", ["job-1", "job-ü"], ["job-", "job-10"]),
        ("*-eu-*", ["a-eu-b", "-eu-", "-eu-eu-"], ["-eu", "eu"]),
        ("a*b*c", ["abc", "aXbXc", "abcbc"], ["acb", "abcd"]),
        ("a**c", ["ac", "abc"], ["ab"]),
        ("[ab].+", ["[ab].+"], ["a.+", "[ab].x"]),
        ("*??", ["ab", "abc"], ["a"]),
    ],
)
def test_patterns_match_the_whole_name(pattern: str, matching: list[str], other: list[str]) -> None:
    policies = by_number(pattern)
    assert [name for name in matching if deliveries(policies, name) != 1] == []
    assert [name for name in other if deliveries(policies, name) != 0] == []


def matches_slowly(pattern: str, name: str) -> bool:
    """The meaning of a pattern, character by character."""
    if not pattern:
        return not name
    if pattern[0] == "*":
        return any(matches_slowly(pattern[1:], name[at:]) for at in range(len(name) + 1))
    return bool(name) and pattern[0] in ("?", name[0]) and matches_slowly(pattern[1:], name[1:])


@settings(max_examples=500, deadline=None)
@given(pattern=st.text("ab.*?", min_size=1, max_size=8), name=st.text("ab.", min_size=1, max_size=10))
def test_patterns_mean_what_a_slow_matcher_says(pattern: str, name: str) -> None:
    assert (deliveries(by_number(pattern), name) == 1) == matches_slowly(pattern, name)


def test_a_long_name_cannot_keep_the_matcher_busy() -> None:
    # A matcher that goes back would try some 250**20 ways here.
    assert deliveries(by_number("*a" * 20 + "*b"), "a" * 250) == 0


@pytest.mark.parametrize(
    ("patterns", "name", "winner"),
    [
        (["*", "orders.*", "orders.eu.*"], "orders.eu.1", "orders.eu.*"),
        (["orders.eu.*", "orders.*", "*"], "orders.eu.1", "orders.eu.*"),
        (["orders.*", "*.eu"], "orders.eu", "orders.*"),
        (["*.late", "eu.*"], "eu.late", "*.late"),
        (["orders.?", "orders.*"], "orders.1", "orders.?"),
        (["orders.*", "orders.?"], "orders.1", "orders.*"),  # equally long: the first in the file
        (["orders*", "orders"], "orders", "orders"),  # equally long, but one is the name itself
        (["o*r*d*e*r*s", "orders?"], "orders1", "orders?"),
    ],
)
def test_the_most_specific_pattern_wins_alone(patterns: list[str], name: str, winner: str) -> None:
    policies = by_number(*patterns)
    assert patterns[deliveries(policies, name) - 1] == winner


def test_the_winner_is_laid_over_the_defaults_and_not_over_the_others() -> None:
    policies = Policies(
        {"*": {"durability": "none"}, "orders": {"max-deliveries": 3}},
        defaults=QueuePolicy(retention_seconds=60),
    )
    assert policies.for_queue("orders") == QueuePolicy(retention_seconds=60, max_deliveries=3)
    assert policies.for_queue("bills") == QueuePolicy(retention_seconds=60, durability="none")


def test_without_sections_every_queue_has_the_defaults() -> None:
    assert Policies().for_queue("orders") == QueuePolicy()
    assert Policies(defaults=QueuePolicy(max_bytes=5)).for_queue("orders") == QueuePolicy(max_bytes=5)


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"orders": {"max-deliverys": 3}}, "[queue.\"orders\"]: there is no setting 'max-deliverys'"),
        ({"orders": {"max-bytes": "big"}}, "[queue.\"orders\"]: max-bytes = 'big': use a whole number"),
        ({"orders": 5}, '[queue."orders"]: is 5; use a table of settings'),
        ({"": {}}, "[queue.'']: no queue can have such a name"),
        ({"a\nb": {}}, r"[queue.'a\nb']: no queue can have such a name"),
        ({"orders.dead": {}}, 'dead letters follow the settings of their queue, [queue."orders"]'),
    ],
)
def test_a_wrong_section_is_named(sections: dict[str, object], text: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(text)):
        Policies(sections)


def test_the_cache_stays_small_and_right() -> None:
    policies = by_number("orders.*", "*")
    for number in range(2 * Policies.CACHED_NAMES_MAX + 10):
        assert deliveries(policies, f"orders.{number}") == 1
        assert deliveries(policies, f"bills.{number}") == 2
    assert len(policies._cache) <= Policies.CACHED_NAMES_MAX
    assert policies.for_queue("orders.1") is policies.for_queue("orders.1")


# --- Names ---


@pytest.mark.parametrize(
    "name", ["a", "orders.eu", "büro/ä b", "dead", "orders.deadline", "x" * 255, "ü" * 127]
)
def test_good_names(name: str) -> None:
    check_queue_name(name)
    assert door_of(name) == (name, False)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "a queue name cannot be empty"),
        ("x" * 256, "the name has 256 bytes; use at most 255"),
        ("ü" * 128, "the name has 256 bytes; use at most 255"),
        ("a\x00b", r"queue 'a\x00b': character 1 ('\x00') is a control character"),
        ("line\n", "character 4 ('\\n') is a control character"),
        ("\x7f", "is a control character"),
        ("a\x85", "is a control character"),
        ("\ud800", r"queue '\ud800': character 0 ('\ud800')"),
        (
            "orders.dead",
            "queue 'orders.dead' cannot be sent to: it is the door to the dead letters of 'orders'",
        ),
        (".dead", "cannot be sent to"),
    ],
)
def test_names_that_no_queue_can_have(name: str, text: str) -> None:
    with pytest.raises(QueueNameError, match=re.escape(text)):
        check_queue_name(name)


def test_the_bound_on_names_is_a_setting() -> None:
    check_queue_name("x" * 300, bytes_max=300)
    with pytest.raises(QueueNameError, match="5 bytes; use at most 4"):
        check_queue_name("hello", bytes_max=4)


def test_the_door_to_the_dead_letters() -> None:
    assert DEAD_SUFFIX == ".dead"
    assert door_of("orders.dead") == ("orders", True)
    assert door_of("orders") == ("orders", False)
    # The dead letters of dead letters: the queue behind that door is no queue.
    queue, dead = door_of("orders.dead.dead")
    assert dead
    with pytest.raises(QueueNameError):
        check_queue_name(queue)


def complaint_about(name: str) -> str | None:
    try:
        check_queue_name(name)
    except QueueNameError as error:
        return str(error)
    return None


@given(st.text(max_size=300))
def test_every_text_is_a_name_or_is_refused_in_one_short_line(name: str) -> None:
    complaint = complaint_about(name)
    if complaint is not None:
        assert complaint.isprintable()
        assert len(complaint) < 200
    else:
        assert 0 < len(name.encode()) <= 255
        assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in name)


# --- Verdicts ---

KEEPS = QueuePolicy(max_deliveries=3)
THROWS = QueuePolicy(max_deliveries=3, dead_letters=False)
NO_LIMIT = QueuePolicy(max_deliveries=0)


@pytest.mark.parametrize(
    ("retries_left", "attempts", "policy", "verdict"),
    [
        # A message with a counter: max-deliveries has no say.
        (2, 1, KEEPS, Verdict(Event.RETURNED, Reason.CONSUMER_LOST, 1)),
        (1, 99, KEEPS, Verdict(Event.RETURNED, Reason.CONSUMER_LOST, 0)),
        (254, 1, KEEPS, Verdict(Event.RETURNED, Reason.CONSUMER_LOST, 253)),
        (255, 99, KEEPS, Verdict(Event.RETURNED, Reason.CONSUMER_LOST, 255)),
        (0, 1, KEEPS, Verdict(Event.DEAD, Reason.RETRIES_EXHAUSTED, 0)),
        (0, 1, NO_LIMIT, Verdict(Event.DEAD, Reason.RETRIES_EXHAUSTED, 0)),
        (0, 1, THROWS, Verdict(Event.REJECTED, Reason.RETRIES_EXHAUSTED, 0)),
        # One without.
        (RETRIES_NONE, 1, NO_LIMIT, Verdict(Event.RETURNED, Reason.CONSUMER_LOST, RETRIES_NONE)),
        (RETRIES_NONE, 10**6, NO_LIMIT, Verdict(Event.RETURNED, Reason.CONSUMER_LOST, RETRIES_NONE)),
        (RETRIES_NONE, 2, KEEPS, Verdict(Event.RETURNED, Reason.CONSUMER_LOST, RETRIES_NONE)),
        (RETRIES_NONE, 3, KEEPS, Verdict(Event.DEAD, Reason.TOO_MANY_DELIVERIES, RETRIES_NONE)),
        (RETRIES_NONE, 4, KEEPS, Verdict(Event.DEAD, Reason.TOO_MANY_DELIVERIES, RETRIES_NONE)),
        (RETRIES_NONE, 3, THROWS, Verdict(Event.REJECTED, Reason.TOO_MANY_DELIVERIES, RETRIES_NONE)),
    ],
)
def test_after_a_loss(retries_left: int, attempts: int, policy: QueuePolicy, verdict: Verdict) -> None:
    assert after_loss(retries_left, attempts, policy) == verdict


@pytest.mark.parametrize(
    ("retries_left", "attempts", "policy", "verdict"),
    [
        (RETRIES_NONE, 2, KEEPS, (Event.REQUEUED, Reason.NONE)),
        (RETRIES_NONE, 3, KEEPS, (Event.DEAD, Reason.TOO_MANY_DELIVERIES)),
        (RETRIES_NONE, 4, KEEPS, (Event.DEAD, Reason.TOO_MANY_DELIVERIES)),
        (RETRIES_NONE, 3, THROWS, (Event.REJECTED, Reason.TOO_MANY_DELIVERIES)),
        (RETRIES_NONE, 10**6, NO_LIMIT, (Event.REQUEUED, Reason.NONE)),
        # A counter of its own is about lost consumers, and max-deliveries has no say.
        (0, 99, KEEPS, (Event.REQUEUED, Reason.NONE)),
        (255, 99, KEEPS, (Event.REQUEUED, Reason.NONE)),
    ],
)
def test_after_a_requeue(
    retries_left: int, attempts: int, policy: QueuePolicy, verdict: tuple[Event, Reason]
) -> None:
    assert after_requeue(retries_left, attempts, policy) == verdict


def test_where_it_goes_back_to_is_the_callers_choice() -> None:
    assert after_loss(5, 1, KEEPS, Where.PLACE).event is Event.RETURNED
    assert after_loss(5, 1, KEEPS, Where.TAIL) == Verdict(Event.REQUEUED, Reason.CONSUMER_LOST, 4)
    assert after_loss(0, 1, KEEPS, Where.TAIL).event is Event.DEAD


@pytest.mark.parametrize("retries", [0, 1, 2, 7, 254])
def test_a_counter_of_r_means_r_plus_1_deliveries(retries: int) -> None:
    left, shown = retries, []
    for attempt in range(1, 1000):
        shown.append(left)
        verdict = after_loss(left, attempt, NO_LIMIT)
        left = verdict.retries_left
        if verdict.event is Event.DEAD:
            break
    assert shown == list(range(retries, -1, -1))


def test_max_deliveries_is_how_often_it_is_delivered() -> None:
    events = [after_loss(RETRIES_NONE, attempt, KEEPS).event for attempt in (1, 2, 3)]
    assert events == [Event.RETURNED, Event.RETURNED, Event.DEAD]


@pytest.mark.parametrize("retries_left", [RETRIES_NONE - 1, RETRIES_ENDLESS + 1])
def test_a_counter_out_of_range_is_misuse(retries_left: int) -> None:
    with pytest.raises(ValueError, match=f"retries left {retries_left}: use -1 to 255"):
        after_loss(retries_left, 1, NO_LIMIT)


@pytest.mark.parametrize(
    ("on_expiry", "dead_letters", "event"),
    [
        ("dead", True, Event.DEAD),
        ("dead", False, Event.EXPIRED),
        ("drop", True, Event.EXPIRED),
        ("drop", False, Event.EXPIRED),
    ],
)
def test_after_expiry(on_expiry: str, dead_letters: bool, event: Event) -> None:
    policy = QueuePolicy(on_expiry=on_expiry, dead_letters=dead_letters)
    assert after_expiry(policy) == (event, Reason.EXPIRED)


def test_after_a_reject() -> None:
    assert after_reject(KEEPS) == (Event.DEAD, Reason.REJECTED)
    assert after_reject(THROWS) == (Event.REJECTED, Reason.REJECTED)


@given(
    retries_left=st.integers(RETRIES_NONE, RETRIES_ENDLESS),
    attempts=st.integers(1, 300),
    max_deliveries=st.integers(0, 10),
    dead_letters=st.booleans(),
    on_expiry=st.sampled_from(["dead", "drop"]),
    where=st.sampled_from(Where),
)
def test_every_verdict_is_an_arrow_of_the_life_table(
    retries_left: int, attempts: int, max_deliveries: int, dead_letters: bool, on_expiry: str, where: Where
) -> None:
    policy = QueuePolicy(max_deliveries=max_deliveries, dead_letters=dead_letters, on_expiry=on_expiry)
    event, reason, left = after_loss(retries_left, attempts, policy, where)
    arrows = [(State.HELD, event, reason)]
    arrows += [(state, *after_expiry(policy)) for state in (State.READY, State.HELD)]
    arrows += [(state, *after_reject(policy)) for state in (State.HELD, State.DEAD_HELD)]
    for state, arrow, why in arrows:
        after = TRANSITIONS[state, arrow]
        if after is State.DEAD:
            assert dead_letters
            assert why in DEAD_REASONS
    assert (left == RETRIES_NONE) == (retries_left == RETRIES_NONE)
    assert RETRIES_NONE <= left <= retries_left


# --- Delays ---


@pytest.mark.parametrize(
    ("delays", "expected"),
    [
        ((), [0, 0, 0, 0]),
        ((5,), [5, 5, 5, 5]),
        ((1, 10, 60), [1, 10, 60, 60]),
        ((0, 2.5), [0, 2.5, 2.5, 2.5]),
        ((0.000_000_4, 0.000_000_6), [0, 0.000_001, 0.000_001, 0.000_001]),
    ],
)
def test_how_long_a_message_waits_after_each_delivery(
    delays: tuple[float, ...], expected: list[float]
) -> None:
    policy = QueuePolicy(retry_delays=delays, max_deliveries=0)
    waits = [retry_delay_us(policy, attempts) for attempts in (1, 2, 3, 1000)]
    assert waits == [round(it * 1_000_000) for it in expected]
    for where, back in ((Where.PLACE, Event.RETURNED), (Where.TAIL, Event.REQUEUED)):
        events = [after_loss(RETRIES_NONE, attempts, policy, where).event for attempts in (1, 2, 3, 1000)]
        assert events == [Event.DELAYED if wait else back for wait in waits]


def test_a_delay_saves_nobody() -> None:
    policy = QueuePolicy(retry_delays=(1,), max_deliveries=3)
    assert after_loss(RETRIES_NONE, 3, policy) == Verdict(
        Event.DEAD, Reason.TOO_MANY_DELIVERIES, RETRIES_NONE
    )
    assert after_loss(0, 1, policy) == Verdict(Event.DEAD, Reason.RETRIES_EXHAUSTED, 0)
    assert after_loss(2, 3, policy) == Verdict(Event.DELAYED, Reason.CONSUMER_LOST, 1)
