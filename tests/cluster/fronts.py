"""Front-ends in this process: leaders and followers with real sockets and real protocol connections.

All of them live on one loop, in a thread of its own, so that tests can speak to them with blocking sockets.
A front has what `Connection` needs of a server; its broker is a `Broker` over a log, or a `RemoteBroker`.
There is no NATS here: a leader that dies is a log that is abandoned, and the next one opens the same folder.
"""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from itertools import count as counter
from pathlib import Path
from typing import Any, TypeVar, cast

import uvloop

from penstock.broker.broker import Broker
from penstock.broker.home import Home
from penstock.cluster.door import RelayDoor
from penstock.cluster.host import RelayHost
from penstock.cluster.link import Link
from penstock.cluster.pipe import End, Enter
from penstock.cluster.remote_broker import RemoteBroker
from penstock.cluster.routing import Router
from penstock.cluster.trust import Leader as Place
from penstock.cluster.trust import Trust
from penstock.common.address import TcpAddress
from penstock.common.journal import Journal
from penstock.log.errors import LogFailed
from penstock.log.log import Log, open_log
from penstock.log.state import LogSettings
from penstock.model.policy import Policies
from penstock.server.audit import Audit
from penstock.server.connection import Connection
from penstock.server.memory import Account
from penstock.server.rounds import Rounds
from penstock.server.settings import Limits, Listener
from penstock.server.users import Users
from penstock.server.wires import CONNECTIONS
from tests.server.harness import Wire

T = TypeVar("T")
WAIT_SECONDS = 20.0
TRUST = Trust(bytes(range(32)))
ANY_PORT = TcpAddress("127.0.0.1", 0)


