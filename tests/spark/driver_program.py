"""A Spark driver that a test kills. It copies a queue as a stream, and goes on where it was.

    python driver_program.py SOURCE_URL SINK_URL CHECKPOINT FLAG

It reads the queue `from` and writes the queue `to`, 300 messages at a time, and ends when all are copied.
While there is no file FLAG, the first try of a task writes some more, waits for that file, and then fails.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

BATCH_MESSAGES = 300
JUNK = b"this must not be in the queue"
FLAG_SECONDS = 60.0


def main(source_url: str, sink_url: str, checkpoint: str, flag: str) -> None:
    spark = (
        SparkSession.builder.master("local[2,4]")  # every task has four tries
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.python.unix.domain.socket.enabled", "true")
        .config("spark.sql.warehouse.dir", str(Path(checkpoint).parent / "warehouse"))
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "10")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")

    def fail_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        task = TaskContext.get()
        assert task is not None
        if task.partitionId() or task.attemptNumber() or Path(flag).exists():
            return
        junk = JUNK.ljust(1 << 20)
        for _ in range(20):
            yield pa.record_batch({"value": pa.array([junk], pa.binary())})
        deadline = time.monotonic() + FLAG_SECONDS
        while not Path(flag).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        raise RuntimeError("the first try of this task fails half-way")

    source = spark.readStream.format("penstock").option("url", source_url).option("subscribe", "from")
    source = source.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", BATCH_MESSAGES)
    values = source.option("minPartitions", 2).load().select("value").mapInArrow(fail_once, "value binary")
    sink = values.writeStream.format("penstock").option("url", sink_url).option("queue", "to")
    sink.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
