"""Payloads to columns, by Spark: every message is a good record or a bad one, and is told why."""

import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from penstock.pipeline.coding import WrongDefinition, ddl_of, encoder, fields_of
from penstock.pipeline.ddl import read_ddl
from penstock.pipeline.failures import cause_of
from penstock.pipeline.model import Parse
from penstock.pipeline.parsing import COPY_BYTES_MAX, bad_records, good_records, parsed, without_copies
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


def split(frame: DataFrame, parse: Parse) -> tuple[DataFrame, DataFrame]:
    """The records that fit, and the letters of the others."""
    both = parsed(frame, parse)
    return good_records(both, parse), bad_records(both, parse, "p")


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
    fits, others = split(frame, parse_of(its_format))
    records = {row.offset: row.asDict(recursive=True) for row in fits.collect()}
    letters = [json.loads(row.value) for row in others.collect()]
    for offset, (value, expected) in enumerate(good):
        found = {name: records[offset][name] for name in expected}
        assert found == expected, value
    assert sorted(records) == list(range(len(good)))
    told = {letter["offset"]: letter["error"] for letter in letters}
    assert told == {len(good) + number: error for number, (_, error) in enumerate(bad)}


def test_columns_of_the_record_and_of_its_message(spark: SparkSession) -> None:
    frame, _ = split(frame_of(spark, [b'{"id":7}']), parse_of("json"))
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
    fits, others = split(frame_of(spark, values), parse)
    assert [row.id for row in fits.collect()] == [1]
    (letter,) = others.collect()
    told = json.loads(letter.value)
    assert (told["offset"], told["error"]) == (1, "it does not fit the schema")


def test_what_a_dead_letter_says(spark: SparkSession) -> None:
    large = b"x" * (COPY_BYTES_MAX + 1)
    frame = frame_of(spark, [b'{"id": "\xc3\xa4"}', b"\xff", large])
    text, binary, cut = [json.loads(row.value) for row in split(frame, parse_of("json"))[1].collect()]
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
    dropped, _ = split(frame, parse_of("json", "drop"))
    assert [row.id for row in dropped.collect()] == [1, 3]
    with pytest.raises(PySparkException) as raised:
        split(frame, parse_of("json", "fail"))[0].collect()
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


# --- what is rescued, Avro, Protobuf ------------------------------------------------------------------------


def test_what_does_not_fit_is_rescued(spark: SparkSession) -> None:
    schema = (
        "id bigint not null, n struct<a: int>, tag string, l array<struct<m: map<string, struct<c: int>>>>"
    )
    parse = Parse("json", schema, read_ddl(schema), {}, "dead", "_rescued")
    payloads = [
        b'{"id":1,"tag":"x"}',
        b'{"id":2,"tag":null,"more":{"b":[1]}}',
        b'{"id":3,"n":"none","new":1}',
        b'{"id":4,"n":{"a":"x"},"new":1}',
        b'{"id":"five"}',
        b'{"id":6,"more":{"a":1,"a":2}}',
        b'{"id":7,"n":{"a":1,"b":2},"l":[null,{"m":{"k":{"c":1}}}]}',
        b'{"id":8,"n":null,"l":[{},{"m":{"j":null,"k":{"c":1,"d":2}}}]}',
        b"no json",
        b'{"id":9,"tag":"one","tag":"two"}',
    ]
    fits, others = split(frame_of(spark, payloads), parse)
    rows = {row.id: row for row in fits.collect()}
    assert rows.pop(9)["_rescued"] == payloads[-1].decode()
    assert {number: row["_rescued"] and json.loads(row["_rescued"]) for number, row in rows.items()} == {
        1: None,
        2: {"more": {"b": [1]}},
        3: {"n": "none", "new": 1},
        4: {"n": {"a": "x"}, "new": 1},
        6: {"id": 6, "more": {"a": 2}},
        7: {"n": {"a": 1, "b": 2}},
        8: {"l": [{}, {"m": {"j": None, "k": {"c": 1, "d": 2}}}]},
    }
    assert (rows[3].n, rows[1].tag, rows[7].n.a) == (None, "x", 1)
    assert [json.loads(row.value)["offset"] for row in others.collect()] == [4, 8]


AVRO_SCHEMA = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "region", "type": ["null", "string"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "by", "type": {"type": "map", "values": "int"}},
        {"name": "of", "type": {"type": "record", "name": "Of", "fields": [{"name": "n", "type": "float"}]}},
    ],
}


def coded(its_format: str, definition: bytes, message: str = "") -> Parse:
    fields = fields_of(its_format, definition, message)
    return Parse(its_format, ddl_of(fields), fields, {}, "dead", None, definition, message)


