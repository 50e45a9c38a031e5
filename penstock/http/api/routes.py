"""All routes of the API, and the schemas that their answers share."""

from starlette.responses import Response

from penstock.http.api import (
    broker,
    log,
    messages,
    offsets,
    queues,
    readers,
    records,
    redrive,
    samples,
    sending,
    transactions,
)
from penstock.http.api.openapi import document
from penstock.http.app import Call, answer_json
from penstock.http.route import Role, Route, Schema

_PARTS = (
    queues,
    samples,
    sending,
    messages,
    offsets,
    log,
    records,
    redrive,
    readers,
    transactions,
    broker,
)


def all_routes(lease_seconds_max: int) -> tuple[Route, ...]:
    """Every route, that of the document itself included."""
    routes = [route for part in _PARTS for route in part.ROUTES]
    routes.append(readers.put_route(lease_seconds_max))
    schemas: dict[str, Schema] = {}
    for part in _PARTS:
        schemas |= part.SCHEMAS

    async def openapi(call: Call) -> Response:
        return answer_json(text)

    own = Route(
        "GET",
        "/openapi.json",
        openapi,
        Role.ANYONE,
        "This document.",
        {"type": "object"},
        tag="broker",
    )
    text = document([*routes, own], schemas)
    return (*routes, own)
