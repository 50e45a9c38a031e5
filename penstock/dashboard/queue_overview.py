"""A queue's first part: how it did over time, who consumes it, its settings."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from penstock.common import units
from penstock.control.frames import Fields
from penstock.dashboard.caller import queue_path
from penstock.dashboard.connections import CONNECTIONS
from penstock.dashboard.history import of_queue
from penstock.dashboard.layout import fact, facts, panel, tag
from penstock.dashboard.queue_blocks import terminal
from penstock.dashboard.table import Column, LiveTable, Row
from penstock.dashboard.view import View

CONSUMERS_SECONDS: Final = 3.0

CONSUMER_COLUMNS: Final = (
    Column("name", "Connection", head=True, sortable=False),
    Column("protocol", "Protocol", sortable=False),
    Column("peer", "From", sortable=False),
    Column("takes", "Takes", sortable=False),
    Column(
        "held",
        "Held",
        "count",
        help="Messages that it has and has not settled, of all its queues",
        sortable=False,
    ),
    Column("since", "Connected", "since", sortable=False),
    Column("state", "State", "badges", sortable=False),
)

SETTINGS: Final[Sequence[tuple[str, str, Callable[[Any], str]]]] = (
    ("durability", "Durability", str),
    ("deliver_after", "Delivered", lambda it: {"accept": "when accepted", "sync": "when durable"}[it]),
    ("retention_seconds", "Retention", lambda it: units.duration(it) if it else "none"),
    ("retention_bytes", "Retention, at most", lambda it: units.size(it) if it else "no bound"),
    ("max_deliveries", "Max deliveries", lambda it: units.count(it) if it else "no bound"),
    ("retry_delays", "Retry delays", lambda it: ", ".join(map(units.duration, it)) or "none"),
    ("max_bytes", "Max bytes", lambda it: units.size(it) if it else "no bound"),
    ("on_expiry", "What expires", lambda it: {"dead": "becomes dead", "drop": "is dropped"}[it]),
    ("dead_letters", "Dead letters", lambda it: "on" if it else "off"),
    ("expire_seconds", "Deleted, when not used for", lambda it: units.duration(it) if it else "never"),
)
"""Field of the policy, label, how it is written."""


async def build(view: View, row: Fields) -> None:
    of_queue(view, row["name"], queue_path(row["name"], "samples"))
    _Consumers(view, row)
    _settings(row)
    terminal(view, ["show", row["name"]], ["top", row["name"]])


class _Consumers:
    """Who takes messages of this queue, or its dead letters."""

    def __init__(self, view: View, row: Fields) -> None:
        self._view = view
        self._queue: str = row["name"]
        self._shown: dict[str, Row] | None = None  # by name; None: the browser knows nothing
        with panel("Consumers"):
            self._table = LiveTable(
                "Consumers", CONSUMER_COLUMNS, key="name", noun="consumer", sort="name", page_rows=20
            ).classes("ps-consumers")
            with self._table:
                tag("p", "Nobody consumes this queue at the moment.", "ps-help")
        view.on_open(self._opened)
        view.every(CONSUMERS_SECONDS, self._refresh)

    def _opened(self) -> None:
        self._shown = None

    async def _refresh(self) -> None:
        row = self._view.feed.rows.get(self._queue)
        rows: dict[str, Row] = {}
        # Where the feed knows of none, nobody has to be asked who they are.
        if row is None or row["consumers"]:
            rows = self._rows(await CONNECTIONS.read(self._view.api))
        self._table.follow(rows, self._shown or {}, whole=self._shown is None)
        self._shown = rows

    def _rows(self, answer: Fields) -> dict[str, Row]:
        now = time.time()
        rows: dict[str, Row] = {}
        for it in answer["connections"]:
            doors = sorted(door["dead"] for door in it["consumes"] if door["queue"] == self._queue)
            if doors:
                rows[it["name"]] = {
                    "name": it["name"],
                    "protocol": it["protocol"].upper(),
                    "peer": it["peer"],
                    "takes": " and ".join("dead letters" if dead else "messages" for dead in doors),
                    "held": it["held"],
                    "since": round(now - it["connected_seconds"]),
                    "state": [["blocked", "bad"]] if it["blocked"] else [],
                }
        return rows


def _settings(row: Fields) -> None:
    with panel("Settings and log"), facts():
        for field, label, say in SETTINGS:
            fact(label, say(row["policy"][field]))
        fact("Offsets in the log", _range(row["offset_start"], row["offset_end"]))
        fact("Events in the log", _range(row["event_start"], row["event_end"]))


def _range(start: int, end: int) -> str:
    return f"{units.count(start)} to {units.count(end - 1)}" if start < end else "none"
