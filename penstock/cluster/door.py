"""RelayDoor: where other front-ends come to this one, with the words of their clients and with HTTP.

    await listen(address or socket)         where they reach it; the real address is answered
    open(host), shut(host)                  a shard is led here from now on, or no more
    close()                                 nobody is let in any more

Who comes says what for. Words about a shard go to its `RelayHost`, if this front-end leads it; who knows
sooner than we do that it will waits until it does, for as long as a greeting may take. HTTP goes to this
machine's HTTP process: of whoever leads a shard, or, with `ANY_SHARD`, of just this front-end.

How it fails: who is no front-end of this cluster is turned away, and told of in the log now and then.
"""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Coroutine
from typing import Any, Final

from penstock.cluster.frames import ANY_SHARD, Hello
from penstock.cluster.host import RelayHost
from penstock.cluster.leader_link import LeaderLink
from penstock.cluster.link import SHUTDOWN_SECONDS
from penstock.cluster.pipe import Enter, LeaderPipes
from penstock.cluster.trust import ANOTHER_KEY, Trust
from penstock.common.address import TcpAddress
from penstock.server.rounds import Rounds

log = logging.getLogger("penstock.relay")

HANDSHAKE_SECONDS: Final = 3.0
HANDSHAKES_MAX: Final = 256
"""At once. Who comes then waits in the backlog of the socket."""

WAITING_MAX: Final = 1024
"""Links that may wait for a shard to be led here."""

TOLD_SECONDS: Final = 30.0
"""Strangers are told of once in so long, however many come."""

ACCEPT_SECONDS: Final = 0.1
"""After this, a machine that has no room for another connection may have it."""


class RelayDoor:
    def __init__(
        self, *, name: str, trust: Trust, http: Enter | None = None, rounds: Rounds | None = None
    ) -> None:
        self.name = name  # of this front-end
        self.trust = trust
        self.rounds = rounds
        self._pipes = LeaderPipes(http)
        self._loop = asyncio.get_running_loop()
        self._door: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # who accepts, and handshakes
        self._closed = False
        self._told = float("-inf")  # when we last told of a stranger
        self._hosts: dict[int, RelayHost] = {}
        self._terms: dict[int, int] = {}  # the last in which a shard was led here
        self._strangers: set[LeaderLink] = set()  # links without a hello so far
        self._waiting: list[tuple[LeaderLink, Hello]] = []  # for a shard to be led here

    async def listen(self, where: TcpAddress | socket.socket) -> TcpAddress:
        """At an address, or with a socket that listens already and is the door's from now on."""
        door = where if isinstance(where, socket.socket) else socket.create_server((where.host, where.port))
        door.setblocking(False)
        self._door = door
        self._start(self._accept(door))
        host, port, *_ = door.getsockname()
        return TcpAddress(host, port)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, door: socket.socket) -> None:
        places = asyncio.Semaphore(HANDSHAKES_MAX)
        while True:
            await places.acquire()
            try:
                peer, address = await self._loop.sock_accept(door)
            except OSError as error:
                places.release()
                log.warning("the relay could not take a connection: %s", error)
                await asyncio.sleep(ACCEPT_SECONDS)
                continue
            self._start(self._shake_hands(peer, address[0], places))

    async def _shake_hands(self, peer: socket.socket, address: str, places: asyncio.Semaphore) -> None:
        link = LeaderLink(self)
        link.peer = address
        self._strangers.add(link)
        try:
            await self._loop.connect_accepted_socket(
                lambda: link,
                peer,
                ssl=self.trust.server,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=SHUTDOWN_SECONDS,
            )
        except ssl.SSLError as error:
            self._strangers.discard(link)
            self._turned_away(link, f"no TLS with it ({error.reason or error}): {ANOTHER_KEY}")
        except OSError:
            self._strangers.discard(link)  # It has left, or says nothing.
        finally:
            places.release()

    def _turned_away(self, link: LeaderLink, why: str) -> None:
        if time.monotonic() - self._told > TOLD_SECONDS:
            self._told = time.monotonic()
            log.warning("somebody at %s was turned away at the relay: %s", link.peer, why)

    def greet(self, link: LeaderLink, hello: Hello) -> None:
        """A link has proved who it is."""
        self._strangers.discard(link)
        host = self._hosts.get(hello.shard)
        if hello.kind == "http" and hello.shard == ANY_SHARD:
            self._pipes.take(link.hand_over(), hello)
        elif hello.kind not in ("http", "words") or not hello.front_end:
            link.refuse(f"there are no links of kind {hello.kind!r}")
        elif host is not None and host.term == hello.term:
            if hello.kind == "http":
                self._pipes.take(link.hand_over(), hello)
            else:
                host.greet(link, hello)
        elif hello.term > self._terms.get(hello.shard, 0) and len(self._waiting) < WAITING_MAX:
            self._waiting = [it for it in self._waiting if it[0].is_open]
            self._waiting.append((link, hello))
        else:
            term = host.term if host is not None else None
            link.refuse(
                f"this front-end does not lead in term {hello.term}"
                if term is None
                else f"this is the leader of term {term}, not of {hello.term}"
            )

    def lost(self, link: LeaderLink, why: str) -> None:
        """A link has ended before it was anybody's."""
        if link in self._strangers:
            self._strangers.discard(link)
            if not self._closed:
                self._turned_away(link, why)

    def open(self, host: RelayHost) -> None:
        self._hosts[host.shard] = host
        self._terms[host.shard] = host.term
        waiting, self._waiting = self._waiting, []
        for link, hello in waiting:
            if link.is_open:
                self.greet(link, hello)

    def shut(self, host: RelayHost) -> None:
        """Its links end; their clients go on at the next leader."""
        if self._hosts.get(host.shard) is host:
            del self._hosts[host.shard]
        host.close()

    def end_pipes(self) -> None:
        """HTTP that goes on here ends."""
        self._pipes.close()

    def close(self) -> None:
        self._closed = True
        for host in list(self._hosts.values()):
            self.shut(host)
        for task in list(self._tasks):
            task.cancel()
        if self._door is not None:
            self._door.close()
        self._pipes.close()
        waiting = [link for link, _ in self._waiting]
        for link in [*self._strangers, *waiting]:
            link.abort("this front-end stops")
