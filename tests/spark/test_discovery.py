"""Spark finds the source by itself: in a fresh process, with nothing registered, classic and Connect."""

import base64
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pyspark_penstock
from penstock.spark import PenstockDataSource
from tests.http.api import Api
from tests.server.harness import ROOT
from tests.spark.conftest import StartBroker
from tests.spark.rig import send, url_of, values

RUN_SECONDS = 180


def test_pyspark_looks_for_modules_of_that_name() -> None:
    assert pyspark_penstock.DefaultSource is PenstockDataSource
    assert PenstockDataSource.name() == "penstock"


def test_the_wheel_has_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"bench", "tests"}
    assert set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == packages


WITHOUT_ARROW = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyarrow", "pandas", "numpy"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocked())
import pyspark_penstock
print(pyspark_penstock.DefaultSource.name())
"""


def test_it_can_be_found_where_pyarrow_is_missing() -> None:
    # PySpark imports every module of such a name at the first use of any Python source: one that fails
    # would take the sources of others along.
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ARROW], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "penstock\n"), done.stderr


@pytest.mark.long
def test_spark_connect_reads_and_writes(start_broker: StartBroker, tmp_path: Path) -> None:
    """With the token in the environment of the server: what a client says is in Spark's event log."""
    token = "kept-to-ourselves-0123456789"
    broker = start_broker(config=f'[[http.tokens]]\nname = "spark"\nrole = "admin"\ntoken = "{token}"\n')
    send(broker, "connect", values(100), token=token)
    arguments = [url_of(broker), "connect", str(tmp_path / "checkpoint"), str(tmp_path / "table")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("connect_program.py"), *arguments],
        cwd=tmp_path,
        env={
            **environment,
            "PYSPARK_PYTHON": sys.executable,
            "PENSTOCK_TOKEN": token,
            # Otherwise Connect's port is always the same, and whoever tests beside us has it, too.
            "SPARK_TESTING": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout.splitlines()[-1])
    sent = [value.decode() for value in values(100)]
    assert read["session"] == "pyspark.sql.connect.session"
    assert read["batch"] == sent
    assert read["stream"] == sent
    assert "no option 'subscrib'; did you mean 'subscribe'?" in read["refusal"]
    with Api(broker.ports["http"], token) as api:
        for copy in ("connect.batch", "connect.stream"):
            messages = api.get(f"/v1/queues/{copy}/messages", limit=1000)["messages"]
            assert [base64.b64decode(message["value_base64"]).decode() for message in messages] == sent
    events = b"".join(path.read_bytes() for path in tmp_path.glob("*.events/**/events_*"))
    assert b"connect.stream" in events
    assert token.encode() not in events
