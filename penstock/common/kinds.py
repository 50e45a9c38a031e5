"""Kinds of values: what a value may be, how it is read from text, and how people are told.

A value from a file has its type; one from a flag or the environment is text, and `from_text` makes of it
what would stand in the file. Then `check` judges both alike, and returns the value to use.

How it fails: `WrongValue`, which says what would be right. Whoever knows where the value came from makes
an error of it that names the place.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final


class WrongValue(Exception):
    """A value that a setting cannot have; the text says what would be right."""


class Kind(ABC):
    """What a setting's values are."""

    metavar: str = ""  # what stands for a value in the command's help
    words: tuple[str, ...] = ()  # every possible value, where there are few

    def hides(self, value: object) -> bool:
        """Whether a value must not be shown, not even a wrong one."""
        return False

    def from_text(self, text: str) -> object:
        """What `text` would be in the file; the text itself where it is text there, or can be nothing."""
        return text

    @abstractmethod
    def check(self, value: object) -> object:
        """The value to use. WrongValue where it is none."""

    def parse(self, text: str) -> object:
        """The value that a text stands for."""
        return self.check(self.from_text(text))

    @abstractmethod
    def wanted(self) -> str:
        """What a value must be, to put behind the word "use"."""

    def refuse(self) -> WrongValue:
        return WrongValue(f"use {self.wanted()}")


@dataclass(frozen=True, slots=True)
class Whole(Kind):
    """A whole number."""

    lowest: int
    highest: int
    metavar: str = "N"

    def from_text(self, text: str) -> object:
        # The bound on the length keeps int() away from absurd inputs; 19 digits hold any `highest`.
        return int(text) if re.fullmatch("-?[0-9]{1,19}", text) else text

    def check(self, value: object) -> object:
        # A bool is an int to Python, but `connections-max = true` is a mistake.
        if isinstance(value, int) and not isinstance(value, bool) and self.lowest <= value <= self.highest:
            return value
        raise self.refuse()

    def wanted(self) -> str:
        return f"a whole number from {self.lowest} to {self.highest}"


@dataclass(frozen=True, slots=True)
class Seconds(Kind):
    """A time, with or without a fraction."""

    lowest: float
    highest: float
    metavar: str = "S"

    def from_text(self, text: str) -> object:
        return float(text) if re.fullmatch(r"-?[0-9]{1,10}(\.[0-9]{1,10})?", text) else text

    def check(self, value: object) -> object:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refuse()
        # "Not a number", which a file can hold, is between no two bounds.
        if not self.lowest <= value <= self.highest:
            raise self.refuse()
        return float(value)

    def wanted(self) -> str:
        return f"a number of seconds from {self.lowest} to {self.highest}"


@dataclass(frozen=True, slots=True)
class Word(Kind):
    """One word of a few."""

    words: tuple[str, ...]

    def check(self, value: object) -> object:
        if isinstance(value, str) and value in self.words:
            return value
        raise self.refuse()

    def wanted(self) -> str:
        return " or ".join(filter(None, (", ".join(self.words[:-1]), self.words[-1])))


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """Any text but an empty one: a path, a name. What it names is looked at later."""

    what: str
    metavar: str

    def check(self, value: object) -> object:
        if isinstance(value, str) and value and "\0" not in value:
            return value
        raise self.refuse()

    def wanted(self) -> str:
        return self.what


@dataclass(frozen=True, slots=True)
class Texts(Kind):
    """A list of texts, at least one. For the file only: there is no text form of it."""

    what: str

    def check(self, value: object) -> object:
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise self.refuse()

    def wanted(self) -> str:
        return self.what


@dataclass(frozen=True, slots=True)
class Fitting(Kind):
    """A text that fits a pattern as a whole."""

    what: str
    pattern: str
    metavar: str = ""

    def check(self, value: object) -> object:
        if isinstance(value, str) and re.fullmatch(self.pattern, value):
            return value
        raise self.refuse()

    def wanted(self) -> str:
        return self.what


NAME: Final = Fitting("1 to 64 letters, digits and any of . _ -", "[A-Za-z0-9._-]{1,64}")
"""A name that somebody gives to something of the settings: it must look well in a log line."""


@dataclass(frozen=True, slots=True)
class Switch(Kind):
    """Yes or no. As a flag it can stand alone, for yes."""

    words: tuple[str, ...] = ("true", "false")

    def from_text(self, text: str) -> object:
        return {"true": True, "false": False}.get(text, text)

    def check(self, value: object) -> object:
        if isinstance(value, bool):
            return value
        raise self.refuse()

    def wanted(self) -> str:
        return "true or false"
