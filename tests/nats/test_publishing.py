"""Publishing with receipts: every message once, through the death of whoever stores them."""

import asyncio
import random
from collections import Counter
from itertools import accumulate

import pytest

from penstock.engines.jetstream.api import JetStream
from penstock.engines.jetstream.cluster import Cluster
from penstock.engines.jetstream.errors import JetStreamError
from penstock.engines.jetstream.publisher import Publisher, Run
from penstock.protocols.errors import MisuseError
from penstock.protocols.nats_headers import header_lines, value_of
from penstock.protocols.nats_jetstream import read_direct_seqs, read_flow_answer
from penstock.protocols.nats_write import encode_publishes, publish
from tests.nats.cluster import Hearing, api, leader_of, linked, stream_settings, until
from tests.nats.conftest import Start

MESSAGES = 20_000
RUN = 250
OPEN_RUNS = 8


async def everything(js: JetStream, stream: str) -> list[tuple[int, bytes, bytes]]:
    """All messages of a stream: (seq, headers, payload)."""
    out: list[tuple[int, bytes, bytes]] = []
    seq = 1
    while True:
        found = await js.read(stream, seq, 5000)
        if not len(found):
            return out
        seqs = read_direct_seqs(found.headers)
        out += zip(seqs, found.headers, found.payloads, strict=True)
        seq = seqs[-1] + 1


def publish_run(publisher: Publisher, first: int, count: int, ended: list[Run]) -> None:
    texts = [b"%d" % n for n in range(first, first + count)]
    bounds = list(accumulate(map(len, texts), initial=0))
    publisher.publish(b"".join(texts), bounds, done=ended.append)


def test_runs_are_stored_in_order_with_their_headers(node: Cluster) -> None:
    async def run() -> None:
        async with linked(node.nodes[0].url) as link:
            js = api(link)
            await js.create_stream(stream_settings("ordered", 1))
            publisher = Publisher(link, "q.ordered", id_head=b"me-")
            ended: list[Run] = []
            publish_run(publisher, 0, 2500, ended)
            sizes = [0, 1, 700_000, 0, 1 << 19]
            bounds = list(accumulate(sizes, initial=0))
            lines = [header_lines([(b"Place", b"%d" % n)]) for n in range(len(sizes))]
            publisher.publish(bytes(sum(sizes)), bounds, headers=lines, done=ended.append)
            assert publisher.waiting_bytes > sum(sizes)
            await until("all are answered", lambda: len(ended) == 2)
            assert publisher.waiting_bytes == 0
            assert publisher.open_runs == []
            assert list(ended[0].seqs) == list(range(1, 2501))
            assert list(ended[1].seqs) == list(range(2501, 2506))
            stored = await everything(js, "ordered")
            assert [payload for _, _, payload in stored[:2500]] == [b"%d" % n for n in range(2500)]
            assert [len(payload) for _, _, payload in stored[2500:]] == sizes
            assert [value_of(headers, b"Place") for _, headers, _ in stored[2500:]] == [
                b"0",
                b"1",
                b"2",
                b"3",
                b"4",
            ]
            assert [value_of(headers, b"Nats-Msg-Id") for _, headers, _ in stored[:2]] == [
                b"me-0000000000000",
                b"me-0000000000001",
            ]

    asyncio.run(run())


def test_what_was_stored_before_is_answered_and_not_stored_again(node: Cluster) -> None:
    async def run() -> None:
        async with linked(node.nodes[0].url) as link:
            js = api(link)
            await js.create_stream(stream_settings("twice", 1))
            ended: list[Run] = []
            for _ in range(2):
                publish_run(Publisher(link, "q.twice", id_head=b"same-"), 0, 100, ended)
            await until("all are answered", lambda: len(ended) == 2)
            assert list(ended[0].seqs) == list(ended[1].seqs) == list(range(1, 101))
            assert (await js.stream("twice"))["state"]["messages"] == 100

    asyncio.run(run())


