"""The condition of a search or a redrive as a tree, and the tree as text. The text as a tree is in `read.py`.

Two kinds of nodes: an operand stands for a value of a row (`Column`, `Path`, `Literal`, `Relative`), a
condition is true, false or unknown of a row (all others). `written` gives the normal form of a condition, the
text that `read.read` makes the same tree of: lower case, no needless parentheses, `!=` for `<>`, UTC.

Rules that always hold for a tree that was read, and that all who walk one rely on:
  * Nodes are values: equal trees are the same condition.
  * Operands that meet in a comparison may be of one kind. A text that meets a time has become one.
  * `Not` stands only before what has no opposite of its own: `negated` is the only one who makes it.
  * `And` and `Or` have two parts or more, and none of their own kind.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Final


class Kind(Enum):
    """What an operand's value is, as far as that can be said without a row."""

    NUMBER = "a number"
    TEXT = "text"
    BOOLEAN = "true or false"
    TIME = "a time"
    NULL = "null"
    JSON = "whatever the payload has there"


COLUMNS: Final[dict[str, Kind]] = {
    "queue": Kind.TEXT,
    "offset": Kind.NUMBER,
    "id": Kind.TEXT,
    "attempts": Kind.NUMBER,
    "reason": Kind.TEXT,
    "consumer": Kind.TEXT,
    "protocol": Kind.TEXT,
    "timestamp": Kind.TIME,
    "died": Kind.TIME,
    "expires": Kind.TIME,
    "retries": Kind.NUMBER,
    "value": Kind.TEXT,
    "value_bytes": Kind.NUMBER,
    "state": Kind.TEXT,
    "due": Kind.TIME,
}
"""The columns of a message, in the order of `condition.Row`."""

OPPOSITE: Final = {"=": "!=", "!=": "=", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
"""Every comparison, and the one that is true exactly where it is false."""

PAYLOAD: Final = "value"
"""The column whose fields are reached by a path."""

HEADERS: Final = "headers"
"""What the path to a header begins with; no column by itself."""


# --- Operands ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    name: str


@dataclass(frozen=True, slots=True)
class Path:
    """A place in the JSON payload: names of objects' fields, numbers of arrays' items. Or the name of a
    header, which is one step."""

    steps: tuple[str | int, ...]
    root: str = PAYLOAD


@dataclass(frozen=True, slots=True)
class Literal:
    """A value that stands in the condition. A time is in microseconds since 1970, UTC.

    The kind is a part of the value: to Python, true and 1 are equal.
    """

    kind: Kind
    value: bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class Relative:
    """So many microseconds after now, or before it where they are negative."""

    microseconds: int


Operand = Column | Path | Literal | Relative
Constant = Literal | Relative


def kind_of(operand: Operand) -> Kind:
    match operand:
        case Column(name):
            return COLUMNS[name]
        case Path(_, root):
            return Kind.JSON if root == PAYLOAD else Kind.TEXT
        case Literal(kind):
            return kind
        case Relative():
            return Kind.TIME


# --- Conditions ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compare:
    left: Operand
    operator: str  # one of OPPOSITE
    right: Operand


@dataclass(frozen=True, slots=True)
class In:
    operand: Operand
    items: tuple[Constant, ...]


@dataclass(frozen=True, slots=True)
class Between:
    operand: Operand
    low: Operand
    high: Operand


@dataclass(frozen=True, slots=True)
class Like:
    operand: Operand
    pattern: str  # as it was written, with its backslashes


@dataclass(frozen=True, slots=True)
class IsNull:
    operand: Operand


@dataclass(frozen=True, slots=True)
class Not:
    part: "Node"


@dataclass(frozen=True, slots=True)
class And:
    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Or:
    parts: "tuple[Node, ...]"


Node = Compare | In | Between | Like | IsNull | Not | And | Or


def negated(node: Node) -> Node:
    """What is true exactly where `node` is false, and unknown exactly where it is unknown."""
    match node:
        case Not(part):
            return part
        case Compare(left, operator, right):
            return Compare(left, OPPOSITE[operator], right)
        case _:
            return Not(node)


def joined(kind: type[And] | type[Or], parts: list[Node]) -> Node:
    """`parts` as one condition; parts of the same kind are taken apart, because it makes no difference."""
    if len(parts) == 1:
        return parts[0]
    flat: list[Node] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, And | Or) and isinstance(part, kind) else (part,))
    return kind(tuple(flat))


def operands_of(node: Node) -> Iterator[Operand]:
    """Every operand in a condition but the items of lists, which are constants."""
    match node:
        case And(parts) | Or(parts):
            for part in parts:
                yield from operands_of(part)
        case Not(part):
            yield from operands_of(part)
        case Compare(left, _, right):
            yield from (left, right)
        case Between(operand, low, high):
            yield from (operand, low, high)
        case In(operand) | Like(operand) | IsNull(operand):
            yield operand


