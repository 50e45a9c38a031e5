"""Dead letters of all queues: how many died for which reason, and back with them, many queues at once.

Queues with dead letters come from the feed; their reasons are asked for queue by queue, some at a time, and
again where the number of letters is another. Who may operate some of them ticks those that are meant (none
ticked: all), counts by a dry run what fits a reason and a condition, and redrives it.

Rules that always hold:
  * Counting and redriving go queue after queue, in portions (`redriving`): there is progress to show, and
    Stop, or leaving the page, leaves the rest where it is.
  * No more is redriven than was counted and confirmed.
  * Reason and condition are in the address.

How it fails: the API's word about a condition stands at the condition. A queue that is deleted meanwhile has
nothing to redrive; any other refusal ends it, and what was done until then is told.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlencode

from nicegui import ui
from nicegui.events import GenericEventArguments

from penstock.common import units
from penstock.dashboard.caller import ApiError, queue_path
from penstock.dashboard.feed import Tick
from penstock.dashboard.layout import confirm, style, tag
from penstock.dashboard.pages import queue_href
from penstock.dashboard.redrive_form import REASONS, RedriveForm
from penstock.dashboard.redriving import Progress, Wish, count, redrive
from penstock.dashboard.table import Column, LiveTable, Row
from penstock.dashboard.view import View
from penstock.model.rights import Right

LOOK_SECONDS: Final = 1.0
LOOKS: Final = 25
"""Queues whose reasons are asked for at a time."""

COLUMNS: Final = (
    Column("name", "Queue", "link", head=True),
    Column("dead", "Dead", "count", alarm="bad"),
    *(
        Column(reason, reason.replace("-", " ").capitalize(), "count", help=meaning)
        for reason, meaning in REASONS.items()
    ),
)
HELP: Final = (
    "Puts dead letters back behind the tails of their queues: of the queues that are ticked below, or of all "
    "where none is. Bad records only where that reason is chosen, or the condition asks for reasons."
)
FITS: Final = Column("fits", "Fit", "count", help="Would be redriven, as of the last count")
BACK: Final = Column("back", "Redriven", "count")


async def build(view: View) -> None:
    style("queue.css")
    tag("h1", "Dead letters")
    _Dead(view)


class _Dead:
    def __init__(self, view: View) -> None:
        self._view = view
        self._reasons: dict[str, Mapping[str, int]] = {}  # of queues, as they were looked at
        self._looked_at: dict[str, int] = {}  # how many letters were dead then
        self._shown: dict[str, Row] = {}
        self._picked: list[str] = []
        self._results: dict[str, dict[str, int]] = {}
        self._operates = view.may(Right.OPERATE)
        asked = view.request.query_params
        reason = asked.get("reason", "")
        self._wish = Wish(reason if reason in REASONS else None, asked.get("where", "").strip() or None)
        if self._operates:
            self._form()
        self._table = LiveTable(
            "Queues with dead letters",
            COLUMNS,
            key="name",
            noun="queue",
            sort="-dead",
            search="Find a queue",
            selectable=self._operates,
        )
        self._table.classes("ps-dead-queues")
        with self._table, tag("section", classes="ps-empty"):
            tag("h2", "No letter is dead")
        self._table.on("pick", self._pick)
        view.on_open(self._opened)
        view.on_tick(self._tick)
        view.every(LOOK_SECONDS, self._look)

    # --- the list --------------------------------------------------------------------------------

    def _rows(self) -> dict[str, Row]:
        return {
            name: {
                "name": name,
                "href": queue_href(name, part="dead", reason=self._wish.reason),
                "dead": row["dead"],
                **{reason: self._reasons.get(name, {}).get(reason, 0) for reason in REASONS},
                "fits": None,
                "back": None,
                **self._results.get(name, {}),
            }
            for name, row in self._view.feed.rows.items()
            if row["dead"] or name in self._results
        }

    def _opened(self) -> None:
        if self._view.feed.complete:
            self._show(whole=True)
            if self._operates and self._wish != Wish():
                self._view.later(self._count_only)

    def _tick(self, tick: Tick) -> None:
        self._show(whole=tick.is_first)
        if tick.is_first and self._operates and self._wish != Wish():
            self._view.later(self._count_only)

    def _show(self, *, whole: bool = False) -> None:
        rows = self._rows()
        self._table.follow(rows, self._shown, whole=whole)
        self._shown = rows

    async def _look(self) -> None:
        """Ask for the reasons of some queues where they are not known, or not any more."""
        rows = self._view.feed.rows
        stale = [name for name, row in rows.items() if row["dead"] != self._looked_at.get(name, 0)]
        for name in stale[:LOOKS]:
            try:
                row = await self._view.api.get(queue_path(name))
            except ApiError as error:
                if error.status != 404:
                    raise
                row = {"dead": 0, "dead_reasons": {}}
            self._looked_at[name], self._reasons[name] = row["dead"], row["dead_reasons"]
        if stale:
            self._show()

    def _pick(self, event: GenericEventArguments) -> None:
        self._picked = list(event.args)

    # --- the form --------------------------------------------------------------------------------

    def _form(self) -> None:
        def fields() -> None:
            tag("label", "Reason", for_="ps-reason")
            with tag("select", classes="ps-field", id="ps-reason", name_="reason"):
                tag("option", "any", value="")
                for reason in REASONS:
                    option = tag("option", reason, value=reason)
                    option.props["selected"] = reason == self._wish.reason

        self._redriving = RedriveForm(HELP, self._wish.where, fields, self._submitted)

    async def _submitted(self, event: GenericEventArguments) -> None:
        given: dict[str, Any] = event.args
        reason = given.get("reason", "")
        where = str(given.get("where", "")).strip()
        self._wish = Wish(reason if reason in REASONS else None, where or None)
        words = self._wish.fields()
        ui.navigate.history.replace(f"/dead?{urlencode(words)}" if words else "/dead")
        await self._carry_out(given.get("do") == "redrive")

    async def _count_only(self) -> None:
        await self._carry_out(False)

    # --- what is done ----------------------------------------------------------------------------

    def _chosen(self) -> list[str]:
        """The queues that are meant, of those that the visitor may operate."""
        user, rows = self._view.session.user, self._view.feed.rows
        names = self._picked or sorted(name for name, row in rows.items() if row["dead"])
        may = Right.OPERATE if self._wish.where is None else Right.OPERATE | Right.READ
        return [name for name in names if name in rows and user is not None and user.may(may, name)]

    async def _carry_out(self, really: bool) -> None:
        self._redriving.stopping = False
        self._results = {}
        self._redriving.busy(True)
        self._redriving.run(True)
        try:
            queues = self._chosen()
            counts = await self._count(queues)
            if really and counts and not self._redriving.stopping and await self._asked(counts):
                await self._redrive(counts)
        except ApiError as error:
            if error.problem == "bad-request" and self._wish.where is not None:
                self._redriving.say("", str(error))
            else:
                self._view.notify(str(error), wrong=True)
        finally:
            if not self._view.client.is_deleted:
                self._redriving.busy(False)
                self._redriving.run(False)

    async def _count(self, queues: Sequence[str]) -> dict[str, int]:
        """How many fit in each queue where some do."""
        self._redriving.say("Counting…")
        self._table.show_columns((*COLUMNS[:2], FITS, *COLUMNS[2:]))
        found: dict[str, int] = {}
        looked_at = 0
        for at, queue in enumerate(queues):
            progress = Progress()
            try:
                async for so_far in count(self._view.api, queue, self._wish):
                    progress = so_far
                    if self._redriving.stopping or self._view.client.is_deleted:
                        break
            except ApiError as error:
                if error.status != 404:
                    raise
            if self._view.client.is_deleted:
                return {}
            row = self._view.feed.rows.get(queue)
            looked_at += max(progress.looked_at, row["dead"] if row is not None else 0)
            self._results[queue] = {"fits": progress.matched}
            if progress.matched:
                found[queue] = progress.matched
            self._redriving.say(f"Counting: {units.count(sum(found.values()))} of {units.count(looked_at)}…")
            self._redriving.far((at + 1) / len(queues))
            self._show()
            if self._redriving.stopping:
                break
        total = f"{units.count(sum(found.values()))} of {units.counted(looked_at, 'dead letter')}"
        of_queues = units.counted(len(found), "queue")
        stopped = "Stopped. " if self._redriving.stopping else ""
        self._redriving.say(f"{stopped}{total} would be redriven, of {of_queues}. Nothing was changed.")
        return found

    async def _asked(self, counts: Mapping[str, int]) -> bool:
        self._redriving.run(False)
        number = units.counted(sum(counts.values()), "dead letter")
        names = ", ".join(f"{queue} ({units.count(its)})" for queue, its in list(counts.items())[:10])
        more = f" and {len(counts) - 10} more" if len(counts) > 10 else ""
        return await confirm(
            f"Redrive {number} of {units.counted(len(counts), 'queue')}",
            f"{names}{more}. They will go back behind the tails of their queues, to be consumed again. "
            "Deliveries count from 0 again, and what had a time to live has none any more.",
            f"Redrive {units.count(sum(counts.values()))}",
            kind="primary",
        )

    async def _redrive(self, counts: Mapping[str, int]) -> None:
        total, done = sum(counts.values()), 0
        self._redriving.run(True)
        self._table.show_columns((*COLUMNS[:2], FITS, BACK, *COLUMNS[2:]))
        try:
            for queue, matched in counts.items():
                before = done
                try:
                    async for progress in redrive(self._view.api, queue, self._wish, matched):
                        if self._view.client.is_deleted:  # whoever leaves the page stops it
                            return
                        done = before + progress.redriven
                        self._results[queue] = {"fits": matched, "back": progress.redriven}
                        self._redriving.say(
                            f"Redriven {units.count(done)} of {units.count(total)}, in {queue}…"
                        )
                        self._redriving.far(done / total)
                        if self._redriving.stopping:
                            break
                except ApiError as error:
                    if error.status != 404:
                        raise
                self._show()
                if self._redriving.stopping:
                    break
        finally:
            if not self._view.client.is_deleted:
                stopped = "Stopped. " if self._redriving.stopping else ""
                self._redriving.say(
                    f"{stopped}Redriven {units.count(done)} of {units.counted(total, 'dead letter')}."
                )
