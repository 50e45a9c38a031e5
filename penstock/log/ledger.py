"""Ledger: what has happened to messages, as rows of a settlement block.

A row is a run of messages that share everything but the offset. Columns, each padded to 8:

    first       int64[rows]     the first offset of the run
    length      int64[rows]     how many messages
    dispatched  int64[rows]     µs since the epoch; 0: was not with a consumer
    attempt     int32[rows]     deliveries so far, the one that this row ends included
    consumer    int32[rows]     index into the names
    event       uint8[rows]     life.Event
    reason      uint8[rows]     life.Reason
    names       int32[names + 1], bytes

and when the block has FLAG_MOVED, what the message has from now on:

    tail        int64[rows]     its place is behind this tail; of one that is delayed: until when, µs
    expires     int64[rows]     µs since the epoch, 0: never, -2: as stored
    retries     int16[rows]     what is left, -2: as stored
    attempts    int32[rows]     what counts from now on (a redrive starts again at 0)

and with FLAG_WHY, what was said with it:

    why         int32[rows]     index into the texts, of which the first is empty
    texts       int64, how many; int32[texts + 1], bytes
"""

from array import array
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Final, NamedTuple

from penstock.log.block import FLAG_MOVED, FLAG_WHY, PAD, BodyReader, Buffer, Header
from penstock.model.life import Event, Reason
from penstock.model.pending import AS_STORED, Note

EVENTS_MAX = (1 << 32) - 1
"""Of one block: its header has 32 bits for them."""


class Row(NamedTuple):
    """One row of a settlement block, decoded."""

    event: Event
    first: int
    end: int
    reason: Reason
    consumer: str
    attempt: int
    dispatched_us: int
    note: Note
    tail: int
    why: str = ""


class Ledger:
    """Rows gathered for the next settlement block of one queue."""

    __slots__ = (
        "_attempt",
        "_attempts",
        "_consumer",
        "_dispatched",
        "_event",
        "_expires",
        "_first",
        "_length",
        "_moved",
        "_names",
        "_reason",
        "_retries",
        "_tail",
        "_texts",
        "_why",
        "event_count",
        "has_delays",
        "lowest",
        "more_than_acks",
    )

    def __init__(self) -> None:
        self._first = array("q")
        self._length = array("q")
        self._dispatched = array("q")
        self._attempt = array("i")
        self._consumer = array("i")
        self._event = array("B")
        self._reason = array("B")
        self._names: dict[str, int] = {}
        self._tail = array("q")
        self._expires = array("q")
        self._retries = array("h")
        self._attempts = array("i")
        self._moved = False
        self._why = array("i")
        self._texts = _NO_TEXTS
        self.has_delays = False
        self.more_than_acks = False
        self.event_count = 0
        self.lowest = 0

    def __len__(self) -> int:
        return len(self._first)

    @property
    def names_count(self) -> int:
        return len(self._names)

    @property
    def flags(self) -> int:
        return (FLAG_MOVED if self._moved else 0) | (FLAG_WHY if self._texts else 0)

    def add(
        self,
        event: Event,
        first: int,
        end: int,
        reason: Reason,
        consumer: str,
        attempt: int,
        dispatched_us: int,
        note: Note | None = None,
        tail: int = 0,
        why: str = "",
    ) -> None:
        """A row; with a `note` where the message lives on, and what was said with it."""
        rows = self._first
        if (
            rows
            and note is None
            and not self._moved
            and not self._texts
            and not why
            and rows[-1] + self._length[-1] == first
            and self._event[-1] == event
            and self._dispatched[-1] == dispatched_us
            and self._attempt[-1] == attempt
            and self._reason[-1] == reason
            and self._consumer[-1] == self._names.get(consumer, -1)
        ):
            # The usual case: acknowledgements of a delivery, one chunk after the other.
            self._length[-1] += end - first
            self.event_count += end - first
            return
        if not rows or first < self.lowest:
            self.lowest = first
        if event is not Event.ACKED:
            self.more_than_acks = True
            self.has_delays = self.has_delays or event is Event.DELAYED
        if why and not self._texts:
            self._texts = {"": 0}
            self._why = array("i", bytes(4 * len(rows)))
        if self._texts:
            self._why.append(self._texts.setdefault(why, len(self._texts)))
        rows.append(first)
        self._length.append(end - first)
        self._dispatched.append(dispatched_us)
        self._attempt.append(attempt)
        self._consumer.append(self._names.setdefault(consumer, len(self._names)))
        self._event.append(event)
        self._reason.append(reason)
        self.event_count += end - first
        if note is not None and not self._moved:
            self._moved = True
            before = len(rows) - 1
            self._tail = array("q", bytes(8 * before))
            self._expires = array("q", [AS_STORED]) * before
            self._retries = array("h", [AS_STORED]) * before
            self._attempts = array("i", bytes(4 * before))
        if self._moved:
            self._tail.append(tail)
            self._expires.append(note.expires_us if note is not None else AS_STORED)
            self._retries.append(note.retries if note is not None else AS_STORED)
            self._attempts.append(note.attempts if note is not None else 0)

    def move_behind(self, tail: int) -> None:
        """All of its messages go behind that offset."""
        self._tail = array("q", [tail]) * len(self._first)

    def count(self, totals: dict[int, int]) -> None:
        """Add its events to `totals`, which are by event (times 256) and reason; all but acks.

        Those are most of what happens, and are known from the number of events.
        """
        if not self.more_than_acks:
            return
        for event, reason, length in zip(self._event, self._reason, self._length, strict=True):
            if event != Event.ACKED:
                key = event << 8 | reason
                totals[key] = totals.get(key, 0) + length

    def pieces(self, events_max: int) -> "Iterator[Ledger]":
        """The same rows in ledgers with at most so many events, long ones in parts. For the very rare."""
        piece = Ledger()
        names, texts = list(self._names), list(self._texts)
        for row, at in enumerate(self._first):
            end = at + self._length[row]
            while at < end:
                stop = min(end, at + events_max - piece.event_count)
                note: Note | None = None
                if self._moved:
                    note = Note(self._attempts[row], self._retries[row], self._expires[row])
                piece.add(
                    Event(self._event[row]),
                    at,
                    stop,
                    Reason(self._reason[row]),
                    names[self._consumer[row]],
                    self._attempt[row],
                    self._dispatched[row],
                    note,
                    self._tail[row] if self._moved else 0,
                    texts[self._why[row]] if texts else "",
                )
                at = stop
                if piece.event_count == events_max:
                    yield piece
                    piece = Ledger()
        if len(piece):
            yield piece

    def parts(self) -> list[Buffer]:
        """The body of the block."""
        columns = [
            self._first.tobytes(),
            self._length.tobytes(),
            self._dispatched.tobytes(),
            self._attempt.tobytes(),
            self._consumer.tobytes(),
            self._event.tobytes(),
            self._reason.tobytes(),
            *_texts_parts(self._names),
        ]
        if self._moved:
            columns += [
                self._tail.tobytes(),
                self._expires.tobytes(),
                self._retries.tobytes(),
                self._attempts.tobytes(),
            ]
        if self._texts:
            columns += [self._why.tobytes(), array("q", [len(self._texts)]).tobytes()]
            columns += _texts_parts(self._texts)
        return [b"".join(column + PAD[len(column) % 8] for column in columns)]


