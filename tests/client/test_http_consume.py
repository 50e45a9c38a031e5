"""The HTTP client as a worker, over threads and over asyncio: windows, leases, verdicts, and lost brokers."""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.request import urlopen

import pytest

from penstock.client import AsyncHttpClient, ConnectionLost, HttpClient, NotSupported, Refused, http_leases
from penstock.client.http_connection import HttpConnection
from penstock.client.http_core import Answer, Request
from penstock.client.http_line import HttpLine
from tests.client.both import Connect, both, both_and_uvloop, take
from tests.client.conftest import Doors, Spare
from tests.server.harness import WAIT_SECONDS, BrokerProcess, until

QUICK = {"backoff_seconds_min": 0.01, "backoff_seconds_max": 0.1}


def url(broker: BrokerProcess) -> str:
    return f"http://127.0.0.1:{broker.ports['http']}"


def restarted(broker: BrokerProcess) -> None:
    broker.flags = ("--http", f"127.0.0.1:{broker.ports['http']}", *broker.flags[2:])
    broker.start()


async def first(messages: AsyncIterator[Any]) -> Any:
    return (await take(messages, 1))[0]


async def consumers(broker: BrokerProcess, queue: str, count: int) -> None:
    """Wait until so many consume from a queue, as the broker says; the queue may not be there yet."""

    def found() -> int:
        with urlopen(f"{url(broker)}/v1/connections") as answer:
            connections = json.load(answer)["connections"]
        return sum(it["queue"] == queue for connection in connections for it in connection["consumes"])

    while await asyncio.to_thread(found) != count:
        await asyncio.sleep(0.01)


