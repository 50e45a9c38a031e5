"""Testing: the tests in a pipeline's file, on a real Spark, without a broker: rows in, rows out.

The graph is made of batches (`graph.py`), so that an aggregate has all its rows at once, and no watermark
matters. What a source is given goes through its parser: a table as a record in the source's format, a text as
the payload itself. Columns of the message (`timestamp`, `queue`, …) may stand beside those of the record;
those that do not are made up: the queue that is subscribed to, offsets from 0 on, the first seconds of 2030.
A table that is not given is read where it is.

What is expected is compared without order, by the columns that the expected rows have.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from penstock.errors import PenstockError
from penstock.pipeline.batchwise import fanned_out
from penstock.pipeline.coding import AVRO, PROTOBUF, encoder
from penstock.pipeline.failures import cause_of
from penstock.pipeline.graph import Graph, is_against, read_table
from penstock.pipeline.model import BAD_RECORDS, Expectation, Parse, Pipeline, Source, Test
from penstock.pipeline.parsing import bad_records, good_records, parsed
from penstock.spark.source import schema_of

FIRST: Final = datetime(2030, 1, 1, tzinfo=UTC)

Row = Mapping[str, Any]


def differences(session: SparkSession, pipeline: Pipeline, test: Test) -> list[str]:
    """What is other than a test says, a line for each; none where it holds."""
    try:
        return _differences(session, pipeline, test)
    except PySparkException as error:
        return [cause_of(error)]
    except PenstockError as error:
        return [str(error)]


def _differences(session: SparkSession, pipeline: Pipeline, test: Test) -> list[str]:
    given: dict[str, DataFrame] = {}
    bad: list[DataFrame] = []
    looked_at: list[tuple[Expectation, DataFrame]] = []
    for table in pipeline.tables:
        rows = test.given.get(table.name)
        if rows is None:
            given[table.name] = read_table(session, table)
        else:
            made: Any = session.createDataFrame  # of rows that are tables, which it has no type for
            given[table.name] = made(rows, table.schema) if table.schema else made(rows)
    for source in pipeline.sources:
        frame = _messages(session, source, test.given.get(source.name, ()))
        if source.parse is not None:
            frame = parsed(frame, source.parse)
            bad.append(bad_records(frame, source.parse, pipeline.name))
            frame = good_records(frame, source.parse)
        given[source.name] = frame
    graph = Graph(session, pipeline).make(given, look=lambda it, rows: looked_at.append((it, rows)))
    sinks = {sink.name: sink for sink in pipeline.sinks}
    found: list[str] = []
    for name, expected in test.expected.items():
        if name == BAD_RECORDS:
            rows = [json.loads(row.value) | {"queue": row.queue} for it in bad for row in it.collect()]
        else:
            sink = sinks.get(name)
            frame = graph.frames[name] if sink is None else graph.frames[pipeline.origin(sink)]
            if sink is not None:
                frame, _ = fanned_out(frame, sink)
            rows = [row.asDict(recursive=True) for row in frame.collect()]
        found += _compared(name, expected, rows)
    for expectation, frame in looked_at:
        wanted = test.violations.get(expectation.name)
        count = frame.where(is_against(expectation)).count() if wanted is not None else None
        if count != wanted:
            found.append(f"{expectation.name}: {count} rows are against it, not {wanted}")
    return found


# --- rows in -----------------------------------------------------------------------------------------------


def _messages(session: SparkSession, source: Source, rows: Sequence[Any]) -> DataFrame:
    """Rows of a test as messages of their queue."""
    schema = schema_of(source.view, source.options.get("includeHeaders") == "true")
    queue = source.options.get("subscribe", source.name).partition(",")[0].strip()
    made: list[tuple[Any, ...]] = []
    for offset, row in enumerate(rows):
        message: dict[str, Any] = {
            "queue": queue,
            "offset": offset,
            "id": f"{offset:032x}",
            "timestamp": FIRST + timedelta(seconds=offset),
            "protocol": "test",
        }
        message |= _message(source.parse, row, schema)
        made.append(tuple(_typed(message.get(name)) for name in schema.fieldNames()))
    return session.createDataFrame(made, schema)


def _message(parse: Parse | None, row: Any, schema: StructType) -> dict[str, Any]:
    if isinstance(row, str):
        return {"value": row.encode()}
    record = {} if parse is None else dict(row)
    names = {field.name for field in (parse.fields or ())} if parse is not None else set()
    ours = {name: record.pop(name) for name in schema.fieldNames() if name in record and name not in names}
    if parse is None or parse.format == "text":
        ours = {**ours, **row}
        ours["value"] = str(ours.get("value", "")).encode()
    elif parse.format == "csv":
        text = io.StringIO()
        writer = csv.writer(text, delimiter=parse.options.get("sep", ","), lineterminator="")
        writer.writerow([record.get(field.name) for field in parse.fields or ()])
        ours["value"] = text.getvalue().encode()
    elif parse.format in (AVRO, PROTOBUF):
        ours["value"] = encoder(parse)(record)
    else:
        ours["value"] = json.dumps(record, default=_plain).encode()
    return ours


def _typed(value: Any) -> Any:
    """A time without a zone is in UTC; one may also be written as a text."""
    if isinstance(value, datetime) and value.tzinfo is None:
        return value.replace(tzinfo=UTC)
    return value


# --- rows out ----------------------------------------------------------------------------------------------


def _compared(name: str, expected: Sequence[Row], rows: Iterable[Row]) -> list[str]:
    columns = list(dict.fromkeys(column for row in expected for column in row))
    wanted = Counter(_shown(row, columns) for row in expected)
    # Without a row that says which columns count, all do.
    there = Counter(_shown(row, columns or list(row)) for row in rows)
    missing = [f"{name}: - {row}" for row in (wanted - there).elements()]
    return missing + [f"{name}: + {row}" for row in (there - wanted).elements()]


def _shown(row: Row, columns: Sequence[str]) -> str:
    return json.dumps({name: _plain(row.get(name)) for name in columns}, ensure_ascii=False, default=str)


def _plain(value: Any) -> Any:
    """A value as TOML and Spark both have it."""
    if isinstance(value, dict):
        return {key: _plain(it) for key, it in sorted(value.items())}
    if isinstance(value, list):
        return [_plain(it) for it in value]
    if isinstance(value, datetime):
        moment = value.astimezone(UTC) if value.tzinfo is not None else value
        return moment.replace(tzinfo=None).isoformat() + "Z"
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode(errors="backslashreplace")
    if isinstance(value, Decimal | float) and float(value).is_integer():
        return int(value)
    return float(value) if isinstance(value, Decimal) else value
