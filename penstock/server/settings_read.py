"""Reading the settings of `penstock serve`: flags, environment, file, and what they add up to.

A flag beats the environment, the environment beats the file, the file beats the default. The names and
kinds are in `settings.py`; what only a file can say (`[[listener]]`, `[queue."…"]`) is read here too.

Rules that always hold:
  * Every value that is given is checked, also one that another source overrules.
  * Nothing is read but the namespace and the mapping that are passed in, and the one file they name.
  * Reading twice gives equal settings as long as the sources are the same: that is all a reload is.

How it fails: `SettingsError`, one line. A name that does not exist is an error in every source, so that
a misspelt setting cannot go unnoticed.
"""

import argparse
import re
import tomllib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import combinations
from operator import attrgetter
from reprlib import Repr
from typing import Any, NamedTuple

from penstock.broker.policy import Policies, PolicyError, QueueNameError, QueuePolicy, check_queue_name
from penstock.engines.log.state import LogSettings
from penstock.server.address import addresses_clash
from penstock.server.settings import (
    CONFIG_FLAG,
    CONFIG_VARIABLE,
    LISTENER_KEYS,
    PROTOCOLS,
    SECTIONS,
    TABLE,
    Kind,
    Limits,
    Listener,
    Setting,
    Settings,
    SettingsError,
    WrongValue,
)

_NOT_OURS = re.compile(
    "PENSTOCK_("
    "URL"  # of the other commands
    "|TEST_.*"  # of our own tests
    # What Kubernetes and Docker tell every container about a service whose name begins with `penstock`.
    "|(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
    ")"
)
"""Variables that look like settings and are none of ours to judge."""

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 100


# --- The command line ----------------------------------------------------------------------


class _Offered(tuple[str, ...]):
    """Words that help and completion offer. argparse lets everything else pass too: it would answer with the
    whole usage, where `load` answers with one line, the same for all three sources.
    """

    __slots__ = ()

    def __contains__(self, _value: object) -> bool:
        return True


