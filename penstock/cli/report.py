"""`penstock report`: what happened in the queues, as a page for people and as Parquet tables for programs.

Events are read and counted by Spark, on this machine unless `--master` names another. What it is doing it
says on standard error, because that takes seconds at best. The broker is asked first: where nobody answers,
Spark is not started at all.
"""

import argparse
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from penstock import __version__
from penstock.cli.admin import Admin, add_admin, say_objects
from penstock.cli.messaging import token_of
from penstock.common import units
from penstock.common.tables import shown
from penstock.errors import Misuse, PenstockError
from penstock.report import tables
from penstock.report.audit import ask_audit
from penstock.report.figures import Figures, figures_of
from penstock.report.page import About, render
from penstock.report.period import NoMoment, Period, datetime_of, moment_us
from penstock.report.survey import Facts, survey

HELP = "make a report on the queues: throughput, waiting, retries, dead letters, consumers (needs Spark)"

OUT_DEFAULT: Final = "report.html"
TABLES_SUFFIX: Final = "-tables"

QUICK: Final = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""Java compiles everything once and lightly: a small report takes half the time, a large one takes longer."""

QUICK_EVENTS_MAX: Final = 3_000_000
"""Where both take as long, measured."""


class NotInstalled(PenstockError):
    """What only an extra brings along."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--since",
        metavar="TIME",
        help="from then on: 90s, 15m, 1h, 7d ago, or a time (default: all that is kept)",
    )
    parser.add_argument("--until", metavar="TIME", help="up to then, likewise (default: now)")
    parser.add_argument(
        "--queue",
        metavar="PATTERN",
        nargs="+",
        action="extend",
        default=[],
        help="only these: * is any text, ? any character (default: all queues)",
    )
    parser.add_argument("--out", metavar="FILE", default=OUT_DEFAULT, help="the page (default: %(default)s)")
    parser.add_argument(
        "--parquet",
        metavar="DIR",
        help=f"the folder for the tables (default: beside the page, NAME{TABLES_SUFFIX})",
    )
    parser.add_argument("--master", metavar="URL", help="Spark's master (default: local[*], this machine)")
    add_admin(parser)
    parser.epilog = (
        "examples:\n"
        "  penstock report --since 1h\n"
        "  penstock report --since 7d --queue 'orders*' mail --out orders.html\n"
        "  penstock report --since 2030-01-31T08:00Z --until 2030-01-31T18:00Z"
    )


def run(args: argparse.Namespace) -> int:
    now_us = time.time_ns() // 1000
    period = _period(args, now_us)
    out, folder = _places(args)
    if args.cafile:
        # Spark's own processes read this one.
        os.environ["SSL_CERT_FILE"] = args.cafile
    with Admin(args) as admin:
        facts = survey(admin, args.queue)
        events = sum(one.event_end - one.event_start for one in facts)
        _tell(f"{units.counted(len(facts), 'queue')} with {units.counted(events, 'event')} at {admin.url}")
        queues = {one.queue for one in facts} if args.queue else None
        audit = ask_audit(admin, period, queues)
        about = About(admin.url, datetime.now(UTC).replace(microsecond=0), __version__, args.queue)
        figures = _figures(args, admin, facts, period, now_us, folder)
    with tables.writing(out) as part:
        part.write_text(render(figures, about, audit), encoding="utf-8")
    if args.json:
        say_objects([_summary(figures, out, folder)])
    else:
        print(f"{shown(str(out))}: {_sentence(figures)}")
    return 0


def _period(args: argparse.Namespace, now_us: int) -> Period:
    try:
        start = moment_us(args.since, now_us) if args.since is not None else None
        end = moment_us(args.until, now_us) if args.until is not None else None
    except NoMoment as error:
        raise Misuse(str(error)) from None
    if (start or 0) >= (now_us if end is None else end):
        raise Misuse(
            f"--since {args.since} is not before --until {args.until or '(now)'}; nothing is in between"
        )
    return Period(start, end)


def _places(args: argparse.Namespace) -> tuple[Path, Path]:
    """Where the page and the tables go; found out before anything takes long."""
    out = Path(args.out)
    if out.is_dir():
        raise Misuse(f"--out {args.out} is a folder; name a file in it")
    if not out.parent.is_dir():
        raise Misuse(f"--out {args.out}: there is no folder {out.parent}")
    folder = Path(args.parquet) if args.parquet is not None else out.with_name(out.stem + TABLES_SUFFIX)
    if folder.exists() and not folder.is_dir():
        raise Misuse(f"--parquet {folder} is a file; name a folder")
    return out, folder


def _figures(
    args: argparse.Namespace, admin: Admin, facts: list[Facts], period: Period, now_us: int, folder: Path
) -> Figures:
    """What there is to show; the tables are written along."""
    # Imported here: `penstock --help` has no use for Spark, and it may not be installed.
    try:
        import pyarrow  # noqa: F401 - Spark says later, and less clearly, that it is missing

        from penstock.report import job
        from penstock.spark.session import local_session
    except ImportError as error:
        raise NotInstalled(f"{error.name} is not installed; pip install 'penstock[spark]'") from None
    if any(one.events for one in facts):
        _tell("starting Spark")
        few = sum(one.events for one in facts) <= QUICK_EVENTS_MAX
        spark = local_session("penstock report", args.master, QUICK if few else {}, quiet=True)
        try:
            source = job.Source(admin.url, token_of(args), admin)
            result = job.run(spark, source, facts, period, now_us, _tell)
        finally:
            spark.stop()
    else:
        result = job.Result(None, tables.of_nothing(facts))
    _tell(f"writing {args.out} and {folder}")
    tables.write_tables(result.tables, folder)
    return figures_of(result.span, result.tables)


def _tell(text: str) -> None:
    print(f"penstock report: {shown(text)}", file=sys.stderr, flush=True)


def _sentence(figures: Figures) -> str:
    queues = units.counted(len(figures.queues), "queue")
    if figures.span is None:
        return f"{queues}, and nothing happened in this time"
    start, end = (units.moment(datetime_of(us)) for us in figures.span[:2])
    return f"{queues}, {units.counted(figures.events, 'event')}, {start} to {end} UTC"


def _summary(figures: Figures, out: Path, folder: Path) -> dict[str, object]:
    span = figures.span
    return {
        "out": str(out),
        "parquet": str(folder),
        "from": None if span is None else f"{datetime_of(span.start_us):%Y-%m-%dT%H:%M:%S.%f}Z",
        "to": None if span is None else f"{datetime_of(span.end_us):%Y-%m-%dT%H:%M:%S.%f}Z",
        "bucket_seconds": None if span is None else span.bucket_us / 1_000_000,
        "queues": len(figures.queues),
        "events": figures.events,
        **{name: figures.total(name) for name in (*tables.EVENTS, "outstanding_start", "outstanding_end")},
    }
