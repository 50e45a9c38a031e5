"""EventStream: queues as they change, as server-sent events, until somebody has enough.

    event: queues
    data: {"queues":[…]}        at most `ROWS_MAX` queue objects; first of every queue, then of those
                                that have changed, about once a second; `"gone":[…]`: names of those
                                that were deleted, where there are some

    : ping                      nothing has changed for `PING_SECONDS`

Rules that always hold:
  * What is written is the newest state at the moment of writing. Nothing is gathered for a subscriber that
    reads slowly but the names of the queues that it has not seen.
  * A stream ends when its subscriber leaves, when its rights are others than they were (it can come again,
    and is told what it may see then), when the broker stops, or when nothing could be written for
    `STALL_SECONDS`: a subscriber that has gone to sleep keeps its place from nobody.

How it fails: more than `SUBSCRIBERS_MAX` at a time are refused with the problem `unavailable`.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.http.app import client_left, json_text
from penstock.http.problems import Problem
from penstock.http.watching.mirror import Changes, Mirror
from penstock.model.rights import User

SUBSCRIBERS_MAX: Final = 100
ROWS_MAX: Final = 200
SPACING_SECONDS: Final = 1.0
PING_SECONDS: Final = 15.0
STALL_SECONDS: Final = 60.0
LAST_WORDS_SECONDS: Final = 1.0
MEDIA: Final = "text/event-stream"

_PING: Final = b": ping\n\n"


class EventStream(Response):
    """An answer that never ends by itself."""

    media_type = MEDIA

    def __init__(self, mirror: Mirror, stopping: asyncio.Event, who: Callable[[], User | None]) -> None:
        """`who`: the subscriber, as it is at that moment; None: nobody any more."""
        if mirror.subscriber_count >= SUBSCRIBERS_MAX:
            raise Problem(
                "unavailable",
                f"{SUBSCRIBERS_MAX} callers listen to events already; close one, or ask for /v1/queues "
                "now and then",
                headers={"Retry-After": "10"},
            )
        # Proxies that gather answers before they pass them on are asked not to.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._mirror = mirror
        self._stopping = stopping
        self._who = who
        self._changes: Changes = mirror.subscribe()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        talking = asyncio.ensure_future(self._talk(send))
        ends = (
            asyncio.ensure_future(client_left(receive)),
            asyncio.ensure_future(self._stopping.wait()),
        )
        try:
            await asyncio.wait((talking, *ends), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._mirror.unsubscribe(self._changes)
            for task in (talking, *ends):
                task.cancel()
            await asyncio.gather(talking, *ends, return_exceptions=True)
        # A TimeoutError here is a subscriber that does not read: it is told nothing more.
        with contextlib.suppress(TimeoutError):
            if not talking.cancelled():
                talking.result()
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _talk(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        user, quiet_seconds = self._who(), 0.0
        while user is not None and self._who() == user:
            try:
                async with asyncio.timeout(SPACING_SECONDS):
                    await self._changes.wait()
            except TimeoutError:
                quiet_seconds += SPACING_SECONDS
                if quiet_seconds >= PING_SECONDS:
                    quiet_seconds = 0.0
                    await _say(send, _PING)
                continue
            quiet_seconds = 0.0
            names = user.visible(self._changes.take())
            for at in range(0, len(names), ROWS_MAX):
                if self._who() != user:
                    return
                await _say(send, self._event(names[at : at + ROWS_MAX]))
            await asyncio.sleep(SPACING_SECONDS)

    def _event(self, names: list[str]) -> bytes:
        rows = self._mirror.rows
        event = {"queues": [self._mirror.queue(name) for name in names if name in rows]}
        gone = [name for name in names if name not in rows]
        text = json_text({**event, "gone": gone} if gone else event)
        return f"event: queues\ndata: {text}\n\n".encode()


async def _say(send: Send, body: bytes) -> None:
    async with asyncio.timeout(STALL_SECONDS):
        await send({"type": "http.response.body", "body": body, "more_body": True})
