"""Parts of the page that are about all queues: times, retries, ends, consumers, and what the data covers."""

from collections.abc import Sequence
from typing import Final

from penstock.common import units
from penstock.report import charts
from penstock.report.charts import Ranks
from penstock.report.figures import Figures, Row, failed_of
from penstock.report.markup import Head, Safe, bad, definitions, section, table, tag
from penstock.report.period import SECOND_US
from penstock.report.tables import ACCURACY, ATTEMPTS_MAX, BUCKET_ACCURACY, FAILED

QUEUES_MAX: Final = 12
"""So many queues have charts of their own; all of them are in the tables."""

ROWS_MAX: Final = 500
CONSUMERS_MAX: Final = 15
FEW_DELIVERIES: Final = 5
RANKS: Final = ("p50", "p90", "p99", "max")

TERMS: Final = (
    ("Accepted, acked", "Messages that came, and messages with which a consumer was done."),
    (
        "Waiting",
        "From the moment a message was accepted to the moment it was first handed to a consumer. Known when "
        "that delivery has ended; messages that never had a consumer are not in it, delays are.",
    ),
    (
        "Working",
        "From the moment a message was handed to a consumer to the end of that delivery, whatever the end. "
        "Messages that a consumer fetches ahead count from the moment they were sent to it.",
    ),
    (
        "Failed",
        "A delivery with which the work was not done: the consumer asked for it again (requeued), went away "
        "or let its lease end (lost), or the message died or expired in its hands. What a consumer gave back "
        "when it stopped in order is not a failure.",
    ),
    (
        "Outstanding",
        "Messages that are not settled: those that wait or are delayed, those that are held, and dead "
        "letters.",
    ),
    (
        "Percentiles",
        f"By rank. Up to {ACCURACY // 2:,} values (in a piece of time, {BUCKET_ACCURACY // 2:,}) they are "
        f"exact; of more, the rank may be wrong by 1 in {ACCURACY:,} (1 in {BUCKET_ACCURACY:,}), rounded up.",
    ),
    ("Times", "UTC, by the clock of the broker."),
)


def times(figures: Figures) -> str:
    parts = []
    for title, column, counted in (
        ("Waiting, from acceptance to the first delivery", "waiting", "messages"),
        ("Working, from delivery to its end", "working", "deliveries"),
    ):
        found = [(queue, getattr(queue, column)) for queue in figures.queues[:QUEUES_MAX]]
        ranks = [
            Ranks(queue.name, f"{row[counted]:,} {counted}", *(row[f"{name}_seconds"] for name in RANKS))
            for queue, row in found
            if row is not None
        ]
        if ranks:
            parts.append(charts.percentile_bars(title, ranks))
    drawn = (
        Safe(f'<div class="pair">{"".join(parts)}</div>') if parts else tag("p", "No delivery ended.", "note")
    )
    rows = []
    heads = [Head("Queue", number=False), Head("What", number=False), Head("Count")]
    heads += map(Head, ("Half", "90 %", "99 %", "Longest"))
    for queue in figures.queues[:ROWS_MAX]:
        if queue.waiting is not None:
            rows.append(
                [queue.name, "waiting", units.count(queue.waiting["messages"]), *_ranks(queue.waiting)]
            )
        for outcome, row in [("all", queue.working), *sorted(queue.working_by_outcome.items())]:
            if row is not None:
                said = f"working, {outcome.replace('_', ' ')}"
                rows.append([queue.name, said, units.count(row["deliveries"]), *_ranks(row)])
    whole = table(
        "How long it took, within which half, 90 % and 99 % of all lie, and the longest", heads, rows
    )
    more = (
        Safe(f"<details><summary>The numbers behind these charts</summary>{whole}</details>") if rows else ""
    )
    return section("times", "Waiting and working", drawn, more)


def _ranks(row: Row) -> list[str]:
    return [units.duration(row[f"{name}_seconds"]) for name in RANKS]


def retries(figures: Figures) -> str:
    heads = [Head("Queue", number=False)]
    heads += map(
        Head,
        (
            *("Deliveries", "Failed", "Share", "Requeued", "Lost", "Died", "Expired"),
            *("Given back", "Acked at once", "Acked later", "Most attempts"),
        ),
    )
    rows = []
    for queue in figures.queues[:ROWS_MAX]:
        if not queue.deliveries:
            continue
        by_outcome = {name: row["deliveries"] for name, row in queue.working_by_outcome.items()}
        at_once = sum(row["acked"] for row in queue.attempts if row["attempt"] <= 1)
        later = sum(row["acked"] for row in queue.attempts) - at_once
        most = max((row["attempt"] for row in queue.attempts), default=0)
        rows.append(
            [
                queue.name,
                units.count(queue.deliveries),
                bad(units.count(queue.failed), queue.failed > 0),
                units.percent(queue.failed, queue.deliveries),
                *(units.count(by_outcome.get(name, 0)) for name in FAILED),
                units.count(by_outcome.get("given_back", 0)),
                units.count(at_once),
                units.count(later),
                f"{most} or more" if most == ATTEMPTS_MAX else units.count(most),
            ]
        )
    if not rows:
        return section("retries", "Retries", tag("p", "No delivery ended in this time.", "note"))
    caption = "Deliveries that ended, and how often it took more than one"
    return section("retries", "Retries", table(caption, heads, rows))


