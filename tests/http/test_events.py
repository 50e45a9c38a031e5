"""Server-sent events: who is told what and when, and what becomes of those who do not listen."""

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Any

import pytest
from starlette.types import Message

from penstock.client import PhpmqClient
from penstock.http.problems import Problem
from penstock.http.watching import events
from penstock.http.watching.mirror import Mirror
from penstock.model.rights import EVERYBODY, User
from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.http.test_mirror import Broker as FakeBroker
from tests.server.harness import WAIT_SECONDS, BrokerProcess, until


class Listener:
    """A connection to /v1/events, read when a test wants to."""

    def __init__(self, port: int, receive_bytes: int | None = None) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(WAIT_SECONDS)
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.connect(("127.0.0.1", port))
        self.socket.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self._raw = bytearray()
        self._text = bytearray()
        self.ended = False
        self.status, self.headers = self._head()

    def __enter__(self) -> "Listener":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def _head(self) -> tuple[int, str]:
        while b"\r\n\r\n" not in self._raw:
            self._receive()
        head, _, rest = bytes(self._raw).partition(b"\r\n\r\n")
        self._raw[:] = rest
        return int(head.split()[1]), head.decode().lower()

    def _receive(self) -> bool:
        data = self.socket.recv(1 << 16)
        self._raw += data
        return bool(data)

    def _chunk(self) -> bool:
        """One more chunk of the answer; False where it has ended."""
        while (found := re.match(rb"([0-9a-f]+)\r\n", self._raw)) is None:
            if not self._receive():
                return False
        length = int(found[1], 16)
        end = found.end() + length + 2
        while len(self._raw) < end:
            assert self._receive(), "the answer was cut off"
        self._text += self._raw[found.end() : end - 2]
        del self._raw[:end]
        self.ended = length == 0
        return length > 0

    def blocks(self) -> Iterator[str]:
        """What stands between empty lines, as it comes."""
        while True:
            while b"\n\n" not in self._text:
                if not self._chunk():
                    return
            block, _, rest = bytes(self._text).partition(b"\n\n")
            self._text[:] = rest
            yield block.decode()

    def queues(self) -> dict[str, dict[str, Any]]:
        """The queues of the next event."""
        block = next(self.blocks())
        first, second = block.split("\n")
        assert first == "event: queues"
        assert second.startswith("data: ")
        return {it["name"]: it for it in json.loads(second[6:])["queues"]}

    def until(self, name: str, **fields: object) -> dict[str, Any]:
        """The first row of that queue with these fields."""
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            row = self.queues().get(name)
            if row is not None and all(row[field] == value for field, value in fields.items()):
                return row
        raise AssertionError(f"no row of {name} with {fields}")


@pytest.mark.long
def test_all_queues_first_then_those_that_change(broker: BrokerProcess, api: Api) -> None:
    api.send("still", b"x")
    api.send("moving", b"x")
    shown = api.get("/v1/queues", match="still")["queues"][0]
    with Listener(broker.ports["http"]) as listener:
        assert listener.status == 200
        assert "content-type: text/event-stream" in listener.headers
        assert "cache-control: no-cache" in listener.headers
        rows = listener.queues()
        assert {"still", "moving"} <= set(rows)
        assert set(rows["still"]) == set(shown)
        assert rows["still"]["ready"] == 1
        # Both were just made, so their rates are still falling.
        listener.until("still", rate_in=0)
        api.send("moving", b"y", b"z")
        assert listener.until("moving", ready=3)["rate_in"] > 0
        for _ in range(2):  # Its rate falls, and that is told; nothing else is.
            rows = listener.queues()
            assert "moving" in rows
            assert "still" not in rows


def test_a_new_queue_is_told(broker: BrokerProcess, api: Api) -> None:
    with Listener(broker.ports["http"]) as listener:
        api.send("new-born", b"x")
        assert listener.until("new-born")["offset_end"] == 1
        api.post("/v1/queues/new-born/pause")
        listener.until("new-born", paused=True)


def test_about_once_a_second_however_often_somebody_looks(broker: BrokerProcess, api: Api) -> None:
    api.send("often", b"x")
    with Listener(broker.ports["http"]) as listener:
        listener.queues()
        began = time.monotonic()
        heard = 0
        while time.monotonic() < began + 2.5:
            api.send("often", b"x")
            api.get("/v1/queues", match="often")
        ended = time.monotonic()
        api.send("often", b"last")
        count = api.get("/v1/queues/often")["offset_end"]
        while listener.queues().get("often", {}).get("offset_end") != count:
            heard += 1
        assert 1 <= heard <= 2 * (ended - began)


