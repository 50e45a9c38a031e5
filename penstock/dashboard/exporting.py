"""Exporting: what a search finds, as a file for the browser, in the name of its visitor.

A browser asks here and not at the API, which knows tokens and no sessions; what comes is what the API says to
that visitor, as it says it. So a large file takes no memory here, and who stops the download ends the search.

How it fails: before the first bytes as the API does, with its problem; after that the download breaks off.
"""

import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from penstock.dashboard.caller import ApiError, Caller, queue_path

PATH: Final = "/export"
MEDIA: Final = {
    "ndjson": "application/x-ndjson",
    "csv": "text/csv",
    "parquet": "application/vnd.apache.parquet",
}


async def export(request: Request, api: Caller) -> Response:
    """The answer: a file."""
    words = dict(request.query_params)
    form, queue = words.pop("format", "ndjson"), words.pop("queue", "")
    if form not in MEDIA:
        return PlainTextResponse(f"There is no format {form!r:.100}; there are {', '.join(MEDIA)}.", 400)
    path = queue_path(queue, "search") if queue else "/v1/search"
    stream = api.stream("GET", path, None, {"accept": MEDIA[form]}, **{**words, "values": "full"})
    try:
        first = await anext(stream, b"")
    except ApiError as error:
        return PlainTextResponse(f"{error}\n", error.status)
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", queue).strip("._") or "messages"
    headers = {"content-disposition": f'attachment; filename="{name}.{form}"'}
    return StreamingResponse(_whole(first, stream), media_type=MEDIA[form], headers=headers)


async def _whole(first: bytes, stream: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(stream):
        yield first
        async for part in stream:
            yield part
