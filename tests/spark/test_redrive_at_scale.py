"""SQL over dead letters: Spark chooses them by whatever it can compute, and one write redrives them."""

import random
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import LongType, StringType, StructField, StructType

from penstock.spark import PenstockDataSource
from penstock.spark.api import Refused
from penstock.spark.writing_redrive import Named, RedriveWriter, merged
from penstock.spark.writing_stages import WrongRow
from tests.http.api import Api
from tests.http.morgue import bodies_left, ids, path_of, reject, take
from tests.server.harness import BrokerProcess, until
from tests.spark.rig import PATIENCE_SECONDS, Queues


def redrive(frame: DataFrame, queues: Queues, **options: str) -> None:
    writing = frame.write.format("penstock").option("url", queues.url).option("redrive", "true")
    for name, value in options.items():
        writing = writing.option(name, value)
    writing.mode("append").save()


def dead(queues: Queues, subscribe: str, schema: str | None = None) -> DataFrame:
    return queues.batch(subscribe, schema, view="state").where("state = 'dead'")


def test_letters_are_chosen_by_sql_and_go_back_as_they_are(
    broker: BrokerProcess, queues: Queues, api: Api
) -> None:
    for queue, region in (("letters.a", "north"), ("letters.b", "south")):
        orders = [b'{"region": "%s", "amount": %d}' % (region.encode(), at) for at in range(50)]
        reject(broker, api, queue, orders)
    before = ids(api, "letters.a", "dead")
    letters = dead(queues, "letters.a,letters.b").selectExpr(
        "queue", "offset", "cast(get_json_object(cast(value as string), '$.amount') as int) as amount"
    )
    letters.createOrReplaceTempView("letters")
    # Something that no condition of POST /redrive could say: the third in ten of each queue, by amount.
    chosen = queues.spark.sql(
        "select queue, offset from"
        " (select *, row_number() over (partition by queue order by amount desc) as place from letters)"
        " where place % 10 = 3"
    )
    redrive(chosen, queues)
    for queue in ("letters.a", "letters.b"):
        ready = api.get(path_of(queue, "messages"), state="ready")["messages"]
        assert [message["offset"] for message in ready] == [7, 17, 27, 37, 47]
        assert api.get(path_of(queue))["dead"] == 45
    # The same messages, with the ids and the history that they had.
    assert ids(api, "letters.a", "ready") <= before
    message = api.get(path_of("letters.a", "messages/7"))
    assert [event["event"] for event in message["history"]] == ["accepted", "dead", "redriven"]
    # What is not dead any more, or never was, stays as it is.
    redrive(chosen, queues)
    everything = queues.batch("letters.a", "offset bigint", view="messages")
    redrive(everything, queues, queue="letters.a")
    assert api.get(path_of("letters.a"))["dead"] == 0
    assert len(bodies_left(broker, "letters.a", 50)) == 50


@pytest.mark.long
def test_many_letters(queues: Queues, api: Api) -> None:
    count = 100_000
    queues.send("letters.many", (b"%06d" % at for at in range(count)), ttl=[1] * count)
    until(lambda: api.get(path_of("letters.many"))["dead"] == count, "they expire", PATIENCE_SECONDS)
    # Every second one is a range of its own.
    redrive(
        dead(queues, "letters.many", "offset bigint, state string").where("offset % 2 = 1").select("offset"),
        queues,
        queue="letters.many",
    )
    assert api.get(path_of("letters.many"))["ready"] == count // 2
    left = dead(queues, "letters.many", "offset bigint, state string")
    assert left.where("offset % 2 = 1").count() == 0
    redrive(left.select("offset"), queues, queue="letters.many")
    assert api.get(path_of("letters.many"))["dead"] == 0


# --- repairing -------------------------------------------------------------------------------------


