"""Freed memory is kept: the same buffer again costs no page faults."""

import platform
import subprocess
import sys

import pytest

from tests.server.harness import ROOT

PROGRAM = """
import resource
from penstock.common.malloc import keep_freed_memory

def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        parts = [b"x" * (8 << 20) for _ in range(4)]
        del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

said = keep_freed_memory()
faults()
print(said, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has knobs of its own")
def test_large_buffers_are_used_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    )
    said, faults = done.stdout.split()
    assert said == "True"
    assert int(faults) < 1000  # 20 times 32 MiB are 160,000 pages


THREADS = """
import threading
from pathlib import Path
from penstock.common.malloc import give_memory_back, keep_freed_memory

def make() -> None:
    together.wait()
    made.extend([b"x" * (size << 20) for size in (8, 11, 11, 11)])
    together.wait()
    together.wait()

keep_freed_memory()
together, made = threading.Barrier(9), []
for _ in range(8):
    threading.Thread(target=make, daemon=True).start()
together.wait()
together.wait()
made.clear()
give_memory_back()
print(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has knobs of its own")
def test_what_threads_have_freed_goes_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", THREADS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 100 << 20  # of 328 MiB
