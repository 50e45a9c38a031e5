"""Tables: what a report is made of, as data, and how it is kept as Parquet files.

One folder per table, in it one file, which is replaced as a whole. Any program that reads Parquet reads them,
Spark by `spark.read.parquet("report-tables/throughput")`.

Rules that always hold:
  * A table has these columns, in this order, whatever was found; it may have no row.
  * Times are UTC, in microseconds. Times that something took are seconds.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.errors import PenstockError
from penstock.model.life import Event

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.report.survey import Facts

EVENTS: Final = tuple(event.name.lower() for event in Event if event not in (Event.HELD, Event.DUE))
"""What is recorded: every arrow of a message's life but the delivery itself, and the end of a delay."""

GONE: Final = ("acked", "rejected", "expired", "withdrawn")
"""The events that end a life."""

BACK: Final = ("returned", "requeued", "delayed")
"""Those that end a delivery with the message in the queue again."""

OUTCOMES: Final = ("acked", "requeued", "lost", "died", "given_back", "expired", "withdrawn")
"""How a delivery ends, seen from the consumer."""

FAILED: Final = ("requeued", "lost", "died", "expired")
"""Those of them with which the work was not done."""

PERCENTILES: Final = {"p50_seconds": 0.5, "p90_seconds": 0.9, "p99_seconds": 0.99}
ACCURACY: Final = 10_000
BUCKET_ACCURACY: Final = 1000
"""Percentiles are exact up to half as many values as this. Of n values that are more, the rank may be wrong
by n / ACCURACY, rounded up. Measured: Spark's own words leave out the rounding."""

ATTEMPTS_MAX: Final = 10
"""Messages that took so many deliveries, or more, are counted together."""


class Column(NamedTuple):
    """A column: its name, its type as Spark says it, and what it means."""

    name: str
    type: str
    means: str


_QUEUE: Final = Column("queue", "string", "the queue")
_BUCKET: Final = Column("bucket", "timestamp", "when the bucket begins")
_BUCKET_OR_ALL: Final = Column("bucket", "timestamp", "when the bucket begins; null: the whole period")
_COUNTS: Final = tuple(Column(event, "bigint", f"events `{event}`") for event in EVENTS)
_TIMES: Final = (
    *(
        Column(name, "double", f"{part:.0%} took at most so long".replace("%", " %"))
        for name, part in PERCENTILES.items()
    ),
    Column("max_seconds", "double", "the longest"),
)

