"""Mutations: small wrong changes in the modules where data lives, and whether a test near them notices.

    scripts/mutate --module penstock/protocols/sspq.py --count 20 --seed 7

A mutation is one change of one place, found by the syntax tree and written over the source there, so that
what is printed is what would stand in the file. Which ones are tried is drawn from a seed, which is printed.

Rules that always hold:
  * The tree itself is never touched: the changes are made in copies of it, one for each that works.
  * The tests near a module pass without a change, in the copy too, before any change counts.
  * A change that makes the tests hang is noticed: a run has a few times what it takes without a change.

What survives is a gap in the tests, or a change that changes nothing: a person decides.
"""

import argparse
import ast
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", ".*_cache", ".hypothesis", "penstock-data"
)

NEAR = {
    "penstock/server/connection.py": (
        "tests/server/test_flow_control.py",
        "tests/server/test_endings.py",
        "tests/server/test_lifecycle.py",
        "tests/server/test_rq_rules.py",
    ),
    "penstock/server/server.py": (
        "tests/server/test_flow_control.py",
        "tests/server/test_endings.py",
        "tests/server/test_lifecycle.py",
    ),
    "penstock/server/control.py": ("tests/server/test_calls.py", "tests/server/test_second.py"),
    "penstock/broker/broker.py": ("tests/broker/test_broker.py",),
    "penstock/broker/claims.py": ("tests/broker/test_claims.py",),
    "penstock/broker/hand_out.py": ("tests/broker/test_hand_out.py", "tests/broker/test_broker.py"),
    "penstock/broker/publishing.py": ("tests/broker/test_broker.py",),
    "penstock/broker/requests.py": ("tests/broker/test_requests.py", "tests/broker/test_broker.py"),
    "penstock/broker/settling.py": ("tests/broker/test_broker.py", "tests/broker/test_claims.py"),
    "penstock/broker/consumers.py": ("tests/broker/test_consumers.py", "tests/broker/test_broker.py"),
    "penstock/model/pending.py": ("tests/model/test_pending.py",),
    "penstock/model/ranges.py": ("tests/model/test_ranges.py",),
    "penstock/model/timers.py": ("tests/model/test_timers.py",),
    "penstock/log/jetstream/appender.py": ("tests/nats/test_appender.py",),
    "penstock/cluster/lease.py": ("tests/cluster/test_lease_rules.py", "tests/cluster/test_lease_time.py"),
    "penstock/cluster/placement.py": ("tests/cluster/test_placement.py",),
    "penstock/cluster/routing.py": ("tests/cluster/test_routing.py",),
    "penstock/log/jetstream/replica.py": ("tests/nats/test_replica.py",),
    "penstock/log/reader.py": ("tests/log/test_reader.py", "tests/log/test_reader_looks.py"),
    "penstock/log/retention.py": ("tests/log/test_retention.py", "tests/log/test_stage_retention.py"),
    "penstock/log/log.py": ("tests/log/test_contract.py", "tests/log/test_disk_full.py"),
    "penstock/log/sealer.py": ("tests/log/test_contract.py", "tests/log/test_log_settings.py"),
    "penstock/log/staging.py": (
        "tests/log/test_staging.py",
        "tests/log/test_contract.py",
        "tests/log/test_disk_full.py",
    ),
    "penstock/log/transactions.py": ("tests/log/test_contract.py", "tests/log/test_commit_turns.py"),
    "penstock/log/backup/restoring.py": ("tests/log/test_backup.py",),
    "penstock/log/committer.py": (
        "tests/log/test_contract.py",
        "tests/log/test_disk_full.py",
    ),
    "penstock/http/reading/pool.py": ("tests/http/test_reader_pool.py", "tests/http/test_readers_api.py"),
    "penstock/protocols/rq_decoder.py": (
        "tests/protocols/test_one_byte.py",
        "tests/protocols/test_rq_codec.py",
        "tests/protocols/test_rq_controller.py",
    ),
    "penstock/protocols/phpmq_read.py": (
        "tests/protocols/test_one_byte.py",
        "tests/protocols/test_phpmq.py",
        "tests/protocols/test_phpmq_session.py",
    ),
    "penstock/protocols/phpmq_runs.py": (
        "tests/protocols/test_one_byte.py",
        "tests/protocols/test_phpmq.py",
        "tests/protocols/test_phpmq_session.py",
    ),
    "penstock/protocols/sspq.py": (
        "tests/protocols/test_one_byte.py",
        "tests/protocols/test_sspq.py",
        "tests/protocols/test_sspq_session.py",
    ),
}
"""The tests that a change in a module must not pass."""

