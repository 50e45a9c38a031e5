"""Gauge: how many bytes of bodies the second process holds, where the first one sees it at any time.

The link is not read while the disk is behind, and calls wait in it, which is just when callers pile up. So
this is a number in memory that both processes have: one writes it, the other one reads it, and nobody waits.
"""

import mmap
import os
import tempfile
from typing import Final

BYTES: Final = 8


class Gauge:
    def __init__(self, fd: int) -> None:
        # One word of the machine is written and read as a whole.
        self._word = memoryview(mmap.mmap(fd, BYTES)).cast("q")

    @property
    def held_bytes(self) -> int:
        return self._word[0]

    @held_bytes.setter
    def held_bytes(self, held_bytes: int) -> None:
        self._word[0] = held_bytes


def gauge_file() -> int:
    """A descriptor of the memory of a gauge, which a process can inherit."""
    if hasattr(os, "memfd_create"):  # Linux
        fd = os.memfd_create("penstock-gauge")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, BYTES)
    return fd
