"""Exactly once, whoever fails: tasks, the driver, the broker, its second process, and the way between them.

What was sent and what is in the queue are compared as multisets. Where Spark itself cannot be made to fail at
the point that counts, the writer's methods are called in the order in which Spark calls them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import BinaryType, StructField, StructType

from penstock.spark import PenstockDataSource
from penstock.spark.api import Refused
from penstock.spark.writing import BatchWriter, NoIdentity, Staged, StreamWriter
from penstock.spark.writing_transaction import CommitUnknown
from tests.http.api import Api
from tests.server.harness import ROOT, BrokerProcess, until
from tests.spark.conftest import StartBroker
from tests.spark.driver_program import BATCH_MESSAGES, JUNK
from tests.spark.gate import COMMIT, STAGE, Cut, Faults, Gate, raising
from tests.spark.rig import PATIENCE_SECONDS, Queues, restart, send, url_of, values

SCHEMA = StructType([StructField("value", BinaryType())])
DRIVER_SECONDS = 240.0


def second_of(broker: BrokerProcess) -> int:
    """The process of the HTTP API."""
    (pid,) = Path(f"/proc/{broker.pid}/task/{broker.pid}/children").read_text().split()
    return int(pid)


def kill_second(broker: BrokerProcess) -> None:
    os.kill(second_of(broker), signal.SIGKILL)


def replace(broker: BrokerProcess) -> None:
    """kill -9 the broker, and start it again."""
    broker.kill()
    restart(broker)


# --- the driver, and its tasks ---------------------------------------------------------------------


class Driver:
    """A Spark driver in processes of its own."""

    def __init__(self, *arguments: str, log: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.driver_program", *arguments],
                cwd=ROOT,
                env={**environment, "PYSPARK_PYTHON": sys.executable},
                stdout=output,
                stderr=output,
            )

    def kill(self) -> None:
        """kill -9: the driver's Python, the JVM below it and the workers below that, as a machine dies."""
        for pid in (self._process.pid, *_descendants(self._process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self) -> int:
        try:
            return self._process.wait(DRIVER_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
            raise


def _descendants(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # threads come and go
            for child in (thread / "children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))


def test_tasks_fail_half_way_and_the_driver_is_killed_at_both_sides_of_a_commit(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    queues = Queues(spark, broker)
    sent = values(3 * BATCH_MESSAGES)
    queues.send("from", sent)
    flag, log = tmp_path / "flag", tmp_path / "driver.log"

    def run(gate: Gate, before: int | None = None, after: int | None = None) -> int:
        """Start a driver, and kill it before or after a commit of its own, by number; how it ended."""
        arguments = (queues.url, gate.url, str(tmp_path / "checkpoint"), str(flag))
        driver = Driver(*arguments, log=log)

        def die(what: str) -> None:
            driver.kill()
            raise Cut

        gate.before = Faults() if before is None else Faults(*[(COMMIT, None)] * before, (COMMIT, die))
        gate.after = raise_flag if after is None else Faults(*[(COMMIT, None)] * after, (COMMIT, die))
        return driver.wait()

    def raise_flag(what: str) -> None:
        # The task that is to fail has staged something: it may do so now.
        if what == STAGE and max(gate.sizes) > 1 << 20:
            flag.touch()

    with Gate(broker) as gate:
        # The first is killed when all is staged and nothing committed.
        assert run(gate, before=0) == -signal.SIGKILL, log.read_text()[-5000:]
        assert flag.exists(), "no task has failed half-way"
        with Api(broker.ports["http"]) as api:
            assert api.ask("GET", "/v1/queues/to").problem == "queue-not-found"
        # The second does the batch again, and is killed when the next is committed and nobody knows it.
        assert run(gate, after=1) == -signal.SIGKILL, log.read_text()[-5000:]
        assert not (tmp_path / "checkpoint" / "commits" / "1").exists()
        assert queues.values("to") == Counter(sent[: 2 * BATCH_MESSAGES])
        # The third, which is this process, says again what is committed, and goes on.
        gate.after = Faults()
        frame = queues.stream("from", startingOffsets="earliest", maxOffsetsPerTrigger=BATCH_MESSAGES)
        stream = frame.select("value").writeStream.format("penstock").option("url", gate.url)
        stream = stream.option("queue", "to").option("checkpointLocation", str(tmp_path / "checkpoint"))
        assert stream.trigger(availableNow=True).start().awaitTermination(int(PATIENCE_SECONDS))
        assert gate.count(COMMIT) == 5
        assert len(set(gate.keys)) == 3
    found = queues.values("to")
    assert not any(value.startswith(JUNK) for value in found)
    assert found == Counter(sent)


# --- the broker, and its second process ------------------------------------------------------------


def test_the_broker_and_its_second_process_are_killed_at_every_step(
    spark: SparkSession, start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker()
    queues = Queues(spark, broker)
    sent: list[bytes] = []
    with Gate(broker) as gate:
        frame = queues.stream("from", startingOffsets="earliest", minPartitions=2).select("value")
        stream = frame.writeStream.format("penstock").option("url", gate.url).option("queue", "to")
        query = stream.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        try:
            for fault in (replace, kill_second):
                hook = raising(partial(fault, broker))
                for before, after in (
                    (Faults((STAGE, hook)), Faults()),
                    (Faults(), Faults((STAGE, hook))),
                    (Faults((COMMIT, hook)), Faults()),
                    (Faults(), Faults((COMMIT, hook))),
                ):
                    gate.before, gate.after = before, after
                    sent += values(200, len(sent))
                    send(broker, "from", sent[-200:])
                    query.processAllAvailable()
                    assert not before.left + after.left, "the fault has not happened"
        finally:
            query.stop()
    assert queues.values("to") == Counter(sent)


# --- what Spark would do ---------------------------------------------------------------------------


def writer(url: str, key: str, **options: str) -> BatchWriter:
    """What the driver makes, for a queue of the key's name."""
    chosen = CaseInsensitiveDict({"url": url, "queue": key, "transactionId": key, **options})
    made = PenstockDataSource(chosen).writer(SCHEMA, False)
    assert isinstance(made, BatchWriter)
    return made


def rows(payloads: Iterable[bytes]) -> list[pa.RecordBatch]:
    return [pa.record_batch({"value": pa.array(list(payloads), pa.binary())})]


def test_of_two_tries_of_a_task_one_counts(broker: BrokerProcess, queues: Queues, api: Api) -> None:
    sink = writer(queues.url, "tries")
    slow = sink.write(iter(rows(values(100))))
    fast = sink.write(iter(rows(values(100))))
    other = sink.write(iter(rows(values(100, 100))))
    assert len(api.get("/v1/transactions/tries")["stages"]) == 3
    sink.commit([fast, other])
    assert queues.values("tries") == Counter(values(200))
    # The stage of the try that did not count went with the commit: nobody can say what it had brought.
    with pytest.raises(Refused, match="committed with other stages"):
        sink.commit([slow, other])
    assert api.get("/v1/transactions/tries")["stages"] == []
    assert queues.values("tries") == Counter(values(200))


def test_a_commit_again_and_an_abort_afterwards_change_nothing(queues: Queues, api: Api) -> None:
    sink = writer(queues.url, "again")
    messages = [sink.write(iter(rows(values(50)))), sink.write(iter([])), None]
    for _ in range(2):
        sink.commit(messages)
    sink.abort(messages)
    # Another process, which knows nothing of the first: the same work, and late.
    late = writer(queues.url, "again")
    late.commit([late.write(iter(rows(values(50))))])
    late.abort([None, None])
    assert queues.values("again") == Counter(values(50))
    assert api.get("/v1/transactions/again")["state"] == "committed"


def test_an_abort_drops_what_was_staged(queues: Queues, api: Api) -> None:
    sink = writer(queues.url, "aborted")
    message = sink.write(iter(rows(values(50))))
    sink.abort([message, None])
    assert api.ask("GET", "/v1/transactions/aborted").problem == "transaction-not-found"
    with pytest.raises(Refused, match="has no stage"):
        sink.commit([message])
    assert api.ask("GET", "/v1/queues/aborted").problem == "queue-not-found"
    # What is written from the beginning counts.
    sink.commit([sink.write(iter(rows(values(50))))])
    assert queues.values("aborted") == Counter(values(50))


def test_answers_that_are_lost(queues: Queues) -> None:
    lost = raising(lambda: None)
    with Gate(queues.broker) as gate:
        sink = writer(gate.url, "lost")
        gate.after = Faults((STAGE, lost), (COMMIT, lost), (COMMIT, lost))
        sink.commit([sink.write(iter(rows(values(50))))])
        assert (gate.count(STAGE), gate.count(COMMIT)) == (2, 3)
    assert queues.values("lost") == Counter(values(50))


def test_a_commit_of_which_nobody_knows_says_how_to_repeat_it(queues: Queues) -> None:
    with Gate(queues.broker) as gate:
        sink = writer(gate.url, "unknown", retrySeconds="0.2")
        message = sink.write(iter(rows(values(50))))
        # The commit arrives; then nothing gets through any more.
        gate.after = raising(lambda: None)
        gate.before = Faults((COMMIT, None), *[(COMMIT, raising(lambda: None))] * 1000)
        with pytest.raises(CommitUnknown) as unknown:
            sink.commit([message])
        assert "write the same rows again with the option transactionId 'unknown'" in str(unknown.value)
        sink.abort([message])
    again = writer(queues.url, "unknown")
    again.commit([again.write(iter(rows(values(50))))])
    assert queues.values("unknown") == Counter(values(50))


@pytest.mark.parametrize("fault", [replace, kill_second])
def test_a_large_commit_that_is_cut_off_is_finished_once(
    spark: SparkSession, start_broker: StartBroker, fault: Callable[[BrokerProcess], None]
) -> None:
    broker = start_broker()
    payloads = [b"%08d" % number + b"." * 4000 for number in range(6000)]  # 24 MB, in several chunks
    sink = writer(url_of(broker), "large")
    messages = [sink.write(iter(rows(payloads[:3000]))), sink.write(iter(rows(payloads[3000:])))]
    assert sum(len(message.stages) for message in messages) > 2
    thread = threading.Thread(target=sink.commit, args=(messages,))
    thread.start()
    with Api(broker.ports["http"]) as api:
        until(lambda: api.ask("GET", "/v1/queues/large").status == 200, "the first chunk is stored")
    fault(broker)
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    sink.commit(messages)
    assert Queues(spark, broker).values("large") == Counter(payloads)


def test_a_stream_s_task_needs_an_identity() -> None:
    sink = PenstockDataSource(CaseInsensitiveDict({"queue": "x"})).streamWriter(SCHEMA, False)
    assert isinstance(sink, StreamWriter)
    with pytest.raises(NoIdentity, match="write with foreachBatch"):
        sink.write(iter([]))
    # Where every task has failed nobody knows what to abort, and where no task had rows there is no commit.
    sink.abort([None, None], 7)
    sink.commit([Staged("spark/q/7", ()), Staged("spark/q/7", ())], 7)
