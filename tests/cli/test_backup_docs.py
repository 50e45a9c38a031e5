"""docs/backup.md and docs/upgrading.md: commands are run, numbers and sentences are those of the sources."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.cluster import checks, frames
from penstock.log import state
from penstock.log.backup import store
from penstock.log.jetstream import records
from penstock.log.log import open_log
from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.http.conftest import start_broker as start_broker
from tests.server.harness import ROOT, WAIT_SECONDS, until

YEARS_AHEAD = "2030-01-31T12:00:00Z"
BACKUP, UPGRADING = ((ROOT / "docs" / f"{page}.md").read_text() for page in ("backup", "upgrading"))


def test_the_commands_of_the_page(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("orders", b"one")
    where = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": where, "PENSTOCK_URL": f"http://127.0.0.1:{broker.ports['http']}"}
    ran, last = 0, ""
    for block in re.findall(r"^```console\n(.*?)^```$", BACKUP, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = part.splitlines()
            words = [sys.executable, "-m", *command.replace(YEARS_AHEAD, last).split()]
            done = subprocess.run(
                words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=WAIT_SECONDS
            )
            assert done.returncode == 0, (command, done)
            wanted = "\n".join(re.escape(line).replace("…", ".*") for line in lines)
            assert re.fullmatch(wanted, done.stdout.strip()), (command, done.stdout)
            if "--list" in command:
                last = done.stdout.splitlines()[-1].split()[0]
            ran += 1
    assert ran == 6
    shutil.copytree(tmp_path / "then", tmp_path / "cut")
    (tmp_path / "cut" / "restoring").touch()
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "serve", "--data", "DATA", "--http", "off"],
        cwd=(tmp_path / "cut").rename(tmp_path / "DATA").parent,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    assert done.returncode == 1
    assert done.stderr.strip() in BACKUP


def test_the_numbers_of_the_page() -> None:
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", UPGRADING, re.MULTILINE))
    assert rows["the log: blocks and snapshots"] == str(state.FORMAT)
    assert rows["what may be in the log"].split()[0] == str(state.FORMAT_LAST)
    assert rows["records of a cluster's stream"] == f"`{records.MAGIC.decode()}`"
    assert rows["the relay between front-ends"] == str(frames.VERSION)
    assert rows["backups"].split()[0] == str(store.FORMAT)
    assert f"needs {'.'.join(map(str, checks.VERSION_LOWEST))} or newer" in UPGRADING


def test_going_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence; and that nothing was changed by the try."""
    log = open_log(str(tmp_path), 1_800_000_000_000_000)
    log._sealer.control({"op": "format", "format": state.FORMAT_LAST + 1, "queue": 0}, 1)
    log.flush(1)
    log.wait()
    log.abandon()
    before = {it.name: it.read_bytes() for it in tmp_path.iterdir() if it.suffix == ".seg"}
    for _ in range(2):
        assert main(["serve", "--data", str(tmp_path), "--http", "off"]) == 1
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert re.sub(r"position \d+", "position 1234", said) in UPGRADING
        assert {it.name: it.read_bytes() for it in tmp_path.iterdir() if it.suffix == ".seg"} == before


def ends(api: Api) -> dict[str, int]:
    return {it["name"]: it["offset_end"] for it in api.get("/v1/queues")["queues"]}


@pytest.mark.long
def test_a_folder_of_0_1_0_is_backed_up_and_restored(start_broker: StartBroker, tmp_path: Path) -> None:
    (tmp_path / "broker").mkdir()
    with tarfile.open(ROOT / "tests" / "data" / "log-0.1.0" / "data.tar.xz") as tar:
        tar.extractall(tmp_path / "broker", filter="data")
    broker = start_broker()
    url = f"http://127.0.0.1:{broker.ports['http']}"
    with Api(broker.ports["http"]) as api:
        until(lambda: ends(api).get("shared") == 180, "what it had staged to be taken over")
        queues = ends(api)
    assert main(["backup", str(tmp_path / "b"), "--url", url]) == 0
    assert main(["restore", str(tmp_path / "b"), str(tmp_path / "r" / "data")]) == 0
    broker.stop()
    again = start_broker(folder="r")
    with Api(again.ports["http"]) as api:
        assert ends(api) == queues
