"""Settling: acknowledgements and the other verdicts on their way to the broker.

Where nobody drives an event loop, a verdict is told at once and is on the disk when the call returns. In an
event loop nothing is waited for: one request is on its way at a time, and what comes meanwhile goes with
the next, so that the more there is to do, the more goes in one request.

A verdict that is lost, with a connection or a process, is one that was not made: the message comes again.
"""

import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kombu.exceptions import ChannelError

log = logging.getLogger(__name__)

VERDICTS_MAX: Final = 1000
"""In one request; the broker takes ten times as many."""


@dataclass(slots=True)
class Delivery:
    """A message that is held, by this very delivery of it."""

    name: str  # of the queue in the broker
    id: str
    attempts: int
    is_gone: bool = False  # its lease had ended, and it is somebody else's


class Call(NamedTuple):
    """One request, for one queue."""

    name: str
    verdict: str
    entries: list[dict[str, Any]]

    @property
    def body(self) -> bytes:
        return json.dumps({self.verdict: self.entries}).encode()

    def gone(self, fields: Any) -> list[str]:
        """By the broker's answer, the ids of those that were not held any more."""
        gone: list[str] = fields["gone"]
        if gone and self.verdict != "requeue":
            log.warning(
                "queue %r: %d messages, the first of them %s: their leases had ended before this (%s), and "
                "they are delivered again",
                self.name,
                len(gone),
                gone[0],
                self.verdict,
            )
        return gone


class Outbox:
    def __init__(self) -> None:
        self._lock = threading.Lock()  # other threads than the one that consumes may acknowledge
        self._waiting: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}  # by queue and verdict, by id

    def add(self, verdict: str, deliveries: Iterable[Delivery], **more: object) -> None:
        """Of two deliveries of one message the later one counts; the other is over."""
        with self._lock:
            for it in deliveries:
                entry = {"id": it.id, "attempts": it.attempts, **more}
                self._waiting.setdefault((it.name, verdict), {})[it.id] = entry

    def next_call(self) -> Call | None:
        """None: there is nothing to say."""
        with self._lock:
            for name, verdict in self._waiting:
                entries = self._waiting[name, verdict]
                ids = list(entries)[:VERDICTS_MAX]
                call = Call(name, verdict, [entries.pop(message_id) for message_id in ids])
                if not entries:
                    del self._waiting[name, verdict]
                return call
        return None

    def tell_all(self, ask: Callable[[Call], Any]) -> Iterator[str]:
        """Say all there is, one after the other; the ids of those that were not held any more.

        What the broker refuses of one queue is raised when the others were told.
        """
        refusal: ChannelError | None = None
        while (call := self.next_call()) is not None:
            try:
                yield from call.gone(ask(call))
            except ChannelError as error:
                refusal = error
        if refusal is not None:
            raise refusal
