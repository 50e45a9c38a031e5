"""Ranges over tasks, and a limit over queues."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.spark.splits import GROUP_MAX, PIECE_MAX, Range, shares, split

SIZES = st.one_of(st.integers(0, 50), st.integers(0, 3 * PIECE_MAX))


@st.composite
def some_ranges(draw: st.DrawFn) -> list[Range]:
    sizes = draw(st.lists(SIZES, max_size=8))
    return [Range(f"q{n}", start, start + size) for n, size in enumerate(sizes) for start in (n * 7,)]


@given(some_ranges(), st.none() | st.integers(1, 40))
def test_pieces_cover_the_ranges_in_order_each_offset_once(ranges: list[Range], wanted: int | None) -> None:
    tasks = split(ranges, wanted)
    at: dict[str, int] = {whole.queue: whole.start for whole in ranges}
    for task in tasks:
        assert task
        for piece in task:
            assert piece.start == at[piece.queue]
            assert 0 < piece.size <= PIECE_MAX
            at[piece.queue] = piece.end
    assert at == {whole.queue: whole.end for whole in ranges}


@given(some_ranges(), st.integers(1, 40))
def test_there_are_as_many_tasks_as_were_asked_for(ranges: list[Range], wanted: int) -> None:
    assert len(split(ranges, wanted)) >= min(wanted, sum(whole.size for whole in ranges))


@given(some_ranges())
def test_only_small_pieces_share_a_task(ranges: list[Range]) -> None:
    for task in split(ranges):
        assert len(task) == 1 or sum(piece.size for piece in task) <= GROUP_MAX


@pytest.mark.parametrize(
    ("sizes", "wanted", "tasks"),
    [
        ([], None, []),
        ([0, 0], 4, []),
        ([10], None, [10]),
        ([PIECE_MAX], None, [PIECE_MAX]),
        ([PIECE_MAX + 2], None, [PIECE_MAX // 2 + 1] * 2),
        ([10], 4, [2, 3, 2, 3]),
        ([2], 4, [1, 1]),
        ([10, 20, 30], None, [60]),
        ([10] * 1000, 4, [2500] * 4),
        ([1_000_003], 4, [250_000, 250_001, 250_001, 250_001]),
    ],
)
def test_sizes(sizes: list[int], wanted: int | None, tasks: list[int]) -> None:
    ranges = [Range(f"q{n:04}", 0, size) for n, size in enumerate(sizes)]
    assert [sum(piece.size for piece in task) for task in split(ranges, wanted)] == tasks


def test_small_queues_share_a_task_as_long_as_their_bytes_do() -> None:
    ranges = [Range(f"q{n}", 0, 10, bytes=weight) for n, weight in enumerate([40, 50, 20, 0, 100, 1])]
    assert [len(task) for task in split(ranges, bytes_max=100)] == [2, 2, 1, 1]
    assert [len(task) for task in split(ranges, bytes_max=10**9)] == [6]


def test_a_part_of_a_range_has_a_part_of_its_bytes() -> None:
    tasks = split([Range("q", 0, 2 * PIECE_MAX, bytes=100)], bytes_max=1000)
    assert [piece.bytes for task in tasks for piece in task] == [50, 50]


# --- shares ----------------------------------------------------------------------------------------


@given(st.dictionaries(st.text(), st.integers(0, 10**12)), st.integers(1, 10**9))
def test_shares_are_the_limit_and_nobody_starves(backlogs: dict[str, int], limit: int) -> None:
    given = shares(backlogs, limit)
    waiting = {queue: backlog for queue, backlog in backlogs.items() if backlog}
    assert given.keys() == waiting.keys()
    assert all(1 <= given[queue] <= waiting[queue] for queue in waiting)
    assert sum(given.values()) == min(max(limit, len(waiting)), sum(waiting.values()))


def test_shares_are_in_proportion() -> None:
    assert shares({"a": 9000, "b": 900, "c": 100, "d": 1, "e": 0}, 100) == {"a": 90, "b": 8, "c": 1, "d": 1}


def test_a_small_backlog_is_taken_whole() -> None:
    assert shares({"a": 3, "b": 4}, 7) == {"a": 3, "b": 4}
