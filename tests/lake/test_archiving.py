"""A broker that archives: killed, refused by its store, on an object store; and what it says about it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.lake.table import Table
from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.lake.rig import WAIT_SECONDS, assert_complete, rows_of, wait_done
from tests.server.harness import ROOT, BrokerProcess, until


def archiver_of(broker: BrokerProcess) -> list[int]:
    """The process that archives: a child of the broker's child."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"penstock.lake" in stat.read_bytes():
                pid = int(stat.parent.name)
                parent = int((stat.parent / "stat").read_text().rsplit(") ")[-1].split()[1])
                above = int(Path(f"/proc/{parent}/stat").read_text().rsplit(") ")[-1].split()[1])
                if above == broker.pid:
                    pids.append(pid)
    return pids


def penstock(port: int, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "penstock", *arguments, "--url", url]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


@pytest.mark.long
def test_killed_with_its_archiver_and_alone(start_broker: StartBroker, tmp_path: Path) -> None:
    path = str(tmp_path / "lake")
    broker = start_broker("--archive-path", path, "--archive-seconds", "1", "--archive-rows", "100")
    with Api(broker.ports["http"]) as api:
        for _ in range(10):
            api.send("orders", *[b"%d" % n for n in range(50)])
        until(lambda: len(archiver_of(broker)) == 1, "an archiver", WAIT_SECONDS)
        os.kill(archiver_of(broker)[0], signal.SIGKILL)
        api.send("orders", b"more")
    broker.kill()
    broker.start()
    with Api(broker.ports["http"]) as api:
        api.send("other", b"x", b"y")
        api.post("/v1/queues/orders/purge")
        wait_done(api, "orders", "other")
        assert api.get("/v1/archive")["error"] is None
        status = penstock(broker.ports["http"], "archive", "status")
        assert status.returncode == 0, status.stderr
        assert path in status.stdout
        check = penstock(broker.ports["http"], "archive", "check", "--json")
        assert check.returncode == 0, check.stdout + check.stderr
        found = [json.loads(line) for line in check.stdout.splitlines()]
        assert {(it["queue"], it["rows"]) for it in found if it["view"] == "messages"} == {
            ("orders", 501),
            ("other", 2),
        }
        assert api.ask("DELETE", "/v1/readers/penstock.archive").problem == "bad-request"
        text = api.ask("GET", "/metrics").body.decode()
        assert 'penstock_reader_lag{queue="orders",reader="penstock.archive",view="messages"} 0.0' in text
    assert broker.stop() == 0
    assert_complete(str(broker.folder / "data"), path)


def test_a_process_that_was_killed_is_started_again(start_broker: StartBroker, tmp_path: Path) -> None:
    """And what was wrong is said as long as it is."""

    broker = start_broker("--archive-path", str(tmp_path / "lake"), "--archive-seconds", "1")
    with Api(broker.ports["http"]) as api:
        api.send("orders", b"one")
        wait_done(api, "orders")
        (archiver,) = archiver_of(broker)
        os.kill(archiver, signal.SIGKILL)
        until(lambda: api.get("/v1/archive")["error"] is not None, "it to be missed", WAIT_SECONDS)
        assert "its process ended with -9" in api.get("/v1/archive")["error"]
        api.send("orders", b"two")
        wait_done(api, "orders")
        until(lambda: api.get("/v1/archive")["error"] is None, "nothing to be wrong", WAIT_SECONDS)
        assert api.get("/v1/archive")["starts"] == 2
    assert broker.stop() == 0
    assert_complete(str(broker.folder / "data"), str(tmp_path / "lake"))


