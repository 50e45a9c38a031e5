"""Pipes: HTTP at a follower is answered by the leader, byte by byte.

    HttpPipe(door, leader)          a follower's side. `door` is a listening socket, which is the pipe's from
                                    now on; `leader()` says where the leader's relay is, its secret and its
                                    term, or None where nobody leads
    LeaderPipes(http)               the leader's side: links of the kind `http` go on to its HTTP address

A client's connection is tied to a link to the leader's relay, and that to a connection to the leader's own
HTTP listener: API, dashboard, TLS, all of it. Nobody here reads what passes.

Rules that always hold:
  * What one side does not take is not read from the other: at most a buffer waits in between.
  * When one side ends, the other does, after it has got what was on its way to it.

How it fails: where there is no leader, or it cannot be reached, a client gets `503` with the problem
`urn:penstock:no-leader`, and is asked to come again.
"""

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Final, cast

from penstock.cluster.frames import (
    HEADER_BYTES,
    Hello,
    Kind,
    Reader,
    encode_frame,
    encode_hello,
    encode_json,
)
from penstock.cluster.link import watch_peer
from penstock.common.address import Address, TcpAddress, UnixAddress
from penstock.protocols.errors import PeerViolation

RECEIVE_BYTES: Final = 256 * 1024
_receive_buffer = memoryview(bytearray(RECEIVE_BYTES))
CONNECT_SECONDS: Final = 3.0
LINGER_SECONDS: Final = 1.0
"""How long a client may go on sending after it was answered: it would not read the answer otherwise."""

log = logging.getLogger("penstock.relay")

Leader = tuple[TcpAddress, str, int]
LeaderOf = Callable[[], Leader | None]

_PROBLEM: Final = json.dumps(
    {
        "type": "urn:penstock:no-leader",
        "title": "Nobody leads the cluster at this moment",
        "status": 503,
        "detail": "This front-end has no link to a leader; try again in a second",
    }
).encode()
NO_LEADER: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\n"
    b"Content-Type: application/problem+json\r\n"
    b"Content-Length: %d\r\n"
    b"Retry-After: 1\r\n"
    b"Connection: close\r\n"
    b"\r\n%b" % (len(_PROBLEM), _PROBLEM)
)


class End(asyncio.BufferedProtocol):
    """One end of a pipe. What it reads its peer writes."""

    def __init__(self, on_lost: Callable[["End"], None] | None = None) -> None:
        self.transport: asyncio.Transport | None = None
        self._peer: End | None = None
        self._early = b""  # what came before there was a peer
        self._on_lost = on_lost

    def tie(self, peer: "End") -> None:
        """From now on these two are one pipe."""
        self._peer = peer
        peer._peer = self
        for end, other in ((self, peer), (peer, self)):
            # Reading first: where the other one does not take what came early, it stops it again.
            if end.transport is not None and not end.transport.is_closing():
                end.transport.resume_reading()
            early, end._early = end._early, b""
            if early:
                other.write(early)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _receive_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.read(bytes(_receive_buffer[:nbytes]))

    def read(self, data: bytes) -> None:
        if self._peer is not None:
            self._peer.write(data)
        elif self.transport is not None:
            # uvloop begins to read after `connection_made`, also where that has asked it not to.
            self._early += data
            self.transport.pause_reading()

    def write(self, data: bytes) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def eof_received(self) -> bool:
        """The other direction goes on: a client may have asked and closed its side."""
        peer = self._peer.transport if self._peer is not None else None
        if peer is None or peer.is_closing() or not peer.can_write_eof():
            return False
        peer.write_eof()
        return True

    def pause_writing(self) -> None:
        if self._peer is not None and self._peer.transport is not None:
            self._peer.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._peer is not None and self._peer.transport is not None:
            self._peer.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.close()
        if self._on_lost is not None:
            self._on_lost(self)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


# --- a follower's side ---------------------------------------------------------------------------------


class _LeaderEnd(End):
    """The link to the leader: hello, welcome, and then plain bytes."""

    def __init__(self, hello: Hello) -> None:
        super().__init__()
        self._hello = hello
        self._head = b""
        self.welcomed: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # empty, or why not

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        watch_peer(transport)
        self.write(encode_hello(self._hello))

    def read(self, data: bytes) -> None:
        if self.welcomed.done():
            super().read(data)
            return
        self._head += data
        try:
            frame = next(Reader().feed(self._head), None)
        except PeerViolation as violation:
            self.welcomed.set_result(str(violation))
            return
        if frame is None:
            return
        if frame.kind is not Kind.WELCOME or len(self._head) > HEADER_BYTES:
            # A server that is asked nothing says nothing, so that nothing follows a welcome.
            self.welcomed.set_result(bytes(frame.body).decode(errors="replace") or "it spoke unasked")
            return
        self.welcomed.set_result("")

    def connection_lost(self, error: Exception | None) -> None:
        if not self.welcomed.done():
            self.welcomed.set_result("the leader closed the link")
        super().connection_lost(error)


