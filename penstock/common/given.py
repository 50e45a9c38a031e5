"""What was given as a setting, and where it stands: the file with its lines, and a spot for every value.

Whoever reads settings gets values here that were checked, each with
its `Spot`, so that a rule that joins several of them can still say which line is to blame.

Rules that always hold:
  * A value that must not be shown (a token) is in no error, whatever is wrong with it.
  * A line is looked for only when it has to be told: a file without mistakes is parsed once.

How it fails: `SettingsError`, one line: the source, the line, the name, what is wrong, what would be right.
"""

import re
import tomllib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from reprlib import Repr
from typing import Any, Final, NamedTuple

from penstock.common.kinds import Kind, WrongValue
from penstock.errors import PenstockError

_SHORT: Final = Repr()
_SHORT.maxstring = _SHORT.maxother = 100
_SHORT.maxdict = 0  # a table where none belongs may be one that holds a token

_HTTP_TWICE: Final = re.compile(
    r"^[ \t]*http[ \t]*=.*^[ \t]*(\[{1,2}[ \t]*)?http[ \t]*[.\]]", re.DOTALL | re.MULTILINE
)
"""`http = "ADDR"`, and after it `[http]`, `[[http.tokens]]` or `http.NAME`."""

_TLS_NEEDS: Final = (
    ("tls-certificate", "tls-key"),
    ("tls-key", "tls-certificate"),
    ("tls-client-ca", "tls-certificate"),
)


class SettingsError(PenstockError, ValueError):
    """A setting that cannot be used: one line with its name, where it stands, and what would be right."""


# --- The file ------------------------------------------------------------------------------


class File:
    """What a file says, and where it says it."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.tables: dict[str, Any] = tomllib.loads(text)  # Any: judged value by value
        self._lines = text.split("\n")  # not splitlines(): TOML knows fewer line ends than Python

    def line_of(self, keys: tuple[str | int, ...]) -> int:
        """The line where the statement begins that gives `keys` (names, and positions in lists) a value.

        tomllib tells no positions. But the lines before any statement are a document too, one that has the
        keys or has not, and once one has them every longer one has. So the statement is found by halving.
        """
        return bisect_left(range(1, len(self._lines) + 1), True, key=lambda end: self._has(keys, end)) + 1

    def _has(self, keys: tuple[str | int, ...], line_count: int) -> bool:
        """Whether the first lines hold the keys; a statement that is cut is taken whole."""
        while True:
            try:
                found: Any = tomllib.loads("\n".join(self._lines[:line_count]) + "\n")
                break
            except tomllib.TOMLDecodeError:
                line_count += 1  # ends with the whole file at the latest, which was read before
        for key in keys:
            try:
                found = found[key]
            except LookupError:
                return False
        return True


def read_file(path: str, named_by: str) -> File:
    """The file at `path`; `named_by` is what to blame where there is none."""
    text = ""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read()
        return File(path, text)
    except OSError as error:
        raise SettingsError(
            f"{named_by} = {path!r}: cannot be read ({error.strerror}); name a file that can"
        ) from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:  # a ValueError: wrong TOML, or a number beyond measure
        # Of the two forms of one setting TOML itself allows one, and says of the other nothing of use.
        hint = "; with [http], write http = as address = under it" if _HTTP_TWICE.search(text) else ""
        raise SettingsError(f"{path}: this is not TOML: {error}{hint}") from None


# --- What is given, and where --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a value stands and what it is called there. A line is looked for only when it has to be told."""

    source: str  # "default", "environment", "command line", or the path of the file
    name: str
    file: File | None = None
    keys: tuple[str | int, ...] = ()

    def inner(self, key: str) -> "Spot":
        """Of a key in the section that this is the spot of."""
        return Spot(self.source, f"{self.name} {shown_key(key)}", self.file, (*self.keys, key))

    def wrong(self, problem: object, said: str = "") -> SettingsError:
        line = f", line {self.file.line_of(self.keys)}" if self.file is not None else ""
        return SettingsError(f"{self.source}{line}: {self.name}{said}: {problem}")


class Given(NamedTuple):
    """A value that was checked, and where it stands, for whoever finds later that it does not fit."""

    value: Any  # of every kind; the dataclasses that it goes into name the type
    spot: Spot


def shown_key(key: str) -> str:
    """A key that somebody made up, fit for one line."""
    return key if re.fullmatch("[A-Za-z0-9_-]{1,100}", key) else _SHORT.repr(key)


def check(kind: Kind, value: object, spot: Spot) -> Given:
    """The value that `kind` makes of what stands at `spot`."""
    try:
        return Given(kind.check(value), spot)
    except WrongValue as error:
        quoted = spot.file is not None and isinstance(value, str) and kind.from_text(value) is not value
        shown = str(value).lower() if isinstance(value, bool) else _SHORT.repr(value)
        said = "" if kind.hides(value) else f" = {shown}"
        raise spot.wrong(f"{error}{', without quotes' if quoted else ''}", said) from None


def hint_for(name: str, known: Mapping[str, str], otherwise: Iterable[str]) -> str:
    """What to write instead of a name that does not exist; `known` is names and how to show them."""
    near = get_close_matches(name, known, n=1)
    return f"did you mean {known[near[0]]}?" if near else f"use one of {', '.join(otherwise)}"


# --- Sections that only a file can have ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileKey:
    """What a section can say that only the file can have. The field has the same name with underscores."""

    name: str
    kind: Kind
    help: str
    required: bool = False


def sections_of(file: File, path: tuple[str, ...], name: str) -> list[tuple[Spot, dict[str, Any]]]:
    """The sections that each begin with [[NAME]], with their spots; `path` leads to them."""
    found: Any = file.tables
    for key in path:
        found = found.get(key, []) if isinstance(found, dict) else []
    if not isinstance(found, list) or not all(isinstance(section, dict) for section in found):
        raise Spot(file.path, ".".join(path), file, path).wrong(f"begin each one with [[{name}]]")
    return [
        (Spot(file.path, f"[[{name}]] {number + 1}", file, (*path, number)), section)
        for number, section in enumerate(found)
    ]


def read_section(spot: Spot, section: Mapping[str, Any], keys: Sequence[FileKey]) -> dict[str, Given]:
    """What the section at `spot` says, by name: each of `keys` at most once, and those that it must say."""
    known = {key.name: key for key in keys}
    given = {}
    for name, value in section.items():
        if name not in known:
            hint = hint_for(name.lower().replace("_", "-"), {key: key for key in known}, known)
            raise spot.inner(name).wrong(f"there is no such setting; {hint}")
        given[name] = check(known[name].kind, value, spot.inner(name))
    for name, key in known.items():
        if key.required and name not in given:
            raise spot.wrong(f"there is no {name}; add {name} = and {key.kind.wanted()}")
    return given


def check_tls(given: Mapping[str, Given]) -> None:
    """The files of TLS come together or not at all."""
    for name, needed in _TLS_NEEDS:
        if name in given and needed not in given:
            raise given[name].spot.wrong(f"it needs {needed} beside it; add that")
