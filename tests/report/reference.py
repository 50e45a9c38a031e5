"""The tables of a report once more, by loops over all events in plain Python, to compare Spark's with.

Written from the words of docs/reports.md. It looks at the log with LogReader, one event after the other, and
shares nothing with the code under test but the names of columns.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from penstock.log.reader import LogReader

Table = list[dict[str, Any]]

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EVENTS = [
    "accepted",
    "acked",
    "returned",
    "requeued",
    "rejected",
    "expired",
    "dead",
    "redriven",
    "withdrawn",
    "delayed",
]
GONE = {"acked", "rejected", "expired", "withdrawn"}
OUTCOMES = ["acked", "requeued", "lost", "died", "given_back", "expired", "withdrawn"]


class Seen(NamedTuple):
    """One event of one message."""

    queue: str
    number: int
    event: str
    offset: int
    reason: str | None
    consumer: str | None
    attempt: int
    dispatched_us: int | None
    time_us: int


def read(folder: Path, ends: Mapping[str, int]) -> list[Seen]:
    """Every event of these queues up to those numbers, in order."""
    found: list[Seen] = []
    with LogReader(str(folder)) as reader:
        for queue, end in sorted(ends.items()):
            for run in reader.events(queue, 0, end):
                for at in range(run.end - run.first):
                    found.append(
                        Seen(
                            queue,
                            run.event_offset + at,
                            run.event.name.lower(),
                            run.first + at,
                            run.reason.label or None,
                            run.consumer or None,
                            run.attempt,
                            run.dispatched_us or None,
                            run.time_us,
                        )
                    )
    return found


def time_of(us: int) -> datetime:
    return EPOCH + timedelta(microseconds=us)


def nearest(values: Iterable[int], part: float) -> float:
    """The smallest value that is not below that part of all, in seconds."""
    ranked = sorted(values)
    return ranked[math.ceil(part * len(ranked)) - 1] / 1_000_000


def times(values: list[int]) -> dict[str, float]:
    return {
        "p50_seconds": nearest(values, 0.5),
        "p90_seconds": nearest(values, 0.9),
        "p99_seconds": nearest(values, 0.99),
        "max_seconds": max(values) / 1_000_000,
    }


def outcome(seen: Seen) -> str:
    if seen.event in ("dead", "rejected"):
        return "died"
    if seen.event in ("returned", "requeued", "delayed"):
        if seen.reason in ("consumer-lost", "lease-ended"):
            return "lost"
        return "given_back" if seen.reason == "consumer-cancelled" else "requeued"
    return seen.event


def place(consumer: str) -> tuple[str, str]:
    """Protocol and host."""
    protocol, _, rest = consumer.partition(":")
    peer = rest.partition("#")[0]
    if peer == "unix":
        return protocol, peer
    return protocol, peer.rpartition(":")[0].strip("[]")


class Reference:
    """`kept` are the numbers from which on the events of a queue are taken to be there."""

    def __init__(
        self, everything: list[Seen], kept: Mapping[str, int], start_us: int | None, end_us: int | None
    ) -> None:
        self.kept_events = [seen for seen in everything if seen.number >= kept.get(seen.queue, 0)]
        self.events = [
            seen
            for seen in self.kept_events
            if (start_us is None or seen.time_us >= start_us) and (end_us is None or seen.time_us < end_us)
        ]
        self.all_events = everything
        self.queues = sorted({seen.queue for seen in everything})
        self.start_us, self.end_us = start_us, end_us
        self.bucket_us = 0

    def bucket(self, us: int) -> datetime:
        return time_of(us - us % self.bucket_us)

    def outstanding(self, queue: str, before_us: int | None) -> int:
        """How many messages lived just before a moment: all events count, kept or not."""
        living = 0
        for seen in self.all_events:
            if seen.queue == queue and (before_us is None or seen.time_us < before_us):
                living += (seen.event == "accepted") - (seen.event in GONE)
        return living

    # --- tables ------------------------------------------------------------------------------------

    def throughput(self) -> Table:
        counts: dict[tuple[str, datetime], Counter[str]] = defaultdict(Counter)
        for seen in self.events:
            counts[seen.queue, self.bucket(seen.time_us)][seen.event] += 1
        return [
            {
                "queue": queue,
                "bucket": bucket,
                **{event: counts[queue, bucket][event] for event in EVENTS},
                "outstanding": self.outstanding(queue, self._end_of(bucket)),
            }
            for queue, bucket in sorted(counts)
        ]

    def _end_of(self, bucket: datetime) -> int:
        end_us = (bucket - EPOCH) // timedelta(microseconds=1) + self.bucket_us
        return end_us if self.end_us is None else min(end_us, self.end_us)

    def totals(self) -> Table:
        rows = []
        for queue in self.queues:
            counts = Counter(seen.event for seen in self.events if seen.queue == queue)
            end = self.outstanding(queue, self.end_us)
            net = counts["accepted"] - sum(counts[event] for event in GONE)
            rows.append(
                {
                    "queue": queue,
                    **{event: counts[event] for event in EVENTS},
                    "outstanding_start": end - net,
                    "outstanding_end": end,
                }
            )
        return rows

    def waiting(self) -> Table:
        took: dict[tuple[str, datetime | None], list[int]] = defaultdict(list)
        for queue, accepted_us, dispatched_us in self._first_deliveries():
            if accepted_us is None:
                continue
            at = max(dispatched_us, self.start_us or 0)
            wait = max(dispatched_us - accepted_us, 0)
            took[queue, None].append(wait)
            took[queue, self.bucket(at)].append(wait)
        return [
            {"queue": queue, "bucket": bucket, "messages": len(values), **times(values)}
            for (queue, bucket), values in by_key(took)
        ]

    def unknown_waits(self) -> Counter[str]:
        return Counter(queue for queue, accepted_us, _ in self._first_deliveries() if accepted_us is None)

    def _first_deliveries(self) -> Iterable[tuple[str, int | None, int]]:
        histories: dict[tuple[str, int], list[Seen]] = defaultdict(list)
        for seen in self.kept_events:
            histories[seen.queue, seen.offset].append(seen)
        within = set(self.events)
        for (queue, _), history in histories.items():
            accepted_us = history[0].time_us if history[0].event == "accepted" else None
            later = history[1:] if accepted_us is not None else history
            if not later or later[0] not in within or later[0].dispatched_us is None:
                continue
            if accepted_us is None and later[0].attempt > 1:
                continue  # not the first
            yield queue, accepted_us, later[0].dispatched_us

    def deliveries(self) -> list[tuple[Seen, int]]:
        """Those that ended, and how long each took."""
        return [
            (seen, max(seen.time_us - seen.dispatched_us, 0))
            for seen in self.events
            if seen.dispatched_us is not None
        ]

    def working(self) -> Table:
        took: dict[tuple[str, datetime | None, str | None], list[int]] = defaultdict(list)
        for seen, us in self.deliveries():
            took[seen.queue, None, None].append(us)
            took[seen.queue, None, outcome(seen)].append(us)
            took[seen.queue, self.bucket(seen.time_us), None].append(us)
        return [
            {"queue": queue, "bucket": bucket, "outcome": how, "deliveries": len(values), **times(values)}
            for (queue, bucket, how), values in by_key(took)
        ]

    def attempts(self) -> Table:
        counts: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
        for seen, _ in self.deliveries():
            if seen.event in ("acked", "dead", "rejected"):
                how = "acked" if seen.event == "acked" else "died"
                counts[seen.queue, min(seen.attempt, 10)][how] += 1
        return [
            {"queue": queue, "attempt": attempt, "acked": found["acked"], "died": found["died"]}
            for (queue, attempt), found in by_key(counts)
        ]

    def endings(self) -> Table:
        counts = Counter(
            (seen.queue, seen.event, seen.reason, seen.dispatched_us is not None)
            for seen in self.events
            if seen.event != "accepted"
        )
        return [
            {"queue": queue, "event": event, "reason": reason, "held": held, "events": number}
            for (queue, event, reason, held), number in by_key(counts)
        ]

    def deaths(self) -> Table:
        counts = Counter(
            (seen.queue, self.bucket(seen.time_us), seen.event, seen.reason)
            for seen in self.events
            if seen.event in ("dead", "rejected", "expired", "withdrawn")
        )
        return [
            {"queue": queue, "bucket": bucket, "event": event, "reason": reason, "messages": number}
            for (queue, bucket, event, reason), number in by_key(counts)
        ]

    def consumers(self) -> Table:
        groups: dict[tuple[str, str, str, str | None], list[tuple[Seen, int]]] = defaultdict(list)
        for seen, us in self.deliveries():
            assert seen.consumer is not None
            groups[seen.queue, *place(seen.consumer), None].append((seen, us))
            groups[seen.queue, *place(seen.consumer), seen.consumer].append((seen, us))
        rows = []
        for (queue, protocol, host, consumer), found in by_key(groups):
            counts = Counter(outcome(seen) for seen, _ in found)
            rows.append(
                {
                    "queue": queue,
                    "protocol": protocol,
                    "host": host,
                    "consumer": consumer,
                    "connections": len({seen.consumer for seen, _ in found}),
                    "deliveries": len(found),
                    **{how: counts[how] for how in OUTCOMES},
                    **times([us for _, us in found]),
                    "time_first": time_of(min(seen.time_us for seen, _ in found)),
                    "time_last": time_of(max(seen.time_us for seen, _ in found)),
                }
            )
        return rows

    def coverage(self) -> Table:
        unknown = self.unknown_waits()
        rows = []
        for queue in self.queues:
            found = [seen for seen in self.events if seen.queue == queue]
            accepted = [seen.offset for seen in found if seen.event == "accepted"]
            rows.append(
                {
                    "queue": queue,
                    "events": len(found),
                    "missing_events": 0,
                    "event_first": min((seen.number for seen in found), default=None),
                    "event_end": max((seen.number + 1 for seen in found), default=None),
                    "time_first": time_of(min(seen.time_us for seen in found)) if found else None,
                    "time_last": time_of(max(seen.time_us for seen in found)) if found else None,
                    "offset_first": min(accepted, default=None),
                    "offset_end": max(accepted) + 1 if accepted else None,
                    "unknown_waits": unknown[queue],
                }
            )
        return rows


def by_key(found: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """In the order of the tables: what is null comes first."""
    return sorted(found.items(), key=lambda item: [(part is not None, part) for part in item[0]])
