"""Schemas: what is read without Spark, what is left to it, and what is refused."""

import pytest

from penstock.pipeline.ddl import WrongSchema, read_ddl
from penstock.pipeline.model import Field

READ: list[tuple[str, list[Field]]] = [
    ("id bigint", [Field("id", "bigint")]),
    ("id BIGINT, Region String", [Field("id", "bigint"), Field("Region", "string")]),
    ("id: bigint not null", [Field("id", "bigint", required=True)]),
    ("`order id` string", [Field("order id", "string")]),
    ("`a``b` int", [Field("a`b", "int")]),
    ("`größe` double", [Field("größe", "double")]),
    ("price decimal(10,2)", [Field("price", "decimal(10,2)")]),
    ("price decimal", [Field("price", "decimal")]),
    ("code char(3), note varchar(20)", [Field("code", "char(3)"), Field("note", "varchar(20)")]),
    ("tags array<string>", [Field("tags", "array<string>")]),
    ("m map<string, array<int>>", [Field("m", "map<string, array<int>>")]),
    (
        "a struct<street: string, zip: int not null>, b date",
        [Field("a", "struct<street: string, zip: int not null>"), Field("b", "date")],
    ),
    (
        "a array<struct<`order-id`: int, `x``y`: date>>",
        [Field("a", "array<struct<`order-id`: int, `x``y`: date>>")],
    ),
    ("a\n  struct<b struct<c: timestamp_ntz>>", [Field("a", "struct<b: struct<c: timestamp_ntz>>")]),
]

LEFT = [
    "id bigint comment 'the number'",
    "id string collate UNICODE",
    "t interval day to second",
    "at time(6)",
    "place geography(4326)",
    "id bigint default 5",
]

WRONG = [
    ("", "it is empty; write columns as in id bigint, region string"),
    ("id", "column 'id' has no type; as in id string"),
    ("id bigint,", "a column is missing behind the last comma"),
    ("id bigin", "column 'id': there is no type 'bigin'; did you mean bigint?"),
    ("id text", "column 'id': there is no type 'text'; did you mean string?"),
    ("id datetime", "column 'id': there is no type 'datetime'; did you mean timestamp?"),
    ("id bigint, ID string", "column 'ID' is there twice"),
    ("id bigint not", "column 'id': not is followed by null"),
    ("a array", "column 'a': array says of what, as in array<string>"),
    ("a array<strin>", "column 'a': there is no type 'strin'; did you mean string?"),
    ("a array<string", "column 'a': it does not end; write >"),
    ("a map<string>", "column 'a': a map has two types, as in map<string, bigint>"),
    ("a struct<b: txt>", "column 'a.b': there is no type 'txt'"),
    ("a struct<b: int", "column 'a': it does not end; write >"),
    ("c varchar", "column 'c': write varchar(10)"),
    ("c decimal(x)", "column 'c': write decimal(10,2)"),
    ("c decimal(1 2)", "column 'c': the numbers of decimal end with )"),
    ("größe double", "'größe' stands where a column's name should be; put `…` around odd names"),
    ("- bigint", "'-' stands where a column's name should be"),
    ("order-id bigint", "column 'order': there is no type '-'"),
]


@pytest.mark.parametrize(("text", "fields"), READ, ids=[text for text, _ in READ])
def test_columns_are_read(text: str, fields: list[Field]) -> None:
    assert read_ddl(text) == tuple(fields)


@pytest.mark.parametrize("text", LEFT)
def test_what_only_spark_knows_is_left_to_it(text: str) -> None:
    assert read_ddl(text) is None


@pytest.mark.parametrize(("text", "problem"), WRONG, ids=[text or "empty" for text, _ in WRONG])
def test_what_spark_would_refuse_is_refused(text: str, problem: str) -> None:
    with pytest.raises(WrongSchema) as raised:
        read_ddl(text)
    assert str(raised.value).startswith(problem)
