"""Penstock and Spark: queues as batches and streams, `spark.readStream.format("penstock")`.

Needs the extra `spark`. Nothing else in the package imports this one.
"""

from penstock.spark.source import PenstockDataSource

__all__ = ["PenstockDataSource"]
