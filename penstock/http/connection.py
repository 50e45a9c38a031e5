"""BoundedProtocol: uvicorn's HTTP connection, with bounds on what its peer can make this process keep.

    head       (request line and headers) is complete within a size and a time
    body       is what its handler bounds; what nobody has read when the answer is there ends within that time
    requests   that come before others are answered are few: the rest waits as the bytes that it is
    answers    are taken within a time, or the connection ends

And there are only so many connections at a time. Without that, anybody who can connect could have this
process gather bytes, or keep connections, for ever. What is no HTTP gets a problem, as every mistake does.
"""

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

from penstock.http.problems import MEDIA, Problem
from penstock.http.web_server import HttpToolsProtocol, RequestResponseCycle

if TYPE_CHECKING:
    from penstock.http.quick import Quick

HEAD_BYTES_MAX: Final = 64 * 1024
HEAD_SECONDS_MAX: Final = 30.0
UNTAKEN_SECONDS_MAX: Final = 400.0
"""Who takes nothing of an answer, or not the last of it, for so long is gone to us. Those who serve large
ones are less patient."""

PIPELINED_MAX: Final = 64
"""Requests that wait until others are answered: each takes some KB here, and can be 18 bytes."""

READ_BYTES: Final = 1024
"""Read at a time where there may be more of them."""

KEPT_BYTES_MAX: Final = 1024
_VERSION: Final = b" HTTP/1."
CONNECTION: Final = "penstock.connection"
"""Where the scope of a request has its connection."""


