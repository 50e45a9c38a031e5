"""One reader, as the page of readers shows it: where it is in each queue, its lag over time, its release; and
of a pipeline how it stands, with what can be wished of one that a service keeps."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from nicegui.elements.mixins.text_element import TextElement

from penstock.common import units
from penstock.control.frames import Fields
from penstock.dashboard.chart import Chart, Series
from penstock.dashboard.layout import badge, button, confirm, fact, facts, tag
from penstock.dashboard.pages import queue_href
from penstock.dashboard.poll import TRAIL_SECONDS, Trail
from penstock.dashboard.table import Column, LiveTable, Row
from penstock.dashboard.view import View
from penstock.model.rights import Right

COLUMNS: Final = (
    Column("queue", "Queue", "link", head=True, badges="state"),
    Column("position", "Position", "count", help="What it reads next"),
    Column("end", "End", "count", help="What comes next in the queue"),
    Column("lag", "Lag", "count", help="How much it has not read yet"),
    Column("bytes", "Lag in bytes", "size", help="The payload of that", minor=True),
    Column("behind", "Behind", "age", help="The age of the oldest that it has not read"),
)
STATES: Final = {
    "running": "ok",
    "paused": "warn",
    "retrying": "warn",
    "failed": "bad",
    "stopped": "",
    "silent": "bad",
}
"""Of pipelines; and how each looks."""

WISHES: Final = {"pause": "Pause", "resume": "Resume", "restart": "Restart"}
VIEWS: Final = {"messages": "Messages, by offset", "events": "Events, by number"}


def badges_of(reader: Fields) -> list[list[str]]:
    """What it says of its state, in a word or two, each with its look."""
    about: Fields = reader["about"] or {}
    state = "silent" if about.get("silent") else about.get("state")
    found = [[state, STATES[state]]] if state else []
    if "error" in about and state not in ("failed", "retrying"):
        found.append(["failing", "bad"])
    return found


def takes_wishes(reader: Fields) -> bool:
    about: Fields = reader["about"] or {}
    return "wish" in about and not about["silent"] and about.get("state") != "stopped"


class ReaderPanel:
    """Nothing is seen of it while there is no reader to show."""

    def __init__(
        self,
        view: View,
        release: Callable[[str], Awaitable[None]],
        wish: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._view = view
        self._release = release
        self._wish = wish
        self._name = ""
        self._lag = 0
        self._shown: dict[str, Row] = {}
        with tag("section", classes="ps-panel ps-reader", id="reader", aria_labelledby="reader-name") as box:
            self._box = box
            with tag("div", classes="ps-heading"):
                with tag("div", classes="ps-reader-name"):
                    self._title = tag("h2", "", id="reader-name")
                    self._badges = [badge(""), badge("")]
                    self._capped = badge("capped", "bad")
                    self._ended = badge("lease ended", "warn")
                self._button: TextElement | None = None
                self._wishes: dict[str, TextElement] = {}
                if view.may(Right.OPERATE):
                    with tag("div", classes="ps-actions"):
                        self._wishes = {it: button(WISHES[it], partial(self._wished, it)) for it in WISHES}
                        self._button = button("Release", self._ask)
            self._gone = tag(
                "p", "There is no such reader (any more): it was released, or its lease has ended."
            )
            with tag("div", classes="ps-reader-rest") as rest:
                self._rest = rest
                self._error = tag("p", "", "ps-notice")
                with facts():
                    self._kind = fact("Kind")
                    self._reads = fact("Reads")
                    self._lag_text = fact("Lag")
                    self._behind = fact("Behind")
                    self._moved = fact("Last moved")
                    self._batch = fact("Last batch")
                    self._state = fact("State")
                    self._rate = fact("Rows")
                    self._parts = fact("Rows by sink")
                    self._expectations = fact("Against expectations")
                    self._queues = fact("Queues")
                    self._lease = fact("Lease left")
                self._chart = Chart(
                    "Lag while this page is open",
                    [Series("Lag", "ready")],
                    height=140,
                    area=True,
                    span_seconds=TRAIL_SECONDS,
                )
                self._table = LiveTable(
                    "Queues of the reader",
                    COLUMNS,
                    key="queue",
                    noun="queue",
                    sort="-lag",
                )
        box.set_visibility(False)

    def show(self, name: str, reader: Fields | None, trail: Trail, is_first: bool) -> None:
        """How it is now; None: there is none of that name."""
        is_first = is_first or name != self._name
        self._name = name
        self._box.set_visibility(bool(name))
        self._title.set_text(name)
        self._gone.set_visibility(reader is None)
        self._rest.set_visibility(reader is not None)
        self._show_actions(reader)
        error = ((reader or {}).get("about") or {}).get("error", "")
        words = badges_of(reader) if reader is not None else []
        for element, (text, kind) in zip(self._badges, [*words, ["", ""], ["", ""]], strict=False):
            element.set_text(text)
            element.classes(replace=f"ps-badge ps-{kind}" if kind else "ps-badge")
            element.set_visibility(bool(text))
        self._error.set_text(f"It says: {error}")
        self._error.set_visibility(bool(error))
        self._capped.set_visibility(reader is not None and any(it["capped"] for it in reader["queues"]))
        self._ended.set_visibility(reader is not None and not reader["lease_seconds_left"])
        if reader is None:
            return
        queues: list[Fields] = reader["queues"]
        self._lag = sum(it["lag"] for it in queues)
        self._reads.set_text(VIEWS.get(reader["view"], str(reader["view"])))
        sizes = [it["lag_bytes"] for it in queues if it["lag_bytes"] is not None]
        size = f", {units.size(sum(sizes))}" if sizes and self._lag else ""
        self._lag_text.set_text(units.count(self._lag) + size)
        oldest = [it["lag_seconds"] for it in queues if it["lag_seconds"] is not None and it["lag"]]
        self._behind.set_text(
            units.age(max(oldest)) if oldest else "none" if not self._lag else units.NOTHING
        )
        self._show_saying(reader)
        hidden = f", and {units.count(reader['hidden'])} that you may not see" if reader["hidden"] else ""
        self._queues.set_text(units.count(len(queues)) + hidden)
        left = reader["lease_seconds_left"]
        self._lease.set_text(units.age(left) if left else "ended: nothing is kept for it")
        if is_first:
            self._chart.load(list(trail.points))
        else:
            self._chart.push(trail.points[-1])
        self._show_queues(queues, is_first)

    def _show_saying(self, reader: Fields) -> None:
        """What it says of itself, and when it was seen to move."""
        about: Fields = reader["about"] or {}
        kind, called = about.get("kind", ""), about.get("name", "")
        self._kind.set_text(
            kind + (f", {called}" if called and called != reader["name"] else "") or "not said"
        )
        moved = reader["moved_seconds"]
        self._moved.set_text(
            "not seen to" if moved is None else f"{units.age(moved)} ago, by {units.count(reader['moved'])}"
        )
        batch, rows = about.get("batch"), about.get("rows")
        told = [f"number {units.count(batch)}"] if batch is not None else []
        told += [units.counted(rows, "row")] if rows is not None else []
        self._batch.set_text(", ".join(told) or "not said")
        self._show_standing(about, reader["wish"])

    def _show_standing(self, about: Fields, wish: Fields | None) -> None:
        """How a pipeline does; of other readers there is nothing to show."""
        state = about.get("state")
        told = [f"{state} for {units.age(about.get('state_seconds', 0))}"] if state else []
        if "retry_seconds" in about:
            told.append(f"tried again in {units.age(about['retry_seconds'])}")
        if about.get("silent"):
            told.append(f"nothing was heard of it since {about['at'][11:19]} UTC")
        if wish is not None:
            told.append(f"{wish['action']} is wished")
        _show_fact(self._state, ", ".join(told))
        rows, bad = about.get("rows_total"), about.get("bad_records")
        told = [f"{units.rate(about.get('rows_per_second', 0))}/s"] if rows is not None else []
        told += [f"{units.count(rows)} in all"] if rows is not None else []
        told += [units.counted(bad, "bad record")] if bad else []
        _show_fact(self._rate, ", ".join(told))
        _show_fact(self._parts, units.listed(about.get("sinks", {})))
        checked: Fields = about.get("expectations_checked", {})
        against = sorted(about.get("expectations", {}).items(), key=lambda it: (-it[1], it[0]))
        shown = [f"{units.count(count)}{_share(count, checked.get(name))} {name}" for name, count in against]
        _show_fact(self._expectations, ", ".join(shown))

    def _show_actions(self, reader: Fields | None) -> None:
        may = reader is not None and self._may_release(reader)
        if self._button is not None:
            self._button.set_visibility(may)
        takes = reader is not None and may and takes_wishes(reader)
        paused = reader is not None and (reader["about"] or {}).get("state") == "paused"
        for action, element in self._wishes.items():
            element.set_visibility(takes and action != ("pause" if paused else "resume"))

    async def _wished(self, action: str) -> None:
        name = self._name
        await self._view.run(lambda: self._wish(name, action))

    def _may_release(self, reader: Fields) -> bool:
        user = self._view.session.user
        if user is None or reader["hidden"]:
            return False
        return all(user.may(Right.OPERATE, it["queue"]) for it in reader["queues"])

    def _show_queues(self, queues: list[Fields], is_first: bool) -> None:
        rows = {it["queue"]: _row(it) for it in queues}
        self._table.follow(rows, self._shown, whole=is_first)
        self._shown = rows

    async def _ask(self) -> None:
        name = self._name
        if await confirm(
            f"Release the reader {name}?",
            f"Nothing is kept for it any more: retention may remove what it has not read, which is "
            f"{units.count(self._lag)} now, and what is removed cannot be read again. A program that still "
            f"reads under this name takes hold again of what is there, with its next step.",
            "Release",
        ):
            await self._view.run(lambda: self._release(name))


def _show_fact(element: TextElement, text: str) -> None:
    """A fact that is not there where there is nothing to say."""
    element.set_text(text)
    box = element.parent_slot.parent if element.parent_slot is not None else element
    box.set_visibility(bool(text))


def _share(count: int, checked: int | None) -> str:
    return "" if checked is None else f" of {units.count(checked)}"


def _row(queue: Fields) -> Row:
    return {
        "queue": queue["queue"],
        "href": queue_href(queue["queue"]),
        "position": queue["position"],
        "end": queue["end"],
        "lag": queue["lag"],
        "bytes": queue["lag_bytes"],
        "behind": queue["lag_seconds"] and round(queue["lag_seconds"]),
        "state": [["capped", "bad"]] if queue["capped"] else [],
    }
