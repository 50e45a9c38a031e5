"""A link for asyncio: everything happens on one loop, and bytes are read as they come."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from penstock.client.async_wire import AsyncWire, dial
from penstock.client.core import Core
from penstock.client.link import Link, T, taken_nothing
from penstock.client.options import Options
from penstock.client.url import Target
from penstock.common.address import Address
from penstock.protocols.errors import PeerViolation


class AsyncLink(Link[AsyncWire, asyncio.Lock]):
    """A new one is not connected yet."""

    def __init__(self, core: Core, target: Target, options: Options) -> None:
        super().__init__(core, target, options, asyncio.Lock(), asyncio.Lock())
        self._news = asyncio.Event()  # set, and replaced, with everything that the core may have learnt
        self._violation: PeerViolation | None = None  # of the last wire, and not told yet

    async def _dial(self, address: Address) -> AsyncWire:
        wire = await dial(address, self._context, self._options.connect_seconds)
        wire.write(self._core.opened())
        return wire

    async def _alone(self, turn: asyncio.Lock, call: Callable[[], Awaitable[T]]) -> T:
        async with turn:
            return await call()

    def _start(self, wire: AsyncWire) -> None:
        self._violation = None
        wire.start(partial(self._received, wire), partial(self._drop, wire))

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _put(
        self, wire: AsyncWire, encode: Callable[[], bytes | None], sends: bool = False, own: bool = False
    ) -> bool:
        data = self._encoded(wire, encode, sends, own)
        if data is None:
            return False
        wire.write(data)
        seconds = self._options.operation_seconds
        if not await wire.drain(seconds):
            raise TimeoutError(taken_nothing(seconds))
        if not wire.is_open:
            raise ConnectionResetError
        return True

    async def _hear(
        self, wire: AsyncWire, happened: Callable[[], bool], seconds: float | None, *, own: bool = False
    ) -> bool:
        if happened():
            return True
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        if self._violation is not None:
            violation, self._violation = self._violation, None
            raise self._broken(violation) from violation
        return True

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _received(self, wire: AsyncWire, data: bytes) -> None:
        try:
            self._core.feed(data)
        except PeerViolation as violation:
            self._violation = violation
            self._drop(wire, str(violation))
        self._tell()
