"""`penstock doctor`: what is installed, what is missing, and whether machine and broker are in order.

First this machine (`machine.py`), then the NATS cluster that the settings name, if they name one, then the
broker at `--url`, where there is one. A line a finding: how bad it is, what it is about, and what to do. Exit
code 1 where something FAILs; a warning is no failure.
"""

import argparse
import asyncio
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

from penstock import __version__
from penstock.cli import machine
from penstock.cli.admin import Admin, Unreachable, add_admin, say_objects
from penstock.cli.machine import Finding, Level
from penstock.cli.main import EXIT_FAILURE
from penstock.cli.messaging import URL_VARIABLE
from penstock.client import Refused
from penstock.client.http_core import Answer
from penstock.common import tables, units
from penstock.common.given import SettingsError
from penstock.server.settings import CONFIG_FLAG, CONFIG_VARIABLE, TABLE
from penstock.server.settings_read import add_flag, load

HELP = "say what is installed, what is missing, and whether disk, ports and broker are in order"

DATA, ENGINE = (next(setting for setting in TABLE if setting.name == name) for name in ("data", "engine"))

LEVELS: Final = {"ok": Level.OK, "warn": Level.WARN, "fail": Level.FAIL}
"""What the checks of a cluster call them."""

LAG_MAX: Final = 1_000_000
"""A reader that is further behind than this holds much."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        DATA.flag, metavar="DIR", help=f"the data folder (default: {DATA.variable}, else {DATA.default})"
    )
    parser.add_argument(
        ENGINE.flag,
        metavar="URL",
        help=f"a NATS cluster to look at, as `penstock serve` would be given it (default: {ENGINE.variable})",
    )
    parser.add_argument(
        CONFIG_FLAG,
        metavar="FILE",
        help=f"the settings of `penstock serve`: the cluster that they name (default: {CONFIG_VARIABLE})",
    )
    add_admin(parser)
    group = parser.add_argument_group("the NATS cluster", "What `penstock serve` would be given with it.")
    for setting in TABLE:
        if setting.section == "cluster" or setting.name in ("allow-unsafe-sync", "strict"):
            add_flag(group, setting)


def run(args: argparse.Namespace) -> int:
    folder = args.data or os.environ.get(DATA.variable) or str(DATA.default)
    findings = chain(
        machine.check_packages(),
        machine.check_data(folder),
        machine.check_ports(),
        [machine.check_files()],
        check_cluster(args),
        check_broker(args),
    )
    levels: Counter[Level] = Counter()
    for finding in findings:
        levels[finding.level] += 1
        if args.json:
            say_objects([{**finding._asdict(), "level": finding.level.value}])
        else:
            advice = f"; {finding.advice}" if finding.advice else ""
            print(
                tables.shown(f"{finding.level.value:4}  {finding.about}: {finding.text}{advice}"), flush=True
            )
    if not args.json:
        failures, warnings = levels[Level.FAIL], levels[Level.WARN]
        print(f"{units.counted(failures, 'failure')}, {units.counted(warnings, 'warning')}")
    return EXIT_FAILURE if levels[Level.FAIL] else 0


# --- the NATS cluster --------------------------------------------------------------------------------------


def check_cluster(args: argparse.Namespace) -> Iterator[Finding]:
    """The NATS cluster that a front-end with these settings would use; nothing where they name none."""
    named = (args.engine, args.config, os.environ.get(ENGINE.variable), os.environ.get(CONFIG_VARIABLE))
    if not any(named):
        return
    try:
        settings = load(args, os.environ)
        if isinstance(settings.engine, str):
            return
        # Whoever has no cluster loads nothing of it.
        from penstock.cluster.checks import check_servers

        findings = asyncio.run(check_servers(settings))
    except SettingsError as error:
        yield Finding(Level.FAIL, "settings", str(error))
        return
    yield from _of_cluster("nats", [finding.row() for finding in findings])


def _of_cluster(about: str, checks: Sequence[Answer]) -> Iterator[Finding]:
    for check in checks:
        yield Finding(LEVELS[check["level"]], f"{about} {check['name']}", check["text"], check["advice"])


# --- the broker --------------------------------------------------------------------------------------------


def check_broker(args: argparse.Namespace) -> Iterator[Finding]:
    """The broker at the URL; that there is none is only bad where somebody has named one."""
    with Admin(args) as admin:
        try:
            admin.outside("healthz")
            yield Finding(Level.OK, "broker", f"answers at {admin.url}")
            yield from _check_ready(admin)
            engine = admin.get("engine")
            readers = admin.get("readers")["readers"]
        except Unreachable as error:
            named = args.url or os.environ.get(URL_VARIABLE)
            yield Finding(Level.FAIL if named else Level.NOTE, "broker", str(error))
            return
        except Refused as error:
            level = Level.WARN if error.status in (401, 403) else Level.FAIL
            yield Finding(level, "broker", str(error))
            return
    yield from _check_engine(engine)
    yield from _check_readers(readers)


def _check_ready(admin: Admin) -> Iterator[Finding]:
    try:
        admin.outside("readyz")
    except Refused as error:
        yield Finding(Level.FAIL, "broker", f"is not ready: {error}", "its log on standard error says more")
    else:
        yield Finding(Level.OK, "broker", "is ready")


def _check_engine(engine: Answer) -> Iterator[Finding]:
    if engine["version"] == __version__:
        yield Finding(Level.OK, "broker", f"version {__version__}, like this command")
    else:
        text = f"version {engine['version']}, and this command has {__version__}"
        yield Finding(Level.WARN, "broker", text, "install the same version")
    if engine["durability"] == "commit":
        yield Finding(Level.OK, "durability", "commit: what is confirmed is on the disk")
    else:
        text = f"{engine['durability']}: a power cut may lose what was confirmed"
        yield Finding(Level.WARN, "durability", text, "serve with --durability commit where that matters")
    cluster = engine.get("cluster")  # a broker of an older version does not say
    if cluster is not None:
        text = f"{cluster['role']} of {units.counted(len(cluster['members']), 'front-end')}"
        yield Finding(Level.OK, "cluster", f"front-end {cluster['id']}, {text}")
        yield from _of_cluster("cluster", cluster["checks"])
    if engine["failed"]:
        advice = "see to the disk, then start the broker again"
        yield Finding(Level.FAIL, "log", f"has failed: {engine['failed']}", advice)
    elif engine["full"]:
        yield Finding(Level.FAIL, "log", "the disk is full: new messages wait", "free some room")
    else:
        free, total = units.size(engine["disk_bytes_free"]), units.size(engine["disk_bytes_total"])
        low = engine["disk_bytes_free"] < engine.get("disk_bytes_reserve", 0)  # an older broker does not say
        text = f"{units.size(engine['log_bytes'])} in {engine['data']}, {free} free of {total}"
        yield Finding(Level.WARN if low else Level.OK, "log", text, "free some room" if low else "")
    for place in engine["damage"]:
        yield Finding(Level.FAIL, "log", f"damaged: {place}", f"penstock verify {engine['data']}")


def _check_readers(readers: Sequence[Answer]) -> Iterator[Finding]:
    for reader in readers:
        lag = sum(place["lag"] for place in reader["queues"])
        text = f"holds {units.counted(lag, reader['view'].removesuffix('s'))} that it has not read"
        about = f"reader {reader['name']}"
        if any(place["capped"] for place in reader["queues"]):
            yield Finding(Level.WARN, about, f"{text}; not all is kept for it", "let it catch up")
        elif lag > LAG_MAX:
            advice = f"let it catch up, or end it: DELETE /v1/readers/{reader['name']}"
            yield Finding(Level.WARN, about, text, advice)
        else:
            yield Finding(Level.OK, about, text)
