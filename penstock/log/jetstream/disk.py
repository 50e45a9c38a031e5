"""StreamDisk: the disk of a log that a cluster shares. What must be safe goes to a stream, all of it to a
folder.

It does what `log/disk.py` asks of a disk. Bytes are written to a local file, from which they are
read; `sync` sends them to the stream and waits until it has stored them, on as many nodes as it has
replicas. No local file is ever synced: whatever this machine loses, the stream has.

    File.sync     what was written to a file since the last time: one record, or several that count as one
    sync_names    whole files that got their name (snapshots, compacted segments), and files that are gone
    create        a file with no room set aside for it; files that lie ready, and unfinished ones, stay here
    free_bytes    what the stream has room for (`room.py`), or the folder, where that is less

Fault model: of what was not synced nothing is safe, of what was synced everything, and in order: this disk
forgets less than a local one does. What was written and not synced is lost with the process.

How it fails: a broker that has been overtaken, or is told to stop, gets an OSError from `sync`, which is
final for its log. As long as the cluster cannot store anything, `sync` waits.
"""

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.log.block import Buffer
from penstock.log.committer import SPARE
from penstock.log.disk import RealDisk, RealFile
from penstock.log.jetstream.appender import Appender
from penstock.log.jetstream.errors import JetStreamTrouble
from penstock.log.jetstream.replica import RecordIndex, is_shared
from penstock.log.jetstream.room import Bound


class StreamFile:
    """A local file whose content belongs to the stream. Only what it was opened for is written to it."""

    def __init__(self, name: str, local: RealFile, appender: Appender, index: RecordIndex) -> None:
        self._name = name
        self._local = local
        self._appender = appender
        self._index = index
        self._unsent: list[tuple[int, bytes]] = []

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        data = b"".join(buffers)
        self._local.write(position, (data,))
        self._unsent.append((position, data))

    def sync(self) -> None:
        if not self._unsent:
            return
        with _as_os_error():
            before = self._appender.seq_last
            self._appender.write(self._name, self._unsent)
        # Records of others may stand between: it is enough to know from where on to read.
        self._index.note(self._name, self._unsent[0][0], before + 1)
        self._unsent = []

    def truncate(self, size: int) -> None:
        self.sync()
        self._local.truncate(size)
        with _as_os_error():
            self._appender.truncate(self._name, size)

    def read(self, position: int, length: int) -> bytes:
        return self._local.read(position, length)

    def size(self) -> int:
        return self._local.size()

    def close(self) -> None:
        self._local.close()


class LocalFile(RealFile):
    """A file that nobody else needs: there is nothing to make safe."""

    def sync(self) -> None:
        """It is a cache."""


class StreamDisk:
    """Implements `disk.Disk`."""

    sets_room_aside = False

    def __init__(self, path: str, appender: Appender, index: RecordIndex) -> None:
        self._local = RealDisk(path)
        self.path = path
        self.appender = appender
        self._index = index
        self._names: dict[int, list[tuple[bool, str]]] = {}  # by thread: (it goes, a file), not told yet

    def _opened(self, name: str, local: RealFile) -> "StreamFile | RealFile":
        return StreamFile(name, local, self.appender, self._index) if is_shared(name) else local

    def create(self, name: str, size: int) -> "StreamFile | RealFile":
        return self._opened(name, self._open_local(name, os.O_CREAT | os.O_TRUNC))

    def open(self, name: str) -> "StreamFile | RealFile":
        return self._opened(name, self._open_local(name, 0))

    def _open_local(self, name: str, flags: int) -> LocalFile:
        return LocalFile(self._local.descriptor(name, os.O_RDWR | flags))

    def rename(self, old: str, new: str) -> None:
        self._index.forget(new)  # what it may say of a try that was not finished
        self._local.rename(old, new)
        if is_shared(old):
            self._later(True, old)
        if is_shared(new) and not old.startswith(SPARE):
            self._later(False, new)

    def remove(self, name: str) -> None:
        self._local.remove(name)
        self._index.forget(name)
        if is_shared(name):
            self._later(True, name)

    def _later(self, goes: bool, name: str) -> None:
        self._names.setdefault(threading.get_ident(), []).append((goes, name))

    def sync_names(self) -> None:
        """Of what this thread has done."""
        waiting = self._names.pop(threading.get_ident(), [])
        gone = {name for goes, name in waiting if goes}
        with _as_os_error():
            for name in dict.fromkeys(name for goes, name in waiting if not goes and name not in gone):
                before = self.appender.seq_last
                with open(self.where(name), "rb") as file:
                    self.appender.send_file(name, file.read())
                self._index.note(name, 0, before + 1)
            for name in gone:
                if not os.path.exists(self.where(name)):
                    self.appender.remove(name)

    def names(self) -> list[str]:
        return self._local.names()

    def _bound(self) -> Bound:
        local = Bound(self.path, self._local.total_bytes(), self._local.free_bytes())
        stream, refused = self.appender.room.bound, self.appender.room.refused
        if refused:
            return Bound(f"NATS, which says {refused!r}", stream.total if stream else local.total, 0)
        return local if stream is None or local.free < stream.free else stream

    def free_bytes(self) -> int:
        return self._bound().free

    def total_bytes(self) -> int:
        return self._bound().total

    def room_in(self) -> str:
        return self._bound().what

    def lock(self) -> None:
        self._local.lock()

    def unlock(self) -> None:
        self._local.unlock()

    def where(self, name: str) -> str:
        return self._local.where(name)

    def publish(self, position: int) -> None:
        self._local.publish(position)


@contextmanager
def _as_os_error() -> Iterator[None]:
    """What the stream says no with, in the words of a disk."""
    try:
        yield
    except JetStreamTrouble as error:
        raise OSError(errno.EIO, str(error)) from error
