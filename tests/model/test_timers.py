"""Timers against a plain list, on all three levels, with a clock that also runs backwards."""

import random
import tracemalloc
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.ids import OFFSET_MAX
from penstock.model.timers import SWEEP_FROM, Timers

SECOND_US = 1_000_000
SPAN_SECONDS = 1 << 10
START_SECOND = 1_700_000_000  # not on the edge of any bucket


def at(second: int) -> int:
    return (START_SECOND + second) * SECOND_US


@dataclass
class Add:
    distance_us: int
    key: str
    count: int


@dataclass
class Pass:
    """Time passes, or jumps back."""

    distance_us: int


@dataclass
class Await:
    """Time passes to just before the next moment, then to it."""


# Distances within a few seconds, a few spans of seconds, and a few spans of spans.
distances_us = st.one_of(
    st.integers(-3 * SECOND_US, 5 * SECOND_US),
    st.integers(-SPAN_SECONDS, 3 * SPAN_SECONDS).map(lambda seconds: seconds * SECOND_US),
    st.integers(-SPAN_SECONDS, 3 * SPAN_SECONDS).map(lambda spans: spans * SPAN_SECONDS * SECOND_US + 1),
)
additions = st.builds(Add, distances_us, st.sampled_from("ab"), st.integers(1, 9))
steps = st.lists(
    st.one_of(additions, additions, st.builds(Pass, distances_us), st.builds(Await)), max_size=40
)


