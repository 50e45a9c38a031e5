"""Store: the folder that backups are kept in.

    backup-20300131T120000.000000Z   a backup: which files the log had, with sizes and checksums; of a cluster
                                     with several logs (shards), those of each
    3fa2c1-NAME-BYTES-MODIFIED       the bytes of one of them: of which log, its name there, how many bytes,
                                     and when it was written (ns). Backups share what they have in common
    lock                             held by who writes here

Rules that always hold:
  * A file has its name when all of it is on the disk, and is never changed after that.
  * A backup gets its name last, after everything that it names, and all of it synced. So what is cut in the
    middle, by whatever, is no backup; what it had copied is used by the next one.
  * A backup carries a checksum of itself, and one (sha256) for every file, which a restore compares.
  * What no backup names goes when the next one is done, unless there is one that cannot be read: it may have
    named it.

How it fails: `BackupError`, with the file and what to do; `OSError` of the disk.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from penstock.errors import PenstockError
from penstock.log.backup.listing import Listed
from penstock.log.disk import Disk, discard, read_whole, sync_folder, write_whole
from penstock.log.scan import CHUNK_BYTES
from penstock.log.segment import parse_segment_name

FORMAT: Final = 2
"""The highest. A backup of one log has 1, as it always had."""

PREFIX: Final = "backup-"
_HEAD: Final = re.compile(rb"penstock backup (\d+) ([0-9a-f]{64})\n")
_FILE: Final = re.compile(
    r"([0-9a-f]{6}-(\d{20}(\.\d+)?\.seg|snapshot-\d{20})-\d+-\d+|backup-\d{8}T\d{6}\.\d{6}Z\.tmp)(\.tmp)?"
)
"""What may go where no backup names it. Whatever else is in the folder is somebody's."""


class BackupError(PenstockError):
    """A backup cannot be taken, or used. Says what would help."""


class Kept(NamedTuple):
    """One file of a backup."""

    log: str
    name: str
    bytes: int
    modified_ns: int
    sha256: str

    @property
    def stored(self) -> str:
        return stored_name(self.log, Listed(self.name, self.bytes, self.modified_ns))


class LogBackup(NamedTuple):
    """One log of a backup."""

    log: str
    time_us: int  # by the broker's clock: nothing in it is of later
    end: int
    files: tuple[Kept, ...]
    defects: tuple[str, ...]  # what was damaged in the broker's own files


class Backup(NamedTuple):
    name: str
    version: str  # of Penstock
    logs: tuple[LogBackup, ...]  # of each shard, in order; elsewhere there is one

    @property
    def numbers(self) -> tuple[str, ...]:
        """Of its logs."""
        return tuple(it.log for it in self.logs)

    @property
    def whose(self) -> str:
        """The same for people."""
        rest = len(self.logs) - 1
        return f"log {self.logs[0].log}" + (f" and {rest} more" if rest else "")

    @property
    def time_us(self) -> int:
        """Nothing in it is of later."""
        return max(it.time_us for it in self.logs)

    @property
    def files(self) -> tuple[Kept, ...]:
        return tuple(file for it in self.logs for file in it.files)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def defects(self) -> tuple[str, ...]:
        if len(self.logs) == 1:
            return self.logs[0].defects
        return tuple(f"shard {shard}: {text}" for shard, it in enumerate(self.logs) for text in it.defects)


def stored_name(log: str, file: Listed) -> str:
    return f"{log}-{file.name}-{file.bytes}-{file.modified_ns}"


