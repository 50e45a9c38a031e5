"""Front-ends that start before all nodes of their NATS cluster are there."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.processes import FrontEnd
from tests.nats.cluster import forming
from tests.server.harness import until


@pytest.mark.long
def test_a_front_end_waits_for_the_nodes_that_are_still_missing(tmp_path: Path) -> None:
    with forming(tmp_path / "nats") as nodes, ThreadPoolExecutor(1) as starter:
        front = FrontEnd("a", tmp_path / "a", nodes, nodes.urls)
        starting = starter.submit(front.start)
        try:
            waits = "waiting: the NATS cluster has 2 nodes so far, and 3 copies of the log are wanted"
            until(
                lambda: starting.done() or (front.running and waits in front.log()),
                "the front-end to wait for nodes",
            )
            nodes.nodes[2].start()
            starting.result()
            cluster = front.ask("/v1/engine")["cluster"]
            assert cluster["leader"].startswith("a-"), cluster
            assert front.stop() == 0
        finally:
            if front.running:
                front.kill()
