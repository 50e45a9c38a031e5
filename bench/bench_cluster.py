"""What a cluster takes in and hands out: three NATS nodes and front-ends, all on this machine.

The nodes sync every write and every record is on three of them (R3). All programs and the load generator
share the cores that there are: on a machine with two, the nodes take most of them. So what counts is CPU a
message, by process.

One log, two front-ends, of which one leads and the other relays to it; each figure is taken through one of
them, by its name:

    publish        RQ, each message confirmed when it is stored on the nodes
    end to end     PHPMQ, a window of 500; RQ, with confirmations
    request        RQ, one after the other, requester and consumer at different front-ends; the clients are
                   written in Python, and their own time is in it

Many queues, `QUEUES` of them at once, each with a producer and a consumer, end to end: with one broker on its
own disk, with a single front-end, and with three front-ends that have one log or 16.

    spread         each pair is at any front-end, whoever leads its queue
    at the leader  each pair is where its queue is led
    at rest        what the front-ends take when nobody is connected
    one commit     of a transaction that has a message for each of `COMMIT_QUEUES` queues

With `JOIN_GB=10` in the environment, only how a front-end joins logs of so many GB (`join.py`).
"""

import json
import os
import statistics
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench import join, loadgen, peers
from bench.server import Server, disk_folder
from penstock.client import RqClient
from penstock.log.jetstream.cluster import Cluster
from penstock.model.shards import shard_of

Row = tuple[str, float, str, float]

ROUNDS = 3
MESSAGES = 400_000
REQUESTS = 2_000
PUBLISH_GOAL = 40_000
END_TO_END_GOAL = 20_000
CPU_GOAL_US = 6.0
REQUEST_GOAL_MS = 3.0
GENERATOR_QUEUE = "bench"

QUEUES = 48
QUEUE_MESSAGES = 40_000
SHARDS = 16
FRONT_ENDS = 3
LED_GOAL_PERCENT = 45.0
SPREAD_GOAL = 1.6
AT_LEADER_GOAL = 1.1
"""Times the CPU of a single front-end, for each message."""

COMMIT_QUEUES = 10_000

REST_SECONDS = 20.0
SETTLED_SECONDS_MAX = 90.0
RUN_SECONDS_MAX = 300.0


@contextmanager
def running() -> Iterator[tuple[Server, Server, Cluster]]:
    """The front-end that leads, the one that follows, and the nodes."""
    with disk_folder() as folder, ExitStack() as stack:
        nodes = Cluster(folder / "nats", 3)
        stack.callback(nodes.stop)
        nodes.start()
        monitors = ",".join(f"http://127.0.0.1:{node.ports.monitor}" for node in nodes.nodes)
        words = ("--engine", ",".join(nodes.urls), "--cluster-monitor", monitors, "--cluster-shards", "1")
        yield (
            stack.enter_context(_front_end(folder / "leader", words)),
            stack.enter_context(_front_end(folder / "follower", words)),
            nodes,
        )


def _front_end(folder: Path, words: tuple[str, ...]) -> Server:
    folder.mkdir()
    return peers.penstock(folder, more=words)


def run() -> list[Row]:
    if gigabytes := float(os.environ.get("JOIN_GB", "0")):
        return join.run(gigabytes)
    return [*_of_one_queue(), *_of_many_queues()]


def _of_one_queue() -> list[Row]:
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


# --- many queues -------------------------------------------------------------------------------------


