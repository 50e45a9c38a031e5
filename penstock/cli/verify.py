"""`penstock verify DIR`: reads everything in a data folder and says what is wrong with it.

All the looking is in `penstock.log.inspect`; here is how it is shown. Findings go to
standard output, one line each, then one line with the counts; progress goes to standard error,
and only where somebody watches. Exit 0: no defect; 1: defects; 2: no log there.
"""

import argparse
import json
import sys
import time

from penstock.cli.main import EXIT_FAILURE, EXIT_MISUSE
from penstock.log.errors import LogRefused
from penstock.log.inspect import DEFECTS, NOTES, Report, check_is_log, inspect_log

HELP = "check every block and snapshot of a data folder, and change nothing"

PROGRESS_SECONDS = 0.2


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
        print(f"penstock verify: {error}", file=sys.stderr)
        return EXIT_MISUSE
    progress = _Progress() if sys.stderr.isatty() else None
    try:
        report = inspect_log(args.folder, progress)
    except OSError as error:
        print(f"penstock verify: {args.folder}: cannot be read: {error}", file=sys.stderr)
        return EXIT_FAILURE
    finally:
        if progress is not None:
            progress.end()
    if args.json:
        print(json.dumps({"folder": args.folder, **report.fields()}, ensure_ascii=True))
    else:
        _show(report)
    return EXIT_FAILURE if report.defects else 0


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
    print(", ".join(f"{count} {name}{'' if count == 1 else 's'}" for name, count in counts.items()))


class _Progress:
    """A line on the terminal that is written over, some times a second."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PROGRESS_SECONDS
        self._shown = False

    def __call__(self, bytes_done: int, bytes_total: int) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + PROGRESS_SECONDS
        self._shown = True
        percent = 100 * bytes_done // max(bytes_total, 1)
        print(f"\r{percent:3} % of {bytes_total / 1e6:,.0f} MB read", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
