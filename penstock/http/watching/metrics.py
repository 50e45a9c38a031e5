"""Metrics: what the broker counts and measures, in the text format that Prometheus reads.

Everything is taken at the moment of the scrape: the queues' counters from the mirror's rows, the rest
from the first process and from this one. Nothing is kept here, and no registry is shared with anybody.

Rules that always hold:
  * Counters begin at 0 when the broker starts, and count what happened, whichever door it came through.
  * The number of series is bounded: the first `queues_max` queues, in the order in which they were made, have
    labels of their own, all others are added up under `queue="(others)"`; readers likewise. Of what needs
    attention, as many queues as that have labels, the most urgent ones; and every state has a series for all.
  * A queue has all of its series from the first scrape on that shows it: what is counted for the first
    time later is seen as an increase.
"""

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from penstock.common.health import LEVELS, STATES
from penstock.control.frames import Fields
from penstock.http.watching.health import Finding
from penstock.http.watching.mirror import oldest_seconds
from penstock.http.watching.sayings import STATES as READER_STATES
from penstock.log.info import SYNC_BOUNDS_SECONDS
from penstock.model.life import DEAD_REASONS

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OTHERS: Final = "(others)"
READER_ROWS_MAX: Final = 1000
PROTOCOLS: Final = ("phpmq", "rq", "sspq")

_REASONS: Final = sorted(reason.label for reason in DEAD_REASONS)


@dataclass(frozen=True, slots=True)
class Scrape:
    """Everything that one answer shows, gathered on the loop and only read from then on."""

    rows: Sequence[Fields]  # of the mirror, in the order in which the queues were made
    now_us: int
    queues_max: int
    version: str
    engine: Fields
    connections: Sequence[Fields]
    readers: Sequence[Fields]
    requests: Mapping[tuple[str, str, str], int]  # by method, route and class of status ("2xx")
    event_streams: int
    mirror_round_seconds: float
    scrubbed: tuple[int, int]  # bytes, and passes over all that there was
    findings: Sequence[Finding]  # what needs attention, the most urgent first


# --- Queues --------------------------------------------------------------------------------

_COUNTED: Final[Mapping[str, tuple[str, str]]] = {
    "accepted": ("accepted", "Messages that were accepted."),
    "delivered": ("held", "Deliveries to consumers, repeated ones included."),
    "acked": ("acked", "Messages that a consumer acknowledged."),
    "returned": ("returned", "Deliveries that ended with the message back in its place."),
    "requeued": ("requeued", "Deliveries that ended with the message behind the tail."),
    "delayed": ("delayed", "Deliveries that ended with the message delayed."),
    "rejected": ("rejected", "Messages thrown away by a consumer or for its loss, without dead letters."),
    "expired": ("expired", "Messages thrown away by their TTL."),
    "redriven": ("redriven", "Dead letters that were put back into the queue."),
    "withdrawn": ("withdrawn", "Messages taken out by their sender or an operator."),
}
"""Counters: the name, the event of `life.py` that it counts, and what that is."""


@dataclass(frozen=True, slots=True)
class _Gauge:
    """What is read off a queue's row; the others' values are added up, or the largest is taken."""

    name: str
    help: str
    value: Callable[[Fields, int], float]
    together: Callable[[Iterable[float]], float] | None = sum


_GAUGES: Final = (
    _Gauge("ready_messages", "Messages that wait for a consumer.", lambda row, _: row["ready"]),
    _Gauge("delayed_messages", "Messages that nobody gets before their time.", lambda row, _: row["delayed"]),
    _Gauge("held_messages", "Messages that a consumer has and has not settled.", lambda row, _: row["held"]),
    _Gauge("dead_messages", "Dead letters, also those that somebody holds.", lambda row, _: row["dead"]),
    _Gauge("bytes", "Payload from the oldest unsettled message on.", lambda row, _: row["bytes"]),
    _Gauge(
        "oldest_message_seconds",
        "The age of the oldest unsettled message; 0 where there is none.",
        lambda row, now_us: oldest_seconds(row, now_us) or 0.0,
        max,
    ),
    _Gauge("consumers", "Consumers of the queue and of its dead letters.", lambda row, _: row["consumers"]),
    _Gauge("paused", "1 while nothing is handed out.", lambda row, _: row["paused"]),
    _Gauge("offset_start", "The log is complete from here on.", lambda row, _: row["offset_start"], None),
    _Gauge("offset_end", "The next offset to be given.", lambda row, _: row["offset_end"], None),
)


