"""`penstock demo`: the promise, shown on a real broker.

A broker in a folder of its own, on free ports; orders through all three protocols into one queue; a worker
that takes them whatever door they came through; kill -9 in the middle of more of them; a restart; a count of
everything that was confirmed, delivered and lost. Then Spark: a pipeline makes two tables of the same orders,
whose sums, by Spark and by DuckDB, are compared with what was sent, and a report tells what happened.

Where a person watches, the broker then stays up until they have looked around (`penstock/demo/staying.py`).
What Spark has made is kept, and the last lines say where; the broker's log is kept only in a folder that was
named. Where Spark or Java is missing, the first half is all there is, and a line says what to install.
"""

import argparse
import logging
import os
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from penstock.common import tables
from penstock.demo.broker import Broker
from penstock.demo.screen import Screen
from penstock.demo.staying import stay, watched
from penstock.demo.traffic import Traffic
from penstock.errors import Misuse, PenstockError

HELP = "send through all three protocols, kill the broker with -9, count what is lost, and sum up with Spark"

ORDERS_DEFAULT: Final = 10_000
LOG: Final = "log"
JOURNAL: Final = "broker.log"

RESULTS: Final = {
    "report.html": "the report; open it in a browser",
    "report-tables": "its tables, as Parquet",
    "orders.delta": "every order, as a Delta table",
    "orders.parquet": "their sums by region and second",
    "orders.toml": "the pipeline that has written both",
    LOG: "the log; `penstock verify` and `penstock dump` read it",
}


class SparkMissing(PenstockError):
    """Spark cannot be used here. Says why, and what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="keep everything in this folder, new or empty (default: a temporary one)",
    )
    parser.add_argument(
        "--messages",
        type=int,
        default=ORDERS_DEFAULT,
        metavar="N",
        help="how many through each protocol before the kill (default: %(default)s)",
    )
    parser.add_argument("--no-spark", action="store_true", help="leave out the second half, with Spark")


def run(args: argparse.Namespace) -> int:
    if args.messages < 1:
        raise Misuse("--messages needs to be at least 1")
    if args.data:
        try:
            os.makedirs(args.data, 0o700, exist_ok=True)
        except OSError as error:
            raise Misuse(f"--data {args.data}: {error.strerror}; name a new folder") from None
        if os.listdir(args.data):
            raise Misuse(f"{args.data} is not empty; name a new folder")
    # The clients log what happens to their connections, and Spark's that it was interrupted; here both happen
    # on purpose.
    logging.getLogger().addHandler(logging.NullHandler())
    logging.getLogger("penstock.client").handlers.clear()
    print("Penstock: orders through three protocols, kill -9 in the middle of them, and their sums by Spark.")
    signal.signal(signal.SIGTERM, _leave)
    screen = Screen(sys.stdout)
    if args.data:
        return _show(args, Path(args.data).resolve(), screen)
    folder = Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    try:
        code = _show(args, folder, screen)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if not _results(folder):
        folder.rmdir()
    return code


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """End as by Ctrl-C: whoever has started something ends it on the way out."""
    raise SystemExit(128 + number)


def _show(args: argparse.Namespace, folder: Path, screen: Screen) -> int:
    """All of it; the exit code."""
    broker = Broker(folder / LOG, folder / JOURNAL)
    try:
        traffic = Traffic(broker, screen, args.messages)
        right = traffic.run()
        if not args.no_spark:
            screen.section("Spark: the same orders as a table")
            try:
                right &= _analyse(broker, screen, folder, traffic)
            except SparkMissing as missing:
                screen.note(f"left out: {missing}")
        seconds = screen.seconds()
        if watched():
            stay(screen, broker.url("http"))
        broker.end(signal.SIGTERM)
    finally:
        broker.end(signal.SIGKILL)
        if not args.data:
            # Nobody has a use for these once the broker is gone.
            shutil.rmtree(folder / LOG, ignore_errors=True)
            shutil.rmtree(folder / "checkpoint", ignore_errors=True)
            (folder / JOURNAL).unlink(missing_ok=True)
    _say_end(screen, folder, bool(args.data), seconds)
    if not right:
        print("penstock demo: something is wrong with the figures above", file=sys.stderr)
    return 0 if right else 1


def _analyse(broker: Broker, screen: Screen, folder: Path, traffic: Traffic) -> bool:
    """Whether Spark comes to the same sums."""
    try:
        from penstock.demo.analysis import Analysis
        from penstock.spark.session import SparkNotStarted
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "penstock":
            raise
        raise SparkMissing(
            f"{error.name} is not installed; pip install 'penstock[spark,lake]' duckdb, and Java 17 or newer"
        ) from None
    try:
        return Analysis(broker, screen, folder).run(traffic.stored, traffic.number_end)
    except SparkNotStarted as error:
        raise SparkMissing(str(error)) from None


def _results(folder: Path) -> list[str]:
    """What there is to look at."""
    return [name for name in RESULTS if (folder / name).exists()]


def _say_end(screen: Screen, folder: Path, named: bool, seconds: float) -> None:
    screen.heading(f"Done, in {seconds:.0f} s")
    results = _results(folder)
    if not results:
        screen.note("the log was in a temporary folder, and is removed; --data DIR keeps everything")
        return
    for line in tables.pairs((str(folder / name), RESULTS[name]) for name in results):
        screen.note(line)
    if not named:
        screen.note(f"the log is removed, and this is kept; to remove it: rm -r {shlex.quote(str(folder))}")
