"""Sending from the page: a dialog with payload, headers, delay and time to live, and a receipt.

The same dialog, filled with a message that is there, sends it again, as it was or changed; of a dead letter
it also offers the repair: another payload in its place, and back into its queue.

Rules that always hold:
  * What is sent is what stands in the dialog, to the byte. What cannot stand there (no text, or very much of
    it) is not shown for editing, and sent as it was.
  * A click is one message: what was refused or lost on the way is sent again with the same key
    (`Idempotency-Key`), as long as nothing in the dialog was changed.

How it fails: the API's word stands in the dialog, and what was typed stays.
"""

import json
import secrets
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from nicegui import ui
from nicegui.element import Element
from nicegui.events import GenericEventArguments

from penstock.common import units
from penstock.control.frames import Fields
from penstock.dashboard.caller import ApiError, Caller, queue_path
from penstock.dashboard.door import ASSETS
from penstock.dashboard.layout import button, tag
from penstock.dashboard.pages import queue_href
from penstock.dashboard.view import View
from penstock.model.rights import Right

NDJSON: Final = "application/x-ndjson"
EDIT_BYTES_MAX: Final = 256 * 1024
NAMES_MAX: Final = 200
"""Queues that are offered where one is typed."""

SEND: Final = (
    "send",
    "Send it as a new message",
    "It gets an offset of its own; the old one stays.",
)
REPAIR: Final = (
    "repair",
    "Repair the dead letter",
    "It goes back behind the tail of its queue, with its offset and its history and this payload.",
)


@dataclass(frozen=True, slots=True)
class Draft:
    """What the dialog begins with."""

    queue: str = ""
    value: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    letter: int | None = None  # the offset of a dead letter that may be repaired
    identity: str = ""  # of the queue that it is in
    is_old: bool = False  # it is, or was, a message


class SendForm(Element, component=ASSETS / "send.js"):
    """The form; who makes it hears its `send` and `close`."""

    def __init__(self, draft: Draft, queues: Sequence[str], *, may_send: bool = True) -> None:
        super().__init__()
        text = _editable(draft.value)
        self.props["queue-given"] = draft.queue
        self.props["queues"] = list(queues)
        self.props["value-given"] = text or ""
        self.props["kept"] = _kept(draft.value) if text is None else ""
        self.props["headers-given"] = [list(it) for it in draft.headers.items()]
        repair = [REPAIR] if draft.letter is not None else []
        self.props["ways"] = [*repair, SEND] if may_send or not repair else repair
        self.props["actions"] = {"send": "Send", "repair": "Repair and redrive"}


def send_button(view: View, text: str = "Send a message…", kind: str = "") -> None:
    """A button that opens the dialog, for those who may send to the queue of the page, or to some queue."""
    if view.may(Right.SEND):
        button(text, lambda: send_dialog(view, Draft(view.queue)), kind)


def send_dialog(view: View, draft: Draft) -> None:
    """Open it. It stays until its visitor closes it."""
    user = view.session.user
    names = [name for name in sorted(view.feed.rows) if user is not None and user.may(Right.SEND, name)]
    title = "Edit and send again" if draft.is_old else "Send a message"
    with view.client.content, ui.dialog() as dialog:
        dialog.props["aria-label"] = title
        dialog.props["no-backdrop-dismiss"] = True  # A click beside it loses nothing that was typed.
        with tag("div", classes="ps-panel ps-dialog ps-wide", role="document"):
            tag("h2", title)
            may_send = user is not None and user.may_some(Right.SEND)
            _Sending(view, draft, SendForm(draft, names[:NAMES_MAX], may_send=may_send), dialog)
    dialog.on("hide", dialog.delete)
    dialog.open()


