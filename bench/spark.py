"""Work for Spark, and what it takes: the parts of `bench_spark.py`. Importing this needs the extra `spark`.

One broker, one session on all cores of this machine with the settings of Penstock's own commands, one queue
of messages of random bytes, which nothing compresses. The same rows as Parquet, written by Spark from the
queue, are what Spark's own reader gets. Every figure is the median of `RUNS`, after some that do not count;
ours and Spark's own take turns, so that whatever else the machine does hits both. CPU is that of all
processes together: Java, its Python workers, the broker's two, and this one.

Rules that always hold:
  * A count reads every value (`sum(length(value))`) and is compared with what was sent. So is what the sink
    has stored. A run that does not come out right ends the benchmark.
"""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamReader

from bench.bench_http import ARROW, Caller
from bench.cores import children, family, pinned
from bench.loadgen import drive
from bench.server import Server
from penstock.spark.api import Broker
from penstock.spark.session import local_session

RUNS = 5
WARMING = 3
"""Runs that do not count: until then Java has compiled most of what it runs often."""

MESSAGES = 2_000_000
SIZE_BYTES = 200
BATCH_MESSAGES = 20_000
"""Messages of one call of the API while the queue is filled."""

FEW_ROWS = 10
"""Of a small micro-batch."""

TRIGGERS = 100
TRIGGERS_WARMING = 20
TRIGGER_ROUNDS = 3
QUERY_SECONDS_MAX = 120.0

LOAD_MESSAGES = 500_000
LOAD_SIZE_BYTES = 100

GOAL_COUNT = 2_000_000
GOAL_CPU_QUOTIENT = 1.6
GOAL_CPU_QUOTIENT_PRUNED = 1.0
GOAL_PARQUET_PERCENT = 60
GOAL_SINK = 600_000
GOAL_TRIGGER_QUOTIENT = 1.3
GOAL_KEPT_PERCENT = 70

SETTLE_SECONDS = 0.15
"""For what Java and the workers have left to do when a result is there."""

Row = tuple[str, float, str, float]

_runs = count(1)


class Taken(NamedTuple):
    """What a piece of work has taken, on the clock and of all processors."""

    seconds: float
    cpu_seconds: float


@contextmanager
def session(folder: Path) -> Iterator[SparkSession]:
    """Spark as Penstock's own commands start it, and its Java, which stopping alone would leave running."""
    spark = local_session(
        "penstock bench",
        conf={
            "spark.local.dir": str(folder / "local"),
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.sql.streaming.numRecentProgressUpdates": str(2 * (TRIGGERS + TRIGGERS_WARMING)),
        },
        quiet=True,
    )
    gateway: Any = SparkContext._gateway
    try:
        yield spark
    finally:
        spark.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait()
        SparkContext._gateway = SparkContext._jvm = None


