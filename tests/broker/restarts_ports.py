"""The ports of a run of `restarts.py`: each does as its protocol may, and knows what it must be told.

A port stands for a connection and its session. It checks every word that the broker says to it when it is
said; what only shows when the broker rests is asked for by the run.
"""

import re
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.broker.hand_out import MESSAGE_BYTES
from penstock.model.batch import Batch, Slice
from penstock.model.words import (
    Accepted,
    Cancel,
    Closing,
    Consume,
    Outcome,
    Publish,
    Ranges,
    Reply,
    Settle,
    Sync,
    Where,
    ranges_of,
)

if TYPE_CHECKING:
    from tests.broker.restarts import Run

SECOND_US = 1_000_000
PLENTY = 1 << 30

Door = tuple[str, bool]  # queue, and whether its dead letters


class Message:
    """What is known about a message, whatever broker leads."""

    def __init__(self, queue: str, payload: bytes) -> None:
        self.queue = queue
        self.payload = payload
        self.asks = False
        self.expires_us = 0  # the earliest moment at which it may expire; 0: never
        self.confirmed = False  # its sender was told that it is safe
        self.may_end = False  # somebody has ended it, or may have
        self.settled = False  # somebody has acknowledged it without an answer

    def __repr__(self) -> str:
        return f"message {self.payload.rstrip(b'.').decode()} of {self.queue!r}"


class Ticket:
    """What a sender waits to hear of one message."""

    def __init__(self, number: int, message: Message, wants_reply: bool, deadline_us: int) -> None:
        self.number = number
        self.message = message
        self.wants_reply = wants_reply
        self.deadline_us = deadline_us
        self.told = False
        self.ended = False

    def __repr__(self) -> str:
        return f"ticket {self.number}, {self.message}"


class Demand:
    """What it wants at a door."""

    def __init__(self, command: Consume) -> None:
        self.command = command
        self.active = False
        self.open = command.once  # a single message is still to come


class Held:
    """A message in its hands."""

    def __init__(self, message: Message, origin: bytes, wants_reply: bool) -> None:
        self.message = message
        self.origin = origin
        self.wants_reply = wants_reply
        self.ghost = False  # the broker does not know any more that it has it


