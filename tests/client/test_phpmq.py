"""The PHPMQ clients against a real broker: everything they can say, and everything that can go wrong."""

import asyncio
import contextlib
import math
import random
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

from penstock import aconnect
from penstock.client import ClientOptions, ConnectionLost, NotSupported, PhpmqClient, TimedOut
from penstock.client.blocking import Latch
from penstock.client.phpmq import PhpmqMessage
from penstock.client.thread_link import ThreadLink
from penstock.client.wire import Wire
from penstock.common.address import Address
from tests.client.both import Connect, both, both_and_uvloop, take
from tests.client.conftest import Doors, Spare
from tests.server.harness import WAIT_SECONDS, BrokerProcess, phpmq


def url_of(broker: BrokerProcess) -> str:
    return f"phpmq://127.0.0.1:{broker.ports['phpmq']}"


async def bodies(client: Any, queue: str, count: int) -> list[bytes]:
    """The next messages of a queue, acknowledged."""
    found = []
    async for message in client.consume(queue, count=count, timeout=5):
        found.append(message.body)
        assert await message.ack()
    return found


# --- what they can say ---------------------------------------------------------------------------------


@both_and_uvloop
async def test_send_consume_ack(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url_of(broker)) as mq:
        await mq.send(queue, b"one")
        await mq.send(queue, b"\x00\xff" * 1000, ttl=60)
        await mq.flush()
        (one, two) = await take(mq.consume(queue), 2)
        assert (one.body, one.ttl, one.queue) == (b"one", None, queue)
        assert two.body == b"\x00\xff" * 1000
        assert 50 < two.ttl <= 60
        assert len(one.id) == 32
        assert one.id < two.id
        assert await one.ack()
        assert await two.ack()
        assert not await two.ack()  # a second time says nothing
    async with kind(url_of(broker)) as mq:
        assert await take(mq.consume(queue, timeout=0.1), 1) == []


