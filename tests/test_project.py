"""What must hold for the whole tree: versions agree, commands are explained, set-up fails in plain words.

No test here installs anything or looks at the network: where set-up is tried, Python, pip and apt-get are
scripts that play their parts in a folder of their own.
"""

import ast
import email
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import penstock
from bench import __main__ as runner

ROOT = Path(__file__).parent.parent
SCRIPTS = [
    *sorted(path for path in (ROOT / "scripts").iterdir() if path.suffix != ".py" and path.is_file()),
    ROOT / ".ci" / "run",
]
"""Those that are bash; the types of the others are checked by mypy."""
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


def test_the_core_needs_little() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [re.split(r"[^\w-]", needed)[0] for needed in project["dependencies"]] == [
        "uvloop",
        "starlette",
        "uvicorn",
        "h11",
        "httptools",
        "prometheus-client",
        "isal",
        "shtab",
    ]


# -- the package --


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """What `pip wheel` makes of the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("penstock", "pyspark_penstock"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    made = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", cwd=folder)
    assert made.returncode == 0, made.stderr
    (path,) = (folder / "dist").iterdir()
    with zipfile.ZipFile(path) as made_of:
        yield made_of


def test_a_wheel_holds_both_packages_with_their_types_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert {"penstock/py.typed", "pyspark_penstock/py.typed", "pyspark_penstock/__init__.py"} <= set(names)
    assert {name.partition("/")[0] for name in names} == {"penstock", "pyspark_penstock"}
    others = [name for name in names if not name.endswith((".py", "/py.typed"))]
    assert [name for name in others if not name.startswith("penstock/dashboard/assets/")] == [
        "penstock/cli/debian/penstock.service",
        "penstock/cli/debian/penstock.toml",
    ]


def test_a_package_page_says_who_and_where_and_all_its_links_lead_there(wheel: zipfile.ZipFile) -> None:
    (place,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    about = email.message_from_bytes(wheel.read(place))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    repository = settings["metadata"]["hooks"]["custom"]["repository"]
    assert about["Author"]
    addresses = dict(line.split(", ", 1) for line in about.get_all("Project-URL", []))
    assert addresses["Repository"] == repository
    assert {"Documentation", "Changelog"} < addresses.keys()
    extras = {"arrow", "avro", "celery", "dashboard", "import", "lake", "nats", "protobuf", "spark"}
    assert set(about.get_all("Provides-Extra", [])) == extras
    links = re.findall(r"\]\(([^)]+)\)", wheel.read(place).decode())
    assert len(links) > 10
    assert [link for link in links if not link.startswith(f"{repository}/")] == []


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


def test_the_order_of_the_tests_names_what_is_there(request: pytest.FixtureRequest) -> None:
    order = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    assert order is not None
    named = {*order.FIRST, *order.SLOW}
    assert len(order.FIRST) == len(set(order.FIRST))
    assert [name for name in sorted(named) if not (ROOT / "tests" / name).exists()] == []


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


def set_up(tree: Path, want: str = "test", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs it as somebody who is not root (but for USER_ID=0) and has no sudo, whoever runs the tests."""
    pretend(tree, "id", "echo ${USER_ID:-1000}")
    pretend(tree, "sudo", "exit 1")
    path = f"{tree / 'bin'}:{os.environ['PATH']}"
    around = {"PATH": path, "PYTHON": "", "VENV": "", **environment}
    return run(tree / "scripts" / "setup", want, cwd=tree, **around)


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
        "echo venv >>calls; mkdir -p $3/bin; cp inner $3/bin/python; chmod +x $3/bin/python\n"
        'echo "command = python -m venv $PWD/$3" >$3/pyvenv.cfg',
    )


def test_set_up_shows_what_pip_said_and_what_to_do(tree: Path) -> None:
    pretend_python(tree, "echo no route to host; exit 1")
    ended = set_up(tree, PYTHON="python")
    assert ended.returncode == 1
    assert ended.stderr.startswith(
        "  pip: no route to host\npenstock: the packages could not be installed, see above.\n"
    )
    assert "PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER make test" in ended.stderr
    assert not (tree / ".venv" / "stamp-test").exists()


def calls_of(tree: Path, want: str, **environment: str) -> tuple[int, str, list[str]]:
    """Its exit code, the last line that it says, and what it has called meanwhile."""
    (tree / "calls").write_text("")
    ended = set_up(tree, want, PYTHON="python", **environment)
    said = ended.stdout.splitlines()
    return ended.returncode, said[-1] if said else "", (tree / "calls").read_text().splitlines()


