"""Backend: where the messages of a server go, and who has their log.

A `Server` has listeners, connections, turns and a second process, whoever stores what its clients say. That
is its backend's business: a log in a folder of its own (`Standalone`), or one that it shares with other
front-ends (`cluster/front.py`). A backend tells the server where words go from now on (`Server.move_to`), and
is asked where its own way differs.
"""

from typing import TYPE_CHECKING, Protocol

from penstock.log.errors import LogFailed
from penstock.log.log import open_log

if TYPE_CHECKING:
    from penstock.server.server import Server


class Backend(Protocol):
    """What a server asks of it. A new one has moved the server to somewhere."""

    async def join(self) -> None:
        """Whatever comes before the server listens."""

    async def open_http(self) -> None:
        """The server listens: so may its second process."""

    def facts(self) -> dict[str, object]:
        """What the line says that tells that it is ready."""

    def before_turn(self) -> None:
        """A turn of the loop is about to end."""

    def drain(self) -> None:
        """The server stops: nothing is handed out any more; then, a moment later, `dismiss`."""

    def dismiss(self) -> None:
        """Let those clients go who hold nothing."""

    @property
    def is_drained(self) -> bool: ...

    def fail(self, error: LogFailed) -> None:
        """The log is of no use any more."""

    async def close(self) -> None:
        """All clients are gone."""


class Standalone:
    """A log in a folder of this server's own."""

    def __init__(self, server: "Server") -> None:
        self._server = server
        settings = server.settings
        log = open_log(
            settings.data,
            server.now_us(),
            settings=settings.log,
            policies=settings.policies,
            wake=server.wake,
        )
        server.move_to(server.make_broker(log), log)

    async def join(self) -> None:
        pass

    async def open_http(self) -> None:
        second = self._server.second
        if second is not None:
            await second.listen()
            second.start()

    def facts(self) -> dict[str, object]:
        return {"data": self._server.settings.data, "opening": self._server.log.opening}

    def before_turn(self) -> None:
        pass

    def drain(self) -> None:
        self._server.home.drain()

    def dismiss(self) -> None:
        self._server.home.dismiss()

    @property
    def is_drained(self) -> bool:
        return self._server.home.is_drained

    def fail(self, error: LogFailed) -> None:
        self._server.give_up(error)

    async def close(self) -> None:
        self._server.log.close(self._server.now_us())
