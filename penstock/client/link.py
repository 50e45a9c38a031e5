"""A link: a client's connection for threads that block, made again when it was lost.

It ties a core, which knows what to say, to a wire, which knows how to send it. The wires come and go; the
link and the core stay.

Rules that always hold:
  * A write is encoded and written under one lock, so that bytes leave in the order in which the core thought
    of them. The core itself is only touched under another, which nobody holds while waiting.
  * Before a write, a connection that the broker has closed is found out and replaced; bytes are not handed
    to a system that would throw them away, as far as that can be known.
  * One thread reads. Any thread may write.

How it fails: `ConnectionLost` and `TimedOut`, with what is in doubt; `NotSupported` passes through. A broker
that breaks the protocol is not connected to again by itself: it would do the same once more.
"""

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from penstock.client.core import Core
from penstock.client.errors import ClientError, ConnectionLost, reason_of
from penstock.client.options import Options, tls_context
from penstock.client.plan import Plan
from penstock.client.url import Target
from penstock.client.wire import CLOSED_BY_BROKER, Wire, dial
from penstock.protocols.errors import PeerViolation

INTERRUPTED = "interrupted"

log = logging.getLogger("penstock.client")

T = TypeVar("T")


class Link:
    """See the module's docstring."""

    def __init__(self, core: Core, target: Target, options: Options) -> None:
        self._core = core
        self._options = options
        self._context = tls_context(target, options)
        self._plan = Plan(target, options)
        self._wire: Wire | None = None
        self._lock = threading.Lock()  # the core, and which wire is the present one
        self._writing = threading.Lock()
        self._dialing = threading.Lock()
        self._closed = threading.Event()
        self._connect(patient=False)

    # --- out ---------------------------------------------------------------------------------------

    def write(self, encode: Callable[[], bytes], *, sends: bool = True) -> None:
        """Write what `encode` asks the core for, over a connection that is there or made for it.

        Before anything is sent, what is in doubt is told. A consumer need not hear of it, and goes on.
        """
        with self._writing:
            wire, data = self._encoded(encode, sends)
            try:
                self._hand_over(wire, data)
            except OSError as error:
                with self._lock:
                    if isinstance(error, TimeoutError):
                        raise self._core.timed_out(
                            f"{self._name}: {error}; the connection was closed"
                        ) from None
                    if sends:
                        self._core.check()

    def _encoded(self, encode: Callable[[], bytes], sends: bool) -> tuple[Wire, bytes]:
        while True:
            wire = self._living()
            if sends:
                with self._lock:
                    self._core.check()
            wire = wire or self._connect()
            with self._lock:
                if wire is self._wire:  # else the reader has lost it in this moment
                    return wire, encode()

    def write_if_open(self, encode: Callable[[], bytes | None]) -> bool:
        """The same over the connection that is there; False where there is none, or it is the wrong one."""
        with self._writing:
            wire = self._living()
            with self._lock:
                data = encode() if wire is not None and wire is self._wire else None
            if wire is None or data is None:
                return False
            try:
                self._hand_over(wire, data)
            except OSError:
                return False
            return True

    def _hand_over(self, wire: Wire, data: bytes) -> None:
        try:
            wire.write(data, self._options.operation_seconds)
        except BaseException as error:
            # Also one who was interrupted may be in the middle of a message, which nothing can follow.
            self._drop(wire, reason_of(error) if isinstance(error, OSError) else INTERRUPTED)
            raise

    def flush(self) -> None:
        """Everything has been handed to the system already; find out whether the connection still stands."""
        with self._writing:
            self._living()
            with self._lock:
                self._core.check()

    def touch(self, look: Callable[[], T]) -> T:
        """Call something of the core, which nobody else touches meanwhile."""
        with self._lock:
            return look()

    # --- in ----------------------------------------------------------------------------------------

    def read(self, seconds: float | None) -> bool:
        """Feed the core with what comes next; False where nothing came in time.

        True also where there is no connection, or none any more: look at the core, and at `ensure`.
        """
        wire = self._present()
        if wire is None:
            return True
        try:
            data = wire.read(seconds)
            lost = CLOSED_BY_BROKER if data is not None and not data else ""
        except OSError as error:
            data, lost = None, reason_of(error)
        if self._closed.is_set():
            raise self._is_closed()  # the end of the connection is the business of `close`
        if lost:
            self._drop(wire, lost)
            return True
        if data is None:
            return False
        violation = None
        with self._lock:
            if wire is self._wire:  # else another thread has found it broken, and its bytes are of no use
                try:
                    self._core.feed(data)
                except PeerViolation as error:
                    violation = error
        if violation is not None:
            self._drop(wire, str(violation))
            raise ConnectionLost(
                f"{self._name}: the broker broke the protocol ({violation}); is this the right port?"
            ) from violation
        return True

    # --- the connection ----------------------------------------------------------------------------

    def close(self) -> None:
        """Wait until the broker has read everything, then end. ConnectionLost where that is not certain."""
        with self._writing:
            if self._closed.is_set():
                return
            self._closed.set()
            wire = self._living()
            if wire is not None:
                try:
                    wire.finish(self._options.operation_seconds)
                except OSError as error:
                    self._drop(wire, reason_of(error))
                else:
                    with self._lock:
                        self._core.proved()
                    self._drop(wire, "")
            with self._lock:
                self._core.check()

    def notice(self) -> None:
        """Find out whether the broker has closed the connection in the meantime."""
        self._living()

    def ensure(self) -> None:
        """Connect, unless there is a connection as far as anybody has looked."""
        self._present() or self._connect()

    @property
    def _name(self) -> str:
        return str(self._plan.target)

    def _present(self) -> Wire | None:
        with self._lock:
            return self._wire

    def _living(self) -> Wire | None:
        """The wire, unless the broker has closed it in the meantime."""
        wire = self._present()
        if wire is not None and wire.is_gone:
            self._drop(wire, CLOSED_BY_BROKER)
            return None
        return wire

    def _drop(self, wire: Wire, why: str) -> None:
        wire.close()
        with self._lock:
            if self._wire is not wire:
                return
            self._wire = None
            self._core.lost(why)
        if why and why != INTERRUPTED:  # Who interrupts us knows it.
            log.warning("%s: connection lost: %s", self._name, why)

    def _connect(self, *, patient: bool = True) -> Wire:
        with self._dialing:
            wire = self._present()
            if wire is not None:
                return wire  # another thread was faster
            search = self._plan.search(time.monotonic(), patient=patient)
            while True:
                if self._closed.wait(search.pause):
                    raise self._is_closed()
                address = search.address
                try:
                    wire = dial(address, self._context, self._options.connect_seconds)
                    self._begin(wire)
                except OSError as error:
                    search.failed(address, error, time.monotonic())
                    continue
                self._plan.connected(time.monotonic())
                with self._lock:
                    self._wire = wire
                return wire

    def _begin(self, wire: Wire) -> None:
        """What stands at the beginning of a connection is written before anybody else can use it."""
        try:
            with self._lock:
                first = self._core.opened()
            wire.write(first, self._options.operation_seconds)
        except BaseException:
            wire.close()
            raise

    def _is_closed(self) -> ConnectionLost:
        return ConnectionLost(f"{self._name}: this client is closed; make another one")


class LinkedClient:
    """What the clients over a link have in common. A context manager: leaving it closes it."""

    _link: Link

    def flush(self) -> None:
        """Raise ConnectionLost where the connection is gone and messages sent on it are in doubt.

        There is nothing else to do: when a send returns, the system has taken its bytes.
        """
        self._link.flush()

    def close(self) -> None:
        """Wait until the broker has read everything that was sent, then end.

        ConnectionLost where that cannot be known. What is not settled goes back to the queue.
        """
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except ClientError as doubt:
            if error is None:
                raise
            log.warning("%s", doubt)  # the error that is under way says more