_GROUPS = {
    "": ("settings", "Each is a key of the file too, and a variable: --sspq-queue is sspq-queue and PENSTOCK_SSPQ_QUEUE."),
    "limits": ("limits", "What clients can make the broker hold; [limits] in the file."),
    "log": ("log", "How the embedded log keeps its files; [log] in the file."),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a flag for every setting, and `--config`."""
    parser.add_argument(
        CONFIG_FLAG, metavar="FILE", help=f"settings in TOML (or {CONFIG_VARIABLE}); flag beats variable beats file"
    )
    for section, settings in SECTIONS.items():
        group = parser.add_argument_group(*_GROUPS[section])
        for setting in settings:
            group.add_argument(
                setting.flag,
                dest=setting.dest,
                metavar=setting.kind.metavar or None,
                choices=_Offered(setting.kind.words) if setting.kind.words else None,
                help=f"{setting.help} (default: {setting.default})".replace("%", "%%"),
            )


# --- The file ------------------------------------------------------------------------------


class _File:
    """What a file says, and where it says it."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.tables: dict[str, Any] = tomllib.loads(text)  # Any: judged value by value
        self._lines = text.split("\n")  # not splitlines(): TOML knows fewer line ends than Python

    def place(self, *keys: str | int) -> str:
        """Where the statement begins that gives `keys` (names, and positions in lists) their value.

        tomllib tells no positions. But the lines before a statement are a TOML document too, and whether
        such a document has the keys can be asked; once it has, every longer one has. So the statement is
        found by halving.
        """

        def has_with(line_count: int) -> bool:
            while True:
                try:
                    found: Any = tomllib.loads("\n".join(self._lines[:line_count]) + "\n")
                except tomllib.TOMLDecodeError:  # ends within a statement of several lines: go on to its end
                    line_count += 1
                else:
                    break
            for key in keys:
                if isinstance(found, list) if isinstance(key, int) else isinstance(found, dict):
                    try:
                        found = found[key]
                    except LookupError:
                        return False
                else:
                    return False
            return True

        line = bisect_left(range(1, len(self._lines) + 1), True, key=has_with) + 1
        return f"{self.path}, line {line}"


def _read_file(path: str, named_by: str) -> _File:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return _File(path, file.read())
    except OSError as error:
        raise SettingsError(
            f"{named_by}: {path!r} cannot be read ({error.strerror}); name a file with settings"
        ) from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:  # ValueError: TOMLDecodeError, and numbers beyond all measure
        raise SettingsError(f"{path}: this is not TOML: {error}") from None


# --- What is given -------------------------------------------------------------------------


class _Given(NamedTuple):
    """A value that was checked, and where it stands, for whoever finds later that it does not fit."""

    value: Any  # of every kind; the dataclasses that it goes into name the type
    place: str
    name: str  # as it is called there

    def wrong(self, problem: object) -> SettingsError:
        return SettingsError(f"{self.place}: {self.name}: {problem}")


def _check(kind: Kind, value: object, place: str, name: str) -> _Given:
    try:
        return _Given(kind.check(value), place, name)
    except WrongValue as error:
        shown = str(value).lower() if isinstance(value, bool) else _SHORT.repr(value)
        raise SettingsError(f"{place}: {name} = {shown}: {error}") from None


def _check_in_file(kind: Kind, value: object, place: str, name: str) -> _Given:
    try:
        return _check(kind, value, place, name)
    except SettingsError as error:
        if isinstance(value, str) and not isinstance(kind.from_text(value), str):
            raise SettingsError(f"{error}, without quotes") from None
        raise


def _given(args: argparse.Namespace, environ: Mapping[str, str], file: _File | None) -> dict[str, _Given]:
    """The value of every setting, by its label: the default, and what the sources lay over it."""
    given = {setting.label: _check(setting.kind, setting.default, "default", setting.label) for setting in TABLE}
    if file is not None:
        given.update(_given_in_file(file))
    by_variable = {setting.variable: setting for setting in TABLE}
    for variable, text in environ.items():
        if not variable.startswith("PENSTOCK_") or variable == CONFIG_VARIABLE or _NOT_OURS.fullmatch(variable):
            continue
        setting = by_variable.get(variable)
        if setting is None:
            hint = _hint(variable.upper(), {name: name for name in by_variable})
            raise SettingsError(f"environment: there is no setting {variable}: {hint}")
        # Whoever passes variables on (compose files, units) writes an empty one for one that is not set.
        if text:
            value = setting.kind.from_text(text)
            given[setting.label] = _check(setting.kind, value, "environment", variable)
    for setting in TABLE:
        text = getattr(args, setting.dest, None)
        if text is not None:
            value = setting.kind.from_text(text)
            given[setting.label] = _check(setting.kind, value, "command line", setting.flag)
    return given


def _given_in_file(file: _File) -> Iterator[tuple[str, _Given]]:
    """The settings of the table that the file gives, and an error for everything that it should not."""
    for key, value in file.tables.items():
        if key in ("listener", "queue"):
            continue
        if key == "http" and isinstance(value, dict):
            raise SettingsError(f"{file.place(key)}: [http]: this version has no HTTP API yet; leave it out")
        if key and key in SECTIONS:
            if not isinstance(value, dict):
                raise SettingsError(f"{file.place(key)}: {key} is a section; begin it with [{key}]")
            for name, inner in value.items():
                yield _given_by_key(file, (key, name), inner)
        else:
            yield _given_by_key(file, ("", key), value)


def _given_by_key(file: _File, path: tuple[str, str], value: object) -> tuple[str, _Given]:
    section, name = path
    place = file.place(*filter(None, path))
    for setting in SECTIONS[section]:
        if setting.name == name:
            return setting.label, _check_in_file(setting.kind, value, place, setting.label)
    raise SettingsError(
        f"{place}: there is no setting {_SHORT.repr(name)}{f' in [{section}]' if section else ''}:"
        f" {_hint_in_file(section, name)}"
    )


def _hint_in_file(section: str, name: str) -> str:
    """The nearest name of the same section, else of any other: keys are often put under the wrong header."""
    here = {setting.name: setting.label for setting in SECTIONS[section]}
    everywhere = {"listener": "[[listener]]", "queue": '[queue."PATTERN"]'}
    for setting in TABLE:
        everywhere |= {setting.section: f"[{setting.section}]", setting.name: setting.label}
        everywhere |= {setting.dest.replace("_", "-"): setting.label}
    for known, wanted in ((here, name), (everywhere, name), (everywhere, f"{section}-{name}")):
        near = _nearest(wanted, known)
        if near in known:
            label = known[near]
            above = bool(section) and not label.startswith("[")
            return f"did you mean {label}{', above the first [section]' if above else ''}?"
    return _hint(name, here)


def _nearest(name: str, known: Iterable[str]) -> str:
    return next(iter(get_close_matches(name.replace("_", "-").lower(), known, n=1, cutoff=0.75)), "")
