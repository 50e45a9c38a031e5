"""Taking: callers without a connection, who ask for messages, wait for some, and hold them for a time.

A caller is a port like any other, and consumes while it waits: windows, turns, exclusive consumers, pauses
and dead letters are as for everybody. It is answered at the end of the turn in which it got something, with
what there was for it. What it got it holds until its lease ends (`leases.py`): then it counts as lost.

Rules that always hold:
  * A call is answered once: with messages, or with none when its time is over or the broker stops.
  * A verdict is carried out on what is in a lease, whoever says it; and where it names a delivery, on that
    one only. What it does not find is told.
  * A caller that neither waits nor holds anything is forgotten after a while; one that an operator ends, as
    soon as what it held is back. If it comes again, it is another one.
"""

from array import array
from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.broker.leases import SPARE, Lease, Leases
from penstock.broker.ports import Ports
from penstock.broker.settling import Settling
from penstock.log.errors import LogRefused
from penstock.log.log import Log
from penstock.model import words
from penstock.model.batch import Batch, Slice
from penstock.model.life import Reason
from penstock.model.timers import SECOND_US
from penstock.model.words import KEEP_TTL, RETRY_DELAYS, Outcome, Ranges, Where, ranges_of

if TYPE_CHECKING:
    from penstock.broker.broker import Broker

TAKE_BYTES: Final = 1024 * 1024
"""About how many bytes of messages a call is answered with; a first message that is larger comes alone."""

LEASES_A_TURN: Final = 200
SWEEP_US: Final = 10 * SECOND_US
IDLE_US: Final = 60 * SECOND_US

Done = Callable[[int, list[Slice]], None]
"""What a call is answered with: when its lease ends, and what was taken."""


class Waiting:
    """A call that is not answered yet."""

    __slots__ = (
        "bytes",
        "count",
        "dead",
        "done",
        "ends_us",
        "lease_us",
        "number",
        "queue",
        "seen",
        "slices",
        "taken",
    )

    def __init__(
        self, number: int, queue: str, dead: bool, count: int, ends_us: int, lease_us: int, done: Done
    ) -> None:
        self.number = number
        self.queue = queue
        self.dead = dead
        self.count = count
        self.ends_us = ends_us
        self.lease_us = lease_us
        self.done = done
        self.slices: list[Slice] = []
        self.taken = 0
        self.seen = 0  # of these, how many there were when a turn ended
        self.bytes = 0


class Taker:
    """A caller, as a port."""

    protocol = "http"
    lost_to = Where.PLACE
    is_held = False

    def __init__(self, peer: str, user: str, connected: float, looked_at: dict["Taker", None]) -> None:
        self.name = f"http:{peer}"
        self.peer = peer
        self.user = user
        self.connected = connected
        self.wait: Waiting | None = None
        self.seen_us = 0
        self.sent: dict[str, int] = {}  # what it sends comes without a connection
        self.agent = ""  # what it says it is
        self.ended = False  # by an operator: its leases end now
        self._looked_at = looked_at  # who is to be looked at when the turn ends

    def bytes_room(self) -> int:
        return TAKE_BYTES - self.wait.bytes if self.wait is not None else 0

    def count_room(self) -> int:
        return self.wait.count - self.wait.taken if self.wait is not None else 0

    def deliver(self, queue: str, slices: list[Slice], now_us: int, dead: bool) -> None:
        assert self.wait is not None
        self.wait.slices += slices
        for piece in slices:
            self.wait.taken += len(piece)
            self.wait.bytes += piece.payload_bytes
            if piece.headers is not None:
                self.wait.bytes += sum(map(len, piece.headers[piece.lo : piece.hi]))
        self._looked_at[self] = None

    def decline(self, queue: str, dead: bool) -> None:
        if self.wait is not None:
            self.wait.ends_us = 0
            self._looked_at[self] = None

    def about(self, now_us: int) -> dict[str, object]:
        """What is known of it beside what it holds, for people."""
        known: dict[str, object] = {"client": self.agent or self.peer}
        if self.wait is not None:
            known |= {"said": "take", "said_seconds": 0.0, "heard_seconds": 0.0}
        elif self.seen_us:
            silent = max(now_us - self.seen_us, 0) / SECOND_US
            known |= {"said": "take or settle", "said_seconds": silent, "heard_seconds": silent}
        return known

    # What only other ports hear: a caller sends nothing here, and leaves by not coming back.
    def consuming(self, queue: str, dead: bool) -> None: ...
    def delivered(self, tickets: Sequence[int]) -> None: ...
    def replies(self, tickets: Sequence[int], answers: Batch) -> None: ...
    def undelivered(self, tickets: Sequence[int]) -> None: ...
    def refused(self, count: int) -> None: ...
    def synced(self) -> None: ...
    def broadcast(self, queue: str, batch: Batch) -> None: ...
    def hold(self, held: bool) -> None: ...
    def finish(self) -> None: ...
    def log(self, text: str, count: int) -> None: ...


