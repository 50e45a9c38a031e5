"""Disks that fail brokers: one that is small and gets full, and one that has changed a bit."""

import errno
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.http.api import Api
from tests.server.harness import BrokerProcess


class SmallDisk(BrokerProcess):
    """A broker whose disk is a small one that nobody else sees, and that goes with it."""

    def __init__(self, folder: Path, size_mib: int, *flags: str) -> None:
        self._disk = folder / "disk"
        self._disk.mkdir()
        self._size_mib = size_mib
        super().__init__(folder, "--data", str(self._disk / "data"), *flags)

    def command(self) -> list[str]:
        mount = f'mount -t tmpfs -o size={self._size_mib}m tmpfs "{self._disk}" && exec "$@"'
        return ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh", *super().command()]

    @property
    def ballast(self) -> Path:
        """A file beside the log, as the broker's process sees it."""
        return Path(f"/proc/{self.pid}/root{self._disk}/ballast")

    def fill(self) -> None:
        """Leave no byte free."""
        with self.ballast.open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise


@contextmanager
def broker_on_small_disk(folder: Path) -> Iterator[SmallDisk]:
    """A broker with a disk of 16 MiB, running; the test is skipped where no disk can be made."""
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            ["unshare", "--map-root-user", "--mount", "true"], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("this system does not let us have a file system of our own")
    segment = ("--log-segment-bytes", str(1 << 20))
    broker = SmallDisk(folder, 16, "--http", "127.0.0.1:0", *segment)
    broker.start()
    yield broker
    if broker.running:
        broker.kill()


def damage(broker: BrokerProcess, queue: str) -> Path:
    """Send a few messages, change a bit of one of them in the files, and start again. The segment."""
    with Api(broker.ports["http"]) as api:
        api.send(queue, *[b"%d" % number * 1000 for number in range(5)])
    broker.kill()
    (segment,) = (broker.folder / "data").glob("*.seg")
    content = bytearray(segment.read_bytes())
    content[content.index(b"3" * 1000)] ^= 1
    segment.write_bytes(content)
    broker.start()
    return segment
