"""Doors: the queues that the broker serves, each with two ways in for consumers.

A queue has doors while somebody consumes there: most of many queues have none. As long as the log has no
queue of that name it is a stranger, which counts towards the limit of queues.
"""

from collections.abc import Callable, Iterable

from penstock.broker.consumers import Consumers
from penstock.broker.port import Port
from penstock.log.errors import LogRefused
from penstock.log.log import Log
from penstock.model.policy import check_queue_name
from penstock.model.timers import SECOND_US


class Pace:
    """How fast somebody makes queues: so many a second, and as many at once who has made none for so long."""

    __slots__ = ("_spent_us",)

    def __init__(self) -> None:
        self._spent_us = 0  # what was allowed up to this moment is used up

    def allows(self, count: int, per_second: int, now_us: int) -> bool:
        """Whether so many may be made now, which then have been."""
        # Within a second of now: a large transaction, or a clock that is set back, stops nobody for longer.
        self._spent_us = min(max(self._spent_us, now_us - SECOND_US), now_us + SECOND_US)
        if self._spent_us >= now_us:
            return False
        self._spent_us += count * SECOND_US // per_second
        return True


class Door:
    """One way into a queue: its messages, or its dead letters."""

    __slots__ = ("consumers", "dead", "queue")

    def __init__(self, queue: str, dead: bool) -> None:
        self.queue = queue
        self.dead = dead
        self.consumers: Consumers[Port] = Consumers()


class QueueDoors:
    """Both ways into a queue."""

    __slots__ = ("dead", "living")

    def __init__(self, queue: str) -> None:
        self.living = Door(queue, dead=False)
        self.dead = Door(queue, dead=True)

    def door(self, dead: bool) -> Door:
        return self.dead if dead else self.living


class Doors:
    """Those of all queues."""

    __slots__ = (
        "_elsewhere",
        "_log",
        "_name_bytes_max",
        "_queues_max",
        "by_queue",
        "new_per_second",
        "strangers",
    )

    def __init__(
        self,
        log: Log,
        name_bytes_max: int,
        queues_max: int,
        new_per_second: int,
        elsewhere: Callable[[], int] = lambda: 0,
    ) -> None:
        """`elsewhere`: how many there are in other logs of this process, which share the limit."""
        self._log = log
        self._elsewhere = elsewhere
        self.new_per_second = new_per_second
        self._name_bytes_max = name_bytes_max
        self._queues_max = queues_max
        self.by_queue: dict[str, QueueDoors] = {}
        self.strangers: set[str] = set()

    def of(self, queue: str) -> QueueDoors:
        """Raises where no queue may have that name, or there are too many."""
        doors = self.by_queue.get(queue)
        if doors is None:
            self.check_names((queue,))
            doors = self.by_queue[queue] = QueueDoors(queue)
            if not self._log.has_queue(queue):
                self.strangers.add(queue)
        return doors

    def consumer_count(self, queue: str) -> int:
        """Of its messages and of its dead letters."""
        doors = self.by_queue.get(queue)
        return len(doors.living.consumers) + len(doors.dead.consumers) if doors is not None else 0

    def check_names(self, queues: Iterable[str]) -> None:
        """Raise unless all of these are queues, or may be."""
        new = set()
        for queue in queues:
            if queue not in self.by_queue:
                check_queue_name(queue, self._name_bytes_max)
                if not self._log.has_queue(queue):
                    new.add(queue)
        if new and self.count + len(new) + self._elsewhere() > self._queues_max:
            raise LogRefused(
                f"queue {min(new)!r}: there are {self._queues_max} queues already, the limit of queues-max"
            )

    @property
    def count(self) -> int:
        return self._log.queue_count + len(self.strangers)

    def queue_gone(self, queue: str) -> None:
        """It was deleted. Who consumes there waits for the next one of that name."""
        if queue in self.by_queue:
            self.strangers.add(queue)

    def left(self, queue: str) -> None:
        """Somebody does not consume there any more; where nobody does, the doors go."""
        if not self.consumer_count(queue):
            self.strangers.discard(queue)
            self.by_queue.pop(queue, None)
