"""`penstock doctor`: every finding, made true on purpose where that can be done."""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.cli import doctor, machine, serve
from penstock.cli.machine import Finding, Level
from penstock.cli.main import main
from penstock.client.url import PORTS
from penstock.cluster import checks
from penstock.cluster.info import cluster_info
from penstock.cluster.records import Claim
from penstock.log.jetstream.cluster import Cluster
from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.server.harness import BrokerProcess


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_URL", "PENSTOCK_TOKEN", "PENSTOCK_DATA", "PENSTOCK_ENGINE", "PENSTOCK_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def url(broker: BrokerProcess) -> str:
    return f"http://127.0.0.1:{broker.ports['http']}"


def told(capsys: pytest.CaptureFixture[str]) -> list[Finding]:
    out, err = capsys.readouterr()
    assert err == ""
    found = [json.loads(line) for line in out.splitlines()]
    return [Finding(**{**one, "level": Level(one["level"])}) for one in found]


def about(findings: list[Finding], what: str) -> list[Finding]:
    return [finding for finding in findings if finding.about == what]


# --- the whole -----------------------------------------------------------------------------------------


def test_with_a_broker(broker: BrokerProcess, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(broker.folder / "data")
    assert main(["doctor", "--data", data, "--url", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line[:4] in ("ok  ", "note", "warn") for line in lines[:-1])
    assert f"ok    data: in use by a broker, process {broker.pid}" in lines
    assert f"ok    broker: answers at {url}" in lines
    assert "ok    broker: is ready" in lines
    assert f"ok    broker: version {penstock.__version__}, like this command" in lines
    assert "ok    durability: commit: what is confirmed is on the disk" in lines
    assert lines[-1].startswith("0 failures, ")
    assert sorted(os.listdir(data)) == sorted(name for name in os.listdir(data) if "doctor" not in name)


def test_as_json(broker: BrokerProcess, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--data", str(broker.folder / "data"), "--url", url, "--json"]) == 0
    findings = told(capsys)
    names = [finding.about for finding in findings]
    assert {"Python", "uvloop", "pyarrow", "Java", "data", "filesystem", "disk", "fsync"} < set(names)
    assert {"port 8888", "port 9100", "port 13700", "port 9180", "open files", "broker", "log"} < set(names)
    assert Level.FAIL not in {finding.level for finding in findings}


def test_it_looks_without_disturbing(start_broker: StartBroker, tmp_path: Path) -> None:
    """A broker's own work goes on while somebody looks, and its folder is as it was."""
    broker = start_broker()
    data = broker.folder / "data"
    with Api(broker.ports["http"]) as api:
        api.send("q", b"1")
        before = sorted(os.listdir(data))
        findings = list(machine.check_data(str(data)))
        assert [finding.level for finding in findings] == [Level.OK] * len(findings)
        assert sorted(os.listdir(data)) == before
        api.send("q", b"2")
    assert broker.stop() == 0
    assert machine.owner_of(data) is None
    broker.start()
    assert machine.owner_of(data) == broker.pid


def test_nobody_at_the_default_address_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PORTS, "http", 1)
    assert main(["doctor", "--data", str(tmp_path), "--json"]) == 0
    (finding,) = about(told(capsys), "broker")
    assert finding.level is Level.NOTE
    assert "`penstock serve` starts one" in finding.text


def test_nobody_where_somebody_was_named_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--data", str(tmp_path), "--json", "--url", "http://127.0.0.1:1"]) == 1
    (finding,) = about(told(capsys), "broker")
    assert finding.level is Level.FAIL
    assert main(["doctor", "--data", str(tmp_path), "--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 failure, ")


# --- packages ------------------------------------------------------------------------------------------


def test_what_is_not_installed_is_told_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "version_of", lambda package: None)
    found = {finding.about: finding for finding in machine.check_packages()}
    assert found["uvloop"].level is Level.WARN
    assert found["uvicorn"].level is Level.FAIL
    assert found["pyspark"] == Finding(
        Level.NOTE, "pyspark", "not installed; it is for Spark", "pip install 'penstock[spark]'"
    )
    for package in machine.PACKAGES:
        assert found[package.name].advice == package.install


def test_what_is_installed_has_its_version() -> None:
    found = {finding.about: finding for finding in machine.check_packages()}
    assert found["Python"].text == ".".join(map(str, sys.version_info[:3]))
    assert found["uvicorn"].text.endswith(", for the HTTP API")


@pytest.mark.parametrize(
    ("program", "needed", "level", "text"),
    [
        ("echo 'openjdk version \"21.0.2\" 2024-01-16' >&2", True, Level.OK, "21.0.2, for Spark"),
        ("echo 'java version \"1.8.0_402\"' >&2", True, Level.WARN, "1.8.0_402 is too old for Spark"),
        ("echo 'java version \"1.8.0_402\"' >&2", False, Level.NOTE, "1.8.0_402 is too old for Spark"),
        ("exit 1", True, Level.WARN, "`java -version` does not say its version; it is for Spark"),
        (None, False, Level.NOTE, "not installed; it is for Spark"),
    ],
)
def test_java(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str | None,
    needed: bool,
    level: Level,
    text: str,
) -> None:
    if program is not None:
        java = tmp_path / "java"
        java.write_text(f"#!/bin/sh\n{program}\n")
        java.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "version_of", lambda package: "4.3.0" if needed else None)
    (finding,) = [finding for finding in machine.check_packages() if finding.about == "Java"]
    assert (finding.level, finding.text) == (level, text)


# --- the data folder -----------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    first, *others = machine.check_data(str(tmp_path / "a" / "b"))
    assert first.level is Level.NOTE
    assert first.text.endswith("b is not there; `penstock serve` makes it")
    assert [finding.about for finding in others] == ["filesystem", "disk", "fsync"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (finding,) = machine.check_data(str(tmp_path / "file"))
    assert (finding.level, finding.about) == (Level.FAIL, "data")


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    """Root may write everywhere, so this is asked as somebody else where the tests run as root."""
    tmp_path.chmod(0o555)
    program = (
        "import os, sys\n"
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "from penstock.cli.machine import check_data\n"
        "for finding in check_data(sys.argv[1]): print(finding.level.value, finding.text)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", "import penstock.cli.machine\n" + program, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    tmp_path.chmod(0o755)
    assert re.fullmatch("FAIL /.+ cannot be written to by this user\n", ended.stdout), ended.stderr


def test_a_disk_in_memory(tmp_path: Path) -> None:
    folder = Path("/dev/shm")
    if machine.filesystem_of(folder) != "tmpfs":
        pytest.skip("there is no /dev/shm here")
    found = {finding.about: finding for finding in machine.check_data(str(folder / "nothing"))}
    assert found["filesystem"].level is Level.WARN
    assert "in memory" in found["filesystem"].text
    assert found["fsync"].level is Level.WARN
    assert "too fast to be true" in found["fsync"].text


MOUNTS = """\
1 0 254:0 / / rw - ext4 /dev/root rw
2 1 0:20 / /mnt rw - tmpfs tmpfs rw
3 1 0:21 / /mnt/with\\040blank rw - nfs4 host:/x rw
4 1 0:22 / /mnt rw shared:1 - xfs /dev/sdb rw
"""


def test_the_filesystem_is_that_of_the_last_and_longest_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, *args, **words: (
            MOUNTS if str(path) == "/proc/self/mountinfo" else real(path, *args, **words)
        ),
    )
    for folder, kind in (("/", "ext4"), ("/mnt/x", "xfs"), ("/mnt/with blank/x", "nfs4"), ("/mntx", "ext4")):
        assert machine.filesystem_of(Path(folder)) == kind


@pytest.mark.parametrize(
    ("free", "total", "level"),
    [
        (10 << 20, 100 << 30, Level.FAIL),
        (191 << 20, 100 << 30, Level.FAIL),  # two segments are kept for settlements
        (500 << 20, 100 << 30, Level.WARN),
        (50 << 30, 100 << 30, Level.OK),
        (100 << 20, 128 << 20, Level.WARN),  # where segments are smaller
    ],
)
def test_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, total: int, level: Level) -> None:
    class Usage:
        """What the disk has is what the test says."""

    Usage.free, Usage.total = free, total  # type: ignore[attr-defined]
    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage)
    found = {finding.about: finding for finding in machine.check_data(str(tmp_path))}
    assert found["disk"].level is level


