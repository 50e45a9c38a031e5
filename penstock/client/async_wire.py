"""A wire: one asyncio connection, plain or TLS. Bytes go to a callback as they come.

Rules that always hold:
  * Nothing is read before `start` names the callbacks. They are called by the loop, `lost` once, and nothing
    after it.
  * `write` never waits. `drain` waits while too much is unsent, `flush` until the system has taken everything
    (with TLS: until it has been encrypted and handed on), `finish` until the peer has read everything.

How it fails: `OSError` (of which `TimeoutError` is one) from `dial` and `finish`; from the others nothing: a
lost connection ends every wait, and is told by `lost`.
"""

import asyncio
import contextlib
import math
import select
import socket
import ssl
from collections.abc import Callable
from typing import Final, cast

from penstock.client.core import CLOSED_BY_BROKER
from penstock.client.errors import reason_of
from penstock.client.wire import HANGUP, tune
from penstock.common.address import Address, UnixAddress

BUFFER_BYTES: Final = 1 << 20
TURN_WRITES: Final = 64
"""A task that only sends never waits as long as the system takes everything. It lets others have a turn after
so many writes."""


class AsyncWire(asyncio.Protocol):
    def __init__(self) -> None:
        self._received: Callable[[bytes], None] = _nobody
        self._lost: Callable[[str], None] = _nobody
        self._transport: asyncio.Transport | None = None
        self._tls: ssl.SSLObject | None = None
        self._hangup = select.poll()
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._writes = 0
        self._flushing = 0
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why
        self._finishing = False

    # --- the loop's callbacks ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=BUFFER_BYTES)
        self._transport.pause_reading()
        self._tls = transport.get_extra_info("ssl_object")
        self._hangup.register(transport.get_extra_info("socket").fileno(), HANGUP)

    def data_received(self, data: bytes) -> None:
        if not self._finishing and not self._ended.done():
            self._received(data)

    def eof_received(self) -> bool:
        self._end("" if self._finishing and self._said_farewell() else CLOSED_BY_BROKER)
        return False

    def connection_lost(self, error: Exception | None) -> None:
        in_order = self._finishing and error is None and self._said_farewell()
        self._end("" if in_order else reason_of(error or CLOSED_BY_BROKER))

    def _said_farewell(self) -> bool:
        """With TLS an end without a farewell proves nothing: somebody has cut the stream."""
        if self._tls is None:
            return True
        try:
            return not self._tls.read(1)
        except ssl.SSLZeroReturnError:
            return True
        except ssl.SSLError:
            return False

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    # --- the owner's calls ---------------------------------------------------------------------------

    def start(self, received: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        """From now on, tell these two."""
        self._received, self._lost = received, lost
        if self._ended.done():
            lost(self._ended.result())
        elif self._transport is not None:
            self._transport.resume_reading()

    @property
    def is_open(self) -> bool:
        return not self._ended.done()

    @property
    def is_gone(self) -> bool:
        """Whether the peer has closed. It is told before what it has sent last was read."""
        return self._ended.done() or bool(self._hangup.poll(0))

    def write(self, data: bytes) -> None:
        if self._transport is not None and data and not self._finishing and not self._ended.done():
            self._transport.write(data)

    async def drain(self, seconds: float) -> bool:
        """Until less than `BUFFER_BYTES` are unsent, or the connection is lost; False: nothing goes out."""
        self._writes += 1
        if self._may_write.is_set():
            if self._writes % TURN_WRITES == 0:
                await asyncio.sleep(0)
            return True
        return await self._writable(seconds)

    async def flush(self, seconds: float) -> bool:
        """Until nothing is unsent, or the connection is lost; False: nothing goes out."""
        if self._transport is None or self._ended.done():
            return True
        if not self._transport.get_write_buffer_size():
            return True  # asyncio's TLS would pause now, and nothing would come by that it resumes after
        # With a limit of nothing, the loop tells when nothing is left.
        self._transport.set_write_buffer_limits(high=0)
        self._flushing += 1
        try:
            return await self._writable(seconds)
        finally:
            self._flushing -= 1
            if not self._flushing:
                self._transport.set_write_buffer_limits(high=BUFFER_BYTES)

    async def _writable(self, seconds: float) -> bool:
        assert self._transport is not None
        unsent = math.inf
        while (left := self._transport.get_write_buffer_size()) < unsent:
            unsent = left
            try:
                async with asyncio.timeout(seconds):
                    await self._may_write.wait()
            except TimeoutError:
                continue  # as long as the system takes something
            return True
        return False

    async def finish(self, seconds: float) -> None:
        """Say that nothing more comes, and wait until the peer has read everything and closed, too.

        What it sends until then is thrown away. TimeoutError, or another OSError, where that did not happen.
        """
        if self._transport is None or self._ended.done():
            return
        self._finishing = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()  # TLS: its own farewell, which the peer answers
        try:
            async with asyncio.timeout(seconds):
                why = await asyncio.shield(self._ended)
        except TimeoutError:
            raise TimeoutError(f"the broker has not closed within {seconds:g} s") from None
        finally:
            self.abort()
        if why:
            raise OSError(why)

    def abort(self) -> None:
        """End at once; what is unsent goes nowhere."""
        if self._transport is not None:
            self._transport.abort()
        self._end("")

    def _end(self, why: str) -> None:
        if not self._ended.done():
            self._hangup = select.poll()  # the number of the socket may soon be another one's
            self._ended.set_result(why)
            self._may_write.set()
            if not self._finishing:
                self._lost(why)


def _nobody(_what: object) -> None:
    """Whom a wire tells before it is started."""


async def dial(address: Address, context: ssl.SSLContext | None, seconds: float) -> AsyncWire:
    """Connect, shake hands."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds):
            if isinstance(address, UnixAddress):
                return (await loop.create_unix_connection(AsyncWire, address.path))[1]
            transport, wire = await loop.create_connection(
                AsyncWire,
                address.host,
                address.port,
                ssl=context,
                server_hostname=address.host if context is not None else None,
            )
    except TimeoutError:
        raise TimeoutError(f"no connection within {seconds:g} s") from None
    with contextlib.suppress(OSError):  # it may be gone already, which is told in its own way
        tune(cast(socket.socket, transport.get_extra_info("socket")))
    return wire
