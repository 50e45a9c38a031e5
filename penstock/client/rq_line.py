"""A line: one connection of an RQ client to one controller, and its way from the first ping to the end.

    dialled ── heard ──► current ──► retired ──► over
                            └──────────────────►

A controller counts as reached when it has answered a first PING: only then is it known that it speaks RQ
and has room. A line is *retired* when nothing new begins on it: the controller or the client leaves, or a
handler has failed. It ends by itself when nothing is open on it any more, and in any case after a while.

A line tells its owner what happens to it; which line is used for what is the owner's business. How it
fails: `OSError` while it is dialled; later everything is told by `line_lost`, once.
"""

import asyncio
import ssl
from typing import TYPE_CHECKING, Final

from penstock.client.async_wire import AsyncWire, dial
from penstock.client.errors import reason_of
from penstock.client.link import FAREWELL_SECONDS
from penstock.client.options import Options
from penstock.client.plan import WrongPeer
from penstock.client.rq_core import LineCore
from penstock.common.address import Address
from penstock.protocols import rq
from penstock.protocols.errors import PeerViolation
from penstock.protocols.rq_node import ControllerFull
from penstock.protocols.rq_session import Connection

if TYPE_CHECKING:
    from penstock.client.async_rq import AsyncRqClient

FIRST_WORDS: Final = frozenset(
    (
        rq.Command.NOP,
        rq.Command.CLEAR,
        rq.Command.PING,
        rq.Command.PONG,
        rq.Command.CLOSING,
        rq.Command.SERVER_FULL,
    )
)
"""What a controller may begin with that was asked nothing but a PING."""


class Line:
    def __init__(self, owner: "AsyncRqClient", address: Address, wire: AsyncWire, options: Options) -> None:
        self.address = address
        self.core = LineCore(
            _now_us(),
            payload_bytes_max=options.payload_bytes_max,
            silence_us=int(options.silence_seconds * 1_000_000),
        )
        self.work = 0  # deliveries that are here and not done
        self.takes_work = True  # False: what comes from now on is not for us, and goes back at the end
        self.is_retired = False
        self.is_over = False
        self._owner = owner
        self._options = options
        self._wire = wire
        self._loop = asyncio.get_running_loop()
        self._is_reached = False
        self._heard: asyncio.Future[None] = self._loop.create_future()
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._bound: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, owner: "AsyncRqClient", address: Address, context: ssl.SSLContext | None, options: Options
    ) -> "Line":
        """Connect to a controller that answers and has room."""
        seconds = options.connect_seconds
        deadline = asyncio.get_running_loop().time() + seconds
        line = cls(owner, address, await dial(address, context, seconds), options)
        line._wire.start(line._received, line._lost)
        line.write(rq.PING)
        try:
            async with asyncio.timeout_at(deadline):
                await line._heard
            # Both may have happened in the moment between its answer and here.
            if line.is_over or line.is_retired:
                raise ConnectionResetError("it answers, but is about to stop")
            line._is_reached = True
            line._arm()
        except TimeoutError:
            raise WrongPeer(
                f"it accepts, but does not answer a ping within {seconds:g} s; is this the right port?"
            ) from None
        finally:
            if not line._is_reached:
                line.abort("not used")
        return line

    # --- out -----------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        self._wire.write(data)

    async def drained(self, seconds: float) -> bool:
        """Until not too much is unsent; False where that took too long."""
        return await self._wire.drain(seconds)

    async def news(self) -> None:
        """Until something has come from the controller, or the line is over."""
        await self._news.wait()

    # --- the end -------------------------------------------------------------------------------------

    @property
    def is_silent(self) -> bool:
        return self.core.session.silent

    @property
    def takes_answers(self) -> bool:
        """Whether what is written now still reaches the controller."""
        return self._ending is None and not self.is_over

    def retire(self, *, say_so: bool) -> None:
        """Nothing new begins here. `say_so`: it is we who leave, and the controller hears of it."""
        if self.is_retired or self.is_over:
            return
        self.is_retired = True
        if say_so and self.core.session.connection is Connection.OPEN:
            self.write(self.core.session.closing())
            self.bound()
        self.end_if_idle()

    def bound(self) -> None:
        """Do not wait for ever for what is open."""
        if self._bound is None and not self.is_over:
            self._bound = self._loop.call_later(self._options.drain_seconds, self.end)

    def end_if_idle(self) -> None:
        """Where nothing new begins and nothing is open, there is nothing to wait for."""
        if self.is_retired and not self.work and not self.core.calls:
            self.end()

    def end(self) -> None:
        """Let the controller read what was written, then close."""
        if self._ending is None and not self.is_over:
            self._ending = self._loop.create_task(self._finish())

    async def _finish(self) -> None:
        why = ""
        try:
            await self._wire.finish(FAREWELL_SECONDS)
        except OSError as error:
            why = reason_of(error)
        self._over(why)

    def abort(self, why: str) -> None:
        """End at once."""
        self._over(why)
        self._wire.abort()

    def _over(self, why: str) -> None:
        if self.is_over:
            return
        self.is_over = True
        for timer in (self._timer, self._bound):
            if timer is not None:
                timer.cancel()
        self.core.lost(why or "the client has closed it")
        self._news.set()
        if self._is_reached:
            self._owner.line_lost(self, why)
        elif not self._heard.done():
            self._heard.set_exception(
                WrongPeer(f"it does not answer a ping ({why}); is this the right port?")
            )

    # --- the wire's callbacks --------------------------------------------------------------------------

    def _lost(self, why: str) -> None:
        self._over(why)

    def _received(self, data: bytes) -> None:
        was_silent = self.is_silent
        if not self._heard.done() and data[0] not in FIRST_WORDS:
            # RQ skips what it does not know, and so would take an error page for an answer.
            self.abort(f"it says {data[:16]!r}")
            return
        try:
            events = self.core.feed(data, _now_us())
        except PeerViolation as violation:
            self.abort(f"the controller broke the protocol: {violation}")
            return
        self.write(self.core.session.take_output())
        if not self._heard.done():
            if any(isinstance(event, ControllerFull) for event in events):
                self._heard.set_exception(OSError("the controller is full"))
                return
            self._heard.set_result(None)
        for event in events:
            self._owner.line_event(self, event)
        if was_silent:
            self._owner.line_awake(self)
        self._news.set()
        self._news = asyncio.Event()
        self._arm()
        self.end_if_idle()

    # --- the controller's silence ------------------------------------------------------------------------

    def _arm(self) -> None:
        due_us = self.core.session.due_us
        if self._timer is None and due_us is not None and not self.is_over:
            self._timer = self._loop.call_at(due_us / 1_000_000, self._tick)

    def _tick(self) -> None:
        self._timer = None
        changed = self.core.session.tick(_now_us())
        self.write(self.core.session.take_output())
        if changed and self.is_silent:
            self._owner.line_silent(self)
        self._arm()


def _now_us() -> int:
    return int(asyncio.get_running_loop().time() * 1_000_000)
