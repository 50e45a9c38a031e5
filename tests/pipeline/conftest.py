"""Pipelines run in the one Spark session, and against the one broker, of the Spark tests."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.pipeline.rig import Rig
from tests.server.harness import BrokerProcess
from tests.spark.conftest import broker, spark, start_broker

__all__ = ["broker", "rig", "spark", "start_broker"]


@pytest.fixture
def rig(spark: SparkSession, broker: BrokerProcess, tmp_path: Path) -> Rig:
    return Rig(spark, broker, tmp_path)
