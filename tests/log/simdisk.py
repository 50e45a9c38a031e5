"""SimDisk: a folder in memory that does to the log what `penstock/log/disk.py` warns of.

# Fault model, and how it is carried out here

  * A write that returned may be lost until a `File.sync` that began after it has returned: written and
    synced bytes are kept apart, and `meanwhile` is done while a sync is under way, which does not cover it.
    `crash` keeps any subset of the unsynced writes, applied in any order, and may tear each of them: a
    prefix of it stays, or any of its sectors. A new size (allocation, extension, truncation) is such a
    write too.
  * A byte that was synced stays as it was written.
  * A created, renamed or removed name may be forgotten until `sync_names` has returned: `crash`
    keeps any subset of the pending name operations. A file without a name is gone.
  * `write` may fail for lack of room: a part of its bytes is there. So may `create`.
  * Any other failed write leaves a part of its bytes. A failed sync leaves everything unsynced, for
    ever: a second sync returns well and proves nothing, as on a real kernel.
  * The number that readers are told (`publish`) is never synced: a crash leaves any older one.
  * The death of the process alone (`kill`) loses nothing that was written. What was not synced
    still is not.

Reads see what was written, synced or not, as through a page cache.

A disk ends with `crash` or `kill`: both give the disk that the next process finds, and every later
call on the old one or its files raises `PowerCut`. So does every call after the one for which
`cut_after` was set: the power fails in the middle of whatever was going on.
"""

import errno
import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from penstock.log.block import Buffer
from penstock.log.disk import WATERMARK
from penstock.log.errors import LogInUse

SECTOR_BYTES = 64
"""What stays or goes as a whole when a write is torn. Smaller than any real one: more ways to break."""


def nothing() -> None:
    """Nobody writes while a sync is under way."""


class PowerCut(BaseException):
    """The machine is off. Not an Exception: nothing in the program under test can handle it."""


class Fault(NamedTuple):
    """The `nth` call of a kind from now on (1: the next one) fails with this error."""

    call: str
    nth: int
    errno: int


class _Write(NamedTuple):
    """An unsynced change of a file: bytes at a position, or a new size."""

    position: int
    data: bytes
    size: int = -1  # 0 or more: set this size, `data` is empty
    whole: bool = False  # cannot be torn


class _Inode:
    """The content of a file, whatever its names are."""

    __slots__ = ("doomed", "live", "pending", "synced")

    def __init__(self, content: bytes = b"") -> None:
        self.live = bytearray(content)
        self.synced = bytes(content)
        self.pending: list[_Write] = []
        self.doomed: list[_Write] = []  # were unsynced when a sync failed: no later sync helps them

    def write(self, position: int, data: bytes) -> None:
        if not data:
            return
        self.pending.append(_Write(position, data))
        _put(self.live, position, data)

    def resize(self, size: int) -> None:
        self.pending.append(_Write(0, b"", size))
        _resize(self.live, size)

    def sync(self, count: int) -> None:
        """The oldest so many changes are safe."""
        if self.doomed or count < len(self.pending):
            content = bytearray(self.synced)
            for change in self.pending[:count]:
                _apply(content, change)
            self.synced = bytes(content)
        elif self.pending:
            self.synced = bytes(self.live)
        self.pending = self.pending[count:]

    def after_crash(self, rng: random.Random, keep: float, tear: float) -> "_Inode":
        changes = self.doomed + self.pending
        if not changes:
            return _Inode(self.synced)
        content = bytearray(self.synced)
        kept = [change for change in changes if rng.random() < keep]
        if rng.random() < 0.5:
            rng.shuffle(kept)
        for change in kept:
            if change.size >= 0 or change.whole or rng.random() >= tear:
                _apply(content, change)
            elif rng.random() < 0.5:
                _put(content, change.position, change.data[: rng.randrange(len(change.data))])
            else:
                _tear_sectors(content, change, rng)
        return _Inode(bytes(content))


def _put(content: bytearray, position: int, data: bytes) -> None:
    if len(content) < position:
        content.extend(bytes(position - len(content)))
    content[position : position + len(data)] = data


def _resize(content: bytearray, size: int) -> None:
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))


def _apply(content: bytearray, change: _Write) -> None:
    if change.size >= 0:
        _resize(content, change.size)
    else:
        _put(content, change.position, change.data)


def _tear_sectors(content: bytearray, change: _Write, rng: random.Random) -> None:
    """Each aligned sector that the write touches is written or is not."""
    at, end = change.position, change.position + len(change.data)
    keep = rng.choice((0.5, 0.9))
    while at < end:
        stop = min(end, at - at % SECTOR_BYTES + SECTOR_BYTES)
        if rng.random() < keep:
            _put(content, at, change.data[at - change.position : stop - change.position])
        at = stop


