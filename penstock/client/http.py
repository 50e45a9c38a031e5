"""The HTTP clients: send with a receipt, look at queues and messages, and work: consume, and settle.

The one for asyncio is the source, the one for threads is made from it (`blocking.py`). Calls go over one
connection, kept open and used by one call at a time (`http_line.py`), so that any thread or task may call.
A loop over `consume` has a connection of its own, and verdicts have another (`http_leases.py`): no call waits
for a message.

A connection is made again when it was lost, with back-off, as by the other clients. What breaks leaves a send
without a key in doubt, which is told; what is safe to repeat (`http_core.py`) is repeated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Generic, ParamSpec, Self, TypeVar, Unpack

from penstock.client.blocking import blocking
from penstock.client.http_core import (
    WHY_BYTES_MAX,
    Answer,
    BatchReceipt,
    HttpCore,
    PeekedMessage,
    QueueDetails,
    QueueInfo,
    Receipt,
    Request,
    check_delay,
    details_of,
    message_of,
    page_of,
    queue_of,
    receipt_of,
    receipt_of_batch,
)
from penstock.client.http_held import Held, Window
from penstock.client.http_leases import Leases
from penstock.client.http_line import HttpLine
from penstock.client.managed import Managed
from penstock.client.options import ClientOptions, Options, tls_context
from penstock.client.url import parse_url

P = ParamSpec("P")
T = TypeVar("T")


class Keep:
    """Extends the lease of a message as long as a block, `with` or `async with`, goes on."""

    def __init__(self, message: "_Message") -> None:
        self._message = message

    def __enter__(self) -> Self:
        self._message._client._leases.keep(self._message)
        return self

    def __exit__(self, *_details: object) -> None:
        self._message._client._leases.unkeep(self._message)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *details: object) -> None:
        self.__exit__(*details)


class _Message(Held):
    __slots__ = ("_client",)

    def __init__(self, client: "_Client[Any]", window: Window[Any], answer: Answer, now: float) -> None:
        super().__init__(window, answer, now)
        self._client = client

    def keep(self) -> Keep:
        """While a block goes on, extend the lease by itself, whenever a third of it is over.

        That ends with the block, and when the message is settled.
        """
        return Keep(self)


class AsyncHttpMessage(_Message):
    """A message that this client holds, by a lease, until it says what became of it.

    What it says is gathered, and told a moment later; `flush` of the client waits for it.
    """

    __slots__ = ()

    async def ack(self) -> bool:
        """It is done. False: it was settled before, or is known to come again."""
        return self._client._leases.settle(self, "ack")

    async def requeue(self, delay: float | None = None) -> bool:
        """Again, in so many seconds; None: as the queue's `retry-delays` say. False: see `ack`."""
        check_delay(self.queue, delay)
        return self._client._leases.settle(self, "requeue", delay=delay)

    async def reject(self, reason: str = "") -> bool:
        """Never again: it becomes a dead letter, whose `why` is the reason (1,000 bytes of it). False: see
        `ack`."""
        text = reason.encode("utf-8", "replace")[:WHY_BYTES_MAX].decode("utf-8", "ignore")
        return self._client._leases.settle(self, "reject", reason=text or None)

    async def extend(self, lease: float | None = None) -> bool:
        """Hold it for so many seconds from now on; None: as long as before. False: nobody holds it for us."""
        return await self._client._run(self._client._leases.extend, self, lease)


class HttpMessage(_Message):
    """A message that this client holds, by a lease, until it says what became of it.

    What it says is gathered, and told a moment later; `flush` of the client waits for it.
    """

    __slots__ = ()

    ack = blocking(AsyncHttpMessage.ack)
    requeue = blocking(AsyncHttpMessage.requeue)
    reject = blocking(AsyncHttpMessage.reject)
    extend = blocking(AsyncHttpMessage.extend)


M = TypeVar("M", bound=_Message)


