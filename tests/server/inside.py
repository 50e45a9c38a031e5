"""A server in this process, on the loop of the test: real sockets, a real log, and its buffers can be seen.

For what no peer can observe: how much waits in a transport's buffer, and what happens at exactly its limit.
"""

import asyncio
import shlex
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

from penstock.server.connection import Connection
from penstock.server.rounds import TICK_SECONDS
from penstock.server.server import Server
from penstock.server.settings import Settings
from penstock.server.settings_read import load
from tests.server.harness import SEGMENT_BYTES, WAIT_SECONDS
from tests.server.settings_source import parser

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.new_event_loop,
}
"""Both that the server runs on."""


def run(loop: str, test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(test)


class Inside(Server):
    """Served by the test's own loop."""

    def __init__(self, settings: Settings) -> None:
        self._peers: list[socket.socket] = []
        super().__init__(settings)

    @property
    def in_order(self) -> list[Connection]:
        """Its connections, as they came."""
        return sorted(self.connections, key=lambda it: int(it.name.rpartition("#")[2]))

    def port(self, protocol: str) -> int:
        (listening,) = [it for listener, it in self._listening if listener.protocol == protocol]
        port: int = listening.sockets[0].getsockname()[1]
        return port

    async def connect(self, protocol: str, *, buffer_bytes: int = 0) -> "Peer":
        before = len(self.connections)
        peer = await self.try_to_connect(protocol, buffer_bytes=buffer_bytes)
        await until(lambda: len(self.connections) > before, "the server to have the connection")
        return peer

    async def try_to_connect(self, protocol: str, *, buffer_bytes: int = 0) -> "Peer":
        """It may be refused."""
        peer = socket.socket()
        self._peers.append(peer)
        if buffer_bytes:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        peer.setblocking(False)
        await asyncio.get_running_loop().sock_connect(peer, ("127.0.0.1", self.port(protocol)))
        return Peer(peer)

    @classmethod
    @asynccontextmanager
    async def open(cls, folder: Path, words: str = "") -> AsyncIterator["Inside"]:
        ports = "--sspq 127.0.0.1:0 --phpmq 127.0.0.1:0 --rq 127.0.0.1:0 --http off"
        data = f"--data {shlex.quote(str(folder / 'data'))} --log-segment-bytes {SEGMENT_BYTES}"
        server = cls(load(parser().parse_args(shlex.split(f"{ports} {data} {words}")), {}))
        await server._listen()
        server._loop.call_later(TICK_SECONDS, server._tick)
        try:
            yield server
        finally:
            for peer in server._peers:
                peer.close()
            server._done.set()
            await server._close_everything()


class Peer:
    """A client's end: it reads when it is told to."""

    def __init__(self, peer: socket.socket) -> None:
        self.socket = peer

    async def say(self, *parts: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, b"".join(parts))

    async def hear(self, count: int) -> bytes:
        """Exactly that many bytes, or fewer where the server closes."""
        heard = b""
        async with asyncio.timeout(WAIT_SECONDS):
            while len(heard) < count:
                more = await asyncio.get_running_loop().sock_recv(self.socket, count - len(heard))
                if not more:
                    break
                heard += more
        return heard

    def close(self) -> None:
        self.socket.close()


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {WAIT_SECONDS} s: {what}")
        await asyncio.sleep(0.005)
