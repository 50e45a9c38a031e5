"""Conditions that Spark hands to the source: the same rows as without, and no more read than that takes."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from penstock import connect
from penstock.spark.filters import GAP_MAX, Where, is_taken
from penstock.spark.options import BATCH, read_options
from penstock.spark.reading import FilteringReader
from penstock.spark.source import schema_of
from tests.http.api import Api
from tests.server.harness import BrokerProcess, until
from tests.spark.conftest import StartBroker
from tests.spark.rig import PATIENCE_SECONDS, Cutter, Queues, send, url_of, values
from tests.spark.test_read_stream import KEEP_NOTHING, offset_start

SETTING = "spark.sql.python.filterPushdown.enabled"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SCHEMA = pa.schema(
    {
        "offset": pa.int64(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "queue": pa.string(),
        "reason": pa.string(),
    }
)
SMALL = st.integers(-3, 12)
MOMENTS = SMALL.map(lambda n: EPOCH + timedelta(microseconds=n))
WORDS = st.sampled_from(["", "a", "ab", "b", "ä", "\U0001f600", "ba"])
OF = {"offset": SMALL, "timestamp": MOMENTS, "queue": WORDS, "reason": WORDS}


@st.composite
def conditions(draw: st.DrawFn) -> Filter:
    column = draw(st.sampled_from(sorted(OF)))
    path, value = (column,), OF[column]
    comparing = [EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual]
    strings = [StringStartsWith, StringEndsWith, StringContains] if OF[column] is WORDS else []
    kind: Any = draw(st.sampled_from([*comparing, *strings, In, IsNull, IsNotNull]))
    condition: Filter
    if kind is In:
        condition = In(path, tuple(draw(st.lists(value, min_size=1, max_size=4))))
    elif kind in (IsNull, IsNotNull):
        condition = kind(path)
    else:
        condition = kind(path, draw(value))
    return Not(condition) if draw(st.booleans()) else condition


def truth(condition: Filter, row: dict[str, Any]) -> bool | None:
    """What SQL says, word by word."""
    if isinstance(condition, Not):
        inner = truth(condition.child, row)
        return None if inner is None else not inner
    it: Any = condition
    value = row[it.attribute[0]]
    if isinstance(it, IsNull):
        return value is None
    if isinstance(it, IsNotNull):
        return value is not None
    if isinstance(it, EqualNullSafe):
        return bool(value == it.value)
    if value is None:
        return None
    verdicts: dict[type, Any] = {
        EqualTo: lambda: value == it.value,
        GreaterThan: lambda: value > it.value,
        GreaterThanOrEqual: lambda: value >= it.value,
        LessThan: lambda: value < it.value,
        LessThanOrEqual: lambda: value <= it.value,
        In: lambda: value in it.value,
        StringStartsWith: lambda: value.startswith(it.value),
        StringEndsWith: lambda: value.endswith(it.value),
        StringContains: lambda: it.value in value,
    }
    return bool(verdicts[type(it)]())


ROWS = st.lists(st.tuples(WORDS | st.none(), WORDS), max_size=10)


@given(st.lists(conditions(), max_size=3), ROWS)
def test_what_is_left_are_the_rows_that_sql_would_leave(conditions: list[Filter], words: list[Any]) -> None:
    assert all(is_taken(condition) for condition in conditions)
    rows = [
        {"offset": n, "timestamp": EPOCH + timedelta(microseconds=n), "queue": queue, "reason": reason}
        for n, (reason, queue) in enumerate(words)
    ]
    where = Where(tuple(conditions))
    queues = set(where.queues(sorted({row["queue"] for row in rows})))
    first, end = where.times()
    wanted = []
    for row in rows:
        at = row["offset"]
        if row["queue"] not in queues or not any(a <= at < b for a, b in where.spans("offset", 0, 10)):
            continue
        if at < (first or 0) or (end is not None and at >= end):
            continue
        wanted.append(row)
    left = where.rows(pa.RecordBatch.from_pylist(wanted, SCHEMA), SCHEMA.names).to_pylist()
    assert left == [row for row in rows if all(truth(condition, row) for condition in conditions)]


OFFSET, TIME = ("offset",), ("timestamp",)


@pytest.mark.parametrize(
    ("conditions", "spans"),
    [
        ([], [(5, 100_000)]),
        ([GreaterThanOrEqual(OFFSET, 99_900)], [(99_900, 100_000)]),
        ([GreaterThan(OFFSET, 99_899), IsNotNull(OFFSET)], [(99_900, 100_000)]),
        ([LessThan(OFFSET, 6)], [(5, 6)]),
        ([LessThanOrEqual(OFFSET, 4)], []),
        ([EqualTo(OFFSET, 7)], [(7, 8)]),
        ([GreaterThan(OFFSET, (1 << 63) - 1)], []),
        ([LessThan(OFFSET, -(1 << 63))], []),
        ([In(OFFSET, (99_999, 7, 100_000, 8, 3))], [(7, 9), (99_999, 100_000)]),
        # What lies near is read in one go, and sorted out afterwards.
        (
            [In(OFFSET, (7, 8 + GAP_MAX, 9 + 3 * GAP_MAX))],
            [(7, 9 + GAP_MAX), (9 + 3 * GAP_MAX, 10 + 3 * GAP_MAX)],
        ),
        ([Not(EqualTo(OFFSET, 5))], [(6, 100_000)]),
        ([Not(EqualTo(OFFSET, 50))], [(5, 100_000)]),
        ([IsNull(OFFSET)], []),
        ([GreaterThan(TIME, EPOCH)], [(5, 100_000)]),
    ],
)
def test_ranges(conditions: list[Filter], spans: list[tuple[int, int]]) -> None:
    assert Where(tuple(conditions)).spans("offset", 5, 100_000) == spans


STATE = ("state",)


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ([], None),
        ([EqualTo(STATE, "dead")], "dead"),
        ([EqualTo(OFFSET, 1), IsNotNull(STATE), EqualNullSafe(STATE, "held")], "held"),
        ([In(STATE, ("ready",))], "ready"),
        ([In(STATE, ("ready", "dead"))], None),
        ([Not(EqualTo(STATE, "dead"))], None),
        ([EqualTo(STATE, "delayed")], "delayed"),
        ([EqualTo(STATE, "gone")], None),
        ([StringStartsWith(STATE, "dead")], None),
    ],
)
def test_one_state_is_asked_for_alone(conditions: list[Filter], state: str | None) -> None:
    assert Where(tuple(conditions)).state() == state


@pytest.mark.parametrize(
    "condition",
    [
        EqualTo(("value",), b"x"),
        EqualTo(("protocol",), "rq"),
        EqualTo(("offset", "inner"), 1),
        EqualTo(OFFSET, None),
        EqualTo(OFFSET, 1.5),
        EqualTo(OFFSET, True),
        EqualTo(TIME, datetime(2030, 1, 1)),
        In(OFFSET, (1, None)),
        Not(In(("reason",), ("x", None))),
        StringContains(OFFSET, 1),  # type: ignore[arg-type]
    ],
)
def test_what_is_not_taken_over_stays_with_spark(condition: Filter) -> None:
    assert not is_taken(condition)


@pytest.mark.long
def test_what_lives_is_found_by_its_time_however_old_it_is(start_broker: StartBroker) -> None:
    broker = start_broker("--log-segment-bytes", "65536", config=KEEP_NOTHING)
    send(broker, "old", values(1))
    with connect(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq, Api(broker.ports["http"]) as api:
        next(mq.consume("old", prefetch=1))
        for first in range(1, 2001, 200):
            send(broker, "old", [value + b"x" * 300 for value in values(200, first)])
        api.post("/v1/queues/old/purge")
        until(lambda: offset_start(api, "old") > 0, "retention takes something", PATIENCE_SECONDS)
        for options in ({}, {"startingTimestamp": "2001-01-01"}):
            said = {"url": url_of(broker), "subscribe": "old", "view": "state", **options}
            reading = FilteringReader(read_options(said, BATCH), schema_of("state"))
            assert reading.pushFilters([GreaterThan(TIME, EPOCH), EqualTo(("state",), "held")]) == []
            rows = [it.to_pylist() for piece in reading.partitions() for it in reading.read(piece)]
            assert [[row["offset"] for row in some] for some in rows] == [[0]]


# --- with Spark ------------------------------------------------------------------------------------


@pytest.fixture
def pushing(spark: SparkSession) -> Iterator[None]:
    spark.conf.set(SETTING, "true")
    yield
    spark.conf.unset(SETTING)


class Listened:
    """Queues that are read through somebody who knows what was asked."""

    def __init__(self, queues: Queues, cutter: Cutter) -> None:
        self.cutter = cutter
        self._queues = queues
        self._told = 0

    def frame(self, subscribe: str, **options: Any) -> DataFrame:
        options |= {"url": f"http://127.0.0.1:{self.cutter.port}", "pushFilters": "true", "engine": "http"}
        return self._queues.batch(subscribe, **options)

    def ranges(self) -> list[tuple[str, int, int]]:
        """What was asked for since the last time."""
        asked = self.cutter.asked("/log")
        new, self._told = asked[self._told :], len(asked)
        return sorted((it["view"], int(it["start"]), int(it["end"])) for it in new)


@pytest.fixture
def listened(queues: Queues, broker: BrokerProcess, pushing: None) -> Iterator[Listened]:
    with Cutter(broker.ports["http"], []) as cutter:
        yield Listened(queues, cutter)


def offsets(frame: DataFrame) -> list[int]:
    return sorted(row.offset for row in frame.select("offset").collect())


def test_offsets_are_pushed(listened: Listened, queues: Queues) -> None:
    queues.send("filters.offset", values(10_000))
    for condition, wanted, asked in (
        ("offset >= 9900", range(9900, 10_000), [(9900, 10_000)]),
        ("offset > 9899 and offset <= 9950", range(9900, 9951), [(9900, 9951)]),
        ("offset between 10 and 12 and offset <> 11", (10, 12), [(10, 13)]),
        ("offset = 0", (0,), [(0, 1)]),
        ("offset in (3, 9999)", (3, 9999), [(3, 4), (9999, 10_000)]),
        ("offset = 3 or offset = 9999", (3, 9999), [(0, 10_000)]),
        ("offset < 2 or offset > 9998", (0, 1, 9999), [(0, 10_000)]),
        ("offset >= 10000", (), []),
        ("offset < 0", (), []),
        ("offset >= 9998 and cast(value as string) like '%9999%'", (9999,), [(9998, 10_000)]),
        ("offset >= 9998 and protocol <> 'http'", (), [(9998, 10_000)]),
        ("offset >= 9998 and offset % 2 = 0", (9998,), [(9998, 10_000)]),
    ):
        # Each from a frame of its own: Spark may read another one of the same frame with what this one asks.
        frame = listened.frame("filters.offset").where(condition)
        assert offsets(frame) == list(wanted), condition
        assert listened.ranges() == [("messages", *span) for span in asked], condition
    first, last = listened.frame("filters.offset"), listened.frame("filters.offset")
    assert first.where("offset < 5").union(last.where("offset >= 9990")).count() == 15
    assert listened.ranges() == [("messages", 0, 5), ("messages", 9990, 10_000)]


def test_options_and_filters_go_together(listened: Listened, queues: Queues) -> None:
    queues.send("filters.both", values(100))
    said = {"startingOffsets": '{"filters.both": 10}', "endingOffsets": '{"filters.both": 20}'}
    frame = listened.frame("filters.both", **said)
    assert offsets(frame.where("offset > 17")) == [18, 19]
    assert listened.ranges() == [("messages", 18, 20)]
    assert offsets(frame.where("offset > 30")) == []
    assert listened.ranges() == []
    narrow = queues.batch("filters.both", "value binary, queue string", pushFilters="true")
    assert narrow.where("queue = 'filters.both'").count() == 100
    assert narrow.where("queue <> 'filters.both'").count() == 0


def test_queues_and_times_are_pushed(listened: Listened, queues: Queues, broker: BrokerProcess) -> None:
    for number in range(3):
        send(broker, "filters.a", values(10, 10 * number))
    queues.send("filters.b", values(10))
    everything = queues.batch("filters.a").orderBy("offset").collect()
    times = [row.timestamp for row in everything]
    frame = listened.frame("filters.a,filters.b")
    assert offsets(frame.where("queue = 'filters.b' and offset >= 8")) == [8, 9]
    assert listened.ranges() == [("messages", 8, 10)]
    assert frame.where("queue like 'filters.%' and queue not in ('filters.b')").count() == 30
    assert listened.ranges() == [("messages", 0, 30)]
    assert offsets(frame.where("queue >= 'filters.b' and queue = 'filters.a'")) == []
    assert listened.ranges() == []
    one = frame.where("queue = 'filters.a'")
    middle, last = times[10], times[29]
    for condition, wanted in (
        (one.timestamp >= middle, [n for n in range(30) if times[n] >= middle]),
        (one.timestamp > middle, [n for n in range(30) if times[n] > middle]),
        (one.timestamp < middle, [n for n in range(30) if times[n] < middle]),
        (one.timestamp <= middle, [n for n in range(30) if times[n] <= middle]),
        (one.timestamp == middle, [n for n in range(30) if times[n] == middle]),
        (one.timestamp > last, []),
        (one.timestamp != middle, [n for n in range(30) if times[n] != middle]),
    ):
        assert offsets(one.where(condition)) == wanted, str(condition)
    listened.ranges()
    assert offsets(one.where(one.timestamp >= last)) == [n for n in range(30) if times[n] == last]
    assert listened.ranges() == [("messages", times.index(last), 30)]


@pytest.mark.long
def test_the_columns_of_the_other_views_are_pushed(
    listened: Listened, queues: Queues, broker: BrokerProcess
) -> None:
    queues.send("filters.views", values(20))
    with connect(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
        consuming = mq.consume("filters.views", prefetch=1)
        next(consuming).ack()
        next(consuming).reject()
        consuming.close()
    state = listened.frame("filters.views", view="state")
    until(lambda: offsets(state.where("state = 'dead'")) == [1], "a dead letter")
    until(lambda: len(offsets(state.where("state = 'ready'"))) == 18, "the consumer has gone")
    listened.ranges()
    assert {it.get("state") for it in listened.cutter.asked("/log")} == {"dead", "ready"}
    assert offsets(state.where("state in ('dead', 'held')")) == [1]
    assert offsets(state.where("state <> 'ready' and reason = 'rejected'")) == [1]
    assert offsets(state.where("reason is not null")) == [1]
    assert offsets(state.where("reason <> 'rejected'")) == []
    assert len(offsets(state.where("reason is null"))) == 18
    assert offsets(state.where("state = 'ready' and offset > 17")) == [18, 19]
    assert listened.ranges()[-1] == ("state", 18, 20)
    events = listened.frame("filters.views", view="events")
    everything = events.collect()
    listened.ranges()
    assert offsets(events.where("event = 'acked'")) == [0]
    assert offsets(events.where("event = 'dead' and reason = 'rejected'")) == [1]
    listened.ranges()
    # An event's number counts; the offset of its message is a column like others.
    assert len(offsets(events.where("offset = 1"))) == sum(row.offset == 1 for row in everything)
    assert events.where("event_offset >= 20").count() == len(everything) - 20
    assert listened.ranges() == [("events", 0, len(everything)), ("events", 20, len(everything))]


def test_the_error_names_spark_s_own_setting(queues: Queues) -> None:
    queues.send("filters.off", values(10))
    queues.spark.conf.unset(SETTING)  # as Spark has it: off
    with pytest.raises(PySparkException, match=f"configuration '{SETTING}' is false. Set it to true"):
        queues.batch("filters.off", pushFilters="true").where("offset > 5").collect()
    assert offsets(queues.batch("filters.off", pushFilters="false").where("offset > 7")) == [8, 9]
