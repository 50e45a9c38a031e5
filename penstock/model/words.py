"""The words in which a session speaks to the broker: commands, each for many messages.

A session (one per connection, in `protocols/`) turns a received chunk of bytes into a list of
these. None of them knows which protocol it came from, so every door leads to the same rooms.
Message positions are offsets and `ranges` are `(first, end)` with an exclusive end; `origin` is
the leading part of the ids that the peer named (see `ids.py`), so that an id from another life
of the log settles nothing.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from penstock.model.batch import Batch

Ranges = list[tuple[int, int]]

KEEP_TTL: Final = -2
"""For a new TTL: the one that the message has."""

RETRY_DELAYS: Final = -1
"""For a delay: the one that the queue has for messages that come again."""


class Where(Enum):
    """Where a message goes that its consumer gave back or lost."""

    PLACE = "place"  # where it was
    TAIL = "tail"  # behind the last message of the moment


class Outcome(Enum):
    """How a consumer ends a delivery."""

    ACK = "ack"  # done, settled for good
    REJECT = "reject"  # never again: dead letter, reason "rejected"
    REQUEUE = "requeue"  # again later: the tail, with a new TTL


@dataclass(slots=True, init=False)
class Publish:
    """Messages for one queue. `tickets` names each to its sender where receipts are wanted."""

    queue: str
    batch: Batch
    tickets: "array[int] | None" = None  # typecode "I": the sender's own ids (RQ); None: no receipt wanted
    wants_reply: bool = False  # a request: its settlement carries an answer back
    timeout_seconds: int = 0  # for requests: withdrawn when not answered in time; 0: no limit

    def halves(self) -> "list[Publish]":
        """The same messages, of which there are several, in two batches."""
        batch, tickets = self.batch, self.tickets
        middle = len(batch) // 2
        return [
            Publish(
                self.queue,
                batch.cut(lo, hi),
                tickets[lo:hi] if tickets is not None else None,
                self.wants_reply,
                self.timeout_seconds,
            )
            for lo, hi in ((0, middle), (middle, len(batch)))
        ]

    # Written out, see `batch.py`.
    def __init__(
        self,
        queue: str,
        batch: Batch,
        tickets: "array[int] | None" = None,
        wants_reply: bool = False,
        timeout_seconds: int = 0,
    ) -> None:
        self.queue = queue
        self.batch = batch
        self.tickets = tickets
        self.wants_reply = wants_reply
        self.timeout_seconds = timeout_seconds


@dataclass(slots=True)
class Consume:
    """A standing demand: at most `credit` unsettled messages at this consumer (0: no bound)."""

    queue: str
    credit: int
    dead: bool = False  # the dead letters of `queue` instead of its messages
    once: bool = False  # a single message per demand (SSPQ), not a standing window
    priority: int = 20
    exclusive: bool = False


@dataclass(slots=True)
class Cancel:
    """No more messages of this queue for this connection; what it holds it may still settle."""

    queue: str
    dead: bool = False  # its dead letters; the other door stays open


@dataclass(slots=True, init=False)
class Settle:
    """The consumer's verdict on messages that it holds."""

    queue: str
    outcome: Outcome
    origin: bytes
    ranges: Ranges
    ttl_seconds: int = 0  # REQUEUE only: the new TTL; 0: none, or KEEP_TTL
    dead: bool = False  # held through the dead-letter door
    delay_us: int = RETRY_DELAYS  # REQUEUE only: not again before so long
    why: str = ""  # REJECT only: what to remember with the letter

    def __init__(
        self,
        queue: str,
        outcome: Outcome,
        origin: bytes,
        ranges: Ranges,
        ttl_seconds: int = 0,
        dead: bool = False,
        delay_us: int = RETRY_DELAYS,
        why: str = "",
    ) -> None:
        self.queue = queue
        self.outcome = outcome
        self.origin = origin
        self.ranges = ranges
        self.ttl_seconds = ttl_seconds
        self.dead = dead
        self.delay_us = delay_us
        self.why = why


@dataclass(slots=True)
class Accepted:
    """A consumer took requests that want a reply (RQ DELIVERED): tell the requesters."""

    queue: str
    origin: bytes
    ranges: Ranges


@dataclass(slots=True)
class Reply:
    """The answers to requests that this consumer holds; settles them."""

    queue: str
    origin: bytes
    offsets: "array[int]"  # typecode "q", one per answer
    answers: Batch


@dataclass(slots=True)
class Broadcast:
    """To every present consumer of the queue, at once; not stored."""

    queue: str
    batch: Batch


@dataclass(slots=True)
class Closing:
    """The peer wants to leave: no new work for it, finish what is pending, then close."""


@dataclass(slots=True)
class Sync:
    """The peer wants to hear when everything that it has said so far is durable."""


@dataclass(slots=True)
class Ignored:
    """Counted, logged at a bounded rate, otherwise without effect."""

    reason: str
    count: int = 1
    detail: str = field(default="")


Command = Publish | Consume | Cancel | Settle | Accepted | Reply | Broadcast | Closing | Sync | Ignored


def ranges_of(offsets: Iterable[int]) -> Ranges:
    """Offsets in any order as runs."""
    ordered = sorted(offsets)
    if ordered:
        first, end = ordered[0], ordered[-1] + 1
        if end - first == len(ordered) and ordered == list(range(first, end)):
            return [(first, end)]  # Mostly that is so, and needs no loop.
    ranges: Ranges = []
    for offset in ordered:
        if ranges and ranges[-1][1] == offset:
            ranges[-1] = (ranges[-1][0], offset + 1)
        elif not ranges or ranges[-1][1] < offset:
            ranges.append((offset, offset + 1))
    return ranges
