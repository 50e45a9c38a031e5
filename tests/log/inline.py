"""A worker that runs a job only when it is told to, so that a test decides what has happened when the power
fails."""

from collections import deque
from typing import Any

from penstock.log.workers import Done, Job, run_job


class InlineWorker:
    """Jobs wait until `step` or `wait` runs them, in the caller's own thread."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Job, Done]] = deque()
        self._ended: deque[tuple[Done, Any, BaseException | None]] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def submit(self, job: Job, done: Done, *, quiet: bool = False) -> None:
        self._jobs.append((job, done))

    def hurry(self) -> None:
        """Whoever runs the jobs polls."""

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
