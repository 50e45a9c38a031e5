"""Payloads to columns, by Spark: every message is a good record or a bad one, and is told why."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from penstock.pipeline.ddl import read_ddl
from penstock.pipeline.failures import cause_of
from penstock.pipeline.model import Parse
from penstock.pipeline.parsing import COPY_BYTES_MAX, bad_records, good_records, without_copies
from penstock.spark.source import schema_of
from tests.pipeline.test_ddl import READ, WRONG

SENT = datetime(2030, 1, 2, 3, 4, 5, 678901, UTC)

JSON_SCHEMA = (
    "id bigint not null, Region string, `it's` double, n struct<a: int>, tags array<int>, "
    "at struct<`zip-code`: string not null, more: array<struct<b: int not null>>, "
    "by: map<string, struct<c: int not null>>>"
)
JSON_GOOD: list[tuple[bytes, dict[str, Any]]] = [
    (b'{"id":1,"Region":"north","it\'s":2.5}', {"id": 1, "Region": "north", "it's": 2.5}),
    (b' {"id":1}\n', {"id": 1}),
    (b'{"id":1,"Region":null,"more":[1,{}]}', {"id": 1}),
    (b'{"id":1,"Region":5}', {"id": 1, "Region": "5"}),
    (b'{"id":1,"n":{"a":7},"tags":[1,2]}', {"id": 1, "n": {"a": 7}, "tags": [1, 2]}),
    (b'{"id":1,"at":null}', {"id": 1, "at": None}),
    (
        b'{"id":1,"at":{"zip-code":"x","more":[null,{"b":2}],"by":{"k":{"c":3},"l":null}}}',
        {
            "id": 1,
            "at": {"zip-code": "x", "more": [None, {"b": 2}], "by": {"k": {"c": 3}, "l": None}},
        },
    ),
    ('{"id":1,"Region":"größer}{"}'.encode(), {"id": 1, "Region": "größer}{"}),
]
JSON_BAD: list[tuple[bytes, str]] = [
    (b'{"id":"x","it\'s":"y"}', "id is no bigint: x; it's is no double: y"),
    (b'{"id":1.5}', "id is no bigint: 1.5"),
    (b'{"id":99999999999999999999}', "id is no bigint: 99999999999999999999"),
    (b'{"id":1,"n":{"a":"x"}}', 'n is no struct<a: int>: {"a":"x"}'),
    (b'{"id":1,"tags":[1,"x"]}', 'tags is no array<int>: [1,"x"]'),
    (b"{}", "id is missing"),
    (b'{"id":null}', "id is missing"),
    (b'{"ID":1}', "id is missing"),
    (b'{"id":1,"at":{}}', "it does not fit the schema"),
    (b'{"id":1,"at":{"zip-code":"x","more":[{"b":1},{}]}}', "it does not fit the schema"),
    (b'{"id":1,"at":{"zip-code":"x","by":{"k":{"c":null}}}}', "it does not fit the schema"),
    (b"not json", "it is not JSON"),
    (b'{"id":1', "it is not JSON"),
    (b" ", "it is not JSON"),
    (b"", "the message is empty"),
    (b"null", "it is JSON, but no object: null"),
    (b'[{"id":1}]', 'it is JSON, but no object: [{"id":1}]'),
    (b'{"id":1}{"id":2}', "something stands behind the object"),
    (b'{"id":1}\n{"id":2}', "something stands behind the object"),
    (b'{"id":1},{"id":2}', "something stands behind the object"),
    (b'{"id":1},"Region":"north"', "something stands behind the object"),
    (b'{"id":1},"end":1', "something stands behind the object"),
    (b'{"id":1},', "something stands behind the object"),
    (b'{"id":1} more', "something stands behind the object"),
    (b'{"id":1}}', "something stands behind the object"),
    (b'{"id":1,"Region":"\xff"}', "it is not UTF-8"),
]

CSV_SCHEMA = "id bigint, region string, amount double not null"
CSV_GOOD: list[tuple[bytes, dict[str, Any]]] = [
    (b"1;north;2.5", {"id": 1, "region": "north", "amount": 2.5}),
    (b'1;"a;b";3\r\n', {"id": 1, "region": "a;b", "amount": 3.0}),
    (b";;4\n", {"id": None, "region": None, "amount": 4.0}),
]
CSV_BAD: list[tuple[bytes, str]] = [
    (b"x;north;2", "id is no bigint: x"),
    (b"1;north", "it does not have 3 fields"),
    (b"1;north;2;3", "it does not have 3 fields"),
    (b"1;north;2\n2;south;3", "it does not have 3 fields"),
    (b"1;north;", "amount is missing"),
    (b"\n", "the message is empty"),
    (b"", "the message is empty"),
    (b"\xff;north;2", "it is not UTF-8"),
]

TEXT_GOOD: list[tuple[bytes, dict[str, Any]]] = [(b"any text", {"value": "any text"}), (b"", {"value": ""})]
TEXT_BAD: list[tuple[bytes, str]] = [(b"\xff\xfe", "it is not UTF-8")]

FORMATS = {
    "json": (JSON_SCHEMA, {}, JSON_GOOD, JSON_BAD),
    "csv": (CSV_SCHEMA, {"sep": ";"}, CSV_GOOD, CSV_BAD),
    "text": ("", {}, TEXT_GOOD, TEXT_BAD),
}


def parse_of(its_format: str, on_bad_record: str = "dead") -> Parse:
    schema, options, _, _ = FORMATS[its_format]
    return Parse(its_format, schema, read_ddl(schema) if schema else (), options, on_bad_record)


def frame_of(spark: SparkSession, values: list[bytes], protocol: str = "http") -> DataFrame:
    rows = [
        ("orders", offset, f"id-{offset}", value, SENT, protocol, None, None)
        for offset, value in enumerate(values)
    ]
    return spark.createDataFrame(rows, schema_of("messages"))


@pytest.mark.parametrize("its_format", FORMATS)
def test_every_message_is_good_or_bad(spark: SparkSession, its_format: str) -> None:
    _, _, good, bad = FORMATS[its_format]
    frame = frame_of(spark, [*(value for value, _ in good), *(value for value, _ in bad)])
    records = {
        row.offset: row.asDict(recursive=True) for row in good_records(frame, parse_of(its_format)).collect()
    }
    letters = [json.loads(row.value) for row in bad_records(frame, parse_of(its_format), "p").collect()]
    for offset, (value, expected) in enumerate(good):
        found = {name: records[offset][name] for name in expected}
        assert found == expected, value
    assert sorted(records) == list(range(len(good)))
    told = {letter["offset"]: letter["error"] for letter in letters}
    assert told == {len(good) + number: error for number, (_, error) in enumerate(bad)}


def test_columns_of_the_record_and_of_its_message(spark: SparkSession) -> None:
    frame = good_records(frame_of(spark, [b'{"id":7}']), parse_of("json"))
    assert frame.columns == [
        *("id", "Region", "it's", "n", "tags", "at"),
        *("queue", "offset", "timestamp", "protocol", "expires", "retries"),
    ]
    (row,) = frame.collect()
    assert (row.id, row.queue, row.offset) == (7, "orders", 0)


@pytest.mark.parametrize(
    ("its_format", "values"), [("json", [b'{"id":1}', b'{"at":"x"}']), ("csv", [b"1,x", b",x"])]
)
def test_what_a_schema_that_only_spark_can_read_says_is_not_null(
    spark: SparkSession, its_format: str, values: list[bytes]
) -> None:
    schema = "id bigint not null comment 'the number', at string"
    assert read_ddl(schema) is None
    parse = Parse(its_format, schema, None, {}, "dead")
    frame = frame_of(spark, values)
    assert [row.id for row in good_records(frame, parse).collect()] == [1]
    (letter,) = bad_records(frame, parse, "p").collect()
    told = json.loads(letter.value)
    assert (told["offset"], told["error"]) == (1, "it does not fit the schema")


def test_what_a_dead_letter_says(spark: SparkSession) -> None:
    large = b"x" * (COPY_BYTES_MAX + 1)
    frame = frame_of(spark, [b'{"id": "\xc3\xa4"}', b"\xff", large])
    text, binary, cut = [json.loads(row.value) for row in bad_records(frame, parse_of("json"), "p").collect()]
    assert text == {
        "error": "id is no bigint: ä",
        "pipeline": "p",
        "offset": 0,
        "id": "id-0",
        "timestamp": "2030-01-02T03:04:05.678901Z",
        "value": '{"id": "ä"}',
    }
    assert (binary["value_base64"], "value" in binary) == ("/w==", False)
    assert (len(cut["value"]), cut["value_bytes"]) == (COPY_BYTES_MAX, COPY_BYTES_MAX + 1)


def test_copies_of_bad_records_are_no_input(spark: SparkSession) -> None:
    frame = frame_of(spark, [b"sent"]).union(frame_of(spark, [b"copy"], protocol="pipeline"))
    assert [bytes(row.value) for row in without_copies(frame).collect()] == [b"sent"]


def test_bad_records_can_be_dropped_or_end_the_query(spark: SparkSession) -> None:
    frame = frame_of(spark, [b'{"id":1}', b"bad", b'{"id":3}'])
    dropped = good_records(frame, parse_of("json", "drop"))
    assert [row.id for row in dropped.collect()] == [1, 3]
    with pytest.raises(PySparkException) as raised:
        good_records(frame, parse_of("json", "fail")).collect()
    assert cause_of(raised.value) == "queue 'orders', offset 1: this record does not fit: bad"


def struct_of(text: str) -> StructType:
    found = StructType.fromDDL(text)
    assert isinstance(found, StructType)
    return found


def test_spark_reads_schemas_as_they_are_read_here(spark: SparkSession) -> None:
    for text, fields in READ:
        theirs = struct_of(text)
        assert theirs.fieldNames() == [field.name for field in fields], text
        # The types are written in another way, but are the same ones.
        again = struct_of(", ".join(f"`{f.name.replace('`', '``')}` {f.type}" for f in fields))
        assert [it.dataType for it in again] == [it.dataType for it in theirs], text
    for text, _ in WRONG:
        if text not in ("", "id bigint, ID string"):  # these are fine for a schema, but of no use
            with pytest.raises(PySparkException):
                struct_of(text)