def test_retention_waits_for_the_table(start_broker: StartBroker, tmp_path: Path) -> None:
    path = tmp_path / "lake"
    path.write_text("in the way")
    broker = start_broker(
        "--log-segment-bytes", "65536", "--http-health-seconds", "1",
        config='[queue."*"]\nretention-seconds = 0\n[archive]\n'
        f'path = "{path}"\nqueues = ["kept*"]\nseconds = 1\n',
    )  # fmt: skip

    def start_of(queue: str) -> int:
        start: int = api.get(f"/v1/queues/{queue}")["offset_start"]
        return start

    with Api(broker.ports["http"]) as api:
        api.send("kept", b"first")
        until(lambda: bool(api.get("/v1/archive")["queues"]), "it is held", WAIT_SECONDS)
        for _ in range(40):
            api.send("kept", b"x" * 5000)
        api.post("/v1/queues/kept/purge")
        states = [it["state"] for it in api.get("/v1/health")["attention"]]
        until(
            lambda: "archive-failing" in [it["state"] for it in api.get("/v1/health")["attention"]],
            f"a finding, and not only {states}",
            WAIT_SECONDS,
        )
        assert "lake" in api.get("/v1/archive")["error"]
        assert penstock(broker.ports["http"], "archive", "status").returncode == 1
        assert start_of("kept") == 0
        path.unlink()
        wait_done(api, "kept")
        api.send("kept", b"last")
        until(lambda: start_of("kept") > 0, "what is archived goes", WAIT_SECONDS)
        wait_done(api, "kept")
        until(lambda: api.get("/v1/archive")["error"] is None, "nothing is wrong", WAIT_SECONDS)
    assert broker.stop() == 0
    assert sorted(row["offset"] for row in rows_of(str(path))) == list(range(42))


def test_what_is_not_archived_any_more_is_not_held(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = start_broker("--archive-path", str(tmp_path / "lake"), "--archive-seconds", "1")
    with Api(broker.ports["http"]) as api:
        api.send("orders", b"x")
        wait_done(api, "orders")
    assert broker.stop() == 0
    flags = broker.flags
    broker.flags = (*flags, "--archive-queues", "others")  # of which there is none
    broker.start()
    with Api(broker.ports["http"]) as api:
        until(lambda: not api.get("/v1/readers")["readers"], "no reader", WAIT_SECONDS)
        broker.flags = flags
    broker.kill()
    broker.start()
    with Api(broker.ports["http"]) as api:
        wait_done(api, "orders")
    assert broker.stop() == 0
    broker.flags = tuple(it for it in flags if "archive" not in it and "lake" not in it and it != "1")
    broker.start()
    with Api(broker.ports["http"]) as api:
        until(lambda: not api.get("/v1/readers")["readers"], "no reader", WAIT_SECONDS)
        # Its names are its own, and a reader of somebody else stays whatever it is called.
        hold = {"view": "messages", "positions": {"orders": 0}, "lease_seconds": 60}
        assert api.ask("PUT", "/v1/readers/penstock.archive", hold).problem == "bad-request"
        assert api.ask("PUT", "/v1/readers/archive", hold).status == 200
        assert api.get("/v1/archive")["path"] is None
        assert "archives nothing" in penstock(broker.ports["http"], "archive", "status").stderr


@pytest.mark.long
def test_object_store(
    start_broker: StartBroker, store: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "s3://bucket/penstock"
    broker = start_broker("--archive-path", path, "--archive-seconds", "1", env=store)
    with Api(broker.ports["http"]) as api:
        api.send("a/b ä", *[b"%d" % n for n in range(30)])
        wait_done(api, "a/b ä")
        check = penstock(broker.ports["http"], "archive", "check", **store)
        assert check.returncode == 0, check.stdout + check.stderr
        broker.kill()
        broker.start()
    with Api(broker.ports["http"]) as api:
        api.send("a/b ä", b"more")
        wait_done(api, "a/b ä")
    assert broker.stop() == 0
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    assert_complete(str(broker.folder / "data"), path)
    table = Table(path, "messages").open()
    day, identity = table.spans()[0].day, table.spans()[0].identity
    table.compact("a/b ä", day, identity)
    assert [it.rows for it in table.spans()] == [31]
    assert_complete(str(broker.folder / "data"), path)
