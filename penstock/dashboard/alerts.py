"""Alerts: what a person should know now, and what to do about it, on top of a page."""

from collections.abc import Sequence
from typing import NamedTuple

from nicegui.elements.mixins.text_element import TextElement

from penstock.dashboard.layout import tag


class Alert(NamedTuple):
    """One of them. `kind` is "warn" or "bad"."""

    kind: str
    title: str
    text: str
    more: Sequence[str] = ()  # lines in the words of somebody else
    href: str = ""
    link: str = ""


class Alerts:
    """The place for them; nothing is seen of it while there is none."""

    def __init__(self) -> None:
        self._box: TextElement = tag("div", classes="ps-alerts", role="status")
        self._shown: list[Alert] = []

    def show(self, alerts: list[Alert]) -> None:
        """These and no others."""
        if alerts == self._shown:
            return
        self._shown = alerts
        self._box.clear()
        with self._box:
            for alert in alerts:
                _draw(alert)


def _draw(alert: Alert) -> None:
    with tag("section", classes=f"ps-alert ps-alert-{alert.kind}", aria_label=alert.title):
        tag("h2", alert.title)
        tag("p", alert.text)
        if alert.more:
            with tag("ul"):
                for line in alert.more:
                    tag("li", line)
        if alert.href:
            tag("a", alert.link, href=alert.href)
