"""What must hold for the whole tree: versions agree, commands are explained, set-up fails in plain words.

No test here installs anything or looks at the network: where set-up is tried, Python, pip and apt-get are
scripts that play their parts in a folder of their own.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import penstock
from bench import __main__ as runner

ROOT = Path(__file__).parent.parent
SCRIPTS = [*sorted((ROOT / "scripts").iterdir()), ROOT / ".ci" / "run"]
TARGET = re.compile(r"^([a-z][a-z-]*):(?!=)(?:.*?## (.+))?", re.MULTILINE)


def files() -> Iterator[Path]:
    """Every file of the project: what is there without what .gitignore names (there may be no git here)."""
    ignored = {".git", *(line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split())}
    folders = [ROOT]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if path.name in ignored or f"*{path.suffix}" in ignored:
                continue
            if path.is_dir():
                folders.append(path)
            else:
                yield path


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs it with nothing to type on, and with these variables beside the usual ones."""
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


# -- versions and names --


def test_the_changelog_s_newest_version_is_the_package_s() -> None:
    versions = re.findall(r"^## \[?([^\]\s]+)\]?", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == penstock.__version__


def test_the_command_prints_the_version() -> None:
    ended = run(Path(sys.executable).with_name("penstock"), "--version")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"penstock {penstock.__version__}\n", "")


