"""What a cluster takes in and hands out: three NATS nodes and two front-ends, all on this machine.

The nodes sync every write and every record is on three of them (R3). Of the two front-ends one leads and the
other relays to it; each figure is taken through one of them, by its name. CPU is that of the front-ends'
processes alone, both of them together where messages pass through both. All six programs and the load
generator share the cores that there are: on a machine with two, the nodes take most of them.

    publish        RQ, each message confirmed when it is stored on the nodes
    end to end     PHPMQ, a window of 500; RQ, with confirmations
    request        RQ, one after the other, requester and consumer at different front-ends; the clients are
                   written in Python, and their own time is in it
"""

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench import loadgen, peers
from bench.server import Server, disk_folder
from penstock.client import RqClient
from penstock.log.jetstream.cluster import Cluster

Row = tuple[str, float, str, float]

ROUNDS = 3
MESSAGES = 400_000
REQUESTS = 2_000
PUBLISH_GOAL = 40_000
END_TO_END_GOAL = 20_000
CPU_GOAL_US = 6.0
REQUEST_GOAL_MS = 3.0
GENERATOR_QUEUE = "bench"


@contextmanager
def running() -> Iterator[tuple[Server, Server, Cluster]]:
    """The front-end that leads, the one that follows, and the nodes."""
    with disk_folder() as folder, ExitStack() as stack:
        nodes = Cluster(folder / "nats", 3)
        stack.callback(nodes.stop)
        nodes.start()
        monitors = ",".join(f"http://127.0.0.1:{node.ports.monitor}" for node in nodes.nodes)
        words = ("--engine", ",".join(nodes.urls), "--cluster-monitor", monitors)
        yield (
            stack.enter_context(_front_end(folder / "leader", words)),
            stack.enter_context(_front_end(folder / "follower", words)),
            nodes,
        )


def _front_end(folder: Path, words: tuple[str, ...]) -> Server:
    folder.mkdir()
    return peers.penstock(folder, more=words)


def run() -> list[Row]:
    with running() as (leader, follower, nodes):
        runs = iter(range(1, 1 << 20))
        rows: list[Row] = []
        for title, server in (("leader", leader), ("follower", follower)):
            for name, wire, mode, goal in (
                ("publish, RQ confirmed", "rq", "publish", PUBLISH_GOAL),
                ("end to end, PHPMQ", "phpmq", "end-to-end", END_TO_END_GOAL),
                ("end to end, RQ confirmed", "rq", "end-to-end", END_TO_END_GOAL),
            ):
                taken = [
                    _measure(server, [leader, follower], nodes, wire, mode, next(runs)) for _ in range(ROUNDS)
                ]
                middle = [statistics.median(column) for column in zip(*taken, strict=True)]
                what = f"{name}, {title}"
                rows.append((what, middle[0], "msg/s", goal))
                rows.append((f"{what}: CPU of that front-end", middle[1], "µs/msg", CPU_GOAL_US))
                rows.append((f"{what}: CPU of both front-ends", middle[2], "µs/msg", 0))
                rows.append((f"{what}: CPU of the three nodes", middle[3], "µs/msg", 0))
        times_ms = sorted(_requests(leader, follower))
        p50, p99 = times_ms[len(times_ms) // 2], times_ms[len(times_ms) * 99 // 100]
        rows.append(("request and reply, RQ across both: p50", p50, "ms", REQUEST_GOAL_MS))
        rows.append(("request and reply, RQ across both: p99", p99, "ms", 0))
        return rows


def _measure(
    server: Server, fronts: list[Server], nodes: Cluster, wire: str, mode: str, run: int
) -> tuple[float, float, float, float]:
    """Messages a second; and µs of CPU for each: of the front-end it came through, of both, of the nodes."""

    def cpu_seconds() -> tuple[float, float, float]:
        each = {front.pid: front.quiet_cpu_seconds() for front in fronts}
        return each[server.pid], sum(each.values()), sum(_cpu_seconds(node.pid) for node in nodes.nodes)

    before = cpu_seconds()
    load = loadgen.drive(
        wire, mode, server.ports[wire], queue=f"{GENERATOR_QUEUE}-{run}", messages=MESSAGES, run=run
    )
    own, both, below = (
        (after - start) / load.messages * 1e6 for start, after in zip(before, cpu_seconds(), strict=True)
    )
    return load.per_second, own, both, below


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _requests(one: Server, other: Server) -> list[float]:
    """How long each request took, in milliseconds."""
    with (
        RqClient(f"rq://127.0.0.1:{one.ports['rq']}") as serving,
        RqClient(f"rq://127.0.0.1:{other.ports['rq']}") as asking,
    ):
        serving.serve("echo", lambda request: request.body)
        times_ms = []
        for number in range(REQUESTS):
            body = b"%d" % number
            began = time.perf_counter()
            answer = asking.request("echo", body)
            times_ms.append((time.perf_counter() - began) * 1e3)
            assert answer == body, f"asked {body!r}, answered {answer!r}"
        return times_ms
