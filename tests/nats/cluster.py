"""What the tests of NATS share: real servers, a link to them, and somebody who writes down what it hears."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import uvloop

from penstock.log.jetstream.api import JetStream
from penstock.log.jetstream.cluster import Cluster, Node, wait_until
from penstock.log.jetstream.link import Link, Watcher
from penstock.log.jetstream.requests import Requests
from penstock.log.jetstream.servers import Servers, parse_server
from penstock.log.jetstream.wire import WireOptions
from penstock.protocols.nats import Messages, Status

WAIT_SECONDS = 30.0


class Hearing(Watcher):
    """A subscriber and a watcher that keep everything."""

    def __init__(self) -> None:
        self.batches: list[Messages] = []
        self.statuses: list[Status] = []
        self.ups = 0
        self.downs: list[str] = []
        self.fulls: list[bool] = []
        self.troubles: list[str] = []

    def messages(self, batch: Messages) -> None:
        self.batches.append(batch)

    def status(self, status: Status) -> None:
        self.statuses.append(status)

    def up(self) -> None:
        self.ups += 1

    def down(self, reason: str) -> None:
        self.downs.append(reason)

    def full(self, full: bool) -> None:
        self.fulls.append(full)

    def trouble(self, text: str) -> None:
        self.troubles.append(text)

    @property
    def payloads(self) -> list[bytes]:
        return [payload for batch in self.batches for payload in batch.payloads]


def on_uvloop(body: Coroutine[Any, Any, None]) -> None:
    """Run it on the loop that brokers use."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body)


async def until(what: str, true: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    """Wait, bounded, until something is true. It is looked at whenever the loop has had its turn."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not true():
        assert loop.time() < deadline, f"waited {seconds:g} s in vain until {what}"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def linked(*urls: str, hearing: Hearing | None = None, **options: Any) -> AsyncIterator[Link]:
    """A link that is open, and closed afterwards. Servers are tried in this order."""
    link = Link(Servers(map(parse_server, urls), in_order=True), WireOptions(**options))
    if hearing is not None:
        link.watch(hearing)
    await link.open()
    try:
        yield link
    finally:
        await link.close()


def api(link: Link) -> JetStream:
    return JetStream(Requests(link))


def stream_settings(name: str, replicas: int, **more: Any) -> dict[str, Any]:
    """A stream as a queue would have it."""
    return {
        "name": name,
        "subjects": [f"q.{name}"],
        "retention": "limits",
        "storage": "file",
        "num_replicas": replicas,
        "allow_direct": True,
        "allow_atomic": True,
        "allow_batched": True,
        "duplicate_window": 120_000_000_000,
        **more,
    }


async def leader_of(cluster: Cluster, stream: str) -> Node:
    """The node that leads a stream."""

    def ask() -> Node:
        return wait_until(f"stream {stream} has a leader", lambda: cluster.stream_leader(stream))

    return await asyncio.to_thread(ask)
