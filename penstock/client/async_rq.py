"""The RQ client for asyncio: a node that sends, requests, broadcasts and serves, with several controllers.

It has one *current* line, to one controller, for everything that begins, and beside it those that are on
their way out. What the client does when a controller …

    full, or not to be reached    it moves to the back of the list, and the next one is tried
    says CLOSING                  what is open there finishes; everything new goes elsewhere
    does not answer pings         another line is made; then the silent one is dropped, unless queues are
                                  consumed there: that one stays until it is lost, or until it is heard
                                  again, when it is left in order
    is lost                       what was open there is reported as ConnectionLost; queues that are served
                                  are asked for again on the next line

A client that serves connects again by itself, another one with its next call. Both give up after
`reconnect_seconds`; then calls, and `wait`, raise ConnectionLost.
"""

import asyncio
import math
from collections.abc import Iterable
from typing import Self, Unpack

from penstock.client.core import chunks
from penstock.client.errors import ConnectionLost, NotSupported, TimedOut, Undelivered, tell_sent
from penstock.client.link import log
from penstock.client.managed import AsyncManaged
from penstock.client.options import SECONDS_TOP, ClientOptions, Options, bounded, tls_context
from penstock.client.plan import Plan
from penstock.client.rq_core import TIMEOUT_SECONDS_MAX, Call
from penstock.client.rq_line import Line
from penstock.client.rq_serving import (
    AsyncErrorHandler,
    AsyncHandler,
    AsyncListener,
    AsyncServing,
    Terms,
)
from penstock.client.url import parse_url
from penstock.model.batch import Batch
from penstock.protocols import rq
from penstock.protocols.errors import MisuseError
from penstock.protocols.rq_node import Consuming, ControllerClosing, Deliveries, Heard, NodeEvent
from penstock.protocols.rq_session import Consumer

MAX_TOP = (1 << 16) - 1
PRIORITY_TOP = 255


