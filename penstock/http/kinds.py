"""Kinds of values that the API takes, beside those of settings (`common/kinds.py`): each has its JSON Schema.

A value comes as text (path, query, header) or as JSON; `parse` and `check` judge both alike. How it fails:
`WrongValue`, which says what would be right; whoever knows where the value stood makes a problem of it.
"""

import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from penstock.common import kinds
from penstock.common.kinds import WrongValue
from penstock.http import schema
from penstock.http.schema import Schema
from penstock.model.policy import QueueNameError, check_queue_name, door_of

__all__ = [
    "OFFSET_MAX",
    "Flag",
    "Kind",
    "ListOf",
    "MapOf",
    "Number",
    "QueueName",
    "Record",
    "Seconds",
    "Text",
    "Whole",
    "Word",
    "WrongValue",
]

OFFSET_MAX: Final = (1 << 56) - 1


class Kind(kinds.Kind):
    """What a value may be."""

    @abstractmethod
    def schema(self) -> Schema: ...


@dataclass(frozen=True, slots=True)
class Whole(kinds.Whole, Kind):
    """A whole number."""

    lowest: int = 0
    highest: int = OFFSET_MAX

    def check(self, value: object) -> object:
        # To JSON, 2.0 is a whole number too.
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        return kinds.Whole.check(self, whole)

    def schema(self) -> Schema:
        return {"type": "integer", "format": "int64", "minimum": self.lowest, "maximum": self.highest}


@dataclass(frozen=True, slots=True)
class Seconds(kinds.Seconds, Kind):
    """A time, with or without a fraction."""

    def from_text(self, text: str) -> object:
        # However a program writes a number.
        number = re.fullmatch(r"-?[0-9]{1,20}(\.[0-9]{1,20})?([eE][-+]?[0-9]{1,3})?", text)
        return float(text) if number else text

    def schema(self) -> Schema:
        return {"type": "number", "minimum": self.lowest, "maximum": self.highest}


@dataclass(frozen=True, slots=True)
class Number(Seconds):
    """Something else that is counted in fractions, as a rate."""

    def wanted(self) -> str:
        return f"a number from {self.lowest:g} to {self.highest:g}"


@dataclass(frozen=True, slots=True)
class Flag(kinds.Switch, Kind):
    """Yes or no."""

    def schema(self) -> Schema:
        return schema.BOOLEAN


@dataclass(frozen=True, slots=True)
class Word(kinds.Word, Kind):
    """One word of a few."""

    def wanted(self) -> str:
        return f"one of {', '.join(self.words)}"

    def schema(self) -> Schema:
        return schema.words(*self.words)


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """A text of bounded length that fits a pattern as a whole."""

    what: str  # to put behind "use"
    characters_max: int
    pattern: str = "[^\\x00-\\x1f\\x7f]+"

    def check(self, value: object) -> object:
        if isinstance(value, str) and len(value) <= self.characters_max and re.fullmatch(self.pattern, value):
            return value
        raise self.refuse()

    def wanted(self) -> str:
        return self.what

    def schema(self) -> Schema:
        return {
            "type": "string",
            "minLength": 1,
            "maxLength": self.characters_max,
            "pattern": f"^{self.pattern}$",
        }


@dataclass(frozen=True, slots=True)
class QueueName(Kind):
    """The name of a queue; a door to dead letters is none, unless `doors` are as good."""

    doors: bool = False

    def check(self, value: object) -> object:
        if not isinstance(value, str):
            raise self.refuse()
        queue, dead = door_of(value)
        if dead and not self.doors:
            raise WrongValue(
                f"{value!r} is the door to the dead letters of {queue!r}, not a queue; look at them at "
                f"/v1/queues/{quote(queue, safe='')}/messages?state=dead"
            )
        try:
            check_queue_name(queue)
        except QueueNameError as error:
            raise WrongValue(str(error)) from None
        return value

    def wanted(self) -> str:
        return "the name of a queue"

    def schema(self) -> Schema:
        return {
            "type": "string",
            "minLength": 1,
            "maxLength": 255,
            "pattern": "^[^\\x00-\\x1f\\x7f-\\x9f]+$",
            "not": {"pattern": "(^|\\.dead)\\.dead$" if self.doors else "\\.dead$"},
            "description": "At most 255 bytes of UTF-8.",
        }


@dataclass(frozen=True, slots=True)
class ListOf(Kind):
    """A list of values of one kind. As text: separated by commas."""

    item: Kind
    items_max: int
    items_min: int = 1
    unique: bool = False

    def from_text(self, text: str) -> object:
        return [self.item.from_text(part) for part in text.split(",")]

    def check(self, value: object) -> object:
        if not isinstance(value, list) or not self.items_min <= len(value) <= self.items_max:
            raise self.refuse()
        items = [self.item.check(item) for item in value]
        if self.unique and len(set(items)) < len(items):
            raise WrongValue("an item is there twice; name each once")
        return items

    def wanted(self) -> str:
        return f"a list of {self.items_min} to {self.items_max} items"

    def schema(self) -> Schema:
        return {
            **schema.list_of(self.item.schema()),
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
            raise self.refuse()
        return {self.key.check(key): self.item.check(item) for key, item in value.items()}

    def wanted(self) -> str:
        return f"an object with 1 to {self.items_max} members"

    def schema(self) -> Schema:
        return {
            "type": "object",
            "propertyNames": self.key.schema(),
            "additionalProperties": self.item.schema(),
            "minProperties": 1,
            "maxProperties": self.items_max,
        }


@dataclass(frozen=True, slots=True)
class Record(Kind):
    """A JSON object with certain members: all of them, or with `optional` some, which may be null."""

    members: Mapping[str, Kind]
    optional: bool = False

    def check(self, value: object) -> object:
        if not isinstance(value, dict):
            raise self.refuse()
        if not self.optional and value.keys() != self.members.keys():
            raise self.refuse()
        if not value or not value.keys() <= self.members.keys():
            raise self.refuse()
        return {
            name: None if it is None and self.optional else self.members[name].check(it)
            for name, it in value.items()
        }

    def wanted(self) -> str:
        return f"an object with {'some of ' if self.optional else ''}{', '.join(self.members)}"

    def schema(self) -> Schema:
        members = {name: kind.schema() for name, kind in self.members.items()}
        if not self.optional:
            return schema.object_of(members)
        some = {name: schema.or_null(it) for name, it in members.items()}
        return {**schema.object_of(some, tuple(some)), "minProperties": 1}
