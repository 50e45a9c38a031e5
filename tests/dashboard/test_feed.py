"""What pages are told, once a second and all alike; and how the API is called from within the process.

The API here is a small application of the test's own: a real one does not end its streams when asked to.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock.dashboard import feed as feed_module
from penstock.dashboard.caller import ApiError, Caller, queue_path
from penstock.dashboard.feed import Feed, Tick
from penstock.dashboard.layout import left_out
from penstock.http.auth import USER
from penstock.http.problems import Problem
from penstock.model.rights import EVERYBODY, Grant, Right, User

WAIT_SECONDS = 10.0


def row(name: str, **more: object) -> dict[str, Any]:
    counts = ("ready", "held", "delayed", "dead", "bytes", "consumers", "rate_in", "rate_out", "offset_end")
    fields = dict.fromkeys(counts, 0)
    told = {"paused": False, "oldest_seconds": None, "identity": "000001000001"}
    return {"name": name, **fields, **told, **more}


class LittleApi:
    """Answers `/v1/queues`, `/v1/events` and `/readyz`, and remembers who asked."""

    def __init__(self) -> None:
        self.rows = {"a": row("a", ready=2, oldest_seconds=5.0), "b": row("b", dead=1)}
        self.told: asyncio.Queue[list[dict[str, Any]] | None] = asyncio.Queue()
        self.gone: list[str] = []
        self.asked: list[tuple[str, User]] = []
        self.streams = 0
        self.ready = True
        self.missing: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        self.asked.append((request.url.path, scope[USER]()))
        await self._answer(request)(scope, receive, send)

    def _answer(self, request: Request) -> Response:
        path = request.url.path
        if path == "/v1/queues":
            after = request.query_params.get("after", "")
            name = next((it for it in sorted(self.rows) if it > after), None)
            rest = [it for it in sorted(self.rows) if name is not None and it > name]
            queues = [self.rows[name]] if name is not None else []
            more = {"missing": self.missing} if self.missing else {}
            return JSONResponse({"queues": queues, "next": name if rest else None, **more})
        if path == "/v1/health":
            more = {"missing": self.missing} if self.missing else {}
            return JSONResponse({"attention": [], "bad": 0, "warn": 0, **more})
        if path == "/v1/events":
            return StreamingResponse(self._events(), media_type="text/event-stream")
        if path == "/readyz":
            return JSONResponse({}) if self.ready else Problem("unavailable", "the disk is full").response()
        if path == "/v1/echo":
            return JSONResponse(dict(request.query_params))
        return Problem("not-found", "there is nothing here").response()

    async def _events(self) -> AsyncIterator[bytes]:
        self.streams += 1
        try:
            while (rows := await self.told.get()) is not None:
                event = {"queues": rows, **({"gone": self.gone} if self.gone else {})}
                text = f"event: queues\ndata: {json.dumps(event)}\n\n: ping\n\n".encode()
                yield text[:20]
                yield text[20:]
        finally:
            self.streams -= 1


class Listener:
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.ticks: list[Tick] = []

    def __call__(self, tick: Tick) -> None:
        self.ticks.append(tick)

    def names(self) -> list[str]:
        return [row["name"] for tick in self.ticks for row in tick.changed]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


def run(monkeypatch: pytest.MonkeyPatch, test: Callable[[LittleApi, Feed], Awaitable[None]]) -> None:
    """A test with a feed that ticks fast."""
    monkeypatch.setattr(feed_module, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(feed_module, "HEALTH_SECONDS", 0.02)
    monkeypatch.setattr(feed_module, "ATTENTION_SECONDS", 0.02)
    monkeypatch.setattr(feed_module, "LINGER_SECONDS", 0.1)

    async def play() -> None:
        api = LittleApi()
        feed = Feed(Caller(api, lambda: EVERYBODY), clock=lambda: 1000.0)
        try:
            await test(api, feed)
        finally:
            await feed.stop()
        assert api.streams == 0

    asyncio.run(play())


def test_queues_that_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(api: LittleApi, feed: Feed) -> None:
        listener = Listener()
        feed.listen(listener)
        await until(lambda: feed.complete and api.streams == 1)
        api.gone = ["b"]
        api.told.put_nowait([])
        await until(lambda: any("b" in tick.gone for tick in listener.ticks))
        assert list(feed.rows) == ["a"]
        # One that was made again at once is told of as another, even where it looks the same.
        api.gone = []
        api.told.put_nowait([{**api.rows["a"], "identity": "000001000002"}])
        await until(lambda: any("a" in tick.gone for tick in listener.ticks))
        assert [it["name"] for tick in listener.ticks if "a" in tick.gone for it in tick.changed] == ["a"]
        listener.ticks.clear()
        # Of one that went while the stream was broken, the next list says nothing.
        del api.rows["a"]
        api.told.put_nowait(None)
        await until(lambda: any("a" in tick.gone for tick in listener.ticks))
        await until(lambda: not feed.rows or list(feed.rows) == ["b"])

    run(monkeypatch, test)


def test_what_a_log_that_does_not_answer_has_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that is not told is not deleted; and pages hear who is missing, until nobody is."""

    async def test(api: LittleApi, feed: Feed) -> None:
        listener = Listener()
        feed.listen(listener)
        await until(lambda: feed.complete and api.streams == 1)
        b = api.rows.pop("b")
        api.missing = ["front-2", "shard 3"]
        api.rows["c"] = row("c")
        api.told.put_nowait(None)
        await until(lambda: listener.ticks[-1].attention.missing == ["front-2", "shard 3"])
        await until(lambda: "c" in feed.rows and api.streams == 1)
        assert set(feed.rows) == {"a", "b", "c"}
        api.missing, api.rows["b"] = [], b
        await until(lambda: not listener.ticks[-1].attention.missing)
        del api.rows["b"]
        api.told.put_nowait(None)
        await until(lambda: set(feed.rows) == {"a", "c"})

    run(monkeypatch, test)


