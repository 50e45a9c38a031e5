"""`make test-long`: turns, seeds, and what a failure says. The runs themselves are tests of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import long

ROOT = Path(__file__).parents[1]


def test_every_kind_names_what_is_there_and_takes_a_seed() -> None:
    for kind in long.RUNS:
        typed = long.Turn(kind, 4711).typed()
        assert "4711" in typed
        for path in re.findall(r"\btests[/.][\w/.]+", typed):
            found = path if "/" in path else path.replace(".", "/") + ".py"
            assert (ROOT / found).is_file(), f"{kind}: {path}"


@pytest.mark.parametrize(
    ("flags", "around", "code"),
    [(["--long"], {}, 0), ([], {"PENSTOCK_TEST_SEED": "7"}, 0), ([], {}, 5)],
    ids=["rest", "seeded", "short"],
)
def test_the_rest_is_what_make_test_leaves_out(flags: list[str], around: dict[str, str], code: int) -> None:
    """5: nothing is left to run."""
    assert "--long -m long" in long.RUNS[long.REST]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", "-m", "long"]
    environment = {name: it for name, it in os.environ.items() if not name.startswith(("PENSTOCK", "PYTEST"))}
    done = subprocess.run(
        [*command, *flags, "tests/dashboard/test_queue_page.py"],
        env=environment | around,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done
    assert done.stdout.count("::test_any_name_stays_text[") == (0 if code else 4)


def test_the_rest_comes_first_and_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long, "RUNS", {"a": "python -c 0 {seed}", long.REST: "python -c 1 {seed}"})
    assert long.main(["--seconds", "0.5", "--seed", "5", "--processes", "1"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1:3] == ["fine    python -c 1 5", "fine    python -c 0 5"]
    assert said[-1].endswith(", rest 1")
    assert long.main(["--seed", "5", long.REST]) == 0


def test_a_real_run_says_its_seeds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(long.RUNS, "crash", "python -m tests.log.crash {seed} 2")
    assert long.main(["--seconds", "0", "--seed", "70", "crash"]) == 0
    first, turn, last = capsys.readouterr().out.splitlines()
    assert first == "crash: for 0 s, seeds from 70 on (--seed 70)"
    assert turn == "fine    python -m tests.log.crash 70 2"
    assert last == "turns: crash 1"


def test_a_failure_is_shown_with_the_command_that_repeats_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = "PENSTOCK_TEST_SEED={seed} python -c exit(__import__('os').environ['PENSTOCK_TEST_SEED']+'?')"
    monkeypatch.setattr(long, "RUNS", {"good": "python -c 0 {seed}", "bad": bad})
    assert long.main(["--seconds", "0", "--seed", "5", "--processes", "2"]) == 1
    said = capsys.readouterr().out
    assert "fine    python -c 0 5\n" in said
    assert f"FAILED  {bad.format(seed=1005)}\n1005?\n\nexit code 1\n" in said
    assert said.endswith(f"turns: bad 1, good 1\nrepeat it:  {bad.format(seed=1005)}\n")


def test_a_turn_that_hangs_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long, "RUNS", {"hung": "python -c __import__('time').sleep(600) {seed}"})
    monkeypatch.setattr(long, "TURN_SECONDS", 0.5)
    assert long.Turn("hung", 5).run() == "\nnot done in 0.5 s"


def test_a_kind_that_is_none_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        long.main(["crush"])
    assert "no such kind: crush; there are rest, crash, restarts, ways, " in capsys.readouterr().err
