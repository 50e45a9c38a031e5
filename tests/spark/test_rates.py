"""How much a stream reads at a time, when, and what becomes of queues that are not subscribed to any more."""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
)

from penstock.spark import streaming
from penstock.spark.offsets import Offset, positions_of
from penstock.spark.options import STREAM, read_options
from penstock.spark.source import schema_of
from penstock.spark.streaming import StreamReader
from tests.server.harness import BrokerProcess, until
from tests.spark.rig import PATIENCE_SECONDS, Gathering, Queues, send, url_of, values


@contextmanager
def reader(broker: BrokerProcess, subscribe: str, **options: str) -> Iterator[StreamReader]:
    """What Spark asks, without Spark."""
    said = {"url": url_of(broker), "subscribe": subscribe, "startingOffsets": "earliest", **options}
    reading = StreamReader(read_options(said, STREAM), schema_of("messages"))
    yield reading
    reading.stop()


def step(reading: StreamReader, start: Offset, limit: ReadLimit | None = None) -> Offset:
    return reading.latestOffset(start, limit if limit is not None else reading.getDefaultReadLimit())


def test_what_spark_is_told_about_limits(broker: BrokerProcess) -> None:
    for options, limit in (
        ({}, ReadAllAvailable()),
        ({"maxOffsetsPerTrigger": "5"}, ReadMaxRows(5)),
        ({"maxBytesPerTrigger": "5"}, ReadMaxBytes(5)),
        ({"minOffsetsPerTrigger": "5"}, ReadMinRows(5)),
        ({"minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "9"}, ReadMaxRows(9)),
    ):
        with reader(broker, "rates.none", **options) as reading:
            assert reading.getDefaultReadLimit() == limit


def test_bytes_limit_a_trigger(broker: BrokerProcess) -> None:
    for _ in range(10):
        send(broker, "rates.bytes", [b"x" * 1000] * 10)
    send(broker, "rates.more", [b"x" * 1000] * 50)
    with reader(broker, "rates.bytes", maxBytesPerTrigger="30000") as reading:
        at, ends = reading.initialOffset(), []
        while (end := step(reading, at)) != at:
            ends.append(positions_of(end)["rates.bytes"])
            at = end
        assert ends == [30, 60, 90, 100]
        assert positions_of(step(reading, reading.initialOffset(), ReadAllAvailable())) == {
            "rates.bytes": 100
        }
    with reader(broker, "rates.bytes,rates.more", maxBytesPerTrigger="15000") as reading:
        assert positions_of(step(reading, reading.initialOffset())) == {"rates.bytes": 10, "rates.more": 5}
    with reader(broker, "rates.bytes", maxBytesPerTrigger="30k", maxOffsetsPerTrigger="7") as reading:
        assert positions_of(step(reading, reading.initialOffset())) == {"rates.bytes": 7}
    # One message is read, however large it is.
    with reader(broker, "rates.bytes", maxBytesPerTrigger="1") as reading:
        assert positions_of(step(reading, reading.initialOffset())) == {"rates.bytes": 1}


def test_a_trigger_waits_for_enough(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0

    class Clock:
        monotonic = staticmethod(lambda: now)
        sleep = staticmethod(lambda seconds: None)

    monkeypatch.setattr(streaming, "time", Clock)
    send(broker, "rates.least", values(4))
    options = {"minOffsetsPerTrigger": "10", "maxTriggerDelay": "60s"}
    with reader(broker, "rates.least", **options) as reading:
        start = reading.initialOffset()
        for _ in range(3):
            assert step(reading, start) == start
        # Enough of it: at once.
        send(broker, "rates.least", values(6, 4))
        full = step(reading, start)
        assert positions_of(full) == {"rates.least": 10}
        # Nothing is nothing, however long it takes.
        now += 1000
        assert step(reading, full) == full
        # Not enough: as long as the delay is, from when there was something.
        send(broker, "rates.least", values(1, 10))
        assert step(reading, full) == full
        now += 59
        assert step(reading, full) == full
        now += 1
        assert positions_of(step(reading, full)) == {"rates.least": 11}
        assert positions_of(step(reading, full, ReadAllAvailable())) == {"rates.least": 11}
    with reader(broker, "rates.least", minOffsetsPerTrigger="10", maxOffsetsPerTrigger="10") as reading:
        assert positions_of(step(reading, reading.initialOffset())) == {"rates.least": 10}
    # What is there now is all that there will be.
    with reader(broker, "rates.least", minOffsetsPerTrigger="100") as reading:
        reading.prepareForTriggerAvailableNow()
        assert positions_of(step(reading, reading.initialOffset())) == {"rates.least": 11}


def test_a_queue_that_is_taken_out_is_told(broker: BrokerProcess, caplog: pytest.LogCaptureFixture) -> None:
    send(broker, "rates.stays", values(3))
    send(broker, "rates.goes", values(5))
    with reader(broker, "rates.stays,rates.goes") as reading:
        both = step(reading, reading.initialOffset())
    with reader(broker, "rates.stays") as reading, caplog.at_level(logging.WARNING, "penstock.spark"):
        alone = step(reading, both)
        assert positions_of(alone) == {"rates.stays": 3}
        assert caplog.messages == [
            "queue 'rates.goes' is not subscribed to any more, and that it was read up to 5 is forgotten: "
            "should it come back, it is read from its first message on"
        ]
        assert reading.partitions(both, alone) == []
        assert step(reading, alone) == alone
    assert len(caplog.messages) == 1


# --- with Spark ------------------------------------------------------------------------------------


def test_spark_reads_by_bytes_and_waits_for_enough(queues: Queues, tmp_path: Path) -> None:
    for first in range(0, 100, 10):
        queues.send("rates.spark", [value.ljust(1000, b"x") for value in values(10, first)])
    frame = queues.stream("rates.spark", startingOffsets="earliest", maxBytesPerTrigger="40000")
    gathering = Gathering(frame, "bytes", tmp_path / "a", available_now=True)
    assert gathering.query.awaitTermination(int(PATIENCE_SECONDS))
    assert gathering.batches == [40, 40, 20]
    queues.send("rates.wait", values(5))
    frame = queues.stream(
        "rates.wait", startingOffsets="earliest", minOffsetsPerTrigger=20, maxTriggerDelay="1h"
    )
    with Gathering(frame, "least", tmp_path / "b") as gathering:
        until(lambda: gathering.query.lastProgress is not None, "the query looks", PATIENCE_SECONDS)
        assert gathering.batches == []
        queues.send("rates.wait", values(20, 5))
        gathering.wait(25)
        assert gathering.of("rates.wait") == Counter(values(25))
        assert gathering.batches == [25]
    frame = queues.stream(
        "rates.wait", startingOffsets="earliest", minOffsetsPerTrigger=20, maxTriggerDelay="100ms"
    )
    queues.send("rates.wait", values(1, 25))
    with Gathering(frame, "least", tmp_path / "b") as gathering:
        gathering.wait(1)


def test_a_query_goes_on_without_a_queue_that_is_taken_out(queues: Queues, tmp_path: Path) -> None:
    queues.send("rates.a", values(5))
    queues.send("rates.b", values(5, 5))
    with Gathering(queues.stream("rates.a,rates.b", startingOffsets="earliest"), "two", tmp_path) as two:
        assert two.all().rows.total() == 10
    queues.send("rates.a", values(5, 10))
    queues.send("rates.b", values(5, 15))
    with Gathering(queues.stream("rates.a", startingOffsets="earliest"), "one", tmp_path) as one:
        assert one.all().rows.total() == 5
        assert one.of("rates.a") == Counter(values(5, 10))


def test_tasks_are_cut_by_bytes(queues: Queues) -> None:
    queues.send("rates.large", [b"%d" % n + b"x" * (1 << 20) for n in range(8)])
    for n in range(4):
        queues.send(f"rates.small{n}", values(10))
    small = ",".join(f"rates.small{n}" for n in range(4))
    frame = queues.batch(f"rates.large,{small}", maxBytesPerPartition="2m")
    # Two rows of a little more than 1 MiB are too much for one task; one and the small queues are not.
    assert frame.rdd.getNumPartitions() == 8
    rows = frame.selectExpr("queue", "offset", "length(value) as size").collect()
    assert sum(row.size > 1 << 20 for row in rows) == 8
    assert len({(row.queue, row.offset) for row in rows}) == len(rows) == 48
    assert queues.batch("rates.large", maxBytesPerPartition="5m").rdd.getNumPartitions() == 2
    assert queues.batch(f"rates.large,{small}").rdd.getNumPartitions() == 1


def test_times_at_which_a_batch_ends(queues: Queues) -> None:
    for queue in ("rates.t1", "rates.t2"):
        queues.send(queue, values(10))
    (row,) = queues.batch("rates.t1,rates.t2").selectExpr("max(timestamp) as last").collect()
    micros = round(row.last.timestamp() * 1_000_000) + 1
    millis = micros // 1000 + 1
    until(lambda: time.time_ns() // 1_000_000 > millis, "the clock goes on")
    for queue in ("rates.t1", "rates.t2"):
        queues.send(queue, values(5, 10))
    iso = datetime.fromtimestamp(micros / 1_000_000, UTC).isoformat()
    both = "rates.t1,rates.t2"
    assert queues.values(both, endingTimestamp=iso) == Counter(values(10) * 2)
    assert queues.values(both, endingTimestamp=millis) == Counter(values(10) * 2)
    assert queues.values(both, endingTimestamp="2999-01-01") == Counter(values(15) * 2)
    assert queues.values(both, endingTimestamp="2001-01-01") == Counter()
    assert queues.values("rates.t1", startingTimestamp=iso, endingTimestamp="2999-01-01") == Counter(
        values(5, 10)
    )
    by_time = f'{{"rates.t1": {millis}, "rates.t2": 0}}'
    assert queues.batch(both, startingOffsetsByTimestamp=by_time).count() == 20
    assert queues.values(both, endingOffsetsByTimestamp=by_time) == Counter(values(10))
    assert queues.batch("rates.t1", view="events", endingTimestamp=iso).count() == 10
    # A beginning behind the end, where one of them is a time, is nothing to read.
    assert queues.values("rates.t1", startingOffsets='{"rates.t1": 12}', endingTimestamp=iso) == Counter()


def test_a_stream_that_begins_at_a_time_of_each_queue(queues: Queues, tmp_path: Path) -> None:
    queues.send("rates.from", values(10))
    frame = queues.stream("rates.from", startingOffsetsByTimestamp='{"rates.from": "2001-01-01"}')
    with Gathering(frame, "from", tmp_path) as gathering:
        assert gathering.all().of("rates.from") == Counter(values(10))
