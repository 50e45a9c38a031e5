"""How a front-end joins a cluster whose logs are long: `JOIN_GB=10 python -m bench cluster`.

One NATS node with one copy, which syncs every write, and two front-ends with 16 logs, into which messages of
64 KiB are sent until they have so many GB. Then a third one is started, while a client of the first one goes
on sending, one message after the other, to a queue of each log:

    ready, first receipt, first message, first answer
                    since its start: its doors are open; a message that was sent, taken, looked at through it
    has its copies  the logs that it is to lead and to stand by for, to their end
    leads           the first of them, and its share
    memory          of both its processes, at most
    receipts        of the client: before it came, until it had its first copy, and until it led its share

All data is in a temporary folder, which is gone afterwards. It takes about four times as many GB of it.
"""

import json
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import cycle, pairwise

from bench import loadgen, peers
from bench.server import PeerFailed, Server, disk_folder
from penstock.client import HttpClient, PhpmqClient, RqClient
from penstock.log.jetstream.cluster import Cluster
from penstock.model.shards import shard_of

Row = tuple[str, float, str, float]

SHARDS = 16
FRONT_ENDS = 2
MESSAGE_BYTES = 64 << 10
BEFORE_SECONDS = 20.0
LOOK_SECONDS = 0.25
SECONDS_MAX = 3600.0
FIRST_COPY = "has the first copy"
DISK_TIMES = 4
"""The node has all, so have both front-ends, and the third one has two thirds."""


