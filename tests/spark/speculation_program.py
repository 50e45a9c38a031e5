"""A Spark driver on a cluster that runs slow tasks twice. It writes COUNT numbers to a queue, in four tasks.

python speculation_program.py MASTER URL QUEUE COUNT WAREHOUSE
"""

import sys

from pyspark.sql import SparkSession

TASKS = 4


def main(master: str, url: str, queue: str, count: str, warehouse: str) -> None:
    spark = (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.executor.cores", "1")
        .config("spark.executor.memory", "512m")
        .config("spark.sql.warehouse.dir", warehouse)
        .config("spark.speculation", "true")
        .config("spark.speculation.interval", "100ms")
        .config("spark.speculation.multiplier", "1.1")
        .config("spark.speculation.quantile", "0.5")
        # Both executors are there before the first task runs: one of them would do all tasks otherwise.
        .config("spark.scheduler.minRegisteredResourcesRatio", "1.0")
        .getOrCreate()
    )
    rows = spark.range(0, int(count), 1, TASKS).selectExpr("cast(id as string) as value")
    rows.write.format("penstock").option("url", url).option("queue", queue).mode("append").save()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
