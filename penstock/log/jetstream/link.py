"""The link to a NATS cluster: one connection at a time, made again for as long as it takes.

A `Link` knows the servers, keeps one `Wire` to one of them, and moves to another when that one is lost, says
that it is about to stop, or falls silent. Subscriptions belong to the link: a new connection has them all
before anybody is told that it is there.

What it does not do: keep what was written. A connection that is lost takes with it what the server had not
read, and nobody can say how much that was. So those who write hear `down` and `up` (`Watcher`), and decide
themselves what to send again: under the same message id nothing is stored twice.

No task and no future is made for a message: messages come in batches to a subscription's `Subscriber`.

How it fails: `LinkError` out of `open`, with every server and why; later never: a link that is down says so
(`Watcher.down`, `Watcher.trouble`), and goes on trying.
"""

import asyncio
import random
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.log.jetstream.errors import LinkError, LinkLost
from penstock.log.jetstream.servers import Server, ServerListError, Servers
from penstock.log.jetstream.wire import Subscriber, Wire, WireOptions
from penstock.protocols import nats_write
from penstock.protocols.nats import FRAME_BYTES_MAX

BACK_OFF_SECONDS = 0.05
BACK_OFF_SECONDS_MAX = 2.0


class Watcher:
    """Who wants to know how the link is. All of it is called on the loop; most only care for some of it."""

    def up(self) -> None:
        """There is a connection, with all subscriptions."""

    def down(self, reason: str) -> None:
        """There is none any more. What was written and not answered may have arrived or not."""

    def full(self, full: bool) -> None:
        """More than enough waits to be written; or no longer."""

    def trouble(self, text: str) -> None:
        """Something that a log should have: a server that is not reachable, a permission that is missing."""


@dataclass(frozen=True, slots=True)
class _Subscription:
    subject: bytes
    queue_group: bytes

    def frame(self, sid: int) -> bytes:
        return nats_write.subscribe(self.subject, sid, self.queue_group)


