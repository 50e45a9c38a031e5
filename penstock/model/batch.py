"""Batches: how many messages travel together, with no object per message.

A `Batch` is what arrives: the payloads of many messages for one queue, joined, with the
positions where each begins and ends. A `Slice` is what leaves: a window on a stored block.
Both use the same two columns, and both are laid out as Arrow's variable-size binary is:
`bounds` has one entry more than there are messages and starts at 0, message *i* is
`payload[bounds[i]:bounds[i + 1]]`. So a batch becomes a log block, and a block becomes an
Arrow array, without anybody walking over the messages.

Optional columns are `None` when no message of the batch has the attribute. A TTL of 0 is one: PHPMQ's
packet 05 goes out where it came in. So batches with a TTL and batches without are blocks of their own.

What is made for every chunk has its `__init__` written out, here and in `words.py`: one that `dataclass`
makes is interpreted in the compiled build, too, and would cost more than all that is done with the object.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.model.life import Reason

DELAY_SECONDS_MAX: Final = 315_576_000
"""Ten years."""

NOT_DEAD: Final = Reason.NONE

RETRIES_NONE = -1
"""In a retries column: this message came without a retry counter."""

NO_TTL = -1
"""In a slice's column of expiries: this message came without a TTL, unlike a neighbour."""

RETRIES_ENDLESS = 255
"""A retry counter that never runs down."""


@dataclass(slots=True, init=False)
class Batch:
    """Messages on their way in, all for one queue, in order."""

    payload: bytes
    bounds: "array[int]"  # typecode "i", count + 1 entries, first is 0
    ttl_seconds: "array[int] | None" = None  # typecode "q"; 0: it never expires
    retries: "array[int] | None" = None  # typecode "h"; RETRIES_NONE: no counter
    reply: "Sequence[bytes] | None" = None  # reply addresses; all messages of the batch have one, or none has
    protocol: str = ""  # the door it came through: "sspq", "phpmq", "rq", "http", "spark", "pipeline"
    dead: Reason = NOT_DEAD  # or why they are dead letters from the beginning; in `transact` only
    repairs: "array[int] | None" = None
    """Typecode "q"; in `transact` only. No new messages: payloads for the dead letters at these offsets."""
    identity: str = ""  # of the queue whose letters these are; empty: of the one that has its name
    delay_us: "array[int] | None" = (
        None  # typecode "q": not handed out before so long after arrival; 0: at once
    )
    headers: "Sequence[bytes] | None" = None  # as `headers.py` encodes them; b"": this message has none
    moves: "array[int] | None" = None
    """Typecode "q", growing; in `transact` only. These are the messages at these offsets of the queue
    `source`, which are withdrawn there with it; those that somebody holds, or that are gone, stay out."""
    source: str = ""  # `identity` is that of this queue then

    def __init__(
        self,
        payload: bytes,
        bounds: "array[int]",
        ttl_seconds: "array[int] | None" = None,
        retries: "array[int] | None" = None,
        reply: "Sequence[bytes] | None" = None,
        protocol: str = "",
        dead: Reason = NOT_DEAD,
        repairs: "array[int] | None" = None,
        delay_us: "array[int] | None" = None,
        headers: "Sequence[bytes] | None" = None,
    ) -> None:
        self.payload = payload
        self.bounds = bounds
        self.ttl_seconds = ttl_seconds
        self.retries = retries
        self.reply = reply
        self.protocol = protocol
        self.dead = dead
        self.repairs = repairs
        self.identity = ""
        self.delay_us = delay_us
        self.headers = headers
        self.moves = None
        self.source = ""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def cut(self, lo: int, hi: int) -> "Batch":
        """Its messages from `lo` to `hi` (exclusive)."""
        start = self.bounds[lo]
        cut = Batch(
            self.payload[start : self.bounds[hi]],
            array("i", [bound - start for bound in self.bounds[lo : hi + 1]]),
            self.ttl_seconds[lo:hi] if self.ttl_seconds is not None else None,
            self.retries[lo:hi] if self.retries is not None else None,
            self.reply[lo:hi] if self.reply is not None else None,
            self.protocol,
            self.dead,
            self.repairs[lo:hi] if self.repairs is not None else None,
            self.delay_us[lo:hi] if self.delay_us is not None else None,
            self.headers[lo:hi] if self.headers is not None else None,
        )
        cut.identity = self.identity
        return cut

    def picked(self, rows: "Sequence[tuple[int, int]]") -> "Batch":
        """Some of its messages, by ranges of their numbers; nothing is moved by them."""
        if rows == [(0, len(self))]:
            return self.cut(0, len(self))
        numbers = [number for lo, hi in rows for number in range(lo, hi)]
        bounds = self.bounds
        return Batch.of(
            [self.payload[bounds[i] : bounds[i + 1]] for i in numbers],
            ttl_seconds=[self.ttl_seconds[i] for i in numbers] if self.ttl_seconds is not None else None,
            retries=[self.retries[i] for i in numbers] if self.retries is not None else None,
            protocol=self.protocol,
            delay_us=[self.delay_us[i] for i in numbers] if self.delay_us is not None else None,
            headers=[self.headers[i] for i in numbers] if self.headers is not None else None,
        )

    def messages(self) -> list[bytes]:
        """The payloads one by one. For tests and tools; nothing on the hot path calls it."""
        bounds = self.bounds
        return [self.payload[bounds[i] : bounds[i + 1]] for i in range(len(bounds) - 1)]

    @classmethod
    def of(
        cls,
        messages: Iterable[bytes],
        *,
        ttl_seconds: Sequence[int] | None = None,
        retries: Sequence[int] | None = None,
        reply: Sequence[bytes] | None = None,
        protocol: str = "",
        delay_us: Sequence[int] | None = None,
        headers: Sequence[bytes] | None = None,
    ) -> "Batch":
        """A batch from single payloads, for callers that have them one by one."""
        parts = list(messages)
        bounds = array("i", [0])
        end = 0
        for part in parts:
            end += len(part)
            bounds.append(end)
        return cls(
            b"".join(parts),
            bounds,
            array("q", ttl_seconds) if ttl_seconds is not None else None,
            array("h", retries) if retries is not None else None,
            reply,
            protocol,
            delay_us=array("q", delay_us) if delay_us is not None else None,
            headers=headers,
        )


