"""Searching: messages of a queue, or of many, that fit; as lines of JSON, as CSV or as Parquet.

A walk in a thread (`reading/search.py`) finds and encodes them; the response hands them to the caller as fast
as it takes them, and ends the walk when the caller leaves, or takes nothing for too long (`api/log.py`).

Rules that always hold:
  * Nobody finds what they may not read: rights are asked for again with every stretch.
  * A caller has at most `SEARCHES_MAX_USER` searches at a time, and all together `SEARCHES_MAX`.
  * What is wrong is a problem, as long as nothing has been sent. After that lines of JSON end with a line
    that says so, and what has no such lines ends without its end: the connection is closed.
"""

import time
from collections.abc import Callable, Iterator
from typing import Final
from urllib.parse import quote

from starlette.responses import Response

from penstock.errors import PenstockError
from penstock.http import kinds, schema
from penstock.http.api.log import CHUNK_BYTES, Asking, StreamedResponse
from penstock.http.api.messages import REASON
from penstock.http.api.queues import NAME_CHARACTERS_MAX, chosen_names
from penstock.http.app import Call
from penstock.http.auth import forbidden
from penstock.http.bodies.found import (
    CSV,
    FORMATS,
    PARQUET,
    Encoder,
    Incomplete,
    encoder_of,
    read_cursor,
)
from penstock.http.bodies.media import NDJSON
from penstock.http.problems import Problem
from penstock.http.reading.looking import LAST_US, STATES
from penstock.http.reading.search import Cursor, Place, Search, Wanted
from penstock.http.route import QUEUE, Param, Route
from penstock.http.schema import Schema
from penstock.http.site import Site
from penstock.http.where.condition import Condition, TooLong, WhereError, parse
from penstock.http.where.read import TEXT_CHARACTERS_MAX
from penstock.http.where.tree import Relative, time_literal
from penstock.log.block import PROTOCOLS
from penstock.log.reader import LogReader
from penstock.model.rights import Right

SEARCHES_MAX_USER: Final = 4
SEARCHES_MAX: Final = 16
SECONDS: Final = 300
SECONDS_MAX: Final = 3600
PROGRESS_SECONDS: Final = 1.0
FLUSH_SECONDS: Final = 0.2
LIMIT_MAX: Final = 1_000_000_000


class PlaceKind(kinds.Kind):
    """An offset, or a time: ISO 8601, in UTC where it says no other, or so long ago."""

    def from_text(self, text: str) -> object:
        return int(text) if text.isascii() and text.isdigit() and len(text) <= 19 else text

    def check(self, value: object) -> object:
        if type(value) is int and 0 <= value <= kinds.OFFSET_MAX:
            return Place(offset=value)
        found = time_literal(value) if isinstance(value, str) else None
        if isinstance(found, Relative):
            now_us = time.time_ns() // 1000
            return Place(time_us=min(max(now_us + found.microseconds, 0), LAST_US))
        if found is not None:
            assert isinstance(found.value, int)
            return Place(time_us=max(found.value, 0))
        raise self.refuse()

    def wanted(self) -> str:
        return "an offset, or a time such as 2026-11-15, 2026-11-15T10:00:00Z, or -15m for so long ago"

    def schema(self) -> Schema:
        return {"type": "string", "minLength": 1, "maxLength": 40}


class CursorKind(kinds.Kind):
    """Where another search ended."""

    def check(self, value: object) -> object:
        found = read_cursor(value) if isinstance(value, str) else None
        if found is None:
            raise self.refuse()
        return found

    def wanted(self) -> str:
        return "`next` of a search that has ended"

    def schema(self) -> Schema:
        return {"type": "string", "minLength": 1, "maxLength": 2000, "pattern": "^[A-Za-z0-9_-]+$"}