@settings(max_examples=600, deadline=None)
@given(steps=steps, hinted=st.booleans())
def test_names_what_is_due_when_it_is_due(steps: list[Add | Pass | Await], hinted: bool) -> None:
    now_us = at(0)
    timers: Timers[str] = Timers(now_us if hinted else 0)
    second_of: dict[tuple[str, int], int] = {}  # by message: when it is due. The model.
    tails = {"a": 0, "b": 0}
    additions = 0

    def check_due() -> None:
        found = timers.due(now_us)
        messages = [(key, offset) for key, first, end in found for offset in range(first, end)]
        assert Counter(messages) == Counter(
            m for m, second in second_of.items() if second * SECOND_US <= now_us
        )
        seconds = [second_of.pop(message) for message in messages]
        assert seconds == sorted(seconds)

    for step in [*steps, Pass(1 << 52)]:
        if isinstance(step, Add):
            # Every third range leaves a gap, so that some can be merged and some cannot.
            additions += 1
            first = tails[step.key] + (additions % 3 == 0)
            tails[step.key] = end = first + step.count
            due_us = now_us + step.distance_us
            timers.add(due_us, step.key, first, end)
            for offset in range(first, end):
                second_of[step.key, offset] = -(-due_us // SECOND_US)
        elif isinstance(step, Pass):
            now_us += step.distance_us
            check_due()
        elif second_of:
            next_us = min(second_of.values()) * SECOND_US
            now_us = next_us - 1
            check_due()
            now_us = next_us
            check_due()
        assert bool(second_of) == bool(timers)
        listed = [
            ((key, offset), due_us) for due_us, key, first, end in timers for offset in range(first, end)
        ]
        assert sorted(listed) == sorted(
            (message, second * SECOND_US) for message, second in second_of.items()
        )
        assert len(timers) <= additions
    assert not second_of


def test_nothing_filed_is_nothing_due() -> None:
    timers: Timers[str] = Timers()
    assert timers.due(at(0)) == []
    assert len(timers) == 0


@pytest.mark.parametrize("early_us", [0, 1, 999_999])
def test_rounds_up_to_the_second(early_us: int) -> None:
    timers: Timers[str] = Timers(at(0))
    timers.add(at(60) - early_us, "orders", 3, 7)
    assert timers.due(at(60) - 1) == []
    assert timers.due(at(60)) == [("orders", 3, 7)]
    assert timers.due(at(60)) == []


def test_is_named_in_the_order_of_time_across_all_levels() -> None:
    timers: Timers[str] = Timers(at(0))
    seconds = [40 * SPAN_SECONDS**2, 3, 5 * SPAN_SECONDS, 1, 2 * SPAN_SECONDS**2, 6 * SPAN_SECONDS]
    for number, second in enumerate(seconds):
        timers.add(at(second), "orders", 10 * number, 10 * number + 1)
    found = timers.due(at(41 * SPAN_SECONDS**2))
    assert [seconds[first // 10] for _, first, _ in found] == sorted(seconds)


def test_a_clock_that_was_set_back_makes_nothing_early_or_late() -> None:
    timers: Timers[str] = Timers(at(0))
    assert timers.due(at(100_000)) == []
    timers.add(at(50), "orders", 0, 1)  # the clock is back at 0 and the message has 50 s
    assert timers.due(at(0)) == []
    assert timers.due(at(50) - 1) == []
    assert timers.due(at(49)) == []
    assert timers.due(at(50)) == [("orders", 0, 1)]


@pytest.mark.parametrize(
    "seconds", [5, 5 * SPAN_SECONDS, 5 * SPAN_SECONDS**2], ids=["level-0", "level-1", "level-2"]
)
def test_merges_adjoining_ranges_of_a_key_and_second(seconds: int) -> None:
    timers: Timers[str] = Timers(at(0))
    timers.add(at(seconds), "a", 10, 20)
    timers.add(at(seconds), "b", 20, 30)  # another key in between
    timers.add(at(seconds) - 7, "a", 20, 25)  # the same second, rounded up
    timers.add(at(seconds), "a", 5, 10)  # before it
    timers.add(at(seconds), "b", 31, 32)  # a gap
    assert len(timers) == 3
    timers.add(at(seconds + 1), "a", 25, 30)  # another second
    assert len(timers) == 4
    assert timers.due(at(seconds)) == [("a", 5, 25), ("b", 20, 30), ("b", 31, 32)]
    assert timers.due(at(seconds + 1)) == [("a", 25, 30)]


def test_what_is_filed_can_be_listed_and_filed_elsewhere() -> None:
    timers: Timers[str] = Timers(at(0))
    for number, second in enumerate((2, 3, 5 * SPAN_SECONDS, 5 * SPAN_SECONDS**2)):
        timers.add(at(second) - 5, "ab"[number % 2], 10 * number, 10 * number + 3)
    listed = sorted(timers)
    assert listed == [
        (at(2), "a", 0, 3),
        (at(3), "b", 10, 13),
        (at(5 * SPAN_SECONDS), "a", 20, 23),
        (at(5 * SPAN_SECONDS**2), "b", 30, 33),
    ]
    assert len(timers) == 4  # listing takes nothing out
    others: Timers[str] = Timers()
    for row in timers:
        others.add(*row)
    assert sorted(others) == listed
    assert others.due(at(6 * SPAN_SECONDS**2)) == timers.due(at(6 * SPAN_SECONDS**2))


@pytest.mark.parametrize(
    ("at_us", "first", "end"),
    [
        (0, 0, 1),  # 0 means "never" in an expiry column: no moment
        (-1, 0, 1),
        (at(1), 5, 5),
        (at(1), 6, 5),
        (at(1), -1, 5),
        (at(1), 0, OFFSET_MAX + 2),
    ],
)
def test_refuses_what_is_no_range_or_no_moment(at_us: int, first: int, end: int) -> None:
    timers: Timers[str] = Timers()
    with pytest.raises(ValueError, match=f"'orders': messages {first} to {end} at {at_us} µs"):
        timers.add(at_us, "orders", first, end)
    assert len(timers) == 0


def test_the_last_offset_and_the_far_future_fit() -> None:
    timers: Timers[str] = Timers()
    far_us = (1 << 63) - 1
    timers.add(far_us, "orders", OFFSET_MAX, OFFSET_MAX + 1)
    assert timers.due(far_us) == []
    assert timers.due(far_us + SECOND_US) == [("orders", OFFSET_MAX, OFFSET_MAX + 1)]


def test_forgets_keys_that_have_nothing_filed() -> None:
    timers: Timers[str] = Timers(at(0))
    tracemalloc.start()
    try:
        for number in range(10_000):
            timers.add(at(number), f"reply-queue-{number}", 0, 1)
            assert timers.due(at(number)) == [(f"reply-queue-{number}", 0, 1)]
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 50_000


def test_an_entry_takes_less_than_40_bytes() -> None:
    # Moments scattered over a minute, a day and ten years, so that all levels are in use; offsets
    # with gaps, so that nothing can be merged.
    count = 200_000
    spreads_seconds = (60, 86_400, 10 * 365 * 86_400)
    moments_us = [at(1 + number * 7_919_999 % spreads_seconds[number % 3]) for number in range(count)]
    offsets = range(0, 2 * count, 2)
    timers: Timers[str] = Timers(at(0))
    tracemalloc.start()
    try:
        for at_us, offset in zip(moments_us, offsets, strict=True):
            timers.add(at_us, "orders", offset, offset + 1)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(timers) == count
    assert kept_bytes < 40 * count
    assert len(timers.due(at(40_000))) + len(timers.due(at(spreads_seconds[-1]))) == count


def test_a_copy_stays_as_it_was_and_goes_on_by_itself() -> None:
    timers: Timers[str] = Timers(at(0))
    for number in range(50):
        timers.add(at(number * number), "orders", 2 * number, 2 * number + 1)
    filed = sorted(timers)
    copy = timers.copy()
    timers.due(at(400))
    timers.add(at(3000), "mails", 7, 9)
    assert (sorted(copy), len(copy)) == (filed, 50)
    copy.add(at(1), "mails", 1, 2)
    assert ("mails", 1, 2) in copy.due(at(5000))
    assert (len(copy), len(timers)) == (0, 50 - 21 + 1)


def test_what_nobody_wants_is_let_go_of_and_nothing_else() -> None:
    """However it is spread, and whatever comes, or comes due, between two slices of a pass."""
    rng = random.Random(1)
    now = 0
    swept, other = Timers[int](at(0)), Timers[int](at(0))
    gone: set[tuple[int, int]] = set()

    def is_wanted(key: int, first: int, end: int) -> bool:
        return any((key, offset) not in gone for offset in range(first, end))

    def add(number: int) -> None:
        moment, key = at(now + rng.choice((1, 1000, 1_000_000)) * rng.randint(1, 100)), rng.randrange(50)
        for timers in (swept, other):
            timers.add(moment, key, 2 * number, 2 * number + 1)
        if rng.random() < 0.9:
            gone.add((key, 2 * number))

    def due(timers: Timers[int]) -> list[tuple[int, int, int]]:
        return sorted(it for it in timers.due(at(now)) if is_wanted(*it))

    for number in range(SWEEP_FROM):
        add(number)
    assert len(swept) == SWEEP_FROM
    for number in range(SWEEP_FROM, SWEEP_FROM + 300):
        add(number)
        swept.sweep(is_wanted, 500)
        if number % 10 == 0:
            now += rng.choice((1, 100, 5000))
            assert due(swept) == due(other)
    assert len(swept) < len(other) / 5
    now = 1 << 30
    assert due(swept) == due(other)
    assert (len(swept), list(swept)) == (0, [])


def test_where_all_is_wanted_it_is_not_asked_before_there_is_twice_as_much() -> None:
    timers, asked = Timers[int](at(0)), 0

    def is_wanted(_key: int, _first: int, _end: int) -> bool:
        nonlocal asked
        asked += 1
        return True

    for number in range(2 * SWEEP_FROM):
        if number in (SWEEP_FROM - 1, SWEEP_FROM, 2 * SWEEP_FROM - 1):
            timers.sweep(is_wanted, 3 * SWEEP_FROM)
            assert asked == (0 if number < SWEEP_FROM else SWEEP_FROM)
        timers.add(at(number % 5000), 1, 2 * number, 2 * number + 1)
    timers.sweep(is_wanted, SWEEP_FROM)
    assert asked == 2 * SWEEP_FROM
    assert len(timers) == 2 * SWEEP_FROM
