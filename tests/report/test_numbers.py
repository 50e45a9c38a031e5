"""Every number of every table, compared with the same number counted by hand: see reference.py."""

import math
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from penstock.report import job, measures
from penstock.report.period import SECOND_US, Period, datetime_of, span_of
from penstock.report.survey import survey
from penstock.report.tables import ACCURACY, BUCKET_ACCURACY, PERCENTILES, TABLES, of_nothing, schema_of
from penstock.spark.api import Broker
from tests.report.conftest import CUT_EVENT, CUT_QUEUE, Made
from tests.report.reference import Reference, Table, read

COUNTED = [name for name in TABLES if name not in ("coverage", "totals")]


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def by_hand(whole: Made) -> Reference:
    return reference_of(whole, {CUT_QUEUE: CUT_EVENT})


@pytest.fixture(scope="module")
def middle_by_hand(middle: Made) -> Reference:
    return reference_of(middle, {})


def reference_of(made: Made, kept: dict[str, int]) -> Reference:
    everything = read(made.folder, {one.queue: one.event_end for one in made.facts})
    reference = Reference(everything, kept, *made.period)
    assert made.result.span is not None
    reference.bucket_us = made.result.span.bucket_us
    return reference


def rows_of(made: Made, name: str) -> Table:
    table = made.result.tables[name]
    assert table.schema == schema_of(name)
    rows: Table = table.to_pylist()
    return rows


def same(found: Table, expected: Table) -> None:
    """Equal, row by row; of a row, the columns that are expected."""
    assert len(found) == len(expected)
    for row, right in zip(found, expected, strict=True):
        assert {name: row[name] for name in right} == right


def test_the_traffic_has_something_of_everything(by_hand: Reference) -> None:
    events = {seen.event for seen in by_hand.events}
    assert events == {"accepted", "acked", "returned", "requeued", "delayed", "dead", "redriven", "withdrawn"}
    reasons = {seen.reason for seen in by_hand.events}
    assert {
        "expired",
        "rejected",
        "retries-exhausted",
        "consumer-lost",
        "consumer-cancelled",
        "purged",
    } <= reasons
    assert by_hand.unknown_waits()[CUT_QUEUE] > 0


@pytest.mark.parametrize("name", COUNTED)
def test_a_table_of_everything(whole: Made, by_hand: Reference, name: str) -> None:
    expected = getattr(by_hand, name)()
    assert expected
    same(rows_of(whole, name), expected)


@pytest.mark.parametrize("name", COUNTED)
def test_a_table_of_a_time_in_the_middle(middle: Made, middle_by_hand: Reference, name: str) -> None:
    expected = getattr(middle_by_hand, name)()
    assert expected
    same(rows_of(middle, name), expected)


def test_the_middle_has_messages_from_before_of_both_kinds(middle: Made, middle_by_hand: Reference) -> None:
    # The test above would be of little worth without messages that had waited since before the period, and
    # without some whose delivery looks like the first and is not: they had been dead, and were redriven.
    start_us = middle.period.start_us
    assert start_us is not None
    before: dict[tuple[str, int], list[str]] = {}
    for seen in middle_by_hand.all_events:
        if seen.time_us < start_us:
            before.setdefault((seen.queue, seen.offset), []).append(seen.event)
    firsts = [
        before[seen.queue, seen.offset]
        for seen in middle_by_hand.events
        if seen.attempt == 1 and seen.dispatched_us is not None and (seen.queue, seen.offset) in before
    ]
    assert sum(events == ["accepted"] for events in firsts) > 20
    assert any("dead" in events for events in firsts)


@pytest.mark.parametrize("part", ["whole", "middle"])
def test_totals_and_coverage(
    part: str, whole: Made, middle: Made, by_hand: Reference, middle_by_hand: Reference
) -> None:
    made, reference = (whole, by_hand) if part == "whole" else (middle, middle_by_hand)
    now: dict[str, dict[str, Any]] = {one.queue: one.columns() for one in made.facts}
    totals = rows_of(made, "totals")
    same(totals, reference.totals())
    for row in totals:
        assert {name: row[name] for name in row if name in now[row["queue"]]} == {
            name: value for name, value in now[row["queue"]].items() if name in row
        }
    coverage = rows_of(made, "coverage")
    same(coverage, reference.coverage())
    cut = {CUT_QUEUE} if part == "whole" else set()
    assert {row["queue"] for row in coverage if row["cut"]} == cut
    assert all(row["unsynced_events"] == 0 for row in coverage)
    assert {row["queue"]: row["event_kept"] for row in coverage} == {
        one.queue: one.event_start for one in made.facts
    }


