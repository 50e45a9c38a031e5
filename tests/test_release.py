"""Packages as strangers install them, and what keeps a wrong one from being released.

One compiled wheel is built, for the Python of the tests, in `make test-long`; what `scripts/compile` has
compiled is used again where nothing has changed since. Those of other Pythons belong to `make wheels`.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from datetime import date
from pathlib import Path

import pytest
import yaml

from penstock import __version__
from tests.seeds import some
from tests.server.harness import ROOT
from tests.test_build import EXPECTED, MODULES

SECONDS = 900
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LIBRARIES = ROOT / "build" / "libraries" if EXPECTED == "interpreted" else ROOT.parent / "libraries"


def run(*words: str | Path, cwd: Path = ROOT, **around: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        words,
        cwd=cwd,
        env=os.environ | around,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )


# -- packages --


@pytest.fixture(scope="module")
def tree_of_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("dist") / "tree"
    ignore = shutil.ignore_patterns(
        "__pycache__", "*.so", ".venv", "build", "dist", ".git", ".*_cache", "stamp"
    )
    shutil.copytree(ROOT, tree, ignore=ignore)
    return tree


def build(tree: Path, *words: str, **around: str) -> Path:
    """What `make wheels` makes for one Python, before auditwheel names the machines that it fits."""
    done = run(sys.executable, "-m", "hatchling", "build", "-d", *words, cwd=tree, **around)
    assert done.returncode == 0, done.stdout + done.stderr
    return tree / words[0]


@pytest.fixture(scope="module")
def pure(tree_of_packages: Path) -> Path:
    """The folder of the wheel for everything else, and of the sdist."""
    return build(tree_of_packages, "pure", "-t", "wheel", "-t", "sdist")


@pytest.fixture(scope="module")
def interpreted(pure: Path) -> Path:
    (wheel,) = pure.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def compiled(tree_of_packages: Path) -> Path:
    """Minutes, where nothing was compiled before."""
    around = {"HATCH_BUILD_HOOK_ENABLE_CUSTOM": "true", "COMPILED_LIBRARIES": str(LIBRARIES)}
    (wheel,) = build(tree_of_packages, "compiled", "-t", "wheel", **around).iterdir()
    return wheel


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as packed:
        return {name for name in packed.namelist() if ".dist-info/" not in name}


@pytest.mark.long
def test_the_compiled_wheel_is_the_pure_one_with_libraries(compiled: Path, interpreted: Path) -> None:
    assert interpreted.name == f"penstock-{__version__}-py3-none-any.whl"
    assert f"-cp3{sys.version_info.minor}-cp3{sys.version_info.minor}-linux_" in compiled.name
    more = names(compiled) - names(interpreted)
    assert {name.partition(".")[0] for name in more if name.startswith("penstock/")} == set(MODULES)
    shared = [name for name in more if not name.startswith("penstock/")]
    assert len(shared) == 1
    assert all(name.endswith(".so") for name in more)


def test_a_wheel_from_the_sdist_is_the_same(pure: Path, interpreted: Path, tmp_path: Path) -> None:
    (sdist,) = pure.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        packed.extractall(tmp_path, filter="data")
    tree = tmp_path / f"penstock-{__version__}"
    done = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "out", cwd=tree)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tree / "out").iterdir()
    assert names(wheel) == names(interpreted)
    assert (
        (tree / "examples" / "systemd" / "penstock.service").read_text(encoding="utf-8").startswith("# /etc")
    )
    assert (tree / "Containerfile").is_file()
    assert (tree / ".github" / "workflows" / "tests.yml").is_file()


@pytest.mark.parametrize("build", some(["compiled", "interpreted"], "interpreted"))
def test_each_works_in_an_empty_environment(
    request: pytest.FixtureRequest, build: str, tmp_path: Path
) -> None:
    """Send, receive, kill -9, receive; and no compiler is asked for."""
    assert run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv").returncode == 0
    python = tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    wheel = request.getfixturevalue(build)
    done = run(*pip, "install", "--quiet", "--only-binary", ":all:", wheel, CC="false")
    assert done.returncode == 0, done.stderr
    clean = {"PYTHONPATH": "", "PYTHONSAFEPATH": ""}
    done = run(python, ROOT / "scripts" / "smoke.py", build, cwd=tmp_path, **clean)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"penstock {__version__}, {build}, on Python ")
    other = {"compiled": "interpreted", "interpreted": "compiled"}[build]
    wrong = run(python, ROOT / "scripts" / "smoke.py", other, cwd=tmp_path, **clean)
    assert f"AssertionError: this is {build}" in wrong.stderr


def test_wheels_are_for_the_pythons_that_are_promised() -> None:
    promised = re.findall(r"Python :: 3\.(\d+)", " ".join(PROJECT["project"]["classifiers"]))
    wheels = PROJECT["tool"]["cibuildwheel"]
    assert wheels["build"] == [f"cp3{minor}-*" for minor in promised]
    assert wheels["environment"] == {"HATCH_BUILD_HOOK_ENABLE_CUSTOM": "true"}
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in promised]


# -- a release --

WHEELS = """#!/bin/sh
mkdir -p dist
touch dist/penstock-1.2.3.tar.gz dist/penstock-1.2.3-py3-none-any.whl
touch dist/penstock-1.2.3-cp311-cp311-manylinux_2_28_x86_64.whl
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree that can be released, where building takes no time."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "penstock").mkdir()
    for name in ("release", "lib.sh"):
        shutil.copy2(ROOT / "scripts" / name, tmp_path / "scripts")
    write(tmp_path / "scripts" / "wheels", WHEELS)
    write(tmp_path / "scripts" / "sbom", '#!/bin/sh\nmkdir -p build; echo {} >"$1"\n')
    write(tmp_path / "penstock" / "__init__.py", '__version__ = "1.2.3"\n')
    write(
        tmp_path / "CHANGELOG.md",
        "# Changelog\n\n## [1.2.3] - 2026-11-18\n\n- Better.\n\n## [1.2.2] - 2026-01-02\n",
    )
    write(tmp_path / ".gitignore", "dist/\nbuild/\n")
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    commit(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def git(tree: Path, *words: str) -> str:
    who = ("-c", "user.name=Ann", "-c", "user.email=ann@example.org")
    done = run("git", *who, *words, cwd=tree)
    assert done.returncode == 0, done.stderr
    return done.stdout


def commit(tree: Path) -> None:
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "Change")


