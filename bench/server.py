"""A server under measurement: its processes, from start to end, with readings of what they cost.

A server is one process that listens, whatever it starts itself, and sometimes a helper beside it (RabbitMQ's
epmd). CPU and memory are those of all of them together, and all of them are gone when the server's `with`
block is left. It runs in a session of its own, so that Ctrl-C reaches this program first, which then ends it.

How it fails: `PeerMissing` where a program is not installed, `PeerFailed` where it does not start.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from bench.cores import family

START_SECONDS_MAX = 180.0
STOP_SECONDS_MAX = 20.0
QUIET_SECONDS_MAX = 5.0
QUIET_SHARE = 0.1
"""A server that uses less of a core than this has nothing left to do."""

_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs"})


class PeerMissing(Exception):
    """The program is not on this machine."""

    def __init__(self, program: str, package: str) -> None:
        super().__init__(f"{program} is not installed ({package})")


class PeerFailed(RuntimeError):
    """The program did not start."""


class Server:
    """A process that listens, by the name of each wire that it speaks: its port."""

    def __init__(
        self,
        name: str,
        process: "subprocess.Popen[str]",
        ports: dict[str, int],
        helpers: Sequence["subprocess.Popen[str]"] = (),
    ) -> None:
        self.name = name
        self.ports = ports
        self._process = process
        self._helpers = tuple(helpers)

    @property
    def pid(self) -> int:
        return self._process.pid

    def pids(self) -> list[int]:
        """All its processes, as they are now."""
        return [pid for root in (self._process, *self._helpers) for pid in family(root.pid)]

    def cpu_seconds(self) -> float:
        """User and system time of all threads of all its processes until now."""
        ticks = 0
        for pid in self.pids():
            with suppress(FileNotFoundError, ProcessLookupError):
                stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
                fields = stat.rpartition(") ")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

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
        pages = 0
        for pid in self.pids():
            with suppress(FileNotFoundError, ProcessLookupError):
                pages += int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def files(self) -> int:
        """How many files and sockets its processes have open."""
        count = 0
        for pid in self.pids():
            with suppress(FileNotFoundError, ProcessLookupError):
                count += len(os.listdir(f"/proc/{pid}/fd"))
        return count

    def kill(self) -> None:
        """kill -9, everything at once: what is not on the disk or with the kernel is gone."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._collect()

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            pids = self.pids()
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS_MAX)
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._collect()

    def _collect(self) -> None:
        for process in (self._process, *self._helpers):
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@contextmanager
def killed_on_failure(server: Server) -> Iterator[None]:
    """For the time before somebody else has the server: nothing of it outlives an error, nor Ctrl-C."""
    try:
        yield
    except BaseException:
        server.kill()
        raise


@contextmanager
def disk_folder() -> Iterator[Path]:
    """A temporary folder that is not in memory, where a sync would cost nothing."""
    for parent in (Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()):
        if os.access(parent, os.W_OK) and filesystem(parent) not in _MEMORY_FILESYSTEMS:
            with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=parent) as folder:
                yield Path(folder)
            return
    raise PeerFailed("no folder on a real disk to keep messages in: set TMPDIR to one")


def filesystem(folder: Path) -> str:
    """The kind of file system that holds a folder; the last mount above it counts."""
    best, kind = -1, ""
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, mounted, this_kind = line.split()[:3]
        if folder.resolve().is_relative_to(mounted) and len(mounted) >= best:
            best, kind = len(mounted), this_kind
    return kind


def installed(program: str, package: str, *, beside: str = "") -> str:
    """The path of a program; `beside` is a folder to look into first."""
    found = shutil.which(program, path=f"{beside}:{os.environ.get('PATH', os.defpath)}".lstrip(":"))
    if found is None:
        raise PeerMissing(program, package)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def spawn(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    is_heard: bool = False,
) -> "subprocess.Popen[str]":
    """A process of a server, that hears of Ctrl-C from us only. One that `is_heard` speaks into a pipe."""
    return subprocess.Popen(
        command,
        env={**os.environ, **(environment or {})},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if is_heard else subprocess.DEVNULL,
        stderr=None if is_heard else subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def listening(
    name: str,
    command: Sequence[str],
    ports: dict[str, int],
    *,
    environment: Mapping[str, str] | None = None,
    helpers: Sequence["subprocess.Popen[str]"] = (),
) -> Server:
    """A server that has no other way to say that it is there than to accept connections."""
    process = spawn(command, environment=environment)
    server = Server(name, process, ports, helpers)
    deadline = time.monotonic() + START_SECONDS_MAX
    with killed_on_failure(server):
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", next(iter(ports.values())))).close()
                return server
            time.sleep(0.005)
        raise PeerFailed(f"{name} did not start within {START_SECONDS_MAX:.0f} s: {' '.join(command)}")
