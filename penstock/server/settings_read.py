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
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import combinations
from operator import attrgetter
from reprlib import Repr
from typing import Any, Final, NamedTuple

from penstock.broker.policy import Policies, PolicyError, QueueNameError, QueuePolicy, check_queue_name
from penstock.engines.log.state import LogSettings
from penstock.server.address import addresses_clash
from penstock.server.setting_kinds import Kind, WrongValue
from penstock.server.settings import (
    CONFIG_FLAG,
    CONFIG_VARIABLE,
    LISTENER_KEYS,
    PROTOCOLS,
    SECTIONS,
    TABLE,
    Limits,
    Listener,
    Settings,
    SettingsError,
)

_PREFIX: Final = "PENSTOCK_"
_NOT_SETTINGS: Final = re.compile(
    "PENSTOCK_("
    "CONFIG"  # names the file
    "|URL"  # of the other commands
    "|TEST_.*"  # of our own tests
    # What Kubernetes and Docker tell every container about a service whose name begins with `penstock`.
    "|(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
    ")"
)
"""Variables that begin like a setting and are none."""

_FILE_ONLY: Final = {"listener": "[[listener]]", "queue": '[queue."PATTERN"]'}

_TLS_NEEDS: Final = (
    ("tls-certificate", "tls-key"),
    ("tls-key", "tls-certificate"),
    ("tls-client-ca", "tls-certificate"),
)

_SHORT: Final = Repr()
_SHORT.maxstring = _SHORT.maxother = 100


# --- The command line ----------------------------------------------------------------------


class _Offered(tuple[str, ...]):
    """Words that help and completion offer; argparse lets everything else pass too.

    On its own it would answer a wrong word with the whole usage. `load` answers with one line, the same for
    all three sources.
    """

    __slots__ = ()

    def __contains__(self, _value: object) -> bool:
        return True


