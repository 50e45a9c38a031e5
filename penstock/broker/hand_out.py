"""HandOut: who gets what is ready.

Consumers join and leave the doors of queues (`consumers.py` has the rules of one door). A door where
something may be handed out is *stirred*, and has its turn once in a turn of the loop.

Rules that always hold:
  * What a consumer has room for is decided here and nowhere else: its window, its buffer, its turn.
  * Who has no room when it is its turn is *starved*: others get its share, until it has room again.
"""

from collections.abc import Callable, Collection
from typing import Final

from penstock.broker.consumers import Joined
from penstock.broker.doors import Door, Doors
from penstock.broker.ports import OTHERS, Attached, Ports, own, tally
from penstock.broker.requests import Requests
from penstock.log.errors import LogRefused
from penstock.log.log import Log
from penstock.model import words
from penstock.model.policy import QueueNameError

DISPATCH_BYTES = 512 * 1024
"""About how much one consumer gets in one go, so that others and the socket are not kept waiting. Messages of
64 KiB cost 33 µs each from a backlog with a turn for each 256 KiB, 25 with 512 KiB, and 22 with 1 MiB."""

MESSAGE_BYTES: Final = 160
"""What a message is taken to cost beside its payload and the name of its queue, when it is handed out. The
longest of the wires, PHPMQ, writes about so much around each."""


