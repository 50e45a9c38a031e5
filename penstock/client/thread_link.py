"""A link for threads that block.

There is no thread in the background: bytes are read when somebody waits for something. One thread reads at a
time; whoever else waits is told by it. Writes are encoded and written under one lock.
"""

import threading
from collections.abc import Awaitable, Callable

from penstock.client.blocking import run
from penstock.client.core import CLOSED_BY_BROKER, Core
from penstock.client.errors import reason_of
from penstock.client.fork import begin_anew_after_fork
from penstock.client.link import INTERRUPTED, Link, T
from penstock.client.options import Options
from penstock.client.url import Target
from penstock.client.wire import Wire, dial
from penstock.common.address import Address
from penstock.protocols.errors import PeerViolation


class ThreadLink(Link[Wire, threading.Lock]):
    """The connection of a client for threads. A new one is connected."""

    def __init__(self, core: Core, target: Target, options: Options) -> None:
        super().__init__(core, target, options, threading.Lock(), threading.Lock())
        self._make_locks()
        begin_anew_after_fork(self)
        run(self.open())

    def _make_locks(self) -> None:
        self._writing = threading.Lock()
        self._news = threading.Condition(self._lock)  # somebody has read
        self._reading = False

    def forked(self) -> None:
        """This is a child: the connection is its parent's, as is what was sent over it."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.abandon()
        self._core.forked()
        self._lock = threading.Lock()
        self._dialing, self._proving = threading.Lock(), threading.Lock()
        self._make_locks()

    async def _dial(self, address: Address) -> Wire:
        wire = dial(address, self._context, self._options.connect_seconds)
        try:
            wire.write(self.touch(self._core.opened), self._options.operation_seconds)
        except BaseException:
            wire.abort()
            raise
        return wire

    async def _alone(self, turn: threading.Lock, call: Callable[[], Awaitable[T]]) -> T:
        # Not `async with`: between its steps an interrupt would leave the lock behind, taken for ever.
        with turn:
            return await call()

    def _start(self, wire: Wire) -> None:
        pass

    async def _pause(self, seconds: float) -> None:
        self._closed.wait(seconds)

    async def _put(
        self, wire: Wire, encode: Callable[[], bytes | None], sends: bool = False, own: bool = False
    ) -> bool:
        with self._writing:
            data = None
            try:
                data = self._encoded(wire, encode, sends, own)
                if data:
                    wire.write(data, self._options.operation_seconds)
            except OSError:
                raise
            except BaseException as error:
                # One who was interrupted may be in the middle of a message, which nothing can follow.
                if data is not None or not isinstance(error, Exception):
                    self._drop(wire, INTERRUPTED)
                raise
            return data is not None

    async def _hear(
        self, wire: Wire, happened: Callable[[], bool], seconds: float | None, *, own: bool = False
    ) -> bool:
        reads = False
        try:
            with self._lock:
                if happened():
                    return True
                if self._reading:
                    return self._news.wait(seconds)
                self._reading = reads = True
            return self._feed(wire, seconds, own)
        except BaseException:
            # Bytes of which the core has not heard, or not all, are missing in what it reads next.
            if reads and wire.has_read:
                self._drop(wire, INTERRUPTED)
            raise
        finally:
            if reads:
                self._reading = False
                with self._lock:
                    self._news.notify_all()

    def _feed(self, wire: Wire, seconds: float | None, own: bool) -> bool:
        try:
            data = wire.read(seconds)
            lost = CLOSED_BY_BROKER if data is not None and not data else ""
        except OSError as error:
            data, lost = None, reason_of(error)
        if lost:
            if own or not self._closed.is_set():  # else it is the business of `close`
                self._drop(wire, lost)
            return True
        if data is None:
            return False
        try:
            with self._lock:
                if wire is self._wire:  # else another thread has found it broken; its bytes are of no use
                    self._core.feed(data)
            wire.has_read = False  # by now it is told
        except PeerViolation as violation:
            self._drop(wire, str(violation))
            raise self._broken(violation) from violation
        return True
