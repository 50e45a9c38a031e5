"""Pausing: a note in the checkpoint of a pipeline that somebody has paused it, for whoever keeps it next.

The broker is told that a pause is done when the note is there. So the pause outlasts whatever ends: the
service, the broker, or both. A pipeline without a checkpoint begins anew with every start, and has no note.

How it fails: with what Spark raises where it cannot reach its checkpoints.
"""

from typing import Any, Final

from pyspark.sql import SparkSession

from penstock.pipeline.model import Pipeline

NAME: Final = "paused"


def is_noted(spark: SparkSession, pipeline: Pipeline) -> bool:
    if pipeline.checkpoint is None:
        return False
    files, path = _place(spark, pipeline.checkpoint)
    return bool(files.exists(path))


def note(spark: SparkSession, pipeline: Pipeline, *, paused: bool) -> None:
    """From now on it is paused, or is not."""
    if pipeline.checkpoint is None:
        return
    files, path = _place(spark, pipeline.checkpoint)
    if paused:
        files.create(path, True).close()
    elif files.exists(path):
        files.delete(path, False)


def _place(spark: SparkSession, checkpoint: str) -> tuple[Any, Any]:  # Java has no types here
    jvm: Any = spark._jvm
    path = jvm.org.apache.hadoop.fs.Path(f"{checkpoint.rstrip('/')}/{NAME}")
    return path.getFileSystem(spark._jsc.hadoopConfiguration()), path
