"""Poll: one answer for all pages, and long answers less often."""

import asyncio
import json
from functools import partial
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from penstock.dashboard.caller import ApiError, Caller
from penstock.dashboard.poll import EARLY_SECONDS, ROWS_PER_SECOND, TURN_SECONDS, Poll, Trail
from penstock.model.rights import EVERYBODY, Grant, Right, User, by_role


class Source:
    """An API that answers with so many rows, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.query = b""
        self.rows = 1
        self.status = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked += 1
        self.query = scope["query_string"]
        await asyncio.sleep(0)
        body = json.dumps(
            {"rows": self.rows, "type": "urn:penstock:unavailable", "detail": "not now"}
        ).encode()
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": body})


def rows_of(answer: Any) -> int:
    rows: int = answer["rows"]
    return rows


def test_pages_share_an_answer_and_long_ones_are_asked_for_less_often() -> None:
    async def check() -> None:
        now = 100.0
        heard: list[Any] = []
        source = Source()
        caller = Caller(source, lambda: EVERYBODY)
        poll = Poll("/v1/x", rows_of, lambda at, answer: heard.append(answer), clock=lambda: now)
        answers = await asyncio.gather(*[poll.read(caller) for _ in range(30)])
        assert (source.asked, len(heard), poll.turn) == (1, 1, 1)
        assert all(answer["rows"] == 1 for answer in answers)
        now += TURN_SECONDS - EARLY_SECONDS
        source.rows = 10 * ROWS_PER_SECOND
        await poll.read(caller)
        assert source.asked == 2
        now += 9
        await poll.read(caller)
        assert source.asked == 2
        now += 1
        await poll.read(caller)
        assert source.asked == 3
        poll.expire()
        await poll.read(caller)
        assert (source.asked, poll.turn) == (4, 4)

    asyncio.run(check())


def _same(user: User | None) -> User | None:
    return user


def test_who_has_not_the_right_with_every_queue_gets_no_shared_answer() -> None:
    async def check() -> None:
        source = Source()
        some = User("some", (Grant(("orders.*",), Right.ALL),))
        poll = Poll("/v1/x", rows_of, right=Right.ADMIN, last=5)
        await poll.read(Caller(source, lambda: EVERYBODY))
        for user in (some, by_role("other", "operate"), None):
            source.rows += 1
            caller = Caller(source, partial(_same, user))
            assert (await poll.read(caller))["rows"] == source.rows
        assert source.asked == 4
        assert source.query == b"last=5"

    asyncio.run(check())


def test_a_failure_is_told_to_who_asked_and_the_next_one_asks_again() -> None:
    async def check() -> None:
        source = Source()
        caller = Caller(source, lambda: EVERYBODY)
        poll = Poll("/v1/x", rows_of)
        source.status = 503
        with pytest.raises(ApiError, match="not now"):
            await poll.read(caller)
        source.status = 200
        assert (await poll.read(caller))["rows"] == 1
        assert poll.turn == 1

    asyncio.run(check())


def test_a_trail_forgets_what_is_old_and_begins_anew_after_a_gap() -> None:
    trail = Trail()
    for at in range(0, 400, 10):
        trail.add(at, 1.0)
    assert (trail.points[0], trail.points[-1]) == ((90, 1.0), (390, 1.0))
    trail.add(451, 2.0)
    assert list(trail.points) == [(451, 2.0)]
