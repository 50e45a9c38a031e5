"""Filters: the conditions of a query that the source takes over from Spark, and how little is read for them.

With the option `pushFilters`, Spark tells a batch what its rows must fulfil, all of it together: comparisons
of one column with values, what it has joined by `or` it keeps to itself. Those on `COLUMNS` are taken over.
Queues, offsets and times narrow the ranges that are asked for, one state is asked for alone, and what that
leaves is sorted out row by row as it comes. What is not taken over, Spark looks at itself, as if nothing had
been pushed.

Rules that always hold:
  * The same rows come out as without pushing. A value that is null fulfils no comparison, nor its opposite.
  * A condition is taken over wholly, or not at all.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS: Final = {
    "queue": str,
    "offset": int,
    "event_offset": int,
    "timestamp": datetime,
    "event": str,
    "state": str,
    "reason": str,
}
"""What conditions may be about, and of which kind its values are. Only `reason` may be null."""

STATES: Final = ("ready", "delayed", "held", "dead")
"""What the broker can be asked for of the view `state`."""

GAP_MAX: Final = 2000
"""Rows that nobody wants between others, up to which both are read in one go: another request costs more."""

_LEAST: Final = -(1 << 63)
_MOST: Final = 1 << 63
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_COMPARED: Final = {
    EqualTo: "equal",
    EqualNullSafe: "equal",
    GreaterThan: "greater",
    GreaterThanOrEqual: "greater_equal",
    LessThan: "less",
    LessThanOrEqual: "less_equal",
}
_MATCHED: Final = {
    StringStartsWith: "starts_with",
    StringEndsWith: "ends_with",
    StringContains: "match_substring",
}
"""Kinds of conditions, and the functions of Arrow's that decide them."""

Span = tuple[int, int]  # the end is exclusive


def is_taken(condition: Filter) -> bool:
    """Whether a condition can be decided here."""
    if isinstance(condition, Not):
        return is_taken(condition.child)
    (column, *inner) = getattr(condition, "attribute", ("",))
    kind = COLUMNS.get(column)
    if kind is None or inner:
        return False
    if isinstance(condition, (IsNull, IsNotNull)):
        return True
    if isinstance(condition, In):
        return all(_is_a(kind, value) for value in condition.value)
    if type(condition) in _MATCHED and kind is not str:
        return False
    return type(condition) in (*_COMPARED, *_MATCHED) and _is_a(kind, getattr(condition, "value", None))


def _is_a(kind: type, value: object) -> bool:
    # A time without a zone is one of another type, and `True` is a number to Python only.
    return type(value) is kind and not (isinstance(value, datetime) and value.tzinfo is None)


@dataclass(frozen=True)
class Where:
    """What the rows of a query must fulfil: all of these."""

    conditions: tuple[Filter, ...] = ()

    def _on(self, *columns: str) -> Iterator[Filter]:
        return (condition for condition in self.conditions if _column(condition) in columns)

    def queues(self, names: Sequence[str]) -> list[str]:
        """Those of some queues that have rows to read, as far as their names tell."""
        conditions = list(self._on("queue"))
        if not conditions or not names:
            return list(names)
        import pyarrow as pa

        column: Any = pa.array(names, pa.string())
        for condition in conditions:
            column = column.filter(_mask(condition, column))
        return [str(name) for name in column.to_pylist()]

    def spans(self, counter: str, start: int, end: int) -> list[Span]:
        """The parts of a range that have rows to read, going by the column that counts them."""
        wanted = _narrowed([(start, end)] if start < end else [], self._on(counter))
        joined: list[Span] = []
        for first, stop in wanted:
            if joined and first - joined[-1][1] <= GAP_MAX:
                joined[-1] = joined[-1][0], stop
            else:
                joined.append((first, stop))
        return joined

    def times(self) -> tuple[int | None, int | None]:
        """From which moment on, and before which, all rows are (µs since 1970); None: from any, to any."""
        wanted = _narrowed([(_LEAST, _MOST)], self._on("timestamp"))
        if not wanted:
            return 0, 0
        first, end = wanted[0][0], wanted[-1][1]
        return (None if first <= 0 else first), (None if end == _MOST else max(end, 0))

    def state(self) -> str | None:
        """How all rows stand, where a condition says that in one word that the broker knows."""
        for condition in self._on("state"):
            values: Any = getattr(condition, "value", None)
            words = list(values) if isinstance(condition, In) else [values]
            if isinstance(condition, (EqualTo, EqualNullSafe, In)) and len(words) == 1 and words[0] in STATES:
                return str(words[0])
        return None

    def rows(self, batch: "pa.RecordBatch", names: Sequence[str]) -> "pa.RecordBatch":
        """The rows of a batch that are wanted; `names` are those of its columns."""
        for condition in self.conditions:
            column = _column(condition)
            if column == "queue":
                continue  # decided when the query was planned
            mask = _mask(condition, batch.column(names.index(column)))
            # Most batches are wanted as they are: what is not copied costs nothing.
            if mask.null_count or mask.true_count < len(mask):
                batch = batch.filter(mask)
        return batch


