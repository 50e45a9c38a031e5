"""A Spark driver on a cluster: reads a queue as a batch and as a stream, and copies it by both kinds of sink.

    python cluster_program.py MASTER URL QUEUE FOLDER TOKEN

The broker wants a token. The copies are QUEUE.batch and QUEUE.stream. Plans, errors and pages of Spark's that
might show the token go to FOLDER/shown, checkpoints and event logs to FOLDER as well; what was read, and in
how many tasks, is printed as JSON.
"""

import contextlib
import io
import json
import re
import sys
import urllib.request
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

LOG4J = """
rootLogger.level = debug
rootLogger.appenderRef.file.ref = File
appender.file.type = File
appender.file.name = File
appender.file.fileName = {folder}/driver.log
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %p %c %m%n%ex
"""
PAGES = ("jobs", "stages", "storage", "environment", "executors", "SQL", "StreamingQuery")
LINKS = re.compile(r'href="(/(?:SQL/execution|jobs/job|stages/stage|StreamingQuery/statistics)/[^"#]*)"')


def main(master: str, url: str, queue: str, folder: str, token: str) -> None:
    log4j = Path(folder, "log4j2.properties")
    log4j.write_text(LOG4J.format(folder=folder))
    for name in ("events", "shown"):
        Path(folder, name).mkdir()
    spark = (
        SparkSession.builder.master(master)
        .config("spark.ui.port", "0")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={log4j}")
        .config("spark.executor.cores", "1")
        .config("spark.executor.memory", "512m")
        .config("spark.eventLog.enabled", "true")
        .config("spark.eventLog.compress", "false")
        .config("spark.eventLog.dir", f"file://{folder}/events")
        .config("spark.sql.warehouse.dir", f"{folder}/warehouse")
        # Both executors are there before the first task runs: one of them would do all tasks otherwise.
        .config("spark.scheduler.minRegisteredResourcesRatio", "1.0")
        .getOrCreate()
    )
    said = {"url": url, "token": token}
    reading = {**said, "subscribe": queue, "minPartitions": "4"}
    batch = spark.read.format("penstock").options(**reading).load()
    stream = spark.readStream.format("penstock").options(**reading, startingOffsets="earliest").load()
    show(folder, "plans", plans_of(batch.where("offset > 3")) + plans_of(stream))
    rows = batch.orderBy("offset").collect()
    tasks = batch.select(f.spark_partition_id().alias("task")).groupBy("task").count().count()
    batch.select("value").write.format("penstock").options(**said, queue=f"{queue}.batch").mode(
        "append"
    ).save()
    copying = (
        stream.select("value")
        .writeStream.format("penstock")
        .options(**said, queue=f"{queue}.stream", checkpointLocation=f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    copying.awaitTermination()
    show(folder, "progress", str([dict(progress) for progress in copying.recentProgress]))
    for wrong in ({"subscribe": "missing"}, {"subscrib": queue}, {"subscribe": queue, "view": "rows"}):
        try:
            spark.read.format("penstock").options(**said, **wrong).load().collect()
        except Exception as error:  # noqa: BLE001 - whatever Spark makes of it is what the test looks at
            show(folder, f"error {len(list(Path(folder, 'shown').iterdir()))}", str(error))
    show_pages(spark, folder)
    read = {"values": [bytes(row.value).decode() for row in rows], "tasks": tasks}
    print(json.dumps(read))  # noqa: T201 - this is a program
    spark.stop()


def plans_of(frame: DataFrame) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for mode in ("extended", "formatted", "cost", "codegen"):
            frame.explain(mode=mode)
    return said.getvalue()


def show(folder: str, name: str, text: str) -> None:
    Path(folder, "shown", name).write_text(text)


def show_pages(spark: SparkSession, folder: str) -> None:
    """Every page of Spark's that is about what was run, and what its API says."""
    context = spark.sparkContext
    api = f"/api/v1/applications/{context.applicationId}"
    todo = [f"/{page}/" for page in PAGES]
    todo += [f"{api}/sql?details=true&planDescription=true&length=1000", f"{api}/environment", f"{api}/jobs"]
    seen: list[str] = []
    for path in todo:
        if path in seen:
            continue
        seen.append(path)
        with urllib.request.urlopen(f"{context.uiWebUrl}{path}", timeout=60) as answer:
            text = answer.read().decode()
        show(folder, f"page {len(seen)}", f"{path}\n{text}")
        todo += [link.replace("&amp;", "&") for link in LINKS.findall(text)]


if __name__ == "__main__":
    main(*sys.argv[1:])