def _texts_parts(texts: Iterable[str]) -> tuple[bytes, bytes]:
    """A column of texts: where each ends, and all of them."""
    encoded = [text.encode() for text in texts]
    return array("i", accumulate(map(len, encoded), initial=0)).tobytes(), b"".join(encoded)


_NO_TEXTS: Final[dict[str, int]] = {}
NO_ROWS: Final = Ledger()
"""That of all queues of which nothing is to be written: nobody adds to it."""


def read_rows(header: Header, body: memoryview) -> Iterator[Row]:
    """The rows of a settlement block whose checksum has been checked."""
    reader = BodyReader(body)
    count = header.count
    first = reader.column(count, "q", 8)
    length = reader.column(count, "q", 8)
    dispatched = reader.column(count, "q", 8)
    attempt = reader.column(count, "i", 4)
    consumer = reader.column(count, "i", 4)
    event = reader.column(count, "B", 1)
    reason = reader.column(count, "B", 1)
    names = [name.decode() for name in reader.binary(header.extra)]
    moved = bool(header.flags & FLAG_MOVED)
    if moved:
        tail = reader.column(count, "q", 8)
        expires = reader.column(count, "q", 8)
        retries = reader.column(count, "h", 2)
        attempts = reader.column(count, "i", 4)
    texts: list[str] = []
    if header.flags & FLAG_WHY:
        why = reader.column(count, "i", 4)
        texts = [text.decode() for text in reader.binary(reader.column(1, "q", 8)[0])]
    for i in range(count):
        if moved:
            note = Note(attempts[i], retries[i], expires[i])
        else:
            note = Note(attempt[i])
        yield Row(
            Event(event[i]),
            first[i],
            first[i] + length[i],
            Reason(reason[i]),
            names[consumer[i]],
            attempt[i],
            dispatched[i],
            note,
            tail[i] if moved else 0,
            texts[why[i]] if texts else "",
        )
