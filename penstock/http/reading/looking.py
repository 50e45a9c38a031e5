"""Looking at messages without taking them: what the log has of each, and how each stands right now.

Two sources are put together. Payload, headers, time, door and id come from the log, through a reader; they
never change. State, attempts, what is left of retries, TTL and delay, the reason of a death and what was said
with it, and who holds it come from the first process, as *runs*: neighbours that share everything. What is in
no run is gone.

Rules that always hold:
  * What is not synced is not shown.
  * States are asked for after it is known what the log has: a message is shown as it stands then.
    Of one that is gone, only the log's part is known.
  * A look is bounded: in messages, in bytes of payload and in bytes of blocks that are read for it.
  * The payload of a living message is the one that its consumer gets, which may be a repaired one.

How it fails: a block whose checksum is wrong is left out and told in the log of this process; whoever asks
for one of its messages by offset gets the error.
"""

import time
from base64 import b64encode
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from struct import calcsize
from typing import Any, Final, NamedTuple

from penstock.control.frames import Frame
from penstock.http.link import Link
from penstock.log.read_block import Block
from penstock.log.reader import LogReader, OffsetsMissing
from penstock.log.repairs import repair_queue_of
from penstock.model.headers import decode_headers
from penstock.model.ids import id_of
from penstock.model.life import Reason, State
from penstock.model.pending import AS_STORED

VALUES_BYTES_MAX: Final = 8 << 20
"""Payload of one look; the message that goes beyond it is the last."""

BLOCKS_BYTES_MAX: Final = 256 << 20
"""Bodies of blocks that are read, and their checksums checked, for one look."""

SYNC_SECONDS: Final = 2.0
SYNC_PAUSE_SECONDS: Final = 0.01
"""How long to wait for a repaired payload that is known of and not synced yet, and how often to look."""

STATE_WORDS: Final = {
    State.READY: "ready",
    State.DELAYED: "delayed",
    State.HELD: "held",
    State.DEAD: "dead",
    State.DEAD_HELD: "dead",  # with a consumer
}
GONE: Final = "gone"
STATES: Final = ("ready", "delayed", "held", "dead", GONE)

MICROSECONDS: Final = 1_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
LAST_US: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)

Fields = dict[str, Any]  # an object of an answer, as JSON has it


def iso_time(time_us: int) -> str:
    """A moment as the API writes it; what is later than a date can be is the last moment there is."""
    moment = _EPOCH + timedelta(microseconds=min(time_us, LAST_US))
    return f"{moment.isoformat(timespec='microseconds')[:-6]}Z"  # without +00:00


# --- the log's part --------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What the log has of one message."""

    offset: int
    id: str
    event: int  # the number of its acceptance among the queue's events
    time_us: int
    protocol: str
    expires_us: int  # 0: never
    retries: int  # -1: none
    value: bytes
    due_us: int = 0  # 0: it came without a delay
    headers: bytes = b""
    repaired: bool = False  # the value is not the one that it came with


class Look(NamedTuple):
    """What one look has found, and where the next one goes on."""

    seen: list[Seen]
    offset_next: int | None  # None: all ranges have been looked at


class Extent(NamedTuple):
    """How far the log of a queue can be read; the end is exclusive."""

    offset_start: int
    offset_end: int
    identity: str  # of the queue, see `model/ids.py`


def extent_of(reader: LogReader, queue: str) -> Extent | None:
    """None where nothing of the queue is synced."""
    known = reader.queue(queue)
    return Extent(known.offset_start, known.offset_end, reader.identity(queue)) if known is not None else None


def look_at(
    reader: LogReader, queue: str, ranges: Sequence[tuple[int, int]], messages_max: int, bytes_max: int
) -> Look:
    """The messages of some ranges, in order, as far as they are in the log and the bounds allow."""
    seen: list[Seen] = []
    bytes_left, blocks_bytes = bytes_max, 0
    block: Block | None = None
    for first, end in ranges:
        at = first
        while at < end:
            # Ranges are often small and lie close together: a block is read once for all of them.
            if block is None or block.offset_end <= at:
                if blocks_bytes >= BLOCKS_BYTES_MAX:
                    return Look(seen, at)
                block = _block_from(reader, queue, at)
                if block is None:
                    return Look(seen, None)
                blocks_bytes += block.header.body_bytes
            at = max(at, block.header.first_offset + block.lo)
            stop = min(end, block.offset_end)
            if at < stop:
                found = _messages_of(block, at, min(stop, at + messages_max - len(seen)), bytes_left)
                seen += found
                bytes_left -= sum(len(message.value) for message in found)
                at = seen[-1].offset + 1
                if len(seen) == messages_max or bytes_left <= 0:
                    return Look(seen, at)
    return Look(seen, None)


