"""Findings: what needs attention, each with why, who, what to do and where to look; on top of a page.

While the same things are wrong, only their texts change: what somebody reads or has opened stays where it is.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from nicegui.elements.mixins.text_element import TextElement

from penstock.common import units
from penstock.control.frames import Fields
from penstock.dashboard.layout import badge, headline, tag

OPEN_MAX: Final = 4
"""So many are shown at once; the others when somebody opens them."""

DRAWN_MAX: Final = 50


class Findings:
    """The place for them; nothing is seen of it while there is none.

    `here` is the address of its page, to which no link leads; `codes` are commands to copy, by state.
    """

    def __init__(self, title: str, here: str = "") -> None:
        self._here = here
        self._shown: list[tuple[object, ...]] = []
        self._items: list[_Item] = []
        self.codes: Mapping[str, str] = {}
        with tag("section", classes="ps-findings", aria_label=title, id="attention") as box:
            tag("h2", title)
            self._body = tag("div", classes="ps-alerts")
        self._box = box
        box.set_visibility(False)

    def show(self, findings: Sequence[Fields], count: int | None = None) -> None:
        """These and no others; `count`: how many there are, where these are the first of them."""
        drawn = findings[:DRAWN_MAX]
        more = (len(findings) if count is None else count) - len(drawn)
        keys = [(it["state"], it["queue"], it["reader"], it["level"], len(it["lines"])) for it in drawn]
        is_drawn = [*keys, (more, *self.codes.values())]
        if is_drawn != self._shown:
            self._shown = is_drawn
            self._draw(drawn, more)
        for item, finding in zip(self._items, drawn, strict=True):
            item.show(finding)

    def _draw(self, findings: Sequence[Fields], more: int) -> None:
        self._box.set_visibility(bool(findings))
        self._body.clear()
        with self._body:
            self._items = [self._item(it) for it in findings[:OPEN_MAX]]
            if len(findings) + more > OPEN_MAX:
                with tag("details", classes="ps-more"):
                    tag("summary", f"{len(findings) + more - OPEN_MAX:,} more")
                    with tag("div", classes="ps-alerts"):
                        self._items += [self._item(it) for it in findings[OPEN_MAX:]]
                        if more:
                            tag("p", f"And {more:,} more: penstock health lists all of them.", "ps-help")

    def _item(self, finding: Fields) -> "_Item":
        href = finding["href"]
        return _Item(finding, "" if href == self._here else href, self.codes.get(finding["state"], ""))


class _Item:
    """One of them."""

    def __init__(self, finding: Fields, href: str, code: str) -> None:
        with tag(
            "section", classes=f"ps-alert ps-alert-{finding['level']}", aria_label=headline(finding)
        ) as section:
            section.props["data-state"] = finding["state"]
            with tag("div", classes="ps-alert-head"):
                tag("h3", headline(finding))
                badge(finding["state"], finding["level"])
                self._since: TextElement = tag("span", "", "ps-alert-since")
                if href:
                    tag("a", "See more", href=href, aria_label=f"See more about {headline(finding)}")
            self._why = tag("p", "")
            self._lines = [tag("p", "", "ps-alert-line") for _ in finding["lines"]]
            self._who = tag("p", "", "ps-alert-who")
            tag("p", finding["do"])
            if code:
                tag("pre", code, "ps-code", tabindex="0")

    def show(self, finding: Fields) -> None:
        self._since.set_text(f"for {units.since(finding['since'])}")
        self._why.set_text(finding["why"])
        for element, line in zip(self._lines, finding["lines"], strict=True):
            element.set_text(line)
        who = finding["who"]
        self._who.set_text(f"Who: {', '.join(who)}" if who else "")
        self._who.set_visibility(bool(who))