class Many:
    """Front-ends, or one broker, with all queues in use at once."""

    def __init__(self, fronts: Sequence[Server], nodes: Cluster | None = None, shards: int = 1) -> None:
        self.fronts = fronts
        self.nodes = nodes
        self._shards = shards
        self._runs = iter(range(1, 1 << 20))
        self.leaders: list[int] = [0] * shards  # by shard: which front-end

    def settle(self) -> None:
        """Wait until each front-end leads its share."""
        deadline = time.monotonic() + SETTLED_SECONDS_MAX
        wanted = 1 if self._shards == 1 else len(self.fronts)
        while True:
            claims = _engine(self.fronts[0])["cluster"]["shards"]
            names = [_engine(front)["cluster"]["id"] for front in self.fronts]
            self.leaders = [names.index(it["leader"]) if it["leader"] in names else -1 for it in claims]
            loads = Counter(self.leaders)
            if -1 not in loads and len(loads) == wanted and max(loads.values()) <= -(-self._shards // wanted):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"shards are not led by their shares: {self.leaders}")
            time.sleep(0.5)

    def led_percent(self, queues: Sequence[str]) -> float:
        """How many of the queues who leads most of them leads."""
        loads = Counter(self.leader(queue) for queue in queues)
        return max(loads.values()) / len(queues) * 100

    def leader(self, queue: str) -> int:
        return self.leaders[shard_of(queue, self._shards)]

    def measure(self, wire: str, place: Callable[[str, int], int]) -> tuple[list[float], float, float]:
        """µs of CPU for a message: of each front-end, of all, of the nodes. `place`: by the name and the
        number of a queue, at which front-end its clients are."""
        run = next(self._runs)
        queues = queues_of(run)

        def drive(number: int) -> None:
            queue = queues[number]
            port = self.fronts[place(queue, number)].ports[wire]
            messages, its = QUEUE_MESSAGES, run * 100 + number
            loadgen.drive(
                wire,
                "end-to-end",
                port,
                queue=queue,
                messages=messages,
                run=its,
                seconds_max=RUN_SECONDS_MAX,
            )

        def cpu_seconds() -> list[float]:
            for front in self.fronts:
                front.quiet_cpu_seconds()
            nodes = self.nodes.nodes if self.nodes is not None else []
            return [_cpu_seconds(pid) for pid in [it.pid for it in self.fronts] + [it.pid for it in nodes]]

        before = cpu_seconds()
        with ThreadPoolExecutor(QUEUES) as pool:
            list(pool.map(drive, range(QUEUES)))
        each = [
            (after - start) / (QUEUES * QUEUE_MESSAGES) * 1e6
            for start, after in zip(before, cpu_seconds(), strict=True)
        ]
        fronts = each[: len(self.fronts)]
        return fronts, sum(fronts), sum(each[len(self.fronts) :])

    def commit(self) -> float:
        """Seconds that one commit takes which has a message for each of many queues; the first makes them."""
        run = next(self._runs)
        rows = "".join(f'{{"queue": "commit.{it}", "value": "x"}}\n' for it in range(COMMIT_QUEUES))
        key = f"commit/{run}"
        stage = self._post(f"/v1/stages?transaction={key}", rows, "application/x-ndjson")["stage"]
        began = time.monotonic()
        self._post(
            "/v1/transactions", json.dumps({"transaction": key, "stages": [stage]}), "application/json"
        )
        return time.monotonic() - began

    def _post(self, path: str, body: str, media: str) -> dict[str, Any]:
        # Any: JSON.
        url = f"http://127.0.0.1:{self.fronts[0].ports['http']}{path}"
        asked = urllib.request.Request(url, body.encode(), {"Content-Type": media})
        with urllib.request.urlopen(asked, timeout=RUN_SECONDS_MAX) as answer:
            told: dict[str, Any] = json.load(answer)
            return told

    def rest(self) -> tuple[float, float]:
        """Percent of a core, of all processes of all front-ends, and MB of memory."""
        for front in self.fronts:
            front.quiet_cpu_seconds()
        before, began = sum(it.cpu_seconds() for it in self.fronts), time.monotonic()
        time.sleep(REST_SECONDS)
        spent = sum(it.cpu_seconds() for it in self.fronts) - before
        return spent / (time.monotonic() - began) * 100, sum(it.resident_mb() for it in self.fronts)


def queues_of(run: int) -> list[str]:
    return [f"many.{run}.{number}" for number in range(QUEUES)]


def _engine(front: Server) -> dict[str, Any]:
    # Any: JSON.
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{front.ports['http']}/v1/engine", timeout=10
        ) as answer:
            engine: dict[str, Any] = json.load(answer)
            return engine
    except OSError:
        return {"cluster": {"id": "", "shards": [{"leader": ""}]}}