def test_a_stream_that_comes_later_gets_what_waited_for_it(node: Cluster) -> None:
    async def run() -> None:
        async with linked(node.nodes[0].url) as link:
            js = api(link)
            publisher = Publisher(link, "q.later", id_head=b"me-")
            ended: list[Run] = []
            for first in range(0, 1000, 100):
                publish_run(publisher, first, 100, ended)
            with pytest.raises(JetStreamError) as caught:
                await js.stream("later")
            assert caught.value.not_found
            assert not ended
            await js.create_stream(stream_settings("later", 1))
            publish_run(publisher, 1000, 100, ended)
            await until("all are answered", lambda: len(ended) == 11)
            stored = await everything(js, "later")
            assert [payload for _, _, payload in stored] == [b"%d" % n for n in range(1100)]

    asyncio.run(run())


def test_answers_that_come_twice_or_change_count_once(node: Cluster) -> None:
    """Somebody who plays the stream answers as streams were seen to do around a change of leader."""
    busy = b'{"error":{"code":409,"err_code":10158,"description":"in process"},"stream":"S","seq":0}'

    async def run() -> None:
        async with linked(node.nodes[0].url) as link:
            stream = Hearing()
            link.subscribe(b"q.played", stream)
            publisher = Publisher(link, "q.played", id_head=b"me-", answer_seconds=60.0)
            ended: list[Run] = []
            one = publisher.publish(b"abcd", range(5), done=ended.append)
            await until("they came", lambda: len(stream.payloads) == 4)
            replies = stream.batches[0].replies

            def answer(*said: tuple[int, bytes]) -> None:
                link.write(b"".join(publish(replies[place], payload) for place, payload in said))

            def stored(seq: int) -> bytes:
                return b'{"stream":"S","seq":%d}' % seq

            answer((0, stored(11)), (1, stored(12)))
            await until("they are counted", lambda: one.left == 2)
            answer((0, stored(11)), (1, stored(12)), (2, busy), (2, stored(13)))
            await until("the new one is counted", lambda: one.left == 1)
            assert not ended
            answer((0, stored(11)), (3, stored(14)), (3, stored(14)))
            await until("it has ended", lambda: bool(ended))
            assert list(one.seqs) == [11, 12, 13, 14]
            answer((3, stored(14)))  # nobody waits for it any more
            assert len(ended) == 1
            publisher.close()

    asyncio.run(run())


def test_a_message_that_is_too_large_is_misuse_and_harms_nobody(node: Cluster) -> None:
    async def run() -> None:
        hearing = Hearing()
        async with linked(node.nodes[0].url, hearing=hearing) as link:
            js = api(link)
            await js.create_stream(stream_settings("large", 1))
            publisher = Publisher(link, "q.large", id_head=b"me-")
            ended: list[Run] = []
            size = link.message_bytes_max
            with pytest.raises(MisuseError, match="is over the limit of"):
                publisher.publish(bytes(size), [0, size], done=ended.append)
            publisher.publish(bytes(1 << 20), [0, 0, 1 << 20, 1 << 20], done=ended.append)
            await until("the others are answered", lambda: bool(ended))
            assert [len(payload) for _, _, payload in await everything(js, "large")] == [0, 1 << 20, 0]
            assert hearing.downs == []

    asyncio.run(run())


