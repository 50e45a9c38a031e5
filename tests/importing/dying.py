"""An import that is killed, at a place that a test names: by SIGKILL, in a process of its own."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.importing.journal import Journal
from penstock.importing.sink import Sink
from penstock.importing.source import source_of
from tests.server.harness import WAIT_SECONDS

STEPS = ("taken", "written", "staged", "stored", "settled")
"""After which an import can die, in the order in which they come."""


def method_of(step: str, url: str) -> tuple[type, str]:
    kind: type = type(source_of(url))
    places: dict[str, tuple[type, str]] = {
        "taken": (kind, "take"),
        "written": (Journal, "write"),
        "staged": (Sink, "_stage"),
        "stored": (Sink, "store"),
        "settled": (kind, "settle"),
    }
    return places[step]


def patched(
    patch: pytest.MonkeyPatch,
    place: tuple[type, str],
    nth: int,
    *,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Around the nth call of a method that does something, do something else."""
    owner, name = place
    original = getattr(owner, name)
    calls = 0

    def call(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        now = calls == nth
        if now:
            before()
        result = original(self, *args)
        if result == []:  # nothing was taken
            calls -= 1
        elif now:
            after()
        return result

    patch.setattr(owner, name, call)


def killed_after(step: str, arguments: Sequence[str], nth: int = 2) -> None:
    """`penstock import ARGUMENTS`, which dies in its nth batch."""
    process = multiprocessing.get_context("fork").Process(target=_die, args=(step, [*arguments], nth))
    process.start()
    process.join(WAIT_SECONDS)
    assert process.exitcode == -signal.SIGKILL, process.exitcode


def _die(step: str, arguments: list[str], nth: int) -> None:
    patch = pytest.MonkeyPatch()
    patched(patch, method_of(step, arguments[0]), nth, after=lambda: os.kill(os.getpid(), signal.SIGKILL))
    os._exit(main(["import", *arguments]))
