"""A command on a terminal of its own, as a person would see it."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from tests.server.harness import WAIT_SECONDS

COMMAND = [sys.executable, "-m", "penstock"]
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith("PENSTOCK_") and name not in ("COLUMNS", "LINES")
}


class Terminal:
    """`penstock ARGUMENTS` in a terminal of so many lines and columns."""

    def __init__(
        self,
        *arguments: str,
        lines: int = 24,
        columns: int = 100,
        around: Mapping[str, str] | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._outer, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._process = subprocess.Popen(
            [*command, *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={**ENVIRONMENT, **(around or {})},
        )
        os.close(inner)
        self.seen = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._outer)

    def wait_for(self, text: str, times: int = 1) -> str:
        """Everything that was written, once that text is in it so often."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self.seen.count(text) < times:
            if not self._read(deadline):
                raise AssertionError(f"{text!r} is not {times} times in …{self.seen[-2000:]!r}")
        return self.seen

    def type(self, text: str) -> None:
        os.write(self._outer, text.encode())

    def interrupt(self) -> None:
        self.signal(signal.SIGINT)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def hang_up(self) -> None:
        """The terminal is gone, and the program has to end by itself."""
        os.close(self._outer)
        self._process.wait(WAIT_SECONDS)

    def end(self) -> int:
        """The exit code; `seen` is whole then."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self._read(deadline):
            pass
        return self._process.wait(WAIT_SECONDS)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._outer], [], [], max(deadline - time.monotonic(), 0))
        try:
            data = os.read(self._outer, 1 << 16) if ready else b""
        except OSError:  # how Linux tells that nobody has the other end any more
            return False
        self._took(data)
        return bool(data)

    def _took(self, data: bytes) -> None:
        """More was written."""
        self.seen += data.decode(errors="replace")
