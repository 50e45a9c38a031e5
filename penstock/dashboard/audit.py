"""The page of the audit: who did what, and who was refused, newest first. For admins."""

from collections import Counter
from typing import Any, Final

from penstock.common.audited import Line, is_act, joined
from penstock.dashboard.layout import style, tag
from penstock.dashboard.pages import queue_href
from penstock.dashboard.poll import Poll, watch
from penstock.dashboard.table import Column, Filter, LiveTable, Row
from penstock.dashboard.view import View
from penstock.model.rights import Right

LINES: Final = 500

COLUMNS: Final = (
    Column("time", "Time", head=True, sort="key", help="UTC"),
    Column("who", "Who", help="The user; –: nobody in particular"),
    Column("from", "From", help="Where it came from"),
    Column("door", "Door", help="http, page, a protocol; process: the broker itself"),
    Column("act", "Act"),
    Column("queue", "Queue", "links", sortable=False),
    Column("result", "Result", "badges", help="begun: it has not ended, or nobody is left who could tell"),
    Column("count", "Messages", "count", help="How many it was about"),
    Column("times", "Times", "count", help="How often it was refused, within ten seconds"),
)
FILTERS: Final = (Filter("kind", "Show", [("act", "Acts"), ("refusal", "Refusals")]),)
SEARCHED: Final = ("who", "from", "door", "act", "names", "outcome")
GOOD: Final = {"done": "ok", "begun": "warn"}

AUDIT: Final = Poll("/v1/audit", lambda answer: len(answer["lines"]), right=Right.ADMIN, last=LINES)


async def build(view: View) -> None:
    await AUDIT.read(view.api)  # Where there is no audit, this says so.
    style("state.css")
    tag("h1", "Audit")
    tag(
        "p",
        f"The last {LINES} lines; all there are: GET /v1/audit, and audit.jsonl in the data folder.",
        "ps-hint",
    )
    table = LiveTable(
        "Audit",
        COLUMNS,
        key="key",
        noun="line",
        sort="-time",
        search="Find a name, an act, a queue",
        searched=SEARCHED,
        filters=FILTERS,
        url_state=True,
    )
    with table, tag("section", classes="ps-empty"):
        tag("h2", "Nothing has been written down yet")
    shown: dict[str, Row] = {}

    def show(answer: Any, is_first: bool) -> None:
        nonlocal shown
        rows = {row["key"]: row for row in rows_of(answer["lines"])}
        table.follow(rows, shown, whole=is_first)
        shown = rows

    watch(view, AUDIT, show)


def rows_of(lines: list[Line]) -> list[Row]:
    """Rows that lines are shown as; how a call has ended is told in the row of its beginning."""
    moments: Counter[str] = Counter()
    rows = []
    for line in joined(lines):
        moments[line["time"]] += 1
        rows.append(_row(line, f"{line['time']} {moments[line['time']]:06}"))
    return rows


def _row(line: Line, key: str) -> Row:
    result = line.get("result", "")
    queue, reader = line.get("queue", ""), line.get("reader", "")
    return {
        "key": key,
        "time": line["time"].replace("T", " ").removesuffix("Z"),
        **{name: line.get(name) or None for name in ("who", "from", "door", "act")},
        "queue": [[queue, queue_href(queue), ""]] if queue else [[reader, "", "reader"]] if reader else [],
        "names": queue or reader,
        "count": line.get("count"),
        "outcome": result,
        "result": [[result, GOOD.get(result, "bad")]] if result else [],
        "times": None if is_act(line) else line.get("times", 1),
        "kind": "act" if is_act(line) else "refusal",
    }
