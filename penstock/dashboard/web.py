"""Web: NiceGUI, with the dashboard's pages in it. Imported with the first visit only.

NiceGUI keeps its application in a module of its own: there is one for the process. It is started within
the loop that serves the API, and stopped with it. Nothing of it is stored: sessions are ours (`sessions`).
"""

import contextlib
import logging
from pathlib import Path

from fastapi import FastAPI, Request
from nicegui import app as nicegui_app
from nicegui import core, ui
from starlette.responses import Response
from starlette.types import ASGIApp

from penstock.dashboard import exporting
from penstock.dashboard.caller import ApiError, Caller
from penstock.dashboard.feed import Feed
from penstock.dashboard.layout import frame, not_allowed, nothing_here
from penstock.dashboard.pages import PAGES, Page
from penstock.dashboard.sessions import Session
from penstock.dashboard.view import View
from penstock.model.rights import NOBODY, Right, User, by_role

RECONNECT_SECONDS = 5.0
"""How long a page is kept for a browser that is gone; one that comes back later gets a new page."""

BUILD_SECONDS_MAX = 15.0
"""A page that takes longer is given up. Only a machine that is far too busy needs more than a moment."""

HEAD = """
<link rel="stylesheet" href="/_penstock/penstock.css">
<link rel="stylesheet" href="/_penstock/table.css">
<link rel="stylesheet" href="/_penstock/chart.css">
<script src="/_penstock/theme.js"></script>
<script src="/_penstock/page.js" defer></script>
"""
BODY = '<div id="ps-link" class="ps-banner" role="alert" hidden></div>'

FEEDS_KEPT = 100
"""More of them are let go as soon as they rest."""

READER = by_role("dashboard", "read")

NOT_FOUND = Page("/{rest:path}", "Not found", __name__, in_navigation=False)


class Web:
    """The pages, running."""

    def __init__(self, api: ASGIApp) -> None:
        self._api = api
        self._feeds: dict[User, Feed] = {}  # by name and rights; those who see everything share one
        self._parent = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        self._life = contextlib.AsyncExitStack()

    async def start(self) -> ASGIApp:
        """Begin; the ASGI application of the pages."""
        logging.getLogger("nicegui").setLevel(logging.WARNING)
        nicegui_app.config.socket_io_js_transports = ["websocket"]
        core.sio.eio.transports = ["websocket"]
        ui.add_head_html(HEAD, shared=True)
        ui.add_body_html(BODY, shared=True)
        self._parent.add_route(exporting.PATH, self._export)
        for page in PAGES:
            if page.is_there:
                self._register(page)
        ui.page(NOT_FOUND.path)(self._not_found)
        ui.run_with(
            self._parent,
            title="Penstock",
            favicon=(Path(__file__).parent / "assets" / "favicon.svg").read_text(encoding="utf-8"),
            dark=None,
            language="en-US",
            binding_refresh_interval=None,
            reconnect_timeout=RECONNECT_SECONDS,
            gzip_middleware_factory=None,
            tailwind=False,
            show_welcome_message=False,
        )
        await self._life.enter_async_context(self._parent.router.lifespan_context(self._parent))
        return self._parent

    async def stop(self) -> None:
        for feed in self._feeds.values():
            await feed.stop()
        await self._life.aclose()

    def _register(self, page: Page) -> None:
        build = page.builder()

        async def show(request: Request) -> None:
            view = self._view(request, page)
            with frame(view):
                if not view.may_open(PAGES[0]) and page.right is Right.READ and not view.queue:
                    not_allowed(view)  # Who may read nothing and is led here has tried nothing.
                    return
                try:
                    await build(view)
                except ApiError as error:
                    view.client.content.clear()
                    view.client.status_code = error.status
                    if error.problem == "forbidden":
                        not_allowed(view)
                    else:
                        nothing_here(view, str(error))

        ui.page(page.path, title=f"{page.title} · Penstock", response_timeout=BUILD_SECONDS_MAX)(show)

    async def _not_found(self, request: Request) -> None:
        view = self._view(request, NOT_FOUND)
        view.client.status_code = 404
        with frame(view):
            nothing_here(view)

    async def _export(self, request: Request) -> Response:
        return await exporting.export(request, self._caller(request))

    def _caller(self, request: Request) -> Caller:
        session: Session = request.scope["penstock.session"]
        return Caller(self._api, lambda: session.user, request.client.host if request.client else "")

    def _view(self, request: Request, page: Page) -> View:
        session: Session = request.scope["penstock.session"]
        return View(ui.context.client, request, page, session, self._caller(request), self._feed(session))

    def _feed(self, session: Session) -> Feed:
        user = session.user or NOBODY
        if user.may(Right.READ):
            user = READER
        if user not in self._feeds:
            if len(self._feeds) >= FEEDS_KEPT:
                self._feeds = {its: feed for its, feed in self._feeds.items() if feed.is_running}
            # In nobody's session: one that signs out leaves the pages of its other sessions as they are.
            self._feeds[user] = Feed(Caller(self._api, lambda: user))
        return self._feeds[user]
