"""The page of one connection: a program, what it sends, takes and holds, how it does, and sending it away.

It is looked at again every two seconds while the page is open; the charts begin with the page. When the
connection is gone, the last figures stay, and the page says so.
"""

import time
from typing import Final

from penstock.common import units
from penstock.control.frames import Fields
from penstock.dashboard.alerts import Alert, Alerts
from penstock.dashboard.caller import ApiError
from penstock.dashboard.chart import Chart, Series
from penstock.dashboard.connections import PROTOCOLS, TROUBLES
from penstock.dashboard.layout import badge, button, confirm, fact, facts, nothing_here, panel, style, tag
from penstock.dashboard.pages import queue_href
from penstock.dashboard.poll import TRAIL_SECONDS, TURN_SECONDS, Trail
from penstock.dashboard.queue_blocks import crumbs, terminal, whole
from penstock.dashboard.table import Column, LiveTable, Row
from penstock.dashboard.tile import Tiles
from penstock.dashboard.view import View
from penstock.model.rights import Right

HELD_SHOWN: Final = 200
PULSES: Final = {"awake": "answered", "pinged": "one is on its way", "idle": "not answered: no new work"}

SENDS: Final = (
    Column("queue", "Queue", "link", head=True),
    Column("count", "Messages", "count", help="That it has sent there since it connected"),
    Column("rate", "Per second", "rate", "/s"),
)
TAKES: Final = (
    Column("queue", "Queue", "link", head=True, badges="badges"),
    Column("window", "Window", help="The most that it may hold at a time"),
    Column("held", "Held", "count", help="Messages that it has and has not settled"),
    Column("held_since", "Oldest held for", "since"),
    Column("delivered", "Delivered", "count", help="Messages that it was sent"),
    Column("delivered_rate", "Delivered", "rate", "/s", minor=True),
    Column("settled", "Settled", "count", help="By its own word"),
    Column("settled_rate", "Settled", "rate", "/s"),
)
HELD: Final = (
    Column("message", "Messages", "link", head=True, sort="first"),
    Column("queue", "Queue"),
    Column("count", "How many", "count"),
    Column("since", "Held for", "since"),
)


async def build(view: View) -> None:
    number = whole(view.request.path_params["number"])
    if number is None:
        view.client.status_code = 404
        nothing_here(view, "There is no such connection")
        return
    page = _Connection(view, number)
    page.draw(await page.ask())


