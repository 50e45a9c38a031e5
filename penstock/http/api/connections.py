"""Connections: who is connected over SSPQ, PHPMQ and RQ or takes messages over HTTP, and how to end one.

The first process counts; what passes in a second is reckoned here, from two looks (`watching/rates.py`).

Rules that always hold:
  * Who may not read every queue sees the connections that use one that it may read, and of these no others;
    totals over queues that it may not read are null.
  * A connection is ended by who may operate every queue that it uses; one whose queues are not all known, or
    that uses none, by who may operate all that there can be.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Final

from starlette.responses import Response

from penstock.control.frames import Fields
from penstock.http import schema
from penstock.http.app import Call, answer_json, answer_list
from penstock.http.kinds import Text, Whole
from penstock.http.link import Link
from penstock.http.problems import Problem
from penstock.http.route import Param, Route
from penstock.model.rights import Right, User

SENDS_SHOWN: Final = 5
"""Queues that a row of the list names as sent to; one connection's answer names all that are counted."""

_RATE: Final = schema.or_null(schema.POSITIVE)
_SINCE: Final = schema.or_null(schema.POSITIVE)
_HIDDEN: Final = "null: also of queues that who asks may not read, or known to its own front-end only"
_SLOW: Final = "A second, since the look before; null: there was none within a minute."

_ROW: Final[Mapping[str, schema.Schema]] = {
    "number": schema.said(schema.COUNT, "Which it is; no other gets it while the broker runs."),
    "name": schema.said(schema.STRING, "Its name in the log and in the events."),
    "client": schema.said(
        schema.STRING,
        "What people may call it: what it says of itself (HTTP: User-Agent), or the name in its certificate, "
        "or its address.",
    ),
    "protocol": schema.words("sspq", "phpmq", "rq", "http"),
    "peer": schema.said(schema.STRING, "Where it comes from."),
    "user": schema.said(schema.STRING, "Who it is; empty: nobody in particular."),
    "connected_seconds": schema.POSITIVE,
    "consumes": schema.said(
        schema.list_of(schema.object_of({"queue": schema.STRING, "dead": schema.BOOLEAN})),
        "What it has asked for; dead: the dead letters of that queue.",
    ),
    "sends": schema.said(
        schema.list_of(
            schema.object_of({"queue": schema.STRING, "count": schema.COUNT, "rate": _RATE}, ("rate",))
        ),
        f"The queues that it has sent most to, and how many messages. Of a list: {SENDS_SHOWN} at most.",
    ),
    "sent": schema.said(schema.or_null(schema.COUNT), f"Messages that it has sent; {_HIDDEN}."),
    "sent_rate": schema.said(_RATE, _SLOW),
    "delivered": schema.said(schema.or_null(schema.COUNT), f"Messages that it was sent; {_HIDDEN}."),
    "delivered_rate": schema.said(_RATE, _SLOW),
    "settled": schema.said(schema.or_null(schema.COUNT), f"Of these, by its own word; {_HIDDEN}."),
    "settled_rate": schema.said(_RATE, _SLOW),
    "held": schema.said(
        schema.or_null(schema.COUNT),
        "Messages that it has and has not settled; null: also of queues that who asks may not read.",
    ),
    "said": schema.said(
        schema.STRING, "Its last word: publish, consume, settle, …; empty: none, or it is not known here."
    ),
    "said_seconds": schema.said(_SINCE, "How long ago; null: it is not known."),
    "blocked": schema.said(schema.BOOLEAN, "It does not read what is sent to it."),
    "held_back": schema.said(schema.BOOLEAN, "What it sends has to wait for room."),
}
_MORE: Final[Mapping[str, schema.Schema]] = {
    "certificate": schema.said(schema.STRING, "The name in its TLS certificate; empty: it showed none."),
    "listener": schema.said(schema.STRING, "Where it came in; empty: over HTTP, or at another front-end."),
    "front_end": schema.said(schema.STRING, "The follower that it is connected to; empty: the leader."),
    "heard_seconds": schema.said(_SINCE, "Since anything came from it, also pings and parts of messages."),
    "pulse": schema.said(
        schema.or_null(schema.words("awake", "pinged", "idle")),
        "RQ: whether it answers pings; idle: it does not, and gets no new work. null: there are none.",
    ),
    "bytes_in": schema.or_null(schema.COUNT),
    "bytes_out": schema.or_null(schema.COUNT),
    "input_bytes": schema.said(
        schema.or_null(schema.COUNT), "What it has sent and is not read, not finished, or has no room."
    ),
    "output_bytes": schema.said(schema.or_null(schema.COUNT), "What was sent to it and it has not read."),
    "blocked_seconds": schema.said(_SINCE, "For how long it has not read; null: it reads."),
    "held_back_seconds": schema.said(_SINCE, "For how long it is not read from; null: it is."),
    "takes": schema.list_of(
        schema.object_of(
            {
                "queue": schema.STRING,
                "dead": schema.said(schema.BOOLEAN, "Its dead letters."),
                "window": schema.said(
                    schema.or_null(schema.COUNT), "The most it may hold, 0: no bound; null: it asks no more."
                ),
                "active": schema.said(
                    schema.or_null(schema.BOOLEAN), "false: it waits until an exclusive consumer has left."
                ),
                "held": schema.COUNT,
                "held_seconds": schema.said(_SINCE, "Since it got the oldest of these."),
                "messages": schema.said(
                    schema.list_of(
                        schema.object_of(
                            {"first": schema.OFFSET, "end": schema.OFFSET, "seconds": schema.POSITIVE}
                        )
                    ),
                    "What it holds, by offsets, `end` excluded, each for how long; 100 at most.",
                ),
                "delivered": schema.COUNT,
                "delivered_rate": _RATE,
                "settled": schema.COUNT,
                "settled_rate": _RATE,
            }
        )
    ),
}
SCHEMAS: Final = {
    "Connection": schema.object_of(_ROW),
    "ConnectionDetails": schema.object_of({**_ROW, **_MORE}),
}


