"""All routes of the API, and the schemas that their answers share."""

from starlette.responses import Response

from penstock.http import (
    api_dead,
    api_log,
    api_messages,
    api_offsets,
    api_queues,
    api_readers,
    api_records,
    api_samples,
    api_sending,
    api_stages,
    api_state,
)
from penstock.http.app import Call, answer_json
from penstock.http.openapi import document
from penstock.http.route import Role, Route, Schema

_PARTS = (
    api_queues,
    api_samples,
    api_sending,
    api_messages,
    api_offsets,
    api_log,
    api_records,
    api_dead,
    api_readers,
    api_stages,
    api_state,
)


def all_routes(lease_seconds_max: int) -> tuple[Route, ...]:
    """Every route, that of the document itself included."""
    routes = [route for part in _PARTS for route in part.ROUTES]
    routes.append(api_readers.put_route(lease_seconds_max))
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
