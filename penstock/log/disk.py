"""The disk, as the log uses it: a folder of files, written at positions, synced by name.

# Fault model

What the log assumes of a disk, and what the simulated disk of the tests does to it:

  * A write that returned may be lost until `File.sync` has returned after it. A crash keeps any
    subset of the writes since the last sync, in any order, and may tear each of them.
  * A byte that was synced stays as it was written. (A checksum finds out when it does not.)
  * A created, renamed or removed name may be forgotten until `Disk.sync_names` has returned.
  * `write` may fail for lack of room (ENOSPC): some of its bytes may be there. The same bytes
    may be written again to the same place later.
  * Any other failed write, and every failed sync, is final: what is on the disk is unknown, and
    a second sync that succeeds proves nothing. The log stops.

Only the log's own threads call these; a `File` is not shared between writers.
"""

import errno
import fcntl
import logging
import mmap
import os
import re
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

from penstock.log.block import Buffer
from penstock.log.errors import LogInUse
from penstock.log.private import OTHERS, close_to_others, make_folder, open_private

WATERMARK = "watermark"
STAGES = "stages"
"""A folder among the log's files that is not the log's: parts of transactions wait there."""

HISTORY = "history"
"""Another one: how the queues did, for charts (`penstock/http/history`)."""

LOST_FOUND = "lost+found"
"""In the root of a new volume: the file system's own."""

AUDIT = "audit.jsonl"
"""What names of files begin with that are not the log's either: who did what."""

RESTORING = "restoring"
"""A file that is there while a restore into the folder is not finished: nobody may take it for a log."""

LOCK_BYTES_MAX = 256
IOV_MAX = 1024
JOIN_BYTES_MAX = 64 * 1024
"""Below this, joining buffers in memory is cheaper than handing them to the kernel one by one."""

_OURS: Final = re.compile(
    r"(lock|watermark|restoring|stages|history|audit\.jsonl|log|records|replica|kept|dashboard|\d{20}(\.\d+)?\.seg|(snapshot|spare)-\d+)(\.\w+)?"
)
"""What a data folder holds."""

log = logging.getLogger("penstock.log")


class File(Protocol):
    """An open file."""

    def write(self, position: int, buffers: Sequence[Buffer]) -> None: ...
    def read(self, position: int, length: int) -> bytes: ...
    def sync(self) -> None: ...
    def size(self) -> int: ...
    def truncate(self, size: int) -> None: ...
    def close(self) -> None: ...


class Disk(Protocol):
    """A folder."""

    sets_room_aside: bool  # a file has its room from `create` on

    def create(self, name: str, size: int) -> File: ...
    def open(self, name: str) -> File: ...
    def rename(self, old: str, new: str) -> None: ...
    def remove(self, name: str) -> None: ...
    def names(self) -> list[str]: ...
    def sync_names(self) -> None: ...
    def free_bytes(self) -> int: ...
    def total_bytes(self) -> int: ...
    def room_in(self) -> str: ...
    def lock(self) -> None: ...
    def unlock(self) -> None: ...
    def where(self, name: str) -> str: ...
    def publish(self, position: int) -> None: ...