def _queue_families(scrape: Scrape) -> Iterator[Metric]:
    own, others = _divided(scrape)
    labelled = [(row["name"], row) for row in own]
    if others:
        labelled.append((OTHERS, {"counts": _added(row["counts"] for row in others)}))
    for name, (event, help_text) in _COUNTED.items():
        counter = CounterMetricFamily(f"penstock_messages_{name}", help_text, labels=["queue"])
        for queue, row in labelled:
            counter.add_metric([queue], _count(row["counts"], event))
        yield counter
    dead = CounterMetricFamily(
        "penstock_messages_dead", "Messages that became dead letters.", labels=["queue", "reason"]
    )
    for queue, row in labelled:
        for reason in _REASONS:
            dead.add_metric([queue, reason], row["counts"].get(f"dead:{reason}", 0))
    yield dead
    for it in _GAUGES:
        gauge = GaugeMetricFamily(f"penstock_queue_{it.name}", it.help, labels=["queue"])
        for row in own:
            gauge.add_metric([row["name"]], it.value(row, scrape.now_us))
        if others and it.together is not None:
            gauge.add_metric([OTHERS], it.together(it.value(row, scrape.now_us) for row in others))
        yield gauge
    yield GaugeMetricFamily("penstock_queues", "Queues that there are.", len(scrape.rows))


def _divided(scrape: Scrape) -> tuple[list[Fields], list[Fields]]:
    """The rows with labels of their own, and the others; a queue that has their name is one of them."""
    own: list[Fields] = []
    others: list[Fields] = []
    for row in scrape.rows:
        (own if len(own) < scrape.queues_max and row["name"] != OTHERS else others).append(row)
    return own, others


def _added(all_counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for counts in all_counts:
        for key, count in counts.items():
            total[key] = total.get(key, 0) + count
    return total


def _count(counts: Mapping[str, int], event: str) -> int:
    """How often an event has happened, for whatever reason."""
    return sum(count for key, count in counts.items() if key.partition(":")[0] == event)


def _health_families(scrape: Scrape) -> Iterator[Metric]:
    """1: a warning, 2: bad."""
    worst = dict.fromkeys(STATES, 0)
    queues = GaugeMetricFamily(
        "penstock_queue_health", "1 or 2 while a queue is in a state: 2 is bad.", labels=["queue", "state"]
    )
    room = scrape.queues_max
    for it in scrape.findings:
        level = len(LEVELS) - LEVELS.index(it.level)
        worst[it.state] = max(worst[it.state], level)
        if it.scope == "queue" and it.subject != OTHERS and room > 0:
            room -= 1
            queues.add_metric([it.subject, it.state], level)
    yield queues
    health = GaugeMetricFamily(
        "penstock_health",
        "1 or 2 while the broker, a queue or a reader is in a state: 2 is bad.",
        labels=["state"],
    )
    for state, level in worst.items():
        health.add_metric([state], level)
    yield health


# --- The broker ----------------------------------------------------------------------------


def _engine_families(scrape: Scrape) -> Iterator[Metric]:
    engine = scrape.engine
    yield InfoMetricFamily(
        "penstock_build",
        "What runs.",
        {"version": scrape.version, "engine": engine["engine"], "python": platform.python_version()},
    )
    yield _sync_family(engine["sync"])
    for name, help_text, value in (
        ("disk_free_bytes", "Room that is left on the disk of the log.", engine["disk_bytes_free"]),
        ("disk_total_bytes", "The size of the disk of the log.", engine["disk_bytes_total"]),
        (
            "disk_low",
            "1 while less is free on the disk than disk-bytes-reserve.",
            engine["disk_bytes_free"] < engine["disk_bytes_reserve"],
        ),
        ("log_bytes", "The size of the log's files.", engine["log_bytes"]),
        ("log_segments", "Files of the log.", engine["segments"]),
        (
            "in_flight_bytes",
            "Bytes accepted and not yet in the files.",
            engine["bytes_in_flight"],
        ),
        (
            "memory_held_bytes",
            "Bytes that clients make the broker hold: connections, and bodies over HTTP.",
            engine["memory"]["held_bytes"],
        ),
        (
            "memory_limit_bytes",
            "The most that clients can make the broker hold.",
            engine["memory"]["limit_bytes"],
        ),
        ("full", "1 while messages are refused for lack of room on the disk.", engine["full"]),
        ("failed", "1 when the log has failed for good.", bool(engine["failed"])),
        ("damage_reports", "Damaged places of the log that were found.", len(engine["damage"])),
        ("uptime_seconds", "How long the broker has been running.", engine["uptime_seconds"]),
        ("readers", "Named readers that hold retention.", engine["readers"]),
        ("stages", "Parts of transactions that wait for their commit.", engine["stages"]["count"]),
        ("stages_bytes", "What these take of stages-bytes-max.", engine["stages"]["bytes"]),
        (
            "stages_oldest_seconds",
            "Since the last part of the one that waits longest; 0: there is none.",
            engine["stages"]["oldest_seconds"] or 0,
        ),
    ):
        yield GaugeMetricFamily(f"penstock_{name}", help_text, value)
    for name, help_text, value in (
        ("log_written_bytes", "Bytes that were ever written to this log.", engine["position"]),
        ("scrubbed_bytes", "Bytes of the log that were read again, to find rot.", scrape.scrubbed[0]),
        ("scrubbed_passes", "How often all sealed segments were read so.", scrape.scrubbed[1]),
        ("log_openings", "How often this log was opened: starts of a broker.", engine["opening"]),
        (
            "memory_closed_connections",
            "Connections that were closed because they made the broker hold too much.",
            engine["memory"]["closed"],
        ),
        (
            "broadcasts_lost",
            "Broadcasts that did not reach a consumer because it does not read.",
            engine["memory"]["broadcasts_lost"],
        ),
    ):
        yield CounterMetricFamily(f"penstock_{name}", help_text, value)


def _sync_family(sync: Fields) -> Metric:
    at_most = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*SYNC_BOUNDS_SECONDS, float("inf")), sync["buckets"], strict=True):
        at_most += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), at_most))
    return HistogramMetricFamily(
        "penstock_sync_seconds", "How long the syncs of the log took.", buckets, sync["seconds_sum"]
    )


