"""A link: a client's connection, made again when it was lost. One source for threads and for asyncio.

It ties a core, which knows what to say, to a wire, which knows how to send it. The wires come and go; the
link and the core stay. `ThreadLink` and `AsyncLink` say how one waits; see also `blocking.py`.

Rules that always hold:
  * Bytes leave in the order in which the core thought of them. The core is only touched under one lock, which
    nobody holds while waiting.
  * Before a write, a connection that the broker has closed is found out and replaced; bytes are not handed
    to a system that would throw them away, as far as that can be known.
  * Any thread or task may write, until `close` begins: from then on a send raises and an acknowledgement is
    refused.
  * Whoever waits for something has looked for it in the same moment: nothing comes unseen in between.

How it fails: `ConnectionLost` and `TimedOut`, with what is in doubt; `NotSupported` passes through. A broker
that breaks the protocol is not connected to again by itself: it would do the same once more.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Final, Generic, NoReturn, Protocol, Self, TypeVar

from penstock.client.blocking import Latch, blocking
from penstock.client.core import CLOSED_BY_BROKER, WRONG_PORT, Core, chunks
from penstock.client.errors import ClientError, ConnectionLost, reason_of, tell_sent
from penstock.client.managed import AsyncManaged
from penstock.client.options import Options, tls_context
from penstock.client.plan import Plan
from penstock.client.url import Target
from penstock.common.address import Address
from penstock.protocols.errors import PeerViolation

INTERRUPTED: Final = "interrupted"

FAREWELL_SECONDS: Final = 5.0
"""How long a broker may take to close. By then nothing is in doubt any more."""

log = logging.getLogger("penstock.client")

T = TypeVar("T")


class AnyWire(Protocol):
    """What both kinds of wires can do."""

    @property
    def is_gone(self) -> bool: ...
    async def flush(self, seconds: float) -> bool: ...
    async def finish(self, seconds: float) -> None: ...
    def abort(self) -> None: ...


W = TypeVar("W", bound=AnyWire)
L = TypeVar("L")


class Link(ABC, Generic[W, L]):
    def __init__(self, core: Core, target: Target, options: Options, dialing: L, proving: L) -> None:
        self._core = core
        self._options = options
        self._context = tls_context(target, options)
        self._plan = Plan(target, options)
        self._wire: W | None = None
        self._why = ""  # the last one was lost
        self._lock = threading.Lock()  # the core, and which wire is the present one
        self._dialing = dialing
        self._proving = proving  # one question at a time
        self._closed = Latch()

    # --- how one waits: with threads, or on a loop ---------------------------------------------------

    @abstractmethod
    async def _dial(self, address: Address) -> W:
        """A new wire, with what stands at the beginning of a connection written."""

    @abstractmethod
    async def _alone(self, turn: L, call: Callable[[], Awaitable[T]]) -> T:
        """Call it while nobody else has that turn, which an interrupt gives back wherever it comes."""

    @abstractmethod
    def _start(self, wire: W) -> None:
        """It is the present one."""

    @abstractmethod
    async def _pause(self, seconds: float) -> None:
        """Before another try."""

    @abstractmethod
    async def _put(
        self, wire: W, encode: Callable[[], bytes | None], sends: bool = False, own: bool = False
    ) -> bool:
        """Write what is `_encoded`, and nothing in between; False where there is nothing. Else OSError."""

    @abstractmethod
    async def _hear(
        self, wire: W, happened: Callable[[], bool], seconds: float | None, *, own: bool = False
    ) -> bool:
        """Until the core has been told something, if that has not `happened`; False: nothing in time."""

    def _tell(self) -> None:
        """The core may have learnt something."""

    # --- out -----------------------------------------------------------------------------------------

    async def open(self) -> None:
        """The first connection. Make sure that it is to a broker, which speaks the protocol."""
        await self._connect()
        wire = await self._asked(anyway=True)
        seconds = self._options.connect_seconds
        try:
            in_time = wire is None or await self._await_answer(wire, seconds)
        finally:
            if wire is not None and not self._core.is_known:
                self._drop(wire, "")  # also where nobody waits any more, and so nobody would close it
        if self._core.is_known:
            return
        why = self._why if in_time else f"it accepts, but says nothing within {seconds:g} s"
        raise ConnectionLost(f"{self._name}: {WRONG_PORT} ({why})")

    async def write(self, encode: Callable[[], bytes], *, sends: bool = True) -> None:
        """Write what `encode` asks the core for, over a connection that is there or made for it.

        Before anything is sent, what is in doubt is told. A consumer need not hear of it, and goes on.
        """
        while True:
            wire = self._living()
            if wire is None:
                if sends:
                    self._check()
                wire = await self._connect()
            try:
                if await self._put(wire, encode, sends):
                    return
            except TimeoutError as error:
                self._give_up(wire, str(error))
            except OSError as error:
                self._drop(wire, reason_of(error))
                if sends:
                    self._check()
                return
            if self._closed.is_set():
                raise self._is_closed()

    async def send_many(self, bodies: Iterable[bytes], encode: Callable[[list[bytes]], bytes]) -> int:
        """Messages in as few writes as possible; how many they were. An error says how many went before."""
        sent = 0

        def encoded(chunk: list[bytes]) -> bytes:
            nonlocal sent
            data = encode(chunk)
            sent += len(chunk)
            return data

        try:
            for chunk in chunks(bodies):
                await self.write(partial(encoded, chunk))
        except Exception as error:
            tell_sent(error, sent)
            raise
        return sent

    async def write_if_open(self, encode: Callable[[], bytes | None]) -> bool:
        """The same over the connection that is there; False where there is none, or it is the wrong one."""
        wire = self._living()
        if wire is None:
            return False
        try:
            return await self._put(wire, encode)
        except OSError as error:
            self._drop(wire, reason_of(error))
            return False

    def _encoded(self, wire: W, encode: Callable[[], bytes | None], sends: bool, own: bool) -> bytes | None:
        """What to write; None where it is closed, or lost, in this moment. `own`: for `flush` and `close`."""
        with self._lock:
            if wire is not self._wire or (self._closed.is_set() and not own):
                return None
            if sends:
                self._core.check()
            return encode()

    async def flush(self) -> None:
        """Until the broker says that everything is stored. Without receipts: until the system has it."""
        await self._alone(self._proving, self._prove)

    async def _prove(self) -> None:
        seconds = self._options.operation_seconds
        for _ in range(2):  # an answer may be open to somebody who was interrupted
            wire = await self._asked()
            if wire is not None and not await self._await_answer(wire, seconds):
                self._give_up(wire, f"the broker has not said within {seconds:g} s what it has stored")
        wire = self._wire
        if wire is not None and not self._core.has_receipts and not await wire.flush(seconds):
            self._give_up(wire, taken_nothing(seconds))
        self._check(verdicts=True)

    async def _asked(self, *, anyway: bool = False) -> W | None:
        """Ask the broker what it has stored; the wire that its answer comes over, if one is needed."""
        wire = self._living()
        if wire is None:
            return None
        try:
            is_put = await self._put(wire, partial(self._core.ask_proof, anyway=anyway), own=True)
        except OSError as error:
            self._drop(wire, reason_of(error))  # what is in doubt is told later
            return None
        return wire if is_put else None

    async def _await_answer(self, wire: W, seconds: float) -> bool:
        """Until the question is answered, or the wire is gone; False: not in time."""
        deadline = time.monotonic() + seconds

        def happened() -> bool:
            return wire is not self._wire or not self._core.is_asking

        while not self.touch(happened):
            left = deadline - time.monotonic()
            if left <= 0 or not await self._hear(wire, happened, left, own=True):
                return False
        return True

    def touch(self, look: Callable[[], T]) -> T:
        """Call something of the core, which nobody else touches meanwhile."""
        with self._lock:
            return look()

    # --- in ------------------------------------------------------------------------------------------

    async def read(self, happened: Callable[[], bool], seconds: float | None) -> bool:
        """Until the core has been told something, if that has not `happened`; False: nothing in time.

        True also where there is no connection, or none any more: look at the core, and at `ensure`.
        """
        wire = self._wire
        came = wire is None or await self._hear(wire, happened, seconds)
        if self._closed.is_set():
            raise self._is_closed()
        return came

    # --- the connection ------------------------------------------------------------------------------

    async def close(self) -> None:
        """Until the broker says that everything is stored, then end. ConnectionLost where it does not."""
        with self._lock:
            self._closed.set()
        await self._alone(self._proving, self._close)

    async def _close(self) -> None:
        """Once more, where it was interrupted; else there is nothing left to do, or to tell."""
        try:
            await self._prove()
        finally:
            await self._end()
        self._check(verdicts=True)

    async def _end(self) -> None:
        """Say farewell. Without receipts, that the broker does so too is the only proof that there is."""
        wire = self._living()
        if wire is None:
            return
        has_receipts = self._core.has_receipts
        seconds = self._options.operation_seconds
        why = INTERRUPTED
        try:
            await wire.finish(min(seconds, FAREWELL_SECONDS) if has_receipts else seconds)
            why = ""
            if not has_receipts:
                self.touch(self._core.proved)
        except OSError as error:
            why = "" if has_receipts else reason_of(error)
        finally:
            self._drop(wire, why)

    def notice(self) -> None:
        """Find out whether the broker has closed the connection in the meantime."""
        self._living()

    async def ensure(self) -> None:
        """Connect, unless there is a connection as far as anybody has looked."""
        if self._wire is None:
            await self._connect()

    @property
    def _name(self) -> str:
        return str(self._plan.target)

    def _check(self, *, verdicts: bool = False) -> None:
        with self._lock:
            self._core.check(verdicts=verdicts)

    def _living(self) -> W | None:
        """The wire, unless the broker has closed it in the meantime."""
        wire = self._wire
        if wire is not None and wire.is_gone:
            self._drop(wire, CLOSED_BY_BROKER)
            return None
        return wire

    def _drop(self, wire: W, why: str) -> None:
        with self._lock:
            if self._wire is not wire:
                return
            self._wire = None
            self._why = why
            told = self._core.lost(why)
        wire.abort()
        if why and why != INTERRUPTED:  # Who interrupts us knows it.
            log.warning("%s: connection lost: %s", self._name, told)
        self._tell()

    def _give_up(self, wire: W, why: str) -> NoReturn:
        self._drop(wire, why)
        with self._lock:
            raise self._core.timed_out(f"{self._name}: {why}; the connection was closed")

    def _broken(self, violation: PeerViolation) -> ConnectionLost:
        with self._lock:
            return self._core.broken(f"{self._name}: {WRONG_PORT} ({violation})")

    def _is_closed(self) -> ConnectionLost:
        return ConnectionLost(f"{self._name}: this client is closed; make another one")

    async def _connect(self) -> W:
        return await self._alone(self._dialing, self._look_for_broker)

    async def _look_for_broker(self) -> W:
        wire = self._wire
        if wire is not None:
            return wire  # another one was faster
        search = self._plan.search(time.monotonic(), first=not self._core.generation)
        while True:
            await self._pause(search.pause)
            if self._closed.is_set():
                raise self._is_closed()
            address = search.address
            try:
                wire = await self._dial(address)
            except OSError as error:
                search.failed(address, error, time.monotonic())
                continue
            self._plan.connected(time.monotonic())
            with self._lock:
                self._wire = wire
            self._start(wire)
            if self._closed.is_set():  # meanwhile, and `close` has found no wire that it could end
                self._drop(wire, "")
                raise self._is_closed()
            return wire


MakeLink = Callable[[Core, Target, Options], Link[Any, Any]]


def taken_nothing(seconds: float) -> str:
    return f"the broker has taken nothing for {seconds:g} s"


class AsyncLinkedClient(AsyncManaged):
    """What the asyncio clients over a link have in common."""

    _link: Link[Any, Any]

    async def flush(self) -> None:
        """Wait until the broker says that everything that was sent and settled so far is stored.

        ConnectionLost or TimedOut where it does not, with what is in doubt; Undelivered where it has refused
        some. With `receipts=False`: only until the system has taken everything.
        """
        await self._link.flush()

    async def close(self) -> None:
        """The same as `flush`, then end. What is not settled goes back to the queue."""
        await self._link.close()

    async def _open(self) -> Self:
        await self._link.open()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            await self._link.close()
        except ClientError as doubt:
            if error is None:
                raise
            log.warning("%s", doubt)  # the error that is under way says more


class LinkedClient:
    """What the clients for threads over a link have in common. A context manager: leaving it closes it."""

    flush = blocking(AsyncLinkedClient.flush)
    close = blocking(AsyncLinkedClient.close)

    def __enter__(self) -> Self:
        return self

    __exit__ = blocking(AsyncLinkedClient.__aexit__)
