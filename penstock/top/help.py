"""Help: every key, on one screen over the others."""

from typing import ClassVar, Final

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

from penstock.top.columns import QUIET, STRONG

KEYS: Final = (
    ("↑ ↓  k j", "one queue, or one line, up or down"),
    ("PgUp PgDn", "a page up or down; Space is down, too"),
    ("Home End  g G", "the first, the last"),
    ("Enter", "look into the queue; of a list, into its queue"),
    ("Esc", "back to all queues; show all again"),
    ("/", "only queues whose names have this in them"),
    ("s  S", "sort by the next column; the other way round"),
    ("a", "what needs attention, and what to do"),
    ("c", "connections; x there ends one"),
    ("l", "dead letters by reason; r there redrives, x purges"),
    ("n", "readers with a name, and pipelines"),
    ("p", "pause the queue, or resume it"),
    ("r", "put its dead letters back"),
    ("q  Ctrl-C", "leave"),
)


class Help(ModalScreen[None]):
    """Any key that ends something ends it."""

    DEFAULT_CSS = """
    Help { align: center middle; background: transparent; }
    Help Vertical {
        width: auto; height: auto; padding: 0 2;
        background: ansi_default; border: round ansi_cyan;
    }
    Help Static { width: auto; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark,escape,enter,q", "dismiss", "close", key_display="Esc"),
    ]

    def compose(self) -> ComposeResult:
        wide = max(len(keys) for keys, _ in KEYS)
        with Vertical():
            for keys, meaning in KEYS:
                yield Static(Text.assemble((keys.ljust(wide + 2), STRONG), meaning))
            yield Static(Text("\nEsc closes this", QUIET))
