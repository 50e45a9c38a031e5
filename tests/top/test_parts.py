"""The parts of `penstock top` that draw nothing by themselves: sparks, the history, the widths of columns."""

import base64

import pytest
from rich.cells import cell_len

from penstock.cli.peek import body_of
from penstock.client.http_core import Answer
from penstock.top import columns
from penstock.top.history import MOMENTS_MAX, History
from penstock.top.queue import BODY_BYTES_SHOWN, shortened
from penstock.top.sparks import spark


def queue(name: str = "orders", **fields: object) -> Answer:
    names = ("ready", "held", "delayed", "dead", "rate_in", "rate_out", "consumers", "bytes")
    numbers = dict.fromkeys(names, 0)
    return {"name": name, "oldest_seconds": None, "paused": False, **numbers, **fields}


# --- sparks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "width", "height", "lines"),
    [
        ([0, 1, 2, 4, 8], 5, 1, ["▁▃▄▅█"]),
        ([0, 0], 4, 1, ["  ▁▁"]),
        ([], 3, 1, ["   "]),
        ([9, 9, 9, 1, 1], 2, 1, ["██"]),
        ([0.001, 1000], 2, 1, ["▂█"]),
        ([0, 5, 10], 3, 2, [" ▁█", "▁██"]),
        ([1, 2], 0, 1, [""]),
    ],
)
def test_sparks(values: list[float], width: int, height: int, lines: list[str]) -> None:
    assert spark(values, width, height) == lines


# --- history -------------------------------------------------------------------------------------------


def test_the_history_is_bounded_and_forgets_what_is_gone() -> None:
    history = History()
    for moment in range(MOMENTS_MAX + 5):
        history.add([queue("a", rate_in=moment, ready=2, held=1), queue("idle"), queue("b", rate_out=1.5)])
    assert list(history.of("a").of("rate_in")) == list(range(5, MOMENTS_MAX + 5))
    assert set(history.of("a").of("backlog")) == {3}
    assert set(history.of("b").of("rate_out")) == {1.5}
    assert list(history.of("idle").of("rate_in")) == []
    assert history.total.of("rate_out")[-1] == 1.5
    history.add([queue("b")])
    assert list(history.of("a").of("rate_in")) == []
    assert history.of("b").of("rate_out")[-1] == 0


# --- messages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", range(5))
@pytest.mark.parametrize("character", ["x", "ü", "世", "🙂"])
def test_a_long_text_stays_text_when_it_is_cut_off(before: int, character: str) -> None:
    text = "-" * before + character * 2000
    shown = body_of(shortened({"value_base64": base64.b64encode(text.encode()).decode()})).decode()
    assert text.startswith(shown)
    assert BODY_BYTES_SHOWN - 4 <= len(shown.encode()) <= BODY_BYTES_SHOWN


@pytest.mark.parametrize("body", [b"", b"short", b"\x80\xff", "ü".encode()])
def test_a_short_body_is_shown_as_it_is(body: bytes) -> None:
    assert body_of(shortened({"value_base64": base64.b64encode(body).decode()})) == body


# --- columns -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999_999, "999,999"),
        (1_000_000, "1 M"),
        (12_345_678, "12.3 M"),
        (987_600_000, "988 M"),
        (1_500_000_000, "1.5 G"),
        (7 * 10**15, "7,000 T"),
    ],
)
def test_counts_are_short(number: int, text: str) -> None:
    assert columns.short_count(number) == text


BUSY = queue(
    "a.rather.long.name.of.a.queue" * 3,
    ready=10**9,
    held=123_456,
    delayed=54_321,
    dead=999_999,
    rate_in=98_765.4,
    rate_out=98_765.4,
    oldest_seconds=86_399.0,
    consumers=9_999,
    bytes=10**12,
)


@pytest.mark.parametrize("width", [80, 100, 132, 250])
@pytest.mark.parametrize(
    "rows", [[], [queue()], [BUSY], [BUSY, queue()]], ids=["none", "idle", "busy", "both"]
)
def test_columns_fit_the_terminal(width: int, rows: list[Answer]) -> None:
    shape = columns.layout(columns.grown({}, rows), width)
    assert sum(shape.values()) + columns.gap_of(width) * (len(shape) - 1) <= width
    delayed = ["delayed"] if BUSY in rows else []  # which has a column where there is one
    numbers = ["ready", "held", *delayed, "dead", "rate_in", "rate_out", "oldest_seconds", "consumers"]
    assert [field for field in shape if field not in ("name", "bytes", "trend")] == numbers
    for row in rows:
        for field in numbers:
            assert len(columns.text_of(field, row[field])) <= shape[field], field
    assert ("bytes" in shape) or width < 132


def test_widths_never_shrink() -> None:
    before = columns.grown({}, [BUSY])
    assert columns.grown(before, [queue()]) == before


@pytest.mark.parametrize(
    ("name", "width", "shown"),
    [
        ("orders", 8, "orders  "),
        ("orders", 6, "orders"),
        ("region.1.sensor-0042", 12, "regio…r-0042"),
        ("region.1.sensor-0042", 5, "regi…"),
        ("世界世界世界", 9, "世界…世界"),
        ("x" * 10, 0, ""),
        ("x" * 10, -3, ""),
    ],
)
def test_names_are_cut_in_the_middle(name: str, width: int, shown: str) -> None:
    assert columns.fit_name(name, width) == shown
    assert cell_len(shown) == max(width, 0)