def test_a_time_of_which_retention_has_left_nothing_is_cut(spark: SparkSession, whole: Made) -> None:
    # Of one queue all that is kept came later, of another nothing is kept; of the others everything is.
    assert whole.result.span is not None
    asks = Broker(whole.url)
    facts = {one.queue: one for one in survey(asks)}
    late, gone = [queue for queue, one in sorted(facts.items()) if one.events > 20][:2]
    facts[late] = facts[late]._replace(event_start=facts[late].event_end - 1)
    facts[gone] = facts[gone]._replace(event_start=facts[gone].event_end)
    start_us = whole.result.span.start_us
    period = Period(None, start_us + 10 * SECOND_US)
    result = job.run(spark, job.Source(whole.url, None, asks), [*facts.values()], period, whole.now_us)
    asks.close()
    coverage = {row["queue"]: row for row in result.tables["coverage"].to_pylist()}
    assert {queue for queue, row in coverage.items() if row["cut"]} == {late, gone}
    assert (coverage[late]["events"], coverage[gone]["events"]) == (0, 0)
    nothing = of_nothing([facts[gone], facts[gone]._replace(queue="new", event_start=0, event_end=0)])
    assert nothing["coverage"].column("cut").to_pylist() == [True, False]


def test_what_lives_now_is_what_lived_at_the_end(whole: Made) -> None:
    living = {one.queue: one.living for one in whole.facts}
    assert {row["queue"]: row["outstanding_end"] for row in rows_of(whole, "totals")} == living
    assert sum(living.values()) > 0


def test_the_span_is_what_was_asked_for(middle: Made, whole: Made, by_hand: Reference) -> None:
    assert middle.result.span is not None
    assert (middle.result.span.start_us, middle.result.span.end_us) == middle.period
    assert whole.result.span is not None
    times = [seen.time_us for seen in by_hand.events]
    assert whole.result.span[:2] == (min(times), max(times) + 1)


# --- percentiles -----------------------------------------------------------------------------------


def test_the_traffic_has_few_enough_values_for_exact_percentiles(whole: Made, middle: Made) -> None:
    # Otherwise the tables above could not be compared for equality.
    for made in (whole, middle):
        for name, counted in (("waiting", "messages"), ("working", "deliveries")):
            for row in rows_of(made, name):
                assert row[counted] <= (ACCURACY if row["bucket"] is None else BUCKET_ACCURACY) // 2


def test_percentiles_are_as_exact_as_the_page_says(spark: SparkSession) -> None:
    ranks_off = {}
    for values in (ACCURACY // 2, ACCURACY, 3 * ACCURACY):
        # Every value once, mixed up: a value is its own rank.
        mixed = spark.range(1, values + 1).orderBy(F.hash("id")).select(F.col("id").alias("took_us"))
        frame = mixed.withColumn("queue", F.lit("q")).repartition(3)
        (row,) = measures._took(frame, ["queue"], "values", ACCURACY).collect()
        assert row["values"] == values
        ranks_off[values] = max(
            abs(round(row[name] * SECOND_US) - math.ceil(part * values)) for name, part in PERCENTILES.items()
        )
    assert ranks_off[ACCURACY // 2] == 0
    assert ranks_off[ACCURACY] <= 1
    assert ranks_off[3 * ACCURACY] <= 3


def test_a_clock_that_was_set_back_leaves_every_wait_in_a_bucket(spark: SparkSession) -> None:
    # Dispatched, then the clock was set back by an hour, then acked: no event is as late as the dispatch.
    span = span_of(0, 10 * SECOND_US)
    rows = [("q", 0, 5 * SECOND_US, 3600 * SECOND_US), ("q", 1, 5 * SECOND_US, 6 * SECOND_US)]
    waits = spark.createDataFrame(
        rows, "queue string, offset bigint, accepted_us bigint, dispatched_us bigint"
    )
    found = measures.waiting(waits, span).where("bucket is not null").toArrow().to_pylist()
    assert [(row["bucket"], row["messages"]) for row in found] == [
        (datetime_of(6 * SECOND_US), 1),
        (datetime_of(9 * SECOND_US), 1),
    ]
