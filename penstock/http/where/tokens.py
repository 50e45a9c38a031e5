"""The text of a condition in tokens: words, numbers, texts, paths and signs. `read.py` joins them.

Rules that always hold:
  * The text is data. Nothing of it is ever run, and no expression that splits it can match in two ways, so
    the time to split it grows with its length and no faster.
  * A token that is an operand carries it: numbers and texts are made here, and paths are taken apart here.

How it fails: `WhereError`, and nothing else, for any text whatsoever.
"""

import math
import re
from reprlib import Repr
from typing import Final, NamedTuple, NoReturn

from penstock.errors import PenstockError
from penstock.http.where.tree import (
    COLUMNS,
    FIELD,
    HEADERS,
    PAYLOAD,
    Column,
    Kind,
    Literal,
    Operand,
    Path,
    written_operand,
)

NUMBER_CHARACTERS_MAX: Final = 100
PATH_STEPS_MAX: Final = 100

_KEYWORDS: Final = frozenset({"or", "and", "not", "in", "between", "like", "is"})
CONSTANTS: Final = {
    "true": Literal(Kind.BOOLEAN, True),
    "false": Literal(Kind.BOOLEAN, False),
    "null": Literal(Kind.NULL, None),
}


class WhereError(PenstockError):
    """A condition that cannot be used. `position` is the character that it is about, counted from 1."""

    def __init__(self, problem: str, position: int) -> None:
        super().__init__(f"where, character {position}: {problem}")
        self.position = position


class Token(NamedTuple):
    kind: str  # a keyword, a comparison or a mark stands for itself; else "operand", "name" or "end"
    position: int  # counted from 1
    text: str = ""
    operand: Operand | None = None  # for "operand" only


SHOWN_CHARACTERS_MAX: Final = 40  # of what was written, in an error: that stays one readable line
_short = Repr()
_short.maxstring = SHOWN_CHARACTERS_MAX


def shown(text: str) -> str:
    """What somebody wrote, on one line and not too long."""
    return _short.repr(text)


def named(operand: Operand) -> str:
    """The same for an operand, which has its own quotes where it needs some."""
    text = written_operand(operand)
    return text if len(text) <= SHOWN_CHARACTERS_MAX and text.isprintable() else shown(text)[1:-1]


_SPACE: Final = re.compile(r"\s*+")
_TOKEN: Final = re.compile(
    rf"""
      (?P<word> {FIELD} )
    | (?P<number> -? [0-9]++ (?: \.[0-9]++ )?+ (?: [eE][+-]?[0-9]++ )?+ ) (?! [\w.] )
    | (?P<text> ' (?: [^']++ | '' )*+ ' )
    | (?P<foreign> == | => | =< | && | \|\| | ! (?!=) | [‘’“”"`] )
    | (?P<sign> <> | <= | >= | != | [=<>(),] )
    """,
    re.VERBOSE,
)
_STEP: Final = re.compile(
    rf"""
      \. (?P<name> {FIELD} )
    | \." (?P<quoted> (?: [^"]++ | "" )*+ ) "
    | \[ (?P<index> [0-9]{{1,9}} ) \]
    """,
    re.VERBOSE,
)

_INSTEAD: Final = {"==": "=", "=>": ">=", "=<": "<=", "&&": "and", "||": "or", "!": "not"}
"""What other languages write, and what is meant."""

_UNREADABLE: Final = {
    "'": "this text has no end: close it with a single quote, and write a quote in it twice",
    "-": 'a minus stands directly before a number; a field with one in its name is value."order-id"',
    ".": "a number begins with a digit, as 0.5, and a path with value, as value.customer",
    "[": "an item of an array stands directly behind its path, as value.items[0]",
    ";": "there is only one condition: leave out the semicolon",
}
"""What to say of a character that no token begins with."""


def tokens_of(text: str) -> list[Token]:
    """The whole text in tokens; the last one is "end"."""
    found: list[Token] = []
    at = _behind_space(text, 0)
    while at < len(text):
        token, at = _token(text, at)
        found.append(token)
        at = _behind_space(text, at)
    return [*found, Token("end", len(text) + 1)]