READY = "penstock: ready: .venv holds what make {} needs".format


def test_set_up_does_nothing_twice_and_repeats_what_its_input_asks_for(tree: Path) -> None:
    pretend_python(tree, "echo pip >>calls")
    assert calls_of(tree, "test") == (0, READY("test"), ["venv", "pip"])
    assert calls_of(tree, "test") == (0, "", [])
    assert calls_of(tree, "demo") == (0, "", [])
    with (tree / "pyproject.toml").open("a") as project:
        project.write("# changed\n")
    assert calls_of(tree, "test") == (0, READY("test"), ["pip"])
    (tree / ".venv" / "bin" / "python").unlink()
    assert calls_of(tree, "test") == (0, READY("test"), ["venv", "pip"])


def test_an_environment_has_a_place_of_its_own_where_one_is_named(tree: Path) -> None:
    pretend_python(tree, "echo pip >>calls")
    assert calls_of(tree, "test") == (0, READY("test"), ["venv", "pip"])
    ready = (0, READY("test").replace(".venv", "build/venv-3.12"), ["venv", "pip"])
    assert calls_of(tree, "test", VENV="build/venv-3.12") == ready
    assert calls_of(tree, "test") == (0, "", [])


BARE = "bash, cat, chmod, cp, dirname, env, grep, head, mkdir, mktemp, rm, sed, sh, sha256sum, tail"
"""The commands of a machine on which nothing was installed."""


def bare(tree: Path) -> dict[str, str]:
    """A machine with these commands alone, root's, where apt-get installs what it is asked for."""
    (tree / "bare").mkdir()
    for name in BARE.split(", "):
        found = shutil.which(name)
        assert found
        (tree / "bare" / name).symlink_to(found)
    pretend(tree, "java-17", "echo 'openjdk version \"17.0.2\"' >&2")
    pretend(
        tree,
        "apt-get",
        'for word; do package=$word; done; echo "apt-get $package" >>calls\n'
        "[ $package != default-jre-headless ] || cp bin/java-17 bin/java",
    )
    return {"PATH": f"{tree / 'bin'}:{tree / 'bare'}", "JAVA_HOME": ""}


@pytest.fixture
def telling(tree: Path) -> Path:
    """A tree whose pip tells what it was asked for."""
    pretend_python(tree, "while [ $# -gt 0 ] && [ $1 != --editable ]; do shift; done; echo $* >>calls")
    return tree


APT = (
    "openssl",
    "curl",
    "jq",
    "python3-dev",
    "systemd",
    "buildah",
    "prometheus",
    "rabbitmq-server",
    "chromium",
)
"""The last of each call: a compiler comes with two more."""


def test_the_demo_needs_java_and_what_it_shows_and_tests_add_to_it(telling: Path) -> None:
    root = {**bare(telling), "USER_ID": "0"}
    java = "apt-get default-jre-headless"
    shown = "--editable .[dashboard,spark,lake] --requirement .venv/demo.txt"
    assert calls_of(telling, "demo", **root) == (0, READY("demo"), ["venv", java, shown])
    assert calls_of(telling, "demo", **root) == (0, "", [])
    installed = [f"apt-get {name}" for name in APT]
    packages = " ".join(f"--requirement .venv/{group}.txt" for group in ("dev", "docs", "demo"))
    more = f"--editable .[dashboard,spark,nats,celery,import,lake,avro,protobuf] {packages}"
    assert calls_of(telling, "test", **root) == (0, READY("test"), [*installed, more])
    assert calls_of(telling, "demo", **root) == (0, "", [])


def test_the_site_needs_no_java_and_takes_nothing_from_the_demo(telling: Path) -> None:
    root = {**bare(telling), "USER_ID": "0"}
    site = "--editable . --requirement .venv/docs.txt"
    assert calls_of(telling, "docs", **root) == (0, READY("docs"), ["venv", site])
    assert calls_of(telling, "docs", **root) == (0, "", [])
    java = "apt-get default-jre-headless"
    assert calls_of(telling, "demo", **root) == (
        0,
        READY("demo"),
        [java, "--editable .[dashboard,spark,lake] --requirement .venv/demo.txt"],
    )
    # What a set-up is made from has changed with Java; from then on both stay as they are.
    assert calls_of(telling, "docs", **root) == (0, READY("docs"), [site])
    assert calls_of(telling, "demo", **root) == (0, "", [])


