"""The SSPQ clients against a real broker: one message at a time, retries, dead letters, and lost connections.

Every test empties the queue that it uses: all SSPQ clients of a listener share one.
"""

import asyncio
import signal

import pytest

from penstock.client import AsyncSspqClient, ConnectionLost, Declined, NotSupported, TimedOut
from tests.client.both import Connect, both, both_and_uvloop
from tests.client.conftest import Doors, Spare
from tests.server.harness import BrokerProcess


def url_of(broker: BrokerProcess) -> str:
    return f"sspq://127.0.0.1:{broker.ports['sspq']}"


@both_and_uvloop
async def test_send_receive_ack(kind: Connect, broker: BrokerProcess) -> None:
    async with kind(url_of(broker)) as mq:
        await mq.send(b"\x00one")
        await mq.send(b"two", retries=3)
        await mq.flush()
        one = await mq.receive()
        assert (one.body, one.retries, one.is_dead) == (b"\x00one", None, False)
        assert await one.ack()
        assert not await one.ack()  # a second time says nothing, also not about the next message
        two = await mq.receive(timeout=5)
        assert (two.body, two.retries) == (b"two", 3)
        assert not await one.ack()
        assert await two.ack()


@both_and_uvloop
async def test_send_many(kind: Connect, broker: BrokerProcess) -> None:
    sent = [b"%04d" % number for number in range(50)]
    async with kind(url_of(broker)) as mq:
        assert await mq.send_many(iter(sent), retries=254) == 50
        for body in sent:
            message = await mq.receive(timeout=5)
            assert (message.body, message.retries) == (body, 254)
            assert await message.ack()


@both_and_uvloop
async def test_without_an_ack_it_comes_again_and_then_is_dead(kind: Connect, broker: BrokerProcess) -> None:
    async with kind(url_of(broker)) as mq:
        await mq.send(b"poison", retries=1)
        assert (await mq.receive(timeout=5)).retries == 1
    async with kind(url_of(broker)) as mq:
        assert (await mq.receive(timeout=5)).retries == 0
    async with kind(url_of(broker)) as mq:
        dead = await mq.receive_dead(timeout=5)
        assert (dead.body, dead.is_dead) == (b"poison", True)
        assert await dead.ack()


@both_and_uvloop
async def test_a_time_out_keeps_the_question_open(kind: Connect, broker: BrokerProcess) -> None:
    async with kind(url_of(broker)) as mq:
        with pytest.raises(TimedOut, match=r"no message within 0.05 s; the next call goes on waiting"):
            await mq.receive(timeout=0.05)
        with pytest.raises(NotSupported, match=r"a receive\(\) that timed out still waits"):
            await mq.receive_dead(timeout=0.05)
        await mq.send(b"late")
        message = await mq.receive(timeout=5)
        assert message.body == b"late"
        assert await message.ack()
        with pytest.raises(TimedOut):
            await mq.receive_dead(timeout=0.05)
        with pytest.raises(NotSupported, match=r"a receive_dead\(\) that timed out still waits"):
            await mq.receive(timeout=0.05)


@both_and_uvloop
async def test_one_message_at_a_time(kind: Connect, broker: BrokerProcess) -> None:
    async with kind(url_of(broker)) as mq:
        await mq.send_many([b"a", b"b"])
        first = await mq.receive(timeout=5)
        with pytest.raises(NotSupported, match="acknowledge the last one first"):
            await mq.receive(timeout=5)
        assert await first.ack()
        assert await (await mq.receive(timeout=5)).ack()


@both_and_uvloop
async def test_what_cannot_be_said_is_not_sent(kind: Connect, broker: BrokerProcess) -> None:
    async with kind(url_of(broker), payload_bytes_max=10) as mq:
        with pytest.raises(NotSupported, match="retries is 256"):
            await mq.send(b"x", retries=256)
        with pytest.raises(NotSupported, match="11 bytes is over 10"):
            await mq.send(b"x" * 11)
        await mq.send(b"fine")
        assert await (await mq.receive(timeout=5)).ack()


@both_and_uvloop
async def test_declined_by_a_listener_that_only_takes(kind: Connect, doors: Doors) -> None:
    async with kind(f"sspq+unix://{doors.file('send-only.sock')}") as mq:
        with pytest.raises(Declined, match="no message will come"):
            await mq.receive()
        with pytest.raises(Declined, match=r"no dead letter will come.*dead-letters = off"):
            await mq.receive_dead()


@both
async def test_declined_by_a_broker_that_stops(kind: Connect, spare: Spare) -> None:
    broker = spare()
    busy = await kind(url_of(broker))
    async with kind(url_of(broker)) as mq:
        await busy.send(b"work")
        await busy.flush()
        work = await busy.receive(timeout=5)
        waiting = asyncio.ensure_future(mq.receive())
        broker.signal(signal.SIGTERM)
        with pytest.raises(Declined):
            await waiting
        assert await work.ack()
        assert await asyncio.to_thread(broker.wait) == 0
    with pytest.raises(ConnectionLost) as raised:  # nobody has said that the acknowledgement was stored
        await busy.close()
    assert (raised.value.in_doubt, raised.value.verdicts_in_doubt) == (0, 1)


@both
async def test_after_kill_9(kind: Connect, spare: Spare) -> None:
    broker = spare()
    async with kind(url_of(broker), backoff_seconds_min=0.01) as mq:
        async with kind(f"rq://127.0.0.1:{broker.ports['rq']}") as sender:
            await sender.send("default", b"stored", retries=5)
        held = await mq.receive(timeout=5)
        await mq.send_many([b"a", b"b"])
        broker.kill()
        broker.start()
        assert not await held.ack()  # its connection is gone
        with pytest.raises(ConnectionLost) as raised:
            await mq.send(b"c")
        assert raised.value.in_doubt == 2
        again = await mq.receive(timeout=5)
        assert again.body == b"stored"
        assert await again.ack()


@both
async def test_one_who_waits_is_connected_again(kind: Connect, spare: Spare) -> None:
    broker = spare()
    async with kind(url_of(broker), backoff_seconds_min=0.01) as mq:
        waiting = asyncio.ensure_future(mq.receive())
        await asyncio.to_thread(broker.kill)
        await asyncio.to_thread(broker.start)
        async with kind(url_of(broker)) as sender:
            await sender.send(b"after")
        message = await waiting
        assert message.body == b"after"
        assert await message.ack()


def test_one_task_receives_at_a_time(broker: BrokerProcess) -> None:
    async def main() -> None:
        async with AsyncSspqClient(url_of(broker)) as mq:
            waiting = asyncio.ensure_future(mq.receive())
            await asyncio.sleep(0)
            with pytest.raises(NotSupported, match="another task is receiving"):
                await mq.receive()
            await mq.send(b"x")
            assert await (await waiting).ack()

    asyncio.run(asyncio.wait_for(main(), 20))