class _Sending:
    """A dialog while it is open."""

    def __init__(self, view: View, draft: Draft, form: SendForm, dialog: ui.dialog) -> None:
        self._view = view
        self._draft = draft
        self._form = form
        self._tried: Fields = {}  # the last that was tried and not stored, as far as is known
        self._key = ""
        form.on("send", self._send)
        form.on("close", dialog.close, args=[])

    async def _send(self, event: GenericEventArguments) -> None:
        given: dict[str, Any] = event.args
        if given != self._tried:
            self._tried, self._key = given, secrets.token_urlsafe(12)
        try:
            if given["way"] == REPAIR[0] and self._draft.letter is not None:
                receipt = await self._repair(self._value(given), self._draft.letter)
            else:
                receipt = await self._send_new(given)
        except ApiError as error:
            self._tell("refused", str(error))
            return
        except ValueError as error:
            self._tell("refused", str(error))
            return
        self._tried = {}
        self._tell("done", receipt)

    def _tell(self, method: str, what: object) -> None:
        if not self._form.is_deleted:
            self._form.run_method(method, what)

    def _value(self, given: Mapping[str, Any]) -> bytes:
        value: str | None = given["value"]
        return self._draft.value if value is None else value.encode()

    async def _send_new(self, given: Mapping[str, Any]) -> Fields:
        queue = str(given["queue"])
        line: Fields = {"value_base64": b64encode(self._value(given)).decode()}
        if headers := _headers(given["headers"]):
            line["headers"] = headers
        if given["delay"]:
            line["delay"] = float(given["delay"])
        if given["ttl"]:
            line["ttl"] = _whole(given["ttl"])
        offset = await send_lines(self._view.api, queue, [line], self._key)
        user = self._view.session.user
        may_look = user is not None and user.may(Right.READ, queue)
        return {
            "text": f"Stored in {queue}:" if may_look else f"Stored in {queue}, with offset {offset}.",
            "link": f"message {offset}",
            "href": queue_href(queue, offset=offset) if may_look else "",
        }

    async def _repair(self, value: bytes, offset: int) -> Fields:
        queue = self._draft.queue
        key = f"page/repair/{self._key}"
        line = json.dumps({"offset": offset, "value_base64": b64encode(value).decode()}).encode()
        staged = await self._view.api.ask(
            "POST",
            "/v1/stages",
            line,
            headers={"content-type": NDJSON},
            transaction=key,
            queue=queue,
            identity=self._draft.identity,
            redrive=True,
        )
        stages = [json.loads(staged)["stage"]]
        await self._view.api.post("/v1/transactions", {"transaction": key, "stages": stages})
        message = await self._view.api.get(queue_path(queue, "messages", str(offset)))
        if not message["repaired"] or message["state"] == "dead":
            raise ValueError(
                f"Message {offset} is no dead letter any more, or somebody holds it: nothing was changed."
            )
        return {
            "text": f"Back in {queue}, with this payload:",
            "link": f"message {offset}",
            "href": queue_href(queue, offset=offset),
        }


async def send_lines(api: Caller, queue: str, lines: Sequence[Fields], key: str) -> int:
    """Send messages as the API takes many; the first one's offset."""
    body = "\n".join(json.dumps(line) for line in lines).encode()
    headers = {"content-type": NDJSON, "idempotency-key": key}
    answer = json.loads(await api.ask("POST", queue_path(queue, "batch"), body, headers=headers))
    offset: int = answer["offset_start"]
    return offset


def _headers(given: Sequence[Sequence[str]]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, value in given:
        if not name:
            raise ValueError(f"The header with the value {value!r:.100} has no name.")
        if name in headers:
            raise ValueError(f"The header {name!r:.100} is there twice; a message has it once.")
        headers[name] = value
    return headers


def _whole(text: str) -> int:
    number = float(text)
    if not number.is_integer():
        raise ValueError("The time to live is a whole number of seconds.")
    return int(number)


def _editable(value: bytes) -> str | None:
    """The text that a payload is, where it can stand in a form unchanged."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return None
    # A browser makes one line break of each of these, and a form keeps no NUL.
    return text if len(value) <= EDIT_BYTES_MAX and "\r" not in text and "\0" not in text else None


def _kept(value: bytes) -> str:
    why = "too much to be edited here" if len(value) > EDIT_BYTES_MAX else "no text that can be edited here"
    return f"{units.size(len(value))}, {why}: sent as it is."
