"""Taking a backup: from a list of the log's files to a store that has them all. A cluster may have several
logs (shards): then there is a list of each, made one right after the other, and a backup has all of them.

Only what the store has not yet is copied: a segment that nobody writes to any more is copied once, one that
was compacted since is another file, and the last one, of at most a segment's size, is copied as far as it
goes. Nobody waits for any of it: files that go away meanwhile are looked for in a new list, which is sooner
done with each time, because less is new in it. Everything that was copied is read once more, and every
block's checksums are compared: what is damaged in a second copy, too, is damaged where the broker has it, and
is told with the backup."""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Final, NamedTuple, Protocol

from penstock import __version__
from penstock.log.backup.listing import Listed, Listing
from penstock.log.backup.store import PREFIX, Backup, BackupError, Kept, LogBackup, Store, stored_name
from penstock.log.disk import read_whole
from penstock.log.errors import LogDamaged
from penstock.log.scan import Hole, walk
from penstock.log.segment import parse_segment_name
from penstock.log.snapshot import parse_snapshot

LISTS_MAX: Final = 100
Tell = Callable[[int, int], None]  # bytes done, bytes in all


class Source(Protocol):
    """A broker, or a cluster."""

    def listings(self) -> list[Listing]:
        """Of each of its logs, in order."""

    def read(self, listing: Listing, file: Listed) -> Generator[bytes, None, None]:
        """The bytes of a file; FileNotFoundError where it has gone, or the log is led elsewhere by now."""


class Taken(NamedTuple):
    backup: Backup
    copied_files: int
    copied_bytes: int


class _Copied(NamedTuple):
    sha256: str
    wrong: list[str]  # what is damaged in it
    bytes: int  # 0: an earlier run has copied it


def take(store: Store, source: Source, tell: Tell = lambda done, whole: None) -> Taken:
    """One more backup in the store."""
    copied: dict[str, _Copied] = {}
    for _ in range(LISTS_MAX):
        listings = source.listings()
        try:
            _copy(store, source, listings, copied, tell)
        except FileNotFoundError:
            continue
        time_us = max(it.time_us for it in listings)
        time = datetime.fromtimestamp(time_us / 1_000_000, UTC)
        name = f"{PREFIX}{time:%Y%m%dT%H%M%S.%f}Z"
        if any(name <= it.name for it in store.backups):
            last = store.backups[-1].name
            raise BackupError(
                f"by the broker's clock this is {name}, not later than {last}: it was set back, or that is "
                f"another broker's; name another folder"
            )
        backup = Backup(name, __version__, tuple(_kept(it, copied) for it in listings))
        store.add(backup)
        sizes = [it.bytes for it in copied.values() if it.bytes]
        return Taken(backup, len(sizes), sum(sizes))
    raise BackupError(f"the files of the log went away {LISTS_MAX} times while they were copied; try again")


def _copy(
    store: Store, source: Source, listings: list[Listing], copied: dict[str, _Copied], tell: Tell
) -> None:
    """All that the store has not."""
    files = [(listing, file) for listing in listings for file in listing.files]
    files.sort(key=lambda it: parse_segment_name(it[1].name) is not None)  # Snapshots go soonest.
    done, whole = 0, sum(file.bytes for _, file in files)
    for listing, file in files:
        stored = stored_name(listing.log, file)
        if stored not in copied:
            known = _known(store, listing.log, file)
            copied[stored] = known or _copied(store, source, listing, file, done, whole, tell)
        done += file.bytes


def _kept(listing: Listing, copied: dict[str, _Copied]) -> LogBackup:
    found = [copied[stored_name(listing.log, file)] for file in listing.files]
    kept = tuple(Kept(listing.log, *file, it.sha256) for file, it in zip(listing.files, found, strict=True))
    defects = tuple(text for it in found for text in it.wrong)
    return LogBackup(listing.log, listing.time_us, listing.end, kept, defects)


def _known(store: Store, log: str, file: Listed) -> _Copied | None:
    """A file that a backup has. What was wrong with it then still is."""
    sha256 = store.checksum(log, file)
    if sha256 is None:
        return None
    defects = {text for it in store.backups for its in it.logs if its.log == log for text in its.defects}
    return _Copied(sha256, sorted(it for it in defects if it.startswith(f"{file.name}: ")), 0)


def _copied(
    store: Store, source: Source, listing: Listing, file: Listed, done: int, whole: int, tell: Tell
) -> _Copied:
    """A file that no backup has; its checksums were compared, whoever has copied it."""
    log = listing.log
    left = store.left(log, file)
    if left is not None and not any(_wrong(store, log, file)):
        return _Copied(left, [], 0)
    for _ in range(2):
        # Left in the middle, it would hold the line to the broker.
        with closing(source.read(listing, file)) as chunks:
            sha256 = store.put(log, file, _told(chunks, done, whole, tell))
        wrong = list(_wrong(store, log, file))
        if not wrong:
            break
    return _Copied(sha256, wrong, file.bytes)


def _told(chunks: Iterator[bytes], done: int, whole: int, tell: Tell) -> Iterator[bytes]:
    for chunk in chunks:
        done += len(chunk)
        yield chunk
        tell(done, whole)


def _wrong(store: Store, log: str, file: Listed) -> Iterator[str]:
    """What is damaged in a file."""
    stored, segment = stored_name(log, file), parse_segment_name(file.name)
    if segment is None:
        try:
            parse_snapshot(read_whole(store.disk, stored), file.name)
        except LogDamaged as error:
            yield str(error)
        return
    base = segment[0]
    opened = store.disk.open(stored)
    try:
        for found in walk(opened, base, base, base + file.bytes):
            if isinstance(found, Hole):
                size = found.end - found.start
                yield f"{file.name}: {size} bytes at position {found.start - base} are damaged"
    finally:
        opened.close()