class JoiningTransport:
    """A transport that keeps a short piece back until the next one of the same turn: the head of an answer
    leaves together with its body, and wakes whoever waits for it once."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, closing: Callable[[], None]
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._closing = closing
        self._kept: bytes = b""
        self.is_lost = False
        """Nobody is there any more. Of requests that came at once uvicorn tells only the last so, and to
        write for the others would fail."""

    def __getattr__(self, name: str) -> Any:  # the transport's
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self.is_lost:
            return
        if self._kept:
            kept, self._kept = self._kept, b""
            self._transport.writelines((kept, data))
        elif 0 < len(data) < KEPT_BYTES_MAX:
            self._kept = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def write_whole(self, data: bytes) -> None:
        """An answer with its head: nothing comes behind it."""
        self._flush()
        if not self.is_lost:
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()
        self._closing()

    def _flush(self) -> None:
        if self._kept and not self.is_lost:
            kept, self._kept = self._kept, b""
            self._transport.write(kept)


class BoundedProtocol(HttpToolsProtocol):
    connections_max = 1000
    """Of this process: it is set before the first of them, as the next one."""

    quick: "Quick | None" = None

    def __init__(self, *args: Any, caller: tuple[str, int] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # uvicorn's own, passed through
        self._caller = caller  # who is behind it, where that is not who connected
        self._head_bytes = 0
        self._in_head = True
        self._ended = 0  # requests that have come as a whole
        self._deadline: asyncio.TimerHandle | None = None
        self._starts_later = False
        self._begun: RequestResponseCycle | None = None  # It may go a short way, when its body has come.
        self._unread = memoryview(b"")  # requests that come too early
        self._untaken: asyncio.TimerHandle | None = None
        self.lost: asyncio.Future[None] = self.loop.create_future()
        """Done when nobody is there any more."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        joining = JoiningTransport(transport, self.loop, self._end_later)
        super().connection_made(cast(asyncio.Transport, joining))
        if self._caller is not None:
            self.client = self._caller
        self._watch()
        if len(self.connections) > self.connections_max:
            self._refuse(
                Problem(
                    "unavailable",
                    f"{self.connections_max} connections are open, the limit of [http] connections-max; "
                    f"try again later",
                )
            )

    @property
    def is_handed_over(self) -> bool:
        """Whether it comes from another front-end."""
        return self._caller is not None

    @property
    def peer(self) -> str:
        """Where it comes from; through a socket of this machine, which has no names, a number."""
        return "{}:{}".format(*self.client) if self.client is not None else f"unix#{id(self)}"

    def whole_body(self, scope: Any) -> bytes | None:  # a scope is of any type that ASGI knows
        """The body of a request where all of it has come, which is then the caller's; else None."""
        cycle = self.cycle
        if cycle.scope is not scope or cycle.more_body or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        self.flow.resume_reading()
        return body

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._untaken):
            if timer is not None:
                timer.cancel()
        self.lost.set_result(None)
        cast(JoiningTransport, self.transport).is_lost = True
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._unread or data.count(_VERSION) > PIPELINED_MAX:
            self._unread = memoryview(bytes(self._unread) + data)
            self._read_some()
        else:
            self._read(data)

    def _read_some(self) -> None:
        """So much of what has come that few requests wait for others."""
        while self._unread and len(self.pipeline) < PIPELINED_MAX and not self.transport.is_closing():
            some, self._unread = self._unread[:READ_BYTES], self._unread[READ_BYTES:]
            self._read(bytes(some))
        cycle: RequestResponseCycle | None = self.cycle  # uvicorn's type of it leaves out the beginning
        if self._unread:
            self.flow.pause_reading()
        elif not self.pipeline and (cycle is None or cycle.response_complete):
            self.flow.resume_reading()  # No answer does, for none is missing.

    def _read(self, data: bytes) -> None:
        ended = self._ended
        super().data_received(data)
        begun, self._begun = self._begun, None
        if begun is not None and not self.transport.is_closing():
            self.go_on(begun)  # The rest of its body may take long.
        # A chunk with the end of a request is no head, or only its last part is one.
        if self._in_head and ended == self._ended and not self.transport.is_closing():
            if self._deadline is None:
                self._watch()
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._refuse(
                    Problem("head-too-large", f"the head has more than {HEAD_BYTES_MAX} bytes; send less")
                )

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]  # beside what ASGI has there

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._unwatch()
        self._starts_later = self.quick is not None
        super().on_headers_complete()
        self._starts_later = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:  # as uvicorn has it
        if self._starts_later:
            self._begun = cycle
        else:
            super()._start_asgi_task(cycle, app)

    def go_on(self, cycle: RequestResponseCycle, app: Any = None) -> None:
        """A request that was begun goes its usual way; where there is another `app`, that answers it."""
        super()._start_asgi_task(cycle, app or self.app)

    def answer(self, cycle: RequestResponseCycle, body: bytes) -> None:
        """A request that no task answers is done: as `RequestResponseCycle.send` does it, at once."""
        cycle.response_started = cycle.response_complete = True
        if not cycle.disconnected:
            head = b"".join([b"%b: %b\r\n" % header for header in cycle.default_headers])
            if not cycle.keep_alive:
                head += b"connection: close\r\n"
            cast(JoiningTransport, self.transport).write_whole(
                b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\ncontent-type: application/json\r\n\r\n%b"
                % (head, len(body), body)
            )
            if not cycle.keep_alive:
                self.transport.close()
        self.on_response_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.pipeline or self._unread:
            self.flow.pause_reading()  # One answer is no reason to read as much again.
        if self._unread and len(self.pipeline) < PIPELINED_MAX:
            self.loop.call_soon(self._read_some)
        elif self.cycle.response_complete and self.cycle.more_body and self._deadline is None:
            self._watch()  # Nobody else waits for the rest of its body.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._untaken is not None and not self.transport.is_closing():
            self._untaken.cancel()
            self._untaken = None

    def _end_later(self) -> None:
        """Unless its peer takes what was written: until then it has a place, also when it is closed."""
        if self._untaken is None and not self.lost.done():
            self._untaken = self.loop.call_later(UNTAKEN_SECONDS_MAX, self.transport.abort)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._unwatch()
        begun, self._begun = self._begun, None
        if begun is not None and (self.quick is None or not self.quick.take(self, begun)):
            self.go_on(begun)
        # Whatever comes next is a head again; while nothing comes, the keep-alive time runs.
        self._in_head = True
        self._head_bytes = 0
        self._ended += 1

    def send_400_response(self, msg: str) -> None:
        self._refuse(Problem("bad-request", "this is no HTTP request; look at what sends it"))

    def _watch(self) -> None:
        """What has begun to come has to end."""
        self._deadline = self.loop.call_later(HEAD_SECONDS_MAX, self._too_slow)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, problem: Problem) -> None:
        body = json.dumps(problem.fields()).encode()
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (problem.status, problem.name.encode(), MEDIA.encode(), len(body), body)
        )
        self.transport.close()
