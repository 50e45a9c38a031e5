"""RangeMap against a plain dict of offsets."""

import tracemalloc
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model import ranges
from penstock.model.life import Reason
from penstock.model.pending import Place, _Order, _Places
from penstock.model.ranges import RangeMap

VALUES: dict[type[RangeMap[Any]], dict[str, Any]] = {
    RangeMap: {it: it for it in "xyz"},
    _Order: {it: (ord(it), 1) for it in "xyz"},
    _Places: {
        "x": Place(7, 1),
        "y": Place(0, 1, Reason.EXPIRED, 9),
        "z": Place(0, 2, Reason.OPERATOR),
    },
}
"""By kind, the last two of which keep them as columns of numbers: what stands for letters there."""


def runs(model: dict[int, Any]) -> list[tuple[int, int, Any]]:
    """The canonical ranges of a plain dict."""
    found = []
    for _, group in groupby(enumerate(sorted(model)), lambda pair: (pair[1] - pair[0], model[pair[1]])):
        offsets = [offset for _, offset in group]
        found.append((offsets[0], offsets[-1] + 1, model[offsets[0]]))
    return found


@pytest.fixture(autouse=True, params=[3, 512], ids=["leaves-of-3", "leaves-of-512"])
def _leaf_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "LEAF_RANGES_MAX", request.param)


steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["add", "add", "cut", "put", "find", "pop", "pop-before", "copy", "copy-and-go-on-there"]
        ),
        st.integers(0, 60),
        st.integers(1, 25),
        st.sampled_from("xxxy"),
    ),
    max_size=60,
)


@pytest.mark.parametrize("kind", VALUES)
@settings(max_examples=200, deadline=None)
@given(steps)
def test_behaves_like_a_dict_of_offsets(
    kind: type[RangeMap[Any]], script: list[tuple[str, int, int, str]]
) -> None:
    subject = kind()
    model: dict[int, Any] = {}
    others: list[tuple[RangeMap[Any], list[tuple[int, int, Any]]]] = []  # copies, and what must be in them
    for verb, start, length, letter in script:
        end, value = start + length, VALUES[kind][letter]
        inside = {o: v for o, v in model.items() if start <= o < end}
        if verb == "add":
            if inside:
                with pytest.raises(ValueError, match="overlaps"):
                    subject.add(start, end, value)
            else:
                subject.add(start, end, value)
                model.update(dict.fromkeys(range(start, end), value))
        elif verb == "find":
            assert expand(subject.find(start, end)) == inside
            assert list(subject.walk(start, end)) == subject.find(start, end)
            assert subject.count(start, end) == (len(subject.find(start, end)), len(inside))
            columns = [run for leaf in subject.columns() for run in zip(*leaf, strict=True)]
            assert columns == list(subject)
        elif verb.startswith("copy"):
            other = subject.copy()
            if verb != "copy":
                subject, other = other, subject
            others.append((other, runs(model)))
        elif verb == "put":  # "z" is in no script: it stands once at most
            first, stop, _ = next((run for run in runs(model) if run[1] > start), (0, 0, ""))
            last = VALUES[kind]["z"]
            if first < stop and last not in model.values():
                subject.put(first, last)
                model.update(dict.fromkeys(range(first, stop), last))
        elif verb == "cut":
            assert expand(subject.cut(start, end)) == inside
            for offset in inside:
                del model[offset]
        else:
            before = start if verb == "pop-before" else None
            popped = subject.pop_front(length, before)
            expected = runs(model)[:1]
            if not expected or (before is not None and expected[0][0] >= before):
                assert popped is None
            else:
                first, stop, expected_value = expected[0]
                stop = min(stop, first + length, before if before is not None else stop)
                assert popped == (first, stop, expected_value)
                for offset in range(first, stop):
                    del model[offset]
        assert list(subject) == runs(model)
        assert subject.total == len(model)
        assert len(subject) == len(runs(model))
        assert bool(subject) == bool(model)
        assert subject.first == min(model, default=None)
        assert [subject.get(o) for o in range(90)] == [model.get(o) for o in range(90)]
        assert [(list(other), other.total) for other, _ in others] == [
            (expected, sum(b - a for a, b, _ in expected)) for _, expected in others
        ]


def expand(pieces: list[tuple[int, int, Any]]) -> dict[int, Any]:
    return {offset: value for start, end, value in pieces for offset in range(start, end)}


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        RangeMap[str]().add(5, 5, "x")


def test_a_huge_backlog_is_one_range() -> None:
    subject: RangeMap[None] = RangeMap()
    for start in range(0, 100_000_000, 10_000_000):
        subject.add(start, start + 10_000_000, None)
    assert len(subject) == 1
    assert subject.pop_front(500) == (0, 500, None)
    assert subject.total == 100_000_000 - 500


def test_one_range_takes_little() -> None:
    maps: list[RangeMap[None]] = [RangeMap() for _ in range(1000)]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for subject in maps:
            subject.add(0, 1, None)
            subject.add(1, 2, None)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / len(maps) < 100
