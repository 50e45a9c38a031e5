"""Malloc: memory that was freed is kept for the next body, as far as that is not much.

A body of some MiB passes through a few buffers of its size, each of which is freed at once. By default the C
library gives such memory back to the kernel and takes it again page by page, each filled with zeros first.
Measured for 200 MB that are staged in bodies of 8 MiB: 0.9 s of a core of the second process, of which 0.45 s
go into that. Of the 1.3 s that the first process takes for a commit of 400 MB it is 0.35 s.

What it costs: a process that had large bodies keeps up to `KEPT_BYTES` more than it needs, until somebody
calls `give_memory_back`: the broker when a burst is over, the process of the HTTP API some seconds after a
large body.

All threads share one heap. What is free at the end of another one is given back by nobody: a thread that had
read bodies of 4 MiB kept 40 MB, and 60 answers of 11 MiB that threads had made left 540 MB.
"""

import ctypes
from contextlib import suppress
from typing import Final

KEPT_BYTES: Final = 64 << 20
"""Free memory at the end of the heap that is not given back."""

MAPPED_BYTES: Final = 32 << 20
"""A buffer from this size on is memory of its own and goes back to the kernel; glibc takes no more here."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


def keep_freed_memory() -> bool:
    """Tell the C library, before there are threads; False where it has no such knob, which is no harm."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    wanted = ((_M_TRIM_THRESHOLD, KEPT_BYTES), (_M_MMAP_THRESHOLD, MAPPED_BYTES), (_M_ARENA_MAX, 1))
    return all(mallopt(*option) for option in wanted)


def give_memory_back() -> None:
    """Let the kernel have what is free at this moment; within a millisecond, where there is not much."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
