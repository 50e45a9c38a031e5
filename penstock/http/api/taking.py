"""Taking: any program that speaks HTTP is a worker. It takes messages, holds them by a lease, settles them.

The first process does both (`control/takes.py`). Here stands what it means to a caller that may go away:

    while it waits             `untake`: nothing is taken
    before it has the answer   likewise: what was taken goes back, and no delivery is counted
    afterwards                 the lease ends

Rules that always hold:
  * Whoever does not get an answer has taken nothing, as far as that can be known: the last piece of an answer
    counts as got when it is on its way.
  * Whoever has lost the right to receive while it waited gets nothing.
  * A broker that stops keeps nobody waiting.

How it fails: as every call; input that is wrong changes nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.control.frames import Buffer, Fields, Frame
from penstock.control.takes import Taken, Verdict, pack_verdicts, unpack_taken
from penstock.http import kinds, schema
from penstock.http.answers import hand_over
from penstock.http.app import Call, answer_json, json_text
from penstock.http.bodies.media import ARROW, NDJSON
from penstock.http.bodies.taken import encode_taken, form_of
from penstock.http.bodies.verdicts import OUTCOMES, read_verdicts, verdicts_schema
from penstock.http.connection import CONNECTION, BoundedProtocol
from penstock.http.link import CALL_SECONDS, Asked, CallLeft, CallRefused
from penstock.http.problems import Problem
from penstock.http.route import JSON_MEDIA, Body, Param, Route
from penstock.http.site import Site
from penstock.model.ids import id_of
from penstock.model.life import DEAD_REASONS
from penstock.model.policy import door_of
from penstock.model.rights import Right
from penstock.model.timers import SECOND_US

MESSAGES_MAX: Final = 1000
WAIT_SECONDS_MAX: Final = 30
LEASE_SECONDS: Final = 60
AGENT_CHARACTERS_MAX: Final = 100

THREAD_BYTES: Final = 256 * 1024
"""Of payload: from here on it becomes text in a thread, which takes more than a millisecond."""

NOTHING: Final = Taken(0, [])

log = logging.getLogger("penstock.http")

_numbers: Final = count(1)  # of takes, which `untake` names

_MESSAGE: Final = {
    "offset": schema.OFFSET,
    "id": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    "value": schema.said(schema.STRING, "The payload, where it is UTF-8."),
    "value_base64": {"type": "string", "contentEncoding": "base64", "description": "Where it is not."},
    "attempts": schema.said(schema.COUNT, "Deliveries, this one included."),
    "headers": {"type": "object", "additionalProperties": schema.STRING},
    "timestamp": schema.said(schema.TIME, "When it was accepted."),
    "expires": schema.said(schema.or_null(schema.TIME), "When it expires; null: never."),
    "lease_ends": schema.said(schema.TIME, "Until when it is held: settle it before, or extend the lease."),
    "retries": schema.said(schema.or_null(schema.COUNT), "What is left of its retry counter; null: none."),
    "reason": schema.said(
        schema.words(*sorted(reason.label for reason in DEAD_REASONS)), "Why it died; of dead letters."
    ),
    "why": schema.said(
        schema.or_null(schema.STRING), "What was said when it was rejected, or null; of dead letters."
    ),
}

SCHEMAS: Final = {
    "TakenMessage": schema.object_of(_MESSAGE, optional=("value", "value_base64", "reason", "why")),
    "Settled": schema.object_of(
        {
            **dict.fromkeys(OUTCOMES, schema.COUNT),
            "gone": schema.said(
                schema.list_of(schema.STRING),
                "Ids of messages that nobody holds (any more), or somebody else does: of these, nothing was "
                "settled.",
            ),
        }
    ),
}


async def take(call: Call, lease: kinds.Seconds) -> Response:
    connection: BoundedProtocol = call.request.scope[CONNECTION]
    link = call.site.link
    media = form_of(call.request.headers.get("accept", ""))
    queue, dead = door_of(call["queue"])
    dead = dead or call["dead"]
    verdicts = read_verdicts(await call.json(), lease)
    if verdicts and media != JSON_MEDIA:
        raise Problem(
            "bad-request",
            f"verdicts are answered in {JSON_MEDIA} only; accept that, or settle before you take",
        )
    asked: Fields = {
        "take": next(_numbers),
        "queue": queue,
        "dead": dead,
        "max": call["max"],
        "wait_us": round(call["wait"] * SECOND_US),
        "lease_us": round(call["lease"] * SECOND_US),
        "consumer": connection.peer,
        "user": call.user.name,
        "agent": call.request.headers.get("user-agent", "")[:AGENT_CHARACTERS_MAX],
    }

    def undo() -> None:
        # Whoever asked is gone, and nobody else hears how it went.
        told = asyncio.ensure_future(link.call("untake", {"take": asked["take"]}))
        told.add_done_callback(lambda it: it.cancelled() or it.exception())

    # Both are one call with two answers: what was taken becomes text while the verdicts go to the disk.
    settling: Asked | None = None
    buffers: list[Buffer] = []
    if verdicts:
        settling = link.expect("settle")
        fields, buffers = pack_verdicts(queue, verdicts)
        asked["settle"] = {"n": settling.number, **fields}
    taking = link.ask("take", asked, *buffers)
    try:
        try:
            frame = await link.answer(taking, seconds=call["wait"] + CALL_SECONDS, unless=connection.lost)
            call.check_still()
            taken = unpack_taken(*frame)
        except (CallRefused, Problem) as refusal:
            if settling is None:
                raise
            if isinstance(refusal, Problem):
                undo()
            taken = NOTHING  # The next call is told why; this one, what has become of its verdicts.
        if media != ARROW and sum(len(part.payload) for part in taken.parts) < THREAD_BYTES:
            body = encode_taken(taken, media, dead=dead)
        else:
            # Arrow always: the first one waits for a large library.
            body = await asyncio.to_thread(encode_taken, taken, media, dead=dead)
        told = b""
        if settling is not None:
            settled = json_text(_settled(verdicts, await link.answer(settling, unless=connection.lost)))
            told = b',"settled":%b}' % settled.encode()
            body = body[:-1] + told
    except CallLeft:
        undo()
        raise ClientDisconnect from None
    except BaseException:
        undo()
        raise
    if not call.site.held.hold_body(len(body)):
        undo()
        body = encode_taken(NOTHING, media, dead=dead)[:-1] + told  # The verdicts are carried out.
        if not told or not call.site.held.hold_body(len(body)):
            raise call.site.held.no_room()
    return TakenResponse(call.site, body, media, connection, undo)


class TakenResponse(Response):
    """Hands over what was taken, or gives it back. Until then it is in the account of bodies."""

    def __init__(
        self, site: Site, body: bytes, media: str, connection: BoundedProtocol, undo: Callable[[], None]
    ) -> None:
        # As `super().__init__` would, which looks at much more.
        self.status_code, self.background = 200, None
        length = str(len(body)).encode()
        self.raw_headers = [(b"content-length", length), (b"content-type", media.encode())]
        self._site = site
        self._taken = body
        self._connection = connection
        self._undo = undo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_sent = False
        try:
            is_sent = await hand_over(self._site, self._connection, send, 200, self.raw_headers, self._taken)
        except TimeoutError:
            log.warning("a worker took nothing of its messages for %d s: closed", self._site.frame_seconds)
        finally:
            if not is_sent:
                self._undo()


async def settle(call: Call, lease: kinds.Seconds) -> Response:
    queue, _ = door_of(call["queue"])
    verdicts = read_verdicts(await call.json(), lease)
    if not verdicts:
        return answer_json({**dict.fromkeys(OUTCOMES, 0), "gone": []})
    fields, buffers = pack_verdicts(queue, verdicts)
    return answer_json(_settled(verdicts, await call.site.link.call("settle", fields, *buffers)))


def _settled(verdicts: Sequence[Verdict], frame: Frame) -> Fields:
    counts, gone = dict.fromkeys(OUTCOMES, 0), []
    for verdict, settled, missed in zip(verdicts, frame.fields["done"], frame.fields["gone"], strict=True):
        counts[verdict.outcome] += settled
        gone += [id_of(verdict.origin, offset).decode() for offset in missed]
    return {**counts, "gone": gone}


_DOOR: Final = Param(
    "queue",
    kinds.QueueName(doors=True),
    "the queue; with .dead behind it, its dead letters",
    "path",
    required=True,
)


def routes(lease_seconds_max: int) -> tuple[Route, ...]:
    """With the longest lease that somebody can ask for, which is a setting of the broker."""
    lease = kinds.Seconds(1, lease_seconds_max)
    return (
        Route(
            "POST /v1/queues/{queue}/take",
            partial(take, lease=lease),
            Right.RECEIVE,
            "Take messages: they are held until they are settled, or the lease ends. Answered when there is "
            "one, with what is there then. Verdicts on messages that were taken before may come along: they "
            "are carried out first, at once, and the answer, which has `settled` then, waits until that is "
            "durable.",
            schema.object_of(
                {
                    "messages": schema.list_of(schema.ref("TakenMessage")),
                    "settled": schema.said(schema.ref("Settled"), "Where verdicts came along."),
                },
                optional=("settled",),
            ),
            params=(
                _DOOR,
                Param("max", kinds.Whole(1, MESSAGES_MAX), "at most so many", default=1),
                Param(
                    "wait",
                    kinds.Seconds(0, WAIT_SECONDS_MAX),
                    "how many seconds to wait for the first one",
                    default=0,
                ),
                Param(
                    "lease",
                    lease,
                    "for how many seconds they are held",
                    default=min(LEASE_SECONDS, lease_seconds_max),
                ),
                Param("dead", kinds.Flag(), "dead letters instead", default=False),
            ),
            body=Body({JSON_MEDIA: verdicts_schema(lease)}, required=False),
            problems=("not-installed", "unsupported-media-type"),
            other_media={NDJSON: {"type": "string"}, ARROW: {"type": "string", "format": "binary"}},
        ),
        Route(
            "POST /v1/queues/{queue}/settle",
            partial(settle, lease=lease),
            Right.RECEIVE,
            "Say what becomes of messages that were taken, or hold them longer. Answered when it is durable.",
            schema.ref("Settled"),
            params=(_DOOR,),
            body=Body({JSON_MEDIA: verdicts_schema(lease)}),
            problems=("unsupported-media-type",),
        ),
    )
