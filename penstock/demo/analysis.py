"""Analysis: the same orders through a Spark pipeline to two tables, their sums compared, and a report.

The pipeline is a file, as anybody would write it: a graph with two sinks. One has every order, as a Delta
table, which DuckDB then reads without Spark. The other has sums by region and second, as Parquet. A second is
written when orders have come that are so much later that it is over, which is what a watermark says. So that
the last one is written too, one more order is sent, of no amount, which the pipeline does not expect and
drops; and beside it a record that is no order, which ends in the dead letters.

Rules that always hold:
  * Spark, its files and what Java prints stay in the folder of the demonstration, or nowhere.
  * What was stored is compared with what Spark has written, region by region, to the last cent.

Importing this needs the extras `spark` and `lake`, and DuckDB.
"""

import json
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import duckdb
import pyspark
from deltalake import DeltaTable
from pyspark.sql import functions as sql

from penstock import __version__
from penstock.client import HttpClient, PhpmqClient
from penstock.common.tables import Column, columns
from penstock.demo.broker import Broker
from penstock.demo.orders import NO_ORDER, QUEUE, SCHEMA, Sum, amount, closing_order, sums_of
from penstock.demo.screen import Screen
from penstock.demo.traffic import PATIENCE_SECONDS, PATIENT
from penstock.pipeline.file import read_pipeline
from penstock.pipeline.progress import Teller
from penstock.pipeline.running import Run
from penstock.report import job, tables
from penstock.report.audit import ask_audit
from penstock.report.figures import figures_of
from penstock.report.page import About, render
from penstock.report.period import Period
from penstock.report.survey import survey
from penstock.spark.api import Broker as Api
from penstock.spark.session import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SHORT_LIVED_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""What runs for half a minute ends before Java's better compiler pays: it would take half of all CPU time."""

LATER_SECONDS: Final = 2.0
"""An order that is so much later than another one ends its second: that second, and the watermark's."""

PIPELINE: Final = '''\
name = "orders"

[[source]]
name = "orders"
url = {url}
subscribe = {queue}
startingOffsets = "earliest"
watermark = "timestamp, 1 second"
[source.parse]
format = "json"
schema = {schema}

[[step]]
name = "paid"
sql = "select id, region, amount, timestamp from orders"

[[expect]]
name = "costs_something"
on = "paid"
sql = "amount > 0"
on-violation = "drop"

[[step]]
name = "sums"
sql = """
select region, window.start as second, count(*) as orders, sum(amount) as amount
from orders group by region, window(timestamp, '1 second')"""

[[sink]]
name = "table"
from = "paid"
format = "delta"
path = {table}

[[sink]]
name = "files"
from = "sums"
format = "parquet"
path = {path}

[run]
trigger = "once"
checkpoint = {checkpoint}
'''

BY_REGION: Final = (
    "select region, count(*) as orders, sum(amount) as amount from orders group by all order by all"
)


