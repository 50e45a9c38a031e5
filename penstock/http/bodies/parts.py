"""Parts: the messages of one body, put together column by column, a batch for each queue.

Readers of bodies (`ndjson.py`, `arrow.py`) add what they have read in pieces of many messages; nothing
here is done per message.

Rules that always hold:
  * Queues come out in the order in which they first appeared, and the messages of each in their order.
  * A column that no message has is not there, as in every `Batch`.
  * A body has at most `ROWS_MAX` messages for at most `QUEUES_MAX` queues. Each costs, whatever is in it.
"""

from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from penstock.http.kinds import Seconds
from penstock.http.problems import Problem
from penstock.log.columns import TTL_SECONDS_MAX
from penstock.model.batch import DELAY_SECONDS_MAX, RETRIES_NONE, Batch

Parts = list[tuple[str | None, Batch]]
"""What a body is for: messages for each queue; the queue is None where the body does not name one."""

NO_TTL: Final = 0
NO_DELAY: Final = 0

ROWS_MAX: Final = 1_000_000
"""An empty message is 4 bytes of an Arrow stream, and ten times that on its way into the log."""

QUEUES_MAX: Final = 10_000
"""A queue of one message is 24 bytes of NDJSON, and 1 KB here."""

TTL_RULE: Final = f"a whole number of seconds from 1 to {TTL_SECONDS_MAX}"
RETRIES_RULE: Final = "a whole number from 0 to 255 (255: without end)"
DELAY: Final = Seconds(0, DELAY_SECONDS_MAX)
DELAY_RULE: Final = DELAY.wanted()
OFFSET_RULE: Final = "the offset of a dead letter, a whole number from 0 on"


class Others(NamedTuple):
    """What messages have beside their payloads; None where none of them has it."""

    ttl: "array[int] | None" = None
    retries: "array[int] | None" = None
    repairs: "array[int] | None" = None
    delay_us: "array[int] | None" = None
    headers: Sequence[bytes] | None = None


NOTHING: Final = Others()


class Part:
    """The messages of one queue."""

    __slots__ = ("_bounds", "_delay_us", "_headers", "_pieces", "_repairs", "_retries", "_ttl", "end")

    def __init__(self) -> None:
        self.end = 0  # of the payload so far
        self._pieces: list[bytes | memoryview] = []
        self._bounds = array("i", [0])
        self._ttl: array[int] | None = None
        self._retries: array[int] | None = None
        self._repairs: array[int] | None = None
        self._delay_us: array[int] | None = None
        self._headers: list[bytes] | None = None

    def add(self, payload: bytes | memoryview, ends: "array[int]", others: Others = NOTHING) -> None:
        """More messages. `ends` are where each of them ends, counted from the beginning of the whole part.

        Either all of them are `repairs`, or none is.
        """
        before, count = len(self._bounds) - 1, len(ends)
        self._ttl = _joined(self._ttl, others.ttl, "q", NO_TTL, before, count)
        self._retries = _joined(self._retries, others.retries, "h", RETRIES_NONE, before, count)
        self._delay_us = _joined(self._delay_us, others.delay_us, "q", NO_DELAY, before, count)
        if others.repairs is not None:
            self._repairs = others.repairs if self._repairs is None else self._repairs + others.repairs
        if others.headers is not None and self._headers is None:
            self._headers = [b""] * before
        if self._headers is not None:
            self._headers += others.headers or [b""] * count
        self._pieces.append(payload)
        self._bounds.extend(ends)
        self.end += len(payload)

    def batch(self, protocol: str) -> Batch:
        return Batch(
            b"".join(self._pieces),
            self._bounds,
            self._ttl,
            self._retries,
            protocol=protocol,
            repairs=self._repairs,
            delay_us=self._delay_us,
            headers=self._headers,
        )


class PartsBuilder:
    def __init__(self) -> None:
        self._parts: dict[str | None, Part] = {}
        self.rows = 0

    def count(self, more: int) -> None:
        """So many messages more; a Problem where they are too many."""
        self.rows += more
        if self.rows > ROWS_MAX:
            raise Problem(
                "body-too-large",
                f"the body has {self.rows} messages or more, and {ROWS_MAX} are taken at a time; send "
                "less at a time",
            )

    def of(self, queue: str | None) -> Part:
        """The part of a queue, which is made where there is none yet; a Problem where there are too many."""
        part = self._parts.get(queue)
        if part is None:
            if len(self._parts) == QUEUES_MAX:
                raise Problem(
                    "body-too-large",
                    f"the messages of the body are for more than {QUEUES_MAX} queues; send less at a time",
                )
            part = self._parts[queue] = Part()
        return part

    def finish(self, protocol: str) -> Parts:
        """All of it; a Problem where it is nothing."""
        if not self._parts:
            raise Problem("bad-request", "the body has no message; send at least one")
        return [(queue, part.batch(protocol)) for queue, part in self._parts.items()]


def _joined(
    column: "array[int] | None",
    more: "array[int] | None",
    typecode: str,
    absent: int,
    before: int,
    count: int,
) -> "array[int] | None":
    """A column and what is added to it, with `absent` for messages that came without."""
    if column is None and more is None:
        return None
    if column is None:
        column = array(typecode, [absent]) * before
    column.extend(more if more is not None else array(typecode, [absent]) * count)
    return column


def too_large(where: str, value_bytes: int, payload_bytes_max: int) -> Problem:
    """The problem of a message that is larger than any may be."""
    return Problem(
        "body-too-large",
        f"{where}: the message has {value_bytes} bytes, and the limit of [limits] payload-bytes-max is "
        f"{payload_bytes_max}; send a smaller one",
    )
