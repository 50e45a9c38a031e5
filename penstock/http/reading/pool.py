"""ReaderPool: readers of the log, lent to threads.

A `LogReader` is for one thread at a time, and its work (files, checksums, columns) is not for the loop.
So whoever wants something from the log hands over a function, which is run in a thread with a reader
that has just looked at what is new:

    await pool.run(look, queue, offset)         a short look; its result
    stream = pool.stream(walk, queue, start)    a long walk: `walk` is a generator, and the stream
    async for part in stream: ...               hands out what it yields, a few parts ahead of the
    await stream.aclose()                       taker, and no further

Rules that always hold:
  * Nothing here waits on the loop's own thread.
  * Looks and walks have threads of their own: bulk readers cannot keep a person waiting.
  * A walk whose taker is slow or stalled keeps a reader, but no thread. While all turns are taken, a taker
    that serves a stalled client should end it (`is_crowded`).
  * A reader is lent to one function at a time, and comes back when that one has ended, however it
    ended. After a failure that is not one of ours it is thrown away.
  * A reader that nobody uses for a while is closed: files that it maps take room on the disk, even
    when retention has removed them.

How it fails: what the function raises is raised here. More walks than `WALKS_MAX` wait for their turn, and
give up with the problem `unavailable` after `WALK_WAIT_SECONDS`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Concatenate, Final, Generic, ParamSpec, TypeVar, cast

from penstock.errors import PenstockError
from penstock.http.problems import Problem
from penstock.log.reader import LogReader

LOOK_THREADS: Final = 4
WALK_THREADS: Final = 4
WALKS_MAX: Final = 64
WALK_WAIT_SECONDS: Final = 30.0
IDLE_MAX: Final = 8
"""Readers that are kept for the next one who comes. Opening one costs, following the log is cheap."""

IDLE_SECONDS: Final = 30.0
MAPS_MAX: Final = 4
"""Files that one reader maps."""

AHEAD_MAX: Final = 2
"""Parts of a walk that lie ready before they are asked for."""

P = ParamSpec("P")
T = TypeVar("T")
_END: Final = object()


class ReaderPool:
    """Belongs to one loop."""

    def __init__(self, data: str, *, walks_max: int = WALKS_MAX) -> None:
        self._data = data
        self._idle: list[tuple[float, LogReader]] = []  # since when, oldest first
        self._sweeping: asyncio.TimerHandle | None = None
        self._lent = 0
        self._closed = False
        self._lock = Lock()
        self._looks = ThreadPoolExecutor(LOOK_THREADS, "look")
        self._walks = ThreadPoolExecutor(WALK_THREADS, "walk")
        self._turns = asyncio.Semaphore(walks_max)

    @property
    def lent(self) -> int:
        """Readers that somebody uses now."""
        return self._lent

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def idle(self) -> int:
        """Readers that wait for somebody."""
        return len(self._idle)

    async def run(
        self, function: Callable[Concatenate[LogReader, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """The result of `function(reader, …)`, which should be short: a screen of messages, not a log."""
        self._sweep_later()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._looks, self._look, lambda reader: function(reader, *args, **kwargs)
        )

    def _look(self, function: Callable[[LogReader], T]) -> T:
        reader = self._take()
        keep = False
        try:
            result = function(reader)
            keep = True
        except PenstockError:
            keep = True
            raise
        finally:
            self._give_back(reader, keep)
        return result

    def stream(
        self,
        function: Callable[Concatenate[LogReader, P], Iterator[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> "Stream[T]":
        """What `function(reader, …)` yields. Whoever takes it must close it, at its end as well as before."""
        self._sweep_later()
        walk = _Walk(self, lambda reader: function(reader, *args, **kwargs))
        return Stream(walk, self._walks, self._turns)

    def close(self) -> None:
        """No more; what is still lent is closed when it comes back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        if self._sweeping is not None:
            self._sweeping.cancel()
        for _, reader in idle:
            reader.close()
        for threads in (self._looks, self._walks):
            threads.shutdown(wait=False, cancel_futures=True)

    def _sweep_later(self) -> None:
        if self._sweeping is None and not self._closed:
            self._sweeping = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._sweep)

    def _sweep(self) -> None:
        """Close what nobody has used for long, and come again while there is more."""
        self._sweeping = None
        before = time.monotonic() - IDLE_SECONDS
        with self._lock:
            stale = [reader for since, reader in self._idle if since <= before]
            del self._idle[: len(stale)]
        for reader in stale:
            self._looks.submit(reader.close)
        if self._idle or self._lent:
            self._sweep_later()

    # --- in threads ------------------------------------------------------------------------------

    def _take(self) -> LogReader:
        """A reader that knows the log as it is now."""
        with self._lock:
            _, reader = self._idle.pop() if self._idle else (0.0, None)
            self._lent += 1
        try:
            if reader is None:
                return LogReader(self._data, maps_max=MAPS_MAX)
            reader.refresh()
        except BaseException:
            with self._lock:
                self._lent -= 1
            if reader is not None:
                reader.close()
            raise
        return reader

    def _give_back(self, reader: LogReader, keep: bool) -> None:
        with self._lock:
            self._lent -= 1
            if keep and not self._closed and len(self._idle) < IDLE_MAX:
                self._idle.append((time.monotonic(), reader))
                return
        reader.close()


