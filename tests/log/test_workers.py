"""The thread that does the log's slow work: who is told of a job's end, and when."""

import threading
from collections.abc import Iterator

import pytest

from penstock.log.workers import ThreadWorker

WAIT_SECONDS = 20.0


class Loop:
    """What a worker's owner sees: whether it was woken, and the ends in their order."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self.ends: list[object] = []
        self.worker = ThreadWorker("test", self.woken.set)

    def end(self, result: object, error: BaseException | None) -> None:
        self.ends.append(error if error is not None else result)


@pytest.fixture
def loop() -> Iterator[Loop]:
    one = Loop()
    yield one
    one.worker.stop()


def test_the_end_of_a_job_wakes_the_loop_and_is_told_by_poll(loop: Loop) -> None:
    loop.worker.submit(lambda: 7, loop.end)
    assert loop.woken.wait(WAIT_SECONDS)
    assert loop.ends == []
    loop.worker.poll()
    assert loop.ends == [7]


def test_a_quiet_job_wakes_nobody_and_is_told_by_the_next_poll(loop: Loop) -> None:
    ran = threading.Event()
    loop.worker.submit(lambda: 1, loop.end, quiet=True)
    loop.worker.submit(ran.set, loop.end, quiet=True)
    assert ran.wait(WAIT_SECONDS)  # so the first has ended
    assert not loop.woken.is_set()
    loop.worker.poll()
    assert loop.ends[0] == 1


def test_hurry_before_the_end_of_a_quiet_job_wakes_the_loop_at_its_end(loop: Loop) -> None:
    gate = threading.Event()
    loop.worker.submit(gate.wait, loop.end, quiet=True)
    loop.worker.hurry()
    assert not loop.woken.is_set()
    gate.set()
    assert loop.woken.wait(WAIT_SECONDS)


def test_hurry_after_the_end_of_a_quiet_job_wakes_the_loop(loop: Loop) -> None:
    ended = threading.Event()
    loop.worker.submit(lambda: 1, loop.end, quiet=True)
    loop.worker.submit(ended.set, loop.end, quiet=True)
    assert ended.wait(WAIT_SECONDS)
    loop.worker.hurry()
    assert loop.woken.wait(WAIT_SECONDS)


def test_hurry_with_nothing_given_wakes_nobody(loop: Loop) -> None:
    loop.worker.submit(lambda: 1, loop.end, quiet=True)
    loop.worker.wait()
    loop.worker.hurry()
    assert not loop.woken.is_set()


def test_a_quiet_job_that_fails_wakes_the_loop(loop: Loop) -> None:
    error = OSError("no disk")

    def fail() -> None:
        raise error

    loop.worker.submit(fail, loop.end, quiet=True)
    assert loop.woken.wait(WAIT_SECONDS)
    loop.worker.poll()
    assert loop.ends == [error]


def test_wait_lasts_until_what_the_ends_gave_in_turn_has_ended(loop: Loop) -> None:
    def again(result: object, error: BaseException | None) -> None:
        loop.end(result, error)
        loop.worker.submit(lambda: 2, loop.end, quiet=True)

    loop.worker.submit(lambda: 1, again, quiet=True)
    loop.worker.wait()
    assert loop.ends == [1, 2]