def _block_from(reader: LogReader, queue: str, offset: int) -> Block | None:
    """The first block with messages at or behind an offset, whatever retention has taken before it."""
    kept = reader.kept_from(queue, offset)
    if kept is None:
        return None
    return next(reader.messages(queue, kept, fail_on_loss=False), None)


def _messages_of(block: Block, start: int, end: int, bytes_max: int = VALUES_BYTES_MAX) -> list[Seen]:
    """The messages of a block between two offsets, one at least; the one that fills the bytes is the last."""
    header, origin = block.header, block.origin
    bounds, payload, expires, retries, due, headers = block.columns()
    base = header.first_offset
    lo, hi = start - base, end - base
    hi = bisect_left(bounds, bounds[lo] + bytes_max, lo + 1, hi)
    return [
        Seen(
            base + i,
            id_of(origin, base + i).decode(),
            header.first_event + i,
            header.time_us,
            block.protocol,
            expires[i] if expires is not None else 0,
            retries[i] if retries is not None else -1,
            bytes(payload[bounds[i] : bounds[i + 1]]),
            due[i] if due is not None else 0,
            headers.at(i) if headers is not None else b"",
        )
        for i in range(lo, hi)
    ]


def look_at_one(reader: LogReader, queue: str, offset: int) -> Seen | None:
    """One message; None where it is not in the log. LogDamaged where it cannot be read."""
    if reader.kept_from(queue, offset) != offset:
        return None
    try:
        block = next(reader.messages(queue, offset, offset + 1))
    except OffsetsMissing:
        return None  # Retention has come in between.
    return _messages_of(block, offset, offset + 1)[0]


def payloads_at(reader: LogReader, queue: str, offsets: Sequence[int]) -> dict[int, bytes]:
    """Repaired payloads by their offsets among those of a queue; without those that have been let go of.

    For a thread: who has just heard of a repair may have to wait until it is synced.
    """
    repair_queue = repair_queue_of(queue)
    wanted = sorted(offsets)
    deadline = time.monotonic() + SYNC_SECONDS
    while wanted and not _is_synced(reader, repair_queue, wanted[-1]) and time.monotonic() < deadline:
        time.sleep(SYNC_PAUSE_SECONDS)
        reader.refresh()
    found: dict[int, bytes] = {}
    row = 0
    while row < len(wanted):
        block = _block_from(reader, repair_queue, wanted[row])
        if block is None:
            break
        bounds, payload, *_ = block.columns()
        base = block.header.first_offset
        while row < len(wanted) and wanted[row] < block.offset_end:
            i = wanted[row] - base
            if i >= block.lo:
                found[wanted[row]] = bytes(payload[bounds[i] : bounds[i + 1]])
            row += 1
    return found


def _is_synced(reader: LogReader, queue: str, offset: int) -> bool:
    known = reader.queue(queue)
    return known is not None and offset < known.offset_end


def with_repairs(reader: LogReader, queue: str, seen: Sequence[Seen], parts: Sequence["Runs"]) -> list[Seen]:
    """Messages with the payloads that their consumers get; `parts` are how they stand, in order."""
    places: dict[int, int] = {}
    for runs in parts:
        if len(runs.repairs[0]):
            for message in seen:
                distance = runs.repair_of(message.offset)
                if distance is not None:
                    places[message.offset] = message.offset + distance
    if not places:
        return list(seen)
    payloads = payloads_at(reader, queue, list(places.values()))
    return [
        message._replace(value=payloads[places[message.offset]], repaired=True)
        if places.get(message.offset) in payloads
        else message
        for message in seen
    ]


# --- the first process's part ----------------------------------------------------------------------


