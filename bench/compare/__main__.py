"""`python -m bench.compare`: the run and its report: in the terminal, and on demand as JSON and as docs.

The exit code says whether the figures could be taken; a goal that is not reached is a finding. Ctrl-C and
SIGTERM end the run in order: the server under measurement is stopped and its folder is removed.
"""

import argparse
import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

import penstock
from bench import peers
from bench.__main__ import machine
from bench.compare import page
from bench.compare.cost import CannotCount, costs
from bench.compare.goals import verdicts
from bench.compare.results import Results
from bench.compare.rounds import Rounds
from bench.compare.subjects import PENSTOCK, VARIANTS, Setting, chosen
from bench.compare.tables import all_tables, as_text, goal_name
from bench.compare.works import FULL, QUICK, TITLES, Scale
from bench.loadgen import LoadError
from bench.server import PeerFailed, disk_folder, filesystem

BUSY = 0.5
FILES_BESIDE_CONNECTIONS = 500


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    settings = chosen(args.only)
    if not settings:
        print(f"nobody is called {' or '.join(args.only)}", file=sys.stderr)
        return 2
    if args.write_docs:
        try:
            page.check(args.write_docs)
        except (OSError, page.MarksMissing) as error:
            print(f"--write-docs {args.write_docs}: {error}", file=sys.stderr)
            return 2
    scale = fitting(QUICK if args.quick else FULL)
    facts = about_machine()
    versions = {PENSTOCK: penstock.__version__}
    versions |= {one.program: peers.version(one.program) for one in settings if one.program != PENSTOCK}
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        rounds = Rounds(settings, scale)
        results = rounds.run()
        if any(setting.program == PENSTOCK for setting in settings):
            _count(results, scale)
    except KeyboardInterrupt:
        print("stopped: the servers are ended and their folders removed", file=sys.stderr)
        return 130
    except (LoadError, PeerFailed) as error:
        print(f"no figures: {error}", file=sys.stderr)
        return 1
    part = page.made(results, settings, scale, facts, versions)
    print(" · ".join(f"{name} {value}" for name, value in (facts | versions).items()))
    for table in all_tables(results, settings):
        if table.rows:
            print(f"\n{as_text(table)}")
    for line in results.left_out:
        print(f"left out: {line}")
    if args.json:
        report = as_json(results, settings, facts, versions)
        args.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if args.write_docs:
        page.write(args.write_docs, part, results, settings)
    return 0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare",
        description="Measure Penstock and its peers side by side: about 25 minutes on 2 cores.",
    )
    parser.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        default=[],
        help="only those with this in their name, such as 'penstock' or 'redis lists'; may be given again",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few messages and one round: a try-out whose figures mean nothing",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures there")
    parser.add_argument(
        "--write-docs",
        metavar="FOLDER",
        nargs="?",
        type=Path,
        const=page.DOCS,
        help=f"write {page.PAGE} and {page.CHART} there (default: the folder docs of this tree)",
    )
    return parser


def fitting(scale: Scale) -> Scale:
    """As many idle connections as this user may have open files, on both sides; servers inherit the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed = hard - FILES_BESIDE_CONNECTIONS
    if allowed >= scale.connections:
        return scale
    print(
        f"{allowed} idle connections, not {scale.connections}: raise ulimit -n (now {hard})", file=sys.stderr
    )
    return replace(scale, connections=allowed)


def about_machine() -> dict[str, str | int]:
    """What somebody else must know to compare figures."""
    load = os.getloadavg()[0]
    if load > BUSY:
        print(f"the machine is busy (load {load:.1f}): it can do better than these figures", file=sys.stderr)
    with disk_folder() as folder:
        facts = {**machine(), "filesystem": filesystem(folder), "load": f"{load:.1f}"}
    facts.pop("penstock")  # it stands with the peers' versions
    return facts


def as_json(
    results: Results, settings: tuple[Setting, ...], facts: dict[str, str | int], versions: dict[str, str]
) -> dict[str, object]:
    """Everything that the tables are made from."""
    names = [subject.name for setting in settings for subject in setting.subjects]
    return {
        "machine": facts,
        "versions": versions,
        "figures": [
            {"subject": name, "work": work, **asdict(figure)}
            for name in names
            for work in TITLES
            if (figure := results.figure(name, work)) is not None
        ],
        "scenes": [
            {"subject": subject, "measure": measure, "value": value}
            for (subject, measure), value in results.scenes.items()
        ],
        "costs": [asdict(cost) for cost in results.costs],
        "goals": [
            {"goal": goal_name(verdict.goal), "bound": verdict.goal.bound, "ratio": verdict.ratio}
            | {"against": verdict.best_name, "verdict": verdict.word}
            for verdict in verdicts(results, settings)
        ],
        "left_out": results.left_out,
    }


def _count(results: Results, scale: Scale) -> None:
    print("system calls and allocations a message, about half a minute", file=sys.stderr)
    for variant in VARIANTS:
        try:
            results.costs += costs(variant, scale)
        except CannotCount as why:
            results.left_out.append(f"system calls and allocations a message: {why}")


def _interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
