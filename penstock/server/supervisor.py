"""Supervisor: what whoever started the broker is told, where that is systemd (or speaks as it does).

`NOTIFY_SOCKET` names a Unix datagram socket, and what is sent there is lines of NAME=VALUE, as `sd_notify(3)`
has them:

    READY=1       every listener accepts; a unit of `Type=notify` is up from then on, not before
    RELOADING=1   SIGHUP came; READY=1 again when the settings are read
    STOPPING=1    the drain has begun
    WATCHDOG=1    once a second, by the loop's own tick: a loop that is stuck does not say it
    STATUS=…      a sentence for `systemctl status`, when it has changed

Both variables are taken out of the environment, so that no process that the broker starts speaks for it. How
it fails: a socket that is gone or full loses a line, and messages go on; without `NOTIFY_SOCKET` nothing is
sent at all.
"""

import contextlib
import os
import socket
import time


class Supervisor:
    def __init__(self) -> None:
        where = os.environ.pop("NOTIFY_SOCKET", "")
        beats_us = os.environ.pop("WATCHDOG_USEC", "")
        whose = os.environ.pop("WATCHDOG_PID", "")
        self._address = "\0" + where[1:] if where.startswith("@") else where
        self._is_watched = beats_us.isdecimal() and whose in ("", str(os.getpid()))
        self._status = ""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if where else None
        if self._socket is not None:
            self._socket.setblocking(False)

    def ready(self, status: str) -> None:
        self._status = status
        self._say("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        # The time tells systemd which READY=1 is the answer.
        self._say("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def reloaded(self) -> None:
        self._say("READY=1")

    def stopping(self, status: str) -> None:
        self._status = status
        self._say("STOPPING=1", f"STATUS={status}")

    def beat(self, status: str) -> None:
        """Called by the loop once a second."""
        lines = ["WATCHDOG=1"] if self._is_watched else []
        if status != self._status:
            self._status = status
            lines.append(f"STATUS={status}")
        if lines:
            self._say(*lines)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _say(self, *lines: str) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto("\n".join(lines).encode(), self._address)
