"""Faults of nodes and front-ends under load: nothing confirmed is lost, nothing is stored twice.

One site with one log lives through all of them, and one with several. What is checked after each is said in
`verdict.py`; for how long senders went without a receipt is printed, and so is the seed that chooses a victim
(PENSTOCK_TEST_SEED repeats it).
"""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.client import PhpmqClient, RqClient
from penstock.log.jetstream.cluster import Cluster, Node
from tests.cluster.loads import Loads
from tests.cluster.processes import STREAM, Site, site
from tests.cluster.verdict import Record, Transaction, judge, judge_transactions
from tests.server.harness import WAIT_SECONDS

SHARDS = 4
FLAGS = ("--log-segment-bytes", "262144", "--log-snapshot-blocks", "100")
"""Small segments, so that files come and go while faults happen."""

NODE_PAUSE_SECONDS = 10.0
FRONT_PAUSE_SECONDS = 8.0


@pytest.fixture(scope="module", params=[1, pytest.param(SHARDS, marks=pytest.mark.long)])
def running(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Site]:
    # Three front-ends, so that the clients of one have to find the new leader when another has taken over.
    with site(tmp_path_factory.mktemp("faults"), fronts=3, shards=request.param, flags=FLAGS) as running:
        yield running


@pytest.fixture
def fronts(running: Site) -> Iterator[Site]:
    """The site, with everything that an earlier test has ended started again."""
    for node in running.nodes.nodes:
        if not node.running:
            node.start()
    running.nodes.wait_ready()
    running.start_fronts()
    if running.shards > 1:
        running.balanced()
    yield running
    sys.stdout.write(running.logs())  # which pytest shows where the test has failed


