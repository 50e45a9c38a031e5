"""Through the relay: clients of a follower are clients of the leader, whatever they speak."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.fronts import Follower, Leader, LoopThread
from tests.server.doors import DOORS, Door
from tests.server.harness import CONFIRM, RECEIVE, SEND, phpmq, sspq
from tests.server.test_phpmq_rules import consume as phpmq_consume
from tests.server.test_rq_rules import (
    RETRIES,
    TIMEOUT,
    broadcast,
    consume,
    consuming,
    delivered,
    notice,
    reply,
    request,
    to_consumer,
    to_consumer_noreply,
    undelivered,
)


@pytest.fixture
def leader(thread: LoopThread, tmp_path: Path) -> Iterator[Leader]:
    leader = Leader(thread, tmp_path)
    yield leader
    leader.stop()


@pytest.fixture
def follower(leader: Leader) -> Iterator[Follower]:
    follower = Follower(leader.thread).follow(leader)
    yield follower
    follower.stop()


def door(front: Leader | Follower, protocol: str) -> Door:
    # The doors of the server's tests want something with wires, and a follower has them.
    return DOORS[protocol](front, "default")  # type: ignore[arg-type]


@pytest.mark.parametrize("sender", list(DOORS))
@pytest.mark.parametrize("consumer", list(DOORS))
def test_send_here_consume_there(leader: Leader, follower: Follower, sender: str, consumer: str) -> None:
    here, there = door(follower, sender), door(leader, consumer)
    here.send(range(200))
    assert there.drain(200) == list(range(200))
    here.close()
    there.close()
    # And the other way round.
    here, there = door(leader, sender), door(follower, consumer)
    here.send(range(200))
    assert there.drain(200) == list(range(200))
    leader.thread.until(lambda: leader.engine.describe("default").held == 0, "all to be settled")
    assert leader.counts("default") == (0, 0, 0)
    here.close()
    there.close()


def test_from_one_follower_to_another(leader: Leader, follower: Follower) -> None:
    other = Follower(leader.thread, "other").follow(leader)
    sender, consumer = door(follower, "rq"), door(other, "phpmq")
    sender.send(range(5000))
    assert consumer.drain(5000, window=500) == list(range(5000))
    sender.close()
    consumer.close()
    other.stop()


# --- between front-ends --------------------------------------------------------------------------------


def test_a_request_here_is_answered_there(leader: Leader, follower: Follower) -> None:
    other = Follower(leader.thread, "other").follow(leader)
    for here, there in ((follower, other), (follower, leader), (leader, follower)):
        requester, worker = here.wire("rq"), there.wire("rq")
        worker.say(consume(b"work", 5))
        worker.expect(consuming(b"work"))
        requester.say(request(7, b"work", b"question"))
        worker.expect(to_consumer(b"work", b"question"))
        worker.say(delivered(0))
        requester.expect(delivered(7))
        worker.say(reply(0, b"answer"))
        requester.expect(reply(7, b"answer"))
        worker.leave()
        requester.close()
    other.stop()


def test_a_request_ends_when_the_worker_elsewhere_is_lost_or_its_time_is_over(
    leader: Leader, follower: Follower
) -> None:
    requester, worker = follower.wire("rq"), leader.wire("rq")
    requester.say(request(1, b"nobody", b"?", (TIMEOUT, 1)))
    requester.expect(undelivered(1))
    worker.say(consume(b"work", 5))
    worker.expect(consuming(b"work"))
    requester.say(request(2, b"work", b"?", (RETRIES, 0)))
    worker.expect(to_consumer(b"work", b"?"))
    worker.close()
    requester.expect(undelivered(2))
    requester.close()


def test_a_broadcast_reaches_consumers_everywhere(leader: Leader, follower: Follower) -> None:
    other = Follower(leader.thread, "other").follow(leader)
    nodes = [front.wire("rq") for front in (leader, follower, other, other)]
    for node in nodes:
        node.say(consume(b"news", 5))
        node.expect(consuming(b"news"))
    for front in (leader, follower):
        crier = front.wire("rq")
        crier.say(broadcast(b"news", b"hear"))
        for node in nodes:
            node.expect(broadcast(b"news", b"hear"))
        crier.close()
    for node in nodes:
        node.close()
    other.stop()


def test_priorities_count_across_front_ends(leader: Leader, follower: Follower) -> None:
    low, high = leader.wire("rq"), follower.wire("rq")
    for node, priority in ((low, 1), (high, 200)):
        node.say(consume(b"work", 2, priority))
        node.expect(consuming(b"work"))
    sender = leader.wire("rq")
    for number in range(4):
        sender.say(notice(number, b"work", b"%d" % number))
        sender.expect(delivered(number))
    for number in range(2):
        high.expect(to_consumer_noreply(b"work", b"%d" % number, number))
        low.expect(to_consumer_noreply(b"work", b"%d" % (number + 2), number))
    for node in (low, high, sender):
        node.close()


def test_a_front_end_that_dies_gives_back_by_each_protocols_rule(leader: Leader, follower: Follower) -> None:
    sender = door(leader, "rq")
    sender.send(range(3))
    doors = [door(follower, protocol) for protocol in ("phpmq", "sspq", "rq")]
    for number, consumer in enumerate(doors):
        consumer.demand(1)
        assert consumer.collect(1) == [number]
    assert leader.counts("default") == (0, 3, 0)
    follower.lose()  # and it does not come back within the grace
    heir = door(leader, "phpmq")
    # PHPMQ gives back behind the tail, the others to their places.
    heir.demand(3)
    assert sorted(heir.collect(3)) == [0, 1, 2]
    heir.ack()
    leader.thread.until(lambda: leader.counts_now("default") == (0, 0, 0), "all to be settled")
    for each in (*doors, sender, heir):
        each.close()


def test_a_link_that_is_back_in_time_costs_no_retry(leader: Leader, follower: Follower) -> None:
    wire = follower.wire("sspq")
    wire.say(sspq(SEND, b"once", 0), sspq(RECEIVE))
    wire.expect(sspq(SEND, b"once", 0))
    leader.cut_links()
    leader.thread.until(lambda: len(follower.links) >= 3 and follower.links[-1][0], "a new link")
    # One more loss would have made a dead letter of it.
    leader.thread.until(lambda: leader.counts_now("default") == (0, 1, 0), "the message to be held")
    wire.say(sspq(CONFIRM))
    leader.thread.until(lambda: leader.counts_now("default") == (0, 0, 0), "it to be settled")
    wire.close()


def test_those_are_sent_away_who_are_still_there(leader: Leader) -> None:
    """A leader that stops lets its own clients go, also where one has broken the protocol and does not read
    what is left to tell it: that one has left already."""
    broken, idle = leader.wire("phpmq"), leader.wire("phpmq")
    idle.say(phpmq_consume(b"nothing", 1))
    leader.thread.until(lambda: len(leader.connections) == 2, "both to be there")
    (first,) = (one for one in leader.connections if one.peer.endswith(f":{broken.socket.getsockname()[1]}"))
    message = phpmq(1, (1, b"much"), (2, bytes(1 << 20)))
    broken.say(message * 12, phpmq_consume(b"much", 12))
    leader.thread.until(lambda: first.bytes_room() < leader.connection_buffer_bytes, "it to be behind")
    broken.say(b"X0100102")
    leader.thread.until(lambda: not first._attached, "it to have left")
    assert first in leader.connections
    leader.thread.call(leader.broker.send_away, [first, *leader.connections - {first}])
    assert idle.hear(1) == b"", "nothing is pending for it"
    idle.close()
    broken.close()
