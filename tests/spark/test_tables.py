"""Queues as tables of Spark's catalog, and everything that can be done by SQL alone."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import Row
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import StructType

from penstock.spark import PenstockDataSource
from penstock.spark.api import Broker, Refused
from penstock.spark.options import BATCH, WrongOption, read_options, write_options
from penstock.spark.source import schema_of
from penstock.spark.tables import READ, WRITE, options_to_read, options_to_write, table_schema
from tests.http.api import Api
from tests.http.morgue import path_of, reject
from tests.server.harness import BrokerProcess
from tests.spark.conftest import StartBroker
from tests.spark.rig import Queues, url_of


def properties(**options: str) -> CaseInsensitiveDict:
    """What Spark asks with for the columns of a table: options twice, and what it knows itself."""
    prefixed = {f"option.{name}": text for name, text in options.items()}
    return CaseInsensitiveDict(
        {**options, **prefixed, "provider": "penstock", "owner": "ann", "comment": "hey"}
    )


class Statements:
    """Statements with the URL of a broker where they say URL. Tables that they make are dropped."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._made: list[str] = []

    def __call__(self, statement: str) -> list[Row]:
        words = statement.split()
        if words[0] == "create":
            self._made.append("table " + words[2] if words[1] == "table" else "view " + words[3])
        return self._queues.spark.sql(statement.replace("URL", f"url '{self._queues.url}'")).collect()

    def refusal(self, statement: str) -> str:
        with pytest.raises(PySparkException) as refused:
            self(statement)
        return str(refused.value)

    def drop(self) -> None:
        for it in self._made:
            self._queues.spark.sql(f"drop {it.split()[0]} if exists {it.split()[1]}")


@pytest.fixture
def sql(queues: Queues) -> Iterator[Statements]:
    statements = Statements(queues)
    yield statements
    statements.drop()


# --- tables that are read --------------------------------------------------------------------------


def test_a_table_reads_queues(sql: Statements, queues: Queues) -> None:
    queues.send("tables.read", [b"one", b"two"])
    sql("create table tables_read using penstock options (URL, subscribe 'tables.read')")
    assert sql("select cast(value as string), offset from tables_read") == [("one", 0), ("two", 1)]
    # What a query says goes before.
    bound = """with (startingOffsets '{"tables.read": 1}')"""
    assert sql(f"select offset from tables_read {bound}") == [(1,)]
    queues.send("tables.read", [b"three"])
    assert sql("select count(*) from tables_read") == [(3,)]
    described = [(row.col_name, row.data_type) for row in sql("describe tables_read")]
    assert described == [(field.name, field.dataType.simpleString()) for field in schema_of("messages")]
    sql(
        "create table tables_titled using penstock "
        "options (URL, subscribe 'tables.read', includeHeaders 'true')"
    )
    assert sql("select offset from tables_titled where headers is null") == [(0,), (1,), (2,)]


def test_a_table_is_read_as_a_stream(sql: Statements, queues: Queues, tmp_path: Path) -> None:
    queues.send("tables.stream", [b"one", b"two"])
    sql("create table tables_stream using penstock options (URL, subscribe 'tables.stream')")
    stream = queues.spark.readStream.option("startingOffsets", "earliest").table("tables_stream")
    writing = stream.select("value").writeStream.format("penstock").option("url", queues.url)
    writing = writing.option("queue", "tables.copied").option(
        "checkpointLocation", str(tmp_path / "checkpoint")
    )
    writing.trigger(availableNow=True).start().awaitTermination()
    assert queues.values("tables.copied") == {b"one": 1, b"two": 1}


def test_a_table_can_show_another_view(sql: Statements, queues: Queues) -> None:
    queues.send("tables.events", [b"one"])
    sql("create table tables_events using penstock options (URL, subscribe 'tables.events', view 'events')")
    assert sql("select event, offset from tables_events") == [("accepted", 0)]


def test_where_to_read_from_is_not_where_to_write_to(sql: Statements, queues: Queues) -> None:
    """Columns bring what they know of their table into every frame that is made of it."""
    queues.send("tables.origin", [b"one"])
    sql("create table tables_origin using penstock options (URL, subscribe 'tables.origin')")
    sql("create table tables_copy using penstock options (URL, queue 'tables.copy')")
    sql("insert into tables_copy (value) select value from tables_origin")
    assert queues.values("tables.copy") == {b"one": 1}
    frame = queues.spark.table("tables_origin").selectExpr("'tables.named' as queue", "value")
    frame.write.format("penstock").option("url", queues.url).mode("append").save()
    assert queues.values("tables.named") == {b"one": 1}
    assert queues.values("tables.origin") == {b"one": 1}


# --- tables that are written -----------------------------------------------------------------------


