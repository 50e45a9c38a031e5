"""Messages in frames: batches and slices, column by column, as they are in memory.

A batch, which may be several for one queue, one behind the other:

    uint32   count of messages
    uint32   bytes of payload
    uint8    which optional columns there are, see `_TTL` and below
    uint8    protocol, index into PROTOCOLS
    bounds   int32[count + 1]   from 0
    payload
    ttl      int64[count]
    retries  int16[count]
    reply    int32[count + 1] bounds, then the addresses

A slice is the window `lo` to `hi` of a stored block, and nothing else of that block:

    uint32   count, uint64 bytes of payload, int64 offset of the first message, int64 time
    uint8    columns, uint8 protocol, then the origin
    bounds, payload, expiry int64, retries int16, attempts int32, reply

Nothing here walks over messages: a column is copied, and bounds are moved by adding one number to all of
them at once (`_moved`). Only reply addresses, which requests have, are objects.

How it fails: `PeerViolation`, where columns and lengths do not agree.
"""

import struct
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Final

from penstock.cluster.frames import COUNT, Body, Buffer, short_bytes
from penstock.log.block import PROTOCOLS
from penstock.model.batch import RETRIES_NONE, Batch, Slice
from penstock.model.words import Ranges

_BATCH: Final = struct.Struct("<IIBB")
_SLICE: Final = struct.Struct("<IQqqBB")
_TTL, _RETRIES, _REPLY, _ATTEMPTS = 1, 2, 4, 8
_PROTOCOL_NUMBER: Final = {name: number for number, name in enumerate(PROTOCOLS)}