def test_a_sync_that_fails(tmp_path: Path) -> None:
    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    finding = machine.check_sync(tmp_path, fail)
    assert (finding.level, finding.about) == (Level.FAIL, "fsync")
    assert "Input/output error" in finding.text


def test_a_filesystem_without_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    assert machine.check_sync(tmp_path).text.startswith(f"half of {machine.SYNCS} syncs within ")
    assert list(tmp_path.iterdir()) == []


# --- ports and limits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_somebody_has(host: str) -> None:
    with socket.socket() as taken:
        taken.bind((host, 0))
        taken.listen()
        finding = machine.check_port("sspq", taken.getsockname()[1])
    assert finding.level is Level.WARN
    assert f"taken by process {os.getpid()} (" in finding.text
    assert finding.advice == "penstock serve --sspq ADDR, or --sspq off"
    assert machine.check_port("sspq", int(finding.about.split()[1])).level is Level.OK


def test_a_port_that_a_broker_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BrokerProcess, "is_warm", False)  # Its command line is looked at.
    broker = BrokerProcess(tmp_path, "--http", "127.0.0.1:0").start()
    try:
        for name in ("phpmq", "http"):
            finding = machine.check_port(name, broker.ports[name])
            assert (finding.level, finding.text) == (Level.OK, f"used by a broker, process {broker.pid}")
    finally:
        broker.stop()