class Store:
    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.backups: list[Backup] = []  # oldest first
        self.unreadable: list[str] = []  # backups that are damaged, and what is wrong with each
        self._known: dict[str, str] = {}  # by file of a backup: its checksum
        for name in disk.names():
            if parse_segment_name(name) is not None:
                raise BackupError(f"{disk.where('')}: is the data folder of a broker; name one for backups")
            if name.startswith(PREFIX) and not name.endswith(".tmp"):
                try:
                    self.backups.append(_read(name, read_whole(disk, name)))
                except (ValueError, KeyError, TypeError) as error:
                    self.unreadable.append(f"{disk.where(name)}: is damaged ({error}): it is not used")
        for backup in self.backups:
            self._known |= {file.stored: file.sha256 for file in backup.files}

    def checksum(self, log: str, file: Listed) -> str | None:
        """Of a file that a backup has; None: none has it, or it is not there whole."""
        return self._known.get(stored_name(log, file)) if self._is_there(log, file) else None

    def left(self, log: str, file: Listed) -> str | None:
        """The same of one that a run has left that was cut: nobody has looked at what is in it."""
        return digest(self.read(stored_name(log, file))) if self._is_there(log, file) else None

    def _is_there(self, log: str, file: Listed) -> bool:
        try:
            opened = self.disk.open(stored_name(log, file))
        except FileNotFoundError:
            return False
        try:
            return opened.size() == file.bytes
        finally:
            opened.close()

    def read(self, stored: str, bytes_max: int | None = None) -> Iterator[bytes]:
        file = self.disk.open(stored)
        try:
            size = file.size() if bytes_max is None else bytes_max
            for at in range(0, size, CHUNK_BYTES):
                yield file.read(at, min(CHUNK_BYTES, size - at))
        finally:
            file.close()

    def put(self, log: str, file: Listed, chunks: Iterable[bytes]) -> str:
        """Store the bytes of a file; their checksum."""
        return put_file(self.disk, stored_name(log, file), chunks, file.bytes)

    def add(self, backup: Backup) -> None:
        """From now on it is one."""
        logs = [it._asdict() | {"files": [file[1:] for file in it.files]} for it in backup.logs]
        form, what = (1, logs[0]) if len(logs) == 1 else (FORMAT, {"logs": logs})
        fields = {"name": backup.name, "version": backup.version, **what, "format": form}
        text = json.dumps(fields, indent=1).encode() + b"\n"
        head = f"penstock backup {form} {hashlib.sha256(text).hexdigest()}\n".encode()
        sync_folder(self.disk)  # The names of what it names.
        write_whole(self.disk, backup.name, head, text)
        self.backups.append(backup)

    def prune(self, keep: int | None) -> int:
        """Let go of all backups but the last so many, and of what nobody names; how many backups went."""
        gone = [] if keep is None else self.backups[: -keep or None]
        for backup in gone:
            self.disk.remove(backup.name)
            self.backups.remove(backup)
        if gone:
            sync_folder(self.disk)  # Before the first of its files: half a backup must not come back.
        named = {file.stored for backup in self.backups for file in backup.files}
        for name in self.disk.names() if not self.unreadable else ():
            if _FILE.fullmatch(name) and name not in named:
                discard(self.disk, name)
        return len(gone)


def put_file(disk: Disk, name: str, chunks: Iterable[bytes], size: int, keep: int | None = None) -> str:
    """A file that is there whole, or not at all; the checksum of its `size` bytes, of which it gets the first
    `keep`. Its name is synced by whoever syncs names next."""
    temporary = name + ".tmp"
    file = disk.create(temporary, 0)
    hashed, at = hashlib.sha256(), 0
    try:
        for chunk in chunks:
            hashed.update(chunk)
            part = chunk if keep is None else chunk[: max(keep - at, 0)]
            if part:
                file.write(at, (part,))
            at += len(chunk)
        _check_bytes(disk.where(name), at, size)
        file.sync()
        disk.rename(temporary, name)
    except Exception:
        discard(disk, temporary)
        raise
    finally:
        file.close()
    return hashed.hexdigest()


def _check_bytes(where: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise BackupError(f"{where}: of {wanted} bytes there came {found}; try again")


def digest(chunks: Iterable[bytes]) -> str:
    hashed = hashlib.sha256()
    for chunk in chunks:
        hashed.update(chunk)
    return hashed.hexdigest()


def _read(name: str, data: bytes) -> Backup:
    head = _HEAD.match(data)
    if head is None:
        raise ValueError("its first line is no backup's")
    text = data[head.end() :]
    if hashlib.sha256(text).hexdigest().encode() != head[2]:
        raise ValueError("it does not have its checksum")
    fields = json.loads(text)
    if fields.pop("format", FORMAT) != int(head[1]):
        raise ValueError("its first line says another format than it has")
    if int(head[1]) > FORMAT:
        raise BackupError(f"{name} has format {int(head[1])}, of a newer version than this: use that one")
    logs = fields.get("logs", [fields])
    return Backup(name, fields["version"], tuple(map(_read_log, logs)))


def _read_log(fields: dict[str, Any]) -> LogBackup:
    files = tuple(Kept(fields["log"], *it) for it in fields["files"])
    return LogBackup(fields["log"], fields["time_us"], fields["end"], files, tuple(fields["defects"]))
