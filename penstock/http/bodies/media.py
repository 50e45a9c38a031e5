"""Bodies of many messages, in any of the forms that are taken: who reads which, and where.

A large body is read in a thread: the loop goes on answering others meanwhile.

How it fails: a `Problem`; `unsupported-media-type` and `not-installed` say which forms are left.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from penstock.http.app import Call
from penstock.http.bodies.ndjson import read_ndjson
from penstock.http.bodies.parts import Parts
from penstock.http.problems import Problem
from penstock.http.route import Body
from penstock.http.schema import Schema

NDJSON: Final = "application/x-ndjson"
ARROW: Final = "application/vnd.apache.arrow.stream"

THREAD_BYTES: Final = 16 * 1024
"""A body below this is read in less time than a thread takes to hear of it."""

_MEDIA: Final[Mapping[str, Schema]] = {
    NDJSON: {"type": "string"},
    ARROW: {"type": "string", "format": "binary"},
}

BATCH_BODY: Final = Body(
    _MEDIA,
    help=(
        'NDJSON: a line for each message, {"value": text} or {"value_base64": base64}, and where wanted '
        '"ttl" (seconds), "retries" (0 to 255; 255: without end), "delay" (seconds until it is handed out), '
        '"headers" (an object of texts). '
        "Arrow: a stream with the column value (binary or string), and where wanted ttl and retries "
        "(integers, or null), delay (numbers, or null), headers (a map of strings, or null)."
    ),
)


async def read_parts(
    call: Call, *, queues: bool = False, repairs: bool = False, protocol: str = "http"
) -> Parts:
    """The messages in the body of a request. `queues`: each names its queue; `repairs`: and a dead letter."""
    media = call.media
    if media not in _MEDIA:
        named = f"the body is {media!r:.100}" if media else "the request has no Content-Type"
        raise Problem("unsupported-media-type", f"{named}; send {NDJSON} or {ARROW}")
    body = await call.body()
    options: dict[str, Any] = {
        "payload_bytes_max": call.site.payload_bytes_max,
        "queues": queues,
        "repairs": repairs,
        "protocol": protocol,
    }
    if media == ARROW:
        # Always in a thread: the first one waits for a large library.
        return await asyncio.to_thread(_read_arrow, body, bytes_max=call.site.body_bytes_max, **options)
    if len(body) < THREAD_BYTES:
        return read_ndjson(body, **options)
    return await asyncio.to_thread(read_ndjson, body, **options)


def _read_arrow(body: bytes, **options: Any) -> Parts:
    try:
        from penstock.http.bodies.arrow import read_arrow  # here, because not every broker has what it needs
    except ImportError:
        raise Problem(
            "not-installed",
            "the broker has no pyarrow to read Arrow with: pip install 'penstock[arrow]' there, or send "
            f"{NDJSON}",
        ) from None
    return read_arrow(body, **options)
