"""`penstock archive status|check`: what is in the Delta tables of a broker, and what is not yet.

`status` asks the broker, which knows how far its archiver is. `check` opens the tables itself (the extra
`lake`), with the credentials of this process, and compares them with the log: by offsets and counts, without
reading a row. Its exit code is 1 where rows are missing, doubled or ahead of the log.
"""

import argparse
from typing import Any, Final

from penstock.cli.admin import Admin, add_admin, say_objects
from penstock.common import tables, units
from penstock.common.tables import columns
from penstock.errors import Misuse, PenstockError

HELP = "what is in the Delta tables, and what is not yet; and whether they are right"
INSTALL: Final = "penstock archive check needs the extra lake: pip install 'penstock[lake]'"

STATUS: Final = columns("QUEUE", "VIEW", ">ARCHIVED UP TO", ">NOT YET", ">OLDEST", "")
CHECK: Final = columns("QUEUE", "VIEW", "IDENTITY", ">FIRST", ">END", ">ROWS", ">FILES", ">NOT YET", "")


class NotArchived(PenstockError):
    """The broker archives nothing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("act", choices=("status", "check"), help="ask the broker; or compare tables and log")
    parser.add_argument(
        "--path", metavar="PATH", help="check: where the tables are (default: as the broker says)"
    )
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    if args.path is not None and args.act != "check":
        raise Misuse("--path is for check; status goes by the broker's own settings")
    with Admin(args) as admin:
        archive = admin.get("archive")
        if archive["path"] is None and args.path is None:
            raise NotArchived(f"{admin.url}: this broker archives nothing; set path under [archive]")
        if args.act == "status":
            return _status(args, archive)
        return _check(args, admin, args.path or archive["path"], archive["patterns"])


def _status(args: argparse.Namespace, archive: Any) -> int:
    if args.json:
        say_objects([archive])
        return 1 if archive["error"] else 0
    facts = [("path", archive["path"]), ("queues", ", ".join(archive["patterns"]))]
    for table in archive["tables"]:
        committed = f", the last at {table['committed']}" if table["committed"] else ""
        since = f"{units.counted(table['rows'], 'row')} since its process was started"
        facts.append((table["view"], f"version {table['version']}, {since}{committed}"))
    facts += [("gap", gap) for gap in archive["gaps"]]
    if archive["error"]:
        facts.append(("error", archive["error"]))
    print("\n".join(tables.pairs(facts)))
    if archive["queues"]:
        rows = [
            [
                it["queue"],
                it["view"],
                units.count(it["archived"]),
                units.count(it["lag"]),
                tables.age(it["lag_seconds"] if it["lag"] else None),
                it["refused"] or ("so far behind that not all is kept for it" if it["capped"] else ""),
            ]
            for it in archive["queues"]
        ]
        print("", *tables.table(STATUS, rows), sep="\n")
    return 1 if archive["error"] else 0


def _check(args: argparse.Namespace, admin: Admin, path: str, patterns: list[str]) -> int:
    try:
        from penstock.lake.check import Extent, Found, check
        from penstock.lake.table import VIEWS, Table
    except ImportError as error:
        raise Misuse(f"{INSTALL} ({error})") from None
    from penstock.model.rights import matcher

    fits = [matcher(pattern) for pattern in patterns or ["*"]]

    def queues() -> dict[tuple[str, str], Any]:
        rows = admin.pages("queues", "offsets", by="after", limit=1000)
        return {(row["name"], row["identity"]): row for row in rows if any(it(row["name"]) for it in fits)}

    # The archiver goes on meanwhile: the log's starts are those from before, and its ends those from behind.
    before = queues()
    tables_now = [Table(path, view).open() for view in VIEWS]
    rows = queues()
    found: list[Found] = []
    for table in tables_now:
        start, end = (
            ("event_start", "event_end") if table.view == "events" else ("offset_start", "offset_end")
        )
        extents = {key[0]: Extent(key[1], before.get(key, row)[start], row[end]) for key, row in rows.items()}
        found += check(table, extents)
    if args.json:
        say_objects(it._asdict() for it in found)
    else:
        cells = [
            [
                it.queue,
                it.view,
                it.identity,
                *map(units.count, (it.first, it.end, it.rows, it.files, it.missing)),
                "; ".join(it.wrong) or it.note,
            ]
            for it in found
        ]
        print(*tables.table(CHECK, cells), sep="\n")
    return 1 if any(it.wrong for it in found) else 0
