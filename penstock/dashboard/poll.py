"""Poll: an answer of the API that is asked for now and then, once for every page that shows it.

What changes without an event (connections, readers, the engine) has to be asked for, and every answer
costs the broker's own process a little. So all pages share an answer, and long ones are asked for less
often.

Rules that always hold:
  * An answer is asked for by a page that is open, in its visitor's name, and shared with those who have the
    right with every queue, too. Everybody else is told what they may see, alone.
  * At most once in `TURN_SECONDS`, and so rarely that no more than `ROWS_PER_SECOND` rows are told.

How it fails: the page says that its figures are old, and why; the next turn tries again.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

from penstock.dashboard.caller import ApiError, Caller
from penstock.dashboard.layout import tag
from penstock.dashboard.view import View
from penstock.model.rights import Right

TURN_SECONDS: Final = 2.0
ROWS_PER_SECOND: Final = 200
ANSWER_SECONDS_MAX: Final = 5.0
EARLY_SECONDS: Final = 0.5
"""A page's timer may be that much ahead of the answer's."""

TRAIL_SECONDS: Final = 300.0
TRAIL_GAP_SECONDS: Final = 60.0


class Notes(Protocol):
    """What is kept of answers."""

    def told(self, at: float, answer: Any) -> None: ...


N = TypeVar("N", bound=Notes)


class Poll:
    """`rows` says how many rows an answer has; `told` hears every answer once; `right`: of who shares it,
    None: it is one page's own."""

    def __init__(
        self,
        path: str,
        rows: Callable[[Any], int],
        told: Callable[[float, Any], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        right: Right | None = Right.READ,
        **query: object,
    ) -> None:
        self._path = path
        self._query = query
        self._right = right
        self._rows = rows
        self._told = told
        self._clock = clock
        self._asking = asyncio.Lock()
        self._answer: Any = None  # whatever the API's document promises
        self._due_at = -math.inf  # of the clock
        self.turn = 0
        """How many answers have come."""

    def expire(self) -> None:
        """The answer is known to be old: the next page asks again."""
        self._due_at = -math.inf

    def of(self, view: View, notes: N) -> "tuple[Poll, N]":
        """This one and its notes; for who is told less than others, both anew."""
        if self._right is None or view.api.may(self._right):
            return self, notes
        fresh = type(notes)()
        return Poll(self._path, self._rows, fresh.told, self._clock, None, **self._query), fresh

    async def read(self, api: Caller) -> Any:
        """The newest answer."""
        if self._right is not None and not api.may(self._right):  # Nobody else is told the same.
            self.turn += 1
            return await api.get(self._path, **self._query)
        async with self._asking:
            if self._clock() >= self._due_at:
                try:
                    async with asyncio.timeout(ANSWER_SECONDS_MAX):
                        self._answer = await api.get(self._path, **self._query)
                except TimeoutError:
                    raise ApiError(
                        503, "unavailable", f"the broker has not answered for {ANSWER_SECONDS_MAX:.0f} s"
                    ) from None
                self.turn += 1
                pause_seconds = max(TURN_SECONDS, self._rows(self._answer) / ROWS_PER_SECOND)
                self._due_at = self._clock() + pause_seconds - EARLY_SECONDS
                if self._told is not None:
                    self._told(time.time(), self._answer)
            return self._answer


class Trail:
    """Points of a chart, as far back as somebody has been looking."""

    def __init__(self) -> None:
        self.points: deque[tuple[float, ...]] = deque()

    def add(self, at: float, *values: float) -> None:
        if self.points and at - self.points[-1][0] > TRAIL_GAP_SECONDS:
            self.points.clear()
        self.points.append((at, *values))
        while self.points[0][0] < at - TRAIL_SECONDS:
            self.points.popleft()


Show = Callable[[Any, bool], None]
"""Takes an answer, and whether the browser knows nothing yet."""


def watch(view: View, poll: Poll, show: Show, *, tells: bool = True) -> None:
    """Show every answer while the page is open. What goes wrong is told here, unless others tell it."""
    notice = tag("p", "", "ps-notice", role="alert")
    notice.set_visibility(False)
    shown = 0

    def opened() -> None:
        nonlocal shown
        shown = 0

    async def turn() -> None:
        nonlocal shown
        try:
            answer = await poll.read(view.api)
        except ApiError as error:
            notice.set_text(f"What is shown here may be old: {error}. This page goes on asking.")
            notice.set_visibility(tells)
            return
        notice.set_visibility(False)
        if poll.turn != shown:
            is_first, shown = shown == 0, poll.turn
            show(answer, is_first)

    view.on_open(opened)
    view.every(TURN_SECONDS, turn)
