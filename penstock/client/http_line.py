"""The connection of an HTTP client, made again when it was lost.

One call at a time; any thread may call. Before a request is written, a connection that the broker has closed
is found out and replaced, with back-off. What breaks later is asked again where that does no harm, once, or
as long as a broker is looked for at all, where the request is `patient`.

How it fails: `ConnectionLost` and `TimedOut`, with what is in doubt; `Refused` is the broker's own no.
"""

import contextlib
import http.client
import math
import threading
import time
from collections.abc import Iterator
from typing import Final

from penstock.client.blocking import Latch
from penstock.client.core import CLOSED_BY_BROKER
from penstock.client.errors import ClientError, ConnectionLost, Refused, reason_of
from penstock.client.fork import begin_anew_after_fork
from penstock.client.http_connection import HttpConnection
from penstock.client.http_core import Answer, Request, answer_of, lost, timed_out, unreached
from penstock.client.options import Options, tls_context
from penstock.client.plan import Plan, log
from penstock.client.url import Target
from penstock.common.address import Address

UNAVAILABLE: Final = 503
"""The status of a broker that cannot do something now, and perhaps soon: it stops, or is not there yet."""


class HttpLine:
    """`known`: of all the lines of a client, the names of brokers that have answered once."""

    def __init__(self, target: Target, options: Options, known: set[str] | None = None) -> None:
        self._options = options
        self._known: set[str] = set() if known is None else known
        self._context = tls_context(target, options)
        self._plan = Plan(target, options)
        self._http = HttpConnection(options.connect_seconds, options.operation_seconds)
        self._is_leaving = False
        self.breaks = 0  # how often a request got no answer
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

    @property
    def address(self) -> Address:
        """Of the broker that has answered last, or else of the one that is tried next."""
        return self._plan.first

    def leave(self) -> None:
        """From now on, look for a broker once, and not for as long as it takes."""
        self._is_leaving = True

    def abort(self) -> None:
        """End at once, from whichever thread; a call that is under way fails. Takes no lock, and no time."""
        self._closed.set()
        self._http.abort()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._drop("")

    def ask(self, request: Request) -> Answer:
        """What the broker answers; Refused where that is no."""
        with self._lock:
            return self._exchange(request)

    @contextlib.contextmanager
    def stream(self, request: Request) -> Iterator[http.client.HTTPResponse]:
        """An answer that is read as it comes; Refused where that is no. Whoever leaves before its end breaks
        it off: the connection is closed with it. What breaks is raised as it is."""
        with self._lock:
            try:
                response = self._present().ask(request.method, request.target, request.body, request.headers)
                if response.status != http.client.OK:
                    media = response.headers.get("Content-Type", "")
                    answer_of(request, response.status, media, response.read())
                yield response
                self._plan.ended()  # by us: the next one need not pause
            finally:
                self._drop("")

    def _exchange(self, request: Request) -> Answer:
        tries_left = 2 if request.repeatable else 1
        answer_seconds = self._options.operation_seconds + request.wait_seconds
        until = 0.0  # a patient one is asked again
        why = ""
        while True:
            try:
                connection = self._present()
            except ConnectionLost as error:
                raise unreached(self._name, request, why, error) from None
            try:
                response = connection.ask(
                    request.method, request.target, request.body, request.headers, answer_seconds
                )
                body = response.read()
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, TimeoutError) and not request.patient:
                    self._drop("no answer in time")
                    raise timed_out(self._name, request, answer_seconds) from None
                gone = isinstance(error, http.client.RemoteDisconnected)
                why = CLOSED_BY_BROKER if gone else reason_of(error)
                if not self._known:
                    why += "; is this the right port?"
                if self._closed.is_set():
                    why = ""  # by us
                failure: ClientError = lost(self._name, request, why)
            except BaseException:
                # An answer that came now would be taken for that of the next call.
                self.breaks += 1
                self._drop("")
                raise
            else:
                self._known.add(self._name)
                if response.will_close and response.status != UNAVAILABLE:
                    self._plan.ended()
                media = response.headers.get("Content-Type", "")
                try:
                    return answer_of(request, response.status, media, body)
                except Refused as refusal:
                    if response.status != UNAVAILABLE or not request.patient:
                        raise
                    why, failure = refusal.detail, refusal
            self.breaks += 1
            self._drop(why)
            tries_left -= 1
            now = time.monotonic()
            until = until or now + self._plan.patience_seconds
            may_wait = request.patient and self._known and not self._is_leaving and now < until
            if tries_left <= 0 and not may_wait:
                raise failure from None

    # --- the connection ----------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return str(self._plan.target)

    def _present(self) -> HttpConnection:
        if self._http.is_open:
            return self._http
        self._drop("")  # the usual end of a connection that nobody has used for a while
        search = self._plan.search(time.monotonic(), first=not self._known)
        while True:
            if self._closed.wait(search.pause):
                raise ConnectionLost(f"{self._name}: this client is closed; make another one")
            address = search.address
            try:
                self._http.open(address, self._context)
            except OSError as error:
                search.failed(address, error, math.inf if self._is_leaving else time.monotonic())
                continue
            if self._closed.is_set():
                continue  # somebody has ended it meanwhile, and found nothing to end
            self._plan.connected(time.monotonic())
            return self._http

    def _drop(self, why: str) -> None:
        if self._http.close() and why:
            log.warning("%s: connection lost: %s", self._name, why)
