"""Control: the first process's end of the private link.

Frames come in, each is a call that is carried out on the loop, and answered now or, where
it waits for the disk, when the disk has answered. Every call is short by construction: what lists
much answers in parts (see `calls.py`), and calls that a turn has no time for wait in their round with
the connections (`rounds.py`), so that nothing the second process asks for delays a message.

Rules that always hold:
  * Every call is answered once, with a result or an error; an unknown call with an error too.
  * While too much is on its way to the disk, the link is not read: senders over HTTP wait as
    those of every other door do.

How it fails: a broken frame or a lost link ends this object and calls `on_lost`; whoever started
the second process starts it again. Messages that were accepted stay accepted.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from penstock.control.frames import Buffer, Fields, Frame, FrameDecoder, FrameError, encode_frame
from penstock.log.errors import LogError
from penstock.log.log import Log
from penstock.server.backend import Served
from penstock.server.calls import CALLS, Context

if TYPE_CHECKING:
    from penstock.server.server import Server

RECEIVE_BYTES = 256 * 1024

log = logging.getLogger("penstock.control")


class Answer:
    """The one answer that a call gets."""

    __slots__ = ("_control", "_number")

    def __init__(self, control: "Control", number: int) -> None:
        self._control = control
        self._number = number

    def __call__(self, fields: Fields, *buffers: Buffer) -> None:
        self._control.answer({"n": self._number, **fields}, *buffers)

    def beside(self, number: int) -> "Answer":
        """Another one, of a call that came in the same frame."""
        self._control.open_calls += 1
        return Answer(self._control, number)

    def refuse(self, kind: str, detail: str) -> None:
        self({"error": {"kind": kind, "detail": detail}})


class _Host:
    """The server, as far as it is about one log."""

    def __init__(self, server: "Server", served: Served) -> None:
        self.broker = served.broker
        self.log = served.log
        self.started = server.started
        self.memory = server.memory
        self.audit = server.audit
        self.now_us = server.now_us
        self.arrival_us = server.arrival_us
        self.fail = server.fail
        self.listeners = server.listeners


class Control(asyncio.BufferedProtocol):
    """One to a link."""

    def __init__(self, server: "Server", hello: Fields, on_lost: Callable[[], None]) -> None:
        self._server = server
        self._contexts: dict[Log, Context] = {}
        self._hello = hello
        self._on_lost = on_lost
        self._decoder = FrameDecoder()
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._transport: asyncio.Transport | None = None
        self._frames: deque[Frame] = deque()  # calls that are not carried out yet
        self._held = False  # there is no room for what it sends
        self.takes_long = False
        self.open_calls = 0

    # --- the socket ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        for served in self._server.served:  # From now on what is asked for later is noted.
            self._context(served)
        self.tell({"hello": self._hello})

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self._frames += self._decoder.receive(self._buffer[:nbytes])
        except FrameError as error:
            log.critical("the link to the second process is broken: %s", error)
            self.close()
            return
        self.go_on(quick=False)

    def go_on(self, quick: bool) -> None:
        """Carry out what waits, as far as this turn has time for it."""
        if self._held or not self._frames:
            return
        rounds = self._server.rounds
        self._server.arrival_us()
        while self._frames:
            self._run(self._frames.popleft())
            if rounds.is_over():
                break
        self._server.check_in_flight(self)
        if self._frames and not self._held:
            rounds.wait(self)
        self._read_or_not()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._frames.clear()  # Nobody waits for an answer any more.
        self._server.not_throttled(self)
        for served in self._server.served:
            served.log.times.want(False)
            with contextlib.suppress(LogError):  # The log may have ended before.
                served.broker.taking.link_lost(self._server.now_us())
        self._on_lost()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def hold_for_server(self, held: bool) -> None:
        """Read nothing for now, or go on reading."""
        self._held = held
        if self._frames and not held:
            self._server.rounds.wait(self)
        self._read_or_not()

    def _read_or_not(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._held or self._frames:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    # --- calls -----------------------------------------------------------------------------------

    def _run(self, frame: Frame) -> None:
        fields = frame.fields
        answer = Answer(self, fields["n"])
        self.open_calls += 1
        if fields["call"] == "way":
            self._server.open_way(fields["to"], fields["caller"], answer)
            return
        if fields["call"] == "cluster":  # Of a front-end that leads nothing, too.
            answer({"cluster": self._server.cluster_info()})
            return
        handler = CALLS.get(fields["call"])
        if handler is None:
            answer.refuse("bug", f"there is no call {fields['call']!r}")
            return
        shard = fields.get("shard")
        here = (it for it in self._server.served if shard in (None, it.shard) and not it.is_closing)
        served = next(here, None)
        if served is None:  # It was overtaken; the second process is about to hear of it, or to end.
            answer.refuse("draining", "this front-end leads no more; try again")
            return
        context = self._context(served)
        try:
            handler(context, fields, frame.body, answer)
        except Exception as error:  # noqa: BLE001 - a fault of ours in one call must not end the broker
            context.refuse(answer, error, fields["call"])

    def _context(self, served: Served) -> Context:
        """What calls about a log work on: one to a link, as long as the log is written here."""
        context = self._contexts.get(served.log)
        if context is None:
            there = {it.log for it in self._server.served}
            self._contexts = {log: context for log, context in self._contexts.items() if log in there}
            context = self._contexts[served.log] = Context(_Host(self._server, served))
        return context

    def answer(self, fields: Fields, *buffers: Buffer) -> None:
        self.open_calls -= 1
        self._write(fields, *buffers)

    def tell(self, fields: Fields) -> None:
        """Something that wants no answer."""
        self._write({"n": 0, **fields})

    def _write(self, fields: Fields, *buffers: Buffer) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(encode_frame(fields, *buffers))
