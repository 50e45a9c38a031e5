"""Claims: who holds what, after another broker has led.

Messages may be with those who held them there. So a broker that comes after another hands out nothing until
it has heard of all that is held; demands that come meanwhile count from then on, in their order. What a port
claims and is not granted, it has all the same: that takes room in its window until it lets go of it.
"""

from penstock.broker.doors import Doors
from penstock.broker.hand_out import HandOut
from penstock.broker.ports import Attached, own
from penstock.log.errors import LogRefused
from penstock.log.log import Log
from penstock.model import words
from penstock.model.policy import QueueNameError
from penstock.model.ranges import RangeMap
from penstock.model.words import Ranges


class Claims:
    def __init__(self, log: Log, doors: Doors, hand_out: HandOut) -> None:
        self._log = log
        self._doors = doors
        self._hand_out = hand_out
        self.awaited = False
        self._early: dict[tuple[Attached, str, bool], words.Consume] = {}  # demands that came meanwhile

    def wait(self, waiting: bool) -> None:
        self.awaited = waiting
        if not waiting:
            early, self._early = self._early, {}
            for (attached, _, _), command in early.items():
                self._hand_out.join(attached, command)

    def consume(self, attached: Attached, command: words.Consume, now_us: int) -> None:
        if self.awaited:
            self._early[attached, command.queue, command.dead] = command
        else:
            self._hand_out.join(attached, command)

    def cancel(self, attached: Attached, command: words.Cancel, now_us: int) -> None:
        self._early.pop((attached, command.queue, command.dead), None)
        door = attached.doors.get((command.queue, command.dead))
        if door is not None:
            self._hand_out.leave(attached, door)

    def demands(self, attached: Attached) -> list[tuple[str, bool]]:
        """What it has asked for, and has not cancelled."""
        return [*attached.doors, *(key[1:] for key in self._early if key[0] is attached)]

    def forget(self, attached: Attached) -> None:
        """It is gone."""
        for key in [key for key in self._early if key[0] is attached]:
            del self._early[key]

    def claim(
        self,
        attached: Attached,
        queue: str,
        dead: bool,
        origin: bytes,
        ranges: Ranges,
        now_us: int,
        attempts_max: int | None,
    ) -> Ranges:
        """What of it was granted."""
        port, key = attached.port, (queue, dead)
        try:
            self._doors.check_names((queue,))
        except (LogRefused, QueueNameError) as error:
            port.log(f"refused: {error}", 1)
            return []
        granted = self._log.resume(
            queue, port.name, ranges, now_us, origin=origin, dead=dead, attempts_max=attempts_max
        )
        attached.ghosts = own(attached.ghosts)
        ghosts = attached.ghosts.setdefault(key, RangeMap())
        claimed = -ghosts.total
        for first, end in ranges:
            ghosts.cut(first, end)
            ghosts.add(first, end, None)
        claimed += ghosts.total
        for first, end in granted:
            ghosts.cut(first, end)
        if claimed:
            attached.holds = own(attached.holds)
            attached.holds[key] = attached.holds.get(key, 0) + claimed
            if key in attached.doors:
                attached.doors[key].consumers.took(port, claimed)
        return granted