@dataclass(slots=True, init=False)
class Slice:
    """Messages on their way out: `lo` to `hi` (exclusive) of one stored block.

    Message *i* has offset `first_offset + i`, where `first_offset` is the offset of the block's
    message 0, payload `payload[bounds[i]:bounds[i + 1]]`, and id `origin + b"%014x" % offset`.
    The optional columns are indexed by *i* as well.
    """

    payload: bytes | memoryview
    bounds: Sequence[int]  # int32, as in Batch
    lo: int
    hi: int
    first_offset: int
    origin: bytes  # the first 18 hex digits of every id in this slice, see ids.py
    time_us: int  # when the messages were accepted
    expires_us: Sequence[int] | None = None  # absolute; 0: never; or NO_TTL
    retries: Sequence[int] | None = None  # what is left; RETRIES_NONE: no counter
    attempts: Sequence[int] | None = None  # deliveries before this one; None: none before
    reply: Sequence[bytes] | None = None
    protocol: str = ""
    headers: Sequence[bytes] | None = None  # b"": this message has none
    reason: Reason = NOT_DEAD  # why they are dead letters, where they are

    def __init__(
        self,
        payload: bytes | memoryview,
        bounds: Sequence[int],
        lo: int,
        hi: int,
        first_offset: int,
        origin: bytes,
        time_us: int,
        expires_us: Sequence[int] | None = None,
        retries: Sequence[int] | None = None,
        attempts: Sequence[int] | None = None,
        reply: Sequence[bytes] | None = None,
        protocol: str = "",
        headers: Sequence[bytes] | None = None,
        reason: Reason = NOT_DEAD,
    ) -> None:
        self.payload = payload
        self.bounds = bounds
        self.lo = lo
        self.hi = hi
        self.first_offset = first_offset
        self.origin = origin
        self.time_us = time_us
        self.expires_us = expires_us
        self.retries = retries
        self.attempts = attempts
        self.reply = reply
        self.protocol = protocol
        self.headers = headers
        self.reason = reason

    def __len__(self) -> int:
        return self.hi - self.lo

    @property
    def offset_start(self) -> int:
        return self.first_offset + self.lo

    @property
    def offset_end(self) -> int:
        return self.first_offset + self.hi

    @property
    def payload_bytes(self) -> int:
        return self.bounds[self.hi] - self.bounds[self.lo]

    def messages(self) -> list[bytes]:
        """The payloads one by one. For tests and tools; nothing on the hot path calls it."""
        bounds, payload = self.bounds, self.payload
        return [bytes(payload[bounds[i] : bounds[i + 1]]) for i in range(self.lo, self.hi)]
