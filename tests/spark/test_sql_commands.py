"""docs/spark-sql.md: its commands run, those of examples/declarative among them."""

import os
import shutil
import signal
import subprocess
import sys
from base64 import b64decode
from contextlib import suppress
from pathlib import Path

import pytest
from pyarrow import parquet

from tests.http.api import Api
from tests.http.morgue import path_of
from tests.server.harness import ROOT, BrokerProcess
from tests.spark.conftest import StartBroker
from tests.spark.rig import examples, send, url_of

COMMANDS = examples("spark-sql.md", "sh")
EXAMPLE = ROOT / "examples" / "declarative"
COMMAND_SECONDS = 240.0


def run(command: str, folder: Path, broker: BrokerProcess) -> str:
    """What a command of the page says, in a shell in which this Python is the first."""
    process = subprocess.Popen(
        ["bash", "-euc", command.replace("http://127.0.0.1:9180", url_of(broker))],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SPARK_LOCAL_IP": "127.0.0.1",
            # Otherwise Connect's port is always the same, and whoever tests beside us has it, too.
            "SPARK_TESTING": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, complaints = process.communicate(timeout=COMMAND_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, (said + complaints)[-5000:]
    return said


@pytest.mark.long
def test_the_shell_runs(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = start_broker()
    send(broker, "orders", [b"three apples", b"a pear"])
    command, _, _ = COMMANDS
    assert run(command, tmp_path, broker).splitlines() == ["0\tthree apples", "1\ta pear"]


@pytest.mark.long
def test_the_declarative_pipeline_takes_every_order_once(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = start_broker()
    project = tmp_path / "project"
    shutil.copytree(EXAMPLE, project)
    spec = project / "spark-pipeline.yml"
    text = spec.read_text().replace("http://127.0.0.1:9180", url_of(broker))
    spec.write_text(text.replace("file:///var/tmp/penstock-orders", f"file://{tmp_path}/storage"))
    assert url_of(broker) in spec.read_text()
    assert str(tmp_path) in spec.read_text()
    _, dry, real = COMMANDS
    send(broker, "orders", [_order(number) for number in range(1, 5)])
    assert "Run is COMPLETED" in run(dry, project, broker)
    with Api(broker.ports["http"]) as api:
        assert api.ask("GET", path_of("orders.large")).problem == "queue-not-found"
    for first, end in ((5, 6), (6, 8)):
        send(broker, "orders", [_order(number) for number in range(first, end)])
        run(real, project, broker)
        orders = parquet.read_table(project / "spark-warehouse" / "orders").sort_by("id")
        assert orders["id"].to_pylist() == list(range(1, end))
        assert orders["offset"].to_pylist() == list(range(end - 1))
        turnover = parquet.read_table(project / "spark-warehouse" / "turnover")
        assert sorted(turnover["region"].to_pylist()) == ["north", "south"]
        assert sum(turnover["orders"].to_pylist()) == end - 1
        assert sum(turnover["amount"].to_pylist()) == 400 * sum(range(1, end))
        with Api(broker.ports["http"]) as api:
            large = api.get(path_of("orders.large", "messages"))["messages"]
        assert [b64decode(it["value_base64"]) for it in large] == [_order(number) for number in range(3, end)]


def _order(number: int) -> bytes:
    return b'{"id":%d,"region":"%s","amount":%d.0}' % (
        number,
        b"north" if number % 2 else b"south",
        400 * number,
    )
