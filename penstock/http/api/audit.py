"""The audit, for those who may see everything: lines of the files that the first process writes.

Rule that always holds: of a file that gets another name while it is read, no line is missed, and none told
twice.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from typing import BinaryIO, Final

from starlette.responses import Response

from penstock.control.frames import Fields
from penstock.http import kinds, schema
from penstock.http.api.offsets import Moment
from penstock.http.app import Call, answer_list
from penstock.http.problems import Problem
from penstock.http.reading.looking import iso_time
from penstock.http.route import Param, Route
from penstock.model.rights import Right

FILES_MAX: Final = 100
BLOCK_BYTES: Final = 64 << 10
_TIME: Final = slice(len(b'{"time":"'), len(b'{"time":"2026-01-31T12:00:00.000Z'))

SCHEMAS: Final = {
    "AuditLine": {
        "type": "object",
        "properties": {
            "time": schema.TIME,
            "who": schema.said(schema.STRING, "The user; empty: nobody in particular."),
            "from": schema.said(schema.STRING, "Where it came from."),
            "door": schema.said(schema.STRING, "http, page, a protocol, or process: the broker itself."),
            "act": schema.STRING,
            "queue": schema.STRING,
            "result": schema.said(schema.STRING, "begun, done, or the name of what was wrong."),
            "count": schema.said(schema.COUNT, "Messages."),
            "times": schema.said(schema.COUNT, "So many more of the same, within ten seconds."),
            "call": schema.said(schema.COUNT, "The same for what was begun and how it ended."),
            "front_end": schema.said(schema.STRING, "Of a cluster with several logs: whose line it is."),
        },
        "required": ["time", "act"],
    }
}


async def get_audit(call: Call) -> Response:
    path: str | None = call.site.hello["audit"]
    if path is None:
        raise Problem("not-found", "there is no audit: it is switched off by the setting audit")
    start = b"" if call["from"] is None else iso_time(call["from"])[:-4].encode() + b"Z"
    more = None
    if call["last"] is not None:
        lines = await asyncio.to_thread(_newest, path, start, call["last"])
    else:
        lines, more = await asyncio.to_thread(_read, path, start, call["limit"])
    return await answer_list("lines", lines, next=more)


def _newest(path: str, start: bytes, count: int) -> list[Fields]:
    """The last lines, as long as they are from a time on; no more of the files is read than they take."""
    found: list[Fields] = []
    with _files(path) as files:
        for line in (line for file in files for line in _backwards(file)):
            with contextlib.suppress(ValueError):  # It was cut by a crash.
                fields = json.loads(line)
                if line[_TIME] < start or len(found) == count:
                    break
                found.append(fields)
    return found[::-1]


def _backwards(file: BinaryIO) -> Iterator[bytes]:
    at, rest = file.seek(0, os.SEEK_END), b""
    while at:
        size = min(BLOCK_BYTES, at)
        at = file.seek(at - size)
        rest, *lines = (file.read(size) + rest).split(b"\n")
        yield from reversed(lines)
    yield rest


def _read(path: str, start: bytes, limit: int) -> tuple[list[Fields], str | None]:
    """Lines from a time on, and the time of the next one; those of one moment stay together."""
    with _files(path) as files:
        while len(files) > 1 and b"" < files[-2].readline()[_TIME] < start:
            files.pop()  # All of it is older.
        for file in files:
            file.seek(0)
        return _from(files, start, limit)


def _from(files: list[BinaryIO], start: bytes, limit: int) -> tuple[list[Fields], str | None]:
    found: list[Fields] = []
    last = b""
    for line in (line for file in reversed(files) for line in file):
        moment = line[_TIME]
        if moment < start:
            continue
        try:
            fields = json.loads(line)
        except ValueError:
            continue  # It was cut by a crash.
        if len(found) >= limit and moment != last:
            return found, moment.decode()
        found.append(fields)
        last = moment
    return found, None


@contextlib.contextmanager
def _files(path: str) -> Iterator[list[BinaryIO]]:
    """All of them, newest first. Names only grow: one that has got the next is met again, and left out."""
    with contextlib.ExitStack() as stack:
        files: dict[int, BinaryIO] = {}
        for name in (path, *(f"{path}.{number}" for number in range(1, FILES_MAX))):
            if not os.path.isfile(name):
                continue  # Or it is /dev/stderr, which has no end.
            with contextlib.suppress(FileNotFoundError):
                file = stack.enter_context(open(name, "rb"))
                files.setdefault(os.fstat(file.fileno()).st_ino, file)
        yield list(files.values())


ROUTES: Final = (
    Route(
        "GET /v1/audit",
        get_audit,
        Right.ADMIN,
        "Who did what, and who was refused, oldest first.",
        schema.object_of(
            {"lines": schema.list_of(schema.ref("AuditLine")), "next": schema.or_null(schema.TIME)}
        ),
        params=(
            Param("from", Moment(), "only what was from this time on; `next` of the answer before"),
            Param("limit", kinds.Whole(1, 10_000), "about so many at most", default=1000),
            Param("last", kinds.Whole(1, 10_000), "the newest so many at most, whatever `limit` says"),
        ),
    ),
)
