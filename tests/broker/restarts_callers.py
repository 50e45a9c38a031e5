"""The callers of a run of `restarts.py`: they take messages, hold them by leases, settle them by any call.

Each checks what it is answered; what only shows when the broker rests is asked for by the run. Of a broker
that is gone nothing is left: neither calls nor leases move to the next one.
"""

from array import array
from itertools import count
from typing import TYPE_CHECKING

from penstock.broker.leases import STEP_US
from penstock.broker.taking import Ruling, Taker
from penstock.log.errors import LogRefused
from penstock.model.batch import Slice
from penstock.model.words import Consume, Outcome
from tests.broker.restarts_ports import SECOND_US, Door, Message

if TYPE_CHECKING:
    from tests.broker.restarts import Run

NAMES = ("c1", "c2", "c3")


class Call:
    """A call for messages, answered or not."""

    def __init__(self, number: int, name: str, door: Door, most: int, lease_us: int) -> None:
        self.number = number
        self.name = name
        self.door = door
        self.most = most
        self.lease_us = lease_us


class Leased:
    """A message in somebody's hands."""

    def __init__(self, call: Call, message: Message, origin: bytes, attempts: int, ends_us: int) -> None:
        self.call = call
        self.message = message
        self.origin = origin
        self.attempts = attempts
        self.ends_us = ends_us
        self.extended = False