class _Connection:
    def __init__(self, view: View, number: int) -> None:
        self._view = view
        self._path = f"/v1/connections/{number}"
        self._number = number
        self._connection: Fields = {}
        self._trail = Trail()
        self._is_known = False  # to the browser
        self._rows: dict[str, dict[str, Row]] = {"sends": {}, "takes": {}, "held": {}}

    async def ask(self) -> Fields:
        answer: Fields = await self._view.api.get(self._path)
        return answer

    def draw(self, first: Fields) -> None:
        view = self._view
        self._connection = first
        view.set_title(first["client"])
        style("queue.css")
        style("state.css")
        crumbs(("Connections", "/connections"))
        with tag("div", classes="ps-heading"):
            with tag("div", classes="ps-reader-name"):
                tag("h1", first["client"])
                self._badges = tag("span", classes="ps-badges")
            self._end = button("End…", self._ask_to_end, "danger") if view.may(Right.OPERATE) else None
        self._gone = tag("p", "", "ps-notice", role="status")
        self._gone.set_visibility(False)
        self._alerts = Alerts()
        self._tiles = Tiles(
            sent="Sends", delivered="Gets", settled="Settles", held="Held messages", said="Last word"
        )
        with tag("div", classes="ps-columns"):
            with panel("Messages per second"):
                self._rates = Chart(
                    "Messages per second that it sends, gets and settles, while this page is open",
                    [Series("Sends", "in"), Series("Gets", "warn"), Series("Settles", "out")],
                    kind="rate",
                    unit="/s",
                    height=150,
                    span_seconds=TRAIL_SECONDS,
                )
            with panel("Held messages over time"):
                self._holding = Chart(
                    "Messages that it holds, while this page is open",
                    [Series("Held", "ready")],
                    height=150,
                    area=True,
                    span_seconds=TRAIL_SECONDS,
                )
        with panel("Takes"):
            self._takes = LiveTable("Queues that it takes from", TAKES, key="key", noun="queue", sort="queue")
            with self._takes:
                tag("p", "It has asked for messages of no queue.", "ps-help")
        with panel("Sends to"):
            self._sends = LiveTable(
                "Queues that it sends to", SENDS, key="queue", noun="queue", sort="-count"
            )
            with self._sends:
                told = "It has sent nothing."
                if first["sent"] is None and first["front_end"]:
                    told = f"What it sends is known to its own front-end, {first['front_end']}, only."
                tag("p", told, "ps-help")
        with panel("Holds"):
            self._held = LiveTable(
                "Messages that it holds", HELD, key="key", noun="run", sort="-since", page_rows=10
            )
            with self._held:
                tag("p", "It holds no message.", "ps-help")
        with panel("Facts"), facts():
            self._facts = {label: fact(label, text) for label, text in facts_of(first).items()}
        terminal(view, ["connections", str(self._number)], ["connections", "--end", str(self._number)])
        view.on_open(self._opened)
        view.every(TURN_SECONDS, self._look)

    def _opened(self) -> None:
        self._is_known = False

    async def _look(self) -> None:
        try:
            self._connection = await self.ask()
        except ApiError as error:
            gone = error.problem == "connection-not-found"
            self._gone.set_text(
                "This connection has ended. What is shown is how it was last."
                if gone
                else f"What is shown here may be old: {error}. This page goes on asking."
            )
            self._gone.set_visibility(True)
            if gone and self._end is not None:
                self._end.set_visibility(False)
            if self._is_known or not gone:
                return
        else:
            self._gone.set_visibility(False)
        self._show(self._connection)

    def _show(self, it: Fields) -> None:
        now = time.time()
        is_first, self._is_known = not self._is_known, True
        self._badges.clear()
        with self._badges:
            for key, text in TROUBLES.items():
                if it[key]:
                    badge(text.lower(), "warn")
            if it["pulse"] == "idle":
                badge("does not answer pings", "warn")
        if self._end is not None:
            self._end.set_visibility(self._may_end())
        self._alerts.show(alerts_of(it))
        self._tiles.show(**_totals(it))
        for label, text in facts_of(it).items():
            self._facts[label].set_text(text)
        rates = [it[f"{name}_rate"] for name in ("sent", "delivered", "settled")]
        self._trail.add(now, *(rate or 0.0 for rate in rates), it["held"] or 0)
        points = list(self._trail.points) if is_first else [self._trail.points[-1]]
        for chart, cut in ((self._rates, slice(1, 4)), (self._holding, slice(4, 5))):
            drawn = [[point[0], *point[cut]] for point in points]
            if is_first:
                chart.load(drawn)
            else:
                chart.push(*drawn)
        self._follow("sends", self._sends, _sends(it), is_first)
        self._follow("takes", self._takes, _takes(it, now, self._rows["takes"]), is_first)
        self._follow("held", self._held, _held(it, now, self._rows["held"]), is_first)

    def _follow(self, name: str, table: LiveTable, rows: dict[str, Row], is_first: bool) -> None:
        table.follow(rows, self._rows[name], whole=is_first)
        self._rows[name] = rows

    def _may_end(self) -> bool:
        """Whether to offer it; the API decides again."""
        user, it = self._view.session.user, self._connection
        if user is None or user.may(Right.OPERATE):
            return user is not None
        queues = {part["queue"] for part in (*it["sends"], *it["takes"])}
        return it["held"] is not None and bool(queues) and all(user.may(Right.OPERATE, q) for q in queues)

    async def _ask_to_end(self) -> None:
        it = self._connection
        if await confirm(f"End the connection of {it['client']}?", question_of(it), "End it"):
            await self._view.run(self._do_end)

    async def _do_end(self) -> None:
        name = self._connection["name"]
        await self._view.api.ask("DELETE", self._path, None, name=name)
        self._view.notify(f"Ended {name}")
        await self._look()


def question_of(it: Fields) -> str:
    """What ending it does."""
    held = it["held"]
    if held is None:
        back = "What it holds goes back to its queues, each as a delivery that has failed."
    elif held:
        queues = [taken["queue"] for taken in it["takes"] if taken["held"]]
        where = f"to {queues[0]}" if len(set(queues)) == 1 else f"to {len(set(queues))} queues"
        back = (
            f"{units.counted(held, 'message')} that it holds will go back {where}, each as a delivery that "
            f"has failed: others may get them at once, and what has no delivery left becomes a dead letter."
        )
    else:
        back = "It holds no message."
    waiting = " What it has sent and is not stored yet is lost to it." if it["held_back"] else ""
    told = "Its leases end." if it["protocol"] == "http" else "The program may connect again by itself."
    return f"{back}{waiting} {told}"


