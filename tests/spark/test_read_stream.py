"""Streams: every message once, from where it was asked for, whatever happens to the broker and the query."""

import json
import threading
from collections import Counter
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from tests.http.api import Api
from tests.server.harness import until
from tests.spark.conftest import StartBroker
from tests.spark.rig import PATIENCE_SECONDS, Gathering, Queues, restart, values


def test_what_comes_is_read_and_a_query_that_is_started_again_goes_on(queues: Queues, tmp_path: Path) -> None:
    queues.send("stream.all", values(500))
    frame = queues.stream("stream.all", startingOffsets="earliest")
    with Gathering(frame, "all", tmp_path) as gathering:
        assert gathering.all().of("stream.all") == Counter(values(500))
        queues.send("stream.all", values(300, 500))
        queues.send("stream.all", values(200, 800))
        assert gathering.all().of("stream.all") == Counter(values(1000))
        progress = gathering.query.lastProgress
        assert progress is not None
        source = progress["sources"][0]
        end = json.loads(str(source["endOffset"]))
        assert end.pop("").keys() == {"stream.all"}
        assert end == {"stream.all": 1000}
        assert json.loads(str(source["latestOffset"])) == {"stream.all": 1000}
    queues.send("stream.all", values(100, 1000))
    with Gathering(frame, "all", tmp_path) as gathering:
        assert gathering.all().of("stream.all") == Counter(values(100, 1000))


def test_by_default_a_stream_begins_with_what_comes(queues: Queues, tmp_path: Path) -> None:
    queues.send("stream.latest", values(50))
    with Gathering(queues.stream("stream.latest"), "latest", tmp_path) as gathering:
        gathering.all()
        queues.send("stream.latest", values(50, 50))
        assert gathering.all().of("stream.latest") == Counter(values(50, 50))


def test_a_first_batch_that_fails_begins_where_it_was_when_it_is_run_again(
    queues: Queues, tmp_path: Path
) -> None:
    queues.send("stream.first", values(50))

    def fail(frame: DataFrame, number: int) -> None:
        raise RuntimeError("the first batch fails")

    frame = queues.stream("stream.first")
    query = frame.writeStream.foreachBatch(fail).option("checkpointLocation", str(tmp_path)).start()
    with pytest.raises(PySparkException, match="the first batch fails"):
        query.awaitTermination(int(PATIENCE_SECONDS))
    queues.send("stream.first", values(50, 50))
    with Gathering(frame, "first", tmp_path) as gathering:
        assert gathering.all().of("stream.first") == Counter(values(50, 50))


def test_two_queries_read_one_queue_each_for_itself(queues: Queues, tmp_path: Path) -> None:
    queues.send("stream.shared", values(100))
    frame = queues.stream("stream.shared", startingOffsets='{"stream.shared": 40}')
    everything = queues.stream("stream.shared", startingOffsets="earliest", maxOffsetsPerTrigger=30)
    with (
        Gathering(frame, "some", tmp_path / "a") as some,
        Gathering(everything, "every", tmp_path / "b") as all_,
    ):
        assert some.all().of("stream.shared") == Counter(values(60, 40))
        assert all_.all().of("stream.shared") == Counter(values(100))
        assert all_.batches == [30, 30, 30, 10]


def test_events_stream_too(queues: Queues, tmp_path: Path, api: Api) -> None:
    queues.send("stream.events", values(20))
    seen: list[tuple[int, str]] = []

    def take(frame: DataFrame, number: int) -> None:
        seen.extend((row.event_offset, row.event) for row in frame.collect())

    frame = queues.stream("stream.events", view="events", startingOffsets="earliest")
    query = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path)).start()
    try:
        query.processAllAvailable()
        assert api.post("/v1/queues/stream.events/purge") == {"purged": 20}
        until(lambda: len(seen) == 40, "the events of the purge", PATIENCE_SECONDS)
    finally:
        query.stop()
    assert [number for number, _ in sorted(seen)] == list(range(40))
    assert Counter(event for _, event in seen)["accepted"] == 20


