"""Views: the lists beside that of the queues: what needs attention, connections, dead letters, readers.

A row of `VIEWS` says how a list is asked for, and its cells; `listing.py` shows it. What the broker refuses
to tell is told in its words, by the feed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.cli import connections
from penstock.cli.admin import Admin
from penstock.client.http_core import Answer
from penstock.common import tables, units
from penstock.common.tables import NOTHING, Column, columns

QUEUES_ASKED: Final = 20
"""Of so many queues, those with the most dead letters, the reasons are asked for."""


@dataclass(frozen=True, slots=True)
class View:
    """One list. `key_of` tells its rows apart; `queue_of`: what Enter opens, or nothing."""

    name: str
    nothing: str  # what is said where it is empty
    columns: tuple[Column, ...]
    ask: Callable[[Admin, Sequence[Answer]], list[Answer]]
    key_of: Callable[[Answer], str]
    cells: Callable[[Answer], list[str]]
    level: Callable[[Answer], str]  # "bad", "warn" or nothing: how it is drawn
    below: Callable[[Answer], str]  # more about the row under the cursor
    queue_of: Callable[[Answer], str] = lambda row: ""


def _attention(admin: Admin, queues: Sequence[Answer]) -> list[Answer]:
    found: list[Answer] = admin.get("health")["attention"]
    return found


def subject_of(finding: Answer) -> str:
    subject: str = finding["queue"] or finding["reader"] or "the broker"
    return subject


def attention_line(finding: Answer) -> str:
    """One finding in a line."""
    return f"{subject_of(finding)}: {finding['state']} for {units.since(finding['since'])}. {finding['why']}"


def _connections(admin: Admin, queues: Sequence[Answer]) -> list[Answer]:
    found: list[Answer] = admin.get("connections")["connections"]
    return found


def _letters(admin: Admin, queues: Sequence[Answer]) -> list[Answer]:
    worst = sorted((it for it in queues if it["dead"]), key=lambda it: -it["dead"])[:QUEUES_ASKED]
    return [
        {"queue": it["name"], "reason": reason, "count": count, "dead": it["dead"]}
        for it in worst
        for reason, count in admin.get("queues", it["name"])["dead_reasons"].items()
        if count
    ]


def _readers(admin: Admin, queues: Sequence[Answer]) -> list[Answer]:
    found: list[Answer] = admin.get("readers")["readers"]
    return found


def _reader_cells(reader: Answer) -> list[str]:
    about = reader["about"] or {}
    lags = [it["lag_seconds"] for it in reader["queues"] if it["lag"] and it["lag_seconds"] is not None]
    moved = reader["moved_seconds"]
    return [
        reader["name"],
        about.get("kind", NOTHING),
        units.count(sum(it["lag"] for it in reader["queues"])),
        units.age(max(lags)) if lags else NOTHING,
        NOTHING if moved is None else f"{units.age(moved)} ago",
        units.age(reader["lease_seconds_left"]) if reader["lease_seconds_left"] else "ended",
        about.get("error", "capped" if any(it["capped"] for it in reader["queues"]) else ""),
    ]


VIEWS: Final = {
    it.name: it
    for it in (
        View(
            "attention",
            "nothing needs attention",
            columns("LEVEL", "ABOUT", "STATE", ">FOR", "WHY"),
            _attention,
            lambda it: f"{it['state']} {subject_of(it)}",
            lambda it: [it["level"], subject_of(it), it["state"], units.since(it["since"]), it["why"]],
            lambda it: str(it["level"]),
            lambda it: f"{it['why']} {it['do']}",
            lambda it: it["queue"] or "",
        ),
        View(
            "connections",
            "nobody is connected",
            connections.LIST,
            _connections,
            lambda it: str(it["number"]),
            connections.row,
            lambda it: "warn" if it["blocked"] or it["held_back"] else "",
            lambda it: f"{it['name']}  x ends it",
        ),
        View(
            "dead letters",
            "there is no dead letter",
            columns("QUEUE", "REASON", ">COUNT"),
            _letters,
            lambda it: f"{it['reason']} {it['queue']}",
            lambda it: [it["queue"], it["reason"], units.count(it["count"])],
            lambda it: "",
            lambda it: "r puts these back  x throws away all dead letters of the queue",
            lambda it: it["queue"],
        ),
        View(
            "readers",
            "no reader has a name",
            columns("READER", "KIND", ">LAG", ">BEHIND", ">MOVED", ">LEASE", ""),
            _readers,
            lambda it: it["name"],
            _reader_cells,
            lambda it: "bad" if (it["about"] or {}).get("error") else "",
            lambda it: "reads " + ", ".join(part["queue"] for part in it["queues"]),
        ),
    )
}


def lines_of(view: View, rows: Sequence[Answer], width: int) -> list[str]:
    """The table with its headings, each line cut to the width."""
    lines = tables.table(view.columns, [view.cells(row) for row in rows])
    return [tables.cut(line, width) for line in lines]
