"""Readers: who reads the log and holds its retention, where they are, and how far behind.

A reader is a name that its owner makes up, with a position in each queue that it reads and a lease. What is
behind these positions is kept for it until the lease ends; so it says where it is again and again, all its
queues at a time. What one reader can keep is bounded by `[log] reader-bytes-max`; one that is further behind
is `capped`. It may also say what it is and how it does (`watching/sayings.py`), with that or alone.

A pipeline that a service keeps (`pipeline/service.py`) is a reader that takes wishes: it says so by the
number of the last one that it has done, again and again, and is told of new ones in the answers. So whoever
may operate its queues can pause it from here, and the service needs no door of its own.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

from starlette.responses import Response

from penstock.control.frames import Fields
from penstock.http import kinds, schema
from penstock.http.app import Call, answer_json, answer_list
from penstock.http.archiving import READERS
from penstock.http.problems import Problem
from penstock.http.reading.looking import iso_time
from penstock.http.route import Body, Field, Param, Route
from penstock.http.site import Site
from penstock.http.watching.sayings import STATES
from penstock.log.errors import LogRefused
from penstock.log.reader import LogReader
from penstock.model.rights import Right, User
from penstock.model.timers import SECOND_US

VIEWS: Final = ("messages", "events")
LEASE_SECONDS: Final = 60
POSITIONS_MAX: Final = 1000
PARTS_MAX: Final = 100
ABOUT: Final[Mapping[str, kinds.Kind]] = {
    "kind": kinds.Text("a kind of program, as pipeline or spark", 40),
    "name": kinds.Text("what people call it", 200),
    "batch": kinds.Whole(),
    "rows": kinds.Whole(),
    "error": kinds.Text("why it does not get on, in a line of 1000 characters", 1000),
    "state": kinds.Word(STATES),
    "state_seconds": kinds.Seconds(0, 1e12),
    "retry_seconds": kinds.Seconds(0, 1e12),
    "rows_total": kinds.Whole(),
    "rows_per_second": kinds.Number(0, 1e12),
    "bad_records": kinds.Whole(),
    "sinks": kinds.MapOf(kinds.Text("a sink", 200), kinds.Whole(), PARTS_MAX),
    "expectations": kinds.MapOf(kinds.Text("an expectation", 200), kinds.Whole(), PARTS_MAX),
    "expectations_checked": kinds.MapOf(kinds.Text("an expectation", 200), kinds.Whole(), PARTS_MAX),
    "wish": kinds.Whole(),
}
WISHES: Final = ("pause", "resume", "restart")
SILENT_SECONDS: Final = 30
"""Whoever has a state says it every few seconds; one of which nothing was heard for so long may be gone."""

BYTES_MAX: Final = 1 << 62
"""More than any log has: all that a reader has not read is one piece."""

SCHEMAS: Final = {
    "ReaderAbout": schema.object_of(
        {
            **{name: kind.schema() for name, kind in ABOUT.items()},
            "at": schema.said(schema.TIME, "When it last said something."),
            "silent": schema.said(
                schema.BOOLEAN,
                f"Whether it has a state, has not stopped, and said nothing for {SILENT_SECONDS} seconds.",
            ),
        },
        tuple(ABOUT),
    ),
    "Reader": schema.object_of(
        {
            "name": schema.STRING,
            "view": {
                "type": "string",
                "enum": list(VIEWS),
                "description": "Whether positions are offsets of messages or numbers of events.",
            },
            "lease_seconds_left": {
                "type": "number",
                "minimum": 0,
                "description": "0: nothing is held for it any more; it is shown for a while.",
            },
            "moved_seconds": schema.said(
                schema.or_null(schema.POSITIVE),
                "How long ago it was last seen to move; null: not since the API began.",
            ),
            "moved": schema.said(schema.or_null(schema.COUNT), "By how much, over all its queues."),
            "about": schema.said(
                schema.or_null(schema.ref("ReaderAbout")), "What it says of itself; null: nothing yet."
            ),
            "wish": schema.said(
                schema.or_null(schema.object_of({"action": schema.words(*WISHES), "number": schema.COUNT})),
                "What somebody wants of it, until it says that this is done.",
            ),
            "hidden": schema.said(schema.COUNT, "How many queues it reads that who asks may not read."),
            "queues": schema.list_of(
                schema.object_of(
                    {
                        "queue": schema.STRING,
                        "position": schema.said(schema.OFFSET, "What it reads next."),
                        "end": schema.said(schema.OFFSET, "What comes next in the queue."),
                        "lag": {
                            **schema.INTEGER,
                            "minimum": 0,
                            "description": "How much it has not read yet.",
                        },
                        "lag_bytes": schema.said(
                            schema.or_null(schema.COUNT),
                            "The payload of that, as far as it is synced and kept: about, where it is in the "
                            "middle of messages that were stored together. null: it reads events.",
                        ),
                        "lag_seconds": schema.said(
                            schema.or_null(schema.POSITIVE),
                            "How old the oldest is that it has not read; 0: it has read all. null: that is "
                            "not synced or kept.",
                        ),
                        "capped": schema.said(
                            schema.BOOLEAN, "Whether it is so far behind that not all of that is kept for it."
                        ),
                    }
                )
            ),
        }
    ),
}


async def ask_readers(site: Site, user: User, fields: Fields | None = None) -> list[Fields]:
    """All readers, or the one that `fields` name, as far as somebody may see what they read."""
    answer, _ = await site.link.call("readers", fields or {})
    readers: list[Fields] = answer["readers"]
    if not fields:
        site.sayings.forget_others({it["name"] for it in readers})
    if not user.may(Right.READ):
        for reader in readers:
            seen = [it for it in reader["queues"] if user.may(Right.READ, it["queue"])]
            reader["queues"], reader["hidden"] = seen, len(reader["queues"]) - len(seen)
        readers = [reader for reader in readers if reader["queues"]]
    return await _complete(site, readers)


async def _complete(site: Site, readers: list[Fields]) -> list[Fields]:
    """Readers, with what they have not read by bytes and by time, and what they say of themselves."""
    now_us = site.mirror.now_us()
    for reader in readers:
        saying = site.sayings.of(reader["name"])
        reader["moved_seconds"] = max(now_us - saying.moved_us, 0) / SECOND_US if saying.moved_us else None
        reader["moved"] = saying.moved if saying.moved_us else None
        reader["about"] = None
        if saying.about:
            at_us = saying.about["at_us"]
            told = {name: it for name, it in saying.about.items() if name in ABOUT}
            if reader.get("hidden") and "error" in told:  # It may say names of queues.
                told["error"] = "who may read every queue of this reader is told why"
            silent = told.get("state", "stopped") not in ("stopped", "failed")
            silent = silent and now_us - at_us > SILENT_SECONDS * SECOND_US
            reader["about"] = {**told, "at": iso_time(at_us), "silent": silent}
        reader["wish"] = saying.wish._asdict() if saying.wish is not None else None
    return await site.readers.run(partial(_weighed, now_us=now_us), readers)


def _weighed(log: LogReader, readers: list[Fields], now_us: int) -> list[Fields]:
    for reader in readers:
        reader.setdefault("hidden", 0)
        events = reader["view"] == "events"
        for it in reader["queues"]:
            it["lag_bytes"] = None if events else 0
            it["lag_seconds"] = None if it["lag"] else 0
            if it["lag"] and log.queue(it["queue"]) is not None:
                with suppress(LogRefused):  # The files were replaced, and it is not in the new ones.
                    since_us = log.time_at(it["queue"], it["position"], events=events)
                    if since_us is not None:
                        it["lag_seconds"] = max(now_us - since_us, 0) / SECOND_US
                    if not events:
                        pieces = log.cuts(it["queue"], it["position"], it["end"], BYTES_MAX, 1)
                        it["lag_bytes"] = sum(size for _, size in pieces)
    return readers


async def get_readers(call: Call) -> Response:
    return await answer_list("readers", sorted(await ask_readers(call.site, call.user), key=_name))


def _name(reader: Mapping[str, Any]) -> str:
    name: str = reader["name"]
    return name


async def get_reader(call: Call) -> Response:
    readers = await ask_readers(call.site, call.user, {"name": call["name"]})
    if not readers:
        raise _unknown(call)
    return answer_json(readers[0])


def _unknown(call: Call) -> Problem:
    return Problem(
        "reader-not-found",
        f"there is no reader {call['name']!r} (any more); its lease has ended, or it was never there",
    )


async def _known(call: Call) -> Fields:
    """The reader that is named, all of it."""
    answer, _ = await call.site.link.call("readers", {"name": call["name"]})
    if not answer["readers"]:
        raise _unknown(call)
    reader: Fields = answer["readers"][0]
    return reader


async def _require_reader(call: Call) -> None:
    """Say no to changing a reader of queues that are somebody else's business."""
    if not call.user.may(Right.OPERATE):
        answer, _ = await call.site.link.call("readers", {"name": call["name"]})
        for reader in answer["readers"]:
            if not all(call.user.may(Right.OPERATE, it["queue"]) for it in reader["queues"]):
                # Which they are is not for everybody to know.
                raise Problem(
                    "forbidden",
                    f"{call.user.name!r} may not do this: it needs the right operate with every queue of "
                    f"this reader; see [[user]]",
                )


