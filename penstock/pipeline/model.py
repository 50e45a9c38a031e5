"""Model: what a pipeline is, once its file has been judged. Nothing here can be wrong any more.

A pipeline is a graph: sources and tables, steps over them, and sinks, each from one of these. All have names;
a step without one has its number, as in `step 2`.

Texts that only Spark can judge (SQL, types that `ddl.py` does not know, options of formats that are not ours)
are kept as they were written; `unjudged` says which.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.common.given import File

INPUT: Final = "input"
"""The view that a step finds the result of the one before it in."""

DEAD, DROP, FAIL, KEEP = "dead", "drop", "fail", "keep"
"""What becomes of a record that does not fit, or of a row that is against an expectation."""

BAD_RECORDS: Final = "bad-records"

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

    format: str  # "json", "csv", "text", "avro" or "protobuf"
    schema: str  # "" for text
    fields: tuple[Field, ...] | None  # None: only Spark can tell
    options: Mapping[str, str]  # of Spark's own parser
    on_bad_record: str  # DEAD, DROP or FAIL
    rescued: str | None = None  # the column that holds what did not fit
    definition: bytes = b""  # of avro: the schema, as JSON; of protobuf: a compiled descriptor set
    message: str = ""  # of protobuf: which of its messages


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
class StaticTable:
    """A table that is read as it is when a run begins, to join."""

    name: str
    format: str
    path: str
    schema: str | None
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Step:
    """SQL over the views, or a function, which is None where only its path can be told before Spark runs."""

    name: str | None
    sql: str | None
    function: Function | None
    function_path: str | None
    takes_views: bool = False
    """The function takes the session and all views, instead of one frame."""
    of: str | None = None
    """The view that is its `input`; None: the result of the step before."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What holds for every row of a view, and what becomes of the others."""

    name: str
    of: str
    sql: str
    on_violation: str  # KEEP, DROP, DEAD or FAIL


@dataclass(frozen=True, slots=True)
class Sink:
    """Where rows go."""

    format: str
    mode: str  # "append", "update" or "complete"
    options: Mapping[str, str]
    partition_by: tuple[str, ...]
    name: str = ""  # "": the only one
    of: str | None = None  # the view whose rows these are; None: the result of the last step


@dataclass(frozen=True, slots=True)
class Test:
    """Rows in, rows out; by the names of views and sinks."""

    name: str
    given: Mapping[str, Sequence[Any]]  # of a source also payloads, as texts
    expected: Mapping[str, Sequence[Mapping[str, Any]]]
    violations: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """All of it."""

    name: str
    file: str
    sources: tuple[Source, ...]
    steps: tuple[Step, ...]
    sinks: tuple[Sink, ...]
    interval: str | None  # between two triggers; None: no pause
    once: bool
    checkpoint: str | None
    spark: Mapping[str, str]  # Spark's own settings
    unjudged: tuple[str, ...]  # what only Spark can tell
    text: File = field(compare=False, repr=False)  # where the lines of mistakes are looked up
    tables: tuple[StaticTable, ...] = ()
    expectations: tuple[Expectation, ...] = ()
    tests: tuple[Test, ...] = field(default=())

    @property
    def result(self) -> str:
        """The name of what the steps come to."""
        return self.step_names[-1] if self.steps else self.sources[0].name

    @property
    def step_names(self) -> list[str]:
        return [step_name(self.steps, number) for number in range(len(self.steps))]

    def origin(self, sink: Sink) -> str:
        """The name of the view that goes to a sink."""
        return self.result if sink.of is None else sink.of


def step_name(steps: Sequence[Step], number: int) -> str:
    """What a step is called, from 0."""
    return steps[number].name or f"step {number + 1}"
