"""`penstock redrive QUEUE`: dead letters back behind the tail of their queue, all of them or those that fit.

With a condition the broker looks at every letter, which takes its time: the command asks for some at a time,
and a terminal shows how far it is. What was redriven before Ctrl-C stays redriven.
"""

import argparse
from collections.abc import Callable, Mapping
from typing import Any, Final

from penstock.cli.admin import Admin, add_admin, add_queue, at_least, say_objects
from penstock.cli.dead import add_reason
from penstock.cli.messaging import progress
from penstock.common import units

HELP = "put dead letters back into their queue"

SCAN: Final = 20_000
"""Letters that are looked at in one call."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_queue(parser)
    add_reason(parser)
    parser.add_argument("--where", metavar="SQL", help="only letters that this condition is true of")
    parser.add_argument("--limit", type=at_least(1), metavar="N", help="at most so many (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="change nothing, only count")
    add_admin(parser)
    parser.epilog = (
        "examples:\n"
        "  penstock redrive orders --dry-run\n"
        "  penstock redrive orders --reason rejected --limit 100\n"
        "  penstock redrive orders --where \"value.region = 'north' and died > '-2h'\""
    )


def run(args: argparse.Namespace) -> int:
    with Admin(args) as admin:
        with progress() as tell:
            totals = redrive(
                *(admin, args.queue, _fields(args), args.limit),
                lambda looked_at: tell(f"{looked_at:,} dead letters looked at"),
            )
        left = admin.get("queues", args.queue)["dead"]
    if args.json:
        say_objects([{"queue": args.queue, **totals, "left": left}])
    elif args.dry_run:
        looked = units.counted(totals["looked_at"], "dead letter")
        print(f"{totals['matched']:,} of {looked} would be redriven; nothing was changed")
    else:
        print(f"redriven {units.counted(totals['redriven'], 'dead letter')}; {left:,} left")
    return 0


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    fields: dict[str, Any] = {"dry_run": args.dry_run}
    if args.reason is not None:
        fields["reason"] = args.reason
    if args.where is not None:
        fields |= {"where": args.where, "scan_limit": SCAN}
    return fields


def redrive(
    admin: Admin,
    queue: str,
    fields: Mapping[str, Any],
    limit: int | None = None,
    tell: Callable[[int], object] = lambda _looked_at: None,
) -> dict[str, Any]:
    """Redrive part by part, or only count where the fields of the call say so; what the parts come to."""
    dry_run: bool = fields["dry_run"]
    totals = {"looked_at": 0, "matched": 0, "redriven": 0}
    following: int | None = 0
    while following is not None and limit != 0:
        part = {**fields, "from": following} | ({} if limit is None else {"limit": limit})
        answer = admin.post("queues", queue, "redrive", fields=part)
        for name in totals:
            totals[name] += answer[name]
        following = answer["next"]
        if limit is not None:
            limit -= answer["matched" if dry_run else "redriven"]
        tell(totals["looked_at"])
    return {**totals, "dry_run": dry_run}
