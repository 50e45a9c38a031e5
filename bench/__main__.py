"""Runs the benchmarks and shows each figure beside its goal: `python -m bench [NAME ...] [--json FILE]`.

A benchmark is a module `bench.bench_NAME` whose `run()` returns rows `(name, value, unit, goal)`. Goal 0
means that there is none, and the unit decides in which direction a goal counts (`BETTER`). Rows are printed
when their benchmark ends, so a later one that fails takes no figure with it. A missed goal is a finding and
not a failure: figures move from machine to machine, and the exit code says only whether they could be taken.
"""

import argparse
import importlib
import json
import os
import pkgutil
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

import bench
import penstock

PREFIX = "bench_"


class Better(Enum):
    """The direction in which a unit's figures are better."""

    LESS = "≤"
    MORE = "≥"


BETTER = {
    "ns/msg": Better.LESS,
    "µs/msg": Better.LESS,
    "µs": Better.LESS,
    "ms": Better.LESS,
    "s": Better.LESS,
    "KB": Better.LESS,
    "MB": Better.LESS,
    "msg/s": Better.MORE,
    "M msg/s": Better.MORE,
    "MB/s": Better.MORE,
    "rows/s": Better.MORE,
    "%": Better.MORE,
    "% core": Better.LESS,
    "% of all": Better.LESS,
    "x": Better.LESS,
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured row. `met` is None where there is no goal."""

    benchmark: str
    name: str
    value: float
    unit: str
    goal: float
    met: bool | None


def figure(benchmark: str, row: tuple[str, float, str, float]) -> Figure:
    """A row of `run()` with its verdict."""
    name, value, unit, goal = row
    if not goal:
        return Figure(benchmark, name, value, unit, goal, None)
    if unit not in BETTER:
        raise ValueError(
            f"{benchmark}: '{name}' has a goal in '{unit}'; say in bench/__main__.py which way is better"
        )
    met = value <= goal if BETTER[unit] is Better.LESS else value >= goal
    return Figure(benchmark, name, value, unit, goal, met)


def benchmarks() -> list[str]:
    """The names of all benchmarks, in order."""
    found = (module.name for module in pkgutil.iter_modules(bench.__path__))
    return sorted(name.removeprefix(PREFIX) for name in found if name.startswith(PREFIX))


def machine() -> dict[str, str | int]:
    """What somebody else must know to compare figures."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "memory_mib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "kernel": f"{platform.system()} {platform.release()}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "penstock": penstock.__version__,
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def number(value: float) -> str:
    """Three digits that matter, and never an exponent."""
    for limit, digits in ((100, 0), (10, 1), (1, 2)):
        if abs(value) >= limit:
            return f"{value:,.{digits}f}"
    return f"{value:.3f}"


def line(name: str, value: str, unit: str, goal: str, verdict: str) -> str:
    """One line of the table."""
    return f"{name:<58} {value:>12} {unit:<8} {goal:>12}  {verdict}".rstrip()


def shown(taken: Figure) -> str:
    """A figure as a line of the table."""
    goal, verdict = "", ""
    if taken.met is not None:
        goal = f"{BETTER[taken.unit].value} {number(taken.goal)}"
        verdict = "met" if taken.met else "NOT MET"
    return line(taken.name, number(taken.value), taken.unit, goal, verdict)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for; 0 when every figure was taken."""
    known = benchmarks()
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure Penstock on this machine.")
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help=f"which ones: {', '.join(known)} (default: all)"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures there")
    args = parser.parse_args(argv)
    unknown = [name for name in args.names if name not in known]
    if unknown:
        parser.error(f"no benchmark '{unknown[0]}'; there are: {', '.join(known)}")

    facts = machine()
    print(" · ".join(f"{key} {value}" for key, value in facts.items()))
    print()
    print(line("benchmark", "value", "unit", "goal", ""))
    figures: list[Figure] = []
    for name in args.names or known:
        module = importlib.import_module(f"{bench.__name__}.{PREFIX}{name}")
        print(f"-- {name}", flush=True)
        for row in module.run():
            figures.append(figure(name, row))
            print(shown(figures[-1]), flush=True)
    verdicts = [taken.met for taken in figures if taken.met is not None]
    print()
    print(f"{len(figures)} figures, {sum(verdicts)} of {len(verdicts)} goals met")
    if args.json:
        report = {"machine": facts, "figures": [asdict(taken) for taken in figures]}
        args.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
