"""Acting on a selection: redrive, copy, move, withdraw, edit and send again what was ticked in a table.

Each question says how many, of which queues, and what will happen. Each act is one call of the API for each
queue, which judges every message as it stands then: what has changed meanwhile, or is in somebody's hands, is
passed over, and the result says how many were not.

Rules that always hold:
  * A message is named by its offset and the identity of its queue: another queue of that name is not meant.
  * What was acted on is looked at again, so that its row says how it stands.

How it fails: an act on several queues ends at the first that refuses; what was done until then is told.
"""

from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from nicegui import ui
from nicegui.events import GenericEventArguments

from penstock.common import units
from penstock.control.frames import Fields
from penstock.dashboard.caller import ApiError, queue_path
from penstock.dashboard.layout import button, confirm, tag
from penstock.dashboard.sending import NAMES_MAX, Draft, send_dialog
from penstock.dashboard.table import LiveTable
from penstock.dashboard.view import View
from penstock.model.ids import IDENTITY_DIGITS
from penstock.model.rights import Right


@dataclass(frozen=True, slots=True)
class Act:
    """What can be done with several messages."""

    verb: str  # of the API
    label: str
    done: str  # as in "3 messages …"
    right: Right  # with their queue
    will: str  # what will happen
    field: str  # of the answer: how many it was done to
    to_queue: bool = False


NEW: Final = (
    "The other queue gets new messages with the same payloads and headers, and with what is left of their "
    "times to live, retries and delays."
)
BUT: Final = "What a consumer holds, and what is gone, stays as it is."

ACTS: Final = (
    Act(
        "redrive",
        "Redrive…",
        "redriven",
        Right.OPERATE,
        "Those that are dead go back behind the tail of their queue, to be consumed again. Deliveries count "
        "from 0 again, and what had a time to live has none any more. The others stay as they are.",
        "redriven",
    ),
    Act(
        "copy",
        "Copy to…",
        "copied",
        Right.READ,
        f"{NEW} These stay as they are.",
        "copied",
        to_queue=True,
    ),
    Act(
        "move",
        "Move to…",
        "moved",
        Right.OPERATE,
        f"{NEW} These are withdrawn at the same moment. {BUT}",
        "moved",
        to_queue=True,
    ),
    Act(
        "withdraw",
        "Withdraw…",
        "withdrawn",
        Right.OPERATE,
        f"Nobody will get them any more; the log keeps what it has of them. {BUT} This cannot be undone.",
        "withdrawn",
    ),
)


class Selection:
    """A bar above a table that is there while something is ticked.

    `found`: the messages of the table by their keys, with queue, offset, id and state. `look_again`: called
    with the keys of those that something was done to.
    """

    def __init__(
        self,
        view: View,
        table: LiveTable,
        found: Mapping[Any, Fields],
        look_again: Callable[[Sequence[Fields]], Awaitable[None]],
    ) -> None:
        self._view = view
        self._table = table
        self._found = found
        self._look_again = look_again
        self._picked: list[Fields] = []
        bar = tag("div", classes="ps-bar ps-picked", role="group", aria_label="Selected messages")
        self._bar = bar
        with bar:
            self._count = tag("strong", "", role="status")
            for act in ACTS:
                if _may(view, act):
                    button(act.label, self._doing(act))
            self._edit = button("Edit and send again…", self._send_again) if may_send_again(view) else None
            button("Select all", table.pick_all, "quiet")  # On a phone the list has no heading to tick.
            button("Clear", table.unpick, "quiet")
        self._bar.set_visibility(False)
        table.on("pick", self._pick)

    def _pick(self, event: GenericEventArguments) -> None:
        self._picked = [self._found[key] for key in event.args if key in self._found]
        self._bar.set_visibility(bool(self._picked))
        self._count.set_text(f"{units.count(len(self._picked))} selected")
        if self._edit is not None:
            self._edit.set_visibility(len(self._picked) == 1)

    # --- acts ------------------------------------------------------------------------------------

    def _doing(self, act: Act) -> Callable[[], Awaitable[None]]:
        async def do() -> None:
            await self._do(act, list(self._picked))

        return do

    async def _do(self, act: Act, picked: list[Fields]) -> None:
        by_queue = dict(_by_queue(picked))
        verb = act.verb.capitalize()
        title = f"{verb} {units.counted(len(picked), 'message')}"
        text = f"{_whose(by_queue)} {act.will}"
        more: Fields = {}
        if act.to_queue:
            to = await ask_queue(self._view, title, text, verb)
            if not to:
                return
            more["to"] = to
        elif not await confirm(
            title,
            text,
            f"{verb} {units.count(len(picked))}",
            kind="danger" if act.verb == "withdraw" else "primary",
        ):
            return
        done = 0
        wrong = ""
        for queue, its in by_queue.items():
            try:
                answer = await self._view.api.post(queue_path(queue, act.verb), _wish(act, its) | more)
            except ApiError as error:
                wrong = str(error)
                break
            done += answer[act.field]
        if self._view.client.is_deleted:
            return
        self._tell(act, done, len(picked), wrong, more.get("to", ""))
        self._table.unpick()
        await self._view.run(lambda: self._look_again(picked))

    def _tell(self, act: Act, done: int, asked: int, wrong: str, to: str) -> None:
        said = f"{units.counted(done, 'message')} {act.done}" + (f" to {to}" if to else "")
        if done < asked and not wrong:
            said += f"; {units.count(asked - done)} could not be: they stand otherwise by now"
        if wrong:
            said = f"{wrong} {said[0].upper()}{said[1:]} before that." if done else wrong
        self._view.notify(said, wrong=bool(wrong) or done < asked)

    async def _send_again(self) -> None:
        if self._picked:
            queue, offset = self._picked[0]["queue"], self._picked[0]["offset"]
            await self._view.run(lambda: open_again(self._view, queue, offset))