TABLES: Final[Mapping[str, tuple[Column, ...]]] = {
    "coverage": (
        _QUEUE,
        Column("events", "bigint", "events that were read"),
        Column("missing_events", "bigint", "events between the first and the last that could not be read"),
        Column("unsynced_events", "bigint", "events that were not in the files yet"),
        Column("event_first", "bigint", "number of the first event"),
        Column("event_end", "bigint", "number behind that of the last"),
        Column("time_first", "timestamp", "when the first event was"),
        Column("time_last", "timestamp", "when the last event was"),
        Column("offset_first", "bigint", "lowest offset of the messages that were accepted"),
        Column("offset_end", "bigint", "offset behind the highest of them"),
        Column("event_kept", "bigint", "number of the first event that retention has left"),
        Column("cut", "boolean", "whether retention may have removed events of the period"),
        Column("unknown_waits", "bigint", "first deliveries of messages whose acceptance is not kept"),
    ),
    "totals": (
        _QUEUE,
        *_COUNTS,
        Column("outstanding_start", "bigint", "messages that lived when the period began"),
        Column("outstanding_end", "bigint", "messages that lived when it ended, dead letters included"),
        Column("ready_now", "bigint", "messages that waited when the report was made"),
        Column("held_now", "bigint", "messages that a consumer had then"),
        Column("delayed_now", "bigint", "messages whose time had not come then"),
        Column("dead_now", "bigint", "dead letters then"),
        Column("consumers_now", "bigint", "consumers then"),
        Column("paused", "boolean", "whether it was paused then"),
    ),
    "throughput": (
        _QUEUE,
        _BUCKET,
        *_COUNTS,
        Column("outstanding", "bigint", "messages that lived when the bucket ended"),
    ),
    "waiting": (
        _QUEUE,
        _BUCKET_OR_ALL,
        Column("messages", "bigint", "messages whose first delivery ended in the period"),
        *_TIMES,
    ),
    "working": (
        _QUEUE,
        _BUCKET_OR_ALL,
        Column("outcome", "string", "how the deliveries ended; null: all of them"),
        Column("deliveries", "bigint", "deliveries that ended"),
        *_TIMES,
    ),
    "attempts": (
        _QUEUE,
        Column("attempt", "int", f"the number of the delivery; {ATTEMPTS_MAX}: that or more"),
        Column("acked", "bigint", "messages that were acknowledged then"),
        Column("died", "bigint", "messages that became dead letters, or were thrown away, then"),
    ),
    "endings": (
        _QUEUE,
        Column("event", "string", "what happened"),
        Column("reason", "string", "why; null: there is nothing to say"),
        Column("held", "boolean", "whether a consumer had the message"),
        Column("events", "bigint", "how often"),
    ),
    "deaths": (
        _QUEUE,
        _BUCKET,
        Column("event", "string", "`dead`, or `rejected`, `expired` and `withdrawn`: thrown away"),
        Column("reason", "string", "why"),
        Column("messages", "bigint", "how many"),
    ),
    "consumers": (
        _QUEUE,
        Column("protocol", "string", "through which it came"),
        Column("host", "string", "from where; `unix`: a Unix socket"),
        Column("consumer", "string", "the connection; null: all of this queue, protocol and host"),
        Column("connections", "bigint", "how many connections that were"),
        Column("deliveries", "bigint", "deliveries that ended"),
        *(Column(outcome, "bigint", f"those that ended `{outcome}`") for outcome in OUTCOMES),
        *_TIMES,
        Column("time_first", "timestamp", "when the first of these deliveries ended"),
        Column("time_last", "timestamp", "when the last one did"),
    ),
}

Rows = list[dict[str, Any]]
"""A table as Python sees it: what a column holds is in `TABLES`."""


class NotWritten(PenstockError):
    """A file that could not be written. Says which, and why."""


def schema_of(table: str) -> "pa.Schema":
    import pyarrow as pa

    types = {
        "string": pa.string(),
        "bigint": pa.int64(),
        "int": pa.int32(),
        "double": pa.float64(),
        "boolean": pa.bool_(),
        "timestamp": pa.timestamp("us", "UTC"),
    }
    return pa.schema([(column.name, types[column.type]) for column in TABLES[table]])


def empty(table: str) -> "pa.Table":
    return schema_of(table).empty_table()


def of_nothing(facts: "Iterable[Facts]") -> "dict[str, pa.Table]":
    """The tables of a log in which nothing is kept; it takes no Spark to find that out."""
    import pyarrow as pa

    rows: dict[str, Rows] = {name: [] for name in TABLES}
    for one in facts:
        for name in ("coverage", "totals"):
            counts = {column.name: 0 for column in TABLES[name] if column.type == "bigint"}
            rows[name].append({**counts, **one.columns(), "cut": one.event_start > 0})
        for name in ("event_first", "event_end", "offset_first", "offset_end"):
            del rows["coverage"][-1][name]
        rows["totals"][-1] |= {"outstanding_start": one.living, "outstanding_end": one.living}
    return {name: pa.Table.from_pylist(rows[name], schema_of(name)) for name in TABLES}


def write_tables(tables: "Mapping[str, pa.Table]", folder: Path) -> None:
    """Every table into a folder of its own below that one; what was there of a former report is replaced."""
    import pyarrow.parquet as pq

    for name, table in tables.items():
        with writing(folder / name / f"{name}.parquet") as part:
            pq.write_table(table, part, compression="zstd")


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A file that is written beside its place, and put there when it is whole."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        part.replace(path)
    except OSError as error:
        raise NotWritten(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # where all went well, it is not there any more
            part.unlink()
