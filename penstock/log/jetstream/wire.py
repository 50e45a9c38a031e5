"""One connection to one NATS server: the socket, the handshake, and the pings that show it is alive.

A `Wire` lives from a connection's beginning to its end; who makes the next one is `link.py`. Received bytes
land in a buffer that all wires of a thread share and are events before the next byte is read.

The handshake: the server says INFO; TLS begins, if either side wants it; we say CONNECT and PING; PONG means
that we are in, -ERR why we are not.

Rules that always hold:
  * `lost` is set exactly once, with a sentence that names the server, whatever ends the connection.
  * A server that says nothing for two intervals of pings is gone: what was sent to it may be lost.
  * What is written to a wire that is lost goes nowhere, without an error: `lost` has said so.

How it fails: `LinkError` out of `shake_hands`; after that only through `lost`.
"""

import asyncio
import errno
import os
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from penstock import __version__
from penstock.log.jetstream.credentials import Credentials
from penstock.log.jetstream.errors import LinkError
from penstock.log.jetstream.servers import Server
from penstock.protocols import nats_write
from penstock.protocols.errors import PeerViolation
from penstock.protocols.nats import (
    FRAME_BYTES_MAX,
    Event,
    Info,
    Messages,
    Okay,
    Ping,
    Pong,
    Reader,
    Refused,
    Status,
)

RECEIVE_BYTES = 256 * 1024


