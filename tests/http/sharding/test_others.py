"""Requests to the HTTP processes of other front-ends, here of one that is a socket of this process."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Iterator
from functools import wraps
from typing import Any

import pytest

from penstock.http.problems import Problem
from penstock.http.sharding import others
from penstock.http.sharding.others import Asked, Others

WAIT_SECONDS = 10


def running(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**fixtures: Any) -> None:  # what pytest has for it
        asyncio.run(test(**fixtures))

    return run


ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ndate: x\r\n\r\nok"


class Ways:
    """What the first process does: it opens ways, and hands over their ends."""

    def __init__(self) -> None:
        self.others: Others | None = None
        self.there: list[socket.socket] = []
        self.hands_over = True

    async def call(self, name: str, fields: Any, seconds: float) -> tuple[dict[str, str], None]:
        assert (name, list(fields)) == ("way", ["to", "caller"])
        here, there = socket.socketpair()
        here.setblocking(False)
        there.setblocking(False)
        number = f"way {len(self.there)}"
        self.there.append(there)
        if self.hands_over:
            assert self.others is not None
            self.others.handed_over(number, here)
        else:
            here.close()
        return {"name": number}, None


@contextlib.contextmanager
def made() -> Iterator[tuple[Others, Ways]]:
    ways = Ways()
    ways.others = own = Others(ways)  # type: ignore[arg-type]  # as much of a link as it needs
    try:
        yield own, ways
    finally:
        for way in [way for kept in own._kept.values() for way in kept]:
            way.close()
        for there in ways.there:
            there.close()


async def answered(ways: Ways, number: int, answer: bytes = ANSWER) -> bytes:
    """What was asked over a way, when it was answered."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(WAIT_SECONDS):
        while len(ways.there) <= number:
            await asyncio.sleep(0)
        asked = await loop.sock_recv(ways.there[number], 1 << 16)
        await loop.sock_sendall(ways.there[number], answer)
    return asked


@running
async def test_a_request_without_a_host_goes_on() -> None:
    """HTTP/1.0 has such."""
    with made() as (own, ways):
        asking = asyncio.ensure_future(own.ask("a", "1.2.3.4:5", Asked("GET", b"/x", [])))
        assert b"host: localhost" in await answered(ways, 0)
        assert (await asking).body == b"ok"


@running
async def test_a_request_that_cannot_be_sent_on_is_refused_as_that() -> None:
    with made() as (own, _):
        with pytest.raises(Problem) as refused:
            await own.ask("a", "", Asked("GET", b"/x", [(b"host", b"a"), (b"host", b"b")]))
        assert refused.value.name == "bad-request"


@pytest.mark.parametrize(("method", "problem"), [("GET", "no-leader"), ("POST", "unavailable")])
@running
async def test_who_closes_before_an_answer_has_maybe_done_it(method: str, problem: str) -> None:
    with made() as (own, ways):
        asking = asyncio.ensure_future(own.ask("a", "", Asked(method, b"/x", [])))
        await answered(ways, 0, b"")
        ways.there[0].close()
        with pytest.raises(Problem, match="it has closed the connection") as refused:
            await asking
        assert refused.value.name == problem
        assert ("not known" in refused.value.detail) is (method == "POST")


@running
async def test_an_end_that_nobody_waits_for_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "WAY_SECONDS", 0.01)
    with made() as (own, ways):
        ways.hands_over = False
        with pytest.raises(Problem, match="cannot be reached"):
            await own.ask("a", "", Asked("GET", b"/x", []))
        here, there = socket.socketpair()
        with there:
            there.setblocking(False)
            own.handed_over("way 0", here)
            async with asyncio.timeout(WAIT_SECONDS):
                assert await asyncio.get_running_loop().sock_recv(there, 1) == b""
        assert not own._handed


@running
async def test_ways_that_are_kept_are_so_many_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many callers there are."""
    monkeypatch.setattr(others, "KEPT_ALL_MAX", 3)
    with made() as (own, ways):
        for number in range(5):
            asking = asyncio.ensure_future(own.ask("a", f"1.2.3.4:{number}", Asked("GET", b"/x", [])))
            await answered(ways, number)
            await asking
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(WAIT_SECONDS):
            for there in ways.there[:2]:
                assert await loop.sock_recv(there, 1) == b"", "the oldest are closed"
        again = asyncio.ensure_future(own.ask("a", "1.2.3.4:4", Asked("GET", b"/x", [])))
        await answered(ways, 4)
        assert (await again).status == 200
        assert len(ways.there) == 5
