"""The HTTP client for asyncio: the same as `HttpClient`, with `await`.

The connection is that of the client for threads, used in a thread; many tasks may call, and wait for each
other. A task that is cancelled stops waiting, but what it has asked for is done nevertheless.
"""

import asyncio
from collections.abc import Generator, Iterable
from types import TracebackType
from typing import Any, Self, Unpack

from penstock.client.http import HttpLine
from penstock.client.http_core import (
    Answer,
    BatchReceipt,
    HttpCore,
    PeekedMessage,
    QueueDetails,
    QueueInfo,
    Receipt,
    Request,
    details_of,
    message_of,
    page_of,
    queue_of,
    receipt_of,
    receipt_of_batch,
)
from penstock.client.options import ClientOptions, Options
from penstock.client.url import parse_url


class AsyncHttpClient:
    """A client of the HTTP API.

    A new one is not connected yet: `await` it, or enter it with `async with`, which also closes it.
    """

    def __init__(self, url: str, **options: Unpack[ClientOptions]) -> None:
        chosen = Options.of(**options)
        self._core = HttpCore(chosen)
        self._line = HttpLine(parse_url(url, "http"), chosen)
        # Tasks queue here and not in threads, of which there are few for the whole program.
        self._turn = asyncio.Lock()

    async def send(
        self,
        queue: str,
        body: bytes,
        *,
        ttl: int | None = None,
        retries: int | None = None,
        key: str | None = None,
    ) -> Receipt:
        """Send a message; when this returns, it is stored. See `HttpClient.send`."""
        return receipt_of(await self._ask(self._core.send(queue, body, ttl, retries, key)))

    async def send_many(
        self,
        queue: str,
        bodies: Iterable[bytes],
        *,
        ttl: int | None = None,
        retries: int | None = None,
        key: str | None = None,
    ) -> list[BatchReceipt]:
        """Send messages in batches; their receipts. See `HttpClient.send_many`."""
        requests = self._core.batches(queue, bodies, ttl, retries, key)
        return [receipt_of_batch(await self._ask(request)) for request in requests]

    async def peek(
        self, queue: str, from_offset: int | None = None, limit: int = 100, state: str | None = None
    ) -> list[PeekedMessage]:
        """Look at messages without taking them. See `HttpClient.peek`."""
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

    async def close(self) -> None:
        """End, when calls that are under way have their answers."""
        await asyncio.to_thread(self._line.close)

    async def _ask(self, request: Request) -> Answer:
        async with self._turn:
            return await asyncio.to_thread(self._line.ask, request)

    async def _open(self) -> Self:
        await asyncio.to_thread(self._line.open)
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self._open().__await__()

    async def __aenter__(self) -> Self:
        return await self._open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