class Ruling(NamedTuple):
    """A verdict on messages of one origin; None for an outcome: they are held for longer."""

    outcome: Outcome | None
    origin: bytes
    offsets: "array[int]"
    attempts: "array[int]"  # which delivery of each is meant; 0: whichever it is
    delay_us: int | None = None
    lease_us: int = 0
    why: str = ""


class Taking:
    def __init__(self, broker: "Broker", log: Log, ports: Ports, settling: Settling) -> None:
        self._broker = broker
        self._log = log
        self._ports = ports
        self._settling = settling
        self._leases = Leases()
        self._takers: dict[str, Taker] = {}  # by what the caller is called
        self._waiting: dict[int, Taker] = {}  # by the number of the call
        self._ends: list[tuple[int, int]] = []  # a heap: until when which call waits
        self._looked_at: dict[Taker, None] = {}
        self._ending: dict[Taker, None] = {}  # their leases are being ended
        self._leases_over = False  # some may be, and are not ended yet
        self._swept_us = 0

    @property
    def takers(self) -> Collection[Taker]:
        """Every caller that there is."""
        return self._takers.values()

    @property
    def is_holding(self) -> bool:
        """Whether some caller has messages."""
        return len(self._leases) > 0

    # --- calls -----------------------------------------------------------------------------------

    def take(
        self,
        number: int,
        caller: str,
        user: str,
        connected: float,
        command: words.Consume,
        wait_us: int,
        lease_us: int,
        now_us: int,
        done: Done,
        agent: str = "",
    ) -> None:
        """Up to `command.credit` messages for a caller, which is what `done` gets, now or later. Raises where
        there can be no such queue."""
        self._broker.doors.check_names((command.queue,))
        taker = self._takers.get(caller)
        if taker is None:
            taker = Taker(caller, user, connected, self._looked_at)
            self._takers[caller] = taker
            self._broker.attach(taker)
        taker.agent = agent
        if taker.wait is not None:
            raise LogRefused(f"queue {command.queue!r}: {caller} waits for messages already")
        queue, dead, ends_us = command.queue, command.dead, now_us + wait_us
        taker.wait = Waiting(number, queue, dead, command.credit, ends_us, lease_us, done)
        self._waiting[number] = taker
        if wait_us:
            heappush(self._ends, (ends_us, number))
            if len(self._ends) > 2 * len(self._waiting) + SPARE:  # Most got something before.
                self._ends = sorted(it for it in self._ends if it[1] in self._waiting)
        else:
            self._looked_at[taker] = None
        # What it holds from earlier calls is its own business.
        command.credit += self._ports.attached[taker].holds.get((queue, dead), 0)
        self._broker.handle(taker, (command,), now_us)

    def untake(self, number: int, now_us: int) -> None:
        """The caller is gone: what it would have got, or has not seen, goes back. No delivery is counted."""
        taker = self._waiting.pop(number, None)
        if taker is not None and taker.wait is not None:
            wait, taker.wait = taker.wait, None
            self._broker.handle(taker, (words.Cancel(wait.queue, wait.dead),), now_us)
            ranges = [(piece.offset_start, piece.offset_end) for piece in wait.slices]
            if ranges:
                self._give_back(taker, wait.queue, wait.dead, ranges, now_us, None)
        for lease in self._leases.of_take(number):
            self._end(lease, now_us, None)

    def end(self, taker: Taker, now_us: int) -> None:
        """An operator sends a caller away: what it waits for it does not get, and its leases end."""
        if taker.ended:
            return
        taker.ended = True
        self._takers.pop(taker.peer, None)
        if taker.wait is not None:
            wait = taker.wait
            self.untake(wait.number, now_us)
            wait.done(now_us, [])
        self._ending[taker] = None
        self._end_callers(now_us)

    def _end_callers(self, now_us: int) -> None:
        """Of those who are sent away: some leases in each turn."""
        left = LEASES_A_TURN
        for taker in list(self._ending):
            for lease in self._leases.of_port(taker, left):
                self._end(lease, now_us, Reason.LEASE_ENDED)
                left -= 1
            if not left:
                break
            del self._ending[taker]
            self._broker.detach(taker, now_us)
        if self._ending:
            self._broker.wake()

    def link_lost(self, now_us: int) -> None:
        """All who wait are gone. Of those who were answered nothing is known: their leases go on."""
        for number in list(self._waiting):
            self.untake(number, now_us)
        self._leases.forget_takes()

    def end_waits(self, now_us: int) -> None:
        """The broker ends: who waits gets nothing, and what it would have got comes again."""
        for taker in list(self._waiting.values()):
            wait, taker.wait = taker.wait, None
            if wait is not None:
                wait.done(now_us, [])
        self._waiting.clear()

    def settle(self, queue: str, ruling: Ruling, now_us: int) -> tuple[int, list[int]]:
        """How many messages were found, and the offsets of those that were not."""
        found: list[tuple[int, int, Lease]] = []
        for first, end in self._meant(queue, ruling):
            found += [it for it in self._leases.find(queue, first, end) if it[2].origin == ruling.origin]
        done: Ranges = []
        if ruling.outcome is None:
            for first, end, lease in found:
                if lease.port not in self._ending:
                    self._leases.extend(lease, first, end, now_us + ruling.lease_us)
                    done.append((first, end))
        else:
            alike: dict[tuple[Taker, bool], Ranges] = {}
            for first, end, lease in found:
                self._leases.let_go(lease, first, end)
                assert isinstance(lease.port, Taker)
                alike.setdefault((lease.port, lease.dead), []).append((first, end))
            delay_us = ruling.delay_us if ruling.delay_us is not None else RETRY_DELAYS
            for (taker, dead), ranges in alike.items():
                command = words.Settle(
                    queue, ruling.outcome, ruling.origin, ranges, KEEP_TTL, dead, delay_us, ruling.why
                )
                taker.seen_us = now_us
                fates = self._settling.settle(self._ports.attached[taker], command, now_us)
                done += [(fate.first, fate.end) for fate in fates]
            self._broker.stir(queue)
        count = sum(end - first for first, end in done)
        if count == len(ruling.offsets):
            return count, []
        settled = {offset for first, end in done for offset in range(first, end)}
        return count, [offset for offset in ruling.offsets if offset not in settled]

    def _meant(self, queue: str, ruling: Ruling) -> Ranges:
        """The messages whose deliveries are those that a verdict names."""
        ranges = ranges_of(ruling.offsets)
        if not any(ruling.attempts):
            return ranges
        told = dict(zip(ruling.offsets, ruling.attempts, strict=True))
        alike = len(set(ruling.attempts)) == 1
        meant: Ranges = []
        for first, end in ranges:
            for a, b, ended in self._log.deliveries(queue, first, end):
                if alike:
                    meant += [(a, b)] if told[a] == ended + 1 else []
                else:
                    meant += ranges_of(it for it in range(a, b) if told[it] in (0, ended + 1))
        return meant

    # --- turns -----------------------------------------------------------------------------------

    def turn(self, now_us: int) -> None:
        """Answer those who got something, or who do not wait."""
        if self._leases_over:
            self._end_leases(now_us)
        if self._ending:
            self._end_callers(now_us)
        if not self._looked_at:
            return
        looked_at = list(self._looked_at)
        self._looked_at.clear()
        for taker in looked_at:
            wait = taker.wait
            if wait is None:
                continue
            if wait.taken > wait.seen and self._wants_more(wait):
                # There was so much that it is handed out in several turns.
                wait.seen = wait.taken
                self._looked_at[taker] = None
                self._broker.wake()
            elif wait.taken or wait.ends_us <= now_us:
                self._answer(taker, wait, now_us)

    def _wants_more(self, wait: Waiting) -> bool:
        if wait.taken >= wait.count or wait.bytes >= TAKE_BYTES or not wait.ends_us:
            return False
        return self._log.ready(wait.queue, dead=wait.dead) > 0

    def _answer(self, taker: Taker, wait: Waiting, now_us: int) -> None:
        taker.wait = None
        taker.seen_us = now_us
        del self._waiting[wait.number]
        self._broker.handle(taker, (words.Cancel(wait.queue, wait.dead),), now_us)
        ends_us = now_us + wait.lease_us
        for piece in wait.slices:
            self._leases.grant(
                Lease(
                    taker,
                    wait.queue,
                    wait.dead,
                    piece.origin,
                    piece.offset_start,
                    piece.offset_end,
                    wait.number,
                    ends_us,
                )
            )
        wait.done(ends_us, wait.slices)

    def tick(self, now_us: int) -> None:
        """Some times a second: those who have waited for long enough, and leases that are over."""
        while self._ends and self._ends[0][0] <= now_us:
            _, number = heappop(self._ends)
            taker = self._waiting.get(number)
            if taker is not None and taker.wait is not None:
                self._answer(taker, taker.wait, now_us)
        self._end_leases(now_us)
        if not 0 <= now_us - self._swept_us < SWEEP_US:
            self._swept_us = now_us
            self._sweep(now_us)

    def _end_leases(self, now_us: int) -> None:
        """Those that are over; where there are many, some in each turn."""
        self._leases_over = False
        for _ in range(LEASES_A_TURN):
            lease = self._leases.ended(now_us)
            if lease is None:
                return
            self._end(lease, now_us, Reason.LEASE_ENDED)
        self._leases_over = True
        self._broker.wake()

    def _end(self, lease: Lease, now_us: int, why: Reason | None) -> None:
        """What is left of a lease goes back."""
        assert isinstance(lease.port, Taker)
        self._give_back(lease.port, lease.queue, lease.dead, self._leases.end(lease), now_us, why)

    def _give_back(
        self, taker: Taker, queue: str, dead: bool, ranges: Ranges, now_us: int, why: Reason | None
    ) -> None:
        self._settling.take_back(self._ports.attached[taker], queue, dead, ranges, now_us, why)

    def _sweep(self, now_us: int) -> None:
        """Forget those who have not been seen for a while."""
        gone = [
            caller
            for caller, taker in self._takers.items()
            if taker.wait is None
            and not self._ports.attached[taker].holds
            and not 0 <= now_us - taker.seen_us < IDLE_US
        ]
        for caller in gone:
            self._broker.detach(self._takers.pop(caller), now_us)

    def stepped(self, by_us: int) -> None:
        """The time was put forward: nobody has waited, or held anything, for that long."""
        self._leases.stepped(by_us)
        self._ends = [(ends_us + by_us, number) for ends_us, number in self._ends]
        for taker in self._waiting.values():
            if taker.wait is not None:
                taker.wait.ends_us += by_us

    def queue_gone(self, queue: str) -> None:
        """It was deleted: nobody holds anything of it. Who waits gets what the next of that name has."""
        self._leases.queue_gone(queue)
        for taker in self._waiting.values():
            wait = taker.wait
            if wait is not None and wait.queue == queue:
                wait.slices, wait.taken, wait.seen, wait.bytes = [], 0, 0, 0
