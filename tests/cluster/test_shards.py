"""A cluster with several logs, on real nodes: words find their shard, and leadership moves without a loss."""

import argparse
import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count, islice
from pathlib import Path

import pytest

from penstock.client import ClientError, connect
from penstock.cluster.checks import check_servers
from penstock.log.jetstream.names import LogNames
from penstock.model.batch import Batch
from penstock.model.shards import shard_of
from penstock.server.settings_read import add_arguments, load
from tests.cluster.load import LOOK_SECONDS, Load, read_log
from tests.cluster.processes import FrontEnd, Site, site
from tests.server.doors import PhpmqDoor
from tests.server.harness import WAIT_SECONDS, number_of, numbered, until

SHARDS = 4


def queues_of_all(name: str) -> list[str]:
    """A queue for each shard."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < SHARDS:
        queue = f"{name}.{number}"
        found.setdefault(shard_of(queue, SHARDS), queue)
        number += 1
    return [found[shard] for shard in range(SHARDS)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("shards"), nodes=1, fronts=2, shards=SHARDS) as running:
        running.balanced()
        yield running


@pytest.mark.parametrize("protocol", ["phpmq", "rq", "sspq", "http"])
def test_what_is_sent_at_one_front_end_is_received_at_the_other(pair: Site, protocol: str) -> None:
    here, there = pair.fronts
    queues = queues_of_all(protocol) if protocol != "sspq" else ["default"]
    with connect(here.url(protocol)) as sender, connect(there.url("phpmq")) as receiver:
        for queue in queues:
            if protocol == "sspq":
                sender.send(queue.encode())
            else:
                sender.send(queue, queue.encode())
        for queue in queues:
            (message,) = receiver.consume(queue, count=1)
            assert message.body == queue.encode()
            message.ack()


def test_lists_have_the_queues_of_all_front_ends(pair: Site) -> None:
    queues = queues_of_all("listed")
    with connect(pair.fronts[0].url("phpmq")) as sender:
        for queue in queues:
            sender.send(queue, b"x")
    for front in pair.fronts:
        assert [row["name"] for row in front.ask("/v1/queues?match=listed.*")["queues"]] == sorted(queues)
        page = front.ask("/v1/queues?match=listed.*&limit=3")
        assert [row["name"] for row in page["queues"]] == sorted(queues)[:3]
        assert page["next"] == sorted(queues)[2]
        for queue in queues:
            assert front.ask(f"/v1/queues/{queue}")["ready"] == 1


def test_each_leader_has_a_copy_of_what_it_leads(pair: Site) -> None:
    for front in pair.fronts:
        for shard in front.ask("/v1/engine")["cluster"]["shards"]:
            assert shard["leader"] in shard["copies"], front.name


def test_the_checks_go_by_the_shards_that_there_are(pair: Site) -> None:
    """Also where the settings do not say how many: the rights and streams of one log would be others."""
    monitor = pair.nodes.nodes[0].ports.monitor
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = ["--engine", ",".join(pair.nodes.urls), "--cluster-monitor", f"http://127.0.0.1:{monitor}"]
    settings = load(parser.parse_args([*flags, "--cluster-replicas", "1"]), {})
    found = {it.name for it in asyncio.run(check_servers(settings))}
    assert {f"stream {names.stream}" for names in LogNames().of_shards(SHARDS)} < found
    assert f"stream {LogNames().stream}" not in found


def test_who_comes_takes_its_share_and_nobody_loses_anything(tmp_path: Path) -> None:
    queues = queues_of_all("moved")
    with site(tmp_path, nodes=1, fronts=2, shards=SHARDS) as running, ExitStack() as stack:
        running.balanced()
        # It lasts for half a minute: as much load as `test_faults.py` has would take two cores all that time.
        loads = [stack.enter_context(Load(running, queue, pace_seconds=0.05)) for queue in queues[:2]]
        for load in loads:
            load.flows()
        running._count = 3
        running.start_fronts()
        running.balanced()
        for load in loads:
            load.flows(running.fronts[:2])
        for load in loads:
            load.check()
            assert not load.connections_lost


@pytest.mark.long
@pytest.mark.parametrize("fault", ["SIGTERM", "SIGKILL", "SIGSTOP", "node"])
def test_a_fault_costs_nothing_that_was_confirmed(tmp_path: Path, fault: str) -> None:
    queues = queues_of_all("left")
    with site(tmp_path, nodes=1, fronts=3, shards=SHARDS) as running, ExitStack() as stack:
        running.balanced()
        victim, *others = running.fronts
        loads = [stack.enter_context(Load(running, queue)) for queue in queues[:2]]
        for load in loads:
            load.flows()
        began = time.monotonic()
        if fault == "node":
            (node,) = running.nodes.nodes
            node.kill()
            node.start()
            running.nodes.wait_ready()
            running.balanced()
        elif fault == "SIGSTOP":
            victim.pause()
            until(lambda: all("a" not in running.leaders(it) for it in others), "others to lead", 60)
            victim.resume()
        else:
            victim.signal(signal.Signals[fault])
            victim.wait()
            running.balanced()
            running.start_fronts()
        for load in loads:
            load.flows()
            load.lead_changed(began)
        for load in loads:
            load.check()


# --- what workers make of one shard's messages goes to another ---------------------------------------------


class Workers:
    """One at each front-end: it takes messages, sends what it made of them, without receipts, and settles."""

    def __init__(self, running: Site, inputs: str, outputs: str) -> None:
        self._inputs, self._outputs = inputs, outputs
        self._ends = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=[front], name=front.name) for front in running.fronts
        ]

    def __enter__(self) -> "Workers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive(), f"the worker at {thread.name} does not end"

    def _work(self, front: FrontEnd) -> None:
        while not self._ends.is_set():
            try:
                with contextlib.closing(PhpmqDoor(front, self._inputs)) as door:
                    door.wire.socket.settimeout(LOOK_SECONDS)
                    door.demand(200)
                    while not self._ends.is_set():
                        with contextlib.suppress(TimeoutError):
                            results = Batch.of(numbered(door.collect(1)))
                            door.wire.say(door._session.send(self._outputs, results))
                            door.ack()
            except OSError:
                self._ends.wait(LOOK_SECONDS)


@pytest.mark.long
@pytest.mark.parametrize("whose", ["inputs", "outputs"])
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_nothing_is_settled_whose_result_is_lost(tmp_path: Path, whose: str, fault: str) -> None:
    """Also where whoever leads one of both queues dies, or stands still, in between."""
    inputs, outputs = queues_of_all("work")[:2]
    with site(tmp_path, nodes=1, fronts=3, shards=SHARDS) as running:
        running.balanced()
        victim = running.leader(shard=0 if whose == "inputs" else 1)
        other = next(front for front in running.fronts if front is not victim)
        sent = count()
        confirmed: list[int] = []

        def send(some: int) -> None:
            for _ in range(some):
                numbers = list(islice(sent, 50))
                with contextlib.suppress(ClientError):
                    sender.send_many(inputs, numbered(numbers))
                    confirmed.extend(numbers)

        def done() -> bool:
            info = other.ask(f"/v1/queues/{inputs}", 60)
            return bool(info["ready"] == info["held"] == 0)

        def begun() -> bool:
            return bool(other.ask(f"/v1/queues/{inputs}", 60)["ready"] < 0.8 * len(confirmed))

        with connect(other.url("rq"), operation_seconds=20.0) as sender:
            send(400)
            with Workers(running, inputs, outputs):
                until(begun, "some of it to be worked on")
                victim.signal(signal.Signals[fault])
                send(40)
                if fault == "SIGSTOP":
                    victim.resume()
                else:
                    victim.wait()
                    running.start_fronts()
                send(20)
                until(done, "all of it to be worked on", 60)
        assert len(confirmed) > 20_000
        results = {number_of(body) for body in read_log(other, outputs)}
        assert set(confirmed) <= results, sorted(set(confirmed) - results)[:20]
