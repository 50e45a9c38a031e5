"""Confirm: one question before something is done; `y` does it, and anything that means no does not."""

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

from penstock.top.columns import QUIET, STRONG


class Confirm(ModalScreen[bool]):
    """Its result is whether the answer was yes. The question is text, never markup."""

    DEFAULT_CSS = """
    Confirm { align: center middle; }
    Confirm Vertical {
        width: auto; max-width: 76; height: auto; padding: 0 2;
        background: ansi_default; border: round ansi_yellow;
    }
    Confirm Static { width: auto; max-width: 70; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape,q", "answer(False)", "no", key_display="n"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Text(self._question))
            keys = Text.assemble(("y", STRONG), (" yes   ", QUIET), ("n", STRONG), (" no", QUIET))
            yield Static(Text("\n").append_text(keys))

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)