class WhereKind(kinds.Kind):
    """A condition; see docs/where.md."""

    def check(self, value: object) -> object:
        if not isinstance(value, str):
            raise self.refuse()
        try:
            return parse(value)
        except WhereError as error:
            raise Problem("bad-request", str(error), position=error.position) from None

    def wanted(self) -> str:
        return "a condition, as in reason = 'rejected'"

    def schema(self) -> Schema:
        return {"type": "string", "minLength": 1, "maxLength": TEXT_CHARACTERS_MAX}


# --- handlers --------------------------------------------------------------------------------------


async def search_queue(call: Call) -> Response:
    queue: str = call["queue"]
    after: Cursor | None = call["after"]
    if after is not None and after.queue != queue:
        raise Problem("bad-request", f"query parameter 'after': it is of a search of queue {after.queue!r}")
    return await _answer(call, [queue], queue)


async def search_queues(call: Call) -> Response:
    mirror = call.site.mirror
    await mirror.refresh()
    names = await chosen_names(mirror.names, call["queues"], None, len(mirror.names), call.user)
    return await _answer(call, names, None)


async def _answer(call: Call, queues: list[str], one: str | None) -> Response:
    media = _media(call)
    exports = media != NDJSON
    after: Cursor | None = call["after"]
    if after is not None and after.newest != call["newest"]:
        raise Problem("bad-request", "query parameter 'after': it is of a search in the other direction")
    site, user = call.site, call.user.name
    condition: Condition | None = call["where"]
    wanted = Wanted(
        queues,
        condition,
        frozenset(call["state"] or STATES),
        call["from"] or Place(),
        call["to"] or Place(),
        call["limit"],
        call["newest"],
        after,
    )
    seconds = call["timeout"] or (SECONDS_MAX if exports else SECONDS)
    search = Search(
        wanted,
        Asking(site),
        now_us=time.time_ns() // 1000,
        deadline=time.monotonic() + seconds,
        check=lambda queue: _check(call, queue),
        stops=site.stopping.is_set,
    )
    values = call["values"] or ("full" if exports else "cut")
    release = take_turn(site, user)
    stream = site.readers.stream(
        _walk, search, Asking(site), one, lambda: encoder_of(media, values, call["spreadsheet"])
    )
    try:
        await anext(stream)
    except BaseException as error:
        await stream.aclose()
        release()
        if isinstance(error, TooLong):
            raise Problem("bad-request", str(error)) from None
        raise
    headers = {"Content-Disposition": _disposition(one or "messages", media)}
    what = f"search of {one!r}" if one is not None else "search of many queues"
    return StreamedResponse(stream, media, headers, what, lambda: _check(call, one), release)


def _check(call: Call, queue: str | None) -> None:
    """Rights are those of now; without a queue, somebody must still be there."""
    user = call.user_now
    if user is None or (queue is not None and not user.may(Right.READ, queue)):
        raise forbidden(call.user, Right.READ, queue)


def take_turn(site: Site, user: str) -> Callable[[], None]:
    """One more search of a user; what to call when it has ended."""
    running = site.searches
    if running[user] >= SEARCHES_MAX_USER:
        raise _too_many(f"{SEARCHES_MAX_USER} searches of yours are running")
    if running.total() >= SEARCHES_MAX:
        raise _too_many(f"{SEARCHES_MAX} searches are running, of all users together")
    running[user] += 1

    def release() -> None:
        running[user] -= 1
        if not running[user]:
            del running[user]

    return release


def _too_many(what: str) -> Problem:
    return Problem(
        "too-many-searches",
        f"{what}, which is the most; wait until one has ended, or end it by closing its connection",
        headers={"Retry-After": "5"},
    )


def _media(call: Call) -> str:
    """The form that is wanted: by name, or the first that `Accept` names; else lines of JSON."""
    if call["format"] is not None:
        return FORMATS[call["format"]]
    accept = call.request.headers.get("accept", "")
    named = (part.partition(";")[0].strip().lower() for part in accept.split(","))
    return next((media for media in named if media in FORMATS.values()), NDJSON)


