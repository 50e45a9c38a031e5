"""Speculative tasks, real ones: Spark runs a task that hangs a second time, and the rows of one try count."""

import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from tests.http.api import Api
from tests.server.harness import ROOT
from tests.spark.cluster import Cluster
from tests.spark.conftest import StartBroker
from tests.spark.gate import COMMIT, STAGE, Gate
from tests.spark.rig import PATIENCE_SECONDS
from tests.spark.speculation_program import TASKS

MESSAGES = 400
DRIVER_SECONDS = 240.0


@pytest.mark.long
def test_a_task_that_hangs_and_its_speculative_twin_store_every_row_once(
    cluster: Cluster, start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker()
    committed, late = threading.Event(), threading.Event()
    first = threading.Lock()

    def hang_once(what: str) -> None:
        """The first stage of all gets to the broker only when the transaction is committed."""
        if what == STAGE and first.acquire(blocking=False):
            assert committed.wait(DRIVER_SECONDS)
        elif what == COMMIT:
            with Api(broker.ports["http"]) as api:
                staged.extend(api.get(f"/v1/transactions/{_escaped(gate.keys[0])}")["stages"])

    def note(what: str) -> None:
        if what == COMMIT:
            committed.set()
        elif what == STAGE and committed.is_set():
            late.set()

    staged: list[object] = []
    with Gate(broker) as gate:
        gate.before, gate.after = hang_once, note
        log = tmp_path / "driver.log"
        with log.open("wb") as output:
            ended = subprocess.run(
                [
                    *(sys.executable, "-m", "tests.spark.speculation_program", cluster.url, gate.url),
                    *("twins", str(MESSAGES), str(tmp_path / "warehouse")),
                ],
                cwd=ROOT,
                env={**os.environ, "PYSPARK_PYTHON": sys.executable},
                stdout=output,
                stderr=output,
                timeout=DRIVER_SECONDS,
                check=False,
            )
        assert ended.returncode == 0, log.read_text()[-5000:]
        assert late.wait(PATIENCE_SECONDS)
        # One task was run twice: its first try has staged its rows as well, and too late.
        assert gate.count(STAGE) == TASKS + 1
        assert len(set(gate.keys)) == 1
        assert len(staged) == TASKS
        assert gate.count(COMMIT) == 1
    with Api(broker.ports["http"]) as api:
        stored = pa.ipc.open_stream(api.ask("GET", "/v1/queues/twins/log", columns="value").body).read_all()
        numbers = Counter(map(int, stored["value"].to_pylist()))
        assert numbers == Counter(range(MESSAGES))


def _escaped(key: str) -> str:
    return key.replace("/", "%2F")
