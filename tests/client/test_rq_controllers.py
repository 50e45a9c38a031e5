"""The RQ clients and several controllers: full, gone, closing, silent; and a broker that is killed."""

import asyncio
import signal
import socket
from typing import Any

import pytest

from penstock.client import ConnectionLost, RqRequest, TimedOut, Undelivered
from penstock.client.rq_line import Line
from penstock.model.batch import Batch
from penstock.protocols import rq
from tests.client.both import Connect, Seen, both, both_and_uvloop, take
from tests.client.conftest import Spare
from tests.client.controller import Controller
from tests.server.harness import BrokerProcess
from tests.server.harness import rq as encoded


def url_of(*where: BrokerProcess | Controller) -> str:
    ports = (one.port if isinstance(one, Controller) else one.ports["rq"] for one in where)
    return "rq://" + ",".join(f"127.0.0.1:{port}" for port in ports)


async def shout(request: RqRequest) -> bytes:
    return request.body.upper()


def request_frame(ident: int, queue: bytes, body: bytes, timeout_seconds: int) -> bytes:
    return encoded(1, (128, ident), (160, queue), (97, timeout_seconds), (224, body), 10)


async def asked(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    """Until a request has come to the broker; it goes back to its queue."""
    async with kind(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
        assert len(await take(mq.consume(queue), 1)) == 1


CONSUME = rq.encode_consume("q", 1, 20, False)
CONSUMING = rq.encode_consuming("q", 1)


def delivery(ident: int, body: bytes) -> bytes:
    return encoded(1, (160, b"q"), (224, body), (128, ident), 10)


# --- which controller ----------------------------------------------------------------------------------


@both_and_uvloop
async def test_the_first_that_can_be_reached(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"rq://127.0.0.1:{nobody.getsockname()[1]},127.0.0.1:{broker.ports['rq']}"
        async with kind(url) as node:
            await node.send(queue, b"x")


@both
async def test_a_full_controller_moves_to_the_back(
    kind: Connect, broker: BrokerProcess, spare: Spare
) -> None:
    full = spare("--limits-connections-max", "1")
    async with kind(url_of(full)):
        with pytest.raises(ConnectionLost, match="no rq broker could be reached"):
            await kind(url_of(full), reconnect_seconds=0)
        async with kind(url_of(full, broker)) as node:
            assert await node.send_many("second-choice", [b"x"]) == 1
    assert "refused a connection: 1 are open" in full.log()


@both_and_uvloop
async def test_all_full(kind: Connect) -> None:
    one, two = Controller(), Controller()
    connecting = asyncio.ensure_future(open_client(kind, url_of(one, two), reconnect_seconds=0))
    nodes = [await one.accept(answer=rq.SERVER_FULL), await two.accept(answer=rq.SERVER_FULL)]
    with pytest.raises(
        ConnectionLost, match=r"\(2 attempts\).*: the controller is full;.*: the controller is full"
    ):
        await connecting
    for node in nodes:
        node.close()
    one.close()
    two.close()


async def open_client(kind: Connect, url: str, **options: float) -> Any:
    return await kind(url, **options)


@both_and_uvloop
async def test_one_that_does_not_speak_rq(kind: Connect) -> None:
    deaf = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(ConnectionLost, match=r"does not answer a ping within 0\.1 s"):
        await kind(f"rq://127.0.0.1:{deaf.getsockname()[1]}", connect_seconds=0.1)
    deaf.close()


# --- lost connections ----------------------------------------------------------------------------------


@both
async def test_after_kill_9_everything_goes_on(kind: Connect, spare: Spare) -> None:
    broker = spare()
    options = {"backoff_seconds_min": 0.01}
    async with kind(url_of(broker), **options) as worker, kind(url_of(broker), **options) as node:
        serving = await worker.serve("q", shout)
        assert await serving.wait_turn(5)
        assert await node.request("q", b"a", 5) == b"A"
        hanging = asyncio.ensure_future(node.request("nobody", b"b", 20))
        await asked(kind, broker, "nobody")
        await asyncio.to_thread(broker.kill)
        with pytest.raises(ConnectionLost, match="had taken it; ask again if that does no harm") as raised:
            await hanging
        assert raised.value.in_doubt == 1
        await asyncio.to_thread(broker.start)
        assert await node.request("q", b"c", 10) == b"C"  # the worker has found its way back, too


@both_and_uvloop
async def test_a_send_without_a_receipt_is_in_doubt(kind: Connect) -> None:
    controller = Controller()
    connecting = asyncio.ensure_future(open_client(kind, url_of(controller), reconnect_seconds=0))
    at_controller = await controller.accept()
    node = await connecting
    sending = asyncio.ensure_future(node.send_many("q", [b"a", b"b", b"c"]))
    frame = encoded(1, (128, 0), (160, b"q"), (224, b"a"), 33, 10)
    await at_controller.hear(3 * len(frame))
    await at_controller.say(rq.encode_delivered([1]))
    at_controller.close()
    controller.close()
    with pytest.raises(ConnectionLost, match="1 of 3 messages are stored, 2 are in doubt") as raised:
        await sending
    assert (raised.value.in_doubt, raised.value.positions) == (2, (0, 2))
    with pytest.raises(ConnectionLost, match="0 of 0 messages are stored, the others were not sent"):
        await node.send("q", b"d")
    await node.close()


@both
async def test_a_controller_that_takes_no_more_in_the_middle(
    kind: Connect, broker: BrokerProcess, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has confirmed what it got; the rest was not sent, and that is told."""

    async def not_in_time(line: Line, seconds: float) -> bool:
        return False

    async with kind(url_of(broker)) as node:
        with monkeypatch.context() as patch:
            patch.setattr(Line, "drained", not_in_time)
            with pytest.raises(
                TimedOut, match="1024 of 1024 messages are stored, the others were not"
            ) as raised:
                await node.send_many(queue, [b"x"] * 3000)
        assert (raised.value.sent, raised.value.in_doubt) == (1024, 0)


@both_and_uvloop
async def test_a_request_says_a_time_out_only_where_it_has_one(kind: Connect) -> None:
    controller = Controller()
    options = {"operation_seconds": float("inf"), "drain_seconds": 0}
    connecting = asyncio.ensure_future(open_client(kind, url_of(controller), **options))
    at_controller = await controller.accept()
    node = await connecting
    for seconds, more in ((None, []), (2.5, [(97, 3)])):
        asking = asyncio.ensure_future(node.request("q", b"?", seconds))
        await at_controller.expect(encoded(1, (128, 0), (160, b"q"), *more, (224, b"?"), 10))
        await at_controller.say(rq.encode_delivered([0]) + rq.encode_replies([0], Batch.of([b"!"])))
        assert await asking == b"!"
    closing = asyncio.ensure_future(node.close())
    await at_controller.hear(100)
    at_controller.close()
    controller.close()
    await closing


@both_and_uvloop
async def test_a_receipt_that_does_not_come(kind: Connect) -> None:
    controller = Controller()
    connecting = asyncio.ensure_future(open_client(kind, url_of(controller), drain_seconds=0))
    at_controller = await controller.accept()
    node = await connecting
    with pytest.raises(
        TimedOut, match=r"0 of 2 messages are stored, and no other receipt came within 0\.1 s"
    ) as raised:
        await node.send_many("q", [b"a", b"b"], timeout=0.1)
    assert (raised.value.in_doubt, raised.value.positions) == (2, (0, 1))
    at_controller.close()
    controller.close()
    await node.close()


@both
async def test_a_time_out_holds_also_while_nobody_can_be_reached(kind: Connect, spare: Spare) -> None:
    broker = spare()
    async with kind(url_of(broker)) as node:
        await asyncio.to_thread(broker.kill)
        for call in (node.request("q", b"x", 0.2), node.send("q", b"x", timeout=0.2)):
            with pytest.raises(TimedOut, match=r"no connection.* within 0\.2 s; nothing was sent"):
                await call


@both
async def test_one_who_serves_is_told_when_nobody_can_be_found(kind: Connect, spare: Spare) -> None:
    broker = spare()
    async with kind(url_of(broker), reconnect_seconds=0.2, backoff_seconds_min=0.05) as node:
        await node.serve("q", shout)
        waiting = asyncio.ensure_future(node.wait())
        await asyncio.to_thread(broker.kill)
        with pytest.raises(ConnectionLost, match="no rq broker could be reached"):
            await waiting


# --- CLOSING -------------------------------------------------------------------------------------------


@both
async def test_a_controller_that_stops_lets_work_finish_and_is_left(kind: Connect, spare: Spare) -> None:
    one, two = spare(), spare()
    begun, release = asyncio.Event(), asyncio.Event()

    async def slow(request: RqRequest) -> bytes:
        if request.body == b"slow":
            begun.set()
            await release.wait()
        return request.body.upper()

    async with kind(url_of(one, two)) as node:
        serving = await node.serve("q", slow, max=2)
        assert await serving.wait_turn(5)
        asking = asyncio.ensure_future(node.request("q", b"slow", 20))
        await begun.wait()
        one.signal(signal.SIGTERM)
        # The queue is served at the other controller now, and everything new goes there ...
        async with kind(url_of(two)) as witness:
            assert await witness.request("q", b"there", 10) == b"THERE"
        assert await node.request("q", b"new", 10) == b"NEW"
        assert one.running
        # ... and what had begun at the first one is finished there.
        release.set()
        assert await asking == b"SLOW"
        assert await asyncio.to_thread(one.wait) == 0


@both
async def test_requests_that_wait_at_a_controller_that_stops_are_undelivered(
    kind: Connect, spare: Spare
) -> None:
    broker = spare()
    async with kind(url_of(broker), reconnect_seconds=0) as node:
        asking = asyncio.ensure_future(node.request("nobody", b"x", 20))
        await asked(kind, broker, "nobody")
        broker.signal(signal.SIGTERM)
        with pytest.raises(Undelivered):
            await asking
        assert await asyncio.to_thread(broker.wait) == 0


@both_and_uvloop
async def test_a_controller_that_stops_at_once_is_not_used(kind: Connect) -> None:
    one, two = Controller(), Controller()
    connecting = asyncio.ensure_future(open_client(kind, url_of(one, two)))
    first = await one.accept(answer=rq.PONG + rq.CLOSING)
    second = await two.accept()
    node = await connecting
    await first.expect_end()
    asking = asyncio.ensure_future(node.request("q", b"?", 20))
    await second.expect(request_frame(0, b"q", b"?", 20))
    await second.say(rq.encode_replies([0], Batch.of([b"!"])))
    assert await asking == b"!"
    closing = asyncio.ensure_future(node.close())
    await second.expect(rq.CLOSING)
    for end in (first, second, one, two):
        end.close()
    await closing


# --- silence -------------------------------------------------------------------------------------------


@both_and_uvloop
async def test_a_silent_controller_is_left_for_the_next(kind: Connect) -> None:
    silent, other = Controller(), Controller()
    connecting = asyncio.ensure_future(open_client(kind, url_of(silent, other), silence_seconds=0.1))
    first = await silent.accept()
    node = await connecting
    asking = asyncio.ensure_future(node.request("q", b"?", 20))
    await first.expect(request_frame(0, b"q", b"?", 20))
    await first.expect(rq.PING)  # after a time of silence
    second = await other.accept()  # after another one
    await first.expect_end()  # dropped, because nothing is consumed there
    with pytest.raises(ConnectionLost, match="the controller does not answer"):
        await asking
    asking = asyncio.ensure_future(node.request("q", b"!", 20))
    await second.expect(request_frame(0, b"q", b"!", 20))
    await second.say(rq.encode_delivered([0]) + rq.encode_replies([0], Batch.of([b"yes"])))
    assert await asking == b"yes"
    closing = asyncio.ensure_future(node.close())
    for one in (first, second, silent, other):
        one.close()
    await closing


@both_and_uvloop
async def test_a_silent_controller_that_is_consumed_from_is_kept(kind: Connect) -> None:
    seen = Seen()

    async def handle(request: RqRequest) -> bytes:
        seen.note(request.body)
        return request.body.upper()

    silent, other = Controller(), Controller()
    connecting = asyncio.ensure_future(open_client(kind, url_of(silent, other), silence_seconds=0.2))
    first = await silent.accept()
    node = await connecting
    serving = asyncio.ensure_future(node.serve("q", handle))
    await first.expect(CONSUME)
    await serving
    await first.say(CONSUMING)
    await first.expect(rq.PING)
    second = await other.accept()
    await second.expect(CONSUME)  # the queue is asked for at the next controller, too
    await second.say(CONSUMING + delivery(3, b"second"))
    await second.expect(rq.encode_delivered([3]) + rq.encode_replies([3], Batch.of([b"SECOND"])))
    # The first one was only slow: what it has to give is still taken, and then it is left in order.
    await first.say(delivery(5, b"first"))
    answers = rq.encode_delivered([5]) + rq.CLOSING + rq.encode_replies([5], Batch.of([b"FIRST"]))
    await first.expect(answers)
    await first.expect_end()
    assert seen.things == [b"second", b"first"]
    closing = asyncio.ensure_future(node.close())
    for one in (first, second, silent, other):
        one.close()
    await closing


@both_and_uvloop
async def test_a_controller_that_answers_pings_is_kept(kind: Connect) -> None:
    controller = Controller()
    connecting = asyncio.ensure_future(open_client(kind, url_of(controller), silence_seconds=0.05))
    at_controller = await controller.accept()
    node = await connecting
    for _ in range(5):
        await at_controller.expect(rq.PING)
        await at_controller.say(rq.PONG)
    await at_controller.say(rq.PING)
    await at_controller.expect(rq.PONG)
    closing = asyncio.ensure_future(node.close())
    await at_controller.expect(rq.CLOSING)
    await at_controller.expect_end()
    at_controller.close()
    await closing
    controller.close()


@both_and_uvloop
async def test_one_that_is_heard_again_before_another_was_found(kind: Connect) -> None:
    slow, other = Controller(), Controller()
    url = url_of(slow, other)
    connecting = asyncio.ensure_future(open_client(kind, url, silence_seconds=0.1, connect_seconds=20))
    first = await slow.accept()
    node = await connecting
    await first.expect(rq.PING)
    second = await other.accept(answer=b"")  # the client looks for another one, which says nothing either
    asking = asyncio.ensure_future(node.request("q", b"?", 20))
    await first.say(rq.PONG)
    await second.expect_end()
    await first.expect(request_frame(0, b"q", b"?", 20))
    await first.say(rq.encode_replies([0], Batch.of([b"late"])))
    assert await asking == b"late"
    closing = asyncio.ensure_future(node.close())
    for one in (first, second, slow, other):
        one.close()
    await closing