@pytest.mark.parametrize(
    ("command", "is_one"),
    [
        ("/usr/bin/penstock serve", True),
        ("/opt/v/bin/python3 /opt/v/bin/penstock serve", True),
        ("/srv/penstock/.venv/bin/python -m penstock serve", True),
        ("python3 -m penstock.http 5 6", True),
        ("/srv/penstock/.venv/bin/python -m pytest", False),
        ("vim penstock.toml", False),
        ("python3 -m", False),
        ("?", False),
    ],
)
def test_whose_port_is_a_brokers(command: str, is_one: bool) -> None:
    assert machine._is_broker(command.split()) is is_one


@pytest.mark.parametrize(
    ("hard", "level"), [(1024, Level.WARN), (1 << 20, Level.OK), (-1, Level.OK)], ids=["few", "many", "all"]
)
def test_open_files(monkeypatch: pytest.MonkeyPatch, hard: int, level: Level) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (hard, hard))
    assert machine.check_files().level is level


# --- the broker ----------------------------------------------------------------------------------------

ENGINE = {
    "engine": "log",
    "data": "penstock-data",
    "log_bytes": 1 << 20,
    "disk_bytes_free": 5 << 30,
    "disk_bytes_total": 10 << 30,
    "full": False,
    "failed": None,
    "damage": [],
    "durability": "commit",
    "version": penstock.__version__,
}
CLUSTER = cluster_info(
    name="eu",
    own="f1",
    members={"f2": {}},
    claims=[Claim("f1")],
    streams={},
    findings=[checks.Finding("sync", checks.Level.WARN, "who knows", "ask")],
)


@pytest.mark.parametrize(
    ("facts", "level", "what", "text"),
    [
        (
            {"version": "9"},
            Level.WARN,
            "broker",
            f"version 9, and this command has {penstock.__version__}",
        ),
        ({"durability": "none"}, Level.WARN, "durability", "none: a power cut may lose what was confirmed"),
        ({"failed": "EIO"}, Level.FAIL, "log", "has failed: EIO"),
        ({"full": True}, Level.FAIL, "log", "the disk is full: new messages wait"),
        (
            {"disk_bytes_reserve": 6 << 30},
            Level.WARN,
            "log",
            "1.0 MiB in penstock-data, 5.0 GiB free of 10.0 GiB",
        ),
        ({"damage": ["segment 1"]}, Level.FAIL, "log", "damaged: segment 1"),
        ({}, Level.OK, "log", "1.0 MiB in penstock-data, 5.0 GiB free of 10.0 GiB"),
        ({"cluster": None}, Level.OK, "log", "1.0 MiB in penstock-data, 5.0 GiB free of 10.0 GiB"),
        ({"cluster": CLUSTER}, Level.WARN, "cluster sync", "who knows"),
        ({"cluster": {**CLUSTER, "checks": []}}, Level.OK, "cluster", "front-end f1, leader of 2 front-ends"),
    ],
)
def test_the_engine(facts: dict[str, object], level: Level, what: str, text: str) -> None:
    findings = list(doctor._check_engine({**ENGINE, **facts}))
    assert (level, what, text) in [finding[:3] for finding in findings]
    bad = [finding for finding in findings if finding.level is not Level.OK]
    assert len(bad) == (level is not Level.OK)


