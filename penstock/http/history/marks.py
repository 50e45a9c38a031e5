"""Marks: what happened besides messages, for the charts: `{"at_us", "kind", "text", "queue", "who"}` a line.

    start, stop, restart                     of the broker, and of the API's process alone
    pause, resume, purge, redrive, delete    what operators have done, told by the same line that the audit
                                             gets
    deploy, change, incident, note           what people say (`POST /v1/marks`)

Rules that always hold:
  * Marks are kept as long as the history, in one file of at most `FILE_BYTES`: where there are more, the
    oldest go.
  * A line that is not whole is no mark.

How it fails: `OSError` of the disk. Without a folder marks are in memory, the last `MEMORY_MAX` of them.

One thread at a time may call it.
"""

import json
import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from penstock.control.frames import Fields
from penstock.log.private import make_folder, open_private

FILE: Final = "marks.jsonl"
FILE_BYTES: Final = 1 << 20
MEMORY_MAX: Final = 1000
SAID: Final = ("deploy", "change", "incident", "note")
"""Kinds that people may give."""

ACTS: Final = {
    "pause": "paused",
    "resume": "resumed",
    "purge": "purged",
    "redrive": "dead letters were redriven",
    "delete": "deleted",
}
"""What operators do that leaves a mark, and what it says."""

KINDS: Final = ("start", "stop", "restart", *ACTS, *SAID)


class Marks:
    def __init__(self, folder: str | None, kept_seconds: int) -> None:
        self._folder = folder
        self._kept_us = kept_seconds * 1_000_000
        self._memory: deque[Fields] = deque(maxlen=MEMORY_MAX)

    def add(self, mark: Fields) -> None:
        if self._folder is None:
            self._memory.append(mark)
            return
        raw = json.dumps(mark, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        make_folder(self._folder)
        fd = open_private(self._where(), os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                raw = b"\n" + raw  # The one before was cut by a crash, or by a full disk.
            raw += b"\n"
            while raw:
                raw = raw[os.write(fd, raw) :]
            size = os.fstat(fd).st_size
        finally:
            os.close(fd)
        if size > FILE_BYTES:
            self._keep(list(self.all()), FILE_BYTES // 2)

    def all(self) -> Iterator[Fields]:
        """Every mark, in the order in which they were made."""
        if self._folder is None:
            yield from self._memory
            return
        with suppress(FileNotFoundError), open(self._where(), "rb", opener=_opener) as file:
            for line in file:
                with suppress(ValueError):  # It was cut by a crash.
                    mark = json.loads(line)
                    if isinstance(mark, dict) and mark.keys() >= {"at_us", "kind", "text", "queue", "who"}:
                        yield mark

    def between(self, start_us: int, end_us: int) -> list[Fields]:
        """Those of a time, by time."""
        found = [mark for mark in self.all() if start_us <= mark["at_us"] <= end_us]
        return sorted(found, key=lambda mark: int(mark["at_us"]))

    def trim(self, now: int) -> None:
        """Throw away what is older than the history."""
        first_us = now * 1_000_000 - self._kept_us
        marks = list(self.all())
        kept = [mark for mark in marks if mark["at_us"] >= first_us]
        if len(kept) < len(marks) and self._folder is not None:
            self._keep(kept, FILE_BYTES)

    def _keep(self, marks: list[Fields], bytes_max: int) -> None:
        """The newest of these, and no others."""
        lines: deque[bytes] = deque()
        size = 0
        for mark in reversed(marks):
            line = json.dumps(mark, ensure_ascii=False, separators=(",", ":")).encode(
                "utf-8", "surrogatepass"
            )
            size += len(line) + 1
            if size > bytes_max:
                break
            lines.appendleft(line + b"\n")
        fd = open_private(self._where() + ".tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with open(fd, "wb") as file:
            file.writelines(lines)
        os.rename(self._where() + ".tmp", self._where())

    def _where(self) -> str:
        assert self._folder is not None
        return os.path.join(self._folder, FILE)


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
