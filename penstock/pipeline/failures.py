"""Failures: what Spark says when something goes wrong, in one line; and whether it may pass by itself.

Spark wraps what happened in what it was doing: a query's description, a plan, a hundred lines of Java, and
among them, where Python was involved, a traceback. The line that helps is the innermost one.

    an error of a Python process     the last line of the last traceback; of ours, the text alone
    an error of Spark's own          its message, without the query it was in and the state's code

What passes is a broker that does not answer or has no room, and a Python worker that was late. What stays is
every other error of ours (a lost offset, a wrong column, a no of the broker's) and what Spark calls a mistake
in the program or in the data. Of the rest, such as an exception in somebody's Python, nobody knows.
"""

import re
from collections.abc import Iterator
from typing import Final

from pyspark.errors import AnalysisException, IllegalArgumentException

from penstock.errors import PenstockError
from penstock.spark.session import worker_was_late

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

_PASSING: Final = ("Interrupted", "Unreachable", "RefusedForNow", "CommitUnknown")
_MISTAKES: Final = (AnalysisException, IllegalArgumentException)
_IS_MISTAKE: Final = re.compile(r"SQLSTATE: (?:0A|22|42|P0)\w{3}")
"""Classes of states of SQL: what is not supported, wrong data, wrong SQL, and what SQL itself has raised."""


def cause_of(error: BaseException) -> str:
    """What happened."""
    if isinstance(error, PenstockError):
        return str(error)
    lines = str(error).splitlines()
    raised = list(_raised(lines))
    if raised:
        kind, said = raised[-1]
        if kind.startswith("pyspark."):  # of Spark's own, within a batch of ours
            return _cut(_TELLS_NOTHING.sub("", said).strip(" :;"))
        return _cut(said if kind.startswith("penstock.") and said else f"{kind.rpartition('.')[2]}: {said}")
    causes = [line.removeprefix(_CAUSED_BY) for line in lines if line.startswith(_CAUSED_BY)]
    # Which class Java looked for says less than what Spark makes of it.
    causes = [cause for cause in causes if "ClassNotFoundException" not in cause]
    for line in (*reversed(causes), *lines):
        told = _TELLS_NOTHING.sub("", line).strip(" :;")
        if told:
            return _cut(told)
    return type(error).__name__


def passes(error: BaseException) -> bool | None:
    """Whether it may be better in a while; None: nobody knows."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    texts = [str(it) for it in chain]
    names = [f"{type(it).__module__}.{type(it).__name__}" for it in chain]
    names += [kind for text in texts for kind, _ in list(_raised(text.splitlines()))[-1:]]
    if worker_was_late(error) or any(name.rpartition(".")[2] in _PASSING for name in names):
        return True
    ours = any(name.startswith("penstock.") and not name.endswith("PipelineFailed") for name in names)
    if ours or any(isinstance(it, _MISTAKES) for it in chain) or any(map(_IS_MISTAKE.search, texts)):
        return False
    return None


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