@both_and_uvloop
async def test_send_many_and_ack_many(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    sent = [b"%06d" % number for number in range(3000)]
    async with kind(url_of(broker)) as mq:
        assert await mq.send_many(queue, iter(sent), ttl=100) == 3000
        held = await take(mq.consume(queue, prefetch=3000), 3000)
        assert [message.body for message in held] == sent
        assert await mq.ack_many(held[:2000]) == 2000
        assert await mq.ack_many(held) == 1000  # the others were acknowledged before
        assert await take(mq.consume(queue, timeout=0.1), 1) == []


@both_and_uvloop
async def test_a_message_twice_in_ack_many(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url_of(broker)) as mq:
        await mq.send_many(queue, [b"%d" % number for number in range(5)])
        messages = mq.consume(queue, prefetch=2, count=4, timeout=5)
        (first,) = await take(messages, 1)
        assert await mq.ack_many([first, first, first]) == 1
        assert await bodies(mq, queue, 4) == [b"1", b"2", b"3", b"4"]


@both_and_uvloop
async def test_no_end_can_be_said_as_infinity(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url_of(broker)) as mq, kind(url_of(broker)) as other:
        messages = mq.consume(queue, timeout=math.inf)
        waiting = asyncio.ensure_future(anext(messages))
        while not waiting.done():  # however long it takes until it waits
            await other.send(queue, b"x")
            await asyncio.wait([waiting], timeout=0.1)
        assert (await waiting).body == b"x"


@both_and_uvloop
async def test_requeue_and_reject(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url_of(broker)) as mq:
        await mq.send_many(queue, [b"a", b"b", b"c"])
        first, second, third = await take(mq.consume(queue), 3)
        assert await first.requeue(ttl=50)
        assert await second.reject()
        assert await third.ack()
        (again,) = await take(mq.consume(queue), 1)
        assert (again.body, again.id) == (b"a", first.id)
        assert 40 < again.ttl <= 50
        assert await again.requeue()
        (again,) = await take(mq.consume(queue), 1)
        assert (again.body, again.ttl) == (b"a", None)
        assert await again.ack()
        assert await bodies(mq, f"{queue}.dead", 1) == [b"b"]


@both_and_uvloop
async def test_a_count_takes_no_more_than_that(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url_of(broker)) as mq, kind(url_of(broker)) as other:
        await mq.send_many(queue, [b"%d" % number for number in range(10)])
        found = []
        async for message in mq.consume(queue, prefetch=3, count=5, timeout=5):
            found.append(message.body)
            assert await message.ack()
        assert found == [b"0", b"1", b"2", b"3", b"4"]
        # What the first client has not taken is there for another one at once.
        assert await bodies(other, queue, 5) == [b"5", b"6", b"7", b"8", b"9"]


@both_and_uvloop
async def test_what_was_fetched_ahead_stays_for_the_next_loop(
    kind: Connect, broker: BrokerProcess, queue: str
) -> None:
    async with kind(url_of(broker)) as mq:
        await mq.send_many(queue, [b"a", b"b", b"c"])
        (first,) = await take(mq.consume(queue), 1)
        assert await first.ack()
        assert await bodies(mq, queue, 2) == [b"b", b"c"]


@both_and_uvloop
async def test_two_queues_at_once(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url_of(broker)) as mq:
        await mq.send(queue + "1", b"one")
        await mq.send(queue + "2", b"two")
        ones, twos = mq.consume(queue + "1"), mq.consume(queue + "2")
        (one,) = await take(ones, 1)
        (two,) = await take(twos, 1)
        assert (one.body, two.body) == (b"one", b"two")
        assert await mq.ack_many([one, two]) == 2


@both_and_uvloop
async def test_what_is_not_settled_goes_back_to_its_place(
    kind: Connect, broker: BrokerProcess, queue: str
) -> None:
    async with kind(url_of(broker)) as mq:
        await mq.send_many(queue, [b"a", b"b"])
        (first, second) = await take(mq.consume(queue), 2)
        assert await second.ack()
    async with kind(url_of(broker)) as mq:
        assert await bodies(mq, queue, 1) == [b"a"]
    assert first.body == b"a"


@both_and_uvloop
async def test_a_large_message(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    large = bytes(range(256)) * (1 << 15)
    async with kind(url_of(broker)) as mq:
        await mq.send(queue, large)
        assert await bodies(mq, queue, 1) == [large]


# --- what they refuse ----------------------------------------------------------------------------------


@both_and_uvloop
async def test_what_cannot_be_said_is_not_sent(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url_of(broker), payload_bytes_max=100) as mq:
        for call, complaint in (
            (mq.send(queue, b"x", ttl=0), "whole seconds from 1"),
            (mq.send(queue, b"x" * 101), "over 100"),
            (mq.send(f"{queue}.dead", b"x"), "door to dead letters"),
            (mq.send("", b"x"), "cannot be empty"),
            (take(mq.consume(queue, prefetch=0), 1), "use at least 1"),
            (take(mq.consume(queue, count=0), 1), "use at least 1"),
            (take(mq.consume("\n"), 1), "control character"),
        ):
            with pytest.raises(NotSupported, match=complaint):
                await call
        with pytest.raises(TypeError, match=r"bytes, not str; use text.encode\(\)"):
            await mq.send(queue, "text")
        await mq.send(queue, b"fine")  # the connection has not suffered
        assert await bodies(mq, queue, 1) == [b"fine"]


# --- what can go wrong ---------------------------------------------------------------------------------


@both_and_uvloop
async def test_nobody_there(kind: Connect) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"phpmq://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ConnectionLost, match=r"no phpmq broker could be reached \(1 attempt\).*refused"):
            await kind(url, reconnect_seconds=0)


@both
async def test_a_worker_that_starts_before_its_broker(kind: Connect, spare: Spare) -> None:
    broker = spare()
    broker.stop()
    connecting = asyncio.ensure_future(open_client(kind, url_of(broker), backoff_seconds_min=0.01))
    await asyncio.sleep(0)
    await asyncio.to_thread(broker.start)
    mq = await connecting
    await mq.send("q", b"x")
    await mq.close()


async def open_client(kind: Connect, url: str, **options: float) -> Any:
    return await kind(url, **options)


@both
async def test_after_kill_9_a_consumer_goes_on(kind: Connect, spare: Spare) -> None:
    broker = spare()
    async with kind(url_of(broker), backoff_seconds_min=0.01) as mq:
        await mq.send_many("q", [b"a", b"b", b"c"])
        messages = mq.consume("q")
        first, second = [await anext(messages) for _ in range(2)]
        assert await first.ack()
        await mq.send("other", b"")
        assert await bodies(mq, "other", 1) == [b""]  # so the broker has read the acknowledgement,
        async with kind(f"rq://127.0.0.1:{broker.ports['rq']}") as witness:
            await witness.send("other", b"")  # and with this receipt, stored it
        broker.kill()
        broker.start()
        again = [await anext(messages) for _ in range(2)]
        assert [message.body for message in again] == [b"b", b"c"]  # what was not acknowledged comes again
        assert not await second.ack()  # and its former self cannot be acknowledged any more
        assert await mq.ack_many([*again, second]) == 2
        with pytest.raises(ConnectionLost) as raised:  # what was sent before is in doubt, told once
            await mq.send("q", b"d")
        assert raised.value.in_doubt == 4
        await mq.send("q", b"e")
        assert (await anext(messages)).body == b"e"


@both
async def test_sends_on_a_lost_connection_are_reported(kind: Connect, spare: Spare) -> None:
    broker = spare()
    async with kind(url_of(broker), backoff_seconds_min=0.01) as mq:
        await mq.send("q", b"a")
        broker.kill()
        broker.start()
        with pytest.raises(ConnectionLost, match="send again what must not be lost") as raised:
            await mq.send("q", b"b")
        assert raised.value.in_doubt == 1  # b was not sent at all
        await mq.send("q", b"b")
        broker.kill()
        with pytest.raises(ConnectionLost) as raised:
            await mq.flush()
        assert raised.value.in_doubt == 1
        broker.start()
    # Nothing was sent since, so that leaving had nothing to report.


@both
async def test_close_reports_what_is_in_doubt(kind: Connect, spare: Spare) -> None:
    broker = spare()
    mq = await kind(url_of(broker))
    await mq.send_many("q", [b"a"] * 5)
    broker.kill()
    with pytest.raises(ConnectionLost) as raised:
        await mq.close()
    assert raised.value.in_doubt == 5
    await mq.close()  # a second time does nothing
    with pytest.raises(ConnectionLost, match="this client is closed"):
        await mq.send("q", b"x")


@both
async def test_what_is_said_while_the_client_is_closed_is_refused(kind: Connect, spare: Spare) -> None:
    """`close` has asked what is stored: of anything behind that nobody would hear."""
    broker = spare()
    mq = await kind(url_of(broker))
    await mq.send("q", b"a")
    (message,) = await take(mq.consume("q"), 1)
    broker.signal(signal.SIGSTOP)
    closing = asyncio.ensure_future(mq.close())
    sent, refusal = 1, ""
    while not refusal:  # until it has begun
        try:
            sent += await mq.send_many("q", [b"b"])
            await asyncio.sleep(0)
        except ConnectionLost as error:
            refusal = str(error)
    assert "this client is closed" in refusal
    assert not await message.ack()
    assert not closing.done()
    broker.signal(signal.SIGCONT)
    await closing
    async with kind(url_of(broker)) as mq:
        assert len(await bodies(mq, "q", sent)) == sent


@both_and_uvloop
async def test_close_waits_until_the_broker_has_read_everything(
    kind: Connect, broker: BrokerProcess, queue: str
) -> None:
    async with kind(url_of(broker)) as mq:
        await mq.send_many(queue, [b"x" * 1000] * 5000)
    async with kind(url_of(broker)) as mq:
        found = await take(mq.consume(queue, prefetch=5000), 5000)
        assert await mq.ack_many(found) == 5000


@both
async def test_a_broker_that_takes_nothing(kind: Connect, spare: Spare) -> None:
    broker = spare()
    mq = await kind(url_of(broker), operation_seconds=0.3)
    broker.signal(signal.SIGSTOP)
    try:
        with pytest.raises(TimedOut, match=r"has taken nothing for 0\.3 s") as raised:
            await mq.send_many("q", [b"x" * 1_000_000] * 100)
        assert raised.value.in_doubt > 0
    finally:
        broker.signal(signal.SIGCONT)
    await mq.close()


@both
async def test_a_slow_line_is_no_broker_that_takes_nothing(kind: Connect) -> None:
    """The bound is for the time without a byte, however long a large message takes."""
    size, read = 20 << 20, 0

    def slowly(listener: socket.socket) -> None:
        nonlocal read
        connection, _ = listener.accept()
        with connection:
            while data := connection.recv(1 << 20, socket.MSG_WAITALL):
                read += len(data)
                time.sleep(0.1)  # this is the line

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(slowly, listener)
        url = f"phpmq://127.0.0.1:{listener.getsockname()[1]}"
        client = await kind(url, receipts=False, operation_seconds=1)
        await client.send("q", bytes(size))
        await client.flush()
        while read < size:  # what is on its way, for which `close` would wait too short
            await asyncio.sleep(0.05)
        await client.close()
        await asyncio.to_thread(reading.result, WAIT_SECONDS)
    assert read > size


@both_and_uvloop
async def test_over_tls_nothing_unsent_is_all_sent(kind: Connect, doors: Doors, queue: str) -> None:
    """Without receipts the system is asked, and what TLS makes of a limit of nothing is its own."""
    options: ClientOptions = {
        "cafile": doors.file("ca.pem"),
        "certfile": doors.file("client.pem"),
        "keyfile": doors.file("client.key"),
        "operation_seconds": 1,
    }
    mq = await kind(doors.tls("phpmq"), receipts=False, **options)
    await mq.send(queue, b"x")
    await mq.flush()
    await mq.flush()
    await mq.close()


@both
async def test_reconnecting_gives_up_in_the_end(kind: Connect, spare: Spare) -> None:
    broker = spare()
    mq = await kind(url_of(broker), reconnect_seconds=0.3, backoff_seconds_min=0.05)
    messages = mq.consume("q")
    waiting = asyncio.ensure_future(anext(messages))
    broker.stop()
    with pytest.raises(ConnectionLost, match=r"no phpmq broker could be reached \([2-9] attempts\)"):
        await waiting
    await mq.close()


@both_and_uvloop
async def test_a_peer_that_does_not_speak_phpmq(kind: Connect) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    mq = await kind(f"phpmq://127.0.0.1:{listener.getsockname()[1]}", reconnect_seconds=0, receipts=False)
    peer, _ = listener.accept()
    messages = mq.consume("q")
    waiting = asyncio.ensure_future(anext(messages))
    await asyncio.to_thread(peer.recv, 100)
    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(ConnectionLost, match=r"does not speak this protocol; is this the right port"):
        await waiting
    peer.close()
    listener.close()
    with pytest.raises(ConnectionLost, match=r"no phpmq broker could be reached \(1 attempt\)"):
        await mq.send("q", b"nobody listens any more")
    await mq.close()


@both_and_uvloop
async def test_a_message_that_comes_in_pieces(kind: Connect) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    mq = await kind(f"phpmq://127.0.0.1:{listener.getsockname()[1]}", receipts=False)
    peer, _ = listener.accept()
    waiting = asyncio.ensure_future(anext(mq.consume("q")))
    await asyncio.to_thread(peer.recv, 100)
    for byte in phpmq(3, (1, b"q"), (2, b"body"), (3, b"f" * 32), (5, b"9")):
        peer.sendall(bytes([byte]))
    message = await waiting
    assert (message.body, message.id, message.ttl) == (b"body", "f" * 32, 9)
    peer.close()
    listener.close()
    await mq.close()


@both
async def test_several_brokers(kind: Connect, spare: Spare) -> None:
    first, second = spare(), spare()
    url = f"phpmq://127.0.0.1:{first.ports['phpmq']},127.0.0.1:{second.ports['phpmq']}"
    async with kind(url, backoff_seconds_min=0.01) as mq:
        await mq.send("q", b"on the first")
        first.stop()
        with pytest.raises(ConnectionLost):
            await mq.send("q", b"")
        await mq.send("q", b"on the second")
        assert await bodies(mq, "q", 1) == [b"on the second"]


# --- threads -------------------------------------------------------------------------------------------


def test_many_threads_send_and_settle_while_one_consumes(broker: BrokerProcess, queue: str) -> None:
    with PhpmqClient(url_of(broker)) as mq:
        send_and_settle(mq, queue)


def test_many_threads_and_tls(doors: Doors, queue: str) -> None:
    """An SSL object must not be used by two threads at once."""
    options: ClientOptions = {
        "cafile": doors.file("ca.pem"),
        "certfile": doors.file("client.pem"),
        "keyfile": doors.file("client.key"),
    }
    with PhpmqClient(doors.tls("phpmq"), **options) as mq:
        send_and_settle(mq, queue)


def test_of_two_threads_that_settle_a_message_one_is_told_that_it_did(
    broker: BrokerProcess, queue: str
) -> None:
    each = 200
    with PhpmqClient(url_of(broker)) as mq, ThreadPoolExecutor(2) as pool:
        mq.send_many(queue, [b"x"] * each)
        messages = list(mq.consume(queue, prefetch=each, count=each, timeout=10))
        both = threading.Barrier(2)

        def settle(way: Callable[[PhpmqMessage], bool]) -> int:
            done = 0
            for message in messages:
                both.wait()
                done += way(message)
            return done

        told = [pool.submit(settle, way) for way in (PhpmqMessage.ack, PhpmqMessage.requeue)]
        acked, requeued = (one.result() for one in told)
        assert acked + requeued == each
        mq.flush()
        assert len(list(mq.consume(queue, prefetch=each, timeout=0.3))) == requeued


def send_and_settle(mq: PhpmqClient, queue: str) -> None:
    each, senders = 500, 4
    with ThreadPoolExecutor(senders + 2) as pool:

        def send(sender: int) -> None:
            for number in range(each):
                mq.send(queue, b"%d %d" % (sender, number))

        sending = [pool.submit(send, sender) for sender in range(senders)]
        bodies, settling = [], []
        for message in mq.consume(queue, prefetch=50, count=each * senders, timeout=10):
            bodies.append(message.body)
            settling.append(pool.submit(message.ack))
        assert all(one.result() for one in settling)
        for one in sending:
            one.result()
    assert sorted(bodies) == sorted(b"%d %d" % (s, n) for s in range(senders) for n in range(each))


def test_an_interrupted_write_breaks_the_connection(
    broker: BrokerProcess, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(wire: Wire, data: bytes, seconds: float) -> None:
        raise KeyboardInterrupt

    with PhpmqClient(url_of(broker)) as mq:
        with monkeypatch.context() as patch:
            patch.setattr(Wire, "write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                mq.send(queue, b"half of it may be gone")
        with pytest.raises(ConnectionLost, match="interrupted") as raised:
            mq.flush()
        assert raised.value.in_doubt == 1
        mq.send(queue, b"on a new connection")
        assert [message.body for message in mq.consume(queue, count=1, timeout=5)] == [b"on a new connection"]


def test_another_thread_may_close(broker: BrokerProcess, queue: str) -> None:
    mq = PhpmqClient(url_of(broker))
    messages = mq.consume(queue)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, messages)
        mq.send(f"{queue}-other", b"the broker has read this before it closes, and so it is not in doubt")
        mq.close()
        with pytest.raises(ConnectionLost, match="this client is closed"):
            waiting.result(timeout=10)


def test_close_while_another_thread_looks_for_a_broker(
    spare: Spare, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not kept waiting: the other one is woken up, and told."""
    broker = spare()
    with PhpmqClient(url_of(broker), reconnect_seconds=600) as mq:
        broker.kill()
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(mq.send, queue, b"x")
            while "connection lost" not in caplog.text and not sending.done():
                wait([sending], timeout=0.01)
            mq.close()
            with pytest.raises(ConnectionLost, match="this client is closed"):
                sending.result(WAIT_SECONDS)


def test_close_while_another_thread_connects(
    broker: BrokerProcess, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is ended as well: the broker would go on giving messages to nobody."""
    dial = ThreadLink._dial
    made, closed = threading.Event(), threading.Event()

    async def slowly(link: ThreadLink, address: Address) -> Wire:
        wire = await dial(link, address)
        made.set()
        assert closed.wait(WAIT_SECONDS)
        return wire

    mq = PhpmqClient(url_of(broker))
    messages = mq.consume(queue)
    assert mq._link._wire is not None
    mq._link._drop(mq._link._wire, "cut")
    monkeypatch.setattr(ThreadLink, "_dial", slowly)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, messages)
        assert made.wait(WAIT_SECONDS)
        mq.close()
        closed.set()
        with pytest.raises(ConnectionLost, match="this client is closed"):
            waiting.result(WAIT_SECONDS)
    monkeypatch.undo()
    with PhpmqClient(url_of(broker)) as other:
        other.send(queue, b"x")
        other.flush()
        assert [message.body for message in other.consume(queue, count=1, timeout=5)] == [b"x"]


@pytest.mark.parametrize("protocol", ["phpmq", "sspq", "rq"])
def test_who_does_not_wait_for_the_first_connection_leaves_none_behind(protocol: str) -> None:
    async def give_up(listener: socket.socket) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(aconnect(f"{protocol}://127.0.0.1:{listener.getsockname()[1]}"), 0.2)
        guest, _ = listener.accept()  # by now nobody else comes
        with guest:
            guest.settimeout(0.5)
            while await asyncio.to_thread(guest.recv, 1000):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        asyncio.run(give_up(listener))


def test_what_another_thread_reads_is_not_waited_for(broker: BrokerProcess, queue: str) -> None:
    """The message comes just after a consumer has looked, and is read by a thread that flushes."""
    with PhpmqClient(url_of(broker)) as mq, PhpmqClient(url_of(broker)) as other:
        link = mq._link
        messages = mq.consume(queue, prefetch=1, timeout=WAIT_SECONDS)

        async def ensure() -> None:
            vars(link).pop("ensure")
            other.send(queue, b"x")
            other.flush()
            with ThreadPoolExecutor(1) as pool:
                while not link.touch(lambda: mq._core.has(queue)):
                    pool.submit(mq.send, f"{queue}-else", b"y").result(WAIT_SECONDS)
                    pool.submit(mq.flush).result(WAIT_SECONDS)

        vars(link)["ensure"] = ensure
        began = time.monotonic()
        assert next(messages).ack()
        assert time.monotonic() - began < WAIT_SECONDS  # else it has waited for bytes that were here


def test_who_waits_for_a_connection_does_not_wait_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread drops it, and makes a new one of the same number, just before the system is asked."""
    ours, theirs = socket.socketpair()
    wire = Wire(ours)
    others: list[socket.socket] = []

    class LatePoll:
        def __init__(self) -> None:
            self._poll = poll()

        def register(self, what: socket.socket | int, events: int) -> None:
            self._poll.register(what, events)

        def poll(self, milliseconds: float) -> list[tuple[int, int]]:
            wire.abort()
            others.extend(socket.socketpair())
            return self._poll.poll(milliseconds)

    poll = select.poll
    monkeypatch.setattr(select, "poll", LatePoll)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            wire.read(WAIT_SECONDS)
        assert ours.fileno() == -1
    finally:
        for it in (theirs, *others):
            it.close()


def test_an_interrupt_before_a_write_breaks_the_connection(broker: BrokerProcess, queue: str) -> None:
    """What the core has thought of and nobody has written must not be taken for said."""
    with PhpmqClient(url_of(broker)) as mq:
        send = mq._core.send

        def interrupted(*args: Any) -> bytes:
            send(*args)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mq._core, "send", interrupted)
            with pytest.raises(KeyboardInterrupt):
                mq.send(queue, b"x")
        with pytest.raises(ConnectionLost, match="interrupted") as raised:
            mq.flush()
        assert raised.value.in_doubt == 1
        mq.send(queue, b"y")
        (message,) = mq.consume(queue, count=1, timeout=WAIT_SECONDS)
        assert message.body == b"y"


def test_an_interrupt_after_a_read_breaks_the_connection(broker: BrokerProcess, queue: str) -> None:
    """Bytes that were read and that the core has not seen would be missing: a message that nobody gets."""
    with PhpmqClient(url_of(broker)) as mq:
        mq.send_many(queue, [b"1", b"2"])
        mq.flush()

        def interrupted(data: memoryview) -> None:
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mq._core, "feed", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(mq.consume(queue, prefetch=1, timeout=WAIT_SECONDS))
        got = [message.body for message in mq.consume(queue, count=2, timeout=WAIT_SECONDS) if message.ack()]
        assert got == [b"1", b"2"]


def test_an_interrupt_while_nothing_comes_costs_nothing(broker: BrokerProcess, queue: str) -> None:
    with PhpmqClient(url_of(broker)) as mq:
        mq.send(f"{queue}-else", b"x")
        (message,) = mq.consume(f"{queue}-else", count=1, timeout=WAIT_SECONDS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Wire, "_wait", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(mq.consume(queue, timeout=WAIT_SECONDS))
        assert message.ack()
        mq.flush()
        mq.send(queue, b"y")
        assert [m.body for m in mq.consume(queue, count=1, timeout=WAIT_SECONDS)] == [b"y"]


def test_who_is_interrupted_while_it_asks_holds_nothing(broker: BrokerProcess, queue: str) -> None:
    with PhpmqClient(url_of(broker)) as mq, PhpmqClient(url_of(broker)) as other:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Wire, "write", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                mq.consume(queue)
        mq.send(queue, b"x")  # over a new connection
        mq.flush()
        assert [m.body for m in other.consume(queue, count=1, timeout=WAIT_SECONDS)] == [b"x"]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # it had not begun
def test_interrupts_at_any_moment_leave_no_lock_behind(broker: BrokerProcess) -> None:
    mq = PhpmqClient(url_of(broker))

    draw = random.Random(7)
    former = signal.signal(signal.SIGALRM, _interrupt)
    try:
        for _ in range(2000):
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(2e-6, 40e-6))
                for _ in range(1000):  # and not for ever: an interrupt in a finalizer goes nowhere
                    mq.flush()
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert not mq._link._proving.locked()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    mq.close()


def test_interrupts_at_any_moment_of_a_pause() -> None:
    latch = Latch()
    draw = random.Random(7)
    former = signal.signal(signal.SIGALRM, _interrupt)
    try:
        for _ in range(2000):
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(2e-6, 40e-6))
                assert not any(latch.wait(0.00001) for _ in range(1000))
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(latch.wait, WAIT_SECONDS) for _ in range(2)]
        assert not latch.is_set()
        latch.set()
        latch.set()
        assert [it.result(WAIT_SECONDS) for it in waiting] == [True, True]


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_close_that_was_interrupted_is_not_taken_for_done(broker: BrokerProcess, queue: str) -> None:
    """What it could not prove is told by the next one."""
    mq = PhpmqClient(url_of(broker))
    mq.send(queue, b"x")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wire, "read", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            mq.close()
    with pytest.raises(ConnectionLost) as raised:
        mq.close()
    assert raised.value.in_doubt == 1
    mq.close()
