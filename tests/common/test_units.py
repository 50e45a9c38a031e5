"""Numbers as people read them; `tests/dashboard/test_words.py` asks the browser for the same."""

from datetime import UTC, datetime, timedelta

import pytest

from penstock.common import tables, units

SAID: dict[str, dict[float, str]] = {
    "count": {0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567"},
    "rate": {0: "0", 0.01: "<0.1", 0.05: "0.1", 3.14: "3.1", 9.9: "9.9", 9.96: "10", 1234.4: "1,234"},
    "age": {
        -0.1: "<1 s",
        0: "<1 s",
        0.94: "<1 s",
        1: "1 s",
        119: "119 s",
        120: "2 min",
        3599: "59 min",
        3600: "1 h",
        3700: "1 h 1 min",
        35_999: "9 h 59 min",
        36_000: "10 h",
        86_399: "23 h",
        86_400: "1 d",
        49 * 3600: "2 d 1 h",
        11 * 86400 + 3600: "11 d",
    },
    "duration": {
        0: "0 s",
        -0.1: "0 s",
        0.0000004: "0.4 µs",
        0.00034: "340 µs",
        0.0012: "1.2 ms",
        0.0796: "79.6 ms",
        0.99999: "1 s",
        3.4: "3.4 s",
        59.96: "1 min",
        125: "2 min 5 s",
        7200: "2 h",
        12_000: "3 h 20 min",
        190_000: "2 d 4 h",
    },
    "size": {
        0: "0 B",
        1023: "1023 B",
        1024: "1.0 KiB",
        123456: "121 KiB",
        1.5e9: "1.4 GiB",
        2e15: "1.8 PiB",
        1 << 62: "4096 PiB",
    },
}


@pytest.mark.parametrize("kind", SAID)
def test_as_in_the_browser(kind: str) -> None:
    write = getattr(units, kind)
    assert {value: write(value) for value in SAID[kind]} == SAID[kind]


def test_a_duration_that_is_not_known() -> None:
    assert units.duration(None) == "–"


def test_numbers() -> None:
    assert [units.short(n) for n in (0, 0.25, 12.34, 999, 1500, 2_000_000)] == [
        *("0", "0.25", "12.3", "999", "1.5 k", "2 M")
    ]
    assert [units.percent(part, 1000) for part in (0, 0.5, 25, 250, 1000)] == [
        *("0 %", "< 0.1 %", "2.5 %", "25 %", "100 %")
    ]
    assert [units.signed(n) for n in (-1200, 0, 1200)] == ["−1,200", "0", "+1,200"]
    assert units.listed({"expired": 3, "rejected": 25, "none": 0}) == "25 rejected, 3 expired"
    assert units.counted(1, "delivery", "deliveries") == "1 delivery"
    assert units.counted(2000, "queue") == "2,000 queues"


def test_times() -> None:
    time = datetime(2026, 11, 15, 14, 3, 7, 999_999, tzinfo=UTC)
    assert units.moment(time) == "2026-11-15 14:03:07"
    assert units.since("2026-11-15T14:03:07Z", time + timedelta(hours=3, minutes=5)) == "3 h 5 min"


def test_what_is_not_known() -> None:
    assert {units.count(None), units.age(None), units.moment(None), units.percent(1, 0)} == {"–"}
    # A terminal may have no such sign.
    assert tables.age(None) == "-"
    assert tables.age(61) == "61 s"
