"""Accepting: the sockets of a listener, and how those who connect come in.

Rules that always hold:
  * Whoever is accepted counts, from there on: a TLS handshake that nobody finishes is a connection, too, and
    ends after `handshake-seconds`. Who is over `connections-max` is told so where its protocol has a word for
    it, as long as few are; the others are closed at once.
  * Where the system has no descriptors left, nobody is accepted for a while, and those who are there go on.
  * A handshake that fails leaves a line. Each goes by the TLS files as they were read last.
"""

import asyncio
import contextlib
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from penstock.common.address import Address, TcpAddress, UnixAddress, bind_unix
from penstock.common.journal import log
from penstock.common.tls_files import TlsFiles

if TYPE_CHECKING:
    from penstock.server.server import Server

BACKLOG: Final = 4096
"""Who comes when so many wait is told nothing, and tries again a second later, then after two more. Linux has
no longer one than `net.core.somaxconn`."""

AT_ONCE: Final = 16
"""So many are accepted before others have their turn."""

TOLD_MAX: Final = 32
"""So many over `connections-max` may be there at a time, to be told."""

KEEP_ALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)
"""A peer that vanishes without a word is found out by the kernel after two minutes of silence: what it holds
must go back. A listening socket passes these on to all that it accepts, who then need not ask one by one."""

PAUSE_SECONDS: Final = 0.5
FILES_BESIDE_CONNECTIONS: Final = 256


def allow_files(connections_max: int) -> int:
    """Ask the system for a file descriptor per connection; for how many connections there are some, when the
    log and the second process have theirs."""
    wanted = connections_max + FILES_BESIDE_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections_max
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == wanted:
        return connections_max
    most = max(allowed - FILES_BESIDE_CONNECTIONS, allowed // 2)
    log.warning(
        "the system allows %d open files, too few for connections-max = %d: it is %d from now on; raise the "
        "limit (ulimit -n) or lower the setting",
        allowed,
        connections_max,
        most,
    )
    return most


def bind(address: Address, socket_mode: int) -> list[socket.socket]:
    """Sockets that do not listen yet: a host's name may have several addresses, which get the same port."""
    if isinstance(address, UnixAddress):
        return [bind_unix(address.path, socket_mode)]
    sockets: list[socket.socket] = []
    port = address.port
    found = socket.getaddrinfo(address.host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    try:
        for family, kind, protocol, _, where in dict.fromkeys(found):
            ours = socket.socket(family, kind, protocol)
            sockets.append(ours)
            for option in ((socket.SOL_SOCKET, socket.SO_REUSEADDR, 1), *KEEP_ALIVE):
                ours.setsockopt(*option)
            if family == socket.AF_INET6:
                ours.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            ours.bind((where[0], port, *where[2:]))
            port = ours.getsockname()[1]
    except BaseException:
        for ours in sockets:
            ours.close()
        raise
    return sockets


class Accepting:
    """One listener's sockets, while they listen."""

    def __init__(
        self,
        server: "Server",
        address: Address,
        protocol: Callable[[bool], asyncio.BaseProtocol],
        tls: TlsFiles | None,
    ) -> None:
        """`protocol` makes what serves a connection, and is told whether there is a place for it."""
        self._server = server
        self._protocol = protocol
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._entering: set[asyncio.Task[None]] = set()
        self.address = address
        self.sockets = bind(address, server.settings.socket_mode)
        for ours in self.sockets:
            ours.setblocking(False)
            ours.listen(BACKLOG)
            self._loop.add_reader(ours, self._accept, ours)
        if isinstance(address, TcpAddress):
            host, port, *_ = self.sockets[0].getsockname()
            self.address = TcpAddress(host, port)  # with its real port

    def _accept(self, ours: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                peer, where = ours.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors, no memory, or a fault of the network
                self._server.journal.note(
                    logging.ERROR, f"nobody can connect for now to {self.address}: {error.strerror}"
                )
                self._loop.remove_reader(ours)
                self._loop.call_later(PAUSE_SECONDS, self._resume, ours)
                return
            has_place = self._server.find_place()
            if not has_place and self._server.parting >= TOLD_MAX:
                self._server.refused(_name_of(where))
                peer.close()
                continue
            if self._tls is not None and not self._server.memory.admit_tls():
                text = "refused a connection: those with TLS take half of memory-bytes-max"
                self._server.journal.note(logging.WARNING, text, peer=_name_of(where))
                peer.close()
                continue
            peer.setblocking(False)
            task = self._loop.create_task(self._enter(peer, where, has_place))
            if has_place:
                self._server.entering += 1
            else:
                self._server.parting += 1
            self._entering.add(task)
            task.add_done_callback(self._entering.discard)

    def _resume(self, ours: socket.socket) -> None:
        if ours in self.sockets:
            self._loop.add_reader(ours, self._accept, ours)

    async def _enter(self, peer: socket.socket, where: object, has_place: bool) -> None:
        context = self._tls.context if self._tls is not None else None
        seconds = self._server.limits.handshake_seconds if context is not None else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._protocol(has_place), peer, ssl=context, ssl_handshake_timeout=seconds
            )
        except (OSError, ssl.SSLError) as error:
            peer.close()
            name = _name_of(where)
            self._server.journal.note(
                logging.WARNING,
                f"a connection came to nothing: {str(error) or 'its peer has left'}",
                peer=name,
            )
            if isinstance(error, ssl.SSLError):
                self._server.audit.refused(
                    {
                        "from": name.rpartition(":")[0] or name,
                        "act": "connect",
                        "result": "tls",
                        "why": error.reason or str(error),
                    }
                )
            if not has_place:
                self._server.parting -= 1
            if context is not None:
                self._server.memory.tls_left()
        finally:
            if has_place:
                self._server.entering -= 1

    def look_at_tls(self, *, asked: bool = False) -> None:
        if self._tls is not None:
            self._tls.look(asked=asked)

    def close(self) -> None:
        """Accept nobody any more; who is coming in may do so."""
        sockets, self.sockets = self.sockets, []
        if sockets and isinstance(self.address, UnixAddress):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address.path)
        for ours in sockets:
            self._loop.remove_reader(ours)
            ours.close()


def _name_of(where: object) -> str:
    """For a line of the log, where there is no connection yet."""
    return str(TcpAddress(where[0], where[1])) if isinstance(where, tuple) else "unix"
