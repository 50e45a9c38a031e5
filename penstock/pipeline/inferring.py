"""Inferring: a `[parse]` section from a sample of a queue's last messages, as Spark's readers see them."""

import json
from contextlib import closing
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

from penstock.errors import PenstockError
from penstock.pipeline.ddl import quoted
from penstock.spark.api import Broker
from penstock.spark.offsets import extents_of
from penstock.spark.options import BATCH, COPIES, of_queue, read_options

SAMPLE: Final = 1000
FORMATS: Final = ("json", "csv")


class NothingToInfer(PenstockError):
    """A queue whose messages say nothing about a schema."""


def inferred(session: SparkSession, queue: str, options: dict[str, str], its_format: str, sample: int) -> str:
    """The section, as a file has it, with a comment that says what it was made of."""
    said = {**options, **of_queue(queue)}
    read = read_options(said, BATCH)
    with closing(Broker(read.url, read.token, read.retry_seconds).in_haste()) as broker:
        extent = extents_of(broker, read).get(queue)
    start, end = (extent.start, extent.end) if extent is not None else (0, 0)
    start = max(start, end - sample)
    if start == end:
        raise NothingToInfer(f"queue {queue!r} has no messages; send some that are as they will be")
    said |= {"startingOffsets": json.dumps({queue: start}), "endingOffsets": json.dumps({queue: end})}
    frame = session.read.format("penstock").options(**said).load().where(sql.col("protocol") != COPIES)
    texts = frame.select(sql.col("value").cast("string").alias("value")).rdd.map(lambda row: row.value)
    found = (
        session.read.option("mode", "DROPMALFORMED").json(texts)
        if its_format == "json"
        else session.read.csv(texts, inferSchema=True)
    )
    names = [name for name in found.columns if name != "_corrupt_record"]
    if not names:
        raise NothingToInfer(f"queue {queue!r}: nothing in its last {end - start} messages is {its_format}")
    ddl = str(found.select(*map(quoted, names))._jdf.schema().toDDL())
    return (
        f"# Of {end - start} messages of {queue}, offsets {start} to {end - 1}.\n"
        f'[parse]\nformat = "{its_format}"\nschema = {json.dumps(ddl, ensure_ascii=False)}'
    )
