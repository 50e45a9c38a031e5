"""Routes: what the API offers, as rows of a table.

A row says everything about a call: its path, who may do it, what it takes and what it answers. The
dispatcher (`app.py`) goes by the rows, and so does the API document (`api/openapi.py`): what is checked and
what is promised cannot differ.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from penstock.http.kinds import Kind, QueueName, Text, Whole
from penstock.http.schema import Schema, or_null
from penstock.model.rights import Right

if TYPE_CHECKING:
    from starlette.responses import Response

    from penstock.http.app import Call

Handler = Callable[["Call"], Awaitable["Response"]]

JSON_MEDIA: Final = "application/json"


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of the path, the query or the head."""

    name: str
    kind: Kind
    help: str
    where: str = "query"  # "path", "query" or "header"
    required: bool = False
    default: object = None


@dataclass(frozen=True, slots=True)
class Field:
    """A member of a JSON body."""

    name: str
    kind: Kind
    help: str
    required: bool = False
    default: object = None


@dataclass(frozen=True, slots=True)
class Body:
    """What a call takes: media types with their schemas, or the fields of a JSON object."""

    media: Mapping[str, Schema] = field(default_factory=dict)
    fields: tuple[Field, ...] = ()
    required: bool = True
    help: str = ""

    def contents(self) -> Mapping[str, Schema]:
        return {**self.media, **({JSON_MEDIA: fields_schema(self.fields)} if self.fields else {})}


@dataclass(frozen=True, slots=True)
class Route:
    """One call of the API."""

    what: str  # a method and a path, "GET /v1/queues/{queue}"; each parameter is one segment
    handler: Handler
    right: Right  # needed with the queue in the path; where there is none, with some queue
    summary: str  # a sentence for the document
    answer: Schema | None  # of the JSON of status 200; None: see `answer_media`
    params: tuple[Param, ...] = ()
    body: Body | None = None
    problems: tuple[str, ...] = ()  # beyond those that every call can have
    answer_media: str = JSON_MEDIA  # "" where the answer has no body (204)
    other_media: Mapping[str, Schema] = field(default_factory=dict)  # that `Accept` can ask for instead
    answer_headers: Mapping[str, str] = field(default_factory=dict)  # name: what it says
    everywhere: bool = False  # the right is needed with every queue
    streams: bool = False  # the answer has no end that is known beforehand; HEAD is not offered

    method: str = field(init=False)
    path: str = field(init=False)
    segments: Sequence[str] = field(init=False)
    path_params: Sequence[Param] = field(init=False)
    query_params: Mapping[str, Param] = field(init=False)
    header_params: Sequence[Param] = field(init=False)

    def __post_init__(self) -> None:
        method, _, path = self.what.partition(" ")
        object.__setattr__(self, "method", method)
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "segments", path.strip("/").split("/") if path != "/" else [])
        # Every request looks at these.
        object.__setattr__(self, "path_params", [it for it in self.params if it.where == "path"])
        object.__setattr__(self, "query_params", {it.name: it for it in self.params if it.where == "query"})
        object.__setattr__(self, "header_params", [it for it in self.params if it.where == "header"])


QUEUE: Final = Param("queue", QueueName(), "the queue", "path", required=True)
IDENTITY: Final = Param(
    "identity",
    Text("the identity of a queue, 12 hex digits", 12, "[0-9a-f]{12}"),
    "which queue is meant: where that is deleted, another of the same name is the problem queue-deleted",
)
AFTER: Final = Param(
    "after",
    Text("the name behind which to go on", 255),
    "only names behind this one: `next` of the answer before",
)
LIMIT: Final = Param("limit", Whole(1, 10_000), "at most so many", default=1000)


def fields_schema(fields: tuple[Field, ...]) -> Schema:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            it.name: {
                # A field that may be absent may be null, and means the same.
                **(it.kind.schema() if it.required else or_null(it.kind.schema())),
                "description": it.help,
                **({} if it.default is None else {"default": it.default}),
            }
            for it in fields
        },
        "additionalProperties": False,
    }
    required = [it.name for it in fields if it.required]
    if required:
        schema["required"] = required
    return schema
