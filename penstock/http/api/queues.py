"""The queues: what there is, how it stands, and what operators do to a queue as a whole.

Looking goes by the mirror, which is asked to be up to date first: an answer shows all that was
confirmed to anybody before the request came.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from starlette.responses import Response

from penstock.http import kinds, schema
from penstock.http.app import Call, answer_json, answer_list
from penstock.http.route import AFTER, LIMIT, QUEUE, Param, Route
from penstock.model.life import DEAD_REASONS
from penstock.model.rights import Right, User, matcher

NAME_CHARACTERS_MAX: Final = 255
NAMES_PART: Final = 2000


QUEUE_FIELDS: Final = {
    "name": schema.STRING,
    "ready": schema.said(schema.COUNT, "Messages that wait for a consumer."),
    "delayed": schema.said(schema.COUNT, "Messages that nobody gets before their time."),
    "held": schema.said(schema.COUNT, "Messages that a consumer has and has not settled."),
    "dead": schema.said(schema.COUNT, "Dead letters, also those that somebody holds."),
    "offset_start": schema.said(schema.OFFSET, "The log of messages is complete from here on."),
    "offset_end": schema.said(schema.OFFSET, "The next offset to be given."),
    "event_start": schema.said(schema.OFFSET, "The log of events is complete from here on."),
    "event_end": schema.said(schema.OFFSET, "The next number of an event."),
    "bytes": schema.said(schema.COUNT, "Payload from the oldest message that is not settled on."),
    "consumers": schema.said(schema.COUNT, "Consumers of its messages and of its dead letters."),
    "rate_in": schema.said(schema.POSITIVE, "Messages accepted per second, over the last seconds."),
    "rate_out": schema.said(schema.POSITIVE, "Messages acknowledged per second, over the last seconds."),
    "oldest_seconds": schema.said(
        schema.or_null(schema.NUMBER),
        "The age of the oldest message that is not settled; null: there is none.",
    ),
    "paused": schema.said(schema.BOOLEAN, "Whether nothing is handed out."),
    "identity": schema.IDENTITY,
}

SCHEMAS: Final = {
    "Queue": schema.object_of(QUEUE_FIELDS),
    "QueueDetails": schema.object_of(
        {
            **QUEUE_FIELDS,
            "dead_reasons": {
                "type": "object",
                "description": "How many dead letters there are, by the reason of their death.",
                "propertyNames": {"enum": sorted(reason.label for reason in DEAD_REASONS)},
                "additionalProperties": schema.COUNT,
            },
            "policy": schema.object_of(
                {
                    "durability": schema.words("commit", "interval", "none"),
                    "deliver_after": schema.words("accept", "sync"),
                    "retention_seconds": schema.COUNT,
                    "retention_bytes": schema.COUNT,
                    "max_deliveries": schema.COUNT,
                    "max_bytes": schema.COUNT,
                    "on_expiry": schema.words("dead", "drop"),
                    "dead_letters": schema.BOOLEAN,
                    "expire_seconds": schema.COUNT,
                    "retry_delays": schema.list_of(schema.POSITIVE),
                }
            ),
        }
    ),
}


async def get_queues(call: Call) -> Response:
    mirror = call.site.mirror
    await mirror.refresh()
    limit: int = call["limit"]
    names = await chosen_names(mirror.names, call["match"], call["after"], limit + 1, call.user)
    page = names[:limit]
    more = page[-1] if len(names) > limit else None
    rows = (mirror.queue(name) for name in page if name in mirror.rows)
    return await answer_list("queues", rows, next=more)


async def chosen_names(
    names: Sequence[str], match: str | None, after: str | None, count: int, user: User
) -> list[str]:
    """The first names behind `after` that fit the pattern, and that somebody may see."""
    start = bisect_right(names, after) if after is not None else 0
    if match is None and user.may(Right.READ):
        return list(names[start : start + count])
    names = names[start:]
    fits = matcher(match or "*")
    chosen: list[str] = []
    for at in range(0, len(names), NAMES_PART):
        chosen += user.visible(name for name in names[at : at + NAMES_PART] if fits(name))
        if len(chosen) >= count:
            break
        await asyncio.sleep(0)  # There may be a hundred thousand: others get their turn.
    return chosen[:count]


async def get_queue(call: Call) -> Response:
    answer, _ = await call.site.link.call("queue", {"queue": call["queue"]})
    call.site.mirror.put(answer["row"])
    return answer_json(
        {
            **call.site.mirror.queue(call["queue"]),
            "dead_reasons": answer["dead_reasons"],
            "policy": answer["policy"],
        }
    )


async def post_pause(call: Call) -> Response:
    return await _set_paused(call, True)


async def post_resume(call: Call) -> Response:
    return await _set_paused(call, False)


async def _set_paused(call: Call, paused: bool) -> Response:
    async with call.act("pause" if paused else "resume", queue=call["queue"]):
        await call.site.link.call("pause", {"queue": call["queue"], "paused": paused})
    return answer_json({"paused": paused})


async def post_purge(call: Call) -> Response:
    queue: str = call["queue"]
    known, _ = await call.site.link.call("queue", {"queue": queue})
    purge = {
        "queue": queue,
        "dead": call["dead"],
        "mark": known["mark"],
        "identity": known["row"]["identity"],
    }
    purged, more = 0, True
    async with call.act("purge", queue=queue, dead=call["dead"]) as told:
        while more:  # A purge of very many messages says in between how far it is.
            await call.check_wanted(f"{purged} messages of {queue!r} were purged so far")
            part, _ = await call.site.link.call("purge", purge)
            purged += part["count"]
            more = part["more"]
            told["count"] = purged
    return answer_json({"purged": purged})


async def delete_queue(call: Call) -> Response:
    async with call.act("delete", queue=call["queue"], force=call["force"]) as told:
        answer, _ = await call.site.link.call("delete", {"queue": call["queue"], "force": call["force"]})
        told["count"] = sum(answer[state] for state in ("ready", "delayed", "held", "dead"))
    await call.site.mirror.refresh()  # so that nobody who asks from now on is shown it
    return answer_json({field: answer[field] for field in DELETED})


DELETED: Final = ("name", "identity", "ready", "delayed", "held", "dead")
"""What is said of a queue that was there."""

_PAUSED: Final = schema.object_of({"paused": schema.BOOLEAN})

ROUTES: Final = (
    Route(
        "GET /v1/queues",
        get_queues,
        Right.READ,
        "All queues, by name.",
        schema.object_of(
            {"queues": schema.list_of(schema.ref("Queue")), "next": schema.or_null(schema.STRING)}
        ),
        params=(
            Param(
                "match",
                kinds.Text("a pattern of names: * stands for any characters, ? for one", NAME_CHARACTERS_MAX),
                "only queues whose whole name fits this pattern; * stands for any characters, ? for one",
            ),
            AFTER,
            LIMIT,
        ),
    ),
    Route(
        "GET /v1/queues/{queue}",
        get_queue,
        Right.READ,
        "One queue, with its policy and the reasons of its dead letters.",
        schema.ref("QueueDetails"),
        params=(QUEUE,),
        problems=("queue-not-found",),
    ),
    Route(
        "DELETE /v1/queues/{queue}",
        delete_queue,
        Right.ADMIN,
        "Delete a queue with all its messages; how it stood. The next message of that name makes another.",
        schema.object_of({field: QUEUE_FIELDS[field] for field in DELETED}),
        params=(
            QUEUE,
            Param("force", kinds.Flag(), "also while it has consumers, or messages are held", default=False),
        ),
        problems=("queue-not-found", "conflict"),
    ),
    Route(
        "POST /v1/queues/{queue}/pause",
        post_pause,
        Right.OPERATE,
        "Hand out nothing more; messages are accepted and settled as before.",
        _PAUSED,
        params=(QUEUE,),
        problems=("queue-not-found",),
    ),
    Route(
        "POST /v1/queues/{queue}/resume",
        post_resume,
        Right.OPERATE,
        "Hand out messages again.",
        _PAUSED,
        params=(QUEUE,),
        problems=("queue-not-found",),
    ),
    Route(
        "POST /v1/queues/{queue}/purge",
        post_purge,
        Right.ADMIN,
        "Throw away every message that waits, or every dead letter; those that somebody holds stay.",
        schema.object_of({"purged": schema.COUNT}),
        params=(
            QUEUE,
            Param("dead", kinds.Flag(), "the dead letters instead of the messages that wait", default=False),
        ),
        problems=("queue-not-found",),
    ),
)
