"""Real servers for the tests of NATS; none outlives its test, also when the test fails."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.log.jetstream.cluster import Cluster
from tests.nats.streams import link_at, new_log

Start = Callable[..., Cluster]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts clusters: `start(nodes, settings="…")`."""
    clusters: list[Cluster] = []

    def begin(nodes: int, settings: str = "") -> Cluster:
        cluster = Cluster(tmp_path / f"nats-{len(clusters)}", nodes, settings=settings)
        clusters.append(cluster)
        return cluster.start()

    yield begin
    for cluster in clusters:
        cluster.stop()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One server for all tests of a module that do it no harm."""
    cluster = Cluster(tmp_path_factory.mktemp("nats"), 1)
    try:
        cluster.start()
        with link_at(cluster.nodes[0].url) as nats:
            # With its last stream a server takes the folder of all of them away, also while the next is made.
            new_log(nats)
        yield cluster
    finally:
        cluster.stop()