class Asked:
    """What clients have asked of brokers since the test began."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def settled(self, outcome: str) -> list[int]:
        """Of each request with such verdicts, how many there were."""
        bodies = [json.loads(it.body or b"") for it in list(self.requests) if it.target.endswith("/settle")]
        return [len(body[outcome]) for body in bodies if outcome in body]

    async def reaches(self, outcome: str, count: int) -> None:
        while len(self.settled(outcome)) < count:
            await asyncio.sleep(0.01)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    real, noted = HttpLine.ask, Asked()

    def ask(line: HttpLine, request: Request) -> Answer:
        noted.requests.append(request)
        return real(line, request)

    monkeypatch.setattr(HttpLine, "ask", ask)
    return noted


# --- messages ------------------------------------------------------------------------------------------


@both_and_uvloop
async def test_a_message_says_what_is_known_of_it(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url(broker)) as mq:
        headers = {"traceparent": "00-1", "Größe": "€"}
        receipt = await mq.send(queue, b"\xff\x00", ttl=60, retries=3, headers=headers)
        await mq.send(queue, "text €".encode())
        one, two = await take(mq.consume(queue), 2)
        assert (one.id, one.offset, one.queue, one.attempts) == (receipt.id, 0, queue, 1)
        assert (one.body, one.headers, one.retries) == (b"\xff\x00", headers, 3)
        assert one.expires == one.timestamp + timedelta(seconds=60)
        assert timedelta() <= datetime.now(UTC) - one.timestamp < timedelta(minutes=1)
        assert (two.body, two.headers, two.expires, two.retries) == ("text €".encode(), {}, None, None)
        assert (two.reason, two.why) == (None, None)
        assert await one.ack()
        assert not await one.ack()
        assert await mq.ack_many([one, two]) == 1
        assert await mq.flush() == 0
        info = await mq.queue(queue)
        assert (info.ready, info.held) == (0, 0)


@both
async def test_acknowledgements_go_together(
    kind: Connect, broker: BrokerProcess, queue: str, asked: Asked
) -> None:
    async with kind(url(broker)) as mq:
        await mq.send_many(queue, [b"x"] * 1000)
        async for message in mq.consume(queue, prefetch=100, count=1000):
            await message.ack()
        assert await mq.flush() == 0
        assert (await mq.queue(queue)).held == 0
    told = asked.settled("ack")
    assert sum(told) == 1000
    assert len(told) <= 40  # a slow machine has more than one within a hundred messages, but not for each


@both
async def test_a_verdict_does_not_wait_for_the_next_one(
    kind: Connect, broker: BrokerProcess, queue: str
) -> None:
    async with kind(url(broker)) as mq, kind(url(broker)) as other:
        await mq.send_many(queue, [b"a", b"b"])
        async for message in mq.consume(queue):
            await message.ack()
            while (await other.queue(queue)).held == 2:  # nothing is asked of this client meanwhile
                await asyncio.sleep(0.01)
            break


@both
async def test_again_later_and_never_again(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url(broker)) as mq:
        await mq.send(queue, b"x")
        messages = mq.consume(queue, timeout=WAIT_SECONDS)
        assert await (await anext(messages)).requeue(delay=0)
        message = await anext(messages)
        assert message.attempts == 2
        began = asyncio.get_running_loop().time()
        assert await message.requeue(0.3)
        assert await mq.flush() == 0
        assert (await mq.queue(queue)).delayed == 1
        (delayed,) = await mq.peek(queue, state="delayed")
        assert delayed.due is not None
        message = await anext(messages)
        assert asyncio.get_running_loop().time() - began >= 0.3
        assert message.attempts == 3
        assert await message.reject("nobody has ordered it " + "€" * 1000)
        assert await mq.flush() == 0
        why = "nobody has ordered it " + "€" * 326  # a thousand bytes, and no half of a character
        (letter,) = await mq.peek(queue, state="dead")
        assert (letter.reason, letter.why) == ("rejected", why)
        for door in (mq.consume(queue, dead=True, count=1), mq.consume(f"{queue}.dead", count=1)):
            async for dead in door:
                assert (dead.body, dead.reason, dead.why) == (b"x", "rejected", why)
                await dead.requeue(0)
        async for dead in mq.consume(queue, dead=True, count=1):
            await dead.ack()
        assert await mq.flush() == 0
        assert (await mq.queue(queue)).dead == 0


@both
async def test_a_delay_of_a_message_that_is_sent(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url(broker)) as mq:
        began = time.monotonic()
        await mq.send(queue, b"later", delay=0.2)
        await mq.send_many(queue, [b"later too", b"and this"], delay=0.2, headers={"a": "b"})
        await mq.send(queue, b"now", delay=0)
        await mq.send(queue, b"tomorrow", delay=86_400)
        received = await take(mq.consume(queue, timeout=WAIT_SECONDS), 4)
        assert time.monotonic() - began >= 0.2
        assert (await mq.queue(queue)).delayed == 1
        assert {it.body: it.headers for it in received} == {
            b"now": {},
            b"later": {},
            b"later too": {"a": "b"},
            b"and this": {"a": "b"},
        }


# --- windows -------------------------------------------------------------------------------------------


@both
async def test_no_more_than_the_window(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url(broker)) as mq:
        await mq.send_many(queue, [b"%d" % number for number in range(5)])
        messages = mq.consume(queue, prefetch=2, timeout=0.1)
        held = [message async for message in messages]
        assert [it.body for it in held] == [b"0", b"1"]
        assert (await mq.queue(queue)).held == 2
        # One that waits for room goes on when there is some.
        messages = mq.consume(queue, prefetch=1, timeout=WAIT_SECONDS)
        third = await anext(messages)
        waiting = asyncio.ensure_future(anext(messages))
        await third.ack()
        fourth = await waiting
        assert (third.body, fourth.body) == (b"2", b"3")


@both
async def test_a_count_takes_no_more(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url(broker)) as mq:
        await mq.send_many(queue, [b"x"] * 5)
        async for message in mq.consume(queue, count=3):
            assert (await mq.queue(queue)).ready == 2
            await message.ack()
        assert [message async for message in mq.consume(f"{queue}-empty", count=1, timeout=0.05)] == []


@both
async def test_the_window_is_wider_than_a_request(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url(broker)) as mq:
        await mq.send_many(queue, [b"%d" % number for number in range(2500)])
        held = await take(mq.consume(queue, prefetch=5000), 2500)
        assert [it.body for it in held] == [b"%d" % number for number in range(2500)]
        assert await mq.ack_many(held) == 2500
        assert await mq.flush() == 0


@both
async def test_what_is_left_behind_goes_back(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    """What was fetched ahead when the loop is left, what was handed out when the client closes."""
    async with kind(url(broker)) as other:
        async with kind(url(broker)) as mq:
            await mq.send_many(queue, [b"%d" % number for number in range(10)])
            mine = await first(mq.consume(queue))
            theirs = await take(other.consume(queue, timeout=WAIT_SECONDS), 9)
            assert sorted(it.body for it in theirs) == [b"%d" % number for number in range(1, 10)]
            assert {it.attempts for it in theirs} == {2}
        again = await first(other.consume(queue, timeout=WAIT_SECONDS))
        assert (again.body, again.attempts) == (mine.body, 2)
        assert not await mine.ack()


@both
async def test_sending_does_not_wait_for_messages(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url(broker)) as mq:
        waiting = asyncio.ensure_future(first(mq.consume(queue)))
        await consumers(broker, queue, 1)
        await mq.send(queue, b"x")
        assert (await waiting).body == b"x"


@both
async def test_many_loops_of_one_client(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    names = [f"{queue}-{number}" for number in range(4)]
    async with kind(url(broker)) as mq:

        async def work(name: str) -> list[bytes]:
            bodies = []
            async for message in mq.consume(name, prefetch=10, count=50):
                bodies.append(message.body)
                await message.ack()
            return bodies

        working = [asyncio.ensure_future(work(name)) for name in names]
        for name in names:
            await mq.send_many(name, [f"{name} {number}".encode() for number in range(50)])
        done = await asyncio.gather(*working)
        assert await mq.flush() == 0
        for name, bodies in zip(names, done, strict=True):
            assert bodies == [f"{name} {number}".encode() for number in range(50)]
            assert (await mq.queue(name)).held == 0


# --- leases --------------------------------------------------------------------------------------------


@both
async def test_a_lease_that_ends(
    kind: Connect, broker: BrokerProcess, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with kind(url(broker)) as mq, kind(url(broker)) as other:
        await mq.send(queue, b"x")
        mine = await first(mq.consume(queue, lease=1))
        theirs = await first(other.consume(queue))
        assert (theirs.body, theirs.attempts) == (b"x", 2)
        assert await mine.ack()  # nobody knows better yet
        assert await mq.flush() == 1
        assert mine.is_gone
        assert "1 leases had ended before this client said ack; those messages come again" in caplog.text
        assert await mq.flush() == 0
        assert not await mine.extend()
        assert await theirs.ack()
        assert await other.flush() == 0
        assert (await mq.queue(queue)).held == 0


@both
async def test_extending(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url(broker)) as mq, kind(url(broker)) as other:
        await mq.send(queue, b"x")
        mine = await first(mq.consume(queue, lease=1))
        assert await mine.extend(2)
        (held,) = await mq.peek(queue, state="held")
        theirs = await first(other.consume(queue))  # when that has ended
        assert held.id == theirs.id
        assert not await mine.extend(60)
        assert mine.is_gone
        assert not await mine.ack()
        await theirs.ack()
        assert not await theirs.extend()
        with pytest.raises(Refused):
            await (await self_made(mq, queue)).extend(1e9)


async def self_made(mq: Any, queue: str) -> Any:
    await mq.send(queue, b"new")
    return await first(mq.consume(queue))


@both
async def test_a_message_that_is_kept(kind: Connect, broker: BrokerProcess, queue: str, asked: Asked) -> None:
    async with kind(url(broker)) as mq:
        await mq.send(queue, b"x")
        message = await first(mq.consume(queue, lease=1))
        async with message.keep():
            await asked.reaches("extend", 5)  # a third of the lease each
            assert await message.ack()
            assert await mq.flush() == 0
            extended = len(asked.settled("extend"))
        await mq.send(queue, b"not kept any more")
        message = await first(mq.consume(queue, lease=1))
        async with message.keep():
            await asked.reaches("extend", extended + 1)
        assert (await first(mq.consume(queue, prefetch=1))).attempts == 2
        assert not await message.extend()


@both
async def test_a_lease_that_was_made_shorter_is_kept(
    kind: Connect, broker: BrokerProcess, queue: str, asked: Asked
) -> None:
    async with kind(url(broker)) as mq:
        await mq.send(queue, b"x")
        message = await first(mq.consume(queue))
        async with message.keep():
            assert await message.extend(1)
            await asked.reaches("extend", 6)
            assert await message.ack()
            assert await mq.flush() == 0


@both
async def test_what_waits_here_is_kept(
    kind: Connect, broker: BrokerProcess, queue: str, asked: Asked
) -> None:
    async with kind(url(broker)) as mq:
        await mq.send_many(queue, [b"%d" % number for number in range(5)])
        worked = False
        async for message in mq.consume(queue, lease=1, count=5):
            assert message.attempts == 1
            if not worked:
                async with message.keep():
                    await asked.reaches("extend", 5)
                worked = True
            await message.ack()
        assert await mq.flush() == 0
        assert (await mq.queue(queue)).held == 0


@both
async def test_room_comes_with_the_end_of_a_lease(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url(broker)) as mq:
        await mq.send(queue, b"x")
        attempts = [it.attempts async for it in mq.consume(queue, prefetch=1, lease=1, count=2)]
        assert attempts == [1, 2]


@both
async def test_two_deliveries_of_a_message_at_one_client(
    kind: Connect, broker: BrokerProcess, queue: str
) -> None:
    """The broker takes an id once in a settlement: their verdicts go in two."""
    async with kind(url(broker)) as mq:
        await mq.send(queue, b"x")
        old = await first(mq.consume(queue, lease=1))
        new = await first(mq.consume(queue))
        assert await mq.ack_many([old, new]) == 2
        assert await mq.flush() == 1
        assert (old.is_gone, new.is_gone) == (True, False)


@both
async def test_a_delivery_is_settled_once(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    """Workers of which some hold on for too long: whatever they say, one of them is believed."""
    ids: set[str] = set()
    believed: Counter[str] = Counter()
    all_held: dict[str, list[Any]] = {}

    async with kind(url(broker)) as sender:
        for receipt in await sender.send_many(queue, [b"%d" % number for number in range(30)]):
            assert receipt.count == 30
        ids = {it.id for it in await sender.peek(queue)}

        async def work(number: int) -> None:
            async with kind(url(broker)) as mq:
                held = []
                async for message in mq.consume(queue, prefetch=10, lease=1, timeout=2):
                    all_held.setdefault(message.id, []).append(message)
                    held.append(message)
                    if (message.offset + message.attempts) % 3:
                        await message.ack()
                # The others come again elsewhere, until somebody settles them in time; these are too late.
                await mq.ack_many(held)
                await mq.flush()

        await asyncio.gather(*(work(number) for number in range(3)))
        assert all_held.keys() == ids
        for it, held in all_held.items():
            assert len({message.attempts for message in held}) == len(held)  # each delivery has its number
            believed[it] = sum(not message.is_gone for message in held)
        assert set(believed.values()) == {1}
        info = await sender.queue(queue)
        assert (info.ready, info.held, info.dead) == (0, 0, 0)


# --- brokers that go away --------------------------------------------------------------------------------


@both
async def test_a_broker_that_is_killed_and_comes_back(kind: Connect, spare: Spare, queue: str) -> None:
    broker = spare("--http", "127.0.0.1:0")
    bodies = {b"%d" % number for number in range(1000)}
    done: Counter[bytes] = Counter()
    restarts: list[asyncio.Task[None]] = []

    async def restart() -> None:
        await asyncio.to_thread(broker.kill)
        await asyncio.to_thread(restarted, broker)

    async with kind(url(broker), **QUICK) as mq:
        await mq.send_many(queue, bodies)
        async for message in mq.consume(queue, prefetch=50, lease=5):
            done[message.body] += 1
            await message.ack()
            if done.total() == 300:
                restarts.append(asyncio.ensure_future(restart()))
            if done.keys() == bodies and all(it.done() for it in restarts):
                break
        await mq.flush()
        async for message in mq.consume(queue, timeout=0.5):  # what was acknowledged in vain
            done[message.body] += 1
            await message.ack()
        await mq.flush()
        info = await mq.queue(queue)
    assert len(restarts) == 1
    assert (info.ready, info.held, info.dead, info.offset_end) == (0, 0, 0, 1000)
    assert done.keys() == bodies


@both
async def test_a_broker_that_stops_in_order(kind: Connect, spare: Spare, queue: str) -> None:
    broker = spare("--http", "127.0.0.1:0")
    async with kind(url(broker), **QUICK) as mq:
        messages = mq.consume(queue)
        waiting = asyncio.ensure_future(anext(messages))
        await consumers(broker, queue, 1)
        assert await asyncio.to_thread(broker.stop) == 0
        await asyncio.to_thread(restarted, broker)
        await mq.send(queue, b"x")
        message = await waiting
        assert (message.body, message.attempts) == (b"x", 1)
        assert await message.ack()
        assert await mq.flush() == 0


@both
async def test_a_broker_that_does_not_come_back(kind: Connect, spare: Spare, queue: str) -> None:
    broker = spare("--http", "127.0.0.1:0")
    mq = kind(url(broker), **QUICK, reconnect_seconds=0.3)
    await mq
    await mq.send_many(queue, [b"x"] * 3)
    messages = mq.consume(queue, prefetch=3)
    one, two, three = [await anext(messages) for _ in range(3)]
    await asyncio.to_thread(broker.kill)
    assert await one.ack()
    assert await two.reject()
    with pytest.raises(ConnectionLost, match="2 verdicts are in doubt, what was not settled") as raised:
        await mq.flush()
    assert raised.value.verdicts_in_doubt == 2
    assert await mq.flush() == 0  # told once
    with pytest.raises(ConnectionLost, match="no http broker could be reached"):
        await three.extend()
    assert await three.ack()
    with pytest.raises(ConnectionLost, match="1 verdicts are in doubt") as raised:
        await mq.close()
    assert raised.value.verdicts_in_doubt == 1
    with pytest.raises(ConnectionLost, match="nothing comes in this loop: this client is closed"):
        await anext(messages)


@both
async def test_a_settlement_whose_answer_is_lost(
    kind: Connect,
    broker: BrokerProcess,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is said again, and that the messages are gone then is no news."""
    lose_answers(monkeypatch, [ConnectionResetError(), ConnectionResetError()])
    async with kind(url(broker), **QUICK) as mq:
        await mq.send_many(queue, [b"x"] * 3)
        held = await take(mq.consume(queue), 3)
        assert await mq.ack_many(held) == 3
        assert await mq.flush() == 0
        assert not any(message.is_gone for message in held)
        assert "leases had ended" not in caplog.text
        info = await mq.queue(queue)
        assert (info.ready, info.held) == (0, 0)


