"""The PHPMQ client for asyncio: the same as `PhpmqClient`, with `await`.

Many tasks may use it at once, also to consume several queues. What happens after a lost connection is said
in `phpmq.py`, and is the same here.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Unpack

from penstock.client.async_link import AsyncLink, AsyncLinkedClient
from penstock.client.link import log
from penstock.client.options import ClientOptions, Options, bounded
from penstock.client.phpmq_core import (
    DROPPED,
    Fetched,
    Held,
    PhpmqCore,
    Window,
    unsettled,
)
from penstock.client.url import parse_url
from penstock.model.words import Outcome


class AsyncPhpmqMessage(Held):
    """A message that this client holds until it says what became of it."""

    __slots__ = ("_client",)

    def __init__(self, client: "AsyncPhpmqClient", queue: str, fetched: Fetched) -> None:
        super().__init__(queue, fetched)
        self._client = client

    async def ack(self) -> bool:
        """It is done. False: nothing was said, see `AsyncPhpmqClient.ack_many`."""
        return bool(await self._client._settle(Outcome.ACK, [self]))

    async def requeue(self, ttl: int | None = None) -> bool:
        """Again later, at the tail of the queue, with a new TTL in seconds or none. False: see `ack`."""
        return bool(await self._client._settle(Outcome.REQUEUE, [self], ttl))

    async def reject(self) -> bool:
        """Never again: it becomes a dead letter. False: see `ack`."""
        return bool(await self._client._settle(Outcome.REJECT, [self]))


class AsyncPhpmqClient(AsyncLinkedClient):
    """A client of a PHPMQ listener."""

    def __init__(self, url: str, **options: Unpack[ClientOptions]) -> None:
        chosen = Options.of(**options)
        self._core = PhpmqCore(chosen.payload_bytes_max, receipts=chosen.receipts)
        self._link = AsyncLink(self._core, parse_url(url, "phpmq"), chosen)

    async def send(self, queue: str, body: bytes, ttl: int | None = None) -> None:
        """Send a message that lives `ttl` seconds. `flush` waits until the system has taken the bytes."""
        await self.send_many(queue, [body], ttl)

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
        window: Window | None = None

        def ask() -> bytes:
            nonlocal window
            window, request = self._core.consume(queue, prefetch, count)
            return request

        await self._link.write(ask, sends=False)
        assert window is not None
        try:
            while not window.is_done:
                message = await self._next(window, bounded(timeout))
                if message is None:
                    return
                yield message
        finally:
            window.is_over = True

    async def _next(self, window: Window, timeout: float | None) -> AsyncPhpmqMessage | None:
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        self._link.notice()  # what was fetched over a connection that is gone could not be settled any more
        while (fetched := self._core.take(window)) is None:
            await self._link.ensure()
            left = None if deadline is None else max(0.0, deadline - loop.time())
            if not await self._link.news(left):
                return None
        return AsyncPhpmqMessage(self, window.queue, fetched)

    async def ack_many(self, messages: Iterable[AsyncPhpmqMessage]) -> int:
        """Acknowledge many messages in one write; of how many the broker was told.

        It is not told of those that were settled before, and of those whose connection is gone: they come
        again, whatever was done with them.
        """
        return await self._settle(Outcome.ACK, messages)

    async def _settle(
        self, outcome: Outcome, messages: Iterable[AsyncPhpmqMessage], ttl: int | None = None
    ) -> int:
        told = 0
        for (queue, generation), group in unsettled(messages).items():
            verdict = partial(self._core.settle, outcome, queue, group, generation, ttl or 0)
            if await self._link.write_if_open(verdict):
                told += len(group)
            else:
                log.warning(DROPPED, queue, outcome.value, len(group))
        return told
