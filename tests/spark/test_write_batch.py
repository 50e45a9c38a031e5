"""Batches into queues: what rows become, what is refused, and how rows become stages."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.datasource import CaseInsensitiveDict

from penstock.spark import PenstockDataSource
from penstock.spark.api import Broker, Refused
from penstock.spark.source import WrongSchema
from penstock.spark.writing_columns import MESSAGES, check_columns
from penstock.spark.writing_stages import Stager, WrongRow
from penstock.spark.writing_transaction import Transaction
from tests.http.api import Api
from tests.server.harness import BrokerProcess
from tests.spark.conftest import StartBroker
from tests.spark.rig import Queues, url_of, values


def write(frame: DataFrame, queues: Queues, mode: str = "append", **options: object) -> None:
    writing = frame.write.format("penstock").option("url", queues.url)
    for name, value in options.items():
        writing = writing.option(name, str(value))
    writing.mode(mode).save()


def numbered(queues: Queues, count: int, partitions: int = 2) -> DataFrame:
    """The same payloads as `values`, made by Spark."""
    return queues.spark.range(0, count, 1, partitions).selectExpr(
        "rpad(lpad(cast(id as string), 8, '0'), cast(8 + id % 23 as int), '.') as value"
    )


# --- what rows become ------------------------------------------------------------------------------


def test_rows_become_messages_in_the_order_of_the_partitions(queues: Queues, api: Api) -> None:
    write(numbered(queues, 25_000, 3), queues, queue="write.plain")
    rows = queues.batch("write.plain", "offset bigint, value binary, protocol string").collect()
    assert [bytes(row.value) for row in sorted(rows, key=lambda row: row.offset)] == values(25_000)
    assert {row.protocol for row in rows} == {"http"}
    assert api.get("/v1/queues/write.plain")["ready"] == 25_000


def test_values_are_bytes(queues: Queues) -> None:
    odd = [b"", b"\x00\xff\xfe", "grün".encode(), b"x" * 100_000]
    frame = queues.spark.createDataFrame([(bytearray(value),) for value in odd], "value binary")
    write(frame, queues, queue="write.bytes")
    assert queues.values("write.bytes") == Counter(odd)
    texts = queues.spark.createDataFrame([("grün",), ("",)], "value string")
    write(texts, queues, queue="write.texts")
    assert queues.values("write.texts") == Counter(["grün".encode(), b""])


def test_each_row_can_name_its_queue(queues: Queues) -> None:
    names = [f"write.own.{number}" for number in range(5)]
    frame = numbered(queues, 1000).selectExpr(
        "value", "concat('write.own.', cast(cast(left(value, 8) as int) % 5 as string)) as queue"
    )
    write(frame, queues)
    for number, name in enumerate(names):
        assert queues.values(name) == Counter(values(1000)[number::5])
    # The option goes before the column, as in Spark's Kafka connector.
    write(frame, queues, queue="write.own.all")
    assert queues.values("write.own.all") == Counter(values(1000))
    assert queues.values(names[0]).total() == 200


@pytest.mark.parametrize("engine", ["auto", "http"])
def test_what_rows_may_say_beside_their_values(queues: Queues, api: Api, engine: str) -> None:
    queue = f"write.beside.{engine}"
    rows = [
        ("a", 3600, 3, 7.5, {"é": "1", "b": ""}),
        ("b", None, 0, None, None),
        ("c", 60, None, 0.0, {}),
        ("d", None, None, 3600.0, {"one": "only"}),
    ]
    columns = "value string, ttl int, retries tinyint, delay double, headers map<string, string>"
    write(queues.spark.createDataFrame(rows, columns), queues, queue=queue)
    found = queues.batch(queue, includeHeaders=True, engine=engine).selectExpr(
        "cast(value as string) as value",
        "cast(round(unix_micros(expires) / 1e6 - unix_micros(timestamp) / 1e6) as int) as ttl",
        "retries",
        "headers",
    )
    written = [(value, ttl, retries, headers or None) for value, ttl, retries, _, headers in rows]
    assert sorted((tuple(row) for row in found.collect()), key=lambda row: str(row[0])) == written
    delayed = api.get(f"/v1/queues/{queue}/messages", state="delayed")["messages"]
    seconds = [
        (datetime.fromisoformat(it["due"]) - datetime.fromisoformat(it["time"])).total_seconds()
        for it in delayed
    ]
    assert sorted(seconds) == [7.5, 3600]
    states = queues.batch(queue, view="state").where("state = 'delayed'").selectExpr("cast(value as string)")
    assert sorted(row[0] for row in states.collect()) == ["a", "d"]


def test_a_batch_without_rows_is_no_transaction(queues: Queues, api: Api) -> None:
    write(numbered(queues, 0), queues, queue="write.none", transactionId="write.none")
    assert api.ask("GET", "/v1/queues/write.none").problem == "queue-not-found"
    assert api.ask("GET", "/v1/transactions/write.none").problem == "transaction-not-found"


def test_a_transaction_id_makes_a_write_count_once(queues: Queues, api: Api) -> None:
    for _ in range(2):
        write(numbered(queues, 100), queues, queue="write.once", transactionId="nightly/7 of 7")
    assert queues.values("write.once") == Counter(values(100))
    assert api.get("/v1/transactions/nightly%2F7%20of%207")["state"] == "committed"
    for _ in range(2):
        write(numbered(queues, 100), queues, queue="write.once")
    assert queues.values("write.once") == Counter(values(100) * 3)


def test_a_thread_writes_that_has_been_given_a_session(queues: Queues) -> None:
    frame = numbered(queues, 100)

    def work() -> None:
        queues.spark.createDataFrame([], "value string")
        write(frame, queues, queue="write.thread")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
    assert queues.values("write.thread") == Counter(values(100))


# --- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            ["value", "1 as Ttl"],
            "column 'Ttl' cannot be written: there are value, queue, ttl, retries, delay, headers; did you",
        ),
        (["value", "1 as region"], "column 'region' cannot be written: there are value, queue, ttl, retries"),
        (["value", "'1' as delay"], "column 'delay' is string; cast it to double (seconds)"),
        (
            ["value", "map('a', 1) as headers"],
            "column 'headers' is map<string,int>; cast it to map<string,str",
        ),
        (["value", "'a' as headers"], "column 'headers' is string; cast it to map<string,string>"),
        (["map('a', 'b') as value"], "column 'value' is map<string,string>; cast it to binary or string"),
        (["1 as ttl"], "the column 'value' (binary or string) is missing; there are 'ttl'"),
        (["1 as value"], "column 'value' is int; cast it to binary or string"),
        (["value", "'1' as ttl"], "column 'ttl' is string; cast it to int (seconds)"),
        (["value", "1.5 as retries"], "column 'retries' is decimal(2,1); cast it to int"),
        (["value", "value"], "there are 2 columns 'value'; select one"),
    ],
)
def test_wrong_columns_are_refused_before_anything_is_written(
    queues: Queues, api: Api, columns: list[str], words: str
) -> None:
    frame = numbered(queues, 10).selectExpr(*columns)
    with pytest.raises(WrongSchema) as refusal:
        check_columns(frame.schema, MESSAGES, "write.refused")
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("mode", "options", "words"),
    [
        ("append", {}, "say where to write to, with the option queue or a column queue (string)"),
        ("append", {"queue": "x.dead"}, "'x.dead' is the door to the dead letters of 'x', not a queue"),
        (
            "append",
            {"queue": "x", "transactionId": "ä"},
            "option 'transactionId' is 'ä': use 1 to 200 printable ASCII characters",
        ),
        ("append", {"topic": "x"}, "there is no option 'topic'; there are url, token, queue, transactionId"),
        ("overwrite", {"queue": "x"}, "a queue is not overwritten: messages are added behind its tail."),
    ],
)
def test_what_makes_no_sense_is_refused(
    queues: Queues, mode: str, options: dict[str, str], words: str
) -> None:
    with pytest.raises(PySparkException) as refusal:
        write(numbered(queues, 10), queues, mode, **options)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            ["if(id = 700, null, 'x') as value"],
            "column 'value' is null in a row: every row is a message; leave",
        ),
        (
            ["'x' as value", "if(id = 700, null, 'q') as queue"],
            "column 'queue' is null in a row: every message has one; name it",
        ),
        (["'x' as value", "if(id = 700, 'q.dead', 'q') as queue"], "door to the dead letters of 'q'"),
        (["'x' as value", "'q' as queue", "if(id = 700, 0, 1) as ttl"], "column 'ttl': it is 0; use"),
        (["'x' as value", "'q' as queue", "if(id = 700, 256, 1) as retries"], "column 'retries': it is 256"),
        (["'x' as value", "'q' as queue", "if(id = 700, -0.5, 1) as delay"], "column 'delay': it is -0.5"),
        (
            ["'x' as value", "'q' as queue", "map('a', if(id = 700, null, '')) as headers"],
            "column 'headers': header 'a': names and values are texts",
        ),
    ],
)
def test_a_row_that_cannot_be_written_leaves_nothing_behind(
    queues: Queues, api: Api, columns: list[str], words: str
) -> None:
    frame = queues.spark.range(0, 1000, 1, 2).selectExpr(*columns)
    option = {} if "queue" in frame.columns else {"queue": "write.row"}
    with pytest.raises(PySparkException) as refusal:
        write(frame, queues, transactionId="write.row", **option)
    assert words in str(refusal.value)
    # The other task may be on its way still, and stage its rows behind the abort; nobody commits them.
    reply = api.ask("GET", "/v1/transactions/write.row")
    assert reply.status == 404 or reply.json["state"] == "open"
    for queue in ("q", "write.row"):
        assert api.ask("GET", f"/v1/queues/{queue}").problem == "queue-not-found"


def test_a_broker_that_is_not_there(queues: Queues) -> None:
    with pytest.raises(PySparkException, match=r"no broker answers there .* tried for 0\.1 s"):
        write(numbered(queues, 10), queues, url="http://127.0.0.1:9", queue="x", retrySeconds=0.1)


def test_a_token_says_who_writes(queues: Queues, start_broker: StartBroker) -> None:
    token = "a-secret-of-the-sink"
    other = start_broker(config=f'[[http.tokens]]\nname = "sink"\nrole = "operate"\ntoken = "{token}"\n')
    frame = numbered(queues, 10)
    with pytest.raises(PySparkException, match="the option token says who you are"):
        write(frame, queues, url=url_of(other), queue="x")
    write(frame, queues, url=url_of(other), queue="x", token=token)
    with Api(other.ports["http"], token) as api:
        assert api.get("/v1/queues/x")["ready"] == 10


# --- rows to stages --------------------------------------------------------------------------------


def batches(*sizes: int) -> list[pa.RecordBatch]:
    """A batch of rows of these many bytes."""
    return [
        pa.record_batch({"value": pa.array([b"%c" % (97 + at % 26) * size for at, size in enumerate(sizes)])})
    ]


def staged(
    broker: BrokerProcess, key: str, rows: list[pa.RecordBatch], piece_bytes: int = 8 << 20
) -> list[int]:
    """Stage rows and commit them to a queue of the key's name; of each stage its messages."""
    client = Broker(url_of(broker), retry_seconds=5)
    try:
        transaction = Transaction(client, key)
        stages = Stager(transaction, key, piece_bytes).stage(rows)
        found = {it["stage"]: it["count"] for it in client.get("transactions", key)["stages"]}
        transaction.commit(stages, "")
    finally:
        client.close()
    return [found[stage] for stage in stages]


