"""Reading the log from another process as Arrow batches, while the one that wrote it has it open.

The log lies in the page cache, as it does for whoever follows a queue; checksums are verified.
Every figure is the best of three passes of one spawned process, which shares the machine with
whatever else runs on it; the CPU time of the same pass says what would be left without that.
"""

import multiprocessing
import os
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

from penstock.log.arrow import events_batches, messages_batches
from penstock.log.log import Log, open_log
from penstock.log.reader import LogReader
from penstock.model.batch import Batch
from penstock.model.policy import Policies
from penstock.model.words import Outcome

MESSAGES = 2_000_000
BATCH = 1_000
SIZE = 200
SINGLES = 100_000
SINGLE_SIZE = 100
IN_FLIGHT_BYTES_MAX = 2 * 1024 * 1024
PASSES = 3

Row = tuple[str, float, str, float]


class Pass(NamedTuple):
    """What one pass over a view took."""

    rows: int
    seconds: float
    cpu_seconds: float


def now_us() -> int:
    return time.time_ns() // 1000


def fill(engine: Log, queue: str, messages: int, per_batch: int, size: int) -> None:
    bounds = array("i", range(0, size * per_batch + 1, size))
    payload = os.urandom(size * per_batch)
    for _ in range(messages // per_batch):
        engine.append(queue, Batch(payload, bounds, protocol="http"), now_us())
        engine.flush(now_us())
        engine.poll()
        if engine.bytes_in_flight > IN_FLIGHT_BYTES_MAX:
            engine.wait()
    engine.wait()


def settle(engine: Log, queue: str) -> None:
    """Acknowledge everything, as a consumer with a window of 5,000 does."""
    while slices := engine.take(queue, "bench", 5_000, now_us(), bytes_max=1 << 30):
        for piece in slices:
            ranges = [(piece.offset_start, piece.offset_end)]
            engine.settle(queue, "bench", Outcome.ACK, ranges, now_us())
        engine.flush(now_us())
        engine.wait()


def messages(folder: str, queue: str, columns: Sequence[str] | None) -> Pass:
    with LogReader(folder) as reader:
        return timed(lambda: messages_batches(reader, queue, 0, columns=columns))


def events(folder: str, queue: str, columns: Sequence[str] | None) -> Pass:
    with LogReader(folder) as reader:
        return timed(lambda: events_batches(reader, queue, 0, columns=columns))


def timed(read: Callable[[], Iterator[pa.RecordBatch]]) -> Pass:
    passes = []
    for _ in range(PASSES):
        start, cpu_start = time.perf_counter(), time.process_time()
        rows = sum(batch.num_rows for batch in read())
        passes.append(Pass(rows, time.perf_counter() - start, time.process_time() - cpu_start))
    return min(passes, key=lambda taken: taken.seconds)


def run() -> list[Row]:
    """The rows of this benchmark."""
    rows: list[Row] = []
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder, context.Pool(1) as process:
        engine = open_log(folder, now_us(), policies=Policies({"single": {"durability": "none"}}))
        fill(engine, "bench", MESSAGES, BATCH, SIZE)
        settle(engine, "bench")
        fill(engine, "single", SINGLES, 1, SINGLE_SIZE)
        engine.tick(now_us() + 2_000_000)
        engine.wait()

        def measure(
            name: str,
            view: Callable[[str, str, Sequence[str] | None], Pass],
            queue: str,
            columns: Sequence[str] | None,
            expected: int,
            goal: float,
        ) -> None:
            taken: Pass = process.apply(view, (folder, queue, columns))
            assert taken.rows == expected, f"{name}: {taken.rows} rows, and not {expected}"
            rows.append((name, taken.rows / taken.seconds / 1e6, "M msg/s", goal))
            rows.append((f"{name}, CPU", taken.cpu_seconds / taken.rows * 1e9, "ns/msg", 0))

        block = f"{MESSAGES // 1_000_000} M × {SIZE} B in blocks of {BATCH}"
        measure(f"{block}, all columns", messages, "bench", None, MESSAGES, 10)
        measure(f"{block}, offset, value", messages, "bench", ["offset", "value"], MESSAGES, 0)
        measure(
            f"{block}, offset, id, timestamp", messages, "bench", ["offset", "id", "timestamp"], MESSAGES, 0
        )
        measure("their events, all columns", events, "bench", None, 2 * MESSAGES, 0)
        single = f"{SINGLES} × {SINGLE_SIZE} B in blocks of 1"
        measure(f"{single}, all columns", messages, "single", None, SINGLES, 0)
        engine.close(now_us())
    return rows
