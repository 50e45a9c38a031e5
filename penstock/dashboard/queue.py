"""A queue's page: its head, and one of its parts below it.

    overview    charts over time, who consumes it, its settings     `queue_overview`
    messages    a page of messages, by state or from an offset on   `queue_messages`
                or those that a search finds                        `finding`
    dead        dead letters by reason, dry run, redrive            `queue_letters`
    a message   with its payload and its way through life           `message`

The part is in the address (`?part=dead`, `?offset=42`), so that it can be sent to somebody. Numbers in the
head are the feed's.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from penstock.common import units
from penstock.control.frames import Fields
from penstock.dashboard import message, queue_letters, queue_messages, queue_overview
from penstock.dashboard.caller import ApiError, queue_path
from penstock.dashboard.feed import Tick
from penstock.dashboard.finding import Finder
from penstock.dashboard.findings import Findings
from penstock.dashboard.layout import badge, button, confirm, style, tag
from penstock.dashboard.pages import queue_href
from penstock.dashboard.queue_blocks import crumbs, whole
from penstock.dashboard.sending import send_button
from penstock.dashboard.view import View
from penstock.model.rights import Right

Part = Callable[[View, Fields], Awaitable[None]]


async def _messages(view: View, row: Fields) -> None:
    """Go along the messages, or search them: whichever the address asks for."""
    asked, queue = view.request.query_params, row["name"]
    searches = "newest" in asked or "find" in asked
    with tag("nav", classes="ps-choice ps-ways-in", aria_label="Ways to messages"):
        for text, chosen, href in (
            ("Browse", not searches, queue_href(queue, part="messages")),
            ("Search", searches, queue_href(queue, part="messages", find="true")),
        ):
            link = tag("a", text, href=href)
            if chosen:
                link.props["aria-current"] = "page"
    if searches:
        Finder(view, queue)
    else:
        await queue_messages.build(view, row)


PARTS: Final[Mapping[str, tuple[str, Part]]] = {
    "": ("Overview", queue_overview.build),
    "messages": ("Messages", _messages),
    "dead": ("Dead letters", queue_letters.build),
}

NUMBERS: Final[Sequence[tuple[str, str, Callable[[Any], str], str]]] = (
    ("rate_in", "In", units.rate, "/s"),
    ("rate_out", "Out", units.rate, "/s"),
    ("ready", "Ready", units.count, ""),
    ("held", "Held", units.count, ""),
    ("delayed", "Delayed", units.count, ""),
    ("oldest_seconds", "Oldest", units.age, ""),
    ("dead", "Dead", units.count, ""),
    ("consumers", "Consumers", units.count, ""),
    ("bytes", "Size", units.size, ""),
)
"""Field, label, how it is written (a number, or None where there is none), unit."""


async def build(view: View) -> None:
    style("queue.css")
    queue = view.queue
    view.set_title(queue)
    try:
        row = await view.api.get(queue_path(queue))
    except ApiError as error:
        if error.problem != "queue-not-found":
            raise
        _not_there(view)
        return
    offset = whole(view.request.query_params.get("offset", ""))
    if offset is not None:
        await message.build(view, offset, row["offset_end"])
        return
    part = view.request.query_params.get("part", "")
    part = part if part in PARTS else ""
    _Head(view, row, part)
    await PARTS[part][1](view, row)


def _not_there(view: View) -> None:
    """The page of a queue that does not exist; it becomes the queue's page when the queue comes."""
    view.client.status_code = 404
    with tag("section", classes="ps-empty"):
        tag("h1", "There is no such queue")
        tag("p", view.queue, "ps-queue-name", dir="auto")
        tag("p", "A queue is there with its first message. This page shows it as soon as it comes.")
        send_button(view, kind="primary")
        tag("a", "See all queues", href="/")

    def tick(tick: Tick) -> None:
        if view.queue in view.feed.rows:
            ui.navigate.reload()

    view.on_tick(tick)