class _ClientEnd(End):
    """A client's connection: nothing is read until there is somebody to answer."""

    def __init__(self, pipe: "HttpPipe") -> None:
        super().__init__(pipe.left)
        self._pipe = pipe
        self.leader: Leader | None = None  # who is to answer
        self._leaderless = False
        self._linger: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        self.transport.pause_reading()
        self._pipe.came(self)

    def answer_leaderless(self) -> None:
        """As soon as it has asked something, it is told that nobody leads."""
        self._leaderless = True
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()
            if self._early:
                self.read(b"")

    def read(self, data: bytes) -> None:
        if not self._leaderless:
            super().read(data)
        elif self._linger is None and self.transport is not None:
            self.write(NO_LEADER)
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._linger = asyncio.get_running_loop().call_later(LINGER_SECONDS, self.close)

    def connection_lost(self, error: Exception | None) -> None:
        if self._linger is not None:
            self._linger.cancel()
        super().connection_lost(error)


class HttpPipe:
    def __init__(self, door: socket.socket, leader: LeaderOf) -> None:
        self._door = door
        self._leader = leader
        self._loop = asyncio.get_running_loop()
        self._ends: set[_ClientEnd] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._closed = False
        self._is_out = False  # the leader could not be reached when it was last tried
        self._keep(self._listen())

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self) -> None:
        server = await self._loop.create_server(lambda: _ClientEnd(self), sock=self._door, backlog=256)
        if self._closed:
            server.close()
        self._server = server

    def came(self, client: _ClientEnd) -> None:
        self._ends.add(client)
        self._keep(self._connect(client))

    def left(self, end: End) -> None:
        self._ends.discard(end)

    async def _connect(self, client: _ClientEnd) -> None:
        found = self._leader()
        if found is None:
            client.answer_leaderless()
            return
        client.leader = found
        address, secret, term = found
        link: _LeaderEnd | None = None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, link = await self._loop.create_connection(
                    lambda: _LeaderEnd(Hello("http", "", secret, term)), address.host, address.port
                )
                why = await link.welcomed
        except (OSError, TimeoutError) as error:
            why = str(error) or "it does not answer"
        except asyncio.CancelledError:
            if link is not None:
                link.abort()
            raise
        if why or link is None or client.transport is None:
            if link is not None:
                link.abort()
            if why and not self._is_out:
                self._is_out = True  # One line for an outage: clients try again and again.
                log.info("HTTP has no way to the leader at %s: %s", address, why)
            client.answer_leaderless()
            return
        self._is_out = False
        client.tie(link)

    def leader_changed(self) -> None:
        """Who waits for the answer of a former leader would wait in vain: that one may stand still."""
        leader = self._leader()
        if leader is not None:
            for end in list(self._ends):
                if end.leader not in (None, leader):
                    end.close()

    def close(self) -> None:
        """Nobody is let in any more, and all connections end."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        else:
            self._door.close()
        for task in list(self._tasks):
            task.cancel()
        for end in list(self._ends):
            end.close()


# --- the leader's side -----------------------------------------------------------------------------------


class LeaderPipes:
    """Links that carry HTTP, and the connections to this machine's HTTP listener behind them."""

    def __init__(self, http: Address | None) -> None:
        self._http = http
        self._loop = asyncio.get_running_loop()
        self._ends: set[End] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, transport: asyncio.Transport) -> None:
        """A link of this kind has said its hello."""
        end = End(self._ends.discard)
        end.connection_made(transport)
        transport.pause_reading()
        transport.set_protocol(end)
        self._ends.add(end)
        task = self._loop.create_task(self._connect(end))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, link: End) -> None:
        http = self._http
        end: End | None = None
        why = "it has none"
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                if isinstance(http, UnixAddress):
                    _, end = await self._loop.create_unix_connection(End, http.path)
                elif http is not None:
                    _, end = await self._loop.create_connection(End, http.host, http.port)
        except (OSError, TimeoutError) as error:
            why = str(error) or "it does not answer"
        if end is None:
            refusal = encode_json({"refused": f"the leader's HTTP API cannot be reached: {why}"})
            link.write(encode_frame(Kind.WELCOME, refusal))
            link.close()
            return
        link.write(encode_frame(Kind.WELCOME))
        link.tie(end)

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        for end in list(self._ends):
            end.close()