def test_without_java_the_demo_s_packages_are_without_spark_until_there_is_one(telling: Path) -> None:
    nobody = bare(telling)
    assert calls_of(telling, "demo", **nobody) == (0, READY("demo"), ["venv", "--editable .[dashboard]"])
    said = set_up(telling, "demo", PYTHON="python", **nobody, VENV="other").stdout
    assert "cannot install default-jre-headless: not root, and sudo is missing or refuses" in said
    assert "NOTE: without Java 17 or newer Spark does not run: the demo leaves it out" in said
    assert "chromium" not in said
    assert calls_of(telling, "demo", **nobody) == (0, "", [])
    pretend(telling, "java", "echo 'openjdk version \"21.0.1\"' >&2")
    assert calls_of(telling, "demo", **nobody)[2] == [
        "--editable .[dashboard,spark,lake] --requirement .venv/demo.txt"
    ]


def test_set_up_knows_three_things_to_set_up(tree: Path) -> None:
    ended = set_up(tree, "all")
    assert (ended.returncode, ended.stderr) == (
        1,
        "penstock: 'all' is nothing that can be set up: demo, docs or test.\n",
    )


def test_every_python_runs_the_tests_in_an_environment_of_its_own(tree: Path) -> None:
    told = 'echo "$VENV $PYTHON $*" >>calls; [ "$VENV" != build/venv-3.13 ]'
    (tree / "scripts" / "test").write_text(f"#!/bin/sh\n{told}\n")
    for minor in range(11, 31):
        pretend(tree, f"python3.{minor}", "exit 127")
    for minor in (11, 13):
        pretend(tree, f"python3.{minor}", f"echo 3.{minor}.7")
    kept = tree / "pyenv" / "versions" / "3.12.1" / "bin"
    kept.mkdir(parents=True)
    (kept / "python").write_text("#!/bin/sh\necho 3.12.1\n")
    (kept / "python").chmod(0o755)
    path = f"{tree / 'bin'}:{os.environ['PATH']}"
    around = {"PATH": path, "PYENV_ROOT": str(tree / "pyenv")}
    ended = run(tree / "scripts" / "test-pythons", "tests/cli", cwd=tree, **around)
    assert (tree / "calls").read_text().splitlines() == [
        "build/venv-3.11 python3.11 tests/cli",
        f"build/venv-3.12 {kept / 'python'} tests/cli",
        "build/venv-3.13 python3.13 tests/cli",
    ]
    assert ended.returncode == 1
    assert [re.sub(r"\d+ s$", "0 s", line) for line in ended.stdout.splitlines()[-3:]] == [
        "penstock: Python 3.11.7: passed, in 0 s",
        "penstock: Python 3.12.1: passed, in 0 s",
        "penstock: Python 3.13.7: FAILED, in 0 s",
    ]


@pytest.mark.parametrize(
    ("flags", "checks", "tests", "wrong"),
    [
        ((), "exit 0", "exit 0", []),
        ((), "exit 1", "exit 0", ["  checks"]),
        ((), "exit 1", "exit 1", ["  tests (Hypothesis seed 7)", "  checks"]),
        (("--fast",), "exit 1", "exit 0", []),
    ],
)
def test_checks_run_beside_the_tests_and_one_round_shows_everything(
    tree: Path, flags: tuple[str, ...], checks: str, tests: str, wrong: list[str]
) -> None:
    (tree / "scripts" / "setup").write_text("#!/bin/sh\n")
    (tree / "scripts" / "check").write_text(f"#!/bin/sh\necho what the checks say\n{checks}\n")
    python = tree / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$*" >>calls\n[ "$2" != pytest ] || {tests}\n')
    python.chmod(0o755)
    around = {"HYPOTHESIS_SEED": "7", "VENV": ""}
    ended = run(tree / "scripts" / "test", *flags, "tests/cli", cwd=tree, **around)
    (pytest_call,) = (line for line in (tree / "calls").read_text().splitlines() if "pytest" in line)
    assert pytest_call.endswith(" ".join((*flags, "tests/cli")))
    assert "--hypothesis-seed=7 " in pytest_call
    assert ("-m ruff check ." in (tree / "calls").read_text()) == bool(flags)
    assert ("what the checks say" in ended.stdout) == (not flags)
    assert ended.returncode == bool(wrong)
    assert ended.stderr.splitlines()[1:] == wrong


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
