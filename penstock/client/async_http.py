"""The HTTP client for asyncio.

The connection is that of the client for threads, used in a thread; many tasks may call, and wait for each
other. A task that is cancelled stops waiting, but what it has asked for is done nevertheless.
"""

import asyncio
from typing import Self, Unpack

from penstock.client.http import HttpCalls, HttpLine
from penstock.client.http_core import Answer, HttpCore, Request
from penstock.client.managed import AsyncManaged
from penstock.client.options import ClientOptions, Options
from penstock.client.url import parse_url


class AsyncHttpClient(HttpCalls, AsyncManaged):
    """A client of the HTTP API.

    A new one is not connected yet: `await` it, or enter it with `async with`, which also closes it.
    """

    def __init__(self, url: str, **options: Unpack[ClientOptions]) -> None:
        chosen = Options.of(**options)
        self._core = HttpCore(chosen)
        self._line = HttpLine(parse_url(url, "http"), chosen)
        # Tasks queue here and not in threads, of which there are few for the whole program.
        self._turn = asyncio.Lock()

    async def close(self) -> None:
        """End, when calls that are under way have their answers."""
        await asyncio.to_thread(self._line.close)

    async def _ask(self, request: Request) -> Answer:
        async with self._turn:
            return await asyncio.to_thread(self._line.ask, request)

    async def _open(self) -> Self:
        await asyncio.to_thread(self._line.open)
        return self
