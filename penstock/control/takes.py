"""Takes in frames: messages that a caller over HTTP holds from now on, and its verdicts on them.

What was taken is a list of parts, each a run of messages of one origin. In the frame's bytes, part by part:

    bounds    int32[count + 1]  starts at 0
    payload   bytes
    attempts  int32[count]      deliveries before this one; only where some message has had one
    expires   int64[count]      µs since the epoch, 0 or less: never; only where some message has a TTL
    retries   int16[count]      what is left; only where some message has a counter
    headers   int32[count + 1], bytes     only where some message has some

Verdicts are offsets of one origin with one ending, and the deliveries that are meant, which tells them from
later ones of the same messages: `attempts` is what the taker was told, 0 whichever it is.

How it fails: `FrameError`, where columns and lengths do not agree.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from penstock.control.batches import pack_texts, read_column, unpack_texts
from penstock.control.frames import Buffer, Fields, FrameError
from penstock.model.batch import Slice
from penstock.model.life import Reason

Whys = list[tuple[int, int, str]]
"""What was said with the rejection of messages: first, end, text."""


class TakenPart(NamedTuple):
    """A run of messages; message *i* has the offset `first + i`."""

    first: int
    origin: bytes
    time_us: int
    protocol: str
    reason: Reason  # of dead letters
    whys: Whys  # likewise
    bounds: "array[int]"
    payload: bytes
    attempts: "array[int] | None"
    expires_us: "array[int] | None"
    retries: "array[int] | None"
    headers: list[bytes] | None


class Taken(NamedTuple):
    """What somebody holds from now on, and until when."""

    lease_ends_us: int
    parts: list[TakenPart]


_COLUMNS = (("attempts", "i"), ("expires", "q"), ("retries", "h"))


def pack_taken(lease_ends_us: int, slices: Sequence[tuple[Slice, Whys]]) -> tuple[Fields, list[Buffer]]:
    """What stands in the frame's object for what was taken, and its bytes."""
    parts: list[Fields] = []
    buffers: list[Buffer] = []
    for piece, whys in slices:
        lo, hi = piece.lo, piece.hi
        start = piece.bounds[lo]
        payload = bytes(piece.payload[start : piece.bounds[hi]])
        fields: Fields = {
            "count": hi - lo,
            "first": piece.offset_start,
            "origin": piece.origin.decode(),
            "time_us": piece.time_us,
            "protocol": piece.protocol,
            "payload": len(payload),
        }
        if piece.reason:
            fields |= {"reason": piece.reason.label, "whys": whys}
        buffers += [array("i", [bound - start for bound in piece.bounds[lo : hi + 1]]).tobytes(), payload]
        for (name, typecode), column in zip(
            _COLUMNS, (piece.attempts, piece.expires_us, piece.retries), strict=True
        ):
            if column is not None:
                fields[name] = True
                buffers.append(array(typecode, column[lo:hi]).tobytes())
        if piece.headers is not None:
            fields["headers"], its_buffers = pack_texts(piece.headers[lo:hi])
            buffers += its_buffers
        parts.append(fields)
    return {"lease_ends_us": lease_ends_us, "parts": parts}, buffers


def unpack_taken(fields: Fields, body: memoryview) -> Taken:
    parts: list[TakenPart] = []
    at = 0
    for part in fields["parts"]:
        count: int = part["count"]
        bounds, at = read_column("i", count + 1, body, at)
        payload = bytes(body[at : at + part["payload"]])
        if len(payload) != part["payload"] or bounds[count] != len(payload):
            raise FrameError(f"the columns of {count} messages do not agree with their frame")
        at += len(payload)
        columns: dict[str, array[int]] = {}
        for name, typecode in _COLUMNS:
            if part.get(name):
                columns[name], at = read_column(typecode, count, body, at)
        headers = None
        if "headers" in part:
            headers, at = unpack_texts(count, part["headers"], body, at)
        parts.append(
            TakenPart(
                part["first"],
                part["origin"].encode(),
                part["time_us"],
                part["protocol"],
                Reason.of(part.get("reason", "")),
                [(first, end, text) for first, end, text in part.get("whys", ())],
                bounds,
                payload,
                columns.get("attempts"),
                columns.get("expires"),
                columns.get("retries"),
                headers,
            )
        )
    return Taken(fields["lease_ends_us"], parts)


class Verdict(NamedTuple):
    """One ending for messages that somebody holds."""

    outcome: str  # "ack", "requeue", "reject" or "extend"
    origin: bytes
    offsets: "array[int]"  # typecode "q"
    attempts: "array[int]"  # typecode "i": which delivery of each is meant, 0: whichever it is
    delay_us: int | None = None  # of a requeue; None: as the queue's retry-delays say
    lease_us: int = 0  # of an extension: until so long from now
    why: str = ""  # of a rejection


def pack_verdicts(queue: str, verdicts: Sequence[Verdict]) -> tuple[Fields, list[Buffer]]:
    told: list[Fields] = []
    buffers: list[Buffer] = []
    for verdict in verdicts:
        told.append(
            {
                "outcome": verdict.outcome,
                "origin": verdict.origin.decode(),
                "count": len(verdict.offsets),
                "delay_us": verdict.delay_us,
                "lease_us": verdict.lease_us,
                "why": verdict.why,
            }
        )
        buffers += [verdict.offsets.tobytes(), verdict.attempts.tobytes()]
    return {"queue": queue, "verdicts": told}, buffers


def unpack_verdicts(fields: Fields, body: memoryview) -> list[Verdict]:
    verdicts: list[Verdict] = []
    at = 0
    for told in fields["verdicts"]:
        offsets, at = read_column("q", told["count"], body, at)
        attempts, at = read_column("i", told["count"], body, at)
        verdicts.append(
            Verdict(
                told["outcome"],
                told["origin"].encode(),
                offsets,
                attempts,
                told["delay_us"],
                told["lease_us"],
                told["why"],
            )
        )
    return verdicts