class Runs:
    """What the first process says about the offsets from `start` to `end`; what is in no run is gone.

    Columns, a row each: `first`, `end`, `time_us` (of the death or the dispatch; until when it is
    delayed), `expires_us`, `attempts`, `retries`, `consumer` (an index), `state`, `reason`.
    """

    COLUMNS: Final = (
        ("first", "q"),
        ("end", "q"),
        ("time_us", "q"),
        ("expires_us", "q"),
        ("attempts", "i"),
        ("retries", "i"),
        ("consumer", "i"),
        ("state", "B"),
        ("reason", "B"),
    )

    def __init__(self, start: int, answer: Frame) -> None:
        self.offset_start = start
        self.offset_end: int = answer.fields["next"]
        self.now_us: int = answer.fields["time_us"]
        self.consumers: list[str] = answer.fields["consumers"]
        self.count: int = answer.fields["count"]
        self.steps: Sequence[Sequence[int]] = answer.fields.get("steps", ())
        """Tails when the clock was put forward, and how far: what came before expires, and is due, so much
        later than is written of it."""
        self.whys: Sequence[tuple[int, int, str]] = answer.fields.get("whys", ())
        """What was said when letters were rejected, in order: first offset, end, text."""
        self.repairs: list[memoryview] = []
        """Messages with repaired payloads, in order: first offsets, ends, and how far off payloads are."""
        self.columns: dict[str, memoryview] = {}
        at, length = 0, 8 * answer.fields["repairs"]
        for _ in range(3):
            self.repairs.append(answer.body[at : at + length].cast("q"))
            at += length
        for name, typecode in self.COLUMNS:
            end = at + self.count * calcsize(typecode)
            # The stub wants to see the letter, and here it is a variable.
            self.columns[name] = answer.body[at:end].cast(typecode)  # type: ignore[call-overload]
            at = end

    def ranges(self) -> list[tuple[int, int]]:
        return list(zip(self.columns["first"], self.columns["end"], strict=True))

    def gaps(self) -> list[tuple[int, int]]:
        """What is between the runs."""
        gaps: list[tuple[int, int]] = []
        at = self.offset_start
        for first, end in (*self.ranges(), (self.offset_end, self.offset_end)):
            if at < first:
                gaps.append((at, first))
            at = end
        return gaps

    def repair_of(self, offset: int) -> int | None:
        """How far off the repaired payload of a message is; None where it has its own."""
        firsts, ends, distances = self.repairs
        row = bisect_right(firsts, offset) - 1
        return distances[row] if row >= 0 and offset < ends[row] else None

    def why_of(self, offset: int) -> str | None:
        """What was said when a message was rejected; None: nothing."""
        at = bisect_right(self.whys, offset, key=itemgetter(0)) - 1
        return self.whys[at][2] if at >= 0 and offset < self.whys[at][1] else None

    def row_of(self, offset: int) -> int:
        """The run that an offset is in; -1 where it is gone."""
        row = bisect_right(self.columns["first"], offset) - 1
        return row if row >= 0 and offset < self.columns["end"][row] else -1


async def ask_states(
    link: Link,
    queue: str,
    start: int,
    end: int,
    runs_max: int,
    only: str | None = None,
    identity: str | None = None,
) -> Runs:
    """How the messages of a range stand, from its beginning on; the answer says how far it goes.

    With an `identity`, no other queue of that name is asked about.
    """
    asked = {"queue": queue, "start": start, "end": end, "runs_max": runs_max, "only": only}
    return Runs(start, await link.call("states", {**asked, "identity": identity}))


def late_us(steps: Iterable[Sequence[int]], offset: int) -> int:
    """How far the clock was put forward since a message came."""
    return sum(by_us for tail, by_us in steps if offset < tail)


# --- together --------------------------------------------------------------------------------------


def message_fields(message: Seen, runs: Runs) -> Fields:
    """A message as the API shows it; `runs` must cover its offset."""
    row = runs.row_of(message.offset)
    columns = runs.columns
    fields: Fields = {
        "offset": message.offset,
        "id": message.id,
        "state": GONE,
        "time": iso_time(message.time_us),
        "ttl": None,
        "expires": None,
        "retries": None,
        "attempts": None,
        "due": None,
        "headers": decode_headers(message.headers),
        "reason": None,
        "why": None,
        "consumer": None,
        "protocol": message.protocol,
        "repaired": message.repaired,
        "value_base64": b64encode(message.value).decode(),
    }
    if row < 0:
        return fields
    word = STATE_WORDS[State(columns["state"][row])]
    expires_us, retries = columns["expires_us"][row], columns["retries"][row]
    expires_us = message.expires_us if expires_us == AS_STORED else expires_us
    retries = message.retries if retries == AS_STORED else retries
    fields["state"] = word
    fields["attempts"] = columns["attempts"][row]
    fields["reason"] = Reason(columns["reason"][row]).label or None
    fields["why"] = runs.why_of(message.offset)
    later_us = late_us(runs.steps, message.offset)
    if word == "delayed":
        due_us = columns["time_us"][row]
        due_us = message.due_us if due_us == AS_STORED else due_us
        fields["due"] = iso_time(due_us + later_us) if due_us else None  # None: it is about to be ready
    if expires_us > 0:
        expires_us += later_us
        fields["expires"] = iso_time(expires_us)
        if word != "dead":  # A dead letter waits for ever.
            fields["ttl"] = max(-((runs.now_us - expires_us) // MICROSECONDS), 0)
    if retries >= 0:
        fields["retries"] = retries
    if columns["consumer"][row] >= 0:
        fields["consumer"] = runs.consumers[columns["consumer"][row]]
    return fields