def _column(condition: Filter) -> str:
    while isinstance(condition, Not):
        condition = condition.child
    name: str = getattr(condition, "attribute", ("",))[0]
    return name


# --- numbers and times -----------------------------------------------------------------------------


def _narrowed(spans: list[Span], conditions: Iterable[Filter]) -> list[Span]:
    """What is left of spans, in order, where conditions on a column without nulls hold."""
    for condition in conditions:
        others = _spans(condition)
        spans = [
            (max(first, low), min(end, high))
            for first, end in spans
            for low, high in others
            if max(first, low) < min(end, high)
        ]
    return spans


def _spans(condition: Filter) -> list[Span]:
    """The numbers that fulfil a condition, in order."""
    if isinstance(condition, Not):
        edges = [_LEAST, *(edge for span in _spans(condition.child) for edge in span), _MOST]
        return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]
    if isinstance(condition, IsNull):
        return []
    if isinstance(condition, IsNotNull):
        return [(_LEAST, _MOST)]
    if isinstance(condition, In):
        return [(number, number + 1) for number in sorted({_number(value) for value in condition.value})]
    number = _number(getattr(condition, "value", 0))
    low, high = {
        GreaterThan: (number + 1, _MOST),
        GreaterThanOrEqual: (number, _MOST),
        LessThan: (_LEAST, number),
        LessThanOrEqual: (_LEAST, number + 1),
    }.get(type(condition), (number, number + 1))
    return [(low, high)]


def _number(value: Any) -> int:
    if isinstance(value, datetime):
        return (value - _EPOCH) // timedelta(microseconds=1)
    return int(value)


# --- rows ------------------------------------------------------------------------------------------


def _mask(condition: Filter, column: "pa.Array") -> "pa.BooleanArray":
    """For each value of a column whether it fulfils a condition; null where SQL does not know."""
    import pyarrow as pa
    import pyarrow.compute as pc

    compute: Any = pc  # without types of its own
    if isinstance(condition, Not):
        return compute.invert(_mask(condition.child, column))
    if isinstance(condition, IsNull):
        return compute.is_null(column)
    if isinstance(condition, IsNotNull):
        return compute.is_valid(column)
    value: Any = getattr(condition, "value", None)
    if isinstance(condition, In):
        found = compute.is_in(column, value_set=pa.array(list(value), column.type))
        return compute.if_else(compute.is_valid(column), found, pa.scalar(None, pa.bool_()))
    match = _MATCHED.get(type(condition))
    if match is not None:
        return getattr(compute, match)(column, pattern=value)
    answer = getattr(compute, _COMPARED[type(condition)])(column, pa.scalar(value, column.type))
    return compute.fill_null(answer, False) if isinstance(condition, EqualNullSafe) else answer
