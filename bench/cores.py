"""Cores: which processes run where, for benchmarks that would otherwise measure who wins a core.

A process that is pinned hands its cores on to the threads and processes that it starts from then on; those
that are there already are pinned one by one.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def pin(pid: int, cores: set[int]) -> None:
    """Let all threads of a process run on these cores only."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def children(pid: int) -> list[int]:
    """The processes that a process has started, from whichever of its threads."""
    found: list[int] = []
    with suppress(FileNotFoundError):  # the process itself may have ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            # A thread that has ended meanwhile has left its children to another one.
            with suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (thread / "children").read_text(encoding="ascii").split())
    return found


def family(pid: int) -> list[int]:
    """A process, and all that come from it."""
    return [pid, *(one for child in children(pid) for one in family(child))]


@contextmanager
def pinned(who: Callable[[], list[int]], cores: set[int]) -> Iterator[None]:
    """Processes on these cores only while the block runs, and then wherever this process may run."""
    everywhere = os.sched_getaffinity(0)
    for pid in who():
        pin(pid, cores)
    try:
        yield
    finally:
        # Those that were started meanwhile are pinned too: they are looked for once more.
        for pid in who():
            with suppress(FileNotFoundError):
                pin(pid, everywhere)
