"""A whole cluster as processes: NATS nodes, and front-ends before them, as a user would start them.

`Site` owns all of it. Front-ends are called `a`, `b`, …; the first to be started leads. They keep their
folders and their ports when they are started again, so that clients find them.

Rules that always hold:
  * When a `Site` has been left, none of its processes is there any more, also one that was paused, and
    also where the test has failed; then the logs of all of them are in what the test says.
  * Nothing here sleeps to synchronise, and every wait has an end.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from http.client import HTTPException
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from penstock.log.jetstream.cluster import Cluster, Node
from penstock.log.jetstream.names import LogNames
from penstock.model.shards import shard_of
from tests.http.api import Api
from tests.nats.cluster import stream_leader
from tests.server.harness import ROOT, WAIT_SECONDS, BrokerProcess, is_free, until

S = TypeVar("S", bound="Site")
STREAM = LogNames().stream
ONE_LOG = ("--cluster-shards", "1")
LOG_CHARACTERS_MAX = 6000
"""So much of the end of every log is shown when a test fails."""


class FrontEnd(BrokerProcess):
    """`penstock serve --engine nats://…`."""

    def __init__(self, name: str, folder: Path, cluster: Cluster, urls: list[str], *flags: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        hosts = [node.url.rpartition("/")[2].partition(":")[0] for node in cluster.nodes]
        monitors = ",".join(
            f"http://{host}:{node.ports.monitor}" for host, node in zip(hosts, cluster.nodes, strict=True)
        )
        super().__init__(
            folder,
            *("--engine", ",".join(urls), "--cluster-id", name, "--cluster-monitor", monitors),
            *("--cluster-replicas", str(len(cluster.nodes)), "--drain-seconds", "2"),
            *flags,
        )
        self.name = name

    def command(self) -> list[str]:
        return [*super().command(), "--http", f"127.0.0.1:{self.port('http')}"]

    def start(self) -> "FrontEnd":
        # The process of the HTTP API holds the port of a front-end that was killed, until it has noticed.
        until(lambda: is_free(self.port("http")), f"the HTTP port of {self.name} to be free")
        super().start()
        return self

    def url(self, protocol: str, number: int = 0) -> str:
        """Where clients reach it; `number` is that of the listener, where a protocol has several."""
        port = self.ports_of(protocol)[number]
        return f"{protocol}://127.0.0.1:{port}"

    def inside(self) -> AbstractContextManager[None]:
        """What its clients have to be in, to reach it."""
        return nullcontext()

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def ask(self, path: str, seconds: float = WAIT_SECONDS) -> Any:
        """What its HTTP API says to a GET, as soon as it says anything but "try again"."""
        answers: list[Any] = []

        def answered() -> bool:
            try:
                with self.inside(), Api(self.ports["http"]) as api:
                    reply = api.ask("GET", path)
            except (OSError, HTTPException):
                return False
            if reply.status == 503:
                return False
            assert reply.status == 200, reply
            answers.append(reply.json)
            return True

        until(answered, f"front-end {self.name} to answer {path}", seconds)
        return answers[0]

    def penstock(self, *words: str, status: int = 0) -> str:
        """Run a command of `penstock`; what it prints."""
        done = subprocess.run(
            [sys.executable, "-m", "penstock", *words],
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            cwd=ROOT,
        )
        assert done.returncode == status, (words, done)
        return done.stdout

    def mark(self) -> int:
        """A place in its log: what stands behind it is new."""
        return len(self.log())

    def says(self, text: str, since: int = 0, seconds: float = WAIT_SECONDS) -> None:
        """Wait until its log has that text."""
        until(lambda: text in self.log()[since:], f"front-end {self.name} to say {text!r}", seconds)


class Site:
    """Nodes and front-ends."""

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 3,
        fronts: int = 2,
        shards: int = 1,
        apart: bool = False,
        flags: tuple[str, ...] = (),
        settings: str = "",
    ) -> None:
        """`settings` are lines of every node's configuration.

        `apart`: each front-end is told of one node only, which is another one for each.

        Where it is told of all, it takes any: the order in which they are named decides nothing.
        """
        self.nodes = self._cluster(folder / "nats", nodes, settings)
        self.fronts: list[FrontEnd] = []
        self._folder = folder
        self._count = fronts
        self._apart = apart
        self.shards = shards
        self.flags = (*flags, "--cluster-shards", str(shards))
        self._queues = count()

    def _cluster(self, folder: Path, nodes: int, settings: str) -> Cluster:
        return Cluster(folder, nodes, settings=settings)

    def _front(self, name: str, folder: Path, urls: list[str]) -> FrontEnd:
        return FrontEnd(name, folder, self.nodes, urls, *self.flags)

    def start(self) -> "Site":
        self.nodes.start()
        self.start_fronts()
        return self

    def start_fronts(self) -> None:
        for number in range(self._count):
            if len(self.fronts) <= number:
                name = chr(ord("a") + number)
                urls = self.nodes.urls[number:][:1] if self._apart else self.nodes.urls
                self.fronts.append(self._front(name, self._folder / name, urls))
            if not self.fronts[number].running:
                self.fronts[number].start()

    @property
    def running(self) -> list[FrontEnd]:
        return [front for front in self.fronts if front.running]

    def queue(self, shard: int = 0) -> str:
        """A name that nobody else uses, of a queue in that log."""
        names = (f"queue-{number}" for number in self._queues)
        return next(name for name in names if shard_of(name, self.shards) == shard)

    def leaders(self, at: FrontEnd | None = None) -> list[str]:
        """The front-ends that lead, by name, for each log, as somebody says who can be asked."""
        shards = (at or self.running[0]).ask("/v1/engine")["cluster"]["shards"]
        return [it["leader"].rpartition("-")[0] for it in shards]

    def balanced(self) -> None:
        """Each front-end has its share, so that no log is on its way any more."""
        names = [front.name for front in self.running]

        def is_so() -> bool:
            led = [self.leaders(front) for front in self.running]
            counts = [led[0].count(name) for name in names]
            return (
                sum(counts) == self.shards
                and max(counts) - min(counts) <= 1
                and all(it == led[0] for it in led)
            )

        until(is_so, f"logs to be led by each of {names}", 60)

    def leader(self, at: FrontEnd | None = None, shard: int = 0) -> FrontEnd:
        """The front-end that leads a log."""
        found: list[str] = []

        def known() -> bool:
            found[:] = [self.leaders(at)[shard]]
            return found[0] in {front.name for front in self.running}

        until(known, "somebody to lead")
        return next(front for front in self.running if front.name == found[0])

    def follower(self, shard: int = 0) -> FrontEnd:
        leader = self.leader(shard=shard)
        return next(front for front in self.running if front is not leader)

    def stream_leader(self, shard: int = 0) -> Node:
        """The node that takes a log's writes."""
        found: list[Node] = []
        stream = LogNames().of_shards(self.shards)[shard].stream

        def known() -> bool:
            leader = stream_leader(self.nodes, stream)
            found[:] = [leader] if leader is not None else []
            return bool(found)

        until(known, "the stream to have a leader")
        return found[0]

    def nodes_current(self) -> None:
        """Every node has all that there is of every stream."""
        names = LogNames()
        streams = {names.state_stream, *(it.stream for it in names.of_shards(self.shards))}

        def are_so() -> bool:
            found: dict[str, int] = {}
            for node in self.nodes.nodes:
                told = node.monitor("jsz?streams=1") or {}
                for account in told.get("account_details", ()):
                    for detail in account.get("stream_detail", ()):
                        replicas = detail.get("cluster", {}).get("replicas", ())
                        if detail["cluster"].get("leader") == node.name:
                            found[detail["name"]] = sum(bool(it.get("current")) for it in replicas)
            return all(found.get(it) == len(self.nodes.nodes) - 1 for it in streams)

        until(are_so, "all nodes to be current", 60)

    def stop_fronts(self) -> list[int]:
        """SIGTERM to all at once; their exit codes."""
        for front in self.running:
            front.resume()
            front.signal(signal.SIGTERM)
        return [front.wait() for front in self.fronts if front in BrokerProcess.alive]

    def end(self) -> None:
        """Whatever is still there ends."""
        try:
            for front in self.fronts:
                if front.running:
                    front.kill()
        finally:
            self.nodes.stop()

    def logs(self) -> str:
        parts = [f"--- front-end {front.name}\n{front.log()[-LOG_CHARACTERS_MAX:]}" for front in self.fronts]
        return "\n".join(parts)


def site(folder: Path, **options: Any) -> AbstractContextManager[Site]:
    """A site that is running, and is gone at the end. Any: what `Site` takes."""
    return at_work(Site(folder, **options))


@contextmanager
def at_work(site: S) -> Iterator[S]:
    try:
        site.start()
        yield site
        codes = site.stop_fronts()
        assert set(codes) <= {0}, (codes, site.logs())
        for front in site.fronts:
            _, found, text = front.log().partition("Traceback")
            assert not found, f"front-end {front.name}: {text[:LOG_CHARACTERS_MAX]}"
    except BaseException as error:
        error.add_note(site.logs())
        raise
    finally:
        site.end()
