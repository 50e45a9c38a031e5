"""Audit: who did what, and who was refused; a line of JSON for each, in a file that is synced.

    {"time": …, "who": "ann", "from": "10.0.0.7", "door": "http", "act": "purge", "queue": "orders",
     "result": "done", "count": 500, "call": 17}

An act of an operator, or of a program, is told twice: `begun`, synced before anything is changed, and `done`,
or the name of the problem, synced before the answer; both have the same `call`. Refusals are gathered: the
same again within `GATHER_SECONDS` becomes one line that has `times`.

Rules that always hold:
  * Nothing is changed by an operator without a line that was synced before.
  * What is kept is bounded: a file of `FILE_BYTES` becomes `NAME.1`, that one `NAME.2`, … `FILES` in all; so
    are the kinds of refusals that are gathered at a time.
  * Nobody but the broker's user can read it, and no link is followed.

How it fails: where a line cannot be written, the log says so, acts go on (a purge is what frees a full disk),
and the next lines are tried again. Where writing hangs, acts wait; `LINES_MAX` lines are kept, no more.
"""

import asyncio
import contextlib
import errno
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Final

from penstock.control.frames import Fields
from penstock.log.private import open_private

FILE_BYTES: Final = 16 << 20
FILES: Final = 8
GATHER_SECONDS: Final = 10.0
KINDS_MAX: Final = 1000
KINDS_PER_SECOND: Final = 1.0
"""Refusals of so many kinds are gathered apart, at once and in the long run: what is beyond counts under one
heading, and whoever makes many cannot have the files change until nothing is left of what others did."""

LINES_MAX: Final = 10_000
"""That wait to be written; what is beyond is not in the audit."""

log = logging.getLogger("penstock.audit")


class Audit:
    """Belongs to one loop; a thread of its own writes."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "audit") if path is not None else None
        self._lines: list[str] = []  # to be written
        self._wait_for: list[Callable[[], None]] = []  # who waits for that
        self._writing: Future[None] | None = None
        self._gathered: dict[tuple[tuple[str, object], ...], int] = {}
        self._gathering: asyncio.TimerHandle | None = None
        self._room, self._room_at = float(KINDS_MAX), time.monotonic()  # for kinds of refusals
        self._fails = False
        self._missed = 0  # lines that there was no room for

    def act(self, fields: Fields, then: Callable[[], None]) -> None:
        """Something is done; `then` when the line is synced."""
        if self._thread is None:
            then()
            return
        self._wait_for.append(then)
        self._add(fields)

    def tell(self, **fields: object) -> None:
        """Something has happened that nobody waits for."""
        if self._thread is not None:
            self._add(fields)

    def refused(self, fields: Fields, times: int = 1) -> None:
        """Somebody was told no; many of a kind become one line."""
        if self._thread is None:
            return
        kind = tuple(sorted(fields.items()))
        if kind not in self._gathered:
            now = time.monotonic()
            self._room = min(self._room + (now - self._room_at) * KINDS_PER_SECOND, KINDS_MAX)
            self._room_at = now
            if self._room < 1:
                fields = {"act": "others", "result": "refused"}
                kind = tuple(fields.items())
            else:
                self._room -= 1
        if kind in self._gathered:
            self._gathered[kind] += times
            return
        self._gathered[kind] = times - 1
        self._add(fields)
        if self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(GATHER_SECONDS, self._tell_gathered)

    def _tell_gathered(self) -> None:
        self._gathering = None
        gathered, self._gathered = self._gathered, {}
        for kind, times in gathered.items():
            if times:
                self._add({**dict(kind), "times": times})

    def _add(self, fields: Fields) -> None:
        now = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
        line = {"time": now.replace("+00:00", "Z"), **fields}
        if len(self._lines) < LINES_MAX:
            self._lines.append(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
        else:
            self._missed += 1
        if self._writing is None:
            asyncio.get_running_loop().call_soon(self._write)
            self._writing = Future()  # what else comes in this turn goes with it

    def _write(self) -> None:
        if self._thread is None or self._path is None:
            return  # It is closed: what was left is written.
        lines, self._lines = self._lines, []
        waiting, self._wait_for = self._wait_for, []
        self._writing = self._thread.submit(append, self._path, lines)
        loop = asyncio.get_running_loop()

        def written(result: "Future[None]") -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._written, result, lines, waiting)

        self._writing.add_done_callback(written)

    def _written(
        self, result: "Future[None]", lines: Sequence[str], waiting: list[Callable[[], None]]
    ) -> None:
        error = result.exception()
        if error is not None and not self._fails:
            log.error("the audit cannot be written, and acts go on without it: %s", error)
        if error is not None:
            log.warning("not in the audit: %s", "".join(lines[:10]).strip())
        if self._missed:
            log.error("the audit took long to write: %d lines are not in it", self._missed)
            self._missed = 0
        self._fails = error is not None
        self._writing = None
        if self._lines:
            self._writing = Future()
            self._write()
        for then in waiting:
            then()

    def close(self) -> None:
        """Write what is left."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._tell_gathered()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
            if self._lines:
                with contextlib.suppress(OSError):  # it was told when it began to fail
                    append(str(self._path), self._lines)
                self._lines = []


def append(path: str, lines: Sequence[str]) -> None:
    """Write, sync, and change to another file where this one is full."""
    raw = "".join(lines).encode("utf-8", "backslashreplace")
    # A pipe that nobody reads, or a device, must not keep everybody waiting.
    fd = open_private(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is no regular file; name another as audit", path)
        if found.st_size and os.pread(fd, 1, found.st_size - 1) != b"\n":
            raw = b"\n" + raw  # The one before was cut by a crash, or by a full disk.
        while raw:
            raw = raw[os.write(fd, raw) :]
        os.fdatasync(fd)
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    if size >= FILE_BYTES:
        for number in range(FILES - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(path if number == 1 else f"{path}.{number - 1}", f"{path}.{number}")
