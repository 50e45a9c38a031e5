"""Periods, buckets, texts and findings: what needs no Spark."""

from datetime import UTC, datetime

import pytest

from penstock.common.health import BY_STATE
from penstock.report.figures import Figures, QueueFigures
from penstock.report.findings import findings_of
from penstock.report.markup import escape
from penstock.report.period import BUCKETS_MAX, SECOND_US, NoMoment, Span, datetime_of, moment_us, span_of
from penstock.report.tables import EVENTS, OUTCOMES

NOW_US = 1_900_000_000 * SECOND_US


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("1h", 3600), ("7d", 604_800), (" 2w ", 1_209_600)]
)
def test_how_long_ago(text: str, seconds: int) -> None:
    assert moment_us(text, NOW_US) == NOW_US - seconds * SECOND_US


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2030-01-31T12:00:00Z", datetime(2030, 1, 31, 12, tzinfo=UTC)),
        ("2030-01-31T12:00:00.000001+02:00", datetime(2030, 1, 31, 10, 0, 0, 1, tzinfo=UTC)),
        ("2030-01-31 12:00", datetime(2030, 1, 31, 12, tzinfo=UTC)),
        ("2030-01-31", datetime(2030, 1, 31, tzinfo=UTC)),
        ("1950-01-01", datetime(1970, 1, 1, tzinfo=UTC)),
        ("9999-12-31T23:59:59-14:00", datetime.max.replace(tzinfo=UTC)),
    ],
)
def test_a_time(text: str, moment: datetime) -> None:
    assert datetime_of(moment_us(text, NOW_US)) == moment


@pytest.mark.parametrize("text", ["", "yesterday", "1 h", "h", "-1h", "1.5h", "٣h"])
def test_no_time(text: str) -> None:
    with pytest.raises(NoMoment, match=r"is no time; use 2030-01-31T12:00:00Z .* 90s, 15m, 1h"):
        moment_us(text, NOW_US)


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [
        (0, 1),
        (100, 1),
        (3600, 30),
        (3601, 60),
        (7200, 60),
        (10_800, 120),
        (86_400, 900),
        (30 * 86_400, 21_600),
    ],
)
def test_buckets_are_as_short_as_there_is_room_for(seconds: int, bucket: int) -> None:
    start_us = NOW_US - NOW_US % (86_400 * SECOND_US)
    assert span_of(start_us, start_us + seconds * SECOND_US).bucket_us == bucket * SECOND_US


@pytest.mark.parametrize("seconds", [1, 119, 121, 86_400 * 13, 86_400 * 400, 86_400 * 9000])
def test_buckets_cover_the_span(seconds: int) -> None:
    span = span_of(NOW_US + 17, NOW_US + 17 + seconds * SECOND_US)
    buckets = span.buckets()
    assert len(buckets) <= BUCKETS_MAX
    assert buckets[0] <= span.start_us
    assert buckets[-1] < span.end_us <= buckets[-1] + span.bucket_us
    assert all(bucket % span.bucket_us == 0 for bucket in buckets)
    assert sum(map(span.seconds_of, buckets)) == pytest.approx(span.seconds)


# --- findings --------------------------------------------------------------------------------------


def queue_of(name: str, **totals: int) -> QueueFigures:
    rows = {**dict.fromkeys(EVENTS, 0), "outstanding_start": 0, "outstanding_end": 0, **totals}
    return QueueFigures(name, rows, {"events": 1, "missing_events": 0, "cut": False, "event_kept": 0})


def host_of(queue: str, host: str, deliveries: int, p50: float = 0.1, **outcomes: int) -> dict[str, object]:
    return {
        "queue": queue,
        "protocol": "rq",
        "host": host,
        "deliveries": deliveries,
        "p50_seconds": p50,
        **dict.fromkeys(OUTCOMES, 0),
        **outcomes,
    }


def found(*queues: QueueFigures) -> list[str]:
    figures = Figures(Span(0, SECOND_US, SECOND_US), list(queues), [])
    return [f"{finding.queue}: {finding.text}" for finding in findings_of(figures)]


def test_nothing_stands_out() -> None:
    calm = queue_of("calm", accepted=1000, acked=990, outstanding_end=10)
    calm.working = {"deliveries": 1000, "p50_seconds": 0.1}
    calm.hosts = [host_of("calm", "a", 1000, lost=5), host_of("calm", "b", 10, lost=9)]
    assert found(calm) == []


def test_the_worst_of_each_kind_stand_out() -> None:
    queues = [queue_of(f"q{n}", accepted=0, dead=n) for n in range(5)]
    for queue in queues:
        queue.deaths = {("dead", "rejected"): [queue.totals["dead"], 0]}
    assert found(*queues) == [
        "q4: 4 messages died: 4 rejected.",
        "q3: 3 messages died: 3 rejected.",
        "q2: 2 messages died: 2 rejected.",
    ]


def test_what_a_broker_tells_while_it_happens_has_the_same_state_and_advice() -> None:
    queue = queue_of("q", accepted=100, dead=30, outstanding_end=100)
    queue.deaths = {("dead", "rejected"): [30, 0]}
    found = findings_of(Figures(Span(0, SECOND_US, SECOND_US), [queue], []))
    assert [it.state for it in found] == ["dying", "growing", "no-consumers"]
    assert [it.do for it in found] == [BY_STATE[it.state].do for it in found]


def test_slow_and_failing_consumers_stand_out() -> None:
    queue = queue_of("work", accepted=100, acked=100)
    queue.working = {"deliveries": 300, "p50_seconds": 0.1}
    queue.hosts = [
        host_of("work", "fast", 100),
        host_of("work", "slow", 100, 0.9),
        host_of("work", "broken", 100, lost=20, requeued=5),
    ]
    assert found(queue) == [
        "work: consumers on broken (rq) failed with 25 of 100 deliveries (25 %).",
        "work: consumers on slow (rq) take 9 times as long as the fastest: half of their deliveries 900 ms "
        "or longer.",
    ]


def test_queues_that_grow_or_wait_stand_out() -> None:
    queue = queue_of("pile", accepted=100, outstanding_start=5, outstanding_end=105)
    queue.waiting = {"p50_seconds": 1.0, "p99_seconds": 90.0}
    assert found(queue) == [
        "pile: 1 of 100 messages waited 1 min 30 s or longer before anybody took it, half of them 1 s.",
        "pile: grew by 100 messages, to 105; 100 came.",
        "pile: no delivery ended, though 100 messages came.",
    ]


def test_events_that_are_missing_stand_out() -> None:
    queue = queue_of("holes")
    queue.coverage = {**queue.coverage, "missing_events": 7}
    assert found(queue) == ["holes: 7 events could not be read."]


def test_what_is_not_seen_in_a_name_is_written_out() -> None:
    assert escape("a\u202eb\u200b<c>\ufeff") == "a\\u202eb\\u200b&lt;c&gt;\\ufeff"
    assert escape("größer 12\u202f% مرحبا\n") == "größer 12\u202f% مرحبا\n"