def _disposition(name: str, media: str) -> str:
    suffix = next(word for word, its_media in FORMATS.items() if its_media == media)
    file = f"{name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.{suffix}"
    plain = "".join(it if it.isascii() and (it.isalnum() or it in "._-") else "_" for it in file)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(file, safe='')}"


# --- in a thread -----------------------------------------------------------------------------------


def _walk(
    reader: LogReader,
    search: Search,
    asking: Asking,
    queue: str | None,
    encoder_for: Callable[[], Encoder],
) -> Iterator[bytes]:
    """Nothing, when it is known that this can be answered; then the answer in parts, some of them empty."""
    if queue is not None and reader.queue(queue) is None:
        asking.check_queue(queue)  # It is there, but nothing of it is synced.
    encoder = encoder_for()
    walk = search.walk(reader)
    first = next(walk, None)
    yield b""
    now = time.monotonic()
    told = flushed = now
    parts = [encoder.head()]
    size = 0
    error: PenstockError | None = None
    try:
        items = first
        while items is not None:
            parts.append(encoder.items(items))
            now = time.monotonic()
            if now >= told + PROGRESS_SECONDS:
                parts.append(encoder.progress(search))
                told = now
            size += len(parts[-1])
            if size >= CHUNK_BYTES or now >= flushed + FLUSH_SECONDS:
                yield b"".join(parts)
                parts, size, flushed = [], 0, now
            items = next(walk, None)
    except Incomplete:
        raise
    except PenstockError as failure:
        error = failure
    parts.append(encoder.end(search, error))
    yield b"".join(parts)


# --- the table -------------------------------------------------------------------------------------

FOUND: Final[dict[str, Schema]] = {
    "queue": schema.STRING,
    "offset": schema.OFFSET,
    "id": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    "state": schema.said(
        schema.words(*STATES), "A dead letter that somebody holds is dead, with a consumer."
    ),
    "timestamp": schema.said(schema.TIME, "When it was accepted."),
    "expires": schema.said(schema.or_null(schema.TIME), "When it expires; null: never, or it is gone."),
    "due": schema.said(schema.or_null(schema.TIME), "Until when it is delayed; null: it is not."),
    "retries": schema.said(
        schema.or_null(schema.COUNT), "What is left of its retry counter; null: none, or it is gone."
    ),
    "attempts": schema.said(schema.or_null(schema.COUNT), "Deliveries so far; null where it is gone."),
    "reason": schema.said(REASON, "Why it is dead; null: it is not."),
    "why": schema.said(schema.or_null(schema.STRING), "What was said when it was rejected; null: nothing."),
    "died": schema.said(
        schema.or_null(schema.TIME), "When it died; null: it is not dead, or somebody holds it."
    ),
    "consumer": schema.said(schema.or_null(schema.STRING), "Who holds it; null: nobody."),
    "protocol": schema.said(schema.words(*PROTOCOLS), "The door that it came through."),
    "repaired": schema.said(schema.BOOLEAN, "Whether its payload is another than it was sent with."),
    "headers": {"type": "object", "additionalProperties": schema.STRING},
    "value_bytes": schema.said(schema.COUNT, "The length of its payload."),
    "value": schema.said(schema.STRING, "Its payload, where it is UTF-8."),
    "value_base64": {"type": "string", "contentEncoding": "base64", "description": "Where it is not."},
    "cut": schema.said(schema.BOOLEAN, "There, and true, where value is only the beginning of its payload."),
}

