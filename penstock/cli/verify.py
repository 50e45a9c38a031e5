"""`penstock verify DIR`: reads everything in a data folder and says what is wrong with it.

All the looking is in `penstock.log.inspect`; here is how it is shown. Findings go to
standard output, one line each, then one line with the counts; progress goes to standard error,
and only where somebody watches. Exit 0: no defect; 1: defects; 2: no log there.
"""

import argparse
import json
import sys

from penstock.cli.main import EXIT_FAILURE
from penstock.cli.messaging import progress
from penstock.common import units
from penstock.errors import Misuse
from penstock.log.errors import LogRefused
from penstock.log.findings import DEFECTS, NOTES, Report
from penstock.log.inspect import check_is_log, inspect_log

HELP = "check every block and snapshot of a data folder, and change nothing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The folder, and how the answer is to look."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", metavar="DIR", help="the data folder; a broker may be using it")
    parser.add_argument("--json", action="store_true", help="the whole report as one JSON object")
    width = max(map(len, [*DEFECTS, *NOTES]))
    parser.epilog = "\n".join(
        [
            "defects (exit code 1):",
            *(f"  {kind:{width}}  {meaning}" for kind, meaning in DEFECTS.items()),
            "",
            "notes (no reason to worry):",
            *(f"  {kind:{width}}  {meaning}" for kind, meaning in NOTES.items()),
            "",
            "examples:",
            "  penstock verify penstock-data",
            "  penstock verify --json penstock-data | python3 -m json.tool",
        ]
    )


def run(args: argparse.Namespace) -> int:
    """Look, and say what was found."""
    try:
        check_is_log(args.folder)
    except LogRefused as error:
        raise Misuse(str(error)) from None
    try:
        with progress() as tell:
            report = inspect_log(args.folder, lambda done, whole: tell(_share(done, whole)))
    except OSError as error:
        print(f"penstock verify: {args.folder}: cannot be read: {error}", file=sys.stderr)
        return EXIT_FAILURE
    if args.json:
        print(json.dumps({"folder": args.folder, **report.fields()}, ensure_ascii=True))
    else:
        _show(report)
    return EXIT_FAILURE if report.defects else 0


def _share(bytes_done: int, bytes_total: int) -> str:
    return f"{100 * bytes_done // max(bytes_total, 1):3} % of {units.size(bytes_total)} read"


def _show(report: Report) -> None:
    for label, findings in (("DEFECT", report.defects), ("note", report.notes)):
        for finding in findings:
            print(f"{label} {finding.kind}: {finding.text}")
    counts = {
        "segment": report.segments,
        "snapshot": report.snapshots,
        "block": report.blocks,
        "message": report.messages,
        "event": report.events,
        "byte": report.bytes,
        "queue": report.queues,
        "defect": len(report.defects),
        "note": len(report.notes),
    }
    print(", ".join(units.counted(count, name) for name, count in counts.items()))
