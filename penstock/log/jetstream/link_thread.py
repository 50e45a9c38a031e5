"""LinkThread: a thread with a loop, on which one link to NATS lives; others ask it from their own threads.

The log's threads block while they write and sync, as they do on a disk; the broker's loop must never wait. So
NATS has a thread and a loop of its own, and whatever is asked of it is a coroutine that runs there:

    ask     from any other thread: run it there, and wait for the end
    start   from any thread: run it there, and do not wait

How it fails: `LinkError` out of `open` when no server takes us. Later the link goes on trying by itself; what
runs here decides how long to wait for it. After `close` everything that is asked is refused, and what was
still waiting is told `LinkClosed`.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from penstock.log.jetstream.api import JetStream
from penstock.log.jetstream.errors import JetStreamTrouble
from penstock.log.jetstream.link import Link, cancel
from penstock.log.jetstream.options import LinkOptions
from penstock.log.jetstream.servers import Server, Servers

_T = TypeVar("_T")
_G = TypeVar("_G")


class LinkClosed(JetStreamTrouble):
    """Nobody asks NATS for anything any more: the broker stops, or has been overtaken."""


class LinkThread:
    """`open` makes one."""

    def __init__(self) -> None:
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name="penstock-nats", daemon=True)
        self._closed = False
        self._gate = threading.Lock()  # nothing is handed over any more once `close` has begun
        self.link: Link
        self.api: JetStream

    @classmethod
    def open(cls, servers: Iterable[Server], options: LinkOptions | None = None) -> "LinkThread":
        """Connect, from a thread that may wait."""
        nats = cls()
        nats._thread.start()
        try:
            nats.ask(nats._connect(list(servers), options))
        except BaseException:
            nats.close()
            raise
        return nats

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _connect(self, servers: list[Server], options: LinkOptions | None) -> None:
        self.link = Link(Servers(servers), options)
        await self.link.open()
        self.api = JetStream(self.link)

    def ask(self, work: Coroutine[Any, Any, _T]) -> _T:
        """What it comes to. From any thread but the link's own."""
        ended: SimpleQueue[asyncio.Task[_T]] = SimpleQueue()  # a future takes more, and each record asks

        def begin() -> None:
            self._loop.create_task(work).add_done_callback(ended.put)

        self._give(work, lambda: self._loop.call_soon_threadsafe(begin))
        try:
            return ended.get().result()
        except asyncio.CancelledError:
            raise LinkClosed("the link to NATS is closed") from None

    def wait(self, future: "concurrent.futures.Future[_T]") -> _T:
        """What was started comes to."""
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise LinkClosed("the link to NATS is closed") from None

    def start(self, work: Coroutine[Any, Any, _T]) -> "concurrent.futures.Future[_T]":
        """The same without waiting."""
        return self._give(work, lambda: asyncio.run_coroutine_threadsafe(work, self._loop))

    def _give(self, work: Coroutine[Any, Any, object], give: Callable[[], _G]) -> _G:
        with self._gate:
            if not self._closed:
                return give()
        work.close()
        raise LinkClosed("the link to NATS is closed")

    def soon(self, call: Callable[[], None]) -> None:
        """Call something on the link's loop."""
        self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        """End the link and the thread. What is still asked for is told so."""
        with self._gate:
            if self._closed:
                return
            self._closed = True

        async def end() -> None:
            mine = asyncio.current_task()
            tasks = [
                task for task in asyncio.all_tasks() if task is not mine and task.get_name() != "nats link"
            ]
            await cancel(tasks)
            if hasattr(self, "link"):
                await self.link.close()
            await self._loop.shutdown_default_executor()

        with suppress(RuntimeError):  # its thread never began
            asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
