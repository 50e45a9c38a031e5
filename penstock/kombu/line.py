"""A line: one HTTP connection to a broker, with a request at a time. Who has sent one waits for the answer,
or goes on and reads it as it comes, which is what an event loop does with a request that the broker keeps
waiting.

Rules that always hold:
  * It connects by itself when something is to be sent, also where the broker has closed it since.
  * A line that has failed is closed. Nobody tries again here.

How it fails: `OSError` (of which `TimeoutError` is one) and nothing else.
"""

import contextlib
import json
import select
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import httptools

from penstock.client.wire import open_socket
from penstock.common.address import TcpAddress

ANSWER_SECONDS: Final = 30.0
"""How long the broker may take for an answer, beyond what it was told to wait."""
LEAVE_SECONDS: Final = 2.0
READ_BYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Place:
    """Where a broker is, and what every request to it says."""

    address: TcpAddress
    context: ssl.SSLContext | None
    headers: tuple[str, ...]  # lines
    connect_seconds: float


class Answer(NamedTuple):
    status: int
    date: str  # as the broker's clock has it
    body: bytes

    @property
    def fields(self) -> Any:  # JSON
        return json.loads(self.body)


class Line:
    def __init__(self, place: Place, on_close: Callable[[int], None] | None = None) -> None:
        self._place = place
        self._on_close = on_close  # is told the number of a socket before that is free again
        self._socket: socket.socket | None = None
        self._idle = select.poll()
        self._reading = _Reading()
        self.is_waiting = False  # for an answer
        self.due = 0.0  # when that is late

    def fileno(self) -> int:
        assert self._socket is not None
        return self._socket.fileno()

    def ask(self, method: str, target: str, body: bytes = b"", media: str = "") -> Answer:
        """What is answered."""
        self.send(method, target, body, media)
        answer = self.receive(ANSWER_SECONDS)
        if answer is None:
            self.close()
            raise TimeoutError(f"{self._place.address} has not answered {method} {target} in time")
        return answer

    def send(self, method: str, target: str, body: bytes = b"", media: str = "", wait: float = 0.0) -> None:
        """Write a request that the broker may answer after so many seconds."""
        # Nothing comes unasked but the broker's end. Where an answer is still waited for, somebody was
        # interrupted: it would be taken for the next one, or the rest of a request is missing.
        if self._socket is None or self.is_waiting or self._idle.poll(0):
            self._open()
        assert self._socket is not None
        lines = [f"{method} {target} HTTP/1.1", *self._place.headers, f"Content-Length: {len(body)}"]
        if media:
            lines.append(f"Content-Type: {media}")
        head = "\r\n".join([*lines, "", ""]).encode()
        self._reading = _Reading()
        self.is_waiting = True
        try:
            self._socket.settimeout(ANSWER_SECONDS)
            self._socket.sendall(head + body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # A broker that does not want all of it has said why: that is read next.
        except OSError:
            self.close()
            raise
        self.due = time.monotonic() + wait + ANSWER_SECONDS

    def receive(self, seconds: float = 0.0) -> Answer | None:
        """The answer, or None where it is not complete within so many seconds; 0: from what is there."""
        assert self._socket is not None
        deadline = time.monotonic() + seconds
        try:
            while not self._reading.is_complete:
                self._socket.settimeout(max(deadline - time.monotonic(), 0.0))
                try:
                    data = self._socket.recv(READ_BYTES)
                except (BlockingIOError, ssl.SSLWantReadError, TimeoutError):
                    return None
                if not data:
                    raise ConnectionResetError(f"{self._place.address} has closed the connection")
                self._reading.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.close()
            raise ConnectionResetError(f"{self._place.address} speaks no HTTP: {error}") from None
        except OSError:
            self.close()
            raise
        self.is_waiting = False
        if not self._reading.is_kept_alive:
            self.close()
        return self._reading.answer()

    def leave(self) -> Answer | None:
        """Withdraw a request that is not answered, and close; what was answered before the broker knew.

        The broker ends, too, when it reads our end. What it has sent by then is complete, and nothing
        follows.
        """
        assert self._socket is not None
        try:
            if self._place.context is None:
                self._socket.shutdown(socket.SHUT_WR)
                return self.receive(LEAVE_SECONDS)
            return self.receive()
        except OSError:
            return None
        finally:
            self.close()

    def close(self, *, shut: bool = True) -> None:
        """End it; without `shut` only for this process, where another one has it, too."""
        if self._socket is None:
            return
        if shut:
            if self._on_close is not None:
                self._on_close(self._socket.fileno())
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # a child may have a copy that would keep it open
        self._socket.close()
        self._socket, self.is_waiting = None, False

    def _open(self) -> None:
        self.close()
        self._socket = open_socket(self._place.address, self._place.context, self._place.connect_seconds)
        self._idle = select.poll()
        self._idle.register(self._socket, select.POLLIN)


class _Reading:
    """An answer as far as it has come. The parser calls the methods that begin with `on_`."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.is_complete = self.is_kept_alive = False
        self._date = ""
        self._body = bytearray()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"date":
            self._date = value.decode()

    def on_headers_complete(self) -> None:
        self.is_kept_alive = self.parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        self.is_complete = True

    def answer(self) -> Answer:
        return Answer(self.parser.get_status_code(), self._date, bytes(self._body))