def test_rows_are_inserted_into_a_table(sql: Statements, queues: Queues) -> None:
    sql("create table tables_made using penstock options (URL, queue 'tables.made')")
    sql("insert into tables_made (value) values ('a'), ('b')")
    sql("insert into tables_made values ('c', 60, 3)")
    # With names and types as in the table Spark would drop what the table knows, were it not for its types.
    sql(
        "insert into tables_made "
        "select cast('d' as string) as value, cast(5 as int) as ttl, cast(1 as int) as retries"
    )
    sql("insert into tables_made (value) select cast(x'fffe00' as binary)")
    rows = queues.batch("tables.made").selectExpr("value", "retries", "expires is null").collect()
    assert sorted((bytes(row.value), row.retries, row[2]) for row in rows) == [
        (b"a", None, True),
        (b"b", None, True),
        (b"c", 3, False),
        (b"d", 1, False),
        (b"\xff\xfe\x00", None, True),
    ]
    frame = queues.spark.createDataFrame([("e",)], "value string")
    frame.write.format("penstock").mode("append").saveAsTable("tables_made")
    frame.writeTo("tables_made").append()
    assert queues.values("tables.made")[b"e"] == 2
    assert [row.data_type for row in sql("describe tables_made")] == ["string", "int", "int"]


def test_an_insert_with_a_transaction_id_counts_once(sql: Statements, queues: Queues) -> None:
    sql("create table tables_once using penstock options (URL, queue 'tables.once')")
    for _ in range(2):
        sql("insert into tables_once with (transactionId 'nightly/7') (value) values ('a')")
    assert queues.values("tables.once") == {b"a": 1}


def test_a_temporary_view_is_written_to(sql: Statements, queues: Queues) -> None:
    sql("create temporary view tables_view using penstock options (URL, queue 'tables.view')")
    sql("insert into tables_view (value) values ('a')")
    sql("insert into tables_view values ('b', 60, 3)")
    assert queues.values("tables.view") == {b"a": 1, b"b": 1}
    assert [row.col_name for row in sql("describe tables_view")] == ["value", "ttl", "retries"]
    sql("create temporary view tables_named (value string, queue string) using penstock options (URL)")
    sql("insert into tables_named values ('c', 'tables.view')")
    assert queues.values("tables.view")[b"c"] == 1
    sql(
        "create temporary view tables_late (value string, delay double, headers map<string, string>) "
        "using penstock options (URL, queue 'tables.late')"
    )
    sql("insert into tables_late values ('d', 0.5, map('to', 'ann')), ('e', null, null)")
    rows = queues.batch("tables.late", "value binary, headers map<string, string>").collect()
    assert [(bytes(row.value), row.headers) for row in rows] == [(b"d", {"to": "ann"}), (b"e", None)]


def test_dead_letters_are_redriven_by_sql_alone(sql: Statements, broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "tables.letters", [b"north", b"south", b"north"])
    sql("create table tables_letters using penstock options (URL, subscribe 'tables.letters', view 'state')")
    sql("create table tables_redriven using penstock options (URL, redrive 'true')")
    sql(
        "insert into tables_redriven (queue, offset, id) select queue, offset, id from tables_letters "
        "where state = 'dead' and cast(value as string) = 'north'"
    )
    ready = api.get(path_of("tables.letters", "messages"), state="ready")["messages"]
    assert [message["offset"] for message in ready] == [0, 2]


# --- what is refused -------------------------------------------------------------------------------


def test_what_makes_no_sense_is_refused(sql: Statements, queues: Queues, api: Api) -> None:
    sql("create table tables_out using penstock options (URL, queue 'tables.out')")
    assert "this table is there for INSERT INTO" in sql.refusal("select * from tables_out")
    assert "a queue is not overwritten" in sql.refusal("insert overwrite tables_out values ('a', 1, 1)")
    words = "option 'queue' is 'other', and the table says 'tables.out'; leave the option out"
    assert words in sql.refusal("insert into tables_out with (queue 'other') (value) values ('a')")
    # Of a table with columns of its own Spark hands over the columns alone.
    sql("create table tables_own (value string, queue string) using penstock options (URL)")
    assert "say where to write to" in sql.refusal("insert into tables_own values ('a', 'tables.out')")
    assert "USING penstock OPTIONS (…) names no columns" in sql.refusal("select * from tables_own")
    words = sql.refusal(
        "create table tables_as using penstock options (URL, queue 'tables.out') as select 'x' as value"
    )
    assert "names no columns" in words
    assert api.ask("GET", "/v1/queues/tables.out").problem == "queue-not-found"


