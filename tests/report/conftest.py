"""A log of an hour of traffic, a broker that serves it, and the tables of two reports on it."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from pyspark.sql import SparkSession

from penstock.report import job
from penstock.report.period import SECOND_US, Period
from penstock.report.survey import Facts, survey
from penstock.spark.api import Broker
from tests.report.traffic import write_log
from tests.server.harness import BrokerProcess
from tests.spark.conftest import spark

__all__ = ["spark"]

SECONDS = 1200
CUT_QUEUE, CUT_EVENT = "mail/out", 300
"""Of this queue, the first events are taken to be gone, as if retention had removed them."""


class Made(NamedTuple):
    """A report, and what it was made from."""

    folder: Path
    facts: list[Facts]
    period: Period
    result: job.Result
    now_us: int
    url: str


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("report")
    write_log(folder / "data", time.time_ns() // 1000, SECONDS, seed=11)
    broker = BrokerProcess(folder, "--http", "127.0.0.1:0").start()
    yield broker
    if broker.running:
        broker.kill()


def make(spark: SparkSession, broker: BrokerProcess, period: Period, cut: bool) -> Made:
    url = f"http://127.0.0.1:{broker.ports['http']}"
    asks = Broker(url)
    try:
        facts = survey(asks)
        if cut:
            facts = [one._replace(event_start=CUT_EVENT) if one.queue == CUT_QUEUE else one for one in facts]
        now_us = time.time_ns() // 1000
        result = job.run(spark, job.Source(url, None, asks), facts, period, now_us)
    finally:
        asks.close()
    return Made(broker.folder / "data", facts, period, result, now_us, url)


@pytest.fixture(scope="session")
def whole(spark: SparkSession, broker: BrokerProcess) -> Made:
    """A report on everything that there is."""
    return make(spark, broker, Period(), cut=True)


@pytest.fixture(scope="session")
def middle(spark: SparkSession, broker: BrokerProcess, whole: Made) -> Made:
    """A report on a time in the middle, of which much began before, and which went on afterwards."""
    assert whole.result.span is not None
    start_us = whole.result.span.start_us
    period = Period(start_us + SECONDS * SECOND_US * 2 // 5, start_us + SECONDS * SECOND_US * 17 // 20)
    return make(spark, broker, period, cut=False)
