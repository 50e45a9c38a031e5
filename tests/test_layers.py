"""Who may import whom: every package has its row, there is no cycle, and the base install stays small.

The rules and the table are in `scripts/layers.py`, which `make check` runs; here it is shown that the tree
obeys them, and that what breaks them is found. What the base install does not bring along must not be needed
to import the core; that is checked by importing it where those packages cannot be found.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.build import COMPILED

ROOT = Path(__file__).parent.parent

_spec = importlib.util.spec_from_file_location("layers", ROOT / "scripts" / "layers.py")
assert _spec is not None
assert _spec.loader is not None
layers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(layers)

OF_COMPILED = () if COMPILED else ("librt", "mypy_extensions")
CELERY = ("celery", "kombu")
OPTIONAL = ("nats", "nicegui", "nkeys", "numpy", "pyarrow", "pyspark", "textual", *CELERY, *OF_COMPILED)
"""What only an extra installs, or a wheel with compiled modules."""

NEEDS_EXTRA = {
    "penstock.log.jetstream.parser",
    "penstock.log.jetstream.transport",
    "penstock.log.jetstream.wire",
    "penstock.log.arrow",
    "penstock.log.loops",
    "penstock.protocols.loops",
}
"""Core modules that are imported only where what they need is installed."""


# --- The check ---


def test_the_tree_obeys_the_table() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "layers.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(layers.LAYERS)


def test_a_row_that_names_what_is_not_above_it_is_found() -> None:
    table = {"model": "", "log": "model broker", "broker": "log"}
    assert layers.misplaced(table, {"model", "log", "broker", "page"}) == [
        "log may import broker, which is not above it",
        "page has no row in scripts/layers.py",
    ]


def test_a_cycle_is_found_wherever_it_begins() -> None:
    assert layers.cycle({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"e"}, "e": {"b"}}) == [
        "b",
        "d",
        "e",
        "b",
    ]
    assert layers.cycle({"a": {"a"}}) == ["a", "a"]
    assert layers.cycle({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}) == []


def test_what_is_imported_late_or_for_types_is_not_loaded_first(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "import penstock.a\nfrom penstock import b\nfrom penstock.c import C\n"
        "if TYPE_CHECKING:\n    import penstock.d\n"
        "try:\n    import penstock.e\nexcept ImportError:\n    pass\n"
        "def late():\n    import penstock.f\n"
    )
    known = {f"penstock.{name}": path for name in "abcdef"}
    assert layers.loaded_first(path, known) == {"penstock.a", "penstock.b", "penstock.c", "penstock.e"}


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
    found = layers.violations(BAD, "penstock.broker.bad", "penstock.broker")
    assert sorted(sentence.split(" imports ")[1].split(";")[0] for sentence in found) == sorted(
        [*BAD_NAMES, "by a name that is computed"]
    )
    assert "penstock.broker.bad, line 2: imports asyncio; nothing here does IO or reads a clock" in found


def test_the_checker_lets_good_imports_pass() -> None:
    assert layers.violations(GOOD, "penstock.broker.good", "penstock.broker") == []


@pytest.mark.parametrize(
    ("module", "statement", "allowed"),
    [
        ("protocols.sspq", "from penstock.protocols.errors import PeerViolation", True),
        ("protocols.sspq", "from .errors import PeerViolation", True),
        ("protocols.sspq", "from penstock.model import batch, ids, words, policy", True),
        ("protocols.sspq", "from ..model.pending import Pending", True),
        ("protocols.sspq", "from penstock.broker import consumers", False),
        ("protocols.sspq", "import penstock", False),
        ("protocols.sspq", "from penstock.modelling import Pun", False),
        ("protocols.sspq", "from penstock.log.log import Log", False),
        ("log.queue", "import os, time, threading", True),
        ("log.queue", "from penstock.broker.broker import Broker", False),
        ("log.queue", "from penstock.common import address", False),
        ("server.server", "from penstock.log.log import open_log", True),
        ("server.server", "from penstock.cluster.front import front_end", False),
        ("server.server", "from penstock.http import process", False),
        ("http.app", "from penstock.dashboard import is_installed", False),
        ("http.app", "import_module('penstock.dashboard')", False),
        ("http.app", "from penstock.server.settings import Settings", False),
        ("dashboard.page", "from penstock.log.info import SyncInfo", True),
        ("dashboard.page", "from penstock.log.reader import LogReader", False),
        ("client.wire", "from penstock.common.address import Address", True),
        ("client.wire", "from penstock.server.settings import Settings", False),
        ("spark.api", "from penstock.client.http import HttpClient", True),
        ("spark.api", "from penstock.broker import broker", False),
        ("pipeline.file", "from penstock.server.settings import Settings", False),
        ("report.job", "from penstock.cli.main import main", False),
        ("cli.top", "from penstock.top.app import Top", False),
        ("cli.serve", "from penstock.cluster.front import front_end", True),
        ("top.app", "from penstock.cli.admin import Admin", True),
        ("top.app", "from penstock.log.log import Log", False),
        ("demo.traffic", "from penstock.broker import broker", False),
    ],
)
def test_every_package_has_its_rule(module: str, statement: str, allowed: bool) -> None:
    name = f"penstock.{module}"
    assert (layers.violations(statement, name, name.rpartition(".")[0]) == []) is allowed


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
    # Not by `layers`, which lies beside the sources: the tests may run on a compiled copy of them.
    paths = [path.relative_to(ROOT).with_suffix("") for folder in folders for path in folder.rglob("*.py")]
    modules = {".".join(path.parts).removesuffix(".__init__") for path in paths}
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
NATS = ("nats.", "penstock.log.jetstream")
print([name for name in sorted(sys.modules) if name.startswith(NATS)])
"""


def test_nothing_of_nats_is_loaded_before_somebody_asks_for_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