def test_a_broker_that_is_not_as_safe(start_broker: StartBroker, capsys: pytest.CaptureFixture[str]) -> None:
    broker = start_broker("--durability", "interval")
    where = ("--data", str(broker.folder / "data"), "--url", f"http://127.0.0.1:{broker.ports['http']}")
    assert main(["doctor", "--json", *where]) == 0
    (finding,) = about(told(capsys), "durability")
    assert finding.level is Level.WARN
    assert finding.text.startswith("interval: ")


def test_readers(api: Api, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    api.send("read", b"1", b"2")
    reader = {"view": "messages", "positions": {"read": 1}, "lease_seconds": 60}
    assert api.ask("PUT", "/v1/readers/nightly", reader).status == 200
    assert main(["doctor", "--json", "--data", str(tmp_path), "--url", url]) == 0
    (finding,) = about(told(capsys), "reader nightly")
    assert (finding.level, finding.text) == (Level.OK, "holds 1 message that it has not read")
    api.ask("DELETE", "/v1/readers/nightly")


@pytest.mark.parametrize(
    ("lag", "capped", "level"),
    [(doctor.LAG_MAX, False, Level.OK), (doctor.LAG_MAX + 1, False, Level.WARN), (5, True, Level.WARN)],
)
def test_readers_that_hold_much(lag: int, capped: bool, level: Level) -> None:
    places = [{"queue": "q", "position": 0, "end": lag, "lag": lag, "capped": capped}]
    (finding,) = doctor._check_readers([{"name": "slow", "view": "events", "queues": places}])
    assert finding.level is level
    assert finding.text.startswith(f"holds {lag:,} events")


def test_a_broker_that_wants_a_token(
    start_broker: StartBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text('[[http.tokens]]\nname = "a"\nrole = "read"\ntoken = "0123456789abcdef"\n')
    broker = start_broker("--config", str(config))
    where = ["--data", str(broker.folder / "data"), "--url", f"http://127.0.0.1:{broker.ports['http']}"]
    assert main(["doctor", "--json", *where]) == 0
    *_, finding = about(told(capsys), "broker")
    assert finding.level is Level.WARN
    assert "--token" in finding.text
    assert main(["doctor", "--json", *where, "--token", "0123456789abcdef"]) == 0
    assert about(told(capsys), "durability")


# --- the NATS cluster ----------------------------------------------------------------------------------


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path / "nats", 1)
    try:
        yield cluster.start()
    finally:
        cluster.stop()


def test_a_cluster_is_looked_at_without_a_broker(
    nats: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PORTS, "http", 1)
    monitor = f"http://127.0.0.1:{nats.nodes[0].ports.monitor}"
    arguments = ["doctor", "--data", str(tmp_path / "data"), "--json", "--engine", nats.urls[0]]
    arguments += ["--cluster-monitor", monitor]
    assert main(arguments) == 1
    (replicas,) = about(told(capsys), "nats replicas")
    assert replicas.level is Level.FAIL
    arguments += ["--cluster-replicas", "1"]
    assert main(arguments) == 0
    findings = told(capsys)
    assert about(findings, "nats connection") == [Finding(Level.OK, "nats connection", f"to {nats.urls[0]}")]
    (sync,) = about(findings, "nats sync")
    assert sync == Finding(Level.OK, "nats sync", "every write is synced by penstock-1")


def test_it_takes_what_serve_takes_for_a_cluster() -> None:
    parsers = argparse.ArgumentParser(), argparse.ArgumentParser()
    for parser, module in zip(parsers, (doctor, serve), strict=True):
        module.add_arguments(parser)
    taken, served = ({flag for it in parser._actions for flag in it.option_strings} for parser in parsers)
    wanted = {flag for flag in served if flag.startswith("--cluster-")} | {"--allow-unsafe-sync", "--engine"}
    assert len(wanted) > 10
    assert wanted <= taken


def test_a_cluster_of_the_settings_file_is_looked_at(
    nats: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PORTS, "http", 1)
    config = tmp_path / "penstock.toml"
    monitor = f"http://127.0.0.1:{nats.nodes[0].ports.monitor}"
    config.write_text(f'engine = "{nats.urls[0]}"\n[cluster]\nreplicas = 1\nmonitor = "{monitor}"\n')
    assert main(["doctor", "--data", str(tmp_path / "data"), "--json", "--config", str(config)]) == 0
    assert about(told(capsys), "nats sync")
    config.write_text("engine = 1\n")
    assert main(["doctor", "--data", str(tmp_path / "data"), "--json", "--config", str(config)]) == 1
    (wrong,) = about(told(capsys), "settings")
    assert "line 1: engine = 1: use log, or nats://" in wrong.text
