"""Caller: calls of the public API from within this process, in the name of a user.

The API is an ASGI application in the same process, so a call is a function call: no socket, no TLS, no
name of this machine to find out; and yet it passes the same route, the same check of rights and of
parameters, as a call from outside. What a visitor may not do, a page cannot do for them.

How it fails: `ApiError`, with the problem that the API answered.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any, Final
from urllib.parse import quote, urlencode

from starlette.types import ASGIApp, Message, Scope

from penstock.errors import PenstockError
from penstock.http.auth import USER
from penstock.model.rights import Right, User

ANSWER_BYTES_MAX: Final = 64 << 20
"""A page that asks for more than this at once asks for the wrong thing."""


class ApiError(PenstockError):
    """The API said no. `problem` is its name (`queue-not-found`), the text what it says to people."""

    def __init__(self, status: int, problem: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.problem = problem


def queue_path(queue: str, *more: str) -> str:
    """The address of a queue in the API: a segment is encoded alone, `a/b` is `a%2Fb`."""
    return "/".join(("/v1/queues", quote(queue, safe=""), *more))


class Caller:
    """Calls the API as whoever `user` returns at that moment; None: nobody any more."""

    def __init__(self, api: ASGIApp, user: Callable[[], User | None], address: str = "") -> None:
        self._api = api
        self._user = user
        self._address = address  # of its visitor

    def may(self, right: Right) -> bool:
        """Whether it has this right with every queue."""
        user = self._user()
        return user is not None and user.may(right)

    @property
    def sees_some(self) -> bool:
        """Whether there can be a queue that it is told of."""
        user = self._user()
        return user is not None and user.may_some(Right.READ)

    async def get(self, path: str, **query: object) -> Any:  # whatever the API's document promises
        """The JSON of an answer. A value of None is left out of the query."""
        return json.loads(await self.ask("GET", path, None, None, **query))

    async def post(self, path: str, body: Mapping[str, object] | None = None, **query: object) -> Any:
        raw = None if body is None else json.dumps(body).encode()
        return json.loads(await self.ask("POST", path, raw, None, **query))

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str] | None = None,
        **query: object,
    ) -> bytes:
        """The whole body of an answer. `headers`, with names in lower case, beside those of every call."""
        parts: list[bytes] = []
        gathered = 0
        async with contextlib.aclosing(self.stream(method, path, body, headers, **query)) as stream:
            async for part in stream:
                gathered += len(part)
                if gathered > ANSWER_BYTES_MAX:
                    detail = f"{path} answers with more than {ANSWER_BYTES_MAX} bytes; ask for less"
                    raise ApiError(413, "too-much", detail)
                parts.append(part)
        return b"".join(parts)

    async def stream(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        /,  # A query may have any names.
        **query: object,
    ) -> AsyncGenerator[bytes, None]:
        """The body of an answer as it comes. Close it (`contextlib.aclosing`) to leave early."""
        exchange = _Exchange(body)
        scope = self._scope(method, path, query, body, headers or {})
        answering = asyncio.get_running_loop().create_task(exchange.run(self._api, scope))
        try:
            status = await exchange.status()
            if status >= 400:
                raise _error(status, b"".join([part async for part in exchange.parts()]))
            async for part in exchange.parts():
                yield part
            await answering
        finally:
            exchange.leave()
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    def _scope(
        self,
        method: str,
        path: str,
        query: Mapping[str, object],
        body: bytes | None,
        headers: Mapping[str, str],
    ) -> Scope:
        sent = {"host": "localhost", "accept": "*/*"}
        if body is not None:
            sent |= {"content-type": "application/json", "content-length": str(len(body))}
        words = {
            name: str(value).lower() if isinstance(value, bool) else value
            for name, value in query.items()
            if value is not None
        }
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode("ascii"),
            "query_string": urlencode(words).encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in (sent | dict(headers)).items()],
            "client": (self._address, 0) if self._address else None,
            USER: self._user,
            "server": None,
        }


class _Exchange:
    """One request and its answer, between two coroutines."""

    def __init__(self, body: bytes | None) -> None:
        self._body = body or b""
        self._asked = False
        self._left = asyncio.Event()
        self._told: asyncio.Queue[Message | None] = asyncio.Queue(8)

    async def run(self, api: ASGIApp, scope: Scope) -> None:
        try:
            await api(scope, self._receive, self._told.put)
        finally:
            # Behind the last message, or in place of the messages that will not come any more.
            with contextlib.suppress(asyncio.QueueFull):
                self._told.put_nowait(None)

    async def _receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    def leave(self) -> None:
        self._left.set()

    async def status(self) -> int:
        message = await self._told.get()
        if message is None:
            raise ApiError(500, "internal", "the API gave no answer; the broker's log says more")
        return int(message["status"])

    async def parts(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._told.get()
            if message is None:
                return
            more = message.get("more_body", False)
            if part := message.get("body", b""):
                yield part


def _error(status: int, body: bytes) -> ApiError:
    try:
        fields = json.loads(body)
        return ApiError(status, fields["type"].removeprefix("urn:penstock:"), fields["detail"])
    except (ValueError, KeyError):
        return ApiError(status, "unknown", body.decode("utf-8", "replace"))
