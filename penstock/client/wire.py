"""A wire: one blocking connection, plain or TLS, that several threads may use.

The socket itself never blocks. Whoever has to wait polls, so that every wait has its own deadline and a
thread that waits for bytes keeps nobody from writing. TLS needs more: one `SSL` object must not be used by
two threads at once, and so every call on the socket, not the waiting, is under one lock.

Rules that always hold:
  * One thread reads and one writes at a time; the caller sees to that.
  * What `read` returns is valid until the next `read`.
  * After an error of `write` the stream is broken in the middle of something: close it.

How it fails: `OSError` (of which `TimeoutError` is one) and nothing else.
"""

import contextlib
import select
import socket
import time
from typing import TYPE_CHECKING, Final

from penstock.server.address import Address, UnixAddress

if TYPE_CHECKING:
    import ssl

READ_BYTES: Final = 256 * 1024
KEEPALIVE: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds, seconds, tries: a peer whose machine is gone is noticed after a minute, also by one who waits."""

# Linux tells that the peer has closed without anything being read; elsewhere it is noticed a message later.
_HANGUP: Final = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


def keep_alive(sock: "socket.socket | object") -> None:
    """Have the system find out by itself when a peer's machine is gone."""
    option = getattr(sock, "setsockopt", None)
    if option is None:
        return
    with contextlib.suppress(OSError):  # a Unix socket has none of these
        option(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            option(socket.IPPROTO_TCP, getattr(socket, name), value)
        option(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def dial(address: Address, context: "ssl.SSLContext | None", seconds: float) -> "Wire":
    """Connect, shake hands."""
    deadline = time.monotonic() + seconds
    if isinstance(address, UnixAddress):
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(seconds)
            sock.connect(address.path)
        except OSError:
            sock.close()
            raise
        return Wire(sock)
    sock = socket.create_connection((address.host, address.port), timeout=seconds)
    try:
        keep_alive(sock)
        if context is not None:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock = context.wrap_socket(sock, server_hostname=address.host)
    except OSError:
        sock.close()
        raise
    return Wire(sock)
