"""Finding messages: a search of one queue, or of many, whose results come as they are found.

The same on the page `/search` and in the part Messages of a queue's page. A search is its `Query`, all of
which is in the address: whoever opens it sees the same search run.

Rules that always hold:
  * Nothing is searched here: condition, states and times go to the API, which judges.
  * A search ends with its page, with Stop, or after `ROWS` of what it finds; then it can go on.
  * What was found stays as it was found: nothing moves, and states are those of that moment.

How it fails: the API's word about a condition stands at the condition; any other is shown as everywhere.
"""

import asyncio
import contextlib
import json
from base64 import b64decode
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from nicegui import ui
from nicegui.events import GenericEventArguments

from penstock.common import units
from penstock.control.frames import Fields
from penstock.dashboard import exporting, payload
from penstock.dashboard.acting import Selection, may_act
from penstock.dashboard.caller import ApiError, Caller, queue_path
from penstock.dashboard.layout import button, panel, tag
from penstock.dashboard.pages import queue_href
from penstock.dashboard.queue_blocks import command_lines, terminal
from penstock.dashboard.queue_messages import COLUMNS, STATE_KINDS, STATES, message_table, row_of
from penstock.dashboard.table import Column, Row
from penstock.dashboard.view import View

ROWS: Final = 200
"""So many are shown before somebody asks for more."""

LOOKED_AT: Final = 500
"""Messages that are looked at again with one call."""

ROWS_MAX: Final = 5000
"""And no more than so many at all: who wants to have them exports them."""

FORMATS: Final = {"ndjson": "NDJSON", "csv": "CSV", "parquet": "Parquet"}
TIMES: Final = ("-15m", "-1h", "-24h", "-7d")

EXAMPLES: Final = (
    "value.order = 4711",
    "value.region = 'north' and value.amount >= 100",
    "value like '%timed out%' or headers.tenant = 'acme'",
    "died > '-15m' and attempts < 3",
)
WHYS: Final = {
    "limit": "There is more. ",
    "time": "It took too long and was ended; it can go on. ",
    "missing": "Some could not be looked at. ",
    "stopping": "The broker is stopping. ",
    "error": "It failed. ",
}
HELP: Final = (
    "Columns of a condition: value, and value.field of a payload that is JSON; headers.name; state, due, "
    "reason, died, attempts, consumer, protocol, timestamp, expires, retries, offset, id, value_bytes. From "
    "and to: an offset, a time in UTC (2026-11-15, 2026-11-15T10:00:00Z), or so long ago (-15m, -1h, -7d)."
)
TRIES: Final = 20
TRY_SECONDS: Final = 0.5
WORDS: Final = ("queues", "where", "state", "from", "to", "newest")
QUEUE_COLUMN: Final = Column("queue", "Queue", sortable=False)


@dataclass(frozen=True, slots=True)
class Query:
    """What is looked for."""

    queue: str = ""  # of a queue's page; empty: of many
    queues: str = ""  # a pattern; empty: all
    where: str = ""
    states: tuple[str, ...] = ()  # none: any
    start: str = ""  # an offset, a time, or so long ago
    end: str = ""
    newest: bool = True

    @classmethod
    def of(cls, given: Mapping[str, str], queue: str = "") -> "Query | None":
        """What an address asks for; None where it asks for nothing. On a queue's page others have a `state`,
        too: there it is the direction that makes it a search."""
        if given.keys().isdisjoint(("newest",) if queue else WORDS):
            return None
        states = given.get("state", "").split(",")
        return cls(
            queue,
            "" if queue else given.get("queues", "").strip(),
            given.get("where", "").strip(),
            tuple(state for state in STATE_KINDS if state in states),
            given.get("from", "").strip(),
            given.get("to", "").strip(),
            given.get("newest") != "false",
        )

    def words(self) -> dict[str, str]:
        """As the API has it in a query, and so does the address."""
        words = {
            "queues": self.queues,
            "where": self.where,
            "state": ",".join(self.states),
            "from": self.start,
            "to": self.end,
        }
        return {
            **{name: text for name, text in words.items() if text},
            "newest": str(self.newest).lower(),
        }

    @property
    def href(self) -> str:
        if self.queue:
            return queue_href(self.queue, part="messages", **self.words())
        return f"/search?{urlencode(self.words())}"

    @property
    def path(self) -> str:
        return queue_path(self.queue, "search") if self.queue else "/v1/search"

    @property
    def command(self) -> list[str]:
        """The same search for a terminal."""
        given = {
            "--where": self.where,
            "--state": ",".join(self.states),
            "--from": self.start.removeprefix("-"),  # There, 1h is an hour ago.
            "--to": self.end.removeprefix("-"),
        }
        words = [word for flag, text in given.items() if text for word in (flag, text)]
        return ["search", self.queue or self.queues or "*", *words, *(["--newest"] if self.newest else [])]

    def export_href(self, form: str) -> str:
        queue = {"queue": self.queue} if self.queue else {}
        return f"{exporting.PATH}?{urlencode({'format': form, **queue, **self.words()})}"


