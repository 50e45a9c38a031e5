"""The SSPQ clients: send, and receive one message at a time.

SSPQ has no queue names: the listener's settings name the queue. The client for asyncio is the source, the one
for threads is made from it (`blocking.py`). One thread or task may receive; any may send and acknowledge.

After a lost connection a client connects again by itself, with back-off, and asks again:
  * the message that was not acknowledged comes again, with one retry less, or becomes a dead letter;
  * its acknowledgement is dropped, and says so by returning False;
  * what was sent on it is in doubt, because SSPQ has no receipts: the next `send`, `flush` or `close` raises
    `ConnectionLost` with the count, once.
"""

import time
from collections.abc import Iterable
from functools import partial
from typing import Any, Generic, TypeVar, Unpack

from penstock.client.blocking import blocking, run
from penstock.client.core import as_bytes
from penstock.client.errors import Declined, NotSupported, TimedOut
from penstock.client.link import AsyncLinkedClient, LinkedClient, MakeLink, log
from penstock.client.options import SECONDS_TOP, ClientOptions, Options
from penstock.client.sspq_core import DECLINED, DROPPED, SspqCore, Taken
from penstock.client.thread_link import ThreadLink
from penstock.client.url import parse_url
from penstock.protocols import sspq_session


class _Message(Taken):
    __slots__ = ("_client",)

    def __init__(self, client: "_Calls[Any]", number: int, delivery: sspq_session.Delivery) -> None:
        super().__init__(number, delivery)
        self._client = client


class AsyncSspqMessage(_Message):
    """A message that this client holds until it acknowledges it."""

    __slots__ = ()

    async def ack(self) -> bool:
        """It is done. False: it was before, or the connection is gone and the message comes again."""
        told = await self._client._link.write_if_open(partial(self._client._core.confirm, self._number))
        if not told:
            log.warning(DROPPED)
        return told


class SspqMessage(_Message):
    """A message that this client holds until it acknowledges it."""

    __slots__ = ()

    ack = blocking(AsyncSspqMessage.ack)


M = TypeVar("M", bound=_Message)


class _Calls(Generic[M]):
    """What both clients have."""

    def __init__(self, kind: MakeLink, message: type[M], url: str, options: ClientOptions) -> None:
        chosen = Options.of(**options)
        self._message = message
        self._core = SspqCore(chosen.payload_bytes_max, receipts=chosen.receipts)
        self._link = kind(self._core, parse_url(url, "sspq"), chosen)

    async def _receive(self, timeout: float | None, *, dead: bool) -> M:
        deadline = None if timeout is None else time.monotonic() + min(timeout, SECONDS_TOP)
        while True:
            await self._link.write(partial(self._core.ask, dead=dead), sends=False)
            while (answer := self._link.touch(self._core.take)) is None and self._core.is_waiting:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not await self._link.read(self._core.is_answered, left):
                    raise TimedOut(f"sspq: no message within {timeout:g} s; the next call goes on waiting")
            if isinstance(answer, sspq_session.Declined):
                raise Declined(DECLINED[answer.dead])
            if answer is not None:
                return self._message(self, *answer)


class AsyncSspqClient(_Calls[AsyncSspqMessage], AsyncLinkedClient):
    """A client of an SSPQ listener."""

    def __init__(self, url: str, **options: Unpack[ClientOptions]) -> None:
        from penstock.client.async_link import AsyncLink  # here: a client that blocks needs no event loop

        super().__init__(AsyncLink, AsyncSspqMessage, url, options)
        self._receiving = False

    async def send(self, body: bytes, retries: int | None = None) -> None:
        """Send a message that is delivered at most 1 + `retries` times. None or 255: without end."""
        await self._link.write(partial(self._core.send, [as_bytes(body)], retries))

    async def send_many(self, bodies: Iterable[bytes], retries: int | None = None) -> int:
        """Send messages in as few writes as possible; how many they were."""
        return await self._link.send_many(bodies, partial(self._core.send, retries=retries))

    async def receive(self, timeout: float | None = None) -> AsyncSspqMessage:
        """The next message. TimedOut after `timeout` seconds: the next call goes on waiting for the same.

        Declined where the broker says that none will come. The message before must be acknowledged.
        """
        return await self._receive_alone(timeout, dead=False)

    async def receive_dead(self, timeout: float | None = None) -> AsyncSspqMessage:
        """The next dead letter; otherwise as `receive`."""
        return await self._receive_alone(timeout, dead=True)

    async def _receive_alone(self, timeout: float | None, *, dead: bool) -> AsyncSspqMessage:
        if self._receiving:
            raise NotSupported(
                "sspq: another task is receiving; SSPQ has one message at a time, use a client each"
            )
        self._receiving = True
        try:
            return await self._receive(timeout, dead=dead)
        finally:
            self._receiving = False


class SspqClient(_Calls[SspqMessage], LinkedClient):
    """A client of an SSPQ listener. A context manager: leaving it closes it."""

    def __init__(self, url: str, **options: Unpack[ClientOptions]) -> None:
        super().__init__(ThreadLink, SspqMessage, url, options)

    send = blocking(AsyncSspqClient.send)
    send_many = blocking(AsyncSspqClient.send_many)

    def receive(self, timeout: float | None = None) -> SspqMessage:
        """See `AsyncSspqClient.receive`."""
        return run(self._receive(timeout, dead=False))

    def receive_dead(self, timeout: float | None = None) -> SspqMessage:
        """The next dead letter; otherwise as `receive`."""
        return run(self._receive(timeout, dead=True))