@contextmanager
def several(shards: int, front_ends: int = FRONT_ENDS) -> Iterator[Many]:
    """Front-ends on three nodes, each with its share of the logs."""
    with disk_folder() as folder, ExitStack() as stack:
        nodes = Cluster(folder / "nats", 3)
        stack.callback(nodes.stop)
        nodes.start()
        monitors = ",".join(f"http://127.0.0.1:{node.ports.monitor}" for node in nodes.nodes)
        words = ("--engine", ",".join(nodes.urls), "--cluster-monitor", monitors)
        fronts = []
        for number in range(front_ends):
            (folder / f"front-{number}").mkdir()
            more = (*words, "--cluster-shards", str(shards), "--cluster-id", f"front-{number}")
            fronts.append(
                stack.enter_context(peers.penstock(folder / f"front-{number}", http=True, more=more))
            )
        many = Many(fronts, nodes, shards)
        many.settle()
        yield many


def _of_many_queues() -> list[Row]:
    rows: list[Row] = []
    rests: dict[int, tuple[float, float]] = {}
    alone: dict[str, float] = {}
    single: dict[str, float] = {}
    with disk_folder() as folder, peers.penstock(folder, http=True) as server:
        many = Many([server])
        for wire in ("phpmq", "rq"):
            alone[wire] = many.measure(wire, lambda *_: 0)[1]
            rows.append((f"{QUEUES} queues, {wire}, one broker: CPU", alone[wire], "µs/msg", 0))
    with several(1, 1) as many:
        for wire in ("phpmq", "rq"):
            single[wire] = many.measure(wire, lambda *_: 0)[1]
            rows.append((f"{QUEUES} queues, {wire}, a single front-end: CPU", single[wire], "µs/msg", 0))
    for shards in (1, SHARDS):
        title = "one log" if shards == 1 else f"{shards} logs"
        with several(shards) as many:
            rests[shards] = many.rest()
            rows.append((f"at rest, {title}: CPU of three front-ends", rests[shards][0], "% core", 0))
            rows.append((f"at rest, {title}: memory of three front-ends", rests[shards][1], "MB", 0))
            _, *took = [many.commit() for _ in range(4)]
            row = f"one commit into {COMMIT_QUEUES:,} queues, {title}"
            rows.append((row, statistics.median(took), "s", 1.0))
            if shards > 1:
                led = max(many.led_percent(queues_of(run)) for run in range(1, 4))
                shared = max(Counter(many.leaders).values()) / shards * 100
                rows.append((f"{title}: those of one front-end", shared, "% of all", LED_GOAL_PERCENT))
                rows.append((f"{title}: queues of one front-end", led, "% of all", LED_GOAL_PERCENT))
            places: dict[str, Callable[[str, int], int]] = {
                "spread": lambda _, number: number % FRONT_ENDS,
                "at the leader": lambda queue, _: many.leader(queue),
            }
            for wire in ("phpmq", "rq"):
                for how, place in places.items():
                    each, together, nodes = many.measure(wire, place)
                    what = f"{QUEUES} queues, {wire}, {title}, {how}"
                    goal = 0.0
                    if shards > 1:
                        goal = SPREAD_GOAL if how == "spread" else AT_LEADER_GOAL
                    rows += [
                        (f"{what}: CPU of front-end {n}", us, "µs/msg", 0) for n, us in enumerate(each, 1)
                    ]
                    rows.append((f"{what}: CPU of all front-ends", together, "µs/msg", goal * single[wire]))
                    rows.append((f"{what}: beside a single front-end", together / single[wire], "x", goal))
                    rows.append((f"{what}: beside one broker", together / alone[wire], "x", 0))
                    rows.append((f"{what}: CPU of the three nodes", nodes, "µs/msg", 0))
    more_core, more_mb = (rests[SHARDS][it] - rests[1][it] for it in (0, 1))
    rows.append((f"at rest, {SHARDS} logs, more than one: CPU, each front-end", more_core / 3, "% core", 1.0))
    rows.append((f"at rest, {SHARDS} logs, more than one: memory, each", more_mb / 3, "MB", 30.0))
    return rows
