"""Pipes: HTTP at a follower is answered by the leader, byte by byte.

    HttpPipe(door, name, leader)    a follower's side. `door` is a listening socket, which is the pipe's from
                                    now on; `name` is the follower's; `leader()` says whom to reach, or None
                                    where nobody leads
    LeaderPipes(enter)              the leader's side: links of the kind `http` go on to its HTTP process, by
                                    the socket that `enter` makes for whoever is at the other end

A client's connection is tied to a link to the leader's relay, and that to a connection to the leader's own
HTTP process: API, dashboard, TLS, all of it. Nobody here reads what passes. On the link it is in frames:
TLS cannot close one direction alone.

The hello of a link says whose connection it is. The leader believes it, as it believes all that front-ends
say; so guesses are slowed down and the audit is written by the address of the caller.

Rules that always hold:
  * What one side does not take is not read from the other: at most a buffer waits in between.
  * When one side ends, the other does, after it has got what was on its way to it.
  * Nothing goes to the leader, nor comes from a follower, before both have proved who they are (`trust.py`).

How it fails: where there is no leader, or it cannot be reached, a client gets `503` with the problem
`urn:penstock:no-leader`, and is asked to come again.
"""

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Final, cast

from penstock.cluster.follower_link import CONNECT_SECONDS, connect, why_not
from penstock.cluster.frames import (
    ANY_SHARD,
    Frame,
    Hello,
    Kind,
    Reader,
    encode_frame,
    encode_json,
    violation,
)
from penstock.cluster.link import watch_peer
from penstock.cluster.trust import Asking, Leader, shown
from penstock.common.address import TcpAddress
from penstock.protocols.errors import PeerViolation

RECEIVE_BYTES: Final = 256 * 1024
_receive_buffer = memoryview(bytearray(RECEIVE_BYTES))
LINK_FRAME_BYTES_MAX: Final = 4 * RECEIVE_BYTES
LINGER_SECONDS: Final = 1.0
"""How long a client may go on sending after it was answered: it would not read the answer otherwise."""

log = logging.getLogger("penstock.relay")

LeaderOf = Callable[[], Leader | None]
Enter = Callable[[str], socket.socket]
"""A connection to the HTTP process on behalf of a caller; OSError where it takes nobody."""

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
        self._has_heard_end = False
        self._has_said_end = False
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

    def write_end(self) -> None:
        """Nothing more is written. The other direction goes on: a client may have asked and closed its
        side."""
        self._has_said_end = True
        if self._has_heard_end or self.transport is None or self.transport.is_closing():
            self.close()
        else:
            self._say_end()

    def _say_end(self) -> None:
        assert self.transport is not None
        self.transport.write_eof()

    def heard_end(self) -> None:
        """Nothing more is read."""
        self._has_heard_end = True
        if self._peer is None:
            self.close()
            return
        self._peer.write_end()
        if self._has_said_end:
            self.close()

    def eof_received(self) -> bool:
        self.heard_end()
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


class _LinkEnd(End):
    """The end that is a link: what passes is in frames."""

    def __init__(self, on_lost: Callable[[End], None] | None = None) -> None:
        super().__init__(on_lost)
        self._reader = Reader(LINK_FRAME_BYTES_MAX)

    def read(self, data: bytes) -> None:
        try:
            for frame in self._reader.feed(data):
                self.hear(frame)
        except PeerViolation as violation:
            log.warning("a link that carries HTTP is closed: %s", violation)
            self.abort()

    def hear(self, frame: Frame) -> None:
        if frame.kind is Kind.DATA:
            super().read(bytes(frame.body))
        elif frame.kind is Kind.END:
            self.heard_end()
        else:
            raise violation(f"a {frame.kind.name} frame on a link that carries HTTP", frame.position)

    def write(self, data: bytes) -> None:
        self.say(encode_frame(Kind.DATA, data))

    def say(self, frame: bytes) -> None:
        super().write(frame)

    def _say_end(self) -> None:
        self.say(encode_frame(Kind.END))

    def eof_received(self) -> bool:
        return False  # without an END before it, it was cut


# --- a follower's side ---------------------------------------------------------------------------------


