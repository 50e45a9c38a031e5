"""FollowerLink: a follower's end of the link to the leader, from the attempt to connect to the end.

`Dialer` keeps a link to the leader that it was last told of: it connects, says hello, and where that fails
or the link ends it tries again, soon at first and then every second, until it is told of another leader or
of none.

How it fails: it does not; why there is no link is told to `on_down`.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import Final, TypeVar

from penstock.cluster.frames import Frame, Hello, Kind, decode_json, violation
from penstock.cluster.link import SHUTDOWN_SECONDS, Link
from penstock.cluster.trust import ANOTHER_KEY, Asking, Leader, shown

PAUSE_SECONDS_MIN: Final = 0.05
PAUSE_SECONDS_MAX: Final = 1.0
CONNECT_SECONDS: Final = 3.0
LINK_BUFFER_BYTES: Final = 4 << 20


_Peer = TypeVar("_Peer", bound=asyncio.BaseProtocol)


async def connect(leader: Leader, protocol: Callable[[], _Peer]) -> _Peer:
    """A connection to the leader's relay, whose certificate is good; `OSError`, `TimeoutError`."""
    async with asyncio.timeout(CONNECT_SECONDS):
        _, link = await asyncio.get_running_loop().create_connection(
            protocol,
            leader.address.host,
            leader.address.port,
            ssl=leader.trust.client,
            ssl_shutdown_timeout=SHUTDOWN_SECONDS,
        )
    return link


def why_not(error: OSError) -> str:
    """Why that has failed. (`TimeoutError` is an `OSError`.)"""
    if isinstance(error, ssl.SSLError):
        return f"no TLS with it ({error.reason or error}): {ANOTHER_KEY}"
    if isinstance(error, ConnectionResetError):
        return f"it has closed the link; where it does so again and again, {ANOTHER_KEY}"
    return str(error) or "it does not answer"


class FollowerLink(Link):
    def __init__(self, leader: Leader, hello: Hello, dialer: "Dialer") -> None:
        super().__init__()
        self.target = leader, hello
        self._asking = Asking(leader, hello)
        self._proved = False
        self._dialer = dialer
        self._welcome = False
        self.is_full = False  # it takes more, and whoever has much to say had better wait

    def on_open(self) -> None:
        assert self._transport is not None
        self._transport.set_write_buffer_limits(high=LINK_BUFFER_BYTES)
        self.write(self._asking.hello())

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        if self._welcome:
            self._dialer.on_room()

    def on_frame(self, frame: Frame) -> None:
        if self._welcome:
            self._dialer.on_frame(frame)
            return
        if not self._proved:
            assert self._transport is not None
            self.write(self._asking.prove(frame, shown(self._transport)))
            self._proved = True
            return
        if frame.kind is not Kind.WELCOME:
            raise violation(f"a leader that says {frame.kind.name} where its WELCOME is due", frame.position)
        if len(frame.body):
            self.close(f"the leader refused it: {decode_json(frame).get('refused')}")
            return
        self._welcome = True
        self.trust()
        self._dialer.welcomed(self)

    def on_lost(self, why: str) -> None:
        self._dialer.link_ended(self, why)


class Dialer:
    def __init__(
        self,
        on_up: Callable[[FollowerLink], None],
        on_down: Callable[[str], None],
        on_frame: Callable[[Frame], None],
        on_room: Callable[[], None],
    ) -> None:
        self._on_up = on_up
        self._on_down = on_down
        self.on_frame = on_frame
        self.on_room = on_room  # a link that was full is not any more
        self._loop = asyncio.get_running_loop()
        self._target: tuple[Leader, Hello] | None = None
        self._link: FollowerLink | None = None  # the one that counts, welcome or not
        self._is_up = False
        self._up_since = 0.0
        self._pause_seconds = PAUSE_SECONDS_MIN
        self._attempt: asyncio.Task[None] | None = None
        self._again: asyncio.TimerHandle | None = None

    def dial(self, leader: Leader, hello: Hello) -> None:
        """This is the leader from now on."""
        if self._target == (leader, hello) and (self._link is not None or self._attempt is not None):
            return
        self.hang_up("there is another leader")
        self._target = (leader, hello)
        self._pause_seconds = PAUSE_SECONDS_MIN
        self._try()

    def hang_up(self, why: str) -> None:
        """There is no leader from now on."""
        self._target = None
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if self._attempt is not None:
            self._attempt.cancel()
            self._attempt = None
        link, self._link = self._link, None
        if link is not None:
            link.abort(why)
            self._down(why)

    def _try(self) -> None:
        self._again = None
        self._attempt = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        assert self._target is not None
        leader, hello = self._target
        try:
            link = await connect(leader, lambda: FollowerLink(leader, hello, self))
        except (OSError, TimeoutError) as error:
            self._attempt = None
            self._on_down(f"the leader's relay at {leader.address} cannot be reached: {why_not(error)}")
            self._try_again()
            return
        self._attempt = None
        self._link = link
        if not link.is_open:
            self.link_ended(link, link.ending)

    def _try_again(self) -> None:
        if self._target is not None and self._again is None:
            self._again = self._loop.call_later(self._pause_seconds, self._try)
            self._pause_seconds = min(2 * self._pause_seconds, PAUSE_SECONDS_MAX)

    def welcomed(self, link: FollowerLink) -> None:
        if self._target != link.target:
            link.abort("this is not the leader any more")
            return
        self._link = link
        self._is_up = True
        self._up_since = self._loop.time()
        self._on_up(link)

    def link_ended(self, link: FollowerLink, why: str) -> None:
        if link is self._link:
            self._link = None
            if self._is_up and self._loop.time() - self._up_since > PAUSE_SECONDS_MAX:
                self._pause_seconds = PAUSE_SECONDS_MIN
            self._down(why)
            self._try_again()

    def _down(self, why: str) -> None:
        self._is_up = False
        self._on_down(why)