def test_payloads_are_repaired_by_sql_and_keep_their_ids(
    broker: BrokerProcess, queues: Queues, api: Api
) -> None:
    orders = [b'{"id": %d, "amount": "%d,50"}' % (at, at) for at in range(60)]
    reject(broker, api, "repair.orders", orders)
    before = {m["offset"]: m["id"] for m in api.get(path_of("repair.orders", "messages"))["messages"]}
    dead(queues, "repair.orders").createOrReplaceTempView("letters")
    repaired = queues.spark.sql(
        "select queue, offset,"
        " regexp_replace(cast(value as string), '\"(\\\\d+),(\\\\d+)\"', '$1.$2') as value"
        " from letters where offset % 3 = 0"
    )
    redrive(repaired, queues, transactionId="repair.orders/1")
    redrive(repaired, queues, transactionId="repair.orders/1")
    assert api.get(path_of("repair.orders"))["dead"] == 40
    after = {m["offset"]: m["id"] for m in api.get(path_of("repair.orders", "messages"))["messages"]}
    assert after == before
    state = queues.batch("repair.orders", view="state").where("state = 'ready'").select("offset", "value")
    wanted = {at: b'{"id": %d, "amount": %d.50}' % (at, at) for at in range(0, 60, 3)}
    assert {row.offset: bytes(row.value) for row in state.collect()} == wanted
    # The log has what was sent.
    log = queues.batch("repair.orders").select("offset", "value")
    assert [bytes(row.value) for row in log.orderBy("offset").collect()] == orders
    assert bodies_left(broker, "repair.orders", 20) == list(wanted.values())


def test_a_commit_that_was_made_is_not_made_again(broker: BrokerProcess, queues: Queues, api: Api) -> None:
    """A letter that died again since is not repaired twice by the same write."""
    reject(broker, api, "repair.again", [b"1", b"2"])
    letters = queues.spark.createDataFrame([(0, "1!"), (1, "2!")], "offset bigint, value string")
    for _ in range(3):
        redrive(letters, queues, queue="repair.again", transactionId="repair.again/1")
        ready = api.get(path_of("repair.again"))["ready"]
        assert sorted(take(broker, "repair.again", ready, lambda m: m.reject()) if ready else []) in (
            [b"1!", b"2!"],
            [],
        )
    values = {bytes(row.value) for row in dead(queues, "repair.again").collect()}
    assert values == {b"1!", b"2!"}


def test_many_letters_are_repaired(queues: Queues, api: Api) -> None:
    count = 50_000
    queues.send("repair.many", (b"%06d" % at for at in range(count)), ttl=[1] * count)
    until(lambda: api.get(path_of("repair.many"))["dead"] == count, "they expire", PATIENCE_SECONDS)
    # Every second one is a run of its own.
    letters = dead(queues, "repair.many").where("offset % 2 = 1")
    redrive(
        letters.selectExpr("offset", "concat('repaired ', cast(value as string)) as value"),
        queues,
        queue="repair.many",
    )
    row = api.get(path_of("repair.many"))
    assert (row["ready"], row["dead"]) == (count // 2, count // 2)
    state = queues.batch("repair.many", view="state").where("state = 'ready'")
    wrong = state.where("cast(value as string) != concat('repaired ', lpad(cast(offset as string), 6, '0'))")
    assert wrong.count() == 0
    assert state.count() == count // 2


# --- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        (["id as offset"], {}, "say where to write to, with the option queue or a column queue (string)"),
        (["'x' as queue"], {}, "the column 'offset' (bigint) is missing; there are 'queue'"),
        (["id as offset", "'v' as value"], {"queue": "no such queue"}, "no such queue"),
        (
            ["id as offset", "1 as value"],
            {"queue": "x"},
            "column 'value' is int; cast it to binary or string",
        ),
        (["id as offset", "'v' as value", "1 as ttl"], {"queue": "x"}, "column 'ttl' cannot be written"),
        (["'v' as value"], {"queue": "x"}, "the column 'offset' (bigint) is missing"),
        (["id as offset"], {"queue": "x", "transactionId": "t"}, "'transactionId' is for redriving with"),
        (["id as offset"], {"queue": "no such queue"}, "no such queue"),
    ],
)
def test_what_makes_no_sense_is_refused(
    queues: Queues, columns: list[str], options: dict[str, str], words: str
) -> None:
    with pytest.raises(PySparkException) as refusal:
        redrive(queues.spark.range(10).selectExpr(*columns), queues, **options)
    assert words in str(refusal.value)


