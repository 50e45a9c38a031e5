"""Archiving: the CPU that a million messages cost on their way from the log into the tables.

The log lies in the page cache. A turn is what the archiver does: read, check, write Parquet, sync, commit.
The figures are CPU seconds of this process; events are those of messages that were acknowledged, two each.
"""

import tempfile
import time
from pathlib import Path

import pyarrow as pa

from bench.bench_reader import fill, settle
from penstock.lake.archiver import Archiver, Plan
from penstock.log.log import open_log

MESSAGES = 1_000_000
SIZE = 200
PASSES = 3

Row = tuple[str, float, str, float]


def now_us() -> int:
    return time.time_ns() // 1000


def archive(data: str, path: str, views: tuple[str, ...]) -> tuple[float, float]:
    """CPU and wall seconds until all is in the tables of these views."""
    archiver = Archiver(data, Plan(path, seconds=1), lambda told: None)
    archiver._open()
    archiver._lanes = {view: archiver._lanes[view] for view in views}
    wall, cpu, now = time.perf_counter(), time.process_time(), 0.0
    while archiver.turn(now := now + 10):
        pass
    spent = time.process_time() - cpu, time.perf_counter() - wall
    archiver.close()
    return spent


def run() -> list[Row]:
    pa.set_cpu_count(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder) / "data")
        log = open_log(data, now_us())
        fill(log, "bench", MESSAGES, 1000, SIZE)
        settle(log, "bench")
        log.close(now_us())
        for what, views, goal in (
            ("messages", ("messages",), 1.5),
            ("messages and their 2 M events", ("messages", "events"), 0.0),
        ):
            took = [archive(data, f"{folder}/{what}{turn}", views) for turn in range(PASSES)]
            rows.append((f"1 M × {SIZE} B into a table, {what}: CPU", min(it[0] for it in took), "s", goal))
    return rows
