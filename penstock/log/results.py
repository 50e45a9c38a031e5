"""What the log answers: receipts, what has become of messages, what happened to them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from penstock.log.errors import LogError
from penstock.model.life import Event, Reason


class Stored(NamedTuple):
    """A receipt: these messages are as durable as their queue promises."""

    queue: str
    first: int
    end: int
    origin: bytes


Receipt = Callable[[Stored | LogError], None]


class StageInfo(NamedTuple):
    """A part of a transaction that waits for its commit."""

    stage: str  # its id
    key: str
    time_us: int
    messages: int
    payload_bytes: int
    stored_bytes: int  # about what it takes of the disk


StageReceipt = Callable[[StageInfo | LogError], None]


class Step(NamedTuple):
    """Earlier versions cut a large transaction into several: which of them one is."""

    number: int  # from 0, one after the other
    last: bool


class Begun(NamedTuple):
    """What is known of a transaction that an earlier version has begun, and not finished."""

    steps: int = 0  # that it has stored; 0: it has not begun
    fingerprint: str = ""  # of the whole


class Shares(NamedTuple):
    """Of a commit that the log of its key decides: what other logs have of it; see `transactions.py`."""

    attempt: str  # which this is, of those that were begun
    stages: list[str]  # of all logs, in the order of the commit
    totals: list[list[Any]]  # of those in other logs
    shards: dict[str, list[str]]  # the stages of each of these, by its number as JSON has it


Rows = Sequence[Sequence[int]] | None
"""Of stages, by ranges of numbers; None: all of them."""


class Decision(NamedTuple):
    """What the log of a key has decided about other logs."""

    shards: dict[str, list[str]]  # the stages that each of them has to store
    stored: list[list[Any]] | None  # queue, first offset, end; None as long as not all have stored theirs
    rows: Rows = None  # of these stages, where messages were moved


class TransactionDone(NamedTuple):
    """A transaction's receipt. `repeated`: the key had been stored before, nothing was added."""

    key: str
    stored: list[Stored]
    repeated: bool
    redriven: int = 0  # dead letters that this call has repaired
    fingerprint: str = ""  # what is remembered of the contents
    asked: list[Any] | None = None  # of a repetition: what its stages bring; None where some are gone
    rows: Rows = None  # which were taken out, of messages that are moved to another log


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
