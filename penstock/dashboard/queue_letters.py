"""A queue's dead letters: how many for which reason, which of them fit a condition, and back with them.

Who may only read sees the reasons and the letters. Who may operate also counts those that fit a condition
(a dry run of the API), sees the first of them, and redrives them; admins throw them away.

Reason, condition and limit are in the address: who opens it sees the dry run.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement
from nicegui.events import GenericEventArguments

from penstock.common import units
from penstock.control.frames import Fields
from penstock.dashboard.acting import Selection, may_act
from penstock.dashboard.caller import ApiError, queue_path
from penstock.dashboard.layout import button, confirm, panel, tag
from penstock.dashboard.pages import queue_href
from penstock.dashboard.queue_blocks import columns, terminal, whole
from penstock.dashboard.queue_messages import message_table, seen_rows
from penstock.dashboard.redrive_form import REASONS, RedriveForm
from penstock.dashboard.redriving import LISTED, Progress, Wish, count, redrive
from penstock.dashboard.view import View
from penstock.model.rights import Right

PAGES_MAX: Final = 20
"""How many pages of dead letters are gone through for those of one reason."""

PAGE_ROWS: Final = 200
LOOK_SECONDS: Final = 2.0

HELP: Final = (
    "Puts dead letters back behind the tail of the queue: those of the reason that is chosen, that fit the "
    "condition. Bad records only where that reason is chosen, or the condition asks for reasons."
)


class _Bar(NamedTuple):
    """How many letters died for a reason."""

    button: TextElement
    number: TextElement
    fill: TextElement | None


async def build(view: View, row: Fields) -> None:
    _Letters(view, row)


class _Letters:
    def __init__(self, view: View, row: Fields) -> None:
        self._view = view
        self._queue: str = row["name"]
        self._dead: int = row["dead"]
        self._reasons = _reasons_of(row)
        asked = view.request.query_params
        self._wish = Wish(
            asked["reason"] if asked.get("reason") in REASONS else None,
            asked.get("where") or None,
            whole(asked.get("limit", "")) or None,
        )
        self._drawn: dict[str | None, _Bar] | None = None  # by reason; None as one: all of them
        with columns():
            with panel("Reasons"):
                self._bars = tag("div", classes="ps-reasons", role="group", aria_label="Reasons")
                if view.may(Right.ADMIN):
                    with tag("div", classes="ps-actions ps-apart"):
                        button("Purge dead letters…", self._purge)
            if view.may(Right.OPERATE):
                self._form()
        with panel(classes="ps-browse") as section:
            section.props["aria-label"] = "Dead letters"
            self._title = tag("h2", "Dead letters")
            self._seen: dict[int, Fields] = {}
            self._table = message_table(
                "Dead letters", "There are no dead letters here.", selectable=may_act(view)
            )
            self._more = tag("p", "", "ps-help")
            Selection(view, self._table, self._seen, self._acted)
        terminal(view, ["dead", self._queue], ["redrive", self._queue, "--dry-run"])
        self._draw()
        view.on_open(lambda: view.later(self._opened))
        view.every(LOOK_SECONDS, self._look_again)

    # --- reasons ---------------------------------------------------------------------------------

    def _draw(self) -> None:
        """The bars; those that are there stay, and with them the keyboard's place."""
        numbers: dict[str | None, int] = {}
        if self._reasons:
            order = sorted(self._reasons, key=lambda it: -self._reasons[it])
            numbers = {None: self._dead, **{reason: self._reasons[reason] for reason in order}}
        if self._drawn is None or numbers.keys() != self._drawn.keys():
            self._bars.clear()
            with self._bars:
                if not numbers:
                    tag("p", "No letter is dead.", "ps-help")
                self._drawn = {reason: self._bar(reason) for reason in numbers}
        most = max(self._reasons.values(), default=1)
        for reason, bar in self._drawn.items():
            bar.button.props["aria-pressed"] = str(reason == self._wish.reason).lower()
            bar.button.update()
            bar.number.set_text(units.count(numbers[reason]))
            if bar.fill is not None:
                bar.fill.style(f"width: {max(numbers[reason] / most * 100, 1):.1f}%")

    def _bar(self, reason: str | None) -> "_Bar":
        fill: TextElement | None = None
        name = reason or "all"
        with tag("button", classes="ps-reason", type="button", data_reason=name) as element:
            tag("span", name, "ps-reason-name")
            number = tag("span", "", "ps-reason-count")
            if reason is not None:
                tag("span", REASONS[reason], "ps-reason-meaning")
                with tag("span", classes="ps-reason-bar", aria_hidden="true"):
                    fill = tag("i")

        async def choose() -> None:
            await self._choose(reason)

        element.on("click", choose, args=[])
        return _Bar(element, number, fill)

    async def _choose(self, reason: str | None) -> None:
        self._ask(replace(self._wish, reason=reason))
        self._draw()
        if self._view.may(Right.OPERATE):
            self._redriving.say("")
        await self._view.run(self._load)

    def _ask(self, wish: Wish) -> None:
        """What is wanted from here on; the address says so, too."""
        self._wish = wish
        ui.navigate.history.replace(queue_href(self._queue, part="dead", **wish.fields()))

    async def _opened(self) -> None:
        if self._view.may(Right.OPERATE) and self._wish != Wish(self._wish.reason):
            await self._carry_out(self._wish, False)
        else:
            await self._load()

    async def _look_again(self) -> None:
        row = self._view.feed.rows.get(self._queue)
        if row is not None and row["dead"] != self._dead:
            await self._look()

    async def _look(self) -> None:
        row = await self._view.api.get(queue_path(self._queue))
        self._dead = row["dead"]
        self._reasons = _reasons_of(row)
        self._draw()

    # --- the list --------------------------------------------------------------------------------

    async def _load(self) -> None:
        """The first letters of the reason that is chosen."""
        letters: list[Fields] = []
        at: int | None = 0
        for _ in range(PAGES_MAX):
            answer = await self._view.api.get(
                queue_path(self._queue, "messages"), state="dead", limit=PAGE_ROWS, **{"from": at}
            )
            for message in answer["messages"]:
                if self._wish.reason in (None, message["reason"]) and len(letters) <= LISTED:
                    letters.append(message)
            at = answer["next"]
            if at is None or len(letters) > LISTED:
                break
        which = f"Dead letters: {self._wish.reason}" if self._wish.reason else "Dead letters"
        self._list(which, letters[:LISTED], at is not None or len(letters) > LISTED)

    async def _load_ranges(self, ranges: tuple[tuple[int, int], ...], more: bool) -> None:
        """The letters that a dry run has named."""
        wanted = [offset for first, end in ranges for offset in range(first, end)]
        letters: list[Fields] = []
        while wanted:
            answer = await self._view.api.get(
                queue_path(self._queue, "messages"), state="dead", limit=PAGE_ROWS, **{"from": wanted[0]}
            )
            found = {message["offset"]: message for message in answer["messages"]}
            letters += [found[offset] for offset in wanted if offset in found]
            behind = max(found, default=wanted[0]) + 1
            wanted = [offset for offset in wanted if offset >= behind]
        self._list("Dead letters that fit", letters, more)

    def _list(self, title: str, letters: list[Fields], more: bool) -> None:
        self._title.set_text(title)
        self._table.load(seen_rows(self._queue, letters, self._seen))
        self._more.set_text(f"The first {len(letters)} are shown." if more and letters else "")

    async def _acted(self, _: Sequence[Fields]) -> None:
        await self._look()
        await self._load()

    # --- redrive ---------------------------------------------------------------------------------

    def _form(self) -> None:
        def fields() -> None:
            tag("label", "At most", for_="ps-limit")
            limit = tag(
                "input", id="ps-limit", name_="limit", type="number", min="1", step="1", placeholder="all"
            )
            limit.props["defaultValue"] = str(self._wish.limit or "")

        self._redriving = RedriveForm(HELP, self._wish.where, fields, self._submitted)

    async def _submitted(self, event: GenericEventArguments) -> None:
        given: dict[str, Any] = event.args
        where = str(given.get("where", "")).strip()
        # No number, or 0, is as good as none: all that fit.
        wish = Wish(self._wish.reason, where or None, whole(str(given.get("limit", "")).strip()) or None)
        self._ask(wish)
        self._redriving.busy(True)
        try:
            await self._carry_out(wish, given.get("do") == "redrive")
        finally:
            if not self._view.client.is_deleted:
                self._redriving.busy(False)

    async def _carry_out(self, wish: Wish, really: bool) -> None:
        try:
            progress = await self._count(wish)
            if really and progress.matched and await self._asked(wish, progress):
                await self._redrive(wish, progress.matched)
        except ApiError as error:
            # The API's word about a condition stands at the condition.
            if error.problem == "bad-request" and wish.where is not None:
                self._redriving.say("", str(error))
            else:
                self._redriving.say("")
                self._view.notify(str(error), wrong=True)

    async def _count(self, wish: Wish) -> Progress:
        progress = Progress()
        self._redriving.say("Counting…")
        async for progress in count(self._view.api, self._queue, wish):
            if self._view.client.is_deleted:
                return Progress()
            looked_at = units.counted(progress.looked_at, "dead letter")
            self._redriving.say(f"Counting: {units.count(progress.matched)} of {looked_at}…")
        total = max(self._dead, progress.looked_at)
        self._redriving.say(
            f"{units.count(progress.matched)} of {units.counted(total, 'dead letter')} would be redriven. "
            "Nothing was changed."
        )
        shown = sum(end - first for first, end in progress.ranges)
        await self._load_ranges(progress.ranges, progress.matched > shown)
        return progress

    async def _asked(self, wish: Wish, progress: Progress) -> bool:
        number = units.counted(progress.matched, "dead letter")
        return await confirm(
            f"Redrive {number}",
            f"{number} of {self._queue} will go back behind its tail, to be consumed again. Deliveries count "
            "from 0 again, and what had a time to live has none any more.",
            f"Redrive {units.count(progress.matched)}",
            kind="primary",
        )

    async def _redrive(self, wish: Wish, matched: int) -> None:
        self._redriving.stopping = False
        self._redriving.run(True)
        progress = Progress()
        try:
            async for progress in redrive(self._view.api, self._queue, wish, matched):
                if self._view.client.is_deleted:  # whoever leaves the page stops it
                    return
                self._redriving.far(progress.redriven / matched)
                self._redriving.say(f"Redriven {units.count(progress.redriven)} of {units.count(matched)}…")
                if self._redriving.stopping:
                    break
        finally:
            if not self._view.client.is_deleted:
                self._redriving.run(False)
        await self._look()
        self._redriving.say(
            f"Redriven {units.counted(progress.redriven, 'dead letter')}; {units.count(self._dead)} left."
        )
        await self._load()

    async def _purge(self) -> None:
        view, queue = self._view, self._queue

        async def do() -> None:
            answer = await view.api.post(queue_path(queue, "purge"), dead=True)
            view.notify(f"Purged {units.counted(answer['purged'], 'dead letter')} of {queue}")
            await self._look()
            await self._load()

        if await view.run(self._look) and await confirm(
            "Purge the dead letters",
            f"{units.counted(self._dead, 'dead letter')} will be thrown away, for whatever reason they died. "
            "This cannot be undone.",
            "Purge",
            word=queue,
        ):
            await view.run(do)


def _reasons_of(row: Fields) -> dict[str, int]:
    return {reason: number for reason, number in row["dead_reasons"].items() if number}
