"""App: every request to its route, every ending to an answer.

    find     the route by method and path; a segment of the path is decoded alone, so that a
             queue named `a/b` is `a%2Fb`
    admit    the caller's token or, without tokens, its whereabouts
    check    parameters by the route's row; one that no row has is refused
    run      the route's handler
    answer   what it returns, or the problem that it raised

Rules that always hold:
  * No exception leaves here: what is not a problem is logged and becomes `internal`.
  * A body is read by its handler, up to a bound; nothing is kept of what is beyond.
"""

import asyncio
import contextlib
import difflib
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import lru_cache
from itertools import chain, islice
from typing import Any, Final, Protocol
from urllib.parse import parse_qsl, unquote_to_bytes

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from penstock.control.frames import Fields
from penstock.errors import PenstockError
from penstock.http.answers import PIECE_BYTES, hand_over
from penstock.http.auth import USER, check_local, forbidden
from penstock.http.connection import CONNECTION, BoundedProtocol
from penstock.http.kinds import WrongValue
from penstock.http.problems import Problem, problem_of
from penstock.http.route import JSON_MEDIA, Field, Param, Route
from penstock.http.site import Site
from penstock.model.rights import NOBODY, Right, User

log = logging.getLogger("penstock.http")

QUERY_CHARACTERS_MAX: Final = 64 * 1024
SHORT_QUERY_BYTES: Final = 128
DISCARD_BYTES_MAX: Final = 1 << 30
DISCARD_SECONDS_MAX: Final = 10.0
NO_ROUTE: Final = "(none)"
REFUSALS: Final = frozenset({"unauthorized", "forbidden", "too-many-guesses"})
CALLER: Final = "penstock.caller"
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE"})
_ANY: Final = "{}"
LIST_PART: Final = 200
"""Items of a long list whose JSON is made in one go: about a millisecond."""


class Reading:
    """A request whose body is read, within bounds."""

    __slots__ = ("held_bytes", "request", "site")

    def __init__(self, site: Site, request: Request) -> None:
        self.site = site
        self.request = request
        self.held_bytes = 0  # of its body

    async def body(self, bytes_max: int | None = None) -> bytes:
        """The whole body; a Problem where it is larger than allowed."""
        most = self.site.body_bytes_max if bytes_max is None else bytes_max
        connection: BoundedProtocol | None = self.request.scope.get(CONNECTION)
        whole = connection.whole_body(self.request.scope) if connection is not None else None
        if whole is not None:  # as nearly always where it is small
            if len(whole) > most:
                raise _too_large(most)
            if not self._hold(len(whole)):
                raise self.site.held.no_room()
            return whole
        length = self.request.headers.get("content-length", "")
        parts: list[bytes] = []
        gathered = int(length[:18]) if length.isdigit() else 0
        if gathered <= most:
            gathered = 0
            seconds = self.site.frame_seconds
            try:
                async with asyncio.timeout(seconds) as patience:
                    self.site.held.reading[self] = patience
                    async for chunk in self.request.stream():
                        gathered += len(chunk)
                        if gathered > most or not self._hold(len(chunk)):
                            break
                        parts.append(chunk)
                        patience.reschedule(asyncio.get_running_loop().time() + seconds)
                    else:
                        return b"".join(parts)
            except TimeoutError:
                if self in self.site.held.reading:
                    raise _too_slow(seconds) from None
            finally:
                self.site.held.reading.pop(self, None)
        problem = _too_large(most) if gathered > most else self.site.held.no_room()
        parts.clear()
        self.let_go()
        await _discard(self.request.stream())
        raise problem

    def _hold(self, count: int) -> bool:
        has_room = self.site.held.hold_body(count, self.held_bytes)
        if has_room:
            self.held_bytes += count
        return has_room

    def let_go(self) -> None:
        if self.held_bytes:
            self.site.held.let_body_go(self.held_bytes)
            self.held_bytes = 0


