"""The RQ clients against a real broker: receipts, requests, serving, broadcasts."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NoReturn

import pytest

from penstock.client import ConnectionLost, NotSupported, RqClient, RqRequest, TimedOut, Undelivered, rq_line
from penstock.client.core import CHUNK_BYTES
from tests.client.both import Connect, Seen, both, both_and_uvloop, take
from tests.client.conftest import Spare
from tests.server.harness import WAIT_SECONDS, BrokerProcess

Handler = Callable[[RqRequest], Awaitable[bytes | None]]


def url_of(*brokers: BrokerProcess) -> str:
    return "rq://" + ",".join(f"127.0.0.1:{broker.ports['rq']}" for broker in brokers)


def phpmq_url_of(broker: BrokerProcess) -> str:
    return f"phpmq://127.0.0.1:{broker.ports['phpmq']}"


async def shout(request: RqRequest) -> bytes:
    return request.body.upper()


async def ignore(_request: RqRequest) -> None:
    return None


# --- sending -------------------------------------------------------------------------------------------


@both_and_uvloop
async def test_send_has_a_receipt(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url_of(broker)) as rq, kind(phpmq_url_of(broker)) as mq:
        await rq.send(queue, b"\x00one")
        assert await rq.send_many(queue, (b"%d" % number for number in range(3000))) == 3000
        assert await rq.send_many(queue, []) == 0
        messages = await take(mq.consume(queue, prefetch=3001), 3001)
        assert [message.body for message in messages] == [b"\x00one", *(b"%d" % n for n in range(3000))]
        assert await mq.ack_many(messages) == 3001


@both_and_uvloop
async def test_more_messages_than_ids(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url_of(broker)) as rq:
        assert await rq.send_many(queue, (b"" for _ in range(40_000))) == 40_000


@both_and_uvloop
async def test_messages_that_were_never_sent_are_told_though_the_others_are_stored(
    kind: Connect, broker: BrokerProcess, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stuck(_line: rq_line.Line, _seconds: float) -> bool:
        return False

    monkeypatch.setattr(rq_line.Line, "drained", stuck)
    async with kind(url_of(broker)) as rq:
        told = "1 of 1 messages are stored, the others were not sent: the controller has taken nothing for"
        with pytest.raises(TimedOut, match=told) as raised:
            await rq.send_many(queue, [bytes(CHUNK_BYTES), b"in the second write"])
        assert (raised.value.sent, raised.value.in_doubt) == (1, 0)


@both
async def test_what_the_broker_refuses_is_undelivered(kind: Connect, spare: Spare) -> None:
    broker = spare("--limits-queues-max", "1")
    async with kind(url_of(broker)) as rq:
        await rq.send("first", b"x")
        with pytest.raises(Undelivered, match="0 of 2 messages are stored, the broker refused 2") as raised:
            await rq.send_many("second", [b"a", b"b"])
        assert raised.value.positions == (0, 1)
        with pytest.raises(Undelivered, match="no answer; no consumer had taken it"):
            await rq.request("third", b"?")


@both_and_uvloop
async def test_what_cannot_be_said_is_not_sent(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url_of(broker), payload_bytes_max=10) as rq:
        serving = await rq.serve(queue, shout)
        for call, complaint in (
            (rq.send(f"{queue}.dead", b"x"), "door to the dead letters"),
            (rq.send(queue, b"x" * 11), "the limit is 10"),
            (rq.send(queue, b"x", retries=256), "use 0 to 255"),
            (rq.request("", b"x"), "cannot be empty"),
            (rq.request(queue, b"x", 0), "seconds over 0"),
            (rq.request(queue, b"x", 70_000), "at most 65535"),
            (rq.broadcast("x" * 256, b"x"), "1 to 255 bytes"),
            (rq.serve(queue, shout), "served already"),
            (rq.serve("other", shout, max=65_536), "use 1 to 65535"),
            (rq.serve("other", shout, max=-1), "use 1 to 65535"),
            (rq.serve("other", shout, priority=256), "use 0 to 255"),
            (rq.serve("x" * 256, shout), "1 to 255 bytes"),
            (rq.cancel("never"), "is not served"),
        ):
            with pytest.raises(NotSupported, match=complaint):
                await call
        assert await serving.wait_turn(5)
        assert await rq.request(queue, b"fine", 5) == b"FINE"  # the connection has not suffered


# --- requests ------------------------------------------------------------------------------------------


@both_and_uvloop
async def test_request_and_serve(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url_of(broker)) as worker, kind(url_of(broker)) as rq:
        serving = await worker.serve(queue, shout, max=10)
        assert serving.queue == queue
        assert await serving.wait_turn(5)
        assert await rq.request(queue, b"hello", timeout=5) == b"HELLO"
        answers = await asyncio.gather(*(rq.request(queue, b"n%d" % n, 10) for n in range(50)))
        assert answers == [b"N%d" % n for n in range(50)]
        await serving.cancel()
        with pytest.raises(TimedOut, match=r"no answer within 0\.1 s; no consumer had taken it"):
            await rq.request(queue, b"too late", 0.1)
        serving = await worker.serve(queue, ignore)  # a queue can be served again
        assert await serving.wait_turn(5)
        assert await rq.request(queue, b"hello", 5) == b""


@both_and_uvloop
async def test_a_time_out_tells_whether_somebody_had_taken_it(
    kind: Connect, broker: BrokerProcess, queue: str
) -> None:
    release = asyncio.Event()

    async def slow(_request: RqRequest) -> bytes:
        await release.wait()
        return b"late"

    async with kind(url_of(broker)) as rq:
        serving = await rq.serve(queue, slow)
        assert await serving.wait_turn(5)
        with pytest.raises(TimedOut, match=r"no answer within 0\.3 s; a consumer had taken it"):
            await rq.request(queue, b"x", 0.3)
        release.set()
        assert await rq.request(queue, b"y", 5) == b"late"  # the late answer to x was not taken for it


@both_and_uvloop
async def test_several_queues_at_once(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async def whisper(request: RqRequest) -> bytes:
        return request.queue.encode() + request.body.lower()

    async with kind(url_of(broker)) as rq:
        for serving in (await rq.serve(queue + "1", shout), await rq.serve(queue + "2", whisper)):
            assert await serving.wait_turn(5)
        one, two = await asyncio.gather(rq.request(queue + "1", b"Ab", 5), rq.request(queue + "2", b"Ab", 5))
        assert (one, two) == (b"AB", queue.encode() + b"2ab")
        await rq.cancel(queue + "1")
        assert await rq.request(queue + "2", b"Ab", 5) == queue.encode() + b"2ab"


@both_and_uvloop
async def test_max_bounds_what_runs_at_once(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    running = most = 0
    full = asyncio.Event()

    async def count(_request: RqRequest) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            full.set()
        await full.wait()
        running -= 1

    async with kind(url_of(broker)) as rq:
        serving = await rq.serve(queue, count, max=3)
        assert await serving.wait_turn(5)
        await asyncio.gather(*(rq.request(queue, b"", 10) for _ in range(12)))
    assert most == 3


@both_and_uvloop
async def test_exclusive_consumers_take_turns(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url_of(broker)) as first, kind(url_of(broker)) as second:
        one = await first.serve(queue, shout, exclusive=True)
        assert await one.wait_turn(5)
        two = await second.serve(queue, ignore, exclusive=True)
        assert not await two.wait_turn(0.1)
        assert await second.request(queue, b"a", 5) == b"A"
        await one.cancel()
        assert await two.wait_turn(5)
        assert await second.request(queue, b"a", 5) == b""


@both_and_uvloop
async def test_the_higher_priority_is_served_first(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url_of(broker)) as first, kind(url_of(broker)) as second:
        low = await first.serve(queue, ignore, priority=10)
        high = await second.serve(queue, shout, priority=30)
        assert await low.wait_turn(5)
        assert await high.wait_turn(5)
        assert [await first.request(queue, b"a", 5) for _ in range(5)] == [b"A"] * 5


@both_and_uvloop
async def test_broadcasts(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    heard: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()

    def listener(number: int) -> Callable[[bytes], Awaitable[None]]:
        async def listen(body: bytes) -> None:
            heard.put_nowait((number, body))

        return listen

    async def fail(_body: bytes) -> None:
        raise ValueError("not a word for me")

    async with kind(url_of(broker)) as first, kind(url_of(broker)) as second, kind(url_of(broker)) as third:
        for number, client in enumerate((first, second)):
            # Priority 0 is for broadcasts only.
            serving = await client.serve(queue, ignore, priority=0, on_broadcast=listener(number))
            assert await serving.wait_turn(5)
        serving = await third.serve(queue, ignore, priority=0, on_broadcast=fail)
        assert await serving.wait_turn(5)
        await first.broadcast(queue, b"all")
        assert sorted([await heard.get(), await heard.get()]) == [(0, b"all"), (1, b"all")]
        await first.broadcast("nobody-there", b"")


@both_and_uvloop
async def test_messages_without_an_answer_are_settled_when_the_handler_is_done(
    kind: Connect, broker: BrokerProcess, queue: str
) -> None:
    begun, release = asyncio.Event(), asyncio.Event()
    seen = Seen()

    async def work(request: RqRequest) -> bytes:
        seen.note((request.body, request.wants_reply))
        begun.set()
        await release.wait()
        return b"goes nowhere"

    async with kind(url_of(broker)) as rq:
        await rq.send(queue, b"job")
        async with kind(url_of(broker), drain_seconds=0) as dying:
            await dying.serve(queue, work)
            await begun.wait()
        # Its handler was not done when it left: the message comes again.
        release.set()
        await rq.serve(queue, work)
        await seen.reaches(2)
        assert seen.things == [(b"job", False)] * 2
    async with kind(phpmq_url_of(broker)) as mq:
        assert await take(mq.consume(queue, timeout=0.1), 1) == []


# --- handlers that fail --------------------------------------------------------------------------------


@both_and_uvloop
async def test_a_handler_that_raises_gives_the_request_back(
    kind: Connect, broker: BrokerProcess, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    bodies = []

    async def second_time_lucky(request: RqRequest) -> bytes:
        bodies.append(request.body)
        if len(bodies) == 1:
            raise ValueError("not today")
        return b"done"

    async with kind(url_of(broker), backoff_seconds_min=0.01) as worker, kind(url_of(broker)) as rq:
        await worker.serve(queue, second_time_lucky)
        assert await rq.request(queue, b"x", 10) == b"done"
        assert bodies == [b"x", b"x"]
        # Not caplog.text: where Spark has run in this process, that is not written as pytest writes it.
        told = [it for it in caplog.records if "the handler failed; the request is given out again" in it.msg]
        assert [str(it.exc_info[1]) for it in told if it.exc_info] == ["not today"]
        assert await rq.request(queue, b"y", 10) == b"done"


@both_and_uvloop
async def test_handlers_beside_one_that_raises_finish(
    kind: Connect, broker: BrokerProcess, queue: str
) -> None:
    failed = asyncio.Event()
    seen = Seen()

    async def work(request: RqRequest) -> bytes:
        seen.note(request.body)
        if request.body == b"bad" and not failed.is_set():
            failed.set()
            raise ValueError("bad")
        await failed.wait()
        return request.body

    async with kind(url_of(broker), backoff_seconds_min=0.01) as worker, kind(url_of(broker)) as rq:
        serving = await worker.serve(queue, work, max=2)
        assert await serving.wait_turn(5)
        good = asyncio.ensure_future(rq.request(queue, b"good", 10))
        await seen.reaches(1)
        assert await rq.request(queue, b"bad", 10) == b"bad"
        assert await good == b"good"
        assert seen.things == [b"good", b"bad", b"bad"]


@both
async def test_a_handler_that_waits_for_something_cancelled(
    kind: Connect, broker: BrokerProcess, queue: str
) -> None:
    """It has failed, as by any error: the request comes again."""
    seen = Seen()

    async def handle(request: RqRequest) -> bytes:
        seen.note(request)
        if len(seen.things) == 1:
            raise asyncio.CancelledError
        return b"done"

    async with kind(url_of(broker)) as worker, kind(url_of(broker)) as asker:
        await worker.serve(queue, handle)
        assert await asker.request(queue, b"x", timeout=20) == b"done"


@pytest.mark.parametrize("ending", [SystemExit(3), StopIteration(), KeyboardInterrupt()])
def test_a_handler_in_a_thread_that_exits(broker: BrokerProcess, queue: str, ending: BaseException) -> None:
    """It has failed, as by any error, and neither its client nor its place ends with it."""
    bodies = []

    def second_time_lucky(request: RqRequest) -> bytes:
        bodies.append(request.body)
        if len(bodies) == 1:
            raise ending
        return b"done"

    with RqClient(url_of(broker), backoff_seconds_min=0.01) as worker, RqClient(url_of(broker)) as rq:
        worker.serve(queue, second_time_lucky)
        assert rq.request(queue, b"x", 10) == b"done"
        worker.send(f"{queue}-other", b"its loop still runs")
    assert bodies == [b"x", b"x"]


def test_threads_of_a_queue_that_is_served_again_and_again(broker: BrokerProcess, queue: str) -> None:
    with RqClient(url_of(broker)) as worker, RqClient(url_of(broker)) as asker:
        for _ in range(5):
            serving = worker.serve(queue, lambda _: b"done")
            assert asker.request(queue, b"x", timeout=20) == b"done"
            serving.cancel()
        threads = [it for it in threading.enumerate() if it.name.startswith(f"penstock-rq-{queue}")]
        assert 1 <= len(threads) <= 2  # the last but one may be about to end


@both_and_uvloop
async def test_on_error_answers_instead(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async def bad(_request: RqRequest) -> bytes:
        raise KeyError("missing")

    async def excuse(request: RqRequest, error: Exception) -> bytes:
        return request.body + b": " + type(error).__name__.encode()

    async with kind(url_of(broker)) as rq:
        serving = await rq.serve(queue, bad, on_error=excuse)
        assert await serving.wait_turn(5)
        assert await rq.request(queue, b"x", 5) == b"x: KeyError"


@both_and_uvloop
async def test_an_answer_that_is_none(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    wrong: list[object] = ["text", b"x" * 101]
    told = []

    async def odd(_request: RqRequest) -> object:
        return wrong.pop(0)

    async def excuse(_request: RqRequest, error: Exception) -> None:
        told.append(str(error))

    async with kind(url_of(broker), payload_bytes_max=100) as rq:
        serving = await rq.serve(queue, odd, on_error=excuse)
        assert await serving.wait_turn(5)
        assert [await rq.request(queue, b"", 5) for _ in range(2)] == [b"", b""]
        assert told == [
            "an answer is bytes or None, not str",
            "an answer of 101 bytes is over payload_bytes_max, 100",
        ]


# --- the end -------------------------------------------------------------------------------------------


@both_and_uvloop
async def test_close_waits_for_handlers(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    begun, release = asyncio.Event(), asyncio.Event()

    async def slow(_request: RqRequest) -> bytes:
        begun.set()
        await release.wait()
        return b"done"

    async with kind(url_of(broker)) as rq:
        worker = await kind(url_of(broker))
        await worker.serve(queue, slow)
        answer = asyncio.ensure_future(rq.request(queue, b"", 10))
        await begun.wait()
        closing = asyncio.ensure_future(worker.close())
        assert not await worker_closed(closing)
        release.set()
        await closing
        assert await answer == b"done"
        await worker.close()  # a second time does nothing
        with pytest.raises(ConnectionLost, match="this client is closed"):
            await worker.send(queue, b"")


async def worker_closed(closing: "asyncio.Future[None]") -> bool:
    """Whether it has closed although its handler is not done."""
    done, _ = await asyncio.wait([closing], timeout=0.1)
    return bool(done)


@both_and_uvloop
async def test_wait(kind: Connect, broker: BrokerProcess) -> None:
    rq = await kind(url_of(broker))
    assert not await rq.wait(0.05)
    waiting = asyncio.ensure_future(rq.wait())
    await asyncio.sleep(0)
    await rq.close()
    assert await asyncio.wait_for(waiting, 5)


@both
async def test_a_turn_that_will_not_come(kind: Connect, spare: Spare) -> None:
    broker = spare()
    async with kind(url_of(broker), reconnect_seconds=0.2, backoff_seconds_min=0.01) as rq:
        serving = await rq.serve("q", ignore)
        assert await serving.wait_turn(5)
        broker.kill()
        with pytest.raises(ConnectionLost, match="no rq broker could be reached"):
            await rq.wait()
        with pytest.raises(ConnectionLost, match="no rq broker could be reached"):
            await serving.wait_turn()


@both
async def test_a_search_that_ends_by_a_fault(
    kind: Connect, broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody goes on waiting for what it would have found."""

    async def dial(*_: object) -> NoReturn:
        raise MemoryError

    monkeypatch.setattr(rq_line, "dial", dial)
    with pytest.raises(ConnectionLost, match="MemoryError"):
        await kind(url_of(broker))


@both_and_uvloop
async def test_calls_that_are_open_when_the_client_is_closed(
    kind: Connect, broker: BrokerProcess, queue: str
) -> None:
    rq = await kind(url_of(broker), drain_seconds=0.1)
    asking = asyncio.ensure_future(rq.request(queue, b"nobody answers", 20))
    async with kind(phpmq_url_of(broker)) as mq:
        await take(mq.consume(queue), 1)  # so it has been asked
        await rq.close()
    with pytest.raises((ConnectionLost, Undelivered)):
        await asking


def test_a_call_that_begins_while_another_thread_closes(
    broker: BrokerProcess, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends, in order or with the error of a client that is closed, however far the close has come."""
    rq = RqClient(url_of(broker))
    began, closed = threading.Event(), threading.Event()
    submit = asyncio.run_coroutine_threadsafe

    def slowly(call: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> "Future[None]":
        if threading.current_thread() is not threading.main_thread():
            began.set()
            closed.wait(0.2)
        return submit(call, loop)

    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", slowly)
        sending = pool.submit(rq.send, queue, b"x")
        assert began.wait(WAIT_SECONDS)
        rq.close()
        closed.set()
        with suppress(ConnectionLost):
            assert sending.result(WAIT_SECONDS) is None
