"""TlsDoor: accepts for the HTTP API where it has TLS, with its newest files; uvicorn would keep the first.

Rules that always hold:
  * Who connects gets the context of that moment. Who is connected keeps the one it came by.
  * A handshake ends within `handshake-seconds`; one that fails is a line of the log and of the audit.
  * Where the system has no descriptors left, nobody is accepted for a moment, and those who are there go on.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final

from penstock.common.journal import Journal
from penstock.common.tls_files import LOOK_SECONDS, TlsFiles
from penstock.http.auditing import Auditing

AT_ONCE: Final = 16
PAUSE_SECONDS: Final = 0.5
ENTERING_MAX: Final = 1000
"""Handshakes at a time: who comes then waits in the backlog."""


class TlsDoor:
    def __init__(
        self,
        door: socket.socket,
        protocol: Callable[[], asyncio.BaseProtocol],
        files: TlsFiles,
        handshake_seconds: float,
        auditing: Auditing,
    ) -> None:
        self._door = door
        self._protocol = protocol
        self._files = files
        self._handshake_seconds = handshake_seconds
        self._auditing = auditing
        self._journal = Journal()
        self._loop = asyncio.get_running_loop()
        self._entering: set[asyncio.Task[None]] = set()
        self._is_closed = False
        door.setblocking(False)
        self._listen()
        self._looking = self._loop.create_task(self._look())

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._door, self._accept)

    def _rest(self) -> None:
        self._loop.remove_reader(self._door)
        self._loop.call_later(PAUSE_SECONDS, self._listen)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            if len(self._entering) >= ENTERING_MAX:
                self._rest()
                return
            try:
                peer, _ = self._door.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._journal.note(
                    logging.ERROR, f"nobody can connect for now to the HTTP API: {error.strerror}"
                )
                self._rest()
                return
            peer.setblocking(False)
            self.enter(peer, self._protocol, _host_of(peer))

    def enter(self, peer: socket.socket, protocol: Callable[[], asyncio.BaseProtocol], name: str) -> None:
        """Somebody is there: first the handshake."""
        task = self._loop.create_task(self._enter(peer, protocol, name))
        self._entering.add(task)
        task.add_done_callback(self._entering.discard)

    async def _enter(
        self, peer: socket.socket, protocol: Callable[[], asyncio.BaseProtocol], name: str
    ) -> None:
        try:
            await self._loop.connect_accepted_socket(
                protocol,
                peer,
                ssl=self._files.context,
                ssl_handshake_timeout=self._handshake_seconds,
            )
        except (OSError, ssl.SSLError) as error:
            peer.close()
            why = getattr(error, "reason", None) or str(error) or "its peer has left"
            self._journal.note(
                logging.WARNING, f"a connection to the HTTP API came to nothing: {why}", peer=name
            )
            if isinstance(error, ssl.SSLError):
                line = {"who": "", "from": name, "door": "http", "act": "connect", "result": "tls"}
                self._auditing.refused(**line, why=why)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._files.look()

    def close(self) -> None:
        """Accept nobody any more; who is coming in may do so."""
        self._is_closed = True
        self._looking.cancel()
        self._loop.remove_reader(self._door)


def _host_of(peer: socket.socket) -> str:
    try:
        name = peer.getpeername()
    except OSError:
        return "somebody who has left"
    return str(name[0]) if isinstance(name, tuple) else "this machine"
