"""A controller made by hand, for what a good one does not do: be silent, be full, close in the middle."""

import asyncio
import socket

from penstock.protocols import rq
from tests.server.harness import WAIT_SECONDS


class Controller:
    """Listens, and lets the test say and hear bytes on the connections that come, one after the other."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]

    async def accept(self, *, answer: bytes = rq.PONG) -> "Node":
        """The next connection, after its first ping was answered."""
        loop = asyncio.get_running_loop()
        connection, _ = await asyncio.wait_for(loop.sock_accept(self._listener), WAIT_SECONDS)
        connection.setblocking(False)
        node = Node(connection)
        await node.expect(rq.PING)
        await node.say(answer)
        return node

    def close(self) -> None:
        self._listener.close()


class Node:
    """A connection of a client, seen from the controller."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()

    async def say(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._connection, data)

    async def hear(self, count: int) -> bytes:
        """So many bytes, or fewer where the client has closed."""
        heard = b""
        while len(heard) < count:
            more = await asyncio.wait_for(
                self._loop.sock_recv(self._connection, count - len(heard)), WAIT_SECONDS
            )
            if not more:
                break
            heard += more
        return heard

    async def expect(self, data: bytes) -> None:
        heard = await self.hear(len(data))
        assert heard == data, f"heard {heard.hex(' ')}, expected {data.hex(' ')}"

    async def expect_end(self) -> None:
        assert await self.hear(1) == b""

    def close(self) -> None:
        self._connection.close()
