"""The HTTP client, over threads and over asyncio: receipts, keys, looks, doors, and connections that end."""

import asyncio
import socket
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.client import (
    BatchReceipt,
    ConnectionLost,
    HttpClient,
    NotSupported,
    PhpmqClient,
    Refused,
    http_core,
)
from penstock.client.http_core import Answer, HttpCore, Request, answer_of
from penstock.client.options import Options
from tests.client.both import Connect, both, both_and_uvloop
from tests.client.conftest import Doors, Spare
from tests.server.harness import WAIT_SECONDS, BrokerProcess


def url(broker: BrokerProcess) -> str:
    return f"http://127.0.0.1:{broker.ports['http']}"


# --- sending -----------------------------------------------------------------------------------------


@both_and_uvloop
async def test_a_receipt_says_where_the_message_is(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url(broker)) as api:
        first = await api.send(queue, b"\x00\xff", ttl=60, retries=3)
        second = await api.send(queue, bytearray(b"two"))
        assert (first.offset, second.offset, first.repeated) == (0, 1, False)
        messages = await api.peek(queue)
    assert [(it.offset, it.id, it.value) for it in messages] == [
        (0, first.id, b"\x00\xff"),
        (1, second.id, b"two"),
    ]
    assert (messages[0].state, messages[0].retries, messages[0].protocol) == ("ready", 3, "http")
    assert messages[0].ttl in range(1, 61)
    assert (messages[1].ttl, messages[1].expires, messages[1].retries, messages[1].consumer) == (None,) * 4
    assert timedelta() <= datetime.now(UTC) - messages[0].time < timedelta(minutes=1)
    assert messages[0].expires == messages[0].time + timedelta(seconds=60)


@both
async def test_a_key_stores_once(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url(broker)) as api:
        first = await api.send(queue, b"x", key="k")
        again = await api.send(queue, b"x", key="k")
        assert (first.repeated, again.repeated) == (False, True)
        assert (again.offset, again.id) == (first.offset, first.id)
        with pytest.raises(Refused) as raised:
            await api.send(queue, b"y", key="k")
        assert (raised.value.status, raised.value.name) == (409, "key-reused")
        assert "use a new key for what is new" in str(raised.value)


@both
async def test_many_messages_of_any_size(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    bodies = [
        *(b"%06d" % number for number in range(12_000)),
        b"\xff\x00",
        '"quoted" \\ \n\u2028 €'.encode(),
        b"",
        b"L" * (3 << 20),  # more than a batch has
        *(b"x" * 400_000 for _ in range(4)),
    ]
    async with kind(url(broker)) as api:
        receipts = await api.send_many(queue, iter(bodies), retries=9)
        assert sum(receipt.count for receipt in receipts) == len(bodies)
        assert receipts[0].offset_start == 0
        assert all(one.offset_end == two.offset_start for one, two in pairwise(receipts))
        assert max(receipt.count for receipt in receipts) == 10_000
        assert await api.send_many(queue, []) == []
        found: list[bytes] = []
        while len(found) < len(bodies):
            messages = await api.peek(queue, len(found), 5000)
            found += [message.value for message in messages]
            assert {message.retries for message in messages} == {9}
    assert found == bodies


@both
async def test_a_call_with_a_key_can_be_repeated_as_a_whole(
    kind: Connect, broker: BrokerProcess, queue: str
) -> None:
    bodies = [b"%05d" % number for number in range(25_000)]
    async with kind(url(broker)) as api:
        before = await api.send_many(queue, bodies[:20_000], key="k")
        assert [receipt.count for receipt in before] == [10_000, 10_000]
        again = await api.send_many(queue, bodies, key="k")
        assert [receipt.repeated for receipt in again] == [True, True, False]
        assert [receipt.offset_start for receipt in again] == [0, 10_000, 20_000]
        assert (await api.queue(queue)).offset_end == 25_000


@both
async def test_what_is_refused_in_the_middle(kind: Connect, spare: Spare, queue: str, tmp_path: Path) -> None:
    config = tmp_path / "bounded.toml"
    config.write_text(f'[queue."{queue}"]\nmax-bytes = 15000\n')
    broker = spare("--http", "127.0.0.1:0", "--config", str(config))
    async with kind(url(broker)) as api:
        with pytest.raises(Refused) as raised:
            await api.send_many(queue, [b"x"] * 20_000)
        assert (raised.value.status, raised.value.name, raised.value.stored) == (429, "queue-full", 10_000)
        assert str(raised.value).endswith("; the first 10000 messages of this call are stored")
        assert (await api.queue(queue)).ready == 10_000
        with pytest.raises(Refused) as raised:
            await api.send(queue, bytes(10_000))
        assert raised.value.stored == 0


@both
async def test_a_body_that_the_broker_does_not_want(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    """It says so before it has read it, and closes; the client goes on with another connection."""
    async with kind(url(broker)) as api:
        for _ in range(3):
            with pytest.raises(Refused, match=r"\[http\] body-bytes-max") as raised:
                await api.send(queue, bytes(20 << 20))
            assert (raised.value.status, raised.value.name) == (413, "body-too-large")
        assert (await api.send(queue, b"small")).offset == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"ttl": 0}, "queue 'q': ttl is 0: use whole seconds from 1"),
        ({"retries": 256}, "queue 'q': retries is 256: use 0 to 255"),
        ({"key": ""}, "use 1 to 200 printable ASCII characters"),
        ({"key": " a"}, "no space at the ends"),
        ({"key": "a\r\nb"}, "use 1 to 200 printable ASCII characters"),
        ({"key": "x" * 201}, "use 1 to 200 printable ASCII characters"),
        ({"queue": "q.dead"}, "cannot be sent to: it is the door to the dead letters"),
        ({"queue": ""}, "a queue name cannot be empty"),
        ({"body": bytes(101)}, "a message of 101 bytes; payload_bytes_max of this client is 100"),
    ],
)
def test_what_cannot_be_said_is_not_sent(arguments: dict[str, Any], complaint: str) -> None:
    core = HttpCore(Options.of(payload_bytes_max=100))
    given = {"queue": "q", "body": b"x", "ttl": None, "retries": None, "key": None, **arguments}
    with pytest.raises(NotSupported, match=complaint):
        core.send(**given)
    bodies = [given.pop("body")]
    with pytest.raises(NotSupported, match=complaint):
        list(core.batches(bodies=bodies, **given))


