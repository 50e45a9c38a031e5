"""Door: what stands between a browser and the dashboard's pages.

    page?     browsers ask for pages (`Accept: text/html`); everybody else goes on to the API
    admit     the same checks of host and origin as the API; where there are tokens, a session too
    sign-in   a form that takes a token; the browser gets a cookie, the token stays here
    pages     NiceGUI, imported and started with the first visit: nobody who does not come pays for it
    headers   what a browser is told to refuse: other hosts, frames, scripts that are not ours

Rules that always hold:
  * A page of another site gets nothing here: its requests are refused by their `Origin`, its websockets
    too; the cookie is `SameSite=Strict`; no page shows in a frame.
  * Scripts run only from this host's files, or inline with the number (`nonce`) of that one answer. What
    a message or a name could smuggle into a page has no such number.
  * Without a session nothing is served but the sign-in page and the style sheet.

How it fails: as the API does, with a problem; a browser without a session is sent to the sign-in page.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.dashboard import signin
from penstock.dashboard.sessions import Session, Sessions
from penstock.http.auth import check_local
from penstock.http.problems import Problem
from penstock.http.site import Site

ASSETS: Final = Path(__file__).parent / "assets"
FILES: Final = frozenset(f"/{path.relative_to(ASSETS)}" for path in ASSETS.rglob("*") if path.is_file())
"""All that is served from there."""

API_PATHS: Final = frozenset({"v1", "metrics", "healthz", "readyz", "openapi.json"})
"""First segments of paths that are the API's, whoever asks."""

FILE_PATHS: Final = frozenset({"_penstock", "favicon.ico"})
OWN_PATHS: Final = FILE_PATHS | {"_nicegui", "_nicegui_ws", "sign-in", "sign-out", "export"}
"""First segments of paths that are the dashboard's, whatever is accepted."""

ICON_PATH: Final = "/favicon.ico"
"""Where browsers look for an icon by themselves."""

FORM_BYTES_MAX: Final = 16 * 1024

