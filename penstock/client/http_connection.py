"""One HTTP connection to a broker, kept open between requests: for all who ask the HTTP API.

One thread at a time uses it. One that the broker has closed while nobody used it is found out before anything
is written (`is_open`). How it fails: `OSError` and `http.client.HTTPException`, also where the head of an
answer is cut off; then close it.
"""

import contextlib
import http.client
import select
import socket
import ssl
from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import quote, urlencode

from penstock.client.wire import HANGUP, open_socket
from penstock.common.address import Address, UnixAddress

PIECE_BYTES: Final = 1 << 18
"""A body is written in pieces of so much, each of which may take as long as an answer: a line may be slow."""


class HttpConnection:
    def __init__(self, connect_seconds: float, answer_seconds: float) -> None:
        self._connect_seconds = connect_seconds
        self._answer_seconds = answer_seconds  # between two bytes
        self._http: http.client.HTTPConnection | None = None
        self._hangup = select.poll()

    @property
    def is_open(self) -> bool:
        """Whether a request can be written, as far as can be seen."""
        return self._http is not None and self._http.sock is not None and not self._hangup.poll(0)

    def open(self, address: Address, context: ssl.SSLContext | None) -> None:
        """Connect, after which there is no other connection."""
        self.close()
        sock = open_socket(address, context, self._connect_seconds)
        host, port = ("localhost", None) if isinstance(address, UnixAddress) else (address.host, address.port)
        self._http = http.client.HTTPConnection(host, port)
        self._http.auto_open = 0  # connections are made here only
        self._http.sock = sock
        self._hangup = select.poll()
        self._hangup.register(sock, HANGUP)

    def ask(
        self,
        method: str,
        target: str,
        body: bytes | memoryview | None,
        headers: Mapping[str, str],
        answer_seconds: float | None = None,
    ) -> http.client.HTTPResponse:
        """What is answered to a request; its body is still to be read."""
        assert self._http is not None
        if self._http.sock is not None:
            self._http.sock.settimeout(answer_seconds or self._answer_seconds)
        words = dict(headers)
        pieces: bytes | memoryview | Iterable[memoryview] | None = body
        if body is not None and len(body) > PIECE_BYTES:
            view = memoryview(body)
            words["Content-Length"] = str(len(view))
            pieces = (view[at : at + PIECE_BYTES] for at in range(0, len(view), PIECE_BYTES))
        try:
            self._http.request(method, target, pieces, words)
        except (BrokenPipeError, ConnectionResetError):
            # A broker that does not want the body has said why before it closed.
            if self._http.sock is None:
                raise
        answer = self._http.getresponse()
        if answer.length is None and not answer.chunked and answer.version == 11:
            # A broker says how long its answers are: http.client takes a cut for the end of the head.
            raise http.client.RemoteDisconnected("within the head of an answer")
        return answer

    def abort(self) -> None:
        """End at once: whoever waits for an answer, in whichever thread, waits no longer. Then close it."""
        sock = self._http.sock if self._http is not None else None
        if sock is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> bool:
        """False where there was none."""
        if self._http is None:
            return False
        self._http.close()
        self._http = None
        return True


def target_of_request(segments: Iterable[str], query: Mapping[str, object]) -> str:
    """Path and query: a name is one segment, whatever is in it; parameters that are None are left out."""
    path = "".join("/" + quote(segment, safe="", errors="surrogateescape") for segment in segments)
    words = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in query.items()
        if value is not None
    }
    return f"{path}?{urlencode(words, errors='surrogateescape')}" if words else path
