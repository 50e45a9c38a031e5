"""Networks: every process of a cluster on a machine of its own, as far as its network can tell.

Each has a namespace of the kernel with an address on a common bridge, and a loopback that is nobody else's:
clients of a test are beside their front-end, whatever becomes of the network. What goes from one to another
can be lost: in one direction or in both, all of it or a part; and it can be slow.

It takes root, and `ip`, `tc`, `iptables` and `nsenter`: `MISSING` says what is not there, and `proxies.py` is
for those who lack it. Whatever was made
is gone when a `Switch` is closed.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

from penstock.log.jetstream.cluster import Cluster, Node
from tests.cluster.processes import FrontEnd, Site

TOOLS: Final = ("ip", "tc", "iptables", "nsenter")
MISSING: Final = ", ".join(
    [*(tool for tool in TOOLS if shutil.which(tool) is None), *(["root"] if os.geteuid() else [])]
)
CLONE_NEWNET: Final = 0x40000000
_NUMBERS = count()


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stderr)


class Network:
    """That of one process."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.whose = ""

    def __str__(self) -> str:
        return self.whose

    @property
    def entering(self) -> list[str]:
        """What a command begins with that is to run in it."""
        return ["nsenter", f"--net=/run/netns/{self.name}"]

    def run(self, *command: str) -> None:
        run(*self.entering, *command)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets that this thread makes are in it, and so are those of threads that it starts."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{self.name}") as there:
            if libc.setns(there.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"namespace {self.name}")
            try:
                yield
            finally:
                libc.setns(before.fileno(), CLONE_NEWNET)


class Switch:
    """All of them, and what is between."""

    def __init__(self) -> None:
        self._name = f"ps{os.getpid()}x{next(_NUMBERS)}"
        self.networks: list[Network] = []
        # The machine itself has no part in it: browsers of other tests notice every interface that comes.
        run("ip", "netns", "add", self._name)
        self._hub = Network(self._name, "")
        self._hub.run("ip", "link", "add", "hub", "type", "bridge")
        self._hub.run("ip", "link", "set", "hub", "up")

    def add(self, whose: str) -> Network:
        number = len(self.networks) + 1
        name = f"{self._name}n{number}"
        network = Network(name, f"10.77.0.{number}")
        run("ip", "netns", "add", name)
        network.whose = whose
        self.networks.append(network)
        link = f"veth{number}"
        self._hub.run(
            "ip", "link", "add", link, "master", "hub", "type", "veth", "peer", "eth0", "netns", name
        )
        self._hub.run("ip", "link", "set", link, "up")
        network.run("ip", "address", "add", f"{network.address}/24", "dev", "eth0")
        network.run("ip", "link", "set", "eth0", "up")
        network.run("ip", "link", "set", "lo", "up")
        return network

    def cut(self, one: Network, other: Network, *, both: bool = True) -> None:
        """Nothing that one says is heard by the other; nor the other way round, where `both`."""
        for says, hears in ((one, other), (other, one))[: 1 + both]:
            hears.run("iptables", "-w", "-A", "INPUT", "-s", says.address, "-j", "DROP")

    def lose(self, part: float) -> None:
        """So much of everything."""
        for network in self.networks:
            chance = ("-m", "statistic", "--mode", "random", "--probability", str(part))
            network.run("iptables", "-w", "-A", "INPUT", "-i", "eth0", *chance, "-j", "DROP")

    def slow(self, bits_per_second: int) -> None:
        """What leaves a machine waits for what left before."""
        for network in self.networks:
            bucket = ("tbf", "rate", f"{bits_per_second}bit", "burst", "16kb", "latency", "500ms")
            network.run("tc", "qdisc", "replace", "dev", "eth0", "root", *bucket)

    def heal(self) -> None:
        for network in self.networks:
            network.run("iptables", "-w", "-F", "INPUT")
            subprocess.run(
                [*network.entering, "tc", "qdisc", "del", "dev", "eth0", "root"], capture_output=True
            )

    def close(self) -> None:
        for network in self.networks:
            run("ip", "netns", "del", network.name)
        run("ip", "netns", "del", self._name)


class FarNode(Node):
    network: Network

    def command(self) -> list[str]:
        return [*self.network.entering, *super().command()]

    @property
    def url(self) -> str:
        return f"nats://{self.network.address}:{self.ports.client}"

    def monitor(self, path: str) -> Any:
        with self.network.inside():
            return super().monitor(path)


class FarCluster(Cluster):
    def __init__(self, folder: Path, nodes: int, switch: Switch, settings: str) -> None:
        super().__init__(folder, nodes, settings=settings)
        self.far = [FarNode(node.name, node.folder) for node in self.nodes]
        for node in self.far:
            node.network = switch.add(f"node {node.name}")
        self.nodes = [*self.far]

    def _config(self, node: Node) -> str:
        assert isinstance(node, FarNode)
        text = super()._config(node)
        for other in self.far:
            text = text.replace(
                f"127.0.0.1:{other.ports.route}", f"{other.network.address}:{other.ports.route}"
            )
        for port in (node.ports.client, node.ports.monitor):
            text = text.replace(f"127.0.0.1:{port}", f"0.0.0.0:{port}")
        return text


class FarFront(FrontEnd):
    network: Network

    def command(self) -> list[str]:
        reached = ["--cluster-listen", f"{self.network.address}:0"]
        return [*self.network.entering, *super().command(), *reached]

    def inside(self) -> Any:
        return self.network.inside()


class FarSite(Site):
    """A site whose processes are far from each other."""

    nodes: FarCluster

    @property
    def parts(self) -> dict[str, list[Network]]:
        """Where they are, by what they are."""
        fronts = [front.network for front in self.fronts if isinstance(front, FarFront)]
        return {"fronts": fronts, "nodes": [node.network for node in self.nodes.far]}

    def __init__(self, folder: Path, **options: Any) -> None:
        self.switch = Switch()
        super().__init__(folder, **options)

    def _cluster(self, folder: Path, nodes: int, settings: str) -> FarCluster:
        return FarCluster(folder, nodes, self.switch, settings)

    def _front(self, name: str, folder: Path, urls: list[str]) -> FrontEnd:
        front = FarFront(name, folder, self.nodes, urls, *self.flags)
        front.network = self.switch.add(f"front-end {name}")
        return front

    def end(self) -> None:
        try:
            super().end()
        finally:
            self.switch.close()
