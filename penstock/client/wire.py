"""A wire: one blocking connection, plain or TLS, that several threads may use.

The socket itself never blocks. Whoever has to wait polls, so that every wait has its own deadline and a
thread that waits for bytes keeps nobody from writing. TLS needs more: one `SSL` object must not be used by
two threads at once, and so every call on the socket, not the waiting, is under one lock.

Rules that always hold:
  * One thread reads and one writes at a time; the caller sees to that.
  * What `read` returns is valid until the next `read`.
  * After an error of `write` the stream is broken in the middle of something: close it.
  * While somebody waits, the socket keeps its number. Once that is free it may be the next connection's, and
    who was about to wait for the old one would wait for that.

How it fails: `OSError` (of which `TimeoutError` is one) and nothing else.
"""

import contextlib
import errno
import select
import socket
import ssl
import threading
import time
from typing import Final

from penstock.common.address import Address, UnixAddress

READ_BYTES: Final = 256 * 1024
KEEPALIVE: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds, seconds, tries: a peer whose machine is gone is noticed after a minute, also by one who waits."""

# Linux tells that the peer has closed without anything being read; elsewhere it is noticed a message later.
HANGUP: Final = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


def tune(sock: socket.socket) -> None:
    """For TCP: send at once, and have the system find out by itself when the peer's machine is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # not every system has all three
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def dial(address: Address, context: ssl.SSLContext | None, seconds: float) -> "Wire":
    """Connect, shake hands."""
    return Wire(open_socket(address, context, seconds))


def open_socket(address: Address, context: ssl.SSLContext | None, seconds: float) -> socket.socket:
    """A socket that blocks, connected; for those who do without a wire."""
    deadline = time.monotonic() + seconds
    if isinstance(address, UnixAddress):
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(seconds)
            sock.connect(address.path)
        except OSError:
            sock.close()
            raise
        return sock
    sock = socket.create_connection((address.host, address.port), timeout=seconds)
    try:
        tune(sock)
        if context is not None:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            # An end without the farewell of TLS is an error: the peer, or somebody else, has cut the stream.
            sock = context.wrap_socket(sock, server_hostname=address.host, suppress_ragged_eofs=False)
    except OSError:
        sock.close()
        raise
    return sock


class Wire:
    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._io = threading.Lock()
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._hangup = select.poll()
        self._hangup.register(sock, HANGUP)
        self.has_read = False  # the last `read` may have taken something, also where it did not return
        self._ended = False  # the peer has said that nothing more comes
        self._error: OSError | None = None
        self._waiting = 0  # threads
        self._aborted = False

    def read(self, seconds: float | None) -> memoryview | None:
        """What has come: empty at the end of the stream, None where nothing came in time."""
        return self._read(self._buffer, seconds)

    def write(self, data: bytes, seconds: float) -> None:
        """Hand all of it to the system. TimeoutError where that has taken nothing for so many seconds."""
        rest = memoryview(data)
        deadline = 0.0
        while rest:
            try:
                with self._io:
                    rest = rest[self._sock.send(rest) :]
                deadline = 0.0
                continue
            except (BlockingIOError, ssl.SSLWantWriteError):
                wanted = select.POLLOUT
            except ssl.SSLWantReadError:
                wanted = select.POLLIN
            deadline = deadline or time.monotonic() + seconds
            if not self._wait(wanted, deadline):
                raise TimeoutError(f"the broker has taken nothing for {seconds:g} s")

    @property
    def is_gone(self) -> bool:
        """Whether the peer has closed. It is told before what it has sent last was read."""
        with self._io:
            return bool(self._hangup.poll(0))

    async def flush(self, _seconds: float) -> bool:
        """Nothing is unsent here after a write."""
        return True

    async def finish(self, seconds: float) -> None:
        """Say that nothing more comes, and wait until the peer has read everything and closed, too.

        What it sends until then is thrown away. TimeoutError, or another OSError, where that did not happen.
        """
        with self._io:
            if isinstance(self._sock, ssl.SSLSocket):
                # This says farewell; that of the peer is waited for below, as the end of the stream.
                with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    self._sock.unwrap()
            else:
                self._sock.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + seconds
        scratch = memoryview(bytearray(READ_BYTES))
        while not self._ended:
            if self._read(scratch, max(0.0, deadline - time.monotonic())) is None:
                raise TimeoutError(f"the broker has not closed within {seconds:g} s")
        if self._error is not None:
            raise self._error  # another thread has got it; the system tells it once

    def abort(self) -> None:
        """End at once. Whoever waits here, in whichever thread, wakes up."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        with self._io:
            self._aborted = True
            self._close_if_left()

    def _close_if_left(self) -> None:
        if self._aborted and not self._waiting:
            self._sock.close()

    def abandon(self) -> None:
        """Another process goes on with it, and its peer hears nothing."""
        self._sock.close()

    def _read(self, buffer: memoryview, seconds: float | None) -> memoryview | None:
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            try:
                self.has_read = True
                with self._io:
                    count = self._sock.recv_into(buffer)
            except (BlockingIOError, ssl.SSLWantReadError):
                wanted = select.POLLIN
            except ssl.SSLWantWriteError:
                wanted = select.POLLOUT
            except ssl.SSLZeroReturnError:
                self._ended = True  # both sides have said farewell
                return buffer[:0]
            except OSError as error:
                self._error = error
                raise
            else:
                self._ended |= not count
                return buffer[:count]
            self.has_read = False
            if not self._wait(wanted, deadline):
                return None

    def _wait(self, events: int, deadline: float | None) -> bool:
        """Until the socket is ready; False where it was not in time."""
        poll = select.poll()  # one of its own: two threads must not wait with the same one
        with self._io:
            if self._aborted:
                raise OSError(errno.EBADF, "closed by another thread")
            self._waiting += 1
        try:
            poll.register(self._sock, events)
            milliseconds = None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)
            return bool(poll.poll(milliseconds))
        finally:
            with self._io:
                self._waiting -= 1
                self._close_if_left()
