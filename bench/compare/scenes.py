"""What needs a server of its own: a backlog and a crash with it, many idle connections, many queues.

Each scene starts the server with an empty folder and returns its findings by name. Memory is what is
resident of all its processes, above what it was before the scene. After the crashes Penstock's backlog is
drained, which proves that it is whole; peers are not asked for that, because some of them keep for a while
what a consumer held.
"""

import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.compare.subjects import PENSTOCK, Setting, Subject
from bench.compare.works import Scale
from bench.loadgen import Load, LoadError, drive, idle
from bench.server import Server, disk_folder

SECONDS_MAX = 300.0
RECOVERY_SECONDS_MAX = 120.0
ACCEPT_SECONDS_MAX = 120.0
HTTP_SECONDS_MAX = 20.0

RUN = 1
QUEUE = "scene"


def _backlog(setting: Setting, subject: Subject, scale: Scale, folder: Path) -> dict[str, float]:
    with setting.start(folder) as server:
        idle_mb = _settled_mb(server)
        _drive(server, subject, "publish", scale.backlog)
        server.quiet_cpu_seconds()
        backlog_mb = server.resident_mb() - idle_mb
        server.kill()
    recoveries = [_recovery(setting, subject, scale, folder) for _ in range(scale.recoveries)]
    if setting.program == PENSTOCK:
        with setting.start(folder) as server:
            _drive(server, subject, "drain", scale.backlog)
    return {"idle MB": idle_mb, "backlog MB": backlog_mb, "recovery s": median(recoveries)}


def _recovery(setting: Setting, subject: Subject, scale: Scale, folder: Path) -> float:
    """Seconds from the start of the process to the first message; then the next crash."""
    begun = time.monotonic()
    with setting.start(folder) as server:
        while True:
            try:
                end = _drive(server, subject, "first", scale.backlog).end
            except LoadError:
                # It listens and is still reading what it has.
                if time.monotonic() - begun > RECOVERY_SECONDS_MAX:
                    raise
                time.sleep(0.01)
            else:
                server.kill()
                return end - begun


def _idle(setting: Setting, subject: Subject, scale: Scale, folder: Path) -> dict[str, float]:
    with setting.start(folder) as server:
        before_mb = _settled_mb(server)
        before_files = server.files()
        with idle(subject.wire, server.ports[subject.wire], scale.connections) as begun:
            while (accepted := server.files() - before_files) < scale.connections:
                if time.monotonic() - begun > ACCEPT_SECONDS_MAX:
                    raise LoadError(f"{accepted} of {scale.connections} connections were accepted")
                time.sleep(0.02)
            seconds = time.monotonic() - begun
            server.quiet_cpu_seconds()
            connections_mb = server.resident_mb() - before_mb
            _drive(server, subject, "end-to-end", 1_000)  # it still does its work
    return {"connections MB": connections_mb, "connections s": seconds}


def _queues(setting: Setting, subject: Subject, scale: Scale, folder: Path) -> dict[str, float]:
    with setting.start(folder) as server:
        before_mb = _settled_mb(server)
        load = _drive(server, subject, "queues", scale.queues)
        server.quiet_cpu_seconds()
        queues_mb = server.resident_mb() - before_mb
    return {"queues MB": queues_mb, "queue ms": load.seconds / load.messages * 1e3}


def _drive(server: Server, subject: Subject, mode: str, messages: int) -> Load:
    port = server.ports[subject.wire]
    return drive(subject.wire, mode, port, queue=QUEUE, messages=messages, run=RUN, seconds_max=SECONDS_MAX)


def _settled_mb(server: Server) -> float:
    """What is resident once everything that the server starts with is there."""
    if "http" in server.ports:
        _wait_for_http(server.ports["http"])
    server.quiet_cpu_seconds()
    return server.resident_mb()


def _wait_for_http(port: int) -> None:
    """Penstock's second process comes up after the first one is ready."""
    url = f"http://127.0.0.1:{port}/healthz"
    urllib.request.urlopen(url, timeout=HTTP_SECONDS_MAX).close()


@dataclass(frozen=True, slots=True)
class Scene:
    seconds: float  # about; for the time that is left
    play: Callable[[Setting, Subject, Scale, Path], dict[str, float]]


SCENES = {"backlog": Scene(25, _backlog), "idle": Scene(8, _idle), "queues": Scene(12, _queues)}
"""By the names that subjects call them."""


def play(scene: str, setting: Setting, subject: Subject, scale: Scale) -> dict[str, float]:
    """One scene, from an empty folder to the end of its server."""
    with disk_folder() as folder:
        return SCENES[scene].play(setting, subject, scale, folder)
