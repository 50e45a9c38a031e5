"""Spark beside Spark: what the source and the sink cost, against Spark's own on the same rows in one run.

What is measured, and how, is in `spark.py` and in docs/benchmarks.md. Without pyspark or Java there are no
figures, and a line that says so.
"""

import os
import sys
from collections.abc import Iterator

from bench import peers
from bench.server import disk_folder

Row = tuple[str, float, str, float]


def run() -> Iterator[Row]:
    """See the module's docstring."""
    try:
        from bench.spark import Bench, session
        from penstock.spark.session import SparkNotStarted
    except ImportError as error:
        if (error.name or "").partition(".")[0] in ("bench", "penstock"):
            raise
        print(f"left out: {error.name} is not installed; pip install 'penstock[spark]'", file=sys.stderr)
        return
    busy = os.getloadavg()[0]
    if busy > 0.5:
        print(f"the machine is busy (load {busy:.1f}): it can do better than these figures", file=sys.stderr)
    with disk_folder() as folder:
        try:
            with session(folder) as spark, peers.penstock(folder, http=True) as server:
                bench = Bench(spark, server, folder)
                for part in (bench.counting, bench.to_parquet, bench.sinking, bench.triggers, bench.beside):
                    yield from part()
        except SparkNotStarted as missing:
            print(f"left out: {missing}", file=sys.stderr)
