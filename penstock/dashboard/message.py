"""One message: what it holds, how it stands, and its way through life. Looking takes nothing.

A message that is not gone is looked at again now and then, where that is cheap: its life goes on.
"""

import asyncio
import re
import time
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from nicegui import ui
from nicegui.element import Element
from nicegui.elements.mixins.text_element import TextElement

from penstock.common import units
from penstock.common.text import printable
from penstock.control.frames import Fields
from penstock.dashboard import payload
from penstock.dashboard.acting import may_send_again, open_again
from penstock.dashboard.caller import ApiError, queue_path
from penstock.dashboard.door import ASSETS
from penstock.dashboard.layout import badge, button, fact, facts, nothing_here, panel, tag
from penstock.dashboard.message_life import Step, because, steps_of
from penstock.dashboard.pages import queue_href
from penstock.dashboard.queue_blocks import crumbs, terminal
from penstock.dashboard.queue_messages import STATE_KINDS
from penstock.dashboard.view import View
from penstock.model.ids import IDENTITY_DIGITS
from penstock.model.rights import Right

LOOK_SECONDS: Final = 3.0
LOOK_BYTES_MAX: Final = 100_000
LOOK_COST_MAX: Final = 0.2
"""A look that took longer than so many seconds is not repeated by itself."""

WIDE_CHARACTERS: Final = 32
"""A fact from here on has a line of its own."""

FORMS: Final[Mapping[str, tuple[str, Callable[[bytes], payload.Shown | None]]]] = {
    "json": ("JSON", payload.as_json),
    "text": ("Text", payload.as_text),
    "hex": ("Hex", payload.as_hex),
}
FILE_ENDS: Final = {"json": "json", "text": "txt", "hex": "bin"}
WHAT: Final = {"json": "JSON", "text": "text", "hex": "no text"}
COPY_BYTES_MAX: Final = 4 << 20


class PayloadView(Element, component=ASSETS / "payload.js"):
    """A payload in its forms, of which the visitor chooses one. It says `copy`, and is told what to copy."""

    def show(self, forms: Mapping[str, payload.Shown], size: int) -> None:
        first = next(iter(forms))
        self.props["forms"] = [
            {"key": key, "label": FORMS[key][0], "text": shown.text, "note": shown.note}
            for key, shown in forms.items()
        ]
        self.props["about"] = f"{units.size(size)}, {WHAT[first]}"
        self.props["copies"] = "text" in forms and size <= COPY_BYTES_MAX
        self.update()

    def copy(self, text: str) -> None:
        self.run_method("copy", text)


async def build(view: View, offset: int, offset_end: int) -> None:
    """`offset_end`: of the queue's log."""
    queue = view.queue
    view.set_title(f"{queue} {offset}")
    crumbs(("Queues", "/"), (queue, queue_href(queue)), ("Messages", queue_href(queue, part="messages")))
    try:
        page = _Message(view, offset, offset_end)
        await page.look()
    except ApiError as error:
        if error.status not in (404, 410):
            raise
        view.client.status_code = error.status
        nothing_here(view, str(error))
        return
    await page.draw()


