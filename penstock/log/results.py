"""What the log answers: receipts, what has become of messages, what happened to them."""

from collections.abc import Callable
from typing import NamedTuple

from penstock.log.errors import LogError
from penstock.model.life import Event, Reason


class Stored(NamedTuple):
    """A receipt: these messages are as durable as their queue promises."""

    queue: str
    first: int
    end: int
    origin: bytes


Receipt = Callable[[Stored | LogError], None]


class Step(NamedTuple):
    """Which of the calls this is that make up one transaction, where it is too large for a single one."""

    number: int  # from 0, one after the other
    last: bool


class TransactionDone(NamedTuple):
    """A transaction's receipt. `repeated`: the key, or the step, had been stored before, nothing was added.

    `steps`: how many of a transaction's steps are stored, while the last one is not; 0: it is whole.
    """

    key: str
    stored: list[Stored]  # of the whole transaction; of one step, where it is not whole
    repeated: bool
    steps: int = 0
    redriven: int = 0  # dead letters that this call has repaired


TransactionReceipt = Callable[[TransactionDone | LogError], None]


class Fate(NamedTuple):
    """What has become of a run of messages."""

    first: int
    end: int
    event: Event
    reason: Reason
    consumer: str = ""  # who had them, where they were taken from somebody's hands


class EventRun(NamedTuple):
    """One recorded event of a run of messages that share everything but the offset."""

    event_offset: int  # of the run's first message; the others follow
    event: Event
    first: int
    end: int
    reason: Reason
    consumer: str
    attempt: int
    dispatched_us: int  # 0: not dispatched
    time_us: int
