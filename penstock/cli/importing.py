"""`penstock import SOURCE [QUEUE]`: what waits in another server moves into a queue here (docs/import.md).

Ctrl-C and SIGTERM let the batch that is on its way finish; a second one ends at once. Either way the same
command goes on where this one has ended. Exit code 0 where nothing is left to take or `--count` is reached,
or one that follows was told to end; 1 on failure, 2 on misuse, 130 where it was ended before it was done.
"""

import argparse
import signal
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Final

from penstock.cli.admin import at_least
from penstock.cli.messaging import add_connection, find_url, http_options, progress, say_json, seconds
from penstock.errors import Misuse
from penstock.importing.source import FORMS, PASSWORD_VARIABLE

HELP: Final = "take what waits in another server into a queue here"
EXIT_INTERRUPTED: Final = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    forms = FORMS.replace("%", "%%")
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help=f"where messages are: {forms}; a password may come in {PASSWORD_VARIABLE} instead",
    )
    parser.add_argument(
        "queue", metavar="QUEUE", nargs="?", help="where they go (default: as it is called there)"
    )
    parser.add_argument("--count", type=at_least(1), metavar="N", help="at most so many (default: all)")
    parser.add_argument("--follow", action="store_true", help="go on with what comes, without end")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=1.0,
        metavar="S",
        help="over when none has come for so long (default: %(default)g)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="take nothing; say how many are there, where that can be asked"
    )
    parser.add_argument(
        "--journal",
        metavar="FILE",
        help="what the next run has to know (default: a file in ~/.local/state/penstock/import)",
    )
    add_connection(parser, ("http",))


def run(args: argparse.Namespace) -> int:
    from penstock.importing.journal import Journal
    from penstock.importing.run import Import, Stopped
    from penstock.importing.sink import Sink
    from penstock.importing.source import source_of

    source = source_of(args.source)
    queue = args.queue or source.queue
    if not queue:
        raise Misuse("sspq:// has no queue names: say which QUEUE here, behind the URL")
    if args.dry_run:
        source.open()
        with closing(source):
            there = source.left()
        if not there:
            raise Misuse(f"--dry-run: {source.place.scheme} has no way to ask how many there are")
        say_json(**there) if args.json else print(f"{source.name}: {_counts(there)}; nothing was taken")
        return 0
    url = find_url(args)[1]
    with (
        closing(Sink(url, queue, http_options(args))) as sink,
        closing(Journal(source, args.journal)) as journal,
        closing(source),
        progress() as tell,
    ):

        def tell_batch(receipt: Mapping[str, Any]) -> None:
            if args.json:
                say_json(**receipt)
            tell(f"{work.imported:,} messages from {source.name}")

        work = Import(source, sink, journal, args.count, args.follow, args.timeout, args.wait, tell_batch)
        is_whole = False
        with _ending(work):
            try:
                work.run()
                is_whole = not work.stop.is_set() or args.follow
            except Stopped:
                pass
        left = {} if work.stop.is_set() else source.left()
    if args.json:
        say_json(imported=work.imported, again=work.again, left=left, done=is_whole)
    else:
        again = f", {work.again:,} more had been stored before" if work.again else ""
        rest = f"; left there: {_counts(left)}" if any(left.values()) else ""
        end = "" if is_whole else "; ended early, the same command goes on"
        print(f"{work.imported:,} messages from {source.name} are in {queue!r}{again}{rest}{end}")
    return 0 if is_whole else EXIT_INTERRUPTED


def _counts(there: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {state}" for state, number in there.items() if number) or "none"


@contextmanager
def _ending(work: Any) -> Iterator[None]:
    """The first signal lets the batch finish, the second ends at once."""

    def heard(number: int, frame: object) -> None:
        if work.stop.is_set():
            raise KeyboardInterrupt
        work.stop.set()

    before = [(number, signal.signal(number, heard)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