def test_copies_of_bad_records_are_no_rows_where_nobody_wants_them(queues: Queues, tmp_path: Path) -> None:
    def of_copies(wanted: str, schema: str | None = None) -> list[bytes]:
        seen: list[bytes] = []

        def take(frame: DataFrame, number: int) -> None:
            seen.extend(bytes(row.value) for row in frame.collect())

        options = {"startingOffsets": "earliest", "copies": wanted}
        frame = queues.stream("stream.copies", schema, **options)
        folder = str(tmp_path / f"{wanted}-{schema}")
        writing = frame.writeStream.foreachBatch(take).option("checkpointLocation", folder)
        query = writing.trigger(availableNow=True).start()
        assert query.awaitTermination(int(PATIENCE_SECONDS))
        rows.append(sum(progress.numInputRows for progress in query.recentProgress))
        return sorted(seen)

    rows: list[int] = []
    queues.send("stream.copies", values(5))
    letters = queues.spark.createDataFrame([("stream.copies", b"a copy")], "queue string, value binary")
    letters.write.format("penstock").options(url=queues.url, dead="bad-record").mode("append").save()
    assert of_copies("true") == sorted([*values(5), b"a copy"])
    assert of_copies("false") == of_copies("false", "value binary") == sorted(values(5))
    assert rows == [6, 5, 5]


# --- how much at a time ----------------------------------------------------------------------------


def test_available_now_reads_what_is_there_and_ends(queues: Queues, tmp_path: Path) -> None:
    queues.send("stream.now", values(100))
    queues.send("stream.now.b", values(10))
    frame = queues.stream(
        subscribePattern="stream\\.now.*", startingOffsets="earliest", maxOffsetsPerTrigger=44
    )
    gathering = Gathering(frame, "now", tmp_path, available_now=True)
    assert gathering.query.awaitTermination(int(PATIENCE_SECONDS))
    assert gathering.of("stream.now") == Counter(values(100))
    assert gathering.of("stream.now.b") == Counter(values(10))
    # In proportion to what waits in each: 40 and 4, the same again, and the rest.
    assert gathering.batches == [44, 44, 22]
    queues.send("stream.now", values(5, 100))
    gathering = Gathering(frame, "now", tmp_path, available_now=True)
    assert gathering.query.awaitTermination(int(PATIENCE_SECONDS))
    assert gathering.rows.total() == 5


# --- queues that come ------------------------------------------------------------------------------


def test_a_queue_that_comes_later_is_read_from_its_first_message(queues: Queues, tmp_path: Path) -> None:
    by_pattern = Gathering(queues.stream(subscribePattern="stream\\.new\\..*"), "pattern", tmp_path / "a")
    by_name = Gathering(queues.stream("stream.new.a,stream.new.b"), "name", tmp_path / "b")
    with by_pattern, by_name:
        for gathering in (by_pattern, by_name):
            assert gathering.all().rows.total() == 0
        queues.send("stream.new.a", values(10))
        for gathering in (by_pattern, by_name):
            assert gathering.all().of("stream.new.a") == Counter(values(10))
        queues.send("stream.new.b", values(20))
        queues.send("stream.new.c", values(30))
        queues.send("stream.news", values(40))
        assert by_pattern.all().of("stream.new.b") == Counter(values(20))
        assert by_pattern.of("stream.new.c") == Counter(values(30))
        assert by_name.all().of("stream.new.b") == Counter(values(20))
        assert (by_pattern.rows.total(), by_name.rows.total()) == (60, 30)


# --- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"view": "state"}, "view 'state' is read as a batch"),
        ({"endingOffsets": "latest"}, "'endingOffsets' is not for a stream"),
        ({"startingOffsets": '{"x": 5}'}, "queue 'x': 5 is behind the end of what can be read, 0"),
    ],
)
def test_a_stream_that_makes_no_sense_is_refused(
    queues: Queues, tmp_path: Path, options: dict[str, str], words: str
) -> None:
    with pytest.raises(PySparkException) as refusal:
        _run(queues.stream("x", None, **options), tmp_path)
    assert words in str(refusal.value)


def _run(frame: DataFrame, checkpoint: Path) -> None:
    """A stream that should fail, when it is made or when it runs."""
    with Gathering(frame, "refused", checkpoint) as gathering:
        gathering.all()


# --- what happens to brokers -----------------------------------------------------------------------


