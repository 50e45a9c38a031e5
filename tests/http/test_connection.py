"""What one connection can make the process of the API keep: requests, bodies, answers."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from penstock.http import connection
from penstock.http.connection import CONNECTION, PIPELINED_MAX, READ_BYTES, BoundedProtocol
from penstock.http.web_server import Config
from tests.server.harness import WAIT_SECONDS
from tests.server.inside import run, until

App = Callable[[Scope, Receive, Send], Awaitable[None]]
HEAD = b"GET / HTTP/1.1\r\n\r\n"


@asynccontextmanager
async def served(app: App) -> AsyncIterator[tuple[ServerState, Callable[[], socket.socket]]]:
    """A server with connections of ours; who is connected, and a way in."""
    config = Config(app, http=BoundedProtocol, lifespan="off", loop="none", log_config=None)
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        partial(BoundedProtocol, config, state, {}), "127.0.0.1", 0
    )
    peers: list[socket.socket] = []

    def connect() -> socket.socket:
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.setblocking(False)
        peer.connect_ex(server.sockets[0].getsockname())
        peers.append(peer)
        return peer

    try:
        async with asyncio.timeout(WAIT_SECONDS):
            yield state, connect
    finally:
        server.close()
        for peer in peers:
            peer.close()


async def answer(send: Send, body: bytes) -> None:
    length = str(len(body)).encode()
    start: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]}
    await send(start)
    await send({"type": "http.response.body", "body": body})


def test_requests_that_come_ahead_of_answers_wait_as_bytes() -> None:
    count = 10_000
    most = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal most
        most = max(most, len(scope[CONNECTION].pipeline))
        await answer(send, b"")

    async def test() -> None:
        async with served(app) as (_, connect):
            peer, loop = connect(), asyncio.get_running_loop()
            sending = loop.create_task(loop.sock_sendall(peer, HEAD * count))
            answers = answered = b""
            heard = 0
            while heard < count:
                answers = answered[-20:] + await loop.sock_recv(peer, 1 << 16)
                heard += answers.count(b"HTTP/1.1 200") - answered[-20:].count(b"HTTP/1.1 200")
                answered = answers
            await sending

    run("uvloop", test())
    assert most <= PIPELINED_MAX + READ_BYTES // len(HEAD) + 1


def test_a_body_that_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS_MAX", 0.2)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, b"answered")

    async def test() -> None:
        async with served(app) as (state, connect):
            peer, loop = connect(), asyncio.get_running_loop()
            await loop.sock_sendall(peer, HEAD[:-2] + b"content-length: 10\r\n\r\n")
            assert (await loop.sock_recv(peer, 1 << 16)).endswith(b"answered")
            await loop.sock_sendall(peer, b"x")
            assert await loop.sock_recv(peer, 1 << 16) == b""
            # What comes as a whole is followed by others.
            peer = connect()
            for _ in range(2):
                await loop.sock_sendall(peer, HEAD[:-2] + b"content-length: 3\r\n\r\n")
                assert (await loop.sock_recv(peer, 1 << 16)).endswith(b"answered")
                await loop.sock_sendall(peer, b"xyz")
            assert len(state.connections) == 1

    run("uvloop", test())


@pytest.mark.parametrize("head", [HEAD, HEAD[:-2] + b"connection: close\r\n\r\n"])
def test_an_answer_that_nobody_takes_ends(monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    monkeypatch.setattr(connection, "UNTAKEN_SECONDS_MAX", 0.2)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, bytes(32 << 20))

    async def test() -> None:
        async with served(app) as (state, connect):
            await asyncio.get_running_loop().sock_sendall(connect(), head)
            await until(lambda: state.total_requests == 1, "the answer to be written")
            await until(lambda: not state.connections, "its place to be free again")

    run("uvloop", test())
