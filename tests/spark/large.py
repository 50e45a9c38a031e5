"""Spark and Penstock at sizes that no test waits for: millions of rows, rows of 1 MiB, hundreds of queues.

    python -m tests.spark.large SEED [MILLIONS]

Rows go through the sink into a broker, and come back as a batch and as a stream, every one of them once: how
many they are in each queue, what their offsets come to and their hashes tell. One Spark on this machine, one
broker in a folder that goes away. The seed decides what payloads are, and how the queues share them.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tests.server.harness import BrokerProcess
from tests.spark.rig import url_of

MILLION = 1_000_000
TASKS = 8
LARGE_ROWS = 400
LARGE_BYTES = 1 << 20
QUEUES = 500
QUEUE_ROWS = 400


class Runs:
    def __init__(self, spark: SparkSession, url: str, folder: Path, seed: int) -> None:
        self._spark = spark
        self._url = url
        self._folder = folder
        self._seed = seed

    def many(self, count: int) -> None:
        """So many small rows in one queue."""
        rows = self._rows(count, f"concat(id, ':', xxhash64(id, {self._seed}))", "'many'")
        self._there_and_back(rows, "many", str(count // 4 + 1))

    def large(self) -> None:
        """Rows of 1 MiB."""
        text = f"sha2(string(id + {self._seed}), 256)"
        rows = self._rows(LARGE_ROWS, f"rpad({text}, {LARGE_BYTES}, {text})", "'large'")
        self._there_and_back(rows, "large", "100")

    def queues(self) -> None:
        """Hundreds of queues, some large and some small."""
        count = QUEUES * QUEUE_ROWS
        queue = f"concat('of.', int(pow(xxhash64(id, {self._seed}) / pow(2, 64) + 0.5, 2) * {QUEUES}))"
        rows = self._rows(count, "string(id)", queue)
        self._there_and_back(rows, r"of\..*", str(count // 3))

    def _rows(self, count: int, value: str, queue: str) -> DataFrame:
        return self._spark.range(0, count, 1, TASKS).selectExpr(f"{value} as value", f"{queue} as queue")

    def _there_and_back(self, rows: DataFrame, pattern: str, at_a_time: str) -> None:
        """Write rows, read them as a batch and as a stream: each is there once, at an offset of its own."""
        sent = _tally(rows.selectExpr("queue", "xxhash64(value) as hash"))
        rows.write.format("penstock").option("url", self._url).mode("append").save()
        said = {"url": self._url, "subscribePattern": pattern}
        hashed = ("queue", "offset", "xxhash64(string(value)) as hash")
        batch = self._spark.read.format("penstock").options(**said).load().selectExpr(*hashed)
        assert _tally(batch) == sent
        _check_offsets(batch)
        table = str(self._folder / "tables" / str(len(sent)) / pattern[:2])
        query = (
            self._spark.readStream.format("penstock")
            .options(**said, startingOffsets="earliest", maxOffsetsPerTrigger=at_a_time)
            .load()
            .selectExpr(*hashed)
            .writeStream.format("parquet")
            .option("checkpointLocation", f"{table}.checkpoint")
            .trigger(availableNow=True)
            .start(table)
        )
        query.awaitTermination()
        assert len(query.recentProgress) > 2, "in several batches"
        streamed = self._spark.read.parquet(table)
        assert _tally(streamed) == sent
        _check_offsets(streamed)


def _tally(frame: DataFrame) -> dict[str, tuple[int, int]]:
    """Of each queue how many rows it has, and what their hashes come to."""
    rows = frame.groupBy("queue").agg(f.count("*"), f.sum(f.col("hash").cast("decimal(38)"))).collect()
    return {row[0]: (row[1], int(row[2])) for row in rows}


def _check_offsets(frame: DataFrame) -> None:
    """The rows of each queue have the offsets from 0 on."""
    found = frame.groupBy("queue").agg(f.count("*"), f.min("offset"), f.max("offset"), f.sum("offset"))
    for queue, count, first, last, total in found.collect():
        assert (first, last, total) == (0, count - 1, count * (count - 1) // 2), (queue, count)


def main(seed: int, millions: float) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    folder = Path(tempfile.mkdtemp(prefix="penstock-large-"))
    broker = BrokerProcess(folder, "--http", "127.0.0.1:0").start()
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "2g")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.local.dir", str(folder / "local"))
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    runs = Runs(spark, url_of(broker), folder, seed)
    steps: tuple[tuple[str, Callable[[], None]], ...] = (
        (f"{millions:g} million rows", lambda: runs.many(int(millions * MILLION))),
        (f"{LARGE_ROWS} rows of 1 MiB", runs.large),
        (f"{QUEUES} queues", runs.queues),
    )
    try:
        for name, step in steps:
            begun = time.monotonic()
            step()
            print(f"seed {seed}: {name}: {time.monotonic() - begun:.0f} s", flush=True)  # noqa: T201
    finally:
        spark.stop()
        broker.kill()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 10.0)
