"""DDL: the columns of a schema as Spark's SQL writes them, `id bigint, tags array<string>`, without Spark.

What is read here is what people write in a pipeline's file: names, types, `not null`. What Spark knows
besides (comments, defaults, collations, intervals) is left to Spark, which is said by returning None.

How it fails: `WrongSchema`, which names the column and says what would be right.
"""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Final

from penstock.errors import PenstockError
from penstock.pipeline.model import Field

PLAIN: Final = frozenset(
    {
        "bigint",
        "binary",
        "boolean",
        "byte",
        "date",
        "double",
        "float",
        "int",
        "integer",
        "long",
        "real",
        "short",
        "smallint",
        "string",
        "timestamp",
        "timestamp_ltz",
        "timestamp_ntz",
        "tinyint",
        "variant",
        "void",
    }
)
"""Types that are one word."""

NUMBERED: Final = {"char": (1, 1), "dec": (0, 2), "decimal": (0, 2), "numeric": (0, 2), "varchar": (1, 1)}
"""Types with numbers in parentheses: the fewest, the most."""

OTHERS: Final = frozenset({"geography", "geometry", "interval", "time"})
"""Types that are left to Spark."""

TIMES: Final = frozenset({"timestamp", "timestamp_ltz", "timestamp_ntz"})

_NESTED: Final = ("array", "map", "struct")
_USUAL: Final = {
    "bool": "boolean",
    "bytes": "binary",
    "datetime": "timestamp",
    "int64": "bigint",
    "int32": "int",
    "float64": "double",
    "float32": "float",
    "number": "double",
    "object": "struct<…>",
    "list": "array<…>",
    "str": "string",
    "text": "string",
    "uuid": "string",
}
"""What people write who come from elsewhere."""

_TOKEN: Final = re.compile(r"\s*(?:(`(?:[^`]|``)+`)|([^\W\d]\w*|\d+)|([<>(),:])|('(?:[^'\\]|\\.)*')|(\S))")
_PLAIN_NAME: Final = re.compile("[A-Za-z_][A-Za-z0-9_]*")


class WrongSchema(PenstockError):
    """A schema that Spark would refuse."""


class _LeftToSpark(Exception):
    """Something that is not read here."""


def read_ddl(text: str) -> tuple[Field, ...] | None:
    """The columns; None where Spark has to read them."""
    if not text.strip():
        raise WrongSchema("it is empty; write columns as in id bigint, region string")
    try:
        fields = tuple(_Reader(text).columns())
    except _LeftToSpark:
        return None
    seen: set[str] = set()
    for field in fields:
        # Spark takes two names that differ in case for one.
        if field.name.lower() in seen:
            raise WrongSchema(f"column {field.name!r} is there twice")
        seen.add(field.name.lower())
    return fields


def quoted(name: str) -> str:
    """A name as a schema can have it, whatever is in it."""
    return "`" + name.replace("`", "``") + "`"


class _Reader:
    """One schema on its way in."""

    def __init__(self, text: str) -> None:
        self._tokens = [match.group().strip() for match in _TOKEN.finditer(text)]
        self._at = 0

    def columns(self) -> Iterator[Field]:
        while True:
            yield self._column("")
            token = self._next()
            if not token:
                return
            if token != ",":
                raise _LeftToSpark

    def _column(self, within: str) -> Field:
        """A column, or a member of a struct."""
        name = self._name(within)
        shown = f"{within}.{name}" if within else name
        if self._peek() == ":":
            self._at += 1
        type_text = self._type(shown)
        required = False
        if self._peek().lower() == "not":
            self._at += 1
            if self._next().lower() != "null":
                raise WrongSchema(f"column {shown!r}: not is followed by null")
            required = True
        if self._peek() not in ("", ",", ">"):
            raise _LeftToSpark
        return Field(name, type_text, required)

    def _name(self, within: str) -> str:
        token = self._next()
        if not token:
            behind = f"behind the members of {within!r}" if within else "behind the last comma"
            raise WrongSchema(f"a column is missing {behind}")
        if token.startswith("`"):
            return token[1:-1].replace("``", "`")
        if not _PLAIN_NAME.fullmatch(token):
            raise WrongSchema(f"{token!r} stands where a column's name should be; put `…` around odd names")
        return token

    def _type(self, column: str) -> str:
        token = self._next()
        if token in ("", ",", ">"):
            raise WrongSchema(f"column {column!r} has no type; as in {column} string")
        word = token.lower()
        if word in _NESTED:
            return self._nested(word, column)
        if word in NUMBERED:
            return self._numbered(word, column)
        if word in OTHERS:
            raise _LeftToSpark
        if word not in PLAIN:
            raise WrongSchema(f"column {column!r}: there is no type {token!r}; {_hint(word)}")
        return word

    def _nested(self, word: str, column: str) -> str:
        if self._next() != "<":
            raise WrongSchema(f"column {column!r}: {word} says of what, as in {_EXAMPLES[word]}")
        if word == "struct":
            members = []
            while True:
                member = self._column(column)
                name = member.name if _PLAIN_NAME.fullmatch(member.name) else quoted(member.name)
                members.append(f"{name}: {member.type}{' not null' if member.required else ''}")
                if self._close(column, ","):
                    return f"struct<{', '.join(members)}>"
        parts = [self._type(column)]
        if word == "map":
            if self._next() != ",":
                raise WrongSchema(f"column {column!r}: a map has two types, as in {_EXAMPLES[word]}")
            parts.append(self._type(column))
        self._close(column)
        return f"{word}<{', '.join(parts)}>"

    def _close(self, column: str, instead: str = ">") -> bool:
        """Whether this is the end of a type; `instead` is what may stand there, too."""
        token = self._next()
        if token not in (">", instead):
            found = f"{token!r} stands where it should end" if token else "it does not end"
            raise WrongSchema(f"column {column!r}: {found}; write >")
        return token == ">"

    def _numbered(self, word: str, column: str) -> str:
        fewest, most = NUMBERED[word]
        numbers: list[str] = []
        if self._peek() == "(":
            self._at += 1
            while True:
                numbers.append(self._next())
                token = self._next()
                if token == ")":
                    break
                if token != ",":
                    raise WrongSchema(f"column {column!r}: the numbers of {word} end with )")
        if not fewest <= len(numbers) <= most or not all(number.isdigit() for number in numbers):
            raise WrongSchema(f"column {column!r}: write {_EXAMPLES[word]}")
        return f"{word}({','.join(numbers)})" if numbers else word

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        self._at += 1
        return token


_EXAMPLES: Final = {
    "array": "array<string>",
    "map": "map<string, bigint>",
    "struct": "struct<street: string, zip: string>",
    "char": "char(10)",
    "varchar": "varchar(10)",
    "dec": "decimal(10,2)",
    "decimal": "decimal(10,2)",
    "numeric": "decimal(10,2)",
}


def _hint(word: str) -> str:
    if word in _USUAL:
        return f"did you mean {_USUAL[word]}?"
    known = sorted({*PLAIN, *NUMBERED, *_NESTED})
    near = get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
