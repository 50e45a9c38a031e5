"""The load generator from Python: compiled where it is used, called once for each run.

The C sources beside this file are compiled when they are first needed, into a folder of the user in the
system's temporary folder, under a name that is made from the sources and the command: what is there is what
these sources say. Nothing is written into the tree.

How it fails: `LoadError`, with the generator's own line, where a run did not come out right; there are no
half figures. A machine without a C compiler is told that it needs one.
"""

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ("-O2", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra")
SECONDS_MAX = 60.0


class LoadError(RuntimeError):
    """The generator could not be built, or a run did not come out right."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Microseconds."""

    p50: float
    p99: float
    p999: float
    most: float


@dataclass(frozen=True, slots=True)
class Load:
    """What a run has given. `latency` and `send_delay` are there for the mode `paced` only."""

    messages: int
    seconds: float
    per_second: float
    end: float  # of the clock that `time.monotonic` reads
    latency: Spread | None
    send_delay: Spread | None  # of it, what passed before the generator had sent the message


@cache
def build() -> Path:
    """The compiled generator."""
    return compiled("loadgen", SOURCES)


def compiled(name: str, folder_of_sources: Path, *more_flags: str) -> Path:
    """What the C sources of a folder give."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise LoadError(f"{name} needs a C compiler: install gcc (or set CC) and run this again")
    flags = (*FLAGS, *more_flags)
    sources = sorted(folder_of_sources.glob("*.c"))
    digest = hashlib.sha256(" ".join((compiler, *flags)).encode())
    for source in (*sources, *sorted(folder_of_sources.glob("*.h"))):
        digest.update(source.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"penstock-loadgen-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.is_symlink():
        raise LoadError(f"{folder} belongs to somebody else: remove it, or set TMPDIR")
    program = folder / f"{name}-{digest.hexdigest()[:16]}"
    if not program.exists():
        fresh = folder / f"{program.name}.{os.getpid()}"
        command = [compiler, *flags, "-o", str(fresh), *map(str, sources)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            raise LoadError(f"{name} does not compile:\n{made.stderr}")
        fresh.rename(program)
    return program


def drive(
    wire: str,
    mode: str,
    port: int,
    *,
    queue: str,
    messages: int,
    run: int,
    size_bytes: int = 100,
    rate_per_second: int = 0,
    seconds_max: float = SECONDS_MAX,
) -> Load:
    """One run of the generator against a server on this machine. `run` is in every payload."""
    command = [*_command(wire, mode, port), "--queue", queue]
    command += ["--messages", str(messages), "--size", str(size_bytes), "--run", str(run)]
    command += ["--seconds-max", str(seconds_max)]
    if rate_per_second:
        command += ["--rate", str(rate_per_second)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LoadError(f"{wire} {mode}: {done.stderr.strip() or f'ended with {done.returncode}'}")
    report = json.loads(done.stdout)
    return Load(
        report["messages"],
        report["seconds"],
        report["per_second"],
        report["end"],
        _spread(report.get("latency_us")),
        _spread(report.get("send_delay_us")),
    )


@contextmanager
def idle(wire: str, port: int, connections: int) -> Iterator[float]:
    """Connections that say hello and then nothing while the block runs; when the first one was begun."""
    command = [*_command(wire, "idle", port), "--consumers", str(connections)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise LoadError(f"{wire} idle: {process.stderr.read().strip()}")
            yield float(json.loads(line)["start"])
        finally:
            process.kill()  # the server sees the connections end, as it does when a client's machine goes


def _command(wire: str, mode: str, port: int) -> list[str]:
    return [str(build()), "--wire", wire, "--mode", mode, "--port", str(port)]


def _spread(marks: dict[str, float] | None) -> Spread | None:
    return None if marks is None else Spread(marks["p50"], marks["p99"], marks["p99.9"], marks["max"])
