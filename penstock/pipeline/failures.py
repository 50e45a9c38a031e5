"""Failures: what Spark says when something goes wrong, in one line.

Spark wraps what happened in what it was doing: a query's description, a plan, a hundred lines of Java, and
among them, where Python was involved, a traceback. The line that helps is the innermost one.

    an error of a Python process     the last line of the last traceback; of ours, the text alone
    an error of Spark's own          its message, without the query it was in and the state's code
"""

import re
from collections.abc import Iterator
from typing import Final

from penstock.errors import PenstockError

LINE_MAX: Final = 500

_TRACEBACK: Final = "Traceback (most recent call last):"
_CAUSED_BY: Final = "Caused by: "
_RAISED: Final = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?")
_TELLS_NOTHING: Final = re.compile(
    r"\[STREAM_FAILED\] Query \[.*?\] terminated with exception: "
    r"|Job aborted due to stage failure: Task \d+ in stage [\d.]+ failed \d+ times, "
    r"most recent failure: Lost task [\d.]+ in stage [\d.]+ \(TID \d+\) \(.*?\): "
    r"|An error occurred while calling \w+\.\w+\."
    r"|(?:[a-z]\w*\.)+[A-Z]\w*(?:Exception|Error)(?:: |$)"
    r"|\[USER_RAISED_EXCEPTION\] "
    r"| SQLSTATE: \w{5}"
)
"""Where and how it happened, which is not what happened."""


def cause_of(error: BaseException) -> str:
    """What happened."""
    if isinstance(error, PenstockError):
        return str(error)
    lines = str(error).splitlines()
    raised = list(_raised(lines))
    if raised:
        kind, said = raised[-1]
        return _cut(said if kind.startswith("penstock.") and said else f"{kind.rpartition('.')[2]}: {said}")
    causes = [line.removeprefix(_CAUSED_BY) for line in lines if line.startswith(_CAUSED_BY)]
    # Which class Java looked for says less than what Spark makes of it.
    causes = [cause for cause in causes if "ClassNotFoundException" not in cause]
    for line in (*reversed(causes), *lines):
        told = _TELLS_NOTHING.sub("", line).strip(" :;")
        if told:
            return _cut(told)
    return type(error).__name__


def _raised(lines: list[str]) -> Iterator[tuple[str, str]]:
    """The name and the text of what ended each traceback."""
    inside = False
    for line in lines:
        if _TRACEBACK in line:
            inside = True
        elif inside and line and not line[0].isspace():
            inside = False
            found = _RAISED.fullmatch(line.strip())
            if found is not None:
                yield found[1], found[2] or ""


def _cut(text: str) -> str:
    return text if len(text) <= LINE_MAX else text[: LINE_MAX - 1] + "…"
