"""Measures: what is counted and how, as functions from frames to frames. Nothing here runs anything.

`events` is the frame that `job.py` reads: a row per event, with `queue`, `number` (of the event), `event`,
`offset`, `reason`, `consumer`, `attempt`, `dispatched_us` and `time_us`. The other frames are aggregates:

    counts       how often which event happened in which bucket
    waits        the first delivery of each message: when the message was accepted, and when it was dispatched
    deliveries   a row per delivery that ended

Percentiles are by rank: the smallest value that is not below the given part of all. With many values they
are approximated, see `tables.ACCURACY`; within a bucket, sooner and more so.
"""

from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.report.period import SECOND_US, Span
from penstock.report.tables import (
    ACCURACY,
    ATTEMPTS_MAX,
    BUCKET_ACCURACY,
    EVENTS,
    FAILED,
    GONE,
    OUTCOMES,
    PERCENTILES,
)

CONNECTIONS_MAX: Final = 100
"""So many connections are named of those with the most deliveries, the most failures, the slowest ones."""

HOSTS_MAX: Final = 10_000

OUTCOME: Final = """
    case
        when event in ('dead', 'rejected') then 'died'
        when event in ('returned', 'requeued', 'delayed') then
            case
                when reason in ('consumer-lost', 'lease-ended') then 'lost'
                when reason = 'consumer-cancelled' then 'given_back'
                else 'requeued'
            end
        else event
    end
"""
"""How a delivery ended, see `tables.OUTCOMES`."""

# A consumer's name is PROTOCOL:PEER#NUMBER, over HTTP without a number; a peer is HOST:PORT, [HOST]:PORT, or
# the word `unix`. Every delivery has one, so that these are plain functions and no regular expressions.
PROTOCOL: Final = "substring_index(consumer, ':', 1)"
PEER: Final = "substring_index(substring(consumer, instr(consumer, ':') + 1), '#', 1)"
HOST: Final = """
    trim(both '[]' from if(
        instr(peer, ':') > 0, left(peer, length(peer) - length(substring_index(peer, ':', -1)) - 1), peer
    ))
"""

ALL: Final = "cast(null as timestamp)"


def net() -> Column:
    """By how many living messages an event makes more."""
    return F.when(F.col("event") == "accepted", 1).when(F.col("event").isin(*GONE), -1).otherwise(0)


# --- counting ----------------------------------------------------------------------------------------------


def coverage(events: DataFrame) -> DataFrame:
    """What there is of each queue."""
    accepted = F.when(F.col("event") == "accepted", F.col("offset"))
    return events.groupBy("queue").agg(
        F.count("*").alias("events"),
        F.min("number").alias("event_first"),
        (F.max("number") + 1).alias("event_end"),
        F.min("time_us").alias("first_us"),
        F.max("time_us").alias("last_us"),
        F.min(accepted).alias("offset_first"),
        (F.max(accepted) + 1).alias("offset_end"),
    )


def counts(events: DataFrame, span: Span) -> DataFrame:
    """Small: what is counted by time, event and reason is counted from this."""
    held = F.col("dispatched_us").isNotNull().alias("held")
    return events.groupBy("queue", _bucket("time_us", span), "event", "reason", held).agg(
        F.count("*").alias("events")
    )


def totals(counts: DataFrame, facts: DataFrame) -> DataFrame:
    """A row for each queue of `facts`, also where nothing has happened."""
    found = _by_event(counts, "queue").withColumn("net", _net_of_row())
    filled = facts.join(found, "queue", "left").fillna(0, [*EVENTS, "net"])
    return filled.withColumn("outstanding_start", F.col("outstanding_end") - F.col("net")).orderBy("queue")


def throughput(counts: DataFrame, facts: DataFrame) -> DataFrame:
    """A row for each queue and bucket in which something has happened."""
    later = Window.partitionBy("queue").orderBy("bucket").rowsBetween(1, Window.unboundedFollowing)
    found = _by_event(counts, "queue", "bucket")
    gone_later = F.coalesce(F.sum(_net_of_row()).over(later), F.lit(0))
    rows = found.join(facts.select("queue", "outstanding_end"), "queue")
    return rows.withColumn("outstanding", F.col("outstanding_end") - gone_later).orderBy("queue", "bucket")


def _by_event(counts: DataFrame, *keys: str) -> DataFrame:
    """A column for each event."""
    sums = [
        F.sum(F.when(F.col("event") == event, F.col("events")).otherwise(0)).alias(event) for event in EVENTS
    ]
    return counts.groupBy(*keys).agg(*sums)


