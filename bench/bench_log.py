"""The embedded log beside Redis Streams with `appendfsync always`: append, take and settle.

CPU is user and system time of the process that keeps the messages: this one for the log (all
threads), the server for Redis. Redis gets the same messages pipelined in the same batches.
"""

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from penstock.log.log import Log, open_log
from penstock.model.batch import Batch
from penstock.model.words import Outcome

MESSAGES = 1_000_000
BATCH = 1_000
SIZE = 100
REDIS_MESSAGES = 200_000
IN_FLIGHT_BYTES_MAX = 2 * 1024 * 1024
"""As the broker does it: a producer that is faster than the disk is held back."""

Row = tuple[str, float, str, float]


def now_us() -> int:
    return time.time_ns() // 1000


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def fill(engine: Log, messages: int) -> None:
    bounds = array("i", range(0, SIZE * BATCH + 1, SIZE))
    confirmed: list[object] = []
    for batch in range(messages // BATCH):
        payload = (b"%08d" % batch + b"x" * (SIZE - 8)) * BATCH
        engine.append("bench", Batch(payload, bounds, protocol="http"), now_us(), confirmed.append)
        engine.flush(now_us())
        engine.poll()
        if engine.bytes_in_flight > IN_FLIGHT_BYTES_MAX:
            engine.wait()
    engine.wait()
    assert len(confirmed) == messages // BATCH


def drain(engine: Log) -> int:
    count = 0
    while slices := engine.take("bench", "worker", 500, now_us()):
        for piece in slices:
            engine.settle(
                "bench",
                "worker",
                Outcome.ACK,
                [(piece.offset_start, piece.offset_end)],
                now_us(),
                origin=piece.origin,
            )
            count += len(piece)
        engine.flush(now_us())
        engine.poll()
    engine.wait()
    return count


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    work()
    return time.perf_counter() - wall, cpu_seconds() - cpu


def penstock_figures(folder: str) -> list[Row]:
    engine = open_log(folder, now_us())
    wall, cpu = measured(lambda: fill(engine, MESSAGES))
    rows: list[Row] = [
        ("append with commit, 100 B × 1,000: CPU", cpu / MESSAGES * 1e6, "µs/msg", 0.5),
        ("append with commit, 100 B × 1,000", MESSAGES / wall, "msg/s", 0),
    ]
    wall, cpu = measured(lambda: drain(engine))
    rows += [
        ("take + settle, 500 at a time: CPU", cpu / MESSAGES * 1e6, "µs/msg", 0.5),
        ("take + settle, 500 at a time", MESSAGES / wall, "msg/s", 0),
    ]
    engine.close(now_us())
    return rows


# --- memory and reopening, in processes of their own --------------------------------------------------


def child(verb: str, folder: str, messages: int) -> None:
    if verb == "grow":
        engine = open_log(folder, now_us())
        fill(engine, BATCH)
        before = resident_mb()
        fill(engine, messages)
        print(resident_mb() - before, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.perf_counter()
    engine = open_log(folder, now_us())
    first = engine.take("bench", "worker", 1, now_us())
    seconds = time.perf_counter() - started
    assert len(first) == 1
    assert first[0].offset_start == 0
    assert engine.describe("bench").offset_end == messages + BATCH
    print(seconds, flush=True)
    engine.abandon()


def ask_child(verb: str, folder: str, messages: int) -> float:
    command = [sys.executable, "-m", "bench.bench_log", verb, folder, str(messages)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert result.returncode in (0, -signal.SIGKILL), f"{verb} ended with {result.returncode}"
    return float(result.stdout)


def backlog_figures(folder: str) -> list[Row]:
    rows: list[Row] = []
    for messages, goal, goal_open in ((1_000_000, 20.0, 0.3), (10_000_000, 40.0, 0.0)):
        place = os.path.join(folder, str(messages))
        grown = ask_child("grow", place, messages)
        rows.append((f"{messages:,} queued messages of 100 B: resident memory grows by", grown, "MB", goal))
        seconds = ask_child("reopen", place, messages)
        rows.append(
            (f"open after kill -9 with {messages:,} queued, to the first message", seconds, "s", goal_open)
        )
        shutil.rmtree(place)
    return rows


# --- the peer ------------------------------------------------------------------------------------------


def redis_figures(folder: str) -> list[Row]:
    """Redis Streams, appendfsync always. Nothing where there is no redis-server on this machine."""
    server = shutil.which("redis-server")
    if server is None:
        print("redis-server is not installed: the peer is left out", file=sys.stderr)
        return []
    path = os.path.join(folder, "redis.sock")
    process = subprocess.Popen(
        f"{server} --port 0 --unixsocket {path} --dir {folder} --appendonly yes --appendfsync always".split(),
        stdout=subprocess.DEVNULL,
    )
    try:
        peer = connect(path)
        rows: list[Row] = []
        entry = command(b"XADD", b"bench", b"*", b"v", b"x" * SIZE)
        peer.sendall(command(b"XGROUP", b"CREATE", b"bench", b"g", b"0", b"MKSTREAM"))
        read_lines(peer, 1)
        cpu = cpu_of(process.pid)
        wall = time.perf_counter()
        for _ in range(REDIS_MESSAGES // BATCH):
            peer.sendall(entry * BATCH)
            read_lines(peer, 2 * BATCH)
        seconds = time.perf_counter() - wall
        cpu = cpu_of(process.pid) - cpu
        rows.append(("Redis Streams, fsync always: append: CPU", cpu / REDIS_MESSAGES * 1e6, "µs/msg", 0))
        rows.append(("Redis Streams, fsync always: append", REDIS_MESSAGES / seconds, "msg/s", 0))
        peer.close()
        return rows
    finally:
        process.terminate()
        process.wait()


def connect(path: str) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.connect(path)
        except OSError:
            peer.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
            continue
        return peer


def command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def read_lines(peer: socket.socket, lines: int) -> None:
    """An answer of XADD is two lines, a simple one is one."""
    while lines > 0:
        data = peer.recv(1 << 20)
        assert data, "redis-server has closed the connection"
        assert not data.startswith(b"-"), data[:80]
        lines -= data.count(b"\r\n")


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run() -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        log = os.path.join(folder, "log")
        return penstock_figures(log) + redis_figures(folder) + backlog_figures(folder)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        child(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        for name, value, unit, goal in run():
            print(f"{name:70} {value:12.4g} {unit:8} {f'goal {goal:g}' if goal else ''}")
