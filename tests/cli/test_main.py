"""The `penstock` command: every way in, every way out, with commands made up for the purpose."""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import penstock
from penstock.cli import completion
from penstock.cli import main as cli
from penstock.cli.main import main
from penstock.errors import PenstockError

Run = Callable[[argparse.Namespace], int]


def fill(parser: argparse.ArgumentParser) -> None:
    """The arguments of the made-up commands: one of each kind, with texts that are hard to quote."""
    parser.add_argument("folder", metavar="DIR", nargs="?", help="the data folder; it's [needed]: always")
    parser.add_argument("--via", choices=["http", "rq"], default="http", help="the door, 100%% (%(default)s)")
    parser.add_argument("--out", metavar="FILE", help='where "it" goes, with a \\ in it')
    parser.add_argument("--queue", metavar="NAME", help="only this queue")
    parser.add_argument("--secret", help=argparse.SUPPRESS)
    parser.add_argument("-j", "--json", action="store_true", help="as JSON")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """Makes a command table from functions."""

    def make(**runs: Run) -> dict[str, str]:
        for name, run in runs.items():
            module = ModuleType(f"made_up_{name}")
            vars(module).update(HELP=f"do what {name} does", add_arguments=fill, run=run)
            monkeypatch.setitem(sys.modules, module.__name__, module)
        return {name: f"made_up_{name}" for name in runs}

    return make


def done(_args: argparse.Namespace) -> int:
    return 0


def raising(error: BaseException) -> Run:
    def run(_args: argparse.Namespace) -> int:
        raise error

    return run


# -- finding and running the command --


def test_a_command_gets_its_arguments_and_its_result_is_the_exit_code(
    table: Callable[..., dict[str, str]],
) -> None:
    seen: list[argparse.Namespace] = []

    def run(args: argparse.Namespace) -> int:
        seen.append(args)
        return 7

    assert main(["look", "here", "--via", "rq"], table(look=run)) == 7
    assert [(args.folder, args.via, args.json) for args in seen] == [("here", "rq", False)]