def test_a_broker_that_is_killed_and_comes_back_does_not_end_a_query(
    spark: SparkSession, start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker()
    queues = Queues(spark, broker)
    sent = 0

    def send_some() -> None:
        nonlocal sent
        queues.send("q", values(200, sent))
        sent += 200

    send_some()
    with Gathering(queues.stream("q", startingOffsets="earliest"), "killed", tmp_path / "c") as gathering:
        gathering.wait(200)
        for _ in range(2):
            send_some()
            broker.kill()
            restart(broker)
            send_some()
            gathering.wait(sent)
        assert gathering.all().of("q") == Counter(values(sent))


def test_a_broker_that_stays_away_ends_a_query_in_one_line(
    spark: SparkSession, start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker()
    queues = Queues(spark, broker)
    queues.send("q", values(10))
    frame = queues.stream("q", startingOffsets="earliest", retrySeconds=1)
    with Gathering(frame, "away", tmp_path / "c") as gathering:
        gathering.wait(10)
        broker.kill()
        text = gathering.failure()
    assert f"Unreachable: {queues.url}: no broker answers there (Connection refused); tried for 1 s." in text


# --- retention -------------------------------------------------------------------------------------

KEEP_NOTHING = """
[log]
segment-bytes = 65536
snapshot-blocks = 1
[queue."*"]
retention-seconds = 0
"""


@pytest.mark.long
def test_a_stream_that_retention_has_outrun_says_so_unless_a_reader_holds_it(
    spark: SparkSession, start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker("--log-segment-bytes", "65536", config=KEEP_NOTHING)
    queues = Queues(spark, broker)
    for queue in ("plain", "held"):
        queues.send(queue, values(10))
    slow = threading.Event()

    def start(queue: str, **options: str) -> Gathering:
        frame = queues.stream(queue, None, startingOffsets="earliest", **options)
        return SlowGathering(frame, queue, tmp_path / queue, slow)

    with start("plain") as plain, start("held", reader="spark") as held:
        for gathering in (plain, held):
            gathering.wait(10)
        with Api(broker.ports["http"]) as api:
            for queue in ("plain", "held"):
                for first in range(10, 2010, 200):
                    queues.send(queue, [value + b"x" * 300 for value in values(200, first)])
                api.post(f"/v1/queues/{queue}/purge")
            (reader,) = api.get("/v1/readers")["readers"]
            assert (reader["name"], reader["view"]) == ("spark", "messages")
            until(lambda: offset_start(api, "plain") > 10, "retention takes something", PATIENCE_SECONDS)
            assert offset_start(api, "held") <= 10
        slow.set()
        text = plain.failure()
        assert "DataLost: queue 'plain': offsets 10 to" in text
        assert "were removed by retention before they were read; set failOnDataLoss to false to go on" in text
        held.wait(2010)
        assert sorted(int(value[:8]) for value in held.of("held").elements()) == list(range(2010))
        # Spark says that a batch is done when the next one begins.
        queues.send("held", values(1, 2010))
        with Api(broker.ports["http"]) as api:
            until(
                lambda: api.get("/v1/readers/spark")["queues"][0]["position"] >= 2010,
                "the reader's position moves with the query",
                PATIENCE_SECONDS,
            )
    # The same query, from its checkpoint, may go on when it is told to; what nobody has settled is there.
    queues.send("plain", values(100, 2010))
    frame = queues.stream("plain", startingOffsets="earliest", failOnDataLoss="false")
    with Gathering(frame, "plain", tmp_path / "plain") as plain:
        numbers = sorted(int(value[:8]) for value in plain.all().of("plain").elements())
    assert 10 < numbers[0] <= 2010
    assert numbers == list(range(numbers[0], 2110))
    with pytest.raises(PySparkException, match=r"offsets 0 to \d+ were removed by retention"):
        queues.batch("plain", startingOffsets='{"plain": 0}').count()
    assert queues.batch("plain", startingOffsets='{"plain": 0}', failOnDataLoss="false").count() >= 100


class SlowGathering(Gathering):
    """Its first batch is not done before somebody says so."""

    def __init__(self, frame: DataFrame, name: str, checkpoint: Path, done: threading.Event) -> None:
        self._done = done
        super().__init__(frame, name, checkpoint)

    def _take(self, frame: DataFrame, number: int) -> None:
        super()._take(frame, number)
        assert self._done.wait(PATIENCE_SECONDS)


def offset_start(api: Api, queue: str) -> int:
    (row,) = api.get("/v1/offsets", queues=queue)["queues"]
    return int(row["offset_start"])
