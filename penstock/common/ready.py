"""The ready line: what `penstock serve` prints when it accepts, and whoever has started it waits for.

    penstock ready sspq=127.0.0.1:8888 phpmq=127.0.0.1:9100 rq=127.0.0.1:13700 http=127.0.0.1:8300

Addresses are those that it really listens at, also where it was told to take any port.
"""

import select
import subprocess
from collections.abc import Iterable
from typing import Any, Final

from penstock.errors import PenstockError

BEGIN: Final = "penstock ready "

Doors = list[tuple[str, str]]
"""Protocols and addresses, in the order of the listeners."""


class NotReady(PenstockError):
    """It has ended, or did not accept in time, and was ended."""


def ready_line(doors: Iterable[tuple[str, object]]) -> str:
    return BEGIN + " ".join(f"{protocol}={address}" for protocol, address in doors)


def wait_ready(process: "subprocess.Popen[Any]", seconds: float) -> Doors:
    """Where it accepts, as soon as it says so. Any: its output is a pipe, of bytes or of text."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    line = process.stdout.readline() if ready else ""
    text = line.decode(errors="replace") if isinstance(line, bytes) else line
    if not text.startswith(BEGIN):
        process.kill()
        process.wait()
        process.stdout.close()
        said = f"it said {text!r}" if text else "it ended" if ready else f"not within {seconds:g} s"
        raise NotReady(f"the broker did not start: {said}")
    return [
        (protocol, address) for protocol, _, address in (part.partition("=") for part in text.split()[2:])
    ]
