"""OverlayDisk: a data folder that anybody may look at and nobody changes.

Recovery cuts torn tails, removes leftovers and sets damaged bytes aside. To see what it would
find without doing any of this to the folder, it runs on an overlay: what is removed, cut or
created stays in memory, everything else is read from the real files. No lock is taken.

Rules that always hold:
  * Nothing in the folder is changed, created or locked.
  * The names are those of the moment when the overlay was made. A file that has gone since then
    is a FileNotFoundError: a broker is at work, and the caller makes another overlay.
  * With an `end`, no byte of the log at or behind that position is there, and no snapshot of a
    later one: a broker may be writing them. Where all snapshots are later, a broker has gone on so
    far that nobody can tell any more how things stood at `end`; then the newest of them is the end.
"""

import errno
import os
from collections.abc import Sequence

from penstock.log.block import Buffer
from penstock.log.disk import File, RealDisk, RealFile
from penstock.log.errors import LogError
from penstock.log.recovery import recover
from penstock.log.segment import parse_segment_name
from penstock.log.snapshot import positions_in, snapshot_name
from penstock.log.state import LogSettings, LogState
from penstock.model.policy import Policies

TRIES_MAX = 10
"""How often to begin again when files go while they are looked at; each time is a new view."""


class LogChanging(LogError):
    """The files of a log went away faster than they could be read. Nothing is wrong with them."""


class _MemoryFile:
    """A file that exists in the overlay only."""

    __slots__ = ("_data",)

    def __init__(self, data: bytearray) -> None:
        self._data = data

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        data = b"".join(buffers)
        missing = position + len(data) - len(self._data)
        if missing > 0:
            self._data += bytes(missing)
        self._data[position : position + len(data)] = data

    def read(self, position: int, length: int) -> bytes:
        return bytes(self._data[position : position + length])

    def sync(self) -> None:
        """There is nothing that could be lost."""

    def size(self) -> int:
        return len(self._data)

    def truncate(self, size: int) -> None:
        del self._data[size:]

    def close(self) -> None:
        """The overlay keeps it."""


class _CutFile:
    """A real file of which at most the first bytes are shown."""

    __slots__ = ("_file", "_name", "_sizes")

    def __init__(self, file: RealFile, name: str, sizes: dict[str, int]) -> None:
        self._file = file
        self._name = name
        self._sizes = sizes

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        """Recovery writes the last blocks once more, as they are. That changes nothing, here either."""
        data = b"".join(buffers)
        if self.read(position, len(data)) != data:
            raise OSError(errno.EROFS, "a stored file cannot be changed through an overlay", self._name)

    def read(self, position: int, length: int) -> bytes:
        return self._file.read(position, max(min(length, self.size() - position), 0))

    def sync(self) -> None:
        """Nothing has been written."""

    def size(self) -> int:
        size = self._file.size()
        return min(size, self._sizes.get(self._name, size))

    def truncate(self, size: int) -> None:
        self._sizes[self._name] = min(size, self.size())

    def close(self) -> None:
        self._file.close()


class OverlayDisk:
    """Implements `disk.Disk`."""

    sets_room_aside = True

    def __init__(self, path: str, end: int | None = None) -> None:
        self._disk = RealDisk(path, read_only=True)
        self._made: dict[str, bytearray] = {}
        self._sizes: dict[str, int] = {}  # of stored files, as far as they are cut
        names = self._disk.names()
        hidden: set[str] = set()
        if end is not None:
            positions = positions_in(names)
            if positions and positions[-1] > end:
                end = positions[0]
            hidden.update(snapshot_name(position) for position in positions if position > end)
            for name in names:
                segment = parse_segment_name(name)
                if segment is not None and segment[0] >= end:
                    hidden.add(name)
                elif segment is not None and not segment[1]:
                    self._sizes[name] = end - segment[0]
        self._stored = {name: name for name in names if name not in hidden}  # to what it is really called

    def create(self, name: str, size: int) -> File:
        self._stored.pop(name, None)
        data = self._made[name] = bytearray(size)
        return _MemoryFile(data)

    def open(self, name: str) -> File:
        if name in self._made:
            return _MemoryFile(self._made[name])
        stored = self._stored.get(name)
        if stored is None:
            raise self._not_there(name)
        return _CutFile(self._disk.open(stored), stored, self._sizes)

    def rename(self, old: str, new: str) -> None:
        if old in self._made:
            self._made[new] = self._made.pop(old)
            self._stored.pop(new, None)
        elif old in self._stored:
            self._stored[new] = self._stored.pop(old)
            self._made.pop(new, None)
        else:
            raise self._not_there(old)

    def remove(self, name: str) -> None:
        if self._made.pop(name, None) is None and self._stored.pop(name, None) is None:
            raise self._not_there(name)

    def _not_there(self, name: str) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.where(name))

    def names(self) -> list[str]:
        return sorted(self._stored.keys() | self._made.keys())

    def sync_names(self) -> None:
        """The names are in memory only."""

    def free_bytes(self) -> int:
        return self._disk.free_bytes()

    def total_bytes(self) -> int:
        return self._disk.total_bytes()

    def room_in(self) -> str:
        return self._disk.room_in()

    def lock(self) -> None:
        """Looking needs no lock."""

    def unlock(self) -> None:
        """Nor does leaving."""

    def where(self, name: str) -> str:
        return self._disk.where(name)

    def publish(self, position: int) -> None:
        """Nobody follows an overlay."""


def replayed(path: str, end: int | None = None) -> tuple[LogState, int]:
    """The state that recovery would find (before `end`), and the position at which it would go on.

    Nobody holds a message in it: who held what is known to a running broker alone.
    """
    for _ in range(TRIES_MAX):
        state = LogState(OverlayDisk(path, end), LogSettings(), Policies())
        try:
            return state, recover(state)
        except FileNotFoundError:
            continue
    raise LogChanging(
        f"data folder {path!r}: its files were replaced {TRIES_MAX} times while they were read; try again"
    )
