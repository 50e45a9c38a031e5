"""What the parts of a queue's page share: where one is, choices, commands for a terminal."""

import contextlib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nicegui.elements.mixins.text_element import TextElement

from penstock.dashboard.layout import tag
from penstock.dashboard.view import View


def whole(text: str) -> int | None:
    """A whole number that somebody typed; None where it is none, or too large for an offset."""
    return int(text) if re.fullmatch("[0-9]{1,16}", text) is not None else None


def crumbs(*links: tuple[str, str]) -> None:
    """The way back from here: texts and addresses."""
    with tag("nav", classes="ps-crumbs", aria_label="The way back"), tag("ol"):
        for text, href in links:
            with tag("li"):
                tag("a", text, href=href, dir="auto")


class Choice:
    """A few buttons in a row, one of them pressed. `on_choose` gets its key, and may be a coroutine."""

    def __init__(
        self, label: str, choices: Mapping[str, str], chosen: str, on_choose: Callable[[str], Any]
    ) -> None:
        self._on_choose = on_choose
        self._buttons: dict[str, TextElement] = {}
        with tag("div", classes="ps-choice", role="group", aria_label=label):
            for key, text in choices.items():
                self._buttons[key] = tag("button", text, type="button", data_choice=key)
                self._buttons[key].on("click", self._clicked(key), args=[])
        self.choose(chosen)

    def _clicked(self, key: str) -> Callable[[], Any]:
        def clicked() -> Any:
            self.choose(key)
            return self._on_choose(key)

        return clicked

    def choose(self, chosen: str) -> None:
        """Show which one is pressed."""
        for key, element in self._buttons.items():
            element.props["aria-pressed"] = str(key == chosen).lower()
            element.update()


def terminal(view: View, *commands: Sequence[str]) -> TextElement:
    """The same from a terminal, to be copied; the element with the commands."""
    with tag("details", classes="ps-terminal"):
        tag("summary", "The same in a terminal")
        lines = command_lines(view, *commands)
        return tag("pre", lines, "ps-code", tabindex="0", role="group", aria_label="Commands")


def command_lines(view: View, *commands: Sequence[str]) -> str:
    url = str(view.request.base_url).rstrip("/")
    return "\n".join(shlex.join(["penstock", *command, "--url", url]) for command in commands)


@contextlib.contextmanager
def columns() -> Iterator[None]:
    """Panels beside each other where there is room."""
    with tag("div", classes="ps-columns"):
        yield