def test_avro(spark: SparkSession) -> None:
    parse = coded("avro", json.dumps(AVRO_SCHEMA).encode())
    record = {
        "id": 1,
        "region": None,
        "at": SENT,
        "price": Decimal("2.50"),
        "kind": "B",
        "tags": ["x", "y"],
        "by": {"k": 3},
        "of": {"n": 0.5},
    }
    payload = encoder(parse)(record)
    fits, others = split(frame_of(spark, [payload, payload + b"x", b"", b"\x02"]), parse)
    (row,) = fits.collect()
    found = row.asDict(recursive=True)
    assert found["at"].replace(tzinfo=UTC) == SENT
    assert {name: found[name] for name in record if name != "at"} == {
        name: value for name, value in record.items() if name != "at"
    }
    assert (row.offset, row.queue) == (0, "orders")
    letters = [json.loads(it.value) for it in others.collect()]
    assert [it["offset"] for it in letters] == [1, 2, 3]
    assert letters[0]["error"] == "it is no avro: 1 bytes stand behind the record"


def proto_set() -> bytes:
    """As protoc writes it: a message with each kind of field."""
    from google.protobuf import descriptor_pb2, timestamp_pb2

    stamp = descriptor_pb2.FileDescriptorProto()
    timestamp_pb2.DESCRIPTOR.CopyToProto(stamp)
    file = descriptor_pb2.FileDescriptorProto(
        name="shop.proto", package="shop", syntax="proto3", dependency=[stamp.name]
    )
    order = file.message_type.add(name="Order")
    kinds = descriptor_pb2.FieldDescriptorProto
    entry = order.nested_type.add(name="ByEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=1)
    entry.field.add(name="value", number=2, type=kinds.TYPE_INT32, label=1)
    file.enum_type.add(name="Kind").value.add(name="A", number=0)
    rows: list[tuple[str, int, int, str]] = [
        ("id", kinds.TYPE_INT64, 1, ""),
        ("region", kinds.TYPE_STRING, 1, ""),
        ("raw", kinds.TYPE_BYTES, 1, ""),
        ("kind", kinds.TYPE_ENUM, 1, ".shop.Kind"),
        ("tags", kinds.TYPE_STRING, 3, ""),
        ("by", kinds.TYPE_MESSAGE, 3, ".shop.Order.ByEntry"),
        ("at", kinds.TYPE_MESSAGE, 1, ".google.protobuf.Timestamp"),
    ]
    for number, (name, kind, label, type_name) in enumerate(rows, 1):
        field = order.field.add(name=name, number=number, label=label)
        field.type = kind
        if type_name:
            field.type_name = type_name
    whole = descriptor_pb2.FileDescriptorSet(file=[stamp, file])
    return bytes(whole.SerializeToString())


def test_protobuf(spark: SparkSession) -> None:
    parse = coded("protobuf", proto_set(), "shop.Order")
    assert parse.schema.startswith("`id` bigint, `region` string, `raw` binary, `kind` string, `tags` array<")
    payload = encoder(parse)(
        {"id": 7, "raw": "/w==", "tags": ["x"], "by": {"k": 2}, "at": "2030-01-02T03:04:05.678901Z"}
    )
    fits, others = split(frame_of(spark, [payload, b"\xff\xff", b""]), parse)
    rows = {row.offset: row.asDict(recursive=True) for row in fits.collect()}
    names = ("id", "region", "kind", "tags", "by")
    assert [rows[0][name] for name in names] == [7, "", "A", ["x"], {"k": 2}]
    assert (bytes(rows[0]["raw"]), rows[0]["at"].replace(tzinfo=UTC)) == (b"\xff", SENT)
    assert [rows[2][name] for name in ("id", "at")] == [0, None]  # all of it left out
    (letter,) = [json.loads(it.value) for it in others.collect()]
    assert (letter["offset"], letter["error"][:17]) == (1, "it is no protobuf")


@pytest.mark.parametrize(
    ("its_format", "definition", "message", "said"),
    [
        ("avro", b"{", "", "this is no Avro schema"),
        ("avro", b'"long"', "", "the schema is of no record"),
        (
            "avro",
            b'{"type":"record","name":"R","fields":[{"name":"x","type":["int","string"]}]}',
            "",
            "R: a union of 2 types is no column",
        ),
        (
            "avro",
            b'{"type":"record","name":"R","fields":[{"name":"x","type":["null","R"]}]}',
            "",
            "R holds itself",
        ),
        ("protobuf", b"\xff", "x", "this is no descriptor set"),
        ("protobuf", proto_set(), "shop.Ordr", "there is no message 'shop.Ordr'; there are "),
    ],
)
def test_definitions_that_are_no_columns(its_format: str, definition: bytes, message: str, said: str) -> None:
    with pytest.raises(WrongDefinition, match=said):
        fields_of(its_format, definition, message)
