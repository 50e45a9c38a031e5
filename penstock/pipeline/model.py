"""Model: what a pipeline is, once its file has been judged. Nothing here can be wrong any more.

Texts that only Spark can judge (SQL, types that `ddl.py` does not know, options of formats that are not ours)
are kept as they were written; `unjudged` says which.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

INPUT: Final = "input"
"""The view that a step finds the result of the one before it in."""

DEAD, DROP, FAIL = "dead", "drop", "fail"
"""What becomes of a record that does not fit."""

Function = Callable[..., Any]
"""A step in Python: frames in, a frame out. Who wrote it decides its types."""


@dataclass(frozen=True, slots=True)
class Field:
    """A column of a record. `type` is as Spark writes it."""

    name: str
    type: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Parse:
    """How payloads become columns."""

    format: str  # "json", "csv" or "text"
    schema: str  # "" for text
    fields: tuple[Field, ...] | None  # None: only Spark can tell
    options: Mapping[str, str]  # of Spark's own parser
    on_bad_record: str  # DEAD, DROP or FAIL


@dataclass(frozen=True, slots=True)
class Watermark:
    """How late rows may come."""

    column: str
    delay: str


@dataclass(frozen=True, slots=True)
class Source:
    """Queues to read, and the view that they are."""

    name: str
    options: Mapping[str, str]
    view: str  # "messages" or "events"
    parse: Parse | None
    watermark: Watermark | None


@dataclass(frozen=True, slots=True)
class Step:
    """SQL over the views, or a function, which is None where only its path can be told before Spark runs."""

    name: str | None
    sql: str | None
    function: Function | None
    function_path: str | None
    takes_views: bool = False
    """The function takes the session and all views, instead of one frame."""


@dataclass(frozen=True, slots=True)
class Sink:
    """Where rows go."""

    format: str
    mode: str  # "append", "update" or "complete"
    options: Mapping[str, str]
    partition_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """All of it."""

    name: str
    file: str
    sources: tuple[Source, ...]
    steps: tuple[Step, ...]
    sink: Sink
    interval: str | None  # between two triggers; None: no pause
    once: bool
    checkpoint: str | None
    spark: Mapping[str, str]  # Spark's own settings
    unjudged: tuple[str, ...]  # what only Spark can tell