async def results(
    api: Caller, query: Query, after: str | None = None, limit: int = ROWS
) -> AsyncIterator[list[Fields]]:
    """The lines of a search, some at a time, as they come; who leaves the loop breaks it off."""
    rest = b""
    stream = api.stream("GET", query.path, None, None, limit=limit, after=after, **query.words())
    async with contextlib.aclosing(stream) as parts:
        async for part in parts:
            *lines, rest = (rest + part).split(b"\n")
            if lines:
                yield [json.loads(line) for line in lines]


def found_row(found: Fields) -> Row:
    """A message that was found, and in which place, as a row of a table."""
    text = found.get("value")
    beginning = (
        b64decode(found.get("value_base64", ""))
        if text is None
        else text[: payload.PREVIEW_BYTES].encode()[: payload.PREVIEW_BYTES]
    )
    queue, size = found["queue"], found["value_bytes"]
    message = {**found, "time": found["timestamp"]}
    return {
        **row_of(queue, message, payload.line_of(beginning, size), size),
        "key": key_of(queue, found["offset"]),
        "queue": queue,
        "place": found["place"],
    }


def offsets_of(messages: Sequence[Fields]) -> dict[str, list[int]]:
    """By queue."""
    offsets: dict[str, list[int]] = {}
    for it in messages:
        offsets.setdefault(it["queue"], []).append(it["offset"])
    return offsets


def key_of(queue: str, offset: int) -> str:
    return f"{queue}:{offset}"


