"""The PHPMQ clients: send, consume, and say what became of a message.

The one for asyncio is the source, the one for threads is made from it (`blocking.py`). Any thread or task may
send and settle at the same time; many tasks may consume, but of threads only one.

After a lost connection a client connects again by itself, with back-off, and asks for its windows again:
  * messages that were not acknowledged come again, here or elsewhere;
  * an acknowledgement of a message of the lost connection is dropped, and says so by returning False;
  * what was sent on it is in doubt, because PHPMQ has no receipts: the next `send`, `flush` or `close` raises
    `ConnectionLost` with the count, once.
"""

import time
from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar, Unpack

from penstock.client.blocking import blocking, run
from penstock.client.core import as_bytes
from penstock.client.link import AsyncLinkedClient, LinkedClient, MakeLink, log
from penstock.client.options import SECONDS_TOP, ClientOptions, Options
from penstock.client.phpmq_core import DROPPED, Fetched, Held, PhpmqCore, Window, unsettled
from penstock.client.thread_link import ThreadLink
from penstock.client.url import parse_url
from penstock.model.words import Outcome


class _Message(Held):
    __slots__ = ("_client",)

    def __init__(self, client: "_Calls[Any]", queue: str, fetched: Fetched) -> None:
        super().__init__(queue, fetched)
        self._client = client


class AsyncPhpmqMessage(_Message):
    """A message that this client holds until it says what became of it."""

    __slots__ = ()

    async def ack(self) -> bool:
        """It is done. False: nothing was said, see `ack_many` of the client."""
        return await self._client._settle_one(Outcome.ACK, self)

    async def requeue(self, ttl: int | None = None) -> bool:
        """Again later, at the tail of the queue, with a new TTL in seconds or none. False: see `ack`."""
        return await self._client._settle_one(Outcome.REQUEUE, self, ttl)

    async def reject(self) -> bool:
        """Never again: it becomes a dead letter. False: see `ack`."""
        return await self._client._settle_one(Outcome.REJECT, self)


class PhpmqMessage(_Message):
    """A message that this client holds until it says what became of it."""

    __slots__ = ()

    ack = blocking(AsyncPhpmqMessage.ack)
    requeue = blocking(AsyncPhpmqMessage.requeue)
    reject = blocking(AsyncPhpmqMessage.reject)


M = TypeVar("M", bound=_Message)


class _Calls(Generic[M]):
    """What both clients have."""

    def __init__(self, kind: MakeLink, message: type[M], url: str, options: ClientOptions) -> None:
        chosen = Options.of(**options)
        target = parse_url(url, "phpmq")
        self._message = message
        self._core = PhpmqCore(chosen.payload_bytes_max, receipts=chosen.receipts)
        self._link = kind(self._core, target, chosen)

    async def _ask(self, queue: str, prefetch: int, count: int | None) -> Window:
        window: Window | None = None

        def ask() -> bytes:
            nonlocal window
            window, request = self._core.consume(queue, prefetch, count)
            return request

        try:
            await self._link.write(ask, sends=False)
        except BaseException:
            if window is not None:
                window.is_over = True  # nobody waits for its messages; the next connection does without it
            raise
        assert window is not None
        return window

    def _here(self, window: Window) -> M | None:
        """The next message for a window, if it is here."""
        self._link.notice()  # what was fetched over a connection that is gone could not be settled any more
        fetched = self._link.touch(partial(self._core.take, window))
        return None if fetched is None else self._message(self, window.queue, fetched)

    async def _next(self, window: Window, timeout: float | None) -> M | None:
        """The same as soon as it comes; None where it has not in time."""
        deadline = None if timeout is None else time.monotonic() + min(timeout, SECONDS_TOP)
        while (message := self._here(window)) is None:
            await self._link.ensure()
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not await self._link.read(partial(self._core.has, window.queue), left):
                return None
        return message

    async def _ack_many(self, messages: Iterable[_Message]) -> int:
        told = 0
        for (queue, generation), group in unsettled(messages).items():
            told += await self._settle(Outcome.ACK, queue, group, generation)
        return told

    async def _settle_one(self, outcome: Outcome, message: _Message, ttl: int | None = None) -> bool:
        one = message._fetched
        return await self._settle(outcome, message.queue, [one], one.generation, ttl or 0) > 0

    async def _settle(
        self, outcome: Outcome, queue: str, group: list[Fetched], generation: int, ttl: int = 0
    ) -> int:
        """Of how many of a group the broker was told."""
        fresh = group

        def encode() -> bytes | None:
            nonlocal fresh
            fresh = [one for one in group if not one.is_settled]  # by another thread, perhaps in this moment
            return self._core.settle(outcome, queue, fresh, generation, ttl) if fresh else None

        if await self._link.write_if_open(encode):
            return len(fresh)
        if fresh:
            log.warning(DROPPED, queue, outcome.value, len(fresh))
        return 0


