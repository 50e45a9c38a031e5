"""Columns of messages, joined and cut: batches into blocks, blocks into smaller ones."""

from array import array
from bisect import bisect_right
from collections.abc import Iterator

from penstock.build import COMPILED
from penstock.log.block import HEADER_BYTES, PROTOCOLS, Columns, Messages
from penstock.log.errors import LogRefused
from penstock.model.batch import DELAY_SECONDS_MAX, RETRIES_ENDLESS, RETRIES_NONE, Batch, Slice

if COMPILED:
    from penstock.log import loops

BATCH_BYTES_MAX = 1 << 30
TTL_SECONDS_MAX = 10**12
"""Any moment that many seconds from now, in microseconds since the epoch, fits in 64 bits."""


def check_batch(queue: str, batch: Batch) -> None:
    """Refuse what could not be stored, or not be read again.

    Whether the bounds ascend is not looked at: whoever makes a batch walks over its messages, and
    nobody shall do it a second time.
    """
    count = len(batch)
    if count < 1:
        raise LogRefused(f"queue {queue!r}: a batch without messages")
    if batch.bounds[0] != 0 or batch.bounds[count] != len(batch.payload):
        raise LogRefused(f"queue {queue!r}: the bounds of the batch do not fit its payload")
    if len(batch.payload) > BATCH_BYTES_MAX:
        raise LogRefused(
            f"queue {queue!r}: a batch of {len(batch.payload)} bytes; at most {BATCH_BYTES_MAX} at once"
        )
    if (
        batch.ttl_seconds is not None
        or batch.retries is not None
        or batch.reply is not None
        or batch.delay_us is not None
        or batch.headers is not None
    ):
        _check_columns(queue, batch)
    if batch.dead and batch.delay_us is not None:
        raise LogRefused(f"queue {queue!r}: dead letters have no delay")
    if batch.repairs is not None and (
        len(batch.repairs) != count
        or batch.dead
        or batch.ttl_seconds
        or batch.retries
        or batch.reply
        or batch.delay_us
        or batch.headers
    ):
        raise LogRefused(f"queue {queue!r}: repairs are offsets and payloads, one for one, and no more")
    if batch.protocol not in PROTOCOLS:
        known = ", ".join(repr(protocol) for protocol in PROTOCOLS)
        raise LogRefused(f"queue {queue!r}: no protocol {batch.protocol!r}: one of {known}")


def _check_columns(queue: str, batch: Batch) -> None:
    count = len(batch)
    for name, column in (
        ("TTL", batch.ttl_seconds),
        ("retries", batch.retries),
        ("reply", batch.reply),
        ("delay", batch.delay_us),
        ("headers", batch.headers),
    ):
        if column is not None and len(column) != count:
            raise LogRefused(f"queue {queue!r}: {count} messages, but {len(column)} values for {name}")
    if batch.retries is not None and not are_counters(batch.retries):
        raise LogRefused(
            f"queue {queue!r}: a retry counter is out of range; use 0 to {RETRIES_ENDLESS}, or "
            f"{RETRIES_NONE} for none"
        )
    if batch.ttl_seconds is not None:
        check_ttl(queue, min(batch.ttl_seconds))
        check_ttl(queue, max(batch.ttl_seconds))
    if batch.delay_us is not None:
        check_delay(queue, min(batch.delay_us))
        check_delay(queue, max(batch.delay_us))


def stored_bytes(batch: Batch) -> int:
    """About what a batch takes in a file, and in memory until it is there; a block of its own at most."""
    count = len(batch)
    size = HEADER_BYTES + 16 + len(batch.payload) + 4 * count
    if batch.ttl_seconds is not None:
        size += 8 * count
    if batch.retries is not None:
        size += 2 * count
    if batch.delay_us is not None:
        size += 8 * count
    for texts in (batch.reply, batch.headers):
        if texts is not None:
            size += 16 + 4 * count + sum(map(len, texts))
    return size


def check_ttl(queue: str, ttl_seconds: int) -> None:
    if not 0 <= ttl_seconds <= TTL_SECONDS_MAX:
        raise LogRefused(
            f"queue {queue!r}: a TTL of {ttl_seconds} seconds; use 0 (none) to {TTL_SECONDS_MAX}"
        )


def check_delay(queue: str, delay_us: int) -> None:
    if not 0 <= delay_us <= DELAY_SECONDS_MAX * 1_000_000:
        raise LogRefused(
            f"queue {queue!r}: a delay of {delay_us / 1_000_000} seconds; use 0 (none) to {DELAY_SECONDS_MAX}"
        )


def are_counters(retries: "array[int]") -> bool:
    # Counters from 0 to 255 have nothing in their upper bytes, and counting bytes costs next to nothing.
    if retries.tobytes()[1::2].count(0) == len(retries):
        return True
    return min(retries) >= RETRIES_NONE and max(retries) <= RETRIES_ENDLESS