def _moved(bounds: bytes, by: int) -> bytes:
    """Bounds as bytes, each plus the same number.

    They are added as one large number: no lane carries into the next, because every bound stays
    between 0 and 2³¹. 1,000 bounds take 3 µs, where a loop takes 40.
    """
    if not by:
        return bounds
    ones = int.from_bytes(b"\1\0\0\0" * (len(bounds) // 4), "little")
    return (int.from_bytes(bounds, "little") + by * ones).to_bytes(len(bounds), "little")


def _cut(column: Sequence[int], typecode: str, lo: int, hi: int) -> bytes:
    """A part of a column as bytes, whatever holds it."""
    if isinstance(column, array | memoryview):
        part = memoryview(column)[lo:hi]
        if part.format == typecode:
            return part.tobytes()
    return array(typecode, column[lo:hi]).tobytes()


def _pack_addresses(addresses: Sequence[bytes]) -> list[Buffer]:
    bounds = array("i", accumulate(map(len, addresses), initial=0))
    return [bounds.tobytes(), b"".join(addresses)]


def _unpack_addresses(body: Body, count: int) -> list[bytes]:
    bounds = body.column("i", count + 1)
    joined = bytes(body.raw(_last_of(bounds, body)))
    return [joined[bounds[i] : bounds[i + 1]] for i in range(count)]


def _last_of(bounds: Sequence[int], body: Body) -> int:
    if bounds[0] != 0 or bounds[-1] < 0:
        raise body.bad("bounds that do not begin at 0")
    return bounds[-1]


# --- batches ---------------------------------------------------------------------------------------


def pack_batches(batches: Sequence[Batch], protocol: str) -> list[Buffer]:
    """Messages for one queue as one batch. All of them have reply addresses, or none has.

    Beside messages with a TTL, those without get 0.
    """
    count = sum(map(len, batches))
    payload_bytes = sum(len(batch.payload) for batch in batches)
    columns = 0
    bounds: list[Buffer] = []
    end = 0
    for batch in batches:
        raw = batch.bounds.tobytes()
        bounds.append(_moved(raw[4:] if bounds else raw, end))
        end += len(batch.payload)
    buffers: list[Buffer] = [*bounds, *(batch.payload for batch in batches)]
    if any(batch.ttl_seconds is not None for batch in batches):
        columns |= _TTL
        buffers += [
            batch.ttl_seconds.tobytes() if batch.ttl_seconds is not None else bytes(8 * len(batch))
            for batch in batches
        ]
    if any(batch.retries is not None for batch in batches):
        columns |= _RETRIES
        none = array("h", [RETRIES_NONE])
        buffers += [
            (batch.retries if batch.retries is not None else none * len(batch)).tobytes() for batch in batches
        ]
    if batches[0].reply is not None:
        columns |= _REPLY
        buffers += _pack_addresses([address for batch in batches for address in batch.reply or ()])
    head = _BATCH.pack(count, payload_bytes, columns, _PROTOCOL_NUMBER.get(protocol, 0))
    return [head, *buffers]


def unpack_batch(body: Body) -> Batch:
    """A batch that owns all that it is made of."""
    count, payload_bytes, columns, protocol = body.numbers(_BATCH)
    if protocol >= len(PROTOCOLS):
        raise body.bad(f"the protocol {protocol}, which nobody knows")
    bounds = body.column("i", count + 1)
    if _last_of(bounds, body) != payload_bytes:
        raise body.bad(f"{payload_bytes} bytes of payload, and bounds that end at {bounds[-1]}")
    return Batch(
        bytes(body.raw(payload_bytes)),
        bounds,
        body.column("q", count) if columns & _TTL else None,
        body.column("h", count) if columns & _RETRIES else None,
        _unpack_addresses(body, count) if columns & _REPLY else None,
        PROTOCOLS[protocol],
    )


# --- slices ----------------------------------------------------------------------------------------


def pack_slices(slices: Sequence[Slice]) -> list[Buffer]:
    """Deliveries, without anything that is not delivered."""
    buffers: list[Buffer] = [COUNT.pack(len(slices))]
    for piece in slices:
        lo, hi = piece.lo, piece.hi
        start, stop = piece.bounds[lo], piece.bounds[hi]
        columns = 0
        optional: list[Buffer] = []
        if piece.expires_us is not None:
            columns |= _TTL
            optional.append(_cut(piece.expires_us, "q", lo, hi))
        if piece.retries is not None:
            columns |= _RETRIES
            optional.append(_cut(piece.retries, "h", lo, hi))
        if piece.attempts is not None:
            columns |= _ATTEMPTS
            optional.append(_cut(piece.attempts, "i", lo, hi))
        if piece.reply is not None:
            columns |= _REPLY
            optional += _pack_addresses(piece.reply[lo:hi])
        number = _PROTOCOL_NUMBER.get(piece.protocol, 0)
        buffers += [
            _SLICE.pack(hi - lo, stop - start, piece.offset_start, piece.time_us, columns, number),
            short_bytes(piece.origin),
            _moved(_cut(piece.bounds, "i", lo, hi + 1), -start),
            memoryview(piece.payload)[start:stop],
            *optional,
        ]
    return buffers


def unpack_slices(body: Body) -> list[Slice]:
    """Slices that are views of the frame, and hold as long as it does, but for their payloads: a port may
    write these later, when the next frame stands where this one did."""
    slices = []
    (pieces,) = body.numbers(COUNT)
    for _ in range(pieces):
        count, payload_bytes, first, time_us, columns, protocol = body.numbers(_SLICE)
        if protocol >= len(PROTOCOLS):
            raise body.bad(f"the protocol {protocol}, which nobody knows")
        origin = body.short()
        bounds = body.raw(4 * count + 4).cast("i")
        if _last_of(bounds, body) != payload_bytes:
            raise body.bad(f"{payload_bytes} bytes of payload, and bounds that end at {bounds[-1]}")
        slices.append(
            Slice(
                bytes(body.raw(payload_bytes)),
                bounds,
                0,
                count,
                first,
                origin,
                time_us,
                body.raw(8 * count).cast("q") if columns & _TTL else None,
                body.raw(2 * count).cast("h") if columns & _RETRIES else None,
                body.raw(4 * count).cast("i") if columns & _ATTEMPTS else None,
                _unpack_addresses(body, count) if columns & _REPLY else None,
                PROTOCOLS[protocol],
            )
        )
    return slices


# --- ranges ----------------------------------------------------------------------------------------


def pack_ranges(ranges: Iterable[tuple[int, int]]) -> bytes:
    flat = array("q", chain.from_iterable(ranges))
    return COUNT.pack(len(flat) // 2) + flat.tobytes()


def unpack_ranges(body: Body) -> Ranges:
    (count,) = body.numbers(COUNT)
    flat = body.column("q", 2 * count)
    return list(zip(flat[::2], flat[1::2], strict=True))
