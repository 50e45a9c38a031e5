"""Job: the events of some queues in, small tables out. All that is counted is counted by Spark.

Events are read once and kept by Spark, in memory as far as there is room; every table is an aggregate over
them (`measures.py`). What comes to the driver has a row per queue, bucket and reason, or per consumer, never
per message.

How long a message waited is in two events: its acceptance, and the first that follows, if that ends a
delivery. Both are found by one aggregate over queue and offset. Where the period begins in the middle of the
log, messages that were accepted before are looked for in the events before: from the acceptance of the oldest
of them on, and no further back.

How it fails: `JobFailed`, with what Spark says in one line.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.errors import PenstockError
from penstock.report import measures, tables
from penstock.report.period import Period, Span, datetime_of, span_of
from penstock.report.survey import Asks, Facts, position_before
from penstock.report.tables import TABLES
from penstock.spark.session import one_line, tried_again

if TYPE_CHECKING:
    import pyarrow as pa

EVENT_COLUMNS: Final = (
    "queue string, event_offset bigint, event string, offset bigint, reason string, consumer string, "
    "attempt int, dispatched timestamp, timestamp timestamp"
)
FACT_COLUMNS: Final = (
    "queue string, event_kept bigint, unsynced_events bigint, ready_now bigint, held_now bigint, "
    "delayed_now bigint, dead_now bigint, consumers_now bigint, paused boolean, events_kept bigint"
)

Tables = dict[str, "pa.Table"]


class JobFailed(PenstockError):
    """Spark could not do it. The text is the reason in one line."""


class Result(NamedTuple):
    """What came out. `span` is None where nothing has happened."""

    span: Span | None
    tables: Tables


class Source(NamedTuple):
    """Where the events are, and somebody who asks there."""

    url: str
    token: str | None
    asks: Asks


def run(
    spark: SparkSession,
    source: Source,
    facts: Sequence[Facts],
    period: Period,
    now_us: int,
    tell: Callable[[str], None] = lambda _text: None,
) -> Result:
    """The tables of a report on queues of which something can be read.

    `now_us` ends a period that has a beginning and no end.
    """

    def work() -> Result:
        with _Job(spark, source, facts, period, tell) as job:
            return job.result(now_us)

    try:
        return tried_again(work, tell)
    except PySparkException as error:
        raise JobFailed(f"Spark: {one_line(error)}") from error


class _Job:
    def __init__(
        self,
        spark: SparkSession,
        source: Source,
        facts: Sequence[Facts],
        period: Period,
        tell: Callable[[str], None],
    ) -> None:
        self._spark = spark
        self._source = source
        self._facts = {one.queue: one for one in facts}
        self._period = period
        self._tell = tell
        self._kept: list[DataFrame] = []
        self._tables: Tables = {name: tables.empty(name) for name in TABLES}

    def __enter__(self) -> "_Job":
        return self

    def __exit__(self, *_: object) -> None:
        for frame in self._kept:
            frame.unpersist()

    def result(self, now_us: int) -> Result:
        self._tell("reading events")
        read = self._keep(self._read_all())
        events = read.where(self._within())
        coverage = self._keep(measures.coverage(events))
        firsts = {row["queue"]: row for row in coverage.collect()}
        span = self._span([(row["first_us"], row["last_us"]) for row in firsts.values()], now_us)
        facts = self._keep(self._fact_frame(read))
        counts = self._keep(measures.counts(events, span or Span(0, 1, 1)))
        self._tell("counting")
        self._take("totals", measures.totals(counts, facts))
        if span is None:
            self._take("coverage", self._whole_coverage(coverage, facts, None))
            return Result(None, self._tables)
        for name in ("endings", "deaths"):
            self._take(name, getattr(measures, name)(counts))
        self._take("throughput", measures.throughput(counts, facts))
        self._take("attempts", measures.attempts(events))
        self._tell("measuring how long messages waited")
        waits = self._waits(events, {queue: row["event_first"] for queue, row in firsts.items()})
        self._take("waiting", measures.waiting(waits, span))
        self._take("coverage", self._whole_coverage(coverage, facts, waits))
        self._tell("measuring how long consumers worked")
        deliveries = measures.deliveries(events, span)
        self._take("working", measures.working(deliveries))
        connections = self._keep(measures.connections(deliveries))
        consumers = measures.hosts(deliveries).unionByName(measures.worst(connections))
        self._take("consumers", consumers.orderBy("queue", "protocol", "host", "consumer"))
        return Result(span, self._tables)

    # --- reading ---------------------------------------------------------------------------------------

    def _read_all(self) -> DataFrame:
        """From the beginning of the period to the end of what there is: what lives is known for then."""
        known = [one for one in self._facts.values() if one.events]
        ends = {one.queue: one.event_end for one in known}
        if self._period.start_us is None:
            return self._read(ends, startingOffsets=json.dumps({one.queue: one.event_start for one in known}))
        return self._read(ends, startingTimestamp=datetime_of(self._period.start_us).isoformat())

    def _read(self, ends: Mapping[str, int], **where: str) -> DataFrame:
        """Events in plain numbers: times are µs since 1970. `where` is an option that says where to begin."""
        reading = (
            self._spark.read.format("penstock")
            .option("url", self._source.url)
            .option("view", "events")
            # Names, not patterns: a queue that comes meanwhile has no place in the offsets.
            .option("subscribePattern", "|".join(map(re.escape, ends)))
            .option("endingOffsets", json.dumps(ends))
            .option("failOnDataLoss", "false")  # the coverage says what is missing
            .option("minPartitions", str(os.cpu_count() or 1))
            .schema(EVENT_COLUMNS)
        )
        if self._source.token is not None:
            reading = reading.option("token", self._source.token)
        return (
            reading.options(**where)
            .load()
            .select(
                "queue",
                F.col("event_offset").alias("number"),
                "event",
                "offset",
                "reason",
                "consumer",
                "attempt",
                F.unix_micros("dispatched").alias("dispatched_us"),
                F.unix_micros("timestamp").alias("time_us"),
            )
        )

    def _within(self) -> Column:
        within = F.lit(True)
        if self._period.start_us is not None:
            within &= F.col("time_us") >= self._period.start_us
        if self._period.end_us is not None:
            within &= F.col("time_us") < self._period.end_us
        return within

    def _keep(self, frame: DataFrame) -> DataFrame:
        self._kept.append(frame.persist())
        return frame

    def _take(self, name: str, frame: DataFrame) -> None:
        """A table to the driver, with exactly the columns that it has."""
        columns = [F.col(column.name).cast(column.type).alias(column.name) for column in TABLES[name]]
        self._tables[name] = frame.select(*columns).toArrow().cast(tables.schema_of(name))

    # --- what the survey knows -------------------------------------------------------------------------

    def _span(self, times: Sequence[tuple[int, int]], now_us: int) -> Span | None:
        """The time that the tables are about: what was asked for, or what there is."""
        if not times:
            return None
        start_us, end_us = self._period
        last_us = max(last for _, last in times) + 1
        if start_us is None:
            start_us = min(first for first, _ in times)
            return span_of(start_us, last_us if end_us is None else end_us)
        return span_of(start_us, max(now_us, last_us) if end_us is None else end_us)

    def _fact_frame(self, read: DataFrame) -> DataFrame:
        """The facts of the survey; how many messages lived when the period ended, and whether it is cut."""
        rows = [(*one.columns().values(), one.events) for one in self._facts.values()]
        end_us = self._period.end_us
        later = F.lit(False) if end_us is None else F.col("time_us") >= end_us
        found = read.groupBy("queue").agg(
            F.min("number").alias("read_first"),
            F.sum(F.when(later, measures.net()).otherwise(0)).alias("net_after"),
        )
        living = F.col("ready_now") + F.col("held_now") + F.col("delayed_now") + F.col("dead_now")
        # What is kept begins in the period or behind it, or nothing is: before that there may have been more.
        first = F.when(F.col("events_kept") > 0, F.col("read_first")).otherwise(F.col("event_kept"))
        return (
            self._spark.createDataFrame(rows, FACT_COLUMNS)
            .join(found, "queue", "left")
            .withColumn("outstanding_end", living - F.coalesce("net_after", F.lit(0)))
            .withColumn("cut", (F.col("event_kept") > 0) & F.equal_null(first, F.col("event_kept")))
        )

    def _whole_coverage(self, coverage: DataFrame, facts: DataFrame, waits: DataFrame | None) -> DataFrame:
        whole = facts.select("queue", "event_kept", "unsynced_events", "cut").join(coverage, "queue", "left")
        if waits is not None:
            whole = whole.join(measures.unknown_waits(waits), "queue", "left")
        else:
            whole = whole.withColumn("unknown_waits", F.lit(0))
        return (
            whole.fillna(0, ["events", "unknown_waits"])
            .withColumns(
                {
                    "missing_events": F.coalesce(
                        F.col("event_end") - F.col("event_first") - F.col("events"), F.lit(0)
                    ),
                    "time_first": F.timestamp_micros("first_us"),
                    "time_last": F.timestamp_micros("last_us"),
                }
            )
            .orderBy("queue")
        )

    # --- waiting ---------------------------------------------------------------------------------------

    def _waits(self, events: DataFrame, firsts: Mapping[str, int]) -> DataFrame:
        """The first deliveries, with the acceptances of messages that came before the period."""
        waits = self._keep(measures.waits(events))
        if self._period.start_us is None:
            return waits
        oldest = {row["queue"]: row["offset"] for row in measures.oldest_unknown(waits).collect()}
        starts = {
            queue: position_before(self._source.asks, queue, offset, self._facts[queue].event_start)
            for queue, offset in oldest.items()
        }
        starts = {queue: start for queue, start in starts.items() if start < firsts[queue]}
        if not starts:
            return waits
        self._tell(f"looking for messages that came before, in {len(starts)} queues")
        ends = {queue: firsts[queue] for queue in starts}
        older = self._read(ends, startingOffsets=json.dumps(starts))
        return self._keep(measures.with_older(waits, older))