_GROUPS: Final = {
    "": ("settings", "In the file, --sspq-queue is sspq-queue; in the environment, PENSTOCK_SSPQ_QUEUE."),
    "limits": ("limits", "What clients can make the broker hold; in the file, these are keys of [limits]."),
    "log": ("log", "How the embedded log keeps its files; in the file, these are keys of [log]."),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a flag for every setting, and `--config`."""
    parser.add_argument(
        CONFIG_FLAG,
        metavar="FILE",
        help=f"a file with settings, in TOML (or {CONFIG_VARIABLE}); flags and variables beat it",
    )
    for section, settings in SECTIONS.items():
        group = parser.add_argument_group(*_GROUPS[section])
        for setting in settings:
            group.add_argument(
                setting.flag,
                dest=setting.dest,
                metavar=setting.kind.metavar or None,
                choices=_Offered(setting.kind.words) if setting.kind.words else None,
                help=f"{setting.help} (default: {setting.default})",
            )


# --- The file ------------------------------------------------------------------------------


class _File:
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


def _read_file(path: str, named_by: str) -> _File:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return _File(path, file.read())
    except OSError as error:
        raise SettingsError(
            f"{named_by} = {path!r}: cannot be read ({error.strerror}); name a file that can"
        ) from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:  # a ValueError: wrong TOML, or a number beyond measure
        raise SettingsError(f"{path}: this is not TOML: {error}") from None


# --- What is given, and where --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where a value stands and what it is called there. A line is looked for only when it has to be told."""

    source: str  # "default", "environment", "command line", or the path of the file
    name: str
    file: _File | None = None
    keys: tuple[str | int, ...] = ()

    def wrong(self, problem: object, said: str = "") -> SettingsError:
        line = f", line {self.file.line_of(self.keys)}" if self.file is not None else ""
        return SettingsError(f"{self.source}{line}: {self.name}{said}: {problem}")


class _Given(NamedTuple):
    """A value that was checked, and where it stands, for whoever finds later that it does not fit."""

    value: Any  # of every kind; the dataclasses that it goes into name the type
    spot: _Spot


def _shown(key: str) -> str:
    """A key that somebody made up, fit for one line."""
    return key if re.fullmatch("[A-Za-z0-9_-]{1,100}", key) else _SHORT.repr(key)


def _check(kind: Kind, value: object, spot: _Spot) -> _Given:
    try:
        return _Given(kind.check(value), spot)
    except WrongValue as error:
        quoted = spot.file is not None and isinstance(value, str) and kind.from_text(value) is not value
        shown = str(value).lower() if isinstance(value, bool) else _SHORT.repr(value)
        raise spot.wrong(f"{error}{', without quotes' if quoted else ''}", f" = {shown}") from None


def _hint(name: str, known: Mapping[str, str], otherwise: Iterable[str]) -> str:
    """What to write instead of a name that does not exist; `known` is names and how to show them."""
    near = get_close_matches(name, known, n=1)
    return f"did you mean {known[near[0]]}?" if near else f"use one of {', '.join(otherwise)}"


def _given(args: argparse.Namespace, environ: Mapping[str, str], file: _File | None) -> dict[str, _Given]:
    """The value of every setting, by its label: the default, and what the sources lay over it."""
    given = {s.label: _check(s.kind, s.default, _Spot("default", s.label)) for s in TABLE}
    if file is not None:
        given.update(_given_in_file(file))
    variables = {setting.variable: setting for setting in TABLE}
    for variable, text in environ.items():
        if not variable.startswith(_PREFIX) or _NOT_SETTINGS.fullmatch(variable):
            continue
        spot = _Spot("environment", _shown(variable))
        if variable not in variables:
            known = {name.removeprefix(_PREFIX): name for name in variables}
            hint = _hint(variable.removeprefix(_PREFIX).upper(), known, variables)
            raise spot.wrong(f"there is no such setting; {hint}")
        # Whoever passes variables on (a compose file, a unit) writes an empty one for one that is not set.
        if text:
            setting = variables[variable]
            given[setting.label] = _check(setting.kind, setting.kind.from_text(text), spot)
    for setting in TABLE:
        by_flag: str | None = getattr(args, setting.dest, None)
        if by_flag is not None:
            spot = _Spot("command line", setting.flag)
            given[setting.label] = _check(setting.kind, setting.kind.from_text(by_flag), spot)
    return given


def _given_in_file(file: _File) -> Iterator[tuple[str, _Given]]:
    """The settings of the table that the file gives, and an error for everything that it should not."""
    for key, value in file.tables.items():
        if key in _FILE_ONLY:
            continue
        name = _shown(key)
        spot = _Spot(file.path, f"[{name}]" if isinstance(value, dict) else name, file, (key,))
        if key == "http" and isinstance(value, dict):
            raise spot.wrong("this version has no HTTP API yet; leave it out")
        if not key or key not in SECTIONS:
            yield _given_by_key(spot, "", key, value)
        elif isinstance(value, dict):
            for inner_key, inner in value.items():
                spot = _Spot(file.path, f"[{key}] {_shown(inner_key)}", file, (key, inner_key))
                yield _given_by_key(spot, key, inner_key, inner)
        else:
            raise spot.wrong(f"it is a section; begin it with [{key}]")


def _given_by_key(spot: _Spot, section: str, name: str, value: object) -> tuple[str, _Given]:
    for setting in SECTIONS[section]:
        if setting.name == name:
            return setting.label, _check(setting.kind, value, spot)
    raise spot.wrong(f"there is no such setting; {_hint_in_file(section, name)}")


def _hint_in_file(section: str, name: str) -> str:
    """A near name of any section, since keys get under the wrong header; of two, that of the same section."""
    here = {setting.name: setting.label for setting in SECTIONS[section]}
    known = {key: f"[{key}]" for key in SECTIONS if key} | _FILE_ONLY
    for setting in TABLE:
        label = (
            f"{setting.label} above the first [section]" if section and not setting.section else setting.label
        )
        known |= {setting.name: label, setting.dest.replace("_", "-"): label}
    name = name.lower().replace("_", "-")
    # `level` under [log] can mean nothing but log-level.
    longer = f"{section}-{name}"
    return _hint(longer if longer in known else name, known | here, here.values())


# --- What only a file can say --------------------------------------------------------------


def _listeners_in_file(file: _File, limits: Limits) -> Iterator[tuple[Listener, _Spot]]:
    sections = file.tables.get("listener", [])
    if not isinstance(sections, list) or not all(isinstance(section, dict) for section in sections):
        raise _Spot(file.path, "listener", file, ("listener",)).wrong("begin each one with [[listener]]")
    for number, section in enumerate(sections):
        spot = _Spot(file.path, f"[[listener]] {number + 1}", file, ("listener", number))
        yield _listener(spot, section, limits), spot


def _listener(spot: _Spot, section: dict[str, Any], limits: Limits) -> Listener:
    keys = {key.name: key for key in LISTENER_KEYS}
    given = {}
    for name, value in section.items():
        its_spot = _Spot(spot.source, f"{spot.name} {_shown(name)}", spot.file, (*spot.keys, name))
        if name not in keys:
            hint = _hint(name.lower().replace("_", "-"), {key: key for key in keys}, keys)
            raise its_spot.wrong(f"there is no such setting; {hint}")
        given[name] = _check(keys[name].kind, value, its_spot)
    for name, key in keys.items():
        if key.required and name not in given:
            raise spot.wrong(f"there is no {name}; add {name} = and {key.kind.wanted()}")
    protocol = given["protocol"].value
    for name, it in given.items():
        if protocol not in keys[name].protocols:
            theirs = " and ".join(keys[name].protocols)
            raise it.spot.wrong(f"it is for {theirs} listeners, and this one is {protocol}; leave it out")
    for name, needed in _TLS_NEEDS:
        if name in given and needed not in given:
            raise given[name].spot.wrong(f"it needs {needed} beside it; add that")
    for name in given.keys() & {"queue", "queues"}:
        _check_queue_names(given[name], limits)
    values = {name.replace("-", "_"): it.value for name, it in given.items()}
    return Listener(**values, setting=spot.name, place=spot.source)


def _check_queue_names(given: _Given, limits: Limits) -> None:
    """One name, or patterns of names: what no queue can be called stands for no queue either."""
    for name in given.value if isinstance(given.value, tuple) else (given.value,):
        try:
            check_queue_name(name, limits.queue_name_bytes_max)
        except QueueNameError as error:
            raise given.spot.wrong(error) from None


def _policies(file: _File | None, defaults: QueuePolicy) -> Policies:
    if file is None:
        return Policies({}, defaults)
    sections = file.tables.get("queue", {})
    if not isinstance(sections, dict):
        raise _Spot(file.path, "queue", file, ("queue",)).wrong('begin each one with [queue."PATTERN"]')
    for pattern, section in sections.items():
        # Setting by setting, so that a wrong one is found with its line; none depends on another.
        parts: dict[tuple[str, ...], object] = {(pattern,): section}
        if isinstance(section, dict):
            parts = {(pattern,): {}} | {(pattern, key): {key: section[key]} for key in section}
        for keys, part in parts.items():
            try:
                Policies({pattern: part}, defaults)
            except PolicyError as error:
                line = file.line_of(("queue", *keys))
                raise SettingsError(f"{file.path}, line {line}: {error}") from None
    return Policies(sections, defaults)


# --- All together --------------------------------------------------------------------------


def load(args: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """The settings that flags (as `add_arguments` declares them), environment and file add up to.

    Called again with the same arguments it reads the file anew: that is a reload.
    """
    file = _file_of(args, environ)
    given = _given(args, environ, file)
    values = {
        section: {setting.name.replace("-", "_"): given[setting.label].value for setting in settings}
        for section, settings in SECTIONS.items()
    }
    top, log = values[""], values["log"]
    limits = Limits(**values["limits"])
    log["interval_us"] = round(log.pop("interval_seconds") * 1_000_000)
    return Settings(
        data=top["data"],
        engine=top["engine"],
        listeners=_listeners(given, file, limits),
        http=top["http"],
        durability=top["durability"],
        drain_seconds=top["drain_seconds"],
        log_level=top["log_level"],
        log_format=top["log_format"],
        limits=limits,
        log=LogSettings(**log),
        policies=_policies(file, QueuePolicy(durability=top["durability"])),
    )


def _file_of(args: argparse.Namespace, environ: Mapping[str, str]) -> _File | None:
    by_flag: str | None = getattr(args, "config", None)
    if by_flag is not None:
        return _read_file(by_flag, f"command line: {CONFIG_FLAG}")
    by_variable = environ.get(CONFIG_VARIABLE)
    return _read_file(by_variable, f"environment: {CONFIG_VARIABLE}") if by_variable else None


def _listeners(given: Mapping[str, _Given], file: _File | None, limits: Limits) -> tuple[Listener, ...]:
    queue = given["sspq-queue"]
    _check_queue_names(queue, limits)
    found: list[tuple[Listener, _Spot]] = []
    for protocol in PROTOCOLS:
        address, spot = given[protocol]
        if address is not None:
            own = {"queue": queue.value} if protocol == "sspq" else {}
            found.append((Listener(protocol, address, **own, setting=protocol, place=spot.source), spot))
    if file is not None:
        found.extend(_listeners_in_file(file, limits))
    for (one, one_spot), (other, other_spot) in combinations(found, 2):
        if addresses_clash(one.address, other.address):
            # The blame is with what somebody wrote, not with a default.
            if other_spot.source == "default":
                one, one_spot, other, other_spot = other, other_spot, one, one_spot
            raise other_spot.wrong(
                f"{other.address} clashes with {one.address} of {one.setting} ({one_spot.source});"
                f" use another address{f', or turn {one.setting} off' if one.setting in PROTOCOLS else ''}"
            )
    return tuple(listener for listener, _ in found)


def reloadable_difference(old: Settings, new: Settings) -> tuple[Policies, list[str]]:
    """What a reload can put into force at once, and the settings that changed but need a restart."""
    names = [
        setting.label
        for setting in TABLE
        if setting.field and not setting.reloads
        if attrgetter(setting.field)(old) != attrgetter(setting.field)(new)
    ]
    before, after = ({listener.setting: listener for listener in it.listeners} for it in (old, new))
    for name in dict.fromkeys((*before, *after)):
        one, other = before.get(name), after.get(name)
        if one != other:
            same_door = one is not None and other is not None and one.address == other.address
            names.append("sspq-queue" if name == "sspq" and same_door else name)
    return new.policies, names
