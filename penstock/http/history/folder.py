"""Folder: the files of the history, in `DATA/history`.

    now-HOUR      the hour that runs, a chunk a minute with all queues in it
    10s-HOUR      an hour that is over, by shelves; kept for six hours
    1m-START      the same in steps of a minute, eight hours in a file; kept for two days
    10m-START     the same in steps of ten minutes, a day in a file; kept for fourteen days

When an hour is over it is folded: its steps become coarser ones, behind those of the hours before, and its
own file is written once more by shelves. Numbers in names are seconds since 1970.

Rules that always hold:
  * A file is appended to, or written whole under another name and renamed. Whatever a crash leaves behind,
    the next fold of that hour makes it right: of two chunks with the same start and shelf the first one
    counts.
  * Nothing is synced but what replaces an hour's file, once an hour. A power cut may take the last minutes.
  * All files together have at most `BYTES_MAX` bytes, however many queues there are. An hour has its share of
    that on each level: where all queues would take more, those in which least happened in that hour are left
    out, and the chunks say so. With ordinary traffic there is room for some thousand queues in steps of ten
    seconds, and for some hundred busy ones over fourteen days. The whole is never left out.
  * Times do not go back: what claims to be from later than now is thrown away when the folder is opened, and
    the keeper appends nothing that is older than what is there.
  * Files are the broker's own user's, and no link is followed.

How it fails: `OSError` where the disk fails. Damage is left out, with a line in the log for each file.

One thread at a time may call it.
"""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from penstock.http.history import chunks
from penstock.http.history.chunks import CUT, EVERYTHING, FRESH, SHELVES, Chunk, ChunkDamaged, shelf_of
from penstock.http.history.steps import EMPTY, STEP_SECONDS, WHOLE, Key, Step, coarser
from penstock.log.private import make_folder, open_private

HOUR: Final = 3600
DAY: Final = 24 * HOUR
NOW: Final = "now"
_NAME: Final = re.compile(r"(now|10s|1m|10m)-(\d{1,12})\.hist")
_PART: Final = ".tmp"

log = logging.getLogger("penstock.history")


class Level(NamedTuple):
    """How finely time is cut, how long it is kept so, how much of it is in a file, and what all of it may
    be."""

    name: str
    seconds: int
    kept_seconds: int
    file_seconds: int
    bytes_max: int


LEVELS: Final = (
    Level("10s", STEP_SECONDS, 6 * HOUR, HOUR, 48 << 20),
    Level("1m", 60, 2 * DAY, 8 * HOUR, 64 << 20),
    Level("10m", 600, 14 * DAY, DAY, 128 << 20),
)
NOW_BYTES_MAX: Final = 32 << 20
"""Of an hour that runs; what is beyond is left out."""

MINUTE_BYTES_MAX: Final = NOW_BYTES_MAX // 60
ROWS_AT_ONCE: Final = 2000
"""About so many steps are in memory while an hour is folded."""

BYTES_MAX: Final = sum(level.bytes_max for level in LEVELS) + 2 * NOW_BYTES_MAX
"""Of everything, with one hour that is folded at the moment."""

Rows = dict[Key, list[Step]]


class Part(NamedTuple):
    """The rows of a chunk."""

    flags: int
    rows: Rows


