"""Sending: one message, or many of which all are stored or none is. Answered when they are durable.

What fits in one block of the log is appended; a block is written whole or not at all. What does not, and
what has an Idempotency-Key, is a transaction.

How it fails: as every call; and where the first process does not answer, nobody knows what it has stored,
which the problem says together with what to do.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple, NoReturn

from starlette.responses import Response

from penstock.control.batches import pack_batch
from penstock.http import kinds, schema
from penstock.http.app import Call, answer_json
from penstock.http.bodies.media import BATCH_BODY, read_parts
from penstock.http.bodies.parts import DELAY, too_large
from penstock.http.link import CallRefused
from penstock.http.problems import Problem
from penstock.http.route import QUEUE, Body, Param, Route
from penstock.http.stages.idempotency import HEADER, KEY, check_same, transaction_key
from penstock.log.columns import TTL_SECONDS_MAX, stored_bytes
from penstock.model.batch import Batch
from penstock.model.headers import encode_headers
from penstock.model.ids import id_of
from penstock.model.rights import Right
from penstock.model.timers import SECOND_US

PROTOCOL: Final = "http"
HEADER_PREFIX: Final = b"penstock-header-"
"""What stands before the names of a message's headers; names arrive in lower case."""

SEND_PATH: Final = "/v1/queues/{queue}/messages"

IN_DOUBT: Final = ("unavailable", "failed")
"""Kinds of no that leave it open what was stored."""

SCHEMAS: Final = {
    "Receipt": schema.object_of({"offset": schema.OFFSET, "id": schema.STRING, "repeated": schema.BOOLEAN}),
    "BatchReceipt": schema.object_of(
        {
            "count": schema.INTEGER,
            "offset_start": schema.OFFSET,
            "offset_end": schema.OFFSET,
            "id_first": schema.STRING,
            "repeated": schema.BOOLEAN,
        }
    ),
}


class Stored(NamedTuple):
    """Where messages are now."""

    first: int
    end: int
    origin: bytes
    repeated: bool  # and were before


async def send_message(call: Call) -> Response:
    body = await call.body()
    if len(body) > call.site.payload_bytes_max:
        raise too_large(f"queue {call['queue']!r}", len(body), call.site.payload_bytes_max)
    ttl, retries, delay_us = call["ttl"], call["retries"], round(call["delay"] * SECOND_US)
    headers = _headers(call.request.headers.raw)
    batch = Batch.of(
        [body],
        ttl_seconds=None if ttl is None else [ttl],
        retries=None if retries is None else [retries],
        protocol=PROTOCOL,
        delay_us=[delay_us] if delay_us else None,
        headers=[headers] if headers else None,
    )
    stored = await _store(call, batch)
    return answer_json(
        {
            "offset": stored.first,
            "id": id_of(stored.origin, stored.first).decode(),
            "repeated": stored.repeated,
        }
    )


def _headers(sent: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The headers of the message among those of the request, encoded."""
    headers: dict[str, str] = {}
    for name, value in sent:
        if name.startswith(HEADER_PREFIX):
            try:
                named, text = name.removeprefix(HEADER_PREFIX).decode(), value.decode()
            except UnicodeDecodeError:
                raise Problem(
                    "bad-request", f"header {name.decode(errors='replace')!r} is not UTF-8"
                ) from None
            if named in headers:
                raise Problem(
                    "bad-request", f"header {name.decode()!r} is there twice; a message has it once"
                )
            headers[named] = text
    try:
        return encode_headers(headers)
    except ValueError as error:
        raise Problem("bad-request", str(error)) from None


async def send_batch(call: Call) -> Response:
    ((_, batch),) = await read_parts(call, protocol=PROTOCOL)
    stored = await _store(call, batch)
    return answer_json(
        {
            "count": stored.end - stored.first,
            "offset_start": stored.first,
            "offset_end": stored.end,
            "id_first": id_of(stored.origin, stored.first).decode(),
            "repeated": stored.repeated,
        }
    )


async def _store(call: Call, batch: Batch) -> Stored:
    """The messages are durable when this returns."""
    queue: str = call["queue"]
    key: str = call[HEADER] or ""
    fields, buffers = pack_batch(batch)
    try:
        if not key and (len(batch) == 1 or stored_bytes(batch) <= call.site.hello["block_bytes"]):
            done = (await call.site.link.call("append", {"queue": queue, "batch": fields}, *buffers)).fields
            return Stored(done["first"], done["end"], done["origin"].encode(), repeated=False)
        parts = [{"queue": queue, "batch": fields}]
        done = (
            await call.site.link.call(
                "transact", {"key": transaction_key(queue, key), "parts": parts}, *buffers
            )
        ).fields
    except CallRefused as refusal:
        _raise(refusal, queue, key)
    ((_, first, end, origin),) = done["stored"]
    if first == end:
        raise Problem(
            "queue-deleted",
            f"queue {queue!r}: what came with this {HEADER} was stored, and the queue was deleted since; "
            f"use a new key to send it again",
        )
    if done["repeated"]:
        await check_same(call.site.readers, queue, first, end, batch)
    return Stored(first, end, origin.encode(), done["repeated"])


def _raise(refusal: CallRefused, queue: str, key: str) -> NoReturn:
    if refusal.kind not in IN_DOUBT:
        raise refusal
    raise in_doubt(refusal, queue, key) from None


def in_doubt(refusal: CallRefused, queue: str, key: str = "") -> Problem:
    now = (
        f"send it again with the same {HEADER}, which is safe"
        if key
        else f"sent again it may be stored twice; an {HEADER} makes that safe"
    )
    return Problem(
        "unavailable",
        f"queue {queue!r}: {refusal}. It is not known whether this was stored: {now}",
        headers={"Retry-After": "1"},
    )


_FULL: Final = ("queue-full", "disk-full", "key-reused", "conflict")

ROUTES: Final = (
    Route(
        f"POST {SEND_PATH}",
        send_message,
        Right.SEND,
        "Send one message: the body, whatever it is, and headers as Penstock-Header-NAME: value. Answered "
        "when it is durable.",
        schema.ref("Receipt"),
        params=(
            QUEUE,
            Param("ttl", kinds.Whole(1, TTL_SECONDS_MAX), "seconds until it expires; without: never"),
            Param(
                "retries",
                kinds.Whole(0, 255),
                "delivered at most 1 + so many times; 255: no bound; without: max-deliveries of the queue",
            ),
            Param("delay", DELAY, "seconds until it is handed out", default=0),
            KEY,
        ),
        body=Body({"*/*": {}}, required=False, help="The message, as it is."),
        problems=_FULL,
    ),
    Route(
        "POST /v1/queues/{queue}/batch",
        send_batch,
        Right.SEND,
        "Send many messages: all of them are stored, or none is. Answered when they are durable.",
        schema.ref("BatchReceipt"),
        params=(QUEUE, KEY),
        body=BATCH_BODY,
        problems=(*_FULL, "unsupported-media-type", "not-installed"),
    ),
)
