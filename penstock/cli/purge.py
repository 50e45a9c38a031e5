"""`penstock purge QUEUE`: takes out what nobody holds: the messages, or with `--dead` the dead letters.

What is purged is gone for consumers, and stays readable in the log as long as retention keeps it. A person is
asked first; where there is nobody to ask, `--yes` has to say it.
"""

import argparse
import sys

from penstock.cli.admin import Admin, add_admin, add_queue, say_objects
from penstock.cli.main import EXIT_FAILURE
from penstock.common import tables, units
from penstock.errors import Misuse

HELP = "throw away the ready messages of a queue, or its dead letters"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_queue(parser)
    parser.add_argument("--dead", action="store_true", help="the dead letters, not the messages")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    what = "dead letter" if args.dead else "ready message"
    if not (args.yes or (sys.stdin.isatty() and sys.stderr.isatty())):
        raise Misuse("there is no terminal to ask on; say --yes to purge without a question")
    with Admin(args) as admin:
        if not args.yes:
            count = admin.get("queues", args.queue)["dead" if args.dead else "ready"]
            if not _agreed(f"Throw away {units.counted(count, what)} of {tables.shown(args.queue)}?"):
                print("nothing was purged", file=sys.stderr)
                return EXIT_FAILURE
        purged = admin.post("queues", args.queue, "purge", dead=args.dead)["purged"]
    if args.json:
        say_objects([{"queue": args.queue, "dead": args.dead, "purged": purged}])
    else:
        print(f"purged {units.counted(purged, what)} of {tables.shown(args.queue)}")
    return 0


def _agreed(question: str) -> bool:
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
