"""Batches in frames: the columns of `model/batch.py`, one after the other in a frame's bytes.

    bounds    int32[count + 1]
    payload   bytes
    ttl       int64[count]      only where some message has one
    retries   int16[count]      likewise
    repairs   int64[count]      where these are payloads for dead letters: the offsets of those

Reply addresses do not travel: who asks over HTTP gets a receipt, not a reply.

How it fails: `FrameError`, where columns and lengths do not agree.
"""

from array import array
from collections.abc import Sequence
from typing import Final

from penstock.control.frames import Buffer, Fields, FrameError
from penstock.model.batch import Batch
from penstock.model.life import Reason

_WIDTHS: Final = (("ttl", 8), ("retries", 2), ("repairs", 8))


def pack_batch(batch: Batch) -> tuple[Fields, list[Buffer]]:
    """What stands in the frame's object for a batch, and its bytes."""
    fields: Fields = {"count": len(batch), "payload": len(batch.payload), "protocol": batch.protocol}
    buffers: list[Buffer] = [batch.bounds.tobytes(), batch.payload]
    columns = (("ttl", batch.ttl_seconds), ("retries", batch.retries), ("repairs", batch.repairs))
    for name, column in columns:
        if column is not None:
            fields[name] = True
            buffers.append(column.tobytes())
    if batch.dead:
        fields["dead"] = batch.dead.label
    if batch.identity:
        fields["identity"] = batch.identity
    return fields, buffers


def unpack_batch(fields: Fields, body: memoryview, at: int) -> tuple[Batch, int]:
    """The batch that begins at that byte of a frame's bytes, and where it ends."""
    count: int = fields["count"]
    bounds, at = _column("i", count + 1, body, at)
    payload_bytes: int = fields["payload"]
    payload = bytes(body[at : at + payload_bytes])
    if len(payload) != payload_bytes or bounds[0] != 0 or bounds[count] != payload_bytes:
        raise FrameError(f"the columns of a batch of {count} messages do not agree with its frame")
    at += payload_bytes
    ttl = retries = repairs = None
    if fields.get("ttl"):
        ttl, at = _column("q", count, body, at)
    if fields.get("retries"):
        retries, at = _column("h", count, body, at)
    if fields.get("repairs"):
        repairs, at = _column("q", count, body, at)
    dead = Reason.of(fields.get("dead", ""))
    batch = Batch(payload, bounds, ttl, retries, None, fields["protocol"], dead, repairs)
    batch.identity = fields.get("identity", "")
    return batch, at


def column_bytes(fields: Fields) -> int:
    """How many bytes a batch has, by what stands in the frame's object for it."""
    count: int = fields["count"]
    length: int = 4 * (count + 1) + fields["payload"]
    return length + count * sum(width for name, width in _WIDTHS if fields.get(name))


def pack_batches(batches: Sequence[Batch]) -> tuple[list[Fields], list[Buffer]]:
    """The same for several."""
    fields: list[Fields] = []
    buffers: list[Buffer] = []
    for batch in batches:
        its_fields, its_buffers = pack_batch(batch)
        fields.append(its_fields)
        buffers += its_buffers
    return fields, buffers


def _column(typecode: str, count: int, body: memoryview, at: int) -> "tuple[array[int], int]":
    column = array(typecode)
    end = at + column.itemsize * count
    if count < 0 or end > len(body):
        raise FrameError(f"a column of {count} numbers is cut off")
    column.frombytes(body[at:end])
    return column, end