def test_a_fast_batch_is_answered_now_and_then(node: Cluster) -> None:
    async def run() -> None:
        hearing = Hearing()
        async with linked(node.nodes[0].url) as link:
            js = api(link)
            await js.create_stream(stream_settings("fast", 1))
            inbox = link.new_inbox()
            link.subscribe(inbox + b">", hearing)

            def frames(batch: bytes, lo: int, hi: int, step: int) -> bytes:
                """Messages `lo` to before `hi` of a batch; step 0 opens it, 1 goes on, 2 closes it."""
                return encode_publishes(
                    b"q.fast",
                    b"x" * (hi - lo),
                    range(hi - lo + 1),
                    reply_head=inbox + batch + b".100.fail.",
                    number_first=lo,
                    reply_tail=b".%d.$FI" % step,
                    id_head=b"me-",
                    id_first=lo,
                )

            for batch in (b"one", b"same-again"):
                hearing.batches.clear()
                link.write(frames(batch, 1, 2, 0) + frames(batch, 2, 350, 1) + frames(batch, 350, 351, 2))
                await until("it is closed", lambda: b'"count":350' in b"".join(hearing.payloads))
                answers = [read_flow_answer(payload) for payload in hearing.payloads]
                assert (answers[0].upto, answers[-1].upto) == (0, 350)
                assert not any(answer.failure or answer.lost_from for answer in answers)
                assert len(answers) < 20
            # The ids were known when they came again.
            assert (await js.stream("fast"))["state"]["messages"] == 350
            hearing.batches.clear()
            link.write(frames(b"gap", 400, 401, 0) + frames(b"lost", 5, 6, 1))
            await until("it is told", lambda: b"10208" in b"".join(hearing.payloads))

    asyncio.run(run())


def test_what_is_refused_for_good_is_told(node: Cluster) -> None:
    async def run() -> None:
        async with linked(node.nodes[0].url) as link:
            await api(link).create_stream(stream_settings("small", 1, max_msg_size=200))
            publisher = Publisher(link, "q.small", id_head=b"me-")
            ended: list[Run] = []
            publisher.publish(bytes(1010), [0, 5, 1005, 1010], done=ended.append)
            await until("all are answered", lambda: bool(ended))
            assert list(ended[0].seqs) == [1, 0, 2]
            assert list(ended[0].failures) == [1]
            assert ended[0].failures[1].err_code == 10054

    asyncio.run(run())


async def publish_some(publisher: Publisher, first: int, end: int, ended: list[Run]) -> None:
    """Keeps a few runs open until all are answered."""
    while len(ended) * RUN < end:
        while first < end and len(publisher.open_runs) < OPEN_RUNS:
            publish_run(publisher, first, RUN, ended)
            first += RUN
        await asyncio.sleep(0)


def test_every_message_is_stored_once_through_two_deaths_of_the_leader(start: Start) -> None:
    cluster = start(3)

    async def run() -> None:
        async with linked(*cluster.urls) as link:
            js = api(link)
            await js.create_stream(stream_settings("hard", 3))
            publisher = Publisher(link, "q.hard", id_head=b"me-", answer_seconds=1.0)
            ended: list[Run] = []
            for first in (0, MESSAGES // 2):
                end = first + MESSAGES // 2
                publishing = asyncio.create_task(publish_some(publisher, first, end, ended))
                leader = await leader_of(cluster, "hard")
                quarter = (first + MESSAGES // 8) // RUN
                await until("a quarter of them is stored", lambda: len(ended) > quarter)  # noqa: B023
                leader.kill()
                await asyncio.wait_for(publishing, 60)
                leader.start()
                await asyncio.to_thread(cluster.wait_ready)
            publisher.close()
            assert not any(run.failures for run in ended)
            stored = await everything(js, "hard")
            counts = Counter(payload for _, _, payload in stored)
            assert len(counts) == MESSAGES, f"{MESSAGES - len(counts)} lost"
            assert max(counts.values()) == 1, f"{sum(counts.values()) - MESSAGES} doubled"
            # Receipts said where each message is.
            at = {seq: payload for seq, _, payload in stored}
            for one in random.Random(1).sample(ended, 20):
                assert [at[seq] for seq in one.seqs] == [b"%d" % n for n in range(one.first, one.first + RUN)]
            resent = sum(one.sends > 1 for one in ended)
            assert resent > 0, "nobody noticed the deaths: the test shows nothing"

    asyncio.run(run())