class Watermark:
    """One number that another process can read while we change it.

    An aligned 8-byte store into shared memory: a reader sees the old value or the new one.
    """

    def __init__(self, path: str, *, writable: bool) -> None:
        fd = (
            open_private(path, os.O_RDWR | os.O_CREAT)
            if writable
            else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        )
        try:
            if writable:
                # Room for it is found now: a store into a map of a file without any would end the process.
                os.pwrite(fd, os.pread(fd, 8, 0).ljust(8, b"\0"), 0)
            self._map = mmap.mmap(fd, 8, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        finally:
            os.close(fd)
        self._number = memoryview(self._map).cast("Q")

    def get(self) -> int:
        return self._number[0]

    def set(self, value: int) -> None:
        self._number[0] = value

    def close(self) -> None:
        self._number.release()
        self._map.close()


class RealFile:
    """A file descriptor."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        """All the buffers, one after the other, from `position` on."""
        total = sum(map(len, buffers))
        if total <= JOIN_BYTES_MAX:
            buffers = (b"".join(buffers),)
        at = 0
        while at < len(buffers):
            group = buffers[at : at + IOV_MAX]
            expected = sum(map(len, group))
            written = os.pwritev(self._fd, group, position)
            if written != expected:
                # A short write: say the rest again, joined; this is rare.
                rest = memoryview(b"".join(group))[written:]
                while rest:
                    count = os.pwrite(self._fd, rest, position + written)
                    if count == 0:
                        raise OSError(errno.EIO, "the disk takes no more bytes and gives no reason")
                    written += count
                    rest = rest[count:]
            position += expected
            at += IOV_MAX

    def read(self, position: int, length: int) -> bytes:
        """At most `length` bytes; fewer at the end of the file."""
        data = more = os.pread(self._fd, length, position)
        while more and len(data) < length:
            more = os.pread(self._fd, length - len(data), position + len(data))
            data += more
        return data

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def forget_cached(self) -> None:
        """Have the next read come from the disk, as far as nobody else uses what is in memory."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RealDisk:
    """A folder of the local file system.

    From `lock` on it is that folder, whatever has its name: nothing is created, renamed or removed in another
    one that somebody has put in its place.
    """

    LOCK = "lock"
    sets_room_aside = True

    def __init__(self, path: str, *, read_only: bool = False) -> None:
        self.path = os.fspath(path)
        self._read_only = read_only
        self._lock_fd = -1
        self._folder_fd = -1  # from the lock on; a sync of names must not fail for lack of descriptors
        self._watermark: Watermark | None = None
        if not read_only:
            make_folder(self.path)

    def where(self, name: str) -> str:
        return os.path.join(self.path, name)

    def create(self, name: str, size: int) -> RealFile:
        """A new file with room for `size` bytes: writing into it cannot run out of disk."""
        fd = self.descriptor(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            if size:
                os.posix_fallocate(fd, 0, size)
        except OSError:
            os.close(fd)
            self.remove(name)
            raise
        return RealFile(fd)

    def open(self, name: str) -> RealFile:
        return RealFile(self.descriptor(name, os.O_RDONLY if self._read_only else os.O_RDWR))

    def descriptor(self, name: str, flags: int) -> int:
        path, folder = self._place(name)
        if flags & (os.O_RDWR | os.O_WRONLY):
            return open_private(path, flags, folder=folder, shown=self.where(name))
        return os.open(path, flags | os.O_CLOEXEC, dir_fd=folder)

    def _place(self, name: str) -> tuple[str, int | None]:
        """A name as the system takes it, and in which folder."""
        return (name, self._folder_fd) if self._folder_fd >= 0 else (self.where(name), None)

    def rename(self, old: str, new: str) -> None:
        (before, folder), (after, _) = self._place(old), self._place(new)
        os.rename(before, after, src_dir_fd=folder, dst_dir_fd=folder)

    def remove(self, name: str) -> None:
        path, folder = self._place(name)
        os.unlink(path, dir_fd=folder)

    def names(self) -> list[str]:
        """Of everything that may be the log's."""
        place = self._folder_fd if self._folder_fd >= 0 else self.path
        found = os.listdir(place)
        others = (STAGES, HISTORY, LOST_FOUND)
        return sorted(it for it in found if it not in others and not it.startswith(AUDIT))

    def sync_names(self) -> None:
        """Only who has locked the folder changes names in it."""
        os.fsync(self._folder_fd)

    def free_bytes(self) -> int:
        facts = os.statvfs(self._folder_fd if self._folder_fd >= 0 else self.path)
        return facts.f_bavail * facts.f_frsize

    def total_bytes(self) -> int:
        facts = os.statvfs(self._folder_fd if self._folder_fd >= 0 else self.path)
        return facts.f_blocks * facts.f_frsize

    def room_in(self) -> str:
        """What it is that has so much room, for people."""
        return self.where("")

    def lock(self) -> None:
        """One process per data folder. The kernel lets go of the locks when the process ends.

        The folder is locked too: whoever has removed the file in it gets in no sooner.
        """
        fd = open_private(self.where(self.LOCK), os.O_RDWR | os.O_CREAT)
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:  # NFS locks files only.
                if isinstance(error, BlockingIOError):
                    raise
        except BlockingIOError:
            owner = _lines(os.pread(fd, LOCK_BYTES_MAX, 0))[0] or "unknown"
            os.close(fd)
            os.close(folder)
            raise LogInUse(
                f"data folder {self.path!r} is in use by another broker (process {owner}): "
                f"stop it, or give this one a folder of its own with --data"
            ) from None
        with suppress(OSError):  # A full disk has no room even for this, and nothing here needs it.
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n%s\n" % (os.getpid(), secrets.token_hex(16).encode()), 0)
        self._lock_fd, self._folder_fd = fd, folder
        self._close_to_others()

    def _close_to_others(self) -> None:
        """Earlier versions, or whoever made the folder, may have left it open to other users.

        Where it holds anything else, it may be somebody's for another reason: then there is only a warning.
        """
        found = os.fstat(self._folder_fd)
        others, own = [], os.geteuid()
        for entry in os.scandir(self._folder_fd):
            if not _OURS.fullmatch(entry.name):
                others.append(entry.name)
                continue
            facts = entry.stat(follow_symlinks=False)
            if facts.st_mode & OTHERS and facts.st_uid == own and not entry.is_symlink():
                with suppress(OSError):  # Not every file system has modes.
                    close_to_others(self._folder_fd, entry.name)
        if not found.st_mode & OTHERS:
            return
        mode = stat.S_IMODE(found.st_mode)
        why = f"it holds more than a log ({min(others)!r})" if others else "it belongs to another user"
        if not others and found.st_uid == own:
            try:
                close_to_others(self._folder_fd)
            except OSError as error:
                why = f"that cannot be changed ({error.strerror})"
            else:
                log.warning("data folder %s was open to other users: %04o, now 0700", self.path, mode)
                return
        log.warning("data folder %s is open to other users (%04o), and %s", self.path, mode, why)

    def publish(self, position: int) -> None:
        """Tell readers in other processes up to which log position everything is synced."""
        if self._watermark is None:
            self._watermark = Watermark(self.where(WATERMARK), writable=True)
        self._watermark.set(position)

    def unlock(self) -> None:
        if self._watermark is not None:
            self._watermark.close()
            self._watermark = None
        for fd in (self._lock_fd, self._folder_fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._folder_fd = -1


def mark_of(path: str) -> str:
    """What only this folder has, as the broker left it that opened it last; empty: nobody has marked it.

    Another log, and a copy of this one that somebody else has opened since, have other marks. So a process
    that a broker has told its mark knows whether a folder is that broker's.
    """
    try:
        with open(os.path.join(path, RealDisk.LOCK), "rb") as file:
            return _lines(file.read(LOCK_BYTES_MAX))[1]
    except FileNotFoundError:
        return ""


def _lines(content: bytes) -> list[str]:
    """Of a lock: who holds it, and the mark."""
    return [*content.decode(errors="replace").splitlines(), "", ""]


class SyncFailed(Exception):
    """A sync that did not return well. Not an OSError, so that no one takes it for lack of room."""


def is_full(error: OSError) -> bool:
    """Whether the error says that there is no room, on the disk or for an open file, and nothing worse."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)


def is_final(error: BaseException | None) -> bool:
    """Whether the log must stop, by the fault model."""
    return isinstance(error, SyncFailed) or (isinstance(error, OSError) and not is_full(error))


def sync_folder(disk: Disk) -> None:
    """Make names safe. A failure is final, whatever its reason: the folder has the log's names too."""
    try:
        disk.sync_names()
    except OSError as error:
        raise SyncFailed(f"sync of the folder: {error}") from error


def discard(disk: Disk, name: str) -> None:
    """Remove a file that came to nothing. Where that fails too, the next opening does it."""
    with suppress(OSError):
        disk.remove(name)


def write_whole(disk: Disk, name: str, *buffers: Buffer) -> None:
    """A small file that is there whole, or as it was before, whatever happens."""
    temporary = name + ".tmp"
    file = disk.create(temporary, 0)
    try:
        file.write(0, buffers)
        file.sync()
        disk.rename(temporary, name)
    except OSError:
        discard(disk, temporary)
        raise
    finally:
        file.close()
    sync_folder(disk)


def read_whole(disk: Disk, name: str) -> bytes:
    file = disk.open(name)
    try:
        return file.read(0, file.size())
    finally:
        file.close()


def read_watermark(disk: Disk) -> int:
    """What readers were told last; 0: nothing. A power cut may leave an older value, but no newer one."""
    try:
        data = read_whole(disk, WATERMARK)
    except FileNotFoundError:
        return 0
    return int.from_bytes(data[:8], "little") if len(data) >= 8 else 0
