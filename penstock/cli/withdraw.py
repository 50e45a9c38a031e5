"""`penstock withdraw QUEUE`: takes messages that nobody holds out of a queue: ready, delayed and dead ones.

What is withdrawn is gone for consumers, and stays readable in the log as long as retention keeps it. A person
is asked first, who is told how many there are; where there is nobody to ask, `--yes` has to say it.
"""

import argparse
from typing import Final

from penstock.cli.admin import Admin, add_admin, say_objects
from penstock.cli.purge import ask_and_do
from penstock.cli.selecting import LIVING, add_which, do, fields_of, said
from penstock.client.http_core import Answer
from penstock.common import tables, units

HELP: Final = "take messages that nobody holds out of a queue"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_which(parser, LIVING)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    fields, name = fields_of(args), tables.shown(args.queue)

    def totals(admin: Admin, dry_run: bool) -> dict[str, object]:
        return do(admin, args.queue, "withdraw", "withdrawn", fields, args.limit, dry_run)

    def question(found: Answer) -> str:
        return f"Withdraw {units.counted(found['selected'] - found['held'], 'message')} of {name}?"

    def withdraw(admin: Admin) -> tuple[str, Answer]:
        done = totals(admin, False)
        return said(done, "withdrawn", f" from {name}"), {"queue": args.queue, **done}

    if args.dry_run:
        with Admin(args) as admin:
            found = totals(admin, True)
        if args.json:
            say_objects([{"queue": args.queue, **found}])
        else:
            print(said(found, "withdrawn", f" from {name}"))
        return 0
    return ask_and_do(args, "withdraw", question, withdraw, lambda admin: totals(admin, True), "withdrawn")
