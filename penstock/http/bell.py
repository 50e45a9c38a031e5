"""Bell: connections that the first process hands over, with the address of who is behind them.

In a cluster, callers at other front-ends come in this way (`cluster/pipe.py`): each rings with one end of a
pair of sockets, which is served as an accepted connection is, with TLS where the door has it. To guesses, the
audit and the list of connections, the caller is who was named.

Rule that always holds: only the first process can ring, so a name is never a stranger's word.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Final

from penstock.common.journal import Journal
from penstock.http.tls_door import TlsDoor

AT_ONCE: Final = 16
NAME_BYTES_MAX: Final = 4096


class Bell:
    def __init__(
        self,
        bell: socket.socket,
        protocol: Callable[..., asyncio.BaseProtocol],
        entrance: TlsDoor | None,
        handed_over: Callable[[str, socket.socket], None] | None = None,
    ) -> None:
        """`handed_over` gets the ends of ways to other front-ends, by name."""
        self._handed_over = handed_over
        self._bell = bell
        self._protocol = protocol  # takes the keyword `caller`
        self._entrance = entrance
        self._journal = Journal()
        self._loop = asyncio.get_running_loop()
        self._entering: set[asyncio.Task[None]] = set()
        bell.setblocking(False)
        self._loop.add_reader(bell, self._hear)

    def _hear(self) -> None:
        for _ in range(AT_ONCE):
            try:
                name, sockets, _, _ = socket.recv_fds(self._bell, NAME_BYTES_MAX, 1)
            except (BlockingIOError, InterruptedError):
                return
            if not name:  # the first process is gone, and so is this one in a moment
                self.close()
                return
            if not sockets:
                self._journal.note(
                    logging.ERROR, "a caller at another front-end was sent away: no descriptors are left"
                )
                return
            peer = socket.socket(fileno=sockets[0])
            peer.setblocking(False)
            if name.startswith(b"\0") and self._handed_over is not None:
                self._handed_over(name[1:].decode(), peer)
                continue
            caller = caller_of(name.decode())
            protocol = partial(self._protocol, caller=caller)
            if self._entrance is not None:
                self._entrance.enter(peer, protocol, caller[0])
            else:
                task = self._loop.create_task(self._enter(peer, protocol))
                self._entering.add(task)
                task.add_done_callback(self._entering.discard)

    async def _enter(self, peer: socket.socket, protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        try:
            await self._loop.connect_accepted_socket(protocol, peer)
        except OSError:
            peer.close()  # It has left.

    def close(self) -> None:
        """Nobody is taken any more."""
        self._loop.remove_reader(self._bell)


def caller_of(name: str) -> tuple[str, int]:
    """`HOST:PORT`, or the name of a front-end whose callers have no address, as ASGI has it."""
    host, _, port = name.rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() else (name, 0)
