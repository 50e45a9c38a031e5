"""Networks for those who may not make any: proxies in front of every door of a cluster.

All of a cluster is on this machine, and whoever wants to speak with a node or a front-end of it comes to a
proxy: for clients of a node, its monitoring and its routes, and for the relay of a front-end. NATS and the
leases tell others of the proxies, too. A proxy finds out whose process has come (in /proc, so this takes
Linux), and so what one says to another can be held back, in one direction or in both, or come late, slowly or
not at all. Clients of tests go straight to their front-end, and who is no part of the cluster passes.

What this is of a network, as TCP shows it to programs:

  * cut: what one says is heard by the other when the cut is healed, also that it has gone, and no connection
    comes about between them: for that each has to hear the other.
  * late: each piece of what is said comes later.
  * slow: what one says, to whomever, waits for what he has said before.
  * lost: a piece comes after a while, when it was sent again; and now and then the connection is lost.
"""

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from penstock.log.jetstream.cluster import Cluster, Node, _free_ports
from tests.cluster.fronts import LoopThread
from tests.cluster.processes import FrontEnd, Site

HOST: Final = "127.0.0.1"
PIECE_BYTES: Final = 1 << 16
AGAIN_SECONDS: Final = 0.2
"""As TCP waits before it sends again; each time twice as long."""

BREAKS: Final = 0.01
"""Of the pieces that are lost: how many take the connection with them."""


class _Broken(Exception):
    """A connection was lost."""


class Part:
    """A process, or two, as the others reach it."""

    def __init__(self, whose: str, pid: Callable[[], int]) -> None:
        self.whose = whose
        self._pid = pid
        self.free_at = 0.0  # by the loop's clock: when it has said what it has

    def __str__(self) -> str:
        return self.whose

    def has_socket(self, inode: str) -> bool:
        with contextlib.suppress(OSError):  # It has ended.
            main = Path(f"/proc/{self._pid()}")
            children = (main / f"task/{main.name}/children").read_text().split()
            for folder in (main / "fd", *(Path(f"/proc/{child}/fd") for child in children)):
                for fd in folder.iterdir():
                    with contextlib.suppress(FileNotFoundError):  # It was closed a moment ago.
                        if fd.readlink().name == f"socket:[{inode}]":
                            return True
        return False


class Proxies:
    """All of them. They have a thread of their own."""

    def __init__(self, seed: int) -> None:
        self.parts: list[Part] = []
        self._thread = LoopThread()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._cut: set[tuple[Part, Part]] = set()
        self._healed = asyncio.Event()
        self._late_seconds = self._bits_per_second = self._lost = 0.0
        self._chance = random.Random(seed)

    def add(self, whose: str, pid: Callable[[], int]) -> Part:
        self.parts.append(Part(whose, pid))
        return self.parts[-1]

    def open(self, part: Part, port: Callable[[], int], at: int = 0) -> int:
        """A proxy before a port of it; where that listens."""
        door = socket.create_server((HOST, at))
        at = door.getsockname()[1]

        async def come(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            with contextlib.suppress(asyncio.CancelledError):  # by `close`
                await self._pass_on(self._who(writer, at), part, port(), reader, writer)

        self._servers.append(self._thread.run(asyncio.start_server(come, sock=door)))
        return at

    # --- what a test does with them ----------------------------------------------------------------

    def cut(self, one: Part, other: Part, *, both: bool = True) -> None:
        """Nothing that one says is heard by the other; nor the other way round, where `both`."""
        self._thread.call(self._cut.update, {(one, other), (other, one)} if both else {(one, other)})

    def lose(self, part: float) -> None:
        """So much of everything."""
        self._lost = part

    def slow(self, bits_per_second: int) -> None:
        """Of each of them."""
        self._bits_per_second = bits_per_second

    def delay(self, seconds: float) -> None:
        self._late_seconds = seconds

    def heal(self) -> None:
        self._late_seconds = self._bits_per_second = self._lost = 0.0
        self._thread.call(self._heal)

    def _heal(self) -> None:
        self._cut.clear()
        self._healed.set()
        self._healed = asyncio.Event()

    def close(self) -> None:
        async def end() -> None:
            for server in self._servers:
                server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        self._thread.run(end())
        self._thread.stop()

    # --- a connection ------------------------------------------------------------------------------

    def _who(self, writer: asyncio.StreamWriter, door: int) -> Part | None:
        """By the socket of the other end."""
        port = writer.get_extra_info("peername")[1]
        ends = [f"{int.from_bytes(socket.inet_aton(HOST), 'little'):08X}:{it:04X}" for it in (port, door)]
        for line in Path("/proc/net/tcp").read_text().splitlines():
            fields = line.split()
            if fields[1:3] == ends:
                return next((part for part in self.parts if part.has_socket(fields[9])), None)
        return None

    async def _pass_on(
        self,
        comes: Part | None,
        to: Part,
        port: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        await self._heard(comes, to)
        await self._heard(to, comes)
        try:
            its_reader, its_writer = await asyncio.open_connection(HOST, port)
        except OSError:
            writer.transport.abort()
            return
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, its_writer, comes, to))
                pumps.create_task(self._pump(its_reader, writer, to, comes))
        except* _Broken:
            pass
        finally:
            for end in (writer, its_writer):
                end.transport.abort()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        says: Part | None,
        hears: Part | None,
    ) -> None:
        """What one says on a connection, until it ends."""
        while True:
            try:
                data = await reader.read(PIECE_BYTES)
            except OSError:
                await self._heard(says, hears)
                writer.transport.abort()
                return
            if data and says is not None and hears is not None and await self._is_lost(says, len(data)):
                raise _Broken
            await self._heard(says, hears)
            # Whoever hears nothing any more has closed, which goes the other way.
            with contextlib.suppress(OSError, RuntimeError):
                if data:
                    writer.write(data)
                    await writer.drain()
                    continue
                writer.write_eof()
            return

    async def _heard(self, says: Part | None, hears: Part | None) -> None:
        while (says, hears) in self._cut:
            await self._healed.wait()

    async def _is_lost(self, says: Part, size: int) -> bool:
        """Wait as long as a piece is on its way; whether its connection is lost with it."""
        loop = asyncio.get_running_loop()
        seconds = self._late_seconds
        again = AGAIN_SECONDS
        while self._chance.random() < self._lost:
            if self._chance.random() < BREAKS:
                return True
            seconds += again
            again *= 2
        if self._bits_per_second:
            says.free_at = max(says.free_at, loop.time()) + 8 * size / self._bits_per_second
            seconds += says.free_at - loop.time()
        if seconds:
            await asyncio.sleep(seconds)
        return False


