"""The RQ client for threads: the asyncio client in a thread of its own, called from any other.

RQ needs somebody who listens all the time: pings must be answered, deliveries taken, a silent controller
noticed. So this client has one background thread, with a private event loop in which an `AsyncRqClient`
lives; what that does, and when, is said there. Any thread may call any method. Handlers run in other
threads, at most `max` of a queue at a time, and may block; they may use the client, too.
"""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

from penstock.client.async_rq import AsyncRqClient
from penstock.client.errors import ConnectionLost
from penstock.client.fork import begin_anew_after_fork
from penstock.client.managed import Managed
from penstock.client.options import ClientOptions
from penstock.client.rq_serving import AsyncServing, RqRequest
from penstock.protocols import rq

P = ParamSpec("P")
T = TypeVar("T")

Handler = Callable[[RqRequest], bytes | None]
ErrorHandler = Callable[[RqRequest, Exception], bytes | None]
Listener = Callable[[bytes], None]

THREADS_UNBOUNDED = 32
"""How many handlers run at a time where `max` is 0: the broker's bound is off, that of threads is not."""


END_SECONDS = 1.0


class RqServing:
    """A queue that is being served, until `cancel`."""

    def __init__(self, client: "RqClient", serving: AsyncServing) -> None:
        self._client = client
        self._serving = serving

    @property
    def queue(self) -> str:
        return self._serving.queue

    def wait_turn(self, timeout: float | None = None) -> bool:
        """Wait until the broker says that this client consumes the queue. False: not in `timeout` seconds."""
        return self._client._call(self._serving.wait_turn(timeout))

    def cancel(self) -> None:
        """No new requests. What is here already is still answered."""
        self._client._call(self._serving.cancel())


# Any: the method is of the asyncio client, `self` of the one that has it in another thread.
def _called(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """A method of the asyncio client, called from any thread."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._call(method(self._client, *args, **kwargs))
        return result

    return call


class RqClient(Managed):
    """An RQ node. A context manager: leaving it closes it."""

    def __init__(self, url: str, **options: Unpack[ClientOptions]) -> None:
        self._client = AsyncRqClient(url, **options)
        self._pools: dict[str, ThreadPoolExecutor] = {}  # by queue
        self._closed = False
        self._gone = "rq: this client is closed; make another one"
        self._closing = threading.Lock()
        self._submitting = threading.Lock()  # a call is on the loop before it is closed, or not at all
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-rq", daemon=True)
        self._thread.start()
        begin_anew_after_fork(self)
        try:
            self._call(_awaited(self._client))
        except BaseException:
            self._stop()
            raise

    send = _called(AsyncRqClient.send)
    request = _called(AsyncRqClient.request)
    broadcast = _called(AsyncRqClient.broadcast)
    cancel = _called(AsyncRqClient.cancel)

    def send_many(
        self,
        queue: str,
        bodies: Iterable[bytes],
        *,
        retries: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Send messages, and wait until all are stored; how many they were. See `AsyncRqClient.send_many`."""
        # The iterable is the caller's: it is run out in the caller's thread, and not in that of the loop.
        messages = list(bodies)
        return self._call(self._client.send_many(queue, messages, retries=retries, timeout=timeout))

    def serve(
        self,
        queue: str,
        handler: Handler,
        *,
        max: int = 1,  # noqa: A002 - the protocol's own word for it, and the documented name
        priority: int = rq.PRIORITY_DEFAULT,
        exclusive: bool = False,
        on_error: ErrorHandler | None = None,
        on_broadcast: Listener | None = None,
    ) -> RqServing:
        """Let `handler` answer the requests of a queue from now on, at most `max` at a time (0: no bound).

        Returns at once; `wait` keeps a program alive that does nothing else. See `AsyncRqClient.serve`.
        """
        threads = max if max > 0 else THREADS_UNBOUNDED
        pool = ThreadPoolExecutor(threads, thread_name_prefix=f"penstock-rq-{queue}")

        async def handle(request: RqRequest) -> bytes | None:
            return await self._loop.run_in_executor(pool, _contained, handler, request)

        async def failed(request: RqRequest, error: Exception) -> bytes | None:
            assert on_error is not None
            return await self._loop.run_in_executor(pool, _contained, on_error, request, error)

        async def listen(body: bytes) -> None:
            assert on_broadcast is not None
            await self._loop.run_in_executor(pool, _contained, on_broadcast, body)

        serving = self._call(
            self._client.serve(
                queue,
                handle,
                max=max,
                priority=priority,
                exclusive=exclusive,
                on_error=failed if on_error is not None else None,
                on_broadcast=listen if on_broadcast is not None else None,
            )
        )
        former = self._pools.get(queue)
        self._pools[queue] = pool
        if former is not None:  # the queue was served before; its handlers may still be busy
            former.shutdown(wait=False)
        return RqServing(self, serving)

    def wait(self, timeout: float | None = None) -> bool:
        """Until the client is closed; False where it was not within `timeout` seconds.

        ConnectionLost where queues are served and no controller can be found any more.
        """
        try:
            return self._call(self._client.wait(timeout))
        except ConnectionLost:
            if self._closed:
                return True
            raise

    def close(self) -> None:
        """Take no new work, wait up to `drain_seconds` for handlers and answers, then end."""
        with self._closing:
            if self._closed:
                return
            with self._submitting:
                self._closed = True
                closing = asyncio.run_coroutine_threadsafe(self._client.close(), self._loop)
            try:
                self._result(closing)
            finally:
                self._stop()

    def forked(self) -> None:
        """This is a child, which does not have the thread."""
        self._closed = True
        self._closing, self._submitting = threading.Lock(), threading.Lock()
        self._gone = "rq: this client was made before a fork, and has no thread here; make another one"

    def _call(self, call: Coroutine[Any, Any, T]) -> T:
        with self._submitting:
            if self._closed:
                call.close()
                raise ConnectionLost(self._gone)
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
        return self._result(future)

    @staticmethod
    def _result(future: Future[T]) -> T:
        try:
            return future.result()
        except CancelledError:
            raise ConnectionLost("rq: this client was closed by another thread") from None
        except BaseException:
            future.cancel()  # nobody waits for it any more: the caller was interrupted
            raise

    def _stop(self) -> None:
        self._closed = True
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _contained(work: Callable[..., T], *args: object) -> T:
    """What a handler returns. One that exits has failed, as by any error: `sys.exit` would end the loop, and
    so this client, in silence; and of a StopIteration the loop would never hear."""
    try:
        return work(*args)
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        raise RuntimeError(f"the handler has ended by {error!r}") from error


async def _awaited(client: AsyncRqClient) -> AsyncRqClient:
    return await client


async def _end_tasks() -> None:
    """Let the calls of other threads end by themselves, which they do when the client is closed."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=END_SECONDS)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
