"""The broker from outside, over its three wires. Beside its peers it stands in `bench.compare`.

The load generator (`bench/loadgen`) drives it; what a mode measures, and when its clock stops, is in
docs/benchmarks.md. Each figure is the median of `RUNS`. CPU is the server's user and system time, until it is
quiet again, by message. Penstock runs as it is started by `penstock serve`, with durability
`commit`, from the Python sources. What it does not deliver once, whole and settled ends the benchmark.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import count
from statistics import median

from bench import peers
from bench.cores import family, pinned
from bench.loadgen import Load, Spread, drive
from bench.server import Server, disk_folder

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


END_TO_END = Work("PHPMQ window 500, end to end", "phpmq", "end-to-end", 500_000, 250_000)
PENSTOCK: tuple[Work | Pace, ...] = (
    END_TO_END,
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


class Bench:
    """One server under load."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def rows(self) -> Iterator[Row]:
        for step in PENSTOCK:
            yield from self._paced(step) if isinstance(step, Pace) else self._worked(step)
        yield from self._apart()
        yield f"{self._server.name}: resident memory afterwards", self._server.resident_mb(), "MB", 0

    def _apart(self) -> Iterator[Row]:
        """What a second core is to the broker: the generator has one of its own."""
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            return
        for where, theirs in (("its own core", {cores[0]}), ("both cores", set(cores))):
            work = replace(END_TO_END, name=f"{END_TO_END.name}, broker on {where}", goal=0.0)
            with (
                pinned(lambda: family(self._server.pid), theirs),
                pinned(lambda: [os.getpid()], {cores[-1]}),
            ):
                yield from self._worked(work)

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
    spec = find_spec("penstock.broker.broker")
    if spec is None or not str(spec.origin).endswith(".py"):
        print("penstock is compiled here: the goals are those of the Python sources", file=sys.stderr)
    busy = os.getloadavg()[0]
    if busy > 0.5:
        print(f"the machine is busy (load {busy:.1f}): it can do better than these figures", file=sys.stderr)
    with disk_folder() as folder, peers.penstock(folder) as server:
        return list(Bench(server).rows())