class WildPort:
    """See the module's docstring."""

    def __init__(self, run: "Run", name: str, protocol: str, lost_to: Where) -> None:
        self.run = run
        self.name = name
        self.protocol = protocol
        self.lost_to = lost_to
        self.demands: dict[Door, Demand] = {}
        self.holding: dict[Door, dict[int, Held]] = {}
        self.tickets: dict[int, Ticket] = {}
        self.blocked = self.silent = self.closing = self.left = self.finished = self.is_held = False
        self.bytes_free = PLENTY
        self.places = PLENTY
        self.unconfirmed: list[Message] = []  # sent without tickets
        self.asked_to_sync: list[Message] | None = (
            None  # what it said before it asked, while there is no answer
        )

    def __repr__(self) -> str:
        held = {door: sorted(held) for door, held in self.holding.items() if held}
        return f"{self.name} with {held}"

    # --- what it does ----------------------------------------------------------------------------

    def publish(self, queue: str, count: int, wants_reply: bool) -> None:
        rng, run = self.run.rng, self.run
        if self.closing:
            return
        messages = run.some(queue, count)
        ttl = [rng.choice((0, 0, 1, 5)) for _ in messages] if rng.random() < 0.3 else None
        retries = [rng.choice((-1, 0, 1, 255)) for _ in messages] if rng.random() < 0.4 else None
        timeout = rng.choice((0, 0, 1, 5, 60000)) if wants_reply else 0
        for message, seconds in zip(messages, ttl or [0] * count, strict=True):
            message.asks = wants_reply
            message.expires_us = run.now_us + seconds * SECOND_US if seconds else 0
        tickets = None
        if self.protocol == "rq":
            tickets = array("I", range(len(self.tickets), len(self.tickets) + count))
            for number, message in zip(tickets, messages, strict=True):
                deadline_us = run.now_us + timeout * SECOND_US if timeout else 0
                self.tickets[number] = Ticket(number, message, wants_reply, deadline_us)
        else:
            self.unconfirmed += messages
        batch = Batch.of([message.payload for message in messages], ttl_seconds=ttl, retries=retries)
        run.broker.handle(self, [Publish(queue, batch, tickets, wants_reply, timeout)], run.now_us)
        if self.is_held:
            # Its time begins when there is room for it, which is not seen from here.
            for number in tickets or ():
                self.tickets[number].deadline_us = 0

    def sync(self) -> None:
        """Ask to hear when all that it has sent is safe."""
        if self.protocol != "rq" and self.asked_to_sync is None and not self.closing:
            self.asked_to_sync, self.unconfirmed = self.unconfirmed, []
            self.run.broker.handle(self, [Sync()], self.run.now_us)

    def demand(self, queue: str) -> None:
        rng = self.run.rng
        dead = rng.random() < 0.25
        if self.protocol == "sspq":
            if not self.held_count() and not any(demand.open for demand in self.demands.values()):
                self.consume(queue, 1, dead=dead, once=True)
        elif self.protocol == "phpmq":
            self.consume(queue, rng.choice((0, 1, 2, 5)), dead=dead)
        else:
            priority, exclusive = rng.choice((0, 10, 20, 20, 30)), rng.random() < 0.2
            self.consume(queue, rng.choice((0, 1, 2, 5)), dead=dead, priority=priority, exclusive=exclusive)

    def consume(
        self,
        queue: str,
        credit: int,
        *,
        dead: bool = False,
        once: bool = False,
        priority: int = 20,
        exclusive: bool = False,
    ) -> None:
        if self.closing:
            return
        demand = Demand(Consume(queue, credit, dead, once, priority, exclusive))
        before = self.demands.get((queue, dead))
        others = [port for port in self.run.ports if port is not self and (queue, dead) in port.demands]
        if before is not None:
            # Who wants it alone and is not alone stands in line again.
            demand.active = before.active and not (exclusive and not before.command.exclusive and others)
        self.demands[queue, dead] = demand
        self.run.broker.handle(self, [demand.command], self.run.now_us)

    def cancel(self) -> None:
        if self.demands and self.protocol != "sspq":
            queue, dead = self.run.rng.choice(list(self.demands))
            del self.demands[queue, dead]
            self.run.broker.handle(self, [Cancel(queue, dead)], self.run.now_us)

    def settle_some(self) -> None:
        rng = self.run.rng
        doors = [door for door, held in self.holding.items() if held]
        if not doors or self.is_held:  # Who is held is not read from.
            return
        door = rng.choice(doors)
        offsets = list(self.holding[door])
        chosen = offsets if rng.random() < 0.3 else rng.sample(offsets, rng.randint(1, len(offsets)))
        if self.protocol == "rq" and rng.random() < 0.4:
            self.accept(door, chosen)
        elif self.protocol == "phpmq" and rng.random() < 0.5:
            self.end(door, chosen, rng.choice((Outcome.REJECT, Outcome.REQUEUE)))
        else:
            self.answer(door, chosen)

    def settle_all(self) -> bool:
        """Everything that it holds is done; whether there was any."""
        doors = [door for door, held in self.holding.items() if held and not self.is_held]
        for door in doors:
            self.answer(door, list(self.holding[door]))
        return bool(doors)

    def reject_all(self) -> None:
        for door, held in self.holding.items() if not self.is_held else ():
            self.end(door, list(held), Outcome.REJECT)

    def accept(self, door: Door, offsets: list[int]) -> None:
        asked = [offset for offset in offsets if self.holding[door][offset].wants_reply]
        for origin, ranges in self.by_origin(door, asked):
            self.run.broker.handle(self, [Accepted(door[0], origin, ranges)], self.run.now_us)

    def answer(self, door: Door, offsets: list[int]) -> None:
        """The good end: a reply where one is wanted, and its protocol has one."""
        held = self.holding[door]
        asked = [offset for offset in offsets if held[offset].wants_reply and self.protocol == "rq"]
        for origin, ranges in self.by_origin(door, asked):
            mine = [offset for first, end in ranges for offset in range(first, end)]
            answers = Batch.of([b"re:" + held[offset].message.payload for offset in mine])
            self.run.acked[door[0]] += len(self.run.held_by(door[0], self.name).intersection(mine))
            for offset in mine:
                held.pop(offset).message.may_end = True
            self.run.broker.handle(self, [Reply(door[0], origin, array("q", mine), answers)], self.run.now_us)
        self.end(door, [offset for offset in offsets if offset in held], Outcome.ACK)

    def end(self, door: Door, offsets: list[int], outcome: Outcome) -> None:
        run, held = self.run, self.holding[door]
        ttl = run.rng.choice((0, 2)) if outcome is Outcome.REQUEUE else 0
        commands = [
            Settle(door[0], outcome, origin, ranges, ttl, door[1])
            for origin, ranges in self.by_origin(door, offsets)
        ]
        if outcome is Outcome.ACK:
            run.acked[door[0]] += len(run.held_by(door[0], self.name).intersection(offsets))
        for offset in offsets:
            message = held.pop(offset).message
            if outcome is Outcome.ACK:
                message.may_end = message.settled = True
            elif ttl:
                expires_us = run.now_us + ttl * SECOND_US
                message.expires_us = min(message.expires_us or expires_us, expires_us)
        if commands:
            run.broker.handle(self, commands, run.now_us)

    def by_origin(self, door: Door, offsets: list[int]) -> list[tuple[bytes, Ranges]]:
        held = self.holding[door]
        origins = dict.fromkeys(held[offset].origin for offset in offsets)
        return [
            (origin, ranges_of(offset for offset in offsets if held[offset].origin == origin))
            for origin in origins
        ]

    def change_room(self) -> None:
        """Its buffer is full, with or without a word, or it has no place for deliveries; or has again."""
        rng = self.run.rng
        if rng.random() < 0.4:
            self.blocked = not self.blocked
            self.run.broker.blocked(self, self.blocked)
        self.bytes_free = rng.choice((0, 1, 500, PLENTY))
        self.places = rng.choice((0, 1, 3, PLENTY))

    def widen(self) -> None:
        self.bytes_free = self.places = PLENTY
        if self.silent:
            self.run.broker.idle(self, False)
        self.blocked = self.silent = False
        self.run.broker.blocked(self, False)

    def say_closing(self) -> None:
        if not self.closing:
            self.closing = True
            self.demands.clear()
            self.run.broker.handle(self, [Closing()], self.run.now_us)

    def gone(self) -> None:
        """The connection has ended: nobody tells it anything any more."""
        self.left = True
        self.demands.clear()
        self.forget_requests()

    def forget_requests(self) -> None:
        for ticket in self.tickets.values():
            ticket.message.may_end |= ticket.wants_reply
            ticket.ended = True

    def move_over(self) -> None:
        """Another broker leads: bring over what it holds and wants. Its questions have ended."""
        run = self.run
        self.forget_requests()
        self.is_held = False
        self.unconfirmed.clear()
        self.asked_to_sync = None
        run.broker.attach(self)
        if self.blocked:
            run.broker.blocked(self, True)
        if self.silent:
            run.broker.idle(self, True)
        for door, held in self.holding.items():
            for origin, ranges in self.by_origin(door, list(held)):
                granted = run.broker.claim(self, *door, origin, ranges, run.now_us)
                got = {offset for first, end in granted for offset in range(first, end)}
                for first, end in ranges:
                    for offset in range(first, end):
                        held[offset].ghost = offset not in got
        demands, self.demands = self.demands, {}
        for door, demand in demands.items():
            if demand.command.once and not demand.open:
                continue
            self.demands[door] = again = Demand(demand.command)
            if demand.active:
                run.broker.rejoin(self, again.command, run.now_us)
            else:
                run.broker.handle(self, [again.command], run.now_us)
        if self.closing:
            run.broker.handle(self, [Closing()], run.now_us)

    # --- what it is told -------------------------------------------------------------------------

    def bytes_room(self) -> int:
        return self.bytes_free

    def count_room(self) -> int:
        return self.places - self.held_count() if self.places < PLENTY else PLENTY

    def deliver(self, queue: str, slices: list[Slice], now_us: int, dead: bool) -> None:
        demand = self.demands.get((queue, dead))
        assert not self.left, f"{self.name} has left, and is given something"
        assert demand is not None, f"{self.name} wants nothing at {queue!r}"
        assert demand.active, f"it is not the turn of {self.name} at {queue!r}"
        assert demand.command.priority, f"{self.name} wants broadcasts only"
        assert not self.blocked, f"{self.name} is blocked"
        assert not self.silent, f"{self.name} does not answer"
        assert queue not in self.run.paused, f"{queue!r} is paused"
        count = sum(map(len, slices))
        room = sum(piece.payload_bytes for piece in slices) + count * MESSAGE_BYTES
        assert count <= self.count_room(), f"{self.name} has no place for {count}"
        assert count == 1 or room <= self.bytes_free, f"{self.name} has no room for {room} bytes"
        held = self.holding.setdefault((queue, dead), {})
        for piece in slices:
            for i, payload in enumerate(piece.messages(), piece.lo):
                message = self.run.messages[payload]
                assert message.queue == queue, f"{message} came out of {queue!r}"
                offset = piece.first_offset + i
                assert offset not in held, f"{self.name} has {message} already"
                wants_reply = not dead and piece.reply is not None and bool(piece.reply[i])
                assert dead or wants_reply == message.asks, f"{message} asks: {message.asks}"
                held[offset] = Held(message, piece.origin, wants_reply)
                # Without dead letters, a delivery that does not end well is the end.
                message.may_end |= queue == "off"
        self.run.delivered[queue] += count
        if demand.command.once:
            assert (demand.open, count) == (True, 1), f"{self.name} asked for one message"
            demand.open = False
        elif demand.command.credit:
            assert len(held) <= demand.command.credit, f"{self.name}: {len(held)} are more than its window"

    def consuming(self, queue: str, dead: bool) -> None:
        demand = self.demands[queue, dead]
        demand.active = True
        for other in self.run.ports:
            theirs = other.demands.get((queue, dead))
            if other is not self and theirs is not None and theirs.active:
                alone = demand.command.exclusive or theirs.command.exclusive
                assert not alone, f"{self.name} and {other.name} have {queue!r}, one of them alone"

    def decline(self, queue: str, dead: bool) -> None:
        demand = self.demands.get((queue, dead))
        if demand is not None and demand.command.once:
            demand.open = False
        if demand is not None and not demand.active and not self.run.broker.is_draining:
            del self.demands[queue, dead]

    def delivered(self, tickets: Sequence[int]) -> None:
        for number in tickets:
            ticket = self.tickets[number]
            assert not ticket.told, f"{ticket} is told DELIVERED again"
            assert not ticket.ended, f"{ticket} has ended, and is told DELIVERED"
            if ticket.wants_reply:
                ticket.told = True
            else:
                ticket.ended = True
                ticket.message.confirmed = True

    def replies(self, tickets: Sequence[int], answers: Batch) -> None:
        for number, answer in zip(tickets, answers.messages(), strict=True):
            assert number in self.tickets, f"{self.name} gets an answer it did not ask for"
            ticket = self.tickets[number]
            assert ticket.wants_reply, f"{ticket} wants no answer"
            assert not ticket.ended, f"{ticket} is answered again"
            assert ticket.told, f"{ticket} is answered before it is told DELIVERED"
            right = answer == b"re:" + ticket.message.payload or (not answer and ticket.message.settled)
            assert right, f"{ticket} gets another one's answer: {answer!r}"
            ticket.ended = ticket.message.may_end = True

    def undelivered(self, tickets: Sequence[int]) -> None:
        for number in tickets:
            ticket = self.tickets[number]
            assert not ticket.ended, f"{ticket} ends twice"
            ticket.ended = True
            ticket.message.may_end |= ticket.wants_reply

    def refused(self, count: int) -> None:
        # Which of them is not seen from here.
        self.unconfirmed.clear()
        if self.asked_to_sync is not None:
            self.asked_to_sync.clear()

    def synced(self) -> None:
        assert self.asked_to_sync is not None, f"{self.name} did not ask for that"
        self.run.confirmed(self.asked_to_sync)
        self.asked_to_sync = None

    def broadcast(self, queue: str, batch: Batch) -> None:
        raise AssertionError("nobody broadcasts")

    def hold(self, held: bool) -> None:
        self.is_held = held

    def finish(self) -> None:
        assert self.closing, f"{self.name} did not want to leave"
        assert not self.held_count(), f"{self} is not done"
        assert not self.open_requests(), f"{self.name} still waits for answers"
        self.finished = True

    def log(self, text: str, count: int) -> None:
        if "queues-max" in text:
            name = re.search("queue '(.*?)'", text)
            assert name is not None
            self.run.refused(name[1], text)
        else:
            # Of its own it settles only what it holds; what was withdrawn from it counts as held.
            assert "settled what it does not hold" not in text, f"{self}: {text}"

    # --- what is known of it when the broker rests -----------------------------------------------

    def held_count(self) -> int:
        return sum(map(len, self.holding.values()))

    def open_requests(self) -> list[Ticket]:
        """Those that the broker has taken in, and not ended."""
        attached = self.run.broker.ports.attached.get(self)
        waiting = attached.waiting if attached is not None else ()
        messages = (it for it in waiting if isinstance(it, Publish))
        unsent = {payload for command in messages for payload in command.batch.messages()}
        return [
            ticket
            for ticket in self.tickets.values()
            if ticket.wants_reply and not ticket.ended and ticket.message.payload not in unsent
        ]

    def taken_away(self) -> int:
        """How many of the messages in its hands are not its own any more."""
        count = 0
        for (queue, dead), held in self.holding.items():
            mine = self.run.held_by(queue, self.name)
            holds = self.run.broker.ports.attached[self].holds.get((queue, dead), 0)
            assert holds == len(held), f"{self} is taken to hold {holds} at {queue!r}"
            for offset, one in held.items():
                if offset not in mine:
                    assert one.ghost or one.message.asks, f"{one.message} is not with {self.name} any more"
                    count += 1
        return count

    def check_room_is_used(self) -> None:
        for (queue, dead), demand in self.demands.items():
            command = demand.command
            held = len(self.holding.get((queue, dead), {}))
            has_credit = demand.open if command.once else not command.credit or held < command.credit
            may_have = demand.active and command.priority and not self.blocked and not self.silent
            if may_have and has_credit and self.bytes_room() > 0 and self.count_room() > 0:
                ready = self.run.log.ready(queue, dead=dead)
                assert not ready, (
                    f"{ready} messages are ready in {queue!r}, {self.name} has room and gets none"
                )

    def wants_alone(self, queue: str) -> bool:
        demand = self.demands.get((queue, False))
        return demand is not None and demand.command.exclusive
