"""Formats of sinks, as a table: what each can do, and what it must be told.

A format that is not here is handed to Spark with whatever options it has; Spark judges both.
"""

from dataclasses import dataclass
from typing import Final

from penstock.spark.options import WRITING, Option

APPEND, UPDATE, COMPLETE = "append", "update", "complete"
MODES: Final = (APPEND, UPDATE, COMPLETE)

CONSOLE: Final = "console"
DELTA: Final = "delta"
PENSTOCK: Final = "penstock"
FILES: Final = ("parquet", "json", "csv", "orc", "text")
TABLE_FORMATS: Final = ("parquet", DELTA, "csv", "json", "orc")
"""Of tables that are joined."""


@dataclass(frozen=True, slots=True)
class Format:
    """One format. `keys` is None where Spark has so many options that nobody can judge them here."""

    modes: tuple[str, ...] = MODES
    needs_path: bool = False
    keys: tuple[str, ...] | None = None
    options: tuple[Option, ...] = ()
    why_modes: str = ""
    partitions: bool = False


_FILES: Final = Format(
    (APPEND,),
    needs_path=True,
    partitions=True,
    why_modes="rows that are in a file stay; let a watermark end the groups of an aggregate, or use delta",
)

FORMATS: Final[dict[str, Format]] = {
    **dict.fromkeys(FILES, _FILES),
    CONSOLE: Format(keys=("numRows", "truncate")),
    PENSTOCK: Format(
        (APPEND, UPDATE),
        options=tuple(option for option in WRITING if option.name != "dead"),
        keys=(),
        why_modes="a message that was sent stays; with update, what has changed is sent as another one",
    ),
    DELTA: Format(
        (APPEND, COMPLETE),
        needs_path=True,
        keys=("mergeSchema",),
        partitions=True,
        why_modes="rows are added, or the whole table is written anew; for the groups that have changed "
        "there is no key to find them by",
    ),
}
