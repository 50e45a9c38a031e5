"""`penstock top [PATTERN]`: the queues live in the terminal: sorted, filtered, opened, paused, redriven.

The first snapshot is taken before the screen is: a wrong address or token is one line on standard error, as
with every other command. With `--json` that snapshot is all there is. The screen needs Textual, which the
extra `dashboard` installs, and which is imported only here, when it is needed.
"""

import argparse
import os
import sys
from typing import Final

from penstock.cli.admin import add_admin, say_objects
from penstock.cli.main import EXIT_FAILURE
from penstock.cli.queues import add_choice, check_choice, in_order, log_nothing
from penstock.errors import Misuse, PenstockError
from penstock.top.feed import Feed, Snapshot

HELP = "watch the queues live, sort, filter and open them, pause and redrive"


DUMB: Final = "dumb"
INSTEAD: Final = "use `penstock queues --watch`, or `--json` for one snapshot"


class TextualMissing(PenstockError):
    """What draws the screen is not installed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser)
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    check_choice(args)
    if not args.json:
        _check_terminal()
        _check_textual()
    feed = Feed(args)
    first = feed.look()
    if args.json:
        say_objects([_fields(feed.url, first, args.sort)])
        return 0
    from penstock.top.app import Top

    log_nothing()
    app = Top(args, feed, first)
    code = app.run()
    if app.fault is not None:
        raise app.fault  # with its traceback, now that the terminal is in order
    # Without a code Textual has found a fault, and has shown it.
    return EXIT_FAILURE if code is None else code


def _check_terminal() -> None:
    # Textual reads from standard input and writes to standard error.
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise Misuse(f"this is no terminal; {INSTEAD}")
    if os.environ.get("TERM") == DUMB:
        raise Misuse(f"this terminal cannot be drawn on (TERM is {DUMB}); {INSTEAD}")


def _check_textual() -> None:
    try:
        import textual  # noqa: F401 - whether it can be imported is what is asked
    except ImportError:
        raise TextualMissing("`penstock top` needs Textual: pip install 'penstock[dashboard]'") from None


def _fields(url: str, found: Snapshot, sort: str) -> dict[str, object]:
    return {
        "url": url,
        "version": found.engine["version"],
        "uptime_seconds": found.engine["uptime_seconds"],
        "total": {**found.total, "connections": found.connections},
        "queues": in_order(found.queues, sort),
    }