class Call(Reading):
    """One request on its way through its handler."""

    __slots__ = ("route", "user", "values")

    def __init__(
        self, site: Site, route: Route, request: Request, user: User, values: Mapping[str, Any]
    ) -> None:
        super().__init__(site, request)
        self.route = route
        self.user = user
        self.values = values  # of every parameter, its default where it was not given

    def __getitem__(self, name: str) -> Any:  # a parameter's kind has checked it
        return self.values[name]

    @property
    def media(self) -> str:
        """The body's media type, without parameters, in lower case."""
        return self.request.headers.get("content-type", "").partition(";")[0].strip().lower()

    def require(self, right: Right, queues: Iterable[str]) -> None:
        """Say no where who asks has not this right with one of them."""
        for queue in queues:
            if not self.user.may(right, queue):
                raise forbidden(self.user, right, queue)

    @property
    def user_now(self) -> User | None:
        """Who asks, with the rights of now: those of `user` may be over. None: nobody any more."""
        within: Callable[[], User | None] | None = self.request.scope.get(USER)
        return within() if within is not None else self.site.guard.user_now(self.request.headers)

    def check_still(self, queue: str | None = None) -> None:
        """Say no where what the route needs was taken away since the call came. A queue is named where that
        is not in the path."""
        queue = queue or self.values.get("queue")
        if not (self.user_now or NOBODY).may(self.route.right, queue):
            raise forbidden(self.user, self.route.right, queue)

    def act(self, name: str, **facts: object) -> AbstractAsyncContextManager[Fields]:
        """What changes something, for the audit: `async with`."""
        return self.site.auditing.act({**whence(self.request.scope, self.user.name), "act": name, **facts})

    async def check_wanted(self, so_far: str, queue: str | None = None) -> None:
        """Long work ends early where nobody waits for it any more, or may have it, or the broker stops."""
        self.check_still(queue)
        if await self.request.is_disconnected():
            raise ClientDisconnect
        if self.site.stopping.is_set():
            raise Problem("unavailable", f"the broker stops; {so_far}")

    async def fields(self) -> dict[str, Any]:
        """The members of a JSON body, checked by the route's row; defaults where they are absent."""
        given = await self.json()
        assert self.route.body is not None
        return check_fields(given, self.route.body.fields)

    async def json(self) -> object:
        """What a JSON body says; an empty object where there is none and need not be one."""
        assert self.route.body is not None
        raw = await self.body()
        if self.media not in ("", JSON_MEDIA) and raw:
            raise Problem("unsupported-media-type", f"the body is {self.media!r}; send {JSON_MEDIA}")
        if not raw and not self.route.body.required:
            return {}
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise Problem("bad-request", f"the body is not JSON: {error}") from None


async def _discard(stream: AsyncIterator[bytes]) -> None:
    """Read on without keeping anything: most callers hear an answer only when they have sent all."""
    gathered = 0
    # Where all has come already, and the last of it was too much, Starlette raises a RuntimeError.
    with contextlib.suppress(TimeoutError, RuntimeError):
        async with asyncio.timeout(DISCARD_SECONDS_MAX):
            async for chunk in stream:
                gathered += len(chunk)
                if gathered > DISCARD_BYTES_MAX:
                    return


def check_fields(given: object, fields: tuple[Field, ...]) -> dict[str, Any]:
    """A JSON object judged by a table of fields."""
    if not isinstance(given, dict):
        raise Problem("bad-request", "the body is JSON, but no object; send {…}")
    for name in given:
        if all(name != it.name for it in fields):
            raise Problem(
                "bad-request", f"there is no field {name!r}{_near(name, (it.name for it in fields))}"
            )
    values: dict[str, Any] = {}
    for it in fields:
        if it.name not in given or (given[it.name] is None and not it.required):
            if it.required:
                raise Problem("bad-request", f"the field {it.name!r} is missing: {it.help}")
            values[it.name] = it.default
            continue
        try:
            values[it.name] = it.kind.check(given[it.name])
        except WrongValue as error:
            raise Problem("bad-request", f"field {it.name!r}: {error}") from None
    return values


def _too_large(most: int) -> Problem:
    # Some of it may still be on its way: the connection cannot be used any more.
    return Problem(
        "body-too-large",
        f"the body has more than {most} bytes, the limit of [http] body-bytes-max; send less at a time",
        headers={"Connection": "close"},
    )


def _too_slow(seconds: int) -> Problem:
    return Problem(
        "request-timeout",
        f"nothing more of the body has come for {seconds} s, the limit of [limits] frame-seconds; try again",
        headers={"Connection": "close"},
    )


def moved() -> Problem:
    """What was asked for has ended here under way."""
    return Problem(
        "no-leader",
        "this log is not led here any more; try again in a second",
        headers={"Retry-After": "1"},
    )


def _near(name: str, names: Iterable[str]) -> str:
    names = list(names)
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; there are {', '.join(names)}" if names else "; there are none here"


