"""All routes of the API, and the schemas that their answers share."""

from typing import Final

from starlette.responses import Response

from penstock.http.api import (
    archive,
    audit,
    backup,
    broker,
    connections,
    health,
    log,
    marks,
    messages,
    offsets,
    queues,
    readers,
    records,
    redrive,
    samples,
    search,
    selection,
    sending,
    taking,
    transactions,
)
from penstock.http.api.openapi import document
from penstock.http.app import Call, answer_json
from penstock.http.route import Route
from penstock.http.schema import Schema
from penstock.model.rights import Right

_PARTS: Final = {
    "queues": (queues, samples, marks, offsets),
    "sending": (sending,),
    "taking": (taking,),
    "messages": (messages, search, selection, log, records),
    "dead letters": (redrive,),
    "readers": (readers,),
    "connections": (connections,),
    "transactions": (transactions,),
    "broker": (broker, health, audit, backup, archive),
}
"""By their tags in the document."""


def all_routes(lease_seconds_max: int) -> tuple[Route, ...]:
    """Every route, that of the document itself included."""

    async def openapi(call: Call) -> Response:
        return answer_json(text)

    own = Route("GET /openapi.json", openapi, Right.NONE, "This document.", {"type": "object"})
    tagged = {
        tag: [route for part in parts for route in getattr(part, "ROUTES", ())]
        for tag, parts in _PARTS.items()
    }
    tagged["readers"].append(readers.put_route(lease_seconds_max))
    tagged["taking"] += taking.routes(lease_seconds_max)
    tagged["broker"].append(own)
    schemas: dict[str, Schema] = {}
    for parts in _PARTS.values():
        for part in parts:
            schemas |= getattr(part, "SCHEMAS", {})
    text = document(tagged, schemas)
    return tuple(route for routes in tagged.values() for route in routes)