def may_send(view: View) -> bool:
    """To some queue, whatever page this is."""
    user = view.session.user
    return user is not None and user.may_some(Right.SEND)


def may_send_again(view: View) -> bool:
    """As a new message, or as the repair of a dead letter."""
    return may_send(view) or view.may(Right.OPERATE)


def may_act(view: View) -> bool:
    """Whether there is anything to select messages for."""
    return any(_may(view, act) for act in ACTS) or may_send_again(view)


def _may(view: View, act: Act) -> bool:
    return view.may(act.right) and (not act.to_queue or may_send(view))


async def open_again(view: View, queue: str, offset: int) -> None:
    """The dialog to send a message once more, filled with what it has."""
    message = await view.api.get(queue_path(queue, "messages", str(offset)))
    user = view.session.user
    is_letter = message["state"] == "dead" and message["consumer"] is None
    may_repair = user is not None and user.may(Right.OPERATE, queue)
    letter = offset if is_letter and may_repair else None
    if letter is None and not may_send(view):
        view.notify(f"Message {offset} of {queue} is no dead letter that could be repaired", wrong=True)
        return
    value = b64decode(message["value_base64"])
    identity = message["id"][:IDENTITY_DIGITS]
    send_dialog(view, Draft(queue, value, message["headers"], letter, identity, is_old=True))


async def ask_queue(view: View, title: str, text: str, action: str) -> str:
    """The name of a queue that the visitor chooses, one that is there or a new one; empty: none."""
    user = view.session.user
    names = [name for name in sorted(view.feed.rows) if user is not None and user.may(Right.SEND, name)]
    with (
        view.client.content,
        ui.dialog() as dialog,
        tag("div", classes="ps-panel ps-dialog", role="document"),
    ):
        dialog.props["aria-label"] = title
        tag("h2", title)
        tag("p", text)
        with tag("form", classes="ps-send") as form:
            tag("label", "To the queue", for_="ps-to-queue")
            field = tag(
                "input",
                classes="ps-field",
                id="ps-to-queue",
                name_="to",
                type="text",
                maxlength="255",
                autocomplete="off",
                spellcheck="false",
                list_="ps-to-queues",
                autofocus="",
            )
            field.props["required"] = True
            with tag("datalist", id="ps-to-queues"):
                for name in names[:NAMES_MAX]:
                    tag("option", value=name)
            with tag("div", classes="ps-actions"):
                button("Cancel", lambda: dialog.submit(""), "quiet")
                tag("button", action, "ps-button ps-primary", type="submit")
        form.on(
            "submit.prevent",
            lambda event: dialog.submit(str(event.args).strip()),
            js_handler="(event) => emit(new FormData(event.target).get('to'))",
        )
    answer = await dialog
    if not dialog.is_deleted:
        dialog.delete()
    return str(answer or "")


def _by_queue(picked: Sequence[Fields]) -> Iterator[tuple[str, list[Fields]]]:
    ordered = sorted(picked, key=lambda it: (it["queue"], it["offset"]))
    for queue, its in groupby(ordered, lambda it: it["queue"]):
        yield queue, list(its)


def _whose(by_queue: Mapping[str, Sequence[Fields]]) -> str:
    """Of which queues, in what states."""
    states: dict[str, int] = {}
    for its in by_queue.values():
        for it in its:
            states[it["state"]] = states.get(it["state"], 0) + 1
    names = list(by_queue)
    some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    queues = some if len(names) == 1 else f"{len(names)} queues ({some})"
    return f"Of {queues}: {units.listed(states)}."


def _wish(act: Act, its: Sequence[Fields]) -> dict[str, Any]:
    offsets = [it["offset"] for it in its]
    identity = its[0]["id"][:IDENTITY_DIGITS]
    if act.verb == "redrive":
        return {"ranges": [[offset, offset + 1] for offset in offsets], "identity": identity}
    return {"offsets": offsets, "identity": identity}
