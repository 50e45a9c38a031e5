"""`penstock dead QUEUE`: how many dead letters there are of which reason, and the first of them."""

import argparse
from collections.abc import Iterator
from itertools import islice
from typing import Final

from penstock.cli.admin import Admin, add_admin, add_queue, at_least, say_objects
from penstock.cli.peek import body_of, messages, width, with_text
from penstock.cli.show import deaths
from penstock.client.http_core import Answer
from penstock.common import tables, units
from penstock.common.tables import columns
from penstock.model.life import DEAD_REASONS

HELP = "show the dead letters of a queue, by reason and one by one"

REASONS: Final = tuple(sorted(reason.label for reason in DEAD_REASONS))
LIMIT_DEFAULT: Final = 20
WHY_WIDTH: Final = 40
"""So much is shown of what was said with a rejection; all of it with `--json`."""

COLUMNS: Final = columns(">OFFSET", "REASON", "WHY", ">AGE", ">ATTEMPTS", "HELD BY", "VALUE")
WHY: Final = 2  # its place among them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_queue(parser)
    add_reason(parser)
    parser.add_argument(
        "--limit",
        type=at_least(1),
        default=LIMIT_DEFAULT,
        metavar="N",
        help="show at most so many letters (default: %(default)s)",
    )
    add_admin(parser)


def add_reason(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--reason",
        choices=REASONS,
        metavar="REASON",
        help=f"only letters that died for this reason: {', '.join(REASONS)}",
    )


def run(args: argparse.Namespace) -> int:
    with Admin(args) as admin:
        queue = admin.get("queues", args.queue)
        letters = list(_letters(admin, args)) if queue["dead"] else []
    if args.json:
        say_objects(map(with_text, letters))
        return 0
    if not queue["dead"]:
        print(f"{tables.shown(args.queue)} has no dead letters")
        return 0
    print("\n".join(deaths(queue["dead_reasons"])))
    if letters:
        rows, headings = [_cells(letter) for letter in letters], list(COLUMNS)
        if not any(letter["why"] for letter in letters):  # as when nobody has said anything
            del headings[WHY]
            for cells in rows:
                del cells[WHY]
        print("", *tables.table(headings, tables.fitting(rows, headings, width())), sep="\n")
    return 0


def _letters(admin: Admin, args: argparse.Namespace) -> Iterator[Answer]:
    if args.reason is None:
        return messages(admin, args.queue, args.limit, start=None, state="dead")
    # The API lists dead letters of every reason: those of one are picked out here.
    every = messages(admin, args.queue, 1 << 56, start=None, state="dead")
    return islice((letter for letter in every if letter["reason"] == args.reason), args.limit)


def _cells(letter: Answer) -> list[str]:
    return [
        str(letter["offset"]),
        letter["reason"],
        tables.cut(tables.shown(letter["why"] or tables.NOTHING), WHY_WIDTH),
        units.since(letter["time"]),
        units.count(letter["attempts"]),
        letter["consumer"] or tables.NOTHING,
        tables.value(body_of(letter)),
    ]