SCHEMAS: Final = {
    "FoundMessage": schema.object_of(FOUND, optional=("value", "value_base64", "cut")),
    "SearchProgress": schema.object_of(
        {
            "queue": schema.STRING,
            "offset": schema.OFFSET,
            "searched": schema.said(schema.COUNT, "Messages that were looked at, or passed over by state."),
            "total": schema.said(schema.COUNT, "About so many there are."),
            "found": schema.COUNT,
        }
    ),
    "SearchMissing": schema.object_of(
        {
            "queue": schema.STRING,
            "first": schema.OFFSET,
            "end": schema.said(schema.OFFSET, "Exclusive."),
            "why": schema.words("retention", "damaged", "deleted"),
        }
    ),
    "SearchEnd": schema.object_of(
        {
            "complete": schema.said(schema.BOOLEAN, "Whether all that was asked for was looked at."),
            "why": schema.said(
                schema.or_null(schema.words("limit", "time", "missing", "stopping", "error")), "Why not."
            ),
            "searched": schema.COUNT,
            "found": schema.COUNT,
            "missing": schema.said(schema.COUNT, "Messages that could not be looked at."),
            "next": schema.said(schema.or_null(schema.STRING), "To go on there: `after` of the next search."),
            "detail": schema.said(schema.STRING, "Where why is error: what is wrong."),
        },
        optional=("detail",),
    ),
}

WHERE: Final = Param("where", WhereKind(), "a condition that is true of them; see docs/where.md")
_STATE: Final = kinds.ListOf(kinds.Word(STATES), len(STATES), unique=True)

_PARAMS: Final = (
    WHERE,
    Param("state", _STATE, "only messages in these states; absent: in any"),
    Param("from", PlaceKind(), "only from this offset or time on"),
    Param("to", PlaceKind(), "only before this offset or time"),
    Param("limit", kinds.Whole(1, LIMIT_MAX), "the most messages in one answer; absent: all"),
    Param(
        "newest",
        kinds.Flag(),
        "the newest first; of many queues: of each, queue after queue",
        default=False,
    ),
    Param(
        "timeout",
        kinds.Seconds(0.1, SECONDS_MAX),
        f"after so many seconds it ends; absent: {SECONDS}, of CSV and Parquet {SECONDS_MAX}",
    ),
    Param("after", CursorKind(), "go on where a search ended: its `next`, with the same other parameters"),
    Param(
        "values",
        kinds.Word(("cut", "full", "none")),
        "payloads: cut where they are long, whole, or none; absent: cut, in CSV and Parquet full",
    ),
    Param("format", kinds.Word(tuple(FORMATS)), "the form of the answer, whatever Accept says"),
    Param(
        "spreadsheet",
        kinds.Flag(),
        "of CSV: put a ' before what a spreadsheet would take for a formula, which changes it",
        default=False,
    ),
)
_MEDIA: Final[dict[str, Schema]] = {
    CSV: {"type": "string"},
    PARQUET: {"type": "string", "format": "binary"},
}
_SUMMARY: Final = (
    "in the states and the time that are asked for, as they are found: a line (FoundMessage) for each, about "
    'once a second {"progress": SearchProgress}, {"missing": SearchMissing} for what could not be looked at, '
    'and at last {"end": SearchEnd}. Close the connection to break it off.'
)
_ANSWER_HEADERS: Final = {"Content-Disposition": "A name for a file."}

ROUTES: Final = (
    Route(
        "GET /v1/queues/{queue}/search",
        search_queue,
        Right.READ,
        f"Find messages of a queue that a condition is true of, {_SUMMARY}",
        {"type": "string"},
        params=(QUEUE, *_PARAMS),
        problems=("queue-not-found", "queue-deleted", "not-installed", "too-many-searches"),
        answer_media=NDJSON,
        other_media=_MEDIA,
        answer_headers=_ANSWER_HEADERS,
        streams=True,
    ),
    Route(
        "GET /v1/search",
        search_queues,
        Right.READ,
        f"Find messages of many queues, one after the other, that a condition is true of, {_SUMMARY}",
        {"type": "string"},
        params=(
            Param(
                "queues",
                kinds.Text("a pattern of names: * stands for any characters, ? for one", NAME_CHARACTERS_MAX),
                "only queues whose whole name fits this pattern; absent: all that one may read",
            ),
            *_PARAMS,
        ),
        problems=("queue-deleted", "not-installed", "too-many-searches"),
        answer_media=NDJSON,
        other_media=_MEDIA,
        answer_headers=_ANSWER_HEADERS,
        streams=True,
    ),
)
