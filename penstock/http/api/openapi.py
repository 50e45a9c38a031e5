"""The API document (OpenAPI 3.1), made from the rows that the dispatcher goes by.

Nothing is written twice: a parameter's schema is its kind's, a problem's status is that of the table.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from penstock import __version__
from penstock.http.problems import MEDIA, PROBLEMS
from penstock.http.route import Param, Route
from penstock.http.schema import Schema, ref

EVERYWHERE: Final = ("bad-request", "head-too-large", "internal", "unavailable")
"""Problems that every call can have."""

WITH_RIGHT: Final = ("unauthorized", "forbidden", "too-many-guesses")
WITH_BODY: Final = ("body-too-large",)

PROBLEM_SCHEMA: Final[Schema] = {
    "type": "object",
    "description": "What went wrong (RFC 9457).",
    "properties": {
        "type": {"type": "string", "enum": [f"urn:penstock:{name}" for name in PROBLEMS]},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "Who, what, and what to do now."},
        "queue": {"type": "string"},
        "offset_start": {"type": "integer", "format": "int64"},
        "position": {
            "type": "integer",
            "description": "The character of a condition that is wrong, counted from 1.",
        },
    },
    "required": ["type", "title", "status", "detail"],
}


def document(tagged: Mapping[str, Iterable[Route]], schemas: Mapping[str, Schema]) -> dict[str, Any]:
    """The whole document: routes by their tags, and the schemas that answers refer to by name."""
    paths: dict[str, dict[str, Any]] = {}
    for tag, route in ((tag, route) for tag, routes in tagged.items() for route in routes):
        operation = _operation(route, tag)
        paths.setdefault(route.path, {})[route.method.lower()] = operation
        if route.method == "GET" and not route.streams:
            paths[route.path]["head"] = _head(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock",
            "version": __version__,
            "summary": "A durable message broker where a queue and a log are the same thing.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": {"Problem": PROBLEM_SCHEMA, **schemas},
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Needed where the broker has users or tokens.",
                }
            },
        },
    }


def _operation(route: Route, tag: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _operation_id(route),
        "summary": route.summary,
        "tags": [tag],
        "responses": _responses(route),
    }
    if route.right:
        where = " with every queue" if route.everywhere else ""
        operation["description"] = f"Needs the right {route.right.word}{where}, where the broker has users."
        operation["security"] = [{}, {"token": []}]
    if route.params:
        operation["parameters"] = [_parameter(param) for param in route.params]
    if route.body is not None:
        operation["requestBody"] = {
            "required": route.body.required,
            "content": {media: {"schema": schema} for media, schema in route.body.contents().items()},
            **({"description": route.body.help} if route.body.help else {}),
        }
    return operation


def _head(operation: Mapping[str, Any]) -> dict[str, Any]:
    """The same without bodies."""
    return {
        **operation,
        "operationId": f"{operation['operationId']}_head",
        "responses": {
            status: {key: value for key, value in response.items() if key != "content"}
            for status, response in operation["responses"].items()
        },
    }


def _operation_id(route: Route) -> str:
    words = [segment.strip("{}") for segment in route.segments if segment != "v1"]
    return "_".join([route.method.lower(), *words]).replace(".", "_").replace("-", "_")


def _parameter(param: Param) -> dict[str, Any]:
    its_schema = dict(param.kind.schema())
    if param.default is not None:
        its_schema["default"] = param.default
    parameter: dict[str, Any] = {
        "name": param.name,
        "in": param.where,
        "required": param.required,
        "description": param.help,
        "schema": its_schema,
    }
    if its_schema.get("type") == "array":
        parameter |= {"style": "form", "explode": False}
    return parameter


def _responses(route: Route) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    if not route.answer_media:
        responses["204"] = {"description": "Done."}
    else:
        content: dict[str, Any] = {} if route.answer is None else {"schema": route.answer}
        others = {media: {"schema": its_schema} for media, its_schema in route.other_media.items()}
        responses["200"] = {"description": "Done.", "content": {route.answer_media: content, **others}}
        if route.answer_headers:
            responses["200"]["headers"] = {
                name: {"description": text, "schema": {"type": "string"}}
                for name, text in route.answer_headers.items()
            }
    names = [*EVERYWHERE, *route.problems]
    if route.right:
        names += WITH_RIGHT
    if route.body is not None:
        names += WITH_BODY
    by_status: dict[int, list[str]] = {}
    for name in names:
        by_status.setdefault(PROBLEMS[name][0], []).append(name)
    for status, its_names in sorted(by_status.items()):
        titles = "; ".join(dict.fromkeys(f"{PROBLEMS[name][1]} ({name})" for name in its_names))
        responses[str(status)] = {
            "description": f"{titles}.",
            "content": {MEDIA: {"schema": ref("Problem")}},
        }
    return responses