TIMES_LONGER, SECONDS_MORE = 4, 20
"""A run with a change may take so much longer than the one without before it counts as hanging."""

MEMORY_BYTES_MAX = 8 << 30
FILE_BYTES_MAX = 2 << 30
"""What a change makes endless ends here, and not with the machine."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
}
OTHER_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
TELLING = ("log", "logger", "journal", "note", "warning")
"""Calls by these names tell people something: their loss is seen by people, not by tests of data."""


class Mutation(NamedTuple):
    """One change: the bytes from `start` to `end` of the file become `text`."""

    module: str
    line: int
    start: int
    end: int
    text: str
    before: str
    kind: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def __str__(self) -> str:
        before = " ".join(self.before.split())
        return f"{self.module}:{self.line}: {self.kind}: {before[:90]}  ->  {self.text}"


class Finder:
    """All mutations of a source."""

    def __init__(self, module: str, source: bytes) -> None:
        self._module = module
        self._source = source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self.found: list[Mutation] = []
        self._visit(ast.parse(source))

    def _add(self, node: ast.expr | ast.stmt, text: str, kind: str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        end = self._lines[node.end_lineno - 1] + node.end_col_offset
        before = self._source[start:end].decode()
        self.found.append(Mutation(self._module, node.lineno, start, end, text, before, kind))

    def _visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.expr):
            self._expression(node)
        elif isinstance(node, ast.stmt):
            self._statement(node)
        for child in _children(node):
            self._visit(child)

    def _expression(self, node: ast.expr) -> None:
        if isinstance(node, ast.Compare):
            for position, operator in enumerate(node.ops):
                ops = list(node.ops)
                ops[position] = COMPARISONS[type(operator)]()
                self._add(node, ast.unparse(ast.Compare(node.left, ops, node.comparators)), "comparison")
        elif isinstance(node, ast.BoolOp):
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            self._add(node, f"({ast.unparse(ast.BoolOp(other, node.values))})", "and/or")
            for value in node.values:
                rest = [it for it in node.values if it is not value]
                self._add(node, f"({ast.unparse(ast.BoolOp(node.op, rest))})", "condition left out")
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            other_operator = ARITHMETIC[type(node.op)]()
            self._add(
                node, f"({ast.unparse(ast.BinOp(node.left, other_operator, node.right))})", "arithmetic"
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            self._add(node, str(not node.value), "flag")
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            self._add(node, str(node.value + 1), "bound")
            if node.value > 0:
                self._add(node, str(node.value - 1), "bound")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._add(node, ast.unparse(node.operand), "not")
        elif isinstance(node, ast.Name) and node.id in OTHER_NAMES:
            self._add(node, OTHER_NAMES[node.id], "other call")

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.If | ast.While) and isinstance(
            node.test, ast.Name | ast.Attribute | ast.Call
        ):
            if isinstance(node, ast.If):
                self._add(node.test, "True", "flag ignored")
            self._add(node.test, "False", "flag ignored")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == "__init__":
                return  # an attribute that was never made is noticed by everybody
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            nothing = isinstance(node.returns, ast.Constant) and node.returns.value is None
            if nothing and len(body) > 1:
                self._add(body[0], "return", "early return")
            for statement in body:
                self._removable(statement)
            return
        for field in ("body", "orelse", "finalbody"):
            for statement in getattr(node, field, ()) if not isinstance(node, ast.ClassDef) else ():
                if isinstance(statement, ast.stmt):
                    self._removable(statement)

    def _removable(self, node: ast.stmt) -> None:
        """One statement less. What makes a local name is left: without it nothing runs at all."""
        if _says_only(node):
            return
        if isinstance(node, ast.Assign):
            removable = all(isinstance(it, ast.Attribute | ast.Subscript) for it in node.targets)
        elif isinstance(node, ast.Expr):
            removable = isinstance(node.value, ast.Call | ast.Await)
        else:
            removable = isinstance(node, ast.AugAssign | ast.Delete | ast.Break | ast.Continue | ast.Raise)
            removable = removable or (isinstance(node, ast.Return) and node.value is None)
        if removable:
            self._add(node, "pass", "statement left out")


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """What is below, without what is no code of the broker: words for people, types, assertions."""
    if isinstance(node, ast.Assert | ast.JoinedStr | ast.Raise):
        return
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _says_only(child):
                yield child


def _says_only(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _tells(node.value.func)


def _tells(function: ast.expr) -> bool:
    return any(part in TELLING for part in ast.unparse(function).replace("_", ".").split("."))


def mutations_of(module: str, root: Path = ROOT) -> list[Mutation]:
    """All that can be made in a module, in the order of its lines."""
    found = Finder(module, (root / module).read_bytes()).found
    return sorted(set(found), key=lambda it: (it.start, it.end, it.text))


def _bound() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, FILE_BYTES_MAX))


class Copy:
    """A copy of the tree, in which changes are made and tests are run."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self._root = root
        self._folder = folder / "tree"
        self._temporary = folder / "tmp"
        shutil.copytree(root, self._folder, ignore=LEFT_OUT, symlinks=True)

    def test(self, tests: tuple[str, ...], seconds: float) -> tuple[str, str]:
        """ "passed", "failed" or "hung", and what pytest printed."""
        self._temporary.mkdir(exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--hypothesis-seed=0",
        ]
        process = subprocess.Popen(
            [*command, f"--basetemp={self._temporary / 'pytest'}", *tests],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": str(self._folder), "TMPDIR": str(self._temporary)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_bound,
        )
        try:
            printed, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, _ = process.communicate()
            return "hung", printed
        else:
            return ("passed" if process.returncode == 0 else "failed"), printed
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def try_out(self, mutation: Mutation, tests: tuple[str, ...], seconds: float) -> str:
        """How the tests end with this change; afterwards it is undone."""
        path = self._folder / mutation.module
        source = (self._root / mutation.module).read_bytes()
        path.write_bytes(mutation.apply(source))
        try:
            # A cached one is known by second and length, which may be the same.
            for cached in path.parent.glob(f"__pycache__/{path.stem}.*"):
                cached.unlink()
            return self.test(tests, seconds)[0]
        finally:
            path.write_bytes(source)


