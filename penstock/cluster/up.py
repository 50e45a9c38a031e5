"""A cluster to try things out on: NATS nodes and front-ends, all on this machine, for `penstock cluster up`.

    DIR/node-1 …     a NATS node each: configuration, log, store
    DIR/front-1 …    a front-end each: the copy of the log that it has at hand
    DIR/front-1.log  what it says
    DIR/*.user       users of NATS with their passwords, for `credentials`

Nodes come first and go last. Every process has a group of its own, so that a Ctrl-C reaches only whoever has
started them. What a node has stored stays in its folder: the next time it is there again, on other ports
unless they were named.

Rules that always hold:
  * `stop` ends every process that was started, whatever happened before.
  * Nothing is started beside processes of an earlier time that still run in the same folder.

How it fails: `UpError`, with who did not start and the last that it said.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from penstock.common.ready import NotReady, wait_ready
from penstock.errors import PenstockError
from penstock.log.jetstream.cluster import Cluster, Ports, server_path
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.rights import Rights, rights_of_front_end, rights_of_reader, user_block
from penstock.log.private import make_folder, open_private
from penstock.model.shards import SHARDS_DEFAULT

START_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 30.0
LED_SECONDS_MAX: Final = 20.0
LOOK_SECONDS: Final = 0.1
LAST_LINES: Final = 5
DOORS: Final = ("sspq", "phpmq", "rq", "http")
PORTS_EACH: Final = 10
"""From one front-end, or node, to the next, where the first port is named."""

NODE_PORTS_FROM: Final = 100
"""Above the ports of the front-ends are those of the nodes."""

REPLICAS_MAX: Final = 3

FRONT_END: Final = "front-end"
USERS: Final[dict[str, Callable[[LogNames, int], Rights]]] = {
    FRONT_END: rights_of_front_end,
    "reader": rights_of_reader,  # for Spark
    "admin": lambda *_: Rights({">": "all"}, {">": "all"}),  # for people who look at NATS itself
}
"""Of NATS. Each has a password of its own, another one with every start, in a file that its owner reads."""


class UpError(PenstockError):
    """Somebody did not start."""


class Ended(NamedTuple):
    """A process that has ended by itself."""

    name: str
    how: str
    last_lines: list[str]
    command: str  # starts it again


class FrontEnd:
    """`penstock serve` on the nodes of a cluster."""

    def __init__(self, name: str, folder: Path, port_first: int | None, shards: int | None) -> None:
        self.name = name
        self._shards = shards
        self.addresses: dict[str, str] = {}
        self._data = folder / name
        self._log = folder / f"{name}.log"
        self._credentials = _user_file(folder, FRONT_END)
        self._doors = {
            door: f"127.0.0.1:{0 if port_first is None else port_first + place}"
            for place, door in enumerate(DOORS)
        }
        self._process: subprocess.Popen[str] | None = None

    def start(self, cluster: Cluster) -> None:
        """Start the process; `wait_ready` says when it accepts."""
        # Settings of a broker of the user's own are not meant for this one.
        around = {name: text for name, text in os.environ.items() if not name.startswith("PENSTOCK_")}
        with open(self._log, "ab", opener=open_private) as log:
            self._process = subprocess.Popen(
                self.command(cluster),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=around,
                process_group=0,
            )

    def command(self, cluster: Cluster) -> list[str]:
        """What starts it."""
        monitors = ",".join(f"http://127.0.0.1:{node.ports.monitor}" for node in cluster.nodes)
        doors = [part for door, address in self._doors.items() for part in (f"--{door}", address)]
        return [
            *(sys.executable, "-m", "penstock", "serve"),
            *("--data", str(self._data)),
            *("--engine", ",".join(cluster.urls)),
            *("--cluster-id", self.name),
            *("--cluster-monitor", monitors),
            *("--cluster-credentials", str(self._credentials)),
            *("--cluster-replicas", str(REPLICAS_MAX if len(cluster.nodes) >= REPLICAS_MAX else 1)),
            *(("--cluster-shards", str(self._shards)) if self._shards is not None else ()),
            *doors,
        ]

    def wait_ready(self) -> None:
        """Until it accepts on every door. Then its addresses are known, and stay when it is started again."""
        assert self._process is not None
        try:
            self.addresses = dict(wait_ready(self._process, START_SECONDS_MAX))
        except NotReady:
            said = self.last_lines()
            raise UpError(f"{self.name} did not start: {said[-1] if said else 'it said nothing'}") from None
        self._doors = {door: self.addresses[door] for door in self._doors}

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def code(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None: it has not ended."""
        return self._process.poll() if self._process is not None else None

    def knows_leaders(self) -> bool:
        """Whether it would answer about every queue: right after a start, some logs have no leader."""
        try:
            with urllib.request.urlopen(f"http://{self.addresses['http']}/readyz", timeout=LED_SECONDS_MAX):
                return True
        except urllib.error.HTTPError as no:
            no.close()
        except OSError:
            pass
        return False

    def last_lines(self) -> list[str]:
        return _last_lines(self._log)

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def wait_ended(self) -> None:
        """Wait for its end, and end it by force where that takes too long."""
        if self._process is None:
            return
        try:
            self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class LocalCluster:
    """Used with `try: start() … finally: stop()`."""

    def __init__(
        self,
        folder: Path,
        nodes: int,
        front_ends: int,
        port_base: int | None = None,
        shards: int | None = None,
    ) -> None:
        """`shards`: of a cluster that is new; one that was kept has as many as it had."""
        self.folder = folder
        self._passwords = {user: secrets.token_hex(16) for user in USERS}
        most = shards or SHARDS_DEFAULT
        users = "".join(
            user_block(user, self._passwords[user], rights(LogNames(), 1) | rights(LogNames(), most))
            for user, rights in USERS.items()
        )
        settings = f"authorization {{\n  users: [\n{users}  ]\n}}\n"
        self.cluster = Cluster(folder, nodes, ports=_node_ports(nodes, port_base), settings=settings)
        self.front_ends = [
            FrontEnd(
                f"front-{n}", folder, None if port_base is None else port_base + PORTS_EACH * (n - 1), shards
            )
            for n in range(1, front_ends + 1)
        ]
        self._told: set[str] = set()  # who is known to have ended

    def start(self) -> None:
        """Everything, and wait until it can be used."""
        server_path()  # says what to install, before there is a folder
        left = sorted(_left_behind(self.folder))
        if left:
            pids = " ".join(map(str, left))
            raise UpError(f"{self.folder} is in use: its nodes still run; end them first: kill {pids}")
        before, now = len(list(self.folder.glob("node-*/store"))), len(self.cluster.nodes)
        if before and (before == 1) != (now == 1):
            raise UpError(
                f"{self.folder} was begun with --nodes {before}, and nodes of a cluster delete what one has "
                f"stored alone: use --nodes {before}, or another folder"
            )
        make_folder(str(self.folder))
        for user, password in self._passwords.items():
            with open(_user_file(self.folder, user), "w", encoding="utf-8", opener=open_private) as file:
                file.write(f"{user}:{password}\n")
        self.cluster.start()
        for front_end in self.front_ends:
            front_end.start(self.cluster)
        for front_end in self.front_ends:
            front_end.wait_ready()
        until = time.monotonic() + LED_SECONDS_MAX
        for front_end in self.front_ends:
            while not front_end.knows_leaders() and time.monotonic() < until:
                time.sleep(LOOK_SECONDS)

    @property
    def credentials(self) -> dict[str, Path]:
        """The users of NATS, and the file of each for `credentials`."""
        return {user: _user_file(self.folder, user) for user in USERS}

    def ended(self) -> list[Ended]:
        """Who has ended since this was last asked."""
        found = []
        for node in self.cluster.nodes:
            if not node.running and node.name not in self._told:
                config = node.folder / "server.conf"
                lines = node.log().splitlines()[-LAST_LINES:]
                found.append(Ended(node.name, "ended", lines, f"{server_path()} --config {config}"))
        for front_end in self.front_ends:
            code = front_end.code
            if code is not None and front_end.name not in self._told:
                command = " ".join(front_end.command(self.cluster))
                found.append(Ended(front_end.name, _how(code), front_end.last_lines(), command))
        self._told.update(it.name for it in found)
        return found

    @property
    def running(self) -> bool:
        """Whether anybody still is there."""
        return any(it.running for it in self.cluster.nodes) or any(it.running for it in self.front_ends)

    def stop(self) -> None:
        """Front-ends first, all at once; then the nodes."""
        try:
            for front_end in self.front_ends:
                front_end.signal(signal.SIGTERM)
            for front_end in self.front_ends:
                front_end.wait_ended()
        finally:
            self.cluster.stop()

    def kill(self) -> None:
        """End everything at once. `stop` is still to be called: it then has nothing to wait for."""
        for front_end in self.front_ends:
            front_end.signal(signal.SIGKILL)
        for node in self.cluster.nodes:
            if node.running:
                os.kill(node.pid, signal.SIGKILL)


def _user_file(folder: Path, user: str) -> Path:
    return folder / f"{user}.user"


def _node_ports(nodes: int, port_base: int | None) -> list[Ports]:
    if port_base is None:
        return []
    firsts = (port_base + NODE_PORTS_FROM + PORTS_EACH * place for place in range(nodes))
    return [Ports(client=first, monitor=first + 1, route=first + 2) for first in firsts]


def _how(code: int) -> str:
    if code < 0:
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with exit code {code}"


def _last_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    except FileNotFoundError:
        return []


def _left_behind(folder: Path) -> Iterator[int]:
    """Nodes of an earlier time that run in this folder: whoever started them was killed."""
    for path in folder.glob("node-*/server.pid"):
        try:
            pid = int(path.read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if os.fsencode(path.with_name("server.conf")) in command:
            yield pid
