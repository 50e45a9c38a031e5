"""A standalone cluster of Spark's, a master and two workers on this machine: batch, stream, sink, pipelines;
and that a token is shown nowhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from tests.http.api import Api
from tests.server.harness import ROOT
from tests.spark.cluster import Cluster
from tests.spark.conftest import StartBroker
from tests.spark.rig import send, url_of, values

TOKEN = "kept-to-ourselves-0123456789"
CONFIG = f'[[http.tokens]]\nname = "spark"\nrole = "admin"\ntoken = "{TOKEN}"\n'
DRIVER_SECONDS = 300.0
MESSAGES = 1000

PIPELINE = """\
name = "NAME"
[source]
url = "URL"
subscribe = "piped"
startingOffsets = "earliest"
[[step]]
sql = "select concat('piped ', cast(value as string)) as value from input"
[sink]
format = "penstock"
queue = "piped.NAME"
[run]
checkpoint = "FOLDER/checkpoint/NAME"
"""


def log_of(api: Api, queue: str) -> list[str]:
    reply = api.ask("GET", f"/v1/queues/{queue}/log", columns="value")
    return [value.decode() for value in pa.ipc.open_stream(reply.body).read_all()["value"].to_pylist()]


def run(command: list[str], environment: dict[str, str], log: Path) -> str:
    with log.open("wb") as complaints:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=complaints,
            timeout=DRIVER_SECONDS,
            check=False,
        )
    assert done.returncode == 0, log.read_text()[-5000:]
    return done.stdout.decode()


@pytest.mark.long
def test_everything_runs_and_nothing_shows_the_token(
    cluster: Cluster, start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker(config=CONFIG)
    sent = [value.decode() for value in values(MESSAGES)]
    send(broker, "shared", values(MESSAGES), token=TOKEN)
    arguments = [cluster.url, url_of(broker), "shared", str(tmp_path), TOKEN]
    said = run(
        [sys.executable, "-m", "tests.spark.cluster_program", *arguments],
        {**os.environ, "PYSPARK_PYTHON": sys.executable},
        tmp_path / "driver.err",
    )
    read = json.loads(said.splitlines()[-1])
    assert read == {"values": sent, "tasks": 4}
    with Api(broker.ports["http"], TOKEN) as api:
        assert log_of(api, "shared.batch") == sent
        assert log_of(api, "shared.stream") == sent
    # Plans, errors, pages, event logs, checkpoints, what the driver logs at its most talkative; what master,
    # workers and executors log. And these are the places to look: some of them name the queue.
    places = [tmp_path / name for name in ("shown", "events", "checkpoint", "driver.log", "driver.err")]
    looked_at = 0
    for place in (*places, cluster.folder):
        files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
        assert files, place
        for path in files:
            text = path.read_bytes()
            assert TOKEN.encode() not in text, path
            looked_at += b"shared" in text
    assert looked_at >= 3
    assert len(list(cluster.folder.rglob("stderr"))) >= 2


@pytest.mark.long
def test_a_folder_of_pipelines_finds_its_python_by_itself(
    cluster: Cluster, start_broker: StartBroker, tmp_path: Path
) -> None:
    """Called by its full path, with no word about which Python the executors shall take."""
    broker = start_broker(config=CONFIG)
    send(broker, "piped", values(MESSAGES), token=TOKEN)
    folder = tmp_path / "pipelines"
    folder.mkdir()
    for name in ("on", "off"):
        text = PIPELINE.replace("URL", url_of(broker)).replace("FOLDER", str(tmp_path)).replace("NAME", name)
        (folder / f"{name}.toml").write_text(text)
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYSPARK_")}
    environment["PATH"] = os.pathsep.join(
        folder
        for folder in environment["PATH"].split(os.pathsep)
        if folder != str(Path(sys.executable).parent)
    )
    command = [str(Path(sys.executable).with_name("penstock")), "pipeline", "run", str(folder), "--once"]
    run(
        [*command, "--master", cluster.url],
        {**environment, "PENSTOCK_TOKEN": TOKEN},
        tmp_path / "pipeline.err",
    )
    with Api(broker.ports["http"], TOKEN) as api:
        for queue in ("piped.on", "piped.off"):
            assert log_of(api, queue) == [f"piped {value.decode()}" for value in values(MESSAGES)]
