"""Beginnings: where a flow begins that comes later than another one of the same pipeline.

That is so where a sink was added, or where the file says from now on to tell of bad records. One that begins
at the end of its queues would pass over what the others have yet to read. So it begins where another one goes
on, which Spark has written down in its checkpoint; and where both are new, where that one has begun.

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


def has_begun(session: SparkSession, checkpoint: str) -> bool:
    """Whether there is anything in a checkpoint."""
    return bool(_batches(session, f"{checkpoint.rstrip('/')}/offsets"))


def has_files(session: SparkSession, path: str) -> bool:
    """Whether a stream has written files there."""
    return bool(path) and bool(_batches(session, f"{path.rstrip('/')}/_spark_metadata"))


def beginning(session: SparkSession, source: Source, other: str, *, anew: bool) -> dict[str, str]:
    """Options for a flow that is new, beside the one with that checkpoint, which may be as new."""
    options = read_options(source.options, STREAM)
    other = other.rstrip("/")
    planned = _batches(session, f"{other}/offsets")
    if not options.begins_at_ends or not planned:
        return {}
    done = [] if anew else _batches(session, f"{other}/commits")
    positions = _positions(session, f"{other}/offsets/{max(done) if done else min(planned)}")
    names = options.subscribe
    if names is None:
        with closing(Broker(options.url, options.token, options.retry_seconds).in_haste()) as broker:
            names = tuple(extents_of(broker, options))
    begins = {name: positions.get(name, EARLIEST) for name in names}
    return {"startingOffsets": json.dumps(begins)} if begins else {}


def has_read(session: SparkSession, checkpoint: str) -> Positions:
    """Where the flow of a checkpoint goes on, in each queue; empty: it has done nothing yet."""
    checkpoint = checkpoint.rstrip("/")
    done = _batches(session, f"{checkpoint}/commits")
    return _positions(session, f"{checkpoint}/offsets/{max(done)}") if done else {}


def _batches(session: SparkSession, folder: str) -> list[int]:
    """The numbers of batches that something is written down about, wherever Spark keeps checkpoints."""
    jvm: Any = session._jvm  # Java has no types here
    path = jvm.org.apache.hadoop.fs.Path(folder)
    files = path.getFileSystem(session._jsc.hadoopConfiguration())
    if not files.exists(path):
        return []
    # "9.compact": of all up to that one.
    names = [status.getPath().getName().partition(".")[0] for status in files.listStatus(path)]
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