def _connection_families(scrape: Scrape) -> Iterator[Metric]:
    for name, help_text, counts in (
        ("connections", "Connections of clients.", lambda it: True),
        (
            "connections_blocked",
            "Clients that do not read what they get.",
            lambda it: it["blocked"],
        ),
        ("connections_held_back", "Senders that wait for room.", lambda it: it["held_back"]),
    ):
        gauge = GaugeMetricFamily(f"penstock_{name}", help_text, labels=["protocol"])
        for protocol in PROTOCOLS:
            gauge.add_metric(
                [protocol],
                sum(1 for it in scrape.connections if it["protocol"] == protocol and counts(it)),
            )
        yield gauge


def _reader_families(scrape: Scrape) -> Iterator[Metric]:
    lag = GaugeMetricFamily(
        "penstock_reader_lag",
        "Messages (or events) that a reader has not read yet.",
        labels=["reader", "queue", "view"],
    )
    lag_bytes = GaugeMetricFamily(
        "penstock_reader_lag_bytes",
        "Payload of the messages that a reader has not read yet.",
        labels=["reader", "queue"],
    )
    lag_seconds = GaugeMetricFamily(
        "penstock_reader_lag_seconds",
        "Age of the oldest message (or event) that a reader has not read yet.",
        labels=["reader", "queue"],
    )
    failing = GaugeMetricFamily(
        "penstock_reader_failing", "Whether a reader says that it does not get on.", labels=["reader"]
    )
    lease = GaugeMetricFamily(
        "penstock_reader_lease_seconds", "How long a reader still holds retention.", labels=["reader"]
    )
    state = GaugeMetricFamily(
        "penstock_reader_state",
        "1 for the state that a reader says it is in, 0 for the others.",
        labels=["reader", "state"],
    )
    rows = CounterMetricFamily("penstock_reader_rows", "Rows that a pipeline has read.", labels=["reader"])
    bad = CounterMetricFamily(
        "penstock_reader_bad_records", "Records that did not fit a pipeline's schema.", labels=["reader"]
    )
    written = CounterMetricFamily(
        "penstock_reader_sink_rows", "Rows that a pipeline has written to a sink.", labels=["reader", "sink"]
    )
    checked = CounterMetricFamily(
        "penstock_reader_expectation_rows",
        "Rows of a pipeline that an expectation was held against.",
        labels=["reader", "expectation"],
    )
    violated = CounterMetricFamily(
        "penstock_reader_expectation_violations",
        "Rows of a pipeline that were not as it expects them.",
        labels=["reader", "expectation"],
    )
    room = READER_ROWS_MAX
    hidden: dict[str, int] = {}  # by view: the largest lag of those that have no labels of their own
    hidden_bytes, hidden_seconds = 0, 0.0
    for reader in sorted(scrape.readers, key=lambda it: it["name"]):
        own = len(reader["queues"]) <= room and reader["name"] != OTHERS
        room -= len(reader["queues"]) if own else 0
        if own:
            lease.add_metric([reader["name"]], reader["lease_seconds_left"])
            about = reader["about"] or {}
            failing.add_metric([reader["name"]], "error" in about)
            if "state" in about:
                now = "silent" if about["silent"] else about["state"]
                for one in (*READER_STATES, "silent"):
                    state.add_metric([reader["name"], one], one == now)
            for family, member in ((rows, "rows_total"), (bad, "bad_records")):
                if member in about:
                    family.add_metric([reader["name"]], about[member])
            for family, member in (
                (written, "sinks"),
                (checked, "expectations_checked"),
                (violated, "expectations"),
            ):
                for part, count in about.get(member, {}).items():
                    family.add_metric([reader["name"], part], count)
        for it in reader["queues"]:
            if own:
                lag.add_metric([reader["name"], it["queue"], reader["view"]], it["lag"])
                if it["lag_bytes"] is not None:
                    lag_bytes.add_metric([reader["name"], it["queue"]], it["lag_bytes"])
                if it["lag_seconds"] is not None:
                    lag_seconds.add_metric([reader["name"], it["queue"]], it["lag_seconds"])
            else:
                hidden[reader["view"]] = max(it["lag"], hidden.get(reader["view"], 0))
                hidden_bytes = max(it["lag_bytes"] or 0, hidden_bytes)
                hidden_seconds = max(it["lag_seconds"] or 0, hidden_seconds)
    for view, largest in hidden.items():
        lag.add_metric([OTHERS, OTHERS, view], largest)
    if "messages" in hidden:
        lag_bytes.add_metric([OTHERS, OTHERS], hidden_bytes)
    if hidden:
        lag_seconds.add_metric([OTHERS, OTHERS], hidden_seconds)
    yield lag
    yield lag_bytes
    yield lag_seconds
    yield failing
    yield lease
    yield state
    yield rows
    yield bad
    yield written
    yield checked
    yield violated


