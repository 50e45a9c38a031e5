"""Audit: who did what to the queues of a report, and who was refused, in its time.

How it fails: where there is no audit, or who makes the report is no admin, the report has no such section.
"""

from collections import deque
from collections.abc import Collection, Sequence
from typing import Final

from penstock.common import units
from penstock.common.audited import Line, is_act, joined
from penstock.errors import PenstockError
from penstock.report.markup import Head, bad, section, table, tag
from penstock.report.period import Period, datetime_of
from penstock.report.survey import Asks

ASKED: Final = 10_000
SHOWN: Final = 50


def ask_audit(asks: Asks, period: Period, queues: Collection[str] | None = None) -> list[Line]:
    """The newest lines of a time, oldest first; with `queues`, only of these and of none in particular."""
    start, end = (
        None if us is None else f"{datetime_of(us):%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z" for us in period
    )
    lines: deque[Line] = deque(maxlen=ASKED)
    later: list[Line] = []  # what was begun before the end has ended there
    try:
        if end is None:
            lines += asks.get("audit", last=ASKED, **{"from": start})["lines"]
        while end is not None and not later:
            page = asks.get("audit", limit=ASKED, **{"from": start})  # The newest of all may be later.
            lines += (line for line in page["lines"] if line["time"] < end)
            later = [line for line in page["lines"] if line["time"] >= end]
            start = page["next"]
            if start is None:
                break
    except PenstockError:
        return []
    return [
        line
        for line in joined([*lines, *later])
        if (end is None or line["time"] < end) and (queues is None or line.get("queue", "") in ("", *queues))
    ]


def audit_part(lines: Sequence[Line]) -> str:
    """The section."""
    counts: dict[str, list[int]] = {}  # done, refused, otherwise ended or not at all
    for line in lines:
        which = 1 if not is_act(line) else 0 if line.get("result", "done") == "done" else 2
        counts.setdefault(line["act"], [0, 0, 0])[which] += line.get("times", 1)
    by_act = [
        [act, units.count(done), bad(units.count(refused), refused > 0), bad(units.count(failed), failed > 0)]
        for act, (done, refused, failed) in sorted(counts.items(), key=lambda it: -sum(it[1]))[:SHOWN]
    ]
    heads = [Head("Act", number=False), *map(Head, ("Done", "Refused", "Failed or not ended"))]
    newest = [
        [
            line["time"].replace("T", " ")[:19],
            *(str(line.get(name) or units.NOTHING) for name in ("who", "from", "door", "act", "queue")),
            bad(line.get("result", "done"), line.get("result", "done") != "done"),
            units.count(line.get("count")),
            units.count(None if is_act(line) else line.get("times", 1)),
        ]
        for line in reversed(lines[-SHOWN:])
    ]
    names = ("Time, UTC", "Who", "From", "Door", "Act", "Queue", "Result")
    newest_heads = [*(Head(name, number=False) for name in names), Head("Messages"), Head("Times")]
    most = f" Counted are the last {ASKED:,} lines of this time." if len(lines) > ASKED // 2 else ""
    said = f"From the broker's audit: what was changed by somebody, and what was refused.{most}"
    return section(
        "audit",
        "Audit",
        tag("p", said, "note"),
        table("How often", heads, by_act),
        table(f"The newest, at most {SHOWN}", newest_heads, newest),
    )
