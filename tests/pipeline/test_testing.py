"""Tests in a pipeline's file, `pipeline test`; and what `infer` makes of a queue."""

from dataclasses import replace

import pytest
from pyspark.sql import SparkSession

from penstock.pipeline.file import PipelineMistakes, read_pipeline
from penstock.pipeline.flows import own_session
from penstock.pipeline.inferring import NothingToInfer, inferred
from penstock.pipeline.testing import differences
from tests.pipeline.rig import Rig, orders
from tests.server.harness import ROOT

EXAMPLE = str(ROOT / "examples" / "pipelines" / "shop.toml")

FORMATS = """
[[source]]
name = "lines"
subscribe = "lines"
[source.parse]
format = "csv"
schema = "id bigint, name string"
options = {sep = ";"}
[[source]]
name = "words"
subscribe = "words"
[source.parse]
format = "text"
[[source]]
name = "raw"
subscribe = "raw"
[[source]]
name = "coded"
subscribe = "coded"
[source.parse]
format = "avro"
schema-file = "order.avsc"
[[step]]
name = "sums"
sql = "select name, sum(id) as total, max(timestamp) as last from lines group by name"
[[step]]
name = "plain"
sql = "select cast(value as string) as text, offset from raw"
[[step]]
name = "odd"
sql = "select double('NaN') as x, double('Infinity') as y, time'10:00:00' as t from raw where offset = 0"
[[sink]]
name = "out"
from = "sums"
format = "delta"
mode = "complete"
path = "FOLDER/out"
[run]
checkpoint = "FOLDER/checkpoint"
[[test]]
name = "everything"
given.lines = [{id = 1, name = "a;b"}, {id = 2, name = "a;b", timestamp = 2031-01-01T00:00:00Z}, "3;c"]
given.words = [{value = "one"}, "two"]
given.raw = ["x", {value = "y", offset = 7}]
given.coded = [{id = 5}]
expect.out = [
  {name = "a;b", total = 3, last = 2031-01-01T00:00:00Z},
  {name = "c", total = 3, last = 2030-01-01T00:00:02Z},
]
expect.words = [{value = "two", queue = "words"}, {value = "one", queue = "words"}]
expect.plain = [{text = "x", offset = 0}, {text = "y", offset = 7}]
expect.coded = [{id = 5}]
expect.odd = [{x = nan, y = inf, t = 10:00:00}]
"""
AVRO = '{"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}]}'


def test_the_example_holds_and_what_does_not_is_shown(spark: SparkSession) -> None:
    pipeline = read_pipeline(EXAMPLE)
    session = own_session(spark, pipeline)
    (test,) = pipeline.tests
    assert differences(session, pipeline, test) == []
    wrong = replace(
        test,
        expected={"table": [{"id": 1, "manager": "Bob"}, {"id": 9}], "letters": []},
        violations={"is_known": 0},
    )
    assert differences(session, pipeline, wrong) == [
        'table: - {"id": 1, "manager": "Bob"}',
        'table: - {"id": 9, "manager": null}',
        'table: + {"id": 1, "manager": "Ann"}',
        'letters: + {"value": "{\\"id\\":1,\\"amount\\":1200.0,\\"manager\\":\\"Ann\\"}", '
        '"queue": "orders.large.north"}',
        "is_known: 1 rows are against it, not 0",
    ]


def test_every_format_can_be_given(rig: Rig) -> None:
    (rig.folder / "order.avsc").write_text(AVRO)
    pipeline = rig.pipeline("formats", FORMATS)
    (test,) = pipeline.tests
    assert differences(own_session(rig.spark, pipeline), pipeline, test) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("given.words", "given.wrds", "given wrds: there is no such name here; did you mean words?"),
        ("expect.plain", "expect.plan", "expect plan: there is no such name here; did you mean plain?"),
        ('["x", {', "[3, {", "[[test]] 1 given"),
        ('name = "everything"\n', "", "[[test]] 1: there is no name"),
        ("schema-file", "schema", "[source.parse]: there is no schema-file, which avro needs"),
        ('"order.avsc"', '"nothing.avsc"', "[source.parse] schema-file: it cannot be read (No such file"),
        (
            'format = "text"',
            'format = "text"\nrescued = "x"',
            "rescued: only of json something can be rescued",
        ),
        ('format = "text"', 'format = "text"\nmessage = "x"', "message: only protobuf has messages"),
    ],
)
def test_mistakes_are_told(rig: Rig, old: str, new: str, said: str) -> None:
    (rig.folder / "order.avsc").write_text(AVRO)
    assert old in FORMATS
    with pytest.raises(PipelineMistakes) as raised:
        rig.pipeline("formats", FORMATS.replace(old, new, 1))
    assert any(said in line and ", line " in line for line in raised.value.lines), raised.value.lines


def test_a_schema_is_inferred_from_the_last_messages(rig: Rig) -> None:
    rig.send("inferred", [b'{"old": 1}', *orders(2), b'{"o`d": 1}', b"no json"])
    found = inferred(rig.spark, "inferred", {"url": rig.url}, "json", 4)
    assert found == (
        "# Of 4 messages of inferred, offsets 1 to 4.\n"
        '[parse]\nformat = "json"\nschema = "amount DOUBLE,id BIGINT,`o``d` BIGINT,region STRING"'
    )
    rig.send("inferred,csv", [b"1,x,2.5", b"2,y,3"])
    found = inferred(rig.spark, "inferred,csv", {"url": rig.url}, "csv", 10)
    assert found.endswith('schema = "_c0 INT,_c1 STRING,_c2 DOUBLE"')
    rig.send("inferred-not", [b"no json"])
    with pytest.raises(NothingToInfer, match="nothing in its last 1 messages is json"):
        inferred(rig.spark, "inferred-not", {"url": rig.url}, "json", 10)
