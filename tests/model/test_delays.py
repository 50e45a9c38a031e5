"""Delays: every range that was added is named, in time, whatever the clock does between two looks."""

import random
import tracemalloc
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.delays import Delays
from penstock.model.timers import SECOND_US

START_US = 1_700_000_000 * SECOND_US + 123_456

moments = st.one_of(
    st.integers(0, 5 * SECOND_US),
    st.integers(0, 4000).map(lambda seconds: seconds * SECOND_US),
    st.integers(0, 10 * 366 * 86_400 * SECOND_US),
)
additions = st.tuples(moments, st.sampled_from([1, 2, -1, -2]), st.integers(1, 3))
waits = st.one_of(st.just(-1), st.integers(0, SECOND_US), moments)


class Owner:
    """Who adds ranges and looks at them, as a queue does: what is named too early is added again."""

    def __init__(self, early_us: int) -> None:
        self.early_us = early_us  # at most so much before its time a range is named
        self.delays = Delays()
        self.now_us = START_US
        self.due_us: dict[tuple[int, int], int] = {}  # by message
        self.offset = 0
        self.looked_us = 0

    def add(self, after_us: int, queue: int, count: int) -> None:
        first, self.offset = self.offset, self.offset + count
        self.delays.add(self.now_us + after_us, queue, first, self.offset)
        self.due_us |= {(queue, offset): self.now_us + after_us for offset in range(first, self.offset)}

    def look(self) -> None:
        named: Counter[tuple[int, int]] = Counter()
        for queue, first, end in self.delays.due(self.now_us):
            for offset in range(first, end):
                named[queue, offset] += 1
                at_us = self.due_us[queue, offset]
                assert at_us <= self.now_us + self.early_us
                if at_us <= self.now_us:
                    del self.due_us[queue, offset]
                else:
                    self.delays.add(at_us, queue, offset, offset + 1)
        assert all(count == 1 for count in named.values())
        assert all(at_us > self.now_us for at_us in self.due_us.values()), "some are late"
        next_us = self.delays.next_us
        assert not next_us or next_us > self.now_us
        if self.looked_us:  # What is near is known to the microsecond.
            near = [at_us for at_us in self.due_us.values() if at_us < self.now_us + SECOND_US]
            assert min(near, default=0) == (next_us if next_us < self.now_us + SECOND_US else 0)
        self.looked_us = self.now_us

    def wait(self, us: int) -> None:
        """At most a second, or for what is said to be next (-1), from one look to the next."""
        next_us = self.delays.next_us or self.now_us + SECOND_US
        end_us = next_us if us < 0 else self.now_us + us
        if end_us > self.now_us + 20 * SECOND_US:  # Nobody has looked for a long time.
            self.now_us = end_us
        while self.now_us < end_us:
            self.now_us = min(end_us, self.now_us + SECOND_US)
            self.look()


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(st.one_of(additions, waits), max_size=40), snapshots=st.booleans())
def test_every_range_is_named_in_time(steps: list[tuple[int, int, int] | int], snapshots: bool) -> None:
    # Every snapshot may say two seconds less.
    owner = Owner(2 * SECOND_US * (1 + snapshots * len(steps)))
    owner.look()
    for step in steps:
        if isinstance(step, int):
            owner.wait(step)
        else:
            owner.add(*step)
        owner.look()
        if snapshots:
            copy = owner.delays.copy()
            owner.delays = Delays()
            for row in copy:
                owner.delays.add(*row)
            owner.looked_us = 0
    for _ in range(len(owner.due_us) + 1):
        owner.now_us = max([owner.now_us, *owner.due_us.values()])
        owner.look()
    assert not owner.due_us
    assert list(owner.delays) == []


def test_what_is_filed_says_no_moment_too_late() -> None:
    """So that a snapshot of it is in time, too."""
    delays, rng = Delays(), random.Random(1)
    list(delays.due(START_US))
    moments_us = [START_US + rng.randrange(100 * SECOND_US) for _ in range(500)]
    for index, at_us in enumerate(moments_us):
        delays.add(at_us, 1, 2 * index, 2 * index + 1)
    rows = sorted(delays, key=lambda row: row[2])
    assert [row[1:] for row in rows] == [(1, 2 * index, 2 * index + 1) for index in range(500)]
    for row, at_us in zip(rows, moments_us, strict=True):
        assert at_us - 2 * SECOND_US <= row[0] <= at_us


def test_what_is_not_asked_for_stays() -> None:
    delays = Delays()
    for number in range(10):
        delays.add(0, 1, 10 * number, 10 * number + 1)
    for number in range(10):
        assert next(delays.due(START_US)) == (1, 10 * number, 10 * number + 1)
    assert list(delays.due(START_US)) == []
    assert delays.next_us == 0


def test_many_take_few_bytes_each() -> None:
    delays = Delays()
    list(delays.due(START_US))
    rng = random.Random(1)
    tracemalloc.start()
    for number in range(50_000):
        delays.add(START_US + rng.randrange(10, 3600) * SECOND_US, 1, 2 * number, 2 * number + 1)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size / 50_000 < 40
