"""The first page: totals on top, then every queue, as they change."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from nicegui.elements.mixins.text_element import TextElement

from penstock.common import units
from penstock.control.frames import Fields
from penstock.dashboard.chart import Chart, Series
from penstock.dashboard.feed import Feed, Tick, Totals
from penstock.dashboard.findings import Findings
from penstock.dashboard.layout import tag
from penstock.dashboard.pages import queue_href
from penstock.dashboard.sending import send_button
from penstock.dashboard.table import Column, LiveTable, Row
from penstock.dashboard.view import View
from penstock.model.rights import Right

SPARK_SECONDS: Final = 120.0

COLUMNS: Final = (
    Column("name", "Queue", "link", head=True, badges="state"),
    Column("rate_in", "In", "rate", unit="/s", help="Messages accepted per second, lately"),
    Column("rate_out", "Out", "rate", unit="/s", help="Messages acknowledged per second, lately"),
    Column("ready", "Ready", "count", help="Messages that wait for a consumer"),
    Column("held", "Held", "count", help="Messages that a consumer has and has not settled"),
    Column("delayed", "Delayed", "count", help="Messages that nobody gets before their time"),
    Column("oldest_at", "Oldest", "since", help="Age of the oldest message that is not settled"),
    Column("dead", "Dead", "count", alarm="bad", help="Dead letters"),
    Column("consumers", "Consumers", "count"),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A tile: one of the totals."""

    field: str
    label: str
    say: Callable[[Any], str]  # a number, or None where there is none
    kind: str
    color: str
    unit: str = ""
    alarm: bool = False  # anything but 0 stands out
    aside: str = ""  # another total, told beside it where it is not 0


FIGURES: Final = (
    Figure("rate_in", "In", units.rate, "rate", "in", "/s"),
    Figure("rate_out", "Out", units.rate, "rate", "out", "/s"),
    Figure("ready", "Ready", units.count, "count", "ready", aside="delayed"),
    Figure("held", "Held", units.count, "count", "muted"),
    Figure("oldest_seconds", "Oldest", units.age, "age", "warn"),
    Figure("dead", "Dead", units.count, "count", "dead", alarm=True),
)


class _Tile:
    """One total: its name, its value, and how it went lately."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure
        with tag("section", classes="ps-tile", aria_label=figure.label):
            with tag("h2", figure.label):
                self._aside = tag("span", "", data_total=figure.aside) if figure.aside else None
            with tag("p", classes="ps-tile-value"):
                self._value: TextElement = tag("span", "–", data_total=figure.field)
                if figure.unit:
                    tag("span", figure.unit, "ps-unit")
            self.chart = Chart(
                f"{figure.label}, the last two minutes",
                [Series(figure.label, figure.color)],
                kind=figure.kind,
                unit=figure.unit,
                height=36,
                axes=False,
                area=True,
                span_seconds=SPARK_SECONDS,
            )

    def show(self, totals: Totals) -> None:
        value: float | None = getattr(totals, self.figure.field)
        self._value.set_text(self.figure.say(value))
        if self.figure.alarm:
            self._value.classes(**{"add" if value else "remove": "ps-text-bad"})
        if self._aside is not None:
            number = getattr(totals, self.figure.aside)
            self._aside.set_text(f"{units.count(number)} {self.figure.aside}" if number else "")

    def point(self, totals: Totals) -> tuple[float, float | None]:
        return totals.at, getattr(totals, self.figure.field)


async def build(view: View) -> None:
    tag("h1", "Queues", "ps-hidden")
    findings = Findings("Needs attention")
    with tag("div", classes="ps-tiles"):
        tiles = [_Tile(figure) for figure in FIGURES]
    table = LiveTable(
        "Queues",
        COLUMNS,
        key="name",
        noun="queue",
        sort="name",
        search="Find a queue",
        url_state=True,
    )
    with table:
        _first_steps(view)
    with table.add_slot("bar"):
        send_button(view)

    def opened() -> None:
        history = list(view.feed.history)
        for tile in tiles:
            tile.chart.load([tile.point(totals) for totals in history])
        if view.feed.complete:
            table.load([_new_row(queue, view.feed) for queue in view.feed.rows.values()])

    def tick(tick: Tick) -> None:
        findings.show(tick.attention.findings, tick.attention.count)
        for tile in tiles:
            tile.show(tick.totals)
            tile.chart.push(tile.point(tick.totals))
        if tick.is_first:
            opened()  # The feed knows more than this tick: what was before it.
            return
        table.drop(tick.gone)
        if tick.changed:
            table.patch([_new_row(queue, view.feed) for queue in tick.changed])

    view.on_open(opened)
    view.on_tick(tick)


def _new_row(queue: Fields, feed: Feed) -> Row:
    states = feed.states.get(queue["name"], ())
    # That it is paused is seen at once, and whether anything waits or not.
    paused = [["paused", "warn"]] if queue["paused"] and all(state != "paused" for state, _ in states) else []
    return {
        "name": queue["name"],
        "href": queue_href(queue["name"]),
        "state": [*paused, *states],
        **{column.key: queue[column.key] for column in COLUMNS[1:]},
    }


def _first_steps(view: View) -> None:
    """What to do where there is no queue."""
    with tag("section", classes="ps-empty"):
        tag("h2", "No queue yet")
        user = view.session.user
        if user is not None and not user.may(Right.SEND, "orders"):
            tag("p", "Whatever you may look at appears here by itself, as soon as it is there.")
            return
        tag("p", "A queue is there with its first message. Send one from a terminal:")
        token = " --token TOKEN" if view.session.name else ""
        url = str(view.request.base_url).rstrip("/")
        tag("pre", f"penstock send orders 'hello' --url {url}{token}", "ps-code", tabindex="0")
        tag("p", "It appears here by itself.")
        send_button(view, "Or send one from here…")
