"""`penstock backup` of a broker at work, `penstock restore`, and what a broker makes of the result."""

import argparse
import errno
import json
import os
import threading
import time
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.admin import Admin
from penstock.cli.main import main
from penstock.log.disk import RESTORING, RealFile
from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.server.harness import BrokerProcess

Run = Callable[..., Any]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """A command, with `--json`; what it says."""

    def call(*words: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert main([*words, "--json"]) == code, capsys.readouterr()
        said = capsys.readouterr()
        return [json.loads(line) for line in said.out.splitlines()] if code == 0 else said.err

    return call


def url(broker: BrokerProcess) -> str:
    return f"http://127.0.0.1:{broker.ports['http']}"


def values(api: Api, queue: str, **query: object) -> dict[int, str]:
    """Of all messages that are in the log."""
    found: dict[int, str] = {}
    start: int | None = 0
    while start is not None:
        page = api.get(f"/v1/queues/{queue}/messages", **{"limit": 1000, **query, "from": start})
        found |= {it["offset"]: b64decode(it["value_base64"]).decode() for it in page["messages"]}
        start = page["next"]
    return found


class Load(threading.Thread):
    """Sends to two queues and settles what is in one of them, until it is told to stop."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self.ends = threading.Event()
        self.confirmed = 0  # of each queue: offsets below
        self.settled = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with Api(self._port) as api:
                while not self.ends.is_set():
                    lines = b"".join(
                        b'{"value":"%d %s"}\n' % (self.confirmed + n, b"x" * 500) for n in range(50)
                    )
                    for queue in ("kept", "work"):
                        headers = {"Content-Type": "application/x-ndjson"}
                        assert api.ask("POST", f"/v1/queues/{queue}/batch", lines, headers).status == 200
                    self.confirmed += 50
                    taken = api.post("/v1/queues/work/take", max=50)["messages"]
                    api.post("/v1/queues/work/settle", {"ack": [it["id"] for it in taken]})
                    self.settled += len(taken)
                    self.ends.wait(0.1)  # A machine that is slow to copy has less to copy.
        except BaseException as error:  # noqa: BLE001 - told by `stop`
            self.error = error

    def stop(self) -> None:
        self.ends.set()
        self.join(60)
        assert self.error is None, self.error


def test_backups_under_load_and_what_is_restored(start_broker: StartBroker, tmp_path: Path, run: Run) -> None:
    """Everything that was confirmed before a backup began is in it, and each message is itself; segments
    come, are compacted and go meanwhile."""
    settings = '[queue."work"]\nretention-seconds = 0\n[queue."kept"]\nretention-seconds = 86400\n'
    broker = start_broker("--log-segment-bytes", "262144", config=settings)
    load = Load(broker.ports["http"])
    load.start()
    told, confirmed = [], []
    try:
        for _ in range(4):
            goal = load.confirmed + 300
            while load.confirmed < goal and load.error is None:
                load.ends.wait(0.01)
            confirmed.append(load.confirmed)
            told += run("backup", str(tmp_path / "b"), "--url", url(broker))
    finally:
        load.stop()
    assert all(it["defects"] == [] for it in told)
    # What was copied before is not copied again.
    assert sum(it["copied_bytes"] for it in told) < sum(it["bytes"] for it in told)
    with Api(broker.ports["http"]) as api:
        old = api.get("/v1/queues/kept")["identity"]
        message = api.get("/v1/queues/kept/messages", limit=1)["messages"][0]
    broker.kill()
    backups = run("restore", str(tmp_path / "b"), "--list")
    assert [it["backup"] for it in backups] == [it["backup"] for it in told]
    assert run("restore", str(tmp_path / "b"), "--check")
    for number, (at, before) in enumerate(
        zip([None, backups[1]["time"]], (confirmed[-1], confirmed[1]), strict=True)
    ):
        words = () if at is None else ("--at", at)
        (done,) = run("restore", str(tmp_path / "b"), str(tmp_path / f"r{number}" / "data"), *words)
        assert done["defects"] == []
        assert done["queues"]["kept"] >= before
        again = start_broker(folder=f"r{number}", config=settings)
        with Api(again.ports["http"]) as api:
            found = values(api, "kept")
            assert sorted(found) == list(range(done["queues"]["kept"]))
            assert all(value == f"{offset} {'x' * 500}" for offset, value in found.items())
            living = values(api, "work")
            assert len(living) + load.settled >= before
            assert all(value == f"{offset} {'x' * 500}" for offset, value in living.items())
            # It is another log: whoever noted where he was is told so.
            reply = api.ask("GET", "/v1/queues/kept/log", identity=old)
            assert reply.problem == "queue-deleted"
            assert "restored from a backup" in reply.json["detail"]
            assert api.post("/v1/queues/kept/settle", {"ack": [message["id"]]})["ack"] == 0
            new = api.get("/v1/queues/kept/messages", limit=1)["messages"][0]
            assert new["id"] != message["id"]
            assert new["id"][12:] == message["id"][12:]
            assert api.get("/v1/engine")["damage"] == []
        again.kill()


def test_who_may_and_that_it_is_written_down(start_broker: StartBroker, tmp_path: Path, run: Run) -> None:
    tokens = "\n".join(
        f'[[http.tokens]]\nname = "{name}"\nrole = "{name}"\ntoken = "{name}-0123456789abcdef0123"'
        for name in ("read", "operate", "admin")
    )
    broker = start_broker(config=tokens)
    words = ("backup", str(tmp_path / "b"), "--url", url(broker), "--token")
    with Api(broker.ports["http"], "admin-0123456789abcdef0123") as api:
        api.send("q", b"one")
        (name,) = [it["name"] for it in api.get("/v1/backup")["files"] if it["name"].endswith(".seg")]
    for token in ("read", "operate"):
        assert "needs the right admin" in run(*words, f"{token}-0123456789abcdef0123", code=1)
        with Api(broker.ports["http"], f"{token}-0123456789abcdef0123") as api:
            assert api.ask("GET", f"/v1/backup/{name}", bytes=10).problem == "forbidden"
    run(*words, "admin-0123456789abcdef0123")
    with Api(broker.ports["http"], "admin-0123456789abcdef0123") as api:
        lines = [it for it in api.get("/v1/audit")["lines"] if it["act"] == "backup"]
        assert [(it["who"], it["result"]) for it in lines] == [("admin", "begun"), ("admin", "done")] * 2
        assert api.ask("GET", "/v1/backup/00000000000000000009.seg", bytes=1).problem == "file-not-found"
        # It ends where the file does, whatever is asked for.
        file = max(api.get("/v1/backup")["files"], key=lambda it: it["bytes"])
        assert len(api.ask("GET", f"/v1/backup/{file['name']}", bytes=1 << 50).body) >= file["bytes"]
        # Files are those of one opening of a log, and of a log that there is.
        opening = api.get("/v1/backup")["opening"]
        for number, status in ((opening, 200), (opening + 1, 404)):
            assert api.ask("GET", f"/v1/backup/{name}", bytes=1, opening=number).status == status
        for path in ("/v1/backup", f"/v1/backup/{name}"):
            assert api.ask("GET", path, bytes=1, shard=1).problem == "bad-request"
        for other in ("lock", "watermark", "..%2Flock", "audit.jsonl"):
            assert api.ask("GET", f"/v1/backup/{other}", bytes=1).problem == "bad-request"
    assert os.stat(tmp_path / "b").st_mode & 0o077 == 0
    assert all(os.stat(it).st_mode & 0o077 == 0 for it in (tmp_path / "b").iterdir())


def test_nobody_pauses_between_two_files(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("q", b"one")
        (file, *_) = api.get("/v1/backup")["files"]
    args = argparse.Namespace(
        url=url(broker), via=None, vias=("http",), token=None, token_file=None, cafile=None
    )
    with Admin(args) as admin:
        for _ in range(3):
            with admin.stream("backup", file["name"], bytes=file["bytes"]) as response:
                assert len(response.read()) == file["bytes"]
            assert admin._line._plan.search(time.monotonic()).pause == 0


def test_a_restore_that_was_cut_is_refused_by_serve_and_goes_on(
    start_broker: StartBroker, tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("q", b"one", b"two")
    store, data = tmp_path / "b", tmp_path / "r" / "data"
    run("backup", str(store), "--url", url(broker))
    run("backup", str(tmp_path / "none" / "deeper"), "--url", url(broker))
    broker.stop()
    (segment,) = store.glob("*.seg-*")
    content = segment.read_bytes()
    segment.write_bytes(content[:-8])
    (data / "lost+found").mkdir(parents=True)  # as in the root of a new volume
    assert "is damaged, it has another checksum" in run("restore", str(store), str(data), code=1)
    assert (data / RESTORING).exists()
    assert main(["serve", "--data", str(data), "--http", "off"]) == 1
    assert "a restore into it was not finished" in capsys.readouterr().err
    segment.write_bytes(content)
    (done,) = run("restore", str(store), str(data))
    assert done["queues"] == {"q": 2}
    assert "is not empty" in run("restore", str(store), str(data), code=1)
    again = start_broker(folder="r")
    with Api(again.ports["http"]) as api:
        assert values(api, "q") == {0: "one", 1: "two"}
    assert main(["backup", str(store), "--url", url(again)]) == 0
    assert "are of another log, " in capsys.readouterr().err


def test_where_a_disk_says_no(
    start_broker: StartBroker, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a sentence; and when there is room, the same command goes on."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("q", b"one")
    store, data = str(tmp_path / "b"), str(tmp_path / "r")
    for words in (("backup", store, "--url", url(broker)), ("restore", store, data)):
        with monkeypatch.context() as patch:
            patch.setattr(RealFile, "write", full)
            said = run(*words, code=1)
        assert "No space left on device; call it again when that is mended, and it goes on\n" in said
        run(*words)
    (tmp_path / "file").touch()
    assert "file" in run("backup", str(tmp_path / "file"), "--url", url(broker), code=2)
    said = run("backup", str(broker.folder / "data"), "--url", url(broker), code=1)
    assert "is the data folder of a broker" in said


def test_misuse(tmp_path: Path, run: Run) -> None:
    assert "there is no folder" in run("restore", str(tmp_path / "none"), code=2)
    assert "there is no backup in" in run("restore", str(tmp_path), code=1)
    (tmp_path / "00000000000000000000.seg").touch()
    assert "is the data folder of a broker" in run("restore", str(tmp_path), code=1)
