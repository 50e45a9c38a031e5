"""Kinds of values in a pipeline's file, beside those of the broker's settings (`server/setting_kinds.py`).

How it fails: `WrongValue`, which says what would be right.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.common.kinds import Fitting, Kind, WrongValue
from penstock.pipeline.ddl import WrongSchema, read_ddl
from penstock.pipeline.model import Watermark
from penstock.spark.options import STREAM, Option, WrongOption

ONCE: Final = "once"

_UNITS: Final = "microsecond|millisecond|second|minute|hour|day|week"
_INTERVAL: Final = re.compile(rf"\s*[0-9]+\s+(?:{_UNITS})s?(?:\s+[0-9]+\s+(?:{_UNITS})s?)*\s*", re.IGNORECASE)
"""Intervals without months, whose length differs: neither a trigger nor a watermark can have those."""

_INTERVAL_WORDS: Final = "a number and a unit, as in 10 seconds or 1 hour 30 minutes"


def _is_interval(text: str) -> bool:
    return _INTERVAL.fullmatch(text) is not None and re.search("[1-9]", text) is not None


class Trigger(Kind):
    """How often: an interval, or `once`."""

    def check(self, value: object) -> object:
        if isinstance(value, str) and (value.strip().lower() == ONCE or _is_interval(value)):
            return " ".join(value.split()).lower()
        raise self.refuse()

    def wanted(self) -> str:
        return f"{_INTERVAL_WORDS}, or {ONCE}"


class WatermarkKind(Kind):
    """A column, and how late its times may come."""

    def check(self, value: object) -> object:
        if isinstance(value, str):
            column, comma, delay = value.rpartition(",")
            if comma and column.strip() and _is_interval(delay):
                return Watermark(column.strip(), " ".join(delay.split()).lower())
        raise self.refuse()

    def wanted(self) -> str:
        return f"a column, a comma, and {_INTERVAL_WORDS}: timestamp, 5 minutes"


VIEW_NAME: Final = Fitting(
    "a letter and up to 63 letters, digits and _, as SQL takes them", "[A-Za-z_][A-Za-z0-9_]{0,63}"
)


_SCHEMA_SPACE: Final = re.compile(
    r"""(`[^`]*`|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?:\s|--[^\n]*|/\*.*?\*/)+""", re.DOTALL
)
"""What is between the words of a schema, comments too; in quotes nothing is."""


class SchemaKind(Kind):
    """Columns as Spark's SQL writes them. Only the text is kept: whoever needs its columns reads it again."""

    def check(self, value: object) -> object:
        if not isinstance(value, str):
            raise self.refuse()
        text = _SCHEMA_SPACE.sub(lambda found: found[1] or " ", value).strip()
        try:
            read_ddl(text)
        except WrongSchema as error:
            raise WrongValue(str(error)) from None
        return text

    def wanted(self) -> str:
        return "columns as Spark's SQL writes them: id bigint, region string"


class Columns(Kind):
    """Names of columns, in a list or with commas."""

    def check(self, value: object) -> object:
        names = value.split(",") if isinstance(value, str) else value
        if isinstance(names, list) and names and all(isinstance(it, str) and it.strip() for it in names):
            return tuple(it.strip() for it in names)
        raise self.refuse()

    def wanted(self) -> str:
        return 'names of columns: ["region", "day"]'


class Sql(Kind):
    """SQL: that it is there. Whether it is right, only Spark can tell."""

    def check(self, value: object) -> object:
        if isinstance(value, str) and value.strip():
            return value.strip().rstrip(";")
        raise self.refuse()

    def wanted(self) -> str:
        return "a query: select … from input"


class Table(Kind):
    """A table of its own, which somebody else reads."""

    def check(self, value: object) -> object:
        if isinstance(value, dict):
            return value
        raise self.refuse()

    def wanted(self) -> str:
        return "a table of its own"


class Texts(Kind):
    """A table of names and plain values, as texts; tables in it are names with dots."""

    def check(self, value: object) -> object:
        if not isinstance(value, dict):
            raise self.refuse()
        return dict(self._flat(value, ""))

    def _flat(self, table: Mapping[str, object], before: str) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for name, value in table.items():
            if isinstance(value, dict):
                found += self._flat(value, f"{before}{name}.")
            else:
                found.append((before + name, text_of(value)))
        return found

    def wanted(self) -> str:
        return "a table of names and values"


class Conf(Texts):
    """Settings of Spark. `spark.` may be left out, as TOML makes it easy to."""

    def check(self, value: object) -> object:
        found = super().check(value)
        assert isinstance(found, dict)
        return {name if name.startswith("spark.") else f"spark.{name}": text for name, text in found.items()}

    def wanted(self) -> str:
        return 'settings of Spark: {"spark.sql.shuffle.partitions" = 8}'


@dataclass(frozen=True)
class OptionKind(Kind):
    """An option of the source or the sink `penstock`, which its own table judges. The text is kept."""

    option: Option

    def hides(self, value: object) -> bool:
        # In a URL, what stands before the @ may be a password.
        return self.option.name == "token" or (self.option.name in ("engine", "url") and "@" in str(value))

    def check(self, value: object) -> object:
        why_not = (self.option.refused or {}).get(STREAM)
        if why_not is not None:
            raise WrongValue(f"it is not for a pipeline: {why_not}")
        text = text_of(value)
        try:
            self.option.parse(text)
        except WrongOption as error:
            raise WrongValue(str(error)) from None
        return text

    def wanted(self) -> str:
        return f"a value of the option {self.option.name}"


def text_of(value: object) -> str:
    """A plain value as Spark's options take it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        for item in value:
            if "," in item:
                raise WrongValue(
                    f"{item!r} has a comma in it, which would make two of it; queues with such names are "
                    "read with subscribePattern"
                )
        return ",".join(value)
    if isinstance(value, dict) and all(type(item) in (str, int) for item in value.values()):
        return json.dumps(value)
    if isinstance(value, str | int | float):
        return str(value)
    raise WrongValue("use a text, a number, or true or false")


class Anything(Kind):
    """An option that somebody else judges, as a text."""

    def check(self, value: object) -> object:
        return text_of(value)

    def wanted(self) -> str:
        return "a text, a number, or true or false"


class Rows(Kind):
    """Rows by the name of a view: tables, and where they are payloads, texts."""

    def __init__(self, payloads: bool) -> None:
        self._kinds: tuple[type, ...] = (dict, str) if payloads else (dict,)

    def check(self, value: object) -> object:
        if isinstance(value, dict) and all(
            isinstance(rows, list) and all(isinstance(row, self._kinds) for row in rows)
            for rows in value.values()
        ):
            return value
        raise self.refuse()

    def wanted(self) -> str:
        return "rows by the name of a view: orders = [{id = 1}, {id = 2}]"


class Counts(Kind):
    """Numbers by name."""

    def check(self, value: object) -> object:
        if isinstance(value, dict) and all(type(it) is int for it in value.values()):
            return value
        raise self.refuse()

    def wanted(self) -> str:
        return "numbers by the name of an expectation: {paid = 2}"


def place_of(path: str) -> str:
    """A path as only this place is written: `out/a/`, `./out/a` and `file:///…/out/a` are one."""
    scheme, colon, rest = path.partition(":")
    if colon and scheme != "file":
        return path.rstrip("/")
    return os.path.abspath(re.sub("^/+", "/", rest) if colon else path)


ANYTHING: Final = Anything()
