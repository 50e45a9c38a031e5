"""The HTTP clients: send with a receipt, look at queues and messages; and the one for threads.

One connection, kept open and used by one call at a time; any thread may call. It is made again when it was
lost, with back-off, as by the other clients. One that the broker has closed while nobody used it is found
out before anything is written. What breaks later leaves a send without a key in doubt, which is told; what
is safe to repeat (`http_core.py`) is repeated once.
"""

import http.client
import threading
import time
from collections.abc import Iterable
from typing import Unpack

from penstock.client.blocking import Latch, blocking
from penstock.client.core import CLOSED_BY_BROKER
from penstock.client.errors import ConnectionLost, reason_of
from penstock.client.fork import begin_anew_after_fork
from penstock.client.http_connection import HttpConnection
from penstock.client.http_core import (
    Answer,
    BatchReceipt,
    HttpCore,
    PeekedMessage,
    QueueDetails,
    QueueInfo,
    Receipt,
    Request,
    answer_of,
    details_of,
    lost,
    message_of,
    page_of,
    queue_of,
    receipt_of,
    receipt_of_batch,
    timed_out,
    unreached,
)
from penstock.client.link import log
from penstock.client.managed import Managed
from penstock.client.options import ClientOptions, Options, tls_context
from penstock.client.plan import Plan
from penstock.client.url import Target, parse_url


class HttpCalls:
    """What both clients can say; `_ask` is theirs."""

    _core: HttpCore

    async def _ask(self, request: Request) -> Answer:
        raise NotImplementedError

    async def send(
        self,
        queue: str,
        body: bytes,
        *,
        ttl: int | None = None,
        retries: int | None = None,
        key: str | None = None,
    ) -> Receipt:
        """Send a message; when this returns, it is stored.

        It lives `ttl` seconds and is delivered at most 1 + `retries` times. The same `key` for the same
        message stores it once, however often it is sent.
        """
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
        """Send messages in batches, each of which is stored as a whole or not at all; their receipts.

        With a `key` the call can be repeated as a whole: what is stored already is not stored again.
        """
        requests = self._core.batches(queue, bodies, ttl, retries, key)
        return [receipt_of_batch(await self._ask(request)) for request in requests]

    async def peek(
        self, queue: str, from_offset: int | None = None, limit: int = 100, state: str | None = None
    ) -> list[PeekedMessage]:
        """Look at messages without taking them, from an offset on (None: the first that is kept).

        `state` shows only those that are ready, held, dead or gone.
        """
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


class HttpClient(Managed):
    """A client of the HTTP API. A context manager: leaving it closes it."""

    def __init__(self, url: str, **options: Unpack[ClientOptions]) -> None:
        chosen = Options.of(**options)
        self._core = HttpCore(chosen)
        self._line = HttpLine(parse_url(url, "http"), chosen)
        self._line.open()

    send = blocking(HttpCalls.send)
    send_many = blocking(HttpCalls.send_many)
    peek = blocking(HttpCalls.peek)
    queues = blocking(HttpCalls.queues)
    queue = blocking(HttpCalls.queue)

    async def _ask(self, request: Request) -> Answer:
        return self._line.ask(request)

    def close(self) -> None:
        """End, when a call that is under way has its answer. Nothing is left in doubt by it."""
        self._line.close()


class HttpLine:
    """The connection of a client."""

    def __init__(self, target: Target, options: Options) -> None:
        self._options = options
        self._context = tls_context(target, options)
        self._plan = Plan(target, options)
        self._http = HttpConnection(options.connect_seconds, options.operation_seconds)
        self._is_known = False  # there was an answer once
        self._lock = threading.Lock()  # the connection; held for as long as a call takes
        self._closed = Latch()
        begin_anew_after_fork(self)

    def forked(self) -> None:
        """This is a child: the connection is its parent's."""
        self._lock = threading.Lock()
        self._http.close()

    def open(self) -> None:
        """Connect, so that a wrong address is told at once."""
        with self._lock:
            self._present()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._drop("")

    def ask(self, request: Request) -> Answer:
        """What the broker answers; Refused where that is no."""
        with self._lock:
            status, media, body = self._exchange(request)
        return answer_of(request, status, media, body)

    def _exchange(self, request: Request) -> tuple[int, str, bytes]:
        tries_left = 2 if request.repeatable else 1
        why = ""
        while True:
            try:
                connection = self._present()
            except ConnectionLost as error:
                raise unreached(self._name, request, why, error) from None
            try:
                response = connection.ask(request.method, request.target, request.body, request.headers)
                body = response.read()
            except TimeoutError:
                self._drop("no answer in time")
                raise timed_out(self._name, request, self._options.operation_seconds) from None
            except (OSError, http.client.HTTPException) as error:
                gone = isinstance(error, http.client.RemoteDisconnected)
                why = CLOSED_BY_BROKER if gone else reason_of(error)
                if not self._is_known:
                    why += "; is this the right port?"
                self._drop(why)
                tries_left -= 1
                if not tries_left:
                    raise lost(self._name, request, why) from None
            except BaseException:
                # An answer that came now would be taken for that of the next call.
                self._drop("")
                raise
            else:
                self._is_known = True
                if response.will_close:
                    self._plan.ended()
                return response.status, response.headers.get("Content-Type", ""), body

    # --- the connection ----------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return str(self._plan.target)

    def _present(self) -> HttpConnection:
        if self._http.is_open:
            return self._http
        self._drop("")  # the usual end of a connection that nobody has used for a while
        search = self._plan.search(time.monotonic(), first=not self._is_known)
        while True:
            if self._closed.wait(search.pause):
                raise ConnectionLost(f"{self._name}: this client is closed; make another one")
            address = search.address
            try:
                self._http.open(address, self._context)
            except OSError as error:
                search.failed(address, error, time.monotonic())
                continue
            self._plan.connected(time.monotonic())
            return self._http

    def _drop(self, why: str) -> None:
        if self._http.close() and why:
            log.warning("%s: connection lost: %s", self._name, why)
