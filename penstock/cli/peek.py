"""`penstock peek QUEUE`: looks at messages and consumes nothing; nobody else notices.

The living ones, unless `--state` asks for others. A line a message: offset, state, age, attempts, value. A
long value is cut off, on a terminal at the end of the line; `--full` shows all of it, `--raw` writes bytes
as they are, `--json` everything that is known: `value` where it is text, else `value_base64`. With
`--history`, what has happened to a message follows below it.
"""

import argparse
import base64
import heapq
import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from penstock.cli.admin import Admin, add_admin, add_queue, at_least, say_objects
from penstock.cli.messaging import add_raw, value_of
from penstock.client.http_core import Answer
from penstock.common import tables, units
from penstock.common.tables import columns
from penstock.errors import Misuse

HELP = "look at the messages of a queue without taking any"

LIMIT_DEFAULT: Final = 20
PAGE: Final = 1000
"""How many the API gives at a time at most."""

LIVING: Final = ("ready", "delayed", "held")
STATES: Final = (*LIVING, "dead", "gone", "all")
CHARACTERS: Final = 200
"""So much of a value is shown where no terminal is."""

COLUMNS: Final = columns(">OFFSET", "STATE", ">AGE", ">ATTEMPTS", "VALUE")
HISTORY: Final = columns("EVENT", "TIME", ">ATTEMPT", "REASON", "CONSUMER")
_INDENT: Final = "        "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_queue(parser)
    parser.add_argument(
        "--from",
        dest="start",
        type=at_least(0),
        metavar="OFFSET",
        help="begin there (default: the first kept)",
    )
    parser.add_argument(
        "--limit",
        type=at_least(1),
        default=LIMIT_DEFAULT,
        metavar="N",
        help="at most so many (default: %(default)s)",
    )
    parser.add_argument(
        "--state", choices=STATES, help=f"only messages in this state (default: {', '.join(LIVING)})"
    )
    parser.add_argument("--full", action="store_true", help="do not shorten values")
    parser.add_argument("--history", action="store_true", help="with what has happened to each")
    add_raw(parser)
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    if args.raw and (args.json or args.history):
        raise Misuse("--raw writes nothing but the values; use it without --json and --history")
    with Admin(args) as admin:
        found = messages(
            admin, args.queue, args.limit, start=args.start, state=args.state, history=args.history
        )
        if args.raw:
            for message in found:
                sys.stdout.buffer.write(body_of(message))
            sys.stdout.buffer.flush()
        elif args.json:
            say_objects(map(with_text, found))
        else:
            shown = list(found)
            print("\n".join(_lines(shown, args.full)))
            if not shown and args.state is None:
                print("no message is alive; --state dead, gone or all shows others", file=sys.stderr)
    return 0


def with_text(message: Answer) -> Answer:
    """A message for programs: its value as text where it is some."""
    return {name: value for name, value in message.items() if name != "value_base64"} | value_of(
        body_of(message)
    )


def messages(
    admin: Admin, queue: str, limit: int, *, start: int | None, state: str | None, history: bool = False
) -> Iterator[Answer]:
    """The first so many messages by offset, page by page; those that live where no state is named."""

    def pages(one: str | None) -> Iterator[Answer]:
        return admin.pages(
            "messages",
            *("queues", queue, "messages"),
            by="from",
            limit=min(limit, PAGE),
            state=one,
            history=history or None,
            **{"from": start},
        )

    if state is not None:
        return islice(pages(None if state == "all" else state), limit)
    return islice(heapq.merge(*map(pages, LIVING), key=lambda message: int(message["offset"])), limit)


def body_of(message: Answer) -> bytes:
    return base64.b64decode(message["value_base64"])


def width() -> int | None:
    """How much of a line a terminal shows; None where there is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _lines(found: Sequence[Answer], full: bool) -> list[str]:
    rows = [cells(message) for message in found]
    if not full:
        rows = [[*others, shortened(value)] for *others, value in rows]
        rows = tables.fitting(rows, COLUMNS, width())
    heading, *lines = tables.table(COLUMNS, rows)
    below = [_history(message.get("history", ())) for message in found]
    return [heading, *(line for pair in zip(lines, below, strict=True) for line in (pair[0], *pair[1]))]


def shortened(value: str) -> str:
    return value if len(value) <= CHARACTERS else f"{value[:CHARACTERS]}..."


def cells(message: Answer) -> list[str]:
    """A message in the cells of `COLUMNS`."""
    return [
        str(message["offset"]),
        state_of(message),
        units.since(message["time"]),
        tables.NOTHING if message["attempts"] is None else units.count(message["attempts"]),
        tables.value(body_of(message)),
    ]


def state_of(message: Answer) -> str:
    """`ready`, `dead (expired)`, `held by 127.0.0.1:5123#7`, `delayed until 2024-05-01T12:00:00.000000Z`."""
    reason = f" ({message['reason']})" if message["reason"] else ""
    holder = f" by {message['consumer']}" if message["state"] == "held" and message["consumer"] else ""
    taken = f", held by {message['consumer']}" if message["state"] == "dead" and message["consumer"] else ""
    due = f" until {message['due']}" if message["due"] else ""
    return f"{message['state']}{reason}{holder}{taken}{due}"


def _history(events: Sequence[Answer]) -> list[str]:
    if not events:
        return []
    rows = [
        (
            event["event"],
            event["time"],
            units.count(event["attempt"]),
            event["reason"] or tables.NOTHING,
            event["consumer"] or tables.NOTHING,
        )
        for event in events
    ]
    return [_INDENT + line for line in tables.table(HISTORY, rows)]
