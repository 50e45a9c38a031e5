"""Streams into queues: every row once, one transaction for each batch that has rows."""

import json
from collections import Counter
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from tests.http.api import Api
from tests.spark.gate import COMMIT, STAGE, Gate
from tests.spark.rig import PATIENCE_SECONDS, Queues, values


def copying(
    queues: Queues, source: str, checkpoint: Path, url: str | None = None, **options: str
) -> StreamingQuery:
    """A query that copies a queue, as far as there is something, in batches of 1000 messages."""
    frame = queues.stream(
        source, startingOffsets="earliest", maxOffsetsPerTrigger=1000, minPartitions=2, includeHeaders=True
    )
    return writing(frame.select("value", "headers"), url or queues.url, checkpoint, **options)


def writing(frame: DataFrame, url: str, checkpoint: Path, **options: str) -> StreamingQuery:
    stream = frame.writeStream.format("penstock").option("url", url).trigger(availableNow=True)
    for name, value in options.items():
        stream = stream.option(name, value)
    return stream.option("checkpointLocation", str(checkpoint)).start()


def finish(query: StreamingQuery) -> None:
    """Until it has come to its end, or failed."""
    assert query.awaitTermination(int(PATIENCE_SECONDS))


def test_a_stream_is_copied_batch_by_batch(queues: Queues, tmp_path: Path, api: Api) -> None:
    headers = [{"number": str(number)} if number % 2 else None for number in range(2500)]
    queues.send("copy.from", values(2500), headers=headers)
    with Gate(queues.broker) as gate:
        finish(copying(queues, "copy.from", tmp_path, gate.url, queue="copy.to"))
        assert queues.values("copy.to") == Counter(values(2500))
        copied = queues.batch("copy.to", "offset bigint, headers map<string, string>").orderBy("offset")
        assert [row.headers for row in copied.collect()] == headers
        # One key for each batch: the query's id, which the checkpoint keeps, and the batch's number.
        query_id = json.loads((tmp_path / "metadata").read_text())["id"]
        assert list(dict.fromkeys(gate.keys)) == [f"spark/{query_id}/{number}" for number in range(3)]
        assert (gate.count(STAGE), gate.count(COMMIT)) == (6, 3)
        # The query goes on where it was; where nothing is new, nothing is asked.
        queues.send("copy.from", values(10, 2500))
        finish(copying(queues, "copy.from", tmp_path, gate.url, queue="copy.to"))
        finish(copying(queues, "copy.from", tmp_path, gate.url, queue="copy.to"))
        assert gate.count(COMMIT) == 4
    assert queues.values("copy.to") == Counter(values(2510))
    assert api.get("/v1/transactions/" + f"spark/{query_id}/3".replace("/", "%2F"))["state"] == "committed"


def test_a_batch_of_which_nothing_is_left_is_no_transaction(queues: Queues, tmp_path: Path) -> None:
    queues.send("filtered.from", values(20))
    frame = queues.stream("filtered.from", startingOffsets="earliest", maxOffsetsPerTrigger=10)
    with Gate(queues.broker) as gate:
        kept = frame.where("offset >= 10").selectExpr("value", "'filtered.to' as queue")
        finish(writing(kept, gate.url, tmp_path))
        assert gate.count(COMMIT) == 1
    assert queues.values("filtered.to") == Counter(values(10, 10))


def test_a_batch_that_is_run_again_is_stored_once(queues: Queues, tmp_path: Path) -> None:
    queues.send("replay.from", values(3000))
    with Gate(queues.broker) as gate:
        finish(copying(queues, "replay.from", tmp_path, gate.url, queue="replay.to"))
        before = gate.count(COMMIT)
        # As if the driver had died when the broker had committed, and Spark not yet.
        for name in ("2", ".2.crc"):
            (tmp_path / "commits" / name).unlink()
        queues.send("replay.from", values(100, 3000))
        finish(copying(queues, "replay.from", tmp_path, gate.url, queue="replay.to"))
        assert gate.count(COMMIT) == before + 2
        assert len(set(gate.keys)) == 4
    assert queues.values("replay.to") == Counter(values(3100))


def test_batches_by_hand_are_repeatable_with_a_transaction_id(queues: Queues, tmp_path: Path) -> None:
    queues.send("hand.from", values(200))

    def write(frame: DataFrame, number: int) -> None:
        for _ in range(2):
            frame.select("value").write.format("penstock").option("url", queues.url).option(
                "queue", "hand.to"
            ).option("transactionId", f"hand/{number}").mode("append").save()

    frame = queues.stream("hand.from", startingOffsets="earliest", maxOffsetsPerTrigger=100)
    stream = frame.writeStream.foreachBatch(write).trigger(availableNow=True)
    finish(stream.option("checkpointLocation", str(tmp_path)).start())
    assert queues.values("hand.to") == Counter(values(200))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"queue": "x", "transactionId": "t"},
            "option 'transactionId' is not for a stream: a stream's batches",
        ),
        (
            {"queue": "x", "redrive": "true"},
            "option 'redrive' is not for a stream: dead letters are read as a",
        ),
        ({}, "say where to write to, with the option queue or a column queue (string)"),
        ({"Queue": "x.dead"}, "'x.dead' is the door to the dead letters of 'x', not a queue"),
    ],
)
def test_a_stream_that_cannot_be_written_is_refused(
    queues: Queues, tmp_path: Path, options: dict[str, str], words: str
) -> None:
    queues.send("refused.from", values(1))
    with pytest.raises(PySparkException) as refusal:
        finish(copying(queues, "refused.from", tmp_path, **options))
    assert words in str(refusal.value)


def test_a_stream_does_not_overwrite(queues: Queues, tmp_path: Path) -> None:
    queues.send("complete.from", values(1))
    frame = (
        queues.stream("complete.from", startingOffsets="earliest").groupBy("value").count().select("value")
    )
    with pytest.raises(PySparkException) as refusal:
        finish(writing_complete(frame, queues.url, tmp_path))
    assert "a queue is not overwritten: messages are added behind its tail" in str(refusal.value)


def writing_complete(frame: DataFrame, url: str, checkpoint: Path) -> StreamingQuery:
    stream = frame.writeStream.format("penstock").option("url", url).option("queue", "complete.to")
    stream = stream.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    return stream.outputMode("complete").start()
