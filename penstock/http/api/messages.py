"""Messages of a queue, to be looked at: a page of them, or one with its history. Nothing is taken.

A page without a state goes along the log and asks how each message stands. A page of one state goes along
the runs of the first process and looks up what the log has of them; of `gone`, along the gaps between runs.
The work for one page is bounded, so a page may be short, or empty, and yet say where to go on (`next`).
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from starlette.responses import Response

from penstock.http import kinds, schema
from penstock.http.app import Call, json_text
from penstock.http.problems import Problem
from penstock.http.reading.history import Histories, histories_of
from penstock.http.reading.looking import (
    GONE,
    STATES,
    VALUES_BYTES_MAX,
    Fields,
    Runs,
    Seen,
    ask_states,
    extent_of,
    look_at,
    look_at_one,
    message_fields,
    with_repairs,
)
from penstock.http.route import JSON_MEDIA, QUEUE, Param, Route
from penstock.http.schema import Schema
from penstock.http.site import Site
from penstock.log.block import PROTOCOLS
from penstock.log.errors import LogDamaged, QueueDeleted
from penstock.model.life import Event, Reason
from penstock.model.rights import Right

LIMIT: Final = 100
LIMIT_MAX: Final = 1000
ROUNDS_MAX: Final = 50
"""How often the first process is asked for one page of a state."""


class Page(NamedTuple):
    """Messages, how they stand, and where the next page begins; None: this was the last."""

    seen: list[Seen]
    runs: list[Runs]
    offset_next: int | None


NOTHING: Final = Page([], [], None)


# --- handlers --------------------------------------------------------------------------------------


async def get_messages(call: Call) -> Response:
    queue, state = call["queue"], call["state"]
    if state is None:
        page = await _page_of_all(call.site, queue, call["from"], call["limit"])
    else:
        page = await _page_of_state(call.site, queue, call["from"], call["limit"], state)
    page = page._replace(seen=await _repaired(call.site, queue, page.seen, page.runs))
    histories = await histories_of(call.site.readers, queue, page.seen) if call["history"] else None
    return await asyncio.to_thread(_answer_page, page, histories)


async def get_message(call: Call) -> Response:
    queue, offset, site = call["queue"], call["offset"], call.site
    extent = await site.readers.run(extent_of, queue)
    if extent is None:
        await site.link.call("queue", {"queue": queue})  # which says no, where there is no such queue
    if extent is None or offset >= extent.offset_end:
        end = 0 if extent is None else extent.offset_end
        raise Problem(
            "message-not-found",
            f"queue {queue!r} has no message at offset {offset}; its synced log ends before {end}",
        )
    try:
        message = await site.readers.run(look_at_one, queue, offset)
    except LogDamaged as error:
        raise Problem("internal", str(error)) from error
    if message is None:
        raise Problem(
            "offsets-missing",
            f"queue {queue!r}: retention has removed offset {offset}; the log is complete from "
            f"{extent.offset_start} on",
            queue=queue,
            offset_start=extent.offset_start,
        )
    runs = await ask_states(site.link, queue, offset, offset + 1, 1, identity=extent.identity)
    (message,) = await _repaired(site, queue, [message], [runs])
    histories = await histories_of(site.readers, queue, [message])
    return await asyncio.to_thread(_answer_message, message, runs, histories)


# --- pages -----------------------------------------------------------------------------------------


async def _page_of_all(site: Site, queue: str, start: int, limit: int) -> Page:
    """The messages from an offset on, in whatever state they are."""
    extent = await site.readers.run(extent_of, queue)
    if extent is None:
        return await _nothing(site, queue)
    if start >= extent.offset_end:
        return NOTHING
    ranges = [(start, extent.offset_end)]
    look = await site.readers.run(look_at, queue, ranges, limit, VALUES_BYTES_MAX)
    runs: list[Runs] = []
    if look.seen:
        at, end = look.seen[0].offset, look.seen[-1].offset + 1
        while at < end:
            runs.append(await ask_states(site.link, queue, at, end, LIMIT_MAX, identity=extent.identity))
            at = runs[-1].offset_end
    return Page(look.seen, runs, _before(look.offset_next, extent.offset_end))


async def _page_of_state(site: Site, queue: str, start: int, limit: int, state: str) -> Page:
    """The messages from an offset on that are in one state."""
    extent = await site.readers.run(extent_of, queue)
    if extent is None:
        return await _nothing(site, queue)
    if start >= extent.offset_end:
        return NOTHING
    only = None if state == GONE else state
    seen: list[Seen] = []
    parts: list[Runs] = []
    at, bytes_left = start, VALUES_BYTES_MAX
    for _ in range(ROUNDS_MAX):
        runs = await ask_states(
            site.link, queue, at, extent.offset_end, LIMIT_MAX, only, identity=extent.identity
        )
        ranges = runs.gaps() if only is None else runs.ranges()
        look = await site.readers.run(look_at, queue, ranges, limit - len(seen), bytes_left)
        if look.seen:
            if not look.seen[0].id.startswith(extent.identity):
                raise QueueDeleted(queue)
            parts.append(runs)
        seen += look.seen
        bytes_left -= sum(len(message.value) for message in look.seen)
        at = runs.offset_end if look.offset_next is None else look.offset_next
        if look.offset_next is not None or at >= extent.offset_end:
            break
    return Page(seen, parts, _before(at, extent.offset_end))


async def _repaired(site: Site, queue: str, seen: list[Seen], parts: list[Runs]) -> list[Seen]:
    """The same messages with the payloads that their consumers get."""
    if not any(len(runs.repairs[0]) for runs in parts):
        return seen
    return await site.readers.run(with_repairs, queue, seen, parts)


async def _nothing(site: Site, queue: str) -> Page:
    """The page of a queue that the log does not know; a problem where the first process does not either."""
    await site.link.call("queue", {"queue": queue})
    return NOTHING


def _before(offset: int | None, end: int) -> int | None:
    return offset if offset is not None and offset < end else None


# --- answers, made in threads ----------------------------------------------------------------------


def _answer_page(page: Page, histories: Histories | None) -> Response:
    # Message by message: nobody else in this process runs while JSON is made of something large.
    messages = ",".join(json_text(_message(message, page.runs, histories)) for message in page.seen)
    return _answer(f'{{"messages":[{messages}],"next":{json_text(page.offset_next)}}}')


def _answer_message(message: Seen, runs: Runs, histories: Histories) -> Response:
    return _answer(json_text(_message(message, [runs], histories)))


def _message(message: Seen, parts: Sequence[Runs], histories: Histories | None) -> Fields:
    runs = next(runs for runs in parts if runs.offset_start <= message.offset < runs.offset_end)
    fields = message_fields(message, runs)
    if histories is not None:
        history = histories[message.offset]
        fields["history"] = history
        if fields["attempts"] is None:
            fields["attempts"] = max(event["attempt"] for event in history)
    return fields


def _answer(text: str) -> Response:
    return Response(text, media_type=JSON_MEDIA)


# --- the table -------------------------------------------------------------------------------------


REASON: Final = schema.or_null(schema.words(*(reason.label for reason in Reason if reason.label)))

_MESSAGE: Final[Mapping[str, Schema]] = {
    "offset": schema.OFFSET,
    "id": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    "state": schema.said(
        schema.words(*STATES), "A dead letter that somebody holds is dead, with a consumer."
    ),
    "time": schema.said(schema.TIME, "When it was accepted."),
    "ttl": schema.said(
        schema.or_null(schema.COUNT), "Seconds until it expires, rounded up; null: it does not."
    ),
    "expires": schema.said(schema.or_null(schema.TIME), "When it expires; null: never, or it is gone."),
    "retries": schema.said(
        schema.or_null(schema.COUNT), "What is left of its retry counter; null: none, or it is gone."
    ),
    "attempts": schema.said(
        schema.or_null(schema.COUNT),
        "Deliveries so far; null where it is gone and its history was not asked for.",
    ),
    "due": schema.said(schema.or_null(schema.TIME), "Until when it is delayed; null: it is not."),
    "headers": {"type": "object", "additionalProperties": schema.STRING},
    "reason": schema.said(REASON, "Why it is dead; null: it is not."),
    "why": schema.said(schema.or_null(schema.STRING), "What was said when it was rejected; null: nothing."),
    "consumer": schema.said(schema.or_null(schema.STRING), "Who holds it; null: nobody."),
    "protocol": schema.said(schema.words(*PROTOCOLS), "The door that it came through."),
    "repaired": schema.said(
        schema.BOOLEAN,
        "Whether its payload is another than it was sent with. The log keeps the one that was sent.",
    ),
    "value_base64": {"type": "string", "contentEncoding": "base64"},
}
_HISTORY: Final[Schema] = schema.said(
    schema.list_of(schema.ref("MessageEvent")), "What has happened to it, first first."
)

SCHEMAS: Final = {
    "Message": schema.object_of({**_MESSAGE, "history": _HISTORY}, optional=("history",)),
    "MessageWithHistory": schema.object_of({**_MESSAGE, "history": _HISTORY}),
    "MessageEvent": schema.object_of(
        {
            "event": schema.words(*(event.name.lower() for event in Event)),
            "time": schema.TIME,
            "reason": REASON,
            "consumer": schema.or_null(schema.STRING),
            "attempt": schema.said(schema.COUNT, "Deliveries so far, the one that this event ends included."),
            "dispatched": schema.said(
                schema.or_null(schema.TIME), "When the delivery that this event ends began."
            ),
        }
    ),
}

ROUTES: Final = (
    Route(
        "GET /v1/queues/{queue}/messages",
        get_messages,
        Right.READ,
        "Look at messages without taking them, from an offset on.",
        schema.object_of(
            {
                "messages": schema.list_of(schema.ref("Message")),
                "next": schema.said(
                    schema.or_null(schema.OFFSET), "Where to go on (from); null: there is no more."
                ),
            }
        ),
        params=(
            QUEUE,
            Param(
                "from",
                kinds.Whole(),
                "the first offset; what retention has removed is passed over",
                default=0,
            ),
            Param("limit", kinds.Whole(1, LIMIT_MAX), "the most messages in one answer", default=LIMIT),
            Param("state", kinds.Word(STATES), "only messages in this state"),
            Param("history", kinds.Flag(), "with what has happened to each", default=False),
        ),
        problems=("queue-not-found",),
    ),
    Route(
        "GET /v1/queues/{queue}/messages/{offset}",
        get_message,
        Right.READ,
        "Look at one message and what has happened to it, without taking it.",
        schema.ref("MessageWithHistory"),
        params=(
            QUEUE,
            Param("offset", kinds.Whole(0, kinds.OFFSET_MAX), "the message's offset", "path", required=True),
        ),
        problems=("queue-not-found", "message-not-found", "offsets-missing"),
    ),
)
