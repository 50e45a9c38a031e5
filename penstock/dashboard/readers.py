"""The page of readers: who reads the log under a name, how far behind each is, and how to let one go.

Above is every reader, below all about one of them: the one that the address names, and otherwise the one
that is furthest behind when the page is opened.
"""

from typing import Any, Final
from urllib.parse import quote

from penstock.common import units
from penstock.control.frames import Fields
from penstock.dashboard.alerts import Alert, Alerts
from penstock.dashboard.layout import style, tag
from penstock.dashboard.pages import reader_href
from penstock.dashboard.poll import Poll, Trail, watch
from penstock.dashboard.reader import ReaderPanel
from penstock.dashboard.table import Column, LiveTable, Row
from penstock.dashboard.tile import Tiles
from penstock.dashboard.view import View

COLUMNS: Final = (
    Column("name", "Reader", "link", head=True, badges="state"),
    Column("view", "Reads", help="Messages, or the events of messages"),
    Column("queues", "Queues", "count", help="How many queues it reads"),
    Column("lag", "Lag", "count", help="How much it has not read yet, over all its queues"),
    Column(
        "bytes", "Lag in bytes", "size", help="The payload of the messages that it has not read", minor=True
    ),
    Column("lease", "Lease left", "age", help="How long what it has not read is kept, unless it renews this"),
)


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


def is_capped(reader: Fields) -> bool:
    return any(it["capped"] for it in reader["queues"])


def holds(reader: Fields) -> bool:
    """Whether anything is kept for it."""
    return bool(reader["lease_seconds_left"])


async def build(view: View) -> None:
    style("state.css")
    tag("h1", "Readers")
    alerts = Alerts()
    tiles = Tiles(readers="Readers", lag="Lag", worst="Furthest behind", capped="Capped")
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

    panel = ReaderPanel(view, release)
    shown: dict[str, Row] = {}

    def show(answer: Any, is_first: bool) -> None:
        nonlocal shown, chosen
        readers: list[Fields] = answer["readers"]
        if not is_named and chosen not in {it["name"] for it in readers}:
            chosen = max(readers, key=lag_of)["name"] if readers else ""
        rows = {it["name"]: _row(it, chosen) for it in readers}
        table.follow(rows, shown, whole=is_first)
        shown = rows
        tiles.show(**_totals(readers))
        alerts.show(_alerts(readers))
        found = next((it for it in readers if it["name"] == chosen), None)
        panel.show(chosen, found, lags.of(chosen), is_first)

    watch(view, poll, show)


def _totals(readers: list[Fields]) -> dict[str, tuple[str, ...]]:
    holding = sum(holds(it) for it in readers)
    worst = max(readers, key=lag_of, default=None)
    capped = sum(is_capped(it) for it in readers)
    return {
        "readers": (units.count(len(readers)), f"{units.count(holding)} hold retention"),
        "lag": (units.count(sum(lag_of(it) for it in readers)), "not read yet, by all of them"),
        "worst": (units.NOTHING,) if worst is None else (units.count(lag_of(worst)), worst["name"]),
        "capped": (units.count(capped), "further behind than is kept", "bad" if capped else ""),
    }


def _row(reader: Fields, chosen: str) -> Row:
    state = [["capped", "bad"]] if is_capped(reader) else []
    if not holds(reader):
        state.append(["lease ended", "warn"])
    return {
        "name": reader["name"],
        "href": reader_href(reader["name"]),
        "state": state,
        "view": reader["view"],
        "queues": len(reader["queues"]),
        "lag": lag_of(reader),
        "bytes": lag_bytes_of(reader),
        "lease": round(reader["lease_seconds_left"]) if holds(reader) else None,
        "row_class": "ps-row-chosen" if reader["name"] == chosen else "",
    }


def _alerts(readers: list[Fields]) -> list[Alert]:
    capped = [it["name"] for it in readers if is_capped(it)]
    if not capped:
        return []
    return [
        Alert(
            "bad",
            f"{units.counted(len(capped), 'reader is', 'readers are')} capped",
            "A reader holds at most [log] reader-bytes-max of the log in a queue. Who is further behind than "
            "that may find its next messages removed by retention. Let it catch up, or set a higher bound "
            "while there is room on the disk.",
            more=capped[:5],
        )
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