def test_who_does_not_answer_is_named() -> None:
    assert [*left_out(())] == []
    said = "What is shown may be incomplete or old: no answer from front-end b, shard 3."
    assert [*left_out(("b", "shard 3"))] == [said]


def test_all_queues_and_then_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(api: LittleApi, feed: Feed) -> None:
        one, two = Listener(), Listener()
        feed.listen(one)
        feed.listen(two)
        await until(lambda: feed.complete)
        first = next(tick for tick in one.ticks if tick.is_first)
        assert [row["name"] for row in first.changed] == ["a", "b"]
        assert (first.totals.ready, first.totals.dead, first.totals.queues) == (2, 1, 2)
        assert first.totals.oldest_seconds == 5.0
        await until(lambda: api.streams == 1)
        # The stream begins with every queue; who has them already is not told again.
        await api.told.put([dict(it) for it in api.rows.values()])
        await api.told.put([row("a", ready=7), row("c", paused=True)])
        await until(lambda: one.names().count("c") == 1)
        assert one.names() == ["a", "b", "a", "c"] == two.names()
        totals = feed.totals()
        assert (totals.ready, totals.queues, totals.paused, totals.oldest_seconds) == (7, 3, 1, None)
        assert api.streams == 1
        assert {user for _, user in api.asked} == {EVERYBODY}

    run(monkeypatch, test)


def test_it_rests_when_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(api: LittleApi, feed: Feed) -> None:
        one, two = Listener(), Listener()
        feed.listen(one)
        await until(lambda: api.streams == 1)
        feed.forget(one)
        feed.listen(two)  # in time: it never stopped
        await until(lambda: len(two.ticks) >= 10)  # which takes longer than it lingers
        assert feed.is_running
        feed.forget(two)
        await until(lambda: not feed.is_running and api.streams == 0)
        assert not feed.rows
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})  # nobody is left to ask
        feed.listen(one)
        await until(lambda: feed.complete and set(feed.rows) == {"a", "b"})

    run(monkeypatch, test)


def test_a_stream_that_ends_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(api: LittleApi, feed: Feed) -> None:
        one = Listener()
        feed.listen(one)
        await until(lambda: api.streams == 1)
        api.rows["d"] = row("d")  # made while nobody is told
        await api.told.put(None)
        await until(lambda: "d" in one.names())
        await until(lambda: api.streams == 1)

    run(monkeypatch, test)


def test_a_row_that_cannot_be_understood_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(api: LittleApi, feed: Feed) -> None:
        one = Listener()
        feed.listen(one)
        await until(lambda: api.streams == 1)
        api.rows["d"] = row("d")
        await api.told.put([{"name": "odd"}])
        await until(lambda: "d" in one.names())
        await until(lambda: api.streams == 1)

    run(monkeypatch, test)


def test_a_page_that_fails_takes_nobody_along(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(api: LittleApi, feed: Feed) -> None:
        def fails(tick: Tick) -> None:
            raise ValueError("a page of the test's")

        one = Listener()
        feed.listen(fails)
        feed.listen(one)
        await until(lambda: len(one.ticks) > 3)

    run(monkeypatch, test)
    assert "a page could not be told" in caplog.text


def test_what_is_wrong_with_the_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(api: LittleApi, feed: Feed) -> None:
        one = Listener()
        api.ready = False
        feed.listen(one)
        await until(lambda: bool(one.ticks) and not one.ticks[-1].health.ready)
        assert one.ticks[-1].health.reason == "the disk is full"
        api.ready = True
        await until(lambda: one.ticks[-1].health.ready)

    run(monkeypatch, test)


def test_for_somebody_who_may_read_nothing_only_the_health_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "TICK_SECONDS", 0.02)

    async def play() -> None:
        api, listener = LittleApi(), Listener()
        sender = User("sender", (Grant(("*",), Right.SEND),))
        feed = Feed(Caller(api, lambda: sender))
        feed.listen(listener)
        await until(lambda: len(listener.ticks) > 5)
        assert (api.asked, list(feed.rows)) == ([("/readyz", sender)], [])
        await feed.stop()

    asyncio.run(play())


# --- the caller ----------------------------------------------------------------------------------------


def test_a_call_within_the_process() -> None:
    async def play() -> None:
        caller = Caller(LittleApi(), lambda: None)
        assert await caller.get("/v1/echo", limit=5, dead=True, none=None, text="a/ü &") == {
            "limit": "5",
            "dead": "true",
            "text": "a/ü &",
        }
        with pytest.raises(ApiError, match="there is nothing here") as caught:
            await caller.get(queue_path("a/b", "messages"))
        assert (caught.value.status, caught.value.problem) == (404, "not-found")

    asyncio.run(play())


def test_who_leaves_a_stream_early_leaves_nothing_behind() -> None:
    async def play() -> None:
        api = LittleApi()
        async with contextlib.aclosing(Caller(api, lambda: None).stream("GET", "/v1/events")) as stream:
            await api.told.put([row("a")])
            assert await anext(stream)
            assert api.streams == 1
        assert api.streams == 0

    asyncio.run(play())


def test_the_address_of_a_queue() -> None:
    assert queue_path("a/b", "pause") == "/v1/queues/a%2Fb/pause"
    assert queue_path("ü <") == "/v1/queues/%C3%BC%20%3C"
