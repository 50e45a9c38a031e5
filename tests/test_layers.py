"""Who may import whom: the wire and the domain stay pure, and the base install stays small.

`penstock/model`, `penstock/protocols` and `penstock/broker` do no IO, read no clock and start no task.
That is checked in the source, import by import, and the checker itself is shown to find what it
should. What the base install does not bring along must not be needed to import the core; that is
checked by importing it where those packages cannot be found.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.build import COMPILED

ROOT = Path(__file__).parent.parent

IMPURE = frozenset(
    {
        "asyncio",
        "concurrent",
        "datetime",
        "multiprocessing",
        "os",
        "select",
        "selectors",
        "signal",
        "socket",
        "ssl",
        "subprocess",
        "threading",
        "time",
        "uvloop",
    }
)
"""Modules that do IO, read a clock or start a task."""

LAYERS: dict[str, tuple[str, ...]] = {
    "penstock.model": ("penstock.model", "penstock.errors"),
    "penstock.protocols": ("penstock.protocols", "penstock.model", "penstock.build"),
    "penstock.broker": (
        "penstock.broker",
        "penstock.model",
        "penstock.log.errors",
        "penstock.log.info",
        "penstock.log.log",
        "penstock.log.results",
        "penstock.errors",
    ),
}
"""What each pure package may import of Penstock: these modules, and what is in them."""

OF_COMPILED = () if COMPILED else ("librt", "mypy_extensions")
OPTIONAL = ("nats", "nicegui", "numpy", "pyarrow", "pyspark", "textual", *OF_COMPILED)
"""What only an extra installs, or a wheel with compiled modules."""

NEEDS_EXTRA = {"penstock.log.arrow", "penstock.log.loops", "penstock.protocols.loops"}
"""Core modules that are imported only where what they need is installed."""


# --- The checker ---


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def absolute(name: str, level: int, package: str) -> str:
    """The full name of a relative import (`level` dots) out of `package`."""
    if not level:
        return name
    base = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join([*base, name] if name else base)


def text_of(node: ast.expr) -> str:
    """A literal text, or nothing."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def imports_of(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, full name) of everything that a source imports, wherever in it; '?' where nobody can say.

    `from a import b` counts as `a.b`: b may be a module, and if it is a name in a, the rules give
    the same answer for it as for a.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node.module or "", node.level, package)
            for alias in node.names:
                yield node.lineno, base if alias.name == "*" else f"{base}.{alias.name}"
        elif isinstance(node, ast.Call):
            function = node.func
            called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if called in ("import_module", "__import__"):
                arguments = [*node.args, *(word.value for word in node.keywords if word.arg == "package")]
                name, *others = [text_of(argument) for argument in arguments] or [""]
                dots = len(name) - len(name.lstrip("."))
                anchor = others[0] if others and called == "import_module" else ""
                yield node.lineno, absolute(name[dots:], dots, anchor or package) if name else "?"


