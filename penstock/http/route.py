"""Routes: what the API offers, as rows of a table.

A row says everything about a call: its path, who may do it, what it takes and what it answers. The
dispatcher (`app.py`) goes by the rows, and so does the API document (`openapi.py`): what is checked and
what is promised cannot differ.

A *kind* judges one value, whether it came as text (path, query, header) or as JSON. How it fails:
`WrongValue`, which says what would be right; whoever knows where the value stood makes a problem of it.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from penstock.model.policy import QueueNameError, check_queue_name, door_of

if TYPE_CHECKING:
    from starlette.responses import Response

    from penstock.http.app import Call

Schema = Mapping[str, Any]  # JSON Schema
Handler = Callable[["Call"], Awaitable["Response"]]

OFFSET_MAX: Final = (1 << 56) - 1
JSON_MEDIA: Final = "application/json"


class Role(IntEnum):
    """Who may do something. A higher one may do all that a lower one may."""

    ANYONE = 0
    READ = 1
    OPERATE = 2
    ADMIN = 3


class WrongValue(Exception):
    """A value that is not of its kind; the text says what would be."""


# --- Kinds ---------------------------------------------------------------------------------


class Kind:
    """What a value may be."""

    def parse(self, text: str) -> object:
        """The value that a text stands for."""
        return self.check(text)

    def check(self, value: object) -> object:
        """The value, where it is of this kind."""
        raise NotImplementedError

    def schema(self) -> Schema:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Whole(Kind):
    """A whole number."""

    lowest: int = 0
    highest: int = OFFSET_MAX

    def parse(self, text: str) -> object:
        # 17 digits hold every offset; int() is kept away from absurd inputs.
        if re.fullmatch("-?[0-9]{1,17}", text) is None:
            raise self._wrong()
        return self.check(int(text))

    def check(self, value: object) -> object:
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # to JSON, 2.0 is a whole number too
        if isinstance(value, int) and not isinstance(value, bool) and self.lowest <= value <= self.highest:
            return value
        raise self._wrong()

    def _wrong(self) -> WrongValue:
        return WrongValue(f"use a whole number from {self.lowest} to {self.highest}")

    def schema(self) -> Schema:
        return {"type": "integer", "format": "int64", "minimum": self.lowest, "maximum": self.highest}


@dataclass(frozen=True, slots=True)
class Flag(Kind):
    """Yes or no."""

    def parse(self, text: str) -> object:
        if text in ("true", "false"):
            return text == "true"
        raise WrongValue("use true or false")

    def check(self, value: object) -> object:
        if isinstance(value, bool):
            return value
        raise WrongValue("use true or false")

    def schema(self) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Word(Kind):
    """One word of a few."""

    words: tuple[str, ...]

    def check(self, value: object) -> object:
        if isinstance(value, str) and value in self.words:
            return value
        raise WrongValue(f"use one of {', '.join(self.words)}")

    def schema(self) -> Schema:
        return {"type": "string", "enum": list(self.words)}


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """A text of bounded length that fits a pattern as a whole."""

    what: str  # to put behind "use"
    characters_max: int
    pattern: str = "[^\\x00-\\x1f\\x7f]+"

    def check(self, value: object) -> object:
        if (
            isinstance(value, str)
            and len(value) <= self.characters_max
            and re.fullmatch(self.pattern, value) is not None
        ):
            return value
        raise WrongValue(f"use {self.what}")

    def schema(self) -> Schema:
        return {
            "type": "string",
            "minLength": 1,
            "maxLength": self.characters_max,
            "pattern": f"^{self.pattern}$",
        }


@dataclass(frozen=True, slots=True)
class QueueName(Kind):
    """The name of a queue; a door to dead letters is none."""

    def check(self, value: object) -> object:
        if not isinstance(value, str):
            raise WrongValue("use the name of a queue")
        queue, dead = door_of(value)
        if dead:
            raise WrongValue(
                f"{value!r} is the door to the dead letters of {queue!r}, not a queue; look at them at "
                f"/v1/queues/{quote(queue, safe='')}/messages?state=dead"
            )
        try:
            check_queue_name(value)
        except QueueNameError as error:
            raise WrongValue(str(error)) from None
        return value

    def schema(self) -> Schema:
        return {
            "type": "string",
            "minLength": 1,
            "maxLength": 255,
            "pattern": "^[^\\x00-\\x1f\\x7f-\\x9f]+$",
            "not": {"pattern": "\\.dead$"},
            "description": "At most 255 bytes of UTF-8.",
        }


@dataclass(frozen=True, slots=True)
class ListOf(Kind):
    """A list of values of one kind. As text: separated by commas."""

    item: Kind
    items_max: int
    items_min: int = 1
    unique: bool = False

    def parse(self, text: str) -> object:
        return self.check([self.item.parse(part) for part in text.split(",")])

    def check(self, value: object) -> object:
        if not isinstance(value, list) or not self.items_min <= len(value) <= self.items_max:
            raise WrongValue(f"use a list of {self.items_min} to {self.items_max} items")
        items = [self.item.check(item) for item in value]
        if self.unique and len(set(items)) < len(items):
            raise WrongValue("an item is there twice; name each once")
        return items

    def schema(self) -> Schema:
        return {
            "type": "array",
            "items": self.item.schema(),
            "minItems": self.items_min,
            "maxItems": self.items_max,
            **({"uniqueItems": True} if self.unique else {}),
        }


@dataclass(frozen=True, slots=True)
class MapOf(Kind):
    """A JSON object with keys of one kind and values of another."""

    key: Kind
    item: Kind
    items_max: int

    def check(self, value: object) -> object:
        if not isinstance(value, dict) or not 1 <= len(value) <= self.items_max:
            raise WrongValue(f"use an object with 1 to {self.items_max} members")
        return {self.key.check(key): self.item.check(item) for key, item in value.items()}

    def schema(self) -> Schema:
        return {
            "type": "object",
            "propertyNames": self.key.schema(),
            "additionalProperties": self.item.schema(),
            "minProperties": 1,
            "maxProperties": self.items_max,
        }


# --- Rows ----------------------------------------------------------------------------------


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

    method: str
    path: str  # with parameters as {name}, each one segment
    handler: Handler
    role: Role
    summary: str  # a sentence for the document
    answer: Schema | None  # of the JSON of status 200; None: see `answer_media`
    params: tuple[Param, ...] = ()
    body: Body | None = None
    problems: tuple[str, ...] = ()  # beyond those that every call can have
    answer_media: str = JSON_MEDIA  # "" where the answer has no body (204)
    answer_headers: Mapping[str, str] = field(default_factory=dict)  # name: what it says
    streams: bool = False  # the answer has no end that is known beforehand; HEAD is not offered
    tag: str = "queues"

    @property
    def segments(self) -> Sequence[str]:
        return self.path.strip("/").split("/") if self.path != "/" else []


QUEUE: Final = Param("queue", QueueName(), "the queue", "path", required=True)


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


def object_schema(properties: Mapping[str, Schema], optional: Sequence[str] = ()) -> Schema:
    """The schema of an answer: an object with these members, all there but the optional ones."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def or_null(schema: Schema) -> Schema:
    """The same, or null."""
    if "$ref" in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    words = {"enum": [*schema["enum"], None]} if "enum" in schema else {}
    return {**schema, "type": [schema["type"], "null"], **words}


def list_schema(items: Schema) -> Schema:
    return {"type": "array", "items": items}


INTEGER: Final[Schema] = {"type": "integer"}
NUMBER: Final[Schema] = {"type": "number"}
STRING: Final[Schema] = {"type": "string"}
BOOLEAN: Final[Schema] = {"type": "boolean"}
TIME: Final[Schema] = {"type": "string", "format": "date-time"}
OFFSET: Final[Schema] = {"type": "integer", "format": "int64", "minimum": 0}