class _Client(Generic[M]):
    """What both clients have."""

    def __init__(self, message: type[M], url: str, options: ClientOptions) -> None:
        chosen = Options.of(**options)
        target = parse_url(url, "http")
        # Certificates are read once for all the lines, and who has answered to one is no stranger to another.
        chosen = replace(chosen, ssl_context=tls_context(target, chosen))
        make_line = partial(HttpLine, target, chosen, set[str]())
        self._core = HttpCore(chosen)
        self._line = make_line()
        self._leases: Leases[M] = Leases(self._core, chosen, make_line, partial(message, self))

    async def _run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call what blocks."""
        raise NotImplementedError

    def _end(self) -> None:
        try:
            self._leases.close()
        finally:
            self._line.close()


class HttpCalls(_Client[M]):
    """What both clients can say; `_ask` is theirs."""

    async def _ask(self, request: Request) -> Answer:
        raise NotImplementedError

    async def send(
        self,
        queue: str,
        body: bytes,
        *,
        ttl: int | None = None,
        retries: int | None = None,
        key: str | None = None,
        delay: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Receipt:
        """Send a message; when this returns, it is stored.

        It lives `ttl` seconds, is delivered at most 1 + `retries` times, and not before `delay` seconds have
        gone by. The same `key` for the same message stores it once, however often it is sent.
        """
        return receipt_of(await self._ask(self._core.send(queue, body, ttl, retries, key, delay, headers)))

    async def send_many(
        self,
        queue: str,
        bodies: Iterable[bytes],
        *,
        ttl: int | None = None,
        retries: int | None = None,
        key: str | None = None,
        delay: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> list[BatchReceipt]:
        """Send messages in batches, each of which is stored as a whole or not at all; their receipts.

        What can be said of a message is said of all. With a `key` the call can be repeated as a whole: what
        is stored already is not stored again.
        """
        requests = self._core.batches(queue, bodies, ttl, retries, key, delay, headers)
        return [receipt_of_batch(await self._ask(request)) for request in requests]

    async def peek(
        self, queue: str, from_offset: int | None = None, limit: int = 100, state: str | None = None
    ) -> list[PeekedMessage]:
        """Look at messages without taking them, from an offset on (None: the first that is kept).

        `state` shows only those that are ready, delayed, held, dead or gone.
        """
        messages: list[PeekedMessage] = []
        while True:
            answer = await self._ask(self._core.peek(queue, from_offset, limit - len(messages), state))
            page, from_offset = page_of(answer, "messages", message_of)
            messages += page
            if from_offset is None or len(messages) >= limit:
                return messages

    async def queues(self) -> list[QueueInfo]:
        """Every queue, by name."""
        queues: list[QueueInfo] = []
        after: str | None = None
        while True:
            page, after = page_of(await self._ask(self._core.queues(after)), "queues", queue_of)
            queues += page
            if after is None:
                return queues

    async def queue(self, name: str) -> QueueDetails:
        """One queue, with its settings. Refused (`queue-not-found`) where there is none."""
        return details_of(await self._ask(self._core.queue(name)))

    async def ack_many(self, messages: Iterable[M]) -> int:
        """Acknowledge many messages; how many were not settled before, and are not known to come again."""
        return sum([self._leases.settle(message, "ack") for message in messages])

    async def flush(self) -> int:
        """Wait until everything that was said of messages is settled; how many of these verdicts came too
        late since the last time, so that their messages come again.

        ConnectionLost with `verdicts_in_doubt` where no broker could be told.
        """
        return await self._run(self._leases.flush)


class HttpClient(_Client[HttpMessage], Managed):
    """A client of the HTTP API. A context manager: leaving it closes it."""

    def __init__(self, url: str, **options: Unpack[ClientOptions]) -> None:
        super().__init__(HttpMessage, url, options)
        self._line.open()

    send = blocking(HttpCalls.send)
    send_many = blocking(HttpCalls.send_many)
    peek = blocking(HttpCalls.peek)
    queues = blocking(HttpCalls.queues)
    queue = blocking(HttpCalls.queue)
    ack_many = blocking(HttpCalls.ack_many)
    flush = blocking(HttpCalls.flush)

    def consume(
        self,
        queue: str,
        prefetch: int = 100,
        *,
        lease: float = 60,
        dead: bool = False,
        count: int | None = None,
        timeout: float | None = None,
    ) -> Iterator[HttpMessage]:
        """See `AsyncHttpClient.consume`."""
        return self._messages(self._leases.consume(queue, prefetch, lease, dead, count), timeout)

    def _messages(self, window: Window[HttpMessage], timeout: float | None) -> Iterator[HttpMessage]:
        try:
            while window.left > 0 and (message := self._leases.next(window, timeout)) is not None:
                yield message
        finally:
            self._leases.end(window)

    async def _ask(self, request: Request) -> Answer:
        return self._line.ask(request)

    async def _run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return call(*args, **kwargs)

    def close(self) -> None:
        """End, when a call that is under way has its answer, and every verdict is settled.

        Messages without a verdict go back. ConnectionLost with `verdicts_in_doubt` where there is no broker.
        """
        self._end()
