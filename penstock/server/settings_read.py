"""Reading the settings of `penstock serve`: flags, environment, file, and what they add up to.

A flag beats the environment, the environment beats the file, the file beats the default. The names and
kinds are in `settings.py`; what only a file can say (`[[listener]]`, `[queue."…"]`) is read here too, but for
the HTTP API's (`settings_http.py`). What a cluster's settings add up to is in `settings_cluster.py`.

Rules that always hold:
  * Every value that is given is checked, also one that another source overrules.
  * Nothing is read but the namespace and the mapping that are passed in, and the one file they name.
  * Reading twice gives equal settings as long as the sources are the same: that is all a reload is.

How it fails: `SettingsError`, one line. A name that does not exist is an error in every source, so that
a misspelt setting cannot go unnoticed.
"""

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from operator import attrgetter
from typing import Any, Final

from penstock.common.address import Address, addresses_clash
from penstock.common.given import (
    File,
    Given,
    SettingsError,
    Spot,
    check,
    check_tls,
    hint_for,
    read_file,
    read_section,
    sections_of,
    shown_key,
)
from penstock.common.kinds import Switch
from penstock.log.state import LogSettings
from penstock.model.policy import Policies, PolicyError, QueueNameError, QueuePolicy, check_queue_name
from penstock.server.setting_kinds import LOG
from penstock.server.settings import (
    CONFIG_FLAG,
    CONFIG_VARIABLE,
    HTTP_KEYS,
    LISTENER_KEYS,
    PROTOCOLS,
    SECTIONS,
    TABLE,
    ArchiveSettings,
    Limits,
    Listener,
    Setting,
    Settings,
    Token,
    UserSettings,
)
from penstock.server.settings_cluster import cluster_settings
from penstock.server.settings_http import http_settings, may_reload, tokens_in_file
from penstock.server.settings_users import check_known, users_in_file

_PREFIX: Final = "PENSTOCK_"
_NOT_SETTINGS: Final = re.compile(
    "PENSTOCK_("
    "CONFIG"  # names the file
    "|TOKEN|TOKEN_FILE|URL"  # of the other commands
    "|TEST_.*"  # of our own tests
    # What Kubernetes and Docker tell every container about a service whose name begins with `penstock`.
    "|(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
    ")"
)
"""Variables that begin like a setting and are none."""

_FILE_ONLY: Final = {"listener": "[[listener]]", "queue": '[queue."PATTERN"]', "user": "[[user]]"}
_TOKENS: Final = "[[http.tokens]]"
_FILE_ONLY_HTTP: Final = {
    "HTTP_TOKENS": f"{_TOKENS} in the file",
    "HTTP_TLS_CERTIFICATE": "[http] tls-certificate in the file",
    "HTTP_TLS_KEY": "[http] tls-key in the file",
}
"""Variables that people will try: what to write instead."""


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
    "http": ("http", "What the HTTP API allows; in the file, these are keys of [http]."),
    "log": ("log", "How the embedded log keeps its files; in the file, these are keys of [log]."),
    "archive": ("archive", "Queues as Delta tables; in the file, these are keys of [archive]."),
    "cluster": (
        "cluster",
        "How front-ends share a log on NATS; in the file, these are keys of [cluster].",
    ),
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
            add_flag(group, setting)


def add_flag(parser: argparse._ActionsContainer, setting: Setting) -> None:
    """Declare the flag of one setting."""
    is_switch = isinstance(setting.kind, Switch)
    parser.add_argument(
        setting.flag,
        dest=setting.dest,
        metavar=setting.kind.metavar or None,
        choices=_Offered(setting.kind.words) if setting.kind.words else None,
        help=f"{setting.help} (default: {setting.default_text})",
        nargs="?" if is_switch else None,
        const="true" if is_switch else None,
    )


# --- What is given --------------------------------------------------------------------------


def _given(args: argparse.Namespace, environ: Mapping[str, str], file: File | None) -> dict[str, Given]:
    """The value of every setting, by its label: the default, and what the sources lay over it."""
    given = {s.label: _default(s) for s in TABLE}
    if file is not None:
        given.update(_given_in_file(file))
    variables = {setting.variable: setting for setting in TABLE}
    for variable, text in environ.items():
        if not variable.startswith(_PREFIX) or _NOT_SETTINGS.fullmatch(variable):
            continue
        spot = Spot("environment", shown_key(variable))
        if variable not in variables:
            known = {name.removeprefix(_PREFIX): name for name in variables} | _FILE_ONLY_HTTP
            hint = hint_for(variable.removeprefix(_PREFIX).upper(), known, variables)
            raise spot.wrong(f"there is no such setting; {hint}")
        # Whoever passes variables on (a compose file, a unit) writes an empty one for one that is not set.
        if text:
            setting = variables[variable]
            given[setting.label] = check(setting.kind, setting.kind.from_text(text), spot)
    for setting in TABLE:
        by_flag: str | None = getattr(args, setting.dest, None)
        if by_flag is not None:
            spot = Spot("command line", setting.flag)
            given[setting.label] = check(setting.kind, setting.kind.from_text(by_flag), spot)
    return given