# --- This process --------------------------------------------------------------------------


def _http_families(scrape: Scrape) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "penstock_http_requests", "Requests that were answered.", labels=["method", "route", "status"]
    )
    for kind, count in scrape.requests.items():
        requests.add_metric(list(kind), count)
    yield requests
    yield GaugeMetricFamily(
        "penstock_http_event_streams", "Callers that listen to /v1/events.", scrape.event_streams
    )
    yield GaugeMetricFamily(
        "penstock_http_mirror_round_seconds",
        "How long the last look at all changed queues took.",
        scrape.mirror_round_seconds,
    )


_PROCESSES: Final = (
    ProcessCollector("penstock_broker", os.getppid, registry=None),
    ProcessCollector("penstock_http", os.getpid, registry=None),
)
"""Memory, time and files of the first process, which started this one, and of this one."""


class ScrapeCollector(Collector):
    """A scrape as families of samples."""

    def __init__(self, scrape: Scrape) -> None:
        self._scrape = scrape

    def collect(self) -> Iterator[Metric]:
        for families in (
            _engine_families,
            _queue_families,
            _connection_families,
            _reader_families,
            _health_families,
            _http_families,
        ):
            yield from families(self._scrape)
        for process in _PROCESSES:
            yield from process.collect()


def render(scrape: Scrape) -> bytes:
    """The text. It takes a while where there are many queues: not for the loop."""
    return generate_latest(ScrapeCollector(scrape))