def join_batches(batches: list[Batch], now_us: int) -> Columns:
    """What has come for one queue in one turn, as one set of columns. TTLs become moments."""
    if len(batches) == 1:
        batch = batches[0]
        return Columns(
            batch.bounds,
            batch.payload,
            _expiries(batch, now_us),
            batch.retries,
            batch.reply,
            _due(batch, now_us),
            batch.headers,
        )
    bounds = (
        array("i", loops.joined_bounds([batch.bounds.tobytes() for batch in batches]))
        if COMPILED
        else _joined_bounds(batches)
    )
    expires: array[int] | None = None
    if any(batch.ttl_seconds is not None for batch in batches):
        expires = array("q")
        for batch in batches:
            expires.extend(_expiries(batch, now_us) or array("q", bytes(8 * len(batch))))
    retries: array[int] | None = None
    if any(batch.retries is not None for batch in batches):
        retries = array("h")
        for batch in batches:
            retries.extend(batch.retries or array("h", [RETRIES_NONE]) * len(batch))
    reply: list[bytes] | None = None
    if batches[0].reply is not None:
        reply = [address for batch in batches for address in batch.reply or ()]
    due: array[int] | None = None
    if any(batch.delay_us is not None for batch in batches):
        due = array("q")
        for batch in batches:
            due.extend(_due(batch, now_us) or array("q", bytes(8 * len(batch))))
    headers: list[bytes] | None = None
    if any(batch.headers is not None for batch in batches):
        headers = []
        for batch in batches:
            headers += batch.headers if batch.headers is not None else [b""] * len(batch)
    payload = b"".join([batch.payload for batch in batches])
    return Columns(bounds, payload, expires, retries, reply, due, headers)


def _joined_bounds(batches: list[Batch]) -> "array[int]":
    bounds = array("i", [0])
    end = 0
    for batch in batches:
        if end:
            bounds.extend([end + bound for bound in batch.bounds[1:]])
        else:
            bounds.extend(batch.bounds[1:])
        end += batch.bounds[-1]
    return bounds


def _expiries(batch: Batch, now_us: int) -> "array[int] | None":
    ttls = batch.ttl_seconds
    if ttls is None:
        return None
    return array("q", [now_us + ttl * 1_000_000 if ttl else 0 for ttl in ttls])


def _due(batch: Batch, now_us: int) -> "array[int] | None":
    delays = batch.delay_us
    if delays is None:
        return None
    return array("q", [now_us + delay if delay else 0 for delay in delays])


def split_columns(columns: Columns, block_bytes: int) -> Iterator[Columns]:
    """Pieces of about that many bytes, so that no reader must load a giant for one message."""
    bounds = columns.bounds
    count = len(columns)
    # An empty message takes something too.
    each = 4 + 2 * (columns.retries is not None)
    each += 8 * ((columns.expires is not None) + (columns.due is not None))
    for texts in (columns.reply, columns.headers):
        if texts is not None:
            each += 4 + sum(map(len, texts)) // count
    if bounds[count] + each * count <= 2 * block_bytes:
        yield columns
        return
    lo = 0
    while lo < count:
        limit = bounds[lo] + each * lo + block_bytes
        behind = range(lo + 1, count + 1)
        fitting = bisect_right(behind, limit, key=lambda end: bounds[end] + each * end)
        hi = lo + max(fitting, 1)
        yield cut_columns(columns, lo, hi)
        lo = hi


def cut_columns(source: Columns, lo: int, hi: int) -> Columns:
    """The messages from `lo` to `hi` as columns of their own."""
    start = source.bounds[lo]
    part = source.bounds[lo : hi + 1]
    if COMPILED and isinstance(part, array | memoryview):
        bounds = array("i", loops.joined_bounds([part.tobytes()], -start))
    else:
        bounds = array("i", [bound - start for bound in part] if start else part)
    payload = bytes(source.payload[start : source.bounds[hi]])
    return Columns(
        bounds,
        payload,
        array("q", source.expires[lo:hi]) if source.expires is not None else None,
        array("h", source.retries[lo:hi]) if source.retries is not None else None,
        source.reply[lo:hi] if source.reply is not None else None,
        array("q", source.due[lo:hi]) if source.due is not None else None,
        source.headers[lo:hi] if source.headers is not None else None,
    )


def slice_of(block: Messages, lo: int, hi: int, origin: bytes) -> Slice:
    """The messages from `lo` to `hi` of a block, as they were stored."""
    header = block.header
    return Slice(
        block.payload,
        block.bounds,
        lo,
        hi,
        header.first_offset,
        origin,
        header.time_us,
        block.expires,
        block.retries,
        None,
        block.reply,
        PROTOCOLS[header.protocol],
        block.headers,
    )
