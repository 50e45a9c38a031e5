"""`penstock health [QUEUE]`: what needs attention, for people and, by its exit code, for scripts.

Exit codes: 0 nothing, 3 warnings, 4 something is bad; as of every command, 1 nobody could be asked, 2 misuse.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Final

from penstock.cli.admin import Admin, add_admin, say_objects
from penstock.client.http_core import Answer
from penstock.common import units
from penstock.common.tables import shown
from penstock.errors import PenstockError

HELP = "say what needs attention: exit code 0 nothing, 3 warnings, 4 something is bad"

EXITS: Final = {"ok": 0, "warn": 3, "bad": 4}
FIRST_SECONDS: Final = 30.0
"""So long a broker that was started just now may take for its first look."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("queue", metavar="QUEUE", nargs="?", help="of this queue alone")
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    with Admin(args) as admin:
        answer = _answer(admin, args.queue)
    if args.json:
        say_objects(answer["attention"])
    elif answer["attention"]:
        print("\n\n".join("\n".join(map(shown, lines_of(it))) for it in answer["attention"]))
        more = answer["bad"] + answer["warn"] - len(answer["attention"])
        if more:
            print(f"\nand {units.count(more)} more")
    else:
        print("Nothing needs attention.")
    return EXITS[answer["level"]]


def _answer(admin: Admin, queue: str | None) -> Answer:
    until = time.monotonic() + FIRST_SECONDS
    while True:
        answer = admin.get("health", queue=queue)
        if answer["looked"] is not None:
            return answer
        if time.monotonic() > until:
            raise PenstockError(f"{admin.url}: the broker has not looked at itself yet; try again")
        time.sleep(0.2)


def lines_of(finding: Answer) -> Iterator[str]:
    """One finding: what and since when, why, who, what to do."""
    subject = finding["queue"] or finding["reader"] or "the broker"
    yield f"{finding['level'].upper():4}  {subject}: {finding['state']}, for {units.since(finding['since'])}"
    yield f"      {finding['why']}"
    yield from (f"      {line}" for line in finding["lines"])
    if finding["who"]:
        yield f"      Who: {', '.join(finding['who'])}"
    yield f"      Do: {finding['do']}"
