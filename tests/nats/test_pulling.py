"""Pulling from a consumer: credit, heartbeats that stop when a leader dies, and going on after that."""

import asyncio

import pytest

from penstock.engines.jetstream.api import JetStream
from penstock.engines.jetstream.cluster import Cluster
from penstock.engines.jetstream.link import Link
from penstock.engines.jetstream.publisher import Publisher, Run
from penstock.engines.jetstream.puller import Puller
from penstock.protocols.errors import MisuseError
from penstock.protocols.nats import Messages
from penstock.protocols.nats_jetstream import read_deliveries
from penstock.protocols.nats_write import Settling, encode_settlings, encode_settlings_confirmed
from tests.nats.cluster import Hearing, api, leader_of, linked, stream_settings, until
from tests.nats.conftest import Start

CONSUMER_STEPS_DOWN = "CONSUMER.LEADER.STEPDOWN.moved.workers"
STREAM_STEPS_DOWN = "STREAM.LEADER.STEPDOWN.moved"


class Worker:
    """Takes messages, and acknowledges them at once if it is told to."""

    def __init__(
        self,
        link: Link,
        stream: str,
        *,
        acks: bool = True,
        heartbeat_seconds: float = 0.5,
        expires_seconds: float = 2.0,
    ) -> None:
        self.seqs: list[int] = []
        self.tries: list[int] = []
        self.payloads: list[bytes] = []
        self.replies: list[bytes] = []
        self.endings: list[str] = []
        self.puller = Puller(
            link,
            stream,
            "workers",
            messages=self._take,
            ended=self.endings.append,
            expires_seconds=expires_seconds,
            heartbeat_seconds=heartbeat_seconds,
        )
        self._link = link
        self._acks = acks

    def _take(self, batch: Messages) -> None:
        where = read_deliveries(batch.replies)
        self.seqs += where.seqs
        self.tries += where.tries
        self.payloads += batch.payloads
        self.replies += batch.replies
        if self._acks:
            self._link.write(encode_settlings(batch.replies, Settling.DONE))


async def make(js: JetStream, name: str, replicas: int, **settings: object) -> None:
    await js.create_stream(stream_settings(name, replicas))
    consumer = {
        "name": "workers",
        "durable_name": "workers",
        "ack_policy": "explicit",
        "max_ack_pending": 50_000,
    }
    await js.create_consumer(name, {**consumer, **settings})


async def fill(link: Link, name: str, count: int, id_head: bytes = b"fill-") -> None:
    ended: list[Run] = []
    publisher = Publisher(link, f"q.{name}", id_head=id_head, answer_seconds=1.0)
    publisher.publish(b"x" * count, range(count + 1), done=ended.append)
    await until("all are stored", lambda: bool(ended), 60)
    publisher.close()


def test_no_more_comes_than_is_wanted(node: Cluster) -> None:
    async def run() -> None:
        async with linked(node.nodes[0].url) as link:
            js = api(link)
            await make(js, "credit", 1)
            await fill(link, "credit", 1000)
            worker = Worker(link, "credit")
            worker.puller.want(300)
            await until("they came", lambda: len(worker.seqs) == 300)
            assert worker.puller.wanted == 0
            # A question that goes the same way, and by its answer shows that nothing else was on its way.
            info = await js.consumer("credit", "workers")
            assert info["delivered"]["stream_seq"] == 300
            worker.puller.want(2000)
            await until("the rest came", lambda: len(worker.seqs) == 1000)
            assert worker.seqs == list(range(1, 1001))
            assert set(worker.tries) == {1}
            assert worker.puller.wanted == 1300
            # Acknowledgements without a confirmation: it may take a moment.
            async with asyncio.timeout(20):
                while (info := await js.consumer("credit", "workers"))["num_ack_pending"]:
                    await asyncio.sleep(0.01)
            assert info["ack_floor"]["stream_seq"] == 1000

    asyncio.run(run())


def test_a_pull_that_expired_is_followed_by_another(node: Cluster) -> None:
    async def run() -> None:
        async with linked(node.nodes[0].url) as link:
            js = api(link)
            await make(js, "patient", 1)
            worker = Worker(link, "patient")
            worker.puller.want(10)
            started = asyncio.get_running_loop().time()
            await until("two pulls have expired", lambda: worker.puller._pulls >= 3)
            assert asyncio.get_running_loop().time() - started > 3.5
            await fill(link, "patient", 5)
            await until("they came", lambda: len(worker.seqs) == 5)
            assert worker.puller.losses == 0
            worker.puller.close()

    asyncio.run(run())


