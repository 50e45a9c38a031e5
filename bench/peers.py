"""Servers to measure: Penstock and its peers, started and stopped, with readings of what they cost.

Every server gets an empty folder on a real disk, listens on this machine only, and is ended when its `with`
block is left. The peers' settings are those in which they promise about the same as Penstock does, and the
ones that people use who can do without:

    Redis        append-only file, `appendfsync always` or `everysec`; no snapshots and no rewriting of the
                 file during a run, which would only slow it down
    beanstalkd   binlog, `-f 0` (an fsync each) or `-F` (none)

How it fails: `PeerMissing` where a program is not installed, `PeerFailed` where it does not start.
"""

import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

START_SECONDS_MAX = 20.0
STOP_SECONDS_MAX = 20.0
QUIET_SECONDS_MAX = 5.0
QUIET_SHARE = 0.1
"""A server that uses less of a core than this has nothing left to do."""

_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs"})
_REPOSITORY = Path(__file__).parent.parent


class PeerMissing(Exception):
    """The program is not on this machine."""

    def __init__(self, program: str, package: str) -> None:
        super().__init__(f"{program} is not installed (Debian's package: {package})")


class PeerFailed(RuntimeError):
    """The program did not start."""


class Server:
    """A process that listens, by the name of each wire that it speaks: its port."""

    def __init__(self, name: str, process: "subprocess.Popen[str]", ports: dict[str, int]) -> None:
        self.name = name
        self.ports = ports
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_seconds(self) -> float:
        """User and system time of all its threads until now."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8")
        fields = stat.rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def quiet_cpu_seconds(self) -> float:
        """The same once it has done what was left to do: what it had taken may not be on the disk yet."""
        deadline = time.monotonic() + QUIET_SECONDS_MAX
        before = self.cpu_seconds()
        while time.monotonic() < deadline:
            time.sleep(0.1)
            now = self.cpu_seconds()
            if now - before <= 0.1 * QUIET_SHARE:
                return now
            before = now
        return before

    def resident_mb(self) -> float:
        pages = Path(f"/proc/{self._process.pid}/statm").read_text(encoding="utf-8").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def disk_folder() -> Iterator[Path]:
    """A temporary folder that is not in memory, where a sync would cost nothing."""
    for parent in (Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()):
        if os.access(parent, os.W_OK) and _filesystem(parent) not in _MEMORY_FILESYSTEMS:
            with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=parent) as folder:
                yield Path(folder)
            return
    raise PeerFailed("no folder on a real disk to keep messages in: set TMPDIR to one")


def _filesystem(folder: Path) -> str:
    """The kind of file system that holds a folder; the last mount above it counts."""
    best, kind = -1, ""
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, mounted, this_kind = line.split()[:3]
        if folder.resolve().is_relative_to(mounted) and len(mounted) >= best:
            best, kind = len(mounted), this_kind
    return kind


def penstock(folder: Path, *, http: bool = False) -> Server:
    """`penstock serve` of this tree, by this interpreter, with its defaults: durability `commit`."""
    anywhere = "127.0.0.1:0"
    command = [sys.executable, "-m", "penstock", "serve", "--data", str(folder / "penstock")]
    command += [
        "--sspq",
        anywhere,
        "--phpmq",
        anywhere,
        "--rq",
        anywhere,
        "--http",
        anywhere if http else "off",
    ]
    process = subprocess.Popen(
        [*command, "--log-level", "warning"], stdout=subprocess.PIPE, text=True, cwd=_REPOSITORY
    )
    assert process.stdout is not None
    ready = select.select([process.stdout], [], [], START_SECONDS_MAX)[0]
    line = process.stdout.readline() if ready else ""
    if not line.startswith("penstock ready "):
        process.kill()
        process.wait()
        raise PeerFailed(f"penstock serve did not start within {START_SECONDS_MAX} s: {line!r}")
    addresses = dict(word.split("=") for word in line.split()[2:])
    return Server(
        "Penstock",
        process,
        {wire: int(address.rpartition(":")[2]) for wire, address in addresses.items()},
    )


def redis(folder: Path, appendfsync: str) -> Server:
    """Redis with an append-only file."""
    data = folder / f"redis-{appendfsync}"
    data.mkdir()
    port = _free_port()
    command = [_installed("redis-server", "redis-server"), "--port", str(port), "--bind", "127.0.0.1"]
    command += ["--dir", str(data), "--appendonly", "yes", "--appendfsync", appendfsync]
    command += ["--save", "", "--auto-aof-rewrite-percentage", "0", "--logfile", "redis.log"]
    return _listening(f"Redis, {appendfsync}", command, {"redis-streams": port, "redis-lists": port})


def beanstalkd(folder: Path, fsync: bool) -> Server:
    """beanstalkd with a binlog."""
    data = folder / f"beanstalkd-{fsync}"
    data.mkdir()
    port = _free_port()
    command = [_installed("beanstalkd", "beanstalkd"), "-l", "127.0.0.1", "-p", str(port), "-b", str(data)]
    command += ["-f", "0"] if fsync else ["-F"]
    name = "beanstalkd, fsync each" if fsync else "beanstalkd, no fsync"
    return _listening(name, command, {"beanstalkd": port})


def _installed(program: str, package: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise PeerMissing(program, package)
    return found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _listening(name: str, command: list[str], ports: dict[str, int]) -> Server:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, text=True)
    deadline = time.monotonic() + START_SECONDS_MAX
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", next(iter(ports.values())))).close()
            return Server(name, process, ports)
        time.sleep(0.05)
    process.kill()
    process.wait()
    raise PeerFailed(f"{name} did not start within {START_SECONDS_MAX} s: {' '.join(command)}")
