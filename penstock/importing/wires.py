"""Sources that speak our own protocols: SSPQ, PHPMQ and RQ servers, Penstock or another.

    SSPQ     a connection has one message at a time, so there are several; the message's retry counter comes
             along. No identity: what was stored and not confirmed is stored again when it comes again.
    PHPMQ    messages have ids, and what is left of their TTL. Nobody confirms an acknowledgement: the
             last ids are kept.
    RQ       a message is confirmed when the handler that has it returns. No identity. A request that wants an
             answer cannot be moved.

The clients look for their server again by themselves. How it fails: as said in `source.py`.
"""

import queue
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

from penstock import client
from penstock.errors import Misuse
from penstock.importing.source import POLL_SECONDS, Away, Message, Place, Refuses, Source, tls_files, told

LOST: Final = (client.ConnectionLost,)
NEXT_SECONDS: Final = 0.02
"""SSPQ: how long to wait for one more message when there is one."""


class Wire(Source):
    def __init__(self, place: Place) -> None:
        super().__init__(place)
        has_queue = place.scheme != "sspq"
        if len(place.path) != has_queue:
            raise Misuse(f"{place.scheme}://…: use {place.scheme}://HOST:PORT{'/QUEUE' * has_queue}")
        self._url = f"{place.scheme}{'s' * place.tls}://{place.hosts}"
        self._options: client.ClientOptions = {
            **tls_files(place),
            "receipts": False,  # nothing is sent
            "reconnect_seconds": 0,  # the loop tries again
            "drain_seconds": 1,
        }


class Sspq(Wire):
    confirms = False
    batch_max = 64

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._all: list[client.SspqClient] = []

    def open(self) -> None:
        self._all = []
        self._idle = deque(
            [self._connect()]
        )  # of those without a message; one that has asked for one is first

    def _connect(self) -> client.SspqClient:
        with told(self.name, LOST):
            self._all.append(client.SspqClient(self._url, **self._options))
        return self._all[-1]

    def take(self, count: int) -> list[Message]:
        messages: list[Message] = []
        while len(messages) < count:
            mq = self._idle.popleft() if self._idle else self._connect()
            try:
                with told(self.name, LOST):
                    got = mq.receive(NEXT_SECONDS if messages else POLL_SECONDS)
            except client.TimedOut:
                self._idle.appendleft(mq)
                break
            messages.append(Message((mq, got), got.body, retries=got.retries))
        return messages

    def settle(self, messages: Sequence[Message]) -> None:
        for message in messages:
            mq, got = message.handle
            with told(self.name, LOST):
                if not got.ack():
                    raise Away(f"{self.name}: the connection was lost before what is stored was confirmed")
            self._idle.append(mq)

    def close(self) -> None:
        for mq in self._all:
            with suppress(client.ClientError):
                mq.close()


class Phpmq(Wire):
    confirms = False

    def open(self) -> None:
        with told(self.name, LOST):
            self._mq = client.PhpmqClient(self._url, **self._options)

    def take(self, count: int) -> list[Message]:
        with told(self.name, LOST):
            got = self._mq.consume(self.queue, count, count=count, timeout=POLL_SECONDS)
            # By id: where the client has connected again meanwhile, what it had comes once more.
            messages = {it.id: it for it in got}
        return [Message(it, it.body, it.id, ttl=it.ttl) for it in messages.values()]

    def settle(self, messages: Sequence[Message]) -> None:
        with told(self.name, LOST):
            if self._mq.ack_many([it.handle for it in messages]) < len(messages):
                raise Away(f"{self.name}: the connection was lost before what is stored was acknowledged")

    def close(self) -> None:
        with suppress(client.ClientError, AttributeError):
            self._mq.close()


class _Hands:
    """What one node holds: its handlers wait, in threads of the client's, until their messages are stored."""

    def __init__(self) -> None:
        self.came: queue.SimpleQueue[tuple[client.RqRequest, Future[None]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._held: set[Future[None]] = set()
        self._is_over = False

    def hold(self, request: client.RqRequest) -> None:
        """A handler: as long as this goes on, the message is ours."""
        stored: Future[None] = Future()
        with self._lock:
            if self._is_over:
                stored.cancel()
            self._held.add(stored)
        self.came.put((request, stored))
        stored.result()

    def settle(self, stored: "Future[None]") -> None:
        with self._lock:
            self._held.discard(stored)
        stored.set_result(None)

    def end(self) -> None:
        """From now on nothing is held: a handler that is cancelled has not answered, so that it goes back."""
        with self._lock:
            self._is_over = True
            for stored in self._held:
                stored.cancel()


class Rq(Wire):
    confirms = False
    batch_max = 64

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._hands = _Hands()

    def open(self) -> None:
        self._hands = _Hands()
        with told(self.name, LOST):
            self._node = client.RqClient(self._url, **self._options)
            self._node.serve(self.queue, self._hands.hold, max=self.batch_max)

    def take(self, count: int) -> list[Message]:
        messages: list[Message] = []
        with suppress(queue.Empty):
            while len(messages) < count:
                request, stored = self._hands.came.get(timeout=NEXT_SECONDS if messages else POLL_SECONDS)
                if request.wants_reply:
                    raise Refuses(
                        f"{self.name}: a request waits for an answer there, which only its own workers can "
                        "give; let them answer, then import what is left"
                    )
                messages.append(Message(stored, request.body))
        if not messages:
            with told(self.name, LOST):
                self._node.wait(0)
        return messages

    def settle(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._hands.settle(message.handle)

    def close(self) -> None:
        self._hands.end()
        with suppress(client.ClientError, AttributeError):
            self._node.close()