@pytest.fixture
def chance(capsys: pytest.CaptureFixture[str]) -> random.Random:
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", random.randrange(2**32)))
    with capsys.disabled():
        sys.stdout.write(f"\nPENSTOCK_TEST_SEED={seed}")
    return random.Random(seed)


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    def say(text: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{text}")

    return say


Say = Callable[[str], None]


def kill_and_start(fronts: Site, node: Node) -> None:
    node.kill()
    node.start()
    fronts.nodes.wait_ready()


@pytest.mark.long
def test_kill_9_of_the_node_that_leads_the_stream_twice(fronts: Site, say: Say) -> None:
    with Loads(fronts) as load:
        for _ in range(2):
            load.flows()
            began = time.monotonic()
            kill_and_start(fronts, fronts.stream_leader())
            load.flows()
            load.lead_changed(began)  # it may have: a front-end that cannot reach its node loses the lease
            say(f"kill -9 of the stream's leader: no receipt for {load.pauses(began)}")
        say(load.check())


@pytest.mark.long
def test_kill_9_of_a_follower(fronts: Site, say: Say) -> None:
    with Loads(fronts) as load:
        load.flows()
        victim = fronts.follower()
        began = time.monotonic()
        victim.kill()
        load.flows()
        victim.start()
        load.flows()
        say(f"kill -9 of follower {victim.name}: no receipt for {load.pauses(began)}")
        say(load.check())


def test_kill_9_of_the_leader(fronts: Site, say: Say) -> None:
    with Loads(fronts) as load:
        load.flows()
        victim = fronts.leader()
        began = time.monotonic()
        victim.kill()
        killed = time.monotonic()
        load.flows()
        load.lead_changed(began, killed)
        assert fronts.leader() is not victim
        victim.start()
        load.flows()
        say(f"kill -9 of leader {victim.name}: no receipt for {load.pauses(began)}")
        say(load.check())
        assert fronts.shards > 1 or fronts.leader() is not victim


@pytest.mark.long
def test_a_rolling_restart(fronts: Site, say: Say) -> None:
    """One by one, as for a new version."""
    with Loads(fronts) as load:
        load.flows()
        for front in fronts.fronts:
            began = time.monotonic()
            front.signal(signal.SIGTERM)
            assert front.wait() == 0
            load.flows(fronts.running)
            say(f"SIGTERM of {front.name}: no receipt at others for {load.pauses(began, front)}")
            front.start()
            fronts.balanced()
            load.flows()
            load.lead_changed(began)
            say(f"and back: no receipt at others for {load.pauses(began, front)}")
        for node in fronts.nodes.nodes:
            began = time.monotonic()
            node.stop()
            node.start()
            fronts.nodes.wait_ready()
            fronts.nodes_current()
            load.flows()
            load.lead_changed(began)
            say(f"restart of {node.name}: no receipt for {load.pauses(began)}")
        say(load.check())


@pytest.mark.long
def test_a_node_that_stands_still(fronts: Site, chance: random.Random, say: Say) -> None:
    victim = chance.choice(fronts.nodes.nodes)
    with Loads(fronts) as load:
        load.flows()
        led = fronts.stream_leader() is victim
        began = time.monotonic()
        victim.pause()
        try:
            load.wait(NODE_PAUSE_SECONDS)
        finally:
            victim.resume()
        load.flows()
        load.lead_changed(began)
        what = "that led the stream" if led else "that did not lead the stream"
        say(f"{NODE_PAUSE_SECONDS:g} s without a node {what}: no receipt for {load.pauses(began)}")
        say(load.check())


@pytest.mark.long
def test_a_leader_that_stands_still_is_a_follower_afterwards(fronts: Site, say: Say) -> None:
    with Loads(fronts) as load:
        load.flows()
        victim, other = fronts.leader(), fronts.follower()
        mark = victim.mark()
        began = time.monotonic()
        victim.pause()
        paused = time.monotonic()
        try:
            load.wait(FRONT_PAUSE_SECONDS)
            load.flows([other])  # somebody else has taken over
        finally:
            victim.resume()
        load.flows()
        load.lead_changed(began, paused)
        say(f"{FRONT_PAUSE_SECONDS:g} s without leader {victim.name}: no receipt for {load.pauses(began)}")
        say(load.check())
        lets_go = "leads no more: its clients go on at the next leader"
        victim.says(lets_go, mark)
        if fronts.shards == 1:
            assert victim.log()[mark:].count(lets_go) == 1  # once, and its link then stays
            assert "no link to the leader" not in victim.log()[mark:]
        assert fronts.leader(victim) is fronts.leader(other) is not victim


@pytest.mark.long
def test_everything_at_once(fronts: Site, say: Say) -> None:
    with Loads(fronts) as load:
        load.flows()
        began = time.monotonic()
        for front in fronts.fronts:
            front.kill()
        for node in fronts.nodes.nodes:
            node.kill()
        for node in fronts.nodes.nodes:
            node.start()
        fronts.nodes.wait_ready()
        fronts.start_fronts()
        load.flows()
        load.lead_changed(began)
        say(f"kill -9 of everything: no receipt for {load.pauses(began)}")
        say(load.check())


@pytest.mark.long
def test_nodes_that_lose_their_disks_one_after_the_other(fronts: Site, say: Say) -> None:
    """What the first had is at the end only with those who have got it since."""
    with Loads(fronts) as load:
        load.flows()
        for node in fronts.nodes.nodes:
            began = time.monotonic()
            node.kill()
            shutil.rmtree(node.folder / "store")
            node.start()
            fronts.nodes.wait_ready()
            fronts.nodes_current()
            load.flows()
            load.lead_changed(began)
            say(f"{node.name} without its disk: no receipt for {load.pauses(began)}")
        say(load.check())


@pytest.mark.long
def test_all_nodes_at_once(fronts: Site, say: Say) -> None:
    with Loads(fronts) as load:
        load.flows()
        began = time.monotonic()
        for node in fronts.nodes.nodes:
            node.kill()
        for node in fronts.nodes.nodes:
            node.start()
        fronts.nodes.wait_ready()
        load.flows()
        load.lead_changed(began)
        say(f"kill -9 of all nodes: no receipt for {load.pauses(began)}")
        say(load.check())


# --- whether the judge sees anything -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (lambda record, log: log.append(1), "stored twice"),
        (lambda record, log: log.remove(1), "confirmed, and not in the log"),
        (lambda record, log: record.accepted.add(3), "accepted, and not in the log"),
        (lambda record, log: log.sort(reverse=True), "behind what was sent later"),
        (lambda record, log: record.deliveries.pop(1), "in the log, and not delivered"),
        (lambda record, log: record.deliveries[3].append(7), "delivered, and not in the log"),
        (lambda record, log: record.deliveries[9].append(7), "delivered, and never sent"),
        (lambda record, log: record.deliveries[1].append(7), "delivered again"),
        (lambda record, log: record.deliveries[1].append(8), "delivered again"),
    ],
)
def test_the_judge_is_not_blind(harm: Callable[[Record, list[int]], object], complaint: str) -> None:
    record, log = Record(), [0, 1, 2]
    for number in log:
        record.sent[number], record.confirmed[number] = 10.0 + number, 20.0 + number
        record.deliveries[number].append(7)
    record.sent[3] = 13.0  # in doubt
    record.said["a"] += [0, 3, 1, 2]
    record.deliveries[0].append(6)
    record.connections_lost.add(6)
    record.changes.append((30.0, 31.0))
    assert judge(record, log).split()[:2] == ["3", "confirmed,"]
    harm(record, log)
    with pytest.raises(AssertionError, match=complaint):
        judge(record, log)


