"""`make sbom` writes CycloneDX 1.5 by the rules that readers rely on; it is true, and always the same."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import packaging
import pytest

from penstock import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PURL = re.compile(r"pkg:pypi/([a-z0-9]+(?:-[a-z0-9]+)*)@([\w.%]+)")


def write(path: Path, *flags: str, **around: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *flags, str(ROOT / "scripts" / "sbom.py"), str(path)],
        env=os.environ | around,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture(scope="module")
def bill(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sbom")
    texts = []
    for name in ("one", "two"):
        done = write(folder / "made" / name)
        assert (done.returncode, done.stderr) == (0, "")
        texts.append((folder / "made" / name).read_bytes())
    assert texts[0] == texts[1]
    made: dict[str, Any] = json.loads(texts[0])
    return made


def test_the_head(bill: dict[str, Any]) -> None:
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.5", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", bill["serialNumber"])
    known = {
        "$schema",
        "bomFormat",
        "specVersion",
        "serialNumber",
        "version",
        "metadata",
        "components",
        "dependencies",
    }
    assert bill.keys() == known
    own = bill["metadata"]["component"]
    assert (own["type"], own["name"], own["version"]) == ("application", "penstock", __version__)
    assert own["licenses"] == [{"expression": "Apache-2.0"}]


def test_every_component_is_what_is_installed(bill: dict[str, Any]) -> None:
    assert len(bill["components"]) > 30
    for component in [*bill["components"], bill["metadata"]["component"]]:
        found = PURL.fullmatch(component["purl"])
        assert found is not None, component["purl"]
        assert component["bom-ref"] == component["purl"]
        assert (component["name"], component["version"]) == (found[1], unquote(found[2]))
    for component in bill["components"]:
        assert component["type"] == "library"
        assert component["version"] == version(component["name"])


def test_licences_have_one_of_the_forms_that_there_are(bill: dict[str, Any]) -> None:
    silent = []
    for component in bill["components"]:
        match component["licenses"]:
            case [{"expression": str(text), **more}] if text and not more:
                pass
            case [{"license": {"name": str()}}, *others] if all(one.keys() == {"license"} for one in others):
                pass
            case []:
                silent.append(component["name"])
            case wrong:
                pytest.fail(f"{component['name']}: {wrong}")
    assert len(silent) < 5, silent


def test_parts_are_the_core_and_the_extras(bill: dict[str, Any]) -> None:
    parts: dict[str, set[str]] = {}
    for component in bill["components"]:
        mine = [one["value"] for one in component["properties"] if one["name"] == "penstock:part"]
        assert mine == sorted(set(mine)) != []
        assert component["scope"] == ("required" if "core" in mine else "optional")
        for part in mine:
            parts.setdefault(part, set()).add(component["name"])
    assert parts.keys() == {"core", *PROJECT["optional-dependencies"]}
    assert {"uvloop", "starlette", "anyio", "uvicorn", "h11", "shtab"} <= parts["core"]
    assert {"pyspark", "py4j"} <= parts["spark"]
    assert {"nats-py", "nkeys", "pynacl"} <= parts["nats"]  # nkeys by the extra of nats-py
    for names in (parts["core"], parts["arrow"]):
        assert not {"pytest", "mypy", "ruff", "pyspark", "penstock"} & names


def test_the_graph_leads_from_penstock_to_everything(bill: dict[str, Any]) -> None:
    graph = {one["ref"]: one["dependsOn"] for one in bill["dependencies"]}
    own = bill["metadata"]["component"]["bom-ref"]
    references = [own, *(component["bom-ref"] for component in bill["components"])]
    assert sorted(graph) == sorted(references)
    assert len(graph) == len(bill["dependencies"]) == len(set(references))
    reached, waiting = {own}, [own]
    while waiting:
        new = set(graph[waiting.pop()]) - reached
        reached |= new
        waiting.extend(new)
    assert reached == set(references)


def test_a_package_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "packaging").symlink_to(Path(packaging.__file__).parent)
    done = write(tmp_path / "made", "-S", PYTHONPATH=str(tmp_path))  # no package but that one
    assert done.returncode == 1
    assert "\npenstock: starlette<2,>=0.46 (for core) is not installed; make setup\n" in done.stderr
    assert not (tmp_path / "made").exists()