class Analysis:
    """The second half of the demonstration, step by step."""

    def __init__(self, broker: Broker, screen: Screen, folder: Path) -> None:
        self._broker = broker
        self._screen = screen
        self._folder = folder
        self.pipeline = folder / "orders.toml"
        self.parquet = folder / "orders.parquet"
        self.table = folder / "orders.delta"
        self.report = folder / "report.html"
        self.report_tables = folder / "report-tables"

    def run(self, stored: set[int], number_end: int) -> bool:
        """Whether Spark's sums are those of the orders that were stored."""
        began = time.monotonic()
        self._screen.note("starting Spark, which takes a few seconds")
        scratch = self._folder / "spark"
        spark = local_session(
            "penstock demo",
            conf={
                "spark.local.dir": str(scratch),
                "spark.sql.warehouse.dir": str(scratch / "warehouse"),
                "spark.log.level": "OFF",
                "spark.driver.extraJavaOptions": SHORT_LIVED_JAVA,
            },
            quiet=True,
        )
        # Spark's own handler would tell Java to end its jobs first; here everything ends.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self._screen.step(f"Spark {pyspark.__version__} runs on this machine")
            time.sleep(max(began + LATER_SECONDS - time.monotonic(), 0))
            self._send_two_more(number_end)
            self._run_pipeline(spark)
            sent = sums_of(stored)
            self._screen.step("what was sent, and what is in the Parquet files:")
            agree = self._compare(sent, self._read_sums(spark), BY_SPARK)
            self._screen.step("the Delta table has every order, and needs no Spark to be read; with DuckDB:")
            self._screen.note(f"  duckdb.sql({BY_REGION!r})")
            agree &= self._compare(sent, self._ask_duckdb(), BY_DUCKDB)
            self._screen.note(
                "Every order is there once, to the last cent."
                if agree
                else "They differ, which must not be: please tell us."
            )
            self._screen.section("A report on what happened, from the events")
            self._make_report(spark)
        finally:
            spark.stop()
            shutil.rmtree(scratch, ignore_errors=True)
        return agree

    def _send_two_more(self, number_end: int) -> None:
        with HttpClient(self._broker.url("http"), **PATIENT) as sender:
            sender.send(QUEUE, NO_ORDER)
            sender.send(QUEUE, closing_order(number_end))
        with PhpmqClient(self._broker.url("phpmq"), **PATIENT) as worker:
            worker.ack_many(list(worker.consume(QUEUE, count=2, timeout=PATIENCE_SECONDS)))
        self._screen.step(f"HTTP   sent a record that is no order: {NO_ORDER.decode()}")
        self._screen.note("       and an order of no amount: time goes on, the last second is over")

    # --- the pipeline ------------------------------------------------------------------------------

    def _run_pipeline(self, spark: "SparkSession") -> None:
        places = {
            "url": self._broker.url("http"),
            "queue": QUEUE,
            "schema": SCHEMA,
            "path": str(self.parquet),
            "table": str(self.table),
            "checkpoint": str(self._folder / "checkpoint"),
        }
        # A text in JSON is one in TOML.
        text = PIPELINE.format_map({name: json.dumps(place) for name, place in places.items()})
        self.pipeline.write_text(text, encoding="utf-8")
        self._screen.note(f"a pipeline, {self.pipeline}:")
        for line in text.splitlines():
            if line:
                self._screen.note(f"  | {line}")
        self._screen.note("running it, until everything that is in the queue is done")
        teller = Teller("pipeline", self._screen.step, time.monotonic)
        Run(read_pipeline(str(self.pipeline)), spark, teller, once=True).run()
        self._screen.step("done")
        self._show_dead_letter()

    def _show_dead_letter(self) -> None:
        with HttpClient(self._broker.url("http"), **PATIENT) as client:
            letters = client.peek(QUEUE, state="dead")
        rows = []
        for letter in letters:
            said = json.loads(letter.value)
            rows.append([f"{said['offset']:,}", str(letter.reason), said["error"]])
        self._screen.note(f"the record that is no order is a dead letter, as `penstock dead {QUEUE}` shows:")
        self._screen.table(columns(">offset", "reason", "error"), rows)

    def _read_sums(self, spark: "SparkSession") -> Mapping[str, Sum]:
        rows = (
            spark.read.parquet(str(self.parquet))
            .groupBy("region")
            .agg(sql.sum("orders").alias("orders"), sql.sum("amount").alias("amount"))
            .collect()
        )
        return {row["region"]: Sum(int(row["orders"]), int(row["amount"] * 100)) for row in rows}

    def _ask_duckdb(self) -> Mapping[str, Sum]:
        with duckdb.connect() as database:
            database.register("orders", DeltaTable(self.table).to_pyarrow_dataset())
            rows = database.execute(BY_REGION).fetchall()
        return {region: Sum(orders, int(amount * 100)) for region, orders, amount in rows}

    def _compare(self, stored: Mapping[str, Sum], found: Mapping[str, Sum], heads: Sequence[Column]) -> bool:
        nothing = Sum(0, 0)
        rows = [
            _row(region, stored.get(region, nothing), found.get(region, nothing))
            for region in sorted(stored.keys() | found.keys())
        ]
        rows.append(_row("all", _total(stored), _total(found)))
        self._screen.table(heads, rows)
        return stored == found

    # --- the report --------------------------------------------------------------------------------

    def _make_report(self, spark: "SparkSession") -> None:
        url = self._broker.url("http")
        with closing(Api(url)) as api:
            facts = survey(api)
            period = Period(None, None)
            audit = ask_audit(api, period)
            now_us = time.time_ns() // 1000
            source = job.Source(url, None, api)
            result = job.run(spark, source, facts, period, now_us, self._screen.note)
        tables.write_tables(result.tables, self.report_tables)
        figures = figures_of(result.span, result.tables)
        about = About(url, datetime.now(UTC).replace(microsecond=0), __version__)
        self.report.write_text(render(figures, about, audit), encoding="utf-8")
        self._screen.step(f"{figures.events:,} events of {len(figures.queues)} queues: {self.report}")


BY_SPARK: Final = columns("region", ">sent", ">amount", ">Spark", ">amount", "")
BY_DUCKDB: Final = columns("region", ">sent", ">amount", ">DuckDB", ">amount", "")


def _row(region: str, stored: Sum, found: Sum) -> list[str]:
    return [
        region,
        f"{stored.orders:,}",
        amount(stored.cents),
        f"{found.orders:,}",
        amount(found.cents),
        "equal" if stored == found else "DIFFERENT",
    ]


def _total(sums: Mapping[str, Sum]) -> Sum:
    return Sum(sum(one.orders for one in sums.values()), sum(one.cents for one in sums.values()))
