"""Tiles: figures in large type, each with its name above and a few words below."""

from penstock.dashboard.layout import tag


class Tile:
    """One of them. `field` marks the figure for those who look for it (`data-total`)."""

    def __init__(self, label: str, field: str) -> None:
        with tag("section", classes="ps-tile", aria_label=label):
            tag("h2", label)
            self._value = tag("p", "–", "ps-tile-value", data_total=field)
            self._note = tag("p", "", "ps-tile-note")

    def show(self, value: str, note: str = "", kind: str = "") -> None:
        """`kind`: "", "warn" or "bad"."""
        self._value.set_text(value)
        self._value.classes(replace=f"ps-tile-value ps-text-{kind}" if kind else "ps-tile-value")
        self._note.set_text(note)


class Tiles:
    """Tiles beside each other, by the names of their fields."""

    def __init__(self, **labels: str) -> None:
        with tag("div", classes="ps-tiles"):
            self._tiles = {field: Tile(label, field) for field, label in labels.items()}

    def show(self, **shown: tuple[str, ...]) -> None:
        """Of each, what `Tile.show` takes."""
        for field, words in shown.items():
            self._tiles[field].show(*words)
