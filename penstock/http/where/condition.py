"""Conditions over messages: `--where` of commands, and "where" of searches, redrives and what is done to a
selection.

`parse` makes a `Condition` of a text, and a condition judges rows. The language is described in
docs/where.md; `read.py` reads it into the tree of `tree.py`, which becomes functions here, once.

A condition is true, false or unknown of a row, and a row matches where it is true. Those are three values,
and yet the functions know only two: `_certain` makes one that says whether a condition is *true*, and of a
`not` one that says whether what stands behind it is *false*. Unknown is neither, so both say no. An `and` is
true where all its parts are true, and false where one of them is false; an `or` the other way round.

Rules that always hold:
  * Every row is judged, whatever its payload is. What cannot be read is null.
  * A payload is decoded, and its JSON parsed, at most once a row, and only where that can change the answer.
  * A condition keeps nothing of a row: threads may share it.

How it fails: `parse` raises `WhereError`; `matches` raises `TooLong` for a row that takes over `SECONDS_MAX`.

Measured with a million rows (Python 3.11, payloads of 200 bytes of JSON): one comparison with a field takes
3.2 µs a row, most of it in the decoder (`json.loads` alone takes 3.6); one with a column takes 0.35 µs, also
where an `and` has a field beside it and the column decides.
"""

import operator
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from json import JSONDecodeError, JSONDecoder
from typing import Any, Final, NamedTuple

from penstock.http.where.like import TooLong, matcher
from penstock.http.where.read import read
from penstock.http.where.tokens import WhereError
from penstock.http.where.tree import (
    PAYLOAD,
    And,
    Between,
    Column,
    Compare,
    Constant,
    In,
    IsNull,
    Kind,
    Like,
    Literal,
    Node,
    Not,
    Operand,
    Or,
    Path,
    Relative,
    columns_of,
    kind_of,
    negated,
    operands_of,
    time_us,
    written,
)
from penstock.model.headers import decode_headers

__all__ = ["Condition", "Row", "TooLong", "WhereError", "parse"]

JSON_BYTES_MAX: Final = 16 << 20
"""Larger payloads are not parsed: the objects that JSON becomes can take thirty times its room."""


SECONDS_MAX: Final = 5.0
"""What a condition may take for one row: only many patterns on a payload of megabytes do."""


class Row(NamedTuple):
    """A message, in plain values of Python. Times are microseconds since 1970.

    What is not among the columns of a condition is never looked at: any value will do.
    """

    queue: str
    offset: int
    id: str
    attempts: int | None  # None: it is gone, and only its history knows
    reason: str | None
    consumer: str | None
    protocol: str
    timestamp: int  # when it was accepted
    died: int | None
    expires: int | None
    retries: int | None
    value: bytes | memoryview
    value_bytes: int
    state: str = "dead"
    due: int | None = None
    headers: bytes = b""  # as `model/headers.py` writes them; no column, but what paths lead into


@dataclass(frozen=True, slots=True)
class Condition:
    """What `parse` made of a text.

    Equal conditions say the same. `str` gives the normal form; it parses to an equal condition, unless it has
    become longer than a condition may be. `columns` are those that it asks for; "value" is among them only
    where it needs payloads.
    """

    tree: Node
    columns: frozenset[str] = field(compare=False)
    _judge: "_Judge" = field(compare=False, repr=False)

    def matches(self, row: Row, now_us: int) -> bool:
        """Whether the condition is true of `row`; times that are relative are so to `now_us`. May take long:
        not for a loop."""
        return self._judge(_Look(row, now_us))

    def __str__(self) -> str:
        return written(self.tree)


def parse(text: str) -> Condition:
    """The condition that `text` says. `WhereError` tells what is wrong with it, where, and what to write."""
    tree = read(text)
    return Condition(tree, columns_of(tree), _certain(tree))


# --- A row that is looked at ---------------------------------------------------------------

_UNREAD: Final[Any] = object()


def _long_number(digits: str) -> int | None:
    try:
        return int(digits)
    except ValueError:
        return None


def _no_number(_word: str) -> None:
    """NaN and Infinity, which are no JSON but which some write: null."""


# Python refuses to make a number of too many digits (4,300 unless it was told otherwise), because that takes
# quadratic time. The first decoder then gives up; the second, slower one is tried only in that case.
_decode: Final = JSONDecoder(parse_constant=_no_number).raw_decode
_decode_long_numbers: Final = JSONDecoder(parse_constant=_no_number, parse_int=_long_number).raw_decode