class SimFile:
    """An open file."""

    def __init__(self, disk: "SimDisk", name: str, inode: _Inode) -> None:
        self._disk = disk
        self._name = name
        self._inode: _Inode | None = inode

    def _open_inode(self) -> _Inode:
        if self._inode is None:
            raise OSError(errno.EBADF, f"{self._name}: the file is closed")
        return self._inode

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        inode = self._open_inode()
        data = b"".join(buffers)
        fault = self._disk.enter("write", self._name)
        if fault:
            data = data[: len(data) // 2]
        lacking = position + len(data) - len(inode.live) - self._disk.free_bytes()
        if lacking > 0:
            fault = fault or errno.ENOSPC
            data = data[: max(len(data) - lacking, 0)]
        self._disk.used_bytes += max(position + len(data) - len(inode.live), 0) if data else 0
        inode.write(position, data)
        if fault:
            raise OSError(fault, f"{self._name}: {os.strerror(fault)}")
        self._disk.leave()

    def read(self, position: int, length: int) -> bytes:
        inode = self._open_inode()
        self._disk.check_power()
        if fault := self._disk.fault_of("read"):
            raise OSError(fault, f"{self._name}: {os.strerror(fault)}")
        if position < 0 or length < 0:
            raise OSError(errno.EINVAL, "no such place in a file")
        return bytes(inode.live[position : position + length])

    def sync(self) -> None:
        inode = self._open_inode()
        fault = self._disk.enter("sync", self._name)
        if fault:
            inode.doomed += inode.pending
            inode.pending = []
            raise OSError(fault, f"{self._name}: {os.strerror(fault)}")
        count = len(inode.pending)
        self._disk.meanwhile()
        self._disk.leave()
        inode.sync(count)

    def size(self) -> int:
        self._disk.check_power()
        return len(self._open_inode().live)

    def truncate(self, size: int) -> None:
        inode = self._open_inode()
        fault = self._disk.enter("truncate", self._name)
        if fault:
            raise OSError(fault, f"{self._name}: {os.strerror(fault)}")
        self._disk.used_bytes += size - len(inode.live)
        inode.resize(size)
        self._disk.leave()

    def close(self) -> None:
        self._inode = None


class _NameChange(NamedTuple):
    """An unsynced change of the folder: `old` goes, `new` comes; one of them may be missing."""

    old: str | None
    new: str | None
    inode: _Inode


def _rename(names: dict[str, _Inode], change: _NameChange) -> None:
    if change.old is not None and names.get(change.old) is change.inode:
        del names[change.old]
    if change.new is not None:
        names[change.new] = change.inode


class SimDisk:
    FOLDER = "sim"
    sets_room_aside = True

    def __init__(self, files: Mapping[str, bytes] | None = None, capacity_bytes: int | None = None) -> None:
        self._names = {name: _Inode(content) for name, content in (files or {}).items()}
        self._synced_names = dict(self._names)
        self._changes: list[_NameChange] = []
        self._doomed: list[_NameChange] = []  # as in _Inode
        self._faults: list[Fault] = []
        self._locked = False
        self._dead = False
        self._cut_after = -1
        self.capacity_bytes = capacity_bytes  # may be changed at any time; None: no limit
        self.used_bytes = sum(len(inode.live) for inode in self._names.values())
        self.calls: list[tuple[str, str]] = []  # (call, name) of everything that changes the disk
        self.meanwhile: Callable[[], None] = nothing  # before a sync returns
        self.published = 0

    # --- faults ----------------------------------------------------------------------------------

    def fail(self, call: str, nth: int, error: int) -> None:
        """The nth `read`, `open`, `write`, `sync`, `truncate`, `create`, `allocate`, `rename`, `remove` or
        `sync_names` from now on fails with this errno."""
        self._faults.append(Fault(call, nth, error))

    def cut_after(self, calls: int) -> None:
        """The power fails at that call from now on (1: the next one)."""
        self._cut_after = calls

    def check_power(self) -> None:
        if self._dead:
            raise PowerCut

    def enter(self, call: str, name: str) -> int:
        """Every call that changes the disk begins here: the errno with which it is to fail, or 0."""
        self.check_power()
        self.calls.append((call, name))
        return self.fault_of(call)

    def fault_of(self, call: str) -> int:
        """The errno with which this call is to fail, or 0."""
        if not self._faults:
            return 0
        result = 0
        left = []
        for fault in self._faults:
            if fault.call != call:
                left.append(fault)
            elif fault.nth > 1:
                left.append(Fault(call, fault.nth - 1, fault.errno))
            else:
                result = fault.errno
        self._faults = left
        return result

    def leave(self) -> None:
        """Every such call ends here: what it wrote is on its way when the power fails; a sync is not done."""
        if self._cut_after > 0:
            self._cut_after -= 1
            if not self._cut_after:
                self._dead = True
                raise PowerCut

    def crash(self, rng: random.Random) -> "SimDisk":
        """The power fails: what the next process finds."""
        self._dead = True
        # How much stays is drawn anew for each crash, so that "all" and "nothing" are common too.
        keep, tear, keep_names = (rng.choice((0.0, 0.3, 0.6, 0.9, 1.0)) for _ in range(3))
        names = dict(self._synced_names)
        for change in self._doomed + self._changes:
            if rng.random() < keep_names:
                _rename(names, change)
        after = SimDisk(capacity_bytes=self.capacity_bytes)
        # A file with two names (a rename kept by half) is one file.
        inodes = {inode: inode.after_crash(rng, keep, tear) for inode in names.values()}
        after._take_names({name: inodes[inode] for name, inode in names.items()})
        return after

    def kill(self) -> "SimDisk":
        """The process dies, the machine lives: nothing that was written is lost, or synced by that."""
        self._dead = True
        after = SimDisk(capacity_bytes=self.capacity_bytes)
        after._take_names(self._names)
        after._synced_names = self._synced_names
        after._changes = self._changes
        after._doomed = self._doomed
        return after

    def _take_names(self, names: dict[str, _Inode]) -> None:
        self._names = names
        self._synced_names = dict(names)
        self.used_bytes = sum(len(inode.live) for inode in set(names.values()))

    def copy(self) -> "SimDisk":
        """The same files, synced and unlocked; this disk goes on."""
        return SimDisk(self.files(), self.capacity_bytes)

    def files(self) -> dict[str, bytes]:
        """What a reader sees now, by name."""
        return {name: bytes(inode.live) for name, inode in self._names.items()}

    # --- the Disk protocol -----------------------------------------------------------------------

    def where(self, name: str) -> str:
        return f"{self.FOLDER}/{name}"

    def create(self, name: str, size: int) -> SimFile:
        fault = self.enter("create", name)
        if fault:
            raise OSError(fault, f"{name}: {os.strerror(fault)}")
        inode = self._names.get(name)
        if inode is None:
            inode = self._names[name] = _Inode()
            self._changes.append(_NameChange(None, name, inode))
        elif inode.live:
            self.used_bytes -= len(inode.live)
            inode.resize(0)
        self.leave()
        if size:
            fault = self.enter("allocate", name)
            if not fault and size > self.free_bytes():
                fault = errno.ENOSPC
            if fault:
                self._unlink(name)
                raise OSError(fault, f"{name}: {os.strerror(fault)}")
            self.used_bytes += size
            inode.resize(size)
            self.leave()
        return SimFile(self, name, inode)

    def open(self, name: str) -> SimFile:
        self.check_power()
        fault = self.fault_of("open")
        if fault:
            raise OSError(fault, f"{name}: {os.strerror(fault)}")
        return SimFile(self, name, self._inode(name))

    def _inode(self, name: str) -> _Inode:
        inode = self._names.get(name)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, f"{name}: {os.strerror(errno.ENOENT)}")
        return inode

    def rename(self, old: str, new: str) -> None:
        fault = self.enter("rename", old)
        if fault:
            raise OSError(fault, f"{old}: {os.strerror(fault)}")
        inode = self._inode(old)
        if new in self._names:
            self.used_bytes -= len(self._names[new].live)
        del self._names[old]
        self._names[new] = inode
        self._changes.append(_NameChange(old, new, inode))
        self.leave()

    def remove(self, name: str) -> None:
        fault = self.enter("remove", name)
        if fault:
            raise OSError(fault, f"{name}: {os.strerror(fault)}")
        self._unlink(name)
        self.leave()

    def _unlink(self, name: str) -> None:
        inode = self._inode(name)
        del self._names[name]
        self.used_bytes -= len(inode.live)
        self._changes.append(_NameChange(name, None, inode))

    def names(self) -> list[str]:
        self.check_power()
        return sorted(self._names)

    def sync_names(self) -> None:
        fault = self.enter("sync_names", "")
        if fault:
            self._doomed += self._changes
            self._changes = []
            raise OSError(fault, f"{self.FOLDER}: {os.strerror(fault)}")
        self.leave()
        if self._doomed:
            for change in self._changes:
                _rename(self._synced_names, change)
            # What happened to the same names later, and is on the disk, is not taken back by those.
            names = {name for change in self._changes for name in change[:2]} - {None}
            self._doomed = [change for change in self._doomed if names.isdisjoint(change[:2])]
        else:
            self._synced_names = dict(self._names)
        self._changes = []

    def free_bytes(self) -> int:
        if self.capacity_bytes is None:
            return 1 << 40
        return self.capacity_bytes - self.used_bytes

    def total_bytes(self) -> int:
        return 1 << 40 if self.capacity_bytes is None else self.capacity_bytes

    def room_in(self) -> str:
        return self.where("")

    def lock(self) -> None:
        self.check_power()
        if self._locked:
            raise LogInUse(f"data folder {self.FOLDER!r} is in use")
        self._locked = True

    def unlock(self) -> None:
        self._locked = False

    def publish(self, position: int) -> None:
        """A store into a mapped page, which the kernel writes out when it likes, or never."""
        self.check_power()
        self.published = position
        inode = self._names.get(WATERMARK)
        if inode is None:
            inode = self._names[WATERMARK] = _Inode()
            self._changes.append(_NameChange(None, WATERMARK, inode))
            inode.resize(8)
            self.used_bytes += 8
        word = position.to_bytes(8, "little")
        _put(inode.live, 0, word)
        # Any older value may be what the disk has; a few are enough.
        inode.pending = [*inode.pending[-3:], _Write(0, word, whole=True)]
