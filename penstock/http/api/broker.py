"""The broker as a whole: whether it lives and may be used, its engine, what it counts.

`/healthz` asks nobody: it says that this process answers. `/readyz` asks the first process, which must
answer soon. `/metrics` and `/v1/events` go by the mirror.
"""

import asyncio
from typing import Final

from starlette.responses import PlainTextResponse, Response

from penstock import __version__
from penstock.control.frames import Fields
from penstock.http import kinds, schema
from penstock.http.api.connections import ask_connections
from penstock.http.api.readers import ask_readers
from penstock.http.app import Call, answer_json
from penstock.http.link import CallRefused
from penstock.http.problems import Problem
from penstock.http.route import Param, Route
from penstock.http.watching import events
from penstock.log.info import SYNC_BOUNDS_SECONDS
from penstock.model.rights import Right

INSTALL_DASHBOARD: Final = "For a dashboard here: pip install 'penstock[dashboard]', and restart the broker"
READY_SECONDS_MAX: Final = 2.0
"""A first process that takes longer than this to answer is not ready."""


SCHEMAS: Final = {
    "Cluster": schema.object_of(
        {
            "name": schema.said(schema.STRING, "Of the log that the front-ends share."),
            "id": schema.said(schema.STRING, "Of the front-end that answers."),
            "this": schema.said(schema.STRING, "The same."),
            "role": schema.words("leader", "follower"),
            "leader": schema.said(schema.STRING, "The front-end that leads; empty: none does at the moment."),
            "shards": {
                **schema.list_of(
                    schema.object_of(
                        {
                            "shard": schema.COUNT,
                            "leader": schema.said(schema.STRING, "Empty: none does at the moment."),
                            "standby": schema.said(
                                schema.STRING, "Who keeps a copy to lead it next; empty: nobody is there."
                            ),
                            "term": schema.COUNT,
                            "queues": schema.COUNT,
                            "bytes": schema.said(schema.COUNT, "Of the log."),
                            "log": schema.said(
                                schema.STRING,
                                "Six hex digits, which the ids of all its messages begin with; empty: its "
                                "leader has not said so yet.",
                            ),
                            "behind_bytes": schema.said(
                                schema.or_null(schema.COUNT),
                                "What whoever stands by has yet to read; null: it has not said.",
                            ),
                            "copies": schema.said(
                                schema.list_of(schema.STRING), "Front-ends that could lead it at once."
                            ),
                        }
                    )
                ),
                "description": "The logs of the cluster: one, or as many as `[cluster] shards` says.",
            },
            "members": schema.list_of(
                schema.object_of(
                    {
                        "id": schema.STRING,
                        "role": schema.words("leader", "follower"),
                        "version": schema.said(schema.STRING, "Of Penstock; empty: it has not said so yet."),
                        "linked": schema.said(
                            schema.BOOLEAN, "Whether the leader hears it; of the leader, true."
                        ),
                        "copy": schema.said(
                            schema.words("current", "behind"),
                            "Of the log. Current: it can lead at once; behind: it would have to read first.",
                        ),
                    }
                )
            ),
            "nodes": {
                **schema.list_of(
                    schema.object_of(
                        {
                            "name": schema.STRING,
                            "state": schema.words("leader", "current", "behind", "offline"),
                            "behind": schema.said(schema.COUNT, "Records that it has yet to store."),
                        }
                    )
                ),
                "description": "The NATS nodes that have a copy of the log.",
            },
            "checks": {
                **schema.list_of(
                    schema.object_of(
                        {
                            "name": schema.STRING,
                            "level": schema.words("ok", "warn", "fail"),
                            "text": schema.STRING,
                            "advice": schema.said(schema.STRING, "What to do; empty: nothing."),
                        }
                    )
                ),
                "description": "What the checks of the NATS cluster came to when the front-end started.",
            },
        }
    ),
    "Engine": schema.object_of(
        {
            "engine": schema.STRING,
            "data": schema.said(schema.STRING, "Where the messages are."),
            "opening": schema.said(schema.COUNT, "How often this log was opened."),
            "position": schema.said(schema.OFFSET, "Bytes that were ever written to this log."),
            "segments": schema.COUNT,
            "log_bytes": schema.COUNT,
            "disk_bytes_free": schema.COUNT,
            "disk_bytes_total": schema.COUNT,
            "disk_bytes_reserve": schema.said(schema.COUNT, "So much of it should be free."),
            "disk_room_in": schema.said(
                schema.STRING, "What has that room: the folder, or the limit of NATS that leaves least."
            ),
            "bytes_in_flight": schema.said(schema.COUNT, "Accepted and not yet in the files."),
            "memory": schema.object_of(
                {
                    "held_bytes": schema.said(
                        schema.COUNT, "What connections and bodies over HTTP make the broker hold."
                    ),
                    "limit_bytes": schema.said(schema.COUNT, "The most that they can: memory-bytes-max."),
                    "closed": schema.said(schema.COUNT, "Connections that were closed for it."),
                    "broadcasts_lost": schema.said(
                        schema.COUNT, "Broadcasts that did not reach consumers who do not read."
                    ),
                }
            ),
            "stages": schema.object_of(
                {
                    "count": schema.said(schema.COUNT, "Parts of transactions that wait for their commit."),
                    "bytes": schema.said(schema.COUNT, "What they take of stages-bytes-max."),
                    "oldest_seconds": schema.said(
                        schema.or_null(schema.POSITIVE),
                        "Since the last part of the one that waits longest; null: there is none.",
                    ),
                }
            ),
            "full": schema.said(schema.BOOLEAN, "Whether messages are refused for lack of room."),
            "failed": schema.said(schema.or_null(schema.STRING), "Why the log has failed; null: it has not."),
            "damage": schema.said(
                schema.list_of(schema.STRING), "Damaged places of the log that were found."
            ),
            "sync": {
                **schema.object_of(
                    {
                        "count": schema.COUNT,
                        "seconds_sum": schema.POSITIVE,
                        "last_seconds": schema.POSITIVE,
                        "p50_seconds": schema.POSITIVE,
                        "p99_seconds": schema.POSITIVE,
                        "buckets": schema.said(
                            schema.list_of(
                                schema.object_of(
                                    {"seconds_max": schema.or_null(schema.NUMBER), "count": schema.COUNT}
                                ),
                            ),
                            "How many took at most so long, longer than the bucket before; "
                            "null: longer than all others.",
                        ),
                    }
                ),
                "description": "How long syncs have taken since the broker was started.",
            },
            "durability": schema.words("commit", "interval", "none"),
            "readers": schema.said(schema.COUNT, "Named readers that hold retention."),
            "listeners": {
                **schema.list_of(
                    schema.object_of(
                        {
                            "protocol": schema.words("sspq", "phpmq", "rq"),
                            "address": schema.said(schema.STRING, "host:port, or unix:PATH."),
                            "tls": schema.BOOLEAN,
                            "queue": schema.said(
                                schema.or_null(schema.STRING), "SSPQ: the one that it is for."
                            ),
                        }
                    )
                ),
                "description": "Where clients of the other protocols connect to.",
            },
            "cluster": schema.said(
                schema.or_null(schema.ref("Cluster")),
                "The front-ends and the NATS nodes that share this log; null: there are none.",
            ),
            "version": schema.STRING,
            "uptime_seconds": schema.NUMBER,
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
    return answer_json({"ready": True, **_warned(health["warnings"], health["cluster"])})


def copies_of(cluster: Fields) -> list[Fields]:
    """What a front-end leads, and stands by for, and how far the copies of that are."""
    this = cluster["this"]
    return [
        {
            "shard": it["shard"],
            "role": "leader" if it["leader"] == this else "standby",
            "behind_bytes": it["behind_bytes"],
        }
        for it in cluster["shards"]
        if this in (it["leader"], it["standby"])
    ]


def _warned(warnings: list[str], cluster: Fields | None) -> Fields:
    """What everybody may know without a token: `/v1/engine` says the rest."""
    if cluster is None:
        return {"warnings": warnings} if warnings else {}
    warnings += [check["name"] for check in cluster["checks"] if check["level"] != "ok"]
    return {"role": cluster["role"], "warnings": warnings, "copies": copies_of(cluster)}


def _not_ready(reason: str) -> Problem:
    return Problem("unavailable", reason, headers={"Retry-After": "1"})


async def get_engine(call: Call) -> Response:
    engine, _ = await call.site.link.call("engine")
    fields = {name: engine[name] for name in SCHEMAS["Engine"]["properties"]}
    # What one has no business with is not named.
    fields["listeners"] = [
        it for it in fields["listeners"] if not it["queue"] or call.user.rights(it["queue"])
    ]
    sync = {name: engine["sync"][name] for name in SCHEMAS["Engine"]["properties"]["sync"]["properties"]}
    sync["buckets"] = [
        {"seconds_max": bound, "count": count}
        for bound, count in zip((*SYNC_BOUNDS_SECONDS, None), sync["buckets"], strict=True)
    ]
    if not call.user.may(Right.READ):  # These say names of queues.
        fields["damage"] = ["who may read every queue is told where"] * len(fields["damage"])
        for listener in fields["listeners"]:
            if listener["queue"] is not None and not call.user.rights(listener["queue"]):
                listener["queue"] = None
    return answer_json({**fields, "data": call.site.data, "sync": sync})


async def get_events(call: Call) -> Response:
    return events.EventStream(call.site.mirror, call.site.stopping, lambda: call.user_now)


async def get_metrics(call: Call) -> Response:
    # Here, for prometheus_client takes 1.7 MB, and not every broker is scraped.
    from penstock.http.watching.metrics import CONTENT_TYPE, Scrape, render

    site = call.site
    await site.mirror.refresh()
    engine, _ = await site.link.call("engine")
    readers = await ask_readers(site, call.user)
    scrape = Scrape(
        rows=[site.mirror.rows[name] for name in call.user.visible(site.mirror.rows)],
        now_us=site.mirror.now_us(),
        queues_max=site.hello["metrics_queues_max"],
        version=__version__,
        engine=engine,
        connections=await ask_connections(site.link),
        readers=readers,
        requests=dict(site.requests),
        event_streams=site.mirror.subscriber_count,
        mirror_round_seconds=site.mirror.round_seconds,
        scrubbed=(site.scrubber.bytes, site.scrubber.passes),
        findings=site.health.findings(call.user),
    )
    text = await asyncio.to_thread(render, scrape)
    return Response(text, headers={"Content-Type": CONTENT_TYPE})


_TEXT: Final = "text/plain"

ROUTES: Final = (
    Route(
        "GET /",
        get_root,
        Right.NONE,
        "What this is, in a line.",
        schema.STRING,
        answer_media=_TEXT,
    ),
    Route(
        "GET /healthz",
        get_healthz,
        Right.NONE,
        "Whether this process answers.",
        schema.object_of({"status": schema.words("ok")}),
    ),
    Route(
        "GET /readyz",
        get_readyz,
        Right.NONE,
        "Whether the broker may be given traffic; the problem says why not.",
        schema.object_of(
            {
                "ready": {"type": "boolean", "enum": [True]},
                "role": schema.words("leader", "follower"),
                "warnings": schema.said(
                    schema.list_of(schema.STRING),
                    "What needs attention, and /v1/engine says more about: disk, where less is free than "
                    "disk-bytes-reserve, and checks of the NATS cluster.",
                ),
                "copies": schema.said(
                    schema.list_of(
                        schema.object_of(
                            {
                                "shard": schema.COUNT,
                                "role": schema.words("leader", "standby"),
                                "behind_bytes": schema.said(
                                    schema.or_null(schema.COUNT),
                                    "What whoever stands by has yet to read; null: it has not said.",
                                ),
                            }
                        )
                    ),
                    "In a cluster: the logs that this front-end leads or stands by for.",
                ),
            },
            optional=("role", "warnings", "copies"),
        ),
    ),
    Route(
        "GET /metrics",
        get_metrics,
        Right.READ,
        "What the broker counts and measures, for Prometheus.",
        schema.STRING,
        params=(
            Param(
                "all",
                kinds.Flag(),
                "of a cluster with several logs: of all front-ends, each sample with a label front_end",
                default=False,
            ),
        ),
        answer_media=_TEXT,
    ),
    Route(
        "GET /v1/engine",
        get_engine,
        Right.READ,
        "Where messages live: disk, log, syncs, damage.",
        schema.ref("Engine"),
    ),
    Route(
        "GET /v1/events",
        get_events,
        Right.READ,
        'Queues as they change, as server-sent events `queues` with {"queues": […]}: first all of them, then '
        "those that have changed, about once a second.",
        None,
        answer_media=events.MEDIA,
        streams=True,
    ),
)
