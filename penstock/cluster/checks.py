"""Checks: whether a NATS cluster can hold our log as safely as we promise, asked before a front-end starts.

What a server says when we connect tells its version and the largest message; JetStream tells about the
account and the streams; and only a node's monitoring tells whether it syncs every write. JetStream's own
default is not to: a power cut then takes messages that were confirmed. So that is looked at on every node,
over HTTP, and a cluster that does not sync is refused unless the settings allow it. Whether a stranger is let
in is found out by coming as one; what our own user may do, the server tells.

    ok     as it should be
    warn   it works, and should be known: the front-end starts, and shows it
    fail   the front-end must not start

Rules that always hold:
  * Every question has a bound: a node that does not answer costs `MONITOR_SECONDS`, and all are asked at
    once.
  * A node that is down stops nobody: what the others say counts, and that one was not asked is a warning.
    Only where no node can be asked, nobody knows, and that is a failure.
  * Looking changes nothing.
  * `check` says what is so at this moment. Who starts asks `wait_for_nodes` before: nodes that are started
    together with it may not know each other yet.

How it fails: `check` returns what it found; `refuse` raises `ClusterRefused` where something of it fails.
"""

import asyncio
import contextlib
import json
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from http.client import HTTPException
from typing import Any, Final, NamedTuple

from penstock.cluster.election import has_one_log, shards_found
from penstock.cluster.nodes import servers_of, shards_wanted, wire_options
from penstock.common.given import SettingsError
from penstock.common.journal import log
from penstock.common.tls import client_context
from penstock.log.jetstream.api import Answer, JetStream
from penstock.log.jetstream.errors import (
    JetStreamError,
    JetStreamTrouble,
    LinkError,
    NotAllowed,
    read_answer,
)
from penstock.log.jetstream.link import Link
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.options import LinkOptions
from penstock.log.jetstream.rights import lacking, rights_of_front_end
from penstock.log.jetstream.servers import Server, Servers
from penstock.server.settings import Settings

MONITOR_SECONDS: Final = 3.0
MONITOR_PORT: Final = 8222
MONITOR_BYTES_MAX: Final = 4 << 20
FORMING_SECONDS: Final = 20.0
FORMING_POLL_SECONDS: Final = 0.25

VERSION_LOWEST: Final = (2, 12)
PAYLOAD_BYTES_LOWEST: Final = 64 << 10
"""With less room in a message, the log would be written in crumbs."""

PAYLOAD_BYTES_SPARE: Final = 64 << 10
"""What a record needs besides a block of the log."""

Said = Mapping[str, Any]
"""JSON in a server's terms: `Any`."""


class ClusterRefused(SettingsError):
    """The NATS cluster is not one that this front-end may keep its log in."""