def test_what_was_on_its_way_when_the_lead_changed_may_come_again() -> None:
    record = Record(sent={1: 10.0}, confirmed={1: 20.0}, changes=[(15.0, 15.0)])
    record.deliveries[1] += [7, 7]
    assert "1 without that" in judge(record, [1])


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (lambda logs: logs["b"].remove(2), "'torn': .'committed'"),
        (lambda logs: logs["b"].clear(), "'torn': .'committed'"),
        (lambda logs: (logs["a"].clear(), logs["b"].clear()), "committed, and in no log"),
        (lambda logs: logs["b"].append(1), "stored twice"),
        (lambda logs: logs["a"].insert(2, 8), "not where its commit has said, in one piece"),
        (lambda logs: logs["a"].insert(0, 8), "not where its commit has said, in one piece"),
        (lambda logs: logs["a"].reverse(), "not where its commit has said, in one piece"),
        (lambda logs: logs["a"].append(3), "'not committed, and in a log': .'aborted'"),
    ],
)
def test_the_judge_of_transactions_is_not_blind(
    harm: Callable[[dict[str, list[int]]], object], complaint: str
) -> None:
    transactions = {
        "committed": Transaction({"a": [1, 2], "b": [1, 2]}, {"a": (1, 3), "b": (0, 2)}),
        "aborted": Transaction({"a": [3], "b": [3]}),
    }
    logs = {"a": [0, 1, 2, 4], "b": [1, 2]}
    assert "1 transactions over 2 queues are whole, 1 that" in judge_transactions(transactions, logs)
    harm(logs)
    with pytest.raises(AssertionError, match=complaint):
        judge_transactions(transactions, logs)


# --- a flipped bit -----------------------------------------------------------------------------------

NEEDLE = b"the one that is hit"


def flip(cluster: Cluster) -> int:
    """Change a bit of the needle in every copy of the stream; in how many files."""
    flipped = 0
    for node in cluster.nodes:
        for path in (node.folder / "store").rglob("*.blk"):
            content = bytearray(path.read_bytes())
            at = content.find(NEEDLE)
            if STREAM in path.parts and at >= 0:
                content[at] ^= 1
                path.write_bytes(content)
                flipped += 1
    return flipped


@pytest.mark.long
def test_a_flipped_bit_is_reported_and_never_delivered(tmp_path: Path) -> None:
    bodies = [b"before", NEEDLE, b"behind"]
    with site(tmp_path) as fronts:
        a, b = fronts.fronts
        with RqClient(a.url("rq")) as sender:
            for body in bodies:  # each with its receipt, so that each is a record of its own
                sender.send("q", body)
        assert fronts.stop_fronts() == [0, 0]
        fronts.nodes.stop()
        assert flip(fronts.nodes) == 3
        for front in fronts.fronts:  # their copies are whole
            shutil.rmtree(front.folder / "data")
        fronts.nodes.start()
        fronts.start_fronts()
        mark = a.mark()
        damage = b.ask("/v1/engine")["damage"]
        assert any(f"stream {STREAM}" in text and "missing" in text for text in damage), damage
        assert damage[0] in a.log()
        with PhpmqClient(b.url("phpmq")) as consumer:
            got = list(consumer.consume("q", 10, count=2, timeout=WAIT_SECONDS))
            consumer.ack_many(got)
            assert [message.body for message in got] == [b"before", b"behind"]
            # What cannot be read is told when it would have been handed out, and nothing takes its place.
            a.says("cannot be read, so they are not delivered", mark)
            assert list(consumer.consume("q", 10, timeout=0.5)) == []
        findings = b.penstock("doctor", "--data", str(b.folder / "data"), "--url", b.url("http"), status=1)
        assert "FAIL  log: damaged: queue 'q': offsets 1 to 1 cannot be read" in findings