async def put_reader(call: Call) -> Response:
    fields = await call.fields()
    positions, about, site = fields["positions"], fields["about"], call.site
    if positions is None and about is None:
        raise Problem(
            "bad-request", "neither positions nor about: say where the reader is, how it does, or both"
        )
    if call["name"] in READERS.values():
        raise Problem("bad-request", f"{call['name']!r} is the archiver's own reader; take another name")
    call.require(Right.OPERATE, positions or ())
    await _require_reader(call)
    if positions is None:
        reader = await _known(call)
    else:
        answer, _ = await site.link.call(
            "hold_reader",
            {
                "name": call["name"],
                "view": fields["view"],
                "positions": positions,
                "lease_seconds": fields["lease_seconds"],
                "readers_max": site.hello["readers_max"],
            },
        )
        reader = answer["reader"]
        site.sayings.is_at(call["name"], positions, site.mirror.now_us())
    if about is not None:
        site.sayings.said(call["name"], about, site.mirror.now_us())
    (reader,) = await _complete(site, [reader])
    return answer_json(reader)


async def post_wish(call: Call) -> Response:
    await _require_reader(call)
    site, name, wish = call.site, call["name"], call["wish"]
    (reader,) = await _complete(site, [await _known(call)])
    about = reader["about"] or {}
    if "wish" not in about or about["silent"] or about.get("state") == "stopped":
        raise Problem(
            "conflict",
            f"reader {name!r} takes no wishes: only a pipeline does that `penstock pipeline run DIR` keeps, "
            "while it tells this broker of itself",
        )
    async with call.act(f"{wish} pipeline", reader=name):
        site.sayings.wished(name, wish, site.mirror.now_us())
    (reader,) = await _complete(site, [reader])
    return answer_json(reader)