_TOTALS: Final = ("sent", "delivered", "settled")


async def ask_connections(link: Link) -> list[Fields]:
    """All of them, as the first process tells them."""
    found: list[Fields] = []
    after: int | None = 0
    while after is not None:
        part, _ = await link.call("connections", {"after": after})
        found += part["connections"]
        after = part["next"]
    return found


async def get_connections(call: Call) -> Response:
    rates, now = call.site.rates, time.monotonic()
    rows = []
    for it in await ask_connections(call.site.link):
        counts = {name: it[name] or 0 for name in _TOTALS}
        grown = rates.of(it["number"], now, counts) or {}
        if _see(call.user, it, grown):
            it["sends"] = it["sends"][:SENDS_SHOWN]
            rows.append({name: it[name] for name in _ROW})
    return await answer_list("connections", rows)


def _see(user: User, row: Fields, grown: Mapping[str, float]) -> bool:
    """Leave of a connection what somebody may see; whether that is anything."""
    row.update({f"{name}_rate": grown.get(name) if row[name] is not None else None for name in _TOTALS})
    if user.may(Right.READ):
        return True
    seen = user.visible(row["queues"])
    if len(seen) < len(row["queues"]) or row["others"]:
        row.update({f"{name}{rate}": None for name in _TOTALS for rate in ("", "_rate")}, held=None)
        for part in ("consumes", "sends", "takes"):
            row[part] = [it for it in row.get(part, ()) if it["queue"] in seen]
    return bool(seen)


async def get_connection(call: Call) -> Response:
    row = await _ask(call)
    counts = {"sent": row["sent"] or 0, "delivered": row["delivered"], "settled": row["settled"]}
    for name, part, field in _counted(row):
        counts[name] = part[field]
    grown = call.site.rates.of((row["number"],), time.monotonic(), counts) or {}
    for name, part, field in list(_counted(row)):
        part["rate" if field == "count" else f"{field}_rate"] = grown.get(name)
    if not _see(call.user, row, grown):
        raise _gone(call)
    return answer_json({name: row[name] for name in (*_ROW, *_MORE)})


def _counted(row: Fields) -> Iterator[tuple[str, Fields, str]]:
    """Every counter of one connection and one queue: a name for it, and where it stands."""
    for it in row["sends"]:
        yield f"sent {it['queue']}", it, "count"
    for it in row["takes"]:
        for field in ("delivered", "settled"):
            yield f"{field} {it['dead']} {it['queue']}", it, field


async def _ask(call: Call) -> Fields:
    answer, _ = await call.site.link.call("connection", {"number": call["number"]})
    row: Fields = answer["connection"]
    return row


def _gone(call: Call) -> Problem:
    return Problem("connection-not-found", f"there is no connection {call['number']} (any more)")


async def delete_connection(call: Call) -> Response:
    row = await _ask(call)
    user = call.user
    if not user.may(Right.READ) and not user.visible(row["queues"]):
        raise _gone(call)  # As for who looks at it.
    knows_all = bool(row["queues"]) and not row["others"]
    if not user.may(Right.OPERATE) and not (
        knows_all and all(user.may(Right.OPERATE, queue) for queue in row["queues"])
    ):
        # Which they are is not for everybody to know.
        raise Problem(
            "forbidden",
            f"{user.name!r} may not do this: it needs the right operate with every queue of this connection; "
            f"see [[user]]",
        )
    async with call.act("end connection", connection=row["name"], user=row["user"]) as told:
        answer, _ = await call.site.link.call("end", {"number": call["number"], "name": call["name"]})
        told["held"] = answer["held"]
    return answer_json({"number": call["number"], "name": answer["name"], "held": answer["held"]})


_NUMBER: Final = Param("number", Whole(1), "the connection's number", "path", required=True)

ROUTES: Final = (
    Route(
        "GET /v1/connections",
        get_connections,
        Right.READ,
        "Everybody who is connected over SSPQ, PHPMQ or RQ, or takes messages over HTTP.",
        schema.object_of({"connections": schema.list_of(schema.ref("Connection"))}),
    ),
    Route(
        "GET /v1/connections/{number}",
        get_connection,
        Right.READ,
        "All about one connection.",
        schema.ref("ConnectionDetails"),
        params=(_NUMBER,),
        problems=("connection-not-found",),
    ),
    Route(
        "DELETE /v1/connections/{number}",
        delete_connection,
        Right.OPERATE,
        "End a connection, as if it were lost: what it held goes back by the rule of its protocol, and each "
        "is a delivery that has failed. A caller over HTTP gets no more, and its leases end.",
        schema.object_of(
            {
                "number": schema.COUNT,
                "name": schema.STRING,
                "held": schema.said(schema.COUNT, "Messages that it held."),
            }
        ),
        params=(
            _NUMBER,
            Param("name", Text("the name of a connection", 500), "only if it has this name"),
        ),
        problems=("connection-not-found", "conflict"),
    ),
)