class _LeaderEnd(_LinkEnd):
    """The link to the leader: a greeting, and then what passes."""

    def __init__(self, leader: Leader, hello: Hello) -> None:
        super().__init__()
        self._asking = Asking(leader, hello)
        self._proved = False
        self.welcomed: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # empty, or why not

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        watch_peer(transport)
        self.say(self._asking.hello())

    def hear(self, frame: Frame) -> None:
        if self.welcomed.done():
            super().hear(frame)
            return
        assert self.transport is not None
        try:
            if not self._proved:
                self.say(self._asking.prove(frame, shown(self.transport)))
                self._proved = True
            elif frame.kind is not Kind.WELCOME or len(frame.body):
                self.welcomed.set_result(bytes(frame.body).decode(errors="replace") or frame.kind.name)
            else:
                self.welcomed.set_result("")
        except PeerViolation as violation:
            self.welcomed.set_result(str(violation))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.welcomed.done():
            self.welcomed.set_result(
                why_not(error) if isinstance(error, OSError) else "the leader closed the link"
            )
        super().connection_lost(error)


class _ClientEnd(End):
    """A client's connection: nothing is read until there is somebody to answer."""

    def __init__(self, pipe: "HttpPipe") -> None:
        super().__init__(pipe.left)
        self._pipe = pipe
        self.caller = ""  # its address, where it has one
        self.leader: Leader | None = None  # who is to answer
        self._leaderless = False
        self._linger: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        self.transport.pause_reading()
        peer = transport.get_extra_info("peername")
        self.caller = str(TcpAddress(peer[0], peer[1])) if isinstance(peer, tuple) else ""
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


async def open_way(leader: Leader, name: str, caller: str) -> socket.socket:
    """A connection to the HTTP process of that front-end, whatever it leads, for a process of this machine
    that has the other end; `caller`: who is behind it. OSError where there is none."""
    hello = Hello("http", name, 0, caller=caller, shard=ANY_SHARD)
    link = await connect(leader, lambda: _LeaderEnd(leader, hello))
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            why = await link.welcomed
        if why:
            raise OSError(why)  # noqa: TRY301 - as if there were no way
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        _, end = await asyncio.get_running_loop().create_unix_connection(End, sock=ours)
    except BaseException:
        link.abort()
        raise
    end.tie(link)
    return theirs


class HttpPipe:
    def __init__(self, door: socket.socket, name: str, leader: LeaderOf) -> None:
        self._door = door
        self._name = name
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
        hello = Hello("http", self._name, found.term, caller=client.caller)
        link: _LeaderEnd | None = None
        try:
            link = await connect(found, lambda: _LeaderEnd(found, hello))
            async with asyncio.timeout(CONNECT_SECONDS):
                why = await link.welcomed
        except (OSError, TimeoutError) as error:
            why = why_not(error)
        except asyncio.CancelledError:
            if link is not None:
                link.abort()
            raise
        if why or link is None or client.transport is None:
            if link is not None:
                link.abort()
            if why and not self._is_out:
                self._is_out = True  # One line for an outage: clients try again and again.
                log.info("HTTP has no way to the leader at %s: %s", found.address, why)
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
    """Links that carry HTTP, and the connections to this machine's HTTP process behind them."""

    def __init__(self, enter: Enter | None) -> None:
        self._enter = enter
        self._loop = asyncio.get_running_loop()
        self._ends: set[End] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, transport: asyncio.Transport, hello: Hello) -> None:
        """A link of this kind has proved who it is."""
        end = _LinkEnd(self._ends.discard)
        end.connection_made(transport)
        transport.pause_reading()
        transport.set_protocol(end)
        self._ends.add(end)
        task = self._loop.create_task(self._connect(end, hello.caller or hello.front_end))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, link: _LinkEnd, caller: str) -> None:
        end: End | None = None
        why = "it has none"
        try:
            if self._enter is not None:
                _, end = await self._loop.create_unix_connection(End, sock=self._enter(caller))
        except OSError as error:
            why = str(error)
        if end is None:
            refusal = encode_json({"refused": f"the leader's HTTP API cannot be reached: {why}"})
            link.say(encode_frame(Kind.WELCOME, refusal))
            link.close()
            return
        link.say(encode_frame(Kind.WELCOME))
        link.tie(end)

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        for end in list(self._ends):
            end.close()
