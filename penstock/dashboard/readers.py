"""The page of readers: who reads the log under a name, how far behind each is, and how to let one go.

Above is every reader, below all about one of them: the one that the address names, and otherwise the one
that is furthest behind when the page is opened.
"""

import time
from typing import Any, Final
from urllib.parse import quote

from penstock.common import units
from penstock.control.frames import Fields
from penstock.dashboard.alerts import Alert, Alerts
from penstock.dashboard.layout import style, tag
from penstock.dashboard.pages import reader_href
from penstock.dashboard.poll import Poll, Trail, watch
from penstock.dashboard.reader import WISHES, ReaderPanel, badges_of
from penstock.dashboard.table import Column, LiveTable, Row
from penstock.dashboard.tile import Tiles
from penstock.dashboard.view import View

COLUMNS: Final = (
    Column("name", "Reader", "link", head=True, badges="state"),
    Column("kind", "Kind", help="What kind of program it says it is"),
    Column("view", "Reads", help="Messages, or the events of messages", minor=True),
    Column("queues", "Queues", "count", help="How many queues it reads"),
    Column("lag", "Lag", "count", help="How much it has not read yet, over all its queues"),
    Column(
        "bytes", "Lag in bytes", "size", help="The payload of the messages that it has not read", minor=True
    ),
    Column("behind", "Behind", "age", help="The age of the oldest message that it has not read"),
    Column("rate", "Rows", "rate", unit="/s", help="What a pipeline reads in a second", minor=True),
    Column("moved_at", "Last moved", "since", help="How long ago it has read on"),
    Column("lease", "Lease left", "age", help="How long what it has not read is kept, unless it renews this"),
)


ALERTS_SHOWN: Final = 5


class Lags:
    """How far behind each reader has been lately."""

    def __init__(self) -> None:
        self._trails: dict[str, Trail] = {}

    def of(self, reader: str) -> Trail:
        return self._trails.get(reader, Trail())

    def told(self, at: float, answer: Any) -> None:
        """Take note of an answer of `/v1/readers`."""
        self._trails = {it["name"]: self.of(it["name"]) for it in answer["readers"]}
        for it in answer["readers"]:
            self._trails[it["name"]].add(at, lag_of(it))


LAGS: Final = Lags()
READERS: Final = Poll(
    "/v1/readers", lambda answer: sum(len(it["queues"]) for it in answer["readers"]), LAGS.told
)


def lag_of(reader: Fields) -> int:
    """Over all its queues."""
    return sum(it["lag"] for it in reader["queues"])


def lag_bytes_of(reader: Fields) -> int | None:
    """Likewise; None: it reads events, which have no payload."""
    sizes = [it["lag_bytes"] for it in reader["queues"] if it["lag_bytes"] is not None]
    return sum(sizes) if sizes else None


def lag_seconds_of(reader: Fields) -> float:
    """How old the oldest is that it has not read, of all its queues; 0: it has read all, or nobody knows."""
    return max((it["lag_seconds"] or 0 for it in reader["queues"]), default=0)


def error_of(reader: Fields) -> str:
    """Why it does not get on, as it says itself; empty: it says nothing of the kind."""
    error: str = (reader["about"] or {}).get("error", "")
    return error


def is_capped(reader: Fields) -> bool:
    return any(it["capped"] for it in reader["queues"])


def holds(reader: Fields) -> bool:
    """Whether anything is kept for it."""
    return bool(reader["lease_seconds_left"])


async def build(view: View) -> None:
    style("state.css")
    tag("h1", "Readers")
    alerts = Alerts()
    tiles = Tiles(readers="Readers", lag="Lag", worst="Furthest behind", failing="Failing", capped="Capped")
    table = LiveTable(
        "Readers",
        COLUMNS,
        key="name",
        noun="reader",
        sort="-lag",
        search="Find a reader",
        url_state=True,
    )
    with table:
        _first_steps(view)
    chosen = view.request.query_params.get("reader", "")
    is_named = bool(chosen)

    poll, lags = READERS.of(view, LAGS)

    async def release(name: str) -> None:
        await view.api.ask("DELETE", f"/v1/readers/{quote(name, safe='')}", None)
        poll.expire()
        view.notify(f"Released {name}")

    async def wish(name: str, action: str) -> None:
        await view.api.ask("POST", f"/v1/readers/{quote(name, safe='')}/{action}", None)
        poll.expire()
        view.notify(f"{WISHES[action]} is wished of {name}")

    panel = ReaderPanel(view, release, wish)
    shown: dict[str, Row] = {}

    def show(answer: Any, is_first: bool) -> None:
        nonlocal shown, chosen
        readers: list[Fields] = answer["readers"]
        if not is_named and chosen not in {it["name"] for it in readers}:
            chosen = max(readers, key=lag_of)["name"] if readers else ""
        now = time.time()
        rows = {it["name"]: _row(it, chosen, now, shown.get(it["name"])) for it in readers}
        table.follow(rows, shown, whole=is_first)
        shown = rows
        tiles.show(**_totals(readers))
        alerts.show(_alerts(readers))
        found = next((it for it in readers if it["name"] == chosen), None)
        panel.show(chosen, found, lags.of(chosen), is_first)

    watch(view, poll, show)