# --- rows to ranges --------------------------------------------------------------------------------

SCHEMA = StructType([StructField("offset", LongType()), StructField("queue", StringType())])


def writer(url: str = "http://127.0.0.1:1", **options: str) -> RedriveWriter:
    made = PenstockDataSource(CaseInsensitiveDict({"url": url, "redrive": "true", **options})).writer(
        SCHEMA, False
    )
    assert isinstance(made, RedriveWriter)
    return made


def named(message: Named) -> dict[str, list[list[int]]]:
    return {
        queue.strip(): np.frombuffer(it, np.int64).reshape(-1, 2).tolist()
        for queue, it in message.ranges.items()
    }


def rows(*letters: tuple[int | None, str | None]) -> pa.RecordBatch:
    offsets, queues = zip(*letters, strict=True) if letters else ((), ())
    return pa.record_batch({"offset": pa.array(offsets, pa.int64()), "queue": pa.array(queues, pa.string())})


def test_a_task_says_ranges() -> None:
    batches = [rows((5, "a"), (3, "b"), (4, "a"), (9, "a")), rows(), rows((6, "a"), (5, "a"), (2, "b"))]
    assert named(writer().write(iter(batches))) == {"a": [[4, 7], [9, 10]], "b": [[2, 4]]}
    assert named(writer(queue="x").write(iter(batches))) == {"x": [[2, 7], [9, 10]]}
    assert named(writer().write(iter([]))) == {}
    writer().commit([writer().write(iter([])), None])
    writer().abort([None])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ((None, "a"), "column 'offset' is null in a row"),
        ((1, None), "column 'queue' is null in a row"),
        ((-1, "a"), "column 'offset' is -1 in a row: there is no such offset"),
        ((1 << 60, "a"), f"column 'offset' is {1 << 60} in a row: there is no such offset"),
    ],
)
def test_a_row_that_names_no_letter(row: tuple[int | None, str | None], words: str) -> None:
    with pytest.raises(WrongRow) as refusal:
        writer().write(iter([rows(row)]))
    assert words in str(refusal.value)


def test_nothing_is_redriven_before_the_commit(broker: BrokerProcess, queues: Queues, api: Api) -> None:
    reject(broker, api, "letters.commit", [b"%d" % at for at in range(10)])
    sink = writer(queues.url, queue="letters.commit")
    first, second = sink.write(iter([rows((1, ""), (2, ""))])), sink.write(iter([rows((2, ""), (3, ""))]))
    assert api.get(path_of("letters.commit"))["dead"] == 10
    for _ in range(2):
        sink.commit([first, second])
        assert api.get(path_of("letters.commit"))["dead"] == 7
    gone = writer(queues.url, queue="letters.gone")
    with pytest.raises(Refused, match=r"letters\.gone"):
        gone.commit([first, gone.write(iter([rows((1, ""))]))])


def test_ranges_are_merged_as_sets_are() -> None:
    chance = random.Random(5)
    for _ in range(300):
        starts = [chance.randint(0, 50) for _ in range(chance.randint(0, 20))]
        ranges = [(first, first + chance.randint(1, 5)) for first in starts]
        offsets = {offset for first, end in ranges for offset in range(first, end)}
        found = merged(np.array(ranges, np.int64).reshape(-1, 2)).tolist()
        assert [offset for first, end in found for offset in range(first, end)] == sorted(offsets)
        assert all(before[1] < behind[0] for before, behind in pairwise(found))
