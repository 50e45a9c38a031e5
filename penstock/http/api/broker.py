"""The broker as a whole: whether it lives and may be used, its engine, its connections, what it counts.

`/healthz` asks nobody: it says that this process answers. `/readyz` asks the first process, which must
answer soon. `/metrics` and `/v1/events` go by the mirror.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Final

from starlette.responses import PlainTextResponse, Response

from penstock import __version__
from penstock.control.frames import Fields
from penstock.http.app import Call, answer_json, answer_list
from penstock.http.link import CallRefused, Link
from penstock.http.problems import Problem
from penstock.http.route import (
    BOOLEAN,
    NUMBER,
    OFFSET,
    STRING,
    Role,
    Route,
    Schema,
    list_schema,
    object_schema,
    or_null,
)
from penstock.http.watching import events
from penstock.http.watching.metrics import CONTENT_TYPE, Scrape, render
from penstock.log.info import SYNC_BOUNDS_SECONDS

INSTALL_DASHBOARD: Final = "For a dashboard here: pip install 'penstock[dashboard]', and restart the broker"
READY_SECONDS_MAX: Final = 2.0
"""A first process that takes longer than this to answer is not ready."""

_COUNT: Final[Schema] = {"type": "integer", "format": "int64", "minimum": 0}
_SECONDS: Final[Schema] = {"type": "number", "minimum": 0}

SCHEMAS: Final[Mapping[str, Schema]] = {
    "Cluster": object_schema(
        {
            "name": {**STRING, "description": "Of the log that the front-ends share."},
            "id": {**STRING, "description": "Of the front-end that answers."},
            "role": {"type": "string", "enum": ["leader", "follower"]},
            "leader": {**STRING, "description": "The front-end that leads; empty: none does at the moment."},
            "members": list_schema(
                object_schema({"id": STRING, "role": {"type": "string", "enum": ["leader", "follower"]}})
            ),
            "nodes": {
                **list_schema(
                    object_schema(
                        {
                            "name": STRING,
                            "state": {"type": "string", "enum": ["leader", "current", "behind", "offline"]},
                            "behind": {**_COUNT, "description": "Records that it has yet to store."},
                        }
                    )
                ),
                "description": "The NATS nodes that have a copy of the log.",
            },
            "checks": {
                **list_schema(
                    object_schema(
                        {
                            "name": STRING,
                            "level": {"type": "string", "enum": ["ok", "warn", "fail"]},
                            "text": STRING,
                            "advice": {**STRING, "description": "What to do; empty: nothing."},
                        }
                    )
                ),
                "description": "What the checks of the NATS cluster came to when the front-end started.",
            },
        }
    ),
    "Connection": object_schema(
        {
            "name": {**STRING, "description": "Its name in the log and in the events."},
            "protocol": {"type": "string", "enum": ["sspq", "phpmq", "rq"]},
            "peer": {**STRING, "description": "Where it comes from."},
            "connected_seconds": _SECONDS,
            "consumes": {
                **list_schema(object_schema({"queue": STRING, "dead": BOOLEAN})),
                "description": "What it has asked for; dead: the dead letters of that queue.",
            },
            "held": {**_COUNT, "description": "Messages that it has and has not settled."},
            "blocked": {**BOOLEAN, "description": "It does not read what is sent to it."},
            "held_back": {**BOOLEAN, "description": "What it sends has to wait for room."},
        }
    ),
    "Engine": object_schema(
        {
            "engine": STRING,
            "data": {**STRING, "description": "Where the messages are."},
            "opening": {**_COUNT, "description": "How often this log was opened."},
            "position": {**OFFSET, "description": "Bytes that were ever written to this log."},
            "segments": _COUNT,
            "log_bytes": _COUNT,
            "disk_bytes_free": _COUNT,
            "disk_bytes_total": _COUNT,
            "bytes_in_flight": {**_COUNT, "description": "Accepted and not yet in the files."},
            "full": {**BOOLEAN, "description": "Whether messages are refused for lack of room."},
            "failed": {
                **or_null(STRING),
                "description": "Why the log has failed; null: it has not.",
            },
            "damage": {**list_schema(STRING), "description": "Damaged places of the log that were found."},
            "sync": {
                **object_schema(
                    {
                        "count": _COUNT,
                        "seconds_sum": _SECONDS,
                        "last_seconds": _SECONDS,
                        "p50_seconds": _SECONDS,
                        "p99_seconds": _SECONDS,
                        "buckets": {
                            **list_schema(
                                object_schema({"seconds_max": or_null(NUMBER), "count": _COUNT}),
                            ),
                            "description": "How many took at most so long, longer than the bucket before; "
                            "null: longer than all others.",
                        },
                    }
                ),
                "description": "How long syncs have taken since the broker was started.",
            },
            "durability": {"type": "string", "enum": ["commit", "interval", "none"]},
            "readers": {**_COUNT, "description": "Named readers that hold retention."},
            "listeners": {
                **list_schema(
                    object_schema(
                        {
                            "protocol": {"type": "string", "enum": ["sspq", "phpmq", "rq"]},
                            "address": {**STRING, "description": "host:port, or unix:PATH."},
                            "tls": BOOLEAN,
                            "queue": {**or_null(STRING), "description": "SSPQ: the one that it is for."},
                        }
                    )
                ),
                "description": "Where clients of the other protocols connect to.",
            },
            "cluster": {
                **or_null({"$ref": "#/components/schemas/Cluster"}),
                "description": "The front-ends and the NATS nodes that share this log; null: there are none.",
            },
            "version": STRING,
            "uptime_seconds": NUMBER,
        }
    ),
}


async def get_root(call: Call) -> Response:
    pages = "The dashboard is here for browsers" if call.site.has_pages else INSTALL_DASHBOARD
    return PlainTextResponse(f"Penstock {__version__}. {pages}; the API is described at /openapi.json.\n")


async def get_healthz(call: Call) -> Response:
    return answer_json({"status": "ok"})


async def get_readyz(call: Call) -> Response:
    if call.site.stopping.is_set():
        raise _not_ready("the broker is stopping")
    try:
        async with asyncio.timeout(READY_SECONDS_MAX):
            health, _ = await call.site.link.call("health")
    except TimeoutError:
        raise _not_ready(f"the broker has not answered for {READY_SECONDS_MAX:.0f} s") from None
    except CallRefused as error:
        raise _not_ready(str(error)) from None
    if not health["ready"]:
        raise _not_ready(health["reason"])
    return answer_json({"ready": True, **_in_cluster(health["cluster"])})


def _in_cluster(cluster: Fields | None) -> Fields:
    """What everybody may know of a cluster, without a token: `/v1/engine` says the rest."""
    if cluster is None:
        return {}
    warnings = [check["name"] for check in cluster["checks"] if check["level"] != "ok"]
    return {"role": cluster["role"], "warnings": warnings}


def _not_ready(reason: str) -> Problem:
    return Problem("unavailable", reason, headers={"Retry-After": "1"})


async def get_engine(call: Call) -> Response:
    engine, _ = await call.site.link.call("engine")
    fields = {name: engine[name] for name in SCHEMAS["Engine"]["properties"]}
    sync = {name: engine["sync"][name] for name in SCHEMAS["Engine"]["properties"]["sync"]["properties"]}
    sync["buckets"] = [
        {"seconds_max": bound, "count": count}
        for bound, count in zip((*SYNC_BOUNDS_SECONDS, None), sync["buckets"], strict=True)
    ]
    return answer_json({**fields, "data": call.site.data, "sync": sync})


async def get_connections(call: Call) -> Response:
    return await answer_list("connections", await _connections(call.site.link))


async def _connections(link: Link) -> list[Fields]:
    found: list[Fields] = []
    after: int | None = 0
    while after is not None:
        part, _ = await link.call("connections", {"after": after})
        found += part["connections"]
        after = part["next"]
    return found


async def get_events(call: Call) -> Response:
    return events.EventStream(call.site.mirror, call.site.stopping)


async def get_metrics(call: Call) -> Response:
    site = call.site
    await site.mirror.refresh()
    engine, _ = await site.link.call("engine")
    readers, _ = await site.link.call("readers")
    scrape = Scrape(
        rows=list(site.mirror.rows.values()),
        now_us=time.time_ns() // 1000,
        queues_max=site.hello["metrics_queues_max"],
        version=__version__,
        engine=engine,
        connections=await _connections(site.link),
        readers=readers["readers"],
        requests=dict(site.requests),
        event_streams=site.mirror.subscriber_count,
        mirror_round_seconds=site.mirror.round_seconds,
    )
    text = await asyncio.to_thread(render, scrape)
    return Response(text, headers={"Content-Type": CONTENT_TYPE})


_TEXT: Final = "text/plain"

ROUTES: Final = (
    Route(
        "GET",
        "/",
        get_root,
        Role.ANYONE,
        "What this is, in a line.",
        STRING,
        answer_media=_TEXT,
        tag="broker",
    ),
    Route(
        "GET",
        "/healthz",
        get_healthz,
        Role.ANYONE,
        "Whether this process answers.",
        object_schema({"status": {"type": "string", "enum": ["ok"]}}),
        tag="broker",
    ),
    Route(
        "GET",
        "/readyz",
        get_readyz,
        Role.ANYONE,
        "Whether the broker may be given traffic; the problem says why not.",
        object_schema(
            {
                "ready": {"type": "boolean", "enum": [True]},
                "role": {"type": "string", "enum": ["leader", "follower"]},
                "warnings": {
                    **list_schema(STRING),
                    "description": "Checks of the NATS cluster that /v1/engine says more about.",
                },
            },
            optional=("role", "warnings"),
        ),
        tag="broker",
    ),
    Route(
        "GET",
        "/metrics",
        get_metrics,
        Role.READ,
        "What the broker counts and measures, for Prometheus.",
        STRING,
        answer_media=_TEXT,
        tag="broker",
    ),
    Route(
        "GET",
        "/v1/engine",
        get_engine,
        Role.READ,
        "Where messages live: disk, log, syncs, damage.",
        {"$ref": "#/components/schemas/Engine"},
        tag="broker",
    ),
    Route(
        "GET",
        "/v1/connections",
        get_connections,
        Role.READ,
        "Everybody who is connected over SSPQ, PHPMQ or RQ.",
        object_schema({"connections": list_schema({"$ref": "#/components/schemas/Connection"})}),
        tag="broker",
    ),
    Route(
        "GET",
        "/v1/events",
        get_events,
        Role.READ,
        'Queues as they change, as server-sent events `queues` with {"queues": […]}: first all of them, then '
        "those that have changed, about once a second.",
        None,
        answer_media=events.MEDIA,
        streams=True,
        tag="broker",
    ),
)
