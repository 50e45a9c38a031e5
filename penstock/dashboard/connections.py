"""The page of connections: who is connected, what they send, consume and hold, and who is in trouble."""

import time
from collections import Counter
from typing import Any, Final

from penstock.common import units
from penstock.control.frames import Fields
from penstock.dashboard.alerts import Alert, Alerts
from penstock.dashboard.layout import style, tag
from penstock.dashboard.pages import queue_href
from penstock.dashboard.poll import Poll, watch
from penstock.dashboard.table import Column, Filter, LiveTable, Row
from penstock.dashboard.tile import Tiles
from penstock.dashboard.view import View

QUEUES_SHOWN: Final = 4
"""Of a connection; of more it is told how many."""

QUEUES_SEARCHED: Final = 100
PHPMQ_PORT: Final = 9100
"""Where PHPMQ listens unless a setting says otherwise."""

PROTOCOLS: Final = {"phpmq": "PHPMQ", "sspq": "SSPQ", "rq": "RQ", "http": "HTTP"}
TROUBLES: Final = {"blocked": "Blocked", "held_back": "Held back"}

COLUMNS: Final = (
    Column(
        "client",
        "Connection",
        "link",
        help="What it says of itself, the name in its certificate, or its address",
        head=True,
        badges="state",
    ),
    Column("protocol_name", "Protocol"),
    Column("peer", "Peer", help="Where it comes from", minor=True),
    Column("consumes", "Consumes", "links", help="The queues that it has asked for", sortable=False),
    Column("settled_rate", "Settles", "rate", "/s", help="Messages per second that it is done with"),
    Column("held", "Held", "count", help="Messages that it has and has not settled"),
    Column("sends", "Sends to", "links", help="The queues that it has sent most to", sortable=False),
    Column("sent_rate", "Sends", "rate", "/s", help="Messages per second that it sends"),
    Column("said_at", "Last word", "since", help="How long ago it has said something", minor=True),
    Column("since", "Connected", "since", help="How long it has been connected"),
)
USER: Final = Column("user", "User", help="Who it is, where clients say so")
WITH_USER: Final = (*COLUMNS[:3], USER, *COLUMNS[3:])
FILTERS: Final = (
    Filter("protocol", "Protocol", list(PROTOCOLS.items())),
    Filter("trouble", "State", list(TROUBLES.items())),
)

CONNECTIONS: Final = Poll("/v1/connections", lambda answer: len(answer["connections"]))


async def build(view: View) -> None:
    style("state.css")
    tag("h1", "Connections")
    alerts = Alerts()
    tiles = Tiles(
        connections="Connections",
        consuming="Consuming",
        passing="Messages",
        held="Held messages",
        blocked="Blocked",
        held_back="Held back",
    )
    table = LiveTable(
        "Connections",
        COLUMNS,
        key="name",
        noun="connection",
        sort="client",
        search="Find a connection or a queue",
        searched=("name", "client", "queues", "user"),
        filters=FILTERS,
        url_state=True,
    )
    with table:
        _first_steps(view)
    shown: dict[str, Row] = {}
    with_user = False

    def show(answer: Any, is_first: bool) -> None:
        nonlocal shown, with_user
        connections: list[Fields] = answer["connections"]
        now = time.time()
        if not with_user and any(it["user"] for it in connections):
            with_user = True
            table.show_columns(WITH_USER)
        rows = {it["name"]: _row(it, now, shown.get(it["name"])) for it in connections}
        table.follow(rows, shown, whole=is_first)
        shown = rows
        tiles.show(**_totals(connections))
        alerts.show(_alerts(connections))

    watch(view, CONNECTIONS, show)


