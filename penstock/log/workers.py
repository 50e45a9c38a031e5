"""Workers: where the log's slow work runs, one job after the other.

A job runs off the loop and returns a value or raises; its `done` is called on the loop, by
`poll`, in the order in which jobs were given.

To wake a loop that sleeps costs more than most jobs do. So a job may be given as `quiet`: its end
stays where it is until somebody calls `poll` anyway, or until `hurry` says that it is waited for
after all. A job that has failed is never quiet.
"""

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

Job = Callable[[], Any]  # Any: each job has its own result, handed to its own `done`
Done = Callable[[Any, BaseException | None], None]


class Worker(Protocol):
    """Runs jobs in order, and tells on the loop how they ended."""

    def submit(self, job: Job, done: Done, *, quiet: bool = False) -> None: ...
    def hurry(self) -> None: ...
    def poll(self) -> None: ...
    def wait(self) -> None: ...
    def stop(self) -> None: ...


class _Given:
    """A job on its way. Each field is written by one thread, `quiet` by the loop's."""

    __slots__ = ("done", "error", "job", "quiet", "result")

    def __init__(self, job: Job, done: Done, quiet: bool) -> None:
        self.job = job
        self.done = done
        self.quiet = quiet
        self.result: Any = None  # Any: see Job
        self.error: BaseException | None = None


class ThreadWorker:
    """One thread. `wake` is called from it after a job that is not quiet, and from `hurry`: it must get
    `poll` called on the loop."""

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        self._jobs: SimpleQueue[_Given | None] = SimpleQueue()
        self._last: _Given | None = None  # that was given; None once its end was told
        self._ended: deque[_Given] = deque()
        self._wake = wake
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job, done: Done, *, quiet: bool = False) -> None:
        self._last = given = _Given(job, done, quiet)
        self._jobs.put(given)

    def hurry(self) -> None:
        """The end of the last job given is waited for: let the loop know as soon as it is there."""
        last = self._last
        if last is not None and last.quiet:
            last.quiet = False
            # It may have ended while that was written. To be woken twice does no harm.
            if self._ended:
                self._wake()

    def _run(self) -> None:
        while True:
            given = self._jobs.get()
            if given is None:
                return
            given.result, given.error = run_job(given.job)
            self._ended.append(given)
            if not given.quiet or given.error is not None:
                self._wake()

    def poll(self) -> None:
        while self._ended:
            given = self._ended.popleft()
            if given is self._last:
                self._last = None
            given.done(given.result, given.error)

    def wait(self) -> None:
        """Block until every job given so far, and what their ends gave in turn, has ended."""
        while self._last is not None:
            reached = threading.Event()
            self._jobs.put(_Given(reached.set, _nothing, True))
            reached.wait()
            self.poll()

    def stop(self) -> None:
        """End the thread; jobs already given still run."""
        self._jobs.put(None)
        self._thread.join()


def _nothing(result: None, error: BaseException | None) -> None:
    """For a job that only shows that all before it have ended."""


def run_job(job: Job) -> tuple[Any, BaseException | None]:
    """A job's result or its error. Which errors are final is for `done` to say."""
    try:
        return job(), None
    except Exception as error:  # noqa: BLE001 - handed over, never swallowed: `done` must look at it
        return None, error
