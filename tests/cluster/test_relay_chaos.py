"""Links are cut and leaders die while clients send and consume: every message is consumed, and only once.

Front-ends do not die here, so that the promise is more than "at least once": whoever has a message keeps it,
and what it settles is settled, under whichever leader.
"""

import random
import threading
import time
from pathlib import Path

import pytest

from tests.cluster.fronts import Follower, LoopThread
from tests.cluster.test_resume import CHANGES, QUEUE, Cluster, Sender
from tests.server.doors import Door
from tests.server.harness import number_of

MESSAGES = 1500  # of each sender
SENDERS, CONSUMERS, CHANGE_COUNT = 3, 4, 6


class Consumer(threading.Thread):
    """Takes and settles until it is told to stop, some messages at a time."""

    def __init__(self, door: Door, window: int) -> None:
        super().__init__(daemon=True)
        self.door = door
        self._window = window
        self.ended = ""

    def run(self) -> None:
        try:
            self.door.demand(self._window)
            while True:
                self.door.collect(1)
                self.door.ack()
        except (AssertionError, OSError) as error:
            self.ended = str(error)


def settled(cluster: Cluster) -> bool:
    return cluster.leader.counts_now(QUEUE) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_every_message_is_consumed_once(thread: LoopThread, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    cluster = Cluster(thread, tmp_path)
    followers: list[Follower] = [cluster.follower(name) for name in ("first", "second")]
    senders = [
        Sender(
            cluster.door(chance.choice(followers), "rq"), 100_000 * number, MESSAGES, chance.randint(1, 40)
        )
        for number in range(SENDERS)
    ]
    consumers = [
        Consumer(cluster.door(followers[number % 2], chance.choice(["phpmq", "rq"])), chance.randint(1, 50))
        for number in range(CONSUMERS)
    ]
    for worker in (*consumers, *senders):
        worker.start()
    for _ in range(CHANGE_COUNT):
        time.sleep(chance.random() / 10)  # not to wait for anything: changes come at any time
        CHANGES[chance.choice(list(CHANGES))](cluster)
    for sender in senders:
        sender.join(60)
        assert not sender.is_alive()
        assert sender.failed is None, sender.failed
    thread.until(lambda: settled(cluster), "everything to be settled", 60)
    sent = sorted(number for sender in senders for number in sender.numbers)
    assert sorted(number_of(payload) for payload in cluster.leader.stored(QUEUE)) == sent
    assert [consumer.ended for consumer in consumers] == [""] * CONSUMERS
    assert sorted(number for consumer in consumers for number in consumer.door.got) == sent
    cluster.close()
    for consumer in consumers:
        consumer.join(20)
        assert not consumer.is_alive()
