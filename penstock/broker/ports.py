"""Ports: who is attached to the broker, and what it knows of each.

A port is numbered in the order in which it came, and no number is given twice: addresses of requests
(`asked.py`) and lists of connections name ports by it. Who makes several brokers, one after the other, gives
all of them the same `numbers`.

What passes between a port and the queues is counted by batches, for so many queues by name (`tally`).
"""

from itertools import count as counter
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar

from penstock.broker.asked import Asked
from penstock.broker.doors import Door, Pace
from penstock.broker.port import Port
from penstock.model import words
from penstock.model.ranges import RangeMap

DoorKey = tuple[str, bool]
"""A queue, and whether its dead letters are meant."""

QUEUES_COUNTED: Final = 100
"""Of one port, in each direction. Messages of further queues are counted together."""

OTHERS: Final = ""
"""The name of these: no queue is called so."""

Key = TypeVar("Key")


class _Nothing(dict[Any, Any]):  # Any: it has no entries of any kind
    def __setitem__(self, key: object, value: object) -> None:
        raise TypeError("this is everybody's: whoever adds something needs a dict of his own")


NOTHING: Final = _Nothing()
"""What a port has of most kinds of things, one for all: ten thousand of them have said nothing yet, and seven
empty dicts take 0.45 KB. Who adds makes a dict first, `own(it)`."""


def own(of_port: dict[Key, Any]) -> dict[Key, Any]:  # Any: whatever the values are, they stay so
    """A dict that belongs to one port, with what is in it."""
    return {} if of_port is NOTHING else of_port


def tally(counts: dict[Key, int], key: Key, others: Key, count: int) -> dict[Key, int]:
    """So many more under a key; under `others` where there are too many keys. Returns where they are."""
    if counts is NOTHING:
        return {key: count}
    known = counts.get(key)
    if known is None:
        if len(counts) >= QUEUES_COUNTED:
            key = others
        known = counts.get(key, 0)
    counts[key] = known + count
    return counts


class Attached:
    """What the broker knows of a port."""

    __slots__ = (
        "asked",
        "asked_count",
        "blocked",
        "blockings",
        "closing",
        "delivered",
        "doors",
        "ghosts",
        "holds",
        "idle",
        "number",
        "pace",
        "port",
        "receipts",
        "settled",
        "speaking",
        "starved",
        "waiting",
    )

    def __init__(self, port: Port, number: int) -> None:
        self.port = port
        self.number = number
        self.doors: dict[DoorKey, Door] = NOTHING  # it consumes there
        self.holds: dict[DoorKey, int] = NOTHING  # messages that it has not settled
        self.delivered: dict[DoorKey, int] = NOTHING  # messages, so far
        self.settled: dict[DoorKey, int] = NOTHING  # by its own word
        self.ghosts: dict[DoorKey, RangeMap[None]] = NOTHING  # of these, what it claimed and is not its own
        self.asked: dict[int, Asked] = NOTHING  # requests whose answers it waits for
        self.asked_count = 0  # batches of them, so far
        self.pace = Pace()  # of the queues that it makes
        self.receipts = 0  # batches that are on their way to the disk, and it waits to hear so
        # There is no room for these yet, and what it has settled behind them: few, for it is not read
        # meanwhile. An empty deque has 0.8 KB.
        self.waiting: list[words.Publish | words.Settle | words.Reply] = []
        self.speaking = False  # its commands are being handled
        self.closing = False
        self.blocked = False  # its buffer is full
        self.blockings = 0  # how often that has begun
        self.idle = False  # its peer does not answer
        self.starved: dict[Door, None] = NOTHING  # there it had no room when it was its turn

    def has_results_waiting(self) -> bool:
        """Whether something waits that is more than a request, which ends with its sender all the same."""
        return any(not isinstance(it, words.Publish) or not it.wants_reply for it in self.waiting)

    def finish_if_done(self) -> None:
        """Let it go where it wants to leave and nothing of its own is pending."""
        # What it has said is heard to the end first: it may want an answer.
        if self.closing and not (self.holds or self.asked or self.receipts or self.waiting or self.speaking):
            self.port.finish()


class PortInfo(NamedTuple):
    """A port as people see it."""

    number: int  # in the order of arrival
    port: Port
    consumes: list[DoorKey]
    holds: dict[DoorKey, int]
    delivered: dict[DoorKey, int]
    settled: dict[DoorKey, int]
    held: int  # messages that it has not settled
    blocked: bool  # it does not read what it gets
    held_back: bool  # there is no room for what it sends


class Ports:
    """All that are attached, by themselves and by number."""

    __slots__ = ("_numbers", "attached", "by_number")

    def __init__(self, numbers: "counter[int] | None" = None) -> None:
        self._numbers = numbers if numbers is not None else counter(1)
        self.attached: dict[Port, Attached] = {}
        self.by_number: dict[int, Attached] = {}

    def attach(self, port: Port) -> None:
        attached = Attached(port, next(self._numbers))
        self.attached[port] = self.by_number[attached.number] = attached

    def detach(self, port: Port) -> Attached | None:
        attached = self.attached.pop(port, None)
        if attached is not None:
            del self.by_number[attached.number]
        return attached

    def everybody(self) -> list[Attached]:
        """Those of the moment, whoever comes and goes meanwhile."""
        return list(self.attached.values())

    def infos(self, after: int, count: int) -> list[PortInfo]:
        """Up to `count` ports with a higher number than `after`, in the order in which they came."""
        later = (attached for number, attached in self.by_number.items() if number > after)
        return [_info(attached) for attached in islice(later, count)]

    def info(self, number: int) -> PortInfo | None:
        """One port; None: it is gone, or was never there."""
        attached = self.by_number.get(number)
        return _info(attached) if attached is not None else None


def _info(attached: Attached) -> PortInfo:
    return PortInfo(
        attached.number,
        attached.port,
        list(attached.doors),
        attached.holds,
        attached.delivered,
        attached.settled,
        sum(attached.holds.values()),
        attached.blocked,
        bool(attached.waiting),
    )
