"""The link to a NATS cluster: one connection at a time, made again for as long as it takes.

A `Link` knows the servers, keeps one `Wire` to one of them, and moves to another when that one is lost, says
that it is about to stop, or falls silent.

What it does not do: keep what was written. A connection that is lost takes with it what the server had not
read, and nobody can say how much that was. Whoever asked is told so, and decides what to ask again: under the
same message id nothing is stored twice.

How it fails: `LinkError` out of `open`, with every server and why, or `ClientMissing`; later never: a link
that is down says so in the log, and goes on trying. A question fails as `wire.py` says.
"""

import asyncio
import logging
import random
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from penstock.log.jetstream.errors import ClientMissing, LinkError, LinkLost
from penstock.log.jetstream.options import LinkOptions
from penstock.log.jetstream.servers import Server, ServerListError, Servers

if TYPE_CHECKING:
    from penstock.log.jetstream.wire import Answer, Wire

BACK_OFF_SECONDS = 0.05
BACK_OFF_SECONDS_MAX = 2.0
CANCEL_SECONDS = 1.0
"""After so long, whoever was cancelled and goes on is told again."""

log = logging.getLogger("penstock.nats")


class Link:
    """The connection of one broker to a cluster."""

    def __init__(self, servers: Servers, options: LinkOptions | None = None) -> None:
        self._servers = servers
        self._options = options or LinkOptions()
        self._wire: Wire | None = None
        self._message_bytes_max = 1 << 20
        self._keeper: asyncio.Task[None] | None = None

    # --- life ------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect to the first server that takes us; raises when none of them does."""
        try:
            import penstock.log.jetstream.wire  # noqa: F401 - it needs nats-py, and this is where one can say so
        except ImportError:
            raise ClientMissing(
                "NATS needs the package nats-py; install it with: pip install 'penstock[nats]'"
            ) from None
        reasons: list[str] = []
        refused = True
        for server in self._servers.round():
            try:
                wire = await self._connect(server)
            except LinkError as error:
                reasons.append(str(error))
                refused = refused and error.refused
                continue
            self._keeper = asyncio.create_task(self._keep(wire), name="nats link")
            self._keeper.add_done_callback(_report)
            return
        raise LinkError("; ".join(reasons), refused=refused)

    async def _connect(self, server: Server) -> "Wire":
        from penstock.log.jetstream.wire import Wire

        wire = await Wire.connect(server, self._options)
        self._wire = wire
        self._message_bytes_max = wire.message_bytes_max
        self._servers.used(server)
        self._told_of(wire)
        log.info("connected to NATS server %s", server)
        return wire

    async def close(self) -> None:
        """End it."""
        if self._keeper is not None:
            await cancel([self._keeper])
        if self._wire is not None:
            await self._wire.close()
            self._wire = None

    async def _keep(self, wire: "Wire") -> None:
        """Makes the next connection whenever one is lost."""
        while True:
            reason = await asyncio.shield(wire.lost)
            self._told_of(wire)
            if wire.is_leaving:
                self._servers.leaving(wire.server)
            self._wire = None
            log.warning("no connection to NATS: %s; trying again", reason)
            await wire.close()
            wire = await self._next_wire()

    async def _next_wire(self) -> "Wire":
        pause_seconds = BACK_OFF_SECONDS
        while True:
            for server in self._servers.round():
                try:
                    return await self._connect(server)
                except LinkError as error:
                    log.warning("%s", error)
            await asyncio.sleep(pause_seconds * random.uniform(0.5, 1.0))
            pause_seconds = min(2 * pause_seconds, BACK_OFF_SECONDS_MAX)

    def _told_of(self, wire: "Wire") -> None:
        try:
            self._servers.told(wire.server, wire.told_of)
        except ServerListError as error:
            log.warning("NATS server %s: tells of a server that is none: %s", wire.server, error)

    # --- what it is like -------------------------------------------------------------------------

    @property
    def server(self) -> Server | None:
        """Where we are connected to."""
        return self._wire.server if self._wire is not None and not self._wire.lost.done() else None

    @property
    def info(self) -> Mapping[str, Any]:
        """What that server says of itself. Its JSON: `Any`."""
        return self._wire.info if self._wire is not None else {}

    @property
    def message_bytes_max(self) -> int:
        """What the servers take in one message, headers and all; the last one that said so counts."""
        return self._message_bytes_max

    # --- questions -------------------------------------------------------------------------------

    async def ask(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        headers: dict[str, str] | None = None,
        seconds: float = 5.0,
    ) -> bytes:
        """The payload of the answer."""
        ((_, said),) = await self._connected(subject).ask(subject, payload, headers, seconds, gather=False)
        return said

    async def gather(self, subject: str, payload: bytes, *, seconds: float = 30.0) -> "list[Answer]":
        """All answers, until the one that says that it was the last."""
        return await self._connected(subject).ask(subject, payload, None, seconds, gather=True)

    def _connected(self, subject: str) -> "Wire":
        if self._wire is None or self._wire.lost.done():
            raise LinkLost(f"{subject}: no connection to NATS; ask again when there is one")
        return self._wire


async def cancel(tasks: Collection["asyncio.Task[Any]"]) -> None:
    """End them, and wait until they have. They are told more than once: before Python 3.12 a wait with a time
    limit that ends in the same moment takes a cancellation for its own, and whoever waits goes on."""
    while tasks:
        for task in tasks:
            task.cancel()
        ended, tasks = await asyncio.wait(tasks, timeout=CANCEL_SECONDS)
        for task in ended:
            if not task.cancelled():
                task.exception()  # It was told to whoever had asked.


def _report(keeper: "asyncio.Task[None]") -> None:
    """A fault of ours must not leave a link down with nobody the wiser."""
    if not keeper.cancelled() and (error := keeper.exception()) is not None:
        message = "the link to NATS has ended by a fault of ours"
        keeper.get_loop().call_exception_handler({"message": message, "exception": error, "task": keeper})
