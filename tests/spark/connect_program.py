"""A Spark Connect program, run by a test in a process of its own: reads a queue as a batch and as a stream,
and copies it to two others, QUEUE.batch and QUEUE.stream.

    python connect_program.py URL QUEUE CHECKPOINT TABLE

Nothing is registered. What it has read it prints as JSON. Spark's event log is in CHECKPOINT.events.
"""

import json
import sys
from pathlib import Path

from pyspark.sql import SparkSession


def main(url: str, queue: str, checkpoint: str, table: str) -> None:
    events = Path(f"{checkpoint}.events")
    events.mkdir()
    spark = (
        SparkSession.builder.remote("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.eventLog.enabled", "true")
        .config("spark.eventLog.compress", "false")
        .config("spark.eventLog.dir", events.as_uri())
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.python.unix.domain.socket.enabled", "true")
        .getOrCreate()
    )
    batch = spark.read.format("penstock").option("url", url).option("subscribe", queue)
    rows = batch.load().orderBy("offset").collect()
    stream = spark.readStream.format("penstock").option("url", url).option("subscribe", queue)
    query = (
        stream.option("startingOffsets", "earliest")
        .schema("value binary, offset bigint")
        .load()
        .writeStream.format("parquet")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start(table)
    )
    query.awaitTermination()
    streamed = spark.read.parquet(table).orderBy("offset").collect()
    values = batch.load().select("value")
    values.write.format("penstock").option("url", url).option("queue", f"{queue}.batch").mode("append").save()
    copying = (
        stream.option("startingOffsets", "earliest")
        .load()
        .select("value")
        .writeStream.format("penstock")
        .option("url", url)
        .option("queue", f"{queue}.stream")
        .option("checkpointLocation", f"{checkpoint}.copy")
        .trigger(availableNow=True)
        .start()
    )
    copying.awaitTermination()
    try:
        batch.option("subscrib", "x").load().collect()
        refusal = ""
    except Exception as error:  # noqa: BLE001 - whatever Connect makes of it is what the test looks at
        refusal = str(error)
    read = {
        "session": type(spark).__module__,
        "batch": [bytes(row.value).decode() for row in rows],
        "stream": [bytes(row.value).decode() for row in streamed],
        "refusal": refusal,
    }
    print(json.dumps(read))  # noqa: T201 - this is a program
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
