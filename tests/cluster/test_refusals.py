"""A front-end that must not start says why in one line, and ends with the exit code of wrong settings."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.log.jetstream.cluster import Cluster
from tests.server.harness import ROOT, BrokerProcess

WAIT_SECONDS = 60.0


@pytest.fixture
def unsafe(tmp_path: Path) -> Iterator[Cluster]:
    """A node as NATS has it by default: it syncs every two minutes."""
    cluster = Cluster(tmp_path / "nats", 1)
    cluster._choose_ports()
    config = cluster.nodes[0].folder / "server.conf"
    config.write_text(config.read_text().replace("sync_interval: always", ""))
    try:
        yield cluster.start()
    finally:
        cluster.stop()


def flags_for(cluster: Cluster) -> list[str]:
    monitor = f"http://127.0.0.1:{cluster.nodes[0].ports.monitor}"
    return ["--engine", cluster.urls[0], "--cluster-replicas", "1", "--cluster-monitor", monitor]


def refused(folder: Path, *flags: str, **variables: str) -> list[str]:
    """What a front-end says that does not start."""
    command = BrokerProcess(folder, *flags).command()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr.splitlines()


def test_nodes_that_do_not_sync_every_write_are_refused(unsafe: Cluster, tmp_path: Path) -> None:
    last = refused(tmp_path, *flags_for(unsafe))[-1]
    assert last.startswith("penstock serve: the NATS cluster cannot be used as it is: sync: not every")
    assert last.endswith("or allow it with --allow-unsafe-sync")
    assert not (tmp_path / "data").exists()


def test_they_are_taken_where_that_is_allowed_and_it_is_told(unsafe: Cluster, tmp_path: Path) -> None:
    front_end = BrokerProcess(tmp_path, *flags_for(unsafe), "--allow-unsafe-sync").start()
    try:
        log = front_end.log()
        assert "warning  allow-unsafe-sync: nodes may not sync every write" in log
        assert "warning  sync: not every write is synced by penstock-1" in log
    finally:
        assert front_end.stop() == 0


def test_nodes_that_let_strangers_in_are_refused_by_who_is_strict(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "nats", 1).start()
    try:
        last = refused(tmp_path, *flags_for(cluster), "--strict")[-1]
        assert last.startswith("penstock serve: the NATS cluster cannot be used as it is: authentication: ")
        assert "docs/cluster.md#rights-in-nats" in last
        assert not (tmp_path / "data").exists()
        front_end = BrokerProcess(tmp_path, *flags_for(cluster)).start()
        try:
            assert f"warning  authentication: {cluster.urls[0]} let in whoever can connect" in front_end.log()
        finally:
            assert front_end.stop() == 0
    finally:
        cluster.stop()


def test_servers_that_are_not_there_are_named(tmp_path: Path) -> None:
    last = refused(tmp_path, "--engine", "nats://127.0.0.1:1")[-1]
    assert last.startswith("penstock serve: engine: NATS server nats://127.0.0.1:1: cannot be reached")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    last = refused(tmp_path, "--engine", "nats://127.0.0.1:1", "--cluster-credentials", "/no/such")[-1]
    assert last.startswith("penstock serve: [cluster] credentials: credentials '/no/such' cannot be read")


def test_help_needs_nothing_of_nats() -> None:
    program = "import sys\nfrom penstock.cli.main import main\nmain(['serve', '--help'])\n" + (
        "print([name for name in sys.modules if 'jetstream' in name or 'penstock.cluster' in name])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_without_the_client_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "nats.py").write_text("raise ImportError")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    text = "engine: NATS needs the package nats-py; install it with: pip install 'penstock[nats]'"
    assert refused(tmp_path / "data", "--engine", "nats://127.0.0.1:1,127.0.0.1:2", PYTHONPATH=path) == [
        f"penstock serve: {text}"
    ]
