"""Broker: `penstock serve` in a process of its own, on ports that nobody uses.

It keeps its ports when it is started again, so that clients find it; only that of the HTTP API, which nobody
uses before, is another one each time. What it logs goes to a file: that it was killed is no news here.

How it fails: `PenstockError`, with the last that it said.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from penstock.common.ready import NotReady, wait_ready
from penstock.demo.orders import QUEUE
from penstock.errors import PenstockError

START_SECONDS_MAX: Final = 120.0
ANYWHERE: Final = "127.0.0.1:0"
WIRES: Final = ("sspq", "phpmq", "rq")


class Broker:
    """Ended by `end`, whatever happens."""

    def __init__(self, data: Path, journal: Path) -> None:
        self._data = data
        self._journal = journal
        self._process: subprocess.Popen[str] | None = None
        self.addresses: dict[str, str] = {}

    def start(self) -> float:
        """Start it; after how many seconds it accepted."""
        command = [sys.executable, "-m", "penstock", "serve", "--data", str(self._data)]
        command += ["--sspq-queue", QUEUE, "--log-level", "warning", "--http", ANYWHERE]
        for wire in WIRES:
            command += [f"--{wire}", self.addresses.get(wire, ANYWHERE)]
        # Settings of a broker of the user's own are not meant for this one.
        around = {name: text for name, text in os.environ.items() if not name.startswith("PENSTOCK_")}
        started = time.monotonic()
        with self._journal.open("ab") as journal:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=journal, text=True, env=around
            )
        try:
            self.addresses = dict(wait_ready(self._process, START_SECONDS_MAX))
        except NotReady:
            said = self._journal.read_text(encoding="utf-8", errors="replace").splitlines()
            raise PenstockError(
                f"the broker did not start: {said[-1] if said else 'it said nothing'}"
            ) from None
        return time.monotonic() - started

    @property
    def ports(self) -> dict[str, str]:
        return {name: address.rpartition(":")[2] for name, address in self.addresses.items()}

    def url(self, protocol: str) -> str:
        return f"{protocol}://{self.addresses[protocol]}"

    def end(self, number: int) -> None:
        """End it by a signal; one that has ended already has nothing against it."""
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(number)
            process.wait()
        if process is not None and process.stdout is not None:
            process.stdout.close()
