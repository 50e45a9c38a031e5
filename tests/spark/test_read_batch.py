"""Batches: what was sent is what is read, as much of it as was asked for; and what is said otherwise."""

import re
import time
from collections import Counter
from datetime import UTC, datetime

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from penstock import connect
from penstock.spark.options import BATCH, read_options
from penstock.spark.reading import BatchReader
from penstock.spark.source import schema_of
from tests.http.api import Api
from tests.server.harness import BrokerProcess, until
from tests.spark.conftest import StartBroker
from tests.spark.rig import Cutter, Queues, send, url_of, values


def said_by(frame_of: object) -> str:
    """What Spark says when it cannot do something; the last line of the Python side is ours."""
    assert callable(frame_of)
    with pytest.raises(PySparkException) as failure:
        frame_of().collect()
    return str(failure.value)


# --- the views -------------------------------------------------------------------------------------


def test_what_was_sent_is_what_is_read(queues: Queues, api: Api) -> None:
    sent = values(3000)
    queues.send("batch.all", sent[:1000])
    queues.send("batch.all", sent[1000:2000], ttl=[3600] * 1000)
    queues.send("batch.all", sent[2000:], retries=[n % 4 or None for n in range(1000)])
    rows = queues.batch("batch.all").orderBy("offset").collect()
    assert [bytes(row.value) for row in rows] == sent
    assert [row.offset for row in rows] == list(range(3000))
    assert {row.queue for row in rows} == {"batch.all"}
    assert {row.protocol for row in rows} == {"http"}
    assert [row.retries for row in rows] == [None] * 2000 + [n % 4 or None for n in range(1000)]
    assert [row.expires is not None for row in rows] == [False] * 1000 + [True] * 1000 + [False] * 1000
    assert (rows[1500].expires - rows[1500].timestamp).total_seconds() == 3600
    for offset in (0, 1500, 2999):
        seen = api.get(f"/v1/queues/batch.all/messages/{offset}")
        assert rows[offset].id == seen["id"]
        moment = rows[offset].timestamp.astimezone(UTC)
        assert f"{moment:%Y-%m-%dT%H:%M:%S.%f}Z" == seen["time"]