def _behind_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _token(text: str, at: int) -> tuple[Token, int]:
    """The token that begins at `at`, and where it ends."""
    found = _TOKEN.match(text, at)
    if found is None:
        _refuse(text, at)
    written, end = found.group(), found.end()
    match found.lastgroup:
        case "word":
            return _word(text, at, written)
        case "number":
            return Token("operand", at + 1, written, _number(written, at)), end
        case "text":
            return Token("operand", at + 1, written, Literal(Kind.TEXT, _inside(written))), end
        case "foreign" if written in _INSTEAD:
            raise WhereError(f"there is no {written} here: did you mean {_INSTEAD[written]}?", at + 1)
        case "foreign":
            raise WhereError("texts stand in straight single quotes, as 'rejected'", at + 1)
        case _:
            return Token("!=" if written == "<>" else written, at + 1, written), end


def _refuse(text: str, at: int) -> NoReturn:
    """No token begins at `at`."""
    if text[at : at + 2].removeprefix("-")[:1] in tuple("0123456789"):
        problem = "this is no number: write one such as 5, -5, 0.5 or 1e6; a time is text, as '-15m'"
    else:
        problem = _UNREADABLE.get(text[at], f"{shown(text[at])} has no meaning here: leave it out")
    raise WhereError(problem, at + 1)


def _inside(written: str) -> str:
    """What stands between two quotes, where a quote is doubled."""
    quote = written[0]
    return written[1:-1].replace(quote * 2, quote)


def _number(written: str, at: int) -> Literal:
    if len(written) > NUMBER_CHARACTERS_MAX:
        raise WhereError(
            f"a number has at most {NUMBER_CHARACTERS_MAX} characters: use a shorter one", at + 1
        )
    if written.removeprefix("-").isdigit():
        return Literal(Kind.NUMBER, int(written))
    number = float(written)
    if math.isinf(number):
        raise WhereError(f"{written} is too large: use a number below 1.7e308", at + 1)
    return Literal(Kind.NUMBER, number)


def _word(text: str, at: int, written: str) -> tuple[Token, int]:
    """A keyword, a constant, a column, a path, or a name that is none of them."""
    end = at + len(written)
    word = written.lower()
    if word in _KEYWORDS:
        return Token(word, at + 1, written), end
    if word in CONSTANTS:
        return Token("operand", at + 1, written, CONSTANTS[word]), end
    if not text.startswith((".", "["), end):
        if word not in COLUMNS:
            return Token("name", at + 1, written), end
        return Token("operand", at + 1, written, Column(word)), end
    steps, end = _steps(text, end)
    if word == HEADERS:
        if len(steps) != 1 or not isinstance(steps[0], str):
            raise WhereError('a header has a name and no fields: headers.name or headers."any name"', at + 1)
        return Token("operand", at + 1, text[at:end], Path(steps, HEADERS)), end
    if word != PAYLOAD:
        meant = named(Path((written, *steps)))
        raise WhereError(f"the fields of the payload begin with value: did you mean {meant}?", at + 1)
    return Token("operand", at + 1, text[at:end], Path(steps)), end


def _steps(text: str, at: int) -> tuple[tuple[str | int, ...], int]:
    """The steps of the path that goes on at `at`, and where it ends."""
    steps: list[str | int] = []
    while text.startswith((".", "["), at):
        found = _STEP.match(text, at)
        if found is None:
            raise WhereError('a path goes on with .name, [0], or ."any name" in double quotes', at + 1)
        if len(steps) == PATH_STEPS_MAX:
            raise WhereError(f"a path has at most {PATH_STEPS_MAX} steps: use a shorter one", at + 1)
        match found.lastgroup:
            case "index":
                steps.append(int(found["index"]))
            case "name":
                steps.append(found["name"])
            case _:
                steps.append(found["quoted"].replace('""', '"'))
        at = found.end()
    return tuple(steps), at