def run(gigabytes: float) -> list[Row]:
    with disk_folder() as folder, ExitStack() as stack:
        free = shutil.disk_usage(folder).free
        if free < DISK_TIMES * gigabytes * 1e9:
            raise PeerFailed(
                f"{gigabytes:g} GB take {DISK_TIMES} times as much of {folder}, which has {free}"
            )
        node = Cluster(folder / "nats", 1)
        stack.callback(node.stop)
        node.start()
        words: tuple[str, ...] = (
            "--engine",
            node.urls[0],
            "--cluster-replicas",
            "1",
            "--cluster-shards",
            str(SHARDS),
        )
        words += ("--cluster-monitor", f"http://127.0.0.1:{node.nodes[0].ports.monitor}")

        def front(number: int) -> Server:
            (folder / f"front-{number}").mkdir()
            more = (*words, "--cluster-id", f"front-{number}")
            return stack.enter_context(peers.penstock(folder / f"front-{number}", http=True, more=more))

        fronts = [front(number) for number in range(FRONT_ENDS)]
        _until(lambda: _has(fronts[0], 1, "leader") == SHARDS // FRONT_ENDS)
        rows = [("joining: sent before", _fill(fronts, gigabytes), "MB/s", 0.0)]
        _until(lambda: _has(fronts[0], 1, "copies") == SHARDS)
        with _receipts(fronts[0]) as (times, faults):
            time.sleep(BEFORE_SECONDS)
            marks = [0, len(times)]
            rows += _join(lambda: front(FRONT_ENDS), gigabytes, lambda: marks.append(len(times)))
            marks.append(len(times))
        assert not faults, faults
        for title, (begin, end) in zip(("before", "while it copies", "then"), pairwise(marks), strict=True):
            taken = sorted(times[begin:end])
            rows.append((f"joining: receipts of others {title}: p50", taken[len(taken) // 2], "ms", 0))
            rows.append((f"joining: receipts of others {title}: p99", taken[len(taken) * 99 // 100], "ms", 0))
            rows.append((f"joining: receipts of others {title}: at most", taken[-1], "ms", 0))
        return rows


def _fill(fronts: list[Server], gigabytes: float) -> float:
    """A queue in each log, through each front-end; MB a second."""
    messages = int(gigabytes * 1e9 / MESSAGE_BYTES / SHARDS)

    def fill(shard: int) -> None:
        port = fronts[shard % len(fronts)].ports["rq"]
        loadgen.drive(
            "rq",
            "publish",
            port,
            queue=_queue("full", shard),
            messages=messages,
            size_bytes=MESSAGE_BYTES,
            run=shard,
            seconds_max=SECONDS_MAX,
        )

    loadgen.build()
    began = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fill, range(SHARDS)))
    return messages * MESSAGE_BYTES * SHARDS / 1e6 / (time.monotonic() - began)


def _join(start: Callable[[], Server], gigabytes: float, on_copy: Callable[[], None]) -> list[Row]:
    began = time.monotonic()
    rows: list[Row] = []

    def passed(what: str, goal: float = 0) -> None:
        rows.append((f"joining: {what}", time.monotonic() - began, "s", goal))

    server = start()
    passed("ready", 5.0)
    with RqClient(f"rq://127.0.0.1:{server.ports['rq']}") as sender:
        sender.send(_queue("new", 0), b"a message")
        passed("first receipt", 5.0)
    with PhpmqClient(f"phpmq://127.0.0.1:{server.ports['phpmq']}") as consumer:
        consumer.ack_many(list(consumer.consume(_queue("full", 1), 1, count=1)))
        passed("first message", 5.0)
    with HttpClient(f"http://127.0.0.1:{server.ports['http']}") as http:
        http.peek(_queue("full", 2), limit=1)
        passed("first answer", 5.0)
    memory, done = 0.0, set[str]()
    share = SHARDS // (FRONT_ENDS + 1)
    wanted = {FIRST_COPY: ("copies", 1), "has its copies": ("copies", 2 * share)}
    wanted |= {"leads the first log": ("leader", 1), "leads its share": ("leader", share)}
    while len(done) < len(wanted):
        memory = max(memory, server.resident_mb())
        for what, (field, count) in wanted.items():
            if what not in done and _has(server, FRONT_ENDS, field) >= count:
                done.add(what)
                passed(what)
                if what == FIRST_COPY:
                    on_copy()
        if time.monotonic() - began > SECONDS_MAX:
            raise PeerFailed(f"the front-end that has come has only {done}")
        time.sleep(LOOK_SECONDS)
    copied = next(value for name, value, *_ in rows if name.endswith("has its copies"))
    rows.append(("joining: copied", 2 * share / SHARDS * gigabytes * 1e3 / copied, "MB/s", 0))
    rows.append(("joining: memory of it, at most", memory, "MB", 0))
    return rows


@contextmanager
def _receipts(server: Server) -> Iterator[tuple[list[float], list[BaseException]]]:
    """How long each took, in milliseconds, of one client that goes on sending meanwhile."""
    times: list[float] = []
    faults: list[BaseException] = []
    ends = threading.Event()

    def send() -> None:
        try:
            with RqClient(f"rq://127.0.0.1:{server.ports['rq']}") as client:
                for shard in cycle(range(SHARDS)):
                    began = time.perf_counter()
                    client.send(_queue("other", shard), b"a message")
                    times.append((time.perf_counter() - began) * 1e3)
                    if ends.wait(0.01):
                        return
        except BaseException as error:  # noqa: BLE001 - told by the caller
            faults.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield times, faults
    finally:
        ends.set()
        thread.join()


def _queue(kind: str, shard: int) -> str:
    """One in that log."""
    names = (f"{kind}.{number}" for number in range(1 << 20))
    return next(name for name in names if shard_of(name, SHARDS) == shard)


def _has(at: Server, number: int, field: str) -> int:
    """Of how many logs a front-end is the leader, or has a copy, as one says; 0 while it says nothing."""
    try:
        url = f"http://127.0.0.1:{at.ports['http']}/v1/engine"
        with urllib.request.urlopen(url, timeout=30) as answer:
            shards = json.load(answer)["cluster"]["shards"]
    except OSError:
        return 0
    names = (it[field] if isinstance(it[field], list) else [it[field]] for it in shards)
    return sum(any(name.rpartition("-")[0] == f"front-{number}" for name in its) for its in names)


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not is_so():
        if time.monotonic() > deadline:
            raise PeerFailed("the front-ends do not come to rest")
        time.sleep(LOOK_SECONDS)
