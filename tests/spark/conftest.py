"""One Spark session and one broker for all Spark tests of a run: each test uses queue names of its own.

Nothing is registered anywhere: that Spark finds the source by itself is part of what every test shows.
"""

import os
import shutil
import sys
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.http.conftest import StartBroker as StartBroker
from tests.http.conftest import api as api
from tests.http.conftest import start_broker as start_broker
from tests.server.harness import BrokerProcess
from tests.spark.cluster import Cluster
from tests.spark.rig import Queues


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session on two cores of this machine."""
    java = os.path.join(os.environ["JAVA_HOME"], "bin", "java") if os.environ.get("JAVA_HOME") else "java"
    if shutil.which(java) is None:
        pytest.fail("Spark needs Java 17 or newer, and there is none; `make setup` says how to get it")
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    folder = tmp_path_factory.mktemp("spark")
    session = (
        SparkSession.builder.master("local[2]")
        .appName("penstock-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.python.unix.domain.socket.enabled", "true")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.local.dir", str(folder / "local"))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    broker = BrokerProcess(tmp_path_factory.mktemp("broker"), "--http", "127.0.0.1:0").start()
    yield broker
    if broker.running:
        broker.kill()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def queues(spark: SparkSession, broker: BrokerProcess) -> Queues:
    return Queues(spark, broker)
