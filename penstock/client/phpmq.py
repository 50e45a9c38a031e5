"""The PHPMQ client for threads: send, consume, and say what became of a message.

One thread may iterate over messages; any thread may send and settle at the same time. There is no thread in
the background: bytes are read when somebody waits for a message, and at no other time.

After a lost connection the client connects again by itself, with back-off, and asks for its windows again:
  * messages that were not acknowledged come again, here or elsewhere;
  * an acknowledgement of a message of the lost connection is dropped, and says so by returning False;
  * what was sent on it is in doubt, because PHPMQ has no receipts: the next `send`, `flush` or `close` raises
    `ConnectionLost` with the count, once.
"""

import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Unpack

from penstock.client.link import Link, LinkedClient, log
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


class PhpmqMessage(Held):
    """A message that this client holds until it says what became of it."""

    __slots__ = ("_client",)

    def __init__(self, client: "PhpmqClient", queue: str, fetched: Fetched) -> None:
        super().__init__(queue, fetched)
        self._client = client

    def ack(self) -> bool:
        """It is done. False: nothing was said, see `PhpmqClient.ack_many`."""
        return bool(self._client._settle(Outcome.ACK, [self]))

    def requeue(self, ttl: int | None = None) -> bool:
        """Again later, at the tail of the queue, with a new TTL in seconds or none. False: see `ack`."""
        return bool(self._client._settle(Outcome.REQUEUE, [self], ttl))

    def reject(self) -> bool:
        """Never again: it becomes a dead letter. False: see `ack`."""
        return bool(self._client._settle(Outcome.REJECT, [self]))


class PhpmqClient(LinkedClient):
    """A client of a PHPMQ listener. A context manager: leaving it closes it."""

    def __init__(self, url: str, **options: Unpack[ClientOptions]) -> None:
        chosen = Options.of(**options)
        target = parse_url(url, "phpmq")
        self._core = PhpmqCore(chosen.payload_bytes_max, receipts=chosen.receipts)
        self._link = Link(self._core, target, chosen)

    def send(self, queue: str, body: bytes, ttl: int | None = None) -> None:
        """Send a message that lives `ttl` seconds. When it returns, the system has taken the bytes."""
        self.send_many(queue, [body], ttl)

    def send_many(self, queue: str, bodies: Iterable[bytes], ttl: int | None = None) -> int:
        """Send messages in as few writes as possible; how many they were."""
        return self._link.send_many(bodies, partial(self._core.send, queue, ttl_seconds=ttl))

    def consume(
        self, queue: str, prefetch: int = 100, *, count: int | None = None, timeout: float | None = None
    ) -> Iterator[PhpmqMessage]:
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

        self._link.write(ask, sends=False)
        assert window is not None
        return self._messages(window, bounded(timeout))

    def _messages(self, window: Window, timeout: float | None) -> Iterator[PhpmqMessage]:
        try:
            while not window.is_done:
                message = self._next(window, timeout)
                if message is None:
                    return
                yield message
        finally:
            window.is_over = True

    def _next(self, window: Window, timeout: float | None) -> PhpmqMessage | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._link.notice()  # what was fetched over a connection that is gone could not be settled any more
        while (fetched := self._link.touch(partial(self._core.take, window))) is None:
            self._link.ensure()
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._link.read(left):
                return None
        return PhpmqMessage(self, window.queue, fetched)

    def ack_many(self, messages: Iterable[PhpmqMessage]) -> int:
        """Acknowledge many messages in one write; of how many the broker was told.

        It is not told of those that were settled before, and of those whose connection is gone: they come
        again, whatever was done with them.
        """
        return self._settle(Outcome.ACK, messages)

    def _settle(self, outcome: Outcome, messages: Iterable[PhpmqMessage], ttl: int | None = None) -> int:
        told = 0
        for (queue, generation), group in unsettled(messages).items():
            verdict = partial(self._core.settle, outcome, queue, group, generation, ttl or 0)
            if self._link.write_if_open(verdict):
                told += len(group)
            else:
                log.warning(DROPPED, queue, outcome.value, len(group))
        return told
