"""Link: one end of a TLS connection that carries frames. What both sides of the relay have in common.

Frames that are written in one turn of the loop leave together. Those that a turn has no time for wait in
their round with everybody else's words (`server/rounds.py`). A peer that vanishes without a word is found
out by the kernel within seconds (`watch_peer`): clients wait for it on the other side.

How it fails: a violation, a lost connection and `close` all end in `on_lost`, once, with a sentence that
says why. Nothing that arrives after that is looked at.
"""

import asyncio
import socket
from collections import deque
from typing import Final, cast

from penstock.cluster.frames import FRAME_BYTES_MAX, Frame, Reader
from penstock.protocols.errors import PeerViolation
from penstock.server.rounds import Rounds

RECEIVE_BYTES: Final = 1 << 20
_receive_buffer = memoryview(bytearray(RECEIVE_BYTES))
SHUTDOWN_SECONDS: Final = 2.0
"""How long the end of a connection may take, with what waits to be written."""

_WATCH: Final = (
    ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 2),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPCNT), 4),
    ((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), 6000),
    ((socket.IPPROTO_TCP, socket.TCP_NODELAY), 1),
)
"""A front-end that is gone is found out after six seconds, whether or not something is on its way to it."""


def watch_peer(transport: asyncio.BaseTransport) -> None:
    peer = transport.get_extra_info("socket")
    if peer is not None:
        for option, value in _WATCH:
            peer.setsockopt(*option, value)


class Link(asyncio.BufferedProtocol):
    """A subclass says what frames mean."""

    def __init__(self, rounds: Rounds | None = None) -> None:
        self.takes_long = False
        self._rounds = rounds  # None: what it says is heard at once
        self._later: deque[Frame] = deque()  # received, and not told yet
        self._reader = Reader()
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._flush_wanted = False
        self._loop = asyncio.get_running_loop()
        self._ending = ""  # why, once it has ended or is about to

    # --- for a subclass ----------------------------------------------------------------------------

    def on_open(self) -> None:
        """The connection is there."""

    def on_frame(self, frame: Frame) -> None:
        raise NotImplementedError

    def on_received(self) -> None:
        """All frames of a chunk have been told."""

    def on_lost(self, why: str) -> None:
        raise NotImplementedError

    # --- the socket --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        watch_peer(transport)
        self.on_open()

    def trust(self) -> None:
        """The peer is who it says it is: it may send large frames."""
        self._reader.frame_bytes_max = FRAME_BYTES_MAX

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._ending

    @property
    def ending(self) -> str:
        """Why it has ended, or is about to."""
        return self._ending

    def get_buffer(self, sizehint: int) -> memoryview:
        return _receive_buffer

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for frame in self._reader.feed(_receive_buffer[:nbytes]):
                if self._ending:
                    return
                if self._later or (self._rounds is not None and self._rounds.is_over()):
                    self._later.append(frame._replace(body=memoryview(bytes(frame.body))))
                else:
                    self.on_frame(frame)
        except PeerViolation as violation:
            self.close(str(violation))
            return
        self._received()

    def go_on(self, quick: bool) -> None:
        """Tell what waits, as far as this turn has time for it."""
        assert self._rounds is not None
        try:
            while self._later and not self._ending:
                self.on_frame(self._later.popleft())
                if self._rounds.is_over():
                    break
        except PeerViolation as violation:
            self.close(str(violation))
            return
        except Exception:
            self.abort("a fault of ours")  # as the loop does, where it was not put off
            raise
        self._received()
        if not self._later and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _received(self) -> None:
        if self._ending:
            return
        if self._later and self._rounds is not None:
            if self._transport is not None:
                self._transport.pause_reading()
            self._rounds.wait(self)
        self.on_received()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self._ending:
            self._ending = f"the connection was lost: {error}" if error else "the other side closed it"
        self.on_lost(self._ending)

    def write(self, frame: bytes) -> None:
        """One frame. It leaves with the others of this turn."""
        self._out.append(frame)
        self.flush_soon()

    def flush_soon(self) -> None:
        if not self._flush_wanted:
            self._flush_wanted = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        self._flush_wanted = False
        out, self._out = self._out, []
        if out and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(out))  # of many pieces, TLS would make a record each

    def hand_over(self) -> asyncio.Transport:
        """The connection goes on without this object."""
        assert self._transport is not None
        transport, self._transport = self._transport, None
        self._ending = "it was handed over"
        return transport

    def close(self, why: str) -> None:
        """Write what waits, then close. Nothing more is read."""
        if self._ending:
            return
        self.flush()
        self._ending = why
        if self._transport is not None:
            self._transport.close()

    def abort(self, why: str) -> None:
        """Close at once."""
        self._ending = self._ending or why
        if self._transport is not None:
            self._transport.abort()