def test_events_say_what_has_become_of_the_messages(queues: Queues, broker: BrokerProcess) -> None:
    queues.send("batch.events", values(50))
    with connect(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
        for number, message in enumerate(mq.consume("batch.events", prefetch=20)):
            if number == 30:
                message.reject()
                break
            message.ack()
    until(lambda: queues.batch("batch.events", view="events").count() >= 81, "the events are in the log")
    rows = queues.batch("batch.events", view="events").orderBy("event_offset").collect()
    assert [row.event_offset for row in rows] == list(range(len(rows)))
    by_event = Counter(row.event for row in rows)
    assert (by_event["accepted"], by_event["acked"], by_event["dead"]) == (50, 30, 1)
    acked = [row for row in rows if row.event == "acked"]
    assert sorted(row.offset for row in acked) == list(range(30))
    assert all(row.consumer.startswith("phpmq:") and row.dispatched <= row.timestamp for row in acked)
    ids = {row.offset: row.id for row in queues.batch("batch.events").collect()}
    assert all(row.id == ids[row.offset] for row in rows)


def test_the_state_is_that_of_this_moment(queues: Queues, broker: BrokerProcess) -> None:
    sent = values(20)
    queues.send("batch.state", sent)
    with connect(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
        consuming = mq.consume("batch.state", prefetch=1)
        next(consuming).ack()
        next(consuming).reject()
        consuming.close()
    until(
        lambda: (
            Counter(row.state for row in queues.batch("batch.state", view="state").collect())
            == {"ready": 18, "dead": 1}
        ),
        "the state that the consumer has left",
    )
    rows = queues.batch("batch.state", view="state").collect()
    assert {row.offset: bytes(row.value) for row in rows} == dict(enumerate(sent[1:], start=1))
    dead = [row for row in rows if row.state == "dead"]
    assert [(row.offset, row.reason) for row in dead] == [(1, "rejected")]
    assert queues.batch("batch.state", view="state", schema="offset bigint").count() == 19


# --- which queues ----------------------------------------------------------------------------------


def test_a_list_and_a_pattern_of_queues(queues: Queues) -> None:
    queues.send("batch.two/a", values(100))
    queues.send("batch.two/b", values(150, 100))
    queues.send("batch.two", values(10, 900))
    both = Counter(values(250))
    assert queues.values("batch.two/a, batch.two/b") == both
    assert queues.values(subscribePattern="batch\\.two/[ab]") == both
    assert queues.values(subscribePattern="batch.two") == Counter(values(10, 900))
    counts = queues.batch(subscribePattern="batch\\.two.*").groupBy("queue").count().collect()
    assert {row.queue: row["count"] for row in counts} == {
        "batch.two/a": 100,
        "batch.two/b": 150,
        "batch.two": 10,
    }


def test_more_queues_than_one_request_can_name(queues: Queues) -> None:
    names = [f"batch.many.{n}." + "x" * 200 for n in range(40)]
    for name in names:
        queues.send(name, [name.encode()])
    rows = queues.batch(",".join(names)).collect()
    assert {row.queue: bytes(row.value) for row in rows} == {name: name.encode() for name in names}
    assert queues.batch(",".join(names)).rdd.getNumPartitions() == 1


def test_a_queue_that_does_not_exist_is_said(queues: Queues) -> None:
    text = said_by(lambda: queues.batch("batch.nowhere"))
    assert f"NothingThere: {queues.url}: there is no queue 'batch.nowhere'; its first message" in text
    text = said_by(lambda: queues.batch(subscribePattern="batch.no.*where"))
    assert "no queue has a name that fits 'batch.no.*where' as a whole" in text


# --- from where to where ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranged(spark: SparkSession, broker: BrokerProcess) -> Queues:
    send(broker, "batch.range", values(100))
    send(broker, "batch.other", values(50))
    return Queues(spark, broker)


@pytest.mark.parametrize(
    ("options", "first", "end"),
    [
        ({}, 0, 100),
        ({"startingOffsets": "earliest", "endingOffsets": "latest"}, 0, 100),
        ({"startingOffsets": '{"batch.range": 40}'}, 40, 100),
        ({"endingOffsets": '{"batch.range": 60}'}, 0, 60),
        ({"startingOffsets": '{"batch.range": 40}', "endingOffsets": '{"batch.range": 60}'}, 40, 60),
        ({"startingOffsets": '{"batch.range": -2}', "endingOffsets": '{"batch.range": -1}'}, 0, 100),
        ({"startingOffsets": '{"batch.range": 100}'}, 100, 100),
        ({"startingOffsets": '{"batch.range": 7}', "endingOffsets": '{"batch.range": 7}'}, 7, 7),
    ],
)
def test_offsets(ranged: Queues, options: dict[str, str], first: int, end: int) -> None:
    assert ranged.values("batch.range", **options) == Counter(values(end - first, first))


def test_offsets_are_for_every_queue(ranged: Queues) -> None:
    said = '{"batch.range": 90, "batch.other": -2}'
    assert ranged.batch("batch.range,batch.other", startingOffsets=said).count() == 60
    text = said_by(lambda: ranged.batch("batch.range,batch.other", startingOffsets='{"batch.range": 90}'))
    assert "option 'startingOffsets' does not name 'batch.other'" in text
    text = said_by(lambda: ranged.batch("batch.range", startingOffsets='{"batch.range": 101}'))
    assert "queue 'batch.range': 101 is behind the end of what can be read, 100" in text
    text = said_by(
        lambda: ranged.batch(
            "batch.range", startingOffsets='{"batch.range": 9}', endingOffsets='{"batch.range": 3}'
        )
    )
    assert "startingOffsets is 9, which is behind endingOffsets, 3" in text


def test_a_time_to_begin_at(queues: Queues) -> None:
    queues.send("batch.time", values(10))
    (between,) = queues.batch("batch.time").selectExpr("max(timestamp) as last").collect()
    micros = round(between.last.timestamp() * 1_000_000) + 1
    until(lambda: time.time_ns() // 1000 > micros + 1000, "the clock goes on")
    queues.send("batch.time", values(5, 10))
    iso = datetime.fromtimestamp(micros / 1_000_000, UTC).isoformat()
    assert queues.values("batch.time", startingTimestamp=iso) == Counter(values(5, 10))
    assert queues.values("batch.time", startingTimestamp=micros // 1000 + 1) == Counter(values(5, 10))
    assert queues.values("batch.time", startingTimestamp="2001-01-01") == Counter(values(15))
    assert queues.values("batch.time", startingTimestamp="2999-01-01T00:00:00Z") == Counter()
    assert queues.batch("batch.time", view="events", startingTimestamp=iso).count() == 5


# --- how -------------------------------------------------------------------------------------------


def test_as_many_tasks_as_asked_for(ranged: Queues) -> None:
    assert ranged.batch("batch.range").rdd.getNumPartitions() == 1
    assert ranged.batch("batch.range", minPartitions=1000).rdd.getNumPartitions() == 100
    frame = ranged.batch("batch.range", minPartitions=4)
    assert frame.rdd.getNumPartitions() == 4
    assert Counter(bytes(row.value) for row in frame.collect()) == Counter(values(100))


def test_a_schema_prunes_columns(ranged: Queues) -> None:
    frame = ranged.batch("batch.range", "value binary, offset bigint not null")
    assert frame.columns == ["value", "offset"]
    rows = frame.orderBy("offset").collect()
    assert [(bytes(row.value), row.offset) for row in rows] == [(v, n) for n, v in enumerate(values(100))]
    assert ranged.batch("batch.range", "protocol string").distinct().collect() == [("http",)]
    assert ranged.batch("batch.range", "timestamp timestamp", view="events").count() == 100


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("ofset bigint", "WrongSchema: view 'messages' has no column 'ofset'; did you mean 'offset'?"),
        ("value string", "column 'value' of view 'messages' is binary, not string"),
    ],
)
def test_a_schema_that_does_not_fit_is_refused(ranged: Queues, schema: str, words: str) -> None:
    assert words in said_by(lambda: ranged.batch("batch.range", schema))


def test_wrong_options_are_refused_when_the_frame_is_made(queues: Queues) -> None:
    with pytest.raises(PySparkException, match="no option 'startingoffset'; did you mean 'startingOffsets'"):
        queues.batch("x", startingOffset="earliest")
    with pytest.raises(PySparkException, match="option 'view' is 'table': use messages, events or state"):
        queues.batch("x", view="table")


def test_sql_reads_it_too(ranged: Queues) -> None:
    ranged.spark.sql(
        f"create or replace temporary view ranged using penstock "
        f"options (url '{ranged.url}', subscribe 'batch.range', startingOffsets 'earliest')"
    )
    (row,) = ranged.spark.sql("select count(*) as n, max(offset) as last from ranged").collect()
    assert (row.n, row["last"]) == (100, 99)


# --- a million -------------------------------------------------------------------------------------


def test_a_million_rows(queues: Queues) -> None:
    for first in range(0, 1_000_000, 50_000):
        queues.send("batch.million", [b"%07d" % n for n in range(first, first + 50_000)])
    frame = queues.batch("batch.million")
    assert frame.rdd.getNumPartitions() == 2
    (row,) = frame.selectExpr(
        "count(*) as n", "sum(offset) as offsets", "sum(cast(cast(value as string) as bigint)) as numbers"
    ).collect()
    total = 1_000_000 * 999_999 // 2
    assert (row.n, row.offsets, row.numbers) == (1_000_000, total, total)


# --- when things go wrong --------------------------------------------------------------------------


def last_line(text: str, kind: str) -> str:
    """The one line that is ours, in all that Spark says."""
    (line,) = {line for line in text.splitlines() if line.startswith(f"penstock.spark.{kind}")}
    return line


def test_a_broker_that_is_not_there_is_one_line(spark: SparkSession) -> None:
    frame = spark.read.format("penstock").options(url="http://127.0.0.1:9", subscribe="x", retrySeconds="0")
    line = last_line(said_by(frame.load), "api.Unreachable")
    assert line == (
        "penstock.spark.api.Unreachable: http://127.0.0.1:9: no broker answers there (Connection refused); "
        "tried for 0 s. Is the broker running, and is the option url right?"
    )


def test_somebody_else_answers(spark: SparkSession, broker: BrokerProcess) -> None:
    url = f"http://127.0.0.1:{broker.ports['phpmq']}"
    frame = spark.read.format("penstock").options(url=url, subscribe="x", retrySeconds="0")
    assert f"{url}: no broker answers there" in said_by(frame.load)


def test_tokens(spark: SparkSession, start_broker: StartBroker) -> None:
    token = "0123456789abcdef"
    config = f"""[[http.tokens]]\nname = "spark"\nrole = "read"\ntoken = "{token}"\n"""
    broker = start_broker(config=config)
    with connect(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
        mq.send_many("q", values(10))
    reading = spark.read.format("penstock").options(url=url_of(broker), subscribe="q")
    assert "api.Refused: " in said_by(reading.load)
    assert "the option token says who you are" in said_by(lambda: reading.option("token", "wrong" * 4).load())
    reading = reading.option("token", token)
    until(lambda: reading.load().count() == 10, "the messages are synced")


def test_a_task_of_many_queues_has_one_connection(broker: BrokerProcess) -> None:
    names = [f"batch.many.{number}" for number in range(20)]
    for queue in names:
        send(broker, queue, values(5))
    with Cutter(broker.ports["http"], []) as cutter:
        said = {"url": f"http://127.0.0.1:{cutter.port}", "subscribe": ",".join(names), "engine": "http"}
        reader = BatchReader(read_options(said, BATCH), schema_of("messages"))
        (piece,) = reader.partitions()
        planning = cutter.connections
        assert sum(batch.num_rows for batch in reader.read(piece)) == 100
        assert cutter.connections == planning + 1


def test_a_connection_that_breaks_in_the_middle_loses_and_repeats_nothing(
    spark: SparkSession, broker: BrokerProcess
) -> None:
    sent = [b"%06d" % n + b"x" * 94 for n in range(30_000)]
    for first in range(0, len(sent), 1000):
        send(broker, "batch.cut", sent[first : first + 1000])
    # All of it is about 5 MB. Between whole batches, within them, and before the first.
    with Cutter(broker.ports["http"], [2000, 700_000, 1, 1_500_000, 90_000]) as cutter:
        for schema in ("offset bigint, value binary", "value binary"):
            frame = (
                spark.read.format("penstock")
                .options(url=f"http://127.0.0.1:{cutter.port}", subscribe="batch.cut", minPartitions="2")
                .option("engine", "http")
                .schema(schema)
                .load()
            )
            assert Counter(bytes(row.value) for row in frame.collect()) == Counter(sent)
        assert cutter.cut == 5


def test_a_broker_that_goes_in_the_middle_is_told_in_one_line(
    spark: SparkSession, broker: BrokerProcess
) -> None:
    for first in range(0, 20_000, 1000):
        send(broker, "batch.gone", [b"%06d" % n + b"x" * 94 for n in range(first, first + 1000)])
    with Cutter(broker.ports["http"], [500_000] * 1000) as cutter:
        url = f"http://127.0.0.1:{cutter.port}"
        frame = spark.read.format("penstock").options(url=url, subscribe="batch.gone", retrySeconds="0")
        text = said_by(frame.option("engine", "http").load)
    assert re.search(f"api.Unreachable: {url}: no broker answers there \\(.*\\); tried for 0 s", text)
