"""`penstock restore DIR [DATA]`: a data folder, or the streams of a cluster, from what `penstock backup` has
kept.

What is restored, and what it means that the result is another log, is said in
`penstock/log/backup/restoring.py`. Before it counts as done, all of it is read as `penstock verify` reads it.

Exit 0: a broker can be started on it; 1: it cannot (called again, it goes on), or it can, and what was
damaged in the broker's own log is so here, too; 2: misuse.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Iterator, Sequence

from penstock.cli.admin import say_objects
from penstock.cli.backup import made_folder, told_disk, told_progress
from penstock.cli.main import EXIT_FAILURE
from penstock.cli.messaging import warn
from penstock.common import units
from penstock.common.given import SettingsError
from penstock.errors import Misuse
from penstock.log.backup.restoring import Plan, Tell, begin, fill, finish, meant, plan
from penstock.log.backup.store import Backup, BackupError, Store, digest
from penstock.log.disk import RealDisk
from penstock.log.inspect import inspect_log
from penstock.log.jetstream.disk import StreamDisk
from penstock.log.reader import LogReader
from penstock.report.period import NoMoment, datetime_of, moment_us
from penstock.server.settings import Settings
from penstock.server.settings_read import load

HELP = "make a data folder, or a cluster's log, of a backup, as it was at any time that is covered"

DAMAGED = (
    "is damaged, it has another checksum; remove it, and the next backup copies it again if it still can"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="the folder of the backups")
    parser.add_argument(
        "data", metavar="DATA", nargs="?", help="an empty or new folder (default: the setting data)"
    )
    parser.add_argument(
        "--at",
        metavar="TIME",
        help="as it was then: 2030-01-31T12:00:00Z, or how long ago: 90s, 15m, 1h (default: the last backup)",
    )
    parser.add_argument(
        "--log", metavar="LOG", help="of that log alone, where there are backups of several (see --list)"
    )
    parser.add_argument(
        "--engine",
        metavar="URL",
        help="nats://HOST:PORT,…: into the empty log of a cluster, with DATA as its copy",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="the settings of the broker that is to be started on it"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="only show which backups there are")
    what.add_argument(
        "--check", action="store_true", help="only compare every file of every backup with its checksum"
    )
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object a line")


def run(args: argparse.Namespace) -> int:
    with told_disk(args.folder):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        store = Store(RealDisk(args.folder, read_only=True))
    except (FileNotFoundError, NotADirectoryError):
        raise Misuse(
            f"there is no folder {args.folder!r}; name one that `penstock backup` has filled"
        ) from None
    if args.list or args.check:
        return _show(store, args)
    warn("; ".join(store.unreadable) or None)
    now_us = time.time_ns() // 1000
    try:
        at_us = None if args.at is None else moment_us(args.at, now_us)
        settings = load(args, os.environ)
    except (NoMoment, SettingsError) as error:
        raise Misuse(str(error)) from None
    shards = len(meant(store, at_us, args.log)[-1].logs)
    plans = [_planned(store, at_us, args.log, shard, shards) for shard in range(shards)]
    size = sum(count for it in plans for _, count in it.files)
    queues: dict[str, int] = {}
    defects: list[str] = []
    with told_disk(settings.data), _target(settings, plans) as left:
        with told_progress() as tell:
            done = 0
            for wanted, disk in left:
                at = _from(tell, done, size)
                fill(store, wanted, disk, now_us, at)
                where = "" if shards == 1 else f"{disk.path}: "
                defects += [f"{it.kind}: {where}{it.text}" for it in inspect_log(disk.path, at).defects]
                done += sum(count for _, count in wanted.files)
        for _, disk in left:
            finish(disk)
        for _, disk in left:
            with LogReader(disk.path) as reader:
                queues |= {name: queue.offset_end for name, queue in reader.queues().items()}
    files = sum(len(it.files) for it in plans)
    if args.json:
        facts = {"data": settings.data, "cuts": [it.cut for it in plans], "files": files, "bytes": size}
        say_objects([{**facts, "queues": queues, "defects": defects}])
    else:
        for text in defects:
            print(f"DEFECT {text}")
        where = f"up to log position {plans[0].cut}" if shards == 1 else f"in {shards} logs"
        print(
            f"{settings.data}: {units.size(size)}, {units.counted(len(queues), 'queue')}, {where}; "
            f"`penstock serve` can be started on it"
        )
    return EXIT_FAILURE if defects else 0


def _planned(store: Store, at_us: int | None, log: str | None, shard: int, shards: int) -> Plan:
    try:
        return plan(store, at_us, log, shard)
    except BackupError as error:
        if shards == 1:
            raise
        raise BackupError(f"shard {shard}: {error}") from None


def _from(tell: Tell, before: int, whole: int) -> Tell:
    """For one log of several."""
    return lambda done, _: tell(before + done, whole)


@contextlib.contextmanager
def _target(
    settings: Settings, plans: Sequence[Plan]
) -> Iterator[Sequence[tuple[Plan, RealDisk | StreamDisk]]]:
    if not isinstance(settings.engine, str):
        from penstock.cluster.restoring import restored_streams

        with restored_streams(settings, plans) as left:
            yield left
        return
    if len(plans) > 1:
        raise Misuse(
            f"this is a backup of a cluster with {len(plans)} logs (cluster.shards), and a data folder has "
            f"one: say --engine nats://… and --config, of a new cluster"
        )
    disk = made_folder(settings.data)
    disk.lock()
    try:
        yield begin([(plans[0], disk)])
    finally:
        disk.unlock()


def _show(store: Store, args: argparse.Namespace) -> int:
    """The backups, oldest first; and what is wrong with them."""
    wrong = list(store.unreadable)
    checked: dict[str, str] = {}  # by file: what is wrong with it
    for backup in store.backups:
        found = _damaged(store, backup, checked) if args.check else []
        wrong += found
        time_text = f"{datetime_of(backup.time_us):%Y-%m-%dT%H:%M:%S.%fZ}"
        facts = {"backup": backup.name, "time": time_text, "logs": backup.numbers, "bytes": backup.bytes}
        if args.json:
            say_objects([{**facts, "defects": [*backup.defects, *found]}])
        else:
            print(f"{time_text}  {units.size(backup.bytes):>10}  of {backup.whose}, by {backup.version}")
    for text in wrong if not args.json else store.unreadable:
        print(f"DEFECT {text}")
    return EXIT_FAILURE if wrong else 0


def _damaged(store: Store, backup: Backup, checked: dict[str, str]) -> list[str]:
    for file in backup.files:
        if file.stored not in checked:
            where = store.disk.where(file.stored)
            try:
                same = digest(store.read(file.stored)) == file.sha256
                checked[file.stored] = "" if same else f"{where}: {DAMAGED}"
            except OSError as error:
                checked[file.stored] = f"{where}: cannot be read: {error.strerror}"
    return [text for file in backup.files if (text := checked[file.stored])]