class AsyncRqClient(AsyncManaged):
    """An RQ node. A new one is not connected yet: `await` it, or enter it with `async with`."""

    def __init__(self, url: str, **options: Unpack[ClientOptions]) -> None:
        self._options = Options.of(**options)
        target = parse_url(url, "rq")
        self._name = str(target)
        self._gone = f"{self._name}: this client is closed; make another one"
        self._context = tls_context(target, self._options)
        self._plan = Plan(target, self._options)
        self._current: Line | None = None
        self._lines: set[Line] = set()
        self._servings: dict[str, AsyncServing] = {}
        self._search: asyncio.Task[None] | None = None
        self._news = asyncio.Event()  # set, and replaced, when a line comes or goes, or a search ends
        self._failure: ConnectionLost | None = None  # of the last search, if it found nobody
        self._is_known = False  # there was a controller once
        self._closed = False

    # --- sending -------------------------------------------------------------------------------------

    async def send(
        self, queue: str, body: bytes, *, retries: int | None = None, timeout: float | None = None
    ) -> None:
        """Send a message, and wait until the broker says that it is stored.

        Undelivered: it says that it is not. ConnectionLost and TimedOut: nobody knows; send it again if it
        must not be lost. `timeout`: seconds; None: `operation_seconds`.
        """
        await self.send_many(queue, [body], retries=retries, timeout=timeout)

    async def send_many(
        self,
        queue: str,
        bodies: Iterable[bytes],
        *,
        retries: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Send messages, and wait until all are stored; how many they were. `timeout`: without a receipt.

        Errors are those of `send`; `positions` are those of the messages that were sent and have no receipt,
        `sent` is how many were sent at all: no message from there on was.
        """
        seconds = min(self._options.operation_seconds if timeout is None else timeout, SECONDS_TOP)
        changed = asyncio.Event()
        call = Call(changed.set)
        used: set[Line] = set()
        trouble: Exception | None = None
        end = 0
        try:
            try:
                for chunk in chunks(bodies):
                    line = await self._line_with_room(len(chunk), seconds)
                    used.add(line)
                    line.write(line.core.send(call, queue, chunk, end, retries))
                    end += len(chunk)
                    if not await line.drained(seconds):
                        trouble = TimedOut(f"the controller has taken nothing for {seconds:g} s")
                    if trouble is not None or call.failed or call.in_doubt:
                        break
            except Exception as error:  # noqa: BLE001 - also of the caller's iterable: what was sent is sent
                trouble = error
            in_time = await _settled(call, changed, seconds)
        finally:
            for line in used:
                line.core.forget(call)
                line.end_if_idle()
        self._check_receipts(
            f"{self._name}: queue {queue!r}", call, end, None if in_time else seconds, trouble
        )
        return end

    @staticmethod
    def _check_receipts(
        who: str,
        call: Call,
        end: int,
        waited_seconds: float | None,
        trouble: Exception | None,
    ) -> None:
        """Raise unless every message has its receipt."""
        what = f"{who}: {call.confirmed} of {end} messages are stored"
        open_ = sorted([*call.in_doubt, *call.open])
        if call.failed:
            raise Undelivered(
                f"{what}, the broker refused {len(call.failed)}; its log says why",
                in_doubt=len(open_),
                positions=sorted([*call.failed, *open_]),
                sent=end,
            )
        if waited_seconds is not None:
            raise TimedOut(
                f"{what}, and no other receipt came within {waited_seconds:g} s; "
                "send again what must not be lost",
                in_doubt=len(open_),
                positions=open_,
                sent=end,
            )
        if open_:
            raise ConnectionLost(
                f"{what}, {len(open_)} are in doubt: the connection was lost ({call.why}); "
                "send again what must not be lost",
                in_doubt=len(open_),
                positions=open_,
                sent=end,
            )
        if isinstance(trouble, ConnectionLost | TimedOut):
            raise type(trouble)(f"{what}, the others were not sent: {trouble}", sent=end) from trouble
        if trouble is not None:
            tell_sent(trouble, end)
            raise trouble

    async def request(
        self, queue: str, body: bytes, timeout: float | None = None, *, retries: int | None = None
    ) -> bytes:
        """Send a request and wait for its answer, at most `timeout` seconds.

        The broker is told of them, and withdraws the request then. None: `operation_seconds`, and the broker
        is told nothing; the original servers of RQ know no time-out.

        Undelivered: the broker says that there will be none. ConnectionLost, TimedOut: a consumer may have
        worked on it nevertheless.
        """
        seconds = self._options.operation_seconds if timeout is None else timeout
        if not 0 < seconds <= TIMEOUT_SECONDS_MAX and timeout is not None:
            raise NotSupported(
                f"queue {queue!r}: a time-out of {seconds} s: use a number of seconds over 0, at most "
                f"{TIMEOUT_SECONDS_MAX}"
            )
        changed = asyncio.Event()
        call = Call(changed.set)
        (bodies,) = chunks([body])
        deadline = asyncio.get_running_loop().time() + seconds
        line = await self._line_with_room(1, seconds)
        try:
            line.write(line.core.request(call, queue, bodies[0], math.ceil(timeout or 0), retries))
            in_time = await _settled(call, changed, deadline - asyncio.get_running_loop().time())
        finally:
            line.core.forget(call)
            line.end_if_idle()
        who = f"{self._name}: request to queue {queue!r}"
        taken = "a consumer had taken it" if call.taken else "no consumer had taken it"
        if not in_time:
            raise TimedOut(f"{who}: no answer within {seconds:g} s; {taken}", in_doubt=1)
        if call.failed:
            raise Undelivered(f"{who}: the broker says that there will be no answer; {taken}")
        if call.in_doubt:
            raise ConnectionLost(
                f"{who}: the connection was lost ({call.why}); {taken}; ask again if that does no harm",
                in_doubt=1,
            )
        return call.answer

    async def broadcast(self, queue: str, body: bytes) -> None:
        """To everybody who consumes the queue at this moment. Nobody confirms it, and it is not stored."""
        (bodies,) = chunks([body])
        line = await self._line()
        try:
            line.write(line.core.session.broadcast(queue, Batch.of(bodies)))
        except MisuseError as error:
            raise NotSupported(str(error)) from None
        seconds = self._options.operation_seconds
        if not await line.drained(seconds):
            raise TimedOut(
                f"{self._name}: queue {queue!r}: the controller has taken nothing for {seconds:g} s"
            )

    # --- serving -------------------------------------------------------------------------------------

    async def serve(
        self,
        queue: str,
        handler: AsyncHandler,
        *,
        max: int = 1,  # noqa: A002 - the protocol's own word for it, and the documented name
        priority: int = rq.PRIORITY_DEFAULT,
        exclusive: bool = False,
        on_error: AsyncErrorHandler | None = None,
        on_broadcast: AsyncListener | None = None,
    ) -> AsyncServing:
        """Let `handler` answer the requests of a queue from now on, at most `max` at a time (0: no bound).

        What it returns is the answer. What happens when it raises is said in `rq_serving.py`. Of several
        consumers the one with the highest priority is served first; 0 is for broadcasts only. An exclusive
        one has the queue for itself. Returns at once; `AsyncServing.wait_turn` tells when it begins.
        """
        if not 0 <= max <= MAX_TOP:
            raise NotSupported(f"queue {queue!r}: max is {max}: use 1 to {MAX_TOP}, or 0 for no bound")
        if not 0 <= priority <= PRIORITY_TOP:
            raise NotSupported(f"queue {queue!r}: priority is {priority}: use 0 to {PRIORITY_TOP}")
        former = self._servings.get(queue)
        if former is not None and not former.is_cancelled:
            raise NotSupported(f"queue {queue!r} is served already; cancel that first, or use another client")
        line = await self._line()
        terms = Terms(handler, on_error, on_broadcast, max, priority, exclusive)
        serving = former or AsyncServing(self, queue, terms, self._options.payload_bytes_max)
        serving.begin(terms)
        self._ask(line, serving)
        self._servings[queue] = serving
        return serving

    async def cancel(self, queue: str) -> None:
        """No new requests of this queue. Those that are here already are still answered."""
        serving = self._servings.get(queue)
        if serving is None or serving.is_cancelled:
            raise NotSupported(f"queue {queue!r} is not served by this client")
        serving.is_cancelled = True
        for line in self._lines:
            if line.core.session.consumer(queue) in (Consumer.ASKED, Consumer.CONSUMING):
                line.write(line.core.session.cancel(queue))

    async def wait(self, timeout: float | None = None) -> bool:
        """Until the client is closed; False where it was not within `timeout` seconds.

        ConnectionLost where queues are served and no controller can be found any more.
        """
        try:
            async with asyncio.timeout(bounded(timeout)):
                while not self._closed:
                    if self._failure is not None and self._serves:
                        raise ConnectionLost(str(self._failure))
                    await self._news.wait()
        except TimeoutError:
            return False
        return True

    def _ask(self, line: Line, serving: AsyncServing) -> None:
        terms = serving.terms
        try:
            request = line.core.session.consume(
                serving.queue, credit=terms.max, priority=terms.priority, exclusive=terms.exclusive
            )
        except MisuseError as error:
            raise NotSupported(str(error)) from None
        line.write(request)

    @property
    def _serves(self) -> bool:
        return any(not serving.is_cancelled for serving in self._servings.values())

    # --- lines ---------------------------------------------------------------------------------------

    async def _line(self) -> Line:
        """The line for something new."""
        while True:
            if self._closed:
                raise ConnectionLost(self._gone)
            line = self._current
            if line is not None and not line.is_silent:
                return line
            self._start_search()
            await self._news.wait()
            if self._failure is not None:
                raise ConnectionLost(str(self._failure))

    async def _line_with_room(self, count: int, seconds: float) -> Line:
        """The line for so many more requests: their ids are limited."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    line = await self._line()
                    if line.core.session.free_requests() >= count:
                        return line
                    await line.news()
        except TimeoutError:
            raise TimedOut(
                f"{self._name}: no connection, or no room for another request, within {seconds:g} s; "
                "nothing was sent"
            ) from None

    def _start_search(self) -> None:
        if self._search is None and not self._closed:
            self._failure = None
            self._search = asyncio.get_running_loop().create_task(self._find_line())

    def _stop_search(self) -> None:
        if self._search is not None:
            self._search.cancel()
            self._search = None
            self._tell()

    async def _find_line(self) -> None:
        loop = asyncio.get_running_loop()
        search = self._plan.search(loop.time(), first=not self._is_known)
        try:
            while True:
                await asyncio.sleep(search.pause)
                address = search.address
                try:
                    line = await Line.open(self, address, self._context, self._options)
                except OSError as error:
                    search.failed(address, error, loop.time())
                else:
                    break
        except ConnectionLost as failure:
            self._failure = failure
            if self._serves:  # else it is raised to somebody who waits for a line
                log.warning("%s", failure)
        except Exception as error:  # noqa: BLE001 - whatever it is: who waits for a line would do so for ever
            self._failure = ConnectionLost(f"{self._name}: {error!r}")
        else:
            self._is_known = True
            self._plan.connected(loop.time())
            self._install(line)
        self._search = None
        self._tell()

    def _install(self, line: Line) -> None:
        former, self._current = self._current, line
        self._lines.add(line)
        for serving in self._servings.values():
            if not serving.is_cancelled:
                self._ask(line, serving)
        if former is not None and not former.core.session.consumes:
            former.abort("the controller does not answer")

    async def changed(self) -> None:
        """Until something is news. ConnectionLost where nothing will be: it is closed, or finds nobody."""
        if self._closed or self._failure is not None:
            raise ConnectionLost(str(self._failure or self._gone))
        await self._news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def leave(self, line: Line) -> None:
        """A handler has failed: everything that this line holds is to be given out again."""
        self._refuse_work(line)
        self._retire(line, say_so=True)

    def _refuse_work(self, line: Line) -> None:
        line.takes_work = False
        for serving in self._servings.values():
            serving.drop_backlog(line)

    def _retire(self, line: Line, *, say_so: bool) -> None:
        line.retire(say_so=say_so)
        self._unuse(line)

    def _unuse(self, line: Line) -> None:
        if self._current is line:
            self._current = None
            for serving in self._servings.values():
                serving.note_line_lost()
            if self._serves:
                self._start_search()

    def line_event(self, line: Line, event: NodeEvent) -> None:
        """The controller has said something that is no answer to a call."""
        if isinstance(event, Deliveries):
            self._servings[event.queue].take(line, event)
        elif isinstance(event, Heard):
            self._servings[event.queue].hear(event.batch)
        elif isinstance(event, Consuming):
            self._servings[event.queue].note_turn()
            self._tell()
        elif isinstance(event, ControllerClosing):
            log.info("%s: controller %s stops", self._name, line.address)
            self._plan.move_back(line.address)
            self._retire(line, say_so=False)

    def line_silent(self, line: Line) -> None:
        """The controller does not answer pings."""
        log.warning("%s: controller %s does not answer", self._name, line.address)
        if line is self._current:
            self._plan.move_back(line.address)
            self._start_search()

    def line_awake(self, line: Line) -> None:
        """A silent controller has been heard again."""
        log.info("%s: controller %s answers again", self._name, line.address)
        if line is self._current:
            self._stop_search()
        else:
            self._retire(line, say_so=True)

    def line_lost(self, line: Line, why: str) -> None:
        """The line is over. No reason: it has ended in order."""
        self._lines.discard(line)
        if why and not self._closed:
            log.warning("%s: connection to %s lost: %s", self._name, line.address, why)
        self._unuse(line)
        for serving in self._servings.values():
            serving.pump()
        self._tell()

    # --- life ----------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Take no new work, wait up to `drain_seconds` for handlers and answers, then end.

        Requests that have come and were not begun are given to somebody else.
        """
        if self._closed:
            return
        self._closed = True
        self._stop_search()
        self._tell()
        for line in list(self._lines):
            self._refuse_work(line)
            line.retire(say_so=True)
            line.bound()
            line.end_if_idle()
        while self._lines:
            await self._news.wait()
        for serving in self._servings.values():
            serving.stop()

    async def _open(self) -> Self:
        try:
            await self._line()
        except asyncio.CancelledError:
            self._stop_search()  # nobody would close what it finds
            raise
        return self


async def _settled(call: Call, changed: asyncio.Event, seconds: float) -> bool:
    """Until nothing of a call is open; False where nothing has changed for so many seconds."""
    while call.open:
        changed.clear()
        try:
            async with asyncio.timeout(seconds):
                await changed.wait()
        except TimeoutError:
            return False
    return True
