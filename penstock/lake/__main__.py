"""`python -m penstock.lake`: the process that archives, started and watched by the HTTP API's process.

Its standard input says what to do, a line of JSON, and lasts as long as it is wanted: when that ends, so does
this process, at once and wherever it is. Each line of its standard output is JSON too: `log`, which one it is
about (null: all); `held`, positions that retention may move on to; `state`, how it stands; `error`, why it
does not get on, null when it does again.

A broker has one log, a front-end of a cluster may lead several: they take turns, and one that does not get on
holds up no other.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock.common.journal import start_logging
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.lake.archiver import Archiver, Told

LOOK_SECONDS: Final = 1.0
PAUSE_SECONDS_MAX: Final = 60.0
INSTALL: Final = "archiving needs the extra lake: pip install 'penstock[lake]', and restart the broker"

log = logging.getLogger("penstock.lake")


def say(fields: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def _leave_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


class _Log:
    """One that is archived."""

    def __init__(self, name: str, make: "Callable[[Callable[[Told], None]], Archiver]") -> None:
        self._name = name
        self._make = make
        self._archiver: Archiver | None = None
        self._pause = LOOK_SECONDS
        self._is_well = False  # and has said so: what was wrong with the process before is over then
        self._next_at = 0.0

    def turn(self, now: float) -> None:
        if now < self._next_at:
            return
        try:
            if self._archiver is None:
                self._archiver = self._make(lambda told: self._say(told._asdict()))
            self._archiver.turn(now)
        except PenstockError as error:
            self._say({"error": str(error)})
            log.warning("archiving goes on in %.0f s: %s", self._pause, error)
            if self._archiver is not None:
                self._archiver.begin_again()
            self._next_at = time.monotonic() + self._pause
            self._pause, self._is_well = min(2 * self._pause, PAUSE_SECONDS_MAX), False
            return
        if not self._is_well:
            self._pause, self._is_well = LOOK_SECONDS, True
            self._say({"error": None})

    def _say(self, fields: dict[str, Any]) -> None:
        say({"log": self._name, **fields})


def main() -> int:
    wish = json.loads(sys.stdin.readline())
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    start_logging(wish["log_level"], wish["log_format"])
    try:
        import pyarrow as pa

        from penstock.lake.archiver import Archiver, Plan
    except ImportError as error:
        say({"log": None, "error": f"{INSTALL} ({error})"})
        return 1
    pa.set_cpu_count(1)
    plan = Plan(**{**wish["plan"], "queues": tuple(wish["plan"]["queues"])})
    first = min(wish["logs"])
    logs = [
        _Log(name, partial(Archiver, data, plan, vacuums=name == first))
        for name, data in wish["logs"].items()
    ]
    while True:
        began = time.monotonic()
        for it in logs:
            it.turn(time.monotonic())
        # Busy for half of the time at most.
        time.sleep(max(LOOK_SECONDS, time.monotonic() - began))


if __name__ == "__main__":
    sys.exit(main())