CONTENT_POLICY: Final = (
    "default-src 'none'; "
    # NiceGUI compiles its templates in the browser: 'unsafe-eval'. Inline scripts need the nonce.
    "script-src 'self' 'nonce-{nonce}' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self'; connect-src 'self'; manifest-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # With "no-referrer" a browser would hide the origin of our own forms, too.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_NO_FILE: Final = Problem("not-found", "the dashboard has no such file")

StartPages = Callable[[], Awaitable[ASGIApp]]


class Door:
    """The ASGI application of everything that is a page."""

    def __init__(self, site: Site, start_pages: StartPages) -> None:
        self._site = site
        self._sessions = Sessions(site.guard)
        self._start_pages = start_pages
        self._starting: asyncio.Task[ASGIApp] | None = None
        self._assets = StaticFiles(directory=ASSETS)
        self._guarded = GZipMiddleware(self._guard_content, minimum_size=1000, compresslevel=6)

    def takes(self, scope: Scope) -> bool:
        """Whether a request is for a page and not for the API."""
        if scope["type"] == "websocket":
            return True
        first = _first(scope)
        if first in OWN_PATHS:
            return True
        is_page = first not in API_PATHS and scope["path"].startswith("/")  # and not the `*` of OPTIONS
        return is_page and "text/html" in Headers(scope=scope).get("accept", "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_site(Headers(scope=scope))
        except Problem as problem:
            if scope["type"] == "websocket":
                await _refuse_websocket(receive, send)
            else:
                await problem.response()(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self._guarded(scope, receive, send)

    def _check_site(self, headers: Headers) -> None:
        if self._site.guard.is_open:
            check_local(headers)
        # With tokens the API does not look at where a call comes from. A cookie makes that necessary.
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != headers.get("host", ""):
            raise Problem(
                "forbidden",
                "a page of another site asks for the dashboard; a proxy in front of it must pass on `Host`",
            )

    # --- pages -----------------------------------------------------------------------------------

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = self._session(scope)
        if session is None or not scope["path"].startswith("/_nicegui_ws/socket.io/"):
            await _refuse_websocket(receive, send)
            return
        await (await self._pages())(scope, receive, send)

    async def _pages(self) -> ASGIApp:
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start_pages())
        try:
            return await asyncio.shield(self._starting)
        except BaseException:
            if self._starting.done():
                self._starting = None  # the next visit tries again
            raise

    async def _guard_content(self, scope: Scope, receive: Receive, send: Send) -> None:
        nonce = secrets.token_urlsafe(16)
        await self._route(scope, receive, _Guarding(send, nonce).send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if _first(scope) in FILE_PATHS:
            file = path.removeprefix("/_penstock") if path != ICON_PATH else "/favicon.svg"
            if file not in FILES:
                await _NO_FILE.response()(scope, receive, send)
                return
            try:
                await self._assets({**scope, "path": file, "root_path": ""}, receive, send)
            except HTTPException:  # It is there; so it is the method.
                await _not_offered(scope["method"]).response()(scope, receive, send)
            return
        try:
            response = await self._own(scope, receive)
        except Problem as problem:
            response = problem.response()
        if response is not None:
            await response(scope, receive, send)
            return
        # Behind this point there are only pages and their files.
        await (await self._pages())({**scope, "method": "GET"}, receive, send)

    async def _own(self, scope: Scope, receive: Receive) -> Response | None:
        """The answer where it is not a page's: signing in and out, and closed doors. None: go on."""
        path, method = scope["path"], scope["method"]
        request = Request(scope, receive)
        if path == "/sign-in" and not self._site.guard.is_open:
            return await self._sign_in(request)
        if path == "/sign-out" and method == "POST":
            self._sessions.end(_cookie(scope))
            answer = RedirectResponse("/sign-in", 303)
            answer.delete_cookie(_cookie_name(scope), path="/", httponly=True, samesite="strict")
            return answer
        if method not in ("GET", "HEAD"):
            raise _not_offered(method)
        if path in ("/sign-in", "/sign-out"):
            return RedirectResponse("/", 303)
        session = self._session(scope)
        if session is not None:
            scope["penstock.session"] = session
            return None
        if "text/html" not in request.headers.get("accept", ""):
            raise Problem("unauthorized", "sign in at /sign-in with a token of the broker's")
        if request.headers.get("sec-fetch-site") == "cross-site":
            # Somebody followed a link: their strict cookie comes only with a step that begins here.
            return HTMLResponse(signin.step_page(_target(scope)))
        return RedirectResponse(f"/sign-in?{urlencode({'next': _target(scope)})}", 303)

    def _session(self, scope: Scope) -> Session | None:
        return self._sessions.find(_cookie(scope))

    async def _sign_in(self, request: Request) -> Response:
        if request.method in ("GET", "HEAD"):
            target = _local(request.query_params.get("next", "/"))
            if self._session(request.scope) is not None:
                return RedirectResponse(target, 303)
            return HTMLResponse(signin.page(target))
        if request.method != "POST":
            raise _not_offered(request.method)
        form = parse_qs((await _small_body(request, self._site.frame_seconds)).decode("utf-8", "replace"))
        target = _local(form.get("next", ["/"])[0])
        address = request.client.host if request.client else ""
        told = {"from": address or "this machine", "door": "page", "act": "sign in"}
        try:
            secret = await self._sessions.start(form.get("token", [""])[0].strip(), address)
        except Problem as problem:
            self._site.auditing.refused(who="", **told, result=problem.name)
            return HTMLResponse(signin.page(target, wrong=problem), problem.status, problem.headers)
        session = self._sessions.find(secret)
        async with self._site.auditing.act({"who": session.name if session is not None else "", **told}):
            answer = RedirectResponse(target, 303)
        answer.set_cookie(
            _cookie_name(request.scope),
            secret,
            path="/",
            httponly=True,
            samesite="strict",
            secure=request.scope["scheme"] == "https",
        )
        return answer


class _Guarding:
    """Puts headers on an answer, and its number on the inline scripts of a page."""

    def __init__(self, send: Send, nonce: str) -> None:
        self._send = send
        self._nonce = nonce
        self._start: Message | None = None
        self._parts: list[bytes] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message["headers"])
            for name, value in HEADERS.items():
                headers[name] = value
            headers["Content-Security-Policy"] = CONTENT_POLICY.format(nonce=self._nonce)
            headers.add_vary_header("Accept")
            # A file of ours may be another after the next start; NiceGUI's have their version in the path.
            headers.setdefault("Cache-Control", "no-cache")
            if headers.get("content-type", "").startswith("text/html"):
                headers["Cache-Control"] = "no-store"
                self._start = message
                return
        elif self._start is not None and message["type"] == "http.response.body":
            self._parts.append(message.get("body", b""))
            if message.get("more_body", False):
                return
            # Whatever is data in a page has its "<" escaped, so that these are the page's own scripts.
            body = b"".join(self._parts).replace(b"<script", b'<script nonce="%b"' % self._nonce.encode())
            headers = MutableHeaders(raw=self._start["headers"])
            headers["Content-Length"] = str(len(body))
            await self._send(self._start)
            message = {"type": "http.response.body", "body": body, "more_body": False}
        await self._send(message)


def _first(scope: Scope) -> str:
    """The first segment of a path; empty where it has none."""
    path: str = scope["path"]
    return path.partition("/")[2].partition("/")[0]


async def _refuse_websocket(receive: Receive, send: Send) -> None:
    await receive()
    # Before it was accepted, this is an answer with status 403.
    await send({"type": "websocket.close", "code": 1008, "reason": "not allowed"})


def _not_offered(method: str) -> Problem:
    return Problem("method-not-allowed", f"{method} is not offered here; there is GET")


async def _small_body(request: Request, seconds: float) -> bytes:
    body = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):  # in all: nobody has shown yet who they are
            async for part in request.stream():
                body += part
                if len(body) > FORM_BYTES_MAX:
                    raise Problem(
                        "body-too-large",
                        f"a form has at most {FORM_BYTES_MAX} bytes here",
                        headers={"Connection": "close"},
                    )
            return body
    detail = f"the form has not come within {seconds:g} s, the limit of [limits] frame-seconds; try again"
    raise Problem("request-timeout", detail, headers={"Connection": "close"})


def _target(scope: Scope) -> str:
    """Where a browser wants to go, to be told after it has signed in."""
    query = scope["query_string"].decode("latin-1")
    return quote(scope["path"]) + (f"?{query}" if query else "")


def _local(target: str) -> str:
    """A path of this host, whatever was given: nobody is sent elsewhere from here."""
    plain = target.startswith("/") and not target.startswith(("//", "/\\"))
    return target if plain and target.isascii() and target.isprintable() else "/"


def _cookie_name(scope: Scope) -> str:
    # Browsers tell hosts apart and not ports: two brokers on one machine must not share a cookie.
    server = scope.get("server")
    return f"penstock_{server[1] or 0}" if server else "penstock"


def _cookie(scope: Scope) -> str | None:
    cookies: SimpleCookie = SimpleCookie()
    try:
        cookies.load(Headers(scope=scope).get("cookie", ""))
    except CookieError:
        return None
    found = cookies.get(_cookie_name(scope))
    return found.value if found is not None else None