def test_text_is_no_message() -> None:
    core = HttpCore(Options.of())
    with pytest.raises(TypeError, match=r"a message is bytes, not str; use text.encode\(\)"):
        core.send("q", "text", None, None, None)  # type: ignore[arg-type]


def test_the_key_of_a_batch_must_fit_as_well() -> None:
    core = HttpCore(Options.of())
    assert len(list(core.batches("q", [b"x"], None, None, "x" * 198))) == 1
    with pytest.raises(NotSupported, match="in send_many the number of the batch is put behind it"):
        list(core.batches("q", [b"x"], None, None, "x" * 199))


# --- looking -----------------------------------------------------------------------------------------


@both
async def test_looking_takes_nothing(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    async with kind(url(broker)) as api:
        await api.send_many(queue, [b"%d" % number for number in range(2500)])
        assert [it.offset for it in await api.peek(queue, 2490)] == list(range(2490, 2500))
        assert len(await api.peek(queue)) == 100
        assert [it.value for it in await api.peek(queue, 10, 1500)] == [b"%d" % n for n in range(10, 1510)]
        assert len(await api.peek(queue, limit=10_000)) == 2500
        assert await api.peek(queue, state="dead") == []
        info = await api.queue(queue)
        assert (info.name, info.ready, info.offset_end, info.paused) == (queue, 2500, 2500, False)
        assert info.policy["durability"] == "commit"
        assert info.dead_reasons == {}
        (listed,) = [it for it in await api.queues() if it.name == queue]
        assert (listed.ready, listed.bytes) == (2500, info.bytes)
        for arguments in ({"state": "alive"}, {"limit": 0}):
            with pytest.raises(NotSupported):
                await api.peek(queue, **arguments)
        for look in (api.peek, api.queue):
            with pytest.raises(NotSupported, match=r"look at them with peek\('orders', state='dead'\)"):
                await look("orders.dead")
            with pytest.raises(NotSupported, match="a queue name cannot be empty"):
                await look("")


@both
async def test_states(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    with PhpmqClient(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
        mq.send_many(queue, [b"done", b"bad", b"held", b"ready"])
        messages = mq.consume(queue, count=3)
        next(messages).ack()
        next(messages).reject()
        next(messages)
        async with kind(url(broker)) as api:

            async def shown(state: str) -> list[bytes]:
                return [message.value for message in await api.peek(queue, state=state)]

            while await shown("dead") != [b"bad"] or await shown("held") != [b"held"]:
                await asyncio.sleep(0.01)
            assert (await shown("ready"), await shown("gone")) == ([b"ready"], [b"done"])
            (dead,) = await api.peek(queue, state="dead")
            assert (dead.reason, dead.attempts) == ("rejected", 1)
            (held,) = await api.peek(queue, state="held")
            assert held.consumer is not None
            assert held.consumer.startswith("phpmq:127.0.0.1")
            assert (await api.queue(queue)).dead_reasons == {"rejected": 1}


@both
async def test_a_queue_that_is_not_there(kind: Connect, broker: BrokerProcess) -> None:
    async with kind(url(broker)) as api:
        with pytest.raises(Refused) as raised:
            await api.queue("nowhere")
        assert (raised.value.status, raised.value.name) == (404, "queue-not-found")
        assert "'nowhere'" in raised.value.detail


@both
async def test_names_with_anything_in_them(kind: Connect, broker: BrokerProcess) -> None:
    async with kind(url(broker)) as api:
        for name in ("x/y", "a b?c=d", "%2F", "é"):
            offset = (await api.send(name, b"x")).offset
            assert (await api.peek(name, offset))[0].value == b"x"
            assert (await api.queue(name)).name == name


# --- doors -------------------------------------------------------------------------------------------


@both_and_uvloop
async def test_tls(kind: Connect, doors: Doors, queue: str) -> None:
    async with kind(doors.tls("http"), cafile=doors.file("ca.pem")) as api:
        assert (await api.send(queue, bytes(2 << 20))).offset == 0
        assert (await api.queue(queue)).bytes == 2 << 20
    with pytest.raises(ConnectionLost, match=r"no http broker could be reached .* certificate verify failed"):
        await kind(doors.tls("http"))


@both
async def test_a_unix_socket(kind: Connect, spare: Spare, queue: str, tmp_path: Path) -> None:
    spare("--http", f"unix:{tmp_path}/http.sock")
    async with kind(f"http+unix://{tmp_path}/http.sock") as api:
        assert (await api.send(queue, b"x")).offset == 0


@both
async def test_tokens(kind: Connect, spare: Spare, queue: str, tmp_path: Path) -> None:
    config = tmp_path / "tokens.toml"
    config.write_text(
        "".join(
            f'[[http.tokens]]\nname = "{role}"\ntoken = "{role}-token-0123456789abcdef"\nrole = "{role}"\n'
            for role in ("read", "operate")
        )
    )
    broker = spare("--http", "127.0.0.1:0", "--config", str(config))
    async with kind(url(broker), token="operate-token-0123456789abcdef") as api:
        await api.send(queue, b"x")
    async with kind(url(broker), token="read-token-0123456789abcdef") as api:
        assert len(await api.peek(queue)) == 1
        with pytest.raises(Refused) as raised:
            await api.send(queue, b"x")
        assert (raised.value.status, raised.value.name) == (403, "forbidden")
    for options in ({}, {"token": "wrong"}):
        async with kind(url(broker), **options) as api:
            with pytest.raises(Refused) as raised:
                await api.peek(queue)
            assert (raised.value.status, raised.value.name) == (401, "unauthorized")
            assert "wrong" not in str(raised.value)


# --- connections that end ----------------------------------------------------------------------------


@both
async def test_nobody_there(kind: Connect) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ConnectionLost) as raised:
            await kind(f"http://127.0.0.1:{port}", reconnect_seconds=0)
    assert str(raised.value) == (
        f"no http broker could be reached (1 attempt): 127.0.0.1:{port}: Connection refused; "
        "is it running, and is the address right?"
    )


@both
async def test_a_broker_that_comes_back(kind: Connect, spare: Spare, queue: str) -> None:
    broker = spare("--http", "127.0.0.1:0")
    async with kind(url(broker), backoff_seconds_min=0.01) as api:
        await api.send(queue, b"before")
        broker.kill()
        broker.flags = ("--http", f"127.0.0.1:{broker.ports['http']}")
        broker.start()
        # The connection was found broken before anything was written on it.
        assert (await api.send(queue, b"after")).offset == 1


@both
async def test_a_client_that_is_closed(kind: Connect, broker: BrokerProcess, queue: str) -> None:
    api = kind(url(broker))
    await api
    await api.close()
    await api.close()
    with pytest.raises(ConnectionLost, match="this client is closed; make another one"):
        await api.send(queue, b"x")


def test_many_threads_share_a_client(broker: BrokerProcess, queue: str) -> None:
    offsets: list[int] = []
    with HttpClient(url(broker)) as api:

        def work() -> None:
            offsets.extend(api.send(queue, b"x").offset for _ in range(25))

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
    assert sorted(offsets) == list(range(150))


def test_many_tasks_share_a_client(broker: BrokerProcess, queue: str) -> None:
    async def main() -> None:
        from penstock.client import AsyncHttpClient

        async with AsyncHttpClient(url(broker)) as api:
            receipts = await asyncio.gather(*(api.send(queue, b"x") for _ in range(200)))
            assert sorted(receipt.offset for receipt in receipts) == list(range(200))
            task = asyncio.ensure_future(api.send(queue, b"x"))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            # The connection is as good as before, whatever became of that one.
            assert (await api.send(queue, b"x")).offset in (200, 201)

    asyncio.run(main())


# --- the core ----------------------------------------------------------------------------------------


def test_batches_are_cut_in_the_same_way_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_core, "BATCH_BYTES", 10)
    monkeypatch.setattr(http_core, "BATCH_MESSAGES", 3)
    core = HttpCore(Options.of())
    bodies = [b"1", b"2", b"3", b"4", b"5" * 9, b"6" * 20, b"7", b"8"]

    def cut() -> list[Request]:
        return list(core.batches("q", bodies, 5, None, "k"))

    requests = cut()
    assert requests == cut()
    assert [(it.first, it.count, it.target) for it in requests] == [
        (0, 3, "/v1/queues/q/batch"),
        (3, 2, "/v1/queues/q/batch"),
        (5, 1, "/v1/queues/q/messages?ttl=5"),
        (6, 2, "/v1/queues/q/batch"),
    ]
    assert [it.headers["Idempotency-Key"] for it in requests] == ["k/0", "k/1", "k/2", "k/3"]
    assert requests[0].body == b'{"value":"1","ttl":5}\n{"value":"2","ttl":5}\n{"value":"3","ttl":5}\n'
    assert requests[2].body == b"6" * 20


def test_delays_and_headers() -> None:
    core = HttpCore(Options.of())
    one = core.send("q", b"x", None, 3, "k", 1.5)
    assert (one.target, one.body) == ("/v1/queues/q/messages?retries=3&delay=1.5", b"x")
    one = core.send("q", b"x", None, 3, "k", 1.5, {"A": "\u20ac"})
    line = '{"value":"x","retries":3,"delay":1.5,"headers":{"A":"\u20ac"}}\n'.encode()
    assert (one.target, one.body) == ("/v1/queues/q/batch", line)
    (many,) = core.batches("q", [b"x", b"x"], None, 3, "k", 1.5, {"A": "\u20ac"})
    assert (many.target, many.body) == ("/v1/queues/q/batch", line * 2)


def test_a_newer_broker_may_say_more() -> None:
    body = b'{"offset":1,"id":"a","repeated":true,"weather":"fine"}'
    answer = answer_of(Request("POST", "/", {}), 200, "application/json; charset=utf-8", body)
    assert http_core.receipt_of(answer).offset == 1
    assert http_core.receipt_of_batch(answer) == BatchReceipt(1, 1, 2, "a", True)


def test_problems_become_errors() -> None:
    body = b'{"type":"urn:penstock:queue-full","title":"t","status":429,"detail":"queue \'q\' is full"}'
    with pytest.raises(Refused, match="queue 'q' is full") as raised:
        answer_of(Request("GET", "/", {}), 429, "application/problem+json", body)
    assert (raised.value.status, raised.value.name) == (429, "queue-full")


@pytest.mark.parametrize(
    "read",
    [
        http_core.receipt_of,
        http_core.receipt_of_batch,
        http_core.details_of,
        lambda answer: http_core.page_of(answer, "queues", http_core.queue_of),
        lambda answer: http_core.page_of({**answer, "messages": [answer]}, "messages", http_core.message_of),
    ],
)
def test_json_of_somebody_else(read: Callable[[Answer], object]) -> None:
    with pytest.raises(Refused, match=r"JSON without '\w+': this is no answer of a broker; is the URL right"):
        read({"status": "up"})
