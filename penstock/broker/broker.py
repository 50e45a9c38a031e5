"""The broker: words from ports, messages to ports, the log below.

A turn of the server's loop is: received chunks become words (`handle`), then `turn` hands out what
consumers have room for and has the log put out what came, in one go. Nothing here waits, reads
a clock or touches a socket; `wants_turn` asks the server for the next turn.

Rules that always hold:
  * A queue is a queue, whichever door a message came through; nobody below a port knows protocols.
  * What a consumer has room for is decided here and nowhere else: its window, its buffer, its turn.
  * A sender for whose messages there is no room is not told no: it is not read any more, its
    messages wait here in order, and go in as soon as there is room, before those of later senders.
  * A port that goes away leaves nothing behind: what it held goes back by the rule of its protocol,
    what it had asked for is withdrawn, whoever waited behind it moves up.
  * Every request ends once: a reply, or the news that there will be none.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from heapq import heapify, heappop, heappush
from itertools import count as counter
from itertools import islice
from typing import Any, Final, NamedTuple

from penstock.broker import requests
from penstock.broker.consumers import Consumers, Joined
from penstock.broker.port import Port
from penstock.broker.requests import Asked, Outgoing, Runs
from penstock.log.errors import DiskFull, LogError, LogRefused, QueueFull
from penstock.log.log import Log
from penstock.log.results import Fate, Receipt, Stored
from penstock.model import words
from penstock.model.batch import Batch, Slice
from penstock.model.life import Event, Reason
from penstock.model.policy import Policies, QueueNameError, check_queue_name
from penstock.model.ranges import RangeMap
from penstock.model.words import Outcome, Ranges, ranges_of

SECOND_US = 1_000_000
DISPATCH_BYTES = 256 * 1024
"""About how much one consumer gets in one go, so that others and the socket are not kept waiting."""

MESSAGE_BYTES: Final = 160
"""What a message is taken to cost beside its payload and the name of its queue, when it is handed out. The
longest of the wires, PHPMQ, writes about so much around each."""

EVERY_QUEUE: Final = ""


class Door:
    """One way into a queue: its messages, or its dead letters."""

    __slots__ = ("consumers", "dead", "queue")

    def __init__(self, queue: str, dead: bool) -> None:
        self.queue = queue
        self.dead = dead
        self.consumers: Consumers[Port] = Consumers()


class Desk:
    """What the broker knows of a queue besides its messages."""

    __slots__ = ("asked", "asked_early", "dead", "ended_early", "living", "orphans", "outgoing")

    def __init__(self, queue: str) -> None:
        self.living = Door(queue, dead=False)
        self.dead = Door(queue, dead=True)
        self.outgoing = Outgoing()
        self.asked: RangeMap[Asked] = RangeMap()  # requests in this queue, by offset
        self.asked_early: dict[Asked, None] = {}  # requests whose offsets are not known yet
        self.ended_early: RangeMap[None] = RangeMap()  # what has come to an end since there are such
        self.orphans: RangeMap[str] = RangeMap()  # withdrawn while a consumer (its name) works on them

    def door(self, dead: bool) -> Door:
        return self.dead if dead else self.living


class Guest:
    """What the broker knows of a port."""

    __slots__ = (
        "asked",
        "asked_numbers",
        "blocked",
        "closing",
        "doors",
        "ghosts",
        "holds",
        "idle",
        "number",
        "port",
        "receipts",
        "starved",
        "waiting",
    )

    def __init__(self, port: Port, number: int) -> None:
        self.port = port
        self.number = number
        self.doors: dict[tuple[str, bool], Door] = {}  # it consumes there
        self.holds: dict[tuple[str, bool], int] = {}  # by door: messages that it has not settled
        self.ghosts: dict[
            tuple[str, bool], RangeMap[None]
        ] = {}  # of these, what it claimed and is not its own
        self.asked: dict[int, Asked] = {}  # requests whose answers it waits for
        self.asked_numbers = counter()
        self.receipts = 0  # batches that are on their way to the disk, and it waits to hear so
        self.waiting: deque[words.Publish] = deque()  # there is no room for these yet
        self.closing = False
        self.blocked = False  # its buffer is full
        self.idle = False  # its peer does not answer
        self.starved: dict[Door, None] = {}  # there it had no room when it was its turn

    @property
    def is_done(self) -> bool:
        return not (self.holds or self.asked or self.receipts or self.waiting)


class GuestInfo(NamedTuple):
    """A port as people see it."""

    number: int  # in the order of arrival
    port: Port
    consumes: list[tuple[str, bool]]  # queue, and whether its dead letters
    held: int  # messages that it has not settled
    blocked: bool  # it does not read what it gets
    held_back: bool  # there is no room for what it sends


class Broker:
    """See the module's docstring."""

    def __init__(
        self,
        log: Log,
        wants_turn: Callable[[], None],
        *,
        policies: Policies | None = None,
        queue_name_bytes_max: int = 255,
        queues_max: int = 100_000,
    ) -> None:
        self._log = log
        self._wants_turn = wants_turn
        self._policies = policies or Policies()
        self._queue_name_bytes_max = queue_name_bytes_max
        self._queues_max = queues_max
        self._opening = log.opening
        self._desks: dict[str, Desk] = {}
        self._strangers: set[str] = set()  # those of names that are not, or not yet, queues of the log
        self._guests: dict[Port, Guest] = {}
        self._by_number: dict[int, Guest] = {}
        self._numbers = counter(1)
        self._stirred: dict[Door, None] = {}  # doors where something may be handed out
        self._deadlines: list[tuple[int, int, Asked]] = []
        self._deadlines_over = 0  # how many of them are of requests that have ended
        self._held_back: dict[Guest, None] = {}  # in the order in which they go in
        self._full: set[str] = set()  # queues that they wait for; EVERY_QUEUE where the disk is full
        self._starved: dict[Guest, None] = {}  # who had no room at some door, without being blocked
        self._consumers_changed: dict[str, None] = {}  # queues that somebody has begun or ceased to consume
        self._draining = False
        self._awaits_claims = False
        self._suspended = False
        self._early: dict[tuple[Guest, str, bool], words.Consume] = {}  # demands that came meanwhile
        self._speaking: Guest | None = None  # whose commands are being handled
        self._syncing: dict[Guest, None] = {}  # these want to hear when all that they have said is durable

    # --- ports -----------------------------------------------------------------------------------

    def attach(self, port: Port) -> None:
        guest = Guest(port, next(self._numbers))
        self._guests[port] = self._by_number[guest.number] = guest

    def detach(self, port: Port, now_us: int, *, lost: bool = True) -> None:
        """The connection is gone, whatever the reason.

        Where it is not `lost`, only on its way to another port: what it holds goes back to its place, and
        no delivery is counted.
        """
        guest = self._guests.pop(port, None)
        if guest is None:
            return
        del self._by_number[guest.number]
        for waiting in (self._held_back, self._starved, self._syncing):
            waiting.pop(guest, None)
        for key in [key for key in self._early if key[0] is guest]:
            del self._early[key]
        for door in list(guest.doors.values()):
            self._leave(guest, door)
        for queue in {queue for queue, _ in guest.holds}:
            where = port.lost_to if lost else words.Where.PLACE
            fates = self._log.give_back(queue, port.name, now_us, where=where, lost=lost)
            self._ended_without_answer(queue, fates)
            desk = self._desks.get(queue)
            for first, end, name in list(desk.orphans) if desk is not None else ():
                if name == port.name and desk is not None:
                    desk.orphans.cut(first, end)
            self._stir(queue)
        for asked in guest.asked.values():
            if asked.first >= 0:
                self._withdraw(asked, Reason.REQUESTER_GONE, now_us)
                self._undelivered(asked, asked.end_all())
        self._wants_turn()

    def handle(self, port: Port, commands: Iterable[words.Command], now_us: int) -> None:
        """What a port has said in one chunk."""
        guest = self._guests[port]
        self._speaking = guest
        try:
            for command in commands:
                # The two that come with every chunk are called directly: the compiled build binds them.
                if isinstance(command, words.Publish):
                    self._publish(guest, command, now_us)
                elif isinstance(command, words.Settle):
                    self._settle(guest, command, now_us)
                else:
                    _HANDLERS[type(command)](self, guest, command, now_us)
        finally:
            self._speaking = None
        self._maybe_finish(guest)
        self._wants_turn()

    def blocked(self, port: Port, blocked: bool) -> None:
        """The port's buffer is full, or has room again."""
        guest = self._guests.get(port)
        if guest is None:
            return
        guest.blocked = blocked
        for door in guest.doors.values():
            door.consumers.block(port, blocked)
            if not blocked:
                self._stirred[door] = None
        if not blocked:
            guest.starved.clear()
            self._starved.pop(guest, None)
            self._wants_turn()

    def idle(self, port: Port, idle: bool) -> None:
        """The peer does not answer: no new work for it; or it does again."""
        guest = self._guests[port]
        guest.idle = idle
        for door in guest.doors.values():
            door.consumers.mark_idle(port, idle)
            self._stirred[door] = None
        self._wants_turn()

    # --- after another broker ----------------------------------------------------------------------

    def wait_for_claims(self, waiting: bool) -> None:
        """Whether to hand out nothing, because messages may be with those who held them at the broker before
        this one. Demands that come meanwhile count from its end on, in their order."""
        self._awaits_claims = waiting
        if not waiting:
            early, self._early = self._early, {}
            for (guest, _, _), command in early.items():
                self._join(guest, command)
            self._wants_turn()

    @property
    def is_suspended(self) -> bool:
        return self._suspended

    def suspend(self, suspended: bool) -> None:
        """Whether to hand out nothing, because another broker may be about to do so."""
        self._suspended = suspended
        if not suspended:
            self._wants_turn()

    def claim(
        self,
        port: Port,
        queue: str,
        dead: bool,
        origin: bytes,
        ranges: Ranges,
        now_us: int,
        attempts_max: int | None = None,
    ) -> Ranges:
        """What a port still holds from before: it is its own again as far as it can be had; that is answered.

        Where more than `attempts_max` deliveries of a message have ended, this one has, too.
        What it does not get, it has all the same: that takes room in its window until it lets go of it.
        """
        guest = self._guests[port]
        try:
            self._desk(queue)
        except (LogRefused, QueueNameError) as error:
            port.log(f"refused: {error}", 1)
            return []
        granted = self._log.resume(
            queue, port.name, ranges, now_us, origin=origin, dead=dead, attempts_max=attempts_max
        )
        ghosts = guest.ghosts.setdefault((queue, dead), RangeMap())
        claimed = -ghosts.total
        for first, end in ranges:
            ghosts.cut(first, end)
            ghosts.add(first, end, None)
        claimed += ghosts.total
        for first, end in granted:
            ghosts.cut(first, end)
        if claimed:
            guest.holds[queue, dead] = guest.holds.get((queue, dead), 0) + claimed
            if (queue, dead) in guest.doors:
                guest.doors[queue, dead].consumers.took(port, claimed)
        return granted

    def rejoin(self, port: Port, command: words.Consume, now_us: int) -> None:
        """A demand that was in force before: it is again, ahead of those that were not."""
        self._join(self._guests[port], command)
        self._wants_turn()

    def take_back(self, port: Port, queue: str, dead: bool, ranges: Ranges, now_us: int) -> None:
        """What was handed out did not reach the peer, which wants it no more: no delivery is counted."""
        guest = self._guests[port]
        fates = self._log.give_back(queue, port.name, now_us, ranges=ranges, lost=False)
        self._freed(guest, queue, dead, fates, ranges)
        self._ended_without_answer(queue, fates)
        self._stir(queue)
        self._wants_turn()

    # --- for the operator --------------------------------------------------------------------------

    def guests(self, after: int, count: int) -> list[GuestInfo]:
        """Up to `count` ports with a higher number than `after`, in the order in which they came."""
        later = (guest for number, guest in self._by_number.items() if number > after)
        return [
            GuestInfo(
                guest.number,
                guest.port,
                list(guest.doors),
                sum(guest.holds.values()),
                guest.blocked,
                guest in self._held_back,
            )
            for guest in islice(later, count)
        ]

    def consumer_count(self, queue: str) -> int:
        """Of its messages and of its dead letters."""
        desk = self._desks.get(queue)
        return len(desk.living.consumers) + len(desk.dead.consumers) if desk is not None else 0

    def consumers_changed(self) -> list[str]:
        """Queues that somebody has begun or ceased to consume since this was last asked."""
        changed = list(self._consumers_changed)
        self._consumers_changed.clear()
        return changed

    def stir(self, queue: str) -> None:
        """There may be something to hand out, to the disk or to consumers."""
        self._stir(queue)
        self._wants_turn()

    def wake(self) -> None:
        """There is something for the disk."""
        self._wants_turn()

    def is_asked(self, queue: str) -> bool:
        """Whether somebody waits for answers to requests in that queue."""
        desk = self._desks.get(queue)
        return desk is not None and bool(desk.asked or desk.asked_early)

    def purged(self, queue: str, fates: Sequence[Fate]) -> None:
        """An operator has taken these out: tell who waits for an answer."""
        self._ended_without_answer(queue, fates)
        self._wants_turn()

    @property
    def policies(self) -> Policies:
        return self._policies

    @property
    def is_draining(self) -> bool:
        return self._draining

    # --- in --------------------------------------------------------------------------------------

    def _publish(self, guest: Guest, command: words.Publish, now_us: int) -> None:
        if guest.waiting:
            guest.waiting.append(command)
        elif (self._full and self._others_wait(command.queue)) or not self._store(guest, command, now_us):
            guest.waiting.append(command)
            guest.port.hold(True)
            self._held_back[guest] = None

    def _others_wait(self, queue: str) -> bool:
        """Whether somebody came before who waits for room in that queue: nobody overtakes it."""
        return queue in self._full or EVERY_QUEUE in self._full

    def _store(self, guest: Guest, command: words.Publish, now_us: int) -> bool:
        """Whether the log has taken them, or refused them for good; they wait where it has no room."""
        batch, tickets = command.batch, command.tickets
        batch.protocol = guest.port.protocol
        asked = None
        receipt = None
        if tickets is not None:
            if command.wants_reply:
                asked = Asked(guest.port, next(guest.asked_numbers), command.queue, tickets)
                batch.reply = requests.addresses(self._opening, guest.number, asked.number, len(tickets))
                receipt = self._asked_receipt(guest, asked, now_us)
            else:
                receipt = self._receipt(guest, tickets)
        try:
            desk = self._desks.get(command.queue) or self._desk(command.queue)
            self._log.append(command.queue, batch, now_us, receipt)
        except (LogRefused, QueueNameError) as error:
            self._forget_stranger(command.queue)
            if isinstance(error, DiskFull | QueueFull) and not self._never_fits(command):
                self._full.add(EVERY_QUEUE if isinstance(error, DiskFull) else command.queue)
                return False
            guest.port.log(f"refused: {error}", len(batch))
            if tickets is not None:
                guest.port.undelivered(tickets)
            else:
                guest.port.refused(len(batch))
            return True
        if asked is not None:
            guest.asked[asked.number] = asked
            if asked.first < 0:
                desk.asked_early[asked] = None
            if command.timeout_seconds:
                asked.timed = True
                deadline = now_us + command.timeout_seconds * SECOND_US
                heappush(self._deadlines, (deadline, id(asked), asked))
        elif receipt is not None:
            guest.receipts += 1
        self._stir(command.queue)
        return True

    def _never_fits(self, command: words.Publish) -> bool:
        """Whether it is one message that is more than its queue may ever have."""
        bytes_max = self._policies.for_queue(command.queue).max_bytes
        return len(command.batch) == 1 and 0 < bytes_max < len(command.batch.payload)

    def check_names(self, queues: Iterable[str]) -> None:
        """Raise unless all of these are queues, or may be."""
        new = set()
        for queue in queues:
            if queue not in self._desks:
                check_queue_name(queue, self._queue_name_bytes_max)
                if not self._log.has_queue(queue):
                    new.add(queue)
        if new and self._log.queue_count + len(self._strangers) + len(new) > self._queues_max:
            raise LogRefused(
                f"queue {min(new)!r}: there are {self._queues_max} queues already, the limit of queues-max"
            )

    def _desk(self, queue: str) -> Desk:
        desk = self._desks.get(queue)
        if desk is None:
            self.check_names((queue,))
            desk = self._desks[queue] = Desk(queue)
            if not self._log.has_queue(queue):
                self._strangers.add(queue)
        return desk

    def _forget_stranger(self, queue: str) -> None:
        """Nobody consumes there, and perhaps nothing was ever stored there: then the name counts no more."""
        if queue in self._strangers:
            desk = self._desks[queue]
            if not desk.living.consumers and not desk.dead.consumers:
                self._strangers.discard(queue)
                if not self._log.has_queue(queue):
                    del self._desks[queue]

    def _receipt(self, guest: Guest, tickets: Sequence[int]) -> Receipt:
        port = guest.port

        def receipt(result: Stored | LogError) -> None:
            if port not in self._guests:
                return
            if isinstance(result, Stored):
                port.delivered(tickets)
            else:
                port.undelivered(tickets)
            guest.receipts -= 1
            self._maybe_finish(guest)

        return receipt

    def _asked_receipt(self, guest: Guest, asked: Asked, now_us: int) -> Receipt:
        def receipt(result: Stored | LogError) -> None:
            desk = self._desks[asked.queue]
            desk.asked_early.pop(asked, None)
            if not isinstance(result, Stored):
                self._undelivered(asked, asked.end_all())
                return
            asked.first = result.first
            if desk.ended_early:
                for first, end, _ in desk.ended_early.find(result.first, result.end):
                    self._end_undelivered(asked, asked.open_in(first, end))
                if not desk.asked_early:
                    desk.ended_early = RangeMap()
            if not asked.open_count:
                return
            if guest.port in self._guests:
                desk.asked.add(result.first, result.end, asked)
            else:
                # Its sender left before the log had told where the requests are. A log that is closing
                # says no: the next opening withdraws them.
                with suppress(LogRefused):
                    self._withdraw(asked, Reason.REQUESTER_GONE, now_us)
                self._undelivered(asked, asked.end_all())
                self._wants_turn()

        return receipt

    def _broadcast(self, guest: Guest, command: words.Broadcast, now_us: int) -> None:
        desk = self._desks.get(command.queue)
        if desk is not None:
            for port in desk.living.consumers.broadcast_targets():
                port.broadcast(command.queue, command.batch)

    # --- demand ----------------------------------------------------------------------------------

    def _consume(self, guest: Guest, command: words.Consume, now_us: int) -> None:
        if self._awaits_claims:
            self._early[guest, command.queue, command.dead] = command
        else:
            self._join(guest, command)

    def _join(self, guest: Guest, command: words.Consume) -> None:
        port = guest.port
        if self._draining or guest.closing or (command.once and self._nothing_comes(command)):
            port.decline(command.queue, command.dead)
            return
        try:
            door = self._desk(command.queue).door(command.dead)
        except (LogRefused, QueueNameError) as error:
            port.log(f"refused: {error}", 1)
            port.decline(command.queue, command.dead)
            return
        for other in door.consumers.change(port, command.exclusive):
            if other is not port:
                other.consuming(command.queue, command.dead)
        joined = door.consumers.join(
            port,
            command.credit,
            command.priority,
            command.exclusive,
            once=command.once,
            held=guest.holds.get((command.queue, command.dead), 0),
        )
        guest.doors[command.queue, command.dead] = door
        if guest.blocked:
            door.consumers.block(port, True)
        if guest.idle:
            door.consumers.mark_idle(port, True)
        self._note_consumers(command.queue)
        self._stirred[door] = None
        if joined is Joined.ACTIVE:
            port.consuming(command.queue, command.dead)

    def _note_consumers(self, queue: str) -> None:
        """Whoever lists queues shows only those that there are; perhaps nobody ever asks."""
        if self._log.has_queue(queue):
            self._consumers_changed[queue] = None

    def _nothing_comes(self, command: words.Consume) -> bool:
        """Whether it is certain that this demand would wait for nothing."""
        if self._log.is_paused(command.queue):
            return True
        return command.dead and not self._policies.for_queue(command.queue).dead_letters

    def _cancel(self, guest: Guest, command: words.Cancel, now_us: int) -> None:
        self._early.pop((guest, command.queue, command.dead), None)
        door = guest.doors.get((command.queue, command.dead))
        if door is not None:
            self._leave(guest, door)

    def _leave(self, guest: Guest, door: Door) -> None:
        guest.doors.pop((door.queue, door.dead), None)
        guest.starved.pop(door, None)
        self._note_consumers(door.queue)
        for port in door.consumers.leave(guest.port):
            port.consuming(door.queue, door.dead)
        self._stirred[door] = None
        self._forget_stranger(door.queue)

    # --- the ends of deliveries --------------------------------------------------------------------

    def _settle(self, guest: Guest, command: words.Settle, now_us: int) -> None:
        try:
            fates = self._log.settle(
                command.queue,
                guest.port.name,
                command.outcome,
                command.ranges,
                now_us,
                origin=command.origin,
                ttl_seconds=command.ttl_seconds,
                dead=command.dead,
            )
        except LogRefused as error:  # A new TTL that no message can have: it holds them still.
            guest.port.log(f"refused: {error}", sum(end - first for first, end in command.ranges))
            return
        settled = self._freed(guest, command.queue, command.dead, fates, command.ranges)
        named = 0
        for first, end in command.ranges:
            named += end - first
        if settled < named:
            guest.port.log(
                f"queue {command.queue!r}: settled what it does not hold ({command.outcome.value})",
                named - settled,
            )
        desk = self._desks.get(command.queue)
        if desk is None or command.dead or not desk.outgoing:
            return
        if command.outcome is Outcome.ACK:
            self._answer_empty(desk, [(fate.first, fate.end) for fate in fates])
        else:
            self._ended_without_answer(command.queue, fates)

    def _freed(self, guest: Guest, queue: str, dead: bool, fates: Sequence[Fate], ranges: Ranges) -> int:
        """Room that a consumer has again; how many messages it has let go of."""
        settled = 0
        for fate in fates:
            settled += fate.end - fate.first
        desk = self._desks.get(queue)
        if desk is None:
            return 0
        if desk.orphans and not dead:
            settled += self._orphans_done(desk, guest.port.name, ranges)
        ghosts = guest.ghosts.get((queue, dead)) if guest.ghosts else None
        if ghosts:
            settled += sum(end - first for pair in ranges for first, end, _ in ghosts.cut(*pair))
        if settled:
            key = queue, dead
            left = guest.holds.get(key, 0) - settled
            if left > 0:
                guest.holds[key] = left
            else:
                guest.holds.pop(key, None)
            desk.door(dead).consumers.freed(guest.port, settled)
            self._stirred[desk.living] = None
            if dead or desk.dead.consumers:
                self._stirred[desk.dead] = None
            if guest.starved:
                self._feed(guest)
            self._maybe_finish(guest)
        return settled

    @staticmethod
    def _orphans_done(desk: Desk, name: str, ranges: Ranges) -> int:
        """A consumer is done with requests that were withdrawn from it: its room is free again."""
        done = 0
        for first, end in ranges:
            for a, b, holder in desk.orphans.find(first, end):
                if holder == name:
                    desk.orphans.cut(a, b)
                    done += b - a
        return done

    def _accepted(self, guest: Guest, command: words.Accepted, now_us: int) -> None:
        desk = self._desks.get(command.queue)
        if desk is not None:
            self._tell_delivered(desk.outgoing.look(command.ranges))

    def _tell_delivered(self, runs: Runs) -> None:
        for asked, (indexes, _) in self._open_requests(runs).items():
            self._tell_once(asked, indexes)

    @staticmethod
    def _tell_once(asked: Asked, indexes: Sequence[int]) -> None:
        """That a consumer has these; whoever asked has not heard it of some, whichever consumer it was."""
        fresh = asked.tell(indexes)
        if fresh:
            asked.port.delivered(fresh)

    def _open_requests(self, runs: Runs) -> dict[Asked, tuple[Sequence[int], Sequence[int]]]:
        """Where somebody still waits: by the batch that the requests came with, their indexes in it
        and their offsets. Ranges, mostly."""
        found: dict[Asked, tuple[Sequence[int], Sequence[int]]] = {}
        for first, addresses in runs:
            at, end = 0, len(addresses)
            while at < end:
                numbers = requests.parse_address(addresses[at], self._opening)
                guest = self._by_number.get(numbers[0]) if numbers is not None else None
                asked = guest.asked.get(numbers[1]) if numbers is not None and guest is not None else None
                if numbers is None or asked is None or not 0 <= numbers[2] < len(asked.tickets):
                    at += 1
                    continue
                index = numbers[2]
                count = min(end - at, len(asked.tickets) - index)
                last = addresses[at + count - 1]
                if requests.parse_address(last, self._opening) != (numbers[0], numbers[1], index + count - 1):
                    count = 1
                indexes = asked.open_from(index, count)
                if indexes:
                    offsets: Sequence[int] = range(first + at, first + at + count)
                    if not isinstance(indexes, range):
                        offsets = [first + at + i - index for i in indexes]
                    before = found.get(asked)
                    if before is not None:
                        indexes, offsets = _more(before[0], indexes), _more(before[1], offsets)
                    found[asked] = indexes, offsets
                at += count
        return found

    def _reply(self, guest: Guest, command: words.Reply, now_us: int) -> None:
        ranges = ranges_of(command.offsets)
        fates = self._log.settle(
            command.queue, guest.port.name, Outcome.ACK, ranges, now_us, origin=command.origin
        )
        self._freed(guest, command.queue, False, fates, ranges)
        desk = self._desks.get(command.queue)
        if desk is None or not fates:
            return
        runs = desk.outgoing.take([(fate.first, fate.end) for fate in fates])
        answers = command.answers
        positions: dict[int, int] = {}
        for asked, (indexes, offsets) in self._open_requests(runs).items():
            chosen = answers
            if array("q", offsets) != command.offsets:
                positions = positions or {offset: i for i, offset in enumerate(command.offsets)}
                chosen = _pick(answers, [positions[offset] for offset in offsets])
            self._tell_once(asked, indexes)
            asked.port.replies(asked.tickets_of(indexes), chosen)
            self._end_requests(asked, indexes)

    def _answer_empty(self, desk: Desk, ranges: Ranges) -> None:
        """A request that was settled through a door without answers: the answer is empty."""
        for asked, (indexes, _) in self._open_requests(desk.outgoing.take(ranges)).items():
            self._tell_once(asked, indexes)
            empty = Batch(b"", array("i", bytes(4 * (len(indexes) + 1))))
            asked.port.replies(asked.tickets_of(indexes), empty)
            self._end_requests(asked, indexes)

    def _ended_without_answer(self, queue: str, fates: Iterable[Fate]) -> None:
        """Requests among messages that have come to an end: tell who waits."""
        desk = self._desks.get(queue)
        if desk is None:
            return
        ended = [(f.first, f.end) for f in fates if f.event not in (Event.RETURNED, Event.REQUEUED)]
        if desk.outgoing:
            # These carry their way back, which is known before the log has told their offsets.
            for asked, (indexes, _) in self._open_requests(desk.outgoing.take(ended)).items():
                self._end_undelivered(asked, indexes)
        for first, end in ended:
            for a, b, asked in desk.asked.find(first, end) if desk.asked else ():
                self._end_undelivered(asked, asked.open_in(a, b))
            if desk.asked_early:
                # Whoever asked is told when it is known which requests these were.
                desk.ended_early.cut(first, end)
                desk.ended_early.add(first, end, None)

    def _end_undelivered(self, asked: Asked, indexes: Sequence[int]) -> None:
        asked.end(indexes)
        self._undelivered(asked, asked.tickets_of(indexes))

    def _undelivered(self, asked: Asked, tickets: Sequence[int]) -> None:
        if tickets and asked.port in self._guests:
            asked.port.undelivered(tickets)
        self._forget_if_done(asked)

    def _end_requests(self, asked: Asked, indexes: Sequence[int]) -> None:
        asked.end(indexes)
        self._forget_if_done(asked)

    def _forget_if_done(self, asked: Asked) -> None:
        if asked.open_count:
            return
        guest = self._guests.get(asked.port)
        if guest is not None and guest.asked.pop(asked.number, None) is not None:
            self._maybe_finish(guest)
        desk = self._desks.get(asked.queue)
        if desk is not None and asked.first >= 0 and desk.asked:
            desk.asked.cut(asked.first, asked.first + len(asked.tickets))
        if asked.timed:
            asked.timed = False
            self._deadlines_over += 1
            self._thin_deadlines()

    def _thin_deadlines(self) -> None:
        """Let go of those that are over, with their ports, before they are more than half."""
        if 2 * self._deadlines_over > len(self._deadlines):
            self._deadlines[:] = [entry for entry in self._deadlines if entry[2].timed]
            heapify(self._deadlines)
            self._deadlines_over = 0

    # --- leaving ---------------------------------------------------------------------------------

    def _sync(self, guest: Guest, command: words.Sync, now_us: int) -> None:
        if guest not in self._syncing:  # one answer is for all that it asks in a turn
            self._syncing[guest] = None
            guest.receipts += 1

    def _confirm(self, now_us: int) -> None:
        """One confirmation for all that asked in this turn. Whose messages wait for room is asked later."""
        ready = [guest for guest in self._syncing if not guest.waiting]
        self._syncing = {guest: None for guest in self._syncing if guest.waiting}

        def confirmed(error: LogError | None) -> None:
            for guest in ready:
                guest.receipts -= 1
                if guest.port in self._guests:
                    if error is None:
                        guest.port.synced()
                    self._maybe_finish(guest)

        if ready:
            self._log.confirm(now_us, confirmed)

    def _closing(self, guest: Guest, command: words.Closing, now_us: int) -> None:
        guest.closing = True
        for door in list(guest.doors.values()):
            self._leave(guest, door)
        self._maybe_finish(guest)

    def _maybe_finish(self, guest: Guest) -> None:
        # What it has said is heard to the end first: it may want an answer.
        if guest.closing and guest.is_done and guest is not self._speaking:
            guest.port.finish()

    def _ignored(self, guest: Guest, command: words.Ignored, now_us: int) -> None:
        text = f"{command.reason}: {command.detail}" if command.detail else command.reason
        guest.port.log(text, command.count)

    def drain(self) -> None:
        """From now on nothing is handed out; what is out may be settled."""
        self._draining = True
        for guest in list(self._guests.values()):
            for queue, dead in list(guest.doors):
                guest.port.decline(queue, dead)

    def dismiss(self) -> None:
        """Let every port go as soon as nothing of its own is pending."""
        for guest in list(self._guests.values()):
            guest.closing = True
            self._maybe_finish(guest)

    @property
    def is_drained(self) -> bool:
        """Nobody holds anything any more, or waits for a receipt."""
        return self.has_nothing_of(self._guests)

    def has_nothing_of(self, ports: Iterable[Port]) -> bool:
        """None of these holds anything, or waits for a receipt."""
        guests = (self._guests.get(port) for port in ports)
        return not any(
            guest is not None and (guest.holds or guest.receipts or guest.waiting) for guest in guests
        )

    def send_away(self, ports: Iterable[Port]) -> None:
        """No new work for these; each is let go as soon as nothing of its own is pending. Others go on."""
        for port in ports:
            guest = self._guests[port]
            guest.closing = True
            for door in list(guest.doors.values()):
                self._leave(guest, door)
                port.decline(door.queue, door.dead)
            self._maybe_finish(guest)
        self._wants_turn()

    def end_requests(self, now_us: int) -> None:
        """The broker stops: whoever still waits for an answer is told that there will be none."""
        for guest in list(self._guests.values()):
            for asked in list(guest.asked.values()):
                if asked.first >= 0:
                    self._withdraw(asked, Reason.UNDELIVERABLE, now_us)
                self._undelivered(asked, asked.end_all())

    def set_policies(self, policies: Policies) -> None:
        """New settings for every queue, from now on."""
        self._policies = policies
        self._log.set_policies(policies)

    # --- out -------------------------------------------------------------------------------------

    def turn(self, now_us: int) -> None:
        """The end of a turn of the loop: to the consumers with what is there, to the disk with what came.

        Consumers first: no delivery waits for the disk, and so none should wait until the disk has its work.
        """
        if self._draining:
            self._stirred.clear()
        elif not self._awaits_claims and not self._suspended:
            stirred, self._stirred = self._stirred, {}
            try:
                for door in stirred:
                    self._hand_out(door, now_us)
            except BaseException:
                # Whatever went wrong at one door, the others have their turn, and the disk its work.
                doors = list(stirred)
                self._stirred.update(dict.fromkeys(doors[doors.index(door) + 1 :]))
                self._wants_turn()
                self._put_out(now_us)
                raise
            if self._stirred:
                self._wants_turn()
        self._put_out(now_us)

    def _put_out(self, now_us: int) -> None:
        self._log.flush(now_us)
        if self._syncing:
            self._confirm(now_us)

    def _stir(self, queue: str) -> None:
        desk = self._desks.get(queue)
        if desk is not None:
            self._stirred[desk.living] = None
            if desk.dead.consumers:
                self._stirred[desk.dead] = None
            if self._strangers and queue in self._strangers and self._log.has_queue(queue):
                self._strangers.discard(queue)

    def _hand_out(self, door: Door, now_us: int) -> None:
        consumers = door.consumers
        if not consumers:
            return
        queue, dead = key = door.queue, door.dead
        available = self._log.ready(queue, dead=dead)
        if not available:
            return
        take = self._log.take
        each = MESSAGE_BYTES + len(queue)
        for port, share in consumers.share(available):
            count = min(share, port.count_room())
            room = min(port.bytes_room(), DISPATCH_BYTES)
            if count <= 0 or room <= 0:
                # It gives its turn to others until it has room again.
                guest = self._guests[port]
                guest.starved[door] = self._starved[guest] = None
                consumers.block(port, True)
                self._stirred[door] = None
                continue
            slices = take(queue, port.name, count, now_us, bytes_max=room, bytes_each=each, dead=dead)
            taken = 0
            for piece in slices:
                taken += piece.hi - piece.lo
            if not taken:
                continue
            consumers.took(port, taken)
            holds = self._guests[port].holds
            holds[key] = holds.get(key, 0) + taken
            if not dead:
                self._note_requests(queue, port, slices)
            port.deliver(queue, slices, now_us, dead)
            if taken < share:
                self._stirred[door] = None

    def _feed(self, guest: Guest) -> None:
        """It may have room at doors where it had none."""
        if not guest.blocked:
            for door in guest.starved:
                door.consumers.block(guest.port, False)
                self._stirred[door] = None
            guest.starved.clear()
            self._starved.pop(guest, None)

    def _note_requests(self, queue: str, port: Port, slices: list[Slice]) -> None:
        for piece in slices:
            if piece.reply is not None:
                addresses = piece.reply[piece.lo : piece.hi]
                self._desks[queue].outgoing.add(piece.offset_start, addresses)
                if port.protocol != "rq":
                    # Other protocols have no word for it: having it is having taken it.
                    self._tell_delivered([(piece.offset_start, addresses)])

    # --- now and then ----------------------------------------------------------------------------

    def tick(self, now_us: int) -> None:
        """Several times a second: expiry, time-outs, and those for whom there was no room."""
        # What somebody holds does not expire, and who holds what is not known yet.
        for queue, fate in self._log.expire(now_us) if not self._awaits_claims else ():
            self._ended_without_answer(queue, [fate])
            if fate.event is Event.DEAD:
                self._stir(queue)
        late = []
        while self._deadlines and self._deadlines[0][0] <= now_us:
            deadline = heappop(self._deadlines)
            asked = deadline[2]
            if not asked.timed:
                self._deadlines_over -= 1
            elif asked.first < 0:
                late.append(deadline)  # The disk is slow: withdrawn as soon as it is known where they are.
            else:
                asked.timed = False
                self._withdraw(asked, Reason.TIMEOUT, now_us)
                self._undelivered(asked, asked.end_all())
        for deadline in late:
            heappush(self._deadlines, deadline)
        self._thin_deadlines()
        self._log.tick(now_us)
        self.retry_held_back(now_us)
        for guest in list(self._starved):
            if guest.port.bytes_room() > 0 and guest.port.count_room() > 0:
                self._feed(guest)
        self._wants_turn()

    def _withdraw(self, asked: Asked, reason: Reason, now_us: int) -> None:
        """Nobody waits for these any more. Consumers that work on some have room when they are done."""
        ranges = asked.open_ranges()
        desk = self._desks[asked.queue]
        desk.outgoing.take(ranges)
        for fate in self._log.withdraw(asked.queue, ranges, reason, now_us):
            if fate.consumer:
                desk.orphans.add(fate.first, fate.end, fate.consumer)

    def retry_held_back(self, now_us: int) -> None:
        """Room may have come back: take in what waits, in order, and go on reading from its senders."""
        self._full.clear()
        for guest in list(self._held_back):
            while guest.waiting and not self._others_wait(guest.waiting[0].queue):
                command = guest.waiting.popleft()
                if self._store(guest, command, now_us):
                    continue
                if EVERY_QUEUE in self._full or len(command.batch) == 1:
                    guest.waiting.appendleft(command)
                    break
                # Some may fit where all do not, and all of them may be more than the queue ever takes.
                self._full.discard(command.queue)
                guest.waiting.extendleft(reversed(command.halves()))
            if not guest.waiting:
                del self._held_back[guest]
                guest.port.hold(False)
                self._maybe_finish(guest)
                self._wants_turn()

    @property
    def holds_back(self) -> int:
        """How many ports wait for room."""
        return len(self._held_back)

    @property
    def waits_for_disk(self) -> bool:
        """Whether messages wait here because there is no room for them on the disk."""
        return EVERY_QUEUE in self._full


# Any: each handler takes the one command that it stands under. `handle` knows the two that are missing.
_HANDLERS: dict[type, Callable[[Broker, Guest, Any, int], None]] = {
    words.Consume: Broker._consume,
    words.Cancel: Broker._cancel,
    words.Accepted: Broker._accepted,
    words.Reply: Broker._reply,
    words.Broadcast: Broker._broadcast,
    words.Closing: Broker._closing,
    words.Sync: Broker._sync,
    words.Ignored: Broker._ignored,
}


def _pick(batch: Batch, positions: Iterable[int]) -> Batch:
    return Batch.of([batch.payload[batch.bounds[i] : batch.bounds[i + 1]] for i in positions])


def _more(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """A list is made longer where there is one: many runs take no more time than their length."""
    together: list[int] = before if isinstance(before, list) else list(before)
    together.extend(after)
    return together