def _default(setting: Setting) -> Given:
    spot = Spot("default", setting.label)
    return Given(None, spot) if setting.default is None else check(setting.kind, setting.default, spot)


def _given_in_file(file: File) -> Iterator[tuple[str, Given]]:
    """The settings of the table that the file gives, and an error for everything that it should not."""
    for key, value in file.tables.items():
        if key in _FILE_ONLY:
            continue
        name = shown_key(key)
        spot = Spot(file.path, f"[{name}]" if isinstance(value, dict) else name, file, (key,))
        is_address = key == "http" and not isinstance(value, dict | list)
        if not key or key not in SECTIONS or is_address:
            yield _given_by_key(spot, "", key, value)
        elif isinstance(value, dict):
            for inner_key, inner in value.items():
                if (key, inner_key) == ("http", "tokens"):
                    continue
                spot = Spot(file.path, f"[{key}] {shown_key(inner_key)}", file, (key, inner_key))
                yield _given_by_key(spot, key, inner_key, inner)
        else:
            raise spot.wrong(f"it is a section; begin it with [{key}]")


def _given_by_key(spot: Spot, section: str, name: str, value: object) -> tuple[str, Given]:
    for setting in SECTIONS[section]:
        if setting.name == name:
            return setting.label, check(setting.kind, value, spot)
    for key in HTTP_KEYS if section == "http" else ():
        if key.name == name:
            return "http" if name == "address" else f"[http] {name}", check(key.kind, value, spot)
    raise spot.wrong(f"there is no such setting; {_hint_in_file(section, name)}")


def _hint_in_file(section: str, name: str) -> str:
    """A near name of any section, since keys get under the wrong header; of two, that of the same section."""
    here = {setting.name: setting.label for setting in SECTIONS[section]}
    known = {key: f"[{key}]" for key in SECTIONS if key} | _FILE_ONLY | {"tokens": _TOKENS}
    for setting in reversed(TABLE):  # Of a name that two sections have, the first one is meant.
        label = (
            f"{setting.label} above the first [section]" if section and not setting.section else setting.label
        )
        known |= {setting.name: label, setting.dest.replace("_", "-"): label}
    if not section:
        known["queues"] = _FILE_ONLY["queue"]  # and not the one of [archive]
    if section == "http":
        here |= {key.name: f"[http] {key.name}" for key in HTTP_KEYS} | {"tokens": _TOKENS}
        known["http"] = here["address"]  # above [http] there can be no http
    name = name.lower().replace("_", "-")
    # `level` under [log] can mean nothing but log-level.
    longer = f"{section}-{name}"
    return hint_for(longer if longer in known else name, known | here, here.values())


# --- What only a file can say --------------------------------------------------------------


def _listeners_in_file(file: File, limits: Limits) -> Iterator[tuple[Listener, Spot]]:
    for spot, section in sections_of(file, ("listener",), "listener"):
        yield _listener(spot, section, limits), spot


def _listener(spot: Spot, section: dict[str, Any], limits: Limits) -> Listener:
    given = read_section(spot, section, LISTENER_KEYS)
    keys = {key.name: key for key in LISTENER_KEYS}
    protocol = given["protocol"].value
    for name, it in given.items():
        if protocol not in keys[name].protocols:
            theirs = " and ".join(keys[name].protocols)
            raise it.spot.wrong(f"it is for {theirs} listeners, and this one is {protocol}; leave it out")
    check_tls(given)
    for name in given.keys() & {"queue", "queues"}:
        _check_queue_names(given[name], limits)
    values = {name.replace("-", "_"): it.value for name, it in given.items()}
    return Listener(**values, setting=spot.name, place=spot.source)


def _check_queue_names(given: Given, limits: Limits) -> None:
    """One name, or patterns of names: what no queue can be called stands for no queue either."""
    for name in given.value if isinstance(given.value, tuple) else (given.value,):
        try:
            check_queue_name(name, limits.queue_name_bytes_max)
        except QueueNameError as error:
            raise given.spot.wrong(error) from None


