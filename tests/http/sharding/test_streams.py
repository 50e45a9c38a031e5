"""Answers that go on, put together from those of several logs."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.http.sharding import streams

WAIT_SECONDS = 10


def running(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**fixtures: Any) -> None:  # what pytest has for it
        asyncio.run(test(**fixtures))

    return run


class Caller:
    """One who asks, and may leave."""

    def __init__(self, query: str = "") -> None:
        self.scope: Scope = {"type": "http", "query_string": query.encode(), "headers": []}
        self.left = asyncio.Event()
        self.status = 0
        self.heard = b""
        self.hears = asyncio.Event()

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        self.heard += message.get("body", b"")
        self.hears.set()

    @property
    def end(self) -> Any:  # JSON
        return json.loads(self.heard.splitlines()[-1])["end"]


def says(*lines: object, status: int = 200, then_waits: bool = False) -> ASGIApp:
    """An application that answers with these lines."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        for line in lines:
            text = line if isinstance(line, str) else json.dumps(line) + "\n"
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        if then_waits:
            await asyncio.get_running_loop().create_future()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


def found(count: int) -> list[object]:
    ended = {"complete": True, "why": None, "next": None, "searched": count, "found": count, "missing": 0}
    return [*({"offset": it} for it in range(count)), {"end": ended}]


async def told(work: Any) -> None:  # of anything
    async with asyncio.timeout(WAIT_SECONDS):
        await work


@running
async def test_an_answer_that_nobody_reads_can_be_closed() -> None:
    stream = streams.Streaming(says(*range(100)), {})
    while not stream._parts.full():
        await asyncio.sleep(0)
    await told(stream.close())


@running
async def test_a_search_ends_when_its_caller_leaves() -> None:
    caller = Caller()
    app = says({"offset": 1}, {"offset": 2}, then_waits=True)
    going = asyncio.ensure_future(streams.search([app], caller.scope, caller.receive, caller.send))
    await told(caller.hears.wait())
    caller.left.set()
    await told(going)


@running
async def test_a_search_whose_limit_falls_between_two_logs_says_where_to_go_on() -> None:
    caller = Caller("limit=2")
    apps = [says(*found(2)), says(*found(1))]
    await told(streams.search(apps, caller.scope, caller.receive, caller.send))
    assert (caller.end["complete"], caller.end["why"], caller.end["found"]) == (False, "limit", 2)
    rest = Caller(f"after={caller.end['next']}")
    await told(streams.search(apps, rest.scope, rest.receive, rest.send))
    assert (rest.end["complete"], rest.end["found"]) == (True, 1)


@running
async def test_a_search_that_loses_a_log_under_way_says_so() -> None:
    caller = Caller()
    apps = [says(*found(2)), says("{}", status=503)]
    await told(streams.search(apps, caller.scope, caller.receive, caller.send))
    assert (caller.status, caller.end["complete"], caller.end["why"]) == (200, False, "error")
    assert caller.end["found"] == 2
    apps[1] = says(*found(3))
    rest = Caller(f"after={caller.end['next']}")
    await told(streams.search(apps, rest.scope, rest.receive, rest.send))
    assert (rest.end["complete"], rest.end["found"]) == (True, 3)


@running
async def test_a_limit_that_is_none_is_for_the_logs_to_refuse() -> None:
    caller = Caller("limit=x")
    await told(streams.search([says("no\n", status=400)], caller.scope, caller.receive, caller.send))
    assert (caller.status, caller.heard.strip()) == (400, b"no")


@running
async def test_events_of_a_log_that_nobody_leads_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a while: who comes again may hear of it."""
    monkeypatch.setattr(streams, "AGAIN_SECONDS", 0.05)
    caller = Caller()
    apps = [says("{}", status=503), says("event: a\n\n", then_waits=True)]
    await told(streams.events(apps, caller.scope, caller.receive, caller.send))
    assert (caller.status, caller.heard) == (200, b"event: a\n\n")


@running
async def test_events_of_nobody_and_for_nobody() -> None:
    refused = Caller()
    apps = [says("{}", status=503), says("no", status=403)]
    await told(streams.events(apps, refused.scope, refused.receive, refused.send))
    assert (refused.status, refused.heard) == (403, b"no")
