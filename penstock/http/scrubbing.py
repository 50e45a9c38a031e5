"""Scrubber: a thread that reads the log's sealed segments (`log/scrub.py`), at a pace that nobody notices.

A pass takes three days where the log is large, less where it is small, and there is one a day at most. The
first process is told of rot, and says whether the segment is still there: a line in the log, `damage` of
`/v1/engine`, the metric `penstock_damage_reports`.
"""

import asyncio
import errno
import logging
import threading
import time
from typing import Final

from penstock.errors import PenstockError
from penstock.http.link import Link
from penstock.log.disk import RealDisk
from penstock.log.scan import Hole
from penstock.log.scrub import Sealed, scrub, sealed_segments

FIRST_SECONDS: Final = 2.0
DAY_SECONDS: Final = 86_400
PACE_MIN, PACE_MAX = 1 << 20, 4 << 20
"""Bytes in a second."""

NOT_OF_THE_DISK: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What this process lacks says nothing of the file: told as damage, it would stay in the log for good."""

log = logging.getLogger("penstock.scrub")


class Scrubber:
    def __init__(self, data: str, link: Link) -> None:
        self._disk = RealDisk(data, read_only=True)
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._over = threading.Event()
        self.bytes = 0
        self.passes = 0

    def start(self) -> None:
        threading.Thread(target=self._run, name="scrub", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _run(self) -> None:
        seconds = FIRST_SECONDS
        while not self._over.wait(seconds):
            began = time.monotonic()
            try:
                self._pass(sealed_segments(self._disk))
            except (OSError, PenstockError) as error:
                log.warning("the log could not be scrubbed, which is tried again in a day: %s", error)
            seconds = max(DAY_SECONDS - (time.monotonic() - began), FIRST_SECONDS)

    def _pass(self, segments: list[Sealed]) -> None:
        log_bytes = segments[-1].base - segments[0].base if segments else 0
        pace = min(max(log_bytes // (3 * DAY_SECONDS), PACE_MIN), PACE_MAX)
        for segment in segments:
            try:
                for found in scrub(self._disk, segment):
                    if isinstance(found, Hole):
                        self._tell(segment, found)
                        continue
                    self.bytes += found
                    if self._over.wait(found / pace):
                        return
            except OSError as error:
                if error.errno in NOT_OF_THE_DISK:
                    raise
                self._tell(segment, Hole(segment.base, segment.base, None), str(error))
        self.passes += 1

    def _tell(self, segment: Sealed, hole: Hole, why: str = "") -> None:
        fields = {"segment": segment.name, "start": hole.start, "end": hole.end, "why": why}
        header = hole.header.pack() if hole.header is not None else b""
        asyncio.run_coroutine_threadsafe(self._link.call("rot", fields, header), self._loop).result()
