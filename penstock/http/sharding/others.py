"""Others: requests to the HTTP processes of other front-ends.

The first process opens the way (`cluster/pipe.py`), encrypted and proved as all links between front-ends are,
and hands over this end of it; what goes over it is plain HTTP/1.1. A way is of one caller, whose address the
other side knows, and is used again for the next request of the same caller.

    answer = await others.ask(front_end, request)      all of an answer
    await others.pass_on(front_end, scope, receive, send)    a request and its answer, as they come

How it fails: `Problem` no-leader where there is no way, or it ends before the answer to a question has begun;
where that was no question, nobody knows what has become of it, and the `Problem` says so. An answer that has
begun and does not end well is `CutOff`. `ClientDisconnect` where the caller has left.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, Final, NamedTuple

import h11
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.http.app import client_left
from penstock.http.link import CallRefused, Link
from penstock.http.problems import Problem

KEPT_MAX: Final = 8
"""Ways to one front-end for one caller that are kept for the next request."""

KEPT_ALL_MAX: Final = 128
"""Ways that are kept at all: each takes descriptors of four processes. The oldest go first."""

KEPT_SECONDS: Final = 30.0
WAY_SECONDS: Final = 5.0
RECEIVE_BYTES: Final = 256 * 1024
_OF_THE_WAY: Final = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"expect")
)
"""Headers that are of one connection, and do not go on."""

Headers = list[tuple[bytes, bytes]]


class CutOff(PenstockError):
    """The rest of an answer does not come, or is not wanted any more."""


class Asked(NamedTuple):
    method: str
    target: bytes  # path and query, as they came
    headers: Headers
    body: bytes = b""


class Answered(NamedTuple):
    status: int
    headers: Headers
    body: bytes


class _Way:
    """A connection to another front-end's HTTP process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)
        self.kept_at = 0.0

    async def write(self, event: Any) -> None:  # one of h11's
        data = self._http.send(event)
        if data:
            self._writer.write(data)
            await self._writer.drain()

    async def read(self) -> Any:  # one of h11's
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(RECEIVE_BYTES))
        return event

    @property
    def may_go_on(self) -> bool:
        """Whether another request may follow; where the answer has ended, it is ready for that."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return not self._writer.is_closing()

    @property
    def is_fresh(self) -> bool:
        return asyncio.get_running_loop().time() - self.kept_at < KEPT_SECONDS and not self._reader.at_eof()

    def close(self) -> None:
        self._writer.close()


class Others:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._kept: dict[tuple[str, str], list[_Way]] = {}  # by front-end and caller
        self._handed: dict[str, asyncio.Future[socket.socket]] = {}
        self._sweeping: asyncio.TimerHandle | None = None

    def _sweep(self) -> None:
        """Ways that nobody has used for a while are closed: a caller has one of his own."""
        self._sweeping = None
        for whose, ways in list(self._kept.items()):
            self._kept[whose] = fresh = [way for way in ways if way.is_fresh]
            for way in ways:
                if way not in fresh:
                    way.close()
            if not fresh:
                del self._kept[whose]
        if self._kept:
            self._sweep_later()

    def _sweep_later(self) -> None:
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(KEPT_SECONDS, self._sweep)

    def handed_over(self, name: str, there: socket.socket) -> None:
        """An end of a way has come by the bell."""
        loop = asyncio.get_running_loop()
        waiting = self._handed.get(name)
        if waiting is None:  # It is before the answer to whoever wants it, or that one has left.
            waiting = self._handed[name] = loop.create_future()
            loop.call_later(2 * WAY_SECONDS, self._not_wanted, name, waiting)
        if waiting.done():
            there.close()
        else:
            waiting.set_result(there)

    def _not_wanted(self, name: str, handed: "asyncio.Future[socket.socket]") -> None:
        if self._handed.get(name) is handed:
            del self._handed[name]
            handed.result().close()

    @contextlib.asynccontextmanager
    async def _way(self, front_end: str, caller: str) -> AsyncIterator[_Way]:
        """Kept for the next one where all went well."""
        way = self._kept_way(front_end, caller) or await self._open(front_end, caller)
        try:
            yield way
        except BaseException:
            way.close()
            raise
        if way.may_go_on and len(self._kept.get((front_end, caller), ())) < KEPT_MAX:
            way.kept_at = asyncio.get_running_loop().time()
            if sum(map(len, self._kept.values())) >= KEPT_ALL_MAX:
                self._let_oldest_go()
            self._kept.setdefault((front_end, caller), []).append(way)
            self._sweep_later()
        else:
            way.close()

    def _let_oldest_go(self) -> None:
        whose, ways = min(self._kept.items(), key=lambda it: it[1][0].kept_at)
        ways.pop(0).close()
        if not ways:
            del self._kept[whose]

    def _kept_way(self, front_end: str, caller: str) -> _Way | None:
        kept = self._kept.pop((front_end, caller), [])
        while kept:
            way = kept.pop()
            if way.is_fresh:
                if kept:
                    self._kept[front_end, caller] = kept
                return way
            way.close()
        return None

    async def _open(self, front_end: str, caller: str) -> _Way:
        try:
            told, _ = await self._link.call("way", {"to": front_end, "caller": caller}, seconds=WAY_SECONDS)
            waiting = self._handed.setdefault(told["name"], asyncio.get_running_loop().create_future())
            try:
                async with asyncio.timeout(WAY_SECONDS):
                    there = await asyncio.shield(waiting)
            except BaseException:
                if waiting.done():
                    waiting.result().close()
                raise
            finally:
                self._handed.pop(told["name"], None)
            try:
                return _Way(*await asyncio.open_unix_connection(sock=there))
            except BaseException:
                there.close()
                raise
        except (CallRefused, OSError, TimeoutError) as error:
            raise unreachable(front_end, str(error) or "it does not answer") from None

    async def ask(self, front_end: str, caller: str, asked: Asked) -> Answered:
        async with self._way(front_end, caller) as way:
            try:
                await way.write(_request(asked.method, asked.target, _with_host(_with_length(asked))))
                if asked.body:
                    await way.write(h11.Data(data=asked.body))
                await way.write(h11.EndOfMessage())
                head = await _head(way)
                parts = []
                while isinstance(event := await way.read(), h11.Data):
                    parts.append(bytes(event.data))
                if not isinstance(event, h11.EndOfMessage):
                    raise ConnectionResetError("it closed the connection in the middle of an answer")
            except (OSError, h11.ProtocolError) as error:
                raise unanswered(front_end, asked.method, _why(error)) from None
        return Answered(head.status_code, list(head.headers), b"".join(parts))

    async def pass_on(
        self, front_end: str, caller: str, headers: Headers, scope: Scope, receive: Receive, send: Send
    ) -> None:
        async with self._way(front_end, caller) as way:
            target = target_of(scope)
            has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
            if has_body and not any(name == b"content-length" for name, _ in headers):
                headers = [*headers, (b"transfer-encoding", b"chunked")]
            begun = False
            saying: asyncio.Task[None] | None = None
            try:
                await way.write(_request(scope["method"], target, _with_host(headers)))
                # Behind the body it is watched whether the caller is still there: who waits for messages
                # takes none when he has left.
                saying = asyncio.ensure_future(_say(way, receive, has_body))
                head = await _or_left(_head(way), saying)
                kept = [it for it in passed_headers(head.headers) if it[0] != b"date"]  # It gets one here.
                await send({"type": "http.response.start", "status": head.status_code, "headers": kept})
                begun = True
                while isinstance(event := await _or_left(way.read(), saying), h11.Data):
                    await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
                if not isinstance(event, h11.EndOfMessage):
                    raise ConnectionResetError("it closed the connection in the middle of an answer")
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            except (OSError, h11.ProtocolError) as error:
                if begun:
                    raise CutOff(f"front-end {front_end}: {_why(error)}") from None
                raise unanswered(front_end, scope["method"], _why(error)) from None
            finally:
                if saying is not None and not saying.done():
                    saying.cancel()
                    await asyncio.gather(saying, return_exceptions=True)


async def _head(way: _Way) -> h11.Response:
    while not isinstance(event := await way.read(), h11.Response):
        if not isinstance(event, h11.InformationalResponse):
            raise ConnectionResetError("it closed the connection without an answer")
    return event


async def _say(way: _Way, receive: Receive, has_body: bool) -> None:
    """The body of a request; it does not end before the caller has left."""
    while has_body:
        message = await receive()
        if message["type"] != "http.request":
            return
        if message.get("body"):
            await way.write(h11.Data(data=message["body"]))
        has_body = message.get("more_body", False)
    await way.write(h11.EndOfMessage())
    await client_left(receive)


async def _or_left(reading: Coroutine[Any, Any, Any], saying: "asyncio.Task[None]") -> Any:  # of h11's
    """What is read, if the caller does not leave before it is there."""
    read = asyncio.ensure_future(reading)
    try:
        await asyncio.wait((read, saying), return_when=asyncio.FIRST_COMPLETED)
        if read.done():
            return read.result()
        saying.result()
        raise ClientDisconnect
    finally:
        if not read.done():
            read.cancel()
            await asyncio.gather(read, return_exceptions=True)


def _why(error: Exception) -> str:
    """In words of this: those of HTTP's states help nobody."""
    return (str(error) if isinstance(error, OSError) else "") or "it has closed the connection"


