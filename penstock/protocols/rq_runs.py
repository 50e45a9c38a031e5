"""Runs: RQ frames that follow each other and are alike, gathered into one event.

`Runs` owns the frames of the chunk being read that no event holds yet. The decoder puts frames in
and takes events out; it never looks at what is open.

Rules that always hold:
  * Requests for one queue keep their order, and so do broadcasts. Those for different queues are
    gathered side by side, so that a peer that serves its queues in turn still gives batches.
  * DELIVERED and REPLY share a run and become two events, DELIVERED first: a worker that answers
    each request at once says them in turn. Where a DELIVERED comes after a REPLY with the same id,
    a new run begins.
  * Everything else ends all runs, and keeps its place.
  * A large payload is an event of its own, and is handed on without a copy.

Nothing here fails.
"""

from array import array
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from penstock.build import COMPILED
from penstock.model.batch import Batch
from penstock.protocols import rq
from penstock.protocols.rq import PROTOCOL, Command, Event, Name

if COMPILED:
    from penstock.protocols import loops

ALONE_FROM_BYTES = 256 << 10
"""A payload of this size is an event of its own: joining it to others would copy it."""


class Key(NamedTuple):
    """What the frames of one run have in common."""

    action: Command
    queue: Name = ""
    noreply: bool = False
    has_retries: bool = False
    timeout_seconds: int = 0


SETTLED = Key(Command.REPLY)  # and DELIVERED
FAILED = Key(Command.UNDELIVERED)


class Run:
    """The frames gathered so far."""

    __slots__ = ("delivered", "ids", "key", "parts", "replied", "retries", "sizes")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.ids = array("I")
        self.parts: list[bytes] = []  # payloads, one by one, or many of them in one piece
        self.sizes: list[int] = []  # of each payload
        self.retries: list[int] = []
        self.delivered = array("I")
        self.replied: set[int] = set()  # the same as ids, to look up; in SETTLED only

    def batch(self) -> Batch:
        """The payloads as columns. A single one is handed on as it is."""
        retries = array("h", self.retries) if self.key.has_retries else None
        return Batch(b"".join(self.parts), _bounds_of(self.sizes), None, retries, None, PROTOCOL)


def _bounds_of(sizes: list[int]) -> "array[int]":
    return array("i", loops.bounds_of(sizes) if COMPILED else accumulate(sizes, initial=0))


class Runs:
    """The open runs of a chunk, and the events that are complete."""

    __slots__ = ("_events", "_of", "_open")

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._open: dict[Name, Run] = {}  # by queue, all of one action
        self._of: tuple[Command, type] = (Command.NOP, str)

    def take(self) -> list[Event]:
        """All events so far; every run ends here."""
        self.close()
        events, self._events = self._events, []
        return events

    def tell(self, event: Event) -> None:
        """An event that is not gathered."""
        self.close()
        self._events.append(event)

    def run(self, key: Key) -> Run:
        """The run that takes the next frame of this kind."""
        name = key.queue
        kind = key.action, type(name)
        if self._of != kind:
            # A QUEUEID may name a queue that is named by QUEUE too, so these are not mixed either.
            self.close()
            self._of = kind
        run = self._open.get(name)
        if run is not None:
            if run.key is key or run.key == key:
                return run
            self._end(name)
        run = self._open[name] = Run(key)
        return run

    def add(self, key: Key, payload: bytes) -> Run:
        """Put a payload into the run of its kind; the caller adds what else there is, then calls `added`."""
        run = self.run(key)
        if len(payload) >= ALONE_FROM_BYTES and run.parts:
            self._end(key.queue)
            run = self.run(key)
        run.parts.append(payload)
        run.sizes.append(len(payload))
        return run

    def added(self, run: Run) -> None:
        """A frame is complete. A large one ends its run."""
        if len(run.parts[-1]) >= ALONE_FROM_BYTES:
            self._end(run.key.queue)

    def delivered(self, ids: Iterable[int]) -> None:
        """DELIVERED of these ids: in a new run where one of them was replied to in the old one."""
        run = self.run(SETTLED)
        if run.replied and not run.replied.isdisjoint(ids):
            self.close()
            run = self.run(SETTLED)
        run.delivered.extend(ids)

    def replied(self) -> set[int]:
        """The ids with a REPLY in the open run, to look up and to add to."""
        run = self._open.get(SETTLED.queue)
        return run.replied if run is not None and run.key is SETTLED else set()

    def close(self) -> None:
        """End all runs."""
        for name in list(self._open):
            self._end(name)

    def _end(self, name: Name) -> None:
        run = self._open.pop(name)
        key, events = run.key, self._events
        if key.action is Command.REQUEST:
            events.append(rq.Requests(name, run.ids, run.batch(), key.noreply, key.timeout_seconds))
        elif key.action is Command.BROADCAST:
            events.append(rq.Broadcasts(name, run.batch()))
        elif key.action is Command.UNDELIVERED:
            events.append(rq.Undelivered(run.ids))
        else:
            if run.delivered:
                events.append(rq.Delivered(run.delivered))
            if run.ids:
                events.append(rq.Replies(run.ids, run.batch()))
