"""`penstock backup DIR`: a copy of a running broker's log, over HTTP, into a folder that keeps several of
them.

Over HTTP and not from the data folder, so that it works from another machine, is for administrators alone,
and stands in the audit. Any front-end of a cluster has all of its logs: it asks the others. Where one is led
elsewhere all of a sudden, it is gone on with there; where nobody leads it, somebody is waited for. What a
backup is made of, and when it is one, is said in `penstock/log/backup/`.

Exit 0: there is a backup; 1: there is none, or parts of the log were damaged where the broker has it, which
are named, and in the backup as they are.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Generator, Iterator

from penstock.cli.admin import Admin, Unreachable, add_admin, at_least, say_objects
from penstock.cli.main import EXIT_FAILURE
from penstock.cli.messaging import progress, warn
from penstock.client.errors import Refused
from penstock.common import units
from penstock.errors import Misuse
from penstock.log.backup.listing import Listed, Listing
from penstock.log.backup.store import BackupError, Store
from penstock.log.backup.taking import Tell, take
from penstock.log.disk import RealDisk, SyncFailed
from penstock.log.errors import LogInUse

HELP = "copy the log of a running broker into a folder, only what is new since the last time"
CHUNK_BYTES = 1 << 20
LEADER_SECONDS = 30.0
"""So long it is waited for somebody to lead a log."""

RETRY_SECONDS = 0.5
BREAKS_MAX = 10
"""So many answers may break off before their end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="DIR", help="a folder for the backups of this broker; made if need be"
    )
    parser.add_argument(
        "--keep",
        type=at_least(1),
        metavar="N",
        help="when it is done, remove all but the last N backups (default: keep all)",
    )
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    with (
        told_disk(args.folder),
        Admin(args) as admin,
        _opened(args.folder) as store,
        told_progress() as tell,
    ):
        warn("; ".join(store.unreadable) or None)
        others = {it.numbers: it.whose for it in store.backups}
        backup, copied_files, copied_bytes = take(store, _Broker(admin), tell)
        dropped = store.prune(args.keep)
    if others and backup.numbers not in others:
        warn(
            f"{args.folder}: the backups before this one are of another log, "
            f"{' and '.join(sorted(others.values())).replace('log ', '')}: "
            f"as it was before a restore, or another broker's, which should have a folder of its own"
        )
    if args.json:
        facts = {"files": len(backup.files), "bytes": backup.bytes, "dropped": dropped}
        facts |= {"copied_files": copied_files, "copied_bytes": copied_bytes}
        say_objects([{"backup": backup.name, "logs": backup.numbers, **facts, "defects": backup.defects}])
    else:
        for defect in backup.defects:
            print(f"DEFECT {defect}")
        print(
            f"{backup.name}: {units.size(backup.bytes)} in {units.counted(len(backup.files), 'file')}, "
            f"{units.size(copied_bytes)} of it copied now"
            + (f"; {units.counted(dropped, 'backup')} dropped" if dropped else "")
        )
    return EXIT_FAILURE if backup.defects else 0


class _Broker:
    """Implements `taking.Source`."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._breaks_left = BREAKS_MAX

    def listings(self) -> list[Listing]:
        first, shards = self._listing(0)
        return [first, *(self._listing(shard)[0] for shard in range(1, shards))]

    def _listing(self, shard: int) -> tuple[Listing, int]:
        """That of one log, and how many there are."""
        until = time.monotonic() + LEADER_SECONDS
        while True:
            try:
                answer = self._admin.get("backup", shard=shard or None)
                break
            except Refused as error:
                if error.name != "no-leader":
                    raise
                if time.monotonic() > until:
                    raise BackupError(
                        f"nobody has led shard {shard} for {LEADER_SECONDS:.0f} s ({error.detail}): no "
                        f"backup was made; what is copied already, the next call uses"
                    ) from None
            time.sleep(RETRY_SECONDS)
        fields = {name: answer[name] for name in Listing._fields}
        return Listing(**{**fields, "files": [Listed(**it) for it in answer["files"]]}), answer["shards"]

    def read(self, listing: Listing, file: Listed) -> Generator[bytes, None, None]:
        query = {"bytes": file.bytes, "opening": listing.opening, "shard": listing.shard or None}
        try:
            with self._admin.stream("backup", file.name, **query) as response:
                while chunk := response.read(CHUNK_BYTES):
                    yield chunk
        except Refused as error:
            if error.name not in ("file-not-found", "no-leader"):
                raise
            raise FileNotFoundError(file.name) from None
        except Unreachable:
            self._breaks_left -= 1
            if self._breaks_left <= 0:
                raise
            raise FileNotFoundError(file.name) from None  # The next list tells whether anybody is there.


@contextlib.contextmanager
def _opened(folder: str) -> Iterator[Store]:
    """The store of a folder, which is ours as long as this goes on."""
    disk = made_folder(folder)
    try:
        disk.lock()
    except LogInUse:
        Store(disk)  # It has a sentence of its own for a broker's folder.
        raise BackupError(f"{folder}: another backup is being taken there; wait for it") from None
    try:
        yield Store(disk)
    finally:
        disk.unlock()


@contextlib.contextmanager
def told_disk(folder: str) -> Iterator[None]:
    """What a disk says no with, as a sentence."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (FileExistsError, NotADirectoryError) as error:
        raise Misuse(f"{error.filename or folder}: is no folder; name another one") from None
    except (OSError, SyncFailed) as error:
        where, why = getattr(error, "filename", None) or folder, getattr(error, "strerror", None) or error
        raise BackupError(f"{where}: {why}; call it again when that is mended, and it goes on") from None


def made_folder(folder: str) -> RealDisk:
    """A folder whose name outlives a power cut."""
    disk = RealDisk(folder)
    above = os.open(os.path.dirname(os.path.abspath(folder)), os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(above)
    finally:
        os.close(above)
    return disk


@contextlib.contextmanager
def told_progress() -> Iterator[Tell]:
    """Bytes, rate and the time that is left, where somebody watches."""
    began = time.monotonic()
    with progress() as tell:

        def told(done: int, whole: int) -> None:
            rate = done / max(time.monotonic() - began, 0.001)
            left = units.duration(round((whole - done) / max(rate, 1)))
            tell(f"{units.size(done)} of {units.size(whole)}, {units.size(rate)}/s, {left} left".ljust(60))

        yield told if sys.stderr.isatty() else lambda done, whole: None
