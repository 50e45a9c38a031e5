"""Seating: all connections of a follower, and what a new leader must be told of them.

The same is told in two ways: in frames, to a leader elsewhere (`tell`), and by calls, to a broker in this
process (`move_to`). The order is the same, and matters:

    settlements that are not known to be durable, with claims to what they settle; then claims to what clients
    hold; then demands. So nothing is given to a client that it has, and nothing that it has settled comes
    again. Those who left with settlements under way are there for that long, and leave again.

How it fails: it does not. A claim that is not granted is the leader's to reckon with.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count as counter
from typing import Final

from penstock.broker.broker import Broker
from penstock.broker.port import Port
from penstock.cluster.columns import pack_ranges
from penstock.cluster.frames import (
    CLAIM_ATTEMPTS,
    CLAIM_ATTEMPTS_MAX,
    CLAIM_DEAD,
    CLAIM_SETTLED,
    WORDS_ACTIVE,
    WORDS_AGAIN,
    Buffer,
    Kind,
    encode_json,
    short_bytes,
    text_bytes,
)
from penstock.cluster.routing import ShardPort
from penstock.cluster.seats import Claim, Held, Seat, Settlement
from penstock.cluster.word_codec import NO_NUMBER, pack_words
from penstock.model import words
from penstock.model.words import Command, Outcome, Ranges, ranges_of
from penstock.server.connection import UNBOUNDED, Connection

TOO_LATE: Final = (
    "is disconnected: while nobody heard this front-end, others have got what the client holds or has settled"
)

Write = Callable[[Seat, Kind, Iterable[Buffer], int], None]  # a frame of a connection, with its flag


class Seating:
    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._seats: dict[Port, Seat] = {}
        self._by_number: dict[int, Seat] = {}
        self._departed: dict[int, Seat] = {}  # gone, with settlements that are not known to be durable
        self._unsettled: deque[Settlement] = deque()  # said, by number
        self._unsaid: dict[Settlement, None] = {}  # queued behind messages, see `sending.py`
        self._port_numbers = counter(1)
        self._settlement_numbers = counter()

    def __iter__(self) -> Iterator[Seat]:
        return iter(list(self._seats.values()))

    def of(self, port: Port) -> Seat | None:
        return self._seats.get(port)

    def at(self, number: int) -> Seat | None:
        """The connection of that number, if it has not left."""
        return self._by_number.get(number)

    @property
    def is_settled(self) -> bool:
        """Nobody holds anything, and every settlement is durable."""
        return not (self._unsettled or self._unsaid) and not any(seat.holds for seat in self._seats.values())

    # --- coming and going --------------------------------------------------------------------------

    def attach(self, port: Port) -> Seat:
        seat = Seat(port, next(self._port_numbers))
        seat.counts_room = port.count_room() < UNBOUNDED
        self._seats[port] = self._by_number[seat.number] = seat
        return seat

    def detach(self, port: Port) -> Seat | None:
        seat = self._seats.pop(port, None)
        if seat is not None:
            del self._by_number[seat.number]
            seat.leave()
            if seat.unsettled:
                self._departed[seat.number] = seat
        return seat

    # --- settlements -------------------------------------------------------------------------------

    def settle(self, seat: Seat, commands: list[words.Settle | words.Reply]) -> Settlement | None:
        """What a client has settled in one chunk; None where nothing of it counts."""
        settling: list[Command] = []
        claims: list[Claim] = []
        for command in commands:
            if isinstance(command, words.Settle):
                door, ranges = (command.queue, command.dead), command.ranges
            else:
                door, ranges = (command.queue, False), ranges_of(command.offsets)
            gone = seat.let_go(door, command.origin, ranges)
            if gone:
                settling.append(command)
                if isinstance(command, words.Settle) and command.outcome is Outcome.REQUEUE:
                    claims += seat.claims_once(door, command.origin, gone)
                else:
                    claims.append(Claim(door, command.origin, gone))
                if seat.attempts:
                    seat.forget_attempts(door, gone)
        if not claims:
            return None
        return self.unsaid(seat, settling, claims)

    def unsaid(self, seat: Seat, settling: list[Command], claims: list[Claim]) -> Settlement:
        """It is to be said."""
        settlement = Settlement(seat, settling, claims, seat.questions)
        self._unsaid[settlement] = None
        seat.unsettled += 1
        return settlement

    def number(self, settlement: Settlement) -> int:
        """It is said now, or by whoever tells the next leader everything: the number to say it with."""
        del self._unsaid[settlement]
        self._unsettled.append(settlement)
        settlement.number = next(self._settlement_numbers)
        return settlement.number

    def take_back(self, number: int) -> list[Settlement]:
        """What was said behind the shipment of that number, which was not stored, is to be said again."""
        back = [it for it in self._unsettled if it.behind > number]
        if back:
            self._unsettled = deque(it for it in self._unsettled if it.behind <= number)
            self._unsaid.update(dict.fromkeys(back))
        return back

    def forget(self, settlement: Settlement) -> None:
        """It is not said: it is durable, or what it speaks of comes again."""
        del self._unsaid[settlement]
        self._ended(settlement)

    def _ended(self, settlement: Settlement) -> None:
        seat = settlement.seat
        seat.settled(settlement.questions)
        if seat.gone and not seat.unsettled:
            self._departed.pop(seat.number, None)

    def settled(self, number: int) -> None:
        """Everything up to that number is durable."""
        while self._unsettled and self._unsettled[0].number <= number:
            self._ended(self._unsettled.popleft())

    # --- a leader elsewhere --------------------------------------------------------------------------

    def attachment(self, seat: Seat) -> bytes:
        """What the leader is told of a connection first."""
        port = seat.port
        seat.told_room = port.count_room()
        connected = time.time() - time.monotonic() + getattr(port, "connected", 0.0)
        return encode_json(
            {
                "name": port.name,
                "protocol": port.protocol,
                "lost_to": port.lost_to.value,
                "peer": getattr(port, "peer", ""),
                "user": user_of(port),
                "connected_us": int(1_000_000 * connected),
                "count_room": seat.told_room,
                "buffer_bytes": self._buffer_bytes,
                "late": seat.late,
            }
        )

    def tell(self, write: Write) -> None:
        """Everything that a leader must know of the connections."""
        seats = [*self._departed.values(), *self._seats.values()]
        for seat in seats:
            seat.begin_link()
            write(seat, Kind.ATTACH, [self.attachment(seat)], 0)
        for settlement in self._unsettled:
            for claim in settlement.claims:
                _write_claim(write, settlement.seat, claim, CLAIM_SETTLED)
            words_again = pack_words(settlement.number, settlement.commands)
            write(settlement.seat, Kind.WORDS, words_again, WORDS_AGAIN)
        for settlement in self._unsaid:
            # It is said later: until then, the client holds what it speaks of.
            for claim in settlement.claims:
                _write_claim(write, settlement.seat, claim, 0)
        for seat in seats:
            for claim in seat.claims():
                _write_claim(write, seat, claim, 0)
        for seat in seats:
            active = [demand.command for demand in seat.demands.values() if demand.active]
            others = [demand.command for demand in seat.demands.values() if not demand.active]
            if active:
                write(seat, Kind.WORDS, pack_words(NO_NUMBER, active), WORDS_ACTIVE)
            if others:
                write(seat, Kind.WORDS, pack_words(NO_NUMBER, others), 0)
        for seat in self._seats.values():
            if seat.closing:
                write(seat, Kind.WORDS, pack_words(NO_NUMBER, [words.Closing()]), 0)
            if seat.idle:
                write(seat, Kind.IDLE, (), 1)
            if seat.blocked:
                write(seat, Kind.BLOCKED, (), 1)
        for seat in self._departed.values():
            write(seat, Kind.DETACH, (), 0)

    # --- a broker here -------------------------------------------------------------------------------

    def move_to(self, broker: Broker, now_us: int, publish: Callable[[], None]) -> None:
        """The same by calls. `publish` hands over what is not known to be stored. Nobody stays here."""

        def claim(seat: Seat, it: Claim, *, is_said: bool = False) -> None:
            (queue, dead), origin, ranges, attempts_max = it
            granted = broker.claim(seat.port, queue, dead, origin, ranges, now_us, attempts_max)
            if seat.late and not (seat.gone or is_said) and count_of(granted) < count_of(ranges):
                too_late.append(seat)

        too_late: list[Seat] = []
        seats = [*self._departed.values(), *self._seats.values()]
        for seat in seats:
            broker.attach(seat.port)
            seat.hold(Held.LEADER, False)
        publish()  # no settlement of who has sent them overtakes them, whatever a crash leaves of the log
        for settlement in (*self._unsettled, *self._unsaid):
            for it in settlement.claims:
                claim(settlement.seat, it, is_said=settlement.number >= 0)
            broker.handle(settlement.seat.port, settlement.commands, now_us)
        for seat in seats:
            for it in seat.claims():
                claim(seat, it)
        for seat in seats:
            for demand in seat.demands.values():
                if demand.active:
                    broker.rejoin(seat.port, demand.command, now_us)
                else:
                    broker.handle(seat.port, [demand.command], now_us)
        for seat in self._departed.values():
            broker.detach(seat.port, now_us)
        for seat in self:
            if seat.idle:
                broker.idle(seat.port, True)
            if seat.blocked:
                broker.blocked(seat.port, True)
            if seat.closing:
                broker.handle(seat.port, [words.Closing()], now_us)
        self._seats.clear()
        self._by_number.clear()
        self._departed.clear()
        self._unsettled.clear()
        self._unsaid.clear()
        for seat in too_late:
            end_late(seat.port)


def _write_claim(write: Write, seat: Seat, claim: Claim, flag: int) -> None:
    (queue, dead), origin, ranges, attempts_max = claim
    body = (text_bytes(queue), short_bytes(origin), pack_ranges(ranges))
    if attempts_max is not None and attempts_max <= CLAIM_ATTEMPTS_MAX:
        flag |= attempts_max + 1 << CLAIM_ATTEMPTS
    write(seat, Kind.CLAIM, body, flag | (CLAIM_DEAD if dead else 0))


def count_of(ranges: Ranges) -> int:
    return sum(end - first for first, end in ranges)


def end_late(port: Port) -> None:
    """Somebody else has got what it holds or has settled, which it may not know."""
    if isinstance(port, Connection | ShardPort) and not port.is_gone:
        port.log(TOO_LATE, 1)
        port.drop()


def user_of(port: Port) -> str:
    """The name of who is at a connection, as the leader shows it; what that one may do is judged here."""
    return str(getattr(port, "user", ""))
