"""Sections: a pipeline's file on its way in: its variables filled in, its sections read key by key.

    ${NAME}            what the environment has under that name; without it, a mistake
    ${NAME:default}    the same, or what stands behind the colon, which may be nothing
    $${NAME}           the text ${NAME}

Names of variables have capital letters: what Spark's SQL writes alike (`${spark.x}`) is left to it.

How it fails: mistakes are gathered, and told together as `PipelineMistakes`.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final

from penstock.common.given import (
    File,
    FileKey,
    Given,
    SettingsError,
    Spot,
    check,
    hint_for,
    read_file,
    sections_of,
)
from penstock.common.kinds import Kind
from penstock.errors import PenstockError
from penstock.pipeline.kinds import ANYTHING

_VARIABLE: Final = re.compile(r"(\$?)\$\{([A-Z_][A-Z0-9_]*)(?::([^}]*))?\}")


class PipelineMistakes(PenstockError):
    """What is wrong with a file, a line for each mistake."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)


def expanded_file(path: str) -> tuple[File, list[SettingsError]]:
    """A file with its variables filled in, and those that there are none of."""
    file = read_file(path, "FILE")
    found: list[SettingsError] = []

    def missing(keys: tuple[str | int, ...], name: str) -> None:
        shown = ".".join(str(key) for key in keys if isinstance(key, str))
        spot = Spot(file.path, shown, file, keys)
        found.append(
            spot.wrong(
                f"there is no variable {name} in the environment; set it, or write a default: "
                + "${"
                + f"{name}:…}}"
            )
        )

    file.tables = _expanded(file.tables, (), missing)
    return file, found


def _expanded(
    value: Any, keys: tuple[str | int, ...], missing: Callable[[tuple[str | int, ...], str], None]
) -> Any:
    if isinstance(value, dict):
        return {name: _expanded(it, (*keys, name), missing) for name, it in value.items()}
    if isinstance(value, list):
        return [_expanded(it, (*keys, number), missing) for number, it in enumerate(value)]
    if not isinstance(value, str):
        return value

    def fill(found: re.Match[str]) -> str:
        escaped, name, default = found.groups()
        if escaped:
            return found[0][1:]
        if name not in os.environ and default is None:
            missing(keys, name)
        return os.environ.get(name, default or "")

    return _VARIABLE.sub(fill, value)


class Sections:
    """One file on its way in; gathers the mistakes."""

    def __init__(self, file: File, mistakes: list[SettingsError]) -> None:
        self._file = file
        self._mistakes = mistakes
        self._unjudged: list[str] = []

    # --- reading ---------------------------------------------------------------------------------

    def _mistake(self, spot: Spot, problem: object, said: str = "") -> None:
        self._mistakes.append(spot.wrong(problem, said))

    def _spot(self, name: str, *keys: str | int) -> Spot:
        return Spot(self._file.path, name, self._file, keys)

    def _line(self, mistake: str) -> int:
        """Where it stands; 0 for what is missing as a whole."""
        found = re.match(", line ([0-9]+)", mistake.removeprefix(self._file.path))
        return int(found[1]) if found is not None else 0

    def _absent(self, name: str) -> Spot:
        """Of something that is not there, and so has no line."""
        return Spot(self._file.path, name)

    def _some(self, name: str) -> list[tuple[Spot, dict[str, Any]]]:
        """The sections of that name, of which there may be one, [NAME], or several, [[NAME]]."""
        found = self._file.tables.get(name)
        if isinstance(found, dict):
            return [(self._spot(f"[{name}]", name), found)]
        return self._sections(name) if isinstance(found, list) else []

    def _section(
        self, spot: Spot, table: Mapping[str, Any], keys: Sequence[FileKey], others: bool = False
    ) -> dict[str, Given]:
        """What a section says, without what is wrong. `others`: other keys than these may be right."""
        known = {key.name: key for key in keys}
        given: dict[str, Given] = {}
        for name, value in table.items():
            its_spot = spot.inner(name) if spot.keys else self._spot(name, name)
            key = known.get(name)
            if key is None and others and not get_close_matches(name.lower(), known, n=1, cutoff=0.8):
                self._take(given, name, ANYTHING, value, its_spot)
            elif key is None:
                hint = hint_for(name, {it: it for it in known}, known)
                self._mistake(its_spot, f"there is no such setting; {hint}")
            else:
                self._take(given, name, key.kind, value, its_spot)
        for key in keys:
            if key.required and key.name not in table:
                self._mistake(spot, f"there is no {key.name}; add {key.name} = and {key.kind.wanted()}")
        return given

    def _take(self, given: dict[str, Given], name: str, kind: Kind, value: object, spot: Spot) -> None:
        try:
            given[name] = check(kind, value, spot)
        except SettingsError as error:
            self._mistakes.append(error)

    def _sections(self, name: str) -> list[tuple[Spot, dict[str, Any]]]:
        try:
            return sections_of(self._file, (name,), name)
        except SettingsError as error:
            self._mistakes.append(error)
            return []
