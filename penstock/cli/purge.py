"""`penstock purge QUEUE`: takes out what nobody holds: the messages, or with `--dead` the dead letters.

What is purged is gone for consumers, and stays readable in the log as long as retention keeps it. A person is
asked first; where there is nobody to ask, `--yes` has to say it.
"""

import argparse
import sys
from collections.abc import Callable

from penstock.cli.admin import Admin, add_admin, add_queue, say_objects
from penstock.cli.main import EXIT_FAILURE
from penstock.client.http_core import Answer
from penstock.common import tables, units
from penstock.errors import Misuse

HELP = "throw away the ready messages of a queue, or its dead letters"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_queue(parser)
    parser.add_argument("--dead", action="store_true", help="the dead letters, not the messages")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    what, name = "dead letter" if args.dead else "ready message", tables.shown(args.queue)

    def question(queue: Answer) -> str:
        return f"Throw away {units.counted(queue['dead' if args.dead else 'ready'], what)} of {name}?"

    def purge(admin: Admin) -> tuple[str, Answer]:
        purged = admin.post("queues", args.queue, "purge", dead=args.dead)["purged"]
        said = f"purged {units.counted(purged, what)} of {name}"
        return said, {"queue": args.queue, "dead": args.dead, "purged": purged}

    return ask_and_do(args, "purge", question, purge)


def ask_and_do(
    args: argparse.Namespace,
    verb: str,
    question: Callable[[Answer], str],
    do: Callable[[Admin], tuple[str, Answer]],
    look: Callable[[Admin], Answer] | None = None,
    done: str = "",
) -> int:
    """Do what cannot be undone, once somebody has agreed who is told how the queue stands, or what `look` has
    found; and say so."""
    if not (args.yes or (sys.stdin.isatty() and sys.stderr.isatty())):
        raise Misuse(f"there is no terminal to ask on; say --yes to {verb} without a question")
    with Admin(args) as admin:
        if not args.yes:
            asked = question(look(admin) if look is not None else admin.get("queues", args.queue))
            print(f"{asked} [y/N] ", end="", file=sys.stderr, flush=True)
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                print(f"nothing was {done or verb.removesuffix('e') + 'ed'}", file=sys.stderr)
                return EXIT_FAILURE
        said, answer = do(admin)
    if args.json:
        say_objects([answer])
    else:
        print(said)
    return 0
