"""View: what the builder of a page works with. One for each page that is open in a browser.

Rules that always hold:
  * Everything a page reads or does goes through `api`, in its visitor's name; or through the feed, which is
    for all who may see the same.
  * What was registered here stops when the page is closed.
  * A visitor who has signed out, or whose token is gone, is sent to the sign-in page with the next tick; for
    one whose rights have changed, the page is made anew.
"""

from collections.abc import Awaitable, Callable

from fastapi import Request
from nicegui import Client, background_tasks, ui

from penstock.dashboard.caller import ApiError, Caller
from penstock.dashboard.feed import Feed, Listener, Tick
from penstock.dashboard.pages import Page
from penstock.dashboard.sessions import Session
from penstock.model.rights import Right


class View:
    def __init__(
        self, client: Client, request: Request, page: Page, session: Session, api: Caller, feed: Feed
    ) -> None:
        self.client = client
        self.request = request
        self.page = page
        self.session = session
        self.api = api
        self.feed = feed
        self._user = session.user
        self._listeners: list[Listener] = []
        client.on_connect(self._opened)
        client.on_disconnect(self._closed)
        client.on_delete(self._deleted)

    def may(self, right: Right) -> bool:
        """Whether to show what needs this right with the queue of the page. The API decides again."""
        user = self.session.user
        return user is not None and (user.may(right, self.queue) if self.queue else user.may_some(right))

    def may_open(self, page: Page) -> bool:
        """Whether the visitor may see a page that is about no queue in particular."""
        user = self.session.user
        if user is None:
            return False
        return user.may(page.right) if page.everywhere else user.may_some(page.right)

    @property
    def queue(self) -> str:
        """The queue of a page under `/queue/`."""
        name: str = self.request.path_params.get("queue", "") or self.request.query_params.get("name", "")
        return name

    def set_title(self, title: str) -> None:
        """What the browser's tab says. Call it while the page is built."""
        self.client.title = f"{title} · Penstock"

    # --- live data -------------------------------------------------------------------------------

    def on_tick(self, listener: Listener) -> None:
        """To be called once a second while the page is open, with what has changed (`feed.Tick`)."""
        self._listeners.append(listener)

    def on_open(self, handler: Callable[[], None]) -> None:
        """To be called when the browser is connected; again when it comes back after a break."""

        def opened() -> None:
            if self._is_current:
                handler()

        self.client.on_connect(opened)

    def every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        """Do something now and then while the page is open, at once at first.

        An `ApiError` of it is shown to the visitor; the next turn tries again.
        """

        async def turn() -> None:
            if self.client.has_socket_connection:
                await self.run(work)

        ui.timer(seconds, turn)

    async def run(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Do something that calls the API; what it refuses is shown to the visitor. Whether it went well."""
        try:
            await work()
        except ApiError as error:
            self.notify(str(error), wrong=True)
            return False
        return True

    def notify(self, text: str, *, wrong: bool = False) -> None:
        """A line that appears for a while. `text` stays text."""
        with self.client:
            ui.notify(
                text,
                classes="ps-toast ps-toast-bad" if wrong else "ps-toast",
                position="bottom",
                html=False,
                close_button="Close" if wrong else False,
                textColor="toast",  # else Quasar's is white, whatever a style sheet says
            )

    def later(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do something in the background, as `run` does it."""

        async def do() -> None:
            with self.client:
                await self.run(work)

        background_tasks.create(do(), name=f"{self.page.title} of {self.client.id}")

    # --- life ------------------------------------------------------------------------------------

    @property
    def _is_current(self) -> bool:
        """Whether its visitor has the rights that it was built for."""
        return self.session.user is not None and self.session.user == self._user

    def _opened(self) -> None:
        self.feed.listen(self._tick)

    def _closed(self) -> None:
        # A browser that came back may have been heard before its old connection was seen to end.
        if not self.client.has_socket_connection:
            self.feed.forget(self._tick)

    def _deleted(self) -> None:
        self.feed.forget(self._tick)

    def _tick(self, tick: Tick) -> None:
        if not self._is_current:
            self.client.run_javascript("location.reload()")
            return
        self.session.touch()
        with self.client:
            for listener in self._listeners:
                listener(tick)
