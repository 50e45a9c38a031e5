"""What is told where rows do not fit into a Delta table, which says less of the same; and lists of files."""

import re
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from penstock.pipeline.batchwise import (
    DeltaSink,
    FileSink,
    OthersFiles,
    QueueSink,
    WrongColumns,
    check_columns,
)
from penstock.pipeline.model import Sink, Source

TABLE = pa.table({"id": [1], "region": ["north"]})


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (pa.table({"id": [2], "region": ["south"], "a": [1], "b": [2]}), "the table has no column 'a', 'b'"),
        (pa.table({"id": [2]}), "the rows have no column 'region'"),
        (
            pa.table({"id": [2], "area": ["south"]}),
            "the table has no column 'area' and the rows have no column 'region'",
        ),
    ],
    ids=["new", "fewer", "renamed"],
)
def test_other_columns_are_named(tmp_path: Path, rows: pa.Table, said: str) -> None:
    path = str(tmp_path / "table")
    write_deltalake(path, TABLE)
    with pytest.raises(Exception, match="not"):
        write_deltalake(path, rows, mode="append")
    with pytest.raises(WrongColumns, match=re.escape(f"{path}: {said}; set mergeSchema = true")):
        check_columns(path, TABLE.column_names, rows.column_names)
    write_deltalake(path, rows, mode="append", schema_mode="merge")


def test_the_order_of_columns_does_not_matter(tmp_path: Path) -> None:
    rows = TABLE.select(["region", "id"])
    write_deltalake(str(tmp_path), TABLE)
    write_deltalake(str(tmp_path), rows, mode="append")
    check_columns(str(tmp_path), TABLE.column_names, rows.column_names)


@pytest.mark.parametrize(
    ("said", "token"),
    [
        ({}, "secret"),
        ({"url": "http://a:1"}, "secret"),
        ({"url": "http://b:1"}, None),
        ({"url": "http://b:1", "token": "its own"}, "its own"),
    ],
)
def test_a_token_is_not_shown_to_another_broker(said: dict[str, str], token: str | None) -> None:
    source = Source("input", {"url": "http://a:1", "token": "secret"}, "messages", None, None)
    sink = QueueSink(Sink("penstock", "append", {"queue": "out", **said}, ()), source)
    assert sink._options.get("token") == token


def test_a_batch_with_a_new_column_is_refused_or_merged(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "table")
    DeltaSink(Sink("delta", "append", {"path": path}, ())).write(spark.range(3), "query", 0)
    more = spark.range(3, 5).selectExpr("id", "'x' as more")
    with pytest.raises(WrongColumns, match="the table has no column 'more'"):
        DeltaSink(Sink("delta", "append", {"path": path}, ())).write(more, "query", 1)
    merging = DeltaSink(Sink("delta", "append", {"path": path, "mergeSchema": "true"}, ()))
    for _ in range(2):
        merging.write(more, "query", 1)
    rows = DeltaTable(path).to_pyarrow_table().to_pylist()
    assert sorted((row["id"], row["more"]) for row in rows) == [
        *((number, None) for number in range(3)),
        (3, "x"),
        (4, "x"),
    ]


@pytest.mark.parametrize("merges", ["true", "false"])
def test_a_value_that_a_table_cannot_hold_is_refused(
    spark: SparkSession, tmp_path: Path, merges: str
) -> None:
    path = str(tmp_path / "table")
    sink = DeltaSink(Sink("delta", "append", {"path": path, "mergeSchema": merges}, ()))
    sink.write(spark.sql("select 1 as n, date'2030-01-31' as day"), "query", 0)
    for number, wrong in enumerate(("1.7D as n", "timestamp'2030-01-31 12:00:00' as day"), 1):
        rest = "date'2030-01-31' as day" if wrong.endswith("n") else "1 as n"
        with pytest.raises(WrongColumns, match="in the table, which cannot hold all values"):
            sink.write(spark.sql(f"select {wrong}, {rest}"), "query", number)
    sink.write(spark.sql("select 2L as n, date'2030-02-01' as day"), "query", 3)
    assert sorted(row["n"] for row in DeltaTable(path).to_pyarrow_table().to_pylist()) == [1, 2]


def test_a_new_member_of_a_struct_is_refused_or_merged(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "table")
    plain = DeltaSink(Sink("delta", "append", {"path": path}, ()))
    plain.write(spark.sql("select named_struct('a', 1, 'b', array(struct(1 as c))) as s"), "query", 0)
    row = "select named_struct('a', 2, 'b', array(struct(2 as c, nullif('x', 'y') as d)), 'e', {}) as s"
    more = spark.sql(row.format("nullif(5, 0)"))
    with pytest.raises(WrongColumns, match=r"column 's' is struct<.*> in the table, which cannot hold"):
        plain.write(more, "query", 1)
    merging = DeltaSink(Sink("delta", "append", {"path": path, "mergeSchema": "true"}, ()))
    never_null, wrong = row.format("5"), "select named_struct('a', 3, 'b', array(struct(1.7D as c))) as s"
    for number, text in enumerate((never_null, wrong), 1):
        with pytest.raises(WrongColumns, match=r"column 's' is struct<.*> in the table, which cannot hold"):
            merging.write(spark.sql(text), "query", number)
    merging.write(more, "query", 3)
    rows = DeltaTable(path).to_pyarrow_table().column("s").to_pylist()
    assert sorted(rows, key=lambda row: row["a"]) == [
        {"a": 1, "b": [{"c": 1, "d": None}], "e": None},
        {"a": 2, "b": [{"c": 2, "d": "x"}], "e": 5},
    ]


def test_files_that_begin_later_or_were_away_can_be_read(spark: SparkSession, tmp_path: Path) -> None:
    """Spark reads no list of files that lacks a batch, and puts none together."""
    sink = FileSink(Sink("json", "append", {"path": str(tmp_path)}, ()))
    for batch in (22, 23, 31):
        assert sink.write(spark.sql(f"select {batch} as batch"), "q", batch) == 1
    assert sink.write(spark.sql("select 0 as batch"), "q", 31) == 0  # It is there.
    assert sorted(row.batch for row in spark.read.json(str(tmp_path)).collect()) == [22, 23, 31]
    for of, query, batch in ((sink, "q", 30), (FileSink(sink._sink), "other", 31)):
        with pytest.raises(
            OthersFiles, match="has batches of another query, which Spark would take for ours"
        ):
            of.write(spark.sql("select 0 as batch"), query, batch)