def _net_of_row() -> Column:
    column = F.col("accepted")
    for event in GONE:
        column = column - F.col(event)
    return column


def endings(counts: DataFrame) -> DataFrame:
    return (
        counts.where(F.col("event") != "accepted")
        .groupBy("queue", "event", "reason", "held")
        .agg(F.sum("events").alias("events"))
        .orderBy("queue", "event", "reason", "held")
    )


def deaths(counts: DataFrame) -> DataFrame:
    return (
        counts.where(F.col("event").isin("dead", "rejected", "expired", "withdrawn"))
        .groupBy("queue", "bucket", "event", "reason")
        .agg(F.sum("events").alias("messages"))
        .orderBy("queue", "bucket", "event", "reason")
    )


def attempts(events: DataFrame) -> DataFrame:
    """At which delivery messages found their ends."""
    ended = events.where(
        F.col("dispatched_us").isNotNull() & F.col("event").isin("acked", "dead", "rejected")
    )
    return (
        ended.groupBy("queue", F.least("attempt", F.lit(ATTEMPTS_MAX)).alias("attempt"))
        .agg(
            F.count_if(F.col("event") == "acked").alias("acked"),
            F.count_if(F.col("event") != "acked").alias("died"),
        )
        .orderBy("queue", "attempt")
    )


# --- waiting -----------------------------------------------------------------------------------------------


def waits(events: DataFrame) -> DataFrame:
    """A row for each message whose next event after its acceptance ends a delivery.

    `accepted_us` is null where the acceptance is not among the events; then `attempt` says whether it may
    have been the first delivery. Plain numbers only: Spark aggregates them by hashing, without sorting.
    """
    accepted = F.col("event") == "accepted"
    delivered = F.col("dispatched_us").isNotNull()
    return (
        events.groupBy("queue", "offset")
        .agg(
            F.max(F.when(accepted, F.col("time_us"))).alias("accepted_us"),
            F.min(F.when(~accepted, F.col("number"))).alias("next"),
            F.min(F.when(delivered, F.col("number"))).alias("next_delivery"),
            # The deliveries of a message follow each other: the earliest is the one with that number.
            F.min("dispatched_us").alias("dispatched_us"),
            F.min(F.when(delivered, F.col("attempt"))).alias("attempt"),
        )
        .where(F.col("next") == F.col("next_delivery"))
        .where(F.col("accepted_us").isNotNull() | (F.col("attempt") <= 1))
        .select("queue", "offset", "accepted_us", "dispatched_us")
    )


def oldest_unknown(waits: DataFrame) -> DataFrame:
    """The lowest offset of each queue whose acceptance is not known."""
    return waits.where(F.col("accepted_us").isNull()).groupBy("queue").agg(F.min("offset").alias("offset"))


def with_older(waits: DataFrame, older: DataFrame) -> DataFrame:
    """`waits` with what the events before the period say of messages that were accepted before.

    Those that something else had happened to before are left out: theirs was not the first delivery.
    """
    before = older.groupBy("queue", "offset").agg(
        F.max(F.when(F.col("event") == "accepted", F.col("time_us"))).alias("before_us"),
        F.count_if(F.col("event") != "accepted").alias("others"),
    )
    unknown = waits.where(F.col("accepted_us").isNull()).drop("accepted_us")
    found = (
        unknown.join(before, ["queue", "offset"], "left")
        .where(F.coalesce("others", F.lit(0)) == 0)
        .select("queue", "offset", F.col("before_us").alias("accepted_us"), "dispatched_us")
    )
    return waits.where(F.col("accepted_us").isNotNull()).unionByName(found)


def unknown_waits(waits: DataFrame) -> DataFrame:
    return waits.groupBy("queue").agg(F.count_if(F.col("accepted_us").isNull()).alias("unknown_waits"))


def waiting(waits: DataFrame, span: Span) -> DataFrame:
    known = waits.where(F.col("accepted_us").isNotNull()).select(
        "queue",
        # A delivery that began before the period ended in it: it is counted where the period begins. One that
        # began behind it did so by a clock that was set back afterwards.
        _bucket(
            F.least(F.greatest("dispatched_us", F.lit(span.start_us)), F.lit(span.end_us - 1)),
            span,
        ),
        F.greatest(F.col("dispatched_us") - F.col("accepted_us"), F.lit(0)).alias("took_us"),
    )
    whole = _took(known, ["queue"], "messages", ACCURACY).withColumn("bucket", F.expr(ALL))
    by_bucket = _took(known, ["queue", "bucket"], "messages", BUCKET_ACCURACY)
    return whole.unionByName(by_bucket).orderBy("queue", "bucket")


