"""Marks: what happened besides messages, to be shown with the charts (`penstock/http/history/marks.py`)."""

from typing import Final

from starlette.responses import Response

from penstock.control.frames import Fields
from penstock.http import kinds, schema
from penstock.http.api.offsets import Moment
from penstock.http.app import Call, answer_json, answer_list
from penstock.http.auth import forbidden
from penstock.http.history.marks import KINDS, SAID
from penstock.http.problems import Problem
from penstock.http.reading.looking import MICROSECONDS, iso_time
from penstock.http.route import Body, Field, Param, Route
from penstock.model.rights import Right

TEXT_CHARACTERS_MAX: Final = 200
MARKS_MAX: Final = 1000
PAST_SECONDS_MAX: Final = 14 * 86_400
AHEAD_SECONDS_MAX: Final = 60

SCHEMAS: Final = {
    "Mark": schema.object_of(
        {
            "time": schema.TIME,
            "kind": schema.words(*KINDS),
            "text": schema.STRING,
            "queue": schema.said(
                schema.or_null(schema.STRING), "Which queue it is about; null: all of them."
            ),
            "who": schema.said(schema.STRING, "The user; empty: the broker itself, or nobody in particular."),
        }
    )
}


async def get_marks(call: Call) -> Response:
    now_us = call.site.mirror.now_us()
    end_us = now_us + AHEAD_SECONDS_MAX * MICROSECONDS if call["to"] is None else call["to"]
    start_us = end_us - PAST_SECONDS_MAX * MICROSECONDS if call["from"] is None else call["from"]
    queue: str | None = call["queue"]
    found = await call.site.history.marked(start_us, end_us)
    shown = [
        _shown(mark)
        for mark in found
        if (not mark["queue"] or call.user.may(Right.READ, mark["queue"]))
        and (queue is None or mark["queue"] in ("", queue))
    ]
    return await answer_list("marks", shown[-MARKS_MAX:])


async def post_marks(call: Call) -> Response:
    fields = await call.fields()
    queue: str = fields["queue"] or ""
    if queue:
        call.require(Right.OPERATE, (queue,))
    elif not call.user.may(Right.OPERATE):
        raise forbidden(call.user, Right.OPERATE, None)
    now_us = call.site.mirror.now_us()
    at_us: int = now_us if fields["at"] is None else fields["at"]
    if not now_us - PAST_SECONDS_MAX * MICROSECONDS <= at_us <= now_us + AHEAD_SECONDS_MAX * MICROSECONDS:
        raise Problem(
            "conflict",
            f"field 'at': {iso_time(at_us)} is not within the last 14 days; nothing older is kept",
        )
    mark = {
        "kind": fields["kind"],
        "text": fields["text"],
        "queue": queue,
        "who": call.user.name,
        "at_us": at_us,
    }
    async with call.act("mark", queue=queue, kind=fields["kind"], text=fields["text"]):
        await call.site.history.mark(**mark)
    return answer_json(_shown(mark))


def _shown(mark: Fields) -> Fields:
    return {
        "time": iso_time(mark["at_us"]),
        "kind": mark["kind"],
        "text": mark["text"],
        "queue": mark["queue"] or None,
        "who": mark["who"],
    }


ROUTES: Final = (
    Route(
        "GET /v1/marks",
        get_marks,
        Right.READ,
        "What happened: starts and stops, what operators did to queues, what people have marked; by time.",
        schema.object_of({"marks": schema.list_of(schema.ref("Mark"))}),
        params=(
            Param("from", Moment(), "from this time on; at most 14 days are kept"),
            Param("to", Moment(), f"up to this time; the newest {MARKS_MAX} are told"),
            Param("queue", kinds.QueueName(), "only those about this queue, and about all"),
        ),
    ),
    Route(
        "POST /v1/marks",
        post_marks,
        Right.OPERATE,
        "Mark a moment on the charts: of one queue, or, by who may operate every queue, of all.",
        schema.ref("Mark"),
        problems=("conflict",),
        body=Body(
            fields=(
                Field(
                    "text",
                    kinds.Text("a line of at most 200 characters", TEXT_CHARACTERS_MAX),
                    "what to show",
                    required=True,
                ),
                Field("kind", kinds.Word(SAID), "what it was", default="note"),
                Field("queue", kinds.QueueName(), "the queue that it is about; if not given, all of them"),
                Field("at", Moment(), "when it was; if not given, now"),
            )
        ),
    ),
)