class Bench:
    """One session and one broker."""

    def __init__(self, session: SparkSession, server: Server, folder: Path) -> None:
        self._spark = session
        self._server = server
        self._folder = folder
        self._url = f"http://127.0.0.1:{server.ports['http']}"
        self._parquet = str(folder / "rows.parquet")
        print(f"sending {MESSAGES:,} messages of {SIZE_BYTES} B ...", file=sys.stderr)
        self._fill("bulk", MESSAGES, SIZE_BYTES)

    # --- a batch -----------------------------------------------------------------------------------

    def counting(self) -> Iterator[Row]:
        """Reads everything and keeps three numbers."""
        # The rows for Spark's own reader.
        self._queue("bulk").write.parquet(self._parquet)
        two = "offset bigint, value binary"
        own, whole, pruned, sent_whole, sent_pruned = self._in_turns(
            lambda: _check(self._spark.read.parquet(self._parquet)),
            lambda: _check(self._queue("bulk")),
            lambda: _check(self._queue("bulk", two)),
            lambda: _check(self._queue("bulk", engine="http")),
            lambda: _check(self._queue("bulk", two, engine="http")),
        )
        what = f"count of {MESSAGES // 1_000_000} M x {SIZE_BYTES} B"
        yield f"{what}, Spark's Parquet reader", MESSAGES / own.seconds, "rows/s", 0
        yield f"{what}, that, CPU", own.cpu_seconds, "s", 0
        for name, taken, goal, goal_cpu in (
            ("files, all columns", whole, GOAL_COUNT, GOAL_CPU_QUOTIENT),
            ("files, two columns", pruned, 0, GOAL_CPU_QUOTIENT_PRUNED),
            ("HTTP, all columns", sent_whole, 0, 0),
            ("HTTP, two columns", sent_pruned, 0, 0),
        ):
            yield f"{what}, {name}", MESSAGES / taken.seconds, "rows/s", goal
            yield f"{what}, {name}, CPU to Parquet's", taken.cpu_seconds / own.cpu_seconds, "x", goal_cpu

    def to_parquet(self) -> Iterator[Row]:
        """Reads everything and writes everything."""
        target = str(self._folder / "written.parquet")

        def copy(rows: DataFrame) -> None:
            rows.write.mode("overwrite").parquet(target)

        ours, own = self._in_turns(
            lambda: copy(self._queue("bulk")), lambda: copy(self._spark.read.parquet(self._parquet))
        )
        _check(self._spark.read.parquet(target))
        shutil.rmtree(target)
        yield "queue to Parquet, all columns", MESSAGES / ours.seconds, "rows/s", 0
        yield "Parquet to Parquet, the same rows", MESSAGES / own.seconds, "rows/s", 0
        share = 100 * own.seconds / ours.seconds
        yield "queue to Parquet, share of that", share, "%", GOAL_PARQUET_PERCENT

    def sinking(self) -> Iterator[Row]:
        """Writes the values of a Parquet file to a queue, durably."""
        broker = Broker(self._url)

        def sink() -> None:
            name = f"sink-{next(_runs)}"
            rows = self._spark.read.parquet(self._parquet).select("value")
            rows.write.format("penstock").option("url", self._url).option("queue", name).mode("append").save()
            stored = broker.get("queues", name)["offset_end"]
            if stored != MESSAGES:
                raise RuntimeError(f"the sink has stored {stored:,} messages of {MESSAGES:,}")

        (taken,) = self._in_turns(sink)
        broker.close()
        yield f"sink, {SIZE_BYTES} B a row, from Parquet", MESSAGES / taken.seconds, "rows/s", GOAL_SINK

    # --- a stream ----------------------------------------------------------------------------------

    def triggers(self) -> Iterator[Row]:
        """What a micro-batch of few rows costs, against the cheapest one that Spark has."""
        self._fill("few", FEW_ROWS * (TRIGGERS + TRIGGERS_WARMING), SIZE_BYTES)
        ours: list[float] = []
        own: list[float] = []
        for _ in range(TRIGGER_ROUNDS):
            ours += self._trigger_ms(
                self._spark.readStream.format("penstock")
                .option("url", self._url)
                .option("subscribe", "few")
                .option("startingOffsets", "earliest")
                .option("maxOffsetsPerTrigger", FEW_ROWS)
            )
            own += self._trigger_ms(
                self._spark.readStream.format("rate-micro-batch")
                .option("rowsPerBatch", FEW_ROWS)
                .option("numPartitions", 1)
            )
        yield f"micro-batch of {FEW_ROWS} rows, trigger p50", median(ours), "ms", 0
        yield f"micro-batch of {FEW_ROWS} rows, rate-micro-batch p50", median(own), "ms", 0
        yield "micro-batch, times rate-micro-batch", median(ours) / median(own), "x", GOAL_TRIGGER_QUOTIENT

    def _trigger_ms(self, source: DataStreamReader) -> list[float]:
        checkpoint = self._folder / f"checkpoint-{next(_runs)}"
        query = source.load().writeStream.format("noop").option("checkpointLocation", str(checkpoint)).start()
        deadline = time.monotonic() + QUERY_SECONDS_MAX
        try:
            while time.monotonic() < deadline:
                taken = [progress for progress in query.recentProgress if progress["numInputRows"]]
                if len(taken) >= TRIGGERS + TRIGGERS_WARMING:
                    times = [progress["durationMs"]["triggerExecution"] for progress in taken]
                    return times[TRIGGERS_WARMING : TRIGGERS_WARMING + TRIGGERS]
                failure = query.exception()
                if failure is not None:
                    raise failure
                time.sleep(0.2)
        finally:
            query.stop()
        raise RuntimeError(f"a stream has not made {TRIGGERS} batches in {QUERY_SECONDS_MAX:g} s")

    # --- and everybody else ------------------------------------------------------------------------

    def beside(self) -> Iterator[Row]:
        """What the broker's other clients keep while Spark reads in a loop."""
        cores = sorted(os.sched_getaffinity(0))
        before = [self._load() for _ in range(RUNS)]
        with self._reading():
            anywhere = [self._load() for _ in range(RUNS)]
        apart: list[float] = []
        if len(cores) > 1:
            with ExitStack() as stack:
                stack.enter_context(pinned(lambda: [self._server.pid], set(cores[:-1])))
                stack.enter_context(pinned(self._spark_and_second, {cores[-1]}))
                stack.enter_context(self._reading())
                apart = [self._load() for _ in range(RUNS)]
        alone = median([*before, *(self._load() for _ in range(RUNS))])
        name = "PHPMQ window 500, end to end"
        yield f"{name}, alone", alone, "msg/s", 0
        yield f"{name}, Spark reads, any core", median(anywhere), "msg/s", 0
        yield f"{name}, Spark reads, any core, kept", 100 * median(anywhere) / alone, "%", 0
        if apart:
            yield f"{name}, Spark on one core", median(apart), "msg/s", 0
            yield f"{name}, Spark on one core, kept", 100 * median(apart) / alone, "%", GOAL_KEPT_PERCENT

    def _load(self) -> float:
        number = next(_runs)
        port = self._server.ports["phpmq"]
        return drive(
            "phpmq",
            "end-to-end",
            port,
            queue=f"load-{number}",
            messages=LOAD_MESSAGES,
            run=number,
            size_bytes=LOAD_SIZE_BYTES,
        ).per_second

    def _spark_and_second(self) -> list[int]:
        """Java and its Python workers, and the broker's process that serves the log."""
        return [
            *(one for child in children(os.getpid()) if child != self._server.pid for one in family(child)),
            *children(self._server.pid),
        ]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Spark counts the queue again and again while the block runs."""
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                _check(self._queue("bulk", engine="http"))

        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read)
            try:
                yield
            finally:
                done.set()
            reading.result()

    # --- what all of it needs ----------------------------------------------------------------------

    def _queue(self, name: str, schema: str | None = None, engine: str = "auto") -> DataFrame:
        reading = self._spark.read.format("penstock").option("url", self._url).option("subscribe", name)
        reading = reading.option("engine", engine)
        return (reading.schema(schema) if schema else reading).load()

    def _fill(self, queue: str, messages: int, size_bytes: int) -> None:
        caller = Caller(self._server.ports["http"])
        for first in range(0, messages, BATCH_MESSAGES):
            rows = min(BATCH_MESSAGES, messages - first)
            ends = pa.py_buffer(
                pa.array(range(0, size_bytes * (rows + 1), size_bytes), pa.int32()).buffers()[1]
            )
            values = pa.Array.from_buffers(
                pa.binary(), rows, [None, ends, pa.py_buffer(os.urandom(rows * size_bytes))]
            )
            sink = pa.BufferOutputStream()
            batch = pa.record_batch([values], names=["value"])
            with pa.ipc.new_stream(sink, batch.schema) as stream:
                stream.write_batch(batch)
            caller.post(f"/v1/queues/{queue}/batch", sink.getvalue().to_pybytes(), ARROW)

    @staticmethod
    def _in_turns(*works: Callable[[], None]) -> list[Taken]:
        """What each takes."""
        taken: list[list[Taken]] = [[] for _ in works]
        for _ in range(WARMING + RUNS):
            for runs, work in zip(taken, works, strict=True):
                used, began = _cpu_seconds(), time.perf_counter()
                work()
                seconds = time.perf_counter() - began
                time.sleep(SETTLE_SECONDS)
                runs.append(Taken(seconds, _cpu_seconds() - used))
        counted = [runs[WARMING:] for runs in taken]
        return [
            Taken(median(it.seconds for it in runs), median(it.cpu_seconds for it in runs))
            for runs in counted
        ]


def _cpu_seconds() -> float:
    """User and system time of all processes here, and of those that have ended."""
    ticks = 0
    for pid in family(os.getpid()):
        with suppress(FileNotFoundError, ProcessLookupError):
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
            ticks += sum(map(int, stat.rpartition(") ")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _check(rows: DataFrame) -> None:
    """Read every row; wrong sums are an error."""
    found = tuple(rows.selectExpr("sum(length(value))", "min(offset)", "max(offset)").collect()[0])
    if found != (MESSAGES * SIZE_BYTES, 0, MESSAGES - 1):
        raise RuntimeError(
            f"{MESSAGES:,} messages of {SIZE_BYTES} B were sent, and these sums were read: {found}"
        )
