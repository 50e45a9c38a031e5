"""Tile: one figure in large type, with its name above and a few words below."""

from penstock.dashboard.layout import tag


class Tile:
    """See the module's docstring. `field` marks the figure for those who look for it (`data-total`)."""

    def __init__(self, label: str, field: str) -> None:
        with tag("section", classes="ps-tile", aria_label=label):
            tag("h2", label)
            self._value = tag("p", "–", "ps-tile-value", data_total=field)
            self._note = tag("p", "", "ps-tile-note")

    def show(self, value: str, note: str = "", kind: str = "") -> None:
        """`kind`: "", "warn" or "bad"."""
        self._value.set_text(value)
        self._value.classes(
            replace=f"ps-tile-value ps-text-{kind}" if kind else "ps-tile-value",
        )
        self._note.set_text(note)
