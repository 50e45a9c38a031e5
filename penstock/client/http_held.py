"""A message that an HTTP client holds, and the loop that it came by.

Times here are of the monotonic clock.
"""

import threading
from collections import deque
from datetime import datetime
from math import inf
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from penstock.client.http_core import Answer, body_of, said, time_of
from penstock.client.http_line import HttpLine


class Held:
    """A message in the hands of the caller, until its client is told what became of it."""

    __slots__ = (
        "_answer",
        "_ends_at",
        "_extend_at",
        "_is_settled",
        "_lease_seconds",
        "_window",
        "attempts",
        "body",
        "id",
        "is_gone",
        "queue",
    )

    def __init__(self, window: "Window[Any]", answer: Answer, now: float) -> None:
        self._window = window
        self._answer = answer
        self._is_settled = False
        self.queue = window.queue
        self.id: str = said(answer, "id")
        """32 hex digits that name the message for its whole life."""
        self.attempts: int = said(answer, "attempts")
        """How often it was delivered, this time included."""
        self.body = body_of(answer)
        self.is_gone = False
        """Whether the broker has said that its lease had ended: it comes again, whatever was done with it."""
        self._renew(window.lease_seconds, now)

    def _renew(self, lease_seconds: float, now: float) -> None:
        self._lease_seconds = lease_seconds
        self._extend_at = now + lease_seconds / 3
        self._ends_at = now + lease_seconds  # or somewhat earlier: the answer was on its way

    @property
    def offset(self) -> int:
        offset: int = self._answer["offset"]
        return offset

    @property
    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = self._answer["headers"]
        return headers

    @property
    def timestamp(self) -> datetime:
        """When it was accepted."""
        return datetime.fromisoformat(self._answer["timestamp"])

    @property
    def expires(self) -> datetime | None:
        return time_of(self._answer["expires"])

    @property
    def retries(self) -> int | None:
        """What is left of its retry counter; None: it has none."""
        retries: int | None = self._answer["retries"]
        return retries

    @property
    def reason(self) -> str | None:
        """Why it died; None unless it is a dead letter."""
        return self._answer.get("reason")

    @property
    def why(self) -> str | None:
        """What was said when it was rejected."""
        return self._answer.get("why")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.queue!r}, {len(self.body)} bytes>"


H = TypeVar("H", bound=Held)


class Window(Generic[H]):
    """One `consume`."""

    def __init__(
        self, queue: str, dead: bool, prefetch: int, lease_seconds: float, count: int | None, line: HttpLine
    ) -> None:
        self.queue = queue
        self.dead = dead
        self.prefetch = prefetch
        self.lease_seconds = lease_seconds
        self.left = inf if count is None else count  # that may be handed out
        self.line = line
        self.inbox: deque[H] = deque()
        self.out = 0  # handed out, without a verdict
        self.why_over = ""  # nobody waits for its messages any more
        self.turn = threading.Lock()  # held while it takes
        self.bell: SimpleQueue[None] = SimpleQueue()  # rung when there may be room
        self.is_waiting = False  # for the bell

    def end(self, why: str = "this loop was left") -> None:
        self.why_over = self.why_over or why
        self.line.abort()
        self.bell.put(None)
