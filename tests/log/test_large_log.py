"""A log that is much larger than what may be read at a start or kept in memory."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
    import os, sys
    from penstock.model.batch import Batch
    from penstock.model.words import Outcome
    from penstock.log.disk import RealDisk
    from penstock.log.log import Log
    from penstock.log.state import LogSettings
    from tests.log.inline import InlineWorker

    SETTINGS = LogSettings(segment_bytes=16 * 1024 * 1024)
    NOW = 1_700_000_000_000_000

    class CountingFile:
        def __init__(self, file, disk):
            self._file, self._disk = file, disk
        def __getattr__(self, name):
            return getattr(self._file, name)
        def read(self, position, length):
            data = self._file.read(position, length)
            self._disk.bytes_read += len(data)
            return data

    class CountingDisk(RealDisk):
        bytes_read = 0
        def open(self, name):
            return CountingFile(super().open(name), self)

    def memory_bytes():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def opened():
        disk = CountingDisk(sys.argv[1])
        return disk, Log.open(
            disk, NOW, settings=SETTINGS, writer=InlineWorker(), keeper=InlineWorker()
        )

    disk, engine = opened()
    before = memory_bytes()
    for i in range(1000):
        engine.append("orders", Batch.of([b"%-100d" % (1000 * i + j) for j in range(1000)]), NOW)
        engine.flush(NOW)
        engine.wait()
    print(memory_bytes() - before)
    engine.{end}
    disk, engine = opened()
    print(disk.bytes_read)
    print(engine.describe("orders").ready)
    drained = 0
    while slices := engine.take("orders", "ann", 10_000, NOW):
        for piece in slices:
            assert piece.messages()[0] == b"%-100d" % drained
            drained += len(piece)
        engine.settle("orders", "ann", Outcome.ACK, [(0, drained)], NOW)
        engine.flush(NOW)
        engine.wait()
    print(drained, memory_bytes() - before)
    engine.abandon()
"""


@pytest.mark.parametrize(("end", "segments_read"), [("close(NOW)", 1.1), ("abandon()", 2.2)])
def test_a_million_messages_open_without_being_read(tmp_path: Path, end: str, segments_read: float) -> None:
    """What lies before the last snapshot is not read, and that is all but the last of seven segments.

    The last one is looked through to its end, in case that something valid stands behind a torn place;
    after a crash it is also replayed.
    """
    folder = Path("/dev/shm") if os.path.isdir("/dev/shm") else tmp_path
    data = folder / f"penstock-{os.getpid()}-{len(end)}"
    script = textwrap.dedent(SCRIPT).replace("{end}", end)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", script, str(data)], capture_output=True, text=True, check=False, timeout=60
        )
        assert ended.returncode == 0, ended.stderr
        grown_by_filling, bytes_read, ready, drained, grown_by_draining = map(int, ended.stdout.split())
        assert (ready, drained) == (1_000_000, 1_000_000)
        stored = sum(path.stat().st_size for path in data.iterdir())
        assert stored > 100 * 1_000_000
        assert bytes_read < segments_read * 16 * 1024 * 1024
        assert grown_by_filling < 32 * 1024 * 1024
        assert grown_by_draining < 64 * 1024 * 1024
    finally:
        for path in data.iterdir():
            path.unlink()
        data.rmdir()