def _policies(file: File | None, defaults: QueuePolicy) -> Policies:
    if file is None:
        return Policies({}, defaults)
    sections = file.tables.get("queue", {})
    if not isinstance(sections, dict):
        raise Spot(file.path, "queue", file, ("queue",)).wrong('begin each one with [queue."PATTERN"]')
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
    # They are about what the API does, and so they stand there; the log keeps them.
    log |= {name: values["http"].pop(name) for name in ("stage_seconds", "stages_bytes_max")}
    limits = Limits(**values["limits"])
    listeners = _listeners(given, file, limits)
    tokens = tokens_in_file(file)
    users = users_in_file(file, tokens)
    check_known(users, listeners)
    http = http_settings(given, values["http"], file, tokens, users)
    doors = [(listener.setting, listener.address, spot) for listener, spot in listeners]
    if http is not None:
        doors.append(("http", http.address, given["http"].spot))
    if http is None and values["archive"]["path"] is not None:
        raise given["[archive] path"].spot.wrong(
            "the process of the HTTP API looks after what archives, and http is off; give it an address"
        )
    cluster = cluster_settings(given, values["cluster"])
    if top["engine"] != LOG:
        doors.append(("[cluster] listen", cluster.listen, given["[cluster] listen"].spot))
    _check_clashes(doors)
    log["interval_us"] = round(log.pop("interval_seconds") * 1_000_000)
    return Settings(
        data=top["data"],
        engine=top["engine"],
        allow_unsafe_sync=top["allow_unsafe_sync"],
        strict=top["strict"],
        socket_mode=top["socket_mode"],
        cluster=cluster,
        listeners=tuple(listener for listener, _ in listeners),
        http=http,
        durability=top["durability"],
        drain_seconds=top["drain_seconds"],
        log_level=top["log_level"],
        log_format=top["log_format"],
        audit=top["audit"],
        limits=limits,
        log=LogSettings(**log),
        policies=_policies(
            file,
            # What another front-end may never have heard of is not to be given away by one that is cut off.
            QueuePolicy(
                durability=top["durability"], deliver_after="accept" if top["engine"] == LOG else "sync"
            ),
        ),
        users=users,
        archive=ArchiveSettings(**values["archive"]),
    )


def _file_of(args: argparse.Namespace, environ: Mapping[str, str]) -> File | None:
    by_flag: str | None = getattr(args, "config", None)
    if by_flag is not None:
        return read_file(by_flag, f"command line: {CONFIG_FLAG}")
    by_variable = environ.get(CONFIG_VARIABLE)
    return read_file(by_variable, f"environment: {CONFIG_VARIABLE}") if by_variable else None


def _listeners(given: Mapping[str, Given], file: File | None, limits: Limits) -> list[tuple[Listener, Spot]]:
    queue = given["sspq-queue"]
    _check_queue_names(queue, limits)
    found: list[tuple[Listener, Spot]] = []
    for protocol in PROTOCOLS:
        address, spot = given[protocol]
        if address is not None:
            own = {"queue": queue.value} if protocol == "sspq" else {}
            found.append((Listener(protocol, address, **own, setting=protocol, place=spot.source), spot))
    if file is not None:
        found.extend(_listeners_in_file(file, limits))
    return found


def _check_clashes(doors: list[tuple[str, Address, Spot]]) -> None:
    """No two doors (the setting that opens each, its address, where it stands) can have the same address."""
    for one, other in combinations(doors, 2):
        if addresses_clash(one[1], other[1]):
            # The blame is with what somebody wrote, not with a default.
            there, here = (other, one) if other[2].source == "default" else (one, other)
            setting, address, spot = there
            raise here[2].wrong(
                f"{here[1]} clashes with {address} of {setting} ({spot.source});"
                f" use another address{f', or turn {setting} off' if setting in (*PROTOCOLS, 'http') else ''}"
            )


# --- Reading again -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reload:
    """What became of settings that were read again."""

    policies: Policies  # in force from now on
    users: tuple[UserSettings, ...]  # likewise
    tokens: tuple[Token, ...]  # of the HTTP API, likewise
    others: list[str]  # settings that have changed, but need a restart


def reloadable_difference(old: Settings, new: Settings) -> Reload:
    """What a reload puts into force, where the broker was started with `old`."""
    names = [setting.label for setting in TABLE if _needs_restart(setting, old, new)]
    before, after = ({listener.setting: listener for listener in it.listeners} for it in (old, new))
    for name in dict.fromkeys((*before, *after)):
        one, other = before.get(name), after.get(name)
        if one != other:
            same_door = one is not None and other is not None and one.address == other.address
            names.append("sspq-queue" if name == "sspq" and same_door else name)
    if old.http is not None and new.http is not None:
        for key in ("tls-certificate", "tls-key"):
            value_of = attrgetter(key.replace("-", "_"))
            if value_of(old.http) != value_of(new.http):
                names.append(f"[http] {key}")
    tokens = old.http.tokens if old.http is not None else ()
    if not may_reload(old.http, new):
        names.append(_TOKENS)
        return Reload(new.policies, old.users, tokens, names)
    return Reload(new.policies, new.users, new.http.tokens if new.http is not None else tokens, names)


def _needs_restart(setting: Setting, old: Settings, new: Settings) -> bool:
    if not setting.field or setting.reloads:
        return False
    if setting.field.startswith("http.") and (old.http is None or new.http is None):
        # Where the API is off, nothing else is known about it: one word says that it changed.
        return setting.name == "http" and old.http is not new.http
    value_of = attrgetter(setting.field)
    return bool(value_of(old) != value_of(new))