class Callers:
    def __init__(self, run: "Run") -> None:
        self.run = run
        self.numbers = count(1)
        self.waiting: dict[str, Call] = {}
        self.answered: list[Call] = []  # that may still be undone
        self.leased: dict[Door, dict[int, Leased]] = {}

    # --- what they do ----------------------------------------------------------------------------

    def take(self, queue: str) -> None:
        rng, run = self.run.rng, self.run
        free = [name for name in NAMES if name not in self.waiting]
        if not free:
            return
        dead, most = rng.random() < 0.2, rng.choice((1, 2, 5, 100))
        lease_us = rng.choice((SECOND_US // 2, 2 * SECOND_US, 60 * SECOND_US))
        call = Call(next(self.numbers), rng.choice(free), (queue, dead), most, lease_us)
        self.waiting[call.name] = call

        def done(ends_us: int, slices: list[Slice]) -> None:
            self.answer(call, ends_us, slices)

        wait_us = rng.choice((0, 0, SECOND_US, 5 * SECOND_US))
        try:
            run.broker.taking.take(
                call.number,
                call.name,
                "",
                0.0,
                Consume(queue, most, dead),
                wait_us,
                lease_us,
                run.now_us,
                done,
            )
        except LogRefused as error:
            del self.waiting[call.name]
            run.refused(queue, str(error))

    def answer(self, call: Call, ends_us: int, slices: list[Slice]) -> None:
        assert self.waiting.pop(call.name, None) is call, f"{call.name} is answered, and did not wait"
        queue, dead = call.door
        taken = sum(map(len, slices))
        assert taken <= call.most, f"{call.name} gets {taken} for {call.most}"
        leased = self.leased.setdefault(call.door, {})
        elsewhere = self.leased.get((queue, not dead), {})  # It may have died since, or come back.
        self.run.delivered[queue] += taken
        for piece in slices:
            for i, payload in enumerate(piece.messages(), piece.lo):
                message = self.run.messages[payload]
                assert message.queue == queue, f"{message} came out of {queue!r}"
                offset = piece.first_offset + i
                attempts = 1 + (piece.attempts[i] if piece.attempts is not None else 0)
                before = elsewhere.pop(offset, None) or leased.get(offset)
                assert before is None or before.ends_us <= self.run.now_us, f"{message} is leased twice"
                leased[offset] = Leased(call, message, piece.origin, attempts, ends_us)
                message.may_end |= queue == "off"
        if taken:
            self.answered.append(call)

    def undo(self) -> None:
        """A caller is gone, while it waits or when it was to be answered."""
        run = self.run
        calls = [*self.waiting.values(), *self.answered]
        if not calls:
            return
        call = run.rng.choice(calls)
        if call in self.answered:
            self.answered.remove(call)
            leased = self.leased[call.door]
            for offset in [o for o, it in leased.items() if it.call is call and not it.extended]:
                del leased[offset]
        else:
            del self.waiting[call.name]
            self.taken_in_vain(call)
        run.broker.taking.untake(call.number, run.now_us)

    def taken_in_vain(self, call: Call) -> None:
        """What was handed out to it before it could be answered counts as handed out."""
        taker = self.run.broker.taking._waiting[call.number]
        assert taker.wait is not None
        self.run.delivered[call.door[0]] += taker.wait.taken

    def lose_link(self) -> None:
        """All who wait are gone, and numbers begin again."""
        for call in self.waiting.values():
            self.taken_in_vain(call)
        self.waiting.clear()
        self.answered.clear()
        self.numbers = count(1)
        self.run.broker.taking.link_lost(self.run.now_us)

    def settle(self) -> None:
        rng = self.run.rng
        doors = [door for door, leased in self.leased.items() if leased]
        if doors:
            door = rng.choice(doors)
            offsets = list(self.leased[door])
            chosen = rng.sample(offsets, rng.randint(1, len(offsets)))
            self.end(door, chosen, rng.choice((Outcome.ACK, Outcome.ACK, *Outcome, None)))

    def settle_all(self) -> bool:
        """Everything that they hold is done, and nobody waits; whether there was any."""
        waited = bool(self.waiting)  # Who was answered may be gone as well: what it had is ready again.
        while self.waiting:
            self.undo()
        doors = [door for door, leased in self.leased.items() if leased]
        for door in doors:
            self.end(door, list(self.leased[door]), Outcome.ACK, whichever=True)
        return waited or bool(doors)

    def end(
        self, door: Door, offsets: list[int], outcome: Outcome | None, *, whichever: bool = False
    ) -> None:
        run, leased = self.run, self.leased[door]
        delay_us = run.rng.choice((None, 0, SECOND_US)) if outcome is Outcome.REQUEUE else None
        origins = {offset: leased[offset].origin for offset in sorted(offsets)}
        for origin in dict.fromkeys(origins.values()):
            mine = [offset for offset, its_origin in origins.items() if its_origin == origin]
            named = {offset: not whichever and run.rng.random() < 0.5 for offset in mine}
            attempts = [leased[offset].attempts * named[offset] for offset in mine]
            with_them = {o for name in NAMES for o in run.held_by(door[0], f"http:{name}")}
            ruling = Ruling(
                outcome, origin, array("q", mine), array("i", attempts), delay_us, 3 * SECOND_US, "why"
            )
            for offset in mine if outcome is Outcome.ACK else ():
                leased[offset].message.may_end = leased[offset].message.settled = True
            done, gone = run.broker.taking.settle(door[0], ruling, run.now_us)
            # What was withdrawn from somebody's hands is in its lease, which can be extended.
            asking = {offset for offset in mine if outcome is None and leased[offset].message.asks}
            missing = {offset for offset in mine if offset not in with_them}
            assert {*gone} - asking == missing - asking, f"{gone} of {mine} are gone"
            assert done == len(mine) - len(gone)
            if outcome is Outcome.ACK:
                run.acked[door[0]] += done
            for offset in mine:
                it = leased[offset]
                if offset in gone:
                    assert it.ends_us <= run.now_us or it.message.asks, f"{it.message} is gone too early"
                if outcome is None and offset not in gone:
                    it.ends_us, it.extended = run.now_us + ruling.lease_us, True
                elif not (offset in gone and named[offset] and it.attempts > 1 and it.ends_us > run.now_us):
                    # What was withdrawn has had no deliveries: it stays in its lease if a later one is named.
                    del leased[offset]

    def forget(self) -> None:
        """The broker is gone."""
        self.__init__(self.run)  # type: ignore[misc]

    # --- what is known of them when the broker rests ---------------------------------------------

    def doors(self) -> set[str]:
        """Queues that somebody waits at."""
        return {call.door[0] for call in self.waiting.values()}

    def check(self, held: dict[str, int]) -> None:
        """`held`: how many messages the log says everybody has; what these have is taken out of it."""
        run = self.run
        counts = dict.fromkeys(NAMES, 0)
        for (queue, _), leased in self.leased.items():
            with_them = {name: run.held_by(queue, f"http:{name}") for name in NAMES}
            for offset, it in list(leased.items()):
                if offset in with_them[it.call.name]:
                    late_us = run.now_us - it.ends_us
                    assert late_us < STEP_US, f"{it.message} is held {late_us} µs behind its lease"
                    counts[it.call.name] += 1
                else:
                    assert it.ends_us <= run.now_us or it.message.asks, (
                        f"{it.message} was taken from {it.call.name}"
                    )
                    if not it.message.asks or it.ends_us <= run.now_us - STEP_US:
                        del leased[offset]  # Otherwise it was withdrawn, and counts as held.
        for name in NAMES:
            in_hand = held.pop(f"http:{name}", 0)
            assert in_hand == counts[name], f"{name} has {in_hand}, and was given {counts[name]}"
        taking = run.broker.taking
        for attached in run.broker.ports.attached.values():
            if isinstance(attached.port, Taker):
                mine = [
                    it.ends_us
                    for leased in self.leased.values()
                    for it in leased.values()
                    if it.call.name == attached.port.peer
                ]
                over = sum(ends_us <= run.now_us for ends_us in mine)  # in a step that may not be over
                holds = sum(attached.holds.values())
                assert len(mine) - over <= holds <= len(mine), f"{attached.port.name} holds {attached.holds}"
        assert set(taking._waiting) == {call.number for call in self.waiting.values()}
        for call in self.waiting.values():
            alone = any(
                demand.command.exclusive
                for port in run.ports
                for door, demand in port.demands.items()
                if door == call.door
            )
            queue, dead = call.door
            assert alone or not run.log.ready(queue, dead=dead), f"{call.name} waits, and {queue!r} has some"
