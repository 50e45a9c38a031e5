"""`penstock queues [PATTERN]`: every queue in a line, once or as it changes.

With `--watch` a terminal is drawn over once a second, as much as fits; elsewhere the tables follow each
other. A broker that goes away meanwhile is waited for. Ctrl-C is the way to end it, and so a success.
"""

import argparse
import logging
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from penstock.cli.admin import Admin, Unreachable, add_admin, say_objects
from penstock.client.http_core import Answer
from penstock.common import tables, units
from penstock.common.tables import columns
from penstock.errors import Misuse

HELP = "list the queues: what waits, what is held, what is dead, and how fast it moves"

WATCH_SECONDS: Final = 1.0

COLUMNS: Final = columns(
    "QUEUE", ">READY", ">DELAYED", ">HELD", ">DEAD", ">CONSUMERS", ">IN/S", ">OUT/S", ">OLDEST", ">SIZE", ""
)

SORTS: Final = (
    "name",
    "ready",
    "delayed",
    "held",
    "dead",
    "consumers",
    "rate_in",
    "rate_out",
    "oldest_seconds",
    "bytes",
)

SUMMED: Final = ("ready", "delayed", "held", "dead", "consumers", "rate_in", "rate_out", "bytes")
"""What the totals are of, but for the oldest."""

_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_CLEAR, _HIDE_CURSOR, _SHOW_CURSOR = "\x1b[2J", "\x1b[?25l", "\x1b[?25h"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--watch", action="store_true", help="again every second, until Ctrl-C")
    add_choice(parser)
    add_admin(parser)


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Which queues, and in which order."""
    parser.add_argument(
        "pattern", metavar="PATTERN", nargs="?", help="only these: * is any text, ? any character"
    )
    parser.add_argument(
        "--sort",
        choices=SORTS,
        default=SORTS[0],
        metavar="COLUMN",
        help=f"by {', '.join(SORTS)}; but for the name, the largest first (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    check_choice(args)
    with Admin(args) as admin:
        if not args.watch:
            _show(args, _found(admin, args))
            return 0
        return _watch(admin, args)


def check_choice(args: argparse.Namespace) -> None:
    if args.pattern == "":
        raise Misuse("the pattern is empty; leave it out to see every queue")


def _found(admin: Admin, args: argparse.Namespace) -> list[Answer]:
    return in_order(find(admin, args), args.sort)


def find(admin: Admin, args: argparse.Namespace) -> list[Answer]:
    """The queues that a command line asks for, by name."""
    return list(admin.pages("queues", "queues", by="after", match=args.pattern))


def in_order(queues: list[Answer], sort: str) -> list[Answer]:
    """Queues that come by name in another order: the largest first, and of the same size by name."""
    if sort == SORTS[0]:
        return queues
    return sorted(queues, key=lambda queue: queue[sort] or 0, reverse=True)


def _show(args: argparse.Namespace, queues: list[Answer]) -> None:
    if args.json:
        say_objects(queues)
    else:
        print("\n".join(lines_of(queues)))


def lines_of(queues: list[Answer], rows_max: int | None = None) -> list[str]:
    """The table, with the totals below; of more than `rows_max` queues the first."""
    left_out = 0 if rows_max is None else max(len(queues) - rows_max, 0)
    rows = [_cells(queue["name"], queue) for queue in queues[: len(queues) - left_out]]
    if left_out:
        rows.append([f"({left_out:,} more)", *[""] * (len(COLUMNS) - 1)])
    total = {**totals(queues), "paused": False}
    rows.append(_cells(units.counted(len(queues), "queue"), total))
    return tables.table(COLUMNS, rows)


def totals(queues: Sequence[Answer]) -> dict[str, Any]:
    """What all of them come to, by the names of the fields."""
    oldest = max((queue["oldest_seconds"] or 0 for queue in queues), default=0) or None
    return {**{name: sum(queue[name] for queue in queues) for name in SUMMED}, "oldest_seconds": oldest}


def _cells(name: str, queue: Answer) -> list[str]:
    return [
        name,
        units.count(queue["ready"]),
        units.count(queue["delayed"]),
        units.count(queue["held"]),
        units.count(queue["dead"]),
        units.count(queue["consumers"]),
        units.rate(queue["rate_in"]),
        units.rate(queue["rate_out"]),
        tables.age(queue["oldest_seconds"]),
        units.size(queue["bytes"]),
        "paused" if queue["paused"] else "",
    ]


# --- watching ----------------------------------------------------------------------------------------------


def _watch(admin: Admin, args: argparse.Namespace) -> int:
    on_terminal = sys.stdout.isatty() and not args.json
    queues = _found(admin, args)  # where nobody is there from the start, that is a failure
    log_nothing()
    trouble = ""
    try:
        if on_terminal:
            print(_CLEAR + _HIDE_CURSOR, end="")
        while True:
            if on_terminal:
                _draw(admin.url, queues, trouble)
            elif trouble:
                print(trouble, file=sys.stderr, flush=True)
            else:
                _show(args, queues)
                print("" if args.json else "\n", end="", flush=True)
            time.sleep(WATCH_SECONDS)
            try:
                queues, trouble = _found(admin, args), ""
            except Unreachable as error:
                trouble = str(error)
    except KeyboardInterrupt:
        return 0
    finally:
        if on_terminal:
            print(_SHOW_CURSOR, end="", flush=True)


def log_nothing() -> None:
    """What the client says of lost connections stands on the screen, in a line of its own."""
    logging.getLogger("penstock.client").handlers[:] = [logging.NullHandler()]


def _draw(url: str, queues: list[Answer], trouble: str) -> None:
    width, height = shutil.get_terminal_size()
    # Title, trouble, headings, totals, how many are left out, and the cursor have lines of their own.
    lines = [f"{url}  {time.strftime('%H:%M:%S')}", trouble, *lines_of(queues, max(height - 6, 1))]
    cut = (tables.cut(tables.shown(line), width) + _REST_OF_LINE for line in lines)
    print(_HOME + "\n".join(cut) + "\n" + _REST_OF_SCREEN, end="", flush=True)
