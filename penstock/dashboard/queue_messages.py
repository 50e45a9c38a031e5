"""A queue's messages: a page of them, in whatever state or in one, from an offset on. Looking takes nothing.

Rules that always hold:
  * A page stays as it is until its visitor asks for another or for a fresh look: nothing moves by itself.
  * In all states the newest come first; in one state the oldest, which is the order of consumers.
  * State and offset are in the address.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from nicegui import ui
from nicegui.events import GenericEventArguments

from penstock.control.frames import Fields
from penstock.dashboard import payload
from penstock.dashboard.acting import Selection, may_act
from penstock.dashboard.caller import Caller, queue_path
from penstock.dashboard.layout import button, panel, tag
from penstock.dashboard.message_life import because, due_of
from penstock.dashboard.pages import queue_href
from penstock.dashboard.queue_blocks import Choice, terminal, whole
from penstock.dashboard.table import Column, LiveTable, Row
from penstock.dashboard.view import View

PAGE_ROWS: Final = 50
CALLS_MAX: Final = 10
"""How often the API is asked for one page: large payloads make its answers short."""

STATES: Final[Mapping[str, str]] = {
    "all": "All",
    "ready": "Ready",
    "held": "Held",
    "delayed": "Delayed",
    "dead": "Dead",
    "gone": "Gone",
}
STATE_KINDS: Final[Mapping[str, str]] = {
    "ready": "ok",
    "held": "",
    "delayed": "warn",
    "dead": "bad",
    "gone": "",
}

COLUMNS: Final = (
    Column("offset", "Offset", "link", head=True, sortable=False),
    Column("state", "State", "badges", sortable=False),
    Column("at", "Age", "since", sortable=False),
    Column("attempts", "Attempts", "count", sortable=False),
    Column("size", "Size", "size", sortable=False),
    Column("preview", "Payload", sortable=False),
)


def message_row(queue: str, message: Mapping[str, Any]) -> Row:
    """A message of the API as a row of a table, the oldest first."""
    base64 = message["value_base64"]
    return row_of(queue, message, payload.preview(base64), payload.size_of(base64))


def row_of(queue: str, message: Mapping[str, Any], preview: str, size: int) -> Row:
    state, reason, consumer = message["state"], message["reason"], message["consumer"]
    badges = [[state, STATE_KINDS[state]]]
    if message["due"]:
        badges.append([f"until {due_of(message)}", ""])
    if reason:
        badges.append([because(message), ""])
    if consumer and state == "dead":
        badges.append(["held", ""])
    if message["repaired"]:
        badges.append(["repaired", "warn"])
    return {
        "offset": message["offset"],
        "href": queue_href(queue, offset=message["offset"]),
        "state": badges,
        "at": datetime.fromisoformat(message["time"]).timestamp(),
        "attempts": message["attempts"],
        "size": size,
        "preview": preview or "(empty)",
        "place": message["offset"],
    }


def message_table(
    caption: str,
    empty: str = "",
    *,
    columns: Sequence[Column] = COLUMNS,
    key: str = "offset",
    selectable: bool = False,
) -> LiveTable:
    """`empty`: what it says where there is none; else who makes it says so within it."""
    table = LiveTable(
        caption, columns, key=key, noun="message", sort="place", page_rows=1000, selectable=selectable
    )
    table.classes("ps-messages")
    if empty:
        with table:
            tag("p", empty, "ps-empty")
    return table


async def build(view: View, row: Fields) -> None:
    _Messages(view, row)


class _Messages:
    """The page of messages, and what turns it."""

    def __init__(self, view: View, row: Fields) -> None:
        self._view = view
        self._queue: str = row["name"]
        query = view.request.query_params
        self._state = query["state"] if query.get("state") in STATES else "all"
        self._from = whole(query.get("from", ""))  # None: not chosen
        self._before: list[int] = []  # where the pages before this one began
        self._next: int | None = None
        with panel(classes="ps-browse") as section:
            section.props["aria-label"] = "Messages"
            with tag("div", classes="ps-bar"):
                self._choice = Choice("State", STATES, self._state, self._choose)
                self._form()
                button("Refresh", self._refresh)
            self._seen: dict[int, Fields] = {}
            self._table = message_table("Messages", "There is no message here.", selectable=may_act(view))
            with tag("nav", classes="ps-pager", aria_label="Pages of messages"):
                self._older = button("← Older", self._go_older)
                self._range = tag("span", "", role="status")
                self._newer = button("Newer →", self._go_newer)
            Selection(view, self._table, self._seen, self._look_again)
        terminal(
            view,
            ["peek", self._queue, "--limit", "20"],
            ["peek", self._queue, "--state", "ready", "--history"],
        )
        view.on_open(lambda: view.later(self._load))

    def _form(self) -> None:
        with tag("form", classes="ps-jump") as form:
            tag("label", "Go to offset", for_="ps-jump")
            tag(
                "input", id="ps-jump", name_="offset", type="text", inputmode="numeric", pattern="[0-9]{1,16}"
            )
            tag("button", "Go", "ps-button", type="submit")
        form.on(
            "submit.prevent",
            self._jump,
            js_handler="(event) => emit(new FormData(event.target).get('offset'))",
        )

    # --- what the visitor does -------------------------------------------------------------------

    async def _choose(self, state: str) -> None:
        self._state, self._from = state, None
        self._before.clear()
        await self._view.run(self._load)

    async def _jump(self, event: GenericEventArguments) -> None:
        offset = whole(str(event.args).strip())
        if offset is not None:
            self._from = offset
            self._before.clear()
            await self._view.run(self._load)

    async def _look_again(self, _: Sequence[Fields]) -> None:
        await self._load()

    async def _refresh(self) -> None:
        await self._view.run(self._load)

    async def _go_older(self) -> None:
        if self._state == "all":
            self._from = max((self._from or 0) - PAGE_ROWS, 0)
        else:
            self._from = self._before.pop() if self._before else 0
        await self._view.run(self._load)

    async def _go_newer(self) -> None:
        if self._next is not None:
            if self._state != "all":
                self._before.append(self._from or 0)
            self._from = self._next
            await self._view.run(self._load)

    # --- pages -----------------------------------------------------------------------------------

    async def _load(self) -> None:
        row = await self._view.api.get(queue_path(self._queue))
        state = None if self._state == "all" else self._state
        if self._from is None and state is None:
            self._from = max(row["offset_end"] - PAGE_ROWS, row["offset_start"])
        messages, self._next = await read_page(self._view.api, self._queue, self._from or 0, state)
        rows = seen_rows(self._queue, messages, self._seen)
        self._table.load([{**it, "place": -it["offset"]} for it in rows] if state is None else rows)
        self._tell(row, rows)
        ui.navigate.history.replace(
            queue_href(self._queue, part="messages", state=state, **{"from": self._from})
        )

    def _tell(self, row: Fields, rows: list[Row]) -> None:
        first_of_all = row["offset_start"] if self._state == "all" else 0
        self._older.props.set_bool("disabled", not self._before and (self._from or 0) <= first_of_all)
        self._newer.props.set_bool("disabled", self._next is None)
        self._range.set_text(f"Offsets {rows[0]['offset']} to {rows[-1]['offset']}" if rows else "")


async def read_page(
    api: Caller, queue: str, start: int, state: str | None
) -> tuple[list[Fields], int | None]:
    """Messages from an offset on, and where the next page begins; None: there is none."""
    messages: list[Fields] = []
    at: int | None = start
    for _ in range(CALLS_MAX):
        answer = await api.get(
            queue_path(queue, "messages"), limit=PAGE_ROWS - len(messages), state=state, **{"from": at}
        )
        messages += answer["messages"]
        at = answer["next"]
        if at is None or len(messages) >= PAGE_ROWS:
            break
    return messages, at


def seen_rows(queue: str, messages: Sequence[Fields], seen: dict[int, Fields]) -> list[Row]:
    """Rows of a table; `seen` gets what there is to know of each, by its offset, and nothing else."""
    seen.clear()
    for message in messages:
        seen[message["offset"]] = {"queue": queue, **{it: message[it] for it in ("offset", "id", "state")}}
    return [message_row(queue, message) for message in messages]
