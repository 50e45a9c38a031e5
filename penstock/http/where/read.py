"""The text of a condition, read: the tokens of `tokens.py` become the tree of `tree.py`.

The grammar is in docs/where.md; every rule of it is a method here. What can be said without a row is said
here as well: that a column is not there, that a number meets a text, that a text is no time.

Rules that always hold:
  * Every token is looked at once, from left to right.
  * Parentheses nest at most `NESTING_MAX` deep, so that no tree is too deep for those who walk it.

How it fails: `WhereError`, and nothing else, for any text whatsoever.
"""

import re
from difflib import get_close_matches
from typing import Final, NamedTuple, NoReturn

from penstock.http.where.tokens import (
    CONSTANTS,
    SHOWN_CHARACTERS_MAX,
    Token,
    WhereError,
    named,
    shown,
    tokens_of,
)
from penstock.http.where.tree import (
    COLUMNS,
    HEADERS,
    OPPOSITE,
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
    Operand,
    Or,
    Path,
    joined,
    kind_of,
    negated,
    time_literal,
)

TEXT_CHARACTERS_MAX: Final = 10_000
NESTING_MAX: Final = 100
LIST_ITEMS_MAX: Final = 1000
PATTERN_CHARACTERS_MAX: Final = 1000


def read(text: str) -> Node:
    """The condition that `text` says."""
    if len(text) > TEXT_CHARACTERS_MAX:
        raise WhereError(
            f"a condition has at most {TEXT_CHARACTERS_MAX} characters, this one has {len(text)}: shorten it",
            TEXT_CHARACTERS_MAX + 1,
        )
    if not text.strip():
        raise WhereError("the condition is empty: write one such as reason = 'rejected'", 1)
    reader = _Reader(tokens_of(text))
    node = reader.either(0)
    reader.end()
    return node


