"""Streams: answers that go on, put together from those of several logs.

events    all at once: events as they come, whole. It ends when one of them does, as it does when rights
          change: who listens comes again, and goes by who leads then
search    one log after the other, so that a search that was ended can be gone on with: `next` names the queue
          where it was, and so the log
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.http.app import client_left, json_text
from penstock.http.bodies.found import read_cursor
from penstock.http.problems import Problem
from penstock.http.sharding.others import Headers
from penstock.model.shards import shard_of

_LIMIT: Final = re.compile(r"[0-9]{1,10}", re.ASCII)
_SHARD: Final = re.compile(r"shard-[0-9]{1,4}", re.ASCII)
"""Where a search goes on that has ended between two logs."""

PARTS_MAX: Final = 16
"""Of an answer that lie ready before they are written."""

HEAD_SECONDS: Final = 2.0
"""How long an answer may take to begin."""

AGAIN_SECONDS: Final = 5.0
"""How long events are told where a log is missing: who comes again may hear of all."""

_EVENT_END: Final = b"\n\n"


class Streaming:
    """An answer as it comes."""

    def __init__(self, app: ASGIApp, scope: Scope) -> None:
        self._parts: asyncio.Queue[Message | None] = asyncio.Queue(PARTS_MAX)
        self._closed = False
        self._task = asyncio.ensure_future(self._run(app, scope))

    async def _run(self, app: ASGIApp, scope: Scope) -> None:
        asked = False
        never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        async def receive() -> Message:
            nonlocal asked
            if asked:
                return await never
            asked = True
            return {"type": "http.request", "body": b"", "more_body": False}

        try:
            await app(scope, receive, self._put)
        finally:
            await self._put(None)

    async def _put(self, message: Message | None) -> None:
        if not self._closed:  # Nobody would ever make room again.
            await self._parts.put(message)

    async def head(self) -> tuple[int, Headers]:
        """503 where it does not come in time."""
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                message = await self._parts.get()
        except TimeoutError:
            return 503, []
        if message is None:
            await self._task  # which has failed
            return 503, []
        return message["status"], list(message["headers"])

    async def parts(self) -> AsyncIterator[bytes]:
        while (message := await self._parts.get()) is not None:
            yield message.get("body", b"")
        await self._task

    async def close(self) -> None:
        self._closed = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def events(apps: Sequence[ASGIApp], scope: Scope, receive: Receive, send: Send) -> None:
    streams = [Streaming(app, scope) for app in apps]
    tasks: list[asyncio.Future[Any]] = []
    try:
        heads = await asyncio.gather(*(stream.head() for stream in streams))
        there = [stream for stream, (status, _) in zip(streams, heads, strict=True) if status == 200]
        refused = next((it for it, (status, _) in enumerate(heads) if status not in (200, 503)), None)
        if not there and refused is None:
            raise Problem(
                "no-leader",
                "no front-end that leads anything can be reached; try again in a second",
                headers={"Retry-After": "1"},
            )
        if refused is not None:
            status, headers = heads[refused]
            body = b"".join([part async for part in streams[refused].parts()])
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        headers = next(its for status, its in heads if status == 200)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        saying = asyncio.Lock()

        async def pass_on(stream: Streaming) -> None:
            held = b""
            async for part in stream.parts():
                whole, end, held = (held + part).rpartition(_EVENT_END)
                if end:
                    async with saying:
                        await send({"type": "http.response.body", "body": whole + end, "more_body": True})

        tasks = [asyncio.ensure_future(pass_on(stream)) for stream in there]
        tasks.append(asyncio.ensure_future(client_left(receive)))
        await asyncio.wait(
            tasks,
            timeout=None if len(there) == len(streams) else AGAIN_SECONDS,
            return_when=asyncio.FIRST_COMPLETED,
        )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *(stream.close() for stream in streams), return_exceptions=True)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def search(apps: Sequence[ASGIApp], scope: Scope, receive: Receive, send: Send) -> None:
    """`apps` are by shard."""
    going = asyncio.ensure_future(_search(apps, scope, send))
    left = asyncio.ensure_future(client_left(receive))
    try:
        await asyncio.wait((going, left), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (going, left):
            task.cancel()
        await asyncio.gather(going, left, return_exceptions=True)
    if not going.cancelled():
        going.result()


async def _search(apps: Sequence[ASGIApp], scope: Scope, send: Send) -> None:
    query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
    accept = b"".join(value for name, value in scope["headers"] if name == b"accept")
    if query.get("format", "ndjson") != "ndjson" or b"csv" in accept or b"parquet" in accept:
        raise Problem("conflict", "a file is made of one queue where a cluster has several logs: search that")
    first = _first_of(query, len(apps))
    # Nonsense is refused by the first of them.
    limit = int(query["limit"]) if _LIMIT.fullmatch(query.get("limit", "")) else None
    total = {"searched": 0, "found": 0, "missing": 0}
    end: dict[str, Any] = {"complete": True, "why": None, "next": None}
    begun = False
    for shard in range(first, len(apps)):
        its = {**query, **({} if limit is None else {"limit": str(limit - total["found"])})}
        if shard != first or _SHARD.fullmatch(its.get("after", "")):
            its.pop("after", None)
        stream = Streaming(apps[shard], {**scope, "query_string": urlencode(its).encode()})
        try:
            status, headers = await stream.head()
            if status != 200 and begun:
                # What was found is true; a search that goes on here finds the rest.
                end = {"complete": False, "why": "error", "next": f"shard-{shard}"}
                break
            if status == 503 and not headers:
                raise Problem("no-leader", f"whoever leads shard {shard} does not answer; try again")
            if not begun:
                begun = True
                kept = [it for it in headers if it[0] != b"content-length" or status != 200]
                await send({"type": "http.response.start", "status": status, "headers": kept})
            last = await _all_but_the_end(stream, send)
        finally:
            await stream.close()
        if status != 200:
            await send({"type": "http.response.body", "body": last, "more_body": False})
            return
        end = json.loads(last)["end"]
        total = {name: count + end[name] for name, count in total.items()}
        if not end["complete"] or (limit is not None and total["found"] >= limit):
            break
    if end["complete"] and shard + 1 < len(apps):
        end |= {"complete": False, "why": "limit", "next": f"shard-{shard + 1}"}
    text = json_text({"end": {**end, **total}})
    await send({"type": "http.response.body", "body": text.encode() + b"\n", "more_body": False})


def _first_of(query: Mapping[str, str], shards: int) -> int:
    """Where a search begins, or goes on."""
    after = query.get("after", "")
    if _SHARD.fullmatch(after):
        return min(int(after.removeprefix("shard-")), shards - 1)
    cursor = read_cursor(after)
    try:
        return 0 if cursor is None else shard_of(cursor.queue, shards)
    except UnicodeEncodeError:  # No queue is called so.
        return 0


async def _all_but_the_end(stream: Streaming, send: Send) -> bytes:
    """Write the lines; the last one, which says how it went, is the answer."""
    held = b""
    async for part in stream.parts():
        lines = (held + part).split(b"\n")
        # The last whole line, and what has begun behind it.
        rest = lines[-2:] if not lines[-1] and len(lines) > 1 else lines[-1:]
        whole, held = lines[: len(lines) - len(rest)], b"\n".join(rest)
        if whole:
            await send({"type": "http.response.body", "body": b"\n".join(whole) + b"\n", "more_body": True})
    return held.strip()