def within(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def violations(source: str, module: str, package: str) -> list[str]:
    """What a source of a pure package imports against the rules, as sentences."""
    allowed = next(modules for layer, modules in LAYERS.items() if within(module, (layer,)))
    found = []
    for line, name in imports_of(source, package):
        root = name.split(".")[0]
        if name == "?":
            found.append(f"{module}, line {line}: imports by a name that is computed; name the module")
        elif root in IMPURE:
            found.append(f"{module}, line {line}: imports {name}; nothing here does IO or reads a clock")
        elif root == "penstock" and not within(name, allowed):
            found.append(f"{module}, line {line}: imports {name}; only {', '.join(allowed)} are below it")
    return found


# --- The check ---

PURE_FILES = sorted(path for layer in LAYERS for path in ROOT.joinpath(*layer.split(".")).rglob("*.py"))


def test_there_is_something_to_check() -> None:
    modules = {module_of(path) for path in PURE_FILES}
    assert {"penstock.protocols", "penstock.broker", "penstock.model.life"} <= modules


@pytest.mark.parametrize("path", PURE_FILES, ids=module_of)
def test_the_wire_and_the_domain_are_pure(path: Path) -> None:
    module = module_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    assert violations(path.read_text(encoding="utf-8"), module, package) == []


BAD = """
import asyncio
import os.path
import json, socket as wire
from time import monotonic
from datetime import datetime
import penstock.log
from penstock.log import disk
from penstock.log.disk import RealDisk
from penstock import server
from ..log import committer
from .. import log
from penstock.log import *

def late():
    import threading
    if late:
        from selectors import DefaultSelector
    importlib.import_module("ssl")
    __import__("penstock.log")
    import_module("..log.jetstream", __package__)
    import_module(".disk", package="penstock.log")
    import_module(late())
"""

BAD_NAMES = [
    "asyncio",
    "os.path",
    "socket",
    "time.monotonic",
    "datetime.datetime",
    "penstock.log",
    "penstock.log.disk",
    "penstock.log.disk.RealDisk",
    "penstock.server",
    "penstock.log.committer",
    "penstock.log",
    "penstock.log",
    "threading",
    "selectors.DefaultSelector",
    "ssl",
    "penstock.log",
    "penstock.log.jetstream",
    "penstock.log.disk",
]

GOOD = """
import json
import timeit, ostrich
from array import array
from penstock.model.batch import Batch
from penstock.model import words
from penstock.log.log import Log
from penstock.log import results
from .consumers import Consumers
from . import port
from ..errors import PenstockError
importlib.import_module("penstock.model.policy")
"""


def test_the_checker_finds_every_bad_import() -> None:
    found = violations(BAD, "penstock.broker.bad", "penstock.broker")
    assert sorted(sentence.split(" imports ")[1].split(";")[0] for sentence in found) == sorted(
        [*BAD_NAMES, "by a name that is computed"]
    )
    assert "penstock.broker.bad, line 2: imports asyncio; nothing here does IO or reads a clock" in found


def test_the_checker_lets_good_imports_pass() -> None:
    assert violations(GOOD, "penstock.broker.good", "penstock.broker") == []


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("from penstock.protocols.errors import PeerViolation", True),
        ("from .errors import PeerViolation", True),
        ("from penstock.model.policy import door_of", True),
        ("from penstock.model import batch, ids, words, policy", True),
        ("from ..model.pending import Pending", True),
        ("from penstock.broker import consumers", False),
        ("import penstock.broker", False),
        ("import penstock", False),
        ("from penstock.modelling import Pun", False),
        ("from penstock.log.log import Log", False),
        ("from penstock.client import connect", False),
    ],
)
def test_protocols_may_import_less_than_the_broker(statement: str, allowed: bool) -> None:
    assert (violations(statement, "penstock.protocols.sspq", "penstock.protocols") == []) is allowed


# --- The base install ---

IMPORT_WITHOUT_EXTRAS = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {optional!r}:
            raise ImportError(f"{{name}} is not installed here")

sys.meta_path.insert(0, Blocked())
for name in {optional!r}:
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    raise SystemExit(f"{{name}} was not blocked")

for name in {modules!r}:
    importlib.import_module(name)
print("imported", len({modules!r}))
"""


def core_modules() -> list[str]:
    folders = [ROOT / "penstock" / folder for folder in ("model", "broker", "protocols", "log")]
    modules = {module_of(path) for folder in folders for path in folder.rglob("*.py")}
    return sorted({"penstock", *modules} - NEEDS_EXTRA)


def import_without_extras(modules: list[str]) -> subprocess.CompletedProcess[str]:
    program = IMPORT_WITHOUT_EXTRAS.format(optional=OPTIONAL, modules=modules)
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )


def test_the_core_needs_no_extra() -> None:
    modules = core_modules()
    done = import_without_extras(modules)
    assert (done.returncode, done.stdout.strip()) == (0, f"imported {len(modules)}"), done.stderr


def test_a_core_that_needed_an_extra_would_be_found() -> None:
    done = import_without_extras(["penstock", "pyarrow.compute"])
    assert done.returncode == 1
    assert "pyarrow is not installed here" in done.stderr


# --- The other engine ---

LOADED = """
import sys
import penstock.server.server, penstock.cli.main
NATS = ("penstock.log.jetstream", "penstock.protocols.nats")
print([name for name in sorted(sys.modules) if name.startswith(NATS)])
"""


def test_nothing_of_nats_is_loaded_before_somebody_asks_for_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