def test_a_table_that_is_saved_writes_rows_and_cannot_be_read(sql: Statements, queues: Queues) -> None:
    frame = queues.spark.createDataFrame([("a",)], "value string")
    writing = frame.write.format("penstock").option("url", queues.url).option("queue", "tables.saved")
    try:
        writing.saveAsTable("tables_saved")
        assert queues.values("tables.saved") == {b"a": 1}
        assert "names no columns" in sql.refusal("select * from tables_saved")
    finally:
        queues.spark.sql("drop table if exists tables_saved")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "say what to read, with subscribe or subscribePattern, or where to write to, with queue"),
        ({"subscrib": "x"}, "there is no option 'subscrib'; did you mean 'subscribe'?"),
        ({"subscribe": "x", "queue": "x"}, "there is no option 'subscribe'"),
        ({"subscribe": "x", "view": "rows"}, "option 'view' is 'rows'"),
        ({"queue": "x.dead"}, "'x.dead' is the door to the dead letters of 'x'"),
        (
            {"subscribe": "x", "token": "t"},
            "leave the secret out, and set PENSTOCK_TOKEN where the driver runs",
        ),
        ({"queue": "x", "token": "t"}, "leave the secret out, and set PENSTOCK_TOKEN where the driver runs"),
        ({"subscribe": "x", "engine": "nats://ann:t@a"}, "for the option engine there is credentials"),
    ],
)
def test_a_table_is_judged_when_it_is_made(options: dict[str, str], words: str) -> None:
    with pytest.raises(WrongOption) as refusal:
        PenstockDataSource(properties(**options)).schema()
    assert words in str(refusal.value)
    assert "'t'" not in str(refusal.value)


@pytest.mark.parametrize(
    "options",
    [{"reader": "nightly"}, {"view": "state"}, {"maxOffsetsPerTrigger": "5"}, {"engine": "file:/mnt/a@b"}],
)
def test_a_table_may_be_for_streams_or_batches_alone_or_for_both(options: dict[str, str]) -> None:
    schema = table_schema(properties(subscribe="orders", **options))
    lowered = {name.lower(): text for name, text in options.items()}
    assert options_to_read({}, schema) == {"subscribe": "orders", **lowered}


def test_a_table_keeps_its_options_and_nothing_else() -> None:
    schema = StructType.fromJson(table_schema(properties(url="http://a", subscribe="orders")).jsonValue())
    assert json.loads(schema.fields[0].metadata[READ]) == {"url": "http://a", "subscribe": "orders"}
    assert options_to_read({"url": "http://b"}, schema) == {"url": "http://b", "subscribe": "orders"}
    written = table_schema(properties(queue="orders"))
    assert json.loads(written.fields[0].metadata[WRITE]) == {"queue": "orders"}
    assert options_to_write({"transactionid": "7"}, written) == {"queue": "orders", "transactionid": "7"}
    with pytest.raises(WrongOption, match="this table is there to be read"):
        options_to_write({}, schema)


# --- tokens ----------------------------------------------------------------------------------------


def test_spark_shows_no_options_of_a_table(sql: Statements) -> None:
    # Of a table with columns nobody asks us, so that Spark's catalog has the token. It does not tell.
    secret = "token 'kept-to-ourselves'"
    sql(f"create table tables_secret (value string) using penstock options (URL, queue 'x', {secret})")
    for statement in (
        "describe extended",
        "describe table extended",
        "show create table",
        "show tblproperties",
    ):
        said = str(sql(f"{statement} tables_secret"))
        assert "kept-to-ourselves" not in said, statement
    said = sql.refusal("insert into tables_secret values ('a')") + sql.refusal("select * from tables_secret")
    assert "kept-to-ourselves" not in said
    refused = sql.refusal(f"create table tables_refused using penstock options (URL, queue 'x', {secret})")
    assert "leave the secret out" in refused
    assert "kept-to-ourselves" not in refused


def test_a_token_comes_from_the_environment(
    queues: Queues, start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "a-secret-of-the-environment"
    other = start_broker(config=f'[[http.tokens]]\nname = "spark"\nrole = "admin"\ntoken = "{token}"\n')
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)
    stranger = Broker(url_of(other), read_options({"subscribe": "x"}, BATCH).token)
    words = "the option token says who you are, or PENSTOCK_TOKEN where the driver runs"
    with closing(stranger), pytest.raises(Refused, match=words):
        stranger.get("queues")
    monkeypatch.setenv("PENSTOCK_TOKEN", token)
    with closing(Broker(url_of(other), read_options({"subscribe": "x"}, BATCH).token)) as known:
        assert known.get("queues")["queues"] == []
    assert write_options({"queue": "x"}, BATCH).token == token
    assert write_options({"queue": "x", "token": "other"}, BATCH).token == "other"
