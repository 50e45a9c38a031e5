"""What the tests of NATS share: real servers, and a link to them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import uvloop

from penstock.log.jetstream.api import JetStream
from penstock.log.jetstream.cluster import Cluster, Node, wait_until
from penstock.log.jetstream.link import Link
from penstock.log.jetstream.options import LinkOptions
from penstock.log.jetstream.servers import Servers, parse_server

WAIT_SECONDS = 30.0


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
async def linked(*urls: str, **options: Any) -> AsyncIterator[Link]:
    """A link that is open, and closed afterwards. Servers are tried in this order."""
    link = Link(Servers(map(parse_server, urls), in_order=True), LinkOptions(**options))
    await link.open()
    try:
        yield link
    finally:
        await link.close()


@contextmanager
def forming(folder: Path) -> Iterator[Cluster]:
    """A cluster of three nodes of which two are there so far, and have agreed on who leads."""
    cluster = Cluster(folder, 3)
    cluster._choose_ports()
    try:
        for node in cluster.nodes[:2]:
            node.start()
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.stop()


def api(link: Link) -> JetStream:
    return JetStream(link)


def stream_settings(name: str, replicas: int, **more: Any) -> dict[str, Any]:
    """A stream as a queue would have it."""
    return {
        "name": name,
        "subjects": [f"q.{name}"],
        "retention": "limits",
        "storage": "file",
        "num_replicas": replicas,
        "allow_direct": True,
        "duplicate_window": 120_000_000_000,
        **more,
    }


def stream_leader(cluster: Cluster, stream: str) -> Node | None:
    """The node that leads a stream, as a node that is running sees it."""
    for node in cluster.nodes:
        answer = (node.monitor("jsz?streams=1") if node.running else None) or {}
        for account in answer.get("account_details", ()):
            for detail in account.get("stream_detail", ()):
                leader = detail.get("cluster", {}).get("leader", "")
                if detail.get("name") == stream and leader and cluster.node(leader).running:
                    return cluster.node(leader)
    return None


async def leader_of(cluster: Cluster, stream: str) -> Node:
    """The node that leads a stream."""

    def ask() -> Node:
        return wait_until(f"stream {stream} has a leader", lambda: stream_leader(cluster, stream))

    return await asyncio.to_thread(ask)