class Folder:
    """`now`: in seconds since 1970. `days`: how long the coarsest level is kept."""

    def __init__(self, path: str, days: int = 14) -> None:
        self._path = path
        self._kept = [min(level.kept_seconds, days * DAY) for level in LEVELS]
        self._sizes: dict[str, int] = {}  # of files whose end is known to be whole
        self._told: set[str] = set()  # damaged files

    # --- writing ---------------------------------------------------------------------------------

    def open(self, now: int) -> int:
        """Make it ready for this moment; where what is known ends."""
        make_folder(self._path)
        for name in os.listdir(self._path):
            found = _NAME.fullmatch(name)
            late = found is not None and int(found[2]) > now
            if late:
                log.warning("history: %s is from later than now, and is thrown away", name)
            if late or name.endswith(_PART):
                self._remove(name)
        last = 0
        for hour in self._starts(NOW):
            name = f"{NOW}-{hour}.hist"
            for part in self._each(name, self._walk(name), WHOLE.__eq__):
                last = max([last, *(step.at + STEP_SECONDS for step in part.rows.get(WHOLE, ()))])
        return last

    def append(self, chunk: bytes, start: int) -> None:
        """A chunk of the hour that runs."""
        self._append(f"{NOW}-{start // HOUR * HOUR}.hist", [chunk], NOW_BYTES_MAX)

    def tidy(self, now: int) -> None:
        """Fold the hours that are over, and throw away what is old, or too much."""
        for hour in self._starts(NOW):
            if hour + HOUR <= now:
                self._fold(hour)
        for level, kept in zip(LEVELS, self._kept, strict=True):
            starts = self._starts(level.name)
            sizes = {start: self._size(f"{level.name}-{start}.hist") for start in starts}
            total = sum(sizes.values())
            for start in starts:
                if start + level.file_seconds <= now - kept or total > level.bytes_max:
                    self._remove(f"{level.name}-{start}.hist")
                    total -= sizes[start]

    def _fold(self, hour: int) -> None:
        """One file becomes a part of three. Whenever it is interrupted, it can be done again."""
        name = f"{NOW}-{hour}.hist"
        found = self._walk(name)
        weights: dict[Key, int] = {}
        for part in self._each(name, found, None):
            for key, steps in part.rows.items():
                weights[key] = weights.get(key, 0) + sum(sum(it.counted) + it.standing[0] for it in steps)
        weights.pop(WHOLE, None)
        by_weight = sorted(weights, key=lambda key: (-weights[key], key))
        keeps = [len(by_weight)] * len(LEVELS)
        while True:
            made = self._folded(name, found, hour, [{WHOLE, *by_weight[:keep]} for keep in keeps])
            fits = True
            for number, level in enumerate(LEVELS):
                share = level.bytes_max * HOUR // level.kept_seconds
                size = sum(map(len, made[number]))
                if size > share and keeps[number]:
                    keeps[number] = int(keeps[number] * min(share / size, 0.95) * 0.95)
                    fits = False
            if fits:
                break
        for number, level in reversed(list(enumerate(LEVELS))):
            start = hour // level.file_seconds * level.file_seconds
            self._append(f"{level.name}-{start}.hist", made[number], level.bytes_max, anew=number == 0)
        self._remove(name)

    def _folded(self, name: str, found: list[Chunk], hour: int, keys: list[set[Key]]) -> list[list[bytes]]:
        """For each level the chunks of an hour, with these queues; a few shelves at a time, because steps
        take much more room in memory than in a file."""
        made: list[list[bytes]] = [[] for _ in LEVELS]
        everyone = set().union(*keys)
        group = max(SHELVES * ROWS_AT_ONCE // max(len(everyone) * HOUR // STEP_SECONDS, 1), 1)
        cut = any(chunk.header.flags & CUT for chunk in found)
        for first in range(0, SHELVES, group):
            few = {key for key in everyone if first <= shelf_of(key) < first + group}
            if not few:
                continue
            rows = told_in_full(self._each(name, found, {WHOLE, *few}.__contains__))
            for shelf in range(first, min(first + group, SHELVES)):
                its = [key for key in rows if key in few and shelf_of(key) == shelf]
                for number, level in enumerate(LEVELS):
                    coarse = {
                        key: list(coarser(rows[key], level.seconds)) for key in its if key in keys[number]
                    }
                    flags = CUT if cut or len(keys[number]) < len(everyone) else 0
                    if coarse:
                        made[number].append(chunks.encode(coarse, hour, level.seconds, number, flags, shelf))
        return made

    def _append(self, name: str, made: Iterable[bytes], bytes_max: int, anew: bool = False) -> None:
        """Behind what is whole in a file; or instead of it."""
        target = name + _PART if anew else name
        fd = open_private(self._where(target), os.O_RDWR | os.O_CREAT | (os.O_TRUNC if anew else 0))
        try:
            end = 0 if anew else self._end(name, fd)
            raw = b"".join(made)
            if end + len(raw) > bytes_max:
                log.warning("history: %s is full, and gets no more", name)
                return
            try:
                at = end
                while at < end + len(raw):
                    at += os.pwrite(fd, raw[at - end :], at)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, end)
                raise
            if anew:
                os.fdatasync(fd)
                os.rename(self._where(target), self._where(name))
            self._sizes[name] = end + len(raw)
        finally:
            os.close(fd)

    def _end(self, name: str, fd: int) -> int:
        """Where to go on: behind the last chunk that is whole. What a crash has torn is cut off."""
        size = os.fstat(fd).st_size
        if self._sizes.get(name) == size:
            return size
        end = 0
        for chunk in chunks.walk(lambda at, length: os.pread(fd, length, at), size, lambda at, length: None):
            end = chunk.position + chunks.HEADER_BYTES + chunk.header.length
        if end < size:
            log.warning(
                "history: %s: %d bytes at its end were not written whole, and are cut", name, size - end
            )
            os.ftruncate(fd, end)
        return end

    # --- reading ---------------------------------------------------------------------------------

    def first(self) -> list[int]:
        """From when on each level has something: the hour that runs counts for all of them."""
        firsts = []
        for level in LEVELS:
            first = min(self._starts(NOW), default=1 << 60)
            for start in self._starts(level.name)[:1]:
                first = min(
                    [first, *(chunk.header.start for chunk in self._walk(f"{level.name}-{start}.hist"))]
                )
            firsts.append(first)
        return firsts

    def read(self, keys: Iterable[Key], start: int, end: int, seconds: int) -> dict[int, list[Part]]:
        """By hours, what is known of these queues in a time, in steps that fit `seconds`."""
        wanted = set(keys)
        shelves = {EVERYTHING, *map(shelf_of, wanted)}
        number = max(it for it, level in enumerate(LEVELS) if seconds % level.seconds == 0)
        level = LEVELS[number]
        hours: dict[int, list[Part]] = {}
        unfolded = self._starts(NOW)
        for begin in self._starts(level.name):
            if begin >= end or begin + level.file_seconds <= start:
                continue
            name = f"{level.name}-{begin}.hist"
            seen: set[tuple[int, int]] = set()
            for chunk in self._walk(name):
                hour, shelf = chunk.header.start, chunk.header.shelf
                outside = hour >= end or hour + HOUR <= start
                if shelf not in shelves or outside or (hour, shelf) in seen or hour in unfolded:
                    continue
                part = self._decoded(name, chunk, wanted.__contains__)
                if part is not None:
                    seen.add((hour, shelf))
                    hours.setdefault(hour, []).append(part)
        for hour in unfolded:
            if hour < end and hour + HOUR > start:
                name = f"{NOW}-{hour}.hist"
                hours[hour] = list(self._each(name, self._walk(name), wanted.__contains__))
        return hours

    def _each(
        self, name: str, found: Iterable[Chunk], wanted: Callable[[Key], bool] | None
    ) -> Iterator[Part]:
        for chunk in found:
            part = self._decoded(name, chunk, wanted)
            if part is not None:
                yield part

    def _walk(self, name: str) -> list[Chunk]:
        def damaged(at: int, length: int) -> None:
            self._damaged(name, f"{length} bytes at {at} are not what was written")

        with self._reading(name) as fd:
            if fd is None:
                return []
            size = os.fstat(fd).st_size
            return list(chunks.walk(lambda at, length: os.pread(fd, length, at), size, damaged))

    def _decoded(self, name: str, chunk: Chunk, wanted: Callable[[Key], bool] | None) -> Part | None:
        with self._reading(name) as fd:
            if fd is None:
                return None
            body = os.pread(fd, chunk.header.length, chunk.position + chunks.HEADER_BYTES)
        try:
            return Part(chunk.header.flags, chunks.decode(body, chunk.header, wanted))
        except ChunkDamaged as error:
            self._damaged(name, f"the chunk at {chunk.position}: {error}")
            return None

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[int | None]:
        try:
            fd = os.open(self._where(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            self._damaged(name, str(error))
            yield None
            return
        try:
            yield fd
        finally:
            os.close(fd)

    def _damaged(self, name: str, what: str) -> None:
        if name not in self._told:
            self._told.add(name)
            log.warning("history: %s: %s; the rest is shown", name, what)

    # --- names -----------------------------------------------------------------------------------

    def _starts(self, kind: str) -> list[int]:
        found = map(_NAME.fullmatch, os.listdir(self._path))
        return sorted(int(it[2]) for it in found if it is not None and it[1] == kind)

    def _where(self, name: str) -> str:
        return os.path.join(self._path, name)

    def _size(self, name: str) -> int:
        return os.lstat(self._where(name)).st_size

    def _remove(self, name: str) -> None:
        self._sizes.pop(name, None)
        self._told.discard(name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._where(name))


def minute(rows: Rows, flags: int, start: int) -> bytes:
    """The chunk of a minute; with fewer queues, those in which most happens, where it would be too large."""
    keep = len(rows)
    by_weight = sorted(rows, key=lambda key: (key != WHOLE, -sum(sum(step.counted) for step in rows[key])))
    while True:
        few = {key: rows[key] for key in by_weight[:keep]}
        made = chunks.encode(few, start, STEP_SECONDS, 0, flags, EVERYTHING)
        if len(made) <= MINUTE_BYTES_MAX or keep == 1:
            return made
        keep, flags = max(int(keep * min(MINUTE_BYTES_MAX / len(made), 0.95) * 0.95), 1), flags | CUT


def told_in_full(parts: Iterable[Part]) -> Rows:
    """Chunks of an hour as one. Where nobody had looked for a while, what is not told of then is empty."""
    rows: Rows = {}
    for part in parts:
        if part.flags & FRESH and not part.flags & CUT and rows:
            began = min((steps[0].at for steps in part.rows.values() if steps), default=0)
            for key, steps in rows.items():
                new = part.rows.get(key)
                if steps[-1].standing != EMPTY and (not new or new[0].at != began):
                    steps.append(Step(began))
        for key, steps in part.rows.items():
            known = rows.setdefault(key, [])
            known += (step for step in steps if not known or step.at > known[-1].at)
    return {key: steps for key, steps in rows.items() if steps}
