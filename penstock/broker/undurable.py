"""Undurable: what ports have said that is not known to be durable yet.

Kept where another broker may have to go on with it: one that loses its log to another front-end knows then
what is left to be said there. Requests that wait for an answer are not kept: who has asked is told that there
will be none.

Rule that always holds: what was said in one turn is in the log between two positions, where the turn began
and where it had ended, or not in the log at all.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from penstock.broker.port import Port
from penstock.log.results import Fate
from penstock.model import words
from penstock.model.words import Outcome, Ranges

NOWHERE = 1 << 62
"""The end of what no block has."""

Claims = list[tuple[Ranges, int | None]]


class Undone(NamedTuple):
    """It may not be done: said by a port, in the log between these positions, if anywhere."""

    port: Port
    command: words.Publish | words.Settle | words.Reply
    claims: Claims
    """Of a settlement: what the port held of the messages that it names; to be requeued, when so many of
    their deliveries had ended."""

    start: int
    end: int


class Undurable:
    def __init__(self, position: int, attempts_before: Callable[[str, Ranges, bool], Claims]) -> None:
        """From a log that ends at `position`. `attempts_before` says of messages that were requeued how many
        of their deliveries had ended."""
        self._attempts_before = attempts_before
        self._open: list[Undone] = []  # in this turn
        self._turns: deque[list[Undone]] = deque()
        self._start = position  # where the log was when the turn began

    def published(self, port: Port, command: words.Publish) -> None:
        self._open.append(Undone(port, command, [], self._start, NOWHERE))

    def settled(self, port: Port, command: words.Settle | words.Reply, fates: Sequence[Fate]) -> None:
        ranges = [(fate.first, fate.end) for fate in fates]
        claims: Claims = [(ranges, None)] if ranges else []
        if isinstance(command, words.Settle) and command.outcome is Outcome.REQUEUE:
            claims = self._attempts_before(command.queue, ranges, command.dead)
        if claims:
            self._open.append(Undone(port, command, claims, self._start, NOWHERE))

    def turned(self, position: int, synced: int) -> None:
        """The turn is over, and all of it is in blocks before that position."""
        if self._open:
            self._turns.append([it._replace(end=position) for it in self._open])
            self._open = []
        self._start = position
        while self._turns and self._turns[0][0].end <= synced:
            self._turns.popleft()

    def __iter__(self) -> Iterator[Undone]:
        """In the order in which it was said."""
        for turn in self._turns:
            yield from turn
        yield from self._open