class _Walk(Generic[T]):
    """A generator and its reader, used by one thread after the other."""

    def __init__(self, pool: ReaderPool, function: Callable[[LogReader], Iterator[T]]) -> None:
        self._pool = pool
        self._function = function
        self._reader: LogReader | None = None
        self._items: Iterator[T] = iter(())
        self._keep = True

    @property
    def has_no_threads(self) -> bool:
        return self._pool.is_closed

    def step(self) -> object:
        """The next item, or _END."""
        try:
            if self._reader is None:
                self._reader = self._pool._take()
                self._items = self._function(self._reader)
            return next(self._items, _END)
        except PenstockError:
            raise
        except BaseException:
            self._keep = False
            raise

    def end(self) -> None:
        """Give the reader back."""
        reader, self._reader = self._reader, None
        if reader is None:
            return
        close = getattr(self._items, "close", None)
        try:
            if close is not None:
                close()
        except BaseException:
            self._keep = False
            raise
        finally:
            self._items = iter(())
            self._pool._give_back(reader, self._keep)


class Stream(AsyncIterator[T]):
    """The items of a walk, for one taker; see the module's docstring."""

    def __init__(self, walk: _Walk[T], threads: ThreadPoolExecutor, turns: asyncio.Semaphore) -> None:
        self._walk = walk
        self._threads = threads
        self._turns = turns
        self._ready: asyncio.Queue[object] = asyncio.Queue()
        self._room = asyncio.Semaphore(AHEAD_MAX)
        self._ended = False
        self._producing = asyncio.get_running_loop().create_task(self._produce())

    @property
    def is_crowded(self) -> bool:
        """Whether another walk would have to wait for its turn."""
        return self._turns.locked()

    def __aiter__(self) -> "Stream[T]":
        return self

    async def __anext__(self) -> T:
        if self._ended:
            raise StopAsyncIteration
        item = await self._ready.get()
        if item is _END or isinstance(item, BaseException):
            self._ended = True
            # The reader is back before the end is told.
            await asyncio.wait([self._producing])
            raise StopAsyncIteration if item is _END else cast(BaseException, item)
        self._room.release()
        return cast(T, item)

    async def aclose(self) -> None:
        """No more; the reader is back when this returns."""
        self._ended = True
        if not self._producing.cancelling():
            self._producing.cancel()
        await asyncio.wait([self._producing])

    async def _produce(self) -> None:
        try:
            await self._turn()
        except Problem as problem:
            self._ready.put_nowait(problem)
            return
        try:
            await self._produce_in_turn()
        finally:
            self._turns.release()

    async def _turn(self) -> None:
        try:
            async with asyncio.timeout(WALK_WAIT_SECONDS):
                await self._turns.acquire()
        except TimeoutError:
            raise Problem(
                "unavailable",
                f"too many bulk reads are open, and none of them has ended for {WALK_WAIT_SECONDS:.0f} s; "
                f"try again when one has",
                headers={"Retry-After": "5"},
            ) from None

    async def _produce_in_turn(self) -> None:
        loop = asyncio.get_running_loop()
        step: asyncio.Future[object] | None = None
        last: object = None
        try:
            while last is not _END:
                await self._room.acquire()
                step = loop.run_in_executor(self._threads, self._walk.step)
                item = await asyncio.shield(step)
                if item is _END:
                    last = _END
                else:
                    self._ready.put_nowait(item)
        except asyncio.CancelledError:
            # A step that has begun goes on in its thread, with the reader.
            if step is not None:
                await asyncio.wait([step])
            last = Problem("unavailable", "the HTTP API stops; try again")
        except BaseException as error:  # noqa: BLE001 - it is raised where the items are taken
            last = error
            if isinstance(error, RuntimeError) and self._walk.has_no_threads:
                last = Problem("unavailable", "this log is not read here any more; try again")
        try:
            await loop.run_in_executor(self._threads, self._walk.end)
        except RuntimeError:
            self._walk.end()  # The pool is closed: there are no threads any more.
        finally:
            self._ready.put_nowait(last)
