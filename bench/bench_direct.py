"""A queue of a cluster as Spark's tasks read it: over HTTP from a front-end, and straight from the nodes.

Three NATS nodes and one front-end on this machine, and one task that plans and reads a whole queue, in turns;
Spark itself is not here, because it does the same with what it gets in both ways. Then the same with three
front-ends and several logs: over HTTP from the front-end that leads the queue, and through another one.
Figures are medians. On one machine the whole of it counts, so reading from the nodes is not the faster way
here: it is there to take the work off the leader, and the CPU of each part shows how much that is.
"""

import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from bench import peers
from bench.bench_cluster import SHARDS, several
from bench.server import Server, disk_folder
from penstock.log.jetstream.cluster import Cluster
from penstock.spark.api import ARROW_MEDIA, Broker

Row = tuple[str, float, str, float]

ROUNDS = 5
MESSAGES = 1_000_000
AT_ONCE = 20_000
SIZE = 200
QUEUE = "bench"


class Taken(NamedTuple):
    """What one pass over the queue took."""

    rows_per_second: float
    fronts_us: float  # of CPU for each message
    nodes_us: float
    reader_us: float


def run() -> Sequence[Row]:
    """See the module's docstring."""
    if find_spec("pyspark") is None:
        print("left out: pyspark is not installed; pip install 'penstock[spark]'", file=sys.stderr)
        return []
    from penstock.spark.links import close_links

    with disk_folder() as folder:
        nodes = Cluster(folder / "nats", 3)
        try:
            nodes.start()
            monitors = ",".join(f"http://127.0.0.1:{node.ports.monitor}" for node in nodes.nodes)
            words = ("--engine", ",".join(nodes.urls), "--cluster-monitor", monitors, "--cluster-shards", "1")
            with peers.penstock(folder, http=True, more=words) as front:
                _fill(front)
                rows = _rows(
                    [front],
                    nodes,
                    {
                        "over HTTP": {"url": _url(front)},
                        "from the nodes": {"url": _url(front), "engine": ",".join(nodes.urls)},
                    },
                )
        finally:
            close_links()
            nodes.stop()
    return [*rows, *_of_several_logs()]


def _of_several_logs() -> list[Row]:
    from penstock.spark.links import close_links

    with several(SHARDS) as many:
        assert many.nodes is not None
        leader = many.leader(QUEUE)
        there, elsewhere = many.fronts[leader], many.fronts[leader - 1]
        _fill(there)
        try:
            return _rows(
                many.fronts,
                many.nodes,
                {
                    f"{SHARDS} logs, at the leader": {"url": _url(there)},
                    f"{SHARDS} logs, at another one": {"url": _url(elsewhere)},
                    f"{SHARDS} logs, from the nodes": {
                        "url": _url(elsewhere),
                        "engine": ",".join(many.nodes.urls),
                    },
                },
            )
        finally:
            close_links()


def _rows(fronts: Sequence[Server], nodes: Cluster, ways: dict[str, dict[str, str]]) -> list[Row]:
    taken: dict[str, list[Taken]] = {way: [] for way in ways}
    for number in range(ROUNDS + 1):
        for way, options in ways.items():
            figures = _read(fronts, nodes, options)
            if number:  # the first pass makes connections, and is not one of many
                taken[way].append(figures)
    rows: list[Row] = []
    for way, passes in taken.items():
        middle = Taken(*(statistics.median(column) for column in zip(*passes, strict=True)))
        rows.append((f"one task, {way}", middle.rows_per_second, "rows/s", 0))
        rows.append((f"one task, {way}: CPU of all front-ends", middle.fronts_us, "µs/msg", 0))
        rows.append((f"one task, {way}: CPU of the three nodes", middle.nodes_us, "µs/msg", 0))
        rows.append((f"one task, {way}: CPU of the task", middle.reader_us, "µs/msg", 0))
    return rows


def _fill(front: Server) -> None:
    import pyarrow as pa

    payload = os.urandom(SIZE * AT_ONCE)
    values = [payload[at : at + SIZE] for at in range(0, len(payload), SIZE)]
    batch = pa.record_batch({"value": pa.array(values, pa.binary())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    body = memoryview(sink.getvalue())
    with closing(Broker(_url(front))) as broker:
        for _ in range(MESSAGES // AT_ONCE):
            broker.call("POST", ("queues", QUEUE, "batch"), {}, body, ARROW_MEDIA)


def _url(front: Server) -> str:
    return f"http://127.0.0.1:{front.ports['http']}"


def _read(fronts: Sequence[Server], nodes: Cluster, options: dict[str, str]) -> Taken:
    from penstock.spark.options import BATCH, read_options
    from penstock.spark.reading import BatchReader
    from penstock.spark.source import schema_of

    def cpu_seconds() -> tuple[float, float, float]:
        below = sum(_cpu_seconds(node.pid) for node in nodes.nodes)
        return sum(front.cpu_seconds() for front in fronts), below, time.process_time()

    before = cpu_seconds()
    began = time.perf_counter()
    said = {"engine": "http", "subscribe": QUEUE, **options}
    reader = BatchReader(read_options(said, BATCH), schema_of("messages"))
    rows = sum(batch.num_rows for piece in reader.partitions() for batch in reader.read(piece))
    seconds = time.perf_counter() - began
    assert rows == MESSAGES, f"{MESSAGES} messages were sent, {rows} were read"
    used = ((after - start) / rows * 1e6 for start, after in zip(before, cpu_seconds(), strict=True))
    return Taken(rows / seconds, *used)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