class _Received(threading.local):
    """Loops of other threads receive at the same moment: each has a buffer of its own."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(RECEIVE_BYTES))


_received = _Received()

REFUSALS = (
    "authorization violation",
    "authentication expired",
    "authentication timeout",
    "authentication revoked",
    "account authentication expired",
)
"""What a server says, among other words, when it does not take our credentials."""


@dataclass(frozen=True, slots=True)
class WireOptions:
    """How we connect; the same for all servers."""

    name: str = "penstock"  # what the server's lists call us
    credentials: Credentials = field(default_factory=Credentials)
    tls: ssl.SSLContext | None = None  # None: what the system trusts
    tls_first: bool = False  # the server begins with TLS, before INFO
    connect_seconds: float = 5.0  # for one server, from the socket to PONG
    ping_seconds: float = 2.0
    buffer_bytes: int = 4 << 20  # what may wait to be written before `full` is said
    frame_bytes_max: int = FRAME_BYTES_MAX


class Subscriber(Protocol):
    """Who gets the messages of a subscription.

    It may raise `PeerViolation`, which ends the connection; anything else is a fault of ours, and does too.
    """

    def messages(self, batch: Messages) -> None: ...

    def status(self, status: Status) -> None: ...


class Owner(Protocol):
    """What a wire asks of its link."""

    subscribers: dict[int, Subscriber]

    def informed(self, wire: "Wire", said: Mapping[str, Any]) -> None: ...

    def refused(self, wire: "Wire", text: str) -> None: ...

    def full(self, full: bool) -> None: ...


class Wire(asyncio.BufferedProtocol):
    """One connection."""

    def __init__(self, owner: Owner, server: Server, options: WireOptions) -> None:
        loop = asyncio.get_running_loop()
        self.server = server
        self.info: dict[str, Any] = {}
        self.lost: asyncio.Future[str] = loop.create_future()
        self._loop = loop
        self._owner = owner
        self._options = options
        self._buffer = _received.buffer
        self._reader = Reader(frame_bytes_max=options.frame_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._greeting: asyncio.Future[None] = loop.create_future()  # INFO came
        self._welcome: asyncio.Future[None] = loop.create_future()  # PONG came, or -ERR
        self._heard = False  # since the last ping
        self._pings: asyncio.TimerHandle | None = None
        self._reason = ""  # why we ended it
        self._said = ""  # the last no of the server, which may be why it does
        self._actions: dict[type[Any], Callable[[Any], None]] = {
            Messages: self._on_messages,
            Status: self._on_status,
            Info: self._on_info,
            Ping: self._on_ping,
            Pong: self._on_pong,
            Okay: self._on_nothing,
            Refused: self._on_refused,
        }

    # --- the handshake ---------------------------------------------------------------------------

    @classmethod
    async def connect(cls, owner: Owner, server: Server, options: WireOptions) -> "Wire":
        """A wire that the server has welcomed."""
        wire = cls(owner, server, options)
        try:
            async with asyncio.timeout(options.connect_seconds):
                await wire._shake_hands()
        except TimeoutError:
            wire.drop("")
            raise LinkError(
                f"NATS server {server}: did not welcome us within {options.connect_seconds:g} s; "
                "is it a NATS server, and not overloaded?"
            ) from None
        except ssl.SSLError as error:
            wire.drop("")
            raise LinkError(
                f"NATS server {server}: no TLS with it ({error}); check its certificate"
            ) from None
        except OSError as error:
            wire.drop("")
            # Event loops have words of their own for it; the system's are known to those who look them up.
            reason = os.strerror(error.errno or 0) if error.errno in errno.errorcode else str(error)
            raise LinkError(f"NATS server {server}: cannot be reached ({reason}); is it running?") from None
        except BaseException:
            wire.drop("")
            raise
        return wire

    async def _shake_hands(self) -> None:
        server, options = self.server, self._options
        name = server.tls_name or server.host
        transport, _ = await self._loop.create_connection(
            lambda: self,
            server.host,
            server.port,
            ssl=self._tls() if options.tls_first else None,
            server_hostname=name if options.tls_first else None,
        )
        self._transport = transport
        await self._greeting
        wants_tls = server.tls or options.tls is not None
        if not options.tls_first and (wants_tls or self.info.get("tls_required")):
            if not (self.info.get("tls_required") or self.info.get("tls_available")):
                raise LinkError(
                    f"NATS server {server}: does not offer TLS, which is asked for; set it up there"
                )
            upgraded = await self._loop.start_tls(transport, self, self._tls(), server_hostname=name)
            self._transport = cast(asyncio.Transport, upgraded)
        self._transport.set_write_buffer_limits(high=options.buffer_bytes)
        self._transport.write(self._hello() + nats_write.PING)
        await self._welcome
        self._pings = self._loop.call_later(options.ping_seconds, self._ping)

    def _tls(self) -> ssl.SSLContext:
        return self._options.tls or ssl.create_default_context()

    def _hello(self) -> bytes:
        credentials = self._options.credentials
        if self.server.user:
            credentials = Credentials(user=self.server.user, password=self.server.password)
        return nats_write.connect(
            {
                "verbose": False,
                "pedantic": False,
                "name": self._options.name,
                "lang": "python",
                "version": __version__,
                "protocol": 1,
                "headers": True,
                "no_responders": True,
                "tls_required": self.server.tls,
                **credentials.answer(str(self.info.get("nonce", ""))),
            }
        )

    # --- the socket ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = True
        try:
            events = self._reader.feed(self._buffer[:nbytes])
        except PeerViolation as violation:
            self._act(self._reader.salvage())
            self.drop(f"broke the protocol: {violation}")
        else:
            self._act(events)

    def _act(self, events: list[Event]) -> None:
        actions: Mapping[type[Event], Callable[[Any], None]] = self._actions
        try:
            for event in events:
                actions[type(event)](event)
        except PeerViolation as violation:  # what a message says inside is the server's word too
            self.drop(f"broke the protocol: {violation}")

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        if self._pings is not None:
            self._pings.cancel()
        self._transport = None
        reason = self._reason or (str(error) if error is not None else f"closed the connection{self._said}")
        for future in (self._greeting, self._welcome):
            if not future.done():
                future.set_exception(LinkError(f"NATS server {self.server}: {reason}"))
                future.exception()  # nobody may be waiting for it any more
        if not self.lost.done():
            self.lost.set_result(f"NATS server {self.server}: {reason}")

    def pause_writing(self) -> None:
        self._owner.full(True)

    def resume_writing(self) -> None:
        self._owner.full(False)

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    @property
    def waiting_bytes(self) -> int:
        """What is not yet in the kernel's hands."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def drop(self, reason: str) -> None:
        """Ends the connection at once; what waits to be written is lost."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()
        elif not self.lost.done():
            self.lost.set_result(f"NATS server {self.server}: {reason}")

    def close(self, reason: str) -> None:
        """Ends the connection once everything is written."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.close()

    # --- what the server says --------------------------------------------------------------------

    def _on_messages(self, batch: Messages) -> None:
        subscriber = self._owner.subscribers.get(batch.sid)
        if subscriber is not None:
            subscriber.messages(batch)

    def _on_status(self, status: Status) -> None:
        subscriber = self._owner.subscribers.get(status.sid)
        if subscriber is not None:
            subscriber.status(status)

    def _on_info(self, event: Info) -> None:
        self.info = event.said
        if not self._greeting.done():
            self._greeting.set_result(None)
        self._owner.informed(self, event.said)

    def _on_ping(self, event: Ping) -> None:
        self.write(nats_write.PONG)

    def _on_pong(self, event: Pong) -> None:
        if not self._welcome.done():
            self._welcome.set_result(None)

    def _on_nothing(self, event: Okay) -> None:
        pass

    def _on_refused(self, event: Refused) -> None:
        if self._welcome.done():
            self._said = f", having said {event.text!r}"
            self._owner.refused(self, event.text)
            return
        refused = any(words in event.text.lower() for words in REFUSALS)
        now = "; check user, password, token or credentials" if refused else ""
        self._welcome.set_exception(
            LinkError(f"NATS server {self.server}: says {event.text!r}{now}", refused=refused)
        )

    def _ping(self) -> None:
        if not self._heard:
            seconds = self._options.ping_seconds
            self.drop(f"has said nothing for {2 * seconds:g} s")
            return
        self._heard = False
        self.write(nats_write.PING)
        self._pings = self._loop.call_later(self._options.ping_seconds, self._ping)