def run(
    module: str, tests: tuple[str, ...], chosen: list[Mutation], jobs: int, root: Path = ROOT
) -> list[Mutation] | None:
    """Try all of these; those that survive, or None where the tests fail without any change."""
    with tempfile.TemporaryDirectory(prefix="penstock-mutate-") as folder:
        copies: SimpleQueue[Copy] = SimpleQueue()
        first = Copy(Path(folder, "0"), root)
        began = time.monotonic()
        ended, printed = first.test(tests, 1800)
        took = time.monotonic() - began
        if ended != "passed":
            print(printed, f"{module}: its tests do not pass without a change", sep="\n")
            return None
        seconds = TIMES_LONGER * took + SECONDS_MORE
        print(f"{module}: {len(chosen)} mutations; without one the tests take {took:.0f} s", flush=True)
        copies.put(first)
        for number in range(1, jobs):
            copies.put(Copy(Path(folder, str(number)), root))

        def one(mutation: Mutation) -> bool:
            copy = copies.get()
            try:
                ended = copy.try_out(mutation, tests, seconds)
            finally:
                copies.put(copy)
            if ended == "passed":
                print(f"SURVIVED {mutation}", flush=True)
            return ended == "passed"

        with ThreadPoolExecutor(jobs) as workers:
            survived = [it for it, lives in zip(chosen, workers.map(one, chosen), strict=True) if lives]
        print(f"{module}: {len(chosen) - len(survived)} of {len(chosen)} noticed", flush=True)
        return survived


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/mutate", description="Which small wrong changes no test notices."
    )
    parser.add_argument(
        "--module", action="append", choices=sorted(NEAR), help="only this one; again for more"
    )
    parser.add_argument("--count", type=int, default=20, help="so many of each module (20; 0: all)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 16), help="of the choice")
    parser.add_argument("--lines", help="only FIRST-LAST of the file")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time (1)")
    parser.add_argument("--list", action="store_true", help="print them and run nothing")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    draw = random.Random(args.seed)
    total, survived, failed = 0, 0, False
    for module in args.module or NEAR:
        found = mutations_of(module)
        if args.lines:
            first, _, last = args.lines.partition("-")
            found = [it for it in found if int(first) <= it.line <= int(last or first)]
        if args.count and args.count < len(found):
            found = sorted(draw.sample(found, args.count), key=lambda it: it.start)
        if args.list:
            print(*found, sep="\n")
            continue
        left = run(module, NEAR[module], found, args.jobs)
        if left is None:
            failed = True
            continue
        total += len(found)
        survived += len(left)
    if not args.list:
        print(f"{total - survived} of {total} noticed, {survived} survived")
    return 2 if failed else 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