def test_a_flush_that_is_interrupted(
    broker: BrokerProcess, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_leases, "LINGER_SECONDS", WAIT_SECONDS)  # the flush is the first to say it
    lose_answers(monkeypatch, [KeyboardInterrupt()])
    with HttpClient(url(broker), backoff_seconds_min=0.01) as mq:
        mq.send(queue, b"x")
        messages = mq.consume(queue)
        assert next(messages).ack()
        with pytest.raises(KeyboardInterrupt):
            mq.flush()
        assert mq.flush() == 0
        assert mq.queue(queue).held == 0


def lose_answers(monkeypatch: pytest.MonkeyPatch, errors: list[BaseException]) -> None:
    """The broker settles, and nobody gets its answer, so many times."""
    real = HttpConnection.ask

    def ask(connection: HttpConnection, method: str, target: str, *more: Any) -> Any:
        response = real(connection, method, target, *more)
        if target.endswith("/settle") and errors:
            raise errors.pop()
        return response

    monkeypatch.setattr(HttpConnection, "ask", ask)


@both
async def test_the_wrong_port(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    """Somebody who is no broker is not waited for."""
    async with kind(f"http://127.0.0.1:{broker.ports['phpmq']}", backoff_seconds_min=0.01) as mq:
        with pytest.raises(ConnectionLost, match=r"is this the right port\?"):
            await first(mq.consume(queue))


@both
async def test_closing_ends_a_loop_that_waits(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    mq = kind(url(broker))
    await mq
    waiting = asyncio.ensure_future(first(mq.consume(queue)))
    await consumers(broker, queue, 1)
    await mq.close()
    with pytest.raises(ConnectionLost, match="this client is closed"):
        await waiting
    with pytest.raises(ConnectionLost, match="this client is closed"):
        await first(mq.consume(queue))
    await consumers(broker, queue, 0)


def test_a_task_that_is_cancelled_takes_nothing(broker: BrokerProcess, queue: str) -> None:
    async def main() -> None:
        async with AsyncHttpClient(url(broker)) as mq:
            waiting = asyncio.ensure_future(first(mq.consume(queue)))
            await consumers(broker, queue, 1)
            waiting.cancel()
            await asyncio.wait([waiting])
            await consumers(broker, queue, 0)
            await mq.send(queue, b"x")
            message = await first(mq.consume(queue, timeout=WAIT_SECONDS))
            assert (message.body, message.attempts) == (b"x", 1)
            await message.ack()

    asyncio.run(main())


def test_what_comes_while_a_task_is_cancelled_goes_back(broker: BrokerProcess, queue: str) -> None:
    async def main() -> None:
        async with AsyncHttpClient(url(broker)) as mq:
            waiting = asyncio.ensure_future(first(mq.consume(queue, lease=1000)))
            await consumers(broker, queue, 1)
            with HttpClient(url(broker)) as other:  # the loop stands still until it is here
                other.send(queue, b"x")
            leases = mq._leases
            until(lambda: any(it.inbox or it.out for it in leases._windows), "a message is here")
            waiting.cancel()
            await asyncio.wait([waiting])
            message = await first(mq.consume(queue, timeout=WAIT_SECONDS))
            assert (message.body, message.attempts) == (b"x", 2)
            await message.ack()

    asyncio.run(main())


def test_a_thread_settles_while_another_consumes(broker: BrokerProcess, queue: str) -> None:
    """As with a pool of threads: the window bounds what waits for one of them."""
    most = 0
    inbox: list[Any] = []
    news = threading.Condition()

    def work() -> None:
        while True:
            with news:
                assert news.wait_for(lambda: inbox, WAIT_SECONDS)
                message = inbox.pop(0)
            if message is None:
                return
            message.ack()

    with HttpClient(url(broker)) as mq:
        mq.send_many(queue, [b"x"] * 200)
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for message in mq.consume(queue, prefetch=4, count=200, timeout=WAIT_SECONDS):
            with news:
                inbox.append(message)
                most = max(most, len(inbox))
                news.notify()
        with news:
            inbox.extend([None] * 3)
            news.notify_all()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        assert mq.flush() == 0
        assert mq.queue(queue).held == 0
    assert most <= 4


def test_an_event_loop_that_is_kept_busy(broker: BrokerProcess, queue: str, asked: Asked) -> None:
    """Leases are extended by a thread, so that a handler may block the loop."""

    async def main() -> None:
        async with AsyncHttpClient(url(broker)) as mq:
            await mq.send(queue, b"x")
            message = await first(mq.consume(queue, lease=1))
            async with message.keep():
                until(lambda: len(asked.settled("extend")) >= 5, "five extensions")
            await message.ack()
            assert await mq.flush() == 0

    asyncio.run(main())


# --- doors and mistakes ----------------------------------------------------------------------------------


@both
async def test_a_worker_over_tls(kind: Connect, doors: Doors, queue: str) -> None:
    async with kind(doors.tls("http"), cafile=doors.file("ca.pem")) as mq:
        waiting = asyncio.ensure_future(first(mq.consume(queue)))
        await mq.send(queue, b"x")
        assert await (await waiting).ack()
        assert await mq.flush() == 0


@both
async def test_mistakes(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url(broker)) as mq:
        for arguments, complaint in (
            ({"prefetch": 0}, "prefetch is 0: use at least 1"),
            ({"lease": 0.5}, "lease is 0.5: use at least 1 second"),
            ({"lease": float("inf")}, "lease is inf"),
        ):
            with pytest.raises(NotSupported, match=complaint):
                await first(mq.consume(queue, **arguments))
        with pytest.raises(NotSupported, match="a queue name cannot be empty"):
            await first(mq.consume(""))
        with pytest.raises(Refused) as raised:
            await first(mq.consume(queue, lease=1e7))
        assert (raised.value.status, raised.value.name) == (400, "bad-request")
        for delay in (-1, float("nan"), 1e9):
            with pytest.raises(NotSupported, match="use seconds from 0 to 315576000"):
                await mq.send(queue, b"x", delay=delay)
        with pytest.raises(NotSupported, match="at most 64"):
            await mq.send(queue, b"x", headers={str(number): "" for number in range(65)})
        await mq.send(queue, b"x")
        message = await first(mq.consume(queue))
        with pytest.raises(NotSupported, match="delay is -1"):
            await message.requeue(-1)
        assert await message.ack()
