"""The servers of a cluster: those that settings name, and those that a server tells us about.

Nothing here opens a connection: this is the list, and whose turn it is.

Rules that always hold: a server that settings name is never forgotten, one that we were told about is when
nobody tells about it any more; a server that is about to stop comes after all others; a text that shows a
server shows no password.

How it fails: `ServerListError`, for a text that names no server.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from urllib.parse import unquote, urlsplit

from penstock.errors import PenstockError

PORT = 4222
_SCHEMES = {"nats": False, "tls": True}  # whether it must be TLS


class ServerListError(PenstockError, ValueError):
    """A text that names no NATS server."""


@dataclass(frozen=True, slots=True)
class Server:
    """One address."""

    host: str
    port: int = PORT
    tls: bool = False  # only over TLS, even if the server does not ask for it
    tls_name: str = ""  # the name that its certificate has, where that is not the host's
    user: str = ""
    password: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'nats'}://{host}:{self.port}"

    @property
    def key(self) -> tuple[str, int]:
        return self.host, self.port


def parse_server(text: str, *, tls: bool = False) -> Server:
    """`nats://user:password@host:port`, `tls://host`, `host:port` or `host`."""
    text = text.strip()
    url = text if "://" in text else f"{'tls' if tls else 'nats'}://{text}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ServerListError(f"NATS server {_hidden(text)!r}: {error}; write nats://HOST:PORT") from None
    if parts.scheme not in _SCHEMES or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ServerListError(f"NATS server {_hidden(text)!r}: is no address; write nats://HOST:PORT")
    return Server(
        parts.hostname,
        port or PORT,
        _SCHEMES[parts.scheme],
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
    )


def _hidden(text: str) -> str:
    """A text without what stands before its last @: that may be a password."""
    return text if "@" not in text else "…@" + text.rpartition("@")[2]


def parse_servers(text: str) -> list[Server]:
    """Servers parted by commas; a scheme and credentials of the first one hold for those that have none."""
    first, *others = text.split(",")
    server = parse_server(first)
    servers = [server]
    for other in others:
        parsed = parse_server(other, tls=server.tls)
        if not parsed.user:
            parsed = replace(parsed, user=server.user, password=server.password)
        servers.append(parsed)
    return servers


class Servers:
    """Whose turn it is."""

    def __init__(self, named: Iterable[Server], *, in_order: bool = False) -> None:
        self._named = list(named)
        if not self._named:
            raise ServerListError("no NATS server is named; write nats://HOST:PORT")
        if not in_order:
            random.shuffle(self._named)  # brokers with the same settings spread over the servers
        self._told: list[Server] = []
        self._leaving: set[tuple[str, int]] = set()
        self._last: tuple[str, int] | None = None

    def known(self) -> list[Server]:
        """All of them, each once."""
        found = {server.key: server for server in [*self._told, *self._named]}
        return list(found.values())

    def round(self) -> list[Server]:
        """All of them, beginning behind the one that was used last; those about to stop at the end."""
        servers = self.known()
        keys = [server.key for server in servers]
        start = keys.index(self._last) + 1 if self._last in keys else 0
        turned = servers[start:] + servers[:start]
        return sorted(turned, key=lambda server: server.key in self._leaving)

    def used(self, server: Server) -> None:
        """We are connected to it."""
        self._last = server.key
        self._leaving.discard(server.key)

    def told(self, by: Server, addresses: Iterable[str]) -> None:
        """A server says where its cluster listens now. They are reached the way it was reached."""
        name = by.tls_name or by.host
        self._told = [
            replace(by, host=parsed.host, port=parsed.port, tls_name=name)
            for parsed in map(parse_server, addresses)
        ]

    def leaving(self, server: Server) -> None:
        """It is about to stop."""
        self._leaving.add(server.key)