def ends(figures: Figures) -> str:
    heads = [Head("Queue", number=False), Head("What happened", number=False), Head("Reason", number=False)]
    heads += [Head("Messages"), Head("Held by a consumer")]
    said = {
        "dead": "became a dead letter",
        "rejected": "thrown away: dead letters are off",
        "expired": "thrown away by its TTL",
        "withdrawn": "withdrawn",
        "redriven": "redriven",
    }
    rows = []
    for queue in figures.queues[:ROWS_MAX]:
        found: dict[tuple[str, str], list[int]] = {}
        for row in queue.endings:
            if row["event"] in said:
                both = found.setdefault((row["event"], row["reason"] or units.NOTHING), [0, 0])
                both[0] += row["events"]
                both[1] += row["events"] if row["held"] else 0
        for (event, reason), (messages, held) in sorted(found.items(), key=lambda it: -it[1][0]):
            rows.append([queue.name, said[event], reason, units.count(messages), units.count(held)])
    title = "Dead letters, expiry, withdrawals"
    if not rows:
        nothing = "No message died, expired or was withdrawn, and none was redriven."
        return section("ends", title, tag("p", nothing, "note"))
    return section(
        "ends", title, table("Messages that did not end well, and those that got another try", heads, rows)
    )


def consumers(figures: Figures) -> str:
    hosts = sorted(figures.hosts, key=lambda row: -row["deliveries"])[:CONSUMERS_MAX]
    if not hosts:
        return section("consumers", "Consumers", tag("p", "No delivery ended in this time.", "note"))
    slow = sorted(
        (row for row in figures.connections if row["deliveries"] >= FEW_DELIVERIES),
        key=lambda row: -row["p90_seconds"],
    )
    failing = sorted((row for row in figures.connections if failed_of(row)), key=lambda row: -failed_of(row))
    parts = [
        _consumer_table("The busiest machines, by queue, protocol and host", hosts, "host"),
        _consumer_table(
            f"The slowest connections, of those with {FEW_DELIVERIES} deliveries or more",
            slow[:CONSUMERS_MAX],
            "consumer",
        ),
    ]
    if failing:
        parts.append(
            _consumer_table("Connections with the most failures", failing[:CONSUMERS_MAX], "consumer")
        )
    else:
        parts.append(tag("p", "No consumer failed.", "note"))
    return section("consumers", "Slow and failing consumers", *parts)


def _consumer_table(caption: str, rows: Sequence[Row], who: str) -> str:
    of_host = who == "host"
    heads = [Head("Host" if of_host else "Connection", number=False), Head("Queue", number=False)]
    if of_host:
        heads += [Head("Protocol", number=False), Head("Connections")]
    heads += map(Head, ("Deliveries", "Acked", "Failed", "Share", "Half", "90 %", "99 %", "Longest"))
    cells = []
    for row in rows:
        failed = failed_of(row)
        cells.append(
            [
                row[who],
                row["queue"],
                *([row["protocol"], units.count(row["connections"])] if of_host else []),
                units.count(row["deliveries"]),
                units.count(row["acked"]),
                bad(units.count(failed), failed > 0),
                units.percent(failed, row["deliveries"]),
                *_ranks(row),
            ]
        )
    return table(caption, heads, cells)


# --- coverage ----------------------------------------------------------------------------------------------


def coverage(figures: Figures) -> str:
    heads = [Head("Queue", number=False), Head("Events")]
    heads += [Head("Numbers"), Head("Offsets accepted"), Head("First event, UTC"), Head("Last event, UTC")]
    heads += [Head("Complete?", number=False)]
    rows = [
        [
            queue.name,
            units.count(queue.events),
            _range(queue.coverage["event_first"], queue.coverage["event_end"]),
            _range(queue.coverage["offset_first"], queue.coverage["offset_end"]),
            units.moment(queue.coverage["time_first"]),
            units.moment(queue.coverage["time_last"]),
            _complete(queue.coverage),
        ]
        for queue in figures.queues[:ROWS_MAX]
    ]
    parts: list[str] = [tag("p", _cut_said(figures), "note")]
    if rows:
        parts.append(table("The events that were read", heads, rows))
    if figures.span is not None:
        bucket = units.duration(figures.span.bucket_us / SECOND_US)
        parts.append(tag("h3", "How to read this"))
        parts.append(definitions([*TERMS, ("Pieces of time", f"Charts have a step for every {bucket}.")]))
    return section("coverage", "What the data covers", *parts)


def _range(first: int | None, end: int | None) -> str:
    return units.NOTHING if first is None or end is None else f"{first:,} to {end - 1:,}"


def _complete(coverage: Row) -> str:
    said = []
    if coverage["cut"]:
        said.append(f"retention has removed what was before event {coverage['event_kept']:,}")
    if coverage["missing_events"]:
        said.append(f"{units.counted(coverage['missing_events'], 'event')} in between could not be read")
    if coverage["unsynced_events"]:
        said.append(f"the last {coverage['unsynced_events']:,} were not in the files yet")
    if coverage["unknown_waits"]:
        messages = units.counted(coverage["unknown_waits"], "message")
        said.append(f"{messages} came before what is kept: how long they waited is not known")
    return "; ".join(said) if said else "yes"


def _cut_said(figures: Figures) -> str:
    cut = [queue for queue in figures.queues if queue.coverage["cut"]]
    said = []
    if cut:
        said.append(
            f"Retention has removed the beginning of {units.counted(len(cut), 'queue')}: what happened there "
            "before the first event that is listed below is not in this report."
        )
    for column, why in (
        ("missing_events", "could not be read"),
        ("unsynced_events", "were not in the files yet"),
    ):
        count = sum(queue.coverage[column] for queue in figures.queues)
        if count:
            said.append(f"{units.counted(count, 'event')} {why}.")
    return " ".join(said) or "Every event that the broker recorded in this time is in this report."