def _totals(connections: list[Fields]) -> dict[str, tuple[str, ...]]:
    protocols = Counter(it["protocol"] for it in connections)
    spread = (f"{units.count(protocols[key])} {name}" for key, name in PROTOCOLS.items() if protocols[key])
    # Whoever takes over HTTP is a consumer also while it works, and asks for nothing.
    consuming = sum(bool(it["consumes"] or it["held"]) for it in connections)
    others = len(connections) - consuming
    rates = {name: sum(it[f"{name}_rate"] or 0 for it in connections) for name in ("sent", "settled")}
    blocked = sum(it["blocked"] for it in connections)
    held_back = sum(it["held_back"] for it in connections)
    return {
        "connections": (units.count(len(connections)), ", ".join(spread)),
        "consuming": (units.count(consuming), f"{units.count(others)} only send" if others else ""),
        "passing": (f"{units.rate(rates['sent'])}/s", f"sent; {units.rate(rates['settled'])}/s settled"),
        "held": (units.count(sum(it["held"] or 0 for it in connections)), "sent to them, not settled"),
        "blocked": (units.count(blocked), "do not read", "warn" if blocked else ""),
        "held_back": (units.count(held_back), "wait for room", "warn" if held_back else ""),
    }


def _row(connection: Fields, now: float, before: Row | None) -> Row:
    consumes, sends = connection["consumes"], connection["sends"]
    said, said_at = connection["said_seconds"], None
    if said is not None:
        said_at = round(now - said, 1)
        if before and before["said_at"] is not None and abs(before["said_at"] - said_at) < 1:
            said_at = before["said_at"]
    trouble = next((key for key in TROUBLES if connection[key]), "")
    return {
        "name": connection["name"],
        "client": connection["client"],
        "href": f"/connections/{connection['number']}",
        "peer": connection["peer"],
        "user": connection["user"] or None,
        "protocol": connection["protocol"],
        "protocol_name": PROTOCOLS.get(connection["protocol"], connection["protocol"]),
        "consumes": _links(consumes),
        "sends": _links(sends),
        "sent_rate": connection["sent_rate"],
        "settled_rate": connection["settled_rate"],
        "said_at": said_at,
        "queues": "\n".join(it["queue"] for it in (*consumes[:QUEUES_SEARCHED], *sends)),
        "held": connection["held"],
        # The moment does not change, so the row does not only because a second has passed.
        "since": before["since"] if before else round(now - connection["connected_seconds"], 1),
        "trouble": trouble,
        "state": [[TROUBLES[key].lower(), "warn"] for key in TROUBLES if connection[key]],
        "row_class": "ps-row-warn" if trouble else "",
    }


def _links(queues: list[Fields]) -> list[list[str]]:
    links = [
        [it["queue"], queue_href(it["queue"]), "dead letters" if it.get("dead") else ""]
        for it in queues[:QUEUES_SHOWN]
    ]
    if len(queues) > QUEUES_SHOWN:
        links.append([f"and {units.count(len(queues) - QUEUES_SHOWN)} more", "", ""])
    return links


def _alerts(connections: list[Fields]) -> list[Alert]:
    found = []
    if blocked := sum(it["blocked"] for it in connections):
        found.append(
            Alert(
                "warn",
                f"{units.counted(blocked, 'connection is', 'connections are')} blocked",
                "Who is blocked does not read what is sent to it, so nothing more is sent to it until it "
                "does; other consumers of the same queues go on. Look at the consumer: it is busy, stopped, "
                "or its network is slow. A smaller prefetch leaves more for the others.",
            )
        )
    if held_back := sum(it["held_back"] for it in connections):
        found.append(
            Alert(
                "warn",
                f"{units.counted(held_back, 'sender is', 'senders are')} held back",
                "There is no room for what they send: the disk or the queue is full, or more comes than can "
                "be written. The broker reads from them again when there is room; nothing is lost meanwhile.",
                href="/engine",
                link="See the engine",
            )
        )
    return found


def _first_steps(view: View) -> None:
    """What to do where nobody is connected."""
    host = view.request.url.hostname or "localhost"
    where = f"[{host}]" if ":" in host else host
    with tag("section", classes="ps-empty"):
        tag("h2", "Nobody is connected")
        tag("p", "Programs connect over PHPMQ, SSPQ or RQ. In Python, where PHPMQ has its usual port:")
        tag(
            "pre",
            "from penstock import connect\n\n"
            f'with connect("phpmq://{where}:{PHPMQ_PORT}") as mq:\n'
            '    for message in mq.consume("orders"):\n'
            "        message.ack()",
            "ps-code",
            tabindex="0",
        )
        tag(
            "p",
            "Who connects appears here by itself, and who takes messages over HTTP. Other calls are none.",
        )
