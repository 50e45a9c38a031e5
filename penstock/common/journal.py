"""The journal: what the server says to people, as text or JSON, and never too often.

A line has an event, and facts with names. What peers do wrong can come a million times a second,
so such lines are counted: the first of a kind is written at once, the others of the same period
become one line that says how many they were.
"""

import json
import logging
import sys
import time
from collections.abc import Callable

from penstock.common.text import printable

log = logging.getLogger("penstock")

PERIOD_SECONDS = 10.0
KINDS_MAX = 1000
"""Kinds of lines that are counted apart in one period; what is beyond goes under one heading."""


class TextFormatter(logging.Formatter):
    """One line for a person: time, level, what, then the facts."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = (
            f"{moment}.{int(record.msecs):03d} {record.levelname.lower():8} {printable(record.getMessage())}"
        )
        facts = getattr(record, "facts", None)
        if facts:
            line += "  " + " ".join(f"{name}={printable(str(value))}" for name, value in facts.items())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line, for programs."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        entry.update(getattr(record, "facts", None) or {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def start_logging(level: str, form: str) -> None:
    """Send the log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    log.handlers[:] = [handler]
    log.setLevel(level.upper())
    log.propagate = False


class Journal:
    """Lines about connections, counted by kind so that no peer can flood the log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[tuple[int, str], int] = {}  # beyond the first one of the period
        self._period_end = 0.0

    def note(self, level: int, text: str, count: int = 1, **facts: object) -> None:
        """Write a line, or count it where its kind has been written a moment ago."""
        if not log.isEnabledFor(level):
            return
        now = self._clock()
        if now >= self._period_end:
            self.flush()
            self._period_end = now + PERIOD_SECONDS
        kind = level, text
        if kind not in self._counts and len(self._counts) >= KINDS_MAX:
            kind = level, "other lines"
        if kind in self._counts:
            self._counts[kind] += count
            return
        self._counts[kind] = 0
        if count > 1:
            facts["count"] = count
        log.log(level, "%s", text, extra={"facts": facts})

    def flush(self) -> None:
        """Say how often the counted kinds have come since their first line."""
        for (level, text), count in self._counts.items():
            if count:
                facts = {"more": count, "seconds": int(PERIOD_SECONDS)}
                log.log(level, "%s", text, extra={"facts": facts})
        self._counts.clear()