# --- working -----------------------------------------------------------------------------------------------


def deliveries(events: DataFrame, span: Span) -> DataFrame:
    return events.where(F.col("dispatched_us").isNotNull()).select(
        "queue",
        "consumer",
        _bucket("time_us", span),
        F.expr(OUTCOME).alias("outcome"),
        "time_us",
        F.greatest(F.col("time_us") - F.col("dispatched_us"), F.lit(0)).alias("took_us"),
    )


def working(deliveries: DataFrame) -> DataFrame:
    nothing = F.lit(None).cast("string")
    whole = _took(deliveries, ["queue"], "deliveries", ACCURACY)
    by_outcome = _took(deliveries, ["queue", "outcome"], "deliveries", ACCURACY)
    by_bucket = _took(deliveries, ["queue", "bucket"], "deliveries", BUCKET_ACCURACY)
    return (
        whole.withColumns({"bucket": F.expr(ALL), "outcome": nothing})
        .unionByName(by_outcome.withColumn("bucket", F.expr(ALL)))
        .unionByName(by_bucket.withColumn("outcome", nothing))
        .orderBy("queue", "bucket", "outcome")
    )


def connections(deliveries: DataFrame) -> DataFrame:
    """A row for each queue and connection; there may be very many, and `worst` chooses some."""
    return _of_consumers(_with_places(deliveries), "consumer").withColumn("connections", F.lit(1))


def worst(connections: DataFrame) -> DataFrame:
    """Those with the most deliveries, the most failures, and the slowest."""
    failed = sum((F.col(outcome) for outcome in FAILED), F.lit(0))
    orders = [F.col("deliveries").desc(), failed.desc(), F.col("p90_seconds").desc()]
    chosen = [
        connections.orderBy(order, "queue", "consumer").limit(CONNECTIONS_MAX).select("queue", "consumer")
        for order in orders
    ]
    names = chosen[0].unionByName(chosen[1]).unionByName(chosen[2]).distinct()
    return connections.join(F.broadcast(names), ["queue", "consumer"])


def hosts(deliveries: DataFrame) -> DataFrame:
    """A row for each queue, protocol and host, the busiest first."""
    found = _of_consumers(_with_places(deliveries), connections=F.count_distinct("consumer"))
    return (
        found.withColumn("consumer", F.lit(None).cast("string"))
        .orderBy(F.desc("deliveries"))
        .limit(HOSTS_MAX)
    )


def _with_places(deliveries: DataFrame) -> DataFrame:
    named = deliveries.where(F.col("consumer").isNotNull())
    peers = named.withColumns({"protocol": F.expr(PROTOCOL), "peer": F.expr(PEER)})
    return peers.withColumn("host", F.expr(HOST)).drop("peer")


def _of_consumers(deliveries: DataFrame, *keys: str, **more: Column) -> DataFrame:
    by_outcome = {outcome: F.count_if(F.col("outcome") == outcome) for outcome in OUTCOMES}
    times = {
        "time_first": F.timestamp_micros(F.min("time_us")),
        "time_last": F.timestamp_micros(F.max("time_us")),
    }
    return _took(
        deliveries,
        ["queue", "protocol", "host", *keys],
        "deliveries",
        ACCURACY,
        *(column.alias(name) for name, column in {**by_outcome, **times, **more}.items()),
    )


# --- shared ------------------------------------------------------------------------------------------------


def _bucket(time_us: "Column | str", span: Span) -> Column:
    """When the bucket of a time begins."""
    column = F.col(time_us) if isinstance(time_us, str) else time_us
    return F.timestamp_micros(column - F.pmod(column, F.lit(span.bucket_us))).alias("bucket")


def _took(frame: DataFrame, keys: Sequence[str], counted: str, accuracy: int, *more: Column) -> DataFrame:
    """How many there are, and how long they took (`took_us`)."""
    found = frame.groupBy(*keys).agg(
        F.count("*").alias(counted),
        F.percentile_approx("took_us", list(PERCENTILES.values()), accuracy).alias("ranks"),
        F.max("took_us").alias("max_us"),
        *more,
    )
    seconds = {name: F.col("ranks")[at] / SECOND_US for at, name in enumerate(PERCENTILES)}
    return found.withColumns({**seconds, "max_seconds": F.col("max_us") / SECOND_US}).drop("ranks", "max_us")
