"""Columns that can be written, as tables, and how a schema is judged by one.

The rule that always holds: it is judged on the driver, before a task runs. A column that is not in the table
is refused, never left out: it may be a name that was mistyped, and then a message would lose its TTL.

How it fails: `WrongSchema`, which names the column and says what would be right; `WrongOption`.
"""

import difflib
from collections.abc import Mapping
from typing import Final, NamedTuple

from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    NumericType,
    ShortType,
    StringType,
    StructType,
)

from penstock.spark.options import WriteOptions, WrongOption
from penstock.spark.source import WrongSchema

_WHOLE: Final = (ByteType, ShortType, IntegerType, LongType)


class Writable(NamedTuple):
    """A column that is written: types that it may have, in words too."""

    types: tuple[type[DataType], ...]
    words: str
    required: bool = False


_QUEUE: Final = Writable((StringType,), "string")

MESSAGES: Final[Mapping[str, Writable]] = {
    "value": Writable((BinaryType, StringType), "binary or string", required=True),
    "queue": _QUEUE,
    "ttl": Writable(_WHOLE, "int (seconds)"),
    "retries": Writable(_WHOLE, "int"),
    "delay": Writable((NumericType,), "double (seconds)"),
    "headers": Writable((MapType,), "map<string,string>"),
}
"""What a message is made of."""

DEAD: Final = {name: column for name, column in MESSAGES.items() if name != "delay"}
"""What one is made of that is a dead letter from the beginning."""

LETTERS: Final[Mapping[str, Writable]] = {
    "offset": Writable(_WHOLE, "bigint", required=True),
    "queue": _QUEUE,
    "id": Writable((StringType,), "string"),
}
"""What names a dead letter that is redriven. By its id, one of a queue that was deleted is no other's."""

REPAIRS: Final[Mapping[str, Writable]] = {**LETTERS, "value": MESSAGES["value"]}
"""The same where it gets another payload."""


def columns_for(options: WriteOptions, *, payloads: bool = True) -> Mapping[str, Writable]:
    """The table for what is written; `payloads`: whether letters that are redriven get others."""
    if options.redrive:
        return REPAIRS if payloads else LETTERS
    return MESSAGES if options.dead is None else DEAD


def check_columns(schema: StructType, table: Mapping[str, Writable], queue: str | None) -> None:
    """Whether all columns can be written, and where to; `queue` is the option."""
    names = schema.fieldNames()
    for field in schema.fields:
        column = table.get(field.name)
        if column is None:
            near = difflib.get_close_matches(field.name.lower(), table, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "select only what is to be written"
            raise WrongSchema(
                f"column {field.name!r} cannot be written: there are {', '.join(table)}; {hint}"
            )
        if names.count(field.name) > 1:
            raise WrongSchema(f"there are {names.count(field.name)} columns {field.name!r}; select one")
        if not _fits(field.dataType, column.types):
            raise WrongSchema(
                f"column {field.name!r} is {field.dataType.simpleString()}; cast it to {column.words}"
            )
    for name, column in table.items():
        if column.required and name not in names:
            raise WrongSchema(f"the column {name!r} ({column.words}) is missing; there are {_listed(names)}")
    if queue is None and "queue" not in names:
        raise WrongOption("say where to write to, with the option queue or a column queue (string)")


def _fits(found: DataType, types: tuple[type[DataType], ...]) -> bool:
    if isinstance(found, MapType) and not (
        isinstance(found.keyType, StringType) and isinstance(found.valueType, StringType)
    ):
        return False
    return isinstance(found, types)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names)) or "none at all"


def refuse_overwrite() -> WrongOption:
    return WrongOption(
        "a queue is not overwritten: messages are added behind its tail. Write with mode('append'), a stream "
        "with outputMode('append'); penstock purge QUEUE takes out what is there"
    )
