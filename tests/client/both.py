"""One test for both kinds of clients: written with `await`, run over threads and over asyncio.

The clients for threads are put behind the same interface: every call runs in another thread, and the test
awaits it. So a test cannot pass for one kind and be forgotten for the other. The asyncio clients run on
asyncio's own loop and on uvloop.
"""

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import uvloop

from penstock import aconnect, connect
from penstock.client.rq_serving import AsyncHandler

TEST_SECONDS = 30
THREADS, ASYNCIO, UVLOOP = "threads", "asyncio", "uvloop"


Test = Callable[..., Coroutine[Any, Any, None]]


def both(test: Test) -> Callable[..., None]:
    """Runs a test, whose first argument is the `Connect` to use, over threads and over asyncio."""
    return _each(test, THREADS, ASYNCIO)


def both_and_uvloop(test: Test) -> Callable[..., None]:
    """The same, and once more over asyncio on uvloop. For tests that need no broker of their own."""
    return _each(test, THREADS, ASYNCIO, UVLOOP)


def _each(test: Test, *flavours: str) -> Callable[..., None]:
    @functools.wraps(test)
    def run(flavour: str, **fixtures: Any) -> None:
        factory = uvloop.new_event_loop if flavour == UVLOOP else asyncio.new_event_loop
        kind = ThreadsClient if flavour == THREADS else aconnect
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(test(kind, **fixtures), TEST_SECONDS))

    # pytest reads the fixtures off the signature: `flavour`, and those of the test but for its first one.
    _, *others = inspect.signature(test).parameters.values()
    flavour = inspect.Parameter("flavour", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    vars(run)["__signature__"] = inspect.Signature([flavour, *others])
    marked: Callable[..., None] = pytest.mark.parametrize("flavour", flavours)(run)
    return marked


# Any: it stands for three clients of two kinds each, which have no common type.
Connect = Callable[..., Any]


class ThreadsClient:
    """A client for threads that can be awaited."""

    def __init__(self, url: str, **options: Any) -> None:
        self._open = functools.partial(connect, url, **options)
        self._client: Any = None

    def __await__(self) -> Any:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> "ThreadsClient":
        self._client = await asyncio.to_thread(self._open)
        return self

    async def __aexit__(self, *details: Any) -> None:
        await asyncio.to_thread(self._client.__exit__, *details)

    async def consume(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        messages = await asyncio.to_thread(self._client.consume, *args, **kwargs)
        try:
            while (message := await asyncio.to_thread(next, messages, None)) is not None:
                yield ThreadsThing(message)
        finally:
            messages.close()

    async def ack_many(self, messages: list["ThreadsThing"]) -> int:
        told: int = await asyncio.to_thread(self._client.ack_many, [message.thing for message in messages])
        return told

    async def serve(self, queue: str, handler: AsyncHandler, **terms: Any) -> Any:
        """Handlers of the test are coroutines; here they run on the test's loop, called from a thread."""
        loop = asyncio.get_running_loop()

        def blocking(work: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args: asyncio.run_coroutine_threadsafe(work(*args), loop).result()

        wrapped = {
            name: blocking(value) if name.startswith("on_") else value for name, value in terms.items()
        }
        call = functools.partial(self._client.serve, queue, blocking(handler), **wrapped)
        return ThreadsThing(await asyncio.to_thread(call))

    def __getattr__(self, name: str) -> Any:
        return ThreadsThing(self._client).__getattr__(name)


class ThreadsThing:
    """A message, or whatever else a client returns that has methods: those can be awaited."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def keep(self) -> Any:
        """What it returns can be entered either way."""
        return self.thing.keep()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.thing, name)
        if not callable(value):
            return value

        async def call(*args: Any, **kwargs: Any) -> Any:
            result = await asyncio.to_thread(value, *args, **kwargs)
            return ThreadsThing(result) if hasattr(result, "ack") else result

        return call


async def take(messages: AsyncIterator[Any], count: int) -> list[Any]:
    """The first few messages; the loop is left then."""
    taken = []
    async for message in messages:
        taken.append(message)
        if len(taken) == count:
            break
    return taken


class Seen:
    """What handlers have seen, and a way to wait until it is so much."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._more = asyncio.Event()

    def note(self, thing: object) -> None:
        self.things.append(thing)
        self._more.set()

    async def reaches(self, count: int) -> None:
        while len(self.things) < count:
            self._more.clear()
            await self._more.wait()