class _Reader:
    """Goes through the tokens; a method reads what its rule of the grammar says, and is then behind it."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._next = 0

    @property
    def _here(self) -> Token:
        return self._tokens[self._next]

    def _skip(self, kind: str) -> bool:
        """Whether the next token is of this kind; if so, we are behind it."""
        if self._here.kind != kind:
            return False
        self._next += 1
        return True

    def _expect(self, kind: str, wanted: str) -> None:
        if not self._skip(kind):
            self._fail(wanted)

    def _fail(self, wanted: str) -> NoReturn:
        """The next token cannot stand where it does."""
        token = self._here
        found = "the condition ends here" if token.kind == "end" else f"{shown(token.text)} cannot stand here"
        raise WhereError(f"{found}: {wanted}", token.position)

    # Conditions made of conditions.

    def end(self) -> None:
        if self._here.kind == ")":
            self._fail("no parenthesis is open; leave it out")
        self._expect("end", 'join two conditions with "and" or "or"')

    def either(self, depth: int) -> Node:
        parts = [self._both(depth)]
        while self._skip("or"):
            parts.append(self._both(depth))
        return joined(Or, parts)

    def _both(self, depth: int) -> Node:
        parts = [self._single(depth)]
        while self._skip("and"):
            parts.append(self._single(depth))
        return joined(And, parts)

    def _single(self, depth: int) -> Node:
        opposite = False
        while self._skip("not"):
            opposite = not opposite
        position = self._here.position
        if not self._skip("("):
            node = self._test()
        elif depth == NESTING_MAX:
            raise WhereError(f"parentheses nest at most {NESTING_MAX} deep: use fewer", position)
        else:
            node = self.either(depth + 1)
            self._expect(")", 'close the parenthesis, or go on with "and" or "or"')
        return negated(node) if opposite else node

    # Conditions made of operands.

    def _test(self) -> Node:
        left = self._operand()
        operator = self._here.kind
        if operator in OPPOSITE:
            self._next += 1
            left, right = _met(left, self._operand())
            return Compare(left.operand, operator, right.operand)
        if self._skip("is"):
            return self._is_null(left)
        opposite = self._skip("not")
        node: Node
        if self._skip("in"):
            node = self._in(left)
        elif self._skip("between"):
            node = self._between(left)
        elif self._skip("like"):
            node = self._like(left)
        else:
            self._fail(_after_operand(left.operand, self._here, opposite))
        return negated(node) if opposite else node

    def _is_null(self, left: "_Placed") -> Node:
        opposite = self._skip("not")
        if self._here.operand != CONSTANTS["null"]:
            self._fail("behind is stands null or not null; everything else is compared with = or !=")
        self._next += 1
        return negated(IsNull(left.operand)) if opposite else IsNull(left.operand)

    def _in(self, left: "_Placed") -> In:
        self._expect("(", "a list stands in parentheses, as in (1, 2, 3)")
        items = [self._item(left)]
        while self._skip(","):
            if len(items) == LIST_ITEMS_MAX:
                raise WhereError(f"a list has at most {LIST_ITEMS_MAX} items: use fewer", self._here.position)
            items.append(self._item(left))
        self._expect(")", "put a comma between two items, and a parenthesis behind the last")
        return In(left.operand, tuple(items))

    def _item(self, left: "_Placed") -> Constant:
        item = self._operand()
        if isinstance(item.operand, Column | Path):
            raise WhereError(
                'a list has only constants: compare columns with =, joined by "or"', item.position
            )
        found = _met(left, item)[1].operand
        assert isinstance(found, Constant)  # a constant that became a time is still one
        return found

    def _between(self, left: "_Placed") -> Between:
        low = self._operand()
        self._expect("and", "between has two bounds, as between 1 and 5")
        high = self._operand()
        left, low = _met(left, low)
        left, high = _met(left, high)
        left, low = _met(left, low)  # the other bound may have made a time of a text
        return Between(left.operand, low.operand, high.operand)

    def _like(self, left: "_Placed") -> Like:
        kind = kind_of(left.operand)
        if kind not in (Kind.TEXT, Kind.JSON, Kind.NULL):
            said = f"like looks at text, and {named(left.operand)} is {kind.value}"
            raise WhereError(f"{said}: compare it with =, < or >", left.position)
        pattern = self._operand()
        match pattern.operand:
            case Literal(Kind.TEXT, str(text)):
                _check_pattern(text, pattern.position)
                return Like(left.operand, text)
        raise WhereError("behind like stands a text in single quotes, as 'order-%'", pattern.position)

    def _operand(self) -> "_Placed":
        token = self._here
        if token.kind == "name":
            raise WhereError(_no_column(token.text), token.position)
        if token.operand is None:
            self._fail("a column, a field, a number or a text belongs here, as in reason = 'rejected'")
        self._next += 1
        return _Placed(token.operand, token.position)


# --- Operands that meet --------------------------------------------------------------------


class _Placed(NamedTuple):
    """An operand, and where it was written."""

    operand: Operand
    position: int


def _met(left: _Placed, right: _Placed) -> tuple[_Placed, _Placed]:
    """Two operands that are compared; a text that meets a time becomes one. Some can never be compared."""
    kinds = kind_of(left.operand), kind_of(right.operand)
    match left.operand, right.operand, kinds:
        case _, Literal(Kind.TEXT, str(text)), (Kind.TIME, _):
            return left, right._replace(operand=_time(text, right.position))
        case Literal(Kind.TEXT, str(text)), _, (_, Kind.TIME):
            return left._replace(operand=_time(text, left.position)), right
    if kinds[0] is kinds[1] or Kind.JSON in kinds or Kind.NULL in kinds:
        return left, right
    said = " and ".join(f"{named(side.operand)} is {kind_of(side.operand).value}" for side in (left, right))
    raise WhereError(f"{said}: compare things of one kind", right.position)


def _time(text: str, position: int) -> Constant:
    found = time_literal(text)
    if found is None:
        forms = "'2026-11-15', '2026-11-15T10:00:00Z', or '-15m' (s, m, h, d, w) for so long ago"
        raise WhereError(f"{shown(text)} is no time: write {forms}", position)
    return found


_PATTERN: Final = re.compile(r"(?: [^\\]++ | \\[%_\\] )*+", re.VERBOSE)


def _check_pattern(pattern: str, position: int) -> None:
    if len(pattern) > PATTERN_CHARACTERS_MAX:
        raise WhereError(f"a pattern has at most {PATTERN_CHARACTERS_MAX} characters: use fewer", position)
    if not _PATTERN.fullmatch(pattern):
        raise WhereError("a backslash in a pattern stands before %, _ or a backslash: double it", position)


# --- What to write instead -----------------------------------------------------------------


def _no_column(name: str) -> str:
    """What to say of a name that is no column."""
    if name.lower() == "where":
        return "the condition begins behind the word where: leave it out"
    if name.lower() == HEADERS:
        return 'headers are asked for one by one: headers.name or headers."any name"'
    near = get_close_matches(name.lower()[:SHOWN_CHARACTERS_MAX], [*COLUMNS, *CONSTANTS, "not"], n=1)
    if near:
        return f"there is no column {shown(name)}: did you mean {near[0]}?"
    field = f"; a field of the payload is value.{name}" if len(name) <= SHOWN_CHARACTERS_MAX else ""
    return f"there is no column {shown(name)}: use one of {', '.join(COLUMNS)}{field}"


def _after_operand(left: Operand, token: Token, opposite: bool) -> str:
    """What could stand where `token` does, behind `left` and perhaps `not`."""
    words = ["in", "between", "like"] if opposite else ["in", "between", "like", "is", "not"]
    near = get_close_matches(token.text.lower()[:SHOWN_CHARACTERS_MAX], words, n=1)
    if near and token.kind == "name":
        return f"did you mean {near[0]}?"
    if opposite:
        return "use in, between or like"
    example = f", as in {named(left)} = true" if isinstance(left, Path) else ""
    return f"use one of =, !=, <, <=, >, >=, in, between, like, is null{example}"