class Lines(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        facts = getattr(record, "facts", {})
        self.lines.append(record.getMessage() + "".join(f" {name}={value}" for name, value in facts.items()))


class LoopThread:
    """A loop that a test can call into."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()  # as the server has it
        self.faults: list[str] = []  # exceptions that left a callback
        self.loop.set_exception_handler(lambda _, context: self.faults.append(repr(context)))
        self.lines = Lines()
        self._log = logging.getLogger("penstock")
        self._log_level = self._log.level
        self._log.addHandler(self.lines)
        self._log.setLevel(logging.INFO)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_SECONDS)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        async def work() -> T:
            return function(*arguments)

        return self.run(work())

    def until(self, condition: Callable[[], object], what: str, seconds: float = WAIT_SECONDS) -> None:
        """Poll on the loop for something that no answer announces."""
        deadline = time.monotonic() + seconds
        while not self.call(condition):
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds} s: {what}")
            time.sleep(0.005)

    def stop(self) -> None:
        async def settle() -> None:
            await asyncio.sleep(0)
            await self.loop.shutdown_asyncgens()

        self.run(settle())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_SECONDS)
        self._log.removeHandler(self.lines)
        self._log.setLevel(self._log_level)
        assert not self._thread.is_alive(), "a test left something open that the loop waits for"
        assert not self.faults, self.faults


def is_there(link: Link | End) -> bool:
    return (link._transport if isinstance(link, Link) else link.transport) is not None


class Front:
    """A server for the connections of the three protocols."""

    def __init__(
        self, thread: LoopThread, name: str, limits: Limits, listeners: Sequence[Listener] = ()
    ) -> None:
        self.thread = thread
        self.name = name
        self.limits = limits
        self.connection_buffer_bytes = limits.connection_buffer_bytes
        self.journal = Journal()
        self.rounds = Rounds(thread.loop, self.arrival_us)
        self.memory = Account(limits.memory_bytes_max)
        self.audit = Audit(None)
        self.users = Users((), ())
        self.ticks = 0
        self.parting = 0
        self.home: Any = None  # Broker or RemoteBroker, which have the same face
        self.failed: LogFailed | None = None
        self.is_over = False
        self.connections: set[Connection] = set()
        self._endings: Counter[int] = Counter()  # by the port of the client
        self._servers: list[asyncio.AbstractServer] = []
        self._listeners = [*(Listener(protocol, ANY_PORT) for protocol in CONNECTIONS), *listeners]
        self.ports: dict[str, int] = {}  # of each protocol its first listener
        self._ports_of: dict[str, list[int]] = {}
        self._numbers = counter(1)
        self._turn_wanted = False
        self._arrival_us = 0
        self._ticking: asyncio.TimerHandle | None = None

    async def open_doors(self) -> None:
        for listener in self._listeners:

            def connection(listener: Listener = listener) -> Connection:
                return CONNECTIONS[listener.protocol](cast(Any, self), listener)

            door = socket.create_server(("127.0.0.1", 0))
            port = door.getsockname()[1]
            self.ports.setdefault(listener.protocol, port)
            self._ports_of.setdefault(listener.protocol, []).append(port)
            self._servers.append(await self.thread.loop.create_server(connection, sock=door))
        self._tick()

    def ports_of(self, protocol: str) -> list[int]:
        return self._ports_of[protocol]

    def wire(self, protocol: str) -> Wire:
        return Wire(("127.0.0.1", self.ports[protocol]))

    async def close_doors(self) -> None:
        self.is_over = True
        if self._ticking is not None:
            self._ticking.cancel()
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.drop()
        deadline = time.monotonic() + WAIT_SECONDS
        while self.connections and time.monotonic() < deadline:
            await asyncio.sleep(0.001)

    # --- what a connection needs of its server -------------------------------------------------------

    stopping = False

    @staticmethod
    def now_us() -> int:
        return time.time_ns() // 1000

    def arrival_us(self) -> int:
        if not self._arrival_us:
            self._arrival_us = self.now_us()
            self.rounds.begin()
            self.want_turn()
        return self._arrival_us

    def name_for(self, connection: Connection) -> str:
        return f"{connection.protocol}:{connection.peer}#{next(self._numbers)}"

    def gone(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._endings[int(connection.peer.rpartition(":")[2])] += 1

    def log(self) -> str:
        return "\n".join(self.thread.lines.lines)

    def endings(self, port: int) -> int:
        """How many connections from that port of a client have ended."""
        return self._endings[port]

    def check_in_flight(self, connection: Connection) -> None:
        """Nothing here is large enough."""

    def fail(self, error: LogFailed) -> None:
        self.failed = error

    def want_turn(self) -> None:
        if not self._turn_wanted:
            self._turn_wanted = True
            self.thread.loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_wanted = False
        self._arrival_us = 0
        if self.is_over:
            return
        try:
            self.home.turn(self.now_us())
        except LogFailed as error:
            self.fail(error)
        self.rounds.end()

    def _tick(self) -> None:
        self._ticking = self.thread.loop.call_later(0.05, self._tick)
        self.ticks += 1
        try:
            self.home.tick(self.now_us())
        except LogFailed as error:
            self.fail(error)


class Leader(Front):
    """A front-end that leads: a broker over a log in a folder, and a relay host before it."""

    broker: Broker
    engine: Log
    host: RelayHost
    address: TcpAddress

    def __init__(
        self,
        thread: LoopThread,
        folder: Path,
        *,
        term: int = 1,
        policies: Policies | None = None,
        limits: Limits | None = None,
        expected: Collection[str] = (),
        claims_seconds: float = 10.0,
        grace_seconds: float = 1.0,
        http: Enter | None = None,
        settings: LogSettings | None = None,
        trust: Trust = TRUST,
        relay: TcpAddress = ANY_PORT,
    ) -> None:
        super().__init__(thread, f"leader-{term}", limits or Limits())
        self._trust = trust
        self._relay = relay
        self.term = term
        self._folder = folder
        self._policies = policies
        self._expected = expected
        self._claims_seconds = claims_seconds
        self._grace_seconds = grace_seconds
        self._http = http
        self._settings = settings or LogSettings(segment_bytes=8 << 20)
        thread.run(self._start())

    async def _start(self) -> None:
        self.open_log()
        self.door = RelayDoor(name=self.name, trust=self._trust, http=self._http, rounds=self.rounds)
        self.serve()
        self.address = await self.door.listen(self._relay)
        await self.open_doors()

    @property
    def place(self) -> Place:
        """As a follower is told of it."""
        return Place(self.address, self.name, self.term, self._trust)

    def open_log(self) -> None:
        self.engine = open_log(
            str(self._folder),
            self.now_us(),
            settings=self._settings,
            policies=self._policies,
            wake=self._wake,
        )
        self.home = self.broker = Broker(self.engine, self.want_turn)

    def serve(self) -> None:
        self.host = RelayHost(
            self.broker,
            self.engine,
            term=self.term,
            now_us=self.arrival_us,
            on_failed=self.fail,
            connection_buffer_bytes=self.connection_buffer_bytes,
            expected=self._expected,
            claims_seconds=self._claims_seconds,
            grace_seconds=self._grace_seconds,
        )
        self.door.open(self.host)

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.thread.loop.call_soon_threadsafe(self._poll)

    def _poll(self) -> None:
        self.engine.poll()

    def cut_links(self) -> None:
        """Every link ends, as if the network had gone for a moment."""

        def cut() -> None:
            for link in list(self.host._links.values()):
                link.abort("cut by the test")

        self.thread.call(cut)

    async def _close_host(self) -> None:
        """Close it, and wait for the end of its links: that of TLS takes a word of the other side."""
        self.is_over = True  # no turn is due behind the end of the log
        if self._ticking is not None:
            self._ticking.cancel()
        links: list[Link | End] = [*self.host._links.values(), *self.door._strangers]
        links += self.door._pipes._ends
        self.door.close()
        deadline = time.monotonic() + WAIT_SECONDS
        while any(is_there(link) for link in links) and time.monotonic() < deadline:
            await asyncio.sleep(0.001)

    async def _crash(self) -> None:
        for link in [*self.host._links.values(), *self.door._strangers]:
            link.abort("the leader died")
        self.engine.abandon()
        await self._close_host()
        await self.close_doors()

    def crash(self) -> None:
        """The process dies: what was not synced is lost, links and connections end."""
        self.thread.run(self._crash())

    async def _stop(self) -> None:
        await self._close_host()
        await self.close_doors()
        self.engine.close(self.now_us())

    def stop(self) -> None:
        self.thread.run(self._stop())

    def counts(self, queue: str) -> tuple[int, int, int]:
        """Ready, held, dead."""

        return self.thread.call(self.counts_now, queue)

    def counts_now(self, queue: str) -> tuple[int, int, int]:
        """The same for those who are on the loop."""
        if queue not in self.engine.queues():
            return 0, 0, 0
        info = self.engine.describe(queue)
        return info.ready, info.held, info.dead

    def sync(self) -> None:
        """What has happened can be read. On the loop."""
        self.engine.flush(self.now_us())
        self.engine.wait()

    def stored(self, queue: str) -> list[bytes]:
        """All messages that were ever stored there, in order."""

        def read() -> list[bytes]:
            self.sync()
            info = self.engine.describe(queue)
            return [m for piece in self.engine.read(queue, 0, info.offset_end) for m in piece.messages()]

        return self.thread.call(read)


class Follower(Front):
    """A front-end whose broker is elsewhere."""

    remote: RemoteBroker

    def __init__(
        self,
        thread: LoopThread,
        name: str = "follower",
        *,
        limits: Limits | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        super().__init__(thread, name, limits or Limits(), listeners)
        self.links: list[tuple[bool, str]] = []
        thread.run(self._start())

    async def _start(self) -> None:
        self.home = self.remote = RemoteBroker(
            self.name,
            self.want_turn,
            connection_buffer_bytes=self.connection_buffer_bytes,
            on_link=lambda up, why: self.links.append((up, why)),
        )
        await self.open_doors()

    def follow(self, leader: Leader) -> "Follower":
        """Link to a leader, and wait for it."""
        self.thread.call(self.remote.connect, leader.place)
        self.thread.until(lambda: self.remote.is_linked, f"{self.name} to be linked")
        return self

    def lose(self) -> None:
        self.thread.call(self.remote.lost, "lost by the test")

    async def _stop(self) -> None:
        await self.close_doors()
        link = self.remote._link
        self.remote.lost("the test is over")
        deadline = time.monotonic() + WAIT_SECONDS
        while link is not None and link._transport is not None and time.monotonic() < deadline:
            await asyncio.sleep(0.001)

    def stop(self) -> None:
        self.thread.run(self._stop())


class Crossing(Front):
    """A front-end of a cluster with several logs: one is here, the others are at other leaders."""

    def __init__(
        self, thread: LoopThread, own: Leader, others: Sequence[Leader], listeners: Sequence[Listener] = ()
    ) -> None:
        super().__init__(thread, "crossing", Limits(), listeners)
        self._own = own
        self._others = others
        self.remotes: list[RemoteBroker] = []
        self.router: Router
        thread.run(self._start())
        thread.until(lambda: all(it.is_linked for it in self.remotes), "the crossing to be linked")

    async def _start(self) -> None:
        for shard, leader in enumerate(self._others, 1):
            remote = RemoteBroker(
                self.name,
                partial(self._want, shard),
                connection_buffer_bytes=self.connection_buffer_bytes,
            )
            self.remotes.append(remote)
            remote.connect(leader.place)
        homes: list[Home] = [self._own.broker, *self.remotes]
        self.home = self.router = Router(homes, self.arrival_us, self.want_turn, self.fail)
        await self.open_doors()

    def _want(self, shard: int) -> None:
        self.router.want(shard)

    async def _stop(self) -> None:
        await self.close_doors()
        for remote in self.remotes:
            link = remote._link
            remote.lost("the test is over")
            deadline = time.monotonic() + WAIT_SECONDS
            while link is not None and link._transport is not None and time.monotonic() < deadline:
                await asyncio.sleep(0.001)

    def stop(self) -> None:
        self.thread.run(self._stop())


@contextlib.contextmanager
def crossing_at_work(
    folder: Path,
    listeners: Sequence[Listener] = (),
    policies: Mapping[str, object] | None = None,
    shards: int = 3,
) -> Iterator[Crossing]:
    """A front-end that leads one of several logs, for tests that know brokers by their wires."""
    thread = LoopThread()
    leaders = []
    for shard in range(shards):
        (folder / str(shard)).mkdir()
        leaders.append(Leader(thread, folder / str(shard), policies=Policies(policies)))
    crossing = Crossing(thread, leaders[0], leaders[1:], listeners)
    yield crossing
    crossing.stop()
    for leader in leaders:
        leader.stop()
    thread.stop()


@contextlib.contextmanager
def follower_at_work(
    folder: Path, listeners: Sequence[Listener] = (), policies: Mapping[str, object] | None = None
) -> Iterator[Follower]:
    """A follower and its leader, for tests that know brokers by their wires."""
    thread = LoopThread()
    leader = Leader(thread, folder, policies=Policies(policies))
    follower = Follower(thread, listeners=listeners).follow(leader)
    yield follower
    follower.stop()
    leader.stop()
    thread.stop()
