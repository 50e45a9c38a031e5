"""JSON Schema, as the API document shows it: the pieces that kinds, bodies and answers are described with."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

Schema = Mapping[str, Any]

INTEGER: Final[Schema] = {"type": "integer"}
NUMBER: Final[Schema] = {"type": "number"}
STRING: Final[Schema] = {"type": "string"}
BOOLEAN: Final[Schema] = {"type": "boolean"}
TIME: Final[Schema] = {"type": "string", "format": "date-time"}
COUNT: Final[Schema] = {"type": "integer", "format": "int64", "minimum": 0}
OFFSET: Final = COUNT
IDENTITY: Final[Schema] = {
    "type": "string",
    "pattern": "^[0-9a-f]{12}$",
    "description": "What the ids of its messages begin with. Deleted and made again, a queue has another.",
}
POSITIVE: Final[Schema] = {"type": "number", "minimum": 0}
"""A rate, or seconds."""


def said(schema: Schema, text: str) -> Schema:
    """The same with a description."""
    return {**schema, "description": text}


def words(*choices: str) -> Schema:
    return {"type": "string", "enum": list(choices)}


def ref(name: str) -> Schema:
    """One of the schemas that answers share."""
    return {"$ref": f"#/components/schemas/{name}"}


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def object_of(properties: Mapping[str, Schema], optional: Sequence[str] = ()) -> Schema:
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
    choices = {"enum": [*schema["enum"], None]} if "enum" in schema else {}
    return {**schema, "type": [schema["type"], "null"], **choices}
