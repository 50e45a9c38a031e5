"""Timers: which ranges of messages reach the end of their time, and when. Right to the second.

A range is filed under the second in which its time is over, rounded up: `due` never names it
early, and names it within a second when it is called once a second. There is no cancelling.
Messages are settled, requeued or held long before their time, and nobody tells the timers; the
owner looks, when a range is due, which of its messages still are what they were, and whether
their expiry is still this one. What has no message any more is let go of by `sweep`: with a TTL of a
month, all that every queue was sent in a month would wait here.

Entries live in buckets of four columns (arrays: no object per entry), on three levels:

    level   a bucket covers       holds what is due
    0       1 second              in the current span of 1024 seconds, or earlier
    1       2**10 s (17 minutes)  in the 1023 spans after it
    2       2**20 s (12 days)     later

When the time reaches the start of a bucket of level 1 or 2, it is poured into the levels below.
So there are at most about a thousand buckets on each of the lower levels, however the times are
spread, and an entry is moved at most twice.

What it costs: nothing when nothing has a TTL (`due` looks at three empty lists). 24 bytes an
entry and some slack: a million take 25 MB. `add` takes about a microsecond, pouring half of one
for each entry of the bucket, all at once: a million entries within one span stop the caller for
half a second, some time in the 17 minutes before they are due. To sweep costs what looking costs,
twice for each entry at most, in slices.

Rules that always hold:
  * Time only comes in by `now_us`, and a clock that is set back does no harm: what is filed for
    a moment that `due` has passed already waits for that moment all the same.
  * `due` names every message that was added, as often as it was added, in the order of the
    seconds; or `sweep` was told that nobody wants it. A range that adjoins the one filed just
    before it for the same key and second is merged with it, unless that one has been poured in between.
"""

import sys
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from heapq import heappop, heappush
from typing import Final, Generic, TypeVar

from penstock.model.ids import OFFSET_MAX

Key = TypeVar("Key", bound=Hashable)

_OFFSET_END_MAX: Final = OFFSET_MAX + 1
SECOND_US: Final = 1_000_000
_SPAN_BITS: Final = 10  # a bucket of level 1 covers 2**10 seconds
_SPANS_AHEAD: Final = 1 << _SPAN_BITS  # how many of them level 1 may have
SWEEP_FROM: Final = 100_000
"""So many entries may be there without anybody looking whether they are wanted: 2.4 MB."""


class _Bucket:
    """Ranges that are due in the same second, span, or span of spans; one row each."""

    __slots__ = ("ends", "firsts", "owners", "seconds", "start")

    def __init__(self, start: int) -> None:
        self.start = start  # the first second that this bucket covers
        self.seconds = array("I")  # after `start`
        self.owners = array("i")  # the number of the key
        self.firsts = array("q")
        self.ends = array("q")

    def copy(self) -> "_Bucket":
        other = _Bucket(self.start)
        other.seconds, other.owners = self.seconds[:], self.owners[:]
        other.firsts, other.ends = self.firsts[:], self.ends[:]
        return other

    def remove(self, row: int) -> None:
        """The last row gets its place: within a bucket they have no order."""
        for column in (self.seconds, self.owners, self.firsts, self.ends):
            column[row] = column[-1]
            del column[-1]

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        return zip(self.seconds, self.owners, self.firsts, self.ends, strict=True)


class _Level:
    """Buckets of one width. A bucket's number is the second it starts at, without the low bits."""

    __slots__ = ("bits", "buckets", "numbers")

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.buckets: dict[int, _Bucket] = {}
        self.numbers: list[int] = []  # of all buckets, as a heap

    def copy(self) -> "_Level":
        other = _Level(self.bits)
        other.buckets = {number: bucket.copy() for number, bucket in self.buckets.items()}
        other.numbers = self.numbers[:]
        return other

    def reached(self, second: int) -> _Bucket | None:
        """Remove and return the first bucket, if it starts at `second` or before."""
        if self.numbers and self.numbers[0] << self.bits <= second:
            return self.buckets.pop(heappop(self.numbers))
        return None


