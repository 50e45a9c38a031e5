"""System calls and allocations a message: what Penstock's processes do, apart from how long it takes.

Each is counted in a run of its own, because counting slows the server down: `strace -c -f` on both
processes for system calls; for allocations a library that counts calls of malloc (allocations/count.c),
with `PYTHONMALLOC=malloc`, so that each object of Python's is one. A slower server finds more waiting each
time that it looks, so its batches are larger: under full load the counts are at the lower end. At 2,000 a
second they are what they are.

How it fails: `CannotCount` where strace is missing or may not trace; there are no figures then.
"""

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from bench import peers
from bench.compare.results import Cost
from bench.compare.subjects import Subject, Variant, penstock_setting
from bench.compare.works import RATE_PER_SECOND, WORKS, Scale, Work
from bench.loadgen import Load, compiled, drive
from bench.server import PeerMissing, Server, disk_folder, installed

ALLOCATIONS = Path(__file__).parent / "allocations"
ATTACH_SECONDS_MAX = 5.0
COUNTER_BYTES = 8
MESSAGES_SHARE = 5
"""Of the messages of a round: counting makes the server slow."""

COUNTED = tuple(work for work in WORKS if work.title in ("end to end 100 B", "32+32 connections", "paced"))

_runs = count(1)


class CannotCount(Exception):
    """Why not."""


def costs(variant: Variant, scale: Scale) -> Iterator[Cost]:
    """What a message costs Penstock in this variant over its first wire, by work."""
    subject = penstock_setting(variant).subjects[0]
    calls = _system_calls(variant, subject, scale)
    allocations = _allocations(variant, subject, scale)
    for work, (system_calls, most_frequent), allocated in zip(COUNTED, calls, allocations, strict=True):
        yield Cost(subject.name, work.title, system_calls, most_frequent, allocated)


def _system_calls(variant: Variant, subject: Subject, scale: Scale) -> list[tuple[float, str]]:
    """For each work: how many in all, and the most frequent ones."""
    found = []
    with disk_folder() as folder, penstock_setting(variant).start(folder) as server:
        for work in COUNTED:
            _drive(server, subject, work, scale)
            with _traced(server, folder / "strace") as report:
                load = _drive(server, subject, work, scale)
            by_name = calls_by_name(report.read_text(encoding="utf-8"))
            frequent = sorted(by_name.items(), key=lambda item: -item[1])[:4]
            shown = ", ".join(f"{name} {calls / load.messages:.3f}" for name, calls in frequent)
            found.append((sum(by_name.values()) / load.messages, shown))
    return found


@contextmanager
def _traced(server: Server, report: Path) -> Iterator[Path]:
    """Counts the server's system calls while the block runs; the counts are in the file after it."""
    try:
        program = installed("strace", "Debian's strace")
    except PeerMissing as missing:
        raise CannotCount(str(missing)) from missing
    pids = [word for pid in server.pids() for word in ("-p", str(pid))]
    strace = subprocess.Popen(
        [program, "-c", "-f", "-o", str(report), *pids], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + ATTACH_SECONDS_MAX
        while not all(_is_traced(pid) for pid in server.pids()):
            if strace.poll() is not None or time.monotonic() > deadline:
                raise CannotCount("strace may not trace other processes here")
            time.sleep(0.01)
        yield report
    finally:
        strace.send_signal(signal.SIGINT)
        strace.wait()


def _is_traced(pid: int) -> bool:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        status = (thread / "status").read_text(encoding="utf-8")
        if "TracerPid:\t0\n" in status:
            return False
    return True


def calls_by_name(table: str) -> dict[str, int]:
    """The counts of `strace -c`: % time, seconds, usecs/call, calls, errors (or nothing), name."""
    found = {}
    for line in table.splitlines():
        words = line.split()
        if len(words) in (5, 6) and words[3].isdigit() and words[-1] != "total":
            found[words[-1]] = int(words[3])
    return found


def _allocations(variant: Variant, subject: Subject, scale: Scale) -> list[float]:
    """For each work."""
    library = compiled("allocations", ALLOCATIONS, "-shared", "-fPIC")
    found = []
    with disk_folder() as folder:
        counter = folder / "allocations"
        counter.write_bytes(bytes(COUNTER_BYTES))
        environment = {
            "LD_PRELOAD": str(library),
            "PYTHONMALLOC": "malloc",
            "BENCH_ALLOCATIONS": str(counter),
            **variant.environment,
        }
        with peers.penstock(folder, http=True, command=variant.command, environment=environment) as server:
            for work in COUNTED:
                _drive(server, subject, work, scale)
                before = _read(counter)
                load = _drive(server, subject, work, scale)
                found.append((_read(counter) - before) / load.messages)
    return found


def _read(counter: Path) -> int:
    return int.from_bytes(counter.read_bytes()[:COUNTER_BYTES], "little")


def _drive(server: Server, subject: Subject, work: Work, scale: Scale) -> Load:
    """A run until the server is quiet again. The first one of a work is its warm-up."""
    messages = scale.messages(work, subject.messages[work.mode])
    run = next(_runs)
    load = drive(
        subject.wire,
        work.mode,
        server.ports[subject.wire],
        queue=f"counted-{run}",
        messages=messages if work.mode == "paced" else max(messages // MESSAGES_SHARE, 100),
        run=run,
        size_bytes=work.size_bytes,
        rate_per_second=RATE_PER_SECOND,
    )
    server.quiet_cpu_seconds()
    return load
