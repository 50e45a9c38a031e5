"""The journal: whatever peers say, a line is one line, and none can fill the disk."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.common.journal import KINDS_MAX, PERIOD_SECONDS, Journal, JsonFormatter, TextFormatter, log

FORGED = "orders\n2026-01-01 00:00:00.000 info     stopped\r\x1b[2J\u2028x"


@contextmanager
def lines(formatter: logging.Formatter) -> Iterator[list[str]]:
    """What is written meanwhile."""
    written: list[str] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(self.format(record))

    handler, before = Keeping(), log.level
    handler.setFormatter(formatter)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield written
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_nobody_else_writes_a_line(formatter: logging.Formatter) -> None:
    with lines(formatter) as written:
        Journal().note(logging.WARNING, f"refused {FORGED}", queue=FORGED)
    (line,) = written
    assert line.isprintable()
    assert len(line.splitlines()) == 1
    if isinstance(formatter, JsonFormatter):
        assert json.loads(line)["queue"] == FORGED


def test_what_comes_a_million_times_is_told_once() -> None:
    now = 0.0
    with lines(TextFormatter()) as written:
        journal = Journal(lambda: now)
        for _ in range(1000):
            journal.note(logging.WARNING, "closed: no such packet", count=1000)
        assert len(written) == 1
        for number in range(2 * KINDS_MAX):
            journal.note(logging.WARNING, f"closed: {number}")
        assert len(written) == KINDS_MAX + 1
        now = PERIOD_SECONDS
        journal.note(logging.WARNING, "closed: no such packet")
    told = [line for line in written if "no such packet" in line]
    assert [line.partition("packet")[2].strip() for line in told] == [
        "count=1000",
        "more=999000 seconds=10",
        "",
    ]
