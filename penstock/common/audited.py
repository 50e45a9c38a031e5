"""Lines of the audit, for those who show them to people."""

from collections.abc import Iterable
from typing import Any

Line = dict[str, Any]  # values of JSON


def joined(lines: Iterable[Line]) -> list[Line]:
    """Lines, oldest first, each call once: at the time when it began, and as it ended if that is told."""
    found: list[Line] = []
    # Numbers of calls begin anew with every start, of each front-end: the newest counts.
    begun: dict[tuple[Any, Any], int] = {}
    for line in lines:
        call = line.get("front_end"), line.get("call")
        if call[1] is not None and line.get("result") == "begun":
            begun[call] = len(found)
        elif call in begun:
            at = begun.pop(call)
            found[at] = {**line, "time": found[at]["time"]}
            continue
        found.append(line)
    return found


def is_act(line: Line) -> bool:
    """Whether somebody did something, or tried; else it was a refusal."""
    return "call" in line or line.get("door") == "process"
