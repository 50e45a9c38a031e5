"""Workers: where the log's slow work runs, one job after the other.

A job runs off the loop and returns a value or raises; its `done` is called on the loop, by
`poll`, in the order in which jobs were given. `ThreadWorker` is the real one. `InlineWorker`
runs a job only when it is told to, so that tests decide what has happened when the power fails.
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

    def submit(self, job: Job, done: Done) -> None: ...
    def poll(self) -> None: ...
    def wait(self) -> None: ...
    def stop(self) -> None: ...


class ThreadWorker:
    """One thread. `wake` is called from it after each job: it must get `poll` called on the loop."""

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        self._jobs: SimpleQueue[tuple[Job, Done] | None] = SimpleQueue()
        self._ended: deque[tuple[Done, Any, BaseException | None]] = deque()
        self._wake = wake
        self._progress = threading.Condition()
        self._open = 0  # jobs given and not yet ended; guarded by _progress
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job, done: Done) -> None:
        with self._progress:
            self._open += 1
        self._jobs.put((job, done))

    def _run(self) -> None:
        while True:
            item = self._jobs.get()
            if item is None:
                return
            job, done = item
            result, error = run_job(job)
            self._ended.append((done, result, error))
            with self._progress:
                self._open -= 1
                self._progress.notify_all()
            self._wake()

    def poll(self) -> None:
        while self._ended:
            done, result, error = self._ended.popleft()
            done(result, error)

    def wait(self) -> None:
        """Block until every job given so far, and what their ends gave in turn, has ended."""
        while True:
            with self._progress:
                while self._open:
                    self._progress.wait()
            if not self._ended:
                return
            self.poll()

    def stop(self) -> None:
        """End the thread; jobs already given still run."""
        self._jobs.put(None)
        self._thread.join()


class InlineWorker:
    """Jobs wait until `step` or `wait` runs them, in the caller's own thread."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Job, Done]] = deque()
        self._ended: deque[tuple[Done, Any, BaseException | None]] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def submit(self, job: Job, done: Done) -> None:
        self._jobs.append((job, done))

    def step(self) -> bool:
        """Run the oldest job; False where there is none. Its end waits for `poll`."""
        if not self._jobs:
            return False
        job, done = self._jobs.popleft()
        result, error = run_job(job)
        self._ended.append((done, result, error))
        return True

    def poll(self) -> None:
        while self._ended:
            done, result, error = self._ended.popleft()
            done(result, error)

    def wait(self) -> None:
        while self.step() or self._ended:
            self.poll()

    def stop(self) -> None:
        self._jobs.clear()


def run_job(job: Job) -> tuple[Any, BaseException | None]:
    """A job's result or its error. Which errors are final is for `done` to say."""
    try:
        return job(), None
    except Exception as error:  # noqa: BLE001 - handed over, never swallowed: `done` must look at it
        return None, error