class Timers(Generic[Key]):
    """Ranges of offsets by the second in which their time is over.

    `now_us` is only a hint: it saves what is added before the first `due` from an extra move.
    """

    __slots__ = (
        "_count",
        "_free",
        "_keys",
        "_last",
        "_levels",
        "_numbers",
        "_second",
        "_sweep_from",
        "_sweeping",
        "_uses",
    )

    def __init__(self, now_us: int = 0) -> None:
        self._levels: tuple[_Level, ...] = (_Level(0), _Level(_SPAN_BITS), _Level(2 * _SPAN_BITS))
        self._second = now_us // SECOND_US  # of the latest `due`
        self._count = 0
        # Rows name keys by small numbers. When no row uses a number any more, another key gets it.
        self._numbers: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._uses = array("q")  # by number: how many rows
        self._last = array("q")  # by number: in which row of its bucket the latest range was put
        self._free: list[int] = []
        self._sweep_from = SWEEP_FROM  # the next pass begins with so many entries
        self._sweeping: Iterator[None] | None = None  # one that is under way

    def __len__(self) -> int:
        """How many ranges are filed."""
        return self._count

    def __iter__(self) -> Iterator[tuple[int, Key, int, int]]:
        """Everything that is filed, in no order, as `add` takes it; moments are whole seconds."""
        for level in self._levels:
            for bucket in level.buckets.values():
                for after, owner, first, end in bucket.rows():
                    yield (bucket.start + after) * SECOND_US, self._keys[owner], first, end

    def copy(self) -> "Timers[Key]":
        """The same, for somebody who looks at it later. Keys are not copied."""
        other: Timers[Key] = Timers()
        other._levels = tuple(level.copy() for level in self._levels)
        other._second, other._count = self._second, self._count
        other._numbers, other._keys = self._numbers.copy(), self._keys.copy()
        other._uses, other._last, other._free = self._uses[:], self._last[:], self._free[:]
        return other

    def add(self, at_us: int, key: Key, first: int, end: int) -> None:
        """The time of the messages `first` to `end` (exclusive) of `key` is over at `at_us`."""
        if at_us <= 0 or not 0 <= first < end <= _OFFSET_END_MAX:
            raise ValueError(f"{key!r}: messages {first} to {end} at {at_us} µs: no such range or moment")
        second = -(-at_us // SECOND_US)
        owner = self._numbers.get(key)
        if owner is None:
            owner = self._number(key)
        bucket = self._bucket(second)
        owners = bucket.owners
        after = second - bucket.start
        # The row is a guess. Whatever it holds by now, if that belongs to this key and second and
        # adjoins, then it is right to make it longer.
        row = self._last[owner]
        if row < len(owners) and owners[row] == owner and bucket.seconds[row] == after:
            if bucket.ends[row] == first:
                bucket.ends[row] = end
                return
            if bucket.firsts[row] == end:
                bucket.firsts[row] = first
                return
        self._last[owner] = len(owners)
        self._uses[owner] += 1
        self._count += 1
        bucket.seconds.append(after)
        owners.append(owner)
        bucket.firsts.append(first)
        bucket.ends.append(end)

    def due(self, now_us: int) -> list[tuple[Key, int, int]]:
        """Remove and return (key, first, end) of everything whose second has come."""
        now = self._second = now_us // SECOND_US
        seconds, *coarser = self._levels
        for level in coarser:
            while (bucket := level.reached(now)) is not None:
                self._pour(bucket)
        found: list[tuple[Key, int, int]] = []
        while (bucket := seconds.reached(now)) is not None:
            keys = map(self._keys.__getitem__, bucket.owners)
            found.extend(zip(keys, bucket.firsts, bucket.ends, strict=True))
            for owner, rows in Counter(bucket.owners).items():
                self._let_go(owner, rows)
        return found

    def _let_go(self, owner: int, rows: int) -> None:
        """So many rows of a key are not there any more."""
        self._count -= rows
        self._uses[owner] -= rows
        if not self._uses[owner]:
            del self._numbers[self._keys.pop(owner)]
            self._free.append(owner)

    def sweep(self, is_wanted: Callable[[Key, int, int], bool], rows_max: int) -> None:
        """Look at some more rows, and let go of those that nobody wants. A pass over all of them begins when
        there are twice as many as the last one has left."""
        if self._sweeping is None and self._count >= self._sweep_from:
            self._sweeping = self._sweep(is_wanted)
        for _ in range(rows_max if self._sweeping is not None else 0):
            if self._sweeping is None or next(self._sweeping, self) is self:
                self._sweeping = None
                self._sweep_from = max(2 * self._count, SWEEP_FROM)
                return

    def _sweep(self, is_wanted: Callable[[Key, int, int], bool]) -> Iterator[None]:
        for level in self._levels:
            for number in list(level.buckets):
                row = sys.maxsize
                # From the last one on; between two of them, rows may come, or the time of the bucket.
                while (bucket := level.buckets.get(number)) is not None:
                    row = min(row, len(bucket.owners)) - 1
                    if row < 0:
                        break
                    owner = bucket.owners[row]
                    if not is_wanted(self._keys[owner], bucket.firsts[row], bucket.ends[row]):
                        bucket.remove(row)
                        self._let_go(owner, 1)
                    yield

    def _bucket(self, second: int) -> _Bucket:
        """The bucket for that second, on the level for its distance from now."""
        spans_ahead = (second >> _SPAN_BITS) - (self._second >> _SPAN_BITS)
        level = self._levels[0 if spans_ahead <= 0 else 1 if spans_ahead < _SPANS_AHEAD else 2]
        number = second >> level.bits
        bucket = level.buckets.get(number)
        if bucket is None:
            bucket = level.buckets[number] = _Bucket(number << level.bits)
            heappush(level.numbers, number)
        return bucket

    def _pour(self, source: _Bucket) -> None:
        """Move the rows of a bucket that time has reached into the levels below it."""
        for after, owner, first, end in source.rows():
            bucket = self._bucket(source.start + after)
            bucket.seconds.append(source.start + after - bucket.start)
            bucket.owners.append(owner)
            bucket.firsts.append(first)
            bucket.ends.append(end)

    def _number(self, key: Key) -> int:
        """A number for a key that has none."""
        if self._free:
            owner = self._free.pop()
        else:
            owner = len(self._uses)
            self._uses.append(0)
            self._last.append(0)
        self._numbers[key] = owner
        self._keys[owner] = key
        return owner