class _Head:
    """Name, state, actions, numbers, and the ways to the parts."""

    def __init__(self, view: View, row: Fields, part: str) -> None:
        self._view = view
        self._queue: str = row["name"]
        self._row = row
        crumbs(("Queues", "/"))
        with tag("div", classes="ps-heading"):
            with tag("div", classes="ps-queue-title"):
                tag("h1", self._queue, dir="auto")
                self._paused = badge("paused", "warn")
            with tag("div", classes="ps-actions"):
                send_button(view)
                self._pause = button("Pause", self._toggle_pause) if view.may(Right.OPERATE) else None
                if view.may(Right.ADMIN):
                    button("Purge…", self._purge)
                    button("Delete…", self._delete)
        with tag("dl", classes="ps-numbers"):
            self._numbers = {field: _number(field, label, unit) for field, label, _, unit in NUMBERS}
        with tag("nav", classes="ps-parts", aria_label="Parts of this page"):
            for name, (title, _) in PARTS.items():
                link = tag("a", title, href=queue_href(self._queue, part=name or None))
                if name == part:
                    link.props["aria-current"] = "page"
                if name == "dead":
                    with link:
                        self._dead = badge("", "bad")
        self._findings = Findings("What is wrong", queue_href(self._queue, part=part or None))
        self._show(row, row["oldest_seconds"])
        view.on_tick(self._tick)

    def _tick(self, tick: Tick) -> None:
        row = self._view.feed.rows.get(self._queue)
        self._findings.show(tick.attention.of_queue(self._queue))
        if self._queue in tick.gone:
            ui.navigate.reload()
        if row is not None:
            oldest_at = row["oldest_at"]
            self._show(row, None if oldest_at is None else max(time.time() - oldest_at, 0))

    def _show(self, row: Fields, oldest_seconds: float | None) -> None:
        self._row = row
        for field, _, say, _ in NUMBERS:
            self._numbers[field].set_text(say(oldest_seconds if field == "oldest_seconds" else row[field]))
        self._dead.set_text(units.count(row["dead"]))
        self._dead.set_visibility(row["dead"] > 0)
        self._paused.set_visibility(row["paused"])
        if self._pause is not None:
            self._pause.set_text("Resume" if row["paused"] else "Pause")

    # --- what operators do ------------------------------------------------------------------------

    async def _toggle_pause(self) -> None:
        view, queue, paused = self._view, self._queue, self._row["paused"]

        async def do() -> None:
            await view.api.post(queue_path(queue, "resume" if paused else "pause"))
            view.notify(f"{queue} hands out messages again" if paused else f"{queue} is paused")

        await view.run(do)

    async def _purge(self) -> None:
        view, queue = self._view, self._queue

        async def do() -> None:
            answer = await view.api.post(queue_path(queue, "purge"))
            view.notify(f"Purged {units.counted(answer['purged'], 'message')} of {queue}")

        text = (
            "{ready} will be thrown away: what waits for a consumer, or for its time. What is held and what "
            "is dead stays. This cannot be undone."
        )
        if await self._is_wanted("Purge", text):
            await view.run(do)

    async def _delete(self) -> None:
        view, queue = self._view, self._queue

        async def do() -> None:
            await view.api.ask("DELETE", queue_path(queue), None, force=True)
            view.notify(f"Deleted {queue}")
            ui.navigate.to("/")

        text = (
            "{ready} that wait, {held} that are held and {dead} will be gone with it, and its log. "
            "{consumers} will wait for the next queue of this name. This cannot be undone."
        )
        if await self._is_wanted("Delete", text):
            await view.run(do)

    async def _is_wanted(self, action: str, text: str) -> bool:
        """Whether the visitor says so, who is told how the queue stands now."""
        nouns = {"ready": "message", "held": "message", "dead": "dead letter", "consumers": "consumer"}
        said: dict[str, str] = {}

        async def look() -> None:
            row = await self._view.api.get(queue_path(self._queue))
            row["ready"] += row["delayed"]  # Both wait: the ones for a consumer, the others for their time.
            said.update({field: units.counted(row[field], noun) for field, noun in nouns.items()})

        title = f"{action} this queue"
        return await self._view.run(look) and await confirm(
            title, text.format(**said), action, word=self._queue
        )


def _number(field: str, label: str, unit: str) -> TextElement:
    with tag("div"):
        tag("dt", label)
        with tag("dd"):
            value = tag("span", "–", data_number=field)
            if unit:
                tag("span", unit, "ps-unit")
    return value
