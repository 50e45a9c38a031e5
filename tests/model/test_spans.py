"""Buckets of times: every time has one, they follow each other, and what is told is near what was."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.model.spans import BUCKETS, Times, add_up, bucket_of, quantile_us, start_us

TIMES = st.integers(0, start_us(BUCKETS) - 1)


@given(TIMES)
def test_a_time_is_in_its_bucket(us: int) -> None:
    bucket = bucket_of(us)
    assert start_us(bucket) <= us < start_us(bucket + 1)
    assert us < 256 or (start_us(bucket + 1) - start_us(bucket)) <= us / 4 + 64


def test_buckets_follow_each_other_and_the_last_has_no_end() -> None:
    starts = [start_us(bucket) for bucket in range(BUCKETS + 1)]
    assert starts == sorted(set(starts))
    assert [bucket_of(us) for us in starts[:-1]] == list(range(BUCKETS))
    assert bucket_of(1 << 60) == BUCKETS - 1
    assert bucket_of(-5_000_000) == 0  # The clock was set back.


@given(st.lists(TIMES, min_size=1, max_size=50), st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_a_quantile_is_within_the_bucket_of_its_rank(times: list[int], part: float) -> None:
    counts: dict[int, int] = {}
    for us in times:
        add_up(counts, {bucket_of(us): 1})
    found = quantile_us(counts, part)
    assert found is not None
    rank = max(part * len(times), 1)
    exact = sorted(times)[int(-(-rank // 1)) - 1]
    assert start_us(bucket_of(exact)) <= found <= start_us(bucket_of(exact) + 1)


def test_nothing_has_no_quantile() -> None:
    assert quantile_us({}, 0.5) is None


def test_times_are_told_once_and_forgotten_where_nobody_wants_them() -> None:
    times = Times()
    times.want(True)
    times.wait(7, 1000, 3)
    times.wait(7, 1000, 2)
    times.work(7, 9_000_000, 1)
    times.wait(8, 0, 1)
    assert times.take(7) == ({bucket_of(1000): 5}, {bucket_of(9_000_000): 1})
    assert times.take(7) == ({}, {})
    times.want(False)
    assert times.take(8) == ({}, {})


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3), TIMES, st.integers(1, 1 << 40)), max_size=30))
def test_times_are_the_counts_of_all_that_was_noted(noted: list[tuple[bool, int, int, int]]) -> None:
    times = Times()
    expected: dict[tuple[bool, int], dict[int, int]] = {}
    for is_work, queue, us, count in noted:
        (times.work if is_work else times.wait)(queue, us, count)
        add_up(expected.setdefault((is_work, queue), {}), {bucket_of(us): count})
    for queue in (1, 2, 3):
        assert times.take(queue) == (expected.get((False, queue), {}), expected.get((True, queue), {}))