def _request(method: str, target: bytes, headers: Headers) -> h11.Request:
    try:
        return h11.Request(method=method.encode(), target=target, headers=headers)
    except h11.LocalProtocolError as error:
        raise Problem("bad-request", f"this request cannot be sent on: {error}") from None


def _with_host(headers: Headers) -> Headers:
    """HTTP/1.0 has requests without one, which are let in; HTTP/1.1 has not."""
    if any(name == b"host" for name, _ in headers):
        return headers
    return [(b"host", b"localhost"), *headers]


def _with_length(asked: Asked) -> Headers:
    if not asked.body:
        return asked.headers
    return [*asked.headers, (b"content-length", str(len(asked.body)).encode())]


def passed_headers(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Those that go on."""
    return [(name, value) for name, value in headers if name not in _OF_THE_WAY]


def target_of(scope: Scope) -> bytes:
    raw: bytes = scope["raw_path"].partition(b"?")[0]
    query: bytes = scope["query_string"]
    return raw + b"?" + query if query else raw


def unreachable(front_end: str, why: str) -> Problem:
    return Problem(
        "no-leader",
        f"front-end {front_end} has it, and cannot be reached: {why}; try again in a second",
        headers={"Retry-After": "1"},
    )


def unanswered(front_end: str, method: str, why: str) -> Problem:
    """It was asked, and does not answer."""
    if method in ("GET", "HEAD"):
        return unreachable(front_end, why)
    return Problem(
        "unavailable",
        f"front-end {front_end} has not answered: {why}. It is not known whether this was carried out; "
        f"messages that are sent with an Idempotency-Key can be sent again with the same",
        headers={"Retry-After": "1"},
    )