class _Look:
    """One row while it is judged. Its payload is decoded and parsed by the first who asks."""

    __slots__ = ("_document", "_headers", "_text", "_until", "now_us", "row")

    def __init__(self, row: Row, now_us: int) -> None:
        self.row = row
        self.now_us = now_us
        self._text: Any = _UNREAD  # Any: str, None, or not yet
        self._document: Any = _UNREAD  # Any: whatever JSON can say
        self._headers: dict[str, str] | None = None
        self._until = 0.0

    def until(self) -> float:
        """When its time is over, which begins with the first who asks."""
        self._until = self._until or time.monotonic() + SECONDS_MAX
        return self._until

    def text(self) -> str | None:
        """The payload as text; None where it is not UTF-8."""
        if self._text is _UNREAD:
            try:
                self._text = str(self.row.value, "utf-8")
            except UnicodeDecodeError:
                self._text = None
        found: str | None = self._text
        return found

    def header(self, name: str) -> str | None:
        if self._headers is None:
            self._headers = decode_headers(self.row.headers)
        return self._headers.get(name)

    def document(self) -> Any:
        """The payload as JSON; None where it is none."""
        if self._document is _UNREAD:
            self._document = None if len(self.row.value) > JSON_BYTES_MAX else _parsed(self.text())
        return self._document


def _parsed(text: str | None) -> Any:
    if text is None:
        return None
    text = text.strip(" \t\n\r")
    for decode in (_decode, _decode_long_numbers):
        try:
            document, end = decode(text)
        except (JSONDecodeError, RecursionError):
            return None
        except ValueError:
            continue  # a number was too long for the first
        return document if end == len(text) else None
    return None


# --- Conditions as functions ---------------------------------------------------------------

_Judge = Callable[[_Look], bool]
_Get = Callable[[_Look], Any]  # Any: what a row or its payload has there; None for null
_Holds = Callable[[Any, Any], bool]  # Any: two values of one kind

