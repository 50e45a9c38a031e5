"""Staying: where a person watches, the broker of the demonstration stays up until they have looked around.

A person is one who has a terminal for what they type and what they see, and who is no CI. Enter ends it, and
so does Ctrl-C or the end of input: that is what it is for, and no failure. A terminal that is closed, or
SIGTERM, ends it in the same way, so that no broker is left behind.
"""

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from penstock.common import tables
from penstock.dashboard import is_installed
from penstock.demo.screen import Screen

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
COMMAND: Final = "penstock"


def watched() -> bool:
    """Whether somebody looks, and can say when they have seen enough."""
    return sys.stdin.isatty() and sys.stdout.isatty() and not os.environ.get("CI")


def stay(screen: Screen, url: str) -> None:
    """Say where the broker can be looked at, and wait until that was done."""
    with _ended_by_signals():
        screen.section("The broker is up: look around")
        for line in tables.pairs(places(url)):
            screen.note(line)
        screen.note("Enter ends it.")
        sys.stdin.readline()


def places(url: str) -> list[tuple[str, str]]:
    """What there is to look at, and where."""
    if not is_installed():
        return [("the API", f"{url}/v1/queues")]
    return [("in a browser", f"{url}/"), ("in a terminal", f"{_command()} top --url {url}")]


def _command() -> str:
    """As it was called, where it was called by its name: it may not be on the path."""
    called = sys.argv[0]
    return shlex.quote(called) if Path(called).name == COMMAND else COMMAND


class _Enough(BaseException):
    """A signal said so."""


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    def enough(_number: int, _frame: FrameType | None) -> None:
        raise _Enough

    before = {number: signal.signal(number, enough) for number in ENDING}
    try:
        yield
    except (_Enough, OSError):  # OSError: the terminal is gone
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
