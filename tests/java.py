"""The Java of the tests, which lives for a minute or less: its flags, and what Spark loads.

    python -m tests.java

keeps Spark's classes, as Java has them in memory, in a file of the environment (`CLASSES`): with it a Java
starts with half the work. Java compares the file with itself and with Spark's jars, and does without it
where they do not fit.

And it drops the zips from which Spark's Python workers import its modules: the same modules are installed in
the environment. From a zip each worker compiles all of them again, and reads the zip's list of files again
for every package. `make setup` does both.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

FLAGS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable"
"""Otherwise half of its time goes into compiling what runs once; and it tells of classes that do not fit."""
CLASSES = Path(sys.prefix) / "spark-classes.jsa"
END_SECONDS = 900.0


def options() -> str:
    """For JDK_JAVA_OPTIONS, which every Java reads, whoever starts it."""
    return f"{FLAGS} -XX:SharedArchiveFile={CLASSES}" if CLASSES.exists() else FLAGS


def main() -> None:
    drop_zips()
    keep_classes()


def drop_zips() -> None:
    import pyspark

    for path in (Path(pyspark.__file__).parent / "python" / "lib").glob("*.zip"):
        path.unlink()


def keep_classes() -> None:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    os.environ["JDK_JAVA_OPTIONS"] = FLAGS
    os.environ["PYSPARK_PYTHON"] = sys.executable
    unfinished = CLASSES.with_name(f"{CLASSES.name}.{os.getpid()}")
    with tempfile.TemporaryDirectory() as folder:
        spark = (
            SparkSession.builder.master("local[2]")
            .config("spark.driver.extraJavaOptions", f"-XX:ArchiveClassesAtExit={unfinished}")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.warehouse.dir", folder)
            .getOrCreate()
        )
        work(spark, folder)
        gateway = SparkContext._gateway
        spark.stop()
        assert gateway is not None
        # It ends when nobody can speak to it any more, and writes the file then.
        gateway.proc.stdin.close()
        gateway.proc.wait(END_SECONDS)
    unfinished.rename(CLASSES)


def work(spark: "SparkSession", folder: str) -> None:
    """Something of most of what tests do."""

    def same(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        yield from batches

    numbers = spark.range(100).selectExpr("id", "concat('{\"a\": ', id, '}') as json")
    parsed = numbers.selectExpr("id % 3 as part", "from_json(json, 'a bigint').a as a")
    parsed.write.partitionBy("part").parquet(f"{folder}/table")
    spark.read.parquet(f"{folder}/table").groupBy("part").sum("a").collect()
    numbers.mapInArrow(same, "id bigint, json string").orderBy("id").collect()

    def take(frame: "DataFrame", number: int) -> None:
        frame.collect()

    stream = spark.readStream.format("rate").load().writeStream.foreachBatch(take)
    stream = stream.option("checkpointLocation", f"{folder}/checkpoint").trigger(once=True)
    stream.start().awaitTermination()


if __name__ == "__main__":
    main()
