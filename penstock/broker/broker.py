"""The broker: words from ports, messages to ports, the log below.

A turn of the server's loop is: received chunks become words (`handle`), then `turn` hands out what
consumers have room for and has the log put out what came, in one go. Nothing here waits, reads
a clock or touches a socket; `wants_turn` asks the server for the next turn.

`Broker` is the face; what it does stands in its parts, each of which knows only those above it:

    ports.py       who is attached, and what is known of each
    doors.py       queues, each with two ways in; `consumers.py`: who wants messages at one of them
    requests.py    who waits for which answer; `asked.py`: requests that came together
    hand_out.py    who gets what is ready: demand, room, turns
    claims.py      who holds what, after another broker has led; `undurable.py`: what the next must be told
    settling.py    the ends of deliveries
    publishing.py  messages to the log, those that wait for room, receipts
    taking.py      callers over HTTP, who hold what they took for a time (`leases.py`)
    expiring.py    empty queues that nobody uses

Rules that always hold, beside those of the parts:
  * A queue is a queue, whichever door a message came through; nobody below a port knows protocols.
  * A port that goes away leaves nothing behind: what it held goes back by the rule of its protocol,
    what it had asked for is withdrawn, whoever waited behind it moves up.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import count as counter
from typing import Any

from penstock.broker.claims import Claims
from penstock.broker.doors import Doors
from penstock.broker.expiring import Expiring
from penstock.broker.hand_out import HandOut
from penstock.broker.port import Port
from penstock.broker.ports import Attached, Ports
from penstock.broker.publishing import Publishing
from penstock.broker.requests import Requests
from penstock.broker.settling import Settling
from penstock.broker.taking import Taking
from penstock.broker.undurable import Undurable
from penstock.log.errors import LogFailed
from penstock.log.log import Log
from penstock.log.results import Fate
from penstock.model import words
from penstock.model.life import Event
from penstock.model.policy import Policies
from penstock.model.words import Ranges


class Broker:
    def __init__(
        self,
        log: Log,
        wants_turn: Callable[[], None],
        *,
        queue_name_bytes_max: int = 255,
        queues_max: int = 100_000,
        queues_new_per_second: int = 1000,
        queues_elsewhere: Callable[[], int] = lambda: 0,
        numbers: "counter[int] | None" = None,
    ) -> None:
        self._log = log
        self._wants_turn = wants_turn
        self.ports = ports = Ports(numbers)
        self.doors = doors = Doors(
            log, queue_name_bytes_max, queues_max, queues_new_per_second, queues_elsewhere
        )
        self.requests = requests = Requests(log, ports, wants_turn)
        self.hand_out = hand_out = HandOut(log, ports, doors, requests, wants_turn)
        self.claims = Claims(log, doors, hand_out)
        self.settling = settling = Settling(log, hand_out, requests, wants_turn)
        self.publishing = Publishing(log, ports, doors, hand_out, requests, settling, wants_turn)
        self.taking = Taking(self, log, ports, settling)
        self._expiring = Expiring(log, doors, self.delete)
        self._suspended = False
        self.undurable: Undurable | None = None
        log.on_stored(self.stir)
        # Any: each takes the one command that it stands under. `handle` knows the two that are missing.
        self._handlers: dict[type, Callable[[Attached, Any, int], None]] = {
            words.Consume: self.claims.consume,
            words.Cancel: self.claims.cancel,
            words.Accepted: requests.accepted,
            words.Reply: settling.reply,
            words.Broadcast: self._broadcast,
            words.Closing: self._closing,
            words.Sync: self.publishing.sync,
            words.Ignored: self._ignored,
        }

    # --- ports -----------------------------------------------------------------------------------

    def attach(self, port: Port) -> None:
        self.settling.finish(port.name)
        self.ports.attach(port)

    def named(self, port: Port) -> None:
        """Another user is behind it from now on: whoever lists connections asks the port itself."""

    def detach(self, port: Port, now_us: int, *, lost: bool = True) -> None:
        """The connection is gone, whatever the reason.

        Where it is not `lost`, only on its way to another port: what it holds goes back to its place, and
        no delivery is counted.
        """
        attached = self.ports.detach(port)
        if attached is None:
            return
        self.publishing.forget(attached)
        self.claims.forget(attached)
        self.hand_out.forget(attached)
        self.settling.give_back_all(attached, now_us, lost)
        self.requests.sender_gone(attached, now_us)
        self._wants_turn()

    def left(self, port: Port, now_us: int, *, lost: bool = True) -> None:
        """Its peer is gone, but what it has sent waits for room: it is a sender only from now on."""
        attached = self.ports.attached[port]
        self.claims.forget(attached)
        self.hand_out.forget(attached)
        self.settling.give_back_all(attached, now_us, lost)
        attached.holds.clear()
        attached.ghosts.clear()
        attached.waiting = [it for it in attached.waiting if isinstance(it, words.Publish)]
        self._wants_turn()

    def handle(self, port: Port, commands: Iterable[words.Command], now_us: int) -> None:
        """What a port has said in one chunk."""
        attached = self.ports.attached[port]
        attached.speaking = True
        try:
            for command in commands:
                # The two that come with every chunk are called directly: the compiled build binds them.
                if isinstance(command, words.Publish):
                    self.publishing.publish(attached, command, now_us)
                elif (
                    attached.waiting
                    and isinstance(command, words.Settle | words.Reply)
                    and attached.has_results_waiting()
                ):
                    attached.waiting.append(command)
                elif isinstance(command, words.Settle):
                    self.settling.settle(attached, command, now_us)
                else:
                    self._handlers[type(command)](attached, command, now_us)
        finally:
            attached.speaking = False
        attached.finish_if_done()
        self._wants_turn()

    def demands(self, port: Port) -> list[tuple[str, bool]]:
        """The queues that a port consumes, each with whether it is their dead letters."""
        attached = self.ports.attached.get(port)
        return self.claims.demands(attached) if attached is not None else []

    def blocked(self, port: Port, blocked: bool) -> None:
        """The port's buffer is full, or has room again."""
        attached = self.ports.attached.get(port)
        if attached is not None:
            self.hand_out.block(attached, blocked)
            if not blocked:
                self._wants_turn()

    def idle(self, port: Port, idle: bool) -> None:
        """The peer does not answer: no new work for it; or it does again."""
        self.hand_out.mark_idle(self.ports.attached[port], idle)
        self._wants_turn()

    def _broadcast(self, attached: Attached, command: words.Broadcast, now_us: int) -> None:
        doors = self.doors.by_queue.get(command.queue)
        if doors is not None:
            for port in doors.living.consumers.broadcast_targets():
                port.broadcast(command.queue, command.batch)

    def _ignored(self, attached: Attached, command: words.Ignored, now_us: int) -> None:
        text = f"{command.reason}: {command.detail}" if command.detail else command.reason
        attached.port.log(text, command.count)

    # --- after another broker --------------------------------------------------------------------

    def wait_for_claims(self, waiting: bool) -> None:
        """Whether to hand out nothing, because messages may be with those who held them at the broker before
        this one."""
        self.claims.wait(waiting)
        if not waiting:
            self._wants_turn()

    def keep_undurable(self) -> None:
        """Another broker may have to go on with what is not known to be durable."""
        self.undurable = undurable = Undurable(self._log.position, self._log.attempts_before)
        self.publishing.undurable = self.settling.undurable = undurable

    @property
    def failed(self) -> LogFailed | None:
        """Why its log is of no use any more."""
        return self._log.failed

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
        """
        attached = self.ports.attached[port]
        return self.claims.claim(attached, queue, dead, origin, ranges, now_us, attempts_max)

    def rejoin(self, port: Port, command: words.Consume, now_us: int) -> None:
        """A demand that was in force before: it is again, ahead of those that were not."""
        self.hand_out.join(self.ports.attached[port], command)
        self._wants_turn()

    def take_back(self, port: Port, queue: str, dead: bool, ranges: Ranges, now_us: int) -> None:
        """What was handed out did not reach the peer, which wants it no more: no delivery is counted."""
        self.settling.take_back(self.ports.attached[port], queue, dead, ranges, now_us)
        self._wants_turn()

    # --- for the operator ------------------------------------------------------------------------

    def stir(self, queue: str) -> None:
        """There may be something to hand out, to the disk or to consumers."""
        self.hand_out.stir(queue)
        self._wants_turn()

    def wake(self) -> None:
        """There is something for the disk."""
        self._wants_turn()

    def purged(self, queue: str, fates: Sequence[Fate]) -> None:
        """An operator has taken these out: tell who waits for an answer."""
        self.requests.end_without_answer(queue, fates)
        self._wants_turn()

    def delete(self, queues: Sequence[str], now_us: int) -> None:
        """These queues are no more. Who consumes one gets what the next of that name has."""
        self._log.delete(queues, now_us)
        for queue in queues:
            self.requests.queue_gone(queue)
            self.taking.queue_gone(queue)
        self.hand_out.queues_gone(set(queues))
        self._wants_turn()

    @property
    def holds_back(self) -> int:
        """How many ports wait for room."""
        return len(self.publishing.held_back)

    def set_policies(self, policies: Policies) -> None:
        """New settings for every queue, from now on."""
        self._log.set_policies(policies)

    # --- leaving ---------------------------------------------------------------------------------

    def _closing(self, attached: Attached, command: words.Closing, now_us: int) -> None:
        attached.closing = True
        self.hand_out.leave_all(attached)

    def drain(self) -> None:
        """From now on nothing is handed out; what is out may be settled."""
        self.hand_out.draining = True
        for attached in self.ports.everybody():
            for queue, dead in list(attached.doors):
                attached.port.decline(queue, dead)

    @property
    def is_draining(self) -> bool:
        return self.hand_out.draining

    @property
    def is_drained(self) -> bool:
        """Nobody holds anything any more, or waits for a receipt."""
        return self.has_nothing_of(self.ports.attached)

    def has_nothing_of(self, ports: Iterable[Port]) -> bool:
        """None of these holds anything, or waits for a receipt."""
        found = (self.ports.attached.get(port) for port in ports)
        return not any(one is not None and (one.holds or one.receipts or one.waiting) for one in found)

    def dismiss(self) -> None:
        """Let every port go as soon as nothing of its own is pending."""
        for attached in self.ports.everybody():
            attached.closing = True
            attached.finish_if_done()

    def send_away(self, ports: Iterable[Port]) -> None:
        """No new work for these; each is let go as soon as nothing of its own is pending. Others go on."""
        for port in ports:
            attached = self.ports.attached.get(port)
            if attached is None:
                continue  # It has left, and is still being told why.
            attached.closing = True
            for door in self.hand_out.leave_all(attached):
                port.decline(door.queue, door.dead)
            attached.finish_if_done()
        self._wants_turn()

    def end_requests(self, now_us: int) -> None:
        """The broker stops: whoever still waits for an answer is told that there will be none."""
        self.requests.end_all(now_us)

    # --- turns -----------------------------------------------------------------------------------

    def turn(self, now_us: int) -> None:
        """The end of a turn of the loop: to the consumers with what is there, to the disk with what came.

        Consumers first: no delivery waits for the disk, and so none should wait until the disk has its work,
        which it gets whatever went wrong with them.
        """
        try:
            self.settling.turn(now_us)
            self.requests.turn(now_us)
            if self.hand_out.draining or not (self.claims.awaited or self._suspended):
                self.hand_out.turn(now_us)
            self.taking.turn(now_us)
        finally:
            self._log.flush(now_us)
            if self.undurable is not None and self._log.is_flushed:
                self.undurable.turned(self._log.position, self._log.synced)
            self.publishing.confirm(now_us)

    def due(self, now_us: int) -> None:
        """What was delayed until now can be handed out."""
        for queue in self._log.due(now_us):
            self.stir(queue)

    def step(self, by_us: int, now_us: int) -> None:
        """By so much the time has been put forward just now, and nobody has waited for that long."""
        self.requests.stepped(by_us)
        self.publishing.stepped(by_us)
        self.taking.stepped(by_us)
        self._log.step(by_us, now_us)

    def tick(self, now_us: int, step_us: int = 0) -> None:
        """Several times a second: expiry, time-outs, and those for whom there was no room. `step_us`: see
        `step`."""
        if step_us:
            self.step(step_us, now_us)
        # What somebody holds does not expire, and who holds what is not known yet.
        for queue, fate in self._log.expire(now_us) if not self.claims.awaited else ():
            self.requests.end_without_answer(queue, [fate])
            if fate.event is Event.DEAD:
                self.hand_out.stir(queue)
        self.due(now_us)
        self.taking.tick(now_us)
        self.requests.expire(now_us)
        self._expiring.tick(now_us)
        self._log.tick(now_us)
        self.publishing.retry(now_us)
        self.hand_out.feed_starved()
        if self.ports.attached:  # Else nobody waits for what has become of something; the log is flushed.
            self._wants_turn()
