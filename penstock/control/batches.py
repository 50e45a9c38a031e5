"""Batches in frames: the columns of `model/batch.py`, one after the other in a frame's bytes.

    bounds    int32[count + 1]
    payload   bytes
    ttl       int64[count]      only where some message has one
    retries   int16[count]      likewise
    repairs   int64[count]      where these are payloads for dead letters: the offsets of those
    delay     int64[count]      only where some message has one
    moves     int64[count]      where these are taken out of another queue: their offsets there
    headers   int32[count + 1], bytes     likewise, laid out as the payload

Reply addresses do not travel: who asks over HTTP gets a receipt, not a reply.

How it fails: `FrameError`, where columns and lengths do not agree.
"""

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from penstock.control.frames import Buffer, Fields, FrameError
from penstock.model.batch import Batch
from penstock.model.life import Reason

_COLUMNS: Final = (
    ("ttl", "q", 8),
    ("retries", "h", 2),
    ("repairs", "q", 8),
    ("delay", "q", 8),
    ("moves", "q", 8),
)


def pack_batch(batch: Batch) -> tuple[Fields, list[Buffer]]:
    """What stands in the frame's object for a batch, and its bytes."""
    fields: Fields = {"count": len(batch), "payload": len(batch.payload), "protocol": batch.protocol}
    buffers: list[Buffer] = [batch.bounds.tobytes(), batch.payload]
    columns = (batch.ttl_seconds, batch.retries, batch.repairs, batch.delay_us, batch.moves)
    for (name, _, _), column in zip(_COLUMNS, columns, strict=True):
        if column is not None:
            fields[name] = True
            buffers.append(column.tobytes())
    if batch.headers is not None:
        fields["headers"], its_buffers = pack_texts(batch.headers)
        buffers += its_buffers
    if batch.dead:
        fields["dead"] = batch.dead.label
    if batch.identity:
        fields["identity"] = batch.identity
    if batch.source:
        fields["source"] = batch.source
    return fields, buffers


def unpack_batch(fields: Fields, body: memoryview, at: int) -> tuple[Batch, int]:
    """The batch that begins at that byte of a frame's bytes, and where it ends."""
    count: int = fields["count"]
    bounds, at = read_column("i", count + 1, body, at)
    payload_bytes: int = fields["payload"]
    payload = bytes(body[at : at + payload_bytes])
    if len(payload) != payload_bytes or bounds[0] != 0 or bounds[count] != payload_bytes:
        raise FrameError(f"the columns of a batch of {count} messages do not agree with its frame")
    at += payload_bytes
    columns: dict[str, array[int]] = {}
    for name, typecode, _ in _COLUMNS:
        if fields.get(name):
            columns[name], at = read_column(typecode, count, body, at)
    headers = None
    if "headers" in fields:
        headers, at = unpack_texts(count, fields["headers"], body, at)
    dead = Reason.of(fields.get("dead", ""))
    ttl, retries, repairs, delay_us, moves = (columns.get(name) for name, _, _ in _COLUMNS)
    batch = Batch(payload, bounds, ttl, retries, None, fields["protocol"], dead, repairs, delay_us, headers)
    batch.identity = fields.get("identity", "")
    batch.moves, batch.source = moves, fields.get("source", "")
    return batch, at


def pack_texts(texts: Sequence[bytes]) -> tuple[int, list[Buffer]]:
    """A column of texts: how many bytes they have together, and its buffers."""
    joined = b"".join(texts)
    return len(joined), [array("i", accumulate(map(len, texts), initial=0)).tobytes(), joined]


def unpack_texts(count: int, length: int, body: memoryview, at: int) -> tuple[list[bytes], int]:
    """The texts of a column, and where it ends."""
    bounds, at = read_column("i", count + 1, body, at)
    joined = bytes(body[at : at + length])
    if len(joined) != length or bounds[count] != length:
        raise FrameError(f"a column of {count} texts does not agree with its frame")
    return [joined[bounds[i] : bounds[i + 1]] for i in range(count)], at + length


def column_bytes(fields: Fields) -> int:
    """How many bytes a batch has, by what stands in the frame's object for it."""
    count: int = fields["count"]
    length: int = 4 * (count + 1) + fields["payload"]
    if "headers" in fields:
        length += 4 * (count + 1) + fields["headers"]
    return length + count * sum(width for name, _, width in _COLUMNS if fields.get(name))


def pack_batches(batches: Sequence[Batch]) -> tuple[list[Fields], list[Buffer]]:
    """The same for several."""
    fields: list[Fields] = []
    buffers: list[Buffer] = []
    for batch in batches:
        its_fields, its_buffers = pack_batch(batch)
        fields.append(its_fields)
        buffers += its_buffers
    return fields, buffers


def read_column(typecode: str, count: int, body: memoryview, at: int) -> "tuple[array[int], int]":
    """The numbers that begin at that byte of a frame's bytes, and where they end."""
    column = array(typecode)
    end = at + column.itemsize * count
    if count < 0 or end > len(body):
        raise FrameError(f"a column of {count} numbers is cut off")
    column.frombytes(body[at:end])
    return column, end
