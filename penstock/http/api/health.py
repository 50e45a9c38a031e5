"""What needs attention: the findings of `watching/health.py`, as far as who asks may know of them."""

from typing import Final

from starlette.responses import Response

from penstock.common.health import BAD, BY_STATE, LEVELS, STATES, WARN
from penstock.control.frames import Fields
from penstock.http import schema
from penstock.http.api.archive import HIDDEN
from penstock.http.app import Call, answer_list
from penstock.http.kinds import QueueName
from penstock.http.reading.looking import MICROSECONDS, iso_time
from penstock.http.route import LIMIT, Param, Route
from penstock.http.watching.health import Finding
from penstock.model.rights import Right

NAMES_QUEUES: Final = frozenset({"archive-failing"})
"""States of the broker whose reason says names of queues."""

SCHEMAS: Final = {
    "Finding": schema.object_of(
        {
            "queue": schema.said(schema.or_null(schema.STRING), "null: it is about a reader or the broker."),
            "reader": schema.said(schema.or_null(schema.STRING), "null: it is not about a reader."),
            "state": schema.words(*STATES),
            "level": schema.words(*LEVELS),
            "since": schema.said(schema.TIME, "As far as it is known: what was before the API began is not."),
            "title": schema.STRING,
            "why": schema.said(schema.STRING, "What is so, with the figures of the last look."),
            "do": schema.said(schema.STRING, "What helps."),
            "figures": schema.said(
                {"type": "object", "additionalProperties": schema.or_null(schema.NUMBER)},
                "What it was decided by, by name.",
            ),
            "who": schema.said(
                schema.list_of(schema.STRING),
                "Names of the connections, or NATS nodes, that cause it: the first of them.",
            ),
            "lines": schema.said(schema.list_of(schema.STRING), "More about it, line by line."),
            "href": schema.said(schema.STRING, "The page of the dashboard that shows more."),
        }
    )
}


async def get_health(call: Call) -> Response:
    queue = call["queue"]
    if queue is not None:
        call.require(Right.READ, (queue,))
    health = call.site.health
    found = health.findings(call.user, queue)
    sees_all = call.user.may(Right.READ)
    levels = [it.level for it in found]
    looked_at = health.looked_at
    return await answer_list(
        "attention",
        (fields_of(it, sees_all) for it in found[: call["limit"]]),
        level=next((level for level in LEVELS if level in levels), "ok"),
        bad=levels.count(BAD),
        warn=levels.count(WARN),
        looked=None if looked_at is None else iso_time(round(looked_at * MICROSECONDS)),
    )


def fields_of(finding: Finding, sees_all: bool) -> Fields:
    rule = BY_STATE[finding.state]
    lines, why = list(finding.lines), finding.why
    if not sees_all and finding.state in NAMES_QUEUES:
        why = f"{HIDDEN[0].upper()}{HIDDEN[1:]}."
    return {
        "queue": finding.subject if finding.scope == "queue" else None,
        "reader": finding.subject if finding.scope == "reader" else None,
        "state": finding.state,
        "level": finding.level,
        "since": iso_time(round(finding.since * MICROSECONDS)),
        "title": rule.title,
        "why": why,
        "do": rule.do,
        "figures": finding.figures,
        "who": list(finding.who),
        # These say names of queues, too.
        "lines": lines if sees_all else ["who may read every queue is told where"] * bool(lines),
        "href": finding.href,
    }


ROUTES: Final = (
    Route(
        "GET /v1/health",
        get_health,
        Right.READ,
        "What needs attention, the most urgent first: states of queues and readers, and of the broker "
        "itself.",
        schema.object_of(
            {
                "attention": schema.list_of(schema.ref("Finding")),
                "level": schema.said(schema.words("ok", *LEVELS), "Of the most urgent one."),
                "bad": schema.said(schema.COUNT, "How many there are of this level, also beyond the limit."),
                "warn": schema.COUNT,
                "looked": schema.said(
                    schema.or_null(schema.TIME), "When that was last looked at; null: not yet."
                ),
            }
        ),
        params=(Param("queue", QueueName(), "of this queue alone"), LIMIT),
    ),
)
