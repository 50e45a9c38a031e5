"""A page as its reader follows it: files are saved, commands are typed, and print what is shown.

A block whose title is the name of a file is that file. In a console block, lines that begin with `$` are
commands, and the lines below are what they print, on standard output and standard error; `…` is any text.
The title of such a block is its terminal. A command ends with 0 before the next thing is done, unless
the last line shown is `…`: then it runs on, and has come as far as the page shows. A block without a command
at its beginning is what it prints meanwhile. `^C` ends what runs in a terminal.

The ports of the page are replaced by free ones, everywhere; a broker that the page starts hears of them by
its environment. What differs from run to run is compared by its likeness (`tests/cli/test_operating.py`).
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.cli.test_operating import likeness
from tests.server.harness import PORTS as RANGE
from tests.server.harness import ROOT, is_free, until

BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
DOORS = {"sspq": "8888", "phpmq": "9100", "rq": "13700", "http": "9180"}
BASE = 7000
"""Where `--port-base` of a page begins."""

STEP_SECONDS = 240.0
RUNS_ON = "…"
INTERRUPT = "^C"
COMMANDS = {"penstock": "-m penstock", "celery": "-m celery", "python": ""}


def free_ports(count: int) -> list[int]:
    """The first of a row that nobody listens on; by our own number, so that tests side by side differ."""
    start = RANGE.start + os.getpid() * 131 % (len(RANGE) - 1000)
    for first in range(start, RANGE.stop - count):
        if all(map(is_free, range(first, first + count))):
            return [*range(first, first + count)]
    raise AssertionError("there are no free ports")


def plain(line: str) -> str:
    """Its likeness, and of a row of `penstock queues` neither rates nor age nor size."""
    rates = r"(?:RATES|[<\d.,]+ [<\d.,]+) (?:TIME|-) (?:[\d.]+ \w*B|…)$"
    return re.sub(rates, "RATES", likeness(line))


class Terminal:
    """One command after the other."""

    def __init__(self, folder: Path, environment: Mapping[str, str], seconds: float) -> None:
        self._folder, self._environment, self._seconds = folder, environment, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._command, self._lines = "", list[str]()
        self._shown = folder / f".terminal-{id(self)}"

    def type(self, command: str, lines: list[str]) -> None:
        """Returns when it has done what the page says that it does."""
        assert self._process is None, f"{self._command!r} still runs where {command!r} is typed"
        self._command, self._lines = command, lines
        with self._shown.open("wb") as out:
            self._process = subprocess.Popen(
                ["bash", "-o", "pipefail", "-c", command],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if lines[-1:] == [RUNS_ON]:
            self.runs_on()
        else:
            assert self._process.wait(self._seconds) == 0, (command, self.shown)
            self._process = None
            assert self.fits, f"{command}\n{self.shown}"

    def runs_on(self, *more: str) -> None:
        """Returns when it has printed what it had to, and more."""
        self._lines += more
        assert self._process is not None, f"nothing runs that could print: {self._lines}"
        with contextlib.suppress(AssertionError):  # what is shown then says more
            until(lambda: self.fits or self.code is not None, self._command, self._seconds)
        assert self.fits, f"{self._command}\n{self.shown}"
        assert self.code is None, (self._command, self.shown)

    @property
    def code(self) -> int | None:
        return self._process.poll() if self._process else None

    @property
    def shown(self) -> str:
        return self._shown.read_text(encoding="utf-8", errors="replace")

    @property
    def fits(self) -> bool:
        """Whether it has printed these lines; one that is only `…` may also be none, or several."""
        wanted = (
            "(?:.*\n)?" if line == RUNS_ON else re.escape(plain(line)).replace("…", ".*") + "\n"
            for line in self._lines
        )
        printed = (f"{plain(line)}\n" for line in self.shown.splitlines())
        return bool(re.fullmatch("".join(wanted), "".join(printed), re.DOTALL))

    def end(self, number: int = signal.SIGINT) -> None:
        """Ends what runs, with all its children."""
        if self._process is not None:
            if self.code is None:
                os.killpg(self._process.pid, number)
            self._process.wait(self._seconds)
            self._process = None


class Reader:
    """Somebody who follows a page, in a folder."""

    def __init__(self, folder: Path, seconds: float = STEP_SECONDS) -> None:
        self._folder, self._seconds = folder, seconds
        ports = free_ports(210)
        self._renamed = {f":{old}": f":{new}" for old, new in zip(DOORS.values(), ports, strict=False)}
        # `penstock cluster up` takes a hundred and more from its base on.
        self._renamed |= {str(BASE + at): str(port) for at, port in enumerate(ports[10:])}
        programs = folder / ".bin"
        programs.mkdir()
        for name, words in COMMANDS.items():
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
            (programs / name).chmod(0o755)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        self._environment = inherited | {
            "HOME": str(folder),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "PENSTOCK_URL": f"http://127.0.0.1:{ports[3]}",
            **{
                f"PENSTOCK_{door.upper()}": f"127.0.0.1:{port}"
                for door, port in zip(DOORS, ports, strict=False)
            },
        }
        self._terminals: dict[str, Terminal] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *exc: object) -> None:
        # Whoever came last goes first: a worker whose broker is gone looks for it, and does not end.
        for terminal in reversed(self._terminals.values()):
            terminal.end(signal.SIGKILL if any(exc) else signal.SIGINT)

    def follow(self, page: str) -> int:
        """From its first line to its last; the number of commands."""
        count = 0
        for kind, title, text in BLOCK.findall(page):
            text = re.sub("|".join(map(re.escape, self._renamed)), lambda it: self._renamed[it[0]], text)
            if kind == "console":
                terminal = self._terminals.setdefault(
                    title, Terminal(self._folder, self._environment, self._seconds)
                )
                for command, lines in typed(text):
                    count += 1
                    if command == INTERRUPT:
                        terminal.end()
                    elif command:
                        terminal.type(command, lines)
                    else:
                        terminal.runs_on(*lines)
            elif title:
                (self._folder / title).parent.mkdir(parents=True, exist_ok=True)
                (self._folder / title).write_text(text, encoding="utf-8")
            else:
                assert kind == "text", f"nobody runs this block: {text}"
        return count


def typed(block: str) -> Iterator[tuple[str, list[str]]]:
    """What is typed, each with the lines that it shows; first those of what runs already."""
    parts = re.split(r"^(\$ .*|\^C)\n", block, flags=re.MULTILINE)
    if parts[0]:
        yield "", parts[0].splitlines()
    for command, shown in zip(parts[1::2], parts[2::2], strict=True):
        yield command.removeprefix("$ "), shown.splitlines()
