"""Period: the time that a report is about, as somebody says it, and the buckets that it is cut into.

A moment is said as a time (ISO 8601, UTC where it names no zone) or as how long ago it was (`90s`, `15m`,
`1h`, `7d`, `2w`). Here all of them are whole microseconds since 1970, and ends are exclusive.

How it fails: `NoMoment`, which says what would be right.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from penstock.errors import PenstockError

SECOND_US: Final = 1_000_000
BUCKETS_MAX: Final = 120
"""Enough to see when something happened, and few enough to be drawn on a phone."""

BUCKETS_SECONDS: Final = (
    *(1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10_800, 21_600, 43_200),
    *(86_400, 604_800),
)
"""Lengths that people count in. Each divides the next, or the day, so that buckets begin at round times."""

_UNITS_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_AGO: Final = re.compile(r"(\d{1,9})([smhdw])", re.ASCII)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_US: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)


class NoMoment(PenstockError, ValueError):
    """A text that says no moment."""


class Period(NamedTuple):
    """What was asked for. None: from the first event that there is, up to the last."""

    start_us: int | None = None
    end_us: int | None = None


class Span(NamedTuple):
    """A time with a beginning and an end, in buckets that begin at multiples of their length."""

    start_us: int
    end_us: int
    bucket_us: int

    @property
    def seconds(self) -> float:
        return (self.end_us - self.start_us) / SECOND_US

    def buckets(self) -> range:
        """Where the buckets begin; the first and the last may reach beyond the span."""
        return range(self.start_us // self.bucket_us * self.bucket_us, self.end_us, self.bucket_us)

    def seconds_of(self, bucket: int) -> float:
        """How much of a bucket lies within the span."""
        start, end = max(bucket, self.start_us), min(bucket + self.bucket_us, self.end_us)
        return (end - start) / SECOND_US


def moment_us(text: str, now_us: int) -> int:
    """The moment that a text says."""
    ago = _AGO.fullmatch(text.strip())
    if ago is not None:
        return max(now_us - int(ago[1]) * _UNITS_SECONDS[ago[2]] * SECOND_US, 0)
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise NoMoment(
            f"{text!r} is no time; use 2030-01-31T12:00:00Z (UTC where it names no zone), "
            "or how long ago it was: 90s, 15m, 1h, 7d, 2w"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return min(max((moment - _EPOCH) // timedelta(microseconds=1), 0), _LAST_US)


def datetime_of(time_us: int) -> datetime:
    return _EPOCH + timedelta(microseconds=time_us)


def span_of(start_us: int, end_us: int) -> Span:
    """That time, in the shortest buckets of which there are not too many."""
    end_us = max(end_us, start_us + 1)
    for seconds in BUCKETS_SECONDS:
        span = Span(start_us, end_us, seconds * SECOND_US)
        if len(span.buckets()) <= BUCKETS_MAX:
            return span
    # Years of it: as many weeks as it takes.
    weeks = -(-len(span.buckets()) // (BUCKETS_MAX - 1))
    return Span(start_us, end_us, weeks * span.bucket_us)
