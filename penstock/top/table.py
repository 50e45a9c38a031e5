"""QueueTable: the queues below each other, of which only the lines on the screen are ever drawn.

So a thousand queues cost no more than the twenty that are seen. The headings stay where they are while the
rest scrolls.

Rules that always hold:
  * The cursor is on the first line until somebody moves it. From then on it stays with its queue, wherever
    that goes: what a key does is done to the queue that was seen under the cursor.
  * Names go through `tables.shown`, and are never read as markup.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from penstock.cli.queues import in_order
from penstock.client.http_core import Answer
from penstock.common import tables
from penstock.top import columns as c
from penstock.top.sparks import spark
from penstock.top.wishes import Open

HEADING_LINES = 1
CURSOR = Style(reverse=True)
HEADING = Style(dim=True)
HEADING_SORTED = Style(bold=True)

Cell = Sequence[Segment]


class QueueTable(ScrollView, can_focus=True):
    DEFAULT_CSS = """
    QueueTable { height: 1fr; overflow-x: hidden; overflow-y: auto; padding: 0 1; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "open", key_display="Enter"),
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup,ctrl+b", "page(-1)", show=False),
        Binding("pagedown,ctrl+f,space", "page(1)", show=False),
        Binding("home,g", "first", show=False),
        Binding("end,G", "last", show=False),
        Binding("s", "sort", "sort"),
        Binding("S", "reverse", "reverse"),
    ]

    def __init__(self, sort: str, trend: Callable[[str], Sequence[float]]) -> None:
        super().__init__()
        self.sort = sort
        self.reversed = False
        self.filter = ""
        self._trend = trend
        self._every: list[Answer] = []
        self._rows: list[Answer] = []
        self._widths: c.Widths = c.grown({}, [])
        self._name: str | None = None  # that the cursor is with; None: the first line, whoever that is
        self._at = 0

    # --- what is shown -------------------------------------------------------------------------------

    def show(self, queues: list[Answer]) -> None:
        """These are the queues now, by name."""
        self._every = queues
        self._arrange()

    def choose(self, text: str) -> None:
        """Only queues with this text in their names."""
        self.filter = text
        self._widths = {}
        self._arrange()

    @property
    def current(self) -> Answer | None:
        """The queue under the cursor."""
        return self._rows[self._at] if self._rows else None

    @property
    def count(self) -> int:
        """How many queues are shown."""
        return len(self._rows)

    def _arrange(self) -> None:
        wanted = self.filter.casefold()
        rows = [it for it in self._every if wanted in it["name"].casefold()] if wanted else self._every
        rows = in_order(rows, self.sort)
        self._rows = rows[::-1] if self.reversed else rows
        self._widths = c.grown(self._widths, self._rows)
        self.virtual_size = Size(0, len(self._rows) + HEADING_LINES)
        self._place_cursor()
        self.refresh()

    def _place_cursor(self) -> None:
        if self._name is None:
            self._at = 0
            return
        for at, queue in enumerate(self._rows):
            if queue["name"] == self._name:
                if at != self._at:
                    self._at = at
                    self._reveal()
                return
        # It is gone, or filtered out: whoever is in its place now.
        self._at = min(self._at, max(len(self._rows) - 1, 0))

    # --- drawing -------------------------------------------------------------------------------------

    @property
    def _width(self) -> int:
        """What the scrollbar leaves."""
        return self.scrollable_content_region.width

    def render_line(self, y: int) -> Strip:
        width = self._width
        shape = c.layout(self._widths, width)
        if y < HEADING_LINES:
            return _strip(self._heading(shape), width, self.rich_style)
        at = y - HEADING_LINES + round(self.scroll_y)
        if at >= len(self._rows):
            return Strip.blank(width, self.rich_style)
        strip = _strip(self._cells(self._rows[at], shape), width, self.rich_style)
        # One colour for the whole line: what is under the cursor has to be readable.
        return Strip([Segment(strip.text, CURSOR)], width) if at == self._at else strip

    def _heading(self, shape: c.Widths) -> Iterator[Cell]:
        for field, width in shape.items():
            title = c.title_of(c.BY_FIELD[field], self.sort, self.reversed)
            style = HEADING_SORTED if field == self.sort else HEADING
            yield [Segment(c.fit(title, width, field not in (c.NAME, c.TREND)), style)]

    def _cells(self, queue: Answer, shape: c.Widths) -> Iterator[Cell]:
        for field, width in shape.items():
            if field == c.NAME:
                yield _name_cell(queue, width)
            elif field == c.TREND:
                moments = self._trend(queue["name"])
                drawn = spark(moments, width)[0] if any(moments[-width:]) else " " * width
                yield [Segment(drawn, c.TRACE)]
            else:
                value = queue[field]
                yield [Segment(c.fit(c.text_of(field, value), width, True), c.style_of(field, value))]

    # --- keys and mouse ------------------------------------------------------------------------------

    def action_move(self, lines: int) -> None:
        self._move_to(self._at + lines)

    def action_page(self, pages: int) -> None:
        self._move_to(self._at + pages * max(self.size.height - HEADING_LINES - 1, 1))

    def action_first(self) -> None:
        self._move_to(0)
        self._name = None

    def action_last(self) -> None:
        self._move_to(len(self._rows) - 1)

    def action_open(self) -> None:
        if self.current is not None:
            self.post_message(Open(self.current["name"]))

    def action_sort(self) -> None:
        shown = [field for field in c.SORTABLE if field in self._widths or field == self.sort]
        self.sort_by(shown[(shown.index(self.sort) + 1) % len(shown)])

    def action_reverse(self) -> None:
        self.reversed = not self.reversed
        self._arrange()

    def sort_by(self, field: str) -> None:
        """In the order of a column, as it goes by itself: names up, numbers down."""
        self.sort, self.reversed = field, False
        self._arrange()

    def on_click(self, event: events.Click) -> None:
        place = event.get_content_offset(self)
        if place is None:
            return
        if place.y < HEADING_LINES:
            self._click_heading(place.x)
            return
        at = place.y - HEADING_LINES + round(self.scroll_y)
        if at < len(self._rows):
            self._move_to(at)
            if event.chain > 1:
                self.action_open()

    def _click_heading(self, x: int) -> None:
        start = 0
        gap = c.gap_of(self._width)
        for field, width in c.layout(self._widths, self._width).items():
            if start <= x < start + width + gap and field != c.TREND:
                if field == self.sort:
                    self.action_reverse()
                else:
                    self.sort_by(field)
                return
            start += width + gap

    def _move_to(self, at: int) -> None:
        if not self._rows:
            return
        self._at = min(max(at, 0), len(self._rows) - 1)
        self._name = self._rows[self._at]["name"]
        self._reveal()
        self.refresh()

    def _reveal(self) -> None:
        """Scroll so far that the line of the cursor can be seen below the headings."""
        lines = self.size.height - HEADING_LINES
        top = round(self.scroll_y)
        if self._at < top:
            self.scroll_to(y=self._at, animate=False, immediate=True)
        elif self._at >= top + lines:
            self.scroll_to(y=self._at - lines + 1, animate=False, immediate=True)


def _name_cell(queue: Answer, width: int) -> Cell:
    name = tables.shown(queue["name"])
    if not queue["paused"]:
        return [Segment(c.fit_name(name, width))]
    text = c.fit_name(name, min(cell_len(name), width - len(c.PAUSED)))
    return [Segment(text), Segment(c.fit(c.PAUSED, width - cell_len(text)), c.WARN)]


def _strip(cells: Iterator[Cell], width: int, style: Style) -> Strip:
    """Cells with their gaps, filled up to the width."""
    segments: list[Segment] = []
    for cell in cells:
        if segments:
            segments.append(Segment(" " * c.gap_of(width), style))
        segments += [Segment(text, style + own if own else style) for text, own, _ in cell]
    return Strip(segments).adjust_cell_length(width, style)
