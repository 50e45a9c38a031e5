"""RangeMap: disjoint ranges of offsets, in order, each with a value.

The state of a queue is kept in these, so its size follows the number of *runs* of messages that
share a fate, not the number of messages: a backlog of 100 million is one range.

Rules that always hold:
  * ranges are `start <= offset < end`, never empty, never overlapping, in ascending order;
  * neighbours that touch and have equal values are one range;
  * `total` is the number of offsets covered.

Ranges live in leaves of at most `LEAF_RANGES_MAX`, so that a change in the middle moves a few
hundred entries even when there are a million runs. The common moves, taking from the front and
extending the end, touch one entry. Their bounds are columns of numbers: a range takes 24 bytes and what
its value does, and the garbage collector has nothing to look at but the values. Where each range has a value
of its own, these can be columns of numbers too (`Packed`).

Most maps have one range, and there may be a hundred thousand of these: it stands in the map itself, which
takes a quarter of what it would take with a leaf. With the second range comes the first leaf.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any, Final, Generic, TypeVar, overload

V = TypeVar("V")

LEAF_RANGES_MAX = 512

Piece = tuple[int, int, V]

_NOTHING: Final[list[Any]] = []
"""The lists of all maps that are empty, to which nobody adds: most of many queues have nothing in most."""


class Packed(Generic[V]):
    """Values that are some numbers each, one behind the other as in a list: each kind of number in a column
    of its own. Which numbers a value is, a subclass knows."""

    __slots__ = ("_columns",)

    def __init__(self, columns: "list[array[int]]") -> None:
        self._columns = columns

    def _value(self, at: int) -> V:
        raise NotImplementedError

    def __setitem__(self, at: int, value: V) -> None:
        raise NotImplementedError

    def insert(self, at: int, value: V) -> None:
        raise NotImplementedError

    @overload
    def __getitem__(self, at: int) -> V: ...
    @overload
    def __getitem__(self, at: slice) -> "Packed[V]": ...
    def __getitem__(self, at: "int | slice") -> "V | Packed[V]":
        if isinstance(at, int):
            return self._value(at)
        return type(self)([column[at] for column in self._columns])

    def __delitem__(self, at: "int | slice") -> None:
        for column in self._columns:
            del column[at]

    def __len__(self) -> int:
        return len(self._columns[0])

    def __iter__(self) -> Iterator[V]:
        return map(self._value, range(len(self)))


class _Leaf(Generic[V]):
    __slots__ = ("ends", "shared", "starts", "values")

    def __init__(self, starts: "array[int]", ends: "array[int]", values: list[V] | Packed[V]) -> None:
        self.starts = starts
        self.ends = ends
        self.values = values
        self.shared = False  # a copy of the map has it too: it must not be changed any more


class RangeMap(Generic[V]):
    """Not thread-safe; owned by one loop."""

    __slots__ = ("_firsts", "_leaves", "_start", "_value", "total")

    def __init__(self) -> None:
        self._leaves: list[_Leaf[V]] = _NOTHING
        self._firsts: list[int] = _NOTHING  # the first start of each leaf
        # Without leaves: the one range, of `total` offsets; where that is 0, there is none.
        self._start = 0
        self._value: Any = None  # Any: a V, where there is a range
        self.total = 0

    def __len__(self) -> int:
        return sum(len(starts) for starts, _, _ in self.columns())

    def __bool__(self) -> bool:
        return self.total > 0

    def __iter__(self) -> Iterator[Piece[V]]:
        for starts, ends, values in self.columns():
            yield from zip(starts, ends, values, strict=True)

    def __repr__(self) -> str:
        inside = ", ".join(f"[{s}, {e}): {v!r}" for s, e, v in self)
        return f"RangeMap({{{inside}}})"

    @property
    def first(self) -> int | None:
        """The lowest offset covered."""
        if self._leaves:
            return self._firsts[0]
        return self._start if self.total else None

    def _alone(self) -> _Leaf[V]:
        """The range that stands in the map itself, as a leaf."""
        starts, ends = array("q", (self._start,)), array("q", (self._start + self.total,))
        return _Leaf(starts, ends, self._values(self._value))

    def _values(self, value: V) -> list[V] | Packed[V]:
        """What keeps the values of a leaf, with one."""
        return [value]

    def _spread(self) -> None:
        """There are going to be more ranges than one."""
        self._leaves, self._firsts = [self._alone()], [self._start]
        self._value = None

    def _clipped(self, start: int, end: int) -> list[Piece[V]]:
        """Without leaves: what `find` finds."""
        first, stop = max(self._start, start), min(self._start + self.total, end)
        return [(first, stop, self._value)] if first < stop else []

    def add(self, start: int, end: int, value: V) -> None:
        """Cover `start` to `end`, of which nothing may be covered yet."""
        if start >= end:
            raise ValueError(f"the range [{start}, {end}) is empty")
        if not self._leaves:
            if not self.total:
                self._start, self._value, self.total = start, value, end - start
                return
            if start == self._start + self.total and self._value == value:
                self.total += end - start
                return
            self._spread()
        leaves = self._leaves
        leaf_index = bisect_right(self._firsts, start) - 1
        if leaf_index < 0:
            leaf_index = 0
        leaf = leaves[leaf_index]
        if leaf.shared:
            leaf = self._own(leaf_index)
        starts, ends, values = leaf.starts, leaf.ends, leaf.values
        at = bisect_right(starts, start)
        if at and ends[at - 1] > start:
            raise ValueError(f"[{start}, {end}) overlaps [{starts[at - 1]}, {ends[at - 1]})")
        # The neighbour above may be the first range of the next leaf.
        if at < len(starts):
            above, above_at = leaf, at
        elif leaf_index + 1 < len(leaves):
            above, above_at = leaves[leaf_index + 1], 0
        else:
            above, above_at = None, 0
        if above is not None and above.starts[above_at] < end:
            raise ValueError(f"[{start}, {end}) overlaps [{above.starts[above_at]}, {above.ends[above_at]})")
        self.total += end - start
        joins_below = at > 0 and ends[at - 1] == start and values[at - 1] == value
        joins_above = above is not None and above.starts[above_at] == end and above.values[above_at] == value
        if joins_below:
            if joins_above and above is not None:
                ends[at - 1] = above.ends[above_at]
                self._delete(leaf_index if above is leaf else leaf_index + 1, above_at)
            else:
                ends[at - 1] = end
        elif joins_above and above is not None:
            if above is not leaf:
                leaf_index += 1
                above = self._own(leaf_index)
            above.starts[above_at] = start
            if above_at == 0:
                self._firsts[leaf_index] = start
        else:
            starts.insert(at, start)
            ends.insert(at, end)
            values.insert(at, value)
            if at == 0:
                self._firsts[leaf_index] = start
            if len(starts) > LEAF_RANGES_MAX:
                self._split(leaf_index)

    def copy(self) -> "RangeMap[V]":
        """The same ranges with the same values. What either map changes from now on it copies first."""
        other: RangeMap[V] = type(self)()
        if self._leaves:
            for leaf in self._leaves:
                leaf.shared = True
            other._leaves, other._firsts = self._leaves[:], self._firsts[:]
        other._start, other._value, other.total = self._start, self._value, self.total
        return other

    def _own(self, leaf_index: int) -> _Leaf[V]:
        """A leaf that may be changed."""
        leaf = self._leaves[leaf_index]
        if leaf.shared:
            leaf = self._leaves[leaf_index] = _Leaf(leaf.starts[:], leaf.ends[:], leaf.values[:])
        return leaf

    def _delete(self, leaf_index: int, at: int) -> None:
        leaf = self._own(leaf_index)
        del leaf.starts[at], leaf.ends[at], leaf.values[at]
        if not leaf.starts:
            del self._leaves[leaf_index], self._firsts[leaf_index]
        elif at == 0:
            self._firsts[leaf_index] = leaf.starts[0]

    def _split(self, leaf_index: int) -> None:
        leaf = self._leaves[leaf_index]
        # The last one stays full: most ranges come in order, and the next ones go behind it.
        half = len(leaf.starts) // 2 if leaf_index + 1 < len(self._leaves) else LEAF_RANGES_MAX
        upper = _Leaf(leaf.starts[half:], leaf.ends[half:], leaf.values[half:])
        del leaf.starts[half:], leaf.ends[half:], leaf.values[half:]
        self._leaves.insert(leaf_index + 1, upper)
        self._firsts.insert(leaf_index + 1, upper.starts[0])

    def get(self, offset: int) -> V | None:
        """The value at `offset`, or None where nothing covers it."""
        if not self._leaves:
            return self._value if self._start <= offset < self._start + self.total else None
        leaf_index = bisect_right(self._firsts, offset) - 1
        if leaf_index < 0:
            return None
        leaf = self._leaves[leaf_index]
        at = bisect_right(leaf.starts, offset) - 1
        return leaf.values[at] if leaf.ends[at] > offset else None

    def put(self, start: int, value: V) -> None:
        """Another value for the range that begins at `start`, where it touches none that has that one."""
        if not self._leaves:
            self._value = value
            return
        leaf = self._own(bisect_right(self._firsts, start) - 1)
        leaf.values[bisect_right(leaf.starts, start) - 1] = value

    def find(self, start: int, end: int) -> list[Piece[V]]:
        """What is covered between `start` and `end`, clipped to them."""
        return list(self.walk(start, end))

    def walk(self, start: int, end: int) -> Iterator[Piece[V]]:
        """What `find` finds, one by one, for those who may stop early. Nothing may change meanwhile."""
        if start >= end:
            return
        if not self._leaves:
            yield from self._clipped(start, end)
            return
        for leaf_index in range(max(bisect_right(self._firsts, start) - 1, 0), len(self._leaves)):
            leaf = self._leaves[leaf_index]
            starts, ends, values = leaf.starts, leaf.ends, leaf.values
            at = max(bisect_right(starts, start) - 1, 0)
            if ends[at] <= start:
                at += 1
            for i in range(at, len(starts)):
                if starts[i] >= end:
                    return
                yield max(starts[i], start), min(ends[i], end), values[i]

    def count(self, start: int, end: int) -> tuple[int, int]:
        """How many ranges there are between `start` and `end`, and how many offsets they have there."""
        ranges = offsets = 0
        if not self._leaves:
            pieces = self._clipped(start, end)
            return (1, pieces[0][1] - pieces[0][0]) if pieces else (0, 0)
        for leaf_index in range(
            max(bisect_right(self._firsts, start) - 1, 0), bisect_left(self._firsts, end)
        ):
            leaf = self._leaves[leaf_index]
            lo = bisect_right(leaf.ends, start)
            hi = bisect_left(leaf.starts, end)
            if lo < hi:
                ranges += hi - lo
                offsets += sum(leaf.ends[lo:hi]) - sum(leaf.starts[lo:hi])
                offsets -= max(start - leaf.starts[lo], 0) + max(leaf.ends[hi - 1] - end, 0)
        return ranges, offsets

    def columns(self) -> "Iterator[tuple[array[int], array[int], list[V] | Packed[V]]]":
        """Everything in columns, some hundreds of ranges at a time: starts, ends, values."""
        for leaf in self._leaves or ([self._alone()] if self.total else []):
            yield leaf.starts, leaf.ends, leaf.values

    def cut(self, start: int, end: int) -> list[Piece[V]]:
        """Remove everything between `start` and `end`; what was there, clipped to them."""
        removed: list[Piece[V]] = []
        if start >= end:
            return removed
        if not self._leaves:
            removed = self._clipped(start, end)
            if not removed:
                return removed
            first, stop, _ = removed[0]
            if first == self._start or stop == self._start + self.total:
                if first == self._start:
                    self._start = stop
                self.total -= stop - first
                if not self.total:
                    self._value = None
                return removed
            removed = []
            self._spread()
        leaf_index = max(bisect_right(self._firsts, start) - 1, 0)
        while leaf_index < len(self._leaves) and self._firsts[leaf_index] < end:
            leaf = self._leaves[leaf_index]
            starts, ends, values = leaf.starts, leaf.ends, leaf.values
            lo = max(bisect_right(starts, start) - 1, 0)
            if ends[lo] <= start:
                lo += 1
            hi = bisect_left(starts, end, lo)
            if lo >= hi:
                leaf_index += 1
                continue
            if leaf.shared:
                leaf = self._own(leaf_index)
                starts, ends, values = leaf.starts, leaf.ends, leaf.values
            for at in range(lo, hi):
                removed.append((max(starts[at], start), min(ends[at], end), values[at]))
            keeps_head, keeps_tail = starts[lo] < start, ends[hi - 1] > end
            if keeps_head and keeps_tail and hi - lo == 1:
                starts.insert(hi, end)
                ends.insert(hi, ends[lo])
                values.insert(hi, values[lo])
                ends[lo] = start
            else:
                if keeps_head:
                    ends[lo] = start
                    lo += 1
                if keeps_tail:
                    hi -= 1
                    starts[hi] = end
                del starts[lo:hi], ends[lo:hi], values[lo:hi]
            if not starts:
                del self._leaves[leaf_index], self._firsts[leaf_index]
                continue
            self._firsts[leaf_index] = starts[0]
            if len(starts) > LEAF_RANGES_MAX:
                self._split(leaf_index)
                leaf_index += 1
            leaf_index += 1
        for piece_start, piece_end, _ in removed:
            self.total -= piece_end - piece_start
        return removed

    def pop_front(self, count: int, before: int | None = None) -> Piece[V] | None:
        """Remove up to `count` offsets from the first range, none of them at or past `before`."""
        leaf = self._own(0) if self._leaves else None
        start, limit = (leaf.starts[0], leaf.ends[0]) if leaf else (self._start, self._start + self.total)
        stop = min(start + count, limit)
        if before is not None and stop > before:
            stop = before
        if stop <= start:
            return None
        if leaf is None:
            value = self._value
            self._start = stop
            if stop == limit:
                self._value = None
        else:
            value = leaf.values[0]
            if stop == limit:
                self._delete(0, 0)
            else:
                leaf.starts[0] = self._firsts[0] = stop
        self.total -= stop - start
        return start, stop, value