_SIGNS: Final[dict[str, _Holds]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_KINDS: Final[dict[type, Kind]] = {
    bool: Kind.BOOLEAN,
    int: Kind.NUMBER,
    float: Kind.NUMBER,
    str: Kind.TEXT,
}
"""What a value of JSON is; objects and arrays are not compared with anything."""


def _certain(node: Node) -> _Judge:
    """A function that says whether `node` is true of a row."""
    match node:
        case And(parts):
            return _all(parts)
        case Or(parts):
            return _one_of(parts)
        case Not(And(parts)):
            return _one_of(tuple(map(negated, parts)))
        case Not(Or(parts)):
            return _all(tuple(map(negated, parts)))
        case Between(operand, low, high):
            return _all((Compare(operand, ">=", low), Compare(operand, "<=", high)))
        case Not(Between(operand, low, high)):
            return _one_of((Compare(operand, "<", low), Compare(operand, ">", high)))
        case Compare(left, sign, right):
            return _compare(left, _SIGNS[sign], right)
        case In(operand, items):
            return _in(operand, items)
        case Not(In(operand, items)):
            return _not_in(operand, items)
        case Like(operand, pattern):
            return _like(_getter(operand), matcher(pattern), wanted=True)
        case Not(Like(operand, pattern)):
            return _like(_getter(operand), matcher(pattern), wanted=False)
        case IsNull(operand):
            return _is_null(_getter(operand), wanted=True)
        case Not(IsNull(operand)):
            return _is_null(_getter(operand), wanted=False)
        case Not():
            raise AssertionError(f"{node} should not be: its part has an opposite of its own")


def _all(parts: tuple[Node, ...]) -> _Judge:
    judges = [_certain(part) for part in sorted(parts, key=_effort)]

    def judge(look: _Look) -> bool:
        for part in judges:  # noqa: SIM110 - all() of a generator takes longer than what it asks
            if not part(look):
                return False
        return True

    return judge


def _one_of(parts: tuple[Node, ...]) -> _Judge:
    judges = [_certain(part) for part in sorted(parts, key=_effort)]

    def judge(look: _Look) -> bool:
        for part in judges:  # noqa: SIM110 - any() of a generator takes longer than what it asks
            if part(look):
                return True
        return False

    return judge


def _effort(node: Node) -> int:
    """What it needs beside columns: nothing (0), a text (1) or the JSON (2). The least is asked first."""
    return max(
        2 if isinstance(operand, Path) and operand.root == PAYLOAD else int(_needs_text(operand))
        for operand in operands_of(node)
    )


def _needs_text(operand: Operand) -> bool:
    return isinstance(operand, Path) or operand == Column(PAYLOAD)


def _compare(left: Operand, holds: _Holds, right: Operand) -> _Judge:
    kinds = kind_of(left), kind_of(right)
    if Kind.TIME in kinds:
        return _compare_known(_time_getter(left), holds, _time_getter(right))
    if Kind.JSON not in kinds:
        return _compare_known(_getter(left), holds, _getter(right))
    if isinstance(right, Literal):
        return _compare_json(_getter(left), holds, right)
    return _compare_any(_getter(left), holds, _getter(right))


def _compare_known(get_left: _Get, holds: _Holds, get_right: _Get) -> _Judge:
    """Both are of one kind, or null."""

    def judge(look: _Look) -> bool:
        left = get_left(look)
        if left is None:
            return False
        right = get_right(look)
        return right is not None and holds(left, right)

    return judge


def _compare_json(get: _Get, holds: _Holds, literal: Literal) -> _Judge:
    """Something of the payload and a constant: the usual case, and so one without detours."""
    value = literal.value
    types = tuple(kind for kind in _KINDS if value is not None and _KINDS[kind] is literal.kind)

    def judge(look: _Look) -> bool:
        found = get(look)
        return type(found) in types and holds(found, value)

    return judge


def _compare_any(get_left: _Get, holds: _Holds, get_right: _Get) -> _Judge:
    """Something of the payload and something of the row."""

    def judge(look: _Look) -> bool:
        left = get_left(look)
        kind = _KINDS.get(type(left))
        if kind is None:
            return False
        right = get_right(look)
        return kind is _KINDS.get(type(right)) and holds(left, right)

    return judge


def _in(operand: Operand, items: tuple[Constant, ...]) -> _Judge:
    """One of the items is equal."""
    if kind_of(operand) is Kind.TIME:
        return _one_of(tuple(Compare(operand, "=", item) for item in items))
    get = _getter(operand)
    values = {
        (item.kind, item.value) for item in items if isinstance(item, Literal) and item.value is not None
    }

    def judge(look: _Look) -> bool:
        found = get(look)
        kind = _KINDS.get(type(found))
        return kind is not None and (kind, found) in values

    return judge


def _not_in(operand: Operand, items: tuple[Constant, ...]) -> _Judge:
    """Every item can be compared, and is not equal."""
    if kind_of(operand) is Kind.TIME:
        return _all(tuple(Compare(operand, "!=", item) for item in items))
    get = _getter(operand)
    inside = _in(operand, items)
    kinds = {kind_of(item) for item in items}

    def judge(look: _Look) -> bool:
        kind = _KINDS.get(type(get(look)))
        return kind is not None and kinds == {kind} and not inside(look)

    return judge


def _like(get: _Get, matches: Callable[[str, float], bool], *, wanted: bool) -> _Judge:
    def judge(look: _Look) -> bool:
        found = get(look)
        return type(found) is str and matches(found, look.until()) is wanted

    return judge


def _is_null(get: _Get, *, wanted: bool) -> _Judge:
    return lambda look: (get(look) is None) is wanted


# --- Operands as functions -----------------------------------------------------------------


def _getter(operand: Operand) -> _Get:
    """A function that says what an operand is in a row."""
    match operand:
        case Column("value"):
            return _Look.text
        case Column(name):
            place = Row._fields.index(name)
            return lambda look: look.row[place]
        case Path((str(name),), "headers"):
            return lambda look: look.header(name)
        case Path(steps):
            return _path_getter(steps)
        case Literal(_, value):
            return lambda _look: value
        case Relative(microseconds):
            return lambda look: look.now_us + microseconds


def _path_getter(steps: tuple[str | int, ...]) -> _Get:
    # Any: that a step fits its container is what the two of them say.
    typed: list[tuple[Any, Any]] = [(dict if isinstance(step, str) else list, step) for step in steps]

    def get(look: _Look) -> Any:
        here = look.document()
        for container, step in typed:
            if type(here) is not container:
                return None
            try:
                here = here[step]
            except LookupError:
                return None
        return here

    return get


def _time_getter(operand: Operand) -> _Get:
    """The same, where a time is wanted: what the payload has there counts if it is ISO 8601 text."""
    get = _getter(operand)
    if kind_of(operand) is not Kind.JSON:
        return get

    def get_time(look: _Look) -> int | None:
        found = get(look)
        return time_us(found) if type(found) is str else None

    return get_time