class Level(Enum):
    """How a finding is to be taken."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(NamedTuple):
    """What one check came to."""

    name: str
    level: Level
    text: str
    advice: str = ""

    def row(self) -> dict[str, str]:
        """As JSON has it."""
        return {**self._asdict(), "level": self.level.value}

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" + (f"; {self.advice}" if self.advice else "")


def refuse(findings: Sequence[Finding]) -> None:
    """Raise where something fails."""
    failures = [str(finding) for finding in findings if finding.level is Level.FAIL]
    if failures:
        raise ClusterRefused(f"the NATS cluster cannot be used as it is: {' - '.join(failures)}")


# --- what nodes say over HTTP ----------------------------------------------------------------------


@dataclass(slots=True)
class Look:
    """What the monitoring of the nodes said."""

    nodes: list[Said] = field(default_factory=list)  # /varz of each that is of this cluster, each once
    silent: list[str] = field(default_factory=list)  # who could not be asked, and why
    guessed: bool = False  # nobody has said where the monitoring is

    @property
    def storing(self) -> list[Said]:
        """Those that keep streams."""
        return [node for node in self.nodes if (node.get("jetstream") or {}).get("config")]

    @property
    def size(self) -> int | None:
        """How many nodes with JetStream the cluster has; None: nobody has said."""
        sizes = [node["jetstream"].get("meta", {}).get("cluster_size", 1) for node in self.storing]
        return max(sizes, default=None)


async def look(info: Said, settings: Settings) -> Look:
    """Ask the monitoring of all nodes at once."""
    found = Look(guessed=not settings.cluster.monitor)
    urls = settings.cluster.monitor or dict.fromkeys(
        f"http://{f'[{server.host}]' if ':' in server.host else server.host}:{MONITOR_PORT}"
        for server in servers_of(settings)
    )
    tls = wire_options(settings.cluster).tls
    answers = await asyncio.gather(*(asyncio.to_thread(_varz, url, tls) for url in urls))
    seen = set()
    for url, said in zip(urls, answers, strict=True):
        if isinstance(said, str):
            found.silent.append(f"{url} {said}")
        elif not _is_of(info, said):
            found.silent.append(f"{url} is of another cluster")
        elif said["server_id"] not in seen:
            seen.add(said["server_id"])
            found.nodes.append(said)
    return found


def _varz(url: str, tls: ssl.SSLContext | None) -> Said | str:
    """What a node says of itself, or why it does not."""
    try:
        with urllib.request.urlopen(f"{url}/varz", timeout=MONITOR_SECONDS, context=tls) as reply:
            said = json.loads(reply.read(MONITOR_BYTES_MAX))
    except urllib.error.HTTPError as error:
        error.close()
        return f"answers with status {error.code}"
    except urllib.error.URLError as error:
        return f"does not answer ({error.reason})"
    except (OSError, ValueError, HTTPException) as error:
        return f"does not answer ({error})"
    if not isinstance(said, dict) or "server_id" not in said:
        return "is not the monitoring of a NATS server"
    return said


def _is_of(info: Said, node: Said) -> bool:
    """Whether a node is one of the cluster that we are connected to."""
    cluster = info.get("cluster", "")
    if not cluster:
        return bool(node["server_id"] == info.get("server_id"))
    return bool((node.get("cluster") or {}).get("name") == cluster)


async def wait_for_nodes(info: Said, settings: Settings) -> None:
    """A cluster that is just forming knows of fewer nodes than it has: give them `FORMING_SECONDS`."""
    wanted = settings.cluster.replicas
    deadline, told = time.monotonic() + FORMING_SECONDS, False
    while info.get("cluster") and time.monotonic() < deadline:
        size = (await look(info, settings)).size
        if size is None or size >= wanted:
            return
        if not told:
            told = True
            nodes = "1 node" if size == 1 else f"{size} nodes"
            log.info(
                "waiting: the NATS cluster has %s so far, and %d copies of the log are wanted", nodes, wanted
            )
        await asyncio.sleep(FORMING_POLL_SECONDS)


# --- the checks ------------------------------------------------------------------------------------


async def check(api: JetStream, info: Said, settings: Settings) -> list[Finding]:
    """All checks of the cluster that `api` asks; `info` is what the server said when we connected to it."""
    found = await look(info, settings)
    findings = [
        _check_version(info, found),
        _check_payload(info, found, settings),
        _check_replicas(info, found, settings),
        _check_sync(found, settings),
    ]
    shards = await _shards(api, info, settings)
    rights = await _check_rights(api, settings, shards)
    findings.append(rights)
    if rights.level is Level.FAIL:
        return findings  # Nothing else could be asked, or stored.
    try:
        if not info.get("jetstream") and not info.get("cluster"):
            raise _no_jetstream(info)
        account = await api.account()
        findings.append(_check_account(account))
        findings.append(await _check_authentication(api, settings))
        names = LogNames(settings.cluster.name)
        for stream in names.all_settings(settings.cluster.replicas, shards):
            findings += await _check_stream(api, stream, settings)
    except JetStreamTrouble as error:
        advice = "add a jetstream block to the configuration of its nodes, and let this account use it"
        findings.append(Finding("jetstream", Level.FAIL, str(error), advice))
    return findings


async def check_servers(settings: Settings) -> list[Finding]:
    """The same, for who is not connected: connects, asks, and leaves."""
    link = Link(Servers(servers_of(settings)), wire_options(settings.cluster))
    try:
        await link.open()
    except JetStreamTrouble as error:
        return [Finding("connection", Level.FAIL, str(error))]
    try:
        api = JetStream(link)
        connected = Finding("connection", Level.OK, f"to {link.server}")
        return [connected, *await check(api, link.info, settings)]
    finally:
        await link.close()


def _no_jetstream(info: Said) -> JetStreamTrouble:
    return JetStreamTrouble(f"server {info.get('server_name', '')!r} has no JetStream")


def _check_version(info: Said, found: Look) -> Finding:
    versions = {str(info.get("server_name", "")): str(info.get("version", ""))}
    versions |= {str(node.get("server_name", "")): str(node.get("version", "")) for node in found.nodes}
    lowest = ".".join(map(str, VERSION_LOWEST))
    old = [f"{name} has {version}" for name, version in versions.items() if _parts(version) < VERSION_LOWEST]
    if old:
        text = f"{', '.join(old)}, too old to read the log from in batches"
        return Finding("version", Level.FAIL, text, f"install nats-server {lowest} or newer")
    return Finding("version", Level.OK, f"nats-server {', '.join(sorted(set(versions.values())))}")


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", version)[:2])


def _check_payload(info: Said, found: Look, settings: Settings) -> Finding:
    sizes = [int(said.get("max_payload", 0)) for said in (info, *found.nodes)]
    bytes_max, good = min(sizes), settings.log.block_bytes + PAYLOAD_BYTES_SPARE
    text = f"messages of up to {bytes_max:,} bytes"
    if bytes_max < PAYLOAD_BYTES_LOWEST:
        advice = f"set max_payload of every node to {good} or more"
        return Finding("max_payload", Level.FAIL, f"{text}, too few for a log", advice)
    if bytes_max < good:
        return Finding(
            "max_payload",
            Level.WARN,
            f"{text}: a block of the log ([log] block-bytes = {settings.log.block_bytes}) takes several",
            "set max_payload of every node to 8MB, which is faster",
        )
    return Finding("max_payload", Level.OK, text)


def _check_replicas(info: Said, found: Look, settings: Settings) -> Finding:
    wanted = settings.cluster.replicas
    size = found.size if found.size is not None or info.get("cluster") else 1
    copies = f"{wanted} {'copy' if wanted == 1 else 'copies'} of the log"
    if size is not None and size < wanted:
        return Finding(
            "replicas",
            Level.FAIL,
            f"{copies} are wanted, and there {'is 1 node' if size == 1 else f'are {size} nodes'}",
            f"add nodes, or set replicas = {1 if size < 3 else 3} under [cluster]",
        )
    if wanted == 2:
        text = f"{copies}: when either node is down, nothing can be written"
        return Finding("replicas", Level.WARN, text, "set replicas = 3 under [cluster]")
    if size is None:
        return Finding("replicas", Level.OK, f"{copies}; how many nodes there are is not known")
    return Finding("replicas", Level.OK, f"{copies} on {size} node{'' if size == 1 else 's'}")


def _check_sync(found: Look, settings: Settings) -> Finding:
    bad = Level.WARN if settings.allow_unsafe_sync else Level.FAIL
    allow = "" if settings.allow_unsafe_sync else ", or allow it with --allow-unsafe-sync"
    safe = {
        str(node["server_name"]): node["jetstream"]["config"].get("sync_always") is True
        for node in found.storing
    }
    asked = ", ".join(sorted(safe))
    unsafe = ", ".join(sorted(name for name, is_safe in safe.items() if not is_safe))
    silent = "; ".join(found.silent)
    if unsafe:
        return Finding(
            "sync",
            bad,
            f"not every write is synced by {unsafe}: a power cut may lose what was confirmed",
            f"set sync_interval: always in the jetstream block of the configuration there{allow}",
        )
    if not safe:
        return Finding(
            "sync",
            bad,
            f"nobody says whether the nodes sync every write ({silent or 'no node has JetStream'})",
            "set monitor under [cluster] to http://HOST:8222 of every node, and http_port: 8222 there"
            f"{allow}",
        )
    missing = max((found.size or 0) - len(safe), 0)
    if missing:
        where = f" ({silent})" if silent and not found.guessed else ""
        return Finding(
            "sync",
            Level.WARN,
            f"every write is synced by {asked}; {missing} of {found.size} nodes could not be asked{where}",
            "name the monitoring of every node under [cluster] monitor, and start those that are down",
        )
    return Finding("sync", Level.OK, f"every write is synced by {asked}")


# --- who may do what ----------------------------------------------------------------------------------


async def _check_authentication(api: JetStream, settings: Settings) -> Finding:
    """Whether a stranger, who gives no name, sees of our log what we see."""
    stream = LogNames(settings.cluster.name).stream
    ours = await _is_there(api.stream(stream))
    servers = servers_of(settings)
    came = await asyncio.gather(*(_stranger(server, settings, stream) for server in servers))
    if ours not in came:
        return Finding("authentication", Level.OK, "who gives no name is not let in")
    open_doors = ", ".join(str(server) for server, saw in zip(servers, came, strict=True) if saw is ours)
    return Finding(
        "authentication",
        Level.FAIL if settings.strict else Level.WARN,
        f"{open_doors} let in whoever can connect: to read every message, to delete the log unnoticed, and to"
        " lead",
        "give the nodes users with passwords (docs/cluster.md#rights-in-nats), and set credentials under "
        "[cluster]",
    )


async def _is_there(asking: Awaitable[object]) -> bool:
    try:
        await asking
    except JetStreamError as error:
        if not error.not_found:
            raise
        return False
    return True


async def _stranger(server: Server, settings: Settings, stream: str) -> bool | None:
    """Whether the stream is there for whoever has no name; None: they are not let in, or not answered."""
    from penstock.log.jetstream.wire import Wire

    cluster = settings.cluster
    tls = client_context("[cluster]", cluster.tls_ca) if wire_options(cluster).tls is not None else None
    try:
        wire = await Wire.connect(
            replace(server, user="", password=""), LinkOptions(tls=tls, connect_seconds=MONITOR_SECONDS)
        )
    except LinkError:
        return None

    async def ask() -> object:
        subject = f"$JS.API.STREAM.INFO.{stream}"
        ((_, said),) = await wire.ask(subject, b"", None, MONITOR_SECONDS, gather=False)
        return read_answer(subject, said)

    try:
        return await _is_there(ask())
    except JetStreamTrouble:
        return None
    finally:
        await wire.close()


async def _shards(api: JetStream, info: Said, settings: Settings) -> int:
    """How many logs the cluster has, or will have once it is made."""
    found = None
    if info.get("jetstream"):
        with contextlib.suppress(JetStreamTrouble):  # It is not there, or rights lack, which is told.
            names = LogNames(settings.cluster.name)
            found = await shards_found(api, names) or (1 if await has_one_log(api, names) else None)
    return found or shards_wanted(settings)


async def _check_rights(api: JetStream, settings: Settings, shards: int) -> Finding:
    rights = rights_of_front_end(LogNames(settings.cluster.name), shards)
    advice = "add it to the permissions of this user on every node: docs/cluster.md#rights-in-nats"
    try:
        user = await api.user()
    except NotAllowed as error:
        # Where no answer can come, it is not only this that it lacks.
        deaf = "subscribe" in str(error)
        return Finding("rights", Level.FAIL if deaf else Level.WARN, str(error), advice)
    except JetStreamTrouble as error:
        return Finding("rights", Level.OK, f"nobody says what this user may do ({error})")
    missing = lacking(rights, user.get("permissions") or {})
    if missing:
        text = f"user {user.get('user')!r} of NATS may not {', '.join(missing)}"
        return Finding("rights", Level.FAIL, text, advice)
    return Finding("rights", Level.OK, "this user may do what a front-end must")


def _check_account(account: Answer) -> Finding:
    limits = account.get("limits", {})
    storage_max = int(limits.get("max_storage", -1))
    room = "as much as there is" if storage_max < 0 else f"{storage_max:,} bytes"
    if storage_max == 0:
        text = "this account may not store anything in files"
        return Finding("jetstream", Level.FAIL, text, "raise max_file of the account")
    return Finding("jetstream", Level.OK, f"enabled; this account may store {room}")


# --- streams that are there already ----------------------------------------------------------------


async def _check_stream(api: JetStream, wanted: Said, settings: Settings) -> list[Finding]:
    name = str(wanted["name"])
    about = f"stream {name}"
    try:
        info = await api.stream(name)
    except JetStreamError as error:
        if not error.not_found:
            raise
        return [Finding(about, Level.OK, "was not there yet: the first front-end makes it")]
    config = info["config"]
    wrong = list(_wrong_settings(config, wanted))
    if wrong:
        advice = "change it with `nats stream edit`, or use another log: name under [cluster]"
        return [Finding(about, Level.FAIL, f"is there, but {' and '.join(wrong)}", advice)]
    replicas = int(config["num_replicas"])
    if replicas != settings.cluster.replicas:
        return [
            Finding(
                about,
                Level.WARN,
                f"has replicas = {replicas}, and the settings say {settings.cluster.replicas}",
                f"nats stream edit {name} --replicas {settings.cluster.replicas}, or change the settings",
            )
        ]
    return [Finding(about, Level.OK, f"is there, with replicas = {replicas}")]


def _wrong_settings(config: Said, wanted: Said) -> Iterator[str]:
    """What a stream's owner may not have changed: with it, JetStream would lose or hide records."""
    for key in ("storage", "retention", "subjects", "allow_direct"):
        if config.get(key) != wanted[key]:
            yield f"has {key} = {json.dumps(config.get(key))} instead of {json.dumps(wanted[key])}"
    if config.get("max_age"):
        yield "deletes messages by age (max_age)"
    if config.get("max_msgs_per_subject", -1) != wanted.get("max_msgs_per_subject", -1):
        yield f"has max_msgs_per_subject = {config.get('max_msgs_per_subject')}"
    if config.get("discard") == "old" and wanted.get("discard") == "new":
        for key in ("max_msgs", "max_bytes"):
            if int(config.get(key, -1)) > 0:
                yield f"deletes the oldest messages ({key} with discard = old)"
