"""Backend: where the messages of a server go, and who has their log.

A `Server` has listeners, connections, turns and a second process, whoever stores what its clients say. That
is its backend's business: a log in a folder of its own, or one that it shares with other front-ends
(`cluster/front.py`, which has its own way in all of these). A backend tells the server where words go from
now on (`Server.move_to`).
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.broker.broker import Broker
from penstock.log.errors import LogFailed
from penstock.log.log import Log, open_log

if TYPE_CHECKING:
    from penstock.server.calls.context import Answer
    from penstock.server.server import Server


class Served(NamedTuple):
    """A log that this process writes, with the broker before it. Of several, `shard` says which it is."""

    shard: int
    broker: Broker
    log: Log
    is_closing: bool = False  # nobody speaks to it any more, but for what it has still to tell


class Backend:
    """A log in a folder of this server's own. A new one has moved the server to somewhere."""

    folder: str  # all that it keeps; it has a lock, from `join` on

    def __init__(self, server: "Server") -> None:
        self.server = server
        settings = server.settings
        self.folder = settings.data
        log = open_log(
            settings.data,
            server.now_us(),
            settings=settings.log,
            policies=settings.policies,
            wake=server.wake,
        )
        broker = server.make_broker(log)
        server.move_to(broker, Served(0, broker, log))

    async def join(self) -> None:
        """Whatever comes before the server listens."""

    async def open_http(self) -> None:
        """The server listens: so may its second process."""
        second = self.server.second
        if second is not None:
            await second.listen()
            second.start()

    def open_way(self, to: str, caller: str, answer: "Answer") -> None:
        """A connection to the HTTP process of another front-end, handed to our own by its bell."""
        answer.refuse("bug", "there are no other front-ends")

    def cluster_info(self) -> dict[str, Any] | None:
        """What people see of the cluster; None: there is none."""
        return None

    def facts(self) -> dict[str, object]:
        """What the line says that tells that it is ready."""
        return {"data": self.server.settings.data, "opening": self.server.log.opening}

    def before_turn(self) -> None:
        """A turn of the loop is about to end."""

    def drain(self) -> None:
        """The server stops: nothing is handed out any more; then, a moment later, `dismiss`."""
        self.server.home.drain()

    @property
    def answers_for_others(self) -> bool:
        """Whether callers at other front-ends come to its HTTP API: that goes on until its own clients are
        gone, and its logs go to others then."""
        return False

    def dismiss(self) -> None:
        """Let those clients go who hold nothing."""
        self.server.home.dismiss()

    @property
    def is_drained(self) -> bool:
        return self.server.home.is_drained

    def fail(self, error: LogFailed) -> None:
        """The log is of no use any more."""
        self.server.give_up(error)

    async def close(self) -> None:
        """All clients are gone."""
        self.server.log.close(self.server.now_us())