def test_a_pull_that_no_consumer_takes_is_told(node: Cluster) -> None:
    async def run() -> None:
        async with linked(node.nodes[0].url) as link:
            await make(api(link), "narrow", 1, max_batch=5)
            worker = Worker(link, "narrow")
            worker.puller.want(10)
            await until("it is told", lambda: bool(worker.endings))
            assert worker.endings == ["Exceeded MaxRequestBatch of 5"]
            with pytest.raises(MisuseError, match=r"no pull of 2 s has heartbeats every 1\.5 s"):
                Worker(link, "narrow", heartbeat_seconds=1.5)

    asyncio.run(run())


def test_a_consumer_that_is_gone_ends_it(node: Cluster) -> None:
    async def run() -> None:
        async with linked(node.nodes[0].url) as link:
            js = api(link)
            await make(js, "short", 1)
            worker = Worker(link, "short")
            worker.puller.want(10)
            await js.consumer("short", "workers")
            await js.delete_consumer("short", "workers")
            await until("it is told", lambda: worker.endings == ["Consumer Deleted"])

    asyncio.run(run())


def test_what_is_returned_comes_first_and_counts_its_tries(node: Cluster) -> None:
    async def run() -> None:
        async with linked(node.nodes[0].url) as link:
            js = api(link)
            await make(js, "returned", 1)
            await fill(link, "returned", 20)
            worker = Worker(link, "returned", acks=False)
            worker.puller.want(5)
            await until("five came", lambda: len(worker.seqs) == 5)
            # The next pull may overtake what is settled without a confirmation.
            confirmed, inbox = Hearing(), link.new_inbox()
            link.subscribe(inbox + b"*", confirmed)
            for settling, lo, hi in ((Settling.AGAIN, 1, 4), (Settling.NEVER, 0, 1)):
                replies = worker.replies[lo:hi]
                link.write(encode_settlings_confirmed(replies, settling, reply_head=inbox, number_first=lo))
            await until("all are confirmed", lambda: confirmed.payloads == [b""] * 4)
            worker.puller.want(6)
            await until("they came again", lambda: len(worker.seqs) == 11)
            assert sorted(worker.seqs[5:8]) == [2, 3, 4]
            assert worker.tries[5:8] == [2, 2, 2]
            assert worker.seqs[8:] == [6, 7, 8]

    asyncio.run(run())


def test_a_leader_that_steps_down_says_so_and_nothing_waits_for_it(start: Start) -> None:
    cluster = start(3)

    async def run() -> None:
        async with linked(*cluster.urls) as link:
            js = api(link)
            await make(js, "moved", 3)
            worker = Worker(link, "moved", heartbeat_seconds=10.0, expires_seconds=20.0)
            worker.puller.want(1000)
            for count, who in ((100, CONSUMER_STEPS_DOWN), (200, STREAM_STEPS_DOWN)):
                await js.consumer("moved", "workers")
                await js.call(who)
                await fill(link, "moved", 100, f"{count}-".encode())
                await until("they came", lambda: len(set(worker.seqs)) == count)  # noqa: B023
            assert worker.puller.losses == 0
            assert worker.puller.wanted == 1000 - len(worker.seqs)
            worker.puller.close()

    asyncio.run(run())


def test_heartbeats_that_stop_are_noticed_and_the_rest_is_pulled(start: Start) -> None:
    cluster = start(3)

    async def run() -> None:
        hearing = Hearing()
        async with linked(*cluster.urls, hearing=hearing) as link:
            js = api(link)
            await make(js, "hard", 3)
            await fill(link, "hard", 500)
            info = await js.consumer("hard", "workers")
            leader = cluster.node(info["cluster"]["leader"])
            # The connection is to another node: nobody says that the pull was lost.
            others = [node.url for node in cluster.nodes if node is not leader]
        async with linked(*others, hearing=hearing) as link:
            js = api(link)
            worker = Worker(link, "hard", heartbeat_seconds=0.3)
            worker.puller.want(100_000)
            await until("they came", lambda: len(set(worker.seqs)) == 500)
            leader.kill()
            await until("the silence is noticed", lambda: worker.puller.losses > 0)
            await leader_of(cluster, "hard")
            await fill(link, "hard", 500, b"more-")
            await until("the rest came", lambda: len(set(worker.seqs)) == 1000, 60)
            assert set(worker.seqs) == set(range(1, 1001))
            worker.puller.close()

    asyncio.run(run())
