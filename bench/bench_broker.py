"""The broker from outside, over its three wires, and peers that do the same work in the same run.

One load generator (`bench/loadgen`) drives every server; what a mode measures, and when its clock stops,
is in docs/benchmarks.md. Each figure is the median of `RUNS`. CPU is the server's user and system time, all
threads, until it is quiet again, by message. Penstock runs as it is started by `penstock serve`, with
durability `commit`, from the Python sources.

A peer that is not installed, or fails under the load, is named on standard error and left out. Penstock must
not fail: what it does not deliver once, whole and settled ends the benchmark.
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from statistics import median

from bench import peers
from bench.loadgen import Load, LoadError, Spread, drive

RUNS = 3
PACED_PER_SECOND = 2_000
PACED_MESSAGES = 4_000
SIZE_BYTES = 100

Row = tuple[str, float, str, float]

_runs = count(1)


@dataclass(frozen=True, slots=True)
class Work:
    """One row of the plan: a mode over a wire, and what it should reach."""

    name: str
    wire: str
    mode: str
    messages: int
    goal: float = 0.0
    drain: tuple[str, str, float] | None = None  # after publishing: name, wire and goal of draining the same


@dataclass(frozen=True, slots=True)
class Pace:
    """Messages at a fixed rate, and what their latency should be."""

    name: str
    wire: str
    goal_p50_us: float = 0.0
    goal_p99_us: float = 0.0


PENSTOCK: tuple[Work | Pace, ...] = (
    Work("PHPMQ window 500, end to end", "phpmq", "end-to-end", 500_000, 250_000),
    Work("RQ NOREPLY window 500, end to end, confirmed", "rq", "end-to-end", 400_000, 150_000),
    Work("SSPQ one at a time, end to end", "sspq", "end-to-end", 10_000),
    Work("SSPQ publish", "sspq", "publish", 1_500_000, 500_000, ("PHPMQ drain of SSPQ's", "phpmq", 0)),
    Work("PHPMQ publish", "phpmq", "publish", 1_500_000, 0, ("PHPMQ window 500, drain", "phpmq", 0)),
    Work("RQ NOREPLY publish, confirmed", "rq", "publish", 400_000, 0, ("RQ window 500, drain", "rq", 0)),
    Work("RQ request + reply, 1,000 in flight", "rq", "request", 150_000, 100_000),
    Work("PHPMQ 32+32 connections, 16 in flight", "phpmq", "many", 300_000, 200_000),
    Pace("PHPMQ paced", "phpmq", 150, 500),
    Pace("RQ NOREPLY paced", "rq"),
    Pace("SSPQ paced", "sspq"),
)


def peer_plan(wire: str, fast: int, slow: int) -> tuple[Work | Pace, ...]:
    """What Penstock does too; `slow` messages where connections or syncs make a peer slow."""
    return (
        Work("window 500, end to end, confirmed", wire, "end-to-end", fast),
        Work("publish, confirmed", wire, "publish", fast, 0, ("window 500, drain", wire, 0)),
        Work("32+32 connections, 16 in flight", wire, "many", slow),
        Pace("paced", wire),
    )


def redis_always(folder: Path) -> peers.Server:
    return peers.redis(folder, "always")


def redis_everysec(folder: Path) -> peers.Server:
    return peers.redis(folder, "everysec")


def beanstalkd_fsync(folder: Path) -> peers.Server:
    return peers.beanstalkd(folder, fsync=True)


def beanstalkd_no_fsync(folder: Path) -> peers.Server:
    return peers.beanstalkd(folder, fsync=False)


SUBJECTS: tuple[tuple[Callable[[Path], peers.Server], tuple[Work | Pace, ...]], ...] = (
    (peers.penstock, PENSTOCK),
    (redis_always, peer_plan("redis-streams", 150_000, 100_000)),
    (redis_everysec, peer_plan("redis-streams", 200_000, 100_000)),
    (beanstalkd_fsync, peer_plan("beanstalkd", 3_000, 3_000)),
    (beanstalkd_no_fsync, peer_plan("beanstalkd", 20_000, 20_000)),
)


class Bench:
    """One server under load."""

    def __init__(self, server: peers.Server) -> None:
        self._server = server

    def rows(self, plan: tuple[Work | Pace, ...]) -> Iterator[Row]:
        for step in plan:
            yield from self._paced(step) if isinstance(step, Pace) else self._worked(step)
        yield f"{self._server.name}: resident memory afterwards", self._server.resident_mb(), "MB", 0

    def _worked(self, work: Work) -> Iterator[Row]:
        first: list[tuple[Load, float]] = []
        second: list[tuple[Load, float]] = []
        for _ in range(RUNS):
            run = next(_runs)
            queue = self._queue(work.wire, run)
            first.append(self._drive(work.wire, work.mode, queue, run, work.messages))
            if work.drain is not None:
                second.append(self._drive(work.drain[1], "drain", queue, run, work.messages))
        yield from self._rates(work.name, first, work.goal)
        if work.drain is not None:
            yield from self._rates(work.drain[0], second, work.drain[2])

    def _rates(self, name: str, loads: list[tuple[Load, float]], goal: float) -> Iterator[Row]:
        full = f"{self._server.name}: {name}"
        yield full, median(load.per_second for load, _ in loads), "msg/s", goal
        yield f"{full}: CPU", median(cpu / load.messages for load, cpu in loads) * 1e6, "µs/msg", 0

    def _paced(self, pace: Pace) -> Iterator[Row]:
        latencies: list[Spread] = []
        delays: list[Spread] = []
        cpus: list[float] = []
        for _ in range(RUNS):
            run = next(_runs)
            load, cpu = self._drive(pace.wire, "paced", self._queue(pace.wire, run), run, PACED_MESSAGES)
            assert load.latency is not None
            assert load.send_delay is not None
            latencies.append(load.latency)
            delays.append(load.send_delay)
            cpus.append(cpu / load.messages * 1e6)
        name = f"{self._server.name}: {pace.name} {PACED_PER_SECOND:,}/s"
        yield f"{name}, p50", median(spread.p50 for spread in latencies), "µs", pace.goal_p50_us
        yield f"{name}, p99", median(spread.p99 for spread in latencies), "µs", pace.goal_p99_us
        yield f"{name}, p99.9", median(spread.p999 for spread in latencies), "µs", 0
        yield f"{name}, generator's delay p99", median(spread.p99 for spread in delays), "µs", 0
        yield f"{name}: CPU", median(cpus), "µs/msg", 0

    def _drive(self, wire: str, mode: str, queue: str, run: int, messages: int) -> tuple[Load, float]:
        before = self._server.cpu_seconds()
        load = drive(
            wire,
            mode,
            self._server.ports[wire],
            queue=queue,
            messages=messages,
            run=run,
            size_bytes=SIZE_BYTES,
            rate_per_second=PACED_PER_SECOND,
        )
        return load, self._server.quiet_cpu_seconds() - before

    @staticmethod
    def _queue(wire: str, run: int) -> str:
        """A new one each time; SSPQ has no names and always uses the listener's."""
        return "default" if wire == "sspq" else f"bench-{run}"


def run() -> list[Row]:
    """See the module's docstring."""
    rows: list[Row] = []
    spec = find_spec("penstock.broker.broker")
    if spec is None or not str(spec.origin).endswith(".py"):
        print("penstock is compiled here: the goals are those of the Python sources", file=sys.stderr)
    busy = os.getloadavg()[0]
    if busy > 0.5:
        print(f"the machine is busy (load {busy:.1f}): it can do better than these figures", file=sys.stderr)
    for start, plan in SUBJECTS:
        rows += figures(start, plan)
    return rows


def figures(start: Callable[[Path], peers.Server], plan: tuple[Work | Pace, ...]) -> list[Row]:
    """What one server does; nothing, and a line that says why, for a peer that cannot be measured."""
    with peers.disk_folder() as folder:
        try:
            server = start(folder)
        except peers.PeerMissing as missing:
            print(f"left out: {missing}", file=sys.stderr)
            return []
        print(f"measuring {server.name} ...", file=sys.stderr)
        with server:
            try:
                return list(Bench(server).rows(plan))
            except LoadError as error:
                if plan is PENSTOCK:
                    raise
                print(f"left out: {server.name}: {error}", file=sys.stderr)
                return []