class HandOut:
    def __init__(
        self, log: Log, ports: Ports, doors: Doors, requests: Requests, wants_turn: Callable[[], None]
    ) -> None:
        self._log = log
        self._ports = ports
        self._doors = doors
        self._requests = requests
        self._wants_turn = wants_turn
        self._stirred: dict[Door, None] = {}
        self._starved: dict[Attached, None] = {}  # at some door, without being blocked
        self._consumers_changed: dict[str, None] = {}  # queues that somebody has begun or ceased to consume
        self.blocked: dict[Attached, None] = {}  # their buffers are full
        self.draining = False

    # --- demand ----------------------------------------------------------------------------------

    def join(self, attached: Attached, command: words.Consume) -> None:
        port = attached.port
        if self.draining or attached.closing or (command.once and self._nothing_comes(command)):
            port.decline(command.queue, command.dead)
            return
        try:
            door = self._doors.of(command.queue).door(command.dead)
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
            held=attached.holds.get((command.queue, command.dead), 0),
        )
        attached.doors = own(attached.doors)
        attached.doors[command.queue, command.dead] = door
        if attached.blocked:
            door.consumers.block(port, True)
        if attached.idle:
            door.consumers.mark_idle(port, True)
        self._note_consumers(command.queue)
        self._stirred[door] = None
        if joined is Joined.ACTIVE:
            port.consuming(command.queue, command.dead)

    def _nothing_comes(self, command: words.Consume) -> bool:
        """Whether it is certain that this demand would wait for nothing."""
        if self._log.is_paused(command.queue):
            return True
        return command.dead and not self._log.policies.for_queue(command.queue).dead_letters

    def leave(self, attached: Attached, door: Door) -> None:
        attached.doors.pop((door.queue, door.dead), None)
        attached.starved.pop(door, None)
        self._note_consumers(door.queue)
        for port in door.consumers.leave(attached.port):
            port.consuming(door.queue, door.dead)
        self._stirred[door] = None
        self._doors.left(door.queue)

    def leave_all(self, attached: Attached) -> list[Door]:
        """Which doors those were."""
        left = list(attached.doors.values())
        for door in left:
            self.leave(attached, door)
        return left

    def forget(self, attached: Attached) -> None:
        """It is gone."""
        self._starved.pop(attached, None)
        self.blocked.pop(attached, None)
        self.leave_all(attached)

    def _note_consumers(self, queue: str) -> None:
        """Whoever lists queues shows only those that there are; perhaps nobody ever asks."""
        if self._log.has_queue(queue):
            self._consumers_changed[queue] = None

    def consumers_changed(self) -> list[str]:
        """Queues that somebody has begun or ceased to consume since this was last asked."""
        changed = list(self._consumers_changed)
        self._consumers_changed.clear()
        return changed

    # --- room ------------------------------------------------------------------------------------

    def block(self, attached: Attached, blocked: bool) -> None:
        if blocked and not attached.blocked:
            attached.blockings += 1
            self.blocked[attached] = None
        elif not blocked:
            self.blocked.pop(attached, None)
        attached.blocked = blocked
        for door in attached.doors.values():
            door.consumers.block(attached.port, blocked)
            if not blocked:
                self._stirred[door] = None
        if not blocked:
            attached.starved.clear()
            self._starved.pop(attached, None)

    def mark_idle(self, attached: Attached, idle: bool) -> None:
        attached.idle = idle
        for door in attached.doors.values():
            door.consumers.mark_idle(attached.port, idle)
            self._stirred[door] = None

    def freed(self, attached: Attached, queue: str, dead: bool, count: int) -> None:
        """A consumer has let go of so many messages, and has room for others."""
        key = queue, dead
        left = attached.holds.get(key, 0) - count
        if left > 0:
            attached.holds[key] = left
        else:
            attached.holds.pop(key, None)
        doors = self._doors.by_queue.get(queue)
        if doors is not None:
            doors.door(dead).consumers.freed(attached.port, count)
            self._stirred[doors.living] = None
            if dead or doors.dead.consumers:
                self._stirred[doors.dead] = None
        if attached.starved:
            self._feed(attached)

    def queues_gone(self, queues: Collection[str]) -> None:
        """They were deleted: nobody holds anything of them any more."""
        for attached in self._ports.everybody():
            for queue, dead in [key for key in attached.holds if key[0] in queues]:
                attached.ghosts.pop((queue, dead), None)
                self.freed(attached, queue, dead, attached.holds[queue, dead])
                attached.finish_if_done()
        for queue in queues:
            self._consumers_changed.pop(queue, None)
            self._doors.queue_gone(queue)

    def _feed(self, attached: Attached) -> None:
        """It may have room at doors where it had none."""
        if not attached.blocked:
            for door in attached.starved:
                door.consumers.block(attached.port, False)
                self._stirred[door] = None
            attached.starved.clear()
            self._starved.pop(attached, None)

    def feed_starved(self) -> None:
        """Those who have room by now."""
        for attached in list(self._starved):
            if attached.port.bytes_room() > 0 and attached.port.count_room() > 0:
                self._feed(attached)

    # --- a turn ----------------------------------------------------------------------------------

    def stir(self, queue: str) -> None:
        """There may be something to hand out."""
        doors = self._doors.by_queue.get(queue)
        if doors is not None:
            self._stirred[doors.living] = None
            if doors.dead.consumers:
                self._stirred[doors.dead] = None
            strangers = self._doors.strangers
            if strangers and queue in strangers and self._log.has_queue(queue):
                strangers.discard(queue)

    def turn(self, now_us: int) -> None:
        """Every stirred door has its turn. Whatever goes wrong at one, the others have theirs later."""
        if self.draining:
            self._stirred.clear()
            return
        stirred, self._stirred = self._stirred, {}
        try:
            for door in stirred:
                self._hand_out(door, now_us)
        except BaseException:
            doors = list(stirred)
            self._stirred.update(dict.fromkeys(doors[doors.index(door) + 1 :]))
            self._wants_turn()
            raise
        if self._stirred:
            self._wants_turn()

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
                attached = self._ports.attached[port]
                attached.starved = own(attached.starved)
                attached.starved[door] = self._starved[attached] = None
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
            attached = self._ports.attached[port]
            attached.holds = own(attached.holds)
            attached.holds[key] = attached.holds.get(key, 0) + taken
            attached.delivered = tally(attached.delivered, key, (OTHERS, dead), taken)
            if not dead:
                self._requests.note(queue, port, slices)
            port.deliver(queue, slices, now_us, dead)
            if taken < share:
                self._stirred[door] = None