def alerts_of(it: Fields) -> list[Alert]:
    found = []
    if it["blocked"]:
        since = f" for {units.age(it['blocked_seconds'])}" if it["blocked_seconds"] is not None else ""
        waits = f" {units.size(it['output_bytes'])} wait for it." if it["output_bytes"] else ""
        found.append(
            Alert(
                "warn",
                f"It has not read what is sent to it{since}",
                f"Nothing more is sent to it until it does.{waits} Look at the program: it is busy, stopped, "
                "or its network is slow. To give what it holds to others, end it.",
            )
        )
    if it["held_back"]:
        since = f" for {units.age(it['held_back_seconds'])}" if it["held_back_seconds"] is not None else ""
        found.append(
            Alert(
                "warn",
                f"It has not been read from{since}",
                "There is no room for what it sends: the disk or a queue is full, or more comes than can be "
                "written. It is read from again when there is room.",
                href="/engine",
                link="See the engine",
            )
        )
    return found


def _totals(it: Fields) -> dict[str, tuple[str, ...]]:
    def shown(name: str, what: str) -> tuple[str, ...]:
        rate, count = it[f"{name}_rate"], it[name]
        value = units.NOTHING if rate is None else f"{units.rate(rate)}/s"
        return value, f"{units.count(count)} {what}" if count is not None else "not known here"

    oldest = max((taken["held_seconds"] or 0 for taken in it["takes"]), default=0)
    said = it["said_seconds"]
    return {
        "sent": shown("sent", "so far"),
        "delivered": shown("delivered", "so far"),
        "settled": shown("settled", "so far"),
        "held": (
            units.count(it["held"]) if it["held"] is not None else units.NOTHING,
            f"the oldest for {units.age(oldest)}" if it["held"] else "",
        ),
        "said": (units.NOTHING if said is None else f"{units.age(said)} ago", it["said"]),
    }


def facts_of(it: Fields) -> dict[str, str]:
    """What does not change, or says little by itself."""

    def size(name: str) -> str:
        return units.NOTHING if it[name] is None else units.size(it[name])

    heard = it["heard_seconds"]
    return {
        "Number": str(it["number"]),
        "Name in the log": it["name"],
        "Protocol": PROTOCOLS.get(it["protocol"], it["protocol"]),
        "From": it["peer"],
        "Listener": it["listener"] or (f"of {it['front_end']}" if it["front_end"] else units.NOTHING),
        "User": it["user"] or "nobody in particular",
        "Certificate": it["certificate"] or "none",
        "Connected for": units.age(it["connected_seconds"]),
        "Last heard": units.NOTHING if heard is None else f"{units.age(heard)} ago",
        "Pings": PULSES.get(it["pulse"], "its protocol has none"),
        "Received": size("bytes_in"),
        "Sent to it": size("bytes_out"),
        "Not read or stored yet": size("input_bytes"),
        "Not read by it": size("output_bytes"),
    }


def _sends(it: Fields) -> dict[str, Row]:
    return {
        sent["queue"]: {
            "queue": sent["queue"],
            "href": queue_href(sent["queue"]),
            "count": sent["count"],
            "rate": sent.get("rate"),
        }
        for sent in it["sends"]
    }


def _since(seconds: float | None, now: float, before: Row | None, field: str) -> float | None:
    """A moment, which stays the same where nothing but time has passed."""
    if seconds is None:
        return None
    at = round(now - seconds, 1)
    known = before[field] if before is not None else None
    return known if known is not None and abs(known - at) < 1 else at


def _takes(it: Fields, now: float, before: dict[str, Row]) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for taken in it["takes"]:
        key = f"{taken['dead']} {taken['queue']}"
        window = taken["window"]
        badges = [["dead letters", ""]] if taken["dead"] else []
        if taken["active"] is False:
            badges.append(["waits its turn", "warn"])
        rows[key] = {
            "key": key,
            "queue": taken["queue"],
            "href": queue_href(taken["queue"]),
            "badges": badges,
            "window": None if window is None else units.count(window) if window else "no bound",
            "held": taken["held"],
            "held_since": _since(taken["held_seconds"], now, before.get(key), "held_since"),
            **{name: taken[name] for name in ("delivered", "delivered_rate", "settled", "settled_rate")},
        }
    return rows


def _held(it: Fields, now: float, before: dict[str, Row]) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for taken in it["takes"]:
        for run in taken["messages"]:
            if len(rows) == HELD_SHOWN:
                return rows
            first, last = run["first"], run["end"] - 1
            key = f"{taken['queue']} {first}"
            rows[key] = {
                "key": key,
                "message": units.count(first)
                if first == last
                else f"{units.count(first)} to {units.count(last)}",
                "first": first,
                "href": queue_href(taken["queue"], offset=first),
                "queue": taken["queue"] + (", dead letters" if taken["dead"] else ""),
                "count": run["end"] - first,
                "since": _since(run["seconds"], now, before.get(key), "since"),
            }
    return rows
