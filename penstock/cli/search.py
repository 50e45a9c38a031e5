"""`penstock search QUEUE|PATTERN`: finds messages in any state, in one queue or in many; consumes nothing.

A line a message, as `penstock peek` shows them; `--json` writes an object a line as they are found,
`--export` a file, whose name says of which kind: it is there when it is whole. Ctrl-C breaks the search off.

Exit codes: 0 where all was looked at, or as many were found as are wanted; 1 where something could not be,
which standard error tells.
"""

import argparse
import base64
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from penstock.cli.admin import Admin, add_admin, at_least, say_objects
from penstock.cli.main import EXIT_FAILURE
from penstock.cli.messaging import progress
from penstock.cli.peek import shortened, state_of, width
from penstock.client.http_core import Answer
from penstock.common import tables, units
from penstock.common.tables import columns
from penstock.errors import Misuse, PenstockError

HELP = "find messages by a condition, by state and by time"

LIMIT_DEFAULT: Final = 100
TABLE_ROWS: Final = 1000
"""So many rows are laid out together."""

PIECE_BYTES: Final = 1 << 18
END_BYTES: Final = 1 << 16
"""The last line of an answer has less."""

STATES: Final = ("ready", "delayed", "held", "dead", "gone")
FORMATS: Final = {".ndjson": "ndjson", ".csv": "csv", ".parquet": "parquet"}
COLUMNS: Final = columns("QUEUE", ">OFFSET", "STATE", ">AGE", ">ATTEMPTS", "VALUE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "queue", metavar="QUEUE", help="a queue, or a pattern: * stands for any characters, ? for one"
    )
    add_selection(parser, STATES)
    parser.add_argument(
        "--from",
        dest="start",
        type=when,
        metavar="WHEN",
        help="from this offset or time on: 17, 2026-11-15T10:00:00Z, or 1h for an hour ago",
    )
    parser.add_argument("--to", type=when, metavar="WHEN", help="before this offset or time")
    parser.add_argument("--newest", action="store_true", help="the newest first")
    parser.add_argument(
        "--limit",
        type=at_least(1),
        metavar="N",
        help=f"at most so many (default: {LIMIT_DEFAULT}; of --json and --export: all)",
    )
    parser.add_argument("--after", metavar="CURSOR", help="go on where a search ended")
    parser.add_argument("--full", action="store_true", help="do not shorten values")
    parser.add_argument(
        "--export", metavar="FILE", help=f"write them to a file that ends in {', '.join(FORMATS)}"
    )
    add_admin(parser)
    parser.epilog = (
        "examples:\n"
        "  penstock search orders --where \"value.customer = 'C-17'\" --from 1d --newest\n"
        "  penstock search 'orders.*' --state dead,held\n"
        "  penstock search orders --state dead --export dead.csv"
    )


def when(text: str) -> str:
    """The kind of an argument: so long ago has a minus for the broker, which shells' options begin with."""
    return f"-{text}" if re.fullmatch("[0-9]+[smhdw]", text) else text


def add_selection(parser: argparse.ArgumentParser, states: tuple[str, ...]) -> None:
    parser.add_argument("--where", metavar="SQL", help="only messages that this condition is true of")
    parser.add_argument(
        "--state", metavar="STATES", help=f"only messages in these states: {', '.join(states)}, by commas"
    )


def run(args: argparse.Namespace) -> int:
    if args.export and (args.json or args.full):
        raise Misuse("--export writes a file; use it without --json and --full")
    with Admin(args) as admin:
        if args.export:
            return _export(admin, args)
        limit = args.limit or (None if args.json else LIMIT_DEFAULT)
        end: dict[str, Any] = {}
        with progress() as tell:
            found = _found(admin, args, limit, end, tell)
            if args.json:
                say_objects(found)
            else:
                _say_rows(found, args.full)
    return _tell_end(end, args.json)


def _address(args: argparse.Namespace, limit: int | None) -> tuple[tuple[str, ...], Mapping[str, object]]:
    many = any(mark in args.queue for mark in "*?")
    segments = ("search",) if many else ("queues", args.queue, "search")
    query = {
        "queues": args.queue if many else None,
        "where": args.where,
        "state": args.state,
        "from": args.start,
        "to": args.to,
        "newest": args.newest or None,
        "after": args.after,
        "limit": limit,
    }
    return segments, query


