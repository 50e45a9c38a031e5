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
from contextlib import contextmanager
from http.client import HTTPException
from itertools import count
from pathlib import Path
from typing import Any

from penstock.log.jetstream.cluster import Cluster, Node
from penstock.log.jetstream.names import LogNames
from tests.http.api import Api
from tests.nats.cluster import stream_leader
from tests.server.harness import ROOT, WAIT_SECONDS, BrokerProcess, is_free, until

STREAM = LogNames().stream
LOG_CHARACTERS_MAX = 6000
"""So much of the end of every log is shown when a test fails."""


class FrontEnd(BrokerProcess):
    """`penstock serve --engine nats://…`."""

    def __init__(self, name: str, folder: Path, cluster: Cluster, urls: list[str], *flags: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        monitors = ",".join(f"http://127.0.0.1:{node.ports.monitor}" for node in cluster.nodes)
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

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def ask(self, path: str, seconds: float = WAIT_SECONDS) -> Any:
        """What its HTTP API says to a GET, as soon as it says anything but "try again"."""
        answers: list[Any] = []

        def answered() -> bool:
            try:
                with Api(self.ports["http"]) as api:
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
        apart: bool = False,
        flags: tuple[str, ...] = (),
        settings: str = "",
    ) -> None:
        """`settings` are lines of every node's configuration.

        `apart`: each front-end is told of one node only, which is another one for each.

        Where it is told of all, it takes any: the order in which they are named decides nothing.
        """
        self.nodes = Cluster(folder / "nats", nodes, settings=settings)
        self.fronts: list[FrontEnd] = []
        self._folder = folder
        self._count = fronts
        self._apart = apart
        self._flags = flags
        self._queues = count()

    def start(self) -> "Site":
        self.nodes.start()
        self.start_fronts()
        return self

    def start_fronts(self) -> None:
        for number in range(self._count):
            if len(self.fronts) <= number:
                name = chr(ord("a") + number)
                urls = self.nodes.urls[number:][:1] if self._apart else self.nodes.urls
                self.fronts.append(FrontEnd(name, self._folder / name, self.nodes, urls, *self._flags))
            if not self.fronts[number].running:
                self.fronts[number].start()

    @property
    def running(self) -> list[FrontEnd]:
        return [front for front in self.fronts if front.running]

    def queue(self) -> str:
        """A name that nobody else uses."""
        return f"queue-{next(self._queues)}"

    def leader(self, at: FrontEnd | None = None) -> FrontEnd:
        """The front-end that leads, as somebody says who can be asked."""
        found: list[str] = []

        def known() -> bool:
            engine = (at or self.running[0]).ask("/v1/engine")
            found[:] = [engine["cluster"]["leader"].rpartition("-")[0]]
            return found[0] in {front.name for front in self.running}

        until(known, "somebody to lead")
        return next(front for front in self.running if front.name == found[0])

    def follower(self) -> FrontEnd:
        leader = self.leader()
        return next(front for front in self.running if front is not leader)

    def stream_leader(self) -> Node:
        """The node that takes the log's writes."""
        found: list[Node] = []

        def known() -> bool:
            leader = stream_leader(self.nodes, STREAM)
            found[:] = [leader] if leader is not None else []
            return bool(found)

        until(known, "the stream to have a leader")
        return found[0]

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


@contextmanager
def site(folder: Path, **options: Any) -> Iterator[Site]:
    """A site that is running, and is gone at the end. Any: what `Site` takes."""
    site = Site(folder, **options)
    try:
        yield site.start()
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
