"""Consumers of one queue: who wants messages, how much room each has, and whose turn it is.

A member joins with a window (`credit`: the most it may hold unsettled, 0 for no bound). It is
*active*, or on *standby* until an exclusive member gives the queue free. `share` says who gets
how many of the messages that are there; the owner takes them from the log and reports with
`took` what was really handed out, and with `freed` what was settled or given back. Between
`share` and `took` nothing else happens to the queue. A paused queue does not call `share`; the
dead-letter door of a queue has a `Consumers` of its own.

Rules that always hold:
  * Nobody is promised more than its room. Idle, blocked and standby members and those of
    priority 0 have no room at all.
  * A higher priority that has room is served before a lower one. Equals take turns, and the turn
    goes on where it stopped: whoever has waited longest for it is first.
  * An exclusive member is active alone. Standby is a line: nobody overtakes, so that an exclusive
    member behind shared ones gets the queue when the last of them has left.

What it costs: `join`, `leave`, `took`, `freed`, `mark_idle` and `block` take the same time whatever
the number of members (`leave` one step more per member that it activates). `share` looks at nobody
who has no room, and only at those whom it names, a few times each where their windows differ: one
message costs 0.5 µs among 1 as among 2,000 members, an even split of 50,000 among 2,000 different
windows 0.4 ms.

It fails only by misuse: `took` for somebody who is not here is a KeyError. `freed` for such a one
is normal, because a cancelled consumer may still settle what it holds.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from enum import Enum
from itertools import islice
from typing import Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

UNBOUNDED: Final = 1 << 62
"""The room of a member without a bound."""

PRIORITY_MAX: Final = 255
PRIORITY_NORMAL: Final = 20


class Joined(Enum):
    """How a member was let in."""

    ACTIVE = "active"
    STANDBY = "standby"  # unanswered until a `leave` names it


class _Member(Generic[Key]):
    """One consumer. `room` is 0 whenever it must not be given anything."""

    __slots__ = (
        "active",
        "blocked",
        "credit",
        "exclusive",
        "held",
        "idle",
        "key",
        "once",
        "priority",
        "room",
    )

    def __init__(self, key: Key, exclusive: bool, held: int) -> None:
        self.key = key
        self.exclusive = exclusive
        self.held = held  # unsettled messages at this consumer
        self.active = False
        self.idle = False
        self.blocked = False
        self.priority = PRIORITY_NORMAL
        self.once = False
        self.credit = 0  # for `once`: 1 while a demand is open, else 0
        self.room = 0  # as counted in its group and in the total

    def room_now(self) -> int:
        if self.idle or self.blocked or not self.active or not self.priority:
            return 0
        if self.once:
            return self.credit
        return max(self.credit - self.held, 0) if self.credit else UNBOUNDED


class Consumers(Generic[Key]):
    """The consumers of one queue, or of its dead letters."""

    __slots__ = (
        "_active_count",
        "_exclusive",
        "_members",
        "_priorities",
        "_rings",
        "_standby",
    )

    def __init__(self) -> None:
        self._members: dict[Key, _Member[Key]] = {}  # all of them, in order of arrival
        self._standby: OrderedDict[Key, _Member[Key]] = OrderedDict()  # in order of arrival
        self._active_count = 0
        self._exclusive = False  # the only active member is exclusive
        # Those with room, by priority, in the order of their turn. An OrderedDict moves its first
        # entry to the end in constant time; a dict would walk over the holes left at its front.
        self._rings: dict[int, OrderedDict[Key, _Member[Key]]] = {}
        self._priorities: list[int] = []  # of the rings, highest first; rings stay, there are few

    def __len__(self) -> int:
        """How many members there are, standby included."""
        return len(self._members)

    # --- Coming and going ---

    def join(
        self,
        key: Key,
        credit: int,
        priority: int = PRIORITY_NORMAL,
        exclusive: bool = False,
        *,
        once: bool = False,
        held: int = 0,
    ) -> Joined:
        """Let `key` in, or give it a new window and priority in place if it is here already.

        `once` is a demand for a single message: `credit` does not matter, taking a message uses it
        up, settling one does not renew it, joining again does. `held` is what a newcomer still
        holds from an earlier membership. Whether a member is exclusive is settled when it comes, or by
        `change`.
        """
        if credit < 0:
            raise ValueError(f"consumer {key!r}: credit {credit}; use 0 (no bound) or more")
        if not 0 <= priority <= PRIORITY_MAX:
            raise ValueError(f"consumer {key!r}: priority {priority}; use 0 to {PRIORITY_MAX}")
        member = self._members.get(key)
        if member is None:
            member = self._members[key] = _Member(key, exclusive, held)
            if not self._standby and self._may_enter(member):
                self._enter(member)
            else:
                self._standby[key] = member
        if priority != member.priority:
            self._set_room(member, 0)  # leaves the ring of its old priority
            member.priority = priority
        member.once = once
        member.credit = 1 if once else credit
        self._set_room(member, member.room_now())
        return Joined.ACTIVE if member.active else Joined.STANDBY

    def leave(self, key: Key) -> list[Key]:
        """Forget `key` if it is here, and name those who become active by that, first come first."""
        member = self._members.pop(key, None)
        if member is None:
            return []
        if member.active:
            self._set_room(member, 0)
            self._active_count -= 1
            self._exclusive = False  # either it was that one, or nobody was
        else:
            del self._standby[key]
        return self._move_up()

    def change(self, key: Key, exclusive: bool) -> list[Key]:
        """`key`, about to join again, wants the queue for itself or no longer; who becomes active by that.

        To have it alone, a member that is not alone stands in line behind all others: it has left, and
        joining makes a newcomer of it. One that gives that up stays, and those who wait may come in.
        """
        member = self._members.get(key)
        if member is None or member.exclusive == exclusive:
            return []
        if exclusive and member.active and (self._active_count > 1 or self._standby):
            return self.leave(key)
        member.exclusive = exclusive
        if member.active:
            self._exclusive = exclusive
        return self._move_up()

    def _move_up(self) -> list[Key]:
        entered: list[Key] = []
        while self._standby:
            waiting = next(iter(self._standby.values()))
            if not self._may_enter(waiting):
                break
            del self._standby[waiting.key]
            self._enter(waiting)
            self._set_room(waiting, waiting.room_now())
            entered.append(waiting.key)
        return entered

    def _may_enter(self, member: _Member[Key]) -> bool:
        return not (self._active_count if member.exclusive else self._exclusive)

    def _enter(self, member: _Member[Key]) -> None:
        member.active = True
        self._active_count += 1
        self._exclusive = member.exclusive

    def window(self, key: Key) -> tuple[int, bool]:
        """How many unsettled messages a member may have (0: no bound), and whether it is active."""
        member = self._members[key]
        return 1 if member.once else member.credit, member.active

    # --- Room ---

    def took(self, key: Key, count: int) -> None:
        """`key` was handed `count` messages."""
        if not count:
            return
        member = self._members.get(key)
        if member is None:
            raise KeyError(f"consumer {key!r} took {count} messages, but it has left or never joined")
        member.held += count
        if member.once:
            member.credit = 0
        self._set_room(member, member.room_now())

    def freed(self, key: Key, count: int) -> None:
        """`count` messages that `key` held were settled or given back."""
        member = self._members.get(key)
        if member is not None:
            member.held = max(member.held - count, 0)
            self._set_room(member, member.room_now())

    def mark_idle(self, key: Key, idle: bool) -> None:
        """No new work for `key` while it is idle: it was not heard of, or wants to leave."""
        member = self._members.get(key)
        if member is not None:
            member.idle = idle
            self._set_room(member, member.room_now())

    def block(self, key: Key, blocked: bool) -> None:
        """No new work for `key` while it is blocked: what was sent to it has not left our buffers."""
        member = self._members.get(key)
        if member is not None:
            member.blocked = blocked
            self._set_room(member, member.room_now())

    def _set_room(self, member: _Member[Key], room: int) -> None:
        """The one place where a room changes: it keeps the rings in step."""
        before = member.room
        if room == before:
            return
        member.room = room
        if not room:
            del self._rings[member.priority][member.key]
        elif not before:
            ring = self._rings.get(member.priority)
            if ring is None:
                ring = self._rings[member.priority] = OrderedDict()
                self._priorities = sorted(self._rings, reverse=True)
            ring[member.key] = member

    # --- Whose turn it is ---

    def share(self, available: int) -> list[tuple[Key, int]]:
        """Who should be handed how many of `available` messages now. Moves the turn on.

        Within one priority the counts differ by at most one, except where somebody's room is less.
        """
        shares: list[tuple[Key, int]] = []
        for priority in self._priorities:
            if available <= 0:
                break
            ring = self._rings[priority]
            if len(ring) == 1:
                for member in ring.values():
                    count = min(member.room, available)
                    shares.append((member.key, count))
                    available -= count
            elif len(ring) >= available:
                for member in list(islice(ring.values(), available)):
                    ring.move_to_end(member.key)
                    shares.append((member.key, 1))
                available = 0
            elif ring:
                available = self._split(ring, available, shares)
        return shares

    def _split(
        self, ring: "OrderedDict[Key, _Member[Key]]", available: int, shares: list[tuple[Key, int]]
    ) -> int:
        """Fill all of a ring evenly, like cups of different size; what no cup could hold is returned.

        Each round gives every open cup the same. What full cups could not take goes into the next
        round, so each round at least halves (about) what is left or the number of open cups.
        """
        members = list(ring.values())
        counts = [0] * len(members)
        cups = list(range(len(members)))
        while cups and available >= len(cups):
            level = available // len(cups)
            cups_open: list[int] = []
            for cup in cups:
                spare = members[cup].room - counts[cup]
                if spare > level:
                    spare = level
                    cups_open.append(cup)
                counts[cup] += spare
                available -= spare
            cups = cups_open
        # Fewer messages than open cups are left: one more for those whose turn it is, who then
        # stand behind the others.
        for cup in cups[:available]:
            counts[cup] += 1
            ring.move_to_end(members[cup].key)
        shares.extend((member.key, count) for member, count in zip(members, counts, strict=True))
        return 0 if cups else available

    def everybody(self) -> Iterator[Key]:
        """All of them, in order of arrival."""
        return iter(self._members)

    def broadcast_targets(self) -> list[Key]:
        """All who are active, busy, idle or blocked, in order of arrival: a broadcast waits for nobody."""
        return [member.key for member in self._members.values() if member.active]
