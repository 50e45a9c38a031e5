"""Which build is under test: said by whoever runs the tests, and found to be so."""

import importlib
import os
import re
from pathlib import Path

import pytest

from penstock.build import is_compiled
from tests.server.harness import ROOT, BrokerProcess

EXPECTED = os.environ.get("TESTED_BUILD", "interpreted")
MODULES = re.findall(r'^    "(penstock/[\w/]+)\.py",$', (ROOT / "hatch_build.py").read_text(), re.MULTILINE)


def test_it_is_the_one_that_was_asked_for() -> None:
    assert EXPECTED in ("interpreted", "compiled")
    assert is_compiled() is (EXPECTED == "compiled")


@pytest.mark.parametrize("module", MODULES)
def test_every_module_of_the_list_is_built_alike(module: str) -> None:
    file = importlib.import_module(module.replace("/", ".")).__file__
    assert file is not None
    assert file.endswith(".so") is (EXPECTED == "compiled"), file


def test_brokers_of_the_tests_run_the_same_build(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path).start()
    try:
        mapped = Path(f"/proc/{broker.pid}/maps").read_text(encoding="utf-8")
    finally:
        broker.kill()
    assert ("__mypyc." in mapped) is (EXPECTED == "compiled")