class Link:
    """The connection of one broker to a cluster."""

    def __init__(self, servers: Servers, options: WireOptions | None = None) -> None:
        self.subscribers: dict[int, Subscriber] = {}
        self._inbox = b"_INBOX.%b." % secrets.token_hex(6).encode()
        self._inboxes = 0
        self._servers = servers
        self._options = options or WireOptions()
        self._message_bytes_max = FRAME_BYTES_MAX
        self._subscriptions: dict[int, _Subscription] = {}
        self._sid_last = 0
        self._watchers: list[Watcher] = []
        self._wire: Wire | None = None
        self._is_up = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._closing = False

    # --- life ------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect to the first server that takes us; raises when none of them does."""
        reasons: list[str] = []
        refused = True
        for server in self._servers.round():
            try:
                wire = await Wire.connect(self, server, self._options)
            except LinkError as error:
                reasons.append(str(error))
                refused = refused and error.refused
                continue
            self._came_up(wire)
            self._keeper = asyncio.create_task(self._keep(wire), name="nats link")
            self._keeper.add_done_callback(_report)
            return
        raise LinkError("; ".join(reasons), refused=refused)

    async def close(self) -> None:
        """Write what is waiting, and end it."""
        self._closing = True
        wire = self._wire
        if wire is not None:
            wire.close("closed by us")
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(wire.lost), self._options.connect_seconds)
            wire.drop("closed by us")
        if self._keeper is not None:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
        self._is_up.clear()

    async def _keep(self, wire: Wire) -> None:
        """Makes the next connection whenever one is lost."""
        while True:
            reason = await wire.lost
            self._is_up.clear()
            self._wire = None
            if self._closing:
                return
            for watcher in tuple(self._watchers):
                watcher.down(reason)
            wire = await self._next_wire()
            self._came_up(wire)

    async def _next_wire(self) -> Wire:
        pause_seconds = BACK_OFF_SECONDS
        while True:
            for server in self._servers.round():
                try:
                    return await Wire.connect(self, server, self._options)
                except LinkError as error:
                    self._tell(str(error))
            await asyncio.sleep(pause_seconds * random.uniform(0.5, 1.0))
            pause_seconds = min(2 * pause_seconds, BACK_OFF_SECONDS_MAX)

    def _came_up(self, wire: Wire) -> None:
        self._wire = wire
        self._servers.used(wire.server)
        wire.write(b"".join(subscription.frame(sid) for sid, subscription in self._subscriptions.items()))
        self._is_up.set()
        for watcher in tuple(self._watchers):
            watcher.up()

    # --- what it is like -------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        return self._is_up.is_set()

    @property
    def server(self) -> Server | None:
        """Where we are connected to."""
        return self._wire.server if self._wire is not None else None

    @property
    def info(self) -> Mapping[str, Any]:
        """What that server says of itself. Its JSON: `Any`."""
        return self._wire.info if self._wire is not None else {}

    @property
    def message_bytes_max(self) -> int:
        """What the servers take in one message, headers and all; the last one that said so counts."""
        return self._message_bytes_max

    @property
    def waiting_bytes(self) -> int:
        """What was written and has not left yet."""
        return self._wire.waiting_bytes if self._wire is not None else 0

    def watch(self, watcher: Watcher) -> None:
        """From now on, tell this one too."""
        self._watchers.append(watcher)

    def unwatch(self, watcher: Watcher) -> None:
        """Tell it nothing more."""
        self._watchers.remove(watcher)

    async def wait_up(self, seconds: float) -> None:
        """Wait until there is a connection."""
        try:
            await asyncio.wait_for(self._is_up.wait(), seconds)
        except TimeoutError:
            known = ", ".join(map(str, self._servers.known()))
            raise LinkLost(f"no connection to NATS for {seconds:g} s; tried {known}") from None

    # --- what it does ----------------------------------------------------------------------------

    def write(self, frames: bytes) -> bool:
        """Send whole frames. False when there is no connection: then they are gone."""
        if self._wire is None:
            return False
        self._wire.write(frames)
        return True

    def new_inbox(self) -> bytes:
        """What reply subjects of somebody who asks over this link begin with; nobody else's do."""
        self._inboxes += 1
        return b"%b%d." % (self._inbox, self._inboxes)

    def subscribe(self, subject: bytes, subscriber: Subscriber, queue_group: bytes = b"") -> int:
        """Have messages of a subject come to a subscriber, on this connection and on all later ones."""
        self._sid_last += 1
        sid = self._sid_last
        self.subscribers[sid] = subscriber
        subscription = self._subscriptions[sid] = _Subscription(subject, queue_group)
        self.write(subscription.frame(sid))
        return sid

    def unsubscribe(self, sid: int) -> None:
        """No more of them; those that are on their way are dropped."""
        if self._subscriptions.pop(sid, None) is not None:
            self.subscribers.pop(sid)
            self.write(nats_write.unsubscribe(sid))

    # --- what a wire says ------------------------------------------------------------------------

    def informed(self, wire: Wire, said: Mapping[str, Any]) -> None:
        limit = said.get("max_payload")
        if isinstance(limit, int) and limit > 0:
            self._message_bytes_max = limit
        addresses = said.get("connect_urls")
        if isinstance(addresses, list):
            try:
                self._servers.told(wire.server, [str(address) for address in addresses])
            except ServerListError as error:
                self._tell(f"NATS server {wire.server}: tells of a server that is none: {error}")
        if said.get("ldm") and wire is self._wire:
            self._servers.leaving(wire.server)
            self._tell(f"NATS server {wire.server}: is about to stop; moving to another one")
            wire.close("is about to stop")

    def refused(self, wire: Wire, text: str) -> None:
        self._tell(f"NATS server {wire.server}: says {text!r}")

    def full(self, full: bool) -> None:
        for watcher in tuple(self._watchers):
            watcher.full(full)

    def _tell(self, text: str) -> None:
        for watcher in tuple(self._watchers):
            watcher.trouble(text)


def _report(keeper: "asyncio.Task[None]") -> None:
    """A fault of ours, in a watcher most likely, must not leave a link down with nobody the wiser."""
    if not keeper.cancelled() and (error := keeper.exception()) is not None:
        message = "the link to NATS has ended by a fault of ours"
        keeper.get_loop().call_exception_handler({"message": message, "exception": error, "task": keeper})
