"""Beginnings: where a query of bad records begins that comes later than the pipeline which it is of.

That is so where records that do not fit have ended the pipeline, or were dropped, before its file said to
tell of them. One that begins at the end of its queues would pass over what the pipeline has yet to read. So
it begins where the pipeline goes on, which Spark has written down in its checkpoint:

    offsets/N    how far batch N goes: a line with a version, one of Spark's own, one for each source
    commits/N    that batch N is done
"""

import json
from contextlib import closing
from typing import Any

from pyspark.sql import SparkSession

from penstock.pipeline.model import Source
from penstock.spark.api import Broker
from penstock.spark.offsets import Positions, extents_of, positions_of
from penstock.spark.options import EARLIEST, STREAM, read_options


def beginning(session: SparkSession, source: Source, checkpoint: str, pipeline: str) -> dict[str, str]:
    """Options for a query with that checkpoint, beside a pipeline with the other; none where both begin."""
    options = read_options(source.options, STREAM)
    if not options.begins_at_ends or _batches(session, f"{checkpoint}/offsets"):
        return {}
    pipeline = pipeline.rstrip("/")
    planned = _batches(session, f"{pipeline}/offsets")
    if not planned:
        return {}
    done = _batches(session, f"{pipeline}/commits")
    positions = _positions(session, f"{pipeline}/offsets/{max(done) if done else min(planned)}")
    names = options.subscribe
    if names is None:
        with closing(Broker(options.url, options.token, options.retry_seconds).in_haste()) as broker:
            names = tuple(extents_of(broker, options))
    begins = {name: positions.get(name, EARLIEST) for name in names}
    return {"startingOffsets": json.dumps(begins)} if begins else {}


def _batches(session: SparkSession, folder: str) -> list[int]:
    """The numbers of batches that something is written down about, wherever Spark keeps checkpoints."""
    jvm: Any = session._jvm  # Java has no types here
    path = jvm.org.apache.hadoop.fs.Path(folder)
    files = path.getFileSystem(session._jsc.hadoopConfiguration())
    if not files.exists(path):
        return []
    names = [status.getPath().getName() for status in files.listStatus(path)]
    return [int(name) for name in names if name.isdigit()]


def _positions(session: SparkSession, path: str) -> Positions:
    """How far the batch goes in each queue; in one that several sources read, the lowest."""
    (row,) = session.read.text(path, wholetext=True).collect()
    positions: Positions = {}
    for line in row.value.split("\n")[2:]:
        told = json.loads(line) if line.startswith("{") else {}  # "-": a source that has nothing to tell
        for queue, position in positions_of(told).items():
            positions[queue] = min(position, positions.get(queue, position))
    return positions
