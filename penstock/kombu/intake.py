"""The intake of a channel: who asks which queue for how many messages.

A source is a queue, or one of those that a queue with priorities is made of; each has a line of its own. A
request that waits for messages stands at a source until there is one, so that nothing polls, and only for
as many as the channel's window has room for.

    one source      a request stands there whenever there is room, for all of it
    more of them    they are asked one after the other, the highest priority first, without waiting:
                    whoever has something is asked again only behind those that come before it. At those
                    that had nothing a request for one message stands, in room of its own where the window
                    is wide, and where it is narrow only when none had anything: then what comes in at two
                    places at once does not fit, and goes back, and nothing stands anywhere while the
                    window is full.

How it fails: `OSError`, by which a connection is lost, and what `checked` raises.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock.kombu.line import Answer, Line

if TYPE_CHECKING:
    from penstock.kombu.transport import Transport

WAIT_SECONDS: Final = 30
"""The longest that the broker lets a request stand."""
TAKE_MAX: Final = 100
"""Messages at once, for a channel without a window."""
COUNT_MAX: Final = 1000
"""Messages at once, as the broker has it."""

Row = dict[str, Any]  # of the answer to a take


class Source:
    def __init__(self, queue: str, name: str, priority: int, line: Line) -> None:
        self.queue = queue
        self.name = name  # of the queue in the broker
        self.priority = priority
        self.line = line
        self.stands = False  # its request waits for a message to come
        self.had_nothing = False


class Intake:
    def __init__(
        self,
        transport: "Transport",
        room: Callable[[], tuple[int, int]],
        accept: Callable[[Source, list[Row]], None],
        give_back: Callable[[Source, list[Row]], None],
    ) -> None:
        self._transport = transport
        self._room = room  # the window (0: none) and what is left of it
        self._accept = accept
        self._give_back = give_back
        self._sources: list[Source] = []

    def add(self, queue: str, names: dict[int, str]) -> None:
        """Take from a queue, which has these names by priority."""
        for priority, name in names.items():
            self._sources.append(Source(queue, name, priority, self._transport.line()))
        self._sources.sort(key=lambda it: -it.priority)

    def remove(self, queue: str) -> None:
        """Take nothing more from it; what was on its way here goes back."""
        for source in [it for it in self._sources if it.queue == queue]:
            self._sources.remove(source)
            if source.line.is_waiting:
                self._give_back(source, self._withdraw(source))
            source.line.close()

    def pump(self) -> None:
        """Ask for what there is room for."""
        window, left = self._room()
        if any(it.line.is_waiting and not it.stands for it in self._sources):
            return
        if len(self._sources) == 1:
            if left > 0 and not self._sources[0].line.is_waiting:
                self._ask(self._sources[0], left, stands=True)
            return
        is_wide = not window or window >= 2 * len(self._sources)
        unasked = [it for it in self._sources if not it.stands and not it.had_nothing]
        if left <= 0 or (unasked and not is_wide):
            for source in [it for it in self._sources if it.stands]:
                self._take_in(source, self._withdraw(source))
            unasked = [it for it in self._sources if not it.had_nothing]
            left = self._room()[1]
        if left <= 0:
            for source in self._sources:
                source.had_nothing = False  # It will be long ago.
            return
        if is_wide or not unasked:
            for source in self._sources:
                if source.had_nothing:
                    self._ask(source, 1, stands=True)
        if is_wide and window:
            left -= sum(it.stands for it in self._sources)
        if unasked and left > 0:
            self._ask(unasked[0], left, stands=False)

    def _ask(self, source: Source, count: int, *, stands: bool) -> None:
        source.stands, source.had_nothing = stands, False
        wait = WAIT_SECONDS * stands
        query = {"max": min(count, COUNT_MAX), "wait": wait, "lease": self._transport.lease_seconds}
        self._transport.send(
            source.line, "take", source.name, query, partial(self._readable, source), wait=wait
        )

    def _readable(self, source: Source) -> None:
        answer = source.line.receive()
        if answer is not None:
            self._take_in(source, self._rows(source, answer))
            self.pump()

    def _take_in(self, source: Source, rows: list[Row]) -> None:
        window, left = self._room()
        if window and len(self._sources) > 1 and len(rows) > left:
            rows, excess = rows[: max(left, 0)], rows[max(left, 0) :]
            self._give_back(source, excess)
        if rows:
            # The next round begins anew, and with the others of the same priority.
            for it in self._sources:
                it.had_nothing = False
            self._sources.remove(source)
            self._sources.append(source)
            self._sources.sort(key=lambda it: -it.priority)
            self._accept(source, rows)
        else:
            source.had_nothing = len(self._sources) > 1

    def _withdraw(self, source: Source) -> list[Row]:
        """Let nothing more come of a request; what has come before that."""
        answer = source.line.leave()
        source.stands = False
        return self._rows(source, answer) if answer is not None and answer.status == 200 else []

    def _rows(self, source: Source, answer: Answer) -> list[Row]:
        source.stands = False
        rows: list[Row] = self._transport.checked(answer).fields["messages"]
        return rows