class AsyncPhpmqClient(_Calls[AsyncPhpmqMessage], AsyncLinkedClient):
    """A client of a PHPMQ listener."""

    def __init__(self, url: str, **options: Unpack[ClientOptions]) -> None:
        from penstock.client.async_link import AsyncLink  # here: a client that blocks needs no event loop

        super().__init__(AsyncLink, AsyncPhpmqMessage, url, options)

    async def send(self, queue: str, body: bytes, ttl: int | None = None) -> None:
        """Send a message that lives `ttl` seconds. `flush` waits until it is stored."""
        await self._link.write(partial(self._core.send, queue, [as_bytes(body)], ttl))

    async def send_many(self, queue: str, bodies: Iterable[bytes], ttl: int | None = None) -> int:
        """Send messages in as few writes as possible; how many they were."""
        return await self._link.send_many(bodies, partial(self._core.send, queue, ttl_seconds=ttl))

    async def consume(
        self, queue: str, prefetch: int = 100, *, count: int | None = None, timeout: float | None = None
    ) -> AsyncIterator[AsyncPhpmqMessage]:
        """Messages of a queue as they come, at most `prefetch` of them unsettled.

        Ends after `count` messages, or when none has come for `timeout` seconds; else never. With a count no
        more messages than that are taken from the queue. What was fetched ahead when the loop is left stays
        with this client for the next `consume` of that queue, and goes back to its place with `close`.
        """
        window = await self._ask(queue, prefetch, count)
        try:
            while not window.is_done and (message := self._here(window) or await self._next(window, timeout)):
                yield message
        finally:
            window.is_over = True

    async def ack_many(self, messages: Iterable[AsyncPhpmqMessage]) -> int:
        """Acknowledge many messages in one write; of how many the broker was told.

        It is not told of those that were settled before, and of those whose connection is gone: they come
        again, whatever was done with them.
        """
        return await self._ack_many(messages)


class PhpmqClient(_Calls[PhpmqMessage], LinkedClient):
    """A client of a PHPMQ listener. A context manager: leaving it closes it."""

    def __init__(self, url: str, **options: Unpack[ClientOptions]) -> None:
        super().__init__(ThreadLink, PhpmqMessage, url, options)

    send = blocking(AsyncPhpmqClient.send)
    send_many = blocking(AsyncPhpmqClient.send_many)

    def consume(
        self, queue: str, prefetch: int = 100, *, count: int | None = None, timeout: float | None = None
    ) -> Iterator[PhpmqMessage]:
        """See `AsyncPhpmqClient.consume`. It is asked for at once, and not when the loop begins."""
        return self._messages(run(self._ask(queue, prefetch, count)), timeout)

    def _messages(self, window: Window, timeout: float | None) -> Iterator[PhpmqMessage]:
        try:
            while not window.is_done and (message := self._here(window) or run(self._next(window, timeout))):
                yield message
        finally:
            window.is_over = True

    def ack_many(self, messages: Iterable[PhpmqMessage]) -> int:
        """See `AsyncPhpmqClient.ack_many`."""
        return run(self._ack_many(messages))
