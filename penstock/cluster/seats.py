"""Seat: what a follower remembers of one connection, so that a new leader can go on with it.

Rules that always hold:
  * What a client has and has not settled is in `holds`, with the origin of its ids.
  * A connection is read from while no reason against it is set (`Held`); the port hears only of changes.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field
from enum import IntFlag
from itertools import groupby
from typing import Any, Final, NamedTuple

from penstock.broker.port import Port
from penstock.model import words
from penstock.model.batch import Slice
from penstock.model.ranges import RangeMap
from penstock.model.words import Ranges

Door = tuple[str, bool]  # queue, and whether its dead letters


class Claim(NamedTuple):
    """What is held through a door, of messages whose ids begin so."""

    door: Door
    origin: bytes
    ranges: Ranges
    attempts_max: int | None = None
    """To be requeued, when so many of their deliveries had ended; where it is one more, that was done."""


class Held(IntFlag):
    """Why a connection is not read from."""

    LEADER = 1  # the leader has no room for its requests
    WINDOW = 2  # too much is on its way to the leader, or there is none
    REFUSED = 4  # there is no room for its messages


NOT_HELD: Final = Held(0)


@dataclass(slots=True, eq=False)
class Demand:
    """A standing demand, as the client has stated it last."""

    command: words.Consume
    unanswered: int = 1  # how often the client has asked and was not told
    active: bool = False  # it was in force at the leader


@dataclass(slots=True, eq=False)
class Settlement:
    """Settlements of one connection that are not known to be durable."""

    seat: "Seat"
    commands: list[words.Command]
    claims: list[Claim]  # what the client held of the messages that they speak of
    questions: int  # that its connection had asked before
    number: int = -1  # by which it is confirmed; it has one when it is said
    behind: int = 0  # the end of the shipments that it was said behind, and that may have been refused


@dataclass(slots=True, eq=False)
class Seat:
    port: Port
    number: int
    demands: dict[Door, Demand] = field(default_factory=dict)
    holds: dict[Door, RangeMap[bytes]] = field(default_factory=dict)  # origins of their ids; none is empty
    attempts: dict[Door, RangeMap[int]] = field(default_factory=dict)  # deliveries that had ended, if any
    asked: set[int] = field(default_factory=set)  # tickets of requests that the leader knows
    # Refused for lack of room, and what came behind that: `words.Publish` and `lanes.Words`.
    waiting: deque[Any] = field(default_factory=deque)
    gathered: int = 0  # batches and words that are on no way yet
    unstored: int = 0  # batches that are on their way, or gathered
    unsettled: int = 0  # settlements that are not known to be durable
    questions: int = 0  # so often it was asked whether all that was said until then is durable
    asked_after: int = 0  # of what is unstored and unsettled: what was said before the last question
    held: Held = NOT_HELD
    closing: bool = False
    finishing: bool = False  # the leader has nothing pending for it any more
    syncing: bool = False  # it wants to hear when all that it had said by its question is durable
    asks_again: bool = False  # and has asked once more since
    idle: bool = False
    blocked: bool = False
    gone: bool = False
    received_bytes: int = 0  # payload delivered over this link
    received_count: int = 0
    told_bytes: int = 0  # how much of that the leader knows to have left our buffers
    told_count: int = 0
    told_room: int = 0
    counts_room: bool = False  # the protocol bounds the number of deliveries
    # What it holds or has settled may be with somebody else by now: then its connection ends.
    late: bool = False

    def hold(self, reason: Held, held: bool) -> None:
        before = self.held
        self.held = before | reason if held else before & ~reason
        if bool(before) != bool(self.held) and not self.gone:
            self.port.hold(bool(self.held))

    def ask(self) -> None:
        """It wants to hear when all that it has said is durable; what it says from now on is not waited for,
        or who goes on sending would never hear."""
        self.syncing = True
        self.questions += 1
        self.asked_after = self.unstored + self.unsettled

    def stored(self, questions: int = 0) -> None:
        """A batch is on its way no more, that was sent behind so many questions."""
        self.unstored -= 1
        self.asked_after -= questions < self.questions

    def settled(self, questions: int) -> None:
        """So is a settlement."""
        self.unsettled -= 1
        self.asked_after -= questions < self.questions

    def leave(self) -> None:
        """The connection is gone."""
        self.gone = True
        self.demands.clear()
        self.holds.clear()
        self.attempts.clear()
        self.asked.clear()

    def begin_link(self) -> None:
        """What is received and told is counted for each link."""
        self.received_bytes = self.received_count = self.told_bytes = self.told_count = 0

    def end_asked(self) -> None:
        """Nobody answers its requests any more."""
        if self.asked:
            asked, self.asked = self.asked, set()
            self.port.undelivered(array("I", sorted(asked)))

    def took(self, door: Door, slices: list[Slice]) -> None:
        """Messages that the client has from now on."""
        holds = self.holds.get(door)
        if holds is None:
            holds = self.holds[door] = RangeMap()
        for piece in slices:
            first, end = piece.offset_start, piece.offset_end
            if holds:
                holds.cut(first, end)
            holds.add(first, end, piece.origin)
            if self.attempts:  # what it had before, it has not counted
                self.forget_attempts(door, [(first, end)])
            if piece.attempts is not None:
                counts = self.attempts.setdefault(door, RangeMap())
                for count, run in groupby(piece.attempts[piece.lo : piece.hi]):
                    first, start = first + sum(1 for _ in run), first
                    if count:
                        counts.add(start, first, count)

    def let_go(self, door: Door, origin: bytes, ranges: Ranges) -> Ranges:
        """What the client names of what it holds; it does not hold that any more."""
        holds = self.holds.get(door)
        if holds is None:
            return []
        gone: Ranges = []
        for first, end in ranges:
            pieces = holds.find(first, end)
            if all(piece[2] == origin for piece in pieces):
                holds.cut(first, end)
                gone += [(a, b) for a, b, _ in pieces]
                continue
            for a, b, its_origin in pieces:
                if its_origin == origin:
                    holds.cut(a, b)
                    gone.append((a, b))
        if not holds:
            del self.holds[door]
        return gone

    def claims(self) -> list[Claim]:
        """All that the client holds, by door and origin."""
        found: dict[tuple[Door, bytes], Ranges] = {}
        for door, holds in self.holds.items():
            for first, end, origin in holds:
                found.setdefault((door, origin), []).append((first, end))
        return [Claim(door, origin, ranges) for (door, origin), ranges in found.items()]

    def claims_once(self, door: Door, origin: bytes, ranges: Ranges) -> list[Claim]:
        """What it has let go of in a way that must not be repeated, by deliveries that had ended."""
        counts = self.attempts.get(door)
        found: dict[int, Ranges] = {}
        for first, end in ranges:
            at = first
            for a, b, count in counts.find(first, end) if counts is not None else ():
                if a > at:
                    found.setdefault(0, []).append((at, a))
                found.setdefault(count, []).append((a, b))
                at = b
            if at < end:
                found.setdefault(0, []).append((at, end))
        return [Claim(door, origin, pieces, count) for count, pieces in found.items()]

    def forget_attempts(self, door: Door, ranges: Ranges) -> None:
        counts = self.attempts.get(door)
        if counts is not None:
            for first, end in ranges:
                counts.cut(first, end)
            if not counts:
                del self.attempts[door]