def columns_of(node: Node) -> frozenset[str]:
    """The columns that must be known of a row to judge it."""
    return frozenset(
        operand.name if isinstance(operand, Column) else operand.root
        for operand in operands_of(node)
        if isinstance(operand, Column | Path)
    )


# --- Times ---------------------------------------------------------------------------------

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_TIME_MIN_US: Final = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
_TIME_MAX_US: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND

_ISO: Final = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})"
    r"(?:[Tt ]([0-9]{2}:[0-9]{2})(:[0-9]{2})?(?:\.([0-9]{1,9}))?([Zz]|[+-][0-9]{2}(?::?[0-9]{2})?)?)?"
)
_RELATIVE: Final = re.compile(r"([+-])([0-9]{1,9})([smhdw])")
_UNITS_US: Final = {
    "w": 604_800_000_000,
    "d": 86_400_000_000,
    "h": 3_600_000_000,
    "m": 60_000_000,
    "s": 1_000_000,
}


def time_us(text: str) -> int | None:
    """The moment that ISO 8601 text names, in UTC where it says no other; None where it names none.

    What is finer than a microsecond is cut off.
    """
    found = _ISO.fullmatch(text)
    if found is None or (found[4] and not found[3]):
        return None
    day, minute, second, fraction, zone = found.groups()
    zone = "+00:00" if not zone or zone in "Zz" else zone
    try:
        moment = datetime.fromisoformat(
            f"{day}T{minute or '00:00'}{second or ':00'}.{(fraction or '')[:6]:0<6}{zone}"
        )
    except ValueError:  # the 30th of February, the 25th hour
        return None
    time = (moment - _EPOCH) // _MICROSECOND
    # With its zone taken off, a moment of the first or the last year may be one that nobody can write in UTC.
    return time if _TIME_MIN_US <= time <= _TIME_MAX_US else None


def time_literal(text: str) -> Constant | None:
    """`text` as a time: a moment, or so much before or after now. None where it is neither."""
    found = _RELATIVE.fullmatch(text)
    if found is not None:
        sign, count, unit = found.groups()
        microseconds = int(count) * _UNITS_US[unit]
        return Relative(-microseconds if sign == "-" else microseconds)
    time = time_us(text)
    return None if time is None else Literal(Kind.TIME, time)


def _written_time(time: int) -> str:
    moment = (_EPOCH + time * _MICROSECOND).replace(tzinfo=None)
    return moment.date().isoformat() if time % _UNITS_US["d"] == 0 else f"{moment.isoformat()}Z"


def _written_relative(microseconds: int) -> str:
    size = abs(microseconds)
    unit = "s" if not size else next(unit for unit, length in _UNITS_US.items() if size % length == 0)
    return f"{'+' if microseconds > 0 else '-'}{size // _UNITS_US[unit]}{unit}"


# --- The tree as text ----------------------------------------------------------------------

FIELD: Final = r"[^\W\d]\w*"
"""A name of a field that needs no quotes."""


def quoted(text: str, quote: str = "'") -> str:
    return quote + text.replace(quote, quote * 2) + quote


def _written_step(step: str | int) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    return "." + (step if re.fullmatch(FIELD, step) else quoted(step, '"'))


def written_operand(operand: Operand) -> str:
    match operand:
        case Column(name):
            return name
        case Path(steps, root):
            return root + "".join(map(_written_step, steps))
        case Relative(microseconds):
            return quoted(_written_relative(microseconds))
        case Literal(Kind.TIME, int(time)):
            return quoted(_written_time(time))
        case Literal(_, str(text)):
            return quoted(text)
        case Literal(_, bool() | None as word):
            return "null" if word is None else str(word).lower()
        case Literal(_, number):
            return repr(number)


def written(node: Node, negation: str = "") -> str:
    """The normal form of a condition; `negation` is "not " where it is wanted of the opposite."""
    match node:
        case Or(parts):
            return " or ".join(map(written, parts))
        case And(parts):
            return " and ".join(
                f"({written(part)})" if isinstance(part, Or) else written(part) for part in parts
            )
        case Not(And() | Or() as part):
            return f"not ({written(part)})"
        case Not(part):
            return written(part, "not ")
        case Compare(left, operator, right):
            return f"{written_operand(left)} {operator} {written_operand(right)}"
        case In(operand, items):
            return f"{written_operand(operand)} {negation}in ({', '.join(map(written_operand, items))})"
        case Between(operand, low, high):
            bounds = f"{written_operand(low)} and {written_operand(high)}"
            return f"{written_operand(operand)} {negation}between {bounds}"
        case Like(operand, pattern):
            return f"{written_operand(operand)} {negation}like {quoted(pattern)}"
        case IsNull(operand):
            return f"{written_operand(operand)} is {negation}null"
