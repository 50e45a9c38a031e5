"""The transport below nats-py's client: one connection's socket, with somebody who watches whether it lives.

nats-py asks a transport to read, write and close. Its own one closes when everything is written, and nats-py
waits for that: a server that is paused and does not read keeps it waiting until it is resumed. And it goes on
without TLS where a server does not ask for it, whatever the settings say.

Rules that always hold:
  * `ended` is called when the connection is over, with the reason, whoever ended it; the first one counts.
  * A server that says nothing for two intervals of pings is gone. Any byte counts as an answer.
  * Closing waits for nothing.
  * Where TLS is wanted, nothing but the server's greeting goes without it.
  * At most about `READ_BYTES_MAX` wait to be read; then the socket is not read any further.

How it fails: `LinkError` where the greeting is not one of a NATS server, or does not offer the TLS we want.
"""

import asyncio
import errno
import json
import ssl
from collections.abc import Callable
from typing import Any, Final, cast
from urllib.parse import ParseResult

from nats.aio.transport import Transport

from penstock.log.jetstream.errors import LinkError
from penstock.log.jetstream.options import LinkOptions
from penstock.log.jetstream.servers import Server

READ_BYTES_MAX: Final = 1 << 20
LINE_BYTES_MAX: Final = 1 << 20
"""The longest line is INFO with the addresses of all servers and gateways of a large cluster."""

_PING: Final = b"PING\r\n"


class WatchedTransport(asyncio.Protocol, Transport):
    def __init__(self, server: Server, options: LinkOptions, ended: Callable[[str], None]) -> None:
        self.info: dict[str, Any] = {}  # the server's JSON: `Any`
        self._loop = asyncio.get_running_loop()
        self._server = server
        self._options = options
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._chunks: list[bytes] = []
        self._chunks_bytes = 0
        self._is_at_end = False
        self._readable: asyncio.Future[None] | None = None  # somebody waits for bytes
        self._writable: asyncio.Future[None] | None = None  # more waits to be written than should
        self._heard = True  # since the last ping
        self._pings: asyncio.TimerHandle | None = None

    def __bool__(self) -> bool:
        return True  # also before it is connected: else the client takes one of its own

    # --- what nats-py asks for -------------------------------------------------------------------

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: float) -> None:
        await self._loop.create_connection(lambda: self, self._server.host, self._server.port)

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: float
    ) -> None:
        if self._transport is None:
            raise ConnectionResetError(errno.ECONNRESET, "closed before TLS began")
        name = self._server.tls_name or self._server.host
        upgraded = await self._loop.start_tls(self._transport, self, ssl_context, server_hostname=name)
        self._transport = cast(asyncio.Transport, upgraded)

    def write(self, payload: bytes) -> None:
        if self._transport is not None:
            self._transport.write(payload)

    def writelines(self, payload: list[bytes]) -> None:
        self.write(b"".join(payload))

    async def drain(self) -> None:
        if self._writable is not None:
            await self._writable

    async def read(self, buffer_size: int) -> bytes:
        if not self._chunks and not self._is_at_end:
            self._readable = self._loop.create_future()
            await self._readable
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._keep([])
        return data

    async def readline(self) -> bytes:
        """A line of the greeting."""
        data = b""
        while b"\n" not in data and not self._is_at_end and len(data) < LINE_BYTES_MAX:
            data += await self.read(0)
        line, end, rest = data.partition(b"\n")
        self._keep([rest] if rest else [])
        if self.info or not line:
            return line + end
        return b"INFO " + json.dumps(self._greeted(line)).encode() + b"\r\n"

    def _greeted(self, line: bytes) -> dict[str, Any]:
        """What nats-py should hear of the first line: where we want TLS, the server must too."""
        word, _, said = line.partition(b" ")
        try:
            info = json.loads(said) if word == b"INFO" else None
        except (ValueError, RecursionError):
            info = None
        if not isinstance(info, dict):
            raise LinkError(f"NATS server {self._server}: is none, it says {line[:80]!r}")
        self.info = info
        wants_tls = self._options.tls is not None or self._server.tls
        if wants_tls and not (info.get("tls_required") or info.get("tls_available")):
            raise LinkError(
                f"NATS server {self._server}: does not offer TLS, which is asked for; set it up there"
            )
        return {**info, "tls_required": True} if wants_tls else info

    def _keep(self, chunks: list[bytes]) -> None:
        if self._chunks_bytes > READ_BYTES_MAX and self._transport is not None:
            self._transport.resume_reading()
        self._chunks = chunks
        self._chunks_bytes = sum(map(len, chunks))

    def at_eof(self) -> bool:
        return self._is_at_end and not self._chunks

    def close(self) -> None:
        """At once: a server that does not read would have us wait."""
        self._end("closed the connection")

    async def wait_closed(self) -> None:
        """There is nothing to wait for."""

    # --- what the loop says ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        self._chunks.append(data)
        before = self._chunks_bytes
        self._chunks_bytes += len(data)
        if before <= READ_BYTES_MAX < self._chunks_bytes and self._transport is not None:
            self._transport.pause_reading()
        _wake(self._readable)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(str(error) if error is not None else "closed the connection")

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        _wake(self._writable)
        self._writable = None

    # --- whether anybody is there ----------------------------------------------------------------

    def watch(self) -> None:
        """From now on the server must say something now and then."""
        self._pings = self._loop.call_later(self._options.ping_seconds, self._ping)

    def _ping(self) -> None:
        if not self._heard:
            self._end(f"has said nothing for {2 * self._options.ping_seconds:g} s")
            return
        self._heard = False
        self.write(_PING)
        self.watch()

    def _end(self, reason: str) -> None:
        if self._pings is not None:
            self._pings.cancel()
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        self._is_at_end = True
        _wake(self._readable)
        self.resume_writing()
        self._ended(reason)


def _wake(waiter: "asyncio.Future[None] | None") -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