def test_all_is_what_is_exported() -> None:
    public = {
        name
        for name, value in vars(penstock).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public <= set(penstock.__all__)
    assert [name for name in penstock.__all__ if not hasattr(penstock, name)] == []
    assert len(penstock.__all__) == len(set(penstock.__all__))


def test_the_core_needs_uvloop_and_what_http_takes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [re.split(r"[^\w-]", needed)[0] for needed in project["dependencies"]] == [
        "uvloop",
        "starlette",
        "uvicorn",
        "httptools",
        "prometheus-client",
    ]


# -- the files --


def test_every_module_has_a_docstring() -> None:
    package = ROOT / "penstock"
    modules = [path for path in files() if path.suffix == ".py" and path.is_relative_to(package)]
    assert len(modules) > 10
    assert [
        path for path in modules if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ] == []


FOREIGN = {
    "a path of somebody's machine": re.compile(r"(?<![\w.~])/(?:home|root|Users|work|farm)/[\w.]"),
    "a package registry": re.compile(
        r"pypi\.org|pythonhosted\.org|npmjs\.(?:org|com)|yarnpkg\.com|maven\.org|anaconda\.org|crates\.io"
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_no_file_names(what: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in files()
        for match in FOREIGN[what].finditer(path.read_bytes().decode("utf-8", "replace"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("cd /" + "home/ann/penstock", "a path of somebody's machine"),
        ('open("/' + 'root/.config")', "a path of somebody's machine"),
        ("--index-url https://" + "pypi" + ".org/simple", "a package registry"),
    ],
)
def test_the_search_for_foreign_names_finds_them(text: str, what: str) -> None:
    assert FOREIGN[what].search(text)


def test_the_readme_names_its_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme


# -- make, scripts, CI --


def test_every_make_target_has_a_sentence_and_make_help_shows_it() -> None:
    targets = dict(TARGET.findall((ROOT / "Makefile").read_text()))
    assert {"help", "setup", "demo", "test", "check", "bench", "fuzz", "clean"} <= targets.keys()
    assert [name for name, sentence in targets.items() if not sentence.endswith(".")] == []
    shown = run("make", "--no-print-directory").stdout.splitlines()
    assert [tuple(line.split(maxsplit=2)[1:]) for line in shown] == list(targets.items())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash_that_parses_and_stops_at_errors(script: Path) -> None:
    assert run("bash", "-n", script).stderr == ""
    if script.suffix != ".sh":  # a library has the options of those who source it
        assert os.access(script, os.X_OK)
        assert script.read_text().startswith("#!/usr/bin/env bash\n")
        assert "set -euo pipefail\n" in script.read_text()


def test_ci_runs_make_test_and_nothing_else_decides() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    commands = [line for line in lines if line and not line.startswith("#")]
    assert commands == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "make test"]


# -- set-up: what it says where it cannot work --


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with what set-up reads, and a folder `bin` for commands that are not what they seem."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "bin").mkdir()
    return tmp_path


def pretend(tree: Path, name: str, script: str) -> None:
    path = tree / "bin" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def set_up(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs it as somebody who is not root and has no sudo, whoever runs the tests."""
    pretend(tree, "id", "echo 1000")
    pretend(tree, "sudo", "exit 1")
    path = f"{tree / 'bin'}:{os.environ['PATH']}"
    return run(tree / "scripts" / "setup", cwd=tree, **{"PATH": path, "PYTHON": "", **environment})


def test_set_up_says_so_where_python_is_too_old_and_none_may_be_installed(tree: Path) -> None:
    for name in ("python3.13", "python3.12"):
        pretend(tree, name, "exit 127")
    for name in ("python3.11", "python3"):
        pretend(tree, name, "echo 3 9")
    pretend(tree, "apt-get", "exit 0")
    ended = set_up(tree)
    assert ended.returncode == 1
    assert (
        ended.stdout
        == "penstock: cannot install python3 python3-venv: not root, and sudo is missing or refuses\n"
    )
    assert ended.stderr.splitlines() == [
        "penstock: Python 3.11 or newer with the modules venv and ensurepip is needed. Looked at:",
        "  python3.13: not found, or does not run",
        "  python3.12: not found, or does not run",
        "  python3.11: too old (3.9)",
        "  python3: too old (3.9)",
        "  What to do: on Debian 12 or later, as root: apt-get install python3 python3-venv",
        "  Or name another one:  make setup PYTHON=/path/to/python3.12",
    ]


def test_set_up_takes_a_python_that_was_named_or_none(tree: Path) -> None:
    ended = set_up(tree, PYTHON="no-such-python")
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "  no-such-python: not found, or does not run\n" in ended.stderr


def pretend_python(tree: Path, pip: str) -> None:
    """A Python 3.12 that makes an environment as `venv` does; in that one, pip is a line of shell."""
    (tree / "inner").write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo 3 12 && exit\n{pip}\n')
    pretend(
        tree,
        "python",
        '[ "$1" = -c ] && echo 3 12 && exit\n'
        "echo venv >>calls; mkdir -p .venv/bin; cp inner .venv/bin/python; chmod +x .venv/bin/python\n"
        'echo "command = python -m venv $PWD/.venv" >.venv/pyvenv.cfg',
    )


def test_set_up_shows_what_pip_said_and_what_to_do(tree: Path) -> None:
    pretend_python(tree, "echo no route to host; exit 1")
    ended = set_up(tree, PYTHON="python")
    assert ended.returncode == 1
    assert ended.stderr.startswith(
        "  pip: no route to host\npenstock: the packages could not be installed, see above.\n"
    )
    assert "PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER make setup" in ended.stderr
    assert not (tree / ".venv" / "stamp").exists()


def test_set_up_does_nothing_twice_and_repeats_what_its_input_asks_for(tree: Path) -> None:
    pretend_python(tree, "echo pip >>calls")

    def calls_of_one_more() -> tuple[int, str, list[str]]:
        (tree / "calls").write_text("")
        ended = set_up(tree, PYTHON="python")
        return ended.returncode, ended.stdout[-40:], (tree / "calls").read_text().split()

    ready = "penstock: ready: .venv holds everything\n"
    assert calls_of_one_more() == (0, ready, ["venv", "pip"])
    assert calls_of_one_more() == (0, "", [])
    with (tree / "pyproject.toml").open("a") as project:
        project.write("# changed\n")
    assert calls_of_one_more() == (0, ready, ["pip"])
    (tree / ".venv" / "bin" / "python").unlink()
    assert calls_of_one_more() == (0, ready, ["venv", "pip"])


# -- the benchmark runner --


@pytest.mark.parametrize(
    ("row", "met"),
    [
        (("cost", 1.9, "µs/msg", 2.0), True),
        (("cost", 2.1, "µs/msg", 2.0), False),
        (("memory", 30.0, "MB", 30.0), True),
        (("start", 0.5, "s", 0.4), False),
        (("rate", 400_000.0, "msg/s", 350_000.0), True),
        (("rate", 4.9, "M msg/s", 5.0), False),
        (("peer", 153_000.0, "msg/s", 0.0), None),
        (("odd", 1.0, "furlongs", 0.0), None),
    ],
)
def test_a_goal_counts_in_the_direction_of_its_unit(
    row: tuple[str, float, str, float], met: bool | None
) -> None:
    assert runner.figure("log", row).met is met


def test_a_goal_without_a_direction_is_refused() -> None:
    with pytest.raises(ValueError, match="log: 'odd' has a goal in 'furlongs'"):
        runner.figure("log", ("odd", 1.0, "furlongs", 2.0))


@pytest.mark.parametrize(
    ("value", "text"), [(1234567.8, "1,234,568"), (42.34, "42.3"), (1.999, "2.00"), (0.0256, "0.026")]
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert runner.number(value) == text


def test_the_runner_prints_a_table_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = ModuleType("bench.bench_made_up")
    vars(module)["run"] = lambda: [
        ("fast", 2.0, "M msg/s", 1.0),
        ("slow", 3.0, "s", 1.0),
        ("x", 7.0, "MB", 0),
    ]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(runner, "benchmarks", lambda: ["made_up"])
    assert runner.main(["made_up", "--json", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["fast", "2.00", "M", "msg/s", "≥", "1.00", "met"] in rows
    assert ["slow", "3.00", "s", "≤", "1.00", "NOT", "MET"] in rows
    assert ["x", "7.00", "MB"] in rows
    assert out.endswith("3 figures, 1 of 2 goals met\n")
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["machine"]["penstock"] == penstock.__version__
    assert report["machine"]["cores"] >= 1
    assert report["figures"][1] == {
        "benchmark": "made_up",
        "name": "slow",
        "value": 3.0,
        "unit": "s",
        "goal": 1.0,
        "met": False,
    }


def test_an_unknown_benchmark_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        runner.main(["no-such"])
    assert leaving.value.code == 2
    assert "no benchmark 'no-such'" in capsys.readouterr().err
