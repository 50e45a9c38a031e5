"""The HTTP client for asyncio.

Connections are those of the client for threads, used in threads; many tasks may call, and wait for each
other. A task that is cancelled stops waiting, but what it has asked for is done nevertheless.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self, Unpack

from penstock.client.http import AsyncHttpMessage, HttpCalls, P, T
from penstock.client.http_core import Answer, Request
from penstock.client.managed import AsyncManaged
from penstock.client.options import ClientOptions


class AsyncHttpClient(HttpCalls[AsyncHttpMessage], AsyncManaged):
    """A client of the HTTP API.

    A new one is not connected yet: `await` it, or enter it with `async with`, which also closes it.
    """

    def __init__(self, url: str, **options: Unpack[ClientOptions]) -> None:
        super().__init__(AsyncHttpMessage, url, options)
        # Tasks queue here and not in threads, of which there are few for the whole program.
        self._turn = asyncio.Lock()

    async def consume(
        self,
        queue: str,
        prefetch: int = 100,
        *,
        lease: float = 60,
        dead: bool = False,
        count: int | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[AsyncHttpMessage]:
        """Messages of a queue, or its dead letters, as they come, at most `prefetch` of them unsettled.

        Each is held for `lease` seconds from then on: settle it before, `extend` that, or `keep` it; after
        that it comes again, here or elsewhere. Ends after `count` messages, or when none has come for
        `timeout` seconds; else never. With a count no more messages than that are taken from the queue. What
        was fetched ahead when the loop is left goes back; that counts as a delivery.
        """
        window = self._leases.consume(queue, prefetch, lease, dead, count)
        loop = asyncio.get_running_loop()
        pool = ThreadPoolExecutor(1, "penstock-consume")  # its thread waits while there is no message
        try:
            while window.left > 0:
                # A message is handed out on the loop: one that came while a task was cancelled goes back.
                if (message := self._leases.here(window)) is not None:
                    yield message
                elif not await loop.run_in_executor(pool, self._leases.comes, window, timeout):
                    return
        finally:
            self._leases.end(window)
            pool.shutdown(wait=False)

    async def close(self) -> None:
        """End, when calls that are under way have their answers, and every verdict is settled.

        Messages without a verdict go back. ConnectionLost with `verdicts_in_doubt` where there is no broker.
        """
        await self._run(self._end)

    async def _ask(self, request: Request) -> Answer:
        async with self._turn:
            return await self._run(self._line.ask, request)

    async def _run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(call, *args, **kwargs)

    async def _open(self) -> Self:
        await self._run(self._line.open)
        return self