class Finder:
    """A form, what is found, and how far it got."""

    def __init__(self, view: View, queue: str = "") -> None:
        self._view = view
        self._queue = queue
        self._query = Query.of(view.request.query_params, queue)
        self._found: dict[str, Fields] = {}
        self._next: str | None = None
        self._turn = 0  # of searches: a new one ends the one before
        self._form(self._query or Query(queue))
        with panel(classes="ps-browse") as self._results:
            self._results.props["aria-label"] = "Found"
            with tag("div", classes="ps-bar"):
                self._status = tag("p", "", "ps-search-status", role="status")
                self._stop = button("Stop", self._stop_it)
                with tag("span", classes="ps-actions ps-apart") as self._exports:
                    tag("span", "Export:", "ps-help")
                    self._links = {form: tag("a", label, download="") for form, label in FORMATS.items()}
            self._bar = tag("progress", aria_label="Searched so far", max="1")
            columns = COLUMNS if queue else (COLUMNS[0], QUEUE_COLUMN, *COLUMNS[1:])
            self._table = message_table(
                "Found messages", columns=columns, key="key", selectable=may_act(view)
            )
            with self._table:
                self._empty = tag("p", "", "ps-empty")
            self._more = button("Go on", self._go_on)
            Selection(view, self._table, self._found, self._look_again)
        for element in (self._stop, self._bar, self._more, self._exports):
            element.set_visibility(False)
        self._results.set_visibility(self._query is not None)
        self._command = terminal(view, (self._query or Query(queue)).command)
        view.on_open(self._opened)

    # --- the form --------------------------------------------------------------------------------

    def _form(self, query: Query) -> None:
        with panel(), tag("form", classes="ps-find", role="search") as form:
            if not self._queue:
                tag("label", "Queue or pattern", for_="ps-queues")
                self._input("queues", query.queues, "all queues; orders.* for some", maxlength="255")
            tag("label", "Condition", for_="ps-where")
            self._where = self._input(
                "where", query.where, EXAMPLES[0], maxlength="10000", aria_describedby="ps-where-wrong"
            )
            self._wrong = tag("p", "", "ps-wrong", id="ps-where-wrong", role="alert")
            with tag("div", classes="ps-bar"):
                with tag("fieldset", classes="ps-states"):
                    tag("legend", "States", "ps-hidden")
                    for state in STATE_KINDS:
                        with tag("label"):
                            box = tag("input", type="checkbox", name_="state", value=state)
                            box.props["checked"] = state in query.states
                            tag("span", STATES[state])
                for name, text, given, none in (
                    ("from", "From", query.start, "the beginning"),
                    ("to", "to", query.end, "now"),
                ):
                    with tag("span", classes="ps-pair"):
                        tag("label", text, for_=f"ps-{name}")
                        self._input(name, given, none, maxlength="40", list_="ps-times")
                with tag("datalist", id="ps-times"):
                    for text in TIMES:
                        tag("option", value=text)
                with tag("label"):
                    box = tag("input", type="checkbox", name_="newest", value="true")
                    box.props["checked"] = query.newest
                    tag("span", "Newest first")
                with tag("div", classes="ps-actions ps-apart"):
                    tag("button", "Search", "ps-button ps-primary", type="submit")
            with tag("details", classes="ps-terminal"):
                tag("summary", "What can stand there")
                tag("p", HELP, "ps-help")
                tag("pre", "\n".join(EXAMPLES), "ps-code", tabindex="0", role="group", aria_label="Examples")
        form.on(
            "submit.prevent",
            self._submitted,
            js_handler="(event) => { const it = new FormData(event.target);"
            " emit({...Object.fromEntries(it), state: it.getAll('state').join()}) }",
        )

    def _input(self, name: str, text: str, placeholder: str, **attributes: str) -> Any:
        field = tag(
            "input",
            classes="ps-field",
            id=f"ps-{name}",
            name_=name,
            type="text",
            placeholder=placeholder,
            autocomplete="off",
            spellcheck="false",
            **attributes,
        )
        field.props["defaultValue"] = text  # What is typed from then on is the browser's.
        return field

    # --- what the visitor does -------------------------------------------------------------------

    def _opened(self) -> None:
        if self._query is not None and not self._turn:
            self._begin()
        elif not self._turn:
            self._table.load([])

    def _submitted(self, event: GenericEventArguments) -> None:
        given: dict[str, str] = {name: str(text) for name, text in event.args.items()}
        given.setdefault("newest", "false")
        self._query = Query.of(given, self._queue)
        assert self._query is not None
        ui.navigate.history.replace(self._query.href)
        self._command.set_text(command_lines(self._view, self._query.command))
        self._begin()

    def _begin(self) -> None:
        assert self._query is not None
        self._results.set_visibility(True)
        self._found.clear()
        self._table.load([])
        for form, link in self._links.items():
            link.props["href"] = self._query.export_href(form)
            link.update()
        self._search(None)

    def _go_on(self) -> None:
        self._search(self._next)

    def _stop_it(self) -> None:
        self._turn += 1
        self._say("Stopped. ")

    async def _look_again(self, messages: Sequence[Fields]) -> None:
        """Show how these stand now."""
        for queue, offsets in offsets_of(messages).items():
            for at in range(0, len(offsets), LOOKED_AT):
                some = offsets[at : at + LOOKED_AT]
                where = f"offset in ({', '.join(map(str, some))})"
                query = Query(queue, "", where, (), str(min(some)), str(max(some) + 1), newest=False)
                async for lines in results(self._view.api, query, limit=len(some)):
                    found = [line for line in lines if "offset" in line]
                    for line in found:
                        key = key_of(queue, line["offset"])
                        self._found[key] = {**line, "place": self._found[key]["place"]}
                    self._table.patch([found_row(self._found[key_of(queue, it["offset"])]) for it in found])

    # --- the search ------------------------------------------------------------------------------

    def _search(self, after: str | None) -> None:
        self._turn += 1
        turn, query = self._turn, self._query
        assert query is not None

        async def run() -> None:
            await self._run(query, after, turn)

        self._view.later(run)

    async def _run(self, query: Query, after: str | None, turn: int) -> None:
        self._told: Fields = {"searched": 0, "total": 0, "found": 0}
        self._next = None
        self._wrong_is("")
        self._empty.set_text("Searching…")
        self._say("Searching… ", running=True)
        tries = TRIES
        while turn == self._turn and not self._view.client.is_deleted:
            try:
                async for lines in results(self._view.api, query, after):
                    if turn != self._turn or self._view.client.is_deleted:
                        return
                    self._take(lines)
            except ApiError as error:
                tries -= 1
                if error.problem == "too-many-searches" and tries:
                    # Those that were ended here before may be at their last message.
                    await asyncio.sleep(TRY_SECONDS)
                    continue
                if turn == self._turn:
                    self._failed(query, error)
            return

    def _take(self, lines: list[Fields]) -> None:
        rows: list[Row] = []
        for line in lines:
            if "offset" in line:
                key = key_of(line["queue"], line["offset"])
                self._found[key] = {**line, "place": len(self._found)}
                rows.append(found_row(self._found[key]))
            elif "progress" in line:
                self._told = line["progress"]
            elif "end" in line:
                self._told = {**self._told, **line["end"]}
        if rows:
            self._table.patch(rows)
        if "complete" in self._told:
            self._ended(self._told)
        else:
            self._say("", running=True)

    def _ended(self, end: Fields) -> None:
        self._next = end["next"]
        self._empty.set_text("Nothing was found.")
        if end["why"] == "error":
            self._view.notify(end["detail"], wrong=True)
        self._say(WHYS.get(end["why"] or "", ""), missing=end.get("missing", 0))

    def _failed(self, query: Query, error: ApiError) -> None:
        self._empty.set_text("Nothing was searched.")
        self._say("Not searched.")
        if error.problem == "bad-request":
            self._wrong_is(str(error))
        else:
            self._view.notify(str(error), wrong=True)

    def _wrong_is(self, text: str) -> None:
        self._wrong.set_text(text)
        self._where.props["aria-invalid"] = "true" if text else "false"
        self._where.update()

    def _say(self, text: str, *, running: bool = False, missing: int = 0) -> None:
        """How far it got."""
        told = self._told
        searched, total = told["searched"], told["total"]
        of_all = f" of about {units.count(total)}" if total > searched else ""
        where = f", now at {told['offset']} of {told['queue']}" if running and "offset" in told else ""
        figures = f"{units.count(len(self._found))} found, {units.count(searched)}{of_all} searched{where}."
        lost = f" {units.counted(missing, 'message')} could not be looked at." if missing else ""
        self._status.set_text(f"{text}{figures}{lost}" if total or self._found or not running else text)
        self._stop.set_visibility(running)
        self._bar.set_visibility(running)
        if running:
            # Without a value it says only that something is going on.
            self._bar.props["value"] = f"{searched / total:.3f}" if total else None
            self._bar.update()
        self._more.set_visibility(self._next is not None and len(self._found) < ROWS_MAX)
        self._exports.set_visibility(bool(self._found) and not running)