def test_small_batches_share_a_stage_and_large_ones_are_cut(broker: BrokerProcess, queues: Queues) -> None:
    small = batches(100, 200, 300)
    assert staged(broker, "stages.small", small * 50) == [150]
    assert staged(broker, "stages.cut", batches(*[1000] * 64), 20_000) == [16, 16, 16, 16]
    assert staged(broker, "stages.mixed", [*batches(50_000), *small, *batches(50_000)], 20_000) == [1, 3, 1]
    assert queues.values("stages.mixed") == Counter(
        [b"a" * 50_000, b"a" * 100, b"b" * 200, b"c" * 300, b"a" * 50_000]
    )
    assert staged(broker, "stages.slice", [small[0].slice(1, 1)], 20_000) == [1]
    assert queues.values("stages.slice") == Counter([b"b" * 200])


def test_a_broker_that_takes_less_gets_less(start_broker: StartBroker) -> None:
    broker = start_broker(config="[http]\nbody-bytes-max = 65536\n[limits]\npayload-bytes-max = 60000\n")
    rows = [b"%04d" % number * 500 for number in range(1000)]  # 2 MB
    frame = [pa.record_batch({"value": pa.array(rows[at : at + 100])}) for at in range(0, 1000, 100)]
    counts = staged(broker, "less", frame)
    assert sum(counts) == 1000
    assert max(counts) <= 32
    with Api(broker.ports["http"]) as api:
        assert api.get("/v1/queues/less")["ready"] == 1000
    with pytest.raises(
        WrongRow, match=r"a row of \d+ bytes is too large: .* limit of \[limits\] payload-bytes"
    ):
        staged(broker, "over", batches(10, 60_001, 10))
    with pytest.raises(
        WrongRow, match=r"a row of \d+ bytes is too large: .* limit of \[http\] body-bytes-max"
    ):
        staged(broker, "far-over", batches(10, 10_000_000, 10))


def test_no_room_is_waited_for_and_then_said(start_broker: StartBroker) -> None:
    broker = start_broker(config='[queue."full"]\nmax-bytes = 1000\n')
    client = Broker(url_of(broker), retry_seconds=0.3)
    transaction = Transaction(client, "full")
    stages = Stager(transaction, "full").stage(batches(900, 900))
    for stage in stages:
        with Api(broker.ports["http"]) as api:
            api.send("full", b"x" * 500)
            with pytest.raises(Refused, match="max-bytes"):
                transaction.commit([stage], "")
            api.post("/v1/queues/full/purge")
    client.close()


def test_writers_take_arrow() -> None:
    from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter
    from pyspark.sql.types import BinaryType, StructField, StructType

    schema = StructType([StructField("value", BinaryType())])
    source = PenstockDataSource(CaseInsensitiveDict({"queue": "x"}))
    assert isinstance(source.writer(schema, False), DataSourceArrowWriter)
    assert isinstance(source.streamWriter(schema, False), DataSourceStreamArrowWriter)
