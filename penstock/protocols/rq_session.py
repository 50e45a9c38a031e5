"""What an RQ connection may do next: the tables that both sides walk, and the parts they share.

Four small machines describe a connection. The controller walks them as one end of the wire and
the node as the other, with the same tables; `rq_controller.py` and `rq_node.py` add what each
side tells its owner.

    the connection                        a consumer (per queue)

    open ─── node closing ──► leaving     none ── CONSUME ──► asked ── CONSUMING ──► consuming
     │ │                         │                              │ ▲                      │
     │ └ controller closing ►    │                  CANCEL_QUEUE│ │CONSUME   CANCEL_QUEUE│
     │                   stopping│                              ▼ │                      │
     │       node closing │      │ controller               cancelled ◄──────────────────┘
     │                    ▼      ▼ closing
     └─ SERVER_FULL ► full  ending        the peer's silence

    an exchange (per id, one leg)         awake ── 15 s ──► pinged ── 15 s ──► idle
                                            ▲                 │                 │
    free ── NOREPLY ──► notice              └───── any byte ──┴─────────────────┘
      │                   └─ DELIVERED, REPLY, UNDELIVERED ──► free
      └─ REQUEST ──► request ── DELIVERED ──► taken ── REPLY, UNDELIVERED ──► free
                        └─ REPLY, UNDELIVERED ──► free

An exchange is a request on one leg of its way: between requester and controller under the
requester's id, between controller and consumer under the controller's delivery id.

Rules that always hold:
  * New work (a request, a broadcast, a consume, a delivery) begins in `open` only, and a delivery
    also in `leaving`, where the controller may have sent it before it knew. What has begun may
    finish in every state but `full`.
  * An id is given again only after its exchange has come back to `free`. That is the peer's doing:
    an id whose request was withdrawn stays taken until its consumer has answered, because a late
    answer must not be taken for that of another request.
  * Our own step that a table does not have is refused with `MisuseError` and changes nothing. A
    peer's step that it does not have is told as `Ignored`.
"""

from array import array
from collections.abc import Iterable
from enum import Enum, IntEnum
from functools import lru_cache
from typing import TypeVar

from penstock.model.batch import Batch
from penstock.model.policy import DEAD_SUFFIX, QueueNameError, check_queue_name
from penstock.model.words import Ignored
from penstock.protocols.errors import MisuseError
from penstock.protocols.rq import Command

SILENCE_US = 15_000_000
"""How long a peer may be silent before it is pinged, and then before it is taken for idle."""

IDS_END = 1 << 15
"""Ids are below this: the original library sign-extends what is above."""


@lru_cache(maxsize=4096)
def refusal(queue: str) -> str | None:
    """Why nothing can be sent to a queue of that name, or None where something can."""
    try:
        check_queue_name(queue)
    except QueueNameError as wrong:
        return str(wrong)
    return None


def door_name(queue: str, dead: bool) -> str:
    """How a client calls the queue, or the door to its dead letters."""
    return queue + DEAD_SUFFIX if dead else queue


class Connection(Enum):
    OPEN = "open"
    LEAVING = "leaving"  # the node has said CLOSING
    STOPPING = "stopping"  # the controller has said CLOSING
    ENDING = "ending"  # both have
    FULL = "full"  # the controller has said SERVER_FULL


class Farewell(Enum):
    NODE_CLOSING = "CLOSING by the node"
    CONTROLLER_CLOSING = "CLOSING by the controller"
    SERVER_FULL = "SERVER_FULL"


CONNECTIONS: dict[tuple[Connection, Farewell], Connection] = {
    (Connection.OPEN, Farewell.NODE_CLOSING): Connection.LEAVING,
    (Connection.OPEN, Farewell.CONTROLLER_CLOSING): Connection.STOPPING,
    (Connection.OPEN, Farewell.SERVER_FULL): Connection.FULL,
    (Connection.LEAVING, Farewell.CONTROLLER_CLOSING): Connection.ENDING,
    (Connection.STOPPING, Farewell.NODE_CLOSING): Connection.ENDING,
}


class Consumer(Enum):
    NONE = "none"
    ASKED = "asked"
    CONSUMING = "consuming"
    CANCELLED = "cancelled"


CONSUMERS: dict[tuple[Consumer, Command], Consumer] = {
    (Consumer.NONE, Command.CONSUME): Consumer.ASKED,
    (Consumer.ASKED, Command.CONSUME): Consumer.ASKED,
    (Consumer.ASKED, Command.CONSUMING): Consumer.CONSUMING,
    (Consumer.ASKED, Command.CANCEL_QUEUE): Consumer.CANCELLED,
    (Consumer.CONSUMING, Command.CONSUME): Consumer.CONSUMING,  # new MAX and PRIORITY
    (Consumer.CONSUMING, Command.CONSUMING): Consumer.CONSUMING,
    (Consumer.CONSUMING, Command.CANCEL_QUEUE): Consumer.CANCELLED,
    (Consumer.CANCELLED, Command.CONSUME): Consumer.ASKED,
}


class Exchange(IntEnum):
    """The numbers fit in two bits, because they are kept in arrays."""

    FREE = 0
    NOTICE = 1  # a request that wants no reply
    REQUEST = 2
    TAKEN = 3  # the consumer has it and works on it


