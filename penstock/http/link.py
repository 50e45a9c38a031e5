"""Link: the second process's end of the private link.

`call` asks the first process and waits for its answer; any number of calls may be open, answers come
in the order in which the first process has them. Calls of one turn of the loop leave in one write.

How it fails: `CallRefused` is the first process's no, with a kind and a sentence; the table in
`problems.py` says what HTTP makes of it. `LinkLost`: the first process is gone, and so this one ends.
"""

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from itertools import count as counter
from typing import NamedTuple, cast

from penstock.control.frames import Buffer, Fields, Frame, FrameDecoder, encode_frame
from penstock.errors import PenstockError
from penstock.model.shards import shard_of

CALL_SECONDS = 30.0
"""A first process that does not answer for so long is stopped, or as good as."""

LOOK_SECONDS = 0.5
"""So much later it may be told."""


class CallRefused(PenstockError):
    """The first process says no."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class CallLeft(PenstockError):
    """What was asked for is not wanted any more."""


class LinkLost(PenstockError):
    """The first process is gone."""


class Asked(NamedTuple):
    """A call on its way."""

    number: int
    name: str
    waiting: "asyncio.Future[Frame]"


class Link(asyncio.Protocol):
    """Make one with `open_link`."""

    def __init__(self) -> None:
        self._decoder = FrameDecoder()
        self._numbers = counter(1)
        self._open: dict[int, asyncio.Future[Frame]] = {}
        self._late: dict[int, tuple[float, Asked, float]] = {}  # when, who, after how many seconds
        self._looking: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._out: list[Buffer] = []
        self._loop = asyncio.get_running_loop()
        self.hello: asyncio.Future[Fields] = self._loop.create_future()
        self._told: list[Fields] = []  # before anybody heard it
        self._hears: Callable[[Fields], None] = self._told.append
        self.on_lost: Callable[[], None] | None = None

    # --- the socket ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for frame in self._decoder.receive(data):
            number = frame.fields["n"]
            if number:
                waiting = self._open.pop(number, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(frame)
            elif "hello" in frame.fields:
                self.hello.set_result(frame.fields["hello"])
            else:
                self._hears(frame.fields)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        lost = LinkLost("the broker is gone")
        if not self.hello.done():
            self.hello.set_exception(lost)
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(lost)
        self._open.clear()
        if self.on_lost is not None:
            self.on_lost()

    def hear(self, hears: Callable[[Fields], None]) -> None:
        """What the first process tells from now on, and what it has told since its hello."""
        self._hears = hears
        for fields in self._told:
            hears(fields)

    # --- calls -----------------------------------------------------------------------------------

    async def call(
        self,
        name: str,
        fields: Fields | None = None,
        *buffers: Buffer,
        seconds: float = CALL_SECONDS,
        unless: "asyncio.Future[None] | None" = None,
    ) -> Frame:
        """The first process's answer; CallRefused where it is no, CallLeft where `unless` is done before."""
        return await self.answer(self.ask(name, fields, *buffers), seconds=seconds, unless=unless)

    def ask(self, name: str, fields: Fields | None = None, *buffers: Buffer) -> Asked:
        """Ask now, behind what was asked before; `answer` waits for what comes back."""
        asked = self.expect(name)
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out += encode_frame({"n": asked.number, "call": name, **(fields or {})}, *buffers)
        return asked

    def expect(self, name: str) -> Asked:
        """An answer under a number of its own, which another call has to tell."""
        if self._transport is None:
            raise LinkLost("the broker is gone")
        asked = Asked(next(self._numbers), name, self._loop.create_future())
        self._open[asked.number] = asked.waiting
        return asked

    async def answer(
        self, asked: Asked, *, seconds: float = CALL_SECONDS, unless: "asyncio.Future[None] | None" = None
    ) -> Frame:
        # One timer looks after all of them: setting one up and calling it off is half of what a call takes.
        self._late[asked.number] = self._loop.time() + seconds, asked, seconds
        if self._looking is None:
            self._looking = self._loop.call_later(LOOK_SECONDS, self._look)
        leave = partial(_leave, asked)
        if unless is not None:
            unless.add_done_callback(leave)
        try:
            frame = await asked.waiting
        finally:
            del self._late[asked.number]
            self._open.pop(asked.number, None)
            if unless is not None:
                unless.remove_done_callback(leave)
        error = frame.fields.get("error")
        if error is not None:
            raise CallRefused(error["kind"], error["detail"])
        return frame

    def _look(self) -> None:
        now = self._loop.time()
        for late, asked, seconds in list(self._late.values()):
            if late <= now and not asked.waiting.done():
                why = f"the broker has not answered {asked.name!r} for {seconds:.0f} s; try again"
                asked.waiting.set_exception(CallRefused("unavailable", why))
        self._looking = self._loop.call_later(LOOK_SECONDS, self._look) if self._late else None

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None:
            self._transport.writelines(out)


def _leave(asked: Asked, _: "asyncio.Future[None]") -> None:
    if not asked.waiting.done():
        asked.waiting.set_exception(CallLeft(f"nobody waits for the answer to {asked.name!r} any more"))


async def open_link(fd: int) -> Link:
    """The link on an inherited socket."""
    loop = asyncio.get_running_loop()
    _, link = await loop.create_connection(Link, sock=socket.socket(fileno=fd))
    return link


class ShardLink(Link):
    """The same link, for what is about one of several logs."""

    def __init__(self, whole: Link, shard: int, shards: int) -> None:
        self._whole = whole
        self._shard = shard
        self._shards = shards
        self._waiting: dict[Asked, None] = {}

    def end(self) -> None:
        """That log is not led here any more: who waits for an answer still may never have one."""
        for asked in self._waiting:
            if not asked.waiting.done():
                asked.waiting.set_exception(
                    CallRefused("unavailable", f"log {self._shard} of this cluster is not led here any more")
                )

    def ask(self, name: str, fields: Fields | None = None, *buffers: Buffer) -> Asked:
        fields = fields or {}
        # Nobody would find what is put into another log than that of its queue.
        for queue in (fields.get("queue"), *(part["queue"] for part in fields.get("parts", ()))):
            if queue and (there := shard_of(queue, self._shards)) != self._shard:
                raise CallRefused(
                    "refused",
                    f"queue {queue!r} is in log {there} of this cluster (cluster.shards), and this is about "
                    f"log {self._shard}",
                )
        return self._whole.ask(name, {"shard": self._shard, **fields}, *buffers)

    def expect(self, name: str) -> Asked:
        return self._whole.expect(name)

    async def answer(
        self, asked: Asked, *, seconds: float = CALL_SECONDS, unless: "asyncio.Future[None] | None" = None
    ) -> Frame:
        self._waiting[asked] = None
        try:
            return await self._whole.answer(asked, seconds=seconds, unless=unless)
        finally:
            del self._waiting[asked]
