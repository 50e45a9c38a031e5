"""`python -m penstock.http LINK_FD LISTEN_FD GAUGE_FD [BELL_FD]`: the second process, of `penstock serve`.

Its imports take half a second, in which it has the listening socket and looks at nothing. A first process
that is killed meanwhile must not leave it behind, or the port would be taken when that one starts again.
"""

import ctypes
import importlib
import signal
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1

EXTENSION = "penstock.dashboard"
"""The package that answers beside the API where it is installed. It knows this one; here is only its name."""


def _die_with_parent() -> None:
    """Have the kernel end this process when the one that started it is gone; Linux only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    _die_with_parent()
    from penstock.http.process import main as run

    link, door, gauge, *bell = map(int, sys.argv[1:])
    run(link, door, gauge, bell[0] if bell else None, importlib.import_module(EXTENSION).extension())


if __name__ == "__main__":
    main()