def test_without_an_argument_list_the_process_s_own_is_used(
    table: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock", "look"])
    assert main(commands=table(look=lambda _args: 5)) == 5


def test_only_the_module_of_the_command_that_runs_is_imported(table: Callable[..., dict[str, str]]) -> None:
    assert main(["look"], {**table(look=done), "broken": "no.such.module"}) == 0


def test_version_needs_no_command_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"], {"broken": "no.such.module"}) == 0
    assert capsys.readouterr().out == f"penstock {penstock.__version__}\n"


def test_version_loads_nothing_that_takes_time() -> None:
    program = (
        "import sys; from penstock.cli.main import main; main(['--version'])\n"
        "print(*sorted(sys.modules.keys() & {'asyncio', 'uvloop', 'numpy', 'pyarrow', 'penstock.log'}))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out == f"penstock {penstock.__version__}\n\n"


def test_every_command_of_the_table_has_a_module_path_of_its_own() -> None:
    elsewhere = {"top": "penstock.top.command", "demo": "penstock.demo.command"}
    elsewhere |= {"import": "penstock.cli.importing"}  # no module can be called that
    assert {name: f"penstock.cli.{name}" for name in cli.COMMANDS} | elsewhere == cli.COMMANDS


# -- help --


def test_help_lists_every_command_with_its_sentence(
    table: Callable[..., dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--help"], table(look=done, listen=done)) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "usage: penstock COMMAND [OPTION ...]"
    assert "  look    do what look does\n  listen  do what listen does\n" in out
    assert "--version" in out
    assert err == ""


def test_a_command_s_help_has_its_sentence_and_its_arguments(
    table: Callable[..., dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["look", "--help"], table(look=raising(AssertionError("help runs nothing")))) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: penstock look ")
    assert "Do what look does.\n" in out
    assert "the door, 100% (http)" in out


# -- misuse: 2, and a word on what to do --


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: penstock COMMAND"),
        (["--bogus"], "unrecognized arguments: --bogus"),
        (
            ["loko"],
            "penstock: there is no command 'loko'. Did you mean 'look'? `penstock --help` lists them.\n",
        ),
        (["zzz"], "penstock: there is no command 'zzz'. `penstock --help` lists them.\n"),
        (["look", "--via", "pigeon"], "penstock look: error: argument --via: invalid choice: 'pigeon'"),
        (["look", "--js"], "unrecognized arguments: --js"),
    ],
)
def test_misuse(
    table: Callable[..., dict[str, str]],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert main(arguments, table(look=raising(AssertionError("misuse runs nothing")))) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


# -- other endings --


def test_an_error_for_the_user_is_one_line(
    table: Callable[..., dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    error = PenstockError("queue 'orders': block 3 is damaged\nrun `penstock verify`")
    assert main(["look"], table(look=raising(error))) == 1
    assert capsys.readouterr() == (
        "",
        "penstock: queue 'orders': block 3 is damaged; run `penstock verify`\n",
    )


def test_a_fault_of_ours_keeps_its_traceback(table: Callable[..., dict[str, str]]) -> None:
    with pytest.raises(ZeroDivisionError, match="ours"):
        main(["look"], table(look=raising(ZeroDivisionError("ours"))))


def test_interrupted(table: Callable[..., dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["look"], table(look=raising(KeyboardInterrupt()))) == 130
    assert capsys.readouterr() == ("", "")


FLOOD = """
HELP = "write without end"
def add_arguments(parser): pass
def run(args):
    while True:
        print("x" * 1000)
"""

FEW = """
HELP = "write less than a buffer holds, then fail"
from penstock.errors import PenstockError
def add_arguments(parser): pass
def run(args):
    print("x" * 10)
    raise PenstockError("no more")
"""


@pytest.mark.parametrize(
    ("source", "complaint"), [(FLOOD, ""), (FEW, "penstock: no more\n")], ids=["in the middle", "at the end"]
)
def test_a_reader_that_went_away_is_no_reason_for_a_traceback(
    tmp_path: Path, source: str, complaint: str
) -> None:
    (tmp_path / "writer.py").write_text(source)
    read_end, write_end = os.pipe()
    os.close(read_end)
    program = "import sys; from penstock.cli.main import main; sys.exit(main(['w'], {'w': 'writer'}))"
    try:
        ended = subprocess.run(
            [sys.executable, "-c", program],
            stdout=write_end,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            text=True,
            check=False,
        )
    finally:
        os.close(write_end)
    assert (ended.returncode, ended.stderr) == (141, complaint)


# -- completion --


def test_completion_prints_the_script_of_the_real_table(
    table: Callable[..., dict[str, str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands = {**table(look=done), "completion": "penstock.cli.completion"}
    monkeypatch.setattr(cli, "COMMANDS", commands)
    for shell in completion.SHELLS:
        assert main(["completion", shell], commands) == 0
        assert capsys.readouterr().out == completion.script(shell, commands)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["penstock", ""], ["look", "listen"]),
        (["penstock", "-"], ["-h", "--help", "--version"]),
        (["penstock", "li"], ["listen"]),
        (["penstock", "look", "-"], ["--via", "--out", "--queue", "-j", "--json", "-h", "--help"]),
        (["penstock", "look", "--via", ""], ["http", "rq"]),
        (["penstock", "look", "--via", "r"], ["rq"]),
        (["penstock", "look", "a"], ["a folder"]),
        (["penstock", "look", "--out", "a"], ["a file", "a folder"]),
        (["penstock", "look", "--queue", ""], []),
    ],
)
def test_bash_offers(
    table: Callable[..., dict[str, str]], tmp_path: Path, words: list[str], offered: list[str]
) -> None:
    """The script runs in a real bash; only `compopt`, which needs a real Tab key, is replaced."""
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a file").touch()
    script = completion.script("bash", table(look=done, listen=done))
    program = (
        f"{script}\ncompopt() {{ :; }}\n"
        'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_penstock penstock "${!#}"\n'
        '[ ${#COMPREPLY[@]} -eq 0 ] || printf "%s\\n" "${COMPREPLY[@]}"'
    )
    ended = subprocess.run(
        ["bash", "-euc", program, "bash", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(ended.stdout.splitlines()) == sorted(offered)


@pytest.mark.parametrize(
    "part",
    [
        "look:'do what look does'",
        r":the data folder\; it\'s \[needed\]\: always:_files -/",
        r"--via[the door, 100\% (http)]:via:(http rq)",
        r"]:FILE:_files",
        r"--queue[only this queue]:NAME:",
        "{-j,--json}",
    ],
)
def test_zsh_script(table: Callable[..., dict[str, str]], part: str) -> None:
    """Sourced, it registers itself: what registers is within an `eval`."""
    first, evaluated, *_ = shlex.split(completion.script("zsh", table(look=done)), comments=False)[2:]
    assert (first, part in evaluated) == ("eval", True)


@pytest.mark.parametrize(
    "line",
    [
        "-a look -d 'do what look does'",
        "-l via -xka \"http rq\" -d 'the door, 100% (http)'",
        "-l queue -x -d 'only this queue'",
        "-s j -l json -d 'as JSON'",
    ],
)
def test_fish_script(table: Callable[..., dict[str, str]], line: str) -> None:
    assert line in completion.script("fish", table(look=done))


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_hidden_options_stay_hidden(table: Callable[..., dict[str, str]], shell: str) -> None:
    assert "secret" not in completion.script(shell, table(look=done))
