"""A link: a client's asyncio connection, made again when it was lost.

It ties a core, which knows what to say, to a wire, which knows how to send it. The wires come and go; the
link and the core stay. Everything happens on one loop, and nothing between two awaits is interrupted, so
that the core needs no lock. Many tasks may use a link at once, until `close` begins: from then on a send
raises and an acknowledgement is refused.

How it fails: `ConnectionLost` and `TimedOut`, with what is in doubt; `NotSupported` passes through. A broker
that breaks the protocol is not connected to again by itself: it would do the same once more.
"""

import asyncio
from collections.abc import Callable, Generator, Iterable
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self

from penstock.client.async_wire import AsyncWire, dial
from penstock.client.core import CLOSED_BY_BROKER, WRONG_PORT, Core, chunks
from penstock.client.errors import ClientError, ConnectionLost, reason_of, tell_sent
from penstock.client.link import FAREWELL_SECONDS, log
from penstock.client.options import Options, tls_context
from penstock.client.plan import Plan
from penstock.client.url import Target
from penstock.protocols.errors import PeerViolation


class AsyncLink:
    """See the module's docstring."""

    def __init__(self, core: Core, target: Target, options: Options) -> None:
        self._core = core
        self._options = options
        self._context = tls_context(target, options)
        self._plan = Plan(target, options)
        self._wire: AsyncWire | None = None
        self._why = ""  # the last one was lost
        self._dialing = asyncio.Lock()
        self._proving = asyncio.Lock()  # one question at a time
        self._news = asyncio.Event()  # set, and replaced, with everything that the core may have learnt
        self._violation: PeerViolation | None = None
        self._closed = False

    async def open(self) -> None:
        """The first connection. Make sure that it is to a broker, which speaks the protocol."""
        await self._connect()
        wire = self._asked(anyway=True)
        seconds = self._options.connect_seconds
        in_time = wire is None or await self._await_answer(wire, seconds)
        if not self._core.is_known:
            why = self._why if in_time else f"it accepts, but says nothing within {seconds:g} s"
            if wire is not None:
                self._drop(wire, "")
            raise ConnectionLost(f"{self._name}: {WRONG_PORT} ({why})")

    # --- out -----------------------------------------------------------------------------------------

    async def write(self, encode: Callable[[], bytes], *, sends: bool = True) -> None:
        """Write what `encode` asks the core for, over a connection that is there or made for it.

        Before anything is sent, what is in doubt is told. A consumer need not hear of it, and goes on.
        """
        self.notice()
        if sends:
            self._core.check()
        wire = await self._present()
        if self._closed:
            raise self._is_closed()
        wire.write(encode())
        self._check_taken(wire, await wire.drain(self._options.operation_seconds))
        if sends:
            self._core.check()

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
        self.notice()
        wire = self._wire
        data = None if wire is None or self._closed else encode()
        if wire is None or data is None:
            return False
        wire.write(data)
        self._check_taken(wire, await wire.drain(self._options.operation_seconds))
        return wire.is_open

    async def flush(self) -> None:
        """Until the broker says that everything is stored. Without receipts: until the system has it."""
        async with self._proving:
            await self._prove()

    async def _prove(self) -> None:
        seconds = self._options.operation_seconds
        for _ in range(2):  # an answer may be open to somebody who was cancelled
            wire = self._asked()
            if wire is not None and not await self._await_answer(wire, seconds):
                self._give_up(wire, f"the broker has not said within {seconds:g} s what it has stored")
        if self._wire is not None and not self._core.has_receipts:
            self._check_taken(self._wire, await self._wire.flush(seconds))
        self._core.check(verdicts=True)

    def _asked(self, *, anyway: bool = False) -> AsyncWire | None:
        """Ask the broker what it has stored; the wire that its answer comes over, if one is needed."""
        self.notice()
        wire = self._wire
        question = self._core.ask_proof(anyway=anyway) if wire is not None else None
        if wire is None or question is None:
            return None
        wire.write(question)
        return wire

    async def _await_answer(self, wire: AsyncWire, seconds: float) -> bool:
        """Until the question is answered, or the wire is gone; False: not in time."""
        deadline = asyncio.get_running_loop().time() + seconds
        while wire is self._wire and self._core.is_asking:
            if not await self.news(deadline - asyncio.get_running_loop().time()):
                return False
        return True

    # --- in ------------------------------------------------------------------------------------------

    def notice(self) -> None:
        """Find out whether the broker has closed the connection in the meantime."""
        if self._wire is not None and self._wire.is_gone:
            self._drop(self._wire, CLOSED_BY_BROKER)

    async def ensure(self) -> None:
        """Connect, unless there is a connection."""
        await self._present()

    async def news(self, seconds: float | None) -> bool:
        """Until the core may have learnt something; False where it has not in time."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return False
        if self._violation is not None:
            violation, self._violation = self._violation, None
            raise self._core.broken(f"{self._name}: {WRONG_PORT} ({violation})") from violation
        return True

    # --- the connection ------------------------------------------------------------------------------

    async def close(self) -> None:
        """Until the broker says that everything is stored, then end. ConnectionLost where it does not."""
        first, self._closed = not self._closed, True
        async with self._proving:
            if not first:
                return
            try:
                await self._prove()
            finally:
                await self._end()
            self._core.check(verdicts=True)

    async def _end(self) -> None:
        """Say farewell. Without receipts, that the broker does so too is the only proof that there is."""
        self.notice()
        wire = self._wire
        if wire is None:
            return
        has_receipts = self._core.has_receipts
        seconds = self._options.operation_seconds
        try:
            await wire.finish(min(seconds, FAREWELL_SECONDS) if has_receipts else seconds)
        except OSError as error:
            self._drop(wire, "" if has_receipts else reason_of(error))
        else:
            if not has_receipts:
                self._core.proved()
            self._drop(wire, "")

    @property
    def _name(self) -> str:
        return str(self._plan.target)

    def _check_taken(self, wire: AsyncWire, in_time: bool) -> None:
        """A broker that takes no bytes any more is as good as gone."""
        if not in_time:
            self._give_up(wire, f"the broker has taken nothing for {self._options.operation_seconds:g} s")

    def _give_up(self, wire: AsyncWire, why: str) -> NoReturn:
        self._drop(wire, why)
        raise self._core.timed_out(f"{self._name}: {why}; the connection was closed")

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _received(self, wire: AsyncWire, data: bytes) -> None:
        try:
            self._core.feed(data)
        except PeerViolation as violation:
            self._violation = violation
            self._drop(wire, str(violation))
        self._tell()

    def _drop(self, wire: AsyncWire, why: str) -> None:
        if self._wire is not wire:
            return
        self._wire = None
        self._why = why
        wire.abort()
        told = self._core.lost(why)
        if why:
            log.warning("%s: connection lost: %s", self._name, told)
        self._tell()

    def _is_closed(self) -> ConnectionLost:
        return ConnectionLost(f"{self._name}: this client is closed; make another one")

    async def _present(self) -> AsyncWire:
        while self._wire is None:  # a new one may be lost in the moment in which it was made
            await self._connect()
        return self._wire

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        async with self._dialing:
            if self._wire is not None:
                return  # another task was faster
            search = self._plan.search(loop.time(), first=not self._core.generation)
            while True:
                await asyncio.sleep(search.pause)
                if self._closed:
                    raise self._is_closed()
                address = search.address
                try:
                    wire = await dial(address, self._context, self._options.connect_seconds)
                except OSError as error:
                    search.failed(address, error, loop.time())
                    continue
                self._plan.connected(loop.time())
                self._wire = wire
                wire.write(self._core.opened())
                wire.start(partial(self._received, wire), partial(self._drop, wire))
                return


class AsyncLinkedClient:
    """What the asyncio clients over a link have in common.

    A new one is not connected yet: `await` it, or enter it with `async with`, which also closes it.
    """

    _link: AsyncLink

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

    def __await__(self) -> Generator[Any, None, Self]:
        return self._open().__await__()

    async def __aenter__(self) -> Self:
        return await self._open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except ClientError as doubt:
            if error is None:
                raise
            log.warning("%s", doubt)  # the error that is under way says more