async def delete_reader(call: Call) -> Response:
    if call["name"] in READERS.values() and call.site.archiving.plan is not None:
        raise Problem("bad-request", f"{call['name']!r} is the archiver's: it goes with path under [archive]")
    await _require_reader(call)
    async with call.act("release reader", reader=call["name"]):
        await call.site.link.call("release_reader", {"name": call["name"]})
    return Response(status_code=204)


_READER: Final = Param(
    "name",
    kinds.Text("1 to 200 characters, none of which is a control character", 200),
    "the reader",
    "path",
    required=True,
)

ROUTES: Final = (
    Route(
        "GET /v1/readers",
        get_readers,
        Right.READ,
        "Who holds retention, where they are, and how far behind.",
        schema.object_of({"readers": schema.list_of(schema.ref("Reader"))}),
    ),
    Route(
        "GET /v1/readers/{name}",
        get_reader,
        Right.READ,
        "One reader.",
        schema.ref("Reader"),
        params=(_READER,),
        problems=("reader-not-found",),
    ),
    Route(
        "POST /v1/readers/{name}/{wish}",
        post_wish,
        Right.OPERATE,
        "Have the service that keeps a pipeline pause it, resume it, or start it anew.",
        schema.ref("Reader"),
        params=(_READER, Param("wish", kinds.Word(WISHES), "what it shall do", "path", required=True)),
        problems=("reader-not-found", "conflict"),
    ),
    Route(
        "DELETE /v1/readers/{name}",
        delete_reader,
        Right.OPERATE,
        "Let go of everything that a reader holds.",
        None,
        params=(_READER,),
        problems=("reader-not-found",),
        answer_media="",
    ),
)


def put_route(lease_seconds_max: int) -> Route:
    """The route whose bound is a setting of the broker."""
    return Route(
        "PUT /v1/readers/{name}",
        put_reader,
        Right.OPERATE,
        "Say where a reader is, and how it does: what is behind that is kept for it, in these queues and no "
        "others.",
        schema.ref("Reader"),
        params=(_READER,),
        body=Body(
            fields=(
                Field("view", kinds.Word(VIEWS), "what the positions count", default="messages"),
                Field(
                    "positions",
                    kinds.MapOf(kinds.QueueName(), kinds.Whole(), POSITIONS_MAX),
                    "what it reads next, in each queue that it reads; a queue that is not named is let go "
                    "of. Left out, all stays as it is, and about is said",
                ),
                Field(
                    "about",
                    kinds.Record(ABOUT, optional=True),
                    "what it says of itself: what is left out stays as it was said, null takes it back",
                ),
                Field(
                    "lease_seconds",
                    kinds.Whole(1, lease_seconds_max),
                    "how long it holds, from now on",
                    default=min(LEASE_SECONDS, lease_seconds_max),
                ),
            )
        ),
        problems=("queue-not-found", "reader-not-found", "conflict", "unsupported-media-type"),
    )