def _found(
    admin: Admin, args: argparse.Namespace, limit: int | None, end: dict[str, Any], tell: Any
) -> Iterator[Answer]:
    """Messages as they are found; at last, `end` has how it ended."""
    segments, query = _address(args, limit)
    values = "full" if args.full or args.json else "cut"
    with admin.stream(*segments, **query, values=values) as response:
        for line in response:
            fields = json.loads(line)
            if "offset" in fields:
                yield fields
            elif "progress" in fields:
                told = fields["progress"]
                tell(f"{told['searched']:,} of about {told['total']:,} messages, {told['found']:,} found")
            elif "missing" in fields:
                it = fields["missing"]
                which = f"{tables.shown(it['queue'])}: offsets {it['first']} to {it['end'] - 1}"
                print(f"{which} could not be looked at ({it['why']})", file=sys.stderr)
            else:
                end |= fields["end"]


def _say_rows(found: Iterator[Answer], full: bool) -> None:
    rows: list[list[str]] = []
    is_first = True
    for message in found:
        rows.append(_cells(message, full))
        if len(rows) == TABLE_ROWS:
            _say_table(rows, full, is_first)
            rows, is_first = [], False
    if rows or is_first:
        _say_table(rows, full, is_first)


def _say_table(rows: list[list[str]], full: bool, heading: bool) -> None:
    lines = tables.table(COLUMNS, rows if full else tables.fitting(rows, COLUMNS, width()))
    print("\n".join(lines if heading else lines[1:]))


def _cells(message: Answer, full: bool) -> list[str]:
    raw = message.get("value_base64")
    payload = message["value"].encode() if raw is None else base64.b64decode(raw)
    value = tables.value(payload)
    return [
        tables.shown(message["queue"]),
        str(message["offset"]),
        state_of(message),
        units.since(message["timestamp"]),
        tables.NOTHING if message["attempts"] is None else units.count(message["attempts"]),
        value if full else shortened(value),
    ]


def _tell_end(end: Mapping[str, Any], quiet: bool) -> int:
    if not end:
        print("the answer broke off before its end: this is not all", file=sys.stderr)
        return EXIT_FAILURE
    if end["complete"]:
        return 0
    on = f"; --after {end['next']} goes on" if end["next"] else ""
    if end["why"] == "limit":
        if not quiet:
            print(f"there may be more: --limit N shows more{on}", file=sys.stderr)
        return 0
    detail = end.get("detail") or {
        "time": "the time was over",
        "missing": f"{end['missing']:,} messages could not be looked at",
        "stopping": "the broker stops",
    }.get(end["why"], end["why"])
    print(f"this is not all: {detail}{on}", file=sys.stderr)
    return EXIT_FAILURE


def _export(admin: Admin, args: argparse.Namespace) -> int:
    file = Path(args.export)
    kind = FORMATS.get(file.suffix.lower())
    if kind is None:
        raise Misuse(f"--export {args.export}: its name says the kind of file; use {', '.join(FORMATS)}")
    segments, query = _address(args, args.limit)
    part = file.with_name(file.name + ".part")
    written, last = 0, b""
    with _of_the_file(file):
        out = part.open("wb")
    try:
        with progress() as tell, admin.stream(*segments, **query, format=kind, values="full") as response:
            while piece := response.read1(PIECE_BYTES):
                with _of_the_file(file):
                    out.write(piece)
                written += len(piece)
                last = (last + piece)[-END_BYTES:]
                tell(f"{units.size(written)} written")
        with _of_the_file(file):
            out.close()
            os.replace(part, file)
    finally:
        with contextlib.suppress(OSError):
            out.close()
            part.unlink()
    print(f"{units.size(written)} in {tables.shown(str(file))}", file=sys.stderr)
    return _tell_end(json.loads(last.splitlines()[-1])["end"], True) if kind == "ndjson" else 0


@contextlib.contextmanager
def _of_the_file(file: Path) -> Iterator[None]:
    """What goes wrong here is no fault of the broker's."""
    try:
        yield
    except OSError as error:
        raise PenstockError(f"--export {file}: {error.strerror or error}") from None