def _pid_of(process: Node | FrontEnd) -> Callable[[], int]:
    """0 where it is not there: that is nobody."""
    return lambda: process.pid if process.running else 0


class NearCluster(Cluster):
    """Nodes whose ports are those of proxies."""

    def __init__(self, folder: Path, nodes: int, proxies: Proxies, settings: str) -> None:
        super().__init__(folder, nodes, settings=settings)
        self._proxies = proxies
        self.near = {node.name: proxies.add(f"node {node.name}", _pid_of(node)) for node in self.nodes}

    def _config(self, node: Node) -> str:
        text = super()._config(node)
        ports = node.ports
        for public, port in zip((ports.client, ports.monitor, ports.route), _free_ports(3), strict=True):
            text = text.replace(f"{HOST}:{public}", f"{HOST}:{port}")
            self._proxies.open(self.near[node.name], partial(int, port), public)
        text = text.replace("\ncluster {\n", f'\ncluster {{\n  advertise: "{HOST}:{ports.route}"\n')
        return f'client_advertise: "{HOST}:{ports.client}"\n{text}'


class NearFront(FrontEnd):
    relay = 0

    def command(self) -> list[str]:
        listens = ["--cluster-listen", f"{HOST}:{self.port('relay')}"]
        return [*super().command(), *listens, "--cluster-advertise", f"{HOST}:{self.relay}"]


class NearSite(Site):
    """A site whose processes reach each other by proxies alone."""

    nodes: NearCluster

    def __init__(self, folder: Path, seed: int, **options: Any) -> None:
        self.switch = Proxies(seed)
        self._near: list[Part] = []
        super().__init__(folder, **options)

    @property
    def parts(self) -> dict[str, list[Part]]:
        """By what they are."""
        return {"fronts": self._near, "nodes": [*self.nodes.near.values()]}

    def _cluster(self, folder: Path, nodes: int, settings: str) -> NearCluster:
        return NearCluster(folder, nodes, self.switch, settings)

    def _front(self, name: str, folder: Path, urls: list[str]) -> FrontEnd:
        front = NearFront(name, folder, self.nodes, urls, *self.flags)
        self._near.append(self.switch.add(f"front-end {name}", _pid_of(front)))
        front.relay = self.switch.open(self._near[-1], lambda: front.port("relay"))
        return front

    def end(self) -> None:
        try:
            super().end()
        finally:
            self.switch.close()
