"""Restoring: from a store of backups to a folder that a broker can be started on.

What comes out is the log as it was at one log position, the *cut*: without a time that is the end of the last
backup, with one the place before the first block that is of later. Behind a cut a log looks as after a power
cut at that moment, so that a start does what it does then: what consumers held comes again, a transaction
without its end is none.

Of a cluster with several logs (shards) this is done with each, at one time; which log it is, is said by the
`shard`. Any other broker has one, shard 0.

A cut is made from one of two beginnings, and the blocks that follow it, which may be from later backups:

    a backup      its files are the state at its end
    a snapshot    its state, with exactly the segments that it names: one that was compacted after it lacks
                  messages that were alive then, and does not do

**Another log.** What was given out behind the cut is given out again: offsets, openings, numbers of queues.
So a restored log begins with a block that gives it a number of its own, which every id and every queue's
identity begins with: whoever comes with an id, a verdict, a checkpoint or a lease from before is told that it
is another. Offsets before the cut are what they were; keys of transactions before it are known.

Rules that always hold:
  * Nothing is overwritten: the folder must be empty, or hold what an earlier call for the same cut has left.
  * As long as anything is missing, the file `restoring` is there, and no broker opens the folder
    (`Log.open`). Called again, it goes on: files that are there with the right checksum stay.
  * Every file is compared with the checksum that its backup has of it.

The folder may be a `StreamDisk`: then all of this happens to the stream of a cluster, which must be empty.
How it fails: `BackupError`, with the file and what to do; `OSError` of the disk.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from penstock.log.backup.store import Backup, BackupError, Kept, LogBackup, Store, digest, put_file
from penstock.log.block import HEADER_BYTES, KIND_CONTROL, Header, body_checksum, control_parts
from penstock.log.disk import (
    RESTORING,
    WATERMARK,
    Disk,
    RealDisk,
    discard,
    read_whole,
    sync_folder,
    write_whole,
)
from penstock.log.errors import LogDamaged
from penstock.log.scan import find_headers
from penstock.log.segment import parse_segment_name, segment_name
from penstock.log.snapshot import parse_snapshot
from penstock.log.state import FORMAT

Tell = Callable[[int, int], None]
D = TypeVar("D", bound=Disk)


class Plan(NamedTuple):
    """What is to be there."""

    cut: int
    files: tuple[tuple[Kept, int], ...]  # and how many bytes of each

    @property
    def text(self) -> bytes:
        files = [[it.name, it.sha256, count] for it, count in self.files]
        return json.dumps({"cut": self.cut, "files": files}).encode()


class _Start(NamedTuple):
    """A beginning: the state at a log position, and the files that it needs."""

    position: int
    files: Mapping[str, Kept]


def plan(store: Store, at_us: int | None = None, log: str | None = None, shard: int = 0) -> Plan:
    """What is to be there of one log at that time; None: at the end of the last backup. `log`: of that log
    alone."""
    backups = meant(store, at_us, log)
    whole = [it for it in backups if at_us in (None, it.time_us)]
    if at_us is None or whole:
        found = whole[-1].logs[shard]
        return _planned({it.name: it for it in found.files}, found.end)
    chain = [it.logs[shard] for it in backups]
    written = _written(chain)
    for start in sorted(_starts(store, chain, at_us), key=lambda it: -it.position):
        cut = _cut(store, start, written, at_us, chain[-1].end)
        if cut is not None:
            return cut
    raise BackupError(
        "nothing here goes back to exactly that time: the log had not begun, or too much of it was compacted "
        "or removed before it was backed up. The time of each backup does (--list), and what came soon after"
    )


def meant(store: Store, at_us: int | None = None, log: str | None = None) -> list[Backup]:
    """The backups of the same log, or logs, that are of use for that, oldest first."""
    backups = [it for it in store.backups if log is None or log in it.numbers]
    if not backups:
        what = "no backup" if log is None else f"no backup of log {log!r} (--list shows which there are)"
        raise BackupError("; ".join([f"there is {what} in {store.disk.where('')}", *store.unreadable]))
    last = backups[-1]
    if at_us is not None and at_us > last.time_us:
        raise BackupError(f"the last backup, {last.name}, is older than that; without --at it is restored")
    numbers = last.numbers if at_us is None else _numbers_at(backups, at_us)
    return [it for it in backups if it.numbers == numbers]


def _numbers_at(backups: list[Backup], at_us: int) -> tuple[str, ...]:
    """A restored log is another one, and has backups of its own: the one that was there at that time."""
    ends = {it.numbers: it.time_us for it in backups}
    firsts = {it.numbers: it.time_us for it in reversed(backups)}
    of_then = [it.numbers for it in backups if it.time_us == at_us]
    there = of_then or [it for it in ends if firsts[it] <= at_us <= ends[it]]
    if len(there) > 1:
        names = (_telling(it, there) for it in there)
        raise BackupError(f"of that time there are backups of several logs: say --log {' or '.join(names)}")
    return there[0] if there else next(it.numbers for it in backups if at_us <= ends[it.numbers])


def _telling(numbers: tuple[str, ...], all_of_them: list[tuple[str, ...]]) -> str:
    """The first number that no other has."""
    others = {number for it in all_of_them if it != numbers for number in it}
    return next((it for it in numbers if it not in others), numbers[0])


def _written(chain: list[LogBackup]) -> dict[int, Kept]:
    """By its first position: a segment that nobody has compacted, from the backup that has most of it."""
    found: dict[int, Kept] = {}
    for it in (it for backup in chain for it in backup.files):
        base, generation = parse_segment_name(it.name) or (0, 1)
        if not generation and (base not in found or it.bytes > found[base].bytes):
            found[base] = it
    return found


def _starts(store: Store, chain: list[LogBackup], at_us: int) -> Iterator[_Start]:
    """Those that are not of later."""
    yield _Start(0, {})
    # Of the one that was written to, a backup has the beginning.
    files = sorted((it for backup in chain for it in backup.files), key=lambda it: it.bytes)
    most = {it.name: it for it in files}
    for backup in chain:
        own = {it.name: it for it in backup.files}
        if backup.time_us <= at_us:
            yield _Start(backup.end, own)
        for it in backup.files:
            if parse_segment_name(it.name) is not None:
                continue
            try:
                meta, _ = parse_snapshot(b"".join(store.read(it.stored)), it.name)
            except (LogDamaged, FileNotFoundError):
                continue
            segments = [(segment_name(*facts), size) for *facts, size, _, _ in meta["segments"]]
            is_here = all(name in most and most[name].bytes >= size for name, size in segments)
            if is_here and max(time_us for *_, time_us, _ in meta["segments"]) <= at_us:
                named = {name: own.get(name) or most[name] for name, _ in segments}
                yield _Start(meta["position"], {it.name: it, **named})


def _cut(store: Store, start: _Start, written: Mapping[int, Kept], at_us: int, end: int) -> Plan | None:
    """The cut, where every block between it and the start is here; `end`: there are none behind it."""
    files, at = dict(start.files), start.position
    while at < end:
        base = max((it for it in written if it <= at), default=0)
        kept = written.get(base)
        if kept is None or base + kept.bytes <= at:
            return None
        files[kept.name] = kept
        try:
            file = store.disk.open(kept.stored)
        except FileNotFoundError:
            raise _missing(store, kept) from None
        try:
            for header in find_headers(file, base, at, base + kept.bytes):
                if header.time_us > at_us:
                    return _planned(files, header.position) if header.position else None
        finally:
            file.close()
        at = base + kept.bytes
    return _planned(files, at)


def _missing(store: Store, kept: Kept) -> BackupError:
    return BackupError(f"{store.disk.where(kept.stored)}: is missing; choose another time (--list, --at)")


def _planned(files: Mapping[str, Kept], cut: int) -> Plan:
    found = []
    for it in sorted(files.values(), key=lambda it: it.name):
        base, generation = parse_segment_name(it.name) or (0, 1)
        if generation or base < cut:
            found.append((it, it.bytes if generation else min(it.bytes, cut - base)))
    return Plan(cut, tuple(found))


# --- carrying it out -------------------------------------------------------------------------------


def begin(wanted: Sequence[tuple[Plan, D]]) -> Sequence[tuple[Plan, D]]:
    """Mark all of a cluster's logs, or the one, as not restored yet; those that have to be filled and
    finished, in this order. An earlier call may have finished the first ones of them, and they may be led
    by now: as long as the last one has its mark, all had theirs."""
    is_marked = RESTORING in wanted[-1][1].names()
    done = [it for it in wanted if is_marked and _there(it[1]) and RESTORING not in it[1].names()]
    left = [it for it in wanted if it not in done]
    for plan, disk in left:
        _mark(plan, disk)
    return left


def _there(disk: Disk) -> list[str]:
    nothing = (RealDisk.LOCK, WATERMARK, f"{RESTORING}.tmp")
    return [name for name in disk.names() if name not in nothing]


def _mark(wanted: Plan, disk: Disk) -> None:
    there = _there(disk)
    if RESTORING in there:
        if read_whole(disk, RESTORING) != wanted.text:
            raise BackupError(
                f"{disk.where('')}: a restore of something else was begun here and not finished; call that "
                f"one again, or name another folder"
            )
    elif there:
        raise BackupError(
            f"{disk.where('')}: is not empty ({there[0]!r} is in it), and nothing is overwritten; name a new "
            f"folder"
        )
    else:
        write_whole(disk, RESTORING, wanted.text)


def fill(store: Store, wanted: Plan, disk: Disk, now_us: int, tell: Tell = lambda done, whole: None) -> None:
    """Put everything there; `finish` makes it a log."""
    _mark(wanted, disk)
    opening, done, whole = 0, 0, sum(count for _, count in wanted.files)
    for kept, count in wanted.files:
        if not _is_there(disk, kept, count):
            _put(store, disk, kept, count)
        sync_folder(disk)
        opening = max(opening, _opening(disk, kept))
        done += count
        tell(done, whole)
    base = max(wanted.cut, *(position + HEADER_BYTES for position in _compacted(wanted)), 0)
    name = segment_name(base, 0)
    block = _own_number(base, opening + 1, now_us)
    write_whole(disk, name, block)
    write_whole(disk, WATERMARK, (base + len(block)).to_bytes(8, "little"))


def finish(disk: Disk) -> None:
    """From now on it is a log."""
    disk.remove(RESTORING)
    sync_folder(disk)


def _is_there(disk: Disk, kept: Kept, count: int) -> bool:
    """Whether an earlier call has put it there. A file that is cut has no checksum: it is put there again."""
    if count != kept.bytes or kept.name not in disk.names():
        return False
    return digest((read_whole(disk, kept.name),)) == kept.sha256


def _put(store: Store, disk: Disk, kept: Kept, count: int) -> None:
    where = store.disk.where(kept.stored)
    try:
        found = put_file(disk, kept.name, store.read(kept.stored), kept.bytes, count)
    except FileNotFoundError:
        raise _missing(store, kept) from None
    except BackupError:  # It is longer, or shorter.
        found = ""
    if found != kept.sha256:
        discard(disk, kept.name)
        raise BackupError(f"{where}: is damaged, it has another checksum; choose another time (--list, --at)")


def _opening(disk: Disk, kept: Kept) -> int:
    """Which opening of the log a segment is from."""
    parsed = parse_segment_name(kept.name)
    if parsed is None:
        return 0
    file = disk.open(kept.name)
    try:
        base = parsed[0]
        return next((it.opening for it in find_headers(file, base, base, base + file.size())), 0)
    finally:
        file.close()


def _compacted(wanted: Plan) -> Iterator[int]:
    for kept, _ in wanted.files:
        base, generation = parse_segment_name(kept.name) or (0, 0)
        if generation:
            yield base


def _own_number(position: int, opening: int, now_us: int) -> bytes:
    """The block that makes it another log."""
    number = int.from_bytes(os.urandom(3), "little")
    parts = control_parts({"op": "opening", "opening": opening, "log": number, "format": FORMAT})
    size, checksum = sum(map(len, parts)), body_checksum(parts)
    header = Header(
        KIND_CONTROL, 0, 0, 0, 0, opening, checksum, 0, 0, 0, size, now_us, position, 0, 0, position
    )
    return b"".join((header.pack(), *parts))