def _totals(readers: list[Fields]) -> dict[str, tuple[str, ...]]:
    holding = sum(holds(it) for it in readers)
    worst = max(readers, key=lag_seconds_of, default=None)
    failing = [it["name"] for it in readers if error_of(it)]
    capped = sum(is_capped(it) for it in readers)
    return {
        "readers": (units.count(len(readers)), f"{units.count(holding)} hold retention"),
        "lag": (units.count(sum(lag_of(it) for it in readers)), "not read yet, by all of them"),
        "worst": (units.NOTHING,)
        if worst is None
        else (units.age(lag_seconds_of(worst)) if lag_of(worst) else "none", worst["name"]),
        "failing": (units.count(len(failing)), failing[0] if failing else "say so", "bad" if failing else ""),
        "capped": (units.count(capped), "further behind than is kept", "bad" if capped else ""),
    }


def _row(reader: Fields, chosen: str, now: float, before: Row | None) -> Row:
    state = badges_of(reader)
    if is_capped(reader):
        state.append(["capped", "bad"])
    moved_at = None
    if reader["moved_seconds"] is not None:
        moved_at = round(now - reader["moved_seconds"], 1)
        if before and before["moved_at"] is not None and abs(before["moved_at"] - moved_at) < 1:
            moved_at = before["moved_at"]  # The row does not change only because time passes.
    if not holds(reader):
        state.append(["lease ended", "warn"])
    return {
        "name": reader["name"],
        "href": reader_href(reader["name"]),
        "state": state,
        "kind": (reader["about"] or {}).get("kind"),
        "rate": (reader["about"] or {}).get("rows_per_second"),
        "view": reader["view"],
        "behind": round(lag_seconds_of(reader)) if lag_of(reader) else None,
        "moved_at": moved_at,
        "queues": len(reader["queues"]),
        "lag": lag_of(reader),
        "bytes": lag_bytes_of(reader),
        "lease": round(reader["lease_seconds_left"]) if holds(reader) else None,
        "row_class": "ps-row-chosen" if reader["name"] == chosen else "",
    }


def _alerts(readers: list[Fields]) -> list[Alert]:
    found = [
        Alert(
            "bad",
            f"{it['name']} does not get on",
            f"It says: {error_of(it)}",
            href=reader_href(it["name"]),
            link="See the reader",
        )
        for it in readers
        if error_of(it)
    ][:ALERTS_SHOWN]
    capped = [it["name"] for it in readers if is_capped(it)]
    if not capped:
        return found
    return [
        *found,
        Alert(
            "bad",
            f"{units.counted(len(capped), 'reader is', 'readers are')} capped",
            "A reader holds at most [log] reader-bytes-max of the log in a queue. Who is further behind than "
            "that may find its next messages removed by retention. Let it catch up, or set a higher bound "
            "while there is room on the disk.",
            more=capped[:ALERTS_SHOWN],
        ),
    ]


def _first_steps(view: View) -> None:
    """What to do where there is no reader."""
    base = str(view.request.base_url).rstrip("/")
    with tag("section", classes="ps-empty"):
        tag("h2", "No reader has a name yet")
        tag(
            "p",
            "A reader with a name keeps what it has not read: retention waits for it. In Spark, the option "
            "reader gives a query its name:",
        )
        tag(
            "pre",
            'spark.readStream.format("penstock")\n'
            f'    .option("url", "{base}")\n'
            '    .option("subscribe", "orders")\n'
            '    .option("reader", "nightly-report")\n'
            "    .load()",
            "ps-code",
            tabindex="0",
        )
        tag("p", "Other programs say where they are with PUT /v1/readers/NAME.")