class Step(Enum):
    NOTICE = "REQUEST with NOREPLY"
    REQUEST = "REQUEST"
    DELIVERED = "DELIVERED"
    REPLY = "REPLY"
    UNDELIVERED = "UNDELIVERED"


EXCHANGES: dict[tuple[Exchange, Step], Exchange] = {
    (Exchange.FREE, Step.NOTICE): Exchange.NOTICE,
    (Exchange.FREE, Step.REQUEST): Exchange.REQUEST,
    (Exchange.NOTICE, Step.DELIVERED): Exchange.FREE,
    (Exchange.NOTICE, Step.REPLY): Exchange.FREE,
    (Exchange.NOTICE, Step.UNDELIVERED): Exchange.FREE,
    (Exchange.REQUEST, Step.DELIVERED): Exchange.TAKEN,
    (Exchange.REQUEST, Step.REPLY): Exchange.FREE,
    (Exchange.REQUEST, Step.UNDELIVERED): Exchange.FREE,
    (Exchange.TAKEN, Step.DELIVERED): Exchange.TAKEN,  # given to another consumer, who has taken it too
    (Exchange.TAKEN, Step.REPLY): Exchange.FREE,
    (Exchange.TAKEN, Step.UNDELIVERED): Exchange.FREE,
}


class Liveness(Enum):
    AWAKE = "awake"
    PINGED = "pinged"
    IDLE = "idle"


SILENCES: dict[Liveness, Liveness] = {
    Liveness.AWAKE: Liveness.PINGED,
    Liveness.PINGED: Liveness.IDLE,
    Liveness.IDLE: Liveness.IDLE,
}
"""What a full time of silence leads to. Any byte from the peer leads to AWAKE."""

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


def step(table: dict[tuple[S, E], S], state: S, event: E, what: str) -> S:
    """Our own step: the next state, or MisuseError where the table has none."""
    after = table.get((state, event))
    if after is None:
        said = event.name if isinstance(event, Command) else event.value
        raise MisuseError(f"{what}: {said} is not possible while it is {state.name.lower()}")
    return after


def pick(batch: Batch, positions: Iterable[int]) -> Batch:
    """Some messages of a batch without its optional columns, where not all of them can be used."""
    payload, bounds = batch.payload, batch.bounds
    return Batch.of((payload[bounds[i] : bounds[i + 1]] for i in positions), protocol=batch.protocol)


class Pulse:
    """When to ping a silent peer, and when to take it for idle. Knows no clock: it is told the time."""

    __slots__ = ("_due_us", "_silence_us", "_told", "state")

    def __init__(self, now_us: int, silence_us: int) -> None:
        if silence_us <= 0:
            raise MisuseError(f"silence_us = {silence_us}: must be more than 0")
        self.state = Liveness.AWAKE
        self._silence_us = silence_us
        self._due_us = now_us + silence_us
        self._told = False

    @property
    def idle(self) -> bool:
        return self.state is Liveness.IDLE

    @property
    def due_us(self) -> int | None:
        """When `tick` has something to do next, where nothing is heard; None: not before something is."""
        return None if self.idle else self._due_us

    def heard(self, now_us: int) -> None:
        self.state = Liveness.AWAKE
        self._due_us = now_us + self._silence_us

    def tick(self, now_us: int) -> bool:
        """Let silence take effect; True where a PING is to be sent."""
        if now_us < self._due_us:
            self._due_us = min(self._due_us, now_us + self._silence_us)  # The clock may have been set back.
            return False
        self.state = SILENCES[self.state]
        self._due_us = now_us + self._silence_us
        return self.state is Liveness.PINGED

    def changed(self) -> bool:
        """Whether the idle mark is another one than when this was asked last."""
        before, self._told = self._told, self.idle
        return before != self._told


class IdPool:
    """The ids of one connection: from 0 up, freed ones again before new ones, never over the limit."""

    __slots__ = ("_freed", "high")

    def __init__(self) -> None:
        self._freed = array("I")
        self.high = 0  # every id that was ever given is below

    @property
    def available(self) -> int:
        return IDS_END - self.high + len(self._freed)

    @property
    def taken(self) -> int:
        return self.high - len(self._freed)

    def take(self, count: int) -> "array[int]":
        """`count` ids; the caller has looked at `available`."""
        freed = self._freed
        again = min(count, len(freed))
        ids = freed[len(freed) - again :]
        del freed[len(freed) - again :]
        fresh = count - again
        if fresh:
            ids.extend(range(self.high, self.high + fresh))
            self.high += fresh
        return ids

    def free(self, ids: Iterable[int]) -> None:
        self._freed.extend(ids)


class IgnoredTally:
    """What a peer did in vain, added up by reason, so that a flood of it stays small."""

    __slots__ = ("_by_reason",)

    def __init__(self) -> None:
        self._by_reason: dict[str, Ignored] = {}

    def add(self, reason: str, detail: str = "", count: int = 1) -> None:
        """`detail` is kept for the first of a kind. `reason` must come from a small set."""
        known = self._by_reason.get(reason)
        if known is None:
            self._by_reason[reason] = Ignored(reason, count, detail)
        else:
            known.count += count

    def take(self) -> list[Ignored]:
        if not self._by_reason:
            return []
        ignored = list(self._by_reason.values())
        self._by_reason = {}
        return ignored
