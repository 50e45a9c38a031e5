"""Offsets: how far the log of each queue can be read, where in it a moment is, and how its bytes are spread.

For those who read the log at their own pace, as Spark does; and where its files are, for those who may read
these themselves. What `GET /v1/queues` shows is how the queues stand in the broker, the messages of the last
milliseconds included; here it is what is in the files, synced, and so can be read and will never be taken
back.
"""

import asyncio
import re
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Final

from starlette.responses import Response

from penstock.http import kinds, schema
from penstock.http.app import Call, answer_json, answer_list
from penstock.http.route import AFTER, LIMIT, QUEUE, Body, Field, Param, Route
from penstock.http.schema import Schema
from penstock.log.disk import mark_of
from penstock.log.errors import LogRefused
from penstock.log.reader import LogReader
from penstock.model.rights import Right, User

NAMES_MAX: Final = 1000
RANGES_MAX: Final = 1000
CUTS_MAX: Final = 1000
CUTS_MAX_ALL: Final = 50_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MOMENT: Final = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


class Moment(kinds.Kind):
    """A time, ISO 8601 with its zone; µs since 1970, which is also what everything before it is."""

    def check(self, value: object) -> object:
        if isinstance(value, str) and _MOMENT.fullmatch(value):
            try:
                return max((datetime.fromisoformat(value) - _EPOCH) // timedelta(microseconds=1), 0)
            except ValueError:
                pass
        raise self.refuse()

    def wanted(self) -> str:
        return "a time with its zone, as in 2030-01-31T12:00:00.123456Z"

    def schema(self) -> Schema:
        return schema.TIME


SCHEMAS: Final = {
    "QueueOffsets": schema.object_of(
        {
            "name": schema.STRING,
            "offset_start": schema.said(schema.OFFSET, "The log of messages is complete from here on."),
            "offset_end": schema.said(schema.OFFSET, "The messages before this one are synced."),
            "event_start": schema.said(schema.OFFSET, "The log of events is complete from here on."),
            "event_end": schema.said(schema.OFFSET, "The events before this one are synced."),
            "identity": schema.IDENTITY,
        }
    ),
    "Cuts": schema.object_of(
        {
            "ends": schema.said(
                schema.list_of(schema.OFFSET), "The ends of the pieces, exclusive, in order."
            ),
            "bytes": schema.said(schema.list_of(schema.OFFSET), "Bytes of payload in each piece."),
        }
    ),
}


async def get_offsets(call: Call) -> Response:
    if call["queues"] is not None:
        rows = await call.site.readers.run(_named, call.user.visible(call["queues"]))
        return await answer_list("queues", rows, next=None)
    limit: int = call["limit"]
    rows = await call.site.readers.run(_page, call["after"], limit + 1, call.user)
    more = rows[limit - 1]["name"] if len(rows) > limit else None
    return await answer_list("queues", rows[:limit], next=more)


def _named(reader: LogReader, names: Sequence[str]) -> list[dict[str, Any]]:
    return [_row(reader, name) for name in dict.fromkeys(names) if reader.queue(name) is not None]


def _page(reader: LogReader, after: str | None, count: int, user: User) -> list[dict[str, Any]]:
    names = sorted(user.visible(reader.queues()))
    start = bisect_right(names, after) if after is not None else 0
    return [_row(reader, name) for name in islice(names, start, start + count)]


def _row(reader: LogReader, name: str) -> dict[str, Any]:
    facts = reader.queue(name)
    assert facts is not None
    _, *extent = facts
    fields = ("offset_start", "offset_end", "event_start", "event_end")
    return {"name": name, **dict(zip(fields, extent, strict=True)), "identity": reader.identity(name)}


async def get_offset(call: Call) -> Response:
    offset = await call.site.readers.run(_offset_at, call["queue"], call["time"], call["view"])
    if offset is None:
        # Nothing of it is synced, so that its first offset is yet to come; or there is no such queue.
        await call.site.link.call("queue", {"queue": call["queue"]})
    return answer_json({"offset": offset or 0})


def _offset_at(reader: LogReader, queue: str, time_us: int, view: str) -> int | None:
    if reader.queue(queue) is None:
        return None
    try:
        return reader.offset_at(queue, time_us, events=view == "events", living=view == "state")
    except LogRefused:  # The files were replaced, and it is not in the new ones.
        return None


async def post_cuts(call: Call) -> Response:
    fields = await call.fields()
    call.require(Right.READ, (wanted["queue"] for wanted in fields["ranges"]))
    return await answer_list("ranges", await call.site.readers.run(_cuts, fields["ranges"], fields["most"]))


def _cuts(reader: LogReader, ranges: Sequence[dict[str, Any]], most: int) -> list[dict[str, list[int]]]:
    rows: list[dict[str, list[int]]] = []
    left = CUTS_MAX_ALL
    for wanted in ranges:
        queue, start, end, size = (wanted[name] for name in _RANGE.members)
        cuts: list[tuple[int, int]] = []
        if left and reader.queue(queue) is not None:
            with suppress(LogRefused):  # The files were replaced, and it is not in the new ones.
                cuts = reader.cuts(queue, start, end, size, min(most, left))
        left -= len(cuts)
        rows.append({"ends": [cut[0] for cut in cuts], "bytes": [cut[1] for cut in cuts]})
    return rows


_RANGE: Final = kinds.Record(
    {
        "queue": kinds.QueueName(),
        "start": kinds.Whole(),
        "end": kinds.Whole(),
        "bytes": kinds.Whole(1),
    }
)


async def get_folder(call: Call) -> Response:
    path = call.site.data
    return answer_json({"path": path, "mark": await asyncio.to_thread(mark_of, path)})


ROUTES: Final = (
    Route(
        "GET /v1/folder",
        get_folder,
        Right.READ,
        "Where the files of the log are, for those who read them on the same machine.",
        schema.object_of(
            {
                "path": schema.said(schema.STRING, "The folder, where the broker runs."),
                "mark": schema.said(
                    schema.STRING,
                    "The second line of its file `lock`, by which it can be told from any other folder; "
                    "empty: there is none.",
                ),
            }
        ),
        everywhere=True,
    ),
    Route(
        "GET /v1/offsets",
        get_offsets,
        Right.READ,
        "How far the log of each queue can be read, by name. Queues of which nothing is synced are left out.",
        schema.object_of(
            {"queues": schema.list_of(schema.ref("QueueOffsets")), "next": schema.or_null(schema.STRING)}
        ),
        params=(
            Param(
                "queues",
                kinds.ListOf(kinds.QueueName(), NAMES_MAX),
                "only these, and all of them in one answer",
            ),
            AFTER,
            LIMIT,
        ),
    ),
    Route(
        "GET /v1/queues/{queue}/offset",
        get_offset,
        Right.READ,
        "The first offset from a time on; the end of what is synced where there is none.",
        schema.object_of({"offset": schema.OFFSET}),
        params=(
            QUEUE,
            Param("time", Moment(), "the time", required=True),
            Param(
                "view",
                kinds.Word(("messages", "events", "state")),
                "whether to look among messages, among events, or among what lives, which is kept while "
                "others of its time are not",
                default="messages",
            ),
        ),
        problems=("queue-not-found",),
    ),
    Route(
        "POST /v1/cuts",
        post_cuts,
        Right.READ,
        "Where to cut ranges of messages into pieces of about so many bytes, for several who read them.",
        schema.object_of({"ranges": schema.list_of(schema.ref("Cuts"))}),
        body=Body(
            fields=(
                Field(
                    "ranges",
                    kinds.ListOf(_RANGE, RANGES_MAX),
                    "offsets of queues, the end exclusive; a piece has so many bytes at most, or one message",
                    required=True,
                ),
                Field(
                    "most",
                    kinds.Whole(1, CUTS_MAX),
                    f"pieces of each range, from the first on; {CUTS_MAX_ALL} of all together",
                    default=CUTS_MAX,
                ),
            )
        ),
    ),
)
