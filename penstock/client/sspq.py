"""The SSPQ client for threads: send, and receive one message at a time.

SSPQ has no queue names: the listener's settings name the queue. There is no thread in the background: bytes
are read when somebody waits for a message. One thread may receive; any thread may send and acknowledge.

After a lost connection the client connects again by itself, with back-off, and asks again:
  * the message that was not acknowledged comes again, with one retry less, or becomes a dead letter;
  * its acknowledgement is dropped, and says so by returning False;
  * what was sent on it is in doubt, because SSPQ has no receipts: the next `send`, `flush` or `close` raises
    `ConnectionLost` with the count, once.
"""

import time
from collections.abc import Iterable
from functools import partial
from typing import Unpack

from penstock.client.errors import Declined, TimedOut
from penstock.client.link import Link, LinkedClient, log
from penstock.client.options import ClientOptions, Options, bounded
from penstock.client.sspq_core import DECLINED, DROPPED, SspqCore, Taken
from penstock.client.url import parse_url
from penstock.protocols import sspq_session


class SspqMessage(Taken):
    """A message that this client holds until it acknowledges it."""

    __slots__ = ("_client",)

    def __init__(self, client: "SspqClient", number: int, delivery: sspq_session.Delivery) -> None:
        super().__init__(number, delivery)
        self._client = client

    def ack(self) -> bool:
        """It is done. False: it was before, or the connection is gone and the message comes again."""
        return self._client._ack(self)


class SspqClient(LinkedClient):
    """A client of an SSPQ listener. A context manager: leaving it closes it."""

    def __init__(self, url: str, **options: Unpack[ClientOptions]) -> None:
        chosen = Options.of(**options)
        self._core = SspqCore(chosen.payload_bytes_max, receipts=chosen.receipts)
        self._link = Link(self._core, parse_url(url, "sspq"), chosen)

    def send(self, body: bytes, retries: int | None = None) -> None:
        """Send a message that is delivered at most 1 + `retries` times. None or 255: without end."""
        self.send_many([body], retries)

    def send_many(self, bodies: Iterable[bytes], retries: int | None = None) -> int:
        """Send messages in as few writes as possible; how many they were."""
        return self._link.send_many(bodies, partial(self._core.send, retries=retries))

    def receive(self, timeout: float | None = None) -> SspqMessage:
        """The next message. TimedOut after `timeout` seconds: the next call goes on waiting for the same.

        Declined where the broker says that none will come. The message before must be acknowledged.
        """
        return self._receive(bounded(timeout), dead=False)

    def receive_dead(self, timeout: float | None = None) -> SspqMessage:
        """The next dead letter; otherwise as `receive`."""
        return self._receive(bounded(timeout), dead=True)

    def _receive(self, timeout: float | None, *, dead: bool) -> SspqMessage:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._link.write(partial(self._core.ask, dead=dead), sends=False)
            answer = self._link.touch(self._core.take)
            while answer is None and self._link.touch(self._is_waiting):
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not self._link.read(left):
                    raise TimedOut(f"sspq: no message within {timeout:g} s; the next call goes on waiting")
                answer = self._link.touch(self._core.take)
            if isinstance(answer, sspq_session.Declined):
                raise Declined(DECLINED[answer.dead])
            if answer is not None:
                return SspqMessage(self, *answer)

    def _is_waiting(self) -> bool:
        return self._core.is_waiting

    def _ack(self, message: SspqMessage) -> bool:
        told = self._link.write_if_open(partial(self._core.confirm, message._number))
        if not told:
            log.warning(DROPPED)
        return told
