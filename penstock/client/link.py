"""A link: a client's connection for threads that block, made again when it was lost.

It ties a core, which knows what to say, to a wire, which knows how to send it. The wires come and go; the
link and the core stay.

Rules that always hold:
  * A write is encoded and written under one lock, so that bytes leave in the order in which the core thought
    of them. The core itself is only touched under another, which nobody holds while waiting.
  * Before a write, a connection that the broker has closed is found out and replaced; bytes are not handed
    to a system that would throw them away, as far as that can be known.
  * One thread reads at a time; whoever else waits for something from the broker is told by it. Any thread
    may write, until `close` begins: from then on a send raises and an acknowledgement is refused.

How it fails: `ConnectionLost` and `TimedOut`, with what is in doubt; `NotSupported` passes through. A broker
that breaks the protocol is not connected to again by itself: it would do the same once more.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import NoReturn, Self, TypeVar

from penstock.client.core import CLOSED_BY_BROKER, WRONG_PORT, Core, chunks
from penstock.client.errors import ClientError, ConnectionLost, reason_of, tell_sent
from penstock.client.options import Options, tls_context
from penstock.client.plan import Plan
from penstock.client.url import Target
from penstock.client.wire import Wire, dial
from penstock.protocols.errors import PeerViolation

INTERRUPTED = "interrupted"

FAREWELL_SECONDS = 5.0
"""How long a broker may take to close. By then nothing is in doubt any more."""

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
        self._why = ""  # the last one was lost
        self._lock = threading.Lock()  # the core, and which wire is the present one
        self._news = threading.Condition(self._lock)  # somebody has read
        self._reading = False
        self._proving = threading.Lock()  # one question at a time
        self._writing = threading.Lock()
        self._dialing = threading.Lock()
        self._closed = threading.Event()
        self._connect()
        self._greet()

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
            if self._closed.is_set():
                raise self._is_closed()
            wire = self._living()
            if sends:
                with self._lock:
                    self._core.check()
            wire = wire or self._connect()
            with self._lock:
                # Else it is closed, or the reader has lost it, in this moment.
                if wire is self._wire and not self._closed.is_set():
                    return wire, encode()

    def send_many(self, bodies: Iterable[bytes], encode: Callable[[list[bytes]], bytes]) -> int:
        """Messages in as few writes as possible; how many they were. An error says how many went before."""
        sent = 0

        def encoded(chunk: list[bytes]) -> bytes:
            nonlocal sent
            data = encode(chunk)
            sent += len(chunk)
            return data

        try:
            for chunk in chunks(bodies):
                self.write(partial(encoded, chunk))
        except Exception as error:
            tell_sent(error, sent)
            raise
        return sent

    def write_if_open(self, encode: Callable[[], bytes | None]) -> bool:
        """The same over the connection that is there; False where there is none, or it is the wrong one."""
        with self._writing:
            wire = self._living()
            with self._lock:
                is_there = wire is not None and wire is self._wire and not self._closed.is_set()
                data = encode() if is_there else None
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
        """Until the broker says that everything is stored. Without receipts: does the connection stand?"""
        with self._proving:
            self._prove()

    def _greet(self) -> None:
        """Make sure that it is a broker, and speaks the protocol."""
        wire = self._asked(anyway=True)
        seconds = self._options.connect_seconds
        in_time = wire is None or self._await_answer(wire, seconds)
        with self._lock:
            if self._core.is_known:
                return
            why = self._why if in_time else f"it accepts, but says nothing within {seconds:g} s"
        if wire is not None:
            self._drop(wire, "")
        raise ConnectionLost(f"{self._name}: {WRONG_PORT} ({why})")

    def _prove(self) -> None:
        seconds = self._options.operation_seconds
        for _ in range(2):  # an answer may be open to somebody who was interrupted
            wire = self._asked()
            if wire is not None and not self._await_answer(wire, seconds):
                self._give_up(wire)
        with self._lock:
            self._core.check(verdicts=True)

    def _await_answer(self, wire: Wire, seconds: float) -> bool:
        """Until the question is answered, or the wire is gone; False: not in time."""
        deadline = time.monotonic() + seconds
        while self._owes_answer(wire):
            left = deadline - time.monotonic()
            if left <= 0 or not self._pump(wire, left, own=True):
                return False
        return True

    def _asked(self, *, anyway: bool = False) -> Wire | None:
        """Ask the broker what it has stored; the wire that its answer comes over, if one is needed."""
        with self._writing:
            wire = self._living()
            if wire is None:
                return None
            with self._lock:
                question = self._core.ask_proof(anyway=anyway) if wire is self._wire else None
            if question:
                with contextlib.suppress(OSError):  # the wire is dropped, and what is in doubt is told below
                    self._hand_over(wire, question)
            return None if question is None else wire

    def _owes_answer(self, wire: Wire) -> bool:
        with self._lock:
            return wire is self._wire and self._core.is_asking

    def _give_up(self, wire: Wire) -> NoReturn:
        why = f"the broker has not said within {self._options.operation_seconds:g} s what it has stored"
        self._drop(wire, why)
        with self._lock:
            raise self._core.timed_out(f"{self._name}: {why}; the connection was closed")

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
        came = wire is None or self._pump(wire, seconds)
        if self._closed.is_set():
            raise self._is_closed()
        return came

    def _pump(self, wire: Wire, seconds: float | None, *, own: bool = False) -> bool:
        """Read, or wait until another thread has read. `own`: for `flush` and `close`."""
        with self._news:
            if self._reading:
                return self._news.wait(seconds)
            self._reading = True
        try:
            return self._feed(wire, seconds, own)
        finally:
            with self._news:
                self._reading = False
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
        violation = None
        with self._lock:
            if wire is self._wire:  # else another thread has found it broken, and its bytes are of no use
                try:
                    self._core.feed(data)
                except PeerViolation as error:
                    violation = error
        if violation is not None:
            self._drop(wire, str(violation))
            with self._lock:
                raise self._core.broken(f"{self._name}: {WRONG_PORT} ({violation})") from violation
        return True

    # --- the connection ----------------------------------------------------------------------------

    def close(self) -> None:
        """Until the broker says that everything is stored, then end. ConnectionLost where it does not."""
        with self._lock:
            first = not self._closed.is_set()
            self._closed.set()  # wakes up one who holds the next lock and waits for a broker
        with self._proving:
            if not first:
                return
            with self._writing:
                """What was begun before is written."""
            try:
                self._prove()
            finally:
                self._end()
            with self._lock:
                self._core.check(verdicts=True)

    def _end(self) -> None:
        """Say farewell. Without receipts, that the broker does so too is the only proof that there is."""
        wire = self._living()
        if wire is None:
            return
        has_receipts = self._core.has_receipts
        seconds = self._options.operation_seconds
        try:
            wire.finish(min(seconds, FAREWELL_SECONDS) if has_receipts else seconds)
        except OSError as error:
            self._drop(wire, "" if has_receipts else reason_of(error))
        else:
            with self._lock:
                if not has_receipts:
                    self._core.proved()
            self._drop(wire, "")

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
            self._why = why
            told = self._core.lost(why)
        if why and why != INTERRUPTED:  # Who interrupts us knows it.
            log.warning("%s: connection lost: %s", self._name, told)

    def _connect(self) -> Wire:
        with self._dialing:
            wire = self._present()
            if wire is not None:
                return wire  # another thread was faster
            search = self._plan.search(time.monotonic(), first=not self._core.generation)
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
        """Wait until the broker says that everything that was sent and settled so far is stored.

        ConnectionLost or TimedOut where it does not, with what is in doubt; Undelivered where it has refused
        some. With `receipts=False`: only look whether the connection still stands.
        """
        self._link.flush()

    def close(self) -> None:
        """The same as `flush`, then end. What is not settled goes back to the queue."""
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
