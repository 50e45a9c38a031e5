"""Serving: a handler for the requests of a queue, and what becomes of each request.

    delivered ──► waits for room ──► begun ──► answered
                        │              └─────► failed
                        └── its line is over: dropped, the broker gives it to somebody else

Rules that always hold:
  * At most `max` handlers of a serving run at a time, over all connections.
  * A request that wants an answer is confirmed (DELIVERED) when its handler begins and answered when it is
    done. A message that wants none is confirmed when its handler is done, not before: that settles it, and
    until then it would come again if this process died.
  * A handler that raises has not answered. Without `on_error`, its line is left, so that the broker gives
    the request, and everything else that was held there, out again: to another consumer, or to this one
    after a growing pause. Nothing is lost; `max-deliveries` of the queue bounds how often. With `on_error`,
    what that returns is the answer.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from penstock.client.link import log
from penstock.client.options import bounded
from penstock.client.rq_line import Line
from penstock.model.batch import Batch
from penstock.protocols.rq_node import Deliveries

if TYPE_CHECKING:
    from penstock.client.async_rq import AsyncRqClient


@dataclass(frozen=True, slots=True)
class RqRequest:
    """What a handler gets."""

    queue: str
    body: bytes
    wants_reply: bool  # False: it was sent without; what the handler returns goes nowhere


T = TypeVar("T")

AsyncHandler = Callable[[RqRequest], Awaitable[bytes | None]]
AsyncErrorHandler = Callable[[RqRequest, Exception], Awaitable[bytes | None]]
AsyncListener = Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Terms:
    """How a queue is served."""

    handler: AsyncHandler
    on_error: AsyncErrorHandler | None
    on_broadcast: AsyncListener | None
    max: int  # 0: no bound
    priority: int
    exclusive: bool


class AsyncServing:
    """A queue that is being served, until `cancel`."""

    def __init__(self, client: "AsyncRqClient", queue: str, terms: Terms, answer_bytes_max: int) -> None:
        self.queue = queue
        self.terms = terms
        self.is_cancelled = False
        self._client = client
        self._answer_bytes_max = answer_bytes_max
        self._has_turn = False
        self._backlog: deque[tuple[Line, int, RqRequest]] = deque()
        self._running = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def wait_turn(self, timeout: float | None = None) -> bool:
        """Wait until the broker says that this client consumes the queue. False: not in `timeout` seconds.

        It may be long where another consumer is exclusive, or this one is. ConnectionLost as for `wait`.
        """
        try:
            async with asyncio.timeout(bounded(timeout)):
                while not self._has_turn:
                    await self._client.changed()
        except TimeoutError:
            return False
        return True

    async def cancel(self) -> None:
        """No new requests. What is here already is still answered."""
        await self._client.cancel(self.queue)

    # --- the client's calls ------------------------------------------------------------------------------

    def begin(self, terms: Terms) -> None:
        """Serve, or serve again, on these terms."""
        self.terms = terms
        self.is_cancelled = False
        self._has_turn = False

    def note_turn(self) -> None:
        self._has_turn = True

    def note_line_lost(self) -> None:
        """It must be asked for again."""
        self._has_turn = False

    def take(self, line: Line, event: Deliveries) -> None:
        """Requests have come."""
        if not line.takes_work:
            return
        line.work += len(event.ids)
        for ident, body in zip(event.ids, event.batch.messages(), strict=True):
            self._backlog.append((line, ident, RqRequest(self.queue, body, not event.noreply)))
        self.pump()

    def hear(self, batch: Batch) -> None:
        """Broadcasts have come."""
        if self.terms.on_broadcast is not None:
            for body in batch.messages():
                self._start(self._listen(self.terms.on_broadcast, body))

    def pump(self) -> None:
        """Begin with as many requests as there is room for."""
        while self._backlog and (not self.terms.max or self._running < self.terms.max):
            line, ident, request = self._backlog.popleft()
            if not line.takes_answers:
                continue
            self._running += 1
            if request.wants_reply:
                line.write(line.core.session.delivered((ident,)))
            self._start(self._work(line, ident, request))

    def drop_backlog(self, line: Line) -> None:
        """Do not begin with what this line has brought."""
        kept = deque(entry for entry in self._backlog if entry[0] is not line)
        line.work -= len(self._backlog) - len(kept)
        self._backlog = kept

    def stop(self) -> None:
        """Leave the handlers that still run."""
        for task in self._tasks:
            task.cancel()

    # --- one request ---------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, line: Line, ident: int, request: RqRequest) -> None:
        try:
            self._reply(line, ident, request, await self._answer(request))
        except Abandoned as error:
            log.info("queue %r: %s; the request is given out again", self.queue, error)
            self._client.leave(line)
        except Exception:  # noqa: BLE001 - whatever a handler raises, it is the handler's
            log.exception("queue %r: the handler failed; the request is given out again", self.queue)
            self._client.leave(line)
        finally:
            self._running -= 1
            line.work -= 1
            line.end_if_idle()
        self.pump()

    async def _answer(self, request: RqRequest) -> bytes:
        try:
            return self._checked(await _done(self.terms.handler(request)))
        except Exception as error:
            if self.terms.on_error is None:
                raise
            log.warning("queue %r: the handler failed: %r", self.queue, error)
            return self._checked(await _done(self.terms.on_error(request, error)))

    def _checked(self, answer: bytes | None) -> bytes:
        if answer is None:
            return b""
        if not isinstance(answer, bytes | bytearray | memoryview):
            raise TypeError(f"an answer is bytes or None, not {type(answer).__name__}")
        if len(answer) > self._answer_bytes_max:
            raise ValueError(
                f"an answer of {len(answer)} bytes is over payload_bytes_max, {self._answer_bytes_max}"
            )
        return bytes(answer)

    def _reply(self, line: Line, ident: int, request: RqRequest, answer: bytes) -> None:
        if not line.takes_answers:
            log.warning(
                "queue %r: answer dropped: its connection is gone, and the request comes again", self.queue
            )
        elif request.wants_reply:
            line.write(line.core.session.reply((ident,), Batch.of([answer])))
        else:
            line.write(line.core.session.delivered((ident,)))

    async def _listen(self, listener: AsyncListener, body: bytes) -> None:
        try:
            await _done(listener(body))
        except Exception:  # noqa: BLE001 - as for a handler
            log.exception("queue %r: the handler of a broadcast failed", self.queue)


class Abandoned(RuntimeError):
    """A handler has ended, by somebody's wish, without an answer."""


async def _done(work: Awaitable[T]) -> T:
    """What a handler returns. One that waits for something which is cancelled has failed, as by any error."""
    try:
        return await work
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # it is this task that is stopped
        raise Abandoned("what the handler waited for was cancelled") from error