class Door(Protocol):
    """What the application needs of the dashboard."""

    def takes(self, scope: Scope) -> bool: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class App:
    """The ASGI application."""

    def __init__(self, site: Site, routes: Iterable[Route]) -> None:
        self._site = site
        self.door: Door | None = None
        """Takes what is for the dashboard; None where that is not installed."""

        self._routes: dict[tuple[int, str], list[Route]] = {}  # by how many segments there are, and the last
        for route in routes:
            last = route.segments[-1] if route.segments else ""
            key = (len(route.segments), _ANY if last.startswith("{") else last)
            self._routes.setdefault(key, []).append(route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.door is not None and self.door.takes(scope):
            await self.door(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        response: Response
        try:
            response = await self._respond(Request(scope, receive))
        except ClientDisconnect:
            return
        except asyncio.CancelledError:
            if not self._site.stopping.is_set():
                raise
            response = Problem("unavailable", "the broker is stopping").response()
        except PenstockError as error:
            problem = problem_of(error)
            if problem is None or problem.status == 500:
                log.exception("%s %s failed", scope["method"], scope["path"])
            elif problem.name in REFUSALS:
                self._site.auditing.refused(
                    **whence(scope, scope.get(CALLER, "")),
                    act=f"{_method(scope)} {scope.get('penstock.route', NO_ROUTE)}",
                    queue=str(problem.more.get("queue", "")),
                    result=problem.name,
                )
            response = (problem or Problem("internal", str(error))).response()
        except Exception:  # the last place where a fault of ours can become an answer
            if self._site.is_closed:
                response = moved().response()
            else:
                log.exception("%s %s failed", scope["method"], scope["path"])
                response = Problem(
                    "internal", "this is a fault of the broker's; its log says more"
                ).response()
        kind = f"{response.status_code // 100}xx"
        self._site.requests[_method(scope), scope.get("penstock.route", NO_ROUTE), kind] += 1
        await self._answer(response, scope, receive, send)

    async def _answer(self, response: Response, scope: Scope, receive: Receive, send: Send) -> None:
        connection: BoundedProtocol | None = scope.get(CONNECTION)
        body = getattr(response, "body", b"")  # Those that come in parts have none, and bounds of their own.
        if connection is None or len(body) <= PIECE_BYTES:
            await response(scope, receive, send)
        elif not self._site.held.hold_answer(len(body), must=scope["method"] not in ("GET", "HEAD")):
            await self._site.held.no_room().response()(scope, receive, send)
        else:
            try:
                await hand_over(
                    self._site, connection, send, response.status_code, response.raw_headers, bytes(body)
                )
            except TimeoutError:
                seconds = self._site.frame_seconds
                log.warning("a caller took nothing of its answer for %d s: closed", seconds)

    async def _respond(self, request: Request) -> Response:
        route, values = await self._find(request)
        request.scope["penstock.route"] = route.path
        user = self._anyone(request)
        if route.right:
            user = await self._admit(request, route, values.get("queue"))
        values |= _query_values(request.scope["query_string"], route)
        values |= _header_values(request.headers, route)
        call = Call(self._site, route, request, user, values)
        try:
            return await route.handler(call)
        finally:
            call.let_go()

    async def _admit(self, request: Request, route: Route, queue: str | None) -> User:
        user = await self.identify(request)
        request.scope[CALLER] = user.name
        right = route.right
        if queue is None and not route.everywhere and right is not Right.ADMIN:
            may = user.may_some(right)
        else:
            may = user.may(right, queue)
        if not may:
            raise forbidden(user, right, queue)
        return user

    async def identify(self, request: Request) -> User:
        """Who asks; a Problem where that is not known."""
        within: Callable[[], User | None] | None = request.scope.get(USER)
        if within is not None:
            return within() or NOBODY
        client = request.scope["client"]
        return await self._site.guard.identify(request.headers, client[0] if client else "")

    def _anyone(self, request: Request) -> User:
        if self._site.guard.is_open:
            check_local(request.headers)
        return NOBODY

    async def _find(self, request: Request) -> tuple[Route, dict[str, Any]]:
        raw: bytes = request.scope["raw_path"]
        segments = segments_of(raw)
        method = "GET" if request.method == "HEAD" else request.method
        allowed: list[str] = []
        last = segments[-1] if segments else ""
        alike = (self._routes.get((len(segments), it), ()) for it in (last, _ANY))
        for route in chain.from_iterable(alike):
            texts = _match(route, segments)
            if texts is None:
                continue
            if route.method != method or (request.method == "HEAD" and route.streams):
                allowed += [route.method] if route.streams or route.method != "GET" else ["GET", "HEAD"]
                continue
            return route, texts
        if allowed:
            # Whoever is nobody here is not told what there is.
            await self.identify(request)
            raise Problem(
                "method-not-allowed",
                f"{request.method} is not offered here; there is {', '.join(sorted(allowed))}",
                headers={"Allow": ", ".join(sorted(allowed))},
            )
        self._anyone(request)
        raise Problem("not-found", "there is nothing at this address; /openapi.json lists what there is")


def whence(scope: Scope, who: str) -> dict[str, str]:
    """Who asks, from where, for the audit."""
    client = scope["client"]
    return {
        "who": who,
        "from": client[0] if client else "this machine",
        "door": "page" if USER in scope else "http",
    }


def _method(scope: Scope) -> str:
    """The method as it is counted: callers may make some up."""
    method: str = scope["method"]
    return method if method in METHODS else "(other)"


def segments_of(raw: bytes) -> list[str]:
    path = raw.partition(b"?")[0]
    if path == b"/":
        return []
    try:
        if b"%" not in path:
            return path.decode().removeprefix("/").split("/")
        return [unquote_to_bytes(segment).decode() for segment in path.removeprefix(b"/").split(b"/")]
    except UnicodeDecodeError:
        raise Problem(
            "bad-request", "the path is not UTF-8; encode names as UTF-8 and then by percents"
        ) from None


def _match(route: Route, segments: list[str]) -> dict[str, Any] | None:
    values: dict[str, Any] = {}
    for wanted, segment in zip(route.segments, segments, strict=True):
        if wanted.startswith("{"):
            values[wanted[1:-1]] = segment
        elif wanted != segment:
            return None
    for param in route.path_params:
        values[param.name] = _value(param, values[param.name])
    return values


def _value(param: Param, text: str) -> object:
    try:
        return param.kind.parse(text)
    except WrongValue as error:
        raise Problem("bad-request", f"{param.where} parameter {param.name!r}: {error}") from None


def _query_values(query: bytes, route: Route) -> dict[str, Any]:
    params = route.query_params
    values = {param.name: param.default for param in params.values()}
    if len(query) > QUERY_CHARACTERS_MAX:
        raise Problem("bad-request", f"the query has more than {QUERY_CHARACTERS_MAX} characters")
    try:
        given = (_short_query if len(query) < SHORT_QUERY_BYTES else _pairs_of)(query)
    except ValueError:
        raise Problem("bad-request", "the query is not UTF-8; encode it by percents") from None
    seen: set[str] = set()
    for name, text in given:
        if name not in params:
            raise Problem("bad-request", f"there is no parameter {name!r} here{_near(name, params)}")
        if name in seen:
            raise Problem("bad-request", f"parameter {name!r} is given twice")
        seen.add(name)
        values[name] = _value(params[name], text)
    for param in params.values():
        if param.required and param.name not in seen:
            raise Problem("bad-request", f"parameter {param.name!r} is missing: {param.help}")
    return values


def _pairs_of(query: bytes) -> list[tuple[str, str]]:
    return parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict")


_short_query: Final = lru_cache(256)(_pairs_of)
"""A worker asks for the same again and again."""


def _header_values(headers: Headers, route: Route) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for param in route.header_params:
        text = headers.get(param.name)
        values[param.name] = param.default if text is None else _value(param, text)
    return values


def answer_json(fields: Mapping[str, Any]) -> JSONResponse:
    """The usual answer."""
    return JSONResponse(dict(fields))


async def answer_list(name: str, items: Iterable[Mapping[str, Any]], **rest: object) -> Response:
    """An object with a list that may be long. Between parts of its JSON, others get their turn."""
    remaining = iter(items)
    parts: list[str] = []
    while part := list(islice(remaining, LIST_PART)):
        parts.append(json_text(part)[1:-1])
        await asyncio.sleep(0)
    members = {name: f"[{','.join(parts)}]", **{key: json_text(it) for key, it in rest.items()}}
    text = ",".join(f"{json_text(key)}:{member}" for key, member in members.items())
    return Response(f"{{{text}}}", media_type=JSON_MEDIA)


def json_text(value: object) -> str:
    """JSON as answers have it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


async def client_left(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