class _Message:
    """The page of a message."""

    def __init__(self, view: View, offset: int, offset_end: int) -> None:
        self._view = view
        self._queue = view.queue
        self._offset = offset
        self._offset_end = offset_end
        self._message: Fields = {}
        self._value = b""
        self._look_cost = 0.0  # seconds
        self._shown: Fields = {}  # what the drawing shows
        self._shown_value: bytes | None = None  # likewise
        self._fact_texts: dict[str, TextElement] = {}
        self._betweens: list[TextElement] = []

    async def look(self) -> None:
        began = time.monotonic()
        self._message = await self._view.api.get(queue_path(self._queue, "messages", str(self._offset)))
        self._value = b64decode(self._message["value_base64"])
        self._look_cost = time.monotonic() - began

    async def draw(self) -> None:
        with tag("div", classes="ps-heading"):
            with tag("div", classes="ps-queue-title"):
                tag("h1", f"Message {self._offset}")
                self._badges = tag("span")
            with tag("div", classes="ps-actions"):
                self._steps_aside()
                if self._view.may(Right.OPERATE):
                    self._redrive = button("Redrive", self._do_redrive, "primary")
                if may_send_again(self._view):
                    button("Send again…", self._send_again)
                button("Download", self._download)
        with tag("div", classes="ps-message"):
            with tag("div", classes="ps-message-main"):
                with panel("Payload"):
                    self._payload = PayloadView()
                    self._payload.on("copy", self._copy, args=[])
                    self._payload.on("copied", self._copied, args=[])
                    self._payload.on("uncopied", self._uncopied, args=[])
                if self._message["headers"]:
                    with panel("Headers"):
                        _headers(self._message["headers"])
                with panel("Facts", "ps-message-facts"):
                    self._facts = tag("div")
            with panel("Its life", "ps-life-panel"):
                self._life = tag("ol", classes="ps-life")
        terminal(self._view, ["peek", self._queue, "--from", str(self._offset), "--limit", "1", "--history"])
        await self._show()
        self._view.every(LOOK_SECONDS, self._look_again)

    def _steps_aside(self) -> None:
        """To the neighbours, whatever state they are in."""
        if self._offset:
            tag("a", "← Older", "ps-button", href=queue_href(self._queue, offset=self._offset - 1))
        if self._offset + 1 < self._offset_end:
            tag("a", "Newer →", "ps-button", href=queue_href(self._queue, offset=self._offset + 1))

    async def _show(self) -> None:
        """Draw what has changed; what only grows older is told anew where it stands."""
        if self._value != self._shown_value:  # a dead letter may be repaired while somebody looks at it
            self._shown_value = self._value
            await self._show_payload()
        message, now = self._message, time.time()
        facts_now, steps = _facts(message, len(self._value)), steps_of(message, now)
        known = {**message, "ttl": None}  # which runs down without anything happening
        if known == self._shown:
            for label, text in facts_now:
                self._fact_texts[label].set_text(text)
            for element, step in zip(self._betweens, steps, strict=True):
                element.set_text(step.between)
            return
        self._shown = known
        self._badges.clear()
        with self._badges:
            badge(message["state"], STATE_KINDS[message["state"]])
            if message["repaired"]:
                badge("repaired", "warn").props["title"] = "Its payload is another than it was sent with."
        if self._view.may(Right.OPERATE):
            self._redrive.set_visibility(message["state"] == "dead" and message["consumer"] is None)
        self._facts.clear()
        with self._facts, facts():
            self._fact_texts = {label: fact(label, text) for label, text in facts_now}
            for element in self._fact_texts.values():
                if len(element.text) >= WIDE_CHARACTERS:
                    element.classes("ps-fact-long")
        self._life.clear()
        with self._life:
            self._betweens = [_draw_step(step) for step in steps]

    async def _look_again(self) -> None:
        cheap = len(self._value) <= LOOK_BYTES_MAX and self._look_cost <= LOOK_COST_MAX
        if self._message["state"] != "gone" and cheap:
            await self.look()
            await self._show()

    # --- payload ---------------------------------------------------------------------------------

    async def _show_payload(self) -> None:
        self._forms = await asyncio.to_thread(_forms, self._value)
        self._payload.show(self._forms, len(self._value))

    def _copy(self) -> None:
        # As it was sent: what is shown has escapes.
        self._payload.copy(self._value.decode())

    def _copied(self) -> None:
        self._view.notify(f"Copied {units.size(len(self._value))}")

    def _uncopied(self) -> None:
        self._view.notify("The browser lets nothing be copied here. Download it instead.", wrong=True)

    def _download(self) -> None:
        kind = FILE_ENDS[next(iter(self._forms))]
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", self._queue).strip("._") or "queue"
        ui.download.content(self._value, f"{name}-{self._offset}.{kind}", "application/octet-stream")

    # --- what is done with it --------------------------------------------------------------------

    async def _send_again(self) -> None:
        await self._view.run(lambda: open_again(self._view, self._queue, self._offset))

    async def _do_redrive(self) -> None:
        async def do() -> None:
            # The letter that is shown, and none of another queue of that name.
            wish = {
                "ranges": [[self._offset, self._offset + 1]],
                "identity": self._message["id"][:IDENTITY_DIGITS],
            }
            answer = await self._view.api.post(queue_path(self._queue, "redrive"), wish)
            if answer["redriven"]:
                self._view.notify(f"Message {self._offset} is back behind the tail")
            else:
                self._view.notify(f"Message {self._offset} is no dead letter any more", wrong=True)
            await self.look()
            await self._show()

        await self._view.run(do)


def _forms(value: bytes) -> dict[str, payload.Shown]:
    made = {key: make(value) for key, (_, make) in FORMS.items()}
    return {key: shown for key, shown in made.items() if shown is not None}


def _facts(message: Fields, size: int) -> Sequence[tuple[str, str]]:
    """Names and values of what is known about a message."""
    found = [
        ("Accepted", _when(message["time"])),
        ("Age", units.since(message["time"])),
        ("Came through", message["protocol"]),
        ("Size", units.size(size) if size < 1024 else f"{units.size(size)} ({units.count(size)} B)"),
        ("Attempts", units.count(message["attempts"] or 0)),
        ("Retries left", "without end" if message["retries"] == 255 else str(message["retries"])),
        ("Expires", _when(message["expires"])),
        ("Delayed until", _when(message["due"])),
        ("Dead because", because(message)),
        ("Held by", message["consumer"] or ""),
        ("Id", message["id"]),
    ]
    # What does not apply is left out.
    return [(label, text) for label, text in found if text not in ("", "None")]


def _headers(headers: Mapping[str, str]) -> None:
    """What came with the payload; what does not print is shown as escapes."""
    with tag("table", classes="ps-table ps-headers", aria_label="Headers"), tag("tbody"):
        for name, value in headers.items():
            with tag("tr"):
                tag("th", printable(name), scope="row")
                tag("td", printable(value))


def _when(moment: str | None) -> str:
    return f"{units.moment(datetime.fromisoformat(moment))} UTC" if moment is not None else ""


def _draw_step(step: Step) -> TextElement:
    """One mark of the line; the element that says what was until the next one."""
    with tag("li", classes=f"ps-step ps-step-{step.color}", data_event=step.event):
        with tag("div", classes="ps-step-head"):
            tag("strong", step.title)
            if step.at is not None and step.when:
                moment = datetime.fromtimestamp(step.at, UTC)
                title = f"{units.moment(moment)} UTC"
                tag("time", step.when, datetime=moment.isoformat(timespec="milliseconds"), title=title)
        if step.facts:
            with tag("p", classes="ps-step-facts"):
                for name, value in step.facts:
                    tag("span", f"{name} ")
                    tag("b", value, dir="auto")
        return tag("p", step.between, "ps-step-between")