def test_the_end_of_the_broker_is_the_end_of_the_stream(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("q", b"x")
        with Listener(broker.ports["http"]) as listener:
            listener.queues()
            began = time.monotonic()
            assert broker.stop() == 0
            assert time.monotonic() < began + 5
            for _ in listener.blocks():
                pass
            assert listener.ended
    assert "Traceback" not in broker.log()
    assert "Exception" not in broker.log()


def test_no_more_than_some_listen_at_a_time(start_broker: StartBroker) -> None:
    broker = start_broker()
    port = broker.ports["http"]
    with Api(port) as api:
        api.send("q", b"x")
        listeners = [Listener(port) for _ in range(events.SUBSCRIBERS_MAX)]
        try:
            assert all(listener.status == 200 for listener in listeners)
            reply = api.ask("GET", "/v1/events")
            assert (reply.status, reply.problem) == (503, "unavailable")
            assert "retry-after" in reply.headers
            listeners.pop().socket.close()

            def admitted() -> bool:
                with Listener(port) as late:
                    return late.status == 200

            until(admitted, "a place to be free")
        finally:
            for listener in listeners:
                listener.socket.close()
        until(lambda: streams(api) == 0, "all of them to be forgotten")


def streams(api: Api) -> int:
    text = api.ask("GET", "/metrics").body.decode()
    found = re.search(r"^penstock_http_event_streams (\S+)$", text, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def tail_of(api: Api, name: str) -> int:
    """How many messages a queue has had; asking so makes the API look at all queues."""
    found = api.get("/v1/queues", match=name)["queues"]
    return int(found[0]["offset_end"]) if found else 0


@pytest.mark.long
def test_a_slow_listener_gets_the_newest_rows_and_no_backlog(start_broker: StartBroker) -> None:
    broker = start_broker()
    port = broker.ports["http"]
    # A megabyte a round, in all more than the system keeps on the way.
    count, rounds = 2000, 8
    names = [f"{number:04}" + "n" * 240 for number in range(count)]
    with (
        Api(port) as api,
        PhpmqClient(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq,
        Listener(port, receive_bytes=4096) as slow,
        Listener(port) as quick,
    ):
        for sent in range(1, rounds + 1):
            for name in names:
                mq.send(name, b"x")
            mq.flush()
            until(partial(lambda sent: tail_of(api, names[-1]) == sent, sent), "the messages to be there")
            # The quick one says that a round has been told.
            quick.until(names[-1], offset_end=sent)
        newest: dict[str, int] = {}
        rows = 0
        while len(newest) < count or min(newest.values()) < rounds:
            for name, row in slow.queues().items():
                assert row["offset_end"] >= newest.get(name, 0)
                newest[name] = row["offset_end"]
                rows += 1
        assert rows < rounds * count, "every round was kept for it"
        assert api.get("/healthz") == {"status": "ok"}


def test_events_cannot_be_asked_for_by_head_or_post(api: Api) -> None:
    for method in ("HEAD", "POST"):
        reply = api.ask(method, "/v1/events")
        assert reply.status == 405
        assert reply.headers["allow"] == "GET"


# --- What takes long in a real broker: here with short times ---


class Peer:
    """The other end of an answer, as an ASGI server presents it."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.open = asyncio.Event()  # whether it reads
        self.open.set()
        self.gone = asyncio.Event()
        self.spoken = asyncio.Event()

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.open.wait()
        if message["type"] == "http.response.body":
            self.heard.append(message["body"])
            self.spoken.set()


def everybody() -> User:
    return EVERYBODY


async def stream_to(peer: Peer, mirror: Mirror, stopping: asyncio.Event) -> None:
    async with asyncio.timeout(10):
        await events.EventStream(mirror, stopping, everybody)({"type": "http"}, peer.receive, peer.send)


def test_a_ping_when_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PING_SECONDS", 0.01)
    monkeypatch.setattr(events, "SPACING_SECONDS", 0.01)

    async def main() -> None:
        peer, mirror = Peer(), Mirror(FakeBroker())
        talking = asyncio.ensure_future(stream_to(peer, mirror, asyncio.Event()))
        async with asyncio.timeout(10):
            await peer.spoken.wait()
        peer.gone.set()
        await talking
        assert set(peer.heard[:-1]) == {b": ping\n\n"}
        assert mirror.subscriber_count == 0

    asyncio.run(main())


def test_who_takes_nothing_for_long_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "STALL_SECONDS", 0.01)
    monkeypatch.setattr(events, "LAST_WORDS_SECONDS", 0.01)
    monkeypatch.setattr(events, "PING_SECONDS", 0.01)
    monkeypatch.setattr(events, "SPACING_SECONDS", 0.01)

    async def main() -> None:
        peer, mirror = Peer(), Mirror(FakeBroker())
        talking = asyncio.ensure_future(stream_to(peer, mirror, asyncio.Event()))
        async with asyncio.timeout(10):
            await peer.spoken.wait()
        peer.open.clear()
        await talking
        assert mirror.subscriber_count == 0

    asyncio.run(main())


def test_a_stop_does_not_wait_for_who_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LAST_WORDS_SECONDS", 0.01)

    async def main() -> None:
        peer, mirror, stopping = Peer(), Mirror(FakeBroker()), asyncio.Event()
        peer.open.clear()
        talking = asyncio.ensure_future(stream_to(peer, mirror, stopping))
        await asyncio.sleep(0)
        stopping.set()
        await talking
        assert mirror.subscriber_count == 0

    asyncio.run(main())


def test_one_too_many_changes_nothing() -> None:
    async def main() -> None:
        mirror = Mirror(FakeBroker())
        kept = [events.EventStream(mirror, asyncio.Event(), everybody) for _ in range(events.SUBSCRIBERS_MAX)]
        with pytest.raises(Problem, match="listen to events already"):
            events.EventStream(mirror, asyncio.Event(), everybody)
        assert mirror.subscriber_count == len(kept)

    asyncio.run(main())
