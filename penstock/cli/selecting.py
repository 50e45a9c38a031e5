"""What `penstock copy`, `move` and `withdraw` share: which messages, and how they are done, some at a time.

A call to the broker does `PART` messages at most, so that a terminal shows how far it is and Ctrl-C ends it
soon. What was done before stays done.
"""

import argparse
import re
from collections.abc import Mapping
from typing import Any, Final

from penstock.cli.admin import Admin, add_queue, at_least, say_objects
from penstock.cli.messaging import progress
from penstock.cli.search import add_selection
from penstock.common import tables, units
from penstock.errors import Misuse

PART: Final = 20_000
LIVING: Final = ("ready", "delayed", "held", "dead")
_RANGE: Final = re.compile(r"([0-9]{1,17})(?:-([0-9]{1,17}))?", re.ASCII)


def add_which(parser: argparse.ArgumentParser, states: tuple[str, ...]) -> None:
    add_queue(parser)
    parser.add_argument(
        "--offsets",
        type=ranges,
        metavar="LIST",
        help="these messages, as 17 or 1,5,100-199; the last is meant",
    )
    add_selection(parser, states)
    parser.add_argument("--limit", type=at_least(1), metavar="N", help="at most so many (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="change nothing, only count")


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", metavar="QUEUE", required=True, help="the other queue")


def ranges(text: str) -> tuple[tuple[int, int], ...]:
    """The kind of an argument: offsets, and ranges of them that have their ends in them."""
    found = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise argparse.ArgumentTypeError(f"{part!r} is no offset, and no range such as 100-199")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise argparse.ArgumentTypeError(f"{part!r} ends before it begins; use {last}-{first}")
        found.append((first, last + 1))
    return tuple(found)


def fields_of(args: argparse.Namespace) -> dict[str, Any]:
    """The wish as the API has it."""
    if args.offsets is None and args.where is None and args.state is None:
        raise Misuse("say which messages: --offsets, --where or --state")
    fields: dict[str, Any] = {"ranges": args.offsets, "where": args.where}
    if args.state is not None:
        fields["state"] = args.state.split(",")
    return {name: value for name, value in fields.items() if value is not None}


def do(
    admin: Admin,
    queue: str,
    verb: str,
    done: str,
    fields: Mapping[str, Any],
    limit: int | None,
    dry_run: bool,
) -> dict[str, Any]:
    """Part by part; what the parts come to."""
    totals: dict[str, Any] = {"selected": 0, done: 0, "held": 0, "missing": 0}
    following: int | None = 0
    with progress() as tell:
        while following is not None and limit != 0:
            some = PART if limit is None else min(limit, PART)
            part = {**fields, "from": following, "limit": some, "dry_run": dry_run}
            answer = admin.post("queues", queue, verb, fields=part)
            for name in totals:
                totals[name] += answer[name]
            following = answer["next"]
            if limit is not None:
                limit -= answer["selected"] - answer["held"] if dry_run else answer[done]
            tell(f"{totals['selected']:,} messages")
    return {**totals, "dry_run": dry_run}


def said(totals: Mapping[str, Any], done: str, where: str) -> str:
    count = totals["selected"] - totals["held"] if totals["dry_run"] else totals[done]
    what = units.counted(count, "message")
    text = (
        f"{what} would be {done}{where}; nothing was changed"
        if totals["dry_run"]
        else f"{done} {what}{where}"
    )
    if totals["held"]:
        text += f"; {totals['held']:,} stay, because somebody holds them"
    return text


def run_to(args: argparse.Namespace, verb: str, done: str) -> int:
    """Copy or move."""
    fields = {**fields_of(args), "to": args.to}
    with Admin(args) as admin:
        totals = do(admin, args.queue, verb, done, fields, args.limit, args.dry_run)
    if args.json:
        say_objects([{"queue": args.queue, "to": args.to, **totals}])
    else:
        print(said(totals, done, f" from {tables.shown(args.queue)} to {tables.shown(args.to)}"))
    return 0
