"""Blocking: one source for the clients that are awaited and for those that block.

Every call of a client is a coroutine. What it waits for, in the end, is a wire, a turn or a pause, of which
there are two kinds: those of asyncio suspend the coroutine, those for threads block and never suspend it. So
what runs on a loop there is run here to its end in one go. Methods that are shared in this way call no public
method of their own object: that one may be of the other kind.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def run(call: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never suspends."""
    try:
        call.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("a call that blocks has waited for a loop")


# Any: the method is that of a class which is awaited, `self` is of its counterpart which blocks.
def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """A method that is awaited, as one that blocks."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(method(self, *args, **kwargs))

    return call


class Latch:
    """Set once, and waited for. An interrupt in `threading.Event` may leave its lock taken for ever."""

    def __init__(self) -> None:
        self._is_set = False
        self._shut = threading.Lock()
        self._shut.acquire()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._open()

    def wait(self, seconds: float) -> bool:
        """Until it is set, at most so long; whether it is."""
        if not self._is_set and self._shut.acquire(timeout=seconds):
            self._open()  # for the next one who waits
        return self._is_set

    def _open(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is
            self._shut.release()
