"""The SSPQ client for asyncio: the same as `SspqClient`, with `await`.

Many tasks may send; one receives at a time, because the protocol has one message in flight on a connection.
What happens after a lost connection is said in `sspq.py`, and is the same here.
"""

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Unpack

from penstock.client.async_link import AsyncLink, AsyncLinkedClient
from penstock.client.errors import Declined, NotSupported, TimedOut
from penstock.client.link import log
from penstock.client.options import ClientOptions, Options, bounded
from penstock.client.sspq_core import DECLINED, DROPPED, SspqCore, Taken
from penstock.client.url import parse_url
from penstock.protocols import sspq_session


class AsyncSspqMessage(Taken):
    """A message that this client holds until it acknowledges it."""

    __slots__ = ("_client",)

    def __init__(self, client: "AsyncSspqClient", number: int, delivery: sspq_session.Delivery) -> None:
        super().__init__(number, delivery)
        self._client = client

    async def ack(self) -> bool:
        """It is done. False: it was before, or the connection is gone and the message comes again."""
        return await self._client._ack(self)


class AsyncSspqClient(AsyncLinkedClient):
    """A client of an SSPQ listener."""

    def __init__(self, url: str, **options: Unpack[ClientOptions]) -> None:
        chosen = Options.of(**options)
        self._core = SspqCore(chosen.payload_bytes_max, receipts=chosen.receipts)
        self._link = AsyncLink(self._core, parse_url(url, "sspq"), chosen)
        self._receiving = False

    async def send(self, body: bytes, retries: int | None = None) -> None:
        """Send a message that is delivered at most 1 + `retries` times. None or 255: without end."""
        await self.send_many([body], retries)

    async def send_many(self, bodies: Iterable[bytes], retries: int | None = None) -> int:
        """Send messages in as few writes as possible; how many they were."""
        return await self._link.send_many(bodies, partial(self._core.send, retries=retries))

    async def receive(self, timeout: float | None = None) -> AsyncSspqMessage:
        """The next message. TimedOut after `timeout` seconds: the next call goes on waiting for the same.

        Declined where the broker says that none will come. The message before must be acknowledged.
        """
        return await self._receive(bounded(timeout), dead=False)

    async def receive_dead(self, timeout: float | None = None) -> AsyncSspqMessage:
        """The next dead letter; otherwise as `receive`."""
        return await self._receive(bounded(timeout), dead=True)

    async def _receive(self, timeout: float | None, *, dead: bool) -> AsyncSspqMessage:
        if self._receiving:
            raise NotSupported(
                "sspq: another task is receiving; SSPQ has one message at a time, use a client each"
            )
        self._receiving = True
        try:
            return await self._next(timeout, dead=dead)
        finally:
            self._receiving = False

    async def _next(self, timeout: float | None, *, dead: bool) -> AsyncSspqMessage:
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            await self._link.write(partial(self._core.ask, dead=dead), sends=False)
            answer = self._core.take()
            while answer is None and self._core.is_waiting:
                left = None if deadline is None else max(0.0, deadline - loop.time())
                if not await self._link.news(left):
                    raise TimedOut(f"sspq: no message within {timeout:g} s; the next call goes on waiting")
                answer = self._core.take()
            if isinstance(answer, sspq_session.Declined):
                raise Declined(DECLINED[answer.dead])
            if answer is not None:
                return AsyncSspqMessage(self, *answer)

    async def _ack(self, message: AsyncSspqMessage) -> bool:
        told = await self._link.write_if_open(partial(self._core.confirm, message._number))
        if not told:
            log.warning(DROPPED)
        return told