def release(tree: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    who = {"GIT_COMMITTER_NAME": "Ann", "GIT_COMMITTER_EMAIL": "ann@example.org"}
    return run(tree / "scripts" / "release", *flags, cwd=tree, **who)


def test_a_dry_run_makes_all_but_the_tag(tree: Path) -> None:
    done = release(tree, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("all is as it must be; a dry run makes no tag v1.2.3\n")
    sums = (tree / "dist" / "SHA256SUMS").read_text().splitlines()
    assert sorted(line.split()[1].removeprefix("penstock-1.2.3") for line in sums) == [
        "-cp311-cp311-manylinux_2_28_x86_64.whl",
        "-py3-none-any.whl",
        ".cdx.json",
        ".tar.gz",
    ]
    assert git(tree, "tag") == ""


def test_a_release_is_tagged_once(tree: Path) -> None:
    done = release(tree)
    assert done.returncode == 0, done.stderr
    assert git(tree, "tag", "--list", "--format=%(objecttype) %(refname:short)") == "tag v1.2.3\n"
    again = release(tree)
    assert again.returncode == 1
    assert "the tag v1.2.3 is there already, at " in again.stderr


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        (
            "CHANGELOG.md",
            "## [1.2.3] - Unreleased\n",
            f"'[1.2.3] - Unreleased' has no date; write the day of the release: [1.2.3] - {date.today():%Y}-",
        ),
        ("CHANGELOG.md", "## [1.2.3] - 2026-13-45\n", "'[1.2.3] - 2026-13-45' has no date;"),
        ("CHANGELOG.md", "## [1.2.2] - 2026-01-02\n", "is '[1.2.2] - 2026-01-02', and the version is 1.2.3;"),
        ("penstock/__init__.py", '__version__ = "1.2.3.dev0"\n', "is '1.2.3.dev0', which is no version of a"),
        (
            "scripts/wheels",
            "#!/bin/sh\nmkdir dist\ntouch dist/penstock-1.2.2.tar.gz\n",
            "is not of version 1.2.3.",
        ),
        ("scripts/wheels", WHEELS.rpartition("touch")[0], "dist/ has no compiled wheel."),
        ("scripts/wheels", f"{WHEELS}echo changed >CHANGELOG.md\n", "building has changed the tree"),
    ],
)
def test_what_is_not_right_is_refused_with_a_sentence(tree: Path, file: str, text: str, reason: str) -> None:
    write(tree / file, text)
    commit(tree)
    done = release(tree)
    assert done.returncode == 1
    assert reason in done.stderr
    assert git(tree, "tag") == ""


def test_all_reasons_come_at_once_and_nothing_is_built(tree: Path) -> None:
    write(tree / "CHANGELOG.md", "## [1.2.3] - soon\n")
    git(tree, "tag", "v1.2.3")
    done = release(tree, "--dry-run")
    assert done.returncode == 1
    first, *reasons = done.stderr.splitlines()
    assert first == "penstock: this cannot be released:"
    assert reasons[0].startswith("  CHANGELOG.md: '[1.2.3] - soon' has no date;")
    assert reasons[1].endswith("commit them or take them back: CHANGELOG.md")
    assert len(reasons) == 3
    assert not (tree / "dist").exists()
